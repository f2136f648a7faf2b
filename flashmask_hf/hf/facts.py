"""Facts about transformers and accelerate that only their source code or names show."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["answers_once_per_row", "is_readable", "is_split_by_torch", "splits_four_axes"]

_HEADS_OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")
"""The `loss_type` of models whose head predicts one class, reward or span per row."""


@functools.cache
def splits_four_axes(model_class: type) -> bool:
    """Return whether a model's forward splits positions [4, B, S] into documents and three axes (M-RoPE)."""
    try:
        source = inspect.getsource(model_class.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):  # written in a notebook, or no Python function
        return False
    return "position_ids.shape[0] == 4" in source


def is_readable(module: ModuleType) -> bool:
    """Return whether the source code of a module can be read."""
    try:
        return bool(inspect.getsource(module))
    except (OSError, TypeError):
        return False


def answers_once_per_row(model: Any) -> bool:
    """Return whether the head of a model predicts once per row, and not once per token."""
    name = type(model).__name__  # the loss_type of ForNextSentencePrediction is None
    return getattr(model, "loss_type", None) in _HEADS_OF_ROWS or name.endswith("ForNextSentencePrediction")


def is_split_by_torch(module: nn.Module | None = None) -> bool:
    """Return whether torch's context parallelism replaced attention, or accelerate's wrapped a layer's attention.

    It exchanges the keys of `scaled_dot_product_attention` alone, and accelerate drops the masks of layers by hooks.
    """
    sdpa = nn.functional.scaled_dot_product_attention
    if isinstance(sdpa, FunctionType) and sdpa.__module__.startswith("torch.distributed."):
        return True
    hooks = {} if module is None else module._forward_pre_hooks
    return bool(hooks) and "_self_attn_pre_forward_hook" in [getattr(x, "__name__", "") for x in hooks.values()]
