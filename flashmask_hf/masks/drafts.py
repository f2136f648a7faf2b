"""Masks of speculative drafters that predict several tokens at once: blocks (DFlash) or chains (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashmask_hf._numbers import as_integer, as_length
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import (
    Device,
    Lengths,
    as_list,
    batch_lengths,
    batch_rows,
    check_one_row,
    device_of,
    key_count,
    positive,
)
from flashmask_hf.masks._columns import document_spans, make_mask

Numbers: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | Tensor"
"""A number for each anchor: a list, a list of lists for a batch, or an int tensor or array [N] or [B, N]."""


def draft_blocks(
    lengths: Lengths,
    anchors: Numbers,
    block_size: int,
    *,
    device: Device = None,
) -> FlashMask:
    """Draft blocks of DFlash: each sees itself whole, and its document before its anchor.

    Queries are the N draft blocks. Keys are the S tokens of the packed row, then the draft blocks. The mask is for
    `flashmask_attention` in layers without a window.

    `draft_blocks([3, 2], [2, 4], 2)`:

        1 1 . . . 1 1 . .
        1 1 . . . 1 1 . .
        . . . 1 . . . 1 1
        . . . 1 . . . 1 1

    Args:
        lengths: as `documents`. S is the number of tokens of the longest packed row.
        anchors: position of each block in the packed row, 0..S-1, ascending; a list, a list of lists, or an int tensor
            or array [N] or [B, N]. Rows with fewer than N blocks end in blocks that see nothing.
        block_size: draft tokens per block, at least 1.

    Returns:
        FlashMask: indices [B, 1, S + N * block_size, 2], not causal, with q_len = N * block_size.

    Raises:
        ValueError: `anchors` do not ascend, lie outside their packed row, are none, or are for other rows than
            `lengths`, or `block_size` is less than 1.

    Example:
        >>> draft_blocks([3, 2], [2, 4], 2).indices[0, 0].T
        tensor([[2, 2, 2, 4, 4, 2, 2, 4, 4],
                [0, 0, 2, 2, 4, 0, 0, 2, 2]], dtype=torch.int32)
    """
    documents, context = batch_lengths("lengths", lengths, None)
    blocks = _batch_anchors(anchors, [sum(row) for row in documents])
    block_size = as_integer("block_size", block_size, 1, why="a block has at least one token")
    count = max(len(row) for row in blocks)
    q_len = as_length("the number of draft tokens", count * block_size)

    # A key is seen by the blocks of its document with later anchors; without a block, an anchor is past all documents.
    anchor = torch.tensor([[*row, *[context] * (count - len(row))] for row in blocks], device="cpu")[:, None]
    _, end = document_spans(documents, context)
    key = torch.arange(context, device="cpu").expand_as(end).contiguous()
    first, last = torch.searchsorted(anchor, key, right=True), torch.searchsorted(anchor, end)

    own = (torch.arange(q_len, device="cpu") // block_size).expand(len(blocks), 1, q_len)
    present = own < torch.tensor([len(row) for row in blocks], device="cpu")[:, None, None]
    first = torch.cat([first, own], -1) * block_size
    last = torch.cat([last, (own + 1) * present], -1) * block_size
    # In positions, the draft blocks follow the packed row.
    return make_mask(last + context, first + context, causal=False, q_len=q_len, device=device_of(device, lengths))


def draft_chains(
    lengths: Lengths,
    anchors: Numbers,
    depths: Numbers,
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Chains of draft tokens (P-EAGLE): each sees itself causally, and its document up to its anchor.

    A document has its chains in the order of their anchors, then its own tokens from the last to the first.
    `draft_chains_order` returns the token and the depth of each row. Chains of mask tokens (PARD, multi-token
    prediction) have the same mask.

    `draft_chains([3, 1], [1, 2], [2, 1])`, rows of two chains and tokens 2 1 0, then of a document of one token:

        1 . . . 1 1 .
        1 1 . . 1 1 .
        . . 1 1 1 1 .
        . . . 1 1 1 .
        . . . . 1 1 .
        . . . . . 1 .
        . . . . . . 1

    Args:
        lengths: as `documents`, without chains.
        anchors: the token that each chain follows, in the forms of `draft_blocks`.
        depths: draft tokens per chain, at least 1, in the form of `anchors`.
        kv_len: number of keys, tokens and chains; None is the longest packed row.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal. A causal model takes `bidirectional().indices`.

    Raises:
        ValueError: `anchors` do not ascend or lie outside their packed row, a depth is less than 1, or depths and
            anchors are not one to one.

    Example:
        >>> draft_chains([3, 1], [1, 2], [2, 1]).indices[0, 0].T
        tensor([[2, 2, 3, 4, 5, 6, 7],
                [0, 1, 2, 2, 0, 0, 6]], dtype=torch.int32)
    """
    rows = _chain_rows(lengths, anchors, depths)
    kv_len = key_count("lengths", [[row.last.shape[0]] for row in rows], kv_len)
    last, first = (
        torch.stack([pad(x, (0, kv_len - x.shape[0])) for x in columns])[:, None]
        for columns in ([row.last for row in rows], [row.first for row in rows])
    )  # padding ends at 0
    return make_mask(last, first, causal=False, q_len=q_len, device=device_of(device, lengths))


