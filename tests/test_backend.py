"""The transformers backend: registration, the mask hook, the attention function, tiny models against eager."""

import collections
import copy
import gc
import importlib
import itertools
import types

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BlipConfig,
    BloomConfig,
    CLIPVisionConfig,
    DecisionTransformerConfig,
    DecisionTransformerModel,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    StaticCache,
)
from transformers import masking_utils as hf_masks
from transformers.utils import generic

import flashmask_hf
from flashmask_hf import FlashMask, MaskNotRepresentable, backend, mask_compiler, masks, ops
from flashmask_hf.backend import attention_forward
from flashmask_hf.mask_compiler import mask_hook

BOUND = 2e-5
"""Largest error in float32, relative to the largest entry of the expected tensor (at least 1)."""

WINDOW = 6
SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    eos_token_id=None,
)
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(backend, "_warned", set())
    yield
    torch.set_num_threads(threads)


def model_pair(name, **changes):
    """The same random model with "flashmask" and with "eager" attention."""
    pair = []
    for attention in ("flashmask", "eager"):
        config = MODELS[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        pair.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())
        assert pair[-1].config._attn_implementation == attention
    ours, eager = pair
    for parameter in eager.parameters():  # large enough that attention is far from uniform
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    if name == "gpt_oss":
        for layer in eager.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    ours.load_state_dict(eager.state_dict())
    return ours, eager


def assert_near(got, want, what=""):
    error = (got - want).abs().max().item()
    assert error <= BOUND * max(1.0, want.abs().max().item()), f"{what}: error {error:.2e}"


def compare(ours, eager, inputs, eager_inputs=None, real=None):
    """Logits of real tokens and every parameter gradient, `ours` against `eager`."""
    logits, grads = [], []
    for model, given in ((ours, inputs), (eager, eager_inputs or inputs)):
        model.zero_grad()
        out = model(**given).logits
        out = out if real is None else out[real]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
        (out * weight).sum().backward()
        logits.append(out.detach())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_near(logits[0], logits[1], "logits")
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        assert_near(grads[0][name], grads[1][name], name)


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def tokens(batch, length):
    return torch.randint(1, SIZES["vocab_size"], (batch, length))


def dense_for(model, visible):
    """The 4D masks that make eager attention of `model` see `visible` [B, 1, S, S], windows included."""
    length = visible.shape[-1]
    near = torch.arange(length)[:, None] < torch.arange(length) + WINDOW
    full, sliding = (
        torch.where(v, 0.0, torch.finfo(torch.float32).min) for v in (visible, visible & near)
    )  # [B, 1, S, S]
    if model.config.model_type == "llama":
        return full
    if model.config.model_type == "mistral":
        return sliding
    return {"full_attention": full, "sliding_attention": sliding}


# Registration and the name


def test_import_registers():
    assert AttentionInterface().get_interface("flashmask", None) is attention_forward
    assert AttentionMaskInterface()["flashmask"] is mask_hook


def test_register_twice_changes_nothing():
    code = generic.is_flash_attention_requested.__code__
    flashmask_hf.register()
    flashmask_hf.register()
    assert generic.is_flash_attention_requested.__code__ is code


def test_import_survives_an_unknown_transformers(monkeypatch):
    def refuse():
        raise RuntimeError("transformers 99 is unknown; install another")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "register", refuse)
        with pytest.warns(UserWarning, match="'flashmask' is not available: transformers 99 is unknown"):
            importlib.reload(flashmask_hf)
    importlib.reload(flashmask_hf)


def test_every_way_to_set_it(tmp_path):
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


# The hook against transformers' own dense masks


def dense_of(columns, q_length):
    assert columns.dtype == torch.int32
    assert columns.shape[2] in (1, 4)
    return FlashMask(columns.mT.contiguous(), columns.shape[2] == 1).validate(q_length).to_dense(q_length)


