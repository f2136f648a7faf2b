"""Patches of transformers: they act for this backend only, and only where the code is as expected."""

import copy
import re
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tools import model_zoo
from tools.tiny import assert_exact, llama_config
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GitConfig,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import masking_utils as hf_masks
from transformers.models.gptj import modeling_gptj
from transformers.utils import generic

import flashmask_hf  # applies the patches
from flashmask_hf.hf import mask_hook, patches

# 1. The names are not FlashAttention's.


@pytest.mark.parametrize(
    ("name", "version", "answer"),
    [
        ("flashmask", None, False),
        ("flashmask", 2, False),
        ("flash_attention_2", None, True),
        ("flash_attention_2", 2, True),
        ("flash_attention_2", [3, 4], False),
        ("kernels-community/vllm-flash-attn3", None, True),
        ("sdpa", None, False),
        (None, None, False),
    ],
)
def test_only_our_names_are_not_flash_attention(name, version, answer):
    config = types.SimpleNamespace(_attn_implementation=name)
    asked = generic.is_flash_attention_requested
    assert asked(requested_attention_implementation=name, version=version) is answer
    assert asked(config, version=version) is answer
    if name is not None:
        with pytest.raises(ValueError, match="ambiguous"):
            asked(config, requested_attention_implementation=name)


def fake_transformers(source):
    module = types.ModuleType("fake_transformers")
    exec(source, module.__dict__)
    return module


def test_name_patch_acts_on_a_function_imported_by_name(monkeypatch):
    module = fake_transformers(
        "def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):\n"
        "    return 'flash' in requested_attention_implementation\n"
    )
    importer = types.ModuleType("importer")
    importer.is_flash_attention_requested = module.is_flash_attention_requested  # as the model files import it
    monkeypatch.setitem(sys.modules, "importer", importer)
    for _ in range(2):
        patches.exclude_from_flash_attention(module)
        for asked in (module.is_flash_attention_requested, importer.is_flash_attention_requested):
            assert [asked(None, name) for name in ("flashmask", "flash_attention_3", "sdpa")] == [False, True, False]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "is_flash_attention_requested = print",
        "def is_flash_attention_requested(config=None, name=None, version=None): return 'flash' in name",
    ],
    ids=["missing", "builtin", "names"],
)
def test_name_patch_refuses_unknown_code(source):
    with pytest.raises(RuntimeError, match=r"is_flash_attention_requested.*install a version it was tested with"):
        patches.exclude_from_flash_attention(fake_transformers(source))


# 2. Packed documents are found beside a cache or a 2D mask, too.

ROW = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])


def model_with(attention, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(**changes), attn_implementation=attention).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


@pytest.mark.parametrize("attention", ["flashmask", "eager", "sdpa"])
def test_a_flashmask_as_attention_mask_is_refused(attention):
    message = r"attention_mask is a FlashMask.*pass startend_row_indices=mask.indices"
    with pytest.raises(TypeError, match=message):
        model_with(attention)(ROW, attention_mask=flashmask_hf.masks.causal(9))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention_gets_the_same_masks(attention, monkeypatch):
    model = model_with(attention)
    got = model(ROW, position_ids=PACKED, use_cache=True).logits
    original = hf_masks._preprocess_mask_arguments.__wrapped__
    monkeypatch.setattr(hf_masks, "_preprocess_mask_arguments", original)
    assert torch.equal(got, model(ROW, position_ids=PACKED, use_cache=True).logits)


def preprocess(config, **given):
    """Return what transformers, patched, makes of the arguments of a mask."""
    padding = given.pop("padding", None)
    past = given.pop("past", None)
    positions = given.pop("positions")
    embeds = torch.zeros(len(positions), positions.shape[1], 4)
    return hf_masks._preprocess_mask_arguments(config, embeds, padding, past, position_ids=positions, layer_idx=None)


@pytest.fixture
def config():
    config = copy.deepcopy(llama_config())
    config._attn_implementation = "flashmask"
    return config


