"""Helpers of training tests: a tiny Llama, a word-level tokenizer, preferences in its words, trainer arguments."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import compare_versions
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainingArguments

VOCAB = 64
EXACT = 1e-12
"""Largest error in float64 of results whose sums have other orders, relative to the largest entry."""
FLOAT32 = 16 * torch.finfo(torch.float32).eps
"""Largest error of a log, for terms of size 1: trainers add losses, weights and means of 16 batches in float32."""

# The name of the argument; transformers 5.21 renamed it, and warns of the old name.
CHECKPOINTING = next(f for f in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, f))

TRAINER_WARNINGS = [
    # TRL, PEFT and programs for transformers 5.17 use the old name in transformers 5.23.
    pytest.mark.filterwarnings(
        "ignore:`(is_)?gradient_checkpointing(_enable|_disable|_kwargs)?` is deprecated:FutureWarning"
    ),
    # torch warns on a machine without a GPU.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
"""Marks of tests that train: they ignore the warnings of TRL, PEFT and torch themselves."""

FUSED_HEAD = pytest.mark.skipif(compare_versions("trl", "<", "1.15"), reason="needs the fused head of trl>=1.15")
"""Mark of tests of trainers that TRL 1.14 cannot run."""


def llama_config(**changes: Any) -> LlamaConfig:
    """Return a Llama config of two layers, 64 token ids (0 is padding, 1 is end-of-sequence) and 64 positions."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


def word_tokenizer(*roles: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at spaces.

    It knows <pad>, <eos>, <unk>, the roles, and the words w3, w4 and so on, whose ids are their numbers.
    """
    names = ["<pad>", "<eos>", "<unk>", *roles]
    vocab = {name: i for i, name in enumerate(names)} | {f"w{i}": i for i in range(len(names), VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(names[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
    )


def preference_rows(count: int = 8, seed: int = 0) -> list[dict[str, str]]:
    """Draw preference rows in TRL's standard format, with questions and answers of one to eight words."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(8, VOCAB, (count,), generator=generator).tolist())

    lengths = torch.randint(1, 9, (count, 3), generator=generator).tolist()
    return [{"prompt": words(q) + " ", "chosen": words(c), "rejected": words(r)} for q, c, r in lengths]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Return a preference row in TRL's conversational format."""
    return row | {
        "prompt": [{"role": "user", "content": row["prompt"].strip()}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }


def trainer_settings(output_dir: Any) -> dict[str, Any]:
    """Return the arguments of a short run on the CPU that saves and reports nothing."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        CHECKPOINTING: False,
    }


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make models and losses cast to float64 what they cast to float32: norms, rotations, softmax, logits."""
    from torch._dynamo.trace_rules import get_tensor_method

    to, softmax = torch.Tensor.to, torch.nn.functional.softmax
    get_tensor_method()  # Dynamo keeps the methods that it finds first, and could not trace `to` in later tests

    def cast(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.is_floating_point():
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", cast)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None, **_: softmax(x, dim))
    if head := sys.modules.get("trl.kernels.chunked_logprob"):  # it makes its sums by torch.zeros(..., torch.float32)
        monkeypatch.setattr(head, "torch", SimpleNamespace(**vars(torch) | {"float32": torch.float64}))


def assert_exact(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Assert that float64 tensors are equal up to rounding, relative to the largest entry of them all."""
    largest = max(x.abs().max().item() for x in expected)
    assert math.isfinite(largest)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT * largest)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the gradients of a model by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(trainer: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float]]:
    """Return loss, gradients and metrics of the trainer's first batch."""
    trainer._metrics["train"].clear()
    trainer._total_train_tokens = 0
    trainer.model.train()
    trainer.model.zero_grad()
    torch.manual_seed(2)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    return loss.detach(), gradients_of(trainer.model), metrics


def step(trainer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the log of a step, and how it changed the weights."""
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return log, {name: before[name] - x.detach() for name, x in trainer.model.named_parameters() if name in before}


def assert_same_gradients(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = EXACT
) -> None:
    """Assert that all gradients are equal up to a bound, relative to the largest entry of all of them."""
    assert gradients.keys() == expected.keys()
    scale = max(wanted.abs().max().item() for wanted in expected.values())
    assert math.isfinite(scale)
    for name, wanted in expected.items():
        assert (gradients[name].to(wanted) - wanted).abs().max() < bound * scale, name


def assert_same_step(ours: Any, stock: Any, *added: str, bound: float = EXACT) -> dict[str, float]:
    """Assert that loss, gradients and metrics of first steps are equal; return our metrics, `added` ones included."""
    loss, gradients, metrics = one_step(ours)
    expected_loss, expected_gradients, expected = one_step(stock)
    torch.testing.assert_close(loss, expected_loss, rtol=bound, atol=bound)
    assert_same_gradients(gradients, expected_gradients, bound)
    assert metrics.keys() == expected.keys() | {*added}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=bound, abs=bound), name
    return metrics | {"loss": loss.item()}
