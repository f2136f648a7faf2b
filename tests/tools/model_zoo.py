"""Tiny random models of every family in transformers, and the outcome of `attn_implementation="flashmask"` in each.

`docs/models.py` writes the outcomes to a table, and `tests/hf/test_models.py` compares them with it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tools.support import rounding
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

from flashmask_hf import masks
from flashmask_hf.hf import layer_mask
from flashmask_hf.hf.call import Call, current

LENGTH = 12
BOUND = rounding(2 * 6 * 164) * 32 * 0.3**2
"""Largest error in float32, relative to the largest logit, or to the largest gradient.

Six layers of attention, forward and backward, have sums of 164 terms. An exponential enlarges the relative error of its
argument by its size, the standard deviation of a score. A pair that a mask hides wrongly changes a decoder by 0.08.
"""

DOCUMENTS = [8, 4]
INPUTS = ("no padding", "right padding", "left padding", "packed", "supplied")
MODES: tuple[str, ...] = ("eval", "training", "generate")
NEW_TOKENS = 3
VOCABULARY = 48

# Values of the integer fields of configs, by the first pattern that fits the whole name.
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
_DETR = dict(
    use_timm_backbone=False,
    backbone=None,
    backbone_kwargs={},
    backbone_config=dict(
        model_type="resnet",
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    ),
)
NEMOTRON_H = dict(
    layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=4, mamba_head_dim=16, n_groups=1
)
_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4, indexer_compress_ratio=2)
_AXES = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))

# Further fields of some families: windows that are off by default, and fields that depend on each other.
_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": dict(mamba_d_head=16, attn_layer_indices=[1]),
    "bert-generation": dict(is_decoder=True),
    "chameleon": dict(vocabulary_map={"<image>": 40, "IMGIMGBSZ": 41}),
    "cohere_compass_text": dict(
        rope_parameters={
            layer: dict(rope_type="default", rope_theta=1e4) for layer in ("full_attention", "sliding_attention")
        }
    ),
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "dbrx": dict(
        attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_ocr2_text": dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "deformable_detr": _DETR,
    "detr": _DETR,
    "diffusion_gemma_text": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "dory": dict(num_hidden_layers=4, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1, layer_types=None),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note_text": dict(per_layer_config={}, head_dim=16),
    "ernie4_5_vl_moe_text": dict(rope_parameters=dict(mrope_section=[1, 1, 2])),
    "esm": dict(vocab_size=VOCABULARY, pad_token_id=0, mask_token_id=3),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_d_head=8, mamba_n_groups=1),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "glm4v_moe_text": dict(rope_parameters=dict(mrope_section=[1, 1, 0])),
    "glm4v_text": _AXES,
    "glm_ocr_text": _AXES,
    "granitemoehybrid": dict(mamba_d_head=16, layer_types=["linear_attention", "full_attention"]),
    "hiera": dict(image_size=[32, 32]),
    "hrm_text": dict(num_hidden_layers=16, num_layers_per_stack=2),
    "hunyuan_vl_text": _AXES,
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "longcat_flash": dict(qk_head_dim=16),
    "mamba2": dict(num_heads=8),
    "mistral4": dict(rope_parameters=dict(partial_rotary_factor=1.0)),
    "mixtral": dict(sliding_window=6),
    "mobilebert": dict(true_hidden_size=32, embedding_size=32, intra_bottleneck_size=32),
    "nemo_speechlm": dict(text_config=NEMOTRON_H),
    "nemotron_h": NEMOTRON_H,
    "neomme": dict(head_dim=16),
    "paddleocr_vl_text": _AXES,
    "perceiver": dict(num_latents=8, d_latents=32, num_blocks=1, num_self_attends_per_block=1),
    "phi3": dict(sliding_window=6),
    "phimoe": dict(sliding_window=6),
    "pix2struct_text_model": dict(initializer_range=0.02),
    "qwen2": _WINDOWED,
    "qwen2_5_omni_text": _AXES,
    "qwen2_5_vl_text": _AXES,
    "qwen2_moe": _WINDOWED,
    "qwen2_vl_text": _AXES,
    "qwen3": _WINDOWED,
    "qwen3_moe": dict(use_sliding_window=True, sliding_window=6),
    "qwen4_exp": dict(text_config=_INDEXER),
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "reformer": dict(axial_pos_embds=False),
    "starcoder2": dict(sliding_window=6),
    "step3p5": dict(sliding_window=6),
    "swin": dict(embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=2, hidden_size=48),
    "swin2sr": dict(window_size=4),
    "swinv2": dict(embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=2, hidden_size=48),
    "table-transformer": _DETR,
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
_SPREAD = {"deformable_detr": 0.1, "mobilebert": 0.1, "segformer": 0.2}

_DERIVED = {"_out_features", "_out_indices", "d_head", "dtype", "out_features", "out_indices", "per_layer_config"}
_DERIVED |= {"architectures", "quantization_config", "stage_names", "transformers_version"}


def kind(family: str) -> str:
    """Return the kind of a family, by the mapping of transformers that lists it; a text tower is in none."""
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
    """Return the model types of language models, image encoders and towers of vision-language models."""
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
    """Return whether an image encoder has attention: its config counts heads."""
    return any("heads" in field for field in CONFIG_MAPPING[name]().to_dict())


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config, made small; lists with one entry per layer keep the first layer of each type."""
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
        if isinstance(value, dict) and all(isinstance(key, str) for key in value) and name != "label2id":
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


