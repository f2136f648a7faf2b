"""Functions that the trainers share: their arguments, collator limits, datasets and the metric of mask sparsity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK

__all__ = [
    "check_adapters",
    "check_config",
    "default_output_dir",
    "flashmask_policy",
    "log_sparsity",
    "map_style_datasets",
    "prepare_arguments",
    "turn_off_dispatching",
    "with_position_limit",
]


def default_output_dir(model: Any, task: str) -> str:
    """Return the output folder of a trainer without arguments, named as TRL names it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def check_config(args: Any, config: type, ours: str) -> None:
    """Raise a TypeError if a trainer's arguments are not of its config class, whose options it would miss.

    Args:
        args: the trainer's arguments.
        config: TRL's config class of the trainer.
        ours: name of the config class to recommend.
    """
    if not isinstance(args, config):
        raise TypeError(
            f"args must be a {ours}, got {type(args).__name__}; build it with {ours}(output_dir=..., ...), which takes "
            "every option of transformers.TrainingArguments"
        )


@contextlib.contextmanager
def flashmask_policy(model: Any, args: Any, *, reference: bool = False) -> Iterator[None]:
    """Make the attention "flashmask" the default of models that TRL loads by name within the context.

    Afterwards `args.model_init_kwargs` is what it was, for whatever else is loaded with the same arguments.

    Args:
        model: the model, or the name that the trainer loads it by.
        args: the trainer's arguments.
        reference: whether TRL may load a reference model by the name of a model that is given as such.
    """
    given = args.model_init_kwargs
    if isinstance(model, str):
        args.model_init_kwargs = {"attn_implementation": FLASHMASK, **(given or {})}
    if args.world_size > 1 and (isinstance(model, str) or reference):
        # else TRL 1.16 spreads the model over all GPUs before FSDP shards it, and fails
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
    try:
        yield
    finally:
        args.model_init_kwargs = given


def check_adapters(model: Any, peft_config: Any) -> None:
    """Raise a ValueError for adapters that add virtual tokens, or look for tokens in a sequence.

    Args:
        model: the model, or the name that the trainer loads it by.
        peft_config: configuration of the adapter to add, or None.
    """
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


def turn_off_dispatching(args: Any) -> None:
    """Make each process read its own batches, in place; accelerate's default for streams cuts one process's apart.

    Raises:
        ValueError: `accelerator_config.dispatch_batches` is true.
    """
    if args.accelerator_config.dispatch_batches:
        raise ValueError("dispatch_batches cuts batches apart, and packed rows are in one piece; set it to false")
    args.accelerator_config.dispatch_batches = False


def prepare_arguments(model: Any, args: Any, peft_config: Any) -> None:
    """Check a trainer's arguments for packed rows of shared questions, and turn dispatched batches off, in place.

    Args:
        model: the model, or the name that the trainer loads it by.
        args: the trainer's arguments.
        peft_config: configuration of the adapter to add, or None.

    Raises:
        ValueError: an adapter adds virtual tokens or looks for tokens in a sequence, `neftune_noise_alpha` is set, or
            batches are dispatched. Packed rows cannot have these.
    """
    check_adapters(model, peft_config)
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the length of a sequence, and that of a packed row is another; "
            "leave it out"
        )
    turn_off_dispatching(args)


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


def log_sparsity(trainer: Any, mode: str, indices: Tensor, *, skipped: bool = True) -> None:
    """Add `mask_sparsity` to a TRL trainer's metrics.

    To compute it, the host waits for the device. So it is only done at logging steps and in evaluation.

    Args:
        trainer: the trainer.
        mode: "train" or "eval".
        indices: mask vectors of the batch, int32 [R, 1, S, 1].
        skipped: whether the model's attention skips hidden tiles; if not, the metric is 0.
    """
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.state.logging_steps)) == 0:
        sparsity = FlashMask(indices, causal=True).sparsity() if skipped else 0.0
        trainer._metrics[mode]["mask_sparsity"].append(sparsity)
