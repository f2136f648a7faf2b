"""Helpers of hooks on models: unwrapping PEFT, the modules of a model alone, its arguments by name, compilation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

__all__ = ["is_compiled", "named_arguments", "own_modules", "unwrap_peft"]


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def own_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules within a model, except those of models within it, which have hooks of their own."""
    for name, child in module.named_children():
        if not isinstance(child, PreTrainedModel):
            yield name, child
            yield from own_modules(child)


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of a model by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model or a part of it is compiled, by `torch.compile` or its method `compile`."""
    return any(isinstance(x, OptimizedModule) or x._compiled_call_impl is not None for x in model.modules())
