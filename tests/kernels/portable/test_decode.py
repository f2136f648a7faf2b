"""Decoding: few query rows without gradients need no plan, match float64 results and read no hidden block of keys."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.support import (
    EACH_FAMILY,
    FAMILIES,
    HEADS,
    INTERPRETED,
    KV_HEADS,
    Lane,
    assert_within_budget,
    attention_inputs,
    check_low_scores,
    covering,
    interpret_assertions,
    lanes,
    poisoned,
)
from torch import Tensor

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf._call import operators as attention
from flashmask_hf.kernels.eager import tiled

ONE = lanes((torch.float32,), (torch.float32,), (torch.bfloat16,))
ALL = lanes(
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16, torch.float32),
)


@pytest.fixture
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: FlashMask, q_len: int) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(attention, "plan_of", refuse)


def inputs(lane: Lane, *shape: int, **options: int) -> list[Tensor]:
    return [x.detach() for x in attention_inputs(lane, *shape, **options)]


def check(
    lane: Lane, q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, *, sinks: Tensor | None = None, softcap=None
) -> tuple[Tensor, Tensor]:
    """Assert that out and lse are within the error budget; return them."""
    options = {"softcap": softcap, "return_lse": True}
    with poisoned():
        actual = flashmask_attention(q, k, v, mask, sinks=sinks, impl=lane.impl, **options)
    eager = flashmask_attention(q, k, v, mask, sinks=sinks, impl="reference", **options)
    wide = [x.double() for x in (q, k, v)]
    wide_sinks = None if sinks is None else sinks.double()
    exact = flashmask_attention(*wide, mask, sinks=wide_sinks, impl="reference", **options)
    for what, *results in zip(("out", "lse"), actual, eager, exact, strict=True):
        assert_within_budget(*results, what)
    return actual


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize(("lane", "family", "q_len"), covering(2, ALL, EACH_FAMILY, [1, 5]))
def test_family(lane: Lane, family: str, q_len: int) -> None:
    kv_len = 150 if INTERPRETED else 1023
    check(lane, *inputs(lane, 2, HEADS, KV_HEADS, q_len, kv_len, 32), FAMILIES[family](kv_len, q_len).to(lane.device))


@st.composite
def random_masks(draw: st.DrawFn) -> tuple[FlashMask, int]:
    """Draw a mask of any form and its number of keys; intervals may overlap, touch, be empty or run backwards."""
    causal, n = draw(st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]))
    q_len, kv_len = draw(st.integers(1, 16)), draw(st.integers(1, 300 if INTERPRETED else 3000))
    heads = draw(st.sampled_from([1, KV_HEADS, HEADS]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    indices = torch.randint(0, q_len + 1, (1, heads, kv_len, n), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):  # blocks of equal columns, which hide whole blocks of keys
        indices = indices[:, :, torch.arange(kv_len) // 100 * 100]
    if n == 4 and draw(st.booleans()):  # intervals that touch
        indices[..., 2] = indices[..., 1]
    return FlashMask(indices, causal, q_len=q_len), kv_len


def check_random(lane: Lane, case: tuple[FlashMask, int]) -> None:
    mask, kv_len = case
    check(lane, *inputs(lane, 2, HEADS, KV_HEADS, mask.row_count(), kv_len, 16), mask.to(lane.device))


@given(random_masks())
@settings(max_examples=100, derandomize=True)
def test_random_intervals(case: tuple[FlashMask, int]) -> None:
    check_random(Lane("torch", "cpu", torch.float32), case)


@pytest.mark.interpreter
@given(random_masks())
@settings(max_examples=25, derandomize=True)
def test_random_intervals_interpreted(case: tuple[FlashMask, int]) -> None:
    check_random(Lane("triton", "cpu", torch.float32), case)


@pytest.mark.gpu
@given(random_masks())
@settings(max_examples=100, derandomize=True)
def test_random_intervals_gpu(case: tuple[FlashMask, int]) -> None:
    check_random(Lane("triton", "cuda", torch.float16), case)


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize(
    "dims", [(8, 8), (16, 24), (40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize(
    "lane", lanes((torch.float32,), (torch.float16,), (torch.bfloat16, torch.float16, torch.float32))
)
def test_head_dims(lane: Lane, dims: tuple[int, int]) -> None:
    kv_len = 133 if INTERPRETED else 2500
    mask = masks.padding([kv_len - 20], kv_len=kv_len, q_len=2, device=lane.device)
    check(lane, *inputs(lane, 1, HEADS, KV_HEADS, 2, kv_len, *dims), mask)


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize(
    ("lane", "q_len", "heads", "mask_heads"),
    covering(2, ONE, [1, 16], [(4, 4), (6, 2), (71, 1)], ["one", "kv", "q"]),
)
def test_heads(lane: Lane, q_len: int, heads: tuple[int, int], mask_heads: str) -> None:
    """Up to 1,136 packed rows fill many tiles. A mask per head is one for both batch entries."""
    count = {"one": 1, "kv": heads[1], "q": heads[0]}[mask_heads]
    if INTERPRETED and heads[0] * q_len > 1000:
        heads, count = (13, 1), min(count, 13)
    mask = masks.random_eviction(
        140,
        generator=torch.Generator().manual_seed(0),
        heads=count,
        batch=2 if count == 1 else 1,
        q_len=q_len,
        device=lane.device,
    )
    check(lane, *inputs(lane, 2, *heads, q_len, 140, 16), mask)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("lane", ALL)
def test_softcap_and_sinks(lane: Lane, with_sinks: bool, softcap: float | None) -> None:
    """Both work in one split and in several, on rows that see something and on rows that see nothing."""
    for kv_len in (60, 300):
        mask = masks.padding([0, kv_len - 9], kv_len=kv_len, q_len=2, device=lane.device)
        q, k, v = inputs(lane, 2, HEADS, KV_HEADS, 2, kv_len, 32)
        sinks = torch.tensor([0.5, -1.0, 2.0, 9.0], device=lane.device) if with_sinks else None
        out, lse = check(lane, q, k, v, mask, sinks=sinks, softcap=softcap)
        assert (out[0] == 0).all()
        assert lse[0].isneginf().all() != with_sinks


@pytest.mark.parametrize("lane", ONE)
def test_sinks_of_any_layout_and_value(lane: Lane) -> None:
    """Sinks may be strided, and a sink of -inf is none, also on rows that see nothing."""
    for kv_len in (60, 300):
        mask = masks.padding([0, kv_len], kv_len=kv_len, q_len=1, device=lane.device)
        q, k, v = inputs(lane, 2, HEADS, KV_HEADS, 1, kv_len, 16)
        sinks = torch.linspace(-1, 3, 2 * HEADS, device=lane.device).view(HEADS, 2)
        check(lane, q, k, v, mask, sinks=sinks[:, 1])
        absent = torch.full((1,), float("-inf"), device=lane.device).expand(HEADS)
        results = (
            flashmask_attention(q, k, v, mask, sinks=given, impl=lane.impl, return_lse=True) for given in (absent, None)
        )
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("lane", ONE)
def test_low_scores(lane: Lane) -> None:
    """Low scores are not taken for hidden ones, in one split and in several."""
    for kv_len in (56, 304):
        check_low_scores(lane, masks.causal(kv_len, q_len=2, device=lane.device), 2, 16)
        check_low_scores(lane, masks.padding([0], kv_len=kv_len, q_len=2, device=lane.device), 2, 16)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
@pytest.mark.parametrize("lane", ONE)
def test_nan_is_passed_on(lane: Lane) -> None:
    """A row that computes NaN gives NaN, in one split and in several; its neighbours in the tile do not."""
    for kv_len in (20, 300):
        q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 3, kv_len, 16)
        q[:, 2, 1] = float("nan")
        mask = masks.full(kv_len, q_len=3, device=lane.device)
        out, lse = flashmask_attention(q, k, v, mask, impl=lane.impl, return_lse=True)
        expected = q.isnan().any(-1)
        assert torch.equal(lse.isnan(), expected)
        assert torch.equal(out.isnan(), expected[..., None].expand_as(out))


def hidden_outside(first: int, last: int, q_len: int, kv_len: int, n: int) -> FlashMask:
    """Return a mask that hides all keys outside [first, last) from all rows, by one interval or by two that touch."""
    column = torch.arange(kv_len)
    hidden = (column < first) | (column >= last)
    cut = torch.where(hidden, column % (q_len + 1), 0)
    if n == 2:
        columns = [torch.where(hidden, cut, q_len), cut]
    else:
        columns = [torch.zeros_like(cut), cut, cut, torch.where(hidden, q_len, 0)]
    return FlashMask(torch.stack(columns, -1).to(torch.int32)[None, None], causal=False)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("lane", ONE)
def test_keys_hidden_from_all_rows_are_not_read(lane: Lane, n: int) -> None:
    """A static cache may hold anything behind its end or before a window."""
    q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 3, 640, 16)
    mask = hidden_outside(256, 512, 3, 640, n).to(lane.device)
    expected = check(lane, q, k, v, mask)
    for x in (k, v):
        x[:, :, :256] = float("nan")
        x[:, :, 512:] = float("inf")
    for one, other in zip(flashmask_attention(q, k, v, mask, impl=lane.impl, return_lse=True), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16,)))
def test_blocks_hidden_from_all_rows_are_not_read(lane: Lane) -> None:
    """Hidden blocks lie between visible ones, are hidden by causality, or from each head by a mask of its own.

    There are more keys than are classified at a time.
    """
    kv_len = 2304
    indices = torch.full((1, HEADS, kv_len, 1), 2, dtype=torch.int32)
    indices[:, :, 128:2048] = 0
    indices[:, 1, 1024:1088] = 1
    mask = FlashMask(indices.to(lane.device), causal=True, q_len=2)
    q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 2, kv_len, 16)
    expected = check(lane, q, k, v, mask)
    for x in (k, v):
        x[:, :, 128:1024] = float("nan")
        x[:, :, 1088:2048] = float("nan")
        x[:, 1, 1024:1088] = float("nan")  # its query heads are 2 and 3
    for one, other in zip(flashmask_attention(q, k, v, mask, impl=lane.impl, return_lse=True), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16, torch.float32)))
def test_any_number_of_splits(lane: Lane) -> None:
    """The combined parts equal a single part, up to rounding; two runs agree to the bit."""
    from tools.portable_kernels import decode

    q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 2, 700, 16)
    sinks = torch.linspace(-1, 3, HEADS, device=lane.device)
    mask = masks.sliding_window(700, 300, q_len=2, device=lane.device)
    exact = flashmask_attention(*(x.double() for x in (q, k, v)), mask, sinks=sinks, scale=0.2, impl="reference")
    whole, whole_lse = decode(q, k, v, mask, sinks, 0.2, 0.0, n_splits=1)
    for n_splits in (3, 20):  # more than there are blocks of keys, too
        with poisoned():
            out, lse = decode(q, k, v, mask, sinks, 0.2, 0.0, n_splits=n_splits)
        again, _ = decode(q, k, v, mask, sinks, 0.2, 0.0, n_splits=n_splits)
        assert torch.equal(out, again)
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
        assert_within_budget(out, whole, exact, f"{n_splits} splits")


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16, torch.float32)))
def test_more_splits_than_are_combined_at_a_time(lane: Lane) -> None:
    """With values of 128 dimensions 32 parts are loaded at a time. Scores rise, so that each group changes the top."""
    from tools.portable_kernels import decode

    from flashmask_hf.kernels.shared.configs import Config

    config = Config(rows=16, columns=16, warps=4, stages=1)
    q, k, v = inputs(lane, 1, 2, 2, 1, 16 * 70, 128)
    q = torch.ones_like(q)
    k = k + torch.linspace(0, 1, 16 * 70, device=k.device)[:, None].to(k.dtype)
    mask = masks.causal(16 * 70, q_len=1, device=lane.device)
    exact = flashmask_attention(*(x.double() for x in (q, k, v)), mask, scale=0.05, impl="reference")
    whole, whole_lse = decode(q, k, v, mask, None, 0.05, 0.0, config, n_splits=1)
    with poisoned():
        out, lse = decode(q, k, v, mask, None, 0.05, 0.0, config, n_splits=70)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-4)
    assert_within_budget(out, whole, exact, "70 splits")


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16, torch.float32)))
def test_a_block_that_only_a_later_head_sees(lane: Lane) -> None:
    """A tile of 16 rows holds one head, and its blocks are those of that head's own mask."""
    q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 16, 256, 16)
    indices = torch.full((1, HEADS, 256, 1), 16, dtype=torch.int32)
    indices[:, ::2, 64:192] = 0
    mask = FlashMask(indices.to(lane.device), causal=True, q_len=16)
    check(lane, q, k, v, mask)


