"""Packing for supervised fine-tuning: a data collator that packs a batch, and a function that packs a dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.checks import (
    as_count,
    as_integers,
    as_row_options,
    check_depth,
    check_lengths,
    check_truncation_mode,
    example_names,
)
from flashmask_hf.collators.forest import Forest, best_fit_decreasing, pack_forests

__all__ = ["DataCollatorForPackedLanguageModeling", "pack_dataset", "packing_efficiency"]

logger = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token without a loss."""

_MASK_COLUMNS = ("completion_mask", "assistant_masks")
_TOKEN_COLUMNS = ("input_ids", "labels", *_MASK_COLUMNS)

SomeDataset = TypeVar("SomeDataset", bound=Dataset | IterableDataset)


@dataclass
class DataCollatorForPackedLanguageModeling:
    """Data collator that packs the examples of a batch into rows in which each example attends only to itself.

    An example is a dictionary with `input_ids`, a sequence of integers. If it has `labels`, they are used unchanged.
    Otherwise its labels are the `input_ids` of the tokens that `assistant_masks` and `completion_mask` select (0 or 1
    per token; without a mask, all tokens).

    An example may be a packed row. It then has `seq_lengths` (the lengths of its documents, as `pack_dataset` and TRL
    write them) or `position_ids` (which start again at 0 with each document). A packed row that has lost both, because
    a trainer removed the columns, cannot be told from a single document.

    Other keys are ignored. A column that is None counts as absent, except for `labels`, which raises.

    The first token of a document is never a label, because the token before it in the row is of another document.

    Args:
        pad_token_id: token id of the padding. Nothing attends to padding, so any id of the vocabulary works.
        max_length: None packs the whole batch into one row, without padding. A number makes rows of exactly that many
            tokens, filled best-fit-decreasing and padded at the end; the number of rows depends on the batch. The
            `num_tokens` that TRL's SFTTrainer logs counts one of the rows; loss and accuracy are those of all.
        pad_to_multiple_of: pad the single row to a multiple of this. `max_length` must already be a multiple of it.
        truncation_mode: what to do with an example longer than `max_length`: "error" raises, "keep_start" and
            "keep_end" cut it. They raise if no label would be left.
        completion_only_loss: None uses `completion_mask` where there is one, False ignores it, True requires it (or
            `labels`), as in TRL. With False, labels that `pack_dataset` made from masks are made anew without the
            completion mask, as long as the row still has the masks. Trainers remove them, so pass the choice to
            `pack_dataset` there.
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.

    Returns:
        dict[str, Tensor]: `input_ids`, `labels`, `position_ids`, int64 [rows, S], and `startend_row_indices`, int32
        [rows, 1, S, 1]: the row where the document of each token ends, 0 for padding.

    Raises:
        ValueError: an argument is out of range; or an example is empty, too long or padded, lacks a column, or has
            columns of different lengths. The message names the example's index in the batch and the way out.
        TypeError: a column does not hold integers.

    Example:
        >>> from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
        >>> collator = DataCollatorForPackedLanguageModeling()
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "completion_mask": [0, 1]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5]])
        >>> batch["labels"]
        tensor([[-100,    2,    3, -100,    5]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1]])
        >>> batch["startend_row_indices"].flatten()
        tensor([3, 3, 3, 5, 5], dtype=torch.int32)

        >>> # Rows of four tokens each
        >>> collator = DataCollatorForPackedLanguageModeling(pad_token_id=9, max_length=4)
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 6],
                [4, 5, 9, 9]])
        >>> batch["labels"]
        tensor([[-100,    2,    3, -100],
                [-100,    5, -100, -100]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0],
                [0, 1, 0, 0]])
        >>> batch["startend_row_indices"][:, 0, :, 0]
        tensor([[3, 3, 3, 4],
                [2, 2, 0, 0]], dtype=torch.int32)
    """

    pad_token_id: int = 0
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    truncation_mode: str = "error"
    completion_only_loss: bool | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self):
        check_truncation_mode(self.truncation_mode)
        if self.max_length is None and self.truncation_mode != "error":
            raise ValueError(f"truncation_mode='{self.truncation_mode}' needs max_length, the length to truncate to")
        self.pad_token_id, self.max_length, self.pad_to_multiple_of, self.max_position_embeddings = as_row_options(
            self.pad_token_id, self.max_length, self.pad_to_multiple_of, self.max_position_embeddings
        )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch; see the class."""
        names = example_names(examples)
        read = [self._read(example, name) for example, name in zip(examples, names, strict=True)]
        rows = pack_forests(
            [forest for forest, _ in read],
            self.max_length,
            pad_token_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
            max_position_embeddings=self.max_position_embeddings,
            names=names,
        )
        labels = rows.spread([labels for _, labels in read], filler=IGNORED)
        labels[rows.position_ids == 0] = IGNORED
        batch = rows.batch()  # input_ids first: accelerate takes the batch size from it
        return {"input_ids": batch.pop("input_ids"), "labels": torch.from_numpy(labels), **batch}

    def _read(self, example: Mapping[str, Any], name: str) -> tuple[Forest, NDArray[np.int64]]:
        """Read an example: return its documents, each a tree of one segment, and their labels, int64 [n]."""
        if example.get("labels", ...) is None:  # a trainer may have removed the masks that say which labels it had
            raise ValueError(
                f"{name} has no labels, but a labels column, as after joining datasets; give all of them labels before"
            )
        example = {column: value for column, value in example.items() if value is not None}
        if "input_ids" not in example:
            raise ValueError(
                f"{name} has no input_ids; tokenize the dataset first. It has: {', '.join(map(str, example))}"
            )
        input_ids = as_integers(example["input_ids"], f"input_ids of {name}")
        if not input_ids.size:
            raise ValueError(_empty(name))
        if "attention_mask" in example and not _token_column(example, "attention_mask", len(input_ids), name).all():
            raise ValueError(_padded(name))
        labels = self._labels(example, input_ids, name)
        lengths = _document_lengths(example, input_ids, name)
        if self.max_length is not None and len(input_ids) > self.max_length:
            kept = self._kept(len(input_ids), len(lengths), self.max_length, name)
            if _has_labels(labels) and not _has_labels(labels[kept]):
                raise ValueError(
                    f"{name} teaches nothing once cut to max_length {self.max_length}: "
                    f"truncation_mode='{self.truncation_mode}' leaves none of its labels; raise max_length, choose "
                    "another mode, or cut with pack_dataset, which leaves such examples out"
                )
            input_ids, labels, lengths = input_ids[kept], labels[kept], np.array([self.max_length])
        return Forest(input_ids, lengths, np.full(len(lengths), -1)), labels

    def _labels(self, example: Mapping[str, Any], input_ids: NDArray[np.int64], name: str) -> NDArray[np.int64]:
        """Return the labels of an example, int64 [n]."""
        labels = _token_column(example, "labels", len(input_ids), name) if "labels" in example else None
        if labels is not None and not (self.completion_only_loss is False and "seq_lengths" in example):
            return labels
        masks = {
            column: _token_column(example, column, len(input_ids), name)
            for column in _MASK_COLUMNS
            if column in example
        }
        if labels is not None and (labels != _masked_labels(input_ids, masks)).any():
            return labels  # the user's own, not those that pack_dataset makes from the masks
        _drop_unused_masks(masks, self.completion_only_loss, name)
        if "completion_mask" in masks and not masks["completion_mask"].any():
            raise ValueError(_no_completion(name))
        return _masked_labels(input_ids, masks)

    def _kept(self, tokens: int, documents: int, max_length: int, name: str) -> slice:
        """Return the tokens to keep of an example that is longer than a row."""
        if documents > 1:
            raise ValueError(
                f"{name} is a packed row of {tokens} tokens, longer than max_length {max_length}, and cutting it "
                "would lose documents; pack the dataset to max_length, or raise max_length"
            )
        if self.truncation_mode == "error":
            raise ValueError(_too_long(name, tokens, max_length))
        return slice(max_length) if self.truncation_mode == "keep_start" else slice(-max_length, None)


def pack_dataset(
    dataset: SomeDataset,
    max_length: int,
    *,
    split: bool = False,
    truncation_mode: str = "error",
    completion_only_loss: bool | None = None,
    max_position_embeddings: int | None = None,
    batch_size: int = 10_000,
    num_proc: int | None = None,
) -> SomeDataset:
    """Pack a tokenized dataset best-fit-decreasing into rows of at most `max_length` tokens.

    Documents are split or truncated only if `split` or `truncation_mode` says so. Documents without labels are dropped,
    such as the pieces of a long prompt: their labels or masks select no token after the first. A warning counts them
    while packing runs, but not when the rows come from the cache. Rows are ordered by their first document, and
    documents keep their order within a row. `Dataset.map` does the work: results are deterministic and cached on disk,
    and memory is bounded.

    A row describes its documents by two columns, because a trainer removes the columns that it does not know before the
    collator sees them. Transformers' Trainer keeps `position_ids`, TRL's SFTTrainer keeps `seq_lengths`. Both keep
    `labels` and remove the masks.

    Args:
        dataset: tokenized examples with `input_ids`, and any of `labels`, `completion_mask` and `assistant_masks`, all
            lists of integers. Other columns are dropped.
        max_length: maximum number of tokens of a row.
        split: cut a longer document into consecutive pieces, each a document of its own with positions from 0.
        truncation_mode: what to do with a longer document otherwise: "error", "keep_start" or "keep_end".
        completion_only_loss: how to make labels from masks, for examples without labels: None uses `completion_mask`
            where there is one, False ignores it, True requires it (or `labels`).
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.
        batch_size: number of examples packed together. A larger batch packs a little tighter.
        num_proc: number of processes, for a `Dataset`.

    Returns:
        Dataset or IterableDataset: one example per row, with the token columns; `labels`, always, so that rows of
        different datasets can be concatenated; `position_ids`, which start again at 0 with each document; and
        `seq_lengths`, the lengths of its documents.

    Raises:
        TypeError: `dataset` is neither a Dataset nor an IterableDataset; a column does not hold lists of integers.
        ValueError: an argument is out of range; the dataset is empty, already packed, or has no labels; or an example
            is empty, too long or padded, has an empty completion, or columns of different lengths. The message names
            the example's index and the way out.

    Example:
        >>> from datasets import Dataset
        >>> from flashmask_hf.collators import pack_dataset
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6], [7, 8]]})
        >>> pack_dataset(dataset, max_length=4)[:]  # doctest: +NORMALIZE_WHITESPACE
        {'input_ids': [[1, 2, 3, 6], [4, 5, 7, 8]], 'labels': [[1, 2, 3, 6], [4, 5, 7, 8]],
         'position_ids': [[0, 1, 2, 0], [0, 1, 0, 1]], 'seq_lengths': [[3, 1], [2, 2]]}
        >>> pack_dataset(dataset, max_length=2, split=True)["seq_lengths"][:]
        [[2], [1, 1], [2], [2]]
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"dataset must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}; pack each split of "
            "a DatasetDict by itself"
        )
    check_truncation_mode(truncation_mode)
    max_length = _required("max_length", max_length)
    batch_size = _required("batch_size", batch_size)
    num_proc = as_count("num_proc", num_proc, "a number of processes, at least 1, or None")
    max_position_embeddings = as_count("max_position_embeddings", max_position_embeddings)
    if split and truncation_mode != "error":
        raise ValueError(f"split=True and truncation_mode='{truncation_mode}' exclude each other: choose one")
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("dataset is empty: there is nothing to pack")
    columns = list(first)
    if "input_ids" not in columns:
        raise ValueError(f"dataset has no input_ids column; tokenize it first. Its columns: {', '.join(columns)}")
    for column in ("seq_lengths", "position_ids", "startend_row_indices"):
        if column in columns:
            raise ValueError(
                f"dataset has a {column} column, so it is packed already; pack the one it was made from, or remove the "
                "column if every example is one document"
            )
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
        },
    }
    if isinstance(dataset, Dataset):
        options |= {"num_proc": num_proc, "desc": f"Packing to {max_length} tokens"}
    packed: Any = dataset.with_format("arrow").map(_pack_table, **options).with_format(None)
    if isinstance(dataset, Dataset) and not len(packed):
        raise ValueError(
            f"dataset has nothing to learn: its labels are {IGNORED} everywhere, or were cut away; raise max_length, "
            "choose another truncation_mode, or look at its labels and masks"
        )
    return packed


