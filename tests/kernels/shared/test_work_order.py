"""The order of work items of the last heads: those that walk more tiles of rows come first."""

from __future__ import annotations

import pytest
import torch
from tools.support import INTERPRETED, poisoned

from flashmask_hf import masks
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.kernels.portable import backward as portable_backward
from flashmask_hf.kernels.shared import work_order
from flashmask_hf.kernels.shared.work_order import prepare_work_order
from flashmask_hf.tile_plan import build_plan

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.interpreter

ROWS, BATCH, HEADS, KV_HEADS, PROGRAMS = 1200, 3, 4, 2, 30
"""1,200 rows make 10 tiles of the plan."""


@pytest.mark.parametrize("sorted_items", [1, 1000])
@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (1, KV_HEADS), (BATCH, HEADS)], ids=str)
@pytest.mark.parametrize("subtiles", [1, 2])
def test_order(monkeypatch: pytest.MonkeyPatch, subtiles: int, shape: tuple[int, int], sorted_items: int) -> None:
    """Under masks of other documents in every head, one of which hides all keys."""
    monkeypatch.setattr(work_order, "_SORTED_ITEMS", sorted_items)
    lengths = range(600, 600 + shape[0] * shape[1])
    indices = torch.cat([masks.causal_document([n, 1100 - n, 100]).indices for n in lengths]).view(*shape, ROWS, 1)
    indices[-1, -1, 500:] = 0
    plan = build_plan(indices, True, ROWS)
    q, k = torch.empty(BATCH, HEADS, ROWS, 64), torch.empty(BATCH, KV_HEADS, ROWS, 64)
    problem = problem_of(Inputs(q, k, k, None, indices), True, Arguments(1.0))
    tiles = 10 * subtiles
    unsorted, make = prepare_work_order(problem, tiles, subtiles, PROGRAMS)

    walked = (plan.segments[..., 1] - plan.segments[..., 0]).sum(-1)  # [mask batch, mask heads, 10]
    walked = walked.expand(BATCH, -1, -1) if shape[0] == 1 else walked
    if shape[1] == HEADS:
        walked = walked.view(BATCH, KV_HEADS, 2, 10).sum(2)
    walked = walked.expand(-1, KV_HEADS, -1).repeat_interleave(subtiles, 2)
    bits = [number.bit_length() for number in walked.flatten().tolist()]
    assert len(set(bits)) >= 3
    assert unsorted == max(0, BATCH * KV_HEADS - -(-sorted_items * PROGRAMS // tiles)) * tiles
    expected = sorted(range(unsorted, len(bits)), key=lambda item: (-bits[item], item))
    assert make(plan.segments).tolist() == [*expected, *range(len(bits), len(bits) + PROGRAMS)]


def test_few_heads_are_sorted() -> None:
    """Of half as many heads as programs; very many tiles of rows count as one number of bits."""
    segments = torch.zeros(1, 1, 4, 7, 2, dtype=torch.int32)
    segments[..., 0, 1] = torch.tensor([1 << 14, 1, 1 << 17, 3])
    x = torch.empty(1, 9, 512, 64)
    problem = problem_of(Inputs(x, x, x, None, torch.zeros(1, 1, 512, 1, dtype=torch.int32)), True, Arguments(1.0))
    unsorted, make = prepare_work_order(problem, 4, 1, 3)
    assert unsorted == 7 * 4
    assert make(segments).tolist() == [28, 30, 32, 34, 31, 35, 29, 33, 36, 37, 38]


def test_portable_backward_takes_items_of_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second program on, all take the sixth tile of 64 keys: only it and the first are written."""
    monkeypatch.setattr(portable_backward, "prepare_work_order", lambda *_: (1, lambda _: torch.full((9,), 5)))
    x = torch.zeros(1, 1, 640, 64, dtype=torch.float16)
    mask = masks.causal(640)
    problem = problem_of(Inputs(x, x, x, None, mask.indices), True, Arguments(1.0))
    plan = build_plan(mask.indices, True, 640)
    backward = portable_backward.prepare_backward(problem, layout_of(x), None)
    lse = torch.zeros(1, 1, 640)
    with poisoned():
        _, dk, dv, _ = backward(x, x, x, x, lse, lse, mask.indices, plan)
    for gradient in (dk, dv):
        written = gradient.isfinite().view(10, 64 * 64)
        assert written.all(1).tolist() == written.any(1).tolist() == [tile in (0, 5) for tile in range(10)]
