"""Time the plan of a new mask, which is built once for all layers and passes.

    python recipes/benchmarks/plan.py --csv plan.csv

One row, one mask head, the twelve masks of attention.py. Figures are medians of one plan: `graph_us` in a CUDA graph of
eight plans, which is the time of the GPU; `issued_us` between events of an idle GPU, which is the time of the host.
`bytes_per_token` is the size of a plan.
"""

from __future__ import annotations

import argparse

import torch
from attention import FAMILIES, make_mask
from harness import append_rows, graph_of, interleaved_medians

from flashmask_hf._call.plan_cache import make_plan

CALLS = 8


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    rows: list[dict[str, object]] = []
    for length in arguments.lengths:
        for family in arguments.masks:
            mask = make_mask(family, length)

            def build(mask=mask, length=length) -> tuple[torch.Tensor, ...]:
                return make_plan(mask.indices, mask.causal, length)

            graph = graph_of([build] * CALLS)
            times = interleaved_medians({"graph": graph.replay, "issued": build}, arguments.repeats)
            size = sum(x.numel() * x.element_size() for x in build())
            found = {
                "mask": family,
                "length": length,
                "graph_us": round(1000 * times["graph"] / CALLS, 2),
                "issued_us": round(1000 * times["issued"], 1),
                "bytes_per_token": round(size / length, 2),
            }
            append_rows(arguments.csv, rows, [found])


if __name__ == "__main__":
    main()