PADDINGS = {
    "none": lambda batch, seen: None,
    "left": lambda batch, seen: torch.arange(seen) >= torch.tensor([0, 2, seen - 1])[:batch, None],
    "right": lambda batch, seen: torch.arange(seen) < torch.tensor([seen, seen - 1, 2])[:batch, None],
    "holes": lambda batch, seen: torch.rand(batch, seen) > 0.4,
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["bidirectional", "causal", "window 1", "window 3", "window 40"])
def test_hook_equals_dense_mask(kind, padding):
    if kind.startswith("window"):
        function = hf_masks.sliding_window_causal_mask_function(int(kind.split()[1]))
    else:
        function = getattr(hf_masks, f"{kind}_mask_function")
    forms = set()
    for q_length, past, kv_offset, spare in itertools.product((1, 2, 7, 13), (0, 1, 5), (0, 1, 5), (0, 1, 6)):
        kv_length = past + q_length - kv_offset + spare  # spare: keys of a static cache that are not written yet
        if kv_length < 1 or kv_offset > past:
            continue
        for q_offset in (past, torch.tensor(past)):
            given = dict(
                batch_size=3,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=function,
                attention_mask=PADDINGS[padding](3, past + q_length),
            )
            expected = hf_masks.sdpa_mask(**given, allow_is_causal_skip=False)
            columns = mask_hook(**given, allow_is_causal_skip=True, dtype=torch.float32, config=None, use_vmap=False)
            assert columns.shape[0] in (1, 3)
            assert (columns.shape[1], columns.shape[3]) == (1, kv_length)
            assert torch.equal(dense_of(columns, q_length).expand_as(expected), expected)
            forms.add((columns.shape[2], isinstance(q_offset, torch.Tensor), spare > 0))
    if kind != "bidirectional":
        assert (1, False, False) in forms
        assert (4, True, False) in forms
        assert (4, False, True) in forms


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("lengths", [[[12]], [[5, 1, 6]], [[1] * 12], [[4, 8], [12], [1, 2, 9]]], ids=str)
def test_hook_equals_dense_mask_of_packed_documents(lengths, window):
    config = MistralConfig(**SIZES, sliding_window=window)
    make = hf_masks.create_causal_mask if window is None else hf_masks.create_sliding_window_causal_mask
    rows = torch.cat([positions(row) for row in lengths])
    for position_ids in (rows, rows[:1]):  # one row of positions serves every entry
        results = []
        for attention in ("flashmask", "eager"):
            config._attn_implementation = attention
            results.append(
                make(
                    config=config,
                    inputs_embeds=torch.zeros(len(lengths), 12, 8),
                    attention_mask=None,
                    past_key_values=None,
                    position_ids=position_ids,
                )
            )
        assert results[0].shape[2] == 1
        assert torch.equal(dense_of(results[0], 12).expand_as(results[1]), results[1] == 0)


def test_hook_compiled_with_a_tensor_offset():
    compiled = torch.compile(mask_hook, fullgraph=True, backend="eager")
    for past in (2, 5):
        given = dict(
            batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(past), attention_mask=torch.ones(2, 6).bool()
        )
        assert torch.equal(compiled(**given), mask_hook(**given))


def left_padded_groups(length):
    """Block ids of two images in a row of text, and of one in another; -1 is text."""
    ids = torch.full((2, length), -1)
    ids[0, 1:4], ids[0, 5:7], ids[1, 2:9] = 0, 1, 0
    return ids


