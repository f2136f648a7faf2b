"""Simulation of the ordered sums of dQ: programs that take tiles of keys, walk their rows and wait for their ranks.

Times are in steps of one tile of rows. What a program adds is seen by the next one HANDOFF later, and a program may be
two tiles of rows ahead of what it has added. Memory is not simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

HANDOFF = 1.0
EPILOGUE = 1.0


def walk(segments: Sequence[Tensor], first_band: int, band: int, upward: int, row_tiles: int) -> list[tuple[int, int]]:
    """Return (query head, row tile) of a key tile's rows, which each head's segments [n, 2] list, band after band.

    Args:
        segments: of the query heads that share a key-value head.
        first_band: the first band that all of the heads walk before the next one ends at a multiple of these row tiles.
        band: the same of the later bands.
        upward: 1 to walk from the last row tile to the first, from which bands are counted then.
        row_tiles: of all rows.
    """
    if upward:
        segments = [row_tiles - x.flip(-1) for x in segments]
    places = [(head, row) for head, x in enumerate(segments) for start, end in x.tolist() for row in range(start, end)]
    low = min((row for _, row in places), default=0)
    high = (low // first_band + 1) * first_band
    places.sort(key=lambda place: (-1 if place[1] < high else place[1] // band, place))
    return [(head, row_tiles - 1 - row) for head, row in places] if upward else places


def span(
    work: Sequence[tuple[int, int, int]],
    walks: Sequence[Sequence[Sequence[tuple[int, int]]]],
    programs: int,
    ordered: bool,
) -> float:
    """Return the time until all work is done, each program taking the next item when it is through with its last.

    Items are simulated in the order in which they begin. That suffices, since none waits for one that begins later.

    Args:
        work: (plane, line of `walks`, key tile) in the order in which programs take them.
        walks: by line and key tile, the (query head, row tile) that it walks.
        programs: number of programs.
        ordered: whether items wait for those before them at each row tile.
    """
    free = [(0.0, program) for program in range(programs)]
    added: dict[int, dict[tuple[int, int], float]] = {plane: {} for plane, _, _ in work}
    recent = [(0.0, 0.0)] * programs  # when a program's last two sums are added
    longest = 0.0
    for plane, line, tile in work:
        now, program = heapq.heappop(free)
        now += EPILOGUE
        if ordered:
            earlier, last = recent[program]
            seen = added[plane]
            for place in walks[line][tile]:  # millions of times: comparisons are faster than max()
                now = (now if now > earlier else earlier) + 1
                add = seen.get(place, 0.0)
                add = now if now > add else add
                seen[place] = add + HANDOFF
                earlier, last = last, add if add > last else last
            recent[program] = earlier, last
            longest = max(longest, last)
        else:
            now += len(walks[line][tile])
        longest = max(longest, now)
        heapq.heappush(free, (now, program))
    return longest


def work_items(order: Sequence[Sequence[int]], lines: Sequence[int], interleaved: int) -> list[tuple[int, int, int]]:
    """Return (plane, line, key tile) in the order in which programs take them: `interleaved` planes alternate.

    Args:
        order: by line, key tiles in starting order.
        lines: by plane, its line of `order`.
        interleaved: planes whose key tiles alternate.
    """
    planes = range(len(lines))
    groups = [planes[first : first + interleaved] for first in range(0, len(lines), interleaved)]
    return [(x, lines[x], order[lines[x]][n]) for group in groups for n in range(len(order[0])) for x in group]


def segments_of(segments: Tensor, group: int) -> list[list[Tensor]]:
    """Return, by line of an order and member of its group of masks, the segments [key tiles, n, 2] of an order."""
    per_mask = segments.flatten(0, 1)
    return [list(torch.unbind(x)) for x in per_mask.unflatten(0, (-1, group))]
