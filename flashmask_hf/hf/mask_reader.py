"""Symbolic tracing of a `mask_function` of transformers: which queries it lets see each key, as intervals.

The function is called once with symbols in place of the indices of batch entry, head, query and key. What masks are
made of has a meaning in intervals of positions: an order or a distance of query and key, a chunk that both are in, an
equal value in a table, and their conjunctions and unions. Any other operation on a symbol makes the function
untraceable. Nothing that a compiler hides is needed, such as the function's closure.

For a causal window of 4 tokens, with S keys at the rows k = 0..S-1:

    def window(b, h, q, k):
        return (k > q - 4) & (k <= q)

    q, k                  _Position              symbols of the positions of queries and keys
    q - 4                 _Position              the same with shift -4
    k > q - 4             _Distance > 0          k - q + 4, compared with an integer, gives:
                          QueryIntervals         rows [-inf, k + 4)   Span(hi=4)
    k <= q                QueryIntervals         rows [k, inf)        Span(lo=0)
    ... & ...             QueryIntervals         rows [k, k + 4)      Span(lo=0, hi=4)

The hook clamps the rows to 0..S and writes them as mask indices: LTS = min(k + 4, S). A table lookup `ids[b, q]` gives
a `_Position` with a table, `ids[b, q] == ids[b, k]` a `_SameValue`, and `k // 8 == q // 8` the rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashmask_hf.hf.documents import UNBOUNDED, run_bounds
from flashmask_hf.torch_internals import device_assert

__all__ = ["QueryIntervals", "TraceContext", "trace"]

_INTEGERS = (torch.int64, torch.int32)


def trace(mask_function: Callable[..., Any], context: TraceContext) -> QueryIntervals | None:
    """Return the queries that a function lets see each key, or None if it cannot be traced.

    Raises:
        RuntimeError: tables that the function looks into do not fit into intervals (a device-side check).
    """
    query, key = _Position(context, of_query=True), _Position(context, of_query=False)
    try:
        with _TableLookups():
            visible = mask_function(_BatchIndex(context), _Symbol(context), query, key).intervals()
    except Exception:  # the function expects tensors, so symbols may fail in any way
        visible = None
    if visible is None or visible.positions is not None:
        return None
    for condition, message in context.assertions:
        device_assert(condition, message)
    return visible


class TraceContext:
    """State of one trace: the keys, and the assertions on the tables that the function looks into.

    Args:
        batch_size: number of batch entries, B.
        key_positions: int64 [Skv].
        same_tokens: whether queries and keys are the same tokens.
        is_custom: whether the function is a caller's own, for which transformers asks for vmap.
    """

    def __init__(self, batch_size: int, key_positions: Tensor, same_tokens: bool, is_custom: bool):
        self.batch_size = batch_size
        self.key_positions = key_positions
        self.same_tokens = same_tokens
        self.is_custom = is_custom
        self.assertions: list[tuple[Tensor, str]] = []  # bool [], and the message where it is False

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
            if isinstance(index, _BatchIndex):
                return _BatchValue(index.context, table)
            if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], _Position):
                return index[1].look_up(table, index[0])
        return func(*args, **(kwargs or {}))


class _Symbol:
    """Symbol of an index tensor, or of a value computed from one. An instance of this class itself is the head's index.

    Operations that a class does not define are untraceable.
    """

    device = None

    def __init__(self, context: TraceContext):
        self.context = context

    def intervals(self) -> QueryIntervals:
        """Return the symbol as a mask."""
        raise _Untraceable

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self.intervals() | other

    def __bool__(self) -> bool:
        raise _Untraceable

    def __eq__(self, other: Any) -> Any:
        raise _Untraceable

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class _BatchIndex(_Symbol):
    """The index of the batch entry."""


class _BatchValue(_Symbol):
    """The value of a table [B] at the batch entry."""

    def __init__(self, context: TraceContext, table: Tensor):
        super().__init__(context)
        if table.shape[0] != context.batch_size or table.dtype not in _INTEGERS:
            raise _Untraceable
        self.table = table


class _Position(_Symbol):
    """Positions of the queries or of the keys, or the values of a table [B, S] at these positions.

    If the function calculates with a table, its values are assumed to be positions within documents, which count on by
    one; `QueryIntervals` asserts it.

    Args:
        context: the trace's.
        of_query: whether they are the queries'.
        table: int [B, S], or None for the positions themselves.
        shift: added to the values.
        origin: subtracted from the values, int [B], or None.
    """

    def __init__(
        self,
        context: TraceContext,
        of_query: bool,
        table: Tensor | None = None,
        shift: int = 0,
        origin: Tensor | None = None,
    ):
        super().__init__(context)
        self.of_query, self.table, self.shift, self.origin = of_query, table, shift, origin

    def new_ones(self, *_: Any, **__: Any) -> _AllPairs:
        return _AllPairs(self.context)

    def new_zeros(self, *_: Any, **__: Any) -> _NoPairs:
        return _NoPairs(self.context)

    def look_up(self, table: Tensor, batch: Any) -> _Position:
        """Return the values of `table[batch, self]`."""
        if not isinstance(batch, _BatchIndex) or self.table is not None or not self.is_unshifted():
            raise _Untraceable
        if table.shape[0] != self.context.batch_size or table.dtype not in _INTEGERS:
            raise _Untraceable
        return _Position(self.context, self.of_query, table)

    def is_unshifted(self) -> bool:
        return self.origin is None and self.shift == 0

    def __add__(self, other: Any) -> _Position:
        return _Position(self.context, self.of_query, self.table, self.shift + _integer(other), self.origin)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _BatchValue) and self.origin is None:
            return _Position(self.context, self.of_query, self.table, self.shift, other.table)
        if isinstance(other, _Position):
            return self.distance_to(other)
        return _Position(self.context, self.of_query, self.table, self.shift - _integer(other), self.origin)

    def __floordiv__(self, size: Any) -> _Chunk:
        if _integer(size) <= 0:
            raise _Untraceable
        return _Chunk(self, size)

    def __le__(self, other: Any) -> Any:
        return self.distance_to(other) <= 0

    def __lt__(self, other: Any) -> Any:
        return self.distance_to(other) < 0

    def __gt__(self, other: Any) -> Any:
        return self.distance_to(other) > 0

    def __ge__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0 and self.is_unshifted():
            return _AllPairs(self.context) if self.table is None else _NotNegative(self.context, self.table)
        return self.distance_to(other) >= 0

    def __eq__(self, other: Any) -> Any:
        self.require_counterpart(other)
        if self.table is None or not self.is_unshifted() or not other.is_unshifted():
            raise _Untraceable
        return _SameValue(self.context, self.table)

    def distance_to(self, other: Any) -> _Distance:
        """Return the positions less the counterpart's positions."""
        self.require_counterpart(other)
        return _Distance(self, self.of_query, self.shift - other.shift)

    def require_counterpart(self, other: Any) -> None:
        """Raise unless one is of queries, the other of keys, and both count from the same point."""
        if not isinstance(other, _Position) or other.of_query == self.of_query:
            raise _Untraceable
        if other.table is not self.table or other.origin is not self.origin:
            raise _Untraceable

    def positions(self) -> Tensor | None:
        """Return the table, to be taken for positions, or None for the positions themselves."""
        if self.table is not None and not self.context.same_tokens:
            raise _Untraceable
        return self.table


