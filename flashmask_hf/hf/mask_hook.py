"""The mask hook: compiles a `mask_function` of transformers into int32 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers.masking_utils import (
    _non_vmap_expansion_sdpa,
    _vmap_expansion_sdpa,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
)

from flashmask_hf.hf.call import Call, call_of, record_documents
from flashmask_hf.hf.documents import Documents, check_one_document, of_numbers
from flashmask_hf.hf.families import refuse_unsupported
from flashmask_hf.hf.keywords import check_window
from flashmask_hf.hf.layer_mask import LayerMask, marked_columns, marked_rows
from flashmask_hf.hf.mask_reader import Rows, TraceContext, trace
from flashmask_hf.hf.merge import check_form, may_attend_to_encoder, shown_earlier, supplied_mask
from flashmask_hf.intervals import hide_keys
from flashmask_hf.mask import FlashMask, MaskNotRepresentable
from flashmask_hf.names import FLASHMASK, VECTORS
from flashmask_hf.parallel.split import active_split
from flashmask_hf.torch_internals import device_assert

NUMBERS = torch.int32
"""The dtype of a 2D mask that holds the number of each token's document, from 1 on; of padding negative, at first 0."""


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
    """Return the columns of the mask that a model asks for, with the arguments of `sdpa_mask` in transformers.

    Functions of `transformers/masking_utils.py` and their combinations are traced (`mask_reader`). Any other is
    evaluated on all pairs, in memory linear in Sq, and waits for the device; a compiler refuses it.

    Args:
        batch_size: number of rows of tokens, B.
        q_length: number of queries, Sq.
        kv_length: number of keys, Skv.
        q_offset: position of the first query; a tensor with a static cache.
        kv_offset: position of the first key.
        mask_function: which query may see which key.
        attention_mask: bool [B, up to kv_offset + Skv], False where a key is padding; or numbers (`NUMBERS`).
        device: device of the result.
        kwargs: `config`, `local_size` and `use_vmap` are read.

    Returns:
        Tensor: int32 [B or 1, 1, n, Skv]: LTS of the causal form, or LTS, LTE, UTS, UTE, as `marked_columns`. In a
        model call that the mask could be joined with, marked rows (`marked_rows`).

    Raises:
        MaskNotRepresentable: a key is hidden from more than two intervals of queries.
        ValueError: the model has a sliding window of less than one token.
        NotImplementedError: the model has attention code of its own; or the function cannot be traced while compiling.
        RuntimeError: tokens of one block are not contiguous (a device-side check).
    """
    config = kwargs.get("config")
    implementation = getattr(config, "_attn_implementation", None) or FLASHMASK
    if not torch.compiler.is_compiling():
        refuse_unsupported(type(config), implementation)
    if kwargs.get("local_size") is not None:  # not every model hands its window to its layers
        check_window(kwargs["local_size"])
    same_tokens = q_length == kv_length and not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0
    key_positions = torch.arange(kv_length, device=device) + kv_offset
    call, documents = call_of(config, q_length), None
    if call is not None and active_split(q_length, call.indices) is not None:
        call = None  # shards of rows, whose layers exchange the others
    if attention_mask is not None and attention_mask.dtype == NUMBERS:
        documents, attention_mask = of_numbers(attention_mask.abs()), attention_mask > 0
    elif call is not None and call.indices is None and same_tokens:
        documents = call.documents
    documents = None if documents is None else documents.to(key_positions.device)
    indices = None if call is None else call.indices
    is_replaced = isinstance(indices, Tensor) and indices.dim() == 4 and indices.shape[3] > 1

    def nodes() -> Documents | None:
        if same_tokens and isinstance(indices, Tensor) and indices.shape[2:] == (q_length, 1):
            return of_numbers(indices[:, 0, :, 0].to(key_positions.device))  # tokens seen up to the same row
        return documents

    context = TraceContext(batch_size, key_positions, nodes, attention_mask, is_replaced)
    visible = trace(mask_function, context)
    span = None if visible is None else visible.span()
    if call is not None and call.named.get("encoder_hidden_states") is not None and (span is None or span[0] != 0):
        call = documents = None  # keys of an encoder
    is_row = (
        same_tokens
        and batch_size == 1
        and visible is not None
        and (visible.starts_at_key() or not may_attend_to_encoder(config))
    )
    if call is not None and call.indices is not None:
        rows = None
        if same_tokens and visible is not None and span is not None:
            rows = _supplied_rows(call, visible, span, attention_mask, device)
        if rows is not None:
            return rows
        call = None  # left to the layers
    elif call is not None and call.bounds is not None and not is_row:
        call = documents = None  # left to the layers, which refuse what they cannot do
    elif call is not None and not same_tokens and call.positions is not None:
        check_one_document(call.positions, attention_mask, q_offset)
        record_documents()
    if documents is not None:
        record_documents()
        if visible is None:
            numbers = documents.numbers().expand(batch_size, -1)
            mask_function = and_masks(mask_function, packed_sequence_mask_function(numbers))
        else:
            visible = visible & Rows(context, start=documents.start, end=documents.end)
    if visible is None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"attn_implementation='{implementation}' does not know the mask function {_full_name(mask_function)} "
                f"while compiling; use attn_implementation='sdpa' for this model, or pass {VECTORS} alone"
            )
        is_custom = bool(kwargs.get("use_vmap"))  # a function of the caller's own
        columns = _evaluate(mask_function, context, q_length, q_offset, is_custom, implementation)
    else:
        ends_together = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        columns = _columns_of(visible, kv_length, q_length, q_offset, ends_together)
    columns = _hide_padding(columns, attention_mask, q_length, kv_offset)
    if call is None:
        return marked_columns(columns)
    indices = columns.transpose(2, 3).contiguous()
    return marked_rows(LayerMask(FlashMask(indices, causal=indices.shape[3] == 1)))


