"""The attention function behind `attn_implementation="flashmask"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from flashmask_hf.hf.call import current
from flashmask_hf.hf.keywords import SPLIT_BY_TORCH, check_keywords
from flashmask_hf.hf.late import late_mask, refuse_shard_of_heads
from flashmask_hf.hf.layer_mask import LayerMask, mask_of_rows
from flashmask_hf.hf.ranks import attend_in_parts, seed_of_heads
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK, VECTORS
from flashmask_hf.parallel.split import active_split
from flashmask_hf.torch_internals import is_split_by_torch

_checked: set[Any] = set()
"""Checked layers, by class, implementation and types of keywords."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | FlashMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer, with the signature of `sdpa_attention_forward` in `transformers/integrations`.

    The mask is the first of these that exists: what `mask_hook` merged; the caller's `FlashMask`; the caller's
    `startend_row_indices`, in the layer's `sliding_window`, which is measured by position; what `mask_hook` returned;
    causal or full by `is_causal`.

    Args:
        module: the attention layer; `is_causal` (True if missing) and `training` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attention_mask: what `mask_hook` returned, a `FlashMask` of a layer called alone, or None.
        scaling: factor on the scores; None is D ** -0.5.
        dropout: probability of dropping an attention weight in training.
        kwargs: used are `startend_row_indices` (int32 [B or 1, 1 or Hkv or Hq, S, n]: n = 1 or 2 with the layer's
            causality, n = 4 as not causal), `sliding_window` in tokens, `position_ids` [B or 1, S], `softcap`, `s_aux`
            (sinks, [Hq]), `is_causal` and `cu_seq_lens_q`. `check_keywords` refuses others that change the result.

    Returns:
        out [B, Sq, Hq, Dv], and None for the attention weights, which are never computed.

    Raises:
        TypeError: `startend_row_indices` is not an int32 tensor.
        ValueError: a mask whose shape, device or form does not fit.
        NotImplementedError: a keyword or a combination that would change the result and is not implemented.
        RuntimeError: n = 2 bounds of a bidirectional mask reach a causal layer; `position_ids` of trees are not depths;
            or, in a window, bounds are out of range, or a compiled model's positions not contiguous (device-side).
    """
    check_layer(module, kwargs, FLASHMASK)
    dropout = dropout if module.training else 0.0
    mask = _marked_mask(module, query, key, attention_mask)
    if mask is None:
        split = active_split(query.shape[2], kwargs.get(VECTORS))
        if split is not None:
            return attend_in_parts(split, module, query, key, value, attention_mask, scaling, dropout, kwargs), None
        mask = late_mask(module, query, key, attention_mask, kwargs)
    settings: dict[str, Any] = {"scale": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    if dropout:
        settings |= {"dropout": dropout, "dropout_seed": seed_of_heads(module, query)}
    return mask.attend(query, key, value, **settings).transpose(1, 2), None


def check_layer(module: nn.Module, kwargs: dict[str, Any], implementation: str) -> None:
    """Check a layer's keywords, once per class and types of keywords; and what may change, in every layer.

    Arguments as in `check_keywords`.

    Raises:
        NotImplementedError: torch's or accelerate's context parallelism is in use (`is_split_by_torch`), or
            attention weights are asked for.
        Exception: an error of `check_keywords`.
    """
    kind = None
    if not torch.compiler.is_compiling():  # a compiler would guard on what follows
        kind = (type(module), implementation, kwargs.get("sliding_window"), *kwargs, *map(type, kwargs.values()))
        is_known = kind in _checked and current.call is not None and not module._forward_pre_hooks
        if is_known and not _asks_for_weights(kwargs):
            return
    if is_split_by_torch(module):
        raise NotImplementedError(SPLIT_BY_TORCH.format(implementation))
    check_keywords(kwargs, implementation)
    if _asks_for_weights(kwargs):
        raise NotImplementedError(
            f"output_attentions=True: attn_implementation='{implementation}' never has the weights that it would "
            "return; use attn_implementation='eager' to look at them"
        )
    if kind is not None:
        _checked.add(kind)


def _asks_for_weights(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    compiling = torch.compiler.is_compiling()  # the collector is then in a global, not in a context variable
    collected = _active_collector.global_var if compiling else _active_collector.get()
    return collected is not None and "attentions" in " ".join(collected)


def layer_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | FlashMask | None, kwargs: dict[str, Any]
) -> LayerMask:
    """Return the mask of a layer with whole rows. Errors are as in `attention_forward`.

    Args:
        module: the attention layer.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        attention_mask: as in `attention_forward`.
        kwargs: the layer's keywords, checked (`check_layer`).
    """
    marked = _marked_mask(module, query, key, attention_mask)
    return late_mask(module, query, key, attention_mask, kwargs) if marked is None else marked


def _marked_mask(module: nn.Module, query: Tensor, key: Tensor, rows: Any) -> LayerMask | None:
    """Return a layer's mask of marked rows, and count the layer in the call; None for another attention_mask."""
    mask = mask_of_rows(rows, key.shape[2])
    if mask is None:
        return None
    if not torch.compiler.is_compiling() and current.call is not None:
        current.call.supplied += 1
    if rows.shape[1] > 1:
        refuse_shard_of_heads(module, query.shape[1])
    return mask
