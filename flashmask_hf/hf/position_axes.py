"""Packed documents in models whose positions have several axes: time, height and width (M-RoPE), as in Qwen2-VL.

Their text models look for packed documents in a row of positions before these axes, `position_ids` [4, B, S]. Without
it, with positions [B, S] or [3, B, S] that start again, the documents of a row would see each other, without an error.
`add_text_positions` puts a forward pre-hook on such a model when it is made or its attention is set (`patches.py`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.model_hooks import named_arguments
from flashmask_hf.names import NAMES, VECTORS

__all__ = ["add_text_positions"]


def add_text_positions(model: Any) -> None:
    """Make a text model with positions of three axes find packed documents in positions [B, S] and [3, B, S], too.

    Other models are left as they are. Repeating it is fine. The hook acts while the model's attention is one of this
    package's.

    Args:
        model: a transformers model, or a model within one. In its calls `position_ids` become [4, B, S]. The first row
            are the positions [B, S] that were given. Of three axes, it counts tokens and starts again where all are 0,
            which only the first token of a document has; beside `startend_row_indices` it is the first axis.
    """
    if _takes_text_positions(type(model)) and _add_text_positions not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_add_text_positions, with_kwargs=True)


@functools.cache
def _takes_text_positions(model_class: type) -> bool:
    """Return whether the forward of a class splits positions of four axes, for which there is no other sign."""
    try:
        source = inspect.getsource(model_class.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):  # written in a notebook, or no Python function
        return False
    return "position_ids.shape[0] == 4" in source


def _add_text_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put the row that separates documents before the axes of positions; a forward pre-hook."""
    if model.config._attn_implementation not in NAMES:
        return None
    named = named_arguments(model, args, kwargs)
    positions = named.get("position_ids")
    if not isinstance(positions, Tensor) or not (positions.dim() == 2 or positions.shape[:1] == (3,)):
        return None
    if positions.dim() == 2:
        axes = positions.expand(4, *positions.shape)
    elif named.get(VECTORS) is not None:
        axes = torch.cat([positions[:1], positions])
    else:
        axes = torch.cat([_counts(positions)[None], positions])
    return (), named | {"position_ids": axes}


def _counts(positions: Tensor) -> Tensor:
    """Return the number of tokens before each token of its document, int64 [B, S], of positions [3, B, S].

    A part of a document, beside a cache, has no first token, and none of its numbers is 0. A row of nothing but zeros
    has no documents: models that embed positions in another way pass such rows.
    """
    start = (positions == 0).all(0)
    start = start & ~start.all(-1, keepdim=True)
    column = torch.arange(positions.shape[-1], device=positions.device)
    return column - torch.where(start, column, -1).cummax(-1).values
