"""TRL's trainers for reinforcement learning on packed rows that hold each prompt once for all of its completions."""

from __future__ import annotations

from dataclasses import dataclass

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from flashmask_hf.trainers.shared_prompts import SharedPrompts, SharedPromptsOptions

__all__ = ["SharedPromptGRPOConfig", "SharedPromptGRPOTrainer", "SharedPromptRLOOConfig", "SharedPromptRLOOTrainer"]


@dataclass
class SharedPromptGRPOConfig(SharedPromptsOptions, GRPOConfig):
    """Arguments of `SharedPromptGRPOTrainer`: those of `trl.GRPOConfig`, and the following.

    Args:
        share: "prompts" computes each distinct prompt of a micro-batch once. "tokens" computes every common beginning
            once, inside completions as well: of rollouts that branch, or that repeat the turns of a conversation.
        exact_ratios: compute the log-probabilities before the update once more, from the packed rows of the update, so
            that the first ratio of the two is exactly 1, which costs a forward without gradients. Without it the ratio
            is exactly 1 only where the completions of a prompt are put together again over the whole generation batch.
            Elsewhere sums are rounded in another order, and in bfloat16 ratios may be off by a percent or more.
    """


class SharedPromptGRPOTrainer(SharedPrompts, GRPOTrainer):
    """`trl.GRPOTrainer` that computes each prompt once for all of its completions.

    This holds for every log-probability: of the policy, of the policy before the update, of the reference model, and of
    the reference without its adapter. Arguments, losses and metrics are TRL's; results differ only by the rounding of
    sums in another order. Logs add `shared_tokens_saved`, the fraction of tokens that sharing saves in the policy's
    forward, and `mask_sparsity`, the fraction of tiles of the score matrix that are skipped.

    TRL shuffles the rows of a generation batch over its micro-batches, which parts the completions of a prompt. They
    are put side by side again within each optimizer step, whose sum of losses does not depend on the order of rows.
    Where it does (`loss_type="bnpo"`, `top_entropy_quantile`, `entropy_coef` and the auxiliary loss of a mixture of
    experts work on a micro-batch) rows stay where TRL put them. Metrics that are means over micro-batches may weigh
    tokens otherwise. Most is shared with `per_device_train_batch_size` a multiple of `num_generations`, and
    `gradient_accumulation_steps` a multiple of `steps_per_generation`; other settings warn.

    Differences from TRL:

    - The model's attention is "flashmask". A model loaded by name gets it; another attention raises. Reward models
      keep theirs.
    - Prompts without tokens, images, prompt learning, activated LoRA, NEFTune, dispatched batches, continuous batching,
      `use_liger_kernel` before TRL 1.15, and FSDP2's RAM-efficient loading of a reference model raise.
    - Dropout, if the model or the adapter has any, draws once for a shared token.

    Args:
        model: as in `trl.GRPOTrainer`.
        reward_funcs: as in `trl.GRPOTrainer`.
        args: a `SharedPromptGRPOConfig`, or a `trl.GRPOConfig`, which shares prompts.
        others: the other positional arguments of `trl.GRPOTrainer`.
        kwargs: the other arguments of `trl.GRPOTrainer`.

    Raises:
        TypeError: `args` is not a `trl.GRPOConfig`.
        ValueError: the model's attention is not "flashmask", the model cannot take packed rows, a dataset is empty or
            has no column `prompt`, or an option is one of those above.

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
    _task = "GRPO"
    _configs = (GRPOConfig, SharedPromptGRPOConfig)


@dataclass
class SharedPromptRLOOConfig(SharedPromptsOptions, RLOOConfig):
    """Arguments of `SharedPromptRLOOTrainer`: those of `trl.RLOOConfig`, and the following.

    Args:
        share: as in `SharedPromptGRPOConfig`.
        exact_ratios: as in `SharedPromptGRPOConfig`.
    """


class SharedPromptRLOOTrainer(SharedPrompts, RLOOTrainer):
    """`trl.RLOOTrainer` that computes each prompt once for all of its completions, as `SharedPromptGRPOTrainer` does.

    Args:
        model: as in `trl.RLOOTrainer`.
        reward_funcs: as in `trl.RLOOTrainer`.
        args: a `SharedPromptRLOOConfig`, or a `trl.RLOOConfig`, which shares prompts.
        others: the other positional arguments of `trl.RLOOTrainer`.
        kwargs: the other arguments of `trl.RLOOTrainer`.

    Raises:
        TypeError: `args` is not a `trl.RLOOConfig`.
        ValueError: as in `SharedPromptGRPOTrainer`.
    """

    _name = "Shared-prompt RLOO"
    _task = "RLOO"
    _configs = (RLOOConfig, SharedPromptRLOOConfig)
