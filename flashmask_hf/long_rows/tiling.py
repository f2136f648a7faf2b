"""Tiling of MLPs and norms over tokens, without intermediate results of whole rows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import _get_autocast_kwargs, get_device_states, set_device_states

from flashmask_hf._numbers import as_integer
from flashmask_hf.long_rows.modules import common_module
from flashmask_hf.torch_internals import is_plain

_PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""Children of a gated MLP: three projections, or two where gate and up are one, as in Phi-3."""

_LAYER_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm", "NemotronLayerNorm1P", "OlmoLayerNorm")
"""Layer norms of decoders with their own forward. Others may normalise channels of images."""

Slots = list[tuple[dict[str, Any], str]]
"""Attributes that hold a tensor, each as a dictionary and a key."""


def tile_tokens(model: nn.Module, tokens: int = 8192) -> list[str]:
    """Make a model's gated MLPs and norms run in tiles of tokens, in place, to save memory on long rows.

    A tiled module saves only its input, and its backward computes each tile again, with the same dropout and autocast.
    Gradients of parameters are summed over tiles in float32 or more, and reach DDP, FSDP2 and hooks once per call.
    Non-reentrant checkpointing does not recompute an MLP at the end of a layer.

    Tiled are modules with the linear children gate_proj, up_proj and down_proj, or gate_up_proj and down_proj, and
    norms over the last dimension (RMSNorm, LayerNorm) of one tensor. Calls with at most `tokens` tokens, or with more
    arguments, run as before. With dropout each tile draws its own numbers.

    Adapters and patches such as `use_liger_kernel` may come before or after. Tiled calls run uncompiled, and raise with
    `fullgraph=True`. A second call changes the size of the tiles.

    Args:
        model: a model or a submodel, plain or with adapters of PEFT.
        tokens: tokens per tile, in a call's first two dimensions (matrices: the first).

    Returns:
        The names of the tiled modules in `model.named_modules()`.

    Raises:
        TypeError: `tokens` is not an int.
        ValueError: `tokens` is not positive, or the model has nothing to tile.

    Warns:
        UserWarning: only norms are tiled, since the model has no gated MLP.

    Example:
        ```python
        flashmask_hf.long_rows.tile_tokens(model)  # then any trainer
        ```
    """
    tokens = as_integer("tokens", tokens, 1)
    found = {name: module for name, module in model.named_modules() if _is_gated_mlp(module) or _is_norm(module)}
    children = "gate_proj, up_proj and down_proj (or gate_up_proj, down_proj)"
    missing = f"{type(model).__name__} has no gated MLP: no module has the linear children {children} alone"
    if not found:
        raise ValueError(f"nothing to tile: {missing}; and no norm over the last dimension")
    if not any(_is_gated_mlp(module) for module in found.values()):
        warnings.warn(f"only norms are tiled: {missing}", stacklevel=2)
    for module in found.values():
        forward: Any = module.__dict__.get("forward")
        if _is_tiled(forward):  # by an earlier call
            module.__dict__["forward"] = forward.args[1]
    holder = common_module(model, list(found))
    hooks = holder._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is _tile]:
        del hooks[key]
    tile = functools.partial(_tile, list(found.values()), tokens)
    holder.register_forward_pre_hook(tile)  # for patches that come later
    tile()
    return list(found)


