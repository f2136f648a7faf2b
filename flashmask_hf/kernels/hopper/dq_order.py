"""Order in which tiles of keys add to dQ when the Hopper backward is deterministic.

Programs begin key tiles in the order `key_tile_order`. A key tile waits at a row tile's semaphore until all earlier
ones have added to it. It thus waits only for tiles that have begun, so no order can deadlock.

Key tiles begin by *lead*, the greatest first: lead = last row - number of rows, in the direction of the walk. Of two
tiles that begin together and end at the same row, the greater lead arrives first. Tiles are *level* if their leads are
equal, and *near* if their leads differ by less than the keys of a tile. Times are multiples of the unordered time, on
an H200:

- Level tiles, as in a document, should begin 256 rows apart, or 128 with tiles of 64 keys. So the more tiles are level,
  the more key-value heads alternate. Too many exceed the L2 cache. Causal blocks took 1.12 with 10 of 32 heads, 1.26
  with 2, 1.31 with 16.
- Query heads that share keys walk bands of rows together, else tiles with few rows wait for the first head's last row.
  Documents with 8 query heads per key-value head took 1.66 without bands, 1.1 with them.
- If many leads are near upwards, as in causal masks, all tiles walk upwards: 1.13 instead of 1.72.

`tests/tools/ordered_sums.py` simulates the waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.shared.plan_kernels import count_key_tiles, prepare_segments
from flashmask_hf.tile_plan import COLUMNS, PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, plan_columns

_BAND_ROWS = 512
"""Rows per band where many key tiles have near leads."""
_FIRST_BAND_ROWS = tl.constexpr(128)
"""Rows of the first band where few key tiles have near leads; the other rows are one band."""
_UPWARD_GROUP = 4
"""Fewest query heads per key-value head for walks upwards."""
_SKIPPED_SHARE = tl.constexpr(8)
"""Key tiles skip rows if together they skip more than 1 / _SKIPPED_SHARE of the row tiles that they walk."""
_SEGMENTS = tl.constexpr(VISIBLE_SEGMENTS + PARTIAL_SEGMENTS)
_LANES = 128
_SUMS = tl.constexpr(5)
"""Sums per LANES key tiles and direction (`_order_key_tiles`)."""


class DqOrder(NamedTuple):
    """Order of the kernel's key tiles; in very long rows, of groups of neighbouring key tiles."""

    segments: Tensor
    """int32 [mask batch, mask heads, key tiles, segments, 2]: row tiles per key tile, as in a plan."""
    ranks: Tensor
    """int16 [mask batch, mask heads, row tiles, key tiles]: key tiles that add to a row tile earlier."""
    semaphores: Tensor
    """int32 zeros, one per row tile of dQ: key tiles that have added to it."""
    key_tile_order: Tensor
    """int32 [directions, groups of the batch, key tiles]: key tiles in starting order, per group of masks."""
    schedule: Tensor
    """int32 [4]: key-value heads that alternate, rows of the first and of later bands, and 1 for walks upwards, else 0.
    Bands end at multiples of their rows, in the direction of the walk."""


def may_walk_upwards(heads: int, kv_heads: int) -> bool:
    """Return whether enough query heads share a key-value head for walks upwards."""
    return heads >= _UPWARD_GROUP * kv_heads


