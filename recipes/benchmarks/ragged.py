"""Time attention where there is little or uneven work: short documents, few heads, and other numbers of keys.

    python recipes/benchmarks/ragged.py --jobs 8 --csv ragged.csv
    python recipes/benchmarks/ragged.py --cases few --providers flashmask flashmask_triton flex_attention

bfloat16, one row a call. `CASES` names the cases: many short documents in a row of 32,768 tokens, grouped queries with
eight heads to a key-value head, one to four heads in all, chunks of queries at the end of a longer row, more queries
than keys, and lengths that no tile divides. `peers.py` names the providers.

Output and gradients of every provider are compared with float64 before it is timed, on the tensors that are timed, in
the first and the last key-value head. `status` is as in `attention.py`: "timed", or why a row has no figures; "cannot"
only where the provider has no form for the mask.

`forward_ms` (with what the backward needs) and `backward_ms` are medians of turns in which every provider runs once.
They are times of the GPU: it waits at the start of each turn until the host has issued the call. The mask's own form is
made before. `speed_of_flex` is the time of FlexAttention's default kernel over the provider's, both passes together:
below 1, the provider is slower.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import attention
import torch
from attention import admit, exact, inputs, log, results_of, run_in_processes
from harness import append_rows, gpu_medians, random_lengths
from peers import PROVIDERS, Attention, Case
from torch import Tensor

from flashmask_hf import FlashMask, masks

DEFAULT = ("flashmask", "flashmask_triton", "flex_attention", "fa4", "cudnn_flex", "cudnn")
FLEX = "flex_attention"
FIGURES = ("forward_ms", "backward_ms", "both_ms", "speed_of_flex")


class Work(NamedTuple):
    """A case: its mask, and the sizes of one row."""

    family: str
    """As in `attention.py`, which tells a peer what form the mask takes."""
    make: Callable[[], FlashMask]
    heads: int
    kv_heads: int
    dim: int


def short_documents(length: int, generator: torch.Generator) -> list[int]:
    """Draw lengths of documents that fill a row, lognormal around 256 tokens, with a sigma of 1."""
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        drawn = float(torch.empty(1).log_normal_(5.545, 1.0, generator=generator))  # exp(5.545) = 256
        found.append(min(left, max(1, round(drawn))))
    return found


def _drawn(length: int) -> list[int]:
    return short_documents(length, torch.Generator().manual_seed(length))


def _four(length: int) -> list[int]:
    return random_lengths(length, 4, torch.Generator().manual_seed(length))


CASES: dict[str, Work] = {
    "short 64 x 512": Work("causal_document", lambda: masks.causal_document([512] * 64), 16, 16, 128),
    "short 64 x 512, head_dim 64": Work("causal_document", lambda: masks.causal_document([512] * 64), 16, 16, 64),
    "short 64 x 512, both ways": Work("document", lambda: masks.document([512] * 64), 16, 16, 128),
    "short 256 x 128": Work("causal_document", lambda: masks.causal_document([128] * 256), 16, 16, 128),
    "short lognormal": Work("causal_document", lambda: masks.causal_document(_drawn(32768)), 16, 16, 128),
    "short lognormal, both ways, head_dim 64": Work("document", lambda: masks.document(_drawn(32768)), 16, 16, 64),
    "grouped 2K": Work("causal_document", lambda: masks.causal_document(_four(2048)), 32, 4, 128),
    "grouped 8K": Work("causal_document", lambda: masks.causal_document(_four(8192)), 32, 4, 128),
    "grouped 8K, causal, head_dim 64": Work("causal", lambda: masks.causal(8192), 32, 4, 64),
    "few 1 x 8K, causal": Work("causal", lambda: masks.causal(8192), 1, 1, 128),
    "few 1 x 8K, causal, head_dim 64": Work("causal", lambda: masks.causal(8192), 1, 1, 64),
    "few 2 x 8K": Work("causal_document", lambda: masks.causal_document(_four(8192)), 2, 2, 128),
    "few 4 x 8K, window": Work("sliding_window", lambda: masks.sliding_window(8192, 512), 4, 4, 128),
    "few 1 x 32K, causal": Work("causal", lambda: masks.causal(32768), 1, 1, 128),
    "few 1 x 32K, window": Work("sliding_window", lambda: masks.sliding_window(32768, 1024), 1, 1, 128),
    "few 2 x 32K": Work("causal_document", lambda: masks.causal_document(_four(32768)), 2, 2, 128),
    "few 4 x 32K, head_dim 64": Work("causal_document", lambda: masks.causal_document(_four(32768)), 4, 4, 64),
    "chunk 1K of 16K, causal": Work("causal", lambda: masks.causal(16384, q_len=1024), 8, 8, 128),
    "chunk 1K of 16K, window": Work("sliding_window", lambda: masks.sliding_window(16384, 4096, q_len=1024), 8, 8, 128),
    "across 1K to 16K": Work("full", lambda: masks.full(16384, q_len=1024), 8, 8, 128),
    "across 16K to 1K": Work("full", lambda: masks.full(1024, q_len=16384), 8, 8, 128),
    "odd 8191": Work("causal_document", lambda: masks.causal_document(_four(8191)), 16, 16, 128),
    "odd 5000, both ways, head_dim 64": Work("document", lambda: masks.document(_four(5000)), 16, 16, 64),
}
"""The cases by name; the first word is their group."""


def prepared(work: Work) -> tuple[Case, list[Tensor]]:
    """Return a case as the providers take it, and q, k, v and the gradient of the output."""
    mask = work.make().to(attention.DEVICE)
    tensors = inputs(attention.Shape(1, work.heads, work.kv_heads, mask.kv_len, work.dim, work.dim), mask.row_count())
    return Case(work.family, mask, *tensors[:3]), tensors


def checked_heads(found: Sequence[Tensor], kv_heads: int) -> list[Tensor]:
    """Return the first and the last key-value head of [B, H, S, D] tensors, with all query heads of each."""
    several = []
    for x in found:
        group = x.shape[1] // kv_heads
        several.append(x if kv_heads <= 2 else torch.cat([x[:, :group], x[:, -group:]], 1))
    return several


def measure(
    names: Sequence[str], title: str, work: Work, repeats: int, warmup: int, tolerance: float
) -> list[dict[str, object]]:
    """Return a row per provider: milliseconds forward and backward, or why there are none.

    Args:
        names: the providers.
        title: name of the case.
        work: the case.
        repeats: turns of which the median is taken.
        warmup: turns before them, beside the one that is checked.
        tolerance: largest error of a provider that is timed.
    """
    log(title)
    case, tensors = prepared(work)
    *qkv, dout = tensors
    expected = exact(checked_heads(tensors, work.kv_heads), case.mask)
    states: dict[str, str] = {}
    table: dict[str, Attention] = {}
    for name in names:
        admitted = admit(
            name, case, tensors, expected, tolerance, select=lambda found: checked_heads(found, work.kv_heads)
        )
        states[name] = admitted if isinstance(admitted, str) else "timed"
        if not isinstance(admitted, str):
            table[name] = admitted[1]
        else:
            log(f"{title} {name}: {admitted}")
    del expected
    forward = gpu_medians({n: lambda a=a: a(*qkv) for n, a in table.items()}, repeats, warmup)
    outs = {n: a(*qkv) for n, a in table.items()}
    backward = gpu_medians(
        {n: lambda o=o: torch.autograd.grad(o, qkv, dout, retain_graph=True) for n, o in outs.items()}, repeats, warmup
    )
    rows: list[dict[str, object]] = []
    for name in names:
        row: dict[str, object] = {
            "case": title, "mask": work.family, "q_len": case.mask.row_count(), "kv_len": case.mask.kv_len,
            "heads": work.heads, "kv_heads": work.kv_heads, "head_dim": work.dim,
            "sparsity": round(case.mask.sparsity(), 4), "provider": name, "version": "", "status": states[name],
            **dict.fromkeys(FIGURES, ""),
        }  # fmt: skip
        if name in table:
            both = forward[name] + backward[name]
            row |= {
                "version": PROVIDERS[name].version(), "forward_ms": round(forward[name], 4),
                "backward_ms": round(backward[name], 4), "both_ms": round(both, 4),
            }  # fmt: skip
            if FLEX in table:
                row["speed_of_flex"] = round((forward[FLEX] + backward[FLEX]) / both, 3)
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Return a case in one line: milliseconds forward / backward by provider, or why there are none."""
    cells = [
        f"{row['provider']} {row['forward_ms']} / {row['backward_ms']}"
        + (f" ({row['speed_of_flex']}x)" if row["speed_of_flex"] != "" else "")
        if row["status"] == "timed"
        else f"{row['provider']} {str(row['status']).partition(':')[0]}"
        for row in rows
    ]
    return f"{rows[0]['case']}: {', '.join(cells)}"


