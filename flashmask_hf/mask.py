"""The one mask type: at most two hidden row intervals per key column (FlashMask, ICLR 2025, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from flashmask_hf._numbers import as_length, check_bool, check_device, check_tensor
from flashmask_hf.intervals import (
    Runs,
    causal_starts,
    count_rows_before,
    find_hidden_runs,
    hidden_intervals,
    pack_runs,
    unite_intervals,
    without_causal_flag,
)
from flashmask_hf.tiles import HIDDEN, classify_tiles
from flashmask_hf.torch_internals import is_one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS_PER_PASS = 1024
"""Dense columns that `FlashMask.from_columns` reads at a time."""


class MaskNotRepresentable(ValueError):
    """A mask needs more hidden intervals per key column than fit.

    Attributes:
        columns: the offending (batch, head, column) triples, at most the first 16.
    """

    def __init__(self, message: str, columns: Sequence[tuple[int, int, int]] = ()):
        super().__init__(message)
        self.columns = list(columns)


class FlashMask:
    """An attention mask as hidden row intervals per key column.

    Row i is a query, column j a key. Intervals [start, end) of query rows 0..Sq are empty if start >= end, and two may
    overlap. The layout is PaddlePaddle's `startend_row_indices`.

    | causal | n | last axis          | hidden rows of column j     |
    |--------|---|--------------------|-----------------------------|
    | True   | 1 | LTS                | [LTS, Sq)                   |
    | True   | 2 | LTS, LTE           | [LTS, LTE)                  |
    | False  | 2 | LTS, UTE           | [LTS, Sq) and [0, UTE)      |
    | False  | 4 | LTS, LTE, UTS, UTE | [LTS, LTE) and [UTS, UTE)   |

    `causal=True` also hides pairs with i + (Skv - Sq) < j: bottom-right aligned, as FlashAttention >= 2.1.

    Args:
        indices: int32 tensor [B, Hm, Skv, n]; Hm is 1, Hkv or Hq.
        causal: whether pairs above the bottom-right diagonal are hidden too.
        q_len: number of query rows Sq of the intervals; attention with another number raises. None is the length of q,
            and in methods kv_len.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: the shape does not fit the table, an axis is empty, or `q_len` is not in 1..2**31 - 1.

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
        check_tensor("indices", indices, "an int32", "[B, Hm, Skv, n]")
        check_bool("causal", causal)
        q_len = None if q_len is None else as_length("q_len", q_len)
        allowed = (1, 2) if causal else (2, 4)
        if indices.shape[-1] not in allowed:
            raise ValueError(
                f"indices with causal={causal} must have n = {allowed[0]} or {allowed[1]} on the last axis, got "
                f"{indices.shape[-1]}"
            )
        self._indices = indices
        self._causal = causal
        self._q_len = q_len
        self._plan: Any = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copy and pickle the mask without its plan."""
        make, arguments, state, *rest = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(state, tuple):  # a subclass may define another state
            state = state[0], {**state[1], "_plan": None}
        return make, arguments, state, *rest

    @property
    def indices(self) -> Tensor:
        """The intervals, int32 [B, Hm, Skv, n]; read-only, because the mask caches their plan.

        Attention notices changes by PyTorch's operators, but no writes that bypass the version counter: by
        `indices.data`, views of NumPy and DLPack, collectives, CUDA graphs, other kernels. After those call
        `mask.indices.add_(0)`.
        """
        return self._indices

    @property
    def causal(self) -> bool:
        """True if pairs above the bottom-right diagonal are hidden too."""
        return self._causal

    @property
    def q_len(self) -> int | None:
        """Number of query rows of the intervals, or None."""
        return self._q_len

    @property
    def kv_len(self) -> int:
        """Number of key columns, Skv."""
        return self.indices.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of the intervals."""
        return self.indices.device

    def __repr__(self) -> str:
        batch, heads, kv_len, n = self.indices.shape
        q_len = kv_len if self.q_len is None else self.q_len
        return (
            f"FlashMask(batch={batch}, heads={heads}, q_len={q_len}, kv_len={kv_len}, n={n}, "
            f"causal={self.causal}, device='{self.device}')"
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> FlashMask:
        """Return the mask on another device, or itself."""
        indices = self.indices.to(device, non_blocking=non_blocking)
        return self if indices is self.indices else FlashMask(indices, self.causal, q_len=self.q_len)

    def pin_memory(self) -> FlashMask:
        """Return the mask in pinned host memory."""
        indices = self.indices.pin_memory()
        return self if indices is self.indices else FlashMask(indices, self.causal, q_len=self.q_len)

    def row_count(self, q_len: int | None = None) -> int:
        """Return `q_len`, else the mask's own number of query rows, else the number of keys.

        Raises:
            ValueError: `q_len` is less than 1, or differs from the mask's own.
        """
        own = self.q_len
        if q_len is None:
            return self.kv_len if own is None else own
        q_len = as_length("q_len", q_len)
        if own is not None and own != q_len:
            raise ValueError(f"q_len={q_len}, but this mask was built for q_len={own}; build it with q_len={q_len}")
        return q_len

    def intervals(self, q_len: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return one or two hidden (start, end) intervals, int32 [B, Hm, Skv] each, without what `causal` hides."""
        return hidden_intervals(self.indices, self.causal, self.row_count(q_len))

    def visible_intervals(self, q_len: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the rows that see each key as three (start, end) intervals, int32 [B, Hm, Skv] each, in row order."""
        rows = self.row_count(q_len)
        (start, end), (other_start, other_end) = (
            (torch.where(start < end, start, rows), torch.where(start < end, end, rows))
            for start, end in hidden_intervals(without_causal_flag(self.indices, self.causal, rows), False, rows)
        )
        return [
            (torch.zeros_like(start), torch.minimum(start, other_start)),
            (torch.where(other_start < start, other_end, end), torch.maximum(start, other_start)),
            (torch.maximum(end, other_end), torch.full_like(end, rows)),
        ]

    def bidirectional(self, q_len: int | None = None) -> FlashMask:
        """Return the same mask with n = 4 and without the causal flag."""
        rows = self.row_count(q_len)
        pairs = hidden_intervals(without_causal_flag(self.indices, self.causal, rows), False, rows)
        return FlashMask(torch.stack([bound for pair in pairs for bound in pair], -1), causal=False, q_len=rows)

    def rows(self, rows: slice | Tensor | Sequence[int], q_len: int | None = None) -> FlashMask:
        """Return the mask of some query rows and all keys.

        Attention of `q[:, :, rows]` under it equals `out[:, :, rows]`. The result is not causal unless the rows are a
        slice that ends at the last row. Values outside 0..Sq are cut off.

        Args:
            rows: a slice, or ascending row numbers: integers, or an integer tensor [R], which the host reads.
            q_len: number of query rows Sq of this mask; None takes the mask's own.

        Raises:
            TypeError: `rows` is something else.
            ValueError: `rows` selects nothing, is not ascending, or lies outside 0..Sq - 1.

        Example:
            >>> from flashmask_hf import masks
            >>> masks.causal_document([2, 1]).rows([0, 2]).to_dense().int()[0, 0]
            tensor([[1, 0, 0],
                    [0, 0, 1]], dtype=torch.int32)
        """
        total = self.row_count(q_len)
        if isinstance(rows, slice):
            rows = range(total)[rows]
            if rows and rows.step == 1:
                causal = self.causal and rows.stop == total
                indices = self.indices if causal else without_causal_flag(self.indices, self.causal, total)
                return FlashMask((indices - rows.start).clamp(0, len(rows)), causal, q_len=len(rows))
        try:
            numbers = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"rows must be a slice or the numbers of rows [R], got {type(rows).__name__}") from None
        if numbers.numel() == 0:
            raise ValueError("rows must select at least one row, got none")
        if numbers.dim() != 1 or numbers.dtype == torch.bool or numbers.is_floating_point() or numbers.is_complex():
            raise TypeError(
                f"rows must be a slice or the numbers of rows [R], got {list(numbers.shape)} of {numbers.dtype}; pass "
                "nonzero()[:, 0] of a bool tensor"
            )
        numbers = numbers.to(torch.int64)  # differences of unsigned numbers would wrap around
        if int(numbers[0]) < 0 or int(numbers[-1]) >= total or not bool((numbers.diff() > 0).all()):
            raise ValueError(
                f"rows must be strictly ascending numbers in 0..{total - 1}, got {numbers[:8].tolist()}"
                f"{'...' if len(numbers) > 8 else ''}; sort them and the queries"
            )
        indices = without_causal_flag(self.indices, self.causal, total)
        return FlashMask(count_rows_before(indices, numbers), causal=False, q_len=len(numbers))

    def validate(self, q_len: int | None = None) -> FlashMask:
        """Check every value and return the mask. Waits for the device.

        Raises:
            ValueError: a value lies outside 0..Sq, or an interval's start is greater than its end.
        """
        rows = self.row_count(q_len)
        self._check_range(rows)
        for name, (start, end) in zip(("[LTS, LTE)", "[UTS, UTE)"), self.intervals(rows), strict=False):
            if bool((start > end).any()):
                where = _first_columns(start > end)
                raise ValueError(
                    f"indices hold an interval {name} with start > end at (batch, head, column) {where[:4]}; "
                    "write an empty interval with start == end, or swap the columns"
                )
        return self

    def _check_range(self, rows: int) -> None:
        bad = (self.indices < 0) | (self.indices > rows)
        if bool(bad.any()):
            where = _first_columns(bad.any(-1))
            raise ValueError(
                f"indices must lie in 0..q_len = 0..{rows}, but found {int(self.indices.min())}.."
                f"{int(self.indices.max())}; first (batch, head, column) out of range: {where[:4]}"
            )

    def to_dense(self, q_len: int | None = None) -> Tensor:
        """Return the mask as bool [B, Hm, Sq, Skv], True where visible; for tests and plots."""
        rows = self.row_count(q_len)
        row = torch.arange(rows, device=self.device).view(rows, 1)
        hidden = torch.zeros(*self.indices.shape[:2], rows, self.kv_len, dtype=torch.bool, device=self.device)
        for start, end in self.intervals(rows):
            hidden |= (row >= start.unsqueeze(-2)) & (row < end.unsqueeze(-2))
        if self.causal:
            hidden |= row < causal_starts(rows, self.kv_len, self.device)
        return ~hidden

    @classmethod
    def from_dense(cls, visible: Tensor, causal: bool | None = None) -> FlashMask:
        """Build a mask from a dense one, with the smallest n that can represent it.

        Args:
            visible: bool tensor [..., Sq, Skv] with up to two leading axes (batch, head), True where a query may look.
            causal: the form; None takes the causal form if it fits.

        Raises:
            TypeError: `visible` is not a bool tensor.
            ValueError: it has another rank, or an empty axis.
            MaskNotRepresentable: a column has more hidden intervals than fit.
        """
        visible = _with_all_axes("visible", visible, "Skv")
        if causal is None:
            try:
                return cls.from_dense(visible, causal=True)
            except MaskNotRepresentable:
                causal = False
        return cls.from_columns(lambda first, last: visible[..., first:last], visible.shape[-1], causal)

    @classmethod
    def from_columns(cls, visible: Callable[[int, int], Tensor], kv_len: int, causal: bool) -> FlashMask:
        """Build a mask as `from_dense`, in linear memory.

        Args:
            visible: (first, last) -> bool [..., Sq, last - first], the columns from `first` on.
            kv_len: number of columns.
            causal: the form.

        Raises:
            Exception: as in `from_dense`; ValueError if `kv_len` is less than 1.
        """
        if kv_len < 1:
            raise ValueError(f"kv_len must be at least 1, got {kv_len}")
        shape: list[int] = []
        runs, leaks = [], []
        for first in range(0, kv_len, _COLUMNS_PER_PASS):
            last = min(first + _COLUMNS_PER_PASS, kv_len)
            part = _with_all_axes(f"visible({first}, {last})", visible(first, last), str(last - first))
            shape = shape or list(part.shape[:3])
            if list(part.shape) != [*shape, last - first]:
                raise ValueError(
                    f"visible({first}, {last}) must be [B, H, Sq, {last - first}], of the same B, H and Sq each time, "
                    f"got {list(part.shape)}"
                )
            part_runs, part_leaks = find_hidden_runs(part, first, kv_len, causal)
            runs.append(part_runs)
            leaks.append(part_leaks)
        columns = _first_columns(torch.cat(leaks, 2))
        if columns:
            raise MaskNotRepresentable(
                f"visible shows a pair above the bottom-right diagonal: it is not causal; columns {columns[:4]}",
                columns,
            )
        return _from_runs(Runs(*(torch.cat(tensors, 2) for tensors in zip(*runs, strict=True))), causal, shape[2])

    def __bool__(self) -> bool:
        """Raise TypeError: `mask and other` would return `other`."""
        raise TypeError("a FlashMask has no truth value; combine masks with mask & other, and ask `mask is None`")

    def __and__(self, other: FlashMask) -> FlashMask:
        """Return the mask that shows a pair if both do. Waits for the device.

        Raises:
            TypeError: `other` is not a FlashMask.
            ValueError: shapes or devices do not fit (1 broadcasts); or a value lies outside 0..Sq.
            MaskNotRepresentable: a column would need more intervals than fit.
        """
        if not isinstance(other, FlashMask):
            return NotImplemented
        if self.kv_len != other.kv_len:
            raise ValueError(f"other has {other.kv_len} key columns, this mask has {self.kv_len}")
        check_device("other", other, "this mask", self)
        rows = self.row_count(other.q_len)
        self._check_range(rows)
        other._check_range(rows)
        pairs = self.intervals(rows) + other.intervals(rows)
        try:
            shape = torch.broadcast_shapes(self.indices.shape[:3], other.indices.shape[:3])
        except RuntimeError:
            raise ValueError(
                f"batch and heads must match or be 1: {list(self.indices.shape[:2])} against "
                f"{list(other.indices.shape[:2])}"
            ) from None
        starts = torch.stack([start.expand(shape) for start, _ in pairs], -1)
        ends = torch.stack([end.expand(shape) for _, end in pairs], -1)
        if self.causal or other.causal:
            diagonal = causal_starts(rows, self.kv_len, self.device).unsqueeze(-1)
            runs = unite_intervals(torch.maximum(starts, diagonal), ends, rows)
            if int(runs.count.max()) <= 1:
                return _from_runs(runs, True, rows)
            starts = torch.cat([starts, torch.zeros_like(starts[..., :1])], -1)
            ends = torch.cat([ends, diagonal.expand_as(ends[..., :1])], -1)
        return _from_runs(unite_intervals(starts, ends, rows), False, rows)

    def sparsity(self, block: tuple[int, int] = (128, 128), q_len: int | None = None) -> float:
        """Return the share of hidden tiles of `block` = (query rows, key columns): the paper's rho (section 4.3).

        Raises:
            TypeError: `block` is not two ints.
            ValueError: a size of `block` is not positive.
        """
        tiles = classify_tiles(self.indices, self.causal, self.row_count(q_len), block)
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

        Edges are bounds that several columns share; with more than 64 per side, none is marked there. On your own axes
        call `ax.legend()`.

        Args:
            path: where to save the picture, or None.
            block: tile size (query rows, key columns). None takes single elements up to a length of 128, then 32 to 128
                tiles per side.
            q_len: number of query rows; None takes the mask's own.
            batch: batch entry.
            head: mask head.
            title: text above.
            ax: matplotlib axes to draw on; None makes a figure.

        Raises:
            ImportError: matplotlib is missing.
            TypeError: `block` is not two ints.
            ValueError: there is no such batch entry or head, or a size of `block` is not positive.
        """
        from flashmask_hf.plot import plot_tiles, readable_tile

        rows = self.row_count(q_len)
        if block is None:
            size = readable_tile(max(rows, self.kv_len))
            block = (size, size)
        for name, index, size in (("batch", batch, self.indices.shape[0]), ("head", head, self.indices.shape[1])):
            if not -size <= index < size:
                raise ValueError(f"{name} must be one of the mask's {size}, got {index}")
        indices = self.indices[batch, head].cpu()  # [Skv, n]
        tiles = classify_tiles(indices[None, None], self.causal, rows, block)[0, 0]
        lower = indices[:, : 2 if self.causal or indices.shape[-1] == 4 else 1]
        return plot_tiles(tiles, block, lower, rows, path=path, title=title, ax=ax)


def check_mask(mask: Any) -> None:
    """Raise TypeError unless `mask` is a FlashMask."""
    if not isinstance(mask, FlashMask):
        raise TypeError(
            f"mask must be a FlashMask, got {type(mask).__name__}; build one with flashmask_hf.masks, from a dense "
            "bool tensor with FlashMask.from_dense, or as FlashMask(batch['startend_row_indices'], causal=True)"
        )


def check_pair(q_name: str, q: Tensor, k_name: str, k: Tensor) -> None:
    """Raise ValueError unless q [B, H, ...] and k [B, Hkv, ...] have one device and batch, and Hkv divides H."""
    check_device(k_name, k, q_name, q)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{k_name} has batch size {k.shape[0]}, {q_name} has {q.shape[0]}; they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} heads of {k_name}; each key "
            "head serves a group of query heads"
        )


def check_fit(mask: FlashMask, q: Tensor, k: Tensor) -> None:
    """Raise unless the mask is for queries [B, Hq, Sq, ...] and keys [B, Hkv, Skv, ...] on its device."""
    check_mask(mask)
    batch, heads, q_len = q.shape[:3]
    kv_heads, kv_len = k.shape[1:3]
    check_device("mask", mask, "q", q)
    if mask.kv_len != kv_len:
        raise ValueError(f"mask has {mask.kv_len} key columns, but k and v have {kv_len} keys")
    if mask.q_len is not None and mask.q_len != q_len:
        raise ValueError(f"q has {q_len} rows, but mask was built for q_len={mask.q_len}; build it with q_len={q_len}")
    mask_batch, mask_heads = mask.indices.shape[:2]
    if not is_one_of(mask_batch, 1, batch):
        raise ValueError(f"mask has batch {mask_batch}; it must be 1 or q's batch {batch}")
    if not is_one_of(mask_heads, 1, kv_heads, heads):
        raise ValueError(f"mask has {mask_heads} heads; it must have 1, Hkv = {kv_heads} or Hq = {heads}")


def _with_all_axes(name: str, visible: Tensor, columns: str) -> Tensor:
    """Return a bool tensor [..., Sq, columns] as [B, H, Sq, columns]."""
    check_tensor(name, visible, "a bool", f"[Sq, {columns}]", f"[B, Sq, {columns}]", f"[B, H, Sq, {columns}]")
    visible = visible[None] if visible.dim() == 2 else visible
    return visible[:, None] if visible.dim() == 3 else visible


def _first_columns(flags: Tensor) -> list[tuple[int, int, int]]:
    """Return the first 16 (batch, head, column) triples where a bool tensor is set."""
    return [tuple(index) for index in flags.nonzero()[:16].tolist()]


def _from_runs(runs: Runs, causal: bool, q_len: int) -> FlashMask:
    """Build the mask with the smallest n that holds `runs`; raise MaskNotRepresentable if none does."""
    limit = 1 if causal else 2
    most = int(runs.count.max())
    if most > limit:
        columns = _first_columns(runs.count > limit)
        raise MaskNotRepresentable(
            f"a column has {most} separate hidden intervals, but causal={causal} allows {limit}; first (batch, head, "
            f"column): {columns[:4]}. Reorder the tokens so that hidden rows are contiguous, or split the call",
            columns,
        )
    return FlashMask(pack_runs(runs, causal, q_len), causal, q_len=q_len)
