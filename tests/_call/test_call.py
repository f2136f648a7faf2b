"""Calls that are resolved once: repeated ones give the results and the errors of a first one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.fake_implementation import Fake, register
from tools.support import HEADS, KV_HEADS, SLOW, Lane, attention_inputs, lanes, poisoned
from torch.utils.checkpoint import checkpoint

from flashmask_hf import FlashMask, flashmask_attention, masks, torch_internals
from flashmask_hf._call import call
from flashmask_hf._call.arguments import Arguments
from flashmask_hf._call.call import Call, resolve

LENGTH = 100
LANES = [
    *lanes((torch.float32,), (torch.float32,), (torch.bfloat16,)),
    *(
        pytest.param(Lane("hopper", "cuda", dtype), id=f"hopper-{name}", marks=pytest.mark.hopper)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    ),
]


def _mask(cut: int, device: str = "cpu") -> FlashMask:
    return masks.causal_document([cut, LENGTH - cut], device=device)


def _tensors(lane: Lane, seed: int) -> tuple[torch.Tensor, ...]:
    return attention_inputs(lane, 2, HEADS, KV_HEADS, LENGTH, LENGTH, 64, seed=seed)


def _results(q: Any, k: Any, v: Any, mask: FlashMask, sinks: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
    out, lse = flashmask_attention(q, k, v, mask, sinks=sinks, return_lse=True, deterministic=True, **options)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, lse, *torch.autograd.grad((out, lse), inputs, (upstream, lse.detach()))]


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor equal to x and laid out like it, one element past an address that a descriptor takes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    y = memory.as_strided(x.shape, x.stride(), 1).copy_(x.detach())
    assert y.stride() == x.stride()
    assert y.data_ptr() % 16
    return y.requires_grad_()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Call]:
    """Return the cache of calls, empty at first."""
    found: dict[Any, Call] = {}
    monkeypatch.setattr(call, "_calls", found)
    return found


KINDS = [pytest.param("plain", marks=SLOW), "sinks and softcap", "misaligned"]


def check_repeated(lane: Lane, kind: str, calls: dict[Any, Call]) -> None:
    """Repeat a call with other tensors under other masks: each time the bits of a first call, from kept launches."""
    options: dict[str, Any] = {"impl": lane.impl}
    sinks = None
    if kind == "sinks and softcap":
        sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1)).to(lane.device).requires_grad_()
        options["softcap"] = 5.0
    for seed in range(4):
        tensors, mask = _tensors(lane, seed), _mask(20 + 20 * seed, lane.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call, "_calls", {})
            expected = _results(*tensors, mask, sinks, **options)
        if kind == "misaligned" and seed % 2:
            tensors = tuple(map(_misaligned, tensors))
        for one, other in zip(_results(*tensors, mask, sinks, **options), expected, strict=True):
            assert torch.equal(one, other)
        layouts = min(seed + 1, 2) if kind == "misaligned" else 1
        assert [len(one._prepared) for one in calls.values()] == [2] * layouts  # a forward and a backward


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_give_the_bits_of_a_first_call(lane: Lane, kind: str, calls: dict[Any, Call]) -> None:
    check_repeated(lane, kind, calls)


def _cpu(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return _tensors(Lane("torch", "cpu", torch.float32), seed)


WRONG: dict[str, tuple[Callable[..., Any] | dict[str, Any], type[Exception], str]] = {
    "q": (lambda q, k, v, m: ("q", k, v, m), TypeError, "q must be a floating-point tensor"),
    "mask": (lambda q, k, v, m: (q, k, v, m.indices), TypeError, "mask must be a FlashMask"),
    "length": (lambda q, k, v, m: (q, k, v, masks.causal(9)), ValueError, "9 key columns"),
    "rows": (lambda q, k, v, m: (q, k, v, FlashMask(m.indices, m.causal, q_len=9)), ValueError, "9"),
    "values": (lambda q, k, v, m: (q, k, v, FlashMask(m.indices + LENGTH, m.causal)), ValueError, "0..q_len"),
    "batch": (lambda q, k, v, m: (q, k[:1], v, m), ValueError, "k has batch size 1"),
    "dtype": (lambda q, k, v, m: (q, k, v.double(), m), TypeError, "one dtype"),
    "device": (lambda q, k, v, m: (q, k, v.to("meta"), m), ValueError, "v is on meta"),
    "device of q": (lambda q, k, v, m: (q.to("meta"), k, v, m), ValueError, "k is on cpu, but q is on meta"),
    "scale": ({"scale": True}, TypeError, "scale must be a number"),
    "softcap": ({"softcap": True}, TypeError, "softcap must be a number"),
    "dropout": ({"dropout": False}, TypeError, "dropout must be a number"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
    "sinks": ({"sinks": [1.0]}, TypeError, "sinks must be"),
    "impl": ({"impl": ["torch"]}, ValueError, "impl must be None or one of"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls_raise_after_right_ones(wrong: str) -> None:
    q, k, v = _cpu()
    mask = _mask(50)
    one: list[dict[str, Any]] = [{name: x} for name in ("scale", "softcap") for x in (1.0, 1)]
    for options in ({}, *one, {"deterministic": True}, {"sinks": torch.zeros(HEADS)}):
        flashmask_attention(q, k, v, mask, **options)
    change, error, message = WRONG[wrong]
    arguments, options = ((q, k, v, mask), change) if isinstance(change, dict) else (change(q, k, v, mask), {})
    with pytest.raises(error, match=message):
        flashmask_attention(*arguments, **options)


OTHERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **{
        f"{change} of {name}": lambda *x, at=at, other=other: (*x[:at], other(x[at]), *x[at + 1 :])
        for at, name in enumerate("qkv")
        for change, other in {
            "shape": lambda x: x[:, :, 1:],
            "strides": lambda x: x.contiguous(),
            "dtype": lambda x: x.view(torch.int32),
            "device": lambda x: torch.empty_strided(x.shape, x.stride(), device="meta"),
        }.items()
        if (name, change) != ("q", "device")  # autocast knows nothing of "meta"
    },
    "batch of the mask": lambda q, k, v, m, *x: (q, k, v, FlashMask(m.indices.repeat(2, 1, 1, 1), True), *x),
    "vectors of the mask": lambda q, k, v, m, *x: (q, k, v, FlashMask(m.indices[..., :1], True), *x),
    "causal": lambda q, k, v, m, *x: (q, k, v, FlashMask(m.indices, False), *x),
    "rows of the mask": lambda q, k, v, m, *x: (q, k, v, FlashMask(m.indices, True, q_len=LENGTH), *x),
    "sinks": lambda q, k, v, m, sinks, *x: (q, k, v, m, None, *x),
    "dtype of sinks": lambda q, k, v, m, sinks, *x: (q, k, v, m, sinks.bfloat16(), *x),
    "shape of sinks": lambda q, k, v, m, sinks, *x: (q, k, v, m, sinks[1:], *x),
    "scale": lambda *x: (*x[:5], 0.5, *x[6:]),
    "softcap": lambda *x: (*x[:6], 2.0, *x[7:]),
    "impl": lambda *x: (*x[:7], "torch", *x[8:]),
    "deterministic": lambda *x: (*x[:8], True, *x[9:]),
    "dropout": lambda *x: (*x[:9], 0.5),
    "no gradient": lambda q, k, v, *x: (q.detach(), k.detach(), v.detach(), *x),
}


def _key(q: Any, k: Any, v: Any, mask: FlashMask, sinks: Any, *options: Any) -> Any:
    """Return the key under which `resolve` keeps a call that it has not seen, whether or not the call is right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "_make", lambda *given: given[-1])
        patch.setattr(torch_internals, "is_intercepted", lambda *tensors: False)
        return resolve(q, k, v, mask, sinks, Arguments(*options))


