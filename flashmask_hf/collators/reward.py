"""Data collator for reward models of two or more answers per question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flashmask_hf.collators.answers import first_equals, read_answers
from flashmask_hf.collators.columns import all_have, as_number, as_numbers, example_names
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.packing import PackingCollator
from flashmask_hf.collators.prefixes import common_length

_FORMS = (("prompt_ids", "answers_ids"), ("chosen_ids", "rejected_ids"))

PADDING = -100.0
"""Score of entries that pad a question to the largest number of answers."""


@dataclass
class DataCollatorForMultiAnswerReward(PackingCollator):
    """Data collator for reward models that packs each question once, followed by its answers.

    An example has one of these forms:

    * `prompt_ids` (may be empty) and `answers_ids`, the tokens of two or more answers, with `scores`, a number per
      answer, higher is better, or ranked, best first.
    * `chosen_ids` and `rejected_ids`, whole sequences as `trl.RewardTrainer` prepares them, with the question as common
      prefix.

    `margin` is the number by which the reward of the better of two answers must exceed the other, as in TRL.

    Args:
        score_margin: a pair's margin is `score_margin` times the difference of its scores (Llama 2,
            https://huggingface.co/papers/2307.09288, section 3.2.2, equation 2), 0 for none. An example then needs
            `scores` or a `margin`. `flashmask_hf.collators` describes the other options and errors.

    Returns:
        dict[str, Tensor]: for B examples with at most N answers each, padded to N:

        * `answer_counts`, int64 [B];
        * `token_counts`, int64 [B, 2]: tokens in the row, and with the question repeated per answer;
        * `scores`, float32 [B, N]: for ranked answers, how many are ranked worse; -100 for padding;
        * `margins`, float32 [B, N], if any: a pair's margin is the difference of its answers' entries;
        * `input_ids`, int64 [B * N, 1]: the last token of each answer (padding repeats the last answer);
        * `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1];
        * `packed_index`, int64 [B * N, 1]: the index in the flattened rows of each last token.

    Raises:
        ValueError: also for fewer than two answers, an empty answer, scores that are not finite or all equal, or a
            margin of other than two answers.

    Example:
        >>> examples = [
        ...     {"prompt_ids": [1, 2, 3], "answers_ids": [[4, 5], [6], [7]], "scores": [8.0, 2.5, 9.0]},
        ...     {"chosen_ids": [1, 2, 8], "rejected_ids": [1, 2, 9, 9]},
        ... ]
        >>> batch = DataCollatorForMultiAnswerReward()(examples)
        >>> batch["scores"]
        tensor([[   8.0000,    2.5000,    9.0000],
                [   1.0000,    0.0000, -100.0000]])
        >>> batch["packed_input_ids"]
        tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 9, 9]])
        >>> batch["packed_index"].flatten()
        tensor([ 4,  5,  6,  9, 11, 11])
    """

    pad_token_id: int = 0
    row_length: int | None = None
    pad_to_multiple_of: int | None = None
    max_position_embeddings: int | None = None
    score_margin: float = 0.0

    _row_option = "row_length"

    def __post_init__(self):
        super().__post_init__()
        margin = self.score_margin
        if isinstance(margin, bool) or not isinstance(margin, Real) or not 0 <= margin < math.inf:
            raise ValueError(f"score_margin must be a number, at least 0 (no margins), got {margin!r}")

    @property
    def _optional_columns(self) -> tuple[str, ...]:
        return () if self.score_margin else ("margin",)  # otherwise only ranked answers lack one

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        read = [self._read(example, name) for example, name in zip(examples, names, strict=True)]
        forests, answers, scores, margins = zip(*read, strict=True)
        rows = self._pack(forests, names)
        last: list[list[int]] = []
        tokens: list[tuple[int, int]] = []
        for start, forest, own in zip(rows.starts, forests, answers, strict=True):
            ends = start + np.cumsum(forest.lengths) - 1
            last.append(first_equals(own, ends[-len(own) :].tolist()))
            count = len(forest.tokens)
            question = count - sum(map(len, own))
            tokens.append((count, count + (len(own) - 1) * question))
        most = max(map(len, last))
        index = torch.tensor([own + own[-1:] * (most - len(own)) for own in last])
        batch = {  # answer_counts first: Trainer reads the batch size from it, so that questions weigh alike
            "answer_counts": torch.tensor([len(own) for own in last]),
            "token_counts": torch.tensor(tokens),
            "scores": pad_sequence([torch.from_numpy(own) for own in scores], True, PADDING),
        }
        if all_have("margin", [own is not None for own in margins], names):
            batch["margins"] = pad_sequence([torch.from_numpy(own) for own in margins], True)
        batch["input_ids"] = torch.from_numpy(rows.input_ids).flatten()[index].view(-1, 1)
        return batch | rows.indexed_batch(index.view(-1, 1))

    def check(self, example: Mapping[str, Any], name: str) -> bool:
        """Return False: nothing is cut. Raise the error that collating an example would raise."""
        self._check_size(self._read(example, name)[0], name)
        return False

    def _read(
        self, example: Mapping[str, Any], name: str
    ) -> tuple[Forest, list[NDArray[np.int64]], NDArray[np.float32], NDArray[np.float32] | None]:
        """Return an example's forest, its N answers, int64 [A] each, and their scores and any margins, float32 [N]."""
        question, answers = read_answers(example, _FORMS, name)
        scored = None
        if example.get("answers_ids") is None:
            shared = shared_prefix(answers)
            question, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        else:
            scored = example.get("scores")
        scores = answer_scores(scored, len(answers), name)
        margins = self._margins(example, scores, scored is not None, name)
        trees = [(question, answers)] if question.size else answers
        return Forest.from_trees(*trees), answers, scores, margins

    def _margins(
        self, example: Mapping[str, Any], scores: NDArray[np.float32], scored: bool, name: str
    ) -> NDArray[np.float32] | None:
        """Return the margins of an example's answers, float32 [N], or None if it has none."""
        margin = example.get("margin")
        if margin is None and not self.score_margin:
            return None
        if margin is None:
            if not scored:
                raise ValueError(
                    f"{name} has neither scores nor a margin, but score_margin is {self.score_margin}; give it scores "
                    "(score_chosen and score_rejected for a pair), or set score_margin=0"
                )
            return np.float32(self.score_margin) * scores
        margin = as_number(margin, f"margin of {name}")
        if len(scores) != 2:
            raise ValueError(f"{name} has a margin and {len(scores)} answers, not two; use scores and score_margin")
        if self.score_margin and scored:
            raise ValueError(two_margins(name, self.score_margin))
        return np.where(scores == scores.max(), margin, 0.0).astype(np.float32)


def answer_scores(scores: Any, count: int, name: str) -> NDArray[np.float32]:
    """Return an example's scores, float32 [count]; None, for ranked answers, gives count - 1, ..., 0.

    Raises a TypeError for scores that are not numbers, and a ValueError if they are not `count`, not finite, or equal.
    """
    if scores is None:
        return np.arange(count - 1, -1, -1, dtype=np.float32)
    values = np.array(as_numbers(scores, count, "answers", f"scores of {name}"), dtype=np.float32)
    if (values == values[0]).all():
        way = "dataset.filter(lambda example: len(set(example['scores'])) > 1)"
        raise ValueError(f"the scores of {name} are all {values[0]:g}, so it prefers no answer; remove it: {way}")
    return values


def two_margins(name: str, score_margin: float) -> str:
    """Return the message of an example with a margin, and with scores that `score_margin` makes another of."""
    return f"{name} has a margin, and scores that score_margin={score_margin} makes another of; remove one of them"


def shared_prefix(sequences: Sequence[NDArray[np.int64]]) -> int:
    """Return the length of the longest common prefix that leaves each sequence at least one token."""
    common = [common_length(sequences[0], sequence) for sequence in sequences]
    return min(*common, min(map(len, sequences)) - 1)
