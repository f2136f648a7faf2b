"""Dynamic sparse attention (Pagliardini et al. 2023): heads drop queries and keys, or sort them into buckets.

Both are FlashMask after a stable sort (`masks/sorted.py`). Every visible pair is computed in linear memory, and the
host never waits for the device.

    operators   the sort, the hash buckets, and attention to sorted rows, as operators of torch.library
    reorder     gathers rows in sorted order and puts them back
    hf          `attn_implementation="flashmask_hash"` and `"flashmask_qk"`; only `flashmask_hf.hf` imports it
    directions  random directions of the hash in `hf`
"""

from flashmask_hf.sparse.functions import hash_sparse_attention, lsh_buckets, qk_sparse_attention

__all__ = ["hash_sparse_attention", "lsh_buckets", "qk_sparse_attention"]
