"""Activation checkpointing that keeps attention's results, so that attention is never computed twice."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flashmask_hf.operators.attention import flash_attn_forward
from flashmask_hf.operators.sparse import flash_attn_sparse_forward

__all__ = ["keep_attention"]


def keep_attention() -> tuple[Any, Any]:
    """Make a checkpointed layer keep the output and the log-sum-exp of its attention, and recompute only the rest.

    It is a `context_fn` of `torch.utils.checkpoint.checkpoint` without reentrance, to which transformers hands it.
    Results are the same to the bit. In 16 bits each layer keeps 2 * Hq * Dv + 4 * Hq bytes a token more: about as much
    as the layer's input, which checkpointing keeps in any case. Every operation of a layer goes through Python then,
    which costs the host some milliseconds a step, so that short rows do not gain.

    The callback of TensorBoard writes the trainer's arguments as JSON, which has no functions, and raises; report
    elsewhere.

    Returns:
        The contexts of a layer's forward and of its recomputation.

    Example:
        ```python
        import flashmask_hf
        from transformers import TrainingArguments

        args = TrainingArguments(
            "out",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": flashmask_hf.keep_attention},
        )
        ```
    """
    return create_selective_checkpoint_contexts([flash_attn_forward, flash_attn_sparse_forward])
