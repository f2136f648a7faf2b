"""Device code of the Hopper backward: one persistent, warp-specialized kernel over key tiles (FlashMask, algorithm 2).

A program takes key tiles from a counter, in the order of `work_order` or `dq_order`. It keeps a tile's keys and values
in shared memory and walks the row tiles that see them, of all query heads that share the key-value head. Scores are
transposed, [keys, rows], so that softmax weights and their gradients stay in registers as operands for dV and dK. Roles
for head dims up to 128, or 192 with values of 128 (`backward_wide` has the roles for wider heads):

    producer               dK, dV (2 warpgroups,            dQ (1 warpgroup)         store (1 or 2 warps)
    (1 warp)               64 keys each)

    take a key tile
    for each row tile:
    TMA load K (first) -.
    TMA load Q ---------'- q_full --> S' = K Q'
      log-sum-exp, delta, slots       P' = exp2(S' - lse), 0 where hidden
    TMA load V (first) -.
    TMA load dO --------'- do_full -> dP' = V dO'
                                      dV += P' dO
                                      dS' = P' (dP' - delta)
                                      dK += dS' Q
                           dS' in shared memory -- ds_full -> dQ = dS K, in pieces
                                     <---------- ds_free -- (all pieces are complete)
                                                            dQ in shared memory --- dq_full -> TMA add to dq_accum
                                                                      <------------ dq_free -- (TMA has read it)
    <--- ROWS_FREE ------------------ (dK, dV complete) -- (dS is there) ---------- (slots are read)
    after the last row tile, the epilogue:
                           dK, dV in the shared memory of K, V -------------------- dkv_full -> TMA store dK, dV
    <--- keys_free -------------------------------------------------------------------------- (TMA has read them)

ROWS_FREE is a named barrier, the others are mbarriers. Row tiles and dS have two stages. With fewer stages of values
than of keys, the store warps load the values after the last gradients have left their place.

Adding dQ to global memory bounds the kernel if tiles have many dims and few keys. So head dim 192 has tiles of 128
keys, too, which leaves registers for 32 rows. `scale_dq_kernel` turns the float32 sums `dq_accum` into dQ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmask_hf.kernels.hopper.backward_roles import (
    Scalars,
    Slot,
    Tensors,
    accumulate_dq,
    await_cleared_rows,
    await_rows,
    downcast,
    produce,
    read_row_slot,
    release_rows,
    softmax_weights,
    stage_gradient,
    store_gradients,
    upcast,
)
from flashmask_hf.kernels.hopper.backward_wide import accumulate_dk, accumulate_dv
from flashmask_hf.kernels.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque_zero,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.hopper.pipeline import free_phase, full_phase, issue_dots, make_barriers, piece_count, publish


class Shared(NamedTuple):
    """Shared memory."""

    q: Any  # [2, 1, 1, BLOCK_M, BLOCK_D]
    do: Any  # [DO_STAGES, 1, 1, BLOCK_M, BLOCK_V]
    k: Any  # [KEY_STAGES * KEY_PARTS, 1, 1, 64, BLOCK_D]
    v: Any  # [VALUE_STAGES * KEY_PARTS, 1, 1, 64, BLOCK_V]
    ds: Any  # [2 * KEY_PARTS, 64, BLOCK_M]: two stages, transposed; in the wide form, weights come first
    dq: Any  # float32 [DQ_STAGES, 2 * DQ_ROWS, 32]: pieces
    lse: Any  # float32 [2, BLOCK_M], in units of log2
    delta: Any  # float32 [2, BLOCK_M]
    slots: Any  # int32 [2 * Slot.COUNT, 1]


class Barriers(NamedTuple):
    """mbarriers."""

    keys_free: Any  # by stage
    dkv_full: Any  # by stage of values and store warp
    q_full: Any  # by stage
    do_full: Any  # by stage
    ds_full: Any  # by stage
    ds_free: Any  # by stage
    dq_full: Any  # by piece modulo 2 * DQ_STAGES, since store warps may alternate
    dq_free: Any  # by piece modulo DQ_STAGES
    weights_full: Any  # by stage, in the wide form, or None


@gluon.jit
def _accumulate_dkv(WARPGROUP: gl.constexpr, args, FORM: gl.constexpr):
    """Consumer warpgroup 0 or 1: dK and dV of 64 keys of every tile.

    With SCORES_AHEAD, the next row tile's scores run beside dK, which reads dS from shared memory. Without it, dK reads
    dS from registers, and the scores run after dK.
    """
    tensors, scalars, shared, barriers = args
    SCORES_AHEAD: gl.constexpr = FORM.SCORES_AHEAD
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    BLOCK_V: gl.constexpr = FORM.BLOCK_V
    TAIL: gl.constexpr = FORM.TAIL
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KV, 2)
    KEYS_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(TAIL, 8), 16])
    TAIL_OPERAND: gl.constexpr = gl.DotOperandLayout(0, KEYS_TAIL, 2)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, S)
    step = 0
    item = 0
    row_tiles = await_rows(step, args)
    if SCORES_AHEAD:
        keys = shared.k.index(WARPGROUP).reshape([64, BLOCK_D])
        queries = shared.q.index(0).reshape([BLOCK_M, BLOCK_D])
        scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
        weights, slopes = softmax_weights(scores, 0, args, WARPGROUP, FORM, S, DTYPE)
    while row_tiles >= 0:
        k_index = item % FORM.KEY_STAGES * 2 + WARPGROUP
        v_stage = item % FORM.VALUE_STAGES
        column = read_row_slot(step, Slot.KEY_TILE, args) * 128 + WARPGROUP * 64
        kv_plane = read_row_slot(step, Slot.KV_PLANE, args)
        dk = gl.zeros([64, BLOCK_V], gl.float32, KV)
        dv = gl.zeros([64, BLOCK_V], gl.float32, KV)
        dk_tail = dk  # unused without a tail
        if TAIL > 0:
            dk_tail = gl.zeros([64, TAIL], gl.float32, KEYS_TAIL)
        for i in range(gl.maximum(row_tiles, 1)):
            zero = opaque_zero()
            stage = step & 1
            values = shared.v.index(v_stage * 2 + WARPGROUP + zero).reshape([64, BLOCK_V])
            queries = shared.q.index(stage).reshape([BLOCK_M, BLOCK_D])
            dout = shared.do.index(stage).reshape([BLOCK_M, BLOCK_V])
            if not SCORES_AHEAD:
                keys = shared.k.index(k_index + zero).reshape([64, BLOCK_D])
                mbarrier.wait(barriers.q_full.index(stage), full_phase(step, 2))
                scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
                weights, slopes = softmax_weights(scores, stage, args, WARPGROUP, FORM, S, DTYPE)
            mbarrier.wait(barriers.do_full.index(stage), full_phase(step, 2))
            await_cleared_rows(step, args)
            if FORM.CAP:  # registers do not suffice for both products
                dv = warpgroup_mma(gl.convert_layout(weights, OPERAND), dout, dv, is_async=True)
                dv = warpgroup_mma_wait(0, deps=[dv])
            dweights = issue_dots(values, dout, no_scores, FORM.V_DEPTH)
            if not FORM.CAP:
                dv = warpgroup_mma(gl.convert_layout(weights, OPERAND), dout, dv, is_async=True)
            delta = gl.expand_dims(shared.delta.index(stage).load(gl.SliceLayout(0, S)), 0)
            dweights = warpgroup_mma_wait(0 if FORM.CAP else 1, deps=[dweights])
            dscores = downcast(upcast(slopes, DTYPE) * (dweights - delta), DTYPE)  # [64, BLOCK_M]
            if not SCORES_AHEAD:
                columns = queries.slice(0, BLOCK_V, dim=1)
                dk = warpgroup_mma(gl.convert_layout(dscores, OPERAND), columns, dk, is_async=True)
                if TAIL > 0:
                    columns = queries.slice(BLOCK_V, TAIL, dim=1)
                    dk_tail = warpgroup_mma(gl.convert_layout(dscores, TAIL_OPERAND), columns, dk_tail, is_async=True)
            mbarrier.wait(barriers.ds_free.index(stage), free_phase(step, 2))
            shared.ds.index(stage * 2 + WARPGROUP).store(dscores)
            publish(barriers.ds_full.index(stage))
            step += 1
            if SCORES_AHEAD:
                dk = warpgroup_mma(shared.ds.index(stage * 2 + WARPGROUP), queries, dk, is_async=True)
                next_index = gl.where(i + 1 < row_tiles, k_index, k_index ^ 2)
                keys = shared.k.index(next_index + zero).reshape([64, BLOCK_D])
                queries = shared.q.index(stage ^ 1).reshape([BLOCK_M, BLOCK_D])
                mbarrier.wait(barriers.q_full.index(stage ^ 1), full_phase(step, 2))
                scores = issue_dots(keys, queries, no_scores, FORM.DEPTH)
            if TAIL > 0:
                dk, dk_tail, dv = warpgroup_mma_wait(0, deps=[dk, dk_tail, dv])
            else:
                dk, dv = warpgroup_mma_wait(piece_count(FORM.DEPTH) if SCORES_AHEAD else 0, deps=[dk, dv])
            release_rows(stage, FORM)
            if SCORES_AHEAD:
                weights, slopes = softmax_weights(scores, stage ^ 1, args, WARPGROUP, FORM, S, DTYPE)
        k_tile, v_tile = shared.k.index(k_index), shared.v.index(v_stage * 2 + WARPGROUP)
        full = barriers.dkv_full.index(v_stage * FORM.STORE_WARPS + WARPGROUP % FORM.STORE_WARPS)
        if row_tiles == 0:  # products with keys and values, which may be infinite
            dk = gl.zeros([64, BLOCK_V], gl.float32, KV)
            dv = gl.zeros([64, BLOCK_V], gl.float32, KV)
            if TAIL > 0:
                dk_tail = gl.zeros([64, TAIL], gl.float32, KEYS_TAIL)
        stage_gradient(dv, dv, 1.0, v_tile, tensors.dv_rows, kv_plane, column, args, 0, FORM.V_HEAD_DIM, FORM)
        mbarrier.wait(barriers.ds_free.index((step - 1) & 1), full_phase(step - 1, 2))  # the last dQ has read the keys
        stage_gradient(
            dk, dk_tail, scalars.scale, k_tile, tensors.dk_rows, kv_plane, column, args, TAIL, FORM.HEAD_DIM, FORM
        )  # fmt: skip
        publish(full)
        item += 1
        if not SCORES_AHEAD:
            mbarrier.wait(barriers.q_full.index(step & 1), full_phase(step, 2))
        row_tiles = read_row_slot(step, Slot.ROW_TILES, args)


@gluon.jit
def _accumulate_dk_dv(WARPGROUP: gl.constexpr, args, FORM: gl.constexpr):
    """Consumer warpgroup 0 or 1: dK and dV of 64 keys each or, in the wide form, dV or dK."""
    if FORM.KEY_PARTS == 2:
        _accumulate_dkv(WARPGROUP, args, FORM)
    elif WARPGROUP == 0:
        accumulate_dv(args, FORM)
    else:
        accumulate_dk(args, FORM)


_SIZES = ["heads", "kv_heads", "kv_planes", "unsorted", "mask_batch", "mask_heads", "q_len", "kv_len", "n_kv",
          "n_columns", "padded_len"]  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def backward_kernel(
    q, k, v, dout, dq_accum, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, dq_ranks, dq_semaphores,
    key_tile_order, schedule, work_order, counter,
    heads, kv_heads, kv_planes, unsorted, mask_batch, mask_heads, q_len, kv_len, n_kv, n_columns, padded_len,
    scale, factor, cap_factor, FORM: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and start the roles."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    KEY_PARTS: gl.constexpr = FORM.KEY_PARTS
    GRADIENT_WARPS: gl.constexpr = min(FORM.STORE_WARPS, KEY_PARTS)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], q.dtype)
    shared = Shared(
        q=gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, FORM.BLOCK_D], q.layout),
        do=gl.allocate_shared_memory(q.dtype, [FORM.DO_STAGES, 1, 1, BLOCK_M, FORM.BLOCK_V], dout.layout),
        k=gl.allocate_shared_memory(q.dtype, [FORM.KEY_STAGES * KEY_PARTS, 1, 1, 64, FORM.BLOCK_D], k.layout),
        v=gl.allocate_shared_memory(q.dtype, [FORM.VALUE_STAGES * KEY_PARTS, 1, 1, 64, FORM.BLOCK_V], v.layout),
        ds=gl.allocate_shared_memory(q.dtype, [2 * KEY_PARTS, 64, BLOCK_M], SCORES),
        dq=gl.allocate_shared_memory(gl.float32, [FORM.DQ_STAGES, 2 * FORM.DQ_ROWS, 32], dq_accum.layout),
        lse=gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN),
        delta=gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN),
        slots=gl.allocate_shared_memory(gl.int32, [2 * Slot.COUNT, 1], PLAIN),
    )
    barriers = Barriers(
        keys_free=make_barriers(FORM.KEY_STAGES, GRADIENT_WARPS),
        dkv_full=make_barriers(FORM.VALUE_STAGES * GRADIENT_WARPS, 2 // GRADIENT_WARPS),
        q_full=make_barriers(2),
        do_full=make_barriers(FORM.DO_STAGES),
        ds_full=make_barriers(2, KEY_PARTS),
        ds_free=make_barriers(2),
        dq_full=make_barriers(2 * FORM.DQ_STAGES),
        dq_free=make_barriers(FORM.DQ_STAGES),
        # Triton would reuse the memory of unused barriers, which PTX leaves undefined.
        weights_full=make_barriers(2) if KEY_PARTS == 1 else None,
    )
    fence_async_shared()

    tensors = Tensors(
        q, k, v, dout, dq_accum, dk, dv, dk_rows, dv_rows, k_order, lse, delta, indices, segments, dq_ranks,
        dq_semaphores, key_tile_order, schedule, work_order, counter,
    )  # fmt: skip
    scalars = Scalars(
        heads, kv_heads, kv_planes, unsorted, mask_batch, mask_heads, q_len, kv_len, n_kv, n_columns,
        padded_len, scale, factor, cap_factor,
    )  # fmt: skip
    args = (tensors, scalars, shared, barriers)
    gl.warp_specialize(
        [
            (_accumulate_dk_dv, (0, args, FORM)),
            (_accumulate_dk_dv, (1, args, FORM)),
            (accumulate_dq, (args, FORM)),
            (produce, (args, FORM)),
            (store_gradients, (0, args, FORM)),
            (store_gradients, (1, args, FORM)),
        ],
        [4, 4, 1, 1, 1],
        [FORM.REGISTERS, FORM.DQ_REGISTERS, 32, 32, 32],
    )


@triton.jit(do_not_specialize=["heads", "q_len", "n_row_tiles"])
def scale_dq_kernel(
    dq_accum, dq, order, dq_b, dq_h, dq_s, heads, q_len, n_row_tiles, scale,
    SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Scale ROWS rows of the sums, in the order of `backward_roles._stage_dq`, and store them to dq [B, Hq, Sq, D].

    SCATTER stores each row at its entry in `order`, int32 [B, Hq, Sq].
    """
    piece = tl.program_id(0) % PIECES
    row_tile = tl.program_id(0) // PIECES % n_row_tiles
    plane = (tl.program_id(0) // PIECES // n_row_tiles).to(tl.int64)
    sums = dq_accum + tl.program_id(0).to(tl.int64) * (64 * ROWS)
    tile = tl.reshape(tl.load(sums + tl.arange(0, 64 * ROWS)), [ROWS // 8, 4, 4, 2, 4, 2, 2])
    tile = tl.reshape(tl.permute(tile, [1, 5, 2, 3, 0, 4, 6]), [64, ROWS]) * scale
    if ROWS == 32:
        tile = tl.trans(tile)
    rows = row_tile * BLOCK_M + (piece * 64 if BLOCK_M == 128 else 0) + tl.arange(0, ROWS)
    dims = (piece * 64 if BLOCK_M <= 64 else 0) + tl.arange(0, 64)
    inside = rows < q_len
    if SCATTER:
        rows = tl.load(order + plane * q_len + rows, mask=inside, other=0)
    at = plane // heads * dq_b + plane % heads * dq_h + rows.to(tl.int64)[:, None] * dq_s + dims[None, :]
    tl.store(dq + at, tile.to(dq.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM)[None, :])
