"""Calls like one before: the same results as the first one, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import HEADS, KV_HEADS, Lane, attention_inputs, lanes, poisoned
from torch.utils.checkpoint import checkpoint

from flashmask_hf import FlashMask, flashmask_attention, masks, repeated

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


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Equal to x and laid out like it, an element past an address that a descriptor takes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    y = memory.as_strided(x.shape, x.stride(), 1).copy_(x.detach())
    assert y.stride() == x.stride()
    assert y.data_ptr() % 16
    return y.requires_grad_()


KINDS = ["plain", "sinks and a cap", "shifted"]


def check_repeated(lane: Lane, kind: str) -> None:
    """To the bit what first calls give, of other tensors under another mask, each time that a call is repeated."""
    options: dict[str, Any] = {"impl": lane.impl}
    sinks = None
    if lane.impl != "torch":
        repeated._sign_in_c()  # or it would forget the first call
    if kind == "sinks and a cap":
        sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1)).to(lane.device).requires_grad_()
        options["softcap"] = 5.0
    for seed in range(4):
        tensors, mask = _tensors(lane, seed), _mask(20 + 20 * seed, lane.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeated, "_known", {})
            expected = _results(*tensors, mask, sinks, **options)
        if kind == "shifted" and seed % 2:
            tensors = tuple(map(_shifted, tensors))
        assert len(repeated._known) == min(seed, 2 if kind == "shifted" else 1)
        for one, other in zip(_results(*tensors, mask, sinks, **options), expected, strict=True):
            assert torch.equal(one, other)
    served = [
        ["forward" in vars(call), *[launch is not None for launch in call._backward.values()]]
        for call in repeated._known.values()
    ]
    # No descriptor fits what is shifted.
    shifted = [[lane.impl == "triton"] * 2] * (kind == "shifted")
    assert served == [[lane.impl != "torch"] * 2, *shifted]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_results_are_those_of_a_first_call(lane: Lane, kind: str) -> None:
    check_repeated(lane, kind)


def _cpu(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return _tensors(Lane("torch", "cpu", torch.float32), seed)


WRONG: dict[str, tuple[Callable[..., Any] | dict[str, Any], type[Exception], str]] = {
    "q": (lambda q, k, v, m: ("q", k, v, m), TypeError, "q must be a tensor"),
    "mask": (lambda q, k, v, m: (q, k, v, m.indices), TypeError, "mask must be a FlashMask"),
    "length": (lambda q, k, v, m: (q, k, v, masks.causal(9)), ValueError, "9 key columns"),
    "rows": (lambda q, k, v, m: (q, k, v, FlashMask(m.indices, m.causal, q_len=9)), ValueError, "9"),
    "values": (lambda q, k, v, m: (q, k, v, FlashMask(m.indices + LENGTH, m.causal)), ValueError, "0..q_len"),
    "batch": (lambda q, k, v, m: (q, k[:1], v, m), ValueError, "one batch size"),
    "dtype": (lambda q, k, v, m: (q, k, v.double(), m), TypeError, "one dtype"),
    "device": (lambda q, k, v, m: (q, k, v.to("meta"), m), ValueError, "v is on meta"),
    "device of q": (lambda q, k, v, m: (q.to("meta"), k, v, m), ValueError, "k is on cpu, but q is on meta"),
    "scale": ({"scale": True}, TypeError, "scale must be a number"),
    "softcap": ({"softcap": True}, TypeError, "softcap must be a number"),
    "sinks": ({"sinks": [1.0]}, TypeError, "sinks must be"),
    "impl": ({"impl": ["torch"]}, ValueError, "impl must be None or one of"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls_raise_after_right_ones(wrong: str) -> None:
    q, k, v = _cpu()
    mask = _mask(50)
    for options in ({}, {"scale": 1.0}, {"scale": 1}, {"softcap": 1.0}, {"softcap": 1}, {"sinks": torch.zeros(HEADS)}):
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
    "type of the scale": lambda *x: (*x[:5], True, *x[6:]),
    "softcap": lambda *x: (*x[:6], 2.0, *x[7:]),
    "type of the softcap": lambda *x: (*x[:6], True, *x[7:]),
    "deterministic": lambda *x: (*x[:7], True, *x[8:]),
    "impl": lambda *x: (*x[:8], "torch"),
    "no gradient": lambda q, k, v, *x: (q.detach(), k.detach(), v.detach(), *x),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_a_kind_holds(other: str) -> None:
    mask = FlashMask(torch.full((1, 1, LENGTH, 2), 50, dtype=torch.int32), causal=True)
    usual = (*_cpu(), mask, torch.zeros(HEADS), 1.0, 1.0, False, None)
    kind, _ = repeated.find(*usual)
    assert kind is not None
    assert repeated.find(*usual)[0] == kind
    changed = OTHERS[other](*usual)
    assert repeated.find(*changed)[0] not in (kind, None)
    assert repeated.find(*usual)[0] == kind


def test_deterministic_algorithms_and_no_grad_are_kinds() -> None:
    usual = (*_cpu(), _mask(50), None, None, None, False, None)
    kinds = [repeated.find(*usual)[0]]
    with poisoned():
        kinds.append(repeated.find(*usual)[0])
    with torch.no_grad():
        kinds.append(repeated.find(*usual)[0])
    assert None not in kinds
    assert len(set(kinds)) == 3


def test_kinds_are_told_apart() -> None:
    q, k, v = _cpu()
    mask = _mask(50)
    rows = flashmask_attention(q, k, v, mask)
    assert flashmask_attention(q, k, v, mask, scale=0.5).sub(rows).abs().max() > 1e-2
    assert flashmask_attention(q, k, v, mask, softcap=0.1).sub(rows).abs().max() > 1e-2
    assert flashmask_attention(q, k, v, mask, sinks=torch.zeros(HEADS)).sub(rows).abs().max() > 1e-2
    banded = FlashMask(mask.indices.repeat(1, 1, 1, 2), mask.causal)
    assert flashmask_attention(q, k, v, banded).sub(rows).abs().max() > 1e-2
    assert len(repeated._known) == 5
    with torch.no_grad():
        few = flashmask_attention(q[:, :, -2:], k, v, masks.causal(LENGTH, q_len=2))
        assert not few.requires_grad
    seen = flashmask_attention(q[:, :, -2:], k, v, masks.causal(LENGTH, q_len=2))
    assert seen.requires_grad
    assert [call.decodes for call in repeated._known.values()][5:] == [True, False]
    torch.testing.assert_close(few, seen)
    for _ in range(2):
        flashmask_attention(q, k.contiguous(), v, mask)
    assert len(repeated._known) == 8


def test_what_operators_serve_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(repeated.Repeated, "_forward_launches", lambda *given: asked.append(1))
    for _ in range(4):
        flashmask_attention(*_cpu(), _mask(50))
    assert len(asked) == 1


def test_rows_are_decoded_again() -> None:
    q, k, v = (x.detach() for x in _cpu())
    for rows in (1, 1, 1):
        q, k, v = (x.flip(2) for x in (q, k, v))
        out = flashmask_attention(q[:, :, :rows], k, v, masks.causal(LENGTH, q_len=rows))
        expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :rows], k, v, enable_gqa=True)
        torch.testing.assert_close(out, expected)
    assert len(repeated._known) == 1


def test_what_autocast_casts_is_not_remembered() -> None:
    q, k, v = _cpu()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for some in ((q, k, v), (q.bfloat16(), k, v), (q.bfloat16(), k.bfloat16(), v)):
            for _ in range(2):
                assert flashmask_attention(*some, _mask(50)).dtype == torch.bfloat16
            assert not repeated._known
        narrow = [x.bfloat16() for x in (q, k, v)]
        results = [flashmask_attention(*narrow, _mask(50)) for _ in range(2)]
        assert len(repeated._known) == 1
    assert torch.equal(*results)


def test_checkpoints_and_hooks() -> None:
    """A first call is made again as a repeated one; a hook hands back the same values, laid out otherwise."""
    mask = _mask(50)
    expected = _results(*_cpu(), mask, None)
    assert len(repeated._known) == 1
    for begin in (dict, lambda: repeated._known):
        repeated._known = begin()
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


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_MOST", 2)
    q, k, v = _cpu()
    for scale in (0.1, 0.2, 0.3, 0.1, 0.2):
        out = flashmask_attention(q, k, v, _mask(50), scale=scale)
        assert torch.equal(out, flashmask_attention(q, k, v, _mask(50), scale=scale))
        assert len(repeated._known) <= 2
