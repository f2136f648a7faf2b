"""Trainers that compute each prompt once: losses, metrics and weights equal stock TRL's, over whole runs."""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig
from tools.grpo import CLASSES, STEPS, VLLM, prompts, reward, run, save_models
from tools.recipes import FSDP_ON_CPU, RECIPES
from tools.support import requires, rounding
from tools.tiny import (
    CHECKPOINTING,
    EXACT,
    FLOAT32,
    TRAINER_WARNINGS,
    VOCAB,
    llama_config,
    trainer_settings,
    word_tokenizer,
)
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from flashmask_hf import masks
from flashmask_hf.trainers import (
    SharedPromptGRPOConfig,
    SharedPromptGRPOTrainer,
)
from flashmask_hf.trainers.loading import run_packed_models
from flashmask_hf.trainers.metrics import log_sharing
from flashmask_hf.trainers.shared_prompts import group_prompts, pack_completions

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*trl.experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
]

LOGGED = {"rel": FLOAT32, "abs": FLOAT32}
"""Bound of losses and metrics: rewards and advantages are float32, too."""
STEP = rounding(1000)
"""Bound of steps in float32: sums of two layers, forward and backward."""


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer("user", "assistant")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
RUNS: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss, "beta": 0.1} for loss in LOSSES},
    "no reference": {"beta": 0.0},
    "float32": {"dtype": "float32", "beta": 0.1},
    "old policy": {"steps_per_generation": 4},
    "old policy, bnpo": {"steps_per_generation": 4, "loss_type": "bnpo"},
    "two iterations": {"num_iterations": 2},
    "accumulated over generations": {"gradient_accumulation_steps": 4},
    "steps without a common divisor": {"steps_per_generation": 3, "generation_batch_size": None},
    "sequence level": {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "grpo"},
    "luspo, sequence level": {"importance_sampling_level": "sequence", "loss_type": "luspo", "steps_per_generation": 4},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "steps_per_generation": 4},
    "high entropy": {"top_entropy_quantile": 0.2},  # where no tie, as of first tokens of a group, meets the quantile
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 3.0},
    "batch scale": {"scale_rewards": "batch"},
    "no scale": {"scale_rewards": "none"},
    "truncated completions": {"mask_truncated_completions": True},
    "temperature": {"temperature": 0.7},
    "bias correction": {"use_bias_correction_kl": True, "beta": 0.1, "steps_per_generation": 4},
    "synced reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3},
    "adapter": {"lora": True, "beta": 0.1},
    "given adapter": {"adapter": True, "beta": 0.1},
    "float32 head": {"cast_lm_head_to_fp32": True, "bf16": False},
    "padded": {"pad_to_multiple_of": 8},
    "checkpointing": {CHECKPOINTING: True},
    "part of a group": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4},
    "two groups": {"per_device_train_batch_size": 8},
    "environment": {"rollout": True},
    "vllm, truncated tokens": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    "vllm, masked sequences": {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_importance_sampling_mode": "sequence_mask",
        "loss_type": "grpo",
    },
    "windows and softcaps": {"model": "gemma2"},
    "text alone in a model of text and images": {"model": "gemma3"},
    "experts": {"model": "qwen3_moe"},
    "experts without their loss": {"model": "qwen3_moe", "router_aux_loss_coef": 0.0},
    "tokens": {"share": "tokens"},
    "tokens, old policy": {"share": "tokens", "steps_per_generation": 4, "beta": 0.1},
    "tokens, experts": {"share": "tokens", "model": "qwen3_moe"},
    "rloo": {"algorithm": "rloo", "beta": 0.0},
    "rloo, beta": {"algorithm": "rloo", "beta": 0.1},
    "rloo, two iterations": {"algorithm": "rloo", "num_iterations": 2, "beta": 0.1},
    "rloo, normalized": {"algorithm": "rloo", "normalize_advantages": True, "steps_per_generation": 4},
    "rloo, adapter": {"algorithm": "rloo", "lora": True},
    "gmpo": {"algorithm": "gmpo"},
    "gmpo, beta": {"algorithm": "gmpo", "beta": 0.1, "steps_per_generation": 4},
}
ARITHMETIC = {*LOSSES, "no reference", "float32", "two-sided clipping"}
ARITHMETIC |= {"high entropy", "entropy bonus", "batch scale", "no scale", "truncated completions", "temperature"}
"""Runs that change only what TRL computes from log-probabilities, which two steps show."""
MOVED = ("entropy", "clip_ratio", "cispo_clip_ratio", "kl", "vespo")
"""Metrics that TRL averages over micro-batches, so that putting rows together may move them."""


