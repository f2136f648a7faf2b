"""Layouts of tensors, and the tensor descriptors that kernels load and store tiles through.

A descriptor checks all that it is given, which takes as long as a launch: each layout's is made and checked once, and
copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Layout(NamedTuple):
    """What a launch depends on of a tensor, its memory apart."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def maker(self, device: str | None = None) -> Callable[[], Tensor]:
        """Makes tensors like it, uninitialised, in half the time that `torch.empty` takes on a CPU."""
        place = device or self.device
        return partial(torch.empty_strided, tuple(self.shape), self.strides, dtype=self.dtype, device=place)


def packed_layout(*shape: int, dtype: torch.dtype, device: torch.device, order: tuple[int, ...] = ()) -> Layout:
    """That of a tensor without gaps, its axes from the outermost in memory in `order`, or as they are."""
    strides = torch.empty_permuted(shape, order or tuple(range(len(shape))), device="meta").stride()
    return Layout(torch.Size(shape), strides, dtype, device)


class Part(NamedTuple):
    """Where a tensor lies in memory that it shares with others."""

    layout: Layout
    start: int
    """Bytes before it."""

    def of(self, memory: Tensor) -> Tensor:
        """The tensor."""
        shape, strides, dtype, _ = self.layout
        return memory.view(dtype).as_strided(shape, strides, self.start // dtype.itemsize)


def side_by_side(**layouts: Layout) -> tuple[Layout, dict[str, Part]]:
    """The layout of memory for tensors without gaps on one device, and where they lie in it, at multiples of 128 bytes.

    One allocation takes the host less time than several.
    """
    parts: dict[str, Part] = {}
    size = 0
    for name, layout in layouts.items():
        parts[name] = Part(layout, size)
        size += -(-layout.shape.numel() * layout.dtype.itemsize // 128) * 128
    (device,) = {layout.device for layout in layouts.values()}
    return packed_layout(size, dtype=torch.uint8, device=device), parts


def layout_like(x: Layout) -> Layout:
    """That of `torch.empty_like` of a tensor."""
    return x._replace(strides=torch.empty_like(x.maker("meta")()).stride())


def layout_of(x: Tensor) -> Layout:
    """The layout of a tensor."""
    return Layout(x.shape, x.stride(), x.dtype, x.device)


def tiles_template(tma: bool, *tiles: tuple[Layout, int, int]) -> tuple[Any, ...]:
    """Templates of descriptors for tiles (layout, height, width) of the last two axes; none for loads by pointers."""
    if not tma:
        return ()
    return tuple(
        template(TensorDescriptor, layout, *[1] * (len(layout.shape) - 2), height, width)
        for layout, height, width in tiles
    )


def can_describe(*tensors: Tensor) -> bool:
    """Whether every tensor's layout fits a tensor descriptor on a device that loads through them (Hopper and later)."""
    first = tensors[0]
    if first.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(first.device)[0] < 9:
        return False
    return all(fits_descriptor(x) for x in tensors)


def describable(x: Tensor) -> Tensor:
    """`x`, copied unless a tensor descriptor fits its layout; like `torch.empty_like` of it, if one fits that."""
    if fits_descriptor(x):
        return x
    copy = torch.empty_like(x)
    if not fits_descriptor(copy):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def fits_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made of `x`."""
    return x.data_ptr() % 16 == 0 and _layout_fits(x.shape, x.stride(), x.dtype)


@lru_cache(maxsize=4096)
def _layout_fits(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = 16 // dtype.itemsize
    harmless = _harmless_strides(shape, strides, dtype)
    return strides[-1] == 1 and all(stride > 0 and stride % step == 0 for stride in harmless[:-1])


def _harmless_strides(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """Strides for a descriptor: those of axes of length 1, which may be anything but for the last, made harmless."""
    step = 16 // dtype.itemsize
    last = len(shape) - 1
    return [
        step if size == 1 and axis < last else stride
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
    ]


@lru_cache(maxsize=4096)
def template(make: Callable[..., Any], layout: Layout, *block: int) -> Any:
    """A descriptor `make(x, shape, strides, block)` less its memory, for `described`; the layout fits one."""
    strides = _harmless_strides(layout.shape, layout.strides, layout.dtype)
    return make(layout.maker("meta")(), list(layout.shape), strides, list(block))


def described(template: Any, x: Tensor) -> Any:
    """The descriptor of a tensor of the template's layout."""
    copy = object.__new__(type(template))
    vars(copy).update(vars(template), base=x)
    return copy
