"""What sparse attention does around attention: a stable counting sort, the mask's columns, rows moved and put back.

The sort takes a block of rows at a time. Every block counts its buckets, a running sum over (bucket, block) tells where
the block's rows of a bucket end, and a row's place is that end less the later rows of its bucket in the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SORTED = 64  # rows that are compared with each other
_KEYS = 512  # whose columns a program finds
_MOVED = 8192  # elements that a program moves


@triton.jit
def _load_buckets(bucket, plane, row, rows, n_buckets):
    """The buckets of some rows as int32, -1 past the end and where a bucket is none of 0..n_buckets - 1."""
    own = tl.load(bucket + plane * rows + row, mask=row < rows, other=0)
    valid = (own >= 0) & (own < n_buckets)
    tl.device_assert(valid, "the buckets must lie in 0..n_buckets - 1")
    return tl.where(valid & (row < rows), own.to(tl.int32), -1)


@triton.jit
def _count_between(keys, low, length):
    """For each i how many of the keys [BLOCK] lie in [low[i], low[i] + length[i])."""
    above = (keys[:, None] - low[None, :]).to(tl.uint32, bitcast=True)
    return tl.sum((above < length.to(tl.uint32, bitcast=True)[None, :]).to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows", "n_blocks", "n_buckets"])
def _count(bucket, counts, rows, n_blocks, n_buckets, BLOCK: tl.constexpr):
    """How many rows of a block are in each bucket, in counts [plane, bucket, block] (zeros)."""
    block = tl.program_id(0) % n_blocks
    plane = (tl.program_id(0) // n_blocks).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    own = _load_buckets(bucket, plane, block * BLOCK + lane, rows, n_buckets)  # [BLOCK]
    key = own * BLOCK + lane
    earlier = _count_between(key, own * BLOCK, lane)
    later = _count_between(key, key + 1, BLOCK - 1 - lane)
    tl.store(counts + (plane * n_buckets + own) * n_blocks + block, earlier + 1, mask=(own >= 0) & (later == 0))


@triton.jit(do_not_specialize=["rows", "n_blocks", "n_buckets"])
def _place(bucket, ends, order, rows, n_blocks, n_buckets, BLOCK: tl.constexpr):
    """Every row of a block at its place in the stable order; `ends` is the running sum of `counts`."""
    block = tl.program_id(0) % n_blocks
    plane = (tl.program_id(0) // n_blocks).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    own = _load_buckets(bucket, plane, block * BLOCK + lane, rows, n_buckets)  # [BLOCK]
    key = own * BLOCK + lane
    later = _count_between(key, key + 1, BLOCK - 1 - lane)
    end = tl.load(ends + (plane * n_buckets + own) * n_blocks + block, mask=own >= 0, other=0)
    tl.store(order + plane * rows + end - 1 - later, block * BLOCK + lane, mask=own >= 0)


@triton.jit
def _first_from(order, start, end, row, steps):
    """The first of the places [start, end), in which `order` ascends, that holds `row` or more; `end` if none does."""
    for _ in range(steps):
        middle = (start + end) // 2
        less = (start < end) & (tl.load(order + middle, mask=start < end, other=0) < row)
        start, end = tl.where(less, middle + 1, start), tl.where(less, end, middle)
    return start


@triton.jit(do_not_specialize=["q_len", "kv_len", "n_keys", "n_blocks", "n_buckets", "steps"])
def _columns(
    k_bucket, k_order, q_order, q_ends, hidden_from, columns, hidden_b, hidden_h, hidden_s, heads, kv_heads,
    hidden_heads, q_len, kv_len, n_keys, n_blocks, n_buckets, steps,
    EXCLUDE_SELF: tl.constexpr, DROPPED: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What sorted keys hide from sorted queries, as `masks.sorted_columns` has it."""
    batch = tl.program_id(0) // n_keys // heads
    head = tl.program_id(0) // n_keys % heads
    place = tl.program_id(0) % n_keys * BLOCK + tl.arange(0, BLOCK)
    inside = place < kv_len
    kv_plane = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64)
    key = tl.load(k_order + kv_plane * kv_len + place, mask=inside, other=0)
    own = tl.load(k_bucket + kv_plane * kv_len + key, mask=inside, other=0).to(tl.int32)

    plane = (batch * heads + head).to(tl.int64)
    q_order += plane * q_len
    last_block = q_ends + (plane * n_buckets + own) * n_blocks + n_blocks - 1
    end = tl.load(last_block, mask=inside, other=0)
    start = tl.load(last_block - n_blocks, mask=inside & (own > 0), other=0)
    first = _first_from(q_order, start, end, key - (kv_len - q_len) + EXCLUDE_SELF, steps)
    if HIDDEN:
        hidden_from += batch.to(tl.int64) * hidden_b + (head // (heads // hidden_heads)).to(tl.int64) * hidden_h
        row = tl.load(hidden_from + key.to(tl.int64) * hidden_s, mask=inside, other=0)
        end = _first_from(q_order, start, end, row, steps)
    if DROPPED >= 0:
        end = tl.where(own == DROPPED, start, end)
        first = tl.where(own == DROPPED, q_len, first)
    columns += (plane * kv_len + place) * 2
    tl.store(columns, end, mask=inside)
    tl.store(columns + 1, first, mask=inside)


def sort_by_bucket(bucket: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """A stable counting sort.

    Args:
        bucket: int [B, H, S], in 0..n_buckets - 1. On a GPU another one is an assertion of the device.
        n_buckets: the memory in between is 8 * n_buckets * ceil(S / 64) bytes a head.

    Returns:
        order int32 [B, H, S]; ends int32 [B, H, n_buckets, blocks], of which the last of a bucket is where it ends.
    """
    batch, heads, rows = bucket.shape
    bucket = bucket.contiguous()
    n_blocks = -(-rows // _SORTED)
    counts = torch.zeros(batch * heads, n_buckets * n_blocks, dtype=torch.int32, device=bucket.device)
    order = torch.empty(bucket.shape, dtype=torch.int32, device=bucket.device)
    with torch.cuda.device_of(bucket):
        grid = (batch * heads * n_blocks,)
        _count[grid](
            bucket, counts, rows, n_blocks, n_buckets, BLOCK=_SORTED, num_warps=2, debug=True, sanitize_overflow=False
        )
        ends = counts.cumsum(1, dtype=torch.int32)
        _place[grid](bucket, ends, order, rows, n_blocks, n_buckets, BLOCK=_SORTED, num_warps=2)
    return order, ends.view(batch, heads, n_buckets, n_blocks)


def sorted_columns(
    q_bucket: Tensor,
    k_bucket: Tensor,
    hidden_from: Tensor | None,
    n_buckets: int,
    *,
    exclude_self: bool = False,
    dropped: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `masks.sorted_columns`, for buckets in 0..n_buckets - 1; the orders are int32."""
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    q_order, q_ends = sort_by_bucket(q_bucket, n_buckets)
    k_order, _ = sort_by_bucket(k_bucket, n_buckets)
    columns = torch.empty(batch, heads, kv_len, 2, dtype=torch.int32, device=q_bucket.device)
    hidden, strides, hidden_heads = columns, (0, 0, 0), 1  # not read
    if hidden_from is not None:
        hidden_heads = hidden_from.shape[1]
        hidden, strides = hidden_from, hidden_from.expand(batch, -1, -1).stride()
    n_keys = triton.cdiv(kv_len, _KEYS)
    with torch.cuda.device_of(q_bucket):
        _columns[(batch * heads * n_keys,)](
            k_bucket.contiguous(), k_order, q_order, q_ends, hidden, columns, *strides, heads, kv_heads, hidden_heads,
            q_len, kv_len, n_keys, q_ends.shape[-1], n_buckets, q_len.bit_length(),
            EXCLUDE_SELF=int(exclude_self), DROPPED=-1 if dropped is None else dropped,
            HIDDEN=hidden_from is not None, BLOCK=_KEYS, num_warps=4,
        )  # fmt: skip
    return columns, q_order, k_order


@triton.jit(do_not_specialize=["heads", "rows", "n_blocks"])
def _move(
    x, order, kept, y, x_b, x_h, x_s, y_b, y_h, y_s, heads, rows, n_blocks, dims,
    BACK: tl.constexpr, KEPT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row order[i] of x to row i of y, or BACK; what lies behind the kept rows of the order is not read but made 0.

    Neighbouring programs take the heads of the same places, whose rows lie side by side where tokens are outermost.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % n_blocks
    batch = tl.program_id(0) // heads // n_blocks
    plane = batch.to(tl.int64) * heads + head
    place = block * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = place < rows
    read = inside
    if KEPT:
        read = inside & (place < tl.load(kept + plane))
    row = tl.load(order + plane * rows + place, mask=inside, other=0).to(tl.int64)
    source, target = row, place.to(tl.int64)
    if BACK:
        source, target = target, row
    d = tl.arange(0, BLOCK_D)
    x += batch.to(tl.int64) * x_b + head.to(tl.int64) * x_h
    y += batch.to(tl.int64) * y_b + head.to(tl.int64) * y_h
    value = tl.load(x + source[:, None] * x_s + d[None, :], mask=read[:, None] & (d < dims)[None, :], other=0.0)
    tl.store(y + target[:, None] * y_s + d[None, :], value, mask=inside[:, None] & (d < dims)[None, :])


def move_rows(x: Tensor, order: Tensor, kept: Tensor | None, back: bool) -> Tensor:
    """Launch; arguments and result as in `sparse.move_rows`."""
    batch, heads, rows, dims = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(batch, rows, heads, dims).transpose(1, 2) if back else x.new_empty(batch, heads, rows, dims)
    block_d = triton.next_power_of_2(dims)
    block_s = min(max(1, _MOVED // block_d), triton.next_power_of_2(rows))
    n_blocks = triton.cdiv(rows, block_s)
    with torch.cuda.device_of(x):
        _move[(batch * heads * n_blocks,)](
            x, order, order if kept is None else kept.contiguous(), y, *x.stride()[:3], *y.stride()[:3],
            heads, rows, n_blocks, dims,
            BACK=back, KEPT=kept is not None, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return y
