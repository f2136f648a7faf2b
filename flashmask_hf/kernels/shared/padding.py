"""Mask indices padded to whole key tiles, so that kernels load them without bounds checks.

Masked loads are not vectorized, and the indices stream with the keys. Padding keys are hidden from all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.tile_plan import COLUMNS

_NEVER = tl.constexpr(2147483647)


@triton.jit
def padded_indices_of(indices, mask, kv_len, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Return the pointer to mask head `mask` (int64) of indices padded to tiles of COLUMNS keys."""
    return indices + mask * tl.cdiv(kv_len, COLUMNS) * (COLUMNS * N)


@triton.jit(do_not_specialize=["kv_len", "n_parts"])
def _pad_indices(indices, padded, kv_len, n_parts, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the indices [kv_len, N] of a mask head to COLUMNS of its `n_parts * COLUMNS` padded keys."""
    mask = (tl.program_id(0) // n_parts).to(tl.int64)
    offsets = tl.program_id(0) % n_parts * (COLUMNS * N) + tl.arange(0, COLUMNS * N)  # [COLUMNS * N]
    # Bound 1 is an end in every form that has it; the other bounds are 0. So rows from 0 on are hidden.
    hidden = tl.where(offsets % N == 1, _NEVER, 0)
    inside = offsets < kv_len * N
    value = tl.load(indices + mask * kv_len * N + offsets, mask=inside, other=0)
    tl.store(padded + mask * n_parts * (COLUMNS * N) + offsets, tl.where(inside, value, hidden))


def prepare_padding(mask_shape: torch.Size, device: torch.device, width: int) -> Callable[[Tensor], Tensor]:
    """Return a function that pads indices of `mask_shape` with hidden keys to a multiple of `width`, contiguous."""
    batch, heads, kv_len, n = mask_shape
    if kv_len % width == 0:
        return Tensor.contiguous
    padded_len, part = -(-kv_len // width) * width, gcd(width, COLUMNS)
    new_padded = packed_layout(batch, heads, padded_len, n, dtype=torch.int32, device=device).allocator()
    n_parts = padded_len // part
    launch = Launch(_pad_indices, n_parts * batch * heads, kv_len, n_parts, N=n, COLUMNS=part, num_warps=1)

    def pad(indices: Tensor) -> Tensor:
        padded = new_padded()
        launch(indices.contiguous(), padded)
        return padded

    return pad
