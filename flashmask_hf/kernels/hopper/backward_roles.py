"""Device code that the two forms of the Hopper backward share: the warps that load and store, and softmax weights.

`backward_kernel` draws the roles of a program. The producer schedules tiles of keys and loads them with the rows that
see them; the store warps add dQ to its sums and store dK and dV. The barriers and the shared memory that they use have
the same names in both forms.
"""


# Device code: a tile or a constexpr reads as an int or a function there.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

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
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    wait_for_count,
    wait_for_writes,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.hopper.pipeline import NEVER, read_slot, write_slot
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound
from flashmask_hf.kernels.shared.device import LOG2_E
from flashmask_hf.tile_plan import PARTIAL_SEGMENTS, VISIBLE_SEGMENTS

__all__ = [
    "Form",
    "NamedBarrier",
    "Scalars",
    "Slot",
    "Tensors",
    "downcast",
    "produce",
    "release_dout",
    "release_rows",
    "scatter_rows",
    "softmax_weights",
    "stage_dq",
    "store_gradients",
    "upcast",
]

_VISIBLE_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS)
_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS + PARTIAL_SEGMENTS)

_SPREAD_ROWS = gl.constexpr(4096)
"""Rows of a segment from which programs begin it in different places, so that neighbours do not meet in dQ."""


_DO_THREADS = gl.constexpr(2 * 128 + 32)
"""Threads at DO_FREE: two warpgroups, and the producer, which waits for them."""


@device_enum
class Slot:
    """Numbers that describe a tile of rows and the tile of keys that it is walked for."""

    ROW = 0
    """First query row."""
    MASK = 1
    """Index of the mask head over the batch, times 2, plus 1 if the tile is partial."""
    DQ_TILE = 2
    """Index of the tile in `dq_accum`."""
    KV_PLANE = 3
    """batch * kv_heads + key-value head"""
    KEY_TILE = 4
    ROW_TILES = 5
    """Tiles of rows of the tile of keys. 0: no row sees it; one tile past the end of a head is walked. -1: the end."""
    COUNT = 6


@device_enum
class NamedBarrier:
    """Ids of hardware barriers. An arrival at an mbarrier would first cost a warpgroup a barrier of its own warps."""

    ROWS_FREE = 8
    """First of two, one for each stage: nobody needs a tile of rows and its slots any more."""
    DO_FREE = 10
    """Nobody needs the gradients of the output any more, if they have one stage."""


class Tensors(NamedTuple):
    """Global memory."""

    q: Any  # descriptor, tiles [BLOCK_M, BLOCK_D]
    k: Any  # descriptor, tiles [64, BLOCK_D]
    v: Any  # descriptor, tiles [64, BLOCK_V]
    dout: Any  # descriptor, tiles [BLOCK_M, BLOCK_V]
    dq_accum: Any  # descriptor of float32 sums, tiles [2 * DQ_ROWS, 32] in the order of `stage_dq`
    dk: Any  # descriptor, tiles [64, BLOCK_D]
    dv: Any  # descriptor, tiles [64, BLOCK_V]
    dk_rows: Any  # `dk` as a pointer if SCATTER
    dv_rows: Any  # `dv` as a pointer if SCATTER
    k_order: Any  # int32 [B, Hkv, Skv] if SCATTER: where each row of dk and dv is put
    lse: Any  # float32 [B, Hq, Sq]
    delta: Any  # float32 [B, Hq, Sq]
    indices: Any  # int32 [mask batch, mask heads, Skv, N]
    segments: Any  # int32 [mask batch, mask heads, n_kv, segments, 2], of the plan or, if DQ_ORDER, of `DqOrder`
    dq_ranks: Any  # these four only if DQ_ORDER, see `dq_order.DqOrder`
    dq_semaphores: Any
    key_tile_order: Any
    schedule: Any
    work_order: Any  # int32 if PERSISTENT and not DQ_ORDER, see `work_order`
    counter: Any  # int32 [1] if PERSISTENT: tiles of keys taken


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
    n_kv: Any  # tiles of keys of a head in `segments`
    n_columns: Any  # tiles of keys of a head
    padded_len: Any  # rows of a head in `dq_accum`
    scale: Any
    factor: Any
    cap_factor: Any


