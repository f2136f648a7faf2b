"""Read the results of the benchmarks, select and compare figures in them, and format cells and tables of pages."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes" / "benchmarks" / "results"

Row = dict[str, str]
Cell = Callable[[list[Row]], str]
"""What a column of a table shows of the rows of its line."""
Columns = dict[str, str | Cell]
"""Columns of a table by title; a text is the format of the first row of a line."""

RATE = "tokens_per_second"
NAMES = {
    "flashmask_triton": "flashmask, portable kernels",
    "keys": "flashmask, keys exchanged",
    "heads": "flashmask, heads exchanged",
    "heads_2": "flashmask, heads exchanged in two chunks",
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
    "trl_flex_attention_single": "FlexAttention, one by one",
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
    """Return the rows of a file in recipes/benchmarks/results, named without its suffix."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return tuple({key: Figure(value) for key, value in row.items()} for row in csv.DictReader(file))


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


def updates() -> list[Row]:
    """Return the rows of updates of GRPO under the names of `training.py`; peers run the padded batch."""
    more = {"task": "grpo", "setting": "eager"}
    return [
        row
        | {"implementation": "padded_" * (row["provider"] != "flashmask") + row["provider"], "length": row["prompt"]}
        | {RATE: row[f"update_{RATE}"], "peak_gib": row["update_peak_gib"], **more}
        for row in read_all("grpo_*")
    ]


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


def number(rows: Iterable[Row], column: str, **values: str) -> float:
    """Return the number in a column of the one row that has these values."""
    (row,) = select(rows, **values)
    return float(row[column])


def ratios(rows: Iterable[Row], column: str, ours: str, peer: str, *by: str) -> list[float]:
    """Return a provider's figures over a peer's, one for each case (columns `by`) that both have measured."""
    figures: dict[tuple[str, ...], dict[str, float]] = {}
    for row in timed(rows):
        figures.setdefault(tuple(row[name] for name in by), {})[row["provider"]] = float(row[column])
    return [case[ours] / case[peer] for case in figures.values() if ours in case and peer in case]


def name_of(provider: str) -> str:
    """Return how pages write a provider or a mask family."""
    plain = provider.removeprefix("padded_")
    name = NAMES.get(plain, plain.replace("_", " "))
    return name if plain == provider else name.split(",")[0].split(" (")[0] + ", padded"


def size_of(row: Row) -> str:
    """Return how pages write the size of a Llama: 1B or 8B."""
    return row["shape"].rpartition("-")[2].upper()


def width_of(row: Row) -> str:
    """Return the head_dim of a row, and of its values if they have another."""
    dim, v_dim = row["head_dim"], row.get("v_head_dim", row["head_dim"])
    return dim if dim == v_dim else f"{dim}/{v_dim}"


def spread(values: Sequence[float]) -> str:
    """Return the range of ratios and their median, or the ratio if there is only one."""
    if not values:
        return "not run"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f} ({middle})"


def cell(form: str, missing: str = "", **values: str) -> Cell:
    """Return a cell with the columns, such as "{tokens:,.0f}", of the row that has these values.

    Without a row or its figure it is `missing`. A row that was not timed shows the beginning of its `status`.
    """

    def shown(rows: list[Row]) -> str:
        found = select(rows, **values)
        if not found:
            return missing
        if not timed(found):
            return found[0].get("status", missing).partition(":")[0]
        try:
            return form.format_map(found[0])
        except ValueError:  # an empty figure
            return missing

    return shown


def groups(rows: Iterable[Row], *by: str) -> list[list[Row]]:
    """Return the rows in groups of equal values in the columns `by`, in order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(found.values())


def table(
    rows: Sequence[Row],
    lines: Sequence[str] | Sequence[list[Row]],
    columns: Mapping[str, str | Cell],
    command: str,
    *conditions: str,
) -> str:
    """Return a table in Markdown, and below it the conditions and the command of its rows.

    Args:
        rows: the rows of results.
        lines: the rows of each line, or the columns whose values are the same in a line.
        columns: title, and the format of a line's first row or the function that returns the cell.
        command: the command that measures the rows, without "python recipes/".
        *conditions: what else holds for all rows.
    """
    by = [name for name in lines if isinstance(name, str)]
    shown = [list(columns), ["---"] + ["---:"] * (len(columns) - 1)]
    for line in groups(rows, *by) if by else lines:
        forms = columns.values()
        shown.append([form.format_map(line[0]) if isinstance(form, str) else form(line) for form in forms])  # type: ignore[arg-type]
    text = "\n".join(f"| {' | '.join(line)} |" for line in shown)
    return f"\n\n{text}\n\n{measured(rows, command, *conditions)}\n\n"


def measured(rows: Sequence[Row], command: str, *more: str) -> str:
    """Return one line of conditions: hardware, what else holds, versions of peers, and the command that measures it."""
    first = rows[0]
    gpus, launch = int(first.get("gpus", 1)), "python"
    machine = "Two cores" if first["gpu"] == "cpu" else f"One {first['gpu'].replace(' HBM3', '')}, bfloat16"
    if gpus > 1:
        machine = f"{machine.replace('One', str(gpus))}, NCCL on one host"
        launch = "accelerate launch --config_file recipes/configs/accelerate_fsdp2_cp.yaml"
        if command.startswith("benchmarks/parallel.py") and "--task dpo" not in command:
            launch = f"torchrun --nproc-per-node {gpus}"
    if "processor" in first:
        machine = f"{first['cores']} cores ({first['processor']}), Python {first['python']}"
    packages = dict.fromkeys(row["version"] for row in rows if row.get("version"))
    return f"*{', '.join([machine, *more, *packages])}:* `{launch} recipes/{command}`"
