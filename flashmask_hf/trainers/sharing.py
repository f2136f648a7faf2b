"""What the trainers on shared questions have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from flashmask_hf.mask import FlashMask

__all__ = ["limit_positions", "log_sparsity", "named_datasets", "output_dir", "prepare"]


def output_dir(model: Any, task: str) -> str:
    """Where a trainer without arguments writes to, named as TRL does."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def prepare(model: Any, args: Any, peft_config: Any) -> None:
    """Ask for "flashmask" where the trainer loads the model by name; raise for what packed rows cannot have.

    Raises:
        ValueError: an adapter that works on sequences, not weights; noise on embeddings; dispatched batches.
    """
    if isinstance(model, str):
        args.model_init_kwargs = {"attn_implementation": "flashmask", **(args.model_init_kwargs or {})}
    if args.world_size > 1:  # TRL 1.16 lets a reference model that FSDP shards spread over all GPUs first, and fail
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


def limit_positions(collator: Any, model: Any) -> Any:
    """The collator, or if it has no limit of positions, one like it with the model's."""
    if collator.max_position_embeddings is not None:
        return collator
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return replace(collator, max_position_embeddings=positions)


def named_datasets(trainer: Any) -> Iterator[tuple[str, Dataset]]:
    """A trainer's datasets with what errors call them; streams, whose rows are seen as they come, are left out."""
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    for name, dataset in [("train", trainer.train_dataset), *evaluated.items()]:
        if isinstance(dataset, Dataset):
            yield name, dataset


def log_sparsity(trainer: Any, mode: str, indices: Tensor) -> None:
    """Add `mask_sparsity` to a TRL trainer's metrics, at logging steps and in evaluation: it waits for the device."""
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.state.logging_steps)) == 0:
        trainer._metrics[mode]["mask_sparsity"].append(FlashMask(indices, causal=True).sparsity())
