"""Train on rows of hundreds of thousands of tokens on one GPU: speed, memory, and the longest row that fits.

    python recipes/benchmarks/long_rows.py --shape llama-3.1-8b --tokens 262144 544768 --csv long_rows.csv
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens longest --documents 100 --seconds 300
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens 262144 --full

Each run is `PackedSFTTrainer` with `LongRows`, as `recipes/sft.py --long_context` makes it, on a model of random
weights: adapters of rank 16 on all linear layers without dropout, over weights in bfloat16; or, with `--full`, all
weights in float32; both under autocast. A step is one row of random tokens in `--documents` documents of random lengths
(paper, appendix A.2.1), or of equal ones with `--equal`.

"longest" measures what a short row needs, trains one step of the longest row that fits by that, and, where it does not
after all, of one that is a twentieth shorter, three times at most. Its tokens per second are those of a first step, in
which the host's memory is pinned. With `--seconds`, no step starts that would probably end later; more documents make
it shorter. Each row of the CSV is there as soon as it is measured, and one that did not fit says "out of memory".
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from harness import append_rows, attempt, random_lengths, synchronize
from peft import LoraConfig
from shapes import SHAPES
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig

from flashmask_hf.trainers import LongRows, PackedSFTTrainer

TRIALS = 3
OPERATIONS_A_SECOND = 3.8e14
"""What the rows of docs/long_rows.md do at least, by the count of `seconds_of_step`."""


class Steps(TrainerCallback):
    """The seconds of each step, from the end of what the GPU did before to the end of the step."""

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


def make_trainer(tokens: int, arguments: argparse.Namespace) -> PackedSFTTrainer:
    """Build a trainer of a model with random weights on rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(**{**SHAPES[arguments.shape], "max_position_embeddings": max(tokens, 2048)})
    torch.manual_seed(0)
    with torch.device(arguments.device):
        dtype = torch.float32 if arguments.full else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=dtype)
    rows = [
        {
            "input_ids": torch.randint(0, config.vocab_size, (tokens,), generator=generator, dtype=torch.int32).numpy(),
            "seq_lengths": lengths_of(tokens, arguments.documents, None if arguments.equal else generator),
        }
        for _ in range(min(arguments.steps, 2))
    ]
    args = SFTConfig(
        tempfile.mkdtemp(),
        max_length=tokens,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=arguments.device == "cuda",
        use_cpu=arguments.device == "cpu",
    )
    adapter = None if arguments.full else LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    return PackedSFTTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=adapter
    )


