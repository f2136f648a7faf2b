"""Attention of drafters that train on several steps of their own, as EAGLE-3 does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask

__all__ = ["eagle3_attention"]


def eagle3_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: FlashMask,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of step k of EAGLE-3's training-time test (https://arxiv.org/abs/2503.01840, section 3.2).

    Row i sees the keys of step 0 that the mask shows, and key i of each later step. Step 0 is a `flashmask_attention`,
    joined with the later steps by the log-sum-exp. Differentiable in q, keys and values.

    Args:
        q: queries of step k, [B, Hq, S, D].
        keys: keys of the steps 0..k, [B, Hkv, S, D] each; Hq is a multiple of Hkv.
        values: values of the steps 0..k, [B, Hkv, S, Dv] each.
        mask: of step 0, usually `masks.causal_document(lengths)`.
        scale: positive factor on q @ k^T; None is D ** -0.5.
        impl: as in `flashmask_attention`.

    Returns:
        Tensor: [B, Hq, S, Dv] in q's dtype. Later steps are summed in float32 (float64 for float64 q).

    Raises:
        ValueError: keys and values are none, or not one to one, or a later step has another shape than step 0.
        Exception: an error of `flashmask_attention`.

    Example:
        >>> q, *steps = (torch.ones(1, 2, 5, 8) for _ in range(4))
        >>> eagle3_attention(q, steps, steps, masks.causal_document([3, 2])).shape
        torch.Size([1, 2, 5, 8])
    """
    for name, tensors in (("keys", keys), ("values", values)):
        if len(tensors) != max(1, len(keys)):
            raise ValueError(f"{name} has {len(tensors)} steps; give as many values as keys, and at least step 0")
        for step, x in enumerate(tensors):
            if x.shape != tensors[0].shape:
                raise ValueError(f"{name}[{step}] has shape {list(x.shape)}, but {name}[0] {list(tensors[0].shape)}")
    if len(keys) == 1:
        return flashmask_attention(q, keys[0], values[0], mask, scale=scale, impl=impl)
    if q.shape[2] != keys[0].shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} rows, but keys have {keys[0].shape[2]}; each row has a key in later steps"
        )
    out, lse = flashmask_attention(q, keys[0], values[0], mask, scale=scale, return_lse=True, impl=impl)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    groups = keys[0].shape[1], -1  # query heads by their key-value head
    rows = q.to(lse.dtype).unflatten(1, groups) * factor
    own = [(rows * key.to(lse.dtype).unsqueeze(2)).sum(-1) for key in keys[1:]]
    lse = lse.unflatten(1, groups)
    total = torch.stack([lse, *own]).logsumexp(0)
    joined = out.to(lse.dtype).unflatten(1, groups) * (lse - total).exp().unsqueeze(-1)
    for logits, value in zip(own, values[1:], strict=True):
        joined = joined + (logits - total).exp().unsqueeze(-1) * value.to(lse.dtype).unsqueeze(2)
    return joined.flatten(1, 2).to(out.dtype)
