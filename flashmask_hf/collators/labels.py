"""Labels of packed documents and their weights, made from the columns that select and weigh the tokens to learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.names import IGNORED

MASK_COLUMNS = ("completion_mask", "assistant_masks")
"""Columns that select the tokens to learn without `labels`."""

LABEL_COLUMNS = ("labels", *MASK_COLUMNS)
"""Columns that mark the tokens to learn."""

WEIGHT = "weight"
"""Column with the weight of an example, or one weight per token."""

NO_WEIGHT = "rename or remove the column if it is no weight of the loss"
"""Way out of errors for other columns of this name."""

_MAX_WEIGHT = 1e20
"""Largest absolute value: float32 holds the sum of 10**18 of them."""


def read_labels(
    example: Mapping[str, Any], input_ids: NDArray[np.int64], completion_only_loss: bool | None, name: str
) -> NDArray[np.int64] | None:
    """Return the labels of an example that `read_documents` read, int64 [n], or None if no column marks them.

    They are its `labels`, or else the token ids that every mask selects, and `IGNORED` elsewhere.

    Raises a ValueError if `completion_only_loss` is True without a completion mask, or that mask selects no token.
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


def read_weights(value: Any, labels: NDArray[Any], name: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return an example's labels, integers [n], ignored where the weight is 0, and their weights, float32 [n].

    Raises a TypeError unless `value` is a number or a flat sequence of numbers, and a ValueError for a number that is
    not finite or over 1e20, or numbers that are not one per token.
    """
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, and tensors that NumPy cannot hold
        given = np.array(None)
    if given.ndim > 1 or given.dtype.kind not in "iuf":
        raise TypeError(
            f"weight of {name} must be a number, or one number per token, got {value!r:.50}; correct it, or {NO_WEIGHT}"
        )
    if given.ndim and len(given) != len(labels):
        problem = f"weight of {name} has {len(given)} entries, but its input_ids have {len(labels)}"
        raise ValueError(f"{problem}; give one number per token, or one number")
    given = given.astype(np.float64)  # float16 takes the limit for infinity
    wrong = given[~(np.abs(given) <= _MAX_WEIGHT)]  # also NaN
    if wrong.size:
        raise ValueError(f"weight of {name} must be finite and at most 1e20, got {wrong[0]}; correct or remove it")
    weights = np.broadcast_to(given, labels.shape).astype(np.float32)
    return np.where(weights == 0, IGNORED, labels).astype(labels.dtype), weights


def has_labels(labels: NDArray[Any]) -> bool:
    """Return whether a document has a label after its first token, which nothing predicts."""
    return bool((labels[1:] != IGNORED).any())
