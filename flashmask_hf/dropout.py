"""Attention dropout: which pairs of query rows and keys are kept.

A pair is kept if a word of Philox4x32-7 (Salmon et al. 2011) is at least p * 2**32. Four words are for rows i, i + 8
and keys j, j + 8 of blocks of 16, which one thread of a matrix product holds:

    key:      the seed
    counter:  (row // 16 * 8 + row % 8, key // 16 * 8 + key % 8, query head, batch entry)
    word:     2 * (row // 8 % 2) + key // 8 % 2

A seed is int64 [1]. A shard's has the number of its first query head, and of each block of 16 rows: [2 + blocks].
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout_pattern", "shard_seed"]

BLOCK = 16
ROUNDS = 7  # the fewest that pass BigCrush

_WORD = 0xFFFFFFFF


def threshold_of(dropout: float) -> int:
    """Return the least word that keeps a pair; even, as Triton compiles 1 anew."""
    return min(2 * round(dropout * 2**31), 2**32 - 2)


def draw_seed(x: Tensor) -> Tensor:
    """Draw a seed by the generator of the device of `x`."""
    return torch.randint(2**62, (1,), device=x.device)


def shard_seed(seed: Tensor, first_head: int, row_blocks: Tensor) -> Tensor:
    """Return the seed of a shard of a call, given the call's.

    Args:
        seed: int64 [1].
        first_head: number of the shard's first query head.
        row_blocks: int64 [ceil(Sq / 16)], row // 16 of each block of query rows.
    """
    return torch.cat([seed, torch.full_like(seed, first_head), row_blocks.to(seed)])


def kept_blocks(seed: Tensor, dropout: float, batch: int, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return which pairs are kept, bool [heads, 16 * rows, 16 * keys], given numbers of blocks of rows and keys."""
    if len(seed) > 1:
        heads, rows = heads + seed[1], seed[2:][rows]
    eight = torch.arange(BLOCK // 2, device=seed.device)
    counters = [(x[:, None] * (BLOCK // 2) + eight).flatten() for x in (rows, keys)]
    of_rows, of_keys, of_heads, of_batch = torch.broadcast_tensors(
        counters[0][:, None], counters[1], heads[:, None, None], torch.full_like(seed[:1], batch)
    )
    words = torch.stack(_philox([of_rows, of_keys, of_heads, of_batch], seed[0])) >= threshold_of(dropout)
    blocks = words.unflatten(0, (2, 2)).unflatten(4, (-1, 8)).unflatten(3, (-1, 8))  # [2, 2, heads, rows, 8, keys, 8]
    return blocks.permute(2, 3, 0, 4, 5, 1, 6).reshape(len(heads), BLOCK * len(rows), BLOCK * len(keys))


def dropout_pattern(dropout: float, dropout_seed: Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Return which pairs `flashmask_attention` keeps, in quadratic memory.

    Args:
        dropout: in [0, 1).
        dropout_seed: int64, as in `flashmask_attention`.
        batch: B.
        heads: Hq.
        q_len: Sq.
        kv_len: Skv.

    Returns:
        bool [B, Hq, Sq, Skv].
    """
    heads_, rows, keys = (
        torch.arange(n, device=dropout_seed.device) for n in (heads, -(-q_len // BLOCK), -(-kv_len // BLOCK))
    )
    kept = [kept_blocks(dropout_seed, dropout, b, heads_, rows, keys) for b in range(batch)]
    return torch.stack(kept)[..., :q_len, :kv_len]


def _philox(counter: list[Tensor], key: Tensor) -> list[Tensor]:
    """Return four words of counters and a key of 64 bits."""
    a, b, c, d = counter
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(ROUNDS):
        of_a, of_c = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2**64: the bits are right, whatever the sign
        a, b, c, d = (of_c >> 32 & _WORD) ^ b ^ low, of_c & _WORD, (of_a >> 32 & _WORD) ^ d ^ high, of_a & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return [a, b, c, d]
