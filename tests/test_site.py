"""The built site: it loads nothing from elsewhere, and works in a browser at two widths and in both color schemes.

`make docs` installs what builds it. The tests in a browser need Chromium (Debian's package `chromium`) on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tools import browser

import flashmask_hf

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace("!ENV", ""))
ZENSICAL = Path(sys.executable).with_name("zensical")
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}
SCHEMES = {"light": "default", "dark": "slate"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, built from this checkout, whose repository is on GitHub."""
    if not ZENSICAL.exists():
        pytest.skip("zensical is not installed here: make docs, with Python >= 3.11")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    (root / "flashmask_hf").symlink_to(ROOT / "flashmask_hf")
    environment = {**os.environ, "REPOSITORY": "https://github.com/ORG/flashmask-hf"}
    subprocess.run([ZENSICAL, "build", "--strict"], cwd=root, env=environment, check=True)
    return root / "site"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if browser.PROGRAM is None:
        pytest.skip("no browser here: install chromium")
    page = browser.Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


def test_the_schemes_are_those_that_the_theme_can_switch():
    """The script of a palette that follows the system's scheme fails on every page if it lacks one of the two."""
    palette = CONFIG["theme"]["palette"]
    media = [entry["media"] for entry in palette]
    assert media == ["(prefers-color-scheme)", "(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]
    assert [entry.get("scheme") for entry in palette] == [None, *SCHEMES.values()]
    assert all(entry["toggle"].keys() == {"icon", "name"} for entry in palette)


def test_the_site_names_the_version():
    assert CONFIG["site_name"] == f"flashmask-hf {flashmask_hf.__version__}"


@pytest.mark.full
def test_pages_load_nothing_from_elsewhere(site):
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 20
    for path in pages:
        text = path.read_text()
        assert re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//[^ >]*", text) == []
        assert re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]*href=\"?https?:[^ >]*", text) == []
        assert 'href="https://github.com/ORG/flashmask-hf"' in text


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_pages_have_no_error_and_fit_the_window(site, page, size, scheme):
    """Opened from the disk."""
    found = {}
    for path in sorted(site.glob("*.html")):
        if path.stem == "404":  # its links start at the root of a server
            continue
        page.open(path.as_uri(), *SIZES[size], scheme)
        shown = page.evaluate("document.body.dataset.mdColorScheme")
        width = page.evaluate("Math.max(document.body.scrollWidth, document.documentElement.scrollWidth)")
        broken = page.evaluate("[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)")
        if page.errors or broken or shown != SCHEMES[scheme] or width > SIZES[size][0]:
            found[path.name] = (page.errors, broken, shown, width)
    assert found == {}


@pytest.mark.full
def test_tables_and_code_are_read_on_a_phone(site, page):
    """Tables of text are cards, tables of numbers scroll beside their first column, and lines of code are broken."""
    page.open((site / "models.html").as_uri(), *SIZES["phone"], "light")
    cells = "[...document.querySelectorAll('#families ~ * td')]"
    assert page.evaluate(f"Math.max(...{cells}.map((cell) => cell.getBoundingClientRect().right))") <= SIZES["phone"][0]
    assert "no / right / left padding" in page.evaluate(f"getComputedStyle({cells}[1], '::before').content")
    page.open((site / "benchmarks.html").as_uri(), *SIZES["phone"], "light")
    wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')].filter((x) => x.scrollWidth > x.clientWidth + 50)"
    place = page.evaluate(
        f"""{wide}.map((box) => {{
            const [first, second] = box.querySelectorAll("td");
            const places = () => [first, second].map((cell) => cell.getBoundingClientRect().left);
            const before = places();
            box.scrollLeft = 50;
            return before.map((left, nth) => left - places()[nth]);
        }})"""
    )
    assert place
    assert all(abs(first) <= 20 and second == 50 for first, second in place), place
    page.open((site / "packing.html").as_uri(), *SIZES["phone"], "light")
    code = "[...document.querySelectorAll('pre > code')].filter((x) => x.querySelector('span[class]'))"
    assert page.evaluate(f"{code}.length > 2 && {code}.every((x) => x.scrollWidth <= x.clientWidth + 1)")


@pytest.mark.full
def test_the_toggle_switches_the_scheme_and_remembers_it(site, page):
    home = (site / "index.html").as_uri()
    shown = []
    for _ in range(4):
        page.open(home, *SIZES["desktop"], "dark")
        shown.append(page.evaluate("document.body.dataset.mdColorScheme"))
        page.evaluate("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        shown.append(page.evaluate("document.body.dataset.mdColorScheme"))
    page.evaluate("localStorage.clear()")  # or tests that run later would be shown the last scheme
    assert page.errors == []
    assert shown == ["slate", "default", "default", "slate", "slate", "slate", "slate", "default"]


@pytest.mark.full
def test_the_search_finds_a_heading_from_the_disk(site, page):
    page.open((site / "index.html").as_uri(), *SIZES["desktop"], "light")
    page.evaluate("document.querySelector('label[for=__search]').click()")
    page.wait_for("document.activeElement.shadowRoot")
    page.send("Input.insertText", text="causal_document")
    page.wait_for("document.activeElement.shadowRoot.querySelector('a[href*=\"#causal_document\"]')")
    assert page.errors == []


@pytest.mark.full
def test_the_home_page_is_one_screen(site, page):
    """It says what, for whom and how, with a picture, a snippet, the logo, the version and the repository."""
    page.open((site / "index.html").as_uri(), *SIZES["desktop"], "light")
    for selector in ("h1", ".landing img", ".landing pre", ".landing .md-button", ".md-logo img", ".md-source"):
        bottom = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().bottom")
        assert 0 < bottom <= 900, selector
    assert page.evaluate("document.querySelector('.md-header__topic').innerText") == CONFIG["site_name"]
