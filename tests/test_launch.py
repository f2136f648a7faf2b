"""Cached launches: Triton is asked again for whatever it compiles anew, and for nothing else."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import INTERPRETED

from flashmask_hf import ops

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter compiles nothing", allow_module_level=True)
if not ops.HAS_TRITON:
    pytest.skip("cpu lane: Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from stand_ins import describe, on_gpu
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmask_hf.kernels import launch
from flashmask_hf.kernels.descriptors import describable, layout_of, packed_layout, side_by_side, tiles_template
from flashmask_hf.kernels.launch import Launcher


@triton.jit(do_not_specialize=["rows"])
def _kernel(x, y, rows, heads, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class _Compiled:
    """What Triton returns of a launch: it notes how it is launched itself."""

    def __init__(self, launches: list[Any]):
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.launches.append((grid, arguments, stream))


class _Driver:
    device, stream = 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def is_active(self) -> bool:
        return True


class _Launches:
    """A launcher of `_kernel` on a device that is not there: `asked` of Triton, `direct` past it."""

    def __init__(self, driver: _Driver):
        self.driver = driver
        self.launcher = Launcher(_kernel)
        self.asked: list[Any] = []
        self.direct: list[Any] = []

    def __call__(self, *arguments: Any, programs: int = 3, **constants: Any) -> tuple[int, int]:
        """Launch; how often Triton was asked so far, and how often not."""
        self.launcher(programs, *arguments, **({"SIZE": 64, "FLAG": True, "num_warps": 4} | constants))
        return len(self.asked), len(self.direct)


@contextlib.contextmanager
def _no_gpu() -> Iterator[_Launches]:
    launches = _Launches(_Driver())

    def instead(function: JITFunction, grid: Any) -> Any:
        def run(*arguments: Any, **constants: Any) -> _Compiled:
            launches.asked.append((grid, arguments, constants))
            return _Compiled(launches.direct)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", instead)
        patch.setattr(driver, "_active", launches.driver)
        yield launches


@pytest.fixture
def launches() -> Iterator[_Launches]:
    with _no_gpu() as found:
        yield found


def _tensor(dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
    """Of 256 elements, `offset` elements past an address that is a multiple of 16."""
    return torch.zeros(256 + offset, dtype=dtype)[offset:]


def test_the_second_launch_goes_past_triton(launches: _Launches) -> None:
    """With its own arguments, grid and stream, and the constants in the order of the kernel's parameters."""
    x, y = _tensor(), _tensor()
    assert launches(x, None, 100, 8, 0.5, programs=5) == (1, 0)
    assert launches.asked == [((5,), (x, None, 100, 8, 0.5), {"SIZE": 64, "FLAG": True, "num_warps": 4})]
    launches.driver.stream = 9
    assert launches(y, None, 101, 9, 0.25, programs=6) == (1, 1)
    (grid, arguments, stream), *_ = launches.direct
    assert (grid, stream) == ((6, 1, 1), 9)
    assert arguments[0] is y
    assert arguments[1:] == (None, 101, 9, 0.25, 64, True)