QUICK = RUNS.keys() - ARITHMETIC | {"bnpo", "luspo", "no reference", "temperature"}
QUICK -= {"tokens, old policy", "tokens, experts", "experts without their loss", "rloo, two iterations", "gmpo, beta"}
QUICK -= {"old policy, bnpo", "luspo, sequence level", "given adapter", "rloo, adapter", "rloo, normalized"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in RUNS])
def test_whole_runs(name, checkpoints, tokenizer, tmp_path, monkeypatch):
    """Every loss and option of TRL's gives the same losses, gradients' norms, metrics and weights."""
    options = {key: value for key, value in RUNS[name].items() if value is not None}
    logged, bound = LOGGED, EXACT
    if "dtype" in options:
        monkeypatch.undo()
        logged, bound = {"rel": STEP, "abs": STEP}, STEP
    options["max_steps"] = 2 if name in ARITHMETIC else 4  # several generations and reuses of each
    if options.get("use_vllm"):
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", VLLM)
        options.setdefault("vllm_mode", "colocate")
    ours, weights, trainer = run(True, checkpoints, tokenizer, tmp_path, options, evaluate=True)
    stock, expected_weights, _ = run(False, checkpoints, tokenizer, tmp_path, options, evaluate=True)
    grouped = trainer._window > 1
    for one, two in zip(ours, stock, strict=True):
        assert one.keys() - {"shared_tokens_saved", "mask_sparsity", "eval_shared_tokens_saved", "eval_mask_sparsity"} \
            == two.keys()  # fmt: skip
        for key, value in two.items():
            if "time" in key or "runtime" in key or "per_second" in key or (grouped and key.startswith(MOVED)):
                continue
            assert one[key] == pytest.approx(value, **logged, nan_ok=True), key
    for key, expected in expected_weights.items():
        torch.testing.assert_close(weights[key], expected, rtol=0, atol=bound, msg=lambda m, k=key: f"{k}: {m}")
    assert all(0 <= entry["shared_tokens_saved"] < 1 for entry in ours[:-1])
    assert sum(entry["shared_tokens_saved"] for entry in ours[:-1]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"beta": 0.1}, {"share": "tokens", "model": "gemma2"}, {"algorithm": "rloo"}], ids=str
)
def test_the_gpu_equals_stock_trl(options, checkpoints, tokenizer, tmp_path):
    """In float32. TRL's head rounds its inputs to TensorFloat32, which enlarges what differs."""
    requires("gpu")
    options = {"max_steps": 4, "use_cpu": False, "dtype": "float32"} | options
    ours, weights, trainer = run(True, checkpoints, tokenizer, tmp_path, options)
    assert trainer.accelerator.device.type == "cuda"
    stock, expected, _ = run(False, checkpoints, tokenizer, tmp_path, options)
    for one, two in zip(ours, stock, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=5e-3, abs=5e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=5e-3, abs=5e-4)
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("share", "device"),
    [pytest.param("tokens", "cpu", marks=pytest.mark.full)]
    + [pytest.param(x, "cuda", marks=pytest.mark.gpu) for x in ("prompts", "tokens")],
)
def test_a_step_in_bfloat16(share, device, tokenizer, tmp_path, monkeypatch):
    """Weights after a step are as near to those of float32 as stock TRL's; on a Hopper its kernels run."""
    monkeypatch.undo()
    torch.manual_seed(0)
    config = llama_config(head_dim=64, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that attention is far from uniform
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "llama")
    common = {"use_cpu": device == "cpu", "max_steps": 1, "per_device_train_batch_size": 8, "beta": 0.1}
    common["dtype"] = "float32"
    steps = []
    for ours, options in ((True, {"bf16": True, "share": share}), (False, {"bf16": True}), (False, {})):
        log, weights, trainer = run(ours, {"llama": str(tmp_path / "llama")}, tokenizer, tmp_path, common | options)
        assert trainer.accelerator.device.type == device
        steps.append((log[0], torch.cat([x.flatten() for x in weights.values()])))
    (log, after), (stock_log, stock), (exact_log, exact) = steps
    assert log["shared_tokens_saved"] > 0.1
    assert log["reward"] == stock_log["reward"] == exact_log["reward"]
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert log[name] == pytest.approx(exact_log[name], rel=0.05), name
    error, allowed = (after - exact).norm(), (stock - exact).norm()
    assert 0 < allowed < 0.01  # the step is 0.1: the learning rate times a gradient whose norm is clipped to 1
    assert error <= 2 * allowed


