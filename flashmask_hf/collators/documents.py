"""Reader of the documents of an example: a single one, or those of a row of `pack_dataset` or of another packer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators._validation import as_integers, as_token_ids, check_lengths

__all__ = [
    "empty_message",
    "is_packed",
    "padding_message",
    "read_documents",
    "too_long_message",
    "unequal_message",
    "unread_documents",
]


def is_packed(values: Any) -> bool:
    """Return whether a column of an example is that of a row of `pack_dataset`: documents, and an empty list."""
    try:
        return len(values) > 0 and np.ndim(values[-1]) == 1 and len(values[-1]) == 0
    except (TypeError, ValueError):  # a number, or a ragged list
        return False


def read_documents(
    example: Mapping[str, Any], columns: Sequence[str], name: str
) -> tuple[dict[str, Any], NDArray[np.int64], NDArray[np.int64]]:
    """Read an example: a single document, or a packed row of any kind.

    Args:
        example: a dictionary with `input_ids`: the tokens of one document; or of a packed row, flat beside
            `seq_lengths` or `position_ids`, or as `pack_dataset` writes it. A column that is None counts as absent.
        columns: the names of other columns with an integer per token.
        name: the example's name in error messages.

    Returns:
        The columns that the example has, those of `columns` flat, int64 [n]; its token ids, int64 [n]; and the lengths
        of its documents, int64 [documents].

    Raises:
        TypeError: a column does not hold integers.
        ValueError: the example has no tokens, a negative one, padding, or a column that does not fit its `input_ids`;
            or nothing but `seq_idx`, `cu_seq_lens_q` or numbers in `attention_mask` tells its documents.
    """
    given = {column: value for column, value in example.items() if value is not None}
    if "input_ids" not in given:
        raise ValueError(f"{name} has no input_ids; tokenize the dataset first. It has: {', '.join(map(str, given))}")
    input_ids, lengths = _token_ids(given["input_ids"], f"input_ids of {name}")
    if not input_ids.size:
        raise ValueError(empty_message(name))
    input_ids = as_token_ids(input_ids, f"input_ids of {name}")
    packed = is_packed(given["input_ids"])
    if packed and not lengths.all():
        raise ValueError(f"document {int(lengths.argmin())} of {name}, a packed row, is empty; remove it")
    if not packed and ("seq_lengths" in given or "position_ids" in given):
        lengths = _document_lengths(given, len(input_ids), name)
    _check_structure(given, lengths, name)
    if "attention_mask" in given:
        given["attention_mask"] = _token_column(given, "attention_mask", len(input_ids), name)
        if not given["attention_mask"].all():
            raise ValueError(padding_message(name))
    unread = None if packed or "seq_lengths" in given or "position_ids" in given else unread_documents(given)
    if unread is not None:
        raise ValueError(
            f"{unread} of {name} tells several documents, but only seq_lengths or position_ids are read; add "
            f"seq_lengths, the lengths of the documents, or remove {unread} if the example is one document"
        )
    for column in columns:
        if column in given and packed and is_packed(given[column]):
            given[column] = _flat_column(given[column], lengths, column, name)
        elif column in given:
            given[column] = _token_column(given, column, len(input_ids), name)
    return given, input_ids, lengths


def unread_documents(example: Mapping[str, Any]) -> str | None:
    """Return the column that tells several documents of a flat example in a way that is not read, or None.

    Other packers number the documents of a row in `seq_idx` (negative for padding) or in `attention_mask` (0 for
    padding), or write their bounds. A column of another form is not looked at.
    """
    for column, first in (("seq_idx", 0), ("attention_mask", 1)):
        try:
            numbers = np.asarray(example.get(column))
        except ValueError:  # a ragged list
            continue
        if numbers.dtype.kind in "iu" and numbers.shape == (len(example["input_ids"]),):
            numbers = numbers[numbers >= first]
            if (numbers != numbers[:1]).any():
                return column
    bounds = example.get("cu_seq_lens_q")
    return "cu_seq_lens_q" if bounds is not None and np.unique(bounds).size > 2 else None


def _token_ids(values: Any, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the token ids of an example or a packed row, int64 [n], and the lengths of its documents."""
    if not is_packed(values):
        try:
            flat = as_integers(values, name)
        except TypeError as error:
            raise TypeError(
                f"{error}; a row of pack_dataset is a list of documents that ends with an empty list, unless a trainer "
                "has cut it: set max_length=None there"
            ) from None
        return flat, np.array([len(flat)])
    documents = [as_integers(document, name) for document in values]
    return np.concatenate(documents), np.array([len(document) for document in documents[:-1]], dtype=np.int64)


