"""The tables and charts of the pages, from results in which some providers have no figures."""

import csv

import pytest
from matplotlib import rc_context
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
    write("attention_peers_h200", [row | {"length": "8192"} for row in rows])
    assert cells(tables.peers())[1:] == [
        ["causal", "650/551", "655/547", "failed"],
        ["random eviction", "500/500", "cannot", "differs"],
    ]
    assert "*One NVIDIA H100, bfloat16, x 1*" in tables.peers()
    assert tables.versions() == "torch 2.11.0, Triton 3.6.0 and transformers 5.17.0 on GPUs"
    assert cells(tables.peers_widths()) == [
        ["head_dim", "FlashAttention-4", "cuDNN flex_attention"],
        ["192/128", "1.50", "not run"],
        ["128", "1.00", "failed"],
    ]


def test_a_cell_has_one_row_and_lines_are_in_order(figures):
    row = {"task": "b", "length": "8192"}
    with pytest.raises(ValueError, match="too many values"):
        figures[0].cell("{length}", task="b")([row, row])
    rows = [row, row | {"length": "512"}, row | {"task": "a"}]
    assert figures[0].ordered(rows, "task", "length") == [[rows[2]], [rows[1]], [row]]


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
    assert tables.speed("flashmask") == "2.00 to 2.00 times as fast (geometric mean 2.00)"


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
    assert cells(tables.peers_shapes("p", "32768"))[1] == ["2 x 32,768", "32/32 of 128", "0.90", "1.50"]


def test_uneven_work_is_compared_with_flex_attention(figures):
    tables, write = figures

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

    cases = ("9.8", "2"), ("9.8", "0"), ("", "1"), ("", "0")
    rows = [{"peak_gib": peak, "steps": steps} for peak, steps in cases]
    assert trained(rows) == rows[:1]


def test_rows_are_compared_at_the_longest_that_all_ran(figures, tmp_path):
    tables, write = figures
    write("row_lengths_1b_h100", [
        trained_in("eager", "flashmask", "2000", "4096"), trained_in("eager", "sdpa", "1000", "4096"),
        trained_in("eager", "flash_attention_4", "800", "4096", peak_gib="20"),
        trained_in("eager", "flashmask", "1800", "8192", peak_gib="10"),
        trained_in("eager", "sdpa", "out of memory", "8192", peak_gib="", steps="0"),
    ])  # fmt: skip
    found = cells(tables.row_lengths())[1:]
    assert found == [["1B SFT", "4,096", "2,000 / 9.0", "1,000 / 9.0", "800 / 20.0", "8,192 or more: 1,800 / 10.0"]]
    assert "over the fastest other attention with 4,096 tokens: SFT 2.00x" in drawn("row_speed_1b", tmp_path)
    assert "over SDPA's with 4,096 tokens: SFT 1.00x" in drawn("row_memory_1b", tmp_path)


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
    case = {"model": "llama-3.2-1b", "prompt": "1024", "completion": "256", "generations": "8"}

    def row(provider, rate, groups):
        figures = {"update_tokens_per_second": rate, "update_peak_gib": "4" if rate.isdigit() else ""}
        return {**case, "groups": groups, "provider": provider, **figures}

    def rows(groups, *rates):
        names = ("flashmask", "sdpa", "flash_attention_4")
        return [row(name, rate, groups) for name, rate in zip(names, rates, strict=False)]

    write("grpo_1b_h200", rows("1", "1", "1"))
    write("grpo_1b_h200", [
        *rows("1", "15000", "8000", "10000"),
        *rows("4", "25000", "10000", "out of memory"), *rows("9", "out of memory", "7"),
    ])  # fmt: skip
    assert cells(tables.TEXTS["grpo"]())[1:] == [
        ["1B", "1,024 : 256", "1 x 8", "15,000", "10,000 (FlashAttention-4, padded)", "1.50x", "4.0 / 4.0"],
        ["1B", "1,024 : 256", "4 x 8", "25,000", "10,000 (SDPA, padded)", "2.50x", "4.0 / 4.0"],
    ]


def trained_in(setting, implementation, rate, length="32768", **more):
    """Return a row as training.py writes it."""
    case = {"shape": "llama-3.2-1b", "task": "sft", "trained": "all", "length": length, "peak_gib": "9", "steps": "3"}
    return {**case, "setting": setting, "implementation": implementation, "tokens_per_second": rate, **more}


