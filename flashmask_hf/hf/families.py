"""Facts about model types of transformers, from which `docs/models.py` writes the notes of docs/models.md."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any, NamedTuple

import transformers
from packaging.version import Version
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from flashmask_hf.hf.facts import is_readable
from flashmask_hf.names import VECTORS

__all__ = ["FAMILIES", "Family", "family_of", "missing_kernels", "refuse_own_attention", "refuse_unsupported"]


class Family(NamedTuple):
    """What is known of a model type.

    Attributes:
        refused: why the backend cannot serve its models.
        mixes: whether its layers mix tokens without an `nn.Conv1d`, or its head keeps keywords from its backbone.
        kernels: distributions whose kernels read document boundaries. Every layer hands them `seq_idx`, and
            `cu_seq_lens_q` for the delta rule.
        drops_indices: whether it keeps keywords from its attention, and asks for a mask only if the call has one.
        window_in_mask: whether its sliding window is in the mask only.
    """

    refused: str = ""
    mixes: bool = False
    kernels: tuple[str, ...] = ()
    drops_indices: bool = False
    window_in_mask: bool = False


_DROPS_KEYWORDS = f"keep keywords from their layers, so {VECTORS} would be ignored without a word"
_EDITS_MASKS = "cut or join the masks of their layers, which takes dense ones"
_CONVOLUTION = Family(kernels=("causal-conv1d",))
_STATE_SPACE = Family(kernels=("causal-conv1d", "mamba-ssm"))
_DELTA_RULE = Family(kernels=("causal-conv1d", "flash-linear-attention"))

FAMILIES = {
    "aimv2_text_model": Family(drops_indices=True),
    "axk2": Family(_EDITS_MASKS),
    "bamba": _STATE_SPACE,
    "bigbird_pegasus": Family(_EDITS_MASKS),
    "deepseek_v4": Family(_EDITS_MASKS, mixes=True),
    "deepseek_v32": Family(_EDITS_MASKS),
    "doge": Family(_EDITS_MASKS),
    "dots3_note_text": Family(_EDITS_MASKS),
    "falcon_h1": _STATE_SPACE,
    "falcon_mamba": Family(mixes=True),
    "gemma4_audio": Family(_EDITS_MASKS),
    "glm_moe_dsa": Family(_EDITS_MASKS),
    "granitemoehybrid": _STATE_SPACE,
    "hy_v4": Family(_EDITS_MASKS),
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "mamba": Family(mixes=True),
    "mamba2": Family(mixes=True),
    "minimax": Family(mixes=True),
    "mistral_large4_text": Family(_EDITS_MASKS),
    "mobilebert": Family(mixes=True),
    "nemotron": Family(_DROPS_KEYWORDS),
    "nemotron_h": _STATE_SPACE,
    "olmo_hybrid": _DELTA_RULE,
    "phimoe": Family(window_in_mask=True),
    "qwen2_moe": Family(window_in_mask=True),
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "qwen4_exp_text": Family(_EDITS_MASKS),
    "rwkv": Family(mixes=True),
    "siglip2_text_model": Family(_DROPS_KEYWORDS),
    "siglip_text_model": Family(_DROPS_KEYWORDS),
    "stablelm": Family(_DROPS_KEYWORDS),
    "t5gemma2_decoder": Family(_EDITS_MASKS),
    "whisper": Family(_DROPS_KEYWORDS),
    "xlstm": Family(mixes=True),
    "zamba2": _STATE_SPACE,
}
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
    """Return whether a module can be imported."""
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


@cache
def refuse_unsupported(config_class: type, implementation: str) -> None:
    """Raise for a config class if the backend cannot serve one of its models; memoized.

    It also refuses models whose config was changed to this backend after they were made.

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
    """Raise for a model whose code shows that it does not look its attention up by name.

    Raises:
        NotImplementedError: the model has attention code of its own.
    """
    if model_class._supports_attention_backend or model_class._can_set_attn_implementation():
        return
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and is_readable(module):
        raise NotImplementedError(
            f"{model_class.__name__} has attention code of its own and does not take "
            f"attn_implementation='{implementation}'; use attn_implementation='eager' for this model"
        )
