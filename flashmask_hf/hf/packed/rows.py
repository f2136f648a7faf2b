"""Run a model's backbone on packed rows while its head and losses keep their usual batch.

A batch has both: one sequence per answer, and packed rows. A rewrite of the backbone's call replaces the first by the
second, and a hook lays the hidden states out as the usual batch's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from flashmask_hf.hf.models import is_compiled, state_of, unwrap_peft
from flashmask_hf.hf.rewrites import require_flashmask
from flashmask_hf.names import PACKED_INDEX, VECTORS

_checked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Compiled models every layer of which receives the mask."""


def run_packed(model: Any) -> None:
    """Make a model take the batch keys of `PackedRows.indexed_batch` (idempotent).

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.

    Raises:
        ValueError: the model's attention is not "flashmask", its language model is not a causal decoder, or its
            backbone has a head.
    """
    inner = unwrap_peft(model)
    backbone = inner.base_model
    require_flashmask(backbone)
    if backbone.get_output_embeddings() is not None:
        raise ValueError(
            f"{type(backbone).__name__} is its own backbone, and packed rows need one without a head; use TRL's own "
            "trainer for it, without share_prefixes"
        )
    decoder = backbone.get_decoder()  # without the image encoder of a vision-language model, which is bidirectional
    if any(getattr(part, "is_causal", None) is False for part in decoder.modules()):
        raise ValueError(
            f"{type(inner).__name__} is not a causal decoder, and packed rows are causal; use TRL's own trainer for it"
        )
    check_layers(model)
    if not state_of(backbone).takes_packed_rows:
        state_of(backbone).takes_packed_rows = True
        backbone.register_forward_hook(_unpack_outputs, with_kwargs=True)


def check_layers(model: Any) -> None:
    """Make a model, as for `run_packed`, raise in its first forward if a layer receives no mask (idempotent)."""
    state_of(unwrap_peft(model).base_model).counts_layers = True


def check_compiled(model: Any, device: torch.device) -> None:
    """Check that every layer of a compiled model receives its mask: its calls cannot count layers.

    The first time, a row of two one-token documents runs through it, uncompiled and without gradients.

    Args:
        model: as for `run_packed`, but it may be wrapped. Nothing is done for a model that is not compiled, or for
            which `check_layers` was not called.
        device: device of its inputs.

    Raises:
        ValueError: some of its layers do not receive the mask.
    """
    if model in _checked:  # finding the backbone takes milliseconds
        return
    from accelerate.utils import extract_model_from_parallel  # wrapped models need accelerate

    backbone = unwrap_peft(extract_model_from_parallel(model, keep_torch_compile=False)).base_model
    state = state_of(backbone)
    if not state.is_counted:
        if not state.counts_layers or not is_compiled(model):
            return
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        ends = torch.tensor([[[[1], [2]]]], dtype=torch.int32, device=device)
        state.is_probed = True
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                model(input_ids=ids, position_ids=ids, startend_row_indices=ends, use_cache=False)
        finally:
            state.is_probed = False
    _checked.add(model)


def _unpack_outputs(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Lay the outputs of packed rows out as the usual batch's."""
    index = kwargs.get(PACKED_INDEX)
    if index is None:
        return None
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[index]
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(states.flatten(0, 1)[index] for states in output.hidden_states)
    if output.get("router_logits") is not None:  # of a mixture of experts, [R * S, experts] each
        output.router_logits = tuple(logits[index.flatten().to(logits.device)] for logits in output.router_logits)
    return output


def drop_padding_from_router_logits(model: Any) -> None:
    """Make a model's backbone return router logits without padding (idempotent).

    The auxiliary loss of a mixture of experts reads a 2D attention mask, which a packed row does not have.

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
