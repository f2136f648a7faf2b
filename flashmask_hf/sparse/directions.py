"""The operator `flashmask_hf::lsh_directions`: random directions of locality-sensitive hashing, one set per head.

It is an operator because a compiler would do the integer arithmetic of `_standard_normal` in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashmask_hf import torch_internals
from flashmask_hf._call.library import as_operator

__all__ = ["lsh_directions"]

_UINT32 = 2**32 - 1


def _lsh_directions(x: Tensor, seed: int, layer: int, count: int) -> Tensor:
    """Return random directions [H, D, count] for vectors x [B, H, S, D], in their dtype and on their device.

    All have length 1, or the longer ones would draw more vectors. They are hashes of their indices instead of draws of
    a generator. So a device need not wait for another, a CUDA graph can compute them, and they are the same everywhere
    up to the rounding of a logarithm and a cosine in float64.

    Args:
        x: the vectors, of which only shape, dtype and device are read.
        seed: 0..2**32 - 1.
        layer: index of the layer.
        count: number of directions.
    """
    shape = (x.shape[1], x.shape[3], count)
    keys = [key & _UINT32 for key in (seed * 0x85EBCA77 + layer * 0xC2B2AE3D, seed * 0x27D4EB2F + layer, layer)]
    if torch_internals.runs_kernels(x.device):
        from flashmask_hf.sparse.kernels.hash import fill_directions  # here, for it needs Triton

        return fill_directions(x.new_empty(shape), keys)
    directions = _standard_normal(math.prod(shape), keys, x.device).view(shape)
    return nn.functional.normalize(directions, dim=1).to(x.dtype)


def _standard_normal(count: int, keys: Sequence[int], device: torch.device) -> Tensor:
    """Return standard normal numbers, float64 [count], from hashes of their indices by the Box-Muller transform."""
    x = torch.arange(2 * count, device=device)
    for key, factor in zip(keys, (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39), strict=True):
        x = (x + key) & _UINT32
        x = (x ^ (x >> 16)) * factor & _UINT32  # the factors are below 2**31, so that the product fits int64
    angle, radius = (((x ^ (x >> 15)).double() + 0.5) / 2**32).chunk(2)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


lsh_directions = as_operator("lsh_directions", _lsh_directions)


@torch.library.register_fake("flashmask_hf::lsh_directions")
def _(x: Tensor, seed: int, layer: int, count: int) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[3], count)
