r"""Reward models of two or more answers per question with attn_implementation="flashmask", which computes it once.

Every flag of `MultiAnswerRewardConfig` (TRL's `RewardConfig` and three more) and TRL's `ModelConfig`, `ScriptArguments`
and `DatasetMixtureConfig` works, also in a YAML file:

    accelerate launch --quiet recipes/reward.py                                     # the demo: configs/reward_demo.yaml
    accelerate launch --quiet recipes/reward.py --config recipes/configs/reward.yaml

Differences from `trl reward`:

- `attn_implementation`, bf16 and `--torch_compile` are as in `sft.py`.
- A question may have two or more `answers`, with `scores` or ranked; `--loss_type` is pairwise or listwise.
- `lora_task_type` defaults to "SEQ_CLS", so that `--use_peft` trains and saves the new head too.
- The log adds `shared_tokens_saved` and `mask_sparsity`.
- `--do_eval` evaluates at the end, and `--show` then prints the saved model's rewards.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import common
import data
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer

DEMO_CONFIG = common.CONFIGS / "reward_demo.yaml"


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    trainer = common.build(MultiAnswerRewardTrainer, **common.trainer_options(flags, data.rankings))
    common.train(trainer, flags.script)
    if flags.own.show and trainer.accelerator.is_main_process:
        show(trainer, flags.own.show)


def parse(argv: Sequence[str]) -> common.Flags:
    task = {"lora_task_type": "SEQ_CLS"}
    return common.parse(argv, DEMO_CONFIG, common.ShowArguments, MultiAnswerRewardConfig, **task)


def show(trainer: Any, number: int) -> None:
    args = trainer.args
    model = common.load_for_inference(AutoModelForSequenceClassification, args.output_dir, args, num_labels=1)
    for row in itertools.islice(trainer.eval_dataset, number):
        forest, answers, scores, _ = trainer.data_collator._read(row, "the row")
        question = forest.tokens[: forest.tokens.size - sum(map(len, answers))]
        print(f"Prompt: {trainer.processing_class.decode(question, skip_special_tokens=True)}")
        for nth in sorted(range(len(answers)), key=scores.__getitem__, reverse=True):
            input_ids = torch.from_numpy(np.concatenate([question, answers[nth]]))[None].to(model.device)
            with torch.no_grad():
                reward = model(input_ids=input_ids).logits.item()
            beginning = trainer.processing_class.decode(answers[nth][:16], skip_special_tokens=True)
            print(f"Score {scores[nth]:g}: reward {reward:.2f} for {beginning!r}...")


if __name__ == "__main__":
    common.run(main)
