"""The checks that transformers runs on every attention implementation in its tests of models, run on "flashmask".

They follow `tests/test_modeling_common.py` and `tests/generation/test_utils.py` of transformers.
"""

import copy
from functools import cache

import pytest
import torch
from tools.model_zoo import BOUND, LENGTH, VOCABULARY, build
from transformers import (
    AutoModel,
    DataCollatorWithFlattening,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from flashmask_hf import masks

DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_neox",
    "gpt_oss",
    "deepseek_v3",
)
ENCODERS = ("modernbert", "bert")
PAD = 3  # tokens of padding in the last row

# The method was renamed in transformers 5.23, where the old name warns.
CHECKPOINTING = next(
    f"{name}_checkpointing_enable"
    for name in ("activation", "gradient")
    if hasattr(PreTrainedModel, f"{name}_checkpointing_enable")
)

decoders = pytest.mark.parametrize("family", DECODERS)
texts = pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
families = pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, "vit"])

pytestmark = [
    # Models hand all keywords of a call on to their layers.
    pytest.mark.filterwarnings("ignore:attn_implementation='flashmask' ignores the attention keyword:UserWarning"),
]


@cache
def model(family, attention="flashmask"):
    """Return a tiny model, with the same weights for every attention. It is shared, so tests must not change it."""
    return build(family, attention)


def tokens(batch, length=LENGTH):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, VOCABULARY - 12, (batch, length), generator=generator)


def padded(side, batch=3):
    """Return a 2D mask that hides `PAD` tokens of the last row."""
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    if side == "left":
        mask[-1, :PAD] = 0
    elif side == "right":
        mask[-1, LENGTH - PAD :] = 0
    return mask


def inputs(family, side=None, dtype=torch.float32):
    """Return rows of tokens, or images, with a mask that pads a `side` ("no": a mask of ones; None: no mask)."""
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)}
    return {"input_ids": tokens(3)} | ({} if side is None else {"attention_mask": padded(side)})


def last_hidden(model, given, **kwargs):
    """Return the hidden states of the last layer at real tokens."""
    with torch.no_grad():
        hidden = model(**given, output_hidden_states=True, **kwargs).hidden_states[-1]
    return hidden[given["attention_mask"].bool()] if "attention_mask" in given else hidden


def error(got, want):
    """Return the largest error relative to the largest wanted entry, or to 1."""
    return (got.float() - want.float()).abs().max().item() / max(1.0, want.float().abs().max().item())


def assert_near(got, want):
    assert got.shape == want.shape
    assert error(got, want) <= BOUND


def generate(model, ids, new=4, **kwargs):
    """Return the tokens and the logits that led to them."""
    given = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False) | kwargs
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **given)
    return out.sequences, torch.stack(out.logits, 1)


# Inference


