"""Over a hundred steps on the demo's data, the loss curves of DPO and of a reward model equal stock TRL's."""

import sys

import pytest
from tools.recipes import RECIPES
from tools.tiny import TRAINER_WARNINGS

sys.path.insert(0, str(RECIPES / "benchmarks"))
import convergence

pytestmark = [pytest.mark.slow, *TRAINER_WARNINGS]

BOUND = 5e-3  # of the loss of a step; rounding in the first steps grows over 100 steps


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_a_hundred_steps_follow_stock_trl(task):
    largest, first, last, rows = convergence.compare(task, steps=100)
    assert len(rows) == 100
    assert largest < BOUND
    assert last > max(0.9, first)
