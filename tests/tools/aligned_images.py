"""Runs of GRPO, RLOO and DPO with image prompts on a CPU, by TRL's trainers and this package's."""

from __future__ import annotations

import copy
import os
import tempfile
import zlib
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.context_parallel_cases import norms_of, use_fsdp_on_cpu
from tools.tiny import keep_float64, trainer_settings
from tools.vision import picture, tiny_model, tiny_processor, words
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from flashmask_hf.trainers import (
    SharedPromptGRPOConfig,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOConfig,
    SharedPromptRLOOTrainer,
    SharedQuestionDPOConfig,
    SharedQuestionDPOTrainer,
)


class _TakesPromptsWithoutImages:
    """TRL's trainers with [] for the images of a prompt without any, whose None fails in processors."""

    def _tokenize_prompts(self, prompts: Any) -> Any:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)  # type: ignore[misc]
        return prompt_ids, images and [own or [] for own in images], fields


class _GRPO(_TakesPromptsWithoutImages, GRPOTrainer):
    pass


class _RLOO(_TakesPromptsWithoutImages, RLOOTrainer):
    pass


CLASSES = {
    "grpo": (GRPOConfig, _GRPO, SharedPromptGRPOConfig, SharedPromptGRPOTrainer),
    "rloo": (RLOOConfig, _RLOO, SharedPromptRLOOConfig, SharedPromptRLOOTrainer),
    "dpo": (DPOConfig, DPOTrainer, SharedQuestionDPOConfig, SharedQuestionDPOTrainer),
}


def message(role: str, count: int) -> list[dict[str, str]]:
    return [{"role": role, "content": words(count).strip()}]


def rows(*images: list[tuple[int, int]], answers: bool = False) -> Dataset:
    """Return prompts with images of these sizes, the first two of equal text; with `answers`, preferences."""
    found: list[dict[str, Any]] = []
    for nth, sizes in enumerate(images):
        prompt = found[0]["prompt"] if nth == 1 else message("user", 3 + nth)
        row = {"prompt": prompt, "images": [picture(*size) for size in sizes]}
        if answers:
            row |= {"chosen": message("assistant", 2 + nth), "rejected": message("assistant", 5)}
        found.append(row)
    return Dataset.from_list(found)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Depends on all tokens of a completion."""
    return [sum(ids) % 7 / 7 + len(ids) / 10 for ids in completion_ids]


def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands for a model's `generate`: completions of one to seven words, by the prompt and the row in its group."""
    drawn = []
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        generator = torch.Generator().manual_seed(zlib.crc32(repr((ids[mask.bool()].tolist(), row % 4)).encode()))
        length = int(torch.randint(1, 8, (), generator=generator))
        drawn.append([*torch.randint(6, 84, (length,), generator=generator).tolist(), 2])
    width = max(map(len, drawn))
    padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in drawn])
    return torch.cat([input_ids, padded], 1)


class Gradients(TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def trained(kind: str, *, sharded: bool, **options: Any) -> Any:
    """Return a case for `tools.processes` that trains two prompts per step, one of them without an image at times.

    It returns losses and norms of weights. A group of 1 is the reference.
    """

    def case(group: Any) -> dict[str, Any]:
        is_dpo, size = options.get("algorithm") == "dpo", group.size()
        if sharded and size > 1:
            use_fsdp_on_cpu()
        settings: dict[str, Any] = {"per_device_train_batch_size": (2 if is_dpo else 8) // size, "max_steps": 2}
        settings |= {"gradient_accumulation_steps": 1, "dataloader_pin_memory": False}
        settings |= {"use_cpu": size == 1 or not sharded, "learning_rate": 0.01}
        data = rows([(2, 2)], [(2, 2)], [], [(2, 4)], answers=is_dpo)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            keep_float64(patch)
            trainer = make(kind, data, folder, True, **settings | options)
            trainer.train()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "norms": norms_of(trainer.model)}

    return case


CASES = {
    "dpo, ddp": trained("gemma3", sharded=False, algorithm="dpo", lora=True),
    "grpo, ddp": trained("gemma3", sharded=False),
    "dpo, fsdp2": trained("qwen3_vl", sharded=True, algorithm="dpo", reference=True),
    "grpo, fsdp2": trained("qwen2_5_vl", sharded=True),
}
"""Cases for `tools.processes`."""


def make(kind: str, data: Dataset, out: Any, ours: bool, **options: Any) -> Any:
    """Return a trainer of a tiny model.

    Args:
        kind: of `tools.vision.KINDS`.
        data: of `rows`.
        out: output folder.
        ours: whether this package's trainer, or TRL's.
        options: of the trainer's configuration; and "algorithm", a key of `CLASSES`, "lora", "reference" (DPO: a given
            one), "processor", "share", "exact_ratios" and "dtype", float64 unless given.
    """
    algorithm, dtype = options.pop("algorithm", "grpo"), options.pop("dtype", torch.float64)
    stock_config, stock, our_config, shared = CLASSES[algorithm]
    sharing = {name: options.pop(name) for name in ("share", "exact_ratios") if name in options}
    keywords: dict[str, Any] = {}
    if options.pop("lora", False):
        keywords["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=r".*(language|text)_model.*(q|v)_proj"
        )
    settings = trainer_settings(out) | {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
    if algorithm != "dpo":
        settings |= {"beta": 0.0, "num_generations": 4, "max_completion_length": 8, "gradient_accumulation_steps": 2}
        keywords["reward_funcs"] = reward
    processor = options.pop("processor", None)
    if processor is None:
        processor = copy.deepcopy(tiny_processor(kind))
        processor.tokenizer.padding_side = "left"  # as TRL loads it
    settings |= {"lr_scheduler_type": "constant"} | options
    attention = "flashmask" if ours else "sdpa"
    if settings.pop("reference", False):
        keywords["ref_model"] = tiny_model(kind, attention, dtype)
    args = our_config(**settings, **sharing) if ours else stock_config(**settings)
    model = tiny_model(kind, attention, dtype)
    if settings.get("beta", 0.1) and not keywords.keys() & {"peft_config", "ref_model"}:
        model.save_pretrained(out)  # TRL loads the reference by the policy's name
        model.config._name_or_path = str(out)
    torch.manual_seed(3)
    trainer = (shared if ours else stock)(
        model,
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=processor,
        **keywords,
    )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if algorithm != "dpo":
        model.generate = generate
    torch.manual_seed(4)  # so that policy and reference differ
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    trainer.kept = Gradients()
    trainer.add_callback(trainer.kept)
    return trainer
