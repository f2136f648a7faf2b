"""Masks of queries and keys sorted per head: kept ones first, or by hash bucket.

`flashmask_hf.sparse` attends under these masks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flashmask_hf._numbers import check_bool, check_tensor
from flashmask_hf.mask import FlashMask, check_fit, check_pair
from flashmask_hf.masks._arguments import Device


def qk_sparse(q_keep: Tensor, k_keep: Tensor, *, mask: FlashMask | None = None, device: Device = None) -> FlashMask:
    """Causal attention between the queries and keys that each head keeps (section 2.1; Pagliardini et al. 2023, 3.1).

    The mask is for queries in the order `(~q_keep).byte().argsort(dim=-1, stable=True)`, kept ones first, and likewise
    for keys and values. Dropped queries see nothing, and dropped keys are hidden.

    Query 1 and key 2 dropped, in the original order and as `qk_sparse` returns it:

        1 . . .        1 . . .
        . . . .        1 1 . .
        1 1 . .        1 1 1 .
        1 1 . 1        . . . .

    Args:
        q_keep: bool [B, H, Sq], True where the head keeps the query. Query row i is at position i + Skv - Sq.
        k_keep: bool [B, Hkv, Skv]. H is a multiple of Hkv: query head h reads key head h * Hkv // H.
        mask: what else is hidden, in the original order: a causal mask with n = 1 bound (documents, trees, padding,
            windows), of batch 1 or B and heads 1, Hkv or H, or None.

    Returns:
        FlashMask: indices [B, H, Skv, 2], not causal, q_len = Sq.

    Raises:
        TypeError: `q_keep` or `k_keep` is not a bool tensor, or `mask` is not a FlashMask.
        ValueError: shapes or devices do not fit, or `mask` has another form.

    Example:
        >>> q_keep, k_keep = torch.tensor([[[True, False, True, True]]]), torch.tensor([[[True, True, False, True]]])
        >>> qk_sparse(q_keep, k_keep).indices[0, 0].T
        tensor([[3, 3, 3, 3],
                [0, 1, 2, 4]], dtype=torch.int32)
    """
    check_choice("keep", q_keep, k_keep)
    return _sorted_mask((~q_keep).byte(), (~k_keep).byte(), mask, device, dropped=1)


def hash_sparse(
    q_bucket: Tensor,
    k_bucket: Tensor,
    *,
    exclude_self: bool = False,
    mask: FlashMask | None = None,
    device: Device = None,
) -> FlashMask:
    """Causal attention between queries and keys of the same bucket (section 2.1; Pagliardini et al. 2023, 3.2).

    The mask is for queries in the order `q_bucket.argsort(dim=-1, stable=True)`, and likewise for keys and values.

    Buckets 1 0 1 0 of queries and keys, in the original order and as `hash_sparse` returns it:

        1 . . .        1 . . .
        . 1 . .        1 1 . .
        1 . 1 .        . . 1 .
        . 1 . 1        . . 1 1

    Args:
        q_bucket: int [B, H, Sq], any integers; heads and positions as in `qk_sparse`.
        k_bucket: int [B, Hkv, Skv].
        exclude_self: whether the key at the query's own position is hidden, as in Reformer.
        mask: what else is hidden, as in `qk_sparse`.

    Returns:
        FlashMask: indices [B, H, Skv, 2], not causal, q_len = Sq.

    Raises:
        TypeError: buckets are no integer tensor, `exclude_self` is not a bool, or `mask` is not a FlashMask.
        ValueError: shapes or devices do not fit, or `mask` has another form.

    Example:
        >>> bucket = torch.tensor([[[1, 0, 1, 0]]])
        >>> hash_sparse(bucket, bucket).indices[0, 0].T
        tensor([[2, 2, 4, 4],
                [0, 1, 2, 3]], dtype=torch.int32)
    """
    check_choice("bucket", q_bucket, k_bucket)
    check_bool("exclude_self", exclude_self)
    return _sorted_mask(q_bucket, k_bucket, mask, device, exclude_self=exclude_self)


def _sorted_mask(q_bucket: Tensor, k_bucket: Tensor, mask: FlashMask | None, device: Device, **how: Any) -> FlashMask:
    """Return the mask of sorted rows; `how` are arguments of `sorted_columns`."""
    hidden_from = first_hidden_rows(mask, q_bucket, k_bucket)
    q_len = q_bucket.shape[-1]
    if mask is not None:
        mask.validate(q_len)
    columns, _, _ = sorted_columns(q_bucket, k_bucket, hidden_from, **how)
    return FlashMask(columns.to(device), causal=False, q_len=q_len)


def check_choice(kind: Literal["keep", "bucket"], q: Tensor, k: Tensor) -> None:
    """Raise unless q [B, H, Sq] and k [B, Hkv, Skv], bool or int by `kind`, have one device and batch, H % Hkv == 0."""
    q_name, k_name = f"q_{kind}", f"k_{kind}"
    for name, value in ((q_name, q), (k_name, k)):
        check_tensor(name, value, "a bool" if kind == "keep" else "an integer", "[B, H, S]")
    check_pair(q_name, q, k_name, k)


def first_hidden_rows(mask: FlashMask | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the row from which `mask` hides each key, int32 [B or 1, Hm, Skv], or None for no mask.

    Raises a TypeError for other types, and a ValueError for a mask that is not causal with n = 1 bound, or does not fit
    q [B, Hq, Sq] and k [B, Hkv, Skv].
    """
    if mask is None:
        return None
    check_fit(mask, q, k)
    if not mask.causal or mask.indices.shape[-1] != 1:
        raise ValueError(
            f"mask must be causal with n = 1 bound, got causal={mask.causal}, n = {mask.indices.shape[-1]}; use packed "
            "documents, trees, padding or causal windows of flashmask_hf.masks"
        )
    return mask.indices[..., 0]


