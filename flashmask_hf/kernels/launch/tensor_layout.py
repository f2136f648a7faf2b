"""Layouts of tensors: all that a launch depends on but the memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Shape, strides, dtype and device of a tensor, and whether its memory is aligned to 16 bytes.

    Triton compiles other loads for unaligned memory, and tensor descriptors refuse it.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True

    def allocator(self, device: str | None = None) -> Callable[[], Tensor]:
        """Return a function that allocates tensors of this layout, on `device` if given."""
        place = device or self.device
        return partial(torch.empty_strided, tuple(self.shape), self.strides, dtype=self.dtype, device=place)


def layout_of(x: Tensor) -> Layout:
    """Read the layout of a tensor."""
    return Layout(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


def packed_layout(*shape: int, dtype: torch.dtype, device: torch.device, order: tuple[int, ...] = ()) -> Layout:
    """Return the layout of a tensor without gaps.

    `order` names axes from the outermost in memory to the innermost; empty is the order of `shape`.
    """
    strides = torch.empty_permuted(shape, order or tuple(range(len(shape))), device="meta").stride()
    return Layout(torch.Size(shape), strides, dtype, device)


def layout_like(x: Layout) -> Layout:
    """Return the layout that `torch.empty_like` gives to a tensor of layout `x`."""
    return x._replace(strides=torch.empty_like(x.allocator("meta")()).stride(), aligned=True)


def results_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised `out`, stored as [B, Sq, Hq, Dv], and `lse` of attention with queries q and values v."""
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, q_len, dtype=torch.promote_types(q.dtype, torch.float32))
