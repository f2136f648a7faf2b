"""The benchmark of rows that are split over GPUs runs on two CPU processes, and its check passes."""

import csv
import os
import subprocess
import sys

import pytest
from tools.recipes import RECIPES

pytestmark = pytest.mark.full


def test_the_check_passes_and_providers_agree(tmp_path):
    file = tmp_path / "parallel.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [RECIPES / "benchmarks" / "parallel.py", "--device", "cpu", "--shape", "tiny", "--tokens", 512]
    command += ["--repeats", 1, "--csv", file]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("heads", "keys"):
        assert f"provider=check_{name}" in done.stdout
    assert "equal_bits=1111" in done.stdout
    assert "sdpa_cp is left out" in done.stdout  # torch has no context parallelism on a CPU
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["provider"] for row in rows] == ["heads", "keys", "keys_contiguous", "whole"]
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-5)
    for row in rows:
        assert int(row["tokens_per_second"]) > 0
        assert (row["exchange_share"] == "") == (row["provider"] == "whole")
