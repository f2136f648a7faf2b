"""One call of attention, resolved once: its checks, its implementation and its prepared launches.

Checking arguments, choosing an implementation and preparing launches takes the host several times as long as the
launches themselves, and all of it follows from the layouts of the tensors and the settings. So a `Call` is made once
for these and kept in a cache. The next layer's and the next step's call finds it there and goes straight to the
launches:

    flashmask_attention, sparse attention          first call: check, choose        every call
      and the bodies of the operators      ──>  resolve() ──────────────────> Call ────────────> prepared launches
                                                    └── cache, by layouts and settings

The plan of the mask is no part of a call: it follows from the mask's values (`plan_cache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf import torch_internals
from flashmask_hf._call import implementations
from flashmask_hf._call.arguments import check_arguments
from flashmask_hf._call.recomputation import Results, current_keeper
from flashmask_hf.kernels.launch.problem import Problem, problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.mask import FlashMask
from flashmask_hf.tile_plan import Plan

__all__ = ["Call", "Settings", "resolve", "resolve_operator"]

logger = logging.getLogger(__name__)

_FEW_ROWS = 64
"""Query rows, over all heads that share keys, up to which attention without gradients needs no plan."""

_MAX_CALLS = 1024
"""Number of calls that are kept. When it is reached, all are dropped."""
_calls: dict[Hashable, Call] = {}

_failed: set[str] = set()
"""Passes ("forward", "backward") of the Hopper kernels that failed in this process and that "best" no longer tries."""


class Settings(NamedTuple):
    """Settings of a call besides its tensors: the scalar arguments of the operators, in their order."""

    causal: bool
    """As in `FlashMask`."""
    scale: float
    """Factor on the scores."""
    softcap: float
    """c of c * tanh(scores / c); 0 is none."""
    impl: str
    """"hopper", "triton", "torch" or "reference". "best" is impl=None where the Hopper kernels serve: "hopper", and
    "triton" once a pass of it has failed."""
    deterministic: bool
    """Whether repeated backwards must agree to the bit."""


class Call:
    """A resolved call: attention for tensors of one layout under masks of one form, with its prepared launches.

    Attributes:
        settings: the scalar arguments of the operators.
        cast_to: dtype to which autocast casts q, k and v, or None.
        decodes: whether the rows are few and attention goes without a plan.
        differentiated: whether results require gradients.
        intercepted: whether something intercepts the call (`torch_internals.is_intercepted`). It then runs through the
            operators; this object is not kept and only carries the settings.
    """

    def __init__(
        self, settings: Settings, cast_to: torch.dtype | None, decodes: bool, differentiated: bool, intercepted: bool
    ):
        self.settings = settings
        self.cast_to = cast_to
        self.decodes = decodes
        self.differentiated = differentiated
        self.intercepted = intercepted
        self._prepared: dict[Hashable, Callable[..., Any]] = {}
        """By pass, whether rows are put in an order, and, for backwards, the layouts of what was saved."""

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
        """Return out and lse, as `operators._forward` documents them.

        `order`, int32 [B, Hq, Sq], a permutation of every head's rows, says where each row of the output is put; lse
        stays in the order of q.
        """
        tensors: tuple[Any, ...] = (q, k, v, sinks, indices, plan)
        if order is not None:
            tensors = (*tensors, order)

        def prepare(impl: str) -> Callable[..., Any]:
            return implementations.prepare_forward(impl, self._problem(q, k, v, indices, sinks), order is not None)

        def compute() -> Results:
            with torch_internals.device_guard(q):
                return self._run(("forward", order is not None), prepare, tensors)

        keeper = current_keeper.get()
        return compute() if keeper is None else keeper(q, compute)

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and sinks (empty without sinks).

        Args:
            dout: gradient of the output, [B, Hq, Sq, Dv].
            q: as in the forward.
            k: as in the forward.
            v: as in the forward.
            sinks: as in the forward.
            lse: of the forward.
            delta: row sums of dout * out less the gradient of lse, [B, Hq, Sq]; or (out, gradient of lse or None).
            indices: of the mask.
            plan: of the mask.
            orders: where each row of dq, and each row of dk and dv, is put, int32 [B, Hq, Sq] and [B, Hkv, Skv].
        """
        tensors: tuple[Any, ...] = (dout, q, k, v, lse, delta, indices, plan)
        if orders is not None:
            tensors = (*tensors, orders)
        out, dlse = delta if isinstance(delta, tuple) else (None, None)
        # Hooks on saved tensors, such as offloading, keep shapes and dtypes, and may change the rest of a layout.
        saved = (dout, q, k, v, lse, indices) if out is None else (dout, q, k, v, lse, indices, out)
        key = ("backward", orders is not None, dlse is None, *[(x.stride(), x.data_ptr() % 16) for x in saved])

        def prepare(impl: str) -> Callable[..., Any]:
            problem = self._problem(q, k, v, indices, sinks)
            output = None if out is None else (layout_of(out), dlse is not None)
            return implementations.prepare_backward(
                impl, problem, layout_of(dout), output, self.settings.deterministic, orders is not None
            )

        with torch_internals.device_guard(q):
            dq, dk, dv, row_sums = self._run(key, prepare, tensors)
            return dq, dk, dv, _sinks_gradient(sinks, lse, row_sums)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of few rows without a plan, as `operators._decode` documents them."""
        run = self._prepared.get("decode")
        if run is None:
            problem = self._problem(q, k, v, indices, sinks)
            run = self._prepared["decode"] = implementations.prepare_decode(self.settings.impl, problem)
        with torch_internals.device_guard(q):
            return run(q, k, v, sinks, indices)

    def _run(self, key: tuple[Any, ...], prepare: Callable[[str], Callable[..., Any]], tensors: tuple[Any, ...]) -> Any:
        """Run the pass that is prepared under `key`; prepare it first, if no earlier run of it has succeeded."""
        run = self._prepared.get(key)
        if run is not None:
            return run(*tensors)
        impl, pass_name = self.settings.impl, key[0]
        if impl == "best" and pass_name not in _failed:
            try:
                run = prepare("hopper")
                results = run(*tensors)
            except torch.OutOfMemoryError:  # the portable kernels would run out of memory, too
                raise
            except Exception as error:  # Gluon, in which these kernels are written, is experimental
                _failed.add(pass_name)
                reason = str(error).strip().split("\n")[0]
                logger.warning(
                    f"the Hopper {pass_name} fails here and impl='triton' replaces it: {type(error).__name__}: {reason}"
                )
            else:
                self._prepared[key] = run
                return results
        run = prepare("triton" if impl == "best" else impl)
        results = run(*tensors)
        self._prepared[key] = run
        return results

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, sinks: Tensor | None) -> Problem:
        causal, scale, softcap, *_ = self.settings
        return problem_of(q, k, v, indices, sinks, causal, scale, softcap)


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    impl: str | None,
) -> Call:
    """Return the call that serves the arguments of `flashmask_attention`, which documents them and what raises."""
    key = call = None
    intercepted = True
    try:
        intercepted = torch_internals.is_intercepted(q, k, v, mask.indices, sinks)
        if not intercepted:
            options = (mask.causal, mask.q_len, scale, softcap, deterministic, impl)
            key = _key(q, k, v, mask.indices, sinks, *options)
            call = _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):  # an argument of a kind of which the checks know more to say
        key = None
    if call is None:
        call = _make(q, k, v, mask, sinks, scale, softcap, deterministic, impl, intercepted)
        if key is not None:
            _keep(key, call)
    return call


def resolve_operator(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, sinks: Tensor | None, settings: Settings
) -> Call:
    """Return the call that serves the arguments of an operator, whose body is below all that intercepts calls."""
    causal, scale, softcap, best_or_named, deterministic = settings
    impl = None if best_or_named == "best" else best_or_named
    key = _key(q, k, v, indices, sinks, causal, None, scale, softcap or None, deterministic, impl)
    call = _calls.get(key)
    if call is None:
        mask = FlashMask(indices, causal)
        call = _make(q, k, v, mask, sinks, scale, softcap or None, deterministic, impl, intercepted=False)
        _keep(key, call)
    return call


def _key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    sinks: Tensor | None,
    causal: bool,
    mask_q_len: int | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    impl: str | None,
) -> Hashable:
    """Return all that a call follows from: layouts, settings, and the modes that torch is in."""
    device = q.device.type
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch_internals.wants_gradients(q, k, v, sinks),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        layout_of(q),
        layout_of(k),
        layout_of(v),
        layout_of(indices),
        None if sinks is None else layout_of(sinks),
        causal,
        mask_q_len,
        type(scale),  # True equals 1, but is no scale
        scale,
        type(softcap),
        softcap,
        type(deterministic),
        deterministic,
        impl,
    )


def _keep(key: Hashable, call: Call) -> None:
    """Keep a call in the cache, which drops all others when it is full."""
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call


def _make(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    impl: str | None,
    intercepted: bool,
) -> Call:
    """Check the arguments of a call; resolve its scale, its dtype under autocast, and its implementation."""
    check_arguments(q, k, v, mask, scale, softcap, sinks, deterministic)
    dtypes = (q.dtype, k.dtype, v.dtype)
    cast_to = None
    # Autocast knows no device "meta", and casts no float64, as in SDPA.
    if not q.is_meta and torch.is_autocast_enabled(q.device.type) and torch.float64 not in dtypes:
        narrow = torch.get_autocast_dtype(q.device.type)
        cast_to = None if dtypes == (narrow,) * 3 else narrow
    if cast_to is None and len(set(dtypes)) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {', '.join(map(str, dtypes))}; cast them to the same")
    choice = implementations.choose(q.device, cast_to or q.dtype, q.shape[-1], v.shape[-1], impl)
    if choice.impl is None:
        raise ValueError(choice.reason)
    if choice.impl != "reference" and torch_internals.has_tangents(q, k, v, sinks):
        raise NotImplementedError(
            "attention has no forward-mode derivatives (torch.func.jvp); take Tensor.backward, or impl='reference'"
        )
    settings = Settings(
        mask.causal,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap or 0.0,
        "best" if choice.impl == "hopper" and impl is None else choice.impl,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    differentiated = torch_internals.wants_gradients(q, k, v, sinks)
    # The kernel of decoding packs the rows of all heads that share keys into one tile and splits the keys. The forward
    # pads each head's rows to 16 at least, so decoding is no slower up to 16 rows. A named "hopper" has no kernel for
    # it. A symbolic length decodes only if it is known to be short: a guard would bound the lengths of an export.
    decodes = (
        not differentiated
        and settings.impl != "hopper"
        and torch_internals.is_known_true(q.shape[2] <= max(16, _FEW_ROWS * k.shape[1] // q.shape[1]))
    )
    return Call(settings, cast_to, decodes, differentiated, intercepted)


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks [Hq], or an empty tensor without sinks.

    Args:
        sinks: [Hq] or None.
        lse: [B, Hq, Sq], in any order of rows.
        delta: of the backward, in the same order; each head's rows may be padded.
    """
    if sinks is None:
        return lse.new_empty(0)
    batch, heads, rows = lse.shape
    delta = delta.view(batch, heads, -1)[..., :rows]
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    share = (weight * delta).masked_fill(lse.isneginf(), 0.0)  # a row that sees nothing, and a sink of -inf
    return -share.sum((0, 2)).to(sinks.dtype)
