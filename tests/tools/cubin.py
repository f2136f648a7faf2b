"""Compile kernels for a GPU that is not here instead of launching them, and read what the assembler made of them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flashmask_hf.kernels.portable import backward, forward

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)
BLACKWELL = GPUTarget("cuda", 100, 32)
MI300 = GPUTarget("hip", "gfx942", 64)

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclass
class Kernel:
    """A compiled kernel: its assembly, bytes of shared memory and, on NVIDIA, bytes of local memory (spills)."""

    name: str
    assembly: str
    shared: int
    spills: int | None
    cubin: bytes = b""

    def instructions(self) -> list[tuple[int, str]]:
        """Return the machine instructions of a kernel for NVIDIA, with their addresses."""
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) *;", _cuobjdump("-sass", self.cubin))
        return [(int(address, 16), instruction) for address, instruction in found]

    def spills_beside_products(self) -> int:
        """Return how many instructions spill registers, or load them again, in the innermost loops with products.

        Loops end with a branch under a predicate. Others lead back from blocks in which warps wait, out of their line.
        """
        instructions = self.instructions()
        branches = [(at, re.match(r"@!?U?P\d+ BRA\b.* 0x([0-9a-f]+)", x)) for at, x in instructions]
        loops = [(int(match[1], 16), at) for at, match in branches if match and int(match[1], 16) < at]
        products = [at for at, x in instructions if "HGMMA" in x]
        loops = [(a, b) for a, b in loops if any(a <= at <= b for at in products)]
        innermost = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
        assert innermost, f"no loop with products was found in {self.name}"
        spills = [at for at, x in instructions if re.search(r"\b(LDL|STL)\b", x)]
        return sum(any(a <= at <= b for a, b in innermost) for at in spills)

    def serializes_products(self) -> bool:
        """Return whether the assembler made every product of warpgroups wait for the one before."""
        instructions = self.instructions()
        waits, products = (sum(name in x for _, x in instructions) for name in ("WARPGROUP.DEPBAR", "HGMMA"))
        return waits >= products

    def reused_barriers(self) -> list[int]:
        """Return the addresses in shared memory at which an mbarrier is made and other data is stored or loaded, too.

        That is undefined without `mbarrier.inval` (PTX ISA, mbarrier.inval), which Triton leaves out. Only addresses
        that are constant offsets are found; where a tensor lies, its addresses depend on the thread.
        """
        sums = {x: int(y) for x, y in re.findall(r"add\.s32 \s*(%r\d+), %r\d+, (\d+);", self.assembly)}
        made = [sums.get(x, -1) for x in re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\]", self.assembly)]
        assert made, f"no barriers were found in {self.name}"
        assert min(made) >= 0, f"the address of a barrier was not found in {self.name}"
        sums["global_smem"] = 0
        access = r"\b(?:ld|st)\.shared\.\S+\s[^;\[]*\[ ?(global_smem|%r\d+) ?(?:\+ ?(\d+))? ?\]"
        data = {sums[x] + int(y or 0) for x, y in re.findall(access, self.assembly) if x in sums}
        return sorted(at for at in made if any(at <= x < at + 8 for x in data))


class _Driver:
    """A driver that knows enough for Triton to compile, and cannot launch."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def compile_only(target: GPUTarget = HOPPER, *, tma: bool | None = None) -> Iterator[list[Kernel]]:
    """Compile kernels for `target` where code inside would launch them; the list fills with the compiled kernels.

    Args:
        target: the GPU.
        tma: whether the portable kernels load through tensor descriptors; None is as the GPU has it.
    """
    compiled: list[Kernel] = []
    modules = (forward, backward)
    if tma is None:
        tma = target.backend == "cuda" and target.arch >= 90
    launch, active = JITFunction.__getitem__, driver._active
    loads_by_descriptor = [module.loads_by_descriptor for module in modules]

    def compile_instead(function: JITFunction, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            function.device_caches.clear()
            kernel = function.run(*args, grid=grid, warmup=True, **kwargs)
            compiled.append(_inspect(kernel, target))

        return run

    try:
        JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign]
        driver.set_active(_Driver(target))  # type: ignore[arg-type]
        for module in modules:
            module.loads_by_descriptor = lambda *layouts: tma
        yield compiled
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
        driver._active = active
        for module, function in zip(modules, loads_by_descriptor, strict=True):
            module.loads_by_descriptor = function


def _inspect(kernel: Any, target: GPUTarget) -> Kernel:
    name, shared = kernel.metadata.name, kernel.metadata.shared
    if target.backend == "hip":
        return Kernel(name, kernel.asm["amdgcn"], shared, None)
    cubin = kernel.asm["cubin"]
    usage = _cuobjdump("-res-usage", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert match, usage
    _, stack, _, local = map(int, match.groups())
    return Kernel(name, kernel.asm["ptx"], shared, stack + local, cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
