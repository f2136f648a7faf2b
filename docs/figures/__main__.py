"""Write the numbers, tables and pictures of README.md and docs/ from recipes/benchmarks/results/*.csv.

python docs/figures            # write all of them
python docs/figures --check    # write nothing; exit with 1 if a page or a picture is stale

A page marks the place of a number or of a table with `<!-- figure NAME -->...<!-- end -->`; what stands between is
written by the function of that name in `tables.TEXTS`. Charts and pictures of masks go to docs/assets.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from charts import CHARTS, PICTURES, STYLE, draw, words
from matplotlib import rc_context
from PIL import Image
from results import ROOT
from tables import TEXTS

ASSETS = ROOT / "docs" / "assets"
MARK = re.compile(r"(<!-- figure ([a-z0-9-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the text of a page with all of its numbers and tables written anew."""
    return MARK.sub(lambda found: found[1] + TEXTS[found[2]]() + found[4], page)


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def draw_all(folder: Path) -> None:
    """Draw all charts and masks into a folder."""
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    with rc_context(fname=STYLE):
        for name, chart in CHARTS.items():
            draw(chart, folder / f"{name}.svg")
    for name, picture in PICTURES.items():
        path = folder / f"{name}.png"
        picture(path)
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size


def stale(drawn: Path) -> list[str]:
    """Return what differs from the files in the checkout, given a folder of new drawings."""
    found = [str(page.relative_to(ROOT)) for page in pages() if filled(page.read_text()) != page.read_text()]
    for new in sorted(path for path in drawn.rglob("*") if path.suffix in (".svg", ".png")):
        old = ASSETS / new.relative_to(drawn)
        if not old.exists() or not _same(old, new):
            found.append(str(old.relative_to(ROOT)))
    return found


def _same(old: Path, new: Path) -> bool:
    """Return whether two pictures show the same: the texts of charts, pixels of masks but for the edges of letters."""
    if old.suffix == ".svg":
        return words(old.read_text()) == words(new.read_text())
    pictures = [Image.open(path).convert("L") for path in (old, new)]
    if pictures[0].size != pictures[1].size:
        return False
    a, b = (np.asarray(picture, dtype=float) for picture in pictures)
    return float(abs(a - b).mean()) < 1


def main() -> None:
    """Write or check the figures from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or picture is stale")
    if parser.parse_args().check:
        with tempfile.TemporaryDirectory() as folder:
            draw_all(Path(folder))
            found = stale(Path(folder))
        if found:
            sys.exit(f"stale: {', '.join(found)}; run python docs/figures")
        return
    draw_all(ASSETS)
    for page in pages():
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
