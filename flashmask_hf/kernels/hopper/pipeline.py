"""Device code that the Hopper forward and backward share: scalars that one role of a program hands to the others."""

from __future__ import annotations

from flashmask_hf.kernels.hopper.gluon import gl, gluon

__all__ = ["NEVER", "read_slot", "write_slot"]

NEVER = gl.constexpr(2147483647)
"""End of an interval without an end: the largest int32."""


@gluon.jit
def read_slot(slots, index):
    """Return number `index` of int32 `slots` [n, 1] in shared memory as a scalar."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(slots.index(index).load(layout), 0)


@gluon.jit
def write_slot(slots, index, value):
    """Set number `index` of int32 `slots` [n, 1] in shared memory. The caller is a single warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(index).store(gl.full([1], value, gl.int32, layout))
