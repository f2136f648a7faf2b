"""The order in which tiles of keys add to dQ when the Hopper backward is deterministic.

Tiles of keys are numbered in the order in which programs begin them, and to each tile of rows they add by these
numbers: a tile waits at the row tile's semaphore until all that come before it have added theirs. Every tile of keys
walks its rows downwards and the last keys begin first, because what they see lies ahead of those that follow, which
walk behind them, or in another document. So none waits for a tile that has not begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.layout import packed_layout
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.plan import ROWS, Plan, plan_columns

__all__ = ["DqOrder", "prepare_dq_order"]

_RESIDENT_ELEMENTS = 6 << 20
"""Elements of query rows, walked by the key tiles of all interleaved heads, that the L2 cache should hold."""


class DqOrder(NamedTuple):
    """Tensors that tell the kernel the order."""

    ranks: Tensor
    """int16, shaped like the plan's tiles: how many of a row tile's key tiles come before each one."""
    semaphores: Tensor
    """int32 zeros, one for each tile of rows of dQ: how many key tiles have added to it."""
    key_tile_order: Tensor
    """int32 [groups of the batch, key tiles of the plan]: the key tiles of a group of masks, in starting order."""
    interleaved_heads: Tensor
    """int32 [1]: key-value heads whose key tiles alternate."""


def prepare_dq_order(problem: Problem, block_m: int, interleaved: int) -> Callable[[Plan], DqOrder]:
    """Prepare the order for calls of one problem.

    Args:
        problem: layouts and settings of the calls.
        block_m: query rows of the kernel's tiles.
        interleaved: key-value heads whose key tiles alternate where dQ has no order.
    """
    batch, heads, q_len, dim = problem.q.shape
    kv_heads, kv_len = problem.k.shape[1:3]
    device = problem.q.device
    mask_batch, mask_heads, n_q, n_kv = problem.plan_shape
    groups = min(mask_heads, kv_heads)
    n_columns = -(-kv_len // plan_columns(kv_len))
    n_dq_tiles = batch * heads * (-(-q_len // ROWS) * ROWS // block_m)
    resident_tiles = _RESIDENT_ELEMENTS // (dim * ROWS * (heads // kv_heads))
    new_ranks = packed_layout(*problem.plan_shape, dtype=torch.int16, device=device).allocator()
    new_semaphores = packed_layout(n_dq_tiles, dtype=torch.int32, device=device).allocator()
    rank = Launch(
        _rank_key_tiles,
        mask_batch * mask_heads * n_q,
        n_q,
        n_kv,
        n_columns,
        mask_heads // groups,
        LANES=256,
        num_warps=4,
    )

    def make(plan: Plan) -> DqOrder:
        ranks, semaphores = new_ranks().zero_(), new_semaphores().zero_()
        key_tile_order, heads = _order_key_tiles(plan, problem.causal, groups, n_columns, interleaved, resident_tiles)
        rank(plan.tiles, plan.counts, key_tile_order, ranks)
        return DqOrder(ranks, semaphores, key_tile_order, heads)

    return make


@triton.jit
def _rank_key_tiles(tiles, counts, key_tile_order, ranks, n_q, n_kv, n_columns, group, LANES: tl.constexpr):
    """Rank the key tiles of one row tile of a plan; `ranks` are 0 at first."""
    row = tl.program_id(0).to(tl.int64)
    tiles += row * n_kv
    ranks += row * n_kv
    key_tile_order += row // n_q // group * n_columns
    visible = tl.load(counts + row * 2)
    partial = tl.load(counts + row * 2 + 1)
    for first in range(0, n_kv, LANES):
        lane = first + tl.arange(0, LANES)
        listed = (lane < visible) | ((lane >= n_kv - partial) & (lane < n_kv))
        tile = tl.load(tiles + lane, mask=listed, other=0).to(tl.int32)
        tl.store(ranks + tile, 1, mask=listed)
    tl.debug_barrier()
    before = 0
    for first in range(0, n_columns, LANES):
        lane = first + tl.arange(0, LANES)
        tile = tl.load(key_tile_order + lane, mask=lane < n_columns, other=0)
        listed = tl.load(ranks + tile, mask=lane < n_columns, other=0).to(tl.int32)
        tl.debug_barrier()
        tl.store(ranks + tile, before + tl.cumsum(listed, 0) - listed, mask=lane < n_columns)
        before += tl.sum(listed, 0)


def _order_key_tiles(
    plan: Plan, causal: bool, groups: int, n_columns: int, interleaved: int, resident_tiles: int
) -> tuple[Tensor, Tensor]:
    """Return `key_tile_order` and `interleaved_heads`, made on the device.

    The last keys go first. Under a causal mask made of blocks, where rows at the end see more tiles than any tile sees
    rows, the tiles of few rows go first instead: they reach the rows at the end first.

    More interleaved heads shorten the queues at the rows, but the L2 cache should hold the rows that they walk: the
    longest lists of all of them have about `resident_tiles` tiles, and half of that under causal masks of blocks.
    `interleaved` heads are best where some tile sees most of the rows, and under a causal mask that is not made of
    blocks: there the tiles do not meet.

    Args:
        plan: plan of the mask.
        causal: as in `FlashMask`.
        groups: groups of mask heads, those that share a key-value head.
        n_columns: key tiles of the plan.
        interleaved: heads to interleave where tiles do not meet.
        resident_tiles: tiles of rows that the L2 cache should hold.
    """
    segments = plan.segments
    lists = (segments[..., 1] - segments[..., 0]).sum(-1)[:, :, :n_columns].unflatten(1, (groups, -1)).sum(2)
    lists = lists.flatten(0, 1)
    longest = (lists.max() // (segments.shape[1] // groups)).clamp(min=1)
    meet = longest * 4 < plan.tiles.shape[2] * 3
    order = torch.arange(n_columns - 1, -1, -1, device=segments.device).repeat(len(lists), 1)
    if causal:
        meet = meet & (plan.counts.sum(-1).max() * 4 > longest * 5)
        order = n_columns - 1 - torch.where(meet, lists.flip(-1), 0).argsort(dim=-1, stable=True)
        resident_tiles //= 2
    heads = torch.where(meet, (resident_tiles + longest // 2) // longest, interleaved)
    return order.to(torch.int32), heads.clamp(min=1).to(torch.int32).view(1)
