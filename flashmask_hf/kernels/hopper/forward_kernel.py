"""Device code of the Hopper forward: a persistent, warp-specialized kernel (FlashAttention-3, section 3).

A program takes work items, tiles of query rows of one head, from a counter. Every warp has one role:

    producer (1 warp)                  mask decoders (2 warps)          consumers (2 or 3 warpgroups, 64 rows each)

    take a work item
    write its slots ----- work_full -> read the slots ---.
                    ----- work_full ---------------------)----------> read the slots
                    <---- work_free ---------------------'----------- after the last key tile
    TMA load Q ---------- q_full ----------------------------------.
    for each key tile in the plan's list:                           |
      TMA load K -------- k_full ----------------------------------> S = Q K^T            (wgmma, asynchronous)
                                                                     O += P V             (wgmma, of the tile before)
                 <------- KEYS_READ ------------------------------- S is complete
                                       decode intervals              S = c tanh(S / c)    (softcap)
                                       to bits --- mask_full ------> S = -inf where hidden (partial tiles only)
                                                <-- MASK_READ -----
                                                                     P = softmax weights of S, in registers
      TMA load V -------- v_full ----------------------------------> (O += P V, in the next round)
                 <------- VALUES_READ ----------------------------- O is complete
                                                                     epilogue: O / row sum -> shared memory of Q
                 <------- q_free ---------------------------------- TMA store of O has read it

x_full and x_free are mbarriers; KEYS_READ, VALUES_READ and MASK_READ are named barriers. Slots, Q and mask bits have
two stages, keys and values STAGES. If shared memory is short, Q has one, loaded after the first keys.

A consumer issues the scores of the next key tile before it waits for the products of this one, so that its softmax runs
beside the tensor cores.
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
    keep_signed,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque_zero,
    rescale,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.hopper.pipeline import (
    NEVER,
    free_phase,
    full_phase,
    issue_dots,
    make_barriers,
    read_slot,
    write_slot,
    write_slots,
)
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound
from flashmask_hf.kernels.shared.device import LN_2, LOG2_E, LOWEST, softcap_tanh

_RESCALE_THRESHOLD = gl.constexpr(8.0)
"""Scores, in units of log2, may exceed the offset of their exponentials by this much before it follows the maximum."""


@device_enum
class Slot:
    """Numbers that describe a work item."""

    KEY_TILES = 0
    """Key tiles to walk; 0 ends the program."""
    VISIBLE_TILES = 1
    """Key tiles without a hidden pair, which come first."""
    ROW = 2
    BATCH = 3
    HEAD = 4
    PLANE = 5
    MASK_PLANE = 6
    """Index of the mask head over the batch."""
    PLAN_ROW = 7
    """Row of the plan's lists, or -1 without partial tiles."""
    COUNT = 8


@device_enum
class NamedBarrier:
    """Ids of hardware barriers, by stage: consumers have read the stage.

    An mbarrier would cost a warpgroup a barrier among its own warps first.
    """

    MASK_READ = 6
    KEYS_READ = 8
    VALUES_READ = 10


@device_enum
class Full:
    """mbarriers of filled stages: index of the first stage."""

    WORK = 0
    MASK = 2
    Q = 4
    COUNT = 6


@device_enum
class Free:
    """mbarriers of stages that may be overwritten: index of the first stage."""

    WORK = 0
    Q = 2
    COUNT = 4


