"""The implementations of attention, the best first.

With impl=None a call takes the first that serves it, and the next if its kernels fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call.arguments import Arguments
from flashmask_hf.kernels.eager import tiled
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import Layout

if TYPE_CHECKING:  # Triton may be missing
    from flashmask_hf.kernels.shared.row_statistics import OutputLayout

MAX_HEAD_DIM = 256
"""Largest head dim of queries and of values in the Triton kernels."""

_NO_TRITON = "this process: Triton is not installed"

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Run: TypeAlias = Callable[..., Any]
"""A prepared pass: a function of tensors."""


class Request(NamedTuple):
    """What a call asks of an implementation."""

    device: torch.device
    dtype: torch.dtype
    """Of q, k and v."""
    head_dim: int
    """D of q and k."""
    v_head_dim: int
    """Dv of v."""
    arguments: Arguments = Arguments()


class Implementation:
    """One way to compute attention.

    A pass is prepared once per problem, as a function of tensors:

        forward: (q, k, v, sinks, indices, plan[, seed]) -> (out, lse)
        backward: (dout, q, k, v, lse, delta, indices, plan[, seed]) -> (dq, dk, dv, delta)
        decode: (q, k, v, sinks, indices) -> (out, lse), for few rows, without a plan

    `delta` [B, Hq, Sq] holds the row sums of dout * out less the gradient of lse; or it is (out, gradient of lse or
    None). `seed` is given only with dropout.

    An ordered pass has a last argument, one or two permutations of every head's rows, int32 [B, H, S]: row i of out, or
    of dq, and of dk and dv, goes to `order[b, h, i]`; lse stays in the order of q.
    """

    name: ClassVar[str]
    """Value of `impl`."""
    takes: ClassVar[tuple[str, ...]] = ("scale", "softcap", "impl", "deterministic")
    """Arguments that may differ from their defaults; all others are refused."""
    decodes: ClassVar[bool] = True
    """Whether it has a pass for few rows without a plan."""

    def why_not(self, request: Request) -> str | None:
        """Return what it cannot serve, to follow "cannot serve", or None."""
        for name, default in Arguments._field_defaults.items():
            value = getattr(request.arguments, name)
            if name not in self.takes and value != default:
                return f"{name}={value!r}"
        return self.limit(request)

    def limit(self, request: Request) -> str | None:
        """Return which device, dtype or head dim it cannot serve, or None."""
        return None

    def left_out(self, device: torch.device) -> str | None:
        """Return why impl=None never takes it on a device, or None."""
        return None

    def forward(self, problem: Problem, ordered: bool = False) -> Run:
        """Prepare the forward."""
        raise NotImplementedError

    def backward(self, problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool = False) -> Run:
        """Prepare the backward.

        `dout` is the layout of the output's gradient, and `output` is (layout of the output, whether lse has a
        gradient), or None if delta is given as row sums.
        """
        raise NotImplementedError

    def decode(self, problem: Problem) -> Run:
        """Prepare attention of few rows."""
        raise NotImplementedError


class _Kernels(Implementation):
    """Kernels in Triton's languages, for GPUs."""

    def left_out(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"no GPU for impl='triton', the tensors are on {device.type}"
        return None if torch_internals.HAS_TRITON else "Triton is not installed"


class Hopper(_Kernels):
    """Kernels in Gluon for GPUs of compute capability 9.0, which store rows in an order."""

    name = "hopper"
    decodes = False

    def limit(self, request: Request) -> str | None:
        if not torch_internals.HAS_TRITON:
            return _NO_TRITON
        from flashmask_hf.kernels.hopper import gluon

        obstacle = gluon.unavailable_reason()
        if obstacle is not None:
            return f"this process: {obstacle}"
        from flashmask_hf.kernels.hopper.forward import unsupported_reason

        return unsupported_reason(request.device, request.dtype, request.head_dim, request.v_head_dim)

    def forward(self, problem: Problem, ordered: bool = False) -> Run:
        from flashmask_hf.kernels.hopper import forward

        return forward.prepare_forward(problem, ordered)

    def backward(self, problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool = False) -> Run:
        from flashmask_hf.kernels.hopper import backward

        return backward.prepare_backward(problem, dout, output, ordered)


class Triton(_Kernels):
    """Kernels in Triton for any GPU."""

    name = "triton"
    takes = (*Implementation.takes, "dropout")

    def limit(self, request: Request) -> str | None:
        if not torch_internals.HAS_TRITON:
            return _NO_TRITON
        if not torch_internals.runs_kernels(request.device):
            return f"tensors on {request.device.type} (it needs a GPU)"
        if request.dtype not in _KERNEL_DTYPES:
            return f"dtype {request.dtype} (it takes bfloat16, float16, float32)"
        largest = max(request.head_dim, request.v_head_dim)
        return f"head_dim {largest} (its limit is {MAX_HEAD_DIM})" if largest > MAX_HEAD_DIM else None

    def forward(self, problem: Problem, ordered: bool = False) -> Run:
        from flashmask_hf.kernels.portable import forward

        return _placed(forward.prepare_forward(problem), ordered)

    def backward(self, problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool = False) -> Run:
        from flashmask_hf.kernels.portable import backward

        return _placed(backward.prepare_backward(problem, dout, output), ordered)

    def decode(self, problem: Problem) -> Run:
        from flashmask_hf.kernels.portable import decode

        return decode.prepare_decode(problem)


class Torch(Implementation):
    """Torch operations tile by tile, on any device."""

    name = "torch"
    takes = Arguments._fields

    def left_out(self, device: torch.device) -> str | None:
        kernels = device.type == "cuda" and torch_internals.HAS_TRITON
        return "it is much slower than a GPU's kernels" if kernels else None

    def forward(self, problem: Problem, ordered: bool = False) -> Run:
        return _placed(partial(tiled.forward, problem), ordered)

    def backward(self, problem: Problem, dout: Layout, output: OutputLayout | None, ordered: bool = False) -> Run:
        return _placed(partial(tiled.backward, problem), ordered)

    def decode(self, problem: Problem) -> Run:
        return partial(tiled.decode, problem)


class Reference(Implementation):
    """The dense mask in torch, differentiated by autograd, without a `Call`'s passes."""

    name = "reference"
    takes = Arguments._fields
    decodes = False

    def left_out(self, device: torch.device) -> str | None:
        return "it takes quadratic memory"


REGISTRY: list[Implementation] = [Hopper(), Triton(), Torch(), Reference()]
"""All implementations, the best first."""


class Choice(NamedTuple):
    """The implementations that a call tries in their order.

    `reason` is the error's message if none serves; else, for impl=None alone, it says why no better one is chosen.
    """

    implementations: tuple[Implementation, ...]
    reason: str

    @property
    def impl(self) -> str | None:
        """Name of the first implementation, or None."""
        return self.implementations[0].name if self.implementations else None


def choose(request: Request) -> Choice:
    """Choose the implementations that serve a request; one that `impl` names is never replaced."""
    device, impl = request.device, request.arguments.impl
    if impl is None:
        candidates = [one for one in REGISTRY if one.left_out(device) is None]
    else:
        candidates = [one for one in REGISTRY if one.name == impl]
    if not candidates:
        names = ", ".join(one.name for one in REGISTRY)
        return Choice((), f"impl must be None or one of {names}, got {impl!r}")
    refusals = [(one, one.why_not(request)) for one in candidates]
    serving = tuple(one for one, why in refusals if why is None)
    refused = [f"impl={one.name!r} cannot serve {why}" for one, why in refusals if why is not None]
    if not serving:
        slower = REGISTRY[REGISTRY.index(candidates[-1]) + 1 :]
        ways_out = [f"impl={one.name!r} can, more slowly" for one in slower if one.why_not(request) is None]
        return Choice((), "; ".join([refused[-1], *ways_out[:1]]))
    left_out = REGISTRY[0].left_out(device)
    return Choice(serving, left_out or "; ".join(["the kernels take this device, dtype and head_dim", *refused]))


def _placed(run: Run, ordered: bool) -> Run:
    """Return a pass, made ordered by moving rows of its results."""
    if not ordered:
        return run
    from flashmask_hf.sparse.reorder import put_rows_back

    def run_and_place(*inputs: Any) -> tuple[Tensor, ...]:
        given, results = inputs[-1], run(*inputs[:-1])
        orders = (given,) if isinstance(given, Tensor) else (given[0], given[1], given[1])
        return *map(put_rows_back, results, orders), *results[len(orders) :]

    return run_and_place
