"""The recipe for reinforcement learning, run as a user runs it for a few steps on the CPU."""

import json
import sys

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tools.recipes import QUICK, RECIPES, launch, logged, run
from tools.tiny import TRAINER_WARNINGS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import common  # isort: skip
import data  # isort: skip
import grpo  # isort: skip

pytestmark = TRAINER_WARNINGS

SHORT = ["--max_completion_length", 8, "--per_device_train_batch_size", 8, "--num_generations", 4, *QUICK]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Write a dataset in the format of trl-lib/DeepMath-103K."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": [data._turn("user", f"What is {n} + {n}?")], "solution": str(2 * n)} for n in range(16)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.full
def test_the_demo_learns_saves_and_draws(tmp_path, capsys):
    printed = run("grpo", capsys, tmp_path, *QUICK, "--max_steps", 20, "--per_device_train_batch_size", 16)
    rewards = logged(printed, "reward")
    assert len(rewards) == 20
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])
    assert f"Mean reward: {rewards[0]:.3f} at step 1, {rewards[-1]:.3f} at step 20" in printed
    for name in ("shared_tokens_saved", "mask_sparsity"):
        assert all(0.5 < value < 1 for value in logged(printed, name))
        assert f"eval_{name}" in printed
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_reward"] > 2 * rewards[0]
    assert f"Picture of the reward and of the mask of one group: {tmp_path / 'picture.png'}" in printed
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashmask")
    assert torch.isfinite(reloaded(input_ids=torch.arange(1, 9)[None]).logits).all()


@pytest.mark.gpu
def test_the_demo_on_a_gpu(tmp_path):
    """In bfloat16, the recipe's default there."""
    flags = ["--logging_steps", 1, "--disable_tqdm", True, "--save_strategy", "no", "--max_steps", 4]
    printed = launch([sys.executable], tmp_path, *flags, recipe="grpo")
    rewards = logged(printed, "reward")
    assert len(rewards) == 4
    assert all(0 <= value <= 1 for value in rewards)
    assert all(value > 0 for value in logged(printed, "grad_norm"))
    assert all(0.5 < value < 1 for value in logged(printed, "shared_tokens_saved"))
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("share", ["prompts", "tokens"])
def test_rloo_trains_an_adapter(tmp_path, model, capsys, share):
    flags = ["--algorithm", "rloo", "--share", share, "--model_name_or_path", model, "--use_peft"]
    flags += ["--reward_funcs", "copied_words_reward", "--lora_target_modules", "all-linear", "--max_steps", 2]
    printed = run("grpo", capsys, tmp_path, *flags, *SHORT)
    assert len(logged(printed, "kl")) == 2  # beta is 0.05 in RLOO
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in adapter.items() if "lora_B" in name)  # zero before training


def test_a_resumed_run_draws_the_same_completions(tmp_path, model, capsys):
    flags = ["--model_name_or_path", model, "--reward_funcs", "copied_words_reward", "--max_steps", 4, *SHORT]
    flags += ["--save_strategy", "steps", "--save_steps", 2, "--learning_rate", 1e-3]
    whole = logged(run("grpo", capsys, tmp_path, *flags), "loss")
    (tmp_path / "checkpoint-4").rename(tmp_path / "finished")
    resumed = logged(run("grpo", capsys, tmp_path, *flags, "--resume_from_checkpoint", "true"), "loss")
    assert resumed == pytest.approx(whole[2:], rel=1e-3)


REWARDS = """
def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]
"""


def test_rewards_of_ones_own_and_a_reward_model(tmp_path, model, rows, monkeypatch, capsys):
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    judge = tmp_path / "judge"
    config = LlamaConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    data.build_tokenizer().save_pretrained(judge)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model_name_or_path: {model}\ndataset_name: {rows}\nmax_steps: 1\n"
        f"reward_model_name_or_path: {judge}\nreward_funcs: [own_rewards.length, think_format_reward]\n"
    )
    seen, train = [], common.train

    def look_and_train(trainer, script_args):
        seen.append(trainer.reward_funcs[0].config._attn_implementation)
        train(trainer, script_args)

    monkeypatch.setattr(common, "train", look_and_train)
    printed = run("grpo", capsys, tmp_path / "out", "--config", config, *SHORT)
    assert logged(printed, "rewards/length/mean")[0] > 0
    assert logged(printed, "rewards/think_format_reward/mean") == [0]
    assert logged(printed, "rewards/judge/mean")[0] != 0
    assert seen == ["sdpa"]


