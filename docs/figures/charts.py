"""Charts of the pages, in blues for this package and greys for its peers, and pictures of masks.

A chart is a function that draws on a figure and returns its title.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from results import (
    RATE,
    SETTINGS,
    TASKS,
    Row,
    common_length,
    comparable,
    fastest,
    gain,
    groups,
    name_of,
    ordered,
    read,
    read_all,
    select,
    size_of,
    timed,
    trained,
)

from flashmask_hf import FlashMask, masks

OURS, ALSO_OURS, INK = "#3f6b8f", "#8fb0c9", "#4a4a4a"
GREY, OTHER, LIGHT = "#8f8a81", "#b3ada3", "#d3cfc7"
GREYS = {"flash_attention": INK, "fa4": INK, "cudnn": GREY, "flex": GREY, "whole": "white"}  # other peers are light
STYLE = Path(__file__).with_suffix(".mplstyle")
Bars = dict[str, dict[str, tuple[float, str]]]
"""Length and text of the bar of each provider, by group."""


def draw(chart: Callable[[Figure], str], path: Path) -> None:
    """Save a chart under its title, without what differs between two runs."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    title = textwrap.fill(chart(figure), int(10.4 * figure.get_figwidth()))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def color_of(provider: str) -> str:
    """Return the blue or the grey of a provider."""
    if provider.startswith(("flashmask", "keys", "heads", "hash", "drop")):
        return OURS if provider in ("flashmask", "keys", "hash_16") else ALSO_OURS
    return next((color for name, color in GREYS.items() if name in provider), LIGHT)


# ----- bars


def headlines() -> dict[str, tuple[str, list[Row]]]:
    """Return the conditions of each task's speed over the fastest other way, and its rows, which are of one run."""
    rows = {
        task: select(read_all("settings_*"), shape=f"llama-{x}") for task, x in (("SFT", "3.2-1b"), ("LoRA", "3.1-8b"))
    }
    rows |= {TASKS[task]: read_all(f"alignment_{task}_*") for task in ("dpo", "reward")}
    found: dict[str, tuple[str, list[Row]]] = {}
    for task, run in rows.items():
        length = common_length(run)
        found[task] = f"{size_of(run[0])}, rows of {int(length):,}", select(run, length=length)
    case = {"groups": "4", "generations": "8", "prompt": "1024", "completion": "256"}
    conditions = f"1B, update, {case['groups']} prompts x {case['generations']}"
    return found | {"GRPO": (conditions, select(read_all("grpo_*"), model="llama-3.2-1b", **case))}


def draw_bars(figure: Figure, bars: Bars, line: str = "") -> None:
    """Draw horizontal bars, the groups from the top down, and a line at 1 if `line` says what it stands for."""
    figure.set_size_inches(6.4, 0.27 * (sum(map(len, bars.values())) + 0.7 * len(bars)) + 0.8)
    axes, place, ticks = figure.add_subplot(), 0.0, []
    for group in bars.values():
        ticks.append(place + (len(group) - 1) * 0.4)
        for provider, (length, text) in group.items():
            drawn = axes.barh(place, length, 0.72, color=color_of(provider), edgecolor=GREY, linewidth=0.4)
            axes.bar_label(drawn, labels=[text], padding=4, fontsize=9, bbox={"color": "white", "pad": 0.5})
            place += 0.8
        place += 0.5
    axes.set_yticks(ticks, list(bars))
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_visible(False)
    letters = 88 - max(len(part) for label in bars for part in label.split("\n"))  # of the width of the axes
    axes.set_xlim(0, max(x / (1 - len(text) / letters) for group in bars.values() for x, text in group.values()))
    if line:
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        axes.text(1, 0, f" {line}", transform=axes.get_xaxis_transform(), fontsize=9, va="top")


def draw_gains(
    figure: Figure, cases: Mapping[str, list[Row]], line: str, form: str = "over {}", names: Callable = name_of
) -> list[float]:
    """Draw the speed of each case over its fastest other way, named in this form, and return the speeds."""
    bars = Bars()
    for title, case in cases.items():
        other = form.format(names(fastest(case)[1]["implementation"]))
        bars[title] = {"flashmask": (gain(case), f"{gain(case):.2f}x  {other}".rstrip())}
    draw_bars(figure, bars, line)
    return [bar["flashmask"][0] for bar in bars.values()]


