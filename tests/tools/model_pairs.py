"""Pairs of the same tiny random model with "flashmask" and with "eager" attention, and single calls of attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tools.support import rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from flashmask_hf.hf.attention import attention_forward

_LAYER = 32 + 8 + 200 + 32 + 32 + 48
"""Terms of one layer's sums, one after another: projections, scores, up to 200 keys, output, gates, MLP."""

BOUND = rounding(2 * (2 * _LAYER + 32))
"""Largest error in float32, relative to the largest entry of the expected tensor (at least 1).

It is that of two layers and a head, forward and backward.
"""

WINDOW = 6
SIZES: dict[str, Any] = dict(
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
GENERATING = SIZES | dict(max_position_embeddings=64, eos_token_id=2, tie_word_embeddings=False)
"""For generation: with tied embeddings the likeliest token is often the one before."""

MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
}
"""No window, a window everywhere, both kinds of layers, a softcap, sinks and experts."""


def model_pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """Return the same random model with "flashmask" and with "eager" attention."""
    ours, eager = (_model(name, attention, changes) for attention in ("flashmask", "eager"))
    for parameter in eager.parameters():  # large enough that attention is far from uniform
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    if name == "gpt_oss":
        for layer in eager.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    ours.load_state_dict(eager.state_dict())
    return ours, eager


def _model(name: str, attention: str, changes: dict[str, Any]) -> Any:
    config = MODELS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    assert model.config._attn_implementation == attention
    return model


def chunked_pair() -> tuple[Any, Any]:
    """Return the same Llama 4, with a layer of chunked attention, with "flashmask" and with "eager" attention."""
    settings = {**SIZES, "eos_token_id": 2, "intermediate_size_mlp": 32, "num_local_experts": 2}
    torch.manual_seed(0)
    config: Any = Llama4TextConfig(**settings, attention_chunk_size=4, no_rope_layers=[1, 0])
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="flashmask").eval()
    ours.load_state_dict(eager.state_dict())
    assert "chunked_attention" in config.layer_types
    return ours, eager


def assert_near(got: Tensor, want: Tensor, what: str = "") -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    error = (got - want).abs().max().item()
    assert error <= BOUND * max(1.0, want.abs().max().item()), f"{what}: error {error:.2e}"


def compare(
    ours: Any,
    eager: Any,
    inputs: dict[str, Any],
    eager_inputs: dict[str, Any] | None = None,
    real: Tensor | None = None,
) -> None:
    """Assert that logits of real tokens and every parameter's gradient of `ours` are those of `eager`."""
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


def positions(lengths: list[int]) -> Tensor:
    """Return the positions [1, S] of packed documents."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length))


def dense_for(model: Any, visible: Tensor) -> Any:
    """Return the 4D masks under which eager attention of `model` sees `visible` [B, 1, S, S], windows included."""
    length = visible.shape[-1]
    near = torch.arange(length)[:, None] < torch.arange(length) + WINDOW
    full, sliding = (torch.where(v, 0.0, torch.finfo(torch.float32).min) for v in (visible, visible & near))
    if model.config.model_type == "llama":
        return full
    if model.config.model_type == "mistral":
        return sliding
    return {"full_attention": full, "sliding_attention": sliding}


def layer_inputs(q_len: int = 6, kv_len: int = 6, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return queries of 4 heads, and keys of 2 that are the values, too; the same at every call."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(batch, heads, n, 8, generator=generator) for heads, n in ((4, q_len), (2, kv_len)))
    return query, key


def attend(
    module: torch.nn.Module | None = None,
    q_len: int = 6,
    kv_len: int = 6,
    attention_mask: Any = None,
    batch: int = 2,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call the attention function of a layer on `layer_inputs`."""
    query, key = layer_inputs(q_len, kv_len, batch)
    return attention_forward(module or torch.nn.Module(), query, key, key, attention_mask, **kwargs)


class NoSynchronization(TorchDispatchMode):
    """Mode that raises where a value would be read back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
        ), func
        return func(*args, **(kwargs or {}))
