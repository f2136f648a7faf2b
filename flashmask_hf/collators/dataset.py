"""Packing of a tokenized dataset into rows, once, before training."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray

from flashmask_hf._numbers import as_integer
from flashmask_hf.collators import messages
from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.collators.columns import as_integers
from flashmask_hf.collators.documents import unread_documents
from flashmask_hf.collators.labels import LABEL_COLUMNS, MASK_COLUMNS, drop_unused_masks, has_labels, masked_labels
from flashmask_hf.collators.packing import as_count, check_truncation_mode
from flashmask_hf.names import IGNORED

__all__ = ["column_lengths", "pack_dataset", "packing_efficiency", "refuse_transform", "unformatted", "warn_of_weights"]

logger = logging.getLogger(__name__)

_VERSION = 2
"""Part of the fingerprint of cached rows: raise it when `pack_dataset` makes other rows."""

_TOKEN_COLUMNS = ("input_ids", *LABEL_COLUMNS, "token_type_ids")

_NAME = "_example"
"""Column of a stream that names its examples in messages."""

_WEIGHTS = re.compile(r"((sample|example|instance|loss|token)_)?weights?")
"""Names of columns and of keys of messages that weigh examples, tokens or turns."""

SomeDataset = TypeVar("SomeDataset", bound=Dataset | IterableDataset)


def pack_dataset(
    dataset: SomeDataset,
    max_length: int,
    *,
    split: bool = False,
    truncation_mode: str = "error",
    completion_only_loss: bool | None = None,
    max_position_embeddings: int | None = None,
    batch_size: int | None = None,
    num_proc: int | None = None,
) -> SomeDataset:
    """Pack a tokenized dataset best-fit-decreasing into rows of at most `max_length` tokens.

    Documents without a label after their first token are dropped, for example pieces of a long prompt. Warnings count
    dropped and truncated documents, in a stream per batch. Rows are ordered by their first document, and documents keep
    their order within a row. Results are deterministic, and `Dataset.map` caches them on disk with bounded memory.

    Rows are for `DataCollatorForPackedLanguageModeling`. The document boundaries are part of `input_ids` and `labels`,
    so no trainer can drop them, and stock collators raise instead of mixing documents.

    Args:
        dataset: tokenized examples with `input_ids`, and any of `labels`, `completion_mask`, `assistant_masks` and
            `token_type_ids`, all lists of integers. Other columns are dropped, with a warning for weights. Columns that
            `with_format(columns=...)` hides are not read.
        max_length: maximum number of tokens of a row.
        split: cut a longer document into consecutive pieces, each a document of its own with positions from 0.
        truncation_mode: what to do with a longer document otherwise: "error", "keep_start" or "keep_end".
        completion_only_loss: as in `DataCollatorForPackedLanguageModeling`.
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.
        batch_size: number of examples packed together. Larger batches pack tighter, take more memory, and delay a
            stream's first row. None is 4,000 for a Dataset and 1,000 for an IterableDataset.
        num_proc: number of processes, for a `Dataset`.

    Returns:
        Dataset or IterableDataset: one example per row, in int32. `input_ids` is a list of documents, the last one
        empty; so are `labels`, if the examples have labels or masks, and `token_type_ids`, if the examples have them.
        `seq_lengths` has the lengths of the documents. Rows without labels learn every token.

    Raises:
        TypeError: `dataset` is neither a Dataset nor an IterableDataset, or an argument or a column has another type.
        ValueError: an argument is out of range; the dataset is empty, already packed, has a transform, or has no
            labels; or an example is empty, too long or padded, has an empty completion, negative token ids, or columns
            of different lengths, or, in a stream, lacks a column of the first one.

    Example:
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6], [7, 8]]})
        >>> pack_dataset(dataset, max_length=4)[:]  # doctest: +NORMALIZE_WHITESPACE
        {'input_ids': [[[1, 2, 3], [6], []], [[4, 5], [7, 8], []]], 'seq_lengths': [[3, 1], [2, 2]]}
        >>> pack_dataset(dataset, max_length=2, split=True)["seq_lengths"][:]
        [[2], [1, 1], [2], [2]]
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        kind = type(dataset).__name__
        raise TypeError(
            f"dataset must be a Dataset or an IterableDataset, got {kind}; pack each split of a DatasetDict"
        )
    check_truncation_mode(truncation_mode)
    max_length = as_integer("max_length", max_length, 1)
    default = 4_000 if isinstance(dataset, Dataset) else 1_000
    batch_size = as_integer("batch_size", default if batch_size is None else batch_size, 1)
    num_proc = as_count("num_proc", num_proc)
    max_position_embeddings = as_count("max_position_embeddings", max_position_embeddings)
    if split and truncation_mode != "error":
        raise ValueError(
            f"split=True and truncation_mode='{truncation_mode}' exclude each other: leave one of them out (in "
            "SFTConfig, truncation_mode=None)"
        )
    refuse_transform(dataset, "dataset")
    dataset = unformatted(dataset)
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("dataset is empty: there is nothing to pack")
    if "input_ids" not in first:
        raise ValueError(f"dataset has no input_ids column; tokenize it first. Its columns: {', '.join(first)}")
    _refuse_packed(first, "dataset")
    warn_of_weights(first, "dataset")
    options: dict[str, Any] = {
        "batched": True,
        "with_indices": True,
        "batch_size": batch_size,
        "fn_kwargs": {
            "max_length": max_length,
            "split": split,
            "truncation_mode": truncation_mode,
            "completion_only_loss": completion_only_loss,
            "max_position_embeddings": max_position_embeddings,
            "version": _VERSION,
        },
    }
    if isinstance(dataset, IterableDataset):
        tokens: Any = _stream_of_tokens(dataset, first)
        return tokens.map(_pack_stream, remove_columns=[*_TOKEN_COLUMNS, _NAME], **options)
    options |= {"num_proc": num_proc, "desc": f"Packing to {max_length} tokens"}
    packed: Any = dataset.with_format("arrow").map(_pack_table, **options).with_format(None)
    if not len(packed):
        raise ValueError(
            f"dataset has nothing to learn: its labels are {IGNORED} everywhere, or were cut away; raise max_length, "
            "choose another truncation_mode, or look at its labels and masks"
        )
    # In `map`, warnings would break the progress bar, and be missing on a cached second run.
    (lengths,), (documents,) = column_lengths(dataset, ["input_ids"]), column_lengths(packed, ["seq_lengths"])
    pieces = int((-(-lengths // max_length)).sum()) if split else len(lengths)
    _warn_of_losses(lengths, max_length, truncation_mode, pieces, int(documents.sum()))
    return packed


def unformatted(dataset: Any) -> Any:
    """Return the dataset's visible columns as Python objects, unless it has a transform."""
    if isinstance(dataset, Dataset):
        formatted = dataset.format
        if formatted["type"] == "custom":
            return dataset
        if not formatted["output_all_columns"]:
            dataset = dataset.select_columns(formatted["columns"])
    return dataset.with_format(None)


def refuse_transform(dataset: Any, name: str) -> None:
    """Raise a ValueError if a dataset has a transform."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(f"{name} has a transform (with_transform); apply it with dataset.map(...) before")


def warn_of_weights(example: Mapping[str, Any], name: str) -> None:
    """Warn of weights in a dataset's first example, because nothing reads them."""
    weights = [column for column in example if _WEIGHTS.fullmatch(column)]
    for column, value in example.items():
        turn = value[0] if isinstance(value, list) and value else None
        if isinstance(turn, Mapping):
            weights += [f"{column}[...][{key!r}]" for key in turn if _WEIGHTS.fullmatch(str(key))]
    if weights:
        _warn(
            f"{name} has {', '.join(weights)}, which nothing reads. Repeat or leave out examples, give turns labels of "
            "-100, or remove it."
        )


def column_lengths(dataset: Dataset, columns: Sequence[str]) -> list[NDArray[np.int64]]:
    """Return the lengths of the lists in some columns, int64 [rows] each; -1 for a missing list."""
    tables: Any = dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)
    parts = [
        [pc.call_function("list_value_length", [table[name]]).fill_null(-1).to_numpy() for name in columns]
        for table in tables
    ]
    return [np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)]


def _warn_of_losses(
    lengths: NDArray[np.int64], max_length: int, truncation_mode: str, pieces: int, packed: int
) -> None:
    """Warn of documents that were cut, given the examples' lengths, or left out: all but `packed` of the `pieces`."""
    cut = int((lengths > max_length).sum())
    if cut and truncation_mode != "error":
        _warn(f"cut {cut} of {len(lengths)} documents to max_length {max_length}: truncation_mode='{truncation_mode}'")
    if packed < pieces:
        _warn(f"left out {pieces - packed} of {pieces} documents, which have nothing to learn")


def _warn(message: str) -> None:
    if not int(os.environ.get("RANK", "0")):
        logger.warning(message)


def packing_efficiency(dataset: Dataset, max_length: int) -> float:
    """Return the fraction of a packed dataset's row space that holds tokens.

    Args:
        dataset: packed rows with a `seq_lengths` column, from `pack_dataset` or TRL's packing.
        max_length: capacity of a row in tokens.

    Example:
        >>> packing_efficiency(Dataset.from_dict({"seq_lengths": [[3, 1], [2]]}), max_length=4)
        0.75
    """
    return sum(map(sum, dataset["seq_lengths"])) / (len(dataset) * max_length)


def _refuse_packed(example: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if an example is a row of several documents."""
    way = "is packed already; pack its source, or remove the column if every example is one document"
    for column in ("seq_lengths", "position_ids", "startend_row_indices"):
        if column in example:
            raise ValueError(f"{name} has a {column} column, so it {way}")
    unread = unread_documents(example)
    if unread is not None:
        raise ValueError(f"{name} has a column {unread} that marks several documents of an example, so it {way}")


def _stream_of_tokens(dataset: IterableDataset, first: Mapping[str, Any]) -> IterableDataset:
    """Return a stream of token columns, None where the first example has none, and of the examples' names."""
    # Python objects: Arrow would need one schema for all examples, also of columns that are not read.
    given = [name for name in _TOKEN_COLUMNS if first.get(name) is not None]
    plain = dataset.with_format(None).map(_read_tokens, with_indices=True, fn_kwargs={"given": given})
    return plain.select_columns([*_TOKEN_COLUMNS, _NAME])


def _read_tokens(example: Mapping[str, Any], index: int, *, given: Sequence[str]) -> dict[str, Any]:
    """Return the token columns of an example of a stream, int64 [n] each or None, and its name."""
    names = (*_TOKEN_COLUMNS, "attention_mask")
    present = {name: value for name, value in example.items() if value is not None}
    others = [f"{name}={_brief.repr(value)}" for name, value in present.items() if name not in names]
    text = ", ".join(others[:2])[:60]
    name = f"example {index} of the stream" + (f" ({text})" if text else "")
    columns = {column: as_integers(present[column], f"{column} of {name}") for column in names if column in present}
    for column in _TOKEN_COLUMNS:
        if (column in columns) != (column in given):
            which = "has" if column in columns else "lacks"
            raise ValueError(f"{name} {which} {column}, unlike the first example; give it to all examples, or to none")
    _refuse_packed(present, name)
    if not columns.pop("attention_mask", np.ones(1)).all():
        raise ValueError(messages.padded(name))
    return dict.fromkeys(_TOKEN_COLUMNS) | columns | {_NAME: name}


_brief = Repr()
_brief.maxstring = _brief.maxother = 30
_brief.maxlist = _brief.maxdict = 1


def _pack_table(table: pa.Table, indices: Sequence[int], **options: Any) -> pa.Table:
    """Pack the examples of an Arrow table."""
    names = [f"example {index}" for index in indices]
    given = [name for name in _TOKEN_COLUMNS if name in table.column_names]
    columns = {name: _documents(table.column(name).chunks, name, names) for name in given}
    if "attention_mask" in table.column_names:
        masks = _documents(table.column("attention_mask").chunks, "attention_mask", names)
        for name, mask in zip(names, masks, strict=True):
            if not mask.all():
                raise ValueError(messages.padded(name))
    return _pack(columns, names, **options)


def _pack_stream(batch: dict[str, list[Any]], indices: Sequence[int], **options: Any) -> dict[str, list[Any]]:
    names = batch[_NAME]
    given = {name: batch[name] for name in _TOKEN_COLUMNS if batch[name][0] is not None}
    columns = {
        name: _views(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]), name, names)
        for name, arrays in given.items()
    }
    return _pack(columns, names, warns=True, **options).to_pydict()


