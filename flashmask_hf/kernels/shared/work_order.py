"""The order in which programs of the backward take tiles of keys: those that walk many tiles of rows first.

A work item is a tile of keys of a key-value head, for which a program walks the tiles of rows that the plan lists, of
all query heads that share the head. A program takes its next item when it is through with the last one, or the next
program starts then, so a long item among the last ones keeps one multiprocessor busy while the others have none left.
This costs most where there are few items for each: in a batch of one row, and where many query heads share a head.

Items are numbered head after head. Those of the last heads, about `_SORTED_ITEMS` for each program that runs at a time,
are sorted by the number of bits of the number of tiles that they walk, the greatest first. Where it is equal they keep
their order, and the items before them do, too: items that run at the same time should share the rows of a head in the
L2 cache, and sorted by the number of tiles itself, those of a head would run far apart. For the same reason, at most
half as many heads as programs are sorted.

On an H200, the Hopper backward of one row of 8K tokens with 32 heads of 128, 8 of them key-value heads, took about 0.8
times as long in this order for causal documents and a shared question, and 0.9 for causal attention; the portable one,
0.9 and 0.96. A sliding window took 1.07 and 1.09 times as long: its items are alike, and to sort them is one launch
more. (`recipes/benchmarks/results/work_order_h200.csv`, which `attention.py --lengths 8192 --tokens 8192 --dims 128
--group 4` made before and after.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.tile_plan import PARTIAL_SEGMENTS, VISIBLE_SEGMENTS

__all__ = ["prepare_work_order"]

_SORTED_ITEMS = 8
"""Work items for each program that are sorted, rounded up to whole heads."""
_BITS = 16
"""Numbers of bits that are told apart, from 0 on; more than 32K tiles count as 16K."""


def prepare_work_order(
    problem: Problem, tiles: int, subtiles: int, programs: int
) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Prepare the order for calls of one problem: one launch.

    Args:
        problem: layouts and settings of the calls.
        tiles: work items of a head.
        subtiles: work items in a key tile of the plan.
        programs: programs that run at a time.

    Returns:
        (the number of items before those that are sorted, segments -> order), for `Plan.segments`. The order, int32
        [sorted items + programs], holds numbers of items, and behind them those of the places where each program finds
        that none is left.
    """
    kv_heads = problem.k.shape[1]
    mask_batch, mask_heads, _, n_kv = problem.plan_shape
    planes = problem.q.shape[0] * kv_heads
    sorted_planes = min(planes, -(-_SORTED_ITEMS * programs // tiles), -(-programs // 2))
    unsorted = (planes - sorted_planes) * tiles
    items = sorted_planes * tiles
    places = items + programs
    new_order = packed_layout(places, dtype=torch.int32, device=problem.q.device).allocator()
    launch = Launch(
        _sort_items,
        _BITS,
        unsorted, items, places, tiles, n_kv, subtiles, kv_heads, mask_batch, mask_heads,
        SEGMENTS=VISIBLE_SEGMENTS + PARTIAL_SEGMENTS, LANES=max(512, triton.next_power_of_2(places)), num_warps=16,
    )  # fmt: skip

    def make(segments: Tensor) -> Tensor:
        order = new_order()
        launch(segments, order)
        return order

    return unsorted, make


_SIZES = ["unsorted", "items", "places", "tiles", "n_kv", "subtiles", "kv_heads", "mask_batch", "mask_heads"]


@triton.jit(do_not_specialize=_SIZES)
def _sort_items(
    segments, order, unsorted, items, places, tiles, n_kv, subtiles, kv_heads, mask_batch, mask_heads,
    SEGMENTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Place the work items of one number of bits behind those of more; the first program has the greatest number.

    The places behind the items walk no tiles, so they come last.

    Tensors:
        segments: of the plan, [mask_batch, mask_heads, n_kv, SEGMENTS, 2].
        order: written, [places].
    Sizes:
        unsorted: items before those that are sorted.
        items: items that are sorted.
        places: of the order, up to LANES.
        tiles: items of a head.
        subtiles: items in a tile of the plan.
    """
    lanes = tl.arange(0, LANES)
    inside = lanes < items
    item = unsorted + lanes
    plane = item // tiles
    members = tl.maximum(mask_heads // kv_heads, 1)  # masks of the query heads that share a key-value head
    mask = plane // kv_heads % mask_batch * mask_heads + plane % kv_heads * mask_heads // kv_heads
    walked = tl.zeros_like(item)
    for member in range(members):
        at = segments + ((mask + member).to(tl.int64) * n_kv + item % tiles // subtiles) * (SEGMENTS * 2)
        for segment in tl.static_range(SEGMENTS):
            start = tl.load(at + segment * 2, mask=inside, other=0)
            walked += tl.load(at + segment * 2 + 1, mask=inside, other=0) - start
    own = tl.num_programs(0) - 1 - tl.program_id(0)
    exponent = (walked.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # below 0 for 0
    bits = tl.minimum(tl.maximum(exponent + 1, 0), tl.num_programs(0) - 1)
    before = tl.sum((bits > own).to(tl.int32), 0)
    chosen = ((lanes < places) & (bits == own)).to(tl.int32)
    tl.store(order + before + tl.cumsum(chosen, 0) - 1, item, mask=chosen != 0)
