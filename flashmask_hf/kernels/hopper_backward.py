"""The backward for Hopper (sm_90a) in Gluon: one kernel over key tiles (FlashMask, ICLR 2025, algorithm 2).

A program stays on a multiprocessor and takes one tile of 128 keys after the other from a counter. It holds the keys and
their values in shared memory and walks the query rows that see them. One warp finds and loads tiles, two warpgroups of
64 keys each make scores transposed [keys, rows], so that weights and their gradients stay in registers as operands for
dV and dK, and one warp adds the program's share of dQ to a float32 buffer and stores dK and dV. The scores of the next
tile of rows are in the making while dQ of this one is written.
"""
# Layouts take compile-time constants, which the type checker takes for objects.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.configs import multiprocessors
from flashmask_hf.kernels.gluon_shim import (
    bits_below,
    describe_rows,
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    keep_marked,
    make_descriptor,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque_zero,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    wait_for_count,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.tiles import LOG2_E, describable, describe, score_factors
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns

_LOG2_E = gl.constexpr(LOG2_E.value)
_TWO_LOG2_E = gl.constexpr(2.0 * LOG2_E.value)
_NEVER = gl.constexpr(2147483647)

COLUMNS = 128
"""Keys of a program, 64 of each warpgroup."""


class Config(NamedTuple):
    """Query rows of a tile, registers of a consuming thread, whether dQ lags a tile behind, and tiles of keys at hand.

    With a lag the two warpgroups need not keep step, which pays where exponentials weigh more (head_dim 64); it takes
    two tiles of keys and values at hand.
    """

    rows: int
    registers: int
    lag: bool
    sides: int


@gluon.jit
def _ranges_of(segments, batch, head, heads, mask_batch, mask_heads, n_kv, SEGMENTS: gl.constexpr, SCALE: gl.constexpr):
    """(mask, starts, ends): a query head's mask, and the ranges of row tiles that its key tile walks, one a lane."""
    slots = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mask = (batch % mask_batch) * mask_heads + head // (heads // mask_heads)
    at = segments + mask.to(gl.int64) * n_kv * SEGMENTS * 2 + slots * 2
    starts = gl.load(at, mask=slots < SEGMENTS, other=0) * SCALE
    ends = gl.load(at + 1, mask=slots < SEGMENTS, other=0) * SCALE
    return mask, starts, ends


@gluon.jit
def _range(starts, ends, nth, done, VISIBLE: gl.constexpr, ORDERED: gl.constexpr):
    """The range to walk after `done` row tiles (first, last, 1 if it is partial): the `nth`, or the next in order."""
    slots = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    if ORDERED:
        ahead = (ends > starts) & (starts >= done)
        chosen = ahead & (starts == gl.min(gl.where(ahead, starts, _NEVER), 0))
    else:
        chosen = slots == nth
    first = gl.max(gl.where(chosen, starts, 0), 0)
    last = gl.max(gl.where(chosen, ends, 0), 0)
    return first, last, gl.max(gl.where(chosen & (slots >= VISIBLE), 1, 0), 0)


@gluon.jit
def _row_tile(first, last, count, tile, ORDERED: gl.constexpr):
    """The `count`-th row tile to walk of [first, last). Programs start apart, so that their sums do not meet in dQ."""
    return first + count if ORDERED else first + (count + tile) % (last - first)


# Barriers of the hardware. Unlike those in shared memory they cost a warpgroup no barrier of its own before it arrives.
_BOTH = gl.constexpr(8)  # both warpgroups are there
_ROWS_FREE = gl.constexpr(9)  # by stage: nobody needs a tile of rows any more
_GROUPS = gl.constexpr(256)  # threads
_GROUPS_AND_WARPS = gl.constexpr(320)

# What the loading warp says of a tile of rows, in `places`, which has two sides.
_ROW = gl.constexpr(0)
_MASK = gl.constexpr(1)  # times 2, and 1 if the tile is partial
_PLACE = gl.constexpr(2)  # of its sums
_UNIT = gl.constexpr(3)  # batch and head of the key tile
_TILE = gl.constexpr(4)  # the key tile
_STEPS = gl.constexpr(5)  # row tiles of the key tile; 0: one, which does not exist; -1: nothing more comes
_FIELDS = gl.constexpr(6)


@gluon.jit
def _read(places, stage, FIELD: gl.constexpr):
    return gl.sum(places.index(stage * _FIELDS + FIELD).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _write(places, stage, FIELD: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    places.index(stage * _FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _key_tile(
    program, launch, turns, kv_heads, units, together, mask_batch, mask_heads, n_columns,
    SUBTILES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """(tile, unit) that is number `program`: heads take turns, so that equal work lies side by side."""
    if ORDERED:
        together = gl.load(turns)
    begin = program // (together * n_columns) * together
    place = program - begin * n_columns
    width = gl.minimum(together, units - begin)
    tile = place // width
    unit = begin + place % width
    if ORDERED:
        masks = gl.where(mask_heads == 1, 1, kv_heads)
        line = ((unit // kv_heads % mask_batch) * masks + unit % kv_heads % masks) * (n_columns // SUBTILES)
        tile = gl.load(launch + line + tile // SUBTILES).to(gl.int32) * SUBTILES + tile % SUBTILES
    return tile, unit


@gluon.jit
def _next(counter, ORDERED: gl.constexpr):
    """The number of the next key tile. Programs have their own for a first one, but not where dQ has an order.

    There a tile waits for those of lower numbers, and counting makes sure that these have begun.
    """
    number = gl.atomic_add(counter, 1)
    return number if ORDERED else number + gl.num_programs(0)


@gluon.jit
def _load_keys(k, v, k_tiles, v_tiles, keys_ready, unit, kv_heads, tile, side, BLOCK_D: gl.constexpr):
    mbarrier.expect(keys_ready.index(side), 4 * 64 * BLOCK_D * 2)
    for half in gl.static_range(2):
        at = [unit // kv_heads, unit % kv_heads, tile * 128 + half * 64, 0]
        tma_load(k, at, keys_ready.index(side), k_tiles.index(side * 2 + half))
        tma_load(v, at, keys_ready.index(side), v_tiles.index(side * 2 + half))


@gluon.jit
def _load_rows(
    q, dout, lse, delta, q_tiles, do_tiles, lse_tiles, delta_tiles, places, q_ready, do_ready,
    batch, head, heads, row, mask, place, unit, tile, steps, step, q_len, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Row tile number `step` of the program, and what there is to say of it."""
    LANES: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    rows = row + gl.arange(0, BLOCK_M, LANES)
    at = (batch.to(gl.int64) * heads + head) * q_len
    row_lse = gl.load(lse + at + rows, mask=rows < q_len, other=float("inf"))
    row_delta = gl.load(delta + at + rows, mask=rows < q_len, other=0.0)
    stage = step & 1
    if step >= 2:
        named_barrier_sync(_ROWS_FREE + stage, _GROUPS_AND_WARPS)
    # The queries are on their way before the barrier knows how many bytes they are: it opens only when it does, and
    # then what is stored here has come, too.
    tma_load(q, [batch, head, row, 0], q_ready.index(stage), q_tiles.index(stage))
    mbarrier.expect(do_ready.index(stage), BLOCK_M * BLOCK_D * 2)
    tma_load(dout, [batch, head, row, 0], do_ready.index(stage), do_tiles.index(stage))
    row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse) * _LOG2_E
    lse_tiles.index(stage).store(row_lse)
    delta_tiles.index(stage).store(row_delta)
    _write(places, stage, _ROW, row)
    _write(places, stage, _MASK, mask)
    _write(places, stage, _PLACE, place)
    _write(places, stage, _UNIT, unit)
    _write(places, stage, _TILE, tile)
    _write(places, stage, _STEPS, steps)
    group_barrier()
    mbarrier.expect(q_ready.index(stage), BLOCK_M * BLOCK_D * 2)


@gluon.jit
def _feed(
    q, k, v, dout, lse, delta, segments, launch, turns, counter, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
    delta_tiles, places, keys_ready, keys_free, q_ready, do_ready,
    heads, kv_heads, units, together, mask_batch, mask_heads, q_len, n_kv, n_columns, padded,
    SIDES: gl.constexpr, ROWS: gl.constexpr, SUBTILES: gl.constexpr, SEGMENTS: gl.constexpr, VISIBLE: gl.constexpr,
    ORDERED: gl.constexpr, SHARED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The warp that takes key tiles and loads the rows that see them, and the next keys and values if there is room."""
    group = heads // kv_heads
    n_programs = units * n_columns
    program = gl.program_id(0)
    if SHARED and ORDERED:
        program = _next(counter, ORDERED)
    turn = 0
    step = 0
    while program < n_programs:
        tile, unit = _key_tile(
            program, launch, turns, kv_heads, units, together, mask_batch, mask_heads, n_columns, SUBTILES, ORDERED
        )
        batch = unit // kv_heads
        first_head = unit % kv_heads * group
        ranges = segments + tile // SUBTILES * (SEGMENTS * 2)
        mask, starts, ends = _ranges_of(
            ranges, batch, first_head, heads, mask_batch, mask_heads, n_kv, SEGMENTS, ROWS // BLOCK_M
        )
        steps = gl.sum(ends - starts, 0)
        if mask_heads == heads:
            for member in range(1, group):
                _, other_starts, other_ends = _ranges_of(
                    ranges, batch, first_head + member, heads, mask_batch, mask_heads, n_kv, SEGMENTS, ROWS // BLOCK_M
                )
                steps += gl.sum(other_ends - other_starts, 0)
        else:
            steps *= group
        following = n_programs
        if SIDES == 2:
            mbarrier.wait(keys_free.index(turn & 1), ((turn // 2) & 1) ^ 1)
            _load_keys(k, v, k_tiles, v_tiles, keys_ready, unit, kv_heads, tile, turn & 1, BLOCK_D)
        if steps == 0:
            if SHARED:
                following = _next(counter, ORDERED)
            _load_rows(
                q, dout, lse, delta, q_tiles, do_tiles, lse_tiles, delta_tiles, places, q_ready, do_ready, batch,
                first_head, heads, padded, mask * 2, 0, unit, tile, steps, step, q_len, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            step += 1
        end = step + steps
        for member in range(group):
            head = first_head + member
            if member > 0:
                mask, starts, ends = _ranges_of(
                    ranges, batch, head, heads, mask_batch, mask_heads, n_kv, SEGMENTS, ROWS // BLOCK_M
                )
            done = 0
            for segment in range(SEGMENTS):
                first, last, partial = _range(starts, ends, segment, done, VISIBLE, ORDERED)
                done = gl.maximum(done, last)
                for count in range(last - first):
                    index = _row_tile(first, last, count, tile, ORDERED)
                    if SHARED and step + 1 == end:
                        following = _next(counter, ORDERED)
                    place = (batch * heads + head) * (padded // BLOCK_M) + index
                    _load_rows(
                        q, dout, lse, delta, q_tiles, do_tiles, lse_tiles, delta_tiles, places, q_ready, do_ready,
                        batch, head, heads, index * BLOCK_M, mask * 2 + partial, place, unit, tile, steps, step, q_len,
                        BLOCK_M, BLOCK_D,
                    )  # fmt: skip
                    step += 1
        program = following
        turn += 1
    stage = step & 1
    if step >= 2:
        named_barrier_sync(_ROWS_FREE + stage, _GROUPS_AND_WARPS)
    _write(places, stage, _STEPS, -1)
    _write(places, stage, _MASK, 0)
    group_barrier()
    mbarrier.arrive(q_ready.index(stage), count=1)
    mbarrier.arrive(do_ready.index(stage), count=1)
    if SIDES == 2:  # who looks ahead waits for nothing, and makes nothing of it
        mbarrier.wait(keys_free.index(turn & 1), ((turn // 2) & 1) ^ 1)
        mbarrier.arrive(keys_ready.index(turn & 1), count=1)


@gluon.jit
def _store_gradients(
    k, v, dq, dk, dv, order, locks, dq_tiles, k_tiles, v_tiles, places, keys_ready, keys_free, q_ready, dq_ready,
    dq_free, sums_ready, kv_heads, n_q, n_kv,
    PLACED: gl.constexpr, SIDES: gl.constexpr, SUBTILES: gl.constexpr, ROWS: gl.constexpr, ORDERED: gl.constexpr,
    LAG: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The warp that adds dQ, tile by tile of rows, and stores dK and dV unless they are PLACED.

    Where keys and values have room for one tile only, it also loads the next ones when the gradients are gone.
    """
    step = 0
    event = 0  # a tile of dQ; with a lag, a key tile begins with one that is none
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    steps = _read(places, 0, _STEPS)
    while steps >= 0:
        stage = step & 1
        side = turn % SIDES
        tile = _read(places, stage, _TILE)
        unit = _read(places, stage, _UNIT)
        if SIDES == 1:  # only now are the gradients gone from the keys' and values' place
            _load_keys(k, v, k_tiles, v_tiles, keys_ready, unit, kv_heads, tile, side, BLOCK_D)
        if LAG:
            place = _read(places, stage, _PLACE)
            mask = _read(places, stage, _MASK)
            row = _read(places, stage, _ROW)
            group_barrier()
            named_barrier_arrive(_ROWS_FREE + stage, _GROUPS_AND_WARPS)
            mbarrier.wait(dq_ready, event & 1)
            mbarrier.arrive(dq_free, count=1)
            event += 1
        end = step + gl.maximum(steps, 1)
        while step < end:
            stage = step & 1
            if not LAG:
                place = _read(places, stage, _PLACE)
                mask = _read(places, stage, _MASK)
                row = _read(places, stage, _ROW)
                group_barrier()
                named_barrier_arrive(_ROWS_FREE + stage, _GROUPS_AND_WARPS)
            at = place * 256
            lock = locks + place
            earlier = 0
            if ORDERED:
                row_tile = (mask // 2).to(gl.int64) * n_q + row // ROWS
                before = gl.load(order + row_tile * n_kv + tile // SUBTILES, mask=steps > 0, other=0).to(gl.int32)
                earlier = before * SUBTILES + tile % SUBTILES
            mbarrier.wait(dq_ready, event & 1)
            event += 1
            step += 1
            if LAG and step < end:
                place = _read(places, step & 1, _PLACE)
                mask = _read(places, step & 1, _MASK)
                row = _read(places, step & 1, _ROW)
                group_barrier()
                named_barrier_arrive(_ROWS_FREE + (step & 1), _GROUPS_AND_WARPS)
            if steps > 0:
                if ORDERED:
                    wait_for_count(lock, earlier)
                tma_reduce_add(dq, [at, 0], dq_tiles.index(0))
                tma_reduce_add(dq, [at + 128, 0], dq_tiles.index(1))
                tma_store_wait(0)
            mbarrier.arrive(dq_free, count=1)
            if ORDERED and steps > 0:
                gl.inline_asm_elementwise(
                    "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                )
                group_barrier()
                gl.atomic_add(lock, 1, sem="release")
            if not LAG:
                # What is written of the next tile of rows is there, since the consumers have it or wait for it.
                mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1, pred=step < end)
        mbarrier.wait(sums_ready.index(side), (turn // SIDES) & 1)
        if not PLACED:
            for half in gl.static_range(2):
                to = [unit // kv_heads, unit % kv_heads, tile * 128 + half * 64, 0]
                tma_store(dk, to, k_tiles.index(side * 2 + half))
                tma_store(dv, to, v_tiles.index(side * 2 + half))
            tma_store_wait(0)
        if SIDES == 2:
            mbarrier.arrive(keys_free.index(side), count=1)
        turn += 1
        mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1)
        steps = _read(places, step & 1, _STEPS)


@gluon.jit
def _narrow(x, dtype: gl.constexpr):
    """`x` in the 16-bit `dtype`, two elements a register from the start, so that the wide ones can go."""
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
def _widen(x, dtype: gl.constexpr):
    """The inverse of `_narrow`."""
    if dtype == gl.bfloat16:
        UNPACK: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        UNPACK: gl.constexpr = (
            "{ .reg .f16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        )
    return gl.inline_asm_elementwise(UNPACK, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _bits_of_lane(bound, lane, COUNT: gl.constexpr):
    """A word with a bit for each of COUNT rows of a lane of four, set where the row is under `bound`.

    The lane holds pairs of rows: 2 * lane and the next, and so on every 8 rows.
    """
    bound = bound - 2 * lane
    count = (bound >> 3) * 2 + gl.minimum(bound & 7, 2)
    return bits_below(gl.minimum(count, COUNT))


@gluon.jit
def _mark(
    indices, stage, active, places, q_len, kv_len,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(whether a tile is partial, then the visible ones of a thread's rows as a word for each of its keys [64, 4])."""
    COUNT: gl.constexpr = BLOCK_M // 4
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    hidden = gl.zeros([64, 4], gl.int32, WORDS)
    mask = _read(places, stage, _MASK)
    partial = ((mask & 1) != 0) & active
    if partial:
        row = _read(places, stage, _ROW)
        column = _read(places, stage, _TILE) * 128 + HALF * 64
        columns = gl.expand_dims(column + gl.arange(0, 64, gl.SliceLayout(1, WORDS)), 1)
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
        inside = columns < kv_len
        at = indices + ((mask // 2).to(gl.int64) * kv_len + columns) * N
        hidden = -1 - _bits_of_lane(gl.load(at, mask=inside, other=0) - row, lane, COUNT)
        if N == 4 or (N == 2 and CAUSAL):
            hidden = hidden & _bits_of_lane(gl.load(at + 1, mask=inside, other=_NEVER) - row, lane, COUNT)
        if N == 2 and not CAUSAL:
            hidden = hidden | _bits_of_lane(gl.load(at + 1, mask=inside, other=0) - row, lane, COUNT)
        if N == 4:
            start = gl.load(at + 2, mask=inside, other=0) - row
            end = gl.load(at + 3, mask=inside, other=0) - row
            hidden = hidden | (_bits_of_lane(end, lane, COUNT) & (-1 - _bits_of_lane(start, lane, COUNT)))
        if CAUSAL:
            hidden = hidden | _bits_of_lane(columns - (kv_len - q_len) - row, lane, COUNT)
    return partial, -1 - hidden


@gluon.jit
def _weigh(
    scores, stage, partial, marks, lse_tiles, factor, bend,
    CAP: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The softmax weights [64, BM] of a tile, and what its gradient is multiplied with to be the scores' gradient."""
    if CAP:
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (bend * _TWO_LOG2_E)))
    row_lse = gl.expand_dims(lse_tiles.index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.exp2(scores * factor - row_lse)
    if partial:
        pieces, words = gl.broadcast(
            gl.reshape(weights, [64, BLOCK_M // 8, 4, 2]), gl.expand_dims(gl.expand_dims(marks, 1), 3)
        )
        weights = gl.convert_layout(gl.reshape(keep_marked(pieces, words), [64, BLOCK_M]), LAYOUT)
    narrow = _narrow(weights, DTYPE)
    slopes = narrow
    if CAP:
        slopes = _narrow(weights * (1.0 - scores * scores), DTYPE)
    return narrow, slopes


@gluon.jit
def _multiply_dq(
    ds_tiles, k_tiles, other_ready, side, step, real, zero,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Start a warpgroup's half of a tile of dQ [64, 64] from both warpgroups' gradients of the scores of `step`."""
    turn = step & 1
    own_ds = ds_tiles.index(turn * 2 + HALF)
    other_ds = ds_tiles.index(turn * 2 + 1 - HALF)
    hidden = opaque_zero()
    own_keys = k_tiles.index(side * 2 + HALF + hidden).reshape([64, BLOCK_D])
    other_keys = k_tiles.index(side * 2 + 1 - HALF + hidden).reshape([64, BLOCK_D])
    if BLOCK_M == 64:
        own_keys = own_keys.slice(HALF * 64, 64, dim=1)
        other_keys = other_keys.slice(HALF * 64, 64, dim=1)
    else:
        own_ds = own_ds.slice(HALF * 64, 64, dim=1)
        other_ds = other_ds.slice(HALF * 64, 64, dim=1)
    dq = warpgroup_mma(own_ds.permute((1, 0)), own_keys, zero, use_acc=False, is_async=True)
    mbarrier.wait(other_ready.index(turn), (step // 2) & 1, pred=real)
    return warpgroup_mma(other_ds.permute((1, 0)), other_keys, dq, is_async=True)


@gluon.jit
def _stage_dq(dq, dq_tiles, HALF: gl.constexpr):
    """Lay half a tile of dQ out for the warp that adds it: a thread's four neighbours together, without conflicts."""
    pieces = dq.reshape([4, 2, 4, 2, 8, 4, 2]).permute([4, 0, 2, 3, 5, 1, 6]).reshape([128, 32])
    dq_tiles.index(HALF).store(pieces)


@gluon.jit
def _pass_dq(dq_ready):
    """Hand the laid out tile of dQ to the warp that adds it."""
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(dq_ready, count=1)


@gluon.jit
def _multiply(
    weights, slopes, dweights, dkeys, dvalues, q_tiles, k_tiles, do_tiles, delta_tiles, ds_tiles, own_ready,
    other_ready, dq_free, side, step, event, adds, no_dq,
    HALF: gl.constexpr, LAG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The products of row tile `step`: (dK, dV, a tile of dQ in the making, with a lag that of the step before).

    In the first step of a key tile, with a lag, there is nothing to add to, and dQ is none: not `adds`.
    """
    dtype: gl.constexpr = q_tiles.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dkeys.type.layout, 2)
    stage = step & 1
    queries = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    upstream = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    dvalues = warpgroup_mma(gl.convert_layout(weights, OPERAND), upstream, dvalues, use_acc=adds, is_async=True)
    row_delta = gl.expand_dims(delta_tiles.index(stage).load(gl.SliceLayout(0, dweights.type.layout)), 0)
    dscores = _narrow(_widen(slopes, dtype) * (dweights - row_delta), dtype)
    if LAG:  # the other warpgroup has read these gradients' place
        mbarrier.wait(dq_free, (event & 1) ^ 1)
    ds_tiles.index(stage * 2 + HALF).store(dscores)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(own_ready.index(stage), count=1)
    dkeys = warpgroup_mma(gl.convert_layout(dscores, OPERAND), queries, dkeys, use_acc=adds, is_async=True)
    dq = _multiply_dq(ds_tiles, k_tiles, other_ready, side, step - LAG, adds, no_dq, HALF, BLOCK_M, BLOCK_D)
    dkeys, dvalues = warpgroup_mma_wait(2, deps=[dkeys, dvalues])
    named_barrier_arrive(_ROWS_FREE + stage, _GROUPS_AND_WARPS)
    return dkeys, dvalues, dq


@gluon.jit
def _begin(
    indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, places, keys_ready, do_ready, step, turn, q_len, kv_len,
    factor, bend, no_scores,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, SIDES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """(weights, slopes, gradients of the weights) of row tile `step`, the first of key tile `turn`."""
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    S: gl.constexpr = no_scores.type.layout
    stage = step & 1
    side = turn % SIDES
    mbarrier.wait(keys_ready.index(side), (turn // SIDES) & 1)
    keys = k_tiles.index(side * 2 + HALF).reshape([64, BLOCK_D])
    values = v_tiles.index(side * 2 + HALF).reshape([64, BLOCK_D])
    queries = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    scores = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    partial, marks = _mark(indices, stage, True, places, q_len, kv_len, HALF, CAUSAL, N, BLOCK_M, PIECES)
    mbarrier.wait(do_ready.index(stage), (step // 2) & 1)
    upstream = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    dweights = warpgroup_mma(values, upstream.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights, slopes = _weigh(
        scores, stage, partial, marks, lse_tiles, factor, bend, CAP, BLOCK_M, S, q_tiles.dtype
    )  # fmt: skip
    return weights, slopes, warpgroup_mma_wait(0, deps=[dweights])


@gluon.jit
def _go_on(
    dq, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, dq_tiles, places, do_ready, dq_ready, dq_free,
    side, step, event, more, q_len, kv_len, factor, bend, hidden, no_scores,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, LAG: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """As `_begin`, for a tile of rows that follows on another, whose dQ is in the making; it is laid out meanwhile."""
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    S: gl.constexpr = no_scores.type.layout
    stage = step & 1
    keys = k_tiles.index(side * 2 + HALF + hidden).reshape([64, BLOCK_D])
    values = v_tiles.index(side * 2 + HALF + hidden).reshape([64, BLOCK_D])
    queries = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    scores = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    if not LAG:
        mbarrier.wait(dq_free, (event & 1) ^ 1)
    _stage_dq(dq, dq_tiles, HALF)
    if LAG:
        _pass_dq(dq_ready)
    mbarrier.wait(do_ready.index(stage), (step // 2) & 1, pred=more)
    upstream = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    dweights = warpgroup_mma(values, upstream.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    partial, marks = _mark(indices, stage, more, places, q_len, kv_len, HALF, CAUSAL, N, BLOCK_M, PIECES)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if not LAG:  # only now, since what the products read of the shared memory holds up the stores
        _pass_dq(dq_ready)
    weights, slopes = _weigh(
        scores, stage, partial, marks, lse_tiles, factor, bend, CAP, BLOCK_M, S, q_tiles.dtype
    )  # fmt: skip
    return weights, slopes, warpgroup_mma_wait(0, deps=[dweights])


@gluon.jit
def _stage_sums(
    dkeys, dvalues, k_tile, v_tile, dk_rows, dv_rows, k_order, sums_ready, steps, unit, column, kv_heads, kv_len, scale,
    PLACED: gl.constexpr, BLOCK_D: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Put dK and dV of a warpgroup's 64 keys in their and the values' place; PLACED stores them from there, too."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    KV: gl.constexpr = dkeys.type.layout
    if steps == 0:  # keys and values may be infinite
        dkeys = gl.zeros([64, BLOCK_D], gl.float32, KV)
        dvalues = gl.zeros([64, BLOCK_D], gl.float32, KV)
    if PLACED:
        rows = column + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        place = gl.load(k_order + unit.to(gl.int64) * kv_len + rows, mask=rows < kv_len, other=0)
        to = gl.expand_dims((unit // kv_heads).to(gl.int64) * kv_len + place, 1) * kv_heads + unit % kv_heads
        to = to * BLOCK_D + gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS)), 0)
        inside = gl.expand_dims(rows < kv_len, 1)
    tile = v_tile.reshape([64, BLOCK_D])
    tile.store(_narrow(dvalues, DTYPE))
    if PLACED:
        group_barrier()
        gl.store(dv_rows + to, tile.load(ROWS), mask=inside)
    named_barrier_sync(_BOTH, _GROUPS)
    tile = k_tile.reshape([64, BLOCK_D])
    tile.store(_narrow(dkeys * scale, DTYPE))
    if PLACED:
        group_barrier()
        gl.store(dk_rows + to, tile.load(ROWS), mask=inside)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(sums_ready, count=1)


@gluon.jit
def _accumulate(
    HALF: gl.constexpr, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
    delta_tiles, places, ds_tiles, dq_tiles, keys_ready, q_ready, do_ready, own_ready, other_ready, dq_ready, dq_free,
    sums_ready, kv_heads, q_len, kv_len, scale, factor, bend,
    PLACED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, LAG: gl.constexpr,
    SIDES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Warpgroup `HALF`, 0 or 1: dK and dV of 64 keys of every tile, and its half of every tile of dQ.

    PLACED stores dK and dV itself, each row where `k_order` says.

    One turn of the loop ends with the next tile's weights and their gradients, so that the tensor cores always have
    the product at hand that does not wait for what the other units compute. With a lag, whose loop has two tiles of
    keys at hand, the last turn of one ends with the first weights of the next: nothing is made in vain, and the loop's
    code, which every tile of rows runs through, stays in the instruction cache.
    """
    dtype: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([64, 64], gl.float32, DQ)
    PIECES: gl.constexpr = gl.reshape(no_scores, [64, BLOCK_M // 8, 4, 2]).type.layout

    dkeys = gl.zeros([64, BLOCK_D], gl.float32, KV)
    dvalues = gl.zeros([64, BLOCK_D], gl.float32, KV)
    step = 0
    event = 0
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    steps = _read(places, 0, _STEPS)
    column = _read(places, 0, _TILE) * 128 + HALF * 64
    unit = _read(places, 0, _UNIT)
    if LAG:
        weights, slopes, dweights = _begin(
            indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, places, keys_ready, do_ready, 0, 0, q_len, kv_len,
            factor, bend, no_scores, HALF, CAUSAL, N, CAP, SIDES, PIECES,
        )  # fmt: skip
        while steps >= 0:
            side = turn % SIDES
            next_side = (turn + 1) % SIDES
            for i in range(gl.maximum(steps, 1)):
                hidden = opaque_zero()
                dkeys, dvalues, dq = _multiply(
                    weights, slopes, dweights, dkeys, dvalues, q_tiles, k_tiles, do_tiles, delta_tiles, ds_tiles,
                    own_ready, other_ready, dq_free, side, step, event, i > 0, no_dq, HALF, LAG, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                step += 1
                last = i + 1 >= steps
                mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1)
                mbarrier.wait(keys_ready.index(next_side), ((turn + 1) // SIDES) & 1, pred=last)
                weights, slopes, dweights = _go_on(
                    dq, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, dq_tiles, places, do_ready, dq_ready,
                    dq_free, gl.where(last, next_side, side), step, event, True, q_len, kv_len, factor, bend, hidden,
                    no_scores, HALF, CAUSAL, N, CAP, LAG, PIECES,
                )  # fmt: skip
                event += 1
            rest = _multiply_dq(ds_tiles, k_tiles, other_ready, side, step - 1, True, no_dq, HALF, BLOCK_M, BLOCK_D)
            rest = warpgroup_mma_wait(0, deps=[rest])
            mbarrier.wait(dq_free, (event & 1) ^ 1)
            _stage_dq(rest, dq_tiles, HALF)
            _pass_dq(dq_ready)
            event += 1
            _stage_sums(
                dkeys, dvalues, k_tiles.index(side * 2 + HALF), v_tiles.index(side * 2 + HALF), dk_rows, dv_rows,
                k_order, sums_ready.index(side), steps, unit, column, kv_heads, kv_len, scale, PLACED, BLOCK_D, dtype,
            )  # fmt: skip
            turn += 1
            steps = _read(places, step & 1, _STEPS)
            column = _read(places, step & 1, _TILE) * 128 + HALF * 64
            unit = _read(places, step & 1, _UNIT)
    else:
        while steps >= 0:
            side = turn % SIDES
            weights, slopes, dweights = _begin(
                indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, places, keys_ready, do_ready, step, turn,
                q_len, kv_len, factor, bend, no_scores, HALF, CAUSAL, N, CAP, SIDES, PIECES,
            )  # fmt: skip
            dkeys = gl.zeros([64, BLOCK_D], gl.float32, KV)
            dvalues = gl.zeros([64, BLOCK_D], gl.float32, KV)
            for i in range(gl.maximum(steps, 1)):
                hidden = opaque_zero()
                dkeys, dvalues, dq = _multiply(
                    weights, slopes, dweights, dkeys, dvalues, q_tiles, k_tiles, do_tiles, delta_tiles, ds_tiles,
                    own_ready, other_ready, dq_free, side, step, event, True, no_dq, HALF, LAG, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                step += 1
                more = i + 1 < steps
                mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1, pred=more)
                weights, slopes, dweights = _go_on(
                    dq, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, dq_tiles, places, do_ready, dq_ready,
                    dq_free, side, step, event, more, q_len, kv_len, factor, bend, hidden, no_scores,
                    HALF, CAUSAL, N, CAP, LAG, PIECES,
                )  # fmt: skip
                event += 1
            _stage_sums(
                dkeys, dvalues, k_tiles.index(side * 2 + HALF), v_tiles.index(side * 2 + HALF), dk_rows, dv_rows,
                k_order, sums_ready.index(side), steps, unit, column, kv_heads, kv_len, scale, PLACED, BLOCK_D, dtype,
            )  # fmt: skip
            turn += 1
            mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1)
            steps = _read(places, step & 1, _STEPS)
            column = _read(places, step & 1, _TILE) * 128 + HALF * 64
            unit = _read(places, step & 1, _UNIT)


_RUNTIME = ["heads", "kv_heads", "units", "together", "mask_batch", "mask_heads", "q_len", "kv_len", "n_q", "n_kv",
            "n_columns", "padded"]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def _backward(
    q, k, v, dout, dq, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, order, locks, launch, turns,
    counter,
    heads, kv_heads, units, together, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_columns, padded,
    scale, factor, bend,
    CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, ORDERED: gl.constexpr, PLACED: gl.constexpr,
    LAG: gl.constexpr, SIDES: gl.constexpr, SHARED: gl.constexpr, REGISTERS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr, ROWS: gl.constexpr, SUBTILES: gl.constexpr, VISIBLE: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], q.dtype)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], dout.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [2 * SIDES, 1, 1, 64, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [2 * SIDES, 1, 1, 64, BLOCK_D], v.layout)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, 64, BLOCK_M], SCORES)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], dq.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN)
    places = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], PLAIN)
    keys_ready = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIER)
    sums_ready = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIER)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    first_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    second_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(dq_ready, count=2)
    mbarrier.init(dq_free, count=1)
    for i in gl.static_range(SIDES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=1)
        mbarrier.init(sums_ready.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(first_ready.index(i), count=1)
        mbarrier.init(second_ready.index(i), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_accumulate, (
                0, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                places, ds_tiles, dq_tiles, keys_ready, q_ready, do_ready, first_ready, second_ready, dq_ready, dq_free,
                sums_ready, kv_heads, q_len, kv_len, scale, factor, bend, PLACED, CAUSAL, N, CAP, LAG, SIDES, BLOCK_M,
                BLOCK_D,
            )),
            (_accumulate, (
                1, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                places, ds_tiles, dq_tiles, keys_ready, q_ready, do_ready, second_ready, first_ready, dq_ready, dq_free,
                sums_ready, kv_heads, q_len, kv_len, scale, factor, bend, PLACED, CAUSAL, N, CAP, LAG, SIDES, BLOCK_M,
                BLOCK_D,
            )),
            (_feed, (
                q, k, v, dout, lse, delta, segments, launch, turns, counter, q_tiles, k_tiles, v_tiles, do_tiles,
                lse_tiles, delta_tiles, places, keys_ready, keys_free, q_ready, do_ready, heads, kv_heads, units,
                together, mask_batch, mask_heads, q_len, n_kv, n_columns, padded, SIDES, ROWS, SUBTILES, SEGMENTS,
                VISIBLE, ORDERED, SHARED, BLOCK_M, BLOCK_D,
            )),
            (_store_gradients, (
                k, v, dq, dk, dv, order, locks, dq_tiles, k_tiles, v_tiles, places, keys_ready, keys_free, q_ready,
                dq_ready, dq_free, sums_ready, kv_heads, n_q, n_kv, PLACED, SIDES, SUBTILES, ROWS, ORDERED, LAG,
                BLOCK_D,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


@triton.jit
def _row_order(tiles, counts, launch, order, n_q, n_kv, n_columns, group, LANES: tl.constexpr):
    """For one row tile of a plan: the number of its key tiles launched before each one, in `order` (zeros)."""
    row = tl.program_id(0).to(tl.int64)
    tiles += row * n_kv
    order += row * n_kv
    launch += row // n_q // group * n_columns
    visible = tl.load(counts + row * 2)
    partial = tl.load(counts + row * 2 + 1)
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        listed = (lane < visible) | ((lane >= n_kv - partial) & (lane < n_kv))
        tile = tl.load(tiles + lane, mask=listed, other=0).to(tl.int32)
        tl.store(order + tile, 1, mask=listed)
    tl.debug_barrier()
    before = 0
    for first in range(0, n_columns, LANES):
        lane = first + tl.arange(0, LANES)
        tile = tl.load(launch + lane, mask=lane < n_columns, other=0)
        listed = tl.load(order + tile, mask=lane < n_columns, other=0).to(tl.int32)
        tl.debug_barrier()
        tl.store(order + tile, before + tl.cumsum(listed, 0) - listed, mask=lane < n_columns)
        before += tl.sum(listed, 0)


@triton.jit(do_not_specialize=["heads", "q_len", "n_rows"])
def _scale_dq(
    sums, dq, order, dq_b, dq_h, dq_s, heads, q_len, n_rows, scale,
    PLACED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums in the order of `_accumulate`, scaled, to dq [B, Hq, Sq, D]: one of the two halves of a tile of rows.

    PLACED puts each row where `order` says.
    """
    half = tl.program_id(0) % 2
    row_tile = tl.program_id(0) // 2 % n_rows
    plane = (tl.program_id(0) // 2 // n_rows).to(tl.int64)
    pieces = (tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tile = tl.reshape(tl.load(sums + pieces), [8, 4, 4, 2, 4, 2, 2])
    tile = tl.reshape(tl.permute(tile, [1, 5, 2, 3, 0, 4, 6]), [64, 64]) * scale
    rows = row_tile * BLOCK_M + (half * 64 if BLOCK_M == 128 else 0) + tl.arange(0, 64)
    dims = (half * 64 if BLOCK_M == 64 else 0) + tl.arange(0, 64)
    inside = rows < q_len
    if PLACED:
        rows = tl.load(order + plane * q_len + rows, mask=inside, other=0)
    at = plane // heads * dq_b + plane % heads * dq_h + rows.to(tl.int64)[:, None] * dq_s + dims[None, :]
    tl.store(dq + at, tile.to(dq.dtype.element_ty), mask=inside[:, None] & (dims < BLOCK_D)[None, :])


_launch_backward = Launcher(_backward)
_launch_scale_dq = Launcher(_scale_dq)

_CONFIGS = {64: Config(128, 232, True, 2), 128: Config(64, 224, False, 1)}
_ROWS_AT_HAND = 8 << 20  # bytes of rows, of the heads whose key tiles take turns, that the L2 cache should hold
_ROWS_BY_TURNS = 6 << 20  # rows times head_dim of the longest lists of the heads that take turns where dQ has an order


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: FlashMask,
    plan: Plan,
    scale: float,
    softcap: float,
    deterministic: bool = False,
    config: Config | None = None,
    orders: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward.

    Args:
        dout: gradient of the output, [B, Hq, Sq, D].
        q: [B, Hq, Sq, D], bfloat16 or float16, D 64 or 128.
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, D].
        lse: float32 [B, Hq, Sq] of the forward.
        delta: float32 [B, Hq, Sq] from `row_delta`.
        mask: the mask.
        plan: its plan.
        scale: factor on the scores.
        softcap: 0 is none.
        deterministic: add to dQ in a fixed order, so that repeated runs agree to the bit.
        config: overrides the tiles.
        orders: int32 [B, Hq, Sq] and [B, Hkv, Skv], where to put each row of dq, and of dk and dv: permutations of
            every head's rows. Or None.

    Returns:
        dq, dk, dv like q, k, v; with `orders` stored as [B, S, H, D].
    """
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    config = config or _CONFIGS[dim]
    assert config.sides == 2 or not config.lag, "a lag takes two tiles of keys at hand"
    q, k, v, dout = (describable(x) for x in (q, k, v, dout))
    q_order, k_order = orders or (None, None)
    if orders is None:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    else:
        dq, dk, dv = (x.new_empty(batch, *x.shape[2:0:-1], dim).transpose(1, 2) for x in (q, k, v))
    placed = (None, None) if orders is None else (dk, dv)
    indices = mask.indices.contiguous()
    mask_batch, mask_heads, n_q, n_kv = plan.tiles.shape
    padded = -(-q_len // ROWS) * ROWS
    sums = torch.zeros(batch * heads * padded * dim // 32, 32, dtype=torch.float32, device=q.device)
    subtiles = plan_columns(kv_len) // COLUMNS
    n_columns = -(-kv_len // plan_columns(kv_len)) * subtiles
    units = batch * kv_heads
    factor, bend = score_factors(scale, softcap)
    # Heads that take turns put equal work side by side.
    together = max(1, _ROWS_AT_HAND // (q_len * dim * (heads // kv_heads) * 4))
    with torch.cuda.device_of(q):
        order = locks = launch = turns = plan.segments  # not read
        if deterministic:
            order = torch.zeros(plan.tiles.shape, dtype=torch.int16, device=q.device)
            locks = torch.zeros(batch * heads * padded // config.rows, dtype=torch.int32, device=q.device)
            groups = min(mask_heads, kv_heads)
            share = ROWS * (heads // kv_heads)
            most = _ROWS_BY_TURNS // (dim * share)
            launch, turns = _launch_order(plan, mask.causal, groups, n_columns // subtiles, together, most)
            _row_order[(mask_batch * mask_heads * n_q,)](
                plan.tiles, plan.counts, launch, order, n_q, n_kv, n_columns // subtiles, mask_heads // groups,
                LANES=256, num_warps=4,
            )  # fmt: skip
        programs = min(n_columns * units, multiprocessors(q.device))
        shared = n_columns * units > programs
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if shared else None
        _launch_backward(
            programs,
            describe_rows(q, config.rows), describe_rows(k, 64), describe_rows(v, 64), describe_rows(dout, config.rows),
            describe(make_descriptor, sums, 128, 32),
            describe_rows(dk, 64), describe_rows(dv, 64), *placed, k_order, lse, delta, indices, plan.segments, order,
            locks, launch, turns, counter, heads, kv_heads, units, together, mask_batch, mask_heads, q_len, kv_len,
            n_q, n_kv, n_columns, padded, scale, factor, bend,
            CAUSAL=mask.causal, N=indices.shape[-1], CAP=softcap != 0, ORDERED=deterministic, PLACED=orders is not None,
            LAG=int(config.lag), SIDES=config.sides, SHARED=shared, REGISTERS=config.registers, BLOCK_M=config.rows,
            BLOCK_D=dim, ROWS=ROWS, SUBTILES=subtiles, VISIBLE=VISIBLE_SEGMENTS,
            SEGMENTS=VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, num_warps=4,
        )  # fmt: skip
        n_rows = padded // config.rows
        _launch_scale_dq(
            2 * n_rows * heads * batch,
            sums, dq, q_order, *dq.stride()[:3], heads, q_len, n_rows, scale,
            PLACED=orders is not None, BLOCK_M=config.rows, BLOCK_D=dim, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv


def _launch_order(
    plan: Plan, causal: bool, groups: int, n_columns: int, together: int, rows: int
) -> tuple[Tensor, Tensor]:
    """In which order to begin key tiles where dQ has one, for each group of masks, and how many heads take turns.

    Tiles add to a row of dQ in the order of beginning, so none waits for one that is not there yet, and all walk their
    rows downwards. The last keys go first: what they see lies ahead of those that follow, which walk behind them, or in
    another document. Under a causal mask made of blocks, where rows at the end see more tiles than any tile sees rows,
    those of few rows go first: they are there first.

    More heads by turns shorten the queues before the rows, but the L2 cache should hold the rows that they walk: the
    longest lists of all of them have about `rows` tiles, and half of that under causal masks of blocks. `together`
    heads are best where some tile sees most of the rows, and under a causal mask that is not made of blocks, for there
    the tiles do not meet.

    Returns:
        int32 [groups of the batch, n_columns] and int32 [1], on the device.
    """
    segments = plan.segments
    lists = (segments[..., 1] - segments[..., 0]).sum(-1)[:, :, :n_columns].unflatten(1, (groups, -1)).sum(2)
    lists = lists.flatten(0, 1)
    longest = (lists.max() // (segments.shape[1] // groups)).clamp(min=1)
    meet = longest * 4 < plan.tiles.shape[2] * 3
    launch = torch.arange(n_columns - 1, -1, -1, device=segments.device).repeat(len(lists), 1)
    if causal:
        meet = meet & (plan.counts.sum(-1).max() * 4 > longest * 5)
        launch = n_columns - 1 - torch.where(meet, lists.flip(-1), 0).argsort(dim=-1, stable=True)
    at_hand = rows // 2 if causal else rows
    turns = torch.where(meet, (at_hand + longest // 2) // longest, together)
    return launch.to(torch.int32), turns.clamp(min=1).to(torch.int32).view(1)
