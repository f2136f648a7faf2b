"""Attention dropout: one pattern, whatever computes it, and seeds that are drawn outside of the operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tools.support import (
    FAMILIES,
    HEADS,
    KV_HEADS,
    Lane,
    attention_inputs,
    batch_and_heads,
    check,
    covering,
    lanes,
)
from tools.tiny import assert_exact
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashmask_hf import FlashMask, flashmask_attention, keep_attention, masks
from flashmask_hf._call import call
from flashmask_hf._call.arguments import Arguments
from flashmask_hf._call.implementations import Request, choose
from flashmask_hf.dropout import dropout_pattern, shard_seed, threshold_of

CPU, INTERPRETER, GPU = (torch.float32,), (torch.float32,), (torch.bfloat16, torch.float32)
LANES = lanes(CPU, INTERPRETER, GPU)
QUICK = [
    pytest.param(name, id=name, marks=[pytest.mark.full] * (name not in ("sliding_window", "causal_blockwise")))
    for name in FAMILIES
]


def seed_of(number: int, device: str = "cpu") -> Tensor:
    return torch.tensor([2**40 * number + 12345], device=device)


def shard(seed: Tensor, q_len: int, first_head: int = 3) -> Tensor:
    """Return a seed of a shard whose blocks of rows are in reversed order."""
    return shard_seed(seed, first_head, torch.arange(-(-q_len // 16)).flip(0) + 2)


@pytest.mark.parametrize(
    ("family", "lane", "lengths"),
    [
        *covering(1, FAMILIES, lanes(CPU, (), GPU), [(113, 113), (63, 257)]),
        *covering(1, QUICK, lanes((), INTERPRETER, ()), [(63, 130)]),
    ],
)
def test_family(family: str, lane: Lane, lengths: tuple[int, int]) -> None:
    """Results and gradients are those of eager code with the explicit pattern."""
    q_len, kv_len = lengths
    mask = FAMILIES[family](kv_len, q_len).to(lane.device)
    inputs = attention_inputs(lane, *batch_and_heads(mask), q_len, kv_len, 16)
    check(lane, *inputs, mask, dropout=0.3, dropout_seed=seed_of(1, lane.device))


@pytest.mark.parametrize("lane", LANES)
def test_softcap_sinks_and_the_seed_of_a_shard(lane: Lane) -> None:
    sinks = torch.randn(2, generator=torch.Generator().manual_seed(2)).to(lane.device).requires_grad_()
    mask = masks.padding([60, 90], kv_len=90, device=lane.device)
    seed = shard(seed_of(2, lane.device), 90)
    q, k, v = attention_inputs(lane, 2, 2, 1, 90, 90, 16)
    check(lane, q, k, v, mask, sinks=sinks, softcap=3.0, dropout=0.1, dropout_seed=seed)


def test_the_reference_thins_the_softmax() -> None:
    lane = Lane("reference", "cpu", torch.float64)
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 40, 40, 8)
    mask, seed = masks.causal_document([15, 25]), seed_of(3)
    kept = dropout_pattern(0.3, seed, 2, HEADS, 40, 40)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = (q @ keys.mT * 8**-0.5).masked_fill(~mask.to_dense(40), float("-inf"))
    expected = (scores.softmax(-1) * kept / 0.7) @ values
    out, lse = flashmask_attention(q, k, v, mask, dropout=0.3, dropout_seed=seed, return_lse=True, impl="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("heads", [(2, 2, 1), (4, 2, 4)], ids=str)
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_every_implementation_drops_the_same_pairs(lane: Lane, heads: tuple[int, int, int]) -> None:
    """With values of 1 for one key each, the output shows the pattern; batch entries share a mask."""
    n_heads, kv_heads, mask_heads = heads
    mask = FlashMask(torch.full((1, mask_heads, 64, 1), 70, dtype=torch.int32), causal=True, q_len=70)
    mask = mask.to(lane.device)
    q, k = (torch.zeros(2, h, n, 16, device=lane.device, dtype=lane.dtype) for h, n in ((n_heads, 70), (kv_heads, 64)))
    v = torch.eye(64, device=lane.device, dtype=lane.dtype).expand(2, kv_heads, -1, -1)
    of_shard = shard(seed_of(4, lane.device), 70)
    # The kernels read a shard's seed through a pointer: here strided, aligned to 8 bytes, and aligned to 16.
    padded = torch.cat([of_shard.new_zeros(1), of_shard])
    for seed in (seed_of(4, lane.device), of_shard.repeat_interleave(2)[::2], padded[1:], of_shard):
        out = flashmask_attention(q, k, v, mask, dropout=0.4, dropout_seed=seed, impl=lane.impl)
        kept = dropout_pattern(0.4, seed, 2, n_heads, 70, 64)
        assert torch.equal(out > 0, kept & mask.to_dense(70)[:, :1])


@pytest.mark.parametrize("lane", LANES)
def test_the_greatest_dropout(lane: Lane) -> None:
    """Its threshold fits 32 bits; no word of this seed is as great."""
    assert threshold_of(1 - 2**-53) == threshold_of(1 - 2**-32) == 2**32 - 2
    inputs = attention_inputs(lane, 1, 1, 1, 16, 16, 16)
    mask = masks.causal(16, device=lane.device)
    out = flashmask_attention(*inputs, mask, dropout=1 - 2**-53, dropout_seed=seed_of(5, lane.device), impl=lane.impl)
    assert not out.any()


def test_the_words_of_philox() -> None:
    """Known answers of Random123 for philox4x32 of 7 rounds."""
    from flashmask_hf.dropout import _philox

    for word, answer in (
        (0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (2**32 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ):
        key = torch.tensor(-1 if word else 0)
        assert " ".join(f"{int(x):08x}" for x in _philox([torch.tensor(word)] * 4, key)) == answer


def test_statistics() -> None:
    """Rates, rates of rows and correlations are those of independent draws, for fixed seeds."""
    p, n = 0.1, 512
    dropped = 1 - dropout_pattern(p, torch.tensor([123456789]), 1, 2, n, n).double()
    other = 1 - dropout_pattern(p, torch.tensor([123456790]), 1, 2, n, n).double()
    noise = dropped.numel() ** -0.5
    assert abs(dropped.mean() - p) < 3 * noise * (p * (1 - p)) ** 0.5
    for axis in (-1, -2):
        torch.testing.assert_close(dropped.mean(axis).std().item(), (p * (1 - p) / n) ** 0.5, rtol=0.1, atol=0)

    def correlation(x: Tensor, y: Tensor) -> float:
        return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].abs().item()

    for step in (1, 8, 16):
        assert correlation(dropped[..., step:], dropped[..., :-step]) < 4 * noise, step
        assert correlation(dropped[..., step:, :], dropped[..., :-step, :]) < 4 * noise, step
    assert correlation(dropped[:, 0], dropped[:, 1]) < 6 * noise
    assert correlation(dropped, other) < 4 * noise


def test_the_mean_over_seeds_is_the_result_without_dropout() -> None:
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float64), 1, HEADS, KV_HEADS, 48, 48, 8)
    attend = partial(flashmask_attention, q.detach(), k.detach(), v.detach(), masks.causal_document([20, 28]))
    plain = attend()
    errors = [attend(dropout=0.3, dropout_seed=seed_of(n)) - plain for n in range(200)]
    one, mean = errors[0].square().mean().sqrt(), torch.stack(errors).mean(0).square().mean().sqrt()
    assert mean < 1.3 * one / 200**0.5


@pytest.mark.parametrize("lane", LANES)
def test_shards_of_rows_and_heads_keep_the_pattern(lane: Lane) -> None:
    q, k, v = (x.detach() for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 96, 96, 16))
    mask, seed = masks.causal_document([40, 56], device=lane.device), seed_of(5, lane.device)
    attend = partial(flashmask_attention, dropout=0.4, impl=lane.impl)
    whole = attend(q, k, v, mask, dropout_seed=seed)
    half = attend(q[:, 2:], k[:, 1:], v[:, 1:], mask, dropout_seed=shard_seed(seed, 2, torch.arange(6)))
    assert torch.equal(half, whole[:, 2:])
    rows = torch.tensor([*range(16, 32), *range(64, 96)], device=lane.device)
    own = FlashMask.from_dense(mask.to_dense(96)[:, :, rows])
    some = attend(q[:, :, rows], k, v, own, dropout_seed=shard_seed(seed, 0, rows[::16] // 16))
    torch.testing.assert_close(some, whole[:, :, rows])


# ----- seeds


def _draws() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a layer with dropout in and after its attention, and its inputs."""
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float64), 1, HEADS, KV_HEADS, 40, 40, 8)
    mask = masks.causal_document([15, 25])

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.dropout(flashmask_attention(q, k, v, mask, dropout=0.3), 0.5)

    return layer, [q, k, v]