def _integer(number: Any) -> int:
    """Return a number that is an int; anything else is untraceable."""
    if not isinstance(number, int):
        raise _Untraceable
    return number


class _Distance(_Symbol):
    """The query's position less the key's position (`query_first`), or its negative, plus a shift.

    An origin that both positions count from cancels.
    """

    def __init__(self, position: _Position, query_first: bool, shift: int):
        super().__init__(position.context)
        self.position, self.query_first, self.shift = position, query_first, shift

    def __le__(self, other: Any) -> QueryIntervals:
        most = _integer(other) - self.shift
        return self._queries_before(most + 1) if self.query_first else self._queries_from(-most)

    def __ge__(self, other: Any) -> QueryIntervals:
        least = _integer(other) - self.shift
        return self._queries_from(least) if self.query_first else self._queries_before(1 - least)

    def __lt__(self, other: Any) -> QueryIntervals:
        return self <= _integer(other) - 1

    def __gt__(self, other: Any) -> QueryIntervals:
        return self >= _integer(other) + 1

    def __neg__(self) -> _Distance:
        return _Distance(self.position, not self.query_first, -self.shift)

    def __abs__(self) -> _AbsoluteDistance:
        return _AbsoluteDistance(self)

    def _queries_from(self, shift: int) -> QueryIntervals:
        """Return the queries at the key's position + shift and later."""
        start, positions = self.context.key_positions + shift, self.position.positions()
        end = torch.full_like(start, UNBOUNDED)
        span = Span(lo=shift)
        return QueryIntervals(self.context, start, end, shift <= 0, shift == 0, positions=positions, span=span)

    def _queries_before(self, shift: int) -> QueryIntervals:
        """Return the queries before the key's position + shift."""
        end, positions = self.context.key_positions + shift, self.position.positions()
        start, span = torch.full_like(end, -UNBOUNDED), Span(hi=shift)
        return QueryIntervals(self.context, start, end, shift > 0, positions=positions, span=span)