@pytest.mark.usefixtures("float64")
def test_documents_beside_a_mask_are_found_in_a_call_and_outside(config):
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 0]])
    model = model_with("flashmask")
    got = model(ROW.expand(2, 9), position_ids=positions, attention_mask=padding, use_cache=False).logits
    for row, start, end in ((0, 2, 5), (0, 5, 9), (1, 0, 7)):
        alone = model(ROW[:, start:end]).logits[0]
        assert_exact([got[row, start:end]], [alone])
    _, mask, documents, *_ = preprocess(config, positions=positions, padding=padding)
    assert documents is None  # what transformers finds
    assert mask.dtype == mask_hook.NUMBERS
    assert mask.tolist() == [[0, 0, 2, 2, 2, 3, 3, 3, 3], [2] * 7 + [-2] * 2]


def test_several_documents_beside_a_mask_of_another_length_are_refused(config):
    short = torch.ones(1, 8, dtype=torch.int64)
    _, mask, documents, _, kv_length, _, _ = preprocess(config, positions=torch.arange(9)[None], padding=short)
    assert kv_length == 8
    assert documents is None
    assert mask.dtype == torch.bool
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .*pass whole rows"):
        preprocess(config, positions=PACKED, padding=short)


@pytest.mark.parametrize(
    "positions", [PACKED.expand(3, 1, -1), torch.arange(12)[None]], ids=["three axes", "of more tokens"]
)
def test_positions_that_are_no_rows_of_the_tokens_tell_no_documents(positions, config):
    padding = torch.ones(1, 9, dtype=torch.int64)
    given = dict(position_ids=positions, layer_idx=None)
    _, mask, *_ = hf_masks._preprocess_mask_arguments(config, torch.zeros(1, 9, 4), padding, None, **given)
    assert mask.dtype == torch.bool


def test_several_documents_in_a_static_cache_are_refused():
    model = model_with("flashmask")
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .*use_cache=False"):
        model.generate(ROW, position_ids=PACKED, cache_implementation="static", max_new_tokens=2)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "given",
    [{"use_cache": False}, {"use_cache": True}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])}],
    ids=["alone", "cache", "padding"],
)
def test_chunks_count_from_the_first_token_of_each_document(given):
    settings = {**llama_config().to_dict(), "model_type": None, "attention_chunk_size": 3, "num_local_experts": 2}
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keep += ("num_key_value_heads", "attention_chunk_size", "num_local_experts", "pad_token_id")
    config = Llama4TextConfig(**{name: settings[name] for name in keep}, intermediate_size_mlp=32, head_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").double().eval()
    starts = [*(PACKED[0] == 0).nonzero()[:, 0].tolist(), 9]
    first = 0 if "attention_mask" not in given else 1
    want = [
        model(ROW[:, max(i, first) : j], position_ids=PACKED[:, max(i, first) : j], use_cache=False).logits
        for i, j in pairwise(starts)
    ]
    got = model(ROW, position_ids=PACKED, **given).logits[:, first:]
    assert_exact([got], [torch.cat(want, 1)])


@pytest.mark.parametrize(
    "source",
    ["", "_preprocess_mask_arguments = print", "def _preprocess_mask_arguments(config, mask): pass"],
    ids=["missing", "builtin", "signature"],
)
def test_document_patch_refuses_unknown_code(source):
    with pytest.raises(RuntimeError, match=r"_preprocess_mask_arguments.*install a version it was tested with"):
        patches.leave_documents_to_hook(fake_transformers(source))


# 3. Models that do not look attention up by name refuse the names.


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        pytest.param(
            GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
            marks=pytest.mark.skipif(
                not hasattr(modeling_gptj, "GPTJ_ATTENTION_CLASSES"),
                reason="cpu lane: GPT-J looks attention up by name since transformers 5.24",
            ),
        ),
        GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=1, attention_types=[[["global"], 1]], num_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_models_with_attention_classes_are_refused(config):
    with pytest.raises(
        NotImplementedError, match=r"has attention classes of its own .*use attn_implementation='eager'"
    ):
        AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_models_with_attention_classes_are_refused_when_it_is_set_later():
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8)
    config = GitConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0, vision_config=vision
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match=r"Git\w+ has attention classes of its own .*'eager'"):
        model.set_attn_implementation("flashmask")
    assert model.config._attn_implementation == "eager"


@pytest.mark.usefixtures("float64")
def test_attention_classes_of_another_tower_do_not_matter():
    """The text tower looks attention up by name, in a module with a tower that looks up classes."""
    model = model_zoo.build("deepseek_ocr2_text", "eager").double().eval()
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    ids = torch.arange(4, 12)[None]
    want = model(input_ids=ids).last_hidden_state
    model.set_attn_implementation("flashmask")
    assert model.config._attn_implementation == "flashmask"
    assert_exact([model(input_ids=ids).last_hidden_state], [want])


