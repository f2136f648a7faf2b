"""Checks that the collators share: their options, the columns of an example, and the errors that name it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TRUNCATION_MODES = ("error", "keep_start", "keep_end")


def check_truncation_mode(mode: str) -> None:
    """Raise a ValueError unless `mode` is one of `TRUNCATION_MODES`."""
    if mode not in TRUNCATION_MODES:
        raise ValueError(f"truncation_mode must be one of {', '.join(TRUNCATION_MODES)}, got {mode!r}")


def check_token_count(name: str, value: int | None) -> None:
    """Raise a ValueError unless the option `name` is a number of tokens, at least 1, or None."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a number of tokens, at least 1, or None, got {value!r}")


def check_row_options(
    pad_token_id: int,
    row_length: int | None,
    pad_to_multiple_of: int | None,
    max_position_embeddings: int | None,
    row_option: str = "max_length",
) -> None:
    """Raise a ValueError that names the first of these options of `pack_forests` that is out of range.

    `row_option` is the caller's name for `row_length`.
    """
    if not isinstance(pad_token_id, int) or pad_token_id < 0:
        raise ValueError(f"pad_token_id must be a token id, got {pad_token_id!r}; any one serves, for example 0")
    check_token_count(row_option, row_length)
    check_token_count("pad_to_multiple_of", pad_to_multiple_of)
    check_token_count("max_position_embeddings", max_position_embeddings)
    if row_length is not None and pad_to_multiple_of and row_length % pad_to_multiple_of:
        raise ValueError(
            f"{row_option} {row_length} must be a multiple of pad_to_multiple_of {pad_to_multiple_of}: rows have "
            f"exactly {row_option} tokens"
        )


def check_depth(name: str, depth: int, positions: int) -> None:
    """Raise a ValueError if the longest path of the tree `name` has more tokens than the model has positions."""
    if depth > positions:
        raise ValueError(
            f"{name} is {depth} tokens deep, but the model has {positions} positions (max_position_embeddings); "
            "shorten it to fit, or take a model with more positions"
        )


def example_names(examples: Sequence[Any]) -> list[str]:
    """Return the names of a batch's examples in error messages: "example 0", "example 1" and so on.

    Raises:
        ValueError: the batch is empty.
    """
    if not examples:
        raise ValueError("examples is empty: a batch needs at least one example")
    return [f"example {index}" for index in range(len(examples))]


def as_integers(values: Any, name: str) -> NDArray[np.int64]:
    """Return a flat sequence of integers or booleans as int64 [n].

    Raises:
        TypeError: `values` is something else; the message calls it `name`.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be a flat sequence of integers, got nested ones of different lengths") from None
    if array.ndim != 1:
        raise TypeError(f"{name} must be a flat sequence of integers, got {array.ndim} axes")
    if array.size and array.dtype.kind not in "iub":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def as_number(value: Any, name: str) -> float:
    """Return a Python or NumPy number, or a tensor or array without axes, as a float.

    Raises:
        TypeError: `value` is something else; the message calls it `name`.
    """
    if isinstance(value, (Tensor, np.ndarray)) and not value.ndim:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def as_answers(values: Sequence[Any], name: str) -> list[NDArray[np.int64]]:
    """Return the token ids of an example's answers, int64 [A] each.

    Args:
        values: a flat sequence of integers per answer.
        name: the example's name in error messages.

    Raises:
        TypeError: an answer does not hold integers.
        ValueError: there are fewer than two answers, or one is empty.
    """
    answers = [as_integers(answer, f"answer {nth} of {name}") for nth, answer in enumerate(values)]
    if len(answers) < 2:
        raise ValueError(f"{name} has {len(answers)} answers, but a preference needs two or more; remove it")
    for nth, answer in enumerate(answers):
        if not answer.size:
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example")
    return answers
