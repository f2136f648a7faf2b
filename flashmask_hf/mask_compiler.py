"""Compiles what transformers asks of a mask, a `mask_function`, into int32 columns: the mask hook.

The functions of `transformers/masking_utils.py` show each key to the queries of one interval of positions, and so do
their conjunctions and unions: those are compiled from their structure, by a few operations on vectors. Any other
function is evaluated on all pairs, some columns at a time, and read back as intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import MODEL_MAPPING
from transformers.masking_utils import (
    _non_vmap_expansion_sdpa,
    _vmap_expansion_sdpa,
    bidirectional_mask_function,
    causal_mask_function,
)

from flashmask_hf.mask import FlashMask, MaskNotRepresentable
from flashmask_hf.ops import device_assert

__all__ = ["NAME", "VECTORS", "mask_hook", "next_true"]

NAME = "flashmask"
"""What `attn_implementation` is set to."""

VECTORS = "startend_row_indices"
"""The keyword of a model call that brings a mask of its own."""

_FAR = 2**30  # past every position

_DROP_KEYWORDS = {"nemotron"}
"""Types of models whose layers get no keywords of the model's call."""


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
    blocks that see themselves whole (images), their `and_masks` and `or_masks`, and a 2D padding mask on top: compiled
    from their structure, without anything of size Sq x Skv or a wait for the device. Any other function is evaluated
    on all pairs, in memory linear in Sq, and waits for the device. Neither happens more than once per forward and mask.

    Under `torch.compile` only causal, bidirectional, and packed documents with or without a window.

    Args:
        batch_size: number of rows of tokens, B.
        q_length: number of queries, Sq.
        kv_length: number of keys, Skv.
        q_offset: position of the first query; a tensor with a static cache.
        kv_offset: position of the first key.
        mask_function: what may see what, from `transformers/masking_utils.py` or of the caller's own.
        attention_mask: bool [B, up to kv_offset + Skv], False where a key is padding.
        device: where the result lives.
        kwargs: `config`, `local_size` and `use_vmap` are read; the others do not matter here.

    Returns:
        Tensor: int32 [B or 1, 1, Skv, n]. n = 1 is the causal form (LTS), n = 4 the form without `causal` (LTS, LTE,
        UTS, UTE); the latter also wherever the last query does not stand at the last key, as in a static cache.

    Raises:
        MaskNotRepresentable: a key is hidden from more than two intervals of queries.
        NotImplementedError: the model has attention code of its own, which would read the result as something else;
            or the function is another while compiling.
        RuntimeError: tokens of one block are not next to each other (a device-side check).
    """
    square = q_length == kv_length and not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0
    custom = bool(kwargs.get("use_vmap"))
    grid = _Grid(batch_size, torch.arange(kv_length, device=device) + kv_offset, square, custom)
    if torch.compiler.is_compiling():
        seen = _compiled_interval(mask_function, kwargs, grid)
    else:
        _refuse_unfit(type(kwargs.get("config")))
        seen = _interval(mask_function, grid)
    if seen is None:
        columns = _evaluated(mask_function, grid, q_length, q_offset)
    else:
        aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        start = (seen.end - q_offset).clamp(0, q_length).view(-1, kv_length)
        if seen.from_self and aligned:
            columns = start.unsqueeze(-1)
        else:
            end = (seen.start - q_offset).clamp(0, q_length).expand_as(start)
            columns = torch.stack([start, torch.full_like(start, q_length), torch.zeros_like(start), end], -1)
    columns = columns.to(torch.int32)
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        if missing > 0:
            attention_mask = nn.functional.pad(attention_mask, (0, missing))
        padding = ~attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        whole = [0] if columns.shape[-1] == 1 else [0, q_length, 0, 0]
        bounds = zip(columns.unbind(-1), whole, strict=True)
        columns = torch.stack([torch.where(padding, bound, column) for column, bound in bounds], -1)
    return columns[:, None]


class _Grid(NamedTuple):
    """Where keys stand."""

    batch: int
    key: Tensor  # positions, int64 [Skv] or, within packed documents, [B, Skv]
    square: bool  # whether queries and keys are the same tokens
    custom: bool  # whether a caller brought a function of its own (transformers then asks for vmap)


class _Interval(NamedTuple):
    """Positions [start, end) of the queries that see each key, int64 broadcastable to [B, Skv].

    Each contains the key's own position, except where start > end, which is none; so unions are intervals again.
    """

    start: Tensor
    end: Tensor
    from_self: bool  # whether start is the key's own position


def _interval(function: Callable[..., Any], grid: _Grid) -> _Interval | None:
    """What a function shows, from its structure; None if that is not known."""
    key = grid.key
    before, behind = torch.full_like(key, -_FAR), torch.full_like(key, _FAR)
    if function is causal_mask_function:
        return _Interval(key, behind, True)
    if function is bidirectional_mask_function:
        return _Interval(before, behind, False)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    closure = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
    match _origin(function), closure:
        case "and_masks", {"mask_functions": parts}:
            known = [_interval(part, grid) for part in parts]
            return None if None in known else _intersection([part for part in known if part is not None])
        case "or_masks", {"mask_functions": parts}:
            known = [_interval(part, grid) for part in parts]
            return None if None in known else _union([part for part in known if part is not None])
        case "sliding_window_overlay", {"sliding_window": int(window)} if window > 0:
            return _Interval(before, key + window, False)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(window)} if window >= 0:
            return _Interval(key - window, key + window + 1, False)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": padding}:
            padding = torch.as_tensor(padding, device=key.device).view(-1, 1)
            start = (key - padding).div(size, rounding_mode="floor") * size + padding
            return _Interval(start, start + size, False)
        case "packed_sequence_mask_function", {"packed_sequence_mask": documents} if grid.square and not grid.custom:
            start, end = _runs(documents[:, 1:] == documents[:, :-1])
            return _Interval(start, end, False)
        case "remap_positions_for_packed_sequence", {"mask_function": inner, "position_ids": positions} if grid.square:
            seen = _interval(inner, grid._replace(key=positions))
            if seen is None:
                return None
            row = torch.arange(positions.shape[-1], device=key.device) - positions  # of position 0 of its document
            return _Interval(seen.start + row, seen.end + row, seen.from_self)
        case "blockwise_overlay", {"block_sequence_ids": blocks}:
            return _blocks(blocks, key)
    return None


def _intersection(parts: list[_Interval]) -> _Interval:
    start, end = parts[0].start, parts[0].end
    for part in parts[1:]:
        start, end = torch.maximum(start, part.start), torch.minimum(end, part.end)
    return _Interval(start, end, any(part.from_self for part in parts))


def _union(parts: list[_Interval]) -> _Interval:
    start, end = parts[0].start, parts[0].end
    for part in parts[1:]:
        start, end = torch.minimum(start, part.start), torch.maximum(end, part.end)
    return _Interval(start, end, all(part.from_self for part in parts))


def _blocks(blocks: Tensor, key: Tensor) -> _Interval:
    """Tokens of one block, told by equal ids of 0 or more, see all of it; others nothing (start > end)."""
    first, end = _runs(blocks[:, 1:] == blocks[:, :-1])
    begins = (first == torch.arange(blocks.shape[-1], device=blocks.device)) & (blocks >= 0)
    unlike = -1 - torch.arange(blocks.shape[-1], device=blocks.device)
    ids = torch.where(begins, blocks, unlike).sort(-1).values
    device_assert(
        (ids[:, 1:] != ids[:, :-1]).all(),
        "tokens of one block (equal block_sequence_ids) are not next to each other, which the mask's columns cannot "
        "hold; use attn_implementation='sdpa' for this model",
    )
    inside = blocks >= 0
    first, end = torch.where(inside, first, _FAR), torch.where(inside, end, -_FAR)
    return _Interval(first[:, key], end[:, key], False)


def _runs(joined: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last position of the run that each position is in; int64 [B, S] each.

    Args:
        joined: bool [B, S - 1], whether the positions 1..S-1 belong to the run of the position before.
    """
    position = torch.arange(joined.shape[-1] + 1, device=joined.device)
    begins = nn.functional.pad(~joined, (1, 0), value=True)
    return torch.where(begins, position, 0).cummax(-1).values, next_true(~joined)


