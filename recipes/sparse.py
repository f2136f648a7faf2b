"""Train a language model with full, hash-sparse and QK-sparse attention, and compare loss and seconds per step.

Reproduces figures 6 and 8 of Pagliardini et al. (2023) on bytes of installed source code (Python, torch, transformers):

    python recipes/sparse.py --length 8192 --batch 4 --steps 1000 --out sparse
    accelerate launch --quiet recipes/sparse.py --length 16384 --batch 2 --steps 1000 --out sparse
    python recipes/sparse.py --length 16384 --batch 2 --steps 30 --time-only --compile
    python recipes/sparse.py --smoke

All variants are one Llama, trained in turns from the same weights on the same rows: `sdpa` (FlashAttention-2) and
`flashmask` see all keys, `hash_16` has 16 hash buckets, and `qk_30` and `qk_50` drop 30% or 50% of queries and keys per
head in training. Keys are normalized queries (section 4.1), or a projection of their own (`--separate-keys`).

Files in `--out`: `sparse_LENGTH_steps.csv` (loss in nats per byte, seconds per step) and `sparse_LENGTH.csv` (median
seconds without the first steps, their ratio to SDPA's, loss on held-out text).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.utils.import_utils import is_torch_bf16_gpu_available

import flashmask_hf  # noqa: F401  registers the attention implementations

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from harness import Results, amount, count, synchronize  # pyright: ignore[reportMissingImports]

BASE = "sdpa"
HASH = "flashmask_hash"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {"attn_implementation": "causal_sdpa"},
    "flashmask": {"attn_implementation": "flashmask"},
    "hash_16": {"attn_implementation": HASH, HASH: {"n_buckets": 16}},
    "qk_30": {"attn_implementation": "flashmask_qk", "flashmask_qk": {"drop": 0.3}},
    "qk_50": {"attn_implementation": "flashmask_qk", "flashmask_qk": {"drop": 0.5}},
}
SHAPES = {
    "paper": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
SMOKE = {"shape": "tiny", "length": 256, "batch": 2, "steps": 8, "held_out": 4}

TURN = 5  # steps; the seconds of the first turn are left out
SMOOTHED = 20  # last steps that the summary's loss averages


Step = tuple[float, float]
"""Loss and seconds of one training step."""


class NormalizedQueries(LlamaAttention):
    """Attention whose keys are its normalized queries, with the weights of `stock`."""

    def __init__(self, stock: LlamaAttention):
        super().__init__(stock.config, stock.layer_idx)
        self.load_state_dict(stock.state_dict())
        del self.k_proj

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output for hidden states [B, S, hidden], without a cache."""
        queries, values = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.v_proj)
        )
        keys = nn.functional.normalize(queries.float(), dim=-1).to(queries.dtype)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings, unsqueeze_dim=2)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), weights


