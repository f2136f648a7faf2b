"""Checks that the collators share: their options, the columns of an example, and the errors that name it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MAX_INT64 = np.iinfo(np.int64).max
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def check_truncation_mode(mode: str) -> None:
    """Raise a ValueError unless `mode` is "error", "keep_start" or "keep_end"."""
    if mode not in ("error", "keep_start", "keep_end"):
        raise ValueError(f"truncation_mode must be one of error, keep_start, keep_end, got {mode!r}")


def as_count(name: str, value: Any, what: str = "a number of tokens, at least 1, or None") -> int | None:
    """Return an option as an int of at least 1, or None.

    Args:
        name: the option, for the error.
        value: None, or anything that `operator.index` takes, but no bool.
        what: what the option must be, for the error.

    Raises:
        ValueError: `value` is something else, or less than 1.
    """
    if value is None:
        return None
    count = _index(value)
    if count is None or count < 1:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return count


def as_row_options(
    pad_token_id: Any,
    row_length: Any,
    pad_to_multiple_of: Any,
    max_position_embeddings: Any,
    row_option: str = "max_length",
) -> tuple[int, int | None, int | None, int | None]:
    """Return these options of `pack_forests` as ints, or raise a ValueError that names the first one out of range.

    `row_option` is the caller's name for `row_length`.
    """
    pad = _index(pad_token_id)
    if pad is None or not 0 <= pad <= _MAX_INT64:
        raise ValueError(f"pad_token_id must be a token id, got {pad_token_id!r}; any one serves, for example 0")
    row = as_count(row_option, row_length)
    multiple = as_count("pad_to_multiple_of", pad_to_multiple_of)
    if row is not None and multiple and row % multiple:
        raise ValueError(
            f"{row_option} {row} must be a multiple of pad_to_multiple_of {multiple}: rows have exactly {row_option} "
            "tokens"
        )
    return pad, row, multiple, as_count("max_position_embeddings", max_position_embeddings)


def _index(value: Any) -> int | None:
    """Return an integer of any type as an int, or None for a bool and for everything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


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
        ValueError: an integer does not fit into int64.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be a flat sequence of integers, got nested ones of different lengths") from None
    except (TypeError, RuntimeError) as error:  # of tensors that NumPy cannot hold
        raise TypeError(f"{name} must be a flat sequence of integers: {error}") from None
    if array.ndim != 1:
        raise TypeError(f"{name} must be a flat sequence of integers, got {array.ndim} axes")
    if array.size and array.dtype.kind not in "iub":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.size and array.dtype == np.uint64 and array.max() > _MAX_INT64:
        raise ValueError(f"{name} must fit into int64, got {array.max()}")
    return array.astype(np.int64, copy=False)


def as_token_ids(values: Any, name: str) -> NDArray[np.int64]:
    """Return a flat sequence of token ids as int64 [n].

    Raises:
        TypeError: `values` is something else; the message calls it `name`.
        ValueError: an id is negative, as of labels, or does not fit into int64.
    """
    ids = as_integers(values, name)
    if ids.size and ids.min() < 0:
        raise ValueError(negative_message(name, ids.min()))
    return ids


def negative_message(name: str, least: int) -> str:
    """Return the error message of token ids of which one is negative."""
    return f"{name} has {least}, but token ids must not be negative; are these labels, in which -100 is not learned?"


def check_lengths(name: str, lengths: NDArray[np.int64], tokens: int) -> None:
    """Raise a ValueError unless the lengths of the parts of `tokens` tokens are positive and sum to their number.

    Each length is compared with `tokens` too, because a sum of large ones wraps around to any number.
    """
    if not ((lengths >= 1) & (lengths <= tokens)).all() or lengths.sum() != tokens:
        shown = ", ".join(map(str, lengths[:16].tolist())) + ", ..." * (len(lengths) > 16)
        raise ValueError(f"{name} must be positive and sum to the number of tokens, {tokens}, got [{shown}]")


def as_number(value: Any, name: str) -> float:
    """Return a Python or NumPy number, or a tensor or array without axes, as a float.

    Raises:
        TypeError: `value` is something else; the message calls it `name`.
        ValueError: it is not finite, or too large for float32.
    """
    if isinstance(value, (Tensor, np.ndarray)) and not value.ndim:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # of an int
        number = math.inf
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(f"{name} must be finite and at most 3.4e38, as float32, got {number:g}; remove the example")
    return number


def as_answers(values: Sequence[Any], name: str) -> list[NDArray[np.int64]]:
    """Return the token ids of an example's answers, int64 [A] each.

    Args:
        values: a flat sequence of integers per answer.
        name: the example's name in error messages.

    Raises:
        TypeError: `values` is no sequence, or an answer does not hold integers.
        ValueError: there are fewer than two answers, or one is empty or has a negative id.
    """
    if not hasattr(values, "__iter__"):
        raise TypeError(f"answers_ids of {name} must be a list of answers, got {values!r}")
    answers = [as_token_ids(answer, f"answer {nth} of {name}") for nth, answer in enumerate(values)]
    if len(answers) < 2:
        raise ValueError(f"{name} has {len(answers)} answers, but a preference needs two or more; remove it")
    for nth, answer in enumerate(answers):
        if not answer.size:
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example")
    return answers
