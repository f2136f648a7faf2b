"""Documents of a row in models of which a part beside the attention takes the row for one document.

The mask keeps documents apart in the attention alone. PEFT's activated LoRA, the scales and chunks of Llama 4, ESM's
token dropout and heads that read one answer from a row look at the whole row, without an error. Nothing is read back
from the device.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor

from flashmask_hf.hf.documents import has_one_document
from flashmask_hf.hf.ignored_vectors import hides_more
from flashmask_hf.hf.model_hooks import tokens_of
from flashmask_hf.names import PACKED_IDS, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["check_adapters", "check_heads", "check_scales", "check_token_dropout"]

_HEADS_OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")
"""The `loss_type` of models whose head reads one class, reward or span from a row."""

_LABELS_OF_ROWS = ("next_sentence_label", "sentence_order_label")
"""Keywords with one label a row, which `ForPreTraining` of BERT and ALBERT learns beside masked tokens."""


def check_adapters(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise for packed rows in a model with activated LoRA, which looks for its invocation once in a row.

    Args:
        model: a transformers model whose attention is one of this package's, into which PEFT may have put adapters.
        kwargs: keywords of its call.

    Raises:
        RuntimeError: `startend_row_indices`, `cu_seq_lens_q` or `position_ids` tell several documents of a row (a
            device-side check).
    """
    adapters = getattr(model, "peft_config", {})
    if not any(getattr(config, "alora_invocation_tokens", None) for config in adapters.values()):
        return
    alone = _has_one_document(kwargs, vectors_alone=True)
    if alone is not None:
        device_assert(
            alone,
            "PEFT looks for alora_invocation_tokens once in a row, so that of several packed documents only one would "
            "have the adapter; use LoRA without them, or batches of whole sequences",
        )


def check_token_dropout(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for masked tokens in packed rows of a model that scales embeddings by their share of the row (ESM).

    Args:
        model: a transformers model whose attention is one of this package's.
        args: positional arguments of its call.
        kwargs: keywords of its call.

    Raises:
        RuntimeError: a row has a masked token, and `startend_row_indices`, `cu_seq_lens_q` or `position_ids` mark
            several documents in a row (a device-side check).
    """
    tokens, masked = tokens_of(args, kwargs), getattr(model.config, "mask_token_id", None)
    if masked is None or not getattr(model.config, "token_dropout", False) or not isinstance(tokens, Tensor):
        return
    alone = _has_one_document(kwargs, vectors_alone=True)
    if alone is not None and not tokens.is_floating_point():
        device_assert(
            alone | (tokens != masked).all(),
            f"{type(model).__name__} has token_dropout, which scales embeddings by the share of masked tokens in a "
            "row, not in each packed document. Pass one document per row.",
        )


def check_heads(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise for packed rows in a model whose head reads one answer from a row, and not one from each document.

    Calls with the packed rows of `run_packed` read one for each answer, and are left alone. So are calls of BERT's and
    ALBERT's `ForPreTraining` without a label of the row.

    Args:
        model: a transformers model.
        kwargs: keywords of its call; without `cu_seq_lens_q` and `position_ids` [B, S], nothing is looked at.

    Raises:
        RuntimeError: `cu_seq_lens_q` or `position_ids` tell several documents of a row (a device-side check).
    """
    one_answer = (
        getattr(model, "loss_type", None) in _HEADS_OF_ROWS
        or type(model).__name__.endswith("ForNextSentencePrediction")  # whose loss_type is None
        or any(kwargs.get(name) is not None for name in _LABELS_OF_ROWS)
    )
    if not one_answer or kwargs.get(PACKED_IDS) is not None:
        return
    alone = _has_one_document(kwargs)
    if alone is None:
        return
    device_assert(
        alone,
        f"{type(model).__name__} reads one class, reward or span from a row, not from each document; pass "
        "one document a row (DataCollatorWithPadding), or take MultiAnswerRewardTrainer for rewards",
    )


def _has_one_document(kwargs: dict[str, Any], vectors_alone: bool = False) -> Tensor | None:
    """Return whether a call has at most one document a row, bool []; None without what tells it.

    Bounds of several documents, `cu_seq_lens_q`, count before `position_ids` [B, S], as they do in attention.

    Args:
        kwargs: keywords of the call.
        vectors_alone: whether `startend_row_indices` without `position_ids` count, as several documents if they hide
            anything.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor) and bounds.shape[0] > 2:
        return (bounds.diff() > 0).sum() <= 1
    positions, mask, vectors = (kwargs.get(name) for name in ("position_ids", "attention_mask", VECTORS))
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return ~hides_more(vectors, None).any() if vectors_alone and isinstance(vectors, Tensor) else None
    if mask is None and isinstance(vectors, Tensor) and vectors.dim() == 4:
        mask = (vectors[:, 0] > 0).any(-1)  # 0 hides a key from all, as padding, whose positions are 0
    return has_one_document(positions, mask)


def check_scales(config: Any, position_ids: Tensor, attention_mask: Any) -> None:
    """Raise for several documents in a long row of Llama 4, whose scales or chunks count from the start of the row.

    The scale of a query is 1 up to `floor_scale` tokens (transformers, `Llama4TextAttention`). Chunks of attention
    count from the start of each document since transformers 5.23.

    Args:
        config: configuration of a model that makes its mask.
        position_ids: [B, S] of its call.
        attention_mask: of its call.

    Raises:
        RuntimeError: `position_ids` tell several documents in a row of more tokens (a device-side check).
    """
    if position_ids.dim() != 2:
        return
    length = position_ids.shape[1]
    floor = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if floor is not None and length >= floor:
        device_assert(
            has_one_document(position_ids, attention_mask),
            "Llama 4 scales queries by their place in the row from floor_scale tokens on, so documents of a "
            "longer row would depend on those before them; keep rows of several documents under floor_scale tokens",
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and length > chunk and Version(transformers.__version__) < Version("5.23"):
        device_assert(
            has_one_document(position_ids, attention_mask),
            "rows of several documents must not exceed attention_chunk_size before transformers 5.23, which counts "
            "chunks from the row's start. Install transformers 5.23, or pass shorter rows.",
        )
