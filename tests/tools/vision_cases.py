"""Cases of PackedSFTTrainer on processes whose rows have images on some ranks only, for `tools.processes`.

A group of 1 is the reference: its batches have the rows of both ranks.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
from peft import LoraConfig
from tools.context_parallel_cases import norms_of, use_fsdp_on_cpu
from tools.tiny import CHECKPOINTING, keep_float64, trainer_settings
from tools.vision import conversations, tiny_model, tiny_processor
from trl import SFTConfig

from flashmask_hf.trainers import PackedSFTTrainer

DATA = conversations(1, 0, 0, 0, 2, 0, 0, 0)


def trained(kind: str, *, sharded: bool, lora: bool = False, **options: Any) -> Any:
    """Return a case that trains on two examples per step, and returns losses and norms of weights."""

    def case(group: Any) -> dict[str, Any]:
        size = group.size()
        if sharded and size > 1:
            use_fsdp_on_cpu()
        settings = trainer_settings(tempfile.mkdtemp()) | {
            "per_device_train_batch_size": 2 // size,
            "dataset_kwargs": {"skip_prepare_dataset": True},  # a row is a batch
            "max_steps": 4,
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "use_cpu": size == 1 or not sharded,
            "dataloader_pin_memory": False,
        }
        trainer: Any = PackedSFTTrainer(
            tiny_model(kind),
            SFTConfig(**settings | options),
            train_dataset=DATA,
            processing_class=tiny_processor(kind),
            peft_config=LoraConfig(target_modules=r".*language_model.*q_proj") if lora else None,
        )
        with pytest.MonkeyPatch.context() as patch:
            keep_float64(patch)
            trainer.train()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "norms": norms_of(trainer.model)}

    return case


REENTRANT: dict[str, Any] = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}

CASES = {
    "ddp": trained("qwen3_vl", sharded=False),
    "ddp, reentrant checkpoints": trained("qwen2_5_vl", sharded=False, **REENTRANT),
    "fsdp2": trained("qwen3_vl", sharded=True),
    "fsdp2, frozen tower": trained("qwen2_5_vl", sharded=True, lora=True),
    **{f"fsdp2, {kind}": trained(kind, sharded=True) for kind in ("smolvlm", "gemma3", "gemma4", "llava")},
}
