"""The public attention function: checks its arguments, picks an implementation, shares the mask's plan."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from flashmask_hf import ops, repeated
from flashmask_hf.mask import FlashMask, is_one_of
from flashmask_hf.plan import Plan
from flashmask_hf.reference import reference_attention
from flashmask_hf.repeated import Repeated

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_HEAD_DIM",
    "Choice",
    "choose",
    "decodes",
    "flashmask_attention",
    "plan_of",
    "prepare",
]

IMPLEMENTATIONS = ("hopper", "triton", "torch", "reference")
MAX_HEAD_DIM = 256
"""Largest head_dim (of queries and of values) of the Triton kernels."""

_FEW_ROWS = 64
"""Query rows, over all heads that share keys, up to which attention without gradients needs no tiles of its own."""

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max * math.log(2) / 2
"""Factors that kernels can hold: in float32, as they are and twice that in units of log2."""

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = (*_TRITON_DTYPES, torch.float64)


@overload
def flashmask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
    impl: str | None = None,
) -> Tensor: ...


@overload
def flashmask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def flashmask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention under a FlashMask (FlashMask, ICLR 2025, algorithms 1 and 2).

    Differentiable in q, k, v and sinks. Under autocast the inputs are cast as SDPA casts them.

    Args:
        q: queries [B, Hq, Sq, D], bfloat16, float16 or float32 (float64 for "torch" and "reference").
        k: keys [B, Hkv, Skv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h * Hkv // Hq.
        v: values [B, Hkv, Skv, Dv].
        mask: with Skv columns, batch 1 or B and heads 1, Hkv or Hq, on the device of q.
        scale: factor on q @ k^T, positive; None is D ** -0.5.
        softcap: c > 0 bends the scaled scores to c * tanh(scores / c), as Gemma 2 does; None does not. It, scale and
            scale / c must fit float32.
        sinks: [Hq] logits of one extra key per head that holds no value, as GPT-OSS has; None has none.
        deterministic: repeated runs give the same bits, also if `torch.use_deterministic_algorithms` is on. "triton",
            "torch" and "reference" always do; the gradient of q of "hopper" costs more then.
        return_lse: also return the log-sum-exp of every row.
        impl: None takes the best available; "hopper", "triton", "torch" or "reference" takes that one or raises.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype; with `return_lse` also lse [B, Hq, Sq] float32 (float64 for float64 q), the
        natural log, the sink included. A row that sees nothing has out 0, lse -inf (the sink's logit if there is one)
        and zero gradients.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation cannot serve them; the message names the
            argument and the way out.
        NotImplementedError: a derivative of torch.func's is asked for (jvp, grad, vjp, jacrev), which only `reference`
            has.
    """
    kind, call = repeated.find(q, k, v, mask, sinks, scale, softcap, deterministic, impl)
    if call is not None:
        plan = None if call.decodes else _kept_plan(mask, call.q_len)
        return call(q, k, v, sinks, mask._indices, plan, return_lse)
    given = q, k, v
    q, k, v, served, factor, ordered = prepare(q, k, v, mask, scale, softcap, sinks, deterministic, impl)
    if served == "reference":
        out, lse = reference_attention(q, k, v, mask, scale=factor, softcap=softcap, sinks=sinks)
    else:
        plan = None
        if served == "hopper" or not decodes(q, k, v, sinks):
            plan = plan_of(mask, q.shape[2])
        out, lse = ops.attention(
            q, k, v, mask, plan, sinks=sinks, scale=factor, softcap=softcap, impl=served, deterministic=ordered
        )
        cast = any(one is not other for one, other in zip((q, k, v), given, strict=True))
        if kind is not None and not cast:
            settings = mask.causal, factor, softcap or 0.0, served, ordered
            Repeated(kind, q.shape[2], plan is None, out.requires_grad, *settings)
    return (out, lse) if return_lse else out


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    deterministic: bool,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, str, float, bool]:
    """Check the arguments of `flashmask_attention`, which it documents, and settle what they leave open.

    Returns:
        q, k and v in autocast's dtype if it is enabled for their device, as SDPA casts them; the implementation as the
        operators name it, or "reference"; the factor on the scores; whether repeated runs must agree to the bit.
    """
    _check(q, k, v, mask, scale, softcap, sinks)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):  # of the former torch raises
        narrow = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(narrow) if x.dtype in _TRITON_DTYPES else x for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them to the same")
    choice = choose(q.device, q.dtype, q.shape[-1], v.shape[-1], impl)
    if choice.impl is None:
        raise ValueError(choice.reason)
    if choice.impl != "reference" and ops.has_tangents(q, k, v, sinks):
        raise NotImplementedError(
            "attention has no forward-mode derivatives (torch.func.jvp); take Tensor.backward, or impl='reference'"
        )
    served = "best" if choice.impl == "hopper" and impl is None else choice.impl
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return q, k, v, served, factor, deterministic or torch.are_deterministic_algorithms_enabled()


