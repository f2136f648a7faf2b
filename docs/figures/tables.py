"""Form of the tables of the pages: Markdown, with a line of conditions below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from results import Row

CPU = "Two cores"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], conditions: str) -> str:
    """Return a table in Markdown, with its line of conditions below."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{conditions}\n\n"


def measured(rows: Sequence[Row], command: str, *more: str) -> str:
    """Return one line of conditions: hardware, versions, what else holds, and the command that measures it."""
    first = rows[0]
    gpus, launch = int(first.get("gpus", 1)), "python"
    machine = CPU if first["gpu"] == "cpu" else f"One {first['gpu'].replace(' HBM3', '')}, bfloat16"
    if gpus > 1:
        machine = f"{machine.replace('One', str(gpus))}, NCCL on one host"
        launch = f"torchrun --nproc-per-node {gpus}"
    versions = f"torch {first['torch'].split('+')[0]}, Triton {first['triton']}"
    text = [machine, *more, versions, f"transformers {first['transformers']}"]
    return f"*{', '.join(text)}:* `{launch} recipes/{command}`"
