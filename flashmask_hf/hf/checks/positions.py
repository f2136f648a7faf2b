"""Position numbers of packed rows in models that embed positions, such as GPT-2, BERT and RoBERTa.

Without `position_ids` these models number a row from end to end, so a packed document would have other embeddings than
alone, without an error. Some, such as RoBERTa, count from `padding_idx + 1`, and give the numbers up to `padding_idx`
to padding, while collators count the tokens of a document from 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.check import Check
from flashmask_hf.hf.checks.trees import follows_document, subtree_ends
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS

__all__ = ["CHECKS", "count_from_first", "counts_from_later"]


def _mask_of(call: Call) -> FlashMask | None:
    """Return the mask of the caller's indices, or None if they have no form that the model's layers take."""
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
    """Return the arguments with positions that count from the model's first number.

    It is added if a token that is seen has position 0, which no token of these models has.
    """
    seen, positions = _seen(call), call.named["position_ids"]
    if seen is None:
        return call.named
    first = torch.where((seen & (positions == 0)).any(), call.state.first_position, 0)
    return call.named | {"position_ids": positions + first}


def _has_no_positions(call: Call) -> bool:
    return call.is_ours and call.state.first_position is not None and call.get("position_ids") is None


def _mask_has_one_document(call: Call) -> Tensor | None:
    mask = _mask_of(call)
    return None if mask is None else ~follows_document(subtree_ends(mask)).any()


def _is_not_split(call: Call) -> bool:
    mask = _mask_of(call)
    return mask is None or mask.kv_len <= call.named["position_ids"].shape[1]


def _seen_count_from_first(call: Call) -> Tensor | None:
    seen = _seen(call)
    return None if seen is None else ~(seen & (call.named["position_ids"] < call.state.first_position)).any()


def _has_plain_positions(call: Call) -> bool:
    return counts_from_later(call) and call.indices is None


def _restarts_at_padding(call: Call) -> Tensor:
    call.reads += 1  # so that positions of padding are not taken for documents that nothing reads
    positions = call.named["position_ids"]
    before, start, after = positions[:, :-2], positions[:, 1:-1], positions[:, 2:]
    return ~((before > 0) & (start == 0) & (after == 1)).any()


def _counts_once(call: Call) -> Tensor:
    positions, first, shown = call.named["position_ids"], call.state.first_position, call.get("attention_mask")
    starts = (positions[:, :-1] > first) & (positions[:, 1:] == first)
    if isinstance(shown, Tensor) and shown.shape == positions.shape:
        starts = starts & shown[:, 1:].to(torch.bool)
    return ~starts.any()


CHECKS = (
    Check(
        "mask indices of documents without positions, in a model that embeds positions (GPT-2, BERT)",
        lambda call: _has_no_positions(call) and call.indices is not None and not call.config.is_encoder_decoder,
        _mask_has_one_document,
        lambda call: (
            f"{type(call.model).__name__} embeds positions, and would number several documents of {VECTORS} from end "
            "to end without position_ids; pass positions that start again with each document"
        ),
        parts=True,
    ),
    Check(
        "`cu_seq_lens_q` without `position_ids` in a model that embeds positions",
        lambda call: _has_no_positions(call) and call.indices is None and call.tensor("cu_seq_lens_q") is not None,
        lambda call: (call.named["cu_seq_lens_q"].diff() > 0).sum() <= 1,
        lambda call: (
            f"{type(call.model).__name__} embeds positions, and would number the documents of cu_seq_lens_q from end "
            "to end without position_ids; pass positions that start again with each document"
        ),
        parts=True,
    ),
    Check(
        "rows split over ranks in a RoBERTa, which counts positions from `padding_idx + 1`",
        lambda call: counts_from_later(call) and call.indices is not None,
        _is_not_split,
        lambda call: (
            f"{type(call.model).__name__} counts positions from {call.state.first_position}, which is not implemented "
            "for rows that are split over ranks; use a model whose positions start at 0"
        ),
        NotImplementedError,
        parts=True,
    ),
    Check(
        "packed rows for a RoBERTa with positions of padding",
        lambda call: counts_from_later(call) and call.indices is not None,
        _seen_count_from_first,
        lambda call: (
            f"position_ids of {type(call.model).__name__} must count from {call.state.first_position} in every "
            "document, as the lower ones are padding's, or from 0"
        ),
        parts=True,
    ),
    Check(
        "packed rows for a RoBERTa with positions from 0 and no mask indices",
        _has_plain_positions,
        _restarts_at_padding,
        lambda call: (
            f"position_ids start again at 0, but {type(call.model).__name__} counts positions from "
            f"{call.state.first_position}, and 0 is padding; pass {VECTORS} with them, as the collators do"
        ),
        parts=True,
    ),
    Check(
        "packed rows for a RoBERTa with positions from `padding_idx + 1` and no mask indices",
        lambda call: _has_plain_positions(call) and call.get("cu_seq_lens_q") is None,
        _counts_once,
        lambda call: (
            f"position_ids start again at {call.state.first_position} in one row, but {type(call.model).__name__} does "
            f"not hand them to its masks, so its documents would see each other; pass {VECTORS} with them"
        ),
        parts=True,
    ),
)
