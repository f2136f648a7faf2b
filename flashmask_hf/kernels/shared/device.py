"""Device functions of several Triton kernels: load and store tiles, hide pairs, cap scores.

Arguments with one meaning in all of these kernels: `heads` are (Hq, Hkv, mask batch, mask heads), `dims` (D, Dv),
`lengths` (Sq, Skv), and `factors` `Problem.factors`. CAUSAL and N (bounds per key) are the form of the mask. MASKED
says whether pairs may be hidden. A tile of the plan has SUBROWS row tiles and SUBTILES key tiles; a head has `n_rows`
and `n_columns` of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashmask_hf.kernels.launch.tensor_layout import Layout
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Start of running maxima; finite, so that rows that see nothing need no special case."""

_NEVER = tl.constexpr(2147483647)


class HeadRows(NamedTuple):
    """Rows [S, D] of one head of a tensor [B, H, S, D]; tiles are 0 past S and D."""

    tensor: Any  # pointer to the whole tensor, or its tensor descriptor
    strides: Any  # of the whole tensor; unused with a descriptor
    batch: Any
    head: Any
    n_rows: Any  # S
    n_dims: Any  # D


class Intervals(NamedTuple):
    """Hidden intervals of some keys: [start, end) and [other_start, other_end)."""

    start: Any
    end: Any
    other_start: Any
    other_end: Any


@triton.jit
def locate_row_tile(n_rows, heads):
    """Return (row tile, batch, head, kv_head, mask head over the batch as int64) of a program.

    Neighbouring programs share a head's keys. The last rows go first: under a causal mask they see most keys.
    """
    n_heads, kv_heads, mask_batch, mask_heads = heads
    tile = n_rows - 1 - tl.program_id(0) % n_rows
    batch = tl.program_id(0) // n_rows // n_heads
    head = tl.program_id(0) // n_rows % n_heads
    mask = ((batch % mask_batch) * mask_heads + head // (n_heads // mask_heads)).to(tl.int64)
    return tile, batch, head, head // (n_heads // kv_heads), mask


@triton.jit
def load_tile(x, row, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Load rows `row` to `row + BLOCK_S` of `x` (`HeadRows`): [BLOCK_S, BLOCK_D]."""
    if TMA:
        tile = x.tensor.load([x.batch, x.head, row, 0]).reshape(BLOCK_S, BLOCK_D)
    else:
        pointers, inside = _tile_pointers(x, row, BLOCK_S, BLOCK_D)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile  # [BLOCK_S, BLOCK_D]


@triton.jit
def store_tile(x, tile, row):
    """Store `tile` [BLOCK_S, BLOCK_D] to the rows of `x` (`HeadRows`, a pointer) from `row` on, in x's dtype."""
    pointers, inside = _tile_pointers(x, row, tile.shape[0], tile.shape[1])
    tl.store(pointers, tile.to(x.tensor.dtype.element_ty), mask=inside)


@triton.jit
def _tile_pointers(x, row, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the addresses [BLOCK_S, BLOCK_D] of a tile and which of them exist."""
    stride_b, stride_h, stride_s, stride_d = x.strides
    s = row + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    base = x.tensor + x.batch.to(tl.int64) * stride_b + x.head.to(tl.int64) * stride_h
    pointers = base + s.to(tl.int64)[:, None] * stride_s + d.to(tl.int64)[None, :] * stride_d
    return pointers, (s < x.n_rows)[:, None] & (d < x.n_dims)[None, :]


@triton.jit
def _load_bound(pointers, inside, outside: tl.constexpr):
    # Masked loads are not vectorized.
    return tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=outside)


@triton.jit
def load_intervals(indices, columns, inside, CAUSAL: tl.constexpr, N: tl.constexpr):
    """Load the `Intervals` of the keys `columns`, each bound shaped like them.

    `indices` points to the mask indices [Skv, N] of one mask head. Bounds that the form lacks hide no row. Keys outside
    `inside`, None if all exist, are hidden from all rows.
    """
    END: tl.constexpr = end_bound(N, CAUSAL)
    OTHER_START: tl.constexpr = other_start_bound(N, CAUSAL)
    OTHER_END: tl.constexpr = other_end_bound(N, CAUSAL)
    pointers = indices + columns.to(tl.int64) * N
    start = _load_bound(pointers, inside, 0)
    end = tl.full(columns.shape, _NEVER, tl.int32)
    other_start = tl.zeros(columns.shape, tl.int32)
    other_end = tl.zeros(columns.shape, tl.int32)
    if END is not None:
        end = _load_bound(pointers + END, inside, _NEVER)
    if OTHER_START is not None:
        other_start = _load_bound(pointers + OTHER_START, inside, 0)
    if OTHER_END is not None:
        other_end = _load_bound(pointers + OTHER_END, inside, 0)
    return Intervals(start, end, other_start, other_end)


@triton.jit
def hidden_pairs(rows, columns, intervals, lengths, CAUSAL: tl.constexpr, N: tl.constexpr):
    """Return which pairs of query rows and keys, which broadcast, are hidden.

    `intervals` are shaped like `columns`, the keys.
    """
    q_len, kv_len = lengths
    diagonal = kv_len - q_len
    hidden = rows >= intervals.start
    if end_bound(N, CAUSAL) is not None:
        hidden = hidden & (rows < intervals.end)
    if other_start_bound(N, CAUSAL) is not None:
        hidden = hidden | ((rows >= intervals.other_start) & (rows < intervals.other_end))
    elif other_end_bound(N, CAUSAL) is not None:
        hidden = hidden | (rows < intervals.other_end)
    if CAUSAL:
        hidden = hidden | (rows + diagonal < columns)
    return hidden


@triton.jit
def softcap_tanh(scores, cap_factor):
    """Return tanh(scores * cap_factor) to float32 accuracy, by a series near 0, where the exponential form cancels."""
    x = scores * cap_factor
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    exact = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -exact, exact))


def dot_precision(x: Layout) -> str:
    """Return the precision of float32 products: on NVIDIA's tensor cores three TF32 products, which keep accuracy."""
    return "tf32x3" if x.device.type == "cuda" and not torch.version.hip else "ieee"


def block_of(size: int) -> int:
    """Return the tile width of a head dim: the next power of two, at least 16 for matrix products."""
    return max(16, 1 << (size - 1).bit_length())
