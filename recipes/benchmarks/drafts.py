"""Attention layers of speculative drafters, mask making included: this package beside FlexAttention.

    python recipes/benchmarks/drafts.py --lengths 4096 8192 16384 32768 --csv drafts.csv
    python recipes/benchmarks/drafts.py --lengths 256 --blocks 4 --device cpu --providers flashmask  # tries the program

A turn is the forward and backward of one training step's attention in bfloat16, with the heads of Llama-3.1-8B (32
query heads, 8 key-value heads, head dim 128), on four documents: `eagle3` is a layer in 7 steps, step k over the keys
of steps 0..k; `dflash` a layer on blocks of 16 draft tokens, over the row and themselves.

`flashmask` makes one mask per turn. `flex_attention` runs as SpecForge calls it: keys of all steps concatenated, and a
compiled `BlockMask` per step. Gradients are compared before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from harness import GIB, Results, count, first_results, flags, free_memory, in_turns, parsed, random_lengths, time_left
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmask_hf import flashmask_attention, masks
from flashmask_hf.drafts import eagle3_attention

HEADS, KV_HEADS, WIDTH = 32, 8, 128
STEPS, BLOCK = 7, 16
FAR = 2e-2  # of bfloat16's 2^-8, over several sums

_blocks = torch.compile(create_block_mask)
_flex = torch.compile(flex_attention)
_eagle3 = torch.compile(eagle3_attention)


@dataclass(frozen=True)
class Case:
    """A packed row.

    Attributes:
        lengths: of its documents.
        anchors: of draft blocks, ascending.
        document: number of each token's document, [S].
    """

    lengths: list[int]
    anchors: list[int]
    document: Tensor


Step = Callable[[Case, list[Tensor]], Tensor]
"""From queries, keys and values to the weighted sum of outputs, float32."""


def eagle3_flashmask(case: Case, tensors: list[Tensor]) -> Tensor:
    q, k, v = tensors[:STEPS], tensors[STEPS : 2 * STEPS], tensors[2 * STEPS :]
    mask = masks.causal_document(case.lengths, device=q[0].device)
    attend = _eagle3 if mask.device.type == "cuda" else eagle3_attention
    return torch.stack(
        [attend(q[n], k[: n + 1], v[: n + 1], mask).float().mul(n + 1).sum() for n in range(STEPS)]
    ).sum()


def eagle3_flex(case: Case, tensors: list[Tensor]) -> Tensor:
    q, k, v = tensors[:STEPS], tensors[STEPS : 2 * STEPS], tensors[2 * STEPS :]
    size, document, outputs = q[0].shape[2], case.document, []

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        first = (key < size) & (row >= key) & (document[row] == document[key % size])
        return first | ((key >= size) & ((key - row) % size == 0))

    for n in range(STEPS):
        blocks = _blocks(sees, None, None, size, (n + 1) * size, device=q[0].device)
        keys, values = torch.cat(k[: n + 1], 2), torch.cat(v[: n + 1], 2)
        outputs.append(_flex(q[n], keys, values, block_mask=blocks, enable_gqa=True))
    return torch.stack([weight * out.float().sum() for weight, out in enumerate(outputs, 1)]).sum()


def dflash_flashmask(case: Case, tensors: list[Tensor]) -> Tensor:
    q, k, v = tensors
    mask = masks.draft_blocks(case.lengths, case.anchors, BLOCK, device=q.device)
    return flashmask_attention(q, k, v, mask).float().sum()


def dflash_flex(case: Case, tensors: list[Tensor]) -> Tensor:
    q, k, v = tensors
    document, size = case.document, case.document.shape[0]
    anchors = torch.tensor(case.anchors, device=q.device)

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        anchor, token = anchors[row // BLOCK], key.clamp(max=size - 1)
        before = (key < size) & (key < anchor) & (document[token] == document[anchor])
        return before | ((key >= size) & ((key - size) // BLOCK == row // BLOCK))

    blocks = _blocks(sees, None, None, q.shape[2], k.shape[2], device=q.device)
    return _flex(q, k, v, block_mask=blocks, enable_gqa=True).float().sum()


TASKS: dict[str, dict[str, Step]] = {
    "eagle3": {"flashmask": eagle3_flashmask, "flex_attention": eagle3_flex},
    "dflash": {"flashmask": dflash_flashmask, "flex_attention": dflash_flex},
}


def tensors_of(task: str, length: int, a: argparse.Namespace) -> list[Tensor]:
    """Return queries, keys and values, each of all steps, [1, heads, rows, WIDTH]."""
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if a.device == "cuda" else torch.float32
    rows = [(HEADS, length), (KV_HEADS, length), (KV_HEADS, length)]
    if task == "dflash":
        drafts = a.blocks * BLOCK
        rows = [(HEADS, drafts), (KV_HEADS, length + drafts), (KV_HEADS, length + drafts)]
    shapes = [(1, *shape, WIDTH) for shape in rows for _ in range(STEPS if task == "eagle3" else 1)]
    return [torch.randn(x, generator=generator).to(a.device, dtype).requires_grad_() for x in shapes]


def compare(results: dict[str, list[Tensor]], title: str) -> None:
    """Exit unless gradients of all providers agree. A function, else its variables hold gradients in the turns."""
    for first, other in pairwise(results.values()):
        for i, (x, y) in enumerate(zip(first, other, strict=True)):
            far = ((x - y).float().norm() / y.float().norm()).item()
            if far > FAR:
                raise SystemExit(f"{title}: gradient {i} differs by {far:.3f} between providers")


def measure(task: str, length: int, a: argparse.Namespace) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(length)
    lengths = random_lengths(length, 4, generator, minimum=32)
    anchors = torch.randperm(length, generator=generator)[: a.blocks].sort().values.tolist()
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(a.device)
    case, tensors = Case(lengths, anchors, document), tensors_of(task, length, a)

    def turn(name: str) -> list[Tensor]:
        return [x.detach() for x in torch.autograd.grad(TASKS[task][name](case, tensors), tensors)]

    calls = {name: partial(turn, name) for name in a.providers}
    results, found = first_results(calls)
    compare(results, f"{task}, {length} tokens")
    measured = {name: calls[name] for name in results}
    del results
    free_memory()
    before = torch.cuda.memory_allocated() / GIB if a.device == "cuda" else 0.0
    found |= in_turns(measured, a.repeats, a)
    rows = []
    for name in a.providers:
        row = {"task": task, "length": length, "blocks": a.blocks, "implementation": name}
        made = found[name]
        row |= {"status": made if isinstance(made, str) else "timed", "milliseconds": "", "peak_gib": ""}
        if not isinstance(made, str):
            row |= {"milliseconds": round(1000 * made.seconds, 2), "peak_gib": round(made.peak_gib - before, 2)}
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__, deadline=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768], help="tokens of a row")
    parser.add_argument("--blocks", type=int, default=512, help="draft blocks per row of DFlash")
    parser.add_argument("--providers", nargs="+", default=["flashmask", "flex_attention"])
    parser.add_argument("--repeats", type=count, default=5)
    a = parsed(parser, argv)
    results = Results(a.csv)
    for task in a.tasks:
        for length in a.lengths:
            if time_left(a) > 0:
                torch.compiler.reset()  # FlexAttention is slower when it is compiled for several lengths
                results.add(measure(task, length, a))
                free_memory()


if __name__ == "__main__":
    main()
