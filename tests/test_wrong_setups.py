"""What users may get wrong with a trainer: every set-up gives its own clear error or the loss of stock TRL."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, Features, IterableDataset, Json, List, Value
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from tools import model_zoo
from tools.tiny import (
    FUSED_HEAD,
    TRAINER_WARNINGS,
    llama_config,
    preference_rows,
    trainer_settings,
    word_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DefaultDataCollator,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from flashmask_hf.collators import (
    DataCollatorForMultiAnswerReward,
    DataCollatorForPackedLanguageModeling,
    DataCollatorForSharedQuestion,
    pack_dataset,
)
from flashmask_hf.hf.checks import CHECKS
from flashmask_hf.trainers import (
    MultiAnswerRewardConfig,
    MultiAnswerRewardTrainer,
    PackedSFTTrainer,
    SharedQuestionDPOConfig,
    SharedQuestionDPOTrainer,
    sft_data,
    weighing,
)
from flashmask_hf.trainers.data_checks import without_media
from flashmask_hf.trainers.formats import answer_sequences, preference_columns

pytestmark = TRAINER_WARNINGS

TEXTS = [{"text": "w5 w6 w7 w8 w9"}, {"text": "w10 w11 w12"}, {"text": "w13 w14 w15 w16"}, {"text": "w17 w18"}]
CONVERSATION = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
SHAREGPT = [{"from": "human", "value": "w5"}]
PAIRS = preference_rows(4)
ROWS = {"sft": TEXTS, "dpo": PAIRS, "reward": PAIRS}
OURS = {"sft": PackedSFTTrainer, "dpo": SharedQuestionDPOTrainer, "reward": MultiAnswerRewardTrainer}
STOCK = {"sft": SFTTrainer, "dpo": DPOTrainer, "reward": RewardTrainer}
CONFIGS = {"sft": SFTConfig, "dpo": SharedQuestionDPOConfig, "reward": MultiAnswerRewardConfig}
STOCK_CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig}
LENGTHS = {"max_length": 48}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model_of(task, attention="flashmask", **changes):
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    labels = {"num_labels": 1} if task == "reward" else {}
    config = llama_config(initializer_range=0.3, **labels, **changes)
    auto.from_config(config).save_pretrained("saved")  # TRL loads a reference model from where the policy came
    return auto.from_pretrained("saved", attn_implementation=attention)


def build(task, *, rows=None, model=None, config=None, args=None, stock=False, trainer=None, collator=None, **options):
    """Build a trainer of a task on `rows` with the options of its config."""
    names = ("ref_model", "peft_config", "eval_dataset", "split", "formatting_func", "compute_loss_func")
    keywords = {name: options.pop(name) for name in names if name in options}
    config = config or (STOCK_CONFIGS if stock else CONFIGS)[task]
    dataset = ROWS[task] if rows is None else rows
    return (trainer or (STOCK if stock else OURS)[task])(
        model=model or model_of(task, "eager" if stock else "flashmask"),
        args=args or config(**trainer_settings("out") | LENGTHS | options),
        data_collator=collator,
        train_dataset=Dataset.from_list(dataset) if isinstance(dataset, list) else dataset,
        processing_class=word_tokenizer(),
        **keywords,
    )


def first_loss(trainer):
    """Return the loss of one step, after a change of the policy, so that it differs from a reference model."""
    trainer.args.max_steps = 1
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def plain(task):
    return TrainingArguments(**trainer_settings("out"))


def adapter(kind, task):
    if kind is LoraConfig:
        return LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    return kind(task_type="SEQ_CLS" if task == "reward" else "CAUSAL_LM", num_virtual_tokens=3)


# Set-ups of each trainer: a function of the task, and the error
EACH = {
    "TrainingArguments": (lambda task: build(task, args=plain(task)), r"args must be a \w+Config, got TrainingArgum"),
    "the config of another trainer": (
        lambda task: build(
            task, args={"sft": DPOConfig, "dpo": RewardConfig, "reward": SFTConfig}[task]("out", **BARE)
        ),
        r"args must be a \w+Config, got \w+Config; build it with \w+Config\(output_dir=",
    ),
    "another collator": (
        lambda task: build(task, collator=DefaultDataCollator()),
        r"data_collator must be a DataCollatorFor\w+, got DefaultDataCollator.*leave it out",
    ),
    "the collator of another trainer": (
        lambda task: build(
            task,
            collator=DataCollatorForMultiAnswerReward() if task == "sft" else DataCollatorForPackedLanguageModeling(),
        ),
        r"data_collator must be a DataCollatorFor\w+, got DataCollatorFor",
    ),
    "prefix tuning": (
        lambda task: build(task, peft_config=adapter(PrefixTuningConfig, task)),
        "PrefixTuningConfig adds virtual tokens; use LoRA",
    ),
    "prompt tuning, in the model": (
        lambda task: build(task, model=get_peft_model(model_of(task), adapter(PromptTuningConfig, task))),
        "PromptTuningConfig adds virtual tokens",
    ),
    "activated LoRA": (lambda task: build(task, peft_config=adapter(LoraConfig, task)), "alora_invocation_tokens"),
    "NEFTune": (
        lambda task: build(task, neftune_noise_alpha=5.0),
        "neftune_noise_alpha scales noise by a sequence.s length",
    ),
    "dispatched batches": (
        lambda task: build(task, accelerator_config={"dispatch_batches": True}),
        "dispatch_batches cuts batches apart.*set it to false",
    ),
    "a document beyond the model's positions": (
        lambda task: build(task, rows=beyond(task), max_length=256),
        "64 positions",
    ),
}
BARE = {"report_to": "none", "use_cpu": True, "bf16": False}


def beyond(task):
    long = "w5 " * 70
    return [{"text": long}] if task == "sft" else [{"prompt": long, "chosen": "w6", "rejected": "w7"}]


@pytest.mark.parametrize("task", OURS)
@pytest.mark.parametrize("name", EACH)
def test_each_trainer_refuses(name, task):
    set_up, message = EACH[name]
    with pytest.raises((TypeError, ValueError), match=message):
        set_up(task)


def changed_attention(task):
    trainer = build(task)
    trainer.model.set_attn_implementation("sdpa")
    return first_loss(trainer)


def bert(task):
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="flashmask")


def scored(scores):
    return [{"prompt": "w5", "answers": ["w6", "w7"], "scores": scores}]


def by_name(task, attention):
    model_of(task).save_pretrained("named")
    return build(task, model="named", model_init_kwargs={"attn_implementation": attention})


# Set-ups of one trainer, and the error
ONE = {
    "sft, no max_length": (lambda: build("sft", max_length=None), "max_length is None, but packing needs it"),
    "sft, images to evaluate": (
        lambda: build("sft", eval_dataset=Dataset.from_list([{"text": "w5", "image": "a"}])),
        "example 0 of the eval dataset has images, video or audio in its column 'image', but this trainer packs text",
    ),
    "sft, images to evaluate later": (
        lambda: build("sft").evaluate(Dataset.from_list([{"text": "w5", "images": x} for x in (None, ["a"])])),
        "example 1 of the eval dataset has images",
    ),
    "sft, images in messages": (
        lambda: build("sft", rows=[{"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}]),
        "example 0 of the train dataset has images, video or audio in its column 'messages'",
    ),
    "sft, no whole batch": (
        lambda: build("sft", dataloader_drop_last=True),
        r"drops every row of the train dataset: 1 as prepared, but a .* 4; lower per_device_train_batch_size",
    ),
    "sft, no whole batch to evaluate": (
        lambda: build("sft", dataloader_drop_last=True, max_length=6, eval_dataset=Dataset.from_list(TEXTS[:1])),
        r"drops every row of the eval dataset: 1 as prepared, but a .* 4; lower per_device_eval_batch_size",
    ),
    "dpo, no whole batch": (
        lambda: build("dpo", rows=PAIRS[:3], dataloader_drop_last=True),
        "dataloader_drop_last=True drops every row of the train dataset: 3 as",
    ),
    "reward, no whole batch": (
        lambda: build("reward", rows=PAIRS[:3], dataloader_drop_last=True),
        "dataloader_drop_last=True drops every row of the train dataset: 3 as",
    ),
    "sft, no rows": (
        lambda: build("sft", rows=Dataset.from_list(TEXTS).select([])),
        "the train dataset is empty; give it at least one row",
    ),
    "sft, no rows to evaluate": (
        lambda: build("sft", eval_dataset={"held_out": Dataset.from_list(TEXTS).select([])}),
        "the held_out dataset is empty; give it at least one row",
    ),
    "sft, no rows to evaluate later": (
        lambda: build("sft").evaluate(Dataset.from_list(TEXTS).select([])),
        "the eval dataset is empty; give it at least one row",
    ),
    "sft, text in another column": (
        lambda: build("sft", rows=[{"story": "w5 w6"}]),
        "no text and no input_ids; rename a column, set dataset_text_field.*It has: story",
    ),
    "sft, text in another column, that TRL packs": (
        lambda: build("sft", rows=[{"story": "w5 w6"}], packing=True),
        "the train dataset has no messages, no prompt with completion, no text",
    ),
    "sft, prompts without completions": (
        lambda: build("sft", rows=[{"prompt": "w5 w6"}]),
        "no prompt with completion.*It has: prompt",
    ),
    "sft, a prompt beside messages": (
        lambda: build("sft", rows=[{"prompt": "w5", "messages": CONVERSATION}]),
        "has a prompt without a completion.*remove or rename the column prompt to train on messages",
    ),
    "sft, messages with other keys": (
        lambda: build("sft", rows=[{"messages": [{"from": "user", "value": "w5"}]}]),
        "the train dataset has messages with the keys from, value; rename them to role and content",
    ),
    "sft, completions with other keys": (
        lambda: build("sft", rows=[{"prompt": SHAREGPT, "completion": SHAREGPT}]),
        "the train dataset has messages with the keys from, value; rename them to role and content",
    ),
    "sft, conversations with other keys, that TRL packs": (
        lambda: build("sft", rows=[{"conversations": CONVERSATION}], packing=True),
        "the train dataset has messages with the keys role, content; rename them to from and value.* all others",
    ),
    "sft, a formatted text beside messages": (
        lambda: build("sft", rows=[{"messages": CONVERSATION}], formatting_func=str),
        "TRL would read the column messages of the train dataset, and not the text of formatting_func",
    ),
    "sft, a formatted text beside another one": (
        lambda: build("sft", rows=[{"story": "w5"}], formatting_func=str, dataset_text_field="story"),
        "TRL would read dataset_text_field='story', and not the text of formatting_func; apply it before",
    ),
    "sft, no truncation": (
        lambda: build("sft", max_length=4, truncation_mode=None),
        r"example 0 has 6 tokens, more than max_length 4.*truncation_mode='keep_start'",
    ),
    "sft, TRL packs for prompt tuning": (
        lambda: build("sft", packing=True, peft_config=adapter(PromptTuningConfig, "sft")),
        "PromptTuningConfig adds virtual tokens",
    ),
    "sft, NEFTune on rows of TRL": (
        lambda: build("sft", padding_free=True, max_length=None, neftune_noise_alpha=5.0),
        "neftune_noise_alpha scales noise by a sequence.s length",
    ),
    "sft, TRL joins documents": (
        lambda: build("sft", packing=True, packing_strategy="wrapped"),
        "packing_strategy='wrapped' does not record where documents begin.*choose 'bfd'",
    ),
    "sft, split and truncation": (lambda: build("sft", split=True), "leave one of them out .*truncation_mode=None"),
    "sft, a recurrent model": (
        lambda: first_loss(build("sft", model=model_zoo.build("recurrent_gemma", "flashmask"))),
        "has recurrent or convolutional layers.*one document per row",
    ),
    "sft, attention changed afterwards": (
        lambda: changed_attention("sft"),
        "gave the packed row's mask to 0 of its 2 layers",
    ),
    "sft, padded rows": (
        lambda: build("sft", rows=[{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}] * 4),
        "is padded|padding",
    ),
    "dpo, images to evaluate": (
        lambda: build("dpo", eval_dataset={"held_out": Dataset.from_list([PAIRS[0] | {"images": ["a"]}])}),
        "example 0 of the held_out dataset has images.*but this trainer packs text; pass a processor as",
    ),
    "reward, several losses": (
        lambda: build("reward", loss_type=["pairwise"]),
        r"loss_type must be one of pairwise, listwise, got \['pairwise'\]",
    ),
    "dpo, eager": (
        lambda: build("dpo", model=model_of("dpo", "eager")),
        r"need attn_implementation='flashmask', but the model has 'eager'.*set_attn_implementation\('flashmask'\)",
    ),
    "reward, sdpa": (
        lambda: build("reward", model=model_of("reward", "sdpa")),
        "need attn_implementation='flashmask', but the model has 'sdpa'",
    ),
    "dpo, sdpa by name": (lambda: by_name("dpo", "sdpa"), "need attn_implementation='flashmask', but the model has"),
    "dpo, attention changed afterwards": (lambda: changed_attention("dpo"), "but the model has 'sdpa'"),
    "reward, attention changed afterwards": (lambda: changed_attention("reward"), "but the model has 'sdpa'"),
    "dpo, a reference with eager": (
        lambda: build("dpo", ref_model=model_of("dpo", "eager")),
        "need attn_implementation='flashmask', but the model has 'eager'",
    ),
    "dpo, a reference by name": (
        lambda: build("dpo", ref_model="saved"),
        "ref_model must be a model, got the name 'saved'; leave it out",
    ),
    "sft, sampling by length": (  # transformers would take the number of documents for the length of a row
        lambda: build("sft", train_sampling_strategy="group_by_length"),
        "train_sampling_strategy='group_by_length' needs the column 'length', which the train dataset.*leave it out",
    ),
    "dpo, sampling by length": (
        lambda: build("dpo", train_sampling_strategy="group_by_length"),
        "train_sampling_strategy='group_by_length' needs the column 'length', which the train dataset.*leave it out",
    ),
    "reward, sampling by length": (
        lambda: build("reward", train_sampling_strategy="batch_rebalance"),
        "train_sampling_strategy='batch_rebalance' needs the column 'length', which the train dataset.*leave it out",
    ),
    "sft, label smoothing that its loss ignores": (
        lambda: build("sft", label_smoothing_factor=0.1, loss_type="dft"),
        "label_smoothing_factor=0.1: this trainer's loss does not read it; leave it at 0",
    ),
    "sft, label smoothing beside a loss of the caller's": (
        lambda: build("sft", label_smoothing_factor=0.1, compute_loss_func=len),
        "label_smoothing_factor=0.1: this trainer's loss does not read it",
    ),
    "reward, the fused loss of Liger": (
        lambda: build("reward", use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True}),
        "needs a language model's head; leave it out",
    ),
    "dpo, label smoothing that its loss ignores": (
        lambda: build("dpo", label_smoothing=0.1, loss_type=["sigmoid", "ipo"]),
        r"label_smoothing=0.1 changes nothing with loss_type=\['sigmoid', 'ipo'\]; leave it at 0, or .* robust",
    ),
    "dpo, label smoothing of tokens": (
        lambda: build("dpo", label_smoothing_factor=0.1),
        "label_smoothing_factor=0.1: this trainer's loss does not read it; leave it at 0",
    ),
    "reward, an adapter without its task": (
        lambda: build("reward", peft_config=LoraConfig(target_modules=["q_proj"])),
        r"does not save the weights of the head 'score'.*task_type='SEQ_CLS', or modules_to_save=\['score'\]",
    ),
    "reward, an adapter of all layers without its task": (
        lambda: build("reward", peft_config=LoraConfig(target_modules="all-linear")),
        r"does not save the weights of the head 'score'.*task_type='SEQ_CLS', or modules_to_save=\['score'\]",
    ),
    "reward, label smoothing of tokens": (
        lambda: build("reward", label_smoothing_factor=0.1),
        "label_smoothing_factor=0.1: this trainer's loss does not read it; leave it at 0",
    ),
    "reward, an adapter of another task": (
        lambda: build("reward", peft_config=LoraConfig(task_type="CAUSAL_LM")),
        "task_type='CAUSAL_LM' does not save a reward model's head; use 'SEQ_CLS'",
    ),
    "dpo, no rows": (
        lambda: build("dpo", rows=Dataset.from_list(PAIRS).select([])),
        "the train dataset is empty; give it at least one row",
    ),
    "dpo, no rejected answer": (
        lambda: build("dpo", rows=[{"prompt": "w5", "chosen": "w6"}]),
        "example 0 has no rejected, or an empty one.*rename the columns",
    ),
    "dpo, an empty answer": (
        lambda: build("dpo", rows=[{"prompt": "w5", "chosen": "w6", "rejected": " "}]),
        r"example 0 has an empty answer, rejected.*dataset.filter",
    ),
    "dpo, tokenized without a question": (
        lambda: build("dpo", rows=[{"prompt_ids": [], "chosen_ids": [5], "rejected_ids": [6]}]),
        "example 0 of the train dataset, as prepared, has an empty question",
    ),
    "dpo, rows shorter than an example": (
        lambda: build("dpo", row_length=8),
        r"example \d of the train dataset, as prepared, has \d+ tokens, more than the 8 of a row; make rows longer",
    ),
    "dpo, predict raw rows": (
        lambda: build("dpo", remove_unused_columns=False).predict(Dataset.from_list(PAIRS)),
        "needs prompt_ids and chosen_ids and rejected_ids, or prompt_ids and answers_ids",
    ),
    "reward, an encoder": (lambda: build("reward", model=bert("reward")), "not a causal decoder"),
    "reward, equal scores": (lambda: build("reward", rows=scored([1.0, 1.0])), "prefers no answer.*dataset.filter"),
    "reward, a score too few": (
        lambda: build("reward", rows=scored([1.0])),
        "one number for each of its 2 answers, got",
    ),
    "reward, one answer": (
        lambda: build("reward", rows=[{"prompt": "w5", "answers": ["w6"]}]),
        "has 1 answers, but a preference needs two or more",
    ),
    "reward, tokens seen": (
        lambda: build("reward", include_num_input_tokens_seen="all"),
        r"include_num_input_tokens_seen.*num_tokens in the log counts all tokens",
    ),
    "reward, another collator's rows": (
        lambda: build("reward", row_length=48, collator=DataCollatorForMultiAnswerReward()),
        "args.row_length is 48, but data_collator.row_length is None; set it in one place",
    ),
}


@pytest.mark.filterwarnings("ignore:`include_num_input_tokens_seen`")
@pytest.mark.parametrize("name", ONE)
def test_a_trainer_refuses(name):
    set_up, message = ONE[name]
    with pytest.raises((TypeError, ValueError), match=message):
        set_up()


@pytest.mark.parametrize("task", OURS)
@pytest.mark.parametrize("name", ["train", "held_out"])
def test_a_stream_without_rows_is_refused(task, name):
    empty = IterableDataset.from_generator(lambda: iter([]))
    options = {"rows": empty} if name == "train" else {"eval_dataset": {"held_out": empty}}
    with pytest.raises(ValueError, match=f"the {name} dataset is empty; give it at least one row"):
        build(task, max_steps=1, **options)


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_one_whole_batch_is_not_refused(task):
    assert len(build(task, rows=PAIRS[:4], dataloader_drop_last=True).train_dataset) == 4


@pytest.mark.parametrize("loss", ["robust", "exo_pair", "aot", "aot_unpaired"])
def test_label_smoothing_changes_the_losses_that_take_it(loss):
    losses = [first_loss(build("dpo", loss_type=["sigmoid", loss], label_smoothing=x)) for x in (0.1, 0.3)]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("options", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["score"]}], ids=str)
@pytest.mark.parametrize("target", [["q_proj"], "all-linear"], ids=str)
def test_an_adapter_trains_and_saves_the_head_of_a_reward_model(options, target, tmp_path):
    trainer = build("reward", peft_config=LoraConfig(target_modules=target, **options))
    head = trainer.model.get_base_model().score.modules_to_save.default.weight
    assert head.requires_grad
    trainer.save_model(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert any(torch.equal(weights, head) for name, weights in saved.items() if name.endswith("score.weight"))


def test_a_head_that_is_frozen_without_an_adapter_stays_so():
    model = model_of("reward")
    model.score.requires_grad_(False)
    assert not build("reward", model=model).model.score.weight.requires_grad


def test_a_reward_model_with_a_frozen_adapter_is_evaluated():
    adapted = get_peft_model(model_of("reward"), LoraConfig(target_modules=["q_proj"])).requires_grad_(False)
    assert build("reward", model=adapted, eval_dataset=Dataset.from_list(PAIRS)).evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("column", ["question", "instruction", "query", "input"])
def test_a_prompt_under_another_name_is_refused(task, column):
    rows = [{column if key == "prompt" else key: value for key, value in row.items()} for row in PAIRS]
    message = f"example 0.* has no prompt, and a column '{column}'.*; rename or remove it"
    with pytest.raises(ValueError, match=message):
        build(task, rows=rows)


@pytest.mark.parametrize(
    "others",
    [{"prompt": "w5 ", "question": "w9"}, {"question": "w5 "}, {"input": "", "query": None}],
    ids=["beside a prompt", "within the answers", "empty"],
)
def test_a_question_that_is_not_needed_is_not_read(others):
    row = {"prompt": None, "chosen": "w5 w6", "rejected": "w5 w7"}
    assert preference_columns({**row, **others}, 0) == preference_columns(row | {"prompt": others.get("prompt")}, 0)
    turns = {key: [{"role": "user", "content": "w5 "}, {"role": "assistant", "content": key}] for key in list(row)[1:]}
    if "prompt" not in others:
        assert preference_columns({**turns, **others}, 0) == preference_columns(turns, 0)
        assert answer_sequences({**turns, **others}, None, "a row") == list(turns.values())


SYSTEM = [{"role": "system", "content": "w8 w9"}]
ASKED = [{"role": "user", "content": "w5"}]


@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("column", ["system", "input"])
@pytest.mark.parametrize("prompt", ["w5", ASKED], ids=["text", "messages"])
def test_a_part_of_the_prompt_in_another_column_is_refused(task, column, prompt):
    row = {"prompt": prompt, "chosen": "w6", "rejected": "w7", column: "w8 w9"}
    with pytest.raises(ValueError, match=f"example 0.* has a column '{column}' beside its prompt, which is not read"):
        build(task, rows=[row])


@pytest.mark.parametrize("column", ["system", "input"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "w5 ", "completion": "w6"},
        {"messages": CONVERSATION},
        {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w6"}]},
    ],
    ids=["text", "messages", "conversations"],
)
def test_a_part_of_the_prompt_in_another_column_is_refused_by_sft(row, column):
    """The first row has none, and the second one holds it elsewhere, too."""
    held = [{column: ""} | row, {column: "w6"} | row]
    assert sft_data.check_columns(Dataset.from_list(held), held[0], "text", False, "train") is None
    rows = [held[0], {column: "w8 w9"} | row]
    with pytest.raises(ValueError, match="example 1"):  # whatever column has the text of other datasets
        sft_data.check_columns(Dataset.from_list(rows), rows[0], list(row)[-1], False, "train")
    with pytest.raises(ValueError, match=f"example 1 of the train dataset has a column '{column}' beside its prompt"):
        build("sft", rows=rows)
    with pytest.raises(ValueError, match="example 0 of the train dataset has a column"):
        build("sft", rows=Dataset.from_list(rows[1:]).to_iterable_dataset(), max_steps=1)


@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("prompt", ["w5", [{"from": "user", "value": "w5"}]], ids=["text", "messages"])
def test_messages_without_roles_are_refused(task, prompt):
    """They would look like empty answers."""
    answers = {name: [{"from": "assistant", "value": word}] for name, word in (("chosen", "w6"), ("rejected", "w7"))}
    message = r"example 0.* has messages with the keys from, value; rename them"
    with pytest.raises(ValueError, match=message):
        build(task, rows=[{"prompt": prompt, **answers}])


@pytest.mark.parametrize("text", ["w8 w9", " w8 w9\n", "", None])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "w8 w9 w5", "chosen": "w6", "rejected": "w7"},
        {"prompt": SYSTEM + ASKED, "chosen": "w6", "rejected": "w7"},
        {key: [*SYSTEM, *ASKED, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")},
    ],
    ids=["text", "messages", "conversations"],
)
def test_a_system_prompt_that_the_prompt_holds_is_not_refused(row, text):
    assert preference_columns({**row, "system": text}, 0) == preference_columns(row, 0)
    assert answer_sequences({**row, "system": text}, "</s>", "a row") == answer_sequences(row, "</s>", "a row")


@pytest.mark.parametrize("values", [[1.0, 9.0], [2, 1], [False, True]], ids=str)
@pytest.mark.parametrize("column", ["score", "ratings", "ranks"])
def test_scores_under_another_name_are_refused(column, values):
    message = f"example 0 .* has no scores, and a column '{column}'.*; rename it to scores, or remove it"
    with pytest.raises(ValueError, match=message):
        build("reward", rows=[{"prompt": "w5 ", "answers": ["w6", "w7"], column: values}])


def test_other_columns_beside_answers_are_not_read():
    row = {"prompt": "w5 ", "answers": ["w6", "w7"]}
    others = {"ids": [1, 2, 3], "authors": ["a", "b"], "lengths": [3, 4]}
    ranked = build("reward", rows=[row | {key: others[key] for key in ("ids", "authors")}])
    assert "scores" not in ranked.train_dataset.column_names
    assert build("reward", rows=[row | others | {"scores": [1.0, 2.0]}]).train_dataset[0]["scores"] == [1.0, 2.0]


@pytest.mark.parametrize("task", OURS)
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_images_are_refused_where_there_are_any(task, streamed):
    """A column without any is one of text: stock TRL takes the text of such rows in a model of images."""
    for values in ([None, ["a"]], [None] * 3):
        rows = Dataset.from_list([row | {"images": images} for row, images in zip(ROWS[task], values, strict=False)])
        options = {"rows": rows.to_iterable_dataset() if streamed else rows, "max_steps": 1}
        if values[1]:
            with pytest.raises(
                ValueError, match=r"example 1 of the train dataset has images, .*'images', but this trainer packs text"
            ):
                list(build(task, **options).train_dataset)
        else:
            assert "images" not in next(iter(build(task, **options).train_dataset))


@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
def test_columns_of_images_video_and_audio_are_found_by_name(column, streamed):
    absent, present = (None, "a") if column in ("image", "video", "audio") else ([], ["a"])
    for values in ([absent, absent], [absent, present]):
        rows = Dataset.from_list([{"text": "w5", column: value} for value in values])
        rows = rows.to_iterable_dataset() if streamed else rows
        if present in values:
            with pytest.raises(
                ValueError,
                match=f"example 1 of the train dataset has images, .*'{column}', but this trainer packs text",
            ):
                list(without_media(rows, "train"))
        else:
            assert list(without_media(rows, "train")) == [{"text": "w5"}] * 2


_TEXT, _IMAGE = [{"type": "text", "text": "w5"}], [{"type": "image", "text": None}]


@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
@pytest.mark.parametrize("stored", ["column", "parts", "json"])
def test_an_image_is_found_in_the_last_of_many_rows(streamed, stored):
    column, first, last, kind = {
        "column": ("image", None, "a", Value("string")),
        "parts": ("messages", _TEXT, _IMAGE, List({"type": Value("string"), "text": Value("string")})),
        "json": ("messages", _TEXT, _IMAGE, Json()),
    }[stored]
    values: list[Any] = [first] * 101 + [last]
    if column == "messages":
        values = [[{"role": "user", "content": content}] for content in values]
        kind = List({"role": Value("string"), "content": kind})
    rows = Dataset.from_dict({column: values}, features=Features({column: kind}))
    rows = rows.to_iterable_dataset() if streamed else rows
    with pytest.raises(ValueError, match=f"example 101 of the train dataset has images, .* its column '{column}'"):
        list(without_media(rows, "train"))


def test_columns_of_parts_may_be_hidden_by_a_format():
    rows = Dataset.from_dict({"input_ids": [[1]], "messages": [[{"role": "user", "content": _TEXT}]]})
    hidden = rows.with_format("torch", columns=["input_ids"])
    assert without_media(hidden, "train")[0].keys() == {"input_ids"}


WEIGHED = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6", "weight": 0}]
# Options of a trainer with weights, and what the warning names
WEIGHTS = {
    "sft": ("sft", {"rows": [row | {"weights": 2.0} for row in TEXTS]}, "dataset has weights"),
    "sft, TRL packs": (
        "sft",
        {"rows": [row | {"weight": 2.0} for row in TEXTS], "packing": True},
        "the train dataset has weight",
    ),
    "sft, turns": (
        "sft",
        {"rows": [{"messages": WEIGHED}], "chat_template_path": "template.jinja"},
        "dataset has messages[...]['weight']",
    ),
    "dpo": ("dpo", {"rows": [row | {"sample_weight": 2.0} for row in PAIRS]}, "the train dataset has sample_weight"),
    "reward": ("reward", {"rows": [row | {"weights": 2.0} for row in PAIRS]}, "the train dataset has weights"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_no_trainer_reads_are_named(name, caplog):
    task, options, named = WEIGHTS[name]
    Path("template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    build(task, **options)
    (message,) = (record.message for record in caplog.records if "which nothing reads" in record.message)
    assert message.startswith(f"{named}, which nothing reads.")


def test_a_transform_is_refused_by_dpo():
    """The trainers of the other tasks refuse it, too: TRL's own, and `prepare_rows`."""
    with pytest.raises(ValueError, match="the train dataset has a transform"):
        build("dpo", rows=Dataset.from_list(PAIRS).with_transform(lambda batch: batch))


