"""The numbers and the tables of the pages: for each its rows, its columns, its command and its conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from charts import GALLERY, ROW_LENGTHS, gains, groups_of_8
from results import (
    TASKS,
    Cell,
    Columns,
    Row,
    cell,
    groups,
    measured,
    name_of,
    number,
    ratios,
    read,
    read_all,
    select,
    size_of,
    spread,
    table,
    timed,
    trained,
    width_of,
)

from flashmask_hf import masks

RATE = "tokens_per_second"
PEERS = ("fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn")
FLASH_ATTENTION = ("full", "causal", "sliding_window", "causal_document", "document")  # masks that it has a form for
ATTENTION, TRAINING = "benchmarks/attention.py", "benchmarks/training.py"
SHAPE = "Llama-3.2-1B's shape"
WIDTHS = ("64", "128")  # sizes of heads that sentences speak of


# ----- numbers


def speed(name: str, provider: str, *lengths: str) -> str:
    """Return the range and the mean of speeds over FlexAttention."""
    rows = [row for row in read(name) if row["head_dim"] in WIDTHS and row["length"] in lengths]
    found = ratios(rows, "both_tflops", provider, "flex_attention", "mask", "length", "head_dim")
    mean = statistics.geometric_mean(found)
    return f"{min(found):.2f} to {max(found):.2f} times as fast (geometric mean {mean:.2f})"


def change(column: str) -> str:
    """Return how much less time flashmask takes than cuDNN's SDPA."""
    rows = [row for row in read("attention_h200") if row["head_dim"] in WIDTHS]
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


def sft_gain() -> str:
    """Return the speed of fine-tuning over SDPA."""
    ours, sdpa = (number(read("training_h200"), RATE, implementation=name) for name in ("flashmask", "sdpa"))
    return f"{ours / sdpa:.1f}x"


# ----- attention alone


