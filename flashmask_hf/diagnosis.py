"""The diagnosis that `python -m flashmask_hf` prints: versions, GPU, registration, implementations and a self-test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import textwrap
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import collect_env

import flashmask_hf
from flashmask_hf import masks, register, torch_internals
from flashmask_hf._call.implementations import choose
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK, NAMES

__all__ = ["diagnose"]

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
    for line in (*_versions(), *_gpu(device)):
        print(line)
    lines, healthy = _registration()
    for line in (*lines, *_implementations(device)):
        print(line)
    if self_test:
        for line, passed in _self_test(device):
            print(line, flush=True)
            healthy = healthy and passed
    return healthy


def _versions() -> list[str]:
    """Return a line for each package."""
    versions = {"flashmask-hf": flashmask_hf.__version__, "Python": platform.python_version()}
    versions["torch"] = str(torch.__version__)
    versions["triton"] = "not installed"
    if torch_internals.HAS_TRITON:
        import triton

        versions["triton"] = triton.__version__
    for name in ("transformers", "trl", "peft", "accelerate", "datasets"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return [*(f"{name:<14}{version}" for name, version in versions.items()), *_entry("platform", platform.platform())]


def _gpu(device: torch.device) -> list[str]:
    """Return lines about the GPU that torch uses, or about its absence."""
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU only"
    if device.type != "cuda":
        return _entry("GPU", f"no GPU (torch is built for {build})")
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", None)
    driver = None if hip else collect_env.get_nvidia_driver_version(collect_env.run)
    facts = [
        f"{properties.name} ({device.index + 1} of {torch.cuda.device_count()})",
        f"compute capability {properties.major}.{properties.minor}",
        f"{properties.total_memory / 2**30:.0f} GiB",
        "shared memory per block unknown" if shared is None else f"shared memory per block {shared} bytes",
        *([] if driver is None else [f"driver {driver}"]),
        f"torch built for {build}",
    ]
    return _entry("GPU", ", ".join(facts))


def _registration() -> tuple[list[str], bool]:
    """Register with transformers; return lines about it, and False if it does not know every name."""
    if importlib.util.find_spec("transformers") is None:
        text = "transformers is not installed: attention alone; pip install 'flashmask-hf[train]' brings it"
        return _entry("backend", text), True
    try:
        register()
    except (ImportError, RuntimeError) as error:
        return _entry("backend", f'transformers does not know "{FLASHMASK}": {error}'), False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils import generic

    known = apart = False
    for name in reversed(NAMES):
        known = name in AttentionInterface() and name in AttentionMaskInterface()
        apart = not generic.is_flash_attention_requested(requested_attention_implementation=name)
        if not (known and apart):
            break
    text = (
        f'transformers {"knows" if known else "does not know"} "{name}" and '
        f"{'tells it apart from' if apart else 'mistakes it for'} FlashAttention"
    )
    return _entry("backend", text), known and apart


def _implementations(device: torch.device) -> list[str]:
    """Return a table of implementations by dtype and head_dim, with notes."""
    choices = {(dtype, n): choose(device, dtype, n, n) for dtype in _DTYPES for n in _HEAD_DIMS}
    served = {choice.impl for choice in choices.values()}
    best = next((impl for impl in ("hopper", "triton") if impl in served), None)
    reasons: list[str] = []

    def cell(dtype: torch.dtype, n: int) -> str:
        choice = choices[dtype, n]
        if best is not None and choice.impl == best:
            return best
        reason = choice.reason.replace(f"head_dim {n} with values of {n} ", "this head_dim ")
        if reason not in reasons:
            reasons.append(reason)
        return f"{choice.impl or 'raises'} [{reasons.index(reason) + 1}]"

    rows = [("head_dim", *_HEAD_DIMS), *((_short(dtype), *(cell(dtype, n) for n in _HEAD_DIMS)) for dtype in _DTYPES)]
    lines = [(f"{first:<14}" + "".join(f"{x:<12}" for x in others)).rstrip() for first, *others in rows]
    return [*lines, *(line for n, reason in enumerate(reasons, 1) for line in _entry("", f"[{n}] {reason}"))]


def _self_test(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Yield lines to print, each with False if it reports a failure."""
    yield f"self-test on {device.type} against float64: largest error relative to the largest value", True
    if device.type == "cuda":
        yield "(the time below includes compiling kernels that are not in Triton's cache yet)", True
    start = time.perf_counter()
    cases = {
        "packed documents": masks.causal_document([40, 163, 97], device=device),
        "shared question": masks.share_question([(90, [60, 45]), (50, [30, 25])], device=device),
    }
    failed = 0
    for dtype in _TESTED_DTYPES:
        for case, mask in cases.items():
            impl = choose(device, dtype, 64, 64).impl
            try:
                result, passed = _compare(mask, dtype)
            except Exception as error:  # whatever a broken installation raises belongs in the report
                result, passed = f"{type(error).__name__}: {error}", False
            failed += not passed
            line = f"{impl}, {_short(dtype)}, {case}: {'ok' if passed else 'FAILED'}, {result}"
            yield textwrap.shorten(line, _WIDTH, placeholder=" ..."), passed
    seconds = time.perf_counter() - start
    yield f"self-test: {f'FAILED {failed} of {2 * len(cases)}' if failed else 'ok'}, {seconds:.1f} s", not failed


def _compare(mask: FlashMask, dtype: torch.dtype) -> tuple[str, bool]:
    """Return the default implementation's relative errors, and whether they fit the tests' error budget.

    The budget is twice the error of eager code in the same dtype, plus rounding.
    """
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
    """Return the output and the gradients of q, k and v for the output's gradient `dout`."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flashmask_attention(q, k, v, mask, impl=impl)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def _entry(name: str, text: str) -> list[str]:
    """Return the wrapped lines of a text behind its name."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{name:<14}", subsequent_indent=" " * 14)
