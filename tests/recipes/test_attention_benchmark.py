"""The benchmark of attention: masks as its peers take them, its FLOPs, and rows of providers that cannot be timed."""

from __future__ import annotations

import csv
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import tools.recipes  # noqa: F401  # makes the benchmarks importable
import torch
import torch.nn.functional as F
from tools.support import FAMILIES
from torch.utils.flop_counter import FlopCounterMode

from flashmask_hf import masks

import attention  # isort: skip
import peers  # isort: skip

LENGTHS = [5, 1, 3, 7]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Keep the benchmark on the CPU, where the packages in the place of its peers run."""
    monkeypatch.setattr(attention, "DEVICE", "cpu")


def dense_of(bounds: torch.Tensor, keys: int) -> torch.Tensor:
    """Return bool [rows, keys] of row bounds, by their definition."""
    key = torch.arange(keys)[:, None]
    visible = key < bounds[0]
    for start, end in zip(bounds[1::2], bounds[2::2], strict=True):
        visible |= (key >= start) & (key < end)
    return visible.T


@pytest.mark.parametrize("q_len", [29, 61])
@pytest.mark.parametrize("family", FAMILIES)
def test_row_bounds_mean_what_the_mask_means(family, q_len, monkeypatch):
    monkeypatch.setattr(peers, "ROWS", 16)  # several parts, the last one shorter
    mask = FAMILIES[family](61, q_len)
    whole = peers.FlashMask(mask.indices[:1, :1], mask.causal, q_len=mask.q_len)
    bounds = peers.row_bounds(whole)
    dense = whole.to_dense()[0, 0]
    assert bounds.dtype == torch.int32
    assert bool((bounds.diff(dim=0) >= 0).all())  # the package raises on bounds that descend
    assert bool((bounds <= 61).all())
    assert torch.equal(dense_of(bounds, 61), dense)
    starts = F.pad(dense.int(), (1, 0)).diff(dim=1) == 1
    fewest = int((starts.sum(1) - dense[:, 0].int()).max())  # the first bound has no start
    assert len(bounds) == 1 + 2 * fewest
    assert torch.equal(peers.row_bounds(whole, 2), torch.cat([bounds, bounds], 1))


@pytest.mark.parametrize("family", attention.FAMILIES)
def test_row_bounds_of_the_masks_of_the_benchmark(family):
    mask = attention.make_mask(family, 1300).to("cpu")
    assert torch.equal(dense_of(peers.row_bounds(mask), 1300), mask.to_dense()[0, 0])


def test_row_bounds_of_a_small_mask():
    bounds = peers.row_bounds(masks.document([2, 1], kv_len=4))
    assert bounds.tolist() == [[2, 2, 0, 0], [2, 2, 2, 0], [2, 2, 3, 0]]
    assert peers.row_bounds(masks.causal(3)).tolist() == [[1, 2, 3]]


def test_row_bounds_that_kernels_cannot_index_are_refused(monkeypatch):
    mask = masks.causal_document(LENGTHS)
    numbers = peers.row_bounds(mask, 3).numel()
    monkeypatch.setattr(peers, "BOUNDS_LIMIT", numbers + 1)
    assert peers.row_bounds(mask, 3).numel() == numbers
    monkeypatch.setattr(peers, "BOUNDS_LIMIT", numbers)
    with pytest.raises(peers.CannotExpress, match="3 bounds for each of 48 rows"):
        peers.row_bounds(mask, 3)


@pytest.mark.parametrize("constructor", [masks.document, masks.causal_document])
def test_bounds_of_documents(constructor):
    assert peers.document_bounds(constructor(LENGTHS)).tolist() == [0, 5, 6, 9, 16]
    assert peers.document_bounds(constructor(LENGTHS), 2).tolist() == [0, 5, 6, 9, 16, 21, 22, 25, 32]
    assert peers.document_bounds(constructor([4])).tolist() == [0, 4]


@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (8, 32)])
def test_flops_are_those_of_the_matrix_products(dims):
    shape = attention.Shape(2, 6, 3, 10, *dims)
    q, k, v = (torch.randn(2, 6, 10, dim, requires_grad=True) for dim in (dims[0], *dims))
    forward, backward = shape.flops(1)
    with FlopCounterMode(display=False) as counter:
        scores = q @ k.transpose(2, 3)
    again = counter.get_total_flops()  # a fused backward computes the scores again
    with FlopCounterMode(display=False) as counter:
        out = (q @ k.transpose(2, 3)).softmax(-1) @ v
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert counter.get_total_flops() + again == backward
    assert shape.flops(0.25) == (forward / 4, backward / 4)
    assert scores.shape == (2, 6, 10, 10)
    if dims[0] == dims[1]:
        assert (forward, backward) == (4 * 2 * 6 * 100 * 16, 2.5 * forward)


@pytest.mark.parametrize(
    ("dims", "group", "heads"),
    [((64, 64), 1, 64), ((128, 128), 4, 32), ((256, 256), 1, 16), ((96, 96), 1, 43), ((96, 96), 4, 44),
     ((80, 80), 1, 51), ((192, 128), 1, 21)],
)  # fmt: skip
def test_heads_come_near_the_hidden_size(dims, group, heads):
    shape = attention.shape_of(8192, dims, group, 4096, 65536)
    assert shape == (8, heads, heads // group, 8192, *dims)
    assert abs(shape.heads * dims[0] - 4096) <= dims[0] * group / 2
    assert attention.shape_of(131072, dims, group, 4096, 65536).batch == 1


def test_arguments():
    found = attention.parse(["--dims", "64", "192/128", "--lengths", "8192", "131072"])
    assert found.dims == [(64, 64), (192, 128)]
    assert found.lengths == [8192, 131072]
    assert {"fa4", "cudnn_flex", "flex_flash", "cudnn", "flex_attention"} < set(found.providers)
    for wrong in (["--dims", "x"], ["--providers", "fa5"], ["--masks", "none"]):
        with pytest.raises(SystemExit):
            attention.parse(wrong)


def test_an_error_of_one_block_of_rows_is_seen():
    torch.manual_seed(0)
    one = torch.randn(2, 3, 1000, 8)
    assert attention.error_of(one, one) == 0
    assert attention.error_of(one * (1 + 2**-9), one) < 3e-3
    other = one.clone()
    other[1, 2, 900:] *= 1.5  # a part of the last block, which is shorter than others
    assert attention.error_of(other, one) > 0.3
    assert float((other - one).norm() / one.norm()) < 0.1
    other[0, 0, 0, 0] = torch.nan
    assert not attention.error_of(other, one) <= 1e9


def sdpa(q, k, v, visible):
    """Return attention of [B, S, H, D] tensors under a dense mask."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True).transpose(1, 2)


