"""Random calls: lengths, heads, masks and options that nobody chose, against float64, with poisoned memory."""

from __future__ import annotations

import pytest
import torch
from tools.support import INTERPRETED, SLOW, check_random_call, offer_tall_tiles

from flashmask_hf._call.implementations import Request, choose

# of torch, in a process whose first product is the reference's
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")


def _seeds(count: int, *marks: pytest.MarkDecorator) -> list:
    return [pytest.param(x, id=f"seed{x}", marks=[*marks, *SLOW * (x > 3)]) for x in range(count)]


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
    """Random calls of the portable kernels and, on a Hopper GPU, its own, which may take tall tiles for every mask."""
    impls = ["triton"]
    if choose(Request(torch.device("cuda"), torch.bfloat16, 64, 64)).impl == "hopper":
        impls.append("hopper")
        offer_tall_tiles(monkeypatch, (0, 2, 5, 10)[seed % 4])
    check_random_call(seed, "cuda", impls, [torch.bfloat16, torch.float16], longest=1500)