def _pack(
    columns: dict[str, list[NDArray[Any]]],
    names: Sequence[str],
    *,
    max_length: int,
    split: bool,
    truncation_mode: str,
    completion_only_loss: bool | None,
    max_position_embeddings: int | None,
    warns: bool = False,
    version: int,
) -> pa.Table:
    """Pack examples; only the cache of `Dataset.map` reads `version`."""
    lengths = _lengths(columns["input_ids"])
    _check_columns(columns, lengths, names)
    masks = {name: columns.pop(name) for name in MASK_COLUMNS if name in columns}
    if "labels" not in columns:
        drop_unused_masks(masks, completion_only_loss, names[0])
        if masks:
            columns["labels"] = [
                masked_labels(document, dict(zip(masks, own, strict=True)), name)
                for name, document, *own in zip(names, columns["input_ids"], *masks.values(), strict=True)
            ]
    whole, longest = lengths, names[int(lengths.argmax())]
    owners, starts = np.arange(len(lengths)), np.zeros_like(lengths)  # document of each piece, and the piece's start
    if whole.max() > max_length:
        if split:
            counts = -(-whole // max_length)  # pieces of each document
            owners = np.repeat(owners, counts)
            starts = max_length * (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners])
        elif truncation_mode == "error":
            raise ValueError(messages.too_long(longest, whole.max(), max_length, can_split=True))
        elif truncation_mode == "keep_end":
            starts = np.maximum(whole - max_length, 0)
        lengths = np.minimum(whole[owners] - starts, max_length)
    if max_position_embeddings is not None and lengths.max() > max_position_embeddings:
        raise ValueError(messages.too_deep(longest, int(lengths.max()), max_position_embeddings))

    pieces = list(zip(owners.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))
    if "labels" in columns:
        labels = columns["labels"]
        learnable = np.array([has_labels(labels[owner][start:stop]) for owner, start, stop in pieces])
        lengths = lengths[learnable]
        pieces = [piece for piece, kept in zip(pieces, learnable, strict=True) if kept]
    if warns:
        _warn_of_losses(whole, max_length, truncation_mode, len(owners), len(pieces))

    rows = best_fit_decreasing(lengths, max_length)
    packed: dict[str, pa.Array] = {}
    for name, documents in columns.items():
        chosen = [documents[owner][start:stop] for owner, start, stop in map(pieces.__getitem__, chain(*rows))]
        packed[name] = _row_array([lengths[row] for row in rows], chosen)
    packed["seq_lengths"] = pa.array([lengths[row] for row in rows], type=pa.list_(pa.int32()))
    return pa.table(packed)


