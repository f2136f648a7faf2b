"""The operator `flashmask_hf::flash_attn_decode`: attention of few query rows, without a plan and without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf import torch_state
from flashmask_hf.call import Call, Settings, resolve_operator
from flashmask_hf.operators.library import as_operator, no_derivatives, register_autograd

__all__ = ["decode", "flash_attn_decode", "results_like"]


def decode(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Run a resolved call of few rows; return out and lse."""
    if call.intercepted:
        return flash_attn_decode(q, k, v, sinks, indices, *call.settings[:-1])
    return call.decode(q, k, v, sinks, indices)


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
    with torch_state.no_autocast(q.device):
        call = resolve_operator(q, k, v, indices, sinks, Settings(causal, scale, softcap, impl, False))
        return call.decode(q, k, v, sinks, indices)


flash_attn_decode = as_operator("flash_attn_decode", _decode)
register_autograd(flash_attn_decode, no_derivatives)


@torch.library.register_fake("flashmask_hf::flash_attn_decode")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_like(q, v)


def results_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised `out` and `lse` for queries q and values v."""
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, q_len, dtype=torch.promote_types(q.dtype, torch.float32))