def mine(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx <= q_idx) & ((kv_idx + q_idx) // 5 * 5 <= kv_idx + q_idx)


def diagonal_blocks(batch_idx, head_idx, q_idx, kv_idx):
    return (q_idx // 3 == kv_idx // 3) | (kv_idx == 0)


def structures(length):
    causal, both = hf_masks.causal_mask_function, hf_masks.bidirectional_mask_function
    window, overlay = hf_masks.sliding_window_causal_mask_function, hf_masks.sliding_window_overlay
    chunked = hf_masks.chunked_overlay
    images = hf_masks.blockwise_overlay(left_padded_groups(length))
    chunks = torch.tensor([0, 2])
    keys = torch.arange(length) % 4 != 1
    return {
        "two-sided window": hf_masks.sliding_window_bidirectional_mask_function(2),
        "chunks": hf_masks.chunked_causal_mask_function(4, chunks),
        "two-sided chunks": hf_masks.and_masks(both, chunked(3, chunks)),
        "images": hf_masks.or_masks(causal, images),
        "images in a window": hf_masks.or_masks(window(3), images),
        "images within chunks": hf_masks.and_masks(hf_masks.or_masks(causal, images), chunked(5, chunks)),
        "two windows": hf_masks.and_masks(window(5), overlay(3)),
        "a mask of keys": hf_masks.and_masks(causal, hf_masks.padding_mask_function(keys.expand(2, -1))),
        "mine": mine,
        "mine and a window": hf_masks.and_masks(overlay(4), mine),
        "blocks and a sink": diagonal_blocks,
    }  # fmt: skip


COMPILED = {
    "two-sided window",
    "chunks",
    "two-sided chunks",
    "images",
    "images in a window",
    "images within chunks",
    "two windows",
}


@pytest.mark.parametrize("use_vmap", [False, True], ids=["indexed", "vmap"])
@pytest.mark.parametrize("name", structures(12))
def test_hook_compiles_every_structure(name, use_vmap, monkeypatch):
    evaluated = []
    evaluate = mask_compiler._evaluated
    monkeypatch.setattr(mask_compiler, "_evaluated", lambda *args: evaluated.append(1) or evaluate(*args))
    for q_length, past, kv_offset, spare in [(12, 0, 0, 0), (5, 3, 0, 0), (5, 3, 2, 1), (1, 8, 0, 0), (7, 0, 0, 5)]:
        for q_offset in (past, torch.tensor(past)):
            given = dict(
                batch_size=2,
                q_length=q_length,
                kv_length=past + q_length - kv_offset + spare,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=structures(16)[name],
                attention_mask=torch.arange(past + q_length) >= torch.tensor([[0], [2]]),
                use_vmap=use_vmap,
            )
            columns = mask_hook(**given, config=None)
            expected = hf_masks.sdpa_mask(**given, allow_is_causal_skip=False)
            assert torch.equal(dense_of(columns, q_length).expand_as(expected), expected), (q_length, past)
    assert bool(evaluated) == (name not in COMPILED)


def test_a_long_custom_mask_is_evaluated_in_slices():
    given = dict(batch_size=1, q_length=700, kv_length=700, mask_function=mine)
    assert torch.equal(dense_of(mask_hook(**given), 700), hf_masks.sdpa_mask(**given, allow_is_causal_skip=False))


def test_a_mask_of_three_intervals_says_why_not():
    def combed(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx // 2) % 2 == 0

    message = r"cannot hold the mask of .*combed: a column has 3 separate hidden.*attn_implementation='sdpa'"
    with pytest.raises(MaskNotRepresentable, match=message):
        mask_hook(batch_size=1, q_length=12, kv_length=12, mask_function=combed)


def test_blocks_in_two_pieces_are_refused():
    ids = torch.tensor([[0, 0, -1, 0, 1, 1]])
    function = hf_masks.or_masks(hf_masks.causal_mask_function, hf_masks.blockwise_overlay(ids))
    with pytest.raises(RuntimeError, match=r"tokens of one block .* are not next to each other"):
        mask_hook(batch_size=1, q_length=6, kv_length=6, mask_function=function)


@pytest.mark.parametrize("given", [{"q_length": 4, "q_offset": 2}, {"q_length": 6, "use_vmap": True}], ids=str)
def test_documents_of_a_caller_beside_a_cache_or_in_pieces(given):
    ids = torch.tensor([[0, 0, 1, 1, 0, 0]])
    function = hf_masks.and_masks(hf_masks.causal_mask_function, hf_masks.packed_sequence_mask_function(ids))
    given = given | dict(batch_size=1, kv_length=6, mask_function=function)
    columns = mask_hook(**given)
    assert torch.equal(dense_of(columns, given["q_length"]), hf_masks.sdpa_mask(**given, allow_is_causal_skip=False))


class NeverWait(TorchDispatchMode):
    """Raises where a value would be read back from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
        ), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    packed = hf_masks.and_masks(
        hf_masks.sliding_window_causal_mask_function(2), hf_masks.packed_sequence_mask_function(ids)
    )
    cached = dict(batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(4), attention_mask=torch.ones(2, 5) > 0)
    vectors, edges = masks.causal_document([3, 3]).indices, torch.tensor([0, 3, 6], dtype=torch.int32)
    query = torch.randn(1, 2, 6, 8)
    with pytest.raises(AssertionError), NeverWait():
        bool(ids.any())
    with NeverWait():
        columns = mask_hook(batch_size=1, q_length=6, kv_length=6, mask_function=packed)
        mask_hook(**cached)
        for name in COMPILED:
            mask_hook(batch_size=2, q_length=12, kv_length=12, mask_function=structures(12)[name])
        backend._hook_mask(columns, query, query, edges, None)
        backend._supplied_mask(vectors, columns, True, None, None)
        backend._supplied_mask(vectors, columns, True, 2, None)
        backend._default_mask(query, query, True, dict(sliding_window=3))


def chunked_pair():
    settings = {**SIZES, "eos_token_id": 2, "intermediate_size_mlp": 32, "num_local_experts": 2}
    torch.manual_seed(0)
    config = Llama4TextConfig(**settings, attention_chunk_size=4, no_rope_layers=[1, 0])
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="flashmask").eval()
    ours.load_state_dict(eager.state_dict())
    assert "chunked_attention" in config.layer_types
    return ours, eager


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


def test_a_chunked_layer_refuses_supplied_vectors():
    ours, _ = chunked_pair()
    with pytest.raises(NotImplementedError, match=r"chunked attention need position_ids .* not hand to its layers"):
        ours(tokens(1, 9), startend_row_indices=masks.causal_document([4, 5]).indices, use_cache=False)


# Models against eager attention


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
    """Also where transformers does not look for documents; gpt_oss never does, and its eager attention mixes them."""
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
    """The Triton kernels behind the backend, in float32."""
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
    """transformers detects packing only without a cache; collators for FlashAttention say it twice."""
    ours, eager = model_pair("llama")
    inputs = dict(input_ids=tokens(1, 12), position_ids=positions([5, 7]))
    edges = torch.tensor([0, 5, 12], dtype=torch.int32)
    got = ours(**inputs, use_cache=True, cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=7, max_length_k=7)
    assert_near(got.logits, eager(**inputs, use_cache=False).logits)


@pytest.mark.parametrize("model_name", ["llama", "gemma2", "gpt_oss"])
def test_perturbing_one_document_leaves_the_others_alone(model_name):
    lengths, changed = [60, 90, 45], slice(60, 150)
    ours, _ = model_pair(model_name)
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


# Windows


@pytest.mark.parametrize("window", [14, 22])
def test_a_window_that_no_position_exceeds_hides_nothing(window):
    """Answers of one tree lie further apart in the row than the window, but no token is as deep as it."""
    wide, _ = model_pair("mistral", sliding_window=window)
    question, answers = torch.arange(6), torch.arange(6, 14)
    ids = tokens(1, 22)
    packed = wide(
        ids,
        position_ids=torch.cat([question, answers, answers])[None],
        startend_row_indices=masks.share_question([(6, [8, 8])]).indices,
        use_cache=False,
    ).logits
    alone = wide(torch.cat([ids[:, :6], ids[:, 14:]], 1), use_cache=False).logits
    assert_near(packed[:, 14:], alone[:, 6:])


def test_window_with_padding_at_the_end():
    """Filler sees nothing and its positions may be anything."""
    ours, _ = model_pair("mistral")
    ids = tokens(1, 20)
    mask = masks.causal_document([9, 7], kv_len=20)
    position_ids = torch.cat([positions([9, 7]), torch.zeros(1, 4, dtype=torch.int64)], 1)
    inputs = dict(position_ids=position_ids, startend_row_indices=mask.indices, use_cache=False)
    short = dict(position_ids=positions([9, 7]), use_cache=False)
    assert_near(ours(ids, **inputs).logits[:, :16], ours(ids[:, :16], **short).logits)


def test_window_with_two_column_vectors():
    """Rows 9 to 11 hidden from key 3 touch the rows that the window hides: one interval, and the diagonal."""
    indices = torch.full((1, 1, 16, 2), 16, dtype=torch.int32)
    indices[:, :, 3] = torch.tensor([9, 12], dtype=torch.int32)
    query, module = torch.randn(1, 2, 16, 8), torch.nn.Module()
    given = dict(sliding_window=WINDOW, position_ids=positions([16]))
    got, _ = attention_forward(module, query, query, query, None, startend_row_indices=indices, **given)
    row = torch.arange(16)
    visible = FlashMask(indices, causal=True).to_dense() & (row[:, None] < row + WINDOW)
    scores = (query @ query.transpose(-1, -2) * 8**-0.5).masked_fill(~visible, float("-inf"))
    assert_near(got, (scores.softmax(-1) @ query).transpose(1, 2))


# Plans


@pytest.fixture
def plans(monkeypatch):
    """A list that grows by one whenever a plan is built."""
    built = []
    builder = ops._builder

    def counting(indices):
        def build(*args):
            built.append(tuple(indices.shape))
            return builder(indices)(*args)

        return build

    monkeypatch.setattr(ops, "_builder", counting)
    backend._masks.clear()
    return built


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
        # transformers 5.23 renamed the method
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing == "reentrant"})
    for step in range(1, 4):
        extra = {
            "vectors": lambda: dict(startend_row_indices=masks.causal_document([5, 7]).indices),
            "positions": dict,
            "padding": lambda: dict(attention_mask=torch.ones(1, 12)),
        }[given]()
        out = model(tokens(1, 12), position_ids=positions([5, 7]), use_cache=False, **extra)
        out.logits.sum().backward()
        assert len(plans) == per_step * step


def test_masks_are_dropped_with_their_tensor(plans):
    model, _ = model_pair("gemma2")
    for _ in range(3):
        vectors = masks.causal_document([5, 7]).indices
        model(tokens(1, 12), position_ids=positions([5, 7]), startend_row_indices=vectors, use_cache=False)
        assert len(backend._masks) == 2
    del vectors
    gc.collect()
    assert not backend._masks


def test_masks_kept_are_bounded(plans):
    query = torch.randn(1, 2, 4, 8)
    kept = [masks.causal_document([1, 3]).indices for _ in range(backend._MAX_SHARED + 3)]
    for vectors in kept:
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=vectors)
    assert len(backend._masks) == backend._MAX_SHARED


def test_a_tensor_keeps_one_mask_of_a_form(plans):
    """Not one for each hook's columns and positions that came with it."""
    model, _ = model_pair("gemma2")
    vectors = masks.causal_document([5, 7]).indices
    for step in range(1, 4):
        for extra in ({}, dict(attention_mask=torch.ones(1, 12))):
            inputs = dict(position_ids=positions([5, 7]), startend_row_indices=vectors, use_cache=False)
            model(tokens(1, 12), **inputs, **extra)
            assert len(backend._masks) == 2
        assert len(plans) == 4 * step  # each forward has columns of its own


def test_a_mask_may_be_dropped_at_once(plans, monkeypatch):
    """Other threads fill what is kept."""

    class Full(collections.OrderedDict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            del self[key]

    monkeypatch.setattr(backend, "_masks", Full())
    query, vectors = torch.randn(1, 2, 8, 8).requires_grad_(), masks.causal_document([3, 5]).indices
    for count in (1, 2):
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=vectors)
        assert len(plans) == count


def test_vectors_changed_in_place_are_read_again(plans):
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


@pytest.fixture
def windows(monkeypatch):
    """A list that grows by one whenever a window is laid over a mask."""
    made = []
    windowed = backend.windowed
    monkeypatch.setattr(backend, "windowed", lambda *args, **more: made.append(1) or windowed(*args, **more))
    backend._masks.clear()
    return made


def attend_twice(vectors, other, **more):
    """What attention gives for a buffer of `vectors` and then of `other`, and for `other` in a tensor of its own."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    buffer = vectors.clone()
    results = []
    for given in (buffer, buffer, other.clone()):
        if len(results) == 1:
            buffer.copy_(other)
        results.append(attention_forward(module, query, query, query, None, startend_row_indices=given, **more)[0])
    return results


def test_vectors_changed_in_inference_mode_are_read_again(windows):
    """They do not tell of it; nor do positions."""
    first, second = (masks.causal_document(lengths).indices for lengths in ([8], [3, 5]))
    with torch.inference_mode():
        before, got, want = attend_twice(first, second, sliding_window=3)
        assert torch.equal(got, want)
        assert not torch.equal(got, before)
        query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
        places = torch.arange(8)[None].clone()
        more = dict(startend_row_indices=masks.causal(8).indices, sliding_window=3)
        attention_forward(module, query, query, query, None, position_ids=places, **more)
        places *= 2
        got, want = (
            attention_forward(module, query, query, query, None, position_ids=x, **more)[0]
            for x in (places, places.clone())
        )
        assert torch.equal(got, want)
    assert not backend._masks


def test_layers_in_inference_mode_share_a_mask(windows):
    """Of tensors made there, too: with columns of a hook, which are new in each forward."""
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


def test_each_stream_has_masks_of_its_own(windows, monkeypatch):
    """What is made on one may not be written yet where another reads."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    vectors = masks.causal_document([3, 5]).indices
    for stream, count in ((1, 1), (2, 2), (1, 2), (2, 2)):
        monkeypatch.setattr(backend, "stream_of", lambda x: (0, stream))  # noqa: B023
        attention_forward(module, query, query, query, None, startend_row_indices=vectors, sliding_window=3)
        attention_forward(module, query, query, query, None)
        assert len(windows) == count
        assert len(backend._masks) == 2 * count


def test_a_graph_reads_vectors_anew(windows, monkeypatch):
    """It finds no mask that was made before, and leaves none."""
    query, module = torch.randn(1, 2, 8, 8), torch.nn.Module()
    vectors = masks.causal_document([3, 5]).indices
    for capturing, count in ((False, 1), (True, 2), (True, 3), (False, 3)):
        monkeypatch.setattr(backend, "is_capturing", lambda x: capturing)  # noqa: B023
        attention_forward(module, query, query, query, None, startend_row_indices=vectors, sliding_window=3)
        attention_forward(module, query, query, query, None)
        assert len(windows) == count
        assert len(backend._masks) == 2


def test_alias_finds_the_same_mask(plans):
    """Reentrant checkpointing detaches positional arguments before it recomputes."""
    query, vectors = torch.randn(1, 2, 8, 8).requires_grad_(), masks.causal_document([3, 5]).indices
    for v in (vectors, vectors.detach(), vectors.view_as(vectors)):
        attention_forward(torch.nn.Module(), query, query, query, None, startend_row_indices=v)
    assert len(plans) == 1


def test_evaluation_in_inference_mode_then_training(plans):
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


def test_a_frozen_model_inside_a_transform():
    model, eager = model_pair("llama")
    ids = tokens(2, 9)
    found = [
        torch.func.grad(lambda w: w * one(ids, use_cache=False).logits.detach().sum())(torch.ones(()))  # noqa: B023
        for one in (model, eager)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"torch\.func's"):
        torch.func.grad(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum())(torch.randn(1, 5, 32))


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


@pytest.mark.parametrize("model_name", ["llama", "mistral"])
@pytest.mark.parametrize("given", ["vectors", "positions"])
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
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(ours, fullgraph=True, backend=counting, dynamic=True)
    for lengths in ([11, 3, 6], [9, 16], [4, 8, 2]):
        inputs = dict(input_ids=tokens(1, sum(lengths)), position_ids=positions(lengths), use_cache=False)
        vectors = masks.causal_document(lengths).indices
        assert_near(
            compiled(**inputs, startend_row_indices=vectors).logits, ours(**inputs, startend_row_indices=vectors).logits
        )
    assert len(graphs) == 1


# What raises


def call(module=None, q_len=6, kv_len=6, attention_mask=None, batch=2, **kwargs):
    query, key = torch.randn(batch, 4, q_len, 8), torch.randn(batch, 2, kv_len, 8)
    return attention_forward(module or torch.nn.Module(), query, key, key, attention_mask, **kwargs)


def test_dropout_in_training_is_refused():
    with pytest.raises(ValueError, match=r"dropout=0.1 .*set attention_dropout=0"):
        call(dropout=0.1)
    call(torch.nn.Module().eval(), dropout=0.1)
    model, _ = model_pair("llama", attention_dropout=0.1)
    model(tokens(1, 5))
    with pytest.raises(ValueError, match="attention_dropout=0"):
        model.train()(tokens(1, 5))


@pytest.mark.parametrize("name", sorted(backend._REFUSED))
def test_keyword_that_changes_the_result_is_refused(name):
    with pytest.raises(NotImplementedError, match=rf"^{name} changes the result of attention .*; (pass|use) "):
        call(**{name: torch.zeros(1)})
    call(**{name: None})


def test_unknown_keyword_warns_once():
    plain, _ = call_with_seed()
    with pytest.warns(UserWarning, match="ignores the attention keyword 'temperature'.*use 'eager'"):
        warned, _ = call_with_seed(temperature=2.0)
    call_with_seed(temperature=2.0)  # a second warning would be an error
    assert torch.equal(plain, warned)
    call(temperature=None, num_items_in_batch=3, shift_labels=torch.zeros(2, 6), output_attentions=False)


def call_with_seed(**kwargs):
    torch.manual_seed(3)
    return call(**kwargs)


def test_no_attention_weights():
    assert call()[1] is None
    with pytest.raises(NotImplementedError, match=r"output_attentions=True: .*use attn_implementation='eager'"):
        call(output_attentions=True)


def test_no_attention_weights_of_a_model_that_collects_them():
    """GPT-2 does not hand output_attentions to its layers: hooks keep what they return."""
    config = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()
    with pytest.raises(NotImplementedError, match=r"output_attentions=True: .*use attn_implementation='eager'"):
        model(tokens(1, 6), output_attentions=True)
    assert len(model(tokens(1, 6), output_hidden_states=True).hidden_states) == 3
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert len(compiled(tokens(1, 6), output_hidden_states=True).hidden_states) == 3
        with pytest.raises(torch._dynamo.exc.Unsupported, match="output_attentions=True"):
            compiled(tokens(1, 6), output_attentions=True)


@pytest.mark.parametrize(
    ("attention_mask", "got"),
    [
        (torch.ones(2, 1, 6, 6, dtype=torch.bool), "torch.bool"),
        (torch.zeros(2, 1, 6, 6), "torch.float32"),
        (torch.ones(2, 6, dtype=torch.int64), "torch.int64"),
        (torch.ones(2, 1, 6, 6, dtype=torch.int32), r"\[2, 1, 6, 6\]"),
        ("causal", "str"),
    ],
    ids=["bool", "float", "2D", "int32", "object"],
)
@pytest.mark.parametrize("with_vectors", [False, True])
def test_unknown_attention_mask_is_refused(attention_mask, got, with_vectors):
    vectors = dict(startend_row_indices=masks.causal_document([6]).indices) if with_vectors else {}
    way_out = r"FlashMask.from_dense\(mask\).indices and pass it as startend_row_indices"
    with pytest.raises(ValueError, match=rf"^attention_mask must be .*{got}.*{way_out}"):
        call(attention_mask=attention_mask, **vectors)


def test_dense_attention_mask_of_a_model_is_refused():
    model, _ = model_pair("llama")
    with pytest.raises(ValueError, match=r"attention_mask.*FlashMask.from_dense"):
        model(tokens(1, 6), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (3, 1, 1, 6)], ids=["columns", "batch"])
def test_hook_result_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask has batch .*pass a 2D attention_mask"):
        call(attention_mask=torch.zeros(shape, dtype=torch.int32))


GOOD = masks.causal_document([2, 4]).indices


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        (GOOD.tolist(), TypeError, r"int32 tensor \[B, 1, S, n\], got list; pass mask.indices"),
        (GOOD.long(), TypeError, r"got torch.int64; pass mask.indices"),
        (GOOD[0], ValueError, r"shape \[B, 1, S, n\] with n = 1, 2 or 4, got \[1, 6, 1\]"),
        (GOOD.expand(1, 1, 6, 3), ValueError, r"n = 1, 2 or 4, got \[1, 1, 6, 3\]"),
        (GOOD[:, :, :5], ValueError, r"5 tokens, but this layer has 6 queries and 6 keys; pass one column per token"),
        (GOOD.expand(3, 1, 6, 1), ValueError, r"has batch 3; it must be 1 or the batch 2"),
        (GOOD.expand(2, 3, 6, 1), ValueError, r"has 3 heads; it must have 1, Hkv = 2 or Hq = 4"),
        (GOOD.to("meta"), ValueError, r"is on meta, but the layer runs on cpu; move it"),
    ],
    ids=["list", "dtype", "rank", "n", "columns", "batch", "heads", "device"],
)
def test_bad_vectors_are_refused(vectors, error, message):
    with pytest.raises(error, match=rf"^startend_row_indices .*{message}"):
        call(startend_row_indices=vectors)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_vectors_per_head_and_batch(batch, heads):
    want, _ = call_with_seed(startend_row_indices=GOOD)
    got, _ = call_with_seed(startend_row_indices=GOOD.expand(batch, heads, 6, 1).contiguous())
    assert_near(got, want)


