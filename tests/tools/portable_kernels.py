"""The portable kernels as plain functions: each prepares a kernel for the tensors it is given and runs it once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from flashmask_hf import FlashMask
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.kernels.portable import backward as portable_backward
from flashmask_hf.kernels.portable import decode as portable_decode
from flashmask_hf.kernels.portable import forward as portable_forward
from flashmask_hf.kernels.shared.configs import Config
from flashmask_hf.kernels.shared.row_statistics import Delta, Gradients
from flashmask_hf.tile_plan import Plan


@contextlib.contextmanager
def chosen(module: ModuleType, **choices: Any) -> Iterator[None]:
    """Make functions of a module, by name, return these choices, unless None, in place of the measured ones."""
    with contextlib.ExitStack() as stack:
        for name, choice in choices.items():
            if choice is not None:
                stack.enter_context(mock.patch.object(module, name, lambda *_, choice=choice: choice))
        yield


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
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    arguments, shard = Arguments(scale, softcap, dropout=dropout), seed is not None and len(seed) > 1
    problem = problem_of(Inputs(q, k, v, sinks, mask.indices), mask.causal, arguments, shard)
    with chosen(portable_forward, forward_config=config):
        run = portable_forward.prepare_forward(problem)
    return run(q, k, v, sinks, mask.indices, plan, seed)


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
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Gradients:
    """Return dq, dk, dv and delta."""
    arguments, shard = Arguments(scale, softcap, dropout=dropout), seed is not None and len(seed) > 1
    problem = problem_of(Inputs(q, k, v, None, mask.indices), mask.causal, arguments, shard)
    output = (layout_of(delta[0]), delta[1] is not None) if isinstance(delta, tuple) else None
    with chosen(portable_backward, keys_config=by_keys, queries_config=by_queries):
        run = portable_backward.prepare_backward(problem, layout_of(dout), output)
    return run(dout, q, k, v, lse, delta, mask.indices, plan, seed)


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
    problem = problem_of(Inputs(q, k, v, sinks, mask.indices), mask.causal, Arguments(scale, softcap))
    with chosen(portable_decode, decode_config=config, decode_splits=n_splits):
        run = portable_decode.prepare_decode(problem)
    return run(q, k, v, sinks, mask.indices)
