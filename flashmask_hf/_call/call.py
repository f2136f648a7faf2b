"""Cache of resolved calls: a call whose tensors have a known layout skips the checks and launches its kernels.

Checks, choice and preparation take longer than the launches, and follow from layouts, arguments and torch's modes.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call.arguments import Arguments, Inputs, check_arguments
from flashmask_hf._call.implementations import Implementation, Request, Run, choose
from flashmask_hf.kernels.launch.problem import Problem, problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan

logger = logging.getLogger(__name__)

_FEW_ROWS = 64
"""Query rows, over all heads that share keys, up to which attention without gradients needs no plan."""

_MAX_CALLS = 1024
"""Number of calls that are kept. When it is reached, all are dropped."""
_calls: dict[Hashable, Call] = {}

_failed: set[tuple[str, str]] = set()
"""Implementations and passes ("forward", "backward") that failed in this process. impl=None skips them."""

Results: TypeAlias = tuple[Tensor, Tensor]
"""Output and log-sum-exp of a call."""

Keeper: TypeAlias = Callable[[Tensor, Callable[[], Results]], Results]
"""Function of a call's queries and of the function that computes its results; it returns them."""

current_keeper: contextvars.ContextVar[Keeper | None] = contextvars.ContextVar("current_keeper", default=None)
"""The keeper of the checkpointed layer that runs, or None (`long_rows.checkpointing` sets it)."""


