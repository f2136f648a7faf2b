"""Interpreter of the kernels written in Gluon, on a CPU, which finds data races and deadlocks (see `race_detector`).

Triton's interpreter does not support Gluon. Here the functions of a kernel run as Python, over tensors that implement
the part of Gluon that the kernels use. Not reproduced: the rounding of quotients of negative numbers, towards zero on a
GPU; layouts, and errors in them; register pressure.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from tools.race_detector import (
    RUNTIME_FILES,
    Access,
    Barrier,
    HardwareBarrier,
    Machine,
    Operation,
    Place,
    current_role,
    where_in_kernel,
)
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from flashmask_hf.kernels.hopper import gluon
from flashmask_hf.kernels.launch.launcher import Launch

_TORCH = {
    real.bfloat16: torch.bfloat16,
    real.float16: torch.float16,
    real.float32: torch.float32,
    real.int8: torch.int8,
    real.int16: torch.int16,
    real.int32: torch.int32,
    real.int64: torch.int64,
}
_GLUON = {there: here for here, there in _TORCH.items()}
RUNTIME_FILES.add(__file__)


class Shared:
    """A tensor in shared memory, or a view of one of its places of `size` elements each."""

    def __init__(self, data: Tensor, places: list[Place]):
        self.data, self.places = data, places
        self.place: Place | None = None
        self.size = data[0].numel()

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return _GLUON[self.data.dtype]

    def _view(self, data: Tensor, place: Place | None = None) -> Shared:
        view = object.__new__(Shared)
        view.__dict__ = self.__dict__ | {"data": data, "place": place or self.place}
        return view

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.data), f"{self.places[0].name} has no place {int(i)}"
        return self._view(self.data[int(i)], self.place or self.places[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return self._view(self.data.narrow(dim, int(start), length))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(self.data.view(list(shape)))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.data.permute(list(order)))

    def _one(self) -> Place:
        assert self.place is not None, "an access to one place of the tensor, which `index` names"
        return self.place

    def load(self, layout: Any) -> Tile:
        made_of = self._one().read(current_role().access(writes=False), current_role().known, False)
        return Tile(self.data.clone(), made_of)

    def store(self, tile: Tile) -> None:
        assert tile.data.dtype == self.data.dtype
        assert tile.data.shape == self.data.shape
        whole = self.data.numel() == self.size
        self._one().overwrite(current_role().access(writes=True), current_role().known, tile.reads, whole)
        self.data.copy_(tile.data)

    def read_by(self, operation: Operation) -> tuple[Tensor, frozenset[Access]]:
        """Return (the data, the reads that it was computed from)."""
        return self.data, self._one().read(operation.access(writes=False), operation.known, True)

    def written_by(self, operation: Operation, tile: Tensor) -> None:
        assert tile.dtype == self.data.dtype
        assert tile.numel() == self.size
        self._one().overwrite(operation.access(writes=True), operation.known, frozenset(), True)
        self.data.copy_(tile.view(self.data.shape))


class Barriers:
    """An array of mbarriers in shared memory; where one barrier is expected, it stands for its first."""

    def __init__(self, name: str, count: int):
        self.all = [Barrier(f"{name} {i}", current_role().machine.new_number()) for i in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def _barrier(x: Barrier | Barriers) -> Barrier:
    return x.all[0] if isinstance(x, Barriers) else x


def _plain(x: Any) -> Any:
    """Return the tensor of a tile, or the number itself."""
    return x.data if isinstance(x, Tile) else x


class Tile:
    """A tensor in registers; scalars known at run time have no dimensions.

    Attributes:
        raw: the data.
        reads: the reads of shared memory that it was computed from.
        product: the unfinished product that it is the result of, or None.
    """

    def __init__(self, data: Tensor, reads: frozenset[Access] = frozenset(), product: Operation | None = None):
        self.raw, self.reads, self.product = data, reads, product

    @property
    def data(self) -> Tensor:
        assert self.product is None, f"{where_in_kernel()} uses a product that it did not wait for"
        return self.raw

    def used(self) -> Tensor:
        """Return the data for an effect outside of the registers, which raises if it depends on a doubtful read."""
        for access in self.reads:
            access.use()
        return self.data

    @property
    def shape(self) -> list[int]:
        return list(self.raw.shape)

    @property
    def dtype(self) -> Any:
        return _GLUON[self.raw.dtype]

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None, shape=self.shape)

    def to(self, dtype: Any) -> Tile:
        return _apply(lambda x: x.to(_TORCH[dtype]), self)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return _apply(lambda x: x.reshape(list(shape)), self)

    def permute(self, order: Sequence[int]) -> Tile:
        return _apply(lambda x: x.permute(list(order)), self)

    def __neg__(self) -> Tile:
        return _apply(torch.neg, self)

    def __index__(self) -> int:
        return int(self.used())

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.used())


def _reads(*arguments: Any) -> frozenset[Access]:
    return frozenset().union(*(x.reads for x in arguments if isinstance(x, (Tile, Pointer))))


def _apply(function: Callable[..., Tensor], *arguments: Any) -> Tile:
    """Apply a function of tensors and numbers to tiles and numbers."""
    return Tile(function(*map(_plain, arguments)), _reads(*arguments))


def _operator(name: str) -> Callable[[Tile, Any], Any]:
    def apply(self: Tile, other: Any) -> Any:
        if name == "__and__":  # one False operand settles the result; of two, the one that was read first
            false = [x for x in (self, other) if isinstance(x, Tile) and x.shape == [] and not x.data]
            if false:
                return min(false, key=lambda x: max((read.nth for read in x.reads), default=0))
        return _apply(lambda x, y: getattr(x, name)(y), self, other)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Tile, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    """Pointers to elements of a tensor in global memory; `reads` as in `Tile`."""

    def __init__(self, memory: Tensor, at: Any, reads: frozenset[Access] = frozenset()):
        self.memory, self.at, self.reads = memory, at, reads

    def __add__(self, offset: Any) -> Pointer:
        at, more = (torch.as_tensor(_plain(x)).long() for x in (self.at, offset))
        return Pointer(self.memory, at + more, self.reads | _reads(offset))

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def elements(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return (indices, which of them the mask selects)."""
        at = torch.as_tensor(self.at)
        meant = torch.as_tensor(_plain(mask)).expand(at.shape) if mask is not None else torch.ones_like(at).bool()
        outside = meant & ((at < 0) | (at >= len(self.memory)))
        assert not outside.any(), f"{where_in_kernel()} leaves the tensor, of {len(self.memory)} elements"
        return torch.where(meant, at, 0), meant

    def changed(self, *more: Any) -> None:
        """Mark the reads that this address and `more` depend on as used: they decide where global memory changes."""
        for access in _reads(self, *more):
            access.use()


