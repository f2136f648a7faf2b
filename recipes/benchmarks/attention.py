"""Time attention alone beside its peers: a table of cases, one loop, correctness before time.

    python recipes/benchmarks/attention.py --csv masks.csv                    # the paper's masks, 8K and 32K tokens
    python recipes/benchmarks/attention.py --lengths 8192 --dims 128 --masks causal_document --repeats 3   # a minute
    python recipes/benchmarks/attention.py ragged --masks few short --providers flashmask flex_attention
    python recipes/benchmarks/attention.py --mask my_masks.py:my_mask         # of your own: tokens -> FlashMask

Studies:

- `masks`: masks and shapes of the FlashMask paper (appendix A.5) at half of its tokens. `sweep`: 1 to 128 documents.
- `ragged`: many short documents, few heads, chunks of queries, odd lengths; times of the GPU alone.
- `short`: rows of 128 to 1,024 tokens. `decode`: one query per sequence, each call on another key-value cache.
- `plan`: only the tile plan of a mask.
- `dropout`: dropout 0.1 beside none; each draws its own pattern, and only time is compared.
- `sparse`: dynamic sparse attention with its sorting (Pagliardini et al. 2023, figures 3 and 7).

Tensors are bfloat16, times medians of turns. Output and gradients of a provider (`peers.py`) are first compared with
float64 in the first key-value head of the first row and the last of the last row. `status` is "timed" or the reason
why not.

TFLOP/s count 128 x 128 tiles that are not hidden, as in the paper. `mask_ms` and `mask_mib` are what a new mask costs.
`eager_us` is a call with its launch, `host_us` the time in which the host issues it, `graph_us` a call in a CUDA graph.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from harness import (
    Flag,
    Rows,
    count,
    forget_peak,
    gpu_milliseconds,
    graph_of,
    host_milliseconds,
    interleaved_medians,
    milliseconds,
    program,
    random_lengths,
    synchronize,
    whole,
)
from peers import PROVIDERS, Attention, CannotExpress, Case, planned
from torch import Tensor

from flashmask_hf import FlashMask, masks
from flashmask_hf._call.operators import make_plan

EXACT_ROWS = 1024  # query rows that float64 takes at a time
BLOCK = 128  # rows of one error
TOLERANCE = 2e-2  # largest relative error of a block
CALLS = 8  # calls of a CUDA graph
CACHES = 2**28  # bytes of the caches that decoding reads in turn, more than the L2 cache
DEFAULT = ("flashmask", "flashmask_triton", "flex_attention", "flex_flash", "fa4", "cudnn_flex", "cudnn")
PASSES = {
    "forward_ms": 4,
    "backward_ms": 4,
    "forward_tflops": 1,
    "backward_tflops": 1,
    "both_tflops": 1,
    "mask_ms": 3,
    "mask_mib": 2,
}  # columns and their digits
CALL = ("passes", "eager_us", "host_us", "graph_us")
DIMS: Any = [(64, 64), (128, 128)]  # head_dim of queries and of values

torch._functorch.config.donated_buffer = False  # to time one compiled backward many times


class Shape(NamedTuple):
    """Sizes of the tensors of a case."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    v_head_dim: int

    def flops(self, pairs: float) -> tuple[float, float]:
        """Return the FLOPs forward and backward (5 products) of visible pairs per row and head."""
        pairs *= 2 * self.batch * self.heads
        return pairs * (self.head_dim + self.v_head_dim), pairs * (3 * self.head_dim + 2 * self.v_head_dim)


class Work(NamedTuple):
    """A case."""

    title: str
    family: str
    make: Callable[[], FlashMask]
    shape: Shape


def widths(text: str) -> tuple[int, int]:
    dim, _, v_dim = text.partition("/")
    return count(dim), count(v_dim or dim)


# ----- masks


def documents(length: int, generator: torch.Generator) -> list[int]:
    low, high = (3, 7) if length <= 8192 else (10, 14) if length <= 32768 else (11, 15)
    count = int(torch.randint(low, high + 1, (1,), generator=generator))
    return random_lengths(length, count, generator)


def _question(length: int, generator: torch.Generator) -> tuple[int, list[int]]:
    parts = random_lengths(length, 1 + int(torch.randint(2, 7, (1,), generator=generator)), generator, minimum=1)
    return parts[0], parts[1:]


