"""Charts of the pages: blues for this package, greys for its peers, the colors of the mask pictures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from results import mask_of, name_of, read, read_all, select, timed, trained
from values import gains, linear, sweep_line

OURS, ALSO_OURS, INK = "#3f6b8f", "#a9c3d6", "#4a4a4a"
PEERS = {"sdpa": "#dcd9d2", "sdpa_single": "#8f8b83", "cudnn": "#8f8b83", "whole": "#6f6b64"}
CHARTED = ("flashmask", "flashmask_triton", "flex_attention", "cudnn")  # providers in the chart of masks
OTHER_PEER = "#b9b5ac"
STYLE = {
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#b9b5ac",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text: it can be read, searched and compared
    "svg.hashsalt": "flashmask",
}


def color_of(provider: str) -> str:
    """Return a provider's color: blues for this package, greys for its peers."""
    if provider.startswith("flashmask"):
        return OURS if provider == "flashmask" else ALSO_OURS
    return PEERS.get(provider, OTHER_PEER)


def bars(axes: Axes, groups: dict[str, dict[str, float]], form: str) -> None:
    """Draw horizontal bars, the groups from the top down and the providers of a group below each other."""
    height, labelled, place = 0.8, set(), 0.0
    ticks = []
    for group in groups.values():
        ticks.append(place + (len(group) - 1) / 2 * height)
        for provider, value in group.items():
            label = name_of(provider) if provider not in labelled else None
            labelled.add(provider)
            drawn = axes.barh(place, value, height * 0.92, color=color_of(provider), label=label)
            axes.bar_label(drawn, labels=[form.format(value)], padding=3, fontsize=10, color=INK)
            place += height
        place += 0.5
    axes.set_yticks(ticks, list(groups))
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Save a chart, without what differs between two runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


def bar_chart(
    path: Path, groups: dict[str, dict[str, float]], title: str, form: str = "{:,.0f}", inches: float = 0.27
) -> None:
    """Save a chart of horizontal bars."""
    count = sum(map(len, groups.values())) + 0.7 * len(groups)
    providers = {provider for group in groups.values() for provider in group}
    figure = Figure(figsize=(6, inches * count + (1.0 if len(providers) > 1 else 0.6)), layout="constrained")
    axes = figure.add_subplot()
    bars(axes, groups, form)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes.margins(x=0.12, y=0.02)
    if len(providers) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    save(figure, path)


def tasks_chart(path: Path) -> None:
    """Draw the speed of each task over the fastest other way to run it."""
    groups = {task: {"flashmask": gain} for task, gain in gains().items()}
    bar_chart(path, groups, "Tokens per second, over the fastest other way (= 1)", "{:.1f}x", inches=0.3)


def training_chart(path: Path) -> None:
    """Draw tokens per second of supervised fine-tuning."""
    rows = sorted(read("training_h200"), key=lambda row: -int(row["tokens_per_second"]))
    speeds = {row["implementation"]: float(row["tokens_per_second"]) for row in rows}
    bar_chart(path, {"SFT, packed\nrows of 32,768": speeds}, "Tokens per second of training")


def alignment_chart(path: Path) -> None:
    """Draw tokens per second of DPO and reward models."""
    groups: dict[str, dict[str, float]] = {}
    for task, title in (("dpo", "DPO,\n2 answers"), ("reward", "reward,\n6 answers")):
        rows = select(read(f"alignment_{task}_h200"), length="32768")
        groups[title] = {row["provider"]: float(row["tokens_per_second"]) for row in rows}
    bar_chart(path, groups, "Tokens per second of training, rows of 32,768")


def grpo_chart(path: Path) -> None:
    """Draw the speed of updates of GRPO relative to padded SDPA, in micro-batches of one group and of several."""
    groups: dict[str, dict[str, float]] = {}
    for row in select(read("grpo_h100"), model="llama-3.2-1b", generations="8", compiled="off"):
        shape = f"{int(row['prompt']):,} : {int(row['completion']):,}"
        case = groups.setdefault(shape if row["groups"] == "1" else f"{shape}\n{row['groups']} groups", {})
        if row["update_against_sdpa"]:
            case[row["provider"]] = float(row["update_against_sdpa"])
    bar_chart(path, groups, "Speed of an update by prompt : completion tokens, padded SDPA = 1", "{:.1f}x", inches=0.24)


