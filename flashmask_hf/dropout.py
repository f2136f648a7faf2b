"""Attention dropout: which pairs of query rows and keys are kept, as a function of numbers alone.

A pair is kept if a word of Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is at least
p * 2**32. A call of Philox gives four words: for the rows i and i + 8 of a block of 16 rows, and the keys j and j + 8
of a block of 16 keys. One thread of a matrix product holds the scores of these pairs, transposed or not.

    key of Philox:    the seed's 64 bits
    counter:          (row // 16 * 8 + row % 8, key // 16 * 8 + key % 8, query head, batch entry)
    word:             2 * (row // 8 % 2) + key // 8 % 2

So all passes, implementations and orders of tiles drop the same pairs, and so do the ranks that share a row: a seed may
be int64 [1]; or, for a shard, [2 + blocks of 16 rows] with the number of its first query head, and of each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout_pattern", "shard_seed"]

BLOCK = 16
"""Rows and keys of a block."""

ROUNDS = 7
"""Rounds of Philox4x32: the fewest that pass BigCrush."""

_WORD = 0xFFFFFFFF


def threshold_of(dropout: float) -> int:
    """Return the least word that keeps a pair: even, so that no kernel is compiled for 1."""
    return 2 * round(dropout * 2**31)


def draw_seed(x: Tensor) -> Tensor:
    """Draw a seed, int64 [1], from the default generator of the device of `x`."""
    return torch.randint(2**62, (1,), device=x.device)


def shard_seed(seed: Tensor, first_head: int, row_blocks: Tensor) -> Tensor:
    """Return the seed of a shard of an attention call.

    Args:
        seed: int64 [1], of the whole call.
        first_head: number of the shard's first query head.
        row_blocks: int64 [ceil(Sq / 16)], row // 16 of each block of 16 query rows.
    """
    return torch.cat([seed, torch.full_like(seed, first_head), row_blocks.to(seed)])


def kept_blocks(seed: Tensor, dropout: float, batch: int, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return which pairs are kept, bool [heads, 16 * row blocks, 16 * key blocks].

    Args:
        seed: int64 [1] or of a shard.
        dropout: probability of dropping a pair.
        batch: number of the batch entry.
        heads: int64, numbers of query heads in the shard.
        rows: int64, numbers of blocks of rows in the shard.
        keys: int64, numbers of blocks of keys.
    """
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
    """Return which pairs `flashmask_attention` keeps with this dropout and seed, in quadratic memory.

    Kept weights of the softmax are divided by 1 - dropout, and the others are 0.

    Args:
        dropout: probability of dropping a pair, in [0, 1).
        dropout_seed: int64 [1], or of a shard, as in `flashmask_attention`.
        batch: number of batch entries, B.
        heads: number of query heads, Hq.
        q_len: number of query rows, Sq.
        kv_len: number of keys, Skv.

    Returns:
        bool [B, Hq, Sq, Skv] on the device of the seed, True where the pair is kept.
    """
    heads_, rows, keys = (
        torch.arange(n, device=dropout_seed.device) for n in (heads, -(-q_len // BLOCK), -(-kv_len // BLOCK))
    )
    kept = [kept_blocks(dropout_seed, dropout, b, heads_, rows, keys) for b in range(batch)]
    return torch.stack(kept)[..., :q_len, :kv_len]


def _philox(counter: list[Tensor], key: Tensor) -> list[Tensor]:
    """Return four words, int64 in 0..2**32 - 1, of counters of four such words and the 64 bits of `key`."""
    a, b, c, d = counter
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(ROUNDS):
        of_a, of_c = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2**64: the bits are right, whatever the sign
        a, b, c, d = (of_c >> 32 & _WORD) ^ b ^ low, of_c & _WORD, (of_a >> 32 & _WORD) ^ d ^ high, of_a & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return [a, b, c, d]
