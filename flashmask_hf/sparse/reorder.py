"""Rows of q, k, v and gradients in sorted order: gathered, and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmask_hf import torch_internals


def gather_rows(x: Tensor, order: Tensor, kept: Tensor | None) -> Tensor:
    """Return the rows of x in another order: y [B, H, S, D], contiguous, with y[b, h, i] = x[b, h, order[b, h, i]].

    Args:
        x: [B, H, S, D], of any strides.
        order: int32 [B, H, S], a permutation of every head's rows.
        kept: int32 [B, H], the number of rows to read per head; the others become 0. None is all.
    """
    if torch_internals.runs_kernels(x.device):
        from flashmask_hf.sparse.kernels import gather

        return gather.move_rows(x, x.new_empty(x.shape), order, kept, back=False)
    y = x.take_along_dim(order.long().unsqueeze(-1), 2)
    if kept is None:
        return y
    return y.masked_fill_((torch.arange(x.shape[2], device=x.device) >= kept.unsqueeze(-1)).unsqueeze(-1), 0.0)


def put_rows_back(x: Tensor, order: Tensor) -> Tensor:
    """Undo `gather_rows`: return y with y[b, h, order[b, h, i]] = x[b, h, i], [B, H, S, D] stored as [B, S, H, D]."""
    y = with_sequence_outermost(x)
    if torch_internals.runs_kernels(x.device):
        from flashmask_hf.sparse.kernels import gather

        return gather.move_rows(x, y, order, None, back=True)
    return y.scatter_(2, order.long().unsqueeze(-1).expand(x.shape), x)


def gather_upstream(
    dout: Tensor, out: Tensor, order: Tensor, kept: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather the output's gradient, and compute the row sums that the backward subtracts.

    Args:
        dout: [B, H, S, D], of any strides.
        out: [B, H, S, D], in the order of dout.
        order: as in `gather_rows`.
        kept: as in `gather_rows`.
        dtype: of the sums.

    Returns:
        dout's rows; the sums over D of dout * out, `dtype` [B, H, S]; as from `gather_rows`.
    """
    if torch_internals.runs_kernels(dout.device):
        from flashmask_hf.sparse.kernels import gather

        return gather.gather_upstream(dout, out, order, kept, dtype)
    from flashmask_hf.kernels.eager import tiled

    delta = tiled.row_delta(dout, out, None).to(dtype).unsqueeze(-1)
    return gather_rows(dout, order, kept), gather_rows(delta, order, kept).squeeze(-1)


def with_sequence_outermost(x: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape of x [B, H, S, D], stored as [B, S, H, D]."""
    batch, heads, rows, dims = x.shape
    return x.new_empty(batch, rows, heads, dims).transpose(1, 2)
