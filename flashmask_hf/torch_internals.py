"""Every private call of torch, and the state of torch and Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it when kernels are defined


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: a GPU, or any device in Triton's interpreter."""
    return HAS_TRITON and (device.type == "cuda" or _INTERPRETED)


def is_intercepted(*tensors: Tensor | None) -> bool:
    """Return whether the dispatcher must see a call, as under compilers, modes, profilers and `torch.func`."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    ):
        return True
    return not is_plain(*tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether tensors have memory and are no subclass, functorch wrapper or lazy negation."""
    try:
        for x in tensors:
            if x is None:
                continue
            if not (type(x) is Tensor or type(x) is torch.nn.Parameter) or x.is_neg():
                return False
            # Meta tensors, freed ones, and zeros that autograd has not written begin at address 0.
            if x.data_ptr() == x.storage_offset() * x.itemsize:
                return False
    except RuntimeError:  # batched tensors and `torch.func` wrappers have no memory
        return False
    return True


def call_state(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Any, ...]:
    """Return the layouts of tensors and modes of torch that checks and launches depend on."""
    device = q.device.type
    return (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16,
        v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16,
        indices.shape, indices.stride(), indices.dtype, indices.device, indices.data_ptr() % 16,
        None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device, sinks.data_ptr() % 16),
        torch.are_deterministic_algorithms_enabled(),
        wants_gradients(q, k, v, sinks),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )  # fmt: skip


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Return whether a result of these tensors may get gradients; always inside of a `torch.func` transform."""
    if not torch.is_grad_enabled():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    for x in tensors:  # noqa: SIM110  # a generator would take as long as the questions
        if x is not None and x.requires_grad:
            return True
    return False


def has_tangents(*tensors: Tensor | None) -> bool:
    """Return whether a tensor may have a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return False
    try:
        return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    except RuntimeError:  # from tensors of `torch.vmap`
        return True


def is_known_true(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition holds for all symbolic integers, without a guard."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


def is_capturing(x: Tensor) -> bool:
    """Return whether the current stream of the tensor's device captures a CUDA graph."""
    if not x.is_cuda:
        return False
    if x.get_device() == current_gpu():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(x.device):
        return torch.cuda.is_current_stream_capturing()


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)
"""Return the handle of the current stream of a GPU, given its index."""

current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""Return the index of the current GPU without initializing CUDA."""


def stream_of(x: Tensor) -> tuple[int, int] | None:
    """Return the index of the tensor's GPU and the handle of its current stream, or None on other devices."""
    if not x.is_cuda:
        return None
    gpu = x.get_device()
    return gpu, current_stream(gpu)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, for operators, whose inputs are cast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def is_split_by_torch(module: torch.nn.Module | None = None) -> bool:
    """Return whether torch's context parallelism replaced SDPA, or accelerate's drops a layer's mask by a hook."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if isinstance(sdpa, FunctionType) and sdpa.__module__.startswith("torch.distributed."):
        return True
    hooks = {} if module is None else module._forward_pre_hooks
    return "_self_attn_pre_forward_hook" in [getattr(x, "__name__", "") for x in hooks.values()]


def is_one_of(size: int, *sizes: int) -> bool:
    """Return whether `size` equals one of `sizes`.

    `size in sizes` is False under TorchDynamo where a number equals a symbolic one.
    """
    return any(size == other for other in sizes)


def device_assert(condition: Tensor, message: str) -> None:
    """Stop the program if a bool tensor [] is False, without waiting for the device.

    The message is cut at 254 characters, the limit of devices.

    Raises:
        RuntimeError: `condition` is False, on a CPU. On a GPU a device-side assertion fails.
    """
    torch._assert_async(condition, message[:254])  # pyright: ignore[reportPrivateImportUsage]
