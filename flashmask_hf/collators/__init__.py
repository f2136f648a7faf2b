"""Data collators that put documents into packed rows and emit the mask vectors."""

from flashmask_hf.collators.language_modeling import (
    DataCollatorForPackedLanguageModeling,
    pack_dataset,
    packing_efficiency,
)

__all__ = ["DataCollatorForPackedLanguageModeling", "pack_dataset", "packing_efficiency"]
