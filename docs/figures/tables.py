"""The numbers and the tables of the pages: for each its rows, its columns, and its conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from charts import GALLERY, ROW_LENGTHS, gains, groups_of_8
from results import (
    TASKS,
    Cell,
    Row,
    groups,
    measured,
    name_of,
    number,
    over,
    ratios,
    read,
    read_all,
    select,
    size_of,
    spread,
    table,
    text,
    timed,
    trained,
    value,
    width_of,
)

from flashmask_hf import masks

RATE = "tokens_per_second"
PEERS = ("fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn")
FLASH_ATTENTION = ("full", "causal", "sliding_window", "causal_document", "document")  # masks that it has a form for
ATTENTION = "benchmarks/attention.py"


# ----- numbers


def speed(name: str, provider: str, *lengths: str) -> str:
    """Return the range and the mean of speeds over FlexAttention, with head_dim 64 and 128."""
    rows = [row for row in read(name) if row["head_dim"] in ("64", "128") and row["length"] in lengths]
    found = ratios(rows, "both_tflops", provider, "flex_attention", "mask", "length", "head_dim")
    mean = statistics.geometric_mean(found)
    return f"{min(found):.2f} to {max(found):.2f} times as fast (geometric mean {mean:.2f})"


def change(column: str) -> str:
    """Return how much less time flashmask takes than cuDNN's SDPA, with head_dim 64 and 128."""
    rows = [row for row in read("attention_h200") if row["head_dim"] in ("64", "128")]
    found = ratios(rows, column, "flashmask", "cudnn", "mask", "length", "head_dim")
    low, high = (round(100 * (1 - ratio)) for ratio in (max(found), min(found)))
    return f"{low} to {high}% less"


def update_times() -> str:
    """Return the milliseconds of an update of GRPO in the three shapes with the fewest tokens to compute."""
    rows = select(groups_of_8(), provider="flashmask")[:3]
    times = [1000 * int(row["tokens"]) / float(row["update_tokens_per_second"]) for row in rows]
    return f"{min(times):.0f} to {max(times):.0f} ms"


def first_call(cache_state: str) -> str:
    """Return the seconds of a first forward and backward in a fresh process."""
    times = sorted({f"{float(row['first_s']):.1f}" for row in select(read("first_call_h200"), cache=cache_state)})
    return " to ".join(dict.fromkeys((times[0], times[-1]))) + " s"


def long_length() -> str:
    """Return the tokens of the longest row of the 8B shape."""
    return f"{max(int(row['tokens']) for row in read('long_rows_h200') if '8b' in row['shape']):,}"


# ----- attention alone


