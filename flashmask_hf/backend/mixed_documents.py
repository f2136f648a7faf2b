"""Calls whose documents a model would mix: nothing reads what tells them, or a part beside the attention does not.

The mask keeps apart the documents that it knows of. Some calls tell documents by what transformers does not read, and
some models take a row for one document outside of their attention. None of these is an error to transformers. Nothing
is read back from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.backend.document_guard import is_guarded
from flashmask_hf.backend.ignored_vectors import hides_more
from flashmask_hf.backend.positions import has_one_document
from flashmask_hf.checks import device_assert
from flashmask_hf.names import VECTORS

__all__ = ["check_adapters", "check_document_numbers", "check_numbered_mask", "check_scales"]


def check_document_numbers(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise if nothing but `seq_idx` tells the documents of a row, which only recurrent layers read.

    Args:
        model: a transformers model whose attention is one of this package's.
        kwargs: keywords of its call.

    Raises:
        RuntimeError: `seq_idx` [B, S] numbers several documents in a row (a device-side check).
    """
    numbers = kwargs.get("seq_idx")
    if not isinstance(numbers, Tensor) or is_guarded(model):
        return
    if any(kwargs.get(name) is not None for name in (VECTORS, "position_ids", "cu_seq_lens_q")):
        return
    device_assert(
        (numbers == numbers[:, :1]).all(),
        f"seq_idx numbers several documents of a row, but the attention of {type(model).__name__} does not read it, so "
        "they would see each other; pass position_ids that start again with each, too, as "
        "DataCollatorWithFlattening(return_position_ids=True) does",
    )


def check_adapters(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise for packed rows in a model with activated LoRA, which looks for its invocation once in a row.

    Args:
        model: a transformers model whose attention is one of this package's, into which PEFT may have put adapters.
        kwargs: keywords of its call.

    Raises:
        RuntimeError: `startend_row_indices`, `cu_seq_lens_q` or `position_ids` tell several documents of a row (a
            device-side check).
    """
    adapters = getattr(model, "peft_config", {})
    if not any(getattr(config, "alora_invocation_tokens", None) for config in adapters.values()):
        return
    vectors, bounds, positions = (kwargs.get(name) for name in (VECTORS, "cu_seq_lens_q", "position_ids"))
    if isinstance(positions, Tensor) and positions.dim() == 2:
        mask = kwargs.get("attention_mask")
        if mask is None and isinstance(vectors, Tensor):  # 0 hides a key from all, as padding, whose positions are 0
            mask = (vectors[:, 0] > 0).any(-1)
        alone = has_one_document(positions, mask)
    elif isinstance(bounds, Tensor):
        alone = (bounds.diff() > 0).sum() <= 1
    elif isinstance(vectors, Tensor):
        alone = ~hides_more(vectors, None).any()
    else:
        return
    device_assert(
        alone,
        "PEFT looks for alora_invocation_tokens once in a row, so that of several packed documents only one would have "
        "the adapter; use LoRA without them, or batches of whole sequences",
    )


def check_numbered_mask(attention_mask: Any, position_ids: Any) -> None:
    """Raise for a 2D mask that numbers documents which nothing else tells; transformers reads each number as 1.

    Args:
        attention_mask: of a model's call; integers [B, S] are looked at.
        position_ids: of the call, or None.

    Raises:
        RuntimeError: the number changes between two tokens, and no position of 0 follows (a device-side check).
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or attention_mask.dtype == torch.bool:
        return
    before, after = attention_mask[:, :-1], attention_mask[:, 1:]
    mixed = (before > 0) & (after > 0) & (before != after)
    if isinstance(position_ids, Tensor) and position_ids.shape[-1] == attention_mask.shape[1]:
        mixed = mixed & (position_ids[..., 1:] != 0)
    device_assert(
        ~mixed.any(),
        "attention_mask [B, S] numbers documents, which transformers reads as ones, so that they would see each other; "
        "pass position_ids that start again at 0 with each document, and a mask of ones and zeros, or none",
    )


def check_scales(config: Any, position_ids: Tensor, attention_mask: Any) -> None:
    """Raise for several documents in a long row of Llama 4, which scales its queries by their place in the row.

    The scale of a query is 1 up to `floor_scale` tokens (transformers, `Llama4TextAttention`).

    Args:
        config: configuration of a model that makes its mask.
        position_ids: [B, S] of its call.
        attention_mask: of its call.

    Raises:
        RuntimeError: `position_ids` tell several documents in a row of more tokens (a device-side check).
    """
    floor = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if floor is None or position_ids.dim() != 2 or position_ids.shape[1] < floor:
        return
    device_assert(
        has_one_document(position_ids, attention_mask),
        "Llama 4 scales queries by their place in the row from floor_scale tokens on, so that documents of a longer "
        "row would depend on those before them; keep rows of several documents under floor_scale tokens",
    )
