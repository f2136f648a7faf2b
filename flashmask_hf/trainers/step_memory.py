"""Memory of a training step by the tokens of its row, and the longest row that fits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of a container's memory in bytes, or "max" (cgroup v2); psutil does not know it."""

GPU_SHARE = 0.95  # the rest is lost to fragmentation
HOST_SHARE = 0.85  # the rest is for data loading, saving and other programs


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step, linear in the tokens of its row.

    Attributes:
        fixed: bytes on the GPU for any row: weights, gradients, optimizer states.
        working: bytes on the GPU per token while all checkpoints are on the host.
        stored: bytes of checkpoints per token.
    """

    fixed: float
    working: float
    stored: float

    @classmethod
    def from_two_steps(cls, tokens: tuple[int, int], peaks: tuple[float, float], stored: float) -> StepMemory:
        """Fit the tokens and GPU peak bytes of two steps with checkpoints on the host.

        `stored` are the longer step's bytes of checkpoints.
        """
        working = max(0.0, (peaks[1] - peaks[0]) / (tokens[1] - tokens[0]))
        return cls(peaks[1] - working * tokens[1], working, stored / tokens[1])

    def longest(self, gpu: float, host: float) -> int:
        """Return the tokens of the longest row that fits, 0 if none does."""
        alone = (gpu - self.fixed) / self.working if self.working else math.inf
        together = (gpu + host - self.fixed) / (self.working + self.stored)
        return max(0, int(min(alone, together)))


def available_gpu_bytes() -> float:
    """Return the bytes that tensors may take on this rank's GPU."""
    free, _ = torch.cuda.mem_get_info()
    return GPU_SHARE * (free + torch.cuda.memory_reserved())


def available_host_bytes() -> float:
    """Return the bytes that this rank may pin: its share of free memory, or of a container's limit."""
    free = psutil.virtual_memory().available
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    if limit != "max":
        free = min(free, int(limit) - psutil.Process().memory_info().rss)
    return HOST_SHARE * max(0, free) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def gib(count: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"
