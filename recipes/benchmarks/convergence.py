"""Train SFT, LoRA, DPO and a reward model with several attentions on the same rows, and compare their loss curves.

    python recipes/benchmarks/convergence.py --csv results/convergence_cpu.csv
    python recipes/benchmarks/convergence.py --tasks dpo --seeds 1 --steps 20

Figure 3 of the FlashMask paper on a tiny Llama and Python's documentation, in float32 with deterministic algorithms. A
seed sets the order of the data and all new weights. Curves:

- `flashmask`: this package's trainer; `flashmask_again`: the same run once more, with the first seed.
- `flashmask_unskipped`: the same kernels, which walk hidden tiles, too. The Hopper kernels cannot, so on a GPU
  `flashmask_portable` is the curve of the portable kernels that skip.
- `sdpa`: the same trainer and rows with a dense mask. `trl`: TRL's own trainer of DPO and reward models.

The program exits with 1 unless `flashmask_again` and `flashmask_unskipped` equal their counterparts to the bit, the
first 50 losses of the others differ by at most 0.001, and all curves fall.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from harness import Flag, Rows, program
from packed_attention import attention
from peft import LoraConfig
from shapes import TRAINERS, arguments_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import data

TASKS = ("sft", "lora", "dpo", "reward")
CURVES = ("flashmask", "flashmask_again", "flashmask_portable", "flashmask_unskipped", "sdpa", "trl")
BOUND, EARLY = 1e-3, 50
"""Largest difference of two losses, in this number of first steps."""

SHORT = {"max_length": 384, "truncation_mode": "keep_start"}  # rows of several documents
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 1e-3, "per_device_train_batch_size": 1, **SHORT},
    "lora": {"learning_rate": 2e-3, "per_device_train_batch_size": 1, **SHORT},
    "dpo": {"learning_rate": 5e-4, "per_device_train_batch_size": 2, "max_length": 512, "beta": 0.5},
    "reward": {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_length": 512},
}


def curves_of(task: str, device: str, again: bool) -> list[str]:
    present = {"flashmask_portable": device == "cuda", "flashmask_again": again}
    return [name for name in CURVES if present.get(name, name != "trl" or len(TRAINERS[task]) > 1)]


def attention_of(name: str, device: str) -> str:
    own = "flashmask" if device == "cuda" else "flashmask_portable"
    return own if name in ("flashmask", "flashmask_again", "trl") else name


@functools.cache
def dataset_of(task: str) -> Any:
    return (data.preferences() if task in ("dpo", "reward") else data.question_answers())["train"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # filling takes a third of a step
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = True  # the default


def curve(task: str, name: str, seed: int, model_path: str, steps: int, device: str) -> list[float]:
    trainer, config = TRAINERS[task][name == "trl"]
    options: dict[str, Any] = {"num_labels": 1} if task == "reward" else {}
    kind: Any = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    torch.manual_seed(seed)  # initializes the reward model's head
    options["attn_implementation"] = "sdpa" if name == "trl" else "flashmask"
    model = kind.from_pretrained(model_path, **options)
    options = OPTIONS[task] | {"tf32": False if device == "cuda" else None}
    args = arguments_of(config, device, max_steps=steps, logging_steps=10**9, seed=seed, **options)
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if task == "lora" else None
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    run = trainer(model, args=args, train_dataset=dataset_of(task), processing_class=tokenizer, peft_config=adapter)
    losses: list[torch.Tensor] = []
    step = run.training_step

    def recorded_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        losses.append(step(*args, **kwargs))
        return losses[-1]

    run.training_step = recorded_step
    with attention(attention_of(name, device)), deterministic():
        run.train()
    return torch.stack(losses).tolist()


def compare(task: str, seed: int, steps: int, device: str, *, again: bool = True) -> tuple[Rows, list[str]]:
    with tempfile.TemporaryDirectory() as path:
        data.build_model(path, initializer_range=0.02)  # for which the learning rates were chosen
        curves = {name: curve(task, name, seed, path, steps, device) for name in curves_of(task, device, again)}
    rows: Rows = [{"task": task, "seed": seed, "step": step + 1} for step in range(steps)]
    for step, row in enumerate(rows):
        row |= {name: f"{curves[name][step]:.9g}" if name in curves else "" for name in CURVES}
    return rows, [f"{task}, seed {seed}: {fault}" for fault in faults_of(curves, steps)]


def faults_of(curves: Mapping[str, list[float]], steps: int, bound: float = BOUND) -> Iterator[str]:
    """Yield the faults of the curves, losses by name."""
    skipping = "flashmask_portable" if "flashmask_portable" in curves else "flashmask"
    equal = {"flashmask_again": "flashmask", "flashmask_unskipped": skipping}
    tenth = max(1, steps // 10)
    for name, losses in curves.items():
        if len(losses) != steps:
            yield f"{name} has {len(losses)} steps, not {steps}"
            continue
        if name in equal and losses != curves[equal[name]]:
            pairs = zip(losses, curves[equal[name]], strict=True)
            first = next(step for step, (one, other) in enumerate(pairs, start=1) if one != other)
            yield f"{name} differs from {equal[name]} from step {first} on"
        early = zip(losses[:EARLY], curves["flashmask"][:EARLY], strict=True)
        differences = [abs(one - other) for one, other in early]
        if not all(difference <= bound for difference in differences):  # NaN is no number that max() finds
            most = np.max(differences)
            yield f"{name} differs from flashmask by up to {most:.1e} in {EARLY} steps, more than {bound}"
        first_mean, last_mean = statistics.mean(losses[:tenth]), statistics.mean(losses[-tenth:])
        if not last_mean < first_mean:
            yield f"the loss of {name} does not fall: {first_mean:.3f} at first, {last_mean:.3f} at last"


@program(__doc__, gpu=False, silent=True, tasks=Flag(TASKS, TASKS), seeds=Flag([1, 2, 3], kind=int), steps=200)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
    warnings.filterwarnings("ignore", category=FutureWarning)
    faults: list[str] = []
    for seed, task in product(a.seeds, a.tasks):
        start = time.perf_counter()
        found, wrong = compare(task, seed, a.steps, a.device, again=seed == a.seeds[0])
        yield found
        faults += wrong
        taken = f"{time.perf_counter() - start:.0f} s"
        print(f"{task}, seed {seed}: {taken}; {'; '.join(wrong) or 'no fault'}", flush=True)
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
