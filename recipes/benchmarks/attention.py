"""Forward and backward of the kernels against FlexAttention, and SDPA's flash kernel where it has the mask.

    python recipes/benchmarks/attention.py --lengths 8192 32768 --dims 64 128 --csv attention.csv

The paper's protocol (appendix A.5): 128K tokens in all, hidden size 4096, bfloat16. FLOPs are counted on the
128 x 128 tiles that are not hidden: 4 * B * H * S^2 * D * (1 - sparsity) forward, 2.5 times that backward. Each
provider's output and gradients are compared with a float64 oracle on a shorter row before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from harness import interleaved_medians, random_lengths, write_csv
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmask_hf import FlashMask, flashmask_attention, masks

HIDDEN = 4096
TOKENS = 131072
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_mask(family: str, length: int) -> FlashMask:
    """One mask of a family; documents as in the paper's appendix A.5.2."""
    generator = torch.Generator().manual_seed(length)
    documents = random_lengths(length, 8, generator)
    build: dict[str, Callable[[], FlashMask]] = {
        "full": lambda: masks.full(length),
        "causal": lambda: masks.causal(length),
        "sliding_window": lambda: masks.sliding_window(length, max(1, length // 32)),
        "causal_document": lambda: masks.causal_document(documents),
        "document": lambda: masks.document(documents),
        "share_question": lambda: masks.share_question(
            [(n - 2 * (n // 8), [n // 8, n // 8]) for n in random_lengths(length, 4, generator)]
        ),
        "random_eviction": lambda: masks.random_eviction(length, generator=generator),
    }
    return build[family]().to("cuda")


def flex(mask: FlashMask) -> Attention:
    """FlexAttention under the same mask, its mask function reading the same vectors."""
    (start, end), *rest = mask.intervals()
    other_start, other_end = rest[0] if rest else (torch.zeros_like(start), torch.zeros_like(start))
    start, end, other_start, other_end = (x[0, 0].contiguous() for x in (start, end, other_start, other_end))
    causal, two = mask.causal, bool(rest)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        hidden = (i >= start[j]) & (i < end[j])
        if two:
            hidden = hidden | ((i >= other_start[j]) & (i < other_end[j]))
        if causal:
            hidden = hidden | (i < j)
        return ~hidden

    blocks = create_block_mask(visible, None, None, mask.rows(), mask.kv_len, device="cuda", _compile=True)
    return lambda q, k, v: _compiled_flex(q, k, v, block_mask=blocks)


torch._functorch.config.donated_buffer = False  # one compiled backward is timed many times
torch._dynamo.config.recompile_limit = 256  # every mask and shape is a compilation of its own
_compiled_flex = torch.compile(flex_attention, dynamic=False)


def providers(names: list[str], family: str, mask: FlashMask) -> dict[str, Attention]:
    """The attention functions among `names` that have this mask."""
    table: dict[str, Attention] = {}
    if "flashmask" in names:
        table["flashmask"] = lambda q, k, v: flashmask_attention(q, k, v, mask)
    if "flex_attention" in names:
        table["flex_attention"] = flex(mask)
    if "sdpa" in names and family in ("full", "causal"):
        table["sdpa"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=family == "causal")
    return table


def inputs(batch: int, heads: int, length: int, dim: int) -> list[Tensor]:
    """q, k, v that require gradients, and the gradient of the output."""
    q, k, v, dout = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def check(names: list[str], family: str, dim: int) -> None:
    """Every provider agrees with float64 on a row of 1,000 tokens, or the benchmark stops here."""
    mask = make_mask(family, 1000)
    q, k, v, dout = inputs(1, 2, 1000, dim)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = flashmask_attention(exact[0], exact[1], exact[2], mask, impl="reference")
    expected = [out, *torch.autograd.grad(out, exact, dout.double())]
    for name, attention in providers(names, family, mask).items():
        out = attention(q, k, v)
        for what, one, other in zip(
            ("out", "dq", "dk", "dv"), [out, *torch.autograd.grad(out, (q, k, v), dout)], expected, strict=True
        ):
            error = float((one.detach().double() - other).norm() / other.norm())
            if not error < 1e-2:
                raise SystemExit(f"{name} is wrong under {family}, head_dim {dim}: {what} is off by {error:.1e}")


def measure(names: list[str], family: str, length: int, dim: int, repeats: int) -> list[dict[str, object]]:
    """A row per provider: milliseconds and TFLOP/s, forward and backward."""
    mask = make_mask(family, length)
    batch, heads = max(1, TOKENS // length), HIDDEN // dim
    q, k, v, dout = inputs(batch, heads, length, dim)
    sparsity = mask.sparsity()
    flops = 4 * batch * heads * length * length * dim * (1 - sparsity)
    table = providers(names, family, mask)
    with torch.no_grad():
        forward = interleaved_medians({n: lambda a=a: a(q, k, v) for n, a in table.items()}, repeats)
    outs = {n: a(q, k, v) for n, a in table.items()}
    backward = interleaved_medians(
        {n: lambda o=o: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True) for n, o in outs.items()}, repeats
    )
    return [
        {
            "mask": family,
            "length": length,
            "head_dim": dim,
            "sparsity": round(sparsity, 4),
            "provider": name,
            "forward_ms": round(forward[name], 3),
            "backward_ms": round(backward[name], 3),
            "forward_tflops": round(flops / forward[name] / 1e9, 1),
            "backward_tflops": round(2.5 * flops / backward[name] / 1e9, 1),
            "both_tflops": round(3.5 * flops / (forward[name] + backward[name]) / 1e9, 1),
        }
        for name in table
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = ["full", "causal", "sliding_window", "causal_document", "document", "share_question", "random_eviction"]
    parser.add_argument("--masks", nargs="+", default=families, choices=families)
    names = ["flashmask", "flex_attention", "sdpa"]
    parser.add_argument("--providers", nargs="+", default=names, choices=names)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", help="where to write the rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    torch.manual_seed(0)
    for dim in arguments.dims:
        for family in arguments.masks:
            check(arguments.providers, family, dim)
    print("every provider agrees with float64")
    rows = [
        row
        for dim in arguments.dims
        for length in arguments.lengths
        for family in arguments.masks
        for row in measure(arguments.providers, family, length, dim, arguments.repeats)
    ]
    write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
