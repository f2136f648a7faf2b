"""Tiny random models of the families that transformers knows, and what `attn_implementation="flashmask"` makes of each.

Shared by `docs/models.py`, which writes the table, and by `tests/test_models.py`, which holds it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

from flashmask_hf import backend, masks

BOUND = 1e-4
"""Largest error in float32, relative to the largest entry of what eager attention gives."""

LENGTH = 12
DOCUMENTS = [8, 4]
SCENARIOS = ("no padding", "right padding", "left padding", "packed", "supplied", "generate")
VOCABULARY = 48

# Integer fields of configs: the first pattern that fits the whole name gives the value.
_SIZES: dict[str, int] = {
    r"rotary_dim": 4,
    r"(type|task_type)_vocab_size": 2,
    r".*vocab_size.*": VOCABULARY,
    r".*num_(key_value|kv)_heads|n_kv_heads?|num_key_value_groups|num_query_groups": 2,
    r"(.*_)?(num_|n_)?(attention_)?(n_)?heads?|linear_num_(key|value)_heads|n_mamba_heads|encoder_attention_heads": 4,
    r"num_attention_heads|(en|de)coder_attention_heads|num_query_heads": 4,
    r"(.*_)?(head_dim|kv_channels|d_kv|d_head|dim_head|head_size|headdim)": 8,
    r"(.*_)?lora_rank": 16,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|inner|d_ff|dff|dim_ff|feed_forward_size|mlp_dim).*": 48,
    r"(.*_)?(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|hidden_dim|lru_width)": 32,
    r"(num_|n_)?(.*_)?(hidden_)?layers|n_layer|depth": 2,
    r"(moe_)?(num|n)_(local_|routed_)?experts": 4,
    r"(num_)?experts_per_tok(en)?|num_experts_per_tok(en)?|(moe_)?top_?k|moe_k|num_selected_experts": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r"(.*_)?sliding_window(_size)?|local_attention|attention_chunk_size|window_size|attention_window_size": 6,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length": 64,
    r"image_size": 32,
    r"num_frames": 4,
    r"num_kv_shared_layers|hidden_size_per_layer_input": 0,
    r"patch_size": 8,
    r"pad_token_id": 0,
    r"(bos|decoder_start)_token_id": 1,
    r"eos_token_id": 2,
}

_WINDOWED = dict(
    use_sliding_window=True, sliding_window=6, max_window_layers=1, layer_types=["full_attention", "sliding_attention"]
)
_AXES = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))

# What a family needs beside that: windows that are off by default, and fields that depend on each other.
_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": dict(mamba_d_head=16, attn_layer_indices=[1]),
    "bert-generation": dict(is_decoder=True),
    "cohere_compass_text": dict(
        rope_parameters={
            layer: dict(rope_type="default", rope_theta=1e4) for layer in ("full_attention", "sliding_attention")
        }
    ),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note_text": dict(per_layer_config={}, head_dim=16),
    "esm": dict(vocab_size=VOCABULARY, pad_token_id=0, mask_token_id=3),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_d_head=8, mamba_n_groups=1),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "glm4v_moe_text": dict(rope_parameters=dict(mrope_section=[1, 1, 0])),
    "glm4v_text": _AXES,
    "glm_ocr_text": _AXES,
    "granitemoehybrid": dict(mamba_d_head=16, layer_types=["linear_attention", "full_attention"]),
    "hrm_text": dict(num_hidden_layers=16, num_layers_per_stack=2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "longcat_flash": dict(qk_head_dim=16),
    "mamba2": dict(num_heads=8),
    "mistral4": dict(rope_parameters=dict(partial_rotary_factor=1.0)),
    "mixtral": dict(sliding_window=6),
    "mobilebert": dict(true_hidden_size=32, embedding_size=32, intra_bottleneck_size=32),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=4, mamba_head_dim=16, n_groups=1
    ),
    "neomme": dict(head_dim=16),
    "paddleocr_vl_text": _AXES,
    "perceiver": dict(num_latents=8, d_latents=32, num_blocks=1, num_self_attends_per_block=1),
    "phi3": dict(sliding_window=6),
    "phimoe": dict(sliding_window=6),
    "qwen2": _WINDOWED,
    "qwen2_5_omni_text": _AXES,
    "qwen2_5_vl_text": _AXES,
    "qwen2_moe": _WINDOWED,
    "qwen2_vl_text": _AXES,
    "qwen3": _WINDOWED,
    "qwen3_moe": dict(use_sliding_window=True, sliding_window=6),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4, indexer_compress_ratio=2
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "starcoder2": dict(sliding_window=6),
    "step3p5": dict(sliding_window=6),
    "swin": dict(embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=2, hidden_size=48),
    "swinv2": dict(embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=2, hidden_size=48),
    "vibevoice_asr": dict(
        acoustic_tokenizer_encoder_config=dict(depths=[1] * 7, num_filters=2),
        semantic_tokenizer_encoder_config=dict(depths=[1] * 7, num_filters=2),
    ),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"],
        hybrid_layer_ids=[1],
        attention_hidden_size=64,
        attention_head_dim=16,
        mamba_headdim=16,
    ),
}

# Standard deviation of the weights where 0.3 would make scores so large that float32 cannot hold their differences.
_SPREAD = {"mobilebert": 0.1, "segformer": 0.2}

_DERIVED = {"_out_features", "_out_indices", "d_head", "dtype", "out_features", "out_indices", "per_layer_config"}
_DERIVED |= {"architectures", "quantization_config", "stage_names", "transformers_version"}


def kind(family: str) -> str:
    """How transformers lists a family: the first that applies of the mappings below, else a text tower."""
    if family in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "encoder-decoder"
    if family in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoder"
    if family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "decoder"
    if family in modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES:
        return "image encoder"
    return "text tower"


def discover() -> list[str]:
    """Model types of the installed transformers: language models, image encoders, towers of vision-language models."""
    found = {
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *(name for name in modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES if _attends(name)),
    }
    for name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        try:
            found.add(CONFIG_MAPPING[name]().get_text_config().model_type)
        except Exception:  # a config without defaults has no tower to take from it
            continue
    return sorted(name for name in found if name in CONFIG_MAPPING)


def _attends(name: str) -> bool:
    """Whether an image encoder has attention at all: whether its config counts heads."""
    return any("heads" in field for field in CONFIG_MAPPING[name]().to_dict())


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, small; lists with one entry per layer keep the first layer of each sort."""
    layers = next((fields[k] for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if fields.get(k)), 0)
    per_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers > 2}
    kept = [0, 1]
    if per_layer:
        first = {}
        for i in range(layers):
            first.setdefault(str([v[i] for k, v in per_layer.items() if isinstance(v[i], str)]), i)
        kept = sorted(first.values())
        if len(kept) == 1:
            kept.append(kept[0] + 1)
    small = {}
    for name, value in fields.items():
        if name in _DERIVED:
            continue
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            value = shrunk(value)
        elif name == "mrope_section":
            value = [2, 1, 1]
        elif name in per_layer:
            value = [value[i] for i in kept]
            if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                value = [_small(name, v) for v in value]
        elif isinstance(value, list) and name.endswith("token_id"):
            value = 2
        elif isinstance(value, float) and re.search(r"drop|jitter|noise", name):
            value = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            value = _small(name, value)
            if per_layer and value == 2 and re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", name):
                value = len(kept)
        small[name] = value
    heads = small.get("num_attention_heads")
    if heads and "num_key_value_heads" in fields:
        few = fields["num_key_value_heads"] or 2
        many = few == fields["num_attention_heads"]
        small["num_key_value_heads"] = heads if many else min(2, few)
    if "head_dim" in fields and not fields["head_dim"]:
        small["head_dim"] = 8
    return small


