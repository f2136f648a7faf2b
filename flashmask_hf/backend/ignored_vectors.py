"""Calls of models that would ignore the mask vectors, the packed rows or the documents of a batch.

Every keyword of a call reaches the layers, and attention implementations of transformers ignore those that they do not
know. So a batch of this package's collators runs in any model, under another mask than its own. `check_call` runs
before each forward of a transformers model (`patches.py`), whoever computes the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.backend.document_guard import is_guarded
from flashmask_hf.backend.keywords import cache_of
from flashmask_hf.backend.packed_rows import runs_packed
from flashmask_hf.backend.positions import document_starts, next_flagged
from flashmask_hf.checks import device_assert
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, PACKED_IDS, VECTORS

__all__ = ["check_adapters", "check_call", "check_document_numbers", "check_numbered_mask", "check_scales"]


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a model would ignore vectors that hide something from its tokens, or packed rows without a fallback.

    Nothing is read back from the device.

    Args:
        model: a transformers model.
        args: positional arguments of its call.
        kwargs: keywords of its call; without `startend_row_indices`, nothing is looked at.

    Raises:
        ValueError: the batch is that of packed rows, and no `run_packed` made the model take them. On models with
            another attention, batches whose `input_ids` are whole sequences run as such. Or the model's attention is
            another one, and the call has a part of the vectors' row. Or the model is a replica of
            `torch.nn.DataParallel`, with which Trainer scales the loss of a packed row wrongly. Or a model in training
            gets the labels of every path of a tree, and is not the one to compute the loss.
        RuntimeError: the model's attention is another one, and a token would see one that the vectors hide from it, or
            the other way round (a device-side check). Implementations of transformers find packed documents in
            `position_ids` that start again at 0, if there is neither a cache nor a mask.
    """
    vectors = kwargs.get(VECTORS)
    if not isinstance(vectors, Tensor):
        return
    if getattr(model, "_is_replica", False):
        raise ValueError(
            "torch.nn.DataParallel, which Trainer takes where one process sees several GPUs, splits a batch by rows; "
            "one packed row runs on one GPU, and Trainer would multiply its loss by the number of all; start a process "
            "for each GPU with accelerate launch or torchrun, or let this one see a single GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    shifted = kwargs.get("shift_labels")
    unread = isinstance(shifted, Tensor) and shifted.dim() == 3 and kwargs.get("labels") is None
    if unread and model.training and model.base_model is not model:  # a backbone has no loss
        raise ValueError(
            "shift_labels are those of every path of a tree, which only the model's loss takes "
            "(flashmask_hf.collators.tree_loss), but the call has no labels, as under label_smoothing_factor and in "
            "trainers that compute their own loss, which would learn nothing; use the plain Trainer without smoothing, "
            "or DataCollatorForTrees without per_path"
        )
    implementation = model.config.get_text_config()._attn_implementation
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return
    length = tokens.shape[1]
    if kwargs.get(PACKED_IDS) is not None:
        if not runs_packed(model) and (length == 1 or implementation in NAMES):
            raise ValueError(
                f"{PACKED_IDS} are packed rows, which this {type(model).__name__} would not run: take the trainer of "
                "the collator, SharedQuestionDPOTrainer or MultiAnswerRewardTrainer, or the collator of your trainer"
            )
        return
    if implementation in NAMES or vectors.dtype != torch.int32 or vectors.dim() != 4:
        return
    if vectors.shape[2] > length > 1:
        raise ValueError(
            f"{VECTORS} are those of a row of {vectors.shape[2]} tokens, of which the call has {length}, as under "
            f"context parallelism of torch and accelerate, and attn_implementation='{implementation}' ignores them, so "
            "that documents would mix; take flashmask_hf.trainers.PackedSFTTrainer with attention 'flashmask'"
        )
    if vectors.shape[2] != length:
        return
    ends = None
    if vectors.shape[3] == 1:
        ends = _ends_of_documents(model, kwargs, implementation, tokens)
    device_assert(
        ~_differs(vectors.detach(), ends, kwargs.get("attention_mask")).any(),
        f"{VECTORS} hide tokens, but attn_implementation='{implementation}' ignores them; load the model with "
        "attn_implementation='flashmask', or, for packed documents, pass position_ids, use_cache=False and no mask",
    )


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
        alone = _has_one_document(positions, kwargs.get("attention_mask"))
    elif isinstance(bounds, Tensor):
        alone = (bounds.diff() > 0).sum() <= 1
    elif isinstance(vectors, Tensor):
        alone = (vectors >= vectors.shape[2]).all()  # no key is hidden from later rows
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
        _has_one_document(position_ids, attention_mask),
        "Llama 4 scales queries by their place in the row from floor_scale tokens on, so that documents of a longer "
        "row would depend on those before them; keep rows of several documents under floor_scale tokens",
    )


def _has_one_document(position_ids: Tensor, attention_mask: Any) -> Tensor:
    """Return whether positions [B, S] start at most once in each row, hidden tokens apart; bool []."""
    starts = document_starts(position_ids)
    if isinstance(attention_mask, Tensor) and attention_mask.shape == starts.shape:
        starts = starts & attention_mask.to(torch.bool)
    return (starts.sum(-1) <= 1).all()


def _ends_of_documents(model: Any, kwargs: dict[str, Any], implementation: str, tokens: Tensor) -> Tensor:
    """Return where the document of each token ends for an attention of transformers, int64 [B or 1, S]."""
    batch, length = tokens.shape[:2]
    positions = kwargs.get("position_ids")
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(), "use_cache", False)
    alone = cache_of(kwargs) is None and kwargs.get("attention_mask") is None and not use_cache
    if "flash" in implementation and batch > 1:  # FlashAttention finds them in a single row
        alone = False
    if alone and isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == length:
        return next_flagged(positions[:, 1:] == 0)
    return torch.full((1, length), length, device=tokens.device)


def _differs(vectors: Tensor, ends: Tensor | None, attention_mask: Any) -> Tensor:
    """Return for which keys vectors show other rows of tokens than an attention that ignores them; bool [B, H, S].

    Args:
        vectors: int32 [B, H, S, n].
        ends: int64 [B or 1, S], one past the last row that the other attention shows each key, from the key's row on;
            None if it shows every key to all rows.
        attention_mask: a 2D mask [B, S], which hides keys in both; anything else is not looked at.
    """
    length = vectors.shape[2]
    mask = FlashMask(vectors, causal=ends is not None)
    pieces = [(start.long(), end.long()) for start, end in mask.visible_intervals(length)]
    real = torch.stack([start < end for start, end in pieces]).any(0)  # a key that none sees is padding
    counts = nn.functional.pad(real.cumsum(-1), (1, 0))

    def real_rows(start: Tensor, end: Tensor) -> Tensor:
        return counts.gather(-1, torch.maximum(start, end)) - counts.gather(-1, start)

    first = torch.zeros_like(pieces[0][0])
    last = first + length
    if ends is not None:
        first, last = first + torch.arange(length, device=vectors.device), first + ends[:, None]
    other = real_rows(first, last)
    shown, both = torch.zeros_like(other), torch.zeros_like(other)
    for start, end in pieces:
        shown += real_rows(start, end)
        both += real_rows(torch.maximum(start, first), torch.minimum(end, last))
    wrong = (shown != other) | (both != other)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[-1] == length:
        wrong = wrong & attention_mask[:, None].to(torch.bool)
    return wrong
