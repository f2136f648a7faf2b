"""Measure training by task, setting, attention and length of a packed row: tokens per second and peak memory.

    python recipes/benchmarks/training.py --csv rows.csv   # figures 2 and 7 of the FlashMask paper
    python recipes/benchmarks/training.py settings --deadline 500 --csv settings.csv   # kept, Liger's kernels, compiled
    python recipes/benchmarks/training.py --shapes llama-3.2-1b --tasks sft --lengths 8192 --steps 3   # a minute
    python recipes/benchmarks/training.py --tasks dpo --implementations flashmask trl_sdpa trl_sdpa_single
    python recipes/benchmarks/training.py --shapes tiny --device cpu --lengths 512 1024
    python recipes/benchmarks/training.py images --shapes qwen2.5-vl-3b --deadline 560 --csv images.csv

Models have random weights, in bfloat16 (float32 on a CPU), with gradient checkpointing, TRL's head and AdamW; a step is
one packed row (FlashMask, appendix A.2.1). Tasks:

- `sft` (of 8B: `lora`) and `lora`: 1 to 10 documents.
- `dpo` (with a reference model) and `reward`: 1 to 10 questions with 2 and 6 answers. Tokens per second count each
  question once.
- `orpo`, `kto` (study `preference`): TRL's trainers on questions of 1,024 tokens with 2 and 4 answers; `flashmask` is
  `share_prefixes`, with its host time.
- `trajectories`: steps of agents without earlier thinking, in rows of about the mean length; `flashmask` shares
  prefixes, and `examples_per_second` is for all `rows`.
- `images_20`, `images_50`, `images_80`: conversations with that percentage of image tokens.
- `diffusion`: block diffusion, beside dllm's padded batches.

Implementations:

- `flashmask`; `sdpa`, `flex_attention`: the same row with a dense mask or a block mask.
- `flash_attention_2`, `_3`, `_4`: the varlen path; DPO and the reward model as in stock TRL, question by question.
- `trl_sdpa`, `trl_flash_attention_4`: stock TRL, which repeats the question for each answer and
  pads; `_single`: question by question, with gradient accumulation. Six answers are three pairs. With images: batches
  of 8 conversations, or one by one. `trl_flashmask`: without `share_prefixes`.

Settings join by "+": `eager`; `kept` keeps attention's results (flashmask alone); `liger` runs Liger's kernels;
`compiled` compiles each layer. All run in turns on one model, after their losses (DPO: log-probabilities, reward
models: rewards) have agreed. A series ends with "out of memory", "failed", or "out of time" before a step of more than
`--longest` seconds or past `--deadline`. A compiled setting without `compilations` has run another's code, or
eagerly.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_diffusion import Batch, draw_row
from datasets import Dataset
from harness import Flag, Rows, attempt, available, count, free_memory, in_time, program, random_lengths, synchronize
from images import Conversations
from packed_attention import attention, block_mask, dense_mask
from shapes import SHAPES, TRAINERS, arguments_of, build_model, gradient_norm, make_rows, tokenizer
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_layers import GradientCheckpointingLayer

from flashmask_hf import FlashMask, keep_attention, names, share_prefixes
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.hf.models import state_of, unwrap_peft
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.sharing import _pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import compile_layers

PACKED = ("flashmask", "sdpa", "flex_attention")
VARLEN = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# All questions of a row in one batch.
WHOLE = ("trl_flashmask", "trl_sdpa", "trl_flash_attention_4")
STOCK = (*WHOLE, *(f"{name}_single" for name in WHOLE))
SETTINGS = ("eager", "kept", "liger", "compiled")
TASKS = ("sft", "lora", "dpo", "reward")
DLLM = "dllm_sdpa"
IMAGES = ("images_20", "images_50", "images_80")
PREFERENCE = ("orpo", "kto")
ANSWERS = {"dpo": 2, "reward": 6, "orpo": 2, "kto": 4}
PROMPT = 1024  # tokens of a question of ORPO and KTO
ADAPTERS_ONLY = ("llama-3.1-8b",)
LATE = "out of time"
TOLERANCE = {"cuda": 5e-3, "cpu": 1e-5}  # largest difference of two losses, in bfloat16 and in float32


def study(
    tasks: Sequence[str],
    implementations: Sequence[str],
    lengths: Sequence[int],
    shapes: Sequence[str] = ("llama-3.2-1b", "llama-3.1-8b"),
    settings: Sequence[str] = ("eager",),
) -> dict[str, Sequence[Any]]:
    return locals()


# FlexAttention, which compiles longest, is last.
STUDIES = {
    "lengths": study(TASKS, ("flashmask", "sdpa", *VARLEN, "flex_attention"), [2**power for power in range(12, 20)]),
    "settings": study(
        ["sft"],
        ("flashmask", "sdpa", "flash_attention_4", "flex_attention"),
        [2048, 4096, 8192, 32768, 131072],
        settings=["eager", "kept", "liger", "kept+liger", "compiled", "compiled+kept"],
    ),
    "images": study(
        IMAGES,
        ("flashmask", "trl_flash_attention_4", "trl_sdpa", "trl_sdpa_single"),
        [8192, 32768],
        ["qwen2.5-vl-3b", "gemma-3-4b"],
    ),
    "preference": study(PREFERENCE, ("flashmask", "trl_flashmask", "trl_flash_attention_4", "trl_sdpa"), [4096, 8192]),
    "diffusion": study(
        ["diffusion"], ("flashmask", DLLM, "flex_attention"), [4096, 16384, 32768], ["qwen3-0.6b", "llama-3.1-8b"]
    ),
    "trajectories": study(["trajectories"], ("flashmask", "trl_flashmask", "flash_attention_4"), [16384, 32768]),
}

Document = tuple[list[int], list[list[int]]]
"""Token ids of a question, and of each of its answers."""


class Switch:
    """Puts a setting into models, and takes it out again."""

    def __init__(self, models: Sequence[Any], settings: Sequence[str]) -> None:
        bases = [model.get_base_model() if hasattr(model, "peft_config") else model for model in models]
        self._models, self._liger, self._compiled = models, [], []
        self._code: Any = sys.modules[type(bases[0]).__module__]
        plain = self._code.apply_rotary_pos_emb
        if any("liger" in setting for setting in settings):
            for model in bases:
                before = {module: vars(module).get("forward") for module in model.modules()}
                apply_liger_kernel(model, {"fused_linear_cross_entropy": False})
                self._liger += [(module, forward, vars(module).get("forward")) for module, forward in before.items()]
        self._rotary = plain, self._code.apply_rotary_pos_emb
        if any("compiled" in setting for setting in settings):
            for model in bases:
                compile_layers(model)
                layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
                self._compiled += [(layer, layer._compiled_call_impl) for layer in layers]
        self.set("eager")

    def set(self, setting: str) -> None:
        """Switch to a setting."""
        on = setting.split("+")
        options = {"use_reentrant": False} | ({"context_fn": keep_attention} if "kept" in on else {})
        for model in self._models:
            enable_checkpointing(model, options)
        self._code.apply_rotary_pos_emb = self._rotary["liger" in on]
        for module, *forwards in self._liger:
            vars(module).pop("forward", None)
            if forwards["liger" in on] is not None:
                vars(module)["forward"] = forwards["liger" in on]
        for layer, call in self._compiled:
            layer._compiled_call_impl = call if "compiled" in on else None


def inputs(implementation: str, row: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of an implementation for a row [1, S], with a new mask."""
    vectors, others = row[names.VECTORS].clone(), {key: value for key, value in row.items() if key != names.VECTORS}
    if implementation == "flashmask":
        return others | {names.VECTORS: vectors}
    if implementation in VARLEN:  # without these, transformers finds the documents in each layer
        (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(row["position_ids"])
        longest = int(longest)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return others | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **lengths}
    form = dense_mask if implementation == "sdpa" else block_mask
    return others | {"attention_mask": form(FlashMask(vectors, causal=vectors.shape[-1] == 1))}


