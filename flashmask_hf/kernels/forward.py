"""The portable forward (FlashMask, ICLR 2025, algorithm 1): a program per tile of query rows walks the plan's list."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.configs import Config, forward_config
from flashmask_hf.kernels.descriptors import can_describe, packed_layout, tiles_template
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.problem import Problem, problem_of
from flashmask_hf.kernels.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
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
from flashmask_hf.plan import ROWS, Plan, plan_columns


@triton.jit
def _attend(
    queries, acc, top, total, k, v, indices, batch, kv_head, column, row,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys: the new (acc [BM, DV], top [BM], total [BM]); top is in units of log2."""
    keys = load_tile(k, batch, kv_head, column, k_b, k_h, k_s, k_d, kv_len, dim, BLOCK_N, BLOCK_D, TMA)
    scores = tl.dot(queries, keys.T, input_precision=PRECISION)  # [BM, BN]
    if CAP:
        scores = tanh(scores * bend)
    if MASKED:
        columns = (column + tl.arange(0, BLOCK_N))[None, :]
        start, end, other_start, other_end = load_intervals(indices, columns, None, CAUSAL, N)
        rows = (row + tl.arange(0, BLOCK_M))[:, None]
        hidden = hidden_pairs(rows, columns, start, end, other_start, other_end, kv_len - q_len, CAUSAL, N)
        scores = tl.where(hidden, float("-inf"), scores)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.math.exp2(scores * factor - new_top[:, None])
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    values = load_tile(v, batch, kv_head, column, v_b, v_h, v_s, v_d, kv_len, v_dim, BLOCK_N, BLOCK_V, TMA)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_q", "n_kv", "n_rows"])
def _forward(
    q, k, v, sinks, indices, tiles, counts, out, lse,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, out_b, out_h, out_s, out_d,
    heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_q, n_kv, n_rows, dim, v_dim, factor, bend,
    CAUSAL: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SUBROWS: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    tile, batch, head, kv_head, mask = row_place(n_rows, heads, kv_heads, mask_batch, mask_heads)
    row = tile * BLOCK_M
    plan_row = mask * n_q + tile // SUBROWS
    tiles += plan_row * n_kv
    indices = vectors_of(indices, mask, kv_len, SUBTILES * BLOCK_N, N)

    queries = load_tile(q, batch, head, row, q_b, q_h, q_s, q_d, q_len, dim, BLOCK_M, BLOCK_D, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.zeros([BLOCK_M], tl.float32) + tl.maximum(sink, LOWEST)
        total = tl.math.exp2(sink - top)  # 1, or 0 if the sink is -inf

    n_visible = tl.load(counts + plan_row * 2) * SUBTILES
    n_partial = tl.load(counts + plan_row * 2 + 1) * SUBTILES
    for step in tl.range(0, n_visible):
        column = (tl.load(tiles + step // SUBTILES).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
        acc, top, total = _attend(
            queries, acc, top, total, k, v, indices, batch, kv_head, column, row,
            k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
            False, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    for step in tl.range(0, n_partial):
        column = (tl.load(tiles + n_kv - 1 - step // SUBTILES).to(tl.int32) * SUBTILES + step % SUBTILES) * BLOCK_N
        acc, top, total = _attend(
            queries, acc, top, total, k, v, indices, batch, kv_head, column, row,
            k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, q_len, kv_len, dim, v_dim, factor, bend,
            True, CAUSAL, N, CAP, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip

    seen = total != 0  # NaN stays NaN
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    store_tile(out, acc, batch, head, row, out_b, out_h, out_s, out_d, q_len, v_dim, BLOCK_M, BLOCK_V)
    rows = row + tl.arange(0, BLOCK_M)
    log_sum = tl.where(seen, (top + tl.math.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    base = lse + (batch.to(tl.int64) * heads + head) * q_len
    tl.store(base + rows, log_sum, mask=rows < q_len)


_launch = Launcher(_forward)


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
) -> tuple[Tensor, Tensor]:
    """Launch the forward; arguments and results as in `ops.flash_attn_forward`. `config` overrides the table."""
    launch = launches_of(q, k, v, mask, plan, sinks, scale, softcap, config)
    return launch(q, k, v, mask.indices, plan, sinks)


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
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`prepared` for tensors of these layouts; arguments as in `forward`."""
    n = mask.indices.shape[-1]
    config = config or forward_config(q, block_of(q.shape[3]), block_of(v.shape[3]), n, mask.causal)
    problem = problem_of(q, k, v, mask, plan, scale, softcap)
    return prepared(problem, sinks is not None, config, can_describe(q, k, v))


@lru_cache(maxsize=1024)
def prepared(problem: Problem, sinks: bool, config: Config, tma: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Settle what follows from layouts, for launches that differ in the memory of tensors alone.

    Args:
        problem: the layouts, and what else is known of the call.
        sinks: whether there are any.
        config: tile sizes.
        tma: whether tiles are loaded through descriptors, which fit the layouts then.

    Returns:
        (q, k, v, indices, plan, sinks) -> (out, lse), as in `forward`. With `tma`, q, k and v begin at multiples of 16
        bytes.
    """
    q, k, v = problem.q, problem.k, problem.v
    vectors, (*_, n_q, n_kv) = problem.vectors, problem.listed
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    block_d, block_v = block_of(dim), block_of(v_dim)
    out_like = packed_layout(batch, heads, q_len, v_dim, dtype=q.dtype, device=q.device, order=(0, 2, 1, 3))
    new_out = out_like.maker()
    new_lse = packed_layout(batch, heads, q_len, dtype=torch.float32, device=q.device).maker()
    n_rows = -(-q_len // config.rows)
    width = plan_columns(kv_len)
    whole = whole_tiles(vectors, q.device, width)
    step = _launch.bind(
        n_rows * heads * batch,
        *q.strides, *k.strides, *v.strides, *out_like.strides,
        heads, kv_heads, *vectors[:2], q_len, kv_len, n_q, n_kv, n_rows, dim, v_dim, *problem.factors,
        tiles=tiles_template(
            tma, (q, config.rows, block_d), (k, config.columns, block_d), (v, config.columns, block_v)
        ),
        CAUSAL=problem.causal, N=vectors[-1], SINKS=sinks, CAP=problem.capped, TMA=tma, PRECISION=dot_precision(q),
        BLOCK_M=config.rows, BLOCK_N=config.columns, BLOCK_D=block_d, BLOCK_V=block_v,
        SUBROWS=ROWS // config.rows, SUBTILES=width // config.columns,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, indices: Tensor, plan: Plan, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.contiguous()
        step.launch(q, k, v, sinks, whole(indices), plan.tiles, plan.counts, out, lse)
        return out, lse

    return run