@pytest.mark.parametrize("lane", ONE)
def test_layouts(lane: Lane) -> None:
    """Views of a static cache, head-major and expanded inputs give the same bits as compact ones."""
    mask = masks.padding([120, 133], kv_len=133, q_len=1, device=lane.device)
    q, k, v = inputs(lane, 2, HEADS, 1, 1, 133, 32)

    def bits(*given: Tensor) -> Tensor:
        return flashmask_attention(*given, mask, impl=lane.impl)

    expected = bits(q, k, v)
    assert expected.transpose(1, 2).is_contiguous()  # the model's next step reshapes it without a copy
    assert torch.equal(bits(*(x.contiguous() for x in (q, k, v))), expected)
    cache = [torch.full((2, 1, 500, 32), float("nan"), dtype=lane.dtype, device=lane.device) for _ in range(2)]
    for whole, x in zip(cache, (k, v), strict=True):
        whole[:, :, :133] = x
    assert torch.equal(bits(q, *(whole[:, :, :133] for whole in cache)), expected)
    padded = [torch.nn.functional.pad(x, (0, 3, 0, 1))[:, :, :-1, :-3] for x in (q, k, v)]
    assert torch.equal(bits(*padded), expected)
    expanded, repeated = (x[:1].expand(2, -1, -1, -1) for x in (k, v)), (x[:1].repeat(2, 1, 1, 1) for x in (k, v))
    assert torch.equal(bits(q, *expanded), bits(q, *repeated))


