"""The portable backward without atomics (FlashMask, ICLR 2025, algorithm 2): two kernels, one writer per gradient.

Repeated runs agree to the bit. Both kernels recompute the weights from q, k and `shared.row_statistics`:

    _backward_keys: a program per key tile of a key-value head, in the order of `shared.work_order`
        keys [BN, D], values [BN, DV], dk [BN, D], dv [BN, DV]          stay
        for each query head of the group:                               load the bounds of the keys [BN]
            for each row tile of the plan's segments, visible first:    q [BM, D], dout [BM, DV], statistics stream
                dv += weights @ dout,  dk += dscores @ q                with weights and dscores [BN, BM]

    _backward_queries: a program per row tile of a query head
        q [BM, D], dout [BM, DV], statistics [BM], dq [BM, D]           stay
        for each key tile of the plan's list, visible first:            keys [BN, D], values [BN, DV] stream
            dq += dscores @ keys
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.descriptors import loads_by_descriptor, tile_templates
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import Layout, layout_like, packed_layout
from flashmask_hf.kernels.shared.bounds import other_end_bound, other_start_bound
from flashmask_hf.kernels.shared.configs import Config, keys_config, multiprocessors, queries_config
from flashmask_hf.kernels.shared.device import (
    HeadRows,
    block_of,
    dot_precision,
    hidden_pairs,
    load_intervals,
    load_tile,
    locate_row_tile,
    softcap_tanh,
    store_tile,
)
from flashmask_hf.kernels.shared.dropout import head_dropout, kept_pairs, row_counters
from flashmask_hf.kernels.shared.padding import padded_indices_of, prepare_padding
from flashmask_hf.kernels.shared.row_statistics import (
    Delta,
    Gradients,
    OutputLayout,
    prepare_delta,
    prepare_statistics,
)
from flashmask_hf.kernels.shared.work_order import prepare_work_order
from flashmask_hf.tile_plan import PARTIAL_SEGMENTS, ROWS, VISIBLE_SEGMENTS, Plan, plan_columns


class _KeyTile(NamedTuple):
    """Key tile of a program of `_backward_keys`."""

    k: Any  # [BN, D]
    v: Any  # [BN, DV]
    intervals: Any  # `Intervals` of the keys in one query head, each [BN, 1]
    column: Any  # first key


class _QueryTile(NamedTuple):
    """Row tile of a program of `_backward_queries`."""

    q: Any  # [BM, D]
    dout: Any  # gradient of the output, [BM, DV]
    lse: Any  # in units of log2, [BM]
    delta: Any  # [BM]
    row: Any  # first row


class _HeadInputs(NamedTuple):
    """Tensors of one query head that `_backward_keys` streams: two `HeadRows`, two `_HeadStatistic`."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class _HeadStatistic(NamedTuple):
    """Row statistic of one query head."""

    tensor: Any  # pointer to [B * Hq, padded_len], or its tensor descriptor
    plane: Any  # batch * Hq + head
    padded_len: Any