def decodes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Whether the rows are few and no gradient is asked for: then a plan costs more than it saves.

    The kernel packs the rows of all heads that share keys in one tile of up to `_FEW_ROWS`, and splits the keys. The
    forward pads each head's rows to 16 at least, so up to 16 it has nothing to set against that.
    """
    if torch.is_grad_enabled() and (
        torch._C._are_functorch_transforms_active()  # a batched tensor does not tell of the gradient of what it holds
        or any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    ):
        return False
    return q.shape[2] <= max(16, _FEW_ROWS * k.shape[1] // q.shape[1])


def plan_of(mask: FlashMask, q_len: int) -> Plan:
    """The mask's plan for `q_len` query rows, made at the first call and kept with the mask.

    Changing `mask.indices` in place makes a new one, unless it goes unnoticed (see there): by a collective, a replayed
    CUDA graph, a NumPy view or a raw pointer. A call on another CUDA stream makes its own, which it may read and free
    without waiting, and that one is kept. Nothing is kept for a tensor made in inference mode, which does not tell of
    changes, while a CUDA graph is captured, so that a replay reads the vectors anew, and while compiling, where the
    compiler keeps one of the equal calls.
    """
    if torch.compiler.is_compiling() or ops.is_capturing(mask.indices):
        return _make_plan(mask, q_len)
    return _kept_plan(mask, q_len)


def _kept_plan(mask: FlashMask, q_len: int) -> Plan:
    """`plan_of`, neither while compiling nor in a graph."""
    kept = mask._plan
    if kept is not None:
        rows, version, stream, inferred, plan = kept
        if (
            rows == q_len
            and version == mask._indices._version
            and (stream is None or stream[1] == ops.current_stream(stream[0]))
            and not (inferred and torch.is_grad_enabled())  # what was made in inference mode cannot be saved
        ):
            return plan
    version = None if mask._indices.is_inference() else mask._indices._version  # another thread may write meanwhile
    plan = _make_plan(mask, q_len)
    if version is not None and ops.is_plain(plan.tiles):  # a mode's or transform's own is for inside of it
        mask._plan = (q_len, version, ops.stream_of(mask._indices), plan.tiles.is_inference(), plan)
    return plan


def _make_plan(mask: FlashMask, q_len: int) -> Plan:
    return Plan(*ops.call(ops.make_plan, mask.indices, mask.causal, q_len))


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor [B, H, S, D], got {type(x).__name__}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be a floating-point tensor of 16, 32 or 64 bits, got {x.dtype}; cast it")
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} must have shape [B, H, S, D] with no empty axis, got {list(x.shape)}")
    if not isinstance(mask, FlashMask):
        raise TypeError(
            f"mask must be a FlashMask, got {type(mask).__name__}; build one with flashmask_hf.masks, or from a "
            "dense bool tensor with FlashMask.from_dense"
        )
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"q, k and v must have one batch size, got {batch}, {k.shape[0]}, {v.shape[0]}")
    if k.shape[3] != head_dim:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {k.shape[3]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v must have k's heads and length {[kv_heads, kv_len]}, got {list(v.shape[1:3])}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {kv_heads} key-value heads of k and v")
    for name, device in (("k", k.device), ("v", v.device), ("mask", mask.device)):
        if device != q.device:
            raise ValueError(f"{name} is on {device}, but q is on {q.device}; move it with {name}.to('{q.device}')")
    if mask.kv_len != kv_len:
        raise ValueError(f"mask has {mask.kv_len} key columns, but k and v have {kv_len} keys")
    if mask.q_len is not None and mask.q_len != q_len:
        raise ValueError(f"q has {q_len} rows, but mask was built for q_len={mask.q_len}; build it with q_len={q_len}")
    mask_batch, mask_heads = mask.indices.shape[:2]
    if not is_one_of(mask_batch, 1, batch):
        raise ValueError(f"mask has batch {mask_batch}; it must be 1 or q's batch {batch}")
    if not is_one_of(mask_heads, 1, kv_heads, heads):
        raise ValueError(f"mask has {mask_heads} heads; it must have 1, Hkv = {kv_heads} or Hq = {heads}")
    for name, value, none in (("scale", scale, "D ** -0.5"), ("softcap", softcap, "no cap")):
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, or None for {none}, got {type(value).__name__}; pass a float")
        if not _LEAST <= value <= _MOST:
            raise ValueError(
                f"{name} must be positive and finite, or None for {none}, and {_LEAST:.1e} to {_MOST:.1e} for float32, "
                f"got {value}"
            )
    if softcap is not None:
        factor = head_dim**-0.5 if scale is None else scale
        if not _LEAST <= factor / softcap <= _MOST:
            raise ValueError(
                f"softcap={softcap} is too far from scale={factor}: scale / softcap must be {_LEAST:.1e} to "
                f"{_MOST:.1e} for float32; pass None for no cap"
            )
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point:
            kind = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
            raise TypeError(f"sinks must be a floating-point tensor [Hq] or None, got {kind}")
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must have shape [Hq] = [{heads}], got {list(sinks.shape)}")
        if sinks.device != q.device:
            raise ValueError(f"sinks is on {sinks.device}, but q is on {q.device}; move it with sinks.to('{q.device}')")


class Choice(NamedTuple):
    """What `flashmask_attention` runs: an implementation, or None where it raises; and why, or what it raises with."""

    impl: str | None
    reason: str


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, impl: str | None = None) -> Choice:
    """What `flashmask_attention` runs for queries of `head_dim` and values of `v_head_dim`.

    Args:
        device: of the tensors.
        dtype: of q, k and v.
        head_dim: D of q and k.
        v_head_dim: Dv of v.
        impl: as in `flashmask_attention`. One that is named and cannot serve is not replaced by another; nor are the
            kernels of a GPU, by one that is much slower there.
    """
    if impl is not None and impl not in IMPLEMENTATIONS:
        return Choice(None, f"impl must be None or one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl in ("torch", "reference"):
        return Choice(impl, "it takes any device, dtype and head_dim")
    if impl is None and device.type != "cuda":
        return Choice("torch", f"no GPU for impl='triton', the tensors are on {device.type}")
    if impl is None and not ops.HAS_TRITON:
        return Choice("torch", "Triton is not installed")
    hopper = None
    if impl != "triton":
        hopper = _why_not_hopper(device, dtype, head_dim, v_head_dim)
        if hopper is None:
            return Choice("hopper", "the Hopper kernels take this device, dtype and head_dim")
        if impl == "hopper":
            return Choice(None, f"impl='hopper' cannot serve {hopper}; use impl='triton' or None")
    obstacle = _why_not_triton(device, dtype, max(head_dim, v_head_dim))
    if obstacle is not None:
        return Choice(None, f"impl='triton' cannot serve {obstacle}; impl='torch' can, more slowly")
    reason = "the kernels take this device, dtype and head_dim"
    return Choice("triton", reason if hopper is None else f"{reason}; impl='hopper' cannot serve {hopper}")


def _why_not_hopper(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    if not ops.HAS_TRITON:
        return "this process: Triton is not installed"
    from flashmask_hf.kernels import gluon_shim

    obstacle = gluon_shim.available()
    if obstacle is not None:
        return f"this process: {obstacle}"
    from flashmask_hf.kernels.hopper_forward import why_not

    return why_not(device, dtype, head_dim, v_head_dim)


def _why_not_triton(device: torch.device, dtype: torch.dtype, largest: int) -> str | None:
    if not ops.HAS_TRITON:
        return "this process: Triton is not installed"
    if not ops.runs_kernels(device):
        return f"tensors on {device.type} (it needs a GPU)"
    if dtype not in _TRITON_DTYPES:
        return f"dtype {dtype} (it takes bfloat16, float16, float32)"
    if largest > MAX_HEAD_DIM:
        return f"head_dim {largest} (its limit is {MAX_HEAD_DIM})"
    return None