class _AbsoluteDistance(_Symbol):
    """The distance of query and key, without its sign."""

    def __init__(self, distance: _Distance):
        super().__init__(distance.context)
        self.distance = distance

    def __le__(self, other: Any) -> Any:
        return (self.distance <= other) & (self.distance >= -_integer(other))

    def __lt__(self, other: Any) -> Any:
        return self <= _integer(other) - 1


class _Chunk(_Symbol):
    """The number of the chunk of `size` positions that a position is in."""

    def __init__(self, position: _Position, size: int):
        super().__init__(position.context)
        self.position, self.size = position, size

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Chunk) or other.size != self.size or other.position.shift != self.position.shift:
            raise _Untraceable
        self.position.require_counterpart(other.position)
        keys, positions, origin = self.context.key_positions, self.position.positions(), self.position.origin
        counted = keys if positions is None else positions
        first = -self.position.shift if origin is None else origin[:, None] - self.position.shift  # of chunk 0
        start = (counted - first).div(self.size, rounding_mode="floor") * self.size + first
        if positions is not None:
            start = start + keys - positions
        return QueryIntervals(self.context, start, start + self.size, True, positions=positions, span=Span(plain=False))


class _NotNegative(_Symbol):
    """The condition that a table's value is 0 or more."""

    def __init__(self, context: TraceContext, table: Tensor):
        super().__init__(context)
        self.table = table


class _SameValue(_Symbol):
    """The condition that a table holds the same value for query and key."""

    def __init__(self, context: TraceContext, table: Tensor):
        super().__init__(context)
        self.table = table
        self.joined = table[:, 1:] == table[:, :-1]

    def __and__(self, other: Any) -> Any:
        if isinstance(other, _NotNegative) and other.table is self.table:
            return self._blocks()
        return self.intervals() & other

    def intervals(self) -> QueryIntervals:
        """Return documents: tokens with the same id see each other, and stand in one run."""
        if not self.context.same_tokens or self.context.is_custom:
            raise _Untraceable
        ids = self.table
        self.context.require(ids[:, 1:] >= ids[:, :-1], "the ids of packed documents do not ascend")
        start, end = run_bounds(self.joined)
        return QueryIntervals(self.context, start, end, True, joined=self.joined, span=Span(plain=False))

    def _blocks(self) -> QueryIntervals:
        """Return blocks: tokens with the same id of 0 or more see each other, and stand in one run; others see none."""
        blocks = self.table
        first, end = run_bounds(self.joined)
        row = torch.arange(blocks.shape[-1], device=blocks.device)
        ids = torch.where((first == row) & (blocks >= 0), blocks, -1 - row).sort(-1).values
        violation = "tokens of one block (equal block_sequence_ids) are not next to each other"
        self.context.require(ids[:, 1:] != ids[:, :-1], violation)
        first, end = torch.where(blocks >= 0, first, UNBOUNDED), torch.where(blocks >= 0, end, -UNBOUNDED)
        keys = self.context.key_positions
        return QueryIntervals(self.context, first[:, keys], end[:, keys], True, span=Span(blocks=True))