def test_the_fastest_settings_of_both_are_compared(figures, tmp_path):
    tables, write = figures
    larger = {"shape": "llama-3.1-8b", "task": "lora", "trained": "adapters"}
    write("settings_1b_h200", [
        trained_in("eager", "flashmask", "100"), trained_in("kept+liger", "flashmask", "120", peak_gib="10"),
        trained_in("compiled", "flashmask", "500"),  # a setting that no other has run is not compared
        trained_in("eager", "sdpa", "30"), trained_in("liger", "flash_attention_4", "110"),
        *(trained_in(setting, "flashmask", "90", "2048") for setting in tables.SETTINGS),
        trained_in("eager", "flashmask", "out of time", "131072"),
        trained_in("eager", "flash_attention_4", "9", "131072"),
    ])  # fmt: skip
    write("settings_8b_h200", [
        trained_in("eager", "flashmask", "50", **larger), trained_in("liger", "flash_attention_4", "100", **larger),
    ])  # fmt: skip
    assert cells(tables.fast_settings())[1:] == [
        ["8B, LoRA", "32,768", "50", "100 (FlashAttention-4, varlen, Liger)", "0.50x", "9.0 / 9.0"],
        ["1B, all weights", "32,768", "120 (attention kept, Liger)", "110 (FlashAttention-4, varlen, Liger)",
         "1.09x", "10.0 / 9.0"],
    ]  # fmt: skip
    for task in ("dpo", "reward"):
        write(f"alignment_{task}_h200", [
            trained_in("eager", "flashmask", "40", task=task),
            trained_in("eager", "trl_flash_attention_4", "10", task=task),
            trained_in("eager", "flash_attention_4", "16", task=task),
        ])  # fmt: skip
    case = {"model": "llama-3.2-1b", "prompt": "1024", "completion": "256", "generations": "8"}
    rates = {"flashmask": "60", "flash_attention_4": "20"}
    write("grpo_1b_h200", [
        {**case, "groups": "4", "provider": name, "update_tokens_per_second": rate, "update_peak_gib": "4"}
        for name, rate in rates.items()
    ])  # fmt: skip
    assert tables.headline("SFT", "{:.2f}x") == "1.09x"
    words = drawn("tasks", tmp_path)
    assert "over the fastest other way: 0.50x to 1.09x on packed documents, 2.5x to 3.0x on shared prompts" in words
    assert "3.00x  FlashAttention-4, padded" in words
    assert "fastest other way = 1" in words
    assert "120  flashmask (attention kept, Liger)" in drawn("training", tmp_path)
    assert "3.00x  over FlashAttention-4, padded" in drawn("grpo", tmp_path)


def test_preferences_beside_stock_trl(figures):
    tables, write = figures
    rates = {"flashmask": "900", "trl_flashmask": "700", "trl_flash_attention_4": "600", "trl_sdpa": "failed"}
    write("preference_1b_h200", [
        trained_in("eager", name, rate, "8192", task="kto", hook_milliseconds="4.3" * (name == "flashmask"))
        for name, rate in rates.items()
    ])  # fmt: skip
    (line,) = cells(tables.preference())[1:]
    assert line[:4] == ["1B, all weights", "KTO", "8,192", "900"]
    assert line[4:] == ["700 (flashmask, not shared)", "1.29x", "9.0 / 9.0", "1.50x", "4.3 ms"]


def test_trajectories_beside_whole_examples(figures):
    tables, write = figures
    rates = {"flashmask": "6.5", "trl_flashmask": "2.01", "flash_attention_4": "2"}
    write("trajectories_1b_h200", [
        trained_in("eager", name, "900", "16384", task="trajectories", examples_per_second=rate)
        for name, rate in rates.items()
    ])  # fmt: skip
    assert cells(tables.trajectories())[1:] == [
        ["1B, all weights", "16,384", "6.50 / 9.0", "2.01 / 9.0", "2.00 / 9.0", "3.23x"]
    ]


def test_images_beside_stock_trl(figures, tmp_path):
    tables, write = figures
    case = {"shape": "gemma-3-4b", "task": "images_50", "images_per_second": "7.26"}
    write("images_gemma_h200", [
        trained_in("eager", name, rate, "8192", **case) for name, rate in
        (("flashmask", "9000"), ("trl_sdpa", "3000"), ("trl_sdpa_single", "4500"))
    ])  # fmt: skip
    write("images_qwen_h200", [
        trained_in("eager", name, rate, "8192", **case | {"shape": "qwen2.5-vl-3b"}) for name, rate in
        (("flashmask", "8000"), ("trl_sdpa", "out of memory"), ("trl_flash_attention_4", "2000"))
    ])  # fmt: skip
    ways = ["packed rows", "FlashAttention-4, padded", "SDPA, padded", "SDPA, one by one"]
    assert cells(tables.images()) == [
        ["model", "tokens per row", "in images", "images/s, packed", *ways],
        ["qwen2.5-vl-3b", "8,192", "50%", "7.3", "8,000 / 9", "2,000 / 9", "out of memory", "-"],
        ["gemma-3-4b", "8,192", "50%", "7.3", "9,000 / 9", "-", "3,000 / 9", "4,500 / 9"],
    ]
    words = drawn("images", tmp_path)
    assert "train 2.0x to 4.0x as fast" in words
    assert "4.00x  over FlashAttention-4, padded" in words


def drawn(name, folder):
    """Return the words of a chart."""
    import charts

    with rc_context(fname=charts.STYLE):
        charts.draw(charts.CHARTS[name], folder / f"{name}.svg")
    return " ".join(charts.words((folder / f"{name}.svg").read_text()))
