"""The portable forward: attention over the key tiles of the plan (FlashMask, ICLR 2025, algorithm 1).

A program computes one row tile of one head:

    queries [BM, D], acc [BM, DV], top [BM], total [BM]          stay in registers
    for each visible tile of the plan's list, from the front:    keys [BN, D], values [BN, DV] stream
        acc, top, total = online softmax of queries @ keys^T
    for each partial tile, from the back:                        bounds [BN, N] stream, too
        the same with hidden pairs at -inf
    out = acc / total, lse = top + log(total)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.descriptors import loads_by_descriptor, tile_templates
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.shared.configs import forward_config
from flashmask_hf.kernels.shared.device import (
    LN_2,
    LOG2_E,
    LOWEST,
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
from flashmask_hf.tile_plan import ROWS, Plan, plan_columns


@triton.jit
def attend(
    acc, top, total, queries, k, v, indices, rows, column, lengths, factors, dropout,
    MASKED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return acc, top and total of the online softmax with one more key tile, from key `column` on.

    Operands:
        acc: weighted sum of values so far, [BM, DV].
        top: largest logit so far in units of log2, [BM].
        total: sum of weights so far, [BM].
        queries: [BM, D], of query rows `rows` [BM].
        k, v: `HeadRows`.
        indices: pointer to the indices of the mask head, padded if PADDED; or a pointer per row, [BM, 1].
        dropout: `HeadDropout` and `row_counters`, or None; acc is not yet divided by 1 - p.
    """
    factor, cap_factor = factors
    keys = load_tile(k, column, BLOCK_N, queries.shape[1], TMA)  # [BN, D]
    scores = tl.dot(queries, keys.T, input_precision=PRECISION)  # [BM, BN]
    if CAP:
        scores = softcap_tanh(scores, cap_factor)
    if MASKED:
        columns = (column + tl.arange(0, BLOCK_N))[None, :]  # [1, BN]
        intervals = load_intervals(indices, columns, None if PADDED else columns < lengths[1], CAUSAL, N)
        hidden = hidden_pairs(rows[:, None], columns, intervals, lengths, CAUSAL, N)
        scores = tl.where(hidden, float("-inf"), scores)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.math.exp2(scores * factor - new_top[:, None])  # [BM, BN]
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    if dropout is not None:
        weights = tl.where(kept_pairs(dropout[0], dropout[1], column, BLOCK_N, False), weights, 0.0)
    values = load_tile(v, column, BLOCK_N, acc.shape[1], TMA)  # [BN, DV]
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv", "n_rows"])
def _forward(
    q, k, v, sinks, indices, tiles, counts, out, lse, seed, q_strides, k_strides, v_strides, out_strides,
    heads, q_len, kv_len, n_q, n_kv, n_rows, dims, factors, dropout,
    CAUSAL: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of one row tile. Other arguments are as in `shared.device`.

    Tensors:
        q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv]; descriptors if TMA.
        sinks: [Hq] if SINKS.
        indices: mask indices, padded to key tiles of the plan.
        tiles, counts: of the plan, [mask batch, mask heads, n_q, n_kv] and [mask batch, mask heads, n_q, 2].
        out: written, [B, Hq, Sq, Dv].
        lse: written, float32 [B, Hq, Sq].
        seed: dropout's, or None.
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
    tile_dropout = None
    if dropout is not None:
        of_head = head_dropout(seed, dropout, batch, head, q_len, SHARD)
        tile_dropout = of_head, row_counters(of_head, row, BLOCK_M, SHARD)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.zeros([BLOCK_M], tl.float32) + tl.maximum(sink, LOWEST)
        total = tl.math.exp2(sink - top)  # 1, or 0 if the sink is -inf

    n_steps = tl.load(counts + plan_row * 2) * SUBTILES, tl.load(counts + plan_row * 2 + 1) * SUBTILES
    for PARTIAL in tl.static_range(2):
        for step in tl.range(0, n_steps[PARTIAL]):
            listed = tiles + n_kv - 1 - step // SUBTILES if PARTIAL else tiles + step // SUBTILES
            column = (tl.load(listed).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
            acc, top, total = attend(
                acc, top, total, queries, k, v, indices, row + tl.arange(0, BLOCK_M), column, lengths, factors,
                tile_dropout, PARTIAL == 1, True, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_N,
            )  # fmt: skip

    any_seen = total != 0  # NaN stays NaN
    acc = acc / tl.where(any_seen, total, 1.0)[:, None]
    if dropout is not None:
        acc = acc / dropout[1]
    store_tile(HeadRows(out, out_strides, batch, head, q_len, v_dim), acc, row)
    rows = row + tl.arange(0, BLOCK_M)
    row_lse = tl.where(any_seen, (top + tl.math.log2(tl.where(any_seen, total, 1.0))) * LN_2, float("-inf"))
    tl.store(lse + (batch.to(tl.int64) * heads[0] + head) * q_len + rows, row_lse, mask=rows < q_len)


def prepare_forward(problem: Problem) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare the forward for tensors of one layout, as `Implementation.forward`."""
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    mask_batch, mask_heads, n_q, n_kv = problem.plan_shape
    config = forward_config(problem)
    block_d, block_v = block_of(dim), block_of(v_dim)
    n_rows = -(-q_len // config.rows)
    width = plan_columns(kv_len)

    out_layout = packed_layout(batch, heads, q_len, v_dim, dtype=q.dtype, device=q.device, order=(0, 2, 1, 3))
    new_out = out_layout.allocator()
    new_lse = packed_layout(batch, heads, q_len, dtype=torch.float32, device=q.device).allocator()
    pad = prepare_padding(problem.mask_shape, q.device, width)
    tma = loads_by_descriptor(q, k, v)
    tiles = (q, config.rows, block_d), (k, config.columns, block_d), (v, config.columns, block_v)
    attend = Launch(
        _forward,
        n_rows * heads * batch,
        q.strides, k.strides, v.strides, out_layout.strides,
        (heads, kv_heads, mask_batch, mask_heads), q_len, kv_len, n_q, n_kv, n_rows, (dim, v_dim), problem.factors,
        problem.dropout, descriptors=tile_templates(*tiles) if tma else (),
        **problem.constants, SINKS=problem.sinks, TMA=tma, PRECISION=dot_precision(q),
        BLOCK_M=config.rows, BLOCK_N=config.columns, BLOCK_D=block_d, BLOCK_V=block_v,
        SUBROWS=ROWS // config.rows, SUBTILES=width // config.columns, SHARD=problem.shard,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, plan: Plan, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.contiguous()
        attend(q, k, v, sinks, pad(indices), plan.tiles, plan.counts, out, lse, seed)
        return out, lse

    return run
