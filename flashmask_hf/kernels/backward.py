"""The portable backward (FlashMask, ICLR 2025, algorithm 2) without atomics: dK and dV by key tile, dQ by row tile.

Each gradient has one writer and one order of summation, so repeated runs agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.configs import Config, keys_config, queries_config
from flashmask_hf.kernels.descriptors import (
    Layout,
    can_describe,
    layout_like,
    layout_of,
    packed_layout,
    side_by_side,
    tiles_template,
)
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.problem import Problem, problem_of
from flashmask_hf.kernels.row_statistics import (
    Delta,
    Gradients,
    OutputLayout,
    bind_delta,
    bind_statistics,
    output_layout,
)
from flashmask_hf.kernels.tiles import (
    block_of,
    dot_precision,
    hidden_pairs,
    load_intervals,
    load_tile,
    row_place,
    store_tile,
    tanh,
    vectors_of,
    whole_tiles,
)
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns


@triton.jit
def _load_statistic(x, plane, row, padded, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """Rows `row` to `row + BLOCK_M` of `x` [B * Hq, padded], which is lse in units of log2, or delta."""
    if TMA:  # through pointers every thread loads each of its rows
        values = x.load([plane, row]).reshape(BLOCK_M)
    else:
        values = tl.load(x + plane.to(tl.int64) * padded + row + tl.arange(0, BLOCK_M))
    return values


@triton.jit
def _accumulate_keys(
    dk, dv, keys, values, q, dout, lse, delta, start, end, other_start, other_end, batch, head, plane, row, column,
    q_b, q_h, q_s, q_d, do_b, do_h, do_s, do_d, q_len, padded, kv_len, dim, v_dim, factor, bend,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add one tile of query rows to dk [BN, D] (less the scale) and dv [BN, DV]."""
    queries = load_tile(q, batch, head, row, q_b, q_h, q_s, q_d, q_len, dim, BLOCK_M, BLOCK_D, TMA)
    row_lse = _load_statistic(lse, plane, row, padded, BLOCK_M, TMA)
    scores = tl.dot(keys, queries.T, input_precision=PRECISION)  # [BN, BM]
    if CAP:
        scores = tanh(scores * bend)
    weights = tl.math.exp2(scores * factor - row_lse[None, :])
    if MASKED:
        columns = (column + tl.arange(0, BLOCK_N))[:, None]
        rows = (row + tl.arange(0, BLOCK_M))[None, :]
        hidden = hidden_pairs(rows, columns, start, end, other_start, other_end, kv_len - q_len, CAUSAL, N)
        weights = tl.where(hidden, 0.0, weights)
    upstream = load_tile(dout, batch, head, row, do_b, do_h, do_s, do_d, q_len, v_dim, BLOCK_M, BLOCK_V, TMA)
    dv = tl.dot(weights.to(upstream.dtype), upstream, dv, input_precision=PRECISION)
    dscores = tl.dot(values, upstream.T, input_precision=PRECISION)  # [BN, BM]
    row_delta = _load_statistic(delta, plane, row, padded, BLOCK_M, TMA)
    dscores = weights * (dscores - row_delta[None, :])
    if CAP:
        dscores = dscores * (1.0 - scores * scores)
    dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dark_rows(start, end, other_end, column, diagonal, CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tiles of BLOCK_M rows that see none of a tile of keys, which begins at `column` and has the bounds given.

    (low, first, last): those below `low`, which the diagonal or the second interval hides from all keys, and those in
    [first, last), which the first interval does; that range may be empty. There may be others.
    """
    low = 0
    if CAUSAL:
        low = (column - diagonal) // BLOCK_M
    elif N == 2:
        low = tl.min(other_end) // BLOCK_M
    return low, (tl.max(start) - 1) // BLOCK_M + 1, tl.min(end) // BLOCK_M


@triton.jit
def _trimmed_range(at, low, gap_first, gap_last, SUBROWS: tl.constexpr):
    """[first, last) of a range of the plan's partial tiles, in small tiles, less those of `_dark_rows` at its ends."""
    first = tl.maximum(tl.load(at) * SUBROWS, low)
    last = tl.load(at + 1) * SUBROWS
    last = tl.where(last <= gap_last, tl.minimum(last, gap_first), last)
    first = tl.where(first >= gap_first, tl.maximum(first, gap_last), first)
    return first, tl.maximum(last, first)


@triton.jit(do_not_specialize=["q_len", "padded", "kv_len", "n_kv", "n_columns"])
def _backward_keys(
    q, k, v, dout, lse, delta, indices, segments, dk, dv,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    heads, kv_heads, mask_batch, mask_heads, q_len, padded, kv_len, n_kv, n_columns, dim, v_dim, scale, factor, bend,
    CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr, VISIBLE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % n_columns
    batch = tl.program_id(0) // n_columns // kv_heads
    kv_head = tl.program_id(0) // n_columns % kv_heads
    column = tile * BLOCK_N
    keys = load_tile(k, batch, kv_head, column, k_b, k_h, k_s, k_d, kv_len, dim, BLOCK_N, BLOCK_D, TMA)
    values = load_tile(v, batch, kv_head, column, v_b, v_h, v_s, v_d, kv_len, v_dim, BLOCK_N, BLOCK_V, TMA)
    dkeys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    group = heads // kv_heads
    for member in range(group):
        head = kv_head * group + member
        mask = ((batch % mask_batch) * mask_heads + head // (heads // mask_heads)).to(tl.int64)
        columns = (column + tl.arange(0, BLOCK_N))[:, None]
        vectors = vectors_of(indices, mask, kv_len, SUBTILES * BLOCK_N, N)
        start, end, other_start, other_end = load_intervals(vectors, columns, None, CAUSAL, N)
        plane = batch * heads + head

        # Steps count through the ranges one after another; a range's shift turns the count into its row tile.
        ranges = segments + (mask * n_kv + tile // SUBTILES) * (VISIBLE + PARTIAL) * 2
        s0, e0 = tl.load(ranges) * SUBROWS, tl.load(ranges + 1) * SUBROWS
        s1, e1 = tl.load(ranges + 2) * SUBROWS, tl.load(ranges + 3) * SUBROWS
        s2, e2 = tl.load(ranges + 4) * SUBROWS, tl.load(ranges + 5) * SUBROWS
        n0 = e0 - s0
        n1 = n0 + e1 - s1
        for step in tl.range(0, n1 + e2 - s2):
            row = (step + s0 + tl.where(step >= n0, s1 - e0, 0) + tl.where(step >= n1, s2 - e1, 0)) * BLOCK_M
            dkeys, dvalues = _accumulate_keys(
                dkeys, dvalues, keys, values, q, dout, lse, delta, start, end, other_start, other_end,
                batch, head, plane, row, column, q_b, q_h, q_s, q_d, do_b, do_h, do_s, do_d,
                q_len, padded, kv_len, dim, v_dim, factor, bend,
                False, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip

        ranges += VISIBLE * 2
        low, gap_first, gap_last = _dark_rows(start, end, other_end, column, kv_len - q_len, CAUSAL, N, BLOCK_M)
        s0, e0 = _trimmed_range(ranges, low, gap_first, gap_last, SUBROWS)
        s1, e1 = _trimmed_range(ranges + 2, low, gap_first, gap_last, SUBROWS)
        s2, e2 = _trimmed_range(ranges + 4, low, gap_first, gap_last, SUBROWS)
        s3, e3 = _trimmed_range(ranges + 6, low, gap_first, gap_last, SUBROWS)
        n0 = e0 - s0
        n1 = n0 + e1 - s1
        n2 = n1 + e2 - s2
        for step in tl.range(0, n2 + e3 - s3):
            row = step + s0 + tl.where(step >= n0, s1 - e0, 0) + tl.where(step >= n1, s2 - e1, 0)
            row = (row + tl.where(step >= n2, s3 - e2, 0)) * BLOCK_M
            dkeys, dvalues = _accumulate_keys(
                dkeys, dvalues, keys, values, q, dout, lse, delta, start, end, other_start, other_end,
                batch, head, plane, row, column, q_b, q_h, q_s, q_d, do_b, do_h, do_s, do_d,
                q_len, padded, kv_len, dim, v_dim, factor, bend,
                True, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip

    store_tile(dk, dkeys * scale, batch, kv_head, column, dk_b, dk_h, dk_s, dk_d, kv_len, dim, BLOCK_N, BLOCK_D)
    store_tile(dv, dvalues, batch, kv_head, column, dv_b, dv_h, dv_s, dv_d, kv_len, v_dim, BLOCK_N, BLOCK_V)


@triton.jit
def _accumulate_queries(
    dq, queries, upstream, row_lse, row_delta, k, v, indices, batch, kv_head, row, column,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [BM, D] (less the scale)."""
    keys = load_tile(k, batch, kv_head, column, k_b, k_h, k_s, k_d, kv_len, dim, BLOCK_N, BLOCK_D, TMA)
    values = load_tile(v, batch, kv_head, column, v_b, v_h, v_s, v_d, kv_len, v_dim, BLOCK_N, BLOCK_V, TMA)
    scores = tl.dot(queries, keys.T, input_precision=PRECISION)  # [BM, BN]
    if CAP:
        scores = tanh(scores * bend)
    weights = tl.math.exp2(scores * factor - row_lse[:, None])
    if MASKED:
        in_tile = tl.arange(0, BLOCK_N)[None, :]
        columns = column + in_tile
        vectors = indices + column.to(tl.int64) * N  # offsets in the tile take fewer registers than in the row
        start, end, other_start, other_end = load_intervals(vectors, in_tile, None, CAUSAL, N)
        rows = (row + tl.arange(0, BLOCK_M))[:, None]
        hidden = hidden_pairs(rows, columns, start, end, other_start, other_end, kv_len - q_len, CAUSAL, N)
        weights = tl.where(hidden, 0.0, weights)
    dscores = tl.dot(upstream, values.T, input_precision=PRECISION)  # [BM, BN]
    dscores = weights * (dscores - row_delta[:, None])
    if CAP:
        dscores = dscores * (1.0 - scores * scores)
    return tl.dot(dscores.to(keys.dtype), keys, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["q_len", "padded", "kv_len", "n_q", "n_kv", "n_rows"])
def _backward_queries(
    q, k, v, dout, lse, delta, indices, tiles, counts, dq,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d, dq_b, dq_h, dq_s, dq_d,
    heads, kv_heads, mask_batch, mask_heads, q_len, padded, kv_len, n_q, n_kv, n_rows, dim, v_dim, scale, factor, bend,
    CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    tile, batch, head, kv_head, mask = row_place(n_rows, heads, kv_heads, mask_batch, mask_heads)
    row = tile * BLOCK_M
    plan_row = mask * n_q + tile // SUBROWS
    tiles += plan_row * n_kv
    indices = vectors_of(indices, mask, kv_len, SUBTILES * BLOCK_N, N)

    queries = load_tile(q, batch, head, row, q_b, q_h, q_s, q_d, q_len, dim, BLOCK_M, BLOCK_D, TMA)
    upstream = load_tile(dout, batch, head, row, do_b, do_h, do_s, do_d, q_len, v_dim, BLOCK_M, BLOCK_V, TMA)
    plane = batch * heads + head
    row_lse = _load_statistic(lse, plane, row, padded, BLOCK_M, TMA)
    row_delta = _load_statistic(delta, plane, row, padded, BLOCK_M, TMA)
    dqueries = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n_visible = tl.load(counts + plan_row * 2) * SUBTILES
    n_partial = tl.load(counts + plan_row * 2 + 1) * SUBTILES
    for step in tl.range(0, n_visible):
        column = (tl.load(tiles + step // SUBTILES).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
        dqueries = _accumulate_queries(
            dqueries, queries, upstream, row_lse, row_delta, k, v, indices, batch, kv_head, row, column,
            k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
            False, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    for step in tl.range(0, n_partial):
        column = (tl.load(tiles + n_kv - 1 - step // SUBTILES).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
        dqueries = _accumulate_queries(
            dqueries, queries, upstream, row_lse, row_delta, k, v, indices, batch, kv_head, row, column,
            k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
            True, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    store_tile(dq, dqueries * scale, batch, head, row, dq_b, dq_h, dq_s, dq_d, q_len, dim, BLOCK_M, BLOCK_D)


_launch_keys = Launcher(_backward_keys)
_launch_queries = Launcher(_backward_queries)


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
    by_keys: Config | None = None,
    by_queries: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch both backward kernels.

    Args:
        dout: gradient of the output, [B, Hq, Sq, Dv].
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        lse: float32 [B, Hq, Sq] of the forward.
        delta: float32 [B, Hq, Sq], or what it follows from.
        mask: the mask.
        plan: its plan.
        scale: factor on the scores.
        softcap: 0 is none.
        by_keys: overrides the tiles of the dK and dV kernel.
        by_queries: overrides the tiles of the dQ kernel.

    Returns:
        dq, dk, dv like q, k, v; and delta, in which rows of zeros may follow those of each head.
    """
    launch = launches_of(dout, q, k, v, delta, mask, plan, scale, softcap, by_keys, by_queries)
    dq, dk, dv, delta_of = launch(dout, q, k, v, lse, delta, mask.indices, plan)
    return dq, dk, dv, delta_of()


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
    by_keys: Config | None = None,
    by_queries: Config | None = None,
) -> Callable[..., Gradients]:
    """`prepared` for tensors of these layouts; arguments as in `backward`."""
    block_d, block_v, n = block_of(q.shape[3]), block_of(v.shape[3]), mask.indices.shape[-1]
    return prepared(
        problem_of(q, k, v, mask, plan, scale, softcap), layout_of(dout), output_layout(delta),
        by_keys or keys_config(q, block_d, block_v), by_queries or queries_config(q, block_d, block_v, n),
        can_describe(q, k, v, dout),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def prepared(
    problem: Problem, dout: Layout, output: OutputLayout | None, by_keys: Config, by_queries: Config, tma: bool
) -> Callable[..., Gradients]:
    """Settle what follows from layouts, for launches that differ in the memory of tensors alone.

    Args:
        problem: the layouts, and what else is known of the call.
        dout: layout of the output's gradient.
        output: of what delta follows from, or None if it is there.
        by_keys: tile sizes of the dK and dV kernel.
        by_queries: tile sizes of the dQ kernel.
        tma: whether tiles are loaded through descriptors, which fit the layouts then.

    Returns:
        (dout, q, k, v, lse, delta, indices, plan) -> gradients, as in `backward`. With `tma`, the first four begin at
        multiples of 16 bytes.
    """
    q, k, v, vectors = problem.q, problem.k, problem.v, problem.vectors
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    block_d, block_v = block_of(dim), block_of(v_dim)
    mask_batch, mask_heads, n_q, n_kv = problem.listed
    width = plan_columns(kv_len)
    whole = whole_tiles(vectors, q.device, width)
    padded = -(-q_len // ROWS) * ROWS
    statistic = packed_layout(batch * heads, padded, dtype=torch.float32, device=q.device)
    scratch_like, parts = side_by_side(lse=statistic, delta=statistic)
    dq_like, dk_like, dv_like = map(layout_like, (q, k, v))
    strides = (*q.strides, *k.strides, *v.strides, *dout.strides)

    def flags(tile: Config) -> dict[str, Any]:
        return {
            "tiles": tiles_template(
                tma,
                (q, tile.rows, block_d),
                (k, tile.columns, block_d),
                (v, tile.columns, block_v),
                (dout, tile.rows, block_v),
                (statistic, 1, tile.rows),
                (statistic, 1, tile.rows),
            ),
            "CAUSAL": problem.causal,
            "N": vectors[-1],
            "CAP": problem.capped,
            "TMA": tma,
            "PRECISION": dot_precision(q),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_D": block_d,
            "BLOCK_V": block_v,
            "SUBROWS": ROWS // tile.rows,
            "SUBTILES": width // tile.columns,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    n_columns, n_rows = -(-kv_len // by_keys.columns), -(-q_len // by_queries.rows)
    new_dq, new_dk, new_dv, new_scratch = (x.maker() for x in (dq_like, dk_like, dv_like, scratch_like))
    whole_lse, whole_delta = parts["lse"], parts["delta"]
    from_output: Any = None
    if output is not None:
        from_output = bind_delta(dout, output.out, padded, {"whole_lse": whole_lse, "delta": whole_delta})
    statistics = bind_statistics(batch * heads, q_len, padded, {"whole_lse": whole_lse, "whole_delta": whole_delta})
    keys = _launch_keys.bind(
        n_columns * kv_heads * batch,
        *strides, *dk_like.strides, *dv_like.strides,
        heads, kv_heads, mask_batch, mask_heads, q_len, padded, kv_len, n_kv, n_columns, dim, v_dim,
        problem.scale, *problem.factors,
        parts=parts, VISIBLE=VISIBLE_SEGMENTS, PARTIAL=PARTIAL_SEGMENTS, **flags(by_keys),
    )  # fmt: skip
    queries = _launch_queries.bind(
        n_rows * heads * batch,
        *strides, *dq_like.strides,
        heads, kv_heads, mask_batch, mask_heads, q_len, padded, kv_len, n_q, n_kv, n_rows, dim, v_dim,
        problem.scale, *problem.factors,
        parts=parts, **flags(by_queries),
    )  # fmt: skip

    def run(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Delta, indices: Tensor, plan: Plan
    ) -> Gradients:
        dq, dk, dv, scratch = new_dq(), new_dk(), new_dv(), new_scratch()
        indices = whole(indices)
        lse = lse.contiguous()
        if isinstance(delta, tuple):
            out, dlse = delta
            dlse = None if dlse is None else dlse.contiguous()
            from_output.launch(dout, out, dlse, scratch, lse, scratch, None, None)
        else:
            statistics.launch(lse, delta.contiguous(), scratch, scratch)
        keys.launch(q, k, v, dout, scratch, scratch, indices, plan.segments, dk, dv)
        queries.launch(q, k, v, dout, scratch, scratch, indices, plan.tiles, plan.counts, dq)
        return dq, dk, dv, partial(whole_delta.of, scratch)

    return run
