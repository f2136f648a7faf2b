"""The packer: which examples share a row, and what a row looks like to attention.

A row is a forest of token segments in depth-first order. In that order a causal mask needs one integer per token, the
row where the subtree of the token's segment ends, and a token's position is its depth. A plain document is a tree of
one segment; a shared question has its answers as children; a dialogue that branches at several turns goes deeper.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Forest",
    "PackedRows",
    "best_fit_decreasing",
    "check_row_options",
    "integers",
    "lay_out",
    "number",
    "pack_forests",
    "too_deep",
]

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Token ids of one segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Token segments in depth-first order that stay in one row: a tree, or several side by side.

    In depth-first order a segment stands behind its parent, its parent's earlier children and all that descends from
    them. Lists and other integer types are taken too, and kept as int64 arrays.

    Args:
        tokens: token ids of all segments one after another, int64 [n].
        lengths: tokens of each segment, at least 1, int64 [segments]; sums to n.
        parents: index of each segment's parent, -1 for a root, int64 [segments].

    Raises:
        TypeError: an argument is not a flat sequence of integers.
        ValueError: there is no segment, one is empty, they do not fit the tokens, or they are in another order.

    Example:
        >>> from flashmask_hf.collators import Forest
        >>> forest = Forest(tokens=[1, 2, 3, 4, 5, 6], lengths=[2, 1, 2, 1], parents=[-1, 0, 0, -1])
        >>> forest.leaves(), forest.depth()
        ([1, 2, 3], 4)
        >>> forest.tokens[forest.path(2)]
        array([1, 2, 4, 5])
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __post_init__(self):
        for name in ("tokens", "lengths", "parents"):
            object.__setattr__(self, name, integers(getattr(self, name), name))
        if not self.lengths.size:
            raise ValueError("lengths is empty: a forest needs at least one segment")
        if len(self.parents) != len(self.lengths):
            raise ValueError(
                f"parents has {len(self.parents)} entries, but lengths has {len(self.lengths)}; they must be one to one"
            )
        if (self.lengths < 1).any():
            empty = int((self.lengths < 1).argmax())
            raise ValueError(f"segment {empty} is empty; leave it out, or give it at least one token")
        if self.lengths.sum() != len(self.tokens):
            raise ValueError(f"lengths sum to {self.lengths.sum()}, but there are {len(self.tokens)} tokens")
        branch: list[int] = []  # from a root to the segment before
        for segment, parent in enumerate(self.parents.tolist()):
            while branch and branch[-1] != parent:
                branch.pop()
            if not branch and parent != -1:
                raise ValueError(
                    f"parents[{segment}] is {parent}, but segments must come in depth-first order: a parent is the "
                    "segment before, an ancestor of that, or -1 for a root"
                )
            branch.append(segment)

    @classmethod
    def from_trees(cls, *trees: Any) -> Forest:
        """A forest from nested token lists, in the grammar of `masks.tree`.

        Args:
            trees: the roots. A node is its token ids, a list; or a tuple (token ids, [children]).

        Raises:
            TypeError: a node is neither a list of integers nor such a tuple.
            ValueError: there is no tree, or a node is empty.

        Example:
            >>> from flashmask_hf.collators import Forest
            >>> forest = Forest.from_trees(([1, 2], [([3], [[4], [5, 6]]), [7]]), [8])
            >>> forest.tokens
            array([1, 2, 3, 4, 5, 6, 7, 8])
            >>> forest.lengths, forest.parents
            (array([2, 1, 1, 2, 1, 1]), array([-1,  0,  1,  1,  0, -1]))
        """
        if not trees:
            raise ValueError("trees is empty: a forest needs at least one tree")
        segments: list[NDArray[np.int64]] = []
        parents: list[int] = []
        todo = [(f"trees[{index}]", tree, -1) for index, tree in enumerate(trees)][::-1]
        while todo:
            name, node, parent = todo.pop()
            has_children = isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], (list, tuple))
            tokens, children = node if has_children else (node, [])
            try:
                if isinstance(tokens, tuple):
                    raise TypeError
                segment = integers(tokens, name)
            except TypeError:
                raise TypeError(
                    f"{name} must be a list of token ids, or a tuple (list of token ids, [children])"
                ) from None
            if not segment.size:
                raise ValueError(f"{name} is empty; leave it out, or give it at least one token")
            todo += [(f"{name}[1][{index}]", child, len(segments)) for index, child in enumerate(children)][::-1]
            segments.append(segment)
            parents.append(parent)
        return cls(np.concatenate(segments), np.array([len(segment) for segment in segments]), np.array(parents))

    @classmethod
    def shared_question(cls, question: TokenIds, answers: Sequence[TokenIds]) -> Forest:
        """A question, token ids [Q], with answers as its children, token ids [A] each; see the class for what raises.

        Segment 0 is the question, segment 1 the first answer.
        """
        segments = [integers(question, "question")]
        segments += [integers(answer, f"answers[{index}]") for index, answer in enumerate(answers)]
        lengths = np.array([len(segment) for segment in segments])
        return cls(np.concatenate(segments), lengths, np.array([-1] + [0] * len(answers)))

    def path(self, segment: int) -> NDArray[np.int64]:
        """Where the tokens on the way from the root through the end of a segment stand in `tokens`, int64 [depth].

        Raises:
            IndexError: there is no such segment.
        """
        segment = range(len(self.parents))[segment]
        ends = np.cumsum(self.lengths)
        ranges: list[NDArray[np.int64]] = []
        while segment != -1:
            ranges.append(np.arange(ends[segment] - self.lengths[segment], ends[segment]))
            segment = int(self.parents[segment])
        return np.concatenate(ranges[::-1])

    def leaves(self) -> list[int]:
        """The segments without children, in order."""
        inner = set(self.parents.tolist())
        return [segment for segment in range(len(self.parents)) if segment not in inner]

    def depth(self) -> int:
        """Tokens on the longest path: the positions that a model needs."""
        return int(_depths(self.lengths, self.parents).max())


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """What `pack_forests` makes.

    Args:
        input_ids: int64 [R, S], `pad_token_id` behind the last forest of a row.
        position_ids: int64 [R, S], depth of each token, 0 for padding.
        subtree_ends: int32 [R, S], the row where the subtree of each token's segment ends, 0 for padding.
        starts: int64 [forests], place of each forest's first token in the flattened rows.
        forests: the forests, in the order given.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    subtree_ends: NDArray[np.int32]
    starts: NDArray[np.int64]
    forests: Sequence[Forest]

    def batch(self) -> dict[str, Tensor]:
        """What a model takes: input_ids and position_ids, int64 [R, S], startend_row_indices, int32 [R, 1, S, 1]."""
        return {
            "input_ids": torch.from_numpy(self.input_ids),
            "position_ids": torch.from_numpy(self.position_ids),
            "startend_row_indices": torch.from_numpy(self.subtree_ends)[:, None, :, None],
        }

    def paths(self, forest: int) -> list[Tensor]:
        """For each leaf of a forest, int64 [depth]: where its path's tokens stand in the flattened rows."""
        trees = self.forests[forest]
        return [torch.from_numpy(self.starts[forest] + trees.path(leaf)) for leaf in trees.leaves()]

    def spread(self, values: Sequence[NDArray[np.int64]], filler: int) -> NDArray[np.int64]:
        """Lay out something else than token ids, labels for example.

        Args:
            values: one number for each token of each forest, int64 [n] per forest.
            filler: the number for padding.

        Returns:
            int64 [R, S]: each number where its token stands.

        Raises:
            ValueError: the numbers and the tokens are not one to one.
        """
        if len(values) != len(self.forests):
            raise ValueError(f"values has {len(values)} entries for {len(self.forests)} forests; give one for each")
        spread = np.full(self.input_ids.size, filler, dtype=np.int64)
        for index, (start, forest, own) in enumerate(zip(self.starts.tolist(), self.forests, values, strict=True)):
            if len(own) != len(forest.tokens):
                raise ValueError(
                    f"values[{index}] has {len(own)} entries, but forests[{index}] has {len(forest.tokens)} tokens; "
                    "they must be one to one"
                )
            spread[start : start + len(own)] = own
        return spread.reshape(self.input_ids.shape)


