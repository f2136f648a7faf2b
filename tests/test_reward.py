"""Reward models that compute each question once: with two answers they are stock TRL's, with more their definition."""

import copy
import doctest
import itertools
import logging
import math

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny import CHECKPOINTING, VOCAB, conversation, llama_config, preference_rows, trainer_settings, word_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    HfArgumentParser,
)
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

import flashmask_hf.collators.reward as reward_collator
from flashmask_hf.collators.reward import DataCollatorForMultiAnswerReward
from flashmask_hf.packed_backbone import run_packed
from flashmask_hf.trainers.reward import (
    MultiAnswerRewardConfig,
    MultiAnswerRewardTrainer,
    pairwise_loss,
    plackett_luce_loss,
)

pytestmark = [
    # TRL's default for `gradient_checkpointing` and PEFT's look at the model, in transformers 5.23
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    # torch on a machine without a GPU
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

BOUND = {"rtol": 1e-5, "atol": 1e-5}
GRADIENT_BOUND = 1e-5  # largest difference over largest entry, of each parameter
CHAT = (
    "{% if tools %}{{ 'w6 ' }}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or 'w5') + ' ' }}"
    "{% if m['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if suffix is defined %}{{ suffix }}{% endif %}"
)


# --- data


def rows(count=8, seed=0):
    """Standard preference rows with margins."""
    return [row | {"margin": 0.25 * index - 0.5} for index, row in enumerate(preference_rows(count, seed))]


def implicit(row):
    prompt = row.pop("prompt")
    return row | {key: prompt + row[key] for key in ("chosen", "rejected")}


FORMS = {
    "standard": dict,
    "standard, implicit": lambda row: implicit(dict(row)),
    "conversational": conversation,
    "conversational, implicit": lambda row: implicit(conversation(row)),
}


def without(row, *columns):
    return {key: value for key, value in row.items() if key not in columns}


def scored(counts=(2, 6, 3, 4, 5, 3), seed=0):
    """Tokenized examples with as many answers each, scores with ties."""
    rng = np.random.default_rng(seed)

    def tokens(most):
        return rng.integers(8, VOCAB, rng.integers(1, most)).tolist()

    return [
        {
            "prompt_ids": tokens(9),
            "answers_ids": [tokens(7) for _ in range(count)],
            "scores": [0.0, *rng.integers(0, 3, count - 2).tolist(), 2.5],
        }
        for count in counts
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer("user", "assistant", "system", chat_template=CHAT)


# --- models and trainers


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = llama_config(initializer_range=0.2, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return str(path)


def load(path, attention="flashmask"):
    return AutoModelForSequenceClassification.from_pretrained(path, attn_implementation=attention)


def settings(out, config_class=MultiAnswerRewardConfig, **options):
    return config_class(**(trainer_settings(out) | options))


def make(trainer_class, model_path, tokenizer, out, data=None, *, lora=False, model=None, **options):
    ours = trainer_class is MultiAnswerRewardTrainer
    keywords = {name: options.pop(name) for name in ("data_collator", "eval_dataset") if name in options}
    for name in ("compute_metrics", "peft_config"):
        if name in options:
            keywords[name] = options.pop(name)
    if lora:
        keywords["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "up_proj"],
            modules_to_save=["score"], task_type="SEQ_CLS",
        )  # fmt: skip
        torch.manual_seed(1)
    if data is None:
        data = [without(row, "margin") for row in rows()]
    return trainer_class(
        load(model_path, "flashmask" if ours else "eager") if model is None else model,
        args=settings(out, MultiAnswerRewardConfig if ours else RewardConfig, **options),
        train_dataset=Dataset.from_list(data) if isinstance(data, list) else data,
        processing_class=tokenizer,
        **keywords,
    )


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(trainer):
    """Loss, gradients and metrics of the first batch."""
    trainer.model.train()
    trainer.model.zero_grad()
    torch.manual_seed(2)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    return loss.detach(), gradients_of(trainer.model), metrics


def assert_same_gradients(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = wanted.abs().max().clamp(min=1e-3)
        assert ((gradients[name] - wanted).abs().max() / scale) < GRADIENT_BOUND, name


def assert_same(ours, stock):
    loss, gradients, metrics = one_step(ours)
    expected_loss, expected_gradients, expected_metrics = one_step(stock)
    torch.testing.assert_close(loss, expected_loss, **BOUND)
    assert_same_gradients(gradients, expected_gradients)
    assert metrics.keys() == expected_metrics.keys() | {"mask_sparsity"}
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    return loss


# --- two answers: stock TRL

OPTIONS = {"none": {}, "margin": {}, "centering": {"center_rewards_coefficient": 0.3}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_answers_equal_stock_trl(lora, option, form, model_path, tokenizer, tmp_path):
    data = [FORMS[form](row) for row in rows()]
    if option != "margin":
        data = [without(row, "margin") for row in data]
    ours, stock = (
        make(c, model_path, tokenizer, tmp_path, data, lora=lora, **OPTIONS[option])
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )
    assert_same(ours, stock)
    for row, expected in zip(ours.train_dataset, stock.train_dataset, strict=True):
        whole = [row["prompt_ids"] + answer for answer in row["answers_ids"]]
        assert whole == [expected["chosen_ids"], expected["rejected_ids"]]


OTHER_OPTIONS = {
    "listwise": {"loss_type": "listwise"},
    "checkpointing": {CHECKPOINTING: True},
    "reentrant checkpointing": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    "checkpointing, lora": {CHECKPOINTING: True, "lora": True},
    "max_length": {"max_length": 12},
    "row_length": {"row_length": 48, "pad_to_multiple_of": 16},
    "unused columns kept": {"remove_unused_columns": False},
}


@pytest.mark.parametrize("option", OTHER_OPTIONS)
def test_options_keep_two_answers_equal_to_stock_trl(option, model_path, tokenizer, tmp_path):
    ours = OTHER_OPTIONS[option]
    stock = without(ours, "loss_type", "row_length", "pad_to_multiple_of")
    assert_same(
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, rows(), **ours),
        make(RewardTrainer, model_path, tokenizer, tmp_path, rows(), **stock),
    )


def test_tokenized_columns_of_trl_are_taken_as_they_are(model_path, tokenizer, tmp_path):
    stock = make(RewardTrainer, model_path, tokenizer, tmp_path, rows())
    tokenized = stock.train_dataset.select_columns(["chosen_ids", "rejected_ids", "margin"])
    ours = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized)
    assert ours.train_dataset.column_names == tokenized.column_names
    assert_same(ours, stock)


def test_a_trained_adapter(model_path, tokenizer, tmp_path):
    def adapted(attention):
        torch.manual_seed(5)
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="SEQ_CLS")
        return get_peft_model(load(model_path, attention), lora)

    assert_same(
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, model=adapted("flashmask")),
        make(RewardTrainer, model_path, tokenizer, tmp_path, model=adapted("eager")),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{}, {"activation_offloading": True}, {CHECKPOINTING: True}], ids=str)
