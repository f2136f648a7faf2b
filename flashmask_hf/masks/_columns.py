"""Helpers of constructors: positions of keys, values per token, and masks from bounds."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, query_count


def make_mask(*columns: Tensor, causal: bool, q_len: int | None, device: Device) -> FlashMask:
    """Build a mask from bounds in positions 0..Skv, int [B, Hm, Skv] each, in the order of the FlashMask table.

    They become query rows, clamped to 0..q_len. A device of None is the device of the bounds.
    """
    kv_len = columns[0].shape[-1]
    q_len = query_count(q_len, kv_len)
    indices = (torch.stack(columns, -1) - (kv_len - q_len)).clamp(0, q_len).to(torch.int32)
    return FlashMask(indices.to(device), causal, q_len=q_len)


def key_positions(kv_len: int, device: Device = "cpu") -> Tensor:
    """Return the positions 0..kv_len-1 of keys, int64 [1, 1, kv_len]."""
    return torch.arange(kv_len, device=device).view(1, 1, kv_len)


def per_token(values: list[list[int]], lengths: list[list[int]], kv_len: int, padding: int) -> Tensor:
    """Repeat each value over the tokens of its document: int64 [B, 1, kv_len], `padding` behind the last document."""
    tokens = torch.full((len(lengths), 1, kv_len), padding, dtype=torch.int64, device="cpu")
    for row, value, length in zip(tokens, values, lengths, strict=True):
        value, repeats = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (value, length))
        total = sum(length)  # also passed to repeat_interleave: a compiler cannot read it from the tensors
        row[0, :total] = value.repeat_interleave(repeats, output_size=total)
    return tokens


def document_spans(lengths: list[list[int]], kv_len: int) -> tuple[Tensor, Tensor]:
    """Return start and end of each token's document, int64 [B, 1, kv_len] each; kv_len and 0 for padding."""
    ends = [list(accumulate(row)) for row in lengths]
    starts = [[0, *row[:-1]] for row in ends]
    return per_token(starts, lengths, kv_len, padding=kv_len), per_token(ends, lengths, kv_len, padding=0)


def next_flagged(flags: Tensor) -> Tensor:
    """Return for each position 0..S-1 the first later one that is flagged, or S: int64 [B, S].

    `flags` are bool [B, S - 1], of the positions 1..S-1.
    """
    length = flags.shape[-1] + 1
    row = torch.arange(1, length + 1, device=flags.device)
    flagged = torch.nn.functional.pad(flags, (0, 1), value=True)
    return torch.where(flagged, row, length).flip(-1).cummin(-1).values.flip(-1)