class Run:
    """Model, optimizer and schedule of one variant."""

    def __init__(self, accelerator: Accelerator, variant: str, arguments: argparse.Namespace):
        self.accelerator = accelerator
        model = build_model(variant, arguments)
        options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": torch.cuda.is_available()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, **options)
        # Accelerate advances a schedule once per process in every step.
        total = arguments.steps * accelerator.num_processes
        schedule = get_cosine_schedule_with_warmup(optimizer, max(1, total // 50), total)
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)

    def turn(self, batches: Sequence[Tensor]) -> list[Step]:
        """Train on batches of rows [B, S], timed together."""
        self.model.train()
        losses = []
        synchronize()
        start = time.perf_counter()
        for rows in batches:
            torch.compiler.cudagraph_mark_step_begin()
            loss = self.model(input_ids=rows, labels=rows, use_cache=False).loss
            losses.append(loss.detach().clone())  # the next replay of a CUDA graph overwrites it
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        synchronize()
        seconds = (time.perf_counter() - start) / len(losses)
        means: Any = self.accelerator.reduce(torch.stack(losses), "mean")
        return [(mean, seconds) for mean in means.tolist()]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Return the mean loss on held-out rows."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False).eval()
        return statistics.mean(model(input_ids=rows, labels=rows, use_cache=False).loss.item() for rows in batches)


def causal_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Run causal SDPA without a mask, which compiled "sdpa" would have."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def build_model(variant: str, arguments: argparse.Namespace) -> Any:
    options = dict(VARIANTS[variant])
    if HASH in options and not arguments.separate_keys:
        options[HASH] = {**options[HASH], "shared_qk": True}
    sizes = {"vocab_size": 256, "max_position_embeddings": arguments.length, **SHAPES[arguments.shape]}
    config = LlamaConfig(**sizes, **options, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if not arguments.separate_keys:
        for layer in model.model.layers:
            layer.self_attn = NormalizedQueries(layer.self_attn)
    if arguments.bf16:  # else autocast leaves everything but the matrix products in float32
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.to(torch.bfloat16))
    return model


def read_text(size: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Read source files in a fixed order: uint8 [up to size] to train on, and uint8 [held_out] of other files."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent, Path(transformers.__file__).parent]
    files = [(number, path.relative_to(root)) for number, root in enumerate(roots) for path in root.rglob("*.py")]
    files = sorted(entry for entry in files if not {"site-packages", "dist-packages"} & set(entry[1].parts))
    random.Random(0).shuffle(files)
    parts = (bytearray(), bytearray())
    for number, path in files:
        part = parts[len(parts[0]) >= held_out]
        if len(parts[1]) >= size:
            break
        part += (roots[number] / path).read_bytes() + b"\0"
    if len(parts[0]) < held_out:
        raise ValueError(f"held_out: {held_out} bytes are more than there is text; ask for fewer rows")
    kept, trained = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return trained[:size], kept[:held_out]


def train(runs: dict[str, Run], rows: Tensor, steps: int, accelerator: Accelerator) -> dict[str, list[Step]]:
    """Train all variants in turns on batches of rows, uint8 [N, B, S]."""
    history: dict[str, list[Step]] = {name: [] for name in runs}
    for first in range(0, steps, TURN):
        turn = range(first, min(first + TURN, steps))
        numbers = [(step * accelerator.num_processes + accelerator.process_index) % len(rows) for step in turn]
        batches = [rows[number].to(accelerator.device, torch.int64) for number in numbers]
        for name, run in runs.items():
            history[name] += run.turn(batches)
        if first % 50 == 0 or turn[-1] == steps - 1:
            losses = "  ".join(f"{name} {taken[-1][0]:.4f}" for name, taken in history.items())
            accelerator.print(f"step {turn[-1] + 1}: {losses}", flush=True)
    return history


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--shape", choices=SHAPES, default="paper")
    parser.add_argument("--length", type=count, default=8192, help="number of bytes of a row")
    parser.add_argument("--batch", type=count, default=4, help="number of rows of a step in one process")
    parser.add_argument("--steps", type=count, default=1000, help=f"number of steps; more than {TURN} to time them")
    parser.add_argument("--lr", type=amount, default=1e-3, help="peak learning rate of the cosine schedule")
    parser.add_argument(
        "--held-out", type=count, default=32, help="number of rows to evaluate on, a multiple of --batch"
    )
    parser.add_argument("--separate-keys", action="store_true", help="give keys a projection of their own")
    parser.add_argument("--compile", action="store_true", help="compile the models, with CUDA graphs on a GPU")
    parser.add_argument("--time-only", action="store_true", help="skip evaluation and the file of steps")
    parser.add_argument("--smoke", action="store_true", help="train a tiny model on the CPU, with fixed sizes")
    parser.add_argument("--out", type=Path, help="folder to write the figures to")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    arguments.bf16 = is_torch_bf16_gpu_available() and not arguments.smoke
    if arguments.held_out % arguments.batch:
        parser.error(f"--held-out {arguments.held_out} is no multiple of --batch {arguments.batch}")
    return arguments


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    precision = "bf16" if arguments.bf16 else "no"
    mode = "reduce-overhead" if torch.cuda.is_available() and not arguments.smoke else "default"
    compiler = TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, mode=mode) if arguments.compile else None
    accelerator = Accelerator(cpu=arguments.smoke, mixed_precision=precision, dynamo_plugin=compiler)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > accelerator.num_processes:  # without GPUs, accelerate makes no group: each would train alone
        raise SystemExit(f"{launched} processes were launched for GPUs, and there is none; add --smoke, or launch one")
    AttentionInterface.register("causal_sdpa", causal_sdpa)
    torch.backends.cuda.enable_cudnn_sdp(False)  # leaves FlashAttention-2, or an error
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(arguments.smoke or not torch.cuda.is_available())
    torch.set_float32_matmul_precision("high")
    shape = (-1, arguments.batch, arguments.length)
    size = arguments.batch * arguments.length
    wanted = arguments.steps * accelerator.num_processes * size
    trained, held_out = read_text(wanted, arguments.held_out * arguments.length)
    if len(trained) < size:
        raise SystemExit(f"--batch {arguments.batch} rows of {arguments.length} bytes are more than there is text")
    rows = trained[: len(trained) // size * size].view(shape)
    accelerator.print(f"{rows.numel()} bytes of text, of which a step takes {size * accelerator.num_processes}")
    runs = {name: Run(accelerator, name, arguments) for name in arguments.variants}
    torch.manual_seed(accelerator.process_index)  # each process drops other queries and keys
    history = train(runs, rows, arguments.steps, accelerator)

    batches = [rows.to(accelerator.device, torch.int64) for rows in held_out.view(shape)]
    counted = {name: steps[min(TURN, arguments.steps - 1) :] for name, steps in history.items()}
    medians = {name: statistics.median(seconds for _, seconds in steps) for name, steps in counted.items()}
    summary = []
    for name, seconds in medians.items():
        row = {"variant": name, "length": arguments.length, "batch": arguments.batch}
        row |= {"processes": accelerator.num_processes, "compiled": arguments.compile, "steps": arguments.steps}
        row |= {"ms_per_step": round(1000 * seconds, 2)}
        row["against_sdpa"] = round(medians[BASE] / seconds, 3) if BASE in medians else ""
        row["loss"] = round(statistics.mean(loss for loss, _ in history[name][-SMOOTHED:]), 4)
        row["held_out_loss"] = "" if arguments.time_only else round(runs[name].evaluate(batches), 4)
        summary.append(row)
    if not accelerator.is_main_process:
        return
    file = None if arguments.out is None else arguments.out / f"sparse_{arguments.length}.csv"
    Results(file).add(summary)
    if file is not None and not arguments.time_only:
        losses = [{"variant": name, "step": nth, "loss": loss, "seconds": seconds}
                  for name, steps in history.items() for nth, (loss, seconds) in enumerate(steps, 1)]  # fmt: skip
        Results(file.with_name(f"{file.stem}_steps.csv")).add(losses, silent=True)


if __name__ == "__main__":
    main(sys.argv[1:])
