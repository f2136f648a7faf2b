"""Columns of an example as arrays and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MAX_INT64 = np.iinfo(np.int64).max
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def example_names(examples: Sequence[Any]) -> list[str]:
    """Return the names of a batch's examples for errors: "example 0", ...; raise a ValueError for an empty batch."""
    if not examples:
        raise ValueError("examples is empty: a batch needs at least one example")
    return [f"example {index}" for index in range(len(examples))]


def all_have(column: str, has: Sequence[bool], names: Sequence[str]) -> bool:
    """Return whether all examples have a column; raise a ValueError if only some have."""
    if any(has) and not all(has):
        without, other = names[has.index(False)], names[has.index(True)]
        raise ValueError(f"{without} has no {column}, but {other} has; give it to all, or to none")
    return all(has)


def as_integers(values: Any, name: str) -> NDArray[np.int64]:
    """Return a flat sequence of integers or booleans as int64 [n].

    Raises a TypeError for anything else, and a ValueError for an integer that does not fit into int64.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be a flat sequence of integers, got nested ones of different lengths") from None
    except (TypeError, RuntimeError) as error:  # tensors that NumPy cannot hold
        raise TypeError(f"{name} must be a flat sequence of integers: {error}") from None
    if array.ndim != 1:
        raise TypeError(f"{name} must be a flat sequence of integers, got {array.ndim} axes")
    if array.size and array.dtype.kind not in "iub":
        got = "missing values or other objects" if array.dtype == object else array.dtype
        raise TypeError(f"{name} must be integers, got {got}")
    if array.size and array.dtype == np.uint64 and array.max() > _MAX_INT64:
        raise ValueError(f"{name} must fit into int64, got {array.max()}")
    return array.astype(np.int64, copy=False)


def as_token_ids(values: Any, name: str) -> NDArray[np.int64]:
    """Return a flat sequence of token ids as int64 [n]; errors are as in `as_integers`, and for negative ids."""
    ids = as_integers(values, name)
    if ids.size and ids.min() < 0:
        problem = f"{name} has {ids.min()}, but token ids must not be negative"
        raise ValueError(f"{problem}; are these labels, in which -100 is not learned?")
    return ids


def check_lengths(name: str, lengths: NDArray[np.int64], tokens: int) -> None:
    """Raise a ValueError unless lengths are positive and sum to the number of tokens."""
    # A sum of huge lengths wraps around.
    if not ((lengths >= 1) & (lengths <= tokens)).all() or lengths.sum() != tokens:
        raise ValueError(f"{name} must be positive and sum to the {tokens} tokens, got {lengths.tolist()!s:.60}")


def as_number(value: Any, name: str) -> float:
    """Return a Python or NumPy number, or a tensor or array without axes, as a float.

    Raises a TypeError for anything else, and a ValueError for a number that is not finite in float32.
    """
    if isinstance(value, (Tensor, np.ndarray)) and not value.ndim:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)  # float16 takes the limit for infinity
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(f"{name} must be finite and at most 3.4e38, got {number}; remove the example")
    return number


def as_numbers(values: Any, count: int, things: str, name: str) -> list[float]:
    """Return one number for each of `count` `things` as floats; booleans are 0 and 1. Errors are as in `as_number`."""
    if not hasattr(values, "__len__") or len(values) != count:
        raise ValueError(f"{name} must be one number for each of its {count} {things}, got {values!r:.80}")
    numbers = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
    return [float(x) if isinstance(x, bool) else as_number(x, f"each of the {name}") for x in numbers]
