"""What transformers is made to do differently: for this backend only, and only where its code is as expected."""

import copy
import types

import pytest
import torch
from tiny import llama_config
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GitConfig,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    PreTrainedModel,
)
from transformers import masking_utils as hf_masks
from transformers.utils import generic

import flashmask_hf  # noqa: F401  # which adapts transformers
from flashmask_hf import upstream

# The name


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
def test_only_our_name_is_told_apart(name, version, answer):
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


def test_name_patch_on_a_known_shape():
    module = fake_transformers(
        "def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):\n"
        "    return 'flash' in requested_attention_implementation\n"
    )
    by_name = module.is_flash_attention_requested  # as the model files import it
    upstream.tell_apart_from_flash_attention(module)
    upstream.tell_apart_from_flash_attention(module)
    assert [by_name(None, name) for name in ("flashmask", "flash_attention_3", "sdpa")] == [False, True, False]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "is_flash_attention_requested = print",
        "def is_flash_attention_requested(name): return 'flash' in name",
        "def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):\n"
        "    return requested_attention_implementation",
        "from transformers.utils.generic import is_flash_attention_requested as old\n"
        "def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):\n"
        "    return True",
    ],
    ids=["missing", "builtin", "signature", "answers", "always"],
)
def test_name_patch_refuses_what_it_does_not_know(source):
    with pytest.raises(RuntimeError, match=r"is_flash_attention_requested.*install a version it was tested with"):
        upstream.tell_apart_from_flash_attention(fake_transformers(source))


# Packed documents

ROW = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])


def model_with(attention, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(**changes), attn_implementation=attention).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention_masks_as_before(attention, monkeypatch):
    model = model_with(attention)
    got = model(ROW, position_ids=PACKED, use_cache=True).logits
    original = hf_masks._preprocess_mask_arguments.__wrapped__
    monkeypatch.setattr(hf_masks, "_preprocess_mask_arguments", original)
    assert torch.equal(got, model(ROW, position_ids=PACKED, use_cache=True).logits)


def arguments(config, **given):
    padding = given.pop("padding", None)
    past = given.pop("past", None)
    positions = given.pop("positions")
    embeds = torch.zeros(len(positions), positions.shape[1], 4)
    return hf_masks._preprocess_mask_arguments(config, embeds, padding, past, positions, None)


@pytest.fixture
def config():
    config = copy.deepcopy(llama_config())
    config._attn_implementation = "flashmask"
    return config


def test_documents_beside_a_mask(config):
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 0]])
    *_, documents, _, _, _, _ = arguments(config, positions=positions, padding=padding)
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2, 2], [1] * 9]


def test_a_mask_of_another_length_refuses_several_documents(config):
    short = torch.ones(1, 8, dtype=torch.int64)
    *_, documents, _, kv_length, _, _ = arguments(config, positions=torch.arange(9)[None], padding=short)
    assert kv_length == 8
    assert documents is None
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .*pass whole rows"):
        arguments(config, positions=PACKED, padding=short)


def test_a_static_cache_refuses_several_documents():
    model = model_with("flashmask")
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .*use_cache=False"):
        model.generate(ROW, position_ids=PACKED, cache_implementation="static", max_new_tokens=2)


@pytest.mark.parametrize(
    "given", [{"use_cache": True}, {"attention_mask": torch.ones(1, 9).long(), "use_cache": False}]
)
def test_chunks_refuse_several_documents_beside_a_cache_or_a_mask(given):
    settings = {**llama_config().to_dict(), "model_type": None, "attention_chunk_size": 4, "num_local_experts": 2}
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keep += ("num_key_value_heads", "attention_chunk_size", "num_local_experts", "pad_token_id")
    config = Llama4TextConfig(**{name: settings[name] for name in keep}, intermediate_size_mlp=32, head_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()
    model(ROW, position_ids=PACKED, use_cache=False)
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .*chunked attention"):
        model(ROW, position_ids=PACKED, **given)


@pytest.mark.parametrize(
    "source",
    ["", "_preprocess_mask_arguments = print", "def _preprocess_mask_arguments(config, mask): pass"],
    ids=["missing", "builtin", "signature"],
)
def test_document_patch_refuses_what_it_does_not_know(source):
    with pytest.raises(RuntimeError, match=r"_preprocess_mask_arguments.*install a version it was tested with"):
        upstream.find_documents_always(fake_transformers(source))


# Classes by name


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
        GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=1, attention_types=[[["global"], 1]], num_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_classes_by_name_say_that_there_is_none(config):
    with pytest.raises(
        NotImplementedError, match=r"has attention classes of its own .*use attn_implementation='eager'"
    ):
        AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_classes_by_name_are_not_there_later_either():
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8)
    config = GitConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0, vision_config=vision
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match=r"Git\w+ has attention classes of its own .*'eager'"):
        model.set_attn_implementation("flashmask")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("method", [None, print, lambda self: None], ids=["missing", "builtin", "signature"])
def test_class_patch_refuses_what_it_does_not_know(method):
    model_class = type("Model", (), {} if method is None else {"get_correct_attn_implementation": method})
    with pytest.raises(
        RuntimeError, match=r"get_correct_attn_implementation of Model.*install a version it was tested"
    ):
        upstream.refuse_where_unfit(model_class)


def test_adapting_twice_changes_nothing():
    before = (hf_masks._preprocess_mask_arguments, PreTrainedModel.get_correct_attn_implementation)
    code = generic.is_flash_attention_requested.__code__
    upstream.adapt()
    assert (hf_masks._preprocess_mask_arguments, PreTrainedModel.get_correct_attn_implementation) == before
    assert generic.is_flash_attention_requested.__code__ is code