def test_a_trained_head_is_gathered_for_the_fused_head(checkpoints, tokenizer, tmp_path, monkeypatch):
    """As FSDP2 would, for forwards with gradients alone."""
    gathered = []
    monkeypatch.setattr(torch.nn.Linear, "unshard", lambda head: gathered.append(head), raising=False)
    *_, trainer = run(True, checkpoints, tokenizer, tmp_path, {"max_steps": 1, "steps_per_generation": 4})
    assert gathered == [trainer.model.lm_head] * 2


def test_a_run_that_resumes(checkpoints, tokenizer, tmp_path):
    """From a checkpoint in the middle, training goes on as stock TRL's does."""
    found = []
    for ours in (True, False):
        out = tmp_path / str(ours)
        options = {"save_strategy": "steps", "save_steps": 5, "steps_per_generation": 4, "beta": 0.1}
        _, _, trainer = run(ours, checkpoints, tokenizer, out, options)
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-5"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == STEPS
        found.append(losses)
    assert found[0] == pytest.approx(found[1], **LOGGED)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler, in TRL's head
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_policy(checkpoints, tokenizer, tmp_path):
    compiled, weights, _ = run(
        True,
        checkpoints,
        tokenizer,
        tmp_path,
        {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "eager"},
    )
    plain, expected, _ = run(False, checkpoints, tokenizer, tmp_path, {"max_steps": 2})
    for one, two in zip(compiled, plain, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], **LOGGED)
    for name, x in expected.items():
        torch.testing.assert_close(weights[name.removeprefix("_orig_mod.")], x, rtol=0, atol=EXACT)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_shuffle_is_undone_within_each_window(window):
    """Every row stays in its window, with all that belongs to it."""
    places = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    whole = {
        "places_before_the_shuffle": places, "prompt_ids": places[:, None] * 10, "names": places.tolist(),
        "num_items_in_batch": torch.tensor(9), "old_per_token_logps": None,
    }  # fmt: skip
    batches = [
        {
            name: x if x is None or (isinstance(x, torch.Tensor) and not x.ndim) else x[start : start + 4]
            for name, x in whole.items()
        }
        for start in range(0, 16, 4)
    ]
    grouped = group_prompts(batches, window)
    for start in range(0, 4, window):
        before = [name for batch in batches[start : start + window] for name in batch["names"]]
        part = grouped[start : start + window]
        assert [len(batch["names"]) for batch in part] == [4] * window
        names = [name for batch in part for name in batch["names"]]
        assert names == sorted(before)
        assert torch.cat([batch["prompt_ids"] for batch in part]).flatten().tolist() == [10 * name for name in names]
        assert all(batch["num_items_in_batch"] == 9 and batch["old_per_token_logps"] is None for batch in part)


FIRST_RATIOS = {
    "whole groups": ({"num_iterations": 2, "per_device_train_batch_size": 8}, True),
    "scattered": ({"steps_per_generation": 4, "gradient_accumulation_steps": 1}, False),
    "scattered, exact": ({"steps_per_generation": 4, "gradient_accumulation_steps": 1, "exact_ratios": True}, True),
    "rloo, exact": ({"algorithm": "rloo", "gradient_accumulation_steps": 1, "exact_ratios": True}, True),
}