class Descriptor:
    """A tensor descriptor: tiles of a tensor in global memory."""

    def __init__(self, described: Any):
        self.block_shape, self.layout = described.block_shape, described.layout
        self.dtype = _GLUON[described.base.dtype]
        base = described.base
        size = 1 + sum((n - 1) * s for n, s in zip(described.shape, described.strides, strict=True))
        assert base.storage_offset() + size <= base.untyped_storage().nbytes() // base.element_size()
        self.tensor = torch.as_strided(base, described.shape, described.strides)

    def tile(self, coordinates: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return (the part of a tile that lies inside of the tensor, its slices in the tile)."""
        here, there = [], []
        for at, width, size in zip(coordinates, self.block_shape, self.tensor.shape, strict=True):
            first, last = max(int(at), 0), min(int(at) + width, size)
            here.append(slice(first, max(first, last)))
            there.append(slice(first - int(at), max(first, last) - int(at)))
        return self.tensor[tuple(here)], tuple(there)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
        return Pointer(flat, x.storage_offset())
    return Descriptor(x) if hasattr(x, "block_shape") else x


# The language, by its names in `gl`


def _allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Shared | Barriers:
    frame = sys._getframe(1)
    if frame.f_code.co_name == "make_barriers":  # the name is in the line that calls it
        frame = sys._getframe(2)
    name = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split("=")[0].strip()
    if layout == "barriers":
        return Barriers(name, shape[0])
    data = torch.full(shape, float("nan") if dtype.is_floating() else -(2**31), dtype=_TORCH[dtype])
    places = [Place(f"{name} {i}") for i in range(shape[0])]
    current_role().machine.places += places
    return Shared(data, places)


def _warp_specialize(roles: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    assert len(roles) == len(warps) + 1 == len(registers) + 1
    role = current_role()
    for (function, arguments), count in zip(roles[1:], warps, strict=True):
        known = role.known.copy()
        role.machine.add(role.program, count, known, lambda f=function, args=arguments: f(*args))
    role.step()
    function, arguments = roles[0]
    function(*arguments)


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tile:
    at, meant = pointer.elements(mask)
    data = torch.where(meant, pointer.memory[at], torch.as_tensor(_plain(other or 0)).to(pointer.memory.dtype))
    return Tile(data, _reads(pointer, mask, other))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    pointer.changed(mask)
    at, meant = pointer.elements(mask)
    value = torch.as_tensor(value.used() if isinstance(value, Tile) else value).to(pointer.memory.dtype)
    value = value.expand(at.shape)
    pointer.memory[at[meant]] = value[meant]


def _atomic_add(pointer: Pointer, value: int, sem: str = "acq_rel") -> Tile:
    pointer.changed()
    current_role().machine.wait()
    (at, _), old = pointer.elements(None), _load(pointer)
    pointer.memory[at] += value
    return Tile(old.data.clone())


def _select(condition: Any, one: Any, other: Any) -> Tile:
    def select(condition: Any, one: Any, other: Any) -> Tensor:
        if not isinstance(one, Tensor) and not isinstance(other, Tensor):
            one = torch.tensor(one, dtype=torch.int32 if isinstance(one, int) else torch.float32)
        return torch.where(torch.as_tensor(condition), one, other)

    return _apply(select, condition, one, other)


def _reduce(name: str) -> Callable[[Tile, int], Tile]:
    return lambda tile, axis: _apply(lambda x: getattr(x, name)(axis).to(x.dtype), tile)


def _either(name: str) -> Callable[[Any, Any], Tile]:
    def choose(x: Any, y: Any) -> Tensor:
        like = x if isinstance(x, Tensor) else y
        x, y = (torch.as_tensor(a, dtype=like.dtype if isinstance(like, Tensor) else torch.int32) for a in (x, y))
        return getattr(torch, name)(x, y)

    return lambda one, other: _apply(choose, one, other)


def _broadcast(one: Tile, other: Tile) -> tuple[Tile, Tile]:
    shape = torch.broadcast_shapes(one.raw.shape, other.raw.shape)
    return _apply(lambda x: x.expand(shape), one), _apply(lambda x: x.expand(shape), other)


def _elementwise(name: str) -> Callable[[Tile], Tile]:
    return lambda tile: _apply(getattr(torch, name), tile)


def _assembly(text: str, constraints: str, args: list[Tile], dtype: Any, is_pure: bool, pack: int) -> Tile:
    """Run what kernels write in assembly themselves: conversions between 16 and 32 bits."""
    assert len(args) == 1, text
    assert dtype.is_floating(), text
    return args[0].to(dtype)


def _static_assert(condition: Any, message: str) -> None:
    assert condition, message


class _Layouts:
    """Layouts say how threads share a tensor, and are ignored here."""

    def __init__(self, *_: Any):
        pass

    @staticmethod
    def get_default_for(*_: Any) -> None:
        return None


_gl = SimpleNamespace(
    **{name: vars(real)[name] for name in ("bfloat16", "float16", "float32", "int16", "int32", "int64")},
    constexpr=None,
    BlockedLayout=_Layouts,
    DotOperandLayout=_Layouts,
    NVMMADistributedLayout=_Layouts,
    NVMMASharedLayout=_Layouts,
    SliceLayout=_Layouts,
    SwizzledSharedLayout=_Layouts,
    abs=_elementwise("abs"),
    allocate_shared_memory=_allocate_shared_memory,
    arange=lambda start, end, layout: Tile(torch.arange(start, end, dtype=torch.int32)),
    atomic_add=_atomic_add,
    broadcast=_broadcast,
    convert_layout=lambda x, layout: x,
    exp2=_elementwise("exp2"),
    expand_dims=lambda x, axis: _apply(lambda y: y.unsqueeze(axis), x),
    full=lambda shape, value, dtype, layout: Tile(torch.full(shape, 0, dtype=_TORCH[dtype]) + _plain(value)),
    inline_asm_elementwise=_assembly,
    load=_load,
    log2=_elementwise("log2"),
    max=_reduce("amax"),
    maximum=_either("maximum"),
    min=_reduce("amin"),
    minimum=_either("minimum"),
    num_programs=lambda axis: Tile(torch.tensor(current_role().machine.programs, dtype=torch.int32)),
    num_warps=lambda: current_role().warps,
    program_id=lambda axis: Tile(torch.tensor(current_role().program.number, dtype=torch.int32)),
    reshape=lambda x, shape: x.reshape(shape),
    static_assert=_static_assert,
    static_range=range,
    store=_store,
    sum=_reduce("sum"),
    warp_specialize=_warp_specialize,
    where=_select,
    zeros=lambda shape, dtype, layout: Tile(torch.zeros(shape, dtype=_TORCH[dtype])),
)


# The functions of `flashmask_hf.kernels.hopper.gluon`


def _init(barrier: Barrier | Barriers, count: int) -> None:
    barrier = _barrier(barrier)
    barrier.count = barrier.left = count


def _arrive(barrier: Barrier | Barriers, count: int = 1) -> None:
    _barrier(barrier).arrive(current_role().known, count, 0)
    current_role().step()
    current_role().machine.wait()


def _expect(barrier: Barrier | Barriers, count: int) -> None:
    _barrier(barrier).arrive(current_role().known, 1, count)
    current_role().step()


def _wait(barrier: Barrier | Barriers, phase: Any, pred: Any = True) -> None:
    barrier, phase, role = _barrier(barrier), int(phase), current_role()
    assert phase in (0, 1)
    if pred:
        role.machine.wait(lambda: barrier.phases & 1 != phase)
        role.known.join(barrier.passed(role.known, phase))


def _hardware(number: Any) -> HardwareBarrier:
    return current_role().program.barriers.setdefault(int(number), HardwareBarrier(int(number)))


def _named_barrier_arrive(number: Any, threads: int) -> None:
    _hardware(number).arrive(current_role(), threads)
    current_role().step()
    current_role().machine.wait()


def _named_barrier_sync(number: Any, threads: int) -> None:
    role, barrier = current_role(), _hardware(number)
    generation = barrier.generation
    barrier.arrive(role, threads)
    role.step()
    role.machine.wait(lambda: barrier.generation > generation)
    assert barrier.generation == generation + 1, f"{where_in_kernel()}: others went on without this role"
    role.known.join(barrier.gathered)


def _fence_async_shared() -> None:
    role = current_role()
    role.fence = role.known.over[role.number]
    role.step()
    if role.warps == 1:
        _group_barrier()


def _group_barrier() -> None:
    """Barrier of all warps of the role: their fences have happened."""
    role = current_role()
    role.known.fenced[role.number] = role.fence


def _tma_load(descriptor: Descriptor, coordinates: list[Any], barrier: Barrier | Barriers, to: Shared) -> None:
    barrier = _barrier(barrier)
    barrier.check(current_role().known)
    operation = Operation(barrier.number, barrier.phases + 1)
    tile = torch.zeros(descriptor.block_shape, dtype=_TORCH[descriptor.dtype])
    inside, place = descriptor.tile(coordinates)
    tile[place] = inside
    to.written_by(operation, tile)
    barrier.receive(operation.end(), tile.numel() * tile.element_size())


def _tma_store(descriptor: Descriptor, coordinates: list[Any], source: Shared, add: bool = False) -> None:
    operation = current_role().stores.start()
    inside, place = descriptor.tile(coordinates)
    data, made_of = source.read_by(operation)
    tile = Tile(data, made_of).used().reshape(descriptor.block_shape)[place]
    inside.copy_(inside + tile if add else tile)


def _tma_store_wait(count: int) -> None:
    current_role().stores.wait(count)


def _warpgroup_mma(a: Any, b: Shared, acc: Tile, *, use_acc: Any = True, is_async: bool = False) -> Tile:
    assert is_async
    role = current_role()
    assert acc.product is None or acc.product in role.products.running
    operation = role.products.start()
    left, made_of = a.read_by(operation) if isinstance(a, Shared) else (a.data, a.reads)
    right, also_of = b.read_by(operation)
    made_of = made_of | also_of | (acc.reads if use_acc else frozenset())
    assert left.dtype == right.dtype
    assert left.dtype in (torch.bfloat16, torch.float16)
    product = left.float() @ right.float()
    assert acc.raw.dtype == torch.float32
    assert acc.raw.shape == product.shape
    return Tile(acc.raw + product if use_acc else product, made_of, operation)


def _warpgroup_mma_wait(left: int, deps: Sequence[Tile]) -> Any:
    products = current_role().products
    products.wait(left)
    done = tuple(Tile(x.raw, x.reads, x.product if x.product in products.running else None) for x in deps)
    return done if len(done) > 1 else done[0]


def _bits_below(bound: Any) -> Tile:
    def bits(bound: Any) -> Tensor:
        return ((1 << torch.as_tensor(bound).clamp(0, 32).long()) - 1).to(torch.int32)

    return _apply(bits, bound)


def _keep_signed(x: Tile, flags: Tile, selector: Tile) -> Tile:
    def keep(x: Tensor, flags: Tensor, selector: Tensor) -> Tensor:
        return torch.where((flags >> ((selector & 3) * 8 + 7)) & 1 != 0, x, float("-inf"))

    return _apply(keep, x, flags, selector)


def _keep_marked(x: Tile, words: Tile) -> Tile:
    """Bit 2 * i + j of a lane's word belongs to column 8 * i + 2 * lane + j."""

    def keep(x: Tensor, words: Tensor) -> Tensor:
        _, pieces, _, pairs = x.shape
        bit = 2 * torch.arange(pieces, dtype=torch.int32).view(1, -1, 1, 1) + torch.arange(pairs, dtype=torch.int32)
        return torch.where((words >> bit) & 1 != 0, x, 0.0)

    return _apply(keep, x, words)


def _wait_for_count(counter: Pointer, count: Any) -> None:
    counter.changed(count)
    current_role().machine.wait(lambda: bool(_load(counter).data >= int(count)))


_SHIM = {
    "bits_below": _bits_below,
    "fence_async_shared": _fence_async_shared,
    "gl": _gl,
    "group_barrier": _group_barrier,
    "keep_marked": _keep_marked,
    "keep_signed": _keep_signed,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=_init, arrive=_arrive, expect=_expect, wait=_wait
    ),
    "named_barrier_arrive": _named_barrier_arrive,
    "named_barrier_sync": _named_barrier_sync,
    "opaque_zero": lambda: 0,
    "rescale": lambda x, factors: x * factors,
    "tma_load": _tma_load,
    "tma_reduce_add": lambda descriptor, coordinates, source: _tma_store(descriptor, coordinates, source, add=True),
    "tma_store": _tma_store,
    "tma_store_wait": _tma_store_wait,
    "wait_for_count": _wait_for_count,
    "wait_for_writes": lambda: _tma_store_wait(0),
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}
_ON_THE_HOST = {"TensorDescriptor", "device_enum", "gluon"}
_IMPORTED = {
    alias.name
    for path in Path(gluon.__file__).parent.glob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ImportFrom) and node.module == gluon.__name__
    for alias in node.names
}
assert _SHIM.keys() | _ON_THE_HOST == _IMPORTED


