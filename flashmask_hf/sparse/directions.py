"""The operator `flashmask_hf::lsh_directions`: random directions of locality-sensitive hashing, one set per head.

It is an operator because compilers trace no generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf._call.library import operator

_drawn: dict[tuple[Any, ...], Tensor] = {}
"""Directions on the CPU, pinned for GPUs. They are never dropped, because CUDA graphs copy from their memory."""


@operator(lambda x, seed, layer, count: x.new_empty(x.shape[1], x.shape[3], count))
def lsh_directions(x: Tensor, seed: int, layer: int, count: int) -> Tensor:
    """Return random directions [H, D, count] for vectors x [B, H, S, D], with the dtype and device of x.

    Their length is 1. They depend only on shape and arguments, so all ranks agree.

    Args:
        x: what is hashed; only its shape, dtype and device are read.
        seed: 0..2**32 - 1.
        layer: index of the layer.
        count: number of directions per head.
    """
    shape = (x.shape[1], x.shape[3], count)
    key = (seed, layer, shape, x.dtype, x.is_cuda)
    if key not in _drawn:
        generator = torch.Generator("cpu").manual_seed((seed + layer * 0x9E3779B1) % 2**32)  # only 32 bits are used
        directions = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        directions = nn.functional.normalize(directions, dim=1).to(x.dtype)
        _drawn[key] = directions.pin_memory() if x.is_cuda else directions
    # A copy: a compiler may overwrite the result.
    return _drawn[key].to(x.device, non_blocking=True, copy=True)
