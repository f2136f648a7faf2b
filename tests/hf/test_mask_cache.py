"""Layers and recomputations share one mask and one plan, and no stale mask is found."""

import collections
import gc

import pytest
import torch
from tools.model_pairs import MODELS, attend, model_pair, positions, tokens
from tools.tiny import assert_exact
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM

from flashmask_hf import masks
from flashmask_hf._call import operators
from flashmask_hf.hf import late, layer_mask, merge
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.mask_hook import mask_hook
from flashmask_hf.long_rows.checkpointing import enable_checkpointing


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """Return the entries of a cache that only this test uses."""
    entries = collections.OrderedDict()
    monkeypatch.setattr(layer_mask, "_entries", entries)
    return entries


@pytest.fixture
def plans(monkeypatch):
    """Return a list that grows by one whenever a plan is built."""
    built = []
    build = operators._build_plan

    def counting(indices, *args):
        built.append(tuple(indices.shape))
        return build(indices, *args)

    monkeypatch.setattr(operators, "_build_plan", counting)
    return built


@pytest.fixture
def windows(monkeypatch):
    """Return a list that grows by one whenever a window is applied to a mask."""
    applied = []
    apply_window = merge.apply_window
    monkeypatch.setattr(
        merge, "apply_window", lambda *args, **kwargs: applied.append(1) or apply_window(*args, **kwargs)
    )
    return applied


