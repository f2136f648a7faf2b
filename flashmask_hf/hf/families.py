"""Facts about model types of transformers, from which `docs/models.py` writes the notes of docs/models.md."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from functools import cache
from typing import Any, NamedTuple

import transformers
from packaging.version import Version
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from flashmask_hf.names import VECTORS


class Family(NamedTuple):
    """What is known of a model type.

    Attributes:
        refused: why the backend cannot serve its models.
        mixes: whether layers mix tokens without an `nn.Conv1d`, or its head keeps keywords from its backbone.
        kernels: distributions whose kernels read document boundaries.
        window_in_mask: whether its sliding window is in the mask only.
        drops_indices: whether it keeps keywords from its layers, and asks for no mask without `attention_mask`.
        is_absolute: whether positions matter beyond their distances, without an `nn.Embedding` of them: as a buffer, or
            since norms with weights follow RoPE.
    """

    refused: str = ""
    mixes: bool = False
    kernels: tuple[str, ...] = ()
    window_in_mask: bool = False
    drops_indices: bool = False
    is_absolute: bool = False


_DROPS_KEYWORDS = f"keep keywords from their layers, so {VECTORS} would be ignored without a word"
_EDITS_MASKS = "cut or join the masks of their layers, which takes dense ones"

_TYPES = {
    Family(_DROPS_KEYWORDS): "nemotron siglip2_text_model siglip_text_model stablelm whisper",
    Family(_EDITS_MASKS): "axk2 bigbird_pegasus deepseek_v32 doge dots3_note_text gemma4_audio glm_moe_dsa hy_v4 "
    "hy_v4_vl_text mistral_large4_text nllb-moe qwen4_exp_text t5gemma2_decoder",
    Family(_EDITS_MASKS, mixes=True): "deepseek_v4",
    Family(mixes=True): "falcon_mamba mamba mamba2 minimax mobilebert rwkv xlstm",
    Family(window_in_mask=True): "phimoe qwen2_moe",
    Family(drops_indices=True): "aimv2_text_model",
    Family(is_absolute=True): "ctrl hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text",
    Family(kernels=("causal-conv1d",)): "lfm2 lfm2_moe",
    Family(kernels=("causal-conv1d", "mamba-ssm")): "bamba falcon_h1 granitemoehybrid nemotron_h zamba2",
    Family(kernels=("causal-conv1d", "flash-linear-attention")): "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next",
}

FAMILIES = {name: family for family, names in _TYPES.items() for name in names.split()}
"""Model types with special treatment."""

_MODULES = {"causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm", "flash-linear-attention": "fla"}
"""The module that each distribution installs."""


def family_of(config: Any) -> Family:
    """Return the facts about a config's, or config class's, model type."""
    return FAMILIES.get(getattr(config, "model_type", ""), Family())


def missing_kernels(config: Any) -> tuple[str, ...] | None:
    """Return which distributions a model needs to keep documents apart and lacks; None if none would help.

    transformers hands the boundaries on since 5.23.
    """
    kernels = family_of(config).kernels
    if not kernels or Version(transformers.__version__) < Version("5.23"):
        return None
    return tuple(name for name in kernels if not _can_import(_MODULES[name]))


def _can_import(module: str) -> bool:
    with contextlib.suppress(Exception):  # whatever a package for another torch raises
        return bool(importlib.import_module(module))
    return False


@cache
def refuse_unsupported(config_class: type, implementation: str) -> None:
    """Raise for a config class if the backend cannot serve one of its models; memoized.

    Raises:
        NotImplementedError: a model has attention code of its own, edits masks, or keeps keywords from its attention.
    """
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        listed: Any = mapping.get(config_class, ())
        for model_class in listed if isinstance(listed, tuple) else [listed]:
            refuse_own_attention(model_class, implementation)
    reason = family_of(config_class).refused
    if reason:
        raise NotImplementedError(
            f"models of type {config_class.model_type!r} {reason}; attn_implementation='{implementation}' refuses "  # type: ignore[attr-defined]
            "them: use attn_implementation='sdpa', or 'eager'"
        )


def refuse_own_attention(model_class: Any, implementation: str) -> None:
    """Raise NotImplementedError for a model whose code does not look its attention up by name."""
    if model_class._supports_attention_backend or model_class._can_set_attn_implementation():
        return
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and source_of(module):
        raise NotImplementedError(
            f"{model_class.__name__} has attention code of its own and does not take "
            f"attn_implementation='{implementation}'; use attn_implementation='eager' for this model"
        )


@cache
def source_of(code: Any) -> str:
    """Return the source of a module or function, or "" without a Python file, as in a notebook."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""
