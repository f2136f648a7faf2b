"""Models with "flashmask" attention against the same models with eager attention, or against each document alone."""

import pytest
import torch
from tools.model_pairs import (
    MODELS,
    SIZES,
    assert_near,
    chunked_pair,
    compare,
    dense_for,
    model_pair,
    positions,
    tokens,
)
from torch._dynamo.testing import CompileCounter
from transformers import DecisionTransformerConfig, DecisionTransformerModel, DynamicCache, StaticCache

from flashmask_hf import FlashMask, masks

# Batches and documents


@pytest.mark.parametrize("model_name", MODELS)
def test_plain_batch_equals_eager(model_name):
    compare(*model_pair(model_name), dict(input_ids=tokens(2, 15)))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_name", MODELS)
def test_padded_batch_equals_eager(model_name, side):
    attention_mask = torch.ones(3, 15, dtype=torch.int64)
    for row, count in enumerate((0, 4, 9)):
        attention_mask[row, :count] = 0
    if side == "right":
        attention_mask = attention_mask.flip(-1)
    inputs = dict(input_ids=tokens(3, 15), attention_mask=attention_mask)
    compare(*model_pair(model_name), inputs, real=attention_mask.bool())


@pytest.mark.parametrize("given", ["alone", "with a cache", "with a mask of ones", "with padding"])
@pytest.mark.parametrize("model_name", MODELS)
def test_packed_by_positions_equals_documents_alone(model_name, given):
    """Documents are found where transformers does not look for them, too: beside a cache or a mask, and in gpt_oss."""
    ours, eager = model_pair(model_name)
    lengths, ids = [9, 4, 7], tokens(1, 20)
    inputs = dict(position_ids=positions(lengths), use_cache=given == "with a cache")
    if given == "with a mask of ones":
        inputs["attention_mask"] = torch.ones(1, 20, dtype=torch.int64)
    if given == "with padding":
        padding = torch.zeros(1, 3, dtype=torch.int64)
        inputs["attention_mask"] = torch.cat([torch.ones(1, 20, dtype=torch.int64), padding], 1)
        inputs["position_ids"] = torch.cat([inputs["position_ids"], padding], 1)
        ids = torch.cat([ids, padding], 1)
    packed = ours(ids, **inputs).logits[:, :20]
    alone = torch.cat([eager(document, use_cache=False).logits for document in ids[:, :20].split(lengths, 1)], 1)
    assert_near(packed, alone)


@pytest.mark.parametrize(
    ("lengths", "hidden"),
    [([6, 8], [6]), ([6, 8], [6, 7, 8]), ([2, 12], [2, 3])],
    ids=["first token", "first three", "2"],
)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("model_name", ["llama", "mistral", "gpt_oss"])
def test_hidden_start_of_a_document_keeps_it_apart(model_name, use_cache, lengths, hidden):
    """Padding on the left of a document, inside a row whose positions count through it."""
    ours, eager = model_pair(model_name)
    ids, real = tokens(1, 14), torch.ones(1, 14, dtype=torch.int64)
    real[:, hidden] = 0
    got = ours(ids, attention_mask=real, position_ids=positions(lengths), use_cache=use_cache).logits
    alone = [
        eager(document, attention_mask=mask, use_cache=False).logits
        for document, mask in zip(ids.split(lengths, 1), real.split(lengths, 1), strict=True)
    ]
    shown = real[0].bool()
    assert_near(got[:, shown], torch.cat(alone, 1)[:, shown])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        [([0, 1, 2, 3], {}), ([0, 1, 2], {})],
        [([0, 1, 2, 3], {}), ([4, 0, 1], {})],
        [([0, 1, 2, 3], {}), ([0], {})],
        [([0, 1, 2, 3], {}), ([0, 0], {})],
        [([0, 1], {}), ([0, 1], dict(attention_mask=torch.tensor([[1, 1, 0, 1]])))],
        [([2, 3, 0, 1], {})],
        [([0, 0, 1], {})],
    ],
    ids=["two parts", "inside a part", "one token", "zeros", "hidden", "one part", "second token"],
)
def test_document_after_another_in_a_cache_is_refused(parts, static):
    ours, _ = model_pair("llama")
    cache = StaticCache(config=ours.config, max_cache_len=8) if static else DynamicCache(config=ours.config)

    def run():
        for place, given in parts:
            ours(tokens(1, len(place)), position_ids=torch.tensor([place]), past_key_values=cache, **given)

    if len(parts) == 1 and not static:
        run()  # a whole row
        return
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 in one row.*pass whole rows and use_cache"):
        run()