def gains_chart(
    figure: Figure,
    cases: Callable[[], list[list[Row]]],
    name: Callable[[Row], str],
    line: str,
    title: str,
    **options: Any,
) -> str:
    """Draw the gains of cases, named by their first rows; the title has the least gain and the largest."""
    speeds = draw_gains(figure, {name(case[0]): case for case in cases()}, line, **options)
    return title.format(min(speeds), max(speeds))


def tasks_chart(figure: Figure) -> str:
    """Draw each task's speed over the fastest other way to run it."""
    cases = {f"{task}\n{conditions}": rows for task, (conditions, rows) in headlines().items()}
    speeds = draw_gains(figure, cases, "fastest other way = 1", "{}")
    packed, shared = sorted(speeds[:2]), sorted(speeds[2:])
    title = f"Training speed over the fastest other way: {packed[0]:.2f}x to {packed[-1]:.2f}x on packed documents, "
    return f"{title}{shared[0]:.1f}x to {shared[-1]:.1f}x on shared prompts"


def rates_chart(figure: Figure, tasks: Sequence[str]) -> str:
    """Draw the tokens per second of some headlines, each attention in its fastest setting."""
    bars, says = Bars(), []
    for task in tasks:
        conditions, rows = headlines()[task]
        group = bars[f"{task}\n{conditions}"] = {}
        for row in comparable(rows):
            setting = f" ({SETTINGS[row['setting']]})" * (row["setting"] != "eager")
            text = f"{{{RATE}:,.0f}}  {name_of(row['implementation'])}{setting}"
            group.setdefault(row["implementation"], (float(row[RATE]), text.format_map(row)))
        says.append(f"{task} {gain(rows):.2f}x")
    draw_bars(figure, bars)
    return f"Tokens per second; flashmask over the fastest other way: {', '.join(says)}"


IMAGE_WAYS = {
    "flashmask": "packed rows",
    "trl_flash_attention_4": "FlashAttention-4, padded",
    "trl_flash_attention_4_single": "FlashAttention-4, one by one",
    "trl_sdpa": "SDPA, padded",
    "trl_sdpa_single": "SDPA, one by one",
}
"""Ways to run conversations with images, in the order of a table."""
EMBEDDING_WAYS = {"flashmask": "flat rows", "sdpa": "SDPA, padded"} | {
    f"flash_attention_{n}{form}": f"FlashAttention-{n}, {'flat rows' if form else 'padded'}"
    for form in ("", "_flat")
    for n in (4, 3, 2)
}
"""Ways to train embedding models and rerankers, in the order of a table."""
EMBEDDING_CASES = {"sentences": "pairs of sentences", "passages": "sentences and passages",
                   "rerank": "reranker", "rerank_scores": "reranker, scores"}  # fmt: skip
DIFFUSION_WAYS = {
    "flashmask": "packed rows",
    "flex_attention": "packed rows, FlexAttention",
    "dllm_sdpa": "dllm: padded, SDPA",
}
"""Ways to train block diffusion, in the order of a table."""
DRAFTERS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}


def image_cases() -> list[list[Row]]:
    """Return the rows of fine-tuning on images, in groups of one model, length and share of images."""
    rows = sorted(read_all("images_*"), key=lambda row: (int(row["length"]), row["task"]))
    return groups(sorted(rows, key=lambda row: row["shape"], reverse=True), "shape", "length", "task")


def embedding_cases() -> list[list[Row]]:
    """Return the rows of embedding models and rerankers, in groups of one case."""
    cases = groups(read_all("embeddings_*"), "shape", "case", "size")
    order = [*EMBEDDING_CASES].index
    return sorted(cases, key=lambda case: (case[0]["shape"], order(case[0]["case"]), int(case[0]["size"])))


