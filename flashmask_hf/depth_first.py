"""Trees as lists of nodes in depth-first order: a node follows its parent and the subtrees of its earlier siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

Content = TypeVar("Content")


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


def flatten(
    name: str, roots: Sequence[Any], split: Callable[[str, Any], tuple[Content, Sequence[Any]]]
) -> tuple[list[Content], list[int]]:
    """Return the contents of nested nodes in depth-first order, and the index of each node's parent, -1 for a root.

    `split` takes the name of a node in errors, and the node, and returns its content and its children. The roots have
    the names `name`[0], `name`[1] and so on.
    """
    contents: list[Content] = []
    parents: list[int] = []
    pending = [(f"{name}[{k}]", root, -1) for k, root in enumerate(roots)][::-1]
    while pending:
        where, node, parent = pending.pop()
        content, children = split(where, node)
        pending += [(f"{where}[1][{k}]", child, len(contents)) for k, child in enumerate(children)][::-1]
        contents.append(content)
        parents.append(parent)
    return contents, parents
