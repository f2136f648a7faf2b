"""Positions at which kernels find the bounds of intervals in mask indices."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashmask_hf.intervals import hidden_intervals
from flashmask_hf.kernels.shared.bounds import end_bound, other_end_bound, other_start_bound


@pytest.mark.parametrize(("causal", "n"), [(True, 1), (True, 2), (False, 2), (False, 4)], ids=str)
def test_bounds_agree_with_masks(causal: bool, n: int) -> None:
    q_len = 9
    bounds = [1, 2, 3, 4][:n]

    def bound(column: int | None, otherwise: int) -> int:
        return otherwise if column is None else bounds[column]

    expected = [(bounds[0], bound(end_bound(n, causal), q_len))]
    if other_end_bound(n, causal) is not None:
        expected.append((bound(other_start_bound(n, causal), 0), bound(other_end_bound(n, causal), q_len)))
    found = hidden_intervals(torch.tensor(bounds, dtype=torch.int32).view(1, 1, 1, n), causal, q_len)
    assert [(start.item(), end.item()) for start, end in found] == expected
