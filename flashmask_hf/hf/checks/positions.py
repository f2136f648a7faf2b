"""Positions of packed rows in models that embed them, such as GPT-2, BERT and RoBERTa, and of images along axes.

Without `position_ids` the former number a row from end to end. Some count from `padding_idx + 1`, collators from 0.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.trees import has_one_document, mask_of
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.rules import Rule, Verdict, rule
from flashmask_hf.intervals import outer_rows
from flashmask_hf.names import VECTORS

CHECKS: list[Rule] = []


def counts_from_later(call: Call) -> bool:
    """Return whether a model that counts positions from a later number than 0 gets positions."""
    return call.is_ours and bool(call.state.first_position) and call.named.get("position_ids") is not None


def _seen(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return positions [B, S] and which of their tokens any row sees; None if the mask indices have another form."""
    mask, positions = mask_of(call), call.tensor("position_ids", 2)
    if mask is None or positions is None or mask.kv_len != positions.shape[1]:
        return None  # the first layer says what is wrong
    _, last = outer_rows(mask.visible_intervals(mask.kv_len), mask.kv_len)
    return positions, (last > 0).any(1)


def count_from_first(call: Call) -> dict[str, Any] | None:
    """Return the arguments with the model's first number added to positions if a seen token has 0."""
    found = _seen(call)
    if found is None:
        return None
    positions, seen = found
    first = torch.where((seen & (positions == 0)).any(), call.state.first_position, 0)
    return call.named | {"position_ids": positions + first}


def _lacks_positions(call: Call) -> bool:
    if not call.is_ours or call.state.first_position is None or call.config.is_encoder_decoder:
        return False
    takes_positions = "position_ids" in inspect.signature(call.model.forward).parameters
    return not takes_positions or call.named.get("position_ids") is None


@rule(CHECKS, "documents without positions in a model that embeds positions (GPT-2, BERT)", where=_lacks_positions)
def _has_one_document(call: Call) -> Verdict:
    drops_indices = call.indices is not None and family_of(call.config).drops_indices
    return False if drops_indices else has_one_document(call), (
        f"{call.name} embeds positions, and would number documents from end to end; pass position_ids that start again "
        "with each, or, if the model takes none (AIMv2), one document per row"
    )


@rule(CHECKS, "rows split over ranks in a RoBERTa", VECTORS, where=counts_from_later, error=NotImplementedError)
def _is_not_split(call: Call) -> Verdict | None:
    mask, positions = mask_of(call), call.tensor("position_ids", 2)
    if mask is None or positions is None or mask.kv_len <= positions.shape[1]:
        return None
    return False, (
        f"{call.name} counts positions from {call.state.first_position}, which is not implemented for rows that are "
        "split over ranks; use a model whose positions start at 0"
    )


@rule(CHECKS, "packed rows for a RoBERTa with positions of padding", VECTORS, where=counts_from_later)
def _seen_count_from_first(call: Call) -> Verdict | None:
    found, first = _seen(call), call.state.first_position
    if found is None:
        return None
    positions, seen = found
    return ~(seen & (positions < first)).any(), (
        f"position_ids of {call.name} must count from {first} in every document, as the lower ones are padding's, or "
        "from 0"
    )


@rule(CHECKS, "packed rows for a RoBERTa without mask indices", where=counts_from_later)
def _restarts_nowhere(call: Call) -> Verdict | None:
    positions, first, real = call.tensor("position_ids", 2), call.state.first_position, call.padding
    if positions is None or call.indices is not None:
        return None
    call.reads += 1  # so that positions of padding are not taken for documents that nothing reads
    before, start, after = positions[:, :-2], positions[:, 1:-1], positions[:, 2:]
    broken = ((before > 0) & (start == 0) & (after == 1)).any()
    if call.named.get("cu_seq_lens_q") is None:
        restarts = (positions[:, :-1] > first) & (positions[:, 1:] == first)
        broken = broken | (restarts if real is None else restarts & real[:, 1:]).any()
    return ~broken, (
        f"position_ids start again in one row, but {call.name} counts from {first} and hands them to no mask, so "
        f"documents would see each other; pass {VECTORS} with them"
    )


@rule(
    CHECKS,
    "images beside `position_ids` [B, S] in a model of several axes (Qwen-VL)",
    "position_ids",
    where=lambda call: hasattr(call.model, "get_rope_index"),
)
def _are_images_along_axes(call: Call) -> Verdict | None:
    media = ("pixel_values", "image_embeds")
    pixels = [name for name, value in call.named.items() if value is not None and name.startswith(media)]
    if not pixels or call.tensor("position_ids", 2) is None:
        return None
    return False, (
        f"position_ids [B, S] beside {pixels[0]} give tokens of an image the positions of text; pass none, or "
        "[4, B, S] as DataCollatorForPackedVisionLanguageModeling(..., rope_index=RopeIndex.of(model))"
    )


@rule(
    CHECKS,
    "documents of PaliGemma that start at position 1",
    "position_ids",
    ours=True,
    where=lambda call: getattr(call.config, "model_type", "") == "paligemma",
)
def _start_at_zero(call: Call) -> Verdict | None:
    positions, real = call.tensor("position_ids", 2), call.padding
    if positions is None or call.indices is not None:
        return None
    restarts = (positions[:, 1:] == 1) & (positions[:, :-1] > 1)
    if real is not None:
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return ~restarts.any(), (
        "position_ids start again at 1 in one row, but documents are found where they are 0; let each document start "
        f"at 0, which is equal under RoPE, or pass {VECTORS}"
    )
