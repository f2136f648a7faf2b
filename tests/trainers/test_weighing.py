"""Weights of labels: the SFT trainer's loss is sum(w * nll) / sum(abs(w)) of a whole step, as in a plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.documents import documents
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, VOCAB, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.trainers import PackedSFTTrainer, weighing

pytestmark = TRAINER_WARNINGS

DOCUMENTS = documents([9, 4, 15, 2, 12, 7, 5, 11, 3, 8, 6, 13, 10])
BOUND = 5e-6
"""Largest relative error of a step's loss and gradient, float32; 1e-6 is measured."""


@dataclass
class TokenWeights(DataCollatorForPackedLanguageModeling):
    """Collator whose labels weigh what a table says of their token, float32 [VOCAB]."""

    table: Any = None

    def __call__(self, examples):
        batch = super().__call__(examples)
        weights = self.table[batch["input_ids"]] * batch["labels"].ne(-100)
        return batch | {"label_weights": weights}


def model_of(attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3), attn_implementation=attention)


def trainer_of(kind, path, data, collator=None, peft_config=None, **options):
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    settings |= {"max_grad_norm": 0.0, "max_length": 16, "completion_only_loss": False}
    return kind(
        model_of("eager" if kind is SFTTrainer else "flashmask"),
        SFTConfig(**trainer_settings(path) | settings | options),
        collator,
        train_dataset=Dataset.from_dict({"input_ids": data}),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


def step(trainer):
    """Return the log and the change of the trained weights of one step."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return log, {n: before[n] - p.detach() for n, p in trainer.model.named_parameters() if n in before}


def loop(model, documents, weights):
    """Return the loss sum(w * nll) / sum(abs(w)) of the documents, one at a time, and its gradient, in float64."""
    model = model.double()
    total = divisor = 0
    for tokens, own in zip(documents, weights, strict=True):
        ids, own = torch.tensor(tokens), own[1:].double()
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = total + (own * torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")).sum()
        divisor += own.abs().sum()
    loss = total / divisor
    loss.backward()
    gradient = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradient


def assert_same(gradient, expected):
    assert gradient.keys() == expected.keys()
    error = sum((gradient[name] - x).double().square().sum() for name, x in expected.items())
    assert (error / sum(x.double().square().sum() for x in expected.values())).sqrt() < BOUND


def drawn(seed=0):
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed))


TABLES = {
    "positive": drawn() + 0.1,
    "tiny": (drawn() + 0.1) * 1e-4,
    "negative, too": drawn() - 0.4,
    "zeros": (drawn() - 0.5).clamp(min=0),
}


@pytest.mark.parametrize("accumulation", [{}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 20}])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_step_is_that_of_a_loop_over_examples(table, accumulation, tmp_path):
    """Batches of uneven numbers of labels."""
    options = {"per_device_train_batch_size": 20} | accumulation
    log, gradient = step(trainer_of(PackedSFTTrainer, tmp_path, DOCUMENTS, TokenWeights(table=table), **options))
    loss, expected = loop(model_of("eager"), DOCUMENTS, [table[tokens] for tokens in DOCUMENTS])
    assert log["loss"] == pytest.approx(loss, rel=BOUND)
    assert_same(gradient, expected)


def test_a_weight_is_a_number_of_equal_examples(tmp_path):
    """Loss, gradient, accuracy and entropy are those of stock TRL on examples that are repeated."""
    counts = torch.arange(VOCAB) % 4
    data = [[first, last] for first in (5, 6, 7, 8, 9) for last in range(3, VOCAB)]
    repeated = [document for document in data for _ in range(counts[document[1]])]
    options = {"per_device_train_batch_size": 1000}
    weighed = trainer_of(PackedSFTTrainer, tmp_path, data, TokenWeights(table=counts.float()), **options)
    stock = trainer_of(SFTTrainer, tmp_path, repeated, **options)
    (log, gradient), (expected, expected_gradient) = step(weighed), step(stock)
    assert expected["mean_token_accuracy"] > 0
    for name in ("loss", "mean_token_accuracy", "entropy"):
        assert log[name] == pytest.approx(expected[name], rel=BOUND)
    assert_same(gradient, expected_gradient)


@pytest.mark.parametrize("table", [TABLES["tiny"], TABLES["negative, too"]], ids=["tiny", "negative, too"])
def test_an_evaluation_has_the_loss_of_all_its_rows(table, tmp_path):
    trainer = trainer_of(PackedSFTTrainer, tmp_path, DOCUMENTS, TokenWeights(table=table), per_device_eval_batch_size=2)
    found = trainer.evaluate(trainer.train_dataset)
    loss, _ = loop(model_of("eager"), DOCUMENTS, [table[tokens] for tokens in DOCUMENTS])
    assert found["eval_loss"] == pytest.approx(loss, rel=BOUND)


def test_an_adapter_learns_weighed_labels_under_checkpointing(tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    table = TABLES["negative, too"]
    options = {"peft_config": config, "per_device_train_batch_size": 20, CHECKPOINTING: True}
    trainer = trainer_of(PackedSFTTrainer, tmp_path, DOCUMENTS, TokenWeights(table=table), **options)
    loss, expected = loop(trainer.model, DOCUMENTS, [table[tokens] for tokens in DOCUMENTS])
    trainer.model.float().zero_grad()
    log, gradient = step(trainer)
    assert log["loss"] == pytest.approx(loss, rel=BOUND)
    assert_same(gradient, expected)


def test_batches_without_weights_count_each_label_once(tmp_path):
    """In a trainer with other batches that have weights; a step of weights of 0 changes nothing."""
    trainer = trainer_of(PackedSFTTrainer, tmp_path, DOCUMENTS)
    batch = DataCollatorForPackedLanguageModeling(completion_only_loss=False)([{"input_ids": x} for x in DOCUMENTS])
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(90.0))
    ones = batch | {"label_weights": batch["labels"].ne(-100).float()}
    assert trainer._get_num_items_in_batch([batch, ones], torch.device("cpu")) == sum(map(len, DOCUMENTS)) * 2 - 26
    for given in (batch, ones):
        weighed = trainer.compute_loss(trainer.model, dict(given), num_items_in_batch=torch.tensor(90.0))
        assert torch.equal(weighed, loss)
    zeros = weighing.without_labels(ones)
    assert trainer._get_num_items_in_batch([zeros], torch.device("cpu")) == 0
    assert trainer.compute_loss(trainer.model, zeros, num_items_in_batch=torch.tensor(0.0)) == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"compute_loss_func": lambda *args, **kwargs: None}, "compute_loss_func"),
    ],
)
def test_losses_that_do_not_read_weights_are_refused(options, problem):
    args = SimpleNamespace(**{"loss_type": "nll", "label_smoothing_factor": 0.0} | options)
    with pytest.raises(ValueError, match=f"^{problem} does not read the weights of labels; leave it out, or"):
        weighing.check_weighing(args, options.get("compute_loss_func"))


def test_older_versions_of_trl_are_refused(monkeypatch):
    """TRL 1.14 has no values per token."""
    monkeypatch.setattr(weighing, "compare_versions", lambda *_: True)
    with pytest.raises(ValueError, match=r"need the fused head of trl>=1\.15; install it, or remove the weights"):
        weighing.check_weighing(SimpleNamespace(loss_type="nll", label_smoothing_factor=0.0), None)


def test_other_trainers_raise_for_weights(tmp_path):
    """They would train without them."""
    table = TABLES["positive"]
    batch = TokenWeights(table=table, completion_only_loss=False)([{"input_ids": x} for x in DOCUMENTS])
    with pytest.raises(NotImplementedError, match=r"label_weights of the batch .*; train with PackedSFTTrainer, or"):
        model_of("flashmask")(**batch, use_cache=False)
