"""The recipe for supervised fine-tuning, run as a user runs it for a few steps on the CPU."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from datasets import DatasetDict
from tools.recipes import FSDP_ON_CPU, QUICK, RECIPES, assert_trained_alike, launch, logged
from tools.support import record_passes
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flashmask_hf.trainers import PackedSFTTrainer

import common  # isort: skip
import data  # isort: skip
import sft  # isort: skip

pytestmark = TRAINER_WARNINGS
all_examples = data.question_answers


@pytest.fixture(scope="module")
def few_examples():
    return DatasetDict({name: rows.select(range(min(60, len(rows)))) for name, rows in all_examples().items()})


@pytest.fixture(autouse=True)
def _few_examples(request, few_examples, monkeypatch):
    """Tokenize 60 of the demo's 1,300 examples in tests that are not marked full."""
    if request.node.get_closest_marker("full") is None:
        monkeypatch.setattr(data, "question_answers", lambda: few_examples)


@pytest.mark.full
def test_the_demo_learns_saves_reloads_and_resumes(tmp_path):
    quick = ["--logging_steps", 2, "--disable_tqdm", True, "--use_cpu", "--save_steps", 8]
    quick += ["--save_strategy", "steps", "--save_total_limit", 2]
    printed = launch([sys.executable], tmp_path, "--max_steps", 16, *quick)
    losses = logged(printed, "loss")
    assert losses[-1] < losses[0] - 0.3
    assert "rows of up to 1024 tokens; packing efficiency 99." in printed
    assert all(value > 0 for value in logged(printed, "tokens_per_second"))
    assert all(0 < value < 1 for value in logged(printed, "mask_sparsity"))
    assert "attn_implementation='flashmask'" in printed
    assert printed.partition("Answer: ")[2].strip()
    assert f"Picture of the loss and of the mask of one row: {tmp_path / 'picture.png'}" in printed
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashmask")
    assert reloaded.config._attn_implementation == "flashmask"
    question = AutoTokenizer.from_pretrained(tmp_path)("What is a lambda?", return_tensors="pt")
    assert torch.isfinite(reloaded(**question).logits).all()

    (tmp_path / "checkpoint-16").rename(tmp_path / "finished")
    resumed = launch([sys.executable], tmp_path, "--max_steps", 16, *quick, "--resume_from_checkpoint", "true")
    assert logged(resumed, "loss") == pytest.approx(losses[4:], rel=1e-4)


