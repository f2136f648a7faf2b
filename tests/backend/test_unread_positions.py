"""Packed rows told by positions alone raise in models that do not read them."""

import pytest
import torch
from tools import model_zoo
from tools.model_pairs import assert_near, model_pair, positions, tokens
from tools.tiny import llama_config
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from flashmask_hf import masks
from flashmask_hf.backend.unread_positions import _active

PACKED = positions([4, 5])
IDS = tokens(1, 9).clamp(max=35)


def granite(kind="attention"):
    config = GraniteMoeHybridConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=[kind] * 2, num_local_experts=2, num_experts_per_tok=1,
        shared_intermediate_size=32, mamba_n_heads=4, mamba_d_head=16, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()


@pytest.mark.parametrize("build", [granite, lambda: model_zoo.build("hunyuan_vl_text", "flashmask")])
def test_positions_that_nothing_reads_are_refused(build):
    model = build()
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones(1, 9).long()}):
        with pytest.raises(RuntimeError, match=r"hands position_ids neither to its masks.*pass startend_row"):
            model(input_ids=IDS, position_ids=PACKED, **options)
    assert _active.get() == ()
    model(input_ids=IDS, position_ids=torch.arange(9)[None])
    left = (torch.arange(9) > 2).long()[None]
    model(input_ids=IDS, position_ids=(left.cumsum(-1) - 1).clamp(min=0), attention_mask=left)


def test_vectors_keep_these_documents_apart():
    model = granite()
    row = dict(position_ids=PACKED, startend_row_indices=masks.causal_document([4, 5]).indices, use_cache=False)
    want = torch.cat([model(input_ids=part).logits for part in IDS.split([4, 5], 1)], 1)
    assert_near(model(input_ids=IDS, **row).logits, want)


def test_models_that_read_positions_are_looked_at_once():
    model, _ = model_pair("llama")
    model(IDS)
    assert not hasattr(model, "_reads_positions")
    model(IDS, position_ids=PACKED)
    assert model._reads_positions
    assert model.base_model._reads_positions
    assert _active.get() == ()


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.base_model], ids=["whole", "backbone"])
def test_documents_in_a_model_that_is_compiled_in_place(part):
    """Compiled code does not record that positions were read; it reads them all the same."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
    ids = torch.randint(3, 48, (1, 12))
    packed = positions([7, 5])
    want = model(input_ids=ids, position_ids=packed, use_cache=False).logits
    del model._reads_positions, model.base_model._reads_positions
    part(model).compile(backend="eager")
    got = model(input_ids=ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(got, want)
