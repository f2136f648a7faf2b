"""Measure rows that are split over GPUs: tokens per second, peak memory, and the share of time of the exchange.

    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --csv parallel.csv
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --shape llama-3.1-8b --tokens 131072 262144
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --device cpu --shape tiny --tokens 512
    accelerate launch --config_file recipes/configs/accelerate_fsdp2_cp.yaml recipes/benchmarks/parallel.py --task dpo

`sft`: a model with random weights in bfloat16, sharded by FSDP2, with gradient checkpointing and TRL's head, runs
forward and backward of a row. `dpo`: `SharedQuestionDPOTrainer` with adapters of rank 16 runs them, and the reference,
on rows of one question of `--tokens` tokens and two answers of 1,024. Losses and gradients of a short row must agree
first. Providers run in turns that end by `--deadline`.

* `heads`, `keys`: packed documents, with the exchange of that name.
* `whole`: every GPU computes a whole row of its own.
* `sdpa_cp`: torch's context parallelism on "sdpa", causal attention of one document (`--documents 1`).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from harness import GIB, Flag, Rows, forget_peak, in_time, largest, program, random_lengths, synchronize, whole
from peft import LoraConfig
from shapes import SHAPES, arguments_of, build_model, packed_row, tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashmask_hf import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.parallel import contiguous_rows, deal_rows
from flashmask_hf.parallel.exchange import exchange_of, gather_keys, heads_to_rows, rows_to_heads, spread_kv_heads
from flashmask_hf.parallel.split import RowSplit, make_split, run_split
from flashmask_hf.trainers import SharedQuestionDPOConfig, SharedQuestionDPOTrainer

PROVIDERS = ("heads", "keys", "whole", "sdpa_cp")
CHECKED, QUESTIONS = 2048, 7  # tokens and documents of the row on which the providers are compared
ANSWER = 1024  # tokens of an answer of DPO, but for the compared row


class Bench:
    """A sharded model, and the steps of every provider on a row."""

    turn = 1, 0.0  # tokens of the last row, and seconds of its last turn
    forwards = 1  # of a step without gradients: the recomputed ones

    def __init__(self, shape: str, device: torch.device):
        self.device, self.size = device, dist.get_world_size()
        self.group: Any = dist.group.WORLD
        self.model = build_model(shape, device.type, fused=True, use_cache=False)
        self.config = self.model.config
        self.mesh = init_device_mesh(device.type, (self.size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)

    def row(self, tokens: int, documents: int) -> dict[str, Tensor]:
        """Draw a packed row, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        lengths = random_lengths(tokens, documents, generator)
        return packed_row(lengths, self.config.vocab_size, str(self.device), generator)

    def split(self, provider: str, vectors: Tensor, position_ids: Tensor) -> RowSplit:
        """Split a row over the processes."""
        mask = FlashMask(vectors, causal=True)
        if provider == "heads":
            rows = contiguous_rows(mask.kv_len, self.size, mask.device)
            return make_split(self.group, rows, position_ids, "heads")
        return make_split(self.group, deal_rows(mask, self.size), position_ids, "keys")

    def runs(self, provider: str) -> bool:
        """Return whether heads divide among the processes, and torch splits the row, where they must."""
        if provider == "sdpa_cp" and self.device.type == "cpu":
            print("sdpa_cp is left out: torch splits no rows on a CPU")
            return False
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        try:
            return provider != "heads" or bool(exchange_of(*heads, self.size, "heads"))
        except ValueError as error:
            print(f"{provider} is left out: {error}")
            return False

    def step(self, provider: str, row: dict[str, Tensor]) -> float:
        """Run forward and backward of a row, and return the loss."""
        labels = nn.functional.pad(row["labels"][:, 1:], (0, 1), value=-100)
        count, scope, factor = labels.ne(-100).sum(), contextlib.nullcontext(), self.size
        part: dict[str, Any] = {**row, "shift_labels": labels}
        if provider == "whole":
            del part["labels"]
            factor = 1
        elif provider == "sdpa_cp":
            from torch.distributed.tensor.experimental import context_parallel

            positions = torch.arange(labels.shape[1], device=labels.device)[None]
            part = {"input_ids": row["input_ids"].clone(), "shift_labels": labels, "position_ids": positions}
            part["attention_mask"] = torch.ones_like(labels)  # else transformers makes a dense mask, which is dropped
            buffers = list(part.values())
            dims = [1] * len(buffers)
            scope = context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers))
        else:
            split = self.split(provider, row[VECTORS], row["position_ids"])
            part, scope = split.shard(row), run_split(split)
        with scope:
            loss = self.model(**part, fused_lm_head=True, num_items_in_batch=count).loss
            (loss * factor).backward()  # FSDP averages gradients over the processes
        total = loss.detach().clone()
        if factor > 1:
            dist.all_reduce(total)
        return float(total)

    def check(self, providers: Sequence[str]) -> None:
        """Exit unless losses and norms of gradients of a short row agree with `whole`."""
        row, found = self.row(CHECKED, QUESTIONS), {}
        for provider in ("whole", *(name for name in providers if name not in ("whole", "sdpa_cp"))):
            loss = self.step(provider, row)
            norm: Any = nn.utils.get_total_norm([x.grad for x in self.model.parameters() if x.grad is not None])
            self.model.zero_grad(set_to_none=True)
            found[provider] = loss, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        allowed = [x * (1e-2 if self.device.type == "cuda" else 1e-5) for x in found["whole"]]
        allowed[0] += self.rounding()
        print("before timing:", found, "allowed:", allowed, flush=True)
        for figures in found.values():
            if any(abs(x - y) > bound for x, y, bound in zip(figures, found["whole"], allowed, strict=True)):
                raise SystemExit(f"the providers disagree: {found}")

    def rounding(self) -> float:
        """Return what the loss of the compared row may differ by besides its last digits."""
        return 0.0

    def exchange_seconds(self, provider: str, row: dict[str, Tensor]) -> float:
        """Return the seconds of all exchanges in a step, with `forwards`."""
        config, dtype = self.config, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        tokens = row[VECTORS].shape[2] // self.size

        def parts(heads: int) -> Tensor:  # as layers make them, [B, S / N, H, D] in memory
            made = torch.randn(1, tokens, heads, config.head_dim, device=self.device, dtype=dtype)
            return made.transpose(1, 2).requires_grad_()

        query, key, value = (parts(n) for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2))
        positions = torch.arange(tokens * self.size, device=self.device)[None]
        split = self.split(provider, row[VECTORS], positions)

        def forward() -> list[Tensor]:
            if provider == "keys":
                return [gather_keys(x, split) for x in (key, value)]
            spread = (query, spread_kv_heads(key, split), spread_kv_heads(value, split))
            whole = rows_to_heads(spread, split)
            return [*whole[1:], heads_to_rows(whole[0], split)]

        def both() -> None:
            results = forward()
            torch.autograd.backward(results, [x.detach() for x in results])

        def seconds_of(call: Callable[[], object]) -> float:
            return statistics.median([self.seconds_of(call) for _ in range(6)][1:])  # the first warms up

        return (seconds_of(both) + self.forwards * seconds_of(torch.no_grad()(forward))) * config.num_hidden_layers

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the slowest process' seconds of a call that all make."""
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return largest(time.perf_counter() - start, self.device)

    def timed(self, provider: str, row: dict[str, Tensor]) -> tuple[float, float, float]:
        """Return loss, seconds and peak GiB of a step."""
        losses: list[float] = []
        self.model.set_attn_implementation("sdpa" if provider == "sdpa_cp" else "flashmask")
        layers = self.model.model.layers if provider == "sdpa_cp" else []
        forget_peak()  # and keep the allocator's blocks
        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True))
            seconds = self.seconds_of(lambda: losses.append(self.step(provider, row)))
        peak = largest(torch.cuda.max_memory_allocated(), self.device)
        self.model.zero_grad(set_to_none=True)
        return losses[0], seconds, peak / GIB

    def measure(self, row: dict[str, Tensor], a: argparse.Namespace) -> Rows:
        """Time the steps of providers in turns, and return the columns of each. The first turn warms up."""
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in a.providers}
        tokens = row[VECTORS].shape[2]
        expected = self.turn[1] * (tokens / self.turn[0]) ** 2
        for _ in range(a.warmup + a.repeats):
            if not in_time(a, expected):
                break
            for provider, found in runs.items():
                try:
                    found.append(self.timed(provider, row))
                except torch.OutOfMemoryError:  # the others wait for this process: end all
                    raise SystemExit(f"{provider} ran out of memory; leave it out") from None
            expected = sum(found[-1][1] for found in runs.values())
            self.turn = tokens, expected
        rows = []
        for provider, found in runs.items():
            if not found[a.warmup :]:
                print(f"{provider} is left out: no step before the deadline", flush=True)
                continue
            losses, times, peaks = zip(*found[a.warmup :], strict=True)
            seconds = statistics.median(times)
            share = self.exchange_seconds(provider, row) / seconds if provider in ("heads", "keys") else ""
            rate = tokens * (self.size if provider == "whole" else 1) / seconds
            columns = {"provider": provider, "loss": round(losses[0], 5), "seconds_per_step": round(seconds, 4)}
            columns |= {"tokens_per_second": round(rate), "peak_gib": round(max(peaks), 2)}
            rows.append(columns | {"exchange_share": share and round(share, 4)})
        return rows


