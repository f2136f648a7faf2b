"""Time the mask hook, which turns a mask function of transformers into column vectors once per forward and mask.

    python recipes/benchmarks/hook.py --length 32768 --csv hook.csv

Masks are of 8 documents, causal, windowed, chunked, or with images that attend to themselves bidirectionally;
`evaluated` is a mask function of the user's own, which the hook evaluates on all pairs. Figures are median milliseconds
and the peak of newly allocated memory. The program exits with 1 if the packed documents take more than `--bar`
milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from harness import random_lengths, write_csv
from torch import Tensor
from transformers import masking_utils as hf_masks

from flashmask_hf.hf.mask_hook import DOCUMENTS, mask_hook


def masks(length: int) -> dict[str, dict[str, Any]]:
    """Return what transformers and the package's patches pass to the hook, by the name of the mask."""
    lengths = random_lengths(length, 8, torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(1, 9), torch.tensor(lengths))[None].to("cuda", DOCUMENTS)
    causal, window = hf_masks.causal_mask_function, hf_masks.sliding_window_causal_mask_function(1024)
    images = torch.where(torch.arange(length).cuda() % 2048 < 512, torch.arange(length).cuda() // 2048, -1)[None]

    def own(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key % 4 == 0)

    return {
        "causal": {"mask_function": causal},
        "8 documents": {"mask_function": causal, "attention_mask": documents},
        "8 documents, window": {"mask_function": window, "attention_mask": documents},
        "chunks": {
            "mask_function": hf_masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64).cuda())
        },
        "images": {"mask_function": hf_masks.or_masks(causal, hf_masks.blockwise_overlay(images))},
        "evaluated": {"mask_function": own},
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bar", type=float, default=1.0, help="most milliseconds for 8 documents that pass")
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    rows: list[dict[str, object]] = []
    for name, mask in masks(arguments.length).items():
        given: dict[str, Any] = {"batch_size": 1, "q_length": arguments.length, "kv_length": arguments.length, **mask}
        times: list[float] = []
        peak = 0
        for _ in range(arguments.repeats if name != "evaluated" else 3):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            mask_hook(**given, device="cuda")
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
            peak = torch.cuda.max_memory_allocated() - before
        figures = {"milliseconds": round(statistics.median(times[1:]), 3), "peak_mib": round(peak / 2**20, 2)}
        rows.append({"mask": name, "length": arguments.length, **figures})
    write_csv(arguments.csv, rows)
    if float(str(rows[1]["milliseconds"])) > arguments.bar:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
