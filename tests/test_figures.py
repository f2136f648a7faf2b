"""The tables of attention, from results in which some providers have no figures."""

import pytest
from test_docs import DOCS

VERSIONS = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}
NUMBERS = ("forward_ms", "backward_ms", "forward_tflops", "backward_tflops", "both_tflops", "mask_ms", "mask_mib")


@pytest.fixture
def figures(monkeypatch):
    """The module of tables of attention."""
    monkeypatch.syspath_prepend(DOCS / "figures")
    import attention_tables

    return attention_tables


def row(mask, provider, dim="128", *, status="timed", length="32768", v_dim=None, **numbers):
    """Return a row as attention.py writes it."""
    text = {name: str(numbers.get(name, 1.0)) if status == "timed" else "" for name in NUMBERS}
    return {
        "mask": mask, "length": length, "head_dim": dim, "v_head_dim": v_dim or dim, "heads": "32", "batch": "2",
        "provider": provider, "status": status, "version": "x 1" if provider == "fa4" else "", **text, **VERSIONS,
    }  # fmt: skip


def lines_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_a_cell_says_why_it_has_no_figure(figures, monkeypatch):
    rows = [
        row("causal", "flashmask", both_tflops=600.4, forward_tflops=650.0, backward_tflops=580.0),
        row("causal", "fa4", both_tflops=601.0, forward_tflops=655.0, backward_tflops=575.0),
        row("causal", "cudnn_flex", status="failed: ValueError: a | b"),
        row("random_eviction", "flashmask", both_tflops=500.0),
        row("random_eviction", "fa4", status="cannot: no form"),
        row("random_eviction", "cudnn_flex", status="differs: dq by 1.0e+00"),
        row("causal", "flashmask", "192", v_dim="128", forward_tflops=400.0, backward_tflops=300.0),
        row("document", "flashmask", "192", v_dim="128"),  # other sizes of heads have few masks
        row("causal", "flashmask", length="8192"),
    ]
    monkeypatch.setattr(figures, "read", lambda name: rows)
    head, _, *lines = lines_of(figures.attention())
    assert head == ["mask", "flashmask", "FlashAttention-4", "cuDNN flex_attention"]
    assert lines == [["causal", "600", "601", "failed"], ["random eviction", "500", "cannot", "differs"]]
    rows = [one | {"length": "8192"} for one in rows[:-1]]  # the length of that table
    text = figures.peers()
    assert lines_of(text)[2:] == [
        ["causal", "128", "650 / 580", "655 / 575", "failed"],
        ["random eviction", "128", "1 / 1", "cannot", "differs"],
        ["causal", "192/128", "400 / 300", "not run", "not run"],
    ]
    assert "x 1, torch 2.11.0" in text
    assert "--dims 128 192/128 --tokens 16384 --providers flashmask fa4 cudnn_flex`" in text


def test_the_cost_of_masks_has_a_plan_of_every_provider_that_makes_one(figures, monkeypatch):
    lengths = ("8192", "32768", "131072")
    rows = [row("causal", name, length=length) for length in lengths for name in ("flashmask", "flex_attention")]
    plans = [{"length": length, "graph_us": "5", **VERSIONS} for length in lengths]
    monkeypatch.setattr(figures, "read", lambda name: plans if name == "plan_h200" else rows)
    assert len(lines_of(figures.masks_made())[0]) == 6
    rows += [row("causal", "cudnn_flex", length=length, mask_ms=2.5, mask_mib=3.0) for length in lengths]
    rows += [row("document", "cudnn_flex", length=length, status="failed: x") for length in lengths]
    head, _, *lines = lines_of(figures.masks_made())
    assert head[-2:] == ["cuDNN's plan", "memory"]
    assert [line[-2:] for line in lines] == [["2.5 to 2.5 ms", "3.00 MiB"]] * 3


def test_ratios_leave_out_what_was_not_timed(figures, monkeypatch):
    import values

    rows = [
        row("causal", "flashmask", both_tflops=600.0),
        row("causal", "flex_attention", both_tflops=300.0),
        row("full", "flashmask", both_tflops=600.0),
        row("full", "flex_attention", status="failed: x"),
        row("causal", "flashmask", "256", both_tflops=900.0),
        row("causal", "flex_attention", "256", both_tflops=100.0),  # sentences speak of 64 and 128
    ]
    monkeypatch.setattr(values, "read", lambda name: rows)
    found = values.speed("x", "both_tflops", "flashmask", "flex_attention", values.CASE, values.SHORTER)
    assert found == "2.00 to 2.00 times as fast (geometric mean 2.00)"


def test_the_table_of_ragged_work_compares_with_flex_attention(figures, monkeypatch):
    sizes = {"heads": "32", "kv_heads": "4", "head_dim": "128", **VERSIONS}

    def work(case, provider, speed="", status="timed"):
        """Return a row as ragged.py writes it."""
        times = {"forward_ms": "0.25", "backward_ms": "0.75"} if status == "timed" else {}
        return {"case": case, "provider": provider, "status": status, "speed_of_flex": speed, **times, **sizes}

    rows = [
        work("short", "flashmask", "1.504"),
        work("short", "fa4", status="cannot: no form"),
        work("short", "flex_attention", "1.0"),
        work("few", "flashmask"),
        work("few", "fa4", "0.9"),
        work("few", "flex_attention", status="failed: x"),
    ]
    monkeypatch.setattr(figures, "read_all", lambda pattern: rows)
    head, _, *lines = lines_of(figures.ragged())
    assert head == ["case", "heads", "FlexAttention (Triton), ms", "flashmask", "FlashAttention-4"]
    assert lines == [
        ["short", "32/4 of 128", "0.250 / 0.750", "1.50", "cannot"],
        ["few", "32/4 of 128", "failed", "", "0.90"],
    ]
    monkeypatch.setattr(figures, "read_all", lambda pattern: ())
    assert figures.ragged() == ""  # not published before it is measured


def test_only_measured_steps_are_drawn(monkeypatch):
    """Figures of a first step, which compiles, are not, nor those of a length at which a later step ran out."""
    monkeypatch.syspath_prepend(DOCS / "figures")
    from results import trained

    measured, first, ended, never = (
        {"peak_gib": peak, "steps": steps} for peak, steps in (("9.8", "2"), ("9.8", "0"), ("", "1"), ("", "0"))
    )
    assert trained([measured, first, ended, never]) == [measured]
