"""Rows longer than one GPU: each process of a group holds some rows of the queries, and attention exchanges the rest.

The mask vectors stay whole in every process, 4 bytes a token. `split.py` says which rows a process holds, `rows.py`
chooses them, `exchange.py` moves heads or keys between processes, on the differentiable collectives of
`collectives.py`. The attention itself is that of `flashmask_hf.hf`.
"""

from flashmask_hf.parallel.rows import contiguous_rows, deal_rows, split_rows
from flashmask_hf.parallel.split import RowSplit, sequence_parallel

__all__ = ["RowSplit", "contiguous_rows", "deal_rows", "sequence_parallel", "split_rows"]
