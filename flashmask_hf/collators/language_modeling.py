"""Data collator that packs the examples of a batch for supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators._validation import as_row_options, check_truncation_mode, example_names
from flashmask_hf.collators.documents import is_packed, read_documents, too_long_message
from flashmask_hf.collators.forest import Forest, PackedRows, pack_forests
from flashmask_hf.collators.labels import LABEL_COLUMNS, MASK_COLUMNS, drop_unused_masks, has_labels, masked_labels
from flashmask_hf.names import IGNORED

__all__ = ["DataCollatorForPackedLanguageModeling"]

logger = logging.getLogger(__name__)


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
        self._warn_of_unlabeled(rows, labels, names)
        if self.completion_only_loss is None and not any(map(_says_what_to_learn, examples)):
            self._warn_once(
                "The examples of a batch have neither labels nor masks, so every token is learned. If the dataset has "
                "completion_mask or assistant_masks, the trainer has removed them: set remove_unused_columns=False, or "
                "use pack_dataset, whose rows keep their labels. If every token is to be learned, say so with "
                "completion_only_loss=False."
            )
        batch = rows.batch()  # input_ids first: accelerate takes the batch size from it
        return {"input_ids": batch.pop("input_ids"), "labels": torch.from_numpy(labels), **batch}

    def _warn_of_unlabeled(self, rows: PackedRows, labels: NDArray[np.int64], names: Sequence[str]) -> None:
        """Warn of examples without a label, which make no loss."""
        starts = rows.starts.tolist()
        spans = [labels.reshape(-1)[at : at + len(own.tokens)] for at, own in zip(starts, rows.forests, strict=True)]
        unlabeled = [name for name, own in zip(names, spans, strict=True) if (own == IGNORED).all()]
        if unlabeled:
            self._warn_once(
                "%d of the %d examples of a batch have no label to learn, the first is %s (the first token of a "
                "document never has a label). They add nothing to the loss, and a batch of such is a step of loss 0. "
                "Leave them out of the dataset, as pack_dataset does. Later batches are not counted.",
                len(unlabeled), len(names), unlabeled[0],
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
        given, input_ids, lengths = read_documents(example, LABEL_COLUMNS, name)
        if packed and self.completion_only_loss is False and "labels" in given:
            raise ValueError(
                f"completion_only_loss=False comes too late for {name}, a row of pack_dataset that has its labels; "
                "pass it to pack_dataset, and leave it None here"
            )
        labels = self._labels(given, input_ids, name)
        if self.max_length is not None and len(input_ids) > self.max_length:
            kept = self._kept(len(input_ids), len(lengths), self.max_length, name)
            if has_labels(labels) and not has_labels(labels[kept]):
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
        drop_unused_masks(masks, self.completion_only_loss, name)
        return masked_labels(input_ids, masks, name)

    def _kept(self, tokens: int, documents: int, max_length: int, name: str) -> slice:
        """Return the tokens to keep of an example that is longer than a row."""
        if documents > 1:
            raise ValueError(
                f"{name} is a packed row of {tokens} tokens, longer than max_length {max_length}, and cutting it "
                "would lose documents; pack the dataset to max_length, or raise max_length"
            )
        if self.truncation_mode == "error":
            raise ValueError(too_long_message(name, tokens, max_length))
        return slice(max_length) if self.truncation_mode == "keep_start" else slice(-max_length, None)


def _says_what_to_learn(example: Mapping[str, Any]) -> bool:
    """Return whether an example has labels or a mask, or is a row of `pack_dataset`, which learns what it should."""
    return any(example.get(name) is not None for name in LABEL_COLUMNS) or is_packed(example["input_ids"])
