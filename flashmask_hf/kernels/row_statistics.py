"""What the backward takes of every query row: its log-sum-exp, and what the softmax takes off its scores' gradients.

The latter, delta, is the row sums of dout * out (FlashAttention-2, algorithm 2, line 4), less the gradient of the
log-sum-exp, and 0 in rows that see nothing. The kernel that makes it also does what else has to be done before the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.descriptors import Layout, Part, layout_of
from flashmask_hf.kernels.launch import Bound, Launcher
from flashmask_hf.kernels.tiles import LOG2_E, block_of, load_tile
from flashmask_hf.plan import ROWS

__all__ = ["Delta", "Gradients", "OutputLayout", "bind_delta", "bind_statistics", "output_layout"]


@triton.jit(do_not_specialize=["q_len", "padded", "n_rows"])
def _row_delta(
    dout, out, dlse, delta, lse, whole_lse, sums, counter, do_b, do_h, do_s, do_d, out_b, out_h, out_s, out_d,
    heads, q_len, padded, n_rows, v_dim,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Delta [B * Hq, padded], 0 in rows past the end, and what else is there.

    `lse` has to be there if `dlse` is, which does not count in rows that see nothing: weight 0 times inf is NaN.
    `whole_lse` is as in `_row_statistics`. `sums`, with SUMS numbers for each of the n_rows * BLOCK_M rows of every
    head, and `counter` become 0.
    """
    tile = tl.program_id(0) % n_rows
    plane = tl.program_id(0) // n_rows
    batch = plane // heads
    head = plane % heads
    row = tile * BLOCK_M
    upstream = load_tile(dout, batch, head, row, do_b, do_h, do_s, do_d, q_len, v_dim, BLOCK_M, BLOCK_V, False)
    values = load_tile(out, batch, head, row, out_b, out_h, out_s, out_d, q_len, v_dim, BLOCK_M, BLOCK_V, False)
    rows = row + tl.arange(0, BLOCK_M)
    at = plane.to(tl.int64) * q_len + rows
    place = plane.to(tl.int64) * padded + rows
    row_delta = tl.sum(upstream.to(tl.float32) * values.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=rows < q_len, other=0.0)
        row_lse = tl.load(lse + at, mask=rows < q_len, other=float("-inf"))
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
    tl.store(delta + place, row_delta, mask=rows < padded)
    if whole_lse is not None:
        row_lse = tl.load(lse + at, mask=rows < q_len, other=float("-inf"))
        tl.store(whole_lse + place, _weightless(row_lse), mask=rows < padded)
    if sums is not None:
        numbers = tl.program_id(0).to(tl.int64) * (BLOCK_M * SUMS) + tl.arange(0, BLOCK_M * SUMS)
        tl.store(sums + numbers, tl.zeros([BLOCK_M * SUMS], tl.float32))
    if counter is not None:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["q_len", "padded"])
def _row_statistics(lse, delta, whole_lse, whole_delta, q_len, padded, BLOCK_M: tl.constexpr):
    """Log-sum-exp in units of log2, and delta, [B * Hq, padded] from [B * Hq, Sq], as the backward takes them."""
    n_rows = padded // BLOCK_M
    plane = (tl.program_id(0) // n_rows).to(tl.int64)
    row = tl.program_id(0) % n_rows * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < q_len
    row_lse = tl.load(lse + plane * q_len + row, mask=inside, other=float("-inf"))
    row_delta = tl.load(delta + plane * q_len + row, mask=inside, other=0.0)
    tl.store(whole_lse + plane * padded + row, _weightless(row_lse))
    tl.store(whole_delta + plane * padded + row, row_delta)


@triton.jit
def _weightless(lse):
    """In units of log2; inf, so that weights are 0, for a row that sees nothing, as one past the end does."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


_launch_delta = Launcher(_row_delta)
_launch_statistics = Launcher(_row_statistics)


Delta: TypeAlias = "Tensor | tuple[Tensor, Tensor | None]"
"""Delta, float32 [B, Hq, Sq]; or what it follows from, the output [B, Hq, Sq, Dv] and the gradient of the log-sum-exp,
float32 [B, Hq, Sq], or None."""


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Callable[[], Tensor]]
"""dq, dk, dv, and what makes a tensor of delta, which few ask for; while it is kept, so is the memory beside it."""


class OutputLayout(NamedTuple):
    """Layouts of what delta follows from."""

    out: Layout
    dlse: bool
    """Whether there is one."""


def output_layout(delta: Delta) -> OutputLayout | None:
    """Layouts of what delta follows from, or None if it is there."""
    if isinstance(delta, Tensor):
        return None
    out, dlse = delta
    return OutputLayout(layout_of(out), dlse is not None)


def bind_delta(dout: Layout, out: Layout, padded: int, parts: Mapping[str, Part], sums: int = 0) -> Bound:
    """Launches of (dout, out, dlse, delta, lse, whole_lse, sums, counter), contiguous from dlse on; None is left out.

    Args:
        dout: layout of the output's gradient, [B, Hq, Sq, Dv].
        out: of the output.
        padded: rows of each head in delta [B, Hq, padded] and in whole_lse.
        parts: as in `Launcher.bind`.
        sums: how many numbers of sums there are for each row of every head, rows rounded up to tiles of a plan.
    """
    batch, heads, q_len, v_dim = out.shape
    rows = 64
    n_rows = -(-q_len // ROWS) * ROWS // rows
    return _launch_delta.bind(
        n_rows * heads * batch,
        *dout.strides, *out.strides, heads, q_len, padded, n_rows, v_dim,
        parts=parts, BLOCK_M=rows, BLOCK_V=block_of(v_dim), SUMS=sums, num_warps=4,
    )  # fmt: skip


def bind_statistics(planes: int, q_len: int, padded: int, parts: Mapping[str, Part] | None = None) -> Bound:
    """Launches of (lse, delta, whole_lse, whole_delta), all contiguous: [planes, q_len] to [planes, padded].

    `parts` as in `Launcher.bind`.
    """
    return _launch_statistics.bind(planes * padded // ROWS, q_len, padded, parts=parts, BLOCK_M=ROWS, num_warps=1)
