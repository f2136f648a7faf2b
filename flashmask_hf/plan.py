"""The plan: what every kernel needs to know of a mask, made once and shared by all layers and passes.

The score matrix is cut into tiles of `ROWS` query rows and `plan_columns(kv_len)` key columns, and each tile is hidden,
partial or visible (`mask.classify_tiles`). Three tensors hold the outcome for both directions of walking it:

* `tiles` int16 [B, Hm, Tq, Tk], for each row tile the key tiles to walk: the visible ones in ascending order from the
  front, the partial ones in ascending order from the back. What lies between is unspecified.
* `counts` int32 [B, Hm, Tq, 2], how many there are of each.
* `segments` int32 [B, Hm, Tk, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2], for each key tile the row tiles to walk as
  [start, end) ranges. Two hidden intervals, or one and a diagonal, leave at most three visible ranges and four partial
  ones, the edges. Unused ranges are empty.

The lists would grow with the square of the length; the tiles get wider instead once a row holds more than
`MAX_COLUMN_TILES` of them, so the plan stays under 64 bytes per token and mask head in rows of 256 tokens and more.
Kernels use tiles that divide the plan's, but for a forward of 192 rows, which joins lists (`kernels.plan.join_rows`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf.mask import HIDDEN, PARTIAL, VISIBLE, FlashMask, classify_tiles

__all__ = [
    "COLUMNS",
    "MAX_COLUMN_TILES",
    "PARTIAL_SEGMENTS",
    "ROWS",
    "VISIBLE_SEGMENTS",
    "Plan",
    "build_plan",
    "plan_columns",
    "plan_shapes",
]

ROWS = 128
"""Query rows of a plan tile."""
COLUMNS = 128
"""Key columns of a plan tile; a multiple of it in rows longer than `MAX_COLUMN_TILES` tiles."""
MAX_COLUMN_TILES = 3840
VISIBLE_SEGMENTS = 3
PARTIAL_SEGMENTS = 4


class Plan(NamedTuple):
    """The three tensors of a plan (see the module's text)."""

    tiles: Tensor
    counts: Tensor
    segments: Tensor


def plan_columns(kv_len: int) -> int:
    """Key columns of a plan tile in rows of `kv_len` keys."""
    return COLUMNS * -(-kv_len // (COLUMNS * MAX_COLUMN_TILES))


def plan_shapes(indices: Tensor, q_len: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The shapes of `tiles`, `counts` and `segments` for `indices` [B, Hm, Skv, n] and q_len query rows.

    Tq and Tk are at least 2, with an empty tile added where need be: the compiler makes graphs of their own for
    sizes of 1.
    """
    batch, heads, kv_len, _ = indices.shape
    n_q = torch.sym_max(2, -(-q_len // ROWS))
    n_kv = torch.sym_max(2, -(-kv_len // plan_columns(kv_len)))
    return (
        [batch, heads, n_q, n_kv],
        [batch, heads, n_q, 2],
        [batch, heads, n_kv, VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, 2],
    )


def build_plan(indices: Tensor, causal: bool, q_len: int, *, skip: bool = True) -> Plan:
    """Make a plan with torch operations, on any device.

    Args:
        indices: int32 [B, Hm, Skv, n] as in `FlashMask`.
        causal: as in `FlashMask`.
        q_len: number of query rows.
        skip: False lists hidden tiles as partial ones, so that all are walked: the paper's exactness claim (section
            4.4) is that this changes no bit, where the kernels' tiles do not depend on the lists. The portable dK
            kernel leaves out what it finds hidden in a partial tile by itself.

    Returns:
        Plan: on the device of `indices`.
    """
    tiles = classify_tiles(FlashMask(indices, causal), (ROWS, plan_columns(indices.shape[2])), q_len)
    shape, _, segment_shape = plan_shapes(indices, q_len)
    if not skip:
        tiles = tiles.masked_fill(tiles == HIDDEN, PARTIAL)
    tiles = torch.nn.functional.pad(tiles, (0, shape[3] - tiles.shape[3], 0, shape[2] - tiles.shape[2]), value=HIDDEN)
    column = torch.arange(shape[3], device=indices.device)
    # Ascending keys put visible tiles first, hidden ones in the middle and partial ones last, in descending order.
    key = torch.where(tiles == VISIBLE, column, torch.where(tiles == PARTIAL, 3 * shape[3] - column, shape[3] + column))
    counts = torch.stack([(tiles == VISIBLE).sum(-1), (tiles == PARTIAL).sum(-1)], -1)
    segments = torch.zeros(segment_shape, dtype=torch.int32, device=indices.device)
    by_column = tiles.transpose(-1, -2)
    row = torch.arange(shape[2], device=indices.device)
    slot = 0
    for kind, limit in ((VISIBLE, VISIBLE_SEGMENTS), (PARTIAL, PARTIAL_SEGMENTS)):
        inside = by_column == kind
        edge = torch.zeros_like(inside[..., :1])
        opens = inside & ~torch.cat([edge, inside[..., :-1]], -1)
        closes = inside & ~torch.cat([inside[..., 1:], edge], -1)
        opened, closed = opens.cumsum(-1), closes.cumsum(-1)
        for nth in range(1, limit + 1):
            segments[..., slot, 0] = (row * (opens & (opened == nth))).sum(-1)
            segments[..., slot, 1] = ((row + 1) * (closes & (closed == nth))).sum(-1)
            slot += 1
    return Plan(key.argsort(-1).to(torch.int16), counts.to(torch.int32), segments)
