"""Draw the figures of the papers from the results of the benchmarks, and print the table of one.

    cd recipes/benchmarks
    python plots.py results/attention_h200.csv --sweep results/sweep_h200.csv --out results
    python plots.py --sparse results/sparse_attention_h200.csv --out results
    python plots.py --grpo results/grpo_h100.csv --out results
    python plots.py --row-lengths results/row_lengths_h200.csv --out results

The last one also prints its figures as a table in Markdown.

Figures of the FlashMask paper: `attention_D_S.png`, TFLOP/s by mask and provider (figure 5); `sparsity.png`, latency
against sparsity with a linear fit and its R^2, which is also printed (figure 4a); and `mask_memory.png`, memory of the
mask against the length of the row (figure 4b). Figures 3 and 7 of Pagliardini et al. (2023): `sparse.png`, time of
hash-sparse and QK-sparse attention against the length of the row. `grpo_MODEL.png`: tokens per second of an update of
GRPO relative to padded SDPA, and its peak memory. `row_lengths_SHAPE.png`: tokens per second and peak memory of
training against the length of the row (figures 2 and 7 of the FlashMask paper).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

Rows = list[dict[str, str]]


def read(path: str) -> Rows:
    """Read the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _unique(rows: Rows, name: str) -> list[str]:
    """Return the distinct values of a column, in order."""
    return list(dict.fromkeys(row[name] for row in rows))


def _conditions(rows: Rows) -> str:
    """Return a line with the GPU, versions and commits that the rows were measured on."""
    row = rows[0]
    commits = " and ".join(_unique(rows, "commit"))
    return f"{row['gpu']}, bfloat16, torch {row['torch'].split('+')[0]}, Triton {row['triton']}, commit {commits}"


def bars(rows: Rows, out: Path) -> None:
    """Draw a bar chart for each head_dim and length: TFLOP/s of forward and backward together."""
    for dim in _unique(rows, "head_dim"):
        for length in _unique(rows, "length"):
            shown = [row for row in rows if row["head_dim"] == dim and row["length"] == length]
            if not shown:
                continue
            families, providers = _unique(shown, "mask"), _unique(shown, "provider")
            figure, axes = plt.subplots(figsize=(14, 4.5))
            width = 0.8 / len(providers)
            for i, provider in enumerate(providers):
                figures = {row["mask"]: float(row["both_tflops"]) for row in shown if row["provider"] == provider}
                places = [families.index(family) + (i - (len(providers) - 1) / 2) * width for family in figures]
                axes.bar(places, list(figures.values()), width, label=provider)
            axes.set_xticks(range(len(families)), families, rotation=20, ha="right")
            axes.set_ylabel("TFLOP/s, forward + backward")
            axes.set_ylim(0, 1.15 * max(float(row["both_tflops"]) for row in shown))
            axes.set_title(f"{int(length) // 1024}K tokens, head_dim {dim}: {_conditions(shown)}", fontsize=10)
            axes.legend(ncols=len(providers), fontsize=8)
            figure.tight_layout()
            figure.savefig(out / f"attention_{dim}_{length}.png", dpi=100)
            plt.close(figure)


def latency(rows: Rows, out: Path) -> None:
    """Plot milliseconds against sparsity with a linear fit, and print its R^2."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for provider in _unique(rows, "provider"):
        shown = [row for row in rows if row["provider"] == provider]
        x = np.array([float(row["sparsity"]) for row in shown])
        y = np.array([float(row["forward_ms"]) + float(row["backward_ms"]) for row in shown])
        slope, offset = np.polyfit(x, y, 1)
        r_squared = 1 - ((y - slope * x - offset) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        print(f"{provider}: R^2 = {r_squared:.4f}")
        points = axes.plot(x, y, "o", label=f"{provider}, $R^2$ = {r_squared:.4f}")
        axes.plot(x, slope * x + offset, color=points[0].get_color(), linewidth=1)
    axes.set_xlabel("sparsity (hidden 128 x 128 tiles)")
    axes.set_ylabel("ms, forward + backward")
    axes.set_title(f"causal documents, {rows[0]['length']} tokens, head_dim {rows[0]['head_dim']}: {rows[0]['gpu']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "sparsity.png", dpi=100)
    plt.close(figure)


def memory(rows: Rows, out: Path) -> None:
    """Plot the memory of each provider's largest mask against the length of the row."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for provider in _unique(rows, "provider"):
        largest: dict[int, float] = {}
        for row in rows:
            if row["provider"] == provider and float(row["mask_mib"]) > 0:
                length = int(row["length"])
                largest[length] = max(largest.get(length, 0.0), float(row["mask_mib"]))
        if largest:
            axes.plot(sorted(largest), [largest[length] for length in sorted(largest)], "o-", label=provider)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("peak MiB while making the mask")
    axes.set_title(_conditions(rows).replace(", commit", ",\ncommit"), fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "mask_memory.png", dpi=100)
    plt.close(figure)


