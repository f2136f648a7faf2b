"""The one mask type: at most two hidden row intervals per key column (FlashMask, ICLR 2025, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HIDDEN", "PARTIAL", "VISIBLE", "FlashMask", "MaskNotRepresentable", "classify_tiles", "is_one_of"]

HIDDEN, PARTIAL, VISIBLE = 0, 1, 2
"""What a tile of the score matrix is: skipped, masked element by element, or computed without mask code."""

_COLUMNS_PER_PASS = 1024  # how many dense columns `from_dense` works on at a time


class MaskNotRepresentable(ValueError):
    """A visibility pattern needs more hidden intervals per key column than FlashMask has.

    Attributes:
        columns: the offending (batch, head, column) triples, at most the first 16.
    """

    def __init__(self, message: str, columns: Sequence[tuple[int, int, int]] = ()):
        super().__init__(message)
        self.columns = list(columns)


class FlashMask:
    """An attention mask as hidden row intervals per key column.

    Row i is a query, column j a key. Intervals are start-inclusive and end-exclusive, in query rows 0..Sq; an interval
    with start >= end is empty; two intervals may lie anywhere and overlap. This is the `startend_row_indices` layout of
    PaddlePaddle's `flashmask_attention`, so tensors move between the two unchanged.

    | causal | n | last axis          | hidden rows of column j     |
    |--------|---|--------------------|-----------------------------|
    | True   | 1 | LTS                | [LTS, Sq)                   |
    | True   | 2 | LTS, LTE           | [LTS, LTE)                  |
    | False  | 2 | LTS, UTE           | [LTS, Sq) and [0, UTE)      |
    | False  | 4 | LTS, LTE, UTS, UTE | [LTS, LTE) and [UTS, UTE)   |

    `causal=True` also hides the pairs with i + (Skv - Sq) < j: bottom-right aligned, as FlashAttention >= 2.1.

    Args:
        indices: int32 tensor [B, Hm, Skv, n], Hm being 1, the number of key-value heads or the number of query heads.
        causal: whether pairs above the bottom-right diagonal are hidden too.
        q_len: the number of query rows Sq the intervals were written for; attention with another number raises. None
            leaves it to the attention, and methods that are not told take as many as keys.

    Raises:
        TypeError: `indices` is not a tensor, or not int32; `causal` is not a bool.
        ValueError: the rank or the last axis does not fit the table, an axis is empty, or `q_len` is less than 1.

    Example:
        >>> import torch
        >>> from flashmask_hf import FlashMask
        >>> mask = FlashMask(torch.tensor([2, 2, 3], dtype=torch.int32).view(1, 1, 3, 1), causal=True)
        >>> mask.to_dense().int()[0, 0]  # a document of two tokens, then one of one
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    __slots__ = ("__weakref__", "_causal", "_indices", "_plan", "_q_len")

    def __init__(self, indices: Tensor, causal: bool, *, q_len: int | None = None):
        if not isinstance(indices, Tensor):
            raise TypeError(f"indices must be an int32 tensor [B, Hm, Skv, n], got {type(indices).__name__}")
        if indices.dtype != torch.int32:
            raise TypeError(f"indices must be int32, got {indices.dtype}; convert with indices.to(torch.int32)")
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, got {causal!r}")
        if indices.dim() != 4:
            raise ValueError(f"indices must have shape [B, Hm, Skv, n], got {list(indices.shape)}")
        if 0 in indices.shape:
            raise ValueError(f"indices must have no empty axis, got {list(indices.shape)}")
        if q_len is not None and not isinstance(q_len, (int, torch.SymInt)):
            raise TypeError(f"q_len must be an integer or None, got {q_len!r}")
        if q_len is not None and q_len < 1:
            raise ValueError(f"q_len must be at least 1, got {q_len}")
        allowed = (1, 2) if causal else (2, 4)
        if indices.shape[-1] not in allowed:
            raise ValueError(
                f"indices with causal={causal} must have n = {allowed[0]} or {allowed[1]} columns on the last axis, "
                f"got {indices.shape[-1]} (shape {list(indices.shape)})"
            )
        self._indices = indices
        self._causal = causal
        self._q_len = q_len
        self._plan: Any = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """For copies and pickles, without the plan: their indices count changes anew, which would not tell of it."""
        make, arguments, state, *rest = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(state, tuple):  # unless a subclass has a state of its own making
            state = state[0], {**state[1], "_plan": None}
        return make, arguments, state, *rest

    @property
    def indices(self) -> Tensor:
        """The intervals, int32 [B, Hm, Skv, n]. Another mask is another object, since its plan is kept with it.

        They may be changed in place by PyTorch's operators, of which their version tells. What writes past it goes
        unnoticed, and attention takes the plan of the old ones: collectives (`torch.distributed.broadcast`, `recv`),
        replays of CUDA graphs, NumPy views and kernels that are given the pointer. After such a write make another mask
        of the same tensor, `FlashMask(mask.indices, mask.causal, q_len=mask.q_len)`, or tell of it by
        `mask.indices.add_(0)`. A model that gets the tensor as `startend_row_indices` reads it in each forward.
        """
        return self._indices

    @property
    def causal(self) -> bool:
        """Whether pairs above the bottom-right diagonal are hidden too."""
        return self._causal

    @property
    def q_len(self) -> int | None:
        """The number of query rows the intervals were written for, or None."""
        return self._q_len

    @property
    def kv_len(self) -> int:
        """Number of key columns, Skv."""
        return self.indices.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the intervals live."""
        return self.indices.device

    def __repr__(self) -> str:
        batch, heads, kv_len, n = self.indices.shape
        q_len = kv_len if self.q_len is None else self.q_len
        return (
            f"FlashMask(batch={batch}, heads={heads}, q_len={q_len}, kv_len={kv_len}, n={n}, "
            f"causal={self.causal}, device='{self.device}')"
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> FlashMask:
        """The same mask on another device (itself when it is there already)."""
        indices = self.indices.to(device, non_blocking=non_blocking)
        return self if indices is self.indices else FlashMask(indices, self.causal, q_len=self.q_len)

    def rows(self, q_len: int | None = None) -> int:
        """The number of query rows: `q_len` if given, else the mask's own, else as many as keys.

        Raises:
            ValueError: `q_len` contradicts the number of rows that the mask was written for.
        """
        own = self.q_len
        if q_len is None:
            return self.kv_len if own is None else own
        if own is not None and own != q_len:
            raise ValueError(f"q_len={q_len}, but this mask was built for q_len={own}; build it with q_len={q_len}")
        return q_len

    def intervals(self, q_len: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """The hidden row intervals as (start, end) pairs of int32 tensors [B, Hm, Skv]; one pair or two.

        The part hidden by `causal` is not among them.
        """
        rows = self.rows(q_len)
        columns = self.indices.unbind(-1)
        if len(columns) == 4:
            return [(columns[0], columns[1]), (columns[2], columns[3])]
        if len(columns) == 1:
            return [(columns[0], torch.full_like(columns[0], rows))]
        if self.causal:
            return [(columns[0], columns[1])]
        return [(columns[0], torch.full_like(columns[0], rows)), (torch.zeros_like(columns[1]), columns[1])]

    def visible_intervals(self, q_len: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """The rows that see each key, as three (start, end) pairs of int32 tensors [B, Hm, Skv], in order of the rows.

        Those with start >= end are empty. What `causal` hides is left out.
        """
        rows = self.rows(q_len)
        (start, end), (other_start, other_end) = (
            (torch.where(start < end, start, rows), torch.where(start < end, end, rows))
            for start, end in self.bidirectional(rows).intervals(rows)
        )
        swap = other_start < start
        start, other_start = torch.where(swap, other_start, start), torch.where(swap, start, other_start)
        end, other_end = torch.where(swap, other_end, end), torch.where(swap, end, other_end)
        return [
            (torch.zeros_like(start), start),
            (end, other_start),
            (torch.maximum(end, other_end), torch.full_like(end, rows)),
        ]

    def bidirectional(self, q_len: int | None = None) -> FlashMask:
        """The same mask in the four-column form, which needs no `causal` flag to be read.

        Model inputs use it for masks that are not causal: `startend_row_indices` with n = 4 means the same to every
        layer. Always possible: what `causal` hides is one interval, and a causal mask has at most one other.
        """
        rows = self.rows(q_len)
        pairs = self.intervals(rows)
        if self.causal:
            start, end = pairs[0]
            column = torch.arange(self.kv_len, device=self.device, dtype=torch.int32)
            diagonal = (column - (self.kv_len - rows)).clamp(0, rows).expand_as(start)
            pairs = [(start, end), (torch.zeros_like(diagonal), diagonal)]
        (lts, lte), (uts, ute) = pairs
        return FlashMask(torch.stack([lts, lte, uts, ute], -1), causal=False, q_len=rows)

    def validate(self, q_len: int | None = None) -> FlashMask:
        """Check every value; returns the mask.

        Reads the data, so it waits for the device: call it in tests and data code.

        Args:
            q_len: number of query rows Sq; None takes the mask's own.

        Raises:
            ValueError: a value lies outside 0..Sq, or an interval's start is greater than its end (kernels read that as
                empty; it is nearly always two columns swapped, and an empty interval is better written start == end).
        """
        rows = self.rows(q_len)
        bad = (self.indices < 0) | (self.indices > rows)
        if bool(bad.any()):
            where = _first_columns(bad.any(-1))
            raise ValueError(
                f"indices must lie in 0..q_len = 0..{rows}, but found {int(self.indices.min())}.."
                f"{int(self.indices.max())}; first (batch, head, column) out of range: {where[:4]}"
            )
        for name, (start, end) in zip(("[LTS, LTE)", "[UTS, UTE)"), self.intervals(rows), strict=False):
            if bool((start > end).any()):
                where = _first_columns(start > end)
                raise ValueError(
                    f"indices hold an interval {name} with start > end at (batch, head, column) {where[:4]}; "
                    "write an empty interval with start == end, or swap the columns"
                )
        return self

    def to_dense(self, q_len: int | None = None) -> Tensor:
        """The mask as a bool tensor [B, Hm, Sq, Skv], True where visible. Quadratic memory: for tests and plots."""
        rows = self.rows(q_len)
        row = torch.arange(rows, device=self.device).view(rows, 1)
        hidden = torch.zeros(*self.indices.shape[:2], rows, self.kv_len, dtype=torch.bool, device=self.device)
        for start, end in self.intervals(rows):
            hidden |= (row >= start.unsqueeze(-2)) & (row < end.unsqueeze(-2))
        if self.causal:
            hidden |= row + (self.kv_len - rows) < torch.arange(self.kv_len, device=self.device)
        return ~hidden

    @classmethod
    def from_dense(cls, visible: Tensor, causal: bool | None = None) -> FlashMask:
        """Find the intervals of a dense mask.

        Args:
            visible: bool tensor [..., Sq, Skv] with up to two leading axes (batch, head), True where a query may look.
            causal: True or False asks for that form; None takes the causal form where it fits and the
                shortest last axis.

        Returns:
            FlashMask: with `to_dense()` equal to `visible`.

        Raises:
            TypeError: `visible` is not a bool tensor.
            ValueError: its rank is not 2, 3 or 4, or an axis is empty.
            MaskNotRepresentable: a column has more hidden intervals than fit; `.columns` names the first ones.
        """
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
            raise TypeError(f"visible must be a bool tensor [..., Sq, Skv] (True = visible), got {got}")
        if visible.dim() not in (2, 3, 4):
            raise ValueError(
                f"visible must have shape [Sq, Skv], [B, Sq, Skv] or [B, H, Sq, Skv], got {list(visible.shape)}"
            )
        if 0 in visible.shape:
            raise ValueError(f"visible must have no empty axis, got {list(visible.shape)}")
        if visible.dim() == 2:
            visible = visible[None, None]
        elif visible.dim() == 3:
            visible = visible[:, None]
        q_len, kv_len = visible.shape[-2:]
        if causal is None:
            row = torch.arange(q_len, device=visible.device).view(q_len, 1)
            above = row + (kv_len - q_len) < torch.arange(kv_len, device=visible.device)
            causal = not bool((visible & above).any())
            if causal:
                try:
                    return cls.from_dense(visible, causal=True)
                except MaskNotRepresentable:
                    causal = False
        return cls.from_columns(lambda first, last: visible[..., first:last], kv_len, causal)

    @classmethod
    def from_columns(cls, visible: Callable[[int, int], Tensor], kv_len: int, causal: bool) -> FlashMask:
        """Find the intervals of a mask that is shown some columns at a time, in memory linear in the number of rows.

        Args:
            visible: a function of a first and a last column that returns bool [B, H, Sq, last - first], True where a
                query may look.
            kv_len: number of columns.
            causal: the form to find.

        Returns:
            FlashMask: of the shortest last axis that fits.

        Raises:
            TypeError: `visible` returns something else than bool tensors.
            ValueError: they have another shape, or `kv_len` is less than 1.
            MaskNotRepresentable: as in `from_dense`.
        """
        if kv_len < 1:
            raise ValueError(f"kv_len must be at least 1, got {kv_len}")
        q_len, passes = 0, []
        for first in range(0, kv_len, _COLUMNS_PER_PASS):
            last = min(first + _COLUMNS_PER_PASS, kv_len)
            part = visible(first, last)
            if not isinstance(part, Tensor) or part.dtype != torch.bool:
                kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"visible must return a bool tensor, got {kind}; compare, or convert it with .bool()")
            if part.dim() != 4 or part.shape[3] != last - first or part.shape[2] != (q_len or part.shape[2]):
                raise ValueError(
                    f"visible must return [B, H, Sq, {last - first}] for columns {first} to {last}, of the same Sq "
                    f"each time, got {list(part.shape)}"
                )
            q_len = part.shape[2]
            passes.append(_hidden_runs(part, first, kv_len, causal))
        starts, ends = (torch.cat(part, dim=2) for part in zip(*[p[:2] for p in passes], strict=True))
        count = torch.cat([p[2] for p in passes], dim=2)
        leak = torch.cat([p[3] for p in passes], dim=2)
        if bool(leak.any()):
            raise MaskNotRepresentable(
                "visible shows a pair above the bottom-right diagonal, so it is not causal; columns "
                f"{_first_columns(leak)[:4]}",
                _first_columns(leak),
            )
        return _pack(starts, ends, count, causal, q_len)

    def __and__(self, other: FlashMask) -> FlashMask:
        """Both masks must see: the union of what they hide. Waits for the device, since the result must be checked.

        Raises:
            TypeError: `other` is not a FlashMask.
            ValueError: batch, heads, lengths or device do not fit (1 broadcasts).
            MaskNotRepresentable: a column would need more intervals than fit.
        """
        if not isinstance(other, FlashMask):
            return NotImplemented
        if self.kv_len != other.kv_len:
            raise ValueError(f"other has {other.kv_len} key columns, this mask has {self.kv_len}")
        if self.device != other.device:
            raise ValueError(
                f"other is on {other.device}, this mask on {self.device}; move it with other.to('{self.device}')"
            )
        own = self.rows() if other.q_len is None or self.q_len is not None else other.q_len
        rows = other.rows(own) if other.q_len is not None else own
        causal = self.causal or other.causal
        pairs = self.intervals(rows) + other.intervals(rows)
        try:
            shape = torch.broadcast_shapes(self.indices.shape[:3], other.indices.shape[:3])
        except RuntimeError:
            raise ValueError(
                f"batch and heads must match or be 1: {list(self.indices.shape[:2])} against "
                f"{list(other.indices.shape[:2])}"
            ) from None
        starts = torch.stack([start.expand(shape) for start, _ in pairs], -1).clamp(0, rows)
        ends = torch.stack([end.expand(shape) for _, end in pairs], -1).clamp(0, rows)
        if causal:
            column = torch.arange(self.kv_len, device=self.device, dtype=torch.int32)
            diagonal = (column - (self.kv_len - rows)).clamp(0, rows)
            as_causal = _merge(torch.maximum(starts, diagonal[:, None]), ends, rows)
            if int(as_causal[2].max()) <= 1:
                return _pack(*as_causal, True, rows)
            starts = torch.cat([starts, torch.zeros_like(starts[..., :1])], -1)
            ends = torch.cat([ends, diagonal[:, None].expand_as(ends[..., :1])], -1)
        return _pack(*_merge(starts, ends, rows), False, rows)

    def sparsity(self, block: tuple[int, int] = (128, 128), q_len: int | None = None) -> float:
        """Fraction of the tiles of `block` = (query rows, key columns) that are hidden whole.

        Over batch and mask heads; the paper's rho (section 4.3): what a kernel with such tiles skips.
        """
        tiles = classify_tiles(self, block, q_len)
        return float((tiles == HIDDEN).double().mean())

    def plot(
        self,
        path: str | None = None,
        *,
        block: tuple[int, int] | None = None,
        q_len: int | None = None,
        batch: int = 0,
        head: int = 0,
        title: str | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the mask's tiles (hidden, partial, visible), with the edges of documents marked.

        An edge is marked where the lower interval jumps between bounds that hold for two columns or more each, and at
        the rows of these bounds: documents, questions and answers have edges; a window, which keeps moving, has none.

        Args:
            path: where to save the picture (any suffix matplotlib knows); None saves nothing.
            block: tile size (query rows, key columns); None takes one element a tile up to 128 keys, else 128 x 128.
            q_len: number of query rows; None takes the mask's own.
            batch: which batch entry.
            head: which mask head.
            title: text above the picture.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            matplotlib.axes.Axes: what was drawn on.

        Raises:
            ImportError: matplotlib is missing; `pip install flashmask-hf[plot]`.
            ValueError: there is no such batch entry or head, or a size of `block` is not positive.
        """
        from flashmask_hf._plot import plot_mask

        return plot_mask(self, path, block=block, q_len=q_len, batch=batch, head=head, title=title, ax=ax)


