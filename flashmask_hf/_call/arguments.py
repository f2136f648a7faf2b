"""The arguments of attention, and their checks on the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmask_hf._numbers import check_bool, check_device, check_tensor
from flashmask_hf.dropout import BLOCK
from flashmask_hf.mask import FlashMask, check_fit, check_pair
from flashmask_hf.torch_internals import is_one_of

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max * math.log(2) / 2
"""Bounds of a factor that kernels hold in float32, as it is and doubled in units of log2."""


class Arguments(NamedTuple):
    """The arguments of `flashmask_attention` besides tensors and mask.

    A new option needs a field with a default that changes nothing.
    """

    scale: float | None = None
    softcap: float | None = None
    impl: str | None = None
    deterministic: bool = False
    dropout: float = 0.0


class Inputs(NamedTuple):
    """The tensors that an operator of attention attends with."""

    q: Tensor
    """[B, Hq, Sq, D]"""
    k: Tensor
    """[B, Hkv, Skv, D]"""
    v: Tensor
    """[B, Hkv, Skv, Dv]"""
    sinks: Tensor | None
    """[Hq]"""
    indices: Tensor
    """Of the mask, int32 [B or 1, Hm, Skv, n]."""


def check_arguments(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, sinks: Tensor | None, given: Arguments) -> None:
    """Check the arguments of `flashmask_attention`, but no values of tensors."""
    check_tensors(q, k, v)
    check_pair("q", q, "k", k)
    heads, head_dim = q.shape[1], q.shape[3]
    if k.shape[3] != head_dim:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {k.shape[3]}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must have k's batch, heads and length {list(k.shape[:3])}, got {list(v.shape[:3])}")
    if sinks is not None:
        _check_dense("sinks", sinks)
        check_tensor("sinks", sinks, "a floating-point", "[Hq]")
        if len(sinks) != heads:
            raise ValueError(f"sinks must have shape [Hq] = [{heads}], got {list(sinks.shape)}")
    for name, x in (("v", v), ("sinks", sinks)):
        if x is not None:
            check_device(name, x, "q", q)
    check_fit(mask, q, k)
    _check_dense("mask.indices", mask.indices)
    _check_options(given, head_dim)


def _check_options(given: Arguments, head_dim: int) -> None:
    check_bool("deterministic", given.deterministic)
    if not isinstance(given.dropout, (int, float)) or isinstance(given.dropout, bool):
        raise TypeError(f"dropout must be a number, got {type(given.dropout).__name__}; pass a float")
    if not 0 <= given.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {given.dropout}; it is the probability of dropping a weight")
    for name, value, none in (("scale", given.scale, "D ** -0.5"), ("softcap", given.softcap, "no cap")):
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, or None for {none}, got {type(value).__name__}; pass a float")
        if not _LEAST <= value <= _MOST:
            raise ValueError(
                f"{name} must be positive and finite, or None for {none}, and {_LEAST:.1e} to {_MOST:.1e} for float32, "
                f"got {value}"
            )
    if given.softcap is not None:
        factor = head_dim**-0.5 if given.scale is None else given.scale
        if not _LEAST <= factor / given.softcap <= _MOST:
            raise ValueError(
                f"softcap={given.softcap} is too far from scale={factor}: scale / softcap must be {_LEAST:.1e} to "
                f"{_MOST:.1e} for float32; pass None for no cap"
            )


def check_seed(seed: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless dropout's seed fits queries [B, Hq, Sq, D]."""
    check_tensor("dropout_seed", seed, "an int64", "[1]")
    shard = 2 + -(-q.shape[2] // BLOCK)
    if not is_one_of(seed.shape[0], 1, shard):
        raise ValueError(f"dropout_seed must have shape [1], or [{shard}] from shard_seed, got {list(seed.shape)}")
    check_device("dropout_seed", seed, "q", q)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k and v are dense floating-point tensors of 4 axes, none empty."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dense(name, x)
        check_tensor(name, x, "a floating-point", "[B, H, S, D]")


def _check_dense(name: str, x: Any) -> None:
    """Raise TypeError for a nested, sparse or distributed tensor."""
    if getattr(x, "is_nested", False):
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one; pack its sequences into one row, and build its mask "
            "with masks.from_cu_seqlens"
        )
    if getattr(x, "layout", torch.strided) is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}; pass {name}.to_dense()")
    if hasattr(x, "to_local"):
        raise TypeError(
            f"{name} must be a local tensor, got a {type(x).__name__}; pass {name}.to_local(), or call the attention "
            "inside torch.distributed.tensor.experimental.local_map"
        )
