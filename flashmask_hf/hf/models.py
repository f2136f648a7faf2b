"""Parts and state of transformers models, the state in one attribute `_flashmask`."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashmask_hf.hf.families import family_of, missing_kernels, source_of

TOWERS: set[type] = set()
"""Config classes of the models with `has_segments` that were called."""


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _own_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of a model, without its submodels. What PEFT wraps keeps its name."""
    for name, child in module.named_children():
        if not isinstance(child, PreTrainedModel):
            name = path if name in ("base_layer", "original_module") else name
            yield name, child
            yield from _own_modules(child, name)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model or a part of it is compiled."""
    return any(
        isinstance(x, OptimizedModule)
        or x._compiled_call_impl is not None
        or hasattr(vars(x).get("forward"), "_torchdynamo_orig_callable")
        for x in model.modules()
    )


@torch.compiler.assume_constant_result
def wrapper_of(name: str, interface: AttentionInterface = ALL_ATTENTION_FUNCTIONS) -> str | None:
    """Return the name of the wrapper that layers call in place of a registered attention, or None.

    accelerate registers an object for `sp_size`; DeepSpeed sets a function in the interface of the models.
    """
    called, registered = interface.get(name), AttentionInterface._global_mapping.get(name)
    if called is None:
        return None
    if not inspect.isfunction(called):
        return f"{type(called).__module__}.{type(called).__qualname__}"
    is_plain = called is registered and not hasattr(called, "__wrapped__")
    return None if is_plain else f"{called.__globals__['__name__']}.{called.__code__.co_name}"


class ModelState:
    """State of a model without its submodels.

    Attributes:
        is_recurrent: whether recurrent or convolutional layers mix its tokens.
        missing: what `missing_kernels` returns; None for other models.
        first_position: first number of a document with absolute positions, as in a table; None for relative positions.
        is_bidirectional: whether an attention layer of it is bidirectional.
        has_axes: whether it takes positions of several axes.
        has_segments: whether its layers attend within images, windows or clips, by its own boundaries.
        takes_packed_rows: whether `run_packed` was called on it.
        rewrites: a trainer's functions that return changed arguments of its calls.
        counts_layers: whether to count layers that receive the caller's mask.
        is_counted: whether every layer received it in a call.
        is_probed: whether its calls run without the compiler.
        has_answered: whether the host has waited for a check.
        has_warned: of unread options of sparse attention.
    """

    def __init__(self, model: Any):
        named = [*_own_modules(model)]
        parts = [part for _, part in named]
        family = family_of(model.config)
        self.is_recurrent = family.mixes or any(
            isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1 for part in parts
        )
        self.missing = missing_kernels(model.config) if self.is_recurrent else None
        embeddings = [(name, part) for name, part in named if isinstance(part, nn.Embedding)]
        tables = [part for name, part in embeddings if "position" in name or name == "wpe"]
        firsts = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
        self.first_position: Any = max(firsts, default=0 if family.is_absolute else None)
        self.is_bidirectional = any(getattr(part, "is_causal", None) is False for part in parts)
        self.has_axes = "position_ids.shape[0] == 4" in source_of(type(model).forward)
        segmented = [part for part in (model, *parts) if _has_segments(type(part))]
        TOWERS.update(type(part.config) for part in segmented)
        self.has_segments = bool(segmented)
        self.takes_packed_rows = self.counts_layers = self.is_counted = self.is_probed = False
        self.has_answered = self.has_warned = False
        self.rewrites: tuple[Any, ...] = ()


@cache
def _has_segments(module_class: type) -> bool:
    """Return whether the forward of a module's class hands its `cu_seqlens` to FlashAttention alone."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    names = () if code is None else (*code.co_names, *code.co_varnames)
    return "cu_seqlens" in names and "is_flash_attention_requested" in names


def state_of(model: Any) -> ModelState:
    """Return the state of a model. A compiler takes it as it is then."""
    return _state_at(id(model)) if torch.compiler.is_compiling() else _find_state(model)


def _find_state(model: Any) -> ModelState:
    state = model.__dict__.get("_flashmask")
    if state is None:
        state = model.__dict__["_flashmask"] = ModelState(model)
    return state


@torch._dynamo.assume_constant_result
def _state_at(address: int) -> ModelState:
    """Return the state of the model at an address: Dynamo of torch 2.11 passes such functions no model."""
    return _find_state(ctypes.cast(address, ctypes.py_object).value)
