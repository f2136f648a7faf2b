"""Data collator that packs documents for bidirectional encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashmask_hf.collators._validation import as_row_options, example_names
from flashmask_hf.collators.documents import read_documents
from flashmask_hf.collators.forest import Forest, pack_forests
from flashmask_hf.names import IGNORED, VECTORS

__all__ = ["DataCollatorForPackedEncoders"]

_FILLERS = {"labels": IGNORED, "token_type_ids": 0}


@dataclass
class DataCollatorForPackedEncoders:
    """Data collator that packs documents for encoders (BERT, ModernBERT, embedding models), without padding.

    Each token attends to all tokens of its document, and to no others: the mask is `masks.document`.

    An example is a dictionary with `input_ids`, a sequence of integers, or a packed row of `pack_dataset`. `labels` are
    used unchanged: the label of a token is its own, also of a document's first one, as in masked language modeling
    (-100 is no label). `token_type_ids` are kept. Other keys are ignored. A column that is None counts as absent.

    Positions count from 0. In models that count them from another number, as RoBERTa does, the attention "flashmask"
    adds it. The embedding of a document is read at its first token, where `position_ids` are 0 and
    `startend_row_indices` are not both 0 (padding), or is the mean of its tokens, which are those of a row with the
    same `startend_row_indices`. BERT's `pooler_output` is that of a row's first document.

    Args:
        pad_token_id: token id of the padding. Nothing attends to padding, so any id of the vocabulary works.
        max_length: None packs the whole batch into one row, without padding. A number makes rows of exactly that many
            tokens, filled best-fit-decreasing and padded at the end.
        pad_to_multiple_of: pad the single row to a multiple of this. `max_length` must already be a multiple of it.
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.

    Returns:
        dict[str, Tensor]: `input_ids` and `position_ids`, int64 [rows, S]; `labels` and `token_type_ids`, int64
        [rows, S], if the examples have them; and `startend_row_indices`, int32 [rows, 1, S, 2]: the rows where the
        document of each token ends and starts, 0 for padding.

    Raises:
        ValueError: an argument is out of range; or an example is empty, longer than a row, or padded, lacks a column
            that others of its batch have, or has columns of different lengths. The message names the example's index.
        TypeError: a column does not hold integers.

    Example:
        >>> from flashmask_hf.collators import DataCollatorForPackedEncoders
        >>> collator = DataCollatorForPackedEncoders(pad_to_multiple_of=8)
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5, 0, 0, 0]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
        >>> batch["startend_row_indices"][0, 0].T
        tensor([[3, 3, 3, 5, 5, 0, 0, 0],
                [0, 0, 0, 3, 3, 0, 0, 0]], dtype=torch.int32)
    """

    pad_token_id: int = 0
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self):
        self.pad_token_id, self.max_length, self.pad_to_multiple_of, self.max_position_embeddings = as_row_options(
            self.pad_token_id, self.max_length, self.pad_to_multiple_of, self.max_position_embeddings
        )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch; see the class."""
        names = example_names(examples)
        read = [read_documents(one, tuple(_FILLERS), name) for one, name in zip(examples, names, strict=True)]
        rows = pack_forests(
            [Forest(input_ids, lengths, np.full(len(lengths), -1)) for _, input_ids, lengths in read],
            self.max_length,
            pad_token_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
            max_position_embeddings=self.max_position_embeddings,
            names=names,
        )
        batch = rows.batch()
        for column, filler in _FILLERS.items():
            lacking = [name for name, (given, _, _) in zip(names, read, strict=True) if column not in given]
            if lacking and len(lacking) < len(read):
                raise ValueError(
                    f"{lacking[0]} has no {column}, but others of its batch have; give them to all examples, or to none"
                )
            if not lacking:
                batch[column] = torch.from_numpy(rows.spread([given[column] for given, _, _ in read], filler))
        ends = batch[VECTORS]
        starts = torch.arange(ends.shape[2]) - batch["position_ids"]
        batch[VECTORS] = torch.cat([ends, starts[:, None, :, None].to(torch.int32).masked_fill(ends == 0, 0)], -1)
        return batch
