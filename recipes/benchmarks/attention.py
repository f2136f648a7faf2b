"""Time forward and backward of the kernels beside their peers on the twelve masks of the FlashMask paper.

    python recipes/benchmarks/attention.py --csv attention.csv   # 8K and 32K tokens, head_dim 64 and 128
    python recipes/benchmarks/attention.py --lengths 8192 --dims 128 --masks causal_document --repeats 3   # a minute
    python recipes/benchmarks/attention.py --dims 192/128 --jobs 8   # queries and keys of 192, values of 128
    python recipes/benchmarks/attention.py --providers flashmask flashmask_deterministic --masks intervals_per_head

Masks and shapes are the paper's (appendix A.5) at half of its tokens: 64K in all, hidden size 4096 or the nearest that
the heads divide, bfloat16. Documents are drawn once per length (A.5.2). Times are medians of turns in which every
provider runs once. FLOPs are counted in two ways: on the 128 x 128 tiles that are not hidden, as in the paper
(4 * B * H * S^2 * D * (1 - sparsity) forward, 2.5 times that backward; values of another width count with theirs), and
on the visible pairs. `peers.py` names the providers.

Nothing is timed before it is checked. The output and the gradients of flashmask are compared with float64 on a shorter
row, and those of every other provider with flashmask's on the very tensors that are timed. `status` is "timed", or the
reason for a row without figures: "cannot: ..." where the provider has no form for the mask, "failed: ..." with its
error, "differs: ..." where it is wrong, "not installed". The forward is timed as in training, with what the backward
needs. Rows are written case by case, so a run that is stopped keeps its figures.

`mask_ms` and `mask_mib` are the time and memory that a provider needs to prepare a new mask from its column vectors
(`cudnn_flex`: the plan from row intervals that are there already). They are not part of the times of the attention.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from harness import append_rows, interleaved_medians, random_lengths, synchronize
from peers import PROVIDERS, Attention, CannotExpress, Case
from torch import Tensor

from flashmask_hf import FlashMask, flashmask_attention, masks

HIDDEN = 4096
TOKENS = 65536
CHECKED = 4352  # length of the row on which flashmask is compared with float64; every kernel supports it
EXACT_ROWS = 1024  # query rows that float64 takes at a time
CHECKED_HEADS = 4  # key-value heads of that row
BLOCK = 128  # rows whose error is looked at together
DEFAULT = ("flashmask", "flashmask_triton", "flex_attention", "flex_flash", "fa4", "cudnn_flex", "cudnn")
BASES = ("flashmask", "flashmask_triton")  # the first that agrees with float64 is what others are compared with
FIGURES = (
    "forward_ms",
    "backward_ms",
    "forward_tflops",
    "backward_tflops",
    "both_tflops",
    "both_tflops_of_pairs",
    "mask_ms",
    "mask_mib",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

START = time.perf_counter()

torch._functorch.config.donated_buffer = False  # to time one compiled backward many times
torch._dynamo.config.recompile_limit = 256  # FlexAttention compiles for every kind of mask and every shape


class Shape(NamedTuple):
    """Sizes of the tensors of a case."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    v_dim: int

    def __str__(self) -> str:
        return f"{self.length} {self.dim}/{self.v_dim}"

    def flops(self, visible: float) -> tuple[float, float]:
        """Return the FLOPs forward and backward if a share of the pairs is visible.

        Forward: queries with keys and probabilities with values. Backward: scores again, the gradients of queries and
        keys (D each), and those of values and probabilities (Dv each). With Dv = D they are 4 and 10 * B * H * S^2 * D.
        """
        pairs = 2 * self.batch * self.heads * self.length**2 * visible
        return pairs * (self.dim + self.v_dim), pairs * (3 * self.dim + 2 * self.v_dim)


def widths(text: str) -> tuple[int, int]:
    """Return the head_dim of queries and keys and that of values from "128" or "192/128"."""
    dim, _, v_dim = text.partition("/")
    return int(dim), int(v_dim or dim)


