"""Time this checkout beside an earlier commit of the repository: kernels, host time of short calls, and training steps.

    python recipes/benchmarks/regression.py c30b297 --csv regression.csv

The package of the other commit is loaded under another name, `flashmask_other`, so calls of both run in turns in one
process. Everything is bfloat16; figures are medians. `figure` names what was timed:

- `kernels`: forward and backward of 128K tokens with hidden size 4096, in milliseconds of the GPU.
- `host`: time in which the host issues a short call with 32 heads on an idle GPU, in microseconds, beside SDPA under
  the same mask as a dense tensor.
- `step`: seconds of an eager training step of a Llama-3.2-1B shape with LoRA, one packed row a step. Each repeat is a
  process of its own, and both commits alternate.

Outputs and gradients of both commits must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
MASKS = ("causal_document", "share_question", "global_sliding_window")
HEADS = 32


def load_commit(commit: str, folder: Path) -> Any:
    """Write the package of a commit to `folder`, as it is and as `flashmask_other`; return the latter, imported."""
    archive = subprocess.run(["git", "archive", commit, "flashmask_hf"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in ("as_is", "renamed"):
        (folder / name).mkdir()
        subprocess.run(["tar", "x", "-C", folder / name], input=archive.stdout, check=True)
    renamed = folder / "renamed" / "flashmask_other"
    (folder / "renamed" / "flashmask_hf").rename(renamed)
    for path in renamed.rglob("*.py"):
        path.write_text(path.read_text().replace("flashmask_hf", renamed.name))
    sys.path.insert(0, str(renamed.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers knows the names of the attention functions already
        return importlib.import_module(renamed.name)


def functions(other: Any, mask: Any, tensors: list[Any], dout: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return a forward and both passes of each commit, after asserting that their results agree."""
    import flashmask_hf

    table: dict[tuple[str, str], Callable[[], Any]] = {}
    results = []
    for name, package in (("here", flashmask_hf), ("other", other)):
        copy = package.FlashMask(mask.indices.clone(), mask.causal)
        attend = lambda p=package, m=copy: p.flashmask_attention(*tensors, m)  # noqa: E731
        table[name, "forward"] = attend
        table[name, "both"] = lambda a=attend: torch.autograd.grad(a(), tensors, dout)
        results.append([attend(), *table[name, "both"]()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
    return table


def make_tensors(batch: int, length: int, heads: int, dim: int) -> tuple[list[Any], Any]:
    """Return q, k and v that require gradients, and the gradient of the output, laid out [B, S, H, D] in memory."""
    *tensors, dout = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    return [x.requires_grad_() for x in tensors], dout


def time_kernels(other: Any, lengths: list[int], repeats: int) -> list[dict[str, object]]:
    """Return rows of the figure `kernels`."""
    from attention import HIDDEN, TOKENS, make_mask
    from harness import interleaved_medians

    rows = []
    for dim in (64, 128):
        for length in lengths:
            tensors, dout = make_tensors(TOKENS // length, length, HIDDEN // dim, dim)
            for family in MASKS:
                table = functions(other, make_mask(family, length), tensors, dout)
                rows += compare(f"{family} {length} x {dim}", "kernels", "ms", interleaved_medians(table, repeats))
    return rows


def time_host(other: Any, lengths: list[int], repeats: int) -> list[dict[str, object]]:
    """Return rows of the figure `host`."""
    from harness import host_microseconds
    from short import documents

    from flashmask_hf import masks

    rows = []
    for dim in (64, 128):
        for length in lengths:
            tensors, dout = make_tensors(1, length, HEADS, dim)
            mask = masks.causal_document(documents(length)).to("cuda")
            visible = mask.to_dense()
            table = functions(other, mask, tensors, dout)
            dense = lambda t=tensors, d=visible: F.scaled_dot_product_attention(*t, attn_mask=d)  # noqa: E731
            table["sdpa", "forward"] = dense
            table["sdpa", "both"] = lambda a=dense, t=tensors, d=dout: torch.autograd.grad(a(), t, d)
            rows += compare(f"{length} x {dim}", "host", "us", host_microseconds(table, repeats))
    return rows


def compare(case: str, figure: str, unit: str, medians: dict[tuple[str, str], float]) -> list[dict[str, object]]:
    """Return a row for each of the passes."""
    return [
        {
            "figure": figure,
            "case": case,
            "passes": passes,
            "unit": unit,
            **{name: round(medians[name, passes], 4) for name in ("here", "other")},
            "here_to_other": round(medians["here", passes] / medians["other", passes], 3),
            "here_to_sdpa": round(medians["here", passes] / medians["sdpa", passes], 3) if figure == "host" else "",
        }
        for passes in dict.fromkeys(passes for _, passes in medians)
    ]


def time_steps(folder: Path, lengths: list[int], repeats: int) -> list[dict[str, object]]:
    """Return rows of the figure `step`."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for name, path in (("here", ROOT), ("other", folder / "as_is")):
            command = [sys.executable, __file__, "--child", *map(str, lengths)]
            environment = {**os.environ, "PYTHONPATH": str(path)}
            found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            for length, median in json.loads(found.stdout.splitlines()[-1]).items():
                seconds.setdefault((name, int(length)), []).append(median)
    rows = []
    for length in lengths:
        medians = {(name, "step"): statistics.median(seconds[name, length]) for name in ("here", "other")}
        rows += compare(f"LoRA, {length} tokens", "step", "s", medians)
    return rows


def child(lengths: list[int]) -> None:
    """Train in this process; print the median seconds of a step for each length as one line of JSON."""
    from peft import LoraConfig, get_peft_model
    from training import SHAPES, make_rows
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = LlamaConfig(**SHAPES["llama-3.2-1b"])
        base = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    medians = {}
    for length in lengths:
        times = []
        for row in make_rows(length, 24, config.vocab_size):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(**row, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        medians[length] = statistics.median(times[4:])
    print(json.dumps(medians))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="commit to compare with")
    parser.add_argument(
        "--figures", nargs="+", default=["kernels", "host", "step"], choices=["kernels", "host", "step"]
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768], help="rows of the figure kernels")
    parser.add_argument("--short", nargs="+", type=int, default=[128, 256, 512, 1024], help="rows of the figure host")
    parser.add_argument("--rows", nargs="+", type=int, default=[2048, 8192], help="rows of the figure step")
    parser.add_argument("--repeats", type=int, default=15, help="turns; a tenth of it, but at least 3, for steps")
    parser.add_argument("--csv", help="file to write the rows to")
    parser.add_argument("--child", nargs="+", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    if arguments.child:
        return child(arguments.child)
    if arguments.commit is None:
        parser.error("name the commit to compare with")
    from harness import append_rows  # imports this package, which the child takes from elsewhere

    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as path:
        other = load_commit(arguments.commit, Path(path))
        if "host" in arguments.figures:
            append_rows(arguments.csv, rows, time_host(other, arguments.short, 10 * arguments.repeats))
        if "kernels" in arguments.figures:
            append_rows(arguments.csv, rows, time_kernels(other, arguments.lengths, arguments.repeats))
        if "step" in arguments.figures:
            append_rows(arguments.csv, rows, time_steps(Path(path), arguments.rows, max(3, arguments.repeats // 10)))


if __name__ == "__main__":
    main()
