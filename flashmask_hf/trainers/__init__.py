"""TRL's trainers on packed rows: several documents in a row, and questions and prompts that are computed once."""

from flashmask_hf.trainers.diffusion import PackedDiffusionTrainer
from flashmask_hf.trainers.dpo import SharedQuestionDPOConfig, SharedQuestionDPOTrainer
from flashmask_hf.trainers.grpo import (
    SharedPromptGRPOConfig,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOConfig,
    SharedPromptRLOOTrainer,
)
from flashmask_hf.trainers.long_rows_callback import LongRows
from flashmask_hf.trainers.reward import MultiAnswerRewardConfig, MultiAnswerRewardTrainer
from flashmask_hf.trainers.sft import PackedSFTTrainer

__all__ = [
    "LongRows",
    "MultiAnswerRewardConfig",
    "MultiAnswerRewardTrainer",
    "PackedDiffusionTrainer",
    "PackedSFTTrainer",
    "SharedPromptGRPOConfig",
    "SharedPromptGRPOTrainer",
    "SharedPromptRLOOConfig",
    "SharedPromptRLOOTrainer",
    "SharedQuestionDPOConfig",
    "SharedQuestionDPOTrainer",
]
