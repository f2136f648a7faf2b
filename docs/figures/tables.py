"""Tables of the pages, each with its line of conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from charts import ROW_LENGTHS
from results import Row, cell, mask_of, maybe, name_of, number, ratios, read, read_all, select, timed
from values import WIDTHS, best_stock

CPU = "Two cores"
ORDER = (
    "full",
    "causal",
    "sliding_window",
    "causal_document",
    "document",
    "share_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_document",
    "prefix_lm_causal",
    "qk_sparse",
    "random_eviction",
)
"""Mask families in the order of the tables of attention."""


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


def training() -> str:
    """Return the table of supervised fine-tuning on packed rows."""
    rows = read("training_h200")
    lines = [
        (
            name_of(row["implementation"]) + (", dense mask" if row["implementation"] == "sdpa" else ""),
            f"{int(row['tokens_per_second']):,}",
            f"{float(row['against_sdpa']):.2f}x",
            f"{float(row['peak_gib']):.1f} GiB",
        )
        for row in sorted(rows, key=lambda row: -int(row["tokens_per_second"]))
    ]
    shape = f"rows of {int(rows[0]['length']):,} tokens of 1 to 10 documents, gradient checkpointing, AdamW"
    return table(
        ("attention", "tokens/s", "against SDPA", "peak memory"),
        lines,
        measured(rows, "benchmarks/training.py --rows 4", "Llama-3.2-1B's shape", shape),
    )


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
        ran = [row for row in ours if row["peak_gib"]]
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
    """Return the table of one long document with and without attention's results kept."""
    rows = select(read("long_rows_h200"), tokens="131072")
    lines = [(f"attention {row['attention']}", *_row_of(row)[:2]) for row in rows]
    shape = "Llama-3.2-1B's shape, LoRA, one document of 131,072 tokens a row"
    command = "benchmarks/long_rows.py --shape llama-3.2-1b --tokens 131072 --documents 1 --keep_attention KEPT"
    return table(("", "tokens/s", "peak memory"), lines, measured(rows, command, shape))


def long_rows(name: str, host: str) -> str:
    """Return the table of what fits by a file of results; nothing if there is none.

    It has the model, what is trained, tokens of a row, speed and memory.
    """
    rows = [row for row in read_all(name) if row["tokens"] != "131072" and row["peak_gib"]]
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


def compiled() -> str:
    """Return the table of full fine-tuning with compiled layers."""
    rows = read("training_compiled_h200")
    lines = [
        (
            name_of(row["implementation"]),
            f"{int(row['tokens_per_second']):,}",
            f"{float(row['first_step_seconds']):.0f} s" if row["compilations"] != "0" else "compiled above",
        )
        for row in rows
    ]
    shape = f"Llama-3.2-1B's shape, all weights, rows of {int(rows[0]['length']):,} tokens of 1 to 10 documents"
    command = "benchmarks/training.py --compile --rows 3 --implementations flashmask flashmask_kept flex_attention"
    return table(("layers compiled", "tokens/s", "first step"), lines, measured(rows, command, shape))


EARLY = 50  # steps before rounding grows
CURVES = {"flashmask_again": "again", "flashmask_unskipped": "no tile skipped", "sdpa": "SDPA, dense", "trl": "TRL"}


