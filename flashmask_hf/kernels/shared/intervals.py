"""Interval decoder: the columns of a mask's indices [..., n] that hold each bound, for every form (n, causal).

| n | causal | columns of the last axis | hidden rows of a key column |
|---|---|---|---|
| 1 | True  | start                               | [start, Sq)                                  |
| 2 | True  | start, end                          | [start, end)                                 |
| 2 | False | start, other end                    | [start, Sq) and [0, other end)               |
| 4 | False | start, end, other start, other end  | [start, end) and [other start, other end)    |

Column 0 is always the start of the first interval. The functions run at compile time, in Triton and in Gluon alike.
"""

from __future__ import annotations

import triton

__all__ = ["end_column", "other_end_column", "other_start_column"]


@triton.constexpr_function
def end_column(n, causal):
    """Return the column that ends the first interval, or None if the interval reaches to the last row."""
    return 1 if n == 4 or (n == 2 and causal) else None


@triton.constexpr_function
def other_start_column(n, causal):
    """Return the column that starts the second interval, or None if it starts at row 0 or does not exist."""
    return 2 if n == 4 else None


@triton.constexpr_function
def other_end_column(n, causal):
    """Return the column that ends the second interval, or None if there is no second interval."""
    return n - 1 if n == 4 or (n == 2 and not causal) else None
