"""Count of the attention calls that receive the caller's `startend_row_indices`.

A model may keep the vectors from some of its layers: recurrent and convolutional ones, or layers to which it does not
hand its keywords on. `packed_rows.py` compares the count of a forward with the model's number of layers.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["SuppliedCalls", "record_supplied_call"]


class SuppliedCalls:
    """Counter of attention calls with vectors, between `start` and `stop` or in a `with` block, in this thread.

    Calls of compiled code are not counted. Counters may be nested; each counts.
    """

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> SuppliedCalls:
        """Count from here on."""
        _active.set((*_active.get(), self))
        return self

    def stop(self) -> None:
        """Count no longer."""
        _active.set(tuple(counter for counter in _active.get() if counter is not self))

    def __enter__(self) -> SuppliedCalls:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()


_active: ContextVar[tuple[SuppliedCalls, ...]] = ContextVar("flashmask_supplied_calls", default=())


def record_supplied_call() -> None:
    """Count one call of attention with vectors."""
    if torch.compiler.is_compiling():  # a context variable would break the graph
        return
    for counter in _active.get():
        counter.count += 1
