"""A stable counting sort of queries and keys by bucket, and the mask indices of the sorted keys.

A plane is one head of one entry of the batch; a side is the queries or the keys. A program takes a block of rows.

    _count_buckets:   rows of each bucket in each block         -> counts, ordered by (side, plane, bucket, block)
    torch.cumsum:     counts                                    -> starts: where each block's rows of a bucket begin
    _sort_rows:       start + earlier rows of the bucket        -> the position of each row in the sorted order
    _sorted_indices:  binary search among the bucket's queries  -> which sorted rows each sorted key hides
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SORTED = 4096  # rows times buckets of a program that sorts
_KEYS = 512  # keys of a program that computes indices


@triton.jit
def _load_block(bucket, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """Load the buckets of a block of rows of one side.

    Returns:
        in_bucket: int32 [BLOCK, BUCKETS], 1 at the bucket of each row, if it exists.
        row, plane: the rows [BLOCK] and their plane.
        first, index: start of the plane's counts among the side's, and of the block's counts [BUCKETS].
    """
    n_blocks = tl.cdiv(rows, BLOCK)
    plane = (program // n_blocks).to(tl.int64)
    block = program % n_blocks
    row = block * BLOCK + tl.arange(0, BLOCK)
    bucket = tl.load(bucket + plane * rows + row, mask=row < rows, other=0)
    tl.device_assert((bucket >= 0) & (bucket < n_buckets), "the buckets must lie in 0..n_buckets - 1")
    every = tl.arange(0, BUCKETS)
    in_bucket = (bucket[:, None] == every[None, :]) & (row < rows)[:, None]
    first = plane * n_buckets * n_blocks
    return in_bucket.to(tl.int32), row, plane, first, first + every * n_blocks + block


@triton.jit
def _count_block(bucket, counts, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """Count the rows of a block in each bucket."""
    in_bucket, _, _, _, index = _load_block(bucket, program, rows, n_buckets, BLOCK, BUCKETS)
    tl.store(counts + index, tl.sum(in_bucket, 0), mask=tl.arange(0, BUCKETS) < n_buckets)


@triton.jit
def _sort_block(bucket, starts, order, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """Store the rows of a block at their positions."""
    in_bucket, row, plane, first, index = _load_block(bucket, program, rows, n_buckets, BLOCK, BUCKETS)
    start = tl.load(starts + index, mask=tl.arange(0, BUCKETS) < n_buckets, other=0) - tl.load(starts + first)
    position = tl.sum(in_bucket * (start[None, :] + tl.cumsum(in_bucket, 0) - 1), 1)
    tl.store(order + plane * rows + position, row, mask=tl.sum(in_bucket, 1) > 0)


@triton.jit(do_not_specialize=["q_programs", "q_len", "kv_len", "n_buckets"])
def _count_buckets(
    q_bucket, k_bucket, counts, q_programs, q_len, kv_len, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """Count the rows of a block in each bucket, into counts [1 + (side, plane, bucket, block)] behind a leading 0."""
    program = tl.program_id(0)
    tl.store(counts, 0, mask=program == 0)
    if program < q_programs:
        _count_block(q_bucket, counts + 1, program, q_len, n_buckets, BLOCK, BUCKETS)
    else:
        k_counts = counts + 1 + q_programs.to(tl.int64) * n_buckets
        _count_block(k_bucket, k_counts, program - q_programs, kv_len, n_buckets, BLOCK, BUCKETS)


@triton.jit(do_not_specialize=["q_programs", "q_len", "kv_len", "n_buckets"])
def _sort_rows(
    q_bucket, k_bucket, starts, q_order, k_order, q_programs, q_len, kv_len, n_buckets,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a block at their positions in the stable order; `starts` is the running sum of `counts`."""
    program = tl.program_id(0)
    if program < q_programs:
        _sort_block(q_bucket, starts, q_order, program, q_len, n_buckets, BLOCK, BUCKETS)
    else:
        k_starts = starts + q_programs.to(tl.int64) * n_buckets
        _sort_block(k_bucket, k_starts, k_order, program - q_programs, kv_len, n_buckets, BLOCK, BUCKETS)


