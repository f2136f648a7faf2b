"""Guard of packed rows in models with layers that are not attention.

Linear attention, state spaces and convolutions carry tokens from one document of a packed row into the next, whatever
the attention mask says. `guard_documents` puts a forward pre-hook on the part of a model that holds such layers, when
the model is made or its attention is set (`patches.py`), so every trainer and every plain call runs it. The hook reads
the documents from the call's keywords. It then either hands the boundaries to kernels that keep documents apart, or
raises.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from flashmask_hf.hf.documents import document_starts, run_bounds
from flashmask_hf.hf.model_hooks import cache_of, named_arguments, own_modules, tokens_of
from flashmask_hf.names import NAMES, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["guard_documents", "is_guarded"]

_CONVOLUTION = ("causal-conv1d",)
_STATE_SPACE = ("causal-conv1d", "mamba-ssm")
_DELTA_RULE = ("causal-conv1d", "flash-linear-attention")
_KERNELS = {
    "bamba": _STATE_SPACE,
    "falcon_h1": _STATE_SPACE,
    "granitemoehybrid": _STATE_SPACE,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "nemotron_h": _STATE_SPACE,
    "olmo_hybrid": _DELTA_RULE,
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "zamba2": _STATE_SPACE,
}
"""Model types every layer of which hands `seq_idx`, and `cu_seq_lens_q` for the delta rule, to a kernel that reads it,
and the distributions with these kernels. In other types a layer or its kernel ignores them: the scan of Mamba 1 (jamba,
zamba), delta attention (kimi_linear), convolutions in plain torch (lfm3, recurrent_gemma, zaya), the head of mamba2."""

_MODULES = {"causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm", "flash-linear-attention": "fla"}
"""The module that each distribution installs."""

_JOINING_TYPES = {"deepseek_v4", "falcon_mamba", "mamba", "mamba2", "minimax", "mobilebert", "rwkv", "xlstm"}
"""Model types that mix tokens without an `nn.Conv1d`, or whose model with a head keeps keywords from its backbone."""

_WITHOUT_VECTORS = {"aimv2_text_model"}
"""Model types that keep keywords from their attention, and ask for a mask only if the call has one."""

_JOINS = "the model has recurrent or convolutional layers, which carry tokens from one document into the next"
_WAY_OUT = "pass one document a row, or take a model of attention alone"


def guard_documents(model: Any) -> None:
    """Make a model raise in a forward that would mix the documents of a packed row, or keep them apart.

    Models of attention alone are left as they are. Repeating it is fine. The guard acts while the model's attention is
    one of this package's, and in calls with mask vectors under any.

    Args:
        model: a transformers model, or a model within one, with its layers made. Its forward on a row of several
            documents raises ValueError, unless kernels that keep documents apart are installed for it. Documents
            are told by `startend_row_indices` [B, 1, S, 1], by `cu_seq_lens_q` or `seq_idx`, or by `position_ids`
            [B, S] that start again at 0. On a GPU the host waits for the answer only in the first forwards, until one
            has passed; after that a row of several documents is an assertion of the device.
    """
    hook: Any = None
    if model.config.model_type in _WITHOUT_VECTORS:
        hook = _refuse_vectors
    elif model.config.model_type in _JOINING_TYPES or any(_is_convolution(part) for _, part in own_modules(model)):
        hook = _keep_documents_apart
    if hook is not None and hook not in model._forward_pre_hooks.values():
        model._missing_kernels = _missing_kernels(model.config.model_type)
        model._documents_checked = False
        model.register_forward_pre_hook(hook, with_kwargs=True)


def is_guarded(model: Any) -> bool:
    """Return whether `guard_documents` put its hook on a model's text model, and not on an audio encoder, say."""
    text = model.config.get_text_config()
    guarded = (part for part in model.modules() if _keep_documents_apart in part._forward_pre_hooks.values())
    return any(part.config is text for part in guarded)


def _is_convolution(module: nn.Module) -> bool:
    """Return whether a module is a convolution over several tokens."""
    return isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1


def _missing_kernels(model_type: str) -> tuple[str, ...] | None:
    """Return which distributions a model needs to keep documents apart and lacks; None if none would help.

    transformers hands the boundaries on since 5.23, and imports these modules in the same way.
    """
    if model_type not in _KERNELS or Version(transformers.__version__) < Version("5.23"):
        return None
    return tuple(name for name in _KERNELS[model_type] if not _can_import(_MODULES[name]))


def _can_import(module: str) -> bool:
    """Return whether a module can be imported; one built for another torch raises more than ImportError."""
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