class FineTuning:
    """Supervised fine-tuning, by implementations in `ways`."""

    ways: Sequence[str] = (*PACKED, *VARLEN)

    def __init__(self, task: str, shape: str, a: argparse.Namespace):
        self.device = a.device
        rank = 16 if task == "lora" or shape in ADAPTERS_ONLY else 0
        kind = AutoModelForImageTextToText if task in IMAGES else AutoModelForCausalLM
        self.model = build_model(shape, a.device, kind=kind, rank=rank, fused=True)
        self.models = [self.model]

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows."""
        return make_rows(length, count, self.model.config.vocab_size, self.device)

    def run(self, implementation: str, row: dict[str, Tensor]) -> float:
        """Run forward and backward of a row; return the loss."""
        self.model.set_attn_implementation(implementation)
        loss = self.model(**inputs(implementation, row), fused_lm_head=True).loss
        loss.backward()
        return float(loss.detach())

    def figures(self, implementation: str, length: int) -> list[tuple[float, float]]:
        """Return what implementations must agree in, each with its allowed difference."""
        return [(self.run(implementation, self.draw(length, 1)[0]), TOLERANCE[self.device])]

    def columns(self, implementation: str, seconds: float | None, rows: Sequence[Any]) -> dict[str, Any]:
        """Return columns that the task adds, if a step of `seconds` was measured."""
        return {}


class ImageTuning(FineTuning):
    """Fine-tuning of a vision-language model: a packed row, or TRL's padded batches."""

    def __init__(self, task: str, shape: str, a: argparse.Namespace):
        super().__init__(task, shape, a)
        # FlashAttention hides later tokens of an image from Gemma's.
        hides = shape.startswith("gemma")
        self.ways = ("flashmask", *(name for name in STOCK if not (hides and "flash_attention" in name)))
        self.share, self.conversations = int(task.removeprefix("images_")) / 100, Conversations(self.model)

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows."""
        generator = torch.Generator().manual_seed(length)
        return [self.conversations.draw(length, self.share, generator) for _ in range(count)]

    def run(self, implementation: str, row: dict[str, Any]) -> float:
        """Run forward and backward of a row; return the loss."""
        form = "single" if implementation.endswith("_single") else "batches"
        name = implementation.removeprefix("trl_").removesuffix("_single")
        self.model.set_attn_implementation({"": name, "text_config": name, "vision_config": name})
        losses = []
        for batch, pixels in row["packed" if implementation == "flashmask" else form]:
            images = {} if pixels.start == pixels.stop else {"pixel_values": self.conversations.pixels[pixels]}
            loss = self.model(**batch, **images, fused_lm_head=True, num_items_in_batch=row["labels"]).loss
            loss.backward()
            losses.append(loss.detach())
        return float(sum(losses))

    def columns(self, implementation: str, seconds: float | None, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the rate of images."""
        images = statistics.fmean(row["images"] for row in rows)
        return {"images_per_second": round(images / seconds, 2) if seconds else ""}