def lengths_of(tokens: int, documents: int, generator: torch.Generator | None) -> list[int]:
    """Return the lengths of a row's documents: random ones, or without a generator as equal as can be."""
    if generator is not None:
        return random_lengths(tokens, documents, generator)
    return [tokens * (i + 1) // documents - tokens * i // documents for i in range(documents)]


def longest_row(arguments: argparse.Namespace) -> int:
    """Return the tokens of the longest row that fits by measuring short ones, down to a multiple of 1,024."""
    trainer = make_trainer(2**16, arguments)
    settings: Any = trainer.args
    settings.max_length = 2**40  # fits nowhere, so that no step follows
    kept = arguments.keep_attention if arguments.host_gib is None else None  # something is left to measure
    rows = LongRows(trainer, keep_attention=kept, host_gib=arguments.host_gib)
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


def train_longest(arguments: argparse.Namespace, results: list[dict[str, object]], end: float) -> None:
    """Train a step of the longest row that fits, and append a row of figures for each trial."""
    arguments = argparse.Namespace(**{**vars(arguments), "steps": 1})
    arguments.keep_attention = arguments.keep_attention or False  # a longer row fits without
    tokens = longest_row(arguments)
    for _ in range(TRIALS):
        free_memory()
        expected = seconds_of_step(tokens, arguments)
        if time.monotonic() + expected > end:
            print(f"A step of {tokens:,} tokens would take about {expected:.0f} s: raise --seconds or --documents")
            return
        made = attempt(functools.partial(train_if_it_fits, tokens, arguments))
        found = described(tokens, arguments) | ({"tokens_per_second": made} if isinstance(made, str) else made[0])
        append_rows(arguments.csv, results, [found])
        if not isinstance(made, str):
            return
        tokens = tokens * 19 // 20 // 1024 * 1024


def train_if_it_fits(tokens: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Train, and return a row of figures; what `LongRows` refuses is out of memory, too, as the host's can be now."""
    try:
        return train(tokens, arguments)
    except ValueError as error:
        raise torch.OutOfMemoryError(str(error)) from error


def seconds_of_step(tokens: int, arguments: argparse.Namespace) -> float:
    """Return about the seconds of a step on an H100 or H200, from the operations of weights and attention."""
    shape = SHAPES[arguments.shape]
    wide = shape["hidden_size"]
    layer = wide * (2.5 * wide + 3 * shape["intermediate_size"])  # of grouped queries
    weights = shape["num_hidden_layers"] * layer + wide * shape["vocab_size"]
    generator = None if arguments.equal else torch.Generator().manual_seed(0)
    pairs = sum(n * n / 2 for n in lengths_of(tokens, arguments.documents, generator))
    # Two operations for each weight and token, and four for each pair, head and dimension; four times, for forward,
    # recomputation and backward.
    operations = 4 * (2 * weights * tokens + 4 * shape["num_hidden_layers"] * wide * pairs)
    return operations / OPERATIONS_A_SECOND


def train(tokens: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Train, and return a row of figures."""
    trainer = make_trainer(tokens, arguments)
    rows = LongRows(trainer, keep_attention=arguments.keep_attention, host_gib=arguments.host_gib)
    steps = Steps()
    trainer.add_callback(rows)
    trainer.add_callback(steps)
    try:
        trainer.train()
    finally:
        rows.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the host's memory after an error, too
    measured = steps.seconds[1:] or steps.seconds
    seconds = statistics.median(measured)
    return described(tokens, arguments) | {
        "steps": len(measured),
        "seconds_per_step": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if arguments.device == "cuda" else "",
        "host_gib": round((rows.host_bytes or 0) / 2**30, 1),
        "attention": "kept" if rows.kept else "computed again",
        "longest": rows.longest or "",
    }


def described(tokens: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Return all columns of a row of figures, empty but for those that say what was run."""
    columns = ("steps", "seconds_per_step", "tokens_per_second", "peak_gib", "host_gib", "attention", "longest")
    return {
        "shape": arguments.shape,
        "trained": "all" if arguments.full else "adapters",
        "tokens": tokens,
        "documents": f"{arguments.documents} {'equal' if arguments.equal else 'random'}",
        **dict.fromkeys(columns, ""),
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tokens", nargs="+", default=["262144"], help='tokens of a row, or "longest"')
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="the first is not counted, unless it is the only one")
    parser.add_argument("--equal", action="store_true", help="documents of equal length")
    parser.add_argument("--keep_attention", type=int, choices=[0, 1], help="default: if it fits")
    parser.add_argument("--host_gib", type=float, help="host memory for checkpoints; default: what the GPU lacks")
    parser.add_argument("--full", action="store_true", help="train all weights, not adapters")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--csv", help="file to write the figures to")
    parser.add_argument("--seconds", type=float, default=math.inf, help='time by which "longest" ends')
    arguments = parser.parse_args()
    if arguments.keep_attention is not None:
        arguments.keep_attention = bool(arguments.keep_attention)
    start = time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("a GPU is needed; --device cpu --shape tiny only shows that the program runs")
    if arguments.device == "cpu":  # on which nothing is measured
        arguments.keep_attention, arguments.host_gib = arguments.keep_attention or False, arguments.host_gib or 0
    results: list[dict[str, object]] = []
    for wanted in arguments.tokens:
        if wanted == "longest":
            train_longest(arguments, results, start + arguments.seconds)
        else:
            append_rows(arguments.csv, results, [train(int(wanted), arguments)])
        free_memory()


def free_memory() -> None:
    """Free what a finished trainer held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
