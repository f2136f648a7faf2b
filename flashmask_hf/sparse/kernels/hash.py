"""Locality-sensitive hashing: the bucket of a vector is the nearest of some directions and their opposites.

Rows stay, directions stream through matrix products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # rows of a program that finds the nearest directions
_DIMS = 64  # dimensions of a product
_DIRECTIONS = 64  # directions that are compared at a time
_FEW = 16  # directions whose products leave registers for twice the rows


@triton.jit(do_not_specialize=["heads", "group", "rows", "n_blocks"])
def _nearest(
    x, directions, bucket, x_strides, heads, group, rows, n_blocks, dims, count,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Find the nearest direction of each vector in a block of rows of a head.

    Neighbouring programs take the heads of the same rows, often neighbours in memory.

    Tensors:
        x: [B, heads, rows, dims], dense in the last axis.
        directions: [heads / group, dims, count].
        bucket: written, [B, heads, rows], in 0..2 * count - 1.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % n_blocks
    batch = (tl.program_id(0) // heads // n_blocks).to(tl.int64)
    row = (block * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)  # [BS]
    x_b, x_h, x_s = x_strides
    x += batch * x_b + head.to(tl.int64) * x_h
    directions += (head // group).to(tl.int64) * dims * count

    best = tl.zeros([BLOCK_S], tl.int32)
    best_length = tl.full([BLOCK_S], -1.0, tl.float32)
    for first in range(0, count, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        along = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
        for start in range(0, dims, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            vector = tl.load(
                x + row[:, None] * x_s + d[None, :], mask=(row < rows)[:, None] & (d < dims)[None, :], other=0.0
            )  # [BS, BD]
            direction = tl.load(
                directions + d[:, None] * count + n[None, :],
                mask=(d < dims)[:, None] & (n < count)[None, :],
                other=0.0,
            )  # [BD, BN]
            along = tl.dot(vector, direction.to(vector.dtype), along, input_precision="ieee")
        # A direction counts if its product is >= 0, else its opposite. NaN and directions past the end never count.
        number = tl.where(along >= 0, n[None, :], count + n[None, :])
        length = tl.where((n < count)[None, :] & (along == along), tl.abs(along), -1.0)
        longest = tl.max(length, 1)
        lowest = tl.min(tl.where(length == longest[:, None], number, 2 * count), 1)
        better = (longest > best_length) | ((longest == best_length) & (lowest < best))
        best = tl.where(better, lowest, best)
        best_length = tl.maximum(longest, best_length)
    tl.store(bucket + (batch * heads + head) * rows + row, best, mask=row < rows)


def nearest(x: Tensor, directions: Tensor, dtype: torch.dtype) -> Tensor:
    """Find the nearest direction of each vector, as the operator `flashmask_hf::nearest`; `dtype` is of the result."""
    batch, heads, rows, dims = x.shape
    count = directions.shape[2]
    x = x if x.stride(-1) == 1 else x.contiguous()
    bucket = torch.empty(batch, heads, rows, dtype=dtype, device=x.device)
    block_s, block_d, block_n = (
        max(16, min(most, triton.next_power_of_2(n)))
        for n, most in ((rows, _ROWS if count > _FEW else 2 * _ROWS), (dims, _DIMS), (count, _DIRECTIONS))
    )
    n_blocks = triton.cdiv(rows, block_s)
    with torch.cuda.device_of(x):
        _nearest[(batch * heads * n_blocks,)](
            x, directions.contiguous(), bucket, x.stride()[:3], heads, heads // len(directions), rows, n_blocks,
            dims, count, BLOCK_S=block_s, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4, num_stages=1,
        )  # fmt: skip
    return bucket
