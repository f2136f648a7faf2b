"""Cases of `tests/trainers/test_context_parallel.py`: PackedSFTTrainer on accelerate's cp mesh with FSDP2, and its tp.

In a group of 1 they are the reference; groups of 2 split rows in two, groups of 4 in two for two shares of the data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tools.recipes  # noqa: F401  makes the modules of the recipes importable
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import DistributedType, PartialState
from datasets import Dataset
from peft import LoraConfig
from tools.documents import PREFIXES, SAME, turns
from tools.parallel_cases import model_of, tensor_parallel_model
from tools.tiny import CHECKPOINTING, VOCAB, trainer_settings, word_tokenizer
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from flashmask_hf.trainers import LongRows, PackedSFTTrainer
from flashmask_hf.trainers import long_rows_callback as long_rows_module
from flashmask_hf.trainers import sft as sft_module

import common  # isort: skip

FOLDER = Path(os.environ.get("CASES_FOLDER", "."))


def use_fsdp_on_cpu() -> None:
    """Make accelerate shard over processes without accelerators."""
    PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))  # type: ignore[method-assign]
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )


def norms_of(model: Any) -> dict[str, float]:
    """Return the norm of each weight, which may be sharded, by its name without FSDP."""
    weights = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): x.detach().norm().item() for name, x in weights.items()}


def examples() -> Dataset:
    """Return tokenized examples of which prompts of uneven lengths are not learned."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in (33, 50, 11, 30, 20, 40, 60, 8, 90, 5) * 6:
        prompt = int(torch.randint(0, length - 1, (), generator=generator))
        ids = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "completion_mask": [0] * prompt + [1] * (length - prompt)})
    return Dataset.from_list(rows)


def trainer_of(
    group: Any, name: str, model: Any, peft_config: Any = None, data: Any = None, **changes: Any
) -> PackedSFTTrainer:
    size = group.size()
    settings = trainer_settings(FOLDER / f"{name}-{size}") | {
        "max_steps": 4,
        "per_device_train_batch_size": 1 if size == 4 else 2,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.3,
        "max_length": 128,
        "pad_to_multiple_of": 128,
        "dataloader_pin_memory": False,
        "include_num_input_tokens_seen": "non_padding",
        "completion_only_loss": True,
        "use_cpu": size == 1,
    }
    if size > 1 and "parallelism_config" not in changes:
        use_fsdp_on_cpu()
        settings["parallelism_config"] = ParallelismConfig(cp_size=2, dp_shard_size=size // 2)
    data = examples() if data is None else data
    return PackedSFTTrainer(
        model,
        SFTConfig(**settings | changes),
        train_dataset=data,
        eval_dataset=data.select(range(10)) if isinstance(data, Dataset) else data,  # three rows: a smaller last batch
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


LOGGED = ("loss", "grad_norm", "eval_loss", "eval_entropy")
LOGGED += ("tokens_per_second", "keys_per_token", "num_input_tokens_seen")
LOGGED += ("train_loss", "num_tokens", "total_flos")


CHECKPOINTED = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}


def outcome(trainer: PackedSFTTrainer, group: Any, name: str, checkpoint: str | None = None) -> dict[str, Any]:
    """Train, write the weights, and return what the trainer logged."""
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = trainer.state.log_history
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped if group.size() > 1 else trainer.model)
    state = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in state.items()}
    if group.rank() == 0:
        torch.save(state, FOLDER / f"{name}-{group.size()}.pt")
    found = {key: [entry[key] for entry in logs if key in entry] for key in LOGGED}
    found["sharded"] = type(next(iter(trainer.model_wrapped.parameters()))).__name__
    return found


@contextlib.contextmanager
def counted_time() -> Iterator[None]:
    """Let the clock of `PackedSFTTrainer` go on by 1 s at each look, and that of others, torch's too, as ever."""
    ticks = itertools.count()
    clock: Any = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft_module, "time", clock)
        yield


def full(group: Any) -> dict[str, Any]:
    """Full fine-tuning with accumulation, clipping, checkpointing and evaluation."""
    with counted_time():
        options = CHECKPOINTED | {"eval_strategy": "steps", "eval_steps": 2}
        model = model_of("llama", 8, 4)
        model.accepts_loss_kwargs = False  # as of Qwen-VL and Gemma 4
        return outcome(trainer_of(group, "full", model, **options), group, "full")


