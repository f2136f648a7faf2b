"""Time forward and backward of the kernels beside their peers on the twelve masks of the FlashMask paper.

    python recipes/benchmarks/attention.py --csv attention.csv   # 8K, 32K and 128K tokens, head_dim 64 and 128
    python recipes/benchmarks/attention.py --lengths 8192 --dims 128 --masks causal_document --repeats 3   # a minute

Masks and shapes are the paper's (appendix A.5): 128K tokens in all, hidden size 4096, bfloat16. Documents are drawn
once per length (A.5.2). Times are medians of turns in which every provider runs once. FLOPs are counted in two ways: on
the 128 x 128 tiles that are not hidden, as in the paper (4 * B * H * S^2 * D * (1 - sparsity) forward, 2.5 times that
backward), and on the visible pairs. Each provider's output and gradients are compared with float64 on a shorter row
before anything is timed. A provider that is not installed is reported and left out. Providers:

- `flashmask`: `flashmask_attention` with its default implementation.
- `flashmask_deterministic`: the same with a deterministic order of the sums in the gradient of q.
- `flashmask_triton`: the portable kernels.
- `flex_attention`, `flex_flash`: FlexAttention with its Triton and with its FlashAttention-4 backend (needs
  flash-attn-4).
- `fa4`, `cudnn`, `sdpa` (FlashAttention-2): only for full and causal masks.
- `sdpa_dense`: SDPA with the dense mask, for rows of up to 8K tokens.

`mask_ms` and `mask_mib` are the time and memory that a provider needs to prepare a new mask from its column vectors.
They are not part of the times of the attention.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from harness import append_rows, interleaved_medians, random_lengths
from packed_attention import visible_pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf.operators.plan import plan_of

HIDDEN = 4096
TOKENS = 131072
CHECKED = 4352  # length of the row on which every provider is compared with float64; every kernel supports it
DENSE_LIMIT = 8192  # longest row that `sdpa_dense` runs
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

torch._functorch.config.donated_buffer = False  # to time one compiled backward many times
torch._dynamo.config.recompile_limit = 256  # FlexAttention compiles for every kind of mask and every shape


def documents(length: int, generator: torch.Generator) -> list[int]:
    """Draw the lengths of documents that fill a row; their number is as in the paper's appendix A.5.2."""
    low, high = (3, 7) if length <= 8192 else (10, 14) if length <= 32768 else (11, 15)
    count = int(torch.randint(low, high + 1, (1,), generator=generator))
    return random_lengths(length, count, generator)


def _question(length: int, generator: torch.Generator) -> tuple[int, list[int]]:
    """Split a document at random into a question and 2 to 6 answers."""
    parts = random_lengths(length, 1 + int(torch.randint(2, 7, (1,), generator=generator)), generator, minimum=1)
    return parts[0], parts[1:]


def _qk_sparse(length: int, generator: torch.Generator) -> FlashMask:
    """Drop 2% of the queries and of the keys at random."""
    q_keep, k_keep = (torch.rand(1, 1, length, generator=generator) >= 0.02 for _ in range(2))
    return masks.qk_sparse(q_keep, k_keep)


