"""Prepared launches and the descriptors that they pass: Triton is asked once, and launches bring their own tensors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.support import INTERPRETED

from flashmask_hf import torch_internals

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter compiles nothing", allow_module_level=True)
if not torch_internals.HAS_TRITON:
    pytest.skip("cpu lane: Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmask_hf.kernels.launch.descriptors import (
    describable,
    fits_descriptor,
    loads_by_descriptor,
    template,
    tile_templates,
)
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.tensor_layout import layout_like, layout_of, packed_layout


def describe(x: torch.Tensor, *block: int) -> Any:
    """Return the descriptor of `x` for tiles of shape `block`, as launches make it."""
    descriptor = template(TensorDescriptor, layout_of(x), *block)
    descriptor.base = x
    return descriptor


@triton.jit(do_not_specialize=["rows"])
def _kernel(x, y, rows, heads, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class _Compiled:
    """Stand-in for a compiled kernel: it records how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: _Launches):
        self.launches = launches

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        assert rest[:5] == (self.function, self.packed_metadata, None, None, None)
        self.launches.on_launch(*rest[5:])
        self.launches.compiled.append(((x, y, z), rest[5:], stream))


class _Launches:
    """Launches of `_kernel` on a device that is not there: `asked` of Triton, and of the compiled form."""

    def __init__(self) -> None:
        self.stream = 7
        """Of GPU 0; that of GPU n is n more."""
        self.asked: list[Any] = []
        self.compiled: list[Any] = []
        self.compiles = True
        self.on_launch: Callable[..., None] = lambda *arguments: None
        self.launch = Launch(_kernel, 3, 100, 8, 0.5, SIZE=64, FLAG=True, num_warps=4)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Launches]:
    found = _Launches()

    def instead(function: JITFunction, grid: Any) -> Any:
        def run(*arguments: Any, **constants: Any) -> _Compiled | None:
            found.on_launch(*arguments)
            found.asked.append((grid, arguments, constants))
            return _Compiled(found) if found.compiles else None

        return run

    monkeypatch.setattr(JITFunction, "__getitem__", instead)
    monkeypatch.setattr(torch_internals, "current_gpu", lambda: 2)
    monkeypatch.setattr(torch_internals, "current_stream", lambda gpu: found.stream + gpu)
    return found


