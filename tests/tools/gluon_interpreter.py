"""Interpreter of the kernels written in Gluon, on a CPU, with a detector of data races and deadlocks.

Triton's interpreter does not support Gluon. Here the functions of a kernel run as Python, over tensors that implement
the part of Gluon that the kernels use. All programs of a launch exist at the same time, and each role of a program is a
thread. One thread runs at a time. Wherever a thread may have to wait, another one, drawn from the seed, continues.

Asynchronous operations (copies to and from shared memory, matrix products) are executed at once. Races are detected by
vector clocks, not by chance: every thread and every operation knows which others happened before it, and barriers
propagate this knowledge. `Race` is raised by

- an access to shared memory that is not known to happen after the last conflicting access;
- a copy or a product that reads what a thread stored, without a fence and a barrier of the storing warps in between;
- the use of a product before waiting for it.

Kernels may read a stale or unfinished value if they do not use it. So a doubtful read raises only when a value computed
from it is written to global memory or decides a branch. `Deadlock` is raised if no thread can continue, and names the
place where each one waits.

Not detected: the order between the warps of one role, which is one thread here; the fence after the initialization of
barriers; parts of a stage of shared memory, which is one place; the rounding of quotients of negative numbers, towards
zero on a GPU; errors in layouts; register pressure; the allocation of hardware barriers; the order of accesses to
global memory, except through the results.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from flashmask_hf.kernels.hopper import gluon
from flashmask_hf.kernels.launch.descriptors import with_memory
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


class Race(AssertionError):
    """Two conflicting accesses to one place, neither of which is known to happen before the other."""


class Deadlock(AssertionError):
    """No thread can continue."""


Clock = dict[int, int]
"""Vector clock: for each thread or operation, the number of its events that are known to have happened."""


def _join(clock: Clock, other: Clock) -> None:
    for who, count in other.items():
        if clock.get(who, 0) < count:
            clock[who] = count


@dataclass
class Known:
    """Vector clocks of the events that happened, and of the stores that a fence made visible to asynchronous reads."""

    over: Clock = field(default_factory=dict)
    fenced: Clock = field(default_factory=dict)

    def join(self, other: Known) -> None:
        _join(self.over, other.over)
        _join(self.fenced, other.fenced)

    def copy(self) -> Known:
        return Known(dict(self.over), dict(self.fenced))

    def covers(self, other: Known) -> bool:
        return all(self.over.get(who, 0) >= count for who, count in other.over.items())


@dataclass(eq=False)
class Access:
    """A read or write of shared memory.

    Attributes:
        who: number of the thread or asynchronous operation.
        count: time of the access in the clock of `who`.
        where: line of the kernel.
        stored: whether it is a store of a thread, and not an asynchronous copy.
        used: whether a value computed from it had an effect; writes always have one.
        doubt: the message to raise with once it is used; None for an access that is in order.
    """

    who: int
    count: int
    where: str
    stored: bool = False
    used: bool = False
    doubt: str | None = None
    nth: int = field(default_factory=itertools.count().__next__)

    def fail(self, message: str) -> None:
        if self.used:
            raise Race(message)
        self.doubt = message

    def use(self) -> None:
        if self.doubt is not None:
            raise Race(f"{self.doubt}; what is made of it is used in {_where()}")
        self.used = True

    def before(self, clock: Clock) -> bool:
        return clock.get(self.who, 0) >= self.count


@dataclass
class Place:
    """One place of shared memory: its last write, the reads since then, and the reads that its value depends on."""

    name: str
    write: Access | None = None
    reads: list[Access] = field(default_factory=list)
    made_of: frozenset[Access] = frozenset()

    def read(self, access: Access, known: Known, asynchronous: bool) -> frozenset[Access]:
        """Record a read; return the reads that the value depends on, this one included."""
        if self.write is None:
            access.fail(f"{self.name}: {access.where} reads what nobody wrote")
        elif not self.write.before(known.over):
            access.fail(f"{self.name}: {access.where} reads what {self.write.where} may not have written yet")
        elif asynchronous and self.write.stored and not self.write.before(known.fenced):
            access.fail(f"{self.name}: {access.where} reads what {self.write.where} stored, without a fence between")
        self.reads.append(access)
        return self.made_of | {access}

    def overwrite(self, access: Access, known: Known, made_of: frozenset[Access], whole: bool) -> None:
        if not access.stored and self.write and self.write.stored and not self.write.before(known.fenced):
            raise Race(f"{self.name}: {access.where} writes where {self.write.where} stored, without a fence between")
        for other in (*self.reads, self.write):
            if other and not other.before(known.over):
                other.fail(f"{self.name}: {access.where} writes where {other.where} may not be done")
        self.write = access
        self.reads = []
        self.made_of = made_of if whole else self.made_of | made_of


class Operation:
    """An asynchronous operation: number `count` of the sequence `who`, whose operations complete in order."""

    def __init__(self, who: int, count: int):
        role = _role()
        self.who, self.count, self.known = who, count, role.known.copy()
        role.step()

    def access(self, *, writes: bool) -> Access:
        return Access(self.who, self.count, _where(), used=writes)

    def end(self) -> Known:
        """Return what has happened once this operation is complete."""
        self.known.over[self.who] = self.count
        return self.known


class Queue:
    """Asynchronous products or stores of one thread, which complete in the order in which they started."""

    def __init__(self, machine: Machine):
        self.number = machine.new_number()
        self.started = 0
        self.running: list[Operation] = []

    def start(self) -> Operation:
        self.started += 1
        self.running.append(Operation(self.number, self.started))
        return self.running[-1]

    def wait(self, left: int) -> None:
        while len(self.running) > left:
            _role().known.join(self.running.pop(0).end())


class Barrier:
    """An mbarrier in shared memory: a phase completes when all have arrived and all expected bytes are there."""

    def __init__(self, name: str, number: int):
        self.name, self.number = name, number
        self.count = self.left = self.bytes = 0
        self.gathering = Known()
        self.gathered = [Known()]  # by completed phases

    @property
    def phases(self) -> int:
        return len(self.gathered) - 1

    def check(self, known: Known) -> None:
        """Raise unless the caller knows that the previous phase is complete; only then may it add to this one."""
        if not known.covers(self.gathered[-1]):
            raise Race(f"{self.name}: {_where()} arrives while the phase before may not be over")

    def arrive(self, known: Known, count: int, expected: int) -> None:
        self.check(known)
        assert self.left >= count, f"{self.name}: more arrive than the barrier counts ({_where()})"
        self.gathering.join(known)
        self.left -= count
        self.bytes += expected
        self._turn()

    def receive(self, known: Known, count: int) -> None:
        self.gathering.join(known)
        self.bytes -= count
        self._turn()

    def _turn(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.gathered.append(self.gathering)
            self.gathering = Known()
            self.left = self.count

    def passed(self, known: Known, phase: int) -> Known:
        """Return what is known after a wait for parity `phase`: up to the first such phase new to the caller."""
        over = known.over.get(self.number, 0)
        over += over & 1 == phase
        return Known(self.gathered[over].over | {self.number: over}, self.gathered[over].fenced)


class HardwareBarrier:
    """A named (hardware) barrier: whole warps arrive; waiting ones go on once `threads` are there."""

    def __init__(self, number: int):
        self.number = number
        self.threads: int | None = None
        self.generation = 0
        self.gathered = Known()
        self.took_part: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self.there: set[int] = set()
        self.arrived = 0
        self.gathering = Known()

    def arrive(self, role: Role, threads: int) -> None:
        where = f"hardware barrier {self.number}, {_where()}"
        assert self.threads in (None, threads), f"{where}: {threads} threads, elsewhere {self.threads}"
        if role.number in self.there or (role.number in self.took_part and not role.known.covers(self.gathered)):
            raise Race(f"{where}: the role is there again, and others may not be there yet")
        self.threads = threads
        self.there.add(role.number)
        self.arrived += role.warps * 32
        assert self.arrived <= threads, f"{where}: more than {threads} threads"
        self.gathering.join(role.known)
        self.gathering.fenced[role.number] = role.fence  # all of its warps have arrived
        if self.arrived == threads:
            self.gathered, self.took_part = self.gathering, self.there
            self.generation += 1
            self._begin()


class Role:
    """One role of one program, run by a thread."""

    def __init__(self, machine: Machine, program: Program, warps: int, known: Known, body: Callable[[], None]):
        self.machine, self.program, self.warps, self.known = machine, program, warps, known
        self.number = machine.new_number()
        self.known.over[self.number] = 1
        self.fence = 0
        self.products, self.stores = Queue(machine), Queue(machine)
        self.may_go: Callable[[], bool] = lambda: True
        self.waits_at = ""
        self.turn = threading.Semaphore(0)
        self.body = body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        if not self.machine.failed:
            try:
                with torch.no_grad():
                    self.body()
                assert not self.products.running, "a role ends with products that it did not wait for"
                assert not self.stores.running, "a role ends with stores that may still read its shared memory"
                _join(self.machine.ended, self.known.over)
            except BaseException as error:
                self.machine.failed = self.machine.failed or error
        self.machine.leave(self)

    def step(self) -> None:
        """Advance the clock: later events are not covered by the knowledge that was passed on so far."""
        self.known.over[self.number] += 1

    def access(self, *, writes: bool) -> Access:
        return Access(self.number, self.known.over[self.number], _where(), stored=writes, used=writes)


@dataclass
class Program:
    number: int
    barriers: dict[int, HardwareBarrier] = field(default_factory=dict)


class Machine:
    """All programs of one launch, and the scheduler of their roles."""

    def __init__(self, programs: int, seed: int):
        self.draw = random.Random(seed)
        self.numbers = 0
        self.programs = programs
        self.failed: BaseException | None = None
        self.over = threading.Semaphore(0)
        self.roles: list[Role] = []
        self.places: list[Place] = []
        self.ended: Clock = {}

    def run(self, body: Callable[[], None]) -> None:
        """Run `body` in every program, and the roles that it starts."""
        for number in range(self.programs):
            self.add(Program(number), 4, Known(), body)
        self.current = self._choose()
        self.current.turn.release()
        self.over.acquire()
        if self.failed:
            raise self.failed
        for place in self.places:
            if place.write and not place.write.before(self.ended):
                raise Race(f"{place.name}: nobody waits for what {place.write.where} writes")

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def add(self, program: Program, warps: int, known: Known, body: Callable[[], None]) -> None:
        self.roles.append(Role(self, program, warps, known, body))

    def _choose(self) -> Role:
        ready = self.roles if self.failed else [role for role in self.roles if role.may_go()]
        if not ready:
            waits = "\n".join(f"program {role.program.number}: {role.waits_at}" for role in self.roles)
            self.failed = Deadlock(f"nobody can go on:\n{waits}")
            ready = self.roles
        return self.draw.choice(ready)

    def leave(self, role: Role) -> None:
        self.roles.remove(role)
        if not self.roles:
            self.over.release()
            return
        self.current = self._choose()
        self.current.turn.release()

    def wait(self, may_go: Callable[[], bool] = lambda: True) -> None:
        """Let other threads run, at least until `may_go` returns True."""
        role = self.current
        role.may_go, role.waits_at = may_go, _where()
        self.current = self._choose()
        if self.current is not role:
            self.current.turn.release()
            role.turn.acquire()
        if self.failed:
            raise SystemExit
        role.may_go = lambda: True


_machine: Machine | None = None


def _role() -> Role:
    assert _machine is not None
    return _machine.current


def _where() -> str:
    """Return the current line of the kernel, and the line that called its function."""
    frame = sys._getframe(1)
    lines = []
    while frame is not None and len(lines) < 2:
        if frame.f_code.co_filename != __file__:
            lines.append(f"{frame.f_code.co_name} (line {frame.f_lineno})")
        elif lines:
            break
        frame = frame.f_back
    return " of ".join(lines)


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
        made_of = self._one().read(_role().access(writes=False), _role().known, False)
        return Tile(self.data.clone(), made_of)

    def store(self, tile: Tile) -> None:
        assert tile.data.dtype == self.data.dtype
        assert tile.data.shape == self.data.shape
        whole = self.data.numel() == self.size
        self._one().overwrite(_role().access(writes=True), _role().known, tile.reads, whole)
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
        self.all = [Barrier(f"{name} {i}", _role().machine.new_number()) for i in range(count)]

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
        assert self.product is None, f"{_where()} uses a product that it did not wait for"
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
        assert not outside.any(), f"{_where()} leaves the tensor, of {len(self.memory)} elements"
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
    name = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split("=")[0].strip()
    if layout == "barriers":
        return Barriers(name, shape[0])
    data = torch.full(shape, float("nan") if dtype.is_floating() else -(2**31), dtype=_TORCH[dtype])
    places = [Place(f"{name} {i}") for i in range(shape[0])]
    _role().machine.places += places
    return Shared(data, places)


def _warp_specialize(roles: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    assert len(roles) == len(warps) + 1 == len(registers) + 1
    role = _role()
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
    _role().machine.wait()
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
    num_programs=lambda axis: Tile(torch.tensor(_role().machine.programs, dtype=torch.int32)),
    num_warps=lambda: _role().warps,
    program_id=lambda axis: Tile(torch.tensor(_role().program.number, dtype=torch.int32)),
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
    _barrier(barrier).arrive(_role().known, count, 0)
    _role().step()
    _role().machine.wait()


def _expect(barrier: Barrier | Barriers, count: int) -> None:
    _barrier(barrier).arrive(_role().known, 1, count)
    _role().step()


def _wait(barrier: Barrier | Barriers, phase: Any, pred: Any = True) -> None:
    barrier, phase, role = _barrier(barrier), int(phase), _role()
    assert phase in (0, 1)
    if pred:
        role.machine.wait(lambda: barrier.phases & 1 != phase)
        role.known.join(barrier.passed(role.known, phase))


def _hardware(number: Any) -> HardwareBarrier:
    return _role().program.barriers.setdefault(int(number), HardwareBarrier(int(number)))


def _named_barrier_arrive(number: Any, threads: int) -> None:
    _hardware(number).arrive(_role(), threads)
    _role().step()
    _role().machine.wait()


def _named_barrier_sync(number: Any, threads: int) -> None:
    role, barrier = _role(), _hardware(number)
    generation = barrier.generation
    barrier.arrive(role, threads)
    role.step()
    role.machine.wait(lambda: barrier.generation > generation)
    assert barrier.generation == generation + 1, f"{_where()}: others went on without this role"
    role.known.join(barrier.gathered)


def _fence_async_shared() -> None:
    role = _role()
    role.fence = role.known.over[role.number]
    role.step()
    if role.warps == 1:
        _group_barrier()


def _group_barrier() -> None:
    """Barrier of all warps of the role: their fences have happened."""
    role = _role()
    role.known.fenced[role.number] = role.fence


def _tma_load(descriptor: Descriptor, coordinates: list[Any], barrier: Barrier | Barriers, to: Shared) -> None:
    barrier = _barrier(barrier)
    barrier.check(_role().known)
    operation = Operation(barrier.number, barrier.phases + 1)
    tile = torch.zeros(descriptor.block_shape, dtype=_TORCH[descriptor.dtype])
    inside, place = descriptor.tile(coordinates)
    tile[place] = inside
    to.written_by(operation, tile)
    barrier.receive(operation.end(), tile.numel() * tile.element_size())


def _tma_store(descriptor: Descriptor, coordinates: list[Any], source: Shared, add: bool = False) -> None:
    operation = _role().stores.start()
    inside, place = descriptor.tile(coordinates)
    data, made_of = source.read_by(operation)
    tile = Tile(data, made_of).used().reshape(descriptor.block_shape)[place]
    inside.copy_(inside + tile if add else tile)


def _tma_store_wait(count: int) -> None:
    _role().stores.wait(count)


def _warpgroup_mma(a: Any, b: Shared, acc: Tile, *, use_acc: Any = True, is_async: bool = False) -> Tile:
    assert is_async
    role = _role()
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
    products = _role().products
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
    _role().machine.wait(lambda: bool(_load(counter).data >= int(count)))


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
_ON_THE_HOST = {"TensorDescriptor", "device_enum", "gluon", "import_failure", "unavailable_reason"}
assert _SHIM.keys() | _ON_THE_HOST == set(gluon.__all__)


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
    launch = Launch.__call__

    def run(self: Launch, *tensors: Tensor | None) -> None:
        if not isinstance(self.kernel, GluonJITFunction):
            launch(self, *tensors)
            return
        global _machine
        constants = dict(self.constants)
        assert constants.pop("num_warps") == 4
        ran.append(self.kernel.fn.__name__)
        function = _as_python(self.kernel)
        described = map(with_memory, self.descriptors, tensors)
        arguments = (*described, *tensors[len(self.descriptors) :], *self.scalars)
        _machine = Machine(self.programs, seed)
        try:
            _machine.run(lambda: function(*map(_argument, arguments), **constants))
        finally:
            _machine = None

    try:
        Launch.__call__ = run  # type: ignore[method-assign]
        yield ran
    finally:
        Launch.__call__ = launch  # type: ignore[method-assign]
