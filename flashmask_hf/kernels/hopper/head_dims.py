"""Head sizes that the Hopper kernels serve. Tiles are wider than most: TMA fills their other columns with zeros."""

from __future__ import annotations

__all__ = ["SMALLEST", "contracted", "tile_width", "unsupported_head_dims"]

_WIDTHS = (64, 128)
"""Widths of the kernels' tiles."""
_STEP = 8
"""Elements of 16 bits in 16 bytes, of which strides of a tensor descriptor are multiples."""
SMALLEST = 32
"""Smallest head_dim or v_head_dim, of the larger of the two: smaller ones would leave most of a tile empty."""


def tile_width(head_dim: int, v_head_dim: int) -> int:
    """Return the width of the tiles that hold queries, keys and values of sizes that are served."""
    return next(width for width in _WIDTHS if max(head_dim, v_head_dim) <= width)


def contracted(head_dim: int) -> int:
    """Return how many columns products sum over: those of a head, in steps of 16."""
    return -(-head_dim // 16) * 16


def unsupported_head_dims(head_dim: int, v_head_dim: int) -> str | None:
    """Return the head sizes, with what the kernels take instead, if they do not serve these; else None."""
    larger = max(head_dim, v_head_dim)
    if head_dim % _STEP == v_head_dim % _STEP == 0 and SMALLEST <= larger <= _WIDTHS[-1]:
        return None
    return (
        f"head_dim {head_dim} with values of {v_head_dim} "
        f"(it takes multiples of {_STEP} up to {_WIDTHS[-1]}, the larger one at least {SMALLEST})"
    )
