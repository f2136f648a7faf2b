"""How TRL loads models by name, and how FSDP2 gathers their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.names import FLASHMASK

__all__ = ["correct_gathers", "flashmask_policy", "load_with", "refuse_empty_reference", "whole_in_each_process"]


@contextlib.contextmanager
def load_with(args: Any, **options: Any) -> Iterator[None]:
    """Make options the default for models that TRL loads by name within the context.

    An option given as None counts as missing: TRL's scripts pass `attn_implementation=None`. `args.model_init_kwargs`
    is restored afterwards.
    """
    given = args.model_init_kwargs
    if options:
        chosen = given or {}
        args.model_init_kwargs = chosen | {name: x for name, x in options.items() if chosen.get(name) is None}
    try:
        yield
    finally:
        args.model_init_kwargs = given


def flashmask_policy(model: Any, args: Any, *, reference: bool = False) -> contextlib.AbstractContextManager[None]:
    """Make "flashmask" the default attention of models that TRL loads by name within the context.

    Args:
        model: the model or its name.
        args: the trainer's arguments.
        reference: whether TRL may load a reference model although `model` is not a name.
    """
    by_name = isinstance(model, str)
    options = {"attn_implementation": FLASHMASK} if by_name else {}
    return load_with(args, **options, **(whole_in_each_process(args) if by_name or reference else {}))


def whole_in_each_process(args: Any) -> dict[str, Any]:
    """Return the options with which TRL 1.16 loads a model whole on each rank.

    By default TRL spreads the model over all GPUs before FSDP shards it, and fails.
    """
    return {"device_map": None} if args.world_size > 1 else {}


def refuse_empty_reference(plugin: Any) -> None:
    """Raise a ValueError if TRL 1.16 would leave the reference model empty on all ranks but the first.

    Args:
        plugin: accelerate's FSDP plugin.
    """
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading leaves a reference model empty on all ranks but the first; set it to "
            "false in accelerate's configuration, or train an adapter, which needs no reference model"
        )


def correct_gathers(model: Any) -> None:
    """Make FSDP2 gather the weights that a training step needs, and no others. Without FSDP2, nothing changes.

    A trained head is gathered before the step. TRL's fused head reads its weights without calling it. If accelerate
    shards the head apart from the final norm (`modules_to_save=["lm_head"]`), each rank would learn from its own tokens
    only.

    A frozen input embedding is not gathered in the backward pass, which never reads it. FSDP2 (torch 2.11 to 2.13)
    prefetches it there, never waits for it, and frees the buffer. If one rank is late, this buffer overwrites the first
    gather of the next forward: half of the final norm was zero.

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.
    """
    inner = unwrap_peft(model)
    if _correct_gathers not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_correct_gathers, with_kwargs=True)


def _correct_gathers(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if kwargs.get("fused_lm_head") and hasattr(head, "unshard") and any(x.requires_grad for x in head.parameters()):
        head.unshard()
    if hasattr(embedding, "set_unshard_in_backward"):
        needed = {id(x) for x in head.parameters()} if head is not None else set()  # tied to the embedding
        if not any(x.requires_grad or id(x) in needed for x in embedding.parameters()):
            embedding.set_unshard_in_backward(False)