class _AllPairs(_Symbol):
    """True for every query and key."""

    def __and__(self, other: Any) -> Any:
        return other

    def __or__(self, other: Any) -> Any:
        return self

    def intervals(self) -> QueryIntervals:
        unbounded = torch.full_like(self.context.key_positions, UNBOUNDED)
        return QueryIntervals(self.context, -unbounded, unbounded, reflexive=True)


class _NoPairs(_Symbol):
    """False for every query and key: the neutral element of unions."""

    def __or__(self, other: Any) -> Any:
        return other


class Span(NamedTuple):
    """The distances at which queries see keys: lo <= query - key < hi, if nothing but distances and blocks decides.

    Attributes:
        lo: least distance; None is no limit.
        hi: one past the largest distance; None is no limit.
        blocks: whether the tokens of a block see each other besides.
        plain: False where something else decides, too, such as chunks or documents.
    """

    lo: int | None = None
    hi: int | None = None
    blocks: bool = False
    plain: bool = True

    def __and__(self, other: Any) -> Span:
        plain = self.plain and other.plain and not other.blocks
        lo, hi = _narrower(self.lo, other.lo, max), _narrower(self.hi, other.hi, min)
        return Span(lo, hi, self.blocks, plain)

    def __or__(self, other: Any) -> Span:
        is_block = other.blocks and other.lo is None and other.hi is None
        return self._replace(blocks=True, plain=self.plain and other.plain and is_block)


def _narrower(x: int | None, y: int | None, pick: Callable[[int, int], int]) -> int | None:
    """Return the limit that `pick` chooses of two; None is no limit."""
    return y if x is None else x if y is None else pick(x, y)


class QueryIntervals(_Symbol):
    """The queries that see each key, an interval of positions [start, end).

    Args:
        context: the trace's.
        start: int64, broadcastable to [B, Skv].
        end: int64, broadcastable to [B, Skv].
        reflexive: whether every interval holds the key's own position or is [UNBOUNDED, -UNBOUNDED), nothing. Unions of
            such intervals are intervals again.
        starts_at_key: whether start is the key's own position.
        joined: bool [B, S - 1], or None: intervals do not pass the positions 1..S-1 where it is False.
        positions: int [B, S], or None: the intervals are right only as far as these count on by one.
        span: the same as distances.
    """

    def __init__(
        self,
        context: TraceContext,
        start: Tensor,
        end: Tensor,
        reflexive: bool,
        starts_at_key: bool = False,
        joined: Tensor | None = None,
        positions: Tensor | None = None,
        span: Span = Span(),  # noqa: B008
    ):
        super().__init__(context)
        self.start, self.end, self.span = start, end, span
        self.reflexive, self.starts_at_key = reflexive, starts_at_key
        self.joined, self.positions = joined, positions

    def intervals(self) -> QueryIntervals:
        """Return itself."""
        return self

    def __and__(self, other: Any) -> Any:
        if isinstance(other, _AllPairs):
            return self
        other = other.intervals()
        joined = other.joined if self.joined is None else self.joined
        positions = other.positions if self.positions is None else self.positions
        if other.positions is not None and other.positions is not positions:
            raise _Untraceable
        if joined is not None and positions is not None:
            counts_on = positions[:, 1:] == positions[:, :-1] + 1
            self.context.require(~joined | counts_on, "positions do not count on within a document")
            positions = None
        return QueryIntervals(
            self.context,
            torch.maximum(self.start, other.start),
            torch.minimum(self.end, other.end),
            self.reflexive and other.reflexive,
            (self.starts_at_key and other.reflexive) or (other.starts_at_key and self.reflexive),
            joined,
            positions,
            self.span & other.span,
        )

    def __or__(self, other: Any) -> Any:
        if isinstance(other, _AllPairs):
            return other
        other = other.intervals()
        if not self.reflexive or not other.reflexive or other.positions is not self.positions:
            raise _Untraceable
        return QueryIntervals(
            self.context,
            torch.minimum(self.start, other.start),
            torch.maximum(self.end, other.end),
            True,
            self.starts_at_key and other.starts_at_key,
            positions=self.positions,
            span=self.span | other.span,
        )
