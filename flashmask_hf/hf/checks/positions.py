"""Positions of packed rows in models that embed them, such as GPT-2, BERT and RoBERTa.

Without `position_ids` these models number a row from end to end. Some count from `padding_idx + 1`, collators from 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.check import Check, Verdict, rule
from flashmask_hf.hf.checks.trees import follows_document, subtree_ends
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS

__all__ = ["CHECKS", "count_from_first", "counts_from_later"]

CHECKS: list[Check] = []


def _mask_of(call: Call) -> FlashMask | None:
    """Return the mask of the caller's indices, or None if their form does not fit."""
    indices = call.tensor(VECTORS, 4)
    if indices is None or indices.dtype != torch.int32 or indices.shape[3] not in (1, 2, 4):
        return None
    causal = not call.state.is_bidirectional and indices.shape[3] < 4
    return FlashMask(indices, causal) if causal or indices.shape[3] > 1 else None


def _seen(call: Call) -> Tensor | None:
    """Return which tokens of positions [B, S] any row sees under the mask indices; None if their lengths differ."""
    mask, positions = _mask_of(call), call.tensor("position_ids", 2)
    if mask is None or positions is None or mask.kv_len != positions.shape[1]:
        return None  # the first layer says what is wrong
    _, last = outer_rows(mask.visible_intervals(mask.kv_len), mask.kv_len)
    return (last > 0).any(1)


def counts_from_later(call: Call) -> bool:
    """Return whether a model that counts positions from a later number than 0 gets positions [B, S]."""
    return call.is_ours and bool(call.state.first_position) and call.tensor("position_ids", 2) is not None


def count_from_first(call: Call) -> dict[str, Any]:
    """Return the arguments with the model's first number added to positions if a seen token has 0."""
    seen, positions = _seen(call), call.named["position_ids"]
    if seen is None:
        return call.named
    first = torch.where((seen & (positions == 0)).any(), call.state.first_position, 0)
    return call.named | {"position_ids": positions + first}


def _lacks_positions(call: Call) -> bool:
    return call.is_ours and call.state.first_position is not None and call.get("position_ids") is None


@rule(
    CHECKS,
    "mask indices of documents without positions, in a model that embeds positions (GPT-2, BERT)",
    parts=True,
)
def _mask_has_one_document(call: Call) -> Verdict:
    if call.indices is None or not _lacks_positions(call) or call.config.is_encoder_decoder:
        return None
    mask = _mask_of(call)
    if mask is None:
        return None
    return ~follows_document(subtree_ends(mask)).any(), (
        f"{call.name} embeds positions, and would number several documents of {VECTORS} from end to end without "
        "position_ids; pass positions that start again with each document"
    )


@rule(CHECKS, "`cu_seq_lens_q` without `position_ids` in a model that embeds positions", parts=True)
def _bounds_have_one_document(call: Call) -> Verdict:
    bounds = call.tensor("cu_seq_lens_q")
    if bounds is None or call.indices is not None or not _lacks_positions(call):
        return None
    return (bounds.diff() > 0).sum() <= 1, (
        f"{call.name} embeds positions, and would number the documents of cu_seq_lens_q from end to end without "
        "position_ids; pass positions that start again with each document"
    )


@rule(
    CHECKS,
    "rows split over ranks in a RoBERTa, which counts positions from `padding_idx + 1`",
    NotImplementedError,
    parts=True,
)
def _is_not_split(call: Call) -> Verdict:
    mask = _mask_of(call) if counts_from_later(call) else None
    if mask is None:
        return None
    return mask.kv_len <= call.named["position_ids"].shape[1], (
        f"{call.name} counts positions from {call.state.first_position}, which is not implemented for rows that are "
        "split over ranks; use a model whose positions start at 0"
    )


@rule(CHECKS, "packed rows for a RoBERTa with positions of padding", parts=True)
def _seen_count_from_first(call: Call) -> Verdict:
    seen = _seen(call) if counts_from_later(call) else None
    if seen is None:
        return None
    first = call.state.first_position
    return ~(seen & (call.named["position_ids"] < first)).any(), (
        f"position_ids of {call.name} must count from {first} in every document, as the lower ones are padding's, or "
        "from 0"
    )


@rule(CHECKS, "packed rows for a RoBERTa with positions from 0 and no mask indices", parts=True)
def _restarts_at_padding(call: Call) -> Verdict:
    if call.indices is not None or not counts_from_later(call):
        return None
    call.reads += 1  # so that positions of padding are not taken for documents that nothing reads
    positions = call.named["position_ids"]
    before, start, after = positions[:, :-2], positions[:, 1:-1], positions[:, 2:]
    return ~((before > 0) & (start == 0) & (after == 1)).any(), (
        f"position_ids start again at 0, but {call.name} counts positions from {call.state.first_position}, and 0 is "
        f"padding; pass {VECTORS} with them, as the collators do"
    )


@rule(CHECKS, "packed rows for a RoBERTa with positions from `padding_idx + 1` and no mask indices", parts=True)
def _counts_once(call: Call) -> Verdict:
    if call.indices is not None or not counts_from_later(call) or call.get("cu_seq_lens_q") is not None:
        return None
    positions, first, shown = call.named["position_ids"], call.state.first_position, call.get("attention_mask")
    starts = (positions[:, :-1] > first) & (positions[:, 1:] == first)
    if isinstance(shown, Tensor) and shown.shape == positions.shape:
        starts = starts & shown[:, 1:].to(torch.bool)
    return ~starts.any(), (
        f"position_ids start again at {first} in one row, but {call.name} does not hand them to its masks, so its "
        f"documents would see each other; pass {VECTORS} with them"
    )