def padded_cases() -> list[list[Row]]:
    """Return the `embedding_cases` but for other flat rows."""
    return [[row for row in case if "_flat" not in row["provider"]] for case in embedding_cases()]


def draft_cases() -> list[list[Row]]:
    """Return the rows of drafters with a rate, in groups of one layer and length that both ways ran."""
    rows = [{**row, RATE: str(round(1e9 / float(row["milliseconds"])))} for row in timed(read_all("drafts_*"))]
    return [case for case in ordered(rows, "task", "length") if len(case) == 2]


def share_of(row: Row) -> str:
    """Return the percentage of a task's tokens that are in images."""
    return f"{row['task'].rpartition('_')[2]}%"


def kilo(row: Row) -> str:
    """Return the length of a row in units of 1,024 tokens."""
    return f"{int(row['length']) // 1024}K"


GAINS: dict[str, dict[str, Any]] = {
    "grpo": {
        "cases": lambda: groups(select(read_all("grpo_*"), model="llama-3.2-1b"), "groups", "prompt", "completion"),
        "name": "{groups} x {generations}, {prompt:,.0f} : {completion:,.0f}".format_map,
        "line": "fastest padded = 1",
        "title": "A GRPO update runs {:.1f}x to {:.1f}x as fast as the fastest padded one (prompts x completions, "
        "tokens of a prompt : completion)",
    },
    "images": {
        "cases": image_cases,
        "name": lambda row: f"{row['shape']}, {kilo(row)}, {share_of(row)} images",
        "line": "fastest of stock TRL = 1",
        "title": "Packed rows with images train {:.1f}x to {:.1f}x as fast as the fastest of stock TRL",
        "names": IMAGE_WAYS.get,
    },
    "embeddings": {
        "cases": padded_cases,
        "name": lambda row: f"{row['shape']}, {EMBEDDING_CASES[row['case']]} x {row['size']}",
        "line": "fastest padded way = 1",
        "title": "Rows without padding, and queries computed once, are {:.1f}x to {:.1f}x as fast",
        "names": EMBEDDING_WAYS.get,
    },
    "drafts": {
        "cases": draft_cases,
        "name": lambda row: f"{DRAFTERS[row['task']]}, {kilo(row)}",
        "line": "FlexAttention = 1",
        "title": "Layers of drafters with masks run {:.1f}x to {:.1f}x as fast as FlexAttention",
        "form": "",
    },
}
"""Arguments of `gains_chart`, by the name of the chart."""


def diffusion_chart(figure: Figure) -> str:
    """Draw block diffusion by length, over dllm's way."""
    bars = Bars()
    for case in groups(read_all("diffusion_*"), "shape", "length"):
        rates = {row["implementation"]: float(row[RATE]) for row in trained(case)}
        if {"flashmask", "dllm_sdpa"} <= rates.keys():
            ratios = {name: rates[name] / rates["dllm_sdpa"] for name in DIFFUSION_WAYS if name in rates}
            group = {name: (ratio, f"{ratio:.2f}x  {DIFFUSION_WAYS[name]}") for name, ratio in ratios.items()}
            bars[f"{case[0]['shape']}, {kilo(case[0])}"] = group
    draw_bars(figure, bars)
    speeds = [group["flashmask"][0] for group in bars.values()]
    return (
        f"Block diffusion on packed rows trains {min(speeds):.1f}x to {max(speeds):.1f}x as fast as in padded batches"
    )


def parallel_chart(figure: Figure) -> str:
    """Draw rows of 131,072 tokens over two GPUs."""
    bars, kept = Bars(), list[float]()
    for case in groups(select(read("parallel_h200"), tokens="131072"), "shape", "documents"):
        rows = sorted(case, key=lambda row: ("keys", "heads", "sdpa_cp", "whole").index(row["provider"]))
        text = {row["provider"]: f"{{{RATE}:,.0f}}  {name_of(row['provider'])}, {{peak_gib:.0f}} GiB" for row in rows}
        group = {row["provider"]: (float(row[RATE]), text[row["provider"]].format_map(row)) for row in rows}
        kept += [group["keys"][0] / group["whole"][0]] if "whole" in group else []
        bars[f"{size_of(case[0])}\ndocuments: {case[0]['documents']}"] = group
    draw_bars(figure, bars)
    title = f"Two GPUs split a row of {int(case[0]['tokens']):,} tokens and keep {min(kept):.0%} to {max(kept):.0%} of "
    return f"{title}the speed of unsplit rows, in tokens per second"


