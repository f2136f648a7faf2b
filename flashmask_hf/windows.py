"""Sliding windows measured by position, under the columns of a caller's mask.

In a packed row two tokens are as far apart as their `position_ids`, not their rows. Where positions run on over the
rows that see a key, which is so in documents, the window is one more interval of rows. Where they start again, as in
shared questions and trees, a key is seen by rows of one branch, then hidden by the window, then seen by the next
branch: more intervals than a column has. There the key gets one column per piece. Every row sees at most one of them,
so attention is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashmask_hf.mask import FlashMask, MaskNotRepresentable
from flashmask_hf.mask_compiler import VECTORS
from flashmask_hf.mask_reader import FAR, next_true
from flashmask_hf.ops import device_assert, is_capturing

__all__ = ["Windowed", "windowed"]

_PAIRS = 2**22  # of a piece and a run, looked at together: bounds the memory


class Windowed(NamedTuple):
    """A mask, and the key that each of its columns stands for."""

    mask: FlashMask
    keys: Tensor | None = None
    """int64 [B or 1, columns]; None where column j is key j."""

    def columns(self, x: Tensor) -> Tensor:
        """Keys or values [B, H, S, D] laid out by column, [B, H, columns, D]."""
        if self.keys is None:
            return x
        entry = torch.arange(x.shape[0], device=x.device)[:, None]
        return x.transpose(1, 2)[entry, self.keys].transpose(1, 2)


def windowed(mask: FlashMask, window: int, position_ids: Tensor | None, *, two_sided: bool) -> Windowed:
    """`mask` less what lies outside of the window.

    Waits for the device to know the positions, except while compiling and while a CUDA graph is captured.

    Args:
        mask: of a whole row, Sq = Skv = S.
        window: query i sees key j only if position i - position j < window.
        position_ids: int [B or 1, S]; None are the rows 0..S-1.
        two_sided: and only if position j - position i < window, too.

    Raises:
        NotImplementedError: a key needs several columns, and `mask` has more than one head; or, while compiling, the
            window has two sides or the mask more than the one column LTS.
        RuntimeError: a key needs several columns while compiling (a device-side check).
    """
    length = mask.kv_len
    row = torch.arange(length, device=mask.device, dtype=torch.int32)
    reach = min(window, FAR)
    limit = (row + reach).clamp(max=length)
    if torch.compiler.is_compiling() or is_capturing(mask.indices):
        if two_sided or not mask.causal or mask.indices.shape[-1] > 1:
            raise NotImplementedError(
                f"sliding_window={window} together with {VECTORS} is compiled for causal columns with n = 1 only; do "
                "not compile this model, or use one without sliding windows"
            )
        if position_ids is not None:
            hides = _hides(position_ids, window)
            device_assert(
                _runs_on(mask, position_ids, window, two_sided) | ~hides,
                f"sliding_window={window} cuts trees of position_ids into more pieces than a compiled model can hold; "
                "do not compile it, or use a model without sliding windows",
            )
            limit = torch.where(hides, limit, length)
        return Windowed(_until(mask, limit))
    if position_ids is not None:
        known = torch.stack([_hides(position_ids, window), _runs_on(mask, position_ids, window, two_sided)])
        hides, by_row = known.tolist()
        if not hides:
            return Windowed(mask)
        if not by_row:
            return _in_pieces(mask, window, position_ids, two_sided)
    if mask.causal and mask.indices.shape[-1] == 1:
        return Windowed(_until(mask, limit))
    first = (row - reach + 1).clamp(min=0) if two_sided else torch.zeros_like(row)
    try:
        return Windowed(mask & FlashMask(torch.stack([limit, first], -1)[None, None], causal=False))
    except MaskNotRepresentable:
        return _in_pieces(mask, window, row[None] if position_ids is None else position_ids, two_sided)


def _hides(position_ids: Tensor, window: int) -> Tensor:
    """Whether any two positions are too far apart; bool []."""
    low, high = position_ids.aminmax()
    return high - low >= window


def _until(mask: FlashMask, limit: Tensor) -> FlashMask:
    """The mask of n = 1 column less the rows from `limit` [S] on."""
    return FlashMask(torch.minimum(mask.indices, limit[:, None]), causal=True)


def _runs_on(mask: FlashMask, position_ids: Tensor, window: int, two_sided: bool) -> Tensor:
    """Whether distances in rows tell the same as those in positions, for each key and the rows that see it; bool []."""
    length = mask.kv_len
    row = torch.arange(length, device=mask.device)
    pieces = mask.visible_intervals(length)
    step = position_ids[:, 1:] - position_ids[:, :-1]
    last = torch.stack([torch.where(start < end, end, 0) for start, end in pieces]).amax(0)
    fits = last <= next_true(step != 1)[:, None]
    if not two_sided:  # where positions step back they only come nearer, from this side
        fits = fits | ((last - row <= window) & (step <= 1).all())
    if mask.causal:
        return fits.all()
    first = torch.stack([torch.where(start < end, start, length) for start, end in pieces]).amin(0)
    begins = nn.functional.pad(step != 1, (1, 0), value=True)
    return (fits & (first >= torch.where(begins, row, 0).cummax(-1).values[:, None])).all()


def _in_pieces(mask: FlashMask, window: int, position_ids: Tensor, two_sided: bool) -> Windowed:
    """The window with a column for each run of rows that see a key."""
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
    entries = [_cut([x[b] for x in starts], [x[b] for x in ends], position[b], window, two_sided) for b in range(batch)]
    count = max(1, *(len(keys) for keys, _, _ in entries))
    keys = mask.indices.new_zeros(batch, count, dtype=torch.int64)
    columns = mask.indices.new_zeros(batch, 1, count, 2)  # LTS, UTE: a column that no row sees
    for b, (key, start, end) in enumerate(entries):
        keys[b, : len(key)] = key
        columns[b, 0, : len(key)] = torch.stack([end, start], -1)
    row = torch.arange(length, device=keys.device)
    own = count == length and bool((keys == row).all())
    return Windowed(FlashMask(columns, causal=False, q_len=length), None if own else keys)


def _cut(
    starts: list[Tensor], ends: list[Tensor], position: Tensor, window: int, two_sided: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of one row, and the rows [start, end) that see each of them in one piece; in order of the start.

    Args:
        starts: int [S] each, of the rows that the mask lets see a key.
        ends: one past their last.
        position: int64 [S].
        window: as in `windowed`.
        two_sided: as in `windowed`.
    """
    length = len(position)
    key = torch.arange(length, device=position.device).repeat(len(starts))
    start, end = torch.cat(starts), torch.cat(ends)
    seen = start < end
    key, start, end = key[seen], start[seen], end[seen]
    high = position[key] + window
    low = position[key] - window + 1 if two_sided else torch.full_like(high, -FAR)
    begins = nn.functional.pad(position[1:] != position[:-1] + 1, (1, 0), value=True)
    first = begins.nonzero()[:, 0]
    after = torch.cat([first[1:], first.new_tensor([length])])
    # Within a run of positions, what a piece and the window leave is one piece again.
    found = []
    for runs in torch.arange(len(first), device=first.device).split(max(1, _PAIRS // max(1, len(key)))):
        run, past = first[runs, None], after[runs, None]
        offset = run - position[run]
        entry = torch.maximum(torch.maximum(start, run), low + offset)
        leave = torch.minimum(torch.minimum(end, past), high + offset)
        _, piece = (entry < leave).nonzero(as_tuple=True)
        found.append((key[piece], entry[entry < leave], leave[entry < leave]))
    key, start, end = (torch.cat(x) for x in zip(*found, strict=True))
    order = (key * (length + 1) + start).argsort()
    key, start, end = key[order], start[order], end[order]
    opens = nn.functional.pad((key[1:] != key[:-1]) | (start[1:] != end[:-1]), (1, 0), value=True)[: len(key)]
    closes = nn.functional.pad(opens[1:], (0, 1), value=True)[: len(key)]
    key, start, end = key[opens], start[opens], end[closes]
    order = (start * length + key).argsort()
    return key[order], start[order], end[order]
