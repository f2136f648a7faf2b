"""Tiled masked attention in torch operations, for devices without Triton kernels, such as a CPU.

Memory is linear in the length, and only tiles of the plan are computed:

    for each mask head and row tile of the plan:                        queries [heads, rows, D], online softmax stay
        for each step, about _KEYS_PER_STEP keys of the tile's list:    keys and values are sliced or gathered
            forward:   acc, top, total = online softmax
            backward:  add dk, dv of these keys and dq of the rows

Heads that share a key-value head are stacked as rows: a step is one matrix product per key-value head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashmask_hf._numbers import check_range
from flashmask_hf.dropout import BLOCK, kept_blocks
from flashmask_hf.intervals import hidden_intervals
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import results_like
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import ROWS, Plan, plan_columns
from flashmask_hf.torch_internals import no_autocast

_WIDENED = 2**21  # elements of k that decoding widens at a time
_KEYS_PER_STEP = 512  # the scores of a step stay in a CPU's cache

Step = tuple[slice | Tensor, Tensor | None]
"""Keys of a step (slice or index tensor) and where they are hidden, bool [rows, keys] or None."""


def _without_autocast(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Make a pass run without autocast: its caller has cast the tensors."""

    @functools.wraps(compute)
    def run(problem: Problem, *tensors: Any) -> Any:
        with no_autocast(problem.q.device):
            return compute(problem, *tensors)

    return run


@_without_autocast
def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, plan: Plan,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention over the tiles that the plan lists.

    Tensors are as in `flashmask_attention`; `indices` and `plan` are of the mask.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = results_like(q, v)
    kept_share = 1.0 - problem.arguments.dropout
    for b, h_q, h_kv, rows, steps in _walk(q, k, indices, problem.causal, plan):
        queries = _grouped(q[b, h_q, rows], h_kv).to(wide) * problem.scale
        top = queries.new_full((*queries.shape[:-1], 1), torch.finfo(wide).min)
        total = torch.zeros_like(top)
        acc = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        if sinks is not None:
            sink = sinks[h_q].to(wide).repeat_interleave(rows.stop - rows.start).view(top.shape)
            top = torch.maximum(top, sink)
            total = torch.exp(sink - top)  # 1, or 0 if the sink is -inf
        for columns, hidden in steps:
            scores, _ = _scores(queries, k[b, h_kv, columns].to(wide), hidden, problem.softcap)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            decay = torch.exp(top - new_top)
            total = total * decay + weights.sum(-1, keepdim=True)
            if seed is not None:
                weights = torch.where(_kept(problem, seed, b, h_q, h_kv, rows, columns), weights / kept_share, 0.0)
            acc = torch.baddbmm(acc * decay, weights, v[b, h_kv, columns].to(wide))
            top = new_top
        any_seen = total != 0  # NaN stays NaN
        row_out = torch.where(any_seen, acc / torch.where(any_seen, total, 1.0), 0.0)
        out[b, h_q, rows] = _grouped(row_out, h_q).to(q.dtype)
        lse[b, h_q, rows] = _grouped(torch.where(any_seen, top + total.log(), float("-inf")), h_q).squeeze(-1)
    return out, lse