class Tensors(NamedTuple):
    """Global memory."""

    q: Any  # descriptor, tiles [64, D]
    k: Any  # descriptor, tiles [BLOCK_N, D]
    v: Any  # descriptor, tiles [BLOCK_N, D]
    out: Any  # descriptor, tiles [64, D]
    q_tail: Any  # descriptor of q, tiles [64, TAIL] of dims from D on; None without a tail
    k_tail: Any  # descriptor of k, tiles [BLOCK_N, TAIL] of dims from D on, or None
    out_rows: Any  # `out` as a pointer if SCATTER
    order: Any  # int32 [B, Hq, Sq] if SCATTER: target of each row of the output
    lse: Any  # float32 [B, Hq, Sq]
    sinks: Any  # [Hq] or None
    indices: Any  # int32 [mask batch, mask heads, Skv, N]
    tiles: Any  # int16 [mask batch, mask heads, n_q, n_kv], of the plan
    counts: Any  # int32 [mask batch, mask heads, n_q, 2], of the plan
    counter: Any  # int32 [1] if PERSISTENT: work items taken beyond the first ones


class Scalars(NamedTuple):
    """Sizes, and factors of the scores (`Problem.factors`)."""

    n_tiles: Any  # work items
    n_rows: Any  # work items per head
    heads: Any
    kv_heads: Any
    mask_batch: Any
    mask_heads: Any
    q_len: Any
    kv_len: Any
    n_q: Any
    n_kv: Any
    factor: Any
    cap_factor: Any


class Shared(NamedTuple):
    """Shared memory. A stage of queries has WARPGROUPS tiles."""

    q: Any  # [Q_STAGES * WARPGROUPS, 1, 1, 64, D]
    kv: Any  # [2 * STAGES, 1, 1, BLOCK_N, D]: keys by stage, then values by stage
    q_tail: Any  # [Q_STAGES * WARPGROUPS, 1, 1, 64, TAIL] or None
    k_tail: Any  # [STAGES, 1, 1, BLOCK_N, TAIL] or None
    mask_bits: Any  # int32 [2 * WARPGROUPS, 2, BLOCK_N]: bit i of word w is row 32 * w + i, set where a pair is visible
    slots: Any  # int32 [2 * Slot.COUNT, 1]


class Barriers(NamedTuple):
    """mbarriers."""

    full: Any  # [Full.COUNT, 1]
    free: Any  # [Free.COUNT, 1]
    k_full: Any  # [STAGES, 1]
    v_full: Any  # [STAGES, 1]


class Form(NamedTuple):
    """Compile-time constants."""

    CAUSAL: Any
    N: Any
    SCATTER: Any
    SINKS: Any
    CAP: Any
    WARPGROUPS: Any
    SUBTILES: Any
    Q_STAGES: Any
    STAGES: Any
    PERSISTENT: Any
    DEPTH: Any
    """Dims that scores are summed over; the others of a tile are 0."""
    TAIL_DEPTH: Any
    """The same for tails; 0 without a tail."""
    V_HEAD_DIM: Any
    """Head dim of values; further dims of a tile are 0."""


@gluon.constexpr_function
def _threads(warpgroups, warps):
    """Return the threads of the consumers and of `warps` warps that wait for them."""
    return 128 * warpgroups + 32 * warps


@gluon.jit
def _acquire_work(item, args):
    """Wait for work item number `item` of the program; return (index of its first slot, key tiles to walk)."""
    _tensors, _scalars, shared, barriers = args
    slot = item % 2 * Slot.COUNT
    mbarrier.wait(barriers.full.index(Full.WORK + item % 2), full_phase(item, 2))
    return slot, read_slot(shared.slots, slot + Slot.KEY_TILES)


@gluon.jit
def _release_work(barriers, item):
    group_barrier()
    mbarrier.arrive(barriers.free.index(Free.WORK + item % 2))


