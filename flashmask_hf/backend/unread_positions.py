"""Packed rows that only `position_ids` tell, in causal models that hand positions neither to masks nor to attention.

Such models (Granite 4 without Mamba layers, the text model of HunYuan-VL) take `position_ids` for their embeddings, or
not at all, and let the documents of a row see each other, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.backend.model_hooks import is_compiled
from flashmask_hf.backend.positions import has_one_document
from flashmask_hf.checks import device_assert
from flashmask_hf.names import VECTORS

__all__ = ["call_model", "record_positions"]

_active: ContextVar[tuple[list[bool], ...]] = ContextVar("flashmask_read_positions", default=())
"""A list for each model call under way, which is not empty once something has read what tells documents."""


def record_positions() -> None:
    """Record that a mask or an attention layer knows of documents, or has no need to."""
    if not torch.compiler.is_compiling():  # a context variable would break the graph
        for reads in _active.get():
            reads.append(True)


def call_model(model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model that has one of this package's names, and raise if it mixed the documents of `position_ids`.

    Once positions were read in a call of the model, its calls are not looked at. Calls of compiled models never are,
    for compiled code cannot record it.

    Args:
        model: a transformers model.
        call: its unbound `__call__`.
        args: positional arguments of the call.
        kwargs: keywords of the call.

    Raises:
        RuntimeError: `position_ids` [B, S] start again at 0 within a row, there are no `startend_row_indices`, and
            neither masks nor causal layers got them (a device-side check).
    """
    positions = None if kwargs.get(VECTORS) is not None else kwargs.get("position_ids")
    known = torch.compiler.is_compiling() or getattr(model, "_reads_positions", False)
    mask = kwargs.get("attention_mask")
    flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)  # masks of a static cache are made before
    if known or not flat or not isinstance(positions, Tensor) or positions.dim() != 2:
        return call(model, *args, **kwargs)
    reads: list[bool] = []
    token = _active.set((*_active.get(), reads))
    try:
        output = call(model, *args, **kwargs)
    finally:
        _active.reset(token)
    if reads or is_compiled(model):
        model._reads_positions = True
        return output
    device_assert(
        has_one_document(positions, mask),
        f"{type(model).__name__} hands position_ids neither to its masks nor to its attention, so that documents of a "
        f"row would see each other; pass {VECTORS} with them, as the collators do",
    )
    return output
