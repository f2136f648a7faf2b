"""Plugins of other programs, and the refusal of their sequence parallelism, with stand-ins for the programs' modules.

tests/test_programs.py runs the programs themselves where they are installed.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tools.tiny import llama_config
from transformers import AutoModelForCausalLM

import flashmask_hf.integrations
from flashmask_hf.hf.models import state_of
from flashmask_hf.sharing import _share

ROOT = Path(__file__).parents[1]
FROZEN = frozenset({"sdpa"})


@pytest.fixture
def stand_in(monkeypatch):
    """Return a function that puts a module with some members, and its parents, into `sys.modules`."""

    def put(name: str, **members: Any) -> Any:
        parent = None
        for end in [*(i for i, x in enumerate(name) if x == "."), len(name)]:
            part = sys.modules.get(name[:end]) or ModuleType(name[:end])
            monkeypatch.setitem(sys.modules, name[:end], part)
            if parent is not None:
                setattr(parent, name[:end].rpartition(".")[2], part)
            parent = part
        vars(parent).update(members)
        return parent

    return put


@pytest.fixture
def plugin(monkeypatch):
    """Return a function that imports a plugin anew."""

    def load(name: str) -> Any:
        full = f"flashmask_hf.integrations.{name}"
        monkeypatch.delitem(sys.modules, full, raising=False)
        loaded = importlib.import_module(full)
        monkeypatch.delitem(sys.modules, full)
        return loaded

    return load


def make_model(attention: str = "flashmask") -> Any:
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=attention)


def shares(model: Any) -> bool:
    return any(getattr(change, "func", None) is _share for change in state_of(model.base_model).rewrites)


def test_the_plugin_of_verl(stand_in, plugin):
    calls = []

    def stock(model, ulysses_sp_size=1, use_remove_padding=True):
        calls.append((model, ulysses_sp_size, use_remove_padding))

    patch = stand_in("verl.models.transformers.monkey_patch", apply_monkey_patch=stock)
    plugin("verl")
    plain, asked, other = make_model(), make_model(), make_model("sdpa")
    for config in (asked.config, other.config):  # as override_config does
        config.flashmask_share_prefixes, config.attn_implementation = True, config._attn_implementation
    for model in (plain, asked, other):
        patch.apply_monkey_patch(model=model, ulysses_sp_size=1, use_remove_padding=False)
    assert calls == [(model, 1, False) for model in (plain, asked, other)]
    assert [shares(model) for model in (plain, asked, other)] == [False, True, False]
    assert not re.search("flashmask|attn", asked.config.to_json_string())  # else checkpoints would hold them
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size must be 1 with attention 'flashmask', got 2"):
        patch.apply_monkey_patch(model=plain, ulysses_sp_size=2)
    patch.apply_monkey_patch(model=other, ulysses_sp_size=2)  # FlashAttention's concern


def test_the_entry_point_of_verl_names_the_plugin():
    text = (ROOT / "pyproject.toml").read_text()
    value = text.split('[project.entry-points."verl.plugins"]\nflashmask = "')[1].split('"')[0]
    assert importlib.util.find_spec(EntryPoint("flashmask", value, "verl.plugins").module)


def test_the_plugin_of_axolotl(stand_in, plugin):
    schema = stand_in("axolotl.utils.schemas.config")
    schema.CANONICAL_ATTN_IMPLS = schema.ATTN_IMPLS_SUPPORTING_PACKING = FROZEN
    stand_in("axolotl.integrations.base", BasePlugin=object)
    module = plugin("axolotl")
    found = module.FlashMaskPlugin()
    found.register({"context_parallel_size": 2, "attn_implementation": "sdpa"})
    assert schema.CANONICAL_ATTN_IMPLS == schema.ATTN_IMPLS_SUPPORTING_PACKING == {"sdpa", "flashmask"}
    for setting in ("context_parallel_size", "sequence_parallel_degree"):
        with pytest.raises(ValueError, match=f"{setting} must be 1 with attention 'flashmask', got 4"):
            found.register({setting: 4, "attn_implementation": "flashmask"})
    assert found.get_input_args() == f"{module.__name__}.FlashMaskArgs"
    for asked in (False, True):
        model = make_model()
        found.post_model_load(module.FlashMaskArgs(flashmask_share_prefixes=asked).model_dump(), model)
        assert shares(model) == asked


def test_the_plugin_of_ms_swift(stand_in, plugin, monkeypatch):
    class Arguments(SimpleNamespace):
        def _check_padding_free(self):
            if self.attn_impl != "flash_attention_2":
                raise ValueError("requires a flash attention implementation")

        def get_model_processor(self, *, load_model=True):
            return (make_model() if load_model else None), "processor"

    stand_in("swift.arguments", SftArguments=Arguments)
    plugin("ms_swift.flashmask_plugin")
    arguments = Arguments(attn_impl="flashmask", sequence_parallel_size=1)
    arguments._check_padding_free()
    assert arguments.attn_impl == "flashmask"
    with pytest.raises(ValueError, match="requires a flash attention"):
        Arguments(attn_impl="sdpa", sequence_parallel_size=2)._check_padding_free()
    with pytest.raises(ValueError, match="sequence_parallel_size must be 1 with attention 'flashmask', got 2"):
        Arguments(attn_impl="flashmask", sequence_parallel_size=2)._check_padding_free()
    assert not shares(arguments.get_model_processor()[0])
    monkeypatch.setenv("FLASHMASK_SHARE_PREFIXES", "1")
    assert shares(arguments.get_model_processor()[0])
    assert arguments.get_model_processor(load_model=False) == (None, "processor")


def test_the_file_for_ms_swift_hides_no_module():
    """ms-swift puts the file's folder first in `sys.path`, at each of its calls."""
    name = re.search(r"/integrations/(\S+\.py)", (ROOT / "docs/programs.md").read_text())[1]
    file = Path(flashmask_hf.integrations.__path__[0], name)
    assert [path.name for path in file.parent.iterdir() if path.name != "__pycache__"] == ["flashmask_plugin.py"]


