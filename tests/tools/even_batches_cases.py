"""Cases of processes with unequal numbers of rows, for `tools.processes`."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from tools.documents import PREFIXES, SAME, turns
from tools.tiny import llama_config, preference_rows, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForBlockDiffusion, DataCollatorForPackedLanguageModeling
from flashmask_hf.trainers import (
    MultiAnswerRewardConfig,
    MultiAnswerRewardTrainer,
    PackedDiffusionTrainer,
    PackedSFTTrainer,
    SharedQuestionDPOConfig,
    SharedQuestionDPOTrainer,
)

DOCUMENTS = [[5 + (i + j) % 50 for j in range(3 + i % 9)] for i in range(60)]


def rows(shards: list[list[int]]) -> Any:
    """Yield the documents of some shards, each a list of indices."""
    for shard in shards:
        yield from ({"input_ids": DOCUMENTS[index]} for index in shard)


def stream(*sizes: int) -> IterableDataset:
    """Return a stream of shards of some numbers of documents."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    shards = [list(range(*edges[i : i + 2])) for i in range(len(sizes))]
    return IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})


def trainer_of(train: Any, evaluated: Any = None, collator: Any = None, **options: Any) -> PackedSFTTrainer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3), attn_implementation="flashmask")
    return PackedSFTTrainer(
        model,
        SFTConfig(**trainer_settings(tempfile.mkdtemp()) | {"max_length": 16, "max_steps": 3} | options),
        collator,
        train_dataset=train,
        eval_dataset=evaluated,
        processing_class=word_tokenizer(),
    )


