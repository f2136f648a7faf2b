"""The public attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from flashmask_hf._call.arguments import Arguments, check_seed
from flashmask_hf._call.call import resolve
from flashmask_hf._call.operators import attend
from flashmask_hf._numbers import check_range
from flashmask_hf.dropout import draw_seed
from flashmask_hf.kernels.eager.reference import reference_attention
from flashmask_hf.mask import FlashMask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Options(TypedDict, total=False):
    """The options that do not change what `flashmask_attention` returns, as it describes them."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    deterministic: bool
    dropout: float
    dropout_seed: Tensor | None
    impl: str | None


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, *, return_lse: Literal[True], **options: Unpack[_Options]
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
    dropout: float = 0.0,
    dropout_seed: Tensor | None = None,
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
        scale: positive factor on q @ k^T; None is D ** -0.5. Like softcap, a constant in compiled code.
        softcap: c > 0 caps the scaled scores: c * tanh(scores / c), as in Gemma 2. softcap, scale and scale / softcap
            must fit float32. None is no cap.
        sinks: [Hq] logits of one extra key without a value per head, as in GPT-OSS.
        deterministic: repeated runs give the same bits, as with `torch.use_deterministic_algorithms(True)`. "triton",
            "torch" and "reference" always do; the gradient of q costs more with "hopper".
        dropout: probability of dropping a weight, in [0, 1); kept ones are divided by 1 - dropout. lse stays.
        dropout_seed: int64 [1], or a shard's (`flashmask_hf.dropout`); None draws by torch's generator of the device.
        return_lse: also return the log-sum-exp.
        impl: "hopper", "triton", "torch" or "reference"; None takes the best that serves.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype; with `return_lse` also lse [B, Hq, Sq] float32 (float64 for float64 q), the
        natural log, the sink included. A row that sees nothing has out 0, lse -inf (or the sink's logit) and zero
        gradients, whatever comes from upstream (on a GPU with sinks: if that is finite).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation cannot serve them; the message names the
            argument and the way out.
        NotImplementedError: torch.func differentiates the call (jvp, grad, vjp, jacrev); only "reference" supports it.
        RuntimeError: a second derivative is needed; only "reference" has it.
    """
    call = resolve(q, k, v, mask, sinks, Arguments(scale, softcap, impl, deterministic, dropout))
    seed = None
    if dropout:  # drawn outside of operators, which selective checkpointing does not repeat
        seed = draw_seed(q) if dropout_seed is None else dropout_seed
        check_seed(seed, q)
        seed = seed.contiguous()
    if impl == "reference":
        if not call.intercepted:  # tensors of a transform or a mode may have no values to read
            check_range(mask.indices, q.shape[2])
        results = reference_attention(*call.cast(q, k, v), mask, sinks, call.arguments, seed)
    else:
        results = attend(call, q, k, v, sinks, mask, seed)
    return results if return_lse else results[0]
