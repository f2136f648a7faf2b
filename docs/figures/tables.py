"""The numbers and the tables of the pages: for each its rows, its columns, its command and its conditions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from charts import (
    DIFFUSION_WAYS,
    DRAFTERS,
    EARLY,
    EMBEDDING_CASES,
    EMBEDDING_WAYS,
    GALLERY,
    IMAGE_WAYS,
    embedding_cases,
    headlines,
    image_cases,
    share_of,
)
from results import (
    RATE,
    SETTINGS,
    TASKS,
    Row,
    common_length,
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

from flashmask_hf import masks

Cell = Callable[[list[Row]], str]
"""What a column of a table shows of the rows of its line."""
Columns = dict[str, str | Cell]
"""Columns of a table by title; a text is the format of the first row of a line."""

PEERS = ("fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn")
FLASH_ATTENTION = ("full", "causal", "sliding_window", "causal_document", "document")  # masks that it has a form for
WIDTHS = ("64", "128")  # sizes of heads that sentences speak of


# ----- cells and tables


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

    Without a row or its figure it is `missing`. A row that was not timed shows the beginning of its `status`. Two rows
    raise.
    """

    def shown(rows: list[Row]) -> str:
        found = select(rows, **values)
        if not found:
            return missing
        (row,) = found
        if not timed(found):
            return row.get("status", missing).partition(":")[0]
        try:
            return form.format_map(row)
        except ValueError:  # an empty figure
            return missing

    return shown


def table(lines: Sequence[list[Row]], columns: Columns) -> str:
    """Return a table in Markdown, and below it the hardware and the versions of peers.

    Args:
        lines: the rows of each line.
        columns: title, and the format of a line's first row or the function that returns the cell.
    """
    shown = [list(columns), ["---"] + ["---:"] * (len(columns) - 1)]
    for line in lines:
        shown.append([x.format_map(line[0]) if isinstance(x, str) else x(line) for x in columns.values()])
    text = "\n".join(f"| {' | '.join(line)} |" for line in shown)
    packages = dict.fromkeys(row["version"] for line in lines for row in line if row.get("version"))
    return f"\n\n{text}\n\n*{', '.join([machine_of(lines[0][0]), *packages])}*\n\n"


def machine_of(row: Row) -> str:
    """Return what a row was measured on."""
    if "processor" in row:
        return f"{row['cores']} cores ({row['processor']}), Python {row['python']}"
    if row["gpu"] == "cpu":
        return "Two cores"
    count, name = int(row.get("gpus", 1)), f"{row['gpu'].replace(' HBM3', '')}, bfloat16"
    return f"One {name}" if count == 1 else f"{count} {name}, NCCL on one host"


# ----- numbers


def speed(provider: str) -> str:
    """Return the range and the mean of speeds over FlexAttention."""
    rows = [row for row in read("attention_h200") if row["head_dim"] in WIDTHS and row["length"] in ("8192", "32768")]
    found = ratios(rows, "both_tflops", provider, "flex_attention", "mask", "length", "head_dim")
    mean = statistics.geometric_mean(found)
    return f"{min(found):.2f} to {max(found):.2f} times as fast (geometric mean {mean:.2f})"


def first_call(cache_state: str) -> str:
    """Return the seconds of a first forward and backward in a fresh process."""
    times = sorted({f"{float(row['first_s']):.1f}" for row in select(read("first_call_h200"), cache=cache_state)})
    return " to ".join(dict.fromkeys((times[0], times[-1]))) + " s"


def versions() -> str:
    """Return the versions of torch, Triton and transformers in all results, by device."""
    found = sorted({
        f"torch {row['torch'].split('+')[0]}, Triton {row['triton']} and transformers {row['transformers']} "
        f"on {'CPUs' if row['gpu'] == 'cpu' else 'GPUs'}"
        for row in read_all("*")
    })  # fmt: skip
    return "; ".join(found)