@pytest.mark.parametrize("lane", ONE)
def test_attention_with_gradients_takes_a_plan_and_gives_the_same(lane: Lane) -> None:
    """Attention with gradients walks a plan; its results equal those of decoding up to rounding."""
    for family in ("sliding_window", "random_eviction"):
        q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 4, 300, 32)
        mask = FAMILIES[family](300, 4).to(lane.device)
        out, lse = flashmask_attention(q, k, v, mask, impl=lane.impl, return_lse=True)
        assert mask._plan is not None
        assert all(x.abs().max() > 0 for x in torch.autograd.grad(out.sum(), (q, k, v)))
        fresh = FAMILIES[family](300, 4).to(lane.device)
        with torch.no_grad():
            plain, plain_lse = flashmask_attention(q, k, v, fresh, impl=lane.impl, return_lse=True)
            exact = flashmask_attention(*(x.double() for x in (q, k, v)), mask, impl="reference")
        assert fresh._plan is None
        assert_within_budget(plain, out.detach(), exact, family)
        torch.testing.assert_close(plain_lse, lse.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks"])
def test_any_one_gradient_is_given(which: str) -> None:
    given = dict(zip("qkv", inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 1, 20, 8), strict=True))
    given["sinks"] = torch.zeros(HEADS)
    given[which].requires_grad_()
    out = flashmask_attention(**given, mask=masks.full(20, q_len=1))
    assert torch.autograd.grad(out.sum(), given[which])[0].abs().max() > 0


