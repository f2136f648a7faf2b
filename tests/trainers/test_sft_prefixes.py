"""SFT on rows of shared prefixes: loss, gradient and every metric are stock TRL's on the examples, unpacked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tools import model_zoo
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
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3MoeConfig
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import pack_dataset
from flashmask_hf.names import IGNORED
from flashmask_hf.trainers import PackedSFTTrainer, sft_data

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

SIZES: Any = {"initializer_range": 0.2, "max_position_embeddings": 256}
CONFIGS = {
    "llama": lambda: llama_config(**SIZES),
    "qwen3": lambda: Qwen3Config(**llama_config(**SIZES).to_dict() | {"model_type": "qwen3", "head_dim": 8}),
    "mistral": lambda: MistralConfig(
        **llama_config(**SIZES).to_dict() | {"model_type": "mistral", "sliding_window": 16}
    ),
}


def model_of(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention, dtype=torch.float64)


def words(generator: Any, low: int, high: int) -> list[int]:
    return generator.integers(3, VOCAB, generator.integers(low, high)).tolist()


def unrolled(generator: Any) -> dict[str, Any]:
    """An example per turn, with the history; the completion is learned."""
    data: dict[str, Any] = {"input_ids": [], "completion_mask": []}
    for _ in range(3):
        history = words(generator, 12, 13)
        for _ in range(5):
            prompt, answer = history + words(generator, 3, 9), words(generator, 2, 8)
            data["input_ids"].append(prompt + answer)
            data["completion_mask"].append([0] * len(prompt) + [1] * len(answer))
            history = prompt + answer
    return data


def sampled(generator: Any) -> dict[str, Any]:
    """Eight samples of each prompt, two of them equal, others with a common beginning; and a common system prompt."""
    data: dict[str, Any] = {"input_ids": [], "completion_mask": []}
    system = words(generator, 9, 10)
    for _ in range(3):
        prompt, base = system + words(generator, 10, 11), words(generator, 12, 13)
        for nth in range(8):
            answer = base if nth < 2 else base[: generator.integers(0, 6)] + words(generator, 2, 9)
            data["input_ids"].append(prompt + answer)
            data["completion_mask"].append([0] * len(prompt) + [1] * len(answer))
    return data


def thinking(generator: Any) -> dict[str, Any]:
    """A template that drops earlier thinking; every assistant token is learned, so labels differ by example."""
    data: dict[str, Any] = {"input_ids": [], "labels": []}
    for _ in range(3):
        history, learned = words(generator, 10, 11), [0] * 10
        for _ in range(5):
            user, think, answer = words(generator, 5, 6), words(generator, 3, 8), words(generator, 2, 6)
            ids = history + user + think + answer
            mask = learned + [0] * 5 + [1] * (len(think) + len(answer))
            data["input_ids"].append(ids)
            data["labels"].append([token if own else IGNORED for token, own in zip(ids, mask, strict=True)])
            history, learned = history + user + answer, learned + [0] * 5 + [1] * len(answer)
    alone = words(generator, 20, 21)
    whole = data["input_ids"][0][:12]  # another example contains it
    data["input_ids"] += [alone, whole]
    data["labels"] += [alone, [IGNORED] * 6 + whole[6:]]
    return data


def trainer_of(
    trainer: type, path: Any, kind: str, data: Any, *, options: Any = None, peft: Any = None, **settings: Any
) -> Any:
    given: dict[str, Any] = {
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    given |= {"max_length": 200, "completion_only_loss": isinstance(data, dict) and "completion_mask" in data}
    return trainer(
        model_of(kind, "eager" if trainer is SFTTrainer else "flashmask"),
        SFTConfig(**trainer_settings(path) | given | settings),
        train_dataset=Dataset.from_dict(data) if isinstance(data, dict) else data,
        processing_class=word_tokenizer(),
        peft_config=peft,
        **(options or {}),
    )


METRICS = ("loss", "mean_token_accuracy", "entropy", "num_tokens")


def assert_stock(shared: Any, stock: Any, metrics: tuple[str, ...] = METRICS) -> dict[str, Any]:
    """Assert that a step of two trainers is the same; return the log."""
    (log, gradient), (expected, expected_gradient) = step(shared), step(stock)
    for name in metrics:
        assert log[name] == pytest.approx(expected[name], rel=FLOAT32), name
    assert_same_gradients(gradient, expected_gradient)
    return log


CASES = {
    "unrolled": ("qwen3", unrolled, 200),
    "sampled": ("qwen3", sampled, 200),
    "thinking": ("qwen3", thinking, 200),
    "cut over rows": ("llama", sampled, 56),
    "thinking, cut over rows": ("llama", thinking, 72),
    "window": ("mistral", thinking, 200),
}
FULL = ("unrolled", "sampled", "thinking, cut over rows")
"""Cases that the quick lane leaves out."""


@pytest.mark.parametrize(
    ("kind", "make", "row_length"),
    [pytest.param(*case, marks=[pytest.mark.full] * (name in FULL), id=name) for name, case in CASES.items()],
)
def test_a_step_is_stock_on_the_examples(kind, make, row_length, tmp_path, capsys):
    data = make(np.random.default_rng(0))
    settings = {"per_device_train_batch_size": 100, "max_length": row_length}
    stock = trainer_of(SFTTrainer, tmp_path, kind, data, **settings)
    shared = trainer_of(PackedSFTTrainer, tmp_path, kind, data, options={"share_prefixes": True}, **settings)
    tokens, rows = sum(map(len, data["input_ids"])), shared.train_dataset
    computed = sum(map(sum, rows["seq_lengths"]))
    assert f"Shared prefixes: {computed} tokens are computed for {tokens}," in capsys.readouterr().out
    roots = sum(row["input_ids"][-2].count(-1) for row in rows)
    assert (roots > len({ids[0] for ids in data["input_ids"]})) == (row_length < 200)
    log = assert_stock(shared, stock)
    assert log["shared_tokens_saved"] == pytest.approx(1 - computed / tokens)
    assert log["shared_tokens_saved"] > 0.3
    assert log["num_tokens"] == tokens
    counts = [each.get_batch_samples(iter(each.get_train_dataloader()), 1, "cpu")[1] for each in (shared, stock)]
    assert counts[0] == counts[1]


def in_batches(data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings of accumulation for rows of shared prefixes, one at a time, and for examples, five at a time."""
    rows = pack_dataset(Dataset.from_dict(data), 100, share_prefixes=True)
    examples = len(data["input_ids"])
    return (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(rows)},
        {"per_device_train_batch_size": 5, "gradient_accumulation_steps": examples // 5},
    )


