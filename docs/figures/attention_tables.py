"""Tables of attention alone: by mask, size of heads and length, when decoding, and what its masks cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from results import Row, cell, mask_of, maybe, name_of, number, ratios, read, read_all, select, timed
from tables import measured, table
from values import WIDTHS

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

LONG_ROWS = ("32768", "131072")
"""Lengths of the table of long rows beside the fastest peers."""

ATTENTION = "benchmarks/attention.py --dims {dims} --tokens {tokens}{more} --providers {names}"


def _providers(rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Return the providers of an order that have rows."""
    there = {row["provider"] for row in rows}
    return [provider for provider in order if provider in there]


def _versions(rows: Sequence[Row], providers: Sequence[str]) -> str:
    """Return the packages of providers, with their versions."""
    found = dict.fromkeys(row.get("version", "") for row in rows if row["provider"] in providers)
    return ", ".join(version for version in found if version)


def _width(row: Row) -> str:
    """Return the head_dim of a row, with that of its values if they have another."""
    dim, v_dim = row["head_dim"], row.get("v_head_dim", row["head_dim"])
    return dim if dim == v_dim else f"{dim}/{v_dim}"


def _tokens(rows: Sequence[Row]) -> int:
    """Return the number of tokens of a case."""
    return int(rows[0]["batch"]) * int(rows[0]["length"])


def _range(values: Sequence[float]) -> str:
    """Return the range of ratios and their median, or the ratio if there is only one."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f} ({middle})"


def attention() -> str:
    """Return the table of attention alone by mask, of heads of 128 in rows of 32,768 tokens."""
    rows = select(read("attention_h200"), length="32768", head_dim="128")
    peers = ("fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn")
    providers = _providers(rows, ("flashmask", "flashmask_triton", *peers))
    lines = [
        (mask_of(mask), *(cell(rows, ["both_tflops"], mask=mask, provider=name) for name in providers))
        for mask in dict.fromkeys(row["mask"] for row in rows)
    ]
    command = ATTENTION.format(dims="64 128", tokens=_tokens(rows), more="", names=" ".join(providers))
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
    count = f"TFLOP/s of forward / backward, {rows[0]['batch']} rows of 8,192 tokens, {_versions(rows, providers)}"
    return table(("mask", "head_dim", *map(name_of, providers)), lines, measured(rows, command, count))


def peers_of_long_rows() -> str:
    """Return the table of attention alone beside the best peer by mask, length and size of heads, both passes."""
    rows = [row for row in read("attention_peers_h200") if row["length"] in LONG_ROWS]
    columns = [(length, dim) for dim in ("128", "64") for length in LONG_ROWS]
    lines = [
        (mask_of(mask), *(_beside_best(select(rows, mask=mask, length=n, head_dim=dim)) for n, dim in columns))
        for mask in ORDER
    ]
    providers = _providers(rows, ("flashmask", "fa4", "cudnn_flex", "flex_flash", "cudnn"))
    more = f" --lengths {' '.join(LONG_ROWS)}"
    command = ATTENTION.format(dims="64 128", tokens=65536, more=more, names=" ".join(providers))
    count = "TFLOP/s of forward and backward, 65,536 tokens in all, or one row, medians of 5 turns, or 3 with 131,072"
    count = f"{count}, {_versions(rows, providers)}"
    head = ("mask", *(f"{int(length):,} tokens, head_dim {dim}" for length, dim in columns))
    return table(head, lines, measured(rows, command, count))


def peers_of_grouped_heads() -> str:
    """Return the table of attention alone with grouped heads beside the best peer by mask, shape and size of heads."""
    rows = read("attention_peers_gqa_h100")
    shapes = list(dict.fromkeys((row["batch"], row["length"]) for row in rows))
    lines = []
    for dim in WIDTHS[::-1]:
        for mask in ORDER:
            cases = [select(rows, mask=mask, head_dim=dim, batch=batch, length=length) for batch, length in shapes]
            lines.append((mask_of(mask), dim, *map(_beside_best, cases)))
    providers = _providers(rows, ("flashmask", "fa4", "cudnn_flex", "flex_flash", "flex_attention", "cudnn"))
    more = " --lengths LENGTH --group 4"
    command = ATTENTION.format(dims="128 64", tokens="TOKENS", more=more, names=" ".join(providers))
    count = "TFLOP/s of forward and backward, 32 query heads of 128 on 8 key-value heads, or 64 of 64 on 16"
    count = f"{count}, medians of 5 turns, or 3 with 131,072, {_versions(rows, providers)}"
    head = ("mask", "head_dim", *(f"{batch} x {int(length):,} tokens" for batch, length in shapes))
    return table(head, lines, measured(rows, command, count))


def _beside_best(case: Sequence[Row]) -> str:
    """Return the speed of flashmask in the rows of one case, both passes, and its ratio to the fastest peer."""
    speed = {row["provider"]: float(row["both_tflops"]) for row in timed(case)}
    own = speed.pop("flashmask")
    best = max(speed, key=speed.__getitem__, default="")
    return f"{own:.0f} ({own / speed[best]:.2f} of {name_of(best)})" if best else f"{own:.0f} (no peer runs)"


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
    rows = read("short_h200")
    lines = []
    for provider in ("flashmask", "flashmask_triton"):
        cells = []
        for column in ("host_us", "graph_us"):
            for passes in ("forward", "both"):
                shown = select(rows, passes=passes)
                values = ratios(shown, column, provider, "sdpa_mask", ("batch", "rows", "head_dim"))
                cells.append(_range(values))
        lines.append((name_of(provider), *cells))
    head = ("", "host, forward", "host, both", "CUDA graph, forward", "CUDA graph, both")
    shape = (
        "time relative to SDPA with a dense mask (median), 1 or 8 rows of 128 to 1,024 tokens, 32 heads of 64 and 128"
    )
    command = "benchmarks/short.py --repeats 41 --providers flashmask flashmask_triton sdpa_mask"
    return table(head, lines, measured(rows, command, shape))


def deterministic() -> str:
    """Return the table of sums in a fixed order in the gradient of q, relative to sums in any order."""
    rows = [
        {**row, "both_ms": str(float(row["forward_ms"]) + float(row["backward_ms"]))}
        for row in timed(read("deterministic_h200"))
    ]
    lines = []
    cases = [(_width(row), row["length"], int(row["heads"]) // int(row["kv_heads"])) for row in rows]
    for case in dict.fromkeys(cases):
        width, length, group = case
        cells = [width, f"{int(length):,}", str(group)]
        for hidden in (False, True):
            shown = [
                row
                for one, row in zip(cases, rows, strict=True)
                if one == case and (row["mask"] == "hidden_intervals") == hidden
            ]
            for column in ("backward_ms", "both_ms"):
                values = ratios(shown, column, "flashmask_deterministic", "flashmask", ("mask",))
                cells.append(_range(values))
        lines.append(cells)
    head = (
        "head size", "tokens a row", "query heads a key head", "backward", "both passes", "two intervals: backward",
        "two intervals: both",
    )  # fmt: skip
    shape = f"time relative to sums in any order (median of the masks), {_tokens(rows):,} tokens"
    flags = "--dims DIMS --group GROUP --masks MASKS"
    command = f"benchmarks/attention.py --providers flashmask flashmask_deterministic {flags}"
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
