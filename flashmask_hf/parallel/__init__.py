"""Rows longer than one GPU: each rank of a group holds a shard, and attention exchanges heads or keys.

Mask indices stay whole on every rank, 4 bytes per token. Attention runs in `flashmask_hf.hf`.
"""

from flashmask_hf.parallel.rows import contiguous_rows, deal_rows, split_rows
from flashmask_hf.parallel.split import RowSplit, sequence_parallel

__all__ = ["RowSplit", "contiguous_rows", "deal_rows", "sequence_parallel", "split_rows"]
