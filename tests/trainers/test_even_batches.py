"""Streams and evaluations on several processes: as many batches in each, and every learned token counts once."""

from __future__ import annotations

from typing import Any

import pytest
from tools.even_batches_cases import CASES
from tools.processes import run_cases
from tools.tiny import TRAINER_WARNINGS

pytestmark = TRAINER_WARNINGS


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, Any]]:
    return run_cases("tools.even_batches_cases", (1, 2))


def result(found: dict[int, dict[str, Any]], size: int, name: str) -> Any:
    outcome = found[size][name]
    assert "error" not in outcome, outcome["error"]
    return outcome


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("train")])
def test_a_stream_trains_on_several_processes(found, name):
    assert result(found, 2, name)["steps"] == result(found, 1, name)["steps"] == 16


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("evaluate")])
def test_evaluation_on_several_processes_reads_every_row_once(found, name):
    want, got = result(found, 1, name), result(found, 2, name)
    for key in ("loss", "entropy", "mean_token_accuracy"):
        assert got[key] == pytest.approx(want[key], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_a_stream_of_pairs_trains_on_several_processes(found, name):
    outcome = result(found, 2, name)
    assert (outcome["loss"], outcome["eval_loss"]) == (6, 2)
