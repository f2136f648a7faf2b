"""Time the first call in a fresh process, with an empty and with a full cache of compiled kernels on disk.

    python recipes/benchmarks/first_call.py --csv first_call.csv

Runs forward and backward of one row of 4,096 tokens, 16 heads, head_dim 128, bfloat16, under a causal mask of two
documents. Each row of the result is from a process of its own. `import_s` is the import of this package, after torch,
transformers and CUDA are initialized; `first_s` the first forward and backward; `second_ms` the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch


def child() -> None:
    """Measure in a fresh process, and print the times as one line of JSON."""
    import transformers.modeling_utils  # noqa: F401  # not part of the import that is timed

    q, k, v = (
        torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    from flashmask_hf import flashmask_attention, masks

    times = [time.perf_counter() - start]
    mask = masks.causal_document([1000, 3096]).to("cuda")
    for _ in range(2):
        start = time.perf_counter()
        out = flashmask_attention(q, k, v, mask)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(json.dumps(times))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=3, help="number of processes with a full cache")
    parser.add_argument("--csv", help="file to write the rows to")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    if arguments.child:
        return child()
    from harness import write_csv  # imports this package, which the child must not do before it is timed

    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", *["full"] * arguments.warm):
            command = [sys.executable, __file__, "--child"]
            found = subprocess.run(
                command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, check=True, text=True
            )
            imported, first, second = json.loads(found.stdout.splitlines()[-1])
            times = {"import_s": round(imported, 2), "first_s": round(first, 2), "second_ms": round(1000 * second, 2)}
            rows.append({"cache": state, **times})
    write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