def _there(rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Return the providers of an order that have rows."""
    return [provider for provider in order if any(row["provider"] == provider for row in rows)]


def _mask(rows: list[Row]) -> str:
    return name_of(rows[0]["mask"])


def _width(rows: list[Row]) -> str:
    return width_of(rows[0])


def _both_ms(rows: Sequence[Row]) -> list[Row]:
    """Return the timed rows with the milliseconds of both passes."""
    return [row | {"both_ms": str(float(row["forward_ms"]) + float(row["backward_ms"]))} for row in timed(rows)]


def attention() -> str:
    """The conditions of the chart of attention alone."""
    rows = select(read("attention_h200"), length="32768", head_dim="128")
    names = _there(rows, ("flashmask", "flashmask_triton", *PEERS))
    shape = "TFLOP/s on tiles that are not hidden, {batch} rows of 32,768 tokens, {heads} heads".format_map(rows[0])
    command = f"{ATTENTION} --providers {' '.join(names)}"
    return f"\n\n{measured(rows, command, shape)}\n\n"


def peers() -> str:
    """Attention alone by mask beside the fastest peers, forward and backward, heads of 128."""
    rows = select(read("attention_peers_h200"), length="8192", head_dim="128")
    names = _there(rows, ("flashmask", *PEERS))

    def both(name: str, rows: list[Row]) -> str:
        one, two = (cell(f"{{{x}_tflops:.0f}}", "not run", provider=name)(rows) for x in ("forward", "backward"))
        return one if one == two and not one.isdigit() else f"{one}/{two}"

    columns = {"mask": _mask} | {name_of(name): partial(both, name) for name in names}
    shape = "TFLOP/s of forward/backward, {batch} rows of 8,192 tokens, {heads} heads of 128".format_map(rows[0])
    command = f"{ATTENTION} --dims 128 --lengths 8192 --providers {' '.join(names)}"
    return table(rows, ["mask"], columns, command, shape)


def peers_widths() -> str:
    """Speed of flashmask over each peer by size of heads, both passes, over the masks that both ran."""
    rows = select(read("attention_peers_h200"), length="8192")
    names = _there(rows, PEERS)

    def ratio(name: str, rows: list[Row]) -> str:
        found = ratios(rows, "both_tflops", "flashmask", name, "mask")
        states = [row["status"].partition(":")[0] for row in select(rows, provider=name)]
        return spread(found) if found else next((state for state in states if state != "cannot"), "not run")

    lines = sorted(groups(rows, "head_dim", "v_head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    columns = {"head_dim": _width} | {name_of(name): partial(ratio, name) for name in names}
    dims = " ".join(map(_width, lines))
    command = f"{ATTENTION} --dims {dims} --lengths 8192 --providers flashmask {' '.join(names)}"
    return table(rows, lines, columns, command, "speed over each peer (median of the masks), both passes")


def _of_best(flash_attention: bool, rows: list[Row]) -> str:
    """Return the speed over the fastest peer in each mask that FlashAttention-4 has a form for, or not."""
    found = []
    for case in groups(timed(rows), "mask"):
        speeds = {row["provider"]: float(row["both_tflops"]) for row in case}
        own = speeds.pop("flashmask")
        if speeds and (case[0]["mask"] in FLASH_ATTENTION) == flash_attention:
            found.append(own / max(speeds.values()))
    return spread(found)


def peers_shapes(name: str, lengths: Sequence[str], shape: str, flags: str) -> str:
    """Speed of flashmask over the fastest peer by shape and size of heads, both passes."""
    rows = [row for row in read(name) if row["length"] in lengths and row["head_dim"] in WIDTHS]
    columns: Columns = {
        "rows": "{batch} x {length:,.0f}",
        "heads": "{heads}/{kv_heads} of {head_dim}",
        "full, causal, window, documents": partial(_of_best, True),
        "other masks": partial(_of_best, False),
    }
    lines = sorted(groups(rows, "batch", "length", "head_dim"), key=lambda rows: -int(rows[0]["head_dim"]))
    names = " ".join(_there(rows, ("flashmask", *PEERS)))
    command = f"{ATTENTION} --lengths {' '.join(lengths)}{flags} --providers {names}"
    return table(rows, lines, columns, command, f"speed over the fastest peer per mask (median), {shape}")


def deterministic() -> str:
    """Time with sums in a fixed order in the gradient of q, relative to sums in any order."""
    rows = read("deterministic_h200")

    def ratio(hidden: bool, rows: list[Row]) -> str:
        shown = [row for row in rows if (row["mask"] == "hidden_intervals") == hidden]
        return spread(ratios(shown, "backward_ms", "flashmask_deterministic", "flashmask", "mask"))

    columns: Columns = {
        "head size": _width,
        "tokens per row": "{length:,.0f}",
        "query heads per key head": lambda rows: str(int(rows[0]["heads"]) // int(rows[0]["kv_heads"])),
        "backward": partial(ratio, False),
        "with two hidden intervals": partial(ratio, True),
    }
    command = f"{ATTENTION} --providers flashmask flashmask_deterministic --dims DIMS --group GROUP --masks MASKS"
    shape = "time of the backward relative to sums in any order (median of the masks), 65,536 tokens"
    return table(rows, ["head_dim", "v_head_dim", "length", "heads", "kv_heads"], columns, command, shape)


RAGGED = {
    "short": "many documents of 128 to 512 tokens in 32K",
    "grouped": "8 query heads per key head, 2K and 8K",
    "few": "1 to 4 heads, 8K and 32K",
    "chunk": "1K queries of 16K keys",
    "across": "1K queries to 16K keys and back, bidirectional",
    "odd": "rows of 8,191 and 5,000",
}


def ragged() -> str:
    """Speed over FlexAttention where there is little or uneven work, by group of cases; "" if none was measured."""
    rows = [row | {"group": row["case"].split()[0]} for row in read_all("ragged_*")]
    if not rows:
        return ""

    def ratio(name: str, rows: list[Row]) -> str:
        return spread(ratios(_both_ms(rows), "both_ms", "flex_attention", name, "case"))

    columns: Columns = {"work": lambda rows: RAGGED[rows[0]["group"]]}
    columns["cases"] = lambda rows: str(len(groups(rows, "case")))
    names = _there(rows, ("flashmask", "flashmask_triton", "fa4", "cudnn_flex", "cudnn"))
    columns |= {name_of(name): partial(ratio, name) for name in names}
    shape = "speed over FlexAttention (Triton), both passes on the GPU (median of the cases)"
    return table(rows, ["group"], columns, f"{ATTENTION} ragged", shape)


def sparse() -> str:
    """Speed of dynamic sparse attention over causal FlashAttention-2."""
    rows = _both_ms(read("sparse_attention_h200"))

    def faster(length: str, own: list[Row]) -> str:
        peer = number(rows, "both_ms", provider="sdpa", length=length)
        return f"{peer / number(own, 'both_ms', length=length):.1f}x"

    columns = {"": lambda rows: name_of(rows[0]["provider"]).replace("flashmask", "causal flashmask")}
    lengths = ("2048", "8192", "16384", "32768")
    columns |= {f"{int(length):,} tokens": partial(faster, length) for length in lengths}
    lines = [select(rows, provider=name) for name in ("hash_16", "drop_30", "drop_50", "flashmask")]
    shape = "against causal SDPA (FlashAttention-2), forward and backward with all sorting and gathering, {batch} "
    shape += "rows, {heads} heads of 64, random buckets and drops"
    return table(rows, lines, columns, f"{ATTENTION} sparse", shape.format_map(rows[0]))


def decoding() -> str:
    """One decoding step with long caches."""
    rows = select(read("decode_h200"), batch="8", length="65536")

    def time(provider: str, mask: str) -> Cell:
        return lambda rows: f"{number(rows, 'graph_us', provider=provider, mask=mask) / 1000:.2f} ms"

    columns: Columns = {
        "heads of queries/keys": "{heads}/{kv_heads}",
        "flashmask, with the mask": time("flashmask", "padding"),
        "SDPA, with the mask": time("sdpa_dense", "padding"),
        "SDPA, without a mask": time("sdpa", "full"),
    }
    shape = "8 left-padded sequences of 65,536 keys, heads of 128, in a CUDA graph"
    return table(rows, ["kv_heads"], columns, f"{ATTENTION} decode", shape)


def short() -> str:
    """Short rows beside SDPA with a dense mask."""
    rows = read("short_h200")

    def ratio(column: str, passes: str, own: list[Row]) -> str:
        shown = select(rows, passes=passes)
        return spread(ratios(shown, column, own[0]["provider"], "sdpa_dense", "batch", "length", "head_dim"))

    columns: Columns = {"": lambda rows: name_of(rows[0]["provider"])}
    for kind, column in (("host", "host_us"), ("CUDA graph", "graph_us")):
        columns |= {f"{kind}, {passes}": partial(ratio, column, passes) for passes in ("forward", "both")}
    lines = [select(rows, provider=name) for name in ("flashmask", "flashmask_triton")]
    shape = "time relative to SDPA with a dense mask (median), 1 or 8 rows of 128 to 1,024 tokens, 32 heads of 64 and "
    return table(rows, lines, columns, f"{ATTENTION} short", f"{shape}128")


def masks_made() -> str:
    """What a mask costs before the first tile: its plan, beside FlexAttention's block mask."""
    plans, rows = read("plan_h200"), timed(select(read("attention_h200"), head_dim="128"))

    def graph(rows: list[Row]) -> str:
        times = [float(row["graph_us"]) for row in select(plans, length=rows[0]["length"])]
        return f"{min(times):.0f} to {max(times):.0f} us"

    def host(provider: str, rows: list[Row]) -> str:
        times = [float(row["mask_ms"]) for row in select(rows, provider=provider) if float(row["mask_mib"])]
        return f"{min(times):.1f} to {max(times):.1f} ms"

    def memory(provider: str, rows: list[Row]) -> str:
        return f"{max(float(row['mask_mib']) for row in select(rows, provider=provider)):.2f} MiB"

    made = {"flashmask": "plan, with the host", "flex_attention": "FlexAttention's mask", "cudnn_flex": "cuDNN's plan"}
    columns: Columns = {"tokens": "{length:,.0f}", "plan, on the GPU": graph}
    for name in _there(rows, list(made)):
        columns |= {made[name]: partial(host, name), "memory" + " " * (len(columns) > 3): partial(memory, name)}
    lines = groups([row for row in rows if row["length"] in ("8192", "32768", "131072")], "length")
    return table(plans, lines, columns, f"{ATTENTION} plan", "12 masks, once per batch, for all layers and passes")


# ----- training


def training() -> str:
    """Supervised fine-tuning on packed rows."""
    rows = sorted(read("training_h200"), key=lambda row: -int(row[RATE]))
    sdpa, dense = number(rows, RATE, implementation="sdpa"), {"sdpa": ", dense mask"}
    columns: Columns = {
        "attention": lambda rows: name_of(rows[0]["implementation"]) + dense.get(rows[0]["implementation"], ""),
        "tokens/s": f"{{{RATE}:,.0f}}",
        "against SDPA": lambda rows: f"{number(rows, RATE) / sdpa:.2f}x",
        "peak memory": "{peak_gib:.1f} GiB",
    }
    shape = "rows of {length:,.0f} tokens of 1 to 10 documents, gradient checkpointing, AdamW".format_map(rows[0])
    command = f"{TRAINING} --tasks sft --lengths {rows[0]['length']} --full-logits"
    return table(rows, ["implementation"], columns, command, SHAPE, shape)


def compiled() -> str:
    """Full fine-tuning with compiled layers."""
    rows, kept = read("training_compiled_h200"), {"compiled+kept": ", attention output kept"}
    first = cell("{first_step_seconds:.0f} s")
    columns: Columns = {
        "layers compiled": lambda rows: name_of(rows[0]["implementation"]) + kept.get(rows[0]["setting"], ""),
        "tokens/s": f"{{{RATE}:,.0f}}",
        "first step": lambda rows: "as in the row above" if rows[0]["compilations"] == "0" else first(rows),
    }
    shape = f"{SHAPE}, all weights, rows of {int(rows[0]['length']):,} tokens of 1 to 10 documents"
    command = f"{TRAINING} --tasks sft --lengths 32768 --settings compiled compiled+kept"
    return table(rows, ["implementation", "setting"], columns, command, shape)


def kept() -> str:
    """Training steps by length of a row, with and without attention's results kept."""
    rows = read("training_kept_h200")

    def seconds(rows: list[Row], setting: str) -> float:
        return number(rows, "seconds_per_step", setting=setting)

    columns: Columns = {
        "tokens per row": "{length:,.0f}",
        "step, recomputed": lambda rows: f"{1000 * seconds(rows, 'eager'):,.0f} ms",
        "step, kept": lambda rows: f"{1000 * seconds(rows, 'kept'):,.0f} ms",
        "ratio": lambda rows: f"{seconds(rows, 'kept') / seconds(rows, 'eager'):.2f}",
        "peak, recomputed": cell("{peak_gib:.1f} GiB", setting="eager"),
        "peak, kept": cell("{peak_gib:.1f} GiB", setting="kept"),
    }
    lengths = " ".join(dict.fromkeys(row["length"] for row in rows))
    command = f"{TRAINING} --tasks sft --lengths {lengths} --settings eager kept --implementations flashmask"
    shape = f"{SHAPE}, all weights, rows of 1 to 10 documents, medians of steps in turns"
    return table(rows, ["length"], columns, command, shape)


def alignment() -> str:
    """DPO and reward models beside stock TRL."""
    rows = [row for task in ("dpo", "reward") for row in read(f"alignment_{task}_h200")]

    def pair(form: str) -> Cell:
        """Return a cell of the row of flashmask (0) and of the fastest other one (1)."""

        def shown(rows: list[Row]) -> str:
            ours = select(rows, implementation="flashmask")[0]
            others = timed(row for row in rows if row["implementation"] != "flashmask")
            best = max(others, key=lambda row: int(row[RATE]))
            name = name_of(best["implementation"]).split(",")[0]
            return form.format(ours, best, name=name, gain=int(ours[RATE]) / int(best[RATE]))

        return shown

    columns: Columns = {
        "task": lambda rows: TASKS[rows[0]["task"]],
        "tokens per row": "{length:,.0f}",
        "shared, tokens/s": pair(f"{{0[{RATE}]:,.0f}}"),
        "stock TRL, tokens/s": pair(f"{{1[{RATE}]:,.0f}} ({{name}})"),
        "gain": pair("{gain:.2f}x"),
        "peak GiB, shared / stock": pair("{0[peak_gib]:.1f} / {1[peak_gib]:.1f}"),
    }
    shape = f"{SHAPE}, 2 answers and a reference model (DPO), 6 answers (reward), answers of 10% to 20% of their "
    command = f"{TRAINING} --tasks dpo reward --lengths LENGTH --implementations flashmask trl_sdpa trl_sdpa_single "
    command += "trl_flex_attention_single"
    return table(rows, ["task", "length"], columns, command, f"{shape}question, tokens counted once per row")


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
    figures = f"{{{RATE}:,.0f}} / {{peak_gib:.1f}}"

    def common(rows: list[Row]) -> str:
        """Return the longest length at which all that ever ran have figures."""
        ran = trained(rows)
        count = len({row["implementation"] for row in ran})
        return max((row["length"] for row in ran if len(select(ran, length=row["length"])) == count), key=int)

    def at_common(name: str, rows: list[Row]) -> str:
        return cell(figures, implementation=name, length=common(rows))(trained(rows))

    def longest(rows: list[Row]) -> str:
        """Return the longest row of flashmask, and its figures."""
        own = select(rows, implementation="flashmask")
        more = "" if [row[RATE] for row in own if not row["peak_gib"]] == ["out of memory"] else " or more"
        return ("{length:,.0f}" + more + ": " + figures).format_map(trained(own)[-1])

    columns: Columns = {
        "task": lambda rows: f"{size_of(rows[0])} {TASKS[rows[0]['task']]}",
        "tokens per row": lambda rows: f"{int(common(rows)):,}",
    }
    columns |= {name_of(name): partial(at_common, name) for name in names} | {"longest of flashmask": longest}
    shape = "tokens/s / peak GiB of the longest row that all ran, lengths double from 4,096, random weights"
    below = table(rows, ["shape", "task"], columns, f"{TRAINING} --shapes SHAPE", shape)
    return "\n\n" + "\n\n".join(pictures) + below


def profile() -> str:
    """A step's time by kind of work, by shape, length and setting; "" if none was measured."""
    rows = [row for row in read_all("step_profile_*") if row["share"] and row["setting"] in ("kept", "compiled+kept")]
    if not rows:
        return ""
    cases = groups(rows, "setting", "shape", "length")
    cases.sort(key=lambda case: (len(case[0]["setting"]), size_of(case[0])))

    def title(case: Row) -> str:
        return f"{_trained(case)}, {int(case['length']):,}{', compiled' * ('compiled' in case['setting'])}"

    def share(kind: str, case: list[Row]) -> float:
        return sum(float(row["share"]) for row in case if row["kind"] == kind)

    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != "idle"))
    large = [kind for kind in kinds if max(share(kind, case) for case in cases) >= 0.02]
    large.sort(key=lambda kind: -sum(share(kind, case) for case in cases))

    def shares(case: list[Row], line: list[Row]) -> str:
        kind = line[0]["kind"]
        if kind == "a step":
            return f"{float(case[0]['step_milliseconds']):,.0f} ms"
        summed = [one for one in kinds if one not in large] if kind == "all else" else [kind]
        return f"{sum(share(one, case) for one in summed):.1%}"

    columns: Columns = {"": "{kind}"}
    columns |= {title(case[0]): partial(shares, case) for case in cases}
    lines = [[{"kind": kind}] for kind in ("a step", *large, "all else", "idle")]
    work = "kernels, copies and fills of the GPU, which is idle for the rest, rows of 1 to 10 documents, random weights"
    return table(rows, lines, columns, "benchmarks/step_profile.py --shape SHAPE", work)


