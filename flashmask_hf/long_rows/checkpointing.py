"""Activation checkpointing that keeps attention's results."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _is_compiling, create_selective_checkpoint_contexts

from flashmask_hf import torch_internals
from flashmask_hf._call.call import Keeper, Results, current_keeper
from flashmask_hf._call.operators import flash_attn_forward
from flashmask_hf.long_rows.store import Saved, current_layer
from flashmask_hf.sparse.operators import flash_attn_sparse_forward

CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
"""Attribute of a transformers module for the function that checkpoints its layers or itself."""


def keep_attention() -> tuple[Any, Any]:
    """Make a checkpointed layer keep its attention's output and log-sum-exp, and recompute only the rest.

    A `context_fn` for `torch.utils.checkpoint.checkpoint`; this package's trainers use it where memory allows. Results
    are equal to the bit. In 16 bits each layer keeps 2 * Hq * Dv + 4 * Hq more bytes per token, about as much as its
    input; `offload_checkpoints` moves them to the host.

    Reentrant checkpointing raises, as does the TensorBoard callback: JSON cannot contain functions. While a CUDA graph
    is captured, attention is recomputed.

    Returns:
        The contexts of a layer's forward and of its recomputation.

    Example:
        ```python
        options = {"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}
        args = TrainingArguments("out", gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
        ```
    """
    return _contexts(_save)


def _contexts(save: Callable[[Results], Saved | None]) -> tuple[Any, Any]:
    """Return the contexts of a layer's forward and of its recomputation; `save` returns None to recompute."""
    if _is_compiling(None, (), {}):  # compiled layers mark operators and call no Python
        return create_selective_checkpoint_contexts([flash_attn_forward, flash_attn_sparse_forward])
    saved: list[Saved | None] = []

    def compute_and_save(q: Tensor, compute: Callable[[], Results]) -> Results:
        results = compute()
        # A captured graph must compute its results: other graphs' memory may be reused.
        saved.append(None if torch_internals.is_capturing(q) else save(results))
        return results

    def make_loader() -> Keeper:
        following = iter(saved)  # a retained graph runs backward again

        def load_or_compute(q: Tensor, compute: Callable[[], Results]) -> Results:
            kept = next(following, None)
            if kept is None or torch_internals.is_capturing(q):
                return compute()
            out, lse = kept.load()
            return out, lse

        return load_or_compute

    return _KeeperContext(lambda: compute_and_save), _KeeperContext(make_loader)


def _save(results: Results) -> Saved:
    """Save attention's results in the store of the layer, or on their device."""
    # Otherwise views have their own version below autograd, and changes go unnoticed.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        layer = current_layer.get()
        return Saved(tuple(x.detach() for x in results)) if layer is None else layer.save(*results)


class _KeeperContext:
    """Reusable context in which a new keeper is the current one."""

    def __init__(self, make: Callable[[], Keeper]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._token: contextvars.Token[Keeper | None] = current_keeper.set(self._make())

    def __exit__(self, *_: object) -> None:
        current_keeper.reset(self._token)


class KeptAttention:
    """Makes the checkpointed layers of a model keep attention's results within a memory budget.

    It adds `keep_attention` to checkpoint functions before each training forward, because TRL sets them anew after
    generation. Functions that are reentrant or have a `context_fn` stay. Compiled layers keep nothing.

    Args:
        model: a transformers model, or a PEFT model around one.
        limit: bytes that all kept results may take; None for no limit.

    Attributes:
        held: bytes that kept results take now.
        largest: bytes of the largest result of a call, kept or not.
    """

    def __init__(self, model: nn.Module, limit: int | None) -> None:
        self.held = self.largest = 0
        self.set_limit(limit)
        self._modules = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self._hook = model.register_forward_pre_hook(self._before_forward)

    def set_limit(self, limit: int | None) -> None:
        """Set the limit. Unless None, calls with larger results than any before keep nothing."""
        self._limit, self._largest_kept = limit, self.largest

    @property
    def has_grown(self) -> bool:
        """Whether a call had larger results than all before the limit was set."""
        return self.largest > self._largest_kept

    def close(self) -> None:
        """Undo the change of the model."""
        self._hook.remove()
        unwrap_checkpoint_functions(self._modules, self)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        for m in self._modules:
            function: Any = vars(m).get(CHECKPOINT_FUNCTION)  # a wrapper of PEFT would give its inner module's
            options = getattr(function, "keywords", {})  # transformers sets a functools.partial
            if options.get("use_reentrant") is False and "context_fn" not in options:
                setattr(m, CHECKPOINT_FUNCTION, self._keeping(function))

    def _keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a compiled layer ignores the budget
                return function(*args, **kwargs)
            return function(*args, **kwargs, context_fn=partial(_contexts, self._save_within_limit))

        wrapper: Any = checkpoint
        wrapper.owner, wrapper.inner = self, function
        return wrapper

    def _save_within_limit(self, results: Results) -> Saved | None:
        size = sum(x.nbytes for x in results)
        self.largest = max(self.largest, size)
        if self._limit is not None and (size > self._largest_kept or self.held + size > self._limit):
            return None
        self.held += size
        saved = _save(results)
        weakref.finalize(saved, self._free, size).atexit = False
        return saved

    def _free(self, size: int) -> None:
        self.held -= size


def unwrap_checkpoint_functions(modules: Iterable[nn.Module], owner: object) -> None:
    """Put the checkpoint functions back that `owner` has wrapped."""
    for module in modules:
        function: Any = vars(module).get(CHECKPOINT_FUNCTION)
        if getattr(function, "owner", None) is owner:
            setattr(module, CHECKPOINT_FUNCTION, function.inner)


def enable_checkpointing(model: Any, options: dict[str, Any]) -> Any:
    """Turn activation checkpointing on in a transformers or PEFT model, and return it.

    `options` are `activation_checkpointing_kwargs` of `transformers.TrainingArguments`.
    """
    # transformers 5.21 renamed the method
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    which = {name: options[name] for name in ("every_n_layers", "offload") if name in options}
    enable({name: x for name, x in options.items() if name not in which}, **which)
    return model


def checkpointing_of(args: Any) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the argument for activation checkpointing, and its options, or None if it is off."""
    # transformers 5.21 renamed the argument
    name = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name))
    return name, (getattr(args, f"{name}_kwargs") or {}) if getattr(args, name) else None
