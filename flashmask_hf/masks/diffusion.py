"""Masks of block diffusion language models (BD3LM, ICLR 2025, https://arxiv.org/abs/2503.09573).

The paper's order, first the noisy half, needs more than two hidden intervals per key for packed documents. In mirrored
order all rows that see a key are neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, Lengths, batch_lengths, check_one_row, device_of, key_count
from flashmask_hf.masks._columns import document_spans, key_positions, make_mask


def block_causal(
    lengths: Lengths,
    block_size: int,
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Packed documents in blocks: each token sees its own block whole, and the blocks before it.

    `block_causal([3, 2], 2)`:

        1 1 . . .
        1 1 . . .
        1 1 1 . .
        . . . 1 1
        . . . 1 1

    Args:
        lengths: as `documents`.
        block_size: tokens per block, at least 1; a document's last block may be shorter.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        ValueError: `block_size` is less than 1.

    Example:
        >>> block_causal([3, 2], 2).indices[0, 0].T
        tensor([[3, 3, 3, 5, 5],
                [0, 0, 2, 3, 3]], dtype=torch.int32)
    """
    rows, kv_len = batch_lengths("lengths", lengths, kv_len)
    size = _block_size(block_size, kv_len)
    start, end = document_spans(rows, kv_len)
    key = key_positions(kv_len)
    first = key - (key - start) % size
    return make_mask(end, first, causal=False, q_len=q_len, device=device_of(device, lengths))


def block_diffusion(
    lengths: Lengths,
    block_size: int,
    copies: int = 1,
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Training of block diffusion on packed documents: a noisy block sees itself and the clean blocks before it.

    Clean blocks see themselves and the clean blocks before them. A document of n tokens has (copies + 1) * n rows in
    mirrored order: its noisy blocks, the copies of a block side by side, then its clean blocks from the last to the
    first. Within a block, tokens keep their order. `block_diffusion_order` returns the token of each row.

    `block_diffusion([3, 1], 2)`, rows of noisy tokens 0 1 2 and clean tokens 2 0 1, then a noisy and a clean token:

        1 1 . . . . . .
        1 1 . . . . . .
        . . 1 . 1 1 . .
        . . . 1 1 1 . .
        . . . . 1 1 . .
        . . . . 1 1 . .
        . . . . . . 1 .
        . . . . . . . 1

    Args:
        lengths: as `documents`, in clean tokens.
        block_size: tokens per block, at least 1; a document's last block may be shorter.
        copies: noisy copies per block, at least 1, which do not see each other.
        kv_len: number of keys, noisy and clean; None is the longest packed row.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal. A causal model takes `bidirectional().indices`.

    Raises:
        ValueError: `block_size` or `copies` is less than 1.

    Example:
        >>> block_diffusion([3, 1], 2).indices[0, 0].T
        tensor([[2, 2, 3, 4, 6, 6, 7, 8],
                [0, 0, 2, 3, 2, 2, 6, 7]], dtype=torch.int32)
    """
    first, last, _, _ = _mirrored_rows(lengths, block_size, copies, kv_len)
    return make_mask(last, first, causal=False, q_len=q_len, device=device_of(device, lengths))


def block_diffusion_order(
    lengths: Lengths, block_size: int, copies: int = 1, *, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Return the token of each row of `block_diffusion`, and which rows are noisy.

    Args:
        lengths: clean tokens of each document of one packed row.
        block_size: this and the following as in `block_diffusion`.
        copies: see there.
        device: see there.

    Returns:
        tuple: two tensors [S], where the documents have N tokens and S = (copies + 1) * N.

            * index: int64, the row's token, counted through all documents: 0..N-1.
            * noisy: bool, whether the row is noisy. The rows of copy c are
              `noisy.nonzero()[:, 0][index[noisy].argsort(stable=True)][c::copies]`, in the order of the tokens.

    Raises:
        ValueError: `block_size` or `copies` is less than 1, or `lengths` has several packed rows.

    Example:
        >>> index, noisy = block_diffusion_order([3, 1], 2)
        >>> index
        tensor([0, 1, 2, 2, 0, 1, 3, 3])
        >>> noisy.int()
        tensor([1, 1, 1, 0, 0, 0, 1, 0], dtype=torch.int32)
    """
    _, _, index, noisy = _mirrored_rows(lengths, block_size, copies, None)
    check_one_row(len(index))
    device = device_of(device, lengths)
    return index[0, 0].to(device), noisy[0, 0].to(device)


def _mirrored_rows(
    lengths: Lengths, block_size: int, copies: int, kv_len: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows [first, last) that see each row, its token, and whether it is noisy.

    Tensors are int64, and bool, [B, 1, kv_len]; padding is seen up to row 0.
    """
    documents, _ = batch_lengths("lengths", lengths, None)
    copies = as_integer("copies", copies, 1, why="training needs a noisy copy; block_causal has none")
    packed = [[(copies + 1) * length for length in row] for row in documents]
    kv_len = key_count("lengths", packed, kv_len)
    size = _block_size(block_size, kv_len)
    start, end = document_spans(packed, kv_len)
    key = key_positions(kv_len)
    count = (end - start) // (copies + 1)  # tokens of the document
    row = key - start
    noisy = row < copies * count
    block_start = torch.where(noisy, row // (copies * size), (end - 1 - key) // size) * size
    block_end = torch.minimum(block_start + size, count)
    own_size = (block_end - block_start).clamp(min=1)  # 0 for some padding
    first_copy = copies * block_start
    token = block_start + torch.where(noisy, (row - first_copy) % own_size, row - (copies + 1) * count + block_end)
    # A clean key is seen by the noisy blocks after its own and the clean blocks from its own on: neighbours.
    first = start + torch.where(noisy, row - token + block_start, copies * block_end)
    last = torch.where(noisy, first + block_end - block_start, end - block_start)
    return first, torch.minimum(last, end), start // (copies + 1) + token, noisy


def _block_size(block_size: int, kv_len: int) -> Any:
    """Return a checked block size, at most `kv_len`: a larger one might overflow int64."""
    return torch.sym_min(as_integer("block_size", block_size, 1, why="a block has at least one token"), kv_len)
