"""Runs and documents in rows of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["UNBOUNDED", "document_starts", "next_flagged", "run_bounds"]

UNBOUNDED = 2**30
"""A position after every token's. The sum of two fits int32."""


def document_starts(position_ids: Tensor) -> Tensor:
    """Return where positions start again at 0: bool of the shape of `position_ids`, [B, S].

    A row of nothing but zeros has no start: models that embed positions in another way pass such rows.
    """
    first = position_ids == 0
    return first & ~first.all(-1, keepdim=True)


def next_flagged(flags: Tensor) -> Tensor:
    """Return for each position 0..S-1 the first later one that is flagged, or S.

    Args:
        flags: bool [B, S - 1], of the positions 1..S-1.

    Returns:
        int64 [B, S].
    """
    length = flags.shape[-1] + 1
    row = torch.arange(1, length + 1, device=flags.device)
    flagged = nn.functional.pad(flags, (0, 1), value=True)
    return torch.where(flagged, row, length).flip(-1).cummin(-1).values.flip(-1)


def run_bounds(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each position's run, and one past its last; int64 [B, S] each.

    Args:
        joined: bool [B, S - 1], whether the positions 1..S-1 belong to the run of the position before.
    """
    position = torch.arange(joined.shape[-1] + 1, device=joined.device)
    starts = nn.functional.pad(~joined, (1, 0), value=True)
    return torch.where(starts, position, 0).cummax(-1).values, next_flagged(~joined)