class Form(NamedTuple):
    """Compile-time constants."""

    CAUSAL: bool
    N: int
    CAP: bool
    SCATTER: bool
    """Whether rows of dK and dV are put where `k_order` says."""
    DQ_ORDER: bool
    """Whether tiles of keys add to dQ in a fixed order, which takes two store warps."""
    UPWARD: bool
    """Whether the schedule of that order may be that tiles of keys walk their rows upwards."""
    PERSISTENT: bool
    """Whether there are more tiles of keys than programs."""
    BLOCK_M: int
    """Query rows of a tile."""
    BLOCK_D: int
    """Columns of a tile of queries or keys, of which those past HEAD_DIM are 0."""
    BLOCK_V: int
    """Columns of a tile of values, of which those past V_HEAD_DIM are 0."""
    TAIL: int
    """Columns of queries and keys past the first BLOCK_V that may not be 0, if a tile of them is wider."""
    DQ_PIECES: int
    """Pieces of 64 columns of a tile of dQ."""
    DQ_ROWS: int
    """Query rows of a piece: 64, or 32 if a tile has no more. Then the piece is made transposed, [64, 32]."""
    HEAD_DIM: int
    """Columns of queries and keys."""
    V_HEAD_DIM: int
    """Columns of values."""
    DEPTH: int
    """Columns of queries and keys that scores are summed over; the others are 0."""
    V_DEPTH: int
    """Columns of values that gradients of weights are summed over."""
    KEY_PARTS: int
    """Tiles of 64 keys that a program takes together."""
    SEGMENT_ROWS: int
    """Query rows of a tile in `segments`."""
    SUBTILES: int
    """Tiles of keys in one of `segments`."""
    KEY_STAGES: int
    """Stages of keys."""
    VALUE_STAGES: int
    """Stages of values, as many as of keys or one."""
    DO_STAGES: int
    """Stages of the output's gradients."""
    DQ_STAGES: int
    """Pieces of dQ in shared memory."""
    STORE_WARPS: int
    """Warps that store gradients."""
    SCORES_AHEAD: bool
    """Whether `backward_kernel` makes the scores of the next tile of rows beside dK; `backward_wide` does not ask."""


@gluon.constexpr_function
def _threads(store_warps):
    """Return the threads at ROWS_FREE: three warpgroups, the producer, which waits for them, and the store warps."""
    return 3 * 128 + 32 + 32 * store_warps


@gluon.jit
def release_rows(stage, FORM: gl.constexpr):
    """Arrive at ROWS_FREE for one of the roles, which needs a tile of rows and its slots no more."""
    named_barrier_arrive(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))


@gluon.jit
def release_dout():
    """Arrive at DO_FREE for one of the two warpgroups that read the only stage of the output's gradients."""
    named_barrier_arrive(NamedBarrier.DO_FREE, _DO_THREADS)


@gluon.jit
def _locate_key_tile(work, args, FORM: gl.constexpr):
    """Return (tile of keys, key-value plane) of work item `work`. With DQ_ORDER, heads alternate (see `dq_order`)."""
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
    """Return the work item that is taken at `place`: the number of the place, or what `work_order` has there."""
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

    The first places are those of the programs' numbers, unless dQ has an order. Then a tile waits for those of lower
    numbers, and drawing every number makes sure that these have begun.
    """
    tensors, _scalars, _shared, _barriers = args
    place = gl.atomic_add(tensors.counter, 1)
    return place if FORM.DQ_ORDER else _take_work(place + gl.num_programs(0), args, FORM)


@gluon.jit
def _without_gap(starts, ends, first, last):
    """Return segments [starts, ends) without those of the row tiles [first, last) that are at their ends."""
    starts = gl.where(starts >= first, gl.maximum(starts, last), starts)
    ends = gl.where(ends <= last, gl.minimum(ends, first), ends)
    return starts, gl.maximum(starts, ends)


@gluon.jit
def _trim_segments(starts, ends, mask_plane, tile, args, FORM: gl.constexpr):
    """Return segments of row tiles without those at their ends that see no key of the tile `tile`.

    They are the plan's, whose tiles may have more rows and more keys.
    """
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
    """Return (mask plane, starts, ends): where a query head's mask is, and a segment of row tiles to walk per lane.

    `tile` is the tile of keys. If `upward`, row tiles are numbered from the last one.
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
    """Return the first row tile at or after `low` that is in any of the segments, or NEVER."""
    starts = gl.maximum(starts, low)
    return gl.min(gl.where(ends > starts, starts, NEVER), 0)


