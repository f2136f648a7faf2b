"""Weak cache of masks, shared by all layers and recomputations of a forward."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashmask_hf.torch_internals import device_assert, is_capturing, stream_of

__all__ = ["cached_mask", "check_once"]

_CAPACITY = 64
"""Number of masks that are kept."""

T = TypeVar("T")


class _Entry(NamedTuple):
    """A cached mask.

    Attributes:
        mask: what was built.
        state: memory and version of its sources when it was built.
        aliases: aliases of the sources, which keep their memory from being reused.
        watcher: weak reference to the first source, whose callback drops the entry.
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

    Tensors are identified by the memory they view, so aliases from checkpointing find the same mask. There is one entry
    for a first source, a variant and a CUDA stream. It is dropped when the first source is freed, any source changes,
    or `_CAPACITY` others are newer. It keeps the memory of the other sources. The mask must not hold `sources[0]`,
    which would keep the entry alive; an alias is fine.

    Args:
        sources: what `build` reads.
        variant: what else the mask depends on.
        build: builds the mask.
        per_forward: whether one of the sources is new in each forward. If not, nothing is kept of tensors made in
            inference mode, which do not count changes, nor in a CUDA graph, whose replays read them again.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return build()  # a compiler merges equal plans, and a transform's tensors are its own
    if any(type(x) is not Tensor for x in sources):
        return build()
    if not per_forward and (is_capturing(sources[0]) or any(x.is_inference() for x in sources)):
        return build()
    inference = torch.is_inference_mode_enabled()  # autograd cannot save tensors made there
    memory = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in sources)
    key = (memory[:1], variant, stream_of(sources[0]) if sources else None, inference)
    state = (memory[1:], tuple(0 if x.is_inference() else x._version for x in sources))
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


def check_once(
    sources: tuple[Tensor, ...],
    variant: tuple[Hashable, ...],
    holds: Callable[[], Tensor],
    message: str,
    *,
    per_forward: bool = True,
) -> None:
    """Assert `holds()`, bool [], on the device once per forward. Other arguments as in `cached_mask`."""
    cached_mask(sources, variant, lambda: device_assert(holds(), message), per_forward=per_forward)
