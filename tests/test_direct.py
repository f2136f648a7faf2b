"""Launches past Triton's launcher: what reaches the driver, what is left to Triton, and what else is done in C."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import INTERPRETED, poisoned
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from flashmask_hf import flashmask_attention, masks, ops, repeated

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter compiles nothing", allow_module_level=True)
if not ops.HAS_TRITON:
    pytest.skip("cpu lane: Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from stand_ins import describe, on_gpu
from triton.runtime import build

from flashmask_hf.kernels import direct as direct_module
from flashmask_hf.kernels import native
from flashmask_hf.kernels.descriptors import layout_of, tiles_template
from flashmask_hf.kernels.direct import direct
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.native import clear, is_capturing

FUNCTION = 0x1234
KINDS = {
    "x": "tensordesc<bf16[1,1,64,32]>", "y": "*fp32", "z": "constexpr", "rows": "i32", "far": "i64",
    "heads": "constexpr", "flag": "i1", "scale": "fp32", "SIZE": "constexpr",
}  # fmt: skip
SIZES = [128, *[4] * 4, *[8] * 4, 8, 4, 8, 1, 4, 8, 8]
X = torch.zeros(2, 100, 3, 32, dtype=torch.bfloat16).transpose(1, 2)
Y = torch.zeros(6)


class _Library:
    """A driver that notes what it is told, as functions in C; its tensor maps hold the address of the tensor only."""

    def __init__(self) -> None:
        self.sizes = SIZES
        self.context: int | None = 77
        self.capturing = 0
        self.launched: list[dict[str, Any]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.described: list[int] = []
        self.moved: list[int] = []
        self.cleared: list[tuple[Any, ...]] = []
        self.misplaced: list[int] = []
        self.meanwhile: Callable[[], Any] = lambda: None
        self.status = dict.fromkeys(("launch", "encode", "move", "clear", "capturing", "context"), 0)
        number, pointer, size = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t

        def function(call: Callable[..., int], *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call)

        self.cuLaunchKernel = function(self._launch, pointer, *[number] * 7, *[pointer] * 3)
        self.cuTensorMapReplaceAddress = function(self._move, pointer, pointer)
        self.cuMemsetD8Async = function(self._clear, pointer, ctypes.c_ubyte, size, pointer)
        self.cuStreamIsCapturing = function(self._capturing, pointer, ctypes.POINTER(ctypes.c_int))
        self.cuCtxGetCurrent = function(self._context, ctypes.POINTER(pointer))
        self.cuTensorMapEncodeTiled = function(self._encode, pointer, number, number, *[pointer] * 5, *[number] * 4)
        self.cuFuncGetParamInfo = function(self._size, pointer, size, pointer, pointer)

    def _launch(self, function: int, *given: Any) -> int:
        *geometry, stream, parameters, extra = given
        self.meanwhile()
        places = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.misplaced += [place for place, size in zip(places, self.sizes, strict=True) if place % min(size, 64)]
        found = {"function": function, "geometry": geometry, "stream": stream, "values": values, "extra": extra}
        self.launched.append(found)
        return self.status["launch"]

    def _move(self, place: int, address: int) -> int:
        self.misplaced += [place] * (place % 64 != 0)
        self.moved.append(address)
        ctypes.c_uint64.from_address(place).value = 0 if self.status["move"] else address
        return self.status["move"]

    def _encode(self, place: int, dtype: int, rank: int, address: int, *given: Any) -> int:
        shape, strides, tile, steps, *more = given
        self.misplaced += [place] * (place % 64 != 0)
        self.described.append(address)
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        sizes = [*wide.from_address(shape)], [*wide.from_address(strides)][: rank - 1]
        self.encoded.append((dtype, rank, *sizes, *([*narrow.from_address(x)] for x in (tile, steps)), tuple(more)))
        ctypes.c_uint64.from_address(place).value = address
        return self.status["encode"]

    def _clear(self, *given: Any) -> int:
        self.cleared.append(given)
        return self.status["clear"]

    def _capturing(self, stream: Any, found: Any) -> int:
        found[0] = self.capturing
        return self.status["capturing"]

    def _context(self, found: Any) -> int:
        found[0] = self.context
        return self.status["context"]

    def _size(self, function: int, index: int, offset: int, size: int) -> int:
        if function != FUNCTION or index == len(self.sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = self.sizes[index]
        return 0


def _forget() -> None:
    for cached in (direct_module._driver, native.native):
        cached.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Library]:
    found = _Library()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: found)
        _forget()
        yield found
    assert not found.misplaced
    _forget()
    native.native()  # or what it calls would be gone


@pytest.fixture
def patch(library: _Library) -> Iterator[pytest.MonkeyPatch]:
    """Undone before the driver is, so that all is as it was when functions are taken again."""
    with pytest.MonkeyPatch.context() as found:
        yield found


def _compiled(**changes: Any) -> Any:
    """What Triton returns of a launch of a kernel with the arguments of `_arguments`."""
    tiles = {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 32], "fp4_padded": False}
    metadata = {
        "num_warps": 12, "shared": 4096, "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0, "instrumentation_mode": "", "tensordesc_meta": [tiles],
    }  # fmt: skip
    tiles |= changes.pop("tiles", {})
    metadata["target"] = SimpleNamespace(arch=changes.pop("arch", 90))
    signature = KINDS | changes.pop("signature", {})
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(**metadata | changes), function=FUNCTION
    )


def _arguments() -> list[Any]:
    return [describe(X, 1, 1, 64, 32), Y, None, 100, 2**40, 1, True, 0.25, 64]


def _unused(*_: Any) -> Any:
    raise AssertionError


def _direct(compiled: Any = None, switches: Any = (), otherwise: Any = _unused) -> Any:
    compiled = _compiled() if compiled is None else compiled
    return direct(compiled, 5, _arguments(), (X, Y, None), (0, 0, 0), switches, otherwise)


def _bytes(kind: Any, *values: Any) -> list[bytes]:
    return [bytes(kind(value)) for value in values]


def _address(value: bytes) -> int:
    return int.from_bytes(value[:8], "little")


def test_the_driver_gets_what_triton_would_pass(library: _Library) -> None:
    """Each parameter, descriptors with sizes and strides; what is known when compiling is none."""
    launch = _direct()
    assert launch is not None
    assert launch.attempt(X, Y, None)
    (found,) = library.launched
    assert (found["function"], found["stream"], found["extra"]) == (FUNCTION, None, None)
    assert found["geometry"] == [5, 1, 1, 12 * 32, 1, 1, 4096]
    tiles, *values = found["values"]
    assert _address(tiles) == X.data_ptr()
    assert values == [
        *_bytes(ctypes.c_int32, 2, 3, 100, 32), *_bytes(ctypes.c_int64, 9600, 32, 96, 1),
        *_bytes(ctypes.c_uint64, Y.data_ptr()), *_bytes(ctypes.c_int32, 100), *_bytes(ctypes.c_int64, 2**40),
        *_bytes(ctypes.c_int8, 1), *_bytes(ctypes.c_float, 0.25), *_bytes(ctypes.c_uint64, 0, 0),
    ]  # fmt: skip
    bfloat16, swizzle_64_bytes, fill_with_zeros = 9, 2, 0
    more = (0, swizzle_64_bytes, 2, fill_with_zeros)
    assert library.encoded == [(bfloat16, 4, [32, 100, 3, 2], [192, 64, 19200], [32, 64, 1, 1], [1] * 4, more)]


def test_what_changes_is_addresses(library: _Library) -> None:
    launch = _direct()
    first, second = torch.zeros_like(X), torch.zeros(8)[4:]  # a part of a tensor begins where it does
    for tensors in ((X, Y), (X, Y), (X, second), (first, second), (X, Y)):
        assert launch.attempt(*tensors, None)
        values = library.launched[-1]["values"]
        assert [_address(values[place]) for place in (0, 9)] == [x.data_ptr() for x in tensors]
        assert values[1:9] + values[10:] == library.launched[0]["values"][1:9] + library.launched[0]["values"][10:]
    assert len(library.encoded) == 1
    assert library.moved == [x.data_ptr() for x in (X, first, X)]


def test_a_tensor_may_lie_in_memory_that_it_shares(library: _Library) -> None:
    """Then its memory is given, and it begins where it lies; far behind the beginning, too."""
    memory, starts = torch.zeros(1024, dtype=torch.uint8), (256, 2**33 + 128, 0)
    launch = direct(_compiled(), 5, _arguments(), (memory, Y, None), starts, (), _unused)
    assert launch is not None
    assert library.described == [memory.data_ptr() + 256]
    for first in (memory, memory.clone()):
        assert launch.attempt(first, Y, None)
        values = library.launched[-1]["values"]
        assert _address(values[0]) == first.data_ptr() + 256
        assert _address(values[9]) == Y.data_ptr() + 2**33 + 128
    assert launch.attempt(X, Y, None) is False  # of another dtype
    unaligned = direct(_compiled(), 5, _arguments(), (memory, Y, None), (8, 0, 0), (), _unused)
    assert unaligned.attempt(memory, Y, None) is False
    module = native.native()
    with pytest.raises(ValueError, match="begins somewhere"):
        module.Launch(FUNCTION, 1, 32, 0, b"", (), (), (X,), (0, 0), (), None)
    with pytest.raises(OverflowError):
        module.Launch(FUNCTION, 1, 32, 0, b"", (), (), (X,), (2**64,), (), None)


def test_each_descriptor_has_its_own_tensor(library: _Library) -> None:
    compiled = _compiled()
    compiled.src.signature = {"y": KINDS["y"], "x": KINDS["x"], "z": KINDS["x"]}
    compiled.metadata.tensordesc_meta *= 2
    library.sizes = [8, *SIZES[:9], *SIZES[:9], 8, 8]
    z = torch.zeros_like(X)
    arguments = [Y, describe(X, 1, 1, 64, 32), describe(z, 1, 1, 64, 32)]
    launch = direct(compiled, 5, arguments, (Y, X, z), (0, 0, 0), (), _unused)
    assert launch is not None
    for tensors in ((Y, X, z), (Y, z, X)):
        assert launch.attempt(*tensors)
        values = library.launched[-1]["values"]
        assert [_address(values[place]) for place in (0, 1, 10)] == [x.data_ptr() for x in tensors]


OTHER_TENSORS: dict[str, tuple[Any, ...]] = {
    "dtype": (X, Y.int(), None),
    "dtype of a descriptor's": (X.half(), Y, None),
    "none": (X, None, None),
    "a tensor for none": (X, Y, Y),
    "fewer": (X, Y),
    "more": (X, Y, None, None),
    "no tensor": (X, 1, None),
    "an address": (X, torch.zeros(7)[1:], None),
    "another device": (X, Y.to("meta"), None),
    "no memory": (X, Y.to_sparse(), None),
}


@pytest.mark.parametrize("other", OTHER_TENSORS)
def test_other_tensors_are_left_to_triton(library: _Library, other: str) -> None:
    launch = _direct()
    assert launch.attempt(X, Y, None)
    assert launch.attempt(*OTHER_TENSORS[other]) is False
    assert launch.attempt(X, Y, None)
    assert len(library.launched) == 2


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32),
        ("axes", ctypes.c_int32), ("dtype", ctypes.c_uint32), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    )  # fmt: skip


class _Exchange(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), *[(f"unused_{i}", ctypes.c_void_p) for i in range(4)],
        ("view", ctypes.c_void_p), ("stream", ctypes.c_void_p),
    )  # fmt: skip


class _Capsules:
    """What tensors offer to C, with views that `change` changes; each device has a current stream."""

    def __init__(self, change: Callable[[Any, Any], None]):
        python = ctypes.pythonapi
        open_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", python)
        )
        make_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", python)
        )
        place = open_capsule(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
        self.exchange = _Exchange.from_buffer_copy(_Exchange.from_address(place))
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_View))
        known = kind(self.exchange.view)

        def view(x: Any, found: Any) -> int:
            status = known(x, found)
            change(x, found[0])
            return status

        self.view = kind(view)
        self.exchange.view = ctypes.cast(self.view, ctypes.c_void_p).value
        self.streams: dict[int, int] = {0: 0x700}  # of the devices, by their indices
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
        self.stream = kind(self._stream)
        self.exchange.stream = ctypes.cast(self.stream, ctypes.c_void_p).value
        self.capsule = make_capsule(ctypes.addressof(self.exchange), b"dlpack_exchange_api", None)

    def _stream(self, device_type: int, index: int, found: Any) -> int:
        found[0] = self.streams.get(index)
        return 0 if index in self.streams else 1


def test_where_a_tensor_is_counts(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """Its device, and its offset from where its memory is said to begin."""
    elsewhere = torch.zeros_like(Y)

    def change(x: Any, view: Any) -> None:
        view.device_index = 1 if x is elsewhere else 0
        view.data, view.offset = view.data - 32, 32

    changed = _Capsules(change)
    patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", changed.capsule)
    launch = _direct()
    assert launch.attempt(X, Y, None)
    assert _address(library.launched[0]["values"][9]) == Y.data_ptr()
    assert launch.attempt(X, elsewhere, None) is False
    assert direct(_compiled(), 5, _arguments(), (X, elsewhere, None), (0, 0, 0), (), _unused) is None
    changed.exchange.major = 2
    _forget()
    assert _direct() is None


def test_launches_go_to_the_current_stream(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """And to Triton where nothing tells of one; nor is memory cleared, or a graph seen there."""
    changed = _Capsules(lambda x, view: None)
    patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", changed.capsule)
    _forget()
    launch = _direct()
    module = native.native()
    for stream in (0x700, 0x800):
        changed.streams[0] = stream
        assert launch.attempt(X, Y, None)
        assert module.clear(Y)
        assert [library.launched[-1]["stream"], library.cleared[-1][-1]] == [stream] * 2
    changed.streams.clear()
    assert launch.attempt(X, Y, None) is module.clear(Y) is False
    assert module.capturing(Y) is None
    assert len(library.launched) == len(library.cleared) == 2


def test_what_is_called_otherwise(library: _Library) -> None:
    """Where nothing was launched, with the same arguments; what it raises is raised. Nothing else keeps it."""
    given: list[Any] = []

    def otherwise(*tensors: Any, **named: Any) -> str:
        given.append((tensors, named))
        if not tensors:
            raise KeyboardInterrupt
        return "otherwise"

    launch = _direct(otherwise=otherwise)
    assert launch(X, Y, None) is None
    assert not given
    assert launch(X, None, None) == "otherwise"
    for tensors in ((X, Y), (X, Y, None)):  # which are positional
        assert launch(*tensors, more=None) == "otherwise"
    with pytest.raises(KeyboardInterrupt):
        launch()
    tensors, named = zip(*given, strict=True)
    assert [[*map(id, x)] for x in tensors] == [[*map(id, x)] for x in ((X, None, None), (X, Y), (X, Y, None), ())]
    assert named == ({}, {"more": None}, {"more": None}, {})
    assert len(library.launched) == 1
    with pytest.raises(TypeError):
        launch.attempt(X, Y, more=None)


def test_a_cycle_through_a_launch_is_collected(library: _Library) -> None:
    class Holder:
        launch: Any

        def otherwise(self) -> None: ...

    holder = Holder()
    holder.launch = _direct(otherwise=holder.otherwise)
    assert holder.launch.attempt(X, Y, None)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_another_context_is_left_to_triton(library: _Library) -> None:
    launch = _direct()
    for context, status in ((None, 0), (78, 0), (77, 1)):
        library.context, library.status["context"] = context, status
        assert launch.attempt(X, Y, None) is False
        assert context == 78 or _direct() is None
    library.context, library.status["context"] = 77, 0
    assert launch.attempt(X, Y, None)
    assert len(library.launched) == 1


class _Knobs:
    fixed = True


def test_switches_leave_launches_to_triton(library: _Library) -> None:
    """If true, and of the object's own."""
    knobs = _Knobs()
    launch = _direct(switches=((knobs, "fixed"), (knobs, "hooks")))
    for values in ({}, {"hooks": []}, {"hooks": None, "fixed": 0}, {"other": True}):
        vars(knobs).update(values)
        assert launch.attempt(X, Y, None)
    for values in ({"hooks": [1]}, {"fixed": True}, {"hooks": print}, {"hooks": torch.ones(2)}):
        vars(knobs).clear()
        vars(knobs).update(values)
        assert launch.attempt(X, Y, None) is False
    vars(knobs).clear()
    assert launch.attempt(X, Y, None)
    assert len(library.launched) == 5
    assert _direct(switches=((1, "hooks"),)).attempt(X, Y, None) is False


