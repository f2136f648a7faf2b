"""Reads a `mask_function` of transformers: what it shows of each key, told by what it does with stand-ins for indices.

A function is called once with objects that stand for the entry of the batch, the head, the query and the key. What
masks are made of has a meaning in intervals of positions: an order or a distance of query and key, a chunk that both
are in, an equal entry of a table, and, or. Whatever else a function does with a stand-in is unknown, and so is the
function. Nothing that a compiler hides is needed, such as the function's closure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flashmask_hf.ops import device_assert

__all__ = ["FAR", "Shown", "Sight", "document_starts", "next_true", "read"]

FAR = 2**30  # past every position; the sum of two fits int32
_INTEGERS = (torch.int64, torch.int32)


def read(function: Callable[..., Any], sight: Sight) -> Shown | None:
    """What a function shows, told by what it does with stand-ins for positions; None if that does not tell.

    Raises:
        RuntimeError: tables that the function looks into do not fit into intervals (a device-side check).
    """
    query, key = _Position(sight, of_query=True), _Position(sight, of_query=False)
    try:
        with _Lookups():
            seen = function(_Entry(sight), _Symbol(sight), query, key).shown()
    except Exception:  # of any kind, for the function expects tensors
        seen = None
    if seen is None or seen.positions is not None:
        return None
    for condition, message in sight.conditions:
        device_assert(condition, message)
    return seen


class Sight:
    """One reading of a function: where keys stand, and what must be true of the tables that it looks into."""

    def __init__(self, batch_size: int, key: Tensor, square: bool, custom: bool):
        self.batch_size = batch_size
        self.key = key  # positions, int64 [Skv]
        self.square = square  # whether queries and keys are the same tokens
        self.custom = custom  # whether a caller brought a function of its own (transformers then asks for vmap)
        self.conditions: list[tuple[Tensor, str]] = []  # bool [], and what to say where it is False

    def require(self, condition: Tensor, what: str) -> None:
        """Have `condition` hold throughout, or the reading is void."""
        message = f"{what}, which the mask's columns cannot hold; use attn_implementation='sdpa' for this model"
        self.conditions.append((condition.all(), message))


class _Unknown(Exception):
    """A function did with a stand-in what has no meaning in intervals."""


class _Lookups(TorchFunctionMode):
    """Lets stand-ins be the index of a table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            if isinstance(index, _Entry):
                return _EntryValue(index.sight, table)
            if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], _Position):
                return index[1].looked_up(table, index[0])
        return func(*args, **(kwargs or {}))


class _Symbol:
    """Stands in for a tensor of indices, or for what a function makes of one. What it does not define is unknown."""

    device = None

    def __init__(self, sight: Sight):
        self.sight = sight

    def shown(self) -> Shown:
        raise _Unknown

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def __and__(self, other: Any) -> Any:
        return self.shown() & other

    def __or__(self, other: Any) -> Any:
        return self.shown() | other

    def __bool__(self) -> bool:
        raise _Unknown

    def __eq__(self, other: Any) -> Any:
        raise _Unknown

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class _Entry(_Symbol):
    """The entry of the batch."""


class _EntryValue(_Symbol):
    """What a table [B] holds for the entry."""

    def __init__(self, sight: Sight, table: Tensor):
        super().__init__(sight)
        if table.dim() != 1 or table.shape[0] != sight.batch_size or table.dtype not in _INTEGERS:
            raise _Unknown
        self.table = table