def sorted_columns(
    q_bucket: Tensor,
    k_bucket: Tensor,
    hidden_from: Tensor | None,
    exclude_self: bool = False,
    dropped: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort queries and keys stably by bucket, int [B, Hq, Sq] and [B, Hkv, Skv], and return their mask indices.

    `hidden_from` is the result of `first_hidden_rows`. The bucket `dropped` sees nothing.

    Returns:
        Indices int32 [B, Hq, Skv, 2]; the orders of queries and keys, int64 [B, Hq, Sq] and [B, Hkv, Skv].
    """
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    common = torch.promote_types(q_bucket.dtype, k_bucket.dtype)
    q_sorted, q_order = q_bucket.to(common).contiguous().sort(dim=-1, stable=True)
    k_sorted, k_order = k_bucket.to(common).contiguous().sort(dim=-1, stable=True)
    bucket, key = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_sorted, k_order))
    start = torch.searchsorted(q_sorted, bucket)
    end = torch.searchsorted(q_sorted, bucket, right=True)
    # One ascending number per sorted query: start of its bucket (bucket numbers might overflow), then original row.
    ascending = torch.searchsorted(q_sorted, q_sorted) * (q_len + 1) + q_order

    def sorted_row(row: Tensor) -> Tensor:
        """Return the first sorted row of the key's bucket at original row `row` or later, or the end of the bucket."""
        return torch.minimum(torch.searchsorted(ascending, start * (q_len + 1) + row), end)

    first = sorted_row((key - (kv_len - q_len) + int(exclude_self)).clamp(min=0))
    if hidden_from is not None:
        by_head = hidden_from.repeat_interleave(heads // hidden_from.shape[1], 1).expand(batch, heads, kv_len)
        end = sorted_row(by_head.gather(-1, key))
    if dropped >= 0:
        end = torch.where(bucket == dropped, start, end)
        first = first.masked_fill(bucket == dropped, q_len)
    # first >= end hides all rows.
    return torch.stack([end, first], -1).to(torch.int32), q_order, k_order
