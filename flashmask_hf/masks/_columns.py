"""Columns of masks: positions of keys, values spread over the tokens of documents, and masks from interval bounds."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device


def make_mask(*columns: Tensor, causal: bool, q_len: int, device: Device) -> FlashMask:
    """Build a mask from interval bounds in positions 0..Skv, shifting them to query rows and clamping them to 0..q_len.

    Args:
        columns: integer tensors [B, Hm, Skv] in the order of the FlashMask table.
        causal: as in FlashMask.
        q_len: number of queries, the last of Skv positions.
        device: device of the mask; None is that of the columns.
    """
    shift = columns[0].shape[-1] - q_len
    indices = (torch.stack(columns, -1) - shift).clamp(0, q_len).to(torch.int32)
    return FlashMask(indices.to(device), causal, q_len=q_len)


def key_positions(kv_len: int, device: Device = "cpu") -> Tensor:
    """Return the positions 0..kv_len-1 of keys, int64 [1, 1, kv_len]."""
    return torch.arange(kv_len, device=device).view(1, 1, kv_len)


def per_row(values: list[int]) -> Tensor:
    """Return one number per batch entry as a tensor to broadcast, int64 [B, 1, 1]."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(-1, 1, 1)


def per_token(values: list[list[int]], lengths: list[list[int]], kv_len: int, padding: int) -> Tensor:
    """Repeat each value over the tokens of its document: int64 [B, 1, kv_len], `padding` behind the last document."""
    tokens = torch.full((len(lengths), 1, kv_len), padding, dtype=torch.int64, device="cpu")
    for row, value, length in zip(tokens, values, lengths, strict=True):
        repeats = torch.tensor(length, dtype=torch.int64, device="cpu")
        row[0, : sum(length)] = torch.tensor(value, dtype=torch.int64, device="cpu").repeat_interleave(repeats)
    return tokens


def document_spans(lengths: list[list[int]], kv_len: int) -> tuple[Tensor, Tensor]:
    """Return start and end of each token's document, two tensors int64 [B, 1, kv_len].

    Padding behind the last document has start kv_len and end 0, an interval that holds no row.
    """
    ends = [list(accumulate(row)) for row in lengths]
    starts = [[0, *row[:-1]] for row in ends]
    return per_token(starts, lengths, kv_len, padding=kv_len), per_token(ends, lengths, kv_len, padding=0)
