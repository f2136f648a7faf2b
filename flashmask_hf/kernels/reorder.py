"""What sparse attention does around attention: a stable counting sort, the mask's columns, rows gathered and put back.

The sort takes a block of rows at a time, of queries and keys alike. Every block counts its buckets, a running sum over
(side, plane, bucket, block) tells where the block's rows of a bucket start, and a row's place is that start and the
earlier rows of its bucket in the block, by a running sum over rows for each bucket. A plane is one head of one entry of
the batch, a side the queries or the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SORTED = 4096  # rows times buckets of a program that sorts
_KEYS = 512  # whose columns a program finds
_MOVED = 8192  # elements that a program moves


@triton.jit
def _load_block(bucket, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """A block of rows of one side.

    Returns:
        own: [BLOCK, BUCKETS], 1 at the bucket of each row; rows past the end, and those in none, have none.
        row, plane: which rows [BLOCK] of which plane they are.
        first, index: where the counts of the plane begin, and those of the block [BUCKETS], among the side's.
    """
    n_blocks = tl.cdiv(rows, BLOCK)
    plane = (program // n_blocks).to(tl.int64)
    block = program % n_blocks
    row = block * BLOCK + tl.arange(0, BLOCK)
    bucket = tl.load(bucket + plane * rows + row, mask=row < rows, other=0)
    tl.device_assert((bucket >= 0) & (bucket < n_buckets), "the buckets must lie in 0..n_buckets - 1")
    every = tl.arange(0, BUCKETS)
    own = (bucket[:, None] == every[None, :]) & (row < rows)[:, None]
    first = plane * n_buckets * n_blocks
    return own.to(tl.int32), row, plane, first, first + every * n_blocks + block


@triton.jit
def _count_block(bucket, counts, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    own, _, _, _, index = _load_block(bucket, program, rows, n_buckets, BLOCK, BUCKETS)
    tl.store(counts + index, tl.sum(own, 0), mask=tl.arange(0, BUCKETS) < n_buckets)


@triton.jit
def _place_block(bucket, starts, order, program, rows, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    own, row, plane, first, index = _load_block(bucket, program, rows, n_buckets, BLOCK, BUCKETS)
    start = tl.load(starts + index, mask=tl.arange(0, BUCKETS) < n_buckets, other=0) - tl.load(starts + first)
    place = tl.sum(own * (start[None, :] + tl.cumsum(own, 0) - 1), 1)
    tl.store(order + plane * rows + place, row, mask=tl.sum(own, 1) > 0)


@triton.jit(do_not_specialize=["q_programs", "q_len", "kv_len", "n_buckets"])
def _count(
    q_bucket, k_bucket, counts, q_programs, q_len, kv_len, n_buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """How many rows of a block are in each bucket, in counts [1 + (side, plane, bucket, block)], after a 0."""
    program = tl.program_id(0)
    tl.store(counts, 0, mask=program == 0)
    if program < q_programs:
        _count_block(q_bucket, counts + 1, program, q_len, n_buckets, BLOCK, BUCKETS)
    else:
        of_keys = counts + 1 + q_programs.to(tl.int64) * n_buckets
        _count_block(k_bucket, of_keys, program - q_programs, kv_len, n_buckets, BLOCK, BUCKETS)


@triton.jit(do_not_specialize=["q_programs", "q_len", "kv_len", "n_buckets"])
def _place(
    q_bucket, k_bucket, starts, q_order, k_order, q_programs, q_len, kv_len, n_buckets,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Every row of a block at its place in the stable order; `starts` is the running sum of `counts`."""
    program = tl.program_id(0)
    if program < q_programs:
        _place_block(q_bucket, starts, q_order, program, q_len, n_buckets, BLOCK, BUCKETS)
    else:
        of_keys = starts + q_programs.to(tl.int64) * n_buckets
        _place_block(k_bucket, of_keys, k_order, program - q_programs, kv_len, n_buckets, BLOCK, BUCKETS)


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
    k_bucket, k_order, q_order, starts, hidden_from, columns, hidden_b, hidden_h, hidden_s, heads, kv_heads,
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
    before = tl.load(starts + plane * n_buckets * n_blocks)
    own_start = starts + (plane * n_buckets + own) * n_blocks
    start = tl.load(own_start, mask=inside, other=0) - before
    end = tl.load(own_start + n_blocks, mask=inside, other=0) - before
    first = _first_from(q_order, start, end, key - (kv_len - q_len) + EXCLUDE_SELF, steps)
    if HIDDEN:
        hidden_from += batch.to(tl.int64) * hidden_b + (head // (heads // hidden_heads)).to(tl.int64) * hidden_h
        row = tl.load(hidden_from + key.to(tl.int64) * hidden_s, mask=inside, other=0)
        tl.device_assert((row >= 0) & (row <= q_len), "the mask's indices must lie in 0..q_len")
        end = _first_from(q_order, start, end, row, steps)
    if DROPPED >= 0:
        end = tl.where(own == DROPPED, start, end)
        first = tl.where(own == DROPPED, q_len, first)
    columns += (plane * kv_len + place) * 2
    tl.store(columns, end, mask=inside)
    tl.store(columns + 1, first, mask=inside)


def _block(n_buckets: int) -> int:
    """Rows of a program that sorts."""
    return max(32, min(512, _SORTED // triton.next_power_of_2(n_buckets)))


def sort_by_bucket(q_bucket: Tensor, k_bucket: Tensor, n_buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable counting sort of every head's queries and keys; only one of the two if they are the same tensor.

    Args:
        q_bucket: int [B, Hq, Sq], contiguous, in 0..n_buckets - 1. On a GPU another one is an assertion of the device.
        k_bucket: int [B, Hkv, Skv], likewise.
        n_buckets: at most 256. The memory in between is 8 * n_buckets * ceil(S / _block(n_buckets)) bytes a head.

    Returns:
        q_order int32 [B, Hq, Sq]; k_order int32 [B, Hkv, Skv]; starts int32 [1 + B * Hq * n_buckets * blocks + ...],
        how many queries come before each (plane, bucket, block) in the order of all planes, and then the like of keys
        unless they are the same.
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
    tile: Any = {"BLOCK": block, "BUCKETS": triton.next_power_of_2(n_buckets), "num_warps": 4}
    with torch.cuda.device_of(q_bucket):
        _count[grid](q_bucket, k_bucket, counts, *sizes, **tile, debug=True, sanitize_overflow=False)
        starts = counts.cumsum(0, dtype=torch.int32)
        _place[grid](q_bucket, k_bucket, starts, q_order, k_order, *sizes, **tile)
    return q_order, k_order.copy_(q_order) if shared else k_order, starts


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
    shared = q_bucket is k_bucket
    q_bucket = q_bucket.contiguous()
    k_bucket = q_bucket if shared else k_bucket.contiguous()
    q_order, k_order, starts = sort_by_bucket(q_bucket, k_bucket, n_buckets)
    columns = torch.empty(batch, heads, kv_len, 2, dtype=torch.int32, device=q_bucket.device)
    hidden, strides, hidden_heads = columns, (0, 0, 0), 1  # not read
    if hidden_from is not None:
        hidden_heads = hidden_from.shape[1]
        hidden, strides = hidden_from, hidden_from.expand(batch, -1, -1).stride()
    n_keys = triton.cdiv(kv_len, _KEYS)
    with torch.cuda.device_of(q_bucket):
        _columns[(batch * heads * n_keys,)](
            k_bucket, k_order, q_order, starts, hidden, columns, *strides, heads, kv_heads, hidden_heads,
            q_len, kv_len, n_keys, triton.cdiv(q_len, _block(n_buckets)), n_buckets, q_len.bit_length(),
            EXCLUDE_SELF=int(exclude_self), DROPPED=-1 if dropped is None else dropped,
            HIDDEN=hidden_from is not None, BLOCK=_KEYS, num_warps=4, debug=True, sanitize_overflow=False,
        )  # fmt: skip
    return columns, q_order, k_order


@triton.jit
def _places(order, kept, heads, rows, n_blocks, KEPT: tl.constexpr, BLOCK_S: tl.constexpr):
    """The places of an order that a program moves.

    Neighbouring programs take the heads of the same places, whose rows lie side by side where tokens are outermost.

    Returns:
        batch, head, plane: which order, as int64.
        place, row: places [BLOCK_S] of the order and the rows that they hold, as int64.
        inside, counts: which of them exist, and which of these lie before the end of the kept ones.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.program_id(0) // heads % n_blocks
    batch = (tl.program_id(0) // heads // n_blocks).to(tl.int64)
    plane = batch * heads + head
    place = block * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = place < rows
    counts = inside
    if KEPT:
        counts = inside & (place < tl.load(kept + plane))
    row = tl.load(order + plane * rows + place, mask=inside, other=0)
    return batch, head, plane, place.to(tl.int64), row.to(tl.int64), inside, counts


@triton.jit(do_not_specialize=["heads", "rows", "n_blocks"])
def _move(
    x, order, kept, y, x_b, x_h, x_s, y_b, y_h, y_s, heads, rows, n_blocks, dims,
    BACK: tl.constexpr, KEPT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row order[i] of x to row i of y, or BACK; what lies behind the kept rows of the order is not read but made 0."""
    batch, head, _, place, row, inside, counts = _places(order, kept, heads, rows, n_blocks, KEPT, BLOCK_S)
    source, target = row, place
    if BACK:
        source, target = target, row
    d = tl.arange(0, BLOCK_D)[None, :]
    x += batch * x_b + head * x_h
    y += batch * y_b + head * y_h
    value = tl.load(x + source[:, None] * x_s + d, mask=counts[:, None] & (d < dims), other=0.0)
    tl.store(y + target[:, None] * y_s + d, value, mask=inside[:, None] & (d < dims))


@triton.jit(do_not_specialize=["heads", "rows", "n_blocks"])
def _gather_upstream(
    dout, out, order, kept, gathered, delta, do_b, do_h, do_s, do_d, out_b, out_h, out_s, out_d,
    heads, rows, n_blocks, dims, KEPT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row order[i] of dout to row i, and the sum of its products with that of out; 0 for both behind the kept rows."""
    batch, head, plane, place, row, inside, counts = _places(order, kept, heads, rows, n_blocks, KEPT, BLOCK_S)
    d = tl.arange(0, BLOCK_D)[None, :]
    read = counts[:, None] & (d < dims)
    dout += batch * do_b + head * do_h
    out += batch * out_b + head * out_h
    upstream = tl.load(dout + row[:, None] * do_s + d.to(tl.int64) * do_d, mask=read, other=0.0)
    value = tl.load(out + row[:, None] * out_s + d.to(tl.int64) * out_d, mask=read, other=0.0)
    place += plane * rows
    tl.store(gathered + place[:, None] * dims + d, upstream, mask=inside[:, None] & (d < dims))
    wide = delta.dtype.element_ty
    tl.store(delta + place, tl.sum(upstream.to(wide) * value.to(wide), 1), mask=inside)


def _moving(rows: int, dims: int, elements: int) -> tuple[int, dict[str, Any]]:
    """How many programs move the rows of a plane, of `elements` each, and their tiles."""
    block_d = triton.next_power_of_2(dims)
    block_s = min(max(1, elements // block_d), triton.next_power_of_2(rows))
    return triton.cdiv(rows, block_s), {"BLOCK_S": block_s, "BLOCK_D": block_d, "num_warps": 4}


def _launch_move(x: Tensor, y: Tensor, order: Tensor, kept: Tensor | None, back: bool) -> Tensor:
    batch, heads, rows, dims = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    n_blocks, tile = _moving(rows, dims, _MOVED)
    with torch.cuda.device_of(x):
        _move[(batch * heads * n_blocks,)](
            x, order, order if kept is None else kept.contiguous(), y, *x.stride()[:3], *y.stride()[:3],
            heads, rows, n_blocks, dims, BACK=back, KEPT=kept is not None, **tile,
        )  # fmt: skip
    return y


def gather_rows(x: Tensor, order: Tensor, kept: Tensor | None) -> Tensor:
    """Launch; arguments and result as in `sparse_ops.gather_rows`."""
    return _launch_move(x, x.new_empty(x.shape), order, kept, back=False)


def put_rows_back(x: Tensor, order: Tensor) -> Tensor:
    """Launch; arguments and result as in `sparse_ops.put_rows_back`."""
    batch, heads, rows, dims = x.shape
    return _launch_move(x, x.new_empty(batch, rows, heads, dims).transpose(1, 2), order, None, back=True)


def gather_upstream(
    dout: Tensor, out: Tensor, order: Tensor, kept: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launch; arguments and results as in `sparse_ops.gather_upstream`."""
    batch, heads, rows, dims = dout.shape
    gathered = dout.new_empty(batch, heads, rows, dims)
    delta = dout.new_empty(batch, heads, rows, dtype=dtype)
    n_blocks, tile = _moving(rows, dims, _MOVED // 2)
    with torch.cuda.device_of(dout):
        _gather_upstream[(batch * heads * n_blocks,)](
            dout, out, order, order if kept is None else kept.contiguous(), gathered, delta,
            *dout.stride(), *out.stride(), heads, rows, n_blocks, dims, KEPT=kept is not None, **tile,
        )  # fmt: skip
    return gathered, delta
