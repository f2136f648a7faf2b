"""Exact attention for Hugging Face models under masks such as packed documents, as a few integers per token.

Importing the package registers `attn_implementation="flashmask"` with transformers, and "flashmask_hash" and
"flashmask_qk" for dynamic sparse attention. Without transformers, the attention works on its own.
"""

import warnings as _warnings
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from flashmask_hf import masks
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.long_rows import keep_attention
from flashmask_hf.mask import FlashMask, MaskNotRepresentable

if _TYPE_CHECKING:
    from flashmask_hf.sharing import share_prefixes as share_prefixes

__version__ = "0.1.0"

__all__ = [
    "FlashMask",
    "MaskNotRepresentable",
    "flashmask_attention",
    "keep_attention",
    "masks",
    "register",
]  # without `share_prefixes`, which needs transformers


def __getattr__(name: str) -> _Any:
    """Import `share_prefixes`, which needs transformers, on first use."""
    if name != "share_prefixes":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashmask_hf.sharing import share_prefixes

    return share_prefixes


def register() -> None:
    """Make `attn_implementation="flashmask"`, "flashmask_hash" and "flashmask_qk" known to transformers.

    Importing `flashmask_hf` does this if transformers is installed; repeating it changes nothing.

    Raises:
        ImportError: transformers is not installed, or is older than what the package needs.
        RuntimeError: this version of transformers is not one that the package knows how to adapt.
    """
    from flashmask_hf.hf.patches import register as register_backend

    register_backend()


try:
    register()
except (ImportError, RuntimeError) as _error:  # an unknown transformers, or none: the attention itself still works
    if not (isinstance(_error, ModuleNotFoundError) and _error.name == "transformers"):
        _warnings.warn(
            f"attn_implementation='flashmask' is not available: {_error}; pip install 'flashmask-hf[train]' installs "
            "versions that work",
            stacklevel=2,
        )
