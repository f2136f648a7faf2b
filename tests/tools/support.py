"""Shared parts of the tests: lanes, the error budget, and a mask of every family."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf._call.call import Call

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

SLOW = [pytest.mark.full] * INTERPRETED
"""Marks of parameters that only the full lane runs in the interpreter, which is slow."""


def obstacle(lane: str) -> str | None:
    """Return why this process cannot run a lane: interpreter, gpu or hopper. None where it can."""
    if lane == "interpreter":
        return None if INTERPRETED else "set TRITON_INTERPRET=1"
    if INTERPRETED:
        return "unset TRITON_INTERPRET"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm GPU here"
    if lane == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return "the GPU is not a Hopper"
    return None


def requires(lane: str) -> None:
    """Skip the test, with the reason, unless this process can run the lane: interpreter, gpu or hopper."""
    if (reason := obstacle(lane)) is not None:
        pytest.skip(f"{lane} lane: {reason}")


@dataclass(frozen=True)
class Lane:
    """An implementation, and the device and dtype that a test runs it with."""

    impl: str
    device: str
    dtype: torch.dtype

    @property
    def id(self) -> str:
        return f"{self.impl}-{self.device}-{str(self.dtype).removeprefix('torch.')}"


def lanes(cpu: Sequence[torch.dtype], interpreter: Sequence[torch.dtype], gpu: Sequence[torch.dtype]) -> list:
    """Return test parameters: "torch" on the CPU, "triton" in the interpreter and on the GPU, in the given dtypes."""
    return [
        *(_parameter(Lane("torch", "cpu", dtype)) for dtype in cpu),
        *(_parameter(Lane("triton", "cpu", dtype), pytest.mark.interpreter) for dtype in interpreter),
        *(_parameter(Lane("triton", "cuda", dtype), pytest.mark.gpu) for dtype in gpu),
    ]


def _parameter(lane: Lane, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(lane, id=lane.id, marks=marks)


def covering(strength: int, *levels: Sequence[Any]) -> list:
    """Return every combination of levels as test parameters; those that add little to the others are marked full.

    The others hold every combination of levels of any `strength` factors. A level may be a `pytest.param` of one value.
    Where a factor is lanes, the slow ones of the interpreter alone are thinned out.
    """
    levels = tuple([x if isinstance(x, ParameterSet) else pytest.param(x) for x in factor] for factor in levels)
    combinations = list(itertools.product(*(range(len(factor)) for factor in levels)))
    parts = {c: [factor[i] for factor, i in zip(levels, c, strict=True)] for c in combinations}
    marks = {c: [mark for part in parts[c] for mark in part.marks] for c in combinations}
    slow = [c for c in combinations if any(mark.name == "interpreter" for mark in marks[c])] or [*combinations]
    held = {c: set(itertools.combinations(enumerate(c), strength)) for c in slow}
    subsets = {
        c: [x for n in range(strength + 1, len(c)) for x in itertools.combinations(enumerate(c), n)] for c in slow
    }
    used: Counter[tuple] = Counter()  # of two that hold as much, that is kept whose levels have met others least
    missing = set().union(*held.values())
    while missing:
        best = max(slow, key=lambda c: (len(held[c] & missing), -sum(used[x] for x in subsets[c])))
        missing -= held[best]
        used.update(subsets[best])
        slow.remove(best)
    return [
        pytest.param(
            *(part.values[0] for part in parts[c]),
            marks=[*marks[c], *[pytest.mark.full] * (c in slow)],
            id="-".join(str(part.values[0] if part.id is None else part.id) for part in parts[c]),
        )
        for c in combinations
    ]


def attention_inputs(
    lane: Lane,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dim: int,
    v_dim: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v that require gradients, laid out [B, S, H, D] in memory as a model makes them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim or dim))
    return tuple(
        torch.randn(batch, length, h, d, generator=generator, dtype=torch.float64)
        .to(lane.device, lane.dtype)
        .transpose(1, 2)
        .requires_grad_()
        for h, length, d in shapes
    )  # type: ignore[return-value]


def assert_within_budget(
    actual: Tensor, eager: Tensor, exact: Tensor, what: str, dtype: torch.dtype | None = None
) -> None:
    """Assert that the error against float64 is at most twice that of eager code in the same dtype, plus rounding.

    The error of a tensor is that of its worst element. Rounding is one epsilon of `dtype` (None takes the result's) and
    eight of float32 for the sums behind it, times the largest exact value.
    """
    assert actual.dtype == eager.dtype, f"{what}: dtype {actual.dtype} instead of {eager.dtype}"
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    assert not actual.isnan().any(), f"{what}: NaN"
    infinite = exact.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{what}: infinite elsewhere than it should be"
    epsilon = torch.finfo(dtype or actual.dtype).eps + 8 * torch.finfo(torch.float32).eps
    band = epsilon * exact.double().masked_fill(infinite, 0.0).abs().max()
    actual, eager, exact = (x.double().masked_fill(infinite, 0.0) for x in (actual, eager, exact))
    error, allowed = (actual - exact).abs().max(), (eager - exact).abs().max()
    assert error <= 2 * allowed + band, f"{what}: error {error:.3e}, eager's {allowed:.3e}, rounding {band:.3e}"


def rounding(sums: int, dtype: torch.dtype = torch.float32) -> float:
    """Return a bound of the difference of two results that add in other orders, relative to the largest of its kind.

    Each addition moves a result by up to half an epsilon either way, independently of the others, so that the standard
    deviation of the difference is epsilon * sqrt(sums / 6). The bound is ten of them.

    Args:
        sums: number of terms that are added up, one sum after another, on the longest way to the result.
        dtype: dtype of the sums.
    """
    return 10 * math.sqrt(sums / 6) * torch.finfo(dtype).eps


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised tensors with NaN, so that an element that a kernel fails to write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    impl: str | None,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return output, LSE and every gradient, for fixed random gradients of output and LSE.

    `options` are of `flashmask_attention`.
    """
    leaves = {"dq": q, "dk": k, "dv": v} | ({"dsinks": sinks} if sinks is not None else {})
    out, lse = flashmask_attention(q, k, v, mask, sinks=sinks, return_lse=True, impl=impl, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(out.device, lse.dtype)
    total = (out * dout).sum() + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(
    lane: Lane,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> None:
    """Assert that output, LSE and every gradient of the lane's implementation are within the error budget."""
    with poisoned():
        actual = run(q, k, v, mask, lane.impl, sinks=sinks, **options)
    assert_results(actual, *references(q, k, v, mask, sinks=sinks, **options), q.dtype)


def check_lse_of_rows_that_see_nothing(lane: Lane, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Assert that gradients ignore the gradient of the LSE of rows that see nothing, even if it is NaN."""
    mask = masks.padding([130], kv_len=200, device=lane.device)
    for sink in (None, float("-inf")):
        sinks = None if sink is None else torch.full((HEADS,), sink, device=lane.device, requires_grad=True)
        leaves = inputs if sinks is None else (*inputs, sinks)
        gradients = []
        for ignored in (float("nan"), 0.0):
            out, lse = flashmask_attention(*inputs, mask, sinks=sinks, return_lse=True, impl=lane.impl)
            dlse = torch.where(lse.isneginf(), ignored, lse)
            assert dlse[..., 130:].isnan().all() == (ignored != 0)
            gradients.append(torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)))
        for actual, expected in zip(*gradients, strict=True):
            assert torch.equal(actual, expected)


def check_upstream_of_blind_rows(lane: Lane, mask: FlashMask, *shape: int, **options: Any) -> None:
    """Assert that rows that see nothing get zero gradients and change no other, even if NaN or inf comes from upstream.

    Args:
        lane: implementation, device and dtype.
        mask: hides some rows from all keys.
        shape: as `attention_inputs` takes it.
        options: of `flashmask_attention`.
    """
    leaves = [*attention_inputs(lane, *shape), *([options["sinks"]] if options.get("sinks") is not None else [])]
    results = flashmask_attention(*leaves[:3], mask.to(lane.device), impl=lane.impl, return_lse=True, **options)
    blind = ~mask.to_dense(shape[3]).any(-1).to(lane.device)
    blind = blind.repeat_interleave(shape[1] // blind.shape[1], 1).expand(shape[0], -1, -1)
    assert blind.any()
    assert not blind.all()
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in results]
    if len(leaves) > 3:  # the gradient of lse is the sinks' own
        upstream[1] = upstream[1].masked_fill(blind, 0.0)

    def gradients(of_blind: float) -> tuple[Tensor, ...]:
        dlse = upstream[1] if len(leaves) > 3 else upstream[1].masked_fill(blind, of_blind)
        given = upstream[0].masked_fill(blind.unsqueeze(-1), of_blind), dlse
        return torch.autograd.grad(results, leaves, given, retain_graph=True)

    expected = gradients(0.0)
    assert (expected[0][blind] == 0).all()
    for value in (float("nan"), float("inf")):
        for found, right in zip(gradients(value), expected, strict=True):
            assert torch.equal(found, right), value


BLIND_ROWS: dict[str, Callable[[], FlashMask]] = {
    "causal": lambda: masks.causal(130, q_len=200),
    "causal band": lambda: FlashMask(torch.tensor([50, 83], dtype=torch.int32).expand(1, 1, 200, 2), causal=True),
    "padding": lambda: masks.padding([130], kv_len=200),
    "two intervals": lambda: FlashMask(
        torch.tensor([120, 200, 40, 41], dtype=torch.int32).expand(1, 1, 200, 4), causal=False
    ),
    "qk_sparse": lambda: masks.qk_sparse(_random_bits(1, 2, 200), _random_bits(1, 2, 200)),
    "hash_sparse": lambda: masks.hash_sparse(_buckets(1, 1, 200), _buckets(1, 1, 200) // 2),
}
"""Masks of 200 query rows for two heads, in every form of the mask indices; some rows see nothing."""


def check_low_scores(lane: Lane, mask: FlashMask, q_len: int, dim: int) -> None:
    """Assert that a row of very low scores is not taken for one that sees nothing.

    The scores lie from -2**104 to -2**107, the highest of every row at the first key that it sees.
    """
    q = torch.zeros(1, HEADS, q_len, dim, dtype=lane.dtype, device=lane.device)
    k, v = (torch.zeros(1, KV_HEADS, mask.kv_len, dim, dtype=lane.dtype, device=lane.device) for _ in range(2))
    q[..., 0] = -16.0
    k[..., 0] = 16.0 * (1 + torch.arange(mask.kv_len, device=lane.device) % 8)
    v[:, :, ::8] = 1.0
    out, lse = flashmask_attention(q, k, v, mask, scale=2.0**96, return_lse=True, impl=lane.impl)
    blind = ~mask.to_dense(q_len).any(-1).expand(1, HEADS, -1)
    torch.testing.assert_close(lse, torch.where(blind, -torch.inf, -(2.0**104)), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(out, torch.where(blind, 0.0, 1.0).to(out.dtype).unsqueeze(-1).expand(out.shape))


def references(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, *, sinks: Tensor | None = None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of `run` for eager code: in the dtype of the inputs, and in float64."""
    eager = run(q, k, v, mask, "reference", sinks=sinks, **options)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    exact = run(wide[0], wide[1], wide[2], mask, "reference", sinks=wide[3], **options)  # type: ignore[arg-type]
    return eager, exact


def assert_results(
    actual: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Assert that all results of `run` are within the error budget of inputs in `dtype`."""
    for name in actual:
        # Sinks are float32 in any call, but their gradient is a sum over the output, which is rounded to `dtype`.
        assert_within_budget(actual[name], eager[name], exact[name], name, dtype if name == "dsinks" else None)


def _lengths(kv_len: int, parts: int) -> list[int]:
    """Return about `parts` uneven document lengths that sum to kv_len."""
    cuts = sorted({kv_len * (i * i + 1) // (parts * parts + 1) for i in range(1, parts)} - {0})
    return [b - a for a, b in zip([0, *cuts], [*cuts, kv_len], strict=True)]


def _chains(tokens: int, drafts: int) -> tuple[list[int], list[int]]:
    """Return anchors among `tokens`, and depths of up to three chains that sum to `drafts`."""
    depths = _lengths(drafts, 3) if drafts else []
    return [tokens // 5, tokens // 2, tokens - 1][: len(depths)], depths


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    """Return two spans per document: its first third, and its last token."""
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    spans = [[(a, a + (b - a) // 3), (b - 1, b)] for a, b in zip(starts, ends, strict=True)]
    return [(a, b) for pair in spans for a, b in pair if a < b]


def _answers(kv_len: int) -> list[tuple[int, list[int]]]:
    """Return two questions, one with two answers and one with three, that fill kv_len tokens."""
    first = kv_len // 3
    rest = kv_len - first
    one, other = first // 4, rest // 5
    return [(first - 2 * one, [one, one]), (rest - 3 * other, [other, other - 1, other + 1])]


def _two_levels(kv_len: int) -> list[tuple[int, list]]:
    """Return the questions of `_answers`, with the last token of every answer as a child of it."""
    return [(question, [(answer - 1, [1]) for answer in answers]) for question, answers in _answers(kv_len)]


def _random_bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


def _buckets(*shape: int) -> Tensor:
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(4))


HEADS, KV_HEADS = 4, 2
EACH_HEADS = [(4, 4, 1), (4, 4, 4), (6, 2, 1), (6, 2, 2), (6, 2, 6), (3, 1, 1), (3, 1, 3)]
"""Heads, key-value heads and a mask's heads: each of multi-head, grouped and multi-query attention with each mask."""

FAMILIES: dict[str, Callable[[int, int], FlashMask]] = {
    "full": lambda n, m: masks.full(n, q_len=m),
    "causal": lambda n, m: masks.causal(n, q_len=m),
    "sliding_window": lambda n, m: masks.sliding_window(n, max(1, n // 4), q_len=m),
    "causal_document": lambda n, m: masks.causal_document(_lengths(n, 4), q_len=m),
    "document": lambda n, m: masks.document(_lengths(n, 4), q_len=m),
    "blocks": lambda n, m: masks.blocks(_lengths(n, 3), _spans(_lengths(n, 3)), q_len=m),
    "block_causal": lambda n, m: masks.block_causal(_lengths(n, 3), max(1, n // 9), q_len=m),
    "block_diffusion": lambda n, m: (
        masks.block_diffusion(_lengths(n // 2, 3), max(1, n // 17), kv_len=n, q_len=m) if n > 1 else masks.tree([1])
    ),
    "draft_chains": lambda n, m: masks.draft_chains(
        _lengths(n - n // 4, 2), *_chains(n - n // 4, n // 4), kv_len=n, q_len=m
    ),
    "share_question": lambda n, m: masks.share_question(_answers(n), q_len=m) if n > 1 else masks.tree([1]),
    "global_sliding_window": lambda n, m: masks.global_sliding_window(n, max(1, n // 16), max(1, n // 5), q_len=m),
    "causal_blockwise": lambda n, m: masks.causal_blockwise(_lengths(n, 4), q_len=m),
    "prefix_lm_causal": lambda n, m: masks.prefix_lm_causal(n, n // 3, q_len=m),
    "prefix_lm_document": lambda n, m: masks.prefix_lm_document([(x // 2, x) for x in _lengths(n, 3)], q_len=m),
    "qk_sparse": lambda n, m: masks.qk_sparse(_random_bits(2, HEADS, m), _random_bits(2, HEADS, n)),
    "hash_sparse": lambda n, m: masks.hash_sparse(_buckets(2, HEADS, m), _buckets(2, HEADS, n)),
    "random_eviction": lambda n, m: masks.random_eviction(
        n, generator=torch.Generator().manual_seed(5), heads=KV_HEADS, q_len=m
    ),
    "tree": lambda n, m: masks.tree(_two_levels(n) if n > 1 else [1], q_len=m),
    "padding": lambda n, m: masks.padding([n - n // 3, n], kv_len=n, q_len=m),
}
"""Constructors of one mask per family from (kv_len, q_len), for batches of 2 with HEADS and KV_HEADS heads."""

REPEATED = (
    "causal",
    "document",
    "block_causal",
    "block_diffusion",
    "draft_chains",
    "share_question",
    "prefix_lm_causal",
    "qk_sparse",
    "tree",
)
"""Families whose masks have the form and the kinds of tiles of another's, so that kernels run the same code."""

EACH_FAMILY = [pytest.param(name, marks=SLOW * (name in REPEATED), id=name) for name in FAMILIES]
"""Every family as a test parameter; in the interpreter, which is slow, the repeated ones are marked full."""


def batch_and_heads(mask: FlashMask) -> tuple[int, int, int]:
    """Return batch, heads and key-value heads for a mask of FAMILIES.

    They are few in the interpreter, which is slow, for a mask that all heads share.
    """
    batch, heads = mask.indices.shape[:2]
    return (batch, 2, 1) if INTERPRETED and heads == 1 else (2, HEADS, KV_HEADS)


def interpret_assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter run device assertions in this test; it leaves them out by itself."""
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def row_orders(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return random permutations of every head's rows [B, Hq, Sq] and keys [B, Hkv, Skv], int32."""
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.rand(x.shape[:3], generator=generator).argsort(-1).to(x.device, torch.int32) for x in (q, k))
    return queries, keys


def separate_rows(length: int, heads: int) -> FlashMask:
    """Show each head's keys rows of its own: the first head all keys the first rows, and so on."""
    ends = torch.arange(1, heads + 1) * length // heads
    bounds = torch.stack([ends, ends - length // heads], -1).int()  # hidden from the end of the rows on and before
    return FlashMask(bounds[None, :, None].repeat(1, 1, length, 1), False)


def _random_mask(draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int) -> FlashMask:
    """Draw a mask of columns in runs of random width; an interval may be empty, or end before it starts."""
    causal, n = draw.choice([(True, 1), (True, 2), (False, 2), (False, 4)])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    width = draw.choice([1, 7, 64, 128, 500])
    indices = torch.randint(0, q_len + 1, (batch, heads, kv_len, n), generator=generator, dtype=torch.int32)
    return FlashMask(indices[:, :, torch.arange(kv_len) // width * width], causal, q_len=q_len)


def check_random_call(seed: int, device: str, impls: list[str], dtypes: list[torch.dtype], longest: int) -> None:
    """Assert that every implementation is within the error budget for a random call, and deterministic on request.

    Args:
        seed: decides lengths up to `longest`, heads, mask, dtype, sinks and softcap.
        device: where the call runs.
        impls: the implementations.
        dtypes: the dtypes to draw from.
        longest: largest number of queries and of keys.
    """
    draw = random.Random(seed)
    batch, kv_heads, group = draw.randint(1, 3), draw.choice([1, 2]), draw.choice([1, 2, 4])
    q_len = draw.randint(1, longest)
    kv_len = q_len if draw.random() < 0.5 else draw.randint(1, longest)
    dim, dtype = draw.choice([64, 96, 128, 256]), draw.choice(dtypes)
    mask_heads = draw.choice([1, kv_heads, kv_heads * group])
    mask = _random_mask(draw, draw.choice([1, batch]), mask_heads, q_len, kv_len).to(device)
    shape = (batch, kv_heads * group, kv_heads, q_len, kv_len, dim)
    inputs = attention_inputs(Lane("reference", device, dtype), *shape, seed=seed)
    sinks = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    options: dict[str, Any] = {
        "sinks": sinks if draw.random() < 0.3 else None,
        "softcap": 20.0 if draw.random() < 0.3 else None,
    }

    expected = references(*inputs, mask, **options)
    for impl in impls:
        with poisoned():  # which also asks for deterministic algorithms
            first, second = (run(*inputs, mask, impl, **options) for _ in range(2))
        for name in first:
            assert torch.equal(first[name], second[name]), f"{impl}: {name} differs from run to run"
        for actual in (first, run(*inputs, mask, impl, **options)):
            assert_results(actual, *expected, dtype)


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each pass of attention that is computed: "forward" or "backward"."""
    passes: list[str] = []
    run = Call._run

    def recorded(call: Call, key: tuple[Any, ...], *others: Any) -> Any:
        passes.append(key[0])
        return run(call, key, *others)

    monkeypatch.setattr(Call, "_run", recorded)
    return passes


def offer_tall_tiles(monkeypatch: pytest.MonkeyPatch, tiles: int | None = None) -> None:
    """Offer the Hopper forward its tiles of 192 rows in calls of any size, not only in long ones.

    It takes them if the plan's lists have `tiles` key tiles on average; None leaves the kernel's own threshold.
    """
    from flashmask_hf.kernels.hopper import forward as hopper_forward

    monkeypatch.setattr(hopper_forward, "_TALL_QUERIES", 0)
    monkeypatch.setattr(hopper_forward, "_TALL_ROWS", 0)
    if tiles is not None:
        monkeypatch.setattr(hopper_forward, "_TALL_TILES", tiles)
