"""The operator `flashmask_hf::plan`, and the cache of a mask's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashmask_hf import tile_plan as plan_in_torch
from flashmask_hf import torch_internals
from flashmask_hf._call.library import operator
from flashmask_hf._numbers import check_range
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan, empty_plan

__all__ = ["make_plan", "plan_of"]


@operator(lambda indices, causal, q_len: tuple(empty_plan(indices, q_len)))
def make_plan(indices: Tensor, causal: bool, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Classify the tiles of a mask (see `flashmask_hf.tile_plan`).

    Args:
        indices: int32 [B, Hm, Skv, n].
        causal: as in `FlashMask`.
        q_len: number of query rows.

    Returns:
        The tensors of a `Plan`.

    Raises:
        ValueError: a value lies outside 0..q_len. On a GPU it is an assertion of the device, which stops the program.
    """
    tiles, counts, segments = _builder(indices)(indices, causal, q_len)
    return tiles, counts, segments


def _builder(indices: Tensor) -> Callable[[Tensor, bool, int], Plan]:
    """Return the builder of plans: Triton kernels on a GPU with Triton, torch operations elsewhere."""
    if indices.device.type == "cuda" and torch_internals.HAS_TRITON:
        from flashmask_hf.kernels.shared.plan_kernels import build_plan

        return build_plan
    return _build_in_torch


def _build_in_torch(indices: Tensor, causal: bool, q_len: int) -> Plan:
    check_range(indices, q_len)
    return plan_in_torch.build_plan(indices, causal, q_len)


class _CachedPlan(NamedTuple):
    """The plan that a mask caches, and the facts that keep it valid."""

    q_len: int
    version: int
    """Version counter of the mask's indices."""
    memory: tuple[int, torch.Size, tuple[int, ...]]
    """Address, shape and strides of the indices."""
    stream: tuple[int, int] | None
    """CUDA device and stream on which the plan may be read."""
    is_inference: bool
    """Whether the plan was made in inference mode: autograd cannot save its tensors."""
    plan: Plan
    alias: Tensor
    """Alias of the mask's indices, which keeps their memory from being reused."""


def plan_of(mask: FlashMask, q_len: int) -> Plan:
    """Return the mask's plan for `q_len` query rows, cached if valid.

    A counted change of `mask.indices`, other memory and another CUDA stream make a new plan. Nothing is cached for
    tensors made in inference mode, which do not count changes, nor while capturing a CUDA graph or compiling.
    """
    indices = mask._indices
    if torch.compiler.is_compiling():
        return Plan(*make_plan(indices, mask.causal, q_len))
    cached = mask._plan
    if (
        cached is not None
        and cached.q_len == q_len
        and cached.version == indices._version
        and cached.memory == (indices.data_ptr(), indices.shape, indices.stride())
        and (cached.stream is None or _is_current(cached.stream, indices))
        and not (cached.is_inference and torch.is_grad_enabled())
    ):
        return cached.plan
    version = None if indices.is_inference() else indices._version  # read first: another thread may write meanwhile
    plan = Plan(*make_plan(indices, mask.causal, q_len))
    # Plans of modes and transforms stay inside, and a graph's plan is in the graph's memory.
    if version is not None and torch_internals.is_plain(plan.tiles) and not torch_internals.is_capturing(indices):
        alias = indices.detach()
        memory, stream = (alias.data_ptr(), alias.shape, alias.stride()), torch_internals.stream_of(alias)
        mask._plan = _CachedPlan(q_len, version, memory, stream, plan.tiles.is_inference(), plan, alias)
    return plan


def _is_current(stream: tuple[int, int], indices: Tensor) -> bool:
    """Return whether a plan of this GPU and stream may be read now."""
    return stream[1] == torch_internals.current_stream(stream[0]) and not torch_internals.is_capturing(indices)