def _there(rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Return the providers of an order that have rows."""
    return [provider for provider in order if any(row["provider"] == provider for row in rows)]


def _mask(rows: list[Row]) -> str:
    return name_of(rows[0]["mask"])


def attention() -> str:
    """The conditions of the chart of attention alone."""
    rows = select(read("attention_h200"), length="32768", head_dim="128")
    names = _there(rows, ("flashmask", "flashmask_triton", *PEERS))
    shape = f"TFLOP/s on tiles that are not hidden, {rows[0]['batch']} rows of 32,768 tokens, {rows[0]['heads']} heads"
    command = f"{ATTENTION} --providers {' '.join(names)}"
    return f"\n\n{measured(rows, command, shape)}\n\n"


def peers() -> str:
    """Attention alone by mask beside the fastest peers, forward and backward, heads of 128."""
    rows = select(read("attention_peers_h200"), length="8192", head_dim="128")
    names = _there(rows, ("flashmask", *PEERS))

    def both(name: str) -> Cell:
        one, two = (value(f"{x}_tflops", "{:.0f}", "not run", provider=name) for x in ("forward", "backward"))
        return lambda rows: (
            one(rows) if one(rows) == two(rows) and not one(rows).isdigit() else f"{one(rows)}/{two(rows)}"
        )

    columns = {"mask": _mask} | {name_of(name): both(name) for name in names}
    shape = f"TFLOP/s of forward/backward, {rows[0]['batch']} rows of 8,192 tokens, {rows[0]['heads']} heads of 128"
    command = f"{ATTENTION} --dims 128 --lengths 8192 --providers {' '.join(names)}"
    return table(groups(rows, "mask"), columns, measured(rows, command, shape))


def peers_widths() -> str:
    """Speed of flashmask over each peer by size of heads, both passes, over the masks that both ran."""
    rows = select(read("attention_peers_h200"), length="8192")
    names = _there(rows, PEERS)

    def ratio(name: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            found = ratios(rows, "both_tflops", "flashmask", name, "mask")
            states = [row["status"].partition(":")[0] for row in select(rows, provider=name)]
            return spread(found) if found else next((state for state in states if state != "cannot"), "not run")

        return cell

    lines = sorted(groups(rows, "head_dim", "v_head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    columns: dict[str, Cell] = {"head_dim": lambda rows: width_of(rows[0])}
    columns |= {name_of(name): ratio(name) for name in names}
    dims = " ".join(width_of(line[0]) for line in lines)
    command = f"{ATTENTION} --dims {dims} --lengths 8192 --providers flashmask {' '.join(names)}"
    return table(lines, columns, measured(rows, command, "speed over each peer (median of the masks), both passes"))


def _of_best(flash_attention: bool) -> Cell:
    """Return a cell with the speed over the fastest peer in each mask that FlashAttention-4 has a form for, or not."""

    def cell(rows: list[Row]) -> str:
        found = []
        for case in groups(timed(rows), "mask"):
            speeds = {row["provider"]: float(row["both_tflops"]) for row in case}
            own = speeds.pop("flashmask")
            if speeds and (case[0]["mask"] in FLASH_ATTENTION) == flash_attention:
                found.append(own / max(speeds.values()))
        return spread(found)

    return cell


def peers_shapes(name: str, lengths: Sequence[str], shape: str, flags: str) -> str:
    """Speed of flashmask over the fastest peer by shape and size of heads, both passes."""
    rows = [row for row in read(name) if row["length"] in lengths and row["head_dim"] in ("64", "128")]
    columns = {
        "rows": lambda rows: f"{rows[0]['batch']} x {int(rows[0]['length']):,}",
        "heads": text("{heads}/{kv_heads} of {head_dim}"),
        "full, causal, window, documents": _of_best(True),
        "other masks": _of_best(False),
    }
    lines = sorted(groups(rows, "batch", "length", "head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    command = (
        f"{ATTENTION} --lengths {' '.join(lengths)}{flags} --providers {' '.join(_there(rows, ('flashmask', *PEERS)))}"
    )
    return table(lines, columns, measured(rows, command, f"speed over the fastest peer per mask (median), {shape}"))


def deterministic() -> str:
    """Time with sums in a fixed order in the gradient of q, relative to sums in any order."""
    rows = [
        {**row, "both_ms": str(float(row["forward_ms"]) + float(row["backward_ms"]))}
        for row in timed(read("deterministic_h200"))
    ]

    def ratio(column: str, hidden: bool) -> Cell:
        def cell(rows: list[Row]) -> str:
            shown = [row for row in rows if (row["mask"] == "hidden_intervals") == hidden]
            return spread(ratios(shown, column, "flashmask_deterministic", "flashmask", "mask"))

        return cell

    columns: dict[str, Cell] = {
        "head size": lambda rows: width_of(rows[0]),
        "tokens per row": lambda rows: f"{int(rows[0]['length']):,}",
        "query heads per key head": lambda rows: str(int(rows[0]["heads"]) // int(rows[0]["kv_heads"])),
        "backward": ratio("backward_ms", False),
        "both passes": ratio("both_ms", False),
        "two intervals: backward": ratio("backward_ms", True),
        "two intervals: both": ratio("both_ms", True),
    }
    shape = "time relative to sums in any order (median of the masks), 65,536 tokens"
    command = f"{ATTENTION} --providers flashmask flashmask_deterministic --dims DIMS --group GROUP --masks MASKS"
    lines = groups(rows, "head_dim", "v_head_dim", "length", "heads", "kv_heads")
    return table(lines, columns, measured(rows, command, shape))


def _both_ms(provider: str, peer: str, *by: str) -> Callable[[list[Row]], list[float]]:
    """Return a function of rows: speeds of a provider over a peer, both passes."""

    def found(rows: list[Row]) -> list[float]:
        both = [row | {"ms": str(float(row["forward_ms"]) + float(row["backward_ms"]))} for row in timed(rows)]
        return ratios(both, "ms", peer, provider, *by)

    return found


def _spread_of(found: Callable[[list[Row]], list[float]], rows: list[Row]) -> str:
    return spread(found(rows))


def ragged() -> str:
    """Speed over FlexAttention where there is little or uneven work, by group of cases; "" if none was measured."""
    kinds = {
        "short": "many documents of 128 to 512 tokens in 32K",
        "grouped": "8 query heads per key head, 2K and 8K",
        "few": "1 to 4 heads, 8K and 32K",
        "chunk": "1K queries of 16K keys",
        "across": "1K queries to 16K keys and back, bidirectional",
        "odd": "rows of 8,191 and 5,000",
    }
    rows = [row | {"group": row["case"].split()[0]} for row in read_all("ragged_*")]
    if not rows:
        return ""
    columns: dict[str, Cell] = {"work": lambda rows: kinds[rows[0]["group"]]}
    columns["cases"] = lambda rows: str(len(groups(rows, "case")))
    for name in _there(rows, ("flashmask", "flashmask_triton", "fa4", "cudnn_flex", "cudnn")):
        columns[name_of(name)] = partial(_spread_of, _both_ms(name, "flex_attention", "case"))
    shape = "speed over FlexAttention (Triton), both passes on the GPU (median of the cases)"
    return table(groups(rows, "group"), columns, measured(rows, f"{ATTENTION} ragged", shape))


def sparse() -> str:
    """Speed of dynamic sparse attention over causal FlashAttention-2."""
    rows = read("sparse_attention_h200")
    lengths = ("2048", "8192", "16384", "32768")

    def faster(length: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            peer = select(read("sparse_attention_h200"), provider="sdpa")
            return f"{_both_ms(rows[0]['provider'], 'sdpa', 'length')(select([*rows, *peer], length=length))[0]:.1f}x"

        return cell

    columns: dict[str, Cell] = {"": lambda rows: name_of(rows[0]["provider"]).replace("flashmask", "causal flashmask")}
    columns |= {f"{int(length):,} tokens": faster(length) for length in lengths}
    lines = [select(rows, provider=name) for name in ("hash_16", "drop_30", "drop_50", "flashmask")]
    shape = "against causal SDPA (FlashAttention-2), forward and backward with all sorting and gathering"
    shape = f"{shape}, {rows[0]['batch']} rows, {rows[0]['heads']} heads of 64, random buckets and drops"
    return table(lines, columns, measured(rows, f"{ATTENTION} sparse", shape))


def decoding() -> str:
    """One decoding step with long caches."""
    rows = [row for row in read("decode_h200") if (row["batch"], row["length"]) == ("8", "65536")]

    def time(provider: str, mask: str) -> Cell:
        return lambda rows: f"{number(rows, 'graph_us', provider=provider, mask=mask) / 1000:.2f} ms"

    columns = {
        "heads of queries/keys": text("{heads}/{kv_heads}"),
        "flashmask, with the mask": time("flashmask", "padding"),
        "SDPA, with the mask": time("sdpa_dense", "padding"),
        "SDPA, without a mask": time("sdpa", "full"),
    }
    shape = "8 left-padded sequences of 65,536 keys, heads of 128, in a CUDA graph"
    return table(groups(rows, "kv_heads"), columns, measured(rows, f"{ATTENTION} decode", shape))


def short() -> str:
    """Short rows beside SDPA with a dense mask."""
    rows = read("short_h200")

    def ratio(column: str, passes: str) -> Cell:
        def cell(own: list[Row]) -> str:
            shown = select(rows, passes=passes)
            return spread(ratios(shown, column, own[0]["provider"], "sdpa_dense", "batch", "length", "head_dim"))

        return cell

    columns: dict[str, Cell] = {"": lambda rows: name_of(rows[0]["provider"])}
    for kind, column in (("host", "host_us"), ("CUDA graph", "graph_us")):
        columns |= {f"{kind}, {passes}": ratio(column, passes) for passes in ("forward", "both")}
    lines = [select(rows, provider=name) for name in ("flashmask", "flashmask_triton")]
    shape = (
        "time relative to SDPA with a dense mask (median), 1 or 8 rows of 128 to 1,024 tokens, 32 heads of 64 and 128"
    )
    return table(lines, columns, measured(rows, f"{ATTENTION} short", shape))


def masks_made() -> str:
    """What a mask costs before the first tile: its plan, beside FlexAttention's block mask."""
    plans, rows = read("plan_h200"), timed(select(read("attention_h200"), head_dim="128"))

    def graph(rows: list[Row]) -> str:
        times = [float(row["graph_us"]) for row in select(plans, length=rows[0]["length"])]
        return f"{min(times):.0f} to {max(times):.0f} us"

    def host(provider: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            times = [float(row["mask_ms"]) for row in select(rows, provider=provider) if float(row["mask_mib"])]
            return f"{min(times):.1f} to {max(times):.1f} ms"

        return cell

    def memory(provider: str) -> Cell:
        return lambda rows: f"{max(float(row['mask_mib']) for row in select(rows, provider=provider)):.2f} MiB"

    made = {"flashmask": "plan, with the host", "flex_attention": "FlexAttention's mask", "cudnn_flex": "cuDNN's plan"}
    columns: dict[str, Cell] = {"tokens": lambda rows: f"{int(rows[0]['length']):,}", "plan, on the GPU": graph}
    for provider in _there(rows, list(made)):
        columns |= {made[provider]: host(provider), "memory" + " " * (len(columns) > 3): memory(provider)}
    lines = groups([row for row in rows if row["length"] in ("8192", "32768", "131072")], "length")
    shape = "12 masks, once per batch, for all layers and passes"
    return table(lines, columns, measured(plans, f"{ATTENTION} plan", shape))


# ----- training


TRAINING = "benchmarks/training.py"
SHAPE = "Llama-3.2-1B's shape"


def training() -> str:
    """Supervised fine-tuning on packed rows."""
    rows = sorted(read("training_h200"), key=lambda row: -int(row[RATE]))
    sdpa = number(rows, RATE, implementation="sdpa")
    dense = {"sdpa": ", dense mask"}
    columns: dict[str, Cell] = {
        "attention": lambda rows: name_of(rows[0]["implementation"]) + dense.get(rows[0]["implementation"], ""),
        "tokens/s": value(RATE),
        "against SDPA": lambda rows: f"{number(rows, RATE) / sdpa:.2f}x",
        "peak memory": value("peak_gib", "{:.1f} GiB"),
    }
    shape = f"rows of {int(rows[0]['length']):,} tokens of 1 to 10 documents, gradient checkpointing, AdamW"
    command = f"{TRAINING} --tasks sft --lengths {rows[0]['length']} --full-logits"
    return table(groups(rows, "implementation"), columns, measured(rows, command, SHAPE, shape))


def compiled() -> str:
    """Full fine-tuning with compiled layers."""
    rows = read("training_compiled_h200")
    kept = {"compiled+kept": ", attention output kept"}
    columns: dict[str, Cell] = {
        "layers compiled": lambda rows: name_of(rows[0]["implementation"]) + kept.get(rows[0]["setting"], ""),
        "tokens/s": value(RATE),
        "first step": lambda rows: "as in the row above" if rows[0]["compilations"] == "0" else first(rows),
    }
    first = value("first_step_seconds", "{:.0f} s")
    shape = f"{SHAPE}, all weights, rows of {int(rows[0]['length']):,} tokens of 1 to 10 documents"
    command = f"{TRAINING} --tasks sft --lengths 32768 --settings compiled compiled+kept"
    return table(groups(rows, "implementation", "setting"), columns, measured(rows, command, shape))


def kept() -> str:
    """Training steps by length of a row, with and without attention's results kept."""
    rows = read("training_kept_h200")
    step, peak = "seconds_per_step", "peak_gib"
    again, keep = {"setting": "eager"}, {"setting": "kept"}

    def milliseconds(values: dict[str, str]) -> Cell:
        return lambda rows: f"{1000 * number(rows, step, **values):,.0f} ms"

    columns = {
        "tokens per row": lambda rows: f"{int(rows[0]['length']):,}",
        "step, recomputed": milliseconds(again),
        "step, kept": milliseconds(keep),
        "ratio": over(step, "{:.2f}", keep, again),
        "peak, recomputed": value(peak, "{:.1f} GiB", **again),
        "peak, kept": value(peak, "{:.1f} GiB", **keep),
    }
    lengths = " ".join(dict.fromkeys(row["length"] for row in rows))
    command = f"{TRAINING} --tasks sft --lengths {lengths} --settings eager kept --implementations flashmask"
    shape = f"{SHAPE}, all weights, rows of 1 to 10 documents, medians of steps in turns"
    return table(groups(rows, "length"), columns, measured(rows, command, shape))


def alignment() -> str:
    """DPO and reward models beside stock TRL."""
    rows = [row for task in ("dpo", "reward") for row in read(f"alignment_{task}_h200")]

    def best(rows: list[Row]) -> Row:
        return max(timed(row for row in rows if row["implementation"] != "flashmask"), key=lambda row: int(row[RATE]))

    def ours(rows: list[Row]) -> Row:
        return select(rows, implementation="flashmask")[0]

    columns: dict[str, Cell] = {
        "task": lambda rows: TASKS[rows[0]["task"]],
        "tokens per row": lambda rows: f"{int(rows[0]['length']):,}",
        "shared, tokens/s": lambda rows: f"{int(ours(rows)[RATE]):,}",
        "stock TRL, tokens/s": lambda rows: (
            f"{int(best(rows)[RATE]):,} ({name_of(best(rows)['implementation']).split(',')[0]})"
        ),
        "gain": lambda rows: f"{int(ours(rows)[RATE]) / int(best(rows)[RATE]):.2f}x",
        "peak GiB, shared / stock": lambda rows: (
            f"{float(ours(rows)['peak_gib']):.1f} / {float(best(rows)['peak_gib']):.1f}"
        ),
    }
    shape = (
        f"{SHAPE}, 2 answers and a reference model (DPO), 6 answers (reward), answers of 10% to 20% of their question"
    )
    command = f"{TRAINING} --tasks dpo reward --lengths LENGTH --implementations flashmask trl_sdpa trl_sdpa_single "
    command += "trl_flex_attention_single"
    return table(
        groups(rows, "task", "length"), columns, measured(rows, command, f"{shape}, tokens counted once per row")
    )


def row_lengths() -> str:
    """Charts and table of training against the length of the row, of the shapes that were measured."""
    rows = read_all("row_lengths_*")
    if not rows:
        return ""
    pictures = [
        f"![{chart.keywords['title']}: SFT, LoRA, DPO, reward model](assets/{name}.svg)"
        for name, chart in ROW_LENGTHS.items()
        if select(rows, shape=chart.keywords["shape"])
    ]
    names = list(dict.fromkeys(row["implementation"] for row in trained(rows)))

    def common(rows: list[Row]) -> str:
        """Return the longest length at which all that ever ran have figures."""
        ran = trained(rows)
        count = len({row["implementation"] for row in ran})
        return max((row["length"] for row in ran if len(select(ran, length=row["length"])) == count), key=int)

    def shown(row: Row) -> str:
        return f"{int(row[RATE]):,} / {float(row['peak_gib']):.1f}"

    def at_common(name: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            found = select(trained(rows), implementation=name, length=common(rows))
            return shown(found[0]) if found else ""

        return cell

    def longest(rows: list[Row]) -> str:
        """Return the longest row of flashmask, and its figures."""
        own = select(trained(rows), implementation="flashmask")[-1]
        ended = [row[RATE] for row in select(rows, implementation="flashmask") if not row["peak_gib"]]
        more = "" if ended == ["out of memory"] else " or more"
        return f"{int(own['length']):,}{more}: {shown(own)}"

    columns: dict[str, Cell] = {
        "task": lambda rows: f"{size_of(rows[0])} {TASKS[rows[0]['task']]}",
        "tokens per row": lambda rows: f"{int(common(rows)):,}",
    }
    columns |= {name_of(name): at_common(name) for name in names} | {"longest of flashmask": longest}
    shape = "tokens/s / peak GiB of the longest row that all ran, lengths double from 4,096, random weights"
    conditions = measured(rows, f"{TRAINING} --shapes SHAPE", shape)
    return "\n\n" + "\n\n".join(pictures) + table(groups(rows, "shape", "task"), columns, conditions)


def profile() -> str:
    """A step's time by kind of work, by shape, length and setting; "" if none was measured."""
    rows = [row for row in read_all("step_profile_*") if row["share"] and row["setting"] in ("kept", "compiled+kept")]
    if not rows:
        return ""

    def title(case: Row) -> str:
        compiled = ", compiled" if "compiled" in case["setting"] else ""
        return f"{_trained(case)}, {int(case['length']):,}{compiled}"

    cases = sorted(
        groups(rows, "setting", "shape", "length"), key=lambda case: (len(case[0]["setting"]), size_of(case[0]))
    )

    def share(kind: str, case: list[Row]) -> float:
        return sum(float(row["share"]) for row in case if row["kind"] == kind)

    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != "idle"))
    large = sorted((kind for kind in kinds if max(share(kind, case) for case in cases) >= 0.02),
                   key=lambda kind: -sum(share(kind, case) for case in cases))  # fmt: skip

    def cell(case: list[Row]) -> Cell:
        def shares(rows: list[Row]) -> str:
            kind = rows[0]["kind"]
            if kind == "a step":
                return f"{float(case[0]['step_milliseconds']):,.0f} ms"
            summed = [one for one in kinds if one not in large] if kind == "all else" else [kind]
            return f"{sum(share(one, case) for one in summed):.1%}"

        return shares

    columns: dict[str, Cell] = {"": text("{kind}")} | {title(case[0]): cell(case) for case in cases}
    lines = [[{"kind": kind}] for kind in ("a step", *large, "all else", "idle")]
    work = "kernels, copies and fills of the GPU, which is idle for the rest, rows of 1 to 10 documents, random weights"
    return table(lines, columns, measured(rows, "benchmarks/step_profile.py --shape SHAPE", work))


def _trained(row: Row) -> str:
    """Return a shape's size and what is trained."""
    return f"{size_of(row)}, {'LoRA' if row['trained'] == 'adapters' else 'all weights'}"


def long_rows(name: str) -> str:
    """What fits by a file of results: model, what is trained, tokens per row, speed and memory; "" if there is none."""
    rows = [row for row in read_all(name) if row["peak_gib"]]
    if not rows:
        return ""
    columns: dict[str, Cell] = {
        "shape of Llama": lambda rows: _trained(rows[0]),
        "tokens per row": value("tokens"),
        "documents": text("{documents}"),
        "tokens/s": value(RATE),
        "peak of the GPU": value("peak_gib", "{:.0f} GiB"),
        "on the host": lambda rows: f"{float(rows[0]['host_gib']):.0f} GiB" if float(rows[0]["host_gib"]) else "-",
        "attention": text("{attention}"),
    }
    shape = "half of a host with 256 GiB, adapters of rank 16 on all linear layers without dropout, or all weights in "
    conditions = measured(
        rows, "benchmarks/long_rows.py --shape SHAPE --tokens TOKENS", f"{shape}float32, random weights"
    )
    return table([[row] for row in rows], columns, conditions)


def parallel() -> str:
    """Rows split over two GPUs: tokens per second by exchange, its share of a step, and memory."""
    rows = read("parallel_h200")

    def shares(rows: list[Row]) -> str:
        found = [value("exchange_share", "{:.1%}", provider=name)(rows) for name in ("heads", "keys")]
        return " and ".join(share for share in found if share)

    columns: dict[str, Cell] = {
        "shape of Llama": lambda rows: size_of(rows[0]),
        "tokens per row": lambda rows: f"{int(rows[0]['tokens']):,}",
        "documents": text("{documents}"),
        "heads, tokens/s": value(RATE, provider="heads"),
        "keys, tokens/s": value(RATE, provider="keys"),
        "a row on each GPU, tokens/s": value(RATE, provider="whole"),
        "torch's context parallelism with SDPA, tokens/s": value(RATE, provider="sdpa_cp"),
        "share of the exchange in a step, heads and keys": shares,
        "peak of a GPU": value("peak_gib", "{:.0f} GiB", provider="heads"),
    }
    command = "benchmarks/parallel.py --shape SHAPE --tokens TOKENS --documents DOCUMENTS"
    shape = "forward and backward of all weights, FSDP2, gradient checkpointing"
    return table(groups(rows, "shape", "tokens", "documents"), columns, measured(rows, command, shape))


EARLY = 50  # steps before rounding grows
CURVES = {"flashmask_again": "again", "flashmask_unskipped": "no tile skipped", "sdpa": "SDPA, dense", "trl": "TRL"}


def convergence() -> str:
    """The largest difference of a loss from flashmask's, over all seeds and steps, by task and curve."""
    rows = read("convergence_cpu")
    count = max(int(row["step"]) for row in rows)

    def losses(rows: list[Row]) -> str:
        parts = (
            [row for row in rows if int(row["step"]) <= count // 10],
            [row for row in rows if int(row["step"]) > count - count // 10],
        )
        return " to ".join(f"{statistics.mean(float(row['flashmask']) for row in part):.2f}" for part in parts)

    def off(name: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            found = [(abs(float(row[name]) - float(row["flashmask"])), int(row["step"])) for row in rows if row[name]]
            early, every = (max((x for x, step in found if step <= end), default=0) for end in (EARLY, count))
            return (f"{early:.1e} / {every:.1e}" if every else "equal to the bit") if found else ""

        return cell

    columns = {"task": text("{task}"), "loss": losses} | {title: off(name) for name, title in CURVES.items()}
    runs = f"{count} steps, {len({row['seed'] for row in rows})} seeds"
    shape = f"a tiny Llama in float32, {runs}; the largest difference of a loss in the first {EARLY} steps / in all"
    return table(groups(rows, "task"), columns, measured(rows, "benchmarks/convergence.py", shape))


def packing() -> str:
    """Packers of a large dataset."""
    rows = [row for row in read("packing_cpu") if row["efficiency"] and "batch_size" not in row["packer"]]
    names = {"TRL bfd": 'TRL, "bfd"', "pack_dataset": "`pack_dataset`"}
    columns: dict[str, Cell] = {
        "": lambda rows: names[rows[0]["packer"]],
        "time": value("seconds", "{:.2f} s"),
        "peak memory": value("peak_mib", "{:.0f} MiB"),
        "full": value("efficiency", "{:.2%}"),
    }
    size = int(rows[0]["examples"]) * int(rows[0]["tokens_per_example"])
    shape = f"{size / 1e6:.0f} million tokens in {int(rows[0]['examples']):,} documents, "
    shape += f"rows of {int(rows[0]['row_length']):,}"
    return table(groups(rows, "packer"), columns, measured(rows, "benchmarks/packing.py", shape))


def grpo() -> str:
    """Updates of GRPO relative to padded SDPA."""
    rows = read("grpo_h100")

    def speed(provider: str) -> Cell:
        return value("update_against_sdpa", "{:.2f}", "-", provider=provider)

    def base(rows: list[Row]) -> str:
        rate = value("update_tokens_per_second", "{:,.0f}", provider="sdpa")
        return "-" if speed("sdpa")(rows) == "-" else f"1 ({rate(rows)} tokens/s)"

    def peaks(rows: list[Row]) -> str:
        return " / ".join(value("update_peak_gib", "{:.1f}", provider=name)(rows) for name in ("flashmask", "sdpa"))

    columns: dict[str, Cell] = {
        "model": lambda rows: {"llama-3.2-1b": "1B", "qwen3-4b": "4B, LoRA"}[rows[0]["model"]],
        "P : C": lambda rows: f"{int(rows[0]['prompt']):,} : {int(rows[0]['completion']):,}",
        "micro-batch": lambda rows: (
            f"{rows[0]['groups']} x {rows[0]['generations']}" + ", compiled" * (rows[0]["compiled"] == "on")
        ),
        "shared prompt": speed("flashmask"),
        "packed, not shared": speed("flashmask_unshared"),
        "SDPA, padded": base,
        "FlexAttention, padded": speed("flex_attention"),
        "peak GiB, shared / SDPA": peaks,
    }
    command = "benchmarks/reinforcement.py --models MODEL --cases P:C --groups GROUPS --generations G"
    shape = "an update relative to TRL's trainer with padded SDPA, micro-batches of groups x completions of a group, "
    shape += "completions of half to all of C tokens, checkpointing, random weights, - where not run or out of memory"
    lines = groups(rows, "model", "prompt", "completion", "groups", "generations", "compiled")
    return table(lines, columns, measured(rows, command, shape))


def sharing() -> str:
    """The tokens that sharing a prompt saves, which follows from lengths alone."""
    group, scattered = 8, 8  # completions of a prompt, and micro-batches over which shuffling spreads eight prompts
    seen = scattered * (1 - math.comb(group * scattered - group, group) / math.comb(group * scattered, group))

    def saved(prompts: float, answers: int) -> Cell:
        def cell(rows: list[Row]) -> str:
            prompt, answer = int(rows[0]["prompt"]), int(rows[0]["answer"])
            return f"{answers * (prompt + answer) / (prompts * prompt + answers * answer):.2f}"

        return cell

    columns = {
        "P : C": text("{prompt} : {answer}"),
        "G = 8": saved(1, 8),
        "G = 16": saved(1, 16),
        "G = 8, scattered over 8 micro-batches of 8, on average": saved(seen, group),
    }
    lines = [[{"prompt": str(p), "answer": str(c)}] for p, c in ((1, 8), (1, 1), (4, 1), (16, 1))]
    return table(lines, columns, "*Tokens of TRL over tokens here, padding apart.*")


def first_step() -> str:
    """A new user's way to the first training step."""
    rows = read("first_step_cpu")
    columns = {"`git clone`, `make demo`, then": text("{stage}"), "after": value("seconds", "{:.0f} s")}
    conditions = measured(rows, "benchmarks/first.py step", "packages from a mirror nearby")
    return table(groups(rows, "stage"), columns, conditions)


def sparse_training() -> str:
    """Training with hash-sparse attention."""
    rows = [row for length in ("8192", "16384") for row in read(f"sparse_training_{length}_hash_h200")]

    def column(name: str, form: str, variant: str) -> Cell:
        return value(name, form, variant=variant)

    full, ours = (column("held_out_loss", "{:.2f}", variant) for variant in ("sdpa", "hash_16"))
    steps = rows[0]["steps"]
    columns: dict[str, Cell] = {
        "rows of": lambda rows: f"{int(rows[0]['length']):,} bytes",
        "SDPA, a step": column("ms_per_step", "{:.1f} ms", "sdpa"),
        "16 hash buckets": column("ms_per_step", "{:.1f} ms", "hash_16"),
        "gain": column("against_sdpa", "{:.2f}x", "hash_16"),
        f"held-out loss after {steps} steps, SDPA / hash": lambda rows: f"{full(rows)} / {ours(rows)}",
    }
    command = f"sparse.py --variants sdpa hash_16 --length 8192 --batch 4 --steps {steps} --held-out 8 --compile"
    shape = "a Llama of 12 layers, 768 wide, 12 heads of 64, on bytes of source code, 32,768 per step, CUDA graphs"
    return table(groups(rows, "length"), columns, measured(rows, command, shape))


def gallery() -> str:
    """The gallery: of each mask family its call, the first sentence of its docstring, and its picture."""
    parts = []
    for name, (call, _) in GALLERY.items():
        sentence = " ".join((getattr(masks, name).__doc__ or "").split("\n\n")[0].split())
        parts.append(f"## {name}\n\n{sentence}\n\n`masks.{call}`\n\n![{name}](assets/masks/{name}.png)\n")
    return "\n\n" + "\n".join(parts) + "\n"


LONG = "65,536 tokens in all, or one row, medians of 5 turns, or 3 with 131,072"
TEXTS: dict[str, Callable[[], str]] = {
    "attention": attention,
    "peers": peers,
    "peers-widths": peers_widths,
    "peers-long": partial(peers_shapes, "attention_peers_h200", ("32768", "131072"), LONG, ""),
    "peers-grouped": partial(
        peers_shapes, "attention_peers_gqa_h100", ("8192", "32768", "131072"), "medians of 5 turns, or 3 with 131,072",
        " --tokens TOKENS --group 4",
    ),
    "deterministic": deterministic,
    "ragged": ragged,
    "sparse": sparse,
    "decoding": decoding,
    "short": short,
    "masks-made": masks_made,
    "training": training,
    "compiled": compiled,
    "kept": kept,
    "alignment": alignment,
    "row-lengths": row_lengths,
    "profile": profile,
    "long-rows": partial(long_rows, "long_rows_h200"),
    "long-rows-h100": partial(long_rows, "long_rows_h100"),
    "parallel": parallel,
    "convergence": convergence,
    "packing": packing,
    "grpo": grpo,
    "sharing": sharing,
    "first-step": first_step,
    "sparse-training": sparse_training,
    "gallery": gallery,
    "sft-gain": lambda: f"{_rate('flashmask') / _rate('sdpa'):.1f}x",
    "dpo-gain": lambda: f"{gains()['DPO']:.1f}x",
    "grpo-gain": lambda: f"{gains()['GRPO']:.1f}x",
    "long-length": long_length,
    "flex": partial(speed, "attention_h200", "flashmask", "8192", "32768"),
    "flex-portable": partial(speed, "attention_h200", "flashmask_triton", "8192", "32768"),
    "flex-128k": partial(speed, "attention_h200", "flashmask", "131072"),
    "flex-grouped": partial(speed, "attention_gqa_h200", "flashmask", "8192", "32768"),
    "cudnn-forward": partial(change, "forward_ms"),
    "cudnn-backward": partial(change, "backward_ms"),
    "update-times": update_times,
    "first-call": partial(first_call, "empty"),
    "cached-call": partial(first_call, "full"),
}  # fmt: skip
"""Function of each number and table, by the name that pages call it."""


def _rate(implementation: str) -> float:
    return number(read("training_h200"), RATE, implementation=implementation)
