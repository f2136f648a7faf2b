"""Tiles of the portable kernels: what they follow from, on GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flashmask_hf._call.arguments import Arguments
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.shared import configs
from flashmask_hf.kernels.shared.configs import Config

KILOBYTE = 1024
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose tiles for a Hopper GPU with 132 multiprocessors."""
    monkeypatch.setattr(configs, "_on_cpu", lambda device: False)
    monkeypatch.setattr(configs, "_shared_memory", lambda device: 227 * KILOBYTE)
    monkeypatch.setattr(configs, "multiprocessors", lambda device: 132)


def _problem(
    q_len: int,
    dims: tuple[int, int],
    mask_heads: int = 1,
    n: int = 1,
    batch: int = 2,
    heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Return the problem of `heads` query heads and 2 key-value heads with 8,192 keys."""
    q, k, v = (
        packed_layout(batch, count, length, dim, dtype=dtype, device=CPU)
        for count, length, dim in ((heads, q_len, dims[0]), (2, 8192, dims[0]), (2, 8192, dims[1]))
    )
    return Problem(q, k, v, torch.Size((1, mask_heads, 8192, n)), False, sinks=False, arguments=Arguments(scale=1.0))


FILLED: dict[str, tuple[Callable[[Problem], Config], Problem, int, Config]] = {
    # q, three stages of k and v, and two of the mask's bounds
    "forward": (
        configs.forward_config,
        _problem(8192, (128, 64), n=2),
        2 * 128 * 128 + 3 * 2 * 128 * (128 + 64) + 2 * 128 * 2 * 4,
        Config(64, 32, 4, 2),
    ),
    # k and v, and two stages of q, dout, LSE and delta
    "keys": (
        configs.keys_config,
        _problem(8192, (128, 64), n=2),
        2 * 64 * (128 + 64) + 2 * 64 * (2 * (128 + 64) + 4 + 4),
        Config(32, 64, 4, 1),
    ),
    # q and dout, and three stages of k, v and the mask's bounds
    "queries": (
        configs.queries_config,
        _problem(8192, (64, 128), n=4),
        2 * 128 * (64 + 128) + 3 * 64 * (2 * (64 + 128) + 4 * 4),
        Config(64, 32, 4, 1),
    ),
    # in half of the memory: 16 rows, and two stages of k and v
    "decode": (
        configs.decode_config,
        _problem(3, (128, 64), n=4),
        2 * (2 * 16 * 128 + 2 * 2 * 64 * (128 + 64)),
        Config(16, 32, 4, 2),
    ),
    # the same and the bounds of each of the 16 rows
    "decode, a mask per head": (
        configs.decode_config,
        _problem(3, (128, 64), mask_heads=8, n=4),
        2 * (2 * 16 * 128 + 2 * 64 * (2 * (128 + 64) + 16 * 4 * 4)),
        Config(16, 32, 4, 2),
    ),
}
"""Function, problem, bytes of shared memory that the operands of its first choice take, and its last choice."""


@pytest.mark.parametrize("kernel", FILLED)
def test_tiles_fit_the_shared_memory(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """The first choice is taken if it fits to the byte, and the last one if none does."""
    choose, problem, size, last = FILLED[kernel]
    first = choose(problem)
    monkeypatch.setattr(configs, "_shared_memory", lambda device: size)
    assert choose(problem) == first
    monkeypatch.setattr(configs, "_shared_memory", lambda device: size - 1)
    assert choose(problem) != first
    monkeypatch.setattr(configs, "_shared_memory", lambda device: 0)
    assert choose(problem) == last


@pytest.mark.parametrize(("q_len", "rows"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 64)])
def test_few_queries_take_tiles_of_few_rows(q_len: int, rows: int) -> None:
    """Products take 16 rows at least."""
    assert configs.forward_config(_problem(q_len, (64, 64))).rows == rows


@pytest.mark.parametrize(
    ("q_len", "mask_heads", "rows"), [(1, 1, 16), (4, 1, 16), (5, 1, 32), (5, 2, 32), (5, 8, 16), (100, 1, 64)]
)
def test_rows_of_decoding(q_len: int, mask_heads: int, rows: int) -> None:
    """A tile holds those of the four query heads that share a key-value head; 16 if these have masks of their own."""
    assert configs.decode_config(_problem(q_len, (64, 64), mask_heads)).rows == rows


@pytest.mark.parametrize(
    ("programs", "blocks", "splits"),
    [(1, 1000, 264), (2, 1000, 132), (200, 1000, 1), (1000, 1000, 1), (1, 100, 50), (1, 99, 50), (1, 1, 1)],
)
def test_splits_of_decoding_fill_the_gpu_twice(programs: int, blocks: int, splits: int) -> None:
    """Each has two blocks of keys, or the last one has one."""
    assert configs.decode_splits(GPU, programs, blocks) == splits


def test_float32_takes_small_tiles() -> None:
    """Rows change places with columns where keys stay and queries stream."""
    problem = _problem(8192, (64, 64), dtype=torch.float32)
    assert configs.forward_config(problem)[:2] == configs.queries_config(problem)[:2] == (64, 32)
    assert configs.keys_config(problem)[:2] == (32, 64)
    assert configs.forward_config(_problem(8192, (64, 256), dtype=torch.float32))[:2] == (16, 16)


@pytest.mark.parametrize("dims", [(16, 16), (16, 64), (64, 16)], ids=str)
def test_narrow_heads_take_the_tiles_of_64_columns(dims: tuple[int, int]) -> None:
    for choose in (configs.forward_config, configs.keys_config, configs.queries_config):
        assert choose(_problem(8192, dims)) == choose(_problem(8192, (64, 64)))


def test_rows_of_all_batch_entries_occupy_multiprocessors() -> None:
    few, many = (configs.forward_config(_problem(1024, (128, 128), batch=batch)).rows for batch in (1, 2))
    assert (few, many) == (64, 128)


@pytest.mark.parametrize(
    ("given", "hip", "usable"),
    [
        ({"major": 9, "shared_memory_per_block_optin": 227 * KILOBYTE}, None, 227 * KILOBYTE - 256),
        ({"major": 10, "shared_memory_per_block_optin": 227 * KILOBYTE}, None, 163 * KILOBYTE - 256),
        ({"major": 12, "shared_memory_per_block_optin": 64 * KILOBYTE}, "7.0", 64 * KILOBYTE - 256),
        ({"major": 9}, "6.4", 64 * KILOBYTE - 256),  # an older torch for AMD GPUs does not tell
    ],
    ids=["hopper", "blackwell", "amd", "amd, untold"],
)
def test_shared_memory_of_a_device(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], hip: str | None, usable: int
) -> None:
    monkeypatch.undo()
    properties = SimpleNamespace(**given, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert configs._shared_memory.__wrapped__(GPU) == usable
    assert configs.multiprocessors.__wrapped__(GPU) == 7
