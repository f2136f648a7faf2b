"""Device code that both forms of the Hopper backward share: producer, dQ and store warps, softmax weights.

`backward_kernel` draws the roles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flashmask_hf.kernels.hopper.gluon import (
    bits_below,
    device_enum,
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    keep_marked,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque_zero,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    wait_for_count,
    wait_for_writes,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.hopper.pipeline import NEVER, free_phase, full_phase, read_slot, write_slot, write_slots
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound
from flashmask_hf.kernels.shared.device import LOG2_E
from flashmask_hf.tile_plan import PARTIAL_SEGMENTS, VISIBLE_SEGMENTS

_VISIBLE_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS)
_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS + PARTIAL_SEGMENTS)

_SPREAD_ROWS = gl.constexpr(4096)
"""Fewest rows of a segment that programs begin in different places, so that neighbours do not meet in dQ."""


_DO_THREADS = gl.constexpr(2 * 128 + 32)


@device_enum
class Slot:
    """Numbers that describe a row tile and its key tile."""

    ROW = 0
    MASK = 1
    """Index of the mask head over the batch, times 4; plus 2 if the tile is partial; plus 1 if a row sees nothing."""
    DQ_TILE = 2
    KV_PLANE = 3
    """batch * kv_heads + kv_head"""
    KEY_TILE = 4
    ROW_TILES = 5
    """Row tiles of the key tile. 0: no row sees it, and one row tile past the end of a head is walked. -1: end."""
    COUNT = 6


@device_enum
class NamedBarrier:
    """Ids of hardware barriers. An mbarrier would cost a warpgroup a barrier among its own warps first."""

    ROWS_FREE = 8
    """Per stage: a row tile and its slots may be overwritten."""
    DO_FREE = 10
    """The output's gradients may be overwritten, if they have one stage."""
    DO_CLEARED = 11
    """After `_clear_blind_rows`."""


class Tensors(NamedTuple):
    """Global memory."""

    q: Any  # descriptor, tiles [BLOCK_M, BLOCK_D]
    k: Any  # descriptor, tiles [64, BLOCK_D]
    v: Any  # descriptor, tiles [64, BLOCK_V]
    dout: Any  # descriptor, tiles [BLOCK_M, BLOCK_V]
    dq_accum: Any  # descriptor of float32 sums, tiles [2 * DQ_ROWS, 32] in the order of `_stage_dq`
    dk: Any  # descriptor, tiles [64, BLOCK_D]
    dv: Any  # descriptor, tiles [64, BLOCK_V]
    dk_rows: Any  # `dk` as a pointer if SCATTER
    dv_rows: Any  # `dv` as a pointer if SCATTER
    k_order: Any  # int32 [B, Hkv, Skv] if SCATTER: target of each row of dk and dv
    lse: Any  # float32 [B, Hq, Sq]
    delta: Any  # float32 [B, Hq, Sq]
    indices: Any  # int32 [mask batch, mask heads, Skv, N]
    segments: Any  # int32 [mask batch, mask heads, n_kv, segments, 2], of the plan, or of `DqOrder` if DQ_ORDER
    dq_ranks: Any  # this and the next three only if DQ_ORDER, see `dq_order.DqOrder`
    dq_semaphores: Any
    key_tile_order: Any
    schedule: Any
    work_order: Any  # int32 if PERSISTENT without DQ_ORDER, see `work_order`
    counter: Any  # int32 [1] if PERSISTENT: key tiles taken


class Scalars(NamedTuple):
    """Sizes, and factors of the scores (`Problem.factors`)."""

    heads: Any
    kv_heads: Any
    kv_planes: Any  # batch * kv_heads
    unsorted: Any  # work items before those that `work_order` sorts
    mask_batch: Any
    mask_heads: Any
    q_len: Any
    kv_len: Any
    n_kv: Any  # key tiles per head in `segments`
    n_columns: Any  # key tiles per head
    padded_len: Any  # rows per head in `dq_accum`
    scale: Any
    factor: Any
    cap_factor: Any


