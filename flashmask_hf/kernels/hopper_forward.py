"""The forward on Hopper (sm_90a), in Gluon: warp-specialized, fed by the tensor memory accelerator (TMA).

A program stays on a multiprocessor and takes one tile of query rows after the other from a counter. Its warps have
roles. One warp walks the plan's list and sends queries, keys and values to shared memory; two turn the intervals of
partial tiles into bits; two groups of four warps multiply, 64 rows each, or three where head_dim leaves the registers
and rows see many tiles: more of them hide exponentials better. A group issues the scores of the next tile of keys
before the products of this one are done, so that its softmax runs beside them (FlashAttention-3, section 3). Weights
stay in registers. One loop runs through all tiles of keys, first ones and partial ones, too: short code stays in the
instruction cache.
"""

# Device code: a tile or a constexpr reads as an int or a function there.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from flashmask_hf.kernels.configs import multiprocessors
from flashmask_hf.kernels.descriptors import describable, packed_layout
from flashmask_hf.kernels.gluon_shim import (
    bits_below,
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    keep_signed,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque_zero,
    rescale,
    rows_template,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.native import is_capturing
from flashmask_hf.kernels.plan import JOINED_ROWS, join_rows
from flashmask_hf.kernels.problem import Problem, problem_of
from flashmask_hf.kernels.tiles import LN_2, LOG2_E, LOWEST
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import COLUMNS, Plan, plan_columns


class Config(NamedTuple):
    """Tiles, and registers of a thread that multiplies and of one that does not.

    A tile has 64 rows for each of `groups` and `columns` keys, `stages` of which are in flight.
    """

    groups: int
    columns: int
    stages: int
    registers: int
    helper_registers: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.groups


_FORWARD = {64: Config(2, 128, 2, 216, 72), 128: Config(2, 128, 2, 232, 40)}

# Tall tiles, by head_dim. Where rows see many tiles of keys they are up to 25% faster, as measured on an H200
# (bfloat16), and where they see few, as in short documents or a narrow window, up to 70% slower: a tall tile has more
# of them at its edges. A call takes them if it has `_TALL_QUERIES` queries a head and `_TALL_ROWS` in all, and if its
# masks, which only the device knows, have `_TALL_TILES` tiles of keys a list, on average (`join_rows`).
_TALL = {64: Config(3, 128, 2, 160, 32)}
_TALL_QUERIES = 4096
_TALL_ROWS = 1 << 18
_TALL_TILES = 10

_LOG2_E = gl.constexpr(LOG2_E.value)
_LN_2 = gl.constexpr(LN_2.value)
_LOWEST = gl.constexpr(LOWEST.value)
_NEVER = gl.constexpr(2147483647)
_SLACK = gl.constexpr(8.0)
"""How far scores, in units of log2, may exceed the offset of their exponentials before it follows the maximum."""

# Fields of the board, on which the feeding warp writes what the others need of a tile of rows. It has two sides.
_STEPS = gl.constexpr(0)
_VISIBLE = gl.constexpr(1)
_ROW = gl.constexpr(2)
_BATCH = gl.constexpr(3)
_HEAD = gl.constexpr(4)
_LINE = gl.constexpr(5)
_MASK = gl.constexpr(6)
_PLAN_ROW = gl.constexpr(7)
_FIELDS = gl.constexpr(8)

# Barriers in shared memory: a side of the board, a slot of words, the queries. Keys and values have their own.
_WORDS = gl.constexpr(2)
_QUERIES = gl.constexpr(4)
_QUERIES_FREE = gl.constexpr(2)

# Barriers of the hardware: what the multiplying groups have read. These, unlike those in shared memory, cost a group no
# barrier of its own before it arrives.
_WORDS_READ = gl.constexpr(6)
_READ = gl.constexpr(8)  # keys by stage, then values by stage


@gluon.constexpr_function
def _threads(groups, warps):
    """Of the multiplying groups and of so many warps that wait for them."""
    return 128 * groups + 32 * warps


@gluon.jit
def _read(field):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(field.load(layout), 0)


@gluon.jit
def _write(field, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field.store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _open(full, turn):
    """Wait for the board of row tile number `turn`; returns its first field."""
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    return turn % 2 * _FIELDS


@gluon.jit
def _close(free, turn):
    group_barrier()
    mbarrier.arrive(free.index(turn % 2))


@gluon.jit
def _feed(args, GROUPS: gl.constexpr, SUBTILES: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr):
    """Take tiles of rows, put them on the board, and load what they need in the order of the plan's list.

    Neighbouring tiles share a head's keys; the last rows, which see most under a causal mask, go first.
    """
    tensors, sizes, board, q_s, kv_s, barriers = args
    q, k, v, tiles, counts, counter = tensors
    n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, n_q, n_kv = sizes
    full, free, k_full, v_full = barriers
    M: gl.constexpr = q.block_shape[2]
    D: gl.constexpr = q.block_shape[3]
    BLOCK_N: gl.constexpr = k.block_shape[2]
    tile = gl.program_id(0)
    turn = 0
    step = 0
    while tile < n_tiles:
        row_tile = n_rows - 1 - tile % n_rows
        row = row_tile * (GROUPS * M)
        line = tile // n_rows
        batch = line // heads
        head = line % heads
        kv_head = head // (heads // kv_heads)
        mask = (batch % mask_batch) * mask_heads + head // (heads // mask_heads)
        plan_row = mask * n_q + row_tile
        walk = tiles + plan_row.to(gl.int64) * n_kv
        visible = gl.load(counts + plan_row * 2)
        partial = gl.load(counts + plan_row * 2 + 1)
        # Rows that see nothing get one tile all the same, hidden pair by pair.
        n = gl.maximum(visible + partial, 1) * SUBTILES
        mbarrier.wait(free.index(turn % 2), ((turn // 2) & 1) ^ 1)
        field = turn % 2 * _FIELDS
        _write(board.index(field + _STEPS), n)
        _write(board.index(field + _VISIBLE), visible * SUBTILES)
        _write(board.index(field + _ROW), row)
        _write(board.index(field + _BATCH), batch)
        _write(board.index(field + _HEAD), head)
        _write(board.index(field + _LINE), line)
        _write(board.index(field + _MASK), mask)
        _write(board.index(field + _PLAN_ROW), gl.where(partial > 0, plan_row, -1))
        group_barrier()
        mbarrier.arrive(full.index(turn % 2))
        following = n_tiles

        side = turn % 2
        mbarrier.wait(free.index(_QUERIES_FREE + side), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(full.index(_QUERIES + side), GROUPS * M * D * 2)
        for group in gl.static_range(GROUPS):
            place = [batch, head, row + group * M, 0]
            tma_load(q, place, full.index(_QUERIES + side), q_s.index(GROUPS * side + group))
        for i in range(n):
            at = i // SUBTILES  # visible tiles from the front of the list, partial ones from its back
            at = gl.where(at < visible, at, n_kv - 1 - (at - visible))
            column = gl.load(walk + at, mask=visible + partial > 0, other=0).to(gl.int32)
            column = (column * SUBTILES + i % SUBTILES) * BLOCK_N
            stage = step % STAGES
            if step >= STAGES:
                named_barrier_sync(_READ + stage, _threads(GROUPS, 1))
            mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
            tma_load(k, [batch, kv_head, column, 0], k_full.index(stage), kv_s.index(stage))
            if step >= STAGES:
                named_barrier_sync(_READ + STAGES + stage, _threads(GROUPS, 1))
            mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
            tma_load(v, [batch, kv_head, column, 0], v_full.index(stage), kv_s.index(STAGES + stage))
            step += 1
            if SHARED and i == 0:  # not before the first loads, for the warp waits for the answer
                drawn = gl.atomic_add(counter, 1)
                gl.store(counter, 0, mask=drawn == n_tiles - 1)  # the last number: each tile draws one
                following = drawn + gl.num_programs(0)
        tile = following
        turn += 1
    mbarrier.wait(free.index(turn % 2), ((turn // 2) & 1) ^ 1)
    _write(board.index(turn % 2 * _FIELDS + _STEPS), 0)
    group_barrier()
    mbarrier.arrive(full.index(turn % 2))


@gluon.jit
def _between(start, end):
    """A word of 32 rows with those from `start` to `end` set; both may lie outside."""
    return bits_below(end) & (-1 - bits_below(start))


@gluon.jit
def _screen(args, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, SUBTILES: gl.constexpr):
    """For each partial tile a bit per pair, set where it is visible: words of 32 rows, of a group [2, BLOCK_N]."""
    indices, tiles, q_len, kv_len, n_kv, board, words, full, free = args
    BLOCK_N: gl.constexpr = words.shape[2]
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, BLOCK_N // 64], [1, 32], [1, 2], [1, 0]))
    turn = 0
    step = 0
    field = _open(full, turn)
    n = _read(board.index(field + _STEPS))
    while n > 0:
        n_visible = _read(board.index(field + _VISIBLE))
        row = _read(board.index(field + _ROW))
        mask = _read(board.index(field + _MASK))
        plan_row = _read(board.index(field + _PLAN_ROW))
        _close(free, turn)
        walk = tiles + plan_row.to(gl.int64) * n_kv
        vectors = indices + mask.to(gl.int64) * kv_len * N
        for i in range(n - n_visible):
            column = gl.load(walk + n_kv - 1 - i // SUBTILES, mask=plan_row >= 0, other=0).to(gl.int32)
            columns = (column * SUBTILES + i % SUBTILES) * BLOCK_N + gl.arange(0, BLOCK_N, layout)
            inside = columns < kv_len
            at = vectors + columns.to(gl.int64) * N
            start = gl.load(at, mask=inside, other=0) - row
            if N == 4 or (N == 2 and CAUSAL):
                end = gl.load(at + 1, mask=inside, other=_NEVER) - row
            if N == 2 and not CAUSAL:
                other_end = gl.load(at + 1, mask=inside, other=0) - row
            if N == 4:
                other_start = gl.load(at + 2, mask=inside, other=0) - row
                other_end = gl.load(at + 3, mask=inside, other=0) - row
            slot = step % 2
            if step >= 2:
                named_barrier_sync(_WORDS_READ + slot, _threads(GROUPS, 2))
            for word in gl.static_range(2 * GROUPS):
                if N == 4 or (N == 2 and CAUSAL):
                    hidden = _between(start - word * 32, end - word * 32)
                else:
                    hidden = -1 - bits_below(start - word * 32)
                if N == 2 and not CAUSAL:
                    hidden = hidden | bits_below(other_end - word * 32)
                if N == 4:
                    hidden = hidden | _between(other_start - word * 32, other_end - word * 32)
                if CAUSAL:
                    hidden = hidden | bits_below(columns - (kv_len - q_len) - row - word * 32)
                word_s = words.index(slot * GROUPS + word // 2).slice(word % 2, 1, dim=0)
                word_s.store(gl.expand_dims(-1 - hidden, 0))
            group_barrier()
            mbarrier.arrive(full.index(_WORDS + slot))
            step += 1
        turn += 1
        field = _open(full, turn)
        n = _read(board.index(field + _STEPS))


@gluon.jit
def _hide(scores, masked, words, full, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Scores [64, BLOCK_N] of a group with the hidden pairs of partial tile number `masked` at -inf."""
    layout: gl.constexpr = scores.type.layout
    halves = gl.reshape(scores, [2, 32, scores.shape[1]])
    slot = masked % 2
    mbarrier.wait(full.index(_WORDS + slot), (masked // 2) & 1)
    bits = words.index(slot * GROUPS + GROUP).load(gl.SliceLayout(1, halves.type.layout))
    named_barrier_arrive(_WORDS_READ + slot, _threads(GROUPS, 2))
    bits, _halves = gl.broadcast(gl.expand_dims(bits, 1), halves)
    bits = gl.convert_layout(gl.reshape(bits, [64, scores.shape[1]]), layout)
    # A thread holds rows r and r + 8 of a word: their bits become the signs of bytes 2 and 3.
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    flags = bits << gl.expand_dims(23 - (rows & 23), 1)
    selector = gl.expand_dims(gl.where((rows & 8) != 0, 0xBBBB, 0xAAAA), 1)
    scores, selector = gl.broadcast(scores, selector)
    return keep_signed(scores, flags, selector)


@gluon.jit
def _tanh(x):
    """Hyperbolic tangent to float32 accuracy, as `tiles.tanh`."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = gl.exp2(gl.abs(x) * (-2.0 * _LOG2_E))
    exact = (1.0 - decay) / (1.0 + decay)
    return gl.where(gl.abs(x) < 0.25, series, gl.where(x < 0, -exact, exact))


@gluon.jit
def _reduce(x, AXIS: gl.constexpr, MAX: gl.constexpr):
    return gl.max(x, AXIS) if MAX else gl.sum(x, AXIS)


@gluon.jit
def _within_lanes(x, MAX: gl.constexpr):
    """Maximum or sum of [M, N] over what a lane holds of a row: [M, 4]. As a tree, for there is no time for a chain."""
    M: gl.constexpr = x.shape[0]
    x = _reduce(gl.reshape(x, [M, x.shape[1] // 8, 4, 2]), 3, MAX)
    for _ in gl.static_range(6):
        if x.shape[1] > 1:
            x = _reduce(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), 1, MAX)
    return gl.reshape(x, [M, 4])


@gluon.jit
def _per_row(x, layout: gl.constexpr):
    """[M] as the column [M, 1] of a tile in `layout`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _soften(scores, top, total, factor):
    """(weights [64, BLOCK_N], decay [64], new top [64], new total [64, 4]); top is in units of log2."""
    layout: gl.constexpr = scores.type.layout
    highest = gl.convert_layout(gl.max(_within_lanes(scores, True), 1), gl.SliceLayout(1, layout))
    highest = highest * factor
    new_top = gl.where(highest > top + _SLACK, highest, top)
    weights = gl.exp2(scores * factor - gl.expand_dims(new_top, 1))
    decay = gl.exp2(top - new_top)
    lanes: gl.constexpr = total.type.layout
    total = total * _per_row(decay, lanes) + _within_lanes(weights, False)
    return weights, decay, new_top, total


@gluon.jit
def _multiply_scores(q_s, kv_s, queries, stage, layout: gl.constexpr):
    """Start the scores [64, BLOCK_N] of the keys in `stage`; `queries` is the place of a group's in `q_s`."""
    M: gl.constexpr = q_s.shape[3]
    D: gl.constexpr = q_s.shape[4]
    BLOCK_N: gl.constexpr = kv_s.shape[3]
    q = q_s.index(queries + opaque_zero()).reshape([M, D])
    keys = kv_s.index(stage).reshape([BLOCK_N, D])
    zero = gl.zeros([M, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(weights, acc, kv_s, stage):
    """Start adding weights times the values in `stage` of `kv_s` to acc [64, D]."""
    BLOCK_N: gl.constexpr = kv_s.shape[3]
    D: gl.constexpr = kv_s.shape[4]
    values = kv_s.index(stage).reshape([BLOCK_N, D])
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _step(
    weights, acc, top, total, queries, begin, step, more, partial, masked, factor, bend, q_s, kv_s, words, full, k_full,
    v_full,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of tile `step`, while the weights of the tile before are multiplied with its values.

    The first step, `begin`, multiplies weights of 0 with its own values, which it keeps for the next; so an infinite
    value makes NaN, as it does wherever a weight is 0.
    """
    layout: gl.constexpr = acc.type.layout
    stage = step % STAGES
    last = gl.where(step > begin, step - 1, begin)
    before = last % STAGES
    scores = _multiply_scores(q_s, kv_s, queries, stage, SCORES)
    mbarrier.wait(v_full.index(before), (last // STAGES) & 1)
    acc = _multiply_values(weights, acc, kv_s, STAGES + before)
    scores = warpgroup_mma_wait(1, deps=[scores])
    named_barrier_arrive(_READ + stage, _threads(GROUPS, 1))
    if CAP:
        scores = _tanh(scores * bend)
    if partial:
        scores = _hide(scores, masked, words, full, GROUP, GROUPS)
    weights, decay, top, total = _soften(scores, top, total, factor)
    weights = gl.convert_layout(weights.to(q_s.dtype), gl.DotOperandLayout(0, layout, 2))
    # This wait is here, not at the top, because it keeps the next one, with nothing between them, behind the softmax.
    mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if step > begin:
        named_barrier_arrive(_READ + STAGES + before, _threads(GROUPS, 1))
    acc, decay = gl.broadcast(acc, _per_row(decay, layout))
    return weights, rescale(acc, decay), top, total


@gluon.jit
def _attend(
    GROUP: gl.constexpr, args,
    GROUPS: gl.constexpr, PLACED: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of 64 rows of every tile on the board. PLACED puts each output row where `order` says."""
    out, out_rows, order, lse, sinks, heads, q_len, factor, bend, board, q_s, kv_s, words, barriers = args
    full, free, k_full, v_full = barriers
    M: gl.constexpr = q_s.shape[3]
    D: gl.constexpr = q_s.shape[4]
    BLOCK_N: gl.constexpr = kv_s.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PIECES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    turn = 0
    step = 0
    masked = 0
    field = _open(full, turn)
    n = _read(board.index(field + _STEPS))
    while n > 0:
        n_visible = _read(board.index(field + _VISIBLE))
        top = gl.full([M], _LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        total = _within_lanes(gl.zeros([M, BLOCK_N], gl.float32, SCORES), False)
        acc = gl.zeros([M, D], gl.float32, OUT)
        if SINKS:
            sink = gl.load(sinks + _read(board.index(field + _HEAD))).to(gl.float32) * _LOG2_E
            top = gl.maximum(top, sink)

        side = turn % 2
        queries = side * GROUPS + GROUP
        begin = step
        stage = step % STAGES
        mbarrier.wait(full.index(_QUERIES + side), (turn // 2) & 1)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        weights = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
        weights = gl.convert_layout(weights.to(q_s.dtype), gl.DotOperandLayout(0, OUT, 2))
        for i in range(n):
            weights, acc, top, total = _step(
                weights, acc, top, total, queries, begin, step, i + 1 < n, i >= n_visible, masked, factor, bend, q_s,
                kv_s, words, full, k_full, v_full, GROUP, GROUPS, CAP, STAGES, SCORES,
            )  # fmt: skip
            step += 1
            masked += gl.where(i >= n_visible, 1, 0)
        before = (step - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
        acc = _multiply_values(weights, acc, kv_s, STAGES + before)

        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        if SINKS:
            sink = gl.load(sinks + _read(board.index(field + _HEAD))).to(gl.float32) * _LOG2_E
            total += gl.exp2(sink - top)
        seen = total != 0  # NaN stays NaN
        total = gl.where(seen, total, 1.0)
        log_sum = gl.where(seen, (top + gl.log2(total)) * _LN_2, float("-inf"))
        row = _read(board.index(field + _ROW)) + GROUP * M
        batch = _read(board.index(field + _BATCH))
        head = _read(board.index(field + _HEAD))
        line = _read(board.index(field + _LINE))
        _close(free, turn)
        rows = row + gl.arange(0, M, gl.SliceLayout(1, SCORES))
        gl.store(lse + line.to(gl.int64) * q_len + rows, log_sum, mask=rows < q_len)
        if PLACED:
            pieces = row + gl.arange(0, M, gl.SliceLayout(1, PIECES))
            place = gl.load(order + line.to(gl.int64) * q_len + pieces, mask=pieces < q_len, other=0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        named_barrier_arrive(_READ + STAGES + before, _threads(GROUPS, 1))
        acc = acc * _per_row(1.0 / total, OUT)
        group_barrier()
        staged = q_s.index(queries).reshape([M, D])  # nobody needs the queries any more
        staged.store(acc.to(q_s.dtype))
        fence_async_shared()
        group_barrier()
        if PLACED:
            at = ((batch.to(gl.int64) * q_len + place) * heads + head) * D
            dims = gl.arange(0, D, gl.SliceLayout(0, PIECES))
            to = out_rows + gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)
            gl.store(to, staged.load(PIECES), mask=gl.expand_dims(pieces < q_len, 1))
        else:
            tma_store(out, [batch, head, row, 0], q_s.index(queries))
        turn += 1
        field = _open(full, turn)
        n = _read(board.index(field + _STEPS))
        tma_store_wait(0)
        group_barrier()
        mbarrier.arrive(free.index(_QUERIES_FREE + side))


_SIZES = ["n_tiles", "n_rows", "heads", "kv_heads", "mask_batch", "mask_heads", "q_len", "kv_len", "n_q", "n_kv"]


@gluon.jit(do_not_specialize=_SIZES)
def _forward(
    q, k, v, out, out_rows, order, lse, sinks, indices, tiles, counts, counter, chosen_rows,
    n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, factor, bend,
    CAUSAL: gl.constexpr, N: gl.constexpr, PLACED: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr,
    GROUPS: gl.constexpr, SUBTILES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    HELPER_REGISTERS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    M: gl.constexpr = q.block_shape[2]
    D: gl.constexpr = q.block_shape[3]
    BLOCK_N: gl.constexpr = k.block_shape[2]
    if chosen_rows is not None:  # there are two launches: the one with tiles of so many rows does the work
        n_tiles = gl.where(gl.load(chosen_rows) == GROUPS * M, n_tiles, 0)
    q_s = gl.allocate_shared_memory(q.dtype, [2 * GROUPS, 1, 1, M, D], q.layout)
    kv_s = gl.allocate_shared_memory(q.dtype, [2 * STAGES, 1, 1, BLOCK_N, D], k.layout)
    words = gl.allocate_shared_memory(gl.int32, [2 * GROUPS, 2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    board = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], line)
    full = gl.allocate_shared_memory(gl.int64, [_QUERIES + 2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_QUERIES_FREE + 2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_QUERIES + 2):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(free.index(i), count=GROUPS + 1)
        mbarrier.init(free.index(_QUERIES_FREE + i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    barriers = (full, free, k_full, v_full)
    attended = (out, out_rows, order, lse, sinks, heads, q_len, factor, bend, board, q_s, kv_s, words, barriers)
    sizes = (n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, n_q, n_kv)
    fed = ((q, k, v, tiles, counts, counter), sizes, board, q_s, kv_s, barriers)
    screened = (indices, tiles, q_len, kv_len, n_kv, board, words, full, free)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, attended, GROUPS, PLACED, SINKS, CAP, STAGES)),
                (_attend, (1, attended, GROUPS, PLACED, SINKS, CAP, STAGES)),
                (_feed, (fed, GROUPS, SUBTILES, STAGES, SHARED)),
                (_screen, (screened, GROUPS, CAUSAL, N, SUBTILES)),
            ],
            [4, 1, 2],
            [REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, attended, GROUPS, PLACED, SINKS, CAP, STAGES)),
                (_attend, (1, attended, GROUPS, PLACED, SINKS, CAP, STAGES)),
                (_attend, (2, attended, GROUPS, PLACED, SINKS, CAP, STAGES)),
                (_feed, (fed, GROUPS, SUBTILES, STAGES, SHARED)),
                (_screen, (screened, GROUPS, CAUSAL, N, SUBTILES)),
            ],
            [4, 4, 1, 2],
            [REGISTERS, REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """What keeps the Hopper kernels from serving such tensors; None if they can."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return f"tensors on {device} (it needs a Hopper GPU, compute capability 9.0)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} (it takes bfloat16 and float16)"
    if head_dim != v_head_dim or head_dim not in _FORWARD:
        return f"head_dim {head_dim} with values of {v_head_dim} (it takes {' and '.join(map(str, _FORWARD))}, alike)"
    return None


_launch = Launcher(_forward)
_counters: dict[tuple[int, int], Tensor] = {}


def _counter(q: Tensor) -> Tensor:
    """int32 [1], 0, for a launch that leaves it 0: those of a stream, which follow one another, have one together.

    A graph may run on any stream and has its own.
    """
    if not q.is_cuda or is_capturing(q):
        return torch.zeros(1, dtype=torch.int32, device=q.device)
    device = q.get_device()
    active: Any = driver.active
    stream = device, active.get_current_stream(device)
    found = _counters.get(stream)
    if found is None:
        # Allocations of this thread may go to a pool whose memory is wanted back, as when a graph is warmed up.
        with ThreadPoolExecutor(1) as thread:
            found = _counters[stream] = thread.submit(_zero, torch.cuda.current_stream(device)).result()
    return found


def _zero(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(1, dtype=torch.int32, device=stream.device)


def _configs(shape: torch.Size, capped: bool, ordered: bool) -> list[Config]:
    """What may serve queries of a shape: besides the usual tiles tall ones, where the mask is to decide.

    It decides for the whole call, and the two add up a row in different orders. So the masks of other rows of the batch
    can change the rounding of a row.

    The tanh of a softcap takes registers that three groups lack. Rows that are put in an `order` are those of sparse
    attention, where each head has its own lists, and short ones in hash buckets.
    """
    batch, heads, q_len, dim = shape
    many = q_len >= _TALL_QUERIES and batch * heads * q_len >= _TALL_ROWS
    tall = [_TALL[dim]] if dim in _TALL and many and not capped and not ordered else []
    return [_FORWARD[dim], *tall]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    plan: Plan,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    config: Config | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward; arguments and results as in `ops.flash_attn_forward`. `config` overrides the tables.

    `order`, int32 [B, Hq, Sq], a permutation of every head's rows, says where to put each row of the output. The
    log-sum-exp stays in the order of q.
    """
    q, k, v = (describable(x) for x in (q, k, v))
    launch = launches_of(q, k, v, mask, plan, sinks, scale, softcap, config, order)
    return launch(q, k, v, mask.indices, plan, sinks, order)


def launches_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    plan: Plan,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    config: Config | None = None,
    order: Tensor | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`prepared` for tensors that descriptors fit; arguments as in `forward`."""
    problem = problem_of(q, k, v, mask, plan, scale, softcap)
    return prepared(problem, sinks is not None, order is not None, multiprocessors(q.device), config)


@lru_cache(maxsize=1024)
def prepared(
    problem: Problem, sinks: bool, ordered: bool, slots: int, config: Config | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Settle what follows from layouts that descriptors fit, for launches that differ in the memory of tensors alone.

    Args:
        problem: the layouts, and what else is known of the call.
        sinks: whether there are any.
        ordered: whether rows are put in an order.
        slots: programs that run at a time.
        config: overrides the tables.

    Returns:
        (q, k, v, indices, plan, sinks, order) -> (out, lse), as in `forward`. q, k and v begin at multiples of 16
        bytes.
    """
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_len = q.shape[:3]
    kv_heads, kv_len = k.shape[1:3]
    mask_batch, mask_heads, n_q, n_kv = problem.listed
    configs = _configs(q.shape, problem.capped, ordered) if config is None else [config]
    joins = any(config.rows == JOINED_ROWS for config in configs)
    least = -(-_TALL_TILES * COLUMNS // plan_columns(kv_len)) if len(configs) > 1 else 0
    out_like = packed_layout(*q.shape, dtype=q.dtype, device=q.device, order=(0, 2, 1, 3))
    new_out = out_like.maker()
    new_lse = packed_layout(batch, heads, q_len, dtype=torch.float32, device=q.device).maker()
    q_tiles, out_tiles = rows_template(q, 64), rows_template(out_like, 64)
    steps = []
    for config in configs:
        n_rows = -(-q_len // config.rows)
        n_tiles = n_rows * heads * batch
        joined = config.rows == JOINED_ROWS
        step = _launch.bind(
            min(n_tiles, slots),
            n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, q_len, kv_len,
            n_rows if joined else n_q, n_kv, *problem.factors,
            CAUSAL=problem.causal, N=problem.vectors[-1], PLACED=ordered, SINKS=sinks,
            CAP=problem.capped, GROUPS=config.groups, SUBTILES=plan_columns(kv_len) // config.columns,
            STAGES=config.stages, REGISTERS=config.registers, HELPER_REGISTERS=config.helper_registers,
            SHARED=n_tiles > slots, num_warps=4,
            tiles=(q_tiles, *(rows_template(x, config.columns) for x in (k, v)), out_tiles),
        )  # fmt: skip
        steps.append((step, joined, n_tiles > slots))

    def run(
        q: Tensor, k: Tensor, v: Tensor, indices: Tensor, plan: Plan, sinks: Tensor | None, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        indices = indices.contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        tall = chosen_rows = None
        if joins:
            *tall, chosen_rows = join_rows(plan, q_len, least)
        for step, joined, shared in steps:
            tiles, counts = tall if joined and tall else (plan.tiles, plan.counts)
            counter = _counter(q) if shared else None
            step.launch(
                q, k, v, out, out if ordered else None, order, lse, sinks, indices, tiles, counts, counter, chosen_rows
            )
        return out, lse

    return run
