"""Measure training of embedding models, rerankers and image towers: real tokens per second and peak memory.

    python recipes/benchmarks/embeddings.py --csv embeddings.csv
    python recipes/benchmarks/embeddings.py --shapes bert-base --cases sentences --pairs 32 512
    python recipes/benchmarks/embeddings.py --shapes qwen2.5-vl-3b --cases tower --csv towers.csv
    python recipes/benchmarks/embeddings.py --shapes bert-tiny tiny --pairs 8 --query 32 --document 16 --device cpu

A step is forward and backward of the loss, without optimizer. Models have random weights, in bfloat16 (float32 on a
CPU), without dropout; decoders learn with gradient checkpointing. Real tokens count a query once for each document, and
no padding.

Cases: `sentences` and `passages` learn by in-batch negatives (MultipleNegativesRankingLoss). Encoders average a text's
tokens, decoders take its last. `sentences` have 5 to 197 tokens (log-normal, median 14, as docstrings); `passages` have
texts of 16 to 512 tokens (median 100) on one side. `rerank` learns which of 16 documents fits a query;
`rerank_scores` scores them without gradients. `tower` is the tower of a Qwen2.5-VL on `--images` images of 16 to 64
patches in height and width, each a token here.

`flashmask` runs flat rows, and computes a reranker's query once (`share_prefixes`). `sdpa` and `flash_attention_2`,
`_3` and `_4` pad; `_flat` runs FlashAttention on flat rows. Outputs must differ before by less than a fifth of what
another text makes.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from harness import Flag, Measured, Rows, available, contest, free_memory, program
from shapes import SHAPES, build_model
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from flashmask_hf import share_prefixes
from flashmask_hf.sharing import _pack

PADDED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
PROVIDERS = ("flashmask", *PADDED, *(f"{name}_flat" for name in PADDED[1:]))
LENGTHS = {"sentences": (14, 0.755, 5, 197), "passages": (100, 0.6, 16, 512)}  # median, sigma of the log, limits
CASES = (*LENGTHS, "rerank", "rerank_scores", "tower")
DOCUMENTS, YES, NO = 16, 5, 6
RATE = "tokens_per_second"


def draw_texts(case: str, count: int, vocab: int, generator: torch.Generator) -> list[Tensor]:
    median, sigma, least, most = LENGTHS[case]
    lengths = (median * (sigma * torch.randn(count, generator=generator)).exp()).round().clamp(least, most)
    return [torch.randint(10, vocab, (int(n),), generator=generator) for n in lengths]


def padded(texts: Sequence[Tensor], device: str) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([*texts], batch_first=True).to(device)
    ends = torch.tensor([len(text) for text in texts], device=device)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1], device=device) < ends[:, None]).long()}


def flat(texts: Sequence[Tensor], device: str) -> dict[str, Any]:
    """Return texts as sentence-transformers' flat row."""
    bounds = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None].to(device)
    row = {"input_ids": torch.cat([*texts])[None].to(device), "position_ids": positions}
    longest = max(map(len, texts))
    return row | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


class Embedder:
    """An embedding model, and texts in two columns."""

    def __init__(self, shape: str, case: str, pairs: int, a: Any):
        self.averages = shape.startswith("bert")
        options = {"checkpointing": not self.averages, "initializer_range": 0.05}
        self.model = build_model(shape, a.device, kind=AutoModel, **options)
        generator, vocab = torch.Generator().manual_seed(pairs), self.model.config.vocab_size
        columns = [draw_texts(one, pairs, vocab, generator) for one in ("sentences", case)]
        self.tokens = sum(len(text) for texts in columns for text in texts)
        self.slots = sum(pairs * max(map(len, texts)) for texts in columns)
        self.batches = {form: [form(texts, a.device) for texts in columns] for form in (padded, flat)}

    def outputs(self, provider: str) -> Tensor:
        """Return the embeddings of both columns, [2 * pairs, D]."""
        self.model.set_attn_implementation(provider.removesuffix("_flat"))
        form, found = padded if provider in PADDED else flat, []
        options = {} if self.averages else {"use_cache": False}
        for batch in self.batches[form]:
            new = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}  # and a new mask
            states = self.model(**new, **options).last_hidden_state
            if form is padded:
                mask = new["attention_mask"]
                ends = mask.sum(1)
                last = states[torch.arange(len(ends), device=ends.device), ends - 1]
                found.append(
                    (states * mask[..., None]).sum(1, dtype=torch.float32) / ends[:, None] if self.averages else last
                )
            else:
                bounds = new["cu_seq_lens_q"]
                number = (new["position_ids"][0] == 0).cumsum(0) - 1
                sums = torch.zeros(len(bounds) - 1, states.shape[-1], device=states.device)
                sums = sums.index_add(0, number, states[0].float())
                found.append(sums / bounds.diff()[:, None] if self.averages else states[0, bounds[1:] - 1])
        return nn.functional.normalize(torch.cat(found).float(), dim=-1)

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the loss of in-batch negatives."""
        queries, texts = outputs.chunk(2)
        return nn.functional.cross_entropy(20 * queries @ texts.T, torch.arange(len(queries), device=outputs.device))


class Reranker:
    """A causal reranker, and queries with documents of one length."""

    def __init__(self, shape: str, case: str, queries: int, a: Any):
        self.model = build_model(shape, a.device, kind=AutoModelForCausalLM, initializer_range=0.05)
        share_prefixes(self.model)
        generator = torch.Generator().manual_seed(queries)
        draw = partial(torch.randint, 10, self.model.config.vocab_size, generator=generator)
        query, documents = draw((queries, a.query)), draw((queries * DOCUMENTS, a.document))
        self.ids = torch.cat([query.repeat_interleave(DOCUMENTS, 0), documents], 1).to(a.device)
        self.tokens = self.slots = self.ids.numel()

    def outputs(self, provider: str) -> Tensor:
        """Return the scores, [queries * documents, 1]."""
        self.model.set_attn_implementation(provider)
        _pack.cache_clear()  # a new batch, whose prefixes are found anew
        logits = self.model(input_ids=self.ids.clone(), use_cache=False, logits_to_keep=1).logits[:, -1].float()
        return logits[:, YES : YES + 1] - logits[:, NO : NO + 1]

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the loss that the first document of each query fits."""
        return -outputs.view(-1, DOCUMENTS).log_softmax(-1)[:, 0].mean()


