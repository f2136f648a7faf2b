"""Charts of the pages, in blues for this package and greys for its peers, and pictures of masks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from results import TASKS, Row, groups, name_of, read, read_all, select, size_of, timed, trained

from flashmask_hf import FlashMask, masks

OURS, MIDDLE, ALSO_OURS, INK = "#3f6b8f", "#6f97b5", "#a9c3d6", "#4a4a4a"
LIGHT, GREY, DARK, OTHER = "#dcd9d2", "#8f8b83", "#6f6b64", "#b9b5ac"
PEERS = {"sdpa": LIGHT, "trl_sdpa": LIGHT, "trl_sdpa_single": GREY, "cudnn": GREY, "whole": DARK}
RATE = "tokens_per_second"
STYLE = {
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": OTHER,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text: it can be read, searched and compared
    "svg.hashsalt": "flashmask",
}


# ----- figures that charts and tables share


def groups_of_8() -> list[Row]:
    """Return the rows of updates of 1B with one group of 8 completions per micro-batch, not compiled."""
    return select(read("grpo_h100"), model="llama-3.2-1b", groups="1", generations="8", compiled="off")


def gains() -> dict[str, float]:
    """Return each task's speed over the fastest other attention or trainer that was measured, on long rows."""

    def gain(rows: Sequence[Row], name: str = "implementation", rate: str = RATE) -> float:
        speeds = {row[name]: float(row[rate]) for row in timed(rows)}
        return speeds["flashmask"] / max(x for name, x in speeds.items() if not name.startswith("flashmask"))

    return {
        "SFT": gain(read("training_h200")),
        "DPO": gain(select(read("alignment_dpo_h200"), length="32768")),
        "GRPO": gain(select(groups_of_8(), prompt="4096", completion="256"), "provider", "update_tokens_per_second"),
        "reward model": gain(select(read("alignment_reward_h200"), length="32768")),
    }


# ----- bars


def bar_chart(
    path: Path, bars: dict[str, dict[str, float]], title: str, form: str = "{:,.0f}", inches: float = 0.27
) -> None:
    """Save a chart of horizontal bars: the groups from the top down, the providers of a group below each other."""
    count = sum(map(len, bars.values())) + 0.7 * len(bars)
    providers = {provider for group in bars.values() for provider in group}
    figure = Figure(figsize=(6, inches * count + (1.0 if len(providers) > 1 else 0.6)), layout="constrained")
    axes = figure.add_subplot()
    height, labelled, place, ticks = 0.8, set(), 0.0, []
    for group in bars.values():
        ticks.append(place + (len(group) - 1) / 2 * height)
        for provider, length in group.items():
            label = name_of(provider) if provider not in labelled else None
            labelled.add(provider)
            color = OURS if provider == "flashmask" else PEERS.get(provider, OTHER)
            color = ALSO_OURS if provider.startswith("flashmask_") else color
            drawn = axes.barh(place, length, height * 0.92, color=color, label=label)
            axes.bar_label(drawn, labels=[form.format(length)], padding=3, fontsize=10, color=INK)
            place += height
        place += 0.5
    axes.set_yticks(ticks, list(bars))
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.12, y=0.02)
    if len(providers) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    save(figure, path, title)


def save(figure: Figure, path: Path, title: str) -> None:
    """Save a chart under its title, without what differs between two runs."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


def speeds(rows: Sequence[Row], name: str = "implementation", rate: str = RATE) -> dict[str, float]:
    """Return the rates of the rows that have them, by provider."""
    return {row[name]: float(row[rate]) for row in rows if row[rate]}


def task_bars() -> dict[str, dict[str, float]]:
    """Each task's speed over the fastest other way to run it."""
    return {task: {"flashmask": gain} for task, gain in gains().items()}


def training_bars() -> dict[str, dict[str, float]]:
    """Supervised fine-tuning."""
    rows = sorted(read("training_h200"), key=lambda row: -int(row[RATE]))
    return {"SFT, packed\nrows of 32,768": speeds(rows)}


def alignment_bars() -> dict[str, dict[str, float]]:
    """DPO and reward models."""
    titles = {"dpo": "DPO,\n2 answers", "reward": "reward,\n6 answers"}
    return {title: speeds(select(read(f"alignment_{task}_h200"), length="32768")) for task, title in titles.items()}