class _Position(_Symbol):
    """Positions of the queries or of the keys, or what a table [B, S] holds there; plus a shift, less an entry's value.

    A table that is calculated with holds positions, which count on by one within a document.
    """

    def __init__(
        self, sight: Sight, of_query: bool, table: Tensor | None = None, shift: int = 0, less: Tensor | None = None
    ):
        super().__init__(sight)
        self.of_query, self.table, self.shift, self.less = of_query, table, shift, less

    def new_ones(self, *_: Any, **__: Any) -> _Everything:
        return _Everything(self.sight)

    def new_zeros(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing(self.sight)

    def looked_up(self, table: Tensor, entry: Any) -> _Position:
        if not isinstance(entry, _Entry) or self.table is not None or not self.is_plain():
            raise _Unknown
        if table.dim() != 2 or table.shape[0] != self.sight.batch_size or table.dtype not in _INTEGERS:
            raise _Unknown
        return _Position(self.sight, self.of_query, table)

    def is_plain(self) -> bool:
        return self.less is None and self.shift == 0

    def __add__(self, other: Any) -> _Position:
        return _Position(self.sight, self.of_query, self.table, self.shift + _whole(other), self.less)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _EntryValue) and self.less is None:
            return _Position(self.sight, self.of_query, self.table, self.shift, other.table)
        if isinstance(other, _Position):
            self.expect_other_side(other)
            return _Distance(self, self.of_query, self.shift - other.shift)
        return _Position(self.sight, self.of_query, self.table, self.shift - _whole(other), self.less)

    def __floordiv__(self, size: Any) -> _Chunk:
        if _whole(size) <= 0:
            raise _Unknown
        return _Chunk(self, size)

    def __le__(self, other: Any) -> Any:
        self.expect_other_side(other)
        return self - other <= 0

    def __lt__(self, other: Any) -> Any:
        self.expect_other_side(other)
        return self - other < 0

    def __gt__(self, other: Any) -> Any:
        self.expect_other_side(other)
        return self - other > 0

    def __ge__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0 and self.is_plain():
            return _Everything(self.sight) if self.table is None else _NotNegative(self.sight, self.table)
        self.expect_other_side(other)
        return self - other >= 0

    def __eq__(self, other: Any) -> Any:
        self.expect_other_side(other)
        if self.table is None or not self.is_plain() or not other.is_plain():
            raise _Unknown
        return _Same(self.sight, self.table)

    def expect_other_side(self, other: Any) -> None:
        """Raise unless one is of queries, the other of keys, and both count from the same point."""
        if not isinstance(other, _Position) or other.of_query == self.of_query:
            raise _Unknown
        if other.table is not self.table or other.less is not self.less:
            raise _Unknown

    def positions(self) -> Tensor | None:
        """The table, to be read as positions of the same tokens."""
        if self.table is not None and not self.sight.square:
            raise _Unknown
        return self.table


def _whole(number: Any) -> int:
    if not isinstance(number, int):
        raise _Unknown
    return number


class _Distance(_Symbol):
    """Query less key (`forward`) or key less query, plus a shift. What `like` counts makes no difference to it."""

    def __init__(self, like: _Position, forward: bool, shift: int):
        super().__init__(like.sight)
        self.like, self.forward, self.shift = like, forward, shift

    def __le__(self, other: Any) -> Shown:
        most = _whole(other) - self.shift
        return self._before(most + 1) if self.forward else self._since(-most)

    def __ge__(self, other: Any) -> Shown:
        least = _whole(other) - self.shift
        return self._since(least) if self.forward else self._before(1 - least)

    def __lt__(self, other: Any) -> Shown:
        return self <= _whole(other) - 1

    def __gt__(self, other: Any) -> Shown:
        return self >= _whole(other) + 1

    def __neg__(self) -> _Distance:
        return _Distance(self.like, not self.forward, -self.shift)

    def __abs__(self) -> _Reach:
        return _Reach(self)

    def _since(self, shift: int) -> Shown:
        """Queries at the key's position + shift and later."""
        start, positions = self.sight.key + shift, self.like.positions()
        return Shown(self.sight, start, torch.full_like(start, FAR), shift <= 0, shift == 0, positions=positions)

    def _before(self, shift: int) -> Shown:
        """Queries before the key's position + shift."""
        end, positions = self.sight.key + shift, self.like.positions()
        return Shown(self.sight, torch.full_like(end, -FAR), end, shift > 0, positions=positions)


class _Reach(_Symbol):
    """How far query and key are apart."""

    def __init__(self, distance: _Distance):
        super().__init__(distance.sight)
        self.distance = distance

    def __le__(self, other: Any) -> Any:
        return (self.distance <= other) & (self.distance >= -_whole(other))

    def __lt__(self, other: Any) -> Any:
        return self <= _whole(other) - 1


class _Chunk(_Symbol):
    """The number of the chunk of `size` positions."""

    def __init__(self, position: _Position, size: int):
        super().__init__(position.sight)
        self.position, self.size = position, size

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Chunk) or other.size != self.size or other.position.shift != self.position.shift:
            raise _Unknown
        self.position.expect_other_side(other.position)
        positions, less = self.position.positions(), self.position.less
        counted = self.sight.key if positions is None else positions
        origin = -self.position.shift if less is None else less[:, None] - self.position.shift
        start = (counted - origin).div(self.size, rounding_mode="floor") * self.size + origin
        if positions is not None:
            start = start + self.sight.key - positions
        return Shown(self.sight, start, start + self.size, reflexive=True, positions=positions)


class _NotNegative(_Symbol):
    """Whether a table holds 0 or more."""

    def __init__(self, sight: Sight, table: Tensor):
        super().__init__(sight)
        self.table = table