def _required(name: str, value: Any) -> int:
    """Return an option of `pack_dataset` as an int of at least 1; raise a ValueError if it is something else."""
    count = as_count(name, value, "an int, at least 1")
    if count is None:
        raise ValueError(f"{name} must be an int, at least 1, got None")
    return count


def packing_efficiency(dataset: Dataset, max_length: int) -> float:
    """Return the fraction of a packed dataset's row space that holds tokens.

    Args:
        dataset: packed rows with a `seq_lengths` column, as `pack_dataset` and TRL's packing write it.
        max_length: number of tokens that a row can hold.

    Example:
        >>> from datasets import Dataset
        >>> packing_efficiency(Dataset.from_dict({"seq_lengths": [[3, 1], [2]]}), max_length=4)
        0.75
    """
    return sum(map(sum, dataset["seq_lengths"])) / (len(dataset) * max_length)


def _pack_table(
    table: pa.Table,
    indices: Sequence[int],
    *,
    max_length: int,
    split: bool,
    truncation_mode: str,
    completion_only_loss: bool | None,
    max_position_embeddings: int | None,
) -> pa.Table:
    """Pack the examples of an Arrow table; `indices` are their indices in the dataset, for error messages."""
    selective = any(name in table.column_names for name in ("labels", *_MASK_COLUMNS))
    lists = {name: _list_column(table, name, indices) for name in _TOKEN_COLUMNS if name in table.column_names}
    lengths = _lengths(lists["input_ids"])
    _check_columns(lists, lengths, indices)
    columns = {name: _values(column) for name, column in lists.items()}
    if "labels" not in columns:
        masks = {name: columns[name] for name in _MASK_COLUMNS if name in columns}
        _drop_unused_masks(masks, completion_only_loss, f"example {indices[0]}")
        if "completion_mask" in masks:
            _check_completions(masks["completion_mask"], lengths, indices)
        columns["labels"] = _masked_labels(columns["input_ids"].astype(np.int64), masks)
    if "attention_mask" in table.column_names:
        _check_unpadded(_list_column(table, "attention_mask", indices), indices)
    longest = int(lengths.argmax())
    starts = np.cumsum(lengths) - lengths
    if lengths[longest] > max_length:
        if split:
            starts, lengths = _pieces(starts, lengths, max_length)
        elif truncation_mode == "error":
            raise ValueError(_too_long(f"example {indices[longest]}", lengths[longest], max_length, can_split=True))
        else:
            if truncation_mode == "keep_end":
                starts = starts + np.maximum(lengths - max_length, 0)
            lengths = np.minimum(lengths, max_length)
    if max_position_embeddings is not None:
        check_depth(f"example {indices[longest]}", int(lengths.max()), max_position_embeddings)

    if selective:
        labels_before = np.cumsum(np.append(0, columns["labels"] != IGNORED))  # of each token
        learnable = labels_before[starts + lengths] > labels_before[starts + 1]  # the first token is never a label
        if not learnable.all():
            logger.warning(f"left out {(~learnable).sum()} of {len(lengths)} documents, which have nothing to learn")
            starts, lengths = starts[learnable], lengths[learnable]

    rows = best_fit_decreasing(lengths, max_length)
    order = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    starts, lengths = starts[order], lengths[order]
    ends = np.cumsum(lengths)
    tokens = np.arange(lengths.sum())
    source = tokens + np.repeat(starts - (ends - lengths), lengths)  # index in the table of each packed token
    documents = np.cumsum([0] + [len(row) for row in rows])
    edges = np.concatenate([[0], ends])[documents]  # of the rows, in tokens
    packed = {name: _list_array(edges, values[source]) for name, values in columns.items()}
    packed["position_ids"] = _list_array(edges, tokens - np.repeat(ends - lengths, lengths))
    packed["seq_lengths"] = _list_array(documents, lengths)
    return pa.table(packed)