def test_causal_vectors_on_a_layer_that_is_not_causal():
    module = torch.nn.Module()
    module.is_causal = False
    for given in (dict(module=module), dict(is_causal=False)):
        with pytest.raises(ValueError, match=r"startend_row_indices with n = 1 .*is_causal=False.*pass n = 2 or 4"):
            call(startend_row_indices=GOOD, **given)
    call(module, startend_row_indices=GOOD, is_causal=True)  # the keyword wins over the layer


def test_two_columns_follow_the_layer():
    indices = torch.tensor([[2, 4]] * 6, dtype=torch.int32).view(1, 1, 6, 2)
    for causal in (True, False):
        got, _ = call_with_seed(startend_row_indices=indices, is_causal=causal)
        four = FlashMask(indices, causal=causal).bidirectional().indices
        assert_near(got, call_with_seed(startend_row_indices=four, is_causal=not causal)[0])


@pytest.mark.parametrize("mask", [masks.prefix_lm_causal(6, 3), masks.document([2, 4]), masks.full(6)], ids=repr)
def test_two_columns_of_another_form_do_not_pass_for_causal_ones(mask):
    assert mask.indices.shape[-1] == 2
    with pytest.raises(RuntimeError, match=r"n = 2 on a causal layer are LTS, LTE.*mask.bidirectional\(\).indices"):
        call(startend_row_indices=mask.indices, is_causal=True)


