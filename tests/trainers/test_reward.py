"""The reward trainer computes each question once; with two answers, it equals stock TRL."""

import copy
import logging

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tools.model_pairs import BOUND
from tools.rewards import (
    CLOSE,
    OURS,
    defined_pairwise,
    load,
    losses_of,
    make,
    margin_rows,
    pairs_of,
    scored,
    separate_rewards,
    settings,
    without,
)
from tools.support import covering
from tools.tiny import (
    CHECKPOINTING,
    EXACT,
    FLOAT32,
    TRAINER_WARNINGS,
    assert_same_gradients,
    assert_same_step,
    conversation,
    gradients_of,
    one_step,
    preference_rows,
)
from tools.vision import tiny_processor
from transformers import HfArgumentParser
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from flashmask_hf.collators import DataCollatorForMultiAnswerReward
from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]


def implicit(row):
    """Put the prompt at the start of both answers."""
    prompt = row.pop("prompt")
    return row | {key: prompt + row[key] for key in ("chosen", "rejected")}


FORMS = {
    "standard": dict,
    "standard, implicit": lambda row: implicit(dict(row)),
    "conversational": conversation,
    "conversational, implicit": lambda row: implicit(conversation(row)),
}


# --- two answers: stock TRL

OPTIONS = {"none": {}, "margin": {}, "centering": {"center_rewards_coefficient": 0.3}}


LORA = [pytest.param(False, id="full"), pytest.param(True, id="lora")]


@pytest.mark.parametrize(("lora", "option", "form"), covering(2, LORA, OPTIONS, FORMS))
def test_two_answers_equal_stock_trl(lora, option, form, model_path, tokenizer, tmp_path):
    data = [FORMS[form](row) for row in margin_rows()]
    if option != "margin":
        data = [without(row, "margin") for row in data]
    ours, stock = (
        make(c, model_path, tokenizer, tmp_path, data, lora=lora, **OPTIONS[option])
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )
    assert_same_step(ours, stock, *OURS)
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
    assert_same_step(
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), **ours),
        make(RewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), **stock),
        *OURS,
    )


def test_identical_answers_have_identical_rewards(model_path, tokenizer, tmp_path):
    """They count as not preferred. In stock TRL that is up to the rounding of two sequences of a batch."""
    rows = [row | {"rejected": row["chosen"]} if index % 4 else row for index, row in enumerate(preference_rows(8, 5))]
    ours, stock = (
        make(c, model_path, tokenizer, tmp_path, rows, per_device_train_batch_size=8)
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )
    (loss, gradients, metrics), (expected_loss, expected_gradients, _) = one_step(ours), one_step(stock)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    assert_same_gradients(gradients, expected_gradients)
    distinct = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, rows[::4], per_device_train_batch_size=2)
    assert metrics["accuracy"] == one_step(distinct)[2]["accuracy"] / 4
    tied = [{"prompt_ids": [5, 6, 7], "answers_ids": [[8, 9, 10]] * 5, "scores": [5.0, 4.0, 3.0, 2.0, 1.0]}]
    many = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tied)
    assert one_step(many)[2]["accuracy"] == 0


def test_identical_answers_have_identical_rewards_in_every_row_of_the_head(model_path, tokenizer, tmp_path):
    """A head may round equal hidden states apart, by their place in the batch."""
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path)
    tied = {"prompt_ids": [5, 6, 7], "answers_ids": [[8, 9, 10], [11], [8, 9, 10]], "scores": [1.0, 2.0, 0.0]}
    batch = trainer.data_collator([tied, tied | {"answers_ids": [[8], [8]], "scores": [1.0, 0.0]}])

    def rounded(module, args, output):
        return output + 1e-6 * torch.arange(output.numel()).view_as(output)

    trainer.model.score.register_forward_hook(rounded)
    predicted = trainer.compute_loss(trainer.model, batch, return_outputs=True)[1].logits
    assert predicted[0, 0] == predicted[0, 2] != predicted[0, 1]
    assert predicted[1, 0] == predicted[1, 1]


def test_ties_count_as_not_preferred(model_path, tokenizer, tmp_path):
    """A score head of zeros gives every answer the same reward."""
    ours, stock = (make(c, model_path, tokenizer, tmp_path) for c in (MultiAnswerRewardTrainer, RewardTrainer))
    for trainer in (ours, stock):
        torch.nn.init.zeros_(trainer.model.score.weight)
        assert one_step(trainer)[2]["accuracy"] == 0