class Form(NamedTuple):
    """Compile-time constants."""

    CAUSAL: bool
    N: int
    CAP: bool
    SCATTER: bool
    """Whether `k_order` reorders the rows of dK and dV."""
    DQ_ORDER: bool
    """Whether key tiles add to dQ in a fixed order; takes two store warps."""
    UPWARD: bool
    """Whether that order may walk rows upwards."""
    PERSISTENT: bool
    """Whether key tiles outnumber programs."""
    BLOCK_M: int
    BLOCK_D: int
    """Width of query and key tiles, 0 from HEAD_DIM on."""
    BLOCK_V: int
    """Width of value tiles, 0 from V_HEAD_DIM on."""
    TAIL: int
    """Dims of queries and keys behind the first BLOCK_V that may not be 0, if their tiles are wider."""
    DQ_PIECES: int
    """Pieces of 64 dims per tile of dQ."""
    DQ_ROWS: int
    """Query rows per piece: 64, or 32 if a tile has 32; these are computed transposed, [64, 32]."""
    HEAD_DIM: int
    V_HEAD_DIM: int
    DEPTH: int
    """Dims that scores are summed over; the others are 0."""
    V_DEPTH: int
    """Dims that gradients of weights are summed over."""
    KEY_PARTS: int
    """Parts of 64 keys per key tile."""
    SEGMENT_ROWS: int
    """Query rows per row tile of `segments`."""
    SUBTILES: int
    """Key tiles per key tile of `segments`."""
    KEY_STAGES: int
    VALUE_STAGES: int
    """KEY_STAGES or 1."""
    DO_STAGES: int
    DQ_STAGES: int
    STORE_WARPS: int
    REGISTERS: int
    """Registers per thread of the second warpgroup. The first gets the rest of 512, less DQ_REGISTERS and 32. With
    fewer than 224 for dV of wide heads, the assembler serializes products."""
    DQ_REGISTERS: int
    """Registers per thread of the dQ warpgroup."""
    SCORES_AHEAD: bool
    """Whether the next row tile's scores run beside dK; ignored by `backward_wide`."""


@gluon.constexpr_function
def _threads(store_warps):
    """Return the threads at ROWS_FREE: three warpgroups, store warps, and the producer, which waits."""
    return 3 * 128 + 32 + 32 * store_warps


@gluon.jit
def release_rows(stage, FORM: gl.constexpr):
    """Arrive at ROWS_FREE."""
    named_barrier_arrive(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))


@gluon.jit
def release_dout():
    """Arrive at DO_FREE."""
    named_barrier_arrive(NamedBarrier.DO_FREE, _DO_THREADS)


@gluon.jit
def read_row_slot(step, SLOT: gl.constexpr, args):
    """Return a slot of row tile number `step` of the program."""
    _tensors, _scalars, shared, _barriers = args
    return read_slot(shared.slots, (step & 1) * Slot.COUNT + SLOT)


@gluon.jit
def await_rows(step, args):
    """Wait for row tile number `step` of the program; return its slot ROW_TILES."""
    _tensors, _scalars, _shared, barriers = args
    mbarrier.wait(barriers.q_full.index(step & 1), full_phase(step, 2))
    return read_row_slot(step, Slot.ROW_TILES, args)


@gluon.jit
def _has_blind_rows(step, args):
    """Return whether a row of row tile number `step` sees nothing."""
    return (read_row_slot(step, Slot.MASK, args) & 1) != 0


@gluon.jit
def await_cleared_rows(step, args):
    """Wait until `_clear_blind_rows` is done, in a warpgroup that reads the output's gradients."""
    if _has_blind_rows(step, args):
        named_barrier_sync(NamedBarrier.DO_CLEARED, 3 * 128)


@gluon.jit
def _clear_blind_rows(step, args, FORM: gl.constexpr):
    """Set the output's gradients of rows that see nothing to 0, since 0 * NaN is NaN."""
    _tensors, _scalars, shared, barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_V: gl.constexpr = FORM.BLOCK_V
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [4, 1], [1, 0])
    mbarrier.wait(barriers.q_full.index(step & 1), full_phase(step, 2))
    if _has_blind_rows(step, args):
        do_stage = step % FORM.DO_STAGES
        mbarrier.wait(barriers.do_full.index(do_stage), full_phase(step, FORM.DO_STAGES))
        for first in gl.static_range(0, BLOCK_M, 16):  # few rows at a time take few registers
            rows = shared.do.index(do_stage).reshape([BLOCK_M, BLOCK_V]).slice(first, 16)
            lse = shared.lse.index(step & 1).slice(first, 16).load(gl.SliceLayout(1, ROWS))
            rows.store(gl.where(gl.expand_dims(lse == float("inf"), 1), 0.0, rows.load(ROWS)))
        fence_async_shared()
        named_barrier_arrive(NamedBarrier.DO_CLEARED, 3 * 128)


