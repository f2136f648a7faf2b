"""Records of what reaches the masks and attention layers in a forward, for checks once it has run.

A model may keep the caller's vectors or positions from some of its layers: recurrent and convolutional ones, layers to
which it does not hand its keywords on, or all of them. `packed_rows` compares the number of calls with vectors with the
model's number of layers; `unread_documents` asks whether anything read what tells documents.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["ForwardRecord", "record_documents", "record_supplied_call"]


class ForwardRecord:
    """Record of forwards between `start` and `stop` or in a `with` block, in this thread.

    Compiled code records nothing. Records may be nested; each gets everything.

    Attributes:
        supplied_calls: number of attention calls that received the caller's `startend_row_indices`.
        knows_documents: whether a mask or an attention layer read what tells documents, or has no need to.
    """

    def __init__(self) -> None:
        self.supplied_calls = 0
        self.knows_documents = False

    def start(self) -> ForwardRecord:
        """Record from here on."""
        _active.set((*_active.get(), self))
        return self

    def stop(self) -> None:
        """Record no longer."""
        _active.set(tuple(record for record in _active.get() if record is not self))

    def __enter__(self) -> ForwardRecord:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()


_active: ContextVar[tuple[ForwardRecord, ...]] = ContextVar("flashmask_forward_records", default=())


def record_supplied_call() -> None:
    """Record one call of attention with vectors."""
    if not torch.compiler.is_compiling():  # a context variable would break the graph
        for record in _active.get():
            record.supplied_calls += 1


def record_documents() -> None:
    """Record that a mask or an attention layer knows of documents, or has no need to."""
    if not torch.compiler.is_compiling():
        for record in _active.get():
            record.knows_documents = True