def _documents(chunks: Sequence[pa.Array], name: str, examples: Sequence[str]) -> list[NDArray[Any]]:
    """Return the lists of the column `name`, given as Arrow chunks; lists of int32 are views, not copies.

    Raises:
        TypeError: the column does not hold lists of integers.
        ValueError: a list is missing or has missing values; or as in `_views`.
    """
    documents: list[NDArray[Any]] = []
    for chunk in chunks:
        if pa.types.is_fixed_size_list(chunk.type) and not chunk.null_count:
            chunk = chunk.cast(pa.list_(chunk.type.value_type))
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)) or not (
            pa.types.is_integer(chunk.type.value_type) or pa.types.is_boolean(chunk.type.value_type)
        ):
            way = "; tokenize the dataset first" if name == "input_ids" else ""
            raise TypeError(f"column {name} must hold lists of integers, got {chunk.type}{way}")
        values = chunk.flatten()
        if chunk.null_count or values.null_count:
            at = next(at for at, list_ in enumerate(chunk.to_pylist()) if list_ is None or None in list_)
            example = examples[len(documents) + at]
            raise ValueError(f"{name} of {example} is missing or has missing values; remove the example")
        edges = chunk.offsets.to_numpy()
        values = values.to_numpy(zero_copy_only=False)
        documents += _views(values, edges - edges[0], name, examples[len(documents) :])
    return documents


