"""The tile plan: which tiles of the score matrix to walk, built once per mask.

Tiles have `ROWS` query rows and `plan_columns(kv_len)` key columns, and are hidden, partial or visible. Three tensors
hold these classes for both directions of walking:

* `tiles` int16 [B, Hm, Tq, Tk], for each row tile the key tiles to walk: visible ones ascending from the front, partial
  ones ascending from the back, unspecified between.
* `counts` int32 [B, Hm, Tq, 2], the number of visible and partial tiles of each row tile.
* `segments` int32 [B, Hm, Tk, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2], for each key tile the row tiles to walk as
  [start, end) ranges. Unused ranges are empty.

Tiles get wider beyond `MAX_COLUMN_TILES`, so a plan stays under 64 bytes per token and mask head from 256 tokens on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf.tiles import HIDDEN, PARTIAL, VISIBLE, classify_tiles

ROWS = 128
"""Query rows of a plan tile."""
COLUMNS = 128
"""Keys of a plan tile; a multiple in rows longer than `MAX_COLUMN_TILES` tiles."""
MAX_COLUMN_TILES = 3840
"""Most key tiles of width `COLUMNS`."""
VISIBLE_SEGMENTS = 3
"""Most ranges of visible row tiles of a key tile."""
PARTIAL_SEGMENTS = 4
"""Most ranges of partial row tiles of a key tile."""


class Plan(NamedTuple):
    """Lists of the tiles to walk."""

    tiles: Tensor
    """int16 [B, Hm, Tq, Tk]"""
    counts: Tensor
    """int32 [B, Hm, Tq, 2]"""
    segments: Tensor
    """int32 [B, Hm, Tk, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2]"""


def plan_columns(kv_len: int) -> int:
    """Return the number of key columns of a plan tile in rows of `kv_len` keys."""
    return COLUMNS * -(-kv_len // (COLUMNS * MAX_COLUMN_TILES))


def plan_shapes(mask_shape: Sequence[Any], q_len: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the shapes of `tiles`, `counts` and `segments` of a plan, given a mask's [B, Hm, Skv, n].

    Tq and Tk are at least 2, because compilers specialize graphs for sizes of 1.
    """
    batch, heads, kv_len, _ = mask_shape
    n_q = torch.sym_max(2, -(-q_len // ROWS))
    n_kv = torch.sym_max(2, -(-kv_len // plan_columns(kv_len)))
    return (
        [batch, heads, n_q, n_kv],
        [batch, heads, n_q, 2],
        [batch, heads, n_kv, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2],
    )


def empty_plan(indices: Tensor, q_len: int) -> Plan:
    """Return an uninitialised plan of a mask with these indices."""
    dtypes = torch.int16, torch.int32, torch.int32
    shapes = plan_shapes(indices.shape, q_len)
    return Plan(*(indices.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))


def build_plan(indices: Tensor, causal: bool, q_len: int, *, skip: bool = True) -> Plan:
    """Build a plan with torch operations, on any device.

    Args:
        indices: int32 [B, Hm, Skv, n] as in `FlashMask`.
        causal: as in `FlashMask`.
        q_len: number of query rows.
        skip: False lists hidden tiles as partial tiles, which changes no bit (paper, section 4.4).
    """
    tiles = classify_tiles(indices, causal, q_len, (ROWS, plan_columns(indices.shape[2])))
    if not skip:
        tiles = tiles.masked_fill(tiles == HIDDEN, PARTIAL)
    n_q, n_kv = plan_shapes(indices.shape, q_len)[0][2:]
    tiles = torch.nn.functional.pad(tiles, (0, n_kv - tiles.shape[3], 0, n_q - tiles.shape[2]), value=HIDDEN)
    counts = torch.stack([(tiles == VISIBLE).sum(-1), (tiles == PARTIAL).sum(-1)], -1).to(torch.int32)
    return Plan(_walking_order(tiles), counts, _segments(tiles))


def _walking_order(tiles: Tensor) -> Tensor:
    """Return `Plan.tiles`, given the classes int8 [B, Hm, Tq, Tk]."""
    width = tiles.shape[-1]
    column = torch.arange(width, device=tiles.device)
    # Sorting by this puts visible tiles first, hidden ones next, partial ones last in descending order.
    place = torch.where(tiles == VISIBLE, column, torch.where(tiles == PARTIAL, 3 * width - column, width + column))
    return place.argsort(-1).to(torch.int16)


def _segments(tiles: Tensor) -> Tensor:
    """Return `Plan.segments`, given the classes int8 [B, Hm, Tq, Tk]."""
    by_column = tiles.transpose(-1, -2)
    row = torch.arange(by_column.shape[-1], device=tiles.device)
    segments = []
    for kind, limit in ((VISIBLE, VISIBLE_SEGMENTS), (PARTIAL, PARTIAL_SEGMENTS)):
        inside = by_column == kind
        edge = torch.zeros_like(inside[..., :1])
        opens = inside & ~torch.cat([edge, inside[..., :-1]], -1)
        closes = inside & ~torch.cat([inside[..., 1:], edge], -1)
        opened, closed = opens.cumsum(-1), closes.cumsum(-1)
        for nth in range(1, limit + 1):
            start = (row * (opens & (opened == nth))).sum(-1)
            end = ((row + 1) * (closes & (closed == nth))).sum(-1)
            segments.append(torch.stack([start, end], -1))
    return torch.stack(segments, -2).to(torch.int32)
