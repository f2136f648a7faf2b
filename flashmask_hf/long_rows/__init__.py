"""Training on rows of hundreds of thousands of tokens on one GPU: what a checkpointed layer keeps, and where."""

from flashmask_hf.long_rows.checkpointing import keep_attention

__all__ = ["keep_attention"]
