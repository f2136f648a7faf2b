"""Models that the backend cannot follow, and the errors that say so."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import ModuleType
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from flashmask_hf.names import VECTORS

__all__ = ["refuse_own_attention", "refuse_unsupported"]

_DROPS_KEYWORDS = f"keep keywords from their layers, so {VECTORS} would be ignored without a word"
_EDITS_MASKS = "cut or join the masks of their layers, which takes dense ones"
_UNSUPPORTED = {
    "bigbird_pegasus": _EDITS_MASKS,
    "deepseek_v4": _EDITS_MASKS,
    "gemma4_audio": _EDITS_MASKS,
    "nemotron": _DROPS_KEYWORDS,
    "qwen4_exp_text": _EDITS_MASKS,
    "siglip2_text_model": _DROPS_KEYWORDS,
    "siglip_text_model": _DROPS_KEYWORDS,
    "stablelm": _DROPS_KEYWORDS,
    "t5gemma2_decoder": _EDITS_MASKS,
    "whisper": _DROPS_KEYWORDS,
}
"""Model types that the backend refuses, and the reason."""


@cache
def refuse_unsupported(config_class: type, implementation: str) -> None:
    """Raise for a config class if the backend cannot follow one of its models; memoized.

    Models with attention code of their own are refused when they are made (`patches.py`). This refuses those whose
    config was changed to this backend later.

    Raises:
        NotImplementedError: a model has attention code of its own, edits masks, or keeps keywords from its attention.
    """
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        listed: Any = mapping.get(config_class, ())
        for model_class in listed if isinstance(listed, tuple) else [listed]:
            refuse_own_attention(model_class, implementation)
    reason = _UNSUPPORTED.get(getattr(config_class, "model_type", ""))
    if reason is not None:
        raise NotImplementedError(
            f"models of type {config_class.model_type!r} {reason}; attn_implementation='{implementation}' refuses "
            "them: use attn_implementation='sdpa', or 'eager'"
        )


def refuse_own_attention(model_class: Any, implementation: str) -> None:
    """Raise for a model that does not look its attention up by name: it would add the hook's columns to its scores.

    Code that cannot be read, such as a notebook's, is assumed to look it up.

    Raises:
        NotImplementedError: the model has attention code of its own.
    """
    if model_class._supports_attention_backend or model_class._can_set_attn_implementation():
        return
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and _is_readable(module):
        raise NotImplementedError(
            f"{model_class.__name__} has attention code of its own and does not take "
            f"attn_implementation='{implementation}'; use attn_implementation='eager' for this model"
        )


def _is_readable(module: ModuleType) -> bool:
    """Return whether the source code of a module can be read."""
    try:
        return bool(inspect.getsource(module))
    except (OSError, TypeError):
        return False
