"""Device code of the Hopper backward: one persistent, warp-specialized kernel over key tiles (FlashMask, algorithm 2).

A program stays on a multiprocessor and takes one tile of 128 keys of one key-value head after the other from a counter
(persistent tile scheduler). It keeps the keys and values in shared memory and walks the tiles of query rows that see
them, of all query heads that share the head. Scores are made transposed, [keys, rows], so that softmax weights and
their gradients stay in registers as operands for dV and dK. Every warp has one role, and the roles meet at barriers:

    producer               dK, dV (2 warpgroups,            dQ (1 warpgroup)         store (1 or 2 warps)
    (1 warp)               64 keys each)

    take a tile of keys
    for each tile of rows:
    TMA load K (first) -.
    TMA load Q ---------'- q_full --> S' = K Q'
      log-sum-exp, delta, slots       P' = exp2(S' - lse), 0 where hidden
    TMA load V (first) -.
    TMA load dO --------'- do_full -> dP' = V dO'
                                      dV += P' dO
                                      dS' = P' (dP' - delta)
                                      dK += dS' Q
                           dS' in shared memory -- ds_full -> dQ = dS K, in two halves
                                     <---------- ds_free -- (both halves are complete)
                                                            dQ in shared memory --- dq_full -> TMA add to dq_accum
                                                                      <------------ dq_free -- (TMA has read it)
    <--- ROWS_FREE ------------------ (dK, dV complete) -- (dS is there) ---------- (slots are read)
    after the last tile of rows, the epilogue:
                           dK, dV in the shared memory of K, V -------------------- dkv_full -> TMA store dK, dV
    <--- keys_free -------------------------------------------------------------------------- (TMA has read them)

    ROWS_FREE is a named barrier, the others are mbarriers. Tiles of rows with their log-sum-exp, delta and slots, dS
    and keys have two stages. Values have VALUE_STAGES: two with head_dim 64. With head_dim 128 there is room for one,
    and the store warps load the values, once the gradients before have left their place.

A kernel of its own, `scale_dq_kernel`, turns the float32 sums `dq_accum` into dQ.
"""

# Device code: a tile or a constexpr reads as an int or a function there.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

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
from flashmask_hf.kernels.hopper.pipeline import NEVER, issue_dots, piece_count, read_slot, write_slot
from flashmask_hf.kernels.shared.device import LOG2_E
from flashmask_hf.kernels.shared.intervals import end_column, other_end_column, other_start_column
from flashmask_hf.plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS

__all__ = ["BLOCK_N", "Form", "backward_kernel", "scale_dq_kernel"]

BLOCK_N = gl.constexpr(128)
"""Keys of a tile."""

_PLAN_ROWS = gl.constexpr(ROWS)
_VISIBLE_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS)
_SEGMENTS = gl.constexpr(VISIBLE_SEGMENTS + PARTIAL_SEGMENTS)

_SPREAD_ROWS = gl.constexpr(4096)
"""Rows of a segment from which programs begin it in different places, so that neighbours do not meet in dQ."""


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
    """Hardware barriers, by stage. An arrival at an mbarrier first costs a warpgroup a barrier of its own warps."""

    ROWS_FREE = 8
    """Nobody needs a tile of rows and its slots any more."""


class Tensors(NamedTuple):
    """Global memory."""

    q: Any  # descriptor, tiles [BLOCK_M, D]
    k: Any  # descriptor, tiles [64, D]
    v: Any  # descriptor, tiles [64, D]
    dout: Any  # descriptor, tiles [BLOCK_M, D]
    dq_accum: Any  # descriptor of float32 sums, tiles [128, 32] in the order of `_stage_dq`
    dk: Any  # descriptor, tiles [64, D]
    dv: Any  # descriptor, tiles [64, D]
    dk_rows: Any  # `dk` as a pointer if SCATTER
    dv_rows: Any  # `dv` as a pointer if SCATTER
    k_order: Any  # int32 [B, Hkv, Skv] if SCATTER: where each row of dk and dv is put
    lse: Any  # float32 [B, Hq, Sq]
    delta: Any  # float32 [B, Hq, Sq]
    indices: Any  # int32 [mask batch, mask heads, Skv, N]
    segments: Any  # int32 [mask batch, mask heads, n_kv, segments, 2], of the plan
    dq_ranks: Any  # these four only if DQ_ORDER, see `dq_order.DqOrder`
    dq_semaphores: Any
    key_tile_order: Any
    interleaved_heads: Any
    counter: Any  # int32 [1] if PERSISTENT: tiles of keys taken