@pytest.mark.parametrize("other", OTHERS)
def test_the_key_holds_all_that_a_call_follows_from(other: str) -> None:
    mask = FlashMask(torch.full((1, 1, LENGTH, 2), 50, dtype=torch.int32), causal=True)
    usual = (*_cpu(), mask, torch.zeros(HEADS), 1.0, 1.0, None, False, 0.0)
    assert _key(*usual) == _key(*usual)
    assert _key(*OTHERS[other](*usual)) != _key(*usual)


def test_the_key_holds_the_modes_of_torch() -> None:
    usual = (*_cpu(), _mask(50), None)
    keys = [_key(*usual)]
    with poisoned():
        keys.append(_key(*usual))
    with torch.no_grad():
        keys.append(_key(*usual))
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(_key(*usual))
    assert len(set(keys)) == 4


def test_calls_of_other_settings_are_their_own(calls: dict[Any, Call]) -> None:
    q, k, v = _cpu()
    mask = _mask(50)
    with torch.no_grad():
        rows = flashmask_attention(q, k, v, mask)
        assert flashmask_attention(q, k, v, mask, scale=0.5).sub(rows).abs().max() > 1e-2
        assert flashmask_attention(q, k, v, mask, softcap=0.1).sub(rows).abs().max() > 1e-2
        assert flashmask_attention(q, k, v, mask, sinks=torch.zeros(HEADS)).sub(rows).abs().max() > 1e-2
        banded = FlashMask(mask.indices.repeat(1, 1, 1, 2), mask.causal)
        assert flashmask_attention(q, k, v, banded).sub(rows).abs().max() > 1e-2
        assert len(calls) == 5
        few = flashmask_attention(q[:, :, -2:], k, v, masks.causal(LENGTH, q_len=2))
        assert not few.requires_grad
    seen = flashmask_attention(q[:, :, -2:], k, v, masks.causal(LENGTH, q_len=2))
    assert seen.requires_grad
    assert [one.decodes for one in calls.values()][5:] == [True, False]
    torch.testing.assert_close(few, seen)
    for _ in range(2):
        flashmask_attention(q, k.contiguous(), v, mask)
    assert len(calls) == 8


