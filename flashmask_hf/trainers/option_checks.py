"""Checks of options of trainers on packed rows."""

from __future__ import annotations

from typing import Any

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.utils import get_config_model_id

from flashmask_hf.trainers.context_parallel import context_parallel_size
from flashmask_hf.trainers.weighing import require_fused_head


def prepared_arguments(
    args: Any, model: Any, peft_config: Any, stock: type, ours: type, compute_loss_func: Any = None
) -> Any:
    """Return the checked arguments of a trainer of packed rows, without dispatched batches of streams.

    None is a default `ours`, in TRL's folder. A TypeError if they are not `stock`, a ValueError for unfit options.
    """
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = ours(f"{name.split('/')[-1]}-{stock.__name__.removesuffix('Config')}")
    if not isinstance(args, stock):
        way = f"{ours.__name__}(output_dir=..., ...), which takes every option of transformers.TrainingArguments"
        raise TypeError(f"args must be a {ours.__name__}, got {type(args).__name__}; build it with {way}")
    refuse_options(args, compute_loss_func)
    refuse_adapters(model, peft_config)
    if args.accelerator_config.dispatch_batches:
        raise ValueError("dispatch_batches cuts batches apart, and packed rows are in one piece; set it to false")
    args.accelerator_config.dispatch_batches = False
    return args


def checked_collator(given: Any, expected: type, **options: Any) -> Any:
    """Return the caller's collator, which must be an `expected`, or build one if it is None."""
    if given is None:
        return expected(**options)
    if not isinstance(given, expected):
        raise TypeError(f"data_collator must be a {expected.__name__}, got {type(given).__name__}; leave it out")
    return given


def refuse_options(args: Any, compute_loss_func: Any = None) -> None:
    """Raise a ValueError for options that TRL's loss ignores or packed rows do not support.

    Before 1.15, TRL computes log-probabilities by Liger past the hooks that pack rows.
    """
    if args.use_liger_kernel and not isinstance(args, (SFTConfig, RewardConfig)):
        require_fused_head("use_liger_kernel", "leave it out")
    if not isinstance(args, (SFTConfig, DPOConfig, RewardConfig)) and context_parallel_size(args) > 1:
        problem = "each rank generates its own completions, but ranks that share rows need the same"
        raise ValueError(f"cp_size > 1 (parallelism_config): {problem}; set cp_size=1, and use flashmask_hf.long_rows")
    smooths = isinstance(args, SFTConfig) and args.loss_type == "nll" and compute_loss_func is None
    factor = args.label_smoothing_factor
    if factor and not smooths:
        raise ValueError(f"label_smoothing_factor={factor}: this trainer's loss does not read it; leave it at 0")
    if args.neftune_noise_alpha is not None:
        raise ValueError("neftune_noise_alpha scales noise by a sequence's length, not a packed row's; leave it out")


def refuse_adapters(model: Any, peft_config: Any) -> None:
    """Raise a ValueError for adapters, in the model or to add, with virtual tokens or that search sequences."""
    for config in (peft_config, *getattr(model, "peft_config", {}).values()):
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"peft_config: {type(config).__name__} adds virtual tokens; use LoRA with packed rows")
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError("peft_config: alora_invocation_tokens do not support packed rows; use plain LoRA")
