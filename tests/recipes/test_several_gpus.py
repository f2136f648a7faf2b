"""The recipes on two GPUs train like on one: sharded by FSDP2 or DeepSpeed's ZeRO-3, and with rows split over both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.recipes import RECIPES, launch, logged
from tools.support import assert_results
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import data  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.full]

SHARDED = ["fsdp2", "zero3"]


@pytest.fixture(autouse=True)
def _needs(request):
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")
    if "zero3" in request.node.name:
        pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a few rows of each recipe's demo data to files."""
    folder = tmp_path_factory.mktemp("files")
    for recipe, rows in (("dpo", data.preferences()), ("reward", data.rankings())):
        rows["train"].select(range(32)).to_json(folder / f"{recipe}.jsonl")
    rows = [{"text": f"lambda {'yield ' * n}"} for n in (300, 700, 40, 150) * 8]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {recipe: folder / f"{recipe}.jsonl" for recipe in ("sft", "dpo", "reward")}


def accelerate(config):
    """Return the command that launches a program with a configuration of `recipes/configs`, on a free port."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", port]
    return [*command, "--config_file", RECIPES / "configs" / f"accelerate_{config}.yaml"]


@pytest.mark.parametrize(
    ("recipe", "config"),
    [(recipe, config) for recipe in ("sft", "dpo", "reward") for config in (*SHARDED, "fsdp2_cp")],
)
def test_two_gpus_train_like_one(tmp_path, model, files, monkeypatch, recipe, config):
    flags = ["--model_name_or_path", model, "--dataset_name", files[recipe], "--max_steps", 4, "--max_length", 1024]
    flags += ["--learning_rate", 1e-3, "--logging_steps", 1, "--disable_tqdm", True, "--save_strategy", "no"]
    flags += ["--bf16", False, "--dtype", "float32"]
    rows = 1 if config == "fsdp2_cp" else 2
    if recipe == "reward":  # TRL draws a missing head on the GPU in one process, and on the CPU under FSDP2
        scored = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        scored.save_pretrained(tmp_path / "scored")
        AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "scored")
        flags[1] = tmp_path / "scored"
    two = launch(
        accelerate(config), tmp_path / "two", *flags, "--per_device_train_batch_size", 4 // rows, recipe=recipe
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = launch([sys.executable], tmp_path / "one", *flags, "--per_device_train_batch_size", 4, recipe=recipe)
    losses = logged(one, "loss")
    assert losses[-1] < losses[0]
    assert logged(two, "loss") == pytest.approx(losses, rel=1e-3)
    weights, others = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert others.keys() - weights.keys() <= {"lm_head.weight"}  # FSDP2 saves tied weights twice
    for name, weight in weights.items():
        assert (others[name].float() - weight).norm() <= 2e-3 * weight.norm(), name


def run_tool(command, name, *arguments):
    """Run a program of `tests/tools` by a command that launches two processes."""
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    program = [*map(str, [*command, tests / "tools" / name, *arguments])]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"algorithm": "rloo", "lora": True}], ids=["grpo", "rloo, adapter"])
@pytest.mark.parametrize("config", SHARDED)
def test_shared_prompts_on_two_gpus(tmp_path, config, options):
    """GRPO and RLOO log what TRL's trainers, which repeat each prompt, log with the same completions."""
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "use_cpu": False, "dtype": "float32"} | options
    run_tool(accelerate(config), "grpo.py", json.dumps(options), tmp_path / "runs.json")
    runs = json.loads((tmp_path / "runs.json").read_text())
    for one, two in zip(runs["ours"], runs["stock"], strict=True):
        for key in ("loss", "grad_norm", "reward"):
            assert one[key] == pytest.approx(two[key], rel=1e-3, abs=5e-6), key


def test_attention_of_split_rows_is_that_of_whole_rows(tmp_path):
    """In bits where heads are exchanged: output and, in deterministic mode, gradients. Gathered keys are reordered."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run_tool(command, "split_attention.py", tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", map_location="cpu")
    for name, whole in found["whole"].items():
        assert torch.equal(found["heads"][name], whole), name
    assert_results(found["keys"], found["eager"], found["exact"], torch.bfloat16)