def flash_attn_func(q, k, v, *, causal=False, window_size=(None, None)):
    """Do what FlashAttention-4 says of its arguments: row i sees keys i - left to i + right."""
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = window_size
    visible = (distance <= (len(distance) if left is None else left)) & (distance >= -(right or 0) if causal else True)
    return sdpa(q, k, v, visible.expand(len(distance), -1)), None


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """Do what FlashAttention-4 says of its arguments: sequences of [total, H, D] that see only themselves."""
    lengths = cu_seqlens_q.diff().tolist()
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in part), causal=causal)[0][0] for part in parts]), None


def create_mask_plan(bounds, q, k, v):
    """Do what cudnn.flex_attention says of its arguments; the plan is the dense mask of every batch entry."""
    assert bounds.is_contiguous()
    assert bounds.dtype == torch.int32
    assert bounds.shape[2] == q.shape[0] * q.shape[1]
    assert v.shape[:2] == k.shape[:2]
    return torch.stack([dense_of(part, k.shape[1]) for part in bounds[0].split(q.shape[1], 1)])[:, None]


def flex_attn_func(q, k, v, *, mask_plan):
    """Attend under a plan of `create_mask_plan`."""
    return sdpa(q, k, v, mask_plan)


@pytest.fixture
def packages(monkeypatch):
    """Put modules in the place of flash-attn-4 and cudnn that do on a CPU what these say of their arguments."""
    functions = {
        "flash_attn": (),
        "flash_attn.cute": (flash_attn_func, flash_attn_varlen_func),
        "cudnn": (),
        "cudnn.flex_attention": (create_mask_plan, flex_attn_func),
    }
    for name, members in functions.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda package: f"of {package}")


def run(tmp_path, *flags):
    """Run the benchmark on small cases, and return the rows of its CSV."""
    file = tmp_path / "attention.csv"
    attention.main([*flags, "--hidden", "64", "--repeats", "1", "--warmup", "0", "--csv", str(file)])
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.usefixtures("packages")
def test_families_that_are_not_of_the_paper(tmp_path):
    """Masks of query heads differ, and peers whose masks are the same for all heads leave them out."""
    names = ["flashmask", "flashmask_deterministic", "cudnn_flex"]
    flags = ["--lengths", "384", "--tokens", "768", "--dims", "16", "--group", "2", "--providers", *names]
    rows = run(tmp_path, *flags, "--masks", *attention.OTHERS)
    assert len(rows) == len(attention.OTHERS) * len(names)
    for row in rows:
        alone = row["mask"] in attention.PER_HEAD and not row["provider"].startswith("flashmask")
        assert row["status"].startswith("cannot: " if alone else "timed"), (row["mask"], row["provider"], row["status"])
        assert 0 < float(row["visible_pairs"]) < 1
    for family in attention.PER_HEAD:
        mask = attention.make_mask(family, 1300, 4).to("cpu")
        assert mask.indices.shape[1] == 4
        assert not torch.equal(mask.indices[:, :1], mask.indices[:, 1:2])
        with pytest.raises(peers.CannotExpress, match="same for all heads"):
            peers.PROVIDERS["flex_attention"].prepare(peers.Case(family, mask, *[torch.empty(0)] * 3))


