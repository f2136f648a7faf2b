"""Who computes attention's forward: a checkpointed layer's recomputation may have its results already."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

__all__ = ["Keeper", "Results", "current_keeper"]

Results: TypeAlias = tuple[Tensor, Tensor]
"""Output and log-sum-exp of a call."""

Keeper: TypeAlias = Callable[[Tensor, Callable[[], Results]], Results]
"""Function of a call's queries and of the function that computes the call; it returns the call's results."""

current_keeper: contextvars.ContextVar[Keeper | None] = contextvars.ContextVar("current_keeper", default=None)
"""The keeper of the checkpointed layer that runs or is recomputed, or None (`long_rows.checkpointing` sets it)."""
