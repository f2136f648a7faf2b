"""Registration with transformers, and every way to choose the implementation."""

import importlib

import pytest
import torch
from tools.model_pairs import MODELS, assert_near, model_pair, tokens
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.utils import generic

import flashmask_hf
from flashmask_hf.hf import patches
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.mask_hook import mask_hook


def test_import_registers():
    assert AttentionInterface().get_interface("flashmask", None) is attention_forward
    assert AttentionMaskInterface()["flashmask"] is mask_hook


def test_register_twice_changes_nothing():
    code = generic.is_flash_attention_requested.__code__
    flashmask_hf.register()
    flashmask_hf.register()
    assert generic.is_flash_attention_requested.__code__ is code


@pytest.mark.parametrize("error", [RuntimeError, ImportError])
def test_import_survives_an_unknown_transformers(error, monkeypatch):
    def refuse():
        raise error("transformers 99 is unknown")

    with monkeypatch.context() as patch:
        patch.setattr(patches, "register", refuse)
        with pytest.warns(UserWarning, match="'flashmask' is not available: transformers 99 is unknown"):
            importlib.reload(flashmask_hf)
    importlib.reload(flashmask_hf)


def test_every_way_to_set_the_implementation(tmp_path):
    ids = tokens(2, 9)
    ours, eager = model_pair("llama")
    expected = eager(ids).logits
    eager.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashmask")
    eager.set_attn_implementation("flashmask")
    for model in (ours, loaded, eager):
        assert model.config._attn_implementation == "flashmask"
        assert_near(model(ids).logits, expected)


def test_set_per_sub_model():
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(text_config=MODELS["llama"](), vision_config=vision, image_token_id=1)
    model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "flashmask", "vision_config": "sdpa"})
    assert model.config.text_config._attn_implementation == "flashmask"
    assert model.config.vision_config._attn_implementation == "sdpa"
    image = tokens(1, 8)
    image[0, :4] = 1  # four image tokens
    inputs = dict(input_ids=image, pixel_values=torch.randn(1, 3, 16, 16))
    got = model(**inputs).logits
    model.set_attn_implementation("eager")
    assert_near(got, model(**inputs).logits)