def test_predict_prepares_raw_rows(model_path, tokenizer, tmp_path):
    raw = Dataset.from_list(preference_rows(3, 1))
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, eval_dataset=raw)
    of_raw = trainer.predict(raw).predictions
    np.testing.assert_array_equal(of_raw, trainer.predict(trainer.eval_dataset).predictions)
    assert of_raw.shape == (3, 2)
    for prediction in (trainer.predict(raw, None, "held_out"), trainer.predict(raw, metric_key_prefix="held_out")):
        assert "held_out_loss" in prediction.metrics
    with pytest.raises(ValueError, match="example 0 of the test dataset has 1 answers"):
        trainer.predict(Dataset.from_list([{"prompt": "w5", "answers": ["w6"]}]))


def test_tokenized_columns_of_trl_are_used_unchanged(model_path, tokenizer, tmp_path):
    stock = make(RewardTrainer, model_path, tokenizer, tmp_path, margin_rows())
    tokenized = stock.train_dataset.select_columns(["chosen_ids", "rejected_ids", "margin"])
    ours = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized)
    assert ours.train_dataset.column_names == tokenized.column_names
    assert_same_step(ours, stock, *OURS)


def test_a_trained_adapter_equals_stock_trl(model_path, tokenizer, tmp_path):
    def adapted(attention):
        torch.manual_seed(5)
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="SEQ_CLS")
        return get_peft_model(load(model_path, attention), lora)

    assert_same_step(
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, model=adapted("flashmask")),
        make(RewardTrainer, model_path, tokenizer, tmp_path, model=adapted("eager")),
        *OURS,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{}, {"activation_offloading": True}, {CHECKPOINTING: True}], ids=str)
def test_the_gpu_equals_the_cpu(option, model_path, tokenizer, tmp_path):
    ours, stock = (load(model_path, attention, torch.float32) for attention in ("flashmask", "eager"))
    options = option | {"use_cpu": False, "model": ours}
    on_gpu = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), **options)
    with on_gpu.maybe_activation_offload_context:
        loss, gradients, _ = one_step(on_gpu)
    on_cpu = make(RewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), model=stock)
    expected, expected_gradients, _ = one_step(on_cpu)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients, expected_gradients, 1e-3)


# --- training and evaluation


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
    torch.testing.assert_close(loss.detach(), total, **CLOSE)
    assert_same_gradients(gradients, gradients_of(trainer.model))


