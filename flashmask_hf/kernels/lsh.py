"""Locality-sensitive hashing: random directions, and which of them or of their opposites is nearest to each vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # that a program finds the nearest direction of
_DIMS = 64  # dimensions of a product
_DIRECTIONS = 64  # that are compared at a time
_FEW = 16  # directions whose products leave registers for twice the rows
_DRAWN = 512  # numbers that a program draws
_TURN = tl.constexpr(2 * math.pi)


@triton.jit(do_not_specialize=["heads", "group", "rows", "n_blocks"])
def _nearest(
    x, directions, bucket, x_b, x_h, x_s, heads, group, rows, n_blocks, dims, count,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The nearest direction of a block of rows of a head.

    Neighbouring programs take the heads of the same rows, which lie side by side where tokens are outermost.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % n_blocks
    batch = (tl.program_id(0) // heads // n_blocks).to(tl.int64)
    row = (block * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
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
            )  # [BLOCK_S, BLOCK_D]
            direction = tl.load(
                directions + d[:, None] * count + n[None, :],
                mask=(d < dims)[:, None] & (n < count)[None, :],
                other=0.0,
            )  # [BLOCK_D, BLOCK_N]
            along = tl.dot(vector, direction.to(vector.dtype), along, input_precision="ieee")
        # Of a direction and its opposite the one with a product >= 0 counts; NaN, and what is past the end, never do.
        number = tl.where(along >= 0, n[None, :], count + n[None, :])
        length = tl.where((n < count)[None, :] & (along == along), tl.abs(along), -1.0)
        longest = tl.max(length, 1)
        lowest = tl.min(tl.where(length == longest[:, None], number, 2 * count), 1)
        better = (longest > best_length) | ((longest == best_length) & (lowest < best))
        best = tl.where(better, lowest, best)
        best_length = tl.maximum(longest, best_length)
    tl.store(bucket + (batch * heads + head) * rows + row, best, mask=row < rows)


def nearest(x: Tensor, directions: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch; arguments as in `sparse_ops.nearest`, x in bfloat16, float16 or float32; the result is of `dtype`."""
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
            x, directions.contiguous(), bucket, *x.stride()[:3], heads, heads // len(directions), rows, n_blocks,
            dims, count, BLOCK_S=block_s, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4, num_stages=1,
        )  # fmt: skip
    return bucket


@triton.jit
def _uniform(place, key_0, key_1, key_2):
    """A float64 strictly between 0 and 1 for each uint32, by a hash of it and of three keys."""
    x = place + key_0.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x += key_1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x2C1B3C6D
    x += key_2.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x297A2D39
    return ((x ^ (x >> 15)).to(tl.float64) + 0.5) / 4294967296.0


@triton.jit(do_not_specialize=["dims", "count", "total", "key_0", "key_1", "key_2"])
def _draw(
    y, dims, count, total, key_0, key_1, key_2, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Some directions of a head: standard normal numbers from those of two places each, `total` apart, made unit."""
    n_blocks = tl.cdiv(count, BLOCK_N)
    head = tl.program_id(0) // n_blocks
    n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    d = tl.arange(0, BLOCK_D)[:, None]
    place = (head * dims + d) * count + n
    inside = (d < dims) & (n < count)
    angle = _uniform(place.to(tl.uint32), key_0, key_1, key_2)
    radius = _uniform((place + total).to(tl.uint32), key_0, key_1, key_2)
    normal = tl.sqrt(-2.0 * tl.log(radius)) * tl.cos(angle * _TURN)
    unit = normal / tl.sqrt(tl.sum(tl.where(d < dims, normal * normal, 0.0), 0))[None, :]
    if y.dtype.element_ty != tl.float64:
        unit = unit.to(tl.float32)  # as torch does on the way to a narrower one
    tl.store(y + place, unit, mask=inside)


def fill_directions(y: Tensor, keys: Sequence[int]) -> Tensor:
    """Fill y [H, D, n], contiguous, with the directions of `sparse_backend.lsh_directions`, for three uint32 keys."""
    heads, dims, count = y.shape
    signed = [key - 2**32 if key >= 2**31 else key for key in keys]  # or Triton would take some of them for int64
    block_d = triton.next_power_of_2(dims)
    block_n = min(triton.next_power_of_2(count), max(1, _DRAWN // block_d))
    with torch.cuda.device_of(y):
        _draw[(heads * triton.cdiv(count, block_n),)](
            y, dims, count, y.numel(), *signed, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4, sanitize_overflow=False
        )
    return y
