"""Packed rows in models that do not read what tells their documents, and let them see each other without an error.

With attention of this package, some models take `position_ids` for their embeddings alone or not at all (Granite 4
without Mamba layers, the text model of HunYuan-VL, all that see both ways), and some never call the attention, so that
they ignore mask vectors (CPM-Ant). With another attention, documents are kept apart only by masks that a model makes
from `position_ids`; many make theirs without them (gpt-oss, OPT, BLOOM, the text model of Qwen2.5-VL).

Some calls tell documents by `seq_idx` alone, which only recurrent layers read, or by numbers in a 2D mask, which
transformers reads as ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.document_guard import is_guarded
from flashmask_hf.hf.documents import has_one_document
from flashmask_hf.hf.forward_records import ForwardRecord
from flashmask_hf.hf.ignored_vectors import hides_more
from flashmask_hf.hf.model_hooks import is_compiled, named_arguments, tokens_of
from flashmask_hf.names import NAMES, PACKED_IDS, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["call_model", "check_document_numbers", "check_numbered_mask"]


def call_model(model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model, and raise if it mixed the documents of `position_ids` or of mask vectors.

    Once they were read in a call of the model, its calls of the same kind are not looked at: those with the same
    attention, and with or without vectors and `cu_seq_lens_q`. Calls of compiled models never are, for compiled code
    cannot record it.

    Args:
        model: a transformers model.
        call: its unbound `__call__`.
        args: positional arguments of the call.
        kwargs: keywords of the call. With another attention than this package's, it is looked at only if they have
            `startend_row_indices` [B, H, S, 1].

    Raises:
        RuntimeError: one of the following (a device-side check). There are no `startend_row_indices`, `position_ids`
            [B, S] start again at 0 within a row, and neither masks nor causal layers got them. The vectors hide
            something, and no layer got them. With another attention, the vectors tell several documents, which the
            model did not find in `position_ids`; FlashAttention of transformers is trusted to do so.
    """
    vectors = kwargs.get(VECTORS)
    config = model.config if vectors is None else model.config.get_text_config()
    implementation = config._attn_implementation
    kind = implementation, vectors is None, kwargs.get("cu_seq_lens_q") is None
    if torch.compiler.is_compiling() or kind in getattr(model, "_documents_read", ()):
        return call(model, *args, **kwargs)
    named = named_arguments(model, args, kwargs)
    if not _tells_documents(named, implementation):
        return call(model, *args, **kwargs)
    with ForwardRecord() as record:
        output = call(model, *args, **kwargs)
    if record.knows_documents or is_compiled(model):
        model._documents_read = {kind, *getattr(model, "_documents_read", ())}
        return output
    mask, name = named.get("attention_mask"), type(model).__name__
    if vectors is None:
        alone = has_one_document(named["position_ids"], mask)
        message = (
            f"{name} hands position_ids neither to its masks nor to its attention, so that documents of a row would "
            f"see each other; pass {VECTORS} with them"
        )
    else:
        alone = ~hides_more(vectors, mask).any()
        message = (
            f"{name} never calls its attention by name, so that it ignores {VECTORS}; pass one document a row"
            if implementation in NAMES
            else f"{name} makes its masks without position_ids, so documents of a row mix with "
            f"attn_implementation='{implementation}'; load it with 'flashmask', or pass one document a row"
        )
    device_assert(alone, message)
    return output


def _tells_documents(named: dict[str, Any], implementation: str) -> bool:
    """Return whether a call, its arguments by name, has vectors or positions of whole rows that attention must read."""
    vectors = named.get(VECTORS)
    if vectors is None:
        positions, mask = named.get("position_ids"), named.get("attention_mask")
        flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)  # masks of a static cache are made before
        return implementation in NAMES and flat and isinstance(positions, Tensor) and positions.dim() == 2
    if named.get(PACKED_IDS) is not None or ("flash" in implementation and implementation not in NAMES):
        return False
    tokens = tokens_of((), named)
    if not isinstance(tokens, Tensor) or not isinstance(vectors, Tensor) or vectors.dim() != 4:
        return False
    told = implementation in NAMES or vectors.shape[3] == 1  # `ignored_vectors` refuses others where they hide anything
    return told and vectors.shape[2] == tokens.shape[1]


def check_document_numbers(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise if `seq_idx` marks documents that `position_ids` do not, since attention ignores it, or for stacked bounds.

    Args:
        model: a transformers model whose attention is one of this package's.
        kwargs: keywords of its call. With `startend_row_indices`, nothing is looked at.

    Raises:
        RuntimeError: `seq_idx` [B, S] numbers several documents in a row, without `position_ids` [B, S] that start
            again at 0 where its number changes (a device-side check).
        ValueError: `cu_seq_lens_q` is no tensor of one axis, as when a collator stacks the column of a dataset.
    """
    if kwargs.get(VECTORS) is not None:
        return
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is not None:
        if not isinstance(bounds, Tensor) or bounds.dim() != 1:
            got = list(bounds.shape) if isinstance(bounds, Tensor) else type(bounds).__name__
            raise ValueError(
                f"cu_seq_lens_q must be a tensor [documents + 1] of one row, got {got}; flatten the batch into one row "
                "(DataCollatorWithFlattening), or pass position_ids alone, which start again at 0 with each document"
            )
        return
    numbers, positions = kwargs.get("seq_idx"), kwargs.get("position_ids")
    if not isinstance(numbers, Tensor) or is_guarded(model):
        return
    changes = numbers[:, 1:] != numbers[:, :-1]
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != numbers.shape[1]:
            return
        changes = changes & (positions[:, 1:] != 0)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == numbers.shape:
            changes = changes & (mask[:, 1:] > 0) & (mask[:, :-1] > 0)
    device_assert(
        ~changes.any(),
        f"seq_idx numbers documents of a row, but the attention of {type(model).__name__} does not read it; "
        "pass position_ids that start again at 0 with each document",
    )


def check_numbered_mask(attention_mask: Any, position_ids: Any) -> None:
    """Raise for a 2D mask that numbers documents which nothing else tells; transformers reads each number as 1.

    Args:
        attention_mask: of a model's call; tensors [B, S] are looked at.
        position_ids: of the call, or None.

    Raises:
        RuntimeError: the number changes between two tokens, and no position of 0 follows (a device-side check).
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return
    before, after = attention_mask[:, :-1], attention_mask[:, 1:]
    mixed = (before > 0) & (after > 0) & (before != after)
    if isinstance(position_ids, Tensor) and position_ids.shape[-1] == attention_mask.shape[1]:
        mixed = mixed & (position_ids[..., 1:] != 0)
    device_assert(
        ~mixed.any(),
        "attention_mask [B, S] numbers documents, which transformers reads as ones, so they would mix; "
        "pass position_ids that start again at 0 with each document, and a mask of ones and zeros, or none",
    )
