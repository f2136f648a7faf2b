"""Positions of the bounds in mask indices [..., n], for every form (n, causal), at compile time.

Bounds are in the order start, end, other start, other end of the two hidden intervals. A form may lack some of them
(table in `FlashMask`), but position 0 is always the start of the first interval.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def end_bound(n, causal):
    """Return the position of the first interval's end, or None if the interval reaches the last row."""
    return 1 if n == 4 or (n == 2 and causal) else None


@triton.constexpr_function
def other_start_bound(n, causal):
    """Return the position of the second interval's start, or None if there is none or it starts at row 0."""
    return 2 if n == 4 else None


@triton.constexpr_function
def other_end_bound(n, causal):
    """Return the position of the second interval's end, or None without a second interval."""
    return n - 1 if n == 4 or (n == 2 and not causal) else None
