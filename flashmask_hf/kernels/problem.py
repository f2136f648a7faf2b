"""What launches of attention are prepared for: all that a call depends on, the memory of its tensors apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashmask_hf.kernels.descriptors import Layout, layout_of
from flashmask_hf.kernels.tiles import score_factors
from flashmask_hf.mask import FlashMask
from flashmask_hf.plan import Plan

__all__ = ["Problem", "problem_of"]


class Problem(NamedTuple):
    """Attention of some layouts under masks of some form."""

    q: Layout
    """[B, Hq, Sq, D]"""
    k: Layout
    """[B, Hkv, Skv, D]"""
    v: Layout
    """[B, Hkv, Skv, Dv]"""
    vectors: torch.Size
    """Shape of the mask's indices."""
    listed: torch.Size
    """Shape of the plan's tiles."""
    causal: bool
    """As in `FlashMask`."""
    scale: float
    """Factor on the scores."""
    softcap: float
    """0 is none."""

    @property
    def capped(self) -> bool:
        """Whether there is a softcap."""
        return self.softcap != 0

    @property
    def factors(self) -> tuple[float, float]:
        """As `score_factors` has them."""
        return score_factors(self.scale, self.softcap)


def problem_of(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, plan: Plan, scale: float, softcap: float) -> Problem:
    """That of a call."""
    return Problem(
        layout_of(q), layout_of(k), layout_of(v), mask.indices.shape, plan.tiles.shape, mask.causal, scale, softcap
    )
