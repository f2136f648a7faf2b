"""The keywords that transformers and trainers pass to attention: used, harmless or refused."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from flashmask_hf.names import (
    DIFFUSION_LABELS,
    DIFFUSION_WEIGHTS,
    HASH,
    LABEL_WEIGHTS,
    PACKED_INDEX,
    PACKED_REAL,
    PAIR_WEIGHTS,
    QK,
    SHIFT_LABEL_WEIGHTS,
    VECTORS,
)

_USED = f"cu_seq_lens_q is_causal position_ids s_aux sliding_window softcap {VECTORS}".split()
"""Keywords that change the result and are implemented."""

_CHANGES = "{0} changes the result of attention and is not implemented by attn_implementation='{1}'; "

_REFUSED = {
    _CHANGES + "pass {0}=None, or use attn_implementation='eager' for this model": "alibi alibi_slopes attention_bias "
    "attn_bias block_indices block_mask block_table head_mask indices mask_mod position_bias score_mod sinks "
    "window_size",
    _CHANGES + "use attn_implementation='sdpa' for continuous batching": "cache read_index",
    "{0} of the batch would not weigh this trainer's loss; train with PackedSFTTrainer or SharedQuestionDPOTrainer, or "
    "remove the weights from the dataset": f"{LABEL_WEIGHTS} {SHIFT_LABEL_WEIGHTS} {PAIR_WEIGHTS}",
}
"""Keywords that are not implemented, by the error's text, with places for the keyword and the attention."""

_HARMLESS = {
    "models": "cache_position deterministic inputs_embeds is_first_iteration labels logits_to_keep output_attentions "
    "output_hidden_states output_router_logits past_key_values position_embeddings return_dict seq_idx token_type_ids "
    "use_cache",
    "FlashAttention": "cu_seq_lens_k max_length_k max_length_q",
    "trainers": "completion_mask num_items_in_batch return_loss shift_labels skip_logits",
    "this package": f"{DIFFUSION_LABELS} {DIFFUSION_WEIGHTS} {PACKED_INDEX} {PACKED_REAL}",
}
"""Keywords that do not change the result, by what passes them."""

_SPARSE = {HASH: HASH, QK: QK, "q_keep": QK, "k_keep": QK}
"""Additional keywords of an implementation, by its name."""

SPLIT_BY_TORCH = (
    "context parallelism of torch and accelerate (cp_size > 1) is for 'sdpa' alone: with '{}' each rank would attend "
    "within its own part of the row; take PackedSFTTrainer, or leave cp_size at 1"
)
"""The error's text for context parallelism of 'sdpa' alone, with a place for the attention."""

_ERRORS = {name: text for text, names in _REFUSED.items() for name in names.split()}

_ACCEPTED = {*_USED, *" ".join(_HARMLESS.values()).split()}

_warned: set[str] = set()
"""Unknown keywords that this process has warned of."""


def check_keywords(kwargs: dict[str, Any], implementation: str) -> None:
    """Raise for unimplemented keywords that would change the result; warn once of each unknown one.

    Args:
        kwargs: the layer's keywords.
        implementation: the layer's attention.

    Raises:
        TypeError: a keyword that looks like `startend_row_indices` and is not.
        ValueError: a sliding window of less than one token.
        NotImplementedError: a keyword that is not implemented, options of another implementation, or weights of labels.
    """
    check_window(kwargs.get("sliding_window"))
    for name, value in kwargs.items():
        if name in _ACCEPTED or value is None or _SPARSE.get(name) == implementation:
            continue
        if name in _ERRORS:
            raise NotImplementedError(_ERRORS[name].format(name, implementation))
        if name in _SPARSE:
            raise NotImplementedError(
                f"{name} is an option of '{_SPARSE[name]}', but this layer's attention is '{implementation}'; call "
                f"model.set_attn_implementation('{_SPARSE[name]}'), or leave {name} out"
            )
        if "startend" in name or "row_indices" in name:
            raise TypeError(f"attention got a keyword '{name}', which it does not know; do you mean {VECTORS}?")
        if not torch.compiler.is_compiling() and name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"attn_implementation='{implementation}' ignores the attention keyword '{name}', which it does not "
                "know; that is right if it is meant for another part of the model. If it should change attention, use "
                "'eager'.",
                stacklevel=4,  # the model's code, past `check_layer` and the attention function
            )


def check_window(window: Any) -> None:
    """Raise for a sliding window of less than one token."""
    if isinstance(window, int) and window < 1:
        raise ValueError(
            f"sliding_window must be at least 1, got {window}, which hides every key; set it to None in the model's "
            "config for no window"
        )
