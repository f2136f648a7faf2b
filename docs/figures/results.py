"""Read the results of the benchmarks, and select and compare figures in them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes" / "benchmarks" / "results"

Row = dict[str, str]
RATE = "tokens_per_second"
NAMES = {
    "flashmask_triton": "flashmask, portable kernels",
    "keys": "flashmask, keys exchanged",
    "heads": "flashmask, heads exchanged",
    "whole": "a row on each GPU, not split",
    "sdpa_cp": "torch's context parallelism, SDPA",
    "flex_attention": "FlexAttention (Triton)",
    "flex_flash": "FlexAttention (FLASH)",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (SDPA)",
    "cudnn_flex": "cuDNN flex_attention",
    "sdpa": "SDPA",
    "sdpa_dense": "SDPA, dense mask",
    "trl_flashmask": "flashmask, not shared",
    "trl_sdpa": "SDPA, one batch",
    "trl_sdpa_single": "SDPA, one by one",
    "trl_flash_attention_4": "FlashAttention-4, one batch",
    **{f"flash_attention_{n}": f"FlashAttention-{n}, varlen" for n in (2, 3, 4)},
    "hash_16": "16 hash buckets",
    "drop_30": "30% of queries and keys dropped",
    "drop_50": "50% dropped",
    "qk_sparse": "QK-sparse",
    "prefix_lm_document": "prefix LM document",
    "prefix_lm_causal": "prefix LM causal",
}
SETTINGS = {"eager": "plain", "kept": "attention kept", "liger": "Liger", "kept+liger": "attention kept, Liger",
            "compiled": "compiled", "compiled+kept": "compiled, attention kept"}  # fmt: skip
TASKS = {"sft": "SFT", "lora": "LoRA", "dpo": "DPO", "reward": "reward model", "orpo": "ORPO", "kto": "KTO"}


class Figure(str):
    """A text of a CSV file; a format of numbers, such as in "{tokens:,.0f}", reads it as a number."""

    def __format__(self, form: str) -> str:
        return format(float(self), form) if form else str(self)


@cache
def read(name: str) -> tuple[Row, ...]:
    """Return the rows of a file in recipes/benchmarks/results, named without its suffix.

    Figures of updates of GRPO have the names of `training.py`, and their peers run the padded batch.
    """
    with open(RESULTS / f"{name}.csv", newline="") as file:
        rows: list[Row] = [
            {k.removeprefix("update_"): Figure(x) for k, x in row.items()} for row in csv.DictReader(file)
        ]
    for row in rows:
        padded = "padded_" * (name.startswith("grpo_") and row["provider"] != "flashmask")
        row.setdefault("implementation", Figure(padded + row.get("provider", "")))
        row.setdefault("setting", Figure("eager"))
    return tuple(rows)


def read_all(pattern: str) -> list[Row]:
    """Return the rows of all files whose names without the suffix match a pattern, which may be none."""
    return [row for path in sorted(RESULTS.glob(f"{pattern}.csv")) for row in read(path.stem)]


def select(rows: Iterable[Row], **values: str) -> list[Row]:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row.get(column) == value for column, value in values.items())]


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have figures: `status` says "timed", and a rate is a number."""
    return [row for row in rows if row.get("status", "timed") == "timed" and row.get(RATE, "0").isdigit()]


def trained(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `training.py` with measured steps; others have only a first step, or none."""
    return [row for row in timed(rows) if row["peak_gib"] and row.get("steps") != "0"]


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with rates, fastest first, plain or in a setting that a peer has run, attention kept or not."""
    measured = sorted(timed(rows), key=lambda row: -float(row[RATE]))
    peers = {"eager"} | {row["setting"] for row in measured if row["implementation"] != "flashmask"}
    plain = {"kept": "eager", "kept+liger": "liger", "compiled+kept": "compiled"}
    return [row for row in measured if plain.get(row["setting"], row["setting"]) in peers]


def fastest(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Return the fastest row of flashmask, and the fastest one that is not of this package."""
    measured = comparable(rows)
    others = (row for row in measured if row["implementation"] != "flashmask")
    return select(measured, implementation="flashmask")[0], next(others)


def gain(rows: Iterable[Row]) -> float:
    """Return the speed of flashmask over the fastest other way."""
    ours, other = fastest(rows)
    return float(ours[RATE]) / float(other[RATE])


def common_length(rows: Sequence[Row]) -> str:
    """Return the longest row at which all implementations that ever ran have figures."""
    ran = trained(rows)
    cases = {case[0]["length"]: len({row["implementation"] for row in case}) for case in groups(ran, "length")}
    return max((length for length, count in cases.items() if count == max(cases.values())), key=int)


def name_of(provider: str) -> str:
    """Return how pages write a provider or a mask family."""
    plain = provider.removeprefix("padded_")
    name = NAMES.get(plain, plain.replace("_", " "))
    return name if plain == provider else name.split(",")[0].split(" (")[0] + ", padded"


def size_of(row: Row) -> str:
    """Return how pages write the size of a Llama: 1B or 8B."""
    return row["shape"].rpartition("-")[2].upper()


def groups(rows: Iterable[Row], *by: str) -> list[list[Row]]:
    """Return the rows in groups of equal values in the columns `by`, in order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(found.values())


def ordered(rows: Iterable[Row], *by: str) -> list[list[Row]]:
    """Return the `groups` in the order of the columns `by`, whole numbers by their value."""
    return sorted(groups(rows, *by), key=lambda case: [int(x) if x.isdigit() else x for x in map(case[0].get, by)])