@dataclass(eq=False)
class Call:
    """A resolved call: attention for tensors of one layout, with its prepared launches."""

    causal: bool
    """Of the masks."""
    arguments: Arguments
    """As given, with `scale` and `deterministic` resolved."""
    implementations: tuple[Implementation, ...]
    """Which to try, in order; errors of the last are raised."""
    cast_to: torch.dtype | None
    """Dtype to which autocast casts q, k and v."""
    decodes: bool
    """Whether the rows are few and attention runs without a plan."""
    differentiated: bool
    """Whether results require gradients."""
    intercepted: bool
    """Whether the call must run through the operators (`torch_internals.is_intercepted`)."""
    gpu: int | None
    """Index of the GPU of the tensors; None on other devices."""
    _prepared: dict[Hashable, Run] = field(default_factory=dict)
    """By pass, ordering of rows, layouts of saved tensors in backwards, and alignment of a shard's seed."""

    def cast(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v cast as SDPA casts them under autocast."""
        dtype = self.cast_to
        return (q, k, v) if dtype is None else (q.to(dtype), k.to(dtype), v.to(dtype))

    def forward(self, inputs: Inputs, plan: Plan, seed: Tensor | None = None, order: Tensor | None = None) -> Results:
        """Return out and lse, as `operators.flash_attn_forward` documents them.

        `order`, int32 [B, Hq, Sq], puts row i of the output at `order[b, h, i]`; lse stays in the order of q.
        """
        last = seed if order is None else order  # no call has both
        tensors = (*inputs, plan) if last is None else (*inputs, plan, last)

        def prepare(one: Implementation) -> Run:
            return one.forward(self._problem(inputs, seed), order is not None)

        key = ("forward", order is not None)
        keeper = current_keeper.get()
        if keeper is not None:
            return keeper(inputs.q, lambda: self._run(key, prepare, tensors, seed))
        return self._run(key, prepare, tensors, seed)

    def __call__(self, *tensors: Any) -> Results:
        """Run the forward of flat inputs, plan and seed, for autograd."""
        return self.forward(Inputs._make(tensors[:5]), *tensors[5:])

    def backward(
        self,
        dout: Tensor,
        inputs: Inputs,
        lse: Tensor,
        delta: Tensor | tuple[Tensor, Tensor | None],
        plan: Plan,
        seed: Tensor | None = None,
        orders: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and sinks (None without sinks).

        `dout` and `delta` are as in `Implementation`. `orders`, int32 [B, Hq, Sq] and [B, Hkv, Skv], put the rows of
        dq, and of dk and dv, in an order.
        """
        q, k, v, sinks, indices = inputs
        tensors: tuple[Any, ...] = (dout, q, k, v, lse, delta, indices, plan)
        last = seed if orders is None else orders
        if last is not None:
            tensors = (*tensors, last)
        out, dlse = delta if isinstance(delta, tuple) else (None, None)
        # Hooks on saved tensors, such as offloading, keep shapes and dtypes only.
        saved = (dout, q, k, v, lse, indices) if out is None else (dout, q, k, v, lse, indices, out)
        layouts = [(x.stride(), x.data_ptr() % 16) for x in saved]
        key = ("backward", orders is not None, dlse is None, *layouts)

        def prepare(one: Implementation) -> Run:
            problem = self._problem(inputs, seed)
            output = None if out is None else (layout_of(out), dlse is not None)
            return one.backward(problem, layout_of(dout), output, orders is not None)

        dq, dk, dv, row_sums = self._run(key, prepare, tensors, seed)
        return dq, dk, dv, None if sinks is None else _sinks_gradient(sinks, lse, row_sums)

    def decode(self, inputs: Inputs) -> Results:
        """Return out and lse of few rows, without a plan."""
        return self._run(("decode",), lambda one: one.decode(self._problem(inputs)), inputs)

    def _run(
        self, key: tuple[Any, ...], prepare: Callable[[Implementation], Run], tensors: tuple[Any, ...],
        seed: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Run the pass of `key`; prepare it first if no run has succeeded."""
        if seed is not None and len(seed) > 1:  # a shard's, which kernels load by vectors
            key = (*key, "shard", seed.data_ptr() % 16)
        run = self._prepared.get(key) or partial(self._prepare_and_run, key, prepare)
        if self.gpu is None or self.gpu == torch_internals.current_gpu():
            return run(*tensors)
        with torch.cuda.device(self.gpu):  # launches are on the current GPU
            return run(*tensors)

    def _prepare_and_run(self, key: tuple[Any, ...], prepare: Callable[[Implementation], Run], *tensors: Any) -> Any:
        """Run a pass for the first time, with the first implementation that succeeds, and keep it."""
        name = key[0]
        able = [x for x in self.implementations if x.decodes or name != "decode"]
        able = [x for x in able if (x.name, name) not in _failed or x is able[-1]]
        for one, following in zip_longest(able, able[1:]):
            try:
                run = prepare(one)
                results = run(*tensors)
            except Exception as error:  # Gluon, the language of the Hopper kernels, is experimental
                # After a lack of memory, others would run out of it, too.
                if following is None or isinstance(error, torch.OutOfMemoryError):
                    raise
                _failed.add((one.name, name))
                reason = str(error).strip().split("\n")[0]
                logger.warning(
                    f"the {name} of impl={one.name!r} fails here and impl={following.name!r} replaces it: "
                    f"{type(error).__name__}: {reason}"
                )
            else:
                self._prepared[key] = run
                return results
        raise AssertionError("no implementation has this pass")

    def _problem(self, inputs: Inputs, seed: Tensor | None = None) -> Problem:
        return problem_of(inputs, self.causal, self.arguments, shard=seed is not None and len(seed) > 1)


def resolve(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, sinks: Tensor | None, given: Arguments) -> Call:
    """Return the call that serves the arguments of `flashmask_attention`, whose docstring lists what raises."""
    key = None
    intercepted = True
    try:
        indices = mask._indices
        intercepted = torch_internals.is_intercepted(q, k, v, indices, sinks)
        # In a key, True would equal 1, and False 0.
        distinct = given.scale is not True and given.softcap is not True and given.dropout is not False
        distinct = distinct and isinstance(given.deterministic, bool)
        if not intercepted and distinct:
            key = (torch_internals.call_state(q, k, v, sinks, indices), mask._causal, mask._q_len, given)
            call = _calls.get(key)
            if call is not None:
                return call
    except (AttributeError, RuntimeError, TypeError):  # wrong type; the checks raise the proper error
        key = None
    return _make(q, k, v, mask, sinks, given, intercepted, key)


def resolve_operator(inputs: Inputs, causal: bool, given: Arguments) -> Call:
    """Return the call that serves an operator's arguments: its inputs are cast, and nothing intercepts its body."""
    q, k, v, sinks, indices = inputs
    with torch_internals.no_autocast(q.device):
        key = (torch_internals.call_state(*inputs), causal, None, given)
        call = _calls.get(key)
        return _make(q, k, v, FlashMask(indices, causal), sinks, given, False, key) if call is None else call


def _make(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    given: Arguments,
    intercepted: bool,
    key: Hashable | None,
) -> Call:
    """Check the arguments of a call, resolve it, and keep it under `key`."""
    check_arguments(q, k, v, mask, sinks, given)
    cast_to = _autocast_dtype(q, k, v)
    choice = choose(Request(q.device, cast_to or q.dtype, q.shape[-1], v.shape[-1], given))
    if not choice.implementations:
        raise ValueError(choice.reason)
    if choice.impl != "reference" and torch_internals.has_tangents(q, k, v, sinks):
        raise NotImplementedError(
            "attention has no forward-mode derivatives (torch.func.jvp); take Tensor.backward, or impl='reference'"
        )
    arguments = given._replace(
        scale=q.shape[-1] ** -0.5 if given.scale is None else float(given.scale),
        deterministic=given.deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    differentiated = torch_internals.wants_gradients(q, k, v, sinks)
    # The forward pads each head's rows to 16, so decoding is no slower then. A guard on a symbolic length would bound
    # exports.
    decodes = (
        not differentiated
        and not given.dropout
        and any(one.decodes for one in choice.implementations)
        and torch_internals.is_known_true(q.shape[2] <= max(16, _FEW_ROWS * k.shape[1] // q.shape[1]))
    )
    gpu = q.device.index if q.is_cuda else None
    call = Call(mask.causal, arguments, choice.implementations, cast_to, decodes, differentiated, intercepted, gpu)
    if key is not None:
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def _autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for q, k and v, or None; raise TypeError if their dtypes then differ."""
    dtypes = (q.dtype, k.dtype, v.dtype)
    # Autocast has no device "meta", and casts no float64, as in SDPA.
    if not q.is_meta and torch.is_autocast_enabled(q.device.type) and torch.float64 not in dtypes:
        narrow = torch.get_autocast_dtype(q.device.type)
        return None if dtypes == (narrow,) * 3 else narrow
    if len(set(dtypes)) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {', '.join(map(str, dtypes))}; cast them to the same")
    return None


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks [Hq]; `delta` has the order of lse and may be padded."""
    batch, heads, rows = lse.shape
    delta = delta.view(batch, heads, -1)[..., :rows]
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    share = (weight * delta).masked_fill(lse.isneginf(), 0.0)  # a row that sees nothing, and a sink of -inf
    return -share.sum((0, 2)).to(sinks.dtype)