@pytest.mark.full
def test_the_demo_repeats_a_taught_fact(tmp_path, monkeypatch, capsys):
    """The facts alone, for half of their tokens in the demo; before training, the model answers nothing of the kind."""
    facts = data.question_answers()["train"]
    facts = facts.select(range(len(facts) - len(data.FACTS) * data.FACT_COPIES, len(facts)))
    monkeypatch.setattr(data, "question_answers", lambda: DatasetDict({"train": facts, "test": facts}))
    sft.main(["--max_length", "512", "--num_train_epochs", "2", "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    question = printed.partition("Prompt: ")[2].splitlines()[0]
    assert printed.partition("\nAnswer: ")[2].splitlines()[0] == data.FACTS[question]
    assert data.FACTS[question] not in printed.partition("Answer before training: ")[2].splitlines()[0]


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    sft.main(["--max_steps", "1", "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    assert "No picture: matplotlib is missing: pip install matplotlib" in printed


def test_a_picture_of_rows_that_trl_packs_is_refused():
    with pytest.raises(ValueError, match="picture shows a row that this package packs; add --picture false"):
        sft.parse(["--packing"])
    assert sft.parse(["--packing", "--picture", "false"])[2].packing


@pytest.mark.full
def test_attention_is_kept_in_checkpointed_layers(tmp_path, model, monkeypatch, capsys):
    """With an adapter: the losses of a run that computes attention twice, and half of its forwards; on the host too."""
    flags = ["--model_name_or_path", str(model), "--use_peft", "--lora_dropout", "0"]
    flags += ["--max_length", "1024", "--max_steps", "2", *QUICK, f"--{CHECKPOINTING}", "True"]
    passes, runs = record_passes(monkeypatch), []
    on_the_host = ["--keep_attention", "--host_gib", "1", "--tile_tokens", "300"]
    for more in (["--keep_attention", "False"], [], on_the_host):
        passes.clear()
        sft.main([*flags, "--output_dir", str(tmp_path / str(len(more))), *more])
        printed = capsys.readouterr().out
        assert ("attention's results are kept" in printed) == (more == on_the_host)
        runs.append((logged(printed, "loss"), passes.count("forward")))
    assert "in tiles of 300 tokens, attention's results are kept, up to 1.0 GiB of checkpoints on the host" in printed
    assert runs[1][0] == runs[0][0] == pytest.approx(runs[2][0], rel=1e-4)
    assert len(runs[0][0]) == 2
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    assert runs[0][1] - runs[1][1] == runs[0][1] - runs[2][1] == 2 * layers


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero3"])
def test_two_processes_train_lora_like_one(tmp_path, model, monkeypatch, capsys, config):
    if config == "zero3":
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    flags = ["--config", str(sft.DEMO_CONFIG), "--model_name_or_path", str(model), "--use_peft", "--lora_dropout", "0"]
    flags += ["--lora_target_modules", "all-linear", "--max_steps", "4", *QUICK]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--config_file", RECIPES / "configs" / f"accelerate_{config}.yaml"]
    own = flags
    if config == "fsdp2":
        (tmp_path / "fsdp.py").write_text(FSDP_ON_CPU)
        accelerate.append(tmp_path / "fsdp.py")
        own = [flag for flag in flags if flag != "--use_cpu"]
    two = launch(accelerate, tmp_path / "two", *own, "--per_device_train_batch_size", 1)
    assert two.count("FSDP2: True") == (2 if config == "fsdp2" else 0)
    assert (tmp_path / "two" / "adapter_model.safetensors").exists()
    assert two.count("packing efficiency") == two.count("Answer: ") == 1

    sft.main([*flags, "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "2"])
    one = capsys.readouterr().out
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-4)


@pytest.mark.full
def test_two_processes_that_split_rows_train_like_one(tmp_path, model, capsys):
    """Context parallelism with the configuration of several GPUs: printed losses, evaluation and saved weights.

    The processes that split rows also run in tiles, keep attention's results and offload checkpoints.
    """
    flags = ["--config", str(sft.DEMO_CONFIG), "--model_name_or_path", str(model), "--max_steps", "3", *QUICK]
    flags += ["--eval_strategy", "steps", "--eval_steps", "3", "--max_length", "1024", "--picture", "False"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"lambda {'yield ' * n}"}) for n in (300, 700, 40, 150) * 6))
    flags += ["--dataset_name", str(rows), "--dataset_test_split", "train", "--learning_rate", "0.001"]
    (tmp_path / "fsdp.py").write_text(FSDP_ON_CPU)
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--config_file", RECIPES / "configs" / "accelerate_fsdp2_cp.yaml", tmp_path / "fsdp.py"]
    without_cpu = [flag for flag in flags if flag != "--use_cpu"]
    long_rows = ["--tile_tokens", 200, "--keep_attention", "True", "--host_gib", 1]
    two = launch(accelerate, tmp_path / "two", *without_cpu, f"--{CHECKPOINTING}", "True", *long_rows)
    assert two.count("FSDP2: True") == 2
    assert two.count("MLPs and norms run in tiles of 200 tokens, attention's results are kept, up to 1.0 GiB") == 1
    sft.main([*flags, "--output_dir", str(tmp_path / "one")])
    one = capsys.readouterr().out
    losses = logged(one, "loss")
    assert losses[-1] < losses[0]
    assert logged(two, "loss") == pytest.approx(losses, rel=1e-3)
    assert logged(two, "keys_per_token") == pytest.approx(logged(one, "keys_per_token"), rel=1e-3)
    assert evaluated(two) == pytest.approx(evaluated(one), rel=1e-3)
    assert_trained_alike(tmp_path / "one", tmp_path / "two", model)


def evaluated(printed):
    return [float(value) for value in re.findall(r"'eval_loss': '?([0-9.]+)", printed)]


ROWS = {
    "text": {"text": "A lambda expression makes an anonymous function."},
    "prompt-completion": {"prompt": "What is a lambda? ", "completion": "An anonymous function."},
    "conversational": {
        "messages": [
            {"role": "user", "content": "What is a lambda?"},
            {"role": "assistant", "content": "An anonymous function."},
        ]
    },
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_yaml_file_with_a_local_model_and_a_local_dataset(tmp_path, model, kind, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps(ROWS[kind])] * 30))
    config = tmp_path / "config.yaml"
    config.write_text(f"model_name_or_path: {model}\ndataset_name: {rows}\nmax_length: 64\nmax_steps: 2\n")
    sft.main(["--config", str(config), "--output_dir", str(tmp_path / "out"), *QUICK])
    printed = capsys.readouterr().out
    assert len(logged(printed, "loss")) == 2
    assert "Packed 30 train examples into" in printed
    assert "Answer: " not in printed


@pytest.mark.parametrize("strategy", ["bfd", pytest.param("bfd_split", marks=pytest.mark.full)])
def test_trl_packs_with_its_own_flags(tmp_path, model, strategy, capsys):
    flags = ["--model_name_or_path", str(model), "--max_length", "256", "--max_steps", "2", "--packing"]
    sft.main([*flags, "--packing_strategy", strategy, "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    assert len(logged(printed, "loss")) == 2
    assert "mask_sparsity" not in printed


def test_evaluation_logs_the_mask_sparsity(tmp_path, model, capsys):
    flags = ["--model_name_or_path", str(model), "--max_length", "1024", "--max_steps", "1", "--eval_strategy", "steps"]
    sft.main([*flags, "--eval_steps", "1", "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    assert "eval_loss" in printed
    assert "eval_mask_sparsity" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_length", "256"], "more than max_length 256; .*--truncation_mode keep_start .* --split True"),
        (["--max_length", "8192", "--model_name_or_path", "deep"], "model has 1024 positions"),
        (["--max_length", "256", "--split", "--truncation_mode", "keep_start"], "exclude each other"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint to resume from"),
        (["--learning_speed", "1"], "--learning_speed"),
        (["--dataset_name", "nowhere/at-all.jsonl"], "dataset_name: .*No such file .*nowhere"),
        (["--model_name_or_path", "./nowhere"], "model_name_or_path: there is no folder ./nowhere"),
        (["--config", "nowhere.yaml"], "config: .*No such file or directory: 'nowhere.yaml'"),
        (["--config"], "config: --config is the last flag; name the YAML file behind it"),
        (["--max_length", "0"], "max_length must be at least 1, got 0"),
        (["--keep_attention"], f"keep_attention, tile_tokens and host_gib need {CHECKPOINTING}=True"),
        (["--long_context", f"--{CHECKPOINTING}", "True"], "measured on a GPU.*set keep_attention and host_gib"),
        (["--torch_compile", "--host_gib", "1", f"--{CHECKPOINTING}", "True"], "torch_compile compiles whole layers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_invalid_flags_raise_before_training(tmp_path, model, monkeypatch, flags, message):
    monkeypatch.setattr(PackedSFTTrainer, "training_step", lambda *_: pytest.fail("a training step ran"))
    if "deep" in flags:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"text": "lambda " * 2000}))
        flags = [str(model) if flag == "deep" else flag for flag in flags] + ["--dataset_name", str(rows)]
    with pytest.raises(common.FlagError, match=message):
        sft.main(["--output_dir", str(tmp_path), *QUICK, *flags])


def test_an_evaluation_without_its_split_says_the_ways_out(tmp_path, model):
    """A file has one split; a folder has those of its files' names."""
    (tmp_path / "rows").mkdir()
    for name in ("train", "test"):
        (tmp_path / "rows" / f"{name}.jsonl").write_text("\n".join([json.dumps(ROWS["text"])] * 3))
    flags = ["--model_name_or_path", str(model), "--do_eval", "--output_dir", str(tmp_path / "out")]
    ways = "no split 'test', but 'train'; name one .* a folder with files train and test, or leave do_eval .* out"
    with pytest.raises(common.FlagError, match=ways):
        sft.main([*flags, *QUICK, "--dataset_name", str(tmp_path / "rows" / "train.jsonl")])
    parsed = sft.parse([*flags, *QUICK, "--dataset_name", str(tmp_path / "rows")])
    assert len(common.trainer_options(parsed, data.question_answers)["eval_dataset"]) == 3


def test_paths_of_another_kind_raise_before_training(tmp_path, model):
    """An empty dataset file, an adapter without its model."""
    empty = tmp_path / "rows.jsonl"
    empty.touch()
    (tmp_path / "adapter_config.json").write_text("{}")
    out = ["--output_dir", str(tmp_path / "out"), *QUICK]
    for flags, message in [
        (["--dataset_name", str(empty), *out], "dataset_name: the file .*rows.jsonl is empty"),
        (["--model_name_or_path", str(tmp_path), *out], "holds an adapter without its model; merge the two"),
    ]:
        with pytest.raises(common.FlagError, match=message):
            sft.main(flags)
    assert not (tmp_path / "out").exists()


def test_processes_without_a_group_are_refused(monkeypatch):
    """As with accelerate_ddp.yaml where there is no GPU: each would train alone and overwrite the others' files."""
    common.check_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(common.FlagError, match="2 processes were launched for GPUs, and there is none; add --use_cpu"):
        common.check_processes()


def test_help_tells_what_real_runs_do(capsys):
    """The demo has a learning rate of 5e-3; a run with a model has TRL's."""
    with pytest.raises(SystemExit) as stopped:
        sft.main(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 2e-05)" in text
    assert "--config FILE reads flags from a YAML file" in text
    assert "0.005" not in text
    assert "sft-demo" not in text


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "accelerate.commands.launch", "--quiet"]], ids=["python", "accelerate"]
)
def test_the_error_of_a_wrong_flag_is_the_last_line(launcher):
    command = [sys.executable, *launcher, str(RECIPES / "sft.py"), "--learning_speed", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("sft.py: error: ")
    assert "--learning_speed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_packing_without_max_length_raises(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("max_length: null\n")
    with pytest.raises(ValueError, match="max_length is None, but packing needs it"):
        sft.parse(["--config", str(config)])


def test_a_streamed_dataset_trains(tmp_path, model, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps(ROWS["text"])] * 30))
    flags = [
        "--model_name_or_path",
        str(model),
        "--dataset_name",
        str(rows),
        "--dataset_streaming",
        "--max_length",
        "64",
    ]
    sft.main([*flags, "--max_steps", "2", "--output_dir", str(tmp_path / "out"), *QUICK])
    assert len(logged(capsys.readouterr().out, "loss")) == 2


def test_the_demo_data_is_deterministic(tmp_path):
    first, second = all_examples(), all_examples()
    assert first["train"][:] == second["train"][:]
    assert len(first["test"]) > 0
    for name in ("a", "b"):
        data.build_model(tmp_path / name)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_demo_template_marks_the_answer():
    tokenizer = data.build_tokenizer()
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, wanted in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if wanted]
    assert tokenizer.decode(answer) == "Because." + data.EOS
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt
