"""Tile sizes of the portable kernels, from measured tables: nothing is tuned at run time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton

from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.shared.device import block_of


class Config(NamedTuple):
    """Query rows and keys of a tile (powers of two that divide the plan's tiles), warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# By width of the widest head-dim tile, best first as measured on an H200 (bfloat16, 8K queries).
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
# Decoding is bound by the bytes in flight on a multiprocessor with two programs.
_DECODE = {
    64: (Config(64, 64, 4, 4), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(32, 64, 4, 3), Config(32, 64, 4, 2), Config(32, 32, 4, 2)),
    256: (Config(32, 32, 4, 3), Config(32, 32, 4, 2), Config(16, 32, 4, 1)),
}
# float32 is for exactness: three products for one and wide operands leave room for small tiles only.
_FLOAT32 = {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)}
_INTERPRETED = Config(64, 64, 1, 1)


def forward_config(problem: Problem) -> Config:
    """Return the tiles of the forward. Shared memory holds q, and stages of k, v and, one stage less, the bounds."""
    block_d, block_v = _blocks(problem)
    q_len, n = problem.q.shape[2], problem.mask_shape[-1]
    config = _pick(
        _with_few_rows(_FORWARD, problem),
        problem,
        lambda c: c.rows * block_d + (c.stages - 1) * c.columns * 2 * n,
        lambda c: c.columns * (block_d + block_v),
    )
    return config._replace(rows=min(config.rows, max(16, triton.next_power_of_2(q_len))))


def keys_config(problem: Problem) -> Config:
    """Return the tiles of the dK and dV kernel. Shared memory holds k, v, and stages of q, dout and row statistics."""
    both = sum(_blocks(problem))
    config = _pick(_KEYS, problem, lambda c: c.columns * both, lambda c: c.rows * (both + 4))
    if problem.q.dtype == torch.float32:
        return config._replace(rows=config.columns, columns=config.rows)
    return config


def queries_config(problem: Problem) -> Config:
    """Return the tiles of the dQ kernel. Shared memory holds q, dout, and stages of k, v and the bounds."""
    both, n = sum(_blocks(problem)), problem.mask_shape[-1]
    table = _with_few_rows(_QUERIES, problem)
    return _pick(table, problem, lambda c: c.rows * both, lambda c: c.columns * (both + 2 * n))


def decode_config(problem: Problem) -> Config:
    """Return the tiles of decoding. Shared memory holds the rows, and all but one stage of k, v and the bounds.

    If heads that share a key-value head have masks of their own, every row's bounds take registers: 16 rows.
    """
    block_d, block_v = _blocks(problem)
    heads, q_len = problem.q.shape[1:3]
    kv_heads = problem.k.shape[1]
    _, mask_heads, _, n = problem.mask_shape
    bounds = n if mask_heads > kv_heads else 0
    packed = heads // kv_heads * q_len
    rows = min(16 if bounds else 64, max(16, triton.next_power_of_2(packed)))

    def resident(c: Config) -> int:
        taken = min(rows, c.rows)
        return 2 * (taken * block_d + (c.stages - 1) * c.columns * (block_d + block_v + 2 * taken * bounds))

    config = _pick(_DECODE, problem, resident, lambda c: 0)
    return config._replace(rows=min(config.rows, rows))


def decode_splits(device: torch.device, programs: int, blocks: int) -> int:
    """Return the number of splits of the keys, of at least two of `blocks`, that fills the GPU.

    `programs` is their number without splitting.
    """
    return max(1, min(2 * multiprocessors(device) // programs, (blocks + 1) // 2))


def _with_few_rows(table: dict[int, tuple[Config, ...]], problem: Problem) -> dict[int, tuple[Config, ...]]:
    """Put tiles of 64 rows first if tiles of 128 rows fill at most half of the GPU.

    Key tiles stay the same, and so do a row's sums. Tiles of the widest heads stay, too.
    """
    batch, heads, q_len, _ = problem.q.shape
    if 2 * batch * heads * -(-q_len // 128) > multiprocessors(problem.q.device):
        return table
    few = {width: (configs[0]._replace(rows=64, warps=4), *configs) for width, configs in table.items() if width < 256}
    return table | few


def _blocks(problem: Problem) -> tuple[int, int]:
    return block_of(problem.q.shape[3]), block_of(problem.v.shape[3])


def _pick(
    table: dict[int, tuple[Config, ...]],
    problem: Problem,
    resident: Callable[[Config], int],
    streamed: Callable[[Config], int],
) -> Config:
    """Return the first configuration whose resident and streamed 16-bit elements fit the shared memory."""
    device = problem.q.device
    width = max(64, *_blocks(problem))
    if _on_cpu(device):
        return _INTERPRETED
    if problem.q.dtype == torch.float32:
        return _FLOAT32[width]
    limit = _shared_memory(device)
    for config in table[width]:
        if 2 * (resident(config) + config.stages * streamed(config)) <= limit:
            return config
    return table[width][-1]


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 for a CPU, where kernels are interpreted."""
    if _on_cpu(device):
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    total = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return usable_shared_memory(total, 0 if torch.version.hip else properties.major)


def usable_shared_memory(total: int, major: int) -> int:
    """Return the bytes of `total` shared memory per program that the compiler leaves after barriers and reductions.

    On Blackwell (compute capability `major` 10 and up; 0 on AMD GPUs), accumulators pass through it, too.
    """
    return total - 256 - (64 * 1024 if major >= 10 else 0)
