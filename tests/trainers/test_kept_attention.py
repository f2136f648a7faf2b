"""The trainers keep attention's results in checkpointed layers, as far as memory goes."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from tools.support import record_passes
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config, preference_rows, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, GRPOConfig, RewardConfig, SFTConfig

from flashmask_hf._call.call import Call
from flashmask_hf.trainers import (
    LongRows,
    MultiAnswerRewardTrainer,
    PackedSFTTrainer,
    SharedPromptGRPOTrainer,
    SharedQuestionDPOTrainer,
    callbacks,
)

pytestmark = [*TRAINER_WARNINGS]

LAYERS = 2


@pytest.fixture
def forwards(monkeypatch):
    """The number of forwards of attention in each optimizer step that records gradients."""
    counts, run = [0], Call._run

    def counted(call, key, *args):
        counts[-1] += key[0] == "forward" and call.differentiated
        return run(call, key, *args)

    monkeypatch.setattr(Call, "_run", counted)
    end = callbacks.KeepAttention.on_step_end
    monkeypatch.setattr(
        callbacks.KeepAttention, "on_step_end", lambda *args, **kwargs: counts.append(0) or end(*args, **kwargs)
    )
    return counts


def model_of(attention="flashmask", kind=AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    return kind.from_config(llama_config(num_hidden_layers=LAYERS, **changes), attn_implementation=attention)


def sft(path, attention="flashmask", **changes):
    settings = trainer_settings(path) | {CHECKPOINTING: True, "max_steps": 4, "max_length": 16, **changes}
    rows = Dataset.from_dict({"text": ["w9 w10 w11 w12 w13"] * 40})
    return PackedSFTTrainer(
        model_of(attention), SFTConfig(**settings), train_dataset=rows, processing_class=word_tokenizer()
    )


@pytest.mark.parametrize("options", [None, {"every_n_layers": 2}], ids=str)
def test_attention_runs_once_in_a_step(options, tmp_path, forwards):
    trainer = sft(tmp_path, **{f"{CHECKPOINTING}_kwargs": options})
    hooks = len(trainer.model._forward_pre_hooks)
    trainer.train()
    assert forwards[:4] == [LAYERS] * 4
    assert len(trainer.model._forward_pre_hooks) == hooks


def test_selective_checkpointing_of_trl_keeps_attention_too(tmp_path, monkeypatch):
    passes = record_passes(monkeypatch)
    sft(tmp_path, **{f"{CHECKPOINTING}_kwargs": {"selective": True}}).train()
    assert passes.count("forward") == passes.count("backward") == 4 * LAYERS


def rows_of(task):
    rows = preference_rows(8)
    return Dataset.from_list(rows if task != "grpo" else [{"prompt": row["prompt"]} for row in rows])


@pytest.mark.parametrize("task", ["dpo", "reward", "grpo"])
def test_every_trainer_keeps_attention(task, tmp_path, forwards):
    trainers = {
        "dpo": (SharedQuestionDPOTrainer, DPOConfig, {"max_length": 32}),
        "reward": (MultiAnswerRewardTrainer, RewardConfig, {"max_length": 32}),
        "grpo": (SharedPromptGRPOTrainer, GRPOConfig, {"num_generations": 2, "max_completion_length": 4, "beta": 0.0}),
    }
    trainer, config, options = trainers[task]
    kind = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    model = model_of(kind=kind, **({"num_labels": 1} if task == "reward" else {}))
    settings = trainer_settings(tmp_path) | {CHECKPOINTING: True, "max_steps": 2, **options}
    more = {
        "dpo": {"ref_model": model_of()},
        "reward": {},
        "grpo": {"reward_funcs": lambda completions, **_: [float(len(x)) for x in completions]},
    }
    trainer(
        model,
        args=config(**settings),
        train_dataset=rows_of(task),
        processing_class=word_tokenizer(),
        **more[task],
    ).train()
    assert forwards[:2] == [LAYERS, LAYERS]


def test_a_gpu_is_measured_for_two_steps(tmp_path, forwards, monkeypatch):
    trainer, room = sft(tmp_path), 0
    monkeypatch.setattr(callbacks, "available_gpu_bytes", lambda: 1e6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1_000_000 - room)
    size = 48 * 4 * (8 + 1) * 4  # the results of a batch of 48 tokens in a layer
    for room, count in (  # noqa: B007  # the pretended GPU reads it
        (10 * size, LAYERS),
        (size, 2 * LAYERS - 1),
        (0, 2 * LAYERS),
        (-1, 2 * LAYERS),
    ):
        forwards[:] = [0]
        callback = callbacks.KeepAttention(trainer)
        trainer.remove_callback(callbacks.KeepAttention)
        trainer.add_callback(callback)
        begin = callback.on_train_begin

        def on_gpu(*args, begin=begin, callback=callback, **kwargs):
            begin(*args, **kwargs)
            callback._measures = True
            callback._kept.set_limit(0)

        monkeypatch.setattr(callback, "on_train_begin", on_gpu)
        trainer.train()
        assert forwards[:4] == [2 * LAYERS, 2 * LAYERS, count, count]


def test_long_rows_decide_instead(tmp_path, forwards):
    trainer = sft(tmp_path)
    trainer.add_callback(LongRows(trainer, tile_tokens=0, keep_attention=False, host_gib=0))
    trainer.train()
    assert callbacks.KeepAttention not in [type(x) for x in trainer.callback_handler.callbacks]


def test_nothing_is_kept_where_it_would_not_help(tmp_path):
    trainer = sft(tmp_path)
    callback = next(x for x in trainer.callback_handler.callbacks if isinstance(x, callbacks.KeepAttention))
    for attention, changes, prepared in (
        ("sdpa", {}, False),
        ("flashmask", {"activation_offloading": True}, False),
        ("flashmask", {"torch_compile": True}, False),
        ("flashmask", {CHECKPOINTING: False}, False),
        ("flashmask", {}, True),
    ):
        trainer.model.set_attn_implementation(attention)
        args = copy.copy(trainer.args)
        for name, value in changes.items():
            setattr(args, name, value)
        callback.on_train_begin(args, None, None)
        assert (callback._kept is not None) == prepared
    callback.on_train_end(trainer.args, None, None)