def prepare_dq_order(problem: Problem, block_m: int, block_n: int, programs: int) -> Callable[[Tensor], DqOrder]:
    """Prepare the order for calls of one problem, as a function of contiguous indices: three launches.

    Tiles of the kernel have `block_m` query rows and `block_n` keys.
    """
    batch, heads, q_len, _ = problem.q.shape
    kv_heads, kv_len = problem.k.shape[1:3]
    device = problem.q.device
    mask_batch, mask_heads = problem.mask_shape[:2]
    groups = min(mask_heads, kv_heads)
    masks_of_group = mask_heads // groups
    subtiles = plan_columns(kv_len) // COLUMNS
    n_columns = count_key_tiles(kv_len, block_n * subtiles)
    n_rows = -(-q_len // ROWS) * (ROWS // block_m)
    n_blocks = -(-n_columns // _LANES)
    n_lines = mask_batch * groups
    directions = 2 if may_walk_upwards(heads, kv_heads) else 1
    n_dq_tiles = batch * heads * n_rows
    make_segments = prepare_segments(problem, block_m, block_n, subtiles)
    new_ranks = packed_layout(mask_batch, mask_heads, n_rows, n_columns, dtype=torch.int16, device=device).allocator()
    new_semaphores = packed_layout(n_dq_tiles, dtype=torch.int32, device=device).allocator()
    new_order = packed_layout(directions, n_lines, n_columns, dtype=torch.int32, device=device).allocator()
    new_sums = packed_layout(directions, n_lines * n_blocks, _SUMS.value, dtype=torch.int32, device=device).allocator()
    new_schedule = packed_layout(4, dtype=torch.int32, device=device).allocator()
    order = Launch(
        _order_key_tiles,
        directions * n_lines * n_blocks,
        n_rows, n_columns, n_blocks, n_lines, masks_of_group,
        BAND=_BAND_ROWS // block_m, LEVEL=COLUMNS // block_n, NEAR=block_n // block_m, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    rank = Launch(
        _rank_key_tiles,
        mask_batch * mask_heads * n_rows,
        n_rows, n_columns, n_lines, masks_of_group, n_dq_tiles, n_lines * n_blocks, batch * kv_heads,
        programs, heads // kv_heads // masks_of_group, block_n // 2,
        GROUPED=heads > kv_heads, UPWARD=directions == 2, CAUSAL=problem.causal, ONE_MASK=masks_of_group == 1,
        BLOCK_M=block_m, BAND_ROWS=_BAND_ROWS, LANES=_LANES, num_warps=4,
    )  # fmt: skip

    def make(indices: Tensor) -> DqOrder:
        made = DqOrder(make_segments(indices), new_ranks(), new_semaphores(), new_order(), new_schedule())
        sums = new_sums()
        order(made.segments, made.key_tile_order, sums)
        rank(made.segments, made.key_tile_order, sums, made.ranks, made.semaphores, made.schedule)
        return made

    return make


@triton.jit
def _read_walks(segments, tiles, n_rows, n_columns, members, upward):
    """Return (leads, row tiles walked, row tiles skipped between them) of key tiles, summed over a group of masks.

    `segments` are [n_columns, SEGMENTS, 2] of the group's first mask. Sums are 0 for `tiles` from `n_columns` on.
    """
    inside = tiles < n_columns
    leads = tl.zeros_like(tiles)
    walked = tl.zeros_like(tiles)
    skipped = tl.zeros_like(tiles)
    for member in range(members):
        at = segments + (member * n_columns + tiles.to(tl.int64)) * (_SEGMENTS * 2)
        first = tl.full(tiles.shape, 2147483647, tl.int32)
        last = tl.zeros_like(tiles)
        seen = tl.zeros_like(tiles)
        for segment in tl.static_range(_SEGMENTS):
            start = tl.load(at + segment * 2, mask=inside, other=0)
            end = tl.load(at + segment * 2 + 1, mask=inside, other=0)
            first = tl.where(end > start, tl.minimum(first, start), first)
            last = tl.where(end > start, tl.maximum(last, end), last)
            seen += end - start
        leads += tl.where(upward, tl.where(seen > 0, n_rows - first, 0), last) - seen
        walked += seen
        skipped += tl.where(seen > 0, last - first - seen, 0)
    return leads, walked, skipped


@triton.jit(do_not_specialize=["n_rows", "n_columns", "n_blocks", "n_lines", "members"])
def _order_key_tiles(
    segments, key_tile_order, sums, n_rows, n_columns, n_blocks, n_lines, members,
    BAND: tl.constexpr, LEVEL: tl.constexpr, NEAR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Place LANES key tiles of a group of masks by lead, the greatest first; of equal leads, the last keys first.

    For walks upwards, leads in the same BAND of row tiles count as equal.

    Tensors:
        segments: [groups of the batch, members, n_columns, SEGMENTS, 2], of `DqOrder`.
        key_tile_order: written, [directions, groups of the batch, n_columns].
        sums: written, [directions, groups of the batch, n_blocks, SUMS]: row tiles walked, row tiles skipped, key tiles
            that see rows, key tiles with the lead of LEVEL others of later keys, and key tiles whose lead is in the
            same NEAR row tiles as another of later keys.
    """
    line = (tl.program_id(0) // n_blocks).to(tl.int64)
    upward = line >= n_lines
    tiles = tl.program_id(0) % n_blocks * LANES + tl.arange(0, LANES)
    segments += line % n_lines * members * n_columns * _SEGMENTS * 2
    leads, walked, skipped = _read_walks(segments, tiles, n_rows, n_columns, members, upward)
    places = tl.zeros_like(tiles)
    equals = tl.zeros_like(tiles)
    near = tl.zeros_like(tiles)
    width = tl.where(upward, BAND, 1)
    for first in range(0, n_columns, LANES):
        others = first + tl.arange(0, LANES)
        their_leads, they_walk, _ = _read_walks(segments, others, n_rows, n_columns, members, upward)
        later_keys = others[None, :] > tiles[:, None]
        ahead = (their_leads // width)[None, :] - (leads // width)[:, None]
        before = ((ahead > 0) | ((ahead == 0) & later_keys)) & (others < n_columns)[None, :]
        places += tl.sum(before.to(tl.int32), 1)
        later_keys &= (they_walk > 0)[None, :]
        equal = later_keys & (their_leads[None, :] == leads[:, None])
        close = later_keys & ((their_leads // NEAR)[None, :] == (leads // NEAR)[:, None])
        equals += tl.sum(equal.to(tl.int32), 1)
        near = tl.maximum(near, tl.max(close.to(tl.int32), 1))
    see = (walked > 0).to(tl.int32)
    sums += tl.program_id(0) * _SUMS
    tl.store(sums, tl.sum(walked, 0))
    tl.store(sums + 1, tl.sum(skipped, 0))
    tl.store(sums + 2, tl.sum(see, 0))
    tl.store(sums + 3, tl.sum(see * (equals >= LEVEL).to(tl.int32), 0))
    tl.store(sums + 4, tl.sum(see * near, 0))
    tl.store(key_tile_order + line * n_columns + places, tiles, mask=tiles < n_columns)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_columns", "n_lines", "group", "n_semaphores", "n_sums", "kv_planes", "programs", "repeats",
        "apart",
    ]
)  # fmt: skip
def _rank_key_tiles(
    segments, key_tile_order, sums, ranks, semaphores, schedule,
    n_rows, n_columns, n_lines, group, n_semaphores, n_sums, kv_planes, programs, repeats, apart,
    GROUPED: tl.constexpr, UPWARD: tl.constexpr, CAUSAL: tl.constexpr, ONE_MASK: tl.constexpr, BLOCK_M: tl.constexpr,
    BAND_ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Choose the schedule, rank the key tiles of one row tile, and clear a share of the semaphores.

    Tensors:
        segments: [masks, n_columns, SEGMENTS, 2].
        key_tile_order, sums: of `_order_key_tiles`.
        ranks, semaphores, schedule: written, see `DqOrder`.
    Sizes:
        n_lines: lines of `key_tile_order` per direction.
        group: masks per line.
        n_sums: lines of sums per direction.
        kv_planes: key-value heads of the batch.
        repeats: query heads per mask.
        apart: rows between the beginnings of a head's key tiles if none are level.
        GROUPED: whether several query heads share a key-value head.
    """
    upward = _choose_schedule(
        sums, schedule, n_sums, kv_planes, programs, repeats, apart, n_rows,
        GROUPED, UPWARD, CAUSAL, ONE_MASK, BLOCK_M, BAND_ROWS, LANES,
    )  # fmt: skip
    row = tl.program_id(0) % n_rows
    mask = (tl.program_id(0) // n_rows).to(tl.int64)
    segments += mask * n_columns * _SEGMENTS * 2
    ranks += (mask * n_rows + row) * n_columns
    key_tile_order += (upward * n_lines + mask // group) * n_columns
    before = 0
    for first in range(0, n_columns, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n_columns
        tile = tl.load(key_tile_order + lane, mask=inside, other=0)
        walks = tl.zeros([LANES], tl.int32)
        for segment in tl.static_range(_SEGMENTS):
            at = segments + (tile.to(tl.int64) * _SEGMENTS + segment) * 2
            start = tl.load(at, mask=inside, other=0)
            end = tl.load(at + 1, mask=inside, other=0)
            walks = tl.where((row >= start) & (row < end), 1, walks)
        tl.store(ranks + tile, before + tl.cumsum(walks, 0) - walks, mask=inside)
        before += tl.sum(walks, 0)

    own = tl.cdiv(n_semaphores, tl.num_programs(0))
    begin = tl.program_id(0) * own
    end = tl.minimum(begin + own, n_semaphores)
    for first in range(begin, end, LANES):
        lane = first + tl.arange(0, LANES)
        tl.store(semaphores + lane, 0, mask=lane < end)


@triton.jit
def _add_sums(sums, n_sums, CAUSAL: tl.constexpr, ONE_MASK: tl.constexpr, LANES: tl.constexpr):
    """Add the sums of all key tiles in a direction.

    All tiles count as level if many rows are skipped, or with several masks, unless the mask is causal.

    Returns:
        row tiles walked, whether many are skipped, key tiles that see rows, level key tiles, near key tiles.
    """
    walked = tl.zeros([LANES], tl.int64)
    skipped = tl.zeros([LANES], tl.int64)
    seeing = tl.zeros([LANES], tl.int64)
    level = tl.zeros([LANES], tl.int64)
    near = tl.zeros([LANES], tl.int64)
    for first in range(0, n_sums, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n_sums
        walked += tl.load(sums + lane * _SUMS, mask=inside, other=0)
        skipped += tl.load(sums + lane * _SUMS + 1, mask=inside, other=0)
        seeing += tl.load(sums + lane * _SUMS + 2, mask=inside, other=0)
        level += tl.load(sums + lane * _SUMS + 3, mask=inside, other=0)
        near += tl.load(sums + lane * _SUMS + 4, mask=inside, other=0)
    row_tiles = tl.sum(walked, 0)
    key_tiles = tl.sum(seeing, 0)
    level_tiles = tl.sum(level, 0)
    near_tiles = tl.sum(near, 0)
    skip = tl.sum(skipped, 0) * _SKIPPED_SHARE > row_tiles
    if not CAUSAL:
        level_tiles = tl.where(skip | (not ONE_MASK), key_tiles, level_tiles)
        near_tiles = tl.where(skip | (not ONE_MASK), key_tiles, near_tiles)
    return row_tiles, skip, key_tiles, level_tiles, near_tiles


@triton.jit
def _choose_schedule(
    sums, schedule, n_sums, kv_planes, programs, repeats, apart, n_rows,
    GROUPED: tl.constexpr, UPWARD: tl.constexpr, CAUSAL: tl.constexpr, ONE_MASK: tl.constexpr, BLOCK_M: tl.constexpr,
    BAND_ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Choose the schedule, which the first program stores; return 1 for walks upwards, else 0."""
    row_tiles, skip, key_tiles, level, near = _add_sums(sums, n_sums, CAUSAL, ONE_MASK, LANES)
    up = False
    if UPWARD:
        _, _, _, upward_level, upward_near = _add_sums(sums + n_sums * _SUMS, n_sums, CAUSAL, ONE_MASK, LANES)
        up = upward_near * 4 > key_tiles
        if CAUSAL:  # tiles skip rows only between documents, where all are level
            skip &= not up
        else:
            up &= not skip
        level = tl.where(up, upward_level, level)
        near = tl.where(up, upward_near, near)
    all_rows = n_rows * BLOCK_M
    first_band = all_rows
    band = all_rows
    if GROUPED:
        few_near = near * 4 <= key_tiles
        first_band = tl.where(skip, all_rows, tl.where(few_near, _FIRST_BAND_ROWS, BAND_ROWS))
        band = tl.where(skip | few_near, all_rows, BAND_ROWS)
    upward = tl.where(up, 1, 0)
    # `apart` rows if none are level, four times as many if all are.
    heads = (key_tiles + 3 * level) * programs * apart // tl.maximum(row_tiles * BLOCK_M * repeats, 1)
    turns = tl.cdiv(kv_planes, tl.maximum(heads, 1))
    if tl.program_id(0) == 0:
        tl.store(schedule, tl.cdiv(kv_planes, turns).to(tl.int32))  # a last turn of few heads would wait longer
        tl.store(schedule + 1, first_band)
        tl.store(schedule + 2, band)
        tl.store(schedule + 3, upward)
    return upward
