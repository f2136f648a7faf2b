"""Checkpointed layers that keep attention's results compute attention once, with the same results to the bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tools.support import requires
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig

import flashmask_hf
from flashmask_hf.call import Call
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.trainers import PackedSFTTrainer

pytestmark = [
    *TRAINER_WARNINGS,
    # torch and transformers, of the old names of transformers 5.23
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]

LAYERS = 3
KEEPING = {"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}


@pytest.fixture
def forwards(monkeypatch):
    """A list that grows with each forward of attention."""
    calls, forward = [], Call.forward
    monkeypatch.setattr(Call, "forward", lambda *args: calls.append(1) or forward(*args))
    return calls


def model_of(attention="flashmask", device="cpu", **changes):
    torch.manual_seed(0)
    config = llama_config(num_hidden_layers=LAYERS, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train().to(device)


def gradients(model, call=None, device="cpu"):
    """Return loss and gradients of a packed row of two documents."""
    ids = torch.randint(3, 48, (1, 40), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None].to(device)
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("device", "attention", "adapter"),
    [
        ("cpu", "flashmask", False),
        ("cpu", "flashmask", True),
        ("cpu", "flashmask_hash", False),
        pytest.param("cuda", "flashmask", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "flashmask", True, marks=pytest.mark.gpu),
    ],
)
def test_attention_runs_once_and_gradients_are_the_same(device, attention, adapter, forwards):
    if device == "cuda":
        requires("gpu")
    model = model_of(
        attention, device, **({"flashmask_hash": {"n_buckets": 4}} if attention == "flashmask_hash" else {})
    )
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).to(device)
    results, counts = [], []
    for options in (None, {"use_reentrant": False}, KEEPING):
        if options:
            enable_checkpointing(model, options)
        forwards.clear()
        results.append(gradients(model, device=device))
        counts.append(len(forwards))
    assert counts == [LAYERS, 2 * LAYERS, LAYERS]
    for got in results[1:]:
        assert len(got) == len(results[0])
        for x, want in zip(got, results[0], strict=True):
            assert torch.equal(x, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model(forwards):
    model = model_of()
    want = gradients(model)
    compiled = torch.compile(enable_checkpointing(model, KEEPING), backend="aot_eager")
    gradients(model, compiled)
    forwards.clear()
    got = gradients(model, compiled)
    assert len(forwards) == LAYERS
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_trainer_saves_its_arguments(tmp_path):
    """PackedSFTTrainer takes it; its arguments can be pickled and copied."""
    settings = trainer_settings(tmp_path) | {
        CHECKPOINTING: True,
        f"{CHECKPOINTING}_kwargs": KEEPING,
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_length": 16,
        "optim": "sgd",
    }
    rows = Dataset.from_dict({"text": ["w9 w10 w11 w12 w13"] * 40})
    losses = []
    for kept in (True, False):
        args = SFTConfig(**settings | ({} if kept else {CHECKPOINTING: False}))
        trainer = PackedSFTTrainer(model_of(), args, train_dataset=rows, processing_class=word_tokenizer())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        for clone in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
            assert callable(getattr(clone, f"{CHECKPOINTING}_kwargs")["context_fn"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
