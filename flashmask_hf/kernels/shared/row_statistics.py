"""Row statistics of the backward kernels: log-sum-exp and delta of every query row.

Delta is the row sum of dout * out (FlashAttention-2, algorithm 2, line 4) less the gradient of the log-sum-exp.
"""

from __future__ import annotations

from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.tensor_layout import Layout
from flashmask_hf.kernels.shared.device import LOG2_E, HeadRows, block_of, load_tile, store_tile
from flashmask_hf.tile_plan import ROWS


@triton.jit(do_not_specialize=["q_len", "padded_len", "n_tiles"])
def _row_delta(
    dout, out, dlse, delta, lse, padded_lse, sums, counter, clean, do_strides, out_strides, clean_strides,
    heads, q_len, padded_len, n_tiles, v_dim,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute delta of one row tile, and write the other buffers of a backward that are not None.

    Tensors:
        dout, out: gradient of the output, and the output, [B, Hq, Sq, Dv].
        dlse: gradient of the log-sum-exp, [B, Hq, Sq]; ignored in rows that see nothing.
        delta: written, [B * Hq, padded_len], 0 in rows past the end.
        lse: [B, Hq, Sq]; None if dlse, padded_lse and clean are.
        padded_lse: written as in `_row_statistics`.
        sums: zeroed, SUMS numbers (a multiple of 64) per row of the n_tiles * BLOCK_M of every head.
        counter: one number, zeroed.
        clean: written, a copy of dout with 0 in rows that see nothing.
    """
    tile = tl.program_id(0) % n_tiles
    plane = tl.program_id(0) // n_tiles
    batch = plane // heads
    head = plane % heads
    row = tile * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    at = plane.to(tl.int64) * q_len + rows
    padded_at = plane.to(tl.int64) * padded_len + rows
    given = load_tile(HeadRows(dout, do_strides, batch, head, q_len, v_dim), row, BLOCK_M, BLOCK_V, False)
    if clean is not None:
        blind = tl.load(lse + at, mask=rows < q_len, other=0.0) == float("-inf")
        given = tl.where(blind[:, None], 0.0, given)
        store_tile(HeadRows(clean, clean_strides, batch, head, q_len, v_dim), given, row)
    values = load_tile(HeadRows(out, out_strides, batch, head, q_len, v_dim), row, BLOCK_M, BLOCK_V, False)
    # Rows that see nothing have values 0, and 0 times inf or NaN would be NaN.
    upstream = tl.where(values == 0.0, 0.0, given.to(tl.float32))  # [BM, DV]
    row_delta = tl.sum(upstream * values.to(tl.float32), 1)  # [BM]
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=rows < q_len, other=0.0)
        row_lse = tl.load(lse + at, mask=rows < q_len, other=float("-inf"))
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
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
    """Pad lse, by `_backward_lse`, and delta from [B * Hq, Sq] to [B * Hq, padded_len]."""
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
    """Return lse in units of log2; inf for rows that see nothing or are past the end, so that weights are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


Delta: TypeAlias = "Tensor | tuple[Tensor, Tensor | None]"
"""Delta, float32 [B, Hq, Sq]; or its inputs: the output [B, Hq, Sq, Dv] and the gradient of the log-sum-exp, float32
[B, Hq, Sq] or None."""


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""dq, dk, dv; and delta, float32, B * Hq * padded_len numbers with padded_len >= Sq, 0 past Sq."""


OutputLayout: TypeAlias = tuple[Layout, bool]
"""Inputs of delta: layout of the output, and whether the log-sum-exp has a gradient."""


def prepare_delta(dout: Layout, out: Layout, padded_len: int, sums: int = 0, clean: Layout | None = None) -> Launch:
    """Prepare `_row_delta` of its tensors, from `dout` to `clean`; those from dlse to counter are contiguous.

    delta and padded_lse have `padded_len` rows per head. A row has `sums` numbers, a multiple of 64.
    """
    batch, heads, q_len, v_dim = out.shape
    block_m = 64
    n_tiles = -(-q_len // ROWS) * ROWS // block_m
    return Launch(
        _row_delta,
        n_tiles * heads * batch,
        dout.strides, out.strides, None if clean is None else clean.strides, heads, q_len, padded_len, n_tiles, v_dim,
        BLOCK_M=block_m, BLOCK_V=block_of(v_dim), SUMS=sums, num_warps=4,
    )  # fmt: skip


def prepare_statistics(planes: int, q_len: int, padded_len: int) -> Launch:
    """Prepare `_row_statistics` of (lse, delta, padded_lse, padded_delta), contiguous, for `planes` = batch * heads."""
    return Launch(_row_statistics, planes * padded_len // ROWS, q_len, padded_len, BLOCK_M=ROWS, num_warps=1)