def long_length() -> str:
    """Return the tokens of the longest row of the 8B shape."""
    return f"{max(int(row['tokens']) for row in read('long_rows_h200') if '8b' in row['shape']):,}"


def headline(task: str, form: str = "{:.1f}x") -> str:
    """Return the speed of a task over the fastest other way."""
    return form.format(gain(headlines()[task][1]))


# ----- attention alone


def _there(rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Return the providers of an order that have rows."""
    return [provider for provider in order if any(row["provider"] == provider for row in rows)]


def _width(rows: list[Row]) -> str:
    return width_of(rows[0])


def _both_ms(rows: Sequence[Row]) -> list[Row]:
    """Return the timed rows with the milliseconds of both passes."""
    return [row | {"both_ms": str(float(row["forward_ms"]) + float(row["backward_ms"]))} for row in timed(rows)]


def _ratio(column: str, ours: str, peer: str, *by: str, **where: str) -> Cell:
    """Return a cell with the spread of a provider's figures over a peer's among the cases (columns `by`) of a line."""
    return lambda rows: spread(ratios(select(rows, **where), column, ours, peer, *by))


def peers() -> str:
    """Attention alone by mask beside the fastest peers, forward and backward, heads of 128."""
    rows = select(read("attention_peers_h200"), length="8192", head_dim="128")
    names = _there(rows, ("flashmask", *PEERS))
    both = partial(cell, "{forward_tflops:.0f}/{backward_tflops:.0f}", "not run")
    columns = {"mask": lambda rows: name_of(rows[0]["mask"])} | {name_of(name): both(provider=name) for name in names}
    return table(groups(rows, "mask"), columns)


def peers_widths() -> str:
    """Speed of flashmask over each peer by size of heads, both passes, over the masks that both ran."""
    rows = select(read("attention_peers_h200"), length="8192")
    names = _there(rows, PEERS)

    def ratio(name: str, rows: list[Row]) -> str:
        found = ratios(rows, "both_tflops", "flashmask", name, "mask")
        tried = [row for row in rows if not row["status"].startswith("cannot")]
        return spread(found) if found else cell("", "not run")(select(tried, provider=name)[:1])

    lines = sorted(groups(rows, "head_dim", "v_head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    columns = {"head_dim": _width} | {name_of(name): partial(ratio, name) for name in names}
    return table(lines, columns)


def _of_best(flash_attention: bool, rows: list[Row]) -> str:
    """Return the speed over the fastest peer in each mask that FlashAttention-4 has a form for, or not."""
    found = []
    for case in groups(timed(rows), "mask"):
        speeds = {row["provider"]: float(row["both_tflops"]) for row in case}
        own = speeds.pop("flashmask")
        if speeds and (case[0]["mask"] in FLASH_ATTENTION) == flash_attention:
            found.append(own / max(speeds.values()))
    return spread(found)


def peers_shapes(name: str, *lengths: str) -> str:
    """Speed of flashmask over the fastest peer by shape and size of heads, both passes."""
    rows = [row for row in read(name) if row["length"] in lengths and row["head_dim"] in WIDTHS]
    columns: Columns = {
        "rows": "{batch} x {length:,.0f}",
        "heads": "{heads}/{kv_heads} of {head_dim}",
        "full, causal, window, documents": partial(_of_best, True),
        "other masks": partial(_of_best, False),
    }
    lines = sorted(groups(rows, "batch", "length", "head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    return table(lines, columns)


def deterministic() -> str:
    """Time with sums in a fixed order in the gradient of q, relative to sums in any order."""
    rows = [row | {"hidden": str(row["mask"] == "hidden_intervals")} for row in read("deterministic_h200")]
    ratio = partial(_ratio, "backward_ms", "flashmask_deterministic", "flashmask", "mask")
    columns: Columns = {
        "head size": _width,
        "tokens per row": "{length:,.0f}",
        "query heads per key head": lambda rows: str(int(rows[0]["heads"]) // int(rows[0]["kv_heads"])),
        "backward": ratio(hidden="False"),
        "with two hidden intervals": ratio(hidden="True"),
    }
    return table(groups(rows, "head_dim", "v_head_dim", "length", "heads", "kv_heads"), columns)


RAGGED = {
    "short": "many documents of 128 to 512 tokens in 32K",
    "grouped": "8 query heads per key head, 2K and 8K",
    "few": "1 to 4 heads, 8K and 32K",
    "chunk": "1K queries of 16K keys",
    "across": "1K queries to 16K keys and back, bidirectional",
    "odd": "rows of 8,191 and 5,000",
}


def ragged() -> str:
    """Speed over FlexAttention where there is little or uneven work, by group of cases."""
    rows = [row | {"group": row["case"].split()[0]} for row in _both_ms(read_all("ragged_*"))]
    columns: Columns = {"work": lambda rows: RAGGED[rows[0]["group"]]}
    columns["cases"] = lambda rows: str(len(groups(rows, "case")))
    names = _there(rows, ("flashmask", "flashmask_triton", "fa4", "cudnn_flex", "cudnn"))
    columns |= {name_of(name): _ratio("both_ms", "flex_attention", name, "case") for name in names}
    return table(groups(rows, "group"), columns)


def sparse() -> str:
    """Speed of dynamic sparse attention over causal FlashAttention-2."""
    rows = _both_ms(read("sparse_attention_h200"))

    def faster(length: str, own: list[Row]) -> str:
        peer = number(rows, "both_ms", provider="sdpa", length=length)
        return f"{peer / number(own, 'both_ms', length=length):.1f}x"

    columns: Columns = {"": lambda rows: name_of(rows[0]["provider"]).replace("flashmask", "causal flashmask")}
    lengths = ("2048", "8192", "16384", "32768")
    columns |= {f"{int(length):,} tokens": partial(faster, length) for length in lengths}
    lines = [select(rows, provider=name) for name in ("hash_16", "drop_30", "drop_50", "flashmask")]
    return table(lines, columns)


def dropout() -> str:
    """Milliseconds of attention with dropout 0.1 and without."""
    rows = read_all("dropout_*")
    columns: Columns = {"mask": lambda line: name_of(line[0]["mask"]), "tokens per row": "{length:,.0f}"}
    columns["head size"] = _width
    for title, name in (("flashmask", "flashmask"), ("portable kernels", "flashmask_triton"), ("SDPA", "sdpa"),
                        ("SDPA, dense mask", "sdpa_dense")):  # fmt: skip
        columns[title] = cell("{forward_ms:.2f}/{backward_ms:.2f}", "", provider=name)
        drops = "flashmask_dropout" if name == "flashmask_triton" else f"{name}_dropout"
        if name != "flashmask":
            columns[f"{title}, dropout"] = cell("{forward_ms:.2f}/{backward_ms:.2f}", "", provider=drops)
    return table(groups(rows, "mask", "length", "head_dim"), columns)


def drafts() -> str:
    """Attention of drafters beside FlexAttention, mask making included."""
    rows = read_all("drafts_*")
    ways = {"flashmask": "flashmask", "flex_attention": "FlexAttention"}
    more = {"eagle3": "7 steps", "dflash": "512 blocks of 16"}
    columns: Columns = {
        "layer": lambda line: f"{DRAFTERS[line[0]['task']]}, {more[line[0]['task']]}",
        "tokens per row": "{length:,.0f}",
    }
    columns |= {title: cell("{milliseconds:.1f} / {peak_gib:.1f}", "-", implementation=x) for x, title in ways.items()}

    def faster(line: list[Row]) -> str:
        ours, other = (select(line, implementation=x)[0]["milliseconds"] for x in ways)
        return f"{float(other) / float(ours):.2f}x" if ours and other else "-"

    columns["gain"] = faster
    return table(ordered(rows, "task", "length"), columns)


def decoding() -> str:
    """One decoding step under a mask of padding, relative to SDPA with that mask, by cache: more than 1 is slower."""
    rows = select(read("decode_h200"), mask="padding")
    columns: Columns = {"keys in the cache": "{length:,.0f}", "heads of queries/keys": "{heads}/{kv_heads}"}
    for kind, column in (("CUDA graph", "graph_us"), ("eager", "eager_us")):
        for batch in dict.fromkeys(row["batch"] for row in rows):
            columns[f"{kind}, batch {batch}"] = _ratio(column, "flashmask", "sdpa_dense", "case", batch=batch)
    return table(ordered(rows, "length", "kv_heads"), columns)


def short() -> str:
    """Short rows beside SDPA with a dense mask."""
    rows = read("short_h200")

    def ratio(column: str, passes: str, line: list[Row]) -> str:
        by = ("batch", "length", "head_dim")
        return spread(ratios(select(rows, passes=passes), column, line[0]["provider"], "sdpa_dense", *by))

    columns: Columns = {"": lambda rows: name_of(rows[0]["provider"])}
    for kind, column in (("host", "host_us"), ("CUDA graph", "graph_us")):
        columns |= {f"{kind}, {passes}": partial(ratio, column, passes) for passes in ("forward", "both")}
    lines = [select(rows, provider=name) for name in ("flashmask", "flashmask_triton")]
    return table(lines, columns)


def masks_made() -> str:
    """What a mask costs before the first tile: its plan, beside FlexAttention's block mask."""
    plans, rows = read("plan_h200"), timed(select(read("attention_h200"), head_dim="128"))
    rows = [row for row in rows if row["length"] in ("8192", "32768", "131072") and float(row["mask_mib"])]

    def graph(line: list[Row]) -> str:
        times = [float(row["graph_us"]) for row in select(plans, length=line[0]["length"])]
        return f"{min(times):.0f} to {max(times):.0f} us"

    def host(provider: str, line: list[Row]) -> str:
        times, sizes = zip(
            *((float(x["mask_ms"]), float(x["mask_mib"])) for x in select(line, provider=provider)), strict=True
        )
        return f"{min(times):.1f} to {max(times):.1f} ms, {max(sizes):.2f} MiB"

    made = {"flashmask": "plan, with the host", "flex_attention": "FlexAttention's mask", "cudnn_flex": "cuDNN's plan"}
    columns: Columns = {"tokens": "{length:,.0f}", "plan, on the GPU": graph}
    columns |= {made[name]: partial(host, name) for name in _there(rows, list(made))}
    return table(groups(rows, "length"), columns)


# ----- training


def _model(line: list[Row]) -> str:
    """Return a shape's size and what is trained."""
    return f"{size_of(line[0])}, {'LoRA' if line[0]['trained'] == 'adapters' else 'all weights'}"


def _lines(rows: Sequence[Row], *by: str, peer: str = "flash_attention_4") -> list[list[Row]]:
    """Return the timed rows of each case in which the peer was run, flashmask has figures, and so has another way."""
    cases = [timed(case) for case in groups(rows, *by) if select(case, implementation=peer)]
    return [x for x in cases if select(x, implementation="flashmask") and len(groups(x, "implementation")) > 1]


def _beside(title: str) -> Columns:
    """Return the columns of the fastest rows of flashmask and of the others, whose column has this title."""

    def rate(which: int, line: list[Row]) -> str:
        row = fastest(line)[which]
        more = [name_of(row["implementation"])] * which + [SETTINGS[row["setting"]]] * (row["setting"] != "eager")
        return f"{int(row[RATE]):,}" + (f" ({', '.join(more)})" if more else "")

    return {
        "flashmask, tokens/s": partial(rate, 0),
        title: partial(rate, 1),
        "gain": lambda line: f"{gain(line):.2f}x",
        "peak GiB of both": lambda line: " / ".join(f"{float(row['peak_gib']):.1f}" for row in fastest(line)),
    }


def fast_settings() -> str:
    """The fastest setting of fine-tuning by model and length of a row, beside the fastest other way."""
    lines = _lines(read_all("settings_*"), "shape", "task", "length")
    lines.sort(key=lambda line: (line[0]["shape"], line[0]["task"], int(line[0]["length"])))
    columns = {"model": _model, "tokens per row": "{length:,.0f}", **_beside("fastest other way, tokens/s")}
    return table(lines, columns)


def settings() -> str:
    """Fine-tuning with flashmask by setting."""
    rows = select(read_all("settings_*"), implementation="flashmask")
    lengths = {row["length"] for row in select(rows, shape="llama-3.2-1b")}
    rows += [row for row in read("training_kept_h200") if row["length"] not in lengths]
    columns: Columns = {"model": _model, "tokens per row": "{length:,.0f}"}
    figures = partial(cell, f"{{{RATE}:,.0f}} / {{peak_gib:.1f}}")
    columns |= {words: figures(setting=name) for name, words in SETTINGS.items() if select(rows, setting=name)}
    columns["first compiled step"] = cell("{first_step_seconds:.0f} s", setting="compiled")
    return table(ordered(rows, "shape", "length"), columns)


def alignment() -> str:
    """DPO and reward models beside stock TRL."""
    lines = _lines(read_all("alignment_*"), "task", "length")
    columns: Columns = {"task": lambda line: TASKS[line[0]["task"]], "tokens per row": "{length:,.0f}"}
    columns |= _beside("fastest of stock TRL, tokens/s")
    return table(lines, columns)


def preference() -> str:
    """ORPO and KTO with shared prefixes beside TRL's padded batches."""
    lines = _lines(read_all("preference_*"), "shape", "task", "length", peer="trl_flash_attention_4")
    columns: Columns = {"shape": _model, "trainer": lambda line: TASKS[line[0]["task"]]}
    columns |= {"tokens per batch": "{length:,.0f}"} | _beside("fastest without sharing, tokens/s")
    pair = ("flashmask", "trl_flash_attention_4")
    columns["over FlashAttention-4"] = lambda line: f"{gain([x for x in line if x['implementation'] in pair]):.2f}x"
    columns["hook per step"] = cell("{hook_milliseconds:.1f} ms", implementation="flashmask")
    return table(lines, columns)


def trajectories() -> str:
    """SFT on the steps of trajectories with shared prefixes, and on whole examples."""
    lines = _lines(read_all("trajectories_*"), "shape", "length")

    def gained(line: list[Row]) -> str:
        rates = {row["implementation"]: float(row["examples_per_second"]) for row in line}
        return f"{rates.pop('flashmask') / max(rates.values()):.2f}x"

    columns: Columns = {"model": _model, "tokens per row": "{length:,.0f}"}
    titles = {"flashmask": "prefixes shared", "trl_flashmask": "not shared", "flash_attention_4": "FlashAttention-4"}
    figures = "{examples_per_second:.2f} / {peak_gib:.1f}"
    columns |= {title: cell(figures, implementation=name) for name, title in titles.items()} | {"gain": gained}
    return table(lines, columns)


def row_lengths() -> str:
    """Training against the length of the row: the longest row that all ran, and the longest of flashmask."""
    rows = read_all("row_lengths_*")
    figures = f"{{{RATE}:,.0f}} / {{peak_gib:.1f}}"

    def at_common(name: str, rows: list[Row]) -> str:
        return cell(figures, implementation=name, length=common_length(rows))(trained(rows))

    def longest(rows: list[Row]) -> str:
        own = select(rows, implementation="flashmask")
        more = "" if [row[RATE] for row in own if not row["peak_gib"]] == ["out of memory"] else " or more"
        return ("{length:,.0f}" + more + ": " + figures).format_map(trained(own)[-1])

    columns: Columns = {
        "task": lambda rows: f"{size_of(rows[0])} {TASKS[rows[0]['task']]}",
        "tokens per row": lambda rows: f"{int(common_length(rows)):,}",
    }
    names = dict.fromkeys(row["implementation"] for row in trained(rows))
    columns |= {name_of(name): partial(at_common, name) for name in names}
    columns["longest of flashmask"] = longest
    return table(groups(rows, "shape", "task"), columns)


def _ways(lines: Sequence[list[Row]], ways: Mapping[str, str], digits: int = 0) -> Columns:
    """Return the columns of ways that ran: their rates and memory, or why they have none."""

    def figures(name: str, line: list[Row]) -> str:
        rows = select(line, implementation=name)
        if not rows:
            return "-"
        (row,) = rows
        form = f"{{{RATE}:,.0f}} / {{peak_gib:.{digits}f}}" if trained(rows) else f"{{{RATE}}}"
        return form.format_map(row)

    ran = {row["implementation"] for line in lines for row in line}
    return {way: partial(figures, name) for name, way in ways.items() if name in ran}


def images() -> str:
    """Fine-tuning on images beside stock TRL, and its chart."""
    lines = image_cases()
    columns: Columns = {"model": "{shape}", "tokens per row": "{length:,.0f}"}
    columns["in images"] = lambda line: share_of(line[0])
    columns["images/s, packed"] = cell("{images_per_second:.1f}", implementation="flashmask")
    return table(lines, columns | _ways(lines, IMAGE_WAYS))


def embeddings() -> str:
    """Embedding models and rerankers beside padded batches, and their chart."""
    lines, columns = embedding_cases(), Columns({"model": "{shape}"})
    columns["batch"] = lambda line: f"{line[0]['size']}, {EMBEDDING_CASES[line[0]['case']]}"
    columns |= {"tokens": "{tokens:,.0f}", "padding": "{padding:.0%}"} | _ways(lines, EMBEDDING_WAYS, 1)
    return table(lines, columns)


def towers() -> str:
    """An image tower alone."""
    columns: Columns = {"tower of": "{shape}", "images": "{size}", "patches": "{tokens:,.0f}"}
    lines = groups(read_all("towers_*"), "shape", "size")
    ways = {"flashmask": "flashmask", "flash_attention_4": "FlashAttention-4", "sdpa": "SDPA"}
    return table(lines, columns | _ways(lines, ways, 1))


def diffusion() -> str:
    """Block diffusion beside dllm and FlexAttention, and its chart."""
    lines = groups(read_all("diffusion_*"), "shape", "length")
    columns: Columns = {"model": "{shape}", "trained": "{trained}", "tokens of documents": "{length:,.0f}"}
    return table(lines, columns | _ways(lines, DIFFUSION_WAYS))


def profile() -> str:
    """A step's time by kind of work, by shape, length and setting."""
    rows = [row for row in read_all("step_profile_*") if row["share"] and row["setting"] in ("kept", "compiled+kept")]
    cases = groups(rows, "setting", "shape", "length")
    cases.sort(key=lambda case: (len(case[0]["setting"]), size_of(case[0])))

    def title(case: Row) -> str:
        return f"{_model([case])}, {int(case['length']):,}{', compiled' * ('compiled' in case['setting'])}"

    def share(kinds: Sequence[str], case: list[Row]) -> float:
        return sum(float(row["share"]) for row in case if row["kind"] in kinds)

    kinds = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind != "idle"]
    large = [kind for kind in kinds if max(share([kind], case) for case in cases) >= 0.02]
    large.sort(key=lambda kind: -sum(share([kind], case) for case in cases))
    shown = {kind: [kind] for kind in large} | {"all else": list(set(kinds) - set(large)), "idle": ["idle"]}

    def shares(case: list[Row], line: list[Row]) -> str:
        if line[0]["kind"] == "a step":
            return f"{float(case[0]['step_milliseconds']):,.0f} ms"
        return f"{share(shown[line[0]['kind']], case):.1%}"

    columns: Columns = {"": "{kind}"}
    columns |= {title(case[0]): partial(shares, case) for case in cases}
    return table([[rows[0] | {"kind": kind}] for kind in ("a step", *shown)], columns)