def test_a_call_is_checked_and_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = call._make
    monkeypatch.setattr(call, "_make", lambda *given: made.append(1) or make(*given))
    with torch.no_grad():
        for _ in range(4):
            flashmask_attention(*_cpu(), _mask(50))
    assert len(made) == 1


def test_passes_run_while_the_gpu_of_their_tensors_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are on the current GPU."""
    entered: list[int] = []
    monkeypatch.setattr(torch_internals, "current_gpu", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext(entered.append(gpu)))
    q, k, v = _cpu()
    mask = _mask(50)
    one = resolve(q, k, v, mask, None, Arguments())
    for gpu in (None, 2, 3):
        one.gpu = gpu
        flashmask_attention(q, k, v, mask).sum().backward()
    assert entered == [3, 3]


def test_a_call_that_is_intercepted_is_not_kept(calls: dict[Any, Call]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), torch.no_grad():
        assert resolve(*_cpu(), _mask(50), None, Arguments()).intercepted
    assert not calls


def test_rows_are_decoded_again(calls: dict[Any, Call]) -> None:
    q, k, v = (x.detach() for x in _cpu())
    for rows in (1, 1, 1):
        q, k, v = (x.flip(2) for x in (q, k, v))
        out = flashmask_attention(q[:, :, :rows], k, v, masks.causal(LENGTH, q_len=rows))
        expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :rows], k, v, enable_gqa=True)
        torch.testing.assert_close(out, expected)
    assert len(calls) == 1


@pytest.mark.parametrize(("heads", "most"), [(1, 64), (4, 16), (16, 16)])
def test_the_most_rows_that_are_decoded(heads: int, most: int) -> None:
    k = torch.randn(1, 1, 100, 8)
    for rows in (most, most + 1):
        q, mask = torch.randn(1, heads, rows, 8), masks.causal(100, q_len=rows)
        assert resolve(q, k, k, mask, None, Arguments()).decodes is (rows == most)


def test_calls_under_autocast(calls: dict[Any, Call]) -> None:
    """Inputs of every mix of dtypes are cast as SDPA casts them, first and again."""
    q, k, v = (x.detach() for x in _cpu())
    narrow = [x.bfloat16() for x in (q, k, v)]
    expected = flashmask_attention(*narrow, _mask(50))
    calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for count, some in enumerate(((q, k, v), (narrow[0], k, v), (narrow[0], narrow[1], v), narrow), 1):
            for _ in range(2):
                out = flashmask_attention(*some, _mask(50))
                assert out.dtype == torch.bfloat16
                assert torch.equal(out, expected)
            assert len(calls) == count


def test_checkpoints_and_hooks(calls: dict[Any, Call]) -> None:
    """A first call is recomputed as a repeated one; a hook hands back the same values, laid out otherwise."""
    mask = _mask(50)
    expected = _results(*_cpu(), mask, None)
    for again in range(2):
        if not again:
            calls.clear()
        q, k, v = _cpu()
        out, lse = checkpoint(
            lambda *x: flashmask_attention(*x, mask, return_lse=True, deterministic=True), q, k, v, use_reentrant=False
        )
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
        actual = torch.autograd.grad((out, lse), (q, k, v), (upstream, lse.detach()))
        for one, other in zip(actual, expected[2:], strict=True):
            assert torch.equal(one, other)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            actual = _results(*_cpu(), mask, None)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_backward_with_a_gradient_of_lse_is_prepared_by_itself(calls: dict[Any, Call]) -> None:
    """Launches take None in the same places each time."""
    q, k, v = _cpu()
    out, lse = flashmask_attention(q, k, v, _mask(50), return_lse=True)
    upstream, of_lse = torch.ones_like(out), torch.ones_like(lse)
    for _ in range(2):
        torch.autograd.grad(out, q, upstream, retain_graph=True)
        torch.autograd.grad((out, lse), q, (upstream, of_lse), retain_graph=True)
    (kept,) = calls.values()
    assert [key[0] for key in kept._prepared] == ["forward", "backward", "backward"]


def test_a_mask_that_changes_before_the_backward_raises() -> None:
    q, k, v = _cpu()
    for _ in range(2):
        mask = _mask(50)
        out = flashmask_attention(q, k, v, mask)
        mask.indices.fill_(LENGTH)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_there_are_no_second_derivatives() -> None:
    q, k, v = _cpu()
    for _ in range(2):
        out = flashmask_attention(q, k, v, _mask(50))
        (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            gradient.sum().backward()


def test_only_so_many_calls_are_kept(monkeypatch: pytest.MonkeyPatch, calls: dict[Any, Call]) -> None:
    monkeypatch.setattr(call, "_MAX_CALLS", 2)
    q, k, v = _cpu()
    for scale in (0.1, 0.2, 0.3, 0.1, 0.2):
        out = flashmask_attention(q, k, v, _mask(50), scale=scale)
        assert torch.equal(out, flashmask_attention(q, k, v, _mask(50), scale=scale))
        assert len(calls) <= 2


def test_an_implementation_of_the_registry_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default before all that follow, and by its name."""
    expected = _results(*_cpu(), _mask(50), None)
    fake = Fake()
    register(monkeypatch, fake)
    for _ in range(2):
        for one, other in zip(_results(*_cpu(), _mask(50), None), expected, strict=True):
            assert torch.equal(one, other)
    assert fake.prepared == ["forward", "backward"]
    assert fake.ran == ["forward", "backward"] * 2
    _results(*_cpu(), _mask(50), None, impl="torch")
    assert fake.ran == ["forward", "backward"] * 2
    _results(*_cpu(), _mask(50), None, impl="fake")
    assert fake.prepared == ["forward", "backward"] * 2
    with pytest.raises(ValueError, match="impl must be None or one of fake, hopper, triton, torch, reference, got"):
        flashmask_attention(*_cpu(), _mask(50), impl="other")