# ----- points and lines


def attention_chart(figure: Figure) -> str:
    """Draw attention alone: a line of points per mask."""
    cases = groups(timed(select(read("attention_peers_h200"), length="8192", head_dim="128")), "mask")
    figure.set_size_inches(6.4, 4.2)
    axes = figure.add_subplot()
    for name, color, marker, size in (("flashmask", OURS, "o", 7), ("fa4", INK, "D", 9), ("cudnn_flex", GREY, "^", 7),
                                      ("flex_flash", GREY, "s", 5), ("flex_attention", LIGHT, "v", 7)):  # fmt: skip
        found = [(float(row["both_tflops"]), y) for y, case in enumerate(cases) for row in select(case, provider=name)]
        fill = "none" if name == "fa4" else "full"  # around flashmask's where they are equal
        axes.plot(*zip(*found, strict=True), marker, color=color, markersize=size, fillstyle=fill, label=name_of(name))
    axes.set_yticks(range(len(cases)), [name_of(case[0]["mask"]) for case in cases])
    axes.invert_yaxis()
    axes.grid(axis="y", color=LIGHT, linewidth=0.5)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="TFLOP/s on tiles that are not hidden, forward and backward", xlim=0)
    figure.legend(loc="outside lower center", ncols=3)
    speeds = [{row["provider"]: float(row["both_tflops"]) for row in case} for case in cases]
    shares = [case.pop("flashmask") / max(case.values()) for case in speeds]
    return f"Attention alone: {min(shares):.2f}x to {max(shares):.2f}x the fastest peer of each mask"