def config_of(family: str, **changes: Any) -> Any:
    """Return a tiny config of a model type, with the fields in `changes`."""
    config_class = CONFIG_MAPPING[family]
    fields = shrunk(config_class().to_dict())
    for name in ("model_type", "layer_type_validation"):
        fields.pop(name, None)
    return config_class(**_merged(fields, _FAMILIES.get(family, {}) | changes))


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a config with changes, also in the configs inside of it."""
    nested = [name for name, value in changes.items() if isinstance(value, dict) and isinstance(fields.get(name), dict)]
    return {**fields, **changes, **{name: _merged(fields[name], changes[name]) for name in nested}}


_AUTO: dict[str, Any] = {
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "encoder": AutoModelForMaskedLM,
    "decoder": AutoModelForCausalLM,
    "image encoder": AutoModel,
    "text tower": AutoModel,
}


def _own_class(config_class: type) -> Any:
    """Return the text model of a config that transformers builds only as a part of another model."""
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    for _, found in inspect.getmembers(module, inspect.isclass):
        own = found.__module__ == module.__name__ and getattr(found, "config_class", None) is config_class
        if own and re.fullmatch(r".*Text(Model|Decoder)|.*(Decoder|TextModel)", found.__name__):
            return found
    raise ValueError(f"no text model of {config_class.__name__} in {module.__name__}")


def build(family: str, attention: str, **changes: Any) -> Any:
    """Return a tiny model with random weights, large enough that attention is far from uniform.

    Args:
        family: the model type.
        attention: its `attn_implementation`.
        changes: fields of its config that are not to be those of `config_of`.
    """
    torch.manual_seed(0)
    config = config_of(family, **changes)
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
    """One of "yes", "raises", "wrong", "not called", "untested" and "-" (does not apply), and the reason, if any."""

    word: str
    reason: str = ""


class _Case(NamedTuple):
    """Calls of a model, whose outputs are joined and compared."""

    calls: list[dict[str, Any]]
    real: Tensor | None = None
    """Tokens that are compared, bool; None compares all."""
    steps: Sequence[dict[str, Any]] = ()
    """Calls with one token each that follow the last call through its cache. Without them `generate` is called."""


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error, without the parts that differ between models."""
    text = " ".join(str(error).split())
    text = re.sub(r"(torch[.]Size)?[\[(]+\d+(, \d+)*[\])]+", "[...]", text)
    text = re.sub(r"\bsliding_window=\d+", "sliding_window", text)
    text = re.sub(r"gives the model \w+", "gives the model an input", text)
    text = re.sub(r"^models of type '[\w-]+'", "models of this type", text)
    text = re.sub(r"^[A-Z]\w+ (has (attention|recurrent)|reads no document|embeds positions)", r"the model \1", text)
    return f"{type(error).__name__}: {re.split(r'; |[.] (?=[A-Z])', text)[0].rstrip('.')}"


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _actual_kind(family: str, config: Any) -> str:
    """Return `kind`, but "decoder" for one with an audio encoder, which transformers lists with encoder-decoders."""
    listed = kind(family)
    return "decoder" if listed == "encoder-decoder" and not config.is_encoder_decoder else listed


