"""Packed rows in recurrent models: boundaries for their kernels, or an error.

Linear attention, state spaces and convolutions mix the documents of a packed row unless their kernels read boundaries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flashmask_hf.hf.call import Call, cache_of
from flashmask_hf.hf.checks.check import Check, Verdict, require, rule
from flashmask_hf.hf.documents import document_starts, of_bounds, run_bounds
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.models import state_of
from flashmask_hf.names import VECTORS

__all__ = ["CHECKS", "add_boundaries", "is_guarded", "takes_boundaries"]

CHECKS: list[Check] = []

_JOINS = "the model has recurrent or convolutional layers, which carry tokens from one document into the next"
_WAY_OUT = "pass one document per row, or take a model of attention alone"


def is_guarded(model: Any) -> bool:
    """Return whether a model's text model has recurrent or convolutional layers."""
    text = model.config.get_text_config()
    return any(
        part.config is text and state_of(part).is_recurrent
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    )


def _has_documents(call: Call) -> bool:
    """Return whether a recurrent model gets document boundaries of a row of several tokens."""
    if not call.state.is_recurrent or call.tokens is None or call.tokens.shape[1] == 1:
        return False
    if not call.is_ours:
        return call.indices is not None
    marks = (VECTORS, "cu_seq_lens_q", "seq_idx", "position_ids")
    return any(call.get(name) is not None for name in marks)


def _documents(call: Call) -> tuple[Tensor, Tensor | None] | None:
    """Return the number of each token's document, int64 [B or 1, S], and which tokens are real (None for all).

    Returns None for a call without document boundaries. `seq_idx` precedes positions, as in the kernels.
    """
    length = call.tokens.shape[1]
    if call.indices is not None:
        return _documents_of_indices(call.indices, length)
    numbers, positions = call.tensor("seq_idx"), call.positions
    if call.bounds is not None:
        return of_bounds(call.bounds, length).numbers() - 1, None
    if numbers is not None:
        return numbers.to(torch.int64), None
    if positions is None:
        return None
    numbers, real = document_starts(positions).cumsum(-1), call.padding
    return numbers if real is None else numbers.expand(real.shape), real


def _documents_of_indices(indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return `_documents` of mask indices [B, 1, S, 1], in which padding has 0 and is a document of its own."""
    real, joined = _joined(indices, length)
    return nn.functional.pad((~joined).cumsum(-1), (1, 0)), real


def _joined(indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return which tokens of mask indices are real [B, S], and which continue the token before them [B, S - 1]."""
    ends = indices[:, 0, :, 0]
    real = ends > 0
    column = torch.arange(1, length, device=ends.device)
    return real, (real[:, 1:] == real[:, :-1]) & (~real[:, 1:] | (ends[:, :-1] != column))


def takes_boundaries(call: Call) -> bool:
    """Return whether every recurrent layer keeps the call's documents apart."""
    return _has_documents(call) and _obstacle(call) is None and (call.indices is None or _has_form(call))


def _obstacle(call: Call) -> str | None:
    """Return the way out if the kernels cannot read boundaries, else None."""
    missing, kernels = call.state.missing, family_of(call.config).kernels
    if missing is None:
        return _WAY_OUT
    if "flash-linear-attention" in kernels and call.tokens.shape[0] > 1:
        return f"pass one row per batch, or {_WAY_OUT}"
    if cache_of(call.named) is not None:
        return f"pass no cache, or {_WAY_OUT}"
    if missing:
        return f"run it on a GPU with {' and '.join(kernels)} installed, or pass one document per row"
    return None


def add_boundaries(call: Call) -> dict[str, Any]:
    """Return the arguments with the boundaries by which kernels keep documents apart.

    These are `seq_idx`, mask indices for the attention beside the kernels, and for the delta rule `cu_seq_lens_q` and
    `cu_seq_lens_k`, whose shape, the number of documents, the host waits for. Several documents then have no cache.
    """
    if call.indices is not None:
        require(_are_flat, call, _are_flat.verdict(call))
    found = _documents(call)
    if found is None:
        return call.named
    numbers = found[0].expand(call.tokens.shape[0], -1)
    numbers = numbers - numbers[:, :1]
    ends = run_bounds(numbers.diff() == 0)[1].to(torch.int32)
    added: dict[str, Any] = {"seq_idx": numbers.to(torch.int32)}
    if call.indices is None:
        added[VECTORS] = ends[:, None, :, None]
    if "flash-linear-attention" in family_of(call.config).kernels:
        last = nn.functional.pad(numbers[0].diff() != 0, (1, 1), value=True)
        edges = last.nonzero().flatten().to(torch.int32)
        added |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        if edges.shape[0] > 2:
            added["use_cache"] = False
    return call.named | added


def _has_form(call: Call) -> bool:
    indices = call.tensor(VECTORS)
    return indices is not None and indices.shape[1:] == (1, call.tokens.shape[1], 1)


@rule(CHECKS, "mask indices of another shape in a model with recurrent or convolutional layers", parts=True)
def _have_form(call: Call) -> Verdict:
    if call.indices is None or not _has_documents(call) or _has_form(call):
        return None
    got = list(call.indices.shape) if isinstance(call.indices, Tensor) else type(call.indices).__name__
    return False, (
        f"{VECTORS} in a model with recurrent or convolutional layers must be of causal documents one after another as "
        f"[B, 1, {call.tokens.shape[1]}, 1], got {got}; or pass one sequence per row"
    )


@rule(CHECKS, "mask indices other than of causal documents in such a model", parts=True, waits=True)
def _are_flat(call: Call) -> Verdict:
    if call.indices is None or not _has_documents(call):
        return None
    ends = call.indices[:, 0, :, 0]
    real, joined = _joined(call.indices, ends.shape[1])
    message = f"{_JOINS}; pass {VECTORS} of causal documents one after another, or one sequence per row"
    return ((run_bounds(joined)[1] == ends) | ~real).all(), message


@rule(
    CHECKS,
    "packed rows in a model with recurrent or convolutional layers, any trainer",
    parts=True,
    waits=True,
)
def _is_one_document(call: Call) -> Verdict:
    found = None if not _has_documents(call) or takes_boundaries(call) else _documents(call)
    if found is None:
        return None
    last, real = found
    first = last
    if real is not None:
        last, first = last.masked_fill(~real, -1), last.masked_fill(~real, last.shape[-1])
    return (last.amax(-1) <= first.amin(-1)).all(), f"{_JOINS}; {_obstacle(call)}"
