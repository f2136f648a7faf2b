"""Answers to one question: their token ids, and which of them are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.columns import as_token_ids


def read_answers(
    example: Mapping[str, Any], forms: Sequence[Sequence[str]], name: str
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return an example's question, int64 [Q], empty without `prompt_ids`, and its answers, int64 [A] each.

    Raises:
        TypeError: a column does not hold integers, or `answers_ids` is no sequence.
        ValueError: the example has not the columns of exactly one of the `forms`; there are fewer than two answers; an
            answer is empty; or a token id is negative.
    """
    has = [column for column, value in example.items() if value is not None]
    if set(has) & set(chain(*forms)) not in map(set, forms):
        ways = ", or ".join(map(" and ".join, forms))
        raise ValueError(f"{name} needs {ways}, but not both. It has: {', '.join(map(str, has)) or 'nothing'}")
    values = example["answers_ids"] if "answers_ids" in has else [example["chosen_ids"], example["rejected_ids"]]
    if not hasattr(values, "__iter__"):
        raise TypeError(f"answers_ids of {name} must be a list of answers, got {values!r}")
    answers = [as_token_ids(answer, f"answer {nth} of {name}") for nth, answer in enumerate(values)]
    if len(answers) < 2:
        raise ValueError(f"{name} has {len(answers)} answers, but a preference needs two or more; remove it")
    for nth, answer in enumerate(answers):
        if not answer.size:
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example")
    return as_token_ids(example["prompt_ids"] if "prompt_ids" in has else [], f"prompt_ids of {name}"), answers


def first_equals(answers: Sequence[NDArray[np.int64]], places: Sequence[Any]) -> list[Any]:
    """Return for each answer the place of the first with the same tokens: copies in a row round differently."""
    found: dict[bytes, Any] = {}
    return [found.setdefault(answer.tobytes(), place) for answer, place in zip(answers, places, strict=True)]
