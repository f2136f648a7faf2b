"""Documents of a row in models of which a part beside the attention takes the row for one document.

The mask keeps documents apart in the attention alone. PEFT's activated LoRA and the scales of Llama 4 look at the whole
row, without an error. Nothing is read back from the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashmask_hf.backend.ignored_vectors import hides_more
from flashmask_hf.backend.positions import has_one_document
from flashmask_hf.checks import device_assert
from flashmask_hf.names import VECTORS

__all__ = ["check_adapters", "check_scales"]


def check_adapters(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise for packed rows in a model with activated LoRA, which looks for its invocation once in a row.

    Args:
        model: a transformers model whose attention is one of this package's, into which PEFT may have put adapters.
        kwargs: keywords of its call.

    Raises:
        RuntimeError: `startend_row_indices`, `cu_seq_lens_q` or `position_ids` tell several documents of a row (a
            device-side check).
    """
    adapters = getattr(model, "peft_config", {})
    if not any(getattr(config, "alora_invocation_tokens", None) for config in adapters.values()):
        return
    vectors, bounds, positions = (kwargs.get(name) for name in (VECTORS, "cu_seq_lens_q", "position_ids"))
    if isinstance(positions, Tensor) and positions.dim() == 2:
        mask = kwargs.get("attention_mask")
        if mask is None and isinstance(vectors, Tensor):  # 0 hides a key from all, as padding, whose positions are 0
            mask = (vectors[:, 0] > 0).any(-1)
        alone = has_one_document(positions, mask)
    elif isinstance(bounds, Tensor):
        alone = (bounds.diff() > 0).sum() <= 1
    elif isinstance(vectors, Tensor):
        alone = ~hides_more(vectors, None).any()
    else:
        return
    device_assert(
        alone,
        "PEFT looks for alora_invocation_tokens once in a row, so that of several packed documents only one would have "
        "the adapter; use LoRA without them, or batches of whole sequences",
    )


def check_scales(config: Any, position_ids: Tensor, attention_mask: Any) -> None:
    """Raise for several documents in a long row of Llama 4, which scales its queries by their place in the row.

    The scale of a query is 1 up to `floor_scale` tokens (transformers, `Llama4TextAttention`).

    Args:
        config: configuration of a model that makes its mask.
        position_ids: [B, S] of its call.
        attention_mask: of its call.

    Raises:
        RuntimeError: `position_ids` tell several documents in a row of more tokens (a device-side check).
    """
    floor = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if floor is None or position_ids.dim() != 2 or position_ids.shape[1] < floor:
        return
    device_assert(
        has_one_document(position_ids, attention_mask),
        "Llama 4 scales queries by their place in the row from floor_scale tokens on, so that documents of a longer "
        "row would depend on those before them; keep rows of several documents under floor_scale tokens",
    )
