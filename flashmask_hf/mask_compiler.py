"""Compiles what transformers asks of a mask, a `mask_function`, into int32 columns: the mask hook.

The functions of `transformers/masking_utils.py` show each key to the queries of one interval of positions, and so do
their conjunctions and unions. Those are read (`mask_reader.py`), in a few operations on vectors. Any other function is
evaluated on all pairs, some columns at a time, and read back as intervals.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.masking_utils import (
    _non_vmap_expansion_sdpa,
    _vmap_expansion_sdpa,
    causal_mask_function,
)

from flashmask_hf.mask import FlashMask, MaskNotRepresentable
from flashmask_hf.mask_reader import Sight, read

__all__ = ["NAME", "VECTORS", "mask_hook", "refuse_own_code"]

NAME = "flashmask"
"""What `attn_implementation` is set to."""

VECTORS = "startend_row_indices"
"""The keyword of a model call that brings a mask of its own."""

_DROPS = f"keep keywords from their layers, so {VECTORS} would be ignored without a word"
_EDITS = "cut or join the masks of their layers, which takes dense ones"
_UNFIT = {
    "bigbird_pegasus": _EDITS,
    "deepseek_v4": _EDITS,
    "gemma4_audio": _EDITS,
    "nemotron": _DROPS,
    "qwen4_exp_text": _EDITS,
    "siglip2_text_model": _DROPS,
    "siglip_text_model": _DROPS,
    "stablelm": _DROPS,
    "t5gemma2_decoder": _EDITS,
    "whisper": _DROPS,
}
"""Types of models that do what this backend cannot follow, and what that is."""


def mask_hook(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Columns for what a model asks for; arguments as in `sdpa_mask` of `transformers/masking_utils.py`.

    Causal, bidirectional, sliding window, chunked, packed documents (which transformers finds in `position_ids`) and
    blocks that see themselves whole (images), their `and_masks` and `or_masks`, and functions of a caller that do the
    same, with a 2D padding mask on top: without anything of size Sq x Skv or a wait for the device, also under
    `torch.compile`. Any other function is evaluated on all pairs, in memory linear in Sq, and waits for the device; a
    compiler refuses it. Neither happens more than once per forward and mask.

    Args:
        batch_size: number of rows of tokens, B.
        q_length: number of queries, Sq.
        kv_length: number of keys, Skv.
        q_offset: position of the first query; a tensor with a static cache.
        kv_offset: position of the first key.
        mask_function: what may see what, from `transformers/masking_utils.py` or of the caller's own.
        attention_mask: bool [B, up to kv_offset + Skv], False where a key is padding.
        device: where the result lives.
        kwargs: `config` and `use_vmap` are read; the others do not matter here.

    Returns:
        Tensor: int32 [B or 1, 1, n, Skv], keys last as in other masks of transformers, which keeps vectors that a
        caller passes as `attention_mask` from being taken for this. n = 1 is the causal form (LTS), n = 4 the form
        without `causal` (LTS, LTE, UTS, UTE); the latter also wherever the last query does not stand at the last key,
        as in a static cache.

    Raises:
        MaskNotRepresentable: a key is hidden from more than two intervals of queries.
        NotImplementedError: the model has attention code of its own, which would read the result as something else;
            or the function cannot be told while compiling.
        RuntimeError: tokens of one block are not next to each other, or positions do not count on within a document
            (device-side checks).
    """
    square = q_length == kv_length and not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0
    key = torch.arange(kv_length, device=device) + kv_offset
    sight = Sight(batch_size, key, square, custom=bool(kwargs.get("use_vmap")))
    config = kwargs.get("config")
    name = getattr(config, "_attn_implementation", None) or NAME
    if not torch.compiler.is_compiling():
        _refuse_unfit(type(config), name)
    seen = read(mask_function, sight)
    if seen is None:
        if torch.compiler.is_compiling():
            _refuse_pattern(_origin(mask_function), name)
        columns = _evaluated(mask_function, sight, q_length, q_offset, name)
    else:
        aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        start = (seen.end - q_offset).clamp(0, q_length).view(-1, kv_length)
        if seen.from_self and aligned:
            columns = start.unsqueeze(1)
        else:
            end = (seen.start - q_offset).clamp(0, q_length).expand_as(start)
            columns = torch.stack([start, torch.full_like(start, q_length), torch.zeros_like(start), end], 1)
    columns = columns.to(torch.int32)
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be 2D [B, S], got shape {list(attention_mask.shape)}; write a dense 3D or 4D "
                f"mask as FlashMask.from_dense(mask).indices and pass it as {VECTORS}"
            )
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        if missing > 0:
            attention_mask = nn.functional.pad(attention_mask, (0, missing))
        padding = ~attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        whole = [0] if columns.shape[1] == 1 else [0, q_length, 0, 0]
        bounds = zip(columns.unbind(1), whole, strict=True)
        columns = torch.stack([torch.where(padding, bound, column) for column, bound in bounds], 1)
    return columns[:, None]