@_without_autocast
def decode(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention of few rows, all scores at once; arguments and results as in `forward`.

    Raises:
        ValueError: a value of `indices` lies outside 0..Sq.
    """
    check_range(indices, q.shape[2])
    scale, softcap = problem.scale, problem.softcap
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    hidden = ~FlashMask(indices, problem.causal).to_dense(q_len)
    hidden = hidden.unflatten(1, (min(hidden.shape[1], kv_heads), -1))  # [B or 1, Hkv or 1, heads of a group or 1, ...]
    first, last = 0, kv_len
    if q.device.type == "cpu":  # a read costs no wait here
        seen = (~hidden.flatten(0, 3).all(0)).nonzero()
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        hidden = hidden[..., first:last]
    queries = q.reshape(batch, kv_heads, -1, dim).to(wide) * scale
    step = last - first if k.dtype == wide else max(64, _WIDENED // (batch * kv_heads * dim))
    parts = [slice(part, min(part + step, last)) for part in range(first, last, step)]
    scores = torch.cat([queries @ k[:, :, part].to(wide).transpose(-1, -2) for part in parts], -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shape = (batch, kv_heads, heads // kv_heads, q_len, last - first)
    scores = scores.view(shape).masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(wide).min)
    sink = None if sinks is None else sinks.to(wide).view(1, kv_heads, -1, 1, 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    any_seen = total != 0  # NaN stays NaN
    weights = weights.view(batch, kv_heads, -1, last - first)
    sums = [weights[..., p.start - first : p.stop - first] @ v[:, :, p].to(wide) for p in parts]
    acc = torch.stack(sums).sum(0).view(*shape[:-1], -1) / torch.where(any_seen, total, 1.0)
    out.copy_(acc.view(out.shape))
    return out, torch.where(any_seen, top + total.log(), float("-inf")).view(batch, heads, q_len)


@_without_autocast
def backward(
    problem: Problem,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | tuple[Tensor, Tensor | None],
    indices: Tensor,
    plan: Plan,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from `dout`, the gradient of the output [B, Hq, Sq, Dv].

    `lse` is of the forward, `delta` as in `Implementation`. The others are as in `forward`.

    Returns:
        dq, dk, dv like q, k, v; and delta.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if isinstance(delta, tuple):
        delta = row_delta(dout, *delta)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    kept_share = 1.0 - problem.arguments.dropout
    blind = lse.isneginf()  # rows that see nothing
    lse = lse.masked_fill(blind, float("inf"))  # their weights become exp(-inf) = 0
    delta = delta.masked_fill(blind, 0.0)  # 0 times inf is NaN
    for b, h_q, h_kv, rows, steps in _walk(q, k, indices, problem.causal, plan):
        queries, upstream = (_grouped(x[b, h_q, rows], h_kv).to(wide) for x in (q, dout))
        tile_lse, tile_delta = (_grouped(x[b, h_q, rows, None], h_kv) for x in (lse, delta))
        queries = queries * problem.scale
        acc = torch.zeros_like(queries)
        blind_rows = _blind_rows(steps)
        if blind_rows is not None:  # a row with a sink has a finite lse
            upstream, tile_delta = (
                x.unflatten(1, (-1, len(blind_rows))).masked_fill(blind_rows, 0.0).flatten(1, 2)
                for x in (upstream, tile_delta)
            )
        for columns, hidden in steps:
            keys, values = k[b, h_kv, columns].to(wide), v[b, h_kv, columns].to(wide)
            scores, slope = _scores(queries, keys, hidden, problem.softcap)
            weights = scores.sub_(tile_lse).exp_()
            thinned, dweights = weights, upstream @ values.transpose(-1, -2)
            if seed is not None:
                kept = _kept(problem, seed, b, h_q, h_kv, rows, columns)
                thinned, dweights = (torch.where(kept, x / kept_share, 0.0) for x in (weights, dweights))
            dv[b, h_kv, columns] += thinned.transpose(-1, -2) @ upstream
            dscores = dweights.sub_(tile_delta).mul_(weights)
            if slope is not None:
                dscores *= slope
            acc.baddbmm_(dscores, keys)
            dk[b, h_kv, columns] += dscores.transpose(-1, -2) @ queries
        dq[b, h_q, rows] = _grouped(acc.mul_(problem.scale), h_q).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), delta


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Return delta. Elements with out 0 count 0, whatever dout is."""
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = (dout.to(wide) * out.to(wide)).masked_fill(out == 0, 0.0).sum(-1)
    return sums if dlse is None else sums - dlse


def _blind_rows(steps: list[Step]) -> Tensor | None:
    """Return which rows see no key of the steps, bool [rows, 1]; None if all rows see a key."""
    blind = None
    for _, hidden in steps:
        if hidden is None:
            return None
        all_hidden = hidden.all(-1, keepdim=True)
        blind = all_hidden if blind is None else blind & all_hidden
    return blind if blind is not None and bool(blind.any()) else None


def _grouped(x: Tensor, heads: slice) -> Tensor:
    """Stack rows [heads, rows, d] by key-value head, [kv heads, heads / kv heads * rows, d]; or by head again."""
    return x.reshape(heads.stop - heads.start, -1, x.shape[-1])


def _kept(
    problem: Problem, seed: Tensor, batch: int, h_q: slice, h_kv: slice, rows: slice, columns: slice | Tensor
) -> Tensor:
    """Return which pairs of a step are kept, grouped as the scores."""
    heads, row_blocks = (
        torch.arange(x.start, x.stop, size, device=seed.device) for x, size in ((h_q, 1), (rows, BLOCK))
    )
    if isinstance(columns, slice):
        columns = torch.arange(columns.start, columns.stop, device=seed.device)
    kept = kept_blocks(seed, problem.arguments.dropout, batch, heads, row_blocks // BLOCK, columns[::BLOCK] // BLOCK)
    return _grouped(kept[:, : rows.stop - rows.start, : len(columns)], h_kv)


def _scores(queries: Tensor, keys: Tensor, hidden: Tensor | None, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return capped, masked scores [kv heads, group * rows, keys] of scaled queries; and the cap's slope or None."""
    scores = queries @ keys.transpose(-1, -2)
    slope = None
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped * capped
    if hidden is not None:
        scores.unflatten(1, (-1, hidden.shape[0])).masked_fill_(hidden, float("-inf"))
    return scores, slope


def _walk(
    q: Tensor, k: Tensor, indices: Tensor, causal: bool, plan: Plan
) -> Iterator[tuple[int, slice, slice, slice, list[Step]]]:
    """Yield (batch entry, query heads, key-value heads, query rows, steps) per list of tiles."""
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    mask_batch, mask_heads = plan.tiles.shape[:2]
    counts = plan.counts.tolist()
    width = plan_columns(kv_len)
    pairs = hidden_intervals(indices, causal, q_len)
    for m_b in range(mask_batch):
        for m_h in range(mask_heads):
            h_q = slice(m_h * heads // mask_heads, (m_h + 1) * heads // mask_heads)
            first_kv = m_h * kv_heads // mask_heads
            h_kv = slice(first_kv, max(first_kv + 1, (m_h + 1) * kv_heads // mask_heads))
            bounds = [(start[m_b, m_h], end[m_b, m_h]) for start, end in pairs]
            for tile in range(-(-q_len // ROWS)):
                visible, partial = counts[m_b][m_h][tile]
                row = plan.tiles[m_b, m_h, tile]
                rows = slice(tile * ROWS, min(q_len, (tile + 1) * ROWS))
                steps = _steps(row, visible, partial, rows, bounds, causal, q_len, kv_len, width)
                for b in range(batch) if mask_batch == 1 else (m_b,):
                    yield b, h_q, h_kv, rows, steps


def _steps(
    row: Tensor,
    visible: int,
    partial: int,
    rows: slice,
    bounds: list[tuple[Tensor, Tensor]],
    causal: bool,
    q_len: int,
    kv_len: int,
    width: int,
) -> list[Step]:
    """Return the steps of one row tile, about _KEYS_PER_STEP keys each: visible tiles, then partial tiles."""
    steps: list[Step] = []
    per_step = max(1, _KEYS_PER_STEP // width)
    row_index = torch.arange(rows.start, rows.stop, device=row.device).unsqueeze(1)
    for tiles, masked in ((row[:visible], False), (row[row.shape[0] - partial :].flip(0), True)):
        listed = tiles.tolist()
        for first in range(0, len(listed), per_step):
            step = listed[first : first + per_step]
            if step[-1] - step[0] == len(step) - 1:  # neighbouring tiles need no copy of the keys
                columns = slice(step[0] * width, min(kv_len, (step[-1] + 1) * width))
                column_index = torch.arange(columns.start, columns.stop, device=row.device)
            else:
                column_index = torch.cat([torch.arange(t * width, min(kv_len, (t + 1) * width)) for t in step])
                columns = column_index = column_index.to(row.device)
            hidden = None
            if masked:
                hidden = torch.zeros(rows.stop - rows.start, len(column_index), dtype=torch.bool, device=row.device)
                for start, end in bounds:
                    hidden |= (row_index >= start[columns]) & (row_index < end[columns])
                if causal:
                    hidden |= row_index + (kv_len - q_len) < column_index
            steps.append((columns, hidden))
    return steps
