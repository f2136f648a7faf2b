"""Checks of calls whose mask indices, or packed rows, the model would ignore.

Every keyword of a call reaches the layers, and attention implementations of transformers ignore unknown keywords. So a
batch of this package's collators runs in any model, under another mask than its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.hf.call import Call, cache_of
from flashmask_hf.hf.checks.check import Check
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.documents import next_flagged
from flashmask_hf.hf.facts import is_split_by_torch
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.keywords import context_parallel_message
from flashmask_hf.hf.models import is_compiled, state_of
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, PACKED_IDS, VECTORS

__all__ = ["CHECKS", "EVERY_LAYER", "differs", "hides_more"]


def hides_more(indices: Tensor, attention_mask: Any) -> Tensor:
    """Return for which keys mask indices hide rows that see them in a row of one document; bool [B, H, S].

    Args:
        indices: int32 [B, H, S, n], causal for n = 1.
        attention_mask: a 2D mask [B, S], which hides keys anyway; anything else is ignored.
    """
    length = indices.shape[2]
    ends = torch.full((1, length), length, device=indices.device) if indices.shape[3] == 1 else None
    return differs(indices.detach(), ends, attention_mask)


def differs(indices: Tensor, ends: Tensor | None, attention_mask: Any) -> Tensor:
    """Return for which keys mask indices show other rows of tokens than an attention that ignores them.

    Args:
        indices: int32 [B, H, S, n].
        ends: int64 [B or 1, S], one past the last row that the other attention shows each key, from the key's row on;
            None if it shows every key to all rows.
        attention_mask: a 2D mask [B, S], which hides keys in both; anything else is ignored.

    Returns:
        Tensor: bool [B, H, S].
    """
    length = indices.shape[2]
    mask = FlashMask(indices, causal=ends is not None)
    pieces = [(start.long(), end.long()) for start, end in mask.visible_intervals(length)]
    real = outer_rows(pieces, length)[1] > 0  # a key that no row sees is padding
    counts = nn.functional.pad(real.cumsum(-1), (1, 0))

    def real_rows(start: Tensor, end: Tensor) -> Tensor:
        return counts.gather(-1, torch.maximum(start, end)) - counts.gather(-1, start)

    first = torch.zeros_like(pieces[0][0])
    last = first + length
    if ends is not None:
        first, last = first + torch.arange(length, device=indices.device), first + ends[:, None]
    # Of the two sets of rows one holds the other: both begin at the key's row, or the other attention shows all rows.
    wrong = torch.stack([real_rows(start, end) for start, end in pieces]).sum(0) != real_rows(first, last)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[-1] == length:
        wrong = wrong & attention_mask[:, None].to(torch.bool)
    return wrong


def _text_implementation(call: Call) -> str:
    """Return the attention that the mask indices are for: the text model's."""
    return call.config.get_text_config()._attn_implementation


def _is_ignored(call: Call) -> bool:
    """Return whether mask indices [B, H, S, n] come to another attention, which is not about to get packed rows."""
    indices = call.tensor(VECTORS, 4)
    if indices is None or call.tokens is None or call.get(PACKED_IDS) is not None or indices.dtype != torch.int32:
        return False
    return _text_implementation(call) not in NAMES


def _is_same_mask(call: Call) -> Tensor | None:
    indices = call.named[VECTORS]
    if indices.shape[2] != call.tokens.shape[1]:
        return None
    ends = _ends_of_documents(call) if indices.shape[3] == 1 else None
    return ~differs(indices.detach(), ends, call.get("attention_mask")).any()


def _ends_of_documents(call: Call) -> Tensor:
    """Return where the document of each token ends for an attention of transformers, int64 [B or 1, S].

    It finds documents in `position_ids` that start again at 0, if there is neither a cache nor a mask.
    """
    batch, length = call.tokens.shape[:2]
    positions, use_cache = call.tensor("position_ids", 2), call.get("use_cache")
    if use_cache is None:
        use_cache = getattr(call.config.get_text_config(), "use_cache", False)
    alone = cache_of(call.named) is None and call.get("attention_mask") is None and not use_cache
    if "flash" in _text_implementation(call) and batch > 1:  # FlashAttention finds them in a single row
        alone = False
    if alone and positions is not None and positions.shape[1] == length:
        return next_flagged(positions[:, 1:] == 0)
    return torch.full((1, length), length, device=call.tokens.device)


def _ignores_message(call: Call) -> str:
    one = call.named[VECTORS].shape[3] == 1
    way_out = "or, for packed documents, pass position_ids, use_cache=False and no mask"
    return (
        f"{VECTORS} hide tokens, but attn_implementation='{_text_implementation(call)}' ignores them; load it with "
        f"'flashmask', {way_out if one else 'or pass one document per row'}"
    )


def _runs_packed(call: Call) -> bool:
    if state_of(call.model.base_model).takes_packed_rows:
        return True
    return call.tokens.shape[1] > 1 and _text_implementation(call) not in NAMES  # runs the whole sequences