def _small(name: str, value: int) -> int:
    if name.endswith(("token_id", "token_index")) and not re.fullmatch(r"(pad|bos|eos|decoder_start)_token_id", name):
        return min(value, VOCABULARY - 1)
    size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), value)
    return size if name.endswith("token_id") else min(value, size)


def config_of(family: str) -> Any:
    """A tiny config of a model type."""
    config_class = CONFIG_MAPPING[family]
    fields = shrunk(config_class().to_dict())
    for name in ("model_type", "layer_type_validation"):
        fields.pop(name, None)
    for name, value in _FAMILIES.get(family, {}).items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            fields[name] = {**fields[name], **value}
        else:
            fields[name] = value
    return config_class(**fields)


_AUTO: dict[str, Any] = {
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "encoder": AutoModelForMaskedLM,
    "decoder": AutoModelForCausalLM,
    "image encoder": AutoModel,
    "text tower": AutoModel,
}


def _own_class(config_class: type) -> Any:
    """The text model of a config that transformers builds only as a part of another model."""
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    for _, found in inspect.getmembers(module, inspect.isclass):
        own = found.__module__ == module.__name__ and getattr(found, "config_class", None) is config_class
        if own and re.fullmatch(r".*Text(Model|Decoder)|.*(Decoder|TextModel)", found.__name__):
            return found
    raise ValueError(f"no text model of {config_class.__name__} in {module.__name__}")