def test_a_transform_of_prepared_rows_sees_whole_rows():
    names = ["prompt_ids", "chosen_ids", "rejected_ids"]
    prepared = Dataset.from_list([dict(zip(names, ([5], [6, 7], [8]), strict=True))] * 2)
    rows = prepared.with_transform(lambda batch: {name: batch[name] for name in names})
    build("dpo", rows=rows)


def streamed(task):
    def rows():
        yield from ROWS[task]

    return IterableDataset.from_generator(rows)


def packed_rows():
    tokens = [[word_tokenizer().convert_tokens_to_ids(word) for word in row["text"].split()] + [1] for row in TEXTS]
    return pack_dataset(Dataset.from_dict({"input_ids": tokens}), 48)


# Set-ups whose loss is that of stock TRL on separate sequences
RIGHT = {
    "sft, eager": ("sft", lambda: build("sft", model=model_of("sft", "eager"))),
    "sft, sdpa": ("sft", lambda: build("sft", model=model_of("sft", "sdpa"))),
    "sft, TRL packs": ("sft", lambda: build("sft", packing=True)),
    "sft, rows packed already": ("sft", lambda: build("sft", rows=packed_rows())),
    "sft, rows packed for another length": ("sft", lambda: build("sft", rows=packed_rows(), max_length=4)),
    "sft, columns kept": ("sft", lambda: build("sft", remove_unused_columns=False)),
    "sft, one document a row": ("sft", lambda: build("sft", max_length=6)),
    "sft, a stream": ("sft", lambda: build("sft", rows=streamed("sft"), max_steps=1)),
    "dpo, a stream": ("dpo", lambda: build("dpo", rows=streamed("dpo"), max_steps=1)),
    "reward, a stream": ("reward", lambda: build("reward", rows=streamed("reward"), max_steps=1)),
    "dpo, TRL's config": ("dpo", lambda: build("dpo", config=DPOConfig)),
    "reward, TRL's config": ("reward", lambda: build("reward", config=RewardConfig)),
    "dpo, columns kept": ("dpo", lambda: build("dpo", remove_unused_columns=False)),
    "reward, columns kept": ("reward", lambda: build("reward", remove_unused_columns=False)),
    "dpo, our collator in stock TRL": (
        "dpo",
        lambda: build("dpo", stock=True, collator=DataCollatorForSharedQuestion()),
    ),
    "dpo, by name": ("dpo", lambda: by_name("dpo", "flashmask")),
}