class Scalars(NamedTuple):
    """Sizes, and factors of the scores (`Problem.factors`)."""

    heads: Any
    kv_heads: Any
    kv_planes: Any  # batch * kv_heads
    interleaved: Any  # key-value heads whose tiles of keys alternate, unless DQ_ORDER
    mask_batch: Any
    mask_heads: Any
    q_len: Any
    kv_len: Any
    n_q: Any
    n_kv: Any
    n_columns: Any  # tiles of keys of a head
    padded_len: Any  # rows of a head in `dq_accum`
    scale: Any
    factor: Any
    cap_factor: Any


class Shared(NamedTuple):
    """Shared memory."""

    q: Any  # [2, 1, 1, BLOCK_M, D]
    do: Any  # [2, 1, 1, BLOCK_M, D]
    k: Any  # [4, 1, 1, 64, D]: two stages of two halves
    v: Any  # [2 * VALUE_STAGES, 1, 1, 64, D]
    ds: Any  # [4, 64, BLOCK_M]: two stages of two halves of the keys, transposed
    dq: Any  # float32 [2, 128, 32]: two halves of one tile
    lse: Any  # float32 [2, BLOCK_M], in units of log2
    delta: Any  # float32 [2, BLOCK_M]
    slots: Any  # int32 [2 * Slot.COUNT, 1]


class Barriers(NamedTuple):
    """mbarriers."""

    keys_free: Any  # by stage
    dkv_full: Any  # by stage of the values and store warp
    q_full: Any  # by stage
    do_full: Any  # by stage
    ds_full: Any  # by stage
    ds_free: Any  # by stage
    dq_full: Any  # by stage and half, since store warps may alternate
    dq_free: Any  # by half


class Form(NamedTuple):
    """Compile-time constants."""

    CAUSAL: bool
    N: int
    CAP: bool
    SCATTER: bool
    """Whether rows of dK and dV are put where `k_order` says."""
    DQ_ORDER: bool
    """Whether tiles of keys add to dQ in a fixed order."""
    PERSISTENT: bool
    """Whether there are more tiles of keys than programs."""
    BLOCK_M: int
    """Query rows of a tile."""
    BLOCK_D: int
    """Columns of a tile, which are 0 past the head's."""
    HEAD_DIM: int
    """Columns of queries and keys."""
    V_HEAD_DIM: int
    """Columns of values."""
    DEPTH: int
    """Columns of queries and keys that scores are summed over; the others are 0."""
    V_DEPTH: int
    """Columns of values that gradients of weights are summed over."""
    SUBTILES: int
    """Tiles of keys in one of the plan."""
    VALUE_STAGES: int
    STORE_WARPS: int
    SCORES_AHEAD: bool
    """Whether the scores of the next tile of rows are made beside dK, see `_accumulate_dkv`."""


@gluon.constexpr_function
def _threads(store_warps):
    """Return the threads at ROWS_FREE: three warpgroups, the producer, which waits for them, and the store warps."""
    return 3 * 128 + 32 + 32 * store_warps


@gluon.jit
def _release_rows(stage, FORM: gl.constexpr):
    named_barrier_arrive(NamedBarrier.ROWS_FREE + stage, _threads(FORM.STORE_WARPS))


