"""Launches that go past Triton's search for a compiled kernel, which takes longer than the rest of a short call.

At each launch Triton finds out anew, in Python, which of a kernel's compiled forms fits the arguments. A `Launcher`
keeps what such a launch returns, and launches it directly when arguments come that Triton would treat alike. To see
that it looks at each of them; a `Bound` launch looks at the addresses and dtypes of tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

__all__ = ["Bound", "Launcher"]


class Launcher:
    """A kernel, to be launched as `launcher(programs, *arguments, **constants)` on the current device and stream.

    A kernel that only Triton's interpreter runs, one that is to be debugged, instrumented or hooked, and one for an AMD
    GPU, where Triton also looks at the sizes of tensors, are launched as Triton does it.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.may_cache = isinstance(kernel, JITFunction) and not torch.version.hip
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def bind(self, programs: int, *scalars: Any, **constants: Any) -> Bound:
        """Launches of tensors of one layout; `scalars` are the arguments behind them, `constants` as in a launch."""
        return Bound(self, programs, scalars, constants)

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch `programs` programs. `constants` are compile-time arguments and options of Triton's (`num_warps`)."""
        if not self.may_cache or self.kernel.pre_run_hooks or _watched():
            self.kernel[(programs,)](*arguments, **constants)
            return
        active: Any = driver.active
        device = active.get_current_device()
        key = _key(device, arguments, constants)
        known = self._compiled.get(key)
        if known is not None:
            compiled, constant = known
            stream = active.get_current_stream(device)
            compiled[(programs, 1, 1)](*arguments, *constant, stream=stream)
            return
        compiled = self.kernel[(programs,)](*arguments, **constants)
        if compiled is not None:  # a hook may keep Triton from compiling
            constant = [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
            self._compiled[key] = compiled, constant

    def compiled(self, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """What such a launch on a device keeps: what Triton returned, and the values of compile-time arguments."""
        return self._compiled.get(_key(device, arguments, constants))


class Bound:
    """Launches that differ in the memory of their tensors alone, made by `Launcher.bind`."""

    def __init__(self, launcher: Launcher, programs: int, scalars: tuple[Any, ...], constants: dict[str, Any]):
        self.launcher = launcher
        self.programs = programs
        self.scalars = scalars
        self.constants = constants
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch with tensors, descriptors and Nones, in the same places and of the same tiles at every call."""
        launcher = self.launcher
        addresses, dtypes = 0, []
        for x in tensors:
            if isinstance(x, Tensor):
                addresses |= x.data_ptr()
                dtypes.append(x.dtype)
        # Triton may have compiled for addresses that are multiples of 16.
        if not launcher.may_cache or addresses % 16 or launcher.kernel.pre_run_hooks or _told_since():
            self.launch_anew(*tensors)
            return
        active: Any = driver.active
        device = active.get_current_device()
        form = (device, *dtypes)
        known = self._known.get(form)
        if known is not None:
            run, others = known
            run(*tensors, *others, stream=active.get_current_stream(device))
            return
        self.launch_anew(*tensors)
        found = launcher.compiled(device, (*tensors, *self.scalars), self.constants)
        if found is not None:
            compiled, constant = found
            self._known[form] = compiled[(self.programs, 1, 1)], (*self.scalars, *constant)

    def launch_anew(self, *tensors: Any) -> None:
        """Launch by way of the launcher."""
        self.launcher(self.programs, *tensors, *self.scalars, **self.constants)


def _key(device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    return (device, *constants.items(), *map(type, constants.values()), *map(_kind, arguments))


def _watched() -> bool:
    """Whether Triton is told to debug or to change what it compiles."""
    return bool(
        knobs.runtime.debug
        or knobs.runtime.add_stages_inspection_hook is not None
        or knobs.compilation.instrumentation_mode
    )


def _told_since() -> bool:
    """`_watched`, without what the environment told at the first launch: reading it takes long."""
    return bool(
        vars(knobs.runtime).get("debug")
        or knobs.runtime.add_stages_inspection_hook is not None
        or vars(knobs.compilation).get("instrumentation_mode")
    )


def _kind(x: Any) -> Any:
    """What Triton may compile a kernel for, of one argument: nothing but this may differ between launches of a form.

    Of a tensor its dtype and whether it is aligned to 16 bytes; of an integer whether it is 1, a multiple of 16, and
    wider than 32 bits; of a descriptor the dtype and the tile, from which the launchers here derive its layout.
    """
    if type(x) is int:
        return x % 16 == 0 if 1 < x < 2**31 else (x,)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if x is None or isinstance(x, (bool, float)):
        return type(x)
    return x.base.dtype, *x.block_shape
