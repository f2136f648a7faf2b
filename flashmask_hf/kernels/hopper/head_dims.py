"""Head dims of the Hopper kernels, and the widths of their tiles, which TMA fills up with zeros."""

from __future__ import annotations

from typing import NamedTuple

_STEP = 8
"""Strides of a tensor descriptor are multiples of 16 bytes."""
SMALLEST = 32
"""Least max(head_dim, v_head_dim): smaller heads would leave most of a tile empty."""


class Widths(NamedTuple):
    """Head dims that tiles hold."""

    values: int
    """Dims of values and outputs, and the first dims of queries and keys."""
    tail: int = 0
    """Further dims of queries and keys: separate tiles in the forward; the backward pads to 256."""


_WIDTHS = (Widths(64), Widths(128), Widths(128, 64), Widths(256))


def widths_of(head_dim: int, v_head_dim: int) -> Widths:
    """Return the narrowest tiles for supported head dims."""
    return next(x for x in _WIDTHS if head_dim <= x.values + x.tail and v_head_dim <= x.values)


def contracted(head_dim: int) -> int:
    """Return the dims that products sum over: head_dim in steps of 16."""
    return -(-head_dim // 16) * 16


def unsupported_head_dims(head_dim: int, v_head_dim: int) -> str | None:
    """Return the end of a message "cannot serve ...", or None if the kernels serve these head dims."""
    largest = _WIDTHS[-1].values
    larger = max(head_dim, v_head_dim)
    if head_dim % _STEP == v_head_dim % _STEP == 0 and SMALLEST <= larger <= largest:
        return None
    return (
        f"head_dim {head_dim} with values of {v_head_dim} "
        f"(it takes multiples of {_STEP} up to {largest}, the larger one at least {SMALLEST})"
    )
