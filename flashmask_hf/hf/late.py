"""The mask of a layer that the hook did not merge: by keywords, the hook's columns, or causality."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf._numbers import check_device
from flashmask_hf.hf.call import record_documents
from flashmask_hf.hf.documents import UNBOUNDED, of_bounds, of_positions
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.layer_mask import LayerMask, cached_mask, columns_of
from flashmask_hf.hf.merge import check_form, may_attend_to_encoder, supplied_mask
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.torch_internals import device_assert, is_capturing, is_one_of, stream_of


def late_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | FlashMask | None, kwargs: dict[str, Any]
) -> LayerMask:
    """Return the mask of a layer whose mask the hook did not merge; arguments as in `attention.layer_mask`."""
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if isinstance(attention_mask, FlashMask):
        return _own_mask(module, query, attention_mask, kwargs)
    hooked = None if attention_mask is None else columns_of(attention_mask)
    vectors, position_ids = kwargs.get(VECTORS), kwargs.get("position_ids")
    if causal and (position_ids is not None or kwargs.get("cu_seq_lens_q") is not None):
        record_documents()
    if vectors is None:
        return LayerMask(_separated_mask(module, query, key, hooked, causal, kwargs))
    record_documents(supplied=True)
    check_form(vectors, causal, getattr(module, "config", None))
    if not causal and hooked is None and hasattr(module, "config"):  # of a model that asked for no mask
        raise NotImplementedError(
            f"{VECTORS} reached a layer that is not causal and has no mask, as in an image tower; load with "
            "attn_implementation={'text_config': 'flashmask', 'vision_config': 'sdpa'}"
        )
    if vectors.shape[1] > 1:
        refuse_shard_of_heads(module, query.shape[1])
    check_device(VECTORS, vectors, "the layer", query)
    q_len, kv_len = query.shape[2], key.shape[2]
    if vectors.shape[2] != kv_len or q_len != kv_len:
        raise ValueError(
            f"{VECTORS} describe a whole row of {vectors.shape[2]} tokens, but this layer has {q_len} queries and "
            f"{kv_len} keys; pass one column per token, use_cache=False, none to generate, no prompt learning (virtual "
            "tokens), and shards in the context of flashmask_hf.parallel.sequence_parallel"
        )
    return supplied_mask(vectors, hooked, causal, _window_of(module, kwargs), position_ids)


def _own_mask(module: nn.Module, query: Tensor, mask: FlashMask, kwargs: dict[str, Any]) -> LayerMask:
    """Return the caller's `FlashMask`, which says alone what is visible."""
    for name in (VECTORS, "sliding_window"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} on a layer whose attention_mask is a FlashMask would be ignored; pass None"
            )
    if mask.indices.shape[1] > 1:
        refuse_shard_of_heads(module, query.shape[1])
    record_documents(supplied=True)
    return LayerMask(mask)


def whole_heads(module: nn.Module, heads: int) -> int:
    """Return the number of query heads of a layer over all ranks, or `heads` if its config has none."""
    config: Any = getattr(module, "config", None)
    by_layer = getattr(config, "num_attention_heads_per_layer", None)
    return by_layer[module.layer_idx] if by_layer else getattr(config, "num_attention_heads", heads)


def refuse_shard_of_heads(module: nn.Module, heads: int) -> None:
    """Raise if a layer that gets mask indices per head computes `heads` of more heads, as under tensor parallelism."""
    whole = whole_heads(module, heads)
    if heads < whole:
        raise NotImplementedError(
            f"{VECTORS} per head are not implemented in a layer that computes {heads} of {whole} query heads, as under "
            "tensor parallelism; pass mask indices that all heads share, [B, 1, S, n]"
        )


