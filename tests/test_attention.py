"""Every implementation against the dense float64 oracle: output, LSE and every gradient."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.support import (
    BLIND_ROWS,
    EACH_FAMILY,
    EACH_HEADS,
    FAMILIES,
    HEADS,
    INTERPRETED,
    KV_HEADS,
    Lane,
    assert_within_budget,
    attention_inputs,
    batch_and_heads,
    check,
    check_low_scores,
    check_lse_of_rows_that_see_nothing,
    check_upstream_of_blind_rows,
    covering,
    lanes,
    run,
)

from flashmask_hf import FlashMask, flashmask_attention, masks, tile_plan, torch_internals
from flashmask_hf.tile_plan import ROWS, build_plan, plan_columns

CPU = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETER = (torch.float32, torch.float16)
GPU = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = [(1, 1), (63, 63), (113, 113), (1, 63), (63, 257), (113, 1023)]
LONG = covering(2, FAMILIES, lanes(CPU[:1], (), GPU), [(1023, 1023)])

FEW_LENGTHS = [(63, 63), (63, 257)]  # for the interpreter, and 16 bits on the CPU


@pytest.mark.parametrize(
    ("family", "lane", "lengths"),
    [
        *covering(2, FAMILIES, lanes(CPU[:1], (), GPU), LENGTHS),
        *(
            pytest.param(*x.values, marks=x.marks or [pytest.mark.full] * (n % 24 > 0), id=x.id)
            for n, x in enumerate(LONG)
        ),
        *covering(1, EACH_FAMILY, lanes((), INTERPRETER, ()), FEW_LENGTHS),
        *covering(3, FAMILIES, lanes(CPU[1:], (), ()), FEW_LENGTHS),
    ],
)
def test_family(family: str, lane: Lane, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    mask = FAMILIES[family](kv_len, q_len).to(lane.device)
    check(lane, *attention_inputs(lane, *batch_and_heads(mask), q_len, kv_len, 32), mask)


@st.composite
def random_masks(draw: st.DrawFn) -> tuple[FlashMask, int]:
    """Masks of any form whose intervals overlap, touch, are empty or run backwards, and their number of rows."""
    causal, n = draw(st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]))
    longest = 150 if INTERPRETED else 300
    q_len, kv_len = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    heads = draw(st.sampled_from([1, KV_HEADS, HEADS]))
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, q_len + 1, (1, heads, kv_len, n), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):  # blocks of equal columns, which make hidden and visible tiles
        indices = indices[:, :, torch.arange(kv_len) // 64 * 64]
    if draw(st.booleans()):  # intervals in order
        indices = indices.sort(-1).values
    if n == 4 and draw(st.booleans()):  # intervals that touch
        indices[..., 2] = indices[..., 1]
    return FlashMask(indices, causal, q_len=q_len), kv_len


def _check_random(lane: Lane, case: tuple[FlashMask, int]) -> None:
    mask, kv_len = case
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, mask.row_count(), kv_len, 16)
    check(lane, q, k, v, mask.to(lane.device))


@given(random_masks())
@settings(max_examples=60, derandomize=True)
def test_random_intervals(case: tuple[FlashMask, int]) -> None:
    _check_random(Lane("torch", "cpu", torch.float32), case)


@pytest.mark.interpreter
@given(random_masks())
@settings(max_examples=8, derandomize=True)
def test_random_intervals_interpreted(case: tuple[FlashMask, int]) -> None:
    _check_random(Lane("triton", "cpu", torch.float32), case)


@pytest.mark.gpu
@given(random_masks())
@settings(max_examples=60, derandomize=True)
def test_random_intervals_gpu(case: tuple[FlashMask, int]) -> None:
    _check_random(Lane("triton", "cuda", torch.float16), case)


@pytest.mark.parametrize(
    "dims", [(8, 8), (16, 24), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float16,), (torch.bfloat16, torch.float16)))
def test_head_dims(lane: Lane, dims: tuple[int, int]) -> None:
    mask = masks.causal_document([50, 83], device=lane.device)
    check(lane, *attention_inputs(lane, *batch_and_heads(mask), 133, 133, *dims), mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_dims_float32_gpu(dim: int) -> None:
    lane = Lane("triton", "cuda", torch.float32)
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 133, 133, dim)
    check(lane, q, k, v, masks.causal_document([50, 83], device="cuda"))


@pytest.mark.parametrize("heads", EACH_HEADS, ids=str)
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_heads(lane: Lane, heads: tuple[int, int, int]) -> None:
    *heads, mask_heads = heads
    batch = 1 if INTERPRETED else 2
    mask = masks.random_eviction(
        140, generator=torch.Generator().manual_seed(0), heads=mask_heads, batch=batch, device=lane.device
    )
    check(lane, *attention_inputs(lane, batch, *heads, 140, 140, 16), mask)


@pytest.mark.parametrize(
    ("lane", "with_sinks", "softcap"), covering(2, lanes(CPU, INTERPRETER, GPU), [False, True], [None, 3.0])
)
def test_softcap_and_sinks(lane: Lane, with_sinks: bool, softcap: float | None) -> None:
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 140, 140, 32)
    sinks = (
        torch.randn(HEADS, generator=torch.Generator().manual_seed(2)).to(lane.device).requires_grad_()
        if with_sinks
        else None
    )
    check(lane, q, k, v, masks.padding([100, 140], kv_len=140, device=lane.device), sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_rows_that_see_nothing(lane: Lane) -> None:
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 200, 200, 16)
    mask = masks.padding([130], kv_len=200, device=lane.device)
    result = run(q, k, v, mask, lane.impl)
    assert result["lse"][..., 130:].isneginf().all()
    for name in ("out", "dq"):
        assert (result[name][:, :, 130:] == 0).all(), name
    for name in ("dk", "dv"):
        assert (result[name][:, :, 130:] == 0).all(), name
        assert result[name][:, :, :130].isfinite().all(), name
    sinks = torch.linspace(-2, 3, HEADS, device=lane.device, requires_grad=True)
    blind = run(q, k, v, mask, lane.impl, sinks=sinks)
    torch.testing.assert_close(blind["lse"][..., 130:], sinks.detach().view(1, -1, 1).expand(1, HEADS, 70))
    assert (blind["out"][:, :, 130:] == 0).all()


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_the_gradient_of_lse_where_rows_see_nothing(lane: Lane) -> None:
    """It does not count, whatever it is: where a loss leaves lse**2 out, 0 times the derivative at -inf is NaN."""
    check_lse_of_rows_that_see_nothing(lane, attention_inputs(lane, 1, HEADS, KV_HEADS, 200, 200, 16))


def _upstream(out: torch.Tensor, lse: torch.Tensor, blind: torch.Tensor, of_blind: float) -> list[torch.Tensor]:
    """Return random gradients of out and lse, with some value in the rows [Sq] that see nothing."""
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (out, lse))
    return [dout.masked_fill(blind[:, None], of_blind), dlse.masked_fill(blind, 0.0)]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("lane", "family", "softcap"),
    covering(1, lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)), BLIND_ROWS, [None, 2.0]),
)
def test_any_upstream_gradient_of_rows_that_see_nothing_gives_zeros(
    lane: Lane, family: str, softcap: float | None
) -> None:
    mask = BLIND_ROWS[family]()
    check_upstream_of_blind_rows(lane, mask, 1, 2, 1, 200, mask.kv_len, 16, softcap=softcap)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_any_upstream_gradient_of_rows_that_see_a_sink_alone_gives_zeros(impl: str, with_sinks: bool) -> None:
    """On a GPU it must be finite (docs/limits.md)."""
    sinks = torch.linspace(-2, 3, HEADS, requires_grad=True) if with_sinks else None
    lane, mask = Lane(impl, "cpu", torch.float32), BLIND_ROWS["two intervals"]()
    check_upstream_of_blind_rows(lane, mask, 1, HEADS, KV_HEADS, 200, 200, 16, sinks=sinks, softcap=2.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_the_gradient_of_sinks_ignores_what_comes_to_rows_that_see_nothing(lane: Lane) -> None:
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 200, 200, 16)
    mask = masks.padding([130], kv_len=200, device=lane.device)
    blind = torch.arange(200, device=lane.device) >= 130
    sinks = torch.linspace(-2, 3, HEADS, device=lane.device)
    sinks[0] = float("-inf")
    sinks.requires_grad_()
    results = flashmask_attention(q, k, v, mask, impl=lane.impl, sinks=sinks, return_lse=True)
    expected, *found = (
        torch.autograd.grad(results, sinks, _upstream(*results, blind, value), retain_graph=True)[0]
        for value in (0.0, float("nan"), float("inf"))
    )
    for other in found:
        torch.testing.assert_close(other, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_sinks_of_any_layout_and_value(lane: Lane) -> None:
    """Strided and expanded sinks; a sink of -inf is none, on rows that see something and on rows that see nothing."""
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 140, 140, 16)
    mask = masks.padding([100], kv_len=140, device=lane.device)
    wide = torch.randn(HEADS, 2, generator=torch.Generator().manual_seed(2)).to(lane.device)
    for sinks in (wide[:, 0], torch.full((1,), 1.5, device=lane.device).expand(HEADS)):
        check(lane, q, k, v, mask, sinks=sinks.detach().requires_grad_())
    absent = torch.full((HEADS,), float("-inf"), device=lane.device, requires_grad=True)
    with_sinks, without = run(q, k, v, mask, lane.impl, sinks=absent), run(q, k, v, mask, lane.impl)
    assert (with_sinks.pop("dsinks") == 0).all()
    for name, value in with_sinks.items():
        torch.testing.assert_close(value, without[name])
    for impl in (lane.impl, "reference"):
        _, lse = flashmask_attention(q, k, v, mask, sinks=absent, return_lse=True, impl=impl)
        assert (torch.autograd.grad(lse, absent, torch.ones_like(lse))[0] == 0).all(), impl
    expected = run(q, k, v, mask, "reference", sinks=absent)["lse"]
    assert torch.equal(with_sinks["lse"].isneginf(), expected.isneginf())


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_nan_is_passed_on(lane: Lane) -> None:
    """A row that computes NaN says so; only a row that sees nothing is 0."""
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 20, 20, 16)
    with torch.no_grad():
        q[:, :, 5] = float("nan")
    out, lse = flashmask_attention(q, k, v, masks.causal(20, device=lane.device), impl=lane.impl, return_lse=True)
    for result in (out.isnan().all(-1), lse.isnan()):
        assert result[:, :, 5].all()
        assert not result[:, :, :5].any()
        assert not result[:, :, 6:].any()


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32, torch.float16), (torch.bfloat16,)))
def test_low_scores(lane: Lane) -> None:
    check_low_scores(lane, masks.causal_document([40, 32, 128], device=lane.device), 200, 16)
    check_low_scores(lane, masks.padding([130], kv_len=200, device=lane.device), 200, 16)


@pytest.mark.parametrize("lane", lanes((torch.float64,), (torch.float32,), (torch.bfloat16,)))
@pytest.mark.parametrize("used", ["out", "lse"])
def test_a_result_without_a_gradient(lane: Lane, used: str) -> None:
    """It counts as one whose gradient is zero."""
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 70, 70, 16)
    mask = masks.causal_document([30, 40], device=lane.device)
    out, lse = flashmask_attention(q, k, v, mask, impl=lane.impl, return_lse=True)
    dout, dlse = (
        torch.randn_like(x) if name == used else torch.zeros_like(x) for name, x in (("out", out), ("lse", lse))
    )
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    one_of_them = (out, dout) if used == "out" else (lse, dlse)
    actual = torch.autograd.grad(one_of_them[0], (q, k, v), one_of_them[1])
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    assert all(x.any() for x in (actual if used == "out" else actual[:2]))


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_columns_of_many_segments(lane: Lane) -> None:
    """Two hidden intervals, each of whole tiles and ragged edges, leave three visible ranges and four partial ones."""
    ragged = torch.arange(128) % 7
    columns = [200 + ragged, 500 + ragged, 800 - ragged, 1100 - ragged]
    mask = FlashMask(torch.stack(columns, -1).to(lane.device, torch.int32)[None, None], causal=False)
    ranges = tile_plan.build_plan(mask.indices, False, 1300).segments[0, 0, 0]
    assert ((ranges[:, 1] > ranges[:, 0]).tolist()) == [True] * 7
    check(lane, *attention_inputs(lane, 1, 2, 1, 1300, 128, 16), mask)


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_tiles_wider_than_a_kernel_s(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than MAX_COLUMN_TILES tiles get wider ones, which kernels walk in parts."""
    monkeypatch.setattr(tile_plan, "MAX_COLUMN_TILES", 2)
    assert plan_columns(300) == 256
    alike = [masks.full(300), masks.causal_document([70, 130, 100]), masks.global_sliding_window(300, 20, 40)]
    several = [FAMILIES[name](300, 300) for name in ("qk_sparse", "random_eviction")]  # for rows of the batch and heads
    for mask in (x.to(lane.device) for x in (alike[1:] + several[1:] if INTERPRETED else alike + several)):
        check(lane, *attention_inputs(lane, *batch_and_heads(mask), 300, 300, 16), mask)


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_layouts(lane: Lane) -> None:
    """Strided, head-major and expanded inputs give the bits that compact ones give."""
    mask = masks.causal_document([60, 73], device=lane.device)
    q, k, v = attention_inputs(lane, 2, 4, 1, 133, 133, 32)
    expected = run(q, k, v, mask, lane.impl)
    compact = run(*(x.detach().contiguous().requires_grad_() for x in (q, k, v)), mask, lane.impl)
    padded = [torch.nn.functional.pad(x.detach(), (0, 3, 0, 1))[:, :, :-1, :-3].requires_grad_() for x in (q, k, v)]
    strided = run(*padded, mask, lane.impl)
    expanded = [x[:1].detach().expand(2, -1, -1, -1).requires_grad_() for x in (k, v)]
    repeated = [x[:1].detach().repeat(2, 1, 1, 1).requires_grad_() for x in (k, v)]
    broadcast, plain = run(q, *expanded, mask, lane.impl), run(q, *repeated, mask, lane.impl)
    for name, value in expected.items():
        assert torch.equal(compact[name], value), name
        assert torch.equal(strided[name], value), name
        assert torch.equal(broadcast[name], plain[name]), name


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_perturbing_one_document_changes_no_other(lane: Lane) -> None:
    lengths = [70, 131, 99]
    mask = masks.causal_document(lengths, device=lane.device)
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 300, 300, 32)
    before = run(q, k, v, mask, lane.impl)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, :, 70:201] = x[:, :, 70:201] * 3 + 1
    after = run(q, k, v, mask, lane.impl)
    for name in before:
        assert torch.equal(before[name][:, :, :70], after[name][:, :, :70]), name
        assert torch.equal(before[name][:, :, 201:], after[name][:, :, 201:]), name
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)))
def test_packed_equals_separate(lane: Lane) -> None:
    """Equal up to rounding: the place of a document's first row in its tile decides the order of its sums."""
    lengths = [37, 64, 1, 98]
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 200, 200, 32)
    packed = flashmask_attention(q, k, v, masks.causal_document(lengths, device=lane.device), impl=lane.impl)
    first = 0
    for length in lengths:
        document = [x[:, :, first : first + length] for x in (q, k, v)]
        mask = masks.causal(length, device=lane.device)
        alone = flashmask_attention(*document, mask, impl=lane.impl)
        exact = flashmask_attention(*(x.double() for x in document), mask, impl="reference")
        assert_within_budget(packed[:, :, first : first + length], alone, exact, f"rows {first} to {first + length}")
        first += length


