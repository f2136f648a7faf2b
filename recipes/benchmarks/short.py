"""Time attention on short rows, whose launches cost more than their kernels, on the host and in a CUDA graph.

    python recipes/benchmarks/short.py --csv short.csv

bfloat16, 32 heads, a causal mask of documents. Providers:

- `flashmask`: the best implementation for the GPU.
- `flashmask_triton`: the portable kernels.
- `sdpa_mask`: SDPA under the same mask, as a dense tensor built beforehand.
- `sdpa`: SDPA without documents (`is_causal`).
- `flex_attention`: compiled FlexAttention, with a block mask built beforehand.

Figures are medians of one call, for a forward of inputs that require gradients and for a forward with its backward:
`host_us` for the host to issue the call on an idle device, and `graph_us` in a CUDA graph of eight calls, which stand
for the layers of a model. The plan of `flashmask` is built before the capture, as in a compiled model for every layer
after the first. The portable kernels need a padded copy of the mask's vectors for lengths that are not a multiple of
128. Every provider is compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._dynamo
import torch.nn.functional as F
from harness import (
    append_rows,
    check_against_float64,
    graph_of,
    host_microseconds,
    interleaved_medians,
    random_lengths,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf._call import operators
from flashmask_hf._call.call import resolve
from flashmask_hf._call.plan_cache import plan_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = 32
CALLS = 8
OURS = {"flashmask": None, "flashmask_triton": "triton"}
PROVIDERS = (*OURS, "sdpa_mask", "sdpa", "flex_attention")
torch._dynamo.config.recompile_limit = 256  # FlexAttention compiles for each shape
_compiled = torch.compile(flex_attention, dynamic=False)


def documents(length: int) -> list[int]:
    """Draw the lengths of four documents that fill a row."""
    return random_lengths(length, 4, torch.Generator().manual_seed(length), minimum=length // 8)


def provider(name: str, length: int, mask: FlashMask, visible: Tensor) -> Attention:
    """Return the attention function of a provider; `visible` is the dense mask [1, 1, S, S]."""
    if name in OURS:
        return lambda q, k, v: flashmask_attention(q, k, v, mask, impl=OURS[name])
    if name == "sdpa_mask":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    if name == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    lengths = torch.tensor(documents(length), device="cuda")
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    blocks = create_block_mask(same_document, None, None, length, length, device="cuda")
    return lambda q, k, v: _compiled(q, k, v, block_mask=blocks)  # type: ignore[return-value]


def planned(name: str, mask: FlashMask, length: int) -> Attention:
    """Return one of our providers with a cached plan, since a public call within a graph capture builds its own."""
    plan = plan_of(mask, length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = resolve(q, k, v, mask, None, None, None, False, OURS[name])
        return operators.flash_attn_forward(q, k, v, None, mask.indices, *plan, *call.settings)[0]

    return attend


def check(name: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor) -> None:
    """Exit unless a provider's output and gradients agree with float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense = torch.ones_like(visible).tril() if name == "sdpa" else visible
    expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], attn_mask=dense)
    out = attention(q, k, v)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    exact = (expected, *torch.autograd.grad(expected, wide, dout.double()))
    check_against_float64(f"{name} with {q.shape[2]} rows", found, exact)


def measure(names: list[str], batch: int, length: int, dim: int, repeats: int) -> list[dict[str, object]]:
    """Return two rows per provider: a forward, and a forward with its backward."""
    mask = masks.causal_document(documents(length)).to("cuda")
    visible = mask.to_dense()
    q, k, v, dout = (
        torch.randn(batch, length, HEADS, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    eager: dict[tuple[str, str], Callable[[], object]] = {}
    captured: dict[tuple[str, str], Callable[[], object]] = {}
    for name in names:
        public = provider(name, length, mask, visible)
        layer = planned(name, mask, length) if name in OURS else public
        for table, attention in ((eager, public), (captured, layer)):
            check(name, attention, q, k, v, dout, visible)
            table[name, "forward"] = lambda a=attention: a(q, k, v)
            table[name, "both"] = lambda a=attention: torch.autograd.grad(a(q, k, v), leaves, dout)
    host = host_microseconds(eager, repeats)
    graphs = {case: graph_of([call] * CALLS) for case, call in captured.items()}
    replayed = interleaved_medians({case: graph.replay for case, graph in graphs.items()}, repeats)
    return [
        {
            "batch": batch,
            "rows": length,
            "head_dim": dim,
            "provider": name,
            "passes": passes,
            "host_us": round(host[name, passes], 1),
            "graph_us": round(1000 * replayed[name, passes] / CALLS, 2),
        }
        for name, passes in eager
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 200, 256, 512, 1000, 1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for dim in arguments.dims:
        for batch in arguments.batches:
            for length in arguments.lengths:
                found = measure(arguments.providers, batch, length, dim, arguments.repeats)
                append_rows(arguments.csv, rows, found)


if __name__ == "__main__":
    main()
