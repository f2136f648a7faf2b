"""Loading of models in TRL's trainers, for packed rows, and gathering of their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig

from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.hf.packed.rows import run_packed
from flashmask_hf.names import FLASHMASK


def config_of(model: Any, args: Any) -> Any:
    """Return the config of a model or its name, as TRL will load it."""
    if hasattr(model, "config"):
        return model.config
    options = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
    return AutoConfig.from_pretrained(model, **options)


@contextlib.contextmanager
def flashmask_policy(
    model: Any, args: Any, *, reference: bool = False, attention: str | None = FLASHMASK
) -> Iterator[None]:
    """Make TRL load models by name with "flashmask" and whole on each rank within the context.

    TRL 1.16 spreads a model over all GPUs before FSDP shards it, and fails. Options in `args.model_init_kwargs` other
    than None stay. `reference` is whether TRL may load a reference although `model` is not a name; `attention=None`
    leaves the attention to transformers.
    """
    given, by_name = args.model_init_kwargs or {}, isinstance(model, str)
    options = {"attn_implementation": attention} if by_name and attention else {}
    if args.world_size > 1 and (by_name or reference):
        options["device_map"] = None
    options = given | {name: x for name, x in options.items() if given.get(name) is None}
    with mock.patch.object(args, "model_init_kwargs", options or args.model_init_kwargs):
        yield


def run_packed_models(trainer: Any, *, sets_policy: bool = False, sets_reference: bool = True) -> None:
    """Make a trainer's policy and its reference, if any, run packed rows; a ValueError if one cannot.

    `sets_policy` and `sets_reference` set the model's attention to "flashmask".
    """
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "fsdp_cpu_ram_efficient_loading leaves a reference model empty on all ranks but the first; set it to "
                "false in accelerate's configuration, or train an adapter, which needs no reference model"
            )
    for model, sets in ((trainer.model, sets_policy), (reference, sets_reference)):
        if model is not None:
            unwrapped = trainer.accelerator.unwrap_model(model)
            if sets:
                unwrapped.set_attn_implementation(FLASHMASK)
            run_packed(unwrapped)
    correct_gathers(trainer.accelerator.unwrap_model(trainer.model))


def correct_gathers(model: Any) -> None:
    """Make FSDP2 gather only the weights that a training step needs.

    A trained head is gathered before the step: TRL's fused head reads its weights without calling it. Sharded apart
    from the final norm (`modules_to_save=["lm_head"]`), each rank would learn from its own tokens only.

    A frozen input embedding is not gathered in the backward: FSDP2 (torch 2.11 to 2.13) would free its buffer without
    waiting, and a late rank overwrite the next forward's first gather.

    `_no_split_modules` keeps only classes of the model: accelerate 1.15 fails for others, as towers of SigLIP and CLIP
    (Gemma 3, LLaVA) name their text part.
    """
    inner = unwrap_peft(model)
    found = {type(part).__name__ for part in inner.modules()}
    inner._no_split_modules = {name for name in inner._no_split_modules or () if name in found}
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