CUSTOM = """
import torch, flashmask_hf
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import eager_attention_forward
{imported}

class CustomAttention(nn.Module):
    num_key_value_groups, attention_dropout, is_causal, layer_idx = 1, 0.0, True, 0

    def __init__(self, config):
        super().__init__()
        self.config, self.qkv = config, nn.Linear(32, 96)

    def forward(self, x, mask):
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        name = self.config._attn_implementation
        attend = eager_attention_forward if name == "eager" else {lookup}[name]
        return attend(self, q, k, v, mask, scaling=8**-0.5)[0].flatten(2)

class CustomModel(PreTrainedModel):
    config_class, _supports_sdpa = LlamaConfig, True

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.attention = nn.Embedding(64, 32), CustomAttention(config)
        self.post_init()

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None, position_ids=None
        )
        return self.attention(x, mask)

config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
padding = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
got = []
for name in ("eager", "flashmask"):
    torch.manual_seed(0)
    got.append(CustomModel._from_config(config, attn_implementation=name)(torch.arange(8).view(2, 4), padding))
torch.testing.assert_close(got[0][padding.bool()], got[1][padding.bool()])
"""
IMPORT = "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS"


@pytest.fixture
def run_main(monkeypatch):
    """Return a function that runs code as the main module: of a script or, without a file, of a notebook."""

    def run(code, file=None):
        main = types.ModuleType("__main__")
        if file is not None:
            file.write_text(code)
            main.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(code, str(file or "<stdin>"), "exec"), vars(main))

    return run


@pytest.mark.parametrize("where", ["file", "notebook"])
def test_custom_code_that_looks_attention_up_by_index(where, tmp_path, run_main):
    """Code for older versions of transformers does so. The source of a notebook cannot be read."""
    code = CUSTOM.format(imported=IMPORT, lookup="ALL_ATTENTION_FUNCTIONS")
    run_main(code, tmp_path / "custom.py" if where == "file" else None)


def test_custom_code_that_cannot_be_read(run_main):
    run_main(CUSTOM.format(imported="", lookup="modeling_llama.ALL_ATTENTION_FUNCTIONS"))


def test_custom_code_with_attention_of_its_own_is_refused(tmp_path, run_main):
    code = CUSTOM.format(imported="", lookup="{'flashmask': eager_attention_forward}")
    with pytest.raises(NotImplementedError, match="CustomModel has attention code of its own"):
        run_main(code, tmp_path / "custom.py")


@pytest.mark.parametrize("method", [None, print, lambda self: None], ids=["missing", "builtin", "signature"])
def test_model_patch_refuses_unknown_code(method):
    model_class = type("Model", (), {} if method is None else {"get_correct_attn_implementation": method})
    with pytest.raises(
        RuntimeError, match=r"get_correct_attn_implementation of Model.*install a version it was tested"
    ):
        patches.refuse_unsupported_models(model_class)


@pytest.mark.parametrize("found", [None, print], ids=["missing", "function"])
def test_the_patch_of_a_property_refuses_unknown_code(found):
    owner = type("Owner", (), {} if found is None else {"_attn_implementation": found})
    with pytest.raises(RuntimeError, match=r"_attn_implementation of Owner.*install a version it was tested"):
        patches.read_kernel_names(owner)


def test_a_config_whose_parts_alone_get_an_attention_has_none():
    config = LlavaConfig(text_config=llama_config(), attn_implementation={"text_config": "flashmask"})
    assert config._attn_implementation is None
    assert config.text_config._attn_implementation == "flashmask"


def test_the_versions_of_the_message_are_those_that_pip_installs():
    """The message of a transformers that the patches do not know, and the extra that it names."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    with pytest.raises(RuntimeError) as refused:
        patches._refuse_version("", "")
    (versions,) = re.findall(r"'(transformers>=[\d.]+,<[\d.]+)'", str(refused.value))
    assert f'"{versions}"' in text


def test_applying_twice_changes_nothing():
    patched = PreTrainedModel, PreTrainedConfig, hf_masks
    before = [dict(vars(owner)) for owner in patched]
    code = generic.is_flash_attention_requested.__code__
    patches.register()
    assert [dict(vars(owner)) for owner in patched] == before
    assert generic.is_flash_attention_requested.__code__ is code
