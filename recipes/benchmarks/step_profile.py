"""Measure where the GPU time of a training step goes, by kind of work.

    python recipes/benchmarks/step_profile.py --lengths 8192 32768 131072 --csv results/step_profile_1b.csv
    python recipes/benchmarks/step_profile.py --shape llama-3.1-8b --lora --settings eager kept --csv 8b.csv

Rows, steps and settings are the fine-tuning of `training.py`. The kind of a kernel, copy or fill follows from its name,
else from the module that ran it. A row has a kind's milliseconds in one step, its launches, and its share of a step
without the profiler; "idle" is the rest.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from harness import Flag, Rows, free_memory, program
from shapes import SHAPES
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from training import Study, setting

LONG_STEP = 10_000  # milliseconds from which on a step is timed once, instead of three times
SCOPE = "kind: "  # start of the names of profiler annotations, before the kind
UNCLASSIFIED = "unclassified"

NAMED_KINDS = [
    ("attention forward", r"(forward_kernel|_forward)"),
    ("attention backward", r"(backward_kernel|scale_dq_kernel|_backward_(keys|queries|lse)|_row_(delta|statistics))"),
    ("plan and mask", r"(_(column|row)_plan|_join_(rows|lists)|_pad_indices|_(order|rank)_key_tiles)"),
    ("loss", r"(_(forward|backward)_kernel|.*(nll_loss|log_?softmax|SoftMax|cross_entropy).*)"),
    ("optimizer", r".*(multi_tensor_apply|[aA]dam|Optimizer).*"),
    (
        "matrix products",
        r".*(gemm|nvjet|cutlass|cublas|xmma|splitK|gemv|triton_tem_.*mm).*|aten::(add|b|bad)?(d?bmm|mm)",
    ),
    ("plan and mask", r".*([sS]ort|searchsorted|_assert_async|bitwise).*"),
    ("norms", r"triton_.*rsqrt.*"),
    ("activation", r"triton_.*(silu|sigmoid).*"),
    ("rotary", r"triton_.*(neg|cat|slice_backward).*"),
    ("copies and casts", r"triton_(poi|per)_fused_+(to_copy|clone|view|transpose|t|expand|_)+\d+|Mem(cpy|set).*"),
    ("copies and casts", r".*(copy_kernel|CatArray|FillFunctor).*|aten::(copy_|fill_|cat)"),
]
"""Kinds of kernels by the first pattern that fits the whole name."""

MODULE_KINDS = [
    ("norms", r".*Norm"),
    ("rotary", r".*RotaryEmbedding|.*Attention"),
    ("activation", r".*MLP"),
    ("rest of linear layers", r"Linear"),
    ("embedding", r"Embedding"),
    ("residual", r".*DecoderLayer"),
]
"""Kinds of what else modules run, by patterns of their class's name; the innermost counts."""

CALL_KINDS = [("optimizer", r"Optimizer\.step.*"), ("loss", r"ChunkedLogProbFunction.*")]
"""Kinds of what else runs within a call, by patterns of its name."""


Usage = dict[str, list[float]]
"""Microseconds of the kernels, copies and fills of each kind."""


def kind_in(kinds: Sequence[tuple[str, str]], name: str) -> str | None:
    return next((kind for kind, pattern in kinds if re.fullmatch(pattern, name, re.DOTALL)), None)


def kind_of(kernel: str, scope: str | None = None) -> str:
    """Return the kind of a kernel by its name, else by the scope that launched it."""
    return kind_in(NAMED_KINDS, kernel) or scope or UNCLASSIFIED