def test_accumulated_batches_of_an_adapter_under_checkpointing(tmp_path):
    """Means over micro-batches differ, as these hold other examples: the loss does not."""
    data, config = (
        unrolled(np.random.default_rng(1)),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    settings = {"max_length": 100, CHECKPOINTING: True, "peft": config}
    ours, theirs = in_batches(data)
    assert ours["gradient_accumulation_steps"] == 3
    stock = trainer_of(SFTTrainer, tmp_path, "qwen3", data, **settings, **theirs)
    shared = trainer_of(PackedSFTTrainer, tmp_path, "qwen3", data, options={"share_prefixes": True}, **settings, **ours)
    for one, two in zip(shared.model.parameters(), stock.model.parameters(), strict=True):
        one.data.copy_(two.data)
    assert_stock(shared, stock, ("loss", "num_tokens"))


@pytest.mark.parametrize("prepared", ["stream", pytest.param("packed before", marks=pytest.mark.full)])
def test_streams_and_rows_that_are_packed_before(prepared, tmp_path):
    data = thinking(np.random.default_rng(2))
    rows: Any = IterableDataset.from_generator(
        lambda: (dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True))
    )
    options: Any = {"share_prefixes": True, "row_length": 256}
    if prepared == "packed before":
        rows, options = pack_dataset(Dataset.from_dict(data), 200, **options), {}
    settings = {"per_device_train_batch_size": 100}
    shared = trainer_of(PackedSFTTrainer, tmp_path, "llama", rows, options=options, **settings)
    assert shared.row_length == (256 if prepared == "stream" else 200)  # LongRows makes as many tokens fit
    assert_stock(shared, trainer_of(SFTTrainer, tmp_path, "llama", data, **settings))