@pytest.mark.parametrize("lora", LORA)
def test_training_follows_stock_trl(lora, model_path, tokenizer, tmp_path):
    held_out = preference_rows(6, seed=3)
    options = {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    ours, stock = (
        make(
            c, model_path, tokenizer, tmp_path, lora=lora, learning_rate=1e-2,
            eval_dataset=Dataset.from_list(held_out), **options,
        )
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )  # fmt: skip
    losses, expected = losses_of(ours), losses_of(stock)
    assert len(losses) == 8
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    for one, other in zip(losses, expected, strict=True):
        assert one.keys() == other.keys() | {*OURS}
        assert {key: one[key] for key in other} == pytest.approx(other, rel=FLOAT32, abs=FLOAT32)
        assert one["accuracy_of_2_answers"] == pytest.approx(one["accuracy"])  # of the same two batches
    fresh = Dataset.from_list(preference_rows(3, seed=4))
    for dataset in (None, fresh):
        one, other = ours.evaluate(dataset), stock.evaluate(dataset)
        for name, value in other.items():
            if "runtime" not in name and "per_second" not in name:
                assert one[name] == pytest.approx(value, rel=FLOAT32, abs=FLOAT32), name


def test_the_last_step_of_an_epoch_logs_all_of_its_batches(model_path, tokenizer, tmp_path):
    """13 rows make three batches of four and one of one. Trainer fetches all four before it computes the first."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-2}
    ours, stock = (
        make(c, model_path, tokenizer, tmp_path, preference_rows(13), **options)
        for c in (MultiAnswerRewardTrainer, RewardTrainer)
    )
    for one, other in zip(losses_of(ours), losses_of(stock), strict=True):
        assert {key: one[key] for key in other} == pytest.approx(other, rel=FLOAT32, abs=FLOAT32)
    ours.state.save_to_json(str(tmp_path / "state.json"))  # takes no tensors


def test_a_tensor_parallel_group_counts_its_tokens_once(model_path, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(MultiAnswerRewardTrainer, "get_tp_size", lambda self: 2)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path)
    assert "gather_for_metrics" in vars(trainer.accelerator)  # in place of accelerate's, which cuts copies as if rows
    alone = one_step(trainer)[2]["num_tokens"]
    trainer._total_train_tokens, trainer._tp_size = 0, 2
    assert one_step(trainer)[2]["num_tokens"] == alone // 2


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
    trainer.evaluate(Dataset.from_list(data[:2]))  # counts for no other
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
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=FLOAT32)
    assert metrics["eval_best_first"] == 0.5
    assert metrics["eval_num_tokens"] == 0  # of training

    assert seen["predictions"].shape == seen["scores"].shape == (7, 6)
    predicted = trainer.predict(trainer.eval_dataset).predictions
    np.testing.assert_array_equal(predicted, seen["predictions"])
    for row, labels, own, example in zip(predicted, seen["scores"], rewards, data, strict=True):
        np.testing.assert_allclose(row[: len(own)], own, rtol=EXACT, atol=EXACT)
        np.testing.assert_allclose(labels[: len(own)], example["scores"])
        assert (row[len(own) :] == -100).all()
        assert (labels[len(own) :] == -100).all()
    metrics = trainer.evaluate(Dataset.from_list(data[:2]))
    assert metrics["eval_accuracy"] == pytest.approx(np.mean([right[2][0], right[6][0]]))
    assert "eval_accuracy_of_3_answers" not in metrics


def test_training_learns_a_ranking_of_many_answers(model_path, tokenizer, tmp_path):
    trainer = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, scored((2, 6, 3, 4)), loss_type="listwise",
        max_steps=20, learning_rate=1e-2,
    )  # fmt: skip
    losses = losses_of(trainer)
    assert losses[-1]["loss"] < losses[0]["loss"] / 4
    assert losses[-1]["accuracy_of_6_answers"] == 1.0


def test_a_streamed_dataset_trains_and_evaluates(model_path, tokenizer, tmp_path):
    def stream():
        yield from preference_rows()

    def too_long():
        yield {"prompt": "w8 " * 70, "chosen": "w9", "rejected": "w10"}
        yield from stream()

    streamed = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, IterableDataset.from_generator(too_long),
        max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=3, max_length=60,
        eval_dataset={"held_out": IterableDataset.from_generator(stream)},
    )  # fmt: skip
    whole = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, max_steps=4, per_device_train_batch_size=2,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    assert not streamed.args.accelerator_config.dispatch_batches
    assert [e["loss"] for e in losses_of(streamed)] == pytest.approx([e["loss"] for e in losses_of(whole)], rel=FLOAT32)
    found, expected = streamed.evaluate(), whole.evaluate(Dataset.from_list(preference_rows()))
    assert found["eval_accuracy_of_2_answers"] > 0
    assert found["eval_held_out_loss"] == pytest.approx(expected["eval_loss"], rel=FLOAT32)  # of batches of 3, 3 and 2


def test_losses_and_rewards_of_a_sixteen_bit_model_are_float32(model_path, tokenizer, tmp_path, monkeypatch):
    monkeypatch.undo()
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, model=load(model_path).bfloat16())
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.dtype == outputs.logits.dtype == torch.float32


def test_the_model_keeps_no_cache(model_path, tokenizer, tmp_path):
    trainer, caches = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path), []
    trainer.model.config.use_cache = True
    trainer.model.register_forward_hook(lambda model, args, output: caches.append(output.past_key_values))
    one_step(trainer)
    assert caches == [None]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_ignores_the_mask_raises_in_the_first_step(compiled, model_path, tokenizer, tmp_path):
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path)
    layer = trainer.model.base_model.layers[0]
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    if compiled:
        layer.compile(backend="eager")
    with pytest.raises(ValueError, match="mask to 1 of its 2 layers"):
        trainer.train()


# --- arguments


@pytest.mark.parametrize("given", ["name", "name and options", "plain config", "collator"])
def test_arguments_may_be_passed_in_several_ways(given, model_path, tokenizer, tmp_path, monkeypatch):
    dtype, bound = torch.float64, EXACT
    if given.startswith("name"):  # TRL loads no float64 by name
        monkeypatch.undo()
        dtype, bound = torch.float32, BOUND
    ours, stock = (load(model_path, attention, dtype) for attention in ("flashmask", "eager"))
    dataset = Dataset.from_list(preference_rows())
    args = settings(tmp_path)
    keywords = {"train_dataset": dataset, "processing_class": tokenizer}
    if given == "collator":
        collator = DataCollatorForMultiAnswerReward(row_length=64, pad_token_id=5)
        args.row_length = 64
        trainer = MultiAnswerRewardTrainer(ours, args, collator, **keywords)
        assert (trainer.data_collator.row_length, trainer.data_collator.pad_token_id) == (64, 5)
        assert collator.max_position_embeddings is None
    elif given == "plain config":
        args = settings(tmp_path, RewardConfig, pad_to_multiple_of=8)
        trainer = MultiAnswerRewardTrainer(ours, args, **keywords)
        assert trainer.data_collator.pad_to_multiple_of == 8
    else:
        if given == "name and options":
            args.model_init_kwargs = options = {"dtype": "float32"}
        trainer = MultiAnswerRewardTrainer(model_path, args, **keywords)
        assert trainer.model.config._attn_implementation == "flashmask"
        if given == "name and options":
            assert options == {"dtype": "float32"}
    assert trainer.data_collator.max_position_embeddings == 64
    same = make(RewardTrainer, model_path, tokenizer, tmp_path, model=stock)
    assert_same_step(trainer, same, *OURS, bound=bound)


def test_the_command_line_sets_the_options():
    parser = HfArgumentParser(MultiAnswerRewardConfig)
    flags = ["--loss_type", "listwise", "--score_margin", "0.5", "--row_length", "4096", "--report_to", "none"]
    (args,) = parser.parse_args_into_dataclasses([*flags, "--use_cpu", "--bf16", "false"])
    assert (args.loss_type, args.score_margin, args.row_length) == ("listwise", 0.5, 4096)


PAIR = {"prompt": "w8 ", "chosen": "w9", "rejected": "w10"}


def test_invalid_arguments_raise(model_path, tokenizer, tmp_path):
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
    with pytest.raises(ValueError, match=r"args.row_length is 64, but data_collator.row_length is None"):
        trainer(data_collator=DataCollatorForMultiAnswerReward(), row_length=64)
    with pytest.raises(ValueError, match=r"args.score_margin is 0.5, but data_collator.score_margin is 0.0"):
        trainer(data_collator=DataCollatorForMultiAnswerReward(), score_margin=0.5)
    prefix = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PrefixTuningConfig adds virtual tokens"):
        trainer(peft_config=prefix)
    with pytest.raises(ValueError, match="PrefixTuningConfig adds virtual tokens"):
        trainer(model=get_peft_model(load(model_path), prefix))
    with pytest.raises(ValueError, match="loss_type must be one of pairwise, listwise, got 'pointwise'"):
        trainer(loss_type="pointwise")
    with pytest.raises(ValueError, match="processing_class must be a tokenizer, for TRL has no reward trainer of im"):
        make(MultiAnswerRewardTrainer, model_path, tiny_processor("llava"), tmp_path)
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


def test_options_that_read_input_ids_raise(model_path, tokenizer, tmp_path):
    for option in ({"include_num_input_tokens_seen": "all"}, {"include_for_metrics": ["inputs"]}):
        with pytest.raises(ValueError, match="include_num_input_tokens_seen and include_for_metrics"):
            make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), **option)


def test_a_frozen_head_is_taken_if_it_is_saved_or_nothing_learns(model_path, tokenizer, tmp_path):
    whole = load(model_path)
    whole.score.requires_grad_(False)
    adapted = get_peft_model(load(model_path), LoraConfig(target_modules=["q_proj"], inference_mode=True))
    for model in (whole, adapted):
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, model=model)
        assert trainer.predict(trainer.train_dataset).predictions.shape == (8, 2)


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
def test_a_pad_token_that_is_the_eos_token_warns(model_path, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flashmask_hf"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, margin_rows(), pad_token="<pad>")
        assert "pad_token is eos_token" not in caplog.text
        other = copy.deepcopy(tokenizer)
        make(MultiAnswerRewardTrainer, model_path, other, tmp_path, margin_rows(), pad_token="<eos>")
    assert "pad_token is eos_token" in caplog.text
