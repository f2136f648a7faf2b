"""Launches past Triton's launcher: what reaches the driver, and what is left to Triton."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import INTERPRETED, poisoned

from flashmask_hf import ops

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter compiles nothing", allow_module_level=True)
if not ops.HAS_TRITON:
    pytest.skip("cpu lane: Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from stand_ins import describe, on_gpu

from flashmask_hf.kernels import direct as module
from flashmask_hf.kernels.descriptors import Layout, layout_of, packed_layout, tiles_template
from flashmask_hf.kernels.direct import direct, zeros
from flashmask_hf.kernels.launch import Launcher

FUNCTION, STREAM = 0x1234, 7
KINDS = {
    "x": "tensordesc<bf16[1,1,64,32]>", "y": "*fp32", "z": "constexpr", "rows": "i32", "far": "i64",
    "heads": "constexpr", "flag": "i1", "scale": "fp32", "SIZE": "constexpr",
}  # fmt: skip
SIZES = [128, *[4] * 4, *[8] * 4, 8, 4, 8, 1, 4, 8, 8]
X = torch.zeros(2, 100, 3, 32, dtype=torch.bfloat16).transpose(1, 2)
Y = torch.zeros(6)


class _Library:
    """A driver that notes what it is told; its tensor maps hold the address of the tensor only."""

    def __init__(self) -> None:
        self.sizes = SIZES
        self.launched: list[dict[str, Any]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.moved: list[tuple[int, int]] = []
        self.meanwhile: Callable[[], Any] = lambda: None
        self.status = {"launch": 0, "encode": 0, "move": 0, "clear": 0}
        self.cleared: list[tuple[int, ...]] = []
        for name in (
            "cuMemsetD8Async",
            "cuLaunchKernel",
            "cuTensorMapReplaceAddress",
            "cuTensorMapEncodeTiled",
            "cuFuncGetParamInfo",
        ):
            setattr(self, name, _Function(getattr(self, f"_{name}")))

    def _cuLaunchKernel(self, function: int, *given: Any) -> int:
        *geometry, stream, parameters, extra = given
        self.meanwhile()
        places = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        assert all(place % 128 == 0 for place, size in zip(places, self.sizes, strict=True) if size == 128)
        assert extra is None
        self.launched.append({"function": function, "geometry": geometry, "stream": stream, "values": values})
        return self.status["launch"]

    def _cuTensorMapReplaceAddress(self, place: int, address: int) -> int:
        self.moved.append((place, address))
        ctypes.c_uint64.from_address(place).value = address
        return self.status["move"]

    def _cuTensorMapEncodeTiled(
        self,
        place: int,
        dtype: int,
        rank: int,
        address: int,
        shape: Any,
        strides: Any,
        tile: Any,
        steps: Any,
        *more: int,
    ) -> int:
        assert place % 64 == 0
        self.encoded.append((dtype, rank, [*shape], [*strides][: rank - 1], [*tile], [*steps], more))
        ctypes.c_uint64.from_address(place).value = address
        return self.status["encode"]

    def _cuMemsetD8Async(self, *given: int) -> int:
        self.cleared.append(given)
        return self.status["clear"]

    def _cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        assert function == FUNCTION
        if index == len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0


class _Function:
    argtypes: Any = None

    def __init__(self, call: Callable[..., int]):
        self._call = call

    def __call__(self, *given: Any) -> int:
        return self._call(*given)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Library]:
    found = _Library()
    for name in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, name, lambda path: found)
    forget = module._functions.cache_clear
    forget()
    yield found
    forget()


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


def _bytes(kind: Any, *values: Any) -> list[bytes]:
    return [bytes(kind(value)) for value in values]


def test_the_driver_gets_what_triton_would_pass(library: _Library) -> None:
    """Each parameter, descriptors with sizes and strides; what is known when compiling is none."""
    launch = direct(_compiled(), 5, _arguments())
    assert launch is not None
    assert launch([X.data_ptr(), Y.data_ptr()], STREAM)
    (found,) = library.launched
    assert (found["function"], found["stream"]) == (FUNCTION, STREAM)
    assert found["geometry"] == [5, 1, 1, 12 * 32, 1, 1, 4096]
    tiles, *values = found["values"]
    assert tiles[:8] == bytes(ctypes.c_uint64(X.data_ptr()))
    assert values == [
        *_bytes(ctypes.c_int32, 2, 3, 100, 32), *_bytes(ctypes.c_int64, 9600, 32, 96, 1),
        *_bytes(ctypes.c_uint64, Y.data_ptr()), *_bytes(ctypes.c_int32, 100), *_bytes(ctypes.c_int64, 2**40),
        *_bytes(ctypes.c_int8, 1), *_bytes(ctypes.c_float, 0.25), *_bytes(ctypes.c_uint64, 0, 0),
    ]  # fmt: skip
    bfloat16, swizzle_64_bytes, fill_with_zeros = 9, 2, 0
    more = (0, swizzle_64_bytes, 2, fill_with_zeros)
    assert library.encoded == [(bfloat16, 4, [32, 100, 3, 2], [192, 64, 19200], [32, 64, 1, 1], [1] * 4, more)]


def test_what_changes_is_addresses(library: _Library) -> None:
    launch = direct(_compiled(), 5, _arguments())
    assert launch is not None
    seen = []
    for addresses in ([16, 32], [16, 32], [16, 64], [48, 64], [16, 32]):
        assert launch(addresses, STREAM)
        values = library.launched[-1]["values"]
        seen.append([int.from_bytes(values[place][:8], "little") for place in (0, 9)])
        assert values[1:9] + values[10:] == library.launched[0]["values"][1:9] + library.launched[0]["values"][10:]
    assert seen == [[16, 32], [16, 32], [16, 64], [48, 64], [16, 32]]
    assert len(library.encoded) == 1
    assert [address for _, address in library.moved] == [48, 16]


def test_launches_at_a_time_have_parameters_of_their_own(library: _Library) -> None:
    """As one of a backward may come from another thread while this one waits for the device."""
    launch = direct(_compiled(), 5, _arguments())
    assert launch is not None

    def again() -> None:
        library.meanwhile = lambda: None
        thread = threading.Thread(target=launch, args=([48, 64], STREAM + 1))
        thread.start()
        thread.join()

    for _ in range(2):
        library.launched.clear()
        library.meanwhile = again
        assert launch([16, 32], STREAM)
        assert [found["stream"] for found in library.launched] == [STREAM + 1, STREAM]
        assert [int.from_bytes(found["values"][9], "little") for found in library.launched] == [64, 32]
        assert [found["values"][0][:1] for found in library.launched] == [b"\x30", b"\x10"]
    assert len(library.encoded) == 2


@pytest.mark.parametrize("failing", ["launch", "encode", "move"])
def test_a_failure_is_told_and_not_remembered(library: _Library, failing: str) -> None:
    launch = direct(_compiled(), 5, _arguments())
    assert launch is not None
    if failing == "move":
        assert launch([16, 32], STREAM)
    library.status[failing] = 1
    assert not launch([48, 32], STREAM)
    library.status[failing] = 0
    for address in (16, 48):
        assert launch([address, 32], STREAM)
        assert library.launched[-1]["values"][0][0] == address


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
    assert direct(_compiled(), 5, _arguments()) is not None
    assert direct(_compiled(**OTHERS[other]), 5, _arguments()) is None


def test_what_the_driver_says_of_the_kernel_counts(library: _Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (SIZES[:-1], [*SIZES, 8], [*SIZES[:-3], 8, 8, 8]):
        library.sizes = sizes
        assert direct(_compiled(), 5, _arguments()) is None
    library.sizes = SIZES
    assert direct(_compiled(), 5, _arguments()) is not None
    assert direct(SimpleNamespace(), 5, _arguments()) is None
    delattr(library, "cuFuncGetParamInfo")  # CUDA 12.3 and older
    module._functions.cache_clear()
    assert direct(_compiled(), 5, _arguments()) is None

    def missing(path: str) -> Any:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    module._functions.cache_clear()
    assert direct(_compiled(), 5, _arguments()) is None


def test_zeros(library: _Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleared by the driver, or by torch where it does not, where there is none, and in graphs."""
    layout = packed_layout(3, 5, dtype=torch.int16, device=torch.device("cpu"))
    assert torch.equal(zeros(layout), torch.zeros(3, 5, dtype=torch.int16))
    assert not library.cleared
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    (ones,) = on_gpu(torch.ones(3, 5, dtype=torch.int16))
    monkeypatch.setattr(Layout, "empty", lambda layout: ones)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert zeros(layout) is ones
    assert library.cleared == [(ones.data_ptr(), 0, 30, STREAM + 1)]
    assert ones.all()
    library.status["clear"] = 1
    assert not zeros(layout).any()
    library.status["clear"] = 0
    for name, value in (("is_current_stream_capturing", lambda: True), ("_functions", lambda: None)):
        with monkeypatch.context() as patch:
            patch.setattr(module if name == "_functions" else torch.cuda, name, value)
            ones.fill_(1)
            assert not zeros(layout).any()
    assert len(library.cleared) == 2


