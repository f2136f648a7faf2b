"""Answers to one question: their token ids, and which of them are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.columns import as_token_ids

__all__ = ["as_answers", "check_answers", "first_equals"]


def as_answers(values: Any, name: str) -> list[NDArray[np.int64]]:
    """Return the token ids of an example's answers, int64 [A] each.

    Raises:
        TypeError: `values` is no sequence, or an answer does not hold integers.
        ValueError: there are fewer than two answers, or one is empty or has a negative id.
    """
    if not hasattr(values, "__iter__"):
        raise TypeError(f"answers_ids of {name} must be a list of answers, got {values!r}")
    answers = [as_token_ids(answer, f"answer {nth} of {name}") for nth, answer in enumerate(values)]
    check_answers([len(answer) for answer in answers], name)
    return answers


def check_answers(lengths: Sequence[int], name: str) -> None:
    """Raise a ValueError if an example has fewer than two answers, or an empty one."""
    if len(lengths) < 2:
        raise ValueError(f"{name} has {len(lengths)} answers, but a preference needs two or more; remove it")
    for nth, length in enumerate(lengths):
        if not length:
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example")


def first_equals(answers: Sequence[NDArray[np.int64]]) -> list[int]:
    """Return, for each of N answers, the index of the first answer with the same tokens.

    Copies of an answer round differently at different places of a packed row, so the first is read for all.
    """
    found: dict[bytes, int] = {}
    return [found.setdefault(answer.tobytes(), nth) for nth, answer in enumerate(answers)]
