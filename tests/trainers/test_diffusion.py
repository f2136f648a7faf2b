"""The trainer of diffusion language models: its divisor over batches and ranks, its noise, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from tools.aligned_images import Gradients
from tools.support import rounding
from tools.tiny import (
    EXACT,
    FLOAT32,
    FUSED_HEAD,
    TRAINER_WARNINGS,
    assert_same_gradients,
    gradients_of,
    llama_config,
    trainer_settings,
    word_tokenizer,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, TrainingArguments
from trl import SFTConfig

from flashmask_hf.collators import DataCollatorForBlockDiffusion, DataCollatorForMaskedDiffusion
from flashmask_hf.names import VECTORS
from flashmask_hf.trainers import PackedDiffusionTrainer

pytestmark = [*TRAINER_WARNINGS, FUSED_HEAD, pytest.mark.usefixtures("float64")]

MASK = 63


def make_examples(count: int = 12) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    ids = [torch.randint(8, MASK, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": [[0] + [1] * (n - 1) for n in lengths]})


def block_collator(**options: Any) -> DataCollatorForBlockDiffusion:
    return DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4, **options)


def tiny_model(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = llama_config(initializer_range=0.2, **changes)
    return model_of(config, dtype)


def model_of(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=dtype)


def build(out: Any, collator: Any, model: Any = None, dataset: Any = None, **options: Any) -> PackedDiffusionTrainer:
    evaluated = options.pop("eval_dataset", None)
    args = SFTConfig(**trainer_settings(out) | {"max_length": 16, "max_steps": 1} | options)
    given = make_examples() if dataset is None else dataset
    return PackedDiffusionTrainer(
        tiny_model() if model is None else model,
        args,
        collator,
        given,
        evaluated,
        processing_class=word_tokenizer(),
    )


def reference_loss(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Tensor, int]:
    """Return the sum of weighted losses and the number of labels, from full logits."""
    total, labels = torch.zeros(()), 0
    for batch in batches:
        names = ("input_ids", "position_ids", VECTORS)
        logits = model(**{name: batch[name] for name in names}, use_cache=False).logits
        targets = batch["diffusion_labels"]
        nll = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        total = total + (nll * batch["diffusion_weights"]).sum()
        labels += int((batch["labels"] != -100).sum())
    return total, labels


@pytest.mark.parametrize(
    ("collator", "dtype"),
    [(block_collator(seed=1), torch.float64), (block_collator(seed=1, copies=2, complementary=True), torch.float64),
     (DataCollatorForMaskedDiffusion(mask_token_id=MASK, seed=1), torch.float64),
     pytest.param(block_collator(seed=1), torch.float32, marks=pytest.mark.full)],
    ids=["block", "complementary", "masked", "float32"],
)  # fmt: skip
def test_accumulated_batches_divide_by_all_labels(tmp_path: Any, collator: Any, dtype: Any, monkeypatch: Any) -> None:
    """One step of four batches has the gradient of their sum of losses over their number of labels."""
    if dtype == torch.float32:
        monkeypatch.undo()
    bound = EXACT if dtype == torch.float64 else rounding(1000)  # sums of two layers, forward and backward
    options = dict(gradient_accumulation_steps=4, per_device_train_batch_size=1, learning_rate=0.0, max_grad_norm=1e9)
    trainer = build(tmp_path, collator, tiny_model(dtype), **options)
    seen: list[dict[str, Tensor]] = []
    compute = trainer.compute_loss

    def record(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen.append({name: x.clone() for name, x in inputs.items()})
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = record  # type: ignore[method-assign]
    kept = Gradients()
    trainer.add_callback(kept)
    trainer.train()
    assert len(seen) == 4
    model = trainer.model
    model.zero_grad()
    total, labels = reference_loss(model, seen)
    (total / labels).backward()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["loss"] == pytest.approx(total.item() / labels, rel=max(bound, FLOAT32))
    assert_same_gradients(kept.steps[0], gradients_of(model), bound)


def test_evaluation_is_exact_and_has_the_same_noise_each_time(tmp_path: Any) -> None:
    trainer = build(tmp_path, block_collator(), eval_dataset=make_examples(9), per_device_eval_batch_size=2)
    torch.manual_seed(1)
    first = trainer.evaluate()
    torch.manual_seed(2)
    again = trainer.evaluate()
    names = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    assert [first[name] for name in names] == [again[name] for name in names]
    batches = list(trainer.get_eval_dataloader())
    with torch.no_grad():
        total, labels = reference_loss(trainer.model.eval(), batches)
    assert first["eval_loss"] == pytest.approx(total.item() / labels, rel=FLOAT32)
    assert trainer.data_collator.seed is None
    right = noised = 0
    for batch in batches:
        names = ("input_ids", "position_ids", VECTORS)
        likeliest = trainer.model(**{name: batch[name] for name in names}, use_cache=False).logits.argmax(-1)
        right += int((likeliest == batch["diffusion_labels"]).sum())
        noised += int((batch["diffusion_labels"] != -100).sum())
    assert first["eval_mean_token_accuracy"] == pytest.approx(right / noised, rel=FLOAT32)
    idle = trainer._idle_batch(batches[0])
    assert all((idle[name] == -100).all() for name in ("labels", "diffusion_labels"))
    assert first["eval_mask_sparsity"] == 0  # rows of one tile


def test_training_learns_and_counts_each_token_once(tmp_path: Any) -> None:
    dataset = Dataset.from_dict({"input_ids": [[8, 9, 10, 11, 12, 13, 14, 15]] * 16})
    options = dict(max_steps=30, learning_rate=2e-2, logging_steps=30)
    trainer = build(tmp_path, block_collator(per="block"), dataset=dataset, **options)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < 0.5 * before
    assert logged["num_tokens"] == 30 * 4 * 16  # of 4 rows with two documents of 8
    assert logged["keys_per_token"] == 6  # noisy and clean: the rows of the first block see 4, of the second 8


def test_adapters_are_trained(tmp_path: Any) -> None:
    args = SFTConfig(**trainer_settings(tmp_path), max_length=16, max_steps=1)
    given = dict(train_dataset=make_examples(), processing_class=word_tokenizer(), peft_config=LoraConfig())
    trainer = PackedDiffusionTrainer(tiny_model(), args, block_collator(), **given)
    trainer.train()
    assert all(x.grad is None or "lora" in name for name, x in trainer.model.named_parameters())


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_predictions_are_of_packed_rows(tmp_path: Any) -> None:
    trainer = build(tmp_path, block_collator(), eval_dataset=make_examples(3))
    predicted = trainer.predict(make_examples(3))
    rows, length = predicted.label_ids.shape
    assert predicted.predictions.shape == (rows, length, MASK + 1)
    assert predicted.metrics["test_loss"] == trainer.evaluate()["eval_loss"]


def test_rows_are_padded_and_counted_by_options_of_the_arguments(tmp_path: Any) -> None:
    options = {"pad_to_multiple_of": 24, "include_num_input_tokens_seen": "all"}
    trainer = build(tmp_path, block_collator(copies=3), **options)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["num_input_tokens_seen"] == 24 * math.ceil(logged["num_tokens"] / 24) > logged["num_tokens"]


class OwnAttention(PreTrainedModel):
    """A model that calls SDPA itself, as the remote code of LLaDA does."""

    config_class = LlamaConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.q = nn.Linear(4, 4)


def test_windows_of_whole_documents_have_two_sides(tmp_path: Any) -> None:
    whole = DataCollatorForMaskedDiffusion(mask_token_id=MASK)
    model = model_of(MistralConfig(**llama_config().to_diff_dict() | {"model_type": "mistral", "sliding_window": 2}))
    with pytest.raises(ValueError, match=r"sliding_window=2 of MistralForCausalLM is causal .*set is_causal=False"):
        build(tmp_path, whole, model)
    build(tmp_path, block_collator(), model)
    model.config.is_causal = False
    build(tmp_path, whole, model)
    batch = whole([{"input_ids": [*range(8, 24)]}])
    inputs = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    hidden = model.model(inputs_embeds=inputs, position_ids=batch["position_ids"], **{VECTORS: batch[VECTORS]})
    hidden.last_hidden_state[0, 8].sum().backward()
    assert inputs.grad is not None
    assert inputs.grad[0].any(-1).nonzero()[:, 0].tolist() == [*range(4, 13)]  # 2 per side and layer


def test_older_versions_of_trl_and_other_arguments_are_refused(tmp_path: Any, monkeypatch: Any) -> None:
    with pytest.raises(TypeError, match="args must be a SFTConfig, got TrainingArguments"):
        PackedDiffusionTrainer(tiny_model(), TrainingArguments(tmp_path), block_collator(), make_examples())  # type: ignore[arg-type]
    monkeypatch.setattr("flashmask_hf.trainers.weighing.compare_versions", lambda *_: True)
    with pytest.raises(ValueError, match=r"needs the fused head of trl>=1\.15; install it"):
        build(tmp_path, block_collator())


def test_a_mask_token_without_embedding_is_refused(tmp_path: Any) -> None:
    collator = DataCollatorForBlockDiffusion(mask_token_id=MASK + 1, block_size=4)
    with pytest.raises(ValueError, match=r"less than the model's 64 embeddings, got 64; choose a token"):
        build(tmp_path, collator)


def test_models_and_options_that_would_ignore_the_mask_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"OwnAttention has attention code of its own, as the remote code of LLaDA"):
        build(tmp_path, block_collator(), OwnAttention(llama_config()))
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="need attn_implementation='flashmask', but the model has 'sdpa'"):
        build(tmp_path, block_collator(), model)
    with pytest.raises(TypeError, match=r"a DataCollatorForBlockDiffusion or .*, which noises tokens, got NoneType"):
        build(tmp_path, None)
    for options, message in (
        ({"packing": True}, "packing and padding_free"),
        ({"loss_type": "dft"}, "loss_type and label_smoothing_factor"),
        ({"label_smoothing_factor": 0.1}, "loss_type and label_smoothing_factor"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, r"cp_size > 1 .* splits causal rows"),
    ):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, block_collator(), **options)
    args = SFTConfig(**trainer_settings(tmp_path), max_length=16)
    with pytest.raises(ValueError, match="compute_metrics is not supported"):
        PackedDiffusionTrainer(tiny_model(), args, block_collator(), make_examples(), compute_metrics=print)
