"""Data collator for preference optimization that packs each question once, followed by its answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.answers import as_answers, check_answers, first_equals
from flashmask_hf.collators.columns import all_have, as_number, as_token_ids, example_names
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.packing import PackingCollator, as_count, check_size, check_truncation_mode

__all__ = ["DataCollatorForSharedQuestion"]

logger = logging.getLogger(__name__)

_EMPTY_QUESTION = "nothing would predict the first token of its answers; give it a token, for example bos_token"


@dataclass
class DataCollatorForSharedQuestion(PackingCollator):
    """Data collator for preferences that packs each question once, followed by its answers.

    An example has `prompt_ids`, and either `chosen_ids` and `rejected_ids`, as `trl.DPOTrainer` prepares them, or
    `answers_ids`, a list of two or more answers, best first. `ref_chosen_logps` and `ref_rejected_logps` are passed on.

    A batch has the keys of TRL's `DataCollatorForPreference`, one sequence per answer, and the packed rows.
    `flashmask_hf.hf.packed.rows` makes the backbone run the rows and return the sequences' hidden states.
    `flashmask_hf.collators` describes the other options and errors.

    Args:
        max_length: maximum number of tokens of a question with one answer; None is no limit.
        truncation_mode: what to do if a question with its longest answer exceeds `max_length`. "error" raises.
            "keep_start" cuts the end of every answer that is too long, and warns once. "keep_end" cuts the start of the
            question, by the same amount for all answers.

    Returns:
        dict[str, Tensor]: N sequences, the first answers of all examples, then the second ones, and so on:

        * `input_ids`, `attention_mask` and `completion_mask`, int64 [N, L];
        * `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1];
        * `packed_index`, int64 [N, L]: the index of each token in the flattened rows (arbitrary for padding);
        * `question_index`, int64 [N]: the example of each sequence, if an example has more than two answers;
        * `ref_chosen_logps` and `ref_rejected_logps`, float32 [examples], if the examples have them.

    Raises:
        ValueError: also for an empty question or answer, or fewer than two answers.
        TypeError: also for a reference log-probability that is not a number.

    Example:
        >>> collator = DataCollatorForSharedQuestion()
        >>> batch = collator([{"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5],
                [1, 2, 3, 6, 0]])
        >>> batch["packed_input_ids"]
        tensor([[1, 2, 3, 4, 5, 6]])
        >>> batch["packed_position_ids"]
        tensor([[0, 1, 2, 3, 4, 3]])
        >>> batch["startend_row_indices"].flatten()
        tensor([6, 6, 6, 5, 5, 6], dtype=torch.int32)
        >>> batch["packed_index"][batch["attention_mask"].bool()]
        tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])
    """

    pad_token_id: int = 0
    max_length: int | None = None
    truncation_mode: str = "error"
    row_length: int | None = None
    pad_to_multiple_of: int | None = None
    max_position_embeddings: int | None = None
    _warned: bool = field(default=False, init=False, repr=False, compare=False)

    _row_option = "row_length"

    def __post_init__(self):
        super().__post_init__()
        check_truncation_mode(self.truncation_mode)
        self.max_length = as_count("max_length", self.max_length)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        read = [self._read(example, name) for example, name in zip(examples, names, strict=True)]
        rows = self._pack([Forest.shared_question(question, answers) for question, answers in read], names)
        most = max(len(answers) for _, answers in read)
        sequences = [
            (index, nth) for nth in range(most) for index, (_, answers) in enumerate(read) if nth < len(answers)
        ]
        width = max(len(question) + len(answer) for question, answers in read for answer in answers)
        shape = (len(sequences), width)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        completion_mask = np.zeros(shape, dtype=np.int64)
        packed_index = np.arange(input_ids.size).reshape(shape) % rows.input_ids.size  # distinct entries as padding
        firsts = [first_equals(answers) for _, answers in read]
        for at, (index, nth) in enumerate(sequences):
            forest = rows.forests[index]
            path = forest.path(1 + firsts[index][nth])
            input_ids[at, : len(path)] = forest.tokens[path]
            attention_mask[at, : len(path)] = 1
            completion_mask[at, int(forest.lengths[0]) : len(path)] = 1
            packed_index[at, : len(path)] = rows.starts[index] + path
        batch = {  # input_ids first: accelerate takes the batch size from it
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "completion_mask": torch.from_numpy(completion_mask),
            **rows.indexed_batch(packed_index),
        }
        if most > 2:
            batch["question_index"] = torch.tensor([index for index, _ in sequences])
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            if all_have(column, [example.get(column) is not None for example in examples], names):
                given = zip(examples, names, strict=True)
                batch[column] = torch.tensor([as_number(e[column], f"{column} of {name}") for e, name in given])
        return batch

    def check_lengths(self, question: int, answers: Sequence[int], name: str) -> bool:
        """Return whether `max_length` cuts an example with these numbers of tokens.

        Raises:
            ValueError: collating the example would raise because of its lengths.
        """
        if not question:
            raise ValueError(f"{name} has an empty question: {_EMPTY_QUESTION}")
        check_answers(answers, name)
        cut, room = self._cut(question, answers, name)
        kept = [min(answer, room) for answer in answers]
        depth = question - cut + max(kept)
        check_size(name, question - cut + sum(kept), depth, self.row_length, self.max_position_embeddings)
        return depth < question + max(answers)

    def _read(self, example: Mapping[str, Any], name: str) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """Return an example's question, int64 [Q], and answers, int64 [A] each, truncated."""
        has = {column: value for column, value in example.items() if value is not None}
        if "answers_ids" in has and "chosen_ids" in has:
            raise ValueError(f"{name} has answers_ids and chosen_ids; remove one of the columns")
        columns = ["answers_ids"] if "answers_ids" in has else ["chosen_ids", "rejected_ids"]
        missing = [column for column in ("prompt_ids", *columns) if column not in has]
        if missing:
            raise ValueError(
                f"{name} has no {' and no '.join(missing)}; it needs prompt_ids with answers_ids, or with chosen_ids "
                f"and rejected_ids. It has: {', '.join(map(str, has)) or 'nothing'}"
            )
        question = as_token_ids(has["prompt_ids"], f"prompt_ids of {name}")
        if not question.size:
            raise ValueError(f"{name} has an empty question: {_EMPTY_QUESTION}")
        answers = as_answers(has.get("answers_ids", [has.get(column) for column in columns]), name)
        cut, room = self._cut(len(question), [len(answer) for answer in answers], name)
        if self.truncation_mode == "keep_start" and any(len(answer) > room for answer in answers):
            self._warn_of_cut(len(question), answers, room, name)
        return question[cut:], [answer[:room] for answer in answers]

    def _cut(self, question: int, answers: Sequence[int], name: str) -> tuple[int, int]:
        """Return how many tokens `max_length` cuts from the start of a question, and how many it leaves per answer."""
        longest = question + max(answers)
        if self.max_length is None or longest <= self.max_length:
            return 0, longest
        limit = f"max_length {self.max_length}; raise it"
        if self.truncation_mode == "error":
            problem = f"{name} has {longest} tokens with its longest answer, more than {limit}"
            raise ValueError(f"{problem}, or choose truncation_mode='keep_start' or 'keep_end'")
        if self.truncation_mode == "keep_start":
            if question >= self.max_length:
                problem = f"the question of {name} has {question} tokens and fills {limit}"
                raise ValueError(f"{problem}, remove the example, or choose truncation_mode='keep_end'")
            return 0, self.max_length - question
        excess = longest - self.max_length
        if excess >= question:
            problem = f"the longest answer of {name} fills {limit}"
            raise ValueError(f"{problem}, remove the example, or choose truncation_mode='keep_start'")
        return excess, longest

    def _warn_of_cut(self, question: int, answers: Sequence[NDArray[np.int64]], room: int, name: str) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s of a batch has %d tokens with its longest answer: truncation_mode='keep_start' cuts %d of its %d "
            "answers to max_length %d. Other examples are cut without another warning.",
            name, question + max(map(len, answers)), sum(len(answer) > room for answer in answers), len(answers),
            self.max_length,
        )  # fmt: skip
