"""Write docs/models.md: the outcome of `attn_implementation="flashmask"` in each model family of transformers.

python docs/models.py            # run every family and write the table
python docs/models.py --check    # run every family and exit with 1 if docs/models.md is stale
python docs/models.py llama t5   # print these families only
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import torch
import transformers

from flashmask_hf.hf.families import FAMILIES

PAGE = Path(__file__).with_name("models.md")
sys.path.insert(0, str(PAGE.parents[1] / "tests"))

from tools import image_zoo  # noqa: E402  # pyright: ignore[reportMissingImports]
from tools.model_zoo import INPUTS, Family, Outcome, discover, examine, first_sentence  # noqa: E402  # pyright: ignore[reportMissingImports]

INTRO = """\
# Model families

What works with `attn_implementation="flashmask"` per `model_type` in transformers
{transformers}, with torch {torch}.

{counts}

| input | meaning |
|---|---|
| no / right / left padding | two rows with a 2D `attention_mask`. One outcome counts for all |
| packed | two documents in one row, with restarting `position_ids` alone |
| mask indices | the same row with `startend_row_indices`, causal except for encoders |

| outcome | meaning |
|---|---|
| yes | equal to eager attention, and to each document run by itself, in evaluation, training and cached generation |
| raises | raises the error of the [note](#notes) |
| not called | no layer looks up its attention by name: `attn_implementation` changes nothing |
| untested | eager attention cannot run it (see the note) |
| - | does not apply |

`generate: raises` is the outcome of generation alone. No cell differs from eager attention without an error. Text
towers are the language models inside vision-language models.

Models with recurrent or convolutional layers raise for rows with several documents. On a GPU with transformers 5.23,
kernels that read document boundaries make such rows work:

| kernels | families |
|---|---|
{kernels}

With flash-linear-attention, pass one row per batch. On H100 and H200, training with its version 0.6 needs Triton
3.7.1, or TileLang.

## Families
"""

HEADER = "kind | no / right / left padding | packed | mask indices | families"

IMAGES = """
## Rows with images

Three documents with one, no and two images in one row, as the collator packs them. "Yes" is equal to each document
alone under eager attention, with the image tower under "flashmask", too. Towers of timm (fast_vlm, gemma3n,
perception_lm) are replaced by a convolution.
"""

METHOD = """
## How it is tested

`python docs/models.py` writes this page, and `tests/hf/test_models.py` checks every cell.

Every family is built tiny with random weights and run in float32 on the CPU, with flashmask and eager attention.
Logits and, in training, all gradients must agree within 1e-4 of the largest entry. Generation is three tokens; packed
rows and mask indices continue the last document in the cache. With mask indices `generate` must raise.

With transformers 5.24 and torch 2.15, codegen and gptj work; falcon_mamba, mamba and mamba2 also raise in generation
for mask indices. Of its new families, apertus1p5, dory, exaone, omniasr, sarvam_mla and sarvam_moe work, lara_mini
for single documents; hy_v4_vl and inkling2_loop raise.
"""


def joined(cells: list[str]) -> str:
    """Return the outcomes without padding and with padding on the right and left, as one if they are equal."""
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def cell(outcomes: dict[str, Outcome], notes: dict[str, int]) -> str:
    """Return one cell: the outcome in eval mode, and those of the other modes that differ from it."""
    texts: dict[str, str] = {}
    for mode, (word, reason) in outcomes.items():
        text = f"{word} ({notes.setdefault(reason, len(notes) + 1)})" if reason else word
        if text != texts.get("eval"):
            texts[mode] = text
    return ", ".join(text if mode == "eval" else f"{mode}: {text}" for mode, text in texts.items())


def kernels() -> str:
    """Return the rows of the table of kernels that keep documents of recurrent models apart."""
    served: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, family in FAMILIES.items():
        served[family.kernels].append(name.removesuffix("_text"))
    return "\n".join(f"| {', '.join(names)} | {', '.join(served[names])} |" for names in sorted(served) if names)


def image_rows(notes: dict[str, int]) -> list[str]:
    """Return the lines of the section on rows with images."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in image_zoo.families():
        groups[cell({"eval": image_zoo.examine(name)}, notes)].append(name)
    rows = [
        f"| {outcome} | {', '.join(names)} |" for outcome, names in sorted(groups.items(), key=lambda x: -len(x[1]))
    ]
    return [IMAGES, "| rows with images | families |", "|---|---|", *rows]


def page(families: dict[str, Family], untested: list[str]) -> str:
    """Return the text of docs/models.md."""
    notes: dict[str, int] = {}
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, family in sorted(families.items()):
        *padded, packed, indices = (cell(family.outcomes[given], notes) for given in INPUTS)
        groups[(family.kind, joined(padded), packed, indices)].append(name)
    rows = [
        f"| {' | '.join([*cells, ', '.join(names)])} |"
        for cells, names in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]), group[1]))
    ]
    words = [
        {outcome.word for given in family.outcomes.values() for outcome in given.values()} & {"yes", "raises", "wrong"}
        for family in families.values()
    ]
    plain = sum(found == {"yes"} for found in words)
    refused = sum(found == {"raises"} for found in words)
    unused = sum(not found for found in words)
    counts = (
        f"Of {len(families) + len(untested)} families {plain} work, {len(words) - plain - refused - unused} work in "
        f"part, {refused} raise, {unused} never call the attention interface, and {len(untested)} are not tested."
    )
    lines = [
        INTRO.format(
            transformers=transformers.__version__,
            torch=torch.__version__.split("+")[0],
            counts=counts,
            kernels=kernels(),
        ),
        f"| {HEADER} |",
        "|---" * len(HEADER.split(" | ")) + "|",
        *rows,
        *image_rows(notes),
        "\n## Notes\n",
        *(f"{number}. {reason}" for reason, number in notes.items()),
        "\n## Not tested\n",
        f"These could not be built tiny, or run from token ids or pixels alone: {', '.join(untested)}.",
        METHOD.rstrip(),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the families and write, check or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "families", nargs="*", help="model types to print; by default all are run and docs/models.md written"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if docs/models.md is stale")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    families: dict[str, Family] = {}
    untested: list[str] = []
    for name in args.families or discover():
        try:
            families[name] = examine(name)
        except Exception as error:
            untested.append(name)
            print(f"{name}: {first_sentence(error)}", file=sys.stderr)
    text = page(families, untested)
    if args.families:
        print(text[text.index("| kind") :], end="")
    elif args.check:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is stale; run python docs/models.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