def _refuse_vectors(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for mask vectors in a call of a model whose layers would not get them."""
    if kwargs.get(VECTORS) is not None and model.config._attn_implementation in NAMES:
        raise NotImplementedError(
            f"models of type {model.config.model_type!r} keep keywords from their layers, so {VECTORS} would be "
            "ignored without a word; pass a 2D attention_mask and one document a row"
        )


def _keep_documents_apart(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand the documents of a call to the model's kernels, or raise if there are several; a forward pre-hook."""
    if model.config._attn_implementation not in NAMES and kwargs.get(VECTORS) is None:
        return None
    args, kwargs = (), named_arguments(model, args, kwargs)
    tokens = tokens_of(args, kwargs)
    if tokens is None:
        return None
    batch, length = tokens.shape[:2]
    found = _documents(model, kwargs, length)
    if found is None:
        return None
    numbers, real = found
    missing = model._missing_kernels
    kernels = _KERNELS.get(model.config.model_type, ())
    with_lengths = "flash-linear-attention" in kernels
    way_out = _WAY_OUT
    if missing is not None:
        if with_lengths and batch > 1:
            way_out = f"pass one row a batch, or {_WAY_OUT}"
        elif cache_of(kwargs) is not None:
            way_out = f"pass no cache, or {_WAY_OUT}"
        elif missing:
            way_out = f"run it on a GPU with {' and '.join(kernels)} installed, or one document a row"
        else:
            boundaries = _boundaries(numbers.expand(batch, -1), with_lengths)
            if kwargs.get(VECTORS) is not None:
                del boundaries[VECTORS]
            return args, kwargs | boundaries
    last, first = numbers, numbers
    if real is not None:
        last, first = numbers.masked_fill(~real, -1), numbers.masked_fill(~real, numbers.shape[-1])
    _require(model, (last.amax(-1) <= first.amin(-1)).all(), f"{_JOINS}; {way_out}")
    return None


def _documents(model: Any, given: dict[str, Any], length: int) -> tuple[Tensor, Tensor | None] | None:
    """Return the number of each token's document, int64 [B or 1, S], and which tokens are not padding (None for all).

    Returns None for a call of one token a row and for one that says nothing of documents.
    """
    if length == 1:
        return None
    if given.get(VECTORS) is not None:
        return _documents_of_vectors(model, given[VECTORS], length)
    edges, numbers, positions = (given.get(name) for name in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if edges is not None and edges.shape[0] > 2:
        column = torch.arange(length, device=edges.device, dtype=edges.dtype)
        return torch.bucketize(column, edges[1:], right=True)[None], None
    if numbers is not None:
        return numbers.to(torch.int64), None
    if positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # the row that separates documents, before those of the rotary embedding
    if positions is None or positions.dim() != 2 or positions.shape[-1] != length:
        return None
    mask = given.get("attention_mask")
    real = None
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[-1] >= length:
        real = mask[:, -length:].to(torch.bool)
    numbers = document_starts(positions).cumsum(-1)
    return numbers if real is None else numbers.expand(real.shape), real


def _documents_of_vectors(model: Any, vectors: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return `_documents` of mask vectors [B, 1, S, 1], in which padding has 0 and is a document of its own.

    Raises:
        ValueError: the vectors are not those of causal documents one after another.
    """
    message = f"{_JOINS}; pass {VECTORS} of causal documents one after another"
    if not isinstance(vectors, Tensor) or vectors.shape[1:] != (1, length, 1):
        got = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"{message} as [B, 1, {length}, 1], got {got}; or pass one sequence a row")
    ends = vectors[:, 0, :, 0]
    real = ends > 0
    column = torch.arange(1, length, device=ends.device)
    joined = (real[:, 1:] == real[:, :-1]) & (~real[:, 1:] | (ends[:, :-1] != column))
    flat = ((run_bounds(joined)[1] == ends) | ~real).all()
    _require(model, flat, f"{message}, or one sequence a row")
    return nn.functional.pad((~joined).cumsum(-1), (1, 0)), real


def _boundaries(numbers: Tensor, with_lengths: bool) -> dict[str, Any]:
    """Return the keywords of a model call by which kernels keep documents apart.

    Args:
        numbers: int64 [B, S], number of each token's document; B = 1 with lengths.
        with_lengths: whether the kernels also read cumulative lengths. Their number is a shape, so the host waits for
            it. A cache of several documents would hold one state for each, so there is none.

    Returns:
        dict: `seq_idx`, with lengths `cu_seq_lens_q` and `cu_seq_lens_k`, and mask vectors for the attention beside the
        kernels, because not every model hands it `position_ids`.
    """
    numbers = numbers - numbers[:, :1]
    ends = run_bounds(numbers.diff() == 0)[1].to(torch.int32)
    found: dict[str, Any] = {"seq_idx": numbers.to(torch.int32), VECTORS: ends[:, None, :, None]}
    if with_lengths:
        last = nn.functional.pad(numbers[0].diff() != 0, (1, 1), value=True)
        edges = last.nonzero().flatten().to(torch.int32)
        found |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        if edges.shape[0] > 2:
            found["use_cache"] = False
    return found


def _require(model: Any, condition: Tensor, message: str) -> None:
    """Raise ValueError if a bool tensor [] is False; later, on a GPU, let the device assert it, without waiting."""
    if torch.compiler.is_compiling() or (condition.is_cuda and model._documents_checked):
        device_assert(condition, message)
    elif not condition:
        raise ValueError(message)
    else:
        model._documents_checked = True
