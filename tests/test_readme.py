"""The Python snippets of README.md run as pasted, on a tiny model and small datasets.

Two things are replaced. Names on the Hub become paths of local folders, since tests have no internet. Without a GPU,
`max_length=` of a config becomes `use_cpu=True, max_length=`: TRL's configs ask for bfloat16 on a GPU by default.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from tools.tiny import TRAINER_WARNINGS, llama_config, preference_rows, word_tokenizer
from transformers import AutoModelForCausalLM

pytestmark = TRAINER_WARNINGS

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

MODEL = "Qwen/Qwen3-0.6B"
DATASETS = {
    "trl-lib/Capybara": (
        "train",
        [{"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7 w8 w9"}]}] * 8,
    ),
    "roneneldan/TinyStories": ("train", [{"text": "w5 w6 w7 w8 w9"}] * 8),
    "HuggingFaceH4/ultrafeedback_binarized": ("train_prefs", preference_rows()),
}
TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the local folder of each name on the Hub."""
    root = tmp_path_factory.mktemp("hub")
    found = {MODEL: root / "model"}
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(root / "model")
    word_tokenizer(chat_template=TEMPLATE).save_pretrained(root / "model")
    for nth, (name, (split, rows)) in enumerate(DATASETS.items()):
        found[name] = root / f"dataset-{nth}"
        data = found[name] / "data"
        data.mkdir(parents=True)
        (data / f"{split}-00000-of-00001.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {name: str(path) for name, path in found.items()}


def test_the_first_snippet_is_the_trainer():
    assert "PackedSFTTrainer(" in SNIPPETS[0]
    assert "trainer.train()" in SNIPPETS[0]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs_as_pasted(number, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    code = SNIPPETS[number]
    if not torch.cuda.is_available():
        code = code.replace("Config(max_length=", "Config(use_cpu=True, max_length=")
    for name, folder in folders.items():
        code = code.replace(json.dumps(name), repr(folder))
    held = {"__name__": "__main__"}
    exec(compile(code, f"README.md, snippet {number}", "exec"), held)
    trainer = held.get("trainer")
    if trainer is not None:
        assert trainer.state.global_step == trainer.state.max_steps > 0
    if "print(" in code:  # what it prints stands in the block after it
        _, shown, _ = README.partition(code)[2].removeprefix("```").split("```", 2)
        assert capsys.readouterr().out.strip() == shown.strip()
