"""Labels of packed documents, made from the columns that select the tokens to learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.names import IGNORED

MASK_COLUMNS = ("completion_mask", "assistant_masks")
"""Columns that select the tokens to learn if there are no `labels`."""

LABEL_COLUMNS = ("labels", *MASK_COLUMNS)
"""Columns that mark the tokens to learn."""


def read_labels(
    example: Mapping[str, Any], input_ids: NDArray[np.int64], completion_only_loss: bool | None, name: str
) -> NDArray[np.int64] | None:
    """Return the labels of an example as `read_documents` returns it, int64 [n], or None if no column marks them.

    They are its `labels`, or else the token ids that every mask selects, and `IGNORED` elsewhere.

    Raises:
        ValueError: `completion_only_loss` is True and there is no completion mask, or the mask selects no token.
    """
    if "labels" in example:
        return example["labels"]
    masks = {column: example[column] for column in MASK_COLUMNS if column in example}
    if completion_only_loss is False:
        masks.pop("completion_mask", None)
    elif completion_only_loss and "completion_mask" not in masks:
        raise ValueError(f"{name} has no completion_mask, which completion_only_loss=True needs; add it, or set None")
    if "completion_mask" in masks and not masks["completion_mask"].any():
        way = "dataset.filter(lambda example: any(example['completion_mask']))"
        raise ValueError(f"{name} has an empty completion (completion_mask is 0 everywhere); remove it: {way}")
    return np.where(np.all(list(masks.values()), axis=0), input_ids, IGNORED) if masks else None


def has_labels(labels: NDArray[Any]) -> bool:
    """Return whether a document has a label after its first token, which nothing predicts."""
    return bool((labels[1:] != IGNORED).any())
