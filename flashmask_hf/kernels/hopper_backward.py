"""The backward for Hopper (sm_90a) in Gluon: one kernel over key tiles (FlashMask, ICLR 2025, algorithm 2).

A program stays on a multiprocessor and takes one tile of 128 keys after the other from a counter. It holds the keys and
their values in shared memory and walks the query rows that see them. One warp finds tiles and loads keys and rows. Two
warpgroups of 64 keys each make scores transposed [keys, rows], so that weights and their gradients stay in registers as
operands for dV and dK. A third one makes the program's share of dQ, and one warp, or two by turns, adds that to a
float32 buffer and stores dK and dV. Keys have two places, and so have values where head_dim is 64. Where it is 128, the
warps that store load them, when the gradients are gone from there.
"""
# Layouts take compile-time constants, which the type checker takes for objects.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.configs import multiprocessors
from flashmask_hf.kernels.descriptors import (
    Layout,
    describable,
    layout_like,
    layout_of,
    packed_layout,
    side_by_side,
    template,
)
from flashmask_hf.kernels.gluon_shim import (
    bits_below,
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
    rows_template,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    wait_for_count,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.native import clear
from flashmask_hf.kernels.problem import Problem, problem_of
from flashmask_hf.kernels.row_statistics import Delta, Gradients, OutputLayout, bind_delta, output_layout
from flashmask_hf.kernels.tiles import LOG2_E
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns

_LOG2_E = gl.constexpr(LOG2_E.value)
_TWO_LOG2_E = gl.constexpr(2.0 * LOG2_E.value)
_NEVER = gl.constexpr(2147483647)

COLUMNS = 128
"""Keys of a tile."""

_LONG = gl.constexpr(4096)  # ranges of at least so many rows are begun in different places


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
def _range(starts, ends, done, VISIBLE: gl.constexpr):
    """The next range [first, last) to walk after the first `done` row tiles, and 1 if it is partial."""
    slots = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ahead = (ends > starts) & (starts >= done)
    chosen = ahead & (starts == gl.min(gl.where(ahead, starts, _NEVER), 0))
    first = gl.max(gl.where(chosen, starts, 0), 0)
    last = gl.max(gl.where(chosen, ends, 0), 0)
    return first, last, gl.max(gl.where(chosen & (slots >= VISIBLE), 1, 0), 0)


# Barriers of the hardware. Unlike those in shared memory they cost a warpgroup no barrier of its own before it arrives.
_ROWS_FREE = gl.constexpr(8)  # by stage: nobody needs a tile of rows any more

# What the loading warp says of a tile of rows, in `places`, which has two sides.
_ROW = gl.constexpr(0)
_MASK = gl.constexpr(1)  # times 2, and 1 if the tile is partial
_PLACE = gl.constexpr(2)  # of its sums
_UNIT = gl.constexpr(3)  # batch and head of the key tile
_TILE = gl.constexpr(4)  # the key tile
_STEPS = gl.constexpr(5)  # row tiles of the key tile; 0: one, which does not exist; -1: nothing more comes
_FIELDS = gl.constexpr(6)


@gluon.constexpr_function
def _threads(parts):
    """At `_ROWS_FREE`: three warpgroups, the loading warp, which waits for the others, and those that store."""
    return 3 * 128 + 32 + 32 * parts


@gluon.jit
def _leave_rows(stage, PARTS: gl.constexpr):
    named_barrier_arrive(_ROWS_FREE + stage, _threads(PARTS))


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
def _load_keys(keys, tiles, ready, unit, kv_heads, tile, side, PART: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """A tile of keys, or of values, or `PART` of it.

    `ready` is that of its first tile of rows, and counts their bytes together.
    """
    for half in gl.static_range(PART, 2, PARTS):
        at = [unit // kv_heads, unit % kv_heads, tile * 128 + half * 64, 0]
        tma_load(keys, at, ready, tiles.index(side * 2 + half))


@gluon.jit
def _expect(ready, first, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """The bytes of a tile of rows, and of the keys or values that come with the `first`."""
    if first:
        mbarrier.expect(ready, (BLOCK_M + 128) * BLOCK_D * 2)
    else:
        mbarrier.expect(ready, BLOCK_M * BLOCK_D * 2)


@gluon.jit
def _load_rows(
    q, k, v, dout, lse, delta, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, places, keys_free, q_ready,
    do_ready, batch, head, heads, kv_heads, row, mask, place, unit, tile, steps, turn, step, first, q_len,
    SIDES: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Row tile number `step` of the program, and what there is to say of it.

    With the `first` one of key tile `turn` come its keys, and the values if SIDES is 2.
    """
    LANES: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    rows = row + gl.arange(0, BLOCK_M, LANES)
    at = (batch.to(gl.int64) * heads + head) * q_len
    row_lse = gl.load(lse + at + rows, mask=rows < q_len, other=float("inf"))
    row_delta = gl.load(delta + at + rows, mask=rows < q_len, other=0.0)
    stage = step & 1
    if step >= 2:
        named_barrier_sync(_ROWS_FREE + stage, _threads(PARTS))
    # Keys and queries are on their way before the barrier knows how many bytes they are: it opens only when it does,
    # and then what is stored here has come, too.
    if first:
        mbarrier.wait(keys_free.index(turn & 1), ((turn // 2) & 1) ^ 1)
        _load_keys(k, k_tiles, q_ready.index(stage), unit, kv_heads, tile, turn & 1)
        if SIDES == 2:
            _load_keys(v, v_tiles, do_ready.index(stage), unit, kv_heads, tile, turn & 1)
    tma_load(q, [batch, head, row, 0], q_ready.index(stage), q_tiles.index(stage))
    _expect(do_ready.index(stage), first, BLOCK_M, BLOCK_D)
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
    _expect(q_ready.index(stage), first, BLOCK_M, BLOCK_D)


@gluon.jit
def _feed(
    q, k, v, dout, lse, delta, segments, launch, turns, counter, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
    delta_tiles, places, keys_free, q_ready, do_ready,
    heads, kv_heads, units, together, mask_batch, mask_heads, q_len, n_kv, n_columns, padded,
    SIDES: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, SUBTILES: gl.constexpr, SEGMENTS: gl.constexpr,
    VISIBLE: gl.constexpr, ORDERED: gl.constexpr, SHARED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The warp that takes key tiles and loads them, their values if SIDES is 2, and the rows that see them."""
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
        if steps == 0:
            if SHARED:
                following = _next(counter, ORDERED)
            _load_rows(
                q, k, v, dout, lse, delta, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, places,
                keys_free, q_ready, do_ready, batch, first_head, heads, kv_heads, padded, mask * 2, 0, unit, tile,
                steps, turn, step, True, q_len, SIDES, PARTS, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            step += 1
        begin = step
        end = step + steps
        for member in range(group):
            head = first_head + member
            if member > 0:
                mask, starts, ends = _ranges_of(
                    ranges, batch, head, heads, mask_batch, mask_heads, n_kv, SEGMENTS, ROWS // BLOCK_M
                )
            done = 0
            for _ in range(SEGMENTS):
                first, last, partial = _range(starts, ends, done, VISIBLE)
                done = gl.maximum(done, last)
                skip = 0
                if not ORDERED:  # so that programs side by side do not meet in dQ
                    skip = gl.where(last - first < _LONG // BLOCK_M, 0, tile % gl.maximum(last - first, 1))
                for count in range(last - first):
                    index = first + count + skip
                    index = gl.where(index < last, index, index - (last - first))
                    if SHARED and step + 1 == end:
                        following = _next(counter, ORDERED)
                    place = (batch * heads + head) * (padded // BLOCK_M) + index
                    _load_rows(
                        q, k, v, dout, lse, delta, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, places,
                        keys_free, q_ready, do_ready, batch, head, heads, kv_heads, index * BLOCK_M,
                        mask * 2 + partial, place, unit, tile, steps, turn, step, step == begin, q_len,
                        SIDES, PARTS, BLOCK_M, BLOCK_D,
                    )  # fmt: skip
                    step += 1
        program = following
        turn += 1
    stage = step & 1
    if step >= 2:
        named_barrier_sync(_ROWS_FREE + stage, _threads(PARTS))
    _write(places, stage, _STEPS, -1)
    _write(places, stage, _MASK, 0)  # who makes scores ahead makes them of this, too
    group_barrier()
    mbarrier.arrive(q_ready.index(stage), count=1)


@gluon.jit
def _store_gradients(
    PART: gl.constexpr, v, sums, dk, dv, order, locks, dq_tiles, k_tiles, v_tiles, places, keys_free, q_ready, do_ready,
    dq_ready, dq_free, sums_ready, kv_heads, n_q, n_kv,
    PLACED: gl.constexpr, SIDES: gl.constexpr, PARTS: gl.constexpr, SUBTILES: gl.constexpr, ROWS: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """A warp that adds dQ, tile by tile of rows, and stores dK and dV unless they are PLACED.

    With two PARTS, this and another one take turns, and each has the gradients of a warpgroup; with one, the other is
    idle. Where values have room for one tile only, it also loads them, when the gradients before are gone.
    """
    if PART >= PARTS:
        return
    step = 0
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    steps = _read(places, 0, _STEPS)
    while steps >= 0:
        side = turn % SIDES
        tile = _read(places, step & 1, _TILE)
        unit = _read(places, step & 1, _UNIT)
        if SIDES == 1:  # only now are the gradients gone from the values' place
            _load_keys(v, v_tiles, do_ready.index(step & 1), unit, kv_heads, tile, side, PART, PARTS)
        end = step + gl.maximum(steps, 1)
        while step < end:
            stage = step & 1
            place = _read(places, stage, _PLACE)
            mask = _read(places, stage, _MASK)
            row = _read(places, stage, _ROW)
            group_barrier()
            _leave_rows(stage, PARTS)
            if step % PARTS == PART:
                lock = locks + place
                earlier = 0
                if ORDERED:
                    row_tile = (mask // 2).to(gl.int64) * n_q + row // ROWS
                    before = gl.load(order + row_tile * n_kv + tile // SUBTILES, mask=steps > 0, other=0).to(gl.int32)
                    earlier = before * SUBTILES + tile % SUBTILES
                for half in gl.static_range(2):
                    mbarrier.wait(dq_ready.index(stage * 2 + half), (step // 2) & 1)
                    if steps > 0:
                        if ORDERED and half == 0:
                            wait_for_count(lock, earlier)
                        tma_reduce_add(sums, [place * 256 + half * 128, 0], dq_tiles.index(half))
                    tma_store_wait(0)
                    mbarrier.arrive(dq_free.index(half), count=1)
                if ORDERED and steps > 0:
                    gl.inline_asm_elementwise(
                        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                    )
                    group_barrier()
                    gl.atomic_add(lock, 1, sem="release")
            step += 1
            # The next tile of rows, of which `places` says what there is to do.
            mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1, pred=step < end)
        mbarrier.wait(sums_ready.index(side * PARTS + PART), (turn // SIDES) & 1)
        if not PLACED:
            for half in gl.static_range(PART, 2, PARTS):
                to = [unit // kv_heads, unit % kv_heads, tile * 128 + half * 64, 0]
                tma_store(dk, to, k_tiles.index((turn & 1) * 2 + half))
                tma_store(dv, to, v_tiles.index(side * 2 + half))
            tma_store_wait(0)
        mbarrier.arrive(keys_free.index(turn & 1), count=1)
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
    indices, stage, places, q_len, kv_len,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(whether a tile is partial, then the visible ones of a thread's rows as a word for each of its keys [64, 4])."""
    COUNT: gl.constexpr = BLOCK_M // 4
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    hidden = gl.zeros([64, 4], gl.int32, WORDS)
    mask = _read(places, stage, _MASK)
    partial = (mask & 1) != 0
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
    scores, indices, stage, places, lse_tiles, q_len, kv_len, factor, bend,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, BLOCK_M: gl.constexpr,
    LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Wait for the scores [64, BM], the last product begun.

    Returns:
        their softmax weights, and what the weights' gradient is multiplied with to be the scores' gradient.
    """
    SPLIT: gl.constexpr = [64, BLOCK_M // 8, 4, 2]
    PIECES: gl.constexpr = gl.reshape(gl.zeros([64, BLOCK_M], gl.float32, LAYOUT), SPLIT).type.layout
    partial, marks = _mark(indices, stage, places, q_len, kv_len, HALF, CAUSAL, N, BLOCK_M, PIECES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if CAP:
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (bend * _TWO_LOG2_E)))
    row_lse = gl.expand_dims(lse_tiles.index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.exp2(scores * factor - row_lse)
    if partial:
        pieces, words = gl.broadcast(gl.reshape(weights, SPLIT), gl.expand_dims(gl.expand_dims(marks, 1), 3))
        weights = gl.convert_layout(gl.reshape(keep_marked(pieces, words), [64, BLOCK_M]), LAYOUT)
    narrow = _narrow(weights, DTYPE)
    slopes = narrow
    if CAP:
        slopes = _narrow(weights * (1.0 - scores * scores), DTYPE)
    return narrow, slopes


@gluon.jit
def _stage_dq(dq, dq_tiles, HALF: gl.constexpr):
    """Lay half a tile of dQ out, for the warp that adds it: a thread's four neighbours together, without conflicts."""
    pieces = dq.reshape([4, 2, 4, 2, 8, 4, 2]).permute([4, 0, 2, 3, 5, 1, 6]).reshape([128, 32])
    dq_tiles.index(HALF).store(pieces)
    fence_async_shared()
    group_barrier()


@gluon.jit
def _stage_sums(
    dkeys, dvalues, k_tile, v_tile, dk_rows, dv_rows, k_order, ds_free, sums_ready, step, steps, unit, column, kv_heads,
    kv_len, scale,
    PLACED: gl.constexpr, BLOCK_D: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Put dK and dV of a warpgroup's 64 keys in their and the values' place.

    PLACED stores them from there, too, each row where `k_order` says.
    """
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
    mbarrier.wait(ds_free.index(step & 1), (step // 2) & 1)  # the last dQ is made of the keys
    tile = k_tile.reshape([64, BLOCK_D])
    tile.store(_narrow(dkeys * scale, DTYPE))
    if PLACED:
        group_barrier()
        gl.store(dk_rows + to, tile.load(ROWS), mask=inside)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(sums_ready, count=1)


@gluon.jit
def _accumulate_keys(
    HALF: gl.constexpr, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
    delta_tiles, places, ds_tiles, q_ready, do_ready, ds_ready, ds_free, sums_ready, kv_heads, q_len,
    kv_len, scale, factor, bend,
    PLACED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, SIDES: gl.constexpr,
    PARTS: gl.constexpr, AHEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Warpgroup `HALF`, 0 or 1: dK and dV of 64 keys of every tile.

    While one computes, the tensor cores work for the others. AHEAD makes the scores of the next tile of rows beside dK,
    which then reads the scores' gradients where they are stored for dQ. Else dK has them in registers and is in the
    making when they are stored, and the scores come after it.
    """
    dtype: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KV, 2)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, S)
    step = 0
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    steps = _read(places, 0, _STEPS)
    if AHEAD:
        keys = k_tiles.index(HALF).reshape([64, BLOCK_D])
        queries = q_tiles.index(0).reshape([BLOCK_M, BLOCK_D])
        scores = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        weights, slopes = _weigh(
            scores, indices, 0, places, lse_tiles, q_len, kv_len, factor, bend, HALF, CAUSAL, N, CAP, BLOCK_M, S, dtype
        )
    while steps >= 0:
        key_side = (turn & 1) * 2 + HALF
        side = turn % SIDES
        column = _read(places, step & 1, _TILE) * 128 + HALF * 64
        unit = _read(places, step & 1, _UNIT)
        dkeys = gl.zeros([64, BLOCK_D], gl.float32, KV)
        dvalues = gl.zeros([64, BLOCK_D], gl.float32, KV)
        for i in range(gl.maximum(steps, 1)):
            hidden = opaque_zero()
            stage = step & 1
            values = v_tiles.index(side * 2 + HALF + hidden).reshape([64, BLOCK_D])
            queries = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
            upstream = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
            if not AHEAD:
                keys = k_tiles.index(key_side + hidden).reshape([64, BLOCK_D])
                mbarrier.wait(q_ready.index(stage), (step // 2) & 1)
                scores = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                weights, slopes = _weigh(
                    scores, indices, stage, places, lse_tiles, q_len, kv_len, factor, bend, HALF, CAUSAL, N, CAP,
                    BLOCK_M, S, dtype,
                )  # fmt: skip
            mbarrier.wait(do_ready.index(stage), (step // 2) & 1)
            if CAP:  # there are no registers for both
                dvalues = warpgroup_mma(gl.convert_layout(weights, OPERAND), upstream, dvalues, is_async=True)
                dvalues = warpgroup_mma_wait(0, deps=[dvalues])
            dweights = warpgroup_mma(values, upstream.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if not CAP:
                dvalues = warpgroup_mma(gl.convert_layout(weights, OPERAND), upstream, dvalues, is_async=True)
            row_delta = gl.expand_dims(delta_tiles.index(stage).load(gl.SliceLayout(0, S)), 0)
            dweights = warpgroup_mma_wait(0 if CAP else 1, deps=[dweights])
            dscores = _narrow(_widen(slopes, dtype) * (dweights - row_delta), dtype)
            if not AHEAD:
                dkeys = warpgroup_mma(gl.convert_layout(dscores, OPERAND), queries, dkeys, is_async=True)
            mbarrier.wait(ds_free.index(stage), ((step // 2) & 1) ^ 1)
            ds_tiles.index(stage * 2 + HALF).store(dscores)
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(ds_ready.index(stage), count=1)
            step += 1
            if AHEAD:
                dkeys = warpgroup_mma(ds_tiles.index(stage * 2 + HALF), queries, dkeys, is_async=True)
                keys = k_tiles.index(gl.where(i + 1 < steps, key_side, key_side ^ 2) + hidden).reshape([64, BLOCK_D])
                queries = q_tiles.index(stage ^ 1).reshape([BLOCK_M, BLOCK_D])
                mbarrier.wait(q_ready.index(stage ^ 1), (step // 2) & 1)
                scores = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            dkeys, dvalues = warpgroup_mma_wait(1 if AHEAD else 0, deps=[dkeys, dvalues])
            _leave_rows(stage, PARTS)
            if AHEAD:
                weights, slopes = _weigh(
                    scores, indices, stage ^ 1, places, lse_tiles, q_len, kv_len, factor, bend, HALF, CAUSAL, N, CAP,
                    BLOCK_M, S, dtype,
                )  # fmt: skip
        _stage_sums(
            dkeys, dvalues, k_tiles.index(key_side), v_tiles.index(side * 2 + HALF), dk_rows, dv_rows, k_order, ds_free,
            sums_ready.index(side * PARTS + HALF % PARTS), step - 1, steps, unit, column, kv_heads, kv_len, scale,
            PLACED, BLOCK_D, dtype,
        )  # fmt: skip
        turn += 1
        if not AHEAD:
            mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1)
        steps = _read(places, step & 1, _STEPS)


@gluon.jit
def _accumulate_queries(
    k_tiles, ds_tiles, dq_tiles, places, q_ready, ds_ready, ds_free, dq_ready, dq_free,
    PARTS: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The third warpgroup: the share of dQ of every tile of rows, in halves [64, 64] of its rows or of its columns."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    no_dq = gl.zeros([64, 64], gl.float32, DQ)
    step = 0
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    steps = _read(places, 0, _STEPS)
    while steps >= 0:
        for _ in range(gl.maximum(steps, 1)):
            stage = step & 1
            mbarrier.wait(ds_ready.index(stage), (step // 2) & 1)
            # Sooner, it might arrive twice before the loading warp has passed the barrier once.
            _leave_rows(stage, PARTS)
            hidden = opaque_zero()
            for half in gl.static_range(2):
                dq = no_dq
                for group in gl.static_range(2):
                    dscores = ds_tiles.index(stage * 2 + group + hidden)
                    keys = k_tiles.index((turn & 1) * 2 + group + hidden).reshape([64, BLOCK_D])
                    if BLOCK_D == 64:
                        dscores = dscores.slice(half * 64, 64, dim=1)
                    else:
                        keys = keys.slice(half * 64, 64, dim=1)
                    dq = warpgroup_mma(dscores.permute((1, 0)), keys, dq, use_acc=group > 0, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
                mbarrier.wait(dq_free.index(half), (step & 1) ^ 1)
                _stage_dq(dq, dq_tiles, half)
                mbarrier.arrive(dq_ready.index(stage * 2 + half), count=1)
            mbarrier.arrive(ds_free.index(stage), count=1)
            step += 1
        turn += 1
        mbarrier.wait(q_ready.index(step & 1), (step // 2) & 1)
        steps = _read(places, step & 1, _STEPS)


_RUNTIME = ["heads", "kv_heads", "units", "together", "mask_batch", "mask_heads", "q_len", "kv_len", "n_q", "n_kv",
            "n_columns", "padded"]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def _backward(
    q, k, v, dout, sums, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, order, locks, launch, turns,
    counter,
    heads, kv_heads, units, together, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_columns, padded,
    scale, factor, bend,
    CAUSAL: gl.constexpr, N: gl.constexpr, CAP: gl.constexpr, ORDERED: gl.constexpr, PLACED: gl.constexpr,
    SIDES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr, ROWS: gl.constexpr, SUBTILES: gl.constexpr, VISIBLE: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], q.dtype)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, BLOCK_D], dout.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [4, 1, 1, 64, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [2 * SIDES, 1, 1, 64, BLOCK_D], v.layout)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, 64, BLOCK_M], SCORES)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN)
    places = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], PLAIN)
    keys_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    sums_ready = gl.allocate_shared_memory(gl.int64, [SIDES * PARTS, 1], BARRIER)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)  # of two halves a stage, since warps may take turns
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(SIDES * PARTS):
        mbarrier.init(sums_ready.index(i), count=2 // PARTS)
    for i in gl.static_range(4):
        mbarrier.init(dq_ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(keys_free.index(i), count=PARTS)
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(ds_free.index(i), count=1)
        mbarrier.init(dq_free.index(i), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_accumulate_keys, (
                0, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                places, ds_tiles, q_ready, do_ready, ds_ready, ds_free, sums_ready, kv_heads, q_len, kv_len, scale,
                factor, bend, PLACED, CAUSAL, N, CAP, SIDES, PARTS, AHEAD, BLOCK_M, BLOCK_D,
            )),
            (_accumulate_keys, (
                1, dk_rows, dv_rows, k_order, indices, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                places, ds_tiles, q_ready, do_ready, ds_ready, ds_free, sums_ready, kv_heads, q_len, kv_len, scale,
                factor, bend, PLACED, CAUSAL, N, CAP, SIDES, PARTS, AHEAD, BLOCK_M, BLOCK_D,
            )),
            (_accumulate_queries, (
                k_tiles, ds_tiles, dq_tiles, places, q_ready, ds_ready, ds_free, dq_ready, dq_free, PARTS, BLOCK_D,
            )),
            (_feed, (
                q, k, v, dout, lse, delta, segments, launch, turns, counter, q_tiles, k_tiles, v_tiles, do_tiles,
                lse_tiles, delta_tiles, places, keys_free, q_ready, do_ready, heads, kv_heads, units,
                together, mask_batch, mask_heads, q_len, n_kv, n_columns, padded, SIDES, PARTS, ROWS, SUBTILES,
                SEGMENTS, VISIBLE, ORDERED, SHARED, BLOCK_M, BLOCK_D,
            )),
            (_store_gradients, (
                0, v, sums, dk, dv, order, locks, dq_tiles, k_tiles, v_tiles, places, keys_free, q_ready, do_ready,
                dq_ready, dq_free, sums_ready, kv_heads, n_q, n_kv, PLACED, SIDES, PARTS, SUBTILES, ROWS, ORDERED,
            )),
            (_store_gradients, (
                1, v, sums, dk, dv, order, locks, dq_tiles, k_tiles, v_tiles, places, keys_free, q_ready, do_ready,
                dq_ready, dq_free, sums_ready, kv_heads, n_q, n_kv, PLACED, SIDES, PARTS, SUBTILES, ROWS, ORDERED,
            )),
        ],
        [4, 4, 1, 1, 1],
        [208, 64, 32, 32, 32],  # of 512 for four warpgroups, of which single warps are the last: 208 are left
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
    """Sums in the order of `_stage_dq`, scaled, to dq [B, Hq, Sq, D]: one of the two halves of a tile of rows.

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

_TILES = {64: (128, 2, 1), 128: (64, 1, 2)}  # query rows of a tile, places for values, and warps that store
_ROWS_AT_HAND = 8 << 20  # bytes of rows, of the heads whose key tiles take turns, that the L2 cache should hold
_ROWS_BY_TURNS = 6 << 20  # rows times head_dim of the longest lists of the heads that take turns where dQ has an order


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Delta,
    mask: FlashMask,
    plan: Plan,
    scale: float,
    softcap: float,
    deterministic: bool = False,
    orders: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward.

    Args:
        dout: gradient of the output, [B, Hq, Sq, D].
        q: [B, Hq, Sq, D], bfloat16 or float16, D 64 or 128.
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, D].
        lse: float32 [B, Hq, Sq] of the forward.
        delta: float32 [B, Hq, Sq], or what it follows from.
        mask: the mask.
        plan: its plan.
        scale: factor on the scores.
        softcap: 0 is none.
        deterministic: add to dQ in a fixed order, so that repeated runs agree to the bit.
        orders: int32 [B, Hq, Sq] and [B, Hkv, Skv], where to put each row of dq, and of dk and dv: permutations of
            every head's rows. Or None.

    Returns:
        dq, dk, dv laid out like `torch.empty_like` of q, k, v, with `orders` stored as [B, S, H, D]; and delta.
    """
    given = q, k, v
    q, k, v, dout = (describable(x) for x in (q, k, v, dout))
    launch = launches_of(dout, q, k, v, delta, mask, plan, scale, softcap, deterministic, orders)
    dq, dk, dv, delta_of = launch(dout, q, k, v, lse, delta, mask.indices, plan, orders)
    if orders is None:
        dq, dk, dv = map(_laid_out_like, given, (q, k, v), (dq, dk, dv))
    return dq, dk, dv, delta_of()


def _laid_out_like(given: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of `x`, which is `given` or a copy, as that of `given`: compilers are told that layout."""
    if x is given:
        return gradient
    like = torch.empty_like(given)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


def launches_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Delta,
    mask: FlashMask,
    plan: Plan,
    scale: float,
    softcap: float,
    deterministic: bool = False,
    orders: tuple[Tensor, Tensor] | None = None,
) -> Callable[..., Gradients]:
    """`prepared` for tensors that descriptors fit; arguments as in `backward`."""
    problem = problem_of(q, k, v, mask, plan, scale, softcap)
    slots = multiprocessors(q.device)
    return prepared(problem, layout_of(dout), output_layout(delta), orders is not None, deterministic, slots)


@lru_cache(maxsize=1024)
def prepared(
    problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool, deterministic: bool, slots: int
) -> Callable[..., Gradients]:
    """Settle what follows from layouts that descriptors fit, for launches that differ in the memory of tensors alone.

    Args:
        problem: the layouts, and what else is known of the call.
        dout: layout of the output's gradient.
        output: of what delta follows from, or None if it is there.
        ordered: whether rows are put in orders.
        deterministic: as in `backward`.
        slots: programs that run at a time.

    Returns:
        (dout, q, k, v, lse, delta, indices, plan, orders) -> gradients, as in `backward`. The first four begin at
        multiples of 16 bytes.
    """
    q, k, v, causal, scale = problem.q, problem.k, problem.v, problem.causal, problem.scale
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    device = q.device
    block, sides, storing = _TILES[dim]
    mask_batch, mask_heads, n_q, n_kv = problem.listed
    padded = -(-q_len // ROWS) * ROWS
    sums_like = packed_layout(batch * heads * padded * dim // 32, 32, dtype=torch.float32, device=device)
    counter_like = packed_layout(1, dtype=torch.int32, device=device)
    delta_like = packed_layout(batch, heads, q_len, dtype=torch.float32, device=device)
    made = {} if output is None else {"delta": delta_like}
    scratch_like, parts = side_by_side(sums=sums_like, counter=counter_like, **made)
    new_order = packed_layout(*problem.listed, dtype=torch.int16, device=device).maker()
    new_locks = packed_layout(batch * heads * padded // block, dtype=torch.int32, device=device).maker()
    subtiles = plan_columns(kv_len) // COLUMNS
    n_columns = -(-kv_len // plan_columns(kv_len)) * subtiles
    units = batch * kv_heads
    shared = n_columns * units > slots
    # Heads that take turns put equal work side by side.
    together = max(1, _ROWS_AT_HAND // (q_len * dim * (heads // kv_heads) * 4))
    groups = min(mask_heads, kv_heads)
    most = _ROWS_BY_TURNS // (dim * ROWS * (heads // kv_heads))
    dq_like, dk_like, dv_like = (
        packed_layout(*x.shape, dtype=x.dtype, device=x.device, order=(0, 2, 1, 3)) if ordered else layout_like(x)
        for x in (q, k, v)
    )
    new_dq, new_dk, new_dv, new_scratch = (x.maker() for x in (dq_like, dk_like, dv_like, scratch_like))
    tiles = (
        rows_template(q, block), rows_template(k, 64), rows_template(v, 64), rows_template(dout, block),
        template(make_descriptor, sums_like, 128, 32), rows_template(dk_like, 64), rows_template(dv_like, 64),
    )  # fmt: skip
    add = _launch_backward.bind(
        min(n_columns * units, slots),
        heads, kv_heads, units, together, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_columns, padded, scale,
        *problem.factors,
        parts=parts, tiles=tiles, CAUSAL=causal, N=problem.vectors[-1], CAP=problem.capped, ORDERED=deterministic,
        PLACED=ordered, SIDES=sides, PARTS=storing, AHEAD=dim == 64 and not problem.capped, SHARED=shared,
        BLOCK_M=block, BLOCK_D=dim, ROWS=ROWS, SUBTILES=subtiles,
        VISIBLE=VISIBLE_SEGMENTS, SEGMENTS=VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, num_warps=4,
    )  # fmt: skip
    from_output: Any = None if output is None else bind_delta(dout, output.out, q_len, parts, sums=dim)
    n_rows = padded // block
    scale_dq = _launch_scale_dq.bind(
        2 * n_rows * heads * batch,
        *dq_like.strides[:3], heads, q_len, n_rows, scale,
        parts={"sums": parts["sums"]}, PLACED=ordered, BLOCK_M=block, BLOCK_D=dim, num_warps=4,
    )  # fmt: skip

    delta_of: Any = parts["delta"].of if made else lambda delta: delta

    def run(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Delta,
        indices: Tensor,
        plan: Plan,
        orders: tuple[Tensor, Tensor] | None = None,
    ) -> Gradients:
        q_order, k_order = orders or (None, None)
        dq, dk, dv, scratch = new_dq(), new_dk(), new_dv(), new_scratch()
        counter = scratch if shared else None
        if isinstance(delta, tuple):
            out, dlse = delta
            dlse = None if dlse is None else dlse.contiguous()
            from_output.launch(dout, out, dlse, scratch, None if dlse is None else lse, None, scratch, counter)
            delta = scratch
        else:
            clear(scratch)
        order = locks = launch = turns = plan.segments  # not read
        if deterministic:
            order, locks = clear(new_order()), clear(new_locks())
            launch, turns = _launch_order(plan, causal, groups, n_columns // subtiles, together, most)
            with torch.cuda.device_of(q):
                _row_order[(mask_batch * mask_heads * n_q,)](
                    plan.tiles, plan.counts, launch, order, n_q, n_kv, n_columns // subtiles, mask_heads // groups,
                    LANES=256, num_warps=4,
                )  # fmt: skip
        placed = (dk, dv) if ordered else (None, None)
        add.launch(
            q, k, v, dout, scratch, dk, dv, *placed, k_order, lse, delta, indices.contiguous(), plan.segments,
            order, locks, launch, turns, counter,
        )  # fmt: skip
        scale_dq.launch(scratch, dq, q_order)
        return dq, dk, dv, partial(delta_of, delta)

    return run


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
