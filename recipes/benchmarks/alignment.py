"""Measure training of DPO and reward models with shared questions and with stock TRL: tokens per second and memory.

    python recipes/benchmarks/alignment.py --csv alignment.csv

Rows follow FlashMask (ICLR 2025), appendix A.2.1: a row of 8K or 32K tokens holds 1 to 10 questions (1 to 4 for reward
models at 8K), each with 2 answers (6 for reward models) of 10% to 20% of the question's length. The model has the shape
of Llama-3.2-1B with random weights, in bfloat16, with gradient checkpointing and AdamW; DPO has a reference model. Each
row is one optimizer step. Tokens per second count the tokens of the row, each question once.

`flashmask` runs the trainers of `flashmask_hf.trainers` on the packed row; `sdpa_packed` and `flex_attention_packed`
run the same trainers on the same row, with SDPA and a dense mask, and with FlexAttention (`packed_attention.py`).
Stock TRL repeats the question for each answer and pads. It gets each row as one padded batch, or one question at a time
with gradient accumulation (`single`), with SDPA and with flex_attention. For stock TRL, the six answers of a reward
model are three pairs, so that it computes every answer once, the least that it can. For its flex_attention, lengths are
padded to a multiple of 1024, because it compiles for each length. Times do not include compilation.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
from datasets import Dataset
from harness import attempt, random_lengths, write_csv
from packed_attention import attention
from shapes import SHAPES, build_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer, SharedQuestionDPOTrainer

Document = tuple[list[int], list[list[int]]]
"""Token ids of a question, and of each of its answers."""

ANSWERS = {"dpo": 2, "reward": 6}
PACKED = {"flashmask": "flashmask", "sdpa_packed": "sdpa", "flex_attention_packed": "flex_attention"}
"""Attention of each provider on packed rows."""
STOCK = ("sdpa", "sdpa_single", "flex_attention", "flex_attention_single")


def make_row(task: str, length: int, vocab: int, generator: torch.Generator) -> list[Document]:
    """Draw the questions and answers of one row of `length` tokens."""
    answers = ANSWERS[task]
    most = 10 if task == "dpo" else 3 if length <= 4096 else 4 if length <= 8192 else 10
    count = int(torch.randint(1, most + 1, (1,), generator=generator))
    row = []
    for total in random_lengths(length, count, generator, minimum=128 if task == "dpo" else 512):
        low, high = (int(share * total / (1 + share * answers)) for share in (0.1, 0.2))
        sizes = torch.randint(low, high + 1, (answers,), generator=generator).tolist()
        tokens = torch.randint(3, vocab, (total,), generator=generator).tolist()
        question = total - sum(sizes)
        start, made = question, []
        for size in sizes:
            made.append(tokens[start : start + size])
            start += size
        row.append((tokens[:question], made))
    return row


def shared_examples(task: str, row: list[Document]) -> list[dict[str, Any]]:
    """Return a row as examples of this package's collators."""
    if task == "reward":
        return [{"prompt_ids": question, "answers_ids": answers} for question, answers in row]
    return [{"prompt_ids": question, "chosen_ids": one, "rejected_ids": two} for question, (one, two) in row]


def stock_examples(task: str, row: list[Document]) -> list[list[dict[str, Any]]]:
    """Return a row as examples of TRL's collators, by question; a reward model gets a pair for every two answers."""
    if task == "dpo":
        return [[example] for example in shared_examples(task, row)]
    return [
        [
            {"chosen_ids": question + one, "rejected_ids": question + two}
            for one, two in zip(answers[::2], answers[1::2], strict=True)
        ]
        for question, answers in row
    ]