def _qk_sparse(length: int, generator: torch.Generator) -> FlashMask:
    q_keep, k_keep = (torch.rand(1, 1, length, generator=generator) >= 0.02 for _ in range(2))
    return masks.qk_sparse(q_keep, k_keep)


def _intervals(length: int, generator: torch.Generator, n: int) -> FlashMask:
    """Draw, per 128 keys, one interval of visible rows (n = 2) or two of hidden rows (n = 4)."""
    bounds = torch.randint(0, length + 1, (1, 1, -(-length // 128), n), generator=generator).sort(-1).values
    if n == 2:
        bounds = bounds.flip(-1)  # hidden from the end on, and before the start
    return FlashMask(bounds.repeat_interleave(128, 2)[:, :, :length].int(), False)


def _windows(length: int, generator: torch.Generator) -> FlashMask:
    share = 2 ** int(torch.randint(0, 7, (1,), generator=generator))
    return masks.sliding_window(length, -(-length // share))


Family = Callable[[int, torch.Generator], FlashMask]
FAMILIES: dict[str, Family] = {
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

OTHERS: dict[str, Family] = {
    "global_sliding_window_both_ways": lambda s, g: masks.global_sliding_window(s, s // 16, s // 16, causal=False),
    "random_intervals": lambda s, g: _intervals(s, g, 2),
    "hidden_intervals": lambda s, g: _intervals(s, g, 4),
    "window_per_head": _windows,
    "intervals_per_head": lambda s, g: _intervals(s, g, 2),
}
"""Families in which key tiles meet often in the gradient of q; only `--masks` names them."""
PER_HEAD = ("window_per_head", "intervals_per_head")  # families that draw a mask for each query head


def make_mask(family: str, length: int, heads: int = 1) -> FlashMask:
    generator = torch.Generator().manual_seed(length)
    make = (FAMILIES | OTHERS)[family]
    drawn = [make(length, generator) for _ in range(heads if family in PER_HEAD else 1)]
    return FlashMask(torch.cat([mask.indices for mask in drawn], 1), drawn[0].causal)


def equal_heads(length: int, count: int = 4, minimum: int = 128) -> list[int]:
    return random_lengths(length, count, torch.Generator().manual_seed(length), minimum)


def lognormal(length: int) -> list[int]:
    generator, found = torch.Generator().manual_seed(length), list[int]()
    while (left := length - sum(found)) > 0:
        drawn = float(torch.empty(1).log_normal_(5.545, 1.0, generator=generator))  # exp(5.545) = 256
        found.append(min(left, max(1, round(drawn))))
    return found


def cached_keys(batch: int, length: int) -> FlashMask:
    """Return the mask of one query per sequence over keys that are padded on the left."""
    first = torch.arange(batch)[:, None] * 16
    hidden = (torch.arange(length) >= first).int()  # the row where a key becomes hidden: 0 hides it
    return FlashMask(hidden[:, None, :, None].contiguous(), causal=True, q_len=1)


# ----- the table of cases


def _shapes(a: argparse.Namespace) -> Iterator[Shape]:
    for dims in a.dims or DIMS:
        for length in a.lengths:
            kv_heads = max(1, round(a.hidden / dims[0] / a.group))
            yield Shape(max(1, a.tokens // length), kv_heads * a.group, kv_heads, length, *dims)


def _masks(a: argparse.Namespace) -> Iterator[Work]:
    for shape in _shapes(a):
        for family in a.masks or FAMILIES:
            yield Work(family, family, partial(make_mask, family, shape.length, shape.heads), shape)


def _sweep(a: argparse.Namespace) -> Iterator[Work]:
    for shape in _shapes(a):
        for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128):
            drawn = random_lengths(shape.length, number, torch.Generator().manual_seed(number))
            yield Work(f"{number} documents", "causal_document", partial(masks.causal_document, drawn), shape)


_DOCUMENTS, _BIDIRECTIONAL = ("causal_document", masks.causal_document), ("document", masks.document)
# title: ((family, function), its arguments, query heads, key-value heads, head_dim); q_len is in the arguments
RAGGED: dict[str, tuple[tuple[str, Callable[..., FlashMask]], tuple[Any, ...], int, int, int]] = {
    "short 64 x 512": (_DOCUMENTS, ([512] * 64,), 16, 16, 128),
    "short 64 x 512, head_dim 64": (_DOCUMENTS, ([512] * 64,), 16, 16, 64),
    "short 64 x 512, both ways": (_BIDIRECTIONAL, ([512] * 64,), 16, 16, 128),
    "short 256 x 128": (_DOCUMENTS, ([128] * 256,), 16, 16, 128),
    "short lognormal": (_DOCUMENTS, (lognormal(32768),), 16, 16, 128),
    "short lognormal, both ways, head_dim 64": (_BIDIRECTIONAL, (lognormal(32768),), 16, 16, 64),
    "grouped 2K": (_DOCUMENTS, (equal_heads(2048),), 32, 4, 128),
    "grouped 8K": (_DOCUMENTS, (equal_heads(8192),), 32, 4, 128),
    "grouped 8K, causal, head_dim 64": (("causal", masks.causal), (8192,), 32, 4, 64),
    "few 1 x 8K, causal": (("causal", masks.causal), (8192,), 1, 1, 128),
    "few 1 x 8K, causal, head_dim 64": (("causal", masks.causal), (8192,), 1, 1, 64),
    "few 2 x 8K": (_DOCUMENTS, (equal_heads(8192),), 2, 2, 128),
    "few 4 x 8K, window": (("sliding_window", masks.sliding_window), (8192, 512), 4, 4, 128),
    "few 1 x 32K, causal": (("causal", masks.causal), (32768,), 1, 1, 128),
    "few 1 x 32K, window": (("sliding_window", masks.sliding_window), (32768, 1024), 1, 1, 128),
    "few 2 x 32K": (_DOCUMENTS, (equal_heads(32768),), 2, 2, 128),
    "few 4 x 32K, head_dim 64": (_DOCUMENTS, (equal_heads(32768),), 4, 4, 64),
    "chunk 1K of 16K, causal": (("causal", partial(masks.causal, q_len=1024)), (16384,), 8, 8, 128),
    "chunk 1K of 16K, window": (
        ("sliding_window", partial(masks.sliding_window, q_len=1024)), (16384, 4096), 8, 8, 128,
    ),
    "across 1K to 16K": (("full", partial(masks.full, q_len=1024)), (16384,), 8, 8, 128),
    "across 16K to 1K": (("full", partial(masks.full, q_len=16384)), (1024,), 8, 8, 128),
    "odd 8191": (_DOCUMENTS, (equal_heads(8191),), 16, 16, 128),
    "odd 5000, both ways, head_dim 64": (_BIDIRECTIONAL, (equal_heads(5000),), 16, 16, 64),
}  # fmt: skip
"""The first word of a title is its group, which `--masks` names."""


def _ragged(a: argparse.Namespace) -> Iterator[Work]:
    for title, ((family, function), given, heads, kv_heads, dim) in RAGGED.items():
        if not a.masks or title.split()[0] in a.masks:
            length = sum(given[0]) if isinstance(given[0], list) else given[0]
            yield Work(title, family, partial(function, *given), Shape(1, heads, kv_heads, length, dim, dim))


def _short(a: argparse.Namespace) -> Iterator[Work]:
    for dims, batch, length in product(a.dims or DIMS, a.batches or [1, 8], a.lengths):
        mask = partial(masks.causal_document, equal_heads(length, minimum=length // 8))
        yield Work(f"{batch} x {length}", "causal_document", mask, Shape(batch, 32, 32, length, *dims))


def _decode(a: argparse.Namespace) -> Iterator[Work]:
    for kv_heads, batch, length in product((8, 32), a.batches or [1, 8], a.lengths):
        make = partial(cached_keys, batch, length)
        yield Work(f"{batch} x {length}", "padding", make, Shape(batch, 32, kv_heads, length, 128, 128))


def _sparse(a: argparse.Namespace) -> Iterator[Work]:
    heads = max(1, a.hidden * 3 // 4 // 64)
    for length in a.lengths:
        yield Work(f"{length}", "causal", partial(masks.causal, length), Shape(4, heads, heads, length, 64, 64))


class Study(NamedTuple):
    """How the cases of a study are made and measured."""

    cases: Callable[[argparse.Namespace], Iterator[Work]]
    providers: Sequence[str]
    repeats: int
    clock: Callable[[Callable[[], object]], float] | None
    """Clock of passes; None times single calls on the device, the host and in a CUDA graph."""
    lengths: Sequence[int] = (8192, 32768)


STUDIES = {
    "masks": Study(_masks, DEFAULT, 5, milliseconds),
    "sweep": Study(_sweep, ("flashmask",), 5, milliseconds),
    "ragged": Study(_ragged, ("flashmask", "flashmask_triton", "flex_attention"), 15, gpu_milliseconds),
    "short": Study(_short, ("flashmask", "flashmask_triton", "sdpa_dense", "sdpa", "flex_attention"), 41, None,
                   (128, 200, 256, 512, 1000, 1024)),
    "decode": Study(_decode, ("flashmask", "sdpa_dense", "sdpa"), 7, None, (1024, 4096, 16384, 65536, 131072)),
    "plan": Study(_masks, ("flashmask",), 31, None, (1024, 8192, 32768, 131072)),
    "dropout": Study(_masks, ("flashmask", "flashmask_triton", "flashmask_dropout", "sdpa", "sdpa_dropout",
                              "sdpa_dense", "sdpa_dense_dropout"), 5, milliseconds, (1024, 8192)),
    "sparse": Study(_sparse, ("sdpa", "cudnn", "flashmask", "hash_16", "drop_30", "drop_50"), 5, milliseconds,
                    [1024 << i for i in range(6)]),
}  # fmt: skip


Prepared = tuple[Callable[[], Attention], Attention]
"""Function that makes a mask, and the attention under it."""
Figures = dict[str, Rows]
"""Rows of figures by provider."""


# ----- correctness


def inputs(shape: Shape, q_len: int, device: str) -> list[Tensor]:
    batch, heads, kv_heads, kv_len, dim, v_dim = shape
    sizes = (q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim), (q_len, heads, v_dim)
    q, k, v, dout = (torch.randn(batch, *size, device=device, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def results_of(attend: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def corners(x: Tensor, kv_heads: int) -> list[Tensor]:
    """Return the first key-value head of the first row and the last of the last, [H, S, D]."""
    group = x.shape[1] // kv_heads
    return [x[0, :group], x[-1, -group:]]


def visible_in(case: Case, entry: int, head: int, rows: slice) -> Tensor:
    """Return the mask of some rows of a key-value head, bool [1 or group, rows, Skv]."""
    one = case.mask.indices.expand(case.q.shape[0], -1, -1, -1)[entry]
    if len(one) > 1:
        one = one.unflatten(0, (case.k.shape[1], -1))[head]
    return FlashMask(one[None], case.mask.causal, q_len=case.mask.q_len).rows(rows).to_dense()[0]


def exact(case: Case, dout: Tensor, visible: Callable[[Case, int, int, slice], Tensor] = visible_in) -> list[Tensor]:
    """Compute output and gradients of both `corners` in float64, `EXACT_ROWS` rows at a time."""
    kv_heads, results = case.k.shape[1], []
    given = [corners(x.detach(), kv_heads) for x in (case.q, case.k, case.v, dout)]
    for place, (q, k, v, upstream) in zip((0, -1), zip(*given, strict=True), strict=True):
        found = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (upstream, q, k, v)]
        for first in range(0, q.shape[1], EXACT_ROWS):
            rows = slice(first, min(first + EXACT_ROWS, q.shape[1]))
            one, two, three = (x.double().requires_grad_() for x in (q[:, rows], k, v))
            seen = visible(case, place, place, rows)
            scores = (one @ two.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
            weights = scores.softmax(-1).masked_fill(~seen, 0.0)
            out = weights @ three
            gradients = torch.autograd.grad(out, (one, two, three), upstream[:, rows].double())
            found[0][:, rows], found[1][:, rows] = out.detach(), gradients[0]
            found[2] += gradients[1]
            found[3] += gradients[2]
        results.append(found)
    return [torch.cat(one) for one in zip(*results, strict=True)]


def error_of(one: Tensor, other: Tensor) -> float:
    """Return the largest error of `BLOCK` rows, relative to their norm, or the mean norm if greater."""

    def norms(x: Tensor) -> Tensor:
        squares = x.double().square().sum(-1)
        return F.pad(squares, (0, -x.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1).sqrt()

    sizes = norms(other)
    return float((norms(one - other) / torch.maximum(sizes, sizes.mean())).max())


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    names = ("out", "dq", "dk", "dv")[: len(found)]
    errors = {what: error_of(one, other) for what, one, other in zip(names, found, expected, strict=True)}
    wrong = [f"{what} by {error:.1e}" for what, error in errors.items() if not error <= TOLERANCE]
    return f"differs: {', '.join(wrong)}" if wrong else ""


def admit(name: str, case: Case, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> Prepared | str:
    """Return what makes a provider's mask, and its attention, or the status."""
    provider, kv_heads = PROVIDERS[name], case.k.shape[1]
    if not provider.installed():
        return "not installed"
    try:
        make = provider.prepare(case)
        attend = make()
        if tensors[0].shape[2] == 1:  # decoding has no gradients
            with torch.no_grad():
                found = [attend(*tensors[:3])]
        else:
            found = results_of(attend, tensors)
        synchronize()
    except CannotExpress as reason:
        return f"cannot: {reason}"
    except Exception as error:  # a peer's error must not end the run of the others
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not provider.checked:
        return make, attend
    if provider.visible is not None:
        expected = exact(case, tensors[3], provider.visible)
    heads = [torch.cat(corners(x, kv_heads)) for x in found]
    return difference(heads, expected[: len(heads)]) or (make, attend)


# ----- the loop


def measure(study: Study, names: Sequence[str], work: Work, a: argparse.Namespace) -> Rows:
    mask = work.make().to(a.device)
    rows = mask.row_count()
    tensors = inputs(work.shape, rows, a.device)
    case = Case(work.family, mask, *tensors[:3])
    expected = exact(case, tensors[3])
    admitted = {name: admit(name, case, tensors, expected) for name in names}
    del expected
    table = {name: found for name, found in admitted.items() if not isinstance(found, str)}
    sparsity = mask.sparsity()
    facts: dict[str, object] = {"case": work.title, "mask": work.family, "q_len": rows, **work.shape._asdict()}
    facts["sparsity"] = round(sparsity, 4)
    if study.clock is None:
        figures = time_calls(table, case, tensors, a)
    else:
        flops = work.shape.flops(rows * work.shape.length * (1 - sparsity))
        figures = time_passes(table, tensors, flops, study.clock, a)
    nothing = dict.fromkeys(CALL if study.clock is None else PASSES, "")
    found = Rows()
    for name in names:
        state = admitted[name] if isinstance(admitted[name], str) else "timed"
        version = PROVIDERS[name].version() if state == "timed" else ""
        row = {**facts, "provider": name, "version": version, "status": state}
        found += [{**row, **nothing, **one} for one in figures.get(name, [{}])]
    return found


def time_passes(
    table: dict[str, Prepared],
    tensors: Sequence[Tensor],
    flops: tuple[float, float],
    clock: Callable[[Callable[[], object]], float],
    a: argparse.Namespace,
) -> Figures:
    """Return `PASSES` by provider."""
    *qkv, dout = tensors
    forward = interleaved_medians({n: partial(x, *qkv) for n, (_, x) in table.items()}, a.repeats, a.warmup, clock)
    outs = {n: x(*qkv) for n, (_, x) in table.items()}
    calls = {n: partial(torch.autograd.grad, out, qkv, dout, retain_graph=True) for n, out in outs.items()}
    backward = interleaved_medians(calls, a.repeats, a.warmup, clock)
    del outs, calls
    found: Figures = {}
    for name, (make, _) in table.items():
        one, two = forward[name], backward[name]
        cost = mask_cost(make) if PROVIDERS[name].makes_mask else (0.0, 0.0)
        rates = (x / 1e9 for x in (flops[0] / one, flops[1] / two, sum(flops) / (one + two)))
        values = zip(PASSES.items(), (one, two, *rates, *cost), strict=True)
        found[name] = [{column: round(value, digits) for (column, digits), value in values}]
    return found


def mask_cost(make: Callable[[], Attention]) -> tuple[float, float]:
    before = torch.cuda.memory_allocated()
    forget_peak()
    median = interleaved_medians({"": make}, 3, 1)[""]
    return median, (torch.cuda.max_memory_allocated() - before) / 2**20


def time_calls(table: dict[str, Prepared], case: Case, tensors: Sequence[Tensor], a: argparse.Namespace) -> Figures:
    """Return `CALL` of a forward, and of both passes unless it decodes, by provider."""
    *qkv, dout = tensors
    layers = [tuple(qkv)]
    decodes = case.q.shape[2] == 1
    if decodes:
        size = 2 * case.k.numel() * case.k.element_size()
        copies = max(1, min(32, CACHES // size))
        layers = [tuple(torch.randn_like(x) for x in qkv) for _ in range(copies)]
    turn = iter(range(10**9))

    def call(attend: Attention, passes: str, number: int | None = None) -> object:
        given = layers[(next(turn) if number is None else number) % len(layers)]
        return attend(*given) if passes == "forward" else torch.autograd.grad(attend(*given), qkv, dout)

    public = {name: attend for name, (_, attend) in table.items()}
    captured = {name: planned(name, case) or attend for name, attend in public.items()}
    kinds = ["forward"] if decodes else ["forward", "both"]
    with torch.set_grad_enabled(not decodes):
        calls = {(n, kind): partial(call, x, kind) for n, x in public.items() for kind in kinds}
        eager = interleaved_medians(calls, a.repeats, a.warmup)
        host = interleaved_medians(calls, a.repeats, a.warmup, host_milliseconds)
        replayed: dict[tuple[str, str], float] = {}
        count = max(CALLS, len(layers))
        if torch.cuda.is_available():
            layers_of = {key: [partial(call, captured[key[0]], key[1], i) for i in range(count)] for key in calls}
            graphs = {key: graph_of(made) for key, made in layers_of.items()}
            replayed = interleaved_medians({key: graph.replay for key, graph in graphs.items()}, a.repeats, a.warmup)
    found: Figures = {}
    for name, kind in calls:
        row: dict[str, object] = {"passes": kind, "eager_us": round(1000 * eager[name, kind], 1)}
        row["host_us"] = round(1000 * host[name, kind], 1)
        row["graph_us"] = round(1000 * replayed[name, kind] / count, 2) if replayed else ""
        found.setdefault(name, []).append(row)
    return found


def measure_plan(work: Work, a: argparse.Namespace) -> Rows:
    mask, length = work.make().to(a.device), work.shape.length
    build, row = partial(make_plan, mask.indices, mask.causal, length), {"mask": work.family, "length": length}
    if a.device == "cpu":
        build()
        return [{**row, "graph_us": ""}]
    median = interleaved_medians({"": graph_of([build] * CALLS).replay}, a.repeats)[""]
    return [{**row, "graph_us": round(1000 * median / CALLS, 2)}]


@program(
    __doc__,
    study=Flag("masks", STUDIES, name="study"),
    masks=Flag([], help="families of masks, or groups of the study ragged"),
    mask=Flag(help="a mask of your own: FILE.py:FUNCTION, tokens -> FlashMask"),
    providers=Flag([], PROVIDERS),
    lengths=Flag([], kind=count),
    dims=Flag([], None, "such as 128 or 192/128", widths),
    batches=Flag([], None, "rows of a call of the studies short and decode", count),
    group=Flag(1, help="query heads per key-value head, 4 for 32/8"),
    hidden=Flag(4096, help="query heads times head_dim, or near it"),
    tokens=Flag(65536, help="tokens of all rows of a case; at least one row"),
    repeats=Flag(kind=count),
    warmup=Flag(1, None, "turns before them, beside the one that is checked", whole),
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    study = STUDIES[a.study]
    for name in ("repeats", "providers", "lengths"):
        setattr(a, name, getattr(a, name) or getattr(study, name))
    if a.study == "plan":
        a.dims = [(64, 64)]
    elif a.study == "dropout":
        a.masks = a.masks or ["full", "document", "causal"]
    if a.mask:
        file, _, function = a.mask.partition(":")
        if not Path(file).is_file() or function not in (own := runpy.run_path(file)):
            raise SystemExit(f"--mask must be FILE.py:FUNCTION, got {a.mask}. Name a file, and a function in it.")
        FAMILIES[function] = lambda length, generator: own[function](length)
        a.masks = [function]
    known = {title.split()[0] for title in RAGGED} if a.study == "ragged" else {*FAMILIES, *OTHERS}
    if not set(a.masks) <= known:
        raise SystemExit(f"--masks of {a.study} must be some of {', '.join(sorted(known))}, got {' '.join(a.masks)}")
    torch.manual_seed(0)
    for work in study.cases(a):
        yield measure_plan(work, a) if a.study == "plan" else measure(study, a.providers, work, a)


if __name__ == "__main__":
    main()
