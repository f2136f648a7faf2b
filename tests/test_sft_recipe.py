"""The fine-tuning recipe, run as a user runs it: a few steps on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import model_zoo
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import CHECKPOINTING, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))
import data  # noqa: E402
import sft  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # TRL's default for `gradient_checkpointing` and PEFT's look at the model, in transformers 5.23
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    # torch on a machine without a GPU
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

QUICK = ["--logging_steps", "1", "--use_cpu", "--disable_tqdm", "True", "--save_strategy", "no"]


def launch(command, output_dir, *flags, recipe="sft"):
    """Run a recipe as a program; returns what it printed."""
    program = [*command, RECIPES / f"{recipe}.py", "--output_dir", output_dir, *flags]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*map(str, program)], capture_output=True, text=True, timeout=300, env=threads)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def logged(printed, name):
    """The values that the trainer printed for one metric."""
    entries = [line for line in printed.splitlines() if line.startswith("{'loss'")]
    return [float(json.loads(entry.replace("'", '"'))[name]) for entry in entries]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    data.build_model(path)
    return path


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
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashmask")
    assert reloaded.config._attn_implementation == "flashmask"
    question = AutoTokenizer.from_pretrained(tmp_path)("What is a lambda?", return_tensors="pt")
    assert torch.isfinite(reloaded(**question).logits).all()

    (tmp_path / "checkpoint-16").rename(tmp_path / "finished")
    resumed = launch([sys.executable], tmp_path, "--max_steps", 16, *quick, "--resume_from_checkpoint", "true")
    assert logged(resumed, "loss") == pytest.approx(losses[4:], rel=1e-4)


def test_two_processes_train_lora_like_one(tmp_path, model, capsys):
    flags = ["--config", str(sft.DEMO_CONFIG), "--model_name_or_path", str(model), "--use_peft", "--lora_dropout", "0"]
    flags += ["--lora_target_modules", "all-linear", "--max_steps", "4", *QUICK]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    accelerate += ["--config_file", RECIPES / "configs" / "accelerate_ddp.yaml"]
    two = launch(accelerate, tmp_path / "two", *flags, "--per_device_train_batch_size", 1)
    assert (tmp_path / "two" / "adapter_model.safetensors").exists()
    assert two.count("packing efficiency") == two.count("Answer: ") == 1

    sft.main([*flags, "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "2"])
    one = capsys.readouterr().out
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-4)


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
def test_a_yaml_file_a_local_model_and_a_local_dataset(tmp_path, model, kind, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps(ROWS[kind])] * 30))
    config = tmp_path / "config.yaml"
    config.write_text(f"model_name_or_path: {model}\ndataset_name: {rows}\nmax_length: 64\nmax_steps: 2\n")
    sft.main(["--config", str(config), "--output_dir", str(tmp_path / "out"), *QUICK])
    printed = capsys.readouterr().out
    assert len(logged(printed, "loss")) == 2
    assert "Packed 30 train examples into" in printed
    assert "Answer: " not in printed


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_trl_packs_if_told_to(tmp_path, model, strategy, capsys):
    flags = ["--model_name_or_path", str(model), "--max_length", "256", "--max_steps", "2", "--packing"]
    sft.main([*flags, "--packing_strategy", strategy, "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    assert len(logged(printed, "loss")) == 2
    assert "mask_sparsity" not in printed


def test_evaluation_counts_the_same_way(tmp_path, model, capsys):
    flags = ["--model_name_or_path", str(model), "--max_length", "1024", "--max_steps", "1", "--eval_strategy", "steps"]
    sft.main([*flags, "--eval_steps", "1", "--output_dir", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    assert "eval_loss" in printed
    assert "eval_mask_sparsity" in printed


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["jamba", "lfm2", "recurrent_gemma"])
def test_layers_that_mix_documents_stop_the_first_step(tmp_path, family, compiled):
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    args = SFTConfig(**trainer_settings(tmp_path), max_length=32, **options)
    dataset = Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]] * 4})
    trainer = sft.PackedSFTTrainer(
        model=model_zoo.build(family, "flashmask"),
        args=args,
        train_dataset=dataset,
        processing_class=word_tokenizer(),
    )
    with pytest.raises(ValueError, match=r"gave the packed row's mask to 1 of its . layers.*use TRL's own trainer"):
        trainer.train()


@pytest.mark.parametrize("attention", ["flashmask", "sdpa", "eager"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_layers_that_see_the_mask_train(tmp_path, model, attention, adapter):
    settings = trainer_settings(tmp_path) | {CHECKPOINTING: True}
    dataset = Dataset.from_list([ROWS["text"]] * 8)
    trainer = sft.PackedSFTTrainer(
        model=str(model),
        args=SFTConfig(**settings, max_length=64, model_init_kwargs={"attn_implementation": attention}),
        train_dataset=dataset,
        peft_config=LoraConfig(task_type="CAUSAL_LM") if adapter else None,
    )
    trainer.train()
    backbone = trainer.model.get_base_model().base_model if adapter else trainer.model.base_model
    assert getattr(backbone, "_layers_checked", False) == (attention == "flashmask")


def test_packed_rows_are_not_packed_again(tmp_path, model):
    rows = pack_dataset(
        Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]] * 4, "labels": [[3, 4, -100], [6, 7]] * 4}), 8
    )
    args = SFTConfig(**trainer_settings(tmp_path), max_length=8, model_init_kwargs={"attn_implementation": "flashmask"})
    trainer = sft.PackedSFTTrainer(model=str(model), args=args, train_dataset=rows, eval_dataset=rows)
    assert trainer.train_dataset[:] == rows[:]
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("option", [{}, {"completion_only_loss": True}, {"completion_only_loss": False}], ids=str)
@pytest.mark.parametrize("column", ["assistant_masks", "completion_mask"])
def test_labels_of_packed_rows_are_those_of_stock(tmp_path, column, option):
    """Rows of another packer, with masks and without labels; max_length says nothing of them."""
    row = {"input_ids": [5, 6, 7, 8, 9, 10], column: [0, 0, 1, 1, 0, 1], "seq_lengths": [4, 2]}
    got = []
    for kind, length in ((sft.PackedSFTTrainer, 4), (SFTTrainer, None)):
        trainer = kind(
            model=AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask"),
            args=SFTConfig(**trainer_settings(tmp_path), max_length=length, **option),
            train_dataset=Dataset.from_list([row] * 4),
            processing_class=word_tokenizer(),
            **({} if kind is sft.PackedSFTTrainer else {"data_collator": DataCollatorForPackedLanguageModeling()}),
        )
        got.append(next(iter(trainer.get_train_dataloader())))
    assert got[0]["labels"][0, :6].tolist() == got[1]["labels"][0, :6].tolist()
    learned = column == "completion_mask" and not option.get("completion_only_loss")
    assert got[0]["labels"][0, :6].tolist() == ([-100, 6, 7, 8, -100, 10] if learned else [-100, -100, 7, 8, -100, 10])


def test_evaluation_leaves_out_what_stock_leaves_out(tmp_path, model, capsys):
    rows = [{"prompt": "A lambda expression " * 60, "completion": "is it."}, *[ROWS["prompt-completion"]] * 3]
    dataset = Dataset.from_list(rows)
    losses = []
    for kind, attention in ((sft.PackedSFTTrainer, "flashmask"), (SFTTrainer, "eager")):
        args = SFTConfig(**trainer_settings(tmp_path), max_length=32, truncation_mode="keep_start")
        args.per_device_eval_batch_size = 1
        args.model_init_kwargs = {"attn_implementation": attention}
        trainer = kind(model=str(model), args=args, train_dataset=dataset, eval_dataset=dataset)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "Packed 4 eval examples into" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_length", "256"], "more than max_length 256.*truncation_mode='keep_start'.*split=True"),
        (["--max_length", "8192", "--model_name_or_path", "deep"], "model has 1024 positions"),
        (["--max_length", "256", "--split", "--truncation_mode", "keep_start"], "exclude each other"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint to resume from"),
        (["--learning_speed", "1"], "--learning_speed"),
        (["--dataset_name", "nowhere/at-all.jsonl"], "dataset_name: there is no file nowhere"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_stop_before_training(tmp_path, model, monkeypatch, flags, message):
    monkeypatch.setattr(sft.PackedSFTTrainer, "training_step", lambda *_: pytest.fail("a training step ran"))
    if "deep" in flags:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"text": "lambda " * 2000}))
        flags = [str(model) if flag == "deep" else flag for flag in flags] + ["--dataset_name", str(rows)]
    with pytest.raises(Exception, match=message):
        sft.main([*flags, "--output_dir", str(tmp_path), *QUICK])


def test_a_row_needs_a_length(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("max_length: null\n")
    with pytest.raises(ValueError, match="max_length is None, but packing needs it"):
        sft.parse(["--config", str(config)])


def test_a_dataset_may_be_streamed(tmp_path, model, capsys):
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


def test_the_demo_data_is_the_same_each_time(tmp_path):
    first, second = data.question_answers(), data.question_answers()
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
