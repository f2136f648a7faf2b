"""TRL's trainers on packed rows: several documents in a row, and questions that are computed once for all answers."""

from flashmask_hf.trainers.dpo import SharedQuestionDPOConfig, SharedQuestionDPOTrainer
from flashmask_hf.trainers.reward import MultiAnswerRewardConfig, MultiAnswerRewardTrainer
from flashmask_hf.trainers.sft import PackedSFTTrainer

__all__ = [
    "MultiAnswerRewardConfig",
    "MultiAnswerRewardTrainer",
    "PackedSFTTrainer",
    "SharedQuestionDPOConfig",
    "SharedQuestionDPOTrainer",
]
