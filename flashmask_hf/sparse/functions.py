"""Dynamic sparse attention (Pagliardini et al. 2023): dropped queries and keys, or hash buckets, chosen for each head.

Both are FlashMask after a stable sort (`masks.qk_sparse`, `masks.hash_sparse`): the rows of a bucket, or those that are
kept, lie next to each other, and what a key hides is two intervals. So there is no attention kernel here: sort, then
attend to the sorted rows, which one operator gathers and whose results it puts back (`sparse.operators`). Every pair
that the definition lets see each other is computed, nothing of size Sq x Skv exists, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmask_hf._call.arguments import check_tensors
from flashmask_hf._call.call import resolve
from flashmask_hf._call.plan_cache import plan_of
from flashmask_hf._numbers import as_integer, check_bool
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks.sorted import check_buckets, check_keep, first_hidden_rows
from flashmask_hf.sparse.operators import flash_attn_sparse_decode, flash_attn_sparse_forward, nearest, sort_sparse

__all__ = ["hash_sparse_attention", "lsh_buckets", "qk_sparse_attention"]


def qk_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_keep: Tensor,
    k_keep: Tensor,
    *,
    scale: float | None = None,
    mask: FlashMask | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Causal attention between the queries and the keys that each head keeps (Pagliardini et al. 2023, section 3.1).

    Differentiable in q, k, v and sinks. The cost is that of the tiles of kept rows and keys, per head; dropped rows are
    not read, whatever they hold.

    Args:
        q: queries [B, Hq, Sq, D], in the dtypes of `flashmask_attention`. Query i stands at position i + Skv - Sq.
        k: keys [B, Hkv, Skv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h * Hkv // Hq.
        v: values [B, Hkv, Skv, Dv].
        q_keep: bool [B, Hq, Sq], True where the head keeps the query.
        k_keep: bool [B, Hkv, Skv], True where the head keeps the key.
        scale: factor on q @ k^T; None is D ** -0.5.
        mask: what else hides: causal with n = 1 column, of batch 1 or B and heads 1, Hkv or Hq, as packed documents,
            trees, padding and windows have it. None is nothing.
        softcap: as in `flashmask_attention`.
        sinks: as in `flashmask_attention`.
        deterministic: as in `flashmask_attention`.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]. A dropped query, and one with no visible key, has
        out 0 and passes no gradient to q, k and v; dropped keys and values get none.

    Raises:
        TypeError: `q_keep` or `k_keep` is not a bool tensor, or an argument of `flashmask_attention` has another type.
        ValueError: shapes or devices do not fit, or `mask` has another form.

    Example:
        >>> import torch
        >>> from flashmask_hf.sparse import qk_sparse_attention
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> keep = torch.tensor([True, False] * 4).expand(1, 2, 8)
        >>> qk_sparse_attention(q, k, v, keep, keep)[0, 0, :, 0] == 0
        tensor([False,  True, False,  True, False,  True, False,  True])
    """
    _check(q, k, v, "q_keep", q_keep, "k_keep", k_keep)
    check_keep(q_keep, k_keep)
    hidden_from = first_hidden_rows(mask, q_keep, k_keep)
    # Two buckets, of which the second, the dropped, sees nothing.
    columns, q_order, k_order = sort_sparse((~q_keep).byte(), (~k_keep).byte(), hidden_from, 2, False, 1)
    q_kept, k_kept = (keep.sum(-1, dtype=torch.int32) for keep in (q_keep, k_keep))
    return _attend(q, k, v, columns, (q_order, q_kept), (k_order, k_kept), scale, softcap, sinks, deterministic)


def hash_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bucket: Tensor,
    k_bucket: Tensor,
    *,
    scale: float | None = None,
    exclude_self: bool = False,
    mask: FlashMask | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    n_buckets: int | None = None,
) -> Tensor:
    """Causal attention between queries and keys of one bucket (Pagliardini et al. 2023, section 3.2).

    All collisions count, wherever in the row they are; Reformer's chunks miss some. Differentiable in q, k, v and
    sinks, not in the buckets.

    Args:
        q: queries [B, Hq, Sq, D], in the dtypes of `flashmask_attention`. Query i stands at position i + Skv - Sq.
        k: keys [B, Hkv, Skv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h * Hkv // Hq.
        v: values [B, Hkv, Skv, Dv].
        q_bucket: int [B, Hq, Sq], any integers.
        k_bucket: int [B, Hkv, Skv].
        scale: factor on q @ k^T; None is D ** -0.5.
        exclude_self: whether a query does not see the key at its own position, as in Reformer, where q = k.
        mask: what else hides: causal with n = 1 column, of batch 1 or B and heads 1, Hkv or Hq, as packed documents,
            trees, padding and windows have it. None is nothing.
        softcap: as in `flashmask_attention`.
        sinks: as in `flashmask_attention`.
        deterministic: as in `flashmask_attention`.
        n_buckets: says that all buckets lie in 0..n_buckets - 1, as those of `lsh_buckets` do; a GPU then sorts faster,
            by counting, up to 256 of them. None says nothing.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]. A query that sees no key has out 0 and passes no
        gradient to q, k and v.

    Raises:
        TypeError: `q_bucket` or `k_bucket` is not an integer tensor, or an argument has another type.
        ValueError: shapes or devices do not fit, `mask` has another form, or a bucket lies outside 0..n_buckets - 1 (on
            a GPU an assertion of the device, which stops the program).

    Example:
        >>> import torch
        >>> from flashmask_hf.sparse import hash_sparse_attention, lsh_buckets
        >>> q, v = (torch.randn(1, 2, 8, 16) for _ in range(2))
        >>> buckets = lsh_buckets(q, 4)
        >>> hash_sparse_attention(q, q, v, buckets, buckets, n_buckets=4).shape
        torch.Size([1, 2, 8, 16])
    """
    _check(q, k, v, "q_bucket", q_bucket, "k_bucket", k_bucket)
    check_buckets(q_bucket, k_bucket)
    if n_buckets is not None:
        n_buckets = as_integer("n_buckets", n_buckets, 1, 2**31 - 1, why="None if it is not known")
    check_bool("exclude_self", exclude_self)
    hidden_from = first_hidden_rows(mask, q_bucket, k_bucket)
    columns, q_order, k_order = sort_sparse(q_bucket, k_bucket, hidden_from, n_buckets or 0, exclude_self, -1)
    return _attend(q, k, v, columns, (q_order, None), (k_order, None), scale, softcap, sinks, deterministic)