def _trained(row: Row) -> str:
    """Return a shape's size and what is trained."""
    return f"{size_of(row)}, {'LoRA' if row['trained'] == 'adapters' else 'all weights'}"


def long_rows(name: str) -> str:
    """What fits by a file of results: model, what is trained, tokens per row, speed and memory."""
    rows = [row for row in read(name) if row["peak_gib"]]
    columns: Columns = {
        "shape of Llama": lambda rows: _trained(rows[0]),
        "tokens per row": "{tokens:,.0f}",
        "documents": "{documents}",
        "tokens/s": f"{{{RATE}:,.0f}}",
        "peak of the GPU": "{peak_gib:.0f} GiB",
        "on the host": lambda rows: "{host_gib:.0f} GiB".format_map(rows[0]) if float(rows[0]["host_gib"]) else "-",
        "attention": "{attention}",
    }
    shape = "half of a host with 256 GiB, adapters of rank 16 on all linear layers without dropout, or all weights in "
    command = "benchmarks/long_rows.py --shape SHAPE --tokens TOKENS"
    return table(rows, [[row] for row in rows], columns, command, f"{shape}float32, random weights")


def parallel() -> str:
    """Rows split over two GPUs: tokens per second by exchange, its share of a step, and memory."""

    def shares(rows: list[Row]) -> str:
        found = [cell("{exchange_share:.1%}", provider=name)(rows) for name in ("heads", "keys")]
        return " and ".join(share for share in found if share)

    rate = f"{{{RATE}:,.0f}}"
    columns: Columns = {
        "shape of Llama": lambda rows: size_of(rows[0]),
        "tokens per row": "{tokens:,.0f}",
        "documents": "{documents}",
        "heads, tokens/s": cell(rate, provider="heads"),
        "keys, tokens/s": cell(rate, provider="keys"),
        "a row on each GPU, tokens/s": cell(rate, provider="whole"),
        "torch's context parallelism with SDPA, tokens/s": cell(rate, provider="sdpa_cp"),
        "share of the exchange in a step, heads and keys": shares,
        "peak of a GPU": cell("{peak_gib:.0f} GiB", provider="heads"),
    }
    command = "benchmarks/parallel.py --shape SHAPE --tokens TOKENS --documents DOCUMENTS"
    shape = "forward and backward of all weights, FSDP2, gradient checkpointing"
    return table(read("parallel_h200"), ["shape", "tokens", "documents"], columns, command, shape)


