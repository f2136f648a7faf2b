"""The counting sort of queries and keys by bucket, against the sort by torch."""

from __future__ import annotations

import pytest
import torch
from tools.support import HEADS, KV_HEADS, Lane, covering, lanes, poisoned

from flashmask_hf.masks import sorted as sorted_masks
from flashmask_hf.sparse import operators as sparse_ops

CASES = [
    (1, None, -1, False, (torch.int64, torch.int64)),
    (2, None, 1, False, (torch.uint8, torch.uint8)),
    (2, KV_HEADS, 1, False, (torch.uint8, torch.int8)),
    (13, None, -1, True, (torch.int32, torch.uint8)),
    (13, 1, -1, False, (torch.uint8, torch.int64)),
    (200, HEADS, -1, True, (torch.int16, torch.int16)),
    (256, None, -1, False, (torch.uint8, torch.int32)),
]
"""n_buckets, hidden_heads, dropped, exclude_self, and the dtypes of both buckets."""


@pytest.mark.parametrize(
    ("lane", "block", "lengths", "case"),
    covering(
        2, lanes((), (torch.float32,), (torch.float32,)), [512, 64], [(1, 1), (1, 130), (140, 130), (128, 64)], CASES
    ),
)
def test_sorting_is_as_in_torch(
    monkeypatch: pytest.MonkeyPatch,
    lane: Lane,
    block: int,
    lengths: tuple[int, int],
    case: tuple[int, int | None, int, bool, tuple[torch.dtype, torch.dtype]],
) -> None:
    """Orders and columns are those of torch, whether a head's rows are one block or several."""
    from flashmask_hf.sparse.kernels import sort

    n_buckets, hidden_heads, dropped, exclude_self, dtypes = case
    chosen = sort._block
    monkeypatch.setattr(sort, "_block", lambda n_buckets: min(block, chosen(n_buckets)))
    generator = torch.Generator().manual_seed(0)
    q_bucket, k_bucket = (
        torch.randint(0, n_buckets, (2, length, heads), generator=generator).to(lane.device, dtype).transpose(1, 2)
        for heads, length, dtype in zip((HEADS, KV_HEADS), lengths, dtypes, strict=True)
    )
    hidden_from = None
    if hidden_heads is not None:
        shape = (1 if hidden_heads == HEADS else 2, hidden_heads, lengths[1], 2)
        hidden_from = torch.randint(0, lengths[0] + 1, shape, generator=generator).int().to(lane.device)[..., 0]
    expected = sorted_masks.sorted_columns(q_bucket, k_bucket, hidden_from, exclude_self=exclude_self, dropped=dropped)
    with poisoned():
        got = sort.sorted_columns(
            q_bucket, k_bucket, hidden_from, n_buckets, exclude_self=exclude_self, dropped=dropped
        )
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, other)


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.float32,)))
def test_buckets_that_queries_and_keys_share(lane: Lane) -> None:
    """They are sorted once; yet the orders are two tensors, as an operator's results must not share memory."""
    from flashmask_hf.sparse.kernels import sort

    bucket = torch.zeros(2, 3, 100, dtype=torch.int64, device=lane.device)
    once, twice = (len(sort.sort_by_bucket(bucket, keys, 9)[2]) for keys in (bucket, bucket.clone()))
    assert twice - 1 == 2 * (once - 1)
    for layout in ("contiguous", "tokens outermost"):
        bucket = torch.randint(0, 9, (2, 3, 100), generator=torch.Generator().manual_seed(0)).to(lane.device)
        if layout == "tokens outermost":
            bucket = bucket.transpose(1, 2).contiguous().transpose(1, 2)
        with poisoned():
            columns, q_order, k_order = sparse_ops.sort_sparse(bucket, bucket, None, 9, True, -1)
        expected, order, _ = sorted_masks.sorted_columns(bucket, bucket, None, exclude_self=True)
        assert torch.equal(columns, expected)
        assert torch.equal(q_order, order)
        assert torch.equal(k_order, order)
        assert q_order.data_ptr() != k_order.data_ptr()
