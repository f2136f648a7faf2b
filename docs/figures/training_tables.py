"""Tables of training by task: speed, memory, loss, packing, and the first step of a new user."""

from __future__ import annotations

import math
import statistics

from results import maybe, name_of, read, select
from tables import CPU, measured, table
from values import best_stock


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
            f"benchmarks/alignment.py --tasks TASK --lengths LENGTH --providers {providers}",
            "Llama-3.2-1B's shape, 2 answers and a reference model (DPO), 6 answers (reward), answers of 10% to 20% of "
            "their question, tokens counted once a row",
        ),
    )


MODELS = {"llama-3.2-1b": "1B", "qwen3-4b": "4B, LoRA"}


def grpo() -> str:
    """Return the table of updates of GRPO."""
    rows = read("grpo_h100")
    lines = []
    columns = ("model", "prompt", "completion", "groups", "generations", "compiled")
    for values in dict.fromkeys(tuple(row[column] for column in columns) for row in rows):
        case = dict(zip(columns, values, strict=True))
        speeds = [
            maybe(rows, "update_against_sdpa", "{:.2f}", provider=provider, **case) or "-"
            for provider in ("flashmask", "flashmask_unshared", "sdpa", "flex_attention")
        ]
        if speeds[2] != "-":
            speeds[2] = f"1 ({maybe(rows, 'update_tokens_per_second', '{:,.0f}', provider='sdpa', **case)} tokens/s)"
        peaks = [maybe(rows, "update_peak_gib", "{:.1f}", provider=name, **case) for name in ("flashmask", "sdpa")]
        shape = f"{int(case['prompt']):,} : {int(case['completion']):,}"
        micro_batch = f"{case['groups']} x {case['generations']}{', compiled' if case['compiled'] == 'on' else ''}"
        lines.append((MODELS[case["model"]], shape, micro_batch, *speeds, " / ".join(peaks)))
    names = ("shared prompt", "packed, not shared", "SDPA, padded", "FlexAttention, padded")
    return table(
        ("model", "P : C", "micro-batch", *names, "peak GiB, shared / SDPA"),
        lines,
        measured(
            rows,
            "benchmarks/reinforcement.py --models MODEL --cases P:C --groups GROUPS --generations G",
            "an update relative to TRL's trainer with padded SDPA, micro-batches of groups x completions of a group, "
            "completions of half to all of C tokens, checkpointing, random weights, - where not run or out of memory",
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


def first_step() -> str:
    """Return the table of a new user's way to the first training step."""
    rows = read("first_step_cpu")
    lines = [(row["stage"], f"{float(row['seconds']):.0f} s") for row in rows]
    first = rows[0]
    cpu = f"{first['cores']} cores ({first['processor']}), Python {first['python']}, packages from a mirror nearby"
    conditions = measured(rows, "benchmarks/first_step.py").replace(CPU, cpu, 1)
    return table(("`git clone`, `make demo`, then", "after"), lines, conditions)


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
