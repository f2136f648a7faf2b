"""Row statistics that the backward kernels read: the log-sum-exp and delta of every query row.

Delta is what the softmax takes off the gradients of a row's scores: the row sum of dout * out (FlashAttention-2,
algorithm 2, line 4) less the gradient of the row's log-sum-exp.

    dout, out [, dlse]  -> _row_delta      -> delta, and on request padded lse, zeroed sums and a zeroed counter
    lse, delta          -> _row_statistics -> padded lse, padded delta
"""

from __future__ import annotations

from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.tensor_layout import Layout
from flashmask_hf.kernels.shared.device import LOG2_E, HeadRows, block_of, load_tile
from flashmask_hf.tile_plan import ROWS

__all__ = ["Delta", "Gradients", "OutputLayout", "prepare_delta", "prepare_statistics"]


@triton.jit(do_not_specialize=["q_len", "padded_len", "n_tiles"])
def _row_delta(
    dout, out, dlse, delta, lse, padded_lse, sums, counter, do_strides, out_strides,
    heads, q_len, padded_len, n_tiles, v_dim,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute delta for one tile of rows, and prepare the other buffers of a backward that are not None.

    Tensors:
        dout: gradient of the output, [B, Hq, Sq, Dv].
        out: output, [B, Hq, Sq, Dv].
        dlse: gradient of the log-sum-exp, [B, Hq, Sq], ignored in rows that see nothing; or None.
        delta: written, [B * Hq, padded_len], 0 in rows past the end.
        lse: [B, Hq, Sq]; may be None if dlse and padded_lse are.
        padded_lse: written as in `_row_statistics`, or None.
        sums: set to 0, SUMS numbers, a multiple of 64, for each of the n_tiles * BLOCK_M rows of every head; or None.
        counter: one number, set to 0; or None.
    """
    tile = tl.program_id(0) % n_tiles
    plane = tl.program_id(0) // n_tiles
    batch = plane // heads
    head = plane % heads
    row = tile * BLOCK_M
    upstream = load_tile(HeadRows(dout, do_strides, batch, head, q_len, v_dim), row, BLOCK_M, BLOCK_V, False)
    values = load_tile(HeadRows(out, out_strides, batch, head, q_len, v_dim), row, BLOCK_M, BLOCK_V, False)
    rows = row + tl.arange(0, BLOCK_M)
    at = plane.to(tl.int64) * q_len + rows
    padded_at = plane.to(tl.int64) * padded_len + rows
    # A row that sees nothing has values 0, and 0 times inf or NaN from upstream would be NaN.
    upstream = tl.where(values == 0.0, 0.0, upstream.to(tl.float32))  # [BM, DV]
    row_delta = tl.sum(upstream * values.to(tl.float32), 1)  # [BM]
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=rows < q_len, other=0.0)
        row_lse = tl.load(lse + at, mask=rows < q_len, other=float("-inf"))
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)  # weight 0 times inf would be NaN
    tl.store(delta + padded_at, row_delta, mask=rows < padded_len)
    if padded_lse is not None:
        row_lse = tl.load(lse + at, mask=rows < q_len, other=float("-inf"))
        tl.store(padded_lse + padded_at, _backward_lse(row_lse), mask=rows < padded_len)
    if sums is not None:
        numbers = tl.program_id(0).to(tl.int64) * (BLOCK_M * SUMS) + tl.arange(0, BLOCK_M * 64)
        for part in tl.static_range(SUMS // 64):
            tl.store(sums + numbers + part * (BLOCK_M * 64), tl.zeros([BLOCK_M * 64], tl.float32))
    if counter is not None:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["q_len", "padded_len"])
def _row_statistics(lse, delta, padded_lse, padded_delta, q_len, padded_len, BLOCK_M: tl.constexpr):
    """Pad lse and delta from [B * Hq, Sq] to [B * Hq, padded_len], lse as `_backward_lse` makes it."""
    n_tiles = padded_len // BLOCK_M
    plane = (tl.program_id(0) // n_tiles).to(tl.int64)
    row = tl.program_id(0) % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < q_len
    row_lse = tl.load(lse + plane * q_len + row, mask=inside, other=float("-inf"))
    row_delta = tl.load(delta + plane * q_len + row, mask=inside, other=0.0)
    tl.store(padded_lse + plane * padded_len + row, _backward_lse(row_lse))
    tl.store(padded_delta + plane * padded_len + row, row_delta)


@triton.jit
def _backward_lse(lse):
    """Return lse in units of log2, and inf for rows that see nothing or are past the end, so that weights are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


Delta: TypeAlias = "Tensor | tuple[Tensor, Tensor | None]"
"""Delta as float32 [B, Hq, Sq]; or the output [B, Hq, Sq, Dv] and the gradient of the log-sum-exp, float32 [B, Hq, Sq]
or None, to compute it from."""


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""dq, dk and dv; and delta, float32 of B * Hq * padded_len numbers, padded_len >= Sq, which are 0 past Sq."""


OutputLayout: TypeAlias = tuple[Layout, bool]
"""What delta is computed from: the layout of the output, and whether the log-sum-exp has a gradient."""


def prepare_delta(dout: Layout, out: Layout, padded_len: int, sums: int = 0) -> Launch:
    """Prepare `_row_delta` of (dout, out, dlse, delta, lse, padded_lse, sums, counter), contiguous from dlse on.

    Args:
        dout: layout of the output's gradient, [B, Hq, Sq, Dv].
        out: layout of the output.
        padded_len: rows of each head in delta and padded_lse.
        sums: numbers of `sums` for each row of every head, a multiple of 64. Rows are rounded up to tiles of a plan.
    """
    batch, heads, q_len, v_dim = out.shape
    block_m = 64
    n_tiles = -(-q_len // ROWS) * ROWS // block_m
    return Launch(
        _row_delta,
        n_tiles * heads * batch,
        dout.strides, out.strides, heads, q_len, padded_len, n_tiles, v_dim,
        BLOCK_M=block_m, BLOCK_V=block_of(v_dim), SUMS=sums, num_warps=4,
    )  # fmt: skip


def prepare_statistics(planes: int, q_len: int, padded_len: int) -> Launch:
    """Prepare `_row_statistics` of (lse, delta, padded_lse, padded_delta), all contiguous.

    Args:
        planes: number of heads of all batch entries.
        q_len: rows of each head in lse and delta.
        padded_len: rows of each head in padded_lse and padded_delta.
    """
    return Launch(_row_statistics, planes * padded_len // ROWS, q_len, padded_len, BLOCK_M=ROWS, num_warps=1)