@pytest.mark.parametrize("dims", ["16", pytest.param("32/16", marks=pytest.mark.full)])
@pytest.mark.usefixtures("packages")
def test_peers_get_the_masks_that_they_can_express(dims, tmp_path):
    names = ["flashmask", "fa4", "cudnn_flex", "cudnn", "sdpa_dense"]
    rows = run(tmp_path, "--lengths", "384", "--tokens", "768", "--dims", dims, "--group", "2", "--providers", *names)
    assert len(rows) == len(attention.FAMILIES) * len(names)
    assert {row["kv_heads"] for row in rows} == {"2" if dims == "16" else "1"}
    fa4 = {"full", "causal", "sliding_window", "causal_document", "document"}
    for row in rows:
        where = row["mask"], row["provider"]
        if row["provider"] == "cudnn":  # not on a CPU, and only two masks
            assert row["status"].startswith("failed: " if row["mask"] in ("full", "causal") else "cannot: "), where
        elif row["provider"] == "fa4" and row["mask"] not in fa4:
            assert row["status"].startswith("cannot: "), where
        else:
            assert row["status"] == "timed", (where, row["status"])
        timed = row["status"] == "timed"
        assert all(bool(row[figure]) == timed for figure in attention.FIGURES), where
    versions = {row["provider"]: row["version"] for row in rows if row["status"] == "timed"}
    assert versions["fa4"] == "flash-attn-4 of flash-attn-4"
    assert versions["cudnn_flex"] == "nvidia-cudnn-frontend of nvidia-cudnn-frontend"


def test_providers_that_are_wrong_fail_or_are_missing_are_not_timed(tmp_path, monkeypatch, capsys):
    right = peers.PROVIDERS["sdpa_dense"]

    def leaks(case):
        """Attend under a mask whose last row sees what it should not."""
        return right.prepare(case._replace(mask=masks.full(case.mask.kv_len)))

    def raises(case):
        """Fail with an error of two lines."""
        raise RuntimeError("no kernel\nfor this width")

    monkeypatch.setitem(peers.PROVIDERS, "sdpa", peers.Provider(leaks))
    monkeypatch.setitem(peers.PROVIDERS, "cudnn", peers.Provider(raises))
    names = ["sdpa_dense", "sdpa", "cudnn", "fa4"]
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    rows = run(tmp_path, "--lengths", "256", "300", "--tokens", "1", "--dims", "16", "--masks", "causal",
               "--providers", *names)  # fmt: skip
    assert [row["length"] for row in rows] == ["256"] * 4 + ["300"] * 4
    status = {row["provider"]: row["status"] for row in rows}
    assert status["sdpa_dense"] == "timed"
    assert status["sdpa"].startswith("differs: out by ")
    assert all(f"{what} by" in status["sdpa"] for what in ("dq", "dk", "dv"))
    assert status["cudnn"] == "failed: RuntimeError: no kernel for this width"
    assert status["fa4"] == "not installed"
    printed = capsys.readouterr()
    assert "sdpa differs, cudnn failed, fa4 not installed" in printed.out
    assert "causal 300 16/16 cudnn: failed" in printed.err  # progress


def test_kernels_of_this_package_that_are_wrong_are_named(tmp_path, monkeypatch):
    right = peers.PROVIDERS["flashmask"]

    def wrong(case):
        """Return an output that is too large for the row that is compared with float64, and a right one for others."""
        return lambda: lambda q, k, v: right.prepare(case)()(q, k, v) * (1.1 if q.shape[2] == 128 else 1)

    monkeypatch.setattr(attention, "CHECKED", 128)
    monkeypatch.setitem(peers.PROVIDERS, "flashmask", peers.Provider(wrong))
    monkeypatch.setitem(peers.PROVIDERS, "flashmask_triton", right)
    flags = ("--lengths", "256", "--tokens", "1", "--dims", "16", "--masks", "causal", "--providers")
    ours, peer = run(tmp_path, *flags, "flashmask", "sdpa_dense")
    assert ours["status"].startswith("differs: out by 1.0e-01")
    assert not ours["forward_ms"]
    assert peer["status"] == "timed"  # beside flashmask_triton
    monkeypatch.setitem(peers.PROVIDERS, "flashmask_triton", peers.Provider(wrong))
    for names in (["flashmask", "sdpa_dense"], ["sdpa_dense"]):
        peer = run(tmp_path, *flags, *names)[-1]
        assert peer["status"] == "failed: no kernel of flashmask agrees with float64"
        assert not peer["forward_ms"]


def test_what_is_compiled_beforehand(monkeypatch):
    """Each kernel once, at the shape that is timed and that of the check."""
    tasks = []
    monkeypatch.setattr(attention, "run_in_processes", lambda run, work, jobs: tasks.extend(work))
    shape = attention.shape_of(8192, (64, 64), 1, 4096, 65536)
    cases = [(family, shape) for family in ("causal", "causal_document", "full")]
    attention.precompile(["flashmask"], cases, 2)
    assert [(name, family, x.length == 8192) for name, family, x in tasks] == [
        ("flashmask", family, timed) for family in ("causal", "full") for timed in (True, False)
    ]
