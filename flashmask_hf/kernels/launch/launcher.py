"""Prepared launches: a kernel with everything bound but its tensors.

`kernel[grid](...)` chooses the compiled form in Python at every launch. Tensors of the same layouts always take the
same form, so a `Launch` asks Triton once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from flashmask_hf import torch_internals


def _observed() -> bool:
    """Return whether Triton has launch hooks, as profilers set them."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


class Launch:
    """Kernel whose grid, scalars and compile-time constants are bound; call it with its tensors.

    In every call, the same tensors are None, and the others have the same layouts.

    Args:
        kernel: a function under `triton.jit` or `gluon.jit`, whose parameters are tensors, scalars and constants.
        programs: size of the grid, which has one axis.
        scalars: the arguments after the tensors.
        descriptors: templates of `descriptors.template` for the first tensors, which no other launch may share.
        constants: compile-time constants and Triton's options, such as `num_warps`.
    """

    def __init__(self, kernel: Any, programs: int, *scalars: Any, descriptors: Sequence[Any] = (), **constants: Any):
        self.kernel = kernel
        self.programs = programs
        self.scalars = scalars
        self.descriptors = tuple(descriptors)
        assert len(set(map(id, descriptors))) == len(descriptors), "each tensor needs a descriptor of its own"
        self.constants = constants
        # For AMD GPUs, Triton also specializes for the sizes of storages.
        self._reusable = not torch.version.hip
        self._free = threading.Lock()  # guards the descriptors
        self._compiled: Any = None
        self._head: tuple[Any, ...] = ()  # arguments between the stream and the tensors
        self._tail: tuple[Any, ...] = ()  # arguments after the tensors: scalars and constants

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the current device."""
        descriptors = self.descriptors
        if not descriptors:
            self._launch(tensors)
            return
        free = self._free.acquire(blocking=False)
        if not free:  # another thread, a launch hook or a signal handler launches
            descriptors = tuple(map(copy.copy, descriptors))
        try:
            for descriptor, x in zip(descriptors, tensors, strict=False):
                descriptor.base = x
            self._launch((*descriptors, *tensors[len(descriptors) :]))
        finally:
            if free:
                for descriptor in descriptors:
                    descriptor.base = None  # else the memory would live until the next launch
                self._free.release()

    def _launch(self, arguments: tuple[Any, ...]) -> None:
        compiled = self._compiled
        if compiled is not None and not _observed():
            stream = torch_internals.current_stream(torch_internals.current_gpu())
            compiled.run(self.programs, 1, 1, stream, *self._head, *arguments, *self._tail)
            return
        compiled = self.kernel[(self.programs,)](*arguments, *self.scalars, **self.constants)
        if self._reusable and compiled is not None:  # None in Triton's interpreter, or where a hook stopped it
            metadata_and_hooks = None, None, None
            self._head = compiled.function, compiled.packed_metadata, *metadata_and_hooks
            names = self.kernel.arg_names[len(arguments) + len(self.scalars) :]
            self._tail = *self.scalars, *(self.constants[name] for name in names)
            self._compiled = compiled
