"""Kernels of `flashmask_hf.sparse.reorder`, which move rows to a sorted order and back.

An order is a permutation of a head's rows. A program moves the rows of one block of positions in it:

    _move:             x                        -> its rows in the order; or back from the order
    _gather_upstream:  gradient of out, and out -> rows of the gradient in the order; row sums of their product, delta
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOVED = 8192  # elements that a program moves


@triton.jit
def _load_positions(order, kept, heads, rows, n_blocks, KEPT: tl.constexpr, BLOCK_S: tl.constexpr):
    """Load the block of an order that this program moves.

    Returns:
        batch, head, plane: which order, int64.
        position, row: positions [BLOCK_S] in the order, and their rows, int64.
        inside, is_kept: which positions exist, and which are among the first `kept`.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.program_id(0) // heads % n_blocks
    batch = (tl.program_id(0) // heads // n_blocks).to(tl.int64)
    plane = batch * heads + head
    position = block * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = position < rows
    is_kept = inside
    if KEPT:
        is_kept = inside & (position < tl.load(kept + plane))
    row = tl.load(order + plane * rows + position, mask=inside, other=0)
    return batch, head, plane, position.to(tl.int64), row.to(tl.int64), inside, is_kept


@triton.jit(do_not_specialize=["heads", "rows", "n_blocks"])
def _move(
    x, order, kept, y, x_strides, y_strides, heads, rows, n_blocks, dims,
    BACK: tl.constexpr, KEPT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy row order[i] of x to row i of y, or row i to row order[i] if BACK.

    If KEPT, positions behind the first `kept` are not read but become 0.

    Tensors:
        x: [B, heads, rows, dims], dense in the last axis.
        order: [B, heads, rows].
        kept: [B, heads] if KEPT.
        y: written, [B, heads, rows, dims], dense in the last axis.
    """
    batch, head, _, position, row, inside, is_kept = _load_positions(order, kept, heads, rows, n_blocks, KEPT, BLOCK_S)
    source, target = row, position
    if BACK:
        source, target = target, row
    x_b, x_h, x_s = x_strides
    y_b, y_h, y_s = y_strides
    d = tl.arange(0, BLOCK_D)[None, :]
    x += batch * x_b + head * x_h
    y += batch * y_b + head * y_h
    value = tl.load(x + source[:, None] * x_s + d, mask=is_kept[:, None] & (d < dims), other=0.0)  # [BLOCK_S, BLOCK_D]
    tl.store(y + target[:, None] * y_s + d, value, mask=inside[:, None] & (d < dims))


@triton.jit(do_not_specialize=["heads", "rows", "n_blocks"])
def _gather_upstream(
    dout, out, order, kept, gathered, delta, do_strides, out_strides, heads, rows, n_blocks, dims,
    KEPT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy row order[i] of dout to row i of `gathered`, and its dot product with out's row to delta.

    If KEPT, positions behind the first `kept` are not read; both results are 0 there.

    Tensors:
        dout, out: [B, heads, rows, dims].
        order: [B, heads, rows].
        kept: [B, heads] if KEPT.
        gathered: written, [B, heads, rows, dims], contiguous.
        delta: written, [B, heads, rows].
    """
    batch, head, plane, position, row, inside, is_kept = _load_positions(
        order, kept, heads, rows, n_blocks, KEPT, BLOCK_S
    )
    do_b, do_h, do_s, do_d = do_strides
    out_b, out_h, out_s, out_d = out_strides
    d = tl.arange(0, BLOCK_D)[None, :]
    read = is_kept[:, None] & (d < dims)
    dout += batch * do_b + head * do_h
    out += batch * out_b + head * out_h
    upstream = tl.load(dout + row[:, None] * do_s + d.to(tl.int64) * do_d, mask=read, other=0.0)  # [BLOCK_S, BLOCK_D]
    value = tl.load(out + row[:, None] * out_s + d.to(tl.int64) * out_d, mask=read, other=0.0)  # [BLOCK_S, BLOCK_D]
    position += plane * rows
    tl.store(gathered + position[:, None] * dims + d, upstream, mask=inside[:, None] & (d < dims))
    wide = delta.dtype.element_ty
    upstream = tl.where(value == 0.0, 0.0, upstream.to(wide))  # 0 times inf would be NaN
    tl.store(delta + position, tl.sum(upstream * value.to(wide), 1), mask=inside)


def _blocks(rows: int, dims: int, elements: int) -> tuple[int, int, int]:
    """Return (n_blocks, BLOCK_S, BLOCK_D) for a head's rows; a program moves at most `elements`."""
    block_d = triton.next_power_of_2(dims)
    block_s = min(elements // block_d, triton.next_power_of_2(rows))
    return triton.cdiv(rows, block_s), block_s, block_d


def move_rows(x: Tensor, y: Tensor, order: Tensor, kept: Tensor | None, back: bool) -> Tensor:
    """Fill y with the rows of x in the order, or back from it (`_move`)."""
    batch, heads, rows, dims = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    n_blocks, block_s, block_d = _blocks(rows, dims, _MOVED)
    with torch.cuda.device_of(x):
        _move[(batch * heads * n_blocks,)](
            x, order, order if kept is None else kept.contiguous(), y, x.stride()[:3], y.stride()[:3],
            heads, rows, n_blocks, dims,
            BACK=back, KEPT=kept is not None, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return y


def gather_upstream(
    dout: Tensor, out: Tensor, order: Tensor, kept: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run `_gather_upstream` for `reorder.gather_upstream`."""
    batch, heads, rows, dims = dout.shape
    gathered = dout.new_empty(batch, heads, rows, dims)
    delta = dout.new_empty(batch, heads, rows, dtype=dtype)
    n_blocks, block_s, block_d = _blocks(rows, dims, _MOVED // 2)
    with torch.cuda.device_of(dout):
        _gather_upstream[(batch * heads * n_blocks,)](
            dout, out, order, order if kept is None else kept.contiguous(), gathered, delta,
            dout.stride(), out.stride(), heads, rows, n_blocks, dims,
            KEPT=kept is not None, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return gathered, delta
