"""Trees as lists of nodes in depth-first order: a node follows its parent and the subtrees of its earlier siblings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def subtree_ends(lengths: Iterable[int], parents: Sequence[int]) -> list[int]:
    """Return the position after the last token of each node's subtree.

    Args:
        lengths: number of tokens of each node, in depth-first order.
        parents: index of each node's parent, -1 for a root.

    Example:
        >>> subtree_ends([2, 1, 2, 1], [-1, 0, 0, -1])
        [5, 3, 5, 6]
    """
    ends = list(accumulate(lengths))
    for node in range(len(ends) - 1, -1, -1):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    return ends
