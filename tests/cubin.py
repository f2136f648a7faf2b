"""Compile what a launcher would run, for a GPU that is not here, and read what the assembler made of it."""

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

import flashmask_hf.kernels.backward
import flashmask_hf.kernels.forward
from flashmask_hf.kernels.direct import parameters
from flashmask_hf.kernels.launch import Bound, Launcher

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)
BLACKWELL = GPUTarget("cuda", 100, 32)
MI300 = GPUTarget("hip", "gfx942", 64)

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclass
class Kernel:
    """One compiled kernel: its assembly, bytes of shared memory and, on NVIDIA, bytes of local memory (spills)."""

    name: str
    assembly: str
    shared: int
    spills: int | None


class _Driver:
    """Answers what Triton asks of a driver to compile, and refuses to run."""

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
    """Launchers called inside compile for `target` instead of launching; the list fills with what they compiled."""
    compiled: list[Kernel] = []
    modules = (flashmask_hf.kernels.forward, flashmask_hf.kernels.backward)
    if tma is None:
        tma = target.backend == "cuda" and target.arch >= 90
    launch, active = JITFunction.__getitem__, driver._active
    relaunch, again = Launcher.__call__, Bound.launch
    describe = [module.can_describe for module in modules]

    def instead(function: JITFunction, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            function.device_caches.clear()
            kernel = function.run(*args, grid=grid, warmup=True, **kwargs)
            if target.backend == "cuda":
                _check_parameters(kernel, [*args, *(kwargs[name] for name in function.arg_names[len(args) :])])
            compiled.append(_inspect(kernel, target))

        return run

    try:
        JITFunction.__getitem__ = instead  # type: ignore[method-assign]
        Launcher.__call__ = lambda self, programs, *args, **kwargs: self.kernel[(programs,)](*args, **kwargs)
        Bound.launch = Bound.launch_anew  # type: ignore[method-assign]
        driver.set_active(_Driver(target))  # type: ignore[arg-type]
        for module in modules:
            module.can_describe = lambda *tensors: tma
        yield compiled
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
        Launcher.__call__ = relaunch
        Bound.launch = again
        driver._active = active
        for module, function in zip(modules, describe, strict=True):
            module.can_describe = function


def _check_parameters(kernel: Any, arguments: list[Any]) -> None:
    """What a launch past Triton passes to a kernel is what the assembler says that it takes."""
    entry = kernel.asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
    taken = []
    for bits, count in re.findall(r"\.param\s[^,)]*?\.[a-z](\d+)\s[^,)\[]*(?:\[(\d+)\])?", entry):
        taken.append(int(bits) // 8 * int(count or 1))
    assert len(taken) == entry.count(".param")
    packed = parameters(kernel, arguments)
    assert packed is not None
    assert [parameter.size for parameter in packed] == taken, entry


def _inspect(kernel: Any, target: GPUTarget) -> Kernel:
    name, shared = kernel.metadata.name, kernel.metadata.shared
    if target.backend == "hip":
        return Kernel(name, kernel.asm["amdgcn"], shared, None)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert match, usage
    _, stack, _, local = map(int, match.groups())
    return Kernel(name, kernel.asm["ptx"], shared, stack + local)
