"""Trees of token segments: documents, shared questions with their answers, and dialogues with branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.columns import as_integers, check_lengths
from flashmask_hf.depth_first import flatten, subtree_ends

Leaf: TypeAlias = tuple[int, int]
"""Index of a forest, and of the segment in it where a sequence ends: `forests[f].path(s)` locates its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Token segments in depth-first order that stay in one row: one tree, or several side by side.

    A segment follows its parent and the subtrees of the parent's earlier children. A document is a tree of one segment.

    Args:
        tokens: token ids of all segments, concatenated, int64 [n].
        lengths: number of tokens of each segment, at least 1, int64 [segments]; they sum to n.
        parents: index of each segment's parent, -1 for a root, int64 [segments].

    Raises:
        TypeError: an argument is not a flat sequence of integers.
        ValueError: there is no segment, one is empty, lengths do not sum to n, or the order is not depth-first.

    Example:
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
            object.__setattr__(self, name, as_integers(getattr(self, name), name))
        if not self.lengths.size:
            raise ValueError("lengths is empty: a forest needs at least one segment")
        if len(self.parents) != len(self.lengths):
            raise ValueError(f"parents has {len(self.parents)} entries, but lengths has {len(self.lengths)}")
        if (self.lengths < 1).any():
            raise ValueError(f"segment {(self.lengths < 1).argmax()} is empty; leave it out, or give it tokens")
        check_lengths("lengths", self.lengths, len(self.tokens))
        branch: list[int] = []  # the path from a root to the previous segment
        for segment, parent in enumerate(self.parents.tolist()):
            while branch and branch[-1] != parent:
                branch.pop()
            if not branch and parent != -1:
                raise ValueError(
                    f"parents[{segment}] is {parent}, but in depth-first order a parent is the segment before, an "
                    "ancestor of it, or -1 for a root"
                )
            branch.append(segment)

    @classmethod
    def from_trees(cls, *trees: Any) -> Forest:
        """Build a forest from nested token lists, in the notation of `masks.tree`.

        Args:
            trees: the roots. A node is a list or an array of token ids, or a tuple (token ids, [children]).

        Raises:
            TypeError: a node is neither a list of integers nor such a tuple.
            ValueError: there is no tree, or a node is empty.

        Example:
            >>> forest = Forest.from_trees(([1, 2], [([3], [[4], [5, 6]]), [7]]), [8])
            >>> forest.tokens
            array([1, 2, 3, 4, 5, 6, 7, 8])
            >>> forest.lengths, forest.parents
            (array([2, 1, 1, 2, 1, 1]), array([-1,  0,  1,  1,  0, -1]))
        """
        if not trees:
            raise ValueError("trees is empty: a forest needs at least one tree")
        return cls.from_segments(*flatten("trees", trees, _split))

    @classmethod
    def from_segments(cls, segments: Sequence[NDArray[np.int64]], parents: Sequence[int]) -> Forest:
        """Build a forest from the token ids of each segment, int64 [n] each, and the index of its parent."""
        return cls(np.concatenate(segments), np.array([len(segment) for segment in segments]), np.array(parents))

    @classmethod
    def from_documents(cls, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Forest:
        """Build a forest of documents from their tokens [n] and lengths [documents]."""
        return cls(tokens, lengths, np.full(len(lengths), -1))

    @classmethod
    def join(cls, forests: Sequence[Forest]) -> Forest:
        """Build a forest of the trees of several forests, in their order."""
        before = np.cumsum([0, *(len(forest.parents) for forest in forests)])
        parents = [np.where(x.parents < 0, -1, x.parents + n) for x, n in zip(forests, before, strict=False)]
        tokens, lengths = (np.concatenate(x) for x in zip(*((x.tokens, x.lengths) for x in forests), strict=True))
        return cls(tokens, lengths, np.concatenate(parents))

    def path(self, segment: int) -> NDArray[np.int64]:
        """Return the indices in `tokens` of the path from the root through a segment, int64 [depth].

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
        """Return the indices of the segments without children, in order."""
        inner = set(self.parents.tolist())
        return [segment for segment in range(len(self.parents)) if segment not in inner]

    def depth(self) -> int:
        """Return the number of tokens on the longest path."""
        return int(_end_depths(self.lengths, self.parents).max())


def _split(name: str, node: Any) -> tuple[NDArray[np.int64], Sequence[Any]]:
    """Return the token ids, int64 [n], and the children of a node of `Forest.from_trees`."""
    has_children = isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], (list, tuple))
    tokens, children = node if has_children else (node, [])
    try:
        segment = as_integers(None if isinstance(tokens, tuple) else tokens, name)
    except TypeError:
        raise TypeError(f"{name} must be a list of token ids, or (list of token ids, [children])") from None
    if not segment.size:
        raise ValueError(f"{name} is empty; leave it out, or give it tokens")
    return segment, children


def lay_out(lengths: NDArray[np.int64], parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the depth of each token in its tree, and the index after its segment's subtree, int64 [n] each."""
    starts = np.cumsum(lengths) - _end_depths(lengths, parents)  # of each segment's path, if the path were contiguous
    position_ids = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return position_ids, np.repeat(subtree_ends(lengths.tolist(), parents.tolist()), lengths)


def _end_depths(lengths: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the depth of the end of each segment in tokens, int64 [segments]."""
    depths = lengths.copy()
    for segment in np.flatnonzero(parents >= 0).tolist():
        depths[segment] += depths[parents[segment]]
    return depths
