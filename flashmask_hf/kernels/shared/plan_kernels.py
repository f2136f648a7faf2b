"""Triton kernels that build a plan (`flashmask_hf.tile_plan.build_plan`) in two launches and O(S) reads.

    _column_plan: a program per key tile    bounds of its keys -> their extremes; segments of row tiles
    _row_plan:    a program per row tile    extremes of all key tiles -> list of key tiles, and its lengths

`_column_plan` also makes segments for smaller tiles, and `_join_rows` joins lists for taller row tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound
from flashmask_hf.tile_plan import COLUMNS, PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, empty_plan, plan_columns

JOINED_ROWS = 192
"""Query rows per tile of `join_rows`: one and a half row tiles of the plan."""

_HIGHEST = tl.constexpr(2147483647)
_LOWEST = tl.constexpr(-2147483647)
_LANES = 256  # tiles that a program classifies at a time
_SAMPLE = 128  # lists that `_join_rows` samples


class _Range(NamedTuple):
    """Lowest and highest value of a bound among a tile's keys."""

    low: Any
    high: Any


class _Extremes(NamedTuple):
    """Ranges of the bounds of both hidden intervals [start, end)."""

    start: Any
    end: Any
    other_start: Any
    other_end: Any


@triton.jit
def _classify(
    row_tile, column, width, extremes, q_len, kv_len,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Classify row tiles against key tiles (paper, equation 4); the arguments broadcast.

    Operands:
        row_tile: indices of row tiles.
        column: first keys of key tiles.
        width: keys per key tile.
        extremes: `_Extremes` of the key tiles.

    Returns:
        (visible, partial).
    """
    first = row_tile * ROWS
    last = tl.minimum(first + ROWS, q_len)
    hidden = (first >= extremes.start.high) & (last <= extremes.end.low)
    touched = (first < extremes.end.high) & (last > extremes.start.low)
    if other_end_bound(N, CAUSAL) is not None:
        hidden = hidden | ((first >= extremes.other_start.high) & (last <= extremes.other_end.low))
        touched = touched | ((first < extremes.other_end.high) & (last > extremes.other_start.low))
    if CAUSAL:
        hidden = hidden | (last - 1 + kv_len - q_len < column)
        touched = touched | (first + kv_len - q_len < tl.minimum(column + width, kv_len) - 1)
    touched = touched | (column + width > kv_len)
    real = (first < q_len) & (column < kv_len)
    visible = real & (hidden == 0) & (touched == 0)
    partial = real & (hidden == 0) & touched
    return visible, partial


@triton.jit
def _widen(bound, values):
    return _Range(tl.minimum(bound.low, tl.min(values, 0)), tl.maximum(bound.high, tl.max(values, 0)))


@triton.jit
def _load_range(extremes, NTH: tl.constexpr, lane, n_kv):
    """Load the ranges of bound NTH of the key tiles `lane`."""
    low = tl.load(extremes + 2 * NTH * n_kv + lane, mask=lane < n_kv, other=0)
    return _Range(low, tl.load(extremes + (2 * NTH + 1) * n_kv + lane, mask=lane < n_kv, other=0))


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv"])
def _column_plan(
    indices, extremes, segments, q_len, kv_len, n_q, n_kv,
    SUBTILES: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VISIBLE: tl.constexpr, PARTIAL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Plan one key tile of SUBTILES * COLUMNS keys: extremes of its bounds, and segments of row tiles.

    Tensors:
        indices: [masks, kv_len, N].
        extremes: written, int32 [masks, 8, n_kv].
        segments: written, [masks, n_kv, VISIBLE + PARTIAL, 2].
    """
    END: tl.constexpr = end_bound(N, CAUSAL)
    OTHER_START: tl.constexpr = other_start_bound(N, CAUSAL)
    OTHER_END: tl.constexpr = other_end_bound(N, CAUSAL)
    tile = tl.program_id(0) % n_kv
    mask = (tl.program_id(0) // n_kv).to(tl.int64)
    indices += mask * kv_len * N
    extremes += mask * n_kv * 8
    segments += (mask * n_kv + tile) * (VISIBLE + PARTIAL) * 2
    first_column = tile * SUBTILES * COLUMNS

    start = _Range(tl.full([], _HIGHEST, tl.int32), tl.full([], _LOWEST, tl.int32))
    end, other_start, other_end = start, start, start
    for part in range(SUBTILES):
        columns = first_column + part * COLUMNS + tl.arange(0, COLUMNS)
        columns = tl.minimum(columns, kv_len - 1).to(tl.int64)
        start = _widen(start, tl.load(indices + columns * N))
        if END is not None:
            end = _widen(end, tl.load(indices + columns * N + END))
        if OTHER_START is not None:
            other_start = _widen(other_start, tl.load(indices + columns * N + OTHER_START))
        if OTHER_END is not None:
            other_end = _widen(other_end, tl.load(indices + columns * N + OTHER_END))
    if END is None:
        end = _Range(q_len, q_len)
    if OTHER_END is not None and OTHER_START is None:
        other_start = _Range(0, 0)

    own_extremes = _Extremes(start, end, other_start, other_end)
    BOUNDS: tl.constexpr = 2 if OTHER_END is None else 4
    inside = True
    for nth in tl.static_range(BOUNDS):
        inside = inside & (own_extremes[nth].low >= 0) & (own_extremes[nth].high <= q_len)
    tl.device_assert(inside, "the mask's indices must lie in 0..q_len; FlashMask.validate(q_len) names the columns")
    for nth in tl.static_range(BOUNDS):
        tl.store(extremes + 2 * nth * n_kv + tile, own_extremes[nth].low)
        tl.store(extremes + (2 * nth + 1) * n_kv + tile, own_extremes[nth].high)

    width = SUBTILES * COLUMNS
    visible_opened, visible_closed, partial_opened, partial_closed = 0, 0, 0, 0
    for first in range(0, n_q + 1, LANES):
        rows = first + tl.arange(0, LANES)
        visible, partial = _classify(rows, first_column, width, own_extremes, q_len, kv_len, ROWS, CAUSAL, N)
        visible_before, partial_before = _classify(
            rows - 1, first_column, width, own_extremes, q_len, kv_len, ROWS, CAUSAL, N
        )
        visible_before = visible_before & (rows > 0)
        partial_before = partial_before & (rows > 0)
        visible_opened = _append_edges(segments, rows, visible & (visible_before == 0), visible_opened)
        visible_closed = _append_edges(segments + 1, rows, visible_before & (visible == 0), visible_closed)
        partial_opened = _append_edges(segments + 2 * VISIBLE, rows, partial & (partial_before == 0), partial_opened)
        partial_closed = _append_edges(
            segments + 2 * VISIBLE + 1, rows, partial_before & (partial == 0), partial_closed
        )
    _clear_unused(segments, visible_opened, VISIBLE)
    _clear_unused(segments + 2 * VISIBLE, partial_opened, PARTIAL)


@triton.jit
def _append_edges(edges, rows, flags, count):
    """Store the flagged rows after the first `count` edges, two slots apart; return the new count."""
    flags = flags.to(tl.int32)
    slots = count + tl.cumsum(flags, 0) - 1
    tl.store(edges + 2 * slots, rows, mask=flags != 0)
    return count + tl.sum(flags, 0)


@triton.jit
def _clear_unused(ranges, count, SLOTS: tl.constexpr):
    """Store empty ranges behind the first `count` of SLOTS (up to 4)."""
    slots = tl.arange(0, 4)
    unused = (slots >= count) & (slots < SLOTS)
    tl.store(ranges + 2 * slots, 0, mask=unused)
    tl.store(ranges + 2 * slots + 1, 0, mask=unused)


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv"])
def _row_plan(
    extremes, tiles, counts, q_len, kv_len, n_q, n_kv,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Plan one row tile: its list of key tiles, visible tiles from the front and partial tiles from the back.

    Tensors:
        extremes: of `_column_plan`, [masks, 8, n_kv].
        tiles: written, [masks, n_q, n_kv].
        counts: written, [masks, n_q, 2].
    """
    row = tl.program_id(0) % n_q
    mask = (tl.program_id(0) // n_q).to(tl.int64)
    extremes += mask * n_kv * 8
    tiles += (mask * n_q + row) * n_kv
    counts += (mask * n_q + row) * 2
    n_visible, n_partial = 0, 0
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n_kv
        start = _load_range(extremes, 0, lane, n_kv)
        end = _load_range(extremes, 1, lane, n_kv)
        other_start, other_end = start, end
        if other_end_bound(N, CAUSAL) is not None:
            other_start = _load_range(extremes, 2, lane, n_kv)
            other_end = _load_range(extremes, 3, lane, n_kv)
        lane_extremes = _Extremes(start, end, other_start, other_end)
        visible, partial = _classify(row, lane * WIDTH, WIDTH, lane_extremes, q_len, kv_len, ROWS, CAUSAL, N)
        visible = (visible & inside).to(tl.int32)
        partial = (partial & inside).to(tl.int32)
        value = lane.to(tl.int16)
        tl.store(tiles + n_visible + tl.cumsum(visible, 0) - 1, value, mask=visible != 0)
        tl.store(tiles + n_kv - n_partial - tl.cumsum(partial, 0), value, mask=partial != 0)
        n_visible += tl.sum(visible, 0)
        n_partial += tl.sum(partial, 0)
    tl.store(counts, n_visible)
    tl.store(counts + 1, n_partial)


def build_plan(indices: Tensor, causal: bool, q_len: int) -> Plan:
    """Build a plan on the GPU, as `flashmask_hf.tile_plan.build_plan`.

    Bounds out of range fail a device-side assertion.
    """
    indices = indices.contiguous()
    batch, heads, kv_len, n = indices.shape
    plan = empty_plan(indices, q_len)
    n_q, n_kv = plan.tiles.shape[2:]
    width = plan_columns(kv_len)
    extremes = indices.new_empty(batch * heads, 8, n_kv, dtype=torch.int32)
    with torch.cuda.device_of(indices):
        _column_plan[(n_kv * batch * heads,)](
            indices, extremes, plan.segments, q_len, kv_len, n_q, n_kv,
            SUBTILES=width // COLUMNS, CAUSAL=causal, N=n, ROWS=ROWS, COLUMNS=COLUMNS, VISIBLE=VISIBLE_SEGMENTS,
            PARTIAL=PARTIAL_SEGMENTS, LANES=_LANES, num_warps=4, debug=True, sanitize_overflow=False,
        )  # fmt: skip
        _row_plan[(n_q * batch * heads,)](
            extremes, plan.tiles, plan.counts, q_len, kv_len, n_q, n_kv,
            WIDTH=width, CAUSAL=causal, N=n, ROWS=ROWS, LANES=_LANES, num_warps=4,
        )  # fmt: skip
    return plan


def count_key_tiles(kv_len: int, columns: int) -> int:
    """Return how many tiles of `columns` keys, a divisor of the plan's key tiles, fill the plan's key tiles."""
    width = plan_columns(kv_len)
    return -(-kv_len // width) * (width // columns)


def prepare_segments(problem: Problem, rows: int, columns: int, parts: int = 1) -> Callable[[Tensor], Tensor]:
    """Prepare a plan's `segments` for tiles of `rows` query rows and `parts` times `columns` keys, a power of two.

    Returns:
        contiguous indices whose plan has been built -> segments, int32
        [mask batch, mask heads, `count_key_tiles(kv_len, parts * columns)`, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2].
    """
    batch, heads, kv_len, n = problem.mask_shape
    q_len, device = problem.q.shape[2], problem.q.device
    n_q, n_kv = -(-q_len // rows), count_key_tiles(kv_len, parts * columns)
    segments = packed_layout(
        batch, heads, n_kv, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2, dtype=torch.int32, device=device
    ).allocator()
    extremes = packed_layout(batch * heads, 8, n_kv, dtype=torch.int32, device=device).allocator()
    launch = Launch(
        _column_plan,
        n_kv * batch * heads,
        q_len, kv_len, n_q, n_kv,
        SUBTILES=parts, CAUSAL=problem.causal, N=n, ROWS=rows, COLUMNS=columns, VISIBLE=VISIBLE_SEGMENTS,
        PARTIAL=PARTIAL_SEGMENTS, LANES=_LANES, num_warps=4,
    )  # fmt: skip

    def make(indices: Tensor) -> Tensor:
        made = segments()
        launch(indices, extremes(), made)
        return made

    return make


@triton.jit(do_not_specialize=["q_len", "n_q", "n_kv", "n_rows", "n_masks", "least"])
def _join_rows(
    tiles, counts, flags, joined, joined_counts, rows, q_len, n_q, n_kv, n_rows, n_masks, least,
    ROWS: tl.constexpr, JOINED_ROWS: tl.constexpr, SAMPLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Join the two lists of a tile of JOINED_ROWS rows, if the plan's lists are long on average.

    Tensors:
        tiles, counts: of the plan, [masks, n_q, n_kv] and [masks, n_q, 2].
        flags: int8 zeros [masks, n_rows, 2, n_kv], scratch memory.
        joined, joined_counts: written, [masks, n_rows, n_kv] and [masks, n_rows, 2].
        rows: one number, written: JOINED_ROWS if sampled lists have `least` tiles on average; else ROWS, without joins.
    Sizes:
        n_rows: row tiles of JOINED_ROWS.
        n_masks: mask batch * mask heads.
    """
    tile = tl.program_id(0).to(tl.int64)
    # One list per SAMPLE equal parts, at varying places, since masks may repeat regularly.
    nth = tl.arange(0, SAMPLE).to(tl.int64)
    lists = (nth * SAMPLE + nth * 79 % SAMPLE) * (n_masks * n_q) // (SAMPLE * SAMPLE) * 2
    long = tl.sum(tl.load(counts + lists) + tl.load(counts + lists + 1), 0) >= least * SAMPLE
    if tile == 0:
        tl.store(rows, tl.where(long, JOINED_ROWS, ROWS))
    if long:
        _join_lists(tile, tiles, counts, flags, joined, joined_counts, q_len, n_q, n_kv, n_rows, LANES)


@triton.jit
def _join_lists(tile, tiles, counts, flags, joined, joined_counts, q_len, n_q, n_kv, n_rows, LANES: tl.constexpr):
    """Join the lists of row tile `tile`, counted over all masks; arguments as in `_join_rows`."""
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
        in_both = ((upper == 2) & (lower == 2)).to(tl.int32)
        in_part = ((upper > 0) | (lower > 0)).to(tl.int32) - in_both
        value = lane.to(tl.int16)
        tl.store(joined + n_visible + tl.cumsum(in_both, 0) - 1, value, mask=in_both != 0)
        tl.store(joined + n_kv - n_partial - tl.cumsum(in_part, 0), value, mask=in_part != 0)
        n_visible += tl.sum(in_both, 0)
        n_partial += tl.sum(in_part, 0)
    tl.store(joined_counts + tile * 2, n_visible)
    tl.store(joined_counts + tile * 2 + 1, n_partial)


def join_rows(plan: Plan, q_len: int, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Join the lists of a plan for tiles of `JOINED_ROWS` query rows, which meet two row tiles of the plan each.

    Lists are joined if sampled ones have at least `least` tiles on average.

    Returns:
        tiles int16 [B, Hm, ceil(q_len / 192), Tk] and counts int32 [B, Hm, ceil(q_len / 192), 2], as in a plan; and
        int32 [1], the tile height to take: 192, or 128 if nothing is joined. A key tile is visible if it is visible in
        both lists, and partial if it is in either.
    """
    batch, heads, n_q, n_kv = plan.tiles.shape
    n_rows = -(-q_len // JOINED_ROWS)
    flags = torch.zeros(batch, heads, n_rows, 2, n_kv, dtype=torch.int8, device=plan.tiles.device)
    tiles, counts = plan.tiles.new_empty(batch, heads, n_rows, n_kv), plan.counts.new_empty(batch, heads, n_rows, 2)
    rows = plan.counts.new_empty(1)
    _join_rows[(batch * heads * n_rows,)](
        plan.tiles, plan.counts, flags, tiles, counts, rows, q_len, n_q, n_kv, n_rows, batch * heads, least,
        ROWS=ROWS, JOINED_ROWS=JOINED_ROWS, SAMPLE=_SAMPLE, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    return tiles, counts, rows
