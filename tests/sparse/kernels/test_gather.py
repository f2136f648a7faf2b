"""Rows moved to another order and back, by the kernels and by torch."""

from __future__ import annotations

import pytest
import torch
from tools.support import Lane, covering, lanes, poisoned

from flashmask_hf.sparse.reorder import gather_rows, gather_upstream, put_rows_back

MOVING = lanes((torch.float64, torch.bfloat16), (torch.float32, torch.float16), (torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    ("lane", "shape"), covering(1, MOVING, [(2, 3, 77, 64), (1, 2, 300, 40), (3, 1, 1, 1), (2, 4, 50, 129)])
)
def test_rows_move_and_come_back(lane: Lane, shape: tuple[int, ...]) -> None:
    """Rows behind the kept ones may hold anything; rows of the gradient bring their dot products with the output."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, rows, dims = shape
    order = torch.rand(batch, heads, rows, generator=generator).argsort(-1)
    kept = torch.randint(0, rows + 1, (heads, batch), generator=generator, dtype=torch.int32).mT
    order, kept = order.to(lane.device), kept.to(lane.device)
    behind = (torch.arange(rows, device=lane.device) >= kept.unsqueeze(-1)).unsqueeze(-1)
    unread = torch.zeros_like(behind).scatter_(2, order.unsqueeze(-1), behind)
    index = order.unsqueeze(-1).expand(shape)
    wide, nan = torch.promote_types(lane.dtype, torch.float32), float("nan")
    layouts = {
        "heads outermost": torch.randn(shape, generator=generator),
        "tokens outermost": torch.randn(batch, rows, heads, dims, generator=generator).transpose(1, 2),
        "a slice": torch.randn(batch, heads, 2 * rows, dims + 3, generator=generator)[:, :, ::2, 1 : dims + 1],
        "dims outermost": torch.randn(dims, batch, heads, rows, generator=generator).permute(1, 2, 3, 0),
        "one for all": torch.randn(1, 1, rows, dims, generator=generator).expand(shape),
    }
    for name, x in layouts.items():
        x = x.to(lane.device, lane.dtype)
        with poisoned():
            gathered = gather_rows(x, order.int(), None)
            some = gather_rows(x, order.int(), kept)
            back = put_rows_back(gathered, order.int())
        assert torch.equal(gathered, x.take_along_dim(index, 2)), name
        assert torch.equal(some, gathered.masked_fill(behind, 0.0)), name
        assert torch.equal(back, x), name
        assert gathered.is_contiguous()
        assert back.transpose(1, 2).is_contiguous()
        out = torch.randn(shape, generator=generator).to(lane.device, lane.dtype)
        sums = (gathered.to(wide) * out.take_along_dim(index, 2).to(wide)).sum(-1)
        some_sums = sums.masked_fill(behind.squeeze(-1), 0.0)
        for count, dout_and_out, expected, expected_sums in (
            (None, (x, out), gathered, sums),
            (kept, (x.masked_fill(unread, nan), out.masked_fill(unread, nan)), some, some_sums),
        ):
            with poisoned():
                upstream, delta = gather_upstream(*dout_and_out, order.int(), count, wide)
            assert torch.equal(upstream, expected), name
            torch.testing.assert_close(delta, expected_sums)
            assert upstream.is_contiguous()
            assert delta.is_contiguous()


@pytest.mark.parametrize("lane", MOVING)
def test_infinite_upstream_of_zero_outputs_adds_nothing(lane: Lane) -> None:
    """An output that is 0, as of rows that see nothing, leaves the row sums finite."""
    dout, out = (torch.ones(1, 2, 5, 16, device=lane.device, dtype=lane.dtype) for _ in range(2))
    dout[:, :, 2, 3:5], out[:, :, 2, 3:5] = torch.tensor([float("inf"), float("nan")]), torch.tensor([0.0, -0.0])
    order = torch.arange(5, device=lane.device, dtype=torch.int32).flip(0).expand(1, 2, 5).contiguous()
    upstream, delta = gather_upstream(dout, out, order, None, torch.promote_types(lane.dtype, torch.float32))
    assert torch.equal(delta, torch.tensor([16.0, 16, 14, 16, 16], dtype=delta.dtype).to(delta).expand(1, 2, 5))
    assert torch.equal(upstream.nan_to_num(), dout.flip(2).nan_to_num())