def _tensor(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(256, dtype=dtype)


def test_triton_is_asked_once(launches: _Launches) -> None:
    """Later launches bring their tensors, the grid, the scalars and the constants, on the stream of the moment."""
    x, y = _tensor(), _tensor()
    launches.launch(x, None)
    assert launches.asked == [((3,), (x, None, 100, 8, 0.5), {"SIZE": 64, "FLAG": True, "num_warps": 4})]
    assert not launches.compiled
    launches.stream = 9
    launches.launch(y, None)
    assert len(launches.asked) == 1
    ((grid, arguments, stream),) = launches.compiled
    assert (grid, stream) == ((3, 1, 1), 9 + 2)
    assert arguments[0] is y
    assert arguments[1:] == (None, 100, 8, 0.5, 64, True)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_profilers_see_launches(launches: _Launches, hook: str) -> None:
    """Triton calls its hooks by itself; where there are none, a launch does not build their arguments."""
    launches.launch(_tensor(), None)
    hooks = getattr(triton.knobs.runtime, hook)
    hooks.add(print)
    try:
        launches.launch(_tensor(), None)
    finally:
        hooks.remove(print)
    launches.launch(_tensor(), None)
    assert (len(launches.asked), len(launches.compiled)) == (2, 1)


def test_triton_is_asked_again_where_it_did_not_compile(launches: _Launches) -> None:
    """A hook of Triton's may keep it from compiling: nothing has been launched then."""
    launches.compiles = False
    for _ in range(2):
        launches.launch(_tensor(), _tensor())
    launches.compiles = True
    for _ in range(2):
        launches.launch(_tensor(), _tensor())
    assert (len(launches.asked), len(launches.compiled)) == (3, 1)


def test_triton_is_asked_every_time_for_amd_gpus(launches: _Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """For AMD GPUs Triton also compiles for the sizes of storages, which layouts do not contain."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    launch = Launch(_kernel, 3, 100, 8, 0.5, SIZE=64, FLAG=True)
    for _ in range(3):
        launch(_tensor(), _tensor())
    assert (len(launches.asked), len(launches.compiled)) == (3, 0)


def test_the_stream_of_another_gpu_is_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(torch_internals, "current_gpu", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def is_capturing(index: int | None) -> bool:
        x: Any = SimpleNamespace(is_cuda=index is not None, get_device=lambda: index, device=f"cuda:{index}")
        return torch_internals.is_capturing(x)

    assert [is_capturing(index) for index in (None, 2, 3)] == [False, True, True]
    assert entered == ["cuda:3"]


def _described_launch() -> Launch:
    descriptors = tile_templates((layout_of(_rows()), 64, 64))
    return Launch(_kernel, 3, 100, 8, 0.5, descriptors=descriptors, SIZE=64, FLAG=True, num_warps=4)


def test_descriptors_are_of_the_tensors_of_the_launch(launches: _Launches) -> None:
    """While they are launched; then the memory is let go."""
    launch = _described_launch()
    seen: list[Any] = []
    launches.on_launch = lambda first, *rest: seen.append((first, vars(first).copy(), rest))
    settings = None, 100, 8, 0.5
    for found, behind in ((launches.asked, settings), (launches.compiled, (*settings, 64, True))):
        x = _rows()
        launch(x, None)
        descriptor, described, rest = seen.pop()
        assert len(found) == 1
        assert descriptor is launch.descriptors[0]  # not a copy, which takes time
        assert described["base"] is x
        assert described == vars(describe(x, 1, 1, 64, 64))
        assert rest == behind
        assert launch.descriptors[0].base is None


def test_a_descriptor_of_two_tensors_is_refused() -> None:
    """It would have the memory of the second in both places."""
    (descriptor,) = tile_templates((layout_of(_rows()), 64, 64))
    with pytest.raises(AssertionError, match="a descriptor of its own"):
        Launch(_kernel, 3, descriptors=(descriptor, descriptor), SIZE=64, FLAG=True)


def test_a_launch_that_fails_lets_its_memory_go(launches: _Launches) -> None:
    launch = _described_launch()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no")

    launches.on_launch = fail
    with pytest.raises(RuntimeError, match="no"):
        launch(_rows(), None)
    assert launch.descriptors[0].base is None
    launches.on_launch = lambda *arguments: None
    launch(_rows(), None)


def test_threads_launch_with_their_own_memory(launches: _Launches) -> None:
    launch = _described_launch()
    launch(_rows(), None)
    wrong: list[Any] = []

    def check(descriptor: Any, y: torch.Tensor, *_: Any) -> None:
        time.sleep(1e-4)  # the other thread's turn
        if descriptor.base is not y:
            wrong.append(descriptor.base)

    launches.on_launch = check

    def work() -> None:
        for _ in range(20):
            x = _rows()
            launch(x, x)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches.compiled) == 40
    assert not wrong


def test_a_launch_within_a_launch_has_its_own_memory(launches: _Launches) -> None:
    """As of a launch hook or a signal handler: it does not wait for the outer one, whose memory stays."""
    launch = _described_launch()
    outer, inner = _rows(), _rows()
    seen: list[Any] = []

    def nest(descriptor: Any, y: torch.Tensor, *_: Any) -> None:
        if y is outer:
            launch(inner, inner)
        seen.append(descriptor.base is y)

    launches.on_launch = nest
    launch(outer, outer)
    assert seen == [True, True]
    assert launch.descriptors[0].base is None


def _rows(length: int = 128, dims: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(2, length, 3, dims, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    "x",
    [
        _rows(),
        _rows(1),  # the strides of an axis of length 1 may be anything
        torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 0, 5, 1)),
        _rows()[:, :, 16:],
        _rows()[..., :1],
        torch.zeros(256, 32),
    ],
    ids=["usual", "one row", "odd strides", "part", "one column", "plane"],
)
def test_a_prepared_descriptor_is_the_one_that_triton_makes(x: torch.Tensor) -> None:
    block = [1, 1, 16, 64] if x.dim() == 4 else [128, 32]
    step = 16 // x.element_size()
    strides = [step if x.shape[i] == 1 else x.stride(i) for i in range(x.dim() - 1)] + [1]
    expected = TensorDescriptor(x, list(x.shape), strides, block)
    for _ in range(2):
        found = describe(x, *block)
        assert type(found) is TensorDescriptor
        assert found.base is x
        assert vars(found) == vars(expected)


def test_what_no_descriptor_fits_is_copied() -> None:
    whole = torch.arange(2 * 128 * 3 * 64 + 1.0).bfloat16()
    for _ in range(2):
        aligned, shifted = (whole[i:][: 2 * 128 * 3 * 64].view(2, 3, 128, 64) for i in (0, 1))
        assert describable(aligned) is aligned
        assert [fits_descriptor(layout_of(x)) for x in (aligned, shifted)] == [True, False]
        copy = describable(shifted)
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, shifted)
        odd = torch.zeros(1, 2, 8, 65)[..., :64]
        assert describable(odd).stride() == (2 * 8 * 64, 8 * 64, 64, 1)
        wide = aligned.expand(2, 3, 128, 64)[..., ::2]
        assert describable(wide).is_contiguous()
        tokens_outermost, dims_outermost = shifted.transpose(1, 2), shifted.mT
        assert describable(tokens_outermost).stride() == tokens_outermost.stride()
        assert describable(dims_outermost).is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "strides", "fits"),
    [
        (torch.bfloat16, (3 * 16 * 72, 16 * 72, 72, 1), True),
        (torch.bfloat16, (3 * 16 * 72, 16 * 72, 68, 1), False),
        (torch.float32, (3 * 16 * 72, 16 * 72, 68, 1), True),
        (torch.bfloat16, (0, 16 * 64, 64, 1), False),
        (torch.bfloat16, (3 * 16 * 128, 16 * 128, 128, 2), False),
    ],
    ids=["multiple of 16 bytes", "multiple of 8 bytes", "multiple of 16 bytes, float32", "expanded", "gaps"],
)
def test_strides_that_a_descriptor_takes(dtype: torch.dtype, strides: tuple[int, ...], fits: bool) -> None:
    assert fits_descriptor(layout_of(torch.empty_strided((2, 3, 16, 64), strides, dtype=dtype))) is fits


@pytest.mark.parametrize(
    ("device", "capability", "hip", "expected"),
    [
        ("cuda", (9, 0), None, True),
        ("cuda", (12, 0), None, True),
        ("cuda", (8, 9), None, False),
        ("cuda", (9, 4), "6.4", False),
        ("cpu", (9, 0), None, False),
    ],
    ids=["hopper", "blackwell", "ada", "mi300", "cpu"],
)
def test_devices_that_load_by_descriptor(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], hip: str | None, expected: bool
) -> None:
    """If a descriptor fits every tensor."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    fits = layout_of(_rows())._replace(device=torch.device(device))
    assert loads_by_descriptor(fits, fits) is expected
    assert not loads_by_descriptor(fits, fits._replace(aligned=False))


def test_a_descriptor_of_what_cannot_be_described_raises() -> None:
    with pytest.raises(AssertionError):
        describe(torch.zeros(1, 2, 8, 65, dtype=torch.bfloat16)[..., :64], 1, 1, 8, 64)


def test_layouts_tell_alignment_apart() -> None:
    memory = torch.zeros(65, dtype=torch.bfloat16)
    assert layout_of(memory[:64]).aligned
    assert not layout_of(memory[1:]).aligned
    assert layout_of(memory[:64]) != layout_of(memory[1:])
    assert layout_like(layout_of(memory[1:])) == layout_of(torch.empty_like(memory[1:]))


def test_a_packed_layout_has_its_axes_in_the_given_order() -> None:
    layout = packed_layout(2, 3, 5, 8, dtype=torch.float32, device=torch.device("cpu"), order=(0, 2, 1, 3))
    assert layout == layout_of(torch.empty(2, 5, 3, 8).transpose(1, 2))
    made = layout.allocator()()
    assert layout_of(made) == layout
    assert layout.allocator("meta")().is_meta


@triton.jit(do_not_specialize=["rows"])
def _copy(x, y, rows, SIZE: tl.constexpr, TMA: tl.constexpr):
    row = tl.program_id(0) * SIZE
    if TMA:
        tile = x.load([0, 0, row, 0]).reshape(SIZE, 64)
    else:
        tile = tl.load(x + (row + tl.arange(0, SIZE))[:, None] * 64 + tl.arange(0, 64)[None, :])
    inside = (row + tl.arange(0, SIZE))[:, None] < rows
    tl.store(y + (row + tl.arange(0, SIZE))[:, None] * 64 + tl.arange(0, 64)[None, :], tile, mask=inside)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=pytest.mark.hopper)])
def test_launches_on_a_gpu(tma: bool) -> None:
    """From two threads, in a graph, and at addresses that change; Triton is asked once."""
    tensors = [torch.randn(1, 1, 128, 64, device="cuda") for _ in range(6)]
    templates = tile_templates((layout_of(tensors[0]), 32, 64)) if tma else ()
    launch = Launch(_copy, 4, 128, descriptors=templates, SIZE=32, TMA=tma, num_warps=4)

    def check(x: torch.Tensor) -> None:
        y = torch.full_like(x, float("nan"))
        launch(x, y)
        assert torch.equal(x, y)

    for x in tensors:
        check(x)
    threads = [threading.Thread(target=lambda: [check(x) for x in tensors * 20]) for _ in range(2)]
    failures: list[Any] = []
    with contextlib.ExitStack() as stack:
        hook, threading.excepthook = threading.excepthook, failures.append
        stack.callback(setattr, threading, "excepthook", hook)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    x, y = torch.randn(1, 1, 128, 64, device="cuda"), torch.zeros(1, 1, 128, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, y)
    x.copy_(tensors[0])
    graph.replay()
    assert torch.equal(x, y)
    assert launch._compiled is not None
