"""Data collator that packs the examples of a batch for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.columns import example_names
from flashmask_hf.collators.documents import is_packed, pieces, read_documents
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.labels import LABEL_COLUMNS, WEIGHT, has_labels, read_labels, read_weights
from flashmask_hf.collators.packing import PackedRows, RowPacker, check_truncation_mode
from flashmask_hf.collators.tries import read_shared_row, shares_prefixes
from flashmask_hf.names import EXAMPLE_TOKENS, IGNORED, LABEL_WEIGHTS


@dataclass
class DataCollatorForPackedLanguageModeling(RowPacker):
    """Data collator that packs the examples of a batch into rows in which each example attends only to itself.

    An example has `input_ids`, a sequence of integers. Its labels are, in this order:

    * `labels`, unchanged (None raises);
    * the `input_ids` of the tokens that `assistant_masks` and `completion_mask` select (0 or 1 per token);
    * all `input_ids`, with a warning, once, because a trainer may have removed the masks.

    The first token of a document is never a label. A warning, once, counts the examples of a batch without a label.

    A `weight`, a number or a sequence of one per token, is a factor of their losses in `PackedSFTTrainer`; other
    trainers remove it or raise. It may be negative; 0 makes no label.

    An example may be a packed row of `pack_dataset`. A flat row of another packer needs `seq_lengths`, the lengths of
    its documents, or `position_ids`, which restart at 0 with each document.

    `flashmask_hf.collators` describes the other options and errors. With `max_length`, TRL's SFTTrainer logs the
    `num_tokens` of one of several rows.

    Args:
        truncation_mode: what to do with an example over `max_length`: "error" raises, "keep_start" and "keep_end" cut
            it, or raise if no label would be left.
        completion_only_loss: as in TRL: None uses a `completion_mask` if there is one, False ignores it, True requires
            it (or `labels`). For rows of `pack_dataset`, choose it there: False raises if they have labels.

    Returns:
        dict[str, Tensor]: `input_ids`, `labels`, `position_ids`, int64 [rows, S], and `startend_row_indices`, int32
        [rows, 1, S, 1]: the row where the document of each token ends, 0 for padding. With weights or shared prefixes,
        also `label_weights`, float32 [rows, S], the sum of the examples' weights of each label; with shared prefixes
        `example_tokens`, int64 [examples], the number of tokens of each packed row unshared.

    Example:
        >>> examples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "completion_mask": [0, 1]}]
        >>> batch = DataCollatorForPackedLanguageModeling()(examples)
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5]])
        >>> batch["labels"]
        tensor([[-100,    2,    3, -100,    5]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1]])
        >>> batch["startend_row_indices"].flatten()
        tensor([3, 3, 3, 5, 5], dtype=torch.int32)
    """

    truncation_mode: str = field(default="error", kw_only=True)
    completion_only_loss: bool | None = field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_truncation_mode(self.truncation_mode)
        if self.max_length is None and self.truncation_mode != "error":
            raise ValueError(f"truncation_mode='{self.truncation_mode}' needs max_length, the length to truncate to")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        rows, labels, weights = self._pack_examples(examples, learns_first=False)
        batch = rows.batch() | {"labels": torch.from_numpy(labels)}
        if weights is not None:
            batch[LABEL_WEIGHTS] = torch.from_numpy(weights)
        if any(example.get("example_lengths") is not None for example in examples):
            given = [(example.get("example_lengths"), own) for example, own in zip(examples, rows.forests, strict=True)]
            tokens = [len(own.tokens) if lengths is None else sum(lengths) for lengths, own in given]
            batch[EXAMPLE_TOKENS] = torch.tensor(tokens)
        return batch

    def _pack_examples(
        self, examples: Sequence[Mapping[str, Any]], *, learns_first: bool
    ) -> tuple[PackedRows, NDArray[np.int64], NDArray[np.float32] | None]:
        """Return the rows of a batch, their labels, int64 [rows, S], and any weights of the labels, float32 [rows, S].

        `learns_first` keeps the labels of the documents' first tokens.
        """
        names = example_names(examples)
        read = [self._read(example, name) for example, name in zip(examples, names, strict=True)]
        rows = self._pack([forest for forest, _, _ in read], names)
        labels = rows.spread([labels for _, labels, _ in read], filler=IGNORED)
        if not learns_first:
            labels[rows.position_ids == 0] = IGNORED
        self._warn_of_unlabeled(rows, labels, names)
        if self.completion_only_loss is None and not any(map(_says_what_to_learn, examples)):
            self._warn_once(
                "The examples of a batch have neither labels nor masks, so every token is learned. If the trainer has "
                "removed completion_mask or assistant_masks, set remove_unused_columns=False or use pack_dataset; else "
                "set completion_only_loss=False."
            )
        weights = None
        if any(weights is not None for _, _, weights in read):
            counts = [own != IGNORED if weights is None else weights for _, own, weights in read]
            weights = rows.spread(counts, filler=0, dtype=np.float32)
            weights[labels == IGNORED] = 0
        return rows, labels, weights

    def _warn_of_unlabeled(self, rows: PackedRows, labels: NDArray[np.int64], names: Sequence[str]) -> None:
        starts = rows.starts.tolist()
        spans = [labels.reshape(-1)[at : at + len(own.tokens)] for at, own in zip(starts, rows.forests, strict=True)]
        unlabeled = [name for name, own in zip(names, spans, strict=True) if (own == IGNORED).all()]
        if unlabeled:
            self._warn_once(
                "%d of the %d examples of a batch have no label to learn, the first is %s (the first token of a "
                "document never has a label). A batch of such examples is a step of loss 0; leave them out of the "
                "dataset, as pack_dataset does. Later batches are not counted.",
                len(unlabeled), len(names), unlabeled[0],
            )  # fmt: skip

    def _read(
        self, example: Mapping[str, Any], name: str
    ) -> tuple[Forest, NDArray[np.int64], NDArray[np.float32] | None]:
        """Return an example's documents, their labels, int64 [n], and the weights of labels, float32 [n], if any."""
        packed = is_packed(example.get("input_ids"))
        if shares_prefixes(example.get("input_ids")):
            forest, weights = read_shared_row(example, name)
            return forest, np.where(weights == 0, IGNORED, forest.tokens), weights
        if not packed and example.get("labels", ...) is None:  # a trainer may have removed the masks
            raise ValueError(f"{name} has no labels, but a labels column, as in joined data; give all of them labels")
        given, input_ids, lengths = read_documents(example, LABEL_COLUMNS, name)
        if packed and self.completion_only_loss is False and "labels" in given:
            raise ValueError(f"completion_only_loss=False comes too late for {name}, labelled; pass it to pack_dataset")
        labels = read_labels(given, input_ids, self.completion_only_loss, name)
        labels = input_ids if labels is None else labels
        weights = None
        if example.get(WEIGHT) is not None:
            labels, weights = read_weights(example[WEIGHT], labels, name)
        tokens = len(input_ids)
        if len(lengths) > 1 and self.max_length is not None and tokens > self.max_length:
            problem = f"{name} is a packed row of {tokens} tokens, longer than max_length {self.max_length}"
            raise ValueError(f"{problem}; pack the dataset to max_length, or raise max_length")
        (kept,) = pieces(tokens, self.max_length, self.truncation_mode, name)
        if has_labels(labels) and not has_labels(labels[kept]):
            raise ValueError(
                f"{name} teaches nothing once cut to max_length {self.max_length}; raise it, choose another "
                "truncation_mode, or use pack_dataset, which leaves such examples out"
            )
        input_ids, labels = input_ids[kept], labels[kept]
        weights = None if weights is None else weights[kept]
        return Forest.from_documents(input_ids, np.minimum(lengths, len(input_ids))), labels, weights


def _says_what_to_learn(example: Mapping[str, Any]) -> bool:
    return any(example.get(name) is not None for name in LABEL_COLUMNS) or is_packed(example["input_ids"])
