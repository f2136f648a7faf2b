"""The operators `flashmask_hf::*`, a mask's cached plan, and how a call is run.

Selective activation checkpointing looks for `flash_attn` in their names. Only intercepted calls pass the dispatcher,
which takes longer than a launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf import tile_plan as plan_in_torch
from flashmask_hf import torch_internals
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf._call.call import Call, resolve_operator
from flashmask_hf._call.library import Derivative, Recorded, no_derivatives, no_second_derivatives, operator
from flashmask_hf._numbers import check_range
from flashmask_hf.kernels.launch.tensor_layout import results_like
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan, empty_plan


@operator(lambda indices, causal, q_len: tuple(empty_plan(indices, q_len)))
def make_plan(indices: Tensor, causal: bool, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Classify the tiles of a mask (see `flashmask_hf.tile_plan`).

    Args:
        indices: int32 [B, Hm, Skv, n].
        causal: as in `FlashMask`.
        q_len: number of query rows.

    Returns:
        The tensors of a `Plan`.

    Raises:
        ValueError: a value lies outside 0..q_len. On a GPU a device-side assertion stops the program.
    """
    tiles, counts, segments = _build_plan(indices, causal, q_len)
    return tiles, counts, segments


def _build_plan(indices: Tensor, causal: bool, q_len: int) -> Plan:
    """Build a plan, by Triton kernels on a GPU with Triton, and by torch operations elsewhere."""
    if indices.device.type == "cuda" and torch_internals.HAS_TRITON:
        from flashmask_hf.kernels.shared import plan_kernels

        return plan_kernels.build_plan(indices, causal, q_len)
    check_range(indices, q_len)
    return plan_in_torch.build_plan(indices, causal, q_len)


class _CachedPlan(NamedTuple):
    """The plan that a mask caches, and the facts that keep it valid."""

    q_len: int
    version: int
    """Version counter of the mask's indices."""
    memory: tuple[int, torch.Size, tuple[int, ...]]
    """Address, shape and strides of the indices."""
    stream: tuple[int, int] | None
    """CUDA device and stream on which the plan may be read."""
    is_inference: bool
    """Whether the plan was made in inference mode, so that autograd cannot save it."""
    plan: Plan
    alias: Tensor
    """Alias of the indices, which keeps their memory from being reused."""


def plan_of(mask: FlashMask, q_len: int) -> Plan:
    """Return the mask's plan for `q_len` query rows, cached if valid.

    Nothing is cached for tensors made in inference mode, which do not count changes, nor while capturing a CUDA graph
    or compiling.
    """
    indices = mask._indices
    if torch.compiler.is_compiling():
        return Plan(*make_plan(indices, mask.causal, q_len))
    cached = mask._plan
    if (
        cached is not None
        and cached.q_len == q_len
        and cached.version == indices._version
        and cached.memory == (indices.data_ptr(), indices.shape, indices.stride())
        and (cached.stream is None or _is_current(cached.stream, indices))
        and not (cached.is_inference and torch.is_grad_enabled())
    ):
        return cached.plan
    version = None if indices.is_inference() else indices._version  # read first: another thread may write meanwhile
    plan = Plan(*make_plan(indices, mask.causal, q_len))
    # Plans of modes and transforms stay inside, and a graph's plan is in the graph's memory.
    if version is not None and torch_internals.is_plain(plan.tiles) and not torch_internals.is_capturing(indices):
        alias = indices.detach()
        memory, stream = (alias.data_ptr(), alias.shape, alias.stride()), torch_internals.stream_of(alias)
        mask._plan = _CachedPlan(q_len, version, memory, stream, plan.tiles.is_inference(), plan, alias)
    return plan


