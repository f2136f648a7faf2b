"""Checks of model parts that treat a packed row as one document, and of unread boundaries.

PEFT's activated LoRA, the scales and chunks of Llama 4, ESM's token dropout and heads that predict once per row look at
the whole row. `seq_idx` and numbers in a 2D mask mark documents that attention does not read.
"""

from __future__ import annotations

import transformers
from packaging.version import Version
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.check import Check, Verdict, rule
from flashmask_hf.hf.checks.ignored import hides_more
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.documents import has_one_document
from flashmask_hf.hf.facts import answers_once_per_row
from flashmask_hf.names import PACKED_IDS, VECTORS

__all__ = ["CHECKS"]

CHECKS: list[Check] = []

_LABELS_OF_ROWS = ("next_sentence_label", "sentence_order_label")
"""Arguments with one label per row, which `ForPreTraining` of BERT and ALBERT learns beside masked tokens."""


def _is_alone(call: Call) -> Tensor | None:
    """Return whether a call has at most one document per row, bool []; None if it has no document boundaries.

    Padding of the mask indices, whose positions are 0, starts no document.
    """
    positions, indices, mask = call.positions, call.tensor(VECTORS, 4), call.get("attention_mask")
    if positions is None or indices is None or mask is not None or call.bounds is not None:
        return None if call.documents is None else call.documents.is_one_per_row()
    return has_one_document(positions, (indices[:, 0] > 0).any(-1))


def _is_alone_or_whole(call: Call) -> Tensor | None:
    """Return `_is_alone`, or whether mask indices without positions hide nothing."""
    alone, indices = _is_alone(call), call.tensor(VECTORS, 4)
    return alone if alone is not None or indices is None else ~hides_more(indices, None).any()


@rule(CHECKS, "`cu_seq_lens_q` alone with an axis for the batch, as of a collator that stacks a column")
def _has_flat_bounds(call: Call) -> Verdict:
    bounds = call.get("cu_seq_lens_q")
    is_flat = bounds is None or call.tensor("cu_seq_lens_q", 1) is not None
    if not call.is_ours or call.indices is not None or is_flat:
        return None
    got = list(bounds.shape) if isinstance(bounds, Tensor) else type(bounds).__name__
    return False, (
        f"cu_seq_lens_q must be a tensor [documents + 1] of one row, got {got}; flatten the batch into one row "
        "(DataCollatorWithFlattening), or pass position_ids alone, which restart with each document"
    )


@rule(CHECKS, "packed rows for a head that predicts one class, reward, span or pair of sentences per row")
def _is_one_answer(call: Call) -> Verdict:
    once = answers_once_per_row(call.model) or any(call.get(name) is not None for name in _LABELS_OF_ROWS)
    if not once or call.get(PACKED_IDS) is not None:  # the rows of `run_packed` have one answer each
        return None
    return _is_alone(call), (
        f"{call.name} reads one class, reward or span from a row, not from each document; pass one document per row "
        "(DataCollatorWithPadding), or take MultiAnswerRewardTrainer for rewards"
    )


@rule(CHECKS, "`seq_idx` that marks documents which `position_ids` do not mark, in a model of attention")
def _numbers_fit_positions(call: Call) -> Verdict:
    numbers, positions, mask = call.tensor("seq_idx", 2), call.get("position_ids"), call.get("attention_mask")
    if not call.is_ours or call.indices is not None or call.get("cu_seq_lens_q") is not None:
        return None
    if numbers is None or is_guarded(call.model):
        return None
    changes = numbers[:, 1:] != numbers[:, :-1]
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != numbers.shape[1]:
            return None
        changes = changes & (positions[:, 1:] != 0)
        if isinstance(mask, Tensor) and mask.shape == numbers.shape:
            changes = changes & (mask[:, 1:] > 0) & (mask[:, :-1] > 0)
    return ~changes.any(), (
        f"seq_idx numbers documents of a row, but the attention of {call.name} does not read it; pass position_ids "
        "that start again at 0 with each document"
    )


@rule(CHECKS, "activated LoRA on rows of several documents, in any trainer")
def _has_one_adapter(call: Call) -> Verdict:
    adapters = getattr(call.model, "peft_config", {}).values()
    if not call.is_ours or not any(getattr(config, "alora_invocation_tokens", None) for config in adapters):
        return None
    return _is_alone_or_whole(call), (
        "PEFT looks for alora_invocation_tokens once per row, so only one of several packed documents would have the "
        "adapter; use LoRA without them, or batches of whole sequences"
    )


@rule(CHECKS, "masked tokens in packed rows of an ESM with `token_dropout`, which scales by their share of the row")
def _has_one_scale(call: Call) -> Verdict:
    tokens, masked = call.tensor("input_ids", 2), getattr(call.config, "mask_token_id", None)
    if not call.is_ours or not getattr(call.config, "token_dropout", False) or tokens is None or masked is None:
        return None
    alone = _is_alone_or_whole(call)
    if alone is None:
        return None
    return alone | (tokens != masked).all(), (
        f"{call.name} has token_dropout, which scales embeddings by the share of masked tokens in a row, not in each "
        "packed document. Pass one document per row."
    )


@rule(CHECKS, "a 2D `attention_mask` that numbers documents, which no `position_ids` mark")
def _mask_numbers_nothing(call: Call) -> Verdict:
    mask, positions = call.tensor("attention_mask", 2), call.get("position_ids")
    if not call.is_ours or mask is None or call.tokens is None:
        return None
    before, after = mask[:, :-1], mask[:, 1:]
    mixed = (before > 0) & (after > 0) & (before != after)
    if isinstance(positions, Tensor) and positions.shape[-1] == mask.shape[1]:
        mixed = mixed & (positions[..., 1:] != 0)
    return ~mixed.any(), (
        "attention_mask [B, S] numbers documents, which transformers reads as ones, so they would mix; pass "
        "position_ids that start again at 0 with each document, and a mask of ones and zeros, or none"
    )


def _is_alone_from(call: Call, tokens: int | None) -> Tensor | None:
    """Return whether rows of at least `tokens` tokens have one document by their positions; None for shorter rows."""
    positions = call.tensor("position_ids", 2)
    if not call.is_ours or tokens is None or positions is None or positions.shape[1] < tokens:
        return None
    return has_one_document(positions, call.get("attention_mask"))


@rule(
    CHECKS,
    "documents of Llama 4 in a row of `floor_scale` tokens or more, whose queries it scales by their place in it",
)
def _has_one_temperature(call: Call) -> Verdict:
    if not getattr(call.config, "attn_temperature_tuning", False):
        return None
    return _is_alone_from(call, getattr(call.config, "floor_scale", None)), (
        "Llama 4 scales queries by their place in the row from floor_scale tokens on, so documents would depend on "
        "those before them; keep rows of several documents under floor_scale tokens"
    )


@rule(CHECKS, "packed rows longer than the attention chunks of Llama 4, before transformers 5.23")
def _fits_chunk(call: Call) -> Verdict:
    chunk = getattr(call.config, "attention_chunk_size", None)
    if chunk is None or Version(transformers.__version__) >= Version("5.23"):
        return None
    return _is_alone_from(call, chunk + 1), (
        "rows of several documents must not exceed attention_chunk_size before transformers 5.23, which counts chunks "
        "from the row's start. Install transformers 5.23, or pass shorter rows."
    )
