"""What the trainers on shared questions have in common."""

from __future__ import annotations

from typing import Any

__all__ = ["positions_of", "prepare_model"]


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
