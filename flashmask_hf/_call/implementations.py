"""The implementations of attention: which one serves a call, and how each is prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan

if TYPE_CHECKING:  # Triton may be missing
    from flashmask_hf.kernels.launch.problem import Problem
    from flashmask_hf.kernels.launch.tensor_layout import Layout
    from flashmask_hf.kernels.shared.row_statistics import Delta, OutputLayout

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_HEAD_DIM",
    "Choice",
    "choose",
    "prepare_backward",
    "prepare_decode",
    "prepare_forward",
]

IMPLEMENTATIONS = ("hopper", "triton", "torch", "reference")
MAX_HEAD_DIM = 256
"""Largest head_dim (of queries and of values) of the Triton kernels."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Choice(NamedTuple):
    """An implementation and the reason for it, or None and the message of the ValueError that a call raises."""

    impl: str | None
    reason: str


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, impl: str | None = None) -> Choice:
    """Choose the implementation that serves queries of `head_dim` and values of `v_head_dim`.

    A named implementation that cannot serve is not replaced by another. Nor are the kernels of a GPU replaced by
    "torch", which is much slower there, unless Triton is not installed.

    Args:
        device: device of the tensors.
        dtype: dtype of q, k and v.
        head_dim: D of q and k.
        v_head_dim: Dv of v.
        impl: as in `flashmask_attention`.
    """
    if impl is not None and impl not in IMPLEMENTATIONS:
        return Choice(None, f"impl must be None or one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl in ("torch", "reference"):
        return Choice(impl, "it takes any device, dtype and head_dim")
    if impl is None and device.type != "cuda":
        return Choice("torch", f"no GPU for impl='triton', the tensors are on {device.type}")
    if impl is None and not torch_internals.HAS_TRITON:
        return Choice("torch", "Triton is not installed")
    hopper = None
    if impl != "triton":
        hopper = _why_not_hopper(device, dtype, head_dim, v_head_dim)
        if hopper is None:
            return Choice("hopper", "the Hopper kernels take this device, dtype and head_dim")
    obstacle = _why_not_triton(device, dtype, max(head_dim, v_head_dim))
    if impl == "hopper":
        other = "triton" if obstacle is None else "torch"
        return Choice(None, f"impl='hopper' cannot serve {hopper}; impl={other!r} can, more slowly")
    if obstacle is not None:
        return Choice(None, f"impl='triton' cannot serve {obstacle}; impl='torch' can, more slowly")
    reason = "the kernels take this device, dtype and head_dim"
    return Choice("triton", reason if hopper is None else f"{reason}; impl='hopper' cannot serve {hopper}")


def _why_not_hopper(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return what the Hopper kernels cannot serve, to follow "cannot serve", or None."""
    if not torch_internals.HAS_TRITON:
        return "this process: Triton is not installed"
    from flashmask_hf.kernels.hopper import gluon

    obstacle = gluon.unavailable_reason()
    if obstacle is not None:
        return f"this process: {obstacle}"
    from flashmask_hf.kernels.hopper.forward import unsupported_reason

    return unsupported_reason(device, dtype, head_dim, v_head_dim)


def _why_not_triton(device: torch.device, dtype: torch.dtype, largest: int) -> str | None:
    """Return what the portable kernels cannot serve, to follow "cannot serve", or None."""
    if not torch_internals.HAS_TRITON:
        return "this process: Triton is not installed"
    if not torch_internals.runs_kernels(device):
        return f"tensors on {device.type} (it needs a GPU)"
    if dtype not in _KERNEL_DTYPES:
        return f"dtype {dtype} (it takes bfloat16, float16, float32)"
    if largest > MAX_HEAD_DIM:
        return f"head_dim {largest} (its limit is {MAX_HEAD_DIM})"
    return None


def prepare_forward(impl: str, problem: Problem, ordered: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare the forward of "hopper", "triton" or "torch".

    Args:
        impl: the implementation.
        problem: layouts and settings of the call.
        ordered: whether each row of the output is put where an order says. The kernel of "hopper" stores it there; the
            others' output is copied.

    Returns:
        (q, k, v, sinks, indices, plan, order) -> (out, lse), without `order` unless `ordered`. `order`, int32
        [B, Hq, Sq], is a permutation of every head's rows.
    """
    if impl == "hopper":
        from flashmask_hf.kernels.hopper import forward

        return forward.prepare_forward(problem, ordered)
    if impl == "triton":
        from flashmask_hf.kernels.portable import forward

        run = forward.prepare_forward(problem)
    else:
        from flashmask_hf.kernels.eager import tiled

        def run(
            q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, plan: Plan
        ) -> tuple[Tensor, Tensor]:
            with torch_internals.no_autocast(q.device):
                mask = FlashMask(indices, problem.causal)
                return tiled.forward(q, k, v, mask, plan, sinks, problem.scale, problem.softcap)

    if not ordered:
        return run
    from flashmask_hf.sparse.reorder import put_rows_back  # here, because the folder imports this module

    def run_and_place(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = run(*inputs[:-1])
        return put_rows_back(out, inputs[-1]), lse

    return run_and_place


def prepare_backward(
    impl: str, problem: Problem, dout: Layout, output: OutputLayout | None, deterministic: bool, ordered: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Prepare the backward of "hopper", "triton" or "torch".

    Args:
        impl: the implementation.
        problem: layouts and settings of the call.
        dout: layout of the output's gradient.
        output: (layout of the output, whether lse has a gradient), or None if calls bring the row sums delta.
        deterministic: whether repeated runs must agree to the bit; "triton" and "torch" always do.
        ordered: whether each row of the gradients is put where orders say, as in the forward.

    Returns:
        (dout, q, k, v, lse, delta, indices, plan, orders) -> (dq, dk, dv, delta), without `orders` unless `ordered`.
        `orders` are where the rows of dq go, int32 [B, Hq, Sq], and those of dk and dv, int32 [B, Hkv, Skv].
        `delta`, the row sums of dout * out less the gradient of lse, is a tensor, or (out, gradient of lse or None)
        that it is computed from.
    """
    if impl == "hopper":
        from flashmask_hf.kernels.hopper import backward

        return backward.prepare_backward(problem, dout, output, deterministic, ordered)
    if impl == "triton":
        from flashmask_hf.kernels.portable import backward

        run = backward.prepare_backward(problem, dout, output)
    else:
        from flashmask_hf.kernels.eager import tiled

        def run(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Delta, indices: Tensor, plan: Plan
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            with torch_internals.no_autocast(q.device):
                mask = FlashMask(indices, problem.causal)
                return tiled.backward(dout, q, k, v, lse, delta, mask, plan, problem.scale, problem.softcap)

    if not ordered:
        return run
    from flashmask_hf.sparse.reorder import put_rows_back  # here, because the folder imports this module

    def run_and_place(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dv, delta = run(*inputs[:-1])
        q_order, k_order = inputs[-1]
        return put_rows_back(dq, q_order), put_rows_back(dk, k_order), put_rows_back(dv, k_order), delta

    return run_and_place


def prepare_decode(impl: str, problem: Problem) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare attention of few rows without a plan: "torch" by torch operations, any other by the portable kernel.

    Returns:
        (q, k, v, sinks, indices) -> (out, lse).
    """
    if impl != "torch":
        from flashmask_hf.kernels.portable import decode

        return decode.prepare_decode(problem)
    from flashmask_hf._numbers import check_range
    from flashmask_hf.kernels.eager import tiled

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
        check_range(indices, q.shape[2])
        with torch_internals.no_autocast(q.device):
            return tiled.decode(q, k, v, FlashMask(indices, problem.causal), sinks, problem.scale, problem.softcap)

    return run