def test_an_evaluation_is_the_mean_over_the_examples_labels(tmp_path):
    data = thinking(np.random.default_rng(3))
    settings = {"max_length": 72, "per_device_eval_batch_size": 2}
    shared = trainer_of(PackedSFTTrainer, tmp_path, "llama", data, options={"share_prefixes": True}, **settings)
    shared.train_dataset, rows = None, shared.train_dataset
    assert len(rows) > 2
    stock = trainer_of(SFTTrainer, tmp_path, "llama", data, per_device_eval_batch_size=100)
    found, expected = shared.evaluate(rows), stock.evaluate(stock.train_dataset)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        logs = [next(x[name] for x in each.state.log_history if name in x) for each in (shared, stock)]
        assert logs[0] == pytest.approx(logs[1], rel=FLOAT32)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=FLOAT32)


SHARED = {"share_prefixes": True}


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (SHARED, {"packing": True}, "share_prefixes needs rows of text that this trainer packs"),
        ({"row_length": 300}, {"padding_free": True}, "row_length needs rows of text that this trainer packs"),
        ({"row_length": 0}, {"padding_free": True}, "row_length needs rows of text that this trainer packs"),
        (SHARED, {"loss_type": "dft"}, "loss_type='dft' does not read the weights of labels"),
        (SHARED, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 does not read the weights"),
        (SHARED | {"compute_loss_func": print}, {}, "compute_loss_func does not read the weights"),
        (SHARED | {"split": True}, {"truncation_mode": "error"}, "split=True makes pieces without common prefixes"),
        ({"row_length": 100}, {}, "row_length must be .* max_length"),
    ],
)
def test_options_that_cannot_share_raise(options, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(PackedSFTTrainer, tmp_path, "llama", unrolled(np.random.default_rng(0)), options=options, **settings)


def first_step(model: Any, tmp_path: Any) -> None:
    data = unrolled(np.random.default_rng(0))
    settings: dict[str, Any] = trainer_settings(tmp_path) | {"max_length": 200, "max_steps": 1}
    options: dict[str, Any] = {
        "train_dataset": Dataset.from_dict(data),
        "processing_class": word_tokenizer(),
        "share_prefixes": True,
    }
    PackedSFTTrainer(model, SFTConfig(**settings), **options).train()


@pytest.mark.full
def test_models_that_cannot_share_raise_in_the_first_step(tmp_path):
    sizes = llama_config(**SIZES).to_dict() | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "output_router_logits": True,
    }
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "router_aux_loss_coef": 0.1}
    experts = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), attn_implementation="flashmask")
    with pytest.raises(ValueError, match=r"auxiliary loss .* set output_router_logits=False"):
        first_step(experts, tmp_path)
    recurrent = AutoModelForCausalLM.from_config(
        model_zoo.config_of("lfm2", max_position_embeddings=256), attn_implementation="flashmask"
    )
    with pytest.raises(ValueError, match="recurrent or convolutional layers"):
        first_step(recurrent, tmp_path)


def test_compiled_windows_that_may_cut_shared_prefixes_raise():
    trainer = SimpleNamespace(model=model_of("mistral", "flashmask"), aux_loss_enabled=False)
    trainer.args = SimpleNamespace(torch_compile=True, max_length=17)
    with pytest.raises(ValueError, match=r"sliding_window=16, shorter than max_length=17; set torch_compile=False, "):
        sft_data.check_sharing(trainer)
    trainer.args.max_length = 16
    sft_data.check_sharing(trainer)


def test_dropout_warns(tmp_path, caplog):
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    settings = {"options": SHARED, "peft": config}
    trainer_of(PackedSFTTrainer, tmp_path, "llama", unrolled(np.random.default_rng(0)), **settings).train()
    assert [x.message for x in caplog.records if "dropout" in x.message] == [
        "[RANK 0] Examples share what dropout or noise does to shared tokens; set it to 0, or share no prefixes."
    ]
