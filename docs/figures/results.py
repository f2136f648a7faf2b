"""Read the results of the benchmarks, and select and compare figures in them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes" / "benchmarks" / "results"

Row = dict[str, str]
Key = tuple[str, ...]

NAMES = {
    "flashmask": "flashmask",
    "flashmask_triton": "flashmask, portable kernels",
    "flashmask_unshared": "flashmask, packed, not shared",
    "flashmask_kept": "flashmask, attention kept",
    "flashmask_heads": "flashmask, exchange of heads",
    "whole": "a row on each GPU, not split",
    "sdpa_cp": "torch's context parallelism, SDPA",
    "flex_attention": "FlexAttention (Triton)",
    "flex_attention_single": "FlexAttention, one by one",
    "flex_flash": "FlexAttention (FLASH)",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (SDPA)",
    "cudnn_flex": "cuDNN flex_attention",
    "sdpa": "SDPA",
    "flash_attention_2": "FlashAttention-2, varlen",
    "flash_attention_3": "FlashAttention-3, varlen",
    "flash_attention_4": "FlashAttention-4, varlen",
    "sdpa_single": "SDPA, one by one",
    "hash_16": "16 hash buckets",
    "drop_30": "30% of queries and keys dropped",
    "drop_50": "50% dropped",
}
MASKS = {"qk_sparse": "QK-sparse", "prefix_lm_document": "prefix LM document", "prefix_lm_causal": "prefix LM causal"}


@cache
def read(name: str) -> tuple[Row, ...]:
    """Return the rows of a file in recipes/benchmarks/results, named without its suffix."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return tuple(csv.DictReader(file))


def read_all(pattern: str) -> tuple[Row, ...]:
    """Return the rows of all files whose names without the suffix match a pattern, which may be none."""
    return tuple(row for path in sorted(RESULTS.glob(f"{pattern}.csv")) for row in read(path.stem))


def select(rows: Iterable[Row], **values: str) -> list[Row]:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row[column] == value for column, value in values.items())]


def number(rows: Iterable[Row], column: str, **values: str) -> float:
    """Return the number in a column of the one row that has these values."""
    (row,) = select(rows, **values)
    return float(row[column])


def maybe(rows: Iterable[Row], column: str, form: str, **values: str) -> str:
    """Return the number in a column of the row that has these values, formatted; empty where it was not measured."""
    found = [row[column] for row in select(rows, **values) if row[column]]
    return form.format(float(found[0])) if found else ""


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have figures; results without the column `status` have them in every row."""
    return [row for row in rows if row.get("status", "timed") == "timed"]


def trained(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `row_lengths.py` with figures of measured steps; others have those of a first step or none."""
    return [row for row in rows if row["peak_gib"] and row["steps"] != "0"]


def cell(rows: Iterable[Row], columns: Sequence[str], **values: str) -> str:
    """Return the rounded numbers in some columns of the row that has these values, or the word for why there are none.

    The words are those that the column `status` begins with ("cannot", "failed", "differs", "not installed"), and "not
    run" where there is no row.
    """
    found = select(rows, **values)
    if not found:
        return "not run"
    if not timed(found):
        return found[0]["status"].partition(":")[0]
    return " / ".join(f"{float(found[0][column]):.0f}" for column in columns)


def ratios(rows: Iterable[Row], column: str, ours: str, peer: str, by: Key) -> list[float]:
    """Return a provider's figures over a peer's, one for each case that both have measured."""
    figures: dict[Key, dict[str, float]] = {}
    for row in timed(rows):
        figures.setdefault(tuple(row[name] for name in by), {})[row["provider"]] = float(row[column])
    return [case[ours] / case[peer] for case in figures.values() if ours in case and peer in case]


def spread(values: Sequence[float]) -> str:
    """Return the range of ratios of speed and their mean, as text."""
    return (
        f"{min(values):.2f} to {max(values):.2f} times as fast (geometric mean {statistics.geometric_mean(values):.2f})"
    )


def share(values: Sequence[float]) -> str:
    """Return the range of changes that ratios of times stand for, in percent."""
    low, high = (round(100 * (value - 1)) for value in (min(values), max(values)))
    if high <= 0:
        return f"{-high} to {-low}% less"
    return f"{low} to {high}% more" if low >= 0 else f"{-low}% less to {high}% more"


def name_of(provider: str) -> str:
    """Return how pages write a provider."""
    return NAMES.get(provider, provider)


def mask_of(mask: str) -> str:
    """Return how pages write a mask family."""
    return MASKS.get(mask, mask.replace("_", " "))
