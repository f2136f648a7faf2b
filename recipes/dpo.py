r"""Direct preference optimization with attn_implementation="flashmask", which computes each question once.

Every flag of TRL's `DPOConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, and `--row_length`,
also in a YAML file:

    accelerate launch --quiet recipes/dpo.py                                     # the demo: configs/dpo_demo.yaml
    accelerate launch --quiet recipes/dpo.py --config recipes/configs/dpo.yaml

Differences from `trl dpo`:

- `attn_implementation`, bf16 and `--torch_compile` are as in `sft.py`.
- The log adds `shared_tokens_saved` and `mask_sparsity`, and counts answers cut by `max_length`.
- `--do_eval` evaluates at the end, and `--show` then prints how much the saved model prefers the chosen answers.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import common
import data
import torch
from transformers import AutoModelForCausalLM

from flashmask_hf.trainers import SharedQuestionDPOConfig, SharedQuestionDPOTrainer

DEMO_CONFIG = common.CONFIGS / "dpo_demo.yaml"


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    options = common.trainer_options(flags, data.preferences)
    trainer = common.build(SharedQuestionDPOTrainer, **options)
    common.train(trainer, flags.script)
    if flags.own.show and trainer.accelerator.is_main_process:
        show(trainer, options["model"], flags.model.model_revision, flags.own.show)


def parse(argv: Sequence[str]) -> common.Flags:
    return common.parse(argv, DEMO_CONFIG, common.ShowArguments, SharedQuestionDPOConfig)


def show(trainer: Any, path: str, revision: str, number: int) -> None:
    args = trainer.args
    initial = common.load_for_inference(AutoModelForCausalLM, path, args, revision=revision)
    trained = common.load_for_inference(AutoModelForCausalLM, args.output_dir, args)
    for row in itertools.islice(trainer.eval_dataset, number):
        question, chosen, rejected = row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]
        before, after = (
            log_probability(model, question, chosen) - log_probability(model, question, rejected)
            for model in (initial, trained)
        )
        print(f"Prompt: {trainer.processing_class.decode(question, skip_special_tokens=True)}")
        print(f"log p(chosen) - log p(rejected): {before:.2f} before training, {after:.2f} after")


@torch.no_grad()
def log_probability(model: Any, question: list[int], answer: list[int]) -> float:
    input_ids = torch.tensor([question + answer], device=model.device)
    logits = model(input_ids=input_ids).logits[0, len(question) - 1 : -1].float()
    return -torch.nn.functional.cross_entropy(logits, input_ids[0, len(question) :], reduction="sum").item()


if __name__ == "__main__":
    common.run(main)