class Bench:
    """Model, optimizer and trainers of a task; all trainers train the same model in turns.

    Args:
        task: "dpo" or "reward".
        shape: one of `SHAPES`.
        device: "cuda" or "cpu".
        adapters: train LoRA adapters; the reference of DPO is then the same model with TRL's copy of them.
        **options: further options of the model's configuration.
    """

    def __init__(self, task: str, shape: str, device: str = "cuda", adapters: bool = False, **options: Any):
        self.task, self.device = task, device
        self.vocab: int = SHAPES[shape]["vocab_size"]
        options |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_labels": 1}
        options["kind"] = AutoModelForCausalLM if task == "dpo" else AutoModelForSequenceClassification
        self.model: Any = build_model(shape, device, adapters=adapters, **options)
        self.reference = build_model(shape, device, seed=1, **options) if task == "dpo" and not adapters else None
        self.shared, self.stock = self._trainers()
        self.shared.state.global_step = 1  # not a logging step, in which the sparsity of the mask is computed
        self.model.train()
        trained = [x for x in self.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def _trainers(self) -> tuple[Any, Any]:
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "why": 2, "so": 3, "no": 4}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        # The trainers need a dataset, but the batches are made here.
        dataset = Dataset.from_list([{"prompt": "why ", "chosen": "so ", "rejected": "no "}])
        options: dict[str, Any] = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "bf16": False}
        options |= {"max_length": None, "disable_dropout": False, "use_cpu": self.device == "cpu"}
        if self.task == "dpo":
            classes: Any = ((SharedQuestionDPOTrainer, DPOConfig), (DPOTrainer, DPOConfig))
            extra = {"ref_model": self.reference}
        else:
            classes = ((MultiAnswerRewardTrainer, MultiAnswerRewardConfig), (RewardTrainer, RewardConfig))
            extra = {}
        made = []
        for trainer, config in classes:
            if "ref" in getattr(self.model, "peft_config", {}):  # TRL's copy of the adapter, which each trainer makes
                self.model.delete_adapter("ref")
            made.append(
                trainer(self.model, args=config(**options), train_dataset=dataset, processing_class=tokenizer, **extra)
            )
        return made[0], made[1]

    def use(self, attention: str) -> None:
        """Set the attention of policy and reference."""
        for model in (self.model, self.reference):
            if model is not None:
                model.set_attn_implementation(attention)

    def losses(self, provider: str, row: list[Document], backward: bool = True) -> list[Tensor]:
        """Run forward, and backward, of a row; return the loss of each of its batches."""
        if provider in PACKED:
            trainer, batches = self.shared, [shared_examples(self.task, row)]
        else:
            trainer, batches = self.stock, stock_examples(self.task, row)
            if not provider.endswith("_single"):
                batches = [[example for batch in batches for example in batch]]
        self.use("flashmask" if provider in PACKED else provider.removesuffix("_single"))
        trainer.data_collator.pad_to_multiple_of = 1024 if provider.startswith("flex") else None
        made = []
        with attention(PACKED[provider]) if provider in PACKED else contextlib.nullcontext():
            for batch in batches:
                inputs = trainer._prepare_inputs(trainer.data_collator(batch))
                loss = trainer.compute_loss(self.model, inputs)
                if backward:
                    (loss / len(batches)).backward()
                made.append(loss.detach())
        return made

    def step(self, provider: str, row: list[Document]) -> None:
        """Run a training step on a row."""
        self.losses(provider, row)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def check(self, providers: list[str]) -> None:
        """Exit unless all providers have the same log-probabilities or rewards, on a row with two answers per question.

        The figures of questions one at a time are combined as TRL combines those of a batch. Log-probabilities, sums
        over an answer, may differ by 1%. A random head's rewards are about 1, and bfloat16 alone moves them by 0.05
        between SDPA and FlexAttention, so 0.25 is allowed.
        """
        generator = torch.Generator().manual_seed(7)
        row = [(question, answers[:2]) for question, answers in make_row(self.task, 2048, self.vocab, generator)]
        keys: dict[str, Callable[[list[float]], float]] = {"min_reward": min, "max_reward": max}
        if self.task == "dpo":
            keys = {"logps/chosen": statistics.fmean, "logps/rejected": statistics.fmean}
        figures: dict[str, list[float]] = {}
        for provider in providers:
            trainer = self.shared if provider in PACKED else self.stock
            trainer._metrics["train"].clear()
            with torch.no_grad():
                self.losses(provider, row, backward=False)
            figures[provider] = [over(trainer._metrics["train"][key]) for key, over in keys.items()]
        print(f"{self.task}, before training:", figures)
        first = next(iter(figures.values()))
        relative, absolute = (0.01, 0.05) if self.task == "dpo" else (0.0, 0.25)
        for provider, values in figures.items():
            if any(abs(a - b) > max(absolute, relative * abs(b)) for a, b in zip(values, first, strict=True)):
                raise SystemExit(f"{provider} disagrees: {figures}")


def measure(bench: Bench, length: int, count: int, providers: list[str]) -> list[dict[str, object]]:
    """Return a row of figures per provider."""
    generator = torch.Generator().manual_seed(length)
    rows = [make_row(bench.task, length, bench.vocab, generator) for _ in range(count)]
    seconds: dict[str, list[float]] = {name: [] for name in providers}
    memory = dict.fromkeys(providers, 0.0)
    ended: dict[str, str] = {}
    for row in rows:
        for warmup in (True, False):  # the first step of a row compiles, and finds what runs out of memory
            for name in [name for name in providers if name not in ended]:
                torch.cuda.empty_cache()
                made = attempt(lambda name=name, row=row: bench.step(name, row))
                if isinstance(made, str):
                    bench.optimizer.zero_grad(set_to_none=True)
                    ended[name] = made
                elif not warmup:
                    seconds[name].append(made[1])
                    memory[name] = max(memory[name], made[2])
    rates = {
        name: None if name in ended else statistics.median(length / value for value in values)
        for name, values in seconds.items()
    }
    fastest = max((rate for name, rate in rates.items() if rate and name not in PACKED), default=None)
    return [
        {
            "task": bench.task,
            "length": length,
            "answers": ANSWERS[bench.task],
            "rows": count,
            "provider": name,
            "tokens_per_second": ended[name] if rate is None else round(rate),
            "peak_gib": "" if rate is None else round(memory[name], 2),
            "against_fastest_stock": "" if rate is None or fastest is None else round(rate / fastest, 3),
        }
        for name, rate in rates.items()
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--tasks", nargs="+", default=["dpo", "reward"], choices=["dpo", "reward"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--rows", type=int, default=3, help="number of rows of each length")
    parser.add_argument("--providers", nargs="+", default=["flashmask", *STOCK], choices=[*PACKED, *STOCK])
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed")
    torch._dynamo.config.recompile_limit = 256  # flex_attention is compiled for every shape
    logging.getLogger("transformers").setLevel(logging.ERROR)
    figures: list[dict[str, object]] = []
    for task in arguments.tasks:
        bench = Bench(task, arguments.shape)
        bench.check(arguments.providers)
        for length in arguments.lengths:
            figures += measure(bench, length, arguments.rows, arguments.providers)
            write_csv(arguments.csv, figures)
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
