"""Data collator that packs trees of token segments for causal models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators.columns import as_integers, as_token_ids, example_names
from flashmask_hf.collators.documents import padded
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.labels import MASK_COLUMNS, WEIGHT
from flashmask_hf.collators.packing import RowPacker
from flashmask_hf.names import IGNORED


@dataclass
class DataCollatorForTrees(RowPacker):
    """Data collator that packs trees of token segments, in which every token is computed and learned once.

    An example has `input_ids`, a list of segments in depth-first order, each a list of token ids, and `parents`, the
    index of each segment's parent, -1 for a root. `labels` have the layout of `input_ids`; without them, every token
    but the first of a root is learned. Set `remove_unused_columns=False`, so that trainers keep `parents`.

    A causal model predicts a token from the token before it in the row, which at a branch belongs to a sibling. So a
    segment gives each child its last token. Loss and gradients equal training on every root-to-leaf path alone, with a
    shared token's label in the first path only.

    Returns:
        dict[str, Tensor]: `input_ids`, `labels` and `position_ids`, int64 [rows, S]; and `startend_row_indices`, int32
        [rows, 1, S, 1].

    Raises:
        ValueError: also for an empty segment, segments out of depth-first order, labels of another layout, masks in
            place of labels, or weights.

    Example:
        >>> batch = DataCollatorForTrees()([{"input_ids": [[1, 2, 3], [4, 5], [6]], "parents": [-1, 0, 0]}])
        >>> batch["input_ids"]
        tensor([[1, 2, 3, 4, 5, 3, 6]])
        >>> batch["labels"]
        tensor([[-100,    2,    3,    4,    5, -100,    6]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 3, 4, 2, 3]])
        >>> batch["startend_row_indices"].flatten()
        tensor([7, 7, 5, 5, 5, 7, 7], dtype=torch.int32)
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        trees, labels = [], []
        for example, name in zip(examples, names, strict=True):
            tree, own = _read(example, name)
            tree, places = learn_once(tree)
            trees.append(tree)
            labels.append(np.where(places < 0, IGNORED, own[places]))
        rows = self._pack(trees, names)
        spread = rows.spread(labels, filler=IGNORED)
        spread[rows.position_ids == 0] = IGNORED
        return rows.batch() | {"labels": torch.from_numpy(spread)}


def _read(example: Mapping[str, Any], name: str) -> tuple[Forest, NDArray[np.int64]]:
    """Return the forest of an example, and the label of each of its tokens, int64 [n]."""
    for column in ("input_ids", "parents"):
        if example.get(column) is None:
            problem = "a tree needs input_ids and parents, which a trainer removes unless remove_unused_columns=False"
            raise ValueError(f"{name} has no {column}; {problem}")
    tokens = _segments(example["input_ids"], "input_ids", name)
    mask = example.get("attention_mask")
    if mask is not None and not all(own.all() for own in _segments(mask, "attention_mask", name)):
        raise ValueError(padded(name))
    labels = tokens
    if example.get("labels") is not None:
        labels = _segments(example["labels"], "labels", name)
    elif masks := [column for column in MASK_COLUMNS if example.get(column) is not None]:
        raise ValueError(f"{name} has {masks[0]} and no labels; give labels in the layout of input_ids, -100 to ignore")
    if given := [column for column in (WEIGHT, "weights") if example.get(column) is not None]:
        way = "PackedSFTTrainer(share_prefixes=True) on one example per path reads weights"
        raise ValueError(f"{name} has {given[0]}, which trees do not read; remove the column: {way}")
    if [len(own) for own in labels] != [len(own) for own in tokens]:
        raise ValueError(f"labels of {name} must have the layout of its input_ids")
    try:
        parents = as_integers(example["parents"], f"parents of {name}")
    except TypeError as error:
        raise TypeError(f"{error}; the parent of a root is -1, not None") from None
    flat = as_token_ids(np.concatenate([np.empty(0, np.int64), *tokens]), f"input_ids of {name}")
    try:
        tree = Forest(flat, np.array([len(own) for own in tokens]), parents)
    except ValueError as error:
        raise ValueError(f"input_ids and parents of {name} are no forest: {error}") from None
    return tree, np.concatenate(labels)


def learn_once(tree: Forest) -> tuple[Forest, NDArray[np.int64]]:
    """Give the last token of segments to their children: each token is then predicted by the token before it in a row.

    Returns also the token of `tree` whose label each new token has, int64 [n]: -1 for further copies.
    """
    ends = np.cumsum(tree.lengths).tolist()
    inner = set(tree.parents.tolist())
    kept: list[NDArray[np.int64]] = []  # places in the old forest of the new segments' tokens
    parents: list[int] = []
    new = {-1: -1}  # the new index of each segment that keeps a token
    for segment, parent in enumerate(tree.parents.tolist()):
        own = np.arange(ends[segment] - tree.lengths[segment], ends[segment] - (segment in inner))
        if parent != -1:
            own = np.append(ends[parent] - 1, own)
        new[segment] = -1  # a root of one token gives it away, and its children are roots
        if own.size:
            new[segment] = len(kept)
            kept.append(own)
            parents.append(new[parent])
    places = np.concatenate(kept)
    firsts = np.unique(places, return_index=True)[1]
    labelled = np.full(len(places), -1)
    labelled[firsts] = places[firsts]
    return Forest.from_segments([tree.tokens[own] for own in kept], parents), labelled


def _segments(values: Any, column: str, name: str) -> list[NDArray[np.int64]]:
    """Return the segments of a column, int64 [n] each."""
    if not hasattr(values, "__iter__"):
        raise TypeError(f"{column} of {name} must be a list of segments, got {values!r}")
    return [as_integers(segment, f"segment {index} of {column} of {name}") for index, segment in enumerate(values)]
