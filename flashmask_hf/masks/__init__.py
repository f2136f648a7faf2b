"""The gallery: one constructor per mask family (FlashMask, ICLR 2025, section 2.1), and two that read other layouts.

Every function but those named `_order` returns a `FlashMask` with `q_len` set. In the drawings, rows are queries,
columns are keys, `1` is visible and `.` hidden. Lengths, windows and positions count tokens. Arguments with one meaning
in every family:

* `documents`: lengths. A list is one packed row; a list of lists is a batch. An int tensor or array has shape
  [documents] or [B, documents], and its rows may end in zeros. A mask of one packed row has B = 1 and serves any batch.
* `kv_len`: number of keys; None is the longest packed row. Shorter rows end in padding, which sees nothing and is not
  seen.
* `q_len`: number of queries, the last of kv_len positions: query row i is at position i + kv_len - q_len. None is
  kv_len.
* `causal`: whether later keys are hidden.
* `device`: device of the mask. None is the device of a tensor argument, or the CPU.

All raise TypeError for arguments of other types, and ValueError for an empty document, a packed row longer than
`kv_len`, or `q_len` outside 1..kv_len.
"""

from flashmask_hf.masks.diffusion import block_causal, block_diffusion, block_diffusion_order
from flashmask_hf.masks.documents import (
    blocks,
    causal_blockwise,
    causal_document,
    document,
    padding,
)
from flashmask_hf.masks.drafts import draft_blocks, draft_chains, draft_chains_order
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
    "block_causal",
    "block_diffusion",
    "block_diffusion_order",
    "blocks",
    "causal",
    "causal_blockwise",
    "causal_document",
    "document",
    "draft_blocks",
    "draft_chains",
    "draft_chains_order",
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
