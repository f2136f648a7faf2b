"""Dynamic sparse attention against dense attention built from the definition, in the original order."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.fake_implementation import Fake, register
from tools.sparse_attention import check, visible_pairs, with_impl
from tools.support import INTERPRETED, SLOW, Lane, attention_inputs, lanes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashmask_hf import FlashMask, masks
from flashmask_hf._call.operators import plan_of
from flashmask_hf.sparse import functions, hash_sparse_attention, lsh_buckets, qk_sparse_attention
from flashmask_hf.sparse import operators as sparse_ops
from flashmask_hf.sparse.reorder import put_rows_back

LANES = lanes((torch.float32, torch.bfloat16), (), (torch.bfloat16, torch.float16, torch.float32))
INTERPRETER = lanes((), (torch.float32, torch.float16), ())  # slow: one case of each sort
HEADS, KV_HEADS = 4, 2


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


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.float32,)))
def test_dropped_rows_and_keys_are_hidden(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their tiles would be walked, though nothing of them would be seen."""
    planned: list[FlashMask] = []
    monkeypatch.setattr(functions, "plan_of", lambda mask, q_len: planned.append(mask) or plan_of(mask, q_len))
    q, k, v = attention_inputs(lane, 1, HEADS, HEADS, 40, 40, 16)
    keep = (torch.arange(40, device=lane.device) % 4 == 0).expand(1, HEADS, 40)
    qk_sparse_attention(q, k, v, keep, keep)
    assert planned[0].to_dense(40).sum() == HEADS * (10 * 11 // 2)


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

    check(hash_sparse_attention, q_bucket, k_bucket, lane, exclude_self)


@pytest.mark.parametrize(
    ("n_buckets", "dtype"), [(150, torch.int16), (300, torch.uint8)], ids=["counted", "compared in a narrow dtype"]
)
@pytest.mark.parametrize("lane", LANES)
def test_one_bucket_beside_many(lane: Lane, n_buckets: int, dtype: torch.dtype) -> None:
    """A head with all rows in one bucket, one with each in its own, one with every query where no key is."""
    bucket = torch.zeros(1, 4, 150, dtype=dtype)
    bucket[:, 1] = torch.arange(150)
    bucket[:, 2] = torch.arange(150).flip(0) // 7
    q_bucket = bucket.clone()
    q_bucket[:, 3] = 1
    check(hash_sparse_attention, q_bucket, bucket, lane, n_buckets=n_buckets)


@pytest.mark.parametrize("lane", INTERPRETER)
def test_in_the_interpreter(lane: Lane) -> None:
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(1, 2, 70, generator=generator) < 0.5
    check(qk_sparse_attention, keep, keep[:, :1], lane)
    bucket = torch.randint(0, 4, (1, 2, 70), generator=generator)
    for n_buckets in (4, None):
        check(hash_sparse_attention, bucket, bucket[:, :1], lane, n_buckets=n_buckets)


def draw_buckets(lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw three buckets of (queries, keys), [2, HEADS, Sq] and [2, KV_HEADS, Skv]."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS)
    of_q, of_k = (torch.randint(0, 3, (2, *shape), generator=generator) for shape in zip(heads, lengths, strict=True))
    return of_q, of_k


@pytest.mark.parametrize("lengths", [(9, 20), (90, 140)], ids=str)
@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16, torch.float32)))
def test_all_options_at_once(lane: Lane, attend, lengths: tuple[int, int]) -> None:
    """Values narrower than keys, softcap, sinks, a mask, own keys left out, fewer queries than keys, determinism."""
    q_len, kv_len = lengths
    if INTERPRETED and q_len > 9:
        pytest.skip("interpreter lane: short rows, it is slow")
    of_q, of_k = draw_buckets(lengths)
    hashed = attend is hash_sparse_attention
    if not hashed:
        of_q, of_k = of_q > 0, of_k > 0
    mask = masks.causal_document([kv_len // 2, kv_len - kv_len // 2], q_len=q_len)
    check(attend, of_q, of_k, lane, hashed, mask, v_dim=8, softcap=2.0, with_sinks=True, deterministic=True)


def per_head(heads: int, kv_len: int, q_len: int) -> FlashMask:
    """Each key hidden from some row on, another one for every head."""
    generator = torch.Generator().manual_seed(2)
    return FlashMask(torch.randint(0, q_len + 1, (2, heads, kv_len, 1), generator=generator).int(), causal=True)


COMPOSED = {
    "documents": lambda n, m: masks.causal_document([[n // 3, n - n // 3], [n // 2, n // 4]], kv_len=n, q_len=m),
    "tree": lambda n, m: masks.tree([(n // 4, [n // 4, (n // 8, [1, 2])]), n // 5], kv_len=n, q_len=m),
    "padding": lambda n, m: masks.padding([n, n // 2], kv_len=n, q_len=m),
    "window": lambda n, m: masks.sliding_window(n, n // 6, q_len=m),
    "per key-value head": lambda n, m: per_head(KV_HEADS, n, m),
    "per query head": lambda n, m: per_head(HEADS, n, m),
}


@pytest.mark.parametrize("lengths", [(9, 20), (61, 61), (90, 140)], ids=str)
@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16, torch.float32)))
def test_composition_with_a_mask(lane: Lane, name: str, attend, lengths: tuple[int, int]) -> None:
    """Both hide: the pairs of the definition, less those of the mask in the original order."""
    q_len, kv_len = lengths
    if INTERPRETED and q_len > 9:
        pytest.skip("interpreter lane: short rows, it is slow")
    of_q, of_k = draw_buckets(lengths)
    mask = COMPOSED[name](kv_len, q_len)
    if attend is qk_sparse_attention:
        check(attend, of_q > 0, of_k > 0, lane, mask=mask)
    else:
        check(attend, of_q, of_k, lane, name == "window", mask, n_buckets=3)


@settings(max_examples=40)
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
    assert buckets.dtype == torch.int64
    assert sorted(buckets.unique().tolist()) == list(range(8))
    again = lsh_buckets(x * 7.5, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, buckets)
    opposite = lsh_buckets(-x, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(opposite, (buckets + 4) % 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lsh_buckets(x, 8, generator=torch.Generator().manual_seed(1)), buckets)
    near = lsh_buckets(x + 0.02 * torch.randn(x.shape), 8, generator=torch.Generator().manual_seed(1))
    assert (near == buckets).float().mean() > 0.9
    assert not torch.equal(lsh_buckets(x[:, :1], 8), lsh_buckets(x[:, :1], 8))  # drawn anew


def test_many_buckets_of_narrow_vectors() -> None:
    """Their products add up in float32, with directions that are rounded as they are; one byte is too few."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 100, 16, generator=generator).bfloat16()
    directions = torch.randn(3, 16, 200, generator=generator)
    found = sparse_ops.nearest(x, directions)
    along = x.float() @ directions.bfloat16().float()
    assert torch.equal(found.long(), torch.cat([along, -along], -1).argmax(-1))
    assert found.max() > 255


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [(700, 700), (130, 900)], ids=str)
@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_hopper(dim: int, attend, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    generator = torch.Generator().manual_seed(0)
    of_q, of_k = (
        torch.randint(0, 4, (2, heads, length), generator=generator)
        for heads, length in zip((HEADS, KV_HEADS), lengths, strict=True)
    )
    mask = masks.causal_document([kv_len - 300, 300], q_len=q_len)
    lane = Lane("hopper", "cuda", torch.bfloat16)
    if attend is qk_sparse_attention:
        check(attend, of_q > 0, of_k > 0, lane, mask=mask, dim=dim)
    else:
        check(attend, of_q, of_k, lane, mask=mask, dim=dim, n_buckets=4)


def operands(lane: Lane, kept: bool) -> tuple:
    """Return arguments of the sparse operator, up to the plan and the orders; `kept` drops half of the rows."""
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 20, 33, 16, 8)
    generator = torch.Generator().manual_seed(0)
    of_q, of_k = (torch.randint(0, 2, x.shape[:3], generator=generator).byte().to(lane.device) for x in (q, k))
    columns, q_order, k_order = sparse_ops.sort_sparse(of_q, of_k, None, 2, False, 1 if kept else -1)
    q_kept, k_kept = ((x == 0).sum(-1, dtype=torch.int32) if kept else None for x in (of_q, of_k))
    sinks = torch.linspace(-1.0, 1.0, HEADS, device=lane.device).requires_grad_() if kept else None
    plan = plan_of(FlashMask(columns, causal=False), 20)
    return q, k, v, sinks, columns, *plan, q_order, q_kept, k_order, k_kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.15's own
@pytest.mark.parametrize("kept", [pytest.param(False, marks=SLOW, id="all"), pytest.param(True, id="kept")])
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_operators(lane: Lane, kept: bool) -> None:
    bucket = torch.randint(0, 3, (2, 4, 9), device=lane.device)
    hidden_from = masks.causal(7, q_len=9, device=lane.device).indices[..., 0] if kept else None
    torch.library.opcheck(sparse_ops.sort_sparse, (bucket, bucket[:, ::2, 2:], hidden_from, 3, True, -1))
    x = torch.randn(2, 4, 9, 8, device=lane.device)
    torch.library.opcheck(sparse_ops.nearest, (x, torch.randn(2, 8, 200 if kept else 3, device=lane.device)))
    given = operands(lane, kept)
    settings = (0.25, None, lane.impl, False, 0.0)
    torch.library.opcheck(sparse_ops.flash_attn_sparse_forward, (*given, *settings))
    out, lse, *ordered = sparse_ops.flash_attn_sparse_forward(*given, *settings)
    assert out.requires_grad
    assert not any(x.requires_grad for x in (lse, *ordered))
    out = out.detach()
    saved = (out, out, lse, *ordered, *given[3:])
    saved = tuple(x.detach() if isinstance(x, Tensor) else x for x in saved)
    torch.library.opcheck(sparse_ops.flash_attn_sparse_backward, (*saved, *settings))
    few = tuple(x.detach() if isinstance(x, Tensor) else x for x in (*given[:5], *given[8:]))
    torch.library.opcheck(sparse_ops.flash_attn_sparse_decode, (*few, *settings))
    torch.testing.assert_close(sparse_ops.flash_attn_sparse_decode(*few, *settings), out, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.float32,)))
def test_few_rows_without_gradients_need_no_plan(monkeypatch: pytest.MonkeyPatch, lane: Lane) -> None:
    """Generation has few rows; dropped rows and rows that see nothing are 0 there, too."""
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 3, 50, 16, 16)
    generator = torch.Generator().manual_seed(0)
    keeps = [torch.rand(x.shape[:3], generator=generator).to(lane.device) < 0.5 for x in (q, k)]
    buckets = [torch.randint(0, 4, x.shape[:3], generator=generator).to(lane.device) for x in (q, k)]
    calls = [
        lambda: qk_sparse_attention(q, k, v, keeps[0], keeps[1], softcap=3.0),
        lambda: hash_sparse_attention(q, k, v, buckets[0], buckets[1], n_buckets=4, exclude_self=True),
    ]
    want = [call().detach() for call in calls]
    monkeypatch.setattr(functions, "plan_of", None)
    with torch.no_grad():
        for call, expected in zip(calls, want, strict=True):
            torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)
    assert not want[0][~keeps[0]].any()


def test_there_are_no_second_derivatives() -> None:
    q = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(qk_sparse_attention(q, q, q, KEEP, KEEP).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


class _PlacesRows(Fake):
    """Kernels that store rows in an order themselves."""

    def forward(self, problem: Any, ordered: bool = False) -> Callable[..., Any]:
        run = self.real.forward(problem)

        def run_and_place(*tensors: Any) -> tuple[Tensor, Tensor]:
            out, lse = run(*tensors[:-1])
            return put_rows_back(out, tensors[-1]), lse

        return self._stand_in("forward", run_and_place)

    def backward(self, problem: Any, dout: Any, output: Any, ordered: bool = False) -> Callable[..., Any]:
        assert problem.arguments.deterministic
        run = self.real.backward(problem, dout, output)

        def run_and_place(*tensors: Any) -> tuple[Tensor, ...]:
            *gradients, delta = run(*tensors[:-1])
            q_order, k_order = tensors[-1]
            return *map(put_rows_back, gradients, (q_order, k_order, k_order)), delta

        return self._stand_in("backward", run_and_place)


@pytest.mark.parametrize("works", [True, False], ids=["served", "replaced"])
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.float32,)))
def test_kernels_that_put_rows_back_themselves(monkeypatch: pytest.MonkeyPatch, lane: Lane, works: bool) -> None:
    """Stand-ins for the Hopper kernels: their rows are not moved again; those of the kernels that replace them are."""
    hopper = _PlacesRows("places", lane.impl, error=None if works else RuntimeError("does not compile"))
    register(monkeypatch, hopper, Fake("following", lane.impl))
    given = operands(lane, kept=True)
    results = []
    for impl in (lane.impl, None):
        out = sparse_ops.flash_attn_sparse_forward(*given, 0.25, None, impl, True, 0.0)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), given[:4])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert hopper.ran == ["forward", "backward"]


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_dropped_rows_may_hold_anything(lane: Lane) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 60, 60, 16)
    q_keep, k_keep = (
        (torch.rand(1, heads, 60, generator=generator) < 0.4).to(lane.device) for heads in (HEADS, KV_HEADS)
    )
    weight = torch.randn(q.shape, generator=generator).to(lane.device, lane.dtype)

    def results(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        with with_impl(lane.impl):
            out = qk_sparse_attention(*given, q_keep, k_keep)
        return [out.detach(), *torch.autograd.grad(out, given, weight)]

    clean = results(q, k, v, weight)
    dropped = [~keep.unsqueeze(-1) for keep in (q_keep, k_keep, k_keep, q_keep)]
    spoilt = [
        x.detach().masked_fill(where, bad)
        for x, where, bad in zip(
            (q, k, v, weight), dropped, (float("nan"), float("inf"), float("nan"), float("nan")), strict=True
        )
    ]
    for one, other in zip(results(*spoilt), clean, strict=True):
        assert torch.equal(one, other)
    for x, where in zip(clean, (dropped[3], *dropped[:3]), strict=True):
        assert not x.masked_fill(~where, 0.0).any()


@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
def test_gradients_against_finite_differences(attend) -> None:
    """Softcap, sinks and the mask reach the attention; queries that see no key see the sink alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, sinks = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 7, 3), (1, 1, 8, 3), (1, 1, 8, 2), (2,))
    )
    of_q, of_k = (
        torch.tensor([[[0, 1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1, 0]]]),
        torch.tensor([[[1, 1, 1, 1, 0, 0, 0, 1]]]),
    )
    if attend is qk_sparse_attention:
        of_q, of_k = of_q.bool(), of_k.bool()
    mask = masks.causal_document([5, 3], q_len=7)

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, of_q, of_k, scale=0.8, mask=mask, softcap=3.0, sinks=sinks, deterministic=True)

    assert torch.autograd.gradcheck(function, (q, k, v, sinks))
    visible = visible_pairs(of_q, of_k) & mask.to_dense()
    scores = (3.0 * torch.tanh(q @ k.mT * 0.8 / 3.0)).masked_fill(~visible, float("-inf"))
    weights = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 7, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(function(q, k, v, sinks), weights @ v)
    assert (~visible.any(-1)).any()
    assert not function(q, k, v, sinks)[~visible.any(-1)].any()


@pytest.mark.parametrize("masked", [False, True], ids=["alone", "with a mask"])
@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
def test_compiles_to_one_graph(attend, masked: bool) -> None:
    """Other buckets, and as many kept rows as there happen to be, compile nothing anew."""

    def function(q, k, v, of_q, of_k, indices):
        mask = FlashMask(indices, True) if masked else None
        return attend(2 * q, k, v, of_q, of_k, mask=mask) + 1

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    indices = masks.causal_document([20, 20]).indices
    for seed, buckets in enumerate((4, 1, 40)):
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(2, h, 40, 16, generator=generator, requires_grad=True) for h in (4, 2, 2)]
        of_q, of_k = (torch.randint(0, buckets, (2, h, 40), generator=generator) for h in (4, 2))
        if attend is qk_sparse_attention:
            of_q, of_k = of_q > 1, of_k > 1
        weight = torch.randn(2, 4, 40, 16, generator=generator)
        results = [
            [out, *torch.autograd.grad(out, given, weight)]
            for out in (run(*given, of_q, of_k, indices) for run in (function, compiled))
        ]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    assert graphs.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("n_buckets", [0, 5, 300, None], ids=["qk", "counted", "many", "any"])
def test_nothing_waits_for_the_device(n_buckets: int | None) -> None:
    """Neither eagerly nor in a CUDA graph, which other buckets replay."""
    attend = qk_sparse_attention if n_buckets == 0 else hash_sparse_attention
    lane = Lane("triton", "cuda", torch.bfloat16)
    given = attention_inputs(lane, 2, HEADS, KV_HEADS, 300, 300, 64)
    weight = torch.randn_like(given[0])
    hashed = attend is hash_sparse_attention
    more = {"n_buckets": n_buckets} if hashed else {}

    def draw(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randint(0, 5, (2, heads, 300), generator=generator).cuda() for heads in (HEADS, KV_HEADS)]
        return drawn if hashed else [x > 1 for x in drawn]

    def step(of_q: Tensor, of_k: Tensor) -> list[Tensor]:
        out = attend(*given, of_q, of_k, mask=mask, deterministic=True, **more)
        return [out.detach(), *torch.autograd.grad(out, given, weight)]

    mask = masks.causal_document([100, 200], device="cuda")
    static = draw(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step(*static)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for seed in (1, 2):
        for one, other in zip(static, draw(seed), strict=True):
            one.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(captured, step(*draw(seed)), strict=True):
            assert torch.equal(one, other)


KEEP = torch.ones(1, 2, 6, dtype=torch.bool)
LONG = KEEP.long()
X = torch.randn(1, 2, 6, 8)


def masked(mask) -> None:
    qk_sparse_attention(X, X, X, KEEP, KEEP, mask=mask)
    hash_sparse_attention(X, X, X, LONG, LONG, mask=mask)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: qk_sparse_attention(None, X, X, KEEP, KEEP), TypeError, "q must be a floating-point tensor"),
        (lambda: qk_sparse_attention(X, X[0], X, KEEP, KEEP), ValueError, r"k must have shape \[B, H, S, D\]"),
        (lambda: qk_sparse_attention(X, X, X[:, :, 1:], KEEP, KEEP), ValueError, "v must have k's batch"),
        (lambda: qk_sparse_attention(X, X, X.to("meta"), KEEP, KEEP), ValueError, r"v is on meta, but q .* v\.to"),
        (lambda: qk_sparse_attention(X, X, X, KEEP, KEEP, softcap=-1.0), ValueError, "softcap must be positive"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, sinks=X), ValueError, r"sinks must have shape \[Hq\]"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, n_buckets=1), ValueError, "must lie in 0..n_buckets - 1"),
        (lambda: hash_sparse_attention(X, X, X, -LONG, LONG, n_buckets=2), ValueError, "leave n_buckets out"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, n_buckets=0), ValueError, "n_buckets must be in 1"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, n_buckets=2**70), ValueError, "n_buckets must be in 1"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, exclude_self=1), TypeError, "exclude_self must be True"),
        (lambda: masked(FlashMask(torch.full((1, 1, 6, 1), 7).int(), True)), ValueError, "must lie in 0..q_len = 0..6"),
        (lambda: masked(FlashMask(torch.full((1, 1, 6, 1), -1).int(), True)), ValueError, "must lie in 0..q_len"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, n_buckets=2.0), TypeError, "n_buckets must be an int"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG, n_buckets=True), TypeError, "must be an int, got True"),
        (lambda: masked(masks.full(6)), ValueError, "mask must be causal with n = 1 bound, got causal=False, n = 2"),
        (lambda: masked(masks.causal_blockwise([3, 3])), ValueError, "must be causal with n = 1 .* n = 2"),
        (lambda: masked(masks.random_eviction(6, heads=3)), ValueError, "3 heads; it must have 1, Hkv = 2"),
        (lambda: masked(masks.causal(6).indices), TypeError, "mask must be a FlashMask, got Tensor"),
        (lambda: masked(masks.causal(7, q_len=6)), ValueError, "mask has 7 key columns, but k and v have 6 keys"),
        (lambda: masked(masks.causal(6, q_len=5)), ValueError, "q has 6 rows, but mask was built for q_len=5"),
        (lambda: masked(masks.causal_document([[6]] * 3)), ValueError, "mask has batch 3; it must be 1 or q's batch 1"),
        (lambda: masked(masks.causal(6, device="meta")), ValueError, r"mask is on meta.*mask\.to\('cpu'\)"),
        (lambda: qk_sparse_attention(X, X, X, KEEP.long(), KEEP), TypeError, "q_keep must be a bool tensor"),
        (lambda: qk_sparse_attention(X, X, X, KEEP, KEEP.tolist()), TypeError, "k_keep must be a bool tensor"),
        (lambda: qk_sparse_attention(X, X, X, KEEP[..., :5], KEEP), ValueError, r"q_keep must .*q's .*\[1, 2, 6\]"),
        (lambda: qk_sparse_attention(X, X, X, KEEP, KEEP[:, :1]), ValueError, r"k_keep must .*k's .*\[1, 1, 6\]"),
        (lambda: qk_sparse_attention(X, X, X, KEEP.to("meta"), KEEP), ValueError, "q_keep .* on cpu; got .*meta"),
        (lambda: hash_sparse_attention(X, X, X, KEEP.float(), KEEP.long()), TypeError, "q_bucket must be an integer"),
        (lambda: hash_sparse_attention(X, X, X, LONG, LONG[:, :, 1:]), ValueError, "k_bucket must have k's"),
        (lambda: hash_sparse_attention(X, X, X, LONG, -LONG, n_buckets=2), ValueError, "leave n_buckets out"),
        (lambda: lsh_buckets(KEEP, 4), TypeError, "x must be a floating-point tensor"),
        (lambda: lsh_buckets(X[0], 4), ValueError, r"x must have shape \[B, H, S, D\]"),
        (lambda: lsh_buckets(X[:, :0], 4), ValueError, "with no empty axis"),
        (lambda: lsh_buckets(X, 4.0), TypeError, r"n_buckets must be an int, got 4\.0"),
        (lambda: lsh_buckets(X, True), TypeError, "n_buckets must be an int, got True"),
        (lambda: lsh_buckets(X, 4, generator=7), TypeError, "generator must be a torch.Generator or None"),
        (lambda: lsh_buckets(X, 5), ValueError, "n_buckets must be even"),
        (lambda: lsh_buckets(X, 0), ValueError, "n_buckets must be at least 2"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("attend", [qk_sparse_attention, hash_sparse_attention])
def test_autocast_narrows_before_rows_are_moved(attend, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    gather = sparse_ops.gather_rows
    monkeypatch.setattr(sparse_ops, "gather_rows", lambda x, *more: moved.append(x.dtype) or gather(x, *more))
    choice = KEEP if attend is qk_sparse_attention else LONG
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(X, X, X, choice, choice).dtype == torch.bfloat16
    assert moved == [torch.bfloat16] * 3


def test_docstrings() -> None:
    result = doctest.testmod(functions)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("batch", [1, 2])
def test_symbolic_sizes_fit_a_mask_made_inside(batch):
    """All sizes of q are symbolic, those of the mask are numbers."""
    lane = Lane("torch", "cpu", torch.float32)
    q, k, v = (x.detach() for x in attention_inputs(lane, batch, HEADS, KV_HEADS, 100, 100, 16))
    bucket = torch.randint(3, (batch, HEADS, 100)), torch.randint(3, (batch, KV_HEADS, 100))

    def attend(q, k, v, q_bucket, k_bucket):
        mask = FlashMask(masks.causal_document([[40, 60], [50, 50]][:batch]).indices, causal=True)
        return hash_sparse_attention(q, k, v, q_bucket, k_bucket, mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(q, k, v, *bucket), attend(q, k, v, *bucket))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls once for each
def test_few_rows_do_not_drop_gradients():
    """Neither under vmap, where a tensor does not tell of its own, nor in a graph exported without any."""
    q, k, v = (x.detach() for x in attention_inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 5, 5, 16))
    bucket = torch.randint(3, (1, HEADS, 5)), torch.randint(3, (1, KV_HEADS, 5))

    def attend(q, k, v):
        return hash_sparse_attention(q, k, v, *bucket)

    leaves = [torch.stack([x, 2 * x]).requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(torch.vmap(attend)(*leaves).square().sum(), leaves)
    alone = torch.stack([attend(*(x[i] for x in leaves)) for i in range(2)])
    for got, want in zip(found, torch.autograd.grad(alone.square().sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)
    layer = torch.nn.Module()
    layer.forward = attend
    exported = torch.export.export(layer, (q, k, v)).module()
    with pytest.raises(RuntimeError, match="traced or exported without gradients"):
        exported(q.requires_grad_(), k, v).sum().backward()