def long_rows(name: str) -> str:
    """What fits by a file of results: model, what is trained, tokens per row, speed and memory; nothing without it."""
    rows = [row for row in read_all(name) if row["peak_gib"]]
    if not rows:
        return ""
    columns: Columns = {
        "shape of Llama": _model,
        "tokens per row": "{tokens:,.0f}",
        "documents": "{documents}",
        "tokens/s": f"{{{RATE}:,.0f}}",
        "peak of the GPU": "{peak_gib:.0f} GiB",
        "on the host": lambda rows: "{host_gib:.0f} GiB".format_map(rows[0]) if float(rows[0]["host_gib"]) else "-",
        "attention": "{attention}",
    }
    return table([[row] for row in rows], columns)


def parallel(name: str, units: str) -> str:
    """Rows split over two GPUs by a file: tokens per second by exchange, its share of a step, and memory, if any."""
    rows = read_all(name)
    if not rows:
        return ""

    def shares(rows: list[Row]) -> str:
        found = [cell("{exchange_share:.1%}", provider=name)(rows) for name in ("heads", "keys")]
        return " and ".join(share for share in found if share)

    columns: Columns = {
        "shape of Llama": lambda rows: size_of(rows[0]),
        f"tokens per {units.removesuffix('s') if units == 'questions' else 'row'}": "{tokens:,.0f}",
        units: "{documents}",
    }
    rate, ran = partial(cell, f"{{{RATE}:,.0f}}"), {row["provider"] for row in rows}
    ways = [way for way in ("heads", "keys", "whole", "sdpa_cp") if way in ran]
    columns |= {f"{name_of(way)}, tokens/s": rate(provider=way) for way in ways}
    columns["share of the exchange in a step, heads and keys"] = shares
    columns["peak of a GPU"] = cell("{peak_gib:.0f} GiB", provider="heads")
    return table(groups(rows, "shape", "tokens", "documents"), columns)


