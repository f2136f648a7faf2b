"""Measure fine-tuning on packed rows with flashmask, SDPA and flex_attention: tokens per second and peak memory.

    python recipes/benchmarks/training.py --length 32768 --csv training.csv
    python recipes/benchmarks/training.py --length 32768 --compile --implementations flashmask flex_attention
    python recipes/benchmarks/training.py --length 2048 131072 --seconds 40 --fused --implementations flashmask{,_kept}

The model has the shape of a Llama with random weights, in bfloat16, with gradient checkpointing and AdamW. A step
is one row of 1 to 10 documents, as in the paper (appendix A.2.1). SDPA and flex_attention take transformers' own path
for packed rows, which builds a mask from position_ids in every step (a dense one for SDPA); flashmask takes the
collator's vectors, and `flashmask_kept` also keeps attention's results instead of recomputing them (`keep_attention`).
With the suffix `_liger`, norms, MLPs and rotary positions run Liger's kernels, as in trainers with `use_liger_kernel`
(needs liger-kernel). With `--lora`, adapters of all linear layers are trained. With `--compile`, each layer is
compiled, as the recipes do with `--torch_compile`, for every implementation in the same way. With both, and with
`--fused`, TRL's head computes the loss without logits of the whole row, as in its trainers. The implementations train
the same model on the same rows in turns. Their losses must agree before training. The columns `first_step_seconds` and
`compilations` are those of each implementation; the first one's first step also loads the kernels that all share.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import shapes
import torch
from harness import random_lengths, write_csv
from shapes import SHAPES
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from flashmask_hf import keep_attention
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.long_rows.checkpointing import enable_checkpointing


def build_model(
    shape: str, device: str = "cuda", *, lora: bool = False, fused: bool = False, compiled: bool = False
) -> PreTrainedModel:
    """Build a model with random weights, to be trained.

    Args:
        shape: one of `SHAPES`.
        device: "cuda", or "cpu", on which it is in float32.
        lora: whether only adapters of all linear layers are trained.
        fused: whether the model has TRL's head.
        compiled: whether each layer is compiled, for rows of any length.
    """
    model = shapes.build_model(shape, device)
    if fused:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), model)
    if compiled:
        # A layer is compiled once for each implementation, and once more where only adapters are trained: the first
        # layer's input then needs no gradient. Above the limit it would run uncompiled, with a warning.
        torch._dynamo.config.recompile_limit = 64
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from common import compile_layers  # imports TRL, which the other settings do without

        compile_layers(model)
    return model.train()


def make_rows(length: int, count: int, vocab: int, device: str = "cuda") -> list[dict[str, torch.Tensor]]:
    """Draw packed rows of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    collate = DataCollatorForPackedLanguageModeling(completion_only_loss=False)
    rows = []
    for _ in range(count):
        documents = int(torch.randint(1, 11, (1,), generator=generator))
        lengths = random_lengths(length, documents, generator)
        tokens = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
        batch = collate([{"input_ids": ids} for ids in tokens])
        rows.append({key: value.to(device) for key, value in batch.items()})
    return rows


