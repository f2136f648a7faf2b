"""Machine code of the kernels, compiled without a GPU: matrix units, few spills, every architecture."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
from tools.support import INTERPRETED, covering

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter compiles nothing", allow_module_level=True)

from tools.cubin import AMPERE, BLACKWELL, HOPPER, MI300, Kernel, compile_only
from tools.portable_kernels import backward, decode, forward

from flashmask_hf import FlashMask, masks
from flashmask_hf._call.arguments import Arguments
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.portable import backward as portable_backward
from flashmask_hf.kernels.shared import configs
from flashmask_hf.kernels.shared.plan_kernels import build_plan
from flashmask_hf.kernels.shared.row_statistics import prepare_statistics
from flashmask_hf.sparse.kernels import hash as hashing
from flashmask_hf.sparse.kernels.gather import gather_upstream, move_rows
from flashmask_hf.sparse.kernels.sort import sorted_columns
from flashmask_hf.tile_plan import build_plan as torch_plan

KILOBYTES = {HOPPER: 227, BLACKWELL: 227, AMPERE: 163, MI300: 64}
OTHERS = [
    pytest.param(target, id=name, marks=pytest.mark.full)
    for name, target in {"ampere": AMPERE, "blackwell": BLACKWELL, "mi300": MI300}.items()
]


def _compile(
    monkeypatch,
    target,
    dim: int,
    v_dim: int,
    mask,
    dtype=torch.bfloat16,
    softcap: float = 0.0,
    multiprocessors: int = 1,
    **dropout: Any,
) -> dict[str, Kernel]:
    q, k, v = (torch.empty(1, 512, h, d, dtype=dtype).transpose(1, 2) for h, d in ((4, dim), (2, dim), (2, v_dim)))
    plan = torch_plan(mask.indices, mask.causal, 512)
    _pretend(monkeypatch, target, multiprocessors)
    with compile_only(target) as kernels:
        out, lse = forward(q, k, v, mask, plan, None, 0.1, softcap, **dropout)
        backward(out, q, k, v, lse, (out, lse), mask, plan, 0.1, softcap, **dropout)
        prepare_statistics(4, 512, 512)(lse, lse, lse, lse)
        build_plan(mask.indices, mask.causal, 512)
    return {kernel.name: kernel for kernel in kernels}


def _pretend(monkeypatch, target, multiprocessors: int) -> None:
    """Choose tiles as on a GPU of the target's kind with a number of multiprocessors."""
    major = target.arch // 10 if target.backend == "cuda" else 0
    usable = configs.usable_shared_memory(KILOBYTES[target] * 1024, major)
    monkeypatch.setattr(configs, "_shared_memory", lambda device: usable)
    for module in (configs, portable_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(configs, "_on_cpu", lambda device: False)


FORMS = {
    "causal_document": masks.causal_document([200, 312]),
    "causal_blockwise": masks.causal_blockwise([100, 200, 212]),
    "prefix_lm_document": masks.prefix_lm_document([(50, 200), (9, 312)]),
}


@pytest.mark.parametrize(
    ("dim", "form", "multiprocessors"),
    covering(
        1,
        [64, 128],
        ["causal_document", *(pytest.param(x, marks=pytest.mark.full) for x in [*FORMS][1:])],
        [pytest.param(1, id="many rows"), pytest.param(132, id="few rows")],
    ),
)
def test_hopper(monkeypatch: pytest.MonkeyPatch, dim: int, form: str, multiprocessors: int) -> None:
    kernels = _compile(monkeypatch, HOPPER, dim, dim, FORMS[form], multiprocessors=multiprocessors)
    assert ("_sort_items" in kernels) == (multiprocessors == 1)
    for name in ("_forward", "_backward_keys", "_backward_queries"):
        assert "wgmma.mma_async" in kernels[name].assembly, name
        assert "cp.async.bulk.tensor" in kernels[name].assembly, name
        assert kernels[name].shared <= 227 * 1024, name
    assert "__assertfail" in kernels["_column_plan"].assembly  # for indices out of range
    assert kernels["_forward"].spills == 0
    assert kernels["_backward_queries"].spills <= 64
    assert kernels["_backward_keys"].spills <= 256


@pytest.mark.full
@pytest.mark.parametrize(("dim", "numbers"), [(128, 1), (64, 34)])
def test_hopper_with_dropout(monkeypatch: pytest.MonkeyPatch, dim: int, numbers: int) -> None:
    """The pattern needs no shared memory and moves no words between threads; a shard loads numbers of its rows."""
    seed = torch.zeros(numbers, dtype=torch.int64)
    mask = FORMS["causal_document"]
    plain = _compile(monkeypatch, HOPPER, dim, dim, mask)
    dropping = _compile(monkeypatch, HOPPER, dim, dim, mask, dropout=0.1, seed=seed)
    for name in ("_forward", "_backward_keys", "_backward_queries"):
        assert dropping[name].shared == plain[name].shared, name
        assert dropping[name].spills <= 512, name
        moves = [
            sum(bool(re.search(r"\b(STS|LDS|SHFL)", x)) for _, x in kernels[name].instructions())
            for kernels in (dropping, plain)
        ]
        assert moves[0] == moves[1] or numbers > 1, name


@pytest.mark.parametrize("dim", [64, 128])
def test_few_rows_are_spread_over_more_multiprocessors(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    _pretend(monkeypatch, HOPPER, 132)

    def tiles(heads: int, q_len: int) -> list[configs.Config]:
        x = packed_layout(1, heads, q_len, dim, dtype=torch.bfloat16, device=torch.device("cpu"))
        problem = Problem(x, x, x, torch.Size((1, 1, q_len, 1)), True, sinks=False, arguments=Arguments(scale=1.0))
        return [configs.forward_config(problem), configs.queries_config(problem)]

    few, many = tiles(1, 8192), tiles(2, 8192)  # 64 and 128 tiles of 128 rows
    assert [config.rows for config in few] == [64, 64]
    assert [config.rows for config in many] == [128, 128]
    assert [config.columns for config in few] == [config.columns for config in many]  # the same order of sums
    assert tiles(1, 66 * 128) == few
    assert tiles(1, 66 * 128 + 1) == tiles(1, 67 * 128) == many


@pytest.mark.parametrize(
    ("dims", "multiprocessors"),
    [*(((d, v), 1) for d, v in ((40, 40), (128, 128), (192, 128), (256, 256))), ((40, 40), 132), ((128, 128), 132)],
    ids=str,
)
@pytest.mark.parametrize("target", OTHERS)
def test_other_architectures_build(
    monkeypatch: pytest.MonkeyPatch, target, dims: tuple[int, int], multiprocessors: int
) -> None:
    """With many rows for one multiprocessor, and few for 132."""
    mask = FORMS["causal_blockwise" if dims[0] == 128 else "causal_document"]
    kernels = _compile(monkeypatch, target, *dims, mask, torch.float16, 30.0, multiprocessors)
    for name, kernel in kernels.items():
        assert kernel.shared <= KILOBYTES[target] * 1024, name


@pytest.mark.parametrize(
    ("dims", "mask_heads"),
    [
        pytest.param(dims, heads, marks=[pytest.mark.full] * (heads != quick), id=f"{dims}-{heads} masks")
        for dims, quick in {(64, 64): 1, (128, 128): 8, (192, 128): 1, (256, 256): 8}.items()
        for heads in (1, 8)
    ],
)
@pytest.mark.parametrize("target", [pytest.param(HOPPER, id="hopper"), *OTHERS])
def test_decode(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, target, dims: tuple[int, int], mask_heads: int
) -> None:
    """Decoding has matrix units, keys loaded ahead of their use, two programs to a multiprocessor and few spills."""
    if target == MI300 and mask_heads > 1 and max(dims) <= 128 and triton.__version__.startswith("3.9."):
        reason = "the compiler of Triton 3.9 fails, as docs/limits.md says"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    _pretend(monkeypatch, target, 132)
    dim, v_dim = dims
    q, k, v = (
        torch.empty(1, h, s, d, dtype=torch.bfloat16) for h, s, d in ((8, 3, dim), (2, 4096, dim), (2, 4096, v_dim))
    )
    mask = FlashMask(torch.zeros(1, mask_heads, 4096, 4, dtype=torch.int32), causal=False)
    with compile_only(target) as kernels:
        decode(q, k, v, mask, torch.zeros(8), 0.1, 30.0)
    first, second = kernels
    assert [first.name, second.name] == ["_decode", "_combine"]
    assert 2 * first.shared <= KILOBYTES[target] * 1024
    assert second.shared <= 8 * 1024
    if target.backend == "cuda":
        assert "mma.sync" in first.assembly
        assert first.assembly.count("cp.async.cg") >= 16
        assert "__assertfail" in first.assembly
        assert (first.spills or 0) <= 64
        assert second.spills == 0
    else:
        assert "v_mfma" in first.assembly
        assert "s_trap" in first.assembly or "__assert" in first.assembly


@pytest.mark.parametrize("target", [pytest.param(HOPPER, id="hopper"), *OTHERS])
def test_sorting(target) -> None:
    """Rows move 16 bytes at a time, and many of them at once; buckets out of range stop the program."""
    x = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    bucket, hidden_from = torch.zeros(2, 4, 512, dtype=torch.int64), torch.zeros(1, 1, 512, dtype=torch.int32)
    order, kept = torch.zeros(2, 4, 512, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    with compile_only(target) as kernels:
        sorted_columns(bucket, bucket[:, :2], hidden_from, 16)
        move_rows(x, torch.empty_like(x), order, kept, back=False)
        move_rows(x, torch.empty_like(x), order, None, back=True)
        gather_upstream(x, x, order, kept, torch.float32)
    assert [kernel.name for kernel in kernels] == [
        "_count_buckets",
        "_sort_rows",
        "_sorted_indices",
        "_move",
        "_move",
        "_gather_upstream",
    ]
    if target.backend == "cuda":
        assert not any(kernel.spills for kernel in kernels)
        for kernel in (kernels[0], kernels[2]):
            assert "__assertfail" in kernel.assembly
        for kernel, loads, stores in zip(kernels[3:], (8, 8, 8), (8, 8, 4), strict=True):
            assert kernel.assembly.count("ld.global.v4.b32") == loads
            assert kernel.assembly.count("st.global.v4.b32") == stores


@pytest.mark.parametrize("target", [pytest.param(HOPPER, id="hopper"), *OTHERS])
def test_hashing(target) -> None:
    """Buckets come from products on the tensor cores, without copies of the vectors."""
    x = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    with compile_only(target) as kernels:
        directions = torch.empty(4, 64, 8, dtype=torch.bfloat16)
        hashing.nearest(x, directions, torch.uint8)
    assert [kernel.name for kernel in kernels] == ["_nearest"]
    product = {AMPERE: "mma.sync", HOPPER: "wgmma", BLACKWELL: "mma", MI300: "mfma"}[target]
    assert product in kernels[0].assembly
    assert "ld.global.v4.b32" in kernels[0].assembly or target.backend != "cuda"
