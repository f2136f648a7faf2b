"""Measure training against the length of the packed row: tokens per second and peak memory, up to what fits.

    python recipes/benchmarks/row_lengths.py --csv results/row_lengths_h200.csv --seconds 1500
    python recipes/benchmarks/row_lengths.py --shapes tiny --device cpu --lengths 512 1024

It is figures 2 and 7 of the FlashMask paper on one GPU: supervised fine-tuning of all weights (`sft`) and of adapters
(`lora`), DPO and a reward model, on synthetic rows of the paper's appendix A.2.1. The rows and steps are those of
`training.py` and `alignment.py`: random weights in bfloat16 (float32 on a CPU), gradient checkpointing, AdamW, one row
per step. Fine-tuning uses TRL's head, which makes no logits of the whole row. The shape of 8B trains adapters in all
tasks: in full, its weights, gradients and AdamW's state alone are 60 GiB.

- `flashmask`: this package.
- `sdpa` and `flex_attention`: the same model, trainer and packed row, with SDPA and a dense mask, or FlexAttention and
  a block mask; every step makes the mask once (`packed_attention.py`).
- `flash_attention_2`, `_3` and `_4`: FlashAttention's varlen path of transformers, where its package is
  installed. Such rows cannot share a question, so DPO and the reward model run as in stock TRL, which repeats the
  question for each answer, one question at a time.

The implementations of a task train one model on the same rows in turns, after their losses have agreed. One that runs
out of memory gets a row that says so, and no longer length.

The program ends within about `--seconds`. It visits the shapes and tasks in turns, three lengths at a time, the short
ones first, so that a run of any time has points of all of them. A visit has an equal part of the time that is left.
When it is over early, as where much is compiled, the next visit goes on with the same length. Every implementation
takes one step to warm up, at its first length, and FlexAttention, which is compiled for every length, at all of them.
Then come up to `--steps` measured steps, of which those after the second only within a tenth of that part. An
implementation whose step may take more than half of it ends, with a row that says so; at twice the length, a step takes
up to four times as long. `steps` counts the measured steps; 0 means that the time was up, and that the figures are
those of the step that warms up, with what was compiled in it. A run that is interrupted or terminated first writes the
figures that it has.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import logging
import random
import signal
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo.config
import training
from alignment import Bench, make_row
from harness import append_rows, attempt, missing
from packed_attention import attention
from shapes import SHAPES, build_model
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from trl.trainer.utils import add_fused_lm_head

from flashmask_hf.names import VECTORS

VARLEN = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# The one that compiles longest is last: at each length, it takes no time of the others' first steps.
IMPLEMENTATIONS = ("flashmask", "sdpa", *VARLEN, "flex_attention")
COMPILED = ("flex_attention",)
"""Implementations that compile for each length."""
TASKS = ("sft", "lora", "dpo", "reward")
ADAPTERS_ONLY = ("llama-3.1-8b",)
LENGTHS_A_VISIT = 3
LENGTHS = [2**power for power in range(12, 23)]
POSITIONS = LENGTHS[-1]
"""`max_position_embeddings` of the models, so that rows of any length are taken; rotary embeddings have no table."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLERANCE = {"cuda": 5e-3, "cpu": 1e-5}
"""Largest difference of two losses of fine-tuning, in bfloat16 (as in `training.py`) and in float32."""


