"""Lengths and windows of any size, and symbolic ones under a compiler."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flashmask_hf import FlashMask, flashmask_attention, masks

MORE_THAN_INT32 = [2**31, 2**32 + 2, 2**64]


@pytest.mark.parametrize("window", [6, 2**31, sys.maxsize, 2**63, 2**64])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_any_size_hides_no_key(window: int, causal: bool) -> None:
    expected = (masks.causal(6) if causal else masks.full(6)).to_dense()
    assert torch.equal(masks.sliding_window(6, window, causal=causal).to_dense(), expected)
    assert torch.equal(masks.global_sliding_window(6, 1, window, causal=causal).to_dense(), expected)


@pytest.mark.parametrize("size", [6, *MORE_THAN_INT32])
def test_a_block_of_any_size_is_a_whole_document(size: int) -> None:
    assert torch.equal(masks.block_causal([6, 2], size).indices, masks.document([6, 2]).indices)
    assert torch.equal(masks.block_diffusion([6, 2], size).indices, masks.document([6, 6, 2, 2]).indices)


@pytest.mark.parametrize("length", MORE_THAN_INT32)
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("q_len", lambda n: masks.causal(4, q_len=n)),
        ("q_len", lambda n: masks.full(4, q_len=n)),
        ("q_len", lambda n: FlashMask(masks.causal(4).indices, causal=True, q_len=n)),
        ("q_len", lambda n: FlashMask(masks.causal(4).indices, causal=True).visible_intervals(n)),
        ("kv_len", masks.causal),
        ("kv_len", masks.full),
        ("kv_len", lambda n: masks.sliding_window(n, 2)),
        ("kv_len", lambda n: masks.global_sliding_window(n, 1, 2)),
        ("kv_len", lambda n: masks.prefix_lm_causal(n, 2)),
        ("kv_len", lambda n: masks.random_eviction(n)),
        ("kv_len", lambda n: masks.padding([3], kv_len=n)),
        ("kv_len", lambda n: masks.causal_document([3], kv_len=n)),
        ("kv_len", lambda n: masks.from_cu_seqlens([0, 3], kv_len=n)),
        ("the number of tokens in documents", lambda n: masks.document([1, n])),
        ("the number of tokens in lengths", lambda n: masks.blocks([1, n], [(0, n)])),
        ("the number of tokens in lengths", lambda n: masks.block_diffusion([3], 2, n)),
        ("the number of draft tokens", lambda n: masks.draft_blocks([3], [1], n)),
        ("the number of tokens in lengths and depths", lambda n: masks.draft_chains([3], [1], [n])),
        ("the number of tokens in documents", lambda n: masks.tree([(1, [n, n])])),
        ("the number of tokens in documents", lambda n: masks.prefix_lm_document([(1, n)])),
        ("the number of tokens in lengths", lambda n: masks.padding([n])),
    ],
)
def test_lengths_that_do_not_fit_int32_are_refused(length: int, name: str, build) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be (at most |in 1\.\.)2147483647, .*int32"):
        build(length)


@pytest.mark.parametrize("size", MORE_THAN_INT32)
def test_a_tile_of_any_size_is_the_whole_mask(size: int) -> None:
    assert masks.causal(6).sparsity((size, size)) == 0
    assert masks.causal(6).sparsity((1, size)) == 0
    assert masks.padding([0], kv_len=6).sparsity((size, size)) == 1


def test_symbolic_lengths_compile_once() -> None:
    """Masks of dynamic sparse attention are left out: they are made from tensors, and wait for their values."""
    families = {
        "causal": lambda n: masks.causal(n, q_len=n - 2),
        "full": lambda n: masks.full(n, q_len=n + 3),
        "sliding_window": lambda n: masks.sliding_window(n, n // 2, causal=False, q_len=n - 2),
        "global_sliding_window": lambda n: masks.global_sliding_window(n, 2, 5),
        "prefix_lm_causal": lambda n: masks.prefix_lm_causal(n, n // 2),
        "prefix_lm_document": lambda n: masks.prefix_lm_document([(2, n)]),
        "causal_document": lambda n: masks.causal_document([3, n - 3]),
        "blocks": lambda n: masks.blocks([3, n - 3], [(1, 3), (4, n - 2)]),
        "block_causal": lambda n: masks.block_causal([3, n - 3], n // 4),
        "block_diffusion": lambda n: masks.block_diffusion([3, n - 3], n // 4, 2, q_len=n),
        "draft_blocks": lambda n: masks.draft_blocks([3, n - 3], [1, 4, n - 2], n // 4),
        "draft_chains": lambda n: masks.draft_chains([3, n - 3], [1, 4, n - 2], [2, n // 4, 1]),
        "document": lambda n: masks.document([3, 4], kv_len=n),
        "from_cu_seqlens": lambda n: masks.from_cu_seqlens([0, 3, n]),
        "causal_blockwise": lambda n: masks.causal_blockwise([2, 2, n - 4]),
        "padding": lambda n: masks.padding([3, n - 1], kv_len=n),
        "tree": lambda n: masks.tree([(2, [2, n - 4])]),
        "share_question": lambda n: masks.share_question([(2, [2, n - 4])]),
        "random_eviction": masks.random_eviction,
    }
    others = {"Node", "block_diffusion_order", "draft_chains_order", "qk_sparse", "hash_sparse", "from_position_ids"}
    assert families.keys() | others == set(masks.__all__)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def build(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: family(x.shape[0]).indices.clone() for name, family in families.items()}

    for length in (30, 31, 42):
        found = build(torch.zeros(length))
        assert found.pop("random_eviction").shape == (1, 1, length, 1)
        for name, indices in found.items():
            assert torch.equal(indices, families[name](length).indices), name
    assert counter.frame_count == 1


@pytest.mark.parametrize("length", [8, 80])  # attention of few rows without gradients takes no plan
def test_attention_exports_with_a_range_of_lengths(length: int) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flashmask_attention(q, q, q, masks.sliding_window(q.shape[2], 5), impl="torch")

    dynamic = {"q": {2: torch.export.Dim("s", min=8, max=4096)}}
    exported = torch.export.export(Layer(), (torch.randn(1, 2, length, 8),), dynamic_shapes=dynamic).module()
    for q in (torch.randn(1, 2, 8, 8), torch.randn(1, 2, 130, 8)):
        torch.testing.assert_close(exported(q), Layer()(q))
