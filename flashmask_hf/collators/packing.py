"""Rows of packed trees, with their position ids and mask indices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf._numbers import as_integer
from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.collators.forest import Forest, Leaf, lay_out
from flashmask_hf.names import PACKED_INDEX, PACKED_KEYS, VECTORS

logger = logging.getLogger(__name__)


def check_truncation_mode(mode: str) -> None:
    """Raise a ValueError unless `mode` is "error", "keep_start" or "keep_end"."""
    if mode not in ("error", "keep_start", "keep_end"):
        raise ValueError(f"truncation_mode must be one of error, keep_start, keep_end, got {mode!r}")


def as_count(name: str, value: Any) -> int | None:
    """Return an option as an int of at least 1, or None; the errors are `as_integer`'s."""
    return None if value is None else as_integer(name, value, 1, why="or None")


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """R packed rows of S tokens, with the forests that they hold.

    Args:
        input_ids: int64 [R, S], with `pad_token_id` after the last forest of a row.
        position_ids: int64 [R, S], depth of each token, 0 for padding.
        subtree_ends: int32 [R, S], the row where the subtree of each token's segment ends, 0 for padding.
        starts: int64 [forests], index in the flattened rows of each forest's first token.
        forests: the forests, as passed.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    subtree_ends: NDArray[np.int32]
    starts: NDArray[np.int64]
    forests: Sequence[Forest]

    def batch(self) -> dict[str, Tensor]:
        """Return `input_ids` and `position_ids`, int64 [R, S], and `startend_row_indices`, int32 [R, 1, S, 1]."""
        return {  # input_ids first: accelerate takes the batch size from it
            "input_ids": torch.from_numpy(self.input_ids),
            "position_ids": torch.from_numpy(self.position_ids),
            VECTORS: torch.from_numpy(self.subtree_ends)[:, None, :, None],
        }

    def indexed_batch(self, index: NDArray[np.int64] | Tensor) -> dict[str, Tensor]:
        """Return the packed rows as additional keys of a batch with one sequence per answer.

        They are `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1];
        and `packed_index`, int64 [N, L], each token's `index` in the flattened rows. Padding has any indices, best
        distinct ones: the backward adds gradients of equal entries one by one.
        """
        return {PACKED_KEYS[name]: x for name, x in self.batch().items()} | {PACKED_INDEX: torch.as_tensor(index)}

    def place(self, leaves: Sequence[Leaf], real: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the index in the flattened rows of each token of a batch's sequences, int64 [N, L].

        `real`, bool [N, L], is False for padding, whose entries repeat little; the sequences end at `leaves`.
        """
        index = np.arange(real.size).reshape(real.shape) % self.input_ids.size
        index[real] = np.concatenate([self.starts[forest] + self.forests[forest].path(leaf) for forest, leaf in leaves])
        return index

    def paths(self, forest: int) -> list[Tensor]:
        """Return the indices in the flattened rows of the path to each leaf of a forest, int64 [depth] each."""
        packed = self.forests[forest]
        return [torch.from_numpy(self.starts[forest] + packed.path(leaf)) for leaf in packed.leaves()]

    def spread(self, values: Sequence[NDArray[Any]], filler: int, dtype: Any = np.int64) -> NDArray[Any]:
        """Lay out one value per token, [n] for each forest, in the packed rows, [R, S]; else raise a ValueError."""
        sizes, given = [len(forest.tokens) for forest in self.forests], list(map(len, values))
        if given != sizes:
            raise ValueError(f"values must have one entry per token, {sizes!s:.60} for the forests, got {given!s:.60}")
        spread = np.full(self.input_ids.size, filler, dtype=dtype)
        for start, own in zip(self.starts.tolist(), values, strict=True):
            spread[start : start + len(own)] = own
        return spread.reshape(self.input_ids.shape)


def pack_forests(
    forests: Sequence[Forest],
    max_length: int | None = None,
    *,
    pad_token_id: int = 0,
    pad_to_multiple_of: int | None = None,
    max_position_embeddings: int | None = None,
) -> PackedRows:
    """Pack forests into rows. A forest is never split.

    Args:
        forests: the forests to pack, in this order if there is a single row.
        max_length: this and the following three as in `flashmask_hf.collators`.
        pad_token_id: see there.
        pad_to_multiple_of: see there.
        max_position_embeddings: see there.

    Returns:
        PackedRows: the rows; `batch()` returns the model's inputs.

    Raises:
        TypeError: an option is not an int.
        ValueError: an option is out of range, `forests` is empty, or a forest is longer than a row or deeper than the
            model's positions.

    Example:
        >>> rows = pack_forests([Forest.from_trees(([1, 2, 3], [[4, 5], [6]])), Forest.from_trees([7, 8])])
        >>> rows.input_ids
        array([[1, 2, 3, 4, 5, 6, 7, 8]])
        >>> rows.position_ids
        array([[0, 1, 2, 3, 4, 3, 0, 1]])
        >>> rows.subtree_ends
        array([[6, 6, 6, 5, 5, 6, 8, 8]], dtype=int32)
        >>> [path.tolist() for path in rows.paths(0)]
        [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    """
    packer = RowPacker(pad_token_id, max_length, pad_to_multiple_of, max_position_embeddings)
    if not forests:
        raise ValueError("forests is empty: there is nothing to pack")
    return packer._pack(forests, [f"forests[{index}]" for index in range(len(forests))])


def check_size(name: str, tokens: int, depth: int, row: int | None, positions: int | None) -> None:
    """Raise a ValueError if a forest is longer than a row of `row` tokens, or deeper than the model's positions."""
    if row is not None and tokens > row:
        raise ValueError(f"{name} has {tokens} tokens, more than the {row} of a row; make rows longer, or shorten it")
    if positions is not None and depth > positions:
        problem = f"{name} is {depth} tokens deep, but the model has {positions} positions (max_position_embeddings)"
        raise ValueError(f"{problem}; shorten it")


class PackingCollator:
    """Base class of the collators, with the options that they share."""

    pad_token_id: int
    pad_to_multiple_of: int | None
    max_position_embeddings: int | None

    _row_option = "max_length"
    """Name of the option with the number of tokens per row."""

    def __post_init__(self):
        self._warned: set[str] = set()
        if self.pad_token_id is None:
            raise TypeError("pad_token_id must be a token id, got None; any serves, for example 0")
        why = "any token id serves, for example 0"
        self.pad_token_id = as_integer("pad_token_id", self.pad_token_id, 0, 2**63 - 1, why=why)
        for name in (self._row_option, "pad_to_multiple_of", "max_position_embeddings"):
            setattr(self, name, as_count(name, getattr(self, name)))
        row, multiple = getattr(self, self._row_option), self.pad_to_multiple_of or 1
        if row is not None and row % multiple:
            raise ValueError(f"{self._row_option} must be a multiple of pad_to_multiple_of {multiple}, got {row}")

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def _check_size(self, forest: Forest, name: str) -> None:
        depth = 0 if self.max_position_embeddings is None else forest.depth()
        row = getattr(self, self._row_option)
        check_size(name, len(forest.tokens), depth, row, self.max_position_embeddings)

    def _pack(self, forests: Sequence[Forest], names: Sequence[str]) -> PackedRows:
        """Pack forests with these names in errors."""
        row, multiple = getattr(self, self._row_option), self.pad_to_multiple_of or 1
        for forest, name in zip(forests, names, strict=True):
            self._check_size(forest, name)
        sizes = np.array([len(forest.tokens) for forest in forests])
        if row is None:
            members, length = [list(range(len(forests)))], -(-int(sizes.sum()) // multiple) * multiple
        else:
            members, length = best_fit_decreasing(sizes, row), row
        input_ids = np.full((len(members), length), self.pad_token_id, dtype=np.int64)
        position_ids = np.zeros_like(input_ids)
        subtree_ends = np.zeros(input_ids.shape, dtype=np.int32)
        starts = np.empty(len(forests), dtype=np.int64)
        for nth, chosen in enumerate(members):
            joined = Forest.join([forests[index] for index in chosen])
            end = len(joined.tokens)
            input_ids[nth, :end] = joined.tokens
            position_ids[nth, :end], subtree_ends[nth, :end] = lay_out(joined.lengths, joined.parents)
            starts[chosen] = nth * length + np.cumsum(sizes[chosen]) - sizes[chosen]
        return PackedRows(input_ids, position_ids, subtree_ends, starts, forests)


@dataclass
class RowPacker(PackingCollator):
    """Packing with all options at their defaults."""

    pad_token_id: int = 0
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    max_position_embeddings: int | None = None
