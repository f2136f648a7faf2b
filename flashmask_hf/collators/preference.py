"""Data collator for preference optimization that packs each question once, followed by its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.answers import first_equals, read_answers
from flashmask_hf.collators.columns import all_have, as_number, example_names
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.images import TOKEN_TYPES, add_image_tokens
from flashmask_hf.collators.labels import NO_WEIGHT, WEIGHT
from flashmask_hf.collators.packing import PackingCollator, as_count, check_truncation_mode
from flashmask_hf.collators.rope_index import RopeIndex
from flashmask_hf.names import PAIR_WEIGHTS

_NUMBERS = ("ref_chosen_logps", "ref_rejected_logps", WEIGHT)
"""Columns of one number per example."""

_FORMS = (("prompt_ids", "chosen_ids", "rejected_ids"), ("prompt_ids", "answers_ids"))


@dataclass
class DataCollatorForSharedQuestion(PackingCollator):
    """Data collator for preferences that packs each question once, followed by its answers.

    An example has `prompt_ids`, and either `chosen_ids` and `rejected_ids`, as `trl.DPOTrainer` prepares them, or
    `answers_ids`, a list of two or more answers, best first. `ref_chosen_logps`, `ref_rejected_logps` and `weight`, a
    factor of at least 0 of the example's loss, are passed on.

    A batch has the keys of TRL's `DataCollatorForPreference`, one sequence per answer, and the packed rows, which the
    trainer's backbone runs. `flashmask_hf.collators` describes the other options and errors.

    Args:
        max_length: maximum number of tokens of a question with one answer; None is no limit.
        truncation_mode: what to do if a question with its longest answer exceeds `max_length`. "error" raises.
            "keep_start" cuts the end of every answer that is too long, and warns once. "keep_end" cuts the start of the
            question; it raises for images.
        read_images: reads raw examples with images, as `flashmask_hf.trainers.images.VisionPreferences` does.
        rope_index: `RopeIndex.of(model)` for raw examples, or None for models whose tokens have one position.

    Returns:
        dict[str, Tensor]: N sequences, the first answers of all examples, then the second ones, and so on:

        * `input_ids`, `attention_mask` and `completion_mask`, int64 [N, L];
        * `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1];
        * with images also token types, int64 [R, S], the pixels of each prompt once, and with a `rope_index` positions
          [4, R, S]: depths, then the model's axes;
        * `packed_index`, int64 [N, L]: the index of each token in the flattened rows (arbitrary for padding);
        * `question_index`, int64 [N]: the example of each sequence, if one has more than two answers;
        * `ref_chosen_logps`, `ref_rejected_logps` and, from `weight`, `pair_weights`, float32 [examples], if given.

    Raises:
        ValueError: also for an empty question or answer, fewer than two answers, or a negative weight.

    Example:
        >>> example = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
        >>> batch = DataCollatorForSharedQuestion()([example])
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
    read_images: Callable[[Sequence[Any]], tuple[list[dict[str, Any]], dict[str, Tensor]]] | None = None
    rope_index: RopeIndex | None = None

    _row_option = "row_length"
    _optional_columns = _NUMBERS

    def __post_init__(self):
        super().__post_init__()
        check_truncation_mode(self.truncation_mode)
        self.max_length = as_count("max_length", self.max_length)
        if self.read_images is not None and self.row_length is not None:
            raise ValueError("row_length reorders examples, and their images would not follow; leave it out")
        if self.read_images is not None and self.truncation_mode == "keep_end" and self.max_length is not None:
            raise ValueError("truncation_mode='keep_end' would cut images of questions; take 'keep_start', or 'error'")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        tokenized, pixels = (examples, {}) if self.read_images is None else self.read_images(examples)
        read = [self._read(example, name) for example, name in zip(tokenized, names, strict=True)]
        for name, (question, answers, longest) in zip(names, read, strict=True):
            if self.truncation_mode == "keep_start" and longest > len(question) + max(map(len, answers)):
                self._warn_once(
                    "%s of a batch has %d tokens with its longest answer: truncation_mode='keep_start' cuts answers to "
                    "max_length %d. Other examples are cut without another warning.", name, longest, self.max_length,
                )  # fmt: skip
        rows = self._pack([Forest.from_trees((question, answers)) for question, answers, _ in read], names)
        segments = [first_equals(answers, range(1, len(answers) + 1)) for _, answers, _ in read]
        most = max(map(len, segments))
        leaves = [(index, own[nth]) for nth in range(most) for index, own in enumerate(segments) if nth < len(own)]
        trees = [index for index, _ in leaves]
        starts = torch.tensor([len(read[index][0]) for index in trees])[:, None]
        ends = starts + torch.tensor([len(read[index][1][segment - 1]) for index, segment in leaves])[:, None]
        at = torch.arange(int(ends.max()))
        real = at < ends
        place = rows.place(leaves, real.numpy())
        batch = {  # input_ids first: accelerate takes the batch size from it
            "input_ids": torch.from_numpy(rows.input_ids.ravel()[place]).where(real, self.pad_token_id),
            "attention_mask": real.long(),
            "completion_mask": (real & (at >= starts)).long(),
            **rows.indexed_batch(place),
        }
        if self.read_images is not None:
            types = {name: torch.zeros_like(batch["input_ids"]) for name in TOKEN_TYPES if name in tokenized[0]}
            for name, values in types.items():
                for row, index in zip(values, trees, strict=True):
                    row[: len(tokenized[index][name])] = tokenized[index][name]
            sizes = [tokenized[index]["sizes"] for index in trees]
            add_image_tokens(batch, batch["input_ids"], real, types, sizes, trees, self.rope_index)
            batch |= pixels
        if most > 2:
            batch["question_index"] = torch.tensor(trees)
        for column in _NUMBERS:
            values = [read_number(e.get(column), column, name) for e, name in zip(examples, names, strict=True)]
            if all_have(column, [value is not None for value in values], names):
                batch[PAIR_WEIGHTS if column == WEIGHT else column] = torch.tensor(values)
        return batch

    def check(self, example: Mapping[str, Any], name: str) -> bool:
        """Return whether `max_length` cuts an example; raise the error that collating its tokens would raise."""
        question, answers, longest = self._read(example, name)
        self._check_size(Forest.from_trees((question, answers)), name)
        return longest > len(question) + max(map(len, answers))

    def _read(self, example: Mapping[str, Any], name: str) -> tuple[NDArray[np.int64], list[NDArray[np.int64]], int]:
        """Return question, int64 [Q], and answers, int64 [A] each, truncated, and the longest path before that."""
        question, answers = read_answers(example, _FORMS, name)
        size, most = len(question), max(map(len, answers))
        longest, limit = size + most, self.max_length
        if not size:
            raise ValueError(f"{name} has an empty question, which predicts no answer's first token; give it a token")
        if limit is None or longest <= limit:
            return question, answers, longest
        if self.truncation_mode == "error":
            problem = f"{name} has {longest} tokens with its longest answer, more than max_length {limit}; raise it"
            raise ValueError(f"{problem}, or choose truncation_mode='keep_start' or 'keep_end'")
        keeps_start = self.truncation_mode == "keep_start"
        part, kept, other = ("question", size, "keep_end") if keeps_start else ("longest answer", most, "keep_start")
        if kept >= limit:
            problem = f"the {part} of {name} has {kept} tokens and fills max_length {limit}; raise it"
            way = "or remove the example"  # images are never cut
            if self.read_images is None:
                way = f"remove the example, or choose truncation_mode={other!r}"
            raise ValueError(f"{problem}, {way}")
        if keeps_start:
            return question, [answer[: limit - size] for answer in answers], longest
        return question[longest - limit :], answers, longest


def read_number(value: Any, column: str, name: str) -> float | None:
    """Return the number in a column of an example, None if there is none; raise for a negative weight."""
    if value is None:
        return None
    try:
        number = as_number(value, f"{column} of {name}")
    except TypeError as error:
        raise TypeError(f"{error}; correct it, or {NO_WEIGHT}" if column == WEIGHT else str(error)) from None
    if column == WEIGHT and number < 0:
        raise ValueError(f"weight of {name} must be at least 0, got {number:g}; swap its answers, or remove it")
    return number