@pytest.mark.parametrize("model_name", MODELS)
def test_supplied_vectors_equal_dense_mask(model_name):
    ours, eager = model_pair(model_name)
    lengths = [[11, 3, 6], [2, 18]]
    mask = masks.causal_document(lengths)
    common = dict(input_ids=tokens(2, 20), position_ids=torch.cat([positions(row) for row in lengths]), use_cache=False)
    compare(
        ours,
        eager,
        common | dict(startend_row_indices=mask.indices),
        common | dict(attention_mask=dense_for(eager, mask.to_dense())),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["vectors", "padding"])
@pytest.mark.parametrize("model_name", ["llama", "gemma2", "gpt_oss"])
def test_models_on_the_gpu_equal_eager(model_name, given):
    """The Triton kernels give the results of eager attention in float32."""
    ours, eager = (model.cuda() for model in model_pair(model_name))
    mask = masks.causal_document([[11, 3, 6], [2, 18]])
    common = dict(input_ids=tokens(2, 20).cuda(), use_cache=False)
    if given == "padding":
        padding = torch.ones(2, 20, dtype=torch.int64)
        padding[0, 13:] = 0
        compare(ours, eager, common | dict(attention_mask=padding.cuda()), real=padding.bool().cuda())
        return
    common["position_ids"] = torch.cat([positions([11, 3, 6]), positions([2, 18])]).cuda()
    dense = dense_for(eager, mask.to_dense())
    dense = {k: v.cuda() for k, v in dense.items()} if isinstance(dense, dict) else dense.cuda()
    compare(
        ours,
        eager,
        common | dict(startend_row_indices=mask.indices.cuda()),
        common | dict(attention_mask=dense),
    )


