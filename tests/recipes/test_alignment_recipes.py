"""The recipes for preference optimization and reward models, run as a user runs them for a few steps on the CPU."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from safetensors.torch import load_file
from tools.recipes import FSDP_ON_CPU, QUICK, RECIPES, assert_trained_alike, launch, logged, run
from tools.tiny import TRAINER_WARNINGS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaModel, TrainingArguments

import common  # isort: skip
import data  # isort: skip
import dpo  # isort: skip

pytestmark = [
    *TRAINER_WARNINGS,
    # TRL 1 warns; the recipe cannot set the token otherwise, since the trainer loads the tokenizer.
    pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning"),
]

CONFIGS = sorted(path.name for path in (RECIPES / "configs").glob("*.yaml"))
ACCURACY = {"dpo": "rewards/accuracies", "reward": "accuracy"}
DIGITS = 1e-3
"""Relative difference of printed metrics, which have four digits."""
LORA = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_dropout", "0"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a few rows of each recipe's demo data to files."""
    folder = tmp_path_factory.mktemp("files")
    for recipe, rows in (("dpo", data.preferences()), ("reward", data.rankings())):
        rows["train"].select(range(32)).to_json(folder / f"{recipe}.jsonl")
    return {recipe: folder / f"{recipe}.jsonl" for recipe in ("dpo", "reward")}


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "flags"), [("dpo", []), ("reward", LORA)])
def test_the_demo_learns_saves_and_reloads(tmp_path, capsys, recipe, flags):
    quick = [*QUICK, "--max_steps", 8, "--warmup_steps", 0, "--learning_rate", 0.01 if flags else 1e-3]
    printed = run(recipe, capsys, tmp_path, *quick, *flags)
    losses, accuracies = logged(printed, "loss"), logged(printed, ACCURACY[recipe])
    assert sum(losses[-2:]) < sum(losses[:2]) - 0.2
    assert sum(accuracies[-2:]) > sum(accuracies[:2]) + 0.3
    for name in ("shared_tokens_saved", "mask_sparsity"):
        assert all(0 < value < 1 for value in logged(printed, name))
        assert f"eval_{name}" in printed
    assert json.loads((tmp_path / "eval_results.json").read_text())[f"eval_{ACCURACY[recipe]}"] > 0.6
    assert f"Loaded {tmp_path} again, attn_implementation='flashmask'" in printed
    if recipe == "dpo":
        margins = printed.partition("log p(chosen) - log p(rejected): ")[2].split()
        assert float(margins[0]) != float(margins[3])
    else:
        assert 2 <= printed.count(": reward ") <= data.MOST_ANSWERS

    kind = {"dpo": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}[recipe]
    labels = {"num_labels": 1} if recipe == "reward" else {}
    reloaded = kind.from_pretrained(tmp_path, attn_implementation="flashmask", **labels)
    saved = load_file(tmp_path / ("adapter_model.safetensors" if flags else "model.safetensors"))
    if recipe == "reward":
        head = reloaded.score.modules_to_save["default"] if flags else reloaded.score
        assert torch.equal(head.weight, next(saved[name] for name in saved if "score" in name))
    assert torch.isfinite(reloaded(input_ids=torch.arange(1, 9)[None]).logits).all()


SHOWN = {
    "chosen and rejected": ({"prompt": "Why? ", "chosen": "Because.", "rejected": "No."}, [1, 0]),
    "ranked": ({"prompt": "Why? ", "answers": ["Because.", "So.", "No."]}, [2, 1, 0]),
    "scored": ({"prompt": "Why? ", "answers": ["No.", "Because.", "So."], "scores": [0.0, 2.5, 0.0]}, [2.5, 0, 0]),
    "tokenized": ({"chosen_ids": [8, 9, 10], "rejected_ids": [8, 11]}, [1, 0]),
}


@pytest.mark.parametrize("form", SHOWN)
def test_rewards_are_shown_for_every_data_format(tmp_path, model, capsys, form):
    row, scores = SHOWN[form]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    flags = ["--model_name_or_path", model, "--dataset_name", tmp_path / "rows.jsonl", "--dataset_test_split", "train"]
    printed = run("reward", capsys, tmp_path / "out", *flags, *QUICK, "--max_steps", 1, "--do_eval", "--show", 1)
    _, shown = printed.split("Prompt: ")
    assert [float(line.split()[1][:-1]) for line in shown.splitlines() if ": reward " in line] == scores


