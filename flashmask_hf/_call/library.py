"""Registration of operators with torch.library, and of their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Derivative", "as_operator", "no_derivatives", "no_second_derivatives", "register_autograd"]


def as_operator(name: str, function: Callable[..., Any]) -> Any:
    """Register `function` as operator `flashmask_hf::name`, which mutates nothing, and return the operator.

    `torch.library.custom_op` would wrap it in Python code that takes longer than the rest of a short call.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"flashmask_hf::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flashmask_hf::{name}", "default", function)
    return getattr(torch.ops.flashmask_hf, name).default


class Derivative(NamedTuple):
    """Derivative of an operator: what it saves of a call, and the backward."""

    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    """(ctx, inputs, output), as in `torch.autograd.Function`."""
    backward: Callable[..., Any]
    """(ctx, *gradients of the outputs) -> a gradient or None for every input."""


class _Node(torch.autograd.Function):
    """A call of `run` that differentiates as `derivative` says."""

    @staticmethod
    def forward(ctx: Any, derivative: Derivative, run: Callable[..., Any], *inputs: Any) -> Any:
        output = run(*inputs)
        derivative.setup_context(ctx, inputs, output)
        ctx.derivative = derivative
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.derivative.backward(ctx, *gradients)


def register_autograd(operator: Any, derivative: Derivative) -> None:
    """Register the derivative of an operator.

    Unlike `torch.library.register_autograd`, which asks the schema for the defaults of all arguments at each call and
    takes longer than a launch. As there, the operator is called again below autograd, where dispatch modes (fake
    tensors, selective checkpointing) see it.
    """

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def differentiable(*inputs: Any) -> Any:
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*inputs):
            return below_autograd(*inputs)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention has no derivatives of torch.func's (grad, vjp, jacrev); take Tensor.backward or "
                "torch.autograd.grad, or flashmask_attention's impl='reference'"
            )
        return _Node.apply(derivative, below_autograd, *inputs)

    torch.library.impl(operator.name(), "Autograd", differentiable)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save nothing for a backward that only raises."""


def _refuse_second(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("this attention has no second derivatives; take the first without create_graph=True")


def _refuse_first(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "this attention was traced or exported without gradients and has none; trace it with inputs that require them"
    )


no_second_derivatives = Derivative(_save_nothing, _refuse_second)
"""The derivative of an operator that is a backward."""
no_derivatives = Derivative(_save_nothing, _refuse_first)
"""The derivative of an operator that is chosen where no gradients are asked for, in a graph that is then trained."""
