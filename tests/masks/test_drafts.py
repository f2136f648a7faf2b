"""Draft blocks and chains against the rules of DFlash and P-EAGLE in SpecForge, with documents, and in attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.draft_chains import chains_in_order, sees_chain
from tools.support import Lane, attention_inputs, check, lanes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashmask_hf import flashmask_attention, masks


def visible(lengths: list[int], anchors: list[int], size: int, context: int, count: int) -> list[list[bool]]:
    """Return which keys the rows of `count` blocks see: `context` keys of a packed row, then the blocks."""
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    rows = []
    for block in range(count):
        row = [False] * (context + count * size)
        if block < len(anchors):
            anchor = anchors[block]
            row[:anchor] = [own == document[anchor] for own in document[:anchor]]
            row[context + block * size : context + (block + 1) * size] = [True] * size
        rows += [row] * size
    return rows


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Draw a batch of lengths and anchors, some of them equal; a row may have no anchor, if another has one."""
    lengths = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3))
    anchors = [sorted(draw(st.lists(st.integers(0, sum(row) - 1), max_size=5))) for row in lengths]
    return lengths, anchors if any(anchors) else [[0] for _ in lengths]


@settings(max_examples=80)
@given(rows=packed_rows(), size=st.integers(1, 4))
def test_blocks_see_themselves_and_their_document_before_the_anchor(rows, size: int) -> None:
    lengths, anchors = rows
    context, count = max(map(sum, lengths)), max(map(len, anchors))
    mask = masks.draft_blocks(lengths, anchors, size)
    assert mask.q_len == count * size
    assert mask.to_dense()[:, 0].tolist() == [
        visible(*row, size, context, count) for row in zip(lengths, anchors, strict=True)
    ]


def test_anchors_and_lengths_may_be_tensors() -> None:
    lengths, anchors = [[3, 2], [4, 1]], [[1, 4], [0, 2]]
    expected = masks.draft_blocks(lengths, anchors, 2).indices
    assert torch.equal(masks.draft_blocks(torch.tensor(lengths), torch.tensor(anchors), 2).indices, expected)
    assert torch.equal(masks.draft_blocks(lengths[0], torch.tensor(anchors[0]), 2).indices, expected[:1])
    assert masks.draft_blocks([3], [1], 2, device="meta").device.type == "meta"


def test_attention_of_draft_blocks_is_as_with_the_dense_mask() -> None:
    """A row without a second block has output and gradients of zero there."""
    lengths, anchors, size = [[5, 6], [11]], [[3, 9], [4]], 3
    mask = masks.draft_blocks(lengths, anchors, size)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(2, heads, rows, 8, generator=generator, dtype=torch.float64)

    q, k, v, upstream = random(4, 6), random(2, 17), random(2, 17), random(4, 6)
    upstream[1, :, size:] = 0
    results = []
    for attend in (
        lambda q, k, v: flashmask_attention(q, k, v, mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense(), enable_gqa=True).nan_to_num(),
    ):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        results.append([out.detach(), *torch.autograd.grad((out * upstream).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not results[0][0][1, :, size:].any()


@pytest.mark.parametrize("lane", lanes((), (torch.float16,), (torch.bfloat16, torch.float32)))
def test_kernels_compute_draft_blocks(lane: Lane) -> None:
    size, step = (4, 9) if lane.device == "cpu" else (16, 5)
    mask = masks.draft_blocks([70, 41], list(range(3, 111, step)), size, device=lane.device)
    check(lane, *attention_inputs(lane, 1, 4, 2, mask.q_len or 0, 111 + (mask.q_len or 0), 64), mask)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Draw a batch of lengths, anchors and depths; a row may have no chain."""
    lengths, anchors = draw(packed_rows())
    return lengths, anchors, [[draw(st.integers(1, 4)) for _ in row] for row in anchors]


@settings(max_examples=80)
@given(rows=chains())
def test_chains_see_themselves_and_their_document_up_to_the_anchor(rows) -> None:
    """P-EAGLE's rule, `create_peagle_mask_mod` of SpecForge, with a number for each chain."""
    found = masks.draft_chains(*rows)
    found.validate()
    for own, dense in zip(zip(*rows, strict=True), found.to_dense()[:, 0], strict=True):
        order = chains_in_order(*own)
        index, depth = masks.draft_chains_order(*own)
        assert [*zip(index.tolist(), depth.tolist(), strict=True)] == [row[1:3] for row in order]
        want = torch.zeros_like(dense)
        want[: len(order), : len(order)] = torch.tensor([[sees_chain(q, k) for k in order] for q in order])
        assert torch.equal(dense, want)


def test_chains_may_be_tensors() -> None:
    rows = [[3, 2], [4, 1]], [[1, 4], [0, 2]], [[2, 1], [1, 3]]
    expected = masks.draft_chains(*rows).indices
    assert torch.equal(masks.draft_chains(*map(torch.tensor, rows)).indices, expected)
    for found in masks.draft_chains_order(*(row[0] for row in rows), device="meta"):
        assert found.device.type == "meta"
