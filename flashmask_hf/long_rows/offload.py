"""Offloading of activation checkpoints to host memory between forward and backward."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from flashmask_hf._numbers import as_integer
from flashmask_hf.long_rows.checkpointing import CHECKPOINT_FUNCTION, unwrap_checkpoint_functions
from flashmask_hf.long_rows.modules import common_module
from flashmask_hf.long_rows.store import Store


def offload_checkpoints(model: nn.Module, host_bytes: int | None = None, *, min_bytes: int = 2**20) -> Offload:
    """Keep the checkpoints of a model's layers in pinned host memory between forward and backward, in place.

    Checkpoints are the inputs of checkpointed layers (2 * hidden_size bytes per token in 16 bits), and attention's
    results if `keep_attention` keeps them (about as much again). Checkpoints beyond the budget (last layers)
    stay on the GPU. Copies overlap with computation. Loss and gradients are equal to the bit.

    Call it once, before or after the trainer or PEFT wraps the model. The first step is slower. Modules inside
    checkpointed layers may be compiled. A deep copy of the model has its own store, with the
    same budget.

    Args:
        model: a transformers model on a CUDA or ROCm GPU, or a module that contains one. Only training changes.
        host_bytes: limit of host memory in bytes, at least 0, in blocks of 16 MiB; None for no limit.
        min_bytes: checkpoints of fewer bytes stay on the GPU; at least 0.

    Returns:
        Counters, the budget, and `close()`, which undoes the change.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is negative, or the model has no layers to checkpoint or is offloaded already.
        RuntimeError: in the forward of a training step, if gradient checkpointing is off or layers are compiled.

    Example:
        ```python
        model.gradient_checkpointing_enable()
        offload = offload_checkpoints(model, host_bytes=64 * 2**30)
        ...  # train
        offload.close()
        ```
    """
    return Offload(model, host_bytes, min_bytes)


class Offload(Store):
    """Offloading of a model's checkpoints, from `offload_checkpoints`."""

    def __init__(self, model: nn.Module, host_bytes: int | None, min_bytes: int) -> None:
        as_integer("min_bytes", min_bytes, 0)
        named = {name: m for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")}
        if not named:
            raise ValueError("model has no layers that can be checkpointed; pass a transformers model with such layers")
        modules = list(named.values())
        if any(m in _offloaded for m in modules):
            raise ValueError(
                "model is offloaded already: set host_bytes of its Offload, or close() it. After a failed run of "
                "LongRows, call train() of the same trainer, or load the model again"
            )
        super().__init__(host_bytes, min_bytes)
        self._modules = weakref.WeakSet(modules)  # a copied model would keep them by the wrapper of its original
        holder = common_module(model, list(named))
        for key in [key for key, hook in holder._forward_pre_hooks.items() if isinstance(hook, Offload)]:
            del holder._forward_pre_hooks[key]  # the model is a copy, with a copy of its original's
        self._hook = holder.register_forward_pre_hook(self)  # pyright: ignore[reportArgumentType]
        _offloaded.update(modules)

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        copied = Offload.__new__(Offload)
        Store.__init__(copied, self.host_bytes, self.min_bytes)
        copied._modules = weakref.WeakSet(copy.deepcopy(list(self._modules), memo))
        return copied

    @torch.compiler.disable
    def __call__(self, module: nn.Module, _: Any) -> None:
        """Open a forward's store for checkpoints, as a hook of the model."""
        if not module.training or not torch.is_grad_enabled():
            return
        if not any(m.gradient_checkpointing for m in self._modules):
            ways = "call model.gradient_checkpointing_enable() or set gradient_checkpointing=True in the trainer's args"
            raise RuntimeError(f"offload_checkpoints needs gradient checkpointing: {ways}")
        for m in self._modules:
            function: Any = vars(m).get(CHECKPOINT_FUNCTION)  # PEFT's wrappers forward getattr to their inner module
            other = getattr(function, "owner", None)  # also of a copied model
            if function is not None and other is not self:
                setattr(m, CHECKPOINT_FUNCTION, _with_store(function if other is None else function.inner, self))
        self.begin_forward(itertools.chain(module.parameters(), module.buffers()))

    def close(self) -> None:
        """Undo the change of the model and free the host memory; living graphs free theirs later."""
        self._hook.remove()
        unwrap_checkpoint_functions(self._modules, self)
        _offloaded.difference_update(self._modules)
        super().close()


_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose checkpoints are offloaded."""


def _with_store(checkpoint: Callable[..., Any], store: Store) -> Callable[..., Any]:
    def checkpoint_in_store(*args: Any, **kwargs: Any) -> Any:
        # A compiled backward would load all layers' checkpoints at once.
        if get_eval_frame_callback() not in (None, False):
            raise RuntimeError(_COMPILED)
        with store.layer():
            return checkpoint(*args, **kwargs)

    wrapper: Any = torch.compiler.disable(checkpoint_in_store, recursive=False, reason=_COMPILED)
    wrapper.owner, wrapper.inner = store, checkpoint
    return wrapper


_COMPILED = (
    "offload_checkpoints does not work with torch.compile around checkpointed layers; compile modules inside, such as "
    "layer.mlp, or close() the offload"
)
