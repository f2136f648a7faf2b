"""Measure rows that are split over GPUs: tokens per second, peak memory, and the share of time of the exchange.

    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --csv parallel.csv
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --shape llama-3.1-8b --tokens 131072 262144
    torchrun --nproc-per-node 2 recipes/benchmarks/parallel.py --device cpu --shape tiny --tokens 512

Before anything is timed, attention split over the GPUs must agree with attention of the whole row in one process within
rounding. With exchange of heads it must be equal to the bit, in deterministic mode (`equal_bits` of the output and the
gradients of q, k and v); if not, the program fails after the timings. Then a model with random
weights in bfloat16, sharded by FSDP2, with gradient checkpointing and TRL's fused head, runs forward and backward:

* `heads` and `keys`: packed documents, with the exchange of that name; `keys` deals rows out by their tiles, and
  `keys_contiguous` does not, which shows what dealing is worth.
* `whole`: every GPU computes a whole row of its own, as without sequence parallelism, for lengths that fit.
* `sdpa_cp`: the context parallelism of torch, with the hooks of accelerate, on "sdpa": causal attention of one
  document, since it cannot keep documents apart. Compare it with `--documents 1`.

The exchange is timed by itself, and its share is that of all layers' exchanges, with the recomputed ones, in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from harness import append_rows, random_lengths, show
from shapes import SHAPES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.trainer.utils import add_fused_lm_head

from flashmask_hf import FlashMask
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.parallel import contiguous_rows, deal_rows, sequence_parallel
from flashmask_hf.parallel.exchange import exchange_of, gather_keys, heads_to_rows, rows_to_heads, spread_kv_heads
from flashmask_hf.tile_plan import ROWS, build_plan

PROVIDERS = ("heads", "keys", "keys_contiguous", "whole", "sdpa_cp")


def make_row(tokens: int, documents: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Draw a packed row, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    lengths = random_lengths(tokens, documents, generator)
    ids = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    batch = DataCollatorForPackedLanguageModeling(completion_only_loss=False)([{"input_ids": one} for one in ids])
    return {key: value.to(device) for key, value in batch.items()}


def layout(name: str, mask: FlashMask, size: int) -> Tensor:
    """Return the rows of every process for a provider."""
    return deal_rows(mask, size) if name == "keys" else contiguous_rows(mask.kv_len, size, mask.device)


def exchange_name(provider: str) -> Any:
    return provider.partition("_")[0]


def provides(name: str, config: Any, size: int) -> bool:
    """Return whether the model's heads divide among the processes, for exchange of heads."""
    if name != "heads":
        return True
    try:
        exchange_of(config.num_attention_heads, config.num_key_value_heads, size, "heads")
    except ValueError as error:
        print(f"heads is left out: {error}")
        return False
    return True


