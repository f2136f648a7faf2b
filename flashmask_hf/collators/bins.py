"""Best-fit-decreasing bin packing, which assigns documents and trees to rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit_decreasing(
    lengths: Sequence[int] | NDArray[np.int64],
    capacity: int,
    weights: Sequence[int] | NDArray[np.int64] | None = None,
    limit: int = 0,
) -> list[list[int]]:
    """Assign items to bins, longest first, each to the fullest bin with room for its length and its weight, if any.

    Returns the item indices of each bin, ascending; bins are in the order of their first item. Lengths sum to at most
    `capacity` per bin, weights, in 0..limit, to at most `limit`.

    Raises:
        ValueError: a length is not in 1..capacity.

    Example:
        >>> best_fit_decreasing([5, 3, 4, 2, 1], capacity=8)
        [[0, 1], [2, 3, 4]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    unfit = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if unfit.size:
        raise ValueError(f"lengths[{unfit[0]}] must be in 1..capacity = 1..{capacity}, got {sizes[unfit[0]]}")
    loads = np.zeros_like(sizes) if weights is None else np.asarray(weights, dtype=np.int64)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, list[int], int]] = []  # ascending: free length, when it got so, items, weight
    for turn, item in enumerate(np.argsort(-sizes, kind="stable").tolist()):
        size, load = int(sizes[item]), int(loads[item])
        best = bisect_left(rooms, (size,))
        while best < len(rooms) and rooms[best][3] + load > limit:
            best += 1
        if best == len(rooms):
            bins.append([])
            room, target, weight = capacity, bins[-1], 0
        else:
            room, _, target, weight = rooms.pop(best)
        target.append(item)
        if room > size:
            insort(rooms, (room - size, turn, target, weight + load))
    for target in bins:
        target.sort()
    return sorted(bins)
