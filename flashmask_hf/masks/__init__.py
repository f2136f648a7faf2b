"""The gallery: one constructor per mask family (FlashMask, ICLR 2025, section 2.1), and two that read other layouts.

Every function returns a `FlashMask` with `q_len` set. What holds for all of them:

* Rows are queries, columns are keys. In the drawings `1` is visible, `.` hidden, the first line is query 0.
* Lengths, windows and positions count tokens. A list of lengths is one row of tokens; a list of such lists is a batch.
  A mask of one row has B = 1 and serves every entry of a batch.
* Batched rows of different length are padded at the end, to the longest or to `kv_len`. Padding sees nothing and is
  seen by nothing (in `causal_blockwise` its queries see keys).
* With `q_len` < `kv_len` the queries are the last `q_len` positions, as with a key-value cache: query row i stands at
  position i + kv_len - q_len. The drawing loses its top rows, nothing else changes.
* Masks given by Python numbers are built on the CPU and moved to `device` once; masks given by tensors live on the
  tensor's device unless `device` says otherwise.
"""

from flashmask_hf.masks.documents import (
    causal_blockwise,
    causal_document,
    document,
    padding,
)
from flashmask_hf.masks.eviction import random_eviction
from flashmask_hf.masks.packed import from_cu_seqlens, from_position_ids
from flashmask_hf.masks.prefixes import prefix_lm_causal, prefix_lm_document
from flashmask_hf.masks.sorted import hash_sparse, qk_sparse
from flashmask_hf.masks.trees import Node, share_question, tree
from flashmask_hf.masks.windows import (
    causal,
    full,
    global_sliding_window,
    sliding_window,
)

__all__ = [
    "Node",
    "causal",
    "causal_blockwise",
    "causal_document",
    "document",
    "from_cu_seqlens",
    "from_position_ids",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "padding",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "random_eviction",
    "share_question",
    "sliding_window",
    "tree",
]
