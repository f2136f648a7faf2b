"""Tile sizes by measured tables; no search at a user's first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Config(NamedTuple):
    """A tile of query rows and key columns (powers of two that divide the plan's), warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# By widest head_dim tile, best first as measured on an H200 (bfloat16, 8K rows); the first whose operands fit the
# shared memory is taken.
_FORWARD = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 32, 4, 2)),
    128: (
        Config(128, 128, 8, 3),
        Config(128, 128, 8, 2),
        Config(128, 64, 8, 2),
        Config(64, 64, 4, 2),
        Config(64, 32, 4, 2),
    ),
    256: (Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 1)),
}
_FORWARD_BLOCKS = {**_FORWARD, 128: (Config(64, 128, 4, 3), *_FORWARD[128])}
"""Under causal masks whose intervals end, those of blocks and global windows, of few queries: many short lists."""
_FEW_QUERIES = 16384  # up to so many; the wide tile is 7% slower with 8K and 2% faster with 32K, as measured likewise
_KEYS = {
    64: (Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(32, 64, 4, 2)),
    128: (Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(32, 64, 4, 1)),
    256: (Config(64, 64, 8, 2), Config(64, 64, 8, 1), Config(32, 64, 8, 1), Config(32, 32, 4, 1)),
}
_QUERIES = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
    256: (Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
}
# Decoding streams keys and values past few rows: what counts is how many bytes are under way, on a multiprocessor that
# holds two programs. An H200 then reads long caches at 0.95 of the rate of SDPA without a mask (benchmarks/decode.py).
_DECODE = {
    64: (Config(64, 64, 4, 4), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(32, 64, 4, 3), Config(32, 64, 4, 2), Config(32, 32, 4, 2)),
    256: (Config(32, 32, 4, 3), Config(32, 32, 4, 2), Config(16, 32, 4, 1)),
}
# float32 is for exactness, not for speed: three products for one and wide accumulators leave room for small tiles only.
_FLOAT32 = {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)}
_INTERPRETED = Config(64, 64, 1, 1)


def forward_config(x: Tensor, block_d: int, block_v: int, n: int, causal: bool) -> Config:
    """Tiles of the forward for queries x: q stays, stages of k and v stream. Few queries (decoding) take fewer rows.

    Args:
        x: the queries [B, Hq, Sq, D]; the device, the dtype and Sq count.
        block_d: tile width that holds D.
        block_v: tile width that holds Dv.
        n: columns of the mask's last axis, whose vectors stream with the keys, one stage behind.
        causal: whether the mask is.
    """
    config = _pick(
        _FORWARD_BLOCKS if causal and n == 2 and x.shape[2] <= _FEW_QUERIES else _FORWARD,
        x,
        block_d,
        block_v,
        lambda c: c.rows * block_d + (c.stages - 1) * c.columns * 2 * n,
        lambda c: c.columns * (block_d + block_v),
    )
    return config._replace(rows=min(config.rows, max(16, triton.next_power_of_2(x.shape[2]))))


def decode_config(x: Tensor, packed: int, block_d: int, block_v: int, vectors: int) -> Config:
    """Tiles of decoding: the rows stay, all but one stage of k and v stream, each with the mask's columns.

    Args:
        x: the queries; the device and the dtype count.
        packed: rows of all heads that share a key-value head.
        block_d: tile width that holds D.
        block_v: tile width that holds Dv.
        vectors: int32 values per key and row of the mask if each head has its own, else 0.
    """
    rows = min(16 if vectors else 64, max(16, 1 << (packed - 1).bit_length()))

    def resident(c: Config) -> int:
        taken = min(rows, c.rows)
        return 2 * (taken * block_d + (c.stages - 1) * c.columns * (block_d + block_v + 2 * taken * vectors))

    config = _pick(_DECODE, x, block_d, block_v, resident, lambda c: 0)
    return config._replace(rows=min(config.rows, rows))


def decode_splits(x: Tensor, programs: int, blocks: int) -> int:
    """How many parts the keys are cut into, so that `programs` times as many fill the GPU, from shapes alone.

    Args:
        x: the queries; the device counts.
        programs: how many programs there are without splitting.
        blocks: blocks of keys; a part has at least two.
    """
    slots = 8 if _on_cpu(x) else 2 * multiprocessors(x.device)
    return max(1, min(slots // programs, (blocks + 1) // 2))


def keys_config(x: Tensor, block_d: int, block_v: int) -> Config:
    """Tiles of dK and dV: k and v stay, stages of q, dout and row statistics stream. Arguments as for the forward."""
    both = block_d + block_v
    config = _pick(_KEYS, x, block_d, block_v, lambda c: c.columns * both, lambda c: c.rows * (both + 4))
    return config._replace(rows=config.columns, columns=config.rows) if x.dtype == torch.float32 else config


def queries_config(x: Tensor, block_d: int, block_v: int, n: int) -> Config:
    """Tiles of dQ: q and dout stay, stages of k and v stream. Arguments as for the forward."""
    both = block_d + block_v
    return _pick(_QUERIES, x, block_d, block_v, lambda c: c.rows * both, lambda c: c.columns * (both + 2 * n))


def _pick(
    table: dict[int, tuple[Config, ...]],
    x: Tensor,
    block_d: int,
    block_v: int,
    resident: Callable[[Config], int],
    streamed: Callable[[Config], int],
) -> Config:
    """The first configuration of which the resident and streamed elements, of two bytes, fit the shared memory."""
    width = min(256, max(64, block_d, block_v))
    if _on_cpu(x):
        return _INTERPRETED
    if x.dtype == torch.float32:
        return _FLOAT32[width]
    limit = _shared_memory(x.device)
    for config in table[width]:
        if 2 * (resident(config) + config.stages * streamed(config)) <= limit:
            return config
    return table[width][-1]


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many there are on a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a configuration may fill."""
    properties = torch.cuda.get_device_properties(device)
    total = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return usable_shared_memory(total, 0 if torch.version.hip else properties.major)


def usable_shared_memory(total: int, major: int) -> int:
    """What the compiler leaves of `total` bytes: it takes some for barriers and reductions.

    On Blackwell (compute capability 10 and up) accumulators, too, pass through it, from and to tensor memory.
    """
    return total - 256 - (64 * 1024 if major >= 10 else 0)
