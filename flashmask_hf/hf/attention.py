"""The attention function behind `attn_implementation="flashmask"`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flashmask_hf.hf.late import layer_mask
from flashmask_hf.hf.ranks import attend_in_parts
from flashmask_hf.names import VECTORS
from flashmask_hf.parallel.split import active_split

__all__ = ["attention_forward"]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer, with the signature of `sdpa_attention_forward` in `transformers/integrations`.

    The mask is the first of these that exists: the caller's `startend_row_indices`, in the layer's `sliding_window`,
    which is measured by position; what `mask_hook` returned; causal or full by `is_causal`, if no hook ran.

    Under tensor parallelism a layer computes some heads and selects their mask indices from the whole model's. In the
    context of `flashmask_hf.parallel.sequence_parallel`, a layer with a shard of the row gets the rest from other ranks
    (`ranks.py`).

    Args:
        module: the attention layer; `is_causal` (True if missing) and `training` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attention_mask: what `mask_hook` returned, or None.
        scaling: factor on the scores; None is D ** -0.5.
        dropout: must be 0 in training.
        kwargs: used are `startend_row_indices` (int32 [B or 1, 1 or Hkv or Hq, S, n], read as in `FlashMask`: n = 1
            or 2 with the layer's causality, n = 4 as not causal), `sliding_window` in tokens, `position_ids`
            [B or 1, S], `softcap`, `s_aux` (sinks, [Hq]), `is_causal` and `cu_seq_lens_q`. Keywords known to change the
            result raise unless None. Every other keyword of a model call reaches its layers, too, so it cannot raise:
            it is ignored, with one warning if it is not known to be harmless.

    Returns:
        out [B, Sq, Hq, Dv], and None for the attention weights, which are never computed.

    Raises:
        TypeError: `startend_row_indices` is not an int32 tensor.
        ValueError: dropout in training, or a mask whose shape, device or form does not fit.
        NotImplementedError: a keyword or a combination that would change the result and is not implemented.
        RuntimeError: n = 2 bounds of a bidirectional mask reach a causal layer; the mask is of trees or shared
            questions, and `position_ids` are not depths; bounds are out of range in a window; or, in a compiled model
            with windows, `position_ids` are not contiguous where a window matters (device-side checks).
    """
    split = active_split(query.shape[2], kwargs.get(VECTORS))
    if split is not None:
        return attend_in_parts(
            split, layer_mask, module, query, key, value, attention_mask, scaling, dropout, kwargs
        ), None
    mask = layer_mask(module, query, key, attention_mask, dropout, kwargs)
    out = mask.attend(query, key, value, scale=scaling, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"))
    return out.transpose(1, 2), None
