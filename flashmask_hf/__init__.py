"""Exact attention under rich masks, at linear mask memory, for Hugging Face models.

Importing the package registers `attn_implementation="flashmask"` with transformers, and "flashmask_hash" and
"flashmask_qk" for dynamic sparse attention.
"""

import warnings as _warnings

from flashmask_hf import masks
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.backend.register import register
from flashmask_hf.long_rows import keep_attention
from flashmask_hf.mask import FlashMask, MaskNotRepresentable

__version__ = "0.1.0"

__all__ = ["FlashMask", "MaskNotRepresentable", "flashmask_attention", "keep_attention", "masks", "register"]

try:
    register()
except RuntimeError as _error:  # an unknown transformers: the attention itself still works
    _warnings.warn(f"attn_implementation='flashmask' is not available: {_error}", stacklevel=2)
