"""Symbolic tracing of a `mask_function` of transformers into intervals of queries per key.

The function is called once with symbols in place of the indices of batch entry, head, query and key. An order or a
distance of query and key, a chunk that both are in, an equal value in a table, and conjunctions and unions of these are
intervals of rows. Any other operation on a symbol makes the function untraceable.

For a causal window of 4 tokens:

    def window(b, h, q, k):
        return (k > q - 4) & (k <= q)

    q, k            _Number          symbols of the positions of queries and keys
    q - 4           _Number          the same with shift -4
    k > q - 4       _Number >= 1     k - q + 4, compared with an integer, gives Rows(hi=4)
    k <= q          Rows(lo=0)
    ... & ...       Rows(lo=0, hi=4)

The hook clamps the rows to 0..S and writes them as mask indices: LTS = min(k + 4, S). A table lookup `ids[b, q]` gives
a `_Number` with a table, `ids[b, q] == ids[b, k]` an `_Ids`, and `k // 8 == q // 8` the rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashmask_hf.hf.documents import UNBOUNDED, run_bounds
from flashmask_hf.torch_internals import device_assert

__all__ = ["Rows", "TraceContext", "trace"]


def trace(mask_function: Callable[..., Any], context: TraceContext) -> Rows | None:
    """Return the queries that a function lets see each key, or None if it cannot be traced.

    Raises:
        RuntimeError: tables that the function looks into do not fit into intervals (a device-side check).
    """
    batch, head, query, key = (_Number(context, of) for of in "bhqk")
    try:
        with _TableLookups():
            visible = mask_function(batch, head, query, key).rows()
    except Exception:  # the function expects tensors, so symbols may fail in any way
        return None
    if visible.positions is not None:
        return None
    for condition, message in context.assertions:
        device_assert(condition, message)
    return visible


@dataclass(eq=False)
class TraceContext:
    """State of one trace: the keys, and the assertions on tables.

    Attributes:
        batch_size: number of batch entries, B.
        key_positions: int64 [Skv].
        same_tokens: whether queries and keys are the same tokens.
        is_custom: whether the function is a caller's own, for which transformers asks for vmap.
        assertions: bool [] and the message where it is False.
    """

    batch_size: int
    key_positions: Tensor
    same_tokens: bool
    is_custom: bool
    assertions: list[tuple[Tensor, str]] = field(default_factory=list)

    @property
    def has_documents(self) -> bool:
        """Whether tables hold documents, or positions in documents."""
        return self.same_tokens and not self.is_custom

    def require(self, condition: Tensor, violation: str) -> None:
        """Assert on the device that `condition` holds throughout, once the trace has succeeded."""
        message = f"{violation}, which the mask's columns cannot hold; use attn_implementation='sdpa' for this model"
        self.assertions.append((condition.all(), message))


class _Untraceable(Exception):
    """Error of an operation on a symbol that has no meaning in intervals."""


class _TableLookups(TorchFunctionMode):
    """Mode in which symbols index tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            if isinstance(index, _Number):
                return index.look_up(table, "b")
            if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], _Number):
                index[0].look_up(table, "b")
                return index[1].look_up(table, "qk")
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Symbol:
    """Symbol of an index tensor, or of a value computed from one."""

    context: TraceContext
    device: ClassVar[None] = None

    def rows(self) -> Rows:
        """Return the symbol as a mask."""
        raise _Untraceable

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def __and__(self, other: Any) -> Any:
        return self.rows() & other

    def __or__(self, other: Any) -> Any:
        return self.rows() | other

    def __bool__(self) -> bool:
        raise _Untraceable

    def __eq__(self, other: Any) -> Any:
        raise _Untraceable

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class _Nothing(_Symbol):
    """A mask that hides every pair, to which others are added."""

    def __or__(self, other: Any) -> Any:
        return other


