"""`python -m flashmask_hf run`: unchanged programs find the backend registered, in launched processes too."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools.tiny import llama_config, word_tokenizer
from transformers import AutoModelForCausalLM

from flashmask_hf import run
from flashmask_hf.__main__ import main

PROGRAM = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM
import beside
assert "flashmask_hf" in sys.modules
config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=8)
config.num_attention_heads = config.num_key_value_heads = 2
model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
print(json.dumps([__name__, sys.argv, model.config._attn_implementation]))
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(command, folder="."):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )


@pytest.mark.full
def test_a_script_runs_as_python_runs_it(program):
    """Its name, arguments, neighbours and exit code are those of `python program.py`."""
    done = start(["-m", "flashmask_hf", "run", program, "--flag", "-m", "run"], folder="/")
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["__main__", [str(program), "--flag", "-m", "run"], "flashmask"]


@pytest.mark.full
def test_a_module_runs_as_python_runs_it(program):
    done = start(["-m", "flashmask_hf", "run", "-m", "program", "--flag"], folder=program.parent)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["__main__", [str(program), "--flag"], "flashmask"]


@pytest.mark.full
def test_accelerate_launches_a_program_with_the_backend(program):
    launch = ["--num_processes", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = start(["-m", "accelerate.commands.launch", *launch, "-m", "flashmask_hf", "run", program, "--flag"])
    assert json.loads(done.stdout) == ["__main__", [str(program), "--flag"], "flashmask"], done.stderr
    assert done.returncode != 0


@pytest.mark.full
def test_the_command_of_trl_trains(tmp_path):
    """It launches its script through accelerate, in another process."""
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([json.dumps({"text": "w5 w6 w7 w8"})] * 8))
    settings = {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
        "attn_implementation": "flashmask",
        "packing": True,
        "max_length": 32,
        "max_steps": 1,
        "use_cpu": True,
        "report_to": "none",
    }
    (tmp_path / "sft.yaml").write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items()))
    done = start(["-m", "flashmask_hf", "run", "trl", "sft", "--config", tmp_path / "sft.yaml"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "usage: python -m flashmask_hf run"),
        (["--help"], 0, "usage: python -m flashmask_hf run"),
        (["-m"], 2, "error: -m needs the name of a module"),
        (["absent.py"], 2, "error: absent.py is no file, and no command of an installed package"),
    ],
    ids=str,
)
def test_arguments_that_name_no_program(arguments, code, message, capsys):
    try:
        found = main(["run", *arguments])
    except SystemExit as error:
        found = error.code
    assert found == code
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("given", "launched"),
    [
        ({"module": False, "no_python": False}, (True, "flashmask_hf", ["run", "train.py", "--flag"])),
        ({"module": True, "no_python": False}, (True, "flashmask_hf", ["run", "-m", "train.py", "--flag"])),
        ({"module": False, "no_python": True}, (False, "train.py", ["--flag"])),
    ],
    ids=["script", "module", "no Python"],
)
def test_what_accelerate_launches(monkeypatch, given, launched):
    """Scripts and modules run by this command; a program that is not Python runs as it is."""
    launch = pytest.importorskip("accelerate.commands.launch")
    monkeypatch.setattr(launch, "launch_command", lambda args: args)
    run._keep_registered_in_launched_processes()
    args = SimpleNamespace(training_script="train.py", training_script_args=["--flag"], **given)
    found = launch.launch_command(args)
    assert (found.module, found.training_script, found.training_script_args) == launched


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (3, 3)])
def test_a_command_gives_its_arguments_and_exit_code(monkeypatch, returned, code):
    seen = []
    command = SimpleNamespace(load=lambda: lambda: seen.append(sys.argv) or returned)
    monkeypatch.setattr(run, "_keep_registered_in_launched_processes", lambda: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: [command] if name == "trl" else [])
    monkeypatch.setattr(sys, "argv", [])
    assert main(["run", "trl", "sft"]) == code
    assert seen == [["trl", "sft"]]


def test_a_script_that_is_linked_finds_its_neighbours(monkeypatch, tmp_path):
    """Python resolves the link, too."""
    (tmp_path / "real").mkdir()
    script = tmp_path / "real" / "script.py"
    script.write_text("import sys\nsys.exit(sys.path[0])")
    (tmp_path / "link.py").symlink_to(script)
    monkeypatch.setattr(run, "_keep_registered_in_launched_processes", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit) as caught:
        main(["run", str(tmp_path / "link.py")])
    assert caught.value.code == str(script.parent)


def test_programs_run_without_accelerate(monkeypatch):
    """Where it is not installed, nothing can be launched through it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "accelerate.commands", None)
    run._keep_registered_in_launched_processes()