@pytest.mark.parametrize("name", FIRST_RATIOS)
def test_the_first_ratio_is_exactly_one(name, checkpoints, tokenizer, tmp_path, monkeypatch):
    """Policy and policy before the update agree to the bit in the first micro-batch, where rows are the same."""
    options, exact = FIRST_RATIOS[name]
    *_, trainer = run(True, checkpoints, tokenizer, tmp_path, options | {"max_steps": 1, "learning_rate": 0.0})
    inputs = trainer._buffered_inputs
    assert len(inputs) == trainer.args.steps_per_generation
    equal = []
    for batch in inputs:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        got, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].shape[1])
        real = batch["completion_mask"].bool()
        if "old_logps" in batch:
            equal.append(torch.equal((got * real).sum(1), batch["old_logps"]))
        else:
            equal.append(torch.equal(got[real], batch["old_per_token_logps"][real]))
    assert all(equal) == exact


GROUPED = {
    "grpo": ({"loss_type": "grpo"}, 2),
    "part of the micro-batches": ({"steps_per_generation": 4}, 2),
    "no common divisor": ({"steps_per_generation": 3}, 1),
    "bnpo": ({"loss_type": "bnpo"}, 1),
    "high entropy": ({"top_entropy_quantile": 0.5}, 1),
    "entropy bonus": ({"entropy_coef": 0.1}, 1),
    "experts": ({"model": "qwen3_moe"}, 1),
    "rloo": ({"algorithm": "rloo"}, 2),
    "gmpo": ({"algorithm": "gmpo"}, 2),
}


@pytest.mark.parametrize("name", GROUPED)
def test_rows_are_put_together_only_where_that_is_exact(name, checkpoints, tokenizer, tmp_path, caplog, monkeypatch):
    """Other set-ups leave the rows of TRL's micro-batches where they are, and say why prompts are scattered."""
    options, window = GROUPED[name]
    calls = []
    module = "flashmask_hf.trainers.shared_prompts"
    monkeypatch.setattr(f"{module}.group_prompts", lambda batches, n: calls.append(n) or group_prompts(batches, n))
    with caplog.at_level(logging.WARNING, module):
        _, _, trainer = run(True, checkpoints, tokenizer, tmp_path, options)
    assert set(calls) == {window}
    scattered = [record.getMessage() for record in caplog.records if "TRL scatters" in record.getMessage()]
    assert bool(scattered) == (window < trainer.args.steps_per_generation)


