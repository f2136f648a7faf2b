"""Measure rows that are split over GPUs: tokens per second, peak memory, and the share of time of the exchange.

    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --csv parallel.csv
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --shape llama-3.1-8b --tokens 131072 262144
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --device cpu --shape tiny --tokens 512

A model with random weights in bfloat16, sharded by FSDP2, with gradient checkpointing and TRL's head, runs forward and
backward of a row. Losses and gradients of a short row must agree first.

* `heads`, `keys`: packed documents, with the exchange of that name.
* `whole`: every GPU computes a whole row of its own.
* `sdpa_cp`: torch's context parallelism on "sdpa", causal attention of one document (`--documents 1`).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import GIB, Results, flags, free_memory, parsed, random_lengths, synchronize
from shapes import SHAPES, build_model, packed_row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashmask_hf import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.parallel import contiguous_rows, deal_rows, sequence_parallel
from flashmask_hf.parallel.exchange import exchange_of, gather_keys, heads_to_rows, rows_to_heads, spread_kv_heads

PROVIDERS = ("heads", "keys", "whole", "sdpa_cp")
CHECKED = 2048  # tokens of the row on which the providers are compared


class Bench:
    """A sharded model, and the steps of every provider on a row."""

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

    def split(self, provider: str, row: dict[str, Tensor]) -> Any:
        """Return the context in which a row is split over the processes."""
        exchange: Any = provider
        mask = FlashMask(row[VECTORS], causal=True)
        rows = deal_rows(mask, self.size)
        if provider == "heads":
            rows = contiguous_rows(mask.kv_len, self.size, mask.device)
        return sequence_parallel(self.group, rows, row["position_ids"], exchange=exchange)

    def runs(self, provider: str) -> bool:
        """Return whether the model's heads divide among the processes, where they must."""
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        try:
            return provider != "heads" or bool(exchange_of(*heads, self.size, "heads"))
        except ValueError as error:
            print(f"heads is left out: {error}")
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
            scope = self.split(provider, row)
        with scope as split:
            if split is not None:
                part = split.shard(row)
            loss = self.model(**part, fused_lm_head=True, num_items_in_batch=count).loss
            (loss * factor).backward()  # FSDP averages gradients over the processes
        total = loss.detach().clone()
        if factor > 1:
            dist.all_reduce(total)
        return float(total)

    def check(self, providers: Sequence[str]) -> None:
        """Exit unless losses and norms of gradients of a short row agree with `whole`."""
        row, found = self.row(CHECKED, 7), {}
        for provider in ("whole", *(name for name in providers if name not in ("whole", "sdpa_cp"))):
            self.model.set_attn_implementation("flashmask")
            loss = self.step(provider, row)
            norm: Any = nn.utils.get_total_norm([x.grad for x in self.model.parameters() if x.grad is not None])
            self.model.zero_grad(set_to_none=True)
            found[provider] = loss, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        print("before timing:", found, flush=True)
        allowed = 1e-2 if self.device.type == "cuda" else 1e-5
        for figures in found.values():
            if any(abs(x / y - 1) > allowed for x, y in zip(figures, found["whole"], strict=True)):
                raise SystemExit(f"the providers disagree: {found}")

    def exchange_seconds(self, provider: str, row: dict[str, Tensor]) -> float:
        """Return the seconds of all layers' exchanges in a step, with the recomputed forwards."""
        config, dtype = self.config, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        tokens = row["input_ids"].shape[1] // self.size

        def parts(heads: int) -> Tensor:  # as layers make them, [B, S / N, H, D] in memory
            made = torch.randn(1, tokens, heads, config.head_dim, device=self.device, dtype=dtype)
            return made.transpose(1, 2).requires_grad_()

        query, key, value = (parts(n) for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2))
        with self.split(provider, row) as split:

            def forward() -> list[Tensor]:
                if provider != "heads":
                    return [gather_keys(x, split) for x in (key, value)]
                spread = (query, spread_kv_heads(key, split), spread_kv_heads(value, split))
                whole = [rows_to_heads(x, split) for x in spread]
                return [*whole[1:], heads_to_rows(whole[0], split)]

            def both() -> None:
                results = forward()
                torch.autograd.backward(results, [x.detach() for x in results])

            seconds = self.seconds_of(both, 5) + self.seconds_of(torch.no_grad()(forward), 5)
        return seconds * config.num_hidden_layers

    def seconds_of(self, call: Callable[[], object], repeats: int) -> float:
        """Return the slowest process' median seconds of a call that all make."""
        times = []
        for turn in range(repeats + 1):
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if turn:  # the first warms up
                times.append(time.perf_counter() - start)
        found = torch.tensor(statistics.median(times), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def measure(self, provider: str, row: dict[str, Tensor], repeats: int) -> dict[str, object]:
        """Time the steps of a provider."""
        tokens, ours = row["input_ids"].shape[1], provider not in ("whole", "sdpa_cp")
        self.model.set_attn_implementation("sdpa" if provider == "sdpa_cp" else "flashmask")
        free_memory()
        losses: list[float] = []

        def step() -> None:
            losses.append(self.step(provider, row))
            self.model.zero_grad(set_to_none=True)

        layers = self.model.model.layers if provider == "sdpa_cp" else []
        hooks = [layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True) for layer in layers]
        try:
            seconds = self.seconds_of(step, repeats)
        finally:
            for hook in hooks:
                hook.remove()
        peak = torch.tensor(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0.0, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return {
            "loss": round(losses[0], 5),
            "seconds_per_step": round(seconds, 4),
            "tokens_per_second": round(tokens * (self.size if provider == "whole" else 1) / seconds),
            "peak_gib": round(float(peak) / GIB, 2),
            "exchange_share": round(self.exchange_seconds(provider, row) / seconds, 4) if ours else "",
        }


def drop_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make a layer's attention causal without a mask, as accelerate's hook for context parallelism does."""
    return args, kwargs | {"attention_mask": None, "is_causal": True}


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--documents", type=int, default=10, help="number of documents of a row; 1 is causal attention")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--repeats", type=int, default=3)
    a = parsed(parser, argv)
    device = torch.device(a.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    printed = contextlib.nullcontext()
    if dist.get_rank():  # one process prints and writes
        a.csv, printed = None, contextlib.redirect_stdout(open(os.devnull, "w"))  # noqa: SIM115
    with printed:
        results, bench = Results(a.csv), Bench(a.shape, device)
        providers = [name for name in a.providers if bench.runs(name)]
        bench.check(providers)
        for tokens in a.tokens:
            row = bench.row(tokens, a.documents)
            for provider in providers:
                case: dict[str, object] = {"provider": provider, "shape": a.shape, "gpus": bench.size}
                case |= {"tokens": tokens, "documents": a.documents}
                try:
                    results.add([case | bench.measure(provider, row, a.repeats)])
                except torch.OutOfMemoryError:  # the others wait for this process: end all
                    raise SystemExit(f"{provider} ran out of memory at {tokens} tokens; leave it out") from None
                except (NotImplementedError, RuntimeError, ValueError) as error:
                    if provider != "sdpa_cp":
                        raise
                    print(f"sdpa_cp is left out, it raised {type(error).__name__}: {error}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
