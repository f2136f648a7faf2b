"""Launches that go past Triton's search for a compiled kernel, which takes longer than the rest of a short call.

At each launch Triton finds out anew, in Python, which of a kernel's compiled forms fits the arguments. A `Launcher`
keeps what such a launch returns, and launches it when arguments come that Triton would treat alike. To see that it
looks at each of them. A `Bound` launch looks at tensors only, of which it takes layouts for granted, and goes past
Triton's own launcher, too, if `direct` can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from flashmask_hf.kernels.descriptors import Part, described
from flashmask_hf.kernels.direct import direct

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

    def bind(
        self,
        programs: int,
        *scalars: Any,
        tiles: Sequence[Any] = (),
        parts: Mapping[str, Part] | None = None,
        **constants: Any,
    ) -> Bound:
        """Launches of tensors of one layout.

        Args:
            programs: how many.
            scalars: the arguments behind the tensors.
            tiles: templates of the descriptors that the kernel takes for the first tensors, see `described`.
            parts: tensors, by their names, for which the memory is given that they lie in.
            constants: as in a launch.
        """
        return Bound(self, programs, scalars, tiles, parts or {}, constants)

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

    def __init__(
        self,
        launcher: Launcher,
        programs: int,
        scalars: tuple[Any, ...],
        tiles: Sequence[Any],
        parts: Mapping[str, Part],
        constants: dict[str, Any],
    ):
        self.launcher = launcher
        self.programs = programs
        self.scalars = scalars
        self.tiles = tiles
        self.parts = {launcher.kernel.arg_names.index(name): part for name, part in parts.items()}
        self.constants = constants
        self._known: dict[tuple[Any, ...], _Form] = {}

    def launch(self, *memory: Tensor | None) -> None:
        """Launch with tensors of the same layouts at every call, or their memory, and Nones in the same places.

        On the current stream of their device. What went past Triton's launcher last takes the place of this method, and
        comes back to it where it cannot do that again.
        """
        with torch.cuda.device_of(next(x for x in memory if x is not None)):
            self._launch_there(memory)

    def _launch_there(self, memory: Sequence[Tensor | None]) -> None:
        launcher = self.launcher
        tensors = self._tensors(memory)
        given = [x for x in tensors if x is not None]
        # Triton may have compiled for addresses that are multiples of 16.
        aligned = reduce(or_, [x.data_ptr() for x in given]) % 16 == 0
        if not aligned or not launcher.may_cache or launcher.kernel.pre_run_hooks or _watched():
            self._launch_anew(tensors)
            return
        active: Any = driver.active
        device = active.get_current_device()
        there = [x.is_cuda for x in given]
        form = (device, *[x.dtype for x in given], *there)
        known = self._known.get(form)
        if known is None:
            self._launch_anew(tensors)
            found = launcher.compiled(device, self._arguments(tensors), self.constants)
            if found is not None:
                compiled, constant = found
                self._known[form] = _Form(compiled, (*self.scalars, *constant))
            return
        arguments = [*self._operands(tensors), *known.others]
        if not known.settled:  # only now, for layouts may be there once
            known.settled = True
            if all(there):  # Triton's launcher sees to it that the GPU can read other memory
                starts = [self.parts[i].start if i in self.parts else 0 for i in range(len(memory))]
                otherwise = partial(Bound.launch, self)
                known.own = direct(
                    known.compiled, self.programs, arguments, memory, starts, _switches(launcher.kernel), otherwise
                )
        if known.own is not None:
            vars(self)["launch"] = known.own
            if known.own.attempt(*memory):  # on this device, which may not be the one that was current
                return
        known.compiled[(self.programs, 1, 1)](*arguments, stream=active.get_current_stream(device))

    def launch_anew(self, *memory: Tensor | None) -> None:
        """Launch by way of the launcher."""
        self._launch_anew(self._tensors(memory))

    def _launch_anew(self, tensors: Sequence[Tensor | None]) -> None:
        self.launcher(self.programs, *self._arguments(tensors), **self.constants)

    def _tensors(self, memory: Sequence[Tensor | None]) -> list[Tensor | None]:
        parts = self.parts
        return [parts[i].of(x) if i in parts and x is not None else x for i, x in enumerate(memory)]

    def _arguments(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return *self._operands(tensors), *self.scalars

    def _operands(self, tensors: Sequence[Any]) -> list[Any]:
        described_too = len(self.tiles)
        return [*map(described, self.tiles, tensors), *tensors[described_too:]]


@dataclass(slots=True)
class _Form:
    """What launches of some dtypes on some device have in common."""

    compiled: Any
    """What Triton returned."""
    others: tuple[Any, ...]
    """The arguments behind the tensors."""
    settled: bool = False
    """Whether `own` is what it will be."""
    own: Any = None
    """Launches past Triton's launcher, where it can be gone past; see `direct`."""


def _key(device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    return (device, *constants.items(), *map(type, constants.values()), *map(_kind, arguments))


def _watched() -> bool:
    """Whether Triton is told to debug or to change what it compiles."""
    return bool(
        knobs.runtime.debug
        or knobs.runtime.add_stages_inspection_hook is not None
        or knobs.compilation.instrumentation_mode
    )


def _switches(kernel: Any) -> list[tuple[Any, str]]:
    """Where Triton is told to do more at launches than to launch, as its profiler has it; see `direct`."""
    runtime = knobs.runtime
    hooks = ("launch_enter_hook", "launch_exit_hook")
    return [
        *[(runtime, name) for name in ("debug", "add_stages_inspection_hook", *hooks)],
        *[(getattr(type(runtime), name), "calls") for name in hooks],  # chains, unless the knobs have their own
        (knobs.compilation, "instrumentation_mode"),
        (kernel, "pre_run_hooks"),
    ]


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