def tensor_parallel(group: Any) -> dict[str, Any]:
    """Full fine-tuning of whole rows with the heads of a model split over processes."""
    with counted_time():
        model, options = model_of("llama", 8, 4), {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        options["per_device_eval_batch_size"] = 2
        if group.size() > 1:
            use_fsdp_on_cpu()
            os.environ["ACCELERATE_USE_FSDP"] = "false"
            model, options = tensor_parallel_model(group, model), options | {"parallelism_config": None}
        trainer = trainer_of(group, "tensor parallel", model, **options)
        found = outcome(trainer, group, "tensor parallel")
    predicted = trainer.predict(trainer.eval_dataset)
    return found | {"predicted": [*predicted.predictions.shape, predicted.metrics["test_loss"]]}


def adapter(group: Any) -> dict[str, Any]:
    """An adapter and the head of a model with windows, which accelerate's own context parallelism refuses.

    Only the first of three steps is logged.
    """
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"])
    torch.manual_seed(0)
    logging = {"logging_steps": 10, "logging_first_step": True}
    trainer = trainer_of(group, "adapter", model_of("mistral", 8, 1), config, max_steps=3, **logging)
    if group.size() > 1:
        with pytest.raises(ValueError, match="evaluation must follow training; set eval_on_start=True"):
            trainer.evaluate()
    return outcome(trainer, group, "adapter")


def weighed(group: Any) -> dict[str, Any]:
    """Weights of tokens, some negative, whose sums in a step and in an evaluation are below 1."""
    data = examples().map(lambda row: {"weight": [(token % 5 - 1) * 1e-4 for token in row["input_ids"]]})
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    with counted_time():
        return outcome(trainer_of(group, "weighed", model_of("llama", 8, 4), data=data, **options), group, "weighed")


SAVED = {
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.05,
    "optim": "adamw_torch",
}


class Kill(TrainerCallback):
    """Ends every process by SIGKILL in the third step, when the checkpoint of the second is written."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def killed(group: Any) -> dict[str, Any]:
    """A run that is killed in its third step of four."""
    trainer = trainer_of(group, "resumed", model_of("llama", 6, 2), **SAVED)
    trainer.add_callback(Kill())
    trainer.train()
    return {}


def uninterrupted(group: Any) -> dict[str, Any]:
    """Four steps without a break."""
    trainer = trainer_of(group, "uninterrupted", model_of("llama", 6, 2), **SAVED | {"save_strategy": "no"})
    return outcome(trainer, group, "uninterrupted")


def resumed(group: Any) -> dict[str, Any]:
    """Four steps, two of them from the checkpoint of the run that was killed."""
    trainer = trainer_of(group, "resumed", model_of("llama", 6, 2), **SAVED)
    args: Any = trainer.args
    args.resume_from_checkpoint = "true"
    checkpoint = common.checkpoint_to_resume(args)
    assert Path(str(checkpoint)).name == "checkpoint-2"
    found = outcome(trainer, group, "resumed", checkpoint)
    dist.barrier()
    if group.rank() == 0:
        shutil.rmtree(FOLDER / f"resumed-{group.size()}")
    return found


def long_rows(group: Any) -> dict[str, Any]:
    """Tiles, and as measured attention kept and checkpoints on the host; one process trains without these settings."""
    trainer = trainer_of(group, "long_rows", model_of("llama", 8, 4), max_steps=2, **CHECKPOINTED)
    if group.size() == 1:
        return outcome(trainer, group, "long_rows")
    made = []

    def offload_checkpoints(model: Any) -> Any:
        made.append(offload_all_checkpoints(model, min_bytes=1))
        return made[-1]

    run, lengths, offload_all_checkpoints = LongRows._run, [], long_rows_module.offload_checkpoints
    with pytest.MonkeyPatch.context() as patch:  # a GPU with room for all
        patch.setattr(long_rows_module, "offload_checkpoints", offload_checkpoints)
        patch.setattr(long_rows_module, "obstacle_to_measuring", lambda trainer: None)
        patch.setattr(long_rows_module, "available_gpu_bytes", lambda: 1e9)
        patch.setattr(long_rows_module, "MEASURED_TOKENS", (16, 32))
        patch.setattr(LongRows, "_run", lambda self, tokens: lengths.append(tokens) or run(self, tokens))
        patch.setattr(LongRows, "_peak_of", lambda self, tokens: self._run(tokens) or float(tokens))
        tiles = LongRows(trainer, tile_tokens=24, host_gib=1)
        trainer.add_callback(tiles)
        found = outcome(trainer, group, "long_rows")
    assert (tiles.kept, lengths) == (True, [32, 32, 64])  # tokens of both shards
    rows, layers, hidden, heads = 2 * 64, 2, 48, 8
    # a layer's input, attention's output, which is wider, and its log-sum-exps, in float32
    assert made[0].seen_bytes == rows * layers * (hidden + heads * 8 + heads) * 4, made[0].seen_bytes
    return found


def compiled(group: Any) -> dict[str, Any]:
    """Checkpointed layers in a compiled model."""
    options = CHECKPOINTED | {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = trainer_of(group, "compiled", model_of("llama", 8, 4, layers=1), **options)
    return outcome(trainer, group, "compiled")


def prefixes(group: Any) -> dict[str, Any]:
    """Rows of shared prefixes; one process trains on the examples in stock TRL, without packing."""
    size = group.size()
    settings: dict[str, Any] = trainer_settings(FOLDER / f"prefixes-{size}") | PREFIXES | {"use_cpu": size == 1}
    settings |= {"per_device_train_batch_size": 16 if size == 1 else 4, "dataloader_pin_memory": False}
    if size > 1:
        use_fsdp_on_cpu()
        settings["parallelism_config"] = ParallelismConfig(cp_size=2)
    kind: Any = SFTTrainer if size == 1 else partial(PackedSFTTrainer, share_prefixes=True)
    options: dict[str, Any] = {"train_dataset": Dataset.from_dict(turns()), "processing_class": word_tokenizer()}
    trainer = kind(model_of("llama", 8, 4), SFTConfig(**settings), **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"rows": len(trainer.train_dataset)} | {name: [entry[name] for entry in logs] for name in SAME}


CASES = {
    "full": full,
    "tensor parallel": tensor_parallel,
    "adapter": adapter,
    "weighed": weighed,
    "uninterrupted": uninterrupted,
    "resumed": resumed,
    "long_rows": long_rows,
    "compiled": compiled,
    "prefixes": prefixes,
}

GROUPS = {name: (1, 2) for name in CASES} | {"full": (1, 2, 4), "uninterrupted": (2,), "resumed": (2,)}

KILLED = {"resumed": killed}