@functools.cache
def loss_of_stock_trl(task):
    return first_loss(build(task, stock=True))


@pytest.mark.parametrize("name", RIGHT)
def test_a_set_up_has_the_loss_of_stock_trl(name):
    task, set_up = RIGHT[name]
    trainer = set_up()
    expected = loss_of_stock_trl(task)
    assert abs(expected - 0.6931) > 1e-3, "the loss of policies that equal their reference"
    assert not trainer.args.accelerator_config.dispatch_batches
    assert first_loss(trainer) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "attention"), [("sft", "flashmask"), ("sft", "sdpa"), ("dpo", None), ("reward", None)]
)
def test_a_trainer_prints_the_name_of_the_attention(task, attention, capsys, caplog):
    model = model_of(task, attention) if attention else None
    trainer = build(task, model=model)
    line = f"{type(trainer).__name__}: attn_implementation='{attention or 'flashmask'}'."
    assert line in capsys.readouterr().out.splitlines()
    warned = "given to PackedSFTTrainer runs attention 'sdpa', which skips no hidden tiles. Load it with attn_impl"
    assert (warned in caplog.text) == (attention == "sdpa")


def test_liger_is_refused_in_a_version_of_trl_that_bypasses_packed_rows(monkeypatch):
    monkeypatch.setattr(weighing, "compare_versions", lambda *_: True)
    with pytest.raises(ValueError, match=r"use_liger_kernel needs .* trl>=1\.15; install it, or leave it out"):
        build("dpo", use_liger_kernel=True)