class DiffusionTuning(FineTuning):
    """Block diffusion: a packed row, or dllm's padded batches of the same noise."""

    ways = ("flashmask", "flex_attention", DLLM)

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows."""
        generator, vocab = torch.Generator().manual_seed(length), self.model.config.vocab_size
        return [draw_row(length, vocab, self.device, generator) for _ in range(count)]

    def run(self, implementation: str, row: tuple[dict[str, Tensor], list[Batch]]) -> float:
        """Run forward and backward of a row; return the loss."""
        packed, batches = row
        self.model.set_attn_implementation(implementation.removeprefix("dllm_"))
        count = packed["labels"].ne(names.IGNORED).sum()
        if implementation != DLLM:
            targets = (names.DIFFUSION_LABELS, names.DIFFUSION_WEIGHTS, "labels")
            given = inputs(implementation, {name: x for name, x in packed.items() if name not in targets})
            out = self.model(**given, shift_labels=packed[names.DIFFUSION_LABELS], fused_lm_head=True)
            loss = -(out.log_probs * packed[names.DIFFUSION_WEIGHTS]).sum() / count
            loss.backward()
            return float(loss.detach())
        total = torch.zeros((), device=self.device)
        for batch in batches:
            given = {"attention_mask": batch.dense_mask(), "position_ids": batch.positions(), "use_cache": False}
            loss = batch.loss(self.model(batch.ids, **given).logits) / count
            loss.backward()
            total += loss.detach()
        return float(total)


class Trajectories(FineTuning):
    """Fine-tuning on agents' trajectories, with and without shared prefixes."""

    ways = (*FineTuning.ways, "trl_flashmask")

    def _steps(self, length: int, count: int, most: int) -> Dataset:
        """Draw trajectories of at most `most` steps, whose examples fit into `length` tokens."""
        draw, data = np.random.default_rng(length), {"input_ids": [], "completion_mask": []}
        scale = min(1.0, length / 16384)

        def text(low: float, high: float) -> Any:
            return draw.integers(3, self.model.config.vocab_size, max(2, int(scale * draw.uniform(low, high))))

        tools = [text(1500, 3500) for _ in range(6)]
        for _ in range(count):
            history = np.concatenate([tools[draw.integers(6)], text(200, 800)])
            for _ in range(min(most, draw.integers(10, 41))):
                thinking, call, result = text(80, 600), text(30, 150), min(4000, draw.lognormal(6.0, 0.9))
                data["input_ids"].append(np.concatenate([history, thinking, call]))
                data["completion_mask"].append(np.arange(len(data["input_ids"][-1])) >= len(history))
                history = np.concatenate([history, call, text(result, result)])
        made = Dataset.from_dict(data)
        return made.filter(lambda example: len(example["input_ids"]) <= length)

    def _batches(self, rows: Any) -> list[dict[str, Any]]:
        collate = DataCollatorForPackedLanguageModeling()
        return [{name: x.to(self.device) for name, x in collate([row]).items()} for row in rows]

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Pack 48 trajectories both ways; return rows of about the mean length."""
        steps, drawn = self._steps(length, 48, 40), {}
        self.examples, self.rows = len(steps), {}
        for shares in (True, False):
            packed = pack_dataset(steps, length, share_prefixes=shares)
            tokens = np.array([sum(lengths) for lengths in packed["seq_lengths"]])
            self.rows[shares] = len(tokens), tokens.mean()
            drawn[shares] = self._batches(packed.select(abs(tokens - tokens.mean()).argsort()[:count]))
        return [{True: [one], False: [two]} for one, two in zip(drawn[True], drawn[False], strict=False)]

    def run(self, implementation: str, row: dict[bool, list[dict[str, Any]]]) -> float:
        """Run forward and backward of batches; return their loss."""
        name = implementation.removeprefix("trl_")
        self.model.set_attn_implementation(name)
        batches = [dict(batch) for batch in row[implementation == "flashmask"]]
        weights = [batch.pop(names.LABEL_WEIGHTS, batch["labels"] != names.IGNORED)[:, 1:] for batch in batches]
        count, loss = sum(own.sum() for own in weights), 0.0
        for batch, own in zip(batches, weights, strict=True):
            batch.pop(names.EXAMPLE_TOKENS, None)
            part = -(self.model(**inputs(name, batch), fused_lm_head=True).log_probs * own).sum() / count
            part.backward()
            loss += float(part.detach())
        return loss

    def figures(self, implementation: str, length: int) -> list[tuple[float, float]]:
        """Return the loss of a short trajectory and the norm of the gradients (allowed: 5%)."""
        steps, shares = self._steps(length, 1, 4), implementation == "flashmask"
        packed = pack_dataset(steps, length, share_prefixes=shares)
        loss = self.run(implementation, {shares: self._batches(packed)})
        norm = gradient_norm(self.model)
        return [(loss, TOLERANCE[self.device]), (norm, (0.05 if self.device == "cuda" else 1e-4) * norm)]

    def columns(self, implementation: str, seconds: float | None, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the rates, and the packed rows."""
        count, tokens = self.rows[implementation == "flashmask"]
        rate = {"tokens_per_second": round(tokens / seconds)} if seconds else {}
        examples = round(self.examples / (count * seconds), 3) if seconds else ""
        return rate | {"examples_per_second": examples, "rows": count, "examples": self.examples}


