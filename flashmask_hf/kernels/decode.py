"""Attention of few query rows over many keys (flash decoding): the keys are split among programs, then combined.

One program holds all query rows of all heads that share a key-value head in one tile, so keys and values are read once.
It reads the mask's columns itself: a plan would be made for one walk only. A split is every n-th block of keys, so that
what a window or padding leaves to be seen is spread evenly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.configs import Config, decode_config, decode_splits
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.kernels.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    block_of,
    dot_precision,
    hidden_pairs,
    load_intervals,
    load_tile,
    score_factors,
    tanh,
)
from flashmask_hf.mask import FlashMask

_SCANNED = 2048  # columns of a mask head that a program classifies at a time


@triton.jit
def _scan(
    indices, block, n_splits, n_masks, q_len, kv_len,
    CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What BLOCKS blocks of keys are, every `n_splits`-th from `block` on, to `n_masks` neighbouring mask heads.

    int32 [BLOCKS]: 0 if all rows are hidden from all keys of the block, 1 if not, 2 if an index is not in 0..q_len.
    """
    blocks = block + tl.arange(0, BLOCKS) * n_splits
    columns = blocks[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [BLOCKS, BN]
    kind = tl.zeros([BLOCKS], tl.int32)
    for _ in range(n_masks):
        start, end, other_start, other_end = load_intervals(indices, columns, columns < kv_len, CAUSAL, N)
        low, high = start, start
        if N == 4 or (N == 2 and CAUSAL):
            low = tl.minimum(low, end)
            high = tl.maximum(high, tl.where(columns < kv_len, end, 0))
        if N == 4:
            low = tl.minimum(low, other_start)
            high = tl.maximum(high, other_start)
        if N == 4 or (N == 2 and not CAUSAL):
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
    q, k, v, sinks, indices, out, lse,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_splits, dim, v_dim, factor, bend,
    CAUSAL: tl.constexpr, N: tl.constexpr, PER_HEAD: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One split of the keys for one tile of packed rows: the result if WHOLE, else a partial one and its log2 sum."""
    group = heads // kv_heads
    n_tiles = tl.cdiv(group * q_len, BLOCK_M)
    tile = tl.program_id(0) % n_tiles
    split = tl.program_id(0) // n_tiles % n_splits
    kv_head = tl.program_id(0) // n_tiles // n_splits % kv_heads
    batch = tl.program_id(0) // n_tiles // n_splits // kv_heads

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
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
        row_indices = indices + (member.to(tl.int64) * kv_len * N)[:, None]
        indices += first_member.to(tl.int64) * kv_len * N

    d = tl.arange(0, BLOCK_D)
    place = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + row.to(tl.int64) * q_s
    queries = tl.load(
        place[:, None] + d.to(tl.int64)[None, :] * q_d, mask=inside[:, None] & (d < dim)[None, :], other=0.0
    )
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
        kind = _scan(
            indices, block, n_splits, last_member - first_member + 1, q_len, kv_len, CAUSAL, N, BLOCK_N, BLOCKS
        )
        worst = tl.maximum(worst, tl.max(kind, 0))
        # A bit per block, so that the loop over those to be walked loads ahead.
        seen = tl.minimum(kind, 1).to(tl.int64)
        bits = tl.sum(seen << tl.arange(0, BLOCKS).to(tl.int64), 0)
        for _ in tl.range(0, tl.sum(seen, 0).to(tl.int32)):
            lowest = bits & -bits
            bits = bits - lowest
            nth = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its exponent
            column = (block + nth * n_splits) * BLOCK_N
            keys = load_tile(k, batch, kv_head, column, k_b, k_h, k_s, k_d, kv_len, dim, BLOCK_N, BLOCK_D, False)
            scores = tl.dot(queries, keys.T, input_precision=PRECISION)  # [BM, BN]
            if CAP:
                scores = tanh(scores * bend)
            columns = (column + tl.arange(0, BLOCK_N))[None, :]
            start, end, other_start, other_end = load_intervals(row_indices, columns, columns < kv_len, CAUSAL, N)
            hidden = hidden_pairs(row[:, None], columns, start, end, other_start, other_end, kv_len - q_len, CAUSAL, N)
            scores = tl.where(hidden, float("-inf"), scores)
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            weights = tl.math.exp2(scores * factor - new_top[:, None])
            decay = tl.math.exp2(top - new_top)
            total = total * decay + tl.sum(weights, 1)
            values = load_tile(v, batch, kv_head, column, v_b, v_h, v_s, v_d, kv_len, v_dim, BLOCK_N, BLOCK_V, False)
            acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            top = new_top
    tl.device_assert(worst < 2, "the mask's indices must lie in 0..q_len; FlashMask.validate(q_len) names the columns")

    any_seen = total != 0  # NaN stays NaN
    acc = acc / tl.where(any_seen, total, 1.0)[:, None]
    log_sum = tl.where(any_seen, top + tl.math.log2(tl.where(any_seen, total, 1.0)), float("-inf"))
    line = (batch.to(tl.int64) * heads + head) * q_len + row
    if WHOLE:
        tl.store(lse + line, log_sum * LN_2, mask=inside)
        line = (batch.to(tl.int64) * q_len + row) * heads + head
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
    """One row: the sum of its splits' results, each weighted by its share of the softmax."""
    line = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    top = LOWEST + 0.0
    total = 0.0
    for first in range(0, n_splits, BLOCK_N):
        split = first + tl.arange(0, BLOCK_N)
        log_sum = tl.load(part_lse + line * n_splits + split, mask=split < n_splits, other=float("-inf"))
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
    safe = tl.where(any_seen, total, 1.0)
    tl.store(lse + line, tl.where(any_seen, (top + tl.math.log2(safe)) * LN_2, float("-inf")))
    batch, head, row = line // q_len // heads, line // q_len % heads, line % q_len
    place = ((batch * q_len + row) * heads + head) * v_dim
    tl.store(out + place + e, (acc / safe).to(out.dtype.element_ty), mask=e < v_dim)


_launch_decode = Launcher(_decode)
_launch_combine = Launcher(_combine)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    config: Config | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch; arguments and results as in `ops.flash_attn_decode`. `config` and `n_splits` override the tables.

    An index out of range is an assertion of the device.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    mask_batch, mask_heads, _, n = mask.indices.shape
    block_d, block_v = block_of(dim), block_of(v_dim)
    packed = heads // kv_heads * q_len
    per_head = mask_heads > kv_heads
    config = config or decode_config(q, packed, block_d, block_v, n if per_head else 0)
    programs = -(-packed // config.rows) * kv_heads * batch
    n_splits = n_splits or decode_splits(q, programs, -(-kv_len // config.columns))
    out = q.new_empty(batch, q_len, heads, v_dim).transpose(1, 2)
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    parts, part_lse = out, lse
    if n_splits > 1:
        parts = q.new_empty(batch * heads * q_len, n_splits, v_dim, dtype=torch.float32)
        part_lse = q.new_empty(batch * heads * q_len, n_splits, dtype=torch.float32)
    factor, bend = score_factors(scale, softcap)
    with torch.cuda.device_of(q):
        _launch_decode(
            programs * n_splits,
            q, k, v, None if sinks is None else sinks.contiguous(), mask.indices.contiguous(), parts, part_lse,
            *q.stride(), *k.stride(), *v.stride(),
            heads, kv_heads, mask_batch, mask_heads, q_len, kv_len, n_splits, dim, v_dim, factor, bend,
            CAUSAL=mask.causal, N=n, PER_HEAD=per_head, SINKS=sinks is not None, CAP=softcap != 0,
            WHOLE=n_splits == 1, PRECISION=dot_precision(q),
            BLOCK_M=config.rows, BLOCK_N=config.columns, BLOCK_D=block_d, BLOCK_V=block_v,
            BLOCKS=min(32, _SCANNED // config.columns),
            num_warps=config.warps, num_stages=config.stages, debug=True, sanitize_overflow=False,
        )  # fmt: skip
        if n_splits > 1:
            _launch_combine(
                batch * heads * q_len,
                parts, part_lse, out, lse, heads, q_len, n_splits, v_dim,
                BLOCK_V=block_v, BLOCK_N=4096 // block_v, num_warps=4,
            )  # fmt: skip
    return out, lse
