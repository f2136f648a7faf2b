"""Attention like some call before: what follows from the layout of the tensors is settled once.

Checking arguments, choosing an implementation and preparing its launches keeps the host several times as long as the
launches. A call that succeeded is remembered by all that this depended on, the memory of its tensors apart. The next of
its kind, of another layer or of the next step, goes straight to the launches. The plan of its mask, and with it the
check of the mask's values, is no part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashmask_hf import ops
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import Plan

if TYPE_CHECKING:
    from flashmask_hf.kernels.row_statistics import Gradients

__all__ = ["Repeated", "find"]

_MOST = 1024
"""Kinds that are remembered at a time."""
_known: dict[Hashable, Repeated] = {}


def find(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, sinks: Tensor | None, *settings: Any
) -> tuple[tuple[Any, ...] | None, Repeated | None]:
    """The kind of a call, and the call of that kind that is remembered.

    Args:
        q: as in `flashmask_attention`, like those that follow.
        k: the keys.
        v: the values.
        mask: the mask.
        sinks: the sinks.
        settings: scale, softcap, deterministic and impl.

    Returns:
        The kind, or None for a call that is not to be remembered: one that the dispatcher has to see (`ops.call`), one
        in a CUDA graph, and one whose arguments are of types that the checks refuse. The call, or None.
    """
    if is_dynamo_compiling():  # it would look into the signature, which knows of what else compiles
        return None, None
    try:
        signature = _signature_of(q, k, v, mask._indices, sinks)
        if signature is None:
            return None, None
        kind = (signature, mask._causal, mask._q_len, settings, type(settings[0]), type(settings[1]))
        return kind, _known.get(kind)
    except (AttributeError, TypeError, RuntimeError):  # the checks have better words for it
        return None, None


class Repeated:
    """Calls of one kind; to make one is to remember it.

    Args:
        kind: as `find` returns it.
        q_len: number of query rows.
        decodes: whether they go without a plan, to `ops.flash_attn_decode`, and not to `ops.flash_attn_forward`.
        differentiated: whether they are to have a derivative.
        settings: the arguments of the latter behind the tensors.
    """

    def __init__(self, kind: tuple[Any, ...], q_len: int, decodes: bool, differentiated: bool, *settings: Any):
        self.q_len = q_len
        self.decodes = decodes
        self.settings = settings
        self._differentiated = differentiated
        self._settled = False
        self._backward: dict[Hashable, Any] = {}
        if len(_known) >= _MOST:
            _known.clear()
        _known[kind] = self

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        indices: Tensor,
        plan: Plan | None,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The operator's results for tensors of this kind, without `lse` if it is not to be returned."""
        if plan is None:
            results = ops.decode(q, k, v, sinks, indices, *self.settings[:-1])
        elif self._differentiated:
            return _record(q, k, v, sinks, (indices, plan, self, return_lse))
        else:
            results = self.forward(q, k, v, indices, plan, sinks)
        return results if return_lse else results[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, plan: Plan, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The results, without a derivative. Launches, once they are known, take the place of this method."""
        if not self._settled:
            self._settled = True
            launches = self._forward_launches(q, k, v, indices, plan, sinks)
            if launches is not None:
                vars(self)["forward"] = launches
                return launches(q, k, v, indices, plan, sinks)
        return ops.forward(q, k, v, sinks, indices, *plan, *self.settings)

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
        indices: Tensor,
        *listed: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `ops.backward`, whose arguments but for the settings these are. Hooks may have moved what was saved."""
        plan = Plan(*listed)
        signature = None
        if not is_dynamo_compiling() and not torch.is_grad_enabled():
            signature = _signature_of(dout, dlse, q, k, v, out)
        launches = self._backward.get(signature)
        if launches is None:
            given: tuple[Any, ...] = (dout, dlse, q, k, v, sinks, out, lse, indices, *plan, *self.settings)
            if signature is None:
                return ops.call(ops.flash_attn_backward, *given)
            results = ops.backward(*given)
            if signature not in self._backward:  # now that the launches are known to succeed
                self._backward[signature] = self._backward_launches(dout, dlse, q, k, v, out, indices, plan)
            return results
        dq, dk, dv, delta = launches(dout, q, k, v, lse, (out, dlse), indices, plan)
        return dq, dk, dv, None if sinks is None else ops.sinks_gradient(sinks, lse, delta())

    def _forward_launches(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, plan: Plan, sinks: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The launches of the forward, if kernels serve the call and take tensors of these layouts as they are."""
        causal, scale, softcap, impl, _ = self.settings
        if impl == "torch":
            return None
        _sign_in_c()
        given: tuple[Any, ...] = (q, k, v, FlashMask(indices, causal), plan, sinks, scale, softcap)
        if not ops.tries_hopper("forward", impl):
            from flashmask_hf.kernels import forward

            return forward.launches_of(*given)
        from flashmask_hf.kernels import hopper_forward
        from flashmask_hf.kernels.descriptors import fits_descriptor

        return hopper_forward.launches_of(*given) if all(map(fits_descriptor, (q, k, v))) else None

    def _backward_launches(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        indices: Tensor,
        plan: Plan,
    ) -> Callable[..., Gradients] | None:
        """The launches of the backward, likewise."""
        causal, scale, softcap, impl, deterministic = self.settings
        if impl == "torch":
            return None
        from flashmask_hf.kernels import backward
        from flashmask_hf.kernels.descriptors import fits_descriptor

        given: tuple[Any, ...] = (dout, q, k, v, (out, dlse), FlashMask(indices, causal), plan, scale, softcap)
        if not ops.tries_hopper("backward", impl):
            return backward.launches_of(*given)
        if all(map(fits_descriptor, (dout, q, k, v))):
            from flashmask_hf.kernels import hopper_backward

            return hopper_backward.launches_of(*given, deterministic=deterministic)
        return None


def _signature(first: Tensor, *others: Tensor | None) -> Hashable | None:
    """What tells calls apart, the memory of their tensors left out: layouts, and the mode that torch is in.

    None for a call that the dispatcher has to see, and in a CUDA graph, whose replays read the mask anew.
    """
    tensors = (first, *others)
    if ops.intercepted() or not all(x is None or ops.is_plain(x) for x in tensors):
        return None
    if ops.is_capturing(first):
        return None
    device = first.device.type
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        # Kernels load otherwise from what does not begin at a multiple of 16 bytes.
        *(None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors),
    )


_signature_of: Callable[..., Hashable | None] = _signature


def _sign_in_c() -> None:
    """From now on, if that can be done; what is remembered is remembered anew."""
    global _signature_of
    if _signature_of is _signature:
        from flashmask_hf.kernels.native import native

        module = native()
        if module is not None:
            module.watch(
                ops.INTERCEPTORS, ops.IDLE, torch._C._get_deterministic_algorithms, torch.is_grad_enabled,
                torch._C._is_any_autocast_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype,
            )  # fmt: skip
            _signature_of = module.signature
            _known.clear()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, others: tuple[Tensor, Plan, Repeated, bool]
    ) -> Tensor | tuple[Tensor, Tensor]:
        indices, plan, call, return_lse = others  # in one argument, for each takes time
        out, lse = call.forward(q, k, v, indices, plan, sinks)
        ctx.set_materialize_grads(False)  # that of lse is seldom there
        # As many as `ops` saves: checkpointing counts them, and the call may be the first one, repeated.
        ctx.save_for_backward(q, k, v, sinks, out, lse, indices, *plan)
        ctx.call = call
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ops.input_gradients(ctx, dout, dlse, ctx.call.backward), None


_record: Any = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
