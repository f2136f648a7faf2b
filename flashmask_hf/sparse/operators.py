"""The operators of sparse attention: hash buckets, the sort, attention to sorted rows and its backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf._call.call import resolve_operator
from flashmask_hf._call.library import Derivative, no_derivatives, no_second_derivatives, operator
from flashmask_hf._call.operators import gradients_like
from flashmask_hf._numbers import check_between, check_range
from flashmask_hf.kernels.launch.tensor_layout import results_like
from flashmask_hf.masks.sorted import sorted_columns
from flashmask_hf.sparse.reorder import gather_rows, gather_upstream, put_rows_back, with_sequence_outermost
from flashmask_hf.tile_plan import Plan

_COUNTED = 256
"""Buckets up to which counting sorts faster than comparing."""


@operator(lambda x, directions: x.new_empty(x.shape[:3], dtype=_bucket_dtype(directions)))
def nearest(x: Tensor, directions: Tensor) -> Tensor:
    """Find the direction, or opposite of a direction, that is nearest to each vector.

    Args:
        x: floating point [B, H, S, D]. Products add up in float32, or in float64 for float64.
        directions: [Hd, D, n], rounded to x's dtype; head h has directions[h // (H // Hd)].

    Returns:
        [B, H, S] in 0..2 * n - 1, uint8 if that suffices, or int32. The upper n are opposites.
    """
    dtype = _bucket_dtype(directions)
    if torch_internals.runs_kernels(x.device) and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from flashmask_hf.sparse.kernels import hash as hashing

        return hashing.nearest(x, directions, dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch_internals.no_autocast(x.device):
        grouped = x.to(wide).unflatten(1, (len(directions), -1))
        along = (grouped @ directions.to(x.dtype).to(wide)[:, None]).flatten(1, 2)
    return torch.cat([along, -along], -1).argmax(-1).to(dtype)


def _bucket_dtype(directions: Tensor) -> torch.dtype:
    return torch.uint8 if 2 * directions.shape[-1] <= 256 else torch.int32


def _sorted_like(q_bucket: Tensor, k_bucket: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    return (
        q_bucket.new_empty(batch, heads, kv_len, 2, dtype=torch.int32),
        q_bucket.new_empty(batch, heads, q_len, dtype=torch.int32),
        q_bucket.new_empty(batch, kv_heads, kv_len, dtype=torch.int32),
    )


@operator(_sorted_like)
def sort_sparse(
    q_bucket: Tensor, k_bucket: Tensor, hidden_from: Tensor | None, n_buckets: int, exclude_self: bool, dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by bucket: mask indices of sorted rows and keys, and the orders.

    Args:
        q_bucket: int [B, Hq, Sq].
        k_bucket: int [B, Hkv, Skv].
        hidden_from: int32 [B or 1, Hm, Skv], from `first_hidden_rows`, or None.
        n_buckets: all buckets lie in 0..n_buckets - 1; 0 allows any bucket.
        exclude_self: as in `hash_sparse_attention`.
        dropped: a bucket that sees nothing, or -1.

    Returns:
        indices int32 [B, Hq, Skv, 2], q_order int32 [B, Hq, Sq], k_order int32 [B, Hkv, Skv].

    Raises:
        ValueError: a bucket lies outside 0..n_buckets - 1, or `hidden_from` outside 0..Sq; a device assertion on a GPU.
    """
    counted = 0 < n_buckets <= _COUNTED and torch_internals.runs_kernels(q_bucket.device)
    asserted = counted and q_bucket.is_cuda  # by the kernels themselves
    if hidden_from is not None and not asserted:
        check_range(hidden_from, q_bucket.shape[2])
    if n_buckets and not asserted:
        message = f"the buckets must lie in 0..n_buckets - 1 = 0..{n_buckets - 1}; leave n_buckets out if they do not"
        for bucket in (q_bucket, k_bucket):
            check_between(bucket, n_buckets - 1, message)
    if counted:
        from flashmask_hf.sparse.kernels import sort

        return sort.sorted_columns(q_bucket, k_bucket, hidden_from, n_buckets, exclude_self, dropped)
    columns, q_order, k_order = sorted_columns(q_bucket, k_bucket, hidden_from, exclude_self, dropped)
    return columns, q_order.int(), k_order.int()


