"""The nearest direction of each vector, by the kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from tools.support import Lane, covering, lanes, poisoned
from torch import Tensor

from flashmask_hf.sparse import operators as sparse_ops

NEAREST = lanes(
    (torch.float32, torch.bfloat16, torch.float64),
    (torch.float32, torch.float16),  # the interpreter's products of bfloat16 are wrong
    (torch.float32, torch.bfloat16, torch.float16, torch.float64),
)


SIZES = [
    ((2, 4, 77, 64), 2, 8),
    ((1, 3, 1, 1), 3, 1),
    ((2, 4, 130, 40), 1, 2),
    ((1, 2, 70, 129), 2, 3),
    ((1, 2, 33, 70), 1, 128),
    ((1, 2, 40, 24), 2, 129),
    ((1, 1, 9, 16), 1, 300),
]
"""The shape of the vectors, and the numbers of heads of the directions and of directions."""
LARGEST = [pytest.param(1, id="ties"), pytest.param(20, id="long sums")]


@pytest.mark.parametrize(("lane", "sizes", "largest"), covering(2, NEAREST, SIZES, LARGEST))
def test_nearest_direction(lane: Lane, sizes: tuple[tuple[int, ...], int, int], largest: int) -> None:
    """The first of the nearest directions is found, for integers, whose products only float32 holds exactly."""
    shape, direction_heads, count = sizes
    generator = torch.Generator().manual_seed(0)
    batch, heads, rows, dims = shape

    def draw(*size: int) -> Tensor:
        return torch.randint(-largest, largest + 1, size, generator=generator).double()

    directions = draw(direction_heads, dims, count)
    layouts = {
        "heads outermost": draw(*shape),
        "tokens outermost": draw(batch, rows, heads, dims).transpose(1, 2),
        "a slice": draw(batch, heads, 2 * rows, dims + 3)[:, :, ::2, 1 : dims + 1],
        "dims outermost": draw(dims, batch, heads, rows).permute(1, 2, 3, 0),
        "one for all": draw(1, 1, rows, dims).expand(shape),
    }
    for name, x in layouts.items():
        along = x @ directions.repeat_interleave(heads // direction_heads, 0)
        expected = torch.cat([along, -along], -1).argmax(-1)
        with poisoned():
            got = sparse_ops.nearest(x.to(lane.device, lane.dtype), directions.to(lane.device, lane.dtype))
        assert got.dtype == (torch.uint8 if count <= 128 else torch.int32)
        assert got.is_contiguous()
        assert torch.equal(got.cpu().long(), expected), name


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # the interpreter's NumPy
@pytest.mark.parametrize("count", [3, 70])
@pytest.mark.parametrize("lane", NEAREST)
def test_vectors_without_a_nearest_direction(lane: Lane, count: int) -> None:
    """Vectors with NaN or infinity fall into some bucket and leave the others alone; zeros fall into the first."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(2, 16, count, generator=generator).to(lane.device, lane.dtype)
    x = torch.randn(1, 2, 20, 16, generator=generator).to(lane.device, lane.dtype)
    want = sparse_ops.nearest(x, directions)
    x[:, :, 3], x[:, :, 5], x[:, :, 7], x[:, :, 9, 4], x[:, :, 11, 2] = (
        0,
        float("nan"),
        -float("inf"),
        float("nan"),
        torch.tensor(1e38).to(lane.dtype),  # infinite in float16
    )
    x[:, :, 11, 3] = float("inf")
    got = sparse_ops.nearest(x, directions)
    odd = torch.tensor([3, 5, 7, 9, 11], device=lane.device)
    assert (got < 2 * count).all()
    assert not got[:, :, 3].any()
    assert torch.equal(got.index_fill(2, odd, 0), want.index_fill(2, odd, 0))


def test_nearest_is_not_narrowed_by_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    x, directions = torch.randn(1, 2, 500, 16, generator=generator), torch.randn(2, 16, 100, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        narrowed = sparse_ops.nearest(x, directions)
    assert torch.equal(narrowed, sparse_ops.nearest(x, directions))


@pytest.mark.parametrize("lane", NEAREST)
def test_directions_are_rounded_to_the_vectors_dtype(lane: Lane) -> None:
    """Vectors in 16 bits fall into the same buckets whether or not their directions are wider."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 500, 16, generator=generator).to(lane.device, lane.dtype)
    directions = torch.randn(2, 16, 100, generator=generator).to(lane.device)
    assert torch.equal(sparse_ops.nearest(x, directions), sparse_ops.nearest(x, directions.to(lane.dtype)))


@pytest.mark.parametrize("lane", NEAREST)
def test_directions_of_any_strides(lane: Lane) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 50, 16, generator=generator).to(lane.device, lane.dtype)
    directions = torch.randn(2, 16, 20, generator=generator).to(lane.device, lane.dtype)
    strided = directions.mT.contiguous().mT
    assert not strided.is_contiguous()
    assert torch.equal(sparse_ops.nearest(x, strided), sparse_ops.nearest(x, directions))
