"""Training on rows of hundreds of thousands of tokens on one GPU: what a checkpointed layer keeps, and where."""

from flashmask_hf.long_rows.checkpointing import keep_attention
from flashmask_hf.long_rows.offload import offload_checkpoints
from flashmask_hf.long_rows.tiling import tile_tokens

__all__ = ["keep_attention", "offload_checkpoints", "tile_tokens"]