@pytest.mark.parametrize("recipe", ["dpo", "reward"])
@pytest.mark.parametrize("ignored", [True, False])
def test_ignore_bias_buffers_ignores_bool_buffers(tmp_path, model, files, monkeypatch, capsys, recipe, ignored):
    seen = []

    def train(trainer, **_):
        seen.append(getattr(trainer.model, "_ddp_params_and_buffers_to_ignore", None))

    init = LlamaModel.__init__

    def with_bias(self, config):
        init(self, config)
        self.register_buffer("bias", torch.ones(2, dtype=torch.bool), persistent=False)

    monkeypatch.setattr(LlamaModel, "__init__", with_bias)
    monkeypatch.setattr("transformers.Trainer.train", train)
    flags = ["--model_name_or_path", model, "--dataset_name", files[recipe], "--ignore_bias_buffers", ignored]
    run(recipe, capsys, tmp_path, *flags, *QUICK)
    assert seen == [["model.bias"] if ignored else None]


EVALUATION = ["--do_eval", "--dataset_test_split", "train", "--per_device_eval_batch_size", 3]
"""Of four rows, so that one of two processes has three of them, and the other has one and repeats two."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "config", "flags"),
    [
        ("dpo", "fsdp2", []),
        ("dpo", "fsdp2_cp", []),
        ("reward", "ddp", [*LORA, *EVALUATION]),
        ("reward", "fsdp2_cp", EVALUATION),
    ],
)
def test_two_processes_train_like_one(tmp_path, model, files, capsys, recipe, config, flags):
    rows = tmp_path / "rows.jsonl"  # of one step, so that losses compare
    rows.write_text("".join(files[recipe].read_text().splitlines(keepends=True)[:4]))
    flags = ["--model_name_or_path", model, "--dataset_name", rows, "--max_steps", 4, *flags]
    flags += ["--learning_rate", 1e-3, "--logging_steps", 1, "--disable_tqdm", True, "--save_strategy", "no"]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--config_file", RECIPES / "configs" / f"accelerate_{config}.yaml"]
    more = ["--per_device_train_batch_size", 4 if config == "fsdp2_cp" else 2]
    if config != "ddp":
        (tmp_path / "fsdp.py").write_text(FSDP_ON_CPU)
        accelerate.append(tmp_path / "fsdp.py")
    else:
        more.append("--use_cpu")
    two = launch(accelerate, tmp_path / "two", *flags, *more, recipe=recipe)
    assert two.count("FSDP2: True") == (0 if config == "ddp" else 2)
    one = run(recipe, capsys, tmp_path / "one", *flags, "--use_cpu", "--per_device_train_batch_size", 4)
    losses = logged(one, "loss")
    assert losses[-1] < losses[0]
    assert logged(two, "loss") == pytest.approx(losses, rel=DIGITS)
    for key in ("num_tokens", "shared_tokens_saved", "eval_shared_tokens_saved") if recipe == "reward" else ():
        assert logged(two, key) == pytest.approx(logged(one, key), rel=DIGITS), key
    assert_trained_alike(tmp_path / "one", tmp_path / "two", model)


@pytest.mark.full
def test_a_killed_run_resumes_on_the_same_curve(tmp_path, model, files, capsys):
    flags = ["--model_name_or_path", model, "--dataset_name", files["dpo"], "--max_steps", 24, "--use_cpu"]
    flags += ["--per_device_train_batch_size", 2, "--learning_rate", 1e-3, "--disable_tqdm", True]
    flags += ["--save_strategy", "steps", "--save_steps", 12, "--logging_steps", 1]
    program = [sys.executable, RECIPES / "dpo.py", *flags, "--output_dir", tmp_path / "killed"]
    saved = tmp_path / "killed" / "checkpoint-12"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*map(str, program)], stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + 200
    while not common.is_whole(saved) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()[-4000:]
    assert common.is_whole(saved)
    assert not (tmp_path / "killed" / "checkpoint-24").exists()

    resumed = run("dpo", capsys, tmp_path / "killed", *flags, "--resume_from_checkpoint", "true")
    whole = run("dpo", capsys, tmp_path / "whole", *flags)
    assert len(logged(whole, "loss")) == 24
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss")[12:], rel=DIGITS)


def checkpoint(path):
    """Write the file of a checkpoint that resuming looks for."""
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 1}))


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward"])
@pytest.mark.parametrize("damaged", ["missing", "cut off"])
def test_an_incomplete_checkpoint_raises(tmp_path, model, recipe, damaged):
    for step in (5, 10, 20):
        checkpoint(tmp_path / f"checkpoint-{step}")
    last = tmp_path / "checkpoint-20"
    if damaged == "missing":
        (last / "trainer_state.json").unlink()
    else:
        (last / "trainer_state.json").write_text('{"global_st')
    flags = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path), *QUICK]
    for wanted in ("true", str(last)):
        message = "checkpoint-20 has no whole trainer_state.json; name the last whole checkpoint, .*checkpoint-10"
        with pytest.raises(common.FlagError, match=message):
            importlib.import_module(recipe).main([*flags, "--resume_from_checkpoint", wanted])


def test_the_last_whole_checkpoint_is_resumed(tmp_path):
    for step in (5, 10, 9):
        checkpoint(tmp_path / f"checkpoint-{step}")
    args = TrainingArguments(str(tmp_path), resume_from_checkpoint="true", use_cpu=True)
    assert common.checkpoint_to_resume(args) == str(tmp_path / "checkpoint-10")
    args.resume_from_checkpoint = str(tmp_path / "checkpoint-5")
    assert common.checkpoint_to_resume(args) == str(tmp_path / "checkpoint-5")


BAD_FLAGS = [
    ("dpo", ["--resume_from_checkpoint", "true"], "holds no checkpoint to resume from"),
    (
        "dpo",
        ["--resume_from_checkpoint", "nowhere"],
        "nowhere has no whole trainer_state.json; .* holds no whole checkpoint",
    ),
    ("dpo", ["--show", "1"], "add --do_eval, or --show 0"),
    ("dpo", ["--dataset_train_split", "train_prefs"], "dataset_train_split: the dataset has no split 'train_prefs'"),
    ("dpo", ["--do_eval", "--dataset_test_split", "dev"], "dataset_test_split: .* no split 'dev', but 'train', 'test'"),
    ("dpo", ["--attn_implementation", "sdpa"], "--attn_implementation flashmask"),
    ("dpo", ["--gradient_accumulation_steps", "0"], "gradient_accumulation_steps must be at least 1, got 0"),
    ("dpo", ["--max_length", "16"], "fills --max_length 16"),
    (
        "dpo",
        ["--max_length", "64", "--truncation_mode", "error"],
        "more than max_length 64; raise it, or choose --truncation_mode keep_start",
    ),
    ("dpo", ["--row_length", "40"], "more than the 40 of a row"),
    ("dpo", ["--dataset_name", "nowhere/at-all.jsonl"], "dataset_name: .*No such file .*nowhere"),
    ("reward", ["--attn_implementation", "sdpa"], "--attn_implementation flashmask"),
    ("reward", ["--max_length", "16"], "max_length 16"),
    ("reward", ["--loss_type", "regression"], "loss_type"),
    ("reward", ["--learning_speed", "1"], "--learning_speed"),
]


def test_the_demo_without_an_evaluation_names_a_flag_that_helps():
    """The demo's configuration has `show`, which no flag of the command line can leave out."""
    with pytest.raises(common.FlagError, match="or --show 0"):
        dpo.parse(["--do_eval", "false"])
    assert not dpo.parse(["--do_eval", "false", "--show", "0"])[0].show