def convergence() -> str:
    """Return for each task the largest difference of a loss from flashmask's, over all seeds and steps, by curve."""
    rows = read("convergence_cpu")
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        ours = select(rows, task=task)
        count = max(int(row["step"]) for row in ours)
        first = statistics.mean(float(row["flashmask"]) for row in ours if int(row["step"]) <= count // 10)
        last = statistics.mean(float(row["flashmask"]) for row in ours if int(row["step"]) > count - count // 10)
        cells = []
        for name in CURVES:
            off = [(abs(float(row[name]) - float(row["flashmask"])), int(row["step"])) for row in ours if row[name]]
            early, every = (max((x for x, step in off if step <= end), default=0) for end in (EARLY, count))
            text = f"{early:.1e} / {every:.1e}" if every else "equal to the bit"
            cells.append(text if off else "")
        lines.append((task, f"{first:.2f} to {last:.2f}", *cells))
    seeds = len({row["seed"] for row in rows})
    runs = f"{count} steps, {seeds} seed{'s' * (seeds > 1)}"
    shape = f"a tiny Llama in float32, {runs}; the largest difference of a loss in the first {EARLY} steps / in all"
    return table(("task", "loss", *CURVES.values()), lines, measured(rows, "benchmarks/convergence.py", shape))


def packing() -> str:
    """Return the table of packers."""
    rows = [row for row in read("packing_cpu") if row["efficiency"]]
    lines = [
        (
            f"`{row['packer']}`" if row["packer"] == "pack_dataset" else row["packer"].replace("TRL bfd", 'TRL, "bfd"'),
            f"{float(row['seconds']):.2f} s",
            f"{int(row['peak_mib'])} MiB",
            f"{float(row['efficiency']):.2%}",
        )
        for row in rows
        if "batch_size" not in row["packer"]
    ]
    size = int(rows[0]["examples"]) * int(rows[0]["tokens_per_example"])
    shape = f"{size / 1e6:.0f} million tokens in {int(rows[0]['examples']):,} documents, "
    shape += f"rows of {int(rows[0]['row_length']):,}"
    return table(("", "time", "peak memory", "full"), lines, measured(rows, "benchmarks/packing.py", shape))


def alignment() -> str:
    """Return the table of DPO and reward models."""
    lines = []
    for task in ("dpo", "reward"):
        rows = read(f"alignment_{task}_h200")
        for length in dict.fromkeys(row["length"] for row in rows):
            ours, best = best_stock(task, length)
            lines.append(
                (
                    {"dpo": "DPO", "reward": "reward model"}[task],
                    f"{int(length):,}",
                    f"{int(ours['tokens_per_second']):,}",
                    f"{int(best['tokens_per_second']):,} ({name_of(best['provider']).split(',')[0]})",
                    f"{float(ours['against_fastest_stock']):.2f}x",
                    f"{float(ours['peak_gib']):.1f} / {float(best['peak_gib']):.1f}",
                )
            )
    providers = "flashmask sdpa sdpa_single flex_attention_single"
    return table(
        ("task", "tokens a row", "shared, tokens/s", "stock TRL, tokens/s", "gain", "peak GiB, shared / stock"),
        lines,
        measured(
            read("alignment_dpo_h200"),
            f"benchmarks/alignment.py --task TASK --length LENGTH --providers {providers}",
            "Llama-3.2-1B's shape, 2 answers and a reference model (DPO), 6 answers (reward), answers of 10% to 20% of "
            "their question, tokens counted once a row",
        ),
    )


MODELS = {"llama-3.2-1b": "1B", "qwen3-4b": "4B, LoRA"}


def grpo() -> str:
    """Return the table of updates of GRPO."""
    rows = read("grpo_h100")
    lines = []
    for model, prompt, completion in dict.fromkeys((row["model"], row["prompt"], row["completion"]) for row in rows):
        case = {"model": model, "prompt": prompt, "completion": completion}
        speeds = [
            maybe(rows, "update_against_sdpa", "{:.2f}", provider=provider, **case) or "-"
            for provider in ("flashmask", "flashmask_unshared", "sdpa", "flex_attention")
        ]
        speeds[2] = f"1 ({maybe(rows, 'update_tokens_per_second', '{:,.0f}', provider='sdpa', **case)} tokens/s)"
        peaks = [maybe(rows, "update_peak_gib", "{:.1f}", provider=name, **case) for name in ("flashmask", "sdpa")]
        lines.append((MODELS[model], f"{int(prompt):,} : {int(completion):,}", *speeds, " / ".join(peaks)))
    head = ("model", "P : C", "shared prompt", "packed, not shared", "SDPA, padded", "FlexAttention, padded")
    return table(
        (*head, "peak GiB, shared / SDPA"),
        lines,
        measured(
            rows,
            "benchmarks/reinforcement.py",
            "an update relative to TRL's trainer with padded SDPA, one group of 8 a micro-batch, completions of half "
            "to all of C tokens, checkpointing, random weights",
        ),
    )


def sharing() -> str:
    """Return the table of the tokens that sharing a prompt saves, which follows from lengths alone."""
    group, scattered = 8, 8  # completions of a prompt, and micro-batches over which shuffling spreads eight prompts
    seen = scattered * (1 - math.comb(group * scattered - group, group) / math.comb(group * scattered, group))
    lines = []
    for prompt, completion in ((1, 8), (1, 1), (4, 1), (16, 1)):
        saved = [size * (prompt + completion) / (prompt + size * completion) for size in (8, 16)]
        saved.append(group * (prompt + completion) / (seen * prompt + group * completion))
        lines.append((f"{prompt} : {completion}", *(f"{value:.2f}" for value in saved)))
    head = ("P : C", "G = 8", "G = 16", "G = 8, scattered over 8 micro-batches of 8, on average")
    return table(head, lines, "*Tokens of TRL over tokens here, padding apart.*")


ATTENTION = "benchmarks/attention.py --dims {dims} --tokens {tokens}{more} --providers {names}"


def _providers(rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Return the providers of an order that have rows."""
    there = {row["provider"] for row in rows}
    return [provider for provider in order if provider in there]


def _width(row: Row) -> str:
    """Return the head_dim of a row, with that of its values if they have another."""
    dim, v_dim = row["head_dim"], row.get("v_head_dim", row["head_dim"])
    return dim if dim == v_dim else f"{dim}/{v_dim}"


def _tokens(rows: Sequence[Row]) -> int:
    """Return the number of tokens of a case."""
    return int(rows[0]["batch"]) * int(rows[0]["length"])


def first_step() -> str:
    """Return the table of a new user's way to the first training step."""
    rows = read("first_step_cpu")
    lines = [(row["stage"], f"{float(row['seconds']):.0f} s") for row in rows]
    first = rows[0]
    cpu = f"{first['cores']} cores ({first['processor']}), Python {first['python']}, packages from a mirror nearby"
    conditions = measured(rows, "benchmarks/first_step.py").replace(CPU, cpu, 1)
    return table(("`git clone`, `make demo`, then", "after"), lines, conditions)


def attention() -> str:
    """Return the table of attention alone by mask, of heads of 128 in rows of 32,768 tokens."""
    rows = select(read("attention_h200"), length="32768", head_dim="128")
    peers = ("fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn")
    providers = _providers(rows, ("flashmask", "flashmask_triton", *peers))
    lines = [
        (mask_of(mask), *(cell(rows, ["both_tflops"], mask=mask, provider=name) for name in providers))
        for mask in dict.fromkeys(row["mask"] for row in rows)
    ]
    command = ATTENTION.format(dims="64 128", tokens=_tokens(rows), more=" --repeats 7", names=" ".join(providers))
    shape = f"{rows[0]['batch']} rows of 32,768 tokens, {rows[0]['heads']} heads of 128"
    count = f"TFLOP/s of forward and backward, counted on tiles that are not hidden, {shape}"
    return table(("mask", *map(name_of, providers)), lines, measured(rows, command, count))


def peers() -> str:
    """Return the table of attention alone by mask and size of heads beside the fastest peers, forward and backward.

    Heads of 64 and 128 have all masks that were measured, others a few.
    """
    rows = select(read("attention_peers_h200"), length="8192")
    providers = _providers(rows, ("flashmask", "fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn"))
    few = ("full", "causal", "sliding_window", "causal_document", "share_question", "random_eviction")
    lines = []
    for dim in sorted({row["head_dim"] for row in rows}, key=lambda dim: (dim not in WIDTHS, -int(dim))):
        shown = select(rows, head_dim=dim)
        for mask in sorted({row["mask"] for row in shown}, key=ORDER.index):
            if dim in WIDTHS or mask in few:
                columns = ["forward_tflops", "backward_tflops"]
                cells = [cell(shown, columns, mask=mask, provider=provider) for provider in providers]
                lines.append((mask_of(mask), _width(shown[0]), *cells))
    dims = " ".join(dict.fromkeys(map(_width, rows)))
    command = ATTENTION.format(dims=dims, tokens=_tokens(rows), more="", names=" ".join(providers))
    packages = dict.fromkeys(row.get("version", "") for row in rows if row["provider"] in providers)
    versions = ", ".join(package for package in packages if package) or "flash-attn-4 4.0.0b36"
    count = f"TFLOP/s of forward / backward, {rows[0]['batch']} rows of 8,192 tokens, {versions}"
    return table(("mask", "head_dim", *map(name_of, providers)), lines, measured(rows, command, count))


def sparse() -> str:
    """Return the table of dynamic sparse attention against causal FlashAttention-2."""
    rows = read("sparse_attention_h200")
    lengths = ("2048", "8192", "16384", "32768")
    lines = [
        (
            "causal flashmask" if provider == "flashmask" else name_of(provider),
            *(maybe(rows, "faster", "{:.1f}x", provider=provider, length=length) for length in lengths),
        )
        for provider in ("hash_16", "drop_30", "drop_50", "flashmask")
    ]
    command = "benchmarks/sparse_attention.py --lengths 1024 2048 4096 8192 16384 32768 --repeats 5"
    shape = (
        "against causal SDPA (FlashAttention-2), forward and backward with all sorting and moving of rows, 4 rows, 48 "
    )
    shape += "heads of 64, random buckets and drops"
    return table(("", *(f"{int(length):,} tokens" for length in lengths)), lines, measured(rows, command, shape))


def sparse_training() -> str:
    """Return the table of training with hash-sparse attention."""
    lines = []
    for length in ("8192", "16384"):
        rows = read(f"sparse_training_{length}_hash_h200")
        (full,), (ours,) = select(rows, variant="sdpa"), select(rows, variant="hash_16")
        lines.append(
            (
                f"{int(length):,} bytes",
                f"{float(full['ms_per_step']):.1f} ms",
                f"{float(ours['ms_per_step']):.1f} ms",
                f"{float(ours['against_sdpa']):.2f}x",
                f"{float(full['held_out_loss']):.2f} / {float(ours['held_out_loss']):.2f}",
            )
        )
    steps = read("sparse_training_8192_hash_h200")[0]["steps"]
    return table(
        ("rows of", "SDPA, a step", "16 hash buckets", "gain", f"held-out loss after {steps} steps, SDPA / hash"),
        lines,
        measured(
            read("sparse_training_8192_hash_h200"),
            f"sparse.py --variants sdpa hash_16 --length 8192 --batch 4 --steps {steps} --held-out 8 --compile",
            "a Llama of 12 layers, 768 wide, 12 heads of 64, on bytes of source code, 32,768 a step, CUDA graphs",
        ),
    )


def decoding() -> str:
    """Return the table of one decoding step."""
    rows = select(read("decode_h200"), batch="8", keys="65536", mask="padding")
    lines = [
        (
            heads,
            *(
                f"{number(rows, 'graph_us', provider=provider, heads=heads) / 1000:.2f} ms"
                for provider in ("flashmask", "sdpa_mask", "sdpa")
            ),
        )
        for heads in ("32/8", "32/32")
    ]
    return table(
        ("heads of queries / keys", "flashmask, with the mask", "SDPA, with the mask", "SDPA, without a mask"),
        lines,
        measured(rows, "benchmarks/decode.py", "8 left-padded sequences of 65,536 keys, heads of 128, in a CUDA graph"),
    )


def short() -> str:
    """Return the table of short rows beside SDPA with a dense mask."""
    rows = read("short_h100")
    lines = []
    for provider in ("flashmask", "flashmask_triton"):
        cells = []
        for column in ("host_us", "graph_us"):
            for passes in ("forward", "both"):
                shown = select(rows, passes=passes)
                values = ratios(shown, column, provider, "sdpa_mask", ("batch", "rows", "head_dim"))
                cells.append(f"{min(values):.2f} to {max(values):.2f} ({statistics.median(values):.2f})")
        lines.append((name_of(provider), *cells))
    head = ("", "host, forward", "host, both", "CUDA graph, forward", "CUDA graph, both")
    shape = (
        "time relative to SDPA with a dense mask (median), 1 or 8 rows of 128 to 1,024 tokens, 32 heads of 64 and 128"
    )
    command = "benchmarks/short.py --repeats 41 --providers flashmask flashmask_triton sdpa_mask"
    return table(head, lines, measured(rows, command, shape))


def ragged() -> str:
    """Return the table of little and uneven work, speed relative to FlexAttention; nothing if none was measured."""
    rows = read_all("ragged_*")
    if not rows:
        return ""
    providers = [name for name in dict.fromkeys(row["provider"] for row in timed(rows)) if name != "flex_attention"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = select(rows, case=case)
        heads, kv_heads, dim = (own[0][column] for column in ("heads", "kv_heads", "head_dim"))
        flex = select(own, provider="flex_attention")
        columns = ("forward_ms", "backward_ms") if timed(flex) else ()
        times = " / ".join(f"{float(flex[0][column]):.3f}" for column in columns)
        times = times or cell(own, (), provider="flex_attention")
        cells = []
        for name in providers:
            speed = maybe(own, "speed_of_flex", "{:.2f}", provider=name)
            cells.append(speed or cell(own, (), provider=name))
        lines.append((case, f"{heads}/{kv_heads} of {dim}", times, *cells))
    head = ("case", "heads", "FlexAttention (Triton), ms", *map(name_of, providers))
    shape = "FlexAttention's forward / backward, and the speed of others relative to both passes of it"
    return table(head, lines, measured(rows, "benchmarks/ragged.py", shape))


def masks_made() -> str:
    """Return the table of what a mask costs before the first tile: its plan, beside FlexAttention's block mask."""
    plans, rows = read("plan_h200"), timed(select(read("attention_h200"), head_dim="128"))
    providers = _providers(rows, ("flashmask", "flex_attention", "cudnn_flex"))
    lines = []
    for length in ("8192", "32768", "131072"):
        graph = [float(row["graph_us"]) for row in select(plans, length=length)]
        cells = []
        for provider in providers:
            own = [row for row in select(rows, length=length, provider=provider) if float(row["mask_mib"])]
            times = [float(row["mask_ms"]) for row in own]
            cells.append(f"{min(times):.1f} to {max(times):.1f} ms")
            cells.append(f"{max(float(row['mask_mib']) for row in own):.2f} MiB")
        lines.append((f"{int(length):,}", f"{min(graph):.0f} to {max(graph):.0f} us", *cells))
    made = {"flashmask": "plan, with the host", "flex_attention": "FlexAttention's mask", "cudnn_flex": "cuDNN's plan"}
    head = ("tokens", "plan, on the GPU", *(part for name in providers for part in (made[name], "memory")))
    return table(
        head, lines, measured(plans, "benchmarks/plan.py", "12 masks, once a batch, for all layers and passes")
    )