@pytest.mark.parametrize("model_name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("n", [2, 4])
def test_supplied_vectors_of_other_forms_equal_dense_mask(model_name, n):
    window = {"sliding_window": 64} if model_name != "llama" else {}
    ours, eager = model_pair(model_name, **window)
    if n == 2:  # keys 3..5 are evicted for rows 8..11
        indices = torch.tensor([[16, 16]] * 16, dtype=torch.int32).view(1, 1, 16, 2)
        indices[:, :, 3:6] = torch.tensor([8, 12], dtype=torch.int32)
        mask = FlashMask(indices, causal=True)
    else:  # a prefix that is seen both ways
        mask = masks.prefix_lm_causal(16, 5).bidirectional()
    assert mask.indices.shape[-1] == n
    common = dict(input_ids=tokens(1, 16), position_ids=positions([16]), use_cache=False)
    dense = torch.where(mask.to_dense(), 0.0, torch.finfo(torch.float32).min)
    if model_name != "llama":
        dense = {"full_attention": dense, "sliding_attention": dense}
    compare(ours, eager, common | dict(startend_row_indices=mask.indices), common | dict(attention_mask=dense))


def test_supplied_vectors_win_over_detection():
    ours, eager = model_pair("llama")
    mask = masks.share_question([(6, [4, 3])])
    length = mask.kv_len
    position_ids = torch.cat([torch.arange(6), torch.arange(6, 10), torch.arange(6, 9)])[None]
    common = dict(input_ids=tokens(1, length), position_ids=position_ids, use_cache=False)
    compare(
        ours,
        eager,
        common | dict(startend_row_indices=mask.indices),
        common | dict(attention_mask=torch.where(mask.to_dense(), 0.0, torch.finfo(torch.float32).min)),
    )
    # An all-ones 2D mask and a cache change nothing.
    vectors = dict(startend_row_indices=mask.indices)
    ones = dict(attention_mask=torch.ones(1, length), use_cache=True)
    assert torch.equal(ours(**common, **vectors).logits, ours(**(common | ones), **vectors).logits)


def test_cu_seq_lens_keep_documents_apart_beside_a_cache():
    """transformers detects packing only without a cache; collators for FlashAttention also pass `cu_seq_lens`."""
    ours, eager = model_pair("llama")
    inputs = dict(input_ids=tokens(1, 12), position_ids=positions([5, 7]))
    edges = torch.tensor([0, 5, 12], dtype=torch.int32)
    got = ours(**inputs, use_cache=True, cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=7, max_length_k=7)
    assert_near(got.logits, eager(**inputs, use_cache=False).logits)


@pytest.mark.parametrize("model_name", ["llama", "gemma2", "gpt_oss"])
def test_perturbing_one_document_leaves_the_others_alone(model_name):
    lengths, changed = [60, 90, 45], slice(60, 150)
    # One expert: with several, the number of its tokens decides how an expert rounds all of them.
    ours, _ = model_pair(model_name, **({"num_local_experts": 1} if model_name == "gpt_oss" else {}))
    vectors = masks.causal_document(lengths).indices
    embeds = ours.get_input_embeddings()(tokens(1, 195)).detach()
    weight = torch.randn(1, 195, SIZES["vocab_size"])
    results = []
    for shift in (0.0, 3.0):
        moved = embeds.clone()
        moved[:, changed] += shift
        moved.requires_grad_()
        out = ours(
            inputs_embeds=moved, position_ids=positions(lengths), startend_row_indices=vectors, use_cache=False
        ).logits
        (out * weight).sum().backward()
        results.append((out.detach(), moved.grad))
    other = torch.ones(195, dtype=torch.bool)
    other[changed] = False
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, other], after[:, other])
        assert not torch.equal(before[:, ~other], after[:, ~other])


@pytest.mark.parametrize("model_name", MODELS)
def test_packed_equals_separate(model_name):
    lengths = [9, 1, 17, 6]
    ours, _ = model_pair(model_name)
    ids = tokens(1, sum(lengths))
    packed = ours(
        ids,
        position_ids=positions(lengths),
        startend_row_indices=masks.causal_document(lengths).indices,
        use_cache=False,
    ).logits
    separate = [ours(document).logits for document in ids.split(lengths, 1)]
    assert_near(packed, torch.cat(separate, 1))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_chunked_model_equals_eager(padding):
    ours, eager = chunked_pair()
    inputs = dict(input_ids=tokens(2, 11))
    if padding != "none":
        real = torch.arange(11) >= torch.tensor([[0], [3]])
        inputs["attention_mask"] = (real if padding == "left" else real.flip(-1)).to(torch.int64)
    compare(ours, eager, inputs, real=inputs["attention_mask"].bool() if padding != "none" else None)
    if padding != "right":  # which generates from padding
        generated = [model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in (ours, eager)]
        assert torch.equal(*generated)


# Positions without a meaning


def test_positions_of_a_model_with_another_position_embedding():
    """Decision transformers embed the time themselves and pass only zeros, beside a 2D mask."""
    config = dict(state_dim=4, act_dim=2, hidden_size=32, n_layer=2, n_head=4, vocab_size=48, initializer_range=0.3)
    models = []
    for name in ("eager", "flashmask"):
        torch.manual_seed(0)
        made = DecisionTransformerConfig(**config, bos_token_id=1, eos_token_id=2)
        models.append(DecisionTransformerModel._from_config(made, attn_implementation=name).eval())
    steps = torch.ones(1, 6, 1)
    inputs = dict(states=steps.cumsum(1).expand(1, 6, 4), actions=steps.expand(1, 6, 2), rewards=steps)
    inputs |= dict(returns_to_go=steps, timesteps=torch.arange(6)[None])
    want, got = (model(**inputs).action_preds for model in models)
    assert_near(got, want)


