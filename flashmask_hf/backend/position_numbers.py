"""Position numbers of packed rows in models that count them from `padding_idx + 1`, such as RoBERTa.

Collators count the tokens of a document from 0. These models embed a position by number, and give the numbers up to
`padding_idx` to padding, so the same row would have other embeddings than its documents alone, without an error.
`renumber_positions` puts a forward pre-hook on such a model when it is made or its attention is set (`patches.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.backend.model_hooks import named_arguments, own_modules
from flashmask_hf.checks import device_assert
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, VECTORS

__all__ = ["renumber_positions"]


def renumber_positions(model: Any) -> None:
    """Make a model that counts positions from `padding_idx + 1` take packed rows whose positions count from 0.

    Other models are left as they are. Repeating it is fine. The hook acts while the model's attention is one of this
    package's.

    Args:
        model: a transformers model, or a model within one, with its layers made. In calls with
            `startend_row_indices`, `padding_idx + 1` is added to `position_ids` if a token that is seen has position 0,
            which no token of these models has. RuntimeError (device-side checks): a seen token has a position of
            padding all the same; or documents count from 0 in a call without vectors.
    """
    paddings = [
        part.padding_idx
        for name, part in own_modules(model)
        if isinstance(part, nn.Embedding) and "position" in name and part.padding_idx is not None
    ]
    if paddings and _renumber not in model._forward_pre_hooks.values():
        model._first_position = paddings[0] + 1
        model.register_forward_pre_hook(_renumber, with_kwargs=True)


def _renumber(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count the positions of a packed row from the model's first one; a forward pre-hook."""
    if model.config._attn_implementation not in NAMES:
        return None
    named = named_arguments(model, args, kwargs)
    positions, vectors = named.get("position_ids"), named.get(VECTORS)
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    first = model._first_position
    name = type(model).__name__
    if vectors is None:
        before, start, after = positions[:, :-2], positions[:, 1:-1], positions[:, 2:]
        device_assert(
            ~((before > 0) & (start == 0) & (after == 1)).any(),
            f"position_ids start again at 0, but {name} counts positions from {first}, and 0 is padding; pass "
            f"{VECTORS} with them, as the collators do",
        )
        return None
    if not isinstance(vectors, Tensor) or vectors.dtype != torch.int32 or vectors.shape[2:3] != positions.shape[1:]:
        return None  # the first layer says what is wrong
    causal = bool(getattr(model.config, "is_decoder", False)) and vectors.shape[-1] < 4
    mask = FlashMask(vectors.detach(), causal)
    seen = torch.stack([start < end for start, end in mask.visible_intervals(mask.kv_len)]).any(0).any(1)
    positions = positions + torch.where((seen & (positions == 0)).any(), first, 0)
    device_assert(
        ~(seen & (positions < first)).any(),
        f"position_ids of {name} must count from {first} in every document, as the lower ones are padding's, or from 0",
    )
    return (), named | {"position_ids": positions}
