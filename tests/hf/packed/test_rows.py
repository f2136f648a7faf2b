"""The check that every layer receives the packed rows' mask; the trainers' tests run models on packed rows."""

import pytest
import torch
from tools.model_pairs import SIZES, model_pair, positions, tokens
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from flashmask_hf import masks
from flashmask_hf.hf.call import Call, current
from flashmask_hf.hf.models import state_of
from flashmask_hf.hf.packed.rows import check_layers, drop_padding_from_router_logits, run_packed

ROW = dict(position_ids=positions([2, 4]), startend_row_indices=masks.causal_document([2, 4]).indices, use_cache=False)


def test_calls_count_the_layers_that_receive_the_vectors():
    model, _ = model_pair("llama")
    outer = current.call = Call(model, (), {})
    model(tokens(1, 6), **ROW)
    inner = current.call = Call(model, (), {}, outer)
    model(tokens(1, 6), **ROW)
    current.call = outer
    model(tokens(1, 6))
    current.call = None
    model(tokens(1, 6), **ROW)
    assert (outer.supplied, inner.supplied) == (2, 2)


def test_attention_that_is_another_or_changed_after_run_packed_is_refused():
    model, eager = model_pair("llama")
    with pytest.raises(
        ValueError, match=r"packed rows need attn_implementation='flashmask', but the model has 'eager'"
    ):
        run_packed(eager)
    run_packed(model)
    rows = masks.share_question([(2, [2, 2])])
    place = torch.tensor([[0, 1, 2, 3, 2, 3]])
    packed = dict(packed_input_ids=tokens(1, 6), packed_position_ids=place, startend_row_indices=rows.indices)
    batch = dict(input_ids=tokens(2, 4), packed_index=torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]]), use_cache=False)
    once = model(**batch, **packed).logits
    assert once.shape[:2] == (2, 4)
    run_packed(model)
    again = model(**batch, **packed, output_hidden_states=True)
    assert torch.equal(again.logits, once)
    assert [states.shape for states in again.hidden_states] == [(2, 4, 32)] * 3
    embeds = model.get_input_embeddings()(batch["input_ids"])  # as of a head that embeds the tokens itself
    assert torch.equal(model(**batch, **packed, inputs_embeds=embeds).logits, once)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"packed rows need attn_implementation='flashmask', but the model has 'sdpa'"):
        model(**batch, **packed)


@pytest.mark.parametrize("where", ["a layer", "a hook before", "a hook after"])
def test_a_forward_that_raises_leaves_no_record(where):
    model, _ = model_pair("llama")
    backbone = model.base_model

    def interrupt(*_):
        raise RuntimeError("interrupted")

    register = {
        "a layer": backbone.layers[1].register_forward_pre_hook,
        "a hook before": backbone.register_forward_pre_hook,
        "a hook after": backbone.register_forward_hook,
    }[where]
    check_layers(model)
    check_layers(model)
    model(tokens(1, 6))  # has no vectors that layers could miss
    handle = register(interrupt, prepend=where == "a hook after")  # between the hooks that count
    with pytest.raises(RuntimeError, match="interrupted"):
        model(tokens(1, 6), **ROW)
    assert current.call is None
    assert not state_of(backbone).is_counted
    handle.remove()
    model(tokens(1, 6), **ROW)
    assert state_of(backbone).is_counted


def test_router_logits_of_packed_rows_lack_their_padding():
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    drop_padding_from_router_logits(model)
    drop_padding_from_router_logits(model)  # drops it only once
    row = {"input_ids": tokens(1, 6), "position_ids": positions([2, 3, 1]), "output_router_logits": True}
    vectors = torch.tensor([[2, 2, 5, 5, 5, 0]], dtype=torch.int32)[:, None, :, None]

    def rows(**given):
        return [len(logits) for logits in model.base_model(**row | given, use_cache=False)["router_logits"]]

    assert rows(startend_row_indices=vectors) == [5, 5]
    assert rows() == [6, 6]
    assert rows(startend_row_indices=vectors, attention_mask=torch.ones(1, 6)) == [6, 6]
    assert rows(startend_row_indices=vectors, packed_index=torch.zeros(2, 4, dtype=torch.int64)) == [6, 6]
    kept = model.base_model(**row | {"output_router_logits": False}, startend_row_indices=vectors)
    assert kept.get("router_logits") is None
    assert isinstance(model.base_model(**row, startend_row_indices=vectors, return_dict=False), tuple)