def annotate(model: nn.Module) -> None:
    """Make the modules of `MODULE_KINDS` run in a profiler annotation, in place."""

    def run(scope: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with record_function(scope):
            return forward(*args, **kwargs)

    for module in model.modules():
        if kind := kind_in(MODULE_KINDS, type(module).__name__):
            module.forward = functools.partial(run, SCOPE + kind, module.forward)


def usage_by_kind(events: Iterable[Any]) -> Usage:
    """Sum the events of a profile by kind: the GPU's kernels, or else operations of a CPU."""
    events = list(events)
    on_cpu = [event for event in events if _runs_on_cpu(event)]
    kernels = [event for event in events if not _runs_on_cpu(event) and not event.is_user_annotation]
    forward_scopes: dict[tuple[int, int], str] = {}  # by the node of the backward
    for event in on_cpu:
        scope = _scope(event, {})
        if scope is not None and event.sequence_nr >= 0:
            forward_scopes[event.thread, event.sequence_nr] = scope
    found: list[tuple[str, float, str | None]] = []  # name, microseconds and scope
    if kernels:
        scopes: dict[tuple[str, float], list[str | None]] = defaultdict(list)
        for event in on_cpu:
            # A call of CUDA may have the number of an operation, whose kernels it then shows.
            for kernel in [] if re.match(r"cu(da)?[A-Z]|hip[A-Z]", event.name) else event.kernels:
                scopes[kernel.name, kernel.duration].append(_scope(event, forward_scopes))
        for event in kernels:
            microseconds = event.time_range.elapsed_us()
            launched = scopes[event.name, microseconds]
            found.append((event.name, microseconds, launched.pop(0) if launched else None))
    else:
        for event in on_cpu:
            if not event.is_user_annotation and not event.name.startswith("autograd::"):
                found.append((event.name, event.self_cpu_time_total, _scope(event, forward_scopes)))
    usage: Usage = defaultdict(list)
    for name, duration, scope in found:
        usage[kind_of(name, scope)].append(duration)
    return usage


def _runs_on_cpu(event: Any) -> bool:
    return event.device_type.name == "CPU"


def _scope(event: Any, forward_scopes: dict[tuple[int, int], str]) -> str | None:
    """Return the kind of the innermost annotation around an event or its forward."""
    while event is not None:
        if event.name.startswith(SCOPE):
            return event.name.removeprefix(SCOPE)
        if kind := kind_in(CALL_KINDS, event.name):
            return kind
        if event.name.startswith("autograd::engine::evaluate_function"):
            return forward_scopes.get((event.fwd_thread, event.sequence_nr))
        event = event.cpu_parent
    return None


def measure(study: Study, length: int, device: str) -> tuple[float, Usage]:
    """Return the milliseconds of a step without the profiler, and its usage; print the longest kernels."""
    (one,), rows = study.series, study.task.draw(length, 3)
    if "compiled" not in one.setting:
        annotate(study.task.model)

    def step(row: Any) -> float:
        made = study.run(one, functools.partial(study.step, one, row))
        if made is None:
            raise torch.OutOfMemoryError(one.ended)
        return 1000 * made[1]

    for row in rows[:2]:  # warms up
        milliseconds = step(row)
    unprofiled = statistics.median(step(rows[2]) for _ in range(3 if milliseconds < LONG_STEP else 1))
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        step(rows[2])
    print(profiler.key_averages().table(f"self_{device}_time_total", row_limit=40, max_name_column_width=150))
    return unprofiled, usage_by_kind(profiler.events() or [])


def rows_of(usage: Usage, step_milliseconds: float) -> Rows:
    spent = [(sum(microseconds) / 1000, len(microseconds), kind) for kind, microseconds in usage.items()]
    busy = sum(milliseconds for milliseconds, *_ in spent)
    spent = [*sorted(spent, reverse=True), (max(0.0, step_milliseconds - busy), 0, "idle")]
    whole = max(busy, step_milliseconds)
    return [
        {"kind": kind, "milliseconds": round(x, 3), "share": round(x / whole, 4), "launches": launches}
        for x, launches, kind in spent
    ]


@program(
    __doc__,
    shape=Flag("llama-3.2-1b", SHAPES),
    lengths=[8192, 32768, 131072],
    settings=Flag(["eager", "kept", "compiled", "compiled+kept"], kind=setting),
    lora=Flag(False, help="train adapters of all linear layers"),
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    a.implementations = ["flashmask"]
    for one, length in product(a.settings, a.lengths):
        case = {"shape": a.shape, "trained": "adapters" if a.lora else "all", "length": length, "setting": one}
        study = Study("lora" if a.lora else "sft", a.shape, argparse.Namespace(**{**vars(a), "settings": [one]}))
        try:
            milliseconds, usage = measure(study, length, a.device)
            found = [{**case, "step_milliseconds": round(milliseconds, 2), **x} for x in rows_of(usage, milliseconds)]
        except torch.OutOfMemoryError:
            kind = {"step_milliseconds": "", "kind": study.series[0].ended}
            found = [{**case, **kind, "milliseconds": "", "share": "", "launches": ""}]
        del study
        free_memory()
        yield found
        torch.compiler.reset()


if __name__ == "__main__":
    main()