def test_the_gpu_equals_the_cpu(option, model_path, tokenizer, tmp_path):
    on_gpu = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, rows(), use_cpu=False, **option)
    with on_gpu.maybe_activation_offload_context:
        loss, gradients, _ = one_step(on_gpu)
    expected, expected_gradients, _ = one_step(make(RewardTrainer, model_path, tokenizer, tmp_path, rows()))
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().clamp(min=1e-3)
        assert ((gradient.cpu() - expected_gradients[name]).abs().max() / scale) < 1e-3, name


# --- more answers: the definition


def separate_rewards(model, example):
    """The reward of each answer from a forward of its own, question and answer, pooled at the last token."""
    rewards = []
    for answer in example["answers_ids"]:
        tokens = torch.tensor([example["prompt_ids"] + answer])
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        rewards.append(model.score(hidden[0, -1])[0])
    return torch.stack(rewards)


def pairs_of(scores):
    return [(i, j) for i, j in itertools.permutations(range(len(scores)), 2) if scores[i] > scores[j]]


def defined_pairwise(rewards, scores, margin=0.0):
    losses = [
        -torch.sigmoid(rewards[i] - rewards[j] - margin * (scores[i] - scores[j])).log() for i, j in pairs_of(scores)
    ]
    return sum(losses) / len(losses)


def defined_listwise(rewards, scores, margin=0.0):
    loss = 0.0
    for i in range(len(scores)):
        beaten = [j for a, j in pairs_of(scores) if a == i]
        rivals = [rewards[i], *(rewards[j] + margin * (scores[i] - scores[j]) for j in beaten)]
        loss = loss - (rewards[i].exp() / sum(r.exp() for r in rivals)).log()
    return loss


def defined_centering(rewards, scores):
    squares = [(rewards[i] + rewards[j]) ** 2 for i, j in pairs_of(scores)]
    return sum(squares) / len(squares)


DEFINITIONS = {"pairwise": defined_pairwise, "listwise": defined_listwise}


@pytest.mark.parametrize("option", [{}, {"center_rewards_coefficient": 0.3}, {"score_margin": 0.4}], ids=str)
@pytest.mark.parametrize("loss_type", DEFINITIONS)
def test_mixed_numbers_of_answers_equal_separate_forwards(loss_type, option, model_path, tokenizer, tmp_path):
    data = scored()
    trainer = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, loss_type=loss_type,
        per_device_train_batch_size=len(data), **option,
    )  # fmt: skip
    loss, gradients, metrics = one_step(trainer)

    model = load(model_path, "eager").train()
    rewards = [separate_rewards(model, example) for example in data]
    expected = 0.0
    for example, own in zip(data, rewards, strict=True):
        expected += DEFINITIONS[loss_type](own, example["scores"], option.get("score_margin", 0.0)) / len(data)
        center = option.get("center_rewards_coefficient", 0.0)
        expected += center * defined_centering(own, example["scores"]) / len(data)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **BOUND)
    assert_same_gradients(gradients, gradients_of(model))

    every = torch.cat(rewards)
    tokens = sum(len(e["prompt_ids"]) + len(a) for e in data for a in e["answers_ids"])
    ahead = [
        np.mean([(own[i] - own[j]).item() for i, j in pairs_of(example["scores"])])
        for example, own in zip(data, rewards, strict=True)
    ]
    right = [
        np.mean([own[i] > own[j] for i, j in pairs_of(example["scores"])])
        for example, own in zip(data, rewards, strict=True)
    ]
    assert metrics == pytest.approx(
        {
            "num_tokens": tokens,
            "min_reward": every.min().item(),
            "mean_reward": every.mean().item(),
            "max_reward": every.max().item(),
            "accuracy": np.mean(right),
            "margin": np.mean(ahead),
            "mask_sparsity": 0.0,  # a short row is one tile
        },
        rel=1e-5,
        abs=1e-5,
    )


def random_questions(count, seed, levels):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, count, generator=generator)
    scores = torch.randint(0, levels, (6, count), generator=generator).float()
    scores[:, 0], scores[:, 1] = 0, levels  # never all equal
    return rewards, scores, scores[:, :, None] > scores[:, None]


