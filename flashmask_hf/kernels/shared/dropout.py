"""Attention dropout in Triton tiles: the pattern of `flashmask_hf.dropout`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmask_hf.dropout import ROUNDS

_ROUNDS = tl.constexpr(ROUNDS)


class HeadDropout(NamedTuple):
    """Dropout of one query head."""

    seed: Any
    row_blocks: Any  # pointer to numbers of blocks; read in shards
    n_blocks: Any
    threshold: Any
    head: Any
    batch: Any


@triton.jit
def head_dropout(seed, dropout, batch, head, q_len, SHARD: tl.constexpr):
    """Return the `HeadDropout` of a query head; `dropout` is `Problem.dropout`, SHARD `Problem.shard`."""
    if SHARD:
        head += tl.load(seed + 1).to(tl.int32)
    # None in place of the pointer cannot be returned before Triton 3.7.
    return HeadDropout(tl.load(seed), seed + 2, tl.cdiv(q_len, 16), dropout[0], head, batch)


@triton.jit
def row_counters(dropout, row, BLOCK_M: tl.constexpr, SHARD: tl.constexpr):
    """Return the counters [BM / 2] of a row tile from row `row` on."""
    if SHARD:
        block = row // 16 + tl.arange(0, BLOCK_M // 16)
        numbers = tl.load(dropout.row_blocks + block, mask=block < dropout.n_blocks, other=0).to(tl.int32)
        counters = (numbers[:, None] * 8 + tl.arange(0, 8)[None, :]).reshape(BLOCK_M // 2)
    else:
        counters = row // 2 + tl.arange(0, BLOCK_M // 2)
    return counters


@triton.jit
def kept_pairs(dropout, rows, column, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return which pairs of rows with these counters are kept, [BM, BN], or [BN, BM] if KEYS_FIRST."""
    BLOCK_M: tl.constexpr = rows.shape[0] * 2
    keys = column // 2 + tl.arange(0, BLOCK_N // 2)
    FIRST: tl.constexpr = BLOCK_N if KEYS_FIRST else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if KEYS_FIRST else BLOCK_N
    zeros = tl.zeros([FIRST // 2, SECOND // 2], tl.int32)
    if KEYS_FIRST:
        rows, keys = zeros + rows[None, :], zeros + keys[:, None]
    else:
        rows, keys = zeros + rows[:, None], zeros + keys[None, :]
    heads, batch = zeros + dropout.head, zeros + dropout.batch
    w00, w01, w10, w11 = tl.philox(dropout.seed, rows, keys, heads, batch, n_rounds=_ROUNDS)
    if KEYS_FIRST:
        words = tl.join(tl.join(w00, w01), tl.join(w10, w11))
    else:
        words = tl.join(tl.join(w00, w10), tl.join(w01, w11))  # [.., .., bit 3 of row, of key]
    words = words.reshape(FIRST // 16, 8, SECOND // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3).reshape(FIRST, SECOND)
    return words >= dropout.threshold.to(tl.uint32)
