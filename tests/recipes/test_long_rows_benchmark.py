"""The benchmark of long rows runs on a CPU, and writes its figures."""

import csv
import runpy
import sys

import pytest
from tools.recipes import RECIPES
from tools.tiny import TRAINER_WARNINGS

BENCHMARKS = RECIPES / "benchmarks"

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]


def test_the_benchmark_of_long_rows(tmp_path, monkeypatch):
    file = tmp_path / "long_rows.csv"
    flags = ["--device", "cpu", "--shape", "tiny", "--tokens", "600", "500", "--documents", "3", "--equal"]
    flags += ["--keep_attention", "1", "--host_gib", "1", "--csv", str(file)]
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["long_rows.py", *flags])
    runpy.run_path(str(BENCHMARKS / "long_rows.py"), run_name="__main__")
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["tokens"] for row in rows] == ["600", "500"]
    for row in rows:
        assert (row["attention"], row["host_gib"], row["documents"]) == ("kept", "1.0", "3 equal")
        assert float(row["tokens_per_second"]) == pytest.approx(
            float(row["tokens"]) / float(row["seconds_per_step"]), 0.1
        )