@gluon.jit
def _load_queries(batch, head, row, item, args, FORM: gl.constexpr):
    """Load the queries of work item number `item` once their stage is free."""
    tensors, _scalars, shared, barriers = args
    WARPGROUPS: gl.constexpr = FORM.WARPGROUPS
    M: gl.constexpr = tensors.q.block_shape[2]
    D: gl.constexpr = tensors.q.block_shape[3]
    stage = item % FORM.Q_STAGES
    full = barriers.full.index(Full.Q + stage)
    mbarrier.wait(barriers.free.index(Free.Q + stage), free_phase(item, FORM.Q_STAGES))
    TAIL: gl.constexpr = tensors.q_tail.block_shape[3] if FORM.TAIL_DEPTH else 0
    mbarrier.expect(full, WARPGROUPS * M * (D + TAIL) * 2)
    for group in gl.static_range(WARPGROUPS):
        place = WARPGROUPS * stage + group
        tma_load(tensors.q, [batch, head, row + group * M, 0], full, shared.q.index(place))
        if FORM.TAIL_DEPTH:
            tma_load(tensors.q_tail, [batch, head, row + group * M, D], full, shared.q_tail.index(place))


@gluon.jit
def _produce(args, FORM: gl.constexpr):
    """Producer: schedule work items, and load their queries, keys and values in the order of the plan's lists.

    The last rows go first: under a causal mask they see most keys.
    """
    tensors, scalars, shared, barriers = args
    SUBTILES: gl.constexpr = FORM.SUBTILES
    STAGES: gl.constexpr = FORM.STAGES
    M: gl.constexpr = tensors.q.block_shape[2]
    D: gl.constexpr = tensors.q.block_shape[3]
    TAIL: gl.constexpr = tensors.k_tail.block_shape[3] if FORM.TAIL_DEPTH else 0
    BLOCK_N: gl.constexpr = tensors.k.block_shape[2]
    tile = gl.program_id(0)
    item = 0
    step = 0
    while tile < scalars.n_tiles:
        row_tile = scalars.n_rows - 1 - tile % scalars.n_rows
        row = row_tile * (FORM.WARPGROUPS * M)
        plane = tile // scalars.n_rows
        batch = plane // scalars.heads
        head = plane % scalars.heads
        kv_head = head // (scalars.heads // scalars.kv_heads)
        mask_plane = (batch % scalars.mask_batch) * scalars.mask_heads + head // (scalars.heads // scalars.mask_heads)
        plan_row = mask_plane * scalars.n_q + row_tile
        walk = tensors.tiles + plan_row.to(gl.int64) * scalars.n_kv
        visible = gl.load(tensors.counts + plan_row * 2)
        partial = gl.load(tensors.counts + plan_row * 2 + 1)
        # Rows that see nothing walk one tile whose pairs are all hidden.
        n = gl.maximum(visible + partial, 1) * SUBTILES
        mbarrier.wait(barriers.free.index(Free.WORK + item % 2), free_phase(item, 2))
        slot = item % 2 * Slot.COUNT
        write_slots(shared.slots, slot, (n, visible * SUBTILES, row, batch, head, plane, mask_plane))  # as in `Slot`
        write_slot(shared.slots, slot + Slot.PLAN_ROW, gl.where(partial > 0, plan_row, -1))
        group_barrier()
        mbarrier.arrive(barriers.full.index(Full.WORK + item % 2))
        following = scalars.n_tiles

        if FORM.Q_STAGES == 2:
            _load_queries(batch, head, row, item, args, FORM)
        for i in range(n):
            nth = i // SUBTILES  # visible tiles are listed from the front, partial tiles from the back
            nth = gl.where(nth < visible, nth, scalars.n_kv - 1 - (nth - visible))
            column = gl.load(walk + nth, mask=visible + partial > 0, other=0).to(gl.int32)
            column = (column * SUBTILES + i % SUBTILES) * BLOCK_N
            stage = step % STAGES
            if step >= STAGES:
                named_barrier_sync(NamedBarrier.KEYS_READ + stage, _threads(FORM.WARPGROUPS, 1))
            k_full = barriers.k_full.index(stage)
            mbarrier.expect(k_full, BLOCK_N * (D + TAIL) * 2)
            tma_load(tensors.k, [batch, kv_head, column, 0], k_full, shared.kv.index(stage))
            if FORM.TAIL_DEPTH:
                tma_load(tensors.k_tail, [batch, kv_head, column, D], k_full, shared.k_tail.index(stage))
            if FORM.Q_STAGES == 1 and i == 0:
                _load_queries(batch, head, row, item, args, FORM)
            if step >= STAGES:
                named_barrier_sync(NamedBarrier.VALUES_READ + stage, _threads(FORM.WARPGROUPS, 1))
            mbarrier.expect(barriers.v_full.index(stage), BLOCK_N * D * 2)
            values = shared.kv.index(STAGES + stage)
            tma_load(tensors.v, [batch, kv_head, column, 0], barriers.v_full.index(stage), values)
            step += 1
            if FORM.PERSISTENT and i == 0:  # after the first loads, since the warp waits for the answer
                drawn = gl.atomic_add(tensors.counter, 1)
                gl.store(tensors.counter, 0, mask=drawn == scalars.n_tiles - 1)  # the last of n_tiles draws
                following = drawn + gl.num_programs(0)
        tile = following
        item += 1
    mbarrier.wait(barriers.free.index(Free.WORK + item % 2), free_phase(item, 2))
    write_slot(shared.slots, item % 2 * Slot.COUNT + Slot.KEY_TILES, 0)
    group_barrier()
    mbarrier.arrive(barriers.full.index(Full.WORK + item % 2))