@pytest.mark.parametrize("side", [None, "no", "left", "right"])
@texts
def test_inference_matches_eager(family, side):
    given = inputs(family, side)
    assert_near(last_hidden(model(family), given), last_hidden(model(family, "eager"), given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@families
def test_inference_in_low_precision_is_as_good_as_eager(family, dtype):
    every = 4  # experts for every token: routing to some is not continuous
    ours, eager = (copy.deepcopy(model(family, attention)) for attention in ("flashmask", "eager"))
    for module in (*ours.modules(), *eager.modules()):
        if hasattr(module, "top_k"):
            module.top_k = every
    side = None if family == "vit" else "left"
    exact = last_hidden(eager, inputs(family, side))
    given = inputs(family, side, dtype)
    got, want = (last_hidden(one.to(dtype), given) for one in (ours, eager))
    assert got.dtype == dtype
    assert error(got, exact) <= 2 * error(want, exact) + torch.finfo(dtype).eps


def test_inference_on_images_matches_eager():
    assert_near(last_hidden(model("vit"), inputs("vit")), last_hidden(model("vit", "eager"), inputs("vit")))


@texts
def test_a_row_does_not_depend_on_the_others(family):
    given = inputs(family, "left")
    together = last_hidden(model(family), given).split(given["attention_mask"].sum(-1).tolist())
    for row, want in enumerate(together):
        assert_near(last_hidden(model(family), {name: x[row : row + 1] for name, x in given.items()}), want)


@texts
def test_a_row_of_nothing_but_padding_stays_finite(family):
    given = inputs(family, "no")
    given["attention_mask"][1] = 0
    ours = copy.deepcopy(model(family)).train()
    out = ours(**given).logits
    assert out.isfinite().all()
    with torch.no_grad():
        want = model(family, "eager")(**given).logits
    assert_near(out[[0, 2]].detach(), want[[0, 2]])
    out[[0, 2]].sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


@families
def test_output_attentions_is_refused(family):
    with pytest.raises(NotImplementedError, match=r"output_attentions=True: .*'eager'"), torch.no_grad():
        model(family)(**inputs(family), output_attentions=True)


@families
def test_gradient_checkpointing_changes_no_gradient(family):
    given = inputs(family, None if family == "vit" else "right")
    gradients = []
    for checkpointing in (False, True):
        ours = copy.deepcopy(model(family)).train()
        if checkpointing:
            getattr(ours, CHECKPOINTING)({"use_reentrant": False})
        out = ours(**given)
        (out.logits if "logits" in out else out.last_hidden_state).square().mean().backward()
        gradients.append({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert_near(checkpointed[name], plain[name])


# Rows without padding


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("flash_kwargs", [False, True], ids=["positions", "cu_seq_lens"])
@decoders
def test_flattened_rows_match_padded_ones(family, flash_kwargs, use_cache):
    lengths = [LENGTH, 5, 8]
    ids = tokens(3)
    mask = (torch.arange(LENGTH) >= LENGTH - torch.tensor(lengths)[:, None]).long()
    rows = [{"input_ids": row[real.bool()].tolist()} for row, real in zip(ids, mask, strict=True)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_kwargs, return_tensors="pt")(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = positions == 0
    labels = ids.masked_fill(first, -100)
    with torch.no_grad():
        got = model(family)(**flat, use_cache=use_cache)
        want = model(family)(ids, attention_mask=mask, position_ids=positions, labels=labels, use_cache=use_cache)
    assert_near(got.logits[0], want.logits[mask.bool()])
    assert_near(got.loss, want.loss)


@decoders
def test_a_shared_prefix_of_one_row_matches_separate_rows(family):
    """Vectors do what a 4D mask does in the test of transformers."""
    ids = tokens(3, 4)
    ids[:, :3] = ids[0, :3]
    row = torch.cat([ids[:1, :3], ids[:, 3].view(1, 3)], -1)
    positions = torch.tensor([[0, 1, 2, 3, 3, 3]])
    vectors = masks.share_question([(3, [1, 1, 1])]).indices
    with torch.no_grad():
        want = model(family, "eager")(ids).logits
        got = model(family)(row, position_ids=positions, startend_row_indices=vectors, use_cache=False).logits
        assert_near(got[0, :3], want[0, :3])
        assert_near(got[0, 3:], want[:, 3])
        dense = torch.zeros(1, 1, 6, 6)
        with pytest.raises(ValueError, match="from_dense"):
            model(family)(row, position_ids=positions, attention_mask=dense)


# Setting and keeping the implementation


@families
def test_the_implementation_reaches_every_module(family, tmp_path):
    given = inputs(family)
    ours, eager = model(family), model(family, "eager")
    want = last_hidden(eager, given)
    ours.save_pretrained(tmp_path)
    kind = type(ours)
    assert kind.from_pretrained(tmp_path).config._attn_implementation != "flashmask"  # it is not saved
    loaded = kind.from_pretrained(tmp_path, attn_implementation="flashmask")
    switched = kind.from_pretrained(tmp_path, attn_implementation="eager")
    switched.set_attn_implementation("flashmask")
    for one in (ours, loaded, switched):
        modules = [module for module in one.modules() if hasattr(module, "config")]
        assert len(modules) > 2
        assert {module.config._attn_implementation for module in modules} == {"flashmask"}
        assert_near(last_hidden(one.eval(), given), want)
    switched.set_attn_implementation("eager")
    assert torch.equal(last_hidden(switched, given), want)


def test_the_implementation_reaches_parts_of_composite_models(tmp_path):
    text = model("llama").config.to_dict() | {"vocab_size": VOCABULARY}
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=40, vision_feature_layer=-1)
    torch.manual_seed(0)
    eager = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    eager.save_pretrained(tmp_path)
    image = torch.full((1, 4), 40)
    given = {
        "input_ids": torch.cat([tokens(1, 2), image, tokens(1, 5)], -1),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }
    want = last_hidden(eager, given)
    for asked, told in (
        ("flashmask", ("flashmask", "flashmask")),
        ({"text_config": "flashmask", "vision_config": "eager"}, ("flashmask", "eager")),
        ({"text_config": "eager", "vision_config": "flashmask"}, ("eager", "flashmask")),
    ):
        loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=asked)
        changed = copy.deepcopy(eager)
        changed.set_attn_implementation(asked)
        for one in (loaded, changed):
            parts = (one.model.language_model, one.model.vision_tower)
            assert tuple(part.config._attn_implementation for part in parts) == told
            assert_near(last_hidden(one.eval(), given), want)


def test_another_head_on_the_same_weights(tmp_path):
    model("llama").save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, attn_implementation="flashmask")
    given = inputs("llama", "left")
    with torch.no_grad():
        got = base(**given).last_hidden_state[given["attention_mask"].bool()]
    assert_near(got, last_hidden(model("llama"), given))


# Compilation


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "gemma2", "modernbert")), "vit"]
)
def test_compiles_for_any_length_without_a_graph_break(family):
    torch.compiler.reset()
    ours = copy.deepcopy(model(family))
    compiled = torch.compile(ours, backend="eager", dynamic=True, fullgraph=True)
    for length in (LENGTH, LENGTH + 5):
        given = inputs(family) if family == "vit" else {"input_ids": tokens(2, length)}
        with torch.no_grad():
            got, want = (one(**given) for one in (compiled, model(family)))
        name = "logits" if "logits" in want else "last_hidden_state"
        assert_near(got[name], want[name])


