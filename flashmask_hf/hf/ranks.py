"""Attention of a layer whose rank holds a shard of a packed row (`flashmask_hf.parallel`), or of the heads.

The mask is built for the whole row. Then ranks exchange heads for rows, or gather keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashmask_hf.dropout import BLOCK, draw_seed, shard_seed
from flashmask_hf.hf.late import late_mask, whole_heads
from flashmask_hf.hf.layer_mask import LayerMask, cached_mask, columns_of, hidden_keys
from flashmask_hf.intervals import count_rows_before, without_causal_flag
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.parallel.collectives import all_gather
from flashmask_hf.parallel.exchange import (
    exchange_of,
    gather_keys,
    heads_to_rows,
    own_heads,
    rows_to_heads,
    spread_kv_heads,
)
from flashmask_hf.parallel.split import RowSplit, refuse_rope_by_length
from flashmask_hf.torch_internals import device_assert


def attend_in_parts(
    split: RowSplit,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Return the attention of this rank's rows, [B, S / N, Hq, Dv].

    The arguments after `split` are as in `attention_forward`; `dropout` is 0 in evaluation.

    Raises:
        ValueError: as in `attention_forward`; there is a cache; or the model chooses its rotary frequencies by the
            longest position.
        RuntimeError: a 2D attention_mask hides tokens, `position_ids` do not match the rows, or rows with dropout are
            not split in blocks of 16 (device-side checks).
    """
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"a layer has {query.shape[2]} rows of a row that is split over processes, but {key.shape[2]} keys; pass "
            "use_cache=False"
        )
    if attention_mask is not None:
        _refuse_padding(attention_mask)
    refuse_rope_by_length(getattr(module, "config", None))
    _check_positions(kwargs.get("position_ids"), split)
    kwargs = kwargs | {"position_ids": split.position_ids}
    heads, sinks = query.shape[1], kwargs.get("s_aux")
    settings: dict[str, Any] = {"scale": scaling, "softcap": kwargs.get("softcap"), "sinks": sinks}
    shared_seed: Any = all_gather(draw_seed(query), split.group)[0] if dropout else None

    def draw(head: int, blocks: Tensor) -> None:
        """Set the dropout of some of this rank's heads, from `head` on."""
        settings["dropout"] = dropout
        settings["dropout_seed"] = shard_seed(shared_seed, _first_head(module, heads) + head, blocks)

    if exchange_of(heads, key.shape[1], split.group.size, split.exchange) == "keys":
        key, value = gather_keys(key, split), gather_keys(value, split)
        whole_query = query[:, :, :1].expand(-1, -1, split.length, -1)  # only its shape [.., S, D] is read
        mask = _own_rows(late_mask(module, whole_query, key, None, kwargs), split, keys_in_order=dropout > 0)
        if dropout:
            draw(0, _own_blocks(split))
        return mask.attend(query, key, value, **settings).transpose(1, 2)
    if kwargs[VECTORS].shape[1] > 1:
        raise NotImplementedError(
            f"{VECTORS} per head are not implemented for ranks that exchange heads; pass exchange='keys' to "
            "sequence_parallel"
        )
    tensors = query, spread_kv_heads(key, split), spread_kv_heads(value, split)
    query, key, value = rows_to_heads(tensors, split)
    mask = late_mask(module, query, key, None, kwargs)
    if sinks is not None:
        settings["sinks"] = own_heads(sinks, split)
    if dropout:
        draw(split.group.rank * query.shape[1], _all_blocks(query))
    return heads_to_rows(mask.attend(query, key, value, **settings), split)


def seed_of_heads(module: nn.Module, query: Tensor) -> Tensor | None:
    """Return dropout's seed of a layer [B, Hq / N, Sq, D] on a rank, or None."""
    first_head = _first_head(module, query.shape[1])
    if first_head == 0:
        return None
    return shard_seed(draw_seed(query), first_head, _all_blocks(query))


def _first_head(module: nn.Module, heads: int) -> int:
    """Return the number of a rank's first head under tensor parallelism, whose ranks are neighbours."""
    whole = whole_heads(module, heads)
    if heads >= whole or whole % heads or not (dist.is_available() and dist.is_initialized()):
        return 0  # a decoder's layer may have other heads than the config's, which are the encoder's
    return dist.get_rank() % (whole // heads) * heads


def _all_blocks(query: Tensor) -> Tensor:
    return torch.arange(-(-query.shape[2] // BLOCK), device=query.device)


def _own_blocks(split: RowSplit) -> Tensor:
    def build() -> Tensor:
        own = split.own_rows
        blocks = own[::BLOCK] // BLOCK
        rows = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=own.device)).flatten()
        device_assert(
            (rows[: len(own)] == own).all(),
            f"attention dropout needs rows split over processes in blocks of {BLOCK}; set pad_to_multiple_of="
            f"{BLOCK * split.group.size}, or load the model with attention dropout 0",
        )
        return blocks

    return cached_mask((split.rows,), ("blocks", split.group), build, per_forward=False)


def _refuse_padding(attention_mask: Any) -> None:
    """Raise if a 2D mask, which covers this shard alone, hid a key."""
    columns = columns_of(attention_mask)

    def check() -> None:
        device_assert(
            ~hidden_keys(columns, columns.shape[3]).any(),
            "a 2D attention_mask hides tokens of a row that is split over processes; leave it out, "
            f"{VECTORS} mark padding",
        )

    cached_mask((columns,), ("padding",), check)


def _check_positions(position_ids: Any, split: RowSplit) -> None:
    """Raise if a layer's positions [B or 1, S / N], if it gets them, differ from the split's."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != split.rows.shape[1]:
        return

    def check() -> None:
        device_assert(
            (position_ids == split.own_positions.to(position_ids.device)).all(),
            "position_ids of a shard are missing, or differ from those that sequence_parallel was given; make "
            "the inputs of the model with split.shard(batch), or pass split.own_positions",
        )

    sources = (position_ids, split.position_ids, split.rows)
    cached_mask(sources, ("positions", split.group), check, per_forward=False)


def _own_rows(whole: LayerMask, split: RowSplit, *, keys_in_order: bool) -> LayerMask:
    """Return the mask of this rank's rows and of the keys as they are gathered, or in the order of the row."""

    def build() -> LayerMask:
        mask, length = whole.mask, split.length
        device_assert(  # counting rows would cut it off; other masks are checked with their plan
            ((mask.indices >= 0) & (mask.indices <= length)).all(),
            f"{VECTORS} must lie in 0..{length}, the row's length, as they do in a mask made for this row; "
            f"FlashMask.validate(q_len={length}) names the columns",
        )
        indices = without_causal_flag(mask.indices, mask.causal, length)
        keys = whole.keys
        if keys is None and split.order is not None and split.places is not None:
            if keys_in_order:
                keys = split.places[None]
            else:
                indices = indices.index_select(2, split.order)
        elif keys is not None and split.places is not None:
            keys = split.places[keys]
        own = split.own_rows
        return LayerMask(FlashMask(count_rows_before(indices, own), causal=False, q_len=own.shape[0]), keys)

    return cached_mask(
        (whole.mask.indices, split.rows), ("own rows", split.group, keys_in_order), build, per_forward=False
    )
