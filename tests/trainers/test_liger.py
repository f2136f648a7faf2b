"""Liger's kernels in every trainer: the losses, gradients and evaluations of the same run without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import trl
from packaging.version import Version
from tools.support import INTERPRETED

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("liger_kernel", reason="interpreter lane: liger-kernel is not installed")
if Version(trl.__version__) < Version("1.15"):
    pytest.skip("interpreter lane: before 1.15, TRL's trainers have losses of Liger", allow_module_level=True)

from datasets import Dataset
from peft import LoraConfig
from tools import aligned_images, grpo, rewards
from tools.liger import KERNELS, interpret_liger
from tools.processes import result, run_cases
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config, preference_rows, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from flashmask_hf.long_rows import tile_tokens
from flashmask_hf.trainers import (
    LongRows,
    MultiAnswerRewardTrainer,
    PackedSFTTrainer,
    SharedQuestionDPOConfig,
    SharedQuestionDPOTrainer,
)

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning"),  # TRL 1.15
]

TILE, LENGTH = 8, 24
TILES = {"_rms_norm_forward_kernel": TILE, "_swiglu_forward_kernel": TILE}


@pytest.fixture
def programs(monkeypatch):
    return interpret_liger(monkeypatch)


def saved_model(folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flashmask")


def finish(trainer):
    """Train and evaluate; return the losses and the norms of gradients."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        *(entry["loss"] for entry in steps),
        *(entry["grad_norm"] for entry in steps),
        *losses_of(trainer.evaluate()),
    ]


def losses_of(logs):
    return [logs["eval_loss"]]


def fine_tuning(folder, *, tiled=False, long=False, adapter=False, **changes):
    rows = Dataset.from_dict({"text": [" ".join(f"w{3 + i * j % 60}" for j in range(9)) for i in range(4)]})
    settings = trainer_settings(folder) | {"max_steps": 1, "max_length": LENGTH, "per_device_train_batch_size": 1}
    if long or adapter:
        settings |= {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}
    model = saved_model(folder)
    if tiled:
        tile_tokens(model, TILE)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    trainer = PackedSFTTrainer(
        model, SFTConfig(**settings | changes), train_dataset=rows, eval_dataset=rows.select(range(2)),
        processing_class=word_tokenizer(), peft_config=lora if adapter else None,
    )  # fmt: skip
    if long:
        trainer.add_callback(LongRows(trainer, tile_tokens=TILE, keep_attention=True, host_gib=1))
    return finish(trainer)


def preferences(folder, **changes):
    settings = trainer_settings(folder) | {"max_steps": 1, "max_length": 48, "per_device_train_batch_size": 1}
    rows = Dataset.from_list(preference_rows(4))
    trainer = SharedQuestionDPOTrainer(
        saved_model(folder), args=SharedQuestionDPOConfig(**settings | changes), train_dataset=rows,
        eval_dataset=rows.select(range(2)), processing_class=word_tokenizer(),
    )  # fmt: skip
    return finish(trainer)


def reward_model(folder, *, data=None, **changes):
    path, options = rewards.save_reward_model(folder), {"max_steps": 1, "per_device_train_batch_size": 2}
    model = rewards.load(path, dtype=torch.float32)  # Liger has no kernels for float64
    trainer = rewards.make(
        MultiAnswerRewardTrainer, path, rewards.reward_tokenizer(), folder, data, model=model,
        eval_dataset=Dataset.from_list(preference_rows(2)), **options | changes,
    )  # fmt: skip
    return finish(trainer)


def reinforcement(folder, **changes):
    saved_model(folder / "model")
    options = {"max_steps": 1, "beta": 0.1, "dtype": "float32", **changes}
    *steps, evaluated = grpo.run(
        True, {"llama": folder / "model"}, word_tokenizer(), folder, options, evaluate=True
    )[0]  # fmt: skip
    return [*(step["loss"] for step in steps), *(step["grad_norm"] for step in steps), *losses_of(evaluated)]


IMAGE_ROWS = aligned_images.rows([(2, 2)], [], [(2, 4)], [(2, 2)], answers=True)


def image_preferences(folder, **changes):
    options = {"algorithm": "dpo", "reference": True, "dtype": torch.float32, **changes}
    return finish(aligned_images.make("llava", IMAGE_ROWS, folder, True, **options))


RUNS: dict[str, tuple[Any, dict[str, int]]] = {
    "fine-tuning": (fine_tuning, {}),
    "fine-tuning, adapter and checkpointing": (partial(fine_tuning, adapter=True), {}),
    "fine-tuning, dft": (partial(fine_tuning, loss_type="dft"), {}),
    "fine-tuning, tiles": (partial(fine_tuning, tiled=True), TILES),
    "fine-tuning, LongRows": (partial(fine_tuning, long=True), TILES),
    "DPO": (preferences, {}),
    "DPO, images": (image_preferences, {}),
    "reward model": (reward_model, {}),
    "reward model, many answers": (partial(reward_model, data=rewards.scored((2, 4))), {}),
    "GRPO": (partial(reinforcement, algorithm="grpo"), {}),
    "RLOO": (partial(reinforcement, algorithm="rloo"), {}),
}


QUICK = ("fine-tuning, tiles", "DPO", "GRPO")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in RUNS])
def test_training_is_as_without_the_kernels(name, programs, tmp_path):
    run, most = RUNS[name]
    want = run(tmp_path / "without")
    assert not programs
    got = run(tmp_path / "with", use_liger_kernel=True)
    assert set(KERNELS) <= programs.keys()
    assert {kernel: programs[kernel] for kernel in most} == most
    assert len(want) == 3
    assert got == pytest.approx(want, rel=1e-4, abs=2e-6)


@pytest.mark.full
def test_training_on_split_rows_is_as_without_the_kernels(run_folder):
    found = run_cases(run_folder, "tools.liger_cases", (1, 2))
    want, got = (result(found, size, "liger") for size in (1, 2))
    assert got["kernels"]
    assert got["sharded"] == "DTensor"
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-4)
