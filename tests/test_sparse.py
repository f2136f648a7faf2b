"""Dynamic sparse attention against dense attention built from the definition, in the original order."""

from __future__ import annotations

import doctest
import functools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Lane, assert_within_budget, attention_inputs, lanes
from torch import Tensor

from flashmask_hf import flashmask_attention, sparse
from flashmask_hf.sparse import hash_sparse_attention, lsh_buckets, qk_sparse_attention

LANES = lanes((torch.float32, torch.bfloat16), (), (torch.bfloat16, torch.float16, torch.float32))
INTERPRETER = lanes((), (torch.float32, torch.float16), ())  # slow: one case of each sort
HEADS, KV_HEADS = 4, 2


def visible_pairs(of_q: Tensor, of_k: Tensor, exclude_self: bool = False) -> Tensor:
    """Bool [B, Hq, Sq, Skv] by the definition: bool tensors say what is kept, int tensors which bucket."""
    of_k = of_k.repeat_interleave(of_q.shape[1] // of_k.shape[1], 1)
    q_len, kv_len = of_q.shape[-1], of_k.shape[-1]
    position = torch.arange(q_len, device=of_q.device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=of_q.device)
    causal = key < position if exclude_self else key <= position
    one, other = of_q[..., :, None], of_k[..., None, :]
    return causal & ((one & other) if of_q.dtype == torch.bool else one == other)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).masked_fill(~visible, 0.0) @ v


def check(attend, of_q: Tensor, of_k: Tensor, lane: Lane, dim: int = 16, exclude_self: bool = False) -> None:
    """Output and gradients within the error budget of the dense form."""
    batch, _, q_len = of_q.shape
    q, k, v = attention_inputs(lane, batch, of_q.shape[1], of_k.shape[1], q_len, of_k.shape[-1], dim)
    of_q, of_k = of_q.to(lane.device), of_k.to(lane.device)
    visible = visible_pairs(of_q, of_k, exclude_self)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(lane.device)

    def results(function, dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out, given, weight.to(out.dtype))]

    scale = 0.3
    named = functools.partial(flashmask_attention, impl=lane.impl)
    with mock.patch.object(sparse, "flashmask_attention", named):
        got = results(lambda *x: attend(*x, of_q, of_k, scale=scale), lane.dtype)
    eager = results(lambda *x: dense(*x, visible, scale), lane.dtype)
    exact = results(lambda *x: dense(*x, visible, scale), torch.float64)
    for name, one, other, best in zip(("out", "dq", "dk", "dv"), got, eager, exact, strict=True):
        assert_within_budget(one, other, best, name)
    blind = ~visible.any(-1)
    assert not got[0][blind].any()
    assert not got[1][blind].any()


@pytest.mark.parametrize("lengths", [(63, 63), (1, 63), (130, 257)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("lane", LANES)
def test_qk_sparse(lane: Lane, share: float, lengths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q_keep, k_keep = (
        torch.rand(2, heads, length, generator=generator) < share
        for heads, length in zip((HEADS, KV_HEADS), lengths, strict=True)
    )
    check(qk_sparse_attention, q_keep, k_keep, lane)


@pytest.mark.parametrize("lane", LANES)
def test_heads_that_keep_all_or_nothing(lane: Lane) -> None:
    keep = torch.zeros(1, 4, 150, dtype=torch.bool)
    keep[:, 0] = True
    keep[:, 2, ::7] = True
    check(qk_sparse_attention, keep, keep, lane)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("lengths", [(63, 63), (130, 257)], ids=str)
@pytest.mark.parametrize("buckets", [1, 2, 16, 400])
@pytest.mark.parametrize("lane", LANES)
def test_hash_sparse(lane: Lane, buckets: int, lengths: tuple[int, int], exclude_self: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q_bucket, k_bucket = (
        torch.randint(-3, buckets - 3, (2, heads, length), generator=generator)
        for heads, length in zip((HEADS, KV_HEADS), lengths, strict=True)
    )

    def attend(*args, **more):
        return hash_sparse_attention(*args, exclude_self=exclude_self, **more)

    check(attend, q_bucket, k_bucket, lane, exclude_self=exclude_self)


@pytest.mark.parametrize("lane", INTERPRETER)
def test_in_the_interpreter(lane: Lane) -> None:
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(1, 2, 70, generator=generator) < 0.5
    check(qk_sparse_attention, keep, keep[:, :1], lane)
    bucket = torch.randint(0, 4, (1, 2, 70), generator=generator)
    check(hash_sparse_attention, bucket, bucket[:, :1], lane)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_collision_is_covered(data) -> None:
    """Rows of one-hot values read the softmax weights back: those of exactly the pairs of the definition are not 0."""
    length = data.draw(st.integers(1, 20))
    buckets = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=2 * length, max_size=2 * length)))
    q_bucket, k_bucket = buckets.view(2, 1, 1, length)
    q = torch.zeros(1, 1, length, 8, dtype=torch.float64)
    values = torch.eye(length, dtype=torch.float64)[None, None]
    weights = hash_sparse_attention(q, q, values, q_bucket, k_bucket)
    assert torch.equal(weights != 0, visible_pairs(q_bucket, k_bucket))


def test_buckets_are_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 500, 16, generator=generator)
    buckets = lsh_buckets(x, 8, generator=torch.Generator().manual_seed(1))
    assert buckets.shape == (2, 3, 500)
    assert sorted(buckets.unique().tolist()) == list(range(8))
    again = lsh_buckets(x * 7.5, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, buckets)
    opposite = lsh_buckets(-x, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(opposite, (buckets + 4) % 8)
    near = lsh_buckets(x + 0.02 * torch.randn(x.shape), 8, generator=torch.Generator().manual_seed(1))
    assert (near == buckets).float().mean() > 0.9
    assert not torch.equal(lsh_buckets(x[:, :1], 8), lsh_buckets(x[:, :1], 8))  # drawn anew


KEEP = torch.ones(1, 2, 6, dtype=torch.bool)
LONG = KEEP.long()
X = torch.randn(1, 2, 6, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: qk_sparse_attention(X, X, X, KEEP.long(), KEEP), TypeError, "q_keep must be a tensor of bool"),
        (lambda: qk_sparse_attention(X, X, X, KEEP, KEEP.tolist()), TypeError, "k_keep must be a tensor of bool"),
        (lambda: qk_sparse_attention(X, X, X, KEEP[..., :5], KEEP), ValueError, r"q_keep must .*q's .*\[1, 2, 6\]"),
        (lambda: qk_sparse_attention(X, X, X, KEEP, KEEP[:, :1]), ValueError, r"k_keep must .*k's .*\[1, 1, 6\]"),
        (lambda: qk_sparse_attention(X, X, X, KEEP.to("meta"), KEEP), ValueError, "q_keep .* on cpu; got .*meta"),
        (lambda: hash_sparse_attention(X, X, X, KEEP.float(), KEEP.long()), TypeError, "q_bucket must be a tensor"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG[:, :, 1:]), ValueError, "k_bucket must have k's"),
        (lambda: lsh_buckets(KEEP, 4), TypeError, "x must be a floating-point tensor"),
        (lambda: lsh_buckets(X[0], 4), ValueError, r"x must have shape \[B, H, S, D\]"),
        (lambda: lsh_buckets(X, 4.0), TypeError, "n_buckets must be an int, got float"),
        (lambda: lsh_buckets(X, 5), ValueError, "n_buckets must be even"),
        (lambda: lsh_buckets(X, 0), ValueError, "n_buckets must be even"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_docstrings() -> None:
    result = doctest.testmod(sparse)
    assert result.attempted
    assert not result.failed
