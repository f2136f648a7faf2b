"""Time packing on one core, and measure the packing of a large dataset beside TRL's.

    python recipes/benchmarks/packing.py --csv packing.csv

The first rows time packing from the Python lists of a dataset to the batch of a model, in tokens per second. Every
example has 1,000 tokens: a plain document; a shared question with two or six answers; a tree of three levels; and for
the collator and `pack_dataset`, a document with labels. The time of `pack_dataset` includes building its Dataset.
Figures are medians of several repeats after a warm-up. The program exits with 1 if a packer is slower than `--bar`
tokens per second.

The last rows pack a dataset on disk, of `--documents` documents of about 5,100 tokens on average (a log-normal
distribution, cut at the row), each packer in a process of its own: TRL's "bfd", and `pack_dataset`, also with a larger
batch. They give the seconds, the peak memory over that before packing (pages of the source's file included), the size
of the rows on disk, the fraction of the rows that holds tokens, and the seconds to the first row of a stream.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import trl
from datasets import Dataset, load_from_disk
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


LONG_ROW = 32_768
"""Number of tokens of a row of the large dataset."""


def write_documents(path: str, count: int) -> int:
    """Write a dataset of random documents to `path`; return the number of its tokens."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(5_240) - 0.5, 1.0, count), 1, LONG_ROW).astype(np.int64)
    tokens = generator.integers(0, 128_256, lengths.sum(), dtype=np.int32)
    edges = pa.array(np.cumsum([0, *lengths]), type=pa.int32())
    Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(edges, pa.array(tokens))})).save_to_disk(path)
    return len(tokens)


def memory(name: str) -> float:
    """Return an entry of this process's status on Linux, such as "VmHWM", the peak of its resident memory, in MiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def pack_large(path: str, tokens: int, options: dict[str, Any] | None) -> dict[str, object]:
    """Pack the dataset at `path` and return the figures; `options` are of `pack_dataset`, None is TRL's packing."""
    disable_progress_bar()
    pa.set_cpu_count(1)

    def pack(dataset: Any) -> Any:
        if options is None:
            return trl.pack_dataset(dataset, LONG_ROW, strategy="bfd")  # pyright: ignore[reportPrivateImportUsage]
        return pack_dataset(dataset, LONG_ROW, **options)

    source: Any = load_from_disk(path)
    pack(source.select(range(10)))  # warms up
    before, start = memory("VmRSS"), time.perf_counter()
    packed = pack(source)
    seconds, peak = time.perf_counter() - start, memory("VmHWM")
    start = time.perf_counter()
    next(iter(pack(source.to_iterable_dataset())))
    first = time.perf_counter() - start
    files = [Path(file["filename"]) for file in packed.cache_files]
    figures = {
        "tokens_per_second": round(tokens / seconds),
        "seconds": round(seconds, 2),
        "peak_mib": round(peak - before),
        "disk_mib": round(sum(file.stat().st_size for file in files) / 2**20),
        "efficiency": round(tokens / (len(packed) * LONG_ROW), 5),
        "first_streamed_row_seconds": round(first, 3),
    }
    for file in files:
        file.unlink()
    return figures


def large_rows(count: int) -> list[dict[str, object]]:
    """Measure every packer on the large dataset."""
    packers = {"TRL bfd": None, "pack_dataset": {}, "pack_dataset, batch_size=10,000": {"batch_size": 10_000}}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as path:
        tokens = write_documents(path, count)
        for name, options in packers.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                figures = process.submit(pack_large, path, tokens, options).result()
            rows.append(
                {
                    "packer": name,
                    "tokens_per_example": round(tokens / count),
                    "examples": count,
                    "row_length": LONG_ROW,
                    **figures,
                }
            )
    return rows


LARGE_FIGURES = ("seconds", "peak_mib", "disk_mib", "efficiency", "first_streamed_row_seconds")
"""Columns that only the large dataset has."""


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=256, help="number of examples packed together")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bar", type=float, default=1e6, help="fewest tokens per second that pass")
    parser.add_argument("--documents", type=int, default=10_000, help="documents of the large dataset")
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
                **dict.fromkeys(LARGE_FIGURES, ""),
            }
        )
        if rate < arguments.bar:
            slow.append(name)
    write_csv(arguments.csv, rows + large_rows(arguments.documents))
    if slow:
        raise SystemExit(f"below {arguments.bar:,.0f} tokens per second: {', '.join(slow)}")


if __name__ == "__main__":
    main()
