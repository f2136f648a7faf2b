"""Head sizes that the Hopper kernels serve, and the tiles that hold them: TMA fills other columns with zeros."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SMALLEST", "Widths", "contracted", "unsupported_head_dims", "widths_of"]

_STEP = 8
"""Elements of 16 bits in 16 bytes, of which strides of a tensor descriptor are multiples."""
SMALLEST = 32
"""Smallest head_dim or v_head_dim, of the larger of the two: smaller ones would leave most of a tile empty."""


class Widths(NamedTuple):
    """Columns of the tiles of a kernel."""

    values: int
    """Columns of values and outputs, and the first columns of queries and keys."""
    tail: int = 0
    """Further columns of queries and keys. The forward has tiles of their own for them; the backward pads to 256."""


_WIDTHS = (Widths(64), Widths(128), Widths(128, 64), Widths(256))


def widths_of(head_dim: int, v_head_dim: int) -> Widths:
    """Return the narrowest tiles that hold queries, keys and values of sizes that are served."""
    return next(x for x in _WIDTHS if head_dim <= x.values + x.tail and v_head_dim <= x.values)


def contracted(head_dim: int) -> int:
    """Return how many columns products sum over: those of a head, in steps of 16."""
    return -(-head_dim // 16) * 16


def unsupported_head_dims(head_dim: int, v_head_dim: int) -> str | None:
    """Return the head sizes and what the kernels take instead, to follow "cannot serve", or None if they serve them."""
    largest = _WIDTHS[-1].values
    larger = max(head_dim, v_head_dim)
    if head_dim % _STEP == v_head_dim % _STEP == 0 and SMALLEST <= larger <= largest:
        return None
    return (
        f"head_dim {head_dim} with values of {v_head_dim} "
        f"(it takes multiples of {_STEP} up to {largest}, the larger one at least {SMALLEST})"
    )
