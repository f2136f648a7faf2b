"""Dynamic sparse attention (Pagliardini et al. 2023): dropped queries and keys, or hash buckets, chosen for each head.

Both are FlashMask after a stable sort (`masks.qk_sparse`, `masks.hash_sparse`): the rows of a bucket, or those that are
kept, lie next to each other, and what a key hides is two intervals. So there is no kernel here: sort, reorder, attend,
put back. Every pair that the definition lets see each other is computed, and nothing of size Sq x Skv exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmask_hf import masks
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask

__all__ = ["hash_sparse_attention", "lsh_buckets", "qk_sparse_attention"]


def qk_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, q_keep: Tensor, k_keep: Tensor, *, scale: float | None = None
) -> Tensor:
    """Causal attention between the queries and the keys that each head keeps (Pagliardini et al. 2023, section 3.1).

    Differentiable in q, k and v. The cost is that of the tiles of kept rows and keys, per head.

    Args:
        q: queries [B, Hq, Sq, D], in the dtypes of `flashmask_attention`. Query i stands at position i + Skv - Sq.
        k: keys [B, Hkv, Skv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h * Hkv // Hq.
        v: values [B, Hkv, Skv, Dv].
        q_keep: bool [B, Hq, Sq], True where the head keeps the query.
        k_keep: bool [B, Hkv, Skv], True where the head keeps the key.
        scale: factor on q @ k^T; None is D ** -0.5.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype. A dropped query, and one with no kept key at or before it, has out 0 and
        passes no gradient; dropped keys and values get none.

    Raises:
        TypeError: `q_keep` or `k_keep` is not a bool tensor.
        ValueError: shapes or devices do not fit.

    Example:
        >>> import torch
        >>> from flashmask_hf.sparse import qk_sparse_attention
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> keep = torch.tensor([True, False] * 4).expand(1, 2, 8)
        >>> qk_sparse_attention(q, k, v, keep, keep)[0, 0, :, 0] == 0
        tensor([False,  True, False,  True, False,  True, False,  True])
    """
    _check(q, k, "q_keep", q_keep, "k_keep", k_keep)
    mask = masks.qk_sparse(q_keep, k_keep)
    q_order = (~q_keep).byte().argsort(dim=-1, stable=True)
    k_order = (~k_keep).byte().argsort(dim=-1, stable=True)
    return _attend(q, k, v, mask, q_order, k_order, scale)


def hash_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bucket: Tensor,
    k_bucket: Tensor,
    *,
    scale: float | None = None,
    exclude_self: bool = False,
) -> Tensor:
    """Causal attention between queries and keys of one bucket (Pagliardini et al. 2023, section 3.2).

    All collisions count, wherever in the row they are; Reformer's chunks miss some. Differentiable in q, k and v, not
    in the buckets.

    Args:
        q: queries [B, Hq, Sq, D], in the dtypes of `flashmask_attention`. Query i stands at position i + Skv - Sq.
        k: keys [B, Hkv, Skv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h * Hkv // Hq.
        v: values [B, Hkv, Skv, Dv].
        q_bucket: int [B, Hq, Sq], any integers.
        k_bucket: int [B, Hkv, Skv].
        scale: factor on q @ k^T; None is D ** -0.5.
        exclude_self: whether a query does not see the key at its own position, as in Reformer, where q = k.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype. A query that sees no key has out 0 and passes no gradient.

    Raises:
        TypeError: `q_bucket` or `k_bucket` is not an integer tensor.
        ValueError: shapes or devices do not fit.
    """
    _check(q, k, "q_bucket", q_bucket, "k_bucket", k_bucket)
    mask = masks.hash_sparse(q_bucket, k_bucket, exclude_self=exclude_self)
    q_order, k_order = (bucket.argsort(dim=-1, stable=True) for bucket in (q_bucket, k_bucket))
    return _attend(q, k, v, mask, q_order, k_order, scale)


def lsh_buckets(x: Tensor, n_buckets: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Buckets of vectors by their angle: the nearest of the directions +-r of random r (Andoni et al. 2015).

    Vectors that point the same way fall into one bucket with high probability. Each head draws directions of its own,
    the entries of the batch share them. Queries and keys fall into buckets that mean the same only if hashed in one
    call, as shared queries and keys are.

    Args:
        x: [B, H, S, D], floating point.
        n_buckets: even, at least 2.
        generator: draws the directions, on its own device; None is torch's CPU default.

    Returns:
        int64 [B, H, S], in 0..n_buckets - 1.

    Raises:
        TypeError: `x` is not a floating-point tensor, or `n_buckets` not an int.
        ValueError: `x` has another number of axes, or `n_buckets` is odd or less than 2.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise TypeError(f"x must be a floating-point tensor [B, H, S, D], got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != 4:
        raise ValueError(f"x must have shape [B, H, S, D], got {list(x.shape)}")
    if not isinstance(n_buckets, int) or isinstance(n_buckets, bool):
        raise TypeError(f"n_buckets must be an int, got {type(n_buckets).__name__}")
    if n_buckets < 2 or n_buckets % 2:
        raise ValueError(f"n_buckets must be even and at least 2, since directions come in pairs, got {n_buckets}")
    place = torch.device("cpu") if generator is None else generator.device
    directions = torch.randn(x.shape[1], x.shape[3], n_buckets // 2, generator=generator, device=place)
    along = x.detach().float() @ directions.to(x.device)
    return torch.cat([along, -along], -1).argmax(-1)


def _check(q: Tensor, k: Tensor, q_name: str, of_q: Tensor, k_name: str, of_k: Tensor) -> None:
    for tensor_name, x, name, choice in (("q", q, q_name, of_q), ("k", k, k_name, of_k)):
        if isinstance(choice, Tensor) and (choice.shape != x.shape[:-1] or choice.device != x.device):
            raise ValueError(
                f"{name} must have {tensor_name}'s shape without D, {list(x.shape[:-1])}, on {x.device}; got "
                f"{list(choice.shape)} on {choice.device}"
            )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, q_order: Tensor, k_order: Tensor, scale: float | None
) -> Tensor:
    """Attention on reordered rows and columns, put back in order."""
    q_back, k_back = _inverse(q_order), _inverse(k_order)
    out = flashmask_attention(
        _Reorder.apply(q, q_order, q_back),
        _Reorder.apply(k, k_order, k_back),
        _Reorder.apply(v, k_order, k_back),
        mask,
        scale=scale,
    )
    return _Reorder.apply(out, q_back, q_order)


def _inverse(order: Tensor) -> Tensor:
    position = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, position)


class _Reorder(torch.autograd.Function):
    """x [B, H, S, D] with its rows in another order; as a permutation, its gradient is a gather, too."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return x.take_along_dim(order.unsqueeze(-1), 2)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _Reorder.apply(gradients[0], back, order), None, None
