"""The Hopper kernels as plain functions: each prepares a kernel for the tensors it is given and runs it once."""

from __future__ import annotations

import torch
from tools.portable_kernels import chosen
from torch import Tensor

from flashmask_hf import FlashMask
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf.kernels.hopper import forward as hopper_forward
from flashmask_hf.kernels.hopper.backward import prepare_backward
from flashmask_hf.kernels.hopper.forward import Config
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.kernels.shared.row_statistics import Delta, Gradients
from flashmask_hf.tile_plan import Plan


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v and the output's gradient, laid out [B, S, H, D] in memory; `dims` are (head_dim, v_head_dim)."""
    generator = torch.Generator().manual_seed(0)
    dim, v_dim = dims
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim), (heads, q_len, v_dim))
    q, k, v, dout = (
        torch.randn(batch, length, h, d, generator=generator).to(device, dtype).transpose(1, 2)
        for h, length, d in shapes
    )
    return q, k, v, dout


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    plan: Plan,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    config: Config | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out, its rows put in `order` if there is one, and lse."""
    problem = problem_of(Inputs(q, k, v, sinks, mask.indices), mask.causal, Arguments(scale, softcap))
    with chosen(hopper_forward, _configs=None if config is None else [config]):
        run = hopper_forward.prepare_forward(problem, order is not None)
    return run(q, k, v, sinks, mask.indices, plan, order)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Delta,
    mask: FlashMask,
    plan: Plan,
    scale: float,
    softcap: float,
    deterministic: bool = False,
    orders: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Return dq, dk and dv, their rows put in `orders` if there are some, and delta."""
    problem = problem_of(
        Inputs(q, k, v, None, mask.indices), mask.causal, Arguments(scale, softcap, None, deterministic)
    )
    output = (layout_of(delta[0]), delta[1] is not None) if isinstance(delta, tuple) else None
    run = prepare_backward(problem, layout_of(dout), output, orders is not None)
    return run(dout, q, k, v, lse, delta, mask.indices, plan, orders)