def _is_current(stream: tuple[int, int], indices: Tensor) -> bool:
    return stream[1] == torch_internals.current_stream(stream[0]) and not torch_internals.is_capturing(indices)


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: FlashMask, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a resolved call of `flashmask_attention`; return out and lse."""
    if call.cast_to is not None:
        q, k, v = call.cast(q, k, v)
    indices = mask._indices
    if call.decodes:
        if call.intercepted:
            return flash_attn_decode(q, k, v, sinks, indices, call.causal, *call.arguments)
        return call.decode(Inputs(q, k, v, sinks, indices))
    plan = plan_of(mask, q.shape[2])
    if call.intercepted:
        return flash_attn_forward(q, k, v, sinks, indices, *plan, seed, call.causal, *call.arguments)
    if not call.differentiated:
        return call(q, k, v, sinks, indices, plan, seed)
    return _record(_DERIVATIVE, call, q, k, v, sinks, indices, plan, seed)


def _save(
    ctx: Any, output: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor,
    plan: Plan, seed: Tensor | None, *options: Any,
) -> None:  # fmt: skip
    """Save what the backward reads; the shared plan bypasses hooks on saved tensors."""
    ctx.plan, ctx.options = plan, options
    ctx.set_materialize_grads(False)  # lse seldom has a gradient
    ctx.save_for_backward(q, k, v, sinks, indices, *output, seed)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and sinks, given the gradients of the forward's results."""
    if dout is None and dlse is None:
        return ()
    saved = ctx.saved_tensors  # read once: checkpointing unpacks a saved tensor only once
    inputs, (out, lse, seed) = Inputs(*saved[:5]), saved[5:]
    dout = torch.zeros_like(out) if dout is None else dout
    call = ctx.run if isinstance(ctx.run, Call) else None
    # With create_graph=True the operator raises that there are no second derivatives.
    if call is None or torch.is_grad_enabled() or torch_internals.is_intercepted(dout, dlse):
        causal, arguments = ctx.options if call is None else (call.causal, call.arguments)
        found = flash_attn_backward(dout, dlse, out, lse, *inputs, *ctx.plan, seed, causal, *arguments)
    else:
        found = call.backward(dout, inputs, lse, (out, dlse), ctx.plan, seed)
    return found[:3] if inputs[3] is None else found


_DERIVATIVE = Derivative(_save, _differentiate)

_record: Any = super(torch.autograd.Function, Recorded).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`Recorded.apply` without its checks for `torch.func`, which take 2.6 of 19 us; `resolve` has made them."""


def _save_inputs(ctx: Any, output: tuple[Tensor, Tensor], inputs: Inputs, *options: Any) -> None:
    _save(ctx, output, *inputs, *options)


@operator(lambda inputs, *_: results_like(inputs.q, inputs.v), Derivative(_save_inputs, _differentiate))
def flash_attn_forward(
    inputs: Inputs, plan: Plan, seed: Tensor | None, causal: bool, arguments: Arguments
) -> tuple[Tensor, Tensor]:
    """Masked attention; differentiable in q, k, v and sinks, through both results.

    Args:
        inputs: as in `flashmask_attention`.
        plan: of the mask.
        seed: `dropout_seed`, or None.
        causal: as in `FlashMask`.
        arguments: as in `flashmask_attention`; "reference" has no operator.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).
    """
    return resolve_operator(inputs, causal, arguments).forward(inputs, plan, seed)


def gradients_like(inputs: Inputs, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised gradients of q, k, v and sinks (empty without sinks)."""
    q, k, v, sinks, _ = inputs
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


@operator(lambda dout, dlse, out, lse, inputs, *_: gradients_like(inputs, lse), no_second_derivatives)
def flash_attn_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
    plan: Plan,
    seed: Tensor | None,
    causal: bool,
    arguments: Arguments,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and sinks (empty without sinks), given the gradients of out and lse."""
    call = resolve_operator(inputs, causal, arguments)
    dq, dk, dv, dsinks = call.backward(dout, inputs, lse, (out, dlse), plan, seed)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@operator(lambda inputs, *_: results_like(inputs.q, inputs.v), no_derivatives)
def flash_attn_decode(inputs: Inputs, causal: bool, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Masked attention of few query rows, without a plan and without gradients.

    Arguments and results are as in `flash_attn_forward`.

    Raises:
        ValueError: a value of `indices` lies outside 0..Sq. On a GPU a device-side assertion stops the program.
    """
    return resolve_operator(inputs, causal, arguments).decode(inputs)
