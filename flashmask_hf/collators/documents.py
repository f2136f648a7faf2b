"""Reader of the documents of an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators import messages
from flashmask_hf.collators.columns import as_integers, as_token_ids, check_lengths

__all__ = ["is_packed", "read_documents", "unread_documents"]


def is_packed(values: Any) -> bool:
    """Return whether a column has the form that `pack_dataset` writes: documents, then an empty list."""
    try:
        return len(values) > 0 and np.ndim(values[-1]) == 1 and len(values[-1]) == 0
    except (TypeError, ValueError):  # a number, or a ragged list
        return False


def read_documents(
    example: Mapping[str, Any], columns: Sequence[str], name: str
) -> tuple[dict[str, Any], NDArray[np.int64], NDArray[np.int64]]:
    """Read an example: a document, a row of `pack_dataset`, or a flat row with `seq_lengths` or `position_ids`.

    Returns:
        The columns of the example `name`, those named in `columns` flat, int64 [n]; its token ids, int64 [n]; and the
        lengths of its documents, int64 [documents].

    Raises:
        TypeError: a column does not hold integers.
        ValueError: the example has no tokens, a negative token id, padding, or a column that does not fit its
            `input_ids`; or only `seq_idx`, `cu_seq_lens_q` or numbers in `attention_mask` mark its documents.
    """
    given = {column: value for column, value in example.items() if value is not None}
    if "input_ids" not in given:
        raise ValueError(f"{name} has no input_ids; tokenize the dataset first. It has: {', '.join(map(str, given))}")
    packed = is_packed(given["input_ids"])
    input_ids, lengths = _flatten(given["input_ids"], packed, f"input_ids of {name}")
    if not input_ids.size:
        raise ValueError(messages.empty(name))
    input_ids = as_token_ids(input_ids, f"input_ids of {name}")
    if packed and not lengths.all():
        raise ValueError(f"document {int(lengths.argmin())} of {name}, a packed row, is empty; remove it")
    marked = packed or "seq_lengths" in given or "position_ids" in given
    if marked:
        lengths = _document_lengths(given, lengths if packed else None, len(input_ids), name)
    if "attention_mask" in given:
        given["attention_mask"] = _token_column(given, "attention_mask", len(input_ids), name)
        if not given["attention_mask"].all():
            raise ValueError(messages.padded(name))
    unread = None if marked else unread_documents(given)
    if unread is not None:
        raise ValueError(
            f"{unread} of {name} marks several documents, but only seq_lengths or position_ids are read; add "
            f"seq_lengths, or remove {unread} if the example is one document"
        )
    for column in columns:
        if column in given and packed and is_packed(given[column]):
            given[column] = _flat_column(given[column], lengths, column, name)
        elif column in given:
            given[column] = _token_column(given, column, len(input_ids), name)
    return given, input_ids, lengths


def unread_documents(example: Mapping[str, Any]) -> str | None:
    """Return the column that marks several documents of a flat example in a way that is not read, or None.

    Other packers number documents in `seq_idx` (negative for padding) or `attention_mask` (0 for padding), or write
    their bounds.
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


def _flatten(values: Any, packed: bool, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a column of a document or a packed row, int64 [n], and the lengths of its documents."""
    if not packed:
        try:
            flat = as_integers(values, name)
        except TypeError as error:
            problem = "a row of pack_dataset ends with an empty list, unless a trainer has cut it: set max_length=None"
            raise TypeError(f"{error}; {problem} there") from None
        return flat, np.array([len(flat)])
    documents = [as_integers(document, name) for document in values]
    return np.concatenate(documents), np.array([len(document) for document in documents[:-1]], dtype=np.int64)


def _flat_column(values: Any, lengths: NDArray[np.int64], column: str, name: str) -> NDArray[np.int64]:
    """Return a column of a packed row as int64 [n]; its documents must be the row's."""
    flat, own = _flatten(values, True, f"{column} of {name}")
    if own.tolist() != lengths.tolist():
        problem = f"has documents of {own.tolist()} entries, but its input_ids of {lengths.tolist()}"
        raise ValueError(f"{column} of {name} {problem}; they must be one to one")
    return flat


def _document_lengths(
    example: Mapping[str, Any], packed: NDArray[np.int64] | None, tokens: int, name: str
) -> NDArray[np.int64]:
    """Return the lengths of a row's documents, int64 [documents]; its columns must agree.

    `packed` has the lengths in the `input_ids` of a row of `pack_dataset`, and is None for a flat row.
    """
    lengths, source = packed, "input_ids"
    if "seq_lengths" in example:
        lengths, source = as_integers(example["seq_lengths"], f"seq_lengths of {name}"), "seq_lengths"
        way = "do not truncate packed rows (set max_length=None in the trainer)"
        if packed is not None and lengths.tolist() != packed.tolist():
            given = f"{lengths.tolist()}, but its input_ids hold documents of {packed.tolist()} tokens"
            raise ValueError(f"seq_lengths of {name} are {given}; {way}")
        try:
            check_lengths(f"seq_lengths of {name}", lengths, tokens)
        except ValueError as error:
            raise ValueError(f"{error}; {way}") from None
    if "position_ids" in example:
        positions = _token_column(example, "position_ids", tokens, name)
        problem = f"{source} and position_ids of {name} describe different documents; keep one of them"
        if lengths is None:
            problem = f"position_ids of {name} must count 0, 1, 2, ... and start again at 0 with each document"
            starts = np.flatnonzero(positions == 0)
            if not starts.size or starts[0]:
                raise ValueError(problem)
            lengths = np.diff(starts, append=tokens)
        if (positions != np.arange(tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)).any():
            raise ValueError(problem)
    assert lengths is not None
    return lengths


def _token_column(example: Mapping[str, Any], column: str, length: int, name: str) -> NDArray[np.int64]:
    """Return a column with one integer per token, int64 [length]."""
    values = as_integers(example[column], f"{column} of {name}")
    if len(values) != length:
        raise ValueError(messages.unequal(column, name, len(values), length))
    return values
