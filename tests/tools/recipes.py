"""Helpers of recipe tests: run a recipe as a program, and read what its trainer logged."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

RECIPES = Path(__file__).parents[2] / "recipes"
"""The folder of the recipes; importable as top-level modules once this module is imported, as when a recipe runs."""

BENCHMARKS = RECIPES / "benchmarks"
"""The folder of the benchmarks, importable likewise."""

for folder in (RECIPES, BENCHMARKS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

QUICK = ["--logging_steps", "1", "--use_cpu", "--disable_tqdm", "True", "--save_strategy", "no"]
"""Flags of a short run on the CPU that saves no checkpoint."""

FSDP_ON_CPU = """
import runpy, sys
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
print(f"FSDP2: {AcceleratorState().is_fsdp2}")
"""
"""A program that runs another one. accelerate shards only over accelerators; this makes it shard over CPU processes."""


def run(recipe: str, capsys: Any, output_dir: object, *flags: object) -> str:
    """Run a recipe in this process, and return what it printed."""
    importlib.import_module(recipe).main([*map(str, flags), "--output_dir", str(output_dir)])
    return capsys.readouterr().out


def launch(command: Sequence[object], output_dir: object, *flags: object, recipe: str = "sft") -> str:
    """Run a recipe as a program, and return what it printed."""
    program = [*command, RECIPES / f"{recipe}.py", "--output_dir", output_dir, *flags]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*map(str, program)], capture_output=True, text=True, timeout=300, env=threads)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def assert_trained_alike(one: Path, two: Path, start: Path) -> None:
    """Assert that two runs of one model or adapter, trained from the model in `start`, saved equal weights.

    They may differ by a share of the weight's movement: Adam enlarges single small gradients, of either sign.
    """
    saved = next(one.glob("*model.safetensors")).name
    weights, others = (load_file(folder / saved) for folder in (one, two))
    before = load_file(start / saved) if (start / saved).exists() else {}
    assert others.keys() - weights.keys() <= {"lm_head.weight"}  # FSDP2 saves tied weights twice
    for name, weight in weights.items():
        is_new = name not in before  # as in an adapter
        bound = 2e-3 * weight.norm() if is_new else 0.03 * (weight - before[name]).norm()
        assert (others[name] - weight).norm() <= bound, name


def logged(printed: str, name: str) -> list[float]:
    """Return the values of a metric that the trainer printed in training, or in evaluation if it begins with eval_."""
    begin = "{'eval_" if name.startswith("eval_") else "{'loss'"
    entries = [line for line in printed.splitlines() if line.startswith(begin)]
    return [float(json.loads(entry.replace("'", '"'))[name]) for entry in entries]
