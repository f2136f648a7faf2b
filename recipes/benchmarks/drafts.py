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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import torch
from harness import Flag, Rows, contest, free_memory, program, random_lengths
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmask_hf import flashmask_attention, masks
from flashmask_hf.drafts import eagle3_attention

HEADS, KV_HEADS, WIDTH = 32, 8, 128
STEPS, BLOCK = 7, 16
FAR = 2e-2  # of bfloat16's 2^-8, over several sums

_blocks = torch.compile(create_block_mask, dynamic=True)  # else its sorts compile for a minute per length
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
    size, anchors = case.document.shape[0], torch.tensor(case.anchors, device=q.device)
    starts = torch.searchsorted(case.document, case.document[anchors])  # of documents: no load per key

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block = row // BLOCK
        draft = key - size - block * BLOCK
        return ((key >= starts[block]) & (key < anchors[block])) | ((draft >= 0) & (draft < BLOCK))

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


def compare(title: str, results: dict[str, list[Tensor]]) -> None:
    """Exit unless gradients of all providers agree."""
    for first, other in pairwise(results.values()):
        for i, (x, y) in enumerate(zip(first, other, strict=True)):
            far = ((x - y).float().norm() / y.float().norm()).item()
            if far > FAR:
                raise SystemExit(f"{title}: gradient {i} differs by {far:.3f} between providers")


def measure(task: str, length: int, a: argparse.Namespace) -> Rows:
    generator = torch.Generator().manual_seed(length)
    lengths = random_lengths(length, 4, generator, minimum=32)
    anchors = torch.randperm(length, generator=generator)[: a.blocks].sort().values.tolist()
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(a.device)
    case, tensors = Case(lengths, anchors, document), tensors_of(task, length, a)

    def turn(name: str) -> list[Tensor]:
        return [x.detach() for x in torch.autograd.grad(TASKS[task][name](case, tensors), tensors)]

    calls = {name: partial(turn, name) for name in a.providers}
    found, rows = contest(calls, partial(compare, f"{task}, {length} tokens"), a.repeats, a), Rows()
    for name in a.providers:
        made, row = found[name], {"task": task, "length": length, "blocks": a.blocks, "implementation": name}
        if isinstance(made, str):
            rows.append({**row, "status": made, "milliseconds": "", "peak_gib": ""})
        else:
            peak = round(made.peak_gib - made.used_gib, 2)
            rows.append({**row, "status": "timed", "milliseconds": round(1000 * made.seconds, 2), "peak_gib": peak})
    return rows


PROVIDERS = ("flashmask", "flex_attention")


@program(
    __doc__,
    tasks=Flag([*TASKS], TASKS),
    lengths=[4096, 8192, 16384, 32768],
    blocks=Flag(512, help="draft blocks per row of DFlash"),
    providers=Flag(PROVIDERS, PROVIDERS),
    repeats=5,
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    for task, length in product(a.tasks, a.lengths):
        torch.compiler.reset()  # FlexAttention is slower when it is compiled for several lengths
        rows = measure(task, length, a)
        free_memory()
        yield rows


if __name__ == "__main__":
    main()
