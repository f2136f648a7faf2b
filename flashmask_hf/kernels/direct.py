"""Launches by the CUDA driver's own functions, past Triton's launcher.

Triton's launcher packs all parameters of a kernel anew at each launch, and encodes each descriptor anew, much of it in
Python. Here they are packed once: launches of a kernel with the same scalars and layouts differ in addresses only.
Likewise the driver clears memory without the dispatcher.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashmask_hf.kernels.descriptors import Layout

__all__ = ["Direct", "direct", "parameters", "zeros"]

_COMPARED = (3, 6), (3, 9)
"""Versions of Triton, the first and the last, whose launchers pass what `parameters` tells."""
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


def direct(compiled: Any, programs: int, arguments: Sequence[Any]) -> Direct | None:
    """Launches of `programs` programs of a kernel that Triton has compiled and launched, or None if only Triton can.

    Args:
        compiled: what Triton's launch returned.
        programs: how many.
        arguments: all of the kernel's, compile-time ones included: tensors, descriptors, scalars and Nones.
    """
    if not _COMPARED[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= _COMPARED[1]:
        return None
    functions = _functions()
    try:
        if compiled.metadata.tensordesc_meta and compiled.metadata.target.arch != 90:
            return None  # Triton corrects what some drivers make of small tensors' descriptors, wrong for Blackwell
        found = parameters(compiled, arguments)
        metadata, function = compiled.metadata, compiled.function
    except (AttributeError, KeyError, TypeError, ValueError):  # another Triton
        return None
    if functions is None or found is None or functions.sizes(function) != [parameter.size for parameter in found]:
        return None
    return Direct(functions, function, programs, 32 * metadata.num_warps, metadata.shared, found)


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


def zeros(layout: Layout) -> Tensor:
    """Zeros in a layout without gaps, on the current device if it is on a GPU."""
    x = layout.empty()
    functions = _functions() if x.is_cuda else None
    if functions is not None and not torch.cuda.is_current_stream_capturing():  # a graph runs a kernel faster
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        if functions.clear(x.data_ptr(), 0, x.nbytes, stream) == 0:
            return x
    return x.zero_()


class Direct:
    """Launches of one kernel that differ in addresses alone, made by `direct`.

    They may come from several threads at a time: each takes a packet of parameters for itself.
    """

    def __init__(
        self, functions: _Functions, function: int, programs: int, threads: int, shared: int, found: list[Parameter]
    ):
        self._functions = functions
        self._launch = functions.launch
        self._grid = function, programs, 1, 1, threads, 1, 1, shared
        self._parameters = found
        self._free: list[_Packet] = []

    def __call__(self, addresses: list[int], stream: int) -> bool:
        """Launch with these addresses of the tensors, on a stream of the current device.

        Returns:
            Whether it was launched. If not, Triton's launcher knows what to do, or how to say it.
        """
        try:
            packet = self._free.pop()
        except IndexError:
            packet = _Packet(self._functions, self._parameters)
        launched = packet.address(addresses) and not self._launch(*self._grid, stream, packet.parameters, None)
        self._free.append(packet)
        return launched


class _Packet:
    """The parameters of a launch in memory, as the driver takes them; it copies them at the launch."""

    def __init__(self, functions: _Functions, found: list[Parameter]):
        self._functions = functions
        tensors = 1 + max((p.tensor for p in found if p.tensor is not None), default=-1)
        maps = [p for p in found if p.map is not None]
        size = _MAP_BYTES * len(maps) + 8 * (tensors + len(found))
        memory = (ctypes.c_uint8 * (size + _ALIGNMENT))()
        skipped = -addressof(memory) % _ALIGNMENT
        self._maps: list[tuple[int, int, Map]] = []
        values = skipped + _MAP_BYTES * len(maps)
        self._slots = (c_uint64 * tensors).from_buffer(memory, values)  # which keeps the memory
        values += 8 * tensors
        places = []
        for i, parameter in enumerate(found):
            if parameter.map is not None:
                assert parameter.tensor is not None
                place = addressof(memory) + skipped + _MAP_BYTES * len(self._maps)
                self._maps.append((place, parameter.tensor, parameter.map))
            elif parameter.tensor is not None:
                place = addressof(self._slots) + 8 * parameter.tensor
            else:
                place = addressof(memory) + values + 8 * i
                ctypes.memmove(place, byref(parameter.value), parameter.size)
            places.append(place)
        self._places = (c_void_p * len(places))(*places)
        self.parameters = addressof(self._places)
        self._known: list[int] = []

    def address(self, addresses: list[int]) -> bool:
        """Set the addresses of all tensors; returns whether the driver takes them."""
        known = self._known
        if addresses == known:
            return True
        self._known = []  # until all is done
        self._slots[:] = addresses
        for place, tensor, tiles in self._maps:
            if not known:
                status = self._functions.encode(place, tiles, addresses[tensor])
            elif known[tensor] == addresses[tensor]:
                continue
            else:
                status = self._functions.move(place, addresses[tensor])
            if status:
                return False
        self._known = addresses
        return True


class _Functions:
    """What is called of the CUDA driver; a status of 0 is success."""

    def __init__(self) -> None:
        library, holding = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, c_void_p
        self.launch: Any = library.cuLaunchKernel  # it may wait for the device, so that others may run meanwhile
        self.launch.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        self.move: Any = holding.cuTensorMapReplaceAddress
        self.move.argtypes = [pointer, pointer]
        self.clear: Any = library.cuMemsetD8Async
        self.clear.argtypes = [pointer, ctypes.c_ubyte, ctypes.c_size_t, pointer]
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
def _functions() -> _Functions | None:
    try:
        return _Functions()
    except (AttributeError, OSError):  # an old driver, or none
        return None
