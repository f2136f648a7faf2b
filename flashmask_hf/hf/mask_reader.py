"""Symbolic tracing of a `mask_function` of transformers into intervals of queries per key.

The function is called once with symbols for the indices of batch entry, head, query and key. Orders and distances of
query and key, common chunks and blocks, their conjunctions and unions are intervals of rows; all else is untraceable.

For a causal window of 4 tokens:

    def window(b, h, q, k):
        return (k > q - 4) & (k <= q)

    q, k            _Number          symbols of the positions of queries and keys
    q - 4           _Number          the same with shift -4
    k > q - 4       Rows(hi=4)       of the difference k - q + 4
    k <= q          Rows(lo=0)
    ... & ...       Rows(lo=0, hi=4)

So LTS = min(k + 4, S). `k // 8 == q // 8` gives the rows of a chunk, and `ids[b, q]` the `_Block` of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flashmask_hf.hf.documents import UNBOUNDED, Documents, run_bounds
from flashmask_hf.torch_internals import device_assert


def trace(mask_function: Callable[..., Any], context: TraceContext) -> Rows | None:
    """Return the queries that a function lets see each key, or None if it cannot be traced.

    Raises:
        RuntimeError: tokens of one block are not contiguous (a device-side check).
    """
    symbols = _Batch(context), _Symbol(context), _Number(context, query=1), _Number(context, key=1)
    try:
        with _TableLookups():
            visible = mask_function(*symbols).rows()
    except Exception:  # the function expects tensors, so symbols may fail in any way
        return None
    for holds in () if context.is_replaced else context.contiguous:
        device_assert(
            holds,
            "tokens of one block (equal block_sequence_ids) are not next to each other, which the mask's columns "
            "cannot hold; use attn_implementation='sdpa' for this model",
        )
    return visible


@dataclass(eq=False)
class TraceContext:
    """State of one trace: the keys and their documents, and what must hold for blocks.

    Attributes:
        batch_size: number of batch entries, B.
        key_positions: int64 [Skv].
        find_documents: returns the documents of the keys, or None. Equal ids in two documents are of two blocks.
        real: the 2D mask, bool [B, up to S], or None. Padding belongs to no block.
        is_replaced: whether mask indices take the place of all blocks.
        contiguous: bool [], whether tokens of each block are contiguous.
    """

    batch_size: int
    key_positions: Tensor
    find_documents: Callable[[], Documents | None] = lambda: None
    real: Tensor | None = None
    is_replaced: bool = False
    contiguous: list[Tensor] = field(default_factory=list)


class _Untraceable(Exception):
    """Error of an operation without a meaning in intervals."""


class _TableLookups(TorchFunctionMode):
    """Mode in which symbols index tensors, `origins[b]` and `ids[b, q]`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            batch, *place = index if isinstance(index, tuple) else (index,)
            if isinstance(batch, _Batch):
                return batch.look_up(table, *place)
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


class _Batch(_Symbol):
    """The index of a batch entry."""

    def look_up(self, table: Tensor, place: Any = None) -> _Origin | _Block:
        """Return the value of a table at this index, and at a query or key."""
        if table.shape[0] != self.context.batch_size or table.dtype not in (torch.int64, torch.int32):
            raise _Untraceable
        if place is None:
            return _Origin(self.context, table)
        if place.shift != 0 or place.origin is not None:
            raise _Untraceable
        return _Block(self.context, place.side(), table)


@dataclass(eq=False)
class _Origin(_Symbol):
    """The first position of each batch entry, int [B]."""

    positions: Tensor


