"""Launches by the CUDA driver's own functions, past Triton's launcher.

Triton's launcher packs all parameters of a kernel anew at each launch, and encodes each descriptor anew, much of it in
Python. Here they are packed once: launches of a kernel with the same scalars and layouts differ in addresses only, and
what is left to do at each is written in C (`native.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from flashmask_hf.kernels.native import native

__all__ = ["direct", "parameters"]

_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double, "f64": ctypes.c_double,
}  # fmt: skip
"""Triton's names of scalar types."""
_MAP_BYTES = 128
_ALIGNMENT = 128
"""Of tensor maps in memory; the driver asks for 64."""


class Map(NamedTuple):
    """A tensor map, which a descriptor is for the driver, less its address; see `cuTensorMapEncodeTiled`."""

    dtype: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]
    element_bytes: int
    fill: int


class Parameter(NamedTuple):
    """A parameter of a kernel: a value, or the address of a tensor, or a tensor map of it."""

    size: int
    """In bytes."""
    value: Any = None
    """A ctypes scalar."""
    tensor: int | None = None
    """Which of the launch's tensors, Nones left out."""
    map: Map | None = None


def direct(
    compiled: Any,
    programs: int,
    arguments: Sequence[Any],
    memory: Sequence[Tensor | None],
    starts: Sequence[int],
    switches: Sequence[tuple[Any, str]],
    otherwise: Callable[..., Any],
) -> Any:
    """Launches of `programs` programs of a kernel that Triton has compiled and launched, or None if only Triton can.

    Args:
        compiled: what Triton's launch returned.
        programs: how many.
        arguments: all of the kernel's, compile-time ones included: tensors, descriptors, scalars and Nones.
        memory: what a launch takes for the tensors among the arguments: these, or what they lie in, and Nones.
        starts: bytes of it before each of them.
        switches: objects, and the names of attributes that keep Triton's launcher in charge while these objects have
            them of their own and they are true.
        otherwise: called with what a launch is called with, where it does not launch.

    Returns:
        A function of such memory, which differs in its addresses alone. It launches on the current stream of their
        device, unless another context is current than now, or the driver refuses: Triton's launcher knows what to do
        then, or how to say it. Its method `attempt` returns whether it launched, and calls nothing otherwise. Several
        threads may launch at a time, as long as the interpreter has its lock.
    """
    module, driver = native(), _driver()
    if module is None or driver is None:
        return None
    try:
        if compiled.metadata.tensordesc_meta and compiled.metadata.target.arch != 90:
            return None  # Triton corrects what some drivers make of small tensors' descriptors, wrong for Blackwell
        found = parameters(compiled, arguments)
        metadata, function = compiled.metadata, compiled.function
        if found is None or driver.sizes(function) != [parameter.size for parameter in found]:
            return None
        addresses = [x.data_ptr() + start for x, start in zip(memory, starts, strict=True) if x is not None]
        image, places, mapped = _image(driver, found, addresses)
        return module.Launch(
            function, programs, 32 * metadata.num_warps, metadata.shared, image, tuple(places), tuple(mapped),
            tuple(memory), tuple(starts), tuple(switches), otherwise,
        )  # fmt: skip
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):  # another Triton, or too much for a launch
        return None


def parameters(compiled: Any, arguments: Sequence[Any]) -> list[Parameter] | None:
    """What a compiled kernel takes for arguments, as Triton's launcher passes it, or None if it does more than that.

    Compile-time arguments, and those that Triton has made such, are none. A descriptor becomes a tensor map, sizes and
    strides. Two addresses of scratch memory come last.
    """
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.instrumentation_mode:
        return None
    maps = iter(metadata.tensordesc_meta or ())
    found: list[Parameter] = []
    tensors = 0
    for kind, value in zip(compiled.src.signature.values(), arguments, strict=True):
        described = hasattr(value, "block_shape")
        if kind == "constexpr":
            pass
        elif described:
            sizes, strides = [*value.shape], [*value.strides]
            found.append(Parameter(_MAP_BYTES, tensor=tensors, map=_map_of(value, next(maps, {}))))
            found += [Parameter(4, ctypes.c_int32(x)) for x in sizes]
            found += [Parameter(8, ctypes.c_int64(x)) for x in strides]
        elif kind[0] == "*":
            found.append(Parameter(8, tensor=tensors))
        else:
            found.append(Parameter(ctypes.sizeof(_SCALARS[kind]), _SCALARS[kind](value)))
        tensors += described or isinstance(value, Tensor)
    return [*found, *[Parameter(8, c_uint64(0))] * 2]