def build(family: str, attention: str) -> Any:
    """A tiny model with random weights, large enough that attention is far from uniform."""
    torch.manual_seed(0)
    config = config_of(family)
    if kind(family) == "text tower" and type(config) not in MODEL_MAPPING:
        make = _own_class(type(config))._from_config
    else:
        make = _AUTO[kind(family)].from_config
    model = make(config, attn_implementation=attention).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in name:
                parameter.normal_(std=_SPREAD.get(family, 0.3), generator=generator)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.decoder_start_token_id = 1
    return model


class Outcome(NamedTuple):
    """ "yes", "raises", "wrong" or "n/a", and why."""

    word: str
    reason: str = ""


class _Case(NamedTuple):
    """Calls whose outputs, at `real` tokens and side by side, are what eager must agree on."""

    calls: list[dict[str, Any]]
    real: Tensor | None = None


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error, without what is different for each model."""
    text = " ".join(str(error).split())
    text = re.sub(r"(torch[.]Size)?[\[(]+\d+(, \d+)*[\])]+", "[...]", text)
    text = re.sub(r"\bsliding_window=\d+", "sliding_window", text)
    text = re.sub(r"^[A-Z]\w+ has attention code", "the model has attention code", text)
    return f"{type(error).__name__}: {re.split(r'; |[.] (?=[A-Z])', text)[0].rstrip('.')}"


def _sort(family: str, config: Any) -> str:
    """`kind`, but by the model where transformers lists a decoder with an audio encoder beside encoder-decoders."""
    sort = kind(family)
    return "decoder" if sort == "encoder-decoder" and not config.is_encoder_decoder else sort


def _cases(family: str, model: Any) -> dict[str, tuple[_Case, _Case] | None]:
    """For each scenario what runs with flashmask and what with eager; None where it does not apply."""
    sort, parameters = _sort(family, model.config), inspect.signature(model.forward).parameters
    cases: dict[str, tuple[_Case, _Case] | None] = dict.fromkeys(SCENARIOS)
    generator = torch.Generator().manual_seed(1)
    if sort == "image encoder":
        frames = [model.config.num_frames] if hasattr(model.config, "num_frames") else []
        image = _Case([dict(pixel_values=torch.randn(2, *frames, 3, 32, 32, generator=generator))])
        return cases | {"no padding": (image, image)}
    ids = torch.randint(3, VOCABULARY - 12, (2, LENGTH), generator=generator)
    more: dict[str, Any] = {}
    if sort == "encoder-decoder":
        more["decoder_input_ids"] = ids[:, :5]
    plain = _Case([dict(input_ids=ids, **more)])
    cases["no padding"] = (plain, plain)
    right = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])).long()
    for side, mask in (("right", right), ("left", right.flip(-1))):
        case = _Case([dict(input_ids=ids, attention_mask=mask, **more)], None if more else mask.bool())
        cases[f"{side} padding"] = (case, case)
    row = ids[:1]
    more = {"use_cache": False} if "use_cache" in parameters else {}
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    at = {"position_ids": positions} if "position_ids" in parameters else {}
    decoder = {"decoder_input_ids": row} if sort == "encoder-decoder" else {}
    apart = _Case(
        [
            {name: x[:, a:b] for name, x in {"input_ids": row, **at, **decoder}.items()} | more
            for a, b in ((0, DOCUMENTS[0]), (DOCUMENTS[0], LENGTH))
        ]
    )
    packed = dict(input_ids=row, **at, **decoder, **more)
    if sort in ("decoder", "text tower") and at:
        cases["packed"] = (_Case([packed]), apart)
    document = masks.document(DOCUMENTS) if sort == "encoder" else masks.causal_document(DOCUMENTS)
    vectors = (document.bidirectional() if sort == "encoder" else document).indices
    cases["supplied"] = (_Case([dict(packed, startend_row_indices=vectors)]), apart)
    if sort in ("decoder", "encoder-decoder"):
        case = _Case([dict(input_ids=ids, attention_mask=right.flip(-1))])
        cases["generate"] = (case, case)
    return cases


def _result(model: Any, case: _Case, how: str) -> dict[str, Tensor]:
    """Logits (or hidden states), and with `how` = "train" the gradient of every parameter."""
    torch.manual_seed(0)
    if how == "generate":
        given = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=True)
        given |= dict(return_dict_in_generate=True, output_logits=True)
        return {"logits": torch.stack(model.generate(**case.calls[0], **given).logits, 1)}
    model.train(how == "train")
    with torch.set_grad_enabled(how == "train"):
        parts = []
        for call in case.calls:
            out = model(**call)
            parts.append(out.logits if "logits" in out else out.last_hidden_state)
        out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        out = out if case.real is None else out[case.real]
    result = {"logits": out.detach()}
    if how == "train":
        model.zero_grad()
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        (out * weight).sum().backward()
        result |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return result


def _error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest error relative to a tensor's largest entry, or to a hundredth of the largest gradient if that is more."""
    if got.keys() != want.keys():
        return float("inf")
    largest = max((x.abs().max().item() for name, x in want.items() if name != "logits" and x.numel()), default=0.0)
    worst = 0.0
    for name, x in want.items():
        if got[name].shape != x.shape:
            return float("inf")
        if x.numel():
            floor = 1e-6 if name == "logits" else max(1e-2 * largest, 1e-6)
            error = (got[name] - x).abs().max().item() / max(x.abs().max().item(), floor)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _one(ours: Any, eager: Any, pair: tuple[_Case, _Case], how: str, scenario: str, calls: list[int]) -> Outcome:
    try:
        want = _result(eager, pair[1], how)
        if not all(x.isfinite().all() for x in want.values()):
            return Outcome("n/a", "eager attention gives infinite or undefined numbers")
    except Exception as error:
        return Outcome("n/a", f"eager attention raises {first_sentence(error)}")
    before, supplied = calls[0], backend.supplied_calls
    try:
        got = _result(ours, pair[0], how)
    except Exception as error:
        return Outcome("raises", first_sentence(error))
    if calls[0] == before:
        return Outcome("n/a", "no layer calls the attention interface")
    given, layers = backend.supplied_calls - supplied, calls[0] - before
    if scenario == "supplied" and given < layers:
        return Outcome(
            "wrong", "the model does not hand the vectors on to " + ("some layers" if given else "its layers")
        )
    if _error(got, want) <= BOUND:
        return Outcome("yes")
    if scenario == "packed" and _error(got, _result(eager, pair[0], how)) <= BOUND:
        return Outcome("as eager", "eager attention does not keep the documents apart either")
    if scenario == "supplied" and _joins_elsewhere(ours, pair[0].calls[0]):
        return Outcome("joined", "layers that are not attention carry tokens into the next document")
    return Outcome("wrong", "differs from eager attention")