def test_another_attention_that_is_asked_for_by_name_does_not_warn(capsys, caplog):
    model_of("sft")
    build("sft", model="saved", model_init_kwargs={"attn_implementation": "sdpa"})
    assert "skips no hidden tiles" not in caplog.text


@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("trained", [pytest.param(True, marks=FUSED_HEAD), False])
def test_a_trained_head_is_gathered_for_the_fused_head(task, trained, monkeypatch):
    """As FSDP2 would; `trainers/test_context_parallel.py` does it in processes."""
    gathered = []
    adapter_ = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"] if trained else None)
    trainer = build(task, peft_config=adapter_, max_steps=1, per_device_train_batch_size=2)
    head = trainer.model.get_base_model().lm_head
    monkeypatch.setattr(head, "unshard", lambda: gathered.append(1), raising=False)
    trainer.train()
    assert len(gathered) == (1 if trained else 0)


@pytest.mark.parametrize(
    ("task", "trained", "tied"),
    [("sft", False, False), ("sft", True, False), ("sft", False, True), ("reward", False, False)],
)
def test_a_frozen_embedding_is_not_gathered_in_the_backward_pass(task, trained, tied, monkeypatch):
    """FSDP2 would prefetch it, and may overwrite the gather of another weight."""
    adapter_ = LoraConfig(
        task_type="SEQ_CLS" if task == "reward" else None,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"] if trained else None,
    )
    trainer = build(task, peft_config=adapter_, max_steps=1, per_device_train_batch_size=2)
    inner = trainer.model.get_base_model()
    embedding, gathered = inner.get_input_embeddings(), []
    if tied:
        inner.get_output_embeddings().weight = embedding.weight
    monkeypatch.setattr(embedding, "set_unshard_in_backward", gathered.append, raising=False)
    trainer.train()
    assert gathered == ([] if trained or tied else [False])


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_a_resumed_run_counts_on(task, tmp_path):
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 1, "max_steps": 2}
    whole = build(task, **options, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = build(task, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    counts = [[x["num_tokens"] for x in run.state.log_history if "loss" in x] for run in (whole, resumed)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("task", OURS)
def test_evaluate_takes_raw_rows(task):
    raw = Dataset.from_list(ROWS[task])
    expected = build(task, stock=True).evaluate(raw)["eval_loss"]
    assert build(task).evaluate(raw)["eval_loss"] == pytest.approx(expected, rel=1e-4)


SETUPS = yaml.safe_load((Path(__file__).parent / "wrong_setups.yaml").read_text())
"""The tests of every set-up, by its name in docs/wrong_setups.md."""


def test_every_documented_set_up_has_tests():
    page = re.sub(r"\n  (?=\S)", " ", (Path(__file__).parents[1] / "docs" / "wrong_setups.md").read_text())
    named = re.findall(r"^- (.+?)(?:: \*\*.+\*\*\.)?$", page, re.MULTILINE)
    assert len(named) == page.count("\n- ") >= 40
    assert sorted(named) == sorted(SETUPS)


def test_the_tests_of_the_set_ups_exist():
    for name, tests in SETUPS.items():
        assert tests, name
        for file, test in (reference.split("::") for reference in tests):
            assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text(), f"{file}::{test}"


def test_every_check_is_documented():
    assert {check.name for check in CHECKS} <= SETUPS.keys()