def _map_of(descriptor: Any, metadata: dict[str, Any]) -> Map:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if metadata["fp4_padded"] or metadata.get("is_im2col") or getattr(descriptor, "round_f32_to_tf32", False):
        raise ValueError("a descriptor of a kind that no kernel here has")
    return Map(
        TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]], metadata["swizzle"], tuple(descriptor.shape),
        tuple(descriptor.strides), tuple(metadata["block_size"]), metadata["elem_size"], descriptor.padding == "nan",
    )  # fmt: skip


def _image(driver: _Driver, found: Sequence[Parameter], addresses: Sequence[int]) -> tuple[bytes, list[int], list[int]]:
    """Parameters in memory, their places, and the tensors that tensor maps are of.

    The maps come first in memory, then the addresses of the tensors, then values.
    """
    maps = [p for p in found if p.map is not None]
    slots = _MAP_BYTES * len(maps)
    memory = (ctypes.c_uint8 * (slots + 8 * (len(addresses) + len(found)) + _ALIGNMENT))()
    start = -addressof(memory) % _ALIGNMENT
    places: list[int] = []
    mapped: list[int] = []
    for i, parameter in enumerate(found):
        place = slots + 8 * (len(addresses) + i)
        if parameter.map is not None:
            assert parameter.tensor is not None
            place = _MAP_BYTES * len(mapped)
            mapped.append(parameter.tensor)
            if driver.encode(addressof(memory) + start + place, parameter.map, addresses[parameter.tensor]):
                raise ValueError("a tensor of which there is no tensor map")
        elif parameter.tensor is not None:
            place = slots + 8 * parameter.tensor
        else:
            ctypes.memmove(addressof(memory) + start + place, byref(parameter.value), parameter.size)
        places.append(place)
    return bytes(memory)[start : len(memory) - _ALIGNMENT + start], places, mapped


class _Driver:
    """What is called of the CUDA driver once for a kernel; a status of 0 is success."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, c_void_p
        self._encode: Any = library.cuTensorMapEncodeTiled
        self._encode.argtypes = [pointer, number, number, pointer, *[pointer] * 4, *[number] * 4]
        self._size: Any = library.cuFuncGetParamInfo
        self._size.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]

    def encode(self, place: int, tiles: Map, address: int) -> int:
        """Write a tensor map of `address` to memory at `place`."""
        rank = len(tiles.shape)
        shape = (c_uint64 * rank)(*reversed(tiles.shape))
        strides = (c_uint64 * rank)(*(x * tiles.element_bytes for x in reversed(tiles.strides[:-1])))
        tile, steps = (ctypes.c_uint32 * rank)(*reversed(tiles.tile)), (ctypes.c_uint32 * rank)(*[1] * rank)
        no_interleave, promote_128_bytes = 0, 2
        return self._encode(
            place, tiles.dtype, rank, address, shape, strides, tile, steps, no_interleave, tiles.swizzle,
            promote_128_bytes, tiles.fill,
        )  # fmt: skip

    def sizes(self, function: int) -> list[int]:
        """Bytes of each parameter of a kernel."""
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while self._size(function, len(found), byref(offset), byref(size)) == 0:
            found.append(size.value)
        return found


@lru_cache(maxsize=1)
def _driver() -> _Driver | None:
    try:
        return _Driver()
    except (AttributeError, OSError):  # an old driver, or none
        return None