@pytest.mark.parametrize(
    ("fake", "options", "reason"),
    [
        (Fake(refusal="head_dim 64"), {}, "head_dim 64"),
        (Fake(takes=("scale", "impl", "deterministic")), {"softcap": 5.0}, "softcap=5.0"),
    ],
    ids=["a limit", "an option that it lacks"],
)
def test_an_implementation_that_refuses_is_passed_over(
    fake: Fake, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, fake)
    _results(*_cpu(), _mask(50), None, **options)
    assert fake.prepared == []
    with pytest.raises(ValueError, match=f"impl='fake' cannot serve {reason}; impl='torch' can, more slowly"):
        flashmask_attention(*_cpu(), _mask(50), impl="fake", **options)


def test_an_implementation_that_fails_is_replaced_once_and_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pass by itself, with one warning; a named implementation raises instead."""
    expected = _results(*_cpu(), _mask(50), None)
    fake, following = Fake(error=RuntimeError("no such instruction\nand more")), Fake("following")
    register(monkeypatch, fake, following)
    for one, other in zip(_results(*_cpu(), _mask(50), None), expected, strict=True):
        assert torch.equal(one, other)
    _results(*_cpu(), _mask(50), None, scale=1.0)
    assert fake.prepared == ["forward", "backward"]
    assert following.prepared == ["forward", "backward"] * 2
    assert [record.message for record in caplog.records] == [
        f"the {passes} of impl='fake' fails here and impl='following' replaces it: RuntimeError: no such instruction"
        for passes in ("forward", "backward")
    ]
    with pytest.raises(RuntimeError, match="no such instruction"):
        flashmask_attention(*_cpu(), _mask(50), impl="fake")


def test_out_of_memory_is_not_taken_for_a_failure_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(error=torch.OutOfMemoryError("no memory"))
    register(monkeypatch, fake)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            flashmask_attention(*_cpu(), _mask(50))
    assert fake.prepared == ["forward"] * 2
