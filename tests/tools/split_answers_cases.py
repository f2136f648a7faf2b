"""Cases of `tests/trainers/test_context_parallel.py`: those of `context_parallel_cases`, and trainers of answers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from datasets.fingerprint import get_temporary_cache_files_directory
from peft import LoraConfig
from tools import context_parallel_cases as rows
from tools.parallel_cases import model_of
from tools.tiny import CHECKPOINTING, VOCAB, trainer_settings, word_tokenizer
from transformers import AutoModelForSequenceClassification

from flashmask_hf.trainers import (
    MultiAnswerRewardConfig,
    MultiAnswerRewardTrainer,
    SharedQuestionDPOConfig,
    SharedQuestionDPOTrainer,
)

KILLED = rows.KILLED

get_temporary_cache_files_directory()  # makes the folder of TRL's cache before processes fork, so that they share it

METRICS = ("loss", "grad_norm", "num_tokens", "mask_sparsity", "shared_tokens_saved")
DPO_METRICS = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected")
DPO_METRICS += ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
DPO_METRICS += (*METRICS, "num_input_tokens_seen")


def pairs() -> Dataset:
    """Return questions with two answers of uneven lengths: some shards of a batch's row have no label."""
    generator = torch.Generator().manual_seed(5)

    def ids(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    spans = ((8, 30), (1, 12), (1, 20))
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    made = [{name: ids(*span) for name, span in zip(names, spans, strict=True)} for _ in range(12)]
    made[0] |= {"prompt_ids": ids(60, 61), "chosen_ids": [5], "rejected_ids": [6]}
    made[1] |= {"chosen_ids": [7, 8], "rejected_ids": [7, 8]}
    return Dataset.from_list(made)


def settings_of(group: Any, name: str) -> dict[str, Any]:
    size = group.size()
    settings = trainer_settings(rows.FOLDER / f"{name}-{size}") | {
        "max_steps": 2,
        "per_device_train_batch_size": 1 if size == 4 else 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "pad_to_multiple_of": 16,  # so that blocks are dealt
        "dataloader_pin_memory": False,
        "use_cpu": size == 1,
    }
    if size > 1:
        rows.use_fsdp_on_cpu()
        settings["parallelism_config"] = ParallelismConfig(cp_size=2, dp_shard_size=size // 2)
    return settings


def results(trainer: Any, group: Any, name: str, metrics: tuple[str, ...]) -> dict[str, Any]:
    """Return metrics that the trainer logged, after writing its weights."""
    found = rows.outcome(trainer, group, name)
    logs = trainer.state.log_history
    names = [*metrics, *(f"eval_{key}" for key in metrics)]
    logged = {key: [entry[key] for entry in logs if key in entry] for key in names}
    return logged | {"sharded": found["sharded"], "learning_rate": trainer.args.learning_rate}


def dpo_trainer(
    group: Any, name: str, heads: int = 4, data: Any = None, peft_config: Any = None, layers: int = 2, **changes: Any
) -> SharedQuestionDPOTrainer:
    policy, reference = model_of("mistral" if peft_config else "llama", 8, heads, layers), None
    if peft_config is None:
        reference = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    data = pairs() if data is None else data
    options = {"beta": 0.5, "max_length": 128, "include_num_input_tokens_seen": "non_padding"}
    return SharedQuestionDPOTrainer(
        policy,
        reference,
        SharedQuestionDPOConfig(**settings_of(group, name) | options | changes),
        train_dataset=data,
        eval_dataset=few(data),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


def few(data: Any) -> Any:
    """Return a stream, or five rows of a data set, so that the last batch of two is smaller."""
    return data if isinstance(data, IterableDataset) else data.select(range(5))


def streamed(group: Any, data: Dataset) -> dict[str, Any]:
    """Return options of a case whose last batches in two groups of ranks have two rows and one, as in one process."""
    order = [0, 1, 2, 3, 4, 5, 6] if group.size() > 1 else [0, 2, 1, 3, 4, 6, 5]
    rows = data.select(order).to_list()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1 if group.size() > 1 else 2}
    sizes |= {"per_device_eval_batch_size": 2 if group.size() > 1 else 4}
    return {"data": IterableDataset.from_generator(lambda: iter(rows)), **sizes, **EVALUATED}


CHECKPOINTED = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
RESUMED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 0.01}
RESUMED["adam_epsilon"] = 1e-3  # Adam's first steps would enlarge rounding of small gradients


def dpo(group: Any) -> dict[str, Any]:
    """Keys are exchanged, so rows are dealt; checkpoints, evaluation."""
    trainer = dpo_trainer(group, "dpo", **CHECKPOINTED, **EVALUATED)
    trainer.train()
    return results(trainer, group, "dpo", DPO_METRICS)


def dpo_stream(group: Any) -> dict[str, Any]:
    """A stream with unequal last batches, before which the run in groups resumes."""
    options = streamed(group, pairs()) | RESUMED
    if group.size() > 1:
        dpo_trainer(group, "dpo stream", **options | {"max_steps": 1}).train()
    trainer = dpo_trainer(group, "dpo stream", **options)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1" if group.size() > 1 else None)
    return results(trainer, group, "dpo stream", DPO_METRICS)


def dpo_losses(group: Any) -> dict[str, Any]:
    """WPO's weights and tails that count half; heads are exchanged."""
    options = {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5, "use_weighting": True}
    trainer = dpo_trainer(group, "dpo losses", heads=8, **options)
    trainer.train()
    return results(trainer, group, "dpo losses", DPO_METRICS)


def dpo_weights(group: Any) -> dict[str, Any]:
    """Pairs with weights, in several rows; reference log-probabilities computed before."""
    data = Dataset.from_list([row | {"weight": index % 3 / 2} for index, row in enumerate(pairs().to_list())])
    options = {"loss_type": ["ipo"], "row_length": 128, "pad_to_multiple_of": None, "precompute_ref_log_probs": True}
    options["max_length"] = 100 + group.size()  # names TRL's cache, so that each group computes them
    trainer = dpo_trainer(group, "dpo weights", data=data, **options, **EVALUATED)
    trainer.train()
    return results(trainer, group, "dpo weights", DPO_METRICS)


def dpo_adapter(group: Any) -> dict[str, Any]:
    """An adapter and the head of a model with windows; the run in groups resumes from its first step."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"])
    options: dict[str, Any] = RESUMED | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    resume = None
    if group.size() > 1:
        torch.manual_seed(0)
        trainer = dpo_trainer(group, "dpo adapter", 1, peft_config=config, **options | {"max_steps": 1})
        trainer.train()
        resume = f"{trainer.args.output_dir}/checkpoint-1"
    torch.manual_seed(0)
    trainer = dpo_trainer(group, "dpo adapter", 1, peft_config=config, **options)
    trainer.train(resume_from_checkpoint=resume)
    return results(trainer, group, "dpo adapter", DPO_METRICS)


REWARD_METRICS = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward", *METRICS)
REWARD_METRICS += tuple(f"accuracy_of_{n}_answers" for n in range(2, 7))


def comparisons(most: int) -> Dataset:
    """Return the questions of `pairs` with two to `most` answers, of which two may be equal."""
    made = []
    for index, row in enumerate(pairs().to_list()):
        more = [[*row["rejected_ids"], *range(9, 9 + n)] for n in range(1, most - 1)]
        answers = [row["chosen_ids"], row["rejected_ids"], *more][: 2 + index % (most - 1)]
        scores = [2.0, 1.0, -0.5, 1.5, 0.25, -3.0][: len(answers)]
        made.append({"prompt_ids": row["prompt_ids"], "answers_ids": answers, "scores": scores})
    return Dataset.from_list(made)


def reward(group: Any, name: str = "reward", kind: str = "llama", heads: int = 4, **changes: Any) -> dict[str, Any]:
    """Two or more answers to a question; keys are exchanged; checkpoints, evaluation and predictions."""
    adapts, data = changes.pop("adapts", False), comparisons(changes.pop("most", 3))
    if name == "reward stream":
        changes |= streamed(group, data)
        data = changes.pop("data")
    config = model_of(kind, 8, heads).config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    options = {"attn_implementation": "flashmask", "dtype": torch.float32}
    model = AutoModelForSequenceClassification.from_config(config, **options)
    adapter = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = MultiAnswerRewardTrainer(
        model,
        MultiAnswerRewardConfig(**settings_of(group, name) | EVALUATED | changes),
        train_dataset=data,
        eval_dataset=few(data),
        processing_class=word_tokenizer(),
        peft_config=adapter if adapts else None,
    )
    trainer.train()
    found = results(trainer, group, name, REWARD_METRICS)
    predicted = trainer.predict(few(data))
    return found | {"predicted": predicted.predictions.flatten().tolist()}


def reward_adapter(group: Any) -> dict[str, Any]:
    """An adapter and the head of a model with windows; margins, centering, a listwise loss and several rows."""
    options = {"loss_type": "listwise", "score_margin": 0.5, "center_rewards_coefficient": 0.1}
    options |= {"row_length": 128, "pad_to_multiple_of": None, "adapts": True}
    return reward(group, "reward adapter", "mistral", 8, **options)


def dpo_compiled(group: Any) -> dict[str, Any]:
    """Checkpointed layers in a compiled model, on batches of one shape."""
    spans = {"prompt_ids": (2, 22), "chosen_ids": (5, 13), "rejected_ids": (9, 17)}
    data = Dataset.from_list([{name: [n + i for n in range(*x)] for name, x in spans.items()} for i in range(12)])
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = dpo_trainer(group, "dpo compiled", data=data, layers=1, **CHECKPOINTED, **options)
    trainer.train()
    return results(trainer, group, "dpo compiled", DPO_METRICS)


ANSWERS = {"reward": partial(reward, **CHECKPOINTED), "reward adapter": reward_adapter} | {
    "reward of six": partial(reward, name="reward of six", heads=8, most=6),
    "dpo compiled": dpo_compiled,
    "dpo": dpo,
    "dpo losses": dpo_losses,
    "dpo weights": dpo_weights,
    "dpo adapter": dpo_adapter,
}

EVALUATIONS = {"dpo": 2, "dpo weights": 2} | {name: 2 for name in ANSWERS if name.startswith("reward")}
"""Number of evaluations of a case, if any."""


def sft_stream(group: Any) -> dict[str, Any]:
    """Evaluation of a stream of rows, as many as leave one group of ranks without a last batch."""
    data = rows.examples().select(range(21)).to_list()
    options = {"data": IterableDataset.from_generator(lambda: iter(data)), "per_device_eval_batch_size": 2}
    trainer = rows.trainer_of(group, "sft stream", model_of("llama", 8, 4), max_steps=1, **options, **EVALUATED)
    trainer.train()
    return rows.outcome(trainer, group, "sft stream")


STREAMS = {"sft stream": sft_stream, "dpo stream": dpo_stream}
STREAMS["reward stream"] = partial(reward, name="reward stream")

CASES = rows.CASES | ANSWERS | STREAMS

GROUPS = rows.GROUPS | {name: (1, 2) for name in ANSWERS} | {name: (1, 2, 4) for name in ("dpo", "reward")}
GROUPS |= {name: (1, 4) for name in STREAMS}