# Generation


@decoders
def test_left_padding_changes_no_token(family):
    ids, mask = tokens(3), padded("left")
    got, logits = generate(model(family), ids, attention_mask=mask)
    alone, want = generate(model(family), ids[-1:, PAD:])
    assert_near(logits[-1:], want)
    assert torch.equal(got[-1:, LENGTH:], alone[:, LENGTH - PAD :])


@decoders
def test_prefill_in_chunks_changes_no_token(family):
    ids, mask = tokens(3), padded("left")
    got, logits = generate(model(family), ids, attention_mask=mask, prefill_chunk_size=5)
    want, eager = generate(model(family, "eager"), ids, attention_mask=mask)
    assert_near(logits, eager)
    assert torch.equal(got, want)


@decoders
def test_generation_goes_on_from_position_ids_and_a_cache(family):
    ids = tokens(2)
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        prompt = model(family)(ids, position_ids=positions, use_cache=True)
        follow = prompt.logits[:, -1:].argmax(-1)
        after = torch.full((2, 1), LENGTH)
        step = model(family)(follow, past_key_values=prompt.past_key_values, position_ids=after, use_cache=True)
    for attention in ("flashmask", "eager"):
        got, logits = generate(model(family, attention), ids, new=2)
        assert torch.equal(got[:, LENGTH:-1], follow)
        assert_near(logits[:, -1:], step.logits)


@decoders
def test_generation_goes_on_from_a_cache(family):
    ids = tokens(2)
    whole, _ = generate(model(family), ids)
    half = model(family).generate(
        ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, return_dict_in_generate=True
    )
    rest, _ = generate(model(family), half.sequences, new=2, past_key_values=half.past_key_values)
    assert torch.equal(rest, whole)


@pytest.mark.parametrize(
    "how",
    [
        dict(cache_implementation="static"),
        dict(do_sample=True),
        dict(num_beams=2),
        dict(prompt_lookup_num_tokens=2),
        dict(use_cache=False),
    ],
    ids=["static cache", "sampling", "beam search", "assisted", "no cache"],
)
@decoders
def test_tokens_are_those_of_eager(family, how):
    ids = tokens(1) if "prompt_lookup_num_tokens" in how else tokens(3)
    if len(ids) > 1:
        how = how | {"attention_mask": padded("left")}
    got = []
    for attention in ("flashmask", "eager"):
        torch.manual_seed(0)
        got.append(
            model(family, attention).generate(ids, max_new_tokens=6, min_new_tokens=6, **{"do_sample": False} | how)
        )
    assert torch.equal(*got)
