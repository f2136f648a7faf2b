"""Detector of data races and deadlocks among the roles of a kernel, which run as threads on a CPU.

All programs of a launch exist at the same time, and each role of a program is a thread. One thread runs at a time.
Wherever a thread may have to wait, another one, drawn from the seed, continues.

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
barriers; parts of a stage of shared memory, which is one place; the allocation of hardware barriers; the order of
accesses to global memory, except through the results.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = [
    "RUNTIME_FILES",
    "Access",
    "Barrier",
    "Deadlock",
    "HardwareBarrier",
    "Known",
    "Machine",
    "Operation",
    "Place",
    "Race",
    "current_role",
    "where_in_kernel",
]

RUNTIME_FILES = {__file__}
"""Files whose lines are not lines of a kernel."""


class Race(AssertionError):
    """Two conflicting accesses to one place, neither of which is known to happen before the other."""


class Deadlock(AssertionError):
    """No thread can continue."""


Clock = dict[int, int]
"""Vector clock: for each thread or operation, the number of its events that are known to have happened."""


def join_clocks(clock: Clock, other: Clock) -> None:
    for who, count in other.items():
        if clock.get(who, 0) < count:
            clock[who] = count


@dataclass
class Known:
    """Vector clocks of the events that happened, and of the stores that a fence made visible to asynchronous reads."""

    over: Clock = field(default_factory=dict)
    fenced: Clock = field(default_factory=dict)

    def join(self, other: Known) -> None:
        join_clocks(self.over, other.over)
        join_clocks(self.fenced, other.fenced)

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
            raise Race(f"{self.doubt}; what is made of it is used in {where_in_kernel()}")
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
        role = current_role()
        self.who, self.count, self.known = who, count, role.known.copy()
        role.step()

    def access(self, *, writes: bool) -> Access:
        return Access(self.who, self.count, where_in_kernel(), used=writes)

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
            current_role().known.join(self.running.pop(0).end())


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
            raise Race(f"{self.name}: {where_in_kernel()} arrives while the phase before may not be over")

    def arrive(self, known: Known, count: int, expected: int) -> None:
        self.check(known)
        assert self.left >= count, f"{self.name}: more arrive than the barrier counts ({where_in_kernel()})"
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
        where = f"hardware barrier {self.number}, {where_in_kernel()}"
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
                join_clocks(self.machine.ended, self.known.over)
            except BaseException as error:
                self.machine.failed = self.machine.failed or error
        self.machine.leave(self)

    def step(self) -> None:
        """Advance the clock: later events are not covered by the knowledge that was passed on so far."""
        self.known.over[self.number] += 1

    def access(self, *, writes: bool) -> Access:
        return Access(self.number, self.known.over[self.number], where_in_kernel(), stored=writes, used=writes)


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
        global _machine
        _machine = self
        try:
            for number in range(self.programs):
                self.add(Program(number), 4, Known(), body)
            self.current = self._choose()
            self.current.turn.release()
            self.over.acquire()
        finally:
            _machine = None
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
        role.may_go, role.waits_at = may_go, where_in_kernel()
        self.current = self._choose()
        if self.current is not role:
            self.current.turn.release()
            role.turn.acquire()
        if self.failed:
            raise SystemExit
        role.may_go = lambda: True


_machine: Machine | None = None
"""The machine that runs now."""


def current_role() -> Role:
    """Return the role whose thread runs now."""
    assert _machine is not None
    return _machine.current


def where_in_kernel() -> str:
    """Return the current line of the kernel, and the line that called its function."""
    frame = sys._getframe(1)
    lines = []
    while frame is not None and len(lines) < 2:
        if frame.f_code.co_filename not in RUNTIME_FILES:
            lines.append(f"{frame.f_code.co_name} (line {frame.f_lineno})")
        elif lines:
            break
        frame = frame.f_back
    return " of ".join(lines)