def split_by(program: str, stand_in: Any) -> Any:
    """Turn a program's sequence parallelism on, and return a function that sets the number of ranks."""
    if program == "verl":
        sizes = [2]
        stand_in("verl.utils.ulysses", get_ulysses_sequence_parallel_world_size=lambda: sizes[0])
        return lambda size: sizes.__setitem__(0, size or 1)
    state = SimpleNamespace(world_size=2)
    stand_in("swift.sequence_parallel" if program == "ms-swift" else program, sequence_parallel=state)
    return lambda size: setattr(state, "world_size", size)


@pytest.mark.parametrize("program", ["verl", "ms-swift", "swift.trainers.sequence_parallel"])
def test_sequence_parallelism_inside_flash_attention_is_refused(program, stand_in):
    """A rank's slice, whose positions go on, would attend to itself; also if the model ran before."""
    model, other = make_model(), make_model("sdpa")
    shard = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8, 16)[None]}
    expected = model(**shard).logits  # without ranks, any positions are a caller's right
    set_size = split_by(program, stand_in)
    for called in (model, make_model()):
        with pytest.raises(
            ValueError, match=r"(verl|ms-swift) splits rows over ranks .* Set its sequence parallel size to 1"
        ):
            called(**shard)
    other(**shard)
    for size in (1, None):
        set_size(size)
        assert torch.equal(model(**shard).logits, expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")  # torch 2.11
def test_compiled_models_refuse_it_too(stand_in):
    model = torch.compile(make_model(), backend="eager")
    set_size = split_by("verl", stand_in)
    ids = torch.arange(8)[None]
    with pytest.raises(ValueError, match="verl splits rows over ranks"):
        model(ids, use_cache=False)
    torch.compiler.reset()
    set_size(1)
    model(ids, use_cache=False)
