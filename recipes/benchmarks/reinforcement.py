"""Measure updates of GRPO with shared prompts and with stock TRL: tokens per second and peak memory.

    python recipes/benchmarks/reinforcement.py --csv grpo.csv
    python recipes/benchmarks/reinforcement.py --models llama-3.2-1b --cases 512:512 1024:256 --groups 2 4
    python recipes/benchmarks/reinforcement.py --models qwen2.5-vl-3b gemma-3-4b --providers flashmask sdpa
    python recipes/benchmarks/reinforcement.py --models tiny --cases 64:16 --device cpu

A micro-batch is `--groups` prompts of the stated length, each with G completions of half to all of the stated length.
Models have random weights, in bfloat16 (float32 on a CPU), with gradient checkpointing. Up to seven eighths of the
prompts of vision-language models are images.

An update is forward and backward of the trainer's loss. Tokens per second count a prompt once for each completion,
without padding. `flashmask` is `SharedPromptGRPOTrainer`; the others are `trl.GRPOTrainer` on the padded batch. Before,
log-probabilities may differ by a tenth of what another prompt changes (root mean square, `difference` and
`other_prompt`), norms of gradients by 10%.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from datasets import Dataset
from harness import Flag, Rows, available, contest, free_memory, program
from images import Conversations
from shapes import arguments_of, build_model, gradient_norm, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from flashmask_hf.trainers import SharedPromptGRPOConfig, SharedPromptGRPOTrainer
from flashmask_hf.trainers.images import IMAGE_KEYS

PROVIDERS = ("flashmask", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4)))
IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
MODELS = ("llama-3.2-1b", "qwen2.5-vl-3b", "gemma-3-4b", "tiny", "qwen2.5-vl-tiny", "gemma-3-tiny")
RATE = "update_tokens_per_second"
FIGURES = (RATE, "update_peak_gib", "update_turns", "difference", "other_prompt")


class Bench:
    """A model and the trainers that run it in turns."""

    def __init__(self, model: str, a: Any):
        self.device, self.generations = a.device, a.generations
        has_images = model.startswith(("qwen2.5-vl", "gemma"))
        kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        self.model = build_model(model, a.device, kind=kind, **IDS)
        self.images = Conversations(self.model) if has_images else None
        # The last ids of a vision-language model are of images and videos.
        self.vocab = self.model.config.get_text_config().vocab_size - 2 * has_images
        self._shared = self._trainer(SharedPromptGRPOTrainer, SharedPromptGRPOConfig)
        self._shared.state.global_step = 1  # not a logging step, in which the sparsity of the mask is computed
        self._stock = self._trainer(GRPOTrainer, GRPOConfig)
        self.model.train()

    def _trainer(self, trainer: Any, config: Any) -> Any:
        sizes = {"per_device_train_batch_size": self.generations, "num_generations": self.generations}
        args = arguments_of(config, self.device, max_steps=1, **sizes)
        dataset = Dataset.from_list([{"prompt": "why"}] * 1024)  # more than a batch; the batches are made here

        def reward(completions: Any, **_: Any) -> list[float]:
            return [0.0] * len(completions)

        made = trainer(self.model, reward, args, dataset, processing_class=tokenizer())
        made.current_gradient_accumulation_steps = 1
        return made

    def use(self, provider: str) -> Any:
        """Set the model's attention for a provider, and return its trainer."""
        self.model.set_attn_implementation(provider)
        return self._shared if provider == "flashmask" else self._stock

    def draw(self, prompt: int, completion: int, groups: int) -> dict[str, Any]:
        """Draw the batch that TRL makes after generation."""
        generator = torch.Generator().manual_seed(prompt + completion)
        rows = groups * self.generations

        def tokens(count: int, length: int) -> Tensor:
            return torch.randint(3, self.vocab, (count, length), generator=generator)

        lengths = torch.randint(completion // 2, completion + 1, (rows, 1), generator=generator)
        mask = (torch.arange(completion) < lengths).long()
        batch: dict[str, Any] = {
            "prompt_ids": tokens(groups, prompt).repeat_interleave(self.generations, 0),
            "prompt_mask": torch.ones(rows, prompt, dtype=torch.int64),
            "completion_ids": tokens(rows, completion) * mask,
            "completion_mask": mask,
            "advantages": torch.randn(rows, generator=generator),
            "num_items_in_batch": mask.sum(),
        }
        if self.images is not None:
            batch |= self._draw_images(prompt, completion, groups, generator)
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}

    def _draw_images(self, prompt: int, completion: int, groups: int, generator: torch.Generator) -> dict[str, Any]:
        """Draw prompts with images, repeated for each completion as in TRL."""
        assert self.images is not None
        side, tokens = self.images.sides[0], 7 * prompt // 8
        if self.images.has_axes:
            sizes = [(math.isqrt(tokens), tokens // math.isqrt(tokens))]
        else:
            sizes = [(side, side)] * (tokens // side**2)
        text = prompt - sum(height * width for height, width in sizes)
        drawn: dict[str, list[Tensor]] = {}
        for _ in range(groups):
            document = self.images.document(text, sizes, generator)
            pixels = torch.randn(document["pixel_values"].shape, generator=generator)
            document["pixel_values"] = pixels.to(self.model.dtype)
            for name, x in document.items():
                drawn.setdefault(name, []).extend([x] * self.generations)
        batch: dict[str, Any] = {name: torch.cat(x) for name, x in drawn.items() if name != "labels"}
        for name in {"token_type_ids", "mm_token_type_ids"} & set(batch):
            batch[name] = torch.nn.functional.pad(batch[name], (0, completion))
        return batch | {"prompt_ids": batch.pop("input_ids"), "num_images": [len(sizes)] * groups * self.generations}

    def log_probabilities(self, provider: str, batch: dict[str, Any]) -> Tensor:
        """Return the log-probability of each completion token, without gradients."""
        trainer = self.use(provider)
        ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model):
            values, *_ = trainer._get_per_token_logps_and_entropies(
                self.model, ids, mask, batch["completion_ids"].shape[1], **images
            )
        return values[batch["completion_mask"] > 0].float()

    def update(self, provider: str, batch: dict[str, Any]) -> None:
        """Run forward and backward of the loss."""
        self.use(provider).compute_loss(self.model, batch).backward()

    def clear(self) -> None:
        """Free the gradients."""
        self.model.zero_grad(set_to_none=True)


def compare(bench: Bench, batch: dict[str, Any], found: dict[str, Any], results: dict[str, Any]) -> None:
    """Exit unless the providers agree with SDPA, or with the first that runs."""
    if not results:
        return
    first = "sdpa" if "sdpa" in results else next(iter(results))

    def difference(values: Tensor) -> float:
        return float((values - results[first][0]).square().mean().sqrt())

    ids = batch["prompt_ids"]
    other = batch | {"prompt_ids": torch.where(ids < bench.vocab, 3 + (ids - 2) % (bench.vocab - 3), ids)}
    control = difference(bench.log_probabilities(first, other))
    for name, (values, _) in results.items():
        found[name] |= {"difference": f"{difference(values):.3g}", "other_prompt": f"{control:.3g}"}
        if not difference(values) <= 0.1 * control:
            raise SystemExit(f"the log-probabilities of {name} and {first} disagree: {found[name]}")
    norms = {name: norm for name, (_, norm) in results.items()}
    if max(norms.values()) > 1.1 * min(norms.values()):
        raise SystemExit(f"norms of gradients disagree: {norms}")


def measure(bench: Bench, case: tuple[int, int, int], providers: Sequence[str], a: Any) -> Rows:
    """Return a row per provider for a case: prompt, completion, groups."""
    found: dict[str, dict[str, Any]] = {name: dict.fromkeys(FIGURES, "") for name in providers}
    batch = bench.draw(*case)
    tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())

    def both(name: str) -> tuple[Tensor, float]:
        values = bench.log_probabilities(name, batch)
        bench.update(name, batch)
        return values, gradient_norm(bench.model)

    calls = {name: partial(bench.update, name, batch) for name in providers}
    firsts = {name: partial(both, name) for name in providers}
    agree = partial(compare, bench, batch, found)
    for name, made in contest(calls, agree, a.turns, a, bench.clear, firsts).items():
        found[name][RATE] = made
        if not isinstance(made, str):
            figures = round(tokens / made.seconds), round(made.peak_gib, 2), made.turns
            found[name] |= zip(FIGURES, figures, strict=False)
    shape = {"generations": bench.generations, **dict(zip(("prompt", "completion", "groups"), case, strict=True))}
    return [{**shape, "tokens": tokens, "provider": name, **figures} for name, figures in found.items()]


def lengths(text: str) -> tuple[int, int]:
    """Parse PROMPT:COMPLETION."""
    prompt, _, completion = text.partition(":")
    if not (prompt.isdigit() and completion.isdigit() and int(prompt) and int(completion)):
        raise argparse.ArgumentTypeError(f"must be PROMPT:COMPLETION, such as 512:256, got {text}")
    return int(prompt), int(completion)


@program(
    __doc__,
    models=Flag(["llama-3.2-1b"], MODELS),
    cases=Flag([(1024, 256), (4096, 256)], help="PROMPT:COMPLETION, in tokens", kind=lengths),
    generations=8,
    groups=Flag([1], help="prompts of a micro-batch"),
    providers=Flag(PROVIDERS, PROVIDERS),
    turns=5,
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    providers = available(a.providers, a.device)
    for model in a.models:
        torch._dynamo.reset()  # else head_dim counts as a size that varies
        bench = Bench(model, a)
        for case, groups in product(a.cases, a.groups):
            found = measure(bench, (*case, groups), providers, a)
            yield [{"model": model, **row} for row in found]
        del bench
        free_memory()


if __name__ == "__main__":
    main()
