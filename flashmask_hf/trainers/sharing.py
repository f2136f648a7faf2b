"""What the trainers on shared questions have in common."""

from __future__ import annotations

from typing import Any

__all__ = ["positions_of", "prepare", "window_of"]


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


def positions_of(model: Any) -> int | None:
    """How many positions a model has, if it says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def window_of(model: Any) -> int | None:
    """The sliding window of a model's layers, if it has one."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None
