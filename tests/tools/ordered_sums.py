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
AHEAD = 2
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
    added: dict[tuple[int, int, int], float] = {}
    recent = [[0.0] * AHEAD for _ in range(programs)]
    longest = 0.0
    for plane, line, tile in work:
        now, program = heapq.heappop(free)
        now += EPILOGUE
        for head, row in walks[line][tile]:
            now = max(now, recent[program][0]) + 1
            place = plane, head, row
            add = max(now, added.get(place, 0.0)) if ordered else now
            added[place] = add + HANDOFF
            recent[program] = [*recent[program][1:], max(add, recent[program][-1])]
        longest = max(longest, now, recent[program][-1])
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
