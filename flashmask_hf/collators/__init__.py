"""Data collators that pack documents, shared questions and trees into rows, with the mask indices of each row.

All collators share these options:

* `pad_token_id`: token id of the padding, any id of the vocabulary, because nothing attends to padding.
* `max_length`, or `row_length` if answers share a question: None packs the batch into one row. A number makes rows of
  exactly that many tokens, filled best-fit-decreasing and padded at the end. Documents and trees are never split.
* `pad_to_multiple_of`: pad the single row to a multiple of this. A fixed row length must already be a multiple of it.
* `max_position_embeddings`: the model's number of positions; a longer document or path raises. None: no limit.

Examples are dictionaries. A column that is None counts as absent, and other columns are ignored. Collators raise

* a ValueError for an option out of range, an empty batch, or an example that is empty, too long, or padded (zeros in
  `attention_mask`), lacks a column, or has negative token ids or columns that do not fit together;
* a TypeError for an option or a column of another type.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from flashmask_hf.collators.diffusion import DataCollatorForBlockDiffusion, DataCollatorForMaskedDiffusion
from flashmask_hf.collators.encoders import DataCollatorForPackedEncoders
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.language_modeling import DataCollatorForPackedLanguageModeling
from flashmask_hf.collators.loss import diffusion_loss
from flashmask_hf.collators.packing import PackedRows, pack_forests
from flashmask_hf.collators.preference import DataCollatorForSharedQuestion
from flashmask_hf.collators.reward import DataCollatorForMultiAnswerReward
from flashmask_hf.collators.rope_index import RopeIndex
from flashmask_hf.collators.shared_rows import SharedRows, gather_logps, pack_shared
from flashmask_hf.collators.trees import DataCollatorForTrees
from flashmask_hf.collators.vision import DataCollatorForPackedVisionLanguageModeling

if _TYPE_CHECKING:
    from flashmask_hf.collators.dataset import pack_dataset as pack_dataset
    from flashmask_hf.collators.dataset import packing_efficiency as packing_efficiency

__all__ = [
    "DataCollatorForBlockDiffusion",
    "DataCollatorForMaskedDiffusion",
    "DataCollatorForMultiAnswerReward",
    "DataCollatorForPackedEncoders",
    "DataCollatorForPackedLanguageModeling",
    "DataCollatorForPackedVisionLanguageModeling",
    "DataCollatorForSharedQuestion",
    "DataCollatorForTrees",
    "Forest",
    "PackedRows",
    "RopeIndex",
    "SharedRows",
    "diffusion_loss",
    "gather_logps",
    "pack_dataset",
    "pack_forests",
    "pack_shared",
    "packing_efficiency",
]


def __getattr__(name: str) -> _Any:
    """Import the functions on datasets, which need the package `datasets`, on first use."""
    if name not in ("pack_dataset", "packing_efficiency"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashmask_hf.collators.dataset import pack_dataset, packing_efficiency

    return pack_dataset if name == "pack_dataset" else packing_efficiency
