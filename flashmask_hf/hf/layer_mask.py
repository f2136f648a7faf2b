"""The mask of one attention layer in a model call, and the weak cache that layers and recomputations share."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.torch_internals import device_assert, is_capturing, stream_of

_CAPACITY = 64
"""Number of masks that are kept."""

T = TypeVar("T")


class LayerMask(NamedTuple):
    """The mask of a layer, and the key that each of its columns stands for."""

    mask: FlashMask
    keys: Tensor | None = None
    """int64 [B or 1, columns]; None where column j is key j."""

    def gather(self, x: Tensor) -> Tensor:
        """Return keys or values [B, H, S, D] in the order of the columns, [B, H, columns, D]."""
        if self.keys is None:
            return x
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        return x.transpose(1, 2)[batch, self.keys].transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return attention [B, Hq, Sq, Dv] under the mask; `options` as in `flashmask_attention`."""
        if self.keys is not None:
            key, value = self.gather(key), self.gather(value)
        return flashmask_attention(query, key, value, self.mask, **options)


class _Entry(NamedTuple):
    """A cached mask.

    Attributes:
        mask: what was built.
        state: memory and version of its sources at that time.
        aliases: of the sources, so that their memory is not reused.
        watcher: weak reference to the first source, which drops the entry.
    """

    mask: Any
    state: tuple[Any, ...]
    aliases: tuple[Tensor, ...]
    watcher: Any


_entries: OrderedDict[Hashable, _Entry] = OrderedDict()


