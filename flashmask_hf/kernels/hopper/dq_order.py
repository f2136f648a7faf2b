"""The order in which tiles of keys add to dQ when the Hopper backward is deterministic.

Tiles of keys are numbered in the order in which programs begin them, and to each tile of rows they add by these
numbers: a tile waits at the row tile's semaphore until all that come before it have added theirs. So it waits only for
tiles that have begun, the first of the unfinished ones never waits, and there is no deadlock, whatever the order.

A good order makes the waits short. Every tile of keys walks its rows downwards, and takes the same time for each. Let
the *lead* of a tile be its last row less the number of its rows: of two tiles that begin together and see one last row,
that with the greater lead comes to it first. Hence the tiles begin in the order of their leads, the greatest first,
which is the last keys first under most masks. Tiles that come to a row at the same time add one after the other, and
each addition takes about as long as a tile of rows. So tiles of several heads alternate: each head's then begin far
enough apart. `tests/tools/ordered_sums.py` simulates the waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.layout import packed_layout
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns

__all__ = ["DqOrder", "prepare_dq_order"]

_GAP = 2
"""Row tiles of the plan that key tiles of one head begin apart, on average, unless the mask is causal.

Under a causal mask a quarter of it will do, since each key tile also begins above the one before. Greater gaps take
more heads at a time, and the L2 cache should hold the rows between two key tiles: 17 MB of q, dq and the output's
gradient for each row tile, with 132 programs and head_dim 128. On an H200 with 8K tokens, the backward of causal
documents took 3% longer with a gap of 1 than of 1/2, that of causal blocks 20% longer with 2 than with 1, and that of
documents 6% longer with 1 than with 2. Where causal key tiles skip rows, a quarter is too little for long rows: causal
blocks of 32K tokens take 1.57 times the unordered time.
"""
_BAND_ROWS = 512
"""Rows that all query heads of a key-value head walk before the next ones, unless the mask is causal or skips rows.

