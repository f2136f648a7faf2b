"""Masks of sorted rows: causal attention among what a head keeps, or within hash buckets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmask_hf import FlashMask, masks
from flashmask_hf.tiles import HIDDEN, PARTIAL, classify_tiles


def sorted_by(key: list[int]) -> list[int]:
    """Return the stable order of positions by their keys."""
    return sorted(range(len(key)), key=lambda position: key[position])  # Python's sort is stable


def in_sorted_order(visible: Callable[[int, int], bool], q_key: list[int], k_key: list[int]) -> torch.Tensor:
    """Return the dense mask [Sq, Skv] of a predicate over original positions, with rows and columns sorted stably."""
    return torch.tensor([[visible(i, j) for j in sorted_by(k_key)] for i in sorted_by(q_key)])


sizes = st.tuples(
    st.integers(1, 2), st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), st.integers(1, 9), st.integers(1, 9)
)


withins = st.sampled_from(["nothing", "one mask", "a mask per key head", "a mask per query head"])


def other_mask(size, within: str, generator: torch.Generator) -> tuple[FlashMask | None, torch.Tensor]:
    """Return a mask that hides each key from a random row on, and these rows for every query head."""
    batch, (q_heads, k_heads), q_len, kv_len = size
    if within == "nothing":
        return None, torch.full((batch, q_heads, kv_len), q_len)
    heads = {"one mask": 1, "a mask per key head": k_heads, "a mask per query head": q_heads}[within]
    shape = (1 if heads == 1 else batch, heads, kv_len, 1)
    indices = torch.randint(0, q_len + 1, shape, generator=generator, dtype=torch.int32)
    hidden_from = indices[..., 0].repeat_interleave(q_heads // heads, 1).expand(batch, q_heads, kv_len)
    return FlashMask(indices, causal=True, q_len=q_len), hidden_from


@settings(max_examples=100)
@given(size=sizes, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 2**31), within=withins)
def test_qk_sparse_is_causal_attention_among_the_kept(size, share, seed, within):
    batch, (q_heads, k_heads), q_len, kv_len = size
    generator = torch.Generator().manual_seed(seed)
    q_keep = torch.rand(batch, q_len, q_heads, generator=generator).lt(share).transpose(1, 2)
    k_keep = torch.rand(batch, kv_len, k_heads, generator=generator).lt(share).transpose(1, 2)
    other, hidden_from = other_mask(size, within, generator)
    mask = masks.qk_sparse(q_keep, k_keep, mask=other)
    assert (mask.causal, mask.q_len, mask.indices.shape) == (False, q_len, (batch, q_heads, kv_len, 2))
    mask.validate()
    dense = mask.to_dense()
    for b in range(batch):
        for h in range(q_heads):
            q, k = q_keep[b, h].tolist(), k_keep[b, h * k_heads // q_heads].tolist()
            expected = in_sorted_order(
                lambda i, j, q=q, k=k, b=b, h=h: q[i] and k[j] and i + kv_len - q_len >= j and i < hidden_from[b, h, j],
                [not x for x in q],
                [not x for x in k],
            )
            assert torch.equal(dense[b, h], expected)


@settings(max_examples=100)
@given(
    size=sizes,
    buckets=st.lists(st.sampled_from([-(2**62), -1, 0, 3, 2**62]), min_size=1, max_size=4),
    exclude_self=st.booleans(),
    seed=st.integers(0, 2**31),
    within=withins,
)
def test_hash_sparse_is_causal_attention_within_buckets(size, buckets, exclude_self, seed, within):
    batch, (q_heads, k_heads), q_len, kv_len = size
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(buckets)
    q_bucket = values[torch.randint(len(buckets), (batch, q_len, q_heads), generator=generator)].transpose(1, 2)
    k_bucket = values[torch.randint(len(buckets), (batch, kv_len, k_heads), generator=generator)].transpose(1, 2)
    other, hidden_from = other_mask(size, within, generator)
    mask = masks.hash_sparse(q_bucket, k_bucket, exclude_self=exclude_self, mask=other)
    assert (mask.causal, mask.q_len, mask.indices.shape) == (False, q_len, (batch, q_heads, kv_len, 2))
    mask.validate()
    dense = mask.to_dense()
    for b in range(batch):
        for h in range(q_heads):
            q, k = q_bucket[b, h].tolist(), k_bucket[b, h * k_heads // q_heads].tolist()
            expected = in_sorted_order(
                lambda i, j, q=q, k=k, b=b, h=h: (
                    q[i] == k[j] and i + kv_len - q_len >= j + exclude_self and i < hidden_from[b, h, j]
                ),
                q,
                k,
            )
            assert torch.equal(dense[b, h], expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_hash_sparse_hides_a_key_whose_bucket_has_no_query(dtype):
    q_bucket = torch.tensor([[[5, 1, 5, 1]]], dtype=dtype)
    for alone in (0, 3, 9):  # below, between and above the buckets of the queries
        k_bucket = torch.tensor([[[5, alone, 1, 1]]], dtype=dtype)
        column = sorted_by(k_bucket.flatten().tolist()).index(1)
        dense = masks.hash_sparse(q_bucket, k_bucket).to_dense()[0, 0]
        assert not dense[:, column].any()
        assert dense.sum() == 2 + 1 + 1


def test_sparse_families_follow_their_inputs_device():
    keep, bucket = torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 4, dtype=torch.int32)
    assert masks.qk_sparse(keep, keep, device="meta").device.type == "meta"
    assert masks.hash_sparse(bucket, bucket, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert masks.qk_sparse(keep, keep).device.type == "cpu"
        assert masks.hash_sparse(bucket, bucket).device.type == "cpu"


def test_buckets_of_two_dtypes_are_the_same_numbers():
    q_bucket, k_bucket = torch.tensor([[[200, 0, 200, 0]]]), torch.tensor([[[0, 200, 0, 200]]])
    mask = masks.hash_sparse(q_bucket.to(torch.uint8), k_bucket.to(torch.int16))
    assert torch.equal(mask.indices, masks.hash_sparse(q_bucket, k_bucket).indices)


def test_dropped_keys_keep_the_tiles_above_their_neighbours_hidden():
    keep = torch.tensor([[[True] * 6 + [False] * 6]])
    tiles = classify_tiles(masks.qk_sparse(keep, keep).indices, False, 12, (4, 4))[0, 0]
    assert tiles.tolist() == [[PARTIAL, HIDDEN, HIDDEN], [PARTIAL, PARTIAL, HIDDEN], [HIDDEN] * 3]


def test_dropped_keys_hide_the_tiles_of_the_last_kept_and_the_first_dropped_rows():
    q_keep, k_keep = (torch.arange(12)[None, None] >= dropped for dropped in (6, 8))
    tiles = classify_tiles(masks.qk_sparse(q_keep, k_keep).indices, False, 12, (4, 4))[0, 0]
    assert (tiles[:, 1:] == HIDDEN).all()
