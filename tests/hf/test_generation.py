"""Generation: tokens equal those of eager attention, for every way of decoding, every cache and every kind of mask."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tools.model_pairs import GENERATING
from tools.support import covering
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
    StaticCache,
)
from transformers.masking_utils import create_chunked_causal_mask

import flashmask_hf  # noqa: F401  # registers "flashmask"

pytestmark = pytest.mark.usefixtures("no_compiled_code")

WINDOW = 6
PROMPT = 9
NEW = 10
LATENT: dict[str, Any] = GENERATING | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8
)
FAMILIES = {
    "llama": lambda: LlamaConfig(**GENERATING),
    "mistral": lambda: MistralConfig(**GENERATING, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**GENERATING, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: Gemma3TextConfig(
        **GENERATING, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: GptOssConfig(**GENERATING, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
    "qwen3_moe": lambda: Qwen3MoeConfig(**GENERATING, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    "deepseek_v3": lambda: DeepseekV3Config(
        **LATENT,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "llama4_text": lambda: Llama4TextConfig(
        **GENERATING,
        intermediate_size_mlp=32,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
    ),
}
"""No window, windows, a softcap, both kinds of layers, sinks, experts, values narrower than keys, chunks."""

# In versions without this argument generate cannot make the masks of chunks beside a static cache.
NO_STATIC_CHUNKS = "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters
# Before, offloaded caches fetch layers into memory that may still be read: tokens are wrong at times, as with "eager".
WAITS_FOR_READERS = Version(transformers.__version__) >= Version("5.20")


def pair(family: str) -> list[Any]:
    """Return the same random model with "flashmask" and with "eager" attention."""
    models = [
        AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation=attention).eval()
        for attention in ("flashmask", "eager")
    ]
    for name, parameter in models[1].named_parameters():  # large enough that attention is far from uniform
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    models[0].load_state_dict(models[1].state_dict())
    return models


def prompts(padding: str, batch: int = 3) -> dict[str, torch.Tensor]:
    """Return prompts of one length, or of different lengths with padding before them."""
    ids = torch.randint(3, GENERATING["vocab_size"], (batch, PROMPT))
    real = torch.arange(PROMPT) >= torch.tensor([[4], [2], [0]])[:batch]
    if padding == "none":
        real = torch.ones_like(real)
    return dict(input_ids=ids * real, attention_mask=real.to(torch.int64))


def generate(model: Any, inputs: dict[str, Any], **settings: Any) -> torch.Tensor:
    """Return the prompts and NEW tokens after them, greedily unless told otherwise."""
    torch.manual_seed(1)
    settings = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, disable_compile=True) | settings
    tokens = model.generate(**inputs, **settings)
    assert tokens.shape[1] == inputs["input_ids"].shape[1] + NEW
    return tokens


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family: str, padding: str) -> None:
    """Prompts and answers are longer than a window and end within another chunk."""
    ours, eager = pair(family)
    inputs = prompts(padding)
    want = generate(eager, inputs)
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"prefill_chunk_size": 4}]
    if family != "llama4_text" or not NO_STATIC_CHUNKS:
        ways.append({"cache_implementation": "static"})
    for settings in ways:
        assert torch.equal(generate(ours, inputs, **settings), want), settings


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * (family != "gpt_oss"))
        for family in FAMILIES
        if family != "llama4_text"
    ],
)
def test_greedy_compiled(family: str) -> None:
    """`generate` compiles every step after the first, except for Llama 4."""
    ours, eager = pair(family)
    inputs, graphs = prompts("left"), CompileCounter()
    settings = dict(backend=lambda *graph: graphs(*graph), mode=None)  # `generate` copies the settings
    assert torch.equal(compiled(ours, inputs, **settings), generate(eager, inputs))
    assert graphs.frame_count in (1, 2)  # a static cache of a window runs other code once it is full


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4_text"])
def test_greedy_compiled_with_its_mask(family: str) -> None:
    """A step that makes its own mask from a 2D mask and a static cache is one graph; `generate` makes it outside."""
    ours, eager = pair(family)
    inputs, graphs = prompts("left"), CompileCounter()
    step = torch.compile(ours, fullgraph=True, backend=graphs)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = StaticCache(ours.config, max_cache_len=PROMPT + NEW)
    tokens = inputs["input_ids"]
    with torch.no_grad():
        for first, last in zip([0, *range(PROMPT, PROMPT + NEW)], range(PROMPT, PROMPT + NEW), strict=False):
            call = ours if first == 0 else step
            seen = mask[:, :last] if first == 0 else mask
            given = dict(attention_mask=seen, position_ids=positions[:, first:last], past_key_values=cache)
            logits = call(tokens[:, first:last], **given).logits[:, -1].clone()
            logits[:, GENERATING["eos_token_id"]] = float("-inf")
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(tokens, generate(eager, inputs))
    assert graphs.frame_count in (1, 2)


def compiled(model: Any, inputs: dict[str, Any], **settings: Any) -> torch.Tensor:
    """Return the tokens of a model whose steps `generate` compiles, with a static cache."""
    config = CompileConfig(fullgraph=True, **settings)
    config._compile_all_devices = True  # type: ignore[assignment]
    return generate(model, inputs, cache_implementation="static", compile_config=config, disable_compile=False)


DECODING: dict[str, dict[str, Any]] = {
    "sampling": dict(do_sample=True, top_k=10),
    "several samples": dict(do_sample=True, num_return_sequences=2),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "beams sampled": dict(num_beams=3, do_sample=True),
    "guided": dict(guidance_scale=2.0),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "assisted": {},
    "assisted sampling": dict(do_sample=True),
}
SINGLE = ("prompt lookup", "assisted", "assisted sampling")  # transformers takes one prompt at a time for these


@pytest.mark.parametrize(
    ("decoding", "family", "padding"),
    covering(2, [*DECODING], ["llama", "gemma3_text", "llama4_text"], ["none", "left"]),
)
def test_decoding(decoding: str, family: str, padding: str) -> None:
    models, drafts = pair(family), pair(family)
    if decoding.startswith("assisted"):  # by a draft model that is often, but not always, right
        for model, draft in zip(models, drafts, strict=True):
            draft.load_state_dict(model.state_dict())
            torch.manual_seed(2)
            for parameter in draft.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
    inputs = prompts(padding, batch=1 if decoding in SINGLE else 3)
    tokens = []
    for model, draft in zip(models[::-1], drafts[::-1], strict=True):  # eager attention first
        extra = dict(assistant_model=draft) if "assisted" in decoding else {}
        try:
            tokens.append(generate(model, inputs, **DECODING[decoding], **extra))
        except RuntimeError as error:
            if tokens or "assisted" not in decoding:
                raise
            pytest.skip(f"cpu lane: this transformers cannot do it with eager attention either: {error}")
    assert torch.equal(*tokens)


def test_assisted_by_the_first_layer() -> None:
    ours, eager = pair("llama")
    inputs = prompts("left", batch=1)
    assert torch.equal(*(generate(model, inputs, assistant_early_exit=1) for model in (ours, eager)))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_answer_from_the_cache(family: str, kind: str) -> None:
    """It equals the answer to the whole conversation with an empty cache."""
    if family == "llama4_text" and kind == "static" and NO_STATIC_CHUNKS:
        pytest.skip("cpu lane: this transformers cannot do it with any attention")
    inputs, question = prompts("left", batch=2), torch.randint(3, GENERATING["vocab_size"], (2, 5))
    answers = []
    for model in pair(family):
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=40)
        answer = generate(model, inputs, past_key_values=cache)
        whole = torch.cat([answer, question], 1)
        seen = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW + 5), value=1)
        both = dict(input_ids=whole, attention_mask=seen)
        assert cache.get_seq_length() == PROMPT + NEW - 1
        answers += [generate(model, both, past_key_values=cache), generate(model, both)]
    for answer in answers[:3]:
        assert torch.equal(answer, answers[3])


@pytest.mark.parametrize("family", ["llama", "mistral", "llama4_text"])
def test_padding_changes_no_token(family: str) -> None:
    """A prompt gets the same answer alone as beside longer ones."""
    ours, _ = pair(family)
    inputs = prompts("left")
    together = generate(ours, inputs)
    for row, real in enumerate(inputs["attention_mask"].bool()):
        ids = inputs["input_ids"][row, real][None]
        alone = generate(ours, dict(input_ids=ids, attention_mask=torch.ones_like(ids)))
        assert torch.equal(alone[0, -NEW:], together[row, -NEW:])


def test_continuous_batching_is_refused() -> None:
    ours, _ = pair("llama")
    with pytest.raises(ValueError, match=r"flashmask.* is not supported"):
        ours.generate_batch(inputs=[[3, 4, 5], [6, 7]])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_on_the_gpu(family: str) -> None:
    """The Triton kernels give the same tokens in float32, where no two are equally likely."""
    ours, eager = (model.cuda() for model in pair(family))
    inputs = {name: x.cuda() for name, x in prompts("left").items()}
    want = generate(eager, inputs)
    for cache in ("dynamic", "static", "offloaded", "offloaded_static"):
        if family == "llama4_text" and "static" in cache and NO_STATIC_CHUNKS:
            continue
        if "offloaded" in cache and (family == "mistral" or not WAITS_FOR_READERS):
            continue  # transformers offloads only layers without a window, and mistral has none
        assert torch.equal(generate(ours, inputs, cache_implementation=cache), want), cache


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # inductor advises them
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # as inductor's first one is
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_greedy_compiled_on_the_gpu(family: str, dtype: torch.dtype) -> None:
    """`generate` compiles with inductor and CUDA graphs by default; in bfloat16 tokens are near the best."""
    ours, eager = (model.cuda().to(dtype) for model in pair(family))
    inputs = {name: x.cuda() for name, x in prompts("left").items()}
    got = compiled(ours, inputs)
    if dtype == torch.float32:
        assert torch.equal(got, generate(eager, inputs))
    else:  # bfloat16 is rounded differently by each compiler
        assert_near_best(eager.float(), got, inputs["attention_mask"])


def assert_near_best(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Assert that every new token's logit, by `model` in float32, is within bfloat16's error of the largest."""
    seen = torch.nn.functional.pad(mask, (0, NEW), value=1)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=seen, position_ids=positions).logits[:, PROMPT - 1 : -1]
    logits[..., GENERATING["eos_token_id"]] = float("-inf")
    chosen = logits.gather(-1, tokens[:, PROMPT:, None])[..., 0]
    spread = logits.masked_fill(logits.isinf(), 0.0).abs().amax()
    assert (logits.amax(-1) - chosen <= 0.05 * spread).all()
