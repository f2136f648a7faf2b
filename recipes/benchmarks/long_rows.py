"""Train on rows of hundreds of thousands of tokens on one GPU: speed, memory, and the longest row that fits.

    python recipes/benchmarks/long_rows.py --shape llama-3.1-8b --tokens 262144 544768 --csv long_rows.csv
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens longest --documents 100
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens 262144 --full

Each run is `PackedSFTTrainer` with `LongRows`, on random weights under autocast: adapters of rank 16 over bfloat16, or
all weights in float32 (`--full`). A step is one row of `--documents` documents of random lengths, or of equal lengths
with `--equal`.

"longest" trains one step of the longest row that fits by the measure of a short row, and where it does not, of a row
that is a twentieth shorter. Its speed is the speed of a first step, in which the host's memory is pinned.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from harness import GIB, Results, attempt, flags, free_memory, parsed, random_lengths, synchronize
from peft import LoraConfig
from shapes import SHAPES, arguments_of, build_model, tokenizer
from transformers import TrainerCallback
from trl import SFTConfig

from flashmask_hf.trainers import LongRows, PackedSFTTrainer

TRIALS = 3
MEASURED = ("steps", "seconds_per_step", "tokens_per_second", "peak_gib", "host_gib", "attention", "longest")


class Steps(TrainerCallback):
    """Times each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        synchronize()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def make_trainer(tokens: int, a: argparse.Namespace) -> PackedSFTTrainer:
    generator = torch.Generator().manual_seed(0)
    model = build_model(a.shape, a.device, full=a.full)
    rows = [
        {
            "input_ids": torch.randint(
                0, model.config.vocab_size, (tokens,), generator=generator, dtype=torch.int32
            ).numpy(),
            "seq_lengths": lengths_of(tokens, a.documents, None if a.equal else generator),
        }
        for _ in range(min(a.steps, 2))
    ]
    sizes = {"max_length": tokens, "max_steps": a.steps, "per_device_train_batch_size": 1, "logging_steps": 1}
    args = arguments_of(SFTConfig, a.device, learning_rate=1e-5, bf16=a.device == "cuda", **sizes)
    adapter = None if a.full else LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    data = Dataset.from_list(rows)
    return PackedSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter)


def lengths_of(tokens: int, documents: int, generator: torch.Generator | None) -> list[int]:
    """Return random lengths of a row's documents, or equal ones without a generator."""
    if generator is not None:
        return random_lengths(tokens, documents, generator)
    return [tokens * (i + 1) // documents - tokens * i // documents for i in range(documents)]


def longest_row(a: argparse.Namespace) -> int:
    """Return the longest row that fits, by measuring short ones, as a multiple of 1,024."""
    trainer = make_trainer(2**16, a)
    settings: Any = trainer.args
    settings.max_length = 2**40  # fits nowhere, so that no step follows
    kept = a.keep_attention if a.host_gib is None else None  # something is left to measure
    rows = LongRows(trainer, keep_attention=kept, host_gib=a.host_gib)
    trainer.add_callback(rows)
    try:
        trainer.train()
    except ValueError:
        if rows.longest is None:
            raise
    finally:
        rows.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the host's memory
    assert rows.longest is not None
    return rows.longest // 1024 * 1024


def train_longest(a: argparse.Namespace, results: Results) -> None:
    a = argparse.Namespace(**{**vars(a), "steps": 1})
    a.keep_attention = a.keep_attention or False  # a longer row fits without
    tokens = longest_row(a)
    for _ in range(TRIALS):
        free_memory()

        def fits(tokens: int = tokens) -> dict[str, object]:
            try:
                return train(tokens, a)
            except ValueError as error:  # what `LongRows` refuses is out of memory, too, as the host's can be now
                raise torch.OutOfMemoryError(str(error)) from error

        made = attempt(fits)
        found = described(tokens, a) | ({"tokens_per_second": made} if isinstance(made, str) else made[0])
        results.add([found])
        if not isinstance(made, str):
            return
        tokens = tokens * 19 // 20 // 1024 * 1024


def train(tokens: int, a: argparse.Namespace) -> dict[str, object]:
    trainer = make_trainer(tokens, a)
    rows = LongRows(trainer, keep_attention=a.keep_attention, host_gib=a.host_gib)
    steps = Steps()
    trainer.add_callback(rows)
    trainer.add_callback(steps)
    try:
        trainer.train()
    finally:
        rows.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the host's memory after an error, too
    measured = steps.seconds[1:] or steps.seconds
    seconds = statistics.median(measured)
    figures = len(measured), round(seconds, 3), round(tokens / seconds)
    peak = round(torch.cuda.max_memory_allocated() / GIB, 1) if a.device == "cuda" else ""
    host, attention = round((rows.host_bytes or 0) / GIB, 1), "kept" if rows.kept else "computed again"
    values = (*figures, peak, host, attention, rows.longest or "")
    return described(tokens, a) | dict(zip(MEASURED, values, strict=True))


def described(tokens: int, a: argparse.Namespace) -> dict[str, object]:
    case: dict[str, object] = {"shape": a.shape, "trained": "all" if a.full else "adapters", "tokens": tokens}
    case["documents"] = f"{a.documents} {'equal' if a.equal else 'random'}"
    return case | dict.fromkeys(MEASURED, "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tokens", nargs="+", default=["262144"], help='tokens of a row, or "longest"')
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="the first is not counted, unless it is the only one")
    parser.add_argument("--equal", action="store_true", help="documents of equal length")
    parser.add_argument("--keep_attention", type=int, choices=[0, 1], help="default: if it fits")
    parser.add_argument("--host_gib", type=float, help="host memory for checkpoints; default: what the GPU lacks")
    parser.add_argument("--full", action="store_true", help="train all weights, not adapters")
    a = parsed(parser, argv)
    if a.keep_attention is not None:
        a.keep_attention = bool(a.keep_attention)
    if a.device == "cpu":  # on which nothing is measured
        a.keep_attention, a.host_gib = a.keep_attention or False, a.host_gib or 0
    results = Results(a.csv)
    for wanted in a.tokens:
        if wanted == "longest":
            train_longest(a, results)
        else:
            results.add([train(int(wanted), a)])
        free_memory()


if __name__ == "__main__":
    main()
