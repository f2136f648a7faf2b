"""The documentation: links lead somewhere, the navigation has every page, and figures are those of the benchmarks."""

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
NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace("!ENV", ""))["nav"]
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
    page = "[a](gone.md) [b](index.md#gone) ![c](assets/gone.png) [d](../README.md) [e](getting_started.md#install)"
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
    unmeasured = re.search(r"<!-- figure [\w-]+ --><!-- end -->", page)  # its chart comes with the results
    assert unmeasured or re.search(r"!\[[^]]+\]\(assets/\w+\.svg\)", page)


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_text_starts_with_a_comment(name):
    """Markdown takes such a line for HTML, and ends the paragraph before it."""
    assert re.findall(r"^ *<!-- figure [\w-]+ -->(?!<!-- end -->$).+$", PAGES[name], re.MULTILINE) == []


@pytest.mark.parametrize("name", PAGES)
def test_prose_names_no_commits(name):
    hashes = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", without_code(PAGES[name]))
    assert hashes == []


def test_the_gallery_has_every_family():
    families = {name for name in masks.__all__ if not name.startswith("from_")} - {
        "Node",
        "block_diffusion_order",
        "draft_chains_order",
    }
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