def parallel_chart(path: Path) -> None:
    """Draw tokens per second of rows of 131,072 tokens over two GPUs."""
    groups: dict[str, dict[str, float]] = {}
    names = {"keys": "flashmask", "heads": "flashmask_heads", "whole": "whole", "sdpa_cp": "sdpa_cp"}
    for row in select(read("parallel_h200"), tokens="131072"):
        if row["provider"] in names:
            documents = "1 document" if row["documents"] == "1" else f"{row['documents']} documents"
            group = groups.setdefault(f"{row['shape'].rpartition('-')[2].upper()},\n{documents}", {})
            group[names[row["provider"]]] = float(row["tokens_per_second"])
    bar_chart(path, groups, "Tokens per second of two GPUs, rows of 131,072")


def attention_chart(path: Path) -> None:
    """Draw TFLOP/s of attention alone by mask."""
    groups: dict[str, dict[str, float]] = {}
    for row in timed(select(read("attention_h200"), length="32768", head_dim="128")):
        if row["provider"] not in CHARTED:
            continue
        groups.setdefault(mask_of(row["mask"]), {})[row["provider"]] = float(row["both_tflops"])
    bar_chart(path, groups, "TFLOP/s, forward and backward, 32,768 tokens, head_dim 128", inches=0.22)


def long_chart(path: Path) -> None:
    """Draw the memory of a mask against the length of the row."""
    rows = [row for row in timed(select(read("attention_h200"), head_dim="128")) if float(row["mask_mib"])]
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["provider"] in ("flashmask", "flex_attention"):
            points = series.setdefault(row["provider"], {})
            points[int(row["length"])] = max(points.get(int(row["length"]), 0), float(row["mask_mib"]))
    lengths = sorted(series["flashmask"])
    series["a dense bool mask"] = {length: length**2 / 2**20 for length in lengths}
    line_chart(path, series, "Memory of one row's mask in MiB, by tokens in the row", "{:,.2f}")


def sparse_chart(path: Path) -> None:
    """Draw the speed of dynamic sparse attention over causal FlashAttention-2, by the length of the row."""
    rows = read("sparse_attention_h200")
    series = {
        provider: {int(row["length"]): float(row["faster"]) for row in select(rows, provider=provider)}
        for provider in ("hash_16", "drop_50", "drop_30", "sdpa")
    }
    line_chart(path, series, "Speed over causal SDPA (FlashAttention-2), by tokens in the row", "{:.1f}x")


