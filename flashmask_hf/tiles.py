"""Classification of the tiles of a mask's score matrix: hidden, partial or visible."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from flashmask_hf.intervals import causal_starts, hidden_intervals

HIDDEN, PARTIAL, VISIBLE = 0, 1, 2
"""Class of a tile: skipped, masked element by element, or computed without mask code."""


def classify_tiles(indices: Tensor, causal: bool, q_len: int, block: tuple[int, int]) -> Tensor:
    """Classify each tile by the extremes of the intervals in its columns (FlashMask, equation 4).

    A tile that only two intervals together hide is PARTIAL; so is one that reaches past the last key, unless hidden.

    Args:
        indices: int32 [B, Hm, Skv, n] as in `FlashMask`.
        causal: as in `FlashMask`.
        q_len: number of query rows Sq.
        block: tile size (query rows, key columns).

    Returns:
        Tensor: int8 [B, Hm, ceil(Sq / block[0]), ceil(Skv / block[1])] of HIDDEN, PARTIAL, VISIBLE.

    Raises:
        Exception: `block` is not two positive ints.
    """
    try:
        block_q, block_kv = map(operator.index, block)
    except (TypeError, ValueError):
        raise TypeError(f"block must be two ints, (query rows, key columns), got {block!r}") from None
    if block_q < 1 or block_kv < 1:
        raise ValueError(f"block must be two sizes of at least 1, (query rows, key columns), got {block}")
    kv_len, device = indices.shape[2], indices.device
    # A larger tile is the same tile; positions past it would not fit int32.
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len + 1)
    n_q, n_kv = -(-q_len // block_q), -(-kv_len // block_kv)
    first = torch.arange(n_q, device=device, dtype=torch.int32).view(n_q, 1) * block_q
    last = (first + block_q).clamp(max=q_len)  # exclusive
    left = torch.arange(n_kv, device=device, dtype=torch.int32) * block_kv
    hidden = torch.zeros(*indices.shape[:2], n_q, n_kv, dtype=torch.bool, device=device)
    touched = (left + block_kv > kv_len).expand_as(hidden).clone()
    for start, end in hidden_intervals(indices, causal, q_len):
        start_min, start_max = _tile_extremes(start, block_kv, n_kv)
        end_min, end_max = _tile_extremes(end, block_kv, n_kv)
        hidden |= (first >= start_max) & (last <= end_min)
        touched |= (first < end_max) & (last > start_min)
    if causal:
        seen_from_min, seen_from_max = _tile_extremes(causal_starts(q_len, kv_len, device), block_kv, n_kv)
        hidden |= last <= seen_from_min
        touched |= first < seen_from_max
    tiles = torch.where(touched, PARTIAL, VISIBLE).masked_fill_(hidden, HIDDEN)
    return tiles.to(torch.int8)


def _tile_extremes(values: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of `values` [..., Skv] over tiles of `block` columns, two tensors [..., 1, count]."""
    missing = count * block - values.shape[-1]
    if missing:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], -1)
    tiles = values.unflatten(-1, (count, block))
    return tiles.amin(-1).unsqueeze(-2), tiles.amax(-1).unsqueeze(-2)
