"""Run a model's backbone on packed rows while its head, and every loss after it, keep their usual batch.

A batch brings both: the usual `input_ids` of one sequence per answer, and the packed rows in which every question
stands once. Hooks on the backbone swap the first for the second on the way in, and on the way out lay the hidden
states out as if each answer had been run with a question of its own. Nothing is replaced, so adapters, wrappers of
distributed training and TRL's fused language model head work as they do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from flashmask_hf import backend

if TYPE_CHECKING:  # the collators import this module
    from flashmask_hf.collators.forest import PackedRows

__all__ = ["check_compiled", "check_layers", "packed_inputs", "run_packed"]

_IDS, _POSITIONS, _INDEX = "packed_input_ids", "packed_position_ids", "packed_index"
_VECTORS = "startend_row_indices"


def packed_inputs(rows: PackedRows, index: Tensor) -> dict[str, Tensor]:
    """What a batch holds besides the usual keys.

    Args:
        rows: the packed rows, [R, S].
        index: int64 [N, L], the place in the flattened rows of each token of the usual batch. Places that nothing
            reads, such as padding, may hold any; different ones, or their zero gradients queue up at one row.

    Returns:
        `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1]; and
        `packed_index`.
    """
    batch = rows.batch()
    return {
        _IDS: batch["input_ids"],
        _POSITIONS: batch["position_ids"],
        _VECTORS: batch[_VECTORS],
        _INDEX: index,
    }


def run_packed(model: Any) -> None:
    """Make a model take the keys of `packed_inputs`; repeating it is fine. Calls without them run as before.

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.

    Raises:
        ValueError: the model's attention is not "flashmask", under which alone a packed row means what it says; or the
            model is not a decoder alone, or makes positions of its own. Models of which some layers do not get the
            mask, such as recurrent ones, raise in their first forward (`check_layers`).
    """
    inner = _inner(model)
    backbone = inner.base_model
    _check_attention(backbone)
    name = type(inner).__name__
    if inner.config.is_encoder_decoder or any(getattr(part, "is_causal", None) is False for part in backbone.modules()):
        raise ValueError(f"{name} is not a causal decoder, and packed rows are causal; use TRL's own trainer for it")
    for path, part in backbone.named_modules():
        if isinstance(part, nn.Embedding) and "position" in path and part.padding_idx is not None:
            raise ValueError(
                f"{name} counts positions from {part.padding_idx + 1}, and packed rows from 0; use TRL's own trainer"
            )
    check_layers(model)
    if _enter not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_enter, with_kwargs=True)
        backbone.register_forward_hook(_leave, with_kwargs=True)


def check_layers(model: Any) -> None:
    """Make a model raise in its first forward on packed rows if some of its layers do not get their mask.

    Layers that are not attention, recurrent and convolutional ones, carry tokens from one document to the next. A layer
    that has both side by side is not found out. Repeating it is fine.

    Args:
        model: a transformers model with a head and attention "flashmask", or a PEFT model around one, not wrapped for
            distributed training. Its first forward with `startend_row_indices` raises ValueError, or, where it is
            compiled in whole or in part, `check_compiled`.
    """
    backbone = _inner(model).base_model
    if _count_before not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_count_before, with_kwargs=True)
        backbone.register_forward_hook(_check_count, with_kwargs=True)


def check_compiled(model: Any, device: torch.device) -> None:
    """What `check_layers` asks for, of a model that is compiled: calls of compiled layers cannot be counted.

    The first time, a row of two documents of one token runs through it, not compiled and without gradients.

    Args:
        model: as for `check_layers`, or wrapped for distributed training or compilation. One that is not compiled, or
            that nothing is asked of, stays as it is.
        device: that of its inputs.

    Raises:
        ValueError: some of its layers do not get the mask.
    """
    if getattr(model, "_layers_checked", False):  # to find the backbone takes milliseconds
        return
    backbone = _inner(extract_model_from_parallel(model, keep_torch_compile=False)).base_model
    if not getattr(backbone, "_layers_checked", False):
        asked = _count_before in backbone._forward_pre_hooks.values()
        if not asked or not _is_compiled(model):
            return
        calls = backend.supplied_calls
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        ends = torch.tensor([[[[1], [2]]]], dtype=torch.int32, device=device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(input_ids=ids, position_ids=ids, startend_row_indices=ends, use_cache=False)
        _judge(backbone, backend.supplied_calls - calls)
    model._layers_checked = True


def _inner(model: Any) -> Any:
    """The transformers model that a PEFT model is around."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it is, by `torch.compile` or its method `compile`."""
    return any(isinstance(x, OptimizedModule) or x._compiled_call_impl is not None for x in model.modules())


def _enter(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get(_IDS) is None:
        return None
    _check_attention(backbone)
    packed = {key: value for key, value in kwargs.items() if key not in (_IDS, _POSITIONS, "inputs_embeds")}
    packed |= {"input_ids": kwargs[_IDS], "position_ids": kwargs[_POSITIONS], "attention_mask": None}
    return (), packed


def _leave(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    index = kwargs.get(_INDEX)
    if index is None:
        return None
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[index]
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(states.flatten(0, 1)[index] for states in output.hidden_states)
    if output.get("router_logits") is not None:  # of a mixture of experts, [R * S, experts] each
        output.router_logits = tuple(logits[index.flatten().to(logits.device)] for logits in output.router_logits)
    return output


def _count_before(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get(_VECTORS) is not None and not torch.compiler.is_compiling():  # which would guard on the count
        backbone._calls_before = backend.supplied_calls


def _check_count(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Once for a backbone, unless layers are compiled."""
    if kwargs.get(_VECTORS) is None or torch.compiler.is_compiling() or getattr(backbone, "_layers_checked", False):
        return
    if not _is_compiled(backbone):
        _judge(backbone, backend.supplied_calls - backbone._calls_before)


def _judge(backbone: Any, calls: int) -> None:
    """Every layer has called attention with the packed row's mask."""
    layers = backbone.config.get_text_config().num_hidden_layers
    if calls < layers:
        raise ValueError(
            f"{type(backbone).__name__} gave the packed row's mask to {calls} of its {layers} layers; in the others "
            "documents or answers would see each other, so this model cannot take packed rows: use TRL's own trainer"
        )
    backbone._layers_checked = True


def _check_attention(backbone: Any) -> None:
    name = backbone.config._attn_implementation
    if name != "flashmask":
        raise ValueError(
            f"packed rows need attn_implementation='flashmask', but the model has {name!r}, with which answers see "
            "each other, or not all that they should; load it with from_pretrained(..., "
            "attn_implementation='flashmask'), or call model.set_attn_implementation('flashmask')"
        )
