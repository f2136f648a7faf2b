"""Attention of few query rows over many keys (flash decoding): programs split the keys, then their parts are combined.

    _decode: a program per split of the keys, for the stacked query rows of all heads that share a key-value head
        queries [BM, D], acc [BM, DV], top [BM], total [BM]     stay
        for each group of BLOCKS blocks of keys:                classify the bounds [BLOCKS, BN]
            for each block that some row sees:                  keys [BN, D], values [BN, DV] stream
                acc, top, total = online softmax
        out and lse of a single split, else a part
    _combine: a program per row, with several splits
        out = sum of the parts, weighted by their share of the softmax

The kernel reads the mask indices itself: a plan would be walked only once. A split takes every n-th block of keys, so
that keys visible in a window or before padding are spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.portable.forward import attend
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound
from flashmask_hf.kernels.shared.configs import decode_config, decode_splits
from flashmask_hf.kernels.shared.device import (
    LN_2,
    LOG2_E,
    LOWEST,
    HeadRows,
    block_of,
    dot_precision,
    load_intervals,
)

_CLASSIFIED = 2048  # keys that a program classifies at a time


@triton.jit
def _classify_blocks(
    indices, block, n_splits, n_masks, q_len, kv_len,
    CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Classify BLOCKS blocks of keys, every `n_splits`-th from `block` on, for `n_masks` neighbouring mask heads.

    Returns int32 [BLOCKS]: 0 for blocks hidden from all rows, 1 for others, 2 if a bound is outside 0..q_len.
    """
    blocks = block + tl.arange(0, BLOCKS) * n_splits
    columns = blocks[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [BLOCKS, BN]
    kind = tl.zeros([BLOCKS], tl.int32)
    for _ in range(n_masks):
        start, end, other_start, other_end = load_intervals(indices, columns, columns < kv_len, CAUSAL, N)
        low, high = start, start
        if end_bound(N, CAUSAL) is not None:
            low = tl.minimum(low, end)
            high = tl.maximum(high, tl.where(columns < kv_len, end, 0))
        if other_start_bound(N, CAUSAL) is not None:
            low = tl.minimum(low, other_start)
            high = tl.maximum(high, other_start)
        if other_end_bound(N, CAUSAL) is not None:
            low = tl.minimum(low, other_end)
            high = tl.maximum(high, other_end)
        if CAUSAL:
            other_end = columns - (kv_len - q_len)
        reach = tl.where(start <= 0, end, 0)  # rows 0 to `reach` are hidden
        reach = tl.where(other_start <= reach, tl.maximum(reach, other_end), reach)
        reach = tl.where(start <= reach, tl.maximum(reach, end), reach)
        found = tl.where((low < 0) | (high > q_len), 2, tl.where(reach < q_len, 1, 0))
        kind = tl.maximum(kind, tl.max(found, 1))
        indices += kv_len.to(tl.int64) * N
    return kind


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_splits"])
def _decode(
    q, k, v, sinks, indices, out, lse, q_strides, k_strides, v_strides, heads, q_len, kv_len, n_splits, dims, factors,
    CAUSAL: tl.constexpr, N: tl.constexpr, PER_HEAD: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute one split of the keys for one tile of stacked query rows; WHOLE if there is one split.

    Tensors:
        q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv].
        sinks: [Hq] if SINKS.
        indices: mask indices [mask batch, mask heads, Skv, N], contiguous.
        out: written: if WHOLE [B, Sq, Hq, Dv], else float32 [B, Hq, Sq, n_splits, Dv].
        lse: written, float32: if WHOLE [B, Hq, Sq], else [B, Hq, Sq, n_splits] in units of log2.

    PER_HEAD: heads that share a key-value head have their own masks. Other arguments are as in `shared.device`.
    """
    n_heads, kv_heads, mask_batch, mask_heads = heads
    dim, v_dim = dims
    group = n_heads // kv_heads
    n_tiles = tl.cdiv(group * q_len, BLOCK_M)
    tile = tl.program_id(0) % n_tiles
    split = tl.program_id(0) // n_tiles % n_splits
    kv_head = tl.program_id(0) // n_tiles // n_splits % kv_heads
    batch = tl.program_id(0) // n_tiles // n_splits // kv_heads

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    inside = packed < group * q_len
    member = tl.minimum(packed // q_len, group - 1)  # of the group of heads
    row = packed % q_len
    head = kv_head * group + member
    first_mask = (batch % mask_batch) * mask_heads + kv_head * mask_heads // kv_heads
    indices += first_mask.to(tl.int64) * kv_len * N
    first_member, last_member = 0, 0
    row_indices = indices
    if PER_HEAD:
        first_member = tile * BLOCK_M // q_len
        last_member = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // q_len, group - 1)
        row_indices = indices + (member.to(tl.int64) * kv_len * N)[:, None]  # [BM, 1]
        indices += first_member.to(tl.int64) * kv_len * N

    q_b, q_h, q_s, q_d = q_strides
    d = tl.arange(0, BLOCK_D)
    q_rows = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + row.to(tl.int64) * q_s
    queries = tl.load(
        q_rows[:, None] + d.to(tl.int64)[None, :] * q_d, mask=inside[:, None] & (d < dim)[None, :], other=0.0
    )  # [BM, D]
    k = HeadRows(k, k_strides, batch, kv_head, kv_len, dim)
    v = HeadRows(v, v_strides, batch, kv_head, kv_len, v_dim)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # in units of log2
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        sink = tl.where(split == 0, sink, float("-inf"))  # it counts once
        top = tl.maximum(sink, LOWEST)
        total = tl.math.exp2(sink - top)  # 1, or 0 if the sink is -inf

    n_blocks = tl.cdiv(kv_len, BLOCK_N)
    worst = 0
    for block in range(split, n_blocks, BLOCKS * n_splits):
        kind = _classify_blocks(
            indices, block, n_splits, last_member - first_member + 1, q_len, kv_len, CAUSAL, N, BLOCK_N, BLOCKS
        )
        worst = tl.maximum(worst, tl.max(kind, 0))
        # One bit per block lets the loop over the blocks load ahead.
        seen = tl.minimum(kind, 1).to(tl.int64)
        bits = tl.sum(seen << tl.arange(0, BLOCKS).to(tl.int64), 0)
        for _ in tl.range(0, tl.sum(seen, 0).to(tl.int32)):
            lowest = bits & -bits
            bits = bits - lowest
            nth = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its exponent
            column = (block + nth * n_splits) * BLOCK_N
            acc, top, total = attend(
                acc, top, total, queries, k, v, row_indices, row, column, (q_len, kv_len), factors,
                None, True, False, CAUSAL, N, CAP, False, PRECISION, BLOCK_N,
            )  # fmt: skip
    tl.device_assert(worst < 2, "the mask's indices must lie in 0..q_len; FlashMask.validate(q_len) names the columns")

    any_seen = total != 0  # NaN stays NaN
    acc = acc / tl.where(any_seen, total, 1.0)[:, None]
    log_sum = tl.where(any_seen, top + tl.math.log2(tl.where(any_seen, total, 1.0)), float("-inf"))
    line = (batch.to(tl.int64) * n_heads + head) * q_len + row
    if WHOLE:
        tl.store(lse + line, log_sum * LN_2, mask=inside)
        line = (batch.to(tl.int64) * q_len + row) * n_heads + head
    else:
        line = line * n_splits + split
        tl.store(lse + line, log_sum, mask=inside)
    e = tl.arange(0, BLOCK_V)
    tl.store(
        out + line[:, None] * v_dim + e[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (e < v_dim)[None, :],
    )


@triton.jit(do_not_specialize=["q_len", "n_splits"])
def _combine(
    parts, part_lse, out, lse, heads, q_len, n_splits, v_dim, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Combine the splits of one row.

    Tensors:
        parts, part_lse: `out` and `lse` of `_decode`.
        out: written, [B, Sq, Hq, Dv].
        lse: written, float32 [B, Hq, Sq].
        BLOCK_N: splits loaded at a time.
    """
    line = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    top = LOWEST + 0.0
    total = 0.0
    for first in range(0, n_splits, BLOCK_N):
        split = first + tl.arange(0, BLOCK_N)
        log_sum = tl.load(part_lse + line * n_splits + split, mask=split < n_splits, other=float("-inf"))  # [BN]
        part = tl.load(
            parts + (line * n_splits + split)[:, None] * v_dim + e[None, :],
            mask=(split < n_splits)[:, None] & (e < v_dim)[None, :],
            other=0.0,
        )  # [BN, DV]
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        weight = tl.math.exp2(log_sum - new_top)
        decay = tl.math.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        top = new_top
    any_seen = total != 0
    safe_total = tl.where(any_seen, total, 1.0)
    tl.store(lse + line, tl.where(any_seen, (top + tl.math.log2(safe_total)) * LN_2, float("-inf")))
    batch, head, row = line // q_len // heads, line // q_len % heads, line % q_len
    out_line = (batch * q_len + row) * heads + head
    tl.store(out + out_line * v_dim + e, (acc / safe_total).to(out.dtype.element_ty), mask=e < v_dim)


def prepare_decode(problem: Problem) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare decoding for tensors of one layout. A bound out of range fails a device-side assertion."""
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    mask_batch, mask_heads, *_ = problem.mask_shape
    block_v = block_of(v_dim)
    config = decode_config(problem)
    programs = -(-(heads // kv_heads * q_len) // config.rows) * kv_heads * batch
    n_splits = decode_splits(q.device, programs, -(-kv_len // config.columns))

    lines = batch * heads * q_len
    out_layout = packed_layout(batch, heads, q_len, v_dim, dtype=q.dtype, device=q.device, order=(0, 2, 1, 3))
    new_out = out_layout.allocator()
    new_lse = packed_layout(batch, heads, q_len, dtype=torch.float32, device=q.device).allocator()
    new_parts = packed_layout(lines, n_splits, v_dim, dtype=torch.float32, device=q.device).allocator()
    new_part_lse = packed_layout(lines, n_splits, dtype=torch.float32, device=q.device).allocator()
    attend = Launch(
        _decode,
        programs * n_splits,
        q.strides, k.strides, v.strides,
        (heads, kv_heads, mask_batch, mask_heads), q_len, kv_len, n_splits, (dim, v_dim), problem.factors,
        **problem.constants, PER_HEAD=mask_heads > kv_heads, SINKS=problem.sinks, WHOLE=n_splits == 1,
        PRECISION=dot_precision(q),
        BLOCK_M=config.rows, BLOCK_N=config.columns, BLOCK_D=block_of(dim), BLOCK_V=block_v,
        BLOCKS=min(32, _CLASSIFIED // config.columns),
        num_warps=config.warps, num_stages=config.stages, debug=True, sanitize_overflow=False,
    )  # fmt: skip
    combine = Launch(
        _combine, lines, heads, q_len, n_splits, v_dim, BLOCK_V=block_v, BLOCK_N=4096 // block_v, num_warps=4
    )

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.contiguous()
        indices = indices.contiguous()
        if n_splits == 1:
            attend(q, k, v, sinks, indices, out, lse)
        else:
            parts, part_lse = new_parts(), new_part_lse()
            attend(q, k, v, sinks, indices, parts, part_lse)
            combine(parts, part_lse, out, lse)
        return out, lse

    return run
