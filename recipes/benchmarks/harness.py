"""Benchmark harness: interleaved medians, CUDA graphs, and CSV rows that name the hardware and versions."""

from __future__ import annotations

import csv
import gc
import random
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import triton
from torch import Tensor
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

import flashmask_hf

Case = TypeVar("Case")
WAIT = 4_000_000  # cycles of a GPU, 2 ms or more: longer than the host takes to issue a forward or a backward
_order = random.Random(0)  # of the providers in a turn


def conditions() -> dict[str, str]:
    """Return the GPU, the versions and the commit of a measurement."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "flashmask_hf": flashmask_hf.__version__,
        "commit": commit or "unknown",
    }


def interleaved_medians(
    providers: Mapping[Case, Callable[[], object]], repeats: int, warmup: int = 2
) -> dict[Case, float]:
    """Return the median milliseconds of each provider.

    Providers run in turns, so that drift affects all alike. Each turn has a random order, because a GPU at its power
    limit is slower after a provider that draws more power.
    """
    return _medians(providers, repeats, warmup, _milliseconds)


def gpu_medians(providers: Mapping[Case, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[Case, float]:
    """Return the median milliseconds of each provider as `interleaved_medians`, without those of the host.

    The GPU waits before each call until the host has issued it, which a short call may take longer for than to run.
    """

    def measure(function: Callable[[], object]) -> float:
        if torch.cuda.is_available():
            torch.cuda._sleep(WAIT)
        return _milliseconds(function)

    return _medians(providers, repeats, warmup, measure)


def host_microseconds(providers: Mapping[Case, Callable[[], object]], repeats: int) -> dict[Case, float]:
    """Return the median host time of a call of each provider, in microseconds; each call starts on an idle GPU."""

    def issue(function: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e6

    return _medians(providers, repeats, 2, issue)


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture the calls in a CUDA graph, after running the first once to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _medians(
    providers: Mapping[Case, Callable[[], object]],
    repeats: int,
    warmup: int,
    measure: Callable[[Callable[[], object]], float],
) -> dict[Case, float]:
    """Return the median of `measure` of each provider, over turns in random order."""
    for _ in range(warmup):
        for function in providers.values():
            function()
    times: dict[Case, list[float]] = {name: [] for name in providers}
    for _ in range(repeats):
        for name in _order.sample(list(providers), len(providers)):
            times[name].append(measure(providers[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(function: Callable[[], object]) -> float:
    """Return the milliseconds of a call: GPU time between events, or wall-clock time without a GPU."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def attempt(function: Callable[[], Any]) -> tuple[Any, float, float] | str:
    """Return the result, the seconds and the peak GiB of a call, or "out of memory" or "failed"."""
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        result = function()
        synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return result, seconds, peak
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except RuntimeError:  # also those of compilers
        traceback.print_exc()
        reason = "failed"
    gc.collect()  # after the exception, whose frames hold tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return reason


def check_against_float64(case: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Exit unless what a provider computed agrees with float64.

    Args:
        case: the provider, and what it was given, for the message.
        found: out, or out, dq, dk and dv.
        expected: the same in float64.
    """
    names = ("out", "dq", "dk", "dv")[: len(found)]
    for name, one, other in zip(names, found, expected, strict=True):
        error = float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        if not error < 1e-2:
            raise SystemExit(f"{case} is wrong: {name} is off by {error:.1e}")


def missing(implementation: str, device: str) -> str:
    """Return why an attention implementation of transformers cannot run here, or ""."""
    if implementation == "flex_attention" and device == "cpu":
        return "it has no backward on a CPU"
    packages = {
        "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
        "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
        "flash_attention_4": ("flash-attn-4", is_flash_attn_4_available),
    }
    if implementation in packages:
        package, available = packages[implementation]
        if not available():
            return f"the package {package} is not installed, or there is no GPU"
    return ""


def random_lengths(total: int, count: int, generator: torch.Generator, minimum: int = 128) -> list[int]:
    """Draw `count` document lengths of at least `minimum` tokens that sum to `total` (paper, appendix A.2.1).

    Fewer are drawn if `count` do not fit. A row shorter than `minimum` raises ValueError.
    """
    if total < minimum:
        raise ValueError(f"a row of {total} tokens is too short: its documents have at least {minimum}")
    count = max(1, min(count, total // minimum))
    free = total - count * minimum
    cuts = torch.randint(0, free + 1, (count - 1,), generator=generator).sort().values.tolist()
    return [minimum + b - a for a, b in zip([0, *cuts], [*cuts, free], strict=True)]


def show(rows: Sequence[Mapping[str, object]]) -> None:
    """Print each row on a line."""
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def write_csv(path: str | Path | None, rows: Sequence[Mapping[str, object]], *, silent: bool = False) -> None:
    """Print the rows, unless `silent`, and write them with the conditions to `path`, if there is one."""
    if not silent:
        show(rows)
    if path is not None:
        found = conditions()
        everything = [{**row, **found} for row in rows]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(f"{path}.part")  # so that a run killed while it writes keeps the rows before
        with open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(everything[0]))
            writer.writeheader()
            writer.writerows(everything)
        unfinished.replace(path)


def append_rows(
    path: str | Path | None,
    rows: list[dict[str, object]],
    found: Sequence[dict[str, object]],
    *,
    silent: bool = False,
) -> None:
    """Print `found`, unless `silent`, append it to `rows` and write all rows, so that an interrupted run keeps them."""
    if not silent:
        show(found)
    rows += found
    write_csv(path, rows, silent=True)