def _cases(family: str, model: Any) -> dict[str, tuple[_Case, _Case]]:
    """Return for each input that applies to a family what runs with flashmask and what with eager attention."""
    actual = _actual_kind(family, model.config)
    generator = torch.Generator().manual_seed(1)
    if actual == "image encoder":
        frames = [model.config.num_frames] if hasattr(model.config, "num_frames") else []
        image = _Case([{model.main_input_name: torch.randn(2, *frames, 3, 32, 32, generator=generator)}])
        return {"no padding": (image, image)}
    cases: dict[str, tuple[_Case, _Case]] = {}
    ids = torch.randint(3, VOCABULARY - 12, (2, LENGTH), generator=generator)
    decoder: dict[str, Any] = {"decoder_input_ids": ids[:, :5]} if actual == "encoder-decoder" else {}
    right = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])).long()
    for name, mask in (("no padding", None), ("right padding", right), ("left padding", right.flip(-1))):
        masked = {} if mask is None else {"attention_mask": mask}
        steps = []
        for i in range(0 if model.can_generate() else NEW_TOKENS):
            steps.append({"input_ids": ids[:, i : i + 1]})
            if mask is not None:
                steps[-1]["attention_mask"] = torch.cat([mask, mask.new_ones(2, i + 1)], -1)
        real = None if mask is None or decoder else mask.bool()
        case = _Case([dict(input_ids=ids, **decoder, **masked)], real, steps)
        cases[name] = (case, case)
    row = ids[:1]
    decoder = {name: row for name in decoder}

    def at(positions: Tensor) -> dict[str, Tensor]:
        return {"position_ids": positions[None]} if "position_ids" in _parameters(model) else {}

    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])
    packed = {"input_ids": row, **decoder, **at(positions)}
    last = torch.arange(LENGTH)[None] >= LENGTH - DOCUMENTS[-1]
    steps, alone = [], []
    for i in range(0 if actual == "encoder-decoder" else NEW_TOKENS):
        alone.append({"input_ids": row[:, i : i + 1], **at(torch.tensor([DOCUMENTS[-1] + i]))})
        steps.append(alone[-1] | {"attention_mask": torch.cat([last, last.new_ones(1, i + 1)], -1).long()})
    edges = ((0, DOCUMENTS[0]), (DOCUMENTS[0], LENGTH))
    apart = _Case([{name: x[..., a:b] for name, x in packed.items()} for a, b in edges], None, alone)
    if actual == "encoder":  # RoBERTa, for one, counts from another number than packed rows
        for call in apart.calls:
            call.pop("position_ids", None)
    if at(positions) and actual not in ("encoder", "encoder-decoder"):
        cases["packed"] = (_Case([packed], None, steps), apart)
    document = masks.document(DOCUMENTS) if actual == "encoder" else masks.causal_document(DOCUMENTS)
    vectors = (document.bidirectional() if actual == "encoder" else document).indices
    cases["supplied"] = (_Case([packed | {"startend_row_indices": vectors}], None, steps), apart)
    return cases


def _result(model: Any, case: _Case, mode: str) -> dict[str, Tensor]:
    """Return logits (or hidden states) and, in training, the gradient of every parameter."""
    torch.manual_seed(0)
    if mode == "generate" and not case.steps:
        given = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
        given |= dict(return_dict_in_generate=True, output_logits=True)
        prompt = {name: x for name, x in case.calls[0].items() if not name.startswith("decoder")}
        return {"logits": torch.stack(model.generate(**prompt, **given).logits, 1)}
    cached = {"use_cache": mode == "generate"} if case.steps and "use_cache" in _parameters(model) else {}
    model.train(mode == "training")
    with torch.set_grad_enabled(mode == "training"):
        parts = []
        for call in case.calls:
            out = model(**call, **cached)
            parts.append(out.logits if "logits" in out else out.last_hidden_state)
        for step in case.steps if mode == "generate" else ():
            cache = "past_key_values" if "past_key_values" in _parameters(model) else "cache"  # since transformers 5.24
            if out.get(cache) is None:
                raise _NoCache
            out = model(**step, **{cache: out[cache]}, **cached)
            parts.append(out.logits if "logits" in out else out.last_hidden_state)
        out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if case.real is not None:
            out = out[nn.functional.pad(case.real, (0, out.shape[1] - case.real.shape[1]), value=True)]
    result = {"logits": out.detach()}
    if mode == "training":
        model.zero_grad()
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
        (out * weight).sum().backward()
        result |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return result


