"""Weights of labels: the SFT trainer's loss is sum(w * nll) / sum(abs(w)) of a whole step, as in a plain loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.documents import documents
from tools.tiny import (
    CHECKPOINTING,
    FLOAT32,
    TRAINER_WARNINGS,
    VOCAB,
    assert_same_gradients,
    llama_config,
    step,
    trainer_settings,
    word_tokenizer,
)
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.trainers import PackedSFTTrainer, weighing

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

DOCUMENTS = documents([9, 4, 15, 2, 12, 7, 5, 11, 3, 8, 6, 13, 10])
LOSS: dict[str, Any] = {"rel": FLOAT32, "abs": 5 * FLOAT32}
"""Errors of the loss, whose weights, their sum and their quotients are float32.

Labels have a loss of 5, which weights of both signs cancel.
"""


def model_of(attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        llama_config(initializer_range=0.3), attn_implementation=attention, dtype=torch.float64
    )


def trainer_of(kind, path, columns, peft_config=None, extra=None, **options):
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    settings |= {"max_grad_norm": 0.0, "max_length": 16, "per_device_train_batch_size": 1000}
    settings["completion_only_loss"] = "completion_mask" in columns
    return kind(
        model_of("eager" if kind is SFTTrainer else "flashmask"),
        SFTConfig(**trainer_settings(path) | settings | options),
        train_dataset=Dataset.from_dict(columns),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
        **extra or {},
    )


def loop(model, documents, weights):
    """Return the loss sum(w * nll) / sum(abs(w)) of the documents, one at a time, and its gradient, in float64."""
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


MASKS = [[0] * (i % 3) + [1] * (len(tokens) - i % 3) for i, tokens in enumerate(DOCUMENTS)]
GENERATOR = np.random.default_rng(0)
PER_TOKEN = [GENERATOR.random(len(tokens)) for tokens in DOCUMENTS]
PER_EXAMPLE = GENERATOR.random(len(DOCUMENTS)) + 0.1
LEARNED = [sum(mask[1:]) for mask in MASKS]

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "per token": (PER_TOKEN, PER_TOKEN, {}),
    "per token, tiny": ([own * 1e-4 for own in PER_TOKEN], PER_TOKEN, {}),
    "per token, negative ones": ([own - 0.4 for own in PER_TOKEN], [own - 0.4 for own in PER_TOKEN], {}),
    "per token, zeros": ([own * (own > 0.5) for own in PER_TOKEN], [own * (own > 0.5) for own in PER_TOKEN], {}),
    "per example": (PER_EXAMPLE, PER_EXAMPLE, {}),
    "per example, negative ones": (0.4 - PER_EXAMPLE, 0.4 - PER_EXAMPLE, {}),
    "examples count the same": (None, 1 / np.array(LEARNED), {"loss_mean": "example"}),
    "examples count their weight": (PER_EXAMPLE, PER_EXAMPLE / LEARNED, {"loss_mean": "example"}),
}
"""The column `weight`, what labels count in the loop, and options of the trainer."""

BATCHES = {"one batch": {}, "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 20}}


def columns_of(weights: Any) -> dict[str, Any]:
    columns = {"input_ids": DOCUMENTS, "completion_mask": MASKS}
    return columns if weights is None else columns | {"weight": weights}


def expected_of(counted: Any, model: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    weights = [torch.tensor(np.multiply(mask, own)) for mask, own in zip(MASKS, counted, strict=True)]
    return loop(model or model_of("eager"), DOCUMENTS, weights)


QUICK = {("per token, tiny", "accumulation"), ("examples count their weight", "accumulation")}
QUICK |= {("per token, negative ones", "one batch")}
STEPS = [
    pytest.param(*kind, options, id=f"{name}-{batches}", marks=[pytest.mark.full] * ((name, batches) not in QUICK))
    for name, kind in KINDS.items()
    for batches, options in BATCHES.items()
]


@pytest.mark.parametrize(("weights", "counted", "extra", "batches"), STEPS)
def test_a_step_is_that_of_a_loop_over_examples(weights, counted, extra, batches, tmp_path):
    """Rows of uneven numbers of labels."""
    log, gradient = step(trainer_of(PackedSFTTrainer, tmp_path, columns_of(weights), extra=extra, **batches))
    loss, expected = expected_of(counted)
    assert log["loss"] == pytest.approx(loss, **LOSS)
    assert_same_gradients(gradient, expected, FLOAT32)


@pytest.mark.parametrize("loss_mean", ["token", pytest.param("example", marks=pytest.mark.full)])
def test_examples_of_unlike_signs_share_prefixes(loss_mean, tmp_path):
    """Twice the same example, too, with weights that cancel out."""
    data = [DOCUMENTS[0][:5] + DOCUMENTS[i][: i % 4 + 1] for i in range(len(DOCUMENTS))]
    data += data[:2]
    weights = np.append(0.4 - PER_EXAMPLE, PER_EXAMPLE[:2] - 0.4)
    extra = {"share_prefixes": True, "loss_mean": loss_mean}
    log, gradient = step(trainer_of(PackedSFTTrainer, tmp_path, {"input_ids": data, "weight": weights}, extra=extra))
    counted = weights / [len(tokens) - 1 for tokens in data] if loss_mean == "example" else weights
    rows = [torch.full((len(tokens),), own) for tokens, own in zip(data, counted, strict=True)]
    loss, expected = loop(model_of("eager"), data, rows)
    assert log["loss"] == pytest.approx(loss, **LOSS)
    assert log["shared_tokens_saved"] > 0.2
    assert_same_gradients(gradient, expected, FLOAT32)


def test_a_weight_is_a_number_of_equal_examples(tmp_path):
    """Loss, gradient, accuracy and entropy are those of stock TRL on examples that are repeated."""
    data = [[first, last] for first in (5, 6, 7, 8, 9) for last in range(3, VOCAB)]
    repeated = [document for document in data for _ in range(document[1] % 4)]
    columns = {"input_ids": data, "weight": [document[1] % 4 for document in data]}
    weighed = trainer_of(PackedSFTTrainer, tmp_path, columns)
    stock = trainer_of(SFTTrainer, tmp_path, {"input_ids": repeated})
    (log, gradient), (expected, expected_gradient) = step(weighed), step(stock)
    assert expected["mean_token_accuracy"] > 0
    for name in ("loss", "mean_token_accuracy", "entropy"):
        assert log[name] == pytest.approx(expected[name], rel=FLOAT32)
    assert_same_gradients(gradient, expected_gradient)


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")  # TRL computes the logits apart
@pytest.mark.parametrize(
    ("name", "streamed"), [("per token, tiny", True), ("per example, negative ones", False)], ids=["stream", "map"]
)
def test_an_evaluation_has_the_loss_of_all_its_rows(name, streamed, tmp_path):
    weights, counted, _ = KINDS[name]
    trainer = trainer_of(PackedSFTTrainer, tmp_path, columns_of(weights), per_device_eval_batch_size=2)
    data = Dataset.from_dict(columns_of(weights))
    found = trainer.evaluate(data.to_iterable_dataset() if streamed else data)
    assert found["eval_loss"] == pytest.approx(expected_of(counted)[0], **LOSS)
    trainer.compute_metrics = lambda given: {"logits": given.predictions.shape[-1]}
    metrics = trainer.evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(found["eval_loss"], **LOSS)
    assert metrics["eval_logits"] == VOCAB


@pytest.mark.full
def test_an_adapter_learns_weighed_labels_under_checkpointing(tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    weights, counted, _ = KINDS["per token, negative ones"]
    trainer = trainer_of(PackedSFTTrainer, tmp_path, columns_of(weights), config, **{CHECKPOINTING: True})
    loss, expected = expected_of(counted, trainer.model)
    trainer.model.zero_grad()
    log, gradient = step(trainer)
    assert log["loss"] == pytest.approx(loss, **LOSS)
    assert_same_gradients(gradient, expected, FLOAT32)


def batch_of(**columns):
    examples = [
        {"input_ids": x} | {name: values[i] for name, values in columns.items()} for i, x in enumerate(DOCUMENTS)
    ]
    return DataCollatorForPackedLanguageModeling(completion_only_loss=False)(examples)


def test_batches_without_weights_count_each_label_once(tmp_path):
    """In a trainer with other batches that have weights; a step of weights of 0 changes nothing."""
    trainer = trainer_of(PackedSFTTrainer, tmp_path, {"input_ids": DOCUMENTS})
    batch, ones = batch_of(), batch_of(weight=[1] * len(DOCUMENTS))
    assert torch.equal(ones["label_weights"], batch["labels"].ne(-100).float())
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(90.0))
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
    with pytest.raises(ValueError, match=r"needs the fused head of trl>=1\.15; install it, or remove the weights"):
        weighing.check_weighing(SimpleNamespace(loss_type="nll", label_smoothing_factor=0.0), None)


def test_other_trainers_raise_for_weights():
    """They would train without them, in shards (`RowSplit.shard`) too."""
    batch = batch_of(weight=PER_EXAMPLE)
    weights = batch.pop("label_weights")
    for name in ("label_weights", "shift_label_weights"):
        with pytest.raises(NotImplementedError, match=rf"^{name} of the batch .*; train with PackedSFTTrainer or"):
            model_of("flashmask")(**batch, **{name: weights}, use_cache=False)


def test_a_mean_over_examples_needs_rows_that_the_trainer_packs(tmp_path):
    extra = {"loss_mean": "example"}
    for options in ({"packing": True}, {"dataset_kwargs": {"skip_prepare_dataset": True}}):
        with pytest.raises(
            ValueError, match=r"^loss_mean needs rows of text that this trainer packs; leave it, images,"
        ):
            trainer_of(PackedSFTTrainer, tmp_path, {"input_ids": DOCUMENTS}, extra=extra, **options)
    rows = pack_dataset(Dataset.from_dict({"input_ids": DOCUMENTS}), 16)
    with pytest.raises(ValueError, match=r"^loss_mean='example' is too late for packed train rows; pass"):
        trainer_of(PackedSFTTrainer, tmp_path, rows[:], extra=extra)


def test_a_trainer_refuses_weights_that_its_loss_does_not_read(tmp_path):
    with pytest.raises(ValueError, match=r"^loss_type='dft' does not read"):
        trainer_of(PackedSFTTrainer, tmp_path, columns_of(PER_EXAMPLE), loss_type="dft")
