"""The documents of a row, with the first and last row of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashmask_hf.masks._columns import next_flagged
from flashmask_hf.torch_internals import device_assert

UNBOUNDED = 2**30
"""A position after every token's. The sum of two fits int32."""


class Documents(NamedTuple):
    """The documents of a batch of rows.

    Attributes:
        starts: bool [B or 1, S], real tokens that start a document; a row's first document may have no start.
        start: int64 [B or 1, S], first row of each token's document.
        end: int64 [B or 1, S], one past its last row.
    """

    starts: Tensor
    start: Tensor
    end: Tensor

    def to(self, device: torch.device) -> Documents:
        """Return the same documents on a device: FSDP2 and accelerate move inputs after the call was made."""
        return Documents(*(x.to(device) for x in self))

    def numbers(self) -> Tensor:
        """Return the number of each token's document, int64 [B or 1, S]."""
        return self.starts.cumsum(-1)

    def is_one_per_row(self) -> Tensor:
        """Return whether at most one document starts in each row, bool []."""
        return (self.starts.sum(-1) <= 1).all()


def of_bounds(bounds: Tensor, length: int) -> Documents:
    """Return the documents of `cu_seq_lens_q` [documents + 1] in a row of `length` tokens, as in FlashAttention."""
    row = torch.arange(length, device=bounds.device, dtype=bounds.dtype)
    return of_numbers(torch.bucketize(row, bounds[1:], right=True)[None])


def of_numbers(numbers: Tensor) -> Documents:
    """Return the documents of `seq_idx` [B, S], the number of each token's document."""
    changes = numbers.diff() != 0
    return Documents(nn.functional.pad(changes, (1, 0), value=True), *run_bounds(~changes))


def of_positions(positions: Tensor, real: Tensor | None) -> Documents:
    """Return the documents of positions [B or 1, S]; arguments and errors as in `document_starts`."""
    starts = document_starts(positions, real)
    return Documents(starts, *run_bounds(~starts[:, 1:]))


def check_one_document(positions: Tensor, mask: Tensor | None, q_offset: int | Tensor) -> None:
    """Assert on the device that no document starts after a token that is not hidden.

    Args:
        positions: int [B or 1, S], of the queries.
        mask: 2D mask [B, keys], in a static cache also of later keys; None hides none.
        q_offset: row of the first query among the keys.
    """
    column, real = torch.arange(positions.shape[-1], device=positions.device) + q_offset, None
    follows = column > 0
    if mask is not None:
        real = nn.functional.pad(mask, (0, 1))[:, column.clamp(max=mask.shape[-1])]
        follows = nn.functional.pad(mask.cumsum(-1), (1, 0))[:, column.clamp(max=mask.shape[-1])] > 0
    zeros = positions == 0  # a row of zeros, too
    starts = document_starts(positions, real) | (zeros if real is None else real & zeros)
    device_assert(
        ~(starts & follows).any(),
        "position_ids start again at 0 in one row, but documents are not kept apart in a static cache or part of a "
        "row; pass whole rows and use_cache=False",
    )


def document_starts(position_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Return where documents start: bool of the shape of `position_ids`, [B, S].

    A document starts where positions restart at 0. So does the first token after a hidden run if its position is not
    higher than the one before the run, or counts on from a hidden 0. A row of zeros has no start.

    Args:
        position_ids: int [B, S].
        real: bool [B, S], False where a 2D mask hides the token; None hides none. Only real tokens are starts.

    Raises:
        RuntimeError: positions 0, 0, 1 with the middle token hidden (a device-side check).
    """
    meaningful = ~(position_ids == 0).all(-1, keepdim=True)
    if real is None:
        return (position_ids == 0) & meaningful
    position, shown = torch.broadcast_tensors(position_ids, real & meaningful)
    column = torch.arange(position.shape[-1], device=position.device)
    last_real = torch.where(shown, column, -1).cummax(-1).values
    before = nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)  # the last real token before each
    before_position = torch.where(before < 0, -1, position.gather(-1, before.clamp(min=0)))
    restarts = position == 0
    last_restart = torch.where(restarts, column, -1).cummax(-1).values
    after_gap = shown & (before < column - 1)
    counts_on = (last_restart > before) & (position == column - last_restart)
    zeros = nn.functional.pad(restarts.cumsum(-1), (1, 0))
    filled = zeros.gather(-1, column.expand_as(before)) - zeros.gather(-1, before + 1) == column - before - 1
    device_assert(
        ~(after_gap & filled & (before_position == 0) & (position == 1)).any(),
        "position_ids are 0, 0, 1 around a token that the 2D mask hides: one document with a gap, or two; let them "
        "count through hidden tokens, or pass startend_row_indices",
    )
    return shown & (restarts | (after_gap & (counts_on | (position <= before_position))))


def run_bounds(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each position's run, and one past its last; int64 [B, S] each.

    `joined`, bool [B, S - 1], marks positions 1..S-1 that continue the run before.
    """
    position = torch.arange(joined.shape[-1] + 1, device=joined.device)
    starts = nn.functional.pad(~joined, (1, 0), value=True)
    return torch.where(starts, position, 0).cummax(-1).values, next_flagged(~joined)
