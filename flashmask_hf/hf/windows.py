"""Sliding windows measured by position, under a caller's mask.

In documents, the window is one more interval of rows. In shared questions and trees one branch sees a key, the window
hides it, and the next branch sees it. Such a key is repeated, once per visible piece; a row sees at most one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flashmask_hf.hf.documents import UNBOUNDED, run_bounds
from flashmask_hf.hf.layer_mask import LayerMask
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask, MaskNotRepresentable
from flashmask_hf.names import VECTORS
from flashmask_hf.torch_internals import device_assert, is_capturing

_MAX_PAIRS = 2**22
"""Number of pairs of a visible piece and a run of positions at a time."""


def apply_window(
    mask: FlashMask, window: int, position_ids: Tensor | None, *, two_sided: bool, blocks: Tensor | None = None
) -> LayerMask:
    """Return `mask` less what lies outside of the window.

    With positions the host waits for the device, except where the call is compiled or captured.

    Args:
        mask: mask of a whole row, Sq = Skv = S.
        window: query i sees key j only if position i - position j < window.
        position_ids: int [B or 1, S]; None are the rows 0..S-1.
        two_sided: whether also position j - position i < window must hold.
        blocks: int32 [B or 1, 1, S], the end of each key's block where that is later than the window's; or None.

    Raises:
        NotImplementedError: a key needs several columns, and `mask` has several heads, or blocks cross the window; or,
            while compiling, the window has two sides or the mask n > 1.
        RuntimeError: a key needs several columns while compiling (a device-side check).
    """
    length = mask.kv_len
    row = torch.arange(length, device=mask.device, dtype=torch.int32)
    reach = min(window, UNBOUNDED)
    limit = (row + reach if blocks is None else torch.maximum(row + reach, blocks)).clamp(max=length)
    if torch.compiler.is_compiling() or is_capturing(mask.indices):
        if two_sided or mask.indices.shape[-1] > 1:
            raise NotImplementedError(
                f"sliding_window={window} together with {VECTORS} is compiled for causal columns with n = 1 only; do "
                "not compile this model, or use one without sliding windows"
            )
        if position_ids is not None:
            exceeded = _exceed_window(position_ids, reach)
            device_assert(
                _rows_measure(mask, position_ids, reach, two_sided) | ~exceeded,
                f"sliding_window={window} cuts trees of position_ids into more pieces than a compiled model can hold; "
                "do not compile it, or use a model without sliding windows",
            )
            limit = torch.where(exceeded, limit, length)
        return LayerMask(_hide_from(mask, limit))
    if position_ids is not None:
        flags = torch.stack([_exceed_window(position_ids, reach), _rows_measure(mask, position_ids, reach, two_sided)])
        exceeded, by_row = flags.tolist()
        if not exceeded:
            return LayerMask(mask)
        if not by_row:
            return _column_per_piece(mask, reach, position_ids, two_sided, blocks)
    if mask.indices.shape[-1] == 1:
        return LayerMask(_hide_from(mask, limit))
    first = (row - reach + 1).clamp(min=0) if two_sided else torch.zeros_like(row)
    try:
        near = torch.stack([limit, first.expand_as(limit)], -1)
        return LayerMask(mask & FlashMask(near.view(-1, 1, length, 2), causal=False))
    except MaskNotRepresentable:
        return _column_per_piece(mask, reach, row[None], two_sided, blocks)


def _exceed_window(position_ids: Tensor, window: int) -> Tensor:
    """Return whether any two positions are too far apart to see each other; bool []."""
    low, high = position_ids.aminmax()
    return high - low >= window


def _hide_from(mask: FlashMask, limit: Tensor) -> FlashMask:
    """Return a mask of n = 1 column less the rows from `limit`, [S] or [B or 1, 1, S], on."""
    return FlashMask(torch.minimum(mask.indices, limit[..., None]), causal=True)


def _rows_measure(mask: FlashMask, position_ids: Tensor, window: int, two_sided: bool) -> Tensor:
    """Return whether distances in rows equal distances in positions wherever visible; bool []."""
    length = mask.kv_len
    row = torch.arange(length, device=mask.device)
    first, last = outer_rows(mask.visible_intervals(length), length)
    step = position_ids[:, 1:] - position_ids[:, :-1]
    run_start, run_end = run_bounds(step == 1)
    fits = last <= run_end[:, None]
    if not two_sided:  # a window of one side does not hide positions that step back, for they come nearer
        fits = fits | ((last - row <= window) & (step <= 1).all())
    return (fits & (first >= run_start[:, None])).all()


def _column_per_piece(
    mask: FlashMask, window: int, position_ids: Tensor, two_sided: bool, blocks: Tensor | None
) -> LayerMask:
    """Return the mask in the window with one column per run of rows that see a key."""
    row = torch.arange(mask.kv_len, device=mask.device)
    if blocks is not None and bool((blocks > row + window).any()):
        raise NotImplementedError(
            f"sliding_window={window} and {VECTORS} of trees are not implemented where tokens of an image see each "
            "other beyond the window; pass one path per row, or no images"
        )
    batch, heads, length, _ = mask.indices.shape
    if heads > 1:
        raise NotImplementedError(
            f"sliding_window={window} cuts the {heads} heads of {VECTORS} into different pieces, which is not "
            "implemented; pass vectors with one head, or use a model without sliding windows"
        )
    batch = max(batch, position_ids.shape[0])
    starts, ends = (
        [x[:, 0].expand(batch, -1) for x in bounds] for bounds in zip(*mask.visible_intervals(length), strict=True)
    )
    position = position_ids.to(torch.int64).expand(batch, -1)
    pieces = [
        _visible_pieces([x[b] for x in starts], [x[b] for x in ends], position[b], window, two_sided)
        for b in range(batch)
    ]
    one = row.new_zeros(1)  # at least one column; zeros are a column that no row sees
    keys, first, last = (pad_sequence([*x, one], batch_first=True)[:-1] for x in zip(*pieces, strict=True))
    columns = torch.stack([last, first], -1)[:, None].to(torch.int32)
    one_each = keys.shape[1] == length and bool((keys == row).all())
    return LayerMask(FlashMask(columns, causal=False, q_len=length), None if one_each else keys)


def _visible_pieces(
    starts: list[Tensor], ends: list[Tensor], position: Tensor, window: int, two_sided: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one row's keys and the runs of rows [start, end) that see them, one entry per run, ordered by start.

    `starts` and `ends`, int [S] each, are the mask's visible intervals of each key; `position` is int64 [S].
    """
    length = len(position)
    key = torch.arange(length, device=position.device).repeat(len(starts))
    start, end = torch.cat(starts), torch.cat(ends)
    seen = start < end
    key, start, end = key[seen], start[seen], end[seen]
    high = position[key] + window
    low = position[key] - window + 1 if two_sided else torch.full_like(high, -UNBOUNDED)
    run_starts = nn.functional.pad(position[1:] != position[:-1] + 1, (1, 0), value=True).nonzero()[:, 0]
    run_ends = torch.cat([run_starts[1:], run_starts.new_tensor([length])])
    # Positions are contiguous in a run, so an interval of the mask, cut to the window and the run, is one piece.
    found = []
    chunk = max(1, _MAX_PAIRS // max(1, len(key)))
    for runs in torch.arange(len(run_starts), device=run_starts.device).split(chunk):
        run_start, run_end = run_starts[runs, None], run_ends[runs, None]
        row_of_zero = run_start - position[run_start]  # the row at which the run's position would be 0
        first = torch.maximum(torch.maximum(start, run_start), low + row_of_zero)
        last = torch.minimum(torch.minimum(end, run_end), high + row_of_zero)
        _, interval = (first < last).nonzero(as_tuple=True)
        found.append((key[interval], first[first < last], last[first < last]))
    key, start, end = (torch.cat(x) for x in zip(*found, strict=True))
    # Join pieces of a key that touch.
    order = (key * length + start).argsort()
    key, start, end = key[order], start[order], end[order]
    opens = nn.functional.pad((key[1:] != key[:-1]) | (start[1:] != end[:-1]), (1, 0), value=True)[: len(key)]
    closes = nn.functional.pad(opens[1:], (0, 1), value=True)[: len(key)]
    key, start, end = key[opens], start[opens], end[closes]
    order = (start * length + key).argsort()
    return key[order], start[order], end[order]