def test_listwise_is_the_plackett_luce_model():
    """Over all rankings of four answers the likelihoods sum to one, and each is the product of its choices."""
    rewards = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for order in itertools.permutations(range(4)):
        scores = torch.empty(1, 4)
        scores[0, list(order)] = torch.tensor([3.0, 2.0, 1.0, 0.0])
        likelihood = plackett_luce_loss(rewards, scores[:, :, None] > scores[:, None]).neg().exp()
        chances = [
            math.exp(rewards[0, order[k]]) / sum(math.exp(rewards[0, i]) for i in order[k:]) for k in range(len(order))
        ]
        assert likelihood.item() == pytest.approx(math.prod(chances), rel=1e-5)
        total += likelihood.item()
    assert total == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("loss_type", DEFINITIONS)
def test_ties_count_for_nothing(loss_type, count):
    rewards, scores, beats = random_questions(count, seed=count, levels=3)
    loss = {"pairwise": pairwise_loss, "listwise": plackett_luce_loss}[loss_type]
    expected = torch.stack([DEFINITIONS[loss_type](*pair) for pair in zip(rewards, scores.tolist(), strict=True)])
    torch.testing.assert_close(loss(rewards, beats), expected, **BOUND)
    if count == 2:
        torch.testing.assert_close(plackett_luce_loss(rewards, beats), pairwise_loss(rewards, beats), **BOUND)


@pytest.mark.parametrize(
    "options",
    [{}, {"pad_to_multiple_of": 32}, {"row_length": 64}, {"row_length": 96, "pad_to_multiple_of": 32}],
    ids=str,
)
def test_packing_several_questions_equals_separate_batches(options, model_path, tokenizer, tmp_path):
    data = scored()
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)
    collator = DataCollatorForMultiAnswerReward(**options)
    batch = collator(data)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = gradients_of(trainer.model)
    trainer.model.zero_grad()
    total = 0.0
    for example in data:
        one = trainer.compute_loss(trainer.model, DataCollatorForMultiAnswerReward()([example])) / len(data)
        one.backward()
        total += one.detach()
    torch.testing.assert_close(loss.detach(), total, **BOUND)
    assert_same_gradients(gradients, gradients_of(trainer.model))


def rewards_of(model, examples, **options):
    batch = DataCollatorForMultiAnswerReward(**options)(examples)
    inputs = without(batch, "answer_counts", "token_counts", "scores", "margins")
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits.view(batch["scores"].shape)


