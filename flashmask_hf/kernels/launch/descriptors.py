"""Tensor descriptors: Hopper and later GPUs load and store tiles through them (tensor memory accelerator, TMA).

Making a descriptor takes as long as a launch. So each layout's descriptor is made once, and launches set its `base`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmask_hf.kernels.launch.tensor_layout import Layout, layout_like, layout_of, packed_layout


def fits_descriptor(x: Layout) -> bool:
    """Return whether tensors of layout `x` can have a tensor descriptor."""
    step = 16 // x.dtype.itemsize
    strides = _strides(x)
    return x.aligned and strides[-1] == 1 and all(stride > 0 and stride % step == 0 for stride in strides[:-1])


def loads_by_descriptor(*layouts: Layout) -> bool:
    """Return whether the device has tensor descriptors (Hopper and later) and every layout fits."""
    device = layouts[0].device
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    return all(map(fits_descriptor, layouts))


def describable_layout(x: Layout) -> Layout:
    """Return layout `x`, or one that fits a tensor descriptor: by `torch.empty_like` if possible, else contiguous."""
    if fits_descriptor(x):
        return x
    like = layout_like(x)
    return like if fits_descriptor(like) else packed_layout(*x.shape, dtype=x.dtype, device=x.device)


def describable(x: Tensor) -> Tensor:
    """Return `x`, or a copy in its `describable_layout`."""
    given = layout_of(x)
    layout = describable_layout(given)
    return x if layout == given else layout.allocator()().copy_(x)


def template(make: Callable[..., Any], layout: Layout, *block: int) -> Any:
    """Return a descriptor `make(x, shape, strides, block)` whose `base`, a tensor, is on the device meta.

    `layout` must pass `fits_descriptor`; `block` is the shape of a tile.
    """
    return make(layout.allocator("meta")(), list(layout.shape), _strides(layout), list(block))


def tile_templates(*tiles: tuple[Layout, int, int]) -> tuple[Any, ...]:
    """Return templates of Triton's descriptors for tiles (layout, height, width) of the last two axes."""
    return tuple(
        template(TensorDescriptor, layout, *[1] * (len(layout.shape) - 2), height, width)
        for layout, height, width in tiles
    )


def _strides(x: Layout) -> list[int]:
    """Return strides for a descriptor; axes of length 1 get an allowed stride."""
    step = 16 // x.dtype.itemsize
    last = len(x.shape) - 1
    return [
        step if size == 1 and axis < last else stride
        for axis, (size, stride) in enumerate(zip(x.shape, x.strides, strict=True))
    ]