def _is_tiled(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is _forward


def _tile(modules: list[nn.Module], tokens: int, *_: Any) -> None:
    """Make modules run their forward, or a patch of it, in tiles."""
    for module in modules:
        patch = module.__dict__.get("forward")
        if not _is_tiled(patch):
            # A partial can be pickled, and a deep copy of the module contains its copy.
            module.forward = functools.partial(_forward, module, patch, tokens)


def _is_gated_mlp(module: nn.Module) -> bool:
    children = {name: child for name, child in module._modules.items() if child is not None}
    projections = next((names for names in _PROJECTIONS if names <= children.keys()), None)
    return (
        projections is not None
        and all(hasattr(children[name], "in_features") for name in projections)  # linear, also quantized or adapted
        and not module._parameters
        and all(
            _is_norm(child) or next(child.parameters(), None) is None
            for name, child in children.items()
            if name not in projections
        )
        and _takes_one_tensor(module)
    )


def _is_norm(module: nn.Module) -> bool:
    name, forward = type(module).__name__, type(module).forward
    return (
        ("rmsnorm" in name.lower() or name in _LAYER_NORMS or forward in (nn.LayerNorm.forward, nn.RMSNorm.forward))
        and all(weight.dim() <= 1 for weight in module._parameters.values() if weight is not None)
        and len(getattr(module, "normalized_shape", "1")) == 1
        and not any(module.children())
        and _takes_one_tensor(module)
    )


def _takes_one_tensor(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2  # self and the tensor


class _Call(NamedTuple):
    """A module, its forward without tiles, and the tokens per tile."""

    module: nn.Module
    forward: Callable[..., Any]
    tokens: int


def _forward(module: nn.Module, patch: Callable[..., Any] | None, tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, in tiles if its only argument has more than `tokens` tokens."""
    forward = patch or functools.partial(type(module).forward, module)
    # Activated LoRA passes state per token of the whole row in such keywords.
    parts_get_keywords = any(part._forward_pre_hooks_with_kwargs for part in module.children())
    if len(args) != 1 or kwargs or parts_get_keywords or not _is_long(args[0], tokens):
        return forward(*args, **kwargs)
    return _forward_in_tiles(_Call(module, forward, tokens), args[0])


def _is_long(x: Any, tokens: int) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:-1][:2].numel() > tokens


# Compiled tiles could draw other dropout than their backward, which autograd's thread does not compile.
@torch.compiler.disable(reason="tile_tokens runs tiles uncompiled: leave fullgraph at False")
def _forward_in_tiles(call: _Call, x: Tensor) -> Tensor:
    if not is_plain(x):  # tiles of a DTensor would move between devices
        return call.forward(x)
    weights = list(_slots_of(call.module)) if torch.is_grad_enabled() else []
    if not weights and not (torch.is_grad_enabled() and x.requires_grad):
        with torch.no_grad():
            return _run_tiles(call, x)
    held = _SaveInput.apply(x, None if x.requires_grad else x.new_empty(0, requires_grad=True))
    return _RunTiles.apply(held, held.grad_fn, x.requires_grad, call, *weights)


def _split(x: Tensor, tokens: int) -> Sequence[Tensor]:
    """Return the tiles [1, tokens, ...] of x [B, S, ...], or [tokens, D] of a matrix; views if x is contiguous."""
    return x.split(tokens) if x.dim() == 2 else x.flatten(0, 1)[None].split(tokens, dim=1)


def _run_tiles(call: _Call, x: Tensor) -> Tensor:
    """Return the output of a whole call, computed tile by tile."""
    out, parts = None, iter(())
    for tile in _split(x, call.tokens):
        y = call.forward(tile)
        if not isinstance(y, Tensor) or y.shape[:-1] != tile.shape[:-1]:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(
                f"tile_tokens: {type(call.module).__name__} must return one tensor with a row for each token, got "
                f"{got} for an input of shape {tuple(tile.shape)}"
            )
        if out is None:
            out = y.new_empty(*x.shape[:-1], y.shape[-1])
            parts = iter(_split(out, call.tokens))
        next(parts).copy_(y)
    assert out is not None
    return out


def _slots_of(module: nn.Module) -> dict[Tensor, Slots]:
    """Return the tensors of a module that require gradients, each with its places; FSDP1's are plain attributes."""
    found: dict[Tensor, Slots] = {}
    for child in module.modules():
        for holder in (child._parameters, child.__dict__):
            for name, value in holder.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    found.setdefault(value, []).append((holder, name))
    return found


@contextlib.contextmanager
def _replace(slots: Sequence[Slots], values: Sequence[Tensor]) -> Iterator[None]:
    """Replace a module's tensors inside the context."""
    kept = [(holder, name, holder[name]) for places in slots for holder, name in places]
    try:
        for places, value in zip(slots, values, strict=True):
            for holder, name in places:
                holder[name] = value
        yield
    finally:
        for holder, name, value in kept:
            holder[name] = value


class _SaveInput(torch.autograd.Function):
    """Identity that saves its input for the node after it, before the tiles run.

    Checkpointing recomputes a layer up to its last saved tensor: if the node of the tiles saved it, all tiles would run
    again. `anchor` requires a gradient if x does not, and is None otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _RunTiles(torch.autograd.Function):
    """A module's call in tiles, which the backward computes again. `saved` is the node of `_SaveInput`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Any, wants_x: bool, call: _Call, *weights: Tensor) -> Tensor:
        ctx.saved, ctx.wants_x, ctx.call = saved, wants_x, call
        ctx.weights, ctx.versions = weights, [weight._version for weight in weights]
        ctx.random = (torch.get_rng_state(), *get_device_states(x))
        ctx.autocast = _get_autocast_kwargs(x.device.type)
        return _run_tiles(call, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        call, (x,) = ctx.call, ctx.saved.saved_tensors
        slots = _slots_of(call.module)
        _check_weights(ctx, list(slots))
        # Copies without history: hooks on weights see the gradient of the call, not of tiles.
        weights = [_leaf(weight) for weight in slots]
        own, on_cpu = ctx.autocast  # None on a device without autocast
        own_autocast = own and torch.autocast(x.device.type, **own)
        x_grad = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.wants_x else None
        x_parts = iter(_split(x_grad, call.tokens) if x_grad is not None else ())
        sums: list[Tensor | None] = [None] * len(weights)
        with _replace(list(slots.values()), weights), _random_state(x.device.type, *ctx.random):
            for tile, grad in zip(_split(x, call.tokens), _split(grads[0], call.tokens), strict=True):
                tile = tile.detach().requires_grad_(ctx.wants_x)
                with torch.enable_grad(), own_autocast or contextlib.nullcontext(), torch.autocast("cpu", **on_cpu):
                    y = call.forward(tile)
                inputs = [tile, *weights] if ctx.wants_x else weights
                # Merged adapters get no gradient.
                parts = list(torch.autograd.grad(y, inputs, grad, allow_unused=True)) if y.requires_grad else []
                del y
                if ctx.wants_x:
                    part = parts.pop(0)
                    next(x_parts).zero_() if part is None else next(x_parts).copy_(part)
                _add(sums, parts)
        pairs = zip(sums, weights, strict=True)
        return x_grad, None, None, None, *(None if total is None else total.to(w.dtype) for total, w in pairs)


def _check_weights(ctx: Any, weights: list[Tensor]) -> None:
    """Raise if a module's tensors were replaced or changed in place since its forward."""
    name = type(ctx.call.module).__name__
    same = len(weights) == len(ctx.weights) and all(
        weight is before or not isinstance(weight, nn.Parameter)  # FSDP1 makes new views for the backward
        for weight, before in zip(weights, ctx.weights, strict=True)
    )
    if not same:
        problem = f"{name} has other parameters that require gradients in its backward than in its forward"
        raise RuntimeError(f"tile_tokens: {problem}; change adapters and requires_grad between steps")
    for weight, before, version in zip(weights, ctx.weights, ctx.versions, strict=True):
        if weight is before and weight._version != version:
            problem = f"a weight of {name} was changed in place between its forward and its backward"
            raise RuntimeError(f"tile_tokens: {problem}; step the optimizer after the backward")


def _leaf(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.detach()) if isinstance(weight, nn.Parameter) else weight.detach().requires_grad_()


def _add(sums: list[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """Add gradients of a tile to the sums, in at least float32."""
    for i, (total, part) in enumerate(zip(sums, parts, strict=False)):  # merged adapters have no parts
        if part is not None:
            wide = torch.promote_types(part.dtype, torch.float32)
            sums[i] = part.to(wide, copy=True) if total is None else total.add_(part)


@contextlib.contextmanager
def _random_state(kind: str, state: Tensor, devices: list[int], states: list[Tensor]) -> Iterator[None]:
    """Draw random numbers from a saved state inside the context."""
    with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
        torch.set_rng_state(state)
        set_device_states(devices, states, device_type=kind if devices else None)
        yield
