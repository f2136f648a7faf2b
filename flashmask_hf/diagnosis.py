"""The diagnosis that `python -m flashmask_hf` prints."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import platform
import textwrap
import time

import torch
from torch import Tensor
from torch.utils import collect_env

import flashmask_hf
from flashmask_hf import masks, register, torch_internals
from flashmask_hf._call.implementations import Request, choose
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK

_WIDTH = 100
"""Columns of the printed text."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HEAD_DIMS = (40, 64, 96, 128, 192, 256, 512)
_TESTED_DTYPES = (torch.bfloat16, torch.float32)
_TESTED_LENGTH = 300
"""Tokens of the self-test: two tiles of the mask's plan and a ragged third."""


def diagnose(self_test: bool = True) -> bool:
    """Print the diagnosis of this process.

    Args:
        self_test: also compare attention and its gradients with the float64 reference.

    Returns:
        True if an installed transformers knows the backend and a requested self-test passed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _print_versions()
    _print_gpu(device)
    healthy = _print_registration()
    _print_implementations(device)
    return (_run_self_test(device) and healthy) if self_test else healthy


def _print(name: str, text: str) -> None:
    print(textwrap.fill(text, _WIDTH, initial_indent=f"{name:<14}", subsequent_indent=" " * 14))


def _print_versions() -> None:
    _print("flashmask-hf", flashmask_hf.__version__)
    _print("Python", platform.python_version())
    triton = importlib.import_module("triton").__version__ if torch_internals.HAS_TRITON else "not installed"
    _print("triton", triton)  # which may be distributed under another name
    _print("torch", torch.__version__)  # with its build, which the distribution's version may lack
    for name in ("transformers", "trl", "peft", "accelerate", "datasets"):
        try:
            _print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            _print(name, "not installed")
    _print("platform", platform.platform())


def _print_gpu(device: torch.device) -> None:
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU only"
    if device.type != "cuda":
        return _print("GPU", f"no GPU (torch is built for {build})")
    driver = "" if hip else f", driver {collect_env.get_nvidia_driver_version(collect_env.run)}"
    place = f"{device.index + 1} of {torch.cuda.device_count()}"
    return _print("GPU", f"{torch.cuda.get_device_properties(device)}, {place}{driver}, torch built for {build}")


def _print_registration() -> bool:
    """Register with an installed transformers, print the result, and return whether that succeeded."""
    if importlib.util.find_spec("transformers") is None:
        _print("backend", "transformers is not installed: attention alone; pip install 'flashmask-hf[train]' brings it")
        return True
    try:
        register()
    except (ImportError, RuntimeError) as error:
        _print("backend", f'transformers does not know "{FLASHMASK}": {error}')
        return False
    _print("backend", f'transformers knows "{FLASHMASK}"')
    return True


def _print_implementations(device: torch.device) -> None:
    notes: dict[str, str] = {}
    print((f"{'head_dim':<14}" + "".join(f"{n:<12}" for n in _HEAD_DIMS)).rstrip())
    for dtype in _DTYPES:
        line = f"{_short(dtype):<14}"
        for n in _HEAD_DIMS:
            choice = choose(Request(device, dtype, n, n))
            reason = choice.reason.replace(f"head_dim {n} with values of {n} ", "this head_dim ")
            note = "" if choice.impl == "hopper" else notes.setdefault(reason, f"[{len(notes) + 1}]")
            line += f"{choice.impl or 'raises'} {note}".ljust(12)
        print(line.rstrip())
    for reason, note in notes.items():
        _print("", f"{note} {reason}")


def _run_self_test(device: torch.device) -> bool:
    """Compare results with the float64 reference, print the errors, and return whether they fit."""
    print(f"self-test on {device.type} against float64: largest error relative to the largest value")
    if device.type == "cuda":
        print("(the time below includes compiling kernels that are not in Triton's cache yet)")
    start, failed = time.perf_counter(), 0
    cases = {
        "packed documents": masks.causal_document([40, 163, 97], device=device),
        "shared question": masks.share_question([(90, [60, 45]), (50, [30, 25])], device=device),
    }
    for dtype, (case, mask) in itertools.product(_TESTED_DTYPES, cases.items()):
        try:
            result, passed = _compare(mask, dtype)
        except Exception as error:  # whatever a broken installation raises belongs in the report
            result, passed = f"{type(error).__name__}: {error}", False
        failed += not passed
        impl = choose(Request(device, dtype, 64, 64)).impl
        line = f"{impl}, {_short(dtype)}, {case}: {'ok' if passed else 'FAILED'}, {result}"
        print(textwrap.shorten(line, _WIDTH, placeholder=" ..."), flush=True)
    seconds = time.perf_counter() - start
    print(f"self-test: {f'FAILED {failed} of {2 * len(cases)}' if failed else 'ok'}, {seconds:.1f} s")
    return not failed


def _compare(mask: FlashMask, dtype: torch.dtype) -> tuple[str, bool]:
    """Return relative errors, and whether they are at most twice the error of eager code, plus rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, _TESTED_LENGTH, heads, 64, generator=generator).to(mask.device, dtype).transpose(1, 2)
        for heads in (4, 2, 2, 4)
    )
    actual = _results(q, k, v, dout, mask, None)
    eager = _results(q, k, v, dout, mask, "reference")
    exact = _results(q.double(), k.double(), v.double(), dout.double(), mask, "reference")
    rounding = torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    errors, passed = [], True
    for name, truth in exact.items():
        largest = truth.abs().max()
        error, allowed = ((x[name].double() - truth).abs().max() / largest for x in (actual, eager))
        errors.append(f"{name} {error:.1e}")
        passed = passed and bool(error <= 2 * allowed + rounding)  # False for NaN
    return ", ".join(errors), passed


def _results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: FlashMask, impl: str | None) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flashmask_attention(q, k, v, mask, impl=impl)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