@pytest.mark.parametrize("given", ["vectors", "positions", "padding"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(("model_name", "per_step"), [("llama", 1), ("gemma2", 2)])
def test_one_plan_per_mask_and_step(plans, model_name, per_step, checkpointing, given):
    deep = MODELS[model_name]()
    deep.num_hidden_layers = 4
    if hasattr(deep, "layer_types"):
        deep.layer_types = deep.layer_types[:2] * 2
    model = AutoModelForCausalLM.from_config(deep, attn_implementation="flashmask").train()
    if checkpointing != "none":
        enable_checkpointing(model, {"use_reentrant": checkpointing == "reentrant"})
    for step in range(1, 4):
        extra = {
            "vectors": lambda: dict(startend_row_indices=masks.causal_document([5, 7]).indices),
            "positions": dict,
            "padding": lambda: dict(attention_mask=torch.ones(1, 12)),
        }[given]()
        out = model(tokens(1, 12), position_ids=positions([5, 7]), use_cache=False, **extra)
        out.logits.sum().backward()
        assert len(plans) == per_step * step


def test_masks_are_dropped_with_their_tensor(cache):
    model, _ = model_pair("gemma2")
    for _ in range(3):
        vectors = masks.causal_document([5, 7]).indices
        model(tokens(1, 12), position_ids=positions([5, 7]), startend_row_indices=vectors, use_cache=False)
        assert len(cache) == 3  # two kinds of layers, and the first tokens
    del vectors
    gc.collect()
    assert not cache


@pytest.mark.parametrize("name", ["startend_row_indices", "attention_mask"])
def test_a_mask_does_not_keep_the_tensor_that_it_reads(cache, name):
    hooked = mask_hook(batch_size=1, q_length=6, kv_length=6).clone()
    given = {name: hooked if name == "attention_mask" else masks.causal_document([3, 3]).indices}
    attend(**given)
    assert len(cache) == 2  # with the first tokens of branches, or the columns without their mark
    del hooked, given
    gc.collect()
    assert not cache


def test_the_number_of_masks_is_bounded(cache):
    query = torch.randn(1, 2, 4, 8)
    kept = [masks.causal_document([1, 3]).indices for _ in range(layer_mask._CAPACITY + 3)]
    for vectors in kept:
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=vectors)
    assert len(cache) == layer_mask._CAPACITY


def test_a_mask_that_is_built_again_is_the_newest(cache):
    kept = [torch.zeros(1, dtype=torch.int32) for _ in range(layer_mask._CAPACITY + 1)]
    for x in kept[:-1]:
        layer_mask.cached_mask((x,), (), object)
    kept[0].add_(1)
    again = layer_mask.cached_mask((kept[0],), (), object)
    last = layer_mask.cached_mask((kept[-1],), (), object)
    assert layer_mask.cached_mask((kept[0],), (), object) is again
    assert layer_mask.cached_mask((kept[-1],), (), object) is last


def test_views_of_one_memory_that_differ_have_masks_of_their_own(cache):
    memory = torch.zeros(8, dtype=torch.int32)
    views = memory[:4], memory[::2], memory[:4].view(torch.float32)
    assert len({layer_mask.cached_mask((x,), (), object) for x in views}) == 3


def test_the_memory_of_freed_sources_is_not_used_again(cache):
    first = torch.zeros(1)
    found = [layer_mask.cached_mask((first, torch.zeros(1000)), (), object) for _ in range(5)]
    assert len(set(found)) == 5


def test_masks_of_fake_tensors_are_not_kept(cache):
    with FakeTensorMode():
        x = torch.zeros(1, dtype=torch.int32)
        assert layer_mask.cached_mask((x,), (), lambda: 1) == 1
    assert not cache


def test_a_tensor_has_one_mask_per_variant(cache, plans):
    """Columns of a hook and positions that came with it before leave no mask of their own."""
    model, _ = model_pair("gemma2")
    vectors = masks.causal_document([5, 7]).indices
    for step in range(1, 4):
        for extra in ({}, dict(attention_mask=torch.ones(1, 12))):
            inputs = dict(position_ids=positions([5, 7]), startend_row_indices=vectors, use_cache=False)
            model(tokens(1, 12), **inputs, **extra)
            assert sum(isinstance(one.mask, torch.Tensor) for one in cache.values()) == 2
        assert len(plans) == 4 * step  # each forward has columns of its own


def test_a_mask_may_be_dropped_at_once(plans, monkeypatch):
    """Other threads may fill the cache and so drop a mask before it is returned."""

    class Full(collections.OrderedDict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            del self[key]

    monkeypatch.setattr(layer_mask, "_entries", Full())
    query, vectors = torch.randn(1, 2, 8, 8).requires_grad_(), masks.causal_document([3, 5]).indices
    for count in (1, 2):
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=vectors)
        assert len(plans) == count


def test_vectors_changed_in_place_are_read_again():
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    vectors = masks.causal_document([8]).indices.clone()
    for window in (None, 3):
        for lengths in ([8], [3, 5]):
            vectors.copy_(masks.causal_document(lengths).indices)
            fresh = masks.causal_document(lengths).indices
            got, want = (
                attention_forward(module, query, query, query, None, startend_row_indices=v, sliding_window=window)[0]
                for v in (vectors, fresh)
            )
            assert torch.equal(got, want)


def attend_twice(vectors, other, **more):
    """Return attention for a buffer of `vectors` and then of `other`, and for `other` in a tensor of its own."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    buffer = vectors.clone()
    results = []
    for given in (buffer, buffer, other.clone()):
        if len(results) == 1:
            buffer.copy_(other)
        results.append(attention_forward(module, query, query, query, None, startend_row_indices=given, **more)[0])
    return results


def test_vectors_changed_in_inference_mode_are_read_again(cache):
    """Tensors made in inference mode do not count their changes, so their masks are not cached."""
    first, second = (masks.causal_document(lengths).indices for lengths in ([8], [3, 5]))
    more = dict(startend_row_indices=masks.causal(8).indices, sliding_window=3)  # this tensor counts its changes
    with torch.inference_mode():
        before, got, want = attend_twice(first, second, sliding_window=3)
        assert torch.equal(got, want)
        assert not torch.equal(got, before)
        query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
        places = torch.arange(8)[None].clone()
        attention_forward(module, query, query, query, None, position_ids=places, **more)
        places *= 2
        got, want = (
            attention_forward(module, query, query, query, None, position_ids=x, **more)[0]
            for x in (places, places.clone())
        )
        assert torch.equal(got, want)
    assert not cache


def test_layers_in_inference_mode_share_a_mask(windows):
    """The hook makes new columns in each forward, so its layers may share masks of inference tensors, too."""
    config = MODELS["mistral"]()
    config.num_hidden_layers = 4
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()
    with torch.inference_mode():
        vectors, places = masks.causal_document([5, 7]).indices.clone(), positions([5, 7]).clone()
        inputs = dict(input_ids=tokens(1, 12), position_ids=places, startend_row_indices=vectors, use_cache=False)
        model(**inputs)
        assert len(windows) == 1
        vectors.copy_(masks.causal_document([3, 9]).indices)
        places.copy_(positions([3, 9]))
        got = model(**inputs).logits
        assert len(windows) == 2
        inputs.update(position_ids=places.clone(), startend_row_indices=vectors.clone())
        assert torch.equal(got, model(**inputs).logits)


def test_columns_made_in_inference_mode_have_one_mask(cache):
    """Those of the hook are new in each forward, and nobody changes them in place."""
    with torch.inference_mode():
        columns = torch.zeros(1, dtype=torch.int32)
        first, second = (layer_mask.cached_mask((columns,), (), object) for _ in range(2))
    assert first is second


def test_each_stream_has_masks_of_its_own(cache, windows, monkeypatch):
    """A mask made on one stream may not be written yet when another reads it."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    vectors = masks.causal_document([3, 5]).indices
    for stream, count in ((1, 1), (2, 2), (1, 2), (2, 2)):
        for user in (layer_mask, late):
            monkeypatch.setattr(user, "stream_of", lambda x: (0, stream))  # noqa: B023
        attention_forward(module, query, query, query, None, startend_row_indices=vectors, sliding_window=3)
        attention_forward(module, query, query, query, None)
        assert len(windows) == count
        assert len(cache) == 2 * count


def test_a_graph_reads_vectors_again(cache, windows, monkeypatch):
    """A CUDA graph finds no mask that was made before, and leaves none."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    vectors = masks.causal_document([3, 5]).indices
    for capturing, count in ((False, 1), (True, 2), (True, 3), (False, 3)):
        for user in (layer_mask, late):
            monkeypatch.setattr(user, "is_capturing", lambda x: capturing)  # noqa: B023
        attention_forward(module, query, query, query, None, startend_row_indices=vectors, sliding_window=3)
        attention_forward(module, query, query, query, None)
        assert len(windows) == count
        assert len(cache) == 2


def test_an_alias_finds_the_same_mask(plans):
    """Reentrant checkpointing detaches positional arguments before it recomputes."""
    query, vectors = torch.randn(1, 2, 8, 8).requires_grad_(), masks.causal_document([3, 5]).indices
    for v in (vectors, vectors.detach(), vectors.view_as(vectors)):
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=v)
    assert len(plans) == 1


def test_evaluation_in_inference_mode_then_training():
    """A plan made in inference mode cannot be saved for a backward."""
    model, _ = model_pair("mistral")
    vectors = masks.causal_document([5, 7]).indices
    inputs = dict(input_ids=tokens(1, 12), position_ids=positions([5, 7]), use_cache=False)
    for extra in (dict(startend_row_indices=vectors), {}):
        with torch.inference_mode():
            before = model(**inputs, **extra).logits.clone()
        after = model(**inputs, **extra).logits
        after.sum().backward()
        assert torch.equal(before, after)


@pytest.mark.parametrize("given", ["vectors in a window", "no hook"])
def test_a_layer_in_inference_mode_then_training(given):
    """A mask made in inference mode cannot be saved for a backward either."""
    query, module = torch.randn(1, 2, 80, 8), torch.nn.Module()
    window = dict(startend_row_indices=masks.causal_document([30, 50]).indices, sliding_window=3)
    options = window if given == "vectors in a window" else {}
    with torch.inference_mode():
        before, _ = attention_forward(module, query, query, query, None, **options)
    leaf = query.clone().requires_grad_()
    after, _ = attention_forward(module, leaf, leaf, leaf, None, **options)
    after.sum().backward()
    assert torch.equal(before, after)


@pytest.mark.usefixtures("float64")
def test_a_frozen_model_inside_a_transform():
    model, eager = (one.double() for one in model_pair("llama"))
    ids = tokens(2, 9)
    weight = torch.ones((), dtype=torch.float64)
    found = [
        torch.func.grad(lambda w: w * one(ids, use_cache=False).logits.detach().sum())(weight)  # noqa: B023
        for one in (model, eager)
    ]
    assert_exact(found[:1], found[1:])
    with pytest.raises(NotImplementedError, match=r"torch\.func's"):
        torch.func.grad(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum())(torch.randn(1, 5, 32))
