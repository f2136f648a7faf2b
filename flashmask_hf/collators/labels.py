"""Labels of packed documents, made from the columns that select the tokens to learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.names import IGNORED

__all__ = ["LABEL_COLUMNS", "MASK_COLUMNS", "drop_unused_masks", "has_labels", "masked_labels"]

MASK_COLUMNS = ("completion_mask", "assistant_masks")
"""Columns that select the tokens to learn if there are no `labels`."""

LABEL_COLUMNS = ("labels", *MASK_COLUMNS)
"""Columns that mark the tokens to learn."""


def drop_unused_masks(masks: dict[str, Any], completion_only_loss: bool | None, name: str) -> None:
    """Remove a completion mask that is to be ignored; raise a ValueError if a required one is absent."""
    if completion_only_loss is False:
        masks.pop("completion_mask", None)
    elif completion_only_loss and "completion_mask" not in masks:
        raise ValueError(
            f"{name} has no completion_mask, which completion_only_loss=True needs; add it, or labels, or set None"
        )


def masked_labels(input_ids: NDArray[Any], masks: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """Return the token ids that every mask selects, and `IGNORED` elsewhere, [n] with the dtype of `input_ids`.

    `masks` has 0 or 1 per token, [n], by column; without a mask, all tokens are selected.

    Raises:
        ValueError: there is a completion mask, and it selects no token.
    """
    if "completion_mask" in masks and not masks["completion_mask"].any():
        way = "dataset.filter(lambda example: any(example['completion_mask']))"
        raise ValueError(f"{name} has an empty completion (completion_mask is 0 everywhere); remove it: {way}")
    selected = np.ones(len(input_ids), dtype=bool)
    for mask in masks.values():
        selected &= mask != 0
    return np.where(selected, input_ids, IGNORED)


def has_labels(labels: NDArray[Any]) -> bool:
    """Return whether a document has a label after its first token, which nothing predicts."""
    return bool((labels[1:] != IGNORED).any())
