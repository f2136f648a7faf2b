"""The public functions of dynamic sparse attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flashmask_hf._call.arguments import Arguments, Inputs, check_tensors
from flashmask_hf._call.call import resolve
from flashmask_hf._call.operators import plan_of
from flashmask_hf._numbers import as_integer, check_bool, check_tensor
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks.sorted import check_choice, first_hidden_rows
from flashmask_hf.sparse.operators import (
    Places,
    flash_attn_sparse_decode,
    flash_attn_sparse_forward,
    nearest,
    sort_sparse,
)


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

    Differentiable in q, k, v and sinks. The cost is the number of tiles of kept rows and keys.

    Args:
        q: queries [B, Hq, Sq, D], as in `flashmask_attention`. Query i is at position i + Skv - Sq.
        k: keys [B, Hkv, Skv, D].
        v: values [B, Hkv, Skv, Dv].
        q_keep: bool [B, Hq, Sq], True where the head keeps the query.
        k_keep: bool [B, Hkv, Skv], True where the head keeps the key.
        scale: as in `flashmask_attention`, like `softcap`, `sinks` and `deterministic`.
        mask: what else is hidden: a causal mask with n = 1 bound, of batch 1 or B and heads 1, Hkv or Hq, or None.
        softcap: see `scale`.
        sinks: see `scale`.
        deterministic: see `scale`.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]. A query that is dropped or sees no key has out 0
        and passes on no gradient. Dropped keys and values get none.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not fit, or `mask` has another form.

    Example:
        >>> import torch
        >>> from flashmask_hf.sparse import qk_sparse_attention
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> keep = torch.tensor([True, False] * 4).expand(1, 2, 8)
        >>> qk_sparse_attention(q, k, v, keep, keep)[0, 0, :, 0] == 0
        tensor([False,  True, False,  True, False,  True, False,  True])
    """
    hidden_from = _check(q, k, v, "keep", q_keep, k_keep, mask)
    # Bucket 1, the dropped rows, sees nothing.
    columns, q_order, k_order = sort_sparse((~q_keep).byte(), (~k_keep).byte(), hidden_from, 2, False, 1)
    q_kept, k_kept = (keep.sum(-1, dtype=torch.int32) for keep in (q_keep, k_keep))
    given = Arguments(scale, softcap, None, deterministic)
    return _attend(Inputs(q, k, v, sinks, columns), Places(q_order, q_kept, k_order, k_kept), given)


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

    All collisions count, at any distance. Differentiable in q, k, v and sinks.

    Args:
        q: [B, Hq, Sq, D], as in `qk_sparse_attention`.
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        q_bucket: int [B, Hq, Sq], the bucket of each query.
        k_bucket: int [B, Hkv, Skv], the bucket of each key.
        scale: as in `qk_sparse_attention`, like `mask`, `softcap`, `sinks` and `deterministic`.
        exclude_self: whether a query ignores the key at its own position, as in Reformer, where q = k.
        mask: see `scale`.
        softcap: see `scale`.
        sinks: see `scale`.
        deterministic: see `scale`.
        n_buckets: all buckets are in 0..n_buckets - 1: a GPU sorts up to 256 faster. None allows any integers.

    Returns:
        out, as from `qk_sparse_attention`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not fit, `mask` has another form, or a bucket lies outside 0..n_buckets - 1 (a
            device-side assertion on a GPU).

    Example:
        >>> import torch
        >>> from flashmask_hf.sparse import hash_sparse_attention, lsh_buckets
        >>> q, v = (torch.randn(1, 2, 8, 16) for _ in range(2))
        >>> buckets = lsh_buckets(q, 4)
        >>> hash_sparse_attention(q, q, v, buckets, buckets, n_buckets=4).shape
        torch.Size([1, 2, 8, 16])
    """
    hidden_from = _check(q, k, v, "bucket", q_bucket, k_bucket, mask)
    if n_buckets is not None:
        n_buckets = as_integer("n_buckets", n_buckets, 1, 2**31 - 1, why="None if it is not known")
    check_bool("exclude_self", exclude_self)
    columns, q_order, k_order = sort_sparse(q_bucket, k_bucket, hidden_from, n_buckets or 0, exclude_self, -1)
    given = Arguments(scale, softcap, None, deterministic)
    return _attend(Inputs(q, k, v, sinks, columns), Places(q_order, None, k_order, None), given)


def lsh_buckets(x: Tensor, n_buckets: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Hash vectors by their angle: the bucket is the nearest of the directions +-r of random r (Andoni et al. 2015).

    Buckets of queries and keys are comparable only if one call hashes both.

    Args:
        x: [B, H, S, D], floating point.
        n_buckets: even, at least 2.
        generator: draws the directions on its own device; None is torch's CPU default. From a CPU, a GPU's host waits.

    Returns:
        int64 [B, H, S], in 0..n_buckets - 1.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: `x` has another shape, or `n_buckets` is odd or less than 2.
    """
    check_tensor("x", x, "a floating-point", "[B, H, S, D]")
    n_buckets = as_integer("n_buckets", n_buckets, 2)
    if n_buckets % 2:
        raise ValueError(f"n_buckets must be even, got {n_buckets}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    place = torch.device("cpu") if generator is None else generator.device
    directions = torch.randn(x.shape[1], x.shape[3], n_buckets // 2, generator=generator, device=place)
    directions = torch.nn.functional.normalize(directions, dim=1)
    return nearest(x.detach(), directions.to(x.device)).long()


def _check(
    q: Tensor, k: Tensor, v: Tensor, kind: Literal["keep", "bucket"], of_q: Tensor, of_k: Tensor, mask: FlashMask | None
) -> Tensor | None:
    """Check q, k, v, their keeps or buckets, and the mask; return its `first_hidden_rows`."""
    check_tensors(q, k, v)
    for name, x, choice in (("q", q, of_q), ("k", k, of_k)):
        if isinstance(choice, Tensor) and (choice.shape != x.shape[:-1] or choice.device != x.device):
            raise ValueError(
                f"{name}_{kind} must have {name}'s shape without D, {list(x.shape[:-1])}, on {x.device}; got "
                f"{list(choice.shape)} on {choice.device}"
            )
    check_choice(kind, of_q, of_k)
    return first_hidden_rows(mask, of_q, of_k)


def _attend(inputs: Inputs, places: Places, given: Arguments) -> Tensor:
    """Attend to rows in sorted order, and return the output in the original order."""
    q, k, v, sinks, columns = inputs
    mask = FlashMask(columns, causal=False, q_len=q.shape[2])
    call = resolve(q, k, v, mask, sinks, given)
    tensors = (*call.cast(q, k, v), sinks, columns)
    if call.decodes:
        return flash_attn_sparse_decode(*tensors, *places, *call.arguments)
    return flash_attn_sparse_forward(*tensors, *plan_of(mask, q.shape[2]), *places, *call.arguments)[0]