def test_a_micro_batch_with_a_part_of_a_group_warns(checkpoints, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flashmask_hf.trainers.shared_prompts"):
        run(True, checkpoints, tokenizer, tmp_path, {"per_device_train_batch_size": 6})
    assert "per_device_train_batch_size=6 rows, which is no multiple of num_generations=4" in caplog.text


def test_learned_positions_count_from_the_first_token(tokenizer, tmp_path):
    """With prompts padded on the left stock TRL begins at the padding; a packed row equals each sequence alone."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=1
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=torch.float64)
    torch.nn.init.normal_(model.transformer.wpe.weight, std=0.5)
    alone = copy.deepcopy(model)
    args = SharedPromptGRPOConfig(**trainer_settings(tmp_path), num_generations=4)
    trainer = SharedPromptGRPOTrainer(model.eval(), reward, args, prompts(), processing_class=tokenizer)
    ids = torch.randint(3, VOCAB, (4, 9))
    mask = torch.ones(4, 9, dtype=torch.int64)
    mask[:2, :3] = mask[2:, :1] = 0
    ids[1, 3:5], ids[3, 1:5] = ids[0, 3:5], ids[2, 1:5]
    with torch.no_grad():
        got, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)
        for row in range(4):
            real = ids[row, mask[row].bool()][None]
            want = alone.eval()(real).logits.log_softmax(-1)[0, :-1].gather(1, real[0, 1:, None])[-4:, 0]
            torch.testing.assert_close(got[row], want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("share", ["prompts", "tokens"])
def test_a_completion_never_affects_another(share, checkpoints, tokenizer, tmp_path):
    """Another last token of one completion leaves the log-probabilities of all others as they are."""
    args = SharedPromptGRPOConfig(**trainer_settings(tmp_path), num_generations=4, share=share)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], attn_implementation="flashmask").double()
    trainer = SharedPromptGRPOTrainer(model.eval(), reward, args, prompts(), processing_class=tokenizer)
    ids = torch.cat(
        [torch.tensor([[0, 5, 6, 7]]).repeat(4, 1), torch.tensor([[8, 9, 10], [8, 9, 11], [8, 12, 13], [8, 9, 10]])], 1
    )
    mask = (ids != 0).long()
    other = ids.clone()
    other[1, -1] = 20
    with torch.no_grad():
        one, two = (trainer._get_per_token_logps_and_entropies(model, x, mask, 3)[0] for x in (ids, other))
    rows = [0, 2, 3]
    torch.testing.assert_close(one[rows], two[rows], rtol=0, atol=EXACT)
    torch.testing.assert_close(one[1, :2], two[1, :2], rtol=0, atol=EXACT)
    assert (one[1, 2] - two[1, 2]).abs() > 1e-4


def test_models_loaded_by_name(checkpoints, tokenizer, tmp_path):
    """Policy and reference get the attention "flashmask"; a reward model and the caller's options keep their own."""
    reward_path = str(tmp_path / "reward")
    bert = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    transformers.BertForSequenceClassification(bert).save_pretrained(reward_path)
    tokenizer.save_pretrained(reward_path)
    given = {"dtype": "float32", "attn_implementation": None}
    args = SharedPromptGRPOConfig(**trainer_settings(tmp_path), num_generations=4, beta=0.1, model_init_kwargs=given)
    trainer = SharedPromptGRPOTrainer(
        checkpoints["llama"], reward_path, args, train_dataset=prompts(), processing_class=tokenizer
    )
    assert trainer.model.config._attn_implementation == "flashmask"
    assert trainer.ref_model.config._attn_implementation == "flashmask"
    assert trainer.reward_funcs[0].config._attn_implementation in ("sdpa", "eager")
    assert args.model_init_kwargs is given
    assert given["attn_implementation"] is None


REFUSED = {
    "attention of the model": ({"attention": "eager"}, "attn_implementation='flashmask'"),
    "attention by name": ({"by_name": True, "model_init_kwargs": {"attn_implementation": "sdpa"}}, "leave it out"),
    "share": ({"share": "prompt"}, "share must be one of 'prompts', 'tokens'"),
    "virtual tokens": ({"peft_config": PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}, "virtual"),
    "activated adapter": (
        {"peft_config": LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM")}, "alora_invocation_tokens"
    ),
    "noisy embeddings": ({"neftune_noise_alpha": 1.0}, "neftune_noise_alpha"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: this trainer"),
    "dispatched batches": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    "paged generation": ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
    "no whole batch": (
        {"steps_per_generation": 64}, r"train dataset has \d+ prompts, but a generation batch has 64.* lower per_device"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_set_ups_that_raise_at_construction(name, algorithm, checkpoints, tokenizer, tmp_path):
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    _, _, config, trainer = CLASSES[algorithm]()
    model: Any = checkpoints["llama"]
    attention = options.pop("attention", "flashmask")
    if not options.pop("by_name", False):
        model = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
    peft_config = options.pop("peft_config", None)
    with pytest.raises(ValueError, match=message):
        trainer(
            model, reward, config(**trainer_settings(tmp_path), num_generations=4, **options), prompts(),
            processing_class=tokenizer, peft_config=peft_config,
        )  # fmt: skip


def test_other_wrong_set_ups_raise(checkpoints, tokenizer, tmp_path, monkeypatch, capsys):
    def make(args, **options):
        model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], attn_implementation="flashmask")
        return SharedPromptGRPOTrainer(model, reward, args, prompts(), processing_class=tokenizer, **options)

    settings = trainer_settings(tmp_path) | {"num_generations": 4}
    with pytest.raises(TypeError, match="SharedPromptGRPOConfig"):
        make(transformers.TrainingArguments(**trainer_settings(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr("flashmask_hf.trainers.weighing.compare_versions", lambda *_: True)
        with pytest.raises(ValueError, match="use_liger_kernel needs the fused head of trl"):
            make(GRPOConfig(**settings, use_liger_kernel=True))
    trainer = make(GRPOConfig(**settings))
    assert "SharedPromptGRPOTrainer: attn_implementation='flashmask'." in capsys.readouterr().out
    ids, mask = torch.full((2, 5), 7), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="prompt 1 of the micro-batch has no tokens"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3)
    pictures = [[{"type": "image"}]] * len(trainer.train_dataset)
    trainer.train_dataset = trainer.train_dataset.add_column("images", pictures)
    with pytest.raises(ValueError, match="prompts have images, which a tokenizer does not read; pass a processor"):
        trainer.train()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_prompt_without_tokens_raises_before_generation(algorithm, checkpoints, tokenizer, tmp_path):
    """transformers' generation ends in an IndexError, or in one about the dtype of its tokens."""
    _, _, config, trainer = CLASSES[algorithm]()
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], attn_implementation="flashmask")
    made = trainer(
        model, reward, config(**trainer_settings(tmp_path), num_generations=2),
        Dataset.from_dict({"prompt": ["w9", " ", "w10 w11"]}), processing_class=tokenizer,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"prompt \d of the batch, ' ', has no tokens, .*remove empty prompts"):
        made.train()


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_prompts_in_a_column_of_another_name_raise_at_construction(
    stream, split, algorithm, checkpoints, tokenizer, tmp_path
):
    """TRL ends in `KeyError: 'prompt'` in the first step."""
    _, _, config, trainer = CLASSES[algorithm]()
    datasets = {"train_dataset": prompts(), "eval_dataset": prompts()}
    renamed = prompts().rename_column("prompt", "question")
    datasets[f"{split}_dataset"] = renamed.to_iterable_dataset() if stream else renamed
    with pytest.raises(ValueError, match=f"the {split} dataset has no column 'prompt'; rename .*It has: .*question"):
        trainer(
            checkpoints["llama"], reward, config(**trainer_settings(tmp_path), num_generations=4, max_steps=1),
            processing_class=tokenizer, **datasets,
        )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_prompts_of_messages_with_other_keys_raise_at_construction(algorithm, checkpoints, tokenizer, tmp_path):
    """TRL hands them to the tokenizer as text, which ends in an error of its own."""
    _, _, config, trainer = CLASSES[algorithm]()
    dataset = Dataset.from_list([{"prompt": [{"from": "human", "value": "w8"}]}] * 4)
    with pytest.raises(ValueError, match=r"the train dataset has messages with the keys from, value; rename them"):
        trainer(
            checkpoints["llama"], reward, config(**trainer_settings(tmp_path), num_generations=4), dataset,
            processing_class=tokenizer,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory':UserWarning")
def test_environments_make_the_prompts_of_rows_without_them(checkpoints, tmp_path):
    class Environment:
        def reset(self, seed):
            return f"w{seed}"

        def get_reward(self):
            return 1.0

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    trainer = SharedPromptGRPOTrainer(
        checkpoints["llama"], None,
        SharedPromptGRPOConfig(**trainer_settings(tmp_path), num_generations=4, max_completion_length=4, max_steps=1),
        Dataset.from_dict({"seed": [8, 9, 10, 11]}),
        processing_class=word_tokenizer(chat_template=template.read_text()), environment_factory=Environment,
    )  # fmt: skip
    assert trainer.train().global_step == 1


def test_the_packed_row_of_a_micro_batch():
    """A prompt of two completions, one of which is empty, and a sequence alone."""
    ids = torch.tensor([[0, 5, 6, 8, 9], [4, 5, 6, 8, 0], [0, 5, 6, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0]])
    packed, trees = pack_completions(ids, mask, keep=2, pad_to_multiple_of=12)
    assert trees == [1, 0, 1]
    assert packed["packed_input_ids"].tolist() == [[4, 5, 6, 8, 5, 6, 8, 9, 0, 0, 0, 0]]
    assert packed["packed_position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0]]
    assert packed["startend_row_indices"].flatten().tolist() == [4] * 4 + [8] * 4 + [0] * 4
    assert packed["packed_index"][0, 1:].tolist() == [4, 5, 6, 7]
    assert packed["packed_index"][1, :4].tolist() == [0, 1, 2, 3]
    assert packed["packed_index"][2, 1:3].tolist() == [4, 5]
    pair = torch.tensor([[5, 6, 8, 9], [5, 6, 8, 7]])
    for share, row in (("prompts", [5, 6, 8, 7, 8, 9]), ("tokens", [5, 6, 8, 7, 9])):
        packed, _ = pack_completions(pair, torch.ones_like(pair), keep=2, share=share)
        assert packed["packed_input_ids"].tolist() == [row]


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("ddp", {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "share": "tokens"}),
        ("fsdp2", {"beta": 0.1, "loss_type": "grpo"}),
        ("fsdp2", {"algorithm": "rloo", "lora": True, "beta": 0.1}),
    ],
    ids=["ddp, groups over both", "fsdp2", "fsdp2, rloo, adapter"],
)
def test_two_processes(config, options, tmp_path):
    """In each of two processes both trainers have the same completions, and log the same."""
    options = {"per_device_train_batch_size": 2, "max_steps": 4} | options
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command.append(RECIPES / "configs" / f"accelerate_{config}.yaml")
    if config == "fsdp2":
        (tmp_path / "fsdp.py").write_text(FSDP_ON_CPU)
        command.append(tmp_path / "fsdp.py")
        options["use_cpu"] = False
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}:{tests.parent}"}
    command += [tests / "tools" / "grpo.py", json.dumps(options), tmp_path / "runs.json"]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("FSDP2: True") == (2 if config == "fsdp2" else 0)
    runs = json.loads((tmp_path / "runs.json").read_text())
    for one, two in zip(runs["ours"], runs["stock"], strict=True):
        for key in ("loss", "grad_norm", "reward"):
            assert one[key] == pytest.approx(two[key], **LOGGED), key
        assert 0 <= one["shared_tokens_saved"] < 1


def trainer_of(checkpoints, tokenizer, out, **options):
    args = SharedPromptGRPOConfig(**trainer_settings(out), num_generations=4, **options)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], attn_implementation="flashmask")
    return SharedPromptGRPOTrainer(model, reward, args, prompts(), processing_class=tokenizer)


