"""TRL's trainers on packed rows in which every question is computed once."""

from flashmask_hf.trainers.dpo import SharedQuestionDPOConfig, SharedQuestionDPOTrainer
from flashmask_hf.trainers.reward import MultiAnswerRewardConfig, MultiAnswerRewardTrainer

__all__ = ["MultiAnswerRewardConfig", "MultiAnswerRewardTrainer", "SharedQuestionDPOConfig", "SharedQuestionDPOTrainer"]