@triton.jit
def _find_first(order, start, end, row, steps):
    """Return the first position in [start, end), where `order` ascends, with a value of `row` or more; else `end`."""
    for _ in range(steps):
        middle = (start + end) // 2
        less = (start < end) & (tl.load(order + middle, mask=start < end, other=0) < row)
        start, end = tl.where(less, middle + 1, start), tl.where(less, end, middle)
    return start


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_keys", "n_blocks", "n_buckets", "steps"])
def _sorted_indices(
    k_bucket, k_order, q_order, starts, hidden_from, indices, hidden_strides, heads, kv_heads, hidden_heads,
    q_len, kv_len, n_keys, n_blocks, n_buckets, steps,
    EXCLUDE_SELF: tl.constexpr, DROPPED: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the indices [LTS, UTE] of BLOCK sorted keys of one query head.

    A key is visible to the queries of its bucket, in sorted rows [start, end), with an original index >= its own (> if
    EXCLUDE_SELF) and below `hidden_from` (if HIDDEN). Keys of bucket DROPPED are hidden from all rows.

    Tensors:
        k_bucket, k_order: [B, Hkv, Skv], the buckets and the order of the keys.
        q_order: [B, Hq, Sq].
        starts: as `sort_by_bucket` returns them.
        hidden_from: [B or 1, hidden_heads, Skv] if HIDDEN.
        indices: written, [B, Hq, Skv, 2].
    Sizes:
        n_keys: blocks of keys; n_blocks: blocks of queries in the sort; steps: of the binary search.
    """
    batch = tl.program_id(0) // n_keys // heads
    head = tl.program_id(0) // n_keys % heads
    position = tl.program_id(0) % n_keys * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = position < kv_len
    kv_plane = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64)
    key = tl.load(k_order + kv_plane * kv_len + position, mask=inside, other=0)
    bucket = tl.load(k_bucket + kv_plane * kv_len + key, mask=inside, other=0).to(tl.int32)

    plane = (batch * heads + head).to(tl.int64)
    q_order += plane * q_len
    before = tl.load(starts + plane * n_buckets * n_blocks)
    bucket_start = starts + (plane * n_buckets + bucket) * n_blocks
    start = tl.load(bucket_start, mask=inside, other=0) - before
    end = tl.load(bucket_start + n_blocks, mask=inside, other=0) - before
    first = _find_first(q_order, start, end, key - (kv_len - q_len) + EXCLUDE_SELF, steps)
    if HIDDEN:
        hidden_b, hidden_h, hidden_s = hidden_strides
        hidden_from += batch.to(tl.int64) * hidden_b + (head // (heads // hidden_heads)).to(tl.int64) * hidden_h
        row = tl.load(hidden_from + key.to(tl.int64) * hidden_s, mask=inside, other=0)
        tl.device_assert((row >= 0) & (row <= q_len), "the mask's indices must lie in 0..q_len")
        end = _find_first(q_order, start, end, row, steps)
    if DROPPED >= 0:
        end = tl.where(bucket == DROPPED, start, end)
        first = tl.where(bucket == DROPPED, q_len, first)
    indices += (plane * kv_len + position) * 2
    tl.store(indices, end, mask=inside)
    tl.store(indices + 1, first, mask=inside)


def _block(n_buckets: int) -> int:
    """Return the rows of a program that sorts."""
    return max(32, min(512, _SORTED // triton.next_power_of_2(n_buckets)))


def sort_by_bucket(q_bucket: Tensor, k_bucket: Tensor, n_buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort every head's queries and keys by bucket, stably; once if both are the same tensor.

    Args:
        q_bucket: int [B, Hq, Sq], contiguous, in 0..n_buckets - 1; a GPU asserts it.
        k_bucket: int [B, Hkv, Skv], likewise.
        n_buckets: at most 256.

    Returns:
        q_order int32 [B, Hq, Sq]; k_order int32 [B, Hkv, Skv]; starts int32, the number of queries before each (plane,
        bucket, block), then of keys unless they are the same.
    """
    q_len, kv_len = q_bucket.shape[2], k_bucket.shape[2]
    block = _block(n_buckets)
    q_order, k_order = (torch.empty_like(bucket, dtype=torch.int32) for bucket in (q_bucket, k_bucket))
    q_programs, k_programs = (
        bucket.shape[0] * bucket.shape[1] * -(-bucket.shape[2] // block) for bucket in (q_bucket, k_bucket)
    )
    shared = q_bucket is k_bucket
    grid = (q_programs if shared else q_programs + k_programs,)
    counts = torch.empty(1 + grid[0] * n_buckets, dtype=torch.int32, device=q_bucket.device)
    sizes = (q_programs, q_len, kv_len, n_buckets)
    constants: Any = {"BLOCK": block, "BUCKETS": triton.next_power_of_2(n_buckets), "num_warps": 4}
    with torch.cuda.device_of(q_bucket):
        _count_buckets[grid](q_bucket, k_bucket, counts, *sizes, **constants, debug=True, sanitize_overflow=False)
        starts = counts.cumsum(0, dtype=torch.int32)
        _sort_rows[grid](q_bucket, k_bucket, starts, q_order, k_order, *sizes, **constants)
    return q_order, k_order.copy_(q_order) if shared else k_order, starts


def sorted_columns(
    q_bucket: Tensor,
    k_bucket: Tensor,
    hidden_from: Tensor | None,
    n_buckets: int,
    exclude_self: bool = False,
    dropped: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `flashmask_hf.masks.sorted.sorted_columns` returns, in int32, for buckets in 0..n_buckets - 1."""
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    shared = q_bucket is k_bucket
    q_bucket = q_bucket.contiguous()
    k_bucket = q_bucket if shared else k_bucket.contiguous()
    q_order, k_order, starts = sort_by_bucket(q_bucket, k_bucket, n_buckets)
    indices = torch.empty(batch, heads, kv_len, 2, dtype=torch.int32, device=q_bucket.device)
    hidden, strides, hidden_heads = indices, (0, 0, 0), 1  # not read
    if hidden_from is not None:
        hidden_heads = hidden_from.shape[1]
        hidden, strides = hidden_from, hidden_from.expand(batch, -1, -1).stride()
    n_keys = triton.cdiv(kv_len, _KEYS)
    with torch.cuda.device_of(q_bucket):
        _sorted_indices[(batch * heads * n_keys,)](
            k_bucket, k_order, q_order, starts, hidden, indices, strides, heads, kv_heads, hidden_heads,
            q_len, kv_len, n_keys, triton.cdiv(q_len, _block(n_buckets)), n_buckets, q_len.bit_length(),
            EXCLUDE_SELF=int(exclude_self), DROPPED=dropped,
            HIDDEN=hidden_from is not None, BLOCK=_KEYS, num_warps=4, debug=True, sanitize_overflow=False,
        )  # fmt: skip
    return indices, q_order, k_order
