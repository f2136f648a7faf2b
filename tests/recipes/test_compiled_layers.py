"""--torch_compile in the recipes: layers compiled one by one, once for all layers and rows, with eager's results."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tools.recipes import QUICK, assert_trained_alike, logged
from tools.support import record_passes
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

import flashmask_hf
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.long_rows.checkpointing import enable_checkpointing

import common  # isort: skip
import data  # isort: skip
import dpo  # isort: skip
import sft  # isort: skip

pytestmark = [
    *TRAINER_WARNINGS,
    # TorchDynamo reads .grad of the inputs of compiled layers
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # torch and transformers, of the old names of transformers 5.23
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]

LAYERS = 10
"""More than the 8 compilations after which torch runs a function uncompiled."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "pad_token_id")
ROWS = [[11, 30], [9, 16, 5], [40, 8, 12], [60], [11, 30, 5], [3, 3, 3, 3], [41]]
FLAGS = ["--torch_compile", "--torch_compile_backend", "eager"]


@pytest.fixture(autouse=True)
def no_compiled_code():
    """Drop what was compiled, before and after the test, and the recipes' setting of the compiler."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(specialize_float=False):
        yield
    torch.compiler.reset()


def build(family):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "head_dim": 8}
    config: Any = llama_config(**sizes)
    if family == "qwen3":
        windows = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": LAYERS // 2}
        config = Qwen3Config(**{name: getattr(config, name) for name in SIZES}, **sizes, **windows)
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").train()


def gradients(model, lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(3, 48, (n,), generator=generator).tolist() for n in lengths]
    batch = DataCollatorForPackedLanguageModeling()([{"input_ids": ids} for ids in tokens])
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("family", "kept", "compilations"),
    [
        pytest.param("llama", None, 1, id="plain"),
        pytest.param("llama", True, 1, marks=pytest.mark.full, id="adapters, checkpointed and kept"),
        pytest.param("qwen3", None, 2, marks=pytest.mark.full, id="layers with and without a window"),
    ],
)
def test_one_compilation_serves_all_equal_layers_and_rows(monkeypatch, family, kept, compilations):
    model = build(family)
    if kept:
        model.enable_input_require_grads()  # as TRL does with an adapter
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        options = {"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}
        enable_checkpointing(model, options)
    want = [gradients(model, lengths) for lengths in ROWS]
    names = list(model.state_dict())
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    common.compile_layers(model, backend=counter)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert counter.frame_count == 0
    passes = record_passes(monkeypatch)
    for lengths, expected in zip(ROWS, want, strict=True):
        passes.clear()
        for x, y in zip(gradients(model, lengths), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert counter.frame_count == compilations, lengths
        assert not counters["graph_break"]
        assert passes.count("forward") == LAYERS  # with checkpointing, too
    assert list(model.state_dict()) == names


def names_of_metrics(printed):
    lines = [json.loads(line.replace("'", '"')) for line in printed.splitlines() if line.startswith("{'loss'")]
    return [set(line) for line in lines]


@pytest.mark.full
def test_the_recipe_trains_evaluates_saves_and_resumes_compiled(tmp_path, model, capsys):
    """With gradient checkpointing and evaluation: the losses and the weights of a run that is not compiled."""
    flags = ["--model_name_or_path", str(model), "--max_length", "512", "--split", "--max_steps", "4", *QUICK]
    flags += ["--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2"]
    flags += ["--learning_rate", "1e-3", f"--{CHECKPOINTING}", "True"]
    printed = {}
    for name, more in (("eager", []), ("compiled", FLAGS)):
        sft.main([*flags, "--output_dir", str(tmp_path / name), *more])
        printed[name] = capsys.readouterr().out
    losses = logged(printed["eager"], "loss")
    assert len(losses) == 4
    assert logged(printed["compiled"], "loss") == pytest.approx(losses, rel=1e-4)  # three digits are printed
    assert names_of_metrics(printed["compiled"]) == names_of_metrics(printed["eager"])
    assert_trained_alike(tmp_path / "eager", tmp_path / "compiled", model)
    AutoModelForCausalLM.from_pretrained(tmp_path / "compiled", attn_implementation="flashmask")
    (tmp_path / "compiled" / "checkpoint-4").rename(tmp_path / "finished")
    sft.main([*flags, "--output_dir", str(tmp_path / "compiled"), *FLAGS, "--resume_from_checkpoint", "true"])
    assert logged(capsys.readouterr().out, "loss") == pytest.approx(losses[2:], rel=1e-4)


def test_a_reference_model_is_compiled_layer_by_layer_too(tmp_path, model, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(common, "compile_layers", lambda model, **options: compiled.append((model, options)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in data.preferences()["train"].select(range(8))))
    flags = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--max_steps", "1", *QUICK]
    dpo.main([*flags, "--output_dir", str(tmp_path / "out"), *FLAGS])
    assert [type(model).__name__ for model, _ in compiled] == ["LlamaForCausalLM"] * 2
    assert all(options == {"backend": "eager", "mode": None} for _, options in compiled)
    assert len(logged(capsys.readouterr().out, "loss")) == 1