def _list_column(table: pa.Table, name: str, indices: Sequence[int]) -> pa.Array:
    """Return a column after checking that it holds lists of integers without missing values."""
    column = table.column(name).combine_chunks()
    if pa.types.is_fixed_size_list(column.type) and not column.null_count:
        column = column.cast(pa.list_(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or not (
        pa.types.is_integer(column.type.value_type) or pa.types.is_boolean(column.type.value_type)
    ):
        way = "; tokenize the dataset first" if name == "input_ids" else ""
        raise TypeError(f"column {name} must hold lists of integers, got {column.type}{way}")
    if column.null_count or column.flatten().null_count:
        at = next(at for at, values in enumerate(column.to_pylist()) if values is None or None in values)
        raise ValueError(f"{name} of example {indices[at]} is missing or has missing values; remove the example")
    return column


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the length of each list of a column, int64 [examples]."""
    return column.value_lengths().to_numpy().astype(np.int64)


def _values(column: pa.Array) -> NDArray[Any]:
    """Return the concatenated lists of a column, [tokens]."""
    return column.flatten().to_numpy(zero_copy_only=False)


def _check_columns(columns: dict[str, pa.Array], lengths: NDArray[np.int64], indices: Sequence[int]) -> None:
    """Raise a ValueError if an example is empty, or has a column of another length than its `input_ids`."""
    for name, column in columns.items():
        entries = _lengths(column)
        if (entries != lengths).any():
            at = int((entries != lengths).argmax())
            raise ValueError(_not_one_to_one(name, f"example {indices[at]}", int(entries[at]), int(lengths[at])))
    if not lengths.all():
        raise ValueError(_empty(f"example {indices[int(lengths.argmin())]}"))


def _check_completions(completion_mask: NDArray[Any], lengths: NDArray[np.int64], indices: Sequence[int]) -> None:
    """Raise a ValueError if the completion mask of an example is 0 everywhere."""
    has_completion = np.logical_or.reduceat(completion_mask != 0, np.cumsum(lengths) - lengths)
    if not has_completion.all():
        raise ValueError(_no_completion(f"example {indices[int(has_completion.argmin())]}"))


def _check_unpadded(attention_mask: pa.Array, indices: Sequence[int]) -> None:
    """Raise a ValueError if the attention mask of an example has zeros."""
    hidden = np.flatnonzero(_values(attention_mask) == 0)
    if hidden.size:
        at = int(np.searchsorted(np.cumsum(_lengths(attention_mask)), hidden[0], side="right"))
        raise ValueError(_padded(f"example {indices[at]}"))


def _pieces(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces of at most `max_length` tokens; return the starts and lengths of the pieces."""
    pieces = -(-lengths // max_length)  # of each document
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
    offset = number * max_length
    return np.repeat(starts, pieces) + offset, np.minimum(np.repeat(lengths, pieces) - offset, max_length)


def _list_array(edges: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    """Build an Arrow column of lists: list i holds `values[edges[i]:edges[i + 1]]`."""
    return pa.ListArray.from_arrays(pa.array(edges, type=pa.int32()), pa.array(values))


def _drop_unused_masks(masks: dict[str, NDArray[Any]], completion_only_loss: bool | None, name: str) -> None:
    """Remove the completion mask if it is to be ignored; raise a ValueError if it is required and absent."""
    if completion_only_loss is False:
        masks.pop("completion_mask", None)
    elif completion_only_loss and "completion_mask" not in masks:
        raise ValueError(
            f"{name} has no completion_mask, which completion_only_loss=True needs; give it one (1 for the tokens "
            "of the completion), or labels, or set completion_only_loss=None"
        )


def _has_labels(labels: NDArray[np.int64]) -> bool:
    """Return whether a document has a label after its first token, which nothing predicts."""
    return bool((labels[1:] != IGNORED).any())


def _masked_labels(input_ids: NDArray[np.int64], masks: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return the token ids that every mask selects, and `IGNORED` elsewhere, int64 [n]."""
    selected = np.ones(len(input_ids), dtype=bool)
    for mask in masks.values():
        selected &= mask != 0
    return np.where(selected, input_ids, IGNORED)


def _document_lengths(example: Mapping[str, Any], input_ids: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Return the lengths of the documents of an example from its `seq_lengths` or `position_ids`, int64 [documents]."""
    length = len(input_ids)
    if "seq_lengths" in example:
        lengths = as_integers(example["seq_lengths"], f"seq_lengths of {name}")
        try:
            check_lengths(f"seq_lengths of {name}", lengths, length)
        except ValueError as error:
            raise ValueError(
                f"{error}; a packed example must not be truncated later (set max_length=None in the trainer)"
            ) from None
        if "position_ids" in example:
            positions = _token_column(example, "position_ids", length, name)
            if (positions != np.arange(length) - np.repeat(np.cumsum(lengths) - lengths, lengths)).any():
                raise ValueError(
                    f"seq_lengths and position_ids of {name} describe different documents; keep one of them"
                )
        return lengths
    if "position_ids" not in example:
        return np.array([length])
    positions = _token_column(example, "position_ids", length, name)
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=length)
    if not starts.size or starts[0] or (positions != np.arange(length) - np.repeat(starts, lengths)).any():
        raise ValueError(f"position_ids of {name} must count 0, 1, 2, ... and start again at 0 with each document")
    return lengths


def _token_column(example: Mapping[str, Any], column: str, length: int, name: str) -> NDArray[np.int64]:
    """Return a column with one integer per token, int64 [length]."""
    values = as_integers(example[column], f"{column} of {name}")
    if len(values) != length:
        raise ValueError(_not_one_to_one(column, name, len(values), length))
    return values


# Error messages that the collator and `pack_dataset` share.


def _empty(name: str) -> str:
    return f"{name} is empty; remove it: dataset.filter(lambda example: len(example['input_ids']) > 0)"


def _no_completion(name: str) -> str:
    return (
        f"{name} has an empty completion (completion_mask is 0 everywhere), so it teaches nothing; remove it: "
        "dataset.filter(lambda example: any(example['completion_mask']))"
    )


def _padded(name: str) -> str:
    return f"{name} holds padding (zeros in attention_mask); tokenize with padding=False"


def _not_one_to_one(column: str, name: str, entries: int, tokens: int) -> str:
    return f"{column} of {name} has {entries} entries, but its input_ids have {tokens}; they must be one to one"


def _too_long(name: str, length: int, max_length: int, can_split: bool = False) -> str:
    ways = "raise max_length, or choose truncation_mode='keep_start' or 'keep_end'"
    return (
        f"{name} has {length} tokens, more than max_length {max_length}; {ways}{', or split=True' if can_split else ''}"
    )
