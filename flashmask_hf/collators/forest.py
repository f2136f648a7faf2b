"""The packer: which examples share a row, and what a row looks like to attention.

A row is a forest of token segments in depth-first order. In that order a causal mask needs one integer per token, the
row where the token's subtree ends, and a token's position is its depth. A plain document is a tree of one segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_fit_decreasing", "lay_out"]


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


def lay_out(lengths: Sequence[int] | NDArray[np.int64], row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Where the tokens of one row sit: documents one after another, padding behind them.

    Args:
        lengths: number of tokens of each document, in row order.
        row_length: tokens of the row, at least the sum of `lengths`.

    Returns:
        position_ids, int64 [row_length]: depth of each token in its document, 0 for padding; subtree_ends, int32
        [row_length]: the row after the last token of its document. Padding has 0 there: hidden from every row. It sees
        nothing either, since every document ends before it.

    Raises:
        ValueError: the documents do not fit into the row.

    Example:
        >>> position_ids, subtree_ends = lay_out([3, 2], row_length=6)
        >>> position_ids.tolist(), subtree_ends.tolist()
        ([0, 1, 2, 0, 1, 0], [3, 3, 3, 5, 5, 0])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    real = int(ends[-1]) if sizes.size else 0
    if real > row_length:
        raise ValueError(f"lengths sum to {real}, which is more than row_length {row_length}")
    position_ids = np.zeros(row_length, dtype=np.int64)
    subtree_ends = np.zeros(row_length, dtype=np.int32)
    position_ids[:real] = np.arange(real) - np.repeat(ends - sizes, sizes)
    subtree_ends[:real] = np.repeat(ends, sizes)
    return position_ids, subtree_ends
