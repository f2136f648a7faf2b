"""The torch.library operators: a plan, attention and its backward, and decoding; opaque to autograd and torch.compile.

`flashmask_hf::plan`, `flashmask_hf::flash_attn_forward`, `flashmask_hf::flash_attn_backward` and
`flashmask_hf::flash_attn_decode`. The names of the attention operators hold `flash_attn`, which selective activation
checkpointing in training libraries looks for. Those of sparse attention are in `sparse_ops`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from flashmask_hf import plan as _plan
from flashmask_hf import tiled
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import Plan

__all__ = [
    "HAS_TRITON",
    "as_operator",
    "attention",
    "backward",
    "call",
    "check_between",
    "check_range",
    "current_stream",
    "decode",
    "device_assert",
    "dispatched",
    "flash_attn_backward",
    "flash_attn_decode",
    "flash_attn_forward",
    "forward",
    "has_tangents",
    "input_gradients",
    "is_capturing",
    "make_plan",
    "no_autocast",
    "no_derivatives",
    "no_second_derivatives",
    "register_autograd",
    "results_like",
    "run",
    "runs_kernels",
    "sinks_gradient",
    "stream_of",
    "tries_hopper",
]

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it when kernels are defined


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a GPU, or any one in Triton's interpreter."""
    return HAS_TRITON and (device.type == "cuda" or _INTERPRETED)


def as_operator(name: str, function: Callable[..., Any]) -> Any:
    """An operator that mutates nothing. Not a `custom_op`, whose wrappers cost more than the rest of a short call."""
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"flashmask_hf::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flashmask_hf::{name}", "default", function)
    operator = getattr(torch.ops.flashmask_hf, name).default
    _direct[operator] = function
    return operator


def register_autograd(
    operator: Any, backward: Callable[..., Any], setup_context: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """`torch.library.register_autograd` for an operator without default arguments.

    That one asks the schema for the defaults of all arguments at each call, which takes longer than a launch. As there,
    the operator is called again below autograd, where dispatch modes (fake tensors, selective checkpointing) see it.
    What `call` calls directly becomes differentiable likewise.
    """

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def differentiable(function: Callable[..., Any], registered: bool) -> Callable[..., Any]:
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        node: Any = type(operator._opname, (torch.autograd.Function,), members)
        base: Any = super(torch.autograd.Function, node)  # which does not look for functorch; `call` has done that
        record = node.apply if registered else base.apply

        def apply(*inputs: Any) -> Any:
            if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*inputs):
                return function(*inputs)
            if registered and torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    "attention has no derivatives of torch.func's (grad, vjp, jacrev); take Tensor.backward or "
                    "torch.autograd.grad, or flashmask_attention's impl='reference'"
                )
            return record(*inputs)

        return apply

    torch.library.impl(operator.name(), "Autograd", differentiable(below_autograd, True))
    _direct[operator] = differentiable(_direct[operator], False)


_direct: dict[Any, Callable[..., Any]] = {}
"""What an operator of `as_operator` does, with its derivative."""


def call(operator: Any, *inputs: Any) -> Any:
    """`operator(*inputs)`, past the dispatcher, which takes longer than a launch, where it would do nothing else."""
    return operator(*inputs) if dispatched(inputs) else _direct[operator](*inputs)


def dispatched(inputs: tuple[Any, ...]) -> bool:
    """Whether the dispatcher does more than call: for compilers, modes, transforms, profilers and kinds of tensors."""
    return intercepted() or not all(is_plain(x) and not x.is_meta for x in inputs if isinstance(x, Tensor))


def intercepted() -> bool:
    """Whether the dispatcher does more than call, whatever the tensors: for compilers, modes, transforms, profilers."""
    if torch.compiler.is_compiling() or any(tells() for tells in INTERCEPTORS):
        return True
    return any(module.get(name) is not idle for module, name, idle in IDLE)