def runtimes(rows: Rows, out: Path) -> None:
    """Plot milliseconds against the length of the row: hash-sparse attention left, QK-sparse attention right."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, prefix, title in zip(panels, ("hash", "drop"), ("hash buckets", "percent dropped"), strict=True):
        for provider in _unique(rows, "provider"):
            shown = [row for row in rows if row["provider"] == provider]
            lengths, times = [int(row["length"]) for row in shown], [float(row["both_ms"]) for row in shown]
            if provider.startswith(prefix):
                axes.plot(lengths, times, "o-", label=provider)
            elif not provider.startswith(("hash", "drop")):
                axes.plot(lengths, times, ".--", color={"sdpa": "black"}.get(provider), alpha=0.6, label=provider)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens in a row")
        axes.set_title(title)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("ms, forward + backward, sorting and moving included")
    first = rows[0]
    shape = f"B = {first['batch']}, H = {first['heads']}, D = {first['head_dim']}"
    figure.suptitle(f"{shape}: {_conditions(rows)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(out / "sparse.png", dpi=100)
    plt.close(figure)


def rollouts(rows: Rows, out: Path) -> None:
    """Draw two bar charts for each model: tokens per second of an update relative to SDPA, and its peak memory.

    A provider that ran out of memory has no bar, and without SDPA there is nothing to relate to.
    """
    case_columns = ("groups", "generations", "prompt", "completion")
    for model in _unique(rows, "model"):
        ours = [row for row in rows if row["model"] == model]
        settings = dict.fromkeys((row["checkpointing"], row["compiled"]) for row in ours)
        for checkpointing, compiled in settings:
            shown = [row for row in ours if (row["checkpointing"], row["compiled"]) == (checkpointing, compiled)]
            cases = list(dict.fromkeys(tuple(row[name] for name in case_columns) for row in shown))
            providers = _unique(shown, "provider")
            figure, panels = plt.subplots(1, 2, figsize=(14, 4.5))
            width = 0.8 / len(providers)
            labels = ("tokens/s of an update, relative to padded SDPA", "peak GiB of an update")
            for axes, name, label in zip(panels, ("update_against_sdpa", "update_peak_gib"), labels, strict=True):
                for i, provider in enumerate(providers):
                    figures = {
                        tuple(row[column] for column in case_columns): float(row[name])
                        for row in shown
                        if row["provider"] == provider and row[name]
                    }
                    places = [cases.index(case) + (i - (len(providers) - 1) / 2) * width for case in figures]
                    drawn = axes.bar(places, list(figures.values()), width, label=provider)
                    axes.bar_label(drawn, fmt="%.3g", fontsize=7)
                axes.set_xticks(range(len(cases)), ["{2}:{3}\n{0} x {1}".format(*case) for case in cases])
                axes.set_xlabel("tokens of the prompt : longest completion; groups x completions of a micro-batch")
                axes.set_ylabel(label)
            panels[0].axhline(1, color="black", linewidth=0.8)
            panels[0].legend(fontsize=8)
            trained = f"LoRA of rank {shown[0]['lora']}" if shown[0]["lora"] != "0" else "all weights"
            setting = f"{model}, {trained}, gradient checkpointing {checkpointing}, compilation {compiled}"
            figure.suptitle(f"{setting}: {_conditions(shown)}", fontsize=10)
            figure.tight_layout()
            suffix = "" if checkpointing == "on" else "_no_checkpointing"
            suffix += "_compiled" if compiled == "on" else ""
            figure.savefig(out / f"grpo_{model}{suffix}.png", dpi=100)
            plt.close(figure)


def _number(text: str) -> float | None:
    """Return a figure, or None for a cell that says why there is none."""
    try:
        return float(text)
    except ValueError:
        return None


def _trained(rows: Rows, task: str) -> str:
    """Return what a task of `row_lengths.py` trained."""
    (trained,) = {row["trained"] for row in rows if row["task"] == task}
    return {"all": "all weights"}.get(trained, trained)


def row_lengths(rows: Rows, out: Path) -> None:
    """Draw a chart for each shape: a column per task, tokens per second above and peak memory below.

    A cross at the longest length that ran says that the next one was out of memory.
    """
    for shape in _unique(rows, "shape"):
        ours = [row for row in rows if row["shape"] == shape]
        tasks, names = _unique(ours, "task"), _unique(rows, "implementation")
        figure, panels = plt.subplots(2, len(tasks), figsize=(3.6 * len(tasks) + 0.6, 6.5), sharex=True, squeeze=False)
        for column, task in enumerate(tasks):
            for name in names:
                shown = [row for row in ours if row["task"] == task and row["implementation"] == name]
                ran = [row for row in shown if _number(row["tokens_per_second"])]
                color = f"C{names.index(name)}"
                for axes, key in zip(panels[:, column], ("tokens_per_second", "peak_gib"), strict=True):
                    points = [(int(row["length"]), _number(row[key])) for row in ran if _number(row[key])]
                    axes.plot(*zip(*points, strict=True) if points else ([], []), ".-", color=color, label=name)
                    if points and shown[-1]["tokens_per_second"] == "out of memory":
                        axes.plot(*points[-1], "x", color=color, markersize=10, markeredgewidth=2)
            panels[0, column].set_title(f"{task}, {_trained(ours, task)}", fontsize=10)
            panels[1, column].set_xlabel("tokens in a row")
            for axes in panels[:, column]:
                axes.set_xscale("log", base=2)
                if any(len(line.get_xdata()) for line in axes.lines):  # there is no peak memory of a CPU
                    axes.set_yscale("log")
        panels[0, 0].set_ylabel("tokens/s")
        panels[1, 0].set_ylabel("peak GiB")
        panels[0, 0].legend(fontsize=8)
        figure.suptitle(f"{shape}; a cross: out of memory at the next length. {_conditions(ours)}", fontsize=9)
        figure.tight_layout()
        figure.savefig(out / f"row_lengths_{shape}.png", dpi=100)
        plt.close(figure)


def row_lengths_table(rows: Rows) -> str:
    """Return the figures of `row_lengths.py` as a table: tokens per second and peak GiB by length."""
    lengths = sorted({int(row["length"]) for row in rows})
    lines = [
        ["shape", "task", "attention", *[f"{length // 1024}K" if length >= 1024 else f"{length}" for length in lengths]]
    ]
    found = {(row["shape"], row["task"], row["implementation"], int(row["length"])): row for row in rows}
    for shape, task, name in dict.fromkeys(key[:3] for key in found):
        cells = []
        for length in lengths:
            row = found.get((shape, task, name, length))
            rate = row and _number(row["tokens_per_second"])
            memory = f" / {float(row['peak_gib']):.1f}" if row and row["peak_gib"] else ""
            cells.append(f"{rate:,.0f}{memory}" if rate else row["tokens_per_second"] if row else "")
        lines.append([shape, task, name, *cells])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    """Return a table in Markdown, whose first line is the head."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def main() -> None:
    """Draw the figures from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", help="results of attention.py")
    parser.add_argument("--sweep", help="results of attention.py --sweep")
    parser.add_argument("--sparse", help="results of sparse_attention.py")
    parser.add_argument("--grpo", help="results of reinforcement.py")
    parser.add_argument("--row-lengths", help="results of row_lengths.py")
    parser.add_argument("--out", default=".", help="folder to write the figures to")
    arguments = parser.parse_args()
    given = vars(arguments)
    if not any(given[name] for name in given if name != "out"):
        parser.error("nothing to draw: give a csv, --sweep, --sparse, --grpo or --row-lengths")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    if arguments.csv:
        rows = [row for row in read(arguments.csv) if row.get("status", "timed") == "timed"]
        bars(rows, out)
        memory(rows, out)
    if arguments.sweep:
        latency(read(arguments.sweep), out)
    if arguments.sparse:
        runtimes(read(arguments.sparse), out)
    if arguments.grpo:
        rollouts(read(arguments.grpo), out)
    if arguments.row_lengths:
        rows = read(arguments.row_lengths)
        row_lengths(rows, out)
        print(row_lengths_table(rows))


if __name__ == "__main__":
    main()
