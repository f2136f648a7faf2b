"""Data collators that pack documents, shared questions and trees into rows, with the mask vectors of each row."""

from flashmask_hf.collators.dataset import pack_dataset, packing_efficiency
from flashmask_hf.collators.encoders import DataCollatorForPackedEncoders
from flashmask_hf.collators.forest import Forest, PackedRows, pack_forests
from flashmask_hf.collators.language_modeling import DataCollatorForPackedLanguageModeling
from flashmask_hf.collators.loss import tree_loss
from flashmask_hf.collators.preference import DataCollatorForSharedQuestion
from flashmask_hf.collators.reward import DataCollatorForMultiAnswerReward
from flashmask_hf.collators.trees import DataCollatorForTrees

__all__ = [
    "DataCollatorForMultiAnswerReward",
    "DataCollatorForPackedEncoders",
    "DataCollatorForPackedLanguageModeling",
    "DataCollatorForSharedQuestion",
    "DataCollatorForTrees",
    "Forest",
    "PackedRows",
    "pack_dataset",
    "pack_forests",
    "packing_efficiency",
    "tree_loss",
]
