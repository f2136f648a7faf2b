"""Checkpointed layers that keep attention's results compute attention once, with the same results to the bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tools.support import record_passes, requires
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoModelForCausalLM
from trl import SFTConfig

import flashmask_hf
from flashmask_hf import torch_internals
from flashmask_hf.long_rows.checkpointing import KeptAttention, enable_checkpointing
from flashmask_hf.trainers import PackedSFTTrainer

pytestmark = [
    *TRAINER_WARNINGS,
    # torch and transformers, of the old names of transformers 5.23
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]

LAYERS = 3
KEEPING = {"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}


def keep_nothing():
    """A `context_fn` of a user."""
    return noop_context_fn()


@pytest.fixture
def passes(monkeypatch):
    """A list that grows with each pass of attention; `count` of it gives the passes."""
    return record_passes(monkeypatch)


def model_of(attention="flashmask", device="cpu", **changes):
    torch.manual_seed(0)
    config = llama_config(**{"num_hidden_layers": LAYERS} | changes)
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
def test_attention_runs_once_and_gradients_are_the_same(device, attention, adapter, passes):
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
        passes.clear()
        results.append(gradients(model, device=device))
        counts.append(passes.count("forward"))
    assert counts == [LAYERS, 2 * LAYERS, LAYERS]
    for got in results[1:]:
        assert len(got) == len(results[0])
        for x, want in zip(got, results[0], strict=True):
            assert torch.equal(x, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model(passes):
    model = model_of(num_hidden_layers=1)
    want = gradients(model)
    compiled = torch.compile(enable_checkpointing(model, KEEPING), backend="aot_eager")
    gradients(model, compiled)
    passes.clear()
    got = gradients(model, compiled)
    assert passes.count("forward") == 1
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


@pytest.mark.parametrize("way", ["plain", "retained", "profiled", "nested"])
def test_every_recomputation_finds_the_results_of_its_forward(way, passes):
    model = enable_checkpointing(model_of(), KEEPING)
    want = gradients(model)
    passes.clear()
    if way == "retained":  # the backward runs twice over one graph
        ids = torch.arange(3, 43)[None]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
    elif way == "profiled":  # calls go through the operator
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            got = gradients(model)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    elif way == "nested":  # a checkpoint around the model
        got = gradients(model, lambda **kwargs: checkpoint(model, use_reentrant=False, **kwargs))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        assert passes.count("forward") == 2 * LAYERS  # the outer one keeps nothing
        return
    else:
        gradients(model)
    assert passes.count("forward") == LAYERS


def test_nothing_is_kept_while_a_graph_is_captured(passes, monkeypatch):
    model = enable_checkpointing(model_of(), KEEPING)
    monkeypatch.setattr(torch_internals, "is_capturing", lambda x: True)
    gradients(model)
    assert passes.count("forward") == 2 * LAYERS


def test_reentrant_checkpointing_is_refused():
    model = enable_checkpointing(model_of(), KEEPING | {"use_reentrant": True})
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        gradients(model)


def test_results_are_kept_within_a_budget(passes):
    """Each layer keeps 40 tokens of 4 heads of 8 numbers and a log-sum-exp, in float32."""
    size = 40 * 4 * (8 + 1) * 4
    model = enable_checkpointing(model_of(), {"use_reentrant": False})
    want = gradients(model)
    kept = KeptAttention(model, None)
    for limit, count in ((None, LAYERS), (0, 2 * LAYERS), (2 * size, 2 * LAYERS - 2), (3 * size - 1, 2 * LAYERS - 2)):
        kept.set_limit(limit)
        passes.clear()
        got = gradients(model)
        assert passes.count("forward") == count
        assert (kept.held, kept.largest) == (0, size)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    kept.close()
    assert all(
        layer._gradient_checkpointing_func is not f for layer, f in zip(model.model.layers, functions, strict=True)
    )
    passes.clear()
    gradients(model)
    assert passes.count("forward") == 2 * LAYERS


def test_larger_results_than_the_measured_ones_are_not_kept(passes):
    model = enable_checkpointing(model_of(), {"use_reentrant": False})
    kept = KeptAttention(model, 0)
    for _ in range(2):
        passes.clear()
        gradients(model)
        assert passes.count("forward") == 2 * LAYERS
        kept._limit = 10**9  # without `set_limit`, which says that the results so far were measured
    kept.set_limit(10**9)
    passes.clear()
    gradients(model)
    assert passes.count("forward") == LAYERS


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"use_reentrant": False, "context_fn": keep_nothing}], ids=["reentrant", "own"]
)
def test_a_budget_leaves_other_ways_of_checkpointing_alone(options):
    model = enable_checkpointing(model_of(), options)
    before = [layer._gradient_checkpointing_func for layer in model.model.layers]
    kept = KeptAttention(model, None)
    gradients(model)
    assert before == [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert kept.largest == 0


def test_options_of_transformers_are_no_options_of_checkpoint():
    model = enable_checkpointing(model_of(), {"use_reentrant": False, "every_n_layers": 2})
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True]


class PassThrough(TorchDispatchMode):
    """Runs every operator as it is; attention then runs below autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_results_that_change_after_they_are_kept_raise_below_autograd_too():
    def attend(x):
        out = flashmask_hf.flashmask_attention(x, x, x, flashmask_hf.masks.causal(x.shape[2]))
        with torch.no_grad():
            out.mul_(2)
        return out.sin()

    x = torch.randn(1, 2, 64, 16, requires_grad=True) * 1
    with PassThrough(), pytest.raises(RuntimeError, match="modified by an inplace operation after it was saved"):
        checkpoint(attend, x, **KEEPING).sum().backward()
