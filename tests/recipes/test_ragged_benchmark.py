"""The benchmark of little and uneven work: its cases, its check beside float64, and its rows."""

from __future__ import annotations

import csv

import pytest
import tools.recipes  # noqa: F401  # makes the benchmarks importable
import torch
from tools.support import FAMILIES

from flashmask_hf import flashmask_attention, masks

import attention  # isort: skip
import packed_attention  # isort: skip
import peers  # isort: skip
import ragged  # isort: skip


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Keep the benchmark on the CPU."""
    monkeypatch.setattr(attention, "DEVICE", "cpu")


def drawn(heads, kv_heads, length, q_len=None):
    torch.manual_seed(0)
    return attention.inputs(attention.Shape(1, heads, kv_heads, length, 16, 16), q_len)


@pytest.mark.parametrize("title", ragged.CASES)
def test_a_case_is_what_its_name_says(title):
    work, mask = ragged.CASES[title], ragged.CASES[title].make()
    group, rows, keys = title.split()[0], mask.row_count(), mask.kv_len
    assert mask.indices.shape[:2] == (1, 1)
    assert work.dim == (64 if "head_dim 64" in title else 128)
    assert mask.causal == (work.family not in ("full", "document"))
    if group == "short":
        assert rows == keys == 32768
        assert mask.sparsity() > 0.95  # no document is long
    elif group == "grouped":
        assert work.heads == 8 * work.kv_heads
        assert keys <= 8192
    elif group == "few":
        assert work.heads == int(title.split()[1]) <= 4
        assert keys in (8192, 32768)
    elif group in ("chunk", "across"):
        assert {rows, keys} == {1024, 16384}
    else:
        assert group == "odd"
        assert keys % 128
        assert str(keys) in title


def test_short_documents_fill_a_row():
    lengths = ragged.short_documents(32768, torch.Generator().manual_seed(0))
    assert sum(lengths) == 32768
    assert 48 < len(lengths) < 128  # the mean is 256 * exp(1 / 2) = 422
    assert min(lengths) >= 1
    assert 150 < float(torch.tensor(lengths).float().median()) < 400


@pytest.mark.parametrize("q_len", [29, 61])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_for_flex_attention_mean_what_the_mask_means(family, q_len):
    mask = FAMILIES[family](61, q_len)
    whole = peers.FlashMask(mask.indices[:1, :1], mask.causal, q_len=mask.q_len)
    visible = packed_attention.visible_pairs(whole)
    rows, keys = torch.arange(whole.row_count())[:, None], torch.arange(61)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(visible(zero, zero, rows, keys), whole.to_dense()[0, 0])


@pytest.mark.parametrize(("length", "q_len"), [(50, 50), (50, 23), (23, 50)])
@pytest.mark.parametrize("family", ["causal", "full"])
def test_exact_results_are_those_of_attention_in_one_part(family, length, q_len, monkeypatch):
    monkeypatch.setattr(attention, "EXACT_ROWS", 16)  # several parts, the last one shorter
    mask = getattr(masks, family)(length, q_len=q_len)
    tensors = drawn(4, 2, length, q_len)
    assert [x.shape[2] for x in tensors] == [q_len, length, length, q_len]
    q, k, v = (x.detach().double().requires_grad_() for x in tensors[:3])
    out = flashmask_attention(q, k, v, mask, impl="reference")
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]
    for one, other in zip(attention.exact(tensors, mask), expected, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_first_and_the_last_head_are_checked():
    q, k, *_ = drawn(12, 3, 5)
    queries, keys = ragged.checked_heads([q, k], 3)
    assert torch.equal(queries, q[:, [0, 1, 2, 3, 8, 9, 10, 11]])
    assert torch.equal(keys, k[:, [0, 2]])
    for kv_heads in (1, 2):
        q, k, *_ = drawn(2 * kv_heads, kv_heads, 5)
        assert torch.equal(ragged.checked_heads([q], kv_heads)[0], q)


SMALL = {
    "few a": ragged.Work("causal", lambda: masks.causal(200, q_len=77), 6, 3, 16),
    "few b": ragged.Work("full", lambda: masks.full(77, q_len=200), 1, 1, 16),
    "short c": ragged.Work("causal_document", lambda: masks.causal_document([5, 60, 1]), 3, 3, 16),
}


def run(tmp_path, monkeypatch, *flags):
    """Run the benchmark on small cases, and return the rows of its CSV."""
    monkeypatch.setattr(ragged, "CASES", SMALL)
    file = tmp_path / "ragged.csv"
    ragged.main([*flags, "--repeats", "1", "--warmup", "0", "--csv", str(file)])
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def test_rows_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(peers.PROVIDERS, "flex_attention", peers.PROVIDERS["sdpa_dense"])
    monkeypatch.setattr(ragged, "gpu_medians", lambda calls, *_: {n: 2.0 if "flex" in n else 4.0 for n in calls})
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    names = ["flashmask", "flex_attention", "fa4", "cudnn"]
    rows = run(tmp_path, monkeypatch, "--providers", *names)
    assert [row["case"] for row in rows] == [title for title in SMALL for _ in names]
    status = {(row["case"], row["provider"]): row["status"].partition(":")[0] for row in rows}
    for title in SMALL:
        assert [status[title, name] for name in names[:3]] == ["timed", "timed", "not installed"]
    assert status["few a", "cudnn"] == status["short c", "cudnn"] == "cannot"  # not square; documents
    assert status["few b", "cudnn"] == "failed"  # it has the mask, but not on a CPU
    ours, flex, absent, _ = rows[:4]
    assert (ours["q_len"], ours["kv_len"], ours["heads"], ours["kv_heads"]) == ("77", "200", "6", "3")
    assert (ours["both_ms"], ours["speed_of_flex"], flex["speed_of_flex"]) == ("8.0", "0.5", "1.0")
    assert [absent[figure] for figure in ragged.FIGURES] == [""] * 4
    assert "few a: flashmask 4.0 / 4.0 (0.5x), flex_attention" in capsys.readouterr().out
    (row,) = run(tmp_path, monkeypatch, "--providers", "flashmask", "--cases", "short")
    assert (row["case"], row["speed_of_flex"]) == ("short c", "")  # FlexAttention did not run


def test_a_provider_that_is_wrong_in_its_last_head_is_not_timed(tmp_path, monkeypatch):
    right = peers.PROVIDERS["sdpa_dense"]

    def wrong(case):
        """Return an output that is too large in the last head."""
        factor = torch.tensor([1.0] * (case.q.shape[1] - 1) + [1.1], dtype=torch.bfloat16)[:, None, None]
        return lambda: lambda q, k, v: right.prepare(case)()(q, k, v) * factor

    monkeypatch.setitem(peers.PROVIDERS, "sdpa", peers.Provider(wrong))
    rows = run(tmp_path, monkeypatch, "--providers", "sdpa_dense", "sdpa")
    assert [row["status"].partition(" by")[0] for row in rows] == ["timed", "differs: out"] * 3
