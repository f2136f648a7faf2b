"""Layouts of a packed row over ranks: which query rows each rank holds."""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer
from flashmask_hf.mask import FlashMask, check_mask
from flashmask_hf.parallel.exchange import exchange_of
from flashmask_hf.tile_plan import ROWS, plan_columns
from flashmask_hf.tiles import HIDDEN, classify_tiles

_BLOCKS = 1024
"""Approximate number of blocks to deal; the host needs a millisecond."""


def contiguous_rows(length: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the rows 0..length - 1 in `size` equal shards, one after another, int64 [size, length / size].

    Raises:
        TypeError: a number is not an int.
        ValueError: `size` is less than 1, `length` is negative, or not a multiple of `size`.
    """
    as_integer("length", length, 0)
    _check_length(length, size)
    return torch.arange(length, device=device).view(size, -1)


def deal_rows(mask: FlashMask, size: int) -> Tensor:
    """Deal the rows of a mask to ranks: equal numbers of rows, about equal numbers of tiles to compute.

    Each block of rows goes to the shard with the least work so far, blocks with most tiles first. A block has 128 rows;
    a multiple beyond 131,072 tokens; or the largest power of two that divides a shard. The host waits. Batch entries
    and heads share the layout. Arguments, result and errors are as in `split_rows`.
    """
    check_mask(mask)
    length = mask.kv_len
    _check_length(length, size)
    wanted = ROWS
    while wanted * _BLOCKS < length:
        wanted *= 2
    block = math.gcd(length // size, wanted)
    tiles = classify_tiles(mask.indices, mask.causal, length, (block, plan_columns(length)))
    work = (tiles != HIDDEN).sum((0, 1, 3)).tolist()
    room = len(work) // size
    shards: list[list[int]] = [[] for _ in range(size)]
    least = [(0, shard) for shard in range(size)]
    for number in sorted(range(len(work)), key=lambda x: -work[x]):
        load, shard = heapq.heappop(least)
        shards[shard].append(number)
        if len(shards[shard]) < room:
            heapq.heappush(least, (load + work[number], shard))
    blocks = torch.tensor([sorted(shard) for shard in shards], device=mask.device)
    return (blocks[..., None] * block + torch.arange(block, device=mask.device)).flatten(1)


def split_rows(mask: FlashMask, size: int, heads: int, kv_heads: int) -> Tensor:
    """Return the rows of every rank: contiguous if `exchange_of` selects heads, dealt if it selects keys.

    With heads, every rank computes all rows of its heads, so any layout is even.

    Args:
        mask: mask of a whole row, Sq = Skv = S.
        size: number of ranks.
        heads: number of query heads.
        kv_heads: number of key-value heads.

    Returns:
        Tensor: int64 [size, S / size], ascending per rank, on the device of the mask.

    Raises:
        TypeError: `mask` is not a FlashMask, or a number not an int.
        ValueError: a number is less than 1, or S is not a multiple of `size`.
    """
    check_mask(mask)
    for name, count in (("size", size), ("heads", heads), ("kv_heads", kv_heads)):
        as_integer(name, count, 1)
    if exchange_of(heads, kv_heads, size) == "heads":
        return contiguous_rows(mask.kv_len, size, mask.device)
    return deal_rows(mask, size)


def _check_length(length: int, size: int) -> None:
    """Raise unless `size` is an int of at least 1, and a row splits into `size` equal shards."""
    as_integer("size", size, 1)
    if length % size:
        raise ValueError(
            f"a row of {length} tokens does not split into {size} equal shards; set pad_to_multiple_of={ROWS * size}"
        )
