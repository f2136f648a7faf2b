"""Models that the backend cannot follow are refused, with a way out."""

import pytest
import torch
import transformers
from tools.model_pairs import tokens
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BlipConfig, BloomConfig


def test_model_with_attention_of_its_own_is_refused():
    config = BloomConfig(vocab_size=48, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(NotImplementedError, match=r"BloomForCausalLM has attention code of its own .*'eager'"):
        AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config._attn_implementation = "flashmask"  # past the model's own check
    with pytest.raises(NotImplementedError, match=r"BloomModel has attention code of its own .*'eager'"):
        model(tokens(1, 6))


def test_tower_with_attention_of_its_own_is_refused():
    """The tower's config is in no mapping of models; one column would be added to its scores without an error."""
    config = BlipConfig(
        text_config=dict(vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        vision_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8),
    )
    with pytest.raises(NotImplementedError, match=r"BlipText\w+ has attention code of its own .*'eager'"):
        AutoModelForImageTextToText.from_config(config, attn_implementation="flashmask")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("SiglipText", "startend_row_indices would be ignored"), ("Gemma4Audio", "which takes dense ones")],
)
def test_tower_that_edits_masks_or_drops_keywords_is_refused(kind, reason):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="flashmask")
    inputs = dict(input_ids=tokens(1, 6)) if kind == "SiglipText" else dict(input_features=torch.zeros(1, 64, 128))
    mask = torch.ones(next(iter(inputs.values())).shape[:2], dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=rf"{config.model_type}.*{reason}.*'sdpa', or 'eager'"):
        model(**inputs, attention_mask=mask)