@dataclass(eq=False)
class _Number(_Symbol):
    """`query` times a query's position, plus `key` times a key's, plus `shift`, less `origin`, int [B]."""

    query: int = 0
    key: int = 0
    shift: int = 0
    origin: Tensor | None = None

    def new_ones(self, *_: Any, **__: Any) -> Rows:
        return Rows(self.context)

    def new_zeros(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing(self.context)

    def side(self) -> str:
        """Return whether it is of a query or a key, "q" or "k"; anything else is untraceable."""
        if {self.query, self.key} != {0, 1}:
            raise _Untraceable
        return "q" if self.query else "k"

    def __add__(self, other: Any) -> _Number:
        return _Number(self.context, self.query, self.key, self.shift + _integer(other), self.origin)

    def __sub__(self, other: Any) -> _Number:
        """Return the number less an integer, an origin, or a number, from which an origin of both cancels."""
        if isinstance(other, _Origin) and self.origin is None:
            return _Number(self.context, self.query, self.key, self.shift, other.positions)
        if not isinstance(other, _Number):
            return self + -_integer(other)
        if other.origin is not self.origin:
            raise _Untraceable
        return _Number(self.context, self.query - other.query, self.key - other.key, self.shift - other.shift)

    def __neg__(self) -> _Number:
        return _Number(self.context) - self

    def __abs__(self) -> _Magnitude:
        return _Magnitude(self.context, self)

    def __floordiv__(self, size: Any) -> _Chunk:
        return _Chunk(self.context, self, _integer(size))

    def __ge__(self, other: Any) -> Rows:
        left = self - other
        if left.origin is None and left.query == -left.key == 1:
            return Rows(self.context, lo=-left.shift)
        if left.origin is None and left.key == -left.query == 1:
            return Rows(self.context, hi=left.shift + 1)
        if left.origin is not None or left.shift != 0 or not left.side():
            raise _Untraceable
        return Rows(self.context)  # no position is less than 0

    def __gt__(self, other: Any) -> Rows:
        return self >= other + 1

    def __le__(self, other: Any) -> Rows:
        return -(self - other) >= 0

    def __lt__(self, other: Any) -> Rows:
        return self <= other - 1


@dataclass(eq=False)
class _Magnitude(_Symbol):
    """The absolute value of a distance."""

    distance: _Number

    def __le__(self, other: Any) -> Rows:
        return (self.distance <= _integer(other)) & (-self.distance <= other)

    def __lt__(self, other: Any) -> Rows:
        return self <= _integer(other) - 1


def _integer(number: Any) -> int:
    if not isinstance(number, int):
        raise _Untraceable
    return number


@dataclass(eq=False)
class _Chunk(_Symbol):
    """The number of the chunk of `size` positions that holds a position, in a document from its start."""

    position: _Number
    size: int

    def __eq__(self, other: Any) -> Any:
        mine, theirs, documents = self.position, other.position, self.context.find_documents()
        if self.size <= 0 or other.size != self.size or {mine.side(), theirs.side()} != {"q", "k"}:
            raise _Untraceable
        if theirs.origin is not mine.origin or theirs.shift != mine.shift:
            raise _Untraceable
        first: Any = 0 if mine.origin is None else mine.origin[:, None]
        first = (first if documents is None else documents.start.clamp(min=first)) - mine.shift
        key = self.context.key_positions
        start = (key - first).div(self.size, rounding_mode="floor") * self.size + first
        return Rows(self.context, start=start, end=start + self.size)


@dataclass(eq=False)
class _Block(_Symbol):
    """The id of a token's block, of `ids` int [B, S], or a condition on it, `of`.

    This is "q" or "k", "equal" at query and key, "numbered" (0 or more), or both, "blocks".
    """

    of: str
    ids: Tensor

    def __eq__(self, other: Any) -> Any:
        return self.joined(other, {"q", "k"}, "equal")

    def __ge__(self, other: Any) -> _Block:
        if self.of not in "qk" or _integer(other) != 0:
            raise _Untraceable
        return _Block(self.context, "numbered", self.ids)

    def __and__(self, other: Any) -> Any:
        return self.rows() & other if self.of == "blocks" else self.joined(other, {"equal", "numbered"}, "blocks")

    def joined(self, other: Any, pair: set[str], of: str) -> _Block:
        """Return the condition of a pair of ids or conditions on the same ids."""
        if not isinstance(other, _Block) or other.ids is not self.ids or {self.of, other.of} != pair:
            raise _Untraceable
        return _Block(self.context, of, self.ids)

    def rows(self) -> Rows:
        """Return blocks: contiguous tokens with the same id see each other."""
        if self.of != "blocks":
            raise _Untraceable
        ids, key = self.ids, self.context.key_positions
        documents, real, length = self.context.find_documents(), self.context.real, ids.shape[-1]
        number = torch.zeros_like(ids) if documents is None else documents.numbers().expand_as(ids)
        joined = ids.diff() == 0
        start, end = run_bounds(joined)
        row = torch.arange(length, device=ids.device)
        first = nn.functional.pad(~joined | (number.diff() != 0), (1, 0), value=True) & (ids >= 0)
        if real is not None:
            first = first & nn.functional.pad(real, (0, max(0, length - real.shape[-1])))[:, :length].to(torch.bool)
        block, order = torch.where(first, ids, -1 - row).sort(stable=True, dim=-1)
        self.context.contiguous.append(((block.diff() != 0) | (number.gather(-1, order).diff() != 0)).all())
        start, end = torch.where(ids >= 0, start, UNBOUNDED), torch.where(ids >= 0, end, -UNBOUNDED)
        return Rows(self.context, start=start[:, key], end=end[:, key])


@dataclass(eq=False)
class Rows(_Symbol):
    """The queries that see each key: lo <= query - key < hi, and start <= query < end. None is no limit.

    Attributes:
        context: the trace's.
        lo: least distance.
        hi: one past the largest distance.
        start: int64, broadcastable to [B, Skv], of a chunk, document or block; UNBOUNDED, with end -UNBOUNDED, of none.
        end: int64, as `start`.
        distances: lo and hi of a mask in which tokens of a block see each other besides, or None.
    """

    lo: int | None = None
    hi: int | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    distances: tuple[int | None, int | None] | None = None

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
        return Rows(
            self.context,
            _narrower(self.lo, other.lo, max),
            _narrower(self.hi, other.hi, min),
            _narrower(self.start, other.start, torch.maximum),
            _narrower(self.end, other.end, torch.minimum),
            None if other.start is not None else self.distances,
        )

    def __or__(self, other: Any) -> Any:
        if self.shows_all() or isinstance(other, _Nothing):
            return self
        rows = other.rows()
        if rows.shows_all():
            return rows
        if not self.holds_key() or not rows.holds_key():
            raise _Untraceable
        start, end = torch.minimum(self.first(), rows.first()), torch.maximum(self.last(), rows.last())
        is_block = isinstance(other, _Block) and other.of == "blocks"
        distances = (self.lo, self.hi) if is_block and self.start is None else None
        return Rows(self.context, start=start, end=end, distances=distances)


def _narrower(x: Any, y: Any, pick: Callable[[Any, Any], Any]) -> Any:
    """Return the limit that `pick` chooses; None is no limit."""
    return y if x is None else x if y is None else pick(x, y)