def grpo_bars() -> dict[str, dict[str, float]]:
    """Updates of GRPO relative to padded SDPA, in micro-batches of one group and of several."""
    rows = select(read("grpo_h100"), model="llama-3.2-1b", generations="8", compiled="off")
    found = {}
    for case in groups(rows, "groups", "prompt", "completion"):
        shape = f"{int(case[0]['prompt']):,} : {int(case[0]['completion']):,}"
        several = "" if case[0]["groups"] == "1" else f"\n{case[0]['groups']} groups"
        found[shape + several] = speeds(case, "provider", "update_against_sdpa")
    return found


def parallel_bars() -> dict[str, dict[str, float]]:
    """Rows of 131,072 tokens over two GPUs."""
    names = {"keys": "flashmask", "heads": "flashmask_heads", "whole": "whole", "sdpa_cp": "sdpa_cp"}
    found = {}
    for case in groups(select(read("parallel_h200"), tokens="131072"), "shape", "documents"):
        documents = "1 document" if case[0]["documents"] == "1" else f"{case[0]['documents']} documents"
        rates = speeds(case, "provider")
        found[f"{size_of(case[0])},\n{documents}"] = {names[x]: rate for x, rate in rates.items() if x in names}
    return found


def attention_bars() -> dict[str, dict[str, float]]:
    """Attention alone by mask."""
    rows = timed(select(read("attention_h200"), length="32768", head_dim="128"))
    return {name_of(case[0]["mask"]): speeds(case, "provider", "both_tflops") for case in groups(rows, "mask")}


# ----- lines


def line_chart(path: Path, series: dict[str, dict[int, float]], title: str, form: str) -> None:
    """Save a chart of lines on logarithmic axes, each with its name and its last value at its end."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colors = iter((OURS, MIDDLE, ALSO_OURS))
    for name, points in series.items():
        color = next(colors) if name.startswith(("flashmask", "hash", "drop")) else OTHER
        lengths = sorted(points)
        axes.plot(lengths, [points[length] for length in lengths], "o-", color=color, markersize=4)
        end, label = (lengths[-1], points[lengths[-1]]), f"{name_of(name)}, {form.format(points[lengths[-1]])}"
        axes.annotate(label, end, (8, 0), textcoords="offset points", va="center", fontsize=10)
    log_axes(axes, sorted({length for points in series.values() for length in points}))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    save(figure, path, title)


def log_axes(axes: Axes, lengths: Sequence[int], **options: Any) -> None:
    """Make both axes logarithmic, with lengths in K at the ticks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths], **options)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def mask_memory_chart(path: Path) -> None:
    """Draw the memory of a mask against the length of the row."""
    series: dict[str, dict[int, float]] = {}
    for row in timed(select(read("attention_h200"), head_dim="128")):
        if row["provider"] in ("flashmask", "flex_attention") and float(row["mask_mib"]):
            points, length = series.setdefault(row["provider"], {}), int(row["length"])
            points[length] = max(points.get(length, 0), float(row["mask_mib"]))
    series["a dense bool mask"] = {length: length**2 / 2**20 for length in sorted(series["flashmask"])}
    line_chart(path, series, "Memory of one row's mask in MiB, by tokens in the row", "{:,.2f}")


def sparse_chart(path: Path) -> None:
    """Draw the speed of dynamic sparse attention over causal FlashAttention-2, by the length of the row."""
    rows = read("sparse_attention_h200")

    def times(provider: str) -> dict[int, float]:
        own = select(rows, provider=provider)
        return {int(row["length"]): float(row["forward_ms"]) + float(row["backward_ms"]) for row in own}

    base = times("sdpa")
    names = ("hash_16", "drop_50", "drop_30", "sdpa")
    series = {name: {length: base[length] / ms for length, ms in times(name).items()} for name in names}
    line_chart(path, series, "Speed over causal SDPA (FlashAttention-2), by tokens in the row", "{:.1f}x")