@pytest.mark.parametrize(
    ("recipe", "flags", "message"), BAD_FLAGS, ids=["-".join([recipe, *flags]) for recipe, flags, _ in BAD_FLAGS]
)
def test_invalid_flags_raise_before_training(tmp_path, model, monkeypatch, capsys, recipe, flags, message):
    monkeypatch.setattr("transformers.Trainer.train", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises((Exception, SystemExit)) as raised:
        run(recipe, capsys, tmp_path, "--model_name_or_path", model, *QUICK, *flags)
    assert raised.match(message) if not raised.errisinstance(SystemExit) else message in capsys.readouterr().err


def repository(folder, rows, *splits):
    """Write a dataset as on the Hub: parquet files, and a card that names the splits."""
    (folder / "data").mkdir(parents=True)
    for split in splits:
        Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    files = "\n".join(f"  - split: {split}\n    path: data/{split}-*" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}\n---\n")
    return folder


def ultrafeedback(question, chosen, rejected):
    asked = {"content": question, "role": "user"}
    conversations = [[asked, {"content": answer, "role": "assistant"}] for answer in (chosen, rejected)]
    return {
        "prompt": question,
        "prompt_id": "b139c3ec",
        "chosen": conversations[0],
        "rejected": conversations[1],
        "messages": conversations[0],
        "score_chosen": 8.5,
        "score_rejected": 4.0,
    }


def tulu(number):
    return {
        "dataset": "open_orca",
        "id": f"open_orca_{number}",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is a lambda?"},
            {"role": "assistant", "content": "An anonymous function."},
            {"role": "user", "content": "And a def?"},
            {"role": "assistant", "content": "One with a name."},
        ],
    }


