"""Random calls: lengths, heads, masks and options that nobody chose, against float64, with poisoned memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import INTERPRETED, Lane, assert_results, attention_inputs, poisoned, references, run

from flashmask_hf import FlashMask
from flashmask_hf.attention import choose

# of torch, in a process whose first product is the reference's
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


def _seeds(count: int, *marks: pytest.MarkDecorator) -> list:
    return [pytest.param(seed, id=f"seed{seed}", marks=marks) for seed in range(count)]


def _mask(draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int) -> FlashMask:
    """Columns in runs of random width; an interval may be empty, or end before it starts."""
    causal, n = draw.choice(FORMS)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    width = draw.choice([1, 7, 64, 128, 500])
    indices = torch.randint(0, q_len + 1, (batch, heads, kv_len, n), generator=generator, dtype=torch.int32)
    return FlashMask(indices[:, :, torch.arange(kv_len) // width * width], causal, q_len=q_len)


def check_random_call(seed: int, device: str, impls: list[str], dtypes: list[torch.dtype], longest: int) -> None:
    """Output, LSE and gradients of every implementation; two runs in the same order agree to the bit."""
    draw = random.Random(seed)
    batch, kv_heads, group = draw.randint(1, 3), draw.choice([1, 2]), draw.choice([1, 2, 4])
    q_len = draw.randint(1, longest)
    kv_len = q_len if draw.random() < 0.5 else draw.randint(1, longest)
    dim, dtype = draw.choice([64, 128]), draw.choice(dtypes)
    mask_heads = draw.choice([1, kv_heads, kv_heads * group])
    mask = _mask(draw, draw.choice([1, batch]), mask_heads, q_len, kv_len).to(device)
    shape = (batch, kv_heads * group, kv_heads, q_len, kv_len, dim)
    inputs = attention_inputs(Lane("reference", device, dtype), *shape, seed=seed)
    sinks = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    options: dict[str, Any] = {
        "sinks": sinks if draw.random() < 0.3 else None,
        "softcap": 20.0 if draw.random() < 0.3 else None,
    }

    expected = references(*inputs, mask, **options)
    for impl in impls:
        with poisoned():  # which also asks for an order
            first, second = (run(*inputs, mask, impl, **options) for _ in range(2))
        for name in first:
            assert torch.equal(first[name], second[name]), f"{impl}: {name} differs from run to run"
        for actual in (first, run(*inputs, mask, impl, **options)):
            assert_results(actual, *expected, dtype)


@pytest.mark.parametrize("seed", _seeds(4))
def test_torch(seed: int) -> None:
    if INTERPRETED:
        pytest.skip("cpu lane: unset TRITON_INTERPRET")
    check_random_call(seed, "cpu", ["torch"], [torch.float32, torch.bfloat16], longest=300)


@pytest.mark.parametrize("seed", _seeds(6, pytest.mark.interpreter))
def test_interpreter(seed: int) -> None:
    check_random_call(seed, "cpu", ["triton"], [torch.float32, torch.float16], longest=200)


@pytest.mark.parametrize("seed", _seeds(20, pytest.mark.gpu))
def test_gpu(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of the portable kernels and, on a Hopper, its own, which are offered tall tiles for every mask."""
    impls = ["triton"]
    if choose(torch.device("cuda"), torch.bfloat16, 64, 64).impl == "hopper":
        from flashmask_hf.kernels import hopper_forward

        impls.append("hopper")
        for name, least in (("_TALL_QUERIES", 0), ("_TALL_ROWS", 0), ("_TALL_TILES", (0, 2, 5, 10)[seed % 4])):
            monkeypatch.setattr(hopper_forward, name, least)
    check_random_call(seed, "cuda", impls, [torch.bfloat16, torch.float16], longest=1500)