def _supplied_rows(
    call: Call, visible: Rows, span: tuple[int | None, int | None], padding: Tensor | None, device: Any
) -> Tensor | None:
    """Return the caller's mask indices in the window `span` as marked rows, or None to leave them to the layers."""
    indices = call.indices
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32 or indices.dim() != 4 or indices.is_meta:
        return None
    lo, window = span
    causal, hooked = lo == 0, None
    if indices.shape[2] != call.tokens.shape[1] or (not causal and (None if lo is None else 1 - lo) != window):
        return None
    record_documents()
    check_form(indices, causal, call.config)
    if window is None and visible.distances is None and indices.shape[3] == 4 and _has_images_in_windows(call):
        device_assert(
            ~shown_earlier(FlashMask(indices, causal=False)).any(),
            f"{VECTORS} with n = 4 show tokens to earlier ones in every layer, but images are whole in the windows of "
            "this model alone; pass masks.causal_document(lengths).indices, beside which they are",
        )
    if padding is not None or visible.distances is not None:
        length = indices.shape[2]
        hooked = _hide_padding(_columns_of(visible, length, length, 0, True), padding, length, 0)
    return supplied_mask(indices.to(device), hooked, causal, window, call.positions, marked_rows)


def _has_images_in_windows(call: Call) -> bool:
    """Return whether a call has images that are whole in layers of a sliding window alone (Gemma 4)."""
    if getattr(call.config.get_text_config(), "use_bidirectional_attention", None) != "vision":
        return False
    calls: list[Call] = [call]
    while calls[-1].outer is not None:
        calls.append(calls[-1].outer)
    return any(one.named.get(name) is not None for one in calls for name in ("pixel_values", "pixel_values_videos"))


def _columns_of(visible: Rows, kv_length: int, q_length: int, q_offset: int | Tensor, ends_together: bool) -> Tensor:
    """Return LTS [B or 1, 1, Skv], or LTS, LTE, UTS, UTE [B or 1, 4, Skv] unless causal, of a traced function."""
    hidden_from = (visible.last() - q_offset).clamp(0, q_length).view(-1, kv_length)
    if ends_together and visible.starts_at_key():
        return hidden_from.unsqueeze(1)
    hidden_until = (visible.first() - q_offset).clamp(0, q_length).expand_as(hidden_from)
    last, first = torch.full_like(hidden_from, q_length), torch.zeros_like(hidden_from)
    return torch.stack([hidden_from, last, first, hidden_until], 1)


def _hide_padding(columns: Tensor, attention_mask: Tensor | None, q_length: int, kv_offset: int) -> Tensor:
    """Return columns [B or 1, n, Skv] as int32 [B or 1, 1, n, Skv], with the keys hidden where a 2D mask is False."""
    columns = columns.to(torch.int32)[:, None]
    if attention_mask is None:
        return columns
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be 2D [B, S], got shape {list(attention_mask.shape)}; write a dense 3D or 4D "
            f"mask as FlashMask.from_dense(mask).bidirectional().indices and pass it as {VECTORS}"
        )
    seen = kv_offset + columns.shape[-1]
    mask = nn.functional.pad(attention_mask, (0, max(0, seen - attention_mask.shape[-1])))
    padding = ~mask[:, None, kv_offset:seen].to(torch.bool)
    return torch.stack(hide_keys(columns.unbind(2), padding, columns.shape[2] == 1, q_length), 2)


def _evaluate(
    mask_function: Callable[..., Any],
    context: TraceContext,
    q_length: int,
    q_offset: int | Tensor,
    is_custom: bool,
    implementation: str,
) -> Tensor:
    """Evaluate any function on all pairs, in slices of columns; return its columns [B, 4, Skv]."""
    keys = context.key_positions
    batch, head = torch.arange(context.batch_size, device=keys.device), torch.arange(1, device=keys.device)
    query = torch.arange(q_length, device=keys.device) + q_offset

    def visible(first: int, last: int) -> Tensor:
        if is_custom:
            with TransformGetItemToIndex():  # vmap does not index by its own scalars otherwise
                pairs = _vmap_expansion_sdpa(mask_function)(batch, head, query, keys[first:last])
        else:
            pairs = mask_function(*_non_vmap_expansion_sdpa(batch, head, query, keys[first:last]))
        return pairs.expand(context.batch_size, 1, q_length, last - first)

    try:
        mask = FlashMask.from_columns(visible, keys.shape[-1], causal=False)
    except MaskNotRepresentable as error:
        raise MaskNotRepresentable(
            f"attn_implementation='{implementation}' cannot hold the mask of {_full_name(mask_function)}: {error}. Or "
            "use attn_implementation='sdpa' for this model",
            error.columns,
        ) from None
    return mask.bidirectional().indices[:, 0].transpose(1, 2)


def _full_name(function: Callable[..., Any]) -> str:
    """Return the function of `transformers.masking_utils` that made a closure, or the full name of anything else."""
    attribute = "__name__" if torch.compiler.is_compiling() else "__qualname__"  # which Dynamo does not read
    name = getattr(function, attribute, type(function).__name__)
    module = getattr(function, "__module__", "")
    return name.split(".")[0] if module == "transformers.masking_utils" else f"{module}.{name}"