EARLY = 50  # steps before rounding grows
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
    runs = f"{count} steps, {len({row['seed'] for row in rows})} seeds"
    shape = f"a tiny Llama in float32, {runs}; the largest difference of a loss in the first {EARLY} steps / in all"
    return table(rows, ["task"], columns, "benchmarks/convergence.py", shape)


def packing() -> str:
    """Packers of a large dataset."""
    rows = [row for row in read("packing_cpu") if row["efficiency"] and "batch_size" not in row["packer"]]
    names = {"TRL bfd": 'TRL, "bfd"', "pack_dataset": "`pack_dataset`"}
    columns: Columns = {
        "": lambda rows: names[rows[0]["packer"]],
        "time": "{seconds:.2f} s",
        "peak memory": "{peak_mib:.0f} MiB",
        "full": "{efficiency:.2%}",
    }
    size = int(rows[0]["examples"]) * int(rows[0]["tokens_per_example"])
    shape = f"{size / 1e6:.0f} million tokens in {int(rows[0]['examples']):,} documents, rows of "
    return table(rows, ["packer"], columns, "benchmarks/packing.py", f"{shape}{int(rows[0]['row_length']):,}")


def grpo() -> str:
    """Updates of GRPO relative to padded SDPA."""

    def speed(provider: str, form: str = "{update_against_sdpa:.2f}") -> Cell:
        return cell(form, "-", provider=provider)

    columns: Columns = {
        "model": lambda rows: {"llama-3.2-1b": "1B", "qwen3-4b": "4B, LoRA"}[rows[0]["model"]],
        "P : C": "{prompt:,.0f} : {completion:,.0f}",
        "micro-batch": lambda rows: (
            "{groups} x {generations}".format_map(rows[0]) + ", compiled" * (rows[0]["compiled"] == "on")
        ),
        "shared prompt": speed("flashmask"),
        "packed, not shared": speed("flashmask_unshared"),
        "SDPA, padded": speed("sdpa", "{update_against_sdpa:.0f} ({update_tokens_per_second:,.0f} tokens/s)"),
        "FlexAttention, padded": speed("flex_attention"),
        "peak GiB, shared / SDPA": lambda rows: " / ".join(
            cell("{update_peak_gib:.1f}", provider=name)(rows) for name in ("flashmask", "sdpa")
        ),
    }
    command = "benchmarks/reinforcement.py --models MODEL --cases P:C --groups GROUPS --generations G"
    shape = "an update relative to TRL's trainer with padded SDPA, micro-batches of groups x completions of a group, "
    shape += "completions of half to all of C tokens, checkpointing, random weights, - where not run or out of memory"
    lines = ["model", "prompt", "completion", "groups", "generations", "compiled"]
    return table(read("grpo_h100"), lines, columns, command, shape)