FAMILIES: dict[str, Callable[[int, torch.Generator], FlashMask]] = {
    "full": lambda s, g: masks.full(s),
    "causal": lambda s, g: masks.causal(s),
    "sliding_window": lambda s, g: masks.sliding_window(s, s // 16),
    "causal_document": lambda s, g: masks.causal_document(documents(s, g)),
    "document": lambda s, g: masks.document(documents(s, g)),
    "share_question": lambda s, g: masks.share_question([_question(n, g) for n in documents(s, g)]),
    "global_sliding_window": lambda s, g: masks.global_sliding_window(s, s // 16, s // 16, causal=True),
    "causal_blockwise": lambda s, g: masks.causal_blockwise(documents(s, g)),
    "prefix_lm_document": lambda s, g: masks.prefix_lm_document([(n // 2, n) for n in documents(s, g)]),
    "prefix_lm_causal": lambda s, g: masks.prefix_lm_causal(s, s // 2),
    "qk_sparse": _qk_sparse,
    "random_eviction": lambda s, g: masks.random_eviction(s, generator=g),
}
"""Mask families of the paper's tables 4 to 9, with about the same sparsity."""


def make_mask(family: str, length: int) -> FlashMask:
    """Build one mask of a family, on the GPU."""
    return FAMILIES[family](length, torch.Generator().manual_seed(length)).to("cuda")


_compiled_flex = torch.compile(flex_attention, dynamic=False)


def _flex(backend: str | None) -> Callable[[FlashMask], Attention]:
    """Return the builder of FlexAttention with a backend, None for its default."""
    options: Any = None if backend is None else {"BACKEND": backend}
    block = (256, 128) if backend == "FLASH" else 128  # FlashAttention-4 processes two tiles of queries at a time

    def build(mask: FlashMask) -> Attention:
        blocks = create_block_mask(
            visible_pairs(mask),
            None,
            None,
            mask.row_count(),
            mask.kv_len,
            device="cuda",
            BLOCK_SIZE=block,
            _compile=True,
        )
        return lambda q, k, v: _compiled_flex(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=options)

    return build


def _flashmask(impl: str | None, deterministic: bool = False) -> Callable[[FlashMask], Attention]:
    """Return the builder of `flashmask_attention` with an implementation, None for its default."""

    def build(mask: FlashMask) -> Attention:
        fresh = FlashMask(mask.indices, mask.causal)  # without a cached plan
        plan_of(fresh, mask.row_count())
        return lambda q, k, v: flashmask_attention(q, k, v, fresh, impl=impl, deterministic=deterministic)

    return build


def _sdpa(backend: SDPBackend) -> Callable[[FlashMask], Attention]:
    """Return the builder of full or causal SDPA with a backend."""

    def build(mask: FlashMask) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=True)

        return attend

    return build


def _sdpa_dense(mask: FlashMask) -> Attention:
    """Build SDPA with the dense mask."""
    visible = mask.to_dense()
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def _fa4(mask: FlashMask) -> Attention:
    """Build full or causal FlashAttention-4."""
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=mask.causal)[0].transpose(1, 2)

    return attend


BUILDERS: dict[str, Callable[[FlashMask], Attention]] = {
    "flashmask": _flashmask(None),
    "flashmask_deterministic": _flashmask(None, deterministic=True),
    "flashmask_triton": _flashmask("triton"),
    "flex_attention": _flex(None),
    "flex_flash": _flex("FLASH"),
    "fa4": _fa4,
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_dense": _sdpa_dense,
}


def supports(name: str, family: str, length: int) -> bool:
    """Return whether a provider supports a mask of this family and length."""
    if name in ("fa4", "cudnn", "sdpa"):
        return family in ("full", "causal")
    return name != "sdpa_dense" or (length <= DENSE_LIMIT and family not in ("full", "causal"))


def inputs(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> list[Tensor]:
    """Draw q, k and v, which require gradients, and the gradient of the output."""
    q, k, v, dout = (
        torch.randn(batch, length, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: FlashMask) -> list[Tensor]:
    """Compute output and gradients in float64, one key-value head at a time to save memory."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(k.shape[1]):
        queries = slice(head * group, (head + 1) * group)
        places = ((q, queries), (k, slice(head, head + 1)), (v, slice(head, head + 1)))
        one = [x.detach()[:, place].double().requires_grad_() for x, place in places]
        out = flashmask_attention(one[0], one[1], one[2], mask, impl="reference")
        heads.append([out.detach(), *torch.autograd.grad(out, one, dout[:, queries].double())])
    return [torch.cat(x, 1) for x in zip(*heads, strict=True)]


def check(names: Sequence[str], family: str, dim: int, group: int) -> None:
    """Exit unless every provider agrees with float64 on one row of all heads."""
    mask = make_mask(family, CHECKED)
    q, k, v, dout = inputs(1, HIDDEN // dim, HIDDEN // dim // group, CHECKED, dim)
    expected = _exact(q, k, v, dout, mask)
    for name in names:
        if not supports(name, family, CHECKED):
            continue
        out = BUILDERS[name](mask)(q, k, v)
        for what, one, other in zip(
            ("out", "dq", "dk", "dv"), [out, *torch.autograd.grad(out, (q, k, v), dout)], expected, strict=True
        ):
            error = float((one.double() - other).detach().norm() / other.norm())
            if not error < 1e-2:
                raise SystemExit(f"{name} is wrong under {family}, head_dim {dim}: {what} is off by {error:.1e}")


def mask_cost(name: str, mask: FlashMask, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds and peak MiB that a provider needs to prepare a mask from its column vectors."""
    if name in ("fa4", "cudnn", "sdpa"):
        return 0.0, 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = interleaved_medians({name: lambda: BUILDERS[name](mask)}, repeats)[name]
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    names: Sequence[str], family: str, mask: FlashMask, dim: int, group: int, repeats: int, warmup: int
) -> list[dict[str, object]]:
    """Return a row per provider: milliseconds and TFLOP/s, forward and backward."""
    length = mask.kv_len
    batch, heads = max(1, TOKENS // length), HIDDEN // dim
    q, k, v, dout = inputs(batch, heads, heads // group, length, dim)
    pairs = sum(int((end - start).clamp(min=0).sum()) for start, end in mask.visible_intervals())
    sparsity, density = mask.sparsity(), pairs / length**2
    flops = 4 * batch * heads * length * length * dim
    table = {name: BUILDERS[name](mask) for name in names if supports(name, family, length)}
    with torch.no_grad():
        forward = interleaved_medians({n: lambda a=a: a(q, k, v) for n, a in table.items()}, repeats, warmup)
    outs = {n: a(q, k, v) for n, a in table.items()}
    backward = interleaved_medians(
        {n: lambda o=o: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True) for n, o in outs.items()},
        repeats,
        warmup,
    )
    del outs
    rows: list[dict[str, object]] = []
    for name in table:
        mask_ms, mask_mib = mask_cost(name, mask, repeats)
        both = forward[name] + backward[name]
        rows.append(
            {
                "mask": family, "length": length, "head_dim": dim, "heads": heads, "kv_heads": heads // group,
                "batch": batch, "sparsity": round(sparsity, 4), "visible_pairs": round(density, 4), "provider": name,
                "forward_ms": round(forward[name], 3), "backward_ms": round(backward[name], 3),
                "forward_tflops": round((1 - sparsity) * flops / forward[name] / 1e9, 1),
                "backward_tflops": round(2.5 * (1 - sparsity) * flops / backward[name] / 1e9, 1),
                "both_tflops": round(3.5 * (1 - sparsity) * flops / both / 1e9, 1),
                "both_tflops_of_pairs": round(3.5 * density * flops / both / 1e9, 1),
                "mask_ms": round(mask_ms, 3), "mask_mib": round(mask_mib, 2),
            }
        )  # fmt: skip
    return rows


def sweep(length: int) -> list[FlashMask]:
    """Build causal document masks of 1 to 128 documents, from the sparsity of a causal mask upwards."""
    swept = []
    for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128):
        generator = torch.Generator().manual_seed(count)
        swept.append(masks.causal_document(random_lengths(length, count, generator)).to("cuda"))
    return swept


def _compile(name: str, family: str, length: int, dim: int, group: int) -> None:
    """Run a provider once on a shape, to fill the compilation caches on disk."""
    batch = 1 if length == CHECKED else max(1, TOKENS // length)
    kv_heads = HIDDEN // dim // group
    q, k, v, dout = inputs(batch, kv_heads * group, kv_heads, length, dim)
    attend = BUILDERS[name](make_mask(family, length))
    with torch.no_grad():
        attend(q, k, v)
    torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def precompile(names: Sequence[str], shapes: list[tuple[str, int, int, int]], jobs: int) -> None:
    """Compile FlexAttention for every kind of mask and every shape in several processes; each takes half a minute."""
    work = {}
    for name in (name for name in names if name.startswith("flex")):
        for family, length, dim, group in [*shapes, *((f, CHECKED, d, g) for f, _, d, g in shapes)]:
            if supports(name, family, length):
                mask = FAMILIES[family](1024, torch.Generator().manual_seed(0))
                work.setdefault((name, mask.causal, mask.indices.shape[-1], length, dim, group), family)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(_compile, name, family, length, dim, group)
            for (name, _, _, length, dim, group), family in work.items()
        ]
        for task in tasks:
            task.result()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--providers", nargs="+", default=list(BUILDERS), choices=BUILDERS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--group", type=int, default=1, help="query heads per key-value head, 4 for 32/8")
    parser.add_argument("--sweep", action="store_true", help="run causal documents of every sparsity, not --masks")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="processes that precompile FlexAttention")
    parser.add_argument("--compile-only", action="store_true", help="stop after compiling, for a later run")
    parser.add_argument("--csv", help="file to write the rows to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    names = list(arguments.providers)
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        print("flash-attn-4 is not installed: no fa4 and no flex_flash")
        names = [name for name in names if name not in ("fa4", "flex_flash")]
    torch.manual_seed(0)
    families = ["causal_document"] if arguments.sweep else arguments.masks
    shapes = [(f, s, d, arguments.group) for d in arguments.dims for s in arguments.lengths for f in families]
    if arguments.jobs > 1 or arguments.compile_only:
        precompile(names, shapes, arguments.jobs)
    if arguments.compile_only:
        return
    for dim in arguments.dims:
        for family in families:
            check(names, family, dim, arguments.group)
    print("every provider agrees with float64", flush=True)
    rows = []
    for family, length, dim, group in shapes:
        for mask in sweep(length) if arguments.sweep else [make_mask(family, length)]:
            found = measure(names, family, mask, dim, group, arguments.repeats, arguments.warmup)
            append_rows(arguments.csv, rows, found)


if __name__ == "__main__":
    main()