@dataclass(eq=False)
class _Number(_Symbol):
    """An index, its value in a table, or a distance, plus `shift`, less `origin`, divided by `size`.

    A table with which the function calculates is assumed to hold positions in documents, which grow by one;
    `Rows` asserts it.

    Attributes:
        context: the trace's.
        of: "b" for the batch entry's index, "h" for the head's, "q" for the query's, "k" for the key's, "q-k" or "k-q"
            for a distance of query and key.
        table: int [B], of the batch entry, or [B, S]; or None for the index itself.
        shift: number that is added.
        origin: int [B], or None.
        size: length of the chunks in which positions are counted; 0 for the positions themselves.
    """

    of: str
    table: Tensor | None = None
    shift: int = 0
    origin: Tensor | None = None
    size: int = 0

    def new_ones(self, *_: Any, **__: Any) -> Rows:
        return Rows(self.context)

    def new_zeros(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing(self.context)

    def look_up(self, table: Tensor, of: str) -> _Number:
        """Return the value of a table at this index, which must be one that `of` names."""
        is_index = self.of in of and self.table is None and not self.size and self.origin is None and self.shift == 0
        if not is_index or table.shape[0] != self.context.batch_size or table.dtype not in (torch.int64, torch.int32):
            raise _Untraceable
        return _Number(self.context, self.of, table)

    def __add__(self, other: Any) -> _Number:
        self.require_place()
        return _Number(self.context, self.of, self.table, self.shift + _integer(other), self.origin)

    def __sub__(self, other: Any) -> _Number:
        """Return the number less an integer, an origin, or its counterpart, from which an origin of both cancels."""
        if not isinstance(other, _Number):
            return self + -_integer(other)
        self.require_place()
        if other.of == "b" and other.table is not None and self.of in "qk" and self.origin is None:
            return _Number(self.context, self.of, self.table, self.shift, other.table)
        self.require_counterpart(other)
        return _Number(self.context, f"{self.of}-{other.of}", self.table, self.shift - other.shift)

    def __neg__(self) -> _Number:
        if "-" not in self.of:
            raise _Untraceable
        return _Number(self.context, self.of[::-1], self.table, -self.shift)

    def __abs__(self) -> _Magnitude:
        return _Magnitude(self.context, self)

    def __floordiv__(self, size: Any) -> _Number:
        self.require_place()
        if self.of not in "qk" or _integer(size) <= 0:
            raise _Untraceable
        return _Number(self.context, self.of, self.table, self.shift, self.origin, size)

    def __ge__(self, other: Any) -> Any:
        if isinstance(other, _Number):
            return self - other >= 0
        least = _integer(other) - self.shift
        if self.of == "q-k":
            return Rows(self.context, lo=least, positions=self.table)
        if self.of == "k-q":
            return Rows(self.context, hi=1 - least, positions=self.table)
        if least != 0 or self.of not in "qk" or self.origin is not None or self.size or self.shift != 0:
            raise _Untraceable
        return Rows(self.context) if self.table is None else _Ids(self.context, self.table, "numbered")

    def __gt__(self, other: Any) -> Any:
        return self >= other + 1

    def __le__(self, other: Any) -> Any:
        return other - self >= 0 if isinstance(other, _Number) else -self >= -_integer(other)

    def __lt__(self, other: Any) -> Any:
        return self <= other - 1

    def __eq__(self, other: Any) -> Any:
        self.require_counterpart(other)
        if self.shift != other.shift:
            raise _Untraceable
        if not self.size:
            if self.table is None or self.shift != 0 or self.origin is not None:
                raise _Untraceable
            return _Ids(self.context, self.table, "equal")
        key = self.context.key_positions
        position = key if self.table is None else self.table
        first: Any = -self.shift if self.origin is None else self.origin[:, None] - self.shift  # of chunk 0
        start = (position - first).div(self.size, rounding_mode="floor") * self.size + first + (key - position)
        return Rows(self.context, start=start, end=start + self.size, positions=self.table)

    def require_place(self) -> None:
        """Raise unless it is a position of a query or key, in its row or its document, or a distance."""
        if self.of in "bh" or self.size or (self.table is not None and not self.context.has_documents):
            raise _Untraceable

    def require_counterpart(self, other: Any) -> None:
        """Raise unless one is of queries, the other of keys, and both are counted in the same way."""
        if not isinstance(other, _Number) or {self.of, other.of} != {"q", "k"}:
            raise _Untraceable
        if other.table is not self.table or other.origin is not self.origin or other.size != self.size:
            raise _Untraceable


@dataclass(eq=False)
class _Magnitude(_Symbol):
    """The absolute value of a distance."""

    distance: _Number

    def __le__(self, other: Any) -> Rows:
        return (self.distance <= _integer(other)) & (-self.distance <= other)

    def __lt__(self, other: Any) -> Rows:
        return self <= _integer(other) - 1


def _integer(number: Any) -> int:
    """Return a number that is an int; anything else is untraceable."""
    if not isinstance(number, int):
        raise _Untraceable
    return number


@dataclass(eq=False)
class _Ids(_Symbol):
    """A condition on values of a table [B, S]: "equal" at query and key, "numbered" (0 or more), or both, "blocks"."""

    table: Tensor
    kind: str

    def __and__(self, other: Any) -> Any:
        if isinstance(other, _Ids) and other.table is self.table and (self.kind, other.kind) == ("equal", "numbered"):
            return _Ids(self.context, self.table, "blocks")
        return self.rows() & other

    def rows(self) -> Rows:
        """Return documents or blocks: contiguous tokens with the same id see each other."""
        ids, key = self.table, self.context.key_positions
        joined = ids[:, 1:] == ids[:, :-1]
        start, end = run_bounds(joined)
        if self.kind == "equal" and self.context.has_documents:
            self.context.require(ids[:, 1:] >= ids[:, :-1], "the ids of packed documents do not ascend")
            return Rows(self.context, start=start, end=end, joined=joined)
        if self.kind != "blocks":
            raise _Untraceable
        row = torch.arange(ids.shape[-1], device=ids.device)
        firsts = torch.where((start == row) & (ids >= 0), ids, -1 - row).sort(-1).values
        violation = "tokens of one block (equal block_sequence_ids) are not next to each other"
        self.context.require(firsts[:, 1:] != firsts[:, :-1], violation)
        start, end = torch.where(ids >= 0, start, UNBOUNDED), torch.where(ids >= 0, end, -UNBOUNDED)
        return Rows(self.context, start=start[:, key], end=end[:, key])


@dataclass(eq=False)
class Rows(_Symbol):
    """The queries that see each key: lo <= query - key < hi, and start <= query < end. None is no limit.

    Attributes:
        context: the trace's.
        lo: least distance.
        hi: one past the largest distance.
        start: int64, broadcastable to [B, Skv]. Chunks, documents and blocks have a start and an end. They hold the
            key's own position, or are [UNBOUNDED, -UNBOUNDED), nothing.
        end: int64, as `start`.
        distances: lo and hi of a mask in which tokens of a block see each other besides, or None.
        joined: bool [B, S - 1], or None: queries do not pass the positions 1..S-1 where it is False.
        positions: int [B, S], or None: the queries are right only as far as these grow by one.
    """

    lo: int | None = None
    hi: int | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    distances: tuple[int | None, int | None] | None = None
    joined: Tensor | None = None
    positions: Tensor | None = None

    def rows(self) -> Rows:
        """Return itself."""
        return self

    def shows_all(self) -> bool:
        """Return whether nothing limits the queries."""
        return self.lo is None and self.hi is None and self.start is None

    def starts_at_key(self) -> bool:
        """Return whether the first query of each key is at the key's own position."""
        return self.lo == 0 and self.holds_key()

    def holds_key(self) -> bool:
        """Return whether each query sees its own key, or nothing: their unions are intervals."""
        return (self.lo is None or self.lo <= 0) and (self.hi is None or self.hi > 0)

    def span(self) -> tuple[int | None, int | None] | None:
        """Return lo and hi if nothing but distances, and blocks besides, limits the queries."""
        if self.distances is None:
            return None if self.start is not None else (self.lo, self.hi)
        lo, hi = self.distances
        return _narrower(self.lo, lo, max), _narrower(self.hi, hi, min)

    def first(self) -> Tensor:
        """Return the first query of each key, int64, broadcastable to [B, Skv]."""
        key = self.context.key_positions
        start = torch.full_like(key, -UNBOUNDED) if self.lo is None else key + self.lo
        return start if self.start is None else torch.maximum(start, self.start)

    def last(self) -> Tensor:
        """Return one past the last query of each key, int64, broadcastable to [B, Skv]."""
        key = self.context.key_positions
        end = torch.full_like(key, UNBOUNDED) if self.hi is None else key + self.hi
        return end if self.end is None else torch.minimum(end, self.end)

    def __and__(self, other: Any) -> Any:
        if self.shows_all():
            return other
        other = other.rows()
        joined = other.joined if self.joined is None else self.joined
        positions = other.positions if self.positions is None else self.positions
        if other.positions is not None and other.positions is not positions:
            raise _Untraceable
        if joined is not None and positions is not None:
            counts_on = positions[:, 1:] == positions[:, :-1] + 1
            self.context.require(~joined | counts_on, "positions do not count on within a document")
            positions = None
        return Rows(
            self.context,
            _narrower(self.lo, other.lo, max),
            _narrower(self.hi, other.hi, min),
            _narrower(self.start, other.start, torch.maximum),
            _narrower(self.end, other.end, torch.minimum),
            None if other.start is not None else self.distances,
            joined,
            positions,
        )

    def __or__(self, other: Any) -> Any:
        if self.shows_all() or isinstance(other, _Nothing):
            return self
        rows = other.rows()
        if rows.shows_all():
            return rows
        if not self.holds_key() or not rows.holds_key() or rows.positions is not self.positions:
            raise _Untraceable
        start, end = torch.minimum(self.first(), rows.first()), torch.maximum(self.last(), rows.last())
        is_block = isinstance(other, _Ids) and other.kind == "blocks"
        distances = (self.lo, self.hi) if is_block and self.start is None else None
        return Rows(self.context, start=start, end=end, distances=distances, positions=self.positions)


def _narrower(x: Any, y: Any, pick: Callable[[Any, Any], Any]) -> Any:
    """Return the limit that `pick` chooses of two; None is no limit."""
    return y if x is None else x if y is None else pick(x, y)
