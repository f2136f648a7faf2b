"""Rewrites of model calls, in order in `REWRITES`; they run before the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashmask_hf.hf.call import Call, count_axes
from flashmask_hf.hf.checks.positions import count_from_first, counts_from_later
from flashmask_hf.hf.checks.recurrent import add_boundaries, takes_boundaries
from flashmask_hf.names import FLASHMASK, PACKED_IDS, PACKED_POSITIONS, VECTORS

__all__ = ["REWRITES", "Rewrite", "require_flashmask", "rewrite"]


class Rewrite(NamedTuple):
    """One change of a model call's arguments.

    Attributes:
        name: what it changes.
        applies: whether the call needs it; on the host, without reading a tensor's values.
        change: returns the new arguments by name.
    """

    name: str
    applies: Callable[[Call], object]
    change: Callable[[Call], dict[str, Any]]


def rewrite(call: Call) -> Call:
    """Return a model call with every change that it needs."""
    for one in (*call.state.rewrites, *REWRITES):
        if one.applies(call):
            call = call.changed(one.change(call))
    return call


def require_flashmask(backbone: Any) -> None:
    """Raise ValueError unless the attention of a backbone is "flashmask"."""
    name = backbone.config._attn_implementation
    if name != FLASHMASK:
        raise ValueError(
            f"packed rows need attn_implementation='flashmask', but the model has {name!r}, with which answers see "
            "each other; load it with 'flashmask', or call model.set_attn_implementation('flashmask')"
        )


def _pack(call: Call) -> dict[str, Any]:
    """Return the arguments with the packed rows in place of the usual batch."""
    require_flashmask(call.model)
    kept = {x: value for x, value in call.named.items() if x not in (PACKED_IDS, PACKED_POSITIONS, "inputs_embeds")}
    rows = {"input_ids": call.get(PACKED_IDS), "position_ids": call.get(PACKED_POSITIONS), "attention_mask": None}
    return kept | rows


def _needs_text_axis(call: Call) -> bool:
    positions = call.tensor("position_ids")
    if not call.is_ours or positions is None or not call.state.has_axes:
        return False
    return positions.dim() == 2 or positions.shape[:1] == (3,)


def _add_text_axis(call: Call) -> dict[str, Any]:
    """Return the arguments with positions [4, B, S], in whose first axis the model finds documents.

    Of three axes it counts tokens from where all are 0. Beside mask indices it is the first of the three.
    """
    positions = call.named["position_ids"]
    if positions.dim() == 2:
        axes = positions.expand(4, *positions.shape)
    else:
        text = positions[0] if call.indices is not None else count_axes(positions)
        axes = torch.cat([text[None], positions])
    return call.named | {"position_ids": axes}


def _is_tower(call: Call) -> bool:
    """Return whether mask indices came to a submodel without tokens, such as an image tower."""
    return call.indices is not None and call.outer is not None and call.tokens is None


REWRITES = (
    Rewrite(
        "no mask indices for towers without tokens",
        _is_tower,
        lambda call: {name: value for name, value in call.named.items() if name != VECTORS},
    ),
    Rewrite("packed rows", lambda call: call.get(PACKED_IDS) is not None and call.state.takes_packed_rows, _pack),
    Rewrite("a text axis before three axes of positions", _needs_text_axis, _add_text_axis),
    Rewrite("boundaries for recurrent kernels", takes_boundaries, add_boundaries),
    Rewrite(
        "positions from the model's first number",
        lambda call: counts_from_later(call) and call.indices is not None,
        count_from_first,
    ),
)
