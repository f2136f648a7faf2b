"""Rewrites of model calls, in order in `REWRITES`; they run before the checks."""

from __future__ import annotations

from typing import Any

import torch

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.positions import count_from_first, counts_from_later
from flashmask_hf.hf.checks.recurrent import add_boundaries, has_documents
from flashmask_hf.hf.rules import Rule, applicable, rule
from flashmask_hf.names import FLASHMASK, PACKED_IDS, PACKED_POSITIONS, VECTORS

REWRITES: list[Rule] = []


def rewrite(call: Call) -> Call:
    """Return a model call with every change that it needs."""
    if call.state.rewrites and torch.compiler.is_compiling():
        raise ValueError(f"trainers change the calls of {call.name} on the host; compile its layers, not the model")
    for change in call.state.rewrites:
        call = call.changed(change(call))
    can_apply = applicable(REWRITES, call)
    for one in REWRITES:
        named = one.run(call) if one in can_apply else None
        if named is not None:
            call = call.changed(named)
            can_apply = applicable(REWRITES, call)
    return call


def require_flashmask(backbone: Any) -> None:
    """Raise ValueError unless the attention of a backbone is "flashmask"."""
    name = backbone.config._attn_implementation
    if name != FLASHMASK:
        raise ValueError(
            f"packed rows need attn_implementation='flashmask', but the model has {name!r}, with which answers see "
            "each other; load it with 'flashmask', or call model.set_attn_implementation('flashmask')"
        )


def _marks_of_text(call: Call) -> set[str]:
    """Return the arguments that mark documents of the text: FlashAttention's, too, if a tower makes its own."""
    marks = {VECTORS}
    if call.state.has_segments:
        marks |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    return {name for name in marks if call.named.get(name) is not None}


@rule(REWRITES, "no document boundaries of the text for towers", where=_marks_of_text)
def _drop_from_tower(call: Call) -> dict[str, Any] | None:
    """Return the arguments of a submodel without tokens, such as an image tower, without the text's boundaries."""
    if call.outer is None or call.tokens is not None:
        return None
    return {name: value for name, value in call.named.items() if name not in _marks_of_text(call)}


@rule(REWRITES, "packed rows", PACKED_IDS)
def _pack(call: Call) -> dict[str, Any] | None:
    if not call.state.takes_packed_rows:
        return None
    require_flashmask(call.model)
    kept = {name: value for name, value in call.named.items() if name != "inputs_embeds"}
    kept |= {"input_ids": kept.pop(PACKED_IDS), "position_ids": kept.pop(PACKED_POSITIONS, None)}
    return kept | {"attention_mask": None}


@rule(
    REWRITES,
    "a text axis before three axes of positions",
    "position_ids",
    where=lambda call: call.is_ours and call.state.has_axes,
)
def _add_text_axis(call: Call) -> dict[str, Any] | None:
    """Return the arguments with positions [4, B, S], in whose first axis the model finds documents."""
    positions = call.tensor("position_ids")
    if positions is not None and positions.dim() == 2:
        return call.named | {"position_ids": positions.expand(4, *positions.shape)}
    if positions is None or positions.shape[:1] != (3,) or call.positions is None:
        return None
    return call.named | {"position_ids": torch.cat([call.positions[None], positions])}


rule(REWRITES, "boundaries for recurrent kernels", where=has_documents)(add_boundaries)
rule(REWRITES, "positions from the model's first number", VECTORS, where=counts_from_later)(count_from_first)