def test_what_sharing_saves_is_logged(checkpoints, tokenizer, tmp_path):
    """Four completions of two tokens to a prompt of three: 11 tokens instead of 20, in a row of 16."""
    trainer = trainer_of(checkpoints, tokenizer, tmp_path, pad_to_multiple_of=16)
    lengths = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: lengths.append(ids[0].shape))
    completions = torch.tensor([[5, 6], [7, 8], [9, 10], [11, 12]])
    batch = {
        "prompt_ids": torch.tensor([[20, 21, 22]]).repeat(4, 1), "prompt_mask": torch.ones(4, 3, dtype=torch.int64),
        "completion_ids": completions, "completion_mask": torch.ones_like(completions), "advantages": torch.ones(4),
        "num_items_in_batch": torch.tensor(8),
    }  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model.train(), batch)
    assert lengths == [(1, 16)]
    assert trainer._metrics["train"]["shared_tokens_saved"] == [pytest.approx(1 - 11 / 20)]
    assert len(trainer._metrics["train"]["mask_sparsity"]) == 1


def test_what_sharing_saves_is_counted_over_all_processes():
    """Six tokens instead of eight here, and 19 instead of 30 in another process."""
    accelerator = types.SimpleNamespace(reduce=lambda counts: counts + torch.tensor([19, 30]))
    trainer = types.SimpleNamespace(accelerator=accelerator, _metrics={"eval": collections.defaultdict(list)})
    log_sharing(trainer, "eval", masks.share_question([(2, [2, 2])]).indices, torch.ones(2, 4, dtype=torch.int64))
    assert trainer._metrics["eval"]["shared_tokens_saved"] == [pytest.approx(1 - (6 + 19) / (8 + 30))]


@pytest.mark.parametrize("version", [1, 2])
def test_a_reference_model_that_fsdp2_would_leave_empty_raises(version, checkpoints, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(checkpoints, tokenizer, tmp_path, beta=0.1)
    plugin = types.SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=True)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
    trainer.is_fsdp_enabled = True
    refused = pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading leaves a reference model empty")
    with refused if version == 2 else contextlib.nullcontext():
        run_packed_models(trainer)


def test_compiled_layers_are_checked(checkpoints, tokenizer, tmp_path):
    """Whether each layer receives the mask cannot be counted in compiled layers, so it is tried before the forward."""
    trainer = trainer_of(checkpoints, tokenizer, tmp_path)
    for layer in trainer.model.base_model.layers:
        layer.compile(backend="eager")
    ids = torch.full((4, 5), 7)
    with torch.no_grad():
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 2)
    assert trainer.model.base_model._flashmask.is_counted
