"""The tables and charts of the pages, from results in which some providers have no figures."""

import csv
import re

import pytest
from test_docs import DOCS

CONDITIONS = {"gpu": "NVIDIA H100", "torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """The module of tables, with results in an empty folder, and a function that writes results there."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    import results
    import tables

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.read.cache_clear()

    def write(name, rows):
        names = dict.fromkeys([*(key for row in rows for key in row), *CONDITIONS])
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(names), restval="")
            writer.writeheader()
            writer.writerows([{**row, **CONDITIONS} for row in rows])

    yield tables, write
    results.read.cache_clear()


def cells(table):
    """Return the cells of a table in Markdown, the line of its head first."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [lines[0], *lines[2:]]


def attention(mask, provider, dim="128", *, status="timed", length="32768", v_dim=None, forward=1.0, backward=1.0):
    """Return a row as attention.py writes it; TFLOP/s of both passes are their mean."""
    numbers = {"forward_tflops": forward, "backward_tflops": backward, "both_tflops": (forward + backward) / 2}
    return {
        "mask": mask, "length": length, "head_dim": dim, "v_head_dim": v_dim or dim, "heads": "32", "kv_heads": "32",
        "batch": "2", "provider": provider, "status": status, "version": "x 1" if provider == "fa4" else "",
        **{name: str(x) if status == "timed" else "" for name, x in numbers.items()},
    }  # fmt: skip


def test_a_cell_says_why_it_has_no_figure(figures):
    tables, write = figures
    rows = [
        attention("causal", "flashmask", forward=650, backward=551),
        attention("causal", "fa4", forward=655, backward=547),
        attention("causal", "cudnn_flex", status="failed: ValueError: a | b"),
        attention("random_eviction", "flashmask", forward=500, backward=500),
        attention("random_eviction", "fa4", status="cannot: no form"),
        attention("random_eviction", "cudnn_flex", status="differs: dq by 1.0e+00"),
        attention("document", "flashmask", "192", v_dim="128", forward=300, backward=300),
        attention("document", "fa4", "192", v_dim="128", forward=200, backward=200),
    ]
    write("attention_h200", rows)
    write("attention_peers_h200", [row | {"length": "8192"} for row in rows])
    assert "`python recipes/benchmarks/attention.py --providers flashmask fa4 cudnn_flex`" in tables.attention()
    assert cells(tables.peers())[1:] == [
        ["causal", "650/551", "655/547", "failed"],
        ["random eviction", "500/500", "cannot", "differs"],
    ]
    assert "x 1, torch 2.11.0" in tables.peers()
    assert cells(tables.peers_widths()) == [
        ["head_dim", "FlashAttention-4", "cuDNN flex_attention"],
        ["192/128", "1.50", "not run"],
        ["128", "1.00", "failed"],
    ]


def test_ratios_leave_out_what_was_not_timed(figures):
    tables, write = figures
    write(
        "attention_h200",
        [
            attention("causal", "flashmask", forward=600, backward=600),
            attention("causal", "flex_attention", forward=300, backward=300),
            attention("full", "flashmask"),
            attention("full", "flex_attention", status="failed: x"),
            attention("causal", "flashmask", "256", forward=900),
            attention("causal", "flex_attention", "256"),  # sentences speak of 64 and 128
        ],
    )
    assert tables.speed("attention_h200", "flashmask", "32768") == "2.00 to 2.00 times as fast (geometric mean 2.00)"


def test_the_fastest_peer_of_each_mask_counts(figures):
    tables, write = figures
    rows = [
        attention("causal", "flashmask", forward=90, backward=90),
        attention("causal", "fa4", forward=100, backward=100),
        attention("causal", "cudnn_flex", forward=80, backward=80),
        attention("random_eviction", "flashmask", forward=90, backward=90),
        attention("random_eviction", "cudnn_flex", forward=60, backward=60),
        attention("qk_sparse", "flashmask"),  # no peer ran
    ]
    write("p", rows)
    assert cells(tables.peers_shapes("p", ("32768",), "", ""))[1] == ["2 x 32,768", "32/32 of 128", "0.90", "1.50"]


def test_uneven_work_is_compared_with_flex_attention(figures):
    tables, write = figures
    assert tables.ragged() == ""  # not published before it is measured

    def work(case, provider, forward="1", status="timed"):
        times = {"forward_ms": forward, "backward_ms": "1"} if status == "timed" else {}
        return {"case": case, "provider": provider, "status": status, **times}

    write("ragged_h100", [
        work("few a", "flashmask"), work("few a", "flex_attention", "2"), work("few a", "fa4", status="cannot: x"),
        work("few b", "flashmask"), work("few b", "flex_attention", "3"), work("odd", "flashmask"),
        work("odd", "fa4"), work("odd", "flex_attention", "1"),
    ])  # fmt: skip
    head, *lines = cells(tables.ragged())
    assert head == ["work", "cases", "flashmask", "FlashAttention-4"]
    assert [line[1:3] for line in lines] == [["2", "1.50 to 2.00 (1.75)"], ["1", "1.00"]]


def test_only_measured_steps_are_drawn(figures):
    """A first step, which compiles, is not, nor a length at which a later step ran out."""
    from results import trained

    measured, first, ended, never = (
        {"peak_gib": peak, "steps": steps} for peak, steps in (("9.8", "2"), ("9.8", "0"), ("", "1"), ("", "0"))
    )
    assert trained([measured, first, ended, never]) == [measured]


def test_a_study_appears_once_it_is_measured(figures, tmp_path):
    tables, write = figures
    assert (tables.row_lengths(), tables.profile()) == ("", "")
    run = {"shape": "llama-3.2-1b", "task": "sft", "tokens_per_second": "2000", "peak_gib": "5", "steps": "2"}
    full = {**run, "tokens_per_second": "out of memory", "peak_gib": "", "steps": "0"}
    write(
        "row_lengths_1b_h100",
        [
            {**run, "length": "4096", "implementation": "flashmask"},
            {**run, "length": "4096", "implementation": "sdpa", "tokens_per_second": "1000"},
            {**run, "length": "8192", "implementation": "flashmask", "tokens_per_second": "1800", "peak_gib": "6"},
            {**full, "length": "8192", "implementation": "sdpa"},
        ],
    )
    text = tables.row_lengths()
    assert cells(text)[1:] == [["1B SFT", "4,096", "2,000 / 5.0", "1,000 / 5.0", "8,192 or more: 1,800 / 6.0"]]
    drawn = re.findall(r"!\[[^]]+\]\(assets/(\w+)\.svg\)", text)
    assert drawn == ["row_speed_1b", "row_memory_1b"]
    from charts import ROW_LENGTHS

    for name, chart in ROW_LENGTHS.items():
        chart(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").exists() == (name in drawn)


def test_the_profile_of_a_step_has_a_column_for_each_length_and_setting(figures):
    tables, write = figures
    step = {"shape": "llama-3.2-1b", "trained": "all", "launches": "1", "milliseconds": "1"}

    def rows(setting, length, milliseconds, **shares):
        case = {**step, "setting": setting, "length": length, "step_milliseconds": milliseconds}
        return [{**case, "kind": kind, "share": share} for kind, share in shares.items()]

    write(
        "step_profile_1b_h100",
        [
            *rows("kept", "8192", "200", norms="0.25", embedding="0.01", idle="0.74"),
            *rows("kept", "32768", "1000", loss="0.4", norms="0.5", idle="0.1"),
            *rows("compiled+kept", "8192", "100", norms="0.5", idle="0.5"),
            *rows("eager", "8192", "300", norms="1"),
            *rows("kept", "131072", "", **{"out of memory": ""}),
        ],
    )
    assert cells(tables.profile()) == [
        ["", *(f"1B, all weights, {case}" for case in ("8,192", "32,768", "8,192, compiled"))],
        ["a step", "200 ms", "1,000 ms", "100 ms"],
        ["norms", "25.0%", "50.0%", "50.0%"],
        ["loss", "0.0%", "40.0%", "0.0%"],
        ["all else", "1.0%", "0.0%", "0.0%"],
        ["idle", "74.0%", "10.0%", "50.0%"],
    ]


def test_updates_of_grpo_have_a_row_for_each_micro_batch(figures):
    tables, write = figures
    case = {"model": "llama-3.2-1b", "prompt": "1024", "completion": "256", "generations": "8", "compiled": "off"}

    def rows(groups, ours, stock, **more):
        figures = {"update_tokens_per_second": "9000", "update_peak_gib": "4", "update_against_sdpa": ours}
        none = {"update_tokens_per_second": "out of memory", "update_peak_gib": "", "update_against_sdpa": ""}
        theirs = {**figures, "update_peak_gib": "8", "update_against_sdpa": stock} if stock else none
        here = {**case, "groups": groups, **more}
        return [{**here, "provider": "flashmask", **figures}, {**here, "provider": "sdpa", **theirs}]

    write(
        "grpo_h100",
        [*rows("1", "1.5", "1.0"), *rows("1", "2", "1.0", compiled="on"), *rows("4", "2.5", "1.0"), *rows("9", "", "")],
    )
    assert cells(tables.grpo())[1:] == [
        ["1B", "1,024 : 256", "1 x 8", "1.50", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "1 x 8, compiled", "2.00", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "4 x 8", "2.50", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "9 x 8", "-", "-", "-", "-", "4.0 /"],
    ]
