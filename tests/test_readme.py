"""The Python snippets of README.md and of every page of docs/ run as pasted, on a tiny model and small datasets.

Four things are replaced. Names on the Hub become paths of local folders, since tests have no internet. Without a GPU,
a trainer's config gets `use_cpu=True` as its first argument: TRL's configs ask for bfloat16 on a GPU by default.
Completions have 8 tokens. `LongRows`, which measures the memory of a GPU, is told what to keep where there is none.

Snippets of other programs run where these are installed, with the programs' own warnings.
"""

import json
import re
from pathlib import Path

import pytest
import tools.recipes  # noqa: F401  # makes the recipes importable
import torch
from datasets import Dataset
from tools.tiny import TRAINER_WARNINGS, conversation, llama_config, preference_rows, word_tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import vision_data  # isort: skip

pytestmark = [*TRAINER_WARNINGS, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
SNIPPETS = [(name, code) for name in PAGES for code in re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)]

MODEL = "Qwen/Qwen3-0.6B"
VISION = "Qwen/Qwen2.5-VL-3B-Instruct"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
DATASETS = {
    "trl-lib/Capybara": (
        "train",
        [{"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7 w8 w9"}]}] * 8,
    ),
    "roneneldan/TinyStories": ("train", [{"text": "w5 w6 w7 w8 w9"}] * 8),
    "HuggingFaceH4/ultrafeedback_binarized": ("train_prefs", preference_rows()),
    "trl-lib/ultrafeedback_binarized": (
        "train",
        [
            {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}
            for row in map(conversation, preference_rows())
        ],
    ),
    "trl-lib/DeepMath-103K": ("train", [{"prompt": [{"role": "user", "content": "w5 w6"}], "solution": "w7"}] * 2),
}
QUESTION, ANSWERS = ([{"role": role, "content": "What is this?"}] for role in ("user", "assistant"))
IMAGES = {
    "trl-lib/llava-instruct-mix": ("prompt", "completion"),
    "HuggingFaceH4/rlaif-v_formatted": ("prompt", "chosen", "rejected"),
}
"""Columns of datasets of images, beside `images`."""
TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the local folder of each name on the Hub."""
    root = tmp_path_factory.mktemp("hub")
    found = {MODEL: root / "model", ENCODER: root / "encoder", VISION: root / "vision"}
    vision_data.build_model(root / "vision")
    sizes = {name: getattr(llama_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    BertModel(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)).save_pretrained(root / "encoder")
    encoder_tokenizer = word_tokenizer()
    encoder_tokenizer.mask_token = "<unk>"
    encoder_tokenizer.save_pretrained(root / "encoder")
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(root / "model")
    word_tokenizer(chat_template=TEMPLATE).save_pretrained(root / "model")
    for nth, (name, (split, rows)) in enumerate(DATASETS.items()):
        found[name] = root / f"dataset-{nth}"
        data = found[name] / "data"
        data.mkdir(parents=True)
        (data / f"{split}-00000-of-00001.jsonl").write_text("\n".join(map(json.dumps, rows)))
    example = vision_data.pictures(5, 2)["test"][0]
    for name, columns in IMAGES.items():
        found[name] = root / name.partition("/")[2]
        row = {"images": example["images"], **{column: ANSWERS for column in columns}, "prompt": QUESTION}
        Dataset.from_list([row] * 4).to_parquet(found[name] / "data" / "train-00000-of-00001.parquet")
    found["Qwen/Qwen3-Reranker-0.6B"] = found[MODEL]
    return {name: str(path) for name, path in found.items()}


def numbers(text):
    """Return every number of a text, whether it stands in prose, code, a name or a link: Qwen3-0.6B has two."""
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def test_every_number_counts():
    assert numbers("3.8x, 544,768 on an H200. `f(8, 0.5)` [a](b/2410.01359)") == [
        "3.8", "544,768", "200", "8", "0.5", "2410.01359",
    ]  # fmt: skip


def test_the_readme_is_short():
    readme = re.sub(r"<!--.*?-->", "", PAGES["README.md"])
    assert len(PAGES["README.md"].splitlines()) <= 130
    assert len(readme.split()) <= 900
    assert len(numbers(readme)) <= 12
    lines = [len(re.findall(r"^.+$", code, re.MULTILINE)) for name, code in SNIPPETS if name == "README.md"]
    assert all(count <= most for count, most in zip(lines, (12, 6, 4), strict=True))
    assert "PackedSFTTrainer(" in SNIPPETS[0][1]


def parameter(number, name):
    pages = ("docs/programs.md", "docs/shared_prefixes.md", "docs/embeddings.md")
    marks = [pytest.mark.filterwarnings("ignore")] * (name in pages)
    return pytest.param(number, id=f"{name}-{number}", marks=marks)


@pytest.mark.parametrize("number", [parameter(number, name) for number, (name, _) in enumerate(SNIPPETS)])
def test_a_snippet_runs_as_pasted(number, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    page, code = SNIPPETS[number]
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        pytest.importorskip(module)
    text = code.replace("max_completion_length=1024", "max_completion_length=8")
    if not torch.cuda.is_available():
        text = re.sub(r"Config\((?=max_|output_dir)", "Config(use_cpu=True, ", text)
        text = text.replace("LongRows(trainer)", "LongRows(trainer, keep_attention=True, host_gib=0)")
    for name, folder in folders.items():
        text = text.replace(json.dumps(name), repr(folder))
    held = {"__name__": "__main__"}
    exec(compile(text, f"{page}, snippet {number}", "exec"), held)
    trainer = held.get("trainer")
    if trainer is not None:
        assert trainer.state.global_step == trainer.state.max_steps > 0
    if "print(" in code:  # what it prints stands in the block after it
        _, shown, _ = PAGES[page].partition(code)[2].removeprefix("```").split("```", 2)
        assert capsys.readouterr().out.strip() == shown.strip()


def test_the_attention_of_the_readme_keeps_documents_apart():
    held = {}
    exec(next(code for name, code in SNIPPETS if name == "README.md" and "def attend" in code), held)
    q, k, v = torch.randn(3, 1, 2, 11, 16).unbind()
    out = held["attend"](q, k, v, [[4, 7]])
    for document in (slice(0, 4), slice(4, 11)):
        alone = (x[:, :, document] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
        torch.testing.assert_close(out[:, :, document], expected)
