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
from pathlib import Path

import torch
import transformers

PAGE = Path(__file__).with_name("models.md")
sys.path.insert(0, str(PAGE.parents[1] / "tests"))

from tools.model_zoo import INPUTS, Family, Outcome, discover, examine, first_sentence  # noqa: E402  # pyright: ignore[reportMissingImports]

INTRO = """\
# Model families

What works with `attn_implementation="flashmask"` in each model family of transformers, the `model_type` of a model's
config, with transformers {transformers} and torch {torch}.

{counts}

| column | input |
|---|---|
| no padding, right padding, left padding | two rows; a 2D `attention_mask` hides the padding, three tokens of one row |
| packed | two documents in one row, which `position_ids` alone keep apart |
| supplied | the same row with `startend_row_indices` of a document mask, causal but for encoders |

| cell | meaning |
|---|---|
| yes | equal to eager attention, and to each document run by itself, in evaluation, training and cached generation |
| raises | refused with the error of the note |
| not called | no layer asks transformers for its attention by name, so `attn_implementation` changes nothing |
| untested | eager attention, with which all is compared, cannot run it: the note says why |
| - | does not apply: images have no padding, and only causal models with `position_ids` find documents by them |

A mode in front of an outcome, such as `generate: raises`, says that the other modes have another one. No cell differs
from eager attention without an error.

Text towers are the language models inside vision-language models; a tower that is itself a family in the table (as in
LLaVA, whose tower may be any of them) has no row of its own.

Models with recurrent or convolutional layers raise here for a row of several documents, whatever trainer or code calls
them. On a GPU these take one with transformers 5.23 and the packages of their kernels, which then get the documents'
boundaries: bamba, falcon_h1, granitemoehybrid, nemotron_h and zamba2 with causal-conv1d and mamba-ssm; olmo_hybrid,
qwen3_5, qwen3_5_moe and qwen3_next with causal-conv1d and flash-linear-attention, one row a batch; lfm2 and lfm2_moe
with causal-conv1d. On H100 and H200, training with flash-linear-attention 0.6 needs Triton 3.7.1, or TileLang.

## Families
"""

METHOD = """
## How it is tested

`python docs/models.py` writes this page, `tests/hf/test_models.py` checks every cell, and
`tests/hf/test_hybrid_kernels.py` compares packed rows of recurrent models with each document alone on a GPU.

Every family is built tiny, with random weights (`tests/tools/model_zoo.py`), and run in float32 on the CPU with
flashmask and with eager attention. Logits at real tokens (hidden states where a model has no head) and, in training,
every parameter's gradient must agree within 1e-4 of the largest entry. Three modes:

- evaluation: one forward; packed and supplied rows with `use_cache=False`.
- training: the same, and one backward.
- generation, but not of encoders: three tokens that `generate` chooses. For packed and supplied rows, and where a tower
  has no `generate`, the row and then three given tokens, through the cache. They continue the last document: a 2D
  `attention_mask` hides the others from them, and they have `position_ids` but no vectors. `generate` cannot do that:
  given a packed prompt, the tokens it chooses see the whole prompt; given vectors it must raise, because they describe
  the prompt and not the tokens that follow.

The versions are those of constraints.txt. With transformers 5.24 and torch 2.14 the outcomes are the same, except that
codegen and gptj work, and that falcon_mamba, mamba and mamba2 raise in generation, too, for supplied vectors. That
version has new families: apertus1p5_text, exaone, omniasr, sarvam_mla and sarvam_moe work, lara_mini works but for
packed and supplied rows, which raise, hy_v4_vl_text and inkling2_loop_text raise, and dory is not tested.
"""


def cell(outcomes: dict[str, Outcome], notes: dict[str, int]) -> str:
    """Return one cell: the outcome in eval mode, and those of the other modes that differ from it."""
    texts: dict[str, str] = {}
    for mode, (word, reason) in outcomes.items():
        text = f"{word} ({notes.setdefault(reason, len(notes) + 1)})" if reason else word
        if text != texts.get("eval"):
            texts[mode] = text
    return ", ".join(text if mode == "eval" else f"{mode}: {text}" for mode, text in texts.items())


def page(families: dict[str, Family], untested: dict[str, str]) -> str:
    """Return the text of docs/models.md."""
    notes: dict[str, int] = {}
    rows = []
    for name, family in sorted(families.items()):
        cells = [cell(family.outcomes[given], notes) for given in INPUTS]
        rows.append(f"| {' | '.join([name, family.kind, *cells])} |")
    words = [
        {outcome.word for given in family.outcomes.values() for outcome in given.values()} & {"yes", "raises", "wrong"}
        for family in families.values()
    ]
    plain = sum(found == {"yes"} for found in words)
    refused = sum(found == {"raises"} for found in words)
    unused = sum(not found for found in words)
    counts = (
        f"Of {len(families) + len(untested)} families {plain} work wherever something applies, "
        f"{len(words) - plain - refused - unused} in part, {refused} raise, {unused} never call the attention "
        f"interface, and {len(untested)} are not tested."
    )
    lines = [
        INTRO.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], counts=counts),
        f"| {' | '.join(['family', 'kind', *INPUTS])} |",
        "|---" * (len(INPUTS) + 2) + "|",
        *rows,
        "\n## Notes\n",
        *(f"{number}. {reason}" for reason, number in notes.items()),
        "\n## Not tested\n",
        "Families that could not be built tiny or run from token ids or pixels alone.\n",
        "| family | reason |",
        "|---|---|",
        *(f"| {name} | {reason.replace('|', '/')} |" for name, reason in sorted(untested.items())),
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
    untested: dict[str, str] = {}
    for name in args.families or discover():
        try:
            families[name] = examine(name)
        except Exception as error:
            untested[name] = first_sentence(error)
    text = page(families, untested)
    if args.families:
        print(text[text.index("| family") :], end="")
    elif args.check:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is stale; run python docs/models.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
