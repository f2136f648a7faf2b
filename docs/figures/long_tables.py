"""Tables of training on long rows: what fits, where the time of a step goes, and rows over several GPUs."""

from __future__ import annotations

from charts import ROW_LENGTHS
from results import Row, maybe, name_of, read, read_all, select, trained
from tables import measured, table


def _row_of(row: Row) -> tuple[str, ...]:
    """Return the columns that tables of long rows share: speed, and memory of the GPU and of the host."""
    host = f"{float(row['host_gib']):.0f} GiB" if float(row["host_gib"]) else "-"
    return f"{int(row['tokens_per_second']):,}", f"{float(row['peak_gib']):.0f} GiB", host


LONG = "adapters of rank 16 on all linear layers without dropout, or all weights in float32, random weights"


def shape_of(row: Row) -> str:
    """Return a shape's size and what is trained."""
    return f"{row['shape'].rpartition('-')[2].upper()}, {'LoRA' if row['trained'] == 'adapters' else 'all weights'}"


def profile(setting: str) -> str:
    """Return the table of a step's time by kind of work, by shape and length; nothing if none was measured."""
    rows = [row for row in read_all("step_profile_*") if row["setting"] == setting and row["share"]]
    if not rows:
        return ""
    columns = sorted({(shape_of(row), int(row["length"])) for row in rows})
    cells = {(shape_of(row), int(row["length"]), row["kind"]): row for row in rows}
    totals = {column: float(cells[(*column, "idle")]["step_milliseconds"]) for column in columns}
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != "idle"))

    def share(kind: str, column: tuple[str, int]) -> float:
        row = cells.get((*column, kind))
        return float(row["share"]) if row else 0.0

    kinds.sort(key=lambda kind: -sum(share(kind, column) for column in columns))
    lines = [
        ("a step", *(f"{totals[column]:,.0f} ms" for column in columns)),
        *((kind, *(f"{share(kind, column):.1%}" for column in columns)) for kind in [*kinds, "idle"]),
    ]
    head = ("", *(f"{shape}, {length:,}" for shape, length in columns))
    work = "kernels, copies and fills of the GPU, which is idle for the rest, rows of 1 to 10 documents, random weights"
    command = f"benchmarks/step_profile.py --shape SHAPE --settings {setting}"
    return table(head, lines, measured(rows, command, work))


def row_lengths() -> str:
    """Return charts and table of training against the length of the row, of the shapes that were measured."""
    rows = read_all("row_lengths_*")
    if not rows:
        return ""
    pictures = [
        f"![{chart.keywords['title']}: SFT, LoRA, DPO, reward model](assets/{name}.svg)"
        for name, chart in ROW_LENGTHS.items()
        if select(rows, shape=chart.keywords["shape"])
    ]
    lines = []
    for shape, task in dict.fromkeys((row["shape"], row["task"]) for row in rows):
        ours = [row for row in rows if (row["shape"], row["task"]) == (shape, task)]
        ran = trained(ours)
        names = {row["implementation"] for row in ran}
        lengths = {int(row["length"]) for row in ran}
        every = [x for x in lengths if len(select(ran, length=str(x))) == len(names)]
        for name in dict.fromkeys(row["implementation"] for row in ran):
            own = select(ran, implementation=name)
            at = select(own, length=str(max(every, default=0)))
            ended = [row["tokens_per_second"] for row in select(ours, implementation=name) if not row["peak_gib"]]
            lines.append(
                (
                    f"{shape.rpartition('-')[2].upper()} {task}",
                    name_of(name),
                    *(_speed_and_memory(at[0]) if at else ("", "")),
                    f"{int(own[-1]['length']):,}" + ("" if ended == ["out of memory"] else " or more"),
                    _speed_and_memory(own[-1])[1],
                )
            )
    head = ("task", "attention", "tokens a row", "tokens/s / GiB", "longest row", "tokens/s / GiB")
    shape = "the longest row that all ran, and the longest that fits, lengths double from 4,096, random weights"
    text = table(head, lines, measured(rows, "benchmarks/row_lengths.py --shapes SHAPE", shape))
    return "\n\n" + "\n\n".join(pictures) + text