@pytest.mark.gpu
def test_zeros_on_a_gpu() -> None:
    layout = packed_layout(300, 500, dtype=torch.float32, device=torch.device("cuda", torch.cuda.current_device()))
    functions = module._functions()
    if torch.version.hip is None:
        assert functions is not None
        memory = torch.ones(300, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        assert functions.clear(memory.data_ptr(), 0, memory.nbytes, stream) == 0
        assert not memory.any()
    with poisoned():
        assert not zeros(layout).any()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = zeros(layout)
            y = x + 1
        x.fill_(3.0)
        graph.replay()
    assert not x.any()
    assert (y == 1).all()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0"])
def test_other_versions_of_triton_launch_as_they_do(
    library: _Library, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    assert direct(_compiled(), 5, _arguments()) is not None
    monkeypatch.setattr(triton, "__version__", version)
    assert direct(_compiled(), 5, _arguments()) is None


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
def test_launches_on_a_gpu(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
        bound(x, y, more)
        assert torch.equal(y, (x + more) * 2 + 1.5)
    (form,) = bound._known.values()
    assert form.own is not None
    form.compiled = None

    def check() -> None:
        for _ in range(50):
            x = torch.randn(rows, 32, device="cuda")
            y = torch.empty_like(x)
            bound(x, y, more)
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
        bound(x, y, more)
    x.normal_()
    graph.replay()
    assert torch.equal(y, (x + more) * 2 + 1.5)