def next_true(flags: Tensor) -> Tensor:
    """For each position 0..S-1 the first later one that is flagged, S if none.

    Args:
        flags: bool [B, S - 1], of the positions 1..S-1.

    Returns:
        int64 [B, S].
    """
    length = flags.shape[-1] + 1
    row = torch.arange(1, length + 1, device=flags.device)
    flagged = nn.functional.pad(flags, (0, 1), value=True)
    return torch.where(flagged, row, length).flip(-1).cummin(-1).values.flip(-1)


def _evaluated(function: Callable[..., Any], grid: _Grid, q_length: int, q_offset: int | Tensor) -> Tensor:
    """The columns of any function, [B, Skv, 4], evaluated a slice of columns at a time."""
    batch, head = torch.arange(grid.batch, device=grid.key.device), torch.arange(1, device=grid.key.device)
    query = torch.arange(q_length, device=grid.key.device) + q_offset

    def visible(first: int, last: int) -> Tensor:
        if grid.custom:
            with TransformGetItemToIndex():  # vmap does not index by its own scalars otherwise
                pairs = _vmap_expansion_sdpa(function)(batch, head, query, grid.key[first:last])
        else:
            pairs = function(*_non_vmap_expansion_sdpa(batch, head, query, grid.key[first:last]))
        return pairs.expand(grid.batch, 1, q_length, last - first)

    kv_length = grid.key.shape[-1]
    try:
        mask = FlashMask.from_columns(visible, kv_length, causal=False)
    except MaskNotRepresentable as error:
        raise MaskNotRepresentable(
            f"attn_implementation='{NAME}' cannot hold the mask of {_origin(function)}: {error}. Or use "
            "attn_implementation='sdpa' for this model",
            error.columns,
        ) from None
    columns = mask.bidirectional().indices[:, 0]
    if columns.shape[-1] == 2:  # LTS, UTE
        start, end = columns.unbind(-1)
        columns = torch.stack([start, torch.full_like(start, q_length), torch.zeros_like(start), end], -1)
    return columns