def classify_tiles(mask: FlashMask, block: tuple[int, int] = (128, 128), q_len: int | None = None) -> Tensor:
    """What each tile of the score matrix is, from the extremes of the intervals in its columns (paper, equation 4).

    Conservative: a tile that only two intervals together hide counts as PARTIAL. A tile that reaches past the last key
    column is PARTIAL unless hidden.

    Args:
        mask: the mask.
        block: tile size (query rows, key columns).
        q_len: number of query rows Sq; None takes the mask's own.

    Returns:
        Tensor: int8 [B, Hm, ceil(Sq / block[0]), ceil(Skv / block[1])] of HIDDEN, PARTIAL, VISIBLE.
    """
    rows, kv_len = mask.rows(q_len), mask.kv_len
    block_q, block_kv = block
    if block_q < 1 or block_kv < 1:
        raise ValueError(f"block must be two sizes of at least 1, (query rows, key columns), got {block}")
    device = mask.device
    n_q, n_kv = -(-rows // block_q), -(-kv_len // block_kv)
    first = torch.arange(n_q, device=device, dtype=torch.int32).view(n_q, 1) * block_q
    last = (first + block_q).clamp(max=rows)  # exclusive
    left = torch.arange(n_kv, device=device, dtype=torch.int32) * block_kv
    right = (left + block_kv).clamp(max=kv_len)  # exclusive
    hidden = torch.zeros(*mask.indices.shape[:2], n_q, n_kv, dtype=torch.bool, device=device)
    touched = (left + block_kv > kv_len).expand_as(hidden).clone()
    for start, end in mask.intervals(rows):
        start_min, start_max = _tile_extremes(start, block_kv, n_kv)
        end_min, end_max = _tile_extremes(end, block_kv, n_kv)
        hidden |= (first >= start_max) & (last <= end_min)
        touched |= (first < end_max) & (last > start_min)
    if mask.causal:
        shift = kv_len - rows
        hidden |= last - 1 + shift < left
        touched |= first + shift < right - 1
    tiles = torch.where(touched, PARTIAL, VISIBLE).masked_fill_(hidden, HIDDEN)
    return tiles.to(torch.int8)


def is_one_of(size: int, *sizes: int) -> bool:
    """`size in sizes`, which TorchDynamo answers with no where a number equals a symbolic one."""
    return any(size == other for other in sizes)


def _tile_extremes(values: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of `values` [B, Hm, Skv] over each tile of `block` columns: two tensors [B, Hm, 1, count]."""
    missing = count * block - values.shape[-1]
    if missing:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], -1)
    tiles = values.unflatten(-1, (count, block))
    return tiles.amin(-1).unsqueeze(-2), tiles.amax(-1).unsqueeze(-2)


def _first_columns(flags: Tensor, limit: int = 16) -> list[tuple[int, int, int]]:
    """The first (batch, head, column) triples where a bool tensor [B, Hm, Skv] is set."""
    return [tuple(index) for index in flags.nonzero()[:limit].tolist()]


def _hidden_runs(visible: Tensor, first: int, kv_len: int, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last run of hidden rows in each column of a slice of a dense mask.

    Args:
        visible: bool [B, H, Sq, columns], the columns from `first` on.
        first: index of the first column.
        kv_len: number of columns of the whole mask.
        causal: leave out the rows above the bottom-right diagonal, which the flag hides.

    Returns:
        starts and ends, int32 [B, H, columns, 2], first and last run (both the same if there is only one); the
        number of runs, int64 [B, H, columns]; bool [B, H, columns], True where a pair above the diagonal is visible.
    """
    q_len, columns = visible.shape[-2:]
    hidden = ~visible
    leak = torch.zeros_like(hidden[..., 0, :])
    if causal:
        row = torch.arange(q_len, device=visible.device).view(q_len, 1)
        above = row + (kv_len - q_len) < torch.arange(first, first + columns, device=visible.device)
        leak = (visible & above).any(-2)
        hidden = hidden & ~above
    edge = hidden.new_zeros(*hidden.shape[:-2], 1, columns)
    opens = hidden & ~torch.cat([edge, hidden[..., :-1, :]], -2)
    closes = hidden & ~torch.cat([hidden[..., 1:, :], edge], -2)

    def first_and_last(flags: Tensor) -> Tensor:
        flags = flags.to(torch.uint8)
        return torch.stack([flags.argmax(-2), q_len - 1 - flags.flip(-2).argmax(-2)], -1).to(torch.int32)

    return first_and_last(opens), first_and_last(closes) + 1, opens.sum(-2), leak


def _merge(starts: Tensor, ends: Tensor, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Union of k intervals per column [B, H, Skv, k] as first run, last run and number of runs (see `_hidden_runs`)."""
    empty = starts >= ends
    starts = starts.masked_fill(empty, q_len + 1)
    ends = ends.masked_fill(empty, q_len + 1)
    starts, order = starts.sort(-1)
    ends = ends.gather(-1, order)
    real = starts <= q_len
    reach = ends.masked_fill(~real, -1).cummax(-1).values
    before = torch.cat([torch.full_like(reach[..., :1], -1), reach[..., :-1]], -1)
    opens = real & (starts > before)
    count = opens.sum(-1)
    last = torch.where(opens, starts, -1).amax(-1)
    first_end = torch.where(opens.cumsum(-1) == 1, reach, -1).amax(-1)
    return torch.stack([starts[..., 0], last], -1), torch.stack([first_end, reach[..., -1]], -1), count


def _pack(starts: Tensor, ends: Tensor, count: Tensor, causal: bool, q_len: int) -> FlashMask:
    """The shortest `indices` for at most two runs per column, given first and last run (see `_hidden_runs`)."""
    limit = 1 if causal else 2
    if int(count.max()) > limit:
        columns = _first_columns(count > limit)
        raise MaskNotRepresentable(
            f"a column has {int(count.max())} separate hidden row intervals, but a mask with causal={causal} holds at "
            f"most {limit}; first (batch, head, column): {columns[:4]}. Split the attention into two calls, or reorder "
            "the tokens so that what a column hides is contiguous",
            columns,
        )
    q_len_tensor = torch.full_like(starts[..., 0], q_len)
    none, two = count == 0, count == 2
    if causal:
        start = starts[..., 0].masked_fill(none, q_len)
        end = ends[..., 0].masked_fill(none, q_len)
        if bool((end == q_len).all()):
            return FlashMask(start.unsqueeze(-1).to(torch.int32), causal=True, q_len=q_len)
        return FlashMask(torch.stack([start, end], -1).to(torch.int32), causal=True, q_len=q_len)
    # One run from row 0 is the upper interval, any other single run the lower one; of two runs the first is upper.
    upper = two | ((count == 1) & (starts[..., 0] == 0) & (ends[..., 0] < q_len))
    lower = two | ((count == 1) & ~upper)
    lts = torch.where(lower, starts[..., 1], q_len_tensor)
    lte = torch.where(lower, ends[..., 1], q_len_tensor)
    uts = torch.where(upper, starts[..., 0], 0)
    ute = torch.where(upper, ends[..., 0], 0)
    if bool((lte == q_len).all()) and bool((uts == 0).all()):
        return FlashMask(torch.stack([lts, ute], -1).to(torch.int32), causal=False, q_len=q_len)
    return FlashMask(torch.stack([lts, lte, uts, ute], -1).to(torch.int32), causal=False, q_len=q_len)