def run_once(name: str, title: str) -> None:
    """Run a provider once on a case, to fill the compilation caches on disk."""
    case, tensors = prepared(CASES[title])
    results_of(PROVIDERS[name].prepare(case)(), tensors)
    torch.cuda.empty_cache()


def main(flags: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = sorted({title.split()[0] for title in CASES})
    parser.add_argument("--cases", nargs="+", default=groups, choices=groups, help="groups of cases")
    parser.add_argument("--providers", nargs="+", default=list(DEFAULT), choices=PROVIDERS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2, help="turns before them, beside the one that is checked")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="largest error of 128 rows, relative")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile kernels beforehand")
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args(flags)
    torch.manual_seed(0)
    titles = [title for title in CASES if title.split()[0] in arguments.cases]
    if arguments.jobs > 1:
        tasks = [(name, title) for name in arguments.providers for title in titles if PROVIDERS[name].installed()]
        run_in_processes(run_once, tasks, arguments.jobs)
    rows: list[dict[str, object]] = []
    for title in titles:
        found = measure(
            arguments.providers, title, CASES[title], arguments.repeats, arguments.warmup, arguments.tolerance
        )
        append_rows(arguments.csv, rows, found, silent=True)
        print(summary(found), flush=True)


if __name__ == "__main__":
    main()