@gluon.jit
def _bits_between(start, end):
    """Return words of 32 rows with the bits [start, end) set; both may lie outside the word."""
    return bits_below(end) & (-1 - bits_below(start))


@gluon.jit
def _decode_masks(args, FORM: gl.constexpr):
    """Mask decoder: turn the intervals of partial tiles into one bit per pair, 1 where visible."""
    tensors, scalars, shared, barriers = args
    CAUSAL: gl.constexpr = FORM.CAUSAL
    N: gl.constexpr = FORM.N
    SUBTILES: gl.constexpr = FORM.SUBTILES
    END: gl.constexpr = end_bound(N, CAUSAL)
    OTHER_START: gl.constexpr = other_start_bound(N, CAUSAL)
    OTHER_END: gl.constexpr = other_end_bound(N, CAUSAL)
    BLOCK_N: gl.constexpr = shared.mask_bits.shape[2]
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, BLOCK_N // 64], [1, 32], [1, 2], [1, 0]))
    item = 0
    step = 0  # of partial tiles
    slot, n = _acquire_work(item, args)
    while n > 0:
        n_visible = read_slot(shared.slots, slot + Slot.VISIBLE_TILES)
        row = read_slot(shared.slots, slot + Slot.ROW)
        mask_plane = read_slot(shared.slots, slot + Slot.MASK_PLANE)
        plan_row = read_slot(shared.slots, slot + Slot.PLAN_ROW)
        _release_work(barriers, item)
        walk = tensors.tiles + plan_row.to(gl.int64) * scalars.n_kv
        vectors = tensors.indices + mask_plane.to(gl.int64) * scalars.kv_len * N
        for i in range(n - n_visible):
            column = gl.load(walk + scalars.n_kv - 1 - i // SUBTILES, mask=plan_row >= 0, other=0).to(gl.int32)
            columns = (column * SUBTILES + i % SUBTILES) * BLOCK_N + gl.arange(0, BLOCK_N, layout)  # [BLOCK_N]
            inside = columns < scalars.kv_len
            at = vectors + columns.to(gl.int64) * N
            start = gl.load(at, mask=inside, other=0) - row
            if END is not None:
                end = gl.load(at + END, mask=inside, other=NEVER) - row
            if OTHER_START is not None:
                other_start = gl.load(at + OTHER_START, mask=inside, other=0) - row
            if OTHER_END is not None:
                other_end = gl.load(at + OTHER_END, mask=inside, other=0) - row
            stage = step % 2
            if step >= 2:
                named_barrier_sync(NamedBarrier.MASK_READ + stage, _threads(FORM.WARPGROUPS, 2))
            for word in gl.static_range(2 * FORM.WARPGROUPS):
                if END is not None:
                    hidden = _bits_between(start - word * 32, end - word * 32)
                else:
                    hidden = -1 - bits_below(start - word * 32)
                if OTHER_START is not None:
                    hidden = hidden | _bits_between(other_start - word * 32, other_end - word * 32)
                elif OTHER_END is not None:
                    hidden = hidden | bits_below(other_end - word * 32)
                if CAUSAL:
                    hidden = hidden | bits_below(columns - (scalars.kv_len - scalars.q_len) - row - word * 32)
                bits = shared.mask_bits.index(stage * FORM.WARPGROUPS + word // 2).slice(word % 2, 1, dim=0)
                bits.store(gl.expand_dims(-1 - hidden, 0))
            group_barrier()
            mbarrier.arrive(barriers.full.index(Full.MASK + stage))
            step += 1
        item += 1
        slot, n = _acquire_work(item, args)


@gluon.jit
def _apply_mask(scores, masked, shared, barriers, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Set hidden pairs of scores [64, BLOCK_N] to -inf, in partial tile number `masked` of the program."""
    layout: gl.constexpr = scores.type.layout
    halves = gl.reshape(scores, [2, 32, scores.shape[1]])
    stage = masked % 2
    mbarrier.wait(barriers.full.index(Full.MASK + stage), full_phase(masked, 2))
    bits = shared.mask_bits.index(stage * WARPGROUPS + WARPGROUP).load(gl.SliceLayout(1, halves.type.layout))
    named_barrier_arrive(NamedBarrier.MASK_READ + stage, _threads(WARPGROUPS, 2))
    bits, _halves = gl.broadcast(gl.expand_dims(bits, 1), halves)
    bits = gl.convert_layout(gl.reshape(bits, [64, scores.shape[1]]), layout)
    # A thread holds rows r and r + 8 of a word: their bits become the signs of bytes 2 and 3.
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    flags = bits << gl.expand_dims(23 - (rows & 23), 1)
    selector = gl.expand_dims(gl.where((rows & 8) != 0, 0xBBBB, 0xAAAA), 1)
    scores, selector = gl.broadcast(scores, selector)
    return keep_signed(scores, flags, selector)


@gluon.jit
def _reduce(x, AXIS: gl.constexpr, MAX: gl.constexpr):
    return gl.max(x, AXIS) if MAX else gl.sum(x, AXIS)


@gluon.jit
def _reduce_in_lanes(x, MAX: gl.constexpr):
    """Return maxima or sums [M, 4] of x [M, N] over each lane's part of a row, by a tree: a chain would be slow."""
    M: gl.constexpr = x.shape[0]
    x = _reduce(gl.reshape(x, [M, x.shape[1] // 8, 4, 2]), 3, MAX)
    for _ in gl.static_range(6):
        if x.shape[1] > 1:
            x = _reduce(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), 1, MAX)
    return gl.reshape(x, [M, 4])


@gluon.jit
def _as_column(x, layout: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _online_softmax(scores, row_max, row_sum, factor):
    """Return (weights [64, BLOCK_N], correction [64] of earlier sums, new row_max [64], new row_sum [64, 4]).

    `row_max`, in units of log2, is the offset of the exponentials; it may lag (_RESCALE_THRESHOLD).
    """
    layout: gl.constexpr = scores.type.layout
    highest = gl.convert_layout(gl.max(_reduce_in_lanes(scores, True), 1), gl.SliceLayout(1, layout))
    highest = highest * factor
    new_max = gl.where(highest > row_max + _RESCALE_THRESHOLD, highest, row_max)
    weights = gl.exp2(scores * factor - gl.expand_dims(new_max, 1))
    correction = gl.exp2(row_max - new_max)
    lanes: gl.constexpr = row_sum.type.layout
    row_sum = row_sum * _as_column(correction, lanes) + _reduce_in_lanes(weights, False)
    return weights, correction, new_max, row_sum


@gluon.jit
def _issue_scores(shared, q_index, stage, layout: gl.constexpr, FORM: gl.constexpr):
    """Start the scores [64, BLOCK_N] of queries number `q_index` and the keys of `stage`."""
    M: gl.constexpr = shared.q.shape[3]
    D: gl.constexpr = shared.q.shape[4]
    BLOCK_N: gl.constexpr = shared.kv.shape[3]
    queries = shared.q.index(q_index + opaque_zero()).reshape([M, D])
    keys = shared.kv.index(stage).reshape([BLOCK_N, D])
    zero = gl.zeros([M, BLOCK_N], gl.float32, layout)
    scores = issue_dots(queries, keys, zero, FORM.DEPTH)
    if FORM.TAIL_DEPTH:
        TAIL: gl.constexpr = shared.q_tail.shape[4]
        queries = shared.q_tail.index(q_index + opaque_zero()).reshape([M, TAIL])
        keys = shared.k_tail.index(stage).reshape([BLOCK_N, TAIL])
        scores = issue_dots(queries, keys, scores, FORM.TAIL_DEPTH, True)
    return scores


@gluon.jit
def _issue_output(weights, acc, shared, stage):
    """Start adding weights [64, BLOCK_N] times values number `stage` of `shared.kv` to acc [64, D]."""
    BLOCK_N: gl.constexpr = shared.kv.shape[3]
    D: gl.constexpr = shared.kv.shape[4]
    values = shared.kv.index(stage).reshape([BLOCK_N, D])
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _step(
    weights, acc, row_max, row_sum, q_index, begin, step, more, partial, masked, args,
    WARPGROUP: gl.constexpr, FORM: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of key tile `step`, while the weights of the tile before multiply their values.

    Steps count over all work items. A work item's first tile, `begin`, multiplies weights of 0 with its own values, and
    keeps these for the next step.
    """
    _tensors, scalars, shared, barriers = args
    STAGES: gl.constexpr = FORM.STAGES
    layout: gl.constexpr = acc.type.layout
    stage = step % STAGES
    previous = gl.where(step > begin, step - 1, begin)
    v_stage = previous % STAGES
    scores = _issue_scores(shared, q_index, stage, SCORES, FORM)  # [64, BLOCK_N]
    mbarrier.wait(barriers.v_full.index(v_stage), full_phase(previous, STAGES))
    acc = _issue_output(weights, acc, shared, STAGES + v_stage)  # [64, D]
    scores = warpgroup_mma_wait(1, deps=[scores])
    named_barrier_arrive(NamedBarrier.KEYS_READ + stage, _threads(FORM.WARPGROUPS, 1))
    if FORM.CAP:
        scores = softcap_tanh(scores, scalars.cap_factor)
    if partial:
        scores = _apply_mask(scores, masked, shared, barriers, WARPGROUP, FORM.WARPGROUPS)
    weights, correction, row_max, row_sum = _online_softmax(scores, row_max, row_sum, scalars.factor)
    weights = gl.convert_layout(weights.to(shared.q.dtype), gl.DotOperandLayout(0, layout, 2))
    # Here, not at the top: this wait keeps the wait for the product behind the softmax.
    mbarrier.wait(barriers.k_full.index((step + 1) % STAGES), full_phase(step + 1, STAGES), pred=more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if step > begin:
        named_barrier_arrive(NamedBarrier.VALUES_READ + v_stage, _threads(FORM.WARPGROUPS, 1))
    acc, correction = gl.broadcast(acc, _as_column(correction, layout))
    return weights, rescale(acc, correction), row_max, row_sum


@gluon.jit
def _consume(WARPGROUP: gl.constexpr, args, FORM: gl.constexpr):
    """Consumer warpgroup: output and log-sum-exp of 64 rows of every work item."""
    tensors, scalars, shared, barriers = args
    STAGES: gl.constexpr = FORM.STAGES
    M: gl.constexpr = shared.q.shape[3]
    D: gl.constexpr = shared.q.shape[4]
    BLOCK_N: gl.constexpr = shared.kv.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # of scattered stores
    item = 0
    step = 0
    masked = 0
    slot, n = _acquire_work(item, args)
    while n > 0:
        n_visible = read_slot(shared.slots, slot + Slot.VISIBLE_TILES)
        row_max = gl.full([M], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = _reduce_in_lanes(gl.zeros([M, BLOCK_N], gl.float32, SCORES), False)  # [M, 4]
        acc = gl.zeros([M, D], gl.float32, OUT)
        if FORM.SINKS:
            sink = gl.load(tensors.sinks + read_slot(shared.slots, slot + Slot.HEAD)).to(gl.float32) * LOG2_E
            row_max = gl.maximum(row_max, sink)

        q_stage = item % FORM.Q_STAGES
        q_index = q_stage * FORM.WARPGROUPS + WARPGROUP
        begin = step
        stage = step % STAGES
        mbarrier.wait(barriers.full.index(Full.Q + q_stage), full_phase(item, FORM.Q_STAGES))
        mbarrier.wait(barriers.k_full.index(stage), full_phase(step, STAGES))
        weights = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
        weights = gl.convert_layout(weights.to(shared.q.dtype), gl.DotOperandLayout(0, OUT, 2))
        for i in range(n):
            weights, acc, row_max, row_sum = _step(
                weights, acc, row_max, row_sum, q_index, begin, step, i + 1 < n, i >= n_visible, masked, args,
                WARPGROUP, FORM, SCORES,
            )  # fmt: skip
            step += 1
            masked += gl.where(i >= n_visible, 1, 0)
        v_stage = (step - 1) % STAGES
        mbarrier.wait(barriers.v_full.index(v_stage), full_phase(step - 1, STAGES))
        acc = _issue_output(weights, acc, shared, STAGES + v_stage)

        # Epilogue
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, SCORES))  # [M]
        if FORM.SINKS:
            sink = gl.load(tensors.sinks + read_slot(shared.slots, slot + Slot.HEAD)).to(gl.float32) * LOG2_E
            row_sum += gl.exp2(sink - row_max)
        seen = row_sum != 0  # NaN stays NaN
        row_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, (row_max + gl.log2(row_sum)) * LN_2, float("-inf"))
        row = read_slot(shared.slots, slot + Slot.ROW) + WARPGROUP * M
        batch = read_slot(shared.slots, slot + Slot.BATCH)
        head = read_slot(shared.slots, slot + Slot.HEAD)
        plane = read_slot(shared.slots, slot + Slot.PLANE)
        _release_work(barriers, item)
        rows = row + gl.arange(0, M, gl.SliceLayout(1, SCORES))
        gl.store(tensors.lse + plane.to(gl.int64) * scalars.q_len + rows, log_sum, mask=rows < scalars.q_len)
        if FORM.SCATTER:
            rows = row + gl.arange(0, M, gl.SliceLayout(1, ROWS))
            inside = rows < scalars.q_len
            target = gl.load(tensors.order + plane.to(gl.int64) * scalars.q_len + rows, mask=inside, other=0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        named_barrier_arrive(NamedBarrier.VALUES_READ + v_stage, _threads(FORM.WARPGROUPS, 1))
        acc = acc * _as_column(1.0 / row_sum, OUT)
        group_barrier()
        staged = shared.q.index(q_index).reshape([M, D])  # the queries have been read
        staged.store(acc.to(shared.q.dtype))
        fence_async_shared()
        group_barrier()
        if FORM.SCATTER:
            at = ((batch.to(gl.int64) * scalars.q_len + target) * scalars.heads + head) * FORM.V_HEAD_DIM
            dims = gl.arange(0, D, gl.SliceLayout(0, ROWS))
            at = tensors.out_rows + gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)
            gl.store(at, staged.load(ROWS), mask=gl.expand_dims(inside, 1) & gl.expand_dims(dims < FORM.V_HEAD_DIM, 0))
        else:
            tma_store(tensors.out, [batch, head, row, 0], shared.q.index(q_index))
        item += 1
        slot, n = _acquire_work(item, args)
        tma_store_wait(0)
        group_barrier()
        mbarrier.arrive(barriers.free.index(Free.Q + q_stage))


_SIZES = ["n_tiles", "n_rows", "heads", "kv_heads", "mask_batch", "mask_heads", "q_len", "kv_len", "n_q", "n_kv"]


@gluon.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q, k, v, out, q_tail, k_tail, out_rows, order, lse, sinks, indices, tiles, counts, counter, chosen_rows,
    n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, factor, cap_factor,
    FORM: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and start the roles.

    `chosen_rows`, int32 [1] or None: of two launches, the one with this tile height works.
    """
    WARPGROUPS: gl.constexpr = FORM.WARPGROUPS
    STAGES: gl.constexpr = FORM.STAGES
    gl.static_assert(STAGES == 2, "named barriers are numbered for two stages")
    M: gl.constexpr = q.block_shape[2]
    D: gl.constexpr = q.block_shape[3]
    BLOCK_N: gl.constexpr = k.block_shape[2]
    if chosen_rows is not None:
        n_tiles = gl.where(gl.load(chosen_rows) == WARPGROUPS * M, n_tiles, 0)
    q_tails = None
    k_tails = None
    if q_tail is not None:
        TAIL: gl.constexpr = q_tail.block_shape[3]
        q_tails = gl.allocate_shared_memory(q.dtype, [FORM.Q_STAGES * WARPGROUPS, 1, 1, M, TAIL], q_tail.layout)
        k_tails = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_N, TAIL], k_tail.layout)
    shared = Shared(
        q=gl.allocate_shared_memory(q.dtype, [FORM.Q_STAGES * WARPGROUPS, 1, 1, M, D], q.layout),
        kv=gl.allocate_shared_memory(q.dtype, [2 * STAGES, 1, 1, BLOCK_N, D], k.layout),
        q_tail=q_tails,
        k_tail=k_tails,
        mask_bits=gl.allocate_shared_memory(
            gl.int32, [2 * WARPGROUPS, 2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
        slots=gl.allocate_shared_memory(gl.int32, [2 * Slot.COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    barriers = Barriers(
        full=make_barriers(Full.COUNT),
        free=gl.allocate_shared_memory(gl.int64, [Free.COUNT, 1], mbarrier.MBarrierLayout()),
        k_full=make_barriers(STAGES),
        v_full=make_barriers(STAGES),
    )
    for i in gl.static_range(2):
        mbarrier.init(barriers.free.index(Free.WORK + i), count=WARPGROUPS + 1)
        mbarrier.init(barriers.free.index(Free.Q + i), count=WARPGROUPS)
    fence_async_shared()

    tensors = Tensors(q, k, v, out, q_tail, k_tail, out_rows, order, lse, sinks, indices, tiles, counts, counter)
    scalars = Scalars(
        n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, factor, cap_factor
    )
    args = (tensors, scalars, shared, barriers)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, args, FORM)),
                (_consume, (1, args, FORM)),
                (_produce, (args, FORM)),
                (_decode_masks, (args, FORM)),
            ],
            [4, 1, 2],
            [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, args, FORM)),
                (_consume, (1, args, FORM)),
                (_consume, (2, args, FORM)),
                (_produce, (args, FORM)),
                (_decode_masks, (args, FORM)),
            ],
            [4, 4, 1, 2],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )
