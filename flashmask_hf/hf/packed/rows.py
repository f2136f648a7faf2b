"""Run a model's backbone on packed rows while its head, and every loss after it, keep their usual batch.

A batch brings both: the usual `input_ids` of one sequence per answer, and the packed rows in which every question
stands once. Hooks on the backbone replace the first by the second on the way in. On the way out they lay the hidden
states out as if each answer had been run with a question of its own. No method is replaced, so adapters, wrappers of
distributed training and TRL's fused language model head work as they do without.

Further hooks check, once per backbone, that every layer received the packed rows' mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashmask_hf.hf.document_guard import is_guarded
from flashmask_hf.hf.forward_records import ForwardRecord
from flashmask_hf.hf.model_hooks import is_compiled, unwrap_peft
from flashmask_hf.names import FLASHMASK, PACKED_IDS, PACKED_INDEX, PACKED_POSITIONS, VECTORS

__all__ = ["check_compiled", "check_layers", "run_packed", "runs_packed"]


def run_packed(model: Any) -> None:
    """Make a model take the batch keys of `PackedRows.indexed_batch`. Calls without them run as before.

    Repeating it is fine.

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.

    Raises:
        ValueError: the model's attention is not "flashmask", the only one that keeps the answers of packed rows apart;
            or its language model is not a causal decoder. Models of which some layers do not receive the mask, and
            those with recurrent or convolutional ones, raise in their first forward (`check_layers`, `document_guard`).
    """
    inner = unwrap_peft(model)
    backbone = inner.base_model
    _check_attention(backbone)
    decoder = backbone.get_decoder()  # without the image encoder of a vision-language model, which sees both ways
    if any(getattr(part, "is_causal", None) is False for part in decoder.modules()):
        raise ValueError(
            f"{type(inner).__name__} is not a causal decoder, and packed rows are causal; use TRL's own trainer for it"
        )
    check_layers(model)
    if _pack_inputs not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_pack_inputs, with_kwargs=True, prepend=True)  # the guard sees packed rows
        backbone.register_forward_hook(_unpack_outputs, with_kwargs=True)


def runs_packed(model: Any) -> bool:
    """Return whether `run_packed` made a transformers model, or the one that has it as its backbone, take packed rows.

    The backbone's hook raises if its attention is another one by now.
    """
    return _pack_inputs in model.base_model._forward_pre_hooks.values()


def check_layers(model: Any) -> None:
    """Make a model raise in its first forward on packed rows if some of its layers do not receive their mask.

    Such layers let tokens see other documents. Recurrent and convolutional ones are not counted where `document_guard`
    keeps them from it. Repeating it is fine.

    Args:
        model: a transformers model with a head and attention "flashmask", or a PEFT model around one, not wrapped for
            distributed training. Its first forward with `startend_row_indices` raises ValueError; where the model is
            compiled in whole or in part, `check_compiled` does.
    """
    backbone = unwrap_peft(model).base_model
    if _start_count not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_start_count, with_kwargs=True)
        backbone.register_forward_hook(_finish_count, with_kwargs=True, always_call=True)


def check_compiled(model: Any, device: torch.device) -> None:
    """Do what `check_layers` asks for, for a compiled model: calls of compiled layers cannot be counted.

    The first time, a row of two documents of one token runs through it, not compiled and without gradients.

    Args:
        model: as for `check_layers`, or wrapped for distributed training or compilation. Nothing is done for a model
            that is not compiled or on which `check_layers` was not called.
        device: device of its inputs.

    Raises:
        ValueError: some of its layers do not receive the mask.
    """
    if getattr(model, "_layers_checked", False):  # to find the backbone takes milliseconds
        return
    from accelerate.utils import extract_model_from_parallel  # wrapped models are trained, which accelerate does

    backbone = unwrap_peft(extract_model_from_parallel(model, keep_torch_compile=False)).base_model
    if not getattr(backbone, "_layers_checked", False):
        asked = _start_count in backbone._forward_pre_hooks.values()
        if not asked or not is_compiled(model):
            return
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        ends = torch.tensor([[[[1], [2]]]], dtype=torch.int32, device=device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), ForwardRecord() as record:
            model(input_ids=ids, position_ids=ids, startend_row_indices=ends, use_cache=False)
        _require_every_layer(backbone, record.supplied_calls)
    model._layers_checked = True


def _pack_inputs(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace the usual batch by the packed rows, in a call that has them."""
    if kwargs.get(PACKED_IDS) is None:
        return None
    _check_attention(backbone)
    packed = {key: value for key, value in kwargs.items() if key not in (PACKED_IDS, PACKED_POSITIONS, "inputs_embeds")}
    packed |= {"input_ids": kwargs[PACKED_IDS], "position_ids": kwargs[PACKED_POSITIONS], "attention_mask": None}
    return (), packed


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


def _start_count(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the layers that receive the mask in this forward, unless the backbone is checked or compiled."""
    if kwargs.get(VECTORS) is None or torch.compiler.is_compiling():  # a compiler would guard on what follows
        return
    if not getattr(backbone, "_layers_checked", False) and not is_compiled(backbone):
        backbone._forward_record = ForwardRecord().start()


def _finish_count(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """End the count of this forward and check it, unless the forward raised and has no output."""
    if torch.compiler.is_compiling():
        return
    record = vars(backbone).pop("_forward_record", None)
    if record is None:
        return
    record.stop()
    if output is not None:
        _require_every_layer(backbone, record.supplied_calls)


def _require_every_layer(backbone: Any, calls: int) -> None:
    """Raise unless every layer has called attention with the packed row's mask."""
    layers = backbone.config.get_text_config().num_hidden_layers
    if calls < layers and not is_guarded(backbone):  # layers that are not attention get no mask
        raise ValueError(
            f"{type(backbone).__name__} gave the packed row's mask to {calls} of its {layers} layers; in the others "
            "documents or answers would see each other, so this model cannot take packed rows: use TRL's own trainer"
        )
    backbone._layers_checked = True


def _check_attention(backbone: Any) -> None:
    """Raise unless the backbone's attention is "flashmask"."""
    name = backbone.config._attn_implementation
    if name != FLASHMASK:
        raise ValueError(
            f"packed rows need attn_implementation='flashmask', but the model has {name!r}, with which answers see "
            "each other, or not all that they should; load it with from_pretrained(..., "
            "attn_implementation='flashmask'), or call model.set_attn_implementation('flashmask')"
        )