def test_many_rows_take_a_plan() -> None:
    """Up to 16 rows, or 64 over the heads that share keys, count as few."""
    lane = Lane("torch", "cpu", torch.float32)
    for heads, kv_heads, few in ((4, 4, 64), (4, 2, 32), (8, 1, 16)):
        for q_len, planned in ((few, False), (few + 1, True)):
            mask = masks.causal(70, q_len=q_len)
            flashmask_attention(*inputs(lane, 1, heads, kv_heads, q_len, 70, 8), mask)
            assert (mask._plan is not None) == planned


@pytest.mark.parametrize("lane", lanes((torch.float32,), (torch.float32,), ()))
@pytest.mark.parametrize("form", [(True, 1), (True, 2), (False, 2), (False, 4)], ids=str)
def test_indices_out_of_range(lane: Lane, form: tuple[bool, int], monkeypatch: pytest.MonkeyPatch) -> None:
    causal, n = form
    if lane.impl == "triton":
        interpret_assertions(monkeypatch)
    q, k, v = inputs(lane, 1, HEADS, KV_HEADS, 2, 100, 8)
    for bound in range(n):
        for value in (-1, 3):
            indices = torch.zeros(1, 1, 100, n, dtype=torch.int32)
            indices[:, :, 77, bound] = value
            with pytest.raises(Exception, match=r"the mask's indices must lie in 0\.\.q_len.*validate"):
                flashmask_attention(q, k, v, FlashMask(indices, causal), impl=lane.impl)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100])
