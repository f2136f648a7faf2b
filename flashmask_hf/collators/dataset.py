"""Packing of a tokenized dataset into rows, once, before training."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray

from flashmask_hf._numbers import as_integer, check_bool
from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.collators.documents import is_packed, pieces, read_documents, unread_documents
from flashmask_hf.collators.labels import LABEL_COLUMNS, NO_WEIGHT, WEIGHT, has_labels, read_labels, read_weights
from flashmask_hf.collators.packing import as_count, check_size, check_truncation_mode
from flashmask_hf.collators.tries import learned_tokens, order_by_prefixes, pack_shared_rows
from flashmask_hf.names import IGNORED, LABEL_WEIGHTS

logger = logging.getLogger(__name__)

_VERSION = 2
"""Part of the fingerprint of cached rows: raise it when `pack_dataset` makes other rows."""

_TOKEN_COLUMNS = ("input_ids", *LABEL_COLUMNS, "token_type_ids")

_GIVEN = (*_TOKEN_COLUMNS, WEIGHT)
"""Columns that all examples of a dataset have, or none."""

_READ = (*_GIVEN, "attention_mask")

EXAMPLE = "_example"
"""Column of a stream with its examples: Arrow would need one schema for all columns."""

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
    loss_mean: str = "token",
    max_position_embeddings: int | None = None,
    batch_size: int | None = None,
    num_proc: int | None = None,
    row_length: int | None = None,
    share_prefixes: bool = False,
) -> SomeDataset:
    """Pack a tokenized dataset best-fit-decreasing into rows.

    Documents without a label after their first token are dropped. Warnings count dropped and truncated documents, in a
    stream per batch. Rows are deterministic, ordered by their first document, and `Dataset.map` caches them on disk
    with bounded memory.

    Rows are for `DataCollatorForPackedLanguageModeling`. Their `input_ids` and `labels` hold document boundaries, so
    no trainer can drop them, and stock collators raise.

    Args:
        dataset: tokenized examples with `input_ids`, and any of `labels`, `completion_mask`, `assistant_masks` and
            `token_type_ids`, all lists of integers, and `weight`, a number or a list of one number per token. Other
            columns, and columns that `with_format` hides, are dropped, with a warning for other weights.
        max_length: maximum number of tokens of a document.
        split: cut a longer document into consecutive pieces, each a document of its own.
        truncation_mode: what to do with a longer document otherwise: "error", "keep_start" or "keep_end".
        completion_only_loss: as in `DataCollatorForPackedLanguageModeling`.
        loss_mean: "example" divides weights by the example's number of labels; "token" does not.
        max_position_embeddings: the model's number of positions, the limit of a document, or None.
        batch_size: number of examples packed together. Larger batches pack tighter, and delay a stream's first row.
            None is 4,000 for a Dataset and 1,000 for an IterableDataset.
        num_proc: number of processes, for a `Dataset`.
        row_length: maximum number of tokens of a row, at least `max_length`; None is `max_length`.
        share_prefixes: compute common prefixes of examples once per row, for causal models in `PackedSFTTrainer`; their
            labels count once per example. A Dataset is first sorted, so that examples with them are packed together.

    Returns:
        Dataset or IterableDataset: one example per row, in int32. `input_ids` is a list of documents, the last one
        empty; so are `labels` and `token_type_ids`, if the examples have them. `seq_lengths` has the lengths of the
        documents. Rows without labels learn every token. With weights, by `weight` or `loss_mean`, or
        `share_prefixes`, `input_ids` are segments, then the parent of each segment, -1 for a root, then an empty list;
        `label_weights`, float32, sum the weights with which examples learn each token; `seq_lengths` has the lengths of
        the segments, and `example_lengths`, with `share_prefixes`, the lengths of the examples.

    Raises:
        TypeError: an argument or a column has another type.
        ValueError: an argument is out of range; the dataset is empty, packed, or has a transform or no labels; or an
            example is empty, too long or padded, has an empty completion, negative token ids, or columns of different
            lengths, or lacks a column that others have. With weights or `share_prefixes`, also for labels other than
            the token or -100, and for `token_type_ids`; with `share_prefixes` for `split`.

    Example:
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6], [7, 8]]})
        >>> pack_dataset(dataset, max_length=4)[:]  # doctest: +NORMALIZE_WHITESPACE
        {'input_ids': [[[1, 2, 3], [6], []], [[4, 5], [7, 8], []]], 'seq_lengths': [[3, 1], [2, 2]]}
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 3, 4], [1, 2, 5]]})
        >>> pack_dataset(dataset, max_length=8, share_prefixes=True)[0]  # doctest: +NORMALIZE_WHITESPACE
        {'input_ids': [[1], [2], [3, 4], [2, 5], [-1, 0, 1, 0], []],
         'label_weights': [[0.0], [3.0], [2.0, 1.0], [0.0, 1.0], []],
         'seq_lengths': [1, 1, 2, 2], 'example_lengths': [3, 4, 3]}
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        kind = type(dataset).__name__
        raise TypeError(f"dataset must be a Dataset or IterableDataset, got {kind}; pack each split of a DatasetDict")
    check_truncation_mode(truncation_mode)
    max_length = as_integer("max_length", max_length, 1)
    default = 4_000 if isinstance(dataset, Dataset) else 1_000
    batch_size = as_integer("batch_size", default if batch_size is None else batch_size, 1)
    max_position_embeddings = as_count("max_position_embeddings", max_position_embeddings)
    num_proc = as_count("num_proc", num_proc)
    if loss_mean not in ("token", "example"):
        raise ValueError(f"loss_mean must be 'token' or 'example', got {loss_mean!r}")
    why = "max_length, as an example must fit a row"
    row_length = as_integer("row_length", max_length if row_length is None else row_length, max_length, why=why)
    check_bool("share_prefixes", share_prefixes)
    if share_prefixes and split:
        raise ValueError("split=True makes pieces without common prefixes; leave split or share_prefixes out")
    if share_prefixes and truncation_mode == "keep_end":
        _warn("truncation_mode='keep_end' cuts prefixes off longer examples, which then share none; use 'keep_start'")
    if split and truncation_mode != "error":
        way = "leave one of them out (in SFTConfig, truncation_mode=None)"
        raise ValueError(f"split=True and truncation_mode={truncation_mode!r} exclude each other: {way}")
    refuse_transform(dataset, "dataset")
    dataset = unformatted(dataset)
    first = first_row(dataset, "dataset")
    if "input_ids" not in first:
        raise ValueError(f"dataset has no input_ids column; tokenize it first. Its columns: {', '.join(first)}")
    _refuse_packed(first, "dataset")
    warn_of_weights(first, "dataset", read=WEIGHT)
    weighs = share_prefixes or loss_mean == "example" or first.get(WEIGHT) is not None
    if weighs and first.get("token_type_ids") is not None:
        ways = "the column weight, loss_mean='example' and share_prefixes"
        raise ValueError(f"rows with weights have no token_type_ids; remove that column, or leave out {ways}")
    streamed = isinstance(dataset, IterableDataset)
    nullable = _GIVEN if streamed else (WEIGHT,)
    given = [name for name in _GIVEN if name in first and not (name in nullable and first[name] is None)]
    order = None if streamed or not share_prefixes else order_by_prefixes(dataset, num_proc)
    options: dict[str, Any] = {
        "batched": True,
        "with_indices": True,
        "batch_size": batch_size,
        "fn_kwargs": {
            "given": given,
            "max_length": max_length,
            "mode": "split" if split else truncation_mode,
            "completion_only_loss": completion_only_loss,
            "loss_mean": loss_mean,
            "max_position_embeddings": max_position_embeddings,
            "row_length": row_length,
            "share_prefixes": share_prefixes,
            "version": _VERSION,
        },
    }
    if streamed:
        examples: Any = dataset.map(whole).select_columns([EXAMPLE])
        return examples.map(_pack_stream, remove_columns=[EXAMPLE], **options)
    options |= {"num_proc": num_proc, "desc": f"Packing to {row_length} tokens"}
    options["fn_kwargs"]["order"] = order
    ordered = dataset if order is None else dataset.select(order)
    packed: Any = ordered.with_format("arrow").map(_pack_table, **options).with_format(None)
    if not len(packed):
        raise ValueError(
            f"dataset has nothing to learn: its labels are {IGNORED} everywhere, or were cut away; raise max_length, "
            "choose another truncation_mode, or look at its labels and masks"
        )
    # In `map`, warnings would break the progress bar, and be missing on a cached second run.
    tables: Any = dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=10_000)
    counts = [pc.call_function("list_value_length", [table["input_ids"]]) for table in tables]
    lengths = np.concatenate(counts).astype(np.int64)  # int32 in Arrow
    count = int((-(-lengths // max_length)).sum()) if split else len(lengths)
    left = packed["example_lengths" if share_prefixes else "seq_lengths"]
    _warn_of_losses(lengths, max_length, truncation_mode, count, sum(map(len, left)))
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


def first_row(dataset: Any, name: str) -> Any:
    """Return the first row of a dataset as Python objects, whatever its format.

    Raises:
        ValueError: the dataset is empty.
    """
    plain = unformatted(dataset) if hasattr(dataset, "with_format") else dataset
    row = next(iter(plain), None)
    if row is None:
        raise ValueError(f"{name} is empty; give it at least one row")
    return row


def refuse_transform(dataset: Any, name: str) -> None:
    """Raise a ValueError if a dataset has a transform."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(f"{name} has a transform (with_transform); apply it with dataset.map(...) before")


def warn_of_weights(example: Mapping[str, Any], name: str, read: str | None = None) -> None:
    """Warn of weights in a dataset's first example that nothing reads, and of the column `read`."""
    weights = [column for column in example if _WEIGHTS.fullmatch(column) and column != read]
    for column, value in example.items():
        turn = value[0] if isinstance(value, list) and value else None
        if isinstance(turn, Mapping):
            weights += [f"{column}[...][{key!r}]" for key in turn if _WEIGHTS.fullmatch(str(key))]
    if weights:
        way = f"Name it {read}" if read else "Repeat or leave out examples"
        _warn(f"{name} has {', '.join(weights)}, which nothing reads. {way}, give turns labels of -100, or remove it.")
    if read and example.get(read) is not None:
        _warn(f"{name} has {read}, which multiplies its losses; {NO_WEIGHT}")


def _warn_of_losses(lengths: NDArray[np.int64], max_length: int, mode: str, count: int, packed: int) -> None:
    """Warn of documents that were cut, given lengths of examples, or left out: all but `packed` of `count` pieces."""
    cut = int((lengths > max_length).sum())
    if cut and mode in ("keep_start", "keep_end"):
        _warn(f"cut {cut} of {len(lengths)} documents to max_length {max_length}: truncation_mode='{mode}'")
    if packed < count:
        _warn(f"left out {count - packed} of {count} documents, which have nothing to learn")


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
    columns = [column for column in ("seq_lengths", "position_ids", "startend_row_indices") if column in example]
    columns += ["input_ids"] if is_packed(example["input_ids"]) else []
    column = columns[0] if columns else unread_documents(example)
    if column is not None:
        way = "pack its source, or remove the column if every example is one document"
        raise ValueError(f"{name} is packed already, by its column {column}; {way}")


def whole(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example of a stream in one column."""
    return {EXAMPLE: example}


def _pack_stream(batch: dict[str, list[Any]], indices: Sequence[int], **options: Any) -> dict[str, list[Any]]:
    names: list[str] = []
    for index, example in zip(indices, batch[EXAMPLE], strict=True):
        others = [f"{name}={brief(x)}" for name, x in example.items() if name not in _READ and x is not None]
        text = ", ".join(others[:2])[:60]
        names.append(f"example {index} of the stream" + (f" ({text})" if text else ""))
    return _pack(batch[EXAMPLE], names, warns=True, **options).to_pydict()


def _pack_table(table: pa.Table, indices: Sequence[int], **options: Any) -> pa.Table:
    columns = [name for name in _READ if name in table.column_names]
    rows = zip(*(map(_as_array, table.column(name)) for name in columns), strict=True)
    examples = [dict(zip(columns, row, strict=True)) for row in rows]
    order = options.pop("order")
    places = indices if order is None else order[list(indices)]
    return _pack(examples, [f"example {index}" for index in places], **options)


def _as_array(cell: Any) -> Any:
    """Return a list in a cell of Arrow as an array, without a copy, and anything else as a Python object."""
    values = cell.values if isinstance(cell, pa.ListScalar) else None
    return cell.as_py() if values is None or values.null_count else values.to_numpy(zero_copy_only=False)


def _pack(
    examples: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    given: Sequence[str],
    max_length: int,
    mode: str,
    completion_only_loss: bool | None,
    loss_mean: str,
    max_position_embeddings: int | None,
    row_length: int,
    share_prefixes: bool,
    warns: bool = False,
    version: int,
) -> pa.Table:
    """Pack examples with the columns `given`; only the cache of `Dataset.map` reads `version`."""
    lengths: list[int] = []
    weighs = share_prefixes or loss_mean == "example" or WEIGHT in given
    documents: list[dict[str, NDArray[Any]]] = []
    columns: dict[str, NDArray[Any]] = {}
    packed: dict[str, list[list[Any]]]
    count = 0
    for example, name in zip(examples, names, strict=True):
        columns = _read(example, name, given, completion_only_loss)
        lengths.append(len(columns["input_ids"]))
        cuts = pieces(lengths[-1], max_length, mode, name)
        labels = columns.get("labels", columns["input_ids"])
        learned = sum(int((labels[cut][1:] != IGNORED).sum()) for cut in cuts) if loss_mean == "example" else 1
        for piece in cuts:
            document = {column: values[piece] for column, values in columns.items()}
            size = len(document["input_ids"])
            check_size(name, size, size, None, max_position_embeddings)
            count += 1
            if "labels" not in document or has_labels(document["labels"]):
                documents.append(document)
                if weighs:
                    document[WEIGHT] = learned_tokens(document, name) * document.get(WEIGHT, 1) / max(learned, 1)
    if warns:
        _warn_of_losses(np.array(lengths), max_length, mode, count, len(documents))
    sizes = [len(document["input_ids"]) for document in documents]
    if sum(sizes) >= 2**31:
        raise ValueError(f"batch_size packs {sum(sizes)} tokens together, more than 2**31 - 1; make it smaller")
    if weighs:
        sequences, weights = ([document[column] for document in documents] for column in ("input_ids", WEIGHT))
        packed = pack_shared_rows(sequences, weights, row_length, share=share_prefixes)
    else:
        rows = best_fit_decreasing(sizes, row_length)
        packed = {column: [[documents[index][column] for index in row] for row in rows] for column in columns}
        packed["seq_lengths"] = [[sizes[index] for index in row] for row in rows]
    return pa.table({name: _array(name, rows) for name, rows in packed.items()})


def _array(name: str, rows: Sequence[Sequence[Any]]) -> pa.Array:
    """Build the Arrow column of packed rows, each a list of lengths, or of documents with an empty one at the end."""
    if name.endswith("_lengths"):
        return pa.array(rows, type=pa.list_(pa.int32()))
    empty = np.empty(0, dtype=np.float32 if name == LABEL_WEIGHTS else np.int32)
    documents = [document for row in rows for document in (*row, empty)]
    edges = np.cumsum([0, *map(len, documents)], dtype=np.int32)
    row_edges = np.cumsum([0, *(len(row) + 1 for row in rows)], dtype=np.int32)
    flat = pa.ListArray.from_arrays(pa.array(edges), pa.array(np.concatenate([empty, *documents], dtype=empty.dtype)))
    return pa.ListArray.from_arrays(pa.array(row_edges), flat)


def _read(
    example: Mapping[str, Any], name: str, given: Sequence[str], completion_only_loss: bool | None
) -> dict[str, NDArray[Any]]:
    """Return the columns of an example that rows have, int32 [n] each, and any `weight`, float32 [n]."""
    present = {column: value for column, value in example.items() if value is not None}
    for column in _GIVEN:
        if (column in present) != (column in given):
            which = "has" if column in present else "lacks"
            raise ValueError(f"{name} {which} {column}, unlike other examples; give it to all examples, or to none")
    _refuse_packed(present, name)
    read, input_ids, _ = read_documents(present, _TOKEN_COLUMNS, name)
    labels = read_labels(read, input_ids, completion_only_loss, name)
    columns = {"input_ids": input_ids, "labels": labels, "token_type_ids": read.get("token_type_ids")}
    columns = {column: values for column, values in columns.items() if values is not None}
    for column, values in columns.items():
        if isinstance(present.get(column), np.ndarray) and present[column].dtype == np.int32:
            values = present[column]  # without a copy
        elif values.min() < -(2**31) or values.max() >= 2**31:
            raise ValueError(f"{column} of {name} must fit into int32, got {values.min()}..{values.max()}")
        columns[column] = values.astype(np.int32, copy=False)
    if WEIGHT in present:
        labels = columns.get("labels", columns["input_ids"])
        columns["labels"], columns[WEIGHT] = read_weights(present[WEIGHT], labels, name)
    return columns
