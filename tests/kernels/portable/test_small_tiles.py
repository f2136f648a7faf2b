"""The portable dK kernel walks four partial segments, and skips hidden row tiles at their ends."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from tools.support import Lane, attention_inputs, check, lanes

from flashmask_hf import FlashMask
from flashmask_hf.kernels.portable.backward import _hidden_row_tiles, _trimmed_range
from flashmask_hf.kernels.shared.device import load_intervals
from flashmask_hf.kernels.shared.padding import prepare_padding
from flashmask_hf.tile_plan import VISIBLE_SEGMENTS, build_plan

ROWS, SUBROWS, BLOCK_M, BLOCK_N = 64, 4, 16, 16


@triton.jit
def _ranges(
    segment, indices, out, q_len, kv_len,
    CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    columns = (column + tl.arange(0, BLOCK_N))[:, None]
    intervals = load_intervals(indices, columns, None, CAUSAL, N)
    low, gap_first, gap_last = _hidden_row_tiles(intervals, column, (q_len, kv_len), CAUSAL, N, BLOCK_M)
    first, last = _trimmed_range(segment, low, gap_first, gap_last, SUBROWS)
    tl.store(out + tl.program_id(0) * 2, first)
    tl.store(out + tl.program_id(0) * 2 + 1, last)


def _indices(kv_len: int, q_len: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Bounds [kv_len, n] that are alike for some keys, then differ by a few rows, then by any number."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    common = integers(0, q_len + 1, 1, n).sort(-1).values.expand(kv_len, n)
    near = common + integers(-3, 4, kv_len, n)
    key = torch.arange(kv_len)[:, None]
    bounds = torch.where(key < kv_len // 3, common, torch.where(key < 5 * kv_len // 6, near, integers(0, q_len, 1, n)))
    return bounds.clamp(0, q_len).to(torch.int32)


SHARES = [(True, 1, 0.95), (True, 2, 0.75), (False, 2, 0.95), (False, 4, 0.3)]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("causal", "n", "share"), SHARES)
def test_only_hidden_row_tiles_are_skipped(causal: bool, n: int, share: float, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    hidden = skipped = 0
    for q_len, kv_len in ((250, 200), (130, 200), (200, 130)) * 4:
        mask = FlashMask(_indices(kv_len, q_len, n, generator)[None, None], causal, q_len=q_len)
        dense = mask.to_dense()[0, 0]
        tiles = -(-kv_len // BLOCK_N)
        row_tiles = -(-q_len // ROWS)
        for plan_tile in range(row_tiles):
            segment = torch.tensor([plan_tile, plan_tile + 1], dtype=torch.int32)
            out = torch.empty(tiles, 2, dtype=torch.int32, device=device)
            indices = mask.indices.to(device)
            padded = prepare_padding(indices.shape, indices.device, BLOCK_N)(indices)
            _ranges[(tiles,)](
                segment.to(device), padded, out, q_len, kv_len,
                CAUSAL=causal, N=n, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, SUBROWS=SUBROWS,
            )  # fmt: skip
            whole = range(plan_tile * SUBROWS, (plan_tile + 1) * SUBROWS)
            for tile, (first, last) in enumerate(out.tolist()):
                assert first == last or (first >= whole.start and last <= whole.stop)
                keys = dense[:, tile * BLOCK_N : (tile + 1) * BLOCK_N]
                for row in whole:
                    if keys[row * BLOCK_M : (row + 1) * BLOCK_M].any():
                        assert first <= row < last, (tile, row)
                    else:
                        hidden += 1
                        skipped += not first <= row < last
    assert skipped > share * hidden


@pytest.mark.parametrize("lane", lanes((), (torch.float32,), (torch.bfloat16,)))
def test_a_key_tile_with_four_partial_segments(lane: Lane) -> None:
    mask = FlashMask(torch.tensor([100, 300, 520, 900], dtype=torch.int32).expand(1, 1, 128, 4), False, q_len=1024)
    segments = build_plan(mask.indices, mask.causal, 1024).segments[0, 0, 0, VISIBLE_SEGMENTS:]
    assert segments.tolist() == [[0, 1], [2, 3], [4, 5], [7, 8]]
    check(lane, *attention_inputs(lane, 1, 1, 1, 1024, 128, 16), mask.to(lane.device))
