"""The portable kernels as plain functions: each prepares a kernel for the tensors it is given and runs it once."""

from __future__ import annotations

from torch import Tensor

from flashmask_hf import FlashMask
from flashmask_hf._call.arguments import Arguments
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.kernels.portable.backward import prepare_backward
from flashmask_hf.kernels.portable.decode import prepare_decode
from flashmask_hf.kernels.portable.forward import prepare_forward
from flashmask_hf.kernels.shared.configs import Config
from flashmask_hf.kernels.shared.row_statistics import Delta, Gradients
from flashmask_hf.tile_plan import Plan


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
) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    problem = problem_of(q, k, v, mask.indices, sinks, mask.causal, Arguments(scale, softcap))
    return prepare_forward(problem, config)(q, k, v, sinks, mask.indices, plan)


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
    by_keys: Config | None = None,
    by_queries: Config | None = None,
) -> Gradients:
    """Return dq, dk, dv and delta."""
    problem = problem_of(q, k, v, mask.indices, None, mask.causal, Arguments(scale, softcap))
    output = (layout_of(delta[0]), delta[1] is not None) if isinstance(delta, tuple) else None
    run = prepare_backward(problem, layout_of(dout), output, by_keys, by_queries)
    return run(dout, q, k, v, lse, delta, mask.indices, plan)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    config: Config | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    problem = problem_of(q, k, v, mask.indices, sinks, mask.causal, Arguments(scale, softcap))
    return prepare_decode(problem, config, n_splits)(q, k, v, sinks, mask.indices)
