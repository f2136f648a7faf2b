"""TRL's GRPO and RLOO trainers on packed rows with each prompt once."""

from __future__ import annotations

from dataclasses import dataclass

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from flashmask_hf.trainers.shared_prompts import SharedPrompts, SharedPromptsOptions


@dataclass
class SharedPromptGRPOConfig(SharedPromptsOptions, GRPOConfig):
    """Arguments of `SharedPromptGRPOTrainer`: `trl.GRPOConfig` and two more options.

    Args:
        share: "prompts" computes each distinct prompt of a micro-batch once. "tokens" computes every common prefix
            once, also inside completions (branching rollouts, repeated turns).
        exact_ratios: recompute old log-probabilities from the update's packed rows, in one more forward without
            gradients, so that first importance ratios are exactly 1. Otherwise bfloat16 ratios may be off by a percent
            or more where part of a generation batch is regrouped.
    """


class SharedPromptGRPOTrainer(SharedPrompts, GRPOTrainer):
    """`trl.GRPOTrainer` that computes each prompt once for all of its completions.

    Policy, old policy and reference run packed rows; all else is TRL's, up to the order of sums. A model loaded by name
    gets the attention "flashmask"; reward models keep theirs. Dropout draws once per shared token.

    With a processor, prompts may have images. Completions share a prompt whose tokens and pixels are equal, and each
    model call runs its images once, generation once per completion. Several processes do not log images.

    > Regrouping

    TRL shuffles completions over micro-batches. They are regrouped by prompt within each optimizer step, unless the
    loss is normalised per micro-batch: `loss_type="bnpo"`, `top_entropy_quantile`, `entropy_coef`, a mixture's
    auxiliary loss. Metrics averaged over micro-batches may weight tokens differently than in TRL. Make
    `per_device_train_batch_size` a multiple of `num_generations`, and `gradient_accumulation_steps` of
    `steps_per_generation`; other settings share less, and warn.

    > Logs

    - `shared_tokens_saved`: fraction of tokens saved in the policy's forward.
    - `mask_sparsity`: fraction of skipped tiles.

    Args:
        model: as in `trl.GRPOTrainer`, like all arguments not listed.
        args: a `SharedPromptGRPOConfig`, or a `trl.GRPOConfig` for `share="prompts"`.

    Raises:
        TypeError: `args` is not a `trl.GRPOConfig`.
        ValueError: the model has another attention, or cannot take packed rows; a dataset is empty or has no column
            `prompt`; or for prompts without tokens, images without a processor or in a PaliGemma, a processor that pads
            on the right, prompt learning, activated LoRA, NEFTune, dispatched batches, continuous batching,
            `use_liger_kernel` before TRL 1.15, and FSDP2's RAM-efficient loading of a reference model.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.trainers import SharedPromptGRPOConfig, SharedPromptGRPOTrainer
        from trl.rewards import think_format_reward

        args = SharedPromptGRPOConfig(per_device_train_batch_size=8, num_generations=8, bf16=True)
        dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
        SharedPromptGRPOTrainer("Qwen/Qwen3-0.6B", think_format_reward, args, dataset).train()
        ```
    """

    _name = "Shared-prompt GRPO"
    _configs = (GRPOConfig, SharedPromptGRPOConfig)


@dataclass
class SharedPromptRLOOConfig(SharedPromptsOptions, RLOOConfig):
    """Arguments of `SharedPromptRLOOTrainer`: `trl.RLOOConfig` and the options of `SharedPromptGRPOConfig`."""


class SharedPromptRLOOTrainer(SharedPrompts, RLOOTrainer):
    """`trl.RLOOTrainer` that computes each prompt once for all of its completions.

    Arguments and errors are as in `SharedPromptGRPOTrainer`, with `RLOOConfig` for `GRPOConfig`.
    """

    _name = "Shared-prompt RLOO"
    _configs = (RLOOConfig, SharedPromptRLOOConfig)
