r"""Train with TRL's trainer and with this package's on one model and its data, and print their losses side by side.

    python recipes/check_against_stock.py sft       # a tiny model and Python's documentation; also dpo, reward and grpo
    python recipes/check_against_stock.py dpo --config my_dpo.yaml --max_steps 50
    python recipes/check_against_stock.py sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \
        --max_length 2048 --truncation_mode keep_start --use_peft

Takes the flags and configuration files of the recipe of that name; `FLAGS` are other defaults. TRL's trainer runs SDPA
on the documents of a packed row as a padded batch; in GRPO, one seed draws the completions of both. The program exits
with 1 if losses, or gradient norms relative to TRL's, differ by more than `BOUND` (`BOUND_BF16` with `--bf16`).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import data
import torch
from datasets import disable_progress_bars
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from flashmask_hf.trainers import (
    MultiAnswerRewardTrainer,
    PackedSFTTrainer,
    SharedPromptGRPOTrainer,
    SharedQuestionDPOTrainer,
)

TRAINERS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, PackedSFTTrainer, data.question_answers),
    "dpo": (DPOTrainer, SharedQuestionDPOTrainer, data.preferences),
    "reward": (RewardTrainer, MultiAnswerRewardTrainer, data.preferences),
    "grpo": (GRPOTrainer, SharedPromptGRPOTrainer, data.passages),
}
"""TRL's trainer, this package's trainer and the demo's data by name of the recipe."""

FLAGS = ["--max_steps", "20", "--logging_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]
FLAGS += ["--bf16", "False", "--dtype", "float32", "--lora_dropout", "0", "--disable_tqdm", "True"]
FLAGS += ["--output_dir", "outputs/check"]
"""Defaults that differ from the recipe's."""

BOUND, BOUND_BF16 = 1e-3, 5e-2


class Curve(NamedTuple):
    """Losses and gradient norms, float64 [steps], and the number of tokens of training forwards."""

    losses: torch.Tensor
    norms: torch.Tensor
    tokens: int


class DocumentsApart(DataCollatorForLanguageModeling):
    """TRL's collator on the documents of packed rows: each is a row of the padded batch."""

    def torch_call(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch of all documents of the rows."""
        names = [name for name in ("input_ids", "labels") if name in rows[0]]
        documents = [one for row in rows for one in zip(*(row[name] for name in names), strict=True)]
        return super().torch_call([dict(zip(names, one, strict=True)) for one in documents if one[0]])  # the last is []


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] not in TRAINERS:
        raise common.FlagError(f"name one of {', '.join(TRAINERS)} first, got {' '.join(argv[:1]) or 'nothing'}")
    disable_progress_bars()
    disable_progress_bar()
    stock, ours, bound = compare(argv[0], argv[1:])
    print("step   loss of TRL    flashmask   gradient norm of TRL    flashmask")
    for step, numbers in enumerate(zip(stock.losses, ours.losses, stock.norms, ours.norms, strict=True), start=1):
        print("{:4}   {:11.6f}  {:11.6f}   {:20.6f}  {:11.6f}".format(step, *numbers))
    losses = (stock.losses - ours.losses).abs().max().item()  # NaN if one is
    # Equal rewards of all completions leave a gradient of 0 in both.
    norms = ((ours.norms - stock.norms).abs() / stock.norms.clamp(min=1e-12)).max().item()
    print(f"Largest difference: {losses:.1e} of losses, {norms:.1e} of gradient norms, relative to TRL's")
    print(f"Tokens of training forwards: {stock.tokens:,} with padding in TRL, {ours.tokens:,} here")
    if not (losses <= bound and norms <= bound):
        raise SystemExit(f"Losses or gradient norms differ by more than {bound}")


def compare(name: str, argv: Sequence[str]) -> tuple[Curve, Curve, float]:
    """Return the curves of TRL's trainer and this package's, and the bound of their difference."""
    recipe: Any = importlib.import_module(name)
    flags: common.Flags = recipe.parse([*FLAGS, *argv])
    if name == "sft" and (flags.training.packing or flags.training.padding_free):
        raise common.FlagError("packing and padding_free give both trainers rows that TRL packs; leave them out")
    stock_class, our_class, demo = TRAINERS[name]
    options = common.trainer_options(flags, demo) | {"eval_dataset": None}
    own: dict[str, Any] = {}
    if name == "grpo":
        options["reward_funcs"] = recipe.reward_functions(flags)
    elif name == "sft":
        own["split"] = flags.own.split
    ours = make(our_class, options | own, flags.model.attn_implementation)
    if name == "sft":  # the rows that this package packed; with the same seed, every step has the same documents
        args = copy.deepcopy(flags.training)
        args.dataset_kwargs, args.max_length = {"skip_prepare_dataset": True}, None
        collator = DocumentsApart(ours.processing_class.pad_token_id)
        options |= {"args": args, "train_dataset": ours.train_dataset, "data_collator": collator}
    our_curve = train(ours)
    del ours
    gc.collect()  # before the other model
    bound = BOUND_BF16 if flags.training.bf16 else BOUND
    return train(make(stock_class, options, "sdpa")), our_curve, bound


def make(trainer_class: Any, options: dict[str, Any], attention: str | None) -> Any:
    """Build a trainer with an attention; the seed sets new weights."""
    args = copy.deepcopy(options["args"])
    args.model_init_kwargs["attn_implementation"] = attention
    set_seed(args.seed)
    return common.build(trainer_class, **options | {"args": args})


def train(trainer: Any) -> Curve:
    tokens = 0

    def count(module: Any, args: Any, output: torch.Tensor) -> None:
        nonlocal tokens
        tokens += output.shape[:-1].numel() * torch.is_grad_enabled()

    trainer.remove_callback(PrinterCallback)
    trainer.model.get_input_embeddings().register_forward_hook(count)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = (torch.tensor([entry[x] for entry in logs], dtype=torch.float64) for x in ("loss", "grad_norm"))
    return Curve(losses, norms, tokens)


if __name__ == "__main__":
    common.run(main)
