"""The operators of sparse attention: buckets of vectors, the sort, attention to sorted rows and its backward.

`flashmask_hf::nearest`, `flashmask_hf::sort_sparse`, `flashmask_hf::flash_attn_sparse_forward`,
`flashmask_hf::flash_attn_sparse_backward` and `flashmask_hf::flash_attn_sparse_decode` (`ops` says why these are called
so). The last three attend to sorted rows: they gather those of q, k, v and of the output's gradient, and put those of
the output and of the other gradients back. In between q, k, v and lse stay sorted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf import masks, ops, tiled
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import Plan

__all__ = [
    "flash_attn_sparse_backward",
    "flash_attn_sparse_decode",
    "flash_attn_sparse_forward",
    "gather_rows",
    "gather_upstream",
    "nearest",
    "put_rows_back",
    "sort_sparse",
]

_COUNTED = 256
"""Buckets up to which counting sorts faster than comparing."""


def _nearest(x: Tensor, directions: Tensor) -> Tensor:
    """Which of the directions and their opposites is nearest to each vector, by products that add up in float32.

    Args:
        x: floating point [B, H, S, D], of any strides. Products of float64 add up in float64.
        directions: [Hd, D, n], rounded to x's dtype; head h has directions[h // (H // Hd)].

    Returns:
        [B, H, S] in 0..2 * n - 1, of which the upper n are opposites; the lowest of equally near ones, and any for a
        vector with NaN. uint8 where that suffices, or int32.
    """
    dtype = _bucket_dtype(directions)
    if ops.runs_kernels(x.device) and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from flashmask_hf.kernels import lsh

        return lsh.nearest(x, directions, dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    with ops.no_autocast(x.device):
        grouped = x.to(wide).unflatten(1, (len(directions), -1))
        along = (grouped @ directions.to(x.dtype).to(wide)[:, None]).flatten(1, 2)
    return torch.cat([along, -along], -1).argmax(-1).to(dtype)


def _bucket_dtype(directions: Tensor) -> torch.dtype:
    return torch.uint8 if 2 * directions.shape[-1] <= 256 else torch.int32


nearest = ops.as_operator("nearest", _nearest)


@torch.library.register_fake("flashmask_hf::nearest")
def _(x: Tensor, directions: Tensor) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=_bucket_dtype(directions))


def _sort_sparse(
    q_bucket: Tensor, k_bucket: Tensor, hidden_from: Tensor | None, n_buckets: int, exclude_self: bool, dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`masks.sorted_columns` with orders in int32.

    Args:
        q_bucket: int [B, Hq, Sq].
        k_bucket: int [B, Hkv, Skv].
        hidden_from: int32 [B or 1, Hm, Skv], of `masks.hidden_from_of`, or None.
        n_buckets: all buckets lie in 0..n_buckets - 1; 0 says nothing of them.
        exclude_self: as in `hash_sparse_attention`.
        dropped: a bucket that sees nothing, or -1.

    Returns:
        columns int32 [B, Hq, Skv, 2], q_order int32 [B, Hq, Sq], k_order int32 [B, Hkv, Skv].

    Raises:
        ValueError: a bucket lies outside 0..n_buckets - 1, or `hidden_from` outside 0..Sq. A GPU asserts that itself.
    """
    without = None if dropped < 0 else dropped
    counted = 0 < n_buckets <= _COUNTED and ops.runs_kernels(q_bucket.device)
    asserted = counted and q_bucket.is_cuda  # by the kernels themselves
    if hidden_from is not None and not asserted:
        ops.check_range(hidden_from, q_bucket.shape[2])
    if n_buckets and not asserted:
        message = f"the buckets must lie in 0..n_buckets - 1 = 0..{n_buckets - 1}; leave n_buckets out if they do not"
        for bucket in (q_bucket, k_bucket):
            ops.check_between(bucket, n_buckets - 1, message)
    if counted:
        from flashmask_hf.kernels import reorder

        return reorder.sorted_columns(
            q_bucket, k_bucket, hidden_from, n_buckets, exclude_self=exclude_self, dropped=without
        )
    columns, q_order, k_order = masks.sorted_columns(
        q_bucket, k_bucket, hidden_from, exclude_self=exclude_self, dropped=without
    )
    return columns, q_order.int(), k_order.int()


