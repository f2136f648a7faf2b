"""Checks of model parts that treat a packed row as one document, and of unread boundaries.

PEFT's activated LoRA, the scales of Llama 4, ESM's token dropout and heads that predict once per row look at the whole
row.
"""

from __future__ import annotations

from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.checks.trees import has_one_document
from flashmask_hf.hf.rules import Rule, Verdict, rule
from flashmask_hf.names import PACKED_IDS

CHECKS: list[Rule] = []

_HEADS_OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")
"""The `loss_type` of models whose head predicts one class, reward or span per row."""

_LABELS_OF_ROWS = ("next_sentence_label", "sentence_order_label")
"""Arguments with one label per row, which `ForPreTraining` of BERT and ALBERT learns beside masked tokens."""


def _answers_once(call: Call) -> bool:
    if call.named.get(PACKED_IDS) is not None:  # the rows of `run_packed` have one answer each
        return False
    labels = any(call.named.get(name) is not None for name in _LABELS_OF_ROWS)
    if labels or call.name.endswith("ForNextSentencePrediction"):
        return True  # the loss_type of the latter is None
    return getattr(call.model, "loss_type", None) in _HEADS_OF_ROWS


def _has_other_documents(call: Call, numbers: Tensor, real: Tensor | None) -> Tensor:
    """Return whether numbers [B, S] change between two real tokens where no document starts by positions; bool []."""
    changes = numbers[:, 1:] != numbers[:, :-1]
    if real is not None:
        changes = changes & real[:, 1:] & real[:, :-1]
    if call.documents is not None and call.documents.starts.shape[1] == numbers.shape[1]:
        changes = changes & ~call.documents.starts[:, 1:]
    return changes.any()


@rule(CHECKS, "`cu_seq_lens_q` alone with an axis for the batch", "cu_seq_lens_q", ours=True)
def _has_flat_bounds(call: Call) -> Verdict | None:
    if call.tensor("cu_seq_lens_q", 1) is not None or call.indices is not None:
        return None
    bounds = call.named.get("cu_seq_lens_q")
    got = list(bounds.shape) if isinstance(bounds, Tensor) else type(bounds).__name__
    return False, (
        f"cu_seq_lens_q must be a tensor [documents + 1] of one row, got {got}; flatten the batch into one row "
        "(DataCollatorWithFlattening), or pass position_ids alone, which restart with each document"
    )


@rule(CHECKS, "packed rows for a head that predicts once per row", where=_answers_once)
def _is_one_answer(call: Call) -> Verdict:
    return has_one_document(call), (
        f"{call.name} reads one class, reward or span from a row, not from each document; pass one document per row "
        "(DataCollatorWithPadding), or take MultiAnswerRewardTrainer for rewards"
    )


@rule(
    CHECKS,
    "images in a model with cross-attention to them (Mllama)",
    "cross_attention_states",
    ours=True,
    config="cross_attention_layers",
    error=NotImplementedError,
)
def _has_no_cross_attention(call: Call) -> Verdict:
    return False, (
        f"{call.name} attends to images in layers of their own, whose mask {call.implementation!r} does not take; load "
        "with 'sdpa', or pass text alone"
    )


@rule(
    CHECKS,
    "images in a tower that pools them by a mask (SigLIP 2)",
    "pixel_attention_mask",
    ours=True,
    config="vision_use_head",
    error=NotImplementedError,
)
def _pools_no_images(call: Call) -> Verdict:
    return False, (
        f"{call.name} pools images in a layer that does not take masks of {call.implementation!r}; set "
        "vision_use_head=False, or load with {'text_config': 'flashmask', 'vision_config': 'sdpa'}"
    )


@rule(CHECKS, "`seq_idx` that marks documents which `position_ids` do not mark", "seq_idx", ours=True)
def _numbers_fit_positions(call: Call) -> Verdict | None:
    numbers = call.tensor("seq_idx", 2)
    is_read = call.indices is not None or call.named.get("cu_seq_lens_q") is not None or is_guarded(call.model)
    if numbers is None or is_read:
        return None
    return ~_has_other_documents(call, numbers, call.padding), (
        f"seq_idx numbers documents of a row, but the attention of {call.name} does not read it; pass position_ids "
        "that start again at 0 with each document"
    )


@rule(CHECKS, "activated LoRA on rows of several documents", ours=True, where=lambda call: call.has_activated_lora)
def _has_one_adapter(call: Call) -> Verdict:
    return has_one_document(call), (
        "PEFT looks for alora_invocation_tokens once per row, so only one of several packed documents would have the "
        "adapter; use LoRA without them, or batches of whole sequences"
    )


@rule(CHECKS, "masked tokens in packed rows of an ESM", "input_ids", ours=True, config="token_dropout")
def _has_one_scale(call: Call) -> Verdict | None:
    alone, masked = has_one_document(call), call.config.mask_token_id
    if alone is None or masked is None:
        return None
    return alone | (call.tokens != masked).all(), (
        f"{call.name} has token_dropout, which scales embeddings by the share of masked tokens in a row, not in each "
        "packed document. Pass one document per row."
    )


@rule(CHECKS, "a 2D `attention_mask` that numbers documents", "attention_mask", ours=True)
def _mask_numbers_nothing(call: Call) -> Verdict | None:
    mask = call.tensor("attention_mask", 2)
    if mask is None or call.tokens is None:
        return None
    return ~_has_other_documents(call, mask, mask > 0), (
        "attention_mask [B, S] numbers documents, which transformers reads as ones, so they would mix; pass "
        "position_ids that start again at 0 with each document, and a mask of ones and zeros, or none"
    )


@rule(CHECKS, "documents of Llama 4 in a row of `floor_scale` tokens", ours=True, config="attn_temperature_tuning")
def _has_one_temperature(call: Call) -> Verdict | None:
    if call.tokens is None or call.tokens.shape[1] < call.config.floor_scale:
        return None
    return has_one_document(call), (
        "Llama 4 scales queries by their place in the row from floor_scale tokens on, so documents would depend on "
        "those before them; keep rows of several documents under floor_scale tokens"
    )