def make_row(task: str, length: int, vocab: int, generator: torch.Generator) -> list[Document]:
    answers = ANSWERS[task]
    if task in PREFERENCE:
        count = max(1, int(length / (PROMPT * (1 + 0.15 * answers))))
        totals = [length // count] * count
    else:
        most = 10 if task == "dpo" or length > 8192 else 3 if length <= 4096 else 4
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        totals = random_lengths(length, count, generator, minimum=128 if task == "dpo" else 512)
    row = []
    for total in totals:
        low, high = (int(share * total / (1 + share * answers)) for share in (0.1, 0.2))
        if task in PREFERENCE:
            sizes = random_lengths(total - PROMPT, answers, generator, minimum=PROMPT // 10)
        else:
            sizes = torch.randint(low, high + 1, (answers,), generator=generator).tolist()
        tokens = torch.randint(3, vocab, (total,), generator=generator)
        question, *made = tokens.split([total - sum(sizes), *sizes])
        row.append((question.tolist(), [answer.tolist() for answer in made]))
    return row


def shared_examples(task: str, row: list[Document]) -> list[dict[str, Any]]:
    if task == "reward":
        return [{"prompt_ids": question, "answers_ids": answers} for question, answers in row]
    return [{"prompt_ids": question, "chosen_ids": one, "rejected_ids": two} for question, (one, two) in row]


def _orpo_example(question: list[int], *answers: list[int]) -> dict[str, list[int]]:
    """Return a pair as TRL's ORPO tokenizes it."""
    made = {"prompt_input_ids": question, "prompt_attention_mask": [1] * len(question)}
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        made[f"{name}_input_ids"], made[f"{name}_attention_mask"] = question + answer, [1] * len(question + answer)
        made[f"{name}_labels"] = [names.IGNORED] * len(question) + answer
    return made


def stock_examples(task: str, row: list[Document]) -> list[list[dict[str, Any]]]:
    """Return a row as examples of TRL's collators, by question."""
    if task == "dpo":
        return [[example] for example in shared_examples(task, row)]
    if task == "orpo":
        return [[_orpo_example(question, *answers) for question, answers in row]]
    if task == "kto":
        made = [(question, answer, nth % 2 == 0) for question, answers in row for nth, answer in enumerate(answers)]
        columns, others = ("prompt_ids", "completion_ids", "label", "KL_completion_ids"), [made[-1], *made[:-1]]
        pairs = zip(made, others, strict=True)
        return [[dict(zip(columns, (*one, other[1]), strict=True)) for one, other in pairs]]
    pairs = [(question, zip(answers[::2], answers[1::2], strict=True)) for question, answers in row]
    return [[{"chosen_ids": q + one, "rejected_ids": q + two} for one, two in of_q] for q, of_q in pairs]


class Alignment(FineTuning):
    """DPO or a reward model: this package's trainer and TRL's, on the same model."""

    ways = (*FineTuning.ways, *STOCK)

    def __init__(self, task: str, shape: str, a: argparse.Namespace):
        self.task, self.device, self.vocab = task, a.device, SHAPES[shape]["vocab_size"]
        rank = 16 if shape in ADAPTERS_ONLY else 0
        options: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_labels": 1}
        options["kind"] = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
        self.model = build_model(shape, a.device, rank=rank, **options)
        # The reference of adapters is the same model with TRL's copy of them.
        refers = task in ("dpo", "kto")
        reference = build_model(shape, a.device, seed=1, **options) if refers and not rank else None
        self.models = [model for model in (self.model, reference) if model is not None]
        trainers = [self._trainer(*classes, {"ref_model": reference} if refers else {}) for classes in TRAINERS[task]]
        self.shared, self.stock = trainers[0], trainers[-1]
        self.shared.state.global_step = 1  # not a logging step, in which the sparsity of the mask is computed
        self.model.train()

    def _trainer(self, trainer: Any, config: Any, extra: dict[str, Any]) -> Any:
        if "ref" in getattr(self.model, "peft_config", {}):  # TRL's copy of the adapter, which each trainer makes
            self.model.delete_adapter("ref")
        args = arguments_of(config, self.device, max_length=None, disable_dropout=False)
        dataset = Dataset.from_list([{"prompt": "why ", "chosen": "so ", "rejected": "no "}])  # batches are made here
        return trainer(self.model, args=args, train_dataset=dataset, processing_class=tokenizer(), **extra)

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows."""
        generator = torch.Generator().manual_seed(length)
        return [make_row(self.task, length, self.vocab, generator) for _ in range(count)]

    def run(self, implementation: str, row: list[Document]) -> None:
        """Run forward, and backward if gradients are enabled, of a row."""
        packed = implementation in PACKED
        name = "flashmask" if packed else implementation.removeprefix("trl_").removesuffix("_single")
        trainer, batches = self.shared, [shared_examples(self.task, row)]
        if not packed:
            trainer, batches = self.stock, stock_examples(self.task, row)
            if implementation in WHOLE:
                batches = [[example for batch in batches for example in batch]]
        for model in self.models:
            model.set_attn_implementation(name)
        with attention(implementation if packed else "flashmask"):
            for batch in batches:
                loss = trainer.compute_loss(self.model, trainer._prepare_inputs(trainer.data_collator(batch)))
                if torch.is_grad_enabled():
                    (loss / len(batches)).backward()

    def figures(self, implementation: str, length: int) -> list[tuple[float, float]]:
        """Return log-probabilities (allowed: 1%) or rewards (0.25; bfloat16 moves them by 0.05) on a row."""
        generator = torch.Generator().manual_seed(7)
        row = [(question, answers[:2]) for question, answers in make_row(self.task, 2048, self.vocab, generator)]
        metrics = (self.shared if implementation in PACKED else self.stock)._metrics["train"]
        metrics.clear()
        with torch.no_grad():
            self.run(implementation, row)
        if self.task == "reward":
            return [(min(metrics["min_reward"]), 0.25), (max(metrics["max_reward"]), 0.25)]
        found = [statistics.fmean(metrics[f"logps/{which}"]) for which in ("chosen", "rejected")]
        return [(x, max(0.05, 0.01 * abs(x))) for x in found]


class Preference(Alignment):
    """ORPO or KTO: TRL's trainer on padded batches, with `share_prefixes` and without."""

    ways = ("flashmask", *WHOLE)

    def __init__(self, task: str, shape: str, a: argparse.Namespace):
        super().__init__(task, shape, a)
        self.states = [state_of(unwrap_peft(model).base_model) for model in self.models]
        for model in self.models:
            share_prefixes(model)
        self.share = self.states[0].rewrites[0]

    def draw(self, length: int, count: int) -> Sequence[Any]:
        """Draw rows, and forget the hook's times."""
        self.host: list[float] = []  # seconds of each run
        return super().draw(length, count)

    def _timed(self, call: Any) -> Any:
        synchronize()
        start = time.perf_counter()
        changed = self.share(call)
        self.host[-1] += time.perf_counter() - start
        return changed

    def run(self, implementation: str, row: list[Document]) -> float:
        """Run forward and backward of a row; return the loss."""
        shares = implementation == "flashmask"
        for model, state in zip(self.models, self.states, strict=True):
            model.set_attn_implementation(implementation.removeprefix("trl_"))
            state.rewrites = (self._timed,) if shares else ()
        if shares:
            self.host.append(0.0)
            _pack.cache_clear()  # a new batch, whose rows the reference model finds
        (examples,) = stock_examples(self.task, row)
        batch = self.stock._prepare_inputs(self.stock.data_collator(examples))
        loss = self.stock.compute_loss(self.model, batch)
        loss.backward()
        assert not shares or _pack.cache_info().misses, "nothing was shared"
        return float(loss.detach())

    def figures(self, implementation: str, length: int) -> list[tuple[float, float]]:
        """Return the loss (in bfloat16 ORPO's is rounded to 1/16), and the norm of the gradients (allowed: 10%)."""
        loss, norm = self.run(implementation, self.draw(length, 1)[0]), gradient_norm(self.model)
        exact = self.device == "cpu"
        return [(loss, 1e-5 if exact else 0.13), (norm, (1e-4 if exact else 0.1) * norm)]

    def columns(self, implementation: str, seconds: float | None, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the time of the hook per step."""
        hooked = seconds and implementation == "flashmask"
        return {"hook_milliseconds": round(1000 * statistics.median(self.host), 2) if hooked else ""}


KINDS: dict[str, Any] = {**dict.fromkeys(IMAGES, ImageTuning), **dict.fromkeys(PREFERENCE, Preference)}
KINDS |= {"sft": FineTuning, "lora": FineTuning, "dpo": Alignment, "reward": Alignment}
KINDS |= {"diffusion": DiffusionTuning, "trajectories": Trajectories}


class Series:
    """One implementation in one setting over the lengths, until it ends."""

    def __init__(self, implementation: str, setting: str):
        self.implementation, self.setting = implementation, setting
        self.ended = ""
        self.length = 0  # the last length that it ran
        self.seconds = 0.0  # of a step at that length
        self.first: float | None = None  # seconds of its first step
        self.compilations = 0
        self.steps: list[tuple[float, float]] = []  # seconds and peak GiB of each measured step

    def expected(self, length: int) -> float:
        """Return the seconds of the next step, the most at a new length; before any, of the first call."""
        if self.steps:
            return self.steps[-1][0]
        return self.seconds * (length / self.length) ** 2 if self.length else self.first or 0.0

    def figures(self, length: int) -> dict[str, object]:
        """Return the columns of a length, and forget the steps."""
        found: dict[str, object] = {"implementation": self.implementation, "setting": self.setting}
        found |= {"tokens_per_second": self.ended, "seconds_per_step": "", "peak_gib": "", "steps": len(self.steps)}
        if not self.ended or (self.ended == LATE and self.steps):
            self.length, self.seconds = length, statistics.median(seconds for seconds, _ in self.steps)
            peak = max(peak for _, peak in self.steps)
            found |= {"tokens_per_second": round(length / self.seconds), "seconds_per_step": round(self.seconds, 4)}
            found["peak_gib"] = round(peak, 2) if peak else ""
        self.steps = []
        return found | {"first_step_seconds": round(self.first or 0, 2), "compilations": self.compilations}


class Study:
    """One model of a task in training, and the series that share it."""

    def __init__(self, task: str, shape: str, a: argparse.Namespace):
        self.arguments = a
        self.task = KINDS[task](task, shape, a)
        ways = [name for name in a.implementations if name in self.task.ways]
        pairs = [(name, setting) for setting in a.settings for name in ways]
        self.series = [Series(*pair) for pair in pairs if pair[0] == "flashmask" or "kept" not in pair[1]]
        self.switch = Switch(self.task.models, a.settings)
        trained = [x for x in self.task.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def run(self, one: Series, call: Callable[[], Any], expected: float = 0.0) -> tuple[Any, float, float] | None:
        """Make a call of `expected` seconds in a series' setting, or end the series."""
        if not in_time(self.arguments, expected):
            one.ended = LATE
            return None
        self.switch.set(one.setting)
        before = counters["stats"]["unique_graphs"]
        made = attempt(call)
        one.compilations += counters["stats"]["unique_graphs"] - before
        if isinstance(made, str):
            one.ended = made
            self.optimizer.zero_grad(set_to_none=True)
            free_memory()
            return None
        one.first = made[1] if one.first is None else one.first
        return made

    def check(self, length: int) -> None:
        """Exit unless all series have the same figures before training."""
        found = {}
        for one in self.series:
            made = self.run(one, lambda one=one: self.task.figures(one.implementation, length))
            self.optimizer.zero_grad(set_to_none=True)
            if made is not None:
                found[one.implementation, one.setting] = made[0]
        print("before training:", found, flush=True)
        for figures in zip(*found.values(), strict=True):
            values = [value for value, _ in figures]
            if not max(values) - min(values) <= max(allowed for _, allowed in figures):
                raise SystemExit(f"the implementations disagree: {found}")

    def step(self, one: Series, row: Any) -> None:
        """Run one training step."""
        self.task.run(one.implementation, row)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measure(self, length: int) -> Rows:
        """Measure the series at one length in turns of random order."""
        a, rows = self.arguments, self.task.draw(length, self.arguments.steps)
        for one in self.series:
            if one.length and one.expected(length) > a.longest:
                one.ended = LATE
                continue
            # FlexAttention compiles for each length.
            if one.implementation == "flex_attention" or not one.length:
                self.run(one, lambda one=one: self.step(one, rows[0]), one.expected(length))
        start, order = time.monotonic(), random.Random(length)
        for number, row in enumerate(rows):
            running = [one for one in self.series if not one.ended]
            turn = [one.expected(length) for one in running]
            if number and (time.monotonic() - start > a.seconds or not in_time(a, *turn)):
                break
            for one in order.sample(running, len(running)):
                made = self.run(one, lambda one=one, row=row: self.step(one, row), one.expected(length))
                if made is not None:
                    one.steps.append(made[1:])
        found = Rows()
        for one in self.series:
            figures: Any = one.figures(length)
            found.append(figures | self.task.columns(one.implementation, figures["seconds_per_step"], rows))
        self.series = [one for one in self.series if not one.ended]
        return found


def setting(text: str) -> str:
    parts = set(text.split("+")) - {"eager"}
    if not parts <= {*SETTINGS}:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(SETTINGS)}, joined by +, got {text}")
    return "+".join(sorted(parts)) or "eager"


@program(
    __doc__,
    ends=False,  # before it has written what was out of time
    study=Flag("lengths", STUDIES, name="study"),
    shapes=Flag([], SHAPES),
    tasks=Flag([], KINDS),
    implementations=Flag([], ("flashmask", "sdpa", "flex_attention", *VARLEN, *STOCK, DLLM)),
    settings=Flag([], None, "such as eager compiled+kept", setting),
    lengths=Flag([], kind=count),
    steps=Flag(5, help="most measured steps of a series and length"),
    seconds=Flag(60.0, help="start no step after the first later than this"),
    longest=Flag(120.0, help="end a series whose step may take more seconds"),
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    given = {name: value for name, value in vars(a).items() if value != []}
    a = argparse.Namespace(**{**STUDIES[a.study], **given})
    a.implementations = available(a.implementations, a.device)
    cases = [(shape, task) for shape in a.shapes for task in a.tasks]
    # A shape that trains adapters alone has no `sft`.
    cases = [(x, "lora" if task == "sft" and x in ADAPTERS_ONLY else task) for x, task in cases]
    for shape, task in dict.fromkeys(cases):
        study = Study(task, shape, a)
        adapters = hasattr(study.task.model, "peft_config")
        facts = {"shape": shape, "task": task, "trained": "adapters" if adapters else "all"}
        study.check(min(a.lengths))
        for length in sorted(a.lengths):
            if study.series:
                yield [{**facts, "length": length, **figures} for figures in study.measure(length)]
        study.switch.set("eager")  # Liger's kernels replace functions that the next models share
        del study
        free_memory()
        if not in_time(a):
            break


if __name__ == "__main__":
    main()