INTERCEPTORS: tuple[Callable[[], Any], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._is_torch_function_mode_enabled,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
)
"""Each tells whether one intercepts calls, compilers apart."""
IDLE: tuple[tuple[Mapping[str, Any], str, Any], ...] = (
    (vars(torch.autograd.profiler), "_is_profiler_enabled", False),
    (vars(forward_ad), "_current_level", -1),
    (vars(torch.compiler), "_is_compiling_flag", False),
)
"""Names in modules, and what they are while none of these intercepts calls."""


def is_plain(x: Tensor) -> bool:
    """Whether a tensor's memory holds its values, and no class or batching rule has a say."""
    return (
        type(x) in _PLAIN
        and not x.is_neg()
        and not x._is_zerotensor()
        and not is_legacy_batchedtensor(x)
        and not is_functorch_wrapped_tensor(x)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured where `x` is: what is made there now is filled by its replays."""
    if not x.is_cuda:
        return False
    with torch.cuda.device_of(x):
        return torch.cuda.is_current_stream_capturing()


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)
"""The handle of the current stream of a GPU, by its index; torch without CUDA has no such function."""


def stream_of(x: Tensor) -> tuple[int, int] | None:
    """The GPU where `x` is, and its current stream: there what was launched on it may be read. None elsewhere."""
    if not x.is_cuda:
        return None
    gpu = x.get_device()
    return gpu, current_stream(gpu)


def has_tangents(*inputs: Tensor | None) -> bool:
    """Whether a forward-mode derivative is asked for, which the operators would answer with 0."""
    if forward_ad._current_level < 0:
        return False
    try:
        return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs)
    except RuntimeError:  # of `vmap`'s tensors, which cannot be asked
        return True


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """For the inside of operators, whose inputs the caller has cast: what is wide in there stays wide."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _builder(indices: Tensor) -> Any:
    """What builds and checks a plan: Triton kernels on a GPU with Triton, torch operations elsewhere."""
    if indices.device.type == "cuda" and HAS_TRITON:
        from flashmask_hf.kernels.plan import build_plan

        return build_plan
    return _build_plan


def _build_plan(indices: Tensor, causal: bool, q_len: int) -> Plan:
    check_range(indices, q_len)
    return _plan.build_plan(indices, causal, q_len)


def device_assert(condition: Tensor, message: str) -> None:
    """Stop the program if a bool tensor [] is False, without waiting for the device to know it.

    Raises:
        RuntimeError: `condition` is False, on a CPU. On a GPU it is an assertion of the device.
    """
    assert len(message) < 255, "the device takes no longer message"
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]


