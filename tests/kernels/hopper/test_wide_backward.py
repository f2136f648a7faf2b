"""The Hopper backward of wide heads on a CPU, apart from the forward: results, and freedom from races and deadlocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tools.support import (
    EACH_FAMILY,
    FAMILIES,
    HEADS,
    INTERPRETED,
    KV_HEADS,
    Lane,
    assert_within_budget,
    attention_inputs,
    covering,
    poisoned,
    row_orders,
    separate_rows,
)
from torch import Tensor

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)

from flashmask_hf.kernels.hopper import gluon

if gluon.import_failure is not None:
    pytest.skip(f"interpreter lane: {gluon.import_failure}", allow_module_level=True)

from tools import hopper_kernels
from tools.gluon_interpreter import interpreted

from flashmask_hf import FlashMask, flashmask_attention, masks, tile_plan
from flashmask_hf.kernels.hopper import backward as hopper_backward
from flashmask_hf.kernels.hopper import dq_order
from flashmask_hf.sparse.reorder import put_rows_back

pytestmark = pytest.mark.interpreter

DIMS = [(256, 256), (192, 128)]
"""Largest sizes (head_dim, v_head_dim) of each of the wide tiles."""
PADDED = [(64, 256), (136, 40), (160, 160), (200, 72)]
"""Smaller sizes, for which columns of the tiles are filled with zeros."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def three_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take several tiles of keys each, where there are more than three."""
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 3)


@pytest.fixture(params=range(2))
def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    """Roles run in an order that the seed draws."""
    with interpreted(request.param):
        yield request.param