def shape_of(length: int, dims: tuple[int, int], group: int, hidden: int, tokens: int) -> Shape:
    """Return the shape with `tokens` tokens, or one row, and with heads that come nearest to the hidden size."""
    kv_heads = max(1, round(hidden / dims[0] / group))
    return Shape(max(1, tokens // length), kv_heads * group, kv_heads, length, *dims)


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


def _intervals(length: int, generator: torch.Generator, n: int) -> FlashMask:
    """Draw intervals of rows for each 128 keys: one that sees them if n is 2, two that do not if n is 4."""
    bounds = torch.randint(0, length + 1, (1, 1, -(-length // 128), n), generator=generator).sort(-1).values
    if n == 2:
        bounds = bounds.flip(-1)  # hidden from the end on, and before the start
    return FlashMask(bounds.repeat_interleave(128, 2)[:, :, :length].int(), False)


def _windows(length: int, generator: torch.Generator) -> FlashMask:
    """Draw a sliding window of 1/64 of the row up to all of it."""
    share = 2 ** int(torch.randint(0, 7, (1,), generator=generator))
    return masks.sliding_window(length, -(-length // share))


OTHERS: dict[str, Callable[[int, torch.Generator], FlashMask]] = {
    "global_sliding_window_both_ways": lambda s, g: masks.global_sliding_window(s, s // 16, s // 16, causal=False),
    "random_intervals": lambda s, g: _intervals(s, g, 2),
    "hidden_intervals": lambda s, g: _intervals(s, g, 4),
    "window_per_head": _windows,
    "intervals_per_head": lambda s, g: _intervals(s, g, 2),
}
"""Families in which key tiles meet often in the gradient of q; `--masks` names them, and those of `PER_HEAD`."""
PER_HEAD = ("window_per_head", "intervals_per_head")
"""Families that draw a mask for each query head."""


def checked(shape: Shape) -> Shape:
    """Return the shape on which flashmask is compared with float64: one row, of a few heads."""
    kv_heads = min(shape.kv_heads, CHECKED_HEADS)
    heads = shape.heads // shape.kv_heads * kv_heads
    return shape._replace(batch=1, heads=heads, kv_heads=kv_heads, length=min(CHECKED, shape.length))


def make_mask(family: str, length: int, heads: int = 1) -> FlashMask:
    """Build one mask of a family, on the GPU if there is one; one for each of the query heads if it is per head."""
    generator = torch.Generator().manual_seed(length)
    make = (FAMILIES | OTHERS)[family]
    drawn = [make(length, generator) for _ in range(heads if family in PER_HEAD else 1)]
    return FlashMask(torch.cat([mask.indices for mask in drawn], 1), drawn[0].causal).to(DEVICE)


def inputs(shape: Shape, q_len: int | None = None) -> list[Tensor]:
    """Draw q, k and v, which require gradients, and the gradient of the output; `q_len` None is the keys' length."""
    queries = shape.length if q_len is None else q_len
    q, k, v, dout = (
        torch.randn(shape.batch, length, heads, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        for length, heads, dim in (
            (queries, shape.heads, shape.dim),
            (shape.length, shape.kv_heads, shape.dim),
            (shape.length, shape.kv_heads, shape.v_dim),
            (queries, shape.heads, shape.v_dim),
        )
    )
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def results_of(attend: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return output and gradients."""
    q, k, v, dout = tensors
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def exact(tensors: Sequence[Tensor], mask: FlashMask) -> list[Tensor]:
    """Compute output and gradients in float64, some rows of one key-value head at a time to save memory."""
    q, k, v, dout = (x.detach() for x in tensors)
    group = q.shape[1] // k.shape[1]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (dout, q, k, v))
    for first in range(0, q.shape[2], EXACT_ROWS):
        rows = slice(first, min(first + EXACT_ROWS, q.shape[2]))
        some = mask.rows(rows)
        for head in range(k.shape[1]):
            here, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            part = some if mask.indices.shape[1] == 1 else FlashMask(some.indices[:, queries], some.causal)
            one, two, three = (x.double().requires_grad_() for x in (q[:, queries, rows], k[:, here], v[:, here]))
            found = flashmask_attention(one, two, three, part, impl="reference")
            out[:, queries, rows] = found.detach()
            gradients = torch.autograd.grad(found, (one, two, three), dout[:, queries, rows].double())
            dq[:, queries, rows] = gradients[0]
            dk[:, here] += gradients[1]
            dv[:, here] += gradients[2]
    return [out, dq, dk, dv]


def block_norms(x: Tensor) -> Tensor:
    """Return the norms of `BLOCK` rows of a head each: float [B, H, blocks] of [B, H, S, D]."""
    squares = torch.stack([entry.float().square().sum(-1) for entry in x])  # one batch entry at a time in float32
    return F.pad(squares, (0, -x.shape[2] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1).sqrt()


def error_of(one: Tensor, other: Tensor) -> float:
    """Return the largest error of `BLOCK` rows of a head, relative to their norm and at least to the average norm.

    It shows a tile that was masked wrongly, which the norm of the whole tensor would hide.
    """
    sizes = block_norms(other)
    return float((block_norms(one - other) / torch.maximum(sizes, sizes.mean())).max())


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """Return which of output and gradients differ by more than the tolerance, as text, or ""."""
    errors = {
        what: error_of(one, other) for what, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    }
    wrong = [f"{what} by {error:.1e}" for what, error in errors.items() if not error <= tolerance]
    return f"differs: {', '.join(wrong)}" if wrong else ""


def own_faults(names: Sequence[str], family: str, shape: Shape, tolerance: float) -> dict[str, str]:
    """Return what is wrong with providers of this package, beside float64 on one row; nothing for those in order.

    The second of `BASES` is looked at only if it is among the names, or needed because the first is wrong.
    """
    one = checked(shape)
    mask, tensors = make_mask(family, one.length, one.heads), inputs(one)
    expected = exact(tensors, mask)
    faults: dict[str, str] = {}
    for name in dict.fromkeys([*(name for name in names if name.startswith("flashmask")), *BASES]):
        if name in names or all(base in faults for base in BASES[: BASES.index(name)]):
            found = admit(name, Case(family, mask, *tensors[:3]), tensors, expected, tolerance)
            if isinstance(found, str):
                faults[name] = found
    return faults


def admit(
    name: str,
    case: Case,
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: float,
    select: Callable[[Sequence[Tensor]], Sequence[Tensor]] = list,
) -> tuple[Callable[[], Attention], Attention] | str:
    """Return what makes a provider's mask, and its attention under it, or why it is not timed.

    `select` returns the part of output and gradients that is compared with `expected`.
    """
    provider = PROVIDERS[name]
    if not provider.installed():
        return "not installed"
    try:
        make = provider.prepare(case)
        attend = make()
        found = results_of(attend, tensors)
        synchronize()
    except CannotExpress as reason:
        return f"cannot: {reason}"
    except Exception as error:  # a peer's error must not end the run of the others
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return difference(select(found), expected, tolerance) or (make, attend)


def mask_cost(name: str, make: Callable[[], Attention]) -> tuple[float, float]:
    """Return the median milliseconds and peak MiB that a provider needs to prepare a mask."""
    if not PROVIDERS[name].makes_mask:
        return 0.0, 0.0
    if DEVICE == "cpu":
        return interleaved_medians({name: make}, 3, 1)[name], 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = interleaved_medians({name: make}, 3, 1)[name]
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    names: Sequence[str],
    family: str,
    mask: FlashMask,
    shape: Shape,
    repeats: int,
    warmup: int,
    tolerance: float,
    faults: dict[str, str],
) -> list[dict[str, object]]:
    """Return a row per provider: milliseconds and TFLOP/s, forward and backward, or why there are none.

    Args:
        names: the providers.
        family: the mask's family.
        mask: the mask.
        shape: sizes of the tensors.
        repeats: turns of which the median is taken.
        warmup: turns before them, beside the one that is checked.
        tolerance: largest error of a provider that is timed.
        faults: what `own_faults` found.
    """
    log(f"{family} {shape}")
    *qkv, dout = tensors = inputs(shape)
    case = Case(family, mask, *qkv)
    base = next((name for name in BASES if name not in faults), None)
    states = dict.fromkeys(names, "failed: no kernel of flashmask agrees with float64") | faults
    table: dict[str, tuple[Callable[[], Attention], Attention]] = {}
    if base is not None:
        expected = results_of(PROVIDERS[base].prepare(case)(), tensors)
        for name in names:
            if name not in faults:
                admitted = admit(name, case, tensors, expected, tolerance)
                if isinstance(admitted, str):
                    states[name] = admitted
                else:
                    states[name], table[name] = "timed", admitted
            if states[name] != "timed":
                log(f"{family} {shape} {name}: {states[name]}")
        del expected
    forward = interleaved_medians({n: lambda a=a: a(*qkv) for n, (_, a) in table.items()}, repeats, warmup)
    outs = {n: a(*qkv) for n, (_, a) in table.items()}
    backward = interleaved_medians(
        {n: lambda o=o: torch.autograd.grad(o, qkv, dout, retain_graph=True) for n, o in outs.items()}, repeats, warmup
    )
    del outs
    sparsity = mask.sparsity()
    pairs = sum(int((end - start).clamp(min=0).sum()) for start, end in mask.visible_intervals())
    density = pairs / shape.length**2 / mask.indices.shape[1]
    of_tiles, of_pairs = shape.flops(1 - sparsity), shape.flops(density)
    rows: list[dict[str, object]] = []
    for name in names:
        row: dict[str, object] = {
            "mask": family, "length": shape.length, "head_dim": shape.dim, "v_head_dim": shape.v_dim,
            "heads": shape.heads, "kv_heads": shape.kv_heads, "batch": shape.batch, "sparsity": round(sparsity, 4),
            "visible_pairs": round(density, 4), "provider": name, "version": "", "status": states[name],
            **dict.fromkeys(FIGURES, ""),
        }  # fmt: skip
        if name in table:
            times = forward[name], backward[name]
            mask_ms, mask_mib = mask_cost(name, table[name][0])
            row |= {
                "version": PROVIDERS[name].version(),
                "forward_ms": round(times[0], 3), "backward_ms": round(times[1], 3),
                "forward_tflops": round(of_tiles[0] / times[0] / 1e9, 1),
                "backward_tflops": round(of_tiles[1] / times[1] / 1e9, 1),
                "both_tflops": round(sum(of_tiles) / sum(times) / 1e9, 1),
                "both_tflops_of_pairs": round(sum(of_pairs) / sum(times) / 1e9, 1),
                "mask_ms": round(mask_ms, 3), "mask_mib": round(mask_mib, 2),
            }  # fmt: skip
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Return a case in one line: TFLOP/s of both passes (forward / backward) by provider, or why there are none."""
    first = rows[0]
    cells = [
        f"{row['provider']} {row['both_tflops']} ({row['forward_tflops']} / {row['backward_tflops']})"
        if row["status"] == "timed"
        else f"{row['provider']} {str(row['status']).partition(':')[0]}"
        for row in rows
    ]
    return f"{first['mask']} {first['length']} {first['head_dim']}/{first['v_head_dim']}: {', '.join(cells)}"


def sweep(length: int) -> list[FlashMask]:
    """Build causal document masks of 1 to 128 documents, from the sparsity of a causal mask upwards."""
    swept = []
    for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128):
        generator = torch.Generator().manual_seed(count)
        swept.append(masks.causal_document(random_lengths(length, count, generator)).to(DEVICE))
    return swept


def run_once(name: str, family: str, shape: Shape) -> None:
    """Run a provider once on a shape, to fill the compilation caches on disk."""
    tensors = inputs(shape)
    results_of(
        PROVIDERS[name].prepare(Case(family, make_mask(family, shape.length, shape.heads), *tensors[:3]))(), tensors
    )
    torch.cuda.empty_cache()


def kernels_of(name: str, family: str, length: int) -> tuple[object, ...] | None:
    """Return what a provider's kernels depend on beside the width of the heads, or None if it compiles none."""
    mask = (FAMILIES | OTHERS)[family](1024, torch.Generator().manual_seed(0))
    if name.startswith("flex"):
        return mask.causal, length
    if name.startswith("flashmask"):
        return mask.causal, mask.indices.shape[-1]
    return {"fa4": (family,), "cudnn_flex": ()}.get(name)


def precompile(names: Sequence[str], cases: Sequence[tuple[str, Shape]], jobs: int) -> None:
    """Compile kernels for every case in several processes, which takes minutes one after another.

    A provider that fails here fails again in its turn, where its row says so.
    """
    work = {}
    for name in names:
        for family, shape in cases:
            kernels = kernels_of(name, family, shape.length)
            if kernels is not None and PROVIDERS[name].installed():
                work.setdefault((name, shape.dim, shape.v_dim, *kernels), (name, family, shape))
                if name.startswith("flashmask"):
                    work.setdefault((name, shape.dim, shape.v_dim, *kernels, "checked"), (name, family, checked(shape)))
    run_in_processes(run_once, list(work.values()), jobs)


def run_in_processes(run: Callable[..., None], tasks: Sequence[tuple[object, ...]], jobs: int) -> None:
    """Run a function for each task, whose first entry names a provider, so that its kernels are cached on disk."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process starts one more for every core
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # of cudnn.flex_attention
    ordered = sorted(tasks, key=lambda task: not str(task[0]).startswith("flex"))  # the slowest first
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, *task): task for task in ordered}
        for number, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            state = "compiled" if error is None else f"failed: {type(error).__name__}"
            log(f"{number} of {len(futures)}: {' '.join(map(str, futures[future]))}: {state}")


def log(text: str) -> None:
    """Print a line of progress, with the seconds since the start, to stderr."""
    print(f"[{time.perf_counter() - START:.0f} s] {text}", file=sys.stderr, flush=True)


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", default=list(FAMILIES), choices=[*FAMILIES, *OTHERS])
    parser.add_argument("--providers", nargs="+", default=list(DEFAULT), choices=PROVIDERS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--dims", nargs="+", type=widths, default=[(64, 64), (128, 128)], help="such as 128 or 192/128")
    parser.add_argument("--group", type=int, default=1, help="query heads per key-value head, 4 for 32/8")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="query heads times head_dim, or near it")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of all rows of a case; at least one row")
    parser.add_argument("--sweep", action="store_true", help="run causal documents of every sparsity, not --masks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="turns before them, beside the one that is checked")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="largest error of 128 rows, relative")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile kernels beforehand")
    parser.add_argument("--compile-only", action="store_true", help="stop after compiling, for a later run")
    parser.add_argument("--csv", help="file to write the rows to")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    arguments = parse(flags)
    torch.manual_seed(0)
    families = ["causal_document"] if arguments.sweep else arguments.masks
    shapes = [
        shape_of(length, dims, arguments.group, arguments.hidden, arguments.tokens)
        for dims in arguments.dims
        for length in arguments.lengths
    ]
    if arguments.jobs > 1 or arguments.compile_only:
        precompile(arguments.providers, [(family, shape) for shape in shapes for family in families], arguments.jobs)
    if arguments.compile_only:
        return
    rows: list[dict[str, object]] = []
    faults: dict[tuple[str, int, int], dict[str, str]] = {}
    for shape in shapes:
        for family in families:
            key = family, shape.dim, shape.v_dim
            if key not in faults:
                faults[key] = own_faults(arguments.providers, family, shape, arguments.tolerance)
            for mask in sweep(shape.length) if arguments.sweep else [make_mask(family, shape.length, shape.heads)]:
                found = measure(
                    arguments.providers,
                    family,
                    mask,
                    shape,
                    arguments.repeats,
                    arguments.warmup,
                    arguments.tolerance,
                    faults[key],
                )
                append_rows(arguments.csv, rows, found, silent=True)
                print(summary(found), flush=True)


if __name__ == "__main__":
    main()