sort_sparse = ops.as_operator("sort_sparse", _sort_sparse)


@torch.library.register_fake("flashmask_hf::sort_sparse")
def _(
    q_bucket: Tensor, k_bucket: Tensor, hidden_from: Tensor | None, n_buckets: int, exclude_self: bool, dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    return (
        q_bucket.new_empty(batch, heads, kv_len, 2, dtype=torch.int32),
        q_bucket.new_empty(batch, heads, q_len, dtype=torch.int32),
        q_bucket.new_empty(batch, kv_heads, kv_len, dtype=torch.int32),
    )


def gather_rows(x: Tensor, order: Tensor, kept: Tensor | None) -> Tensor:
    """The rows of x in another order.

    Args:
        x: [B, H, S, D], of any strides.
        order: int32 [B, H, S], a permutation of every head's rows.
        kept: int32 [B, H], how many rows of the order count; the others are made 0, whatever they hold. None is all.

    Returns:
        y [B, H, S, D] with y[b, h, i] = x[b, h, order[b, h, i]], contiguous, as the attention kernels like it.
    """
    if ops.runs_kernels(x.device):
        from flashmask_hf.kernels import reorder

        return reorder.gather_rows(x, order, kept)
    y = x.take_along_dim(order.long().unsqueeze(-1), 2)
    if kept is None:
        return y
    return y.masked_fill_((torch.arange(x.shape[2], device=x.device) >= kept.unsqueeze(-1)).unsqueeze(-1), 0.0)


def put_rows_back(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `gather_rows`: y[b, h, order[b, h, i]] = x[b, h, i], [B, H, S, D] stored as [B, S, H, D]."""
    if ops.runs_kernels(x.device):
        from flashmask_hf.kernels import reorder

        return reorder.put_rows_back(x, order)
    return _own_order_like(x).scatter_(2, order.long().unsqueeze(-1).expand(x.shape), x)


def gather_upstream(
    dout: Tensor, out: Tensor, order: Tensor, kept: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The rows of the output's gradient in another order, and what the backward subtracts in each.

    Args:
        dout: [B, H, S, D], of any strides.
        out: [B, H, S, D], in the order of dout.
        order: as in `gather_rows`.
        kept: as in `gather_rows`; neither dout nor out is read in rows that do not count, and their sums are 0.
        dtype: of the sums, wide.

    Returns:
        dout's rows as `gather_rows` has them; the sums of their products with those of out, `dtype` [B, H, S].
    """
    if ops.runs_kernels(dout.device):
        from flashmask_hf.kernels import reorder

        return reorder.gather_upstream(dout, out, order, kept, dtype)
    delta = tiled.row_delta(dout, out, None).to(dtype).unsqueeze(-1)
    return gather_rows(dout, order, kept), gather_rows(delta, order, kept).squeeze(-1)


def _flash_attn_sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    q_order: Tensor,
    q_kept: Tensor | None,
    k_order: Tensor,
    k_kept: Tensor | None,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Masked attention to sorted rows; differentiable in q, k, v and sinks, through `out`.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        sinks: [Hq] or None.
        indices: int32 [B, Hq, Skv, 2] of a mask that is not causal, for sorted rows and keys.
        tiles: of its plan.
        counts: of its plan.
        segments: of its plan.
        q_order: int32 [B, Hq, Sq], a permutation of every head's rows: sorted row i is row q_order[i].
        q_kept: int32 [B, Hq], how many sorted rows are read, of which the mask hides the others; None is all.
        k_order: int32 [B, Hkv, Skv], likewise.
        k_kept: int32 [B, Hkv], likewise.
        scale: factor on the scores.
        softcap: 0 is none.
        impl: as in `ops.flash_attn_forward`.
        deterministic: as in `ops.flash_attn_forward`.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; and sorted, for the backward: lse [B, Hq, Sq]
        float32 (float64 for float64 q), q, k and v.
    """
    q = gather_rows(q, q_order, q_kept)
    k, v = (gather_rows(x, k_order, k_kept) for x in (k, v))

    def put_back(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return put_rows_back(out, q_order), lse

    mask, plan = FlashMask(indices, False), Plan(tiles, counts, segments)
    with ops.no_autocast(q.device):
        out, lse = ops.run("forward", impl, q, k, v, mask, plan, sinks, scale, softcap, after=put_back, order=q_order)
    return out, lse, q, k, v


flash_attn_sparse_forward = ops.as_operator("flash_attn_sparse_forward", _flash_attn_sparse_forward)


@torch.library.register_fake("flashmask_hf::flash_attn_sparse_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, lse = ops.results_like(q, v)
    return out, lse, q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _flash_attn_sparse_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    q_order: Tensor,
    q_kept: Tensor | None,
    k_order: Tensor,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each stored as [B, S, H, D], and sinks (empty without sinks), given that of `out`, `dout`.

    Here q, k, v and lse are sorted, `out` and `dout` are not, nor are the gradients. A dropped row's is 0.
    """

    def put_back(dq: Tensor, dk: Tensor, dv: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        return put_rows_back(dq, q_order), put_rows_back(dk, k_order), put_rows_back(dv, k_order), delta

    mask, plan = FlashMask(indices, False), Plan(tiles, counts, segments)
    with ops.no_autocast(q.device):
        dout, delta = gather_upstream(dout, out, q_order, q_kept, lse.dtype)
        dq, dk, dv, _ = ops.run(
            "backward", impl, dout, q, k, v, lse, delta, mask, plan, scale, softcap,
            after=put_back, deterministic=deterministic, orders=(q_order, k_order),
        )  # fmt: skip
        return dq, dk, dv, ops.sinks_gradient(sinks, lse, delta)


flash_attn_sparse_backward = ops.as_operator("flash_attn_sparse_backward", _flash_attn_sparse_backward)


@torch.library.register_fake("flashmask_hf::flash_attn_sparse_backward")
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _own_order_like(q), _own_order_like(k), _own_order_like(v), dsinks


def _own_order_like(x: Tensor) -> Tensor:
    """Uninitialised, of the shape of x [B, H, S, D], stored as [B, S, H, D]."""
    batch, heads, rows, dims = x.shape
    return x.new_empty(batch, rows, heads, dims).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, sinks, *mask, q_order, q_kept, k_order, _, scale, softcap, impl, deterministic = inputs
    out, lse, q, k, v = output
    ctx.mark_non_differentiable(lse, q, k, v)
    ctx.set_materialize_grads(False)  # or theirs would be made, of zeros
    ctx.save_for_backward(q, k, v, sinks, out, lse, *mask, q_order, q_kept, k_order)
    ctx.settings = (scale, softcap, impl, deterministic)


def _backward(ctx: Any, dout: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 16
    saved = ctx.saved_tensors  # read once: checkpointing unpacks a saved tensor only once
    dq, dk, dv, dsinks = ops.call(flash_attn_sparse_backward, dout, *saved, *ctx.settings)
    return dq, dk, dv, None if saved[3] is None else dsinks, *[None] * 12


ops.register_autograd(flash_attn_sparse_forward, _backward, _setup_context)
ops.register_autograd(flash_attn_sparse_backward, ops.no_second_derivatives, lambda ctx, inputs, output: None)


def _flash_attn_sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    q_order: Tensor,
    q_kept: Tensor | None,
    k_order: Tensor,
    k_kept: Tensor | None,
    scale: float,
    softcap: float,
    impl: str,
) -> Tensor:
    """Attention of few sorted rows, without a plan and without gradients.

    Arguments and result as in `flash_attn_sparse_forward`, its `out` alone; `impl` as in `ops.attention`.
    """
    q = gather_rows(q, q_order, q_kept)
    k, v = (gather_rows(x, k_order, k_kept) for x in (k, v))
    out, _ = ops.attention(
        q, k, v, FlashMask(indices, False), None,
        sinks=sinks, scale=scale, softcap=softcap, impl=impl, deterministic=False,
    )  # fmt: skip
    return put_rows_back(out, q_order)


flash_attn_sparse_decode = ops.as_operator("flash_attn_sparse_decode", _flash_attn_sparse_decode)
ops.register_autograd(flash_attn_sparse_decode, ops.no_derivatives, lambda ctx, inputs, output: None)


@torch.library.register_fake("flashmask_hf::flash_attn_sparse_decode")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return ops.results_like(q, v)[0]
