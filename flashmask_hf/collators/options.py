"""Checks of the options that the collators and `pack_dataset` share."""

from __future__ import annotations

from typing import Any

from flashmask_hf._numbers import as_integer

__all__ = ["as_count", "as_row_options", "check_truncation_mode"]


def check_truncation_mode(mode: str) -> None:
    """Raise a ValueError unless `mode` is "error", "keep_start" or "keep_end"."""
    if mode not in ("error", "keep_start", "keep_end"):
        raise ValueError(f"truncation_mode must be one of error, keep_start, keep_end, got {mode!r}")


def as_count(name: str, value: Any) -> int | None:
    """Return an option as an int of at least 1, or None; the errors are `as_integer`'s."""
    return None if value is None else as_integer(name, value, 1, why="or None")


def as_row_options(
    pad_token_id: Any,
    row_length: Any,
    pad_to_multiple_of: Any,
    max_position_embeddings: Any,
    row_option: str = "max_length",
) -> tuple[int, int | None, int | None, int | None]:
    """Return these options of `pack_forests` as ints.

    `row_option` is the caller's name for `row_length`.

    Raises:
        TypeError: an option is not an int; `pad_token_id` is None.
        ValueError: an option is out of range, or the row length is not a multiple of `pad_to_multiple_of`.
    """
    if pad_token_id is None:
        raise TypeError("pad_token_id must be a token id, got None; any serves, for example 0")
    pad = as_integer("pad_token_id", pad_token_id, 0, 2**63 - 1, why="any token id serves, for example 0")
    row = as_count(row_option, row_length)
    multiple = as_count("pad_to_multiple_of", pad_to_multiple_of)
    if row is not None and multiple and row % multiple:
        raise ValueError(
            f"{row_option} {row} must be a multiple of pad_to_multiple_of {multiple}: rows have exactly {row_option} "
            "tokens"
        )
    return pad, row, multiple, as_count("max_position_embeddings", max_position_embeddings)