def _flat_column(values: Any, lengths: NDArray[np.int64], column: str, name: str) -> NDArray[np.int64]:
    """Return a column of a packed row as int64 [n], after checking that it has the documents of the row."""
    flat, own = _token_ids(values, f"{column} of {name}")
    if own.tolist() != lengths.tolist():
        raise ValueError(
            f"{column} of {name} has documents of {own.tolist()} entries, but its input_ids of {lengths.tolist()}; "
            "they must be one to one"
        )
    return flat


def _document_lengths(example: Mapping[str, Any], length: int, name: str) -> NDArray[np.int64]:
    """Return the lengths of the documents of a flat row from its `seq_lengths` or `position_ids`, int64 [documents]."""
    if "seq_lengths" in example:
        lengths = as_integers(example["seq_lengths"], f"seq_lengths of {name}")
        try:
            check_lengths(f"seq_lengths of {name}", lengths, length)
        except ValueError as error:
            raise ValueError(
                f"{error}; a packed example must not be truncated later (set max_length=None in the trainer)"
            ) from None
        return lengths
    positions = _token_column(example, "position_ids", length, name)
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=length)
    if not starts.size or starts[0] or (positions != np.arange(length) - np.repeat(starts, lengths)).any():
        raise ValueError(f"position_ids of {name} must count 0, 1, 2, ... and start again at 0 with each document")
    return lengths


def _check_structure(example: Mapping[str, Any], lengths: NDArray[np.int64], name: str) -> None:
    """Raise a ValueError if a column of an example describes other documents than those of `lengths`."""
    length = int(lengths.sum())
    differs = "input_ids" if "seq_lengths" not in example else "seq_lengths"
    if "seq_lengths" in example:
        own = as_integers(example["seq_lengths"], f"seq_lengths of {name}")
        if own.tolist() != lengths.tolist():
            raise ValueError(
                f"seq_lengths of {name} are {own.tolist()}, but its input_ids hold documents of {lengths.tolist()} "
                "tokens; a packed row must not be truncated later (set max_length=None in the trainer)"
            )
    if "position_ids" in example:
        positions = _token_column(example, "position_ids", length, name)
        if (positions != np.arange(length) - np.repeat(np.cumsum(lengths) - lengths, lengths)).any():
            raise ValueError(f"{differs} and position_ids of {name} describe different documents; keep one of them")


def _token_column(example: Mapping[str, Any], column: str, length: int, name: str) -> NDArray[np.int64]:
    """Return a column with one integer per token, int64 [length]."""
    values = as_integers(example[column], f"{column} of {name}")
    if len(values) != length:
        raise ValueError(unequal_message(column, name, len(values), length))
    return values


# Error messages that the collator of documents and `pack_dataset` share.


def empty_message(name: str) -> str:
    """Return the error message of an example without tokens."""
    return f"{name} is empty; remove it: dataset.filter(lambda example: len(example['input_ids']) > 0)"


def padding_message(name: str) -> str:
    """Return the error message of an example with padding."""
    return f"{name} holds padding (zeros in attention_mask); tokenize with padding=False"


def unequal_message(column: str, name: str, entries: int, tokens: int) -> str:
    """Return the error message of a column that is not as long as its `input_ids`."""
    return f"{column} of {name} has {entries} entries, but its input_ids have {tokens}; they must be one to one"


def too_long_message(name: str, length: int, max_length: int, can_split: bool = False) -> str:
    """Return the error message of an example that is longer than a row."""
    ways = "raise max_length, or choose truncation_mode='keep_start' or 'keep_end'"
    return (
        f"{name} has {length} tokens, more than max_length {max_length}; {ways}{', or split=True' if can_split else ''}"
    )
