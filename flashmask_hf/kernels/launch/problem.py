"""The problem of an attention call: layouts, form of the mask, factors of the scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf.dropout import threshold_of
from flashmask_hf.kernels.launch.tensor_layout import Layout, layout_of
from flashmask_hf.tile_plan import plan_shapes

_LOG2_E = 1.4426950408889634


class Problem(NamedTuple):
    """Layouts, form of the mask and settings that kernels are prepared for."""

    q: Layout
    """[B, Hq, Sq, D]"""
    k: Layout
    """[B, Hkv, Skv, D]"""
    v: Layout
    """[B, Hkv, Skv, Dv]"""
    mask_shape: torch.Size
    """Shape of the mask indices, [B or 1, Hm, Skv, n]."""
    causal: bool
    """As in `FlashMask`."""
    sinks: bool
    """Whether there is a sink for each head."""
    arguments: Arguments
    """The options of the call."""
    shard: bool = False
    """Whether dropout's seed is of a shard."""

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale = self.arguments.scale
        return self.q.shape[3] ** -0.5 if scale is None else float(scale)

    @property
    def softcap(self) -> float:
        """C of c * tanh(scores / c); 0 is none."""
        return float(self.arguments.softcap or 0.0)

    @property
    def dropout(self) -> tuple[int, float] | None:
        """Least word that keeps a pair, and 1 - p; or None."""
        p = self.arguments.dropout
        return (threshold_of(p), 1.0 - p) if p else None

    @property
    def plan_shape(self) -> tuple[int, int, int, int]:
        """Shape of the plan's `tiles`: [mask batch, mask heads, row tiles, key tiles]."""
        batch, heads, n_q, n_kv = plan_shapes(self.mask_shape, self.q.shape[2])[0]
        return batch, heads, n_q, n_kv

    @property
    def factors(self) -> tuple[float, float]:
        """Factors (factor, cap_factor) from scores q @ k^T to logits in units of log2.

        The logits are factor * scores or, with a softcap, factor * tanh(scores * cap_factor).
        """
        if self.softcap:
            return self.softcap * _LOG2_E, self.scale / self.softcap
        return self.scale * _LOG2_E, 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of every attention kernel: CAUSAL, N (bounds per key), CAP (softcap)."""
        return {"CAUSAL": self.causal, "N": self.mask_shape[-1], "CAP": self.softcap != 0}


def problem_of(inputs: Inputs, causal: bool, arguments: Arguments, shard: bool = False) -> Problem:
    """Read the problem from the tensors and arguments of a call."""
    q, k, v, sinks, indices = inputs
    return Problem(layout_of(q), layout_of(k), layout_of(v), indices.shape, causal, sinks is not None, arguments, shard)