def test_positions_that_are_all_zero_and_reach_the_layers():
    ours, eager = model_pair("llama")
    inputs = dict(position_ids=torch.zeros(1, 6, dtype=torch.long), attention_mask=torch.ones(1, 6, dtype=torch.long))
    ids = tokens(1, 6)
    assert_near(ours(ids, **inputs).logits, eager(ids, **inputs).logits)


@pytest.mark.parametrize("width", [6, 8])
def test_left_padding_in_a_static_cache(width):
    """The 2D mask may be as wide as the tokens or as the cache."""
    ours, eager = model_pair("llama")
    real = torch.tensor([[0, 0, 1, 1, 1, 1]])
    mask = torch.nn.functional.pad(real, (0, width - 6))
    ids, place = tokens(1, 6), (real.cumsum(-1) - 1).clamp(min=0)
    got, want = (
        model(
            ids,
            attention_mask=mask,
            position_ids=place,
            past_key_values=StaticCache(config=model.config, max_cache_len=8),
        ).logits[:, 2:]
        for model in (ours, eager)
    )
    assert_near(got, want)


# Generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_name", MODELS)
def test_greedy_generation_equals_eager(model_name, cache):
    ours, eager = model_pair(model_name)
    ids = tokens(2, 9)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :4] = 0
    got, want = (
        model.generate(
            ids,
            attention_mask=attention_mask,
            max_new_tokens=7,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            pad_token_id=0,
        )
        for model in (ours, eager)
    )
    assert got.shape == (2, 16)
    assert torch.equal(got, want)


@pytest.mark.parametrize("model_name", ["llama", "mistral"])
def test_prefill_in_parts_equals_one_pass(model_name):
    ours, eager = model_pair(model_name)
    ids = tokens(2, 12)
    cache, parts = None, []
    for part in ids.split([7, 4, 1], 1):
        out = ours(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_near(torch.cat(parts, 1), eager(ids).logits)


# torch.compile


@pytest.mark.parametrize(
    ("model_name", "given"),
    [
        ("llama", "vectors"),
        pytest.param("llama", "positions", marks=pytest.mark.full),
        pytest.param("mistral", "vectors", marks=pytest.mark.full),
        pytest.param("mistral", "positions", marks=pytest.mark.full),
    ],
)
def test_compiled_equals_eager(model_name, given):
    ours, eager = model_pair(model_name, num_hidden_layers=1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    lengths = [11, 3, 6]
    mask = masks.causal_document(lengths)
    common = dict(input_ids=tokens(1, 20), position_ids=positions(lengths), use_cache=False)
    extra = dict(startend_row_indices=mask.indices) if given == "vectors" else {}
    results = []
    for call, model, more in (
        (compiled, ours, extra),
        (eager, eager, dict(attention_mask=dense_for(eager, mask.to_dense()))),
    ):
        out = call(**common, **more).logits
        out.square().mean().backward()
        results.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_near(results[0][0], results[1][0], "logits")
    for name, gradient in results[0][1].items():
        assert_near(gradient, results[1][1][name], name)


def test_compiled_model_is_not_compiled_again_for_other_lengths():
    ours, _ = model_pair("llama", num_hidden_layers=1)
    graphs = CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, backend=graphs, dynamic=True)
    for lengths in ([11, 3, 6], [9, 16], [4, 8, 2]):
        ids, places = tokens(1, sum(lengths)), positions(lengths)
        labels = ids.masked_fill(places == 0, -100)
        inputs = dict(input_ids=ids, labels=labels, position_ids=places, use_cache=False)
        inputs["startend_row_indices"] = masks.causal_document(lengths).indices
        got, want = compiled(**inputs), ours(**inputs)
        assert_near(got.logits, want.logits)
        assert_near(got.loss, want.loss)
    assert graphs.frame_count == 1