def _window_of(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the layer's sliding window: its keyword, or the config's if `window_in_mask`."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in types:
        raise NotImplementedError(
            f"{VECTORS} on a layer of chunked attention need position_ids to find its chunks, which this model does "
            "not hand to its layers; use attention_mask, or position_ids that start again with each document"
        )
    if not family_of(config).window_in_mask:
        return kwargs.get("sliding_window")
    # Other models' index is left unread: a compiler would guard on it, and compile every layer anew.
    layer_type = types[module.layer_idx] if types else "sliding_attention"
    return config.sliding_window if layer_type == "sliding_attention" else None


def _separated_mask(
    module: nn.Module, query: Tensor, key: Tensor, hooked: Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> FlashMask:
    """Return the mask of the hook's columns, else of causality and window, with documents kept apart.

    `cu_seq_lens_q` is read as in FlashAttention, else, by a causal mask, `position_ids` of all keys, [B or 1, Skv]:
    GPT-OSS hands them to its layers alone, and engines of sequence parallelism drop masks.
    """
    batch, _, q_len, _ = query.shape
    kv_len, window, bounds = key.shape[2], kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")
    if hooked is not None:
        if hooked.shape[3] != kv_len or not is_one_of(hooked.shape[0], 1, batch):
            raise ValueError(
                f"attention_mask has batch {hooked.shape[0]} and {hooked.shape[3]} key columns, but this layer has "
                f"batch {batch} and {kv_len} keys; pass a 2D attention_mask that covers cache and new tokens"
            )
        causal = hooked.shape[2] == 1
    elif window is not None and not causal:
        raise NotImplementedError(
            f"sliding_window={window} on a layer that is not causal is not implemented; use attn_implementation='sdpa' "
            "for this model"
        )
    marks = kwargs.get("position_ids") if causal else None
    if marks is not None and marks.shape not in ((1, kv_len), (batch, kv_len)):
        marks = None
    by_bounds = bounds is not None and bounds.shape[0] > 2
    is_own = causal or not may_attend_to_encoder(getattr(module, "config", None))
    if by_bounds and not (batch == 1 and q_len == kv_len and is_own):
        raise NotImplementedError(
            f"cu_seq_lens_q of several documents is implemented for one row without a cache or an encoder, got batch "
            f"{batch}, {q_len} queries and {kv_len} keys; flatten the batch into one row, or pass {VECTORS}"
        )
    marks = bounds if by_bounds else marks

    def build() -> FlashMask:
        columns = _default_columns(query, kv_len, causal, window) if hooked is None else hooked.detach()
        if marks is not None:
            real = None if hooked is None else hooked[:, 0, 0] > 0
            found = of_bounds(marks, kv_len) if by_bounds else of_positions(marks, real)
            end = (found.end + (q_len - kv_len)).clamp(min=0).to(torch.int32)[:, None]
            last, *others = columns.unbind(2)
            if len(others) > 1:
                device_assert(
                    ((others[0] >= q_len) & (others[1] <= 0)).all(),
                    "cu_seq_lens_q of several documents beside a mask function that shows a key to several intervals "
                    f"of queries is not implemented; pass {VECTORS}",
                )
            if others:
                others[-1] = torch.maximum(others[-1], found.start.to(torch.int32)[:, None])
            columns = torch.stack(torch.broadcast_tensors(torch.minimum(last, end), *others), 2)
        return FlashMask(columns.transpose(2, 3).contiguous(), causal)

    sources = tuple(x for x in (hooked, marks) if x is not None)
    if hooked is not None:
        return cached_mask(sources, ("hooked", by_bounds, marks is None), build)
    # Fake tensors have fake masks, and a CUDA graph's mask is in the graph's memory: neither may be cached.
    if type(query) is not Tensor or torch.compiler.is_compiling() or is_capturing(query):
        return build()
    variant = ("default", q_len, kv_len, causal, window, query.device, stream_of(query))
    return cached_mask(sources, variant, build, per_forward=marks is None)


def _default_columns(query: Tensor, kv_len: int, causal: bool, window: int | None) -> Tensor:
    """Return LTS [1, 1, 1, Skv] of a causal mask, or LTS and UTE of a full mask."""
    q_len = query.shape[2]
    row = torch.arange(kv_len, device=query.device, dtype=torch.int32) + (q_len - kv_len)
    last = torch.full_like(row, q_len) if window is None else (row + min(window, UNBOUNDED)).clamp(0, q_len)
    return torch.stack([last] if causal else [last, torch.zeros_like(row)])[None, None]