def sharing() -> str:
    """The tokens that sharing a prompt saves, which follows from lengths alone."""
    group, scattered = 8, 8  # completions of a prompt, and micro-batches over which shuffling spreads eight prompts
    seen = scattered * (1 - math.comb(group * scattered - group, group) / math.comb(group * scattered, group))
    lines = ["| P : C | G = 8 | G = 16 | G = 8, scattered over 8 micro-batches of 8, on average |",
             "| --- | ---: | ---: | ---: |"]  # fmt: skip
    for p, c in ((1, 8), (1, 1), (4, 1), (16, 1)):
        saved = [n * (p + c) / (prompts * p + n * c) for prompts, n in ((1, 8), (1, 16), (seen, group))]
        lines.append(f"| {p} : {c} | {' | '.join(f'{x:.2f}' for x in saved)} |")
    return "\n\n" + "\n".join(lines) + "\n\n*Tokens of TRL over tokens here, padding apart.*\n\n"


def first_step() -> str:
    """A new user's way to the first training step."""
    columns: Columns = {"`git clone`, `make demo`, then": "{stage}", "after": "{seconds:.0f} s"}
    command, conditions = "benchmarks/first.py step", "packages from a mirror nearby"
    return table(read("first_step_cpu"), ["stage"], columns, command, conditions)


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
    command = f"sparse.py --variants sdpa hash_16 --length 8192 --batch 4 --steps {steps} --held-out 8 --compile"
    shape = "a Llama of 12 layers, 768 wide, 12 heads of 64, on bytes of source code, 32,768 per step, CUDA graphs"
    return table(rows, ["length"], columns, command, shape)


