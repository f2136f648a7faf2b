"""Registration of the package's attention implementations with transformers.

Layers ask `AttentionInterface` for attention, models `AttentionMaskInterface` for masks, once per forward and kind of
layers.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from flashmask_hf.hf import patches
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.mask_hook import mask_hook
from flashmask_hf.names import FLASHMASK, HASH, QK
from flashmask_hf.sparse.hf import hash_attention_forward, qk_attention_forward


def register() -> None:
    """Register every attention implementation of the package; the body of `flashmask_hf.register`.

    Raises:
        RuntimeError: this version of transformers is not one that the package knows how to adapt.
    """
    patches.apply()
    functions = {FLASHMASK: attention_forward, HASH: hash_attention_forward, QK: qk_attention_forward}
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask_hook)