class Places(NamedTuple):
    """Sorted order of the rows of q, k and v, and how many of them to read."""

    q_order: Tensor
    """int32 [B, Hq, Sq], a permutation of every head's rows: sorted row i is row q_order[i]."""
    q_kept: Tensor | None
    """int32 [B, Hq], the number of sorted rows to read; the mask hides the others. None is all."""
    k_order: Tensor
    """int32 [B, Hkv, Skv], as `q_order`."""
    k_kept: Tensor | None
    """int32 [B, Hkv], as `q_kept`."""


def _sort(inputs: Inputs, places: Places) -> Inputs:
    """Return the inputs with the rows of q, k and v in sorted order."""
    q_order, q_kept, k_order, k_kept = places
    k, v = (gather_rows(x, k_order, k_kept) for x in (inputs.k, inputs.v))
    return inputs._replace(q=gather_rows(inputs.q, q_order, q_kept), k=k, v=v)


def _save(
    ctx: Any, output: tuple[Tensor, ...], inputs: Inputs, plan: Plan, places: Places, arguments: Arguments
) -> None:
    """Save what the backward reads."""
    out, *for_backward = output
    ctx.mark_non_differentiable(*for_backward)
    ctx.set_materialize_grads(False)  # or zeros would be made for their gradients
    ctx.save_for_backward(out, *for_backward, inputs.sinks, inputs.indices, *plan, *places)
    ctx.arguments = arguments


def _differentiate(ctx: Any, dout: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and sinks, given the gradient of `out`."""
    if dout is None:
        return ()
    saved = ctx.saved_tensors  # read once: checkpointing unpacks a saved tensor only once
    found = flash_attn_sparse_backward(dout, *saved, *ctx.arguments)
    return found[:3] if saved[5] is None else found


def _forward_like(inputs: Inputs, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in inputs[:3])
    return (*results_like(q, v), q, k, v)


@operator(_forward_like, Derivative(_save, _differentiate))
def flash_attn_sparse_forward(
    inputs: Inputs, plan: Plan, places: Places, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Masked attention to sorted rows; differentiable in q, k, v and sinks, through `out`.

    Args:
        inputs: with mask indices int32 [B, Hq, Skv, 2] that are not causal, for sorted rows and keys.
        plan: of the mask.
        places: of the rows.
        arguments: as in `flash_attn_forward`.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]. For the backward, sorted: lse [B, Hq, Sq] float32
        (float64 for float64 q), q, k and v.
    """
    inputs = _sort(inputs, places)
    out, lse = resolve_operator(inputs, False, arguments).forward(inputs, plan, order=places.q_order)
    return out, lse, inputs.q, inputs.k, inputs.v


def _backward_like(
    dout: Tensor, out: Tensor, lse: Tensor, inputs: Inputs, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = map(with_sequence_outermost, inputs[:3])
    return q, k, v, gradients_like(inputs, lse)[3]


@operator(_backward_like, no_second_derivatives)
def flash_attn_sparse_backward(
    dout: Tensor, out: Tensor, lse: Tensor, inputs: Inputs, plan: Plan, places: Places, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, each stored as [B, S, H, D], and sinks (empty without sinks).

    The arguments are arguments and results of the forward: q, k, v and lse sorted, `out`, `dout` and the gradients not.
    """
    orders = places.q_order, places.k_order
    dout, delta = gather_upstream(dout, out, places.q_order, places.q_kept, lse.dtype)
    call = resolve_operator(inputs, False, arguments)
    dq, dk, dv, dsinks = call.backward(dout, inputs, lse, delta, plan, orders=orders)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@operator(lambda inputs, *_: results_like(inputs.q, inputs.v)[0], no_derivatives)
def flash_attn_sparse_decode(inputs: Inputs, places: Places, arguments: Arguments) -> Tensor:
    """Attend to few sorted rows, without a tile plan and without gradients.

    Arguments are as in `flash_attn_sparse_forward`; the result is its `out`.
    """
    inputs = _sort(inputs, places)
    out, _ = resolve_operator(inputs, False, arguments).decode(inputs)
    return put_rows_back(out, places.q_order)
