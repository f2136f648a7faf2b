"""The backward on Hopper (sm_90a): tiles and launches of `backward_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf.kernels.hopper.backward_kernel import backward_kernel, scale_dq_kernel
from flashmask_hf.kernels.hopper.backward_roles import Form
from flashmask_hf.kernels.hopper.descriptors import row_template, tile_template
from flashmask_hf.kernels.hopper.dq_order import may_walk_upwards, prepare_dq_order
from flashmask_hf.kernels.hopper.head_dims import Widths, contracted, widths_of
from flashmask_hf.kernels.launch.descriptors import describable, describable_layout
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import Layout, layout_like, packed_layout
from flashmask_hf.kernels.shared.configs import multiprocessors
from flashmask_hf.kernels.shared.plan_kernels import count_key_tiles
from flashmask_hf.kernels.shared.row_statistics import Delta, Gradients, OutputLayout, prepare_delta
from flashmask_hf.kernels.shared.work_order import prepare_work_order
from flashmask_hf.tile_plan import COLUMNS, ROWS, Plan, plan_columns


class Tiles(NamedTuple):
    """Tile sizes, stages and registers, constants of `Form`."""

    BLOCK_M: int
    KEY_PARTS: int
    KEY_STAGES: int
    VALUE_STAGES: int
    DO_STAGES: int
    DQ_STAGES: int
    STORE_WARPS: int
    REGISTERS: int
    DQ_REGISTERS: int


_TILES = {
    Widths(64): Tiles(128, 2, 2, 2, 2, 2, 1, 208, 64),
    Widths(128): Tiles(64, 2, 2, 1, 2, 2, 2, 208, 64),
    Widths(128, 64): Tiles(32, 2, 1, 1, 2, 4, 2, 216, 48),
    Widths(256): Tiles(64, 1, 1, 1, 1, 3, 1, 192, 64),
}
"""Tiles by widths."""


def prepare_backward(
    problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool = False
) -> Callable[..., Gradients]:
    """Prepare the backward for tensors of one layout.

    Arguments are as in `Implementation.backward`.

    Returns:
        (dout, q, k, v, lse, delta, indices, plan, orders) -> (dq, dk, dv, delta), without `orders` unless `ordered`.
        `orders`, int32 [B, Hq, Sq] and [B, Hkv, Skv], name the target of each row of dq, and of dk and dv. Gradients
        are laid out like q, k and v (`torch.empty_like`), or as [B, S, H, D] if `ordered`.
    """
    given, deterministic = (problem.q, problem.k, problem.v), problem.arguments.deterministic
    dout_given = dout
    q, k, v, dout = map(describable_layout, (*given, dout))
    copies = (q, k, v, dout) != (*given, dout_given)
    batch, heads, q_len, head_dim = q.shape
    v_head_dim = v.shape[3]
    widths = widths_of(head_dim, v_head_dim)
    v_width = widths.values
    width = 256 if widths.tail else v_width  # a power of 2
    kv_heads, kv_len = k.shape[1:3]
    device = q.device
    tiles = _TILES[widths]
    if deterministic:  # one warp adds while the other waits for its sums
        tiles = tiles._replace(STORE_WARPS=2)
    block_m, block_n = tiles.BLOCK_M, tiles.KEY_PARTS * 64
    dq_columns = -(-head_dim // 64) * 64
    dq_rows = min(64, block_m)  # rows per piece of dQ
    pieces = dq_columns // 64 * (block_m // dq_rows)
    padded_len = -(-q_len // ROWS) * ROWS
    n_row_tiles = padded_len // block_m
    n_columns = count_key_tiles(kv_len, block_n)
    if deterministic:  # the order has finer segments than the plan
        segment_rows, subtiles = block_m, plan_columns(kv_len) // COLUMNS
        n_kv = n_columns // subtiles
    else:
        segment_rows, subtiles, n_kv = ROWS, plan_columns(kv_len) // block_n, problem.plan_shape[3]
    kv_planes = batch * kv_heads
    programs = multiprocessors(device)
    persistent = n_columns * kv_planes > programs

    accum = packed_layout(batch * heads * padded_len * dq_columns // 32, 32, dtype=torch.float32, device=device)
    new_accum = accum.allocator()
    new_counter = packed_layout(1, dtype=torch.int32, device=device).allocator()
    new_delta = packed_layout(batch, heads, q_len, dtype=torch.float32, device=device).allocator()
    outermost = [packed_layout(*x.shape, dtype=x.dtype, device=device, order=(0, 2, 1, 3)) for x in given]
    promised = outermost if ordered else [layout_like(x) for x in given]  # by the operator's fake implementation
    gradients = [describable_layout(x) for x in promised]
    new_dq, new_dk, new_dv = (x.allocator() for x in gradients)
    new_promised = [x.allocator() for x in promised]
    laid_out = promised == gradients

    unsorted, make_work_order = 0, None
    if persistent and not deterministic:
        unsorted, make_work_order = prepare_work_order(problem, n_columns, subtiles, programs)
    make_dq_order = prepare_dq_order(problem, block_m, block_n, programs) if deterministic else None
    make_delta: Any = None if output is None else prepare_delta(dout, output[0], q_len, sums=dq_columns)
    add = Launch(
        backward_kernel,
        min(n_columns * kv_planes, programs),
        heads, kv_heads, kv_planes, unsorted, *problem.mask_shape[:2], q_len, kv_len, n_kv, n_columns, padded_len,
        problem.scale, *problem.factors,
        descriptors=(
            row_template(q, block_m, width), row_template(k, 64, width), row_template(v, 64, v_width),
            row_template(dout, block_m, v_width), tile_template(accum, 2 * dq_rows, 32),
            row_template(gradients[1], 64, width), row_template(gradients[2], 64, v_width),
        ),
        FORM=Form(
            **problem.constants, SCATTER=ordered, DQ_ORDER=deterministic,
            UPWARD=deterministic and may_walk_upwards(heads, kv_heads), PERSISTENT=persistent,
            **tiles._asdict(), BLOCK_D=width, BLOCK_V=v_width, TAIL=widths.tail, DQ_PIECES=pieces, DQ_ROWS=dq_rows,
            HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, DEPTH=contracted(head_dim), V_DEPTH=contracted(v_head_dim),
            SEGMENT_ROWS=segment_rows, SUBTILES=subtiles, SCORES_AHEAD=width == 64 and not problem.softcap,
        ),
        num_warps=4,
    )  # fmt: skip
    scale_dq = Launch(
        scale_dq_kernel,
        pieces * n_row_tiles * heads * batch,
        *gradients[0].strides[:3], heads, q_len, n_row_tiles, problem.scale,
        SCATTER=ordered, BLOCK_M=block_m, PIECES=pieces, ROWS=dq_rows, HEAD_DIM=head_dim, num_warps=4,
    )  # fmt: skip

    def run(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Delta,
        indices: Tensor,
        plan: Plan,
        orders: tuple[Tensor, Tensor] | None = None,
    ) -> Gradients:
        if copies:
            q, k, v, dout = map(describable, (q, k, v, dout))
        q_order, k_order = orders or (None, None)
        dq, dk, dv, accum = new_dq(), new_dk(), new_dv(), new_accum()
        counter = new_counter() if persistent else None
        lse = lse.contiguous()
        if isinstance(delta, tuple):
            out, dlse = delta
            dlse = None if dlse is None else dlse.contiguous()
            delta = new_delta()
            make_delta(dout, out, dlse, delta, None if dlse is None else lse, None, accum, counter, None)
        else:
            delta = delta.contiguous()
            accum.zero_()
            if counter is not None:
                counter.zero_()
        indices = indices.contiguous()
        # Without an order, the kernel ignores the other four.
        segments_and_order = (plan.segments,) * 5 if make_dq_order is None else make_dq_order(indices)
        work_order = None if make_work_order is None else make_work_order(plan.segments)
        scattered = (dk, dv) if ordered else (None, None)
        add(
            q, k, v, dout, accum, dk, dv, *scattered, k_order, lse, delta, indices, *segments_and_order, work_order,
            counter,
        )  # fmt: skip
        scale_dq(accum, dq, q_order)
        if not laid_out:
            dq, dk, dv = (
                x if x.stride() == layout.strides else new().copy_(x)
                for x, layout, new in zip((dq, dk, dv), promised, new_promised, strict=True)
            )
        return dq, dk, dv, delta

    return run
