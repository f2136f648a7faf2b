"""Cases of `tests/trainers/test_context_parallel.py`: those of `context_parallel_cases`, and trainers of answers.

Groups of 4 split rows in four in cases named "..., one row", else in two for two shares of the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from datasets.fingerprint import get_temporary_cache_files_directory
from peft import LoraConfig
from tools import context_parallel_cases as rows
from tools.context_parallel_cases import CHECKPOINTED
from tools.parallel_cases import model_of
from tools.tiny import CHECKPOINTING, VOCAB, trainer_settings, word_tokenizer
from transformers import AutoModelForSequenceClassification

import flashmask_hf
from flashmask_hf.long_rows import offload_checkpoints, tile_tokens
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


ONE_ROW = ", one row"


def settings_of(group: Any, name: str) -> dict[str, Any]:
    size = group.size()
    shares = 2 if size == 4 and not name.endswith(ONE_ROW) else 1
    settings = trainer_settings(rows.FOLDER / f"{name}-{size}") | {
        "max_steps": 2,
        "per_device_train_batch_size": 2 // shares,
        "per_device_eval_batch_size": 2 // shares,
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
        settings["parallelism_config"] = ParallelismConfig(cp_size=size // shares, dp_shard_size=shares)
    return settings


def results(
    make: Callable[..., Any], group: Any, name: str, metrics: tuple[str, ...], resumes: bool = False
) -> dict[str, Any]:
    """Return what a trainer logged and predicts, after training and writing its weights.

    With `resumes`, a trainer in a group begins at the checkpoint of the first step of another.
    """
    checkpoint = None
    if resumes and group.size() > 1:
        make(max_steps=1).train()
        checkpoint = str(rows.FOLDER / f"{name}-{group.size()}" / "checkpoint-1")
    trainer = make()
    found = rows.outcome(trainer, group, name, checkpoint)
    logs = trainer.state.log_history
    names = [*metrics, *(f"eval_{key}" for key in metrics)]
    logged = {key: [entry[key] for entry in logs if key in entry] for key in names}
    if isinstance(trainer, MultiAnswerRewardTrainer):
        logged["predicted"] = trainer.predict(few(trainer.train_dataset)).predictions.flatten().tolist()
    return logged | {"sharded": found["sharded"], "learning_rate": trainer.args.learning_rate}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
RESUMED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 0.01}
RESUMED["adam_epsilon"] = 1e-2  # Adam's first steps would enlarge rounding of small gradients


def few(data: Any, chosen: range = range(5)) -> Any:
    """Return a stream, or rows of a data set: of five, the last batch of two is smaller."""
    return data if isinstance(data, IterableDataset) else data.select(chosen)


def streamed(group: Any, data: Dataset) -> dict[str, Any]:
    """Return options of a case whose last batches in two groups of ranks have two rows and one, as in one process."""
    order = [0, 1, 2, 3, 4, 5, 6] if group.size() > 1 else [0, 2, 1, 3, 4, 6, 5]
    rows = data.select(order).to_list()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1 if group.size() > 1 else 2}
    sizes |= {"per_device_eval_batch_size": 2 if group.size() > 1 else 4}
    return {"data": IterableDataset.from_generator(lambda: iter(rows)), **sizes, **EVALUATED}


def dpo_trainer(
    group: Any,
    name: str,
    heads: int = 4,
    data: Any = None,
    peft_config: Any = None,
    layers: int = 2,
    evaluated: range = range(5),
    **changes: Any,
) -> SharedQuestionDPOTrainer:
    policy, reference = model_of("mistral" if peft_config else "llama", 8, heads, layers), None
    if peft_config is None:
        reference = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    data = pairs() if data is None else data
    options = {"beta": 0.5, "include_num_input_tokens_seen": "non_padding"}
    options["max_length"] = 100 + group.size() + len(name)  # names TRL's cache of the reference's results
    return SharedQuestionDPOTrainer(
        policy,
        reference,
        SharedQuestionDPOConfig(**settings_of(group, name) | options | changes),
        train_dataset=data,
        eval_dataset=few(data, evaluated),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


def dpo(group: Any, name: str, resumes: bool = False, **options: Any) -> dict[str, Any]:
    return results(partial(dpo_trainer, group, name, **options), group, name, DPO_METRICS, resumes)


def dpo_stream(group: Any, name: str = "dpo stream") -> dict[str, Any]:
    """A stream with unequal last batches, before which the run in groups resumes."""
    return dpo(group, name, resumes=True, **streamed(group, pairs()), **RESUMED)


def dpo_long_rows(group: Any, name: str) -> dict[str, Any]:
    """Tiles, attention kept and checkpoints on the host, set by hand; one process trains without them."""
    offloads = []

    def make() -> SharedQuestionDPOTrainer:
        if group.size() == 1:
            return dpo_trainer(group, name, **CHECKPOINTED)
        keep = {"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}
        trainer = dpo_trainer(group, name, **CHECKPOINTED | {f"{CHECKPOINTING}_kwargs": keep})
        assert len(tile_tokens(trainer.model, 16)) == 7  # an MLP and two norms in each of two layers, and the last norm
        offloads.append(offload_checkpoints(trainer.model, 2**30, min_bytes=1))
        return trainer

    found = results(make, group, name, DPO_METRICS)
    assert all(offload.seen_bytes > 0 for offload in offloads)
    return found


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


def reward_trainer(
    group: Any,
    name: str,
    kind: str = "llama",
    heads: int = 4,
    data: Any = None,
    evaluated: range = range(5),
    peft_config: Any = None,
    **changes: Any,
) -> MultiAnswerRewardTrainer:
    data = comparisons(3) if data is None else data
    config = model_of(kind, 8, heads).config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    options = {"attn_implementation": "flashmask", "dtype": torch.float32}
    return MultiAnswerRewardTrainer(
        AutoModelForSequenceClassification.from_config(config, **options),
        MultiAnswerRewardConfig(**settings_of(group, name) | EVALUATED | changes),
        train_dataset=data,
        eval_dataset=few(data, evaluated),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


def reward(group: Any, name: str, resumes: bool = False, **options: Any) -> dict[str, Any]:
    return results(partial(reward_trainer, group, name, **options), group, name, REWARD_METRICS, resumes)


def reward_stream(group: Any, name: str = "reward stream") -> dict[str, Any]:
    return reward(group, name, **streamed(group, comparisons(3)))


SPANS = {"prompt_ids": (2, 22), "chosen_ids": (5, 13), "rejected_ids": (9, 17)}

ROWS = {"row_length": 128, "pad_to_multiple_of": None}
"""Several rows per batch."""

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}

CALLS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    # keys are exchanged by two processes, so rows are dealt
    "reward": (reward, CHECKPOINTED),
    # a model with windows
    "reward adapter": (
        reward,
        {"kind": "mistral", "heads": 8, "peft_config": LoraConfig(task_type="SEQ_CLS", **LORA), **ROWS}
        | {"loss_type": "listwise", "score_margin": 0.5, "center_rewards_coefficient": 0.1},
    ),
    # heads are exchanged; two of the questions that are evaluated fill at most a tile
    "reward of six": (
        reward,
        {"heads": 8, "data": comparisons(6), "evaluated": range(4, 8), "resumes": True, **RESUMED},
    ),
    # batches of one shape
    "dpo compiled": (
        dpo,
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "layers": 1, **CHECKPOINTED}
        | {"data": Dataset.from_list([{k: [n + i for n in range(*x)] for k, x in SPANS.items()} for i in range(12)])},
    ),
    "dpo": (dpo, CHECKPOINTED | EVALUATED),
    # WPO's weights and tails that count half
    "dpo losses": (
        dpo,
        {"heads": 8, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5}
        | {"use_weighting": True},
    ),
    "dpo weights": (
        dpo,
        {"loss_type": ["ipo"], "precompute_ref_log_probs": True, "evaluated": range(4), **ROWS, **EVALUATED}
        | {"data": pairs().add_column("weight", [index % 3 / 2 for index in range(12)])},
    ),
    # a model with windows, whose head learns
    "dpo adapter": (
        dpo,
        {"heads": 1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "resumes": True, **RESUMED}
        | {"peft_config": LoraConfig(modules_to_save=["lm_head"], **LORA)},
    ),
    "dpo long rows": (dpo_long_rows, {}),
}

ANSWERS = {name: partial(run, name=name, **options) for name, (run, options) in CALLS.items()}

EVALUATIONS = {"dpo": 2, "dpo weights": 2} | {name: 2 for name in ANSWERS if name.startswith("reward")}
"""Number of evaluations of a case, if any."""

OF_FOUR = ["dpo losses", "dpo weights", "reward of six"]
"""Cases in groups of 4, both with one row and with two shares of the data."""

IN_ONE_ROW = {
    f"{name}{ONE_ROW}": partial(ANSWERS[name], name=f"{name}{ONE_ROW}") for name in ("dpo", "dpo adapter", *OF_FOUR)
}


def sft_stream(group: Any) -> dict[str, Any]:
    """Evaluation of a stream of rows, as many as leave one group of ranks without a last batch."""
    data = rows.examples().select(range(21)).to_list()
    options = {"data": IterableDataset.from_generator(lambda: iter(data)), "per_device_eval_batch_size": 2}
    trainer = rows.trainer_of(group, "sft stream", model_of("llama", 8, 4), max_steps=1, **options, **EVALUATED)
    return rows.outcome(trainer, group, "sft stream")


STREAMS = {"sft stream": sft_stream, "dpo stream": dpo_stream, "reward stream": reward_stream}

CASES = rows.CASES | ANSWERS | IN_ONE_ROW | STREAMS

GROUPS = rows.GROUPS | {name: (1, 2) for name in ANSWERS} | {name: (1, 2, 4) for name in OF_FOUR}
GROUPS |= {name: (4,) for name in IN_ONE_ROW} | {name: (1, 4) for name in STREAMS}