def pack_forests(
    forests: Sequence[Forest],
    max_length: int | None = None,
    *,
    pad_token_id: int = 0,
    pad_to_multiple_of: int | None = None,
    max_position_embeddings: int | None = None,
    names: Sequence[str] | None = None,
) -> PackedRows:
    """Put forests into rows; one is never split.

    Args:
        forests: what to pack.
        max_length: None makes one row, forests in the order given. A number makes rows of exactly that many tokens,
            filled best-fit-decreasing and padded at the end.
        pad_token_id: token id of the padding. Nothing sees padding, so any id of the vocabulary serves.
        pad_to_multiple_of: pad the single row to a multiple of this. Rows of `max_length` must be one already.
        max_position_embeddings: the model's number of positions; a deeper tree raises. None does not check.
        names: what error messages call each forest; None is "forests[0]" and so on.

    Returns:
        PackedRows: `batch()` goes to the model, `paths(i)` leads from every leaf of a forest to its tokens.

    Raises:
        ValueError: an option is out of range; `forests` is empty; or one is longer than a row or deeper than the
            model's positions. The message names it and the way out.

    Example:
        >>> from flashmask_hf.collators import Forest, pack_forests
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
    check_row_options(pad_token_id, max_length, pad_to_multiple_of, max_position_embeddings)
    if not forests:
        raise ValueError("forests is empty: there is nothing to pack")
    sizes = [len(forest.tokens) for forest in forests]
    for index, (forest, size) in enumerate(zip(forests, sizes, strict=True)):
        name = f"forests[{index}]" if names is None else names[index]
        if max_length is not None and size > max_length:
            raise ValueError(
                f"{name} has {size} tokens, more than the {max_length} of a row; make rows longer, or shorten or "
                "remove it"
            )
        if max_position_embeddings is not None and (depth := forest.depth()) > max_position_embeddings:
            raise ValueError(too_deep(name, depth, max_position_embeddings))
    if max_length is None:
        members = [list(range(len(forests)))]
        multiple = pad_to_multiple_of or 1
        row_length = -(-sum(sizes) // multiple) * multiple
    else:
        members, row_length = best_fit_decreasing(sizes, max_length), max_length
    shape = (len(members), row_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    subtree_ends = np.empty(shape, dtype=np.int32)
    starts = np.empty(len(forests), dtype=np.int64)
    for row, chosen in enumerate(members):
        token, segment = 0, 0
        parents: list[NDArray[np.int64]] = []
        for index in chosen:
            forest = forests[index]
            input_ids[row, token : token + sizes[index]] = forest.tokens
            parents.append(np.where(forest.parents < 0, -1, forest.parents + segment))
            starts[index] = row * row_length + token
            token += sizes[index]
            segment += len(forest.lengths)
        lengths = np.concatenate([forests[index].lengths for index in chosen])
        position_ids[row], subtree_ends[row] = lay_out(lengths, row_length, np.concatenate(parents))
    return PackedRows(input_ids, position_ids, subtree_ends, starts, forests)


def best_fit_decreasing(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Share items out over bins: longest first, each into the fullest bin that still has room for it.

    The same lengths always give the same bins.

    Args:
        lengths: n item lengths, each in 1..capacity.
        capacity: what one bin holds.

    Returns:
        list[list[int]]: the item indices of each bin, ascending; bins in the order of their first item.

    Raises:
        ValueError: an item is empty or longer than a bin.

    Example:
        >>> best_fit_decreasing([5, 3, 4, 2, 1], capacity=8)
        [[0, 1], [2, 3, 4]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    unfit = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if unfit.size:
        first = int(unfit[0])
        raise ValueError(
            f"lengths[{first}] is {int(sizes[first])}, but every length must lie in 1..capacity = 1..{capacity}"
        )
    order = np.argsort(-sizes, kind="stable")
    bins: list[list[int]] = []
    rooms: list[int] = []  # the distinct rooms left in open bins, ascending
    bins_with: dict[int, deque[list[int]]] = {}
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        best = bisect_left(rooms, size)
        if best == len(rooms):
            room, target = capacity, []
            bins.append(target)
        else:
            room = rooms[best]
            target = bins_with[room].popleft()
            if not bins_with[room]:
                del bins_with[room], rooms[best]
        target.append(item)
        room -= size
        if room:
            if room not in bins_with:
                bins_with[room] = deque()
                insort(rooms, room)
            bins_with[room].append(target)
    for target in bins:
        target.sort()
    return sorted(bins)


def lay_out(
    lengths: Sequence[int] | NDArray[np.int64],
    row_length: int,
    parents: Sequence[int] | NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Where the tokens of one row sit: segments one after another, padding behind them.

    Args:
        lengths: number of tokens of each segment, in depth-first order.
        row_length: tokens of the row, at least the sum of `lengths`.
        parents: index of each segment's parent, -1 for a root, in depth-first order; None makes each a root.

    Returns:
        position_ids, int64 [row_length]: depth of each token in its tree, 0 for padding; subtree_ends, int32
        [row_length]: the row after the last token that descends from its segment. Padding has 0 there: hidden from
        every row. It sees nothing either, since every tree ends before it.

    Raises:
        ValueError: the segments do not fit into the row.

    Example:
        >>> position_ids, subtree_ends = lay_out([3, 2], row_length=6)
        >>> position_ids.tolist(), subtree_ends.tolist()
        ([0, 1, 2, 0, 1, 0], [3, 3, 3, 5, 5, 0])
        >>> position_ids, subtree_ends = lay_out([2, 1, 2], row_length=5, parents=[-1, 0, 0])
        >>> position_ids.tolist(), subtree_ends.tolist()
        ([0, 1, 2, 2, 3], [5, 5, 3, 5, 5])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    real = int(ends[-1]) if sizes.size else 0
    if real > row_length:
        raise ValueError(f"lengths sum to {real}, which is more than row_length {row_length}")
    above = np.full(len(sizes), -1, dtype=np.int64) if parents is None else np.asarray(parents, dtype=np.int64)
    tops = _depths(sizes, above) - sizes  # depth where each segment starts
    last = ends.copy()
    for segment in np.flatnonzero(above >= 0)[::-1].tolist():
        last[above[segment]] = max(last[above[segment]], last[segment])
    position_ids = np.zeros(row_length, dtype=np.int64)
    subtree_ends = np.zeros(row_length, dtype=np.int32)
    position_ids[:real] = np.arange(real) - np.repeat(ends - sizes - tops, sizes)
    subtree_ends[:real] = np.repeat(last, sizes)
    return position_ids, subtree_ends


def check_row_options(
    pad_token_id: int,
    row_length: int | None,
    pad_to_multiple_of: int | None,
    max_position_embeddings: int | None,
    row_option: str = "max_length",
) -> None:
    """Raise a ValueError that names the first of these options of `pack_forests` that is out of range.

    `row_option` is what the caller calls the number of tokens of a row.
    """
    if not isinstance(pad_token_id, int) or pad_token_id < 0:
        raise ValueError(f"pad_token_id must be a token id, got {pad_token_id!r}; any one serves, for example 0")
    for name, value in (
        (row_option, row_length),
        ("pad_to_multiple_of", pad_to_multiple_of),
        ("max_position_embeddings", max_position_embeddings),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a number of tokens, at least 1, or None, got {value!r}")
    if row_length is not None and pad_to_multiple_of and row_length % pad_to_multiple_of:
        raise ValueError(
            f"{row_option} {row_length} must be a multiple of pad_to_multiple_of {pad_to_multiple_of}: rows have "
            f"exactly {row_option} tokens"
        )


def integers(values: Any, what: str) -> NDArray[np.int64]:
    """A flat sequence of integers or booleans as int64 [n]; a TypeError calls anything else by the name `what`."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{what} must be a flat sequence of integers, got nested ones of different lengths") from None
    if array.ndim != 1:
        raise TypeError(f"{what} must be a flat sequence of integers, got {array.ndim} axes")
    if array.size and array.dtype.kind not in "iub":
        raise TypeError(f"{what} must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def number(value: Any, what: str) -> float:
    """A number of Python, NumPy or a tensor without axes; a TypeError calls anything else by the name `what`."""
    if isinstance(value, (Tensor, np.ndarray)) and not value.ndim:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, got {value!r}")
    return float(value)


def too_deep(name: str, depth: int, positions: int) -> str:
    """The message for a tree that the model has too few positions for."""
    return (
        f"{name} is {depth} tokens deep, but the model has {positions} positions (max_position_embeddings); shorten it "
        "to fit, or take a model with more positions"
    )


def _depths(lengths: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Depth of the end of each segment."""
    depths = lengths.copy()
    for segment in np.flatnonzero(parents >= 0).tolist():
        depths[segment] += depths[parents[segment]]
    return depths
