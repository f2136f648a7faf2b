"""Flags, clocks, turns, and CSV rows with hardware and versions of all benchmarks.

The environment variable COMMIT names the commit in the rows of a copied tree, where git does not know it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import io
import logging
import math
import os
import random
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import torch._dynamo.config
import torch.distributed as dist
import transformers
import triton
from transformers.utils import import_utils

import flashmask_hf

Case = TypeVar("Case")
WAIT = 4_000_000  # GPU cycles, 2 ms or more: longer than the host takes to issue a forward or a backward
GIB = 2**30
START = psutil.Process().create_time()  # in seconds since the epoch, before torch's import
_order = random.Random(0)  # of the providers in a turn


class Flag(NamedTuple):
    """A flag: a list takes several values, False becomes True; whole numbers are at least 1, others at least 0."""

    default: Any = None
    choices: Iterable[Any] | None = None
    help: str | None = None
    kind: Callable[[str], Any] | None = None
    name: str | None = None

    def add(self, parser: argparse.ArgumentParser, keyword: str) -> None:
        """Add it to a parser."""
        name, several = self.name or f"--{keyword}", isinstance(self.default, (list, tuple))
        if self.default is False:
            parser.add_argument(name, action="store_true", help=self.help)
            return
        number = {int: count, float: amount}.get(type([*self.default, ""][0] if several else self.default), str)
        options: Any = {"default": self.default, "choices": self.choices, "type": self.kind or number}
        if several or (self.name and self.default is not None):
            options["nargs"] = "+" if several else "?"
        parser.add_argument(name, help=self.help, **options)


def count(text: str) -> int:
    return _at_least(1, int(text))


def whole(text: str) -> int:
    return _at_least(0, int(text))


def amount(text: str) -> float:
    return _at_least(0, float(text))


def _at_least(least: int, number: Any) -> Any:
    if not number >= least:  # nor NaN
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


Rows = list[dict[str, object]]


def program(
    doc: str | None, *, gpu: bool = True, silent: bool = False, ends: bool = True, **flags: Any
) -> Callable[[Callable[[argparse.Namespace], Iterable[Rows]]], Callable[..., None]]:
    """Make a program of a generator of rows, which the first process writes as they come, and prints unless `silent`.

    With `gpu` it needs one unless `--device cpu` is given, and ends at `--deadline`, by itself without `ends`. `flags`
    are a `Flag` or a default.
    """
    device = "cuda" if gpu or torch.cuda.is_available() else "cpu"
    flags["csv"] = Flag(help="file to write the rows to, as soon as they are measured")
    flags["device"] = Flag(device, ("cuda", "cpu"), "cpu only tries the program")
    if gpu:
        flags["deadline"] = Flag(math.inf, help="seconds after process start in which to measure")

    def decorate(measure: Callable[[argparse.Namespace], Iterable[Rows]]) -> Callable[..., None]:
        def main(argv: Sequence[str] | None = None) -> None:
            parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
            for keyword, flag in flags.items():
                (flag if isinstance(flag, Flag) else Flag(flag)).add(parser, keyword)
            a = parser.parse_args(argv)
            if a.device == "cuda" and not torch.cuda.is_available():
                parser.error("a GPU is needed; --device cpu tries the program without one: give small sizes")
            if a.device == "cuda" and (gpu or "LOCAL_RANK" in os.environ):
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch._dynamo.config.recompile_limit = 256  # FlexAttention compiles for every mask and every shape
            logging.getLogger("transformers").setLevel(logging.ERROR)
            warnings.filterwarnings(
                "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
            )
            first = os.environ.get("RANK", "0") == "0"
            results = Results(a.csv if first else None)
            with contextlib.nullcontext() if first else contextlib.redirect_stdout(io.StringIO()):
                for rows in measure(a):
                    results.add(rows, silent=silent)
                    if gpu and ends and not in_time(a):
                        break
            if dist.is_initialized():
                gc.collect()  # a wrapped model is part of cycles; freed after its group, it may abort the process
                dist.barrier()
                dist.destroy_process_group()

        return main

    return decorate


def largest(figure: float, device: Any) -> float:
    """Return the largest figure of all processes."""
    if not dist.is_initialized():
        return figure
    found = torch.tensor(figure, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def time_left(a: argparse.Namespace) -> float:
    return -largest(time.time() - START - a.deadline, a.device)


def in_time(a: argparse.Namespace, *seconds: float) -> bool:
    """Return whether calls of these seconds end by `--deadline`."""
    return sum(seconds) <= time_left(a)


def conditions() -> dict[str, str]:
    command = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "flashmask_hf": flashmask_hf.__version__,
        "commit": os.environ.get("COMMIT") or head or "unknown",
    }


def milliseconds(function: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        return host_milliseconds(function)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def gpu_milliseconds(function: Callable[[], object]) -> float:
    """Return the GPU milliseconds of a call, which waits until the host has issued it."""
    if torch.cuda.is_available():
        torch.cuda._sleep(WAIT)
    return milliseconds(function)


def host_milliseconds(function: Callable[[], object]) -> float:
    """Return the milliseconds in which the host issues a call on an idle GPU."""
    synchronize()
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def interleaved_medians(
    providers: Mapping[Case, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    clock: Callable[[Callable[[], object]], float] = milliseconds,
) -> dict[Case, float]:
    """Return the median milliseconds of providers in turns of random order: a GPU at its power limit slows the next."""
    for _ in range(warmup):
        for function in providers.values():
            function()
    times: dict[Case, list[float]] = {name: [] for name in providers}
    for _ in range(repeats):
        for name in _order.sample(list(providers), len(providers)):
            times[name].append(clock(providers[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    forget_peak()


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def attempt(function: Callable[[], Any]) -> tuple[Any, float, float] | str:
    """Return the result, the seconds and the peak GiB of a call, or "out of memory" or "failed"."""
    synchronize()
    forget_peak()
    start = time.perf_counter()
    try:
        result = function()
        synchronize()
        seconds = time.perf_counter() - start
        return result, seconds, torch.cuda.max_memory_allocated() / GIB
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Exception:  # of a compiler or a peer, which must not end the run of the others
        traceback.print_exc()
        reason = "failed"
    free_memory()  # after the exception, whose frames hold tensors
    return reason


class Measured(NamedTuple):
    """Median seconds and peak GiB of a call, how often it was measured, and the GiB in use before."""

    seconds: float
    peak_gib: float
    turns: int
    used_gib: float


def contest(
    calls: Mapping[str, Callable[[], Any]],
    agree: Callable[[dict[str, Any]], object],
    turns: int,
    a: argparse.Namespace,
    clean: Callable[[], object] = lambda: None,
    firsts: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Measured | str]:
    """Measure calls in turns, of random order, that end by `--deadline`; of a call that fails, return the reason.

    Before, `agree` takes the results of first runs, or of `firsts`. `clean` follows each call.
    """
    results, found = dict[str, Any](), dict[str, Measured | str]()
    for name, call in (firsts or calls).items():
        made = attempt(call)
        clean()
        if isinstance(made, str):
            found[name] = made
        else:
            results[name] = made[0]
    agree(results)
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in results}
    made = None
    results.clear()  # which may hold gradients
    gc.collect()
    used = torch.cuda.memory_allocated() / GIB
    for turn in range(turns):
        if turn and not in_time(a, *(one[-1][0] for one in steps.values())):
            break
        for name in _order.sample(list(steps), len(steps)):
            made = attempt(calls[name])
            clean()
            if isinstance(made, str):
                found[name] = made
                del steps[name]
            else:
                steps[name].append(made[1:])
            del made  # whose result would count in the next peak
    for name, one in steps.items():
        seconds, peaks = zip(*one, strict=True)
        found[name] = Measured(statistics.median(seconds), max(peaks), len(one), used)
    return found


def available(names: Sequence[str], device: str) -> list[str]:
    running = []
    for name in names:
        plain = name.removesuffix("_single").removesuffix("_flat")
        version = plain.rpartition("flash_attention_")[2]
        if "flex_attention" in name and device == "cpu":
            print(f"{name} is left out: it has no backward on a CPU", flush=True)
        elif version != plain and not getattr(import_utils, f"is_flash_attn_{version}_available")():
            print(f"{name} is left out: flash-attn {version} is not installed, or there is no GPU", flush=True)
        else:
            running.append(name)
    return running


def random_lengths(total: int, count: int, generator: torch.Generator, minimum: int = 128) -> list[int]:
    """Draw up to `count` document lengths of at least `minimum` tokens that sum to `total` (FlashMask, appendix A.2.1).

    Raises:
        ValueError: `total` is less than `minimum`.
    """
    if total < minimum:
        raise ValueError(f"a row must have at least {minimum} tokens, the shortest document, got {total}")
    count = max(1, min(count, total // minimum))
    free = total - count * minimum
    cuts = torch.randint(0, free + 1, (count - 1,), generator=generator).sort().values.tolist()
    return [minimum + b - a for a, b in zip([0, *cuts], [*cuts, free], strict=True)]


class Results:
    """Rows of figures, printed and written as they are measured."""

    def __init__(self, path: str | Path | None):
        self.path, self.rows = path, list[dict[str, object]]()

    def add(self, found: Sequence[Mapping[str, object]], *, silent: bool = False) -> None:
        """Print rows unless `silent`, and write all; a row's own conditions stay."""
        for row in [] if silent else found:
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        here = conditions()
        self.rows += [{**row, **here, **row} for row in found]
        if self.path is None or not self.rows:
            return
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(f"{self.path}.part")  # so that a run killed while it writes keeps the rows before
        with open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        unfinished.replace(self.path)