def _results(layer: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    for x in inputs:
        x.grad = None
    out = layer(*inputs)
    out.square().sum().backward()  # reentrant checkpoints take no torch.autograd.grad
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": keep_attention},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recomputed_layers_drop_the_same_pairs(kind: str) -> None:
    layer, inputs = _draws()
    expected = _results(layer, inputs)
    for one, other in zip(_results(partial(checkpoint, layer, **CHECKPOINTS[kind]), inputs), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("selective", marks=pytest.mark.full)])
def test_compiled_layers(backend: str, kind: str) -> None:
    """The backward has the forward's seed, and calls draw anew."""
    _, inputs = _draws()
    mask = masks.causal_document([15, 25])

    def seeded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seed = torch.randint(2**62, (1,))
        return flashmask_attention(q, k, v, mask, dropout=0.3, dropout_seed=seed), seed

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return seeded(q, k, v) if kind == "plain" else checkpoint(seeded, q, k, v, **CHECKPOINTS["selective"])

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    seeds = []
    for _ in range(2):
        out, seed = compiled(*inputs)
        expected = flashmask_attention(*inputs, mask, dropout=0.3, dropout_seed=seed, impl="reference")
        assert_exact([out], [expected])
        assert_exact(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)))
        seeds.append(int(seed))
    assert seeds[0] != seeds[1]
    if kind == "plain":
        return
    drawn = torch.compile(lambda q: flashmask_attention(q, *inputs[1:], mask, dropout=0.3), backend="aot_eager")
    assert not torch.equal(drawn(inputs[0]), drawn(inputs[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "triton"])
def test_replays_of_a_cuda_graph_draw_anew(impl: str | None) -> None:
    q, k, v = (x.detach() for x in attention_inputs(Lane("triton", "cuda", torch.bfloat16), 1, 4, 2, 256, 256, 64))
    mask = masks.causal_document([100, 156], device="cuda")
    flashmask_attention(q, k, v, mask, dropout=0.3, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashmask_attention(q, k, v, mask, dropout=0.3, impl=impl)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    torch.cuda.manual_seed(5)
    graph.replay()
    torch.cuda.manual_seed(5)
    assert not torch.equal(*results)
    assert torch.equal(out, flashmask_attention(q, k, v, mask, dropout=0.3, impl=impl))


def test_without_dropout_nothing_is_drawn_and_calls_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[Any, Any] = {}
    monkeypatch.setattr(call, "_calls", calls)
    _, inputs = _draws()
    mask, state = masks.causal(40), torch.get_rng_state()
    for seed in (None, seed_of(1)):
        flashmask_attention(*inputs, mask, dropout=0.0, dropout_seed=seed)
        flashmask_attention(*inputs, mask)
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), state)
    for few in (False, True):  # few rows are decoded only without dropout
        q = inputs[0].detach()[:, :, -1:] if few else inputs[0]
        given = q, *inputs[1:], masks.causal(40, q_len=q.shape[2])
        with torch.no_grad():
            one, other = (
                flashmask_attention(*given, dropout=0.5, dropout_seed=seed_of(1), impl=x) for x in (None, "reference")
            )
        assert_exact([one], [other])
    assert not any(one.decodes for one in calls.values())


@pytest.mark.hopper
def test_hopper_falls_back() -> None:
    request = Request(torch.device("cuda"), torch.bfloat16, 64, 64, Arguments(dropout=0.1))
    assert [one.name for one in choose(request).implementations] == ["triton"]
