"""The Gluon interpreter: a correct kernel passes, and without any one of its steps it raises."""

from __future__ import annotations

import pytest
import torch
from tools.support import INTERPRETED

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)

from flashmask_hf.kernels.hopper import gluon as language

if language.import_failure is not None:
    pytest.skip(f"interpreter lane: {language.import_failure}", allow_module_level=True)

from tools.gluon_interpreter import interpreted
from tools.race_detector import Deadlock, Race

from flashmask_hf.kernels.hopper.descriptors import row_template
from flashmask_hf.kernels.hopper.gluon import (
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.tensor_layout import layout_of

pytestmark = pytest.mark.interpreter

FREE = gl.constexpr(8)
DONE = gl.constexpr(9)


@gluon.jit
def _load_tiles(x, tile, full, count, MISSING: gl.constexpr):
    for i in range(count):
        if i > 0 and MISSING != "sync":
            named_barrier_sync(FREE, 160)
        if MISSING != "expect":
            mbarrier.expect(full, 64 * 64 * 2)
        tma_load(x, [0, 0, i * 64, 0], full, tile.index(0))


@gluon.jit
def _square_tiles(y, tile, result, full, count, MISSING: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    for i in range(count):
        if MISSING != "wait":
            mbarrier.wait(full, i & 1)
        x = tile.index(0).reshape([64, 64])
        square = warpgroup_mma(x, x, gl.zeros([64, 64], gl.float32, layout), use_acc=False, is_async=True)
        if MISSING != "wait for the product":
            square = warpgroup_mma_wait(0, deps=[square])
        if i + 1 < count:
            x.store(gl.zeros([64, 64], x.dtype, layout))
            if MISSING != "fence before a copy":
                fence_async_shared()
                group_barrier()
            named_barrier_arrive(FREE, 160)
        if MISSING != "wait for the store":
            tma_store_wait(0)
        result.index(0).reshape([64, 64]).store(square.to(x.dtype))
        if MISSING != "fence":
            fence_async_shared()
        if MISSING != "barrier of the warps":
            group_barrier()
        tma_store(y, [0, 0, i * 64, 0], result.index(0))
    if MISSING != "wait at the end":
        tma_store_wait(0)
    # Another role writes here meanwhile: what this one makes is in vain, unless it is used.
    named_barrier_arrive(DONE, 160)
    square = warpgroup_mma(x, x, gl.zeros([64, 64], gl.float32, layout), use_acc=False, is_async=True)
    square = warpgroup_mma_wait(0, deps=[square])
    if MISSING == "use":
        result.index(0).reshape([64, 64]).store(square.to(x.dtype))
        fence_async_shared()
        group_barrier()
        tma_store(y, [0, 0, 0, 0], result.index(0))
        tma_store_wait(0)


@gluon.jit
def _overwrite_tile(tile):
    named_barrier_sync(DONE, 160)
    tile.index(0).reshape([64, 64]).store(gl.zeros([64, 64], tile.dtype, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _squares(x, y, count, MISSING: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [1, 1, 1, 64, 64], x.layout)
    result = gl.allocate_shared_memory(x.dtype, [1, 1, 1, 64, 64], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [
            (_square_tiles, (y, tile, result, full, count, MISSING)),
            (_load_tiles, (x, tile, full, count, MISSING)),
            (_overwrite_tile, (tile,)),
        ],
        [1, 1],
        [24, 24],
    )


def _run(missing: str, count: int, seed: int) -> None:
    x = torch.randn(1, 1, 64 * count, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.full_like(x, float("nan"))
    with interpreted(seed) as ran:
        templates = [row_template(layout_of(x), 64) for _ in range(2)]
        Launch(_squares, 1, count, descriptors=templates, MISSING=missing, num_warps=4)(x, y)
    assert ran == ["_squares"]
    tiles = x.view(count, 64, 64).float()
    torch.testing.assert_close(y.view(count, 64, 64), (tiles @ tiles).bfloat16(), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_order(seed: int) -> None:
    _run("nothing", 3, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("missing", "count", "error", "message"),
    [
        ("wait", 1, Race, "tile 0: .*reads what (nobody wrote|_load_tiles .*may not have written yet); what is made"),
        (
            "sync",
            2,
            Race,
            "_load_tiles .*(writes where _square_tiles .* may not be done|phase before may not be over)",
        ),
        ("expect", 1, Deadlock, "program 0: _square_tiles"),
        ("wait for the product", 1, AssertionError, "_square_tiles .* uses a product that it did not wait for"),
        ("wait for the store", 2, Race, "result 0: _square_tiles .* writes where _square_tiles .* may not be done"),
        ("fence", 1, Race, "result 0: .*reads what _square_tiles .* stored, without a fence"),
        ("barrier of the warps", 1, Race, "result 0: .*reads what _square_tiles .* stored, without a fence"),
        ("fence before a copy", 2, Race, "tile 0: .*writes where _square_tiles .* stored, without a fence"),
        ("wait at the end", 1, AssertionError, "a role ends with stores"),
        ("use", 1, Race, "tile 0: .*_square_tiles .*(is used in|may not be done)"),
    ],
    ids=lambda x: x if isinstance(x, str) and ":" not in x and "_" not in x else "",
)
def test_what_is_not(missing: str, count: int, error: type[Exception], message: str, seed: int) -> None:
    with pytest.raises(error, match=message):
        _run(missing, count, seed)


@gluon.jit
def _store_at(y, place, ready, MISSING: gl.constexpr):
    if MISSING != "wait":
        mbarrier.wait(ready, 0)
    at = place.index(0).load(gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + at, 1.0)


@gluon.jit
def _place_row(place, ready, MISSING: gl.constexpr):
    """If it comes after the phase, two more phases follow, of which the second lets a wait for the first go on, too."""
    if MISSING == "its phase":
        mbarrier.arrive(ready, count=1)
    place.index(0).store(gl.full([1], 3, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    group_barrier()
    mbarrier.arrive(ready, count=1)
    if MISSING == "its phase":
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _addressed(y, MISSING: gl.constexpr):
    place = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(_store_at, (y, place, ready, MISSING)), (_place_row, (place, ready, MISSING))], [1], [24])


@gluon.jit
def _arrive_twice(both, MISSING: gl.constexpr):
    for i in range(2):
        mbarrier.arrive(both, count=1)
        if MISSING != "wait":
            mbarrier.wait(both, i & 1)


@gluon.jit
def _phases(_, MISSING: gl.constexpr):
    both = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(both, count=2)
    gl.warp_specialize([(_arrive_twice, (both, MISSING)), (_arrive_twice, (both, MISSING))], [1], [24])


@gluon.jit
def _arrive_at_number(MISSING: gl.constexpr):
    for _ in range(2):
        if MISSING != "wait":
            named_barrier_sync(FREE, 160)
        else:
            named_barrier_arrive(FREE, 160)


@gluon.jit
def _generations(_, MISSING: gl.constexpr):
    gl.warp_specialize([(_arrive_at_number, (MISSING,)), (_arrive_at_number, (MISSING,))], [1], [24])


@gluon.jit
def _wait_or_not(full, MISSING: gl.constexpr):
    if MISSING != "wait":
        mbarrier.wait(full, 0)


@gluon.jit
def _copy(x, MISSING: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [1, 1, 1, 64, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(_wait_or_not, (full, MISSING)), (_load_tiles, (x, tile, full, 1, MISSING))], [1], [24])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kernel", "missing", "message"),
    [
        (_addressed, "wait", "place 0: .*_place_row|place 0: .*nobody wrote"),
        (_addressed, "its phase", "place 0: .*_place_row|place 0: .*nobody wrote"),
        (_phases, "wait", "both 0: .*arrives while the phase before may not be over"),
        (_generations, "wait", "barrier 8, .*the role is there again"),
        (_copy, "wait", "tile 0: nobody waits for what _load_tiles"),
    ],
    ids=["address", "late", "phase", "generation", "copy"],
)
def test_in_whatever_order_the_roles_run(kernel, missing: str, message: str, seed: int) -> None:
    """An address, a write after the phase, an arrival too early, a copy that nobody waits for."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    descriptors = [row_template(layout_of(x), 64)] if kernel is _copy else []
    with interpreted(seed):
        Launch(kernel, 1, descriptors=descriptors, MISSING="nothing", num_warps=4)(x)
        assert x.sum() == (kernel is _addressed)
        with pytest.raises(Race, match=message):
            Launch(kernel, 1, descriptors=descriptors, MISSING=missing, num_warps=4)(x)