def check_attention(group: Any, config: Any, device: torch.device, tokens: int) -> list[dict[str, object]]:
    """Compare split attention with that of the whole row, forward and gradients, and return how far it is off.

    Raises:
        SystemExit: it is further off than rounding allows.
    """
    size, rank = group.size(), group.rank()
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = make_row(tokens, 7, 64, device)
    vectors, positions = row["startend_row_indices"], row["position_ids"]
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, weight = (
        torch.randn(1, n, tokens, dim, device=device, dtype=dtype, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    module = nn.Module()

    def attend(rows: Tensor | None) -> list[Tensor]:
        inputs = [(x if rows is None else x[:, :, rows]).clone().requires_grad_() for x in (q, k, v)]
        query, key, value = inputs
        out, _ = attention_forward(
            module, query, key, value, None, startend_row_indices=vectors, position_ids=positions
        )
        out.backward((weight if rows is None else weight[:, :, rows]).transpose(1, 2))
        return [out.detach().transpose(1, 2), *(x.grad for x in inputs if x.grad is not None)]

    found: list[dict[str, object]] = []
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        want = attend(None)
        for name in ("heads", "keys"):
            if not provides(name, config, size):
                continue
            rows = layout(name, FlashMask(vectors, causal=True), size)
            with sequence_parallel(group, rows, positions, exchange=name):
                got = attend(rows[rank])
            expected = [x[:, :, rows[rank]] for x in want]
            off = torch.stack(
                [((x - y).double().norm() / y.double().norm()).float() for x, y in zip(got, expected, strict=True)]
            )
            same = torch.tensor([torch.equal(x, y) for x, y in zip(got, expected, strict=True)], device=device).int()
            dist.all_reduce(off, dist.ReduceOp.MAX)
            dist.all_reduce(same, dist.ReduceOp.MIN)
            found.append(
                {
                    "provider": f"check_{name}",
                    **{f"off_{x}": f"{y:.1e}" for x, y in zip(("out", "dq", "dk", "dv"), off.tolist(), strict=True)},
                    "equal_bits": "".join(map(str, same.tolist())),  # of out, dq, dk, dv
                }
            )
            limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
            if off.max() > limit:
                raise SystemExit(f"exchange of {name} is off by {off.tolist()} (out, dq, dk, dv), more than rounding")
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return found


def build_model(config: Any, device: torch.device) -> Any:
    """Return a model that is sharded over all processes."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=dtype)
    add_fused_lm_head(model)
    enable_checkpointing(model, {"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.train()


def run_step(provider: str, model: Any, row: dict[str, Tensor], group: Any) -> float:
    """Run forward and backward of a row, and return the loss."""
    size = group.size()
    labels = nn.functional.pad(row["labels"][:, 1:], (0, 1), value=-100)
    count = labels.ne(-100).sum()
    vectors = row["startend_row_indices"]
    scope: Any = contextlib.nullcontext()
    if provider == "whole":
        part = {**{key: value for key, value in row.items() if key != "labels"}, "shift_labels": labels}
        factor = 1
    elif provider == "sdpa_cp":
        from torch.distributed.tensor.experimental import context_parallel

        part = {"input_ids": row["input_ids"].clone(), "shift_labels": labels}
        part["position_ids"] = torch.arange(labels.shape[1], device=labels.device)[None].clone()
        part["attention_mask"] = torch.ones_like(
            labels
        )  # without it, transformers makes a dense mask, which is dropped
        mesh = init_device_mesh(labels.device.type, (size,))
        buffers = list(part.values())
        scope = context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        )
        factor = size
    else:
        rows = layout(provider, FlashMask(vectors, causal=True), size)
        scope = sequence_parallel(group, rows, row["position_ids"], exchange=exchange_name(provider))
        factor = size
    with scope as split:
        if split is not None:
            part = split.shard(row)
        loss = model(**part, fused_lm_head=True, num_items_in_batch=count).loss
        (loss * factor).backward()  # FSDP averages gradients over the processes
    model.zero_grad(set_to_none=True)
    total = loss.detach().clone()
    if factor > 1:
        dist.all_reduce(total)
    return float(total)


def exchange_seconds(provider: str, config: Any, row: dict[str, Tensor], group: Any) -> float:
    """Return the seconds that the exchanges of all layers take in a step: two forwards, of which one is recomputed."""
    size = group.size()
    vectors = row["startend_row_indices"]
    device = vectors.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = layout(provider, FlashMask(vectors, causal=True), size)

    def parts(heads: int) -> Tensor:  # as layers make them, [B, S / N, H, D] in memory
        made = torch.randn(1, rows.shape[1], heads, config.head_dim, device=device, dtype=dtype)
        return made.transpose(1, 2).requires_grad_()

    query, key, value = (parts(n) for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2))
    with sequence_parallel(group, rows, row["position_ids"], exchange=exchange_name(provider)) as split:

        def forward() -> list[Tensor]:
            if provider != "heads":
                return [gather_keys(x, split) for x in (key, value)]
            whole = [
                rows_to_heads(x, split) for x in (query, spread_kv_heads(key, split), spread_kv_heads(value, split))
            ]
            return [*whole[1:], heads_to_rows(whole[0], split)]

        def both() -> None:
            results = forward()
            torch.autograd.backward(results, [x.detach() for x in results])

        def only_forward() -> None:
            with torch.no_grad():
                forward()

        seconds = seconds_of(both, device, 5) + seconds_of(only_forward, device, 5)
    return seconds * config.num_hidden_layers


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call that all processes make, of the slowest process."""
    times = []
    for turn in range(repeats + 1):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if turn:  # the first warms up
            times.append(time.perf_counter() - start)
    found = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def balance(provider: str, row: dict[str, Tensor], size: int) -> float:
    """Return the tiles that the busiest process walks over the mean, from the plan of the row."""
    if provider not in ("keys", "keys_contiguous"):
        return 1.0
    vectors = row["startend_row_indices"].cpu()
    mask = FlashMask(vectors, causal=True)
    tiles = build_plan(vectors, True, mask.kv_len).counts.sum((0, 1, 3)).double()
    owners = layout(provider, mask, size).view(size, -1)
    work = torch.stack([tiles[part // ROWS].sum() for part in owners])
    return float(work.max() / work.mean())


def measure(
    provider: str, model: Any, config: Any, row: dict[str, Tensor], group: Any, arguments: argparse.Namespace
) -> dict[str, object]:
    """Time the steps of a provider."""
    device, tokens, size = row["input_ids"].device, row["input_ids"].shape[1], group.size()
    model.set_attn_implementation("sdpa" if provider == "sdpa_cp" else "flashmask")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with peer_hooks(model) if provider == "sdpa_cp" else contextlib.nullcontext():
        losses: list[float] = []
        seconds = seconds_of(lambda: losses.append(run_step(provider, model, row, group)), device, arguments.repeats)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0.0, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    ours = provider not in ("whole", "sdpa_cp")
    exchange = exchange_seconds(provider, config, row, group) if ours else 0.0
    return {
        "provider": provider,
        "shape": arguments.shape,
        "gpus": size,
        "tokens": tokens,
        "documents": arguments.documents,
        "loss": round(losses[0], 5),
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(tokens * (size if provider == "whole" else 1) / seconds),
        "peak_gib": round(float(peak) / 2**30, 2),
        "exchange_share": round(exchange / seconds, 4) if ours else "",
        "balance": round(balance(provider, row, size), 3),
    }


@contextlib.contextmanager
def peer_hooks(model: Any) -> Iterator[None]:
    """Add accelerate's hooks for its context parallelism to a model, which drop masks, and remove them afterwards."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    before = {part: list(part._forward_pre_hooks) for part in model.modules()}
    _attach_context_parallel_hooks(model)
    try:
        yield
    finally:
        for part, kept in before.items():
            for key in [key for key in part._forward_pre_hooks if key not in kept]:
                part._forward_pre_hooks.pop(key)
                part._forward_pre_hooks_with_kwargs.pop(key, None)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--documents", type=int, default=10, help="number of documents of a row; 1 is causal attention")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--check_tokens", type=int, help="tokens of the comparison before timing; default 8192 or fewer"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    settings = SHAPES[arguments.shape]
    config: Any = LlamaConfig(**settings | {"max_position_embeddings": max(arguments.tokens), "use_cache": False})
    if group.rank():  # one process prints and writes
        arguments.csv = None
    silent = open(os.devnull, "w") if group.rank() else None  # noqa: SIM115
    with contextlib.redirect_stdout(silent) if silent else contextlib.nullcontext():
        rows: list[dict[str, object]] = []
        checked = arguments.check_tokens or min(8192, min(arguments.tokens))
        checks = check_attention(group, config, device, checked)
        show(checks)
        model = build_model(config, device)
        for tokens in arguments.tokens:
            row = make_row(tokens, arguments.documents, config.vocab_size, device)
            for provider in arguments.providers:
                if not provides(provider, config, group.size()):
                    continue
                try:
                    found = measure(provider, model, config, row, group, arguments)
                except torch.OutOfMemoryError:  # the others wait for this process: end all
                    raise SystemExit(f"{provider} ran out of memory at {tokens} tokens; leave it out") from None
                except (NotImplementedError, RuntimeError, ValueError) as error:
                    if provider != "sdpa_cp":
                        raise
                    print(f"sdpa_cp is left out, it raised {type(error).__name__}: {error}")
                    continue
                append_rows(arguments.csv, rows, [found])
    dist.barrier()
    size = group.size()
    dist.destroy_process_group()
    shared = size > config.num_key_value_heads  # then gradients of a key are summed over processes
    if not shared and any(x["provider"] == "check_heads" and "0" in str(x["equal_bits"]) for x in checks):
        raise SystemExit("exchange of heads is not equal to the bit (out, dq, dk, dv); see equal_bits above")


if __name__ == "__main__":
    main()