def _error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest error, relative to the largest entry of the logits or of all gradients."""
    if {name: x.shape for name, x in got.items()} != {name: x.shape for name, x in want.items()}:
        return float("inf")
    worst = 0.0
    for names in (["logits"], [name for name, x in want.items() if name != "logits" and x.numel()]):
        largest = max((want[name].abs().max().item() for name in names), default=0.0)
        errors = [(got[name] - want[name]).abs().max().item() for name in names]
        worst = max([worst, *(error / largest if error == error else float("inf") for error in errors)])
    return worst


class _NoCache(Exception):
    """Error of a model that returned no cache."""


def _outcome(ours: Any, eager: Any, pair: tuple[_Case, _Case], mode: str, given: str, calls: list[int]) -> Outcome:
    """Return the outcome of one input in one mode; `calls` counts the calls of attention."""
    try:
        want = _result(eager, pair[1], mode)
        if not all(x.isfinite().all() for x in want.values()):
            return Outcome("untested", "eager attention gives infinite or undefined numbers")
    except _NoCache:
        return Outcome("untested", "the model returns no cache")
    except Exception as error:
        return Outcome("untested", f"eager attention raises {first_sentence(error)}")
    before = calls[0]
    try:
        record = current.call = Call(ours, (), {})  # counts what the calls in it do
        got = _result(ours, pair[0], mode)
    except Exception as error:
        return Outcome("raises", first_sentence(error))
    finally:
        current.call = None
    if calls[0] == before:
        return Outcome("not called")
    if given == "supplied" and mode != "generate" and calls[0] - before != record.supplied:
        some = "some layers" if record.supplied else "its layers"
        return Outcome("wrong", f"the model does not hand the vectors on to {some}")
    if _error(got, want) <= BOUND:
        return _refuses_vectors(ours, pair[0]) if given == "supplied" and mode == "generate" else Outcome("yes")
    return Outcome("wrong", "differs from eager attention")


def _refuses_vectors(model: Any, case: _Case) -> Outcome:
    """Return "yes" if `generate` raises, for it would hand the vectors of the prompt to every step."""
    if model.can_generate():
        try:
            _result(model, case._replace(steps=()), "generate")
        except ValueError as error:
            if "startend_row_indices" not in str(error):
                return Outcome("wrong", f"generate with vectors raises {first_sentence(error)}")
        else:
            return Outcome("wrong", "generate takes vectors without an error")
    return Outcome("yes")


class Family(NamedTuple):
    """One row of the table."""

    kind: str
    outcomes: dict[str, dict[str, Outcome]]
    """Outcome by input and mode; encoders do not generate."""


def examine(family: str) -> Family:
    """Return the outcome of every input in every mode.

    Raises:
        Exception: whatever keeps the tiny model from being built or run with eager attention.
    """
    eager = build(family, "eager")
    pairs = _cases(family, eager)
    _result(eager, pairs["no padding"][1], "eval")
    actual = _actual_kind(family, eager.config)
    modes = MODES[:2] if actual in ("encoder", "image encoder") else MODES
    outcomes = {name: dict.fromkeys(modes, Outcome("-")) for name in INPUTS}
    try:
        ours = build(family, "flashmask")
    except Exception as error:
        return Family(
            actual, outcomes | dict.fromkeys(pairs, dict.fromkeys(modes, Outcome("raises", first_sentence(error))))
        )
    ours.load_state_dict(eager.state_dict())
    calls, attend = [0], layer_mask.flashmask_attention

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return attend(*args, **kwargs)

    layer_mask.flashmask_attention = counting
    try:
        for name, pair in pairs.items():
            outcomes[name] = {mode: _outcome(ours.eval(), eager.eval(), pair, mode, name, calls) for mode in modes}
    finally:
        layer_mask.flashmask_attention = attend
    return Family(actual, outcomes)
