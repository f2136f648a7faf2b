"""Device code that the forward and the backward share: load a tile, mask a tile, bend scores."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.descriptors import Layout, packed_layout
from flashmask_hf.kernels.launch import Launcher
from flashmask_hf.plan import COLUMNS

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_NEVER = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where a running maximum starts, the lowest float32: finite, so that rows that see nothing need no care."""


@triton.jit
def row_place(n_rows, heads, kv_heads, mask_batch, mask_heads):
    """(row tile, batch, head, kv_head, plan of the mask head as int64) of a program of one tile of query rows.

    Neighbouring programs share a head's keys; the last rows, which see most under a causal mask, go first.
    """
    tile = n_rows - 1 - tl.program_id(0) % n_rows
    batch = tl.program_id(0) // n_rows // heads
    head = tl.program_id(0) // n_rows % heads
    mask = ((batch % mask_batch) * mask_heads + head // (heads // mask_heads)).to(tl.int64)
    return tile, batch, head, head // (heads // kv_heads), mask


@triton.jit
def load_tile(
    x, batch, head, row, stride_b, stride_h, stride_s, stride_d, rows, dims,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `row + BLOCK_S` of a head, zero past the end: [BLOCK_S, BLOCK_D]; x: descriptor or pointer."""
    if TMA:
        tile = x.load([batch, head, row, 0]).reshape(BLOCK_S, BLOCK_D)
    else:
        s = row + tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + s.to(tl.int64)[:, None] * stride_s + d.to(tl.int64)[None, :] * stride_d
        tile = tl.load(pointers, mask=(s < rows)[:, None] & (d < dims)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(
    x, tile, batch, head, row, stride_b, stride_h, stride_s, stride_d, rows, dims,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_tile`, through a pointer, in x's dtype."""
    s = row + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    pointers = base + s.to(tl.int64)[:, None] * stride_s + d.to(tl.int64)[None, :] * stride_d
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(s < rows)[:, None] & (d < dims)[None, :])


@triton.jit
def _load_bound(at, inside, outside: tl.constexpr):
    # A load under a mask is not vectorised: a thread loads its columns one by one.
    return tl.load(at) if inside is None else tl.load(at, mask=inside, other=outside)


@triton.jit
def load_intervals(indices, columns, inside, CAUSAL: tl.constexpr, N: tl.constexpr):
    """The two hidden intervals of some columns as four bounds, shaped like `columns`.

    `indices` points at the vectors of one mask head, N a column. A bound that the form lacks is one that hides nothing
    more. Columns that are not `inside` are hidden whole; it is None for vectors that `whole_tiles` made.
    """
    at = indices + columns.to(tl.int64) * N
    start = _load_bound(at, inside, 0)
    end = tl.full(columns.shape, _NEVER, tl.int32)
    other_start = tl.zeros(columns.shape, tl.int32)
    other_end = tl.zeros(columns.shape, tl.int32)
    if N == 4 or (N == 2 and CAUSAL):
        end = _load_bound(at + 1, inside, _NEVER)
    if N == 2 and not CAUSAL:
        other_end = _load_bound(at + 1, inside, 0)
    if N == 4:
        other_start = _load_bound(at + 2, inside, 0)
        other_end = _load_bound(at + 3, inside, 0)
    return start, end, other_start, other_end


@triton.jit
def vectors_of(indices, mask, kv_len, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Where the vectors of mask head `mask` begin in what `whole_tiles` made for tiles of COLUMNS keys."""
    return indices + mask * tl.cdiv(kv_len, COLUMNS) * (COLUMNS * N)


@triton.jit
def hidden_pairs(
    rows, columns, start, end, other_start, other_end, diagonal, CAUSAL: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Where pairs are hidden; rows and columns are 2D and broadcast. `diagonal` is Skv - Sq."""
    hidden = rows >= start
    if N == 4 or (N == 2 and CAUSAL):
        hidden = hidden & (rows < end)
    if N == 2 and not CAUSAL:
        hidden = hidden | (rows < other_end)
    if N == 4:
        hidden = hidden | ((rows >= other_start) & (rows < other_end))
    if CAUSAL:
        hidden = hidden | (rows + diagonal < columns)
    return hidden


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 accuracy: a series near 0, where the exponential form cancels."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    exact = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -exact, exact))


@triton.jit(do_not_specialize=["kv_len", "n_parts"])
def _whole_tiles(indices, whole, kv_len, n_parts, N: tl.constexpr, COLUMNS: tl.constexpr):
    plane = (tl.program_id(0) // n_parts).to(tl.int64)
    number = tl.program_id(0) % n_parts * (COLUMNS * N) + tl.arange(0, COLUMNS * N)
    # The end of the first interval, or of the one that begins at row 0.
    hidden = tl.where(number % N == 1, _NEVER, 0)
    inside = number < kv_len * N
    value = tl.load(indices + plane * kv_len * N + number, mask=inside, other=0)
    tl.store(whole + plane * n_parts * (COLUMNS * N) + number, tl.where(inside, value, hidden))


_launch_whole_tiles = Launcher(_whole_tiles)


def whole_tiles(vectors: torch.Size, device: torch.device, columns: int) -> Callable[[Tensor], Tensor]:
    """Makes masks' vectors [B, Hm, padded, n], contiguous, with hidden keys up to a multiple of `columns`.

    Args:
        vectors: shape of the indices that it is called with.
        device: theirs.
        columns: keys of a tile of the plan.
    """
    batch, heads, kv_len, n = vectors
    if kv_len % columns == 0:
        return Tensor.contiguous
    padded, part = -(-kv_len // columns) * columns, gcd(columns, COLUMNS)
    new_whole = packed_layout(batch, heads, padded, n, dtype=torch.int32, device=device).maker()
    n_parts = padded // part
    step = _launch_whole_tiles.bind(n_parts * batch * heads, kv_len, n_parts, N=n, COLUMNS=part, num_warps=1)

    def make(indices: Tensor) -> Tensor:
        whole = new_whole()
        step.launch(indices.contiguous(), whole)
        return whole

    return make


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(factor, bend): logits in units of log2 are factor * scores, or factor * tanh(scores * bend) with a cap."""
    return (softcap * LOG2_E.value, scale / softcap) if softcap else (scale * LOG2_E.value, 0.0)


def dot_precision(x: Tensor | Layout) -> str:
    """How float32 tiles are multiplied: in three TF32 products on NVIDIA's tensor cores, as they are elsewhere.

    Three products keep float32 accuracy. Sixteen-bit tiles are multiplied exactly whatever this says.
    """
    return "tf32x3" if x.device.type == "cuda" and not torch.version.hip else "ieee"


def block_of(size: int) -> int:
    """The tile width that holds a head_dim: the next power of two, at least 16, which a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())