def line_chart(path: Path, series: dict[str, dict[int, float]], title: str, form: str) -> None:
    """Save a chart of lines on logarithmic axes, each with its name and its last value at its end."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colors = iter((OURS, "#6f97b5", ALSO_OURS))
    for name, points in series.items():
        color = next(colors) if name.startswith(("flashmask", "hash", "drop")) else OTHER_PEER
        lengths = sorted(points)
        axes.plot(lengths, [points[length] for length in lengths], "o-", color=color, markersize=4)
        text = f"{name_of(name)}, {form.format(points[lengths[-1]])}"
        axes.annotate(
            text, (lengths[-1], points[lengths[-1]]), (8, 0), textcoords="offset points", va="center", fontsize=10
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for points in series.values() for length in points})
    axes.set_xticks(ticks, [f"{length // 1024}K" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    save(figure, path)


def sparsity_chart(path: Path) -> None:
    """Draw the time of attention against the hidden share of the tiles, with the line through it."""
    x, y, slope, offset = sweep_line()
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([min(x), max(x)], [slope * share + offset for share in (min(x), max(x))], color=ALSO_OURS)
    axes.plot(x, y, "o", color=OURS, markersize=5)
    axes.annotate(f"R² = {linear()}", (x[1], y[1]), (14, 4), textcoords="offset points", fontsize=11)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylim(0)
    figure.suptitle("ms, forward and backward, by the hidden share of the tiles", x=0.01, ha="left", fontsize=12)
    save(figure, path)


def convergence_chart(path: Path) -> None:
    """Draw loss curves: a panel per task, a line per seed and curve, means over ten steps."""
    rows = read("convergence_cpu")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    styles = {"sdpa": (PEERS["sdpa"], "-", 4.0), "trl": (PEERS["cudnn"], "--", 2.0), "flashmask": (OURS, "-", 1.0)}
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    panels = figure.subplots(2, 2, squeeze=False).flatten()
    for axes, task in zip(panels, tasks, strict=True):
        for name, (color, line, width) in styles.items():
            for seed in dict.fromkeys(row["seed"] for row in rows):
                losses = [float(row[name]) for row in select(rows, task=task, seed=seed) if row[name]]
                means = [sum(losses[i : i + 10]) / 10 for i in range(len(losses) - 9)]
                label = name if (task, seed) == (tasks[-1], rows[0]["seed"]) else None
                axes.plot(range(10, 10 + len(means)), means, line, color=color, linewidth=width, label=label)
        axes.set_title(task, fontsize=11)
    figure.suptitle("Loss by step, means over ten steps", x=0.01, ha="left", fontsize=12)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    save(figure, path)


LINES = {
    "flashmask": (OURS, "-"),
    "sdpa": ("#8f8b83", "-"),
    "flex_attention": (OTHER_PEER, "-"),
    "flash_attention_2": ("#8f8b83", "--"),
    "flash_attention_3": (OTHER_PEER, "--"),
    "flash_attention_4": (OTHER_PEER, ":"),
}


def row_lengths_chart(path: Path, shape: str, column: str, title: str) -> None:
    """Draw tokens per second or peak memory against the length of the row: a panel per task, a line per attention.

    Nothing is drawn of a shape that was not measured.
    """
    rows = select(read_all("row_lengths_*"), shape=shape)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        return
    figure = Figure(figsize=(6, 2.4 * ((len(tasks) + 1) // 2) + 0.6), layout="constrained")
    panels = figure.subplots((len(tasks) + 1) // 2, 2, squeeze=False).flatten()
    labelled = set()
    for axes, task in zip(panels, tasks, strict=False):
        for name in dict.fromkeys(row["implementation"] for row in rows):
            shown = select(rows, task=task, implementation=name)
            points = [(int(row["length"]), float(row[column])) for row in trained(shown)]
            if not points:
                continue
            (color, line), label = LINES[name], name_of(name) if name not in labelled else None
            labelled.add(name)
            above = 3 if name == "flashmask" else 2  # peers may have equal figures
            drawn = axes.plot(*zip(*points, strict=True), line, marker="o", markersize=3, color=color, label=label)
            drawn[0].set_zorder(above)
            if shown[-1]["tokens_per_second"] == "out of memory":
                axes.plot(*points[-1], "x", color=color, markersize=9, markeredgewidth=2)
        axes.set_title({"sft": "SFT", "lora": "LoRA", "dpo": "DPO", "reward": "reward model"}[task], fontsize=11)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({int(row["length"]) for row in trained(rows)})
        axes.set_xticks(ticks[::2], [f"{length // 1024}K" for length in ticks[::2]], fontsize=9)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="y", labelsize=9)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    save(figure, path)


ROW_LENGTHS = {
    f"{kind}_{size}": partial(row_lengths_chart, shape=shape, column=column, title=f"{title}, {shape}'s shape")
    for size, shape in (("1b", "llama-3.2-1b"), ("8b", "llama-3.1-8b"))
    for kind, column, title in (
        ("row_speed", "tokens_per_second", "Tokens per second by tokens in the row"),
        ("row_memory", "peak_gib", "Peak GiB by tokens in the row"),
    )
}

CHARTS: dict[str, Callable[[Path], None]] = {
    "tasks": tasks_chart,
    "training": training_chart,
    "alignment": alignment_chart,
    "grpo": grpo_chart,
    "parallel": parallel_chart,
    "attention": attention_chart,
    "mask_memory": long_chart,
    "sparse": sparse_chart,
    "sparsity": sparsity_chart,
    "convergence": convergence_chart,
    **ROW_LENGTHS,
}
"""Function of each chart in docs/assets, by its name without the suffix."""


def words(svg: str) -> list[str]:
    """Return the texts of an SVG file, which have every title, name and number of a chart."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
