"""Exchanges around one attention call.

* "heads" (DeepSpeed Ulysses, arXiv:2309.14509): an all-to-all gives every rank all rows of some heads, and another
  gives the rows back.
* "keys": every rank gathers all keys and values, and computes its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from flashmask_hf.parallel.collectives import all_gather, all_to_all
from flashmask_hf.parallel.split import RowSplit


def exchange_of(
    heads: int, kv_heads: int, size: int, wanted: Literal["heads", "keys"] | None = None
) -> Literal["heads", "keys"]:
    """Return the exchange that sends less data, if heads allow both.

    Elements sent per token and rank, times (size - 1) / size, are 2 Hq + 2 max(Hkv, size) for heads, and 2 Hkv size for
    keys.

    Args:
        heads: number of query heads, Hq.
        kv_heads: number of key-value heads, Hkv.
        size: number of ranks.
        wanted: the exchange to return; None chooses.

    Raises:
        ValueError: `wanted` is "heads", and the heads do not divide among the ranks.
    """
    divides = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    if wanted == "heads" and not divides:
        raise ValueError(
            f"exchange='heads' needs {size} ranks to divide the {heads} query heads, and to divide or be divided by "
            f"the {kv_heads} key-value heads; use exchange='keys'"
        )
    if wanted is not None:
        return wanted
    return "heads" if divides and heads + max(kv_heads, size) <= size * kv_heads else "keys"


def spread_kv_heads(x: Tensor, split: RowSplit) -> Tensor:
    """Repeat key-value heads [B, Hkv, S, D] if there are fewer than ranks."""
    repeats = split.group.size // x.shape[1]
    return x.repeat_interleave(repeats, 1) if repeats > 1 else x


def rows_to_heads(tensors: Sequence[Tensor], split: RowSplit) -> list[Tensor]:
    """Exchange this rank's rows of all heads, [B, H, S / N, D] each, for all rows of its heads, [B, H / N, S, D].

    The exchange of a tensor overlaps with the copies of the others.
    """
    parts = [x.transpose(1, 2).unflatten(2, (split.group.size, -1)).movedim(2, 0) for x in tensors]  # [N, B, S / N, ..]
    waits = [all_to_all(x, split.group) for x in parts]
    return [_all_rows(wait, split) for wait in waits]


def _all_rows(wait: Callable[[], Tensor], split: RowSplit) -> Tensor:
    rows = wait().movedim(0, 1).flatten(1, 2)  # [B, S, H / N, D]
    if split.places is not None:
        rows = rows.index_select(1, split.places)
    return rows.transpose(1, 2)


def heads_to_rows(x: Tensor, split: RowSplit) -> Tensor:
    """Exchange all rows of this rank's heads, [B, H / N, S, D], for its rows of all heads, [B, S / N, H, D]."""
    rows = x.transpose(1, 2)
    if split.order is not None:
        rows = rows.index_select(1, split.order)
    parts = all_to_all(rows.unflatten(1, (split.group.size, -1)).movedim(1, 0), split.group)()
    return parts.movedim(0, 2).flatten(2, 3)


def own_heads(x: Tensor, split: RowSplit) -> Tensor:
    """Return this rank's heads of a tensor [Hq]."""
    return x.chunk(split.group.size)[split.group.rank]


def gather_keys(x: Tensor, split: RowSplit) -> Tensor:
    """Return the keys or values of all rows, [B, H, S, D] in the order of `split.rows`, given [B, H, S / N, D]."""
    parts = all_gather(x.transpose(1, 2), split.group)  # [N, B, S / N, H, D]
    return parts.movedim(0, 1).flatten(1, 2).transpose(1, 2)
