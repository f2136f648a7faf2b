"""Device code of the Hopper backward for head dims up to 256: the roles that accumulate dV and dK.

dK and dV of 64 keys take 256 registers per thread, so each has its own warpgroup:

    dV (1 warpgroup)             dK (1 warpgroup)              dQ (1 warpgroup)
    S' = K Q'                    dP' = V dO'
    P' = exp2(S' - lse)
    P' in shared memory ---------> weights_full
                                 dS' = P' (dP' - delta), in the place of P'
    dV += P' dO                  dK += dS' Q
                                 ds_full --------------------> dQ = dS K, in pieces of 64 dims
    next S' beside dV                                          pieces in shared memory, as in `backward_kernel`
    <--------------------------------------------- ds_free --- (all pieces are complete)
    after the last row tile, the epilogue:
    <--------------------------- ds_full (V is read)
                                 <---------------- ds_free --- (K is read)
    dV in the place of V         dK in the place of K

`backward_kernel` documents the other roles and barriers. Keys, values and dO have one stage.
"""

from __future__ import annotations

from flashmask_hf.kernels.hopper.backward_roles import (
    Slot,
    await_cleared_rows,
    await_rows,
    downcast,
    read_row_slot,
    release_dout,
    release_rows,
    softmax_weights,
    stage_gradient,
    upcast,
)
from flashmask_hf.kernels.hopper.gluon import (
    gl,
    gluon,
    group_barrier,
    mbarrier,
    opaque_zero,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.hopper.pipeline import free_phase, full_phase, issue_dots, piece_count, publish


@gluon.constexpr_function
def _low(pieces):
    """Return the largest power of 2 up to 64 * pieces: the width of the first of two tensors of dK."""
    return 64 << (pieces.bit_length() - 1)


@gluon.jit
def _start_scores(no_scores, stage, args, FORM: gl.constexpr):
    _tensors, _scalars, shared, _barriers = args
    keys = shared.k.index(opaque_zero()).reshape([64, FORM.BLOCK_D])
    queries = shared.q.index(stage).reshape([FORM.BLOCK_M, FORM.BLOCK_D])
    return issue_dots(keys, queries, no_scores, FORM.DEPTH)


@gluon.jit
def _start_dv(dv, weights, slopes, step, args, FORM: gl.constexpr):
    """Pass `slopes` to the second warpgroup, and start adding a row tile to dV."""
    _tensors, _scalars, shared, barriers = args
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    stage = step & 1
    mbarrier.wait(barriers.ds_free.index(stage), free_phase(step, 2))
    shared.ds.index(stage).store(slopes)
    group_barrier()
    mbarrier.arrive(barriers.weights_full.index(stage), count=1)
    dout = shared.do.index(0).reshape([FORM.BLOCK_M, FORM.BLOCK_V])
    mbarrier.wait(barriers.do_full.index(0), step & 1)
    await_cleared_rows(step, args)
    return warpgroup_mma(gl.convert_layout(weights, OPERAND), dout, dv, is_async=True)


@gluon.jit
def accumulate_dv(args, FORM: gl.constexpr):
    """First warpgroup: softmax weights and dV."""
    tensors, _scalars, shared, barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_V: gl.constexpr = FORM.BLOCK_V
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, S)
    step = 0
    row_tiles = await_rows(step, args)
    while row_tiles >= 0:
        column = read_row_slot(step, Slot.KEY_TILE, args) * 64
        kv_plane = read_row_slot(step, Slot.KV_PLANE, args)
        dv = gl.zeros([64, BLOCK_V], gl.float32, VALUES)
        scores = _start_scores(no_scores, step & 1, args, FORM)
        weights, slopes = softmax_weights(scores, step & 1, args, 0, FORM, S, DTYPE)
        for _ in range(row_tiles - 1):
            dv = _start_dv(dv, weights, slopes, step, args, FORM)
            step += 1
            stage = step & 1
            mbarrier.wait(barriers.q_full.index(stage), full_phase(step, 2))
            scores = _start_scores(no_scores, stage, args, FORM)
            dv = warpgroup_mma_wait(piece_count(FORM.DEPTH), deps=[dv])
            release_dout()
            release_rows(stage ^ 1, FORM)
            weights, slopes = softmax_weights(scores, stage, args, 0, FORM, S, DTYPE)
        dv = _start_dv(dv, weights, slopes, step, args, FORM)
        dv = warpgroup_mma_wait(0, deps=[dv])
        release_dout()
        release_rows(step & 1, FORM)
        if row_tiles == 0:  # products with keys and values, which may be infinite
            dv = gl.zeros([64, BLOCK_V], gl.float32, VALUES)
        mbarrier.wait(barriers.ds_full.index(step & 1), full_phase(step, 2))  # the values have been read
        values = shared.v.index(0)
        stage_gradient(dv, dv, 1.0, values, tensors.dv_rows, kv_plane, column, args, 0, FORM.V_HEAD_DIM, FORM)
        publish(barriers.dkv_full.index(0))
        step += 1
        row_tiles = await_rows(step, args)


