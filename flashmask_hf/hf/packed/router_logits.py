"""Leave the padding of packed rows out of the auxiliary loss of a mixture of experts.

That loss reads a 2D attention mask, which a packed row does not have.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.names import PACKED_INDEX, VECTORS

__all__ = ["drop_padding_from_router_logits"]


def drop_padding_from_router_logits(model: Any) -> None:
    """Make a model's backbone return router logits without padding. Repeating it is fine.

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.
    """
    backbone = unwrap_peft(model).base_model
    if _drop_padding not in backbone._forward_hooks.values():
        backbone.register_forward_hook(_drop_padding, with_kwargs=True)


def _drop_padding(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output with the router logits, [R * S, experts] per layer, without padding."""
    vectors = kwargs.get(VECTORS)
    if vectors is None or kwargs.get("attention_mask") is not None or kwargs.get(PACKED_INDEX) is not None:
        return None
    if not isinstance(output, dict) or output.get("router_logits") is None:
        return None
    real = (vectors[:, 0, :, 0] > 0).flatten()
    output["router_logits"] = tuple(logits.flatten(0, -2)[real.to(logits.device)] for logits in output["router_logits"])
    return output