@pytest.mark.parametrize("lane", lanes((torch.float32,), (), (torch.bfloat16, torch.float32)))
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_two_runs_agree_to_the_bit(lane: Lane, family: str) -> None:
    """The interpreter has but one order to run in."""
    q, k, v = attention_inputs(lane, 2, HEADS, KV_HEADS, 300, 300, 32)
    mask = FAMILIES[family](300, 300).to(lane.device)
    first, second = (run(q, k, v, mask, lane.impl) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
@pytest.mark.gpu
def test_more_than_two_billion_elements(impl: str) -> None:
    """Offsets into q, out and their gradients pass 2^31; the last document of the last head is right."""
    length, heads, dim, document = 262144, 65, 128, 512
    torch.manual_seed(0)
    q, dout = (torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 2**31
    for x in (q, k, v):
        x.requires_grad_()
    mask = masks.causal_document([document] * (length // document), device="cuda")
    out = flashmask_attention(q, k, v, mask, impl=impl, deterministic=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    tail = slice(length - document, length)
    part = [x[:, :, tail].detach().requires_grad_() for x in (q, k, v)]
    small = flashmask_attention(*part, masks.causal(document, device="cuda"), impl=impl, deterministic=True)
    expected = torch.autograd.grad(small, part, dout[:, :, tail])
    assert torch.equal(out[:, :, tail], small)
    for actual, wanted in zip((dq, dk, dv), expected, strict=True):
        assert torch.equal(actual[:, :, tail], wanted)


def _whole_range(at, *bounds):
    """Stand-in for the dK kernel's `_trimmed_range` that leaves nothing out."""
    import triton.language as tl

    return tl.load(at) * bounds[-1], tl.load(at + 1) * bounds[-1]


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16, torch.float32)))
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_skipping_tiles_changes_no_bit(lane: Lane, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's exactness claim (section 4.4): the same kernels over hidden tiles too give the same bits.

    The dK kernel leaves out small tiles of the plan's partial ones by itself; in the interpreter it walks them, too.
    """
    from tools import portable_kernels

    from flashmask_hf.kernels.portable import backward

    q_len, kv_len = (130, 200) if INTERPRETED else (513, 769)
    mask = FAMILIES[family](kv_len, q_len).to(lane.device)
    q, k, v = (x.detach() for x in attention_inputs(lane, *batch_and_heads(mask), q_len, kv_len, 32))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    results = []
    for skip in (True, False):
        if INTERPRETED and not skip:
            monkeypatch.setattr(backward, "_trimmed_range", _whole_range)
        plan = build_plan(mask.indices, mask.causal, q_len, skip=skip)
        out, lse = portable_kernels.forward(q, k, v, mask, plan, None, 0.2, 0.0)
        dq, dk, dv, _ = portable_kernels.backward(dout, q, k, v, lse, (out, None), mask, plan, 0.2, 0.0)
        results.append((out, lse, dq, dk, dv))
        walked = int(plan.counts.sum())
    tiles = -(-q_len // ROWS) * -(-kv_len // plan_columns(kv_len))
    assert walked == tiles * plan.tiles.shape[0] * plan.tiles.shape[1], "nothing was to be skipped"
    for name, skipped, whole in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(skipped, whole), name


def _good() -> dict:
    q, k, v = (torch.randn(2, h, 8, 4) for h in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "mask": masks.causal(8)}


BAD_CALLS = {
    "mask is of other rows": (
        {"mask": FlashMask(torch.full((1, 1, 8, 1), 5, dtype=torch.int32), True, q_len=5)},
        ValueError,
        "q has 8 rows, but mask was built for q_len=5; build it with q_len=8",
    ),
    "q is no tensor": ({"q": [1.0]}, TypeError, "q must be a floating-point tensor"),
    "q is integer": ({"q": torch.ones(2, 4, 8, 4, dtype=torch.int64)}, TypeError, "q must be a floating-point tensor"),
    "q has 8 bits": (
        {"q": torch.ones(2, 4, 8, 4).to(torch.float8_e4m3fn)},
        TypeError,
        r"q must be .* got torch.float8_e4m3fn; convert it to torch.bfloat16 or .* or torch.float64",
    ),
    "q has three axes": ({"q": torch.randn(2, 8, 4)}, ValueError, r"q must have shape \[B, H, S, D\]"),
    "q is nested": (
        {"q": torch.nested.nested_tensor([torch.ones(8, 4, 4), torch.ones(5, 4, 4)], layout=torch.jagged)},
        TypeError,
        "q must be a dense tensor, got a nested one; .*masks.from_cu_seqlens",
    ),
    "v is sparse": ({"v": torch.ones(2, 2, 8, 4).to_sparse()}, TypeError, r"got layout torch.sparse_coo; .*v.to_dense"),
    "sinks is sparse": ({"sinks": torch.ones(4).to_sparse()}, TypeError, r"sinks must be .*pass sinks.to_dense\(\)"),
    "k is empty": ({"k": torch.randn(2, 2, 0, 4)}, ValueError, "k must have shape .* no empty axis"),
    "batches differ": ({"k": torch.randn(1, 2, 8, 4)}, ValueError, "k has batch size 1, q has 2"),
    "v has another batch": ({"v": torch.randn(1, 2, 8, 4)}, ValueError, r"v must have k's batch.* got \[1, 2, 8\]"),
    "head_dims differ": ({"k": torch.randn(2, 2, 8, 5)}, ValueError, "k must have q's head_dim 4"),
    "v has another length": ({"v": torch.randn(2, 2, 9, 4)}, ValueError, "v must have k's batch, heads and length"),
    "heads do not divide": ({"q": torch.randn(2, 3, 8, 4)}, ValueError, "not a multiple of the 2 heads of k"),
    "dtypes differ": ({"v": torch.randn(2, 2, 8, 4).half()}, TypeError, "one dtype"),
    "mask is missing": ({"mask": None}, TypeError, "mask must be a FlashMask, got NoneType"),
    "mask is dense": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, TypeError, "FlashMask.from_dense"),
    "mask has other columns": ({"mask": masks.causal(9)}, ValueError, "mask has 9 key columns, but k and v have 8"),
    "mask has other rows": ({"mask": masks.causal(8, q_len=3)}, ValueError, "built for q_len=3"),
    "mask has another batch": (
        {"mask": masks.causal_document([[8]] * 3)},
        ValueError,
        "mask has batch 3; it must be 1 or q's batch 2",
    ),
    "mask has other heads": (
        {"mask": masks.random_eviction(8, generator=torch.Generator().manual_seed(0), heads=3)},
        ValueError,
        "mask has 3 heads; it must have 1, Hkv = 2 or Hq = 4",
    ),
    "mask on another device": (
        {"mask": masks.causal(8, device="meta")},
        ValueError,
        "mask is on meta, but q is on cpu; move it",
    ),
    "v on another device": (
        {"v": torch.randn(2, 2, 8, 4, device="meta")},
        ValueError,
        "v is on meta, but q is on cpu; move it",
    ),
    "scale is no number": ({"scale": "1"}, TypeError, "scale must be a number"),
    "scale is negative": ({"scale": -1.0}, ValueError, "scale must be positive"),
    "dropout is no number": ({"dropout": "0.1"}, TypeError, "dropout must be a number, got str"),
    "dropout of all": ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
    "dropout_seed is no tensor": (
        {"dropout": 0.1, "dropout_seed": 7},
        TypeError,
        "dropout_seed must be an int64 tensor",
    ),
    "dropout_seed is too long": (
        {"dropout": 0.1, "dropout_seed": torch.zeros(4, dtype=torch.int64)},
        ValueError,
        r"dropout_seed must have shape \[1\], or \[3\] from shard_seed, got \[4\]",
    ),
    "dropout_seed on another device": (
        {"dropout": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="meta")},
        ValueError,
        "dropout_seed is on meta, but q is on cpu",
    ),
    "softcap is zero": ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, or None for no cap"),
    "softcap is infinite": ({"softcap": float("inf")}, ValueError, "softcap must be positive and finite"),
    "scale vanishes in float32": ({"scale": 1e-50}, ValueError, "scale must be positive and finite, .* for float32"),
    "scale is no normal float32": ({"scale": 1e-39}, ValueError, "scale must be positive and finite, .* for float32"),
    "scale is too large for log2": ({"scale": 2e38}, ValueError, "scale must be positive and finite, .* for float32"),
    "softcap vanishes in float32": ({"softcap": 1e-50}, ValueError, "softcap must be .* for float32"),
    "softcap is too large an integer": ({"softcap": 10**400}, ValueError, "softcap must be positive and finite"),
    "softcap is far from scale": ({"softcap": 1e-20, "scale": 1e20}, ValueError, "softcap=1e-20 is too far from scale"),
    "softcap is far above scale": ({"softcap": 1e30, "scale": 1e-9}, ValueError, r"softcap=1e\+30 is too far from"),
    "softcap is a flag": ({"softcap": True}, TypeError, "softcap must be a number, or None"),
    "deterministic is text": ({"deterministic": "no"}, TypeError, "deterministic must be True or False, got 'no'"),
    "indices out of range": ({"mask": FlashMask(masks.causal(8).indices + 1, True)}, ValueError, "0..q_len = 0..8"),
    "indices out of the reference's range": (
        {"mask": FlashMask(masks.causal(8).indices + 1, True), "impl": "reference"},
        ValueError,
        "0..q_len = 0..8",
    ),
    "sinks of another shape": ({"sinks": torch.zeros(2)}, ValueError, r"sinks must have shape \[Hq\] = \[4\]"),
    "sinks are integers": (
        {"sinks": torch.zeros(4, dtype=torch.int32)},
        TypeError,
        r"sinks must be a floating-point tensor \[Hq\], got torch\.int32",
    ),
    "sinks on another device": (
        {"sinks": torch.zeros(4, device="meta")},
        ValueError,
        "sinks is on meta, but q is on cpu; move it",
    ),
    "impl is unknown": ({"impl": "cuda"}, ValueError, "impl must be None or one of hopper, triton, torch, reference"),
    "impl is for a GPU": ({"impl": "hopper"}, ValueError, "impl='hopper' cannot serve .*; impl='torch' can"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(case: str) -> None:
    change, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        flashmask_attention(**{**_good(), **change})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nested_tensors_without_sizes_are_refused(name: str) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 8, 4), torch.ones(2, 5, 4)])
    for impl in (None, "reference"):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got a nested one"):
            flashmask_attention(**{**_good(), name: nested}, impl=impl)


def test_distributed_tensors_are_refused() -> None:
    from torch import distributed
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        good = _good()
        for name in ("q", "k", "v"):
            given = {**good, name: distribute_tensor(good[name], mesh, [Replicate()])}
            with pytest.raises(
                TypeError, match=rf"{name} must be a local tensor, got a DTensor; pass {name}.to_local\(\)"
            ):
                flashmask_attention(**given)
        indices = distribute_tensor(good["mask"].indices, mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"mask\.indices must be a local tensor, got a DTensor"):
            flashmask_attention(**{**good, "mask": FlashMask(indices, good["mask"].causal)})
    finally:
        distributed.destroy_process_group()


def test_triton_refuses_the_cpu() -> None:
    if INTERPRETED:
        pytest.skip("cpu lane: the interpreter runs Triton on the CPU")
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve tensors on cpu .*impl='torch' can"):
        flashmask_attention(**_good(), impl="triton")


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_kernels_that_are_named_need_triton(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    monkeypatch.setattr(torch_internals, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=f"impl='{impl}' cannot serve this process: Triton is not installed"):
        flashmask_attention(**_good(), impl=impl)


@pytest.mark.interpreter
def test_triton_refuses_wide_heads_and_float64() -> None:
    wide = [torch.randn(1, 1, 8, 264) for _ in range(3)]
    with pytest.raises(ValueError, match=r"head_dim 264 \(its limit is 256\); impl='torch' can"):
        flashmask_attention(*wide, masks.causal(8), impl="triton")
    with pytest.raises(ValueError, match=r"head_dim 264 \(its limit is 256\)"):
        flashmask_attention(wide[0][..., :16], wide[1][..., :16], wide[2], masks.causal(8), impl="triton")
    double = [torch.randn(1, 1, 8, 16, dtype=torch.float64) for _ in range(3)]
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        flashmask_attention(*double, masks.causal(8), impl="triton")


@pytest.mark.gpu
def test_wide_heads_raise_by_default_on_the_gpu() -> None:
    q = torch.randn(1, 1, 8, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"head_dim 512 \(its limit is 256\); impl='torch' can"):
        flashmask_attention(q, q, q, masks.causal(8, device="cuda"))


@pytest.mark.parametrize("impl", [None, "torch", "reference"])
@pytest.mark.parametrize("rows", [10, 200])
def test_tensors_without_memory(impl: str | None, rows: int) -> None:
    """Results and gradients on the device meta have the shapes and layouts of real ones, in first and later calls."""
    real = attention_inputs(Lane("torch", "cpu", torch.bfloat16), 2, 4, 2, rows, rows, 16)
    q, k, v = (torch.empty_like(x, device="meta").requires_grad_() for x in real)
    expected = flashmask_attention(*real, masks.causal(rows), impl=impl, return_lse=True)
    mask = masks.causal(rows).to("meta")
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            results = flashmask_attention(q, k, v, mask, impl=impl, return_lse=True)
        gradients = torch.autograd.grad(results[0].sum(), (q, k, v)) if grad else ()
        for one, other in zip((*results, *gradients), (*expected, *real), strict=False):
            assert one.device.type == "meta"
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert results[0].stride() == expected[0].stride()


@pytest.mark.full
def test_the_cpu_is_no_slower_than_sdpa_with_the_dense_mask() -> None:
    """Documents of a row of 4,096 tokens, forward and backward; what SDPA computes and hides is skipped."""
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, 4, 4, 4096, 4096, 64)
    for mask in (masks.causal_document([1000, 1500, 1596]), masks.document([1300, 1300, 1496])):
        dense = mask.to_dense()

        def ours(mask: FlashMask = mask) -> torch.Tensor:
            return flashmask_attention(q, k, v, mask)

        def theirs(dense: torch.Tensor = dense) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(3):
            for name, attention in (("ours", ours), ("theirs", theirs)):
                start = time.perf_counter()
                torch.autograd.grad(attention().sum(), (q, k, v))
                seconds[name].append(time.perf_counter() - start)
        assert min(seconds["ours"]) <= min(seconds["theirs"]), seconds


def test_autocast_casts_as_sdpa_does() -> None:
    """Dtype, values and gradients equal SDPA's; float32 intermediates stay so, also in a backward under autocast."""
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 200, 200, 32)
    with torch.no_grad():
        for x in (q, k):
            x *= 2
    mask = masks.causal(200)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    plain = flashmask_attention(*narrow, mask)
    expected = [plain, *torch.autograd.grad(plain.float().sum(), narrow)]
    with torch.autocast("cpu", torch.bfloat16):
        out = flashmask_attention(q, k, v, mask)
        upstream = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        actual = [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]
        wide = [x.detach().double() for x in (q, k, v)]
        assert flashmask_attention(*wide, mask).dtype == torch.float64
        assert torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).dtype == torch.float64
    assert out.dtype == upstream.dtype == torch.bfloat16
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.bfloat16(), other)
    assert actual[1].dtype == torch.float32
