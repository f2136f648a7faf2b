"""Cache of resolved calls: a call whose tensors have a known layout skips the checks and launches its kernels.

Checks, the choice of an implementation and the preparation of launches take the host several times as long as the
launches. All of them follow from the layouts of the tensors, the arguments and the modes of torch:

    flashmask_attention, sparse attention          first call: check, choose        every call
      and the bodies of the operators      ──>  resolve() ──────────────────> Call ────────────> prepared launches
                                                    └── cache, by layouts, arguments and modes

The plan of the mask follows from the mask's values, so it is no part of a call (`plan_cache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call.arguments import Arguments, check_arguments
from flashmask_hf._call.implementations import Implementation, Run, choose
from flashmask_hf._call.recomputation import Results, current_keeper
from flashmask_hf.kernels.launch.problem import Problem, problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan

__all__ = ["Call", "resolve", "resolve_operator"]

logger = logging.getLogger(__name__)

_FEW_ROWS = 64
"""Query rows, over all heads that share keys, up to which attention without gradients needs no plan."""

_MAX_CALLS = 1024
"""Number of calls that are kept. When it is reached, all are dropped."""
_calls: dict[Hashable, Call] = {}

_failed: set[tuple[str, str]] = set()
"""Implementations and passes ("forward", "backward") that failed in this process. impl=None skips them."""


class Call:
    """A resolved call: attention for tensors of one layout and masks of one form, with its prepared launches.

    Attributes:
        causal: of the masks.
        arguments: as given, with `scale` and `deterministic` resolved.
        implementations: which to try, in order; errors of the last are raised.
        cast_to: dtype to which autocast casts q, k and v, or None.
        decodes: whether the rows are few and attention runs without a plan.
        differentiated: whether results require gradients.
        intercepted: whether the call must run through the operators (`torch_internals.is_intercepted`).
    """

    def __init__(
        self,
        causal: bool,
        arguments: Arguments,
        implementations: tuple[Implementation, ...],
        cast_to: torch.dtype | None,
        decodes: bool,
        differentiated: bool,
        intercepted: bool,
    ):
        self.causal = causal
        self.arguments = arguments
        self.implementations = implementations
        self.cast_to = cast_to
        self.decodes = decodes
        self.differentiated = differentiated
        self.intercepted = intercepted
        self._prepared: dict[Hashable, Run] = {}
        """By pass, whether rows are put in an order, and, for backwards, the layouts of saved tensors."""

    def cast(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in autocast's dtype if it is enabled for them, as SDPA casts them."""
        dtype = self.cast_to
        return (q, k, v) if dtype is None else (q.to(dtype), k.to(dtype), v.to(dtype))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        indices: Tensor,
        plan: Plan,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse, as `operators.flash_attn_forward` documents them.

        `order`, int32 [B, Hq, Sq], puts row i of the output at `order[b, h, i]`; lse stays in the order of q.
        """
        tensors: tuple[Any, ...] = (q, k, v, sinks, indices, plan)
        if order is not None:
            tensors = (*tensors, order)

        def prepare(one: Implementation) -> Run:
            problem = self._problem(q, k, v, sinks, indices)
            return one.forward(problem) if order is None else one.ordered_forward(problem)

        def compute() -> Results:
            with torch_internals.device_guard(q):
                return self._run(("forward", order is not None), prepare, tensors)

        keeper = current_keeper.get()
        return compute() if keeper is None else keeper(q, compute)

    __call__ = forward

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        lse: Tensor,
        delta: Tensor | tuple[Tensor, Tensor | None],
        indices: Tensor,
        plan: Plan,
        orders: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and sinks (None without sinks).

        `dout` [B, Hq, Sq, Dv] is the gradient of the output, `lse` a result of the forward, and `delta` as
        `Implementation` describes it. `orders`, int32 [B, Hq, Sq] and [B, Hkv, Skv], put the rows of dq, and the rows
        of dk and dv, in an order.
        """
        tensors: tuple[Any, ...] = (dout, q, k, v, lse, delta, indices, plan)
        if orders is not None:
            tensors = (*tensors, orders)
        out, dlse = delta if isinstance(delta, tuple) else (None, None)
        # Hooks on saved tensors, such as offloading, keep shapes and dtypes only.
        saved = (dout, q, k, v, lse, indices) if out is None else (dout, q, k, v, lse, indices, out)
        key = ("backward", orders is not None, dlse is None, *[(x.stride(), x.data_ptr() % 16) for x in saved])

        def prepare(one: Implementation) -> Run:
            problem = self._problem(q, k, v, sinks, indices)
            output = None if out is None else (layout_of(out), dlse is not None)
            backward = one.backward if orders is None else one.ordered_backward
            return backward(problem, layout_of(dout), output)

        with torch_internals.device_guard(q):
            dq, dk, dv, row_sums = self._run(key, prepare, tensors)
            return dq, dk, dv, None if sinks is None else _sinks_gradient(sinks, lse, row_sums)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of few rows, without a plan."""

        def prepare(one: Implementation) -> Run:
            return one.decode(self._problem(q, k, v, sinks, indices))

        with torch_internals.device_guard(q):
            return self._run(("decode",), prepare, (q, k, v, sinks, indices))

    def _run(self, key: tuple[Any, ...], prepare: Callable[[Implementation], Run], tensors: tuple[Any, ...]) -> Any:
        """Run the pass that is prepared under `key`; prepare it first if no run of it has succeeded."""
        run = self._prepared.get(key)
        if run is not None:
            return run(*tensors)
        name = key[0]
        able = [x for x in self.implementations if x.decodes or name != "decode"]
        for one in able:
            last = one is able[-1]
            if (one.name, name) in _failed and not last:
                continue
            try:
                run = prepare(one)
                results = run(*tensors)
            except Exception as error:  # Gluon, the language of the Hopper kernels, is experimental
                if last or isinstance(error, torch.OutOfMemoryError):  # others would run out of memory, too
                    raise
                _failed.add((one.name, name))
                reason = str(error).strip().split("\n")[0]
                logger.warning(
                    f"the {name} of impl={one.name!r} fails here and impl={able[able.index(one) + 1].name!r} replaces "
                    f"it: {type(error).__name__}: {reason}"
                )
            else:
                self._prepared[key] = run
                return results
        raise AssertionError("no implementation has this pass")

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> Problem:
        return problem_of(q, k, v, indices, sinks, self.causal, self.arguments)


def resolve(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, sinks: Tensor | None, given: Arguments) -> Call:
    """Return the call that serves the arguments of `flashmask_attention`, whose docstring lists what raises."""
    key = call = None
    intercepted = True
    try:
        intercepted = torch_internals.is_intercepted(q, k, v, mask.indices, sinks)
        if not intercepted and given.is_distinct():
            key = _key(q, k, v, sinks, mask.indices, mask.causal, mask.q_len, given)
            call = _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):  # wrong type; the checks raise the proper error
        key = None
    if call is None:
        call = _make(q, k, v, mask, sinks, given, intercepted)
        if key is not None:
            _keep(key, call)
    return call


def resolve_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, causal: bool, given: Arguments
) -> Call:
    """Return the call that serves the arguments of an operator, whose body nothing intercepts."""
    key = _key(q, k, v, sinks, indices, causal, None, given)
    call = _calls.get(key)
    if call is None:
        call = _make(q, k, v, FlashMask(indices, causal), sinks, given, intercepted=False)
        _keep(key, call)
    return call


def _key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    causal: bool,
    mask_q_len: int | None,
    given: Arguments,
) -> Hashable:
    """Return all that a call follows from: layouts, arguments, and the modes of torch."""
    device = q.device.type
    return (
        _layout(q),
        _layout(k),
        _layout(v),
        None if sinks is None else _layout(sinks),
        _layout(indices),
        causal,
        mask_q_len,
        given,
        torch.are_deterministic_algorithms_enabled(),
        torch_internals.wants_gradients(q, k, v, sinks),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Return the fields of `layout_of(x)`, which takes longer."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def _keep(key: Hashable, call: Call) -> None:
    """Keep a call in the cache, which drops all others when it is full."""
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call


def _make(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, sinks: Tensor | None, given: Arguments, intercepted: bool
) -> Call:
    """Check the arguments of a call; resolve its scale, its dtype under autocast, and its implementations."""
    check_arguments(q, k, v, mask, sinks, given)
    cast_to = _autocast_dtype(q, k, v)
    choice = choose(q.device, cast_to or q.dtype, q.shape[-1], v.shape[-1], given.impl, given)
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
    # Decoding packs the rows of heads that share keys into one tile; the forward pads each head's rows to 16, so
    # decoding is no slower up to 16 rows. A symbolic length must be known to be short: a guard would bound exports.
    decodes = (
        not differentiated
        and any(one.decodes for one in choice.implementations)
        and torch_internals.is_known_true(q.shape[2] <= max(16, _FEW_ROWS * k.shape[1] // q.shape[1]))
    )
    return Call(mask.causal, arguments, choice.implementations, cast_to, decodes, differentiated, intercepted)


def _autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts q, k and v, or None; raise TypeError if their dtypes then differ."""
    dtypes = (q.dtype, k.dtype, v.dtype)
    # Autocast has no device "meta", and casts no float64, as in SDPA.
    if not q.is_meta and torch.is_autocast_enabled(q.device.type) and torch.float64 not in dtypes:
        narrow = torch.get_autocast_dtype(q.device.type)
        return None if dtypes == (narrow,) * 3 else narrow
    if len(set(dtypes)) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {', '.join(map(str, dtypes))}; cast them to the same")
    return None


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks [Hq].

    Args:
        sinks: [Hq].
        lse: [B, Hq, Sq], in any order of rows.
        delta: of the backward, in the same order; each head's rows may be padded.
    """
    batch, heads, rows = lse.shape
    delta = delta.view(batch, heads, -1)[..., :rows]
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    share = (weight * delta).masked_fill(lse.isneginf(), 0.0)  # a row that sees nothing, and a sink of -inf
    return -share.sum((0, 2)).to(sinks.dtype)
