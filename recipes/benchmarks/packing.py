"""Time packing on one core, from the Python lists of a dataset to the batch of a model, in tokens per second.

    python recipes/benchmarks/packing.py --csv packing.csv

Every example has 1,000 tokens: a plain document; a shared question with two or six answers; a tree of three levels; and
for the collator and `pack_dataset`, a document with labels. The time of `pack_dataset` includes building its Dataset.
Figures are medians of several repeats after a warm-up. The program exits with 1 if a packer is slower than `--bar`
tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from harness import write_csv

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, Forest, pack_dataset, pack_forests

TOKENS = 1000
"""Number of tokens of each example."""

ROW = 8192
"""Number of tokens of a row."""


def random_examples(count: int, *lengths: int) -> list[list[list[int]]]:
    """Draw `count` examples, each a list of random token ids per length."""
    generator = np.random.default_rng(0)
    return [[generator.integers(0, 128_256, length).tolist() for length in lengths] for _ in range(count)]


def packers(count: int) -> dict[str, tuple[Callable[[Any], object], Any]]:
    """Return the functions to time, each with its examples."""
    plain = [document for (document,) in random_examples(count, TOKENS)]
    labelled = [{"input_ids": document, "labels": document} for document in plain]
    collate = DataCollatorForPackedLanguageModeling(max_length=ROW)

    def question(example: list[list[int]]) -> Forest:
        return Forest.shared_question(example[0], example[1:])

    def tree(example: list[list[int]]) -> Forest:
        root, left, right, a, b, c, d = example
        return Forest.from_trees((root, [(left, [a, b]), (right, [c, d])]))

    return {
        "documents": (lambda given: packed(given, Forest.from_trees), plain),
        "2 answers": (lambda given: packed(given, question), random_examples(count, 400, 300, 300)),
        "6 answers": (lambda given: packed(given, question), random_examples(count, 400, *[100] * 6)),
        "3 levels": (lambda given: packed(given, tree), random_examples(count, 300, *[150] * 2, *[100] * 4)),
        "DataCollatorForPackedLanguageModeling": (collate, labelled),
        "pack_dataset": (lambda given: pack_dataset(Dataset.from_list(given), ROW), labelled),
    }


def packed(examples: list[Any], forest: Callable[[Any], Forest]) -> object:
    """Pack examples into the batch of a model; `forest` builds the tree of an example."""
    return pack_forests([forest(example) for example in examples], ROW).batch()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=256, help="number of examples packed together")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bar", type=float, default=1e6, help="fewest tokens per second that pass")
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    disable_progress_bar()
    rows: list[dict[str, object]] = []
    slow: list[str] = []
    for name, (pack, examples) in packers(arguments.examples).items():
        seconds: list[float] = []
        for _ in range(arguments.repeats + 1):
            start = time.perf_counter()
            pack(examples)
            seconds.append(time.perf_counter() - start)
        rate = arguments.examples * TOKENS / statistics.median(seconds[1:])  # the first warms up
        rows.append(
            {
                "packer": name,
                "tokens_per_example": TOKENS,
                "examples": arguments.examples,
                "row_length": ROW,
                "tokens_per_second": round(rate),
            }
        )
        if rate < arguments.bar:
            slow.append(name)
    write_csv(arguments.csv, rows)
    if slow:
        raise SystemExit(f"below {arguments.bar:,.0f} tokens per second: {', '.join(slow)}")


if __name__ == "__main__":
    main()
