"""Time hash-sparse and QK-sparse attention beside causal attention, as in figures 3 and 7 of Pagliardini et al. (2023).

    python recipes/benchmarks/sparse_attention.py --csv sparse.csv   # 1K to 64K tokens, B=4, H=48, D=64, bfloat16
    python recipes/benchmarks/sparse_attention.py --lengths 16384 --providers sdpa hash_16 --repeats 3
    python recipes/benchmarks/plots.py --sparse sparse.csv --out results

Providers:

- `hash_N`: N buckets, drawn at random for every query and key of every head. `hash_sparse_attention` gets `n_buckets`,
  except in `hash_16_any`.
- `drop_P`: drops P percent of the queries and of the keys of every head at random.
- `sdpa`, `cudnn`: PyTorch's causal attention by FlashAttention-2 and by cuDNN.
- `flashmask`: this package's attention under a causal mask with a cached plan.

Times of sparse attention include sorting and moving rows before and after attention, but not drawing buckets and drops,
as in the paper. `forward_ms` is a call without gradients, `both_ms` a call with its gradients, `backward_ms` their
difference, and `faster` the ratio of `both_ms` of `sdpa` to the provider's. The other columns are parts of a step:
`sort_ms` (orders and the mask's columns), `plan_ms`, `attend_ms` (the operator, which gathers the rows and scatters the
output), with `gather_ms` as its part (q, k, v); and in the backward `attend_backward_ms`, with `gather_backward_ms` as
its part (gradient of the output, and its row sums).

Every provider's output and gradients are compared with float64 on a short row before anything is timed. The program
exits with 1 if a measured provider misses one of `BARS`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from harness import append_rows, check_against_float64, interleaved_medians
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmask_hf import FlashMask, flashmask_attention, masks, sparse
from flashmask_hf._call.call import resolve
from flashmask_hf._call.plan_cache import make_plan, plan_of
from flashmask_hf.sparse import operators as sparse_ops
from flashmask_hf.sparse.reorder import gather_rows, gather_upstream

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, object]

DENSE = {"sdpa": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "flashmask": None}
BUCKETS = {"hash_4": 4, "hash_16": 16, "hash_64": 64, "hash_16_any": 16}
DROPPED = {"drop_10": 0.1, "drop_30": 0.3, "drop_50": 0.5, "drop_70": 0.7}
BARS = {
    ("hash_16", 16384): 5.0,
    ("hash_16", 32768): 8.0,
    ("drop_30", 16384): 1.6,
    ("drop_50", 16384): 2.5,
}
"""Smallest speedup over `sdpa` that passes, forward and backward together, by provider and length."""
PARTS = ("sort", "plan", "gather", "attend", "gather_backward", "attend_backward")
CHECKED = 512  # length of the row on which every provider is compared with float64


def draw(name: str, batch: int, heads: int, length: int, device: str) -> tuple[Tensor, Tensor] | None:
    """Draw the buckets of queries and keys, or which of them are kept; return None for dense attention."""
    generator = torch.Generator(device).manual_seed(length)
    shape = (batch, heads, length)
    if name in BUCKETS:
        q, k = (torch.randint(BUCKETS[name], shape, generator=generator, device=device) for _ in range(2))
        return q, k
    if name in DROPPED:
        q, k = (torch.rand(shape, generator=generator, device=device) >= DROPPED[name] for _ in range(2))
        return q, k
    return None


def build(name: str, chosen: tuple[Tensor, Tensor] | None, length: int, device: str) -> Attention:
    """Return a provider's attention function of q, k and v [B, H, S, D]."""
    if chosen is not None and name in DROPPED:
        return lambda q, k, v: sparse.qk_sparse_attention(q, k, v, *chosen)
    if chosen is not None:
        n_buckets = None if name.endswith("any") else BUCKETS[name]
        return lambda q, k, v: sparse.hash_sparse_attention(q, k, v, *chosen, n_buckets=n_buckets)
    backend = DENSE[name]
    if backend is None:
        mask = masks.causal(length, device=device)
        return lambda q, k, v: flashmask_attention(q, k, v, mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def inputs(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Draw q, k and v, which require gradients and are laid out as in a model, and the gradient of the output."""
    q, k, v, dout = (
        torch.randn(batch, length, heads, dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def check(name: str, dim: int, dtype: torch.dtype, device: str) -> None:
    """Exit unless the provider agrees with dense attention in float64."""
    q, k, v, dout = inputs(2, 3, CHECKED, dim, dtype, device)
    chosen = draw(name, 2, 3, CHECKED, device)
    visible = torch.ones(CHECKED, CHECKED, dtype=torch.bool, device=device).tril()
    if chosen is not None:
        one, other = chosen[0][..., :, None], chosen[1][..., None, :]
        visible = visible & ((one & other) if name in DROPPED else one == other)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = (exact[0] @ exact[1].mT * dim**-0.5).masked_fill(~visible, float("-inf"))
    expected = scores.softmax(-1).masked_fill(~visible, 0.0) @ exact[2]
    out = build(name, chosen, CHECKED, device)(q, k, v)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    check_against_float64(name, found, (expected, *torch.autograd.grad(expected, exact, dout.double())))


def parts(
    name: str, chosen: tuple[Tensor, Tensor], given: Sequence[Tensor], repeats: int, warmup: int
) -> dict[str, float]:
    """Return the milliseconds of each part of a sparse provider's step."""
    q, k, v, dout = (x.detach() for x in given)
    kept: tuple[Tensor | None, Tensor | None] = (None, None)

    def sort() -> tuple[Tensor, Tensor, Tensor]:
        nonlocal kept
        if name in BUCKETS:
            return sparse_ops.sort_sparse(*chosen, None, 0 if name.endswith("any") else BUCKETS[name], False, -1)
        kept = (chosen[0].sum(-1, dtype=torch.int32), chosen[1].sum(-1, dtype=torch.int32))
        q_dropped, k_dropped = (~keep for keep in chosen)
        return sparse_ops.sort_sparse(q_dropped.byte(), k_dropped.byte(), None, 2, False, 1)

    def gather() -> list[Tensor]:
        orders = ((q, q_order, kept[0]), (k, k_order, kept[1]), (v, k_order, kept[1]))
        return [gather_rows(*what) for what in orders]

    def attend() -> tuple[Tensor, ...]:
        return sparse_ops.flash_attn_sparse_forward(
            q, k, v, None, columns, *plan, q_order, kept[0], k_order, kept[1], *settings
        )

    def attend_backward() -> tuple[Tensor, ...]:
        return sparse_ops.flash_attn_sparse_backward(
            dout, *ordered, None, out, lse, columns, *plan, q_order, kept[0], k_order, *settings
        )

    columns, q_order, k_order = sort()
    mask = FlashMask(columns, causal=False, q_len=q.shape[2])
    plan = plan_of(mask, q.shape[2])
    _, *settings = resolve(q, k, v, mask, None, None, None, False, None).settings
    out, lse, *ordered = attend()
    functions = {
        "sort": sort,
        "plan": lambda: make_plan(columns, False, q.shape[2]),
        "gather": gather,
        "attend": attend,
        "gather_backward": lambda: gather_upstream(dout, out, q_order, kept[0], lse.dtype),
        "attend_backward": attend_backward,
    }
    return interleaved_medians(functions, repeats, warmup)


def measure(
    names: Sequence[str], shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, repeats: int, warmup: int
) -> list[Row]:
    """Return a row per provider, for q, k and v of `shape` [B, H, S, D]."""
    batch, heads, length, dim = shape
    q, k, v, dout = inputs(batch, heads, length, dim, dtype, device)
    chosen = {name: draw(name, batch, heads, length, device) for name in names}
    table = {name: build(name, chosen[name], length, device) for name in names}
    with torch.no_grad():
        forward = interleaved_medians({n: lambda a=a: a(q, k, v) for n, a in table.items()}, repeats, warmup)
    both = interleaved_medians(
        {n: lambda a=a: torch.autograd.grad(a(q, k, v), (q, k, v), dout) for n, a in table.items()}, repeats, warmup
    )
    rows: list[Row] = []
    for name in names:
        given = chosen[name]
        apart = {} if given is None else parts(name, given, (q, k, v, dout), repeats, warmup)
        rows.append(
            {
                "length": length, "batch": batch, "heads": heads, "head_dim": dim, "provider": name,
                "forward_ms": round(forward[name], 3), "backward_ms": round(both[name] - forward[name], 3),
                "both_ms": round(both[name], 3),
                "faster": round(both["sdpa"] / both[name], 3) if "sdpa" in both else "",
                **{f"{part}_ms": round(apart[part], 3) if apart else "" for part in PARTS},
            }
        )  # fmt: skip
    return rows


def break_even(lengths: Sequence[int], faster: Sequence[float]) -> str:
    """Return the length from which a provider is faster than `sdpa`, interpolated on logarithmic axes."""
    slower = [i for i, ratio in enumerate(faster) if ratio < 1]
    if not slower:
        return f"{lengths[0]} or less"
    last = slower[-1]
    if last == len(lengths) - 1:
        return f"more than {lengths[-1]}"
    below, above = math.log(faster[last]), math.log(faster[last + 1])
    share = below / (below - above)
    return str(round(lengths[last] * (lengths[last + 1] / lengths[last]) ** share))


def summarize(rows: Sequence[Row]) -> bool:
    """Print speedups over `sdpa`, break-even lengths and missed bars; return whether all bars are met."""
    met = True
    for name in dict.fromkeys(str(row["provider"]) for row in rows if row["provider"] != "sdpa"):
        found = {int(str(row["length"])): float(str(row["faster"])) for row in rows if row["provider"] == name}
        lengths = sorted(found)
        ratios = "  ".join(f"{length}: {found[length]:.2f}" for length in lengths)
        print(f"{name}  faster than sdpa by  {ratios}  from {break_even(lengths, [found[n] for n in lengths])}")
        for length in lengths:
            bar = BARS.get((name, length), 0.0)
            if found[length] < bar:
                met = False
                print(f"missed: {name} at {length} is {found[length]:.2f} times faster, wanted {bar}")
    return met


def main() -> None:
    """Run the benchmark from the command line."""
    everything = [*DENSE, *BUCKETS, *DROPPED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", nargs="+", default=everything, choices=everything)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024 << i for i in range(7)])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=48)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="test run in float32 on the CPU, with fixed sizes")
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args()
    names, lengths = list(arguments.providers), list(arguments.lengths)
    batch, heads, dim, dtype, device = arguments.batch, arguments.heads, arguments.dim, torch.bfloat16, "cuda"
    if arguments.smoke:
        lengths, batch, heads, dim, dtype, device = [64, 128], 1, 2, 16, torch.float32, "cpu"
        names = [name for name in names if name != "cudnn"]
    elif not torch.cuda.is_available():
        parser.error("a GPU is needed, or --smoke")
    torch.manual_seed(0)
    for name in names:
        check(name, dim, dtype, device)
    print("every provider agrees with float64", flush=True)
    rows: list[Row] = []
    for length in lengths:
        found = measure(
            names,
            (batch, heads, length, dim),
            dtype,
            device,
            arguments.repeats,
            0 if arguments.smoke else arguments.warmup,
        )
        append_rows(arguments.csv, rows, found)
    if "sdpa" in names and not summarize(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
