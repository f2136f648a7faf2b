"""What each call does before the GPU has something to do, in C (`native.c`): Python takes longer than the launches.

The module is compiled at its first use and kept, as Triton does with its own launcher. It tells calls apart
(`signature`), launches by the CUDA driver's own functions (`Launch`, which `direct.py` makes), and clears memory
without the dispatcher.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

from flashmask_hf import ops

__all__ = ["clear", "is_capturing", "native"]

logger = logging.getLogger(__name__)

_COMPARED = (3, 6), (3, 9)
"""Versions of Triton, the first and the last, whose launchers pass what `direct.parameters` tells."""
_FUNCTIONS = (
    "cuLaunchKernel", "cuTensorMapReplaceAddress", "cuMemsetD8Async", "cuStreamIsCapturing", "cuCtxGetCurrent",
)  # fmt: skip
"""The driver's functions that the module calls, in the order in which it takes them."""


@lru_cache(maxsize=1)
def native() -> Any:
    """The module, or None without NVIDIA's driver, with another Triton, and where it does not compile."""
    if torch.version.hip or not _COMPARED[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= _COMPARED[1]:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (AttributeError, OSError):  # an old driver, or none
        return None
    try:
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(Path(__file__).with_suffix(".c").read_text(), "flashmask_native")
        module.configure(Tensor.__dlpack_c_exchange_api__, Tensor, nn.Parameter, *addresses)
    except Exception as error:  # of the compiler
        reason = str(error).strip().split("\n")[0]
        logger.warning(f"launches go by Triton's launcher, which takes longer: {type(error).__name__}: {reason}")
        return None
    return module


def is_capturing(x: Tensor) -> bool:
    """As `ops.is_capturing`, of a tensor on a GPU."""
    module = native()
    found = None if module is None else module.capturing(x)
    return ops.is_capturing(x) if found is None else found


def clear(x: Tensor) -> Tensor:
    """Make a tensor zeros."""
    module = native() if x.is_cuda else None
    if module is not None:
        with torch.cuda.device_of(x):
            if module.clear(x):
                return x
    return x.zero_()