class Tower:
    """The image tower of a model, and images."""

    def __init__(self, shape: str, case: str, images: int, a: Any):
        model = build_model(shape, a.device, kind=AutoModelForImageTextToText, checkpointing=False)
        self.model, generator = model.model.visual, torch.Generator().manual_seed(images)
        sides = 2 * torch.randint(8, 33, (images, 2), generator=generator)
        self.grids = nn.functional.pad(sides, (1, 0), value=1).to(a.device)
        self.tokens = self.slots = int(sides.prod(1).sum())
        patches = torch.randn(self.tokens, 6 * self.model.config.patch_size**2, generator=generator)
        self.patches = patches.to(a.device, self.model.dtype)

    def outputs(self, provider: str) -> Tensor:
        """Return the states of the patches, [patches, D]."""
        self.model.set_attn_implementation(provider)
        return self.model(self.patches, grid_thw=self.grids).last_hidden_state.float()

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the mean square."""
        return outputs.square().mean()


def measure(case: str, bench: Any, providers: Sequence[str], a: Any) -> Rows:

    def step(name: str) -> Tensor:
        with torch.set_grad_enabled(case != "rerank_scores"):
            outputs = bench.outputs(name)
            if outputs.requires_grad:
                bench.loss(outputs).backward()
        return outputs.detach()

    def size(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    differences = dict.fromkeys(providers, 0.0)

    def agree(values: dict[str, Tensor]) -> None:
        for name, outputs in values.items():
            first = next(iter(values.values()))
            differences[name] = size(outputs - first) / size(first - first.roll(1, 0))
            if not differences[name] < 0.2:
                raise SystemExit(f"the outputs of the providers disagree: {differences}")

    calls, clean = {name: partial(step, name) for name in providers}, partial(bench.model.zero_grad, set_to_none=True)
    found, rows = contest(calls, agree, a.turns, a, clean), Rows()
    for name in providers:
        made, rate = found[name], found[name]
        if isinstance(made, str):
            made = Measured(0.0, 0.0, 0, 0.0)
        else:
            rate = round(bench.tokens / made.seconds)
        row = {"tokens": bench.tokens, "padding": round(1 - bench.tokens / bench.slots, 3), "provider": name}
        row |= {RATE: rate, "milliseconds": round(1000 * made.seconds, 2), "peak_gib": round(made.peak_gib, 2)}
        rows.append(row | {"turns": made.turns, "difference": f"{differences[name]:.2g}"})
    return rows


@program(
    __doc__,
    shapes=Flag(["bert-base", "qwen3-0.6b"], SHAPES),
    cases=Flag(CASES, CASES),
    pairs=Flag([128], help="pairs of texts in a batch"),
    query=Flag(512, help="tokens of a reranker's query"),
    document=Flag(256, help="tokens of each of its 16 documents"),
    queries=Flag([1], help="queries in a reranker's batch"),
    images=Flag([8, 32], help="images in a tower's batch"),
    providers=Flag(PROVIDERS, PROVIDERS),
    turns=7,
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    running = available(a.providers, a.device)
    for shape, case in product(a.shapes, a.cases):
        ranks, tower = case.startswith("rerank"), case == "tower"
        if tower != ("vision_config" in SHAPES[shape]) or (ranks and shape.startswith("bert")):  # sees the document
            continue
        kind, sizes, providers = Embedder, a.pairs, running
        if ranks or tower:
            kind, sizes = (Reranker, a.queries) if ranks else (Tower, a.images)
            providers = [name for name in running if not name.endswith("_flat")]
        for size in sizes:
            rows = measure(case, kind(shape, case, size, a), providers, a)
            free_memory()
            yield [{"shape": shape, "case": case, "size": size, **row} for row in rows]


if __name__ == "__main__":
    main()