def draft_chains_order(
    lengths: Lengths, anchors: Numbers, depths: Numbers, *, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Return the token of each row of `draft_chains`, and its depth in a chain.

    Args:
        lengths: tokens of each document of one packed row, without chains.
        anchors: this and the following as in `draft_chains`.
        depths: see there.
        device: see there.

    Returns:
        tuple: two tensors [S], where S counts tokens and draft tokens.

            * index: int64, the row's token, counted through all documents, or its chain's anchor, whose hidden state
              it reads.
            * depth: int64, 0 for a token, 1, 2, ... along a chain. The row's position is `position_ids[index] + depth`,
              and it predicts the token `index + depth + 1`, if that is in the same document.

    Raises:
        ValueError: as `draft_chains`, or `lengths` has several packed rows.

    Example:
        >>> index, depth = draft_chains_order([3, 1], [1, 2], [2, 1])
        >>> index
        tensor([1, 1, 2, 2, 1, 0, 3])
        >>> depth
        tensor([1, 2, 1, 0, 0, 0, 0])
    """
    rows = _chain_rows(lengths, anchors, depths)
    check_one_row(len(rows))
    device = device_of(device, lengths)
    return rows[0].index.to(device), rows[0].depth.to(device)


class _ChainRows(NamedTuple):
    """Rows of one packed row with chains in mirrored order, int64 [rows] each."""

    first: Tensor  # first row that sees the key
    last: Tensor  # the row after the last that sees it
    index: Tensor
    depth: Tensor


def _chain_rows(lengths: Lengths, anchors: Numbers, depths: Numbers) -> list[_ChainRows]:
    documents, _ = batch_lengths("lengths", lengths, None)
    starts = _batch_anchors(anchors, [sum(row) for row in documents])
    sizes = _rows_of("depths", depths, len(documents))
    for (path, row), own in zip(sizes, starts, strict=True):
        if len(row) != len(own):
            raise ValueError(f"{path} has {len(row)} chains, but anchors has {len(own)}; give a depth for each anchor")
    counts = [positive(*row, "a chain has at least one token") for row in sizes]
    key_count("lengths and depths", [[*a, *b] for a, b in zip(documents, counts, strict=True)], None)
    return [_mirror(*row) for row in zip(documents, starts, counts, strict=True)]


def _mirror(lengths: list[int], anchors: list[int], depths: list[int]) -> _ChainRows:
    length, anchor, count = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (lengths, anchors, depths))
    end, before = length.cumsum(0), pad(count.cumsum(0), (1, 0))  # rows of chains before each chain
    start = end - length
    token, draft = torch.arange(sum(lengths), device="cpu"), torch.arange(sum(depths), device="cpu")
    own = torch.searchsorted(end, token, right=True)
    chain = torch.searchsorted(before[1:], draft, right=True)
    # A token is seen from the first chain on whose anchor is not before it, or from its document's last token on.
    first = start[own] + before[torch.searchsorted(anchor, token)]
    row = end[own] + before[torch.searchsorted(anchor, end)][own] - 1 - (token - start[own])
    chain_row = start[torch.searchsorted(end, anchor, right=True)][chain] + draft
    depth = draft - before[chain] + 1
    place = torch.cat([chain_row, row])
    columns = (
        (chain_row, first),
        (chain_row + count[chain] - depth + 1, row + 1),
        (anchor[chain], token),
        (depth, torch.zeros_like(token)),
    )
    return _ChainRows(*(torch.empty_like(place).scatter(0, place, torch.cat(pair)) for pair in columns))


def _rows_of(name: str, value: Numbers, count: int) -> list[tuple[str, Sequence[Any]]]:
    """Return the (name for errors, row) pairs of `count` packed rows from an argument."""
    rows = batch_rows(name, as_list(name, value, "[N]", "[B, N]"), (list, tuple), empty=True)
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows, but lengths has {count}; give a list of {name} per row")
    return rows


def _batch_anchors(anchors: Numbers, tokens: list[int]) -> list[list[int]]:
    """Return the checked anchors of each packed row of `tokens` tokens."""
    found: list[list[int]] = []
    for (path, row), length in zip(_rows_of("anchors", anchors, len(tokens)), tokens, strict=True):
        found.append([])
        for k, anchor in enumerate(row):
            low = found[-1][-1] if k else 0
            why = "anchors ascend within the packed row; sort them, and what belongs to them"
            found[-1].append(as_integer(f"{path}[{k}]", anchor, low, length - 1, why=why))
    return found
