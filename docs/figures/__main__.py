"""Write the numbers, tables and pictures of README.md and docs/ from recipes/benchmarks/results/*.csv.

python docs/figures            # write all of them
python docs/figures --check    # write nothing; exit with 1 if a page or a picture is stale

A page marks the place of a number or of a table with `<!-- figure NAME -->...<!-- end -->`; what stands between is
written by the function of that name in `TEXTS`. Charts and pictures of masks go to docs/assets.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attention_tables
import long_tables
import numpy as np
import training_tables
from charts import CHARTS, STYLE, words
from matplotlib import rc_context
from pictures import PICTURES, gallery
from PIL import Image
from results import ROOT, number, read
from values import CASE, SHORTER, change, first_call, gain_of, linear, speed, update_times

ASSETS = ROOT / "docs" / "assets"
MARK = re.compile(r"(<!-- figure ([a-z0-9-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)

TEXTS: dict[str, Callable[[], str]] = {
    "training": training_tables.training,
    "kept": long_tables.kept,
    "parallel": long_tables.parallel,
    "long-rows": partial(long_tables.long_rows, "long_rows_h200", "half of a host with 256 GiB"),
    "long-rows-h100": partial(long_tables.long_rows, "long_rows_h100", "half of a host with 256 GiB"),
    "compiled": training_tables.compiled,
    "profile": partial(long_tables.profile, "kept"),
    "profile-compiled": partial(long_tables.profile, "compiled_kept"),
    "row-lengths": long_tables.row_lengths,
    "convergence": training_tables.convergence,
    "packing": training_tables.packing,
    "first-step": training_tables.first_step,
    "alignment": training_tables.alignment,
    "grpo": training_tables.grpo,
    "sharing": training_tables.sharing,
    "attention": attention_tables.attention,
    "peers": attention_tables.peers,
    "peers-long": attention_tables.peers_of_long_rows,
    "peers-grouped": attention_tables.peers_of_grouped_heads,
    "sparse": attention_tables.sparse,
    "sparse-training": training_tables.sparse_training,
    "decoding": attention_tables.decoding,
    "short": attention_tables.short,
    "ragged": attention_tables.ragged,
    "masks-made": attention_tables.masks_made,
    "gallery": gallery,
    "sft-gain": lambda: f"{number(read('training_h200'), 'against_sdpa', implementation='flashmask'):.1f}x",
    "sft-gain-flex": gain_of("SFT"),
    "dpo-gain": gain_of("DPO"),
    "reward-gain": gain_of("reward model"),
    "grpo-gain": gain_of("GRPO"),
    "long-length": lambda: f"{max(int(row['tokens']) for row in read('long_rows_h200') if '8b' in row['shape']):,}",
    "flex": partial(speed, "attention_h200", "both_tflops", "flashmask", "flex_attention", CASE, SHORTER),
    "flex-portable": partial(
        speed, "attention_h200", "both_tflops", "flashmask_triton", "flex_attention", CASE, SHORTER
    ),
    "flex-128k": partial(speed, "attention_h200", "both_tflops", "flashmask", "flex_attention", CASE, ("131072",)),
    "flex-grouped": partial(speed, "attention_gqa_h200", "both_tflops", "flashmask", "flex_attention", CASE, SHORTER),
    "cudnn-forward": partial(change, "attention_h200", "forward_ms", "flashmask", "cudnn"),
    "cudnn-backward": partial(change, "attention_h200", "backward_ms", "flashmask", "cudnn"),
    "deterministic": attention_tables.deterministic,
    "linear": linear,
    "update-times": update_times,
    "first-call": partial(first_call, "empty"),
    "cached-call": partial(first_call, "full"),
}
"""Function of each number and table, by the name that pages call it."""


def filled(page: str) -> str:
    """Return the text of a page with all of its numbers and tables written anew."""
    return MARK.sub(lambda found: found[1] + TEXTS[found[2]]() + found[4], page)


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def draw(folder: Path) -> None:
    """Draw all charts and masks into a folder."""
    with rc_context(STYLE):
        for name, chart in CHARTS.items():
            chart(folder / f"{name}.svg")
    (folder / "masks").mkdir(parents=True, exist_ok=True)
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
            draw(Path(folder))
            found = stale(Path(folder))
        if found:
            sys.exit(f"stale: {', '.join(found)}; run python docs/figures")
        return
    draw(ASSETS)
    for page in pages():
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