@gluon.jit
def _locate_key_tile(work, args, FORM: gl.constexpr):
    """Return (key tile, key-value plane) of a work item. With DQ_ORDER, heads alternate (see `dq_order`)."""
    tensors, scalars, _shared, _barriers = args
    if FORM.DQ_ORDER:
        alternating = gl.load(tensors.schedule)
        begin = work // (alternating * scalars.n_columns) * alternating
        nth = work - begin * scalars.n_columns
        width = gl.minimum(alternating, scalars.kv_planes - begin)
        tile = nth // width
        plane = begin + nth % width
        groups = gl.where(scalars.mask_heads == 1, 1, scalars.kv_heads)
        line = plane // scalars.kv_heads % scalars.mask_batch
        if FORM.UPWARD:
            line = gl.load(tensors.schedule + 3) * scalars.mask_batch + line
        line = line * groups + plane % scalars.kv_heads % groups
        line = line * (scalars.n_columns // FORM.SUBTILES)
        ordered = gl.load(tensors.key_tile_order + line + tile // FORM.SUBTILES).to(gl.int32)
        tile = ordered * FORM.SUBTILES + tile % FORM.SUBTILES
    else:
        tile = work % scalars.n_columns
        plane = work // scalars.n_columns
    return tile, plane


@gluon.jit
def _take_work(place, args, FORM: gl.constexpr):
    """Return the work item at `place`: the place itself, or its entry in `work_order`."""
    tensors, scalars, _shared, _barriers = args
    item = place
    if FORM.PERSISTENT and not FORM.DQ_ORDER:
        is_sorted = place >= scalars.unsorted
        order = tensors.work_order + place - scalars.unsorted
        item = gl.where(is_sorted, gl.load(order, mask=is_sorted, other=0), place)
    return item


@gluon.jit
def _draw_work(args, FORM: gl.constexpr):
    """Return the program's next work item.

    Programs begin at the place of their own number. With DQ_ORDER they draw that place, too: lower places must have
    begun.
    """
    tensors, _scalars, _shared, _barriers = args
    place = gl.atomic_add(tensors.counter, 1)
    return place if FORM.DQ_ORDER else _take_work(place + gl.num_programs(0), args, FORM)


@gluon.jit
def _without_gap(starts, ends, first, last):
    """Return segments [starts, ends) without the row tiles [first, last) at their ends."""
    starts = gl.where(starts >= first, gl.maximum(starts, last), starts)
    ends = gl.where(ends <= last, gl.minimum(ends, first), ends)
    return starts, gl.maximum(starts, ends)


@gluon.jit
def _trim_segments(starts, ends, mask_plane, tile, args, FORM: gl.constexpr):
    """Cut row tiles that see no key of `tile` from the ends of the plan's segments, whose tiles may be larger."""
    tensors, scalars, _shared, _barriers = args
    CAUSAL: gl.constexpr = FORM.CAUSAL
    N: gl.constexpr = FORM.N
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_N: gl.constexpr = FORM.KEY_PARTS * 64
    END: gl.constexpr = end_bound(N, CAUSAL)
    OTHER_START: gl.constexpr = other_start_bound(N, CAUSAL)
    OTHER_END: gl.constexpr = other_end_bound(N, CAUSAL)
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0]))
    keys = gl.minimum(keys, scalars.kv_len - 1)
    at = tensors.indices + (mask_plane.to(gl.int64) * scalars.kv_len + keys) * N
    start = gl.max(gl.load(at), 0)
    end = NEVER
    if END is not None:
        end = gl.min(gl.load(at + END), 0) // BLOCK_M
    starts, ends = _without_gap(starts, ends, (start + BLOCK_M - 1) // BLOCK_M, end)
    if OTHER_END is not None:
        other_start = 0
        if OTHER_START is not None:
            other_start = (gl.max(gl.load(at + OTHER_START), 0) + BLOCK_M - 1) // BLOCK_M
        other_end = gl.min(gl.load(at + OTHER_END), 0) // BLOCK_M
        starts, ends = _without_gap(starts, ends, other_start, other_end)
    if CAUSAL:
        above = gl.maximum(tile * BLOCK_N - (scalars.kv_len - scalars.q_len), 0) // BLOCK_M
        starts, ends = _without_gap(starts, ends, 0, above)
    return starts, ends


@gluon.jit
def _load_segments(batch, head, tile, upward, args, FORM: gl.constexpr):
    """Return (mask plane, starts, ends) of a query head and key tile: one segment of row tiles per lane.

    `upward` numbers row tiles from the last one.
    """
    tensors, scalars, _shared, _barriers = args
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mask_plane = (batch % scalars.mask_batch) * scalars.mask_heads + head // (scalars.heads // scalars.mask_heads)
    at = tensors.segments + (mask_plane.to(gl.int64) * scalars.n_kv + tile // FORM.SUBTILES) * (_SEGMENTS * 2)
    at += lanes * 2
    starts = gl.load(at, mask=lanes < _SEGMENTS, other=0) * (FORM.SEGMENT_ROWS // FORM.BLOCK_M)
    ends = gl.load(at + 1, mask=lanes < _SEGMENTS, other=0) * (FORM.SEGMENT_ROWS // FORM.BLOCK_M)
    if FORM.BLOCK_M < FORM.SEGMENT_ROWS:
        starts, ends = _trim_segments(starts, ends, mask_plane, tile, args, FORM)
    if FORM.UPWARD:
        row_tiles = scalars.padded_len // FORM.BLOCK_M
        starts, ends = gl.where(upward, row_tiles - ends, starts), gl.where(upward, row_tiles - starts, ends)
    return mask_plane, starts, ends


@gluon.jit
def _first_row_tile(starts, ends, low):
    """Return the first row tile of all segments from `low` on, or NEVER."""
    starts = gl.maximum(starts, low)
    return gl.min(gl.where(ends > starts, starts, NEVER), 0)


@gluon.jit
def _next_segment(starts, ends, done):
    """Return (first, last, partial) of the next segment [first, last) from row tile `done` on."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ahead = (ends > starts) & (starts >= done)
    chosen = ahead & (starts == gl.min(gl.where(ahead, starts, NEVER), 0))
    first = gl.max(gl.where(chosen, starts, 0), 0)
    last = gl.max(gl.where(chosen, ends, 0), 0)
    return first, last, gl.max(gl.where(chosen & (lanes >= _VISIBLE_SEGMENTS), 1, 0), 0)


@gluon.jit
def _load_keys(
    descriptor, tiles, full, kv_plane, kv_heads, tile, stage, PARTS: gl.constexpr, FIRST: gl.constexpr = 0,
    STEP: gl.constexpr = 1,
):  # fmt: skip
    """Load parts FIRST, FIRST + STEP, ... of a tile of keys or values.

    Their barrier `full` also counts a row tile's bytes.
    """
    for part in gl.static_range(FIRST, PARTS, STEP):
        at = [kv_plane // kv_heads, kv_plane % kv_heads, (tile * PARTS + part) * 64, 0]
        tma_load(descriptor, at, full, tiles.index(stage * PARTS + part))


@gluon.jit
def _expect_rows(full, first, COLUMNS: gl.constexpr, FORM: gl.constexpr):
    """Expect the bytes of a row tile, and of the keys or values that come with the `first` row tile."""
    if first:
        mbarrier.expect(full, (FORM.BLOCK_M + FORM.KEY_PARTS * 64) * COLUMNS * 2)
    else:
        mbarrier.expect(full, FORM.BLOCK_M * COLUMNS * 2)


@gluon.jit
def _load_dout(batch, head, row, step, first, args, FORM: gl.constexpr):
    tensors, _scalars, shared, barriers = args
    stage = step % FORM.DO_STAGES
    _expect_rows(barriers.do_full.index(stage), first, FORM.BLOCK_V, FORM)
    tma_load(tensors.dout, [batch, head, row, 0], barriers.do_full.index(stage), shared.do.index(stage))


@gluon.jit
def _load_rows(
    batch, head, row, mask, dq_tile, kv_plane, tile, row_tiles, item, step, first, args, FORM: gl.constexpr
):  # fmt: skip
    """Load row tile number `step` of the program and write its slots.

    The keys of work item `item` come with its `first` row tile, and so do the values if they have as many stages.
    """
    tensors, scalars, shared, barriers = args
    LANES: gl.constexpr = gl.BlockedLayout([FORM.BLOCK_M // 32], [32], [1], [0])
    rows = row + gl.arange(0, FORM.BLOCK_M, LANES)
    at = (batch.to(gl.int64) * scalars.heads + head) * scalars.q_len
    lse = gl.load(tensors.lse + at + rows, mask=rows < scalars.q_len, other=float("inf"))
    delta = gl.load(tensors.delta + at + rows, mask=rows < scalars.q_len, other=0.0)
    blind = lse == float("-inf")
    mask += gl.max(gl.where(blind, 1, 0), 0)
    lse = gl.where(blind, float("inf"), lse) * LOG2_E
    stage = step & 1
    if step >= 2:
        named_barrier_sync(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))
    # The barrier opens only after `_expect_rows`, when the stores below are done.
    tma_load(tensors.q, [batch, head, row, 0], barriers.q_full.index(stage), shared.q.index(stage))
    if FORM.DO_STAGES == 2:
        _load_dout(batch, head, row, step, first, args, FORM)
    if first:
        k_stage = item % FORM.KEY_STAGES
        mbarrier.wait(barriers.keys_free.index(k_stage), free_phase(item, FORM.KEY_STAGES))
        full = barriers.q_full.index(stage)
        _load_keys(tensors.k, shared.k, full, kv_plane, scalars.kv_heads, tile, k_stage, FORM.KEY_PARTS)
        if FORM.VALUE_STAGES == FORM.KEY_STAGES:
            full = barriers.do_full.index(step % FORM.DO_STAGES)
            _load_keys(tensors.v, shared.v, full, kv_plane, scalars.kv_heads, tile, k_stage, FORM.KEY_PARTS)
    shared.lse.index(stage).store(lse)
    shared.delta.index(stage).store(delta)
    write_slots(shared.slots, stage * Slot.COUNT, (row, mask, dq_tile, kv_plane, tile, row_tiles))  # as in `Slot`
    group_barrier()
    _expect_rows(barriers.q_full.index(stage), first, FORM.BLOCK_D, FORM)
    if FORM.DO_STAGES == 1:
        if step >= 1:
            named_barrier_sync(NamedBarrier.DO_FREE, _DO_THREADS)
        _load_dout(batch, head, row, step, first, args, FORM)


@gluon.jit
def _load_row_tiles(
    starts, ends, upward, batch, head, mask_plane, kv_plane, tile, row_tiles, item, step, begin, following, args,
    FORM: gl.constexpr,
):  # fmt: skip
    """Load the row tiles of a query head's segments; return (next step, following work item).

    `begin` is the step of this work item's first row tile.
    """
    _tensors, scalars, _shared, _barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    all_row_tiles = scalars.padded_len // BLOCK_M
    end = step + gl.sum(gl.maximum(ends - starts, 0), 0)
    done = 0
    while step < end:
        first, last, partial = _next_segment(starts, ends, done)
        done = last
        skip = 0
        if not FORM.DQ_ORDER:
            skip = gl.where(last - first < _SPREAD_ROWS // BLOCK_M, 0, tile % (last - first))
        for count in range(last - first):
            row_tile = first + count + skip
            row_tile = gl.where(row_tile < last, row_tile, row_tile - (last - first))
            if FORM.UPWARD:
                row_tile = gl.where(upward, all_row_tiles - 1 - row_tile, row_tile)
            if FORM.PERSISTENT and step + 1 == begin + row_tiles:
                following = _draw_work(args, FORM)
            dq_tile = (batch * scalars.heads + head) * all_row_tiles + row_tile
            _load_rows(
                batch, head, row_tile * BLOCK_M, mask_plane * 4 + partial * 2, dq_tile, kv_plane, tile, row_tiles, item,
                step, step == begin, args, FORM,
            )  # fmt: skip
            step += 1
    return step, following


@gluon.jit
def produce(args, FORM: gl.constexpr):
    """Producer: schedule key tiles, and load them with the rows that see them."""
    tensors, scalars, shared, barriers = args
    group = scalars.heads // scalars.kv_heads
    mask_per_member = scalars.mask_heads > scalars.kv_heads
    n_work = scalars.kv_planes * scalars.n_columns
    work = _take_work(gl.program_id(0), args, FORM)
    if FORM.PERSISTENT and FORM.DQ_ORDER:
        work = _draw_work(args, FORM)
    upward = False
    if FORM.UPWARD:
        upward = gl.load(tensors.schedule + 3) != 0
    item = 0
    step = 0
    while work < n_work:
        tile, kv_plane = _locate_key_tile(work, args, FORM)
        batch = kv_plane // scalars.kv_heads
        first_head = kv_plane % scalars.kv_heads * group
        mask_plane, starts, ends = _load_segments(batch, first_head, tile, upward, args, FORM)
        row_tiles = gl.sum(ends - starts, 0)
        low = _first_row_tile(starts, ends, 0)
        if mask_per_member:
            for member in range(1, group):
                _, other_starts, other_ends = _load_segments(batch, first_head + member, tile, upward, args, FORM)
                row_tiles += gl.sum(other_ends - other_starts, 0)
                low = gl.minimum(low, _first_row_tile(other_starts, other_ends, 0))
        else:
            row_tiles *= group
        following = n_work
        if row_tiles == 0:
            if FORM.PERSISTENT:
                following = _draw_work(args, FORM)
            _load_rows(
                batch, first_head, scalars.padded_len, mask_plane * 4, 0, kv_plane, tile, row_tiles, item, step, True,
                args, FORM,
            )  # fmt: skip
            step += 1
        begin = step
        end = step + row_tiles
        if FORM.DQ_ORDER:
            # All query heads walk the band [low, high) before the next, which begins at the first row tile of any.
            band = gl.load(tensors.schedule + 1) // FORM.BLOCK_M
            while step < end:
                high = (low // band + 1) * band
                next_low = NEVER
                for member in range(group):
                    if mask_per_member:
                        mask_plane, starts, ends = _load_segments(batch, first_head + member, tile, upward, args, FORM)
                    step, following = _load_row_tiles(
                        gl.maximum(starts, low), gl.minimum(ends, high), upward, batch, first_head + member,
                        mask_plane, kv_plane, tile, row_tiles, item, step, begin, following, args, FORM,
                    )  # fmt: skip
                    next_low = gl.minimum(next_low, _first_row_tile(starts, ends, high))
                low = next_low
                band = gl.load(tensors.schedule + 2) // FORM.BLOCK_M
        else:
            for member in range(group):
                if member > 0:
                    mask_plane, starts, ends = _load_segments(batch, first_head + member, tile, upward, args, FORM)
                step, following = _load_row_tiles(
                    starts, ends, upward, batch, first_head + member, mask_plane, kv_plane, tile, row_tiles, item, step,
                    begin, following, args, FORM,
                )  # fmt: skip
        work = following
        item += 1
    stage = step & 1
    if step >= 2:
        named_barrier_sync(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))
    write_slot(shared.slots, stage * Slot.COUNT + Slot.ROW_TILES, -1)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.MASK, 0)  # SCORES_AHEAD scores this tile, too
    group_barrier()
    mbarrier.arrive(barriers.q_full.index(stage), count=1)


@gluon.jit
def accumulate_dq(args, FORM: gl.constexpr):
    """Third warpgroup: each row tile's share of dQ, in pieces of its rows or dims."""
    _tensors, _scalars, shared, barriers = args
    KEY_PARTS: gl.constexpr = FORM.KEY_PARTS
    PIECES: gl.constexpr = FORM.DQ_PIECES
    DQ_STAGES: gl.constexpr = FORM.DQ_STAGES
    DQ_ROWS: gl.constexpr = FORM.DQ_ROWS
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_ROWS, 16])
    no_dq = gl.zeros([64, DQ_ROWS], gl.float32, DQ)
    step = 0
    item = 0
    row_tiles = await_rows(step, args)
    while row_tiles >= 0:
        for _ in range(gl.maximum(row_tiles, 1)):
            stage = step & 1
            _clear_blind_rows(step, args, FORM)
            mbarrier.wait(barriers.ds_full.index(stage), full_phase(step, 2))
            # If it came earlier, the warpgroup might arrive twice before the producer passes once.
            release_rows(stage, FORM)
            zero = opaque_zero()
            for piece in gl.static_range(PIECES):
                number = step * PIECES + piece
                dq = no_dq
                for part in gl.static_range(KEY_PARTS):
                    dscores = shared.ds.index(stage * KEY_PARTS + part + zero)
                    k_index = item % FORM.KEY_STAGES * KEY_PARTS + part
                    keys = shared.k.index(k_index + zero).reshape([64, FORM.BLOCK_D])
                    if FORM.BLOCK_D == 64:
                        dscores = dscores.slice(piece * 64, 64, dim=1)
                    else:
                        keys = keys.slice(piece * 64, 64, dim=1)
                    if DQ_ROWS == 32:  # transposed: a product has at least 64 rows
                        dq = warpgroup_mma(keys.permute((1, 0)), dscores, dq, use_acc=part > 0, is_async=True)
                    else:
                        dq = warpgroup_mma(dscores.permute((1, 0)), keys, dq, use_acc=part > 0, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
                mbarrier.wait(barriers.dq_free.index(number % DQ_STAGES), free_phase(number, DQ_STAGES))
                _stage_dq(dq, shared.dq.index(number % DQ_STAGES))
                mbarrier.arrive(barriers.dq_full.index(number % (2 * DQ_STAGES)), count=1)
            mbarrier.arrive(barriers.ds_free.index(stage), count=1)
            step += 1
        item += 1
        row_tiles = await_rows(step, args)


@gluon.jit
def _count_key_tile(semaphore, row_tiles):
    """Count the key tile at a row tile's semaphore, once its sums are in memory."""
    if row_tiles > 0:
        wait_for_writes()
        group_barrier()
        gl.atomic_add(semaphore, 1, sem="release")


@gluon.jit
def store_gradients(WARP: gl.constexpr, args, FORM: gl.constexpr):
    """Store warp: add dQ to `dq_accum` per row tile, and store dK and dV unless SCATTER.

    Two store warps alternate between row tiles, and each stores one of two parts of the keys. If values have fewer
    stages than keys, store warps load the values.

    With DQ_ORDER, a warp counts the key tile in the other warp's turn, while the next rows load.
    """
    STORE_WARPS: gl.constexpr = FORM.STORE_WARPS
    KEY_PARTS: gl.constexpr = FORM.KEY_PARTS
    PIECES: gl.constexpr = FORM.DQ_PIECES
    DQ_STAGES: gl.constexpr = FORM.DQ_STAGES
    BEHIND: gl.constexpr = 1 if DQ_STAGES > 2 else 0  # pieces that TMA may still read when the next is added
    if WARP >= STORE_WARPS:
        return
    tensors, scalars, shared, barriers = args
    step = 0
    item = 0
    row_tiles = await_rows(step, args)
    while row_tiles >= 0:
        v_stage = item % FORM.VALUE_STAGES
        tile = read_row_slot(step, Slot.KEY_TILE, args)
        kv_plane = read_row_slot(step, Slot.KV_PLANE, args)
        if FORM.VALUE_STAGES < FORM.KEY_STAGES:  # the last gradients have left the values' place
            do_full = barriers.do_full.index(step % FORM.DO_STAGES)
            _load_keys(
                tensors.v, shared.v, do_full, kv_plane, scalars.kv_heads, tile, v_stage, KEY_PARTS, WARP, STORE_WARPS
            )  # fmt: skip
        begin = step
        end = step + gl.maximum(row_tiles, 1)
        added = 0  # last row tile to which this warp added
        while step < end:
            stage = step & 1
            dq_tile = read_slot(shared.slots, stage * Slot.COUNT + Slot.DQ_TILE)
            mask = read_slot(shared.slots, stage * Slot.COUNT + Slot.MASK)
            row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
            group_barrier()
            release_rows(stage, FORM)
            if step % STORE_WARPS == WARP:
                if FORM.DQ_ORDER:
                    row_tile = (mask // 4).to(gl.int64) * (scalars.padded_len // FORM.BLOCK_M) + row // FORM.BLOCK_M
                    at = tensors.dq_ranks + row_tile * scalars.n_kv + tile // FORM.SUBTILES
                    rank = gl.load(at, mask=row_tiles > 0, other=0).to(gl.int32)
                    rank = rank * FORM.SUBTILES + tile % FORM.SUBTILES
                for piece in gl.static_range(PIECES):
                    number = step * PIECES + piece
                    full = barriers.dq_full.index(number % (2 * DQ_STAGES))
                    mbarrier.wait(full, full_phase(number, 2 * DQ_STAGES))
                    if row_tiles > 0:
                        if FORM.DQ_ORDER and piece == 0:
                            wait_for_count(tensors.dq_semaphores + dq_tile, rank)
                        first = (dq_tile * PIECES + piece) * (2 * FORM.DQ_ROWS)
                        tma_reduce_add(tensors.dq_accum, [first, 0], shared.dq.index(number % DQ_STAGES))
                    tma_store_wait(BEHIND)
                    if piece >= BEHIND:
                        mbarrier.arrive(barriers.dq_free.index((number - BEHIND) % DQ_STAGES), count=1)
                if BEHIND > 0:
                    tma_store_wait(0)
                    mbarrier.arrive(barriers.dq_free.index((step * PIECES + PIECES - 1) % DQ_STAGES), count=1)
                added = dq_tile
            elif FORM.DQ_ORDER and step > begin:
                _count_key_tile(tensors.dq_semaphores + added, row_tiles)
            step += 1
            mbarrier.wait(barriers.q_full.index(step & 1), full_phase(step, 2), pred=step < end)
        if FORM.DQ_ORDER and (step - 1) % STORE_WARPS == WARP:
            _count_key_tile(tensors.dq_semaphores + added, row_tiles)
        if WARP < KEY_PARTS:
            full = barriers.dkv_full.index(v_stage * min(STORE_WARPS, KEY_PARTS) + WARP)
            mbarrier.wait(full, full_phase(item, FORM.VALUE_STAGES))
            if not FORM.SCATTER:
                for part in gl.static_range(WARP, KEY_PARTS, STORE_WARPS):
                    at = [kv_plane // scalars.kv_heads, kv_plane % scalars.kv_heads, (tile * KEY_PARTS + part) * 64, 0]
                    tma_store(tensors.dk, at, shared.k.index(item % FORM.KEY_STAGES * KEY_PARTS + part))
                    tma_store(tensors.dv, at, shared.v.index(v_stage * KEY_PARTS + part))
                tma_store_wait(0)
            mbarrier.arrive(barriers.keys_free.index(item % FORM.KEY_STAGES), count=1)
        item += 1
        row_tiles = await_rows(step, args)


@gluon.jit
def downcast(x, dtype: gl.constexpr):
    """Return float32 `x` in the 16-bit `dtype`, packed two per register at once to free registers."""
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return pairs


@gluon.jit
def upcast(x, dtype: gl.constexpr):
    """Return `x`, in the 16-bit `dtype`, as float32; the inverse of `downcast`."""
    if dtype == gl.bfloat16:
        UNPACK: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        UNPACK: gl.constexpr = (
            "{ .reg .f16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        )
    return gl.inline_asm_elementwise(UNPACK, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _lane_bits_below(bound, lane, COUNT: gl.constexpr):
    """Return words whose bits, one per each of a lane's COUNT rows, mark rows below `bound`.

    Four lanes share the rows: a lane has rows 2 * lane and 2 * lane + 1 of every 8.
    """
    bound = bound - 2 * lane
    count = (bound >> 3) * 2 + gl.minimum(bound & 7, 2)
    return bits_below(gl.minimum(count, COUNT))


@gluon.jit
def _decode_mask(stage, args, PART: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (whether a tile is partial, words [64, 4] with a bit per row of a lane, 1 where visible).

    PART selects 64 keys of the tile.
    """
    tensors, scalars, shared, _barriers = args
    CAUSAL: gl.constexpr = FORM.CAUSAL
    N: gl.constexpr = FORM.N
    END: gl.constexpr = end_bound(N, CAUSAL)
    OTHER_START: gl.constexpr = other_start_bound(N, CAUSAL)
    OTHER_END: gl.constexpr = other_end_bound(N, CAUSAL)
    COUNT: gl.constexpr = FORM.BLOCK_M // 4
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    hidden = gl.zeros([64, 4], gl.int32, WORDS)
    mask = read_slot(shared.slots, stage * Slot.COUNT + Slot.MASK)
    partial = (mask & 2) != 0
    if partial:
        row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
        column = read_slot(shared.slots, stage * Slot.COUNT + Slot.KEY_TILE) * FORM.KEY_PARTS * 64 + PART * 64
        columns = gl.expand_dims(column + gl.arange(0, 64, gl.SliceLayout(1, WORDS)), 1)  # [64, 1]
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)  # [1, 4]
        inside = columns < scalars.kv_len
        at = tensors.indices + ((mask // 4).to(gl.int64) * scalars.kv_len + columns) * N
        hidden = -1 - _lane_bits_below(gl.load(at, mask=inside, other=0) - row, lane, COUNT)
        if END is not None:
            end = gl.load(at + END, mask=inside, other=NEVER) - row
            hidden = hidden & _lane_bits_below(end, lane, COUNT)
        if OTHER_START is not None:
            other_start = gl.load(at + OTHER_START, mask=inside, other=0) - row
            other_end = gl.load(at + OTHER_END, mask=inside, other=0) - row
            other = _lane_bits_below(other_end, lane, COUNT) & (-1 - _lane_bits_below(other_start, lane, COUNT))
            hidden = hidden | other
        elif OTHER_END is not None:
            other_end = gl.load(at + OTHER_END, mask=inside, other=0) - row
            hidden = hidden | _lane_bits_below(other_end, lane, COUNT)
        if CAUSAL:
            hidden = hidden | _lane_bits_below(columns - (scalars.kv_len - scalars.q_len) - row, lane, COUNT)
    return partial, -1 - hidden


@gluon.jit
def softmax_weights(
    scores, stage, args, PART: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Wait for the scores [64, BLOCK_M], the last product issued; return weights and `slopes`.

    `slopes` turn gradients of weights into gradients of scores: weights times the cap's slope.
    """
    _tensors, scalars, shared, _barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    SPLIT: gl.constexpr = [64, BLOCK_M // 8, 4, 2]
    PIECES: gl.constexpr = gl.reshape(gl.zeros([64, BLOCK_M], gl.float32, LAYOUT), SPLIT).type.layout
    partial, visible = _decode_mask(stage, args, PART, FORM, PIECES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if FORM.CAP:  # less exact near 0 than `softcap_tanh`, and in fewer registers
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (scalars.cap_factor * (2.0 * LOG2_E))))
    lse = gl.expand_dims(shared.lse.index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.exp2(scores * scalars.factor - lse)
    if partial:
        pieces, words = gl.broadcast(gl.reshape(weights, SPLIT), gl.expand_dims(gl.expand_dims(visible, 1), 3))
        weights = gl.convert_layout(gl.reshape(keep_marked(pieces, words), [64, BLOCK_M]), LAYOUT)
    narrow = downcast(weights, DTYPE)
    slopes = narrow
    if FORM.CAP:
        slopes = downcast(weights * (1.0 - scores * scores), DTYPE)
    return narrow, slopes


@gluon.jit
def _stage_dq(dq, dq_piece):
    """Store a piece of dQ [64, N] to shared memory, each thread's four neighbours together against bank conflicts."""
    N: gl.constexpr = dq.shape[1]
    dq_piece.store(dq.reshape([4, 2, 4, 2, N // 8, 4, 2]).permute([4, 0, 2, 3, 5, 1, 6]).reshape([2 * N, 32]))
    fence_async_shared()
    group_barrier()


@gluon.jit
def stage_gradient(
    gradient, high, scale, tile, rows, kv_plane, column, args,
    HIGH: gl.constexpr, HEAD_DIM: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Put a scaled gradient of 64 keys in the place of keys or values: its first dims, and if HIGH, as many more."""
    _tensors, _scalars, shared, _barriers = args
    LOW: gl.constexpr = gradient.shape[1]
    tile = tile.reshape([64, tile.shape[3]])
    tile.slice(0, LOW, dim=1).store(downcast(gradient * scale, shared.q.dtype))
    if HIGH > 0:
        tile.slice(LOW, HIGH, dim=1).store(downcast(high * scale, shared.q.dtype))
    if FORM.SCATTER:
        _scatter_rows(tile, rows, HEAD_DIM, kv_plane, column, args)


@gluon.jit
def _scatter_rows(tile, rows, head_dim: gl.constexpr, kv_plane, column, args):
    """Store a tile [64, COLUMNS] of gradients to the rows, of [B, Skv, Hkv, head_dim], that `k_order` names."""
    tensors, scalars, _shared, _barriers = args
    COLUMNS: gl.constexpr = tile.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    keys = column + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    order = tensors.k_order + kv_plane.to(gl.int64) * scalars.kv_len
    target = gl.load(order + keys, mask=keys < scalars.kv_len, other=0)
    batch = (kv_plane // scalars.kv_heads).to(gl.int64)
    at = gl.expand_dims(batch * scalars.kv_len + target, 1) * scalars.kv_heads + kv_plane % scalars.kv_heads
    dims = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS)), 0)
    inside = gl.expand_dims(keys < scalars.kv_len, 1) & (dims < head_dim)
    group_barrier()
    gl.store(rows + (at * head_dim + dims), tile.load(ROWS), mask=inside)
