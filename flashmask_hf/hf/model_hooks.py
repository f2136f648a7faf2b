"""Helpers of hooks on models: unwrapping PEFT, a model's own modules, the arguments of its calls, compilation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

__all__ = ["cache_of", "is_compiled", "named_arguments", "own_modules", "tokens_of", "unwrap_peft"]


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


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the `input_ids` of a model's call, the first argument, or else its `inputs_embeds`; None for neither."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if tokens is None else tokens


def cache_of(kwargs: dict[str, Any]) -> Any:
    """Return the key-value cache among a model's keywords, or None; transformers 5.24 renamed it to `cache`."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model or a part of it is compiled, by `torch.compile` or its method `compile`."""
    return any(isinstance(x, OptimizedModule) or x._compiled_call_impl is not None for x in model.modules())