def test_vectors_beside_a_cache_are_refused():
    model, _ = model_pair("llama")
    cache = model(tokens(1, 4)).past_key_values
    with pytest.raises(ValueError, match=r"startend_row_indices describe a whole row .*use_cache=False.*generate"):
        model(tokens(1, 6), past_key_values=cache, startend_row_indices=GOOD)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT drops them
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig], ids=["prompt", "prefix"])
def test_prompt_learning_with_packed_rows_is_refused(kind):
    """Virtual tokens are no part of the row that the vectors describe."""
    model = get_peft_model(model_pair("llama")[0], kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"startend_row_indices describe .*prompt learning \(virtual tokens\)"):
        model(input_ids=tokens(1, 6), position_ids=positions, startend_row_indices=GOOD, use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_attention_mask_beside_vectors_still_hides_padding(n, side):
    model, eager = model_pair("llama")
    mask = masks.causal_document([2, 4])
    indices = mask.indices if n == 1 else torch.cat([mask.indices, torch.full_like(mask.indices, 6)], -1)  # LTS, LTE
    indices = mask.bidirectional().indices if n == 4 else indices
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]] if side == "left" else [[1, 1, 1, 1, 1, 0]])
    visible = mask.to_dense() & padding.bool()[:, None, None]
    rows = padding[0].bool()
    ids = tokens(1, 6)
    got = model(ids, attention_mask=padding, startend_row_indices=indices, use_cache=False).logits
    dense = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    want = eager(ids, attention_mask=dense, use_cache=False).logits
    assert_near(got[:, rows], want[:, rows])