CURVES = {"flashmask_again": "again", "flashmask_unskipped": "no tile skipped", "sdpa": "SDPA, dense", "trl": "TRL"}


def convergence() -> str:
    """The largest difference of a loss from flashmask's, over all seeds and steps, by task and curve."""
    rows = read("convergence_cpu")
    count = max(int(row["step"]) for row in rows)

    def losses(rows: list[Row]) -> str:
        first, last = ([row for row in rows if start < int(row["step"]) <= start + count // 10]
                       for start in (0, count - count // 10))  # fmt: skip
        return " to ".join(f"{statistics.mean(float(row['flashmask']) for row in part):.2f}" for part in (first, last))

    def off(name: str, rows: list[Row]) -> str:
        found = [(abs(float(row[name]) - float(row["flashmask"])), int(row["step"])) for row in rows if row[name]]
        early, every = (max((x for x, step in found if step <= end), default=0) for end in (EARLY, count))
        return (f"{early:.1e} / {every:.1e}" if every else "equal to the bit") if found else ""

    columns: Columns = {"task": "{task}", "loss": losses}
    columns |= {title: partial(off, name) for name, title in CURVES.items()}
    return table(groups(rows, "task"), columns)


def packing() -> str:
    """Packers of a large dataset."""
    rows = read("packing_cpu")
    names = {"TRL bfd": 'TRL, "bfd"', "pack_dataset": "`pack_dataset`"}
    columns: Columns = {
        "": lambda rows: names[rows[0]["packer"]],
        "time": "{seconds:.2f} s",
        "peak memory": "{peak_mib:.0f} MiB",
        "full": "{efficiency:.2%}",
    }
    return table(groups(rows, "packer"), columns)


def grpo(models: Mapping[str, str], peer: str) -> str:
    """Updates of GRPO beside the fastest padded one: of the models named, in the cases that the peer has run."""
    by = ("model", "prompt", "completion", "groups", "generations")
    lines = _lines([row for row in read_all("grpo_*") if row["model"] in models], *by, peer=f"padded_{peer}")
    columns: Columns = {
        "model": lambda line: models[line[0]["model"]],
        "P : C": "{prompt:,.0f} : {completion:,.0f}",
        "micro-batch": "{groups} x {generations}",
    }
    columns |= _beside("fastest padded, tokens/s")
    return table(lines, columns)


def first_step() -> str:
    """A new user's way to the first training step."""
    columns: Columns = {"`git clone`, `make demo`, then": "{stage}", "after": "{seconds:.0f} s"}
    return table(groups(read("first_step_cpu"), "stage"), columns)


def sparse_training() -> str:
    """Training with hash-sparse attention."""
    rows = [row for length in ("8192", "16384") for row in read(f"sparse_training_{length}_hash_h200")]
    full, ours = (cell("{held_out_loss:.2f}", variant=variant) for variant in ("sdpa", "hash_16"))
    steps = rows[0]["steps"]
    columns: Columns = {
        "rows of": "{length:,.0f} bytes",
        "SDPA, a step": cell("{ms_per_step:.1f} ms", variant="sdpa"),
        "16 hash buckets": cell("{ms_per_step:.1f} ms", variant="hash_16"),
        "gain": cell("{against_sdpa:.2f}x", variant="hash_16"),
        f"held-out loss after {steps} steps, SDPA / hash": lambda rows: f"{full(rows)} / {ours(rows)}",
    }
    return table(groups(rows, "length"), columns)


def gallery() -> str:
    """The gallery: of each mask family its picture, the first sentence of its docstring, and its call."""
    parts = ['<div class="gallery" markdown>\n']
    for name, (call, _) in GALLERY.items():
        sentence = " ".join((getattr(masks, name).__doc__ or "").split("\n\n")[0].split())
        picture = f"![{name}](assets/masks/{name}.png)"
        parts.append(f"<div markdown>\n\n## {name}\n\n{picture}\n\n{sentence}\n\n`masks.{call}`\n\n</div>")
    return "\n\n" + "\n".join([*parts, "</div>"]) + "\n\n"


PLAIN = (peers, peers_widths, deterministic, ragged, sparse, dropout, drafts, decoding, short, masks_made,
         fast_settings, settings, alignment, preference, trajectories, row_lengths, images, towers, embeddings, profile,
         convergence, packing, first_step, sparse_training, gallery, long_length,
         diffusion, versions)  # fmt: skip
TEXTS: dict[str, Callable[[], str]] = {function.__name__.replace("_", "-"): function for function in PLAIN} | {
    "peers-long": partial(peers_shapes, "attention_peers_h200", "32768", "131072"),
    "peers-grouped": partial(peers_shapes, "attention_peers_gqa_h100", "8192", "32768", "131072"),
    "long-rows": partial(long_rows, "long_rows_h200"),
    "long-rows-h100": partial(long_rows, "long_rows_h100"),
    "long-rows-two": partial(long_rows, "long_rows_two_h200"),
    "parallel": partial(parallel, "parallel_h200", "documents"),
    "parallel-dpo": partial(parallel, "parallel_dpo_h200", "questions"),
    "dpo-gain": partial(headline, "DPO"),
    "reward-gain": partial(headline, "reward model"),
    "grpo-gain": partial(headline, "GRPO"),
    "grpo": partial(grpo, {"llama-3.2-1b": "1B"}, "flash_attention_4"),
    "grpo-images": partial(grpo, {name: name for name in ("qwen2.5-vl-3b", "gemma-3-4b")}, "sdpa"),
    "flex": partial(speed, "flashmask"),
    "flex-portable": partial(speed, "flashmask_triton"),
    "first-call": partial(first_call, "empty"),
    "cached-call": partial(first_call, "full"),
}
"""Function of each number and table, by the name that pages call it."""