def log_axes(axes: Axes, lengths: Iterable[int], ylabel: str) -> None:
    """Make both axes logarithmic, with lengths in K at the ticks."""
    axes.set(xscale="log", yscale="log", xlabel="tokens per row", ylabel=ylabel)
    axes.set_xticks(list(lengths), [f"{length // 1024}K" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def end_labels(axes: Axes, ends: Mapping[str, tuple[tuple[float, float], str]], gap: float = 0.1) -> None:
    """Write names right of the axes, apart from each other, with a thin line from the last points of their lines."""
    to_axes = axes.transData + axes.transAxes.inverted()
    below = -gap
    for name, (point, color) in sorted(ends.items(), key=lambda end: end[1][0][1]):
        below = max(to_axes.transform(point)[1], below + gap)
        axes.annotate(name, point, (1.03, below), textcoords="axes fraction", va="center", fontsize=8, color=color,
                      arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.4})  # fmt: skip


def draw_lines(figure: Figure, series: Mapping[str, Mapping[int, float]], form: str, ylabel: str) -> None:
    """Draw lines on logarithmic axes, each with its name and its last value at its end."""
    axes, ends = figure.add_subplot(), {}
    for name, points in series.items():
        color = OTHER if color_of(name) == LIGHT else color_of(name)
        found = sorted(points.items())
        axes.plot(*zip(*found, strict=True), "o-", color=color, markersize=4)
        ends[f"{name_of(name)}, {form.format(found[-1][1])}"] = found[-1], color
    log_axes(axes, sorted({length for points in series.values() for length in points}), ylabel)
    end_labels(axes, ends)


def mask_memory_chart(figure: Figure) -> str:
    """Draw the memory of a mask against the length of the row."""
    series: dict[str, dict[int, float]] = {}
    for row in timed(select(read("attention_h200"), head_dim="128")):
        if row["provider"] in ("flashmask", "flex_attention") and float(row["mask_mib"]):
            points, length = series.setdefault(row["provider"], {}), int(row["length"])
            points[length] = max(points.get(length, 0), float(row["mask_mib"]))
    series["a dense bool mask"] = {length: length**2 / 2**20 for length in sorted(series["flashmask"])}
    draw_lines(figure, series, "{:,.2f}", "MiB of one row's mask")
    return "A mask takes memory by the token, not by the pair of tokens"


def sparse_chart(figure: Figure) -> str:
    """Draw the speed of dynamic sparse attention over causal FlashAttention-2, by the length of the row."""
    times: dict[str, dict[int, float]] = {name: {} for name in ("hash_16", "drop_50", "drop_30", "sdpa")}
    for row in read("sparse_attention_h200"):
        times.get(row["provider"], {})[int(row["length"])] = float(row["forward_ms"]) + float(row["backward_ms"])
    base, longest = times["sdpa"], max(times["sdpa"])
    series = {name: {length: base[length] / ms for length, ms in own.items()} for name, own in times.items()}
    draw_lines(figure, series, "{:.1f}x", "speed over causal SDPA")
    return f"Hash buckets pay off on long rows: {series['hash_16'][longest]:.1f}x with {longest:,} tokens"


def sparsity_chart(figure: Figure) -> str:
    """Draw the time of attention against the hidden share of the tiles, with the line through it and its R^2."""
    rows = read("sweep_h200")
    x = [float(row["sparsity"]) for row in rows]
    y = [float(row["forward_ms"]) + float(row["backward_ms"]) for row in rows]
    slope, offset = statistics.linear_regression(x, y)
    axes = figure.add_subplot()
    axes.plot([min(x), max(x)], [slope * share + offset for share in (min(x), max(x))], color=ALSO_OURS)
    axes.plot(x, y, "o", color=OURS, markersize=5)
    r_squared = statistics.correlation(x, y) ** 2
    axes.annotate(f"R² = {r_squared:.4f}", (x[1], y[1]), (14, 4), textcoords="offset points")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set(xlabel="hidden share of the tiles", ylabel="ms, forward and backward", ylim=0)
    return "Time falls in a straight line with the hidden share of the tiles"


EARLY = 50  # steps before rounding grows


def convergence_chart(figure: Figure) -> str:
    """Draw loss curves: a panel per task, a line of flashmask per seed, and its peers as marks on it."""
    rows = read("convergence_cpu")
    figure.set_size_inches(6.4, 4.4)
    styles = {"flashmask": ("-", "flashmask, a line per seed"), "sdpa": ("o", "SDPA, dense mask"), "trl": ("x", "TRL")}
    shown: dict[str, Any] = {}
    for axes, case in zip(figure.subplots(2, 2).flatten(), groups(rows, "task"), strict=True):
        for seed in groups(case, "seed"):
            for index, (name, (style, _)) in enumerate(styles.items()):
                losses = [float(row[name]) for row in seed if row[name]]
                means = [statistics.mean(losses[i - 10 : i]) for i in range(10, len(losses) + 1)]
                places = range(10, 10 + len(means))
                part = slice(10 * index, None, 20 if index else 1)  # a mark every 20 steps, not on each other
                color = INK if index else OURS
                (line,) = axes.plot(places[part], means[part], style, color=color, fillstyle="none", markersize=5)
                shown[name] = line
        axes.set(title=TASKS[case[0]["task"]], xlabel="step", ylabel="loss, mean of 10 steps")
    figure.legend([shown[name] for name in styles], [text for _, text in styles.values()], ncols=3,
                  loc="outside lower center")  # fmt: skip
    early = [row for row in rows if int(row["step"]) <= EARLY]
    off = max(abs(float(row[x]) - float(row["flashmask"])) for row in early for x in ("sdpa", "trl") if row[x])
    return f"The losses of SDPA and stock TRL lie on flashmask's: {EARLY} steps within {off:.4f}"


LINES = {
    "flashmask": (OURS, "o-"),
    "flash_attention_4": (INK, "D--"),
    "flex_attention": (GREY, "s-"),
    "sdpa": (OTHER, "v:"),
}


def row_lengths_chart(figure: Figure, shape: str, column: str, label: str) -> str:
    """Draw tokens per second or peak memory against the length of the row: a panel per task, a line per attention."""
    rows = select(read_all("row_lengths_*"), shape=shape)
    tasks, says = groups(rows, "task"), list[str]()
    lines = (len(tasks) + 1) // 2
    figure.set_size_inches(7.4, 2.5 * lines + 0.5)
    for panel, case in enumerate(tasks, start=1):
        axes, ends = figure.add_subplot(lines, 2, panel), {}
        for name, (color, style) in LINES.items():
            shown = select(case, implementation=name)
            points = [(int(row["length"]), float(row[column])) for row in trained(shown)]
            if not points:
                continue
            top = 3 if name == "flashmask" else 2  # peers may have equal figures
            axes.plot(*zip(*points, strict=True), style, markersize=4, color=color, zorder=top)
            ends[re.split(r" \(|,", name_of(name))[0]] = points[-1], color
            if shown[-1][RATE] == "out of memory":
                axes.plot(*points[-1], "x", color=color, markersize=9, markeredgewidth=2)
        log_axes(axes, sorted({int(row["length"]) for row in trained(rows)})[::2], label)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        end_labels(axes, ends)
        at = select(trained(case), length=common_length(case))
        figures = {row["implementation"]: float(row[column]) for row in at}
        ours, other = figures.pop("flashmask"), figures["sdpa"] if column == "peak_gib" else max(figures.values())
        axes.set_title(TASKS[case[0]["task"]])
        says.append(f"{axes.get_title()} {ours / other:.2f}x")
    base = "peak memory over SDPA's" if column == "peak_gib" else "speed over the fastest other attention"
    return f"{shape}'s shape, {base} with {int(at[0]['length']):,} tokens: {', '.join(says)}"


CHARTS: dict[str, Callable[[Figure], str]] = {
    "tasks": tasks_chart,
    "training": partial(rates_chart, tasks=("SFT", "LoRA")),
    "alignment": partial(rates_chart, tasks=("DPO", "reward model")),
    "parallel": parallel_chart,
    "attention": attention_chart,
    "mask_memory": mask_memory_chart,
    "sparse": sparse_chart,
    "sparsity": sparsity_chart,
    "convergence": convergence_chart,
    **{
        f"{kind}_{shape[-2:]}": partial(row_lengths_chart, shape=shape, column=column, label=label)
        for shape in ("llama-3.2-1b", "llama-3.1-8b")
        for kind, column, label in (("row_speed", RATE, "tokens per second"), ("row_memory", "peak_gib", "peak GiB"))
    },
    "diffusion": diffusion_chart,
    **{name: partial(gains_chart, **parts) for name, parts in GAINS.items()},
}
"""Function of each chart in docs/assets, by its name without the suffix."""


def words(svg: str) -> list[str]:
    """Return the texts of an SVG file, which have every title, name and number of a chart."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


# ----- pictures of masks


SEARCHED = (160, [(96, [128, 64, 192]), 224])  # a turn and two results of its tool; three rollouts go on from the first
IMAGE_SPANS = [(160, 416), (700, 956), (2200, 2456), (2900, 3156)]  # of Gemma 3: 256 tokens each
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
    "blocks([18, 14], [(3, 9), (12, 16), (18, 24)])",
    "block_causal([18, 14], 4)",
    "block_diffusion([10, 6], 4)",
    "draft_blocks([14, 6], [3, 6, 11, 18], 3)",
    "draft_chains([12, 6], [3, 5, 9, 14], [4, 3, 4, 3])",
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
    "sentences": lambda path: masks.document([14, 36, 9, 21, 13, 35]).plot(str(path)),
    "image_row": lambda path: masks.blocks([1500, 700, 1896], IMAGE_SPANS).plot(str(path)),
    "rollout_tree": lambda path: masks.tree([(640, [SEARCHED, (128, [160, 256])])]).plot(str(path)),
    **{f"masks/{name}": partial(thumbnail, mask) for name, (_, mask) in GALLERY.items()},
}
"""Function of each picture of a mask in docs/assets, by its name without the suffix."""