@gluon.jit
def _next_segment(starts, ends, done):
    """Return (first, last, partial) of the segment [first, last) that follows the first `done` row tiles."""
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
    """Load parts FIRST, FIRST + STEP, ... of PARTS in a tile of keys or values.

    `full` is the barrier of its first tile of rows, which counts the bytes of both together.
    """
    for part in gl.static_range(FIRST, PARTS, STEP):
        at = [kv_plane // kv_heads, kv_plane % kv_heads, (tile * PARTS + part) * 64, 0]
        tma_load(descriptor, at, full, tiles.index(stage * PARTS + part))


@gluon.jit
def _expect_rows(full, first, COLUMNS: gl.constexpr, FORM: gl.constexpr):
    """Expect the bytes of a tile of rows, and of the keys or values that come with the `first`."""
    if first:
        mbarrier.expect(full, (FORM.BLOCK_M + FORM.KEY_PARTS * 64) * COLUMNS * 2)
    else:
        mbarrier.expect(full, FORM.BLOCK_M * COLUMNS * 2)


@gluon.jit
def _load_dout(batch, head, row, step, first, args, FORM: gl.constexpr):
    """Load the output's gradients of a tile of rows."""
    tensors, _scalars, shared, barriers = args
    stage = step % FORM.DO_STAGES
    _expect_rows(barriers.do_full.index(stage), first, FORM.BLOCK_V, FORM)
    tma_load(tensors.dout, [batch, head, row, 0], barriers.do_full.index(stage), shared.do.index(stage))


@gluon.jit
def _load_rows(
    batch, head, row, mask, dq_tile, kv_plane, tile, row_tiles, item, step, first, args, FORM: gl.constexpr
):  # fmt: skip
    """Load row tile number `step` of the program and write its slots.

    The keys of work item `item` come with its `first` row tile, and the values if they have as many stages.
    """
    tensors, scalars, shared, barriers = args
    LANES: gl.constexpr = gl.BlockedLayout([FORM.BLOCK_M // 32], [32], [1], [0])
    rows = row + gl.arange(0, FORM.BLOCK_M, LANES)
    at = (batch.to(gl.int64) * scalars.heads + head) * scalars.q_len
    lse = gl.load(tensors.lse + at + rows, mask=rows < scalars.q_len, other=float("inf"))
    delta = gl.load(tensors.delta + at + rows, mask=rows < scalars.q_len, other=0.0)
    stage = step & 1
    if step >= 2:
        named_barrier_sync(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))
    # Keys and queries are on their way before their barrier is told how many bytes to expect. It opens only then, when
    # what is stored here has arrived, too.
    tma_load(tensors.q, [batch, head, row, 0], barriers.q_full.index(stage), shared.q.index(stage))
    if FORM.DO_STAGES == 2:
        _load_dout(batch, head, row, step, first, args, FORM)
    if first:
        k_stage = item % FORM.KEY_STAGES
        mbarrier.wait(barriers.keys_free.index(k_stage), ((item // FORM.KEY_STAGES) & 1) ^ 1)
        full = barriers.q_full.index(stage)
        _load_keys(tensors.k, shared.k, full, kv_plane, scalars.kv_heads, tile, k_stage, FORM.KEY_PARTS)
        if FORM.VALUE_STAGES == FORM.KEY_STAGES:
            full = barriers.do_full.index(step % FORM.DO_STAGES)
            _load_keys(tensors.v, shared.v, full, kv_plane, scalars.kv_heads, tile, k_stage, FORM.KEY_PARTS)
    lse = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    shared.lse.index(stage).store(lse)
    shared.delta.index(stage).store(delta)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.ROW, row)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.MASK, mask)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.DQ_TILE, dq_tile)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.KV_PLANE, kv_plane)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.KEY_TILE, tile)
    write_slot(shared.slots, stage * Slot.COUNT + Slot.ROW_TILES, row_tiles)
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
    """Load the row tiles of a query head's segments, and draw the next work item before the last one of this item.

    `begin` is the step of the work item's first row tile, and `upward` as in `_load_segments`. Returns the next (step,
    following).
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
                batch, head, row_tile * BLOCK_M, mask_plane * 2 + partial, dq_tile, kv_plane, tile, row_tiles, item,
                step, step == begin, args, FORM,
            )  # fmt: skip
            step += 1
    return step, following


@gluon.jit
def produce(args, FORM: gl.constexpr):
    """Producer: schedule tiles of keys, and load them and the rows that see them."""
    tensors, scalars, shared, barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
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
                batch, first_head, scalars.padded_len, mask_plane * 2, 0, kv_plane, tile, row_tiles, item, step, True,
                args, FORM,
            )  # fmt: skip
            step += 1
        begin = step
        end = step + row_tiles
        if FORM.DQ_ORDER:
            # All query heads walk the row tiles [low, high) before the next band, which begins where one sees rows.
            band = gl.load(tensors.schedule + 1) // BLOCK_M
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
                band = gl.load(tensors.schedule + 2) // BLOCK_M
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
    write_slot(shared.slots, stage * Slot.COUNT + Slot.MASK, 0)  # SCORES_AHEAD makes scores of this tile, too
    group_barrier()
    mbarrier.arrive(barriers.q_full.index(stage), count=1)


@gluon.jit
def _count_key_tile(semaphore, row_tiles):
    """Count the key tile at the semaphore of a tile of dQ, once what it added there is in memory."""
    if row_tiles > 0:
        wait_for_writes()
        group_barrier()
        gl.atomic_add(semaphore, 1, sem="release")


@gluon.jit
def store_gradients(WARP: gl.constexpr, args, FORM: gl.constexpr):
    """Store warp: add dQ to `dq_accum`, tile by tile of rows, and store dK and dV unless SCATTER.

    Two store warps alternate between tiles of rows. If there are two parts of the keys, too, each stores the gradients
    of one, else the first warp does. With one store warp, a second one that was started is idle. Values of fewer stages
    than the keys are loaded here, once the gradients before are gone.

    With DQ_ORDER, a warp waits until its sums are in memory before it counts the key tile. It does so in the turn of
    the other warp, when both have read the slots of that turn: the rows after them are loaded meanwhile.
    """
    STORE_WARPS: gl.constexpr = FORM.STORE_WARPS
    VALUE_STAGES: gl.constexpr = FORM.VALUE_STAGES
    KEY_PARTS: gl.constexpr = FORM.KEY_PARTS
    PIECES: gl.constexpr = FORM.DQ_PIECES
    DQ_STAGES: gl.constexpr = FORM.DQ_STAGES
    BEHIND: gl.constexpr = 1 if DQ_STAGES > 2 else 0  # pieces that TMA may still read when the next one is added
    if WARP >= STORE_WARPS:
        return
    tensors, scalars, shared, barriers = args
    step = 0
    item = 0
    mbarrier.wait(barriers.q_full.index(0), 0)
    row_tiles = read_slot(shared.slots, Slot.ROW_TILES)
    while row_tiles >= 0:
        v_stage = item % VALUE_STAGES
        tile = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.KEY_TILE)
        kv_plane = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.KV_PLANE)
        if VALUE_STAGES < FORM.KEY_STAGES:  # only now are the gradients gone from the values' place
            do_full = barriers.do_full.index(step % FORM.DO_STAGES)
            _load_keys(
                tensors.v, shared.v, do_full, kv_plane, scalars.kv_heads, tile, v_stage, KEY_PARTS, WARP, STORE_WARPS
            )  # fmt: skip
        begin = step
        end = step + gl.maximum(row_tiles, 1)
        added = 0  # the last tile of dQ to which this warp has added
        while step < end:
            stage = step & 1
            dq_tile = read_slot(shared.slots, stage * Slot.COUNT + Slot.DQ_TILE)
            mask = read_slot(shared.slots, stage * Slot.COUNT + Slot.MASK)
            row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
            group_barrier()
            release_rows(stage, FORM)
            if step % STORE_WARPS == WARP:
                if FORM.DQ_ORDER:
                    row_tile = (mask // 2).to(gl.int64) * (scalars.padded_len // FORM.BLOCK_M) + row // FORM.BLOCK_M
                    at = tensors.dq_ranks + row_tile * scalars.n_kv + tile // FORM.SUBTILES
                    rank = gl.load(at, mask=row_tiles > 0, other=0).to(gl.int32)
                    rank = rank * FORM.SUBTILES + tile % FORM.SUBTILES
                for piece in gl.static_range(PIECES):
                    number = step * PIECES + piece
                    full = barriers.dq_full.index(number % (2 * DQ_STAGES))
                    mbarrier.wait(full, (number // (2 * DQ_STAGES)) & 1)
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
            # The next tile of rows, whose slots say what there is to do.
            mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1, pred=step < end)
        if FORM.DQ_ORDER and (step - 1) % STORE_WARPS == WARP:
            _count_key_tile(tensors.dq_semaphores + added, row_tiles)
        if WARP < KEY_PARTS:
            full = barriers.dkv_full.index(v_stage * min(STORE_WARPS, KEY_PARTS) + WARP)
            mbarrier.wait(full, (item // VALUE_STAGES) & 1)
            if not FORM.SCATTER:
                for part in gl.static_range(WARP, KEY_PARTS, STORE_WARPS):
                    at = [kv_plane // scalars.kv_heads, kv_plane % scalars.kv_heads, (tile * KEY_PARTS + part) * 64, 0]
                    tma_store(tensors.dk, at, shared.k.index(item % FORM.KEY_STAGES * KEY_PARTS + part))
                    tma_store(tensors.dv, at, shared.v.index(v_stage * KEY_PARTS + part))
                tma_store_wait(0)
            mbarrier.arrive(barriers.keys_free.index(item % FORM.KEY_STAGES), count=1)
        item += 1
        mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1)
        row_tiles = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.ROW_TILES)


@gluon.jit
def downcast(x, dtype: gl.constexpr):
    """Return float32 `x` in the 16-bit `dtype`, packed two to a register at once, so that the wide ones can go."""
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
    """Return words with a bit for each of COUNT rows of a lane of four, set where the row is below `bound`.

    A lane holds pairs of rows: 2 * lane and the next, and so on every 8 rows.
    """
    bound = bound - 2 * lane
    count = (bound >> 3) * 2 + gl.minimum(bound & 7, 2)
    return bits_below(gl.minimum(count, COUNT))


@gluon.jit
def _decode_mask(stage, args, PART: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (whether a tile is partial, words [64, 4] with a bit for each row of a lane, 1 where visible).

    The keys are part PART of the tile.
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
    partial = (mask & 1) != 0
    if partial:
        row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
        column = read_slot(shared.slots, stage * Slot.COUNT + Slot.KEY_TILE) * FORM.KEY_PARTS * 64 + PART * 64
        columns = gl.expand_dims(column + gl.arange(0, 64, gl.SliceLayout(1, WORDS)), 1)  # [64, 1]
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)  # [1, 4]
        inside = columns < scalars.kv_len
        at = tensors.indices + ((mask // 2).to(gl.int64) * scalars.kv_len + columns) * N
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
    """Wait for the scores [64, BLOCK_M], the last product issued.

    Returns:
        their softmax weights, and the factors that turn gradients of weights into gradients of scores: the weights,
        times the slope of the softcap.
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
def stage_dq(dq, dq_piece):
    """Put a piece of dQ, a product [64, N], in shared memory, a thread's four neighbours together: no conflicts."""
    N: gl.constexpr = dq.shape[1]
    dq_piece.store(dq.reshape([4, 2, 4, 2, N // 8, 4, 2]).permute([4, 0, 2, 3, 5, 1, 6]).reshape([2 * N, 32]))
    fence_async_shared()
    group_barrier()


@gluon.jit
def scatter_rows(tile, rows, head_dim: gl.constexpr, kv_plane, column, args, COLUMNS: gl.constexpr):
    """Store a tile [64, COLUMNS] of gradients that this warpgroup put in shared memory where `k_order` says.

    `rows` is the gradient [B, Skv, Hkv, head_dim], and `column` the first key of the tile.
    """
    tensors, scalars, _shared, _barriers = args
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
