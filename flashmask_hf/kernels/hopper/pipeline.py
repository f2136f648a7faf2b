"""Device code of the Hopper forward and backward: phases of barriers, scalars passed between roles, products."""

from __future__ import annotations

from flashmask_hf.kernels.hopper.gluon import fence_async_shared, gl, gluon, group_barrier, mbarrier, warpgroup_mma

NEVER = gl.constexpr(2147483647)
"""End of an interval without an end."""


@gluon.jit
def make_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Return mbarriers [STAGES, 1] that each wait for ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def full_phase(n, STAGES: gl.constexpr):
    """Return the parity to wait for at a "full" mbarrier before reading number `n` of what passes through STAGES."""
    return (n // STAGES) & 1


@gluon.jit
def free_phase(n, STAGES: gl.constexpr):
    """Return the parity to wait for at a "free" mbarrier before writing number `n`; the first round does not wait."""
    return ((n // STAGES) & 1) ^ 1


@gluon.jit
def publish(barrier):
    """Arrive at an mbarrier, after all warps of the role and what they stored for products and TMA."""
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(barrier)


@gluon.jit
def read_slot(slots, index):
    """Return slot `index` of int32 `slots` [n, 1] in shared memory as a scalar."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(slots.index(index).load(layout), 0)


@gluon.jit
def write_slot(slots, index, value):
    """Set slot `index` of int32 `slots` [n, 1] in shared memory, from a single warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(index).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def write_slots(slots, first, values):
    """Set the slots from `first` on to the `values`, a tuple, from a single warp."""
    for i in gl.static_range(len(values)):
        write_slot(slots, first + i, values[i])


@gluon.constexpr_function
def piece_count(depth):
    """Return the number of products of `issue_dots`: one per power of two in `depth`."""
    return bin(depth).count("1")


@gluon.constexpr_function
def _first_column(depth, nth):
    start = 0
    for _ in range(nth):
        start += _columns(depth, start)
    return start


@gluon.constexpr_function
def _columns(depth, start):
    return 1 << ((depth - start).bit_length() - 1)


@gluon.jit
def issue_dots(a, b, acc, DEPTH: gl.constexpr, ADD: gl.constexpr = False):
    """Start acc [M, N] = a b', or acc += a b' if ADD, over the first DEPTH dims of a [M, K] and b [N, K].

    The other dims are 0. DEPTH is a multiple of 16, the depth of an instruction.
    """
    if a.shape[1] == DEPTH:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=ADD, is_async=True)
    else:
        for nth in gl.static_range(piece_count(DEPTH)):
            left = a.slice(_first_column(DEPTH, nth), _columns(DEPTH, _first_column(DEPTH, nth)), dim=1)
            right = b.slice(_first_column(DEPTH, nth), _columns(DEPTH, _first_column(DEPTH, nth)), dim=1)
            acc = warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=ADD or nth > 0, is_async=True)
    return acc
