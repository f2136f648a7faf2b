"""Check of sparse attention against dense attention built from the definition, in the original order."""

from __future__ import annotations

from unittest import mock

import torch
from tools.support import Lane, assert_within_budget, attention_inputs, poisoned
from torch import Tensor

from flashmask_hf import FlashMask
from flashmask_hf._call.call import resolve
from flashmask_hf.sparse import functions, hash_sparse_attention


def visible_pairs(of_q: Tensor, of_k: Tensor, exclude_self: bool = False) -> Tensor:
    """Bool [B, Hq, Sq, Skv] by the definition: bool tensors say what is kept, int tensors which bucket."""
    of_k = of_k.repeat_interleave(of_q.shape[1] // of_k.shape[1], 1)
    q_len, kv_len = of_q.shape[-1], of_k.shape[-1]
    position = torch.arange(q_len, device=of_q.device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=of_q.device)
    causal = key < position if exclude_self else key <= position
    one, other = of_q[..., :, None], of_k[..., None, :]
    return causal & ((one & other) if of_q.dtype == torch.bool else one == other)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1).masked_fill(~visible, 0.0) @ v


def with_impl(impl: str):
    """A context in which sparse attention runs a named implementation."""
    return mock.patch.object(functions, "resolve", lambda *given: resolve(*given[:-1], given[-1]._replace(impl=impl)))


def check(
    attend,
    of_q: Tensor,
    of_k: Tensor,
    lane: Lane,
    exclude_self: bool = False,
    mask: FlashMask | None = None,
    dim: int = 16,
    v_dim: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    **more,
) -> None:
    """Output and gradients within the error budget of the dense form."""
    batch, heads, q_len = of_q.shape
    inputs = attention_inputs(lane, batch, heads, of_k.shape[1], q_len, of_k.shape[-1], dim, v_dim)
    if with_sinks:
        inputs = (*inputs, torch.linspace(-1.0, 1.0, heads, device=lane.device, dtype=lane.dtype))
    of_q, of_k = of_q.to(lane.device), of_k.to(lane.device)
    visible = visible_pairs(of_q, of_k, exclude_self)
    if mask is not None:
        mask = mask.to(lane.device)
        visible = visible & mask.to_dense(q_len).repeat_interleave(heads // mask.indices.shape[1], 1)
    weight = torch.randn(batch, heads, q_len, v_dim or dim, generator=torch.Generator().manual_seed(1)).to(lane.device)

    def results(function, dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*given[:3], softcap=softcap, sinks=given[3] if with_sinks else None)
        return [out.detach(), *torch.autograd.grad(out, given, weight.to(out.dtype))]

    if attend is hash_sparse_attention:
        more["exclude_self"] = exclude_self
    scale = 0.3
    with with_impl(lane.impl), poisoned():
        got = results(lambda *x, **xs: attend(*x, of_q, of_k, scale=scale, mask=mask, **xs, **more), lane.dtype)
    eager = results(lambda *x, **xs: dense(*x, visible, scale, **xs), lane.dtype)
    exact = results(lambda *x, **xs: dense(*x, visible, scale, **xs), torch.float64)
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(got)]
    for name, one, other, best in zip(names, got, eager, exact, strict=True):
        assert_within_budget(one, other, best, name)
    assert all(x.transpose(1, 2).is_contiguous() for x in got[:4])
    blind = ~visible.any(-1)
    assert not got[0][blind].any()
    assert not got[1][blind].any()