def test_vectors_of_an_encoder_decoder_are_refused():
    module = torch.nn.Module()
    module.config = types.SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(NotImplementedError, match=r"startend_row_indices would reach the encoder, the decoder"):
        call(module, startend_row_indices=GOOD)


def test_model_with_attention_of_its_own_is_refused():
    config = BloomConfig(vocab_size=48, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(NotImplementedError, match=r"BloomForCausalLM has attention code of its own .*'eager'"):
        AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config._attn_implementation = "flashmask"  # past the model's own check
    with pytest.raises(NotImplementedError, match=r"BloomModel has attention code of its own .*'eager'"):
        model(tokens(1, 6))


def test_tower_with_attention_of_its_own_is_refused():
    """Its config is in no mapping of models; one column would be added to its scores without an error."""
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
def test_tower_that_this_backend_cannot_follow_is_refused(kind, reason):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="flashmask")
    inputs = dict(input_ids=tokens(1, 6)) if kind == "SiglipText" else dict(input_features=torch.zeros(1, 64, 128))
    mask = torch.ones(next(iter(inputs.values())).shape[:2], dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=rf"{config.model_type}.*{reason}.*'sdpa', or 'eager'"):
        model(**inputs, attention_mask=mask)


def test_vectors_do_not_reach_an_image_tower():
    """Where it has as many patches as the row has tokens, they would fit."""
    tower = torch.nn.Module()
    tower.config, tower.is_causal = types.SimpleNamespace(), False
    with pytest.raises(NotImplementedError, match=r"startend_row_indices .* image tower.*'vision_config': 'sdpa'"):
        call(tower, startend_row_indices=FlashMask(GOOD, causal=True).bidirectional().indices)


