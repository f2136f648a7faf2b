"""Shared prefills: the samples are those without sharing, and every distinct prompt is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tools import model_zoo
from tools.model_pairs import GENERATING, assert_near
from tools.vision import document, tiny_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

import flashmask_hf  # noqa: F401  # registers "flashmask"
from flashmask_hf.hf.packed.shared_prefill import shared_prefill

LENGTH = 9
NEW = 8
ROWS = [0, 1, 0, 2, 1, 0, 2, 2]
"""The prompt of each row of the batch: groups are not contiguous."""

FAMILIES = {
    "llama": lambda: LlamaConfig(**GENERATING),
    "mistral": lambda: MistralConfig(**GENERATING, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**GENERATING, sliding_window=5, attn_logit_softcapping=2.0),
    "qwen3_moe": lambda: Qwen3MoeConfig(**GENERATING, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt_oss": lambda: GptOssConfig(**GENERATING, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
}


def build(family: str = "llama", attention: str = "flashmask", **changes: Any) -> Any:
    """Return a random model, large enough in its weights that samples depend on the whole prompt."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch(padding: str = "left", rows: list[int] = ROWS) -> dict[str, Tensor]:
    """Return a batch that repeats three prompts, of different lengths with padding before them or of the same."""
    ids = torch.randint(3, GENERATING["vocab_size"], (3, LENGTH))
    real = torch.arange(LENGTH) >= torch.tensor([[4], [2], [0]])
    if padding == "none":
        real = torch.ones_like(real)
    return dict(input_ids=(ids * real)[rows], attention_mask=real.to(torch.int64)[rows])