def _evaluated(function: Callable[..., Any], sight: Sight, q_length: int, q_offset: int | Tensor, name: str) -> Tensor:
    """The columns of any function, [B, 4, Skv], evaluated a slice of columns at a time; `name` is the backend's."""
    batch, head = torch.arange(sight.batch_size, device=sight.key.device), torch.arange(1, device=sight.key.device)
    query = torch.arange(q_length, device=sight.key.device) + q_offset

    def visible(first: int, last: int) -> Tensor:
        if sight.custom:
            with TransformGetItemToIndex():  # vmap does not index by its own scalars otherwise
                pairs = _vmap_expansion_sdpa(function)(batch, head, query, sight.key[first:last])
        else:
            pairs = function(*_non_vmap_expansion_sdpa(batch, head, query, sight.key[first:last]))
        return pairs.expand(sight.batch_size, 1, q_length, last - first)

    kv_length = sight.key.shape[-1]
    try:
        mask = FlashMask.from_columns(visible, kv_length, causal=False)
    except MaskNotRepresentable as error:
        raise MaskNotRepresentable(
            f"attn_implementation='{name}' cannot hold the mask of {_origin(function)}: {error}. Or use "
            "attn_implementation='sdpa' for this model",
            error.columns,
        ) from None
    columns = mask.bidirectional().indices[:, 0]
    if columns.shape[-1] == 2:  # LTS, UTE
        start, end = columns.unbind(-1)
        columns = torch.stack([start, torch.full_like(start, q_length), torch.zeros_like(start), end], -1)
    return columns.transpose(1, 2)


def _origin(function: Callable[..., Any]) -> str:
    """The function of `transformers.masking_utils` that made a closure, or the full name of anything else."""
    name = getattr(function, "__qualname__", type(function).__name__)
    home = getattr(function, "__module__", "")
    return name.split(".")[0] if home == "transformers.masking_utils" else f"{home}.{name}"


def _refuse_pattern(function: str, name: str) -> NoReturn:
    raise NotImplementedError(
        f"attn_implementation='{name}' does not know the mask function {function} while compiling; use "
        f"attn_implementation='sdpa' for this model, or pass {VECTORS} and attention_mask=None if the model allows it"
    )


def refuse_own_code(model_class: Any, name: str) -> None:
    """Raise for a model that does not look its attention up by name: it would add the hook's columns to its scores.

    Code that cannot be read, such as a notebook's, is taken for code that does.
    """
    if model_class._supports_attention_backend or model_class._can_set_attn_implementation():
        return
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and _is_readable(module):
        raise NotImplementedError(
            f"{model_class.__name__} has attention code of its own and does not take attn_implementation='{name}'; use "
            "attn_implementation='eager' for this model"
        )


def _is_readable(module: ModuleType) -> bool:
    try:
        return bool(inspect.getsource(module))
    except (OSError, TypeError):
        return False


@cache
def _refuse_unfit(config_class: type, name: str) -> None:
    """Raise for a model that would add the columns to its scores, or keeps the vectors from its attention.

    Models with code of their own are refused when they are made (`upstream.py`); here those whose config was told of
    this backend later.
    """
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        listed: Any = mapping.get(config_class, ())
        for model in listed if isinstance(listed, tuple) else [listed]:
            refuse_own_code(model, name)
    reason = _UNFIT.get(getattr(config_class, "model_type", ""))
    if reason is not None:
        raise NotImplementedError(
            f"models of type {config_class.model_type!r} {reason}; attn_implementation='{name}' refuses them: use "
            "attn_implementation='sdpa', or 'eager'"
        )
