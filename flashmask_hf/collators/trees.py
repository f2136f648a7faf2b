"""Data collator that packs trees of token segments for causal models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf._numbers import check_bool
from flashmask_hf.collators.columns import as_integers, as_numbers, as_token_ids, example_names
from flashmask_hf.collators.documents import padded
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.labels import MASK_COLUMNS
from flashmask_hf.collators.packing import PackedRows, RowPacker
from flashmask_hf.names import IGNORED


@dataclass
class DataCollatorForTrees(RowPacker):
    """Data collator that packs trees of token segments, in which every token is computed and learned once.

    An example has `input_ids`, a list of segments in depth-first order, each a list of token ids, and `parents`, the
    index of each segment's parent, -1 for a root. `labels` have the layout of `input_ids`; without them, every token is
    learned except the first of a root. Set `remove_unused_columns=False`, so that trainers keep `parents`.

    A causal model predicts a token from the token before it in the row, which at a branch belongs to a sibling. So a
    segment gives its last token to each of its children. Loss and gradients equal training on every root-to-leaf path
    as a separate sequence, with a shared token's label only in the first path that contains the token.

    Args:
        per_path: whether every path keeps all its labels, so that a shared token counts once per leaf below it. Set
            `model.loss_function = flashmask_hf.collators.tree_loss`; without it, these batches raise. `weights`, one
            number per leaf in the order of the segments, are factors of the losses of the leaf's path; the sum is
            divided by the number of labels. `flashmask_hf.collators` describes the other options and errors.

    Returns:
        dict[str, Tensor]: `input_ids`, `labels` and `position_ids`, int64 [rows, S]; and `startend_row_indices`, int32
        [rows, 1, S, 1]. With `per_path`, for W leaves of an example at most, `labels` are -100, and there are

        * `shift_labels`, int64 [rows, W, S]: entry [r, w, s] is the label that token s of row r predicts on path w
          through it, or -100;
        * `path_weights`, float32 [rows, W, S], the weights of these paths, if an example has them.

    Raises:
        ValueError: also for an empty segment, segments out of depth-first order, labels of another layout, masks in
            place of labels, or weights that are not finite, not one per leaf, or given without `per_path`.

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

        >>> collator = DataCollatorForTrees(per_path=True)
        >>> batch = collator([{"input_ids": [[1, 2, 3], [4, 5], [6]], "parents": [-1, 0, 0]}])
        >>> batch["shift_labels"]
        tensor([[[   2,    3,    4,    5, -100, -100],
                 [   2,    3,    6, -100, -100, -100]]])
    """

    per_path: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_bool("per_path", self.per_path)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        read = [_read(example, name) for example, name in zip(examples, names, strict=True)]
        weights = [_weights(one, tree, name) for one, (tree, _), name in zip(examples, read, names, strict=True)]
        given = [name for name, own in zip(names, weights, strict=True) if own is not None]
        if given and not self.per_path:
            raise ValueError(f"{given[0]} has weights, which are for paths: set per_path=True, or remove the column")
        if not self.per_path:
            placed = [(learn_once(tree), labels) for tree, labels in read]
            read = [(tree, np.where(places < 0, IGNORED, own[places])) for (tree, places), own in placed]
        rows = self._pack([tree for tree, _ in read], names)
        labels = rows.spread([labels for _, labels in read], filler=IGNORED)
        batch = rows.batch() | {"labels": torch.from_numpy(labels)}
        if self.per_path:
            found, factors = _paths(rows, labels, weights)
            batch |= {"labels": torch.full_like(batch["labels"], IGNORED), "shift_labels": found}
            return batch | ({"path_weights": factors} if given else {})
        labels[rows.position_ids == 0] = IGNORED
        return batch


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


def _weights(example: Mapping[str, Any], tree: Forest, name: str) -> list[float] | None:
    """Return the weight of each leaf of an example, or None if it has none."""
    weights = example.get("weights")
    if weights is None:
        return None
    return as_numbers(weights, len(tree.leaves()), "leaves", f"weights of {name}")


def learn_once(tree: Forest) -> tuple[Forest, NDArray[np.int64]]:
    """Give the last token of segments to their children: each token is then predicted by the token before it in a row.

    Returns:
        The new forest, and the token of `tree` whose label each of its tokens has, int64 [n]: -1 for further copies.
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


def _paths(rows: PackedRows, labels: NDArray[np.int64], weights: Sequence[list[float] | None]) -> tuple[Tensor, Tensor]:
    """Return the labels that tokens predict on each path, int64 [R, W, S], and the paths' weights, float32 [R, W, S].

    `labels` are int64 [R, S]; `weights` has the weights of each forest's leaves, None is 1.
    """
    paths = [rows.paths(index) for index in range(len(rows.forests))]
    shape = (len(labels), max(map(len, paths)), labels.shape[1])
    found = torch.full(shape, IGNORED)
    factors = torch.ones(shape)
    flat = torch.from_numpy(labels).flatten()
    for own, given in zip(paths, weights, strict=True):
        for nth, path in enumerate(own):
            row, place = path[:-1] // shape[2], path[:-1] % shape[2]
            found[row, nth, place] = flat[path[1:]]
            if given is not None:
                factors[row, nth, place] = given[nth]
    return found, factors


def _segments(values: Any, column: str, name: str) -> list[NDArray[np.int64]]:
    """Return the segments of a column, int64 [n] each."""
    if not hasattr(values, "__iter__"):
        raise TypeError(f"{column} of {name} must be a list of segments, got {values!r}")
    return [as_integers(segment, f"segment {index} of {column} of {name}") for index, segment in enumerate(values)]
