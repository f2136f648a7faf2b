"""What the interpreter of Gluon must tell: one kernel in order, and what is wrong with it once a step is missing."""

from __future__ import annotations

import pytest
import torch
from support import INTERPRETED

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)

from flashmask_hf.kernels import gluon_shim

if gluon_shim._obstacle is not None:
    pytest.skip(f"interpreter lane: {gluon_shim._obstacle}", allow_module_level=True)

from gluon_interpreter import Deadlock, Race, interpreted

from flashmask_hf.kernels.gluon_shim import (
    describe_rows,
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
from flashmask_hf.kernels.launch import Launcher

pytestmark = pytest.mark.interpreter

FREE = gl.constexpr(8)


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
    # What a role makes in vain may come at any time.
    in_vain = warpgroup_mma(x, x, gl.zeros([64, 64], gl.float32, layout), use_acc=False, is_async=True)
    in_vain = warpgroup_mma_wait(0, deps=[in_vain])
    if MISSING != "wait at the end":
        tma_store_wait(0)
    if MISSING == "use":
        result.index(0).reshape([64, 64]).store(in_vain.to(x.dtype))
        fence_async_shared()
        group_barrier()
        tma_store(y, [0, 0, 0, 0], result.index(0))
        tma_store_wait(0)


@gluon.jit
def _early(tile, MISSING: gl.constexpr):
    """A role that writes where the others read, if anything is to be used that nobody wrote, or is overwritten."""
    if MISSING == "use":
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
            (_early, (tile, MISSING)),
        ],
        [1, 1],
        [24, 24],
    )


_launch = Launcher(_squares)


def _run(missing: str, count: int, seed: int) -> None:
    x = torch.randn(1, 1, 64 * count, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.full_like(x, float("nan"))
    with interpreted(seed) as ran:
        _launch(1, describe_rows(x, 64), describe_rows(y, 64), count, MISSING=missing, num_warps=4)
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
        ("sync", 2, Race, "tile 0: _load_tiles .* writes where _(square|load)_tiles .* may not be done"),
        ("expect", 1, Deadlock, "program 0: _square_tiles"),
        ("wait for the product", 1, AssertionError, "_square_tiles .* uses a product that it did not wait for"),
        ("wait for the store", 2, Race, "result 0: _square_tiles .* writes where _square_tiles .* may not be done"),
        ("fence", 1, Race, "result 0: .*reads what _square_tiles .* stored, without a fence"),
        ("barrier of the warps", 1, Race, "result 0: .*reads what _square_tiles .* stored, without a fence"),
        ("fence before a copy", 2, Race, "tile 0: .*writes where _square_tiles .* stored, without a fence"),
        ("wait at the end", 1, AssertionError, "a role ends with stores"),
        ("use", 1, Race, "tile 0: "),
    ],
    ids=lambda x: x if isinstance(x, str) and ":" not in x and "_" not in x else "",
)
def test_what_is_not(missing: str, count: int, error: type[Exception], message: str, seed: int) -> None:
    with pytest.raises(error, match=message):
        _run(missing, count, seed)