def _joins_elsewhere(model: Any, call: dict[str, Any]) -> bool:
    """Whether a token changes the output at later ones although attention sees only itself."""
    alone = call | {"startend_row_indices": masks.causal_document([1] * LENGTH).bidirectional().indices}
    changed = call["input_ids"].clone()
    changed[:, 0] += 1
    results = [_result(model, _Case([alone | {"input_ids": ids}]), "eval") for ids in (call["input_ids"], changed)]
    got, want = ({"logits": x["logits"][:, 1:]} for x in results)
    return _error(got, want) > BOUND


class Family(NamedTuple):
    """What the table says of a family."""

    kind: str
    outcomes: dict[str, tuple[Outcome, ...]]
    """For each scenario what happens in eval mode and, but for generate, in training."""


def examine(family: str) -> Family:
    """Run every scenario.

    Raises:
        Exception: whatever keeps the tiny model from being built or run with eager attention.
    """
    eager = build(family, "eager")
    cases = _cases(family, eager)
    assert cases["no padding"] is not None
    _result(eager, cases["no padding"][1], "eval")
    sort = _sort(family, eager.config)
    try:
        ours = build(family, "flashmask")
    except Exception as error:
        refused = Outcome("raises", first_sentence(error))
        return Family(sort, {name: (refused if pair else Outcome("n/a"),) for name, pair in cases.items()})
    ours.load_state_dict(eager.state_dict())
    calls, attend = [0], backend.flashmask_attention

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return attend(*args, **kwargs)

    result: dict[str, tuple[Outcome, ...]] = {}
    backend.flashmask_attention = counting
    try:
        for name, pair in cases.items():
            if pair is None:
                result[name] = (Outcome("n/a"),)
                continue
            modes = (name,) if name == "generate" else ("eval", "train")
            result[name] = tuple(_one(ours.eval(), eager.eval(), pair, how, name, calls) for how in modes)
    finally:
        backend.flashmask_attention = attend
    return Family(sort, result)
