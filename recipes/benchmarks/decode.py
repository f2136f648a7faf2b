"""Time one decode step of attention, a query row against a key-value cache, beside SDPA and the prefill kernel.

    python recipes/benchmarks/decode.py --csv decode.csv

bfloat16, head_dim 128. Providers:

- `flashmask`: `flashmask_attention` without gradients.
- `flashmask_forward`: the kernel for many query rows, under a cached plan.
- `sdpa_mask`: SDPA as transformers 5.23 calls it under a boolean mask, with the query heads of a key-value head packed
  into rows of one head.
- `sdpa`: SDPA as transformers 5.23 calls it without a mask.

The mask `padding` hides a few keys on the left of each batch row but the first; `window` hides all but the last 1,024
keys.

Each call reads another cache, as the layers of a model do, so that small caches do not stay in the GPU's L2 cache.
Figures are medians of one call: `eager_us` on the device, launches included; `host_us` for the host to issue the call;
`graph_us` in a CUDA graph of many calls. `gbytes_per_s` counts the visible keys and values over `graph_us`. Every
provider's output is compared with float64 on a shorter cache before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import check_against_float64, graph_of, host_microseconds, interleaved_medians, write_csv
from torch import Tensor

from flashmask_hf import FlashMask, flashmask_attention
from flashmask_hf._call.call import Settings
from flashmask_hf._call.operators import flash_attn_forward
from flashmask_hf._call.plan_cache import plan_of

DIM = 128
WINDOW = 1024
CACHES = 2**28  # bytes of the caches read in turn, several times the L2 cache of a GPU
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def visible_keys(kind: str, batch: int, length: int) -> Tensor:
    """Return which keys a mask shows to each batch row, bool [B, Skv]."""
    key = torch.arange(length, device="cuda")
    first = torch.arange(batch, device="cuda") * 16 if kind == "padding" else torch.tensor([max(0, length - WINDOW)])
    return (key >= first.to("cuda")[:, None]).expand(batch, -1)


def providers(names: list[str], kind: str, visible: Tensor, groups: int) -> dict[str, Attention]:
    """Return the attention functions among `names` that support this mask, for q [B, Hq, 1, D]."""
    mask = FlashMask(visible.to(torch.int32)[:, None, :, None].contiguous(), causal=True, q_len=1)
    dense = visible[:, None, None].contiguous()

    def many_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        settings = Settings(mask.causal, scale=DIM**-0.5, softcap=0.0, impl="triton", deterministic=False)
        return flash_attn_forward(q, k, v, None, mask.indices, *plan_of(mask, 1), *settings)[0]

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.unflatten(1, (-1, groups)).squeeze(3)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=dense).flatten(1, 2)[:, :, None]

    table: dict[str, Attention] = {
        "flashmask": lambda q, k, v: flashmask_attention(q, k, v, mask),
        "flashmask_forward": many_rows,
        "sdpa_mask": packed,
    }
    if kind == "padding":
        table["sdpa"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)
    plan_of(mask, 1)
    return {name: table[name] for name in names if name in table}


def inputs(batch: int, heads: int, kv_heads: int, length: int, copies: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Draw q, k and v of `copies` layers."""
    shapes = ((heads, 1), (kv_heads, length), (kv_heads, length))
    return [
        tuple(torch.randn(batch, h, s, DIM, device="cuda", dtype=torch.bfloat16) for h, s in shapes)  # type: ignore[misc]
        for _ in range(copies)
    ]


def check(names: list[str], kind: str, heads: int, kv_heads: int) -> None:
    """Exit unless every provider agrees with float64 on a cache of 3,000 keys."""
    visible = visible_keys(kind, 3, 3000)
    q, k, v = inputs(3, heads, kv_heads, 3000, 1)[0]
    wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v)]
    for name, attention in providers(names, kind, visible, heads // kv_heads).items():
        dense = None if name == "sdpa" else visible[:, None, None]
        expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], attn_mask=dense)
        check_against_float64(f"{name} under {kind}, heads {heads}/{kv_heads}", [attention(q, k, v)], [expected])


def measure(
    names: list[str], kind: str, batch: int, heads: int, kv_heads: int, length: int, repeats: int
) -> list[dict[str, object]]:
    """Return a row of figures per provider."""
    visible = visible_keys(kind, batch, length)
    size = 2 * batch * kv_heads * length * DIM * 2
    layers = inputs(batch, heads, kv_heads, length, max(1, min(32, CACHES // size)))
    calls = max(4, len(layers))
    table = providers(names, kind, visible, heads // kv_heads)
    turn = iter(range(10**9))
    single = {n: lambda a=a: a(*layers[next(turn) % len(layers)]) for n, a in table.items()}
    eager = interleaved_medians(single, repeats)
    host = host_microseconds(single, repeats)
    graphs = {n: graph_of([partial(a, *layers[i % len(layers)]) for i in range(calls)]) for n, a in table.items()}
    replayed = interleaved_medians({n: graph.replay for n, graph in graphs.items()}, repeats)
    seen = 4 * kv_heads * DIM * int(visible.sum())
    return [
        {
            "mask": kind,
            "batch": batch,
            "heads": f"{heads}/{kv_heads}",
            "keys": length,
            "provider": name,
            "eager_us": round(1000 * eager[name], 1),
            "host_us": round(host[name], 1),
            "graph_us": round(1000 * replayed[name] / calls, 2),
            "gbytes_per_s": round(seen / (1e6 * replayed[name] / calls)),
        }
        for name in table
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", default=["padding", "window"], choices=["padding", "window"])
    names = ["flashmask", "flashmask_forward", "sdpa_mask", "sdpa"]
    parser.add_argument("--providers", nargs="+", default=names, choices=names)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32"], help="query heads / key-value heads")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    torch.manual_seed(0)
    shapes = [tuple(map(int, heads.split("/"))) for heads in arguments.heads]
    rows: list[dict[str, object]] = []
    with torch.no_grad():
        for heads, kv_heads in shapes:
            for kind in arguments.masks:
                check(arguments.providers, kind, heads, kv_heads)
        print("every provider agrees with float64")
        for kind in arguments.masks:
            for heads, kv_heads in shapes:
                for batch in arguments.batches:
                    for length in arguments.lengths:
                        rows += measure(arguments.providers, kind, batch, heads, kv_heads, length, arguments.repeats)
    write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
