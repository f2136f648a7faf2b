"""Position numbers of packed rows in models that embed positions, such as GPT-2, BERT and RoBERTa.

Without `position_ids` these models number a row from end to end, so a packed document would have other embeddings than
alone, without an error. Some, such as RoBERTa, count from `padding_idx + 1`, and give the numbers up to `padding_idx`
to padding, while collators count the tokens of a document from 0. `renumber_positions` puts a forward pre-hook on such
a model when it is made or its attention is set (`patches.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.hf.branches import follows_document, subtree_ends
from flashmask_hf.hf.forward_records import record_documents
from flashmask_hf.hf.model_hooks import named_arguments, own_modules
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["renumber_positions"]


def renumber_positions(model: Any) -> None:
    """Make a model that embeds positions raise for packed rows without them, and count them from its first number.

    Other models are left as they are. Repeating it is fine. The hook acts while the model's attention is one of this
    package's.

    Args:
        model: a transformers model, or a model within one, with its layers made. In calls with
            `startend_row_indices` of a model that counts from `padding_idx + 1`, that number is added to
            `position_ids` if a token that is seen has position 0, which no token of these models has. RuntimeError
            (device-side checks): a seen token has a position of padding all the same; in a call without vectors,
            documents count from 0, or a row has several; or vectors or `cu_seq_lens_q` are those of several documents,
            and there are no `position_ids`.
    """
    firsts = [
        0 if part.padding_idx is None else part.padding_idx + 1
        for name, part in own_modules(model)
        if isinstance(part, nn.Embedding) and ("position" in name or name == "wpe")
    ]
    if firsts and _renumber not in model._forward_pre_hooks.values():
        model._first_position = max(firsts)
        model._sees_both_ways = any(getattr(part, "is_causal", None) is False for _, part in own_modules(model))
        model.register_forward_pre_hook(_renumber, with_kwargs=True)


def _renumber(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count the positions of a packed row from the model's first one; a forward pre-hook."""
    if model.config._attn_implementation not in NAMES:
        return None
    named = named_arguments(model, args, kwargs)
    positions, vectors = named.get("position_ids"), named.get(VECTORS)
    mask = _mask_of(model, vectors)
    if positions is None:
        _require_one_document(model, named, mask)
    first = model._first_position
    if not isinstance(positions, Tensor) or positions.dim() != 2 or first == 0:
        return None
    if vectors is None:
        _require_plain_positions(model, positions, named)
        record_documents()  # so that `unread_documents` does not take positions of padding for documents
        return None
    name = type(model).__name__
    if mask is not None and mask.kv_len > positions.shape[1]:
        raise NotImplementedError(
            f"{name} counts positions from {first}, which is not implemented for rows that are split over processes; "
            "use a model whose positions start at 0"
        )
    if mask is None or mask.kv_len != positions.shape[1]:
        return None  # the first layer says what is wrong
    _, last = outer_rows(mask.visible_intervals(mask.kv_len), mask.kv_len)
    seen = (last > 0).any(1)
    positions = positions + torch.where((seen & (positions == 0)).any(), first, 0)
    device_assert(
        ~(seen & (positions < first)).any(),
        f"position_ids of {name} must count from {first} in every document, as the lower ones are padding's, or from 0",
    )
    return (), named | {"position_ids": positions}


def _mask_of(model: Any, vectors: Any) -> FlashMask | None:
    """Return the mask of vectors, or None if they are missing or have no form that the model's layers take."""
    if not isinstance(vectors, Tensor) or vectors.dtype != torch.int32 or vectors.shape[3:] not in ((1,), (2,), (4,)):
        return None
    causal = not model._sees_both_ways and vectors.shape[3] < 4
    return FlashMask(vectors, causal) if causal or vectors.shape[3] > 1 else None


def _require_one_document(model: Any, named: dict[str, Any], mask: FlashMask | None) -> None:
    """Assert that a call without `position_ids` has one document a row: the model numbers a row from end to end."""
    name, lengths = type(model).__name__, named.get("cu_seq_lens_q")
    if mask is not None and not model.config.is_encoder_decoder:  # whose layers refuse vectors
        device_assert(
            ~follows_document(subtree_ends(mask)).any(),
            f"{name} embeds positions, and would number several documents of {VECTORS} from end to end without "
            "position_ids; pass positions that start again with each document",
        )
    if named.get(VECTORS) is None and isinstance(lengths, Tensor):
        device_assert(
            (lengths.diff() > 0).sum() <= 1,
            f"{name} embeds positions, and would number the documents of cu_seq_lens_q from end to end without "
            "position_ids; pass positions that start again with each document",
        )


def _require_plain_positions(model: Any, positions: Tensor, named: dict[str, Any]) -> None:
    """Assert that positions [B, S] without vectors count from the model's first one, and once in a row."""
    name, first = type(model).__name__, model._first_position
    before, start, after = positions[:, :-2], positions[:, 1:-1], positions[:, 2:]
    device_assert(
        ~((before > 0) & (start == 0) & (after == 1)).any(),
        f"position_ids start again at 0, but {name} counts positions from {first}, and 0 is padding; pass "
        f"{VECTORS} with them, as the collators do",
    )
    if named.get("cu_seq_lens_q") is not None:
        return
    starts = (positions[:, :-1] > first) & (positions[:, 1:] == first)
    shown = named.get("attention_mask")
    if isinstance(shown, Tensor) and shown.shape == positions.shape:
        starts = starts & shown[:, 1:].to(torch.bool)
    device_assert(
        ~starts.any(),
        f"position_ids start again at {first} in one row, but {name} does not hand them to its masks, so its "
        f"documents would see each other; pass {VECTORS} with them",
    )