def cached_mask(
    sources: tuple[Tensor, ...], variant: tuple[Hashable, ...], build: Callable[[], T], *, per_forward: bool = True
) -> T:
    """Return `build()`, or its earlier result for the same tensors.

    Tensors are identified by their memory, so aliases from checkpointing find the same mask. An entry per first source,
    variant and CUDA stream is dropped when the first source is freed, any source changes, or `_CAPACITY` others are
    newer. The mask may hold an alias of `sources[0]`, but not itself.

    Args:
        sources: what `build` reads.
        variant: what else the mask depends on.
        build: builds the mask.
        per_forward: whether a source is new in each forward. If not, nothing is kept of tensors of inference mode,
            which do not count changes, nor in a CUDA graph.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return build()  # a compiler merges equal plans, and a transform's tensors are its own
    if any([type(x) is not Tensor for x in sources]):
        return build()
    stream = stream_of(sources[0]) if sources else None
    if not per_forward and (is_capturing(sources[0]) or any([x.is_inference() for x in sources])):
        return build()
    inference = torch.is_inference_mode_enabled()  # autograd cannot save tensors made there
    memory = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in sources]
    key = (*memory[:1], variant, stream, inference)
    state = (memory[1:], [0 if x.is_inference() else x._version for x in sources])
    entry = _entries.get(key)
    if entry is not None and entry.state == state:
        return entry.mask
    watcher = weakref.ref(sources[0], lambda _, entries=_entries: entries.pop(key, None)) if sources else None
    entry = _Entry(build(), state, tuple(x.detach() for x in sources), watcher)
    _entries.pop(key, None)  # so that it comes last
    _entries[key] = entry
    while len(_entries) > _CAPACITY:
        _entries.popitem(last=False)
    return entry.mask


_REFUSED = (
    "attention_mask must be None, a FlashMask or what the mask hook makes of a 2D mask, got {}; make "
    f"FlashMask.from_dense(mask).bidirectional().indices and pass it as {VECTORS}"
)

BOUNDS = {2: 1, 3: 2, 5: 4, 6: 4}
"""Bounds per key by the rows of a marked mask: the last is the mark; of six, the fifth has the keys."""


def marked_rows(mask: LayerMask) -> Tensor:
    """Return a mask as marked rows, int32 [B, H, n + 1 or n + 2, columns]; the last row, -1 - LTS, is the mark."""
    is_flat = mask.mask.causal or mask.mask.indices.shape[3] == 4
    flat = mask.mask if is_flat else mask.mask.bidirectional()
    rows = flat.indices.transpose(2, 3)
    if mask.keys is not None:
        keys = mask.keys[:, None, None].to(torch.int32).expand(-1, rows.shape[1], -1, -1)
        rows = torch.cat([rows, keys.expand(rows.shape[0], -1, -1, -1)], 2)
    rows = torch.cat([rows, -1 - rows[:, :, :1]], 2)
    if type(rows) is Tensor and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        rows._flashmask = LayerMask(flat, mask.keys)  # type: ignore[attr-defined]
    return rows


def mask_of_rows(rows: Any, kv_len: int) -> LayerMask | None:
    """Return the mask of marked rows, kept on the tensor or cached for an alias of it; None for anything else.

    Raises:
        ValueError: the rows are of another number of keys.
        RuntimeError: the rows lack the mark, as a dense mask of the same shape (a device-side check).
    """
    if not isinstance(rows, Tensor) or rows.dtype != torch.int32 or rows.dim() != 4 or rows.shape[2] not in BOUNDS:
        return None
    if rows.shape[2] < 6 and rows.shape[3] != kv_len:
        raise ValueError(
            f"attention_mask has {rows.shape[3]} keys, but this layer has {kv_len}; pass a 2D attention_mask that "
            "covers cache and new tokens"
        )
    kept = None if torch.compiler.is_compiling() else getattr(rows, "_flashmask", None)
    if kept is not None:
        is_inference = rows.is_inference()  # autograd cannot save its mask
        if is_inference == torch.is_inference_mode_enabled() and (is_inference or rows._version == 0):
            return kept
    return cached_mask((rows,), ("marked",), lambda: _read(rows))


def _read(rows: Tensor) -> LayerMask:
    device_assert((rows[:, :, -1] == -1 - rows[:, :, 0]).all(), _REFUSED.format("a tensor of integers"))
    count = rows.shape[2]
    indices = rows.detach()[:, :, : BOUNDS[count]].transpose(2, 3).contiguous()
    keys = rows.detach()[:, 0, 4].to(torch.int64) if count == 6 else None
    return LayerMask(FlashMask(indices, causal=count < 4), keys)


_MARKS = {1: -(2**31), 4: -(2**30)}
"""Bits that mark the hook's columns, by their rows, so that neither a caller's columns nor a slice of rows has them."""


def marked_columns(columns: Tensor) -> Tensor:
    """Return the hook's columns, which are less than 2**29, with the bits of their mark flipped."""
    return columns ^ _MARKS[columns.shape[2]]


def columns_of(attention_mask: Any) -> Tensor:
    """Return the columns in the hook's result, int32 [B or 1, 1, n, Skv], which have a layer's window.

    Raises:
        ValueError: the form is wrong.
        RuntimeError: the mark is missing, as in a caller's columns (a device-side check).
    """
    got = type(attention_mask).__name__
    if isinstance(attention_mask, Tensor):
        if attention_mask.dtype == torch.int32 and attention_mask.dim() == 4 and attention_mask.shape[2] in _MARKS:
            return cached_mask((attention_mask,), ("columns",), lambda: _unmark(attention_mask))
        got = f"{attention_mask.dtype} of shape {list(attention_mask.shape)}"
    raise ValueError(_REFUSED.format(got))


def _unmark(marked: Tensor) -> Tensor:
    columns = marked_columns(marked)
    device_assert((columns >> 29 == 0).all(), _REFUSED.format("a tensor of integers"))
    return columns


def hidden_keys(hooked: Tensor, q_len: int) -> Tensor:
    """Return which keys the hook's columns [B, 1, n, Skv] hide from all rows; bool [B, 1, Skv]."""
    hidden = hooked[:, :, 0] == 0
    return hidden if hooked.shape[2] == 1 else hidden & (hooked[:, :, 1] >= q_len)
