"""The portable dK kernel leaves out small tiles of the plan's partial ones: none that sees a key, and most others."""

from __future__ import annotations

import pytest
import torch
from support import poisoned

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashmask_hf import FlashMask
from flashmask_hf.kernels.backward import _dark_rows, _trimmed_range
from flashmask_hf.kernels.tiles import load_intervals, whole_tiles

ROWS, SUBROWS, BLOCK_M, BLOCK_N = 64, 4, 16, 16


@triton.jit
def _ranges(
    segment, indices, out, q_len, kv_len,
    CAUSAL: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    columns = (column + tl.arange(0, BLOCK_N))[:, None]
    start, end, _, other_end = load_intervals(indices, columns, None, CAUSAL, N)
    low, gap_first, gap_last = _dark_rows(start, end, other_end, column, kv_len - q_len, CAUSAL, N, BLOCK_M)
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
def test_only_hidden_ones(causal: bool, n: int, share: float, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    hidden = left_out = 0
    for q_len, kv_len in ((250, 200), (130, 200), (200, 130)) * 4:
        mask = FlashMask(_indices(kv_len, q_len, n, generator)[None, None], causal, q_len=q_len)
        dense = mask.to_dense()[0, 0]
        tiles = -(-kv_len // BLOCK_N)
        row_tiles = -(-q_len // ROWS)
        for plan_tile in range(row_tiles):
            segment = torch.tensor([plan_tile, plan_tile + 1], dtype=torch.int32)
            out = torch.empty(tiles, 2, dtype=torch.int32, device=device)
            indices = mask.indices.to(device)
            _ranges[(tiles,)](
                segment.to(device), whole_tiles(indices.shape, indices.device, BLOCK_N)(indices), out, q_len, kv_len,
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
                        left_out += not first <= row < last
    assert left_out > share * hidden


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("kv_len", "columns"), [(200, 128), (130, 256), (512, 256), (1, 128)])
def test_whole_tiles(kv_len: int, columns: int, n: int, device: str) -> None:
    """The keys that are added are hidden in every form, and the others as they were, whatever their strides."""
    for causal in (True, False) if n == 2 else (n == 1,):
        indices = torch.randint(0, 9, (2, n, 3, kv_len), generator=torch.Generator().manual_seed(0)).int()
        indices = indices.to(device).permute(0, 2, 3, 1)
        with poisoned():
            whole = whole_tiles(indices.shape, indices.device, columns)(indices)
        assert whole.shape == (2, 3, -(-kv_len // columns) * columns, n)
        assert whole.is_contiguous()
        assert torch.equal(whole[:, :, :kv_len], indices)
        if kv_len % columns:
            added = FlashMask(whole[:, :, kv_len:].cpu().clamp(max=9), causal, q_len=9).intervals()
            for row in range(9):
                hidden = torch.stack([(start <= row) & (row < end) for start, end in added])
                assert hidden.any(0).all()