def _inputs(
    dims: tuple[int, int],
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Inputs:
    """q, k, v and the output's gradient, laid out [B, S, H, D] in memory."""
    lane = Lane("hopper", "cpu", dtype)
    q, k, v = (x.detach() for x in attention_inputs(lane, batch, heads, kv_heads, q_len, kv_len, *dims))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(batch, q_len, heads, dims[1], generator=generator).to(dtype).transpose(1, 2)
    return q, k, v, dout


def _reference(
    inputs: Inputs, mask: FlashMask, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp and gradients of eager code."""
    q, k, v, dout = (x.to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    out, lse = flashmask_attention(*leaves, mask, softcap=softcap or None, impl="reference", return_lse=True)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def _check(
    inputs: Inputs,
    mask: FlashMask,
    deterministic: bool = False,
    softcap: float = 0.0,
    given: Inputs | None = None,
) -> None:
    """Check the gradients of `given`, which differs from the inputs where none sees, against the error budget."""
    q, k, v, dout = given or inputs
    out, _, eager = _reference(inputs, mask, softcap, q.dtype)
    _, lse, exact = _reference(inputs, mask, softcap, torch.float64)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, q.shape[2])
    scale = q.shape[3] ** -0.5
    with poisoned():
        actual = hopper_kernels.backward(
            dout, q, k, v, lse.float(), (out, None), mask, tiles, scale, softcap, deterministic
        )
    for name, x, near, want in zip(("dq", "dk", "dv"), actual[:3], eager, exact, strict=True):
        assert_within_budget(x, near, want, name)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_family(family: str) -> None:
    """Each with one of the sizes, and dQ in any order or in a fixed one."""
    nth = list(FAMILIES).index(family)
    mask = FAMILIES[family](333, 200)
    batch, heads = mask.indices.shape[:2]
    sizes = (batch, 2, 1) if heads == 1 else (2, HEADS, KV_HEADS)
    with interpreted(nth):
        _check(_inputs(DIMS[nth % 2], 200, 333, *sizes), mask, deterministic=nth % 4 < 2)


@pytest.mark.parametrize(
    ("dims", "lengths", "form", "seeds"),
    covering(1, [*DIMS, *PADDED], [(1, 5), (70, 150)], [(True, 1), (True, 2), (False, 2), (False, 4)], range(2)),
    indirect=["seeds"],
)
def test_random_intervals(dims: tuple[int, int], lengths: tuple[int, int], form: tuple[bool, int], seeds: int) -> None:
    """Every form of mask, with intervals anywhere, and as many masks as query heads or as key-value heads."""
    q_len, kv_len = lengths
    causal, n = form
    generator = torch.Generator().manual_seed(n)
    indices = torch.randint(0, q_len + 1, (1, 2 * n, kv_len, n), generator=generator, dtype=torch.int32)
    mask = FlashMask(indices[:, : 4 if n > 1 else 2], causal, q_len=q_len)
    dtype = torch.bfloat16 if n == 2 else torch.float16
    _check(_inputs(dims, q_len, kv_len, 1, 4, 2, dtype), mask, deterministic=causal == (seeds == 0))


_QUICK_FIRST = [DIMS[0], *(pytest.param(dims, marks=pytest.mark.full) for dims in DIMS[1:])]
DIMS_AND_SEEDS = pytest.mark.parametrize(("dims", "seeds"), covering(1, _QUICK_FIRST, range(2)), indirect=["seeds"])


@DIMS_AND_SEEDS
def test_query_heads_walk_bands_of_rows(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], seeds: int) -> None:
    """Three query heads of a key-value head walk each 256 rows before the next, past rows that none of them sees."""
    monkeypatch.setattr(dq_order, "_BAND_ROWS", 256)
    mask = masks.sliding_window(520, 150, causal=False) if seeds else separate_rows(520, 6)
    _check(_inputs(dims, 520, 520, 1, 6, 2), mask, True)


@DIMS_AND_SEEDS
def test_softcap(dims: tuple[int, int], seeds: int) -> None:
    _check(_inputs(dims, 150, 150), masks.causal_document([90, 60]), bool(seeds), softcap=3.0)


@DIMS_AND_SEEDS
def test_tiles_wider_than_the_kernel_s(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], seeds: int) -> None:
    monkeypatch.setattr(tile_plan, "MAX_COLUMN_TILES", 2)
    _check(_inputs(dims, 300, 300), masks.causal_document([70, 30, 200]), bool(seeds))


@DIMS_AND_SEEDS
def test_keys_that_no_row_sees(dims: tuple[int, int], seeds: int) -> None:
    """Whole tiles, whatever they hold, one after the other, at the beginning and the end of what a program does."""
    mask = masks.full(650, q_len=100)
    mask.indices[:, :, :256] = 0
    mask.indices[:, :, 512:] = 0
    inputs = _inputs(dims, 100, 650, 2, 2, 2)
    q, k, v, dout = (x.clone() for x in inputs)
    for x in (k, v):
        x[:, :, :256] = float("inf")
        x[:, :, 512:] = float("nan")
    _check(inputs, mask, bool(seeds), given=(q, k, v, dout))


@DIMS_AND_SEEDS
def test_rows_that_see_nothing(dims: tuple[int, int], seeds: int) -> None:
    _check(_inputs(dims, 200, 200), masks.padding([130], kv_len=200), bool(seeds))


@pytest.mark.parametrize("dims", [*DIMS, PADDED[1]], ids=str)
def test_rows_put_back(dims: tuple[int, int]) -> None:
    """Rows of all gradients are put in the given orders, to the bit, however the roles are scheduled."""
    q, k, v, dout = _inputs(dims, 130, 200, 2)
    mask = FAMILIES["document"](200, 130)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 130)
    generator = torch.Generator().manual_seed(2)
    lse, delta = (torch.randn(q.shape[:3], generator=generator) for _ in range(2))
    order, k_order = row_orders(q, k)
    results = []
    for seed, orders in enumerate((None, (order, k_order), (order, k_order))):
        with interpreted(seed), poisoned():
            results.append(
                hopper_kernels.backward(
                    dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, deterministic=True, orders=orders
                )[:3]
            )
    for x, y, again, where in zip(*results, (order, k_order, k_order), strict=True):
        assert torch.equal(y, again)
        assert torch.equal(put_rows_back(x, where), y)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_fixed_order(dims: tuple[int, int]) -> None:
    """Sums in dQ are the same to the bit, whichever program comes first: five tiles of keys add to each row."""
    q, k, v, dout = _inputs(dims, 70, 320, 1, 2, 2)
    mask = masks.full(320, q_len=70)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 70)
    lse, delta = torch.zeros(1, 2, 70), torch.zeros(1, 2, 70)
    results = []
    for seed in range(4):
        with interpreted(seed):
            results.append(
                hopper_kernels.backward(dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, deterministic=True)[0]
            )
    assert all(torch.equal(results[0], other) for other in results[1:])
