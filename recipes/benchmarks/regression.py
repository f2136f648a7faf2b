"""Time this checkout beside an earlier commit of the repository: kernels, host time of short calls, and training steps.

    python recipes/benchmarks/regression.py HEAD~10 --csv regression.csv
    python recipes/benchmarks/regression.py HEAD~10 --figures kernels --attention "--masks share_question --dims 64"

Calls of both commits run in turns in one process (`attention.py --commit`), after a check against float64. A row has
the time here over the time of the other commit. Figures:

- `kernels`: forward and backward of 64K tokens with hidden size 4096.
- `host`: time in which the host issues a short call with 32 heads on an idle GPU, and its time in a CUDA graph.
- `step`: an eager training step of a Llama-3.2-1B shape with LoRA, one packed row per step. Each repeat is a process of
  its own, and both commits alternate.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention
from harness import Results, flags, parsed
from peers import ROOT, add_commit

# study of attention.py, columns that are compared, and flags
STUDIES: dict[str, tuple[str, Sequence[str], str]] = {
    "host": ("short", ("host_us", "graph_us"), "--batches 1 --lengths 128 256 512 1024 --repeats 150"),
    "kernels": ("masks", ("forward_ms", "backward_ms"), "--masks causal_document share_question global_sliding_window "
                "--lengths 8192 32768 --repeats 15"),
}  # fmt: skip
LENGTHS, REPEATS = ("2048", "8192"), 3  # rows and processes of the figure step
CASE = ("case", "length", "head_dim", "batch")
Rows = list[dict[str, object]]


def compare(figure: str, here: dict[str, float], other: dict[str, float]) -> Rows:
    return [
        {"figure": figure, "case": case, "here": one, "other": other[case], "ratio": round(one / other[case], 3)}
        for case, one in here.items()
        if case in other
    ]


def from_attention(figure: str, flags: list[str]) -> Rows:
    study, columns, own = STUDIES[figure]
    rows: Any = attention.main([study, *own.split(), *flags, "--providers", "flashmask", "commit"])
    wrong = [row for row in rows if row["status"] != "timed"]
    if wrong:
        raise SystemExit(f"not timed: {wrong[0]}")

    def times(provider: str) -> dict[str, float]:
        return {
            f"{' '.join(str(row[name]) for name in (*CASE, 'passes') if name in row)}, {column}": float(row[column])
            for row in rows
            if row["provider"] == provider
            for column in columns
            if row[column]
        }

    return compare(figure, times("flashmask"), times("commit"))


def steps(folder: Path, device: str) -> Rows:
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(REPEATS):
        for name, path in (("here", ROOT), ("other", folder / "as_is")):
            file = folder / f"{name}_{turn}.csv"
            shape = "llama-3.2-1b" if device == "cuda" else "tiny"
            command = [sys.executable, Path(__file__).with_name("training.py"), "--shapes", shape, "--tasks", "lora"]
            command += ["--implementations", "flashmask", "--steps", "20", "--lengths", *LENGTHS]
            command += ["--device", device, "--csv", file]
            environment = {**os.environ, "PYTHONPATH": str(path)}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            with open(file, newline="") as opened:
                for row in csv.DictReader(opened):
                    seconds.setdefault((name, row["length"]), []).append(float(row["seconds_per_step"]))
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    here, other = ({f"LoRA, {x}": medians[name, x] for x in LENGTHS} for name in ("here", "other"))
    return compare("step", here, other)


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("commit", help="commit to compare with")
    parser.add_argument("--figures", nargs="+", default=[*STUDIES, "step"], choices=[*STUDIES, "step"])
    parser.add_argument("--attention", default="", help="flags of attention.py that replace those of `STUDIES`")
    a = parsed(parser, argv)
    results = Results(a.csv)
    with tempfile.TemporaryDirectory() as path:
        add_commit(a.commit, Path(path))
        for figure in a.figures:
            more = ["--device", a.device, *a.attention.split()]
            results.add(from_attention(figure, more) if figure in STUDIES else steps(Path(path), a.device))


if __name__ == "__main__":
    main()