def generate(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    """Return what `generate` returns after NEW tokens, from the same random state each time."""
    torch.manual_seed(1)
    lengths = dict(max_new_tokens=NEW, min_new_tokens=NEW, disable_compile=True)
    return model.generate(**inputs, **lengths | {"do_sample": False} | settings)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Collect the number of tokens of every forward."""
    tokens: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, __: tokens.append(args[0].numel()))
    yield tokens
    hook.remove()


def compare(model: Any, inputs: dict[str, Any], prefilled: int, **settings: Any) -> None:
    """Compare the tokens with those without sharing, and the tokens of the first forward with the number expected."""
    want = generate(model, inputs, **settings)
    with counted(model) as tokens, shared_prefill(model):
        got = generate(model, inputs, **settings)
    assert torch.equal(got, want)
    assert tokens[0] == prefilled
    module = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, attention) for family in FAMILIES for attention in ("flashmask", "eager")] + [("mistral", "sdpa")],
)
def test_samples(family: str, attention: str, padding: str) -> None:
    model, inputs = build(family, attention), batch(padding)
    compare(model, inputs, prefilled=3 * LENGTH)
    compare(model, inputs, prefilled=3 * LENGTH, do_sample=True, temperature=0.7, top_p=0.9)


def test_what_generate_returns() -> None:
    """Logits, hidden states, attention weights and the cache have a row for each of the batch."""
    model, inputs = build(attention="eager"), batch()
    ask: dict[str, Any] = dict.fromkeys(
        ("return_dict_in_generate", "output_logits", "output_hidden_states", "output_attentions"), True
    )
    want = generate(model, inputs, do_sample=True, **ask)
    with shared_prefill(model):
        got = generate(model, inputs, do_sample=True, **ask)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("logits", "hidden_states", "attentions"):
        for one, other in zip(tree_leaves(got[name]), tree_leaves(want[name]), strict=True):
            assert_near(one, other, name)
    for layer, other in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert_near(layer.keys, other.keys)


@pytest.mark.parametrize(
    ("settings", "rows", "prefilled"),
    [
        (dict(num_beams=2), ROWS, 3 * LENGTH),
        (dict(num_return_sequences=4, do_sample=True), [0, 1, 2], 3 * LENGTH),
        (dict(prefill_chunk_size=4), ROWS, 3 * 4),
        (dict(cache_implementation="static"), ROWS, len(ROWS) * LENGTH),
        (dict(use_cache=False), ROWS, len(ROWS) * LENGTH),
        ({}, [0, 1, 2], 3 * LENGTH),
        ({}, [0], LENGTH),
    ],
    ids=["beams", "return sequences", "chunks", "static", "no cache", "no repeats", "one row"],
)
def test_ways_of_generating(settings: dict[str, Any], rows: list[int], prefilled: int) -> None:
    compare(build("mistral"), batch(rows=rows), prefilled, **settings)


def test_rows_that_differ_in_their_mask_alone() -> None:
    """The tokens are the same, but padding hides one of them in the second row."""
    inputs = batch("none", rows=[0, 0, 0])
    inputs["attention_mask"][1, 0] = 0
    compare(build(), inputs, prefilled=2 * LENGTH)


def test_a_batch_without_repeats_is_passed_on_as_it_is() -> None:
    model, inputs = build(), batch(rows=[0, 1, 2])
    seen: list[Any] = []
    with shared_prefill(model):
        model.model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
        ids = inputs["input_ids"]
        model(input_ids=ids, past_key_values=DynamicCache(config=model.config), return_dict=True)
        model(ids[[0, 0]])
        model(input_ids=ids[[0, 0]])
    assert seen[0]["input_ids"] is ids
    assert [len(call["input_ids"]) for call in seen] == [3, 2, 2]


@pytest.mark.parametrize(
    ("given", "prefilled"),
    [
        ({}, 1),
        (dict(past_key_values=DynamicCache()), 1),  # which has no layers before the first forward
        (dict(position_ids=torch.arange(LENGTH)[None]), 1),
        (dict(attention_mask=torch.zeros(2, 1, LENGTH, LENGTH)), 2),
        (dict(token_type_ids=torch.zeros(2, LENGTH)), 2),
        (dict(return_dict=False), 2),
    ],
    ids=["config", "lazy cache", "one row of positions", "4D mask", "another input", "tuple"],
)
def test_calls_of_the_model(given: dict[str, Any], prefilled: int) -> None:
    """Two rows of one prompt, in the arguments that `generate` passes or others."""
    model, ids = build(attention="eager"), batch("none", rows=[0, 0])["input_ids"]
    cache = DynamicCache(config=model.config)
    with counted(model) as tokens, shared_prefill(model), torch.no_grad():
        got = model(**dict(input_ids=ids, past_key_values=cache, return_dict=True) | given)[0]
    assert tokens == [prefilled * LENGTH]
    mask = {name: given[name] for name in given if name == "attention_mask"}
    assert_near(got, model(ids, use_cache=False, **mask).logits)


def test_a_cache_that_holds_tokens() -> None:
    """The rows are equal in what is left to compute, but continue different beginnings."""
    model = build()
    beginnings, rest = batch("none", rows=[0, 1, 2])["input_ids"], torch.randint(3, 48, (1, 4)).repeat(3, 1)
    ids = torch.cat([beginnings, rest], dim=1)
    want = generate(model, dict(input_ids=ids))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=beginnings, past_key_values=cache)
    with shared_prefill(model):
        assert torch.equal(generate(model, dict(input_ids=ids, past_key_values=cache)), want)


def test_a_failed_prefill_leaves_no_trace() -> None:
    model, inputs = build(), batch()
    want = generate(model, inputs)

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped")

    with shared_prefill(model):
        hook = model.lm_head.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="stopped"):
            generate(model, inputs)
        hook.remove()
        assert torch.equal(generate(model, inputs), want)
        assert len(model(input_ids=inputs["input_ids"], return_dict=True).logits) == len(ROWS)


def test_nested() -> None:
    model = build()
    with shared_prefill(model):
        outer = len(model._forward_hooks)
        with counted(model) as tokens, shared_prefill(model):
            got = generate(model, batch("none", rows=[0, 0]))
        assert len(model._forward_hooks) == outer
    assert tokens[0] == LENGTH
    assert torch.equal(got[0], got[1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_peft(family: str) -> None:
    model = get_peft_model(build(family), LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    compare(model, batch(), prefilled=3 * LENGTH, do_sample=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_prompt_tuning_and_activated_lora() -> None:
    """Virtual tokens come as embeddings, and activated LoRA looks for its tokens in each row of the batch."""
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    activated = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5], init_lora_weights=False)
    for config in (tuning, activated):
        model, inputs = get_peft_model(build(), config).eval(), batch("none")
        want = generate(model, inputs)
        with shared_prefill(model):
            assert torch.equal(generate(model, inputs), want)


def test_wrapped_models() -> None:
    class Wrapper(nn.DataParallel):  # as DistributedDataParallel, without a process group
        pass

    model, inputs = build(), batch()
    for wrapped in (Wrapper(model), torch.compile(model)):  # `generate` calls the model within
        with counted(model) as tokens, shared_prefill(wrapped):
            generate(model, inputs)
        assert tokens[0] == 3 * LENGTH


@pytest.mark.parametrize(
    ("family", "prefilled"),
    [
        ("lfm2", 3 * LENGTH),
        ("qwen3_next", 3 * LENGTH),
        ("jamba", 3 * LENGTH),
        ("gemma4", 3 * LENGTH),
        ("mamba2", len(ROWS) * LENGTH),
        ("recurrent_gemma", len(ROWS) * LENGTH),
        ("openai-gpt", len(ROWS) * LENGTH),
    ],
)
def test_other_architectures(family: str, prefilled: int) -> None:
    """Recurrent and convolutional states in the cache are repeated; other models are left alone."""
    compare(model_zoo.build(family, "eager"), batch(), prefilled, do_sample=True)


def test_encoder_decoder() -> None:
    model, inputs = model_zoo.build("t5", "eager"), batch()
    want = generate(model, inputs)
    with shared_prefill(model):
        assert not model._forward_hooks
        assert torch.equal(generate(model, inputs), want)


@pytest.mark.parametrize(
    "draws", [dict(attention_dropout=0.1), dict(router_jitter_noise=0.1), "module", "noise"], ids=str
)
def test_models_that_draw_random_numbers(draws: Any) -> None:
    """In training mode every row has dropout of its own; in evaluation there is none."""
    changes = draws if isinstance(draws, dict) else {}
    model = build("llama", "eager", **changes)
    if draws == "module":
        model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.5))
    elif draws == "noise":
        model.get_input_embeddings().neftune_noise_alpha = 5
    elif "router_jitter_noise" in draws:
        model.model.layers[0].mlp.router_jitter_noise = 0.1
    compare(model.eval(), batch(), prefilled=3 * LENGTH, do_sample=True)
    compare(model.train(), batch(), prefilled=len(ROWS) * LENGTH, do_sample=True)


def test_training_mode_without_dropout() -> None:
    model = build().train()
    model.model.layers[0].mlp.router_jitter_noise = None  # as a config may set it
    compare(model, batch(), prefilled=3 * LENGTH, do_sample=True)


def test_compiled_model() -> None:
    """A compiled forward is left as it is: one graph, in which rows cannot be compared."""
    model, inputs, few = build(num_hidden_layers=1), batch(), {"max_new_tokens": 2, "min_new_tokens": 2}
    want = generate(model, inputs, **few)
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=True)
    with shared_prefill(model):
        assert torch.equal(generate(model, inputs, **few), want)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "kind", ["llava", *(pytest.param(x, marks=pytest.mark.full) for x in ("qwen2_5_vl", "gemma3"))]
)
def test_prompts_with_images_are_prefilled_as_they_are(kind: str) -> None:
    model = tiny_model(kind, {"text_config": "flashmask", "vision_config": "sdpa"}).eval()
    own = document(kind, [(1, 2)], 3)
    own.pop("labels")
    inputs = {name: torch.cat([x, x]) for name, x in own.items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    compare(model, inputs, prefilled=inputs["input_ids"].numel(), do_sample=True)
