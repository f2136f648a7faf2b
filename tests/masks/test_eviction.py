"""Random eviction: the rows that it draws, and rows given for each head."""

from __future__ import annotations

import pytest
import torch

from flashmask_hf import masks

EVICTED = torch.tensor([[[1, 4, 3, 7, 5, 6, 7], [7, 2, 7, 7, 6, 6, 7]], [[5, 5, 5, 4, 7, 7, 7], [7] * 7]])


def test_random_eviction_draws_every_later_row_equally_often():
    mask = masks.random_eviction(4, generator=torch.Generator().manual_seed(0), batch=30, heads=200)
    assert mask.indices.shape == (30, 200, 4, 1)
    mask.validate()
    for key in range(4):
        drawn = mask.indices[:, :, key, 0].flatten().bincount(minlength=5) / 6000
        expected = torch.tensor([1 / (4 - key) if row > key else 0 for row in range(5)])
        assert torch.allclose(drawn, expected, atol=0.02), key
        assert torch.equal(drawn == 0, expected == 0)


def test_random_eviction_follows_its_generator():
    one, two, other = (
        masks.random_eviction(50, generator=torch.Generator().manual_seed(seed)).indices for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    torch.manual_seed(7)
    default = masks.random_eviction(50).indices
    torch.manual_seed(7)
    assert torch.equal(default, masks.random_eviction(50).indices)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)  # 1 - 4 is no unsigned number
def test_random_eviction_takes_rows_per_head_and_keeps_the_last_queries(dtype):
    mask = masks.random_eviction(7, evict_from=EVICTED.to(dtype), q_len=3)
    expected = [
        [[[j <= i < EVICTED[b, h, j] for j in range(7)] for i in range(4, 7)] for h in range(2)] for b in range(2)
    ]
    assert torch.equal(mask.to_dense(), torch.tensor(expected))