@gluon.jit
def _locate_key_tile(work, args, FORM: gl.constexpr):
    """Return (tile of keys, key-value plane) of work item `work`: heads alternate, so equal work is side by side."""
    tensors, scalars, _shared, _barriers = args
    interleaved = scalars.interleaved
    if FORM.DQ_ORDER:
        interleaved = gl.load(tensors.interleaved_heads)
    begin = work // (interleaved * scalars.n_columns) * interleaved
    nth = work - begin * scalars.n_columns
    width = gl.minimum(interleaved, scalars.kv_planes - begin)
    tile = nth // width
    plane = begin + nth % width
    if FORM.DQ_ORDER:
        groups = gl.where(scalars.mask_heads == 1, 1, scalars.kv_heads)
        line = (plane // scalars.kv_heads % scalars.mask_batch) * groups + plane % scalars.kv_heads % groups
        line = line * (scalars.n_columns // FORM.SUBTILES)
        tile_of_plan = gl.load(tensors.key_tile_order + line + tile // FORM.SUBTILES).to(gl.int32)
        tile = tile_of_plan * FORM.SUBTILES + tile % FORM.SUBTILES
    return tile, plane


@gluon.jit
def _draw_work(counter, FORM: gl.constexpr):
    """Return the number of the program's next work item.

    The first items are numbered like the programs, unless dQ has an order. Then a tile waits for those of lower
    numbers, and drawing every number makes sure that these have begun.
    """
    number = gl.atomic_add(counter, 1)
    return number if FORM.DQ_ORDER else number + gl.num_programs(0)


@gluon.jit
def _load_segments(segments, batch, head, args, FORM: gl.constexpr):
    """Return (mask plane, starts, ends): where a query head's mask is, and a segment of row tiles to walk per lane.

    `segments` points at those of the tile of keys under the first mask.
    """
    _tensors, scalars, _shared, _barriers = args
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mask_plane = (batch % scalars.mask_batch) * scalars.mask_heads + head // (scalars.heads // scalars.mask_heads)
    at = segments + mask_plane.to(gl.int64) * scalars.n_kv * _SEGMENTS * 2 + lanes * 2
    starts = gl.load(at, mask=lanes < _SEGMENTS, other=0) * (_PLAN_ROWS // FORM.BLOCK_M)
    ends = gl.load(at + 1, mask=lanes < _SEGMENTS, other=0) * (_PLAN_ROWS // FORM.BLOCK_M)
    return mask_plane, starts, ends


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
    descriptor, tiles, full, kv_plane, kv_heads, tile, stage, FIRST_HALF: gl.constexpr = 0, STEP: gl.constexpr = 1
):  # fmt: skip
    """Load halves FIRST_HALF, FIRST_HALF + STEP, ... of a tile of keys or values.

    `full` is the barrier of its first tile of rows, which counts the bytes of both together.
    """
    for half in gl.static_range(FIRST_HALF, 2, STEP):
        at = [kv_plane // kv_heads, kv_plane % kv_heads, tile * 128 + half * 64, 0]
        tma_load(descriptor, at, full, tiles.index(stage * 2 + half))


@gluon.jit
def _expect_rows(full, first, FORM: gl.constexpr):
    """Expect the bytes of a tile of rows, and of the keys or values that come with the `first`."""
    if first:
        mbarrier.expect(full, (FORM.BLOCK_M + 128) * FORM.BLOCK_D * 2)
    else:
        mbarrier.expect(full, FORM.BLOCK_M * FORM.BLOCK_D * 2)


@gluon.jit
def _load_rows(
    batch, head, row, mask, dq_tile, kv_plane, tile, row_tiles, item, step, first, args, FORM: gl.constexpr
):  # fmt: skip
    """Load row tile number `step` of the program and write its slots.

    The keys of work item `item` come with its `first` row tile, and the values if VALUE_STAGES is 2.
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
    if first:
        mbarrier.wait(barriers.keys_free.index(item & 1), ((item // 2) & 1) ^ 1)
        _load_keys(tensors.k, shared.k, barriers.q_full.index(stage), kv_plane, scalars.kv_heads, tile, item & 1)
        if FORM.VALUE_STAGES == 2:
            _load_keys(tensors.v, shared.v, barriers.do_full.index(stage), kv_plane, scalars.kv_heads, tile, item & 1)
    tma_load(tensors.q, [batch, head, row, 0], barriers.q_full.index(stage), shared.q.index(stage))
    _expect_rows(barriers.do_full.index(stage), first, FORM)
    tma_load(tensors.dout, [batch, head, row, 0], barriers.do_full.index(stage), shared.do.index(stage))
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
    _expect_rows(barriers.q_full.index(stage), first, FORM)


@gluon.jit
def _produce(args, FORM: gl.constexpr):
    """Producer: schedule tiles of keys, and load them and the rows that see them."""
    tensors, scalars, shared, barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    group = scalars.heads // scalars.kv_heads
    n_work = scalars.kv_planes * scalars.n_columns
    work = gl.program_id(0)
    if FORM.PERSISTENT and FORM.DQ_ORDER:
        work = _draw_work(tensors.counter, FORM)
    item = 0
    step = 0
    while work < n_work:
        tile, kv_plane = _locate_key_tile(work, args, FORM)
        batch = kv_plane // scalars.kv_heads
        first_head = kv_plane % scalars.kv_heads * group
        segments = tensors.segments + tile // FORM.SUBTILES * (_SEGMENTS * 2)
        mask_plane, starts, ends = _load_segments(segments, batch, first_head, args, FORM)
        row_tiles = gl.sum(ends - starts, 0)
        if scalars.mask_heads == scalars.heads:
            for member in range(1, group):
                _, other_starts, other_ends = _load_segments(segments, batch, first_head + member, args, FORM)
                row_tiles += gl.sum(other_ends - other_starts, 0)
        else:
            row_tiles *= group
        following = n_work
        if row_tiles == 0:
            if FORM.PERSISTENT:
                following = _draw_work(tensors.counter, FORM)
            _load_rows(
                batch, first_head, scalars.padded_len, mask_plane * 2, 0, kv_plane, tile, row_tiles, item, step, True,
                args, FORM,
            )  # fmt: skip
            step += 1
        begin = step
        end = step + row_tiles
        for member in range(group):
            head = first_head + member
            if member > 0:
                mask_plane, starts, ends = _load_segments(segments, batch, head, args, FORM)
            done = 0
            for _ in range(_SEGMENTS):
                first, last, partial = _next_segment(starts, ends, done)
                done = gl.maximum(done, last)
                skip = 0
                if not FORM.DQ_ORDER:
                    skip = gl.where(last - first < _SPREAD_ROWS // BLOCK_M, 0, tile % gl.maximum(last - first, 1))
                for count in range(last - first):
                    row_tile = first + count + skip
                    row_tile = gl.where(row_tile < last, row_tile, row_tile - (last - first))
                    if FORM.PERSISTENT and step + 1 == end:
                        following = _draw_work(tensors.counter, FORM)
                    dq_tile = (batch * scalars.heads + head) * (scalars.padded_len // BLOCK_M) + row_tile
                    _load_rows(
                        batch, head, row_tile * BLOCK_M, mask_plane * 2 + partial, dq_tile, kv_plane, tile, row_tiles,
                        item, step, step == begin, args, FORM,
                    )  # fmt: skip
                    step += 1
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
def _store(WARP: gl.constexpr, args, FORM: gl.constexpr):
    """Store warp: add dQ to `dq_accum`, tile by tile of rows, and store dK and dV unless SCATTER.

    Two store warps alternate between tiles of rows, and each stores the gradients of one warpgroup. With one, the
    second warp is idle. Values with one stage are loaded here, once the gradients before are gone.
    """
    STORE_WARPS: gl.constexpr = FORM.STORE_WARPS
    VALUE_STAGES: gl.constexpr = FORM.VALUE_STAGES
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
        if VALUE_STAGES == 1:  # only now are the gradients gone from the values' place
            do_full = barriers.do_full.index(step & 1)
            _load_keys(
                tensors.v, shared.v, do_full, kv_plane, scalars.kv_heads, tile, v_stage, WARP, STORE_WARPS
            )  # fmt: skip
        end = step + gl.maximum(row_tiles, 1)
        while step < end:
            stage = step & 1
            dq_tile = read_slot(shared.slots, stage * Slot.COUNT + Slot.DQ_TILE)
            mask = read_slot(shared.slots, stage * Slot.COUNT + Slot.MASK)
            row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
            group_barrier()
            _release_rows(stage, FORM)
            if step % STORE_WARPS == WARP:
                semaphore = tensors.dq_semaphores + dq_tile
                rank = 0
                if FORM.DQ_ORDER:
                    row_tile = (mask // 2).to(gl.int64) * scalars.n_q + row // _PLAN_ROWS
                    at = tensors.dq_ranks + row_tile * scalars.n_kv + tile // FORM.SUBTILES
                    rank = gl.load(at, mask=row_tiles > 0, other=0).to(gl.int32)
                    rank = rank * FORM.SUBTILES + tile % FORM.SUBTILES
                for half in gl.static_range(2):
                    mbarrier.wait(barriers.dq_full.index(stage * 2 + half), (step // 2) & 1)
                    if row_tiles > 0:
                        if FORM.DQ_ORDER and half == 0:
                            wait_for_count(semaphore, rank)
                        tma_reduce_add(tensors.dq_accum, [dq_tile * 256 + half * 128, 0], shared.dq.index(half))
                    tma_store_wait(0)
                    mbarrier.arrive(barriers.dq_free.index(half), count=1)
                if FORM.DQ_ORDER and row_tiles > 0:
                    wait_for_writes()
                    group_barrier()
                    gl.atomic_add(semaphore, 1, sem="release")
            step += 1
            # The next tile of rows, whose slots say what there is to do.
            mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1, pred=step < end)
        mbarrier.wait(barriers.dkv_full.index(v_stage * STORE_WARPS + WARP), (item // VALUE_STAGES) & 1)
        if not FORM.SCATTER:
            for half in gl.static_range(WARP, 2, STORE_WARPS):
                at = [kv_plane // scalars.kv_heads, kv_plane % scalars.kv_heads, tile * 128 + half * 64, 0]
                tma_store(tensors.dk, at, shared.k.index((item & 1) * 2 + half))
                tma_store(tensors.dv, at, shared.v.index(v_stage * 2 + half))
            tma_store_wait(0)
        mbarrier.arrive(barriers.keys_free.index(item & 1), count=1)
        item += 1
        mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1)
        row_tiles = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.ROW_TILES)


@gluon.jit
def _downcast(x, dtype: gl.constexpr):
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
def _upcast(x, dtype: gl.constexpr):
    """Return `x`, in the 16-bit `dtype`, as float32; the inverse of `_downcast`."""
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
def _decode_mask(stage, args, WARPGROUP: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (whether a tile is partial, words [64, 4] with a bit for each row of a lane, 1 where visible)."""
    tensors, scalars, shared, _barriers = args
    CAUSAL: gl.constexpr = FORM.CAUSAL
    N: gl.constexpr = FORM.N
    END: gl.constexpr = end_column(N, CAUSAL)
    OTHER_START: gl.constexpr = other_start_column(N, CAUSAL)
    OTHER_END: gl.constexpr = other_end_column(N, CAUSAL)
    COUNT: gl.constexpr = FORM.BLOCK_M // 4
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    hidden = gl.zeros([64, 4], gl.int32, WORDS)
    mask = read_slot(shared.slots, stage * Slot.COUNT + Slot.MASK)
    partial = (mask & 1) != 0
    if partial:
        row = read_slot(shared.slots, stage * Slot.COUNT + Slot.ROW)
        column = read_slot(shared.slots, stage * Slot.COUNT + Slot.KEY_TILE) * 128 + WARPGROUP * 64
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
def _softmax_weights(
    scores, stage, args, WARPGROUP: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr
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
    partial, visible = _decode_mask(stage, args, WARPGROUP, FORM, PIECES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if FORM.CAP:  # less exact near 0 than `softcap_tanh`, and in fewer registers
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (scalars.cap_factor * (2.0 * LOG2_E))))
    lse = gl.expand_dims(shared.lse.index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.exp2(scores * scalars.factor - lse)
    if partial:
        pieces, words = gl.broadcast(gl.reshape(weights, SPLIT), gl.expand_dims(gl.expand_dims(visible, 1), 3))
        weights = gl.convert_layout(gl.reshape(keep_marked(pieces, words), [64, BLOCK_M]), LAYOUT)
    narrow = _downcast(weights, DTYPE)
    slopes = narrow
    if FORM.CAP:
        slopes = _downcast(weights * (1.0 - scores * scores), DTYPE)
    return narrow, slopes


@gluon.jit
def _stage_dq(dq, dq_tiles, HALF: gl.constexpr):
    """Put half a tile of dQ [64, 64] in shared memory, a thread's four neighbours together: no bank conflicts."""
    pieces = dq.reshape([4, 2, 4, 2, 8, 4, 2]).permute([4, 0, 2, 3, 5, 1, 6]).reshape([128, 32])
    dq_tiles.index(HALF).store(pieces)
    fence_async_shared()
    group_barrier()


@gluon.jit
def _epilogue(
    dk, dv, k_tile, v_tile, full, step, row_tiles, kv_plane, column, args, FORM: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Put dK and dV of a warpgroup's 64 keys where the keys and the values were, and tell the store warp.

    SCATTER stores them from there, too, each row where `k_order` says.
    """
    tensors, scalars, _shared, barriers = args
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    KV: gl.constexpr = dk.type.layout
    if row_tiles == 0:  # products with keys and values, which may be infinite
        dk = gl.zeros([64, BLOCK_D], gl.float32, KV)
        dv = gl.zeros([64, BLOCK_D], gl.float32, KV)
    if FORM.SCATTER:
        rows = column + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        order = tensors.k_order + kv_plane.to(gl.int64) * scalars.kv_len
        target = gl.load(order + rows, mask=rows < scalars.kv_len, other=0)
        batch = (kv_plane // scalars.kv_heads).to(gl.int64)
        at = gl.expand_dims(batch * scalars.kv_len + target, 1) * scalars.kv_heads + kv_plane % scalars.kv_heads
        dims = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS)), 0)
        inside = gl.expand_dims(rows < scalars.kv_len, 1)
    tile = v_tile.reshape([64, BLOCK_D])
    tile.store(_downcast(dv, DTYPE))
    if FORM.SCATTER:
        group_barrier()
        at_values = tensors.dv_rows + (at * FORM.V_HEAD_DIM + dims)
        gl.store(at_values, tile.load(ROWS), mask=inside & (dims < FORM.V_HEAD_DIM))
    mbarrier.wait(barriers.ds_free.index(step & 1), (step // 2) & 1)  # the last dQ has read the keys
    tile = k_tile.reshape([64, BLOCK_D])
    tile.store(_downcast(dk * scalars.scale, DTYPE))
    if FORM.SCATTER:
        group_barrier()
        at_keys = tensors.dk_rows + (at * FORM.HEAD_DIM + dims)
        gl.store(at_keys, tile.load(ROWS), mask=inside & (dims < FORM.HEAD_DIM))
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _accumulate_dkv(WARPGROUP: gl.constexpr, args, FORM: gl.constexpr):
    """Consumer warpgroup 0 or 1: dK and dV of 64 keys of every tile.

    While one warpgroup computes, the tensor cores work for the others. SCORES_AHEAD makes the scores of the next tile
    of rows beside dK, which then reads the scores' gradients where they are stored for dQ. Without it dK reads them
    from registers while they are stored, and the scores follow.
    """
    _tensors, _scalars, shared, barriers = args
    SCORES_AHEAD: gl.constexpr = FORM.SCORES_AHEAD
    VALUE_STAGES: gl.constexpr = FORM.VALUE_STAGES
    STORE_WARPS: gl.constexpr = FORM.STORE_WARPS
    CAP: gl.constexpr = FORM.CAP
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KV, 2)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, S)
    step = 0
    item = 0
    mbarrier.wait(barriers.q_full.index(0), 0)
    row_tiles = read_slot(shared.slots, Slot.ROW_TILES)
    if SCORES_AHEAD:
        keys = shared.k.index(WARPGROUP).reshape([64, BLOCK_D])
        queries = shared.q.index(0).reshape([BLOCK_M, BLOCK_D])
        scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
        weights, slopes = _softmax_weights(scores, 0, args, WARPGROUP, FORM, S, DTYPE)
    while row_tiles >= 0:
        k_index = (item & 1) * 2 + WARPGROUP
        v_stage = item % VALUE_STAGES
        column = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.KEY_TILE) * 128 + WARPGROUP * 64
        kv_plane = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.KV_PLANE)
        dk = gl.zeros([64, BLOCK_D], gl.float32, KV)
        dv = gl.zeros([64, BLOCK_D], gl.float32, KV)
        for i in range(gl.maximum(row_tiles, 1)):
            zero = opaque_zero()
            stage = step & 1
            values = shared.v.index(v_stage * 2 + WARPGROUP + zero).reshape([64, BLOCK_D])
            queries = shared.q.index(stage).reshape([BLOCK_M, BLOCK_D])
            dout = shared.do.index(stage).reshape([BLOCK_M, BLOCK_D])
            if not SCORES_AHEAD:
                keys = shared.k.index(k_index + zero).reshape([64, BLOCK_D])
                mbarrier.wait(barriers.q_full.index(stage), (step // 2) & 1)
                scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
                weights, slopes = _softmax_weights(scores, stage, args, WARPGROUP, FORM, S, DTYPE)
            mbarrier.wait(barriers.do_full.index(stage), (step // 2) & 1)
            if CAP:  # there are no registers for both products
                dv = warpgroup_mma(gl.convert_layout(weights, OPERAND), dout, dv, is_async=True)
                dv = warpgroup_mma_wait(0, deps=[dv])
            dweights = issue_dots(values, dout, no_scores, FORM.V_DEPTH)
            if not CAP:
                dv = warpgroup_mma(gl.convert_layout(weights, OPERAND), dout, dv, is_async=True)
            delta = gl.expand_dims(shared.delta.index(stage).load(gl.SliceLayout(0, S)), 0)
            dweights = warpgroup_mma_wait(0 if CAP else 1, deps=[dweights])
            dscores = _downcast(_upcast(slopes, DTYPE) * (dweights - delta), DTYPE)  # [64, BLOCK_M]
            if not SCORES_AHEAD:
                dk = warpgroup_mma(gl.convert_layout(dscores, OPERAND), queries, dk, is_async=True)
            mbarrier.wait(barriers.ds_free.index(stage), ((step // 2) & 1) ^ 1)
            shared.ds.index(stage * 2 + WARPGROUP).store(dscores)
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(barriers.ds_full.index(stage), count=1)
            step += 1
            if SCORES_AHEAD:
                dk = warpgroup_mma(shared.ds.index(stage * 2 + WARPGROUP), queries, dk, is_async=True)
                next_index = gl.where(i + 1 < row_tiles, k_index, k_index ^ 2)
                keys = shared.k.index(next_index + zero).reshape([64, BLOCK_D])
                queries = shared.q.index(stage ^ 1).reshape([BLOCK_M, BLOCK_D])
                mbarrier.wait(barriers.q_full.index(stage ^ 1), (step // 2) & 1)
                scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
            dk, dv = warpgroup_mma_wait(piece_count(FORM.DEPTH) if SCORES_AHEAD else 0, deps=[dk, dv])
            _release_rows(stage, FORM)
            if SCORES_AHEAD:
                weights, slopes = _softmax_weights(scores, stage ^ 1, args, WARPGROUP, FORM, S, DTYPE)
        _epilogue(
            dk, dv, shared.k.index(k_index), shared.v.index(v_stage * 2 + WARPGROUP),
            barriers.dkv_full.index(v_stage * STORE_WARPS + WARPGROUP % STORE_WARPS), step - 1, row_tiles, kv_plane,
            column, args, FORM, DTYPE,
        )  # fmt: skip
        item += 1
        if not SCORES_AHEAD:
            mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1)
        row_tiles = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.ROW_TILES)


@gluon.jit
def _accumulate_dq(args, FORM: gl.constexpr):
    """Third warpgroup: the share of dQ of every tile of rows, in halves [64, 64] of its rows or of its columns."""
    _tensors, _scalars, shared, barriers = args
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    no_dq = gl.zeros([64, 64], gl.float32, DQ)
    step = 0
    item = 0
    mbarrier.wait(barriers.q_full.index(0), 0)
    row_tiles = read_slot(shared.slots, Slot.ROW_TILES)
    while row_tiles >= 0:
        for _ in range(gl.maximum(row_tiles, 1)):
            stage = step & 1
            mbarrier.wait(barriers.ds_full.index(stage), (step // 2) & 1)
            # Earlier, the warpgroup might arrive twice before the producer has passed the barrier once.
            _release_rows(stage, FORM)
            zero = opaque_zero()
            for half in gl.static_range(2):
                dq = no_dq
                for group in gl.static_range(2):
                    dscores = shared.ds.index(stage * 2 + group + zero)
                    keys = shared.k.index((item & 1) * 2 + group + zero).reshape([64, BLOCK_D])
                    if BLOCK_D == 64:
                        dscores = dscores.slice(half * 64, 64, dim=1)
                    else:
                        keys = keys.slice(half * 64, 64, dim=1)
                    dq = warpgroup_mma(dscores.permute((1, 0)), keys, dq, use_acc=group > 0, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
                mbarrier.wait(barriers.dq_free.index(half), (step & 1) ^ 1)
                _stage_dq(dq, shared.dq, half)
                mbarrier.arrive(barriers.dq_full.index(stage * 2 + half), count=1)
            mbarrier.arrive(barriers.ds_free.index(stage), count=1)
            step += 1
        item += 1
        mbarrier.wait(barriers.q_full.index(step & 1), (step // 2) & 1)
        row_tiles = read_slot(shared.slots, (step & 1) * Slot.COUNT + Slot.ROW_TILES)


_SIZES = ["heads", "kv_heads", "kv_planes", "interleaved", "mask_batch", "mask_heads", "q_len", "kv_len", "n_q", "n_kv",
          "n_columns", "padded_len"]  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def backward_kernel(
    q, k, v, dout, dq_accum, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, dq_ranks, dq_semaphores,
    key_tile_order, interleaved_heads, counter,
    heads, kv_heads, kv_planes, interleaved, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_columns, padded_len,
    scale, factor, cap_factor, FORM: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and start the roles. The classes above document the arguments."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    VALUE_STAGES: gl.constexpr = FORM.VALUE_STAGES
    STORE_WARPS: gl.constexpr = FORM.STORE_WARPS
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], q.dtype)
    shared = Shared(
        q=gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q.layout),
        do=gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], dout.layout),
        k=gl.allocate_shared_memory(q.dtype, [4, 1, 1, 64, BLOCK_D], k.layout),
        v=gl.allocate_shared_memory(q.dtype, [2 * VALUE_STAGES, 1, 1, 64, BLOCK_D], v.layout),
        ds=gl.allocate_shared_memory(q.dtype, [4, 64, BLOCK_M], SCORES),
        dq=gl.allocate_shared_memory(gl.float32, [2, 128, 32], dq_accum.layout),
        lse=gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN),
        delta=gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN),
        slots=gl.allocate_shared_memory(gl.int32, [2 * Slot.COUNT, 1], PLAIN),
    )
    barriers = Barriers(
        keys_free=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        dkv_full=gl.allocate_shared_memory(gl.int64, [VALUE_STAGES * STORE_WARPS, 1], BARRIER),
        q_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        do_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        ds_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        ds_free=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        dq_full=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        dq_free=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for i in gl.static_range(VALUE_STAGES * STORE_WARPS):
        mbarrier.init(barriers.dkv_full.index(i), count=2 // STORE_WARPS)
    for i in gl.static_range(4):
        mbarrier.init(barriers.dq_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(barriers.keys_free.index(i), count=STORE_WARPS)
        mbarrier.init(barriers.q_full.index(i), count=1)
        mbarrier.init(barriers.do_full.index(i), count=1)
        mbarrier.init(barriers.ds_full.index(i), count=2)
        mbarrier.init(barriers.ds_free.index(i), count=1)
        mbarrier.init(barriers.dq_free.index(i), count=1)
    fence_async_shared()

    tensors = Tensors(
        q, k, v, dout, dq_accum, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, dq_ranks,
        dq_semaphores, key_tile_order, interleaved_heads, counter,
    )  # fmt: skip
    scalars = Scalars(
        heads, kv_heads, kv_planes, interleaved, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_columns,
        padded_len, scale, factor, cap_factor,
    )  # fmt: skip
    args = (tensors, scalars, shared, barriers)
    gl.warp_specialize(
        [
            (_accumulate_dkv, (0, args, FORM)),
            (_accumulate_dkv, (1, args, FORM)),
            (_accumulate_dq, (args, FORM)),
            (_produce, (args, FORM)),
            (_store, (0, args, FORM)),
            (_store, (1, args, FORM)),
        ],
        [4, 4, 1, 1, 1],
        [208, 64, 32, 32, 32],  # of 512 for four warpgroups, the last of which is the single warps: 208 are left
    )


@triton.jit(do_not_specialize=["heads", "q_len", "n_row_tiles"])
def scale_dq_kernel(
    dq_accum, dq, order, dq_b, dq_h, dq_s, heads, q_len, n_row_tiles, scale,
    SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Scale the sums, in the order of `_stage_dq`, and store them to dq [B, Hq, Sq, D]: half a tile of rows a program.

    SCATTER puts each row where `order`, int32 [B, Hq, Sq], says.
    """
    half = tl.program_id(0) % 2
    row_tile = tl.program_id(0) // 2 % n_row_tiles
    plane = (tl.program_id(0) // 2 // n_row_tiles).to(tl.int64)
    pieces = (tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tile = tl.reshape(tl.load(dq_accum + pieces), [8, 4, 4, 2, 4, 2, 2])
    tile = tl.reshape(tl.permute(tile, [1, 5, 2, 3, 0, 4, 6]), [64, 64]) * scale
    rows = row_tile * BLOCK_M + (half * 64 if BLOCK_M == 128 else 0) + tl.arange(0, 64)
    dims = (half * 64 if BLOCK_M == 64 else 0) + tl.arange(0, 64)
    inside = rows < q_len
    if SCATTER:
        rows = tl.load(order + plane * q_len + rows, mask=inside, other=0)
    at = plane // heads * dq_b + plane % heads * dq_h + rows.to(tl.int64)[:, None] * dq_s + dims[None, :]
    tl.store(dq + at, tile.to(dq.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM)[None, :])
