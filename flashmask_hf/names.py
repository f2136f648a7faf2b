"""Names shared by transformers, collators and backend: attention implementations, batch keys, and a label."""

from __future__ import annotations

FLASHMASK = "flashmask"
"""The `attn_implementation` of exact attention under a FlashMask."""

HASH = "flashmask_hash"
"""The `attn_implementation` of hash-sparse attention, and the config attribute that holds its options."""

QK = "flashmask_qk"
"""The `attn_implementation` of attention with dropped queries and keys, and the config attribute with its options."""

NAMES = (FLASHMASK, HASH, QK)
"""Every `attn_implementation` of this package."""

VECTORS = "startend_row_indices"
"""The keyword of a model call, and the batch key, of the caller's mask vectors, int32 [B, 1, S, n]."""

PACKED_IDS = "packed_input_ids"
"""The batch key of packed rows beside a batch of one sequence per answer (`PackedRows.indexed_batch`)."""

PACKED_POSITIONS = "packed_position_ids"
"""The batch key of the packed rows' positions."""

PACKED_KEYS = {"input_ids": PACKED_IDS, "position_ids": PACKED_POSITIONS, VECTORS: VECTORS}
"""The batch keys of packed rows beside such a batch, by the keys of packed rows alone."""

PACKED_INDEX = "packed_index"
"""The batch key of each token's place in the packed rows, by which hidden states return to the usual batch."""

PACKED_REAL = "packed_real"
"""The keyword of the usual batch's tokens, bool [N, L], if hidden states of its padding must not be read."""

IGNORED = -100
"""The label of a token without a loss."""

LABEL_WEIGHTS = "label_weights"
"""The batch key of what the label at each token counts, float32 [R, S], 0 without a label."""

SHIFT_LABEL_WEIGHTS = "shift_label_weights"
"""The batch key of the weights beside `shift_labels`, float32 [R, S]: what the label after each token counts."""

PAIR_WEIGHTS = "pair_weights"
"""The batch key of what each pair of answers counts, float32 [examples]."""

EXAMPLE_TOKENS = "example_tokens"
"""The batch key of the number of tokens that each packed row would have if it shared no prefixes, int64 [examples]."""

DIFFUSION_LABELS = "diffusion_labels"
"""The batch key of the noised tokens' clean ids, at the rows whose logits predict them; IGNORED elsewhere."""

DIFFUSION_WEIGHTS = "diffusion_weights"
"""The batch key of the noised tokens' weights in the loss."""
