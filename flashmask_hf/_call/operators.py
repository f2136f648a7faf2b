"""The operators `flashmask_hf::flash_attn_forward` and `flashmask_hf::flash_attn_backward`, and how a call is run.

Their names hold `flash_attn`, which selective activation checkpointing in training libraries looks for. Compilers,
dispatch modes and profilers see the operators; where nothing intercepts calls, `attend` goes past the dispatcher, which
takes longer than a launch, and records a derivative of its own, which runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call.call import Call, Settings, resolve_operator
from flashmask_hf._call.library import (
    Derivative,
    as_operator,
    no_derivatives,
    no_second_derivatives,
    register_autograd,
)
from flashmask_hf._call.plan_cache import plan_of
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan

__all__ = ["attend", "flash_attn_backward", "flash_attn_decode", "flash_attn_forward", "results_like"]


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: FlashMask) -> tuple[Tensor, Tensor]:
    """Run a resolved call of `flashmask_attention`; return out and lse."""
    q, k, v = call.cast(q, k, v)
    if call.decodes:
        return decode(call, q, k, v, sinks, mask.indices)
    plan = plan_of(mask, q.shape[2])
    if call.intercepted:
        return flash_attn_forward(q, k, v, sinks, mask.indices, *plan, *call.settings)
    if not call.differentiated:
        return call.forward(q, k, v, sinks, mask.indices, plan)
    return _record(call, q, k, v, sinks, mask.indices, plan)


def decode(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Run a resolved call of few rows; return out and lse."""
    if call.intercepted:
        return flash_attn_decode(q, k, v, sinks, indices, *call.settings[:-1])
    return call.decode(q, k, v, sinks, indices)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Masked attention; differentiable in q, k, v and sinks, through both results.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        sinks: [Hq] or None.
        indices: int32 [B or 1, Hm, Skv, n].
        tiles: of the plan.
        counts: of the plan.
        segments: of the plan.
        causal: as in `FlashMask`.
        scale: factor on the scores.
        softcap: 0 is none.
        impl: "hopper", "triton" or "torch", or "best": "hopper", and "triton" from the first time on that it fails.
        deterministic: whether repeated backwards agree to the bit; if False, those of "hopper" may not.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).
    """
    settings = Settings(causal, scale, softcap, impl, deterministic)
    with torch_internals.no_autocast(q.device):
        call = resolve_operator(q, k, v, indices, sinks, settings)
        return call.forward(q, k, v, sinks, indices, Plan(tiles, counts, segments))


flash_attn_forward = as_operator("flash_attn_forward", _forward)


@torch.library.register_fake("flashmask_hf::flash_attn_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_like(q, v)


def results_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised `out` and `lse` for queries q and values v."""
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, q_len, dtype=torch.promote_types(q.dtype, torch.float32))


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and sinks (empty without sinks).

    `dout` [B, Hq, Sq, Dv] and `dlse` [B, Hq, Sq], or None for zeros, are the gradients of the forward's results `out`
    and `lse`. The other arguments are those of the forward.
    """
    settings = Settings(causal, scale, softcap, impl, deterministic)
    with torch_internals.no_autocast(q.device):
        call = resolve_operator(q, k, v, indices, sinks, settings)
        return call.backward(dout, q, k, v, sinks, lse, (out, dlse), indices, Plan(tiles, counts, segments))


flash_attn_backward = as_operator("flash_attn_backward", _backward)
register_autograd(flash_attn_backward, no_second_derivatives)


@torch.library.register_fake("flashmask_hf::flash_attn_backward")
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, q, k, v, sinks, _, lse, *_ = inputs
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward reads of a call of the forward."""
    q, k, v, sinks, indices, tiles, counts, segments, *ctx.settings = inputs
    ctx.set_materialize_grads(False)  # the gradient of lse is seldom there
    ctx.save_for_backward(q, k, v, sinks, *output, indices, tiles, counts, segments)


def _differentiate_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the forward's inputs, given those of its results."""
    if dout is None and dlse is None:
        return (None,) * 13  # for every input of `_forward`
    saved = ctx.saved_tensors  # read once: checkpointing unpacks a saved tensor only once
    _, _, _, sinks, out, *_ = saved
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = flash_attn_backward(dout, dlse, *saved, *ctx.settings)
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * 9


register_autograd(flash_attn_forward, Derivative(_save_operator, _differentiate_operator))


class _Attention(torch.autograd.Function):
    """The autograd function of attention that bypasses the dispatcher.

    Hooks on saved tensors, such as offloading, need not see the plan, which all layers share.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v, sinks, indices, plan)
        ctx.call, ctx.plan = call, plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse, indices)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 7  # for every input of the forward
        q, k, v, sinks, out, lse, indices = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        # With create_graph=True the operator tells that there are no second derivatives.
        if torch.is_grad_enabled() or torch_internals.is_intercepted(dout, dlse):
            dq, dk, dv, dsinks = flash_attn_backward(
                dout, dlse, q, k, v, sinks, out, lse, indices, *ctx.plan, *ctx.call.settings
            )
        else:
            dq, dk, dv, dsinks = ctx.call.backward(dout, q, k, v, sinks, lse, (out, dlse), indices, ctx.plan)
        return None, dq, dk, dv, None if sinks is None else dsinks, None, None


_record: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_Attention.apply` without its checks for `torch.func`: `resolve` has asked whether a transform is active."""


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Masked attention of few query rows, without a plan and without gradients.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        sinks: [Hq] or None.
        indices: int32 [B or 1, Hm, Skv, n].
        causal: as in `FlashMask`.
        scale: factor on the scores.
        softcap: 0 is none.
        impl: "triton" or "torch", or "best", which is "triton".

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).

    Raises:
        ValueError: a value of `indices` lies outside 0..Sq. On a GPU it is an assertion of the device.
    """
    with torch_internals.no_autocast(q.device):
        call = resolve_operator(q, k, v, indices, sinks, Settings(causal, scale, softcap, impl, False))
        return call.decode(q, k, v, sinks, indices)


flash_attn_decode = as_operator("flash_attn_decode", _decode)
register_autograd(flash_attn_decode, no_derivatives)


@torch.library.register_fake("flashmask_hf::flash_attn_decode")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_like(q, v)
