"""Calls of models that would ignore the mask vectors or the packed rows of a batch.

Every keyword of a call reaches the layers, and attention implementations of transformers ignore those that they do not
know. So a batch of this package's collators runs in any model, under another mask than its own. `check_call` runs
before each forward of a transformers model (`patches.py`), whoever computes the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.hf.documents import next_flagged
from flashmask_hf.hf.model_hooks import cache_of, tokens_of
from flashmask_hf.hf.packed.rows import runs_packed
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, PACKED_IDS, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["check_call", "hides_more"]


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
    _refuse_replica(model)
    _refuse_labels_of_paths(model, kwargs)
    tokens = tokens_of(args, kwargs)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return
    implementation = model.config.get_text_config()._attn_implementation
    reads_vectors = implementation in NAMES
    if kwargs.get(PACKED_IDS) is not None:
        if not runs_packed(model) and (tokens.shape[1] == 1 or reads_vectors):
            raise ValueError(
                f"{PACKED_IDS} are packed rows, which this {type(model).__name__} would not run: take the trainer of "
                "the collator, SharedQuestionDPOTrainer or MultiAnswerRewardTrainer, or the collator of your trainer"
            )
    elif not reads_vectors and vectors.dtype == torch.int32 and vectors.dim() == 4:
        _refuse_other_documents(model, kwargs, implementation, tokens, vectors)


def _refuse_replica(model: Any) -> None:
    """Raise for a replica of DataParallel."""
    if getattr(model, "_is_replica", False):
        raise ValueError(
            "torch.nn.DataParallel, which Trainer takes where one process sees several GPUs, splits a batch by rows; "
            "one packed row runs on one GPU, and Trainer would multiply its loss by the number of all; start a process "
            "for each GPU with accelerate launch or torchrun, or let this one see a single GPU (CUDA_VISIBLE_DEVICES=0)"
        )


def _refuse_labels_of_paths(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise if a model in training has the labels of every path of a tree, and another loss than its own."""
    shifted = kwargs.get("shift_labels")
    if not isinstance(shifted, Tensor) or shifted.dim() != 3:
        return
    of_another = (  # the trainer's, or that of a fused head of TRL or Liger
        kwargs.get("labels") is None
        or kwargs.get("fused_lm_head")
        or getattr(model.forward, "__module__", "").startswith("liger_kernel.")
    )
    if of_another and model.training and model.base_model is not model:  # a backbone has no loss
        raise ValueError(
            "shift_labels are those of every path of a tree, which only the model's loss takes "
            "(flashmask_hf.collators.tree_loss), but here the trainer computes its own, as under "
            "label_smoothing_factor, use_liger_kernel and in TRL's trainers; use the plain Trainer without smoothing "
            "and with liger_kernel_config={'fused_linear_cross_entropy': False}, or DataCollatorForTrees without "
            "per_path"
        )


def _refuse_other_documents(
    model: Any, kwargs: dict[str, Any], implementation: str, tokens: Tensor, vectors: Tensor
) -> None:
    """Raise if an attention of transformers shows other tokens than int32 vectors [B, H, S, n], or some are missing."""
    length = tokens.shape[1]
    if vectors.shape[2] > length > 1:
        raise ValueError(
            f"{VECTORS} are those of a row of {vectors.shape[2]} tokens, of which the call has {length}, as under "
            f"context parallelism of torch and accelerate, and attn_implementation='{implementation}' ignores them, so "
            "that documents would mix; take flashmask_hf.trainers.PackedSFTTrainer with attention 'flashmask'"
        )
    if vectors.shape[2] != length:
        return
    ends, way_out = None, "or pass one document a row"
    if vectors.shape[3] == 1:
        ends = _ends_of_documents(model, kwargs, implementation, tokens)
        way_out = "or, for packed documents, pass position_ids, use_cache=False and no mask"
    device_assert(
        ~_differs(vectors.detach(), ends, kwargs.get("attention_mask")).any(),
        f"{VECTORS} hide tokens, but attn_implementation='{implementation}' ignores them; load it with "
        f"'flashmask', {way_out}",
    )


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


def hides_more(vectors: Tensor, attention_mask: Any) -> Tensor:
    """Return for which keys vectors hide rows that see them in a row of one document; bool [B, H, S].

    Args:
        vectors: int32 [B, H, S, n], causal for n = 1.
        attention_mask: a 2D mask [B, S], which hides keys anyway; anything else is not looked at.
    """
    length = vectors.shape[2]
    ends = torch.full((1, length), length, device=vectors.device) if vectors.shape[3] == 1 else None
    return _differs(vectors.detach(), ends, attention_mask)


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
    real = outer_rows(pieces, length)[1] > 0  # a key that no row sees is padding
    counts = nn.functional.pad(real.cumsum(-1), (1, 0))

    def real_rows(start: Tensor, end: Tensor) -> Tensor:
        return counts.gather(-1, torch.maximum(start, end)) - counts.gather(-1, start)

    first = torch.zeros_like(pieces[0][0])
    last = first + length
    if ends is not None:
        first, last = first + torch.arange(length, device=vectors.device), first + ends[:, None]
    # Of the two sets of rows one holds the other: both begin at the key's row, or the other attention shows all rows.
    wrong = torch.stack([real_rows(start, end) for start, end in pieces]).sum(0) != real_rows(first, last)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[-1] == length:
        wrong = wrong & attention_mask[:, None].to(torch.bool)
    return wrong