def lsh_buckets(x: Tensor, n_buckets: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Buckets of vectors by their angle: the nearest of the directions +-r of random r (Andoni et al. 2015).

    Vectors that point the same way fall into one bucket with high probability. All directions have length 1, or the
    longer ones would draw more vectors. Each head draws directions of its own, the entries of the batch share them.
    Queries and keys fall into buckets that mean the same only if hashed in one call, as shared queries and keys are.

    Args:
        x: [B, H, S, D], floating point.
        n_buckets: even, at least 2.
        generator: draws the directions, on its own device, which a GPU waits for unless it is x's; None is torch's CPU
            default.

    Returns:
        int64 [B, H, S], in 0..n_buckets - 1.

    Raises:
        TypeError: `x` is not a floating-point tensor, `n_buckets` not an int, or `generator` not a torch.Generator.
        ValueError: `x` has another number of axes or an empty one, or `n_buckets` is odd or less than 2.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise TypeError(f"x must be a floating-point tensor [B, H, S, D], got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != 4 or 0 in x.shape:
        raise ValueError(f"x must have shape [B, H, S, D] with no empty axis, got {list(x.shape)}")
    n_buckets = as_integer("n_buckets", n_buckets, 2)
    if n_buckets % 2:
        raise ValueError(f"n_buckets must be even, since directions come in pairs, got {n_buckets}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    place = torch.device("cpu") if generator is None else generator.device
    directions = torch.randn(x.shape[1], x.shape[3], n_buckets // 2, generator=generator, device=place)
    directions = torch.nn.functional.normalize(directions, dim=1)
    return nearest(x.detach(), directions.to(x.device)).long()


def _check(q: Tensor, k: Tensor, v: Tensor, q_name: str, of_q: Tensor, k_name: str, of_k: Tensor) -> None:
    """Check q, k and v, and that what is chosen of q and of k has a value for each of their rows."""
    check_tensors(q, k, v)
    if v.shape[:3] != k.shape[:3] or v.device != k.device:
        raise ValueError(
            f"v must have k's batch, heads and length, {list(k.shape[:3])}, on {k.device}; got {list(v.shape[:3])} on "
            f"{v.device}"
        )
    for tensor_name, x, name, choice in (("q", q, q_name, of_q), ("k", k, k_name, of_k)):
        if isinstance(choice, Tensor) and (choice.shape != x.shape[:-1] or choice.device != x.device):
            raise ValueError(
                f"{name} must have {tensor_name}'s shape without D, {list(x.shape[:-1])}, on {x.device}; got "
                f"{list(choice.shape)} on {choice.device}"
            )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: Tensor,
    q_place: tuple[Tensor, Tensor | None],
    k_place: tuple[Tensor, Tensor | None],
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Return attention to rows and keys that are sorted.

    Args:
        q: [B, Hq, Sq, D], not sorted yet, nor are the results.
        k: [B, Hkv, Skv, D], likewise.
        v: [B, Hkv, Skv, Dv], likewise.
        columns: int32 [B, Hq, Skv, 2], of a mask that is not causal, for the sorted rows and keys.
        q_place: order of the rows, int32 [B, Hq, Sq], and how many of it each head keeps, int32 [B, Hq] or None for
            all.
        k_place: the same of the keys.
        scale: as in `flashmask_attention`.
        softcap: as in `flashmask_attention`.
        sinks: as in `flashmask_attention`.
        deterministic: as in `flashmask_attention`.
    """
    mask = FlashMask(columns, causal=False, q_len=q.shape[2])
    call = resolve(q, k, v, mask, sinks, scale, softcap, deterministic, None)
    q, k, v = call.cast(q, k, v)
    _, *settings, deterministic = call.settings
    if call.decodes:
        return flash_attn_sparse_decode(q, k, v, sinks, columns, *q_place, *k_place, *settings)
    plan = plan_of(mask, q.shape[2])
    out, *_ = flash_attn_sparse_forward(q, k, v, sinks, columns, *plan, *q_place, *k_place, *settings, deterministic)
    return out
