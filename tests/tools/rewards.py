"""Helpers of reward model tests: data, models, trainers, and the definitions of the losses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.tiny import EXACT, VOCAB, llama_config, preference_rows, trainer_settings, word_tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig

from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer

CLOSE = {"rtol": EXACT, "atol": EXACT}
OURS = ("mask_sparsity", "shared_tokens_saved", "accuracy_of_2_answers")
"""Metrics of pairs that TRL does not have."""

CHAT = (
    "{% if tools %}{{ 'w6 ' }}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or 'w5') + ' ' }}"
    "{% if m['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if suffix is defined %}{{ suffix }}{% endif %}"
)

USER, BEST, WORST = ({"role": r, "content": c} for r, c in (("user", "w8"), ("assistant", "w9"), ("assistant", "w10")))
"""A question and two answers as messages."""


def reward_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word tokenizer with a chat template."""
    return word_tokenizer("user", "assistant", "system", chat_template=CHAT)


def margin_rows(count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Draw preference rows in TRL's standard format, with margins."""
    return [row | {"margin": 0.25 * index - 0.5} for index, row in enumerate(preference_rows(count, seed))]


def without(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    """Return a row without some of its columns."""
    return {key: value for key, value in row.items() if key not in columns}


def scored(counts: tuple[int, ...] = (2, 6, 3, 4, 5, 3), seed: int = 0) -> list[dict[str, Any]]:
    """Draw a tokenized example per number of answers, with scores, some of them tied."""
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> list[int]:
        return rng.integers(8, VOCAB, rng.integers(1, most)).tolist()

    return [
        {
            "prompt_ids": tokens(9),
            "answers_ids": [tokens(7) for _ in range(count)],
            "scores": [0.0, *rng.integers(0, 3, count - 2).tolist(), 2.5],
        }
        for count in counts
    ]


def save_reward_model(path: Any) -> str:
    """Write a tiny reward model to a folder, and return its path."""
    torch.manual_seed(0)
    config = llama_config(initializer_range=0.2, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return str(path)


def load(path: str, attention: str = "flashmask", dtype: torch.dtype = torch.float64) -> Any:
    """Load a reward model with an attention implementation."""
    return AutoModelForSequenceClassification.from_pretrained(path, attn_implementation=attention, dtype=dtype)


def settings(out: Any, config_class: type = MultiAnswerRewardConfig, **options: Any) -> Any:
    """Return trainer arguments of a short run on the CPU."""
    return config_class(**(trainer_settings(out) | options))


def make(
    trainer_class: type,
    model_path: str,
    tokenizer: Any,
    out: Any,
    data: Any = None,
    *,
    lora: bool = False,
    model: Any = None,
    **options: Any,
) -> Any:
    """Build a trainer: "flashmask" attention for ours, eager attention for stock TRL.

    Args:
        trainer_class: `MultiAnswerRewardTrainer` or `trl.RewardTrainer`.
        model_path: path of the reward model.
        tokenizer: the tokenizer.
        out: the output folder.
        data: rows or a dataset; preference rows by default.
        lora: train a random LoRA adapter and the head.
        model: a model instead of the one of `model_path`.
        **options: arguments of the trainer or of its config.
    """
    ours = trainer_class is MultiAnswerRewardTrainer
    names = ("data_collator", "eval_dataset", "compute_metrics", "peft_config")
    keywords = {name: options.pop(name) for name in names if name in options}
    if lora:
        keywords["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "up_proj"],
            modules_to_save=["score"], task_type="SEQ_CLS",
        )  # fmt: skip
        torch.manual_seed(1)
    if data is None:
        data = preference_rows()
    return trainer_class(
        load(model_path, "flashmask" if ours else "eager") if model is None else model,
        args=settings(out, MultiAnswerRewardConfig if ours else RewardConfig, **options),
        train_dataset=Dataset.from_list(data) if isinstance(data, list) else data,
        processing_class=tokenizer,
        **keywords,
    )


def losses_of(trainer: Any) -> list[dict[str, float]]:
    """Train, and return the logged metrics of each step."""
    trainer.train()
    return [without(entry, "epoch") for entry in trainer.state.log_history if "loss" in entry]


def separate_rewards(model: Any, example: dict[str, Any]) -> Tensor:
    """Return the reward of each answer from a forward of its own, pooled at the last token, [N]."""
    rewards = []
    for answer in example["answers_ids"]:
        tokens = torch.tensor([example["prompt_ids"] + answer])
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        rewards.append(model.score(hidden[0, -1])[0])
    return torch.stack(rewards)


def pairs_of(scores: Any) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of answers in which answer i has the higher score."""
    return [(i, j) for i, j in itertools.permutations(range(len(scores)), 2) if scores[i] > scores[j]]


def defined_pairwise(rewards: Tensor, scores: Any, margin: float = 0.0) -> Any:
    """Compute the pairwise loss of one question from its definition."""
    losses = [
        -torch.sigmoid(rewards[i] - rewards[j] - margin * (scores[i] - scores[j])).log() for i, j in pairs_of(scores)
    ]
    return sum(losses) / len(losses)


def defined_listwise(rewards: Tensor, scores: Any, margin: float = 0.0) -> Any:
    """Compute the Plackett-Luce loss of one question from its definition."""
    loss = 0.0
    for i in range(len(scores)):
        beaten = [j for winner, j in pairs_of(scores) if winner == i]
        rivals = [rewards[i], *(rewards[j] + margin * (scores[i] - scores[j]) for j in beaten)]
        loss = loss - (rewards[i].exp() / sum(r.exp() for r in rivals)).log()
    return loss


def defined_centering(rewards: Tensor, scores: Any) -> Any:
    """Compute the mean of (r_i + r_j)^2 over the pairs of one question."""
    squares = [(rewards[i] + rewards[j]) ** 2 for i, j in pairs_of(scores)]
    return sum(squares) / len(squares)


DEFINITIONS = {"pairwise": defined_pairwise, "listwise": defined_listwise}
"""Definition of each `loss_type`."""
