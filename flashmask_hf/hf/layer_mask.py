"""The mask of one attention layer in a model call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS

__all__ = ["TEXT_ONLY", "LayerMask", "check_hook_result", "hidden_keys"]

TEXT_ONLY = "attn_implementation={'text_config': 'flashmask', 'vision_config': 'sdpa'}"
"""The way out, in messages, where one part of a model does not take the backend."""


class LayerMask(NamedTuple):
    """The mask of a layer, and the key that each of its columns stands for."""

    mask: FlashMask
    keys: Tensor | None = None
    """int64 [B or 1, columns]; None where column j is key j."""

    def gather(self, x: Tensor) -> Tensor:
        """Return keys or values [B, H, S, D] in the order of the columns, [B, H, columns, D]."""
        if self.keys is None:
            return x
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        return x.transpose(1, 2)[batch, self.keys].transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return attention [B, Hq, Sq, Dv] under the mask; `options` are those of `flashmask_attention`."""
        return flashmask_attention(query, self.gather(key), self.gather(value), self.mask, **options)


def check_hook_result(attention_mask: Any) -> None:
    """Raise unless the layer's attention_mask has the form of the hook's columns."""
    if isinstance(attention_mask, Tensor):
        if attention_mask.dtype == torch.int32 and attention_mask.dim() == 4 and attention_mask.shape[2] in (1, 4):
            return
        got = f"{attention_mask.dtype} of shape {list(attention_mask.shape)}"
    else:
        got = type(attention_mask).__name__
    raise ValueError(
        f"attention_mask must be None or the columns that flashmask_hf's mask hook makes of a 2D mask, got {got} in an "
        f"attention layer; write a dense mask as FlashMask.from_dense(mask).indices and pass it as {VECTORS}, or, if "
        f"the model made it for an image tower, keep that from this backend: {TEXT_ONLY}"
    )


def hidden_keys(hooked: Tensor, q_len: int) -> Tensor:
    """Return which keys the hook's columns [B, 1, n, Skv] hide from all rows, as they do padding; bool [B, 1, Skv]."""
    hidden = hooked[:, :, 0] == 0
    return hidden if hooked.shape[2] == 1 else hidden & (hooked[:, :, 1] >= q_len)