def test_one_answer_never_reaches_another(model_path):
    """Other tokens in one answer leave the rewards of all others, and of other questions, the same to the bit."""
    model = load(model_path)
    run_packed(model)
    data = scored((3, 4))
    before = rewards_of(model, data)
    changed = [dict(example) for example in data]
    changed[0]["answers_ids"] = [list(answer) for answer in data[0]["answers_ids"]]
    changed[0]["answers_ids"][1] = [7] * len(data[0]["answers_ids"][1])
    after = rewards_of(model, changed)
    same = torch.ones_like(before, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(before[same], after[same])
    assert before[0, 1] != after[0, 1]


@pytest.mark.parametrize("pad", [0, 1], ids=["pad is its own", "pad is eos"])
def test_the_reward_is_that_of_the_last_token_whatever_pads(pad, model_path):
    """transformers pools before the last token where that is the padding token, as with pad_token = eos_token."""
    model = load(model_path)
    model.config.pad_token_id = pad
    run_packed(model)
    data = [
        {"prompt_ids": [9, 10], "answers_ids": [[11, 12, 1], [13, 1]]},
        {"prompt_ids": [14], "answers_ids": [[15, 16, 17, 1], [18, 0], [1]]},
    ]
    rewards = rewards_of(model, data, pad_token_id=pad, row_length=16)
    for example, row in zip(data, rewards, strict=True):
        expected = separate_rewards(model, example)
        torch.testing.assert_close(row[: len(expected)], expected, **BOUND)


# --- training and evaluation


def curve(trainer):
    trainer.train()
    return [without(entry, "epoch") for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_training_follows_stock_trl(lora, model_path, tokenizer, tmp_path):
    held_out = [without(row, "margin") for row in rows(6, seed=3)]
    options = {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    ours, stock = (
        make(
            c, model_path, tokenizer, tmp_path, lora=lora, learning_rate=1e-2,
            eval_dataset=Dataset.from_list(held_out), **options,
        )
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )  # fmt: skip
    losses, expected = curve(ours), curve(stock)
    assert len(losses) == 8
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    for one, other in zip(losses, expected, strict=True):
        assert one.keys() == other.keys() | {"mask_sparsity", "shared_tokens_saved", "accuracy_of_2_answers"}
        assert {key: one[key] for key in other} == pytest.approx(other, rel=1e-3, abs=1e-4)
    fresh = Dataset.from_list([without(row, "margin") for row in rows(3, seed=4)])
    for dataset in (None, fresh):
        one, other = ours.evaluate(dataset), stock.evaluate(dataset)
        for name, value in other.items():
            if "runtime" not in name and "per_second" not in name:
                assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_the_last_step_of_an_epoch_logs_all_of_its_batches(model_path, tokenizer, tmp_path):
    """13 rows make three batches of four and one of one, which Trainer fetches before it computes the first."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-2}
    ours, stock = (
        make(c, model_path, tokenizer, tmp_path, preference_rows(13), **options)
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )
    for one, other in zip(curve(ours), curve(stock), strict=True):
        assert {key: one[key] for key in other} == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_total_flos_are_those_of_the_packed_tokens(model_path, tokenizer, tmp_path):
    data = scored((3, 2))
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, num_train_epochs=3)
    trainer.train()
    computed = sum(len(e["prompt_ids"]) + sum(map(len, e["answers_ids"])) for e in data)
    parameters = trainer.model.num_parameters(exclude_embeddings=True)
    assert trainer.state.total_flos == 3 * 6 * computed * parameters


def test_evaluation_is_exact_over_all_batches(model_path, tokenizer, tmp_path):
    data = scored((2, 6, 3, 4, 5, 3, 3))
    seen = {}

    def compute_metrics(prediction):
        seen["predictions"], seen["scores"] = prediction.predictions, prediction.label_ids
        return {"best_first": 0.5}

    trainer = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, eval_dataset=Dataset.from_list(data),
        compute_metrics=compute_metrics,
    )  # fmt: skip
    metrics = trainer.evaluate()
    model = load(model_path, "eager").eval()
    with torch.no_grad():
        rewards = [separate_rewards(model, example) for example in data]
    right, losses = {}, []
    for example, own in zip(data, rewards, strict=True):
        share = np.mean([(own[i] > own[j]).item() for i, j in pairs_of(example["scores"])])
        right.setdefault(len(own), []).append(share)
        losses.append(defined_pairwise(own, example["scores"]).item())
    for count, shares in right.items():
        assert metrics[f"eval_accuracy_of_{count}_answers"] == pytest.approx(np.mean(shares))
    computed = sum(len(e["prompt_ids"]) + sum(map(len, e["answers_ids"])) for e in data)
    unshared = sum(len(e["prompt_ids"]) + len(answer) for e in data for answer in e["answers_ids"])
    assert metrics["eval_shared_tokens_saved"] == pytest.approx(1 - computed / unshared)
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["eval_best_first"] == 0.5

    assert seen["predictions"].shape == seen["scores"].shape == (7, 6)
    predicted = trainer.predict(trainer.eval_dataset).predictions
    np.testing.assert_array_equal(predicted, seen["predictions"])
    for row, labels, own, example in zip(predicted, seen["scores"], rewards, data, strict=True):
        np.testing.assert_allclose(row[: len(own)], own, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(labels[: len(own)], example["scores"])
        assert (row[len(own) :] == -100).all()
        assert (labels[len(own) :] == -100).all()
    assert "eval_accuracy_of_3_answers" not in trainer.evaluate(Dataset.from_list(data[:2]))


def test_training_learns_a_ranking_of_many_answers(model_path, tokenizer, tmp_path):
    trainer = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, scored((2, 6, 3, 4)), loss_type="listwise",
        max_steps=20, learning_rate=1e-2,
    )  # fmt: skip
    losses = curve(trainer)
    assert losses[-1]["loss"] < losses[0]["loss"] / 4
    assert losses[-1]["accuracy_of_6_answers"] == 1.0


def test_a_stream_of_rows(model_path, tokenizer, tmp_path):
    def stream():
        yield from (without(row, "margin") for row in rows())

    def too_long():
        yield {"prompt": "w8 " * 70, "chosen": "w9", "rejected": "w10"}
        yield from stream()

    streamed = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, IterableDataset.from_generator(too_long),
        max_steps=4, per_device_train_batch_size=2, max_length=60,
        eval_dataset={"held_out": IterableDataset.from_generator(stream)},
    )  # fmt: skip
    whole = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, max_steps=4, per_device_train_batch_size=2,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    assert not streamed.args.accelerator_config.dispatch_batches
    assert [e["loss"] for e in curve(streamed)] == pytest.approx([e["loss"] for e in curve(whole)], rel=1e-5)
    assert streamed.evaluate()["eval_accuracy_of_2_answers"] > 0


# --- formats


def answers_of(trainer):
    """Whole sequences, as text."""
    return [
        [trainer.processing_class.decode([*row["prompt_ids"], *answer]) for answer in row["answers_ids"]]
        for row in trainer.train_dataset
    ]


USER, BEST, WORST = ({"role": r, "content": c} for r, c in (("user", "w8"), ("assistant", "w9"), ("assistant", "w10")))
CHATTED = ["user w8 assistant w9 <eos>", "user w8 assistant w10 <eos>"]
FORMATS = {
    "strings": ({"prompt": "w8 ", "answers": ["w9", "w10 <eos>"]}, ["w8 w9<eos>", "w8 w10 <eos>"]),
    "whole strings": ({"answers": ["w8 w9 ", "w8 w10 "]}, ["w8 w9 <eos>", "w8 w10 <eos>"]),
    "messages": ({"prompt": [USER], "answers": [[BEST], [WORST]]}, CHATTED),
    "messages and strings": ({"prompt": [USER], "answers": ["w9", "w10"]}, CHATTED),
    "whole conversations": ({"answers": [[USER, BEST], [USER, WORST]]}, CHATTED),
    "ultrafeedback_binarized": (
        {
            "prompt": "w8",
            "prompt_id": "f00",
            "chosen": [USER, BEST],
            "rejected": [USER, WORST],
            "messages": [USER, BEST],
            "score_chosen": 8.0,
            "score_rejected": 6.5,
        },
        CHATTED,
    ),
    "a string and messages": ({"prompt": "w8", "chosen": [BEST], "rejected": [WORST]}, CHATTED),
    "a system prompt": (
        {"prompt": "w8", "answers": [[{"role": "system", "content": "w7"}, USER, end] for end in (BEST, WORST)]},
        [f"system w7 {text}" for text in CHATTED],
    ),
    "tools": (
        {"prompt": [USER], "answers": [[BEST], [WORST]], "tools": "[{}]", "chat_template_kwargs": {"suffix": "w11"}},
        [f"w6 {text} w11" for text in CHATTED],
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form, model_path, tokenizer, tmp_path):
    row, expected = FORMATS[form]
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row])
    decoded = [[" ".join(text.replace("<eos>", " <eos>").split()) for text in texts] for texts in answers_of(trainer)]
    assert decoded == [[" ".join(text.replace("<eos>", " <eos>").split()) for text in expected]]
    assert [len(answer) for answer in trainer.train_dataset[0]["answers_ids"]] == [
        expected[0].count("w9") + 1 + expected[0].count("w11")
    ] * 2


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("form", FORMATS)
def test_rows_may_be_tensors_and_arrays(form, library, model_path, tokenizer, tmp_path):
    row, _ = FORMATS[form]
    data = [row | ({"scores": [2.5, 1.0]} if "answers" in row else {"margin": 0.5})]
    plain, trainer = (
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, Dataset.from_list(data).with_format(name))
        for name in (None, library)
    )
    batch, expected = (next(iter(one.get_train_dataloader())) for one in (trainer, plain))
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(batch[name], values), name


PARTS = "{% for m in messages %}{{ m['role'] }} {% for p in m['content'] %}{{ p['text'] }} {% endfor %}{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t['needed'] | join(' ') }} {% endfor %}"


@pytest.mark.parametrize("library", ["torch", "numpy", "pandas", "arrow"])
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_messages_of_parts_and_tools_in_a_format(library, streamed, model_path, tmp_path):
    """Arrays and tensors within messages would be written into the text, or say nothing of themselves."""

    def turn(role, *words):
        return {"role": role, "content": [{"type": "text", "text": word} for word in words]}

    tokenizer = word_tokenizer("user", "assistant", chat_template=TOOLS + PARTS)
    row = {
        "prompt": [turn("user", "w9", "w8")],
        "chosen": [turn("assistant", "w11", "w12")],
        "rejected": [turn("assistant", "w11", "w13")],
        "tools": [{"needed": ["w20", "w21"]}],
        "other": "w30",
    }
    data = Dataset.from_list([row, row])
    seen = []
    for name in (None, library):
        given = data.to_iterable_dataset().with_format(name) if streamed else data.with_format(name)
        options = {"max_steps": 1} if streamed else {}
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, given, **options)
        seen.append(next(iter(trainer.train_dataset.with_format(None))))
    assert seen[0] == seen[1]
    assert tokenizer.decode(seen[0]["prompt_ids"]) == "w20 w21 user w9 w8 assistant w11"
    assert [tokenizer.decode(ids) for ids in seen[0]["answers_ids"]] == ["w12", "w13"]


def test_rows_of_joined_datasets(model_path, tokenizer, tmp_path):
    """Each kind of row lacks the columns of the other, which are None there; scores are of answers alone."""
    pair = {"chosen": "w8 w9 ", "rejected": "w8 w10 ", "scores": [1.0, 5.0]}
    ranked = {"answers": ["w8 w9 ", "w8 w10 "], "scores": [1.0, 3.0]}
    data = concatenate_datasets([Dataset.from_list([row] * 2) for row in (pair, ranked)])
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)
    assert trainer.train_dataset[0]["answers_ids"] == trainer.train_dataset[2]["answers_ids"]
    assert [row["scores"] for row in trainer.train_dataset] == [None, None, [1.0, 3.0], [1.0, 3.0]]
    ids = {"prompt_ids": [8], "answers_ids": [[9], [10]]}, {"chosen_ids": [8, 9], "rejected_ids": [8, 10]}
    tokenized = concatenate_datasets([Dataset.from_list([row]) for row in ids])
    assert len(make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized).train_dataset) == 2


def test_conversations_need_no_eos_token_and_texts_do(model_path, tmp_path):
    tokenizer = word_tokenizer("user", "assistant", chat_template=CHAT)
    tokenizer.eos_token = None
    data = [conversation({"prompt": "w8", "chosen": "w9", "rejected": "w10"})]
    row = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data).train_dataset[0]
    assert [len(ids) for ids in row["answers_ids"]] == [2, 2]
    with pytest.raises(
        ValueError, match="example 0 of the train dataset is text, which the tokenizer's eos_token ends"
    ):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [{"chosen": "w9 ", "rejected": "w10 "}])


def test_columns_that_a_format_hides_stay_hidden(model_path, tokenizer, tmp_path):
    data = Dataset.from_list([{"prompt": "w8 ", "chosen": "w8 w9 w10 ", "rejected": "w8 w9 w11 "}])
    for hidden, prompt in (("prompt", "w8 w9"), (None, "w8 w8 w9")):
        shown = data.with_format("numpy", columns=[name for name in data.column_names if name != hidden])
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, shown)
        assert tokenizer.decode(trainer.train_dataset[0]["prompt_ids"]) == prompt


def test_a_transform_is_not_run_once_for_all(model_path, tokenizer, tmp_path):
    data = Dataset.from_list(rows()).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match=r"train dataset has a transform .*apply it with dataset.map"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)


def test_scores_decide_and_ranked_answers_come_best_first(model_path, tokenizer, tmp_path):
    row = {"prompt": "w8 ", "answers": ["w9 ", "w10 ", "w11 "]}
    for scores, expected in ((None, [2, 1, 0]), ([3.0, 9.5, 1.0], [3, 9.5, 1])):
        trainer = make(
            MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row | ({"scores": scores} if scores else {})]
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["scores"].tolist() == [expected]
        assert "margins" not in batch


def test_score_margin_of_chosen_and_rejected(model_path, tokenizer, tmp_path):
    """An equal score asks for no margin, and chosen is still preferred."""
    data = [
        without(row, "margin") | {"score_chosen": 8.0, "score_rejected": score}
        for row, score in zip(rows(4), (8.0, 6.5, 3.0, 1.0), strict=True)
    ]
    ours = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, score_margin=0.2)
    assert ours.train_dataset["margin"] == pytest.approx([0.0, 0.3, 1.0, 1.4])
    stock = [row | {"margin": margin} for row, margin in zip(data, (0.0, 0.3, 1.0, 1.4), strict=True)]
    assert_same(ours, make(RewardTrainer, model_path, tokenizer, tmp_path, stock))


def test_rows_over_max_length_are_dropped_and_counted(model_path, tokenizer, tmp_path, caplog):
    data = [
        {"prompt": "w8 w9 ", "answers": ["w10 ", "w11 ", "w12 " * 5]},
        {"prompt": "w8 w9 ", "answers": ["w10 ", "w11 "]},
    ]
    with caplog.at_level(logging.WARNING, logger="flashmask_hf"):
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, max_length=7)
    assert len(trainer.train_dataset) == 1
    assert "Dropped 1 of 2 examples of the train dataset, which have more than max_length=7 tokens" in caplog.text
    caplog.clear()
    kept = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, max_length=8)
    assert len(kept.train_dataset) == 2
    assert not caplog.text


@pytest.mark.parametrize("given", ["name", "name and options", "plain config", "collator"])
def test_arguments_may_be_given_in_many_ways(given, model_path, tokenizer, tmp_path):
    dataset = Dataset.from_list([without(row, "margin") for row in rows()])
    args = settings(tmp_path)
    keywords = {"train_dataset": dataset, "processing_class": tokenizer}
    if given == "collator":
        collator = DataCollatorForMultiAnswerReward(row_length=64, pad_token_id=5)
        trainer = MultiAnswerRewardTrainer(load(model_path), args, collator, **keywords)
        assert (trainer.data_collator.row_length, trainer.data_collator.pad_token_id) == (64, 5)
        assert collator.max_position_embeddings is None
    elif given == "plain config":
        trainer = MultiAnswerRewardTrainer(load(model_path), settings(tmp_path, RewardConfig), **keywords)
    else:
        if given == "name and options":
            args.model_init_kwargs = options = {"dtype": "float32"}
        trainer = MultiAnswerRewardTrainer(model_path, args, **keywords)
        assert trainer.model.config._attn_implementation == "flashmask"
        if given == "name and options":
            assert options == {"dtype": "float32"}
    assert trainer.data_collator.max_position_embeddings == 64
    assert_same(trainer, make(RewardTrainer, model_path, tokenizer, tmp_path))


def test_the_command_line_sets_the_options():
    parser = HfArgumentParser(MultiAnswerRewardConfig)
    flags = ["--loss_type", "listwise", "--score_margin", "0.5", "--row_length", "4096", "--report_to", "none"]
    (args,) = parser.parse_args_into_dataclasses([*flags, "--use_cpu", "--bf16", "false"])
    assert (args.loss_type, args.score_margin, args.row_length) == ("listwise", 0.5, 4096)


# --- the collator


def test_docstring_examples_run():
    result = doctest.testmod(reward_collator)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_batch_counts_questions():
    batch = DataCollatorForMultiAnswerReward(row_length=32)(scored((3, 2)))
    assert next(iter(batch)) == "answer_counts"
    assert batch["answer_counts"].tolist() == [3, 2]
    assert batch["input_ids"].shape == batch["packed_index"].shape == (6, 1)
    assert batch["packed_input_ids"].shape[1] == 32


def test_answers_that_share_nothing_have_no_question(model_path):
    model = load(model_path)
    run_packed(model)
    data = [{"chosen_ids": [9, 10, 11], "rejected_ids": [12, 10]}, {"prompt_ids": [], "answers_ids": [[9], [8], [9]]}]
    batch = DataCollatorForMultiAnswerReward()(data)
    assert batch["packed_position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["token_counts"].tolist() == [[5, 5], [3, 3]]
    rewards = rewards_of(model, data)
    whole = {"prompt_ids": [], "answers_ids": [[9, 10, 11], [12, 10]]}
    torch.testing.assert_close(rewards[0, :2], separate_rewards(model, whole), **BOUND)
    torch.testing.assert_close(rewards[1, 0], rewards[1, 2])  # rows of a product may be rounded each in their way


def test_a_margin_is_for_the_better_answer():
    two = {"prompt_ids": [9], "answers_ids": [[10], [11]], "margin": 0.75}
    assert DataCollatorForMultiAnswerReward()([two])["margins"].tolist() == [[0.75, 0.0]]
    other = two | {"scores": [1, 4]}
    assert DataCollatorForMultiAnswerReward()([other])["margins"].tolist() == [[0.0, 0.75]]
    three = {"prompt_ids": [9], "answers_ids": [[10], [11], [12]], "scores": [1, 4, 2]}
    margins = DataCollatorForMultiAnswerReward(score_margin=0.5)([three, two])["margins"]
    assert margins.tolist() == [[0.5, 2.0, 1.0], [0.75, 0.0, 0.0]]


@pytest.mark.parametrize("margin", [1, torch.tensor(1.0), torch.tensor(1), np.array(1.0), np.float32(1)], ids=repr)
def test_a_margin_may_be_any_number(margin):
    batch = DataCollatorForMultiAnswerReward()([{"chosen_ids": [9], "rejected_ids": [10], "margin": margin}])
    assert batch["margins"].tolist() == [[1.0, 0.0]]


GOOD = {"prompt_ids": [1, 2], "answers_ids": [[3], [4]]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_length": 0}, "row_length must be a number of tokens, at least 1, or None, got 0"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of must be a number of tokens"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings must be a number of tokens"),
        ({"row_length": 10, "pad_to_multiple_of": 4}, "row_length 10 must be a multiple of pad_to_multiple_of 4"),
        ({"pad_token_id": None}, "pad_token_id must be a token id, got None"),
        ({"score_margin": -1.0}, "score_margin must be a number, at least 0"),
        ({"score_margin": float("nan")}, "score_margin must be a number, at least 0"),
        ({"score_margin": "1"}, r"score_margin must be a number, at least 0 \(no margins\), got '1'"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForMultiAnswerReward(**options)


@pytest.mark.parametrize(
    ("options", "example", "error", "message"),
    [
        (
            {},
            {"prompt_ids": [1], "text": "x"},
            ValueError,
            r"example 1 needs prompt_ids and .*It has: prompt_ids, text",
        ),
        ({}, {"prompt_ids": [1], "answers_ids": None}, ValueError, "example 1 needs prompt_ids and answers_ids"),
        ({}, GOOD | {"answers_ids": [[3]]}, ValueError, "example 1 has 1 answers, but a preference needs two or more"),
        ({}, GOOD | {"answers_ids": [[3], []]}, ValueError, "answer 1 of example 1 is empty"),
        ({}, {"chosen_ids": [], "rejected_ids": [3]}, ValueError, "answer 0 of example 1 is empty"),
        ({}, GOOD | {"answers_ids": [[3], [4.5]]}, TypeError, "answer 1 of example 1 must be integers"),
        ({}, GOOD | {"prompt_ids": ["a"]}, TypeError, "prompt_ids of example 1 must be integers"),
        ({}, GOOD | {"scores": [1.0]}, ValueError, "example 1 has 1 scores, but 2 answers"),
        ({}, GOOD | {"scores": [1.0, float("nan")]}, ValueError, "scores of example 1 are .*nan.* not all finite"),
        ({}, GOOD | {"scores": [1.0, None]}, ValueError, "scores of example 1 are .*None.* not all finite"),
        ({}, GOOD | {"scores": [1.0, 1e300]}, ValueError, "scores of example 1 are .* not all finite float32"),
        ({}, GOOD | {"scores": ["a", "b"]}, TypeError, "scores of example 1 must be a sequence of numbers"),
        ({}, GOOD | {"scores": [3, 3]}, ValueError, r"the scores of example 1 are all 3, .*dataset\.filter"),
        ({}, GOOD | {"margin": "wide"}, TypeError, "margin of example 1 must be a number, got 'wide'"),
        ({}, GOOD | {"margin": torch.tensor([1.0])}, TypeError, "margin of example 1 must be a number, got tensor"),
        ({}, GOOD | {"margin": float("inf")}, ValueError, "margin of example 1 is inf; it must be finite"),
        ({}, GOOD | {"margin": 1.0}, ValueError, "example 0 has no margin, but example 1 of the same batch has"),
        (
            {},
            {"prompt_ids": [1], "answers_ids": [[3], [4], [5]], "margin": 1.0},
            ValueError,
            "example 1 has a margin, which is for two answers, but 3 answers; use scores and score_margin",
        ),
        (
            {"score_margin": 2.0},
            GOOD | {"margin": 1.0, "scores": [1, 2]},
            ValueError,
            "example 1 has a margin, and scores that score_margin=2.0 makes another of",
        ),
        ({"score_margin": 2.0}, dict(GOOD), ValueError, "example 1 has neither scores nor a margin, but score_margin"),
        ({"row_length": 5}, GOOD | {"prompt_ids": [1] * 4}, ValueError, "example 1 has 6 tokens, more than the 5"),
        ({"max_position_embeddings": 4}, GOOD | {"prompt_ids": [1] * 4}, ValueError, "example 1 is 5 tokens deep"),
    ],
)
def test_a_bad_example_raises_with_its_index(options, example, error, message):
    good = GOOD | ({"scores": [1.0, 2.0]} if "score_margin" in options else {})
    with pytest.raises(error, match=message):
        DataCollatorForMultiAnswerReward(**options)([good, example])


def test_an_empty_batch_raises():
    with pytest.raises(ValueError, match="examples is empty"):
        DataCollatorForMultiAnswerReward()([])


# --- what the trainer refuses

PAIR = {"prompt": "w8 ", "chosen": "w9", "rejected": "w10"}
LIST = {"prompt": "w8 ", "answers": ["w9", "w10"]}


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (
            {"prompt": "w8", "completion": "w9"},
            ValueError,
            "has no answers, and no chosen .*It has: prompt, completion",
        ),
        (
            {"prompt_ids": [8], "scores": [1, 2]},
            ValueError,
            "has no answers, and no chosen .*It has: prompt_ids, scores",
        ),
        (PAIR | {"chosen": " "}, ValueError, "answer 0 of example 0 of the train dataset is empty"),
        (PAIR | {"rejected": "<eos>"}, ValueError, "answer 1 of example 0 of the train dataset is empty"),
        ({"prompt": [USER], "answers": [[BEST], []]}, ValueError, "answer 1 of example 0 .* is empty"),
        ({"prompt": [USER], "answers": [[BEST], [BEST | {"content": ""}]]}, ValueError, "answer 1 of .* is empty"),
        (LIST | {"answers": ["w9"]}, ValueError, "example 0 of the train dataset has 1 answers"),
        (LIST | {"answers": "w9"}, TypeError, "answers of example 0 .* must all be strings, or all lists"),
        (LIST | {"prompt": 8}, TypeError, "prompt of example 0 .* must be a string or a list of messages, got 8"),
        (LIST | {"scores": [1.0, 1.0]}, ValueError, "scores of example 0 of the train dataset are all 1"),
        (LIST | {"scores": [1.0]}, ValueError, "example 0 of the train dataset has 1 scores, but 2 answers"),
        (
            {"prompt": "w9", "chosen": [USER, BEST], "rejected": [USER, WORST]},
            ValueError,
            "answers of example 0 .* neither begin with its prompt, a string, nor with the assistant",
        ),
        (
            {"prompt_ids": [8] * 64, "answers_ids": [[9], [10]]},
            ValueError,
            "example 0 of the train dataset, as prepared, is 65 tokens deep, but the model has 64 positions",
        ),
        ({"prompt_ids": [8] * 40, "answers_ids": [[9], []]}, ValueError, "answer 1 of example 0 .* is empty"),
    ],
)
def test_a_bad_row_raises_before_the_first_step(row, error, message, model_path, tokenizer, tmp_path):
    with pytest.raises(error, match=message):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row])


def test_messages_name_the_row_and_the_dataset(model_path, tokenizer, tmp_path):
    good = [without(row, "margin") for row in rows(3)]
    with pytest.raises(ValueError, match="answer 0 of example 3 of the held_out dataset is empty"):
        make(
            MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path,
            eval_dataset={"held_out": Dataset.from_list([*good, PAIR | {"chosen": ""}])},
        )  # fmt: skip
    deep = {"prompt": "w8 " * 70, "chosen": "w9", "rejected": "w10"}
    with pytest.raises(ValueError, match="example 3 of the eval dataset, as prepared, is 72 tokens deep"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, eval_dataset=Dataset.from_list([*good, deep]))


def test_arguments_that_do_not_serve_raise(model_path, tokenizer, tmp_path):
    def trainer(data=None, model=None, **options):
        return make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, model=model, **options)

    with pytest.raises(ValueError, match="need attn_implementation='flashmask', but the model has 'eager'"):
        trainer(model=load(model_path, "eager"))
    with pytest.raises(ValueError, match="but the model has 'sdpa'"):
        trainer(model=model_path, model_init_kwargs={"attn_implementation": "sdpa"})
    with pytest.raises(
        TypeError, match="data_collator must be a DataCollatorForMultiAnswerReward, got DataCollatorFor"
    ):
        trainer(data_collator=DataCollatorForPreference(0))
    with pytest.raises(ValueError, match=r"args.row_length is 64, but that of data_collator is None"):
        trainer(data_collator=DataCollatorForMultiAnswerReward(), row_length=64)
    prefix = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PrefixTuningConfig adds virtual tokens"):
        trainer(peft_config=prefix)
    with pytest.raises(ValueError, match="PrefixTuningConfig adds virtual tokens"):
        trainer(model=get_peft_model(load(model_path), prefix))
    with pytest.raises(ValueError, match="loss_type must be one of pairwise, listwise, got 'pointwise'"):
        trainer(loss_type="pointwise")
    with pytest.raises(ValueError, match="every example of the train dataset has an answer that brings it over"):
        trainer(max_length=1)
    with pytest.raises(ValueError, match="the eval dataset is empty"):
        trainer(eval_dataset=Dataset.from_list([]))
    with pytest.raises(ValueError, match=r"example 0 .* has neither scores nor a margin, but score_margin is 0.5"):
        trainer(score_margin=0.5)
    with pytest.raises(ValueError, match="example 0 of the train dataset has a margin, and scores that score_margin"):
        trainer([PAIR | {"margin": 1.0, "score_chosen": 2.0, "score_rejected": 1.0}], score_margin=0.5)
    with pytest.raises(TypeError, match="score_rejected of example 0 of the train dataset must be a number, got None"):
        trainer([PAIR | {"score_chosen": 2.0, "score_rejected": None}], score_margin=0.5)
    with pytest.raises(
        ValueError, match=r"example 0 of the train dataset, as prepared, has .* more than the 6 of a row"
    ):
        trainer(row_length=6)


def test_what_reads_input_ids_is_refused(model_path, tokenizer, tmp_path):
    for option in ({"include_num_input_tokens_seen": "all"}, {"include_for_metrics": ["inputs"]}):
        with pytest.raises(ValueError, match="include_num_input_tokens_seen and include_for_metrics"):
            make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, rows(), **option)


def test_margins_that_some_rows_lack_are_refused_at_once(model_path, tokenizer, tmp_path):
    data = rows()
    data[3]["margin"] = None
    with pytest.raises(ValueError, match="example 3 of the train dataset, as prepared, has no margin, but others have"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
def test_a_pad_token_that_is_the_eos_token_is_warned_of(model_path, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flashmask_hf"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, rows(), pad_token="<pad>")
        assert "pad_token is eos_token" not in caplog.text
        make(MultiAnswerRewardTrainer, model_path, copy.deepcopy(tokenizer), tmp_path, rows(), pad_token="<eos>")
    assert "pad_token is eos_token" in caplog.text


def test_rows_that_mix_whole_sequences_and_a_question_are_refused():
    with pytest.raises(ValueError, match="example 0 has chosen_ids beside prompt_ids"):
        DataCollatorForMultiAnswerReward()([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}])