def _speed_and_memory(row: Row) -> tuple[str, str]:
    """Return the length of a row of `row_lengths.py`, and its speed and peak memory."""
    return f"{int(row['length']):,}", f"{int(row['tokens_per_second']):,} / {float(row['peak_gib']):.1f}"


def kept() -> str:
    """Return the table of training steps by length of a row, with and without attention's results kept."""
    rows = read("training_kept_h200")
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        again, kept = (select(rows, length=length, implementation=x)[0] for x in ("flashmask", "flashmask_kept"))
        ratio = float(kept["seconds_per_step"]) / float(again["seconds_per_step"])
        times = [f"{1000 * float(row['seconds_per_step']):,.0f} ms" for row in (again, kept)]
        peaks = [f"{float(row['peak_gib']):.1f} GiB" for row in (again, kept)]
        lines.append((f"{int(length):,}", *times, f"{ratio:.2f}", *peaks))
    lengths = " ".join(dict.fromkeys(row["length"] for row in rows))
    command = f"benchmarks/training.py --length {lengths} --rows 3 --seconds 20 --fused --implementations flashmask"
    heads = ("tokens per row", "step, recomputed", "step, kept", "ratio", "peak, recomputed", "peak, kept")
    shape = "Llama-3.2-1B's shape, all weights, rows of 1 to 10 documents, medians of steps in turns"
    return table(heads, lines, measured(rows, f"{command} flashmask_kept", shape))


def long_rows(name: str, host: str) -> str:
    """Return the table of what fits by a file of results; nothing if there is none.

    It has the model, what is trained, tokens of a row, speed and memory.
    """
    rows = [row for row in read_all(name) if row["peak_gib"]]
    if not rows:
        return ""
    lines = [
        (
            shape_of(row),
            f"{int(row['tokens']):,}",
            row["documents"],
            *_row_of(row),
            row["attention"],
        )
        for row in rows
    ]
    return table(
        ("shape of Llama", "tokens a row", "documents", "tokens/s", "peak of the GPU", "on the host", "attention"),
        lines,
        measured(rows, "benchmarks/long_rows.py --shape SHAPE --tokens TOKENS", host, LONG),
    )


def parallel() -> str:
    """Return the table of rows split over two GPUs: tokens per second by exchange, its share of a step, and memory."""
    rows = read("parallel_h200")
    cases = dict.fromkeys((row["shape"], row["tokens"], row["documents"]) for row in rows)
    lines = []
    for shape, tokens, documents in cases:
        case = select(rows, shape=shape, tokens=tokens, documents=documents)
        shares = [maybe(case, "exchange_share", "{:.1%}", provider=name) for name in ("heads", "keys")]
        lines.append(
            (
                shape.rpartition("-")[2].upper(),
                f"{int(tokens):,}",
                documents,
                *(maybe(case, "tokens_per_second", "{:,.0f}", provider=name) for name in ("heads", "keys")),
                *(maybe(case, "tokens_per_second", "{:,.0f}", provider=name) for name in ("whole", "sdpa_cp")),
                " and ".join(share for share in shares if share),
                maybe(case, "peak_gib", "{:.0f} GiB", provider="heads"),
            )
        )
    return table(
        (
            "shape of Llama",
            "tokens a row",
            "documents",
            "heads, tokens/s",
            "keys, tokens/s",
            "a row on each GPU, tokens/s",
            "torch's context parallelism with SDPA, tokens/s",
            "share of the exchange in a step, heads and keys",
            "peak of a GPU",
        ),
        lines,
        measured(
            rows,
            "benchmarks/parallel.py --shape SHAPE --tokens TOKENS --documents DOCUMENTS",
            "forward and backward of all weights, FSDP2, gradient checkpointing",
        ),
    )
