"""Masks of packed documents from the formats of other libraries: cumulative lengths, and position ids that restart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flashmask_hf._numbers import check_bool, check_tensor
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, batch_integers, device_of, from_array, key_count
from flashmask_hf.masks._columns import key_positions, make_mask, next_flagged
from flashmask_hf.masks.documents import causal_document, document


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor,
    *,
    causal: bool = True,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Packed documents of one row, from the cumulative lengths that FlashAttention's varlen functions take.

    `from_cu_seqlens([0, 2, 3])`, which is `causal_document([2, 1])`:

        1 . .
        1 1 .
        . . 1

    Args:
        cu_seqlens: start of each document and end of the last; a list, or an int tensor or array [documents + 1], which
            the host reads. Empty documents are left out.
        kv_len: number of keys; None is the last entry.

    Returns:
        FlashMask: indices [1, 1, kv_len, 1], causal; or [1, 1, kv_len, 2], not causal.

    Raises:
        ValueError: `cu_seqlens` does not start at 0, decreases, or holds no token or more than `kv_len`.

    Example:
        >>> from_cu_seqlens([0, 2, 3]).indices.flatten()
        tensor([2, 2, 3], dtype=torch.int32)
    """
    check_bool("causal", causal)
    edges = batch_integers("cu_seqlens", cu_seqlens, axis="documents + 1")
    if len(edges) < 2 or edges[0] != 0 or edges[-1] == 0:
        raise ValueError(f"cu_seqlens must start at 0 and end at the number of tokens, at least 1, got {edges!s:.60}")
    for at, (start, end) in enumerate(pairwise(edges)):
        if end < start:
            raise ValueError(
                f"cu_seqlens[{at + 1}] is {end}, less than the entry before, {start}; give cumulative lengths, or pass "
                "lengths to causal_document or document"
            )
    lengths = [end - start for start, end in pairwise(edges) if end > start]
    kv_len = key_count("cu_seqlens", [lengths], kv_len)
    family = causal_document if causal else document
    return family(lengths, kv_len=kv_len, q_len=q_len, device=device_of(device, cu_seqlens))


def from_position_ids(
    position_ids: Tensor, *, causal: bool = True, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Packed documents, from position ids that start again at 0 with each document.

    `from_position_ids(torch.tensor([0, 1, 0]))`, which is `causal_document([2, 1])`:

        1 . .
        1 1 .
        . . 1

    Tokens of padding with position 0 are documents of one token.

    Args:
        position_ids: int tensor or array [S] or [B, S], which the host reads; 0, 1, 2, ... per document.

    Returns:
        FlashMask: indices [B, 1, S, 1], causal; or [B, 1, S, 2], not causal. B is 1 for [S].

    Raises:
        TypeError: `position_ids` is not a tensor of integers.
        ValueError: `position_ids` has another shape, or restarts at another number than 0, as depths in trees do.

    Example:
        >>> from_position_ids(torch.tensor([0, 1, 0])).indices.flatten()
        tensor([2, 2, 3], dtype=torch.int32)
    """
    position_ids = check_tensor("position_ids", from_array(position_ids), "an integer", "[S]", "[B, S]")
    positions = torch.atleast_2d(position_ids.to(torch.int64))
    expected = torch.nn.functional.pad(positions[:, :-1] + 1, (1, 0))
    wrong = (positions != 0) & (positions != expected)
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {token}] is {int(positions[row, token])}, but must be 0, where a document starts, or "
            f"{int(expected[row, token])}, which continues it; depths in a tree need masks.tree or masks.share_question"
        )
    key = key_positions(positions.shape[-1], positions.device)[:, 0]
    starts = key - positions
    ends = next_flagged(positions[:, 1:] == 0)
    columns = (ends[:, None],) if causal else (ends[:, None], starts[:, None])
    return make_mask(*columns, causal=causal, q_len=q_len, device=device)