@pytest.mark.parametrize(
    "config",
    ["dpo.yaml", "reward.yaml", *(pytest.param(f"{x}_lora.yaml", marks=pytest.mark.full) for x in ("dpo", "reward"))],
)
def test_ultrafeedback_trains_unchanged(tmp_path, model, capsys, config):
    rows = [ultrafeedback(f"What is {n}?", f"The number {n}.", "I do not know, sorry.") for n in range(20)]
    dataset = repository(tmp_path / "ultrafeedback_binarized", rows, "train_prefs", "test_prefs")
    flags = ["--config", RECIPES / "configs" / config, "--model_name_or_path", model, "--dataset_name", dataset]
    flags += ["--max_steps", 2, "--dtype", "float32", "--max_length", 1024]
    recipe = config.partition(".")[0].partition("_")[0]
    if recipe == "reward":
        flags += ["--pad_token", data.PAD]
    printed = run(recipe, capsys, tmp_path / "out", *flags, *QUICK)
    assert len(logged(printed, "loss")) == 2
    assert f"eval_{ACCURACY[recipe]}" in printed
    assert (tmp_path / "out" / ("adapter_model" if "lora" in config else "model")).with_suffix(".safetensors").exists()


def test_the_tulu_mixture_trains_unchanged(tmp_path, model, capsys):
    dataset = repository(tmp_path / "tulu-v2-sft-mixture", [tulu(number) for number in range(30)], "train")
    flags = ["--config", RECIPES / "configs" / "sft_tulu.yaml", "--model_name_or_path", model]
    flags += ["--chat_template_path", model, "--dataset_name", dataset, "--max_steps", 2, "--max_length", 128]
    printed = run("sft", capsys, tmp_path / "out", *flags, *QUICK)
    assert len(logged(printed, "loss")) == 2
    assert "Packed 30 train examples into" in printed


@pytest.mark.parametrize("config", [name for name in CONFIGS if not name.startswith("accelerate")])
def test_the_recipe_reads_every_key_of_a_configuration_file(config):
    path = RECIPES / "configs" / config
    recipe = re.match(r"(vision_)?[a-z]+", config)[0]
    parsed = importlib.import_module(recipe).parse(["--config", str(path)])
    for name, value in yaml.safe_load(path.read_text()).items():
        assert [getattr(args, name) for args in parsed if hasattr(args, name)] == [value], name


@pytest.mark.parametrize("config", [name for name in CONFIGS if name.startswith("accelerate")])
def test_accelerate_knows_every_key_of_a_configuration_file(config):
    loaded = load_config_from_file(str(RECIPES / "configs" / config))
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for section in (loaded.fsdp_config, loaded.deepspeed_config):
        assert section.keys() <= known.keys()
    assert bool(loaded.fsdp_config) == config.startswith("accelerate_fsdp2")
    assert bool(loaded.deepspeed_config) == (config == "accelerate_zero3.yaml")


def test_the_demo_data_is_on_disk_for_all_processes(tmp_path):
    made = common.make_demo_data(tmp_path, data.preferences)
    assert made["train"][:] == data.preferences()["train"][:]
    assert {file["filename"].rpartition("/")[0] for file in made["train"].cache_files} == {str(tmp_path / "train")}


def test_the_demo_prefers_true_answers():
    rows, again = data.preferences(), data.preferences()
    for split in ("train", "test"):
        assert rows[split][:] == again[split][:]
        chosen = {row["chosen"][0]["content"] for row in rows[split]}
        rejected = {row["rejected"][0]["content"] for row in rows[split]}
        assert len(chosen) > 30
        assert not chosen & rejected
    questions = [{row["prompt"][0]["content"] for row in rows[split]} for split in ("train", "test")]
    assert not questions[0] & questions[1]
    lengths = [[len(row[column][0]["content"]) for column in ("chosen", "rejected")] for row in rows["train"]]
    assert sum(abs(chosen - rejected) for chosen, rejected in lengths) / len(lengths) < 20


def test_the_demo_ranks_two_to_six_answers():
    rows, again = data.rankings(), data.rankings()
    truth = {row["prompt"][0]["content"]: row["chosen"] for row in data.preferences()["train"]}
    assert rows["train"][:] == again["train"][:]
    counts = Counter(len(row["answers"]) for row in rows["train"])
    assert set(counts) == {2, 3, 4, 5, 6}
    assert min(counts.values()) > 100
    places = Counter()
    for row in rows["train"]:
        assert len({answer[0]["content"] for answer in row["answers"]}) == len(row["answers"]) == len(row["scores"])
        best = max(range(len(row["answers"])), key=row["scores"].__getitem__)
        assert row["answers"][best] == truth[row["prompt"][0]["content"]]
        assert row["scores"].count(1.0) == 1
        assert row["scores"].count(0.0) >= 1
        assert set(row["scores"]) <= {0.0, 0.5, 1.0}
        places[best] += 1
    assert set(places) == set(range(6))
    assert sum(0.5 in row["scores"] for row in rows["train"]) > 100