def trained(*sizes: int, steps: int = 1) -> Any:
    """Return a case that trains past the end of a stream."""

    def case(group: Any) -> dict[str, Any]:
        trainer = trainer_of(
            stream(*sizes), max_steps=16, per_device_train_batch_size=2, gradient_accumulation_steps=steps
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {"steps": len(logs), "tokens": [entry["num_tokens"] for entry in logs]}

    return case


def evaluated(data: Any, **options: Any) -> Any:
    """Return a case that evaluates a data set."""

    def case(group: Any) -> dict[str, Any]:
        made = data()
        trainer = trainer_of(made if isinstance(made, Dataset) else stream(60), made, **options)
        first, found = trainer.evaluate(), trainer.evaluate()
        assert first["eval_loss"] == found["eval_loss"]
        last: Any = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
        return {name: last[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")}

    return case


def predicted(group: Any) -> dict[str, Any]:
    """Logits of five rows, in batches of two and of one; a process has no second batch."""
    collator = DataCollatorForPackedLanguageModeling(max_length=16)
    trainer = trainer_of(stream(60), None, collator, per_device_eval_batch_size=2)
    found = [trainer.predict(data).predictions for data in (whole(12), stream(12))]
    assert [x.shape for x in found] == [(5, 16, 64)] * 2  # in every process
    return {"sums": [float(abs(x).sum()) for x in found]}


def weighed(group: Any) -> dict[str, Any]:
    """Weights of tokens, some negative, whose sum in a step is below 1. Each step has all 12 rows of one document."""
    rows = [document for document in DOCUMENTS if len(document) > 8][:12]
    weights = [[(token % 5 - 1) * (index % 3 + 1) / 1e4 for token in row] for index, row in enumerate(rows)]
    trainer = trainer_of(
        Dataset.from_dict({"input_ids": rows, "weight": weights}),
        per_device_train_batch_size=4 // group.size(),
        gradient_accumulation_steps=3,
        learning_rate=0.1,
        optim="sgd",
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in logs] for name in ("loss", "grad_norm", "mean_token_accuracy", "entropy")}


def pairs(shards: list[int]) -> Any:
    """Yield the preference rows of some shards, each the number of its rows."""
    for count in shards:
        yield from preference_rows(count)


def pairs_of(shards: list[int]) -> IterableDataset:
    return IterableDataset.from_generator(pairs, gen_kwargs={"shards": shards})


def compared(kind: Any, config: Any, load: Any, *models: str) -> Any:
    """Return a case that evaluates five pairs and a stream of them, then trains on and evaluates a stream past its end.

    The last batches of all differ among the processes.
    """

    def case(group: Any) -> dict[str, Any]:
        data = pairs_of([7, 4, 4])
        options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 2}
        options |= {"per_device_eval_batch_size": 4 // group.size()}
        torch.manual_seed(0)
        settings = llama_config(num_labels=1, initializer_range=0.3)
        given = {name: load(settings, attn_implementation="flashmask") for name in ("model", *models)}
        trainer = kind(
            **given,
            args=config(**trainer_settings(tempfile.mkdtemp()) | options, max_length=64),
            train_dataset=data,
            eval_dataset=data,
            processing_class=word_tokenizer(),
        )
        found = [trainer.evaluate(data) for data in (Dataset.from_list(preference_rows(5)), pairs_of([5]))]
        shared = ("shared_tokens_saved", "mask_sparsity", "num_tokens", "runtime", "per_second", "preparation_time")
        means = [{name: value for name, value in x.items() if not name.endswith(shared)} for x in found]
        trainer.train()
        logs: Any = trainer.state.log_history
        logged = [sum(name in entry for entry in logs) for name in ("loss", "eval_loss")]
        return {"logged": logged, "means": means}

    return case


def prefixes(group: Any) -> dict[str, Any]:
    """Two rows of shared prefixes per process; one process trains on the examples in stock TRL, without packing."""
    size = group.size()
    settings: dict[str, Any] = (
        trainer_settings(tempfile.mkdtemp()) | PREFIXES | {"per_device_train_batch_size": 16 if size == 1 else 2}
    )
    kind: Any = SFTTrainer if size == 1 else partial(PackedSFTTrainer, share_prefixes=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3), attn_implementation="flashmask")
    options: dict[str, Any] = {"train_dataset": Dataset.from_dict(turns()), "processing_class": word_tokenizer()}
    trainer = kind(model, SFTConfig(**settings), **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"rows": len(trainer.train_dataset)} | {name: [entry[name] for entry in logs] for name in SAME}


def weighed_pairs(group: Any) -> dict[str, Any]:
    """Weights of pairs, one 0, in steps of all of eight pairs; the last batch of an evaluation is smaller."""
    data = [row | {"weight": index / 1000} for index, row in enumerate(preference_rows(8))]
    options = {"max_steps": 3, "per_device_train_batch_size": 4 // group.size(), "gradient_accumulation_steps": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2, "optim": "sgd"}
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask") for _ in range(2)]
    trainer = SharedQuestionDPOTrainer(
        *models,
        args=SharedQuestionDPOConfig(**trainer_settings(tempfile.mkdtemp()) | options),
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[::-1][:7]),
        processing_class=word_tokenizer(),
    )
    trainer.train()
    logs: Any = trainer.state.log_history
    return {name: [entry[name] for entry in logs if name in entry] for name in ("loss", "grad_norm", "eval_loss")}


def whole(count: int) -> Dataset:
    return Dataset.from_list(list(rows([list(range(count))])))


def noised(group: Any) -> dict[str, Any]:
    """Train and evaluate on noise that does not depend on the process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3), attn_implementation="flashmask")
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4 // group.size()}
    options |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW would magnify rounding
    trainer = PackedDiffusionTrainer(
        model,
        SFTConfig(**trainer_settings(tempfile.mkdtemp()) | {"max_length": 16} | options),
        DataCollatorForBlockDiffusion(mask_token_id=63, block_size=4, seed=1),
        whole(60),
        whole(30),
        word_tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    logs: Any = trainer.state.log_history
    names = ("loss", "grad_norm", "num_tokens", "eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    return {name: [entry[name] for entry in logs if name in entry] for name in names}


CASES = {
    "diffusion": noised,
    "predicted": predicted,
    "prefixes": prefixes,
    "train, shards of unequal rows": trained(38, 22),
    "train, one shard": trained(60),
    "train, accumulation": trained(38, 22, steps=3),
    "weighed": weighed,
    "weighed pairs": weighed_pairs,
    "evaluate, shards of unequal rows": evaluated(lambda: stream(50, 10)),
    "evaluate, three shards": evaluated(lambda: stream(20, 30, 10)),
    "evaluate, one row": evaluated(lambda: whole(1)),
    "evaluate, a data set": evaluated(lambda: whole(60), per_device_eval_batch_size=3),
    "dpo": compared(SharedQuestionDPOTrainer, SharedQuestionDPOConfig, AutoModelForCausalLM.from_config, "ref_model"),
    "reward": compared(
        MultiAnswerRewardTrainer, MultiAnswerRewardConfig, AutoModelForSequenceClassification.from_config
    ),
}