def sparsity_chart(path: Path) -> None:
    """Draw the time of attention against the hidden share of the tiles, with the line through it and its R^2."""
    rows = read("sweep_h200")
    x = [float(row["sparsity"]) for row in rows]
    y = [float(row["forward_ms"]) + float(row["backward_ms"]) for row in rows]
    slope, offset = statistics.linear_regression(x, y)
    r_squared = statistics.correlation(x, y) ** 2
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([min(x), max(x)], [slope * share + offset for share in (min(x), max(x))], color=ALSO_OURS)
    axes.plot(x, y, "o", color=OURS, markersize=5)
    axes.annotate(f"R² = {r_squared:.4f}", (x[1], y[1]), (14, 4), textcoords="offset points", fontsize=11)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylim(0)
    save(figure, path, "ms, forward and backward, by the hidden share of the tiles")


def convergence_chart(path: Path) -> None:
    """Draw loss curves: a panel per task, a line per seed and curve, means over ten steps."""
    rows = read("convergence_cpu")
    styles = {"sdpa": (LIGHT, "-", 4.0), "trl": (GREY, "--", 2.0), "flashmask": (OURS, "-", 1.0)}
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    panels = figure.subplots(2, 2, squeeze=False).flatten()
    labelled = set()
    for axes, case in zip(panels, groups(rows, "task"), strict=True):
        for name, (color, line, width) in styles.items():
            for seed in groups(case, "seed"):
                losses = [float(row[name]) for row in seed if row[name]]
                means = [sum(losses[i : i + 10]) / 10 for i in range(len(losses) - 9)]
                label = name if means and name not in labelled else None
                labelled |= {name} if label else set()
                axes.plot(range(10, 10 + len(means)), means, line, color=color, linewidth=width, label=label)
        axes.set_title(case[0]["task"], fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    save(figure, path, "Loss by step, means over ten steps")


LINES = {
    "flashmask": (OURS, "-"),
    "sdpa": (GREY, "-"),
    "flex_attention": (OTHER, "-"),
    "flash_attention_2": (GREY, "--"),
    "flash_attention_3": (OTHER, "--"),
    "flash_attention_4": (OTHER, ":"),
}


def row_lengths_chart(path: Path, shape: str, column: str, title: str) -> None:
    """Draw tokens per second or peak memory against the length of the row: a panel per task, a line per attention.

    Nothing is drawn for a shape that was not measured.
    """
    rows = select(read_all("row_lengths_*"), shape=shape)
    tasks = groups(rows, "task")
    if not tasks:
        return
    figure = Figure(figsize=(6, 2.4 * ((len(tasks) + 1) // 2) + 0.6), layout="constrained")
    panels = figure.subplots((len(tasks) + 1) // 2, 2, squeeze=False).flatten()
    labelled = set()
    for axes, case in zip(panels, tasks, strict=False):
        for name in dict.fromkeys(row["implementation"] for row in rows):
            shown = select(case, implementation=name)
            points = [(int(row["length"]), float(row[column])) for row in trained(shown)]
            if not points:
                continue
            (color, line), label = LINES[name], name_of(name) if name not in labelled else None
            labelled.add(name)
            drawn = axes.plot(*zip(*points, strict=True), line, marker="o", markersize=3, color=color, label=label)
            drawn[0].set_zorder(3 if name == "flashmask" else 2)  # peers may have equal figures
            if shown[-1][RATE] == "out of memory":
                axes.plot(*points[-1], "x", color=color, markersize=9, markeredgewidth=2)
        axes.set_title(TASKS[case[0]["task"]], fontsize=11)
        log_axes(axes, sorted({int(row["length"]) for row in trained(rows)})[::2], fontsize=9)
        axes.tick_params(axis="y", labelsize=9)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    save(figure, path, title)


ROW_LENGTHS = {
    f"{kind}_{size}": partial(row_lengths_chart, shape=shape, column=column, title=f"{title}, {shape}'s shape")
    for size, shape in (("1b", "llama-3.2-1b"), ("8b", "llama-3.1-8b"))
    for kind, column, title in (
        ("row_speed", RATE, "Tokens per second by tokens in the row"),
        ("row_memory", "peak_gib", "Peak GiB by tokens in the row"),
    )
}

# name: what returns its groups of bars, title, form of a value, inches of a bar
BARS: dict[str, tuple[Callable[[], dict[str, dict[str, float]]], str, str, float]] = {
    "tasks": (task_bars, "Tokens per second, over the fastest other way (= 1)", "{:.1f}x", 0.3),
    "training": (training_bars, "Tokens per second of training", "{:,.0f}", 0.27),
    "alignment": (alignment_bars, "Tokens per second of training, rows of 32,768", "{:,.0f}", 0.27),
    "grpo": (grpo_bars, "Speed of an update by prompt : completion tokens, padded SDPA = 1", "{:.1f}x", 0.24),
    "parallel": (parallel_bars, "Tokens per second of two GPUs, rows of 131,072", "{:,.0f}", 0.27),
    "attention": (attention_bars, "TFLOP/s, forward and backward, 32,768 tokens, head_dim 128", "{:,.0f}", 0.22),
}

CHARTS: dict[str, Callable[[Path], None]] = {
    **{name: lambda path, bars=bars: bar_chart(path, bars[0](), *bars[1:]) for name, bars in BARS.items()},
    "mask_memory": mask_memory_chart,
    "sparse": sparse_chart,
    "sparsity": sparsity_chart,
    "convergence": convergence_chart,
    **ROW_LENGTHS,
}
"""Function of each chart in docs/assets, by its name without the suffix."""


def words(svg: str) -> list[str]:
    """Return the texts of an SVG file, which have every title, name and number of a chart."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


# ----- pictures of masks


SEARCHED = (160, [(96, [128, 64, 192]), 224])  # a turn and two results of its tool; three rollouts go on from the first
KEPT = torch.rand(1, 1, 32, generator=torch.Generator().manual_seed(0)) > 0.3
BUCKETS = torch.randint(0, 4, (1, 1, 32), generator=torch.Generator().manual_seed(0))
EVICTED = torch.randint(0, 32, (32,), generator=torch.Generator().manual_seed(0))
NAMES = {
    "masks": masks,
    "rows": (torch.arange(32) + 1 + EVICTED).clamp(max=32).view(1, 1, 32),
    "q_keep": KEPT,
    "k_keep": KEPT.flip(-1),
    "q_bucket": BUCKETS,
    "k_bucket": BUCKETS.flip(-1),
}
CALLS = (
    "causal_document([10, 14, 8])",
    "document([10, 14, 8])",
    "share_question([(8, [4, 6]), (5, [3, 3, 3])])",
    "tree([(6, [(4, [5, 3]), (3, [6, 5])])])",
    "full(32)",
    "causal(32)",
    "sliding_window(32, 8)",
    "global_sliding_window(32, 3, 6)",
    "prefix_lm_causal(32, 12)",
    "prefix_lm_document([(6, 14), (4, 18)])",
    "causal_blockwise([10, 8, 6, 8])",
    'padding([24], kv_len=32, side="left")',
    "random_eviction(32, evict_from=rows)",
    "qk_sparse(q_keep, k_keep)",
    "hash_sparse(q_bucket, k_bucket)",
)
GALLERY: dict[str, tuple[str, FlashMask]] = {
    call.partition("(")[0]: (call, eval(f"masks.{call}", NAMES)) for call in CALLS
}
"""Example of each mask family: how it is written, and the mask."""


def thumbnail(mask: FlashMask, path: Path) -> None:
    """Save a small picture of a mask, without axes."""
    figure = Figure(figsize=(2.4, 2.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    mask.plot(ax=axes)
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    figure.savefig(path)


PICTURES: dict[str, Callable[[Path], Any]] = {
    "mask": lambda path: masks.causal_document([900, 1500, 300, 1396]).plot(str(path)),
    "shared_question": lambda path: masks.share_question([(1600, [300, 420]), (1200, [240, 336])]).plot(str(path)),
    "prompt_group": lambda path: masks.share_question([(1024, [128, 96, 160, 64, 128, 192, 80, 176])]).plot(str(path)),
    "rollout_tree": lambda path: masks.tree([(640, [SEARCHED, (128, [160, 256])])]).plot(str(path)),
    **{f"masks/{name}": partial(thumbnail, mask) for name, (_, mask) in GALLERY.items()},
}
"""Function of each picture of a mask in docs/assets, by its name without the suffix."""
