"""The documentation: links lead somewhere, the navigation has every page, and figures are those of the benchmarks."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import flashmask_hf
from flashmask_hf import masks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
TASKS = next(entry["Tasks"] for entry in NAVIGATION if "Tasks" in entry)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(name, page):
    """Return the links and pictures of a page that lead to no file, to no heading, or out of the site but by https."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.fullmatch(r"https://(?:[\w-]+\.)+[a-z]{2,}(?:/[\w./#?=&%~+-]*)?", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        leaves = name.startswith("docs/") and DOCS not in file.resolve().parents
        if not file.is_file() or leaves or (anchor and anchor not in anchors(file.read_text())):
            found.append(target)
    return found


def entries(navigation):
    for entry in navigation:
        for target in entry.values():
            yield from entries(target) if isinstance(target, list) else [target]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    assert broken_links(name, PAGES[name]) == []


def test_broken_links_are_found():
    page = "[a](gone.md) [b](index.md#gone) ![c](assets/gone.png) [d](../README.md) [e](index.md#install)"
    assert broken_links("docs/index.md", page) == ["gone.md", "index.md#gone", "assets/gone.png", "../README.md"]
    page = "[a](https://arxiv.org/abs/1) [b](http://arxiv.org) [c](https://arxiv) [d](https://arxiv.org/abs/1,)"
    assert broken_links("docs/index.md", page) == ["http://arxiv.org", "https://arxiv", "https://arxiv.org/abs/1,"]


def test_the_navigation_has_every_page_once():
    assert sorted(entries(NAVIGATION)) == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", list(entries(TASKS)))
def test_a_page_of_a_task_opens_with_its_mask_and_has_a_snippet_and_a_chart(name):
    page = (DOCS / name).read_text()
    opening = page.partition("```")[0]
    assert re.search(r"!\[[^]]+\]\(assets/[\w/]+\.png\)", opening)
    assert "```python" in page
    assert re.search(r"!\[[^]]+\]\(assets/\w+\.svg\)", page)


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_text_starts_with_a_comment(name):
    """Markdown takes such a line for HTML, and ends the paragraph before it."""
    assert re.findall(r"^ *<!-- figure [\w-]+ -->(?!<!-- end -->$).+$", PAGES[name], re.MULTILINE) == []


@pytest.mark.parametrize("name", PAGES)
def test_prose_names_no_commits(name):
    hashes = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", without_code(PAGES[name]))
    assert hashes == []


def test_the_gallery_has_every_family():
    families = {name for name in masks.__all__ if name != "Node" and not name.startswith("from_")}
    assert set(re.findall(r"^## (\w+)$", PAGES["docs/masks.md"], re.MULTILINE)) == families


def test_the_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert {f"flashmask_hf.{name}" for name in flashmask_hf.__all__} <= listed
    trainers = {f"trainers.experimental.{name}" for name in ("gmpo", "async_grpo")}
    assert {f"flashmask_hf.{name}" for name in {"collators", "sparse", "trainers"} | trainers} <= listed


@pytest.mark.full
def test_figures_are_those_of_the_benchmarks():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(DOCS / "figures"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr


CONDITIONS = {"gpu": "NVIDIA H100", "torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}
SHAPE = {"shape": "llama-3.2-1b", "trained": "all"}


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """The module of tables of long rows, with results in an empty folder, and a function that writes results there."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    import long_tables
    import results

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.read.cache_clear()

    def write(name, rows):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, [*SHAPE, *rows[0], *CONDITIONS])
            writer.writeheader()
            writer.writerows([{**SHAPE, **row, **CONDITIONS} for row in rows])

    yield long_tables, write
    results.read.cache_clear()


def body(table):
    """Return the cells of a table in Markdown, without the lines of its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_a_study_appears_once_it_is_measured(figures, tmp_path):
    long_tables, write = figures
    assert (long_tables.row_lengths(), long_tables.profile("kept")) == ("", "")
    run = {"task": "sft", "tokens_per_second": "2000", "peak_gib": "5", "steps": "2"}
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
    text = long_tables.row_lengths()
    assert body(text) == [
        ["1B sft", "flashmask", "4,096", "2,000 / 5.0", "8,192 or more", "1,800 / 6.0"],
        ["1B sft", "SDPA", "4,096", "1,000 / 5.0", "4,096", "1,000 / 5.0"],
    ]
    drawn = re.findall(r"!\[[^]]+\]\(assets/(\w+)\.svg\)", text)
    assert drawn == ["row_speed_1b", "row_memory_1b"]
    from charts import ROW_LENGTHS

    for name, chart in ROW_LENGTHS.items():
        chart(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").exists() == (name in drawn)


def test_the_profile_of_a_step_has_a_column_for_each_length(figures):
    long_tables, write = figures
    step = {"setting": "kept", "launches": "1"}
    rows = [
        {**step, "length": "8192", "kind": kind, "milliseconds": "1", "share": share, "step_milliseconds": "200"}
        for kind, share in (("norms", "0.25"), ("idle", "0.75"))
    ]
    rows += [
        {**step, "length": "32768", "kind": kind, "milliseconds": "1", "share": share, "step_milliseconds": "1000"}
        for kind, share in (("loss", "0.4"), ("norms", "0.5"), ("idle", "0.1"))
    ]
    nothing = {"milliseconds": "", "share": "", "step_milliseconds": ""}
    write("step_profile_1b_h100", [*rows, {**step, **nothing, "length": "131072", "kind": "out of memory"}])
    assert body(long_tables.profile("kept")) == [
        ["a step", "200 ms", "1,000 ms"],
        ["norms", "25.0%", "50.0%"],
        ["loss", "0.0%", "40.0%"],
        ["idle", "75.0%", "10.0%"],
    ]
    assert long_tables.profile("plain") == ""


def test_updates_of_grpo_have_a_row_for_each_micro_batch(figures):
    _, write = figures
    import training_tables

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
    assert body(training_tables.grpo()) == [
        ["1B", "1,024 : 256", "1 x 8", "1.50", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "1 x 8, compiled", "2.00", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "4 x 8", "2.50", "-", "1 (9,000 tokens/s)", "-", "4.0 / 8.0"],
        ["1B", "1,024 : 256", "9 x 8", "-", "-", "-", "-", "4.0 /"],
    ]