Head after head instead, a key tile would come to the second head only after all rows of the first, and every shorter
one behind it would wait: documents with 8 query heads took 1.66 times the unordered time on an H200, with bands 1.1.
Causal rows took 1.53 with bands and 1.24 without. Where key tiles skip rows, they overtake each other in bands.
"""
_SKIPPED_SHARE = 8
"""Key tiles walk bands if they skip at most 1 / _SKIPPED_SHARE of the row tiles that they walk; it is not tuned."""
_LANES = 128


class DqOrder(NamedTuple):
    """Tensors that tell the kernel the order."""

    ranks: Tensor
    """int16, shaped like the plan's tiles: how many of a row tile's key tiles come before each one."""
    semaphores: Tensor
    """int32 zeros, one for each tile of rows of dQ: how many key tiles have added to it."""
    key_tile_order: Tensor
    """int32 [groups of the batch, key tiles of the plan]: the key tiles of a group of masks, in starting order."""
    schedule: Tensor
    """int32 [2]: key-value heads whose key tiles alternate, and rows of a band, which all query heads of a key-value
    head walk before the next ones."""


def prepare_dq_order(problem: Problem, block_m: int, programs: int) -> Callable[[Plan], DqOrder]:
    """Prepare the order for calls of one problem: two launches, which take about as long as the plan's.

    Args:
        problem: layouts and settings of the calls.
        block_m: query rows of the kernel's tiles.
        programs: most programs of the kernel that run at a time.
    """
    batch, heads, q_len, _ = problem.q.shape
    kv_heads, kv_len = problem.k.shape[1:3]
    device = problem.q.device
    mask_batch, mask_heads, n_q, n_kv = problem.plan_shape
    groups = min(mask_heads, kv_heads)
    masks_of_group = mask_heads // groups
    n_columns = -(-kv_len // plan_columns(kv_len))
    n_blocks = -(-n_columns // _LANES)
    n_dq_tiles = batch * heads * (-(-q_len // ROWS) * ROWS // block_m)
    new_ranks = packed_layout(*problem.plan_shape, dtype=torch.int16, device=device).allocator()
    new_semaphores = packed_layout(n_dq_tiles, dtype=torch.int32, device=device).allocator()
    new_order = packed_layout(mask_batch * groups, n_columns, dtype=torch.int32, device=device).allocator()
    new_sums = packed_layout(mask_batch * groups * n_blocks, 2, dtype=torch.int32, device=device).allocator()
    new_schedule = packed_layout(2, dtype=torch.int32, device=device).allocator()
    order = Launch(
        _order_key_tiles,
        mask_batch * groups * n_blocks,
        n_kv, n_columns, n_blocks, masks_of_group,
        SEGMENTS=VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    rank = Launch(
        _rank_key_tiles,
        mask_batch * mask_heads * n_q,
        n_q, n_kv, n_columns, masks_of_group, n_dq_tiles, mask_batch * groups * n_blocks, batch * kv_heads,
        _GAP * programs * mask_batch * groups * n_columns // (4 if problem.causal else 1),
        heads // kv_heads // masks_of_group,
        _BAND_ROWS if heads > kv_heads and not problem.causal else n_q * ROWS,
        PLAN_ROWS=ROWS, SKIPPED_SHARE=_SKIPPED_SHARE, LANES=2 * _LANES, num_warps=4,
    )  # fmt: skip

    def make(plan: Plan) -> DqOrder:
        made = DqOrder(new_ranks(), new_semaphores(), new_order(), new_schedule())
        sums = new_sums()
        order(plan.segments, made.key_tile_order, sums)
        rank(plan.tiles, plan.counts, made.key_tile_order, sums, *made[:2], made.schedule)
        return made

    return make


@triton.jit
def _read_walks(segments, tiles, n_kv, n_columns, members, SEGMENTS: tl.constexpr):
    """Read how key tiles walk the rows of all masks of a group.

    Operands:
        segments: of the first mask's plan, [n_kv, SEGMENTS, 2]; the others' follow.
        tiles: indices of key tiles.

    Returns:
        sums over the masks, 0 for tiles from `n_columns` on: (leads, row tiles walked, row tiles skipped between them).
    """
    inside = tiles < n_columns
    leads = tl.zeros_like(tiles)
    walked = tl.zeros_like(tiles)
    skipped = tl.zeros_like(tiles)
    for member in range(members):
        at = segments + (member * n_kv + tiles.to(tl.int64)) * (SEGMENTS * 2)
        first = tl.full(tiles.shape, 2147483647, tl.int32)
        last = tl.zeros_like(tiles)
        seen = tl.zeros_like(tiles)
        for segment in tl.static_range(SEGMENTS):
            start = tl.load(at + segment * 2, mask=inside, other=0)
            end = tl.load(at + segment * 2 + 1, mask=inside, other=0)
            first = tl.where(end > start, tl.minimum(first, start), first)
            last = tl.where(end > start, tl.maximum(last, end), last)
            seen += end - start
        leads += last - seen
        walked += seen
        skipped += tl.where(seen > 0, last - first - seen, 0)
    return leads, walked, skipped


@triton.jit(do_not_specialize=["n_kv", "n_columns", "n_blocks", "members"])
def _order_key_tiles(
    segments, key_tile_order, sums, n_kv, n_columns, n_blocks, members, SEGMENTS: tl.constexpr, LANES: tl.constexpr
):
    """Place LANES key tiles of a group of masks in its order, behind all of greater leads; equal ones: last keys first.

    Tensors:
        segments: of the plan, [groups of the batch, members, n_kv, SEGMENTS, 2].
        key_tile_order: written, [groups of the batch, n_columns].
        sums: written, [groups of the batch, n_blocks, 2]: row tiles that these key tiles walk, and those they skip.
    """
    line = (tl.program_id(0) // n_blocks).to(tl.int64)
    tiles = tl.program_id(0) % n_blocks * LANES + tl.arange(0, LANES)
    segments += line * members * n_kv * SEGMENTS * 2
    leads, walked, skipped = _read_walks(segments, tiles, n_kv, n_columns, members, SEGMENTS)
    tl.store(sums + tl.program_id(0) * 2, tl.sum(walked, 0))
    tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(skipped, 0))
    places = tl.zeros_like(tiles)
    for first in range(0, n_columns, LANES):
        others = first + tl.arange(0, LANES)
        their_leads, _, _ = _read_walks(segments, others, n_kv, n_columns, members, SEGMENTS)
        later_keys = (their_leads[None, :] == leads[:, None]) & (others[None, :] > tiles[:, None])
        before = ((their_leads[None, :] > leads[:, None]) | later_keys) & (others < n_columns)[None, :]
        places += tl.sum(before.to(tl.int32), 1)
    tl.store(key_tile_order + line * n_columns + places, tiles, mask=tiles < n_columns)


@triton.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_columns", "group", "n_semaphores", "n_sums", "kv_planes", "spread", "repeats",
        "band_rows",
    ]
)  # fmt: skip
def _rank_key_tiles(
    tiles, counts, key_tile_order, sums, ranks, semaphores, schedule,
    n_q, n_kv, n_columns, group, n_semaphores, n_sums, kv_planes, spread, repeats, band_rows,
    PLAN_ROWS: tl.constexpr, SKIPPED_SHARE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rank the key tiles of one row tile of a plan, clear a share of the semaphores, and choose the schedule.

    With h heads interleaved, key tiles of a head begin apart by h / programs of their mean number of row tiles.

    Tensors:
        tiles, counts: of the plan.
        key_tile_order, sums: of `_order_key_tiles`.
        ranks, semaphores, schedule: written, see `DqOrder`.
    Sizes:
        group: masks that share a line of `key_tile_order`.
        n_sums: pairs of sums.
        kv_planes: key-value heads of the batch.
        spread: row tiles that key tiles should begin apart, times programs, times key tiles in `sums`.
        repeats: query heads that walk the rows of each mask.
        band_rows: rows of a band unless key tiles skip rows.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles += row * n_kv
    ranks += row * n_kv
    key_tile_order += row // n_q // group * n_columns
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        tl.store(ranks + lane, 0, mask=lane < n_kv)
    tl.debug_barrier()
    visible = tl.load(counts + row * 2)
    partial = tl.load(counts + row * 2 + 1)
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        listed = (lane < visible) | ((lane >= n_kv - partial) & (lane < n_kv))
        tile = tl.load(tiles + lane, mask=listed, other=0).to(tl.int32)
        tl.store(ranks + tile, 1, mask=listed)
    tl.debug_barrier()
    before = 0
    for first in range(0, n_columns, LANES):
        lane = first + tl.arange(0, LANES)
        tile = tl.load(key_tile_order + lane, mask=lane < n_columns, other=0)
        listed = tl.load(ranks + tile, mask=lane < n_columns, other=0).to(tl.int32)
        tl.debug_barrier()
        tl.store(ranks + tile, before + tl.cumsum(listed, 0) - listed, mask=lane < n_columns)
        before += tl.sum(listed, 0)

    own = tl.cdiv(n_semaphores, tl.num_programs(0))
    begin = tl.program_id(0) * own
    end = tl.minimum(begin + own, n_semaphores)
    for first in range(begin, end, LANES):
        lane = first + tl.arange(0, LANES)
        tl.store(semaphores + lane, 0, mask=lane < end)

    if tl.program_id(0) == 0:
        walked = tl.zeros([LANES], tl.int64)
        skipped = tl.zeros([LANES], tl.int64)
        for first in range(0, n_sums, LANES):
            lane = first + tl.arange(0, LANES)
            walked += tl.load(sums + lane * 2, mask=lane < n_sums, other=0)
            skipped += tl.load(sums + lane * 2 + 1, mask=lane < n_sums, other=0)
        all_walked = tl.sum(walked, 0)
        skip = tl.sum(skipped, 0) * SKIPPED_SHARE > all_walked
        heads = tl.full([], spread, tl.int64) // tl.maximum(all_walked * repeats, 1)
        tl.store(schedule, tl.minimum(tl.maximum(heads, 1), kv_planes).to(tl.int32))
        tl.store(schedule + 1, tl.where(skip, n_q * PLAN_ROWS, band_rows))
