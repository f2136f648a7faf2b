"""The kernel repository for the Hub: laid out from the package, accepted by `kernels`, loaded by name from its folder.

The newest transformers may ask for a version of `kernels` that is not the one installed here; the programs below then
let transformers use the installed one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import flashmask_hf
from flashmask_hf.hf import patches

ROOT = Path(__file__).parents[1]
NAME = "some-org/flashmask"

SETUP = """
import sys, torch, transformers
from transformers.utils import import_utils
if not import_utils.is_kernels_available():
    transformers.utils.is_kernels_available = import_utils.is_kernels_available = lambda *_: True
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM
NAME = "some-org/flashmask"
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(**sizes, intermediate_size=64)
"""

LOADED = """
assert "flashmask_hf" not in sys.modules
model = LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()
import flashmask_hf
assert "torch-" in flashmask_hf.__file__, flashmask_hf.__file__
assert model.config._attn_implementation == "flashmask"
assert not transformers.utils.generic.is_flash_attention_requested(model.config)
other = LlamaForCausalLM._from_config(LlamaConfig(**config.to_dict()), attn_implementation="eager").eval()
other.load_state_dict(model.state_dict())
ids = torch.arange(12)[None]
positions = torch.tensor([[*range(5), *range(7)]])
expected = torch.cat([other(ids[:, :5]).logits, other(ids[:, 5:]).logits], 1)
torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)  # documents, beside a cache
vectors = flashmask_hf.masks.causal_document([[5, 7]]).indices
out = model(ids, position_ids=positions, startend_row_indices=vectors, use_cache=False).logits
torch.testing.assert_close(out, expected)
compiled = torch.compile(model, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, expected)
other.set_attn_implementation(NAME)
torch.testing.assert_close(other(ids, position_ids=positions).logits, expected)
assert other.config._attn_implementation == "flashmask"
try:
    FalconForCausalLM._from_config(FalconConfig(**sizes), attn_implementation=NAME)
except NotImplementedError as error:
    print(error)
"""

CONFLICT = """
import flashmask_hf
flashmask_hf.__version__ = "0.0.1"
try:
    LlamaForCausalLM._from_config(config, attn_implementation=NAME)
except ValueError as error:
    print(error)
flashmask_hf.__version__ = VERSION
model = LlamaForCausalLM._from_config(config, attn_implementation=NAME)
assert sys.modules["flashmask_hf"] is flashmask_hf
assert model.config._attn_implementation == "flashmask"
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay the kernel's repository out."""
    if sys.version_info < (3, 11):
        pytest.skip("hub/make.py reads TOML, which needs Python 3.11")
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    subprocess.run([sys.executable, ROOT / "hub" / "make.py", NAME, folder], check=True)
    return folder


def load(kernel: Path, program: str) -> str:
    """Run a program that finds the kernel by its name, and return what it printed."""
    environment = os.environ | {"LOCAL_KERNELS": f"{NAME}={kernel}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SETUP + program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_hub_accepts_the_layout(kernel: Path) -> None:
    rust = importlib.import_module("kernels._rust")
    backends = {str(x).lower() for x in rust.Build.open(kernel).general.backends}
    assert {x.name for x in (kernel / "build").iterdir()} == {f"torch-{x}" for x in backends} == {
        "torch-cpu", "torch-cuda", "torch-rocm"
    }  # fmt: skip
    for variant in (kernel / "build").iterdir():
        metadata = rust.Metadata.read_from_file(variant / "metadata.json")
        assert (metadata.version, metadata.license) == (1, "Apache-2.0")
        sources = {p.relative_to(variant / "flashmask_hf") for p in variant.rglob("flashmask_hf/**/*.py")}
        assert sources == {p.relative_to(ROOT / "flashmask_hf") for p in (ROOT / "flashmask_hf").rglob("*.py")}
    assert 'repo-id = "some-org/flashmask"' in (kernel / "build.toml").read_text()
    assert f'attn_implementation="{NAME}"' in (kernel / "CARD.md").read_text()


@pytest.mark.full
def test_a_model_loads_the_kernel_by_its_name_without_an_import(kernel: Path) -> None:
    assert "has attention classes of its own" in load(kernel, LOADED)


@pytest.mark.full
def test_a_process_holds_one_version(kernel: Path) -> None:
    printed = load(kernel, CONFLICT.replace("VERSION", json.dumps(flashmask_hf.__version__)))
    assert f"holds flashmask_hf {flashmask_hf.__version__}, but version 0.0.1 is imported already; use" in printed


@pytest.mark.parametrize("registered", [False, True])
def test_other_kernels_keep_their_names(registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if registered:
        monkeypatch.setitem(AttentionInterface._global_mapping, "some-org/other", sdpa_attention_forward)
    config = LlamaConfig()
    config._attn_implementation = "some-org/other"
    assert config._attn_implementation == "some-org/other"


def test_a_config_that_keeps_the_name_elsewhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"keeps the name of an attention .*_attn_implementation of object"):
        patches.read_kernel_names(object)
    stored = vars(PreTrainedConfig)["_attn_implementation_internal"]
    patches.read_kernel_names(PreTrainedConfig)
    assert vars(PreTrainedConfig)["_attn_implementation_internal"] is stored
