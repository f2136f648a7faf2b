"""Activation checkpointing that keeps attention's results, so that attention is never computed twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flashmask_hf.long_rows.store import Layer, Saved, current_layer
from flashmask_hf.operators.attention import flash_attn_forward
from flashmask_hf.operators.sparse import flash_attn_sparse_forward

__all__ = ["enable_checkpointing", "keep_attention"]


def keep_attention() -> tuple[Any, Any]:
    """Make a checkpointed layer keep the output and the log-sum-exp of its attention, and recompute only the rest.

    It is a `context_fn` of `torch.utils.checkpoint.checkpoint` without reentrance, to which transformers hands it.
    Results are the same to the bit. In 16 bits each layer keeps 2 * Hq * Dv + 4 * Hq bytes a token more: about as much
    as the layer's input, which checkpointing keeps in any case. Every operation of a layer goes through Python then,
    which costs the host some milliseconds a step, so that short rows do not gain.

    The callback of TensorBoard writes the trainer's arguments as JSON, which has no functions, and raises; report
    elsewhere.

    In a model under `offload_checkpoints` what is kept goes to its store, on the host as far as the budget goes.

    Returns:
        The contexts of a layer's forward and of its recomputation.

    Example:
        ```python
        import flashmask_hf
        from transformers import TrainingArguments

        args = TrainingArguments(
            "out",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": flashmask_hf.keep_attention},
        )
        ```
    """
    layer = current_layer.get()
    if layer is None:
        return create_selective_checkpoint_contexts(_KEPT)
    saved: list[Saved] = []
    return _Saving(layer, saved), _Loading(saved)


def enable_checkpointing(model: Any, options: dict[str, Any]) -> Any:
    """Turn activation checkpointing on in a transformers model, or a PEFT model around one, and return it.

    Args:
        model: the model, which changes in place.
        options: arguments of `torch.utils.checkpoint.checkpoint`.
    """
    # transformers 5.21 renamed the method
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    return model


_KEPT = [flash_attn_forward, flash_attn_sparse_forward]
"""Operators whose results are kept."""


class _Saving(TorchDispatchMode):
    """Mode of a layer's forward that saves attention's results in a store."""

    def __init__(self, layer: Layer, saved: list[Saved]) -> None:
        super().__init__()
        self._layer = layer
        self._saved = saved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled modules of a layer run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _KEPT:
            # Below autograd a view has a version of its own unless this key is let in, and changes go unnoticed.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                self._saved.append(self._layer.save(*out))
        return out


class _Loading(TorchDispatchMode):
    """Mode of a layer's recomputation that returns the saved results of attention instead of computing them."""

    def __init__(self, saved: list[Saved]) -> None:
        super().__init__()
        self._saved = saved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled modules of a layer run compiled."""
        return True

    def __enter__(self) -> Any:
        self._next = iter(self._saved)  # a graph that is kept runs backward again
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT:
            return next(self._next).load()
        return func(*args, **(kwargs or {}))