class PreferenceBench(Bench):
    """A DPO trainer of adapters, under accelerate's configuration of FSDP2 and `cp_size`."""

    forwards = 2  # and the reference's

    def __init__(self, shape: str, device: torch.device):
        self.device, self.size = device, dist.get_world_size()
        self.group: Any = dist.group.WORLD
        options = {"max_length": None, "max_steps": 1, "per_device_train_batch_size": 1}
        self.trainer: Any = SharedQuestionDPOTrainer(
            build_model(shape, device.type),
            args=arguments_of(SharedQuestionDPOConfig, "cuda", **options),
            train_dataset=Dataset.from_list([{"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [4]}] * self.size),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False),
        )
        self.model = self.trainer.model
        self.config = self.model.config
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.model.dtype)  # PEFT's adapters are in float32
        self.trainer.train()  # shards the model
        self.model = self.trainer.model_wrapped

    def row(self, tokens: int, documents: int) -> dict[str, Tensor]:
        """Draw a row of questions with two answers each, the same in every process."""
        generator, answer = torch.Generator().manual_seed(0), self.answer(tokens)
        names, examples = ("prompt_ids", "chosen_ids", "rejected_ids"), []
        for length in random_lengths(tokens, documents, generator):
            sizes = zip(names, (length, answer, answer), strict=True)
            vocab = self.config.vocab_size
            examples.append({x: torch.randint(0, vocab, (n,), generator=generator).tolist() for x, n in sizes})
        return self.trainer._prepare_inputs(self.trainer.data_collator(examples))

    def rounding(self) -> float:
        """Return 4 standard deviations of what rounding adds to the mean of the margins, times beta.

        A margin sums log-probabilities of two answers in two models. Each token's hidden state, and with it logits of
        size 1, is rounded twice per layer.
        """
        bits = 2**-9 if self.device.type == "cuda" else 2**-24
        tokens = 4 * self.answer(CHECKED)
        return 4 * self.trainer.beta * bits * math.sqrt(tokens * 2 * self.config.num_hidden_layers / QUESTIONS)

    def answer(self, tokens: int) -> int:
        """Return the tokens of an answer in a row of questions of `tokens` tokens."""
        return min(ANSWER, tokens // 16)

    def step(self, provider: str, row: dict[str, Tensor]) -> float:
        """Run forward and backward of a row, and return the loss."""
        trainer, scope = self.trainer, contextlib.nullcontext()
        trainer._cp_size = 1 if provider == "whole" else self.size
        if provider != "whole":
            trainer._split_of = functools.partial(self.split, provider)
            scope = trainer._prepare_context_parallel_inputs(self.model, row)[0]()
        with scope:
            loss = trainer.compute_loss(self.model, row)
            trainer.accelerator.backward(loss)
        return float(loss.detach())


def drop_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make a layer causal without a mask, as accelerate's hook for context parallelism does."""
    return args, kwargs | {"attention_mask": None, "is_causal": True}


@program(
    __doc__,
    task=Flag("sft", ("sft", "dpo")),
    shape=Flag("llama-3.2-1b", SHAPES),
    tokens=[131072],
    documents=Flag(10, help="documents or questions of a row"),
    providers=Flag(PROVIDERS, PROVIDERS),
    repeats=3,
    warmup=Flag(1, None, "steps that are not timed; 0 after a compared row", whole),
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    dist.init_process_group("nccl" if a.device == "cuda" else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if a.device == "cuda" else torch.device("cpu")
    bench = (PreferenceBench if a.task == "dpo" else Bench)(a.shape, device)
    a.providers = [name for name in a.providers if bench.runs(name)]
    bench.check(a.providers)
    for tokens in a.tokens:
        case = {"shape": a.shape, "gpus": bench.size, "tokens": tokens, "documents": a.documents}
        yield [case | row for row in bench.measure(bench.row(tokens, a.documents), a)]


if __name__ == "__main__":
    main()