class LigerSwitch:
    """Puts Liger's kernels into a model's layers, and takes them out again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._code: Any = sys.modules[type(model).__module__]
        plain = self._code.apply_rotary_pos_emb
        forwards = {module: vars(module).get("forward") for module in model.modules()}
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False})
        self._rotary = plain, self._code.apply_rotary_pos_emb
        self._forwards = [(module, forward, vars(module).get("forward")) for module, forward in forwards.items()]
        self.set(False)

    def set(self, on: bool) -> None:
        """Put the kernels in or take them out."""
        self._code.apply_rotary_pos_emb = self._rotary[on]
        for module, *forwards in self._forwards:
            vars(module).pop("forward", None)
            if forwards[on] is not None:
                vars(module)["forward"] = forwards[on]


def step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    name: str,
    row: dict[str, torch.Tensor],
    fused: bool = False,
    liger: LigerSwitch | None = None,
) -> float:
    """Run one training step, and return the loss, which TRL's head computes if `fused`."""
    if liger is not None:
        liger.set(name.endswith("_liger"))
    name = name.removesuffix("_liger")
    model.set_attn_implementation(name.removesuffix("_kept"))
    options: dict[str, Any] = {"use_reentrant": False}
    if name.endswith("_kept"):
        options["context_fn"] = keep_attention
    enable_checkpointing(model, options)
    batch = row if name.startswith("flashmask") else {k: v for k, v in row.items() if k != "startend_row_indices"}
    loss = model(**batch, **({"fused_lm_head": True} if fused else {"use_cache": False})).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    length: int,
    optimizer: torch.optim.Optimizer,
    liger: LigerSwitch | None,
) -> list[dict[str, Any]]:
    """Train in turns on rows of `length` tokens; return the figures of each implementation."""
    rows = make_rows(length, arguments.rows, model.config.vocab_size)
    frozen = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.0)
    fused = uses_fused_head(arguments)
    first: dict[str, float] = {}
    memory: dict[str, int] = {}
    compilations = dict.fromkeys(arguments.implementations, 0)

    def run(name: str, optimizer: torch.optim.Optimizer, row: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Run a step; return its loss and seconds, and count compilations."""
        before = counters["stats"]["unique_graphs"]
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(model, optimizer, name, row, fused, liger)
        torch.cuda.synchronize()
        passed = time.perf_counter() - start
        compilations[name] += counters["stats"]["unique_graphs"] - before
        first.setdefault(name, passed)
        return loss, passed

    for row in rows[:2]:  # with fixed weights
        losses = {name: run(name, frozen, row)[0] for name in arguments.implementations}
        print("losses before training:", {name: round(loss, 5) for name, loss in losses.items()})
        if max(losses.values()) - min(losses.values()) > 5e-3:
            raise SystemExit("the implementations disagree")
    run(arguments.implementations[0], optimizer, rows[0])  # allocates the optimizer's state
    for name in arguments.implementations:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(name, optimizer, rows[0])
        memory[name] = torch.cuda.max_memory_allocated()

    seconds: dict[str, list[float]] = {name: [] for name in arguments.implementations}
    end = time.perf_counter() + arguments.seconds
    for turn in itertools.count():
        if turn and time.perf_counter() > end:
            break
        for row in rows:
            # Every other turn begins with the last: a step's memory lies otherwise after another implementation's.
            for name in arguments.implementations[:: -1 if turn % 2 else 1]:
                seconds[name].append(run(name, optimizer, row)[1])
    base = statistics.median(seconds["sdpa"]) if "sdpa" in seconds else None
    return [
        {
            "implementation": name,
            "shape": arguments.shape,
            "length": length,
            "trained": "adapters" if arguments.lora else "all",
            "compiled": arguments.compile,
            "first_step_seconds": round(first[name], 2),
            "compilations": compilations[name],
            "seconds_per_step": round(statistics.median(values), 4),
            "tokens_per_second": round(length / statistics.median(values)),
            "peak_gib": round(memory[name] / 2**30, 2),
            "against_sdpa": round(base / statistics.median(values), 3) if base else "",
        }
        for name, values in seconds.items()
    ]


def uses_fused_head(arguments: argparse.Namespace) -> bool:
    """Return whether the model has TRL's head."""
    return arguments.lora or arguments.compile or arguments.fused


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--length", type=int, nargs="+", default=[32768], help="tokens of a row")
    parser.add_argument("--rows", type=int, default=5, help="number of rows")
    parser.add_argument("--seconds", type=float, default=0, help="repeat turns of all rows for so long per length")
    parser.add_argument("--implementations", nargs="+", default=["flashmask", "sdpa", "flex_attention"])
    parser.add_argument("--lora", action="store_true", help="train adapters, with TRL's head; needs peft and trl")
    parser.add_argument("--compile", action="store_true", help="compile each layer, and use TRL's head; needs trl")
    parser.add_argument("--fused", action="store_true", help="use TRL's head; needs trl")
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    fused = uses_fused_head(arguments)
    model = build_model(arguments.shape, lora=arguments.lora, fused=fused, compiled=arguments.compile)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-6, fused=True)
    liger = LigerSwitch(model) if any(name.endswith("_liger") for name in arguments.implementations) else None
    write_csv(
        arguments.csv,
        [figures for length in arguments.length for figures in measure(arguments, model, length, optimizer, liger)],
    )


if __name__ == "__main__":
    main()
