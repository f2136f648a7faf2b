"""Eager masked attention: the definition that every other implementation is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmask_hf._call.arguments import Arguments
from flashmask_hf.dropout import dropout_pattern
from flashmask_hf.mask import FlashMask


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    arguments: Arguments,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention with the dense mask in the dtype of q: differentiable, on any device, in quadratic memory.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D]; query head h reads key-value head h * Hkv // Hq.
        v: [B, Hkv, Skv, Dv].
        mask: heads 1, Hkv or Hq; query head h reads mask head h * Hm // Hq.
        sinks: [Hq] logits of one extra key per head that has no value, or None.
        arguments: factor `scale` on q @ k^T, and `softcap`, c in c * tanh(scores / c) or None; `dropout`.
        seed: `dropout_seed`, or None.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, and lse [B, Hq, Sq] float32 (float64 for float64 inputs), the natural log of
        the softmax denominator, sink included. A row that sees nothing has out 0, lse -inf (or the sink's logit) and
        zero gradients.
    """
    heads = q.shape[1]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    visible = mask.to_dense(q.shape[2])
    visible = visible.repeat_interleave(heads // visible.shape[1], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[3] ** -0.5 if arguments.scale is None else arguments.scale
    scores = (q @ k.transpose(-1, -2)).to(wide) * scale
    if arguments.softcap is not None:
        scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
    # Finite, to keep NaN out of the backward of rows that see nothing; their weights are zeroed below.
    scores = scores.masked_fill(~visible, torch.finfo(wide).min)
    if sinks is not None:
        sink = sinks.to(wide).view(1, heads, 1, 1).expand(*scores.shape[:-1], 1)
        lse = torch.cat([scores, sink], -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~visible, 0.0)
    if seed is not None:
        kept = dropout_pattern(arguments.dropout, seed, *weights.shape)
        weights = torch.where(kept, weights / (1.0 - arguments.dropout), 0.0)
    # The fill stops upstream gradients of rows that see nothing: 0 times inf or NaN is NaN.
    blind = ~visible.any(-1)
    out = (weights.to(v.dtype) @ v).masked_fill(blind.unsqueeze(-1), 0.0)
    blind_lse = lse.new_full((), float("-inf"))
    if sinks is not None:  # a sink of -inf is no sink, and gets no gradient
        blind_lse = sinks.to(wide).masked_fill(sinks.isneginf(), float("-inf")).view(1, heads, 1)
    return out, torch.where(blind, blind_lse, lse)