_TRITON_FUNCTIONS = {"softcap_tanh": lambda scores, factor: _apply(torch.tanh, scores * factor)}
"""Functions in plain Triton that the kernels call, over the language above."""


def _as_python(kernel: GluonJITFunction) -> FunctionType:
    """Return a kernel, and all that it calls, as Python functions over the language above."""
    translated: dict[int, dict[str, Any]] = {}

    def translate(function: GluonJITFunction) -> FunctionType:
        code = function.fn
        if id(code.__globals__) not in translated:
            translated[id(code.__globals__)] = names = {}
            names.update({name: as_python(value) for name, value in code.__globals__.items()})
            names.update(_SHIM)
        return FunctionType(code.__code__, translated[id(code.__globals__)], code.__name__, code.__defaults__)

    def as_python(value: Any) -> Any:
        if isinstance(value, GluonJITFunction):
            return translate(value)
        if isinstance(value, JITFunction | InterpretedFunction):
            return _TRITON_FUNCTIONS.get(value.fn.__name__)
        if isinstance(value, ConstexprFunction):
            return value.fn
        if isinstance(value, real.constexpr):
            return value.value
        if isinstance(value, type) and hasattr(value, "__triton_builtin__"):  # `device_enum`
            members = vars(value).items()
            return SimpleNamespace(**{name: x.value for name, x in members if isinstance(x, real.constexpr)})
        return value

    return translate(kernel)


@contextlib.contextmanager
def interpreted(seed: int = 0) -> Iterator[list[str]]:
    """Run the kernels in Gluon that are launched inside here; the list fills with the names of those that ran.

    Needs Triton's own interpreter (TRITON_INTERPRET=1) for the other kernels.
    """
    ran: list[str] = []
    launch = Launch._launch

    def run(self: Launch, arguments: tuple[Any, ...]) -> None:
        if not isinstance(self.kernel, GluonJITFunction):
            launch(self, arguments)
            return
        constants = dict(self.constants)
        assert constants.pop("num_warps") == 4
        ran.append(self.kernel.fn.__name__)
        function = _as_python(self.kernel)
        bound = (*arguments, *self.scalars)
        Machine(self.programs, seed).run(lambda: function(*map(_argument, bound), **constants))

    try:
        Launch._launch = run  # type: ignore[method-assign]
        yield ran
    finally:
        Launch._launch = launch  # type: ignore[method-assign]