class _Same(_Symbol):
    """Whether a table holds the same for query and key."""

    def __init__(self, sight: Sight, table: Tensor):
        super().__init__(sight)
        self.table = table
        self.joined = table[:, 1:] == table[:, :-1]

    def __and__(self, other: Any) -> Any:
        if isinstance(other, _NotNegative) and other.table is self.table:
            return self._blocks()
        return self.shown() & other

    def shown(self) -> Shown:
        """Documents: tokens of one id see each other, and stand in one run."""
        if not self.sight.square or self.sight.custom:
            raise _Unknown
        ids = self.table
        self.sight.require(ids[:, 1:] >= ids[:, :-1], "the ids of packed documents do not ascend")
        start, end = _runs(self.joined)
        return Shown(self.sight, start, end, reflexive=True, joined=self.joined)

    def _blocks(self) -> Shown:
        """Tokens of one id of 0 or more see each other, and stand in one run; others see nothing."""
        blocks = self.table
        first, end = _runs(self.joined)
        row = torch.arange(blocks.shape[-1], device=blocks.device)
        ids = torch.where((first == row) & (blocks >= 0), blocks, -1 - row).sort(-1).values
        what = "tokens of one block (equal block_sequence_ids) are not next to each other"
        self.sight.require(ids[:, 1:] != ids[:, :-1], what)
        first, end = torch.where(blocks >= 0, first, FAR), torch.where(blocks >= 0, end, -FAR)
        return Shown(self.sight, first[:, self.sight.key], end[:, self.sight.key], reflexive=True)


class _Everything(_Symbol):
    """True of every query and key."""

    def __and__(self, other: Any) -> Any:
        return other

    def __or__(self, other: Any) -> Any:
        return self

    def shown(self) -> Shown:
        far = torch.full_like(self.sight.key, FAR)
        return Shown(self.sight, -far, far, reflexive=True)


class _Nothing(_Symbol):
    """What a union begins with."""

    def __or__(self, other: Any) -> Any:
        return other


class Shown(_Symbol):
    """Positions [start, end) of the queries that see each key, int64 broadcastable to [B, Skv]."""

    def __init__(
        self,
        sight: Sight,
        start: Tensor,
        end: Tensor,
        reflexive: bool,
        from_self: bool = False,
        joined: Tensor | None = None,
        positions: Tensor | None = None,
    ):
        super().__init__(sight)
        self.start, self.end = start, end
        # Whether each holds the key's own position or is [FAR, -FAR), nothing. Unions of such are intervals again.
        self.reflexive = reflexive
        self.from_self = from_self  # whether start is the key's own position
        self.joined = joined  # bool [B, S - 1]: intervals do not pass positions 1..S-1 where this is False
        self.positions = positions  # int [B, S]: who sees a key is not known beyond where these do not count on by one

    def shown(self) -> Shown:
        """Itself."""
        return self

    def __and__(self, other: Any) -> Any:
        if isinstance(other, _Everything):
            return self
        other = other.shown()
        joined = other.joined if self.joined is None else self.joined
        positions = other.positions if self.positions is None else self.positions
        if other.positions is not None and other.positions is not positions:
            raise _Unknown
        if joined is not None and positions is not None:
            counts_on = positions[:, 1:] == positions[:, :-1] + 1
            self.sight.require(~joined | counts_on, "positions do not count on within a document")
            positions = None
        return Shown(
            self.sight,
            torch.maximum(self.start, other.start),
            torch.minimum(self.end, other.end),
            self.reflexive and other.reflexive,
            (self.from_self and other.reflexive) or (other.from_self and self.reflexive),
            joined,
            positions,
        )

    def __or__(self, other: Any) -> Any:
        if isinstance(other, _Everything):
            return other
        other = other.shown()
        if not self.reflexive or not other.reflexive or other.positions is not self.positions:
            raise _Unknown
        return Shown(
            self.sight,
            torch.minimum(self.start, other.start),
            torch.maximum(self.end, other.end),
            True,
            self.from_self and other.from_self,
            positions=self.positions,
        )


def _runs(joined: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last position of the run that each position is in; int64 [B, S] each.

    Args:
        joined: bool [B, S - 1], whether the positions 1..S-1 belong to the run of the position before.
    """
    position = torch.arange(joined.shape[-1] + 1, device=joined.device)
    begins = nn.functional.pad(~joined, (1, 0), value=True)
    return torch.where(begins, position, 0).cummax(-1).values, next_true(~joined)


def document_starts(position_ids: Tensor) -> Tensor:
    """Where positions start again at 0: bool of the shape of `position_ids`, [B, S].

    Nowhere in a row that has no other position: models that place their tokens otherwise pass such.
    """
    first = position_ids == 0
    return first & ~first.all(-1, keepdim=True)


def next_true(flags: Tensor) -> Tensor:
    """For each position 0..S-1 the first later one that is flagged, S if none.

    Args:
        flags: bool [B, S - 1], of the positions 1..S-1.

    Returns:
        int64 [B, S].
    """
    length = flags.shape[-1] + 1
    row = torch.arange(1, length + 1, device=flags.device)
    flagged = nn.functional.pad(flags, (0, 1), value=True)
    return torch.where(flagged, row, length).flip(-1).cummin(-1).values.flip(-1)
