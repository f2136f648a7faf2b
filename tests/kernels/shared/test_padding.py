"""Mask indices padded to whole tiles of keys."""

from __future__ import annotations

import pytest
import torch
from tools.support import poisoned

pytest.importorskip("triton")

from flashmask_hf import FlashMask
from flashmask_hf.kernels.shared.padding import prepare_padding


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("kv_len", "columns"), [(200, 128), (130, 256), (512, 256), (1, 128)])
def test_padding(kv_len: int, columns: int, n: int, device: str) -> None:
    """Padding keys are hidden in every form, and the others keep their bounds, whatever their strides."""
    for causal in (True, False) if n == 2 else (n == 1,):
        indices = torch.randint(0, 9, (2, n, 3, kv_len), generator=torch.Generator().manual_seed(0)).int()
        indices = indices.to(device).permute(0, 2, 3, 1)
        with poisoned():
            padded = prepare_padding(indices.shape, indices.device, columns)(indices)
        assert padded.shape == (2, 3, -(-kv_len // columns) * columns, n)
        assert padded.is_contiguous()
        assert torch.equal(padded[:, :, :kv_len], indices)
        if kv_len % columns:
            added = FlashMask(padded[:, :, kv_len:].cpu().clamp(max=9), causal, q_len=9).intervals()
            for row in range(9):
                hidden = torch.stack([(start <= row) & (row < end) for start, end in added])
                assert hidden.any(0).all()