def _compiled_interval(function: Callable[..., Any], hook_kwargs: dict[str, Any], grid: _Grid) -> _Interval:
    """What `_interval` says, told from the hook's arguments: a compiler shows a function's name, not its closure."""
    key = grid.key
    behind = torch.full_like(key, _FAR)
    if function is causal_mask_function:
        return _Interval(key, behind, True)
    if function is bidirectional_mask_function:
        return _Interval(torch.full_like(key, -_FAR), behind, False)
    window, config = hook_kwargs.get("local_size"), hook_kwargs.get("config")
    plain = not grid.custom and "allow_is_bidirectional_skip" not in hook_kwargs
    if window is not None:  # of a sliding window or of a chunk
        plain = plain and window == getattr(config, "sliding_window", None)
        plain = plain and window != getattr(config, "attention_chunk_size", None)
    # Python 3.10 gives a closure that is made while compiling its short name.
    if not plain or function.__qualname__ not in ("and_masks.<locals>.and_mask", "and_mask"):
        _refuse_pattern(function.__qualname__)
    row = torch.arange(1, key.shape[-1], device=key.device).view(1, -1)
    entry = torch.arange(grid.batch, device=key.device).view(-1, 1)
    # Causal documents are contiguous, so a key's ends where a row does not see the row before it.
    joined = function(entry, torch.zeros_like(entry), row, row - 1).expand(grid.batch, -1)
    end = next_true(~joined)
    return _Interval(key, end if window is None else torch.minimum(end, key + window), True)


def _origin(function: Callable[..., Any]) -> str:
    """The function of `transformers.masking_utils` that made a closure, or the full name of anything else."""
    name = getattr(function, "__qualname__", type(function).__name__)
    home = getattr(function, "__module__", "")
    return name.split(".")[0] if home == "transformers.masking_utils" else f"{home}.{name}"


def _refuse_pattern(name: str) -> NoReturn:
    raise NotImplementedError(
        f"attn_implementation='{NAME}' does not know the mask function {name} while compiling; use "
        f"attn_implementation='sdpa' for this model, or pass {VECTORS} and attention_mask=None if the model allows it"
    )


@cache
def _refuse_unfit(config_class: type) -> None:
    """Raise for a model that would add the columns to its scores, or keeps the vectors from its attention."""
    models: Any = MODEL_MAPPING.get(config_class, ())
    for model in models if isinstance(models, tuple) else (models,):
        if not model._supports_attention_backend:
            raise NotImplementedError(
                f"{model.__name__} has attention code of its own and does not take attn_implementation='{NAME}'; use "
                "attn_implementation='eager' for this model"
            )
    if getattr(config_class, "model_type", None) in _DROP_KEYWORDS:
        raise NotImplementedError(
            f"models of type {config_class.model_type!r} keep keywords from their layers, so {VECTORS} would be "
            f"ignored without a word; attn_implementation='{NAME}' refuses them: use attn_implementation='sdpa'"
        )