def _views(values: NDArray[Any], edges: NDArray[np.int64], name: str, examples: Sequence[str]) -> list[NDArray[Any]]:
    """Cut the values of the column `name` at the edges of its lists; token ids and labels as int32.

    Raises:
        ValueError: a token id is negative, or a token id or label does not fit into int32.
    """
    if name in ("input_ids", "labels"):
        if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
            raise ValueError(f"{name} must fit into int32, got {values.min()}..{values.max()}")
        values = values.astype(np.int32, copy=False)
    if name == "input_ids" and values.size and values.min() < 0:
        at = int(np.searchsorted(edges, (values < 0).argmax(), side="right")) - 1
        raise ValueError(messages.negative(f"input_ids of {examples[at]}", values.min()))
    return [values[start:stop] for start, stop in pairwise(edges.tolist())]


def _lengths(documents: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))


def _check_columns(columns: dict[str, list[NDArray[Any]]], lengths: NDArray[np.int64], names: Sequence[str]) -> None:
    """Raise a ValueError if an example is empty, or its columns differ in length."""
    for name, column in columns.items():
        entries = _lengths(column)
        if (entries != lengths).any():
            at = int((entries != lengths).argmax())
            raise ValueError(messages.unequal(name, names[at], int(entries[at]), int(lengths[at])))
    if not lengths.all():
        raise ValueError(messages.empty(names[int(lengths.argmin())]))


def _row_array(rows: Sequence[NDArray[np.int64]], documents: Sequence[NDArray[np.int32]]) -> pa.Array:
    """Build the Arrow column of packed rows. A row is a list of its documents and an empty document at the end.

    `rows` has the lengths of each row's documents, and `documents` the documents of all rows, int32 [n] each.
    """
    row_edges = np.cumsum([0] + [len(row) + 1 for row in rows])
    lengths = [np.append(row, 0) for row in rows]
    edges = np.cumsum(np.concatenate([[0], *lengths]).astype(np.int64))
    if edges[-1] >= 2**31:
        raise ValueError(f"batch_size packs {edges[-1]} tokens together, more than 2**31 - 1; make it smaller")
    values = pa.array(np.concatenate([np.empty(0, dtype=np.int32), *documents]))
    return pa.ListArray.from_arrays(
        pa.array(row_edges, type=pa.int32()), pa.ListArray.from_arrays(pa.array(edges, type=pa.int32()), values)
    )