@gluon.jit
def accumulate_dk(args, FORM: gl.constexpr):
    """Second warpgroup: dS and dK."""
    tensors, scalars, shared, barriers = args
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    DTYPE: gl.constexpr = shared.q.dtype
    LOW: gl.constexpr = _low(FORM.DQ_PIECES)
    HIGH: gl.constexpr = FORM.DQ_PIECES * 64 - LOW
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(LOW, 128), 16])
    HIGH_KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HIGH, 16])
    no_dweights = gl.zeros([64, BLOCK_M], gl.float32, S)
    step = 0
    row_tiles = await_rows(step, args)
    while row_tiles >= 0:
        column = read_row_slot(step, Slot.KEY_TILE, args) * 64
        kv_plane = read_row_slot(step, Slot.KV_PLANE, args)
        dk = gl.zeros([64, LOW], gl.float32, KEYS)
        high_dk = dk  # unused without high dims
        if HIGH > 0:
            high_dk = gl.zeros([64, HIGH], gl.float32, HIGH_KEYS)
        for _ in range(gl.maximum(row_tiles, 1)):
            stage = step & 1
            values = shared.v.index(opaque_zero()).reshape([64, FORM.BLOCK_V])
            dout = shared.do.index(0).reshape([BLOCK_M, FORM.BLOCK_V])
            queries = shared.q.index(stage).reshape([BLOCK_M, BLOCK_D])
            mbarrier.wait(barriers.do_full.index(0), step & 1)
            await_cleared_rows(step, args)  # the slots were written before
            dweights = issue_dots(values, dout, no_dweights, FORM.V_DEPTH)
            mbarrier.wait(barriers.q_full.index(stage), full_phase(step, 2))
            delta = gl.expand_dims(shared.delta.index(stage).load(gl.SliceLayout(0, S)), 0)
            dweights = warpgroup_mma_wait(0, deps=[dweights])
            release_dout()
            mbarrier.wait(barriers.weights_full.index(stage), full_phase(step, 2))
            slopes = shared.ds.index(stage).load(S)
            dscores = downcast(upcast(slopes, DTYPE) * (dweights - delta), DTYPE)  # [64, BLOCK_M]
            low_queries = queries.slice(0, LOW, dim=1)
            operand = gl.convert_layout(dscores, gl.DotOperandLayout(0, KEYS, 2))
            dk = warpgroup_mma(operand, low_queries, dk, is_async=True)
            if HIGH > 0:
                high_queries = queries.slice(LOW, HIGH, dim=1)
                operand = gl.convert_layout(dscores, gl.DotOperandLayout(0, HIGH_KEYS, 2))
                high_dk = warpgroup_mma(operand, high_queries, high_dk, is_async=True)
            shared.ds.index(stage).store(dscores)
            publish(barriers.ds_full.index(stage))
            if HIGH > 0:
                dk, high_dk = warpgroup_mma_wait(0, deps=[dk, high_dk])
            else:
                dk = warpgroup_mma_wait(0, deps=[dk])
            release_rows(stage, FORM)
            step += 1
        if row_tiles == 0:  # products with queries and gradients that may be infinite
            dk = gl.zeros([64, LOW], gl.float32, KEYS)
            if HIGH > 0:
                high_dk = gl.zeros([64, HIGH], gl.float32, HIGH_KEYS)
        mbarrier.wait(barriers.ds_free.index((step - 1) & 1), full_phase(step - 1, 2))  # the last dQ has read the keys
        k_tile = shared.k.index(0)
        stage_gradient(
            dk, high_dk, scalars.scale, k_tile, tensors.dk_rows, kv_plane, column, args, HIGH, FORM.HEAD_DIM, FORM
        )  # fmt: skip
        publish(barriers.dkv_full.index(0))
        row_tiles = await_rows(step, args)