def _make_plan(indices: Tensor, causal: bool, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Classify the tiles of a mask (see `flashmask_hf.plan`).

    Args:
        indices: int32 [B, Hm, Skv, n].
        causal: as in `FlashMask`.
        q_len: number of query rows.

    Returns:
        The tensors of a `Plan`.

    Raises:
        ValueError: a value lies outside 0..q_len. On a GPU it is an assertion of the device, which stops the program.
    """
    return tuple(_builder(indices)(indices, causal, q_len))


make_plan = as_operator("plan", _make_plan)


@torch.library.register_fake("flashmask_hf::plan")
def _(indices: Tensor, causal: bool, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
    tiles, counts, segments = _plan.plan_shapes(indices, q_len)
    return (
        indices.new_empty(tiles, dtype=torch.int16),
        indices.new_empty(counts, dtype=torch.int32),
        indices.new_empty(segments, dtype=torch.int32),
    )


def check_range(indices: Tensor, q_len: int) -> None:
    """Check that a mask's indices lie in 0..q_len.

    Raises:
        ValueError: one does not. On a GPU it is an assertion of the device, which stops the program.
    """
    check_between(
        indices,
        q_len,
        f"the mask's indices must lie in 0..q_len = 0..{q_len}; FlashMask.validate(q_len={q_len}) names the columns",
    )


def check_between(x: Tensor, highest: int, message: str) -> None:
    """Check that integers lie in 0..highest.

    Raises:
        ValueError: one does not. On a GPU it is an assertion of the device, which stops the program.
    """
    low, high = x.aminmax()
    if x.is_cuda:  # without waiting for the device
        device_assert((low >= 0) & (high <= highest), message)
    elif low < 0 or high > highest:
        raise ValueError(message)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Masked attention; differentiable in q, k, v and sinks, through both results.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        sinks: [Hq] or None.
        indices: int32 [B or 1, Hm, Skv, n].
        tiles: of the plan.
        counts: of the plan.
        segments: of the plan.
        causal: as in `FlashMask`.
        scale: factor on the scores.
        softcap: 0 is none.
        impl: "hopper", "triton" or "torch", or "best": "hopper", and "triton" from the first time on that it fails.
        deterministic: of the backward, whether repeated runs agree to the bit; without it that of "hopper" may not.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).
    """
    plan = Plan(tiles, counts, segments)
    mask = FlashMask(indices, causal)
    with no_autocast(q.device):
        return run("forward", impl, q, k, v, mask, plan, sinks, scale, softcap)


flash_attn_forward = as_operator("flash_attn_forward", forward)


@torch.library.register_fake("flashmask_hf::flash_attn_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_like(q, v)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    tiles: Tensor,
    counts: Tensor,
    segments: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks (empty without sinks), given those of both results, `dout` and `dlse` or None."""
    plan = Plan(tiles, counts, segments)
    mask = FlashMask(indices, causal)
    with no_autocast(q.device):
        dq, dk, dv, delta = run(
            "backward", impl, dout, q, k, v, lse, (out, dlse), mask, plan, scale, softcap, deterministic=deterministic
        )
        return dq, dk, dv, sinks_gradient(sinks, lse, delta)


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sinks [Hq] given lse [B, Hq, Sq], in any order of rows, and a backward's delta; empty if None."""
    if sinks is None:
        return lse.new_empty(0)
    batch, heads, rows = lse.shape
    delta = delta.view(batch, heads, -1)[..., :rows]
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    weight = weight.masked_fill(lse.isneginf(), 0.0)  # a row that sees nothing, and a sink of -inf
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)


flash_attn_backward = as_operator("flash_attn_backward", backward)


@torch.library.register_fake("flashmask_hf::flash_attn_backward")
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, q, k, v, sinks, _, lse, *_ = inputs
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


_broken: set[str] = set()
"""Functions of "hopper" that have failed here, to which "best" does not come back."""


def tries_hopper(name: str, impl: str) -> bool:
    """Whether the Hopper kernels are to serve `run`."""
    return impl == "hopper" or (impl == "best" and name not in _broken)


def run(name: str, impl: str, *args: Any, after: Callable[..., Any] | None = None, **more: Any) -> Any:
    """Call a function of an implementation: "forward" or "backward".

    `more` are keyword arguments for "hopper" only. What they ask of it `after` does to the results of the others.
    """
    if tries_hopper(name, impl):
        try:
            from flashmask_hf.kernels import hopper_backward, hopper_forward

            return (hopper_forward.forward if name == "forward" else hopper_backward.backward)(*args, **more)
        except torch.OutOfMemoryError:  # which the portable kernels would not be spared
            raise
        except Exception as error:  # of the compiler, whose experimental part they are written in
            if impl == "hopper":
                raise
            _broken.add(name)
            reason = str(error).strip().split("\n")[0]
            logger.warning(
                f"the Hopper {name} fails here and impl='triton' replaces it: {type(error).__name__}: {reason}"
            )
    if impl == "torch":
        results = getattr(tiled, name)(*args)
    else:
        from flashmask_hf.kernels import backward, forward

        results = (forward.forward if name == "forward" else backward.backward)(*args)
    return results if after is None else after(*results)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, indices, tiles, counts, segments, causal, scale, softcap, impl, deterministic = inputs
    out, lse = output
    ctx.set_materialize_grads(False)  # that of lse is seldom there
    ctx.save_for_backward(q, k, v, sinks, out, lse, indices, tiles, counts, segments)
    ctx.settings = (causal, scale, softcap, impl, deterministic)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    def gradients(*tensors: Tensor | None) -> Any:
        return call(flash_attn_backward, *tensors, *ctx.settings)

    return *input_gradients(ctx, dout, dlse, gradients), *[None] * 9


def input_gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, gradients: Callable[..., tuple[Tensor, Tensor, Tensor, Any]]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and sinks, each if it has one, of a node of autograd that saved what `backward` takes.

    Args:
        ctx: of the node.
        dout: gradient of `out`, if it has one.
        dlse: gradient of `lse`, if it has one.
        gradients: called like `backward`, without its settings.
    """
    if dout is None and dlse is None:
        return (None,) * 4
    saved = ctx.saved_tensors  # read once: checkpointing unpacks a saved tensor only once
    dout = torch.zeros_like(saved[4]) if dout is None else dout
    dq, dk, dv, dsinks = gradients(dout, dlse, *saved)
    return dq, dk, dv, None if saved[3] is None else dsinks


register_autograd(flash_attn_forward, _backward, _setup_context)


def no_second_derivatives(ctx: Any, *gradients: Tensor | None) -> None:
    """The backward of an operator that is a backward."""
    raise RuntimeError("this attention has no second derivatives; take the first without create_graph=True")


register_autograd(flash_attn_backward, no_second_derivatives, lambda ctx, inputs, output: None)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Masked attention of few query rows, without a plan and without gradients.

    Args:
        q: [B, Hq, Sq, D].
        k: [B, Hkv, Skv, D].
        v: [B, Hkv, Skv, Dv].
        sinks: [Hq] or None.
        indices: int32 [B or 1, Hm, Skv, n].
        causal: as in `FlashMask`.
        scale: factor on the scores.
        softcap: 0 is none.
        impl: "triton" or "torch", or "best", which is "triton".

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored as [B, Sq, Hq, Dv]; lse [B, Hq, Sq] float32 (float64 for float64 q).

    Raises:
        ValueError: a value of `indices` lies outside 0..Sq. On a GPU it is an assertion of the device.
    """
    mask = FlashMask(indices, causal)
    if impl != "torch":
        from flashmask_hf.kernels import decode as kernel

        return kernel.decode(q, k, v, mask, sinks, scale, softcap)
    check_range(indices, q.shape[2])
    with no_autocast(q.device):
        return tiled.decode(q, k, v, mask, sinks, scale, softcap)


flash_attn_decode = as_operator("flash_attn_decode", decode)


def no_derivatives(ctx: Any, *gradients: Tensor | None) -> None:
    """The backward of an operator that is taken where no gradients are asked for, in a graph that is then trained."""
    raise RuntimeError(
        "this attention was traced or exported without gradients and has none; trace it with inputs that require them"
    )


register_autograd(flash_attn_decode, no_derivatives, lambda ctx, inputs, output: None)


@torch.library.register_fake("flashmask_hf::flash_attn_decode")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_like(q, v)


def results_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised `out` and `lse` for queries q and values v."""
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(batch, heads, q_len, dtype=wide)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    plan: Plan | None,
    *,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_forward` for a mask and its plan, or `flash_attn_decode` without one.

    Arguments as in `flashmask_attention`.
    """
    cap = softcap or 0.0
    if plan is None:
        return call(flash_attn_decode, q, k, v, sinks, mask.indices, mask.causal, scale, cap, impl)
    settings = (mask.causal, scale, cap, impl, deterministic)
    return call(flash_attn_forward, q, k, v, sinks, mask.indices, *plan, *settings)