USUAL = (_tensor(), _tensor(torch.float32), 100, 8, 0.5)
OTHERS = {
    "dtype": (0, _tensor(torch.float16)),
    "alignment": (1, _tensor(torch.float32, offset=1)),
    "none": (1, None),
    "divisible": (3, 48),
    "one": (3, 1),
    "zero": (3, 0),
    "wide": (2, 2**31),
    "negative wide": (2, -(2**31) - 1),
    "very wide": (2, 2**63),
    "bool": (3, True),
    "float": (3, 8.0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_triton_is_asked_for_what_it_tells_apart(launches: _Launches, other: str) -> None:
    place, value = OTHERS[other]
    changed = [*USUAL[:place], value, *USUAL[place + 1 :]]
    assert launches(*USUAL) == (1, 0)
    assert launches(*changed) == (2, 0)
    assert launches(*USUAL) == (2, 1)
    assert launches(*changed) == (2, 2)


def test_every_kind_of_integer_is_its_own(launches: _Launches) -> None:
    kinds = (True, 1, 0, 16, 17, 2**31, 2**63, 1.0, None)
    for asked, heads in enumerate(kinds, 1):
        assert launches(*USUAL[:3], heads, 0.5) == (asked, 0)


@pytest.mark.parametrize(
    "constants",
    [{"SIZE": 32}, {"SIZE": 64.0}, {"FLAG": False}, {"FLAG": 1}, {"num_warps": 8}, {"num_stages": 2}],
    ids=str,
)
def test_triton_is_asked_for_other_constants(launches: _Launches, constants: dict[str, Any]) -> None:
    assert launches(*USUAL) == (1, 0)
    assert launches(*USUAL, **constants) == (2, 0)
    assert launches(*USUAL, **constants) == (2, 1)
    assert launches.direct[0][1][5:] == (constants.get("SIZE", 64), constants.get("FLAG", True))


def test_every_device_has_its_own(launches: _Launches) -> None:
    assert launches(*USUAL) == (1, 0)
    launches.driver.device = 1
    assert launches(*USUAL) == (2, 0)
    assert launches(*USUAL) == (2, 1)
    assert launches.direct[0][2] == 8  # the stream of the second device


def _turn(knob: str, patch: pytest.MonkeyPatch) -> None:
    if knob == "debug":
        triton.knobs.runtime.debug = True
    elif knob == "instrumentation_mode":
        triton.knobs.compilation.instrumentation_mode = "gsan"
    elif knob == "stages":
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: None)
    else:
        patch.setattr(_kernel, "pre_run_hooks", [lambda *_, **__: None])


@pytest.mark.parametrize("knob", ["debug", "instrumentation_mode", "stages", "pre_run"])
def test_debugging_instrumentation_and_hooks_are_left_to_triton(
    launches: _Launches, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launches(*USUAL) == (1, 0)
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope(), monkeypatch.context() as patch:
        _turn(knob, patch)
        assert launches(*USUAL) == (2, 0)
        assert launches(*USUAL) == (3, 0)
    assert launches(*USUAL) == (3, 1)


class _Bound:
    """A bound launch of `launches`' kernel; called with its tensors, it tells the same."""

    def __init__(self, launches: _Launches):
        self.launches = launches
        self.bound = launches.launcher.bind(3, *USUAL[2:], SIZE=64, FLAG=True, num_warps=4)

    def __call__(self, *tensors: Any) -> tuple[int, int]:
        self.bound.launch(*tensors)
        return len(self.launches.asked), len(self.launches.direct)


def test_a_bound_launch_goes_past_triton(launches: _Launches) -> None:
    """With the tensors of the moment, on the stream of the moment; what the launcher has compiled is not asked for."""
    bound = _Bound(launches)
    assert bound(*USUAL[:2]) == (1, 0)
    assert launches.asked == [((3,), USUAL, {"SIZE": 64, "FLAG": True, "num_warps": 4})]
    x, y = _tensor(), _tensor(torch.float32)
    launches.driver.stream = 9
    assert bound(x, y) == (1, 1)
    grid, arguments, stream = launches.direct[0]
    assert (grid, stream) == ((3, 1, 1), 9)
    assert arguments[0] is x
    assert arguments[1] is y
    assert arguments[2:] == (100, 8, 0.5, 64, True)
    another = _Bound(launches)
    assert another(x, y) == (1, 2)
    assert another(x, y) == (1, 3)


def test_a_bound_launch_sees_dtypes(launches: _Launches) -> None:
    bound = _Bound(launches)
    assert bound(*USUAL[:2]) == (1, 0)
    assert bound(USUAL[0], _tensor()) == (2, 0)
    assert bound(*USUAL[:2]) == (2, 1)
    assert bound(USUAL[0], _tensor()) == (2, 2)


def test_a_bound_launch_sees_addresses_and_devices(launches: _Launches) -> None:
    bound = _Bound(launches)
    shifted = _tensor(torch.float32, offset=1)
    assert bound(*USUAL[:2]) == (1, 0)
    assert bound(USUAL[0], shifted) == (2, 0)
    assert bound(USUAL[0], shifted) == (2, 1)
    launches.driver.device = 1
    assert bound(*USUAL[:2]) == (3, 1)
    assert bound(*USUAL[:2]) == (3, 2)
    launches.driver.device = 0
    assert bound(*USUAL[:2]) == (3, 3)
    assert [stream for *_, stream in launches.direct] == [7, 8, 7]


class _Own:
    """Launches past Triton's launcher, too, of a kernel that is not there."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.succeeds = True
        self.made: list[Any] = []


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> _Own:
    found = _Own()

    def direct(
        compiled: Any,
        programs: int,
        arguments: list[Any],
        like: tuple[Any, ...],
        starts: list[int],
        switches: Any,
        otherwise: Any,
    ) -> Any:
        dtypes = [x if x is None else x.dtype for x in like]

        class Launch:
            def attempt(self, *tensors: Any) -> bool:
                if any(vars(x).get(name) for x, name in switches) or not found.succeeds:
                    return False
                if [x if x is None else x.dtype for x in tensors] != dtypes or not all(
                    getattr(x, "is_cuda", True) for x in tensors
                ):
                    return False
                found.launched.append(tensors)
                return True

            def __call__(self, *tensors: Any) -> None:
                if not self.attempt(*tensors):
                    otherwise(*tensors)

        found.made.append((programs, arguments, starts))
        return Launch()

    monkeypatch.setattr(launch, "direct", direct)
    return found


def test_a_bound_launch_goes_past_triton_s_launcher(launches: _Launches, own: _Own) -> None:
    """With the addresses of its tensors, descriptors' too, unless that fails."""
    x, y = on_gpu(_rows(), _tensor())
    tiles = tiles_template(True, (layout_of(x), 64, 64))
    bound = launches.launcher.bind(3, 8, 0.5, tiles=tiles, SIZE=64, FLAG=True, num_warps=4)
    bound.launch(x, y, None)
    assert not own.made  # layouts may be there once
    (_, (first, *_), _), *_ = launches.asked
    assert first.base is x
    assert vars(first) == vars(describe(x, 1, 1, 64, 64))
    launches.driver.stream = 9
    for _ in range(2):
        bound.launch(x, y, None)
    assert [[*map(id, tensors)] for tensors in own.launched] == [[*map(id, (x, y, None))]] * 2
    assert (len(launches.asked), launches.direct) == (1, [])
    assert bound.launch is vars(bound)["launch"]  # without a frame of Python's
    own.succeeds = False
    bound.launch(x, y, None)
    ((grid, (described, *arguments), stream),) = launches.direct
    assert (grid, stream) == ((3, 1, 1), 9)
    assert described.base is x
    assert arguments[0] is y
    assert arguments[1:] == [None, 8, 0.5, 64, True]
    ((programs, (described, *arguments), starts),) = own.made
    assert (programs, starts) == (3, [0, 0, 0])
    assert described.base is x
    assert arguments[1:] == [None, 8, 0.5, 64, True]


def test_a_launch_takes_the_memory_that_tensors_lie_in(launches: _Launches, own: _Own) -> None:
    """Triton gets tensors of their layouts, what goes past it the memory itself."""
    device = torch.device("cpu")
    tiles = packed_layout(2, 64, dtype=torch.bfloat16, device=device)
    whole, parts = side_by_side(y=packed_layout(3, dtype=torch.int32, device=device), x=tiles)
    assert [parts[name].start for name in "yx"] == [0, 128]
    (memory,) = on_gpu(whole.maker()().zero_())
    bound = launches.launcher.bind(
        3, 8, 0.5, tiles=tiles_template(True, (tiles, 1, 64)), parts=parts, SIZE=64, FLAG=True, num_warps=4
    )
    for _ in range(3):
        bound.launch(memory, memory, None)
    own.succeeds = False
    bound.launch(memory, memory, None)
    ((_, asked, _),), ((_, again, _),), ((_, prepared, starts),) = launches.asked, launches.direct, own.made
    for described, y, *_ in (asked, again, prepared):
        assert layout_of(described.base) == tiles
        assert described.base.data_ptr() == memory.data_ptr() + 128
        assert (y.dtype, y.shape, y.data_ptr()) == (torch.int32, (3,), memory.data_ptr())
    assert starts == [128, 0, 0]
    assert [[*map(id, given)] for given in own.launched] == [[*map(id, (memory, memory, None))]] * 2
    bound.launch(memory, None, None)
    assert launches.asked[-1][1][1] is None


def test_launches_of_other_dtypes_are_their_own(launches: _Launches, own: _Own) -> None:
    bound = _Bound(launches)
    x, y, z = on_gpu(_tensor(), _tensor(torch.float32), _tensor(torch.float16))
    for other, past in ((y, 0), (y, 1), (y, 2), (z, 2), (z, 3), (z, 4), (y, 5), (z, 6)):
        bound(x, other)
        assert len(own.launched) == past
    assert (len(launches.asked), launches.direct, len(own.made)) == (2, [], 2)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_triton_s_launcher_calls_hooks(
    launches: _Launches, own: _Own, monkeypatch: pytest.MonkeyPatch, hook: str, chained: bool
) -> None:
    bound = _Bound(launches)
    tensors = on_gpu(*USUAL[:2])
    assert bound(*tensors) == (1, 0)
    assert bound(*tensors) == (1, 0)
    with monkeypatch.context() as patch:
        if chained:
            patch.setattr(getattr(triton.knobs.runtime, hook), "calls", [lambda metadata: None])
        else:
            patch.setattr(triton.knobs.runtime, hook, lambda metadata: None)
        assert bound(*tensors) == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, hook, None)
        assert bound(*tensors) == (1, 1)
    assert bound(*tensors) == (1, 1)
    assert len(own.launched) == 3


@pytest.mark.parametrize("knob", ["debug", "instrumentation_mode", "stages", "pre_run"])
def test_launches_past_triton_s_launcher_too_leave_debugging_to_triton(
    launches: _Launches, own: _Own, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = _Bound(launches)
    tensors = on_gpu(*USUAL[:2])
    for _ in range(3):
        bound(*tensors)
    assert (len(launches.asked), len(own.launched)) == (1, 2)
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope(), monkeypatch.context() as patch:
        _turn(knob, patch)
        assert bound(*tensors) == (2, 0)
    assert bound(*tensors) == (2, 0)
    assert len(own.launched) == 3


def test_triton_sees_a_tensor_that_is_not_on_the_gpu(launches: _Launches, own: _Own) -> None:
    bound = _Bound(launches)
    x, y = on_gpu(*USUAL[:2])
    bound(x, y)
    bound(x, y)
    assert (len(launches.asked), len(own.launched)) == (1, 1)
    for count in (1, 2):
        bound(x, _tensor(torch.float32))
        assert (len(launches.asked), len(launches.direct), len(own.launched)) == (1, count, 1)


def test_triton_launches_on_the_device_of_the_tensors(launches: _Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one; what goes past it knows by itself."""

    @contextlib.contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        current, launches.driver.device = launches.driver.device, x.get_device()
        yield
        launches.driver.device = current

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 5)
    bound = launches.launcher.bind(3, *USUAL[2:], SIZE=64, FLAG=True, num_warps=4)
    for _ in range(2):
        bound.launch(None, _tensor())
    assert [stream for *_, stream in launches.direct] == [7 + 5]
    assert launches.driver.device == 0


def test_what_goes_past_triton_does_so_from_another_device(
    launches: _Launches, own: _Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches on the device of the tensors only: that is the current one for a second attempt."""

    @contextlib.contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        own.succeeds = True
        yield
        own.succeeds = False

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    bound = _Bound(launches)
    own.succeeds = False
    tensors = on_gpu(*USUAL[:2])
    for past in range(4):
        assert bound(*tensors) == (1, 0)
        assert len(own.launched) == past


def test_a_bound_launch_that_triton_launches_is_no_cycle(launches: _Launches) -> None:
    bound = _Bound(launches)
    bound(*USUAL[:2])
    gone = weakref.ref(bound.bound)
    gc.disable()
    try:
        del bound
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("knob", ["debug", "instrumentation_mode", "stages", "pre_run"])
def test_a_bound_launch_too_leaves_debugging_to_triton(
    launches: _Launches, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = _Bound(launches)
    assert bound(*USUAL[:2]) == (1, 0)
    assert bound(*USUAL[:2]) == (1, 1)
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope(), monkeypatch.context() as patch:
        _turn(knob, patch)
        assert bound(*USUAL[:2]) == (2, 1)
        assert bound(*USUAL[:2]) == (3, 1)
    assert bound(*USUAL[:2]) == (3, 2)


def test_what_is_not_compiled_is_asked_for_again(launches: _Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of Triton's may keep it from compiling: nothing has been launched then."""
    monkeypatch.setattr(JITFunction, "__getitem__", lambda function, grid: lambda *arguments, **constants: None)
    bound = _Bound(launches)
    for _ in range(2):
        launches(*USUAL)
        bound(*USUAL[:2])
    assert not launches.direct


def _rows(length: int = 128, dims: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(2, length, 3, dims, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("x", "block"),
    [(_rows(dtype=torch.float16), (1, 1, 64, 64)), (_rows(), (1, 1, 32, 64)), (_rows(), (1, 1, 64, 32))],
    ids=["dtype", "rows", "columns"],
)
def test_triton_is_asked_for_other_descriptors(launches: _Launches, x: torch.Tensor, block: tuple[int, ...]) -> None:
    assert launches(describe(_rows(), 1, 1, 64, 64), *USUAL[1:]) == (1, 0)
    assert launches(describe(x, *block), *USUAL[1:]) == (2, 0)
    assert launches(describe(_rows(256), 1, 1, 64, 64), *USUAL[1:]) == (2, 1)


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
def test_a_copied_descriptor_is_the_one_that_triton_makes(x: torch.Tensor) -> None:
    block = [1, 1, 16, 64] if x.dim() == 4 else [128, 32]
    step = 16 // x.element_size()
    strides = [step if x.shape[i] == 1 else x.stride(i) for i in range(x.dim() - 1)] + [1]
    expected = TensorDescriptor(x, list(x.shape), strides, block)
    for _ in range(2):
        found = describe(x, *block)
        assert type(found) is TensorDescriptor
        assert found.base is x
        assert vars(found) == vars(expected)


def test_descriptors_of_one_layout_have_their_own_tensors() -> None:
    first, second = _rows(), _rows()
    one, other = (describe(x, 1, 1, 64, 64) for x in (first, second))
    assert one.base is first
    assert other.base is second


def test_what_no_descriptor_fits_is_copied() -> None:
    """The layout is remembered, the address is not."""
    whole = torch.arange(2 * 128 * 3 * 64 + 1.0).bfloat16()
    for _ in range(2):
        aligned, shifted = (whole[i:][: 2 * 128 * 3 * 64].view(2, 3, 128, 64) for i in (0, 1))
        assert describable(aligned) is aligned
        copy = describable(shifted)
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, shifted)
        odd = torch.zeros(1, 2, 8, 65)[..., :64]
        assert describable(odd).stride() == (2 * 8 * 64, 8 * 64, 64, 1)
        wide = aligned.expand(2, 3, 128, 64)[..., ::2]
        assert describable(wide).is_contiguous()


def test_a_descriptor_of_what_cannot_be_described_raises() -> None:
    with pytest.raises(AssertionError):
        describe(torch.zeros(1, 2, 8, 65, dtype=torch.bfloat16)[..., :64], 1, 1, 8, 64)