@pytest.mark.parametrize("config", ["grpo.yaml", pytest.param("grpo_lora.yaml", marks=pytest.mark.full)])
def test_deepmath_trains_unchanged(tmp_path, model, rows, capsys, config):
    (tmp_path / "DeepMath-103K" / "data").mkdir(parents=True)
    Dataset.from_json(str(rows)).to_parquet(tmp_path / "DeepMath-103K" / "data" / "train-00000-of-00001.parquet")
    flags = ["--config", RECIPES / "configs" / config, "--model_name_or_path", model]
    flags += ["--dataset_name", tmp_path / "DeepMath-103K", "--reward_funcs", "think_format_reward"]
    flags += ["--max_steps", 1, "--max_completion_length", 8, "--dtype", "float32", "--gradient_accumulation_steps", 2]
    printed = run("grpo", capsys, tmp_path / "out", *flags, *QUICK)
    assert len(logged(printed, "shared_tokens_saved")) == 1
    saved = "adapter_model" if "lora" in config else "model"
    assert (tmp_path / "out" / f"{saved}.safetensors").exists()


@pytest.mark.full
def test_two_processes_report_once(tmp_path, model):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--config_file", RECIPES / "configs" / "accelerate_ddp.yaml"]
    flags = ["--model_name_or_path", model, "--reward_funcs", "copied_words_reward", "--max_steps", 2, "--picture"]
    printed = launch(accelerate, tmp_path, *flags, *SHORT, recipe="grpo")
    assert len(logged(printed, "reward")) == 2
    assert printed.count("Mean reward: ") == printed.count("Picture of the reward") == 1


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    flags = ["--model_name_or_path", model, "--reward_funcs", "copied_words_reward", "--max_steps", 1, "--picture"]
    printed = run("grpo", capsys, tmp_path, *flags, *SHORT)
    assert "No picture: matplotlib is missing: pip install matplotlib" in printed


BAD_FLAGS = [
    (["--reward_funcs"], "expected at least one argument"),
    (["--model_name_or_path", "anything"], "reward_funcs is empty: name at least one of accuracy_reward, "),
    (["--reward_funcs", "short"], "reward_funcs: short is none of .* and no dotted path"),
    (["--reward_funcs", "no_module.short"], "reward_funcs: no_module.short cannot be loaded: No module named"),
    (["--reward_funcs", "data.short"], "reward_funcs: data.short cannot be loaded: .* has no attribute 'short'"),
    (["--reward_funcs", "data.FACTS"], "reward_funcs: data.FACTS is no function, but a dict"),
    (["--algorithm", "ppo"], "argument --algorithm: invalid choice: 'ppo'"),
    (["--algorithm", "rloo", "--loss_type", "dapo"], "--loss_type"),
    (["--share", "everything"], "argument --share: invalid choice: 'everything'"),
    (["--num_generations", "0"], "num_generations must be at least 1, got 0"),
    (["--num_generations", "7"], "must be divisible by num_generations"),
    (["--attn_implementation", "sdpa"], "has --attn_implementation sdpa, but shared prompts need 'flashmask'"),
    (["--resume_from_checkpoint", "true"], "holds no checkpoint to resume from"),
    (["--do_eval", "--dataset_test_split", "dev"], "dataset_test_split: .* no split 'dev', but 'train', 'test'"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=["-".join(flags) for flags, _ in BAD_FLAGS])
def test_invalid_flags_raise_before_training(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr("transformers.Trainer.train", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises((ValueError, SystemExit)) as raised:
        run("grpo", capsys, tmp_path, *QUICK, *flags)
    assert raised.match(message) if not raised.errisinstance(SystemExit) else message in capsys.readouterr().err


def test_the_algorithm_may_stand_in_the_configuration_file(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: rloo\nnormalize_advantages: true\nreward_funcs: [a.b]\n")
    parsed = grpo.parse(["--config", str(tmp_path / "config.yaml"), "--use_cpu"])
    assert isinstance(parsed[2], grpo.SharedPromptRLOOConfig)
    assert parsed[2].normalize_advantages


def test_the_demo_asks_for_words_of_a_passage():
    made, again = data.passages(), data.passages()
    for split in ("train", "test"):
        assert made[split][:] == again[split][:]
        assert all(row["passage"] in row["prompt"][0]["content"] for row in made[split])
    passage = "The pass statement does nothing. It is a null operation: when it is executed, nothing happens."
    answers = ["", "Nothing nothing NOTHING.", "the pass statement does not", passage]
    completions = [[data._turn("assistant", answer)] for answer in answers]
    assert data.copied_words_reward(completions, [passage] * 4, prompts=[]) == pytest.approx([0, 0.1, 0.4, 1])
