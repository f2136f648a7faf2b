"""TRL's experimental GMPO trainer with each prompt computed once for all of its completions.

`flashmask_hf.trainers` does not import it, because importing `trl.experimental` warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trl.experimental.gmpo.gmpo_config import GMPOConfig
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

from flashmask_hf.trainers.common import check_config, default_output_dir
from flashmask_hf.trainers.shared_prompts import SharedPrompts, SharedPromptsOptions

__all__ = ["SharedPromptGMPOConfig", "SharedPromptGMPOTrainer"]


@dataclass
class SharedPromptGMPOConfig(SharedPromptsOptions, GMPOConfig):
    """Arguments of `SharedPromptGMPOTrainer`: those of TRL's `GMPOConfig`, and the following.

    Args:
        share: as in `SharedPromptGRPOConfig`.
        exact_ratios: as in `SharedPromptGRPOConfig`.
    """


class SharedPromptGMPOTrainer(SharedPrompts, GMPOTrainer):
    """TRL's `GMPOTrainer` that computes each prompt once for all completions, as `SharedPromptGRPOTrainer` does.

    Args:
        model: as in TRL's `GMPOTrainer`.
        reward_funcs: as in TRL's `GMPOTrainer`.
        args: a `SharedPromptGMPOConfig`, or TRL's `GMPOConfig`, which shares prompts.
        kwargs: the other arguments of TRL's `GMPOTrainer`.

    Raises:
        TypeError: `args` is not a `GMPOConfig`.
        ValueError: as in `SharedPromptGRPOTrainer`.
    """

    _name = "Shared-prompt GMPO"

    def __init__(self, model: Any, reward_funcs: Any = None, args: GMPOConfig | None = None, **kwargs: Any):
        args = args or SharedPromptGMPOConfig(default_output_dir(model, "GMPO"))
        check_config(args, GMPOConfig, "SharedPromptGMPOConfig")
        super().__init__(model, reward_funcs, args, **kwargs)
