"""The plan as Triton kernels: the same tensors as `flashmask_hf.plan.build_plan`, in two launches and O(S) reads.

A third kernel joins lists of a plan for a forward whose tiles are taller than the plan's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.plan import COLUMNS, PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns, plan_shapes

_HIGHEST = tl.constexpr(2147483647)
_LOWEST = tl.constexpr(-2147483647)
_LANES = 256
_SAMPLE = 128
JOINED_ROWS = 192
"""Query rows of a tile of `join_rows`: one and a half of the plan's."""


@triton.jit
def _classify(
    tile, left, width, start_min, start_max, end_min, end_max, other_start_min, other_start_max, other_end_min,
    other_end_max, q_len, kv_len, ROWS: tl.constexpr, CAUSAL: tl.constexpr, TWO: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """(visible, partial) of row tiles `tile` against key tiles that begin at `left`; broadcasts (paper, equation 4)."""
    first = tile * ROWS
    last = tl.minimum(first + ROWS, q_len)
    hidden = (first >= start_max) & (last <= end_min)
    touched = (first < end_max) & (last > start_min)
    if TWO:
        hidden = hidden | ((first >= other_start_max) & (last <= other_end_min))
        touched = touched | ((first < other_end_max) & (last > other_start_min))
    if CAUSAL:
        hidden = hidden | (last - 1 + kv_len - q_len < left)
        touched = touched | (first + kv_len - q_len < tl.minimum(left + width, kv_len) - 1)
    touched = touched | (left + width > kv_len)
    real = (first < q_len) & (left < kv_len)
    visible = real & (hidden == 0) & (touched == 0)
    partial = real & (hidden == 0) & touched
    if not SKIP:
        partial = real & (visible == 0)
    return visible, partial


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv"])
def _column_plan(
    indices, extremes, segments, q_len, kv_len, n_q, n_kv,
    SUBTILES: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VISIBLE: tl.constexpr, PARTIAL: tl.constexpr, LANES: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """One key tile: the extremes of its intervals, then its segments of row tiles."""
    TWO: tl.constexpr = N == 4 or (N == 2 and not CAUSAL)
    tile = tl.program_id(0) % n_kv
    head = (tl.program_id(0) // n_kv).to(tl.int64)
    indices += head * kv_len * N
    extremes += head * n_kv * 8
    segments += (head * n_kv + tile) * (VISIBLE + PARTIAL) * 2
    left = tile * SUBTILES * COLUMNS

    start_min, start_max, end_min, end_max = _HIGHEST, _LOWEST, _HIGHEST, _LOWEST
    other_start_min, other_start_max, other_end_min, other_end_max = _HIGHEST, _LOWEST, _HIGHEST, _LOWEST
    for part in range(SUBTILES):
        columns = left + part * COLUMNS + tl.arange(0, COLUMNS)
        columns = tl.minimum(columns, kv_len - 1).to(tl.int64)
        start = tl.load(indices + columns * N)
        start_min = tl.minimum(start_min, tl.min(start, 0))
        start_max = tl.maximum(start_max, tl.max(start, 0))
        if N == 4 or (N == 2 and CAUSAL):
            end = tl.load(indices + columns * N + 1)
            end_min = tl.minimum(end_min, tl.min(end, 0))
            end_max = tl.maximum(end_max, tl.max(end, 0))
        if N == 4:
            other_start = tl.load(indices + columns * N + 2)
            other_start_min = tl.minimum(other_start_min, tl.min(other_start, 0))
            other_start_max = tl.maximum(other_start_max, tl.max(other_start, 0))
        if TWO:
            other_end = tl.load(indices + columns * N + (N - 1))
            other_end_min = tl.minimum(other_end_min, tl.min(other_end, 0))
            other_end_max = tl.maximum(other_end_max, tl.max(other_end, 0))
    if N == 1 or (N == 2 and not CAUSAL):
        end_min, end_max = q_len, q_len
    if N == 2 and not CAUSAL:
        other_start_min, other_start_max = 0, 0

    inside = (start_min >= 0) & (start_max <= q_len) & (end_min >= 0) & (end_max <= q_len)
    if TWO:
        inside = inside & (other_start_min >= 0) & (other_start_max <= q_len)
        inside = inside & (other_end_min >= 0) & (other_end_max <= q_len)
    tl.device_assert(inside, "the mask's indices must lie in 0..q_len; FlashMask.validate(q_len) names the columns")
    tl.store(extremes + tile, start_min)
    tl.store(extremes + n_kv + tile, start_max)
    tl.store(extremes + 2 * n_kv + tile, end_min)
    tl.store(extremes + 3 * n_kv + tile, end_max)
    if TWO:
        tl.store(extremes + 4 * n_kv + tile, other_start_min)
        tl.store(extremes + 5 * n_kv + tile, other_start_max)
        tl.store(extremes + 6 * n_kv + tile, other_end_min)
        tl.store(extremes + 7 * n_kv + tile, other_end_max)

    width = SUBTILES * COLUMNS
    visible_opened, visible_closed, partial_opened, partial_closed = 0, 0, 0, 0
    for first in range(0, n_q + 1, LANES):
        rows = first + tl.arange(0, LANES)
        visible, partial = _classify(
            rows, left, width, start_min, start_max, end_min, end_max, other_start_min, other_start_max, other_end_min,
            other_end_max, q_len, kv_len, ROWS, CAUSAL, TWO, SKIP,
        )  # fmt: skip
        visible_before, partial_before = _classify(
            rows - 1, left, width, start_min, start_max, end_min, end_max, other_start_min, other_start_max,
            other_end_min,
            other_end_max, q_len, kv_len, ROWS, CAUSAL, TWO, SKIP,
        )  # fmt: skip
        visible_before = visible_before & (rows > 0)
        partial_before = partial_before & (rows > 0)
        visible_opened = _mark_edges(segments, rows, visible & (visible_before == 0), visible_opened)
        visible_closed = _mark_edges(segments + 1, rows, visible_before & (visible == 0), visible_closed)
        partial_opened = _mark_edges(segments + 2 * VISIBLE, rows, partial & (partial_before == 0), partial_opened)
        partial_closed = _mark_edges(segments + 2 * VISIBLE + 1, rows, partial_before & (partial == 0), partial_closed)
    _clear_rest(segments, visible_opened, VISIBLE)
    _clear_rest(segments + 2 * VISIBLE, partial_opened, PARTIAL)


@triton.jit
def _mark_edges(edges, rows, flags, count):
    """Store the flagged rows behind the `count` that are there (every other slot); returns the new count."""
    flags = flags.to(tl.int32)
    slots = count + tl.cumsum(flags, 0) - 1
    tl.store(edges + 2 * slots, rows, mask=flags != 0)
    return count + tl.sum(flags, 0)


@triton.jit
def _clear_rest(ranges, count, SLOTS: tl.constexpr):
    """Make those of up to 4 ranges empty that are not among the first `count`."""
    slots = tl.arange(0, 4)
    unused = (slots >= count) & (slots < SLOTS)
    tl.store(ranges + 2 * slots, 0, mask=unused)
    tl.store(ranges + 2 * slots + 1, 0, mask=unused)


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv"])
def _row_plan(
    extremes, tiles, counts, q_len, kv_len, n_q, n_kv,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """One row tile: its list of key tiles, visible ones from the front and partial ones from the back."""
    TWO: tl.constexpr = N == 4 or (N == 2 and not CAUSAL)
    row = tl.program_id(0) % n_q
    head = (tl.program_id(0) // n_q).to(tl.int64)
    extremes += head * n_kv * 8
    tiles += (head * n_q + row) * n_kv
    counts += (head * n_q + row) * 2
    n_visible, n_partial = 0, 0
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n_kv
        start_min = tl.load(extremes + lane, mask=inside, other=0)
        start_max = tl.load(extremes + n_kv + lane, mask=inside, other=0)
        end_min = tl.load(extremes + 2 * n_kv + lane, mask=inside, other=0)
        end_max = tl.load(extremes + 3 * n_kv + lane, mask=inside, other=0)
        other_start_min, other_start_max, other_end_min, other_end_max = start_min, start_max, end_min, end_max
        if TWO:
            other_start_min = tl.load(extremes + 4 * n_kv + lane, mask=inside, other=0)
            other_start_max = tl.load(extremes + 5 * n_kv + lane, mask=inside, other=0)
            other_end_min = tl.load(extremes + 6 * n_kv + lane, mask=inside, other=0)
            other_end_max = tl.load(extremes + 7 * n_kv + lane, mask=inside, other=0)
        visible, partial = _classify(
            row, lane * WIDTH, WIDTH, start_min, start_max, end_min, end_max, other_start_min, other_start_max,
            other_end_min, other_end_max, q_len, kv_len, ROWS, CAUSAL, TWO, SKIP,
        )  # fmt: skip
        visible = (visible & inside).to(tl.int32)
        partial = (partial & inside).to(tl.int32)
        value = lane.to(tl.int16)
        tl.store(tiles + n_visible + tl.cumsum(visible, 0) - 1, value, mask=visible != 0)
        tl.store(tiles + n_kv - n_partial - tl.cumsum(partial, 0), value, mask=partial != 0)
        n_visible += tl.sum(visible, 0)
        n_partial += tl.sum(partial, 0)
    tl.store(counts, n_visible)
    tl.store(counts + 1, n_partial)


_launch_columns = Launcher(_column_plan)
_launch_rows = Launcher(_row_plan)


def build_plan(indices: Tensor, causal: bool, q_len: int, *, skip: bool = True) -> Plan:
    """Make a plan on the GPU; arguments and result as in `flashmask_hf.plan.build_plan`.

    An index out of range is an assertion of the device.
    """
    indices = indices.contiguous()
    batch, heads, kv_len, n = indices.shape
    tile_shape, count_shape, segment_shape = plan_shapes(indices, q_len)
    n_q, n_kv = tile_shape[2:]
    width = plan_columns(kv_len)
    tiles = indices.new_empty(tile_shape, dtype=torch.int16)
    counts = indices.new_empty(count_shape, dtype=torch.int32)
    segments = indices.new_empty(segment_shape, dtype=torch.int32)
    extremes = indices.new_empty(batch * heads, 8, n_kv, dtype=torch.int32)
    with torch.cuda.device_of(indices):
        _launch_columns(
            n_kv * batch * heads,
            indices, extremes, segments, q_len, kv_len, n_q, n_kv,
            SUBTILES=width // COLUMNS, CAUSAL=causal, N=n, ROWS=ROWS, COLUMNS=COLUMNS, VISIBLE=VISIBLE_SEGMENTS,
            PARTIAL=PARTIAL_SEGMENTS, LANES=_LANES, SKIP=skip, num_warps=4, debug=True, sanitize_overflow=False,
        )  # fmt: skip
        _launch_rows(
            n_q * batch * heads,
            extremes, tiles, counts, q_len, kv_len, n_q, n_kv,
            WIDTH=width, CAUSAL=causal, N=n, ROWS=ROWS, LANES=_LANES, SKIP=skip, num_warps=4,
        )  # fmt: skip
    return Plan(tiles, counts, segments)


@triton.jit(do_not_specialize=["q_len", "n_q", "n_kv", "n_rows", "n_masks", "least"])
def _join_rows(
    tiles, counts, flags, joined, joined_counts, rows, q_len, n_q, n_kv, n_rows, n_masks, least,
    ROWS: tl.constexpr, JOINED_ROWS: tl.constexpr, SAMPLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One tile of `JOINED_ROWS`: two lists become one. `flags`: int8 zeros [masks, n_rows, 2, n_kv].

    `rows` becomes JOINED_ROWS where a sample of the lists has `least` tiles on average; else ROWS, and nothing is done.
    """
    tile = tl.program_id(0).to(tl.int64)
    # One list of each of SAMPLE equal parts, now early and now late in it: masks and documents may be as regular.
    nth = tl.arange(0, SAMPLE).to(tl.int64)
    lists = (nth * SAMPLE + nth * 79 % SAMPLE) * (n_masks * n_q) // (SAMPLE * SAMPLE) * 2
    long = tl.sum(tl.load(counts + lists) + tl.load(counts + lists + 1), 0) >= least * SAMPLE
    if tile == 0:
        tl.store(rows, tl.where(long, JOINED_ROWS, ROWS))
    if long:
        _join(tile, tiles, counts, flags, joined, joined_counts, q_len, n_q, n_kv, n_rows, LANES)


@triton.jit
def _join(tile, tiles, counts, flags, joined, joined_counts, q_len, n_q, n_kv, n_rows, LANES: tl.constexpr):
    """The list of number `tile`: arguments as in `_join_rows`."""
    row = tile % n_rows * 3 // 2
    plan_row = tile // n_rows * n_q + row
    flags += tile * 2 * n_kv
    joined += tile * n_kv
    for half in tl.static_range(2):
        # The last rows may have no second list.
        at = plan_row + (half if (row + 1) * 128 < q_len else 0)
        visible = tl.load(counts + at * 2)
        partial = tl.load(counts + at * 2 + 1)
        for first in range(0, n_kv, LANES):
            lane = first + tl.arange(0, LANES)
            listed = (lane < visible) | ((lane >= n_kv - partial) & (lane < n_kv))
            column = tl.load(tiles + at * n_kv + lane, mask=listed, other=0).to(tl.int32)
            tl.store(flags + half * n_kv + column, tl.where(lane < visible, 2, 1).to(tl.int8), mask=listed)
    tl.debug_barrier()
    n_visible, n_partial = 0, 0
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        upper = tl.load(flags + lane, mask=lane < n_kv, other=0)
        lower = tl.load(flags + n_kv + lane, mask=lane < n_kv, other=0)
        whole = ((upper == 2) & (lower == 2)).to(tl.int32)
        part = ((upper > 0) | (lower > 0)).to(tl.int32) - whole
        value = lane.to(tl.int16)
        tl.store(joined + n_visible + tl.cumsum(whole, 0) - 1, value, mask=whole != 0)
        tl.store(joined + n_kv - n_partial - tl.cumsum(part, 0), value, mask=part != 0)
        n_visible += tl.sum(whole, 0)
        n_partial += tl.sum(part, 0)
    tl.store(joined_counts + tile * 2, n_visible)
    tl.store(joined_counts + tile * 2 + 1, n_partial)


_launch_join = Launcher(_join_rows)


def join_rows(plan: Plan, q_len: int, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """The lists of a plan for tiles of `JOINED_ROWS` query rows, each of which meets two of the plan's.

    They are made for a call and not kept, with 4 * Tk / 192 bytes a query row.

    Args:
        plan: the plan, on the GPU.
        q_len: number of query rows.
        least: of key tiles that a list of the plan must have on average, by a sample of the lists.

    Returns:
        tiles int16 [B, Hm, ceil(q_len / 192), Tk] and counts int32 [B, Hm, ceil(q_len / 192), 2], as in a plan; a key
        tile is visible if both of the plan's lists have it so, and else partial if either has it. And int32 [1], the
        rows of the tiles to take: 192, or 128 for the lists of the plan, and then the others are not made.
    """
    batch, heads, n_q, n_kv = plan.tiles.shape
    n_rows = -(-q_len // JOINED_ROWS)
    flags = torch.zeros(batch, heads, n_rows, 2, n_kv, dtype=torch.int8, device=plan.tiles.device)
    tiles, counts = plan.tiles.new_empty(batch, heads, n_rows, n_kv), plan.counts.new_empty(batch, heads, n_rows, 2)
    rows = plan.counts.new_empty(1)
    with torch.cuda.device_of(plan.tiles):
        _launch_join(
            batch * heads * n_rows, plan.tiles, plan.counts, flags, tiles, counts, rows, q_len, n_q, n_kv, n_rows,
            batch * heads, least, ROWS=ROWS, JOINED_ROWS=JOINED_ROWS, SAMPLE=_SAMPLE, LANES=_LANES, num_warps=4,
        )  # fmt: skip
    return tiles, counts, rows
