"""Train DPO or a reward model on the demo's data with this package's trainer and with stock TRL, and compare losses.

    python recipes/benchmarks/convergence.py --task dpo --steps 100 --csv convergence.csv

Both start from the same tiny Llama and see the same examples in the same order. Stock TRL repeats the question for each
answer, pads, and runs SDPA. The program exits with 1 if the losses of a step differ by more than `--bound`, or if
accuracy does not rise. It runs in float32, on the GPU if there is one.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import write_csv
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer, SharedQuestionDPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
import data

TRAINERS: dict[str, Any] = {
    "dpo": {"flashmask": (SharedQuestionDPOTrainer, DPOConfig), "trl": (DPOTrainer, DPOConfig)},
    "reward": {"flashmask": (MultiAnswerRewardTrainer, MultiAnswerRewardConfig), "trl": (RewardTrainer, RewardConfig)},
}
OPTIONS: dict[str, dict[str, Any]] = {"dpo": {"learning_rate": 5e-4, "beta": 0.5}, "reward": {"learning_rate": 1e-3}}
ACCURACY = {"dpo": "rewards/accuracies", "reward": "accuracy"}


def curve(task: str, provider: str, model_path: str, steps: int) -> list[dict[str, float]]:
    """Train with a provider, and return loss and accuracy of each step."""
    kind: Any = AutoModelForCausalLM if task == "dpo" else AutoModelForSequenceClassification
    labels = {} if task == "dpo" else {"num_labels": 1}
    attention = "flashmask" if provider == "flashmask" else "sdpa"
    torch.manual_seed(0)  # initializes the reward model's head
    model = kind.from_pretrained(model_path, attn_implementation=attention, **labels)
    trainer, config = TRAINERS[task][provider]
    args = config(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=4,
        max_length=512,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        tf32=False if torch.cuda.is_available() else None,
        disable_tqdm=True,
        seed=1,
        **OPTIONS[task],
    )
    run = trainer(
        model,
        args=args,
        train_dataset=data.preferences()["train"],
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )
    run.train()
    return [
        {"loss": entry["loss"], "accuracy": entry[ACCURACY[task]]}
        for entry in run.state.log_history
        if "loss" in entry and ACCURACY[task] in entry
    ]


def compare(task: str, steps: int) -> tuple[float, float, float, list[dict[str, object]]]:
    """Train with both providers.

    Returns:
        The largest difference of the losses of a step, this package's accuracy over the first and over the last tenth
        of the steps, and a row of figures per step.
    """
    with tempfile.TemporaryDirectory() as path:
        data.build_model(path, initializer_range=0.02)  # for which the learning rates were chosen
        ours, theirs = (curve(task, provider, path, steps) for provider in ("flashmask", "trl"))
    if len(ours) != steps or len(theirs) != steps:
        raise RuntimeError(f"expected {steps} logged steps, got {len(ours)} and {len(theirs)}")
    largest = max(abs(one["loss"] - other["loss"]) for one, other in zip(ours, theirs, strict=True))
    tenth = max(1, steps // 10)
    first, last = (statistics.mean(step["accuracy"] for step in part) for part in (ours[:tenth], ours[-tenth:]))
    rows: list[dict[str, object]] = [
        {
            "task": task,
            "step": step,
            **{f"{name}_{key}": value for name, entry in both.items() for key, value in entry.items()},
        }
        for step, both in enumerate(
            ({"flashmask": one, "trl": other} for one, other in zip(ours, theirs, strict=True)), start=1
        )
    ]
    return largest, first, last, rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TRAINERS, default="dpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bound", type=float, default=5e-3, help="largest difference of losses that passes")
    parser.add_argument("--csv", help="file to write the curves to")
    arguments = parser.parse_args()
    largest, first, last, rows = compare(arguments.task, arguments.steps)
    write_csv(arguments.csv, rows)
    print(f"largest difference of losses {largest:.1e}; accuracy {first:.3f} at first, {last:.3f} at last")
    if largest > arguments.bound or last <= first:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
