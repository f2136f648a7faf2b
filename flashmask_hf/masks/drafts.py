"""Masks of speculative drafters that predict blocks of tokens, such as DFlash."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer, as_length, check_tensor
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, Lengths, batch_lengths, batch_rows, device_of, from_array
from flashmask_hf.masks._columns import document_spans, make_mask


def draft_blocks(
    lengths: Lengths,
    anchors: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    block_size: int,
    *,
    device: Device = None,
) -> FlashMask:
    """Draft blocks of DFlash: each sees itself whole, and its document before its anchor.

    Queries are the N draft blocks, one after the other. Keys are the S tokens of the packed row, then the draft blocks.
    The mask is for `flashmask_attention` in a drafter's layers without a window.

    `draft_blocks([4, 3], [1, 3, 6], 2)`:

        1 . . . . . . 1 1 . . . .
        1 . . . . . . 1 1 . . . .
        1 1 1 . . . . . . 1 1 . .
        1 1 1 . . . . . . 1 1 . .
        . . . . 1 1 . . . . . 1 1
        . . . . 1 1 . . . . . 1 1

    Args:
        lengths: as `documents`. S is the number of tokens of the longest packed row; shorter rows are padded to it.
        anchors: position of each block in the packed row, 0..S-1, ascending; a list of lists for a batch, or an int
            tensor or array [N] or [B, N]. N is the largest number of blocks per row; rows with fewer end in blocks that
            see nothing and are not seen.
        block_size: draft tokens per block, at least 1.

    Returns:
        FlashMask: indices [B, 1, S + N * block_size, 2], not causal, with q_len = N * block_size.

    Raises:
        TypeError: an anchor or `block_size` is not an int.
        ValueError: `anchors` do not ascend, lie outside their packed row or are none, their rows are not as many as the
            rows of `lengths`, or `block_size` is less than 1.

    Example:
        >>> draft_blocks([4, 3], [1, 3, 6], 2).indices[0, 0].T
        tensor([[4, 4, 4, 4, 6, 6, 6, 2, 2, 4, 4, 6, 6],
                [0, 2, 2, 4, 4, 4, 6, 0, 0, 2, 2, 4, 4]], dtype=torch.int32)
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


def _batch_anchors(anchors: Sequence[int] | Sequence[Sequence[int]] | Tensor, tokens: list[int]) -> list[list[int]]:
    """Return the checked anchors of each packed row; `tokens` are the rows' numbers of tokens."""
    value = from_array(anchors)
    if isinstance(value, Tensor):
        value = check_tensor("anchors", value, "an integer", "[N]", "[B, N]").tolist()
    rows = batch_rows("anchors", value, (list, tuple), empty=True)
    if len(rows) != len(tokens):
        raise ValueError(f"anchors has {len(rows)} rows, but lengths has {len(tokens)}; give a list of anchors per row")
    found: list[list[int]] = []
    for (path, row), length in zip(rows, tokens, strict=True):
        found.append([])
        for k, anchor in enumerate(row):
            low = found[-1][-1] if k else 0
            why = "anchors ascend within the packed row; sort them, and the blocks with them"
            found[-1].append(as_integer(f"{path}[{k}]", anchor, low, length - 1, why=why))
    return found
