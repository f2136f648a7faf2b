"""Masks from cumulative lengths and from position ids are those of `causal_document` and `document`."""

from __future__ import annotations

import functools
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashmask_hf import FlashMask, masks

documents = st.lists(st.integers(1, 6), min_size=1, max_size=6)
quick = settings(max_examples=50)


def family(causal: bool):
    return masks.causal_document if causal else masks.document


def same(mask: FlashMask, other: FlashMask) -> bool:
    return mask.causal == other.causal and mask.q_len == other.q_len and torch.equal(mask.indices, other.indices)


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


@quick
@given(documents, st.booleans(), st.integers(0, 3), st.booleans(), st.data())
def test_cumulative_lengths_are_documents(lengths, causal, filler, as_tensor, data):
    total = sum(lengths)
    q_len = data.draw(st.integers(1, total + filler))
    cu_seqlens = [0, *accumulate(lengths)]
    if data.draw(st.booleans()):  # documents without tokens
        cu_seqlens = sorted([*cu_seqlens, *data.draw(st.lists(st.sampled_from(cu_seqlens), max_size=3))])
    given_ = torch.tensor(cu_seqlens, dtype=torch.int32) if as_tensor else cu_seqlens
    mask = masks.from_cu_seqlens(given_, causal=causal, kv_len=total + filler, q_len=q_len)
    assert same(mask, family(causal)(lengths, kv_len=total + filler, q_len=q_len))
    assert same(masks.from_cu_seqlens(given_, causal=causal), family(causal)(lengths))


@quick
@given(st.lists(documents, min_size=1, max_size=3), st.booleans(), st.data())
def test_position_ids_are_documents(rows, causal, data):
    width = max(map(sum, rows))
    filled = [row + [1] * (width - sum(row)) for row in rows]  # padding of position 0: a document of one token each
    q_len = data.draw(st.integers(1, width))
    given_ = torch.stack([positions(row) for row in filled])
    assert same(masks.from_position_ids(given_, causal=causal, q_len=q_len), family(causal)(filled, q_len=q_len))
    assert same(masks.from_position_ids(given_[0].int(), causal=causal), family(causal)(filled[0]))


def test_masks_of_tensors_live_where_the_tensors_do():
    cu_seqlens, position_ids = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 0, 1])
    for mask in (
        masks.from_cu_seqlens(cu_seqlens, device="meta"),
        masks.from_position_ids(position_ids, device="meta"),
    ):
        assert mask.device.type == "meta"
    with torch.device("meta"):
        assert masks.from_cu_seqlens([0, 3, 5]).device.type == "cpu"
        assert masks.from_position_ids(position_ids).device.type == "cpu"


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_numpy_arrays_are_tensors(dtype):
    for build, values in [
        (masks.from_cu_seqlens, [0, 3, 5]),
        (masks.from_position_ids, [[0, 1, 2, 0], [0, 1, 0, 1]]),
        (masks.causal_document, [[2, 2], [3, 1]]),
        (masks.document, [3, 2]),
        (masks.padding, [5, 3]),
        (functools.partial(masks.prefix_lm_causal, 5), [1, 3]),
        (lambda places: masks.random_eviction(3, evict_from=places), [[[1, 3, 3]]]),
    ]:
        array = np.array(values, dtype=dtype)
        array.flags.writeable = False
        assert same(build(array), build(torch.tensor(values))), build
    with pytest.raises(TypeError, match=r"cu_seqlens must be an integer tensor .* got torch.float32"):
        masks.from_cu_seqlens(np.ones(3, dtype=np.float32))
    assert same(masks.prefix_lm_causal(5, np.int64(3)), masks.prefix_lm_causal(5, 3))


def test_a_symbolic_prefix_is_no_array():
    def indices(x):
        return masks.prefix_lm_causal(x.shape[0], x.shape[0] // 2).indices + 0

    compiled = torch.compile(indices, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(8)), masks.prefix_lm_causal(8, 4).indices)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: masks.from_cu_seqlens([3, 5]), ValueError, r"cu_seqlens must start at 0 .* got \[3, 5\]"),
        (lambda: masks.from_cu_seqlens([]), ValueError, r"cu_seqlens is empty; give numbers \[documents \+ 1\]"),
        (lambda: masks.from_cu_seqlens([0, 0]), ValueError, r"end at the number of tokens, at least 1, got \[0, 0\]"),
        (lambda: masks.from_cu_seqlens([0, 5, 3]), ValueError, r"cu_seqlens\[2\] is 3, less than the entry before, 5"),
        (lambda: masks.from_cu_seqlens(torch.tensor([0, -1, 3])), ValueError, r"cu_seqlens\[1\] must be at least 0"),
        (lambda: masks.from_cu_seqlens([0, 5], kv_len=4), ValueError, r"cu_seqlens holds 5 tokens, more than kv_len"),
        (lambda: masks.from_cu_seqlens(torch.ones(3)), TypeError, r"cu_seqlens must be an integer tensor"),
        (lambda: masks.from_cu_seqlens(torch.tensor([[0, 3]])), ValueError, r"must have shape \[documents \+ 1\]"),
        (lambda: masks.from_cu_seqlens([0, 3], causal="no"), TypeError, r"causal must be True or False, got 'no'"),
        (lambda: masks.from_position_ids([0, 1]), TypeError, r"position_ids must be an integer tensor .* got list"),
        (lambda: masks.from_position_ids(torch.zeros(3, 1, 2).int()), ValueError, r"must have shape .* \[3, 1, 2\]"),
        (lambda: masks.from_position_ids(torch.tensor([0, 1, 2, 1])), ValueError, r"\[0, 3\] is 1, .* tree"),
        (lambda: masks.from_position_ids(torch.tensor([[0, 1], [0, 2]])), ValueError, r"position_ids\[1, 1\] is 2, "),
        (lambda: masks.from_position_ids(torch.arange(200).to(torch.int8)), ValueError, r"\[0, 128\] is -128, but"),
        (lambda: masks.from_position_ids(torch.tensor([0, 1]), causal=None), TypeError, r"causal must be True or"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(build, error, message):
    with pytest.raises(error, match=message):
        build()