def test_launches_at_a_time_have_parameters_of_their_own(library: _Library) -> None:
    """As one of a backward may come from another thread while this one waits for the device."""
    launch = _direct()
    others = torch.zeros_like(X), torch.zeros_like(Y)

    def again() -> None:
        library.meanwhile = lambda: None
        thread = threading.Thread(target=launch.attempt, args=(*others, None))
        thread.start()
        thread.join()

    for _ in range(2):
        library.launched.clear()
        library.meanwhile = again
        assert launch.attempt(X, Y, None)
        for place, at in ((0, 0), (9, 1)):
            found = [_address(found["values"][place]) for found in library.launched]
            assert found == [others[at].data_ptr(), (X, Y)[at].data_ptr()]


@pytest.mark.parametrize("failing", ["launch", "move"])
def test_a_failure_is_told_and_not_remembered(library: _Library, failing: str) -> None:
    launch = _direct()
    other = torch.zeros_like(X)
    assert launch.attempt(X, Y, None)
    library.status[failing] = 1
    for _ in range(2):
        assert launch.attempt(other, Y, None) is False
    library.status[failing] = 0
    for x in (X, other, X):
        assert launch.attempt(x, Y, None)
        assert _address(library.launched[-1]["values"][0]) == x.data_ptr()


OTHERS: dict[str, dict[str, Any]] = {
    "scratch memory": {"global_scratch_size": 8},
    "a profile": {"profile_scratch_size": 8},
    "a cluster": {"num_ctas": 2},
    "a cooperative grid": {"launch_cooperative_grid": True},
    "dependent launches": {"launch_pdl": True},
    "instruments": {"instrumentation_mode": "consan"},
    "another type": {"signature": {"rows": "bf16"}},
    "narrow elements": {"tiles": {"fp4_padded": True}},
    "descriptors for Blackwell": {"arch": 100},
    "images": {"tiles": {"is_im2col": True}},
    "a number of another type": {"signature": {"scale": "i32"}},
    "no maps": {"tensordesc_meta": None},
    "an argument less": {"signature": {"more": "i32"}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_only_triton_can_launch(library: _Library, other: str) -> None:
    assert _direct() is not None
    assert _direct(_compiled(**OTHERS[other])) is None


def test_what_the_driver_cannot_encode_is_left_to_triton(library: _Library) -> None:
    library.status["encode"] = 1
    assert _direct() is None


def test_more_than_a_launch_holds_is_left_to_triton(library: _Library) -> None:
    many = {f"x{i}": "*fp32" for i in range(40)}
    given = [*_arguments(), *[Y] * 40], (X, Y, None, *[Y] * 40)
    assert direct(_compiled(signature=many), 5, *given, [0] * 43, (), _unused) is None
    library.sizes = [*SIZES[:-2], *[8] * 20, *SIZES[-2:]]
    few = {f"x{i}": "*fp32" for i in range(20)}
    given = [*_arguments(), *[Y] * 20], (X, Y, None, *[Y] * 20)
    launch = direct(_compiled(signature=few), 5, *given, [0] * 23, (), _unused)
    assert launch is not None
    assert launch.attempt(X, Y, None, *[Y] * 20)
    module = native.native()
    for image, places, mapped in (
        (bytes(5000), (), ()), (bytes(8), (0,) * 300, ()), (bytes(8), (), (0,) * 40),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="more than a launch holds"):
            module.Launch(FUNCTION, 1, 32, 0, image, places, mapped, (X,), (0,), (), None)
    with pytest.raises(ValueError, match="one device"):
        module.Launch(FUNCTION, 1, 32, 0, bytes(8), (), (), (1,), (0,), (), None)
    with pytest.raises((TypeError, OverflowError)):
        module.Launch(FUNCTION, 1, 32, 0, bytes(8), ("a",), (), (X,), (0,), (), None)


def test_what_the_driver_says_of_the_kernel_counts(library: _Library, patch: pytest.MonkeyPatch) -> None:
    for sizes in (SIZES[:-1], [*SIZES, 8], [*SIZES[:-3], 8, 8, 8]):
        library.sizes = sizes
        assert _direct() is None
    library.sizes = SIZES
    assert _direct() is not None
    assert direct(SimpleNamespace(), 5, _arguments(), (X, Y, None), (0, 0, 0), (), _unused) is None
    for name in ("cuFuncGetParamInfo", "cuTensorMapReplaceAddress"):  # CUDA 12.3 and older, and 11
        with patch.context() as older:
            older.delattr(library, name)
            _forget()
            assert _direct() is None

    def missing(path: str) -> Any:
        raise OSError

    patch.setattr(ctypes, "CDLL", missing)
    _forget()
    assert _direct() is None


def test_without_a_compiler_triton_launches(
    library: _Library, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once."""

    def failing(source: str, name: str) -> Any:
        raise RuntimeError("Failed to find C compiler.\nLook for one.")

    patch.setattr(build, "compile_module_from_src", failing)
    for _ in range(2):
        assert _direct() is None
        assert native.native() is None
        assert not clear(on_gpu(torch.ones(3))[0]).any()
    (record,) = caplog.records
    assert record.message.endswith("RuntimeError: Failed to find C compiler.")


def test_a_triton_that_compiles_otherwise_launches(library: _Library, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as other:
        other.delattr("triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST")
        assert _direct() is None
    patch.delattr(build, "compile_module_from_src")
    _forget()
    assert _direct() is None


def test_tensors_that_offer_other_functions_are_left_to_triton(
    library: _Library, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert _direct() is None
    assert len(caplog.records) == 1


def test_clear(library: _Library) -> None:
    """By the driver, or by torch where it does not, where there is none, and in graphs."""
    assert not clear(torch.ones(3, 5, dtype=torch.int16)).any()
    assert not library.cleared
    for dtype, size in ((torch.int16, 30), (torch.float32, 60), (torch.bool, 15)):
        (ones,) = on_gpu(torch.ones(3, 5, dtype=dtype))
        assert clear(ones) is ones
        assert library.cleared.pop() == (ones.data_ptr(), 0, size, None)
        assert ones.all()
    whole = torch.ones(8, 8)
    for some in (whole[:, :2], whole.T[:4], torch.ones(4, 2).T):
        assert not clear(*on_gpu(some)).any()
        assert not library.cleared
    assert whole.sum() == 32
    assert native.native().clear(torch.ones(1).expand(9)) is False
    assert native.native().clear(torch.ones(1, 5, 1)[..., :1]) is True
    library.cleared.clear()
    halves = torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert native.native().clear(halves)
    assert library.cleared.pop()[2] == 6
    for name in ("clear", "capturing"):
        library.status[name] = 1
        assert not clear(on_gpu(torch.ones(3))[0]).any()
        library.status[name] = 0
    library.cleared.clear()
    library.capturing = 1
    assert not clear(on_gpu(torch.ones(3))[0]).any()
    assert not library.cleared


def test_memory_is_cleared_on_its_device(library: _Library, patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        library.status["clear"] = 0
        yield
        library.status["clear"] = 1

    patch.setattr(torch.cuda, "device_of", device_of)
    library.status["clear"] = 1
    (ones,) = on_gpu(torch.ones(3))
    clear(ones)
    assert ones.all()  # by the driver, which is none here
    assert len(library.cleared) == 1


def test_is_capturing(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """As the driver tells; as torch does on the tensor's device, where there is no driver or it fails."""
    on: list[Any] = []
    (there,) = on_gpu(Y)

    @contextlib.contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        on.append(x)
        yield
        on.append(None)

    patch.setattr(torch.cuda, "device_of", device_of)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on[-1] is there)
    for state in (0, 1, 2):
        library.capturing = state
        assert is_capturing(there) is (state > 0)
    assert not on
    library.capturing, library.status["capturing"] = 0, 1
    assert is_capturing(there) is True
    assert len(on) == 2
    library.status["capturing"] = 0
    module = native.native()
    for x in (1, Y.to_sparse()):
        assert module.capturing(x) is None
    patch.setattr(native, "native", lambda: None)
    assert is_capturing(there) is True
    assert ops.is_capturing(Y) is False


SIGNED: dict[str, tuple[Any, ...]] = {
    "usual": (X, None, Y),
    "shape": (X, None, Y[:5]),
    "strides": (X.contiguous(), None, Y),
    "axes": (X, None, Y.view(2, 3)),
    "dtype": (X.half(), None, Y),
    "sign": (X, None, Y.view(torch.int32)),
    "width": (X, None, Y.double()),
    "alignment": (X, None, torch.zeros(7)[1:]),
    "a tensor for none": (X, Y, Y),
    "none for a tensor": (X, None, None),
    "order": (Y, None, X),
    "fewer": (X, None),
    "more": (X, None, Y, None),
    "a derivative": (X, None, Y.clone().requires_grad_()),
}


@pytest.fixture
def signature(library: _Library, patch: pytest.MonkeyPatch) -> Callable[..., bytes | None]:
    """That in C."""
    patch.setattr(repeated, "_signature_of", repeated._signature)
    repeated._sign_in_c()
    found: Any = repeated._signature_of
    assert found is not repeated._signature
    return found


def test_signatures_tell_apart(signature: Callable[..., bytes | None]) -> None:
    """The function in C what the one in Python does."""
    for sign in (signature, repeated._signature):
        found = {name: sign(*tensors) for name, tensors in SIGNED.items()}
        assert None not in found.values()
        assert len({*found.values()}) == len(SIGNED)
        assert sign(torch.zeros_like(X), None, Y + 1) == found["usual"]
        assert sign(X, None, Y, 1) is None
        assert sign(torch.nn.Parameter(X, requires_grad=False), None, Y) == found["usual"]


def test_a_signature_is_kept(signature: Callable[..., bytes | None]) -> None:
    """And with it its hash; many take places that others had."""
    first = signature(X, None, Y)
    assert signature(X + 1, None, Y) is first
    found = [[signature(torch.zeros(rows)) for rows in range(1, 300)] for _ in range(2)]
    assert found[0] == found[1]
    assert len({*found[0]}) == 299
    for count in range(25, 0, -1):  # the beginning of what was there
        words = signature(*[X] * count)
        assert words is not None
        assert len(words) == 8 * (2 + count * 10)
    assert signature(X, None, Y) == first
    assert signature(X, None, Y) is signature(X, None, Y)


def _modes() -> dict[str, Callable[[], Any]]:
    return {
        "usual": contextlib.nullcontext,
        "deterministic": poisoned,
        "no derivatives": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
        "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    }


def test_signatures_tell_modes_apart(signature: Callable[..., bytes | None]) -> None:
    x = X.clone().requires_grad_()
    for sign in (signature, repeated._signature):
        found = {}
        for name, enter in _modes().items():
            with enter():
                found[name] = sign(x, Y)
        assert found.pop("autocast that is off") == found["usual"]
        assert None not in found.values()
        assert len({*found.values()}) == len(found)
        with torch.no_grad():
            assert sign(x, Y) == sign(X, Y)


def _intercepted(look: Callable[[], Any]) -> None:
    """Call it where something intercepts calls, in each way."""
    with FakeTensorMode():
        look()
    with torch.device("cpu"):  # a mode of torch functions
        look()
    torch.func.vmap(lambda x: (look(), x)[1])(torch.zeros(2))
    torch.func.grad(lambda x: (look(), x)[1])(torch.zeros(()))
    torch.jit.trace(lambda x: (look(), x + 1)[1], torch.zeros(2), check_trace=False)
    with torch.profiler.profile(), forward_ad.dual_level():
        look()
    with forward_ad.dual_level():
        look()
    with torch.autograd.profiler.profile():
        look()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        look()


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_what_is_intercepted_has_no_signature(signature: Callable[..., bytes | None]) -> None:
    for sign in (signature, repeated._signature):
        found: list[Any] = []
        _intercepted(lambda: found.append(sign(X, Y)))  # noqa: B023
        assert found == [None] * 9
        assert sign(X, Y) is not None


def test_in_a_graph_there_is_no_signature(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """On a GPU. Tensors elsewhere take no part in it."""
    cpu, gpu = 1, 2
    place = [cpu]

    def change(x: Any, view: Any) -> None:
        (view.device_type,) = place

    patch.setattr(repeated, "_signature_of", repeated._signature)
    changed = _Capsules(change)
    patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", changed.capsule)
    _forget()
    repeated._sign_in_c()
    signature: Any = repeated._signature_of
    for device, state, status, signed in (
        (cpu, 0, 0, True), (cpu, 1, 0, True),
        (gpu, 0, 0, True), (gpu, 1, 0, False), (gpu, 2, 0, False), (gpu, 0, 1, False),
    ):  # fmt: skip
        place[:] = [device]
        library.capturing, library.status["capturing"] = state, status
        assert (signature(X, Y) is not None) is signed


def test_in_a_graph_there_is_no_signature_in_python_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_plain", lambda x: True)
    (x,) = on_gpu(Y)
    for state in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state)  # noqa: B023
        assert (repeated._signature(x) is None) is state
        assert repeated._signature(Y) is not None


def test_values_in_modules(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """Another value than the one that is told, or none, is one that intercepts."""
    module = native.native()
    patch.setattr(repeated, "_signature_of", repeated._signature)
    tells = [*[lambda *_: False] * 4, lambda *_: torch.half]
    for values, signed in (
        ({"a": -1}, True), ({"a": 0}, False), ({"a": False}, False), ({}, False), ({"b": -1}, False),
    ):  # fmt: skip
        module.watch((), ((values, "a", -1),), *tells)
        assert (module.signature(X) is not None) is signed
        with patch.context() as other:
            other.setattr(ops, "IDLE", ((values, "a", -1),))
            assert ops.intercepted() is not signed
    for wrong in ({}, "a"), ([], "a", 1), ({}, 1, 1):
        with pytest.raises(TypeError):
            module.watch((), (wrong,), *tells)
    repeated._sign_in_c()  # or these functions would stay


def _strange() -> dict[str, Any]:
    return {
        "class": on_gpu(Y)[0],
        "negative": torch.zeros(6, dtype=torch.complex64).conj().imag,
        "negative complex": torch.zeros(6, dtype=torch.complex64)._neg_view(),
        "zero": torch._efficientzerotensor(6),
        "no tensor": 1,
        "a list": [Y],
    }


@pytest.mark.parametrize("strange", _strange())
def test_what_the_dispatcher_has_to_see_has_no_signature(signature: Callable[..., bytes | None], strange: str) -> None:
    x = _strange()[strange]
    for sign in (signature, repeated._signature):
        assert sign(X, x) is None
        with contextlib.suppress(AttributeError):
            assert sign(x, X) is None


def test_more_than_there_is_room_for_has_no_signature(signature: Callable[..., bytes | None]) -> None:
    found = signature(*[X] * 25)
    assert found is not None
    assert len(found) == 8 * (2 + 25 * 10)
    assert signature(*[X] * 25, Y) is not None
    assert signature(*[X] * 26) is None
    assert signature(X, *[None] * 244) is not None
    assert signature(X, *[None] * 245) is None
    for others in ((Y.to("meta"),), (Y.to_sparse(),)):  # they have no memory to tell of
        assert signature(X, *others) is signature(*others) is None
    assert signature() is None
    assert signature(None) is None


def test_what_functions_raise_is_raised(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """An interrupt, say; and no other is asked after that."""
    asked: list[int] = []

    def fails(*_: Any) -> Any:
        asked.clear()
        raise KeyboardInterrupt

    def tells(number: int, answer: Any) -> Callable[..., Any]:
        return lambda *_: (asked.append(number), answer)[1]

    fine = [tells(i, answer) for i, answer in enumerate([False, False, True, True, True, torch.half])]
    module = native.native()
    for failing in range(len(fine)):
        first, *others = fine
        module.watch((first,), (), *others)
        assert module.signature(X) is not None
        assert asked[-len(fine) :] == [*range(len(fine))]
        first, *others = [*fine[:failing], fails, *fine[failing + 1 :]]
        module.watch((first,), (), *others)
        with pytest.raises(KeyboardInterrupt):
            module.signature(X)
        assert not asked
    patch.setattr(repeated, "_signature_of", repeated._signature)
    repeated._sign_in_c()  # or these functions would stay


def test_before_it_is_told_what_to_watch(library: _Library) -> None:
    """Nothing has a signature, nor a launch or memory to clear, in a process that has told the module nothing."""
    path = native.native().__file__
    program = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location("flashmask_native", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.signature(torch.ones(3)) is None
assert module.clear(torch.ones(3)) is False
try:
    module.Launch(1, 1, 32, 0, bytes(8), (), (), (), (), (), None)
except ValueError:
    print("told")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "told\n"


def test_a_compiled_forward_does_not_look_into_c(signature: Callable[..., bytes | None]) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    mask = masks.causal(20)
    compiled = torch.compile(lambda q: flashmask_attention(q, k, v, mask), backend="eager", fullgraph=True)
    for seen in (flashmask_attention(q, k, v, mask), flashmask_attention(q, k, v, mask)):  # the second is remembered
        torch.testing.assert_close(compiled(q), seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_a_compiled_backward_does_not_look_into_c(signature: Callable[..., bytes | None]) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    mask = masks.causal(20)
    found = []
    for compiled in (False, False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashmask_attention(*leaves, mask)
        enter = compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)) if compiled else None
        with enter or contextlib.nullcontext():
            out.square().sum().backward()
        found.append([x.grad for x in leaves])
    for one, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(one, other)


def test_calls_are_remembered_by_signatures_in_c(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """From when there are launches; those remembered before are remembered anew."""
    patch.setattr(repeated, "_signature_of", repeated._signature)
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    mask = masks.causal(20)
    first = flashmask_attention(q, k, v, mask)
    (kind,) = repeated._known
    repeated._sign_in_c()
    assert not repeated._known
    for _ in range(2):
        assert torch.equal(flashmask_attention(q, k, v, mask), first)
        ((signed, *others),) = repeated._known
        assert isinstance(signed, bytes)
        assert others == [*kind[1:]]
    for wrong in (1, None):
        with pytest.raises(TypeError, match="q must be a tensor"):
            flashmask_attention(wrong, k, v, mask)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_clear_on_a_gpu() -> None:
    if torch.version.hip is None:
        module = native.native()
        assert module is not None
        memory = torch.ones(300, device="cuda")
        assert module.clear(memory)
        assert not memory.any()
    with poisoned():
        assert not clear(torch.empty(300, 500, device="cuda")).any()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = clear(torch.empty(300, 500, device="cuda"))
            y = x + 1
        x.fill_(3.0)
        graph.replay()
    assert not x.any()
    assert (y == 1).all()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0"])
def test_other_versions_of_triton_launch_as_they_do(library: _Library, patch: pytest.MonkeyPatch, version: str) -> None:
    assert _direct() is not None
    patch.setattr(triton, "__version__", version)
    _forget()
    assert _direct() is None


def test_rocm_has_no_such_driver(library: _Library, patch: pytest.MonkeyPatch) -> None:
    """Though it may have a library of that name."""
    patch.setattr(torch.version, "hip", "6.4")
    assert _direct() is None


@triton.jit
def _copy(x, y, more, rows, wide, scale, SIZE: tl.constexpr, TMA: tl.constexpr):
    row = tl.program_id(0) * SIZE
    columns = tl.arange(0, 32)
    at = (row + tl.arange(0, SIZE))[:, None] * 32 + columns[None, :]
    inside = (row + tl.arange(0, SIZE))[:, None] < rows
    tile = x.load([row, 0]) if TMA else tl.load(x + at, mask=inside)
    if more is not None:
        tile += tl.load(more + columns)[None, :]
    tl.store(y + at, tile * scale + wide / 4294967296, mask=inside)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=pytest.mark.hopper)])
def test_launches_on_a_gpu(tma: bool) -> None:
    """From two threads, in a graph, and at addresses that change, without Triton after the first launch."""
    if torch.version.hip:
        pytest.skip("gpu lane: AMD GPUs are left to Triton")
    rows = 100
    layout = layout_of(torch.empty(rows, 32, device="cuda"))
    bound = Launcher(_copy).bind(
        4, rows, 2**32 + 2**31, 2.0, tiles=tiles_template(tma, (layout, 32, 32)), SIZE=32, TMA=tma, num_warps=4
    )
    x, y = torch.randn(2, rows, 32, device="cuda")
    more = torch.randn(32, device="cuda")
    for _ in range(2):
        bound.launch(x, y, more)
        assert torch.equal(y, (x + more) * 2 + 1.5)
    (form,) = bound._known.values()
    assert form.own is not None
    form.compiled = None

    def check() -> None:
        for _ in range(50):
            x = torch.randn(rows, 32, device="cuda")
            y = torch.empty_like(x)
            bound.launch(x, y, more)
            assert torch.equal(y, (x + more) * 2 + 1.5)

    check()
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            check()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.launch(x, y, more)
    x.normal_()
    graph.replay()
    assert torch.equal(y, (x + more) * 2 + 1.5)
