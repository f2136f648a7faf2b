"""Reader of the documents of an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.columns import as_integers, as_token_ids, check_lengths

_FIRST_NUMBERS = {"seq_idx": 0, "attention_mask": 1}
"""Columns in which other packers number documents, and the least number."""


def is_packed(values: Any) -> bool:
    """Return whether a column has the form that `pack_dataset` writes: documents, then an empty list."""
    try:
        return len(values) > 0 and len(values[-1]) == 0 and np.ndim(values[-1]) == 1
    except (KeyError, TypeError, ValueError):  # a dict, a number, or a ragged list
        return False


def read_documents(
    example: Mapping[str, Any], columns: Sequence[str], name: str
) -> tuple[dict[str, Any], NDArray[np.int64], NDArray[np.int64]]:
    """Read an example: a document, a row of `pack_dataset`, or a flat row with `seq_lengths` or `position_ids`.

    Returns:
        The example's columns, with the named ones flat, int64 [n]; its token ids, int64 [n]; and the lengths of its
        documents, int64 [documents].

    Raises a TypeError for a column without integers, and a ValueError if the example has no tokens, a negative token
    id, padding, or a column that does not fit, or only columns that are not read mark its documents.
    """
    given = {column: value for column, value in example.items() if value is not None}
    if "input_ids" not in given:
        raise ValueError(f"{name} has no input_ids; tokenize the dataset first. It has: {', '.join(map(str, given))}")
    marked = _flatten(given, columns, name) if is_packed(given["input_ids"]) else {}
    try:
        input_ids = as_token_ids(given["input_ids"], f"input_ids of {name}")
    except TypeError as error:
        if not isinstance(given["input_ids"], list) or not isinstance(given["input_ids"][0], list):
            raise
        problem = "a row of pack_dataset ends with an empty list, unless a trainer has cut it: set max_length=None"
        raise TypeError(f"{error}; {problem} there") from None
    tokens = len(input_ids)
    if not tokens:
        raise ValueError(f"{name} is empty; remove it: dataset.filter(lambda example: len(example['input_ids']) > 0)")
    for column in ("attention_mask", "position_ids", *columns):
        if column in given:
            given[column] = as_integers(given[column], f"{column} of {name}")
            if len(given[column]) != tokens:
                problem = f"{column} of {name} has {len(given[column])} entries, but its input_ids have {tokens}"
                raise ValueError(f"{problem}; they must be one to one")
    if "attention_mask" in given and not given["attention_mask"].all():
        raise ValueError(padded(name))
    if marked or "seq_lengths" in given or "position_ids" in given:
        return given, input_ids, _document_lengths(given, marked, tokens, name)
    unread = unread_documents(given)
    if unread is not None:
        raise ValueError(
            f"{unread} of {name} marks several documents, but only seq_lengths or position_ids are read; add "
            f"seq_lengths, or remove {unread} if the example is one document"
        )
    return given, input_ids, np.array([tokens])


def unread_documents(example: Mapping[str, Any]) -> str | None:
    """Return the column that marks several documents of a flat example, or that NumPy cannot read; else None."""
    for column in (*_FIRST_NUMBERS, "cu_seq_lens_q"):
        try:
            numbers = np.asarray(example.get(column, ()))
        except (TypeError, ValueError):  # a ragged list, or a tensor that NumPy cannot hold
            return column
        if column == "cu_seq_lens_q":
            several = np.unique(numbers).size > 2
        elif numbers.dtype.kind in "iu" and numbers.shape == (len(example["input_ids"]),):
            several = np.unique(numbers[numbers >= _FIRST_NUMBERS[column]]).size > 1
        else:
            several = False
        if several:
            return column
    return None


def _flatten(example: dict[str, Any], columns: Sequence[str], name: str) -> dict[str, NDArray[np.int64]]:
    """Join the documents of a packed row's columns in place, and return their lengths, int64 [documents], by column."""
    marked: dict[str, NDArray[np.int64]] = {}
    for column in ("input_ids", *columns):
        if is_packed(example.get(column)):
            documents = [as_integers(document, f"{column} of {name}") for document in example[column]]
            example[column] = np.concatenate(documents)
            marked[column] = np.array([len(document) for document in documents[:-1]], dtype=np.int64)
            if not marked[column].all():
                raise ValueError(f"document {marked[column].argmin()} of {name}, a packed row, is empty; remove it")
    return marked


def _document_lengths(
    example: Mapping[str, Any], marked: dict[str, NDArray[np.int64]], tokens: int, name: str
) -> NDArray[np.int64]:
    """Return the lengths of a row's documents, int64 [documents]; its columns, `marked` if packed, must agree."""
    if "seq_lengths" in example:
        marked["seq_lengths"] = as_integers(example["seq_lengths"], f"seq_lengths of {name}")
        try:
            check_lengths(f"seq_lengths of {name}", marked["seq_lengths"], tokens)
        except ValueError as error:
            raise ValueError(f"{error}; do not truncate packed rows (set max_length=None in the trainer)") from None
    if "position_ids" in example:
        positions = example["position_ids"]
        ends = np.flatnonzero(np.append(positions[1:] == 0, True)) + 1
        marked["position_ids"] = lengths = np.diff(ends, prepend=0)
        if (positions != np.arange(tokens) - np.repeat(ends - lengths, lengths)).any():
            raise ValueError(f"position_ids of {name} must count 0, 1, 2, ... and start again at 0 with each document")
    (first, lengths), *others = marked.items()
    for other, own in others:
        if own.tolist() != lengths.tolist():
            raise ValueError(f"{first} and {other} of {name} describe different documents; keep one of them")
    return lengths


def padded(name: str) -> str:
    """Return the message of an example with padding."""
    return f"{name} holds padding (zeros in attention_mask); tokenize with padding=False"


def pieces(tokens: int, max_length: int | None, mode: str, name: str) -> list[slice]:
    """Return the pieces of a document that are used: one of at most `max_length` tokens, or all if `mode` is "split".

    Raises a ValueError for a longer document if `mode` is "error".
    """
    if max_length is None or tokens <= max_length:
        return [slice(tokens)]
    if mode == "error":
        raise ValueError(
            f"{name} has {tokens} tokens, more than max_length {max_length}; raise it, choose "
            "truncation_mode='keep_start' or 'keep_end', or pack with split=True"
        )
    if mode == "split":
        return [slice(start, start + max_length) for start in range(0, tokens, max_length)]
    return [slice(max_length) if mode == "keep_start" else slice(-max_length, None)]
