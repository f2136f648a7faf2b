"""Liger's kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from liger_kernel.ops import rms_norm
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

from flashmask_hf import torch_internals

KERNELS = ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_swiglu_forward_kernel", "_triton_rope")
"""Kernels that a Llama with Liger runs in a step, besides others."""


def interpret_liger(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Make Liger's kernels for a Llama run in the interpreter, and undo what Liger changes in transformers afterwards.

    The interpreter leaves a kernel's floats plain numbers, which have no method `to`, and functions of libdevice
    return None in it.

    Returns:
        the most programs in a launch, by the name of each kernel that ran.
    """
    programs: dict[str, int] = {}
    convert, execute = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def convert_floats(arg: Any) -> Any:
        if type(arg) is float:
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("liger_kernel."):
            programs[self.fn.__name__] = max(self.grid[0], programs.get(self.fn.__name__, 0))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(interpreter, "_implicit_cvt", convert_floats)
                return execute(self, *args, **kwargs)
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    monkeypatch.setattr(torch_internals, "_INTERPRETED", False)  # attention by impl="torch", which takes less time
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    return programs
