"""Differentiable collectives of equal shards, whose results are plain tensors.

`AsyncCollectiveTensor`s of `torch.distributed._functional_collectives` wait when an operator of torch reads them, but
not when a kernel gets their pointer. The collectives here wait on the current stream. They call the operators that
compilers know, named as in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import ProcessGroup

_operators = torch.ops._c10d_functional


class Group(NamedTuple):
    """Name, size and rank of a process group, for operators."""

    name: str
    size: int
    rank: int
    """This rank's index in the group."""


def group_of(group: ProcessGroup) -> Group:
    """Return a process group for operators."""
    return Group(group.group_name, group.size(), group.rank())


def all_to_all(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to send x[i] of x [N, ...] to rank i.

    Returns a function that waits for what the ranks sent, [N, ...] in the order of ranks. In the backward, gradients
    travel between the two as well: what the engine runs meanwhile overlaps with it.
    """
    pending: Any = _Start.apply(x, group.name, group.size)
    return lambda: _Finish.apply(pending, group.name, group.size)  # pyright: ignore[reportReturnType]


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Return the x [...] of every rank, [N, ...]. The backward sums gradients over the ranks."""
    return _AllGather.apply(x, group.name, group.size)  # pyright: ignore[reportReturnType]


def all_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum of every rank's x. The backward sums gradients over the ranks."""
    return _AllSum.apply(x, group.name)  # pyright: ignore[reportReturnType]


def _start(x: Tensor, name: str, size: int) -> Tensor:
    """Return the result of an all-to-all, which only `wait_tensor` may read."""
    parts = [1] * size
    return _operators.all_to_all_single(x.contiguous(), parts, parts, name)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        return _start(x, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _operators.wait_tensor(grad), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, name: str, size: int) -> Tensor:
        ctx.group = name, size
        return _operators.wait_tensor(pending)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _start(grad, *ctx.group), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        ctx.group = name, size
        return _operators.wait_tensor(_operators.all_gather_into_tensor(x.contiguous()[None], size, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        name, size = ctx.group
        summed = _operators.reduce_scatter_tensor(grad.contiguous(), "sum", size, name)
        return _operators.wait_tensor(summed)[0], None, None


def _sum(x: Tensor, name: str) -> Tensor:
    """Run `all_sum` without autograd; it is its own backward."""
    return _operators.wait_tensor(_operators.all_reduce(x.contiguous(), "sum", name))


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _sum(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(grad, ctx.name), None
