"""Checks of the options that the collators and `pack_dataset` share."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["as_count", "as_row_options", "check_truncation_mode"]


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
    """Return these options of `pack_forests` as ints, or raise a ValueError that names the first invalid one.

    `row_option` is the caller's name for `row_length`.
    """
    pad = _index(pad_token_id)
    if pad is None or not 0 <= pad < 2**63:
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
