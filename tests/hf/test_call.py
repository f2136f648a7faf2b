"""The arguments of a model's call, by whichever name they come, and calls within a call."""

import pytest
import torch
from tools.model_pairs import model_pair, positions, tokens

from flashmask_hf.hf.call import Call, cache_of, current


def test_the_cache_is_found_by_either_name():
    cache = object()
    assert cache_of({"cache": cache}) is cache
    assert cache_of({"past_key_values": cache}) is cache
    assert cache_of({"past_key_values": cache, "cache": None}) is cache
    assert cache_of({"use_cache": True}) is None


def test_the_call_around_a_submodel_is_current_again_after_it():
    model, _ = model_pair("llama")
    outer = current.call = Call(model, (), {})
    try:
        model(tokens(1, 6))
        assert current.call is outer
    finally:
        current.call = None


@pytest.mark.full
@torch.no_grad()
def test_a_model_with_a_graph_break_is_compiled_in_two_steps(no_compiled_code, monkeypatch):
    """A guard on what dies with a call, as on a bound method of its dict, would compile anew in every step."""
    model, _ = model_pair("llama")
    ids = {"input_ids": tokens(1, 6), "position_ids": positions([2, 4])}
    expected = model(**ids).logits
    embed = model.model.embed_tokens.forward

    def embed_behind_a_break(input_ids):
        torch._dynamo.graph_break()
        return embed(input_ids)

    monkeypatch.setattr(model.model.embed_tokens, "forward", embed_behind_a_break)
    compiled = torch.compile(model, backend="eager")
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            torch.testing.assert_close(compiled(**ids).logits, expected)
