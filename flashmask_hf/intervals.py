"""Hidden row intervals of key columns as tensors; `FlashMask` documents the layouts of `indices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """First and last run of hidden rows in each key column, and the number of runs."""

    starts: Tensor
    """int32 [B, H, Skv, 2], first and last run (equal if there is only one)."""
    ends: Tensor
    """int32 [B, H, Skv, 2], exclusive."""
    count: Tensor
    """int64 [B, H, Skv]. With 0 runs `starts` and `ends` are meaningless."""


def hidden_intervals(indices: Tensor, causal: bool, q_len: int) -> list[tuple[Tensor, Tensor]]:
    """Return `FlashMask.intervals` of its indices, causal flag and number of query rows."""
    columns = indices.unbind(-1)
    if len(columns) == 4:
        return [(columns[0], columns[1]), (columns[2], columns[3])]
    if len(columns) == 1:
        return [(columns[0], torch.full_like(columns[0], q_len))]
    if causal:
        return [(columns[0], columns[1])]
    return [(columns[0], torch.full_like(columns[0], q_len)), (torch.zeros_like(columns[1]), columns[1])]


def outer_rows(intervals: Sequence[tuple[Tensor, Tensor]], q_len: int) -> tuple[Tensor, Tensor]:
    """Return the first row in a column's (start, end) intervals, and one past the last; `q_len` and 0 if none."""
    first = torch.stack([torch.where(start < end, start, q_len) for start, end in intervals]).amin(0)
    last = torch.stack([torch.where(start < end, end, 0) for start, end in intervals]).amax(0)
    return first, last


def hide_keys(columns: Sequence[Tensor], keys: Tensor, causal: bool, q_len: int) -> list[Tensor]:
    """Return a mask's n columns, int32 [..., Skv] each, with some keys hidden from all rows.

    `keys`, bool, broadcastable with the columns, is True for a key to hide.
    """
    bounds = {1: [0], 2: [0, q_len] if causal else [0, 0], 4: [0, q_len, 0, 0]}[len(columns)]
    return [torch.where(keys, bound, column) for column, bound in zip(columns, bounds, strict=True)]


def causal_starts(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Return the first row that sees each key under bottom-right aligned causal masking, int32 [Skv] in 0..q_len."""
    column = torch.arange(kv_len, device=device, dtype=torch.int32)
    return (column - (kv_len - q_len)).clamp(0, q_len)


def without_causal_flag(indices: Tensor, causal: bool, q_len: int) -> Tensor:
    """Return `indices` of the same mask without the causal flag; of a causal mask, n = 1 becomes 2, and 2 becomes 4."""
    if not causal:
        return indices
    diagonal = causal_starts(q_len, indices.shape[2], indices.device)[:, None].expand(*indices.shape[:3], 1)
    if indices.shape[-1] == 1:
        return torch.cat([indices, diagonal], -1)
    return torch.cat([indices, torch.zeros_like(diagonal), diagonal], -1)


def count_rows_before(indices: Tensor, rows: Tensor) -> Tensor:
    """Return how many of the ascending `rows` [R] come before each bound, int32 of the shape of `indices`."""
    return torch.searchsorted(rows.to(indices.device, torch.int32), indices.contiguous(), out_int32=True)


def find_hidden_runs(visible: Tensor, first: int, kv_len: int, causal: bool) -> tuple[Runs, Tensor]:
    """Find the runs of hidden rows in some columns of a dense mask.

    Args:
        visible: bool [B, H, Sq, columns], the columns from `first` on; True where a query may look.
        first: index of the first column.
        kv_len: number of columns of the whole mask.
        causal: leave out the rows above the bottom-right diagonal.

    Returns:
        the runs; and for which columns a pair above the diagonal is visible if `causal`, bool [B, H, columns].
    """
    q_len, columns = visible.shape[-2:]
    hidden = ~visible
    leaks = torch.zeros_like(hidden[..., 0, :])
    if causal:
        row = torch.arange(q_len, device=visible.device).view(q_len, 1)
        above = row < causal_starts(q_len, kv_len, visible.device)[first : first + columns]
        leaks = (visible & above).any(-2)
        hidden = hidden & ~above
    edge = hidden.new_zeros(*hidden.shape[:-2], 1, columns)
    opens = hidden & ~torch.cat([edge, hidden[..., :-1, :]], -2)
    closes = hidden & ~torch.cat([hidden[..., 1:, :], edge], -2)

    def first_and_last(flags: Tensor) -> Tensor:
        flags = flags.to(torch.uint8)
        return torch.stack([flags.argmax(-2), q_len - 1 - flags.flip(-2).argmax(-2)], -1).to(torch.int32)

    return Runs(first_and_last(opens), first_and_last(closes) + 1, opens.sum(-2)), leaks


def unite_intervals(starts: Tensor, ends: Tensor, q_len: int) -> Runs:
    """Return the union of k intervals per column, given as int32 [B, H, Skv, k] with values in 0..q_len."""
    empty = starts >= ends
    starts = starts.masked_fill(empty, q_len + 1)
    ends = ends.masked_fill(empty, q_len + 1)
    starts, order = starts.sort(-1)
    ends = ends.gather(-1, order)
    real = starts <= q_len
    reach = ends.masked_fill(~real, -1).cummax(-1).values
    before = torch.cat([torch.full_like(reach[..., :1], -1), reach[..., :-1]], -1)
    opens = real & (starts > before)
    last = torch.where(opens, starts, -1).amax(-1)
    first_end = torch.where(opens.cumsum(-1) == 1, reach, -1).amax(-1)
    return Runs(torch.stack([starts[..., 0], last], -1), torch.stack([first_end, reach[..., -1]], -1), opens.sum(-1))


def pack_runs(runs: Runs, causal: bool, q_len: int) -> Tensor:
    """Return `indices` int32 [B, H, Skv, n] of at most one run per column if causal, else two."""
    starts, ends, count = runs
    none, two = count == 0, count == 2
    if causal:
        start = starts[..., 0].masked_fill(none, q_len)
        end = ends[..., 0].masked_fill(none, q_len)
        columns = [start] if bool((end == q_len).all()) else [start, end]
        return torch.stack(columns, -1).to(torch.int32)
    # A single run is upper if it starts at row 0, else lower. Of two runs the first is upper.
    upper = two | ((count == 1) & (starts[..., 0] == 0) & (ends[..., 0] < q_len))
    lower = two | ((count == 1) & ~upper)
    lts = torch.where(lower, starts[..., 1], q_len)
    lte = torch.where(lower, ends[..., 1], q_len)
    uts = torch.where(upper, starts[..., 0], 0)
    ute = torch.where(upper, ends[..., 0], 0)
    ends_fit = bool((lte == q_len).all()) and bool((uts == 0).all())
    return torch.stack([lts, ute] if ends_fit else [lts, lte, uts, ute], -1).to(torch.int32)
