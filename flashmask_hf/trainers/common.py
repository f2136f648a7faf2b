"""Functions that the trainers share: their arguments, collator limits, datasets and the metric of mask sparsity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK

__all__ = ["default_output_dir", "log_sparsity", "map_style_datasets", "prepare_arguments", "with_position_limit"]


def default_output_dir(model: Any, task: str) -> str:
    """Return the output folder of a trainer without arguments, named as TRL names it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def prepare_arguments(model: Any, args: Any, peft_config: Any) -> None:
    """Set a trainer's arguments for packed rows of shared questions, in place.

    A model that the trainer loads by name gets the attention "flashmask".

    Args:
        model: the model, or the name that the trainer loads it by.
        args: the trainer's arguments.
        peft_config: configuration of the adapter to add, or None.

    Raises:
        ValueError: an adapter adds virtual tokens or looks for tokens in a sequence, `neftune_noise_alpha` is set, or
            batches are dispatched. Packed rows cannot have these.
    """
    if isinstance(model, str):
        args.model_init_kwargs = {"attn_implementation": FLASHMASK, **(args.model_init_kwargs or {})}
    if args.world_size > 1:  # else TRL 1.16 spreads a reference model over all GPUs before FSDP shards it, and fails
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
    for config in (peft_config, *getattr(model, "peft_config", {}).values()):
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"peft_config: {type(config).__name__} adds virtual tokens to every sequence, which a packed row has "
                "no place for; use LoRA or another adapter of the weights"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                "peft_config: alora_invocation_tokens are looked for in every sequence, which a packed row is not; use "
                "LoRA without them"
            )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the length of a sequence, and that of a packed row is another; "
            "leave it out"
        )
    if args.accelerator_config.dispatch_batches:
        raise ValueError("dispatch_batches cuts batches apart, and packed rows are in one piece; set it to false")
    args.accelerator_config.dispatch_batches = False


def with_position_limit(collator: Any, model: Any) -> Any:
    """Return the collator, or a copy with the model's `max_position_embeddings` if it has no limit of its own."""
    if collator.max_position_embeddings is not None:
        return collator
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return replace(collator, max_position_embeddings=positions)


def map_style_datasets(trainer: Any) -> Iterator[tuple[str, Dataset]]:
    """Yield the name and the dataset of each of a trainer's map-style datasets.

    Streamed datasets are left out: the collator checks their examples batch by batch.
    """
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    for name, dataset in [("train", trainer.train_dataset), *evaluated.items()]:
        if isinstance(dataset, Dataset):
            yield name, dataset


def log_sparsity(trainer: Any, mode: str, indices: Tensor) -> None:
    """Add `mask_sparsity` to a TRL trainer's metrics.

    To compute it, the host waits for the device. So it is only done at logging steps and in evaluation.

    Args:
        trainer: the trainer.
        mode: "train" or "eval".
        indices: mask vectors of the batch, int32 [R, 1, S, 1].
    """
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.state.logging_steps)) == 0:
        trainer._metrics[mode]["mask_sparsity"].append(FlashMask(indices, causal=True).sparsity())