def marks_documents(call: Call) -> bool:
    """Return whether a call has mask indices, or positions of whole rows, that its attention must read."""
    indices = call.indices
    if indices is None:
        mask = call.get("attention_mask")
        flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)  # masks of a static cache are made before
        return call.is_ours and flat and call.tensor("position_ids", 2) is not None
    if call.get(PACKED_IDS) is not None or call.tensor(VECTORS, 4) is None or call.tokens is None:
        return False
    name = _text_implementation(call)
    if "flash" in name and name not in NAMES:
        return False
    known = name in NAMES or indices.shape[3] == 1  # others are refused where they hide anything
    return known and indices.shape[2] == call.tokens.shape[1]


def _is_unread(call: Call) -> bool:
    if call.reads or torch.compiler.is_compiling() or (call.outer is not None and marks_documents(call.outer)):
        return False
    return marks_documents(call) and not is_compiled(call.model)


def _has_one_document(call: Call) -> Tensor | None:
    mask = call.get("attention_mask")
    if call.indices is not None:
        return ~hides_more(call.indices, mask).any()
    return None if call.documents is None else call.documents.is_one_per_row()


def _unread_message(call: Call) -> str:
    name = type(call.model).__name__
    if call.indices is None:
        return (
            f"{name} hands position_ids neither to its masks nor to its attention, so that documents of a row would "
            f"see each other; pass {VECTORS} with them"
        )
    implementation = _text_implementation(call)
    if implementation in NAMES:
        return f"{name} never calls its attention by name, so that it ignores {VECTORS}; pass one document per row"
    return (
        f"{name} makes its masks without position_ids, so documents of a row mix with "
        f"attn_implementation='{implementation}'; load it with 'flashmask', or pass one document per row"
    )


def _layers(call: Call) -> int:
    return call.config.get_text_config().num_hidden_layers


def _every_layer_got_it(call: Call) -> bool:
    call.state.is_counted = call.supplied >= _layers(call) or is_guarded(call.model)  # others get no mask
    return call.state.is_counted


EVERY_LAYER = Check(
    "packed rows in a trainer, in a model some of whose layers get no mask",
    lambda call: (
        call.indices is not None
        and call.state.counts_layers
        and not call.state.is_counted
        and not torch.compiler.is_compiling()
        and not is_compiled(call.model)
    ),
    _every_layer_got_it,
    lambda call: (
        f"{type(call.model).__name__} gave the packed row's mask to {call.supplied} of its {_layers(call)} layers; "
        "in the others documents or answers would see each other: use TRL's own trainer"
    ),
    parts=True,
    after=True,
)

CHECKS = (
    Check(
        "a `FlashMask` as `attention_mask`",
        lambda call: isinstance(call.get("attention_mask"), FlashMask),
        lambda _: False,
        lambda _: (
            f"attention_mask is a FlashMask, which transformers does not take; pass {VECTORS}=mask.indices if the "
            f"model and the mask are causal, else mask.bidirectional().indices, and no attention_mask"
        ),
        TypeError,
    ),
    Check(
        "context parallelism of torch or accelerate",
        lambda call: call.is_ours and is_split_by_torch(),
        lambda _: False,
        lambda call: context_parallel_message(call.implementation),
        NotImplementedError,
    ),
    Check(
        "one process that sees several GPUs, so that Trainer takes `DataParallel`",
        lambda call: call.indices is not None,
        lambda call: not getattr(call.model, "_is_replica", False),
        lambda _: (
            "torch.nn.DataParallel splits a batch by rows, so it cannot run one packed row on several GPUs; start a "
            "process per GPU with accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES=0"
        ),
    ),
    Check(
        "batches of the preference and reward collators in stock TRL",
        lambda call: call.tensor(VECTORS) is not None and call.get(PACKED_IDS) is not None and call.tokens is not None,
        _runs_packed,
        lambda call: (
            f"{PACKED_IDS} are packed rows, which this {type(call.model).__name__} would not run: take the trainer of "
            "the collator (SharedQuestionDPOTrainer, MultiAnswerRewardTrainer) or another collator"
        ),
    ),
    Check(
        "mask indices for AIMv2's text tower, which drops them",
        lambda call: call.is_ours and call.indices is not None and family_of(call.config).drops_indices,
        lambda _: False,
        lambda call: (
            f"models of type {call.config.model_type!r} keep keywords from their layers, so {VECTORS} would be ignored "
            "without a word; pass a 2D attention_mask and one document per row"
        ),
        NotImplementedError,
        parts=True,
    ),
    Check(
        "mask indices of a longer row under another attention, as with context parallelism",
        _is_ignored,
        lambda call: call.tokens.shape[1] == 1 or call.named[VECTORS].shape[2] <= call.tokens.shape[1],
        lambda call: (
            f"{VECTORS} are of a row of {call.named[VECTORS].shape[2]} tokens, of which the call has "
            f"{call.tokens.shape[1]}, and attn_implementation='{_text_implementation(call)}' ignores them; take "
            "PackedSFTTrainer with 'flashmask'"
        ),
    ),
    Check(
        "packed rows under another attention, without positions or with a cache",
        _is_ignored,
        _is_same_mask,
        _ignores_message,
    ),
    Check(
        "document boundaries that no mask and no layer of the model reads",
        _is_unread,
        _has_one_document,
        _unread_message,
        after=True,
    ),
    EVERY_LAYER,
)
