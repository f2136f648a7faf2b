"""Packed rows in models with linear attention, state spaces or convolutions: boundaries for kernels, or an error."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flashmask_hf.hf.call import Call, cache_of
from flashmask_hf.hf.documents import Documents, of_numbers, run_bounds
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.models import state_of
from flashmask_hf.hf.rules import Rule, Verdict, rule
from flashmask_hf.names import VECTORS

CHECKS: list[Rule] = []

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


def has_documents(call: Call) -> bool:
    """Return whether a recurrent model gets document boundaries."""
    marks = ("cu_seq_lens_q", "seq_idx", "position_ids") if call.is_ours else ()
    return call.state.is_recurrent and any(call.named.get(name) is not None for name in (VECTORS, *marks))


def _has_rows(call: Call) -> bool:
    return call.tokens is not None and call.tokens.shape[1] > 1


def documents_of(call: Call) -> Documents | None:
    """Return the documents as the kernels read them, or None without boundaries: `seq_idx` precedes positions.

    Padding of mask indices [B, 1, S, 1] is a document of its own.
    """
    if call.indices is not None:
        ends = call.indices[:, 0, :, 0]
        real, token = ends > 0, torch.arange(1, ends.shape[1], device=ends.device)
        joined = (real[:, 1:] == real[:, :-1]) & (~real[:, 1:] | (ends[:, :-1] != token))
        return Documents(nn.functional.pad(~joined, (1, 0), value=True), *run_bounds(joined))
    numbers = call.tensor("seq_idx")
    return call.documents if numbers is None or call.bounds is not None else of_numbers(numbers)


def _takes_boundaries(call: Call) -> bool:
    return _obstacle(call) is None and (call.indices is None or _has_form(call))


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


def add_boundaries(call: Call) -> dict[str, Any] | None:
    """Return the arguments with the boundaries by which kernels keep documents apart.

    These are `seq_idx`, mask indices for attention, and for the delta rule `cu_seq_lens_q` and `cu_seq_lens_k`, for
    whose shape the host waits. Several documents then have no cache.
    """
    documents = documents_of(call) if _has_rows(call) and _takes_boundaries(call) else None
    if documents is None:
        return None
    numbers = documents.numbers().expand(call.tokens.shape[0], -1)
    numbers = numbers - numbers[:, :1]
    added: dict[str, Any] = {"seq_idx": numbers.to(torch.int32)}
    if call.indices is None:
        ends = documents.end.to(torch.int32).expand_as(numbers)
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


@rule(CHECKS, "other masks than of causal documents in a recurrent model", VECTORS, where=has_documents, waits=True)
def _are_of_documents(call: Call) -> Verdict | None:
    if not _has_rows(call):
        return None
    if not _has_form(call):
        got = list(call.indices.shape) if isinstance(call.indices, Tensor) else type(call.indices).__name__
        return False, (
            f"{VECTORS} in a model with recurrent or convolutional layers must be of causal documents one after "
            f"another as [B, 1, {call.tokens.shape[1]}, 1], got {got}; or pass one sequence per row"
        )
    ends, documents = call.indices[:, 0, :, 0], cast(Documents, documents_of(call))
    message = f"{_JOINS}; pass {VECTORS} of causal documents one after another, or one sequence per row"
    return ((documents.end == ends) | (ends <= 0)).all(), message


@rule(CHECKS, "packed rows in a recurrent or convolutional model", where=has_documents, waits=True)
def _is_one_document(call: Call) -> Verdict | None:
    documents = documents_of(call) if _has_rows(call) and not _takes_boundaries(call) else None
    if documents is None:
        return None
    numbers, real = documents.numbers(), call.padding if call.indices is None else call.indices[:, 0, :, 0] > 0
    if real is None:
        real = numbers >= 0
    last, first = torch.where(real, numbers, -1).amax(-1), torch.where(real, numbers, numbers.shape[-1] + 1).amin(-1)
    return (last <= first).all(), f"{_JOINS}; {_obstacle(call)}"
