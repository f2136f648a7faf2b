"""Every model family has the outcomes in the table of docs/models.md."""

import re
import runpy

import pytest
import transformers
from packaging.version import Version
from tools import image_zoo
from tools.families import IMAGE_ROWS, PAGE, ROOT, TABLE, UNTESTED, each_family
from tools.model_zoo import INPUTS, Outcome, discover, examine
from transformers import CONFIG_MAPPING

VERSION = re.findall(r"in transformers\s+(\S+), with torch", PAGE)[0]
NOTES = dict(re.findall(r"^(\d+)[.] (.*)$", PAGE, re.MULTILINE))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
    # transformers 5.17
    pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`acoustic_tokenizer_chunk_size` is deprecated:FutureWarning"),
    # Models hand all keywords of a call on to their layers.
    pytest.mark.filterwarnings("ignore:attn_implementation='flashmask' ignores the attention keyword:UserWarning"),
]

OTHER_BEFORE = {
    "cohere_compass_text",
    "cosmos3_edge_text",
    "dbrx",
    "encoder-decoder",
    "ministral3",
    "mistral4",
    "moshi",
    "mra",
    "paddleocr_vl_text",
    "qwen4_exp",
    "qwen4_exp_text",
}
"""Families whose code or config is another in earlier versions of transformers."""

OTHER_SINCE = {"codegen", "falcon_mamba", "gptj", "mamba", "mamba2"}
"""Families whose code is another in transformers 5.24: two look attention up by name, and caches have another name."""


def expected(cell, modes):
    """Return the outcome that a cell gives for each mode."""
    found = re.findall(r"(?:(training|generate): )?(-|[a-z][a-z ]*)(?: \((\d+)\))?(?:, |$)", cell)
    told = {mode or "eval": Outcome(word, NOTES[number] if number else "") for mode, word, number in found}
    return dict.fromkeys(modes, told["eval"]) | told


def test_no_family_is_wrong():
    assert not [name for name, cells in TABLE.items() if any("wrong" in cell for cell in cells)]
    assert "wrong" not in IMAGE_ROWS.values()


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the table is of transformers {VERSION}")
def test_every_family_is_listed():
    assert sorted([*TABLE, *UNTESTED]) == discover()
    assert sorted(IMAGE_ROWS) == image_zoo.families()


def test_kernels_are_listed():
    assert runpy.run_path(str(ROOT / "docs" / "models.py"))["kernels"]() in PAGE


@pytest.mark.parametrize("name", each_family(TABLE))
def test_family(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {name}")
    later = Version(transformers.__version__) > Version(VERSION)
    if name in (OTHER_SINCE if later else OTHER_BEFORE) and transformers.__version__ != VERSION:
        pytest.skip(
            f"the table is of transformers {VERSION}, and {name} is another model in {transformers.__version__}"
        )
    kind, *cells = TABLE[name]
    family = examine(name)
    assert family.kind == kind
    for name, cell in zip(INPUTS, cells, strict=True):
        got = family.outcomes[name]
        want = expected(cell, got)
        if transformers.__version__ != VERSION:  # errors of transformers itself are worded in other ways
            got, want = ({mode: outcome.word for mode, outcome in told.items()} for told in (got, want))
        assert got == want, name


QUICK = ("kimi_k25", "lfm3_vl", "ovis2")


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the table is of transformers {VERSION}")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in IMAGE_ROWS],
)
def test_rows_with_images(name):
    assert image_zoo.examine(name) == expected(IMAGE_ROWS[name], ["eval"])["eval"]
