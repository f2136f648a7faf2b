"""The arguments of a model's call, by whichever name they come, and calls within a call."""

import torch
from tools.model_pairs import model_pair, positions, tokens

from flashmask_hf.hf import call
from flashmask_hf.hf.call import Call, cache_of, call_of, current


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


def test_code_behind_a_graph_break_is_compiled_once(no_compiled_code, monkeypatch):
    """A guard on what dies with a call, as on a bound method of its dict, would compile the code in every step."""
    model, _ = model_pair("llama")

    def behind():
        found = call_of(model.config, 6)
        return found.documents.end + found.tokens

    compiled = torch.compile(behind, backend="eager")
    ids, position_ids = tokens(1, 6), positions([2, 4])
    for step in range(3):
        made = Call(model, (), {"input_ids": ids, "position_ids": position_ids})
        monkeypatch.setattr(call._traced, "call", made)  # as compiled code does before the break
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            assert torch.equal(compiled(), torch.tensor([[2, 2, 6, 6, 6, 6]]) + ids)
