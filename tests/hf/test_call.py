"""The arguments of a model's call, by whichever name they come, and calls within a call."""

from tools.model_pairs import model_pair, tokens

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