def test_positions_of_a_model_that_places_tokens_otherwise():
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


def test_vectors_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"indices must lie in 0..q_len = 0..6"):
        call(startend_row_indices=GOOD + 100)


def test_layer_without_a_hook():
    """Encoders and standalone layers call with attention_mask=None."""
    for causal, window, visible in (
        (True, None, masks.causal(6, q_len=4)),
        (True, 2, masks.sliding_window(6, 2, q_len=4)),
        (False, None, masks.full(6, q_len=4)),
    ):
        given = dict(q_len=4, is_causal=causal, sliding_window=window)
        torch.manual_seed(3)
        query, key = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 6, 8)
        want = flashmask_hf.flashmask_attention(query, key, key, visible)
        assert torch.equal(call_with_seed(**given)[0], want.transpose(1, 2))


def test_window_on_a_layer_that_is_not_causal_is_refused():
    with pytest.raises(NotImplementedError, match=r"sliding_window=2 .*not causal.*use attn_implementation='sdpa'"):
        call(is_causal=False, sliding_window=2)


def test_window_with_positions_of_several_axes_is_refused():
    with pytest.raises(NotImplementedError, match=r"needs position_ids \[B, S\], got \[3, 1, 6\]; use"):
        call(sliding_window=2, startend_row_indices=GOOD, position_ids=torch.zeros(3, 1, 6))


def test_cu_seq_lens_that_cannot_be_honoured_are_refused():
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q .*without a mask; use"):
        call(cu_seq_lens_q=edges)
    with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q .*one causal row.*flatten the batch"):
        call(cu_seq_lens_q=edges, attention_mask=mask_hook(batch_size=2, q_length=6, kv_length=6))