@triton.jit
def _load_statistic(x, row, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """Load rows `row` to `row + BLOCK_M` of `x` (`_HeadStatistic`): [BM]."""
    if TMA:  # through pointers every thread would load each of its rows
        values = x.tensor.load([x.plane, row]).reshape(BLOCK_M)
    else:
        values = tl.load(x.tensor + x.plane.to(tl.int64) * x.padded_len + row + tl.arange(0, BLOCK_M))
    return values


@triton.jit
def _accumulate_keys(
    dk, dv, key_tile, head_inputs, row, lengths, factors, dropout,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Add one row tile, from row `row` on, to dk [BN, D] (without the scale) and dv [BN, DV].

    With `dropout` (`HeadDropout`, 1 - p), neither is divided by 1 - p.
    """
    factor, cap_factor = factors
    keys, values = key_tile.k, key_tile.v
    queries = load_tile(head_inputs.q, row, BLOCK_M, keys.shape[1], TMA)  # [BM, D]
    lse = _load_statistic(head_inputs.lse, row, BLOCK_M, TMA)
    scores = tl.dot(keys, queries.T, input_precision=PRECISION)  # [BN, BM]
    if CAP:
        scores = softcap_tanh(scores, cap_factor)
    weights = tl.math.exp2(scores * factor - lse[None, :])  # [BN, BM]
    if MASKED:
        columns = (key_tile.column + tl.arange(0, keys.shape[0]))[:, None]  # [BN, 1]
        rows = (row + tl.arange(0, BLOCK_M))[None, :]  # [1, BM]
        hidden = hidden_pairs(rows, columns, key_tile.intervals, lengths, CAUSAL, N)
        weights = tl.where(hidden, 0.0, weights)
    upstream = load_tile(head_inputs.dout, row, BLOCK_M, values.shape[1], TMA)  # [BM, DV]
    thinned = weights
    if dropout is not None:
        counters = row_counters(dropout[0], row, BLOCK_M, SHARD)
        kept = kept_pairs(dropout[0], counters, key_tile.column, keys.shape[0], True)
        thinned = tl.where(kept, weights, 0.0)
    dv = tl.dot(thinned.to(upstream.dtype), upstream, dv, input_precision=PRECISION)
    dscores = tl.dot(values, upstream.T, input_precision=PRECISION)  # [BN, BM]
    delta = _load_statistic(head_inputs.delta, row, BLOCK_M, TMA)
    if dropout is not None:
        dscores = tl.where(kept, dscores, 0.0)
        delta *= dropout[1]
    dscores = weights * (dscores - delta[None, :])
    if CAP:
        dscores = dscores * (1.0 - scores * scores)
    dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _hidden_row_tiles(intervals, column, lengths, CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (low, gap_first, gap_last): row tiles below `low` and in [gap_first, gap_last) see no key of a tile."""
    q_len, kv_len = lengths
    diagonal = kv_len - q_len
    low = 0
    if CAUSAL:
        low = (column - diagonal) // BLOCK_M
    elif other_end_bound(N, CAUSAL) is not None and other_start_bound(N, CAUSAL) is None:
        low = tl.min(intervals.other_end) // BLOCK_M
    return low, (tl.max(intervals.start) - 1) // BLOCK_M + 1, tl.min(intervals.end) // BLOCK_M


@triton.jit
def _trimmed_range(segment, low, gap_first, gap_last, SUBROWS: tl.constexpr):
    """Return row tiles [first, last) of a partial segment, without hidden ones (`_hidden_row_tiles`) at its ends."""
    first = tl.maximum(tl.load(segment) * SUBROWS, low)
    last = tl.load(segment + 1) * SUBROWS
    last = tl.where(last <= gap_last, tl.minimum(last, gap_first), last)
    first = tl.where(first >= gap_first, tl.maximum(first, gap_last), first)
    return first, tl.maximum(last, first)


@triton.jit(do_not_specialize=["unsorted", "q_len", "padded_len", "kv_len", "n_kv", "n_columns"])
def _backward_keys(
    q, k, v, dout, lse, delta, indices, segments, work_order, dk, dv, seed,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    heads, unsorted, q_len, padded_len, kv_len, n_kv, n_columns, dims, scale, factors, dropout,
    CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr, SHARD: tl.constexpr, VISIBLE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys. Other arguments are as in `shared.device`.

    Tensors:
        q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv]; descriptors if TMA, like the next three.
        dout: gradient of the output, [B, Hq, Sq, Dv].
        lse, delta: [B * Hq, padded_len], see `shared.row_statistics`.
        indices: mask indices, padded to key tiles of the plan.
        segments: of the plan, [mask batch, mask heads, n_kv, VISIBLE + PARTIAL, 2].
        work_order: key tiles of the programs from `unsorted` on, or None.
        dk, dv: written, [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv].
        seed: dropout's, or None.
    """
    n_heads, kv_heads, mask_batch, mask_heads = heads
    dim, v_dim = dims
    item = tl.program_id(0)
    if work_order is not None:
        is_sorted = item >= unsorted
        item = tl.where(is_sorted, tl.load(work_order + item - unsorted, mask=is_sorted, other=0), item)
    tile = item % n_columns
    batch = item // n_columns // kv_heads
    kv_head = item // n_columns % kv_heads
    column = tile * BLOCK_N
    lengths = q_len, kv_len
    keys = load_tile(HeadRows(k, k_strides, batch, kv_head, kv_len, dim), column, BLOCK_N, BLOCK_D, TMA)  # [BN, D]
    values = load_tile(HeadRows(v, v_strides, batch, kv_head, kv_len, v_dim), column, BLOCK_N, BLOCK_V, TMA)  # [BN, DV]
    dkeys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    group = n_heads // kv_heads
    for member in range(group):
        head = kv_head * group + member
        mask = ((batch % mask_batch) * mask_heads + head // (n_heads // mask_heads)).to(tl.int64)
        columns = (column + tl.arange(0, BLOCK_N))[:, None]  # [BN, 1]
        mask_indices = padded_indices_of(indices, mask, kv_len, SUBTILES * BLOCK_N, N)
        intervals = load_intervals(mask_indices, columns, None, CAUSAL, N)
        key_tile = _KeyTile(keys, values, intervals, column)
        plane = batch * n_heads + head
        head_inputs = _HeadInputs(
            HeadRows(q, q_strides, batch, head, q_len, dim),
            HeadRows(dout, do_strides, batch, head, q_len, v_dim),
            _HeadStatistic(lse, plane, padded_len),
            _HeadStatistic(delta, plane, padded_len),
        )

        of_head = None
        if dropout is not None:
            of_head = head_dropout(seed, dropout, batch, head, q_len, SHARD), dropout[1]

        # Steps number the row tiles of all ranges; jumps between the ranges turn a step into its row tile.
        ranges = segments + (mask * n_kv + tile // SUBTILES) * (VISIBLE + PARTIAL) * 2
        s0, e0 = tl.load(ranges) * SUBROWS, tl.load(ranges + 1) * SUBROWS
        s1, e1 = tl.load(ranges + 2) * SUBROWS, tl.load(ranges + 3) * SUBROWS
        s2, e2 = tl.load(ranges + 4) * SUBROWS, tl.load(ranges + 5) * SUBROWS
        n0 = e0 - s0
        n1 = n0 + e1 - s1
        for step in tl.range(0, n1 + e2 - s2):
            row = (step + s0 + tl.where(step >= n0, s1 - e0, 0) + tl.where(step >= n1, s2 - e1, 0)) * BLOCK_M
            dkeys, dvalues = _accumulate_keys(
                dkeys, dvalues, key_tile, head_inputs, row, lengths, factors, of_head,
                False, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, SHARD,
            )  # fmt: skip

        ranges += VISIBLE * 2
        low, gap_first, gap_last = _hidden_row_tiles(intervals, column, lengths, CAUSAL, N, BLOCK_M)
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
                dkeys, dvalues, key_tile, head_inputs, row, lengths, factors, of_head,
                True, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, SHARD,
            )  # fmt: skip

    if dropout is not None:
        scale = scale / dropout[1]
        dvalues = dvalues / dropout[1]
    store_tile(HeadRows(dk, dk_strides, batch, kv_head, kv_len, dim), dkeys * scale, column)
    store_tile(HeadRows(dv, dv_strides, batch, kv_head, kv_len, v_dim), dvalues, column)


@triton.jit
def _accumulate_queries(
    dq, query_tile, k, v, indices, column, lengths, factors, dropout,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add one key tile, from key `column` on, to dq [BM, D] (without the scale).

    `k` and `v` are `HeadRows`, `indices` points to the padded indices of the mask head.
    With `dropout` (`HeadDropout`, `row_counters`), delta is times 1 - p, and dq not divided by it.
    """
    factor, cap_factor = factors
    queries, upstream = query_tile.q, query_tile.dout
    keys = load_tile(k, column, BLOCK_N, queries.shape[1], TMA)  # [BN, D]
    values = load_tile(v, column, BLOCK_N, upstream.shape[1], TMA)  # [BN, DV]
    scores = tl.dot(queries, keys.T, input_precision=PRECISION)  # [BM, BN]
    if CAP:
        scores = softcap_tanh(scores, cap_factor)
    weights = tl.math.exp2(scores * factor - query_tile.lse[:, None])  # [BM, BN]
    if MASKED:
        in_tile = tl.arange(0, BLOCK_N)[None, :]  # [1, BN]
        columns = column + in_tile
        tile_indices = indices + column.to(tl.int64) * N  # offsets in a tile take fewer registers
        intervals = load_intervals(tile_indices, in_tile, None, CAUSAL, N)
        rows = (query_tile.row + tl.arange(0, queries.shape[0]))[:, None]  # [BM, 1]
        hidden = hidden_pairs(rows, columns, intervals, lengths, CAUSAL, N)
        weights = tl.where(hidden, 0.0, weights)
    dscores = tl.dot(upstream, values.T, input_precision=PRECISION)  # [BM, BN]
    if dropout is not None:
        dscores = tl.where(kept_pairs(dropout[0], dropout[1], column, BLOCK_N, False), dscores, 0.0)
    dscores = weights * (dscores - query_tile.delta[:, None])
    if CAP:
        dscores = dscores * (1.0 - scores * scores)
    return tl.dot(dscores.to(keys.dtype), keys, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["q_len", "padded_len", "kv_len", "n_q", "n_kv", "n_rows"])
def _backward_queries(
    q, k, v, dout, lse, delta, indices, tiles, counts, dq, seed,
    q_strides, k_strides, v_strides, do_strides, dq_strides,
    heads, q_len, padded_len, kv_len, n_q, n_kv, n_rows, dims, scale, factors, dropout,
    CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Compute dq of one row tile. Other arguments are as in `_backward_keys`.

    Tensors:
        tiles, counts: of the plan, [mask batch, mask heads, n_q, n_kv] and [mask batch, mask heads, n_q, 2].
        dq: written, [B, Hq, Sq, D].
    """
    dim, v_dim = dims
    tile, batch, head, kv_head, mask = locate_row_tile(n_rows, heads)
    row = tile * BLOCK_M
    plan_row = mask * n_q + tile // SUBROWS
    tiles += plan_row * n_kv
    indices = padded_indices_of(indices, mask, kv_len, SUBTILES * BLOCK_N, N)
    lengths = q_len, kv_len
    k = HeadRows(k, k_strides, batch, kv_head, kv_len, dim)
    v = HeadRows(v, v_strides, batch, kv_head, kv_len, v_dim)

    queries = load_tile(HeadRows(q, q_strides, batch, head, q_len, dim), row, BLOCK_M, BLOCK_D, TMA)  # [BM, D]
    upstream = load_tile(HeadRows(dout, do_strides, batch, head, q_len, v_dim), row, BLOCK_M, BLOCK_V, TMA)  # [BM, DV]
    plane = batch * heads[0] + head
    row_lse = _load_statistic(_HeadStatistic(lse, plane, padded_len), row, BLOCK_M, TMA)
    row_delta = _load_statistic(_HeadStatistic(delta, plane, padded_len), row, BLOCK_M, TMA)
    tile_dropout = None
    if dropout is not None:
        of_head = head_dropout(seed, dropout, batch, head, q_len, SHARD)
        tile_dropout = of_head, row_counters(of_head, row, BLOCK_M, SHARD)
        row_delta *= dropout[1]
        scale = scale / dropout[1]
    query_tile = _QueryTile(queries, upstream, row_lse, row_delta, row)
    dqueries = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n_steps = tl.load(counts + plan_row * 2) * SUBTILES, tl.load(counts + plan_row * 2 + 1) * SUBTILES
    for PARTIAL in tl.static_range(2):
        for step in tl.range(0, n_steps[PARTIAL]):
            listed = tiles + n_kv - 1 - step // SUBTILES if PARTIAL else tiles + step // SUBTILES
            column = (tl.load(listed).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
            dqueries = _accumulate_queries(
                dqueries, query_tile, k, v, indices, column, lengths, factors, tile_dropout,
                PARTIAL == 1, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_N,
            )  # fmt: skip
    dqueries = tl.where((row_lse == float("inf"))[:, None], 0.0, dqueries * scale)
    store_tile(HeadRows(dq, dq_strides, batch, head, q_len, dim), dqueries, row)


def prepare_backward(problem: Problem, dout: Layout, output: OutputLayout | None) -> Callable[..., Gradients]:
    """Prepare the backward for tensors of one layout.

    Arguments and the function returned are as in `Implementation.backward`.
    """
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    mask_batch, mask_heads, n_q, n_kv = problem.plan_shape
    by_keys, by_queries = keys_config(problem), queries_config(problem)
    block_d, block_v = block_of(dim), block_of(v_dim)
    n_columns, n_rows = -(-kv_len // by_keys.columns), -(-q_len // by_queries.rows)
    width = plan_columns(kv_len)
    padded_len = -(-q_len // ROWS) * ROWS

    statistic = packed_layout(batch * heads, padded_len, dtype=torch.float32, device=q.device)
    dq_layout, dk_layout, dv_layout = map(layout_like, (q, k, v))
    new_dq, new_dk, new_dv, new_statistic = (x.allocator() for x in (dq_layout, dk_layout, dv_layout, statistic))
    pad = prepare_padding(problem.mask_shape, q.device, width)
    # dV multiplies weights of 0 with dout, and 0 * NaN is NaN. The clean copy has the memory of dq until dq is made.
    clean, compute_delta = dout, None
    if output is not None:
        clean = dq_layout if dim == v_dim else layout_like(output[0])
        compute_delta = prepare_delta(dout, output[0], padded_len, clean=clean)
    new_clean = clean.allocator()
    pad_statistics = prepare_statistics(batch * heads, q_len, padded_len)

    tma = loads_by_descriptor(q, k, v, dout, clean)
    input_strides = q.strides, k.strides, v.strides
    group_sizes = heads, kv_heads, mask_batch, mask_heads

    def options(config: Config, dout: Layout) -> dict[str, Any]:
        """Return the descriptors and constants of both kernels."""
        rows, columns, warps, stages = config
        tiles = (q, rows, block_d), (k, columns, block_d), (v, columns, block_v), (dout, rows, block_v)
        return {
            "descriptors": tile_templates(*tiles, *[(statistic, 1, rows)] * 2) if tma else (),
            **problem.constants,
            "TMA": tma,
            "PRECISION": dot_precision(q),
            "BLOCK_M": rows,
            "BLOCK_N": columns,
            "BLOCK_D": block_d,
            "BLOCK_V": block_v,
            "SUBROWS": ROWS // rows,
            "SUBTILES": width // columns,
            "SHARD": problem.shard,
            "num_warps": warps,
            "num_stages": stages,
        }

    items, programs = n_columns * kv_heads * batch, multiprocessors(q.device)
    unsorted, make_work_order = 0, None
    if items > programs:
        unsorted, make_work_order = prepare_work_order(problem, n_columns, width // by_keys.columns, programs)
    backward_keys = Launch(
        _backward_keys,
        items,
        *input_strides, clean.strides, dk_layout.strides, dv_layout.strides,
        group_sizes, unsorted, q_len, padded_len, kv_len, n_kv, n_columns, (dim, v_dim), problem.scale, problem.factors,
        problem.dropout, VISIBLE=VISIBLE_SEGMENTS, PARTIAL=PARTIAL_SEGMENTS, **options(by_keys, clean),
    )  # fmt: skip
    backward_queries = Launch(
        _backward_queries,
        n_rows * heads * batch,
        *input_strides, dout.strides, dq_layout.strides,
        group_sizes, q_len, padded_len, kv_len, n_q, n_kv, n_rows, (dim, v_dim), problem.scale, problem.factors,
        problem.dropout, **options(by_queries, dout),
    )  # fmt: skip

    def run(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Delta, indices: Tensor, plan: Plan,
        seed: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv, padded_lse, padded_delta = new_dq(), new_dk(), new_dv(), new_statistic(), new_statistic()
        indices = pad(indices)
        lse = lse.contiguous()
        if isinstance(delta, tuple):
            out, dlse = delta
            dlse = None if dlse is None else dlse.contiguous()
            assert compute_delta is not None
            clean_dout = dq if dim == v_dim else new_clean()
            compute_delta(dout, out, dlse, padded_delta, lse, padded_lse, None, None, clean_dout)
        else:
            clean_dout = dout
            pad_statistics(lse, delta.contiguous(), padded_lse, padded_delta)
        work_order = None if make_work_order is None else make_work_order(plan.segments)
        backward_keys(q, k, v, clean_dout, padded_lse, padded_delta, indices, plan.segments, work_order, dk, dv, seed)
        backward_queries(q, k, v, dout, padded_lse, padded_delta, indices, plan.tiles, plan.counts, dq, seed)
        return dq, dk, dv, padded_delta

    return run
