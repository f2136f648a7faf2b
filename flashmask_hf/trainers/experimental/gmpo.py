"""TRL's experimental GMPO trainer with each prompt computed once for all of its completions."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.gmpo.gmpo_config import GMPOConfig
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

from flashmask_hf.trainers.shared_prompts import SharedPrompts, SharedPromptsOptions

__all__ = ["SharedPromptGMPOConfig", "SharedPromptGMPOTrainer"]


@dataclass
class SharedPromptGMPOConfig(SharedPromptsOptions, GMPOConfig):
    """Arguments of `SharedPromptGMPOTrainer`: TRL's `GMPOConfig` and two more options.

    Args:
        share: as in `SharedPromptGRPOConfig`.
        exact_ratios: as in `SharedPromptGRPOConfig`.
    """


class SharedPromptGMPOTrainer(SharedPrompts, GMPOTrainer):
    """TRL's `GMPOTrainer` that computes each prompt once for all completions, as `SharedPromptGRPOTrainer` does.

    Args:
        model: as in TRL's `GMPOTrainer`.
        reward_funcs: as in TRL's `GMPOTrainer`.
        args: a `SharedPromptGMPOConfig`, or TRL's `GMPOConfig` for `share="prompts"`.
        others: the other positional arguments of TRL's `GMPOTrainer`.
        kwargs: the other arguments of TRL's `GMPOTrainer`.

    Raises:
        TypeError: `args` is not a `GMPOConfig`.
        ValueError: as in `SharedPromptGRPOTrainer`.
    """

    _name = "Shared-prompt GMPO"
    _task = "GMPO"
    _configs = (GMPOConfig, SharedPromptGMPOConfig)
