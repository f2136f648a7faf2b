"""Packing for supervised fine-tuning: a data collator that packs a batch, and a function that packs a dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.checks import (
    as_count,
    as_row_options,
    check_depth,
    check_truncation_mode,
    example_names,
)
from flashmask_hf.collators.documents import empty, is_packed, not_one_to_one, padded, read_documents
from flashmask_hf.collators.forest import Forest, PackedRows, best_fit_decreasing, pack_forests
from flashmask_hf.names import IGNORED

__all__ = ["DataCollatorForPackedLanguageModeling", "pack_dataset", "packing_efficiency"]

logger = logging.getLogger(__name__)

_VERSION = 2
"""Version of the packed rows, part of their cache's fingerprint: raise it when `pack_dataset` makes other rows."""

MASK_COLUMNS = ("completion_mask", "assistant_masks")
"""Columns that select the tokens to learn, where there are no `labels`."""

_SELECTIONS = ("labels", *MASK_COLUMNS)
_TOKEN_COLUMNS = ("input_ids", *_SELECTIONS, "token_type_ids")

SomeDataset = TypeVar("SomeDataset", bound=Dataset | IterableDataset)


@dataclass
class DataCollatorForPackedLanguageModeling:
    """Data collator that packs the examples of a batch into rows in which each example attends only to itself.

    An example is a dictionary with `input_ids`, a sequence of integers. If it has `labels`, they are used unchanged.
    Otherwise its labels are the `input_ids` of the tokens that `assistant_masks` and `completion_mask` select (0 or 1
    per token; without a mask, all tokens).

    An example may be a packed row of `pack_dataset`, whose `input_ids` say which documents they hold. A row that
    something else packed, with flat `input_ids`, needs `seq_lengths` (the lengths of its documents, as TRL writes them)
    or `position_ids` (which start again at 0 with each document). If a trainer removed these columns, such a row cannot
    be told from a single document.

    Examples with neither labels nor masks learn every token; a warning says so once, because a trainer may have removed
    the masks. Another one says once how many examples of a batch have no label to learn.

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
        completion_only_loss: how to make labels from masks, for examples without labels: None uses `completion_mask`
            where there is one, False ignores it, True requires it (or `labels`), as in TRL. For rows of `pack_dataset`
            the choice is made there: False raises if they have labels.
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
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

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
        self._warn_of_idle(rows, labels, names)
        if self.completion_only_loss is None and not any(map(_says_what_to_learn, examples)):
            self._warn_once(
                "The examples of a batch have neither labels nor masks, so every token is learned. If the dataset has "
                "completion_mask or assistant_masks, the trainer has removed them: set remove_unused_columns=False, or "
                "use pack_dataset, whose rows keep their labels. If every token is to be learned, say so with "
                "completion_only_loss=False."
            )
        batch = rows.batch()  # input_ids first: accelerate takes the batch size from it
        return {"input_ids": batch.pop("input_ids"), "labels": torch.from_numpy(labels), **batch}

    def _warn_of_idle(self, rows: PackedRows, labels: NDArray[np.int64], names: Sequence[str]) -> None:
        """Warn of examples without a label, which make no loss."""
        starts = rows.starts.tolist()
        spans = [labels.reshape(-1)[at : at + len(own.tokens)] for at, own in zip(starts, rows.forests, strict=True)]
        idle = [name for name, own in zip(names, spans, strict=True) if (own == IGNORED).all()]
        if idle:
            self._warn_once(
                "%d of the %d examples of a batch have no label to learn, the first is %s (the first token of a "
                "document never has a label). They add nothing to the loss, and a batch of such is a step of loss 0. "
                "Leave them out of the dataset, as pack_dataset does. Later batches are not counted.",
                len(idle), len(names), idle[0],
            )  # fmt: skip

    def _warn_once(self, message: str, *values: object) -> None:
        """Log a warning, unless this collator has logged it before."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def _read(self, example: Mapping[str, Any], name: str) -> tuple[Forest, NDArray[np.int64]]:
        """Read an example: return its documents, each a tree of one segment, and their labels, int64 [n]."""
        packed = is_packed(example.get("input_ids"))
        if not packed and example.get("labels", ...) is None:  # perhaps a trainer removed the masks that say which
            raise ValueError(
                f"{name} has no labels, but a labels column, as after joining datasets; give all of them labels before"
            )
        given, input_ids, lengths = read_documents(example, _SELECTIONS, name)
        if packed and self.completion_only_loss is False and "labels" in given:
            raise ValueError(
                f"completion_only_loss=False comes too late for {name}, a row of pack_dataset that has its labels; "
                "pass it to pack_dataset, and leave it None here"
            )
        labels = self._labels(given, input_ids, name)
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
        """Return the labels of an example as `read_documents` returns it, int64 [n]."""
        if "labels" in example:
            return example["labels"]
        masks = {column: example[column] for column in MASK_COLUMNS if column in example}
        _drop_unused_masks(masks, self.completion_only_loss, name)
        if "completion_mask" in masks and not masks["completion_mask"].any():
            raise ValueError(_no_completion(name))
        return _masked_labels(input_ids, masks.values())

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
    batch_size: int | None = None,
    num_proc: int | None = None,
) -> SomeDataset:
    """Pack a tokenized dataset best-fit-decreasing into rows of at most `max_length` tokens.

    Documents are split or truncated only if `split` or `truncation_mode` says so. Documents without labels are dropped,
    such as the pieces of a long prompt: their labels or masks select no token after the first. A warning counts them
    while packing runs, but not when the rows come from the cache. Rows are ordered by their first document, and
    documents keep their order within a row. `Dataset.map` does the work: results are deterministic and cached on disk,
    and memory is bounded.

    Rows are for `DataCollatorForPackedLanguageModeling`. `input_ids` and `labels` of a row are lists of documents, and
    the last one is empty. So no trainer can remove what tells the documents apart. Where flat rows would let documents
    see each other, the collators of transformers and TRL raise, also after TRL's packing: "expected sequence of length
    ..." (of PyTorch), or "excessive nesting".

    Args:
        dataset: tokenized examples with `input_ids`, and any of `labels`, `completion_mask`, `assistant_masks` and
            `token_type_ids`, all lists of integers. Other columns are dropped.
        max_length: maximum number of tokens of a row.
        split: cut a longer document into consecutive pieces, each a document of its own with positions from 0.
        truncation_mode: what to do with a longer document otherwise: "error", "keep_start" or "keep_end".
        completion_only_loss: how to make labels from masks, for examples without labels: None uses `completion_mask`
            where there is one, False ignores it, True requires it (or `labels`).
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.
        batch_size: number of examples packed together. A larger batch packs a little tighter, takes more memory, and
            lets a stream wait longer for its first row. None is 4,000 for a Dataset and 1,000 for an IterableDataset.
        num_proc: number of processes, for a `Dataset`.

    Returns:
        Dataset or IterableDataset: one example per row, in int32, with `input_ids`, a list of documents, the last one
        empty; `labels`, likewise, unless the examples have neither labels nor masks; `token_type_ids`, likewise, if the
        examples have them; and `seq_lengths`, the lengths of the documents. Rows with and without labels may be
        concatenated: without, every token is learned.

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
        {'input_ids': [[[1, 2, 3], [6], []], [[4, 5], [7, 8], []]], 'seq_lengths': [[3, 1], [2, 2]]}
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
    if batch_size is None:
        batch_size = 4_000 if isinstance(dataset, Dataset) else 1_000
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
            "version": _VERSION,
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
    version: int,
) -> pa.Table:
    """Pack the examples of an Arrow table; `indices` are their indices in the dataset, for error messages.

    `version` is read by nothing but the cache of `Dataset.map`.
    """
    columns = {name: _documents(table, name, indices) for name in _TOKEN_COLUMNS if name in table.column_names}
    lengths = _lengths(columns["input_ids"])
    _check_columns(columns, lengths, indices)
    masks = {name: columns.pop(name) for name in MASK_COLUMNS if name in columns}
    if "labels" not in columns:
        _drop_unused_masks(masks, completion_only_loss, f"example {indices[0]}")
        for index, mask in zip(indices, masks.get("completion_mask", ()), strict=False):
            if not mask.any():
                raise ValueError(_no_completion(f"example {index}"))
        if masks:
            each = zip(columns["input_ids"], *masks.values(), strict=True)
            columns["labels"] = [_masked_labels(document, own) for document, *own in each]
    if "attention_mask" in table.column_names:
        for index, mask in zip(indices, _documents(table, "attention_mask", indices), strict=True):
            if not mask.all():
                raise ValueError(padded(f"example {index}"))
    longest = int(lengths.argmax())
    owners, starts = np.arange(len(lengths)), np.zeros_like(lengths)  # of each piece: its document, and where it starts
    if lengths[longest] > max_length:
        if split:
            owners, starts, lengths = _pieces(lengths, max_length)
        elif truncation_mode == "error":
            raise ValueError(_too_long(f"example {indices[longest]}", lengths[longest], max_length, can_split=True))
        else:
            if truncation_mode == "keep_end":
                starts = np.maximum(lengths - max_length, 0)
            lengths = np.minimum(lengths, max_length)
    if max_position_embeddings is not None:
        check_depth(f"example {indices[longest]}", int(lengths.max()), max_position_embeddings)

    pieces = list(zip(owners.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))
    if "labels" in columns:
        labels = columns["labels"]
        learnable = np.array([_has_labels(labels[owner][start:stop]) for owner, start, stop in pieces])
        if not learnable.all():
            logger.warning(f"left out {(~learnable).sum()} of {len(pieces)} documents, which have nothing to learn")
            lengths = lengths[learnable]
            pieces = [piece for piece, kept in zip(pieces, learnable, strict=True) if kept]

    rows = best_fit_decreasing(lengths, max_length)
    packed: dict[str, pa.Array] = {}
    for name, documents in columns.items():
        chosen = [documents[owner][start:stop] for owner, start, stop in map(pieces.__getitem__, chain(*rows))]
        packed[name] = _row_array([lengths[row] for row in rows], chosen)
    packed["seq_lengths"] = pa.array([lengths[row] for row in rows], type=pa.list_(pa.int32()))
    return pa.table(packed)


def _documents(table: pa.Table, name: str, indices: Sequence[int]) -> list[NDArray[Any]]:
    """Return the lists of a column as views of its values, without copying int32.

    Raises:
        TypeError: the column does not hold lists of integers.
        ValueError: a list is missing or has missing values, or a token id or a label does not fit into int32.
    """
    documents: list[NDArray[Any]] = []
    for chunk in table.column(name).chunks:
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
            index = indices[len(documents) + at]
            raise ValueError(f"{name} of example {index} is missing or has missing values; remove the example")
        values = values.to_numpy(zero_copy_only=False)
        if name in ("input_ids", "labels"):
            if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
                raise ValueError(f"{name} must fit into int32, got {values.min()}..{values.max()}")
            values = values.astype(np.int32, copy=False)
        edges = chunk.offsets.to_numpy()
        documents += [values[start:stop] for start, stop in pairwise((edges - edges[0]).tolist())]
    return documents


def _lengths(documents: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the number of entries of each document, int64 [documents]."""
    return np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))