def test_indices_out_of_range_stop_the_gpu(rows: int) -> None:
    """Both the decoding kernel and the one that builds a plan check the indices."""
    code = (
        "import torch; from flashmask_hf import FlashMask, flashmask_attention; "
        "x = torch.ones(1, 1, 100, 64, device='cuda', dtype=torch.bfloat16); "
        "mask = FlashMask(torch.full((1, 1, 100, 1), {}, dtype=torch.int32, device='cuda'), causal=True); "
        "flashmask_attention(x[:, :, :{}], x, x, mask); torch.cuda.synchronize(); print('done')"
    )
    good, bad = (
        subprocess.run([sys.executable, "-c", code.format(value, rows)], capture_output=True, text=True)
        for value in (rows, rows + 1)
    )
    assert good.stdout == "done\n", good.stderr
    assert bad.stdout == ""
    assert "must lie in 0..q_len" in bad.stderr


def test_autocast_casts_as_sdpa_does() -> None:
    q, k, v = inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 1, 200, 32)
    mask = masks.full(200, q_len=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = flashmask_attention(q, k, v, mask)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flashmask_attention(*(x.bfloat16() for x in (q, k, v)), mask))


def test_sixteen_bit_keys_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU converts 16-bit keys to float32 a part at a time."""
    lane = Lane("torch", "cpu", torch.bfloat16)
    monkeypatch.setattr(tiled, "_WIDENED", 1)
    check(lane, *inputs(lane, 2, HEADS, KV_HEADS, 3, 333, 16), masks.sliding_window(333, 200, q_len=3))


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_mask_anew() -> None:
    lane = Lane("triton", "cuda", torch.bfloat16)
    q, k, v = inputs(lane, 2, 8, 2, 1, 5000, 64)
    mask = masks.padding([3000, 5000], kv_len=5000, q_len=1, device="cuda")
    other = masks.padding([4097, 1], kv_len=5000, q_len=1, device="cuda")
    mask.indices.copy_(mask.indices)
    flashmask_attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashmask_attention(q, k, v, mask)
    for indices in (mask.indices.clone(), other.indices):
        mask.indices.copy_(indices)
        out.fill_(float("nan"))
        graph.replay()
        expected = flashmask_attention(q, k, v, FlashMask(indices.clone(), mask.causal))
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    """Offsets into k and v may exceed 2^31: the last keys of the last head are right."""
    kv_len, heads, seen = 2_200_000, 8, 1000
    torch.manual_seed(0)
    k, v = (torch.randn(1, heads, kv_len, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert k.numel() > 2**31
    q = torch.randn(1, heads, 1, 128, device="cuda", dtype=torch.bfloat16)
    mask = masks.sliding_window(kv_len, seen, q_len=1, device="cuda")
    out, lse = flashmask_attention(q, k, v, mask, return_lse=True)
    tail = [x[:, :, -seen:] for x in (k, v)]
    small, small_lse = flashmask_attention(q, *tail, masks.full(seen, q_len=1, device="cuda"), return_lse=True)
    torch.testing.assert_close(out, small, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)
    torch.testing.assert_close(lse, small_lse, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_steps_of_a_growing_cache_are_launched_alike() -> None:
    """The kernel is compiled once for all lengths that Triton treats alike, and right at each."""
    from flashmask_hf.kernels.portable import decode

    compiled = decode._decode.device_caches[torch.cuda.current_device()][0]
    lane = Lane("triton", "cuda", torch.bfloat16)
    _, keys, values = inputs(lane, 2, HEADS, KV_HEADS, 1, 700, 64)
    known = len(compiled)
    for length in range(100, 700, 3):
        k, v = keys[:, :, :length], values[:, :, :length]
        q = torch.randn(2, HEADS, 1, 64, device="cuda", dtype=torch.bfloat16)
        mask = masks.padding([length, length - 50], kv_len=length, q_len=1, device="cuda")
        out, expected = (flashmask_attention(q, k, v, mask, impl=impl) for impl in (None, "torch"))
        torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)
    assert len(compiled) - known <= 12
