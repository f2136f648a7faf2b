"""Best-fit-decreasing bin packing, which assigns documents and trees to rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit_decreasing(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Assign items to bins, longest first, each to the fullest bin that has room for it. The result is deterministic.

    Returns:
        list[list[int]]: the item indices of each bin, ascending; bins in the order of their first item.

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
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, list[int]]] = []  # free length of each bin, when it got so, and its items; ascending
    for turn, item in enumerate(np.argsort(-sizes, kind="stable").tolist()):
        size = int(sizes[item])
        best = bisect_left(rooms, (size,))
        if best == len(rooms):
            bins.append([])
            room, target = capacity, bins[-1]
        else:
            room, _, target = rooms.pop(best)
        target.append(item)
        if room > size:
            insort(rooms, (room - size, turn, target))
    for target in bins:
        target.sort()
    return sorted(bins)
