"""The benchmark of long rows runs on a CPU, and writes its figures."""

import argparse
import csv
import sys

import pytest
import torch
from tools.recipes import RECIPES
from tools.tiny import TRAINER_WARNINGS

BENCHMARKS = RECIPES / "benchmarks"

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """The benchmark, and a function that runs it with flags and returns the rows of its file."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import long_rows

    def run(*flags):
        file = tmp_path / "long_rows.csv"
        file.unlink(missing_ok=True)
        flags = ["--device", "cpu", "--shape", "tiny", *flags, "--csv", str(file)]
        monkeypatch.setattr(sys, "argv", ["long_rows.py", *flags])
        long_rows.main()
        if not file.exists():
            return []
        with open(file, newline="") as opened:
            return list(csv.DictReader(opened))

    return long_rows, run


def test_the_benchmark_of_long_rows(benchmark):
    _, run = benchmark
    flags = ["--tokens", "600", "500", "--documents", "3", "--equal", "--keep_attention", "1", "--host_gib", "1"]
    rows = run(*flags)
    assert [row["tokens"] for row in rows] == ["600", "500"]
    for row in rows:
        assert (row["attention"], row["host_gib"], row["documents"]) == ("kept", "1.0", "3 equal")
        assert float(row["tokens_per_second"]) == pytest.approx(
            float(row["tokens"]) / float(row["seconds_per_step"]), 0.1
        )


@pytest.mark.full
def test_the_longest_row_is_found_by_few_trials_of_one_step(benchmark, monkeypatch, capsys):
    long_rows, run = benchmark
    steps, train = [], long_rows.train
    monkeypatch.setattr(long_rows, "longest_row", lambda arguments: 8192)

    def out_of_memory_above(tokens, arguments):
        steps.append((tokens, arguments.steps))
        if tokens > 8000:
            raise torch.OutOfMemoryError("out")
        if tokens > 7000:
            raise ValueError("max_length: the longest row that fits has 7,000 tokens")
        return train(512, arguments) | {"tokens": tokens}

    monkeypatch.setattr(long_rows, "train", out_of_memory_above)
    rows = run("--tokens", "longest", "--host_gib", "1")
    assert steps == [(8192, 1), (7168, 1), (6144, 1)]
    assert [row["tokens"] for row in rows] == ["8192", "7168", "6144"]
    assert [row["tokens_per_second"] for row in rows[:2]] == ["out of memory"] * 2
    assert int(rows[2]["tokens_per_second"]) > 0
    assert (rows[2]["steps"], rows[2]["attention"]) == ("1", "computed again")
    steps.clear()
    assert run("--tokens", "longest", "--host_gib", "1", "--seconds", "0") == []
    assert steps == []
    assert "raise --seconds or --documents" in capsys.readouterr().out


def test_a_step_is_expected_to_take_what_was_measured(benchmark):
    """Within a factor of 2.5 of the rows of docs/long_rows.md, which keep attention or compute it again."""
    long_rows, _ = benchmark
    with open(BENCHMARKS / "results" / "long_rows_h200.csv", newline="") as opened:
        measured = [row for row in csv.DictReader(opened) if int(row["tokens"]) > 200_000]
    assert len(measured) >= 5
    for row in measured:
        count, spread = row["documents"].split()
        arguments = argparse.Namespace(shape=row["shape"], documents=int(count), equal=spread == "equal")
        expected = long_rows.seconds_of_step(int(row["tokens"]), arguments)
        assert 1 <= expected / float(row["seconds_per_step"]) < 2.5
