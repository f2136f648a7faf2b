"""What the trainers on shared questions have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from flashmask_hf.mask import FlashMask

__all__ = ["column_lengths", "log_sharing", "positions_of", "prepare_model"]


def prepare_model(model: Any, args: Any, peft_config: Any) -> None:
    """Ask for "flashmask" where the trainer loads the model by name; raise for adapters that add virtual tokens."""
    if isinstance(model, str):
        args.model_init_kwargs = {"attn_implementation": "flashmask", **(args.model_init_kwargs or {})}
    configs = [peft_config, *getattr(model, "peft_config", {}).values()]
    for config in configs:
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"peft_config: {type(config).__name__} adds virtual tokens to every sequence, which a packed row has "
                "no place for; use LoRA or another adapter of the weights"
            )


def positions_of(model: Any) -> int | None:
    """How many positions a model has, if it says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def column_lengths(dataset: Dataset, columns: tuple[str, ...]) -> list[NDArray[np.int64]]:
    """Lengths of the lists in some columns, int64 [rows] each, read batch by batch."""
    tables: Any = dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)
    parts = [[table[column].combine_chunks().value_lengths().to_numpy() for column in columns] for table in tables]
    return [np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)]


def log_sharing(trainer: Any, inputs: dict[str, Any], unshared_tokens: Any) -> None:
    """Add `shared_tokens_saved` and, at logging steps and in evaluation, `mask_sparsity` to a TRL trainer's metrics."""
    mode = "train" if trainer.model.training else "eval"
    indices = inputs["startend_row_indices"]
    tokens = trainer.accelerator.gather_for_metrics((indices > 0).sum()).sum()  # padding has 0
    without = trainer.accelerator.gather_for_metrics(unshared_tokens).sum()
    trainer._metrics[mode]["shared_tokens_saved"].append(1 - (tokens / without).item())
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.args.logging_steps)) == 0:
        trainer._metrics[mode]["mask_sparsity"].append(FlashMask(indices, causal=True).sparsity())
