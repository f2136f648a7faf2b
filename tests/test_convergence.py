"""A hundred steps on the demo's data: the curves of DPO and of a reward model are those of stock TRL."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "benchmarks"))
import convergence

BOUND = 5e-3  # of a step's loss; 100 steps let the rounding of the first ones grow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_a_hundred_steps_follow_stock_trl(task):
    largest, first, last, rows = convergence.compare(task, steps=100)
    assert len(rows) == 100
    assert largest < BOUND
    assert last > max(0.9, first)
