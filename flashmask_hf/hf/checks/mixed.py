"""Checks of model parts other than attention that treat a packed row as one document, and of unread boundaries.

The mask keeps documents apart in the attention alone. PEFT's activated LoRA, the scales and chunks of Llama 4, ESM's
token dropout and heads that predict once per row look at the whole row, without an error. `seq_idx` and numbers in a 2D
mask mark documents that attention does not read.
"""

from __future__ import annotations

import transformers
from packaging.version import Version
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.check import Check
from flashmask_hf.hf.checks.ignored import hides_more
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.documents import has_one_document
from flashmask_hf.hf.facts import answers_once_per_row
from flashmask_hf.names import PACKED_IDS, VECTORS

__all__ = ["CHECKS"]

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


def _answers_once(call: Call) -> bool:
    if call.get(PACKED_IDS) is not None:  # the rows of `run_packed` have one answer each
        return False
    return answers_once_per_row(call.model) or any(call.get(name) is not None for name in _LABELS_OF_ROWS)


def _has_activated_adapter(call: Call) -> bool:
    adapters = getattr(call.model, "peft_config", {}).values()
    return call.is_ours and any(getattr(config, "alora_invocation_tokens", None) for config in adapters)


def _drops_tokens(call: Call) -> bool:
    config, tokens = call.config, call.tensor("input_ids", 2)
    return call.is_ours and getattr(config, "token_dropout", False) and tokens is not None and _masked(call) is not None


def _masked(call: Call) -> int | None:
    return getattr(call.config, "mask_token_id", None)


def _is_alone_or_unmasked(call: Call) -> Tensor | None:
    alone = _is_alone_or_whole(call)
    return None if alone is None else alone | (call.named["input_ids"] != _masked(call)).all()


def _reaches(call: Call, limit: str, slack: int = 0) -> bool:
    """Return whether positions are of a row of at least as many tokens as an integer of the config, plus `slack`."""
    found, positions = getattr(call.config, limit, None), call.tensor("position_ids", 2)
    return call.is_ours and found is not None and positions is not None and positions.shape[1] >= found + slack


def _is_alone_by_positions(call: Call) -> Tensor:
    return has_one_document(call.named["position_ids"], call.get("attention_mask"))


def _has_stacked_bounds(call: Call) -> bool:
    return call.is_ours and call.indices is None and call.get("cu_seq_lens_q") is not None


def _reads_no_numbers(call: Call) -> bool:
    """Return whether `seq_idx` comes to attention alone, without mask indices and bounds."""
    if not call.is_ours or call.indices is not None or call.get("cu_seq_lens_q") is not None:
        return False
    return call.tensor("seq_idx", 2) is not None and not is_guarded(call.model)


def _numbers_fit_positions(call: Call) -> Tensor | None:
    numbers, positions, mask = call.named["seq_idx"], call.get("position_ids"), call.get("attention_mask")
    changes = numbers[:, 1:] != numbers[:, :-1]
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != numbers.shape[1]:
            return None
        changes = changes & (positions[:, 1:] != 0)
        if isinstance(mask, Tensor) and mask.shape == numbers.shape:
            changes = changes & (mask[:, 1:] > 0) & (mask[:, :-1] > 0)
    return ~changes.any()


def _mask_numbers_nothing(call: Call) -> Tensor:
    """Return False if the number in a 2D mask changes between two tokens, and no position of 0 follows; bool []."""
    mask, positions = call.named["attention_mask"], call.get("position_ids")
    before, after = mask[:, :-1], mask[:, 1:]
    mixed = (before > 0) & (after > 0) & (before != after)
    if isinstance(positions, Tensor) and positions.shape[-1] == mask.shape[1]:
        mixed = mixed & (positions[..., 1:] != 0)
    return ~mixed.any()


def _bounds_message(call: Call) -> str:
    bounds = call.named["cu_seq_lens_q"]
    got = list(bounds.shape) if isinstance(bounds, Tensor) else type(bounds).__name__
    return (
        f"cu_seq_lens_q must be a tensor [documents + 1] of one row, got {got}; flatten the batch into one row "
        "(DataCollatorWithFlattening), or pass position_ids alone, which restart with each document"
    )


CHECKS = (
    Check(
        "`cu_seq_lens_q` alone with an axis for the batch, as of a collator that stacks a column",
        _has_stacked_bounds,
        lambda call: call.tensor("cu_seq_lens_q", 1) is not None,
        _bounds_message,
    ),
    Check(
        "packed rows for a head that predicts one class, reward, span or pair of sentences per row",
        _answers_once,
        _is_alone,
        lambda call: (
            f"{type(call.model).__name__} reads one class, reward or span from a row, not from each document; pass "
            "one document per row (DataCollatorWithPadding), or take MultiAnswerRewardTrainer for rewards"
        ),
    ),
    Check(
        "`seq_idx` that marks documents which `position_ids` do not mark, in a model of attention",
        _reads_no_numbers,
        _numbers_fit_positions,
        lambda call: (
            f"seq_idx numbers documents of a row, but the attention of {type(call.model).__name__} does not read it; "
            "pass position_ids that start again at 0 with each document"
        ),
    ),
    Check(
        "activated LoRA on rows of several documents, in any trainer",
        _has_activated_adapter,
        _is_alone_or_whole,
        lambda _: (
            "PEFT looks for alora_invocation_tokens once per row, so only one of several packed documents would have "
            "the adapter; use LoRA without them, or batches of whole sequences"
        ),
    ),
    Check(
        "masked tokens in packed rows of an ESM with `token_dropout`, which scales by their share of the row",
        _drops_tokens,
        _is_alone_or_unmasked,
        lambda call: (
            f"{type(call.model).__name__} has token_dropout, which scales embeddings by the share of masked tokens in "
            "a row, not in each packed document. Pass one document per row."
        ),
    ),
    Check(
        "a 2D `attention_mask` that numbers documents, which no `position_ids` mark",
        lambda call: call.is_ours and call.tensor("attention_mask", 2) is not None and call.tokens is not None,
        _mask_numbers_nothing,
        lambda _: (
            "attention_mask [B, S] numbers documents, which transformers reads as ones, so they would mix; pass "
            "position_ids that start again at 0 with each document, and a mask of ones and zeros, or none"
        ),
    ),
    Check(
        "documents of Llama 4 in a row of `floor_scale` tokens or more, whose queries it scales by their place in it",
        lambda call: getattr(call.config, "attn_temperature_tuning", False) and _reaches(call, "floor_scale"),
        _is_alone_by_positions,
        lambda _: (
            "Llama 4 scales queries by their place in the row from floor_scale tokens on, so documents would depend "
            "on those before them; keep rows of several documents under floor_scale tokens"
        ),
    ),
    Check(
        "packed rows longer than the attention chunks of Llama 4, before transformers 5.23",
        lambda call: _reaches(call, "attention_chunk_size", 1) and Version(transformers.__version__) < Version("5.23"),
        _is_alone_by_positions,
        lambda _: (
            "rows of several documents must not exceed attention_chunk_size before transformers 5.23, which counts "
            "chunks from the row's start. Install transformers 5.23, or pass shorter rows."
        ),
    ),
)
