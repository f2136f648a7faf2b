"""Data collator that packs documents for bidirectional encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.collators.columns import all_have, example_names
from flashmask_hf.collators.documents import read_documents
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.packing import RowPacker
from flashmask_hf.names import IGNORED, VECTORS

_FILLERS = {"labels": IGNORED, "token_type_ids": 0}


@dataclass
class DataCollatorForPackedEncoders(RowPacker):
    """Data collator that packs documents for encoders (BERT, ModernBERT, embedding models).

    Each token attends to exactly the tokens of its document: the mask is `masks.document`.

    An example has `input_ids`, a sequence of integers, or is a packed row of `pack_dataset`. `labels` and
    `token_type_ids` are used unchanged, so a token's label is its own.

    Positions count from 0; "flashmask" adds the offset of models such as RoBERTa. For one embedding per document, take
    the token with `position_ids` 0 and non-zero mask indices, or average the tokens of a row with the same mask
    indices. BERT's `pooler_output` belongs to a row's first document.

    `flashmask_hf.collators` describes the options and errors.

    Returns:
        dict[str, Tensor]: `input_ids` and `position_ids`, int64 [rows, S]; `labels` and `token_type_ids`, int64
        [rows, S], if the examples have them; and `startend_row_indices`, int32 [rows, 1, S, 2]: the rows where the
        document of each token ends and starts, 0 for padding.

    Example:
        >>> collator = DataCollatorForPackedEncoders(pad_to_multiple_of=8)
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5, 0, 0, 0]])
        >>> batch["startend_row_indices"][0, 0].T
        tensor([[3, 3, 3, 5, 5, 0, 0, 0],
                [0, 0, 0, 3, 3, 0, 0, 0]], dtype=torch.int32)
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        read = [read_documents(one, tuple(_FILLERS), name) for one, name in zip(examples, names, strict=True)]
        rows = self._pack([Forest.from_documents(input_ids, lengths) for _, input_ids, lengths in read], names)
        batch = rows.batch()
        for column, filler in _FILLERS.items():
            if all_have(column, [column in given for given, _, _ in read], names):
                batch[column] = torch.from_numpy(rows.spread([given[column] for given, _, _ in read], filler))
        ends = batch[VECTORS]
        starts = torch.arange(ends.shape[2]) - batch["position_ids"]
        batch[VECTORS] = torch.cat([ends, starts[:, None, :, None].to(torch.int32).masked_fill(ends == 0, 0)], -1)
        return batch