def varlen_arguments(position_ids: torch.Tensor) -> dict[str, Any]:
    """Return the documents of a row [1, S] as transformers' FlashAttention takes them.

    Without them it finds them in every layer, and gives the longest length as a tensor, which FlashAttention-4 rejects.
    """
    (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    longest = int(longest)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


class FineTuning:
    """Supervised fine-tuning of all weights or of adapters, with the rows and the step of `training.py`."""

    def __init__(self, shape: str, device: str, adapters: bool):
        self.device = device
        self.model = build_model(shape, device, adapters=adapters, max_position_embeddings=POSITIONS)
        add_fused_lm_head(self.model.get_base_model() if adapters else self.model)
        self.model.train()
        trained = [x for x in self.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        self.frozen = torch.optim.SGD(trained, lr=0.0)

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows of `length` tokens."""
        return training.make_rows(length, count, self.model.config.vocab_size, self.device)

    def check(self, implementations: list[str], length: int) -> None:
        """Exit unless the implementations have the same loss on a row of `length` tokens."""
        (row,) = self.draw(length, 1)
        losses = {name: self._step(name, row, self.frozen) for name in implementations}
        print("losses before training:", losses, flush=True)
        if not max(losses.values()) - min(losses.values()) <= TOLERANCE[self.device]:
            raise SystemExit(f"the implementations disagree: {losses}")

    def step(self, implementation: str, row: Any) -> None:
        """Run one training step."""
        self._step(implementation, row, self.optimizer)

    def _step(self, implementation: str, row: Any, optimizer: torch.optim.Optimizer) -> float:
        varlen = implementation in VARLEN
        row = row | {VECTORS: row[VECTORS].clone()}  # so that each step makes its mask anew, and frees it
        if varlen:
            row = row | varlen_arguments(row["position_ids"])
        with contextlib.nullcontext() if varlen else attention(implementation):
            return training.step(self.model, optimizer, implementation if varlen else "flashmask", row, fused=True)


class Alignment:
    """DPO or a reward model, with the rows and trainers of `alignment.py`."""

    def __init__(self, task: str, shape: str, device: str, adapters: bool):
        self.bench = Bench(task, shape, device, adapters, max_position_embeddings=POSITIONS)
        self.optimizer = self.bench.optimizer

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows of `length` tokens."""
        generator = torch.Generator().manual_seed(length)
        return [make_row(self.bench.task, length, self.bench.vocab, generator) for _ in range(count)]

    def check(self, implementations: list[str], length: int) -> None:
        """Exit unless the implementations have the same log-probabilities or rewards on a row of 2,048 tokens."""
        self.bench.check([self._provider(name) for name in implementations])

    def step(self, implementation: str, row: Any) -> None:
        """Run one training step."""
        self.bench.step(self._provider(implementation), row)

    @staticmethod
    def _provider(implementation: str) -> str:
        """Return the name that `alignment.py` knows an implementation by."""
        if implementation == "flashmask":
            return implementation
        return f"{implementation}_{'single' if implementation in VARLEN else 'packed'}"


Study = FineTuning | Alignment


def build(task: str, shape: str, device: str, adapters: bool) -> Study:
    """Build the model in training of a task."""
    if task in ("sft", "lora"):
        return FineTuning(shape, device, adapters)
    return Alignment(task, shape, device, adapters)


class Series:
    """The figures of one implementation over the lengths, until it ends."""

    def __init__(self, name: str):
        self.name = name
        self.ended = ""
        self.length = 0
        """The last length that it ran."""
        self.last_step = 0.0
        """Seconds of a step at that length."""
        self.first: tuple[float, float] | None = None
        """Seconds and peak GiB of the step that warmed up for the present length."""
        self.steps: list[tuple[float, float]] = []
        """Seconds and peak GiB of each measured step."""

    @property
    def warms_up(self) -> bool:
        """Whether it takes a step that is not measured at its next length."""
        return not self.length or self.name in COMPILED

    def expected(self, length: int) -> float:
        """Return the most seconds of a step at a longer length: attention's grow with its square."""
        return self.last_step * (length / self.length) ** 2 if self.length else 0.0

    def run(self, study: Study, row: Any, *, warmup: bool = False) -> None:
        """Run a step and keep its figures, or why there are none."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        made = attempt(lambda: study.step(self.name, row))
        if isinstance(made, str):
            self.ended = made
            study.optimizer.zero_grad(set_to_none=True)
        elif warmup:
            self.first = made[1:]
        else:
            self.steps.append(made[1:])

    def figures(self, length: int) -> dict[str, object]:
        """Return the columns of a length."""
        measured = self.steps or ([self.first] if self.first else [])
        if not self.ended and not measured:
            self.ended = "out of time"
        if self.ended:
            return {"tokens_per_second": self.ended, "seconds_per_step": "", "peak_gib": "", "steps": len(self.steps)}
        self.length = length
        seconds = self.last_step = statistics.median(seconds for seconds, _ in measured)
        peak = max(peak for _, peak in measured)
        return {
            "tokens_per_second": round(length / seconds),
            "seconds_per_step": round(seconds, 4),
            "peak_gib": round(peak, 2) if peak else "",
            "steps": len(self.steps),
        }


@dataclasses.dataclass
class Curves:
    """What a task of a shape has still to run: implementations that have not ended, and their next lengths."""

    shape: str
    task: str
    adapters: bool
    series: list[Series]
    lengths: Sequence[int]
    checked: bool = False

    def visit(self, arguments: argparse.Namespace, rows: list[dict[str, object]], share: float, end: float) -> None:
        """Run the next lengths within about `share` seconds, and append the figures of each to `rows` and the file."""
        if share <= 0:  # no model is built for rows that say "out of time"
            self._append(arguments, rows)
            return
        until = time.monotonic() + share
        study = build(self.task, self.shape, arguments.device, self.adapters)
        if not self.checked:
            study.check([one.name for one in self.series], self.lengths[0])
            self.checked = True
        for number in range(LENGTHS_A_VISIT):
            if not self.series or not self.lengths:
                return
            length = self.lengths[0]
            expected = [one.expected(length) for one in self.series]
            longest = max((x for x in expected if x <= share / 2), default=0.0)
            if number > 0 and until < time.monotonic() + longest < end:
                return
            try:
                measure(study, length, self.series, arguments.steps, share, until, end)
            except KeyboardInterrupt:
                self._append(arguments, rows)
                raise
            self._append(arguments, rows)

    def _append(self, arguments: argparse.Namespace, rows: list[dict[str, object]]) -> None:
        """Append the figures of a length, and go on to the next."""
        setting = {"shape": self.shape, "task": self.task, "trained": "adapters" if self.adapters else "all"}
        found = figures_of(self.series, self.lengths[0])
        append_rows(arguments.csv, rows, [setting | figures for figures in found])
        self.series = [one for one in self.series if not one.ended]
        self.lengths = self.lengths[1:]
        for one in self.series:
            one.first, one.steps = None, []


def measure(
    study: Study, length: int, series: Sequence[Series], steps: int, share: float, until: float, end: float
) -> None:
    """Run the implementations at one length.

    Args:
        study: the model in training.
        length: tokens of a row.
        series: implementations that have not ended; those that end at this length say so afterwards.
        steps: most measured steps of each.
        share: seconds of the visit; no third or later step starts after a tenth, none that may take half of it.
        until: `time.monotonic()` at the end of the visit, by which a second or later step must end.
        end: the same of the run, by which every step must end.
    """
    rows = study.draw(length, steps)
    start = time.monotonic()
    for one in series:
        if one.expected(length) > min(share / 2, end - time.monotonic()):
            one.ended = "out of time"
        elif one.warms_up:
            one.run(study, rows[0], warmup=True)
    order = random.Random(length)
    for number, row in enumerate(rows):
        running = [one for one in series if not one.ended]
        for one in order.sample(running, len(running)):
            now = time.monotonic()
            seconds = one.first[0] if one.first else one.expected(length)
            if now + seconds <= (until if number else end) and (number < 2 or now - start <= share / 10):
                one.run(study, row)


def figures_of(series: Sequence[Series], length: int) -> list[dict[str, object]]:
    """Return a row of figures for each implementation at a length."""
    figures = [{"length": length, "implementation": one.name, **one.figures(length)} for one in series]
    base = next((one for one in series if one.name == "sdpa" and not one.ended), None)
    for one, found in zip(series, figures, strict=True):
        ratio = base.last_step / one.last_step if base and not one.ended else None
        found["against_sdpa"] = round(ratio, 3) if ratio else ""
    return figures


def available(names: Sequence[str], device: str) -> list[str]:
    """Return the implementations that can run here, and print why the others cannot."""
    running = []
    for name in names:
        reason = missing(name, device)
        if reason:
            print(f"{name} is left out: {reason}", flush=True)
        else:
            running.append(name)
    return running


def studies(shapes: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Return shape, task and whether adapters are trained, and print what is left out."""
    found = []
    for shape, task in itertools.product(shapes, tasks):
        if task == "sft" and shape in ADAPTERS_ONLY:
            print(f"sft of {shape} is left out: it trains adapters here (lora)", flush=True)
        else:
            found.append((shape, task, task == "lora" or shape in ADAPTERS_ONLY))
    return found


def interrupt(number: int, frame: object) -> None:
    """Handle a signal that ends the run. `timeout` sends two, of which the second must not end the writing."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-3.2-1b", "llama-3.1-8b"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the rows, the shortest first"
    )
    parser.add_argument("--steps", type=int, default=5, help="most measured steps of an implementation and length")
    parser.add_argument("--seconds", type=float, default=1500, help="time of the whole run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--csv", help="file to write the figures to, with those of each length as soon as they are there"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("a GPU is needed; --shapes tiny --device cpu tries the program without one")
    for number in SIGNALS:
        signal.signal(number, interrupt)
    end = time.monotonic() + arguments.seconds
    torch._dynamo.config.recompile_limit = 256  # flex_attention is compiled for every shape
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    names = available(arguments.implementations, arguments.device)
    rows: list[dict[str, object]] = []
    todo = [
        Curves(*study, [Series(name) for name in names], sorted(arguments.lengths))
        for study in studies(arguments.shapes, arguments.tasks)
    ]
    while todo:
        for number, curves in enumerate(todo):
            curves.visit(arguments, rows, (end - time.monotonic()) / (len(todo) - number), end)
            gc.collect()  # the model
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
        todo = [curves for curves in todo if curves.series and curves.lengths]


if __name__ == "__main__":
    main()
