"""Registration of operators with torch.library, and the autograd function of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

import torch


class Derivative(NamedTuple):
    """Derivative of an operator."""

    save: Callable[..., None]
    """(ctx, output, *inputs): saves on `ctx` what the backward reads."""
    backward: Callable[..., tuple[Any, ...]]
    """(ctx, *gradients of the outputs) -> gradients of the first inputs, in order; all others get None."""


class Recorded(torch.autograd.Function):
    """A call of `run` that differentiates as `derivative` says."""

    @staticmethod
    def forward(ctx: Any, derivative: Derivative, run: Callable[..., Any], *inputs: Any) -> Any:
        output = run(*inputs)
        ctx.derivative, ctx.run = derivative, run
        derivative.save(ctx, output, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.derivative.backward(ctx, *gradients)
        return None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - len(found))


def operator(fake: Callable[..., Any], derivative: Derivative | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as operator `flashmask_hf::NAME`, which mutates nothing; return the operator.

    The schema has the fields of a NamedTuple parameter. `torch.library.custom_op` would take longer than a launch.

    Args:
        fake: returns uninitialised results for the function's arguments.
        derivative: of the operator. None passes no gradients.
    """

    def register(function: Callable[..., Any]) -> Any:
        name, flat, pack = f"flashmask_hf::{function.__name__}", *_flatten(function)
        schema = torch.library.infer_schema(flat, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", lambda *inputs: function(*pack(inputs)))
        torch.library.register_fake(name, lambda *inputs: fake(*pack(inputs)))
        registered = getattr(torch.ops.flashmask_hf, function.__name__).default
        if derivative is not None:
            torch.library.impl(name, "Autograd", _differentiable(registered, derivative, pack))
        return registered

    return register


def _flatten(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[tuple[Any, ...]], list[Any]]]:
    """Return a function with the flat signature of an operator, and one that packs flat inputs."""
    types = get_type_hints(function)
    returned = types.pop("return")
    flat: dict[str, Any] = {}
    parts: list[tuple[slice, Callable[[Any], Any]]] = []
    for name, kind in types.items():
        packed = hasattr(kind, "_fields")
        fields = get_type_hints(kind) if packed else {name: kind}
        parts.append((slice(len(flat), len(flat) + len(fields)), kind._make if packed else itemgetter(0)))
        flat |= fields
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, place, annotation=kind) for name, kind in flat.items()]

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return prototype, lambda inputs: [make(inputs[part]) for part, make in parts]


def _differentiable(registered: Any, derivative: Derivative, pack: Callable[[tuple[Any, ...]], list[Any]]) -> Any:
    """Return the operator's function on the autograd key, which calls the operator below autograd."""

    # `Recorded` keeps it: it must not hold the inputs, which hooks may offload.
    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return registered(*inputs)

    def save(ctx: Any, output: Any, *inputs: Any) -> None:
        derivative.save(ctx, output, *pack(inputs))

    flat = Derivative(save, derivative.backward)

    def differentiable(*inputs: Any) -> Any:
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*inputs):
            return below_autograd(*inputs)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention has no derivatives of torch.func's (grad, vjp, jacrev); take Tensor.backward or "
                "torch.autograd.grad, or flashmask_attention's impl='reference'"
            )
        return Recorded.apply(flat, below_autograd, *inputs)

    return differentiable


def _refusing(message: str) -> Derivative:
    def refuse(*_: Any) -> Any:
        raise RuntimeError(message)

    return Derivative(lambda *_: None, refuse)


no_second_derivatives = _refusing("this attention has no second derivatives; take the first without create_graph=True")
"""The derivative of an operator that is a backward."""
no_derivatives = _refusing(
    "this attention was traced or exported without gradients and has none; trace it with inputs that require them"
)
"""The derivative of an operator for calls without gradients."""