def gallery() -> str:
    """The gallery: of each mask family its picture, the first sentence of its docstring, and its call."""
    parts = ['<div class="gallery" markdown>\n']
    for name, (call, _) in GALLERY.items():
        sentence = " ".join((getattr(masks, name).__doc__ or "").split("\n\n")[0].split())
        picture = f"![{name}](assets/masks/{name}.png)"
        parts.append(f"<div markdown>\n\n## {name}\n\n{picture}\n\n{sentence}\n\n`masks.{call}`\n\n</div>")
    return "\n\n" + "\n".join([*parts, "</div>"]) + "\n\n"


LONG = "65,536 tokens in all, or one row, medians of 5 turns, or 3 with 131,072"
TURNS, GROUPED = "medians of 5 turns, or 3 with 131,072", ("8192", "32768", "131072")
PLAIN = (attention, peers, peers_widths, deterministic, ragged, sparse, decoding, short, masks_made, training, compiled,
         kept, alignment, row_lengths, profile, parallel, convergence, packing, grpo, sharing, first_step,
         sparse_training, gallery, sft_gain, long_length, update_times)  # fmt: skip
TEXTS: dict[str, Callable[[], str]] = {function.__name__.replace("_", "-"): function for function in PLAIN} | {
    "peers-long": partial(peers_shapes, "attention_peers_h200", ("32768", "131072"), LONG, ""),
    "peers-grouped": partial(peers_shapes, "attention_peers_gqa_h100", GROUPED, TURNS, " --tokens TOKENS --group 4"),
    "long-rows": partial(long_rows, "long_rows_h200"),
    "long-rows-h100": partial(long_rows, "long_rows_h100"),
    "dpo-gain": lambda: f"{gains()['DPO']:.1f}x",
    "grpo-gain": lambda: f"{gains()['GRPO']:.1f}x",
    "flex": partial(speed, "attention_h200", "flashmask", "8192", "32768"),
    "flex-portable": partial(speed, "attention_h200", "flashmask_triton", "8192", "32768"),
    "flex-128k": partial(speed, "attention_h200", "flashmask", "131072"),
    "flex-grouped": partial(speed, "attention_gqa_h200", "flashmask", "8192", "32768"),
    "cudnn-forward": partial(change, "forward_ms"),
    "cudnn-backward": partial(change, "backward_ms"),
    "first-call": partial(first_call, "empty"),
    "cached-call": partial(first_call, "full"),
}
"""Function of each number and table, by the name that pages call it."""
