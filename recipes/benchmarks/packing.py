"""Time packing of a large dataset on one core, beside TRL's.

    python recipes/benchmarks/packing.py --csv packing.csv

TRL's "bfd" and `pack_dataset` each pack a dataset on disk in a process of their own. Documents have about 5,100 tokens
on average (log-normal, cut at the row). Columns: seconds, the peak memory over the memory before, and the fraction of
the rows that holds tokens.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import trl
from datasets import Dataset, load_from_disk
from datasets.utils.logging import disable_progress_bar
from harness import Rows, program

from flashmask_hf.collators import pack_dataset

LONG_ROW = 32_768

PACKERS: dict[str, Any] = {
    "TRL bfd": functools.partial(trl.pack_dataset, strategy="bfd"),  # pyright: ignore[reportPrivateImportUsage]
    "pack_dataset": pack_dataset,
}


def write_documents(path: str, count: int) -> int:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(5_240) - 0.5, 1.0, count), 1, LONG_ROW).astype(np.int64)
    tokens = generator.integers(0, 128_256, lengths.sum(), dtype=np.int32)
    edges = pa.array(np.cumsum([0, *lengths]), type=pa.int32())
    Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(edges, pa.array(tokens))})).save_to_disk(path)
    return len(tokens)


def memory(name: str) -> float:
    """Return an entry of this process's status on Linux, such as "VmHWM", the peak, in MiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def pack_large(path: str, tokens: int, packer: str) -> dict[str, object]:
    disable_progress_bar()
    pa.set_cpu_count(1)
    pack = PACKERS[packer]
    source: Any = load_from_disk(path)
    pack(source.select(range(10)), LONG_ROW)  # warms up
    before, start = memory("VmRSS"), time.perf_counter()
    packed = pack(source, LONG_ROW)
    seconds, peak = time.perf_counter() - start, memory("VmHWM")
    efficiency = round(tokens / (len(packed) * LONG_ROW), 5)
    return {"seconds": round(seconds, 2), "peak_mib": round(peak - before), "efficiency": efficiency}


@program(__doc__, gpu=False, documents=10_000)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    with tempfile.TemporaryDirectory() as path:
        tokens = write_documents(path, a.documents)
        for name in PACKERS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                figures = process.submit(pack_large, path, tokens, name).result()
            case = {"packer": name, "tokens_per_example": round(tokens / a.documents), "examples": a.documents}
            yield [{**case, "row_length": LONG_ROW, **figures}]


if __name__ == "__main__":
    main()