def _check_columns(columns: dict[str, list[NDArray[Any]]], lengths: NDArray[np.int64], indices: Sequence[int]) -> None:
    """Raise a ValueError if an example is empty, or has a column of another length than its `input_ids`."""
    for name, column in columns.items():
        entries = _lengths(column)
        if (entries != lengths).any():
            at = int((entries != lengths).argmax())
            raise ValueError(not_one_to_one(name, f"example {indices[at]}", int(entries[at]), int(lengths[at])))
    if not lengths.all():
        raise ValueError(empty(f"example {indices[int(lengths.argmin())]}"))


def _pieces(
    lengths: NDArray[np.int64], max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces of at most `max_length` tokens.

    Returns:
        The index of each piece's document, where in the document the piece starts, and its length, int64 [pieces] each.
    """
    pieces = -(-lengths // max_length)  # of each document
    owners = np.repeat(np.arange(len(lengths)), pieces)
    starts = max_length * (np.arange(len(owners)) - (np.cumsum(pieces) - pieces)[owners])
    return owners, starts, np.minimum(lengths[owners] - starts, max_length)


def _row_array(rows: Sequence[NDArray[np.int64]], documents: Sequence[NDArray[np.int32]]) -> pa.Array:
    """Build the Arrow column of packed rows: a list of documents each, which ends with an empty one.

    Args:
        rows: the lengths of each row's documents.
        documents: the documents of all rows, int32 [n] each.
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


def _drop_unused_masks(masks: dict[str, Any], completion_only_loss: bool | None, name: str) -> None:
    """Remove the completion mask if it is to be ignored; raise a ValueError if it is required and absent."""
    if completion_only_loss is False:
        masks.pop("completion_mask", None)
    elif completion_only_loss and "completion_mask" not in masks:
        raise ValueError(
            f"{name} has no completion_mask, which completion_only_loss=True needs; give it one (1 for the tokens "
            "of the completion), or labels, or set completion_only_loss=None"
        )


def _has_labels(labels: NDArray[Any]) -> bool:
    """Return whether a document has a label after its first token, which nothing predicts."""
    return bool((labels[1:] != IGNORED).any())


def _masked_labels(input_ids: NDArray[Any], masks: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Return the token ids that every mask selects, and `IGNORED` elsewhere, [n] of the type of `input_ids`."""
    selected = np.ones(len(input_ids), dtype=bool)
    for mask in masks:
        selected &= mask != 0
    return np.where(selected, input_ids, IGNORED)


def _says_what_to_learn(example: Mapping[str, Any]) -> bool:
    """Return whether an example has labels or a mask, or is a row of `pack_dataset`, which learns what it should."""
    return any(example.get(name) is not None for name in _SELECTIONS) or is_packed(example["input_ids"])


# Error messages that the collator and `pack_dataset` share.


def _no_completion(name: str) -> str:
    return (
        f"{name} has an empty completion (completion_mask is 0 everywhere), so it teaches nothing; remove it: "
        "dataset.filter(lambda example: any(example['completion_mask']))"
    )


def _too_long(name: str, length: int, max_length: int, can_split: bool = False) -> str:
    ways = "raise max_length, or choose truncation_mode='keep_start' or 'keep_end'"
    return (
        f"{name} has {length} tokens, more than max_length {max_length}; {ways}{', or split=True' if can_split else ''}"
    )
