"""The Hopper backward: what it compiles to, without a GPU, and its gradients on one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tools.support import FAMILIES, HEADS, INTERPRETED, KV_HEADS, assert_within_budget, poisoned, requires, row_orders

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter does not run Gluon", allow_module_level=True)

from tools.cubin import HOPPER, TRITON, Kernel, compile_only

from flashmask_hf import FlashMask, flashmask_attention, masks, tile_plan
from flashmask_hf.kernels.eager import tiled
from flashmask_hf.kernels.hopper import gluon
from flashmask_hf.sparse.reorder import put_rows_back

if gluon.unavailable_reason() is not None:
    pytest.skip(f"cpu lane: {gluon.unavailable_reason()}", allow_module_level=True)

from tools import hopper_kernels

from flashmask_hf.kernels.hopper import backward as hopper_backward

# of torch, in a process whose first product is the reference's
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")

HEAD_DIMS = [
    *((32, 32), (40, 40), (48, 64), (64, 24), (72, 72), (80, 80), (96, 96), (112, 128), (120, 8)),
    *((64, 256), (136, 40), (160, 160), (192, 192), (200, 72), (256, 128)),
]
"""Sizes (head_dim, v_head_dim) of which columns of the tiles are filled with zeros."""
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
"""Largest sizes of each of the kernel's tiles."""
WIDE = DIMS[2:]

MASKS = {
    "causal_document": lambda: masks.causal_document([200, 312]),
    "prefix_lm_document": lambda: masks.prefix_lm_document([(50, 200), (9, 312)]),
}


def _compile(
    dims: tuple[int, int], mask: FlashMask, softcap: float = 0.0, deterministic: bool = False, placed: bool = False
) -> dict[str, Kernel]:
    q, k, v, dout = hopper_kernels.inputs(1, 4, 2, 512, 512, dims, torch.bfloat16, "cpu")
    lse = torch.empty(1, 4, 512)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 512)
    orders = row_orders(q, k) if placed else None
    with pytest.MonkeyPatch.context() as patch, compile_only(HOPPER) as kernels:
        patch.setattr(hopper_backward, "multiprocessors", lambda device: 4)
        delta = lse if placed else (dout, lse)
        hopper_kernels.backward(dout, q, k, v, lse, delta, mask, tiles, 0.1, softcap, deterministic, orders=orders)
    return {kernel.name: kernel for kernel in kernels}


def _cases(quick: list[tuple], *levels: Sequence[Any]) -> list:
    """Return every combination of levels; those that are not quick are marked full.

    One is quick: a compilation takes up to 10 s, and the interpreter lane runs the same code.
    """
    combinations = itertools.product(*levels)
    return [
        pytest.param(*x, marks=[pytest.mark.full] * (x not in quick), id="-".join(map(str, x))) for x in combinations
    ]


@pytest.mark.parametrize(
    ("dims", "form", "deterministic"),
    _cases(
        [((192, 128), "prefix_lm_document", True)],
        DIMS,
        MASKS,
        [False, True],
    ),
)
def test_compiles(dims: tuple[int, int], form: str, deterministic: bool) -> None:
    kernels = _compile(dims, MASKS[form](), deterministic=deterministic)
    assert kernels["_row_delta"].spills == kernels["scale_dq_kernel"].spills == 0
    kernel = kernels["backward_kernel"]
    for instruction in ("wgmma.mma_async", "setmaxnreg", "cp.reduce.async.bulk.tensor", "cp.async.bulk.tensor"):
        assert instruction in kernel.assembly, instruction
    assert kernel.shared <= 227 * 1024
    assert kernel.spills is not None
    assert kernel.spills <= (152 if dims == (192, 128) else 128)  # most of the warp that loads, which has 32 registers
    # Reloads of values that stay the same. Triton 3.9 spills more in the narrow kernel, up to 34 instructions.
    wide, narrow = 1 if (3, 7) <= TRITON < (3, 9) else 2, 34 if TRITON >= (3, 9) else 4
    assert kernel.spills_beside_products() <= (wide if dims == (256, 256) else narrow)
    assert not kernel.serializes_products()
    assert not kernel.reused_barriers()
    # Sums are in global memory before the next tile of keys may add its own.
    assert bool(re.search(r"cp\.async\.bulk\.wait_group\s+0", kernel.assembly)) == deterministic


