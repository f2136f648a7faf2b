"""TRL's experimental GMPO trainer with each prompt computed once."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.gmpo.gmpo_config import GMPOConfig
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

from flashmask_hf.trainers.shared_prompts import SharedPrompts, SharedPromptsOptions

__all__ = ["SharedPromptGMPOConfig", "SharedPromptGMPOTrainer"]


@dataclass
class SharedPromptGMPOConfig(SharedPromptsOptions, GMPOConfig):
    """Arguments of `SharedPromptGMPOTrainer`: TRL's `GMPOConfig` and the options of `SharedPromptGRPOConfig`."""


class SharedPromptGMPOTrainer(SharedPrompts, GMPOTrainer):
    """TRL's `GMPOTrainer` that computes each prompt once for all completions.

    Arguments and errors are as in `SharedPromptGRPOTrainer`, with `GMPOConfig` for `GRPOConfig`.
    """

    _name = "Shared-prompt GMPO"
    _configs = (GMPOConfig, SharedPromptGMPOConfig)
