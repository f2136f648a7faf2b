"""The arguments of a model's call, by whichever name they come."""

from flashmask_hf.hf.call import cache_of


def test_the_cache_is_found_by_either_name():
    cache = object()
    assert cache_of({"cache": cache}) is cache
    assert cache_of({"past_key_values": cache}) is cache
    assert cache_of({"past_key_values": cache, "cache": None}) is cache
    assert cache_of({"use_cache": True}) is None