@pytest.mark.parametrize(
    ("dims", "deterministic"),
    _cases(
        [],
        [*DIMS, (72, 96)],
        [False, True],
    ),
)
def test_compiles_what_puts_rows_back(dims: tuple[int, int], deterministic: bool) -> None:
    form = MASKS["prefix_lm_document"]()
    kernel = _compile(dims, form, deterministic=deterministic, placed=True)["backward_kernel"]
    assert kernel.shared <= 227 * 1024
    assert kernel.spills is not None
    most = 168 if TRITON >= (3, 9) else 160 if TRITON >= (3, 8) else 136  # likewise
    if dims == (192, 128):
        most = 184 if TRITON >= (3, 9) else 152
    assert kernel.spills <= most
    assert not kernel.serializes_products()


@pytest.mark.parametrize("dims", _cases([], DIMS))
def test_softcap_compiles(dims: tuple[int, int]) -> None:
    kernel = _compile(dims, MASKS["causal_document"](), softcap=30.0)["backward_kernel"]
    assert "wgmma.mma_async" in kernel.assembly
    assert kernel.spills is not None
    assert kernel.spills <= 256
    assert not kernel.serializes_products()


def _check(
    inputs: list[torch.Tensor], mask: FlashMask, softcap: float = 0.0, deterministic: bool = False
) -> tuple[torch.Tensor, ...]:
    """The gradients, which are within the error budget and written whole."""
    q, k, v, dout = inputs
    scale = q.shape[-1] ** -0.5
    out, lse = flashmask_attention(q, k, v, mask, softcap=softcap or None, impl="triton", return_lse=True)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, q.shape[2])
    with poisoned():
        *actual, delta = hopper_kernels.backward(
            dout, q, k, v, lse, (out, None), mask, tiles, scale, softcap, deterministic
        )
    torch.testing.assert_close(delta, tiled.row_delta(dout, out, None), rtol=1e-5, atol=1e-4)

    def reference(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        wide_q, wide_k, wide_v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        out = flashmask_attention(wide_q, wide_k, wide_v, mask, softcap=softcap or None, impl="reference")
        return torch.autograd.grad(out, (wide_q, wide_k, wide_v), dout.to(dtype))

    eager, exact = reference(q.dtype), reference(torch.float64)
    for index, name in enumerate(("dq", "dk", "dv")):
        if exact[index].any():
            assert_within_budget(actual[index], eager[index], exact[index], name)
        else:  # the difference of two equal sums, added up in different orders
            assert actual[index].abs().max() < 1e-5, name
    return tuple(actual)


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [(1, 1), (63, 257), (113, 1023), (1023, 1023)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(monkeypatch: pytest.MonkeyPatch, family: str, dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Three programs take several tiles of keys each, where there are more than three."""
    requires("hopper")
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 3)
    q_len, kv_len = lengths
    dtype = torch.float16 if kv_len == 257 else torch.bfloat16
    mask = FAMILIES[family](kv_len, q_len).to("cuda")
    _check(hopper_kernels.inputs(2, HEADS, KV_HEADS, q_len, kv_len, dims, dtype, "cuda"), mask)


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [(1, 77), (200, 333), (1023, 1023)], ids=str)
@pytest.mark.parametrize("family", ["full", "causal_document", "prefix_lm_document", "random_eviction"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], family: str, lengths: tuple[int, int]) -> None:
    """Sizes of queries and values that do not fill the tiles."""
    dtype = torch.bfloat16 if lengths[1] % 2 else torch.float16
    mask = FAMILIES[family](*lengths[::-1]).to("cuda")
    inputs = hopper_kernels.inputs(2, HEADS, KV_HEADS, *lengths, dims, dtype, "cuda")
    _check(inputs, mask, softcap=5.0 if family == "full" else 0.0, deterministic=lengths[0] == 200)


@pytest.mark.hopper
@pytest.mark.parametrize("mask_heads", ["one", "kv", "q"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1), (16, 2)], ids=["MHA", "GQA", "MQA", "many to a head"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
def test_heads(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], mask_heads: str, dims: tuple[int, int], deterministic: bool
) -> None:
    requires("hopper")
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 3)
    count = {"one": 1, "kv": heads[1], "q": heads[0]}[mask_heads]
    generator = torch.Generator().manual_seed(0)
    mask = masks.random_eviction(700, generator=generator, heads=count, batch=2, device="cuda")
    _check(hopper_kernels.inputs(2, *heads, 700, 700, dims, torch.bfloat16, "cuda"), mask, deterministic=deterministic)


@pytest.mark.hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_softcap(dims: tuple[int, int]) -> None:
    requires("hopper")
    mask = masks.causal_document([260, 140], device="cuda")
    _check(hopper_kernels.inputs(2, 4, 2, 400, 400, dims, torch.bfloat16, "cuda"), mask, softcap=3.0)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "family",
    ["full", "causal", "share_question", "document", "prefix_lm_document", "hash_sparse", "global_sliding_window",
     "causal_blockwise"],
)  # fmt: skip
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_deterministic_runs_agree_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], family: str
) -> None:
    """Thirteen programs take several tiles of keys each."""
    requires("hopper")
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 13)
    inputs = hopper_kernels.inputs(2, HEADS, KV_HEADS, 2100, 2100, dims, torch.bfloat16, "cuda")
    mask = FAMILIES[family](2100, 2100).to("cuda")
    first = _check(inputs, mask, deterministic=True)
    for name, one, other in zip(("dq", "dk", "dv"), first, _check(inputs, mask, deterministic=True), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("dims", [(64, 64), *WIDE], ids=str)
def test_tiles_wider_than_the_kernel_s(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], deterministic: bool
) -> None:
    requires("hopper")
    monkeypatch.setattr(tile_plan, "MAX_COLUMN_TILES", 2)
    mask = masks.causal_document([170, 230, 300], device="cuda")
    _check(hopper_kernels.inputs(1, 4, 2, 700, 700, dims, torch.bfloat16, "cuda"), mask, deterministic=deterministic)


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_keys_that_no_row_sees(dims: tuple[int, int], deterministic: bool) -> None:
    """Whole tiles of them, whatever they hold, have no gradient and disturb none, also one after the other."""
    requires("hopper")
    mask = masks.full(1300, q_len=900, device="cuda")
    mask.indices[:, :, 128:640] = 0
    mask.indices[:, :, 1024:] = 0
    inputs = hopper_kernels.inputs(40, 2, 2, 900, 1300, dims, torch.bfloat16, "cuda")
    clean = _check(inputs, mask, deterministic=deterministic)
    q, k, v, dout = (x.detach().clone() for x in inputs)
    for x in (k, v):
        x[:, :, 128:640] = float("inf")
        x[:, :, 1024:] = float("nan")
    scale = dims[0] ** -0.5
    out, lse = flashmask_attention(q, k, v, mask, impl="hopper", return_lse=True)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 900)
    with poisoned():
        *got, _ = hopper_kernels.backward(dout, q, k, v, lse, (out, None), mask, tiles, scale, 0.0, deterministic)
    for name, x, want in zip(("dq", "dk", "dv"), got, clean, strict=True):
        torch.testing.assert_close(x, want, rtol=2e-2, atol=2e-2, msg=name)
    assert not got[1][:, :, 128:640].any()
    assert not got[2][:, :, 1024:].any()


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [(130, 70), (777, 1111), (2100, 2100)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["MHA", "GQA"])
@pytest.mark.parametrize("dims", [*DIMS, (40, 48), (96, 72), (160, 136)], ids=str)
def test_rows_put_back(dims: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int]) -> None:
    """The gradients of `put_rows_back`, to the bit."""
    requires("hopper")
    q, k, v, dout = hopper_kernels.inputs(3, *heads, *lengths, dims, torch.bfloat16, "cuda")
    indices = torch.randint(0, lengths[0] + 1, (1, 1, lengths[1], 2), generator=torch.Generator().manual_seed(0))
    mask = FlashMask(indices.int().to("cuda"), causal=False, q_len=lengths[0])
    tiles = tile_plan.build_plan(mask.indices, mask.causal, lengths[0])
    lse = torch.randn(3, heads[0], lengths[0], device="cuda")
    delta = torch.randn_like(lse)
    orders = row_orders(q, k)
    with poisoned():
        apart, together = (
            hopper_kernels.backward(dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, True, orders=given)[:3]
            for given in (None, orders)
        )
    for name, x, order, y in zip(("dq", "dk", "dv"), apart, (*orders, orders[1]), together, strict=True):
        assert torch.equal(put_rows_back(x, order), y), name
        assert y.transpose(1, 2).is_contiguous(), name
