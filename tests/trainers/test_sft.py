"""The SFT trainer packs its datasets, keeps packed ones, and trains only models whose layers isolate documents."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools import model_zoo
from tools.model_pairs import BOUND
from tools.tiny import CHECKPOINTING, FLOAT32, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.trainers import PackedSFTTrainer, loading
from flashmask_hf.trainers import sft as sft_trainer
from flashmask_hf.trainers.resume import ResumeMixin
from flashmask_hf.trainers.sft_data import packing_report

pytestmark = TRAINER_WARNINGS

TEXT = {"text": "w5 w6 w7 w8 w9 w10"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(llama_config(initializer_range=0.2)).save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return str(path)


def arguments(out, attention="flashmask", **options):
    return SFTConfig(**trainer_settings(out) | options, model_init_kwargs={"attn_implementation": attention})


def test_training_packs_the_dataset_and_logs_throughput_and_sparsity(tmp_path, model, capsys):
    trainer = PackedSFTTrainer(model, arguments(tmp_path, max_length=16), train_dataset=Dataset.from_list([TEXT] * 8))
    trainer.train()
    printed = capsys.readouterr().out
    assert "Packed 8 train examples into 4 rows of up to 16 tokens; packing efficiency 87.5%" in printed
    assert "a row holds 2.0 examples on average: an epoch has 1 optimizer steps on 8 examples each." in printed
    assert "Unpacked it would have 2, on 4 each. For as many steps, divide the batch size by 2.0;" in printed
    assert trainer.state.max_steps == 1 * trainer.args.num_train_epochs
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["tokens_per_second"] > 0
    assert entry["mask_sparsity"] == 0  # a short row is one tile
    assert entry["keys_per_token"] == 4.0  # six words and <eos> see 1, 2, ..., 7 keys


def test_sparsity_counts_what_is_skipped_and_keys_do_not_depend_on_the_batch_size(tmp_path):
    """Rows of 512 tokens hold four documents of 128, which are one tile each."""
    documents = Dataset.from_dict({"input_ids": [[5] * 128] * 16})
    entries = {}
    for attention, batch in (("flashmask", 1), ("flashmask", 2), ("sdpa", 1)):
        trainer = PackedSFTTrainer(
            AutoModelForCausalLM.from_config(llama_config(max_position_embeddings=512), attn_implementation=attention),
            SFTConfig(
                **trainer_settings(tmp_path) | {"per_device_train_batch_size": batch}, max_length=512, max_steps=1
            ),
            train_dataset=documents,
            processing_class=word_tokenizer(),
        )
        trainer.train()
        entries[attention, batch] = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entries["flashmask", 1]["mask_sparsity"] == 0.75
    assert entries["flashmask", 2]["mask_sparsity"] == 0.875
    assert entries["sdpa", 1]["mask_sparsity"] == 0
    assert {entry["keys_per_token"] for entry in entries.values()} == {64.5}


def test_the_auxiliary_loss_of_a_mixture_of_experts_leaves_padding_out(tmp_path):
    """It equals that of stock TRL on the same documents unpacked, whose attention mask hides the padding."""
    torch.manual_seed(0)
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**llama_config(initializer_range=0.5).to_diff_dict() | {"model_type": "qwen3_moe"} | mixture)
    )
    model.save_pretrained(tmp_path / "moe")
    documents = Dataset.from_dict({"input_ids": [list(range(5, 5 + n)) for n in (9, 4, 7, 2)]})
    found = []
    for kind, attention, options in (
        (SFTTrainer, "eager", {}),
        (PackedSFTTrainer, "flashmask", {}),
        (PackedSFTTrainer, "flashmask", {"pad_to_multiple_of": 64}),
        (PackedSFTTrainer, "sdpa", {"pad_to_multiple_of": 64}),
    ):
        trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(tmp_path / "moe", attn_implementation=attention),
            args=SFTConfig(
                **trainer_settings(tmp_path), max_length=32, max_steps=1, router_aux_loss_coef=0.5, **options
            ),
            train_dataset=documents,
            processing_class=word_tokenizer(),
        )
        trainer.train()
        entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
        found.append([entry["aux_loss"], entry["loss"]])
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=BOUND)


def test_models_that_are_loaded_by_name_get_the_attention_and_the_limit_of_positions(tmp_path, model):
    args = SFTConfig(**trainer_settings(tmp_path), max_length=80)
    trainer = PackedSFTTrainer(model, args, train_dataset=Dataset.from_list([TEXT] * 4))
    assert trainer.model.config._attn_implementation == "flashmask"
    assert args.model_init_kwargs is None
    assert trainer.data_collator.max_position_embeddings == 64
    long = Dataset.from_list([{"text": "w5 " * 70}])
    with pytest.raises(ValueError, match="is 71 tokens deep, but the model has 64 positions"):
        PackedSFTTrainer(model, args, train_dataset=long)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_evaluation_is_the_mean_over_learned_tokens(tmp_path, streamed):
    """Batches of unequal numbers of labels do not weigh the same."""
    config = llama_config(initializer_range=0.5, dtype=torch.float64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    documents = [list(range(5, 5 + n)) for n in (15, 3, 16, 9, 4, 12, 2)]
    losses = [model(input_ids=torch.tensor([x]), labels=torch.tensor([x])).loss.item() for x in documents]
    tokens = [len(document) - 1 for document in documents]
    expected = sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
    data = Dataset.from_dict({"input_ids": documents})
    for batch_size in (1, 2, 16):
        args = SFTConfig(**trainer_settings(tmp_path) | {"per_device_eval_batch_size": batch_size}, max_length=16)
        trainer = PackedSFTTrainer(model, args, train_dataset=data, processing_class=word_tokenizer())
        found = trainer.evaluate(data.to_iterable_dataset() if streamed else data)
        assert found["eval_loss"] == pytest.approx(expected, rel=FLOAT32)
        entropy = trainer.state.log_history[-1]["eval_entropy"]
        if batch_size == 1:
            first = entropy
        assert entropy == pytest.approx(first, rel=FLOAT32)


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_a_number_counts_unless_it_is_filtered(tmp_path, monkeypatch, filtered):
    data = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3})
    args = SFTConfig(
        **trainer_settings(tmp_path) | {"per_device_eval_batch_size": 1}, max_length=3, logging_nan_inf_filter=filtered
    )
    factors = iter([1.0, math.nan, 1.0])

    step = SFTTrainer.prediction_step

    def unstable_step(*args):
        loss, *others = step(*args)
        return loss * next(factors), *others

    monkeypatch.setattr(SFTTrainer, "prediction_step", unstable_step)
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
    trainer = PackedSFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer())
    assert math.isnan(trainer.evaluate()["eval_loss"]) is not filtered


def test_the_report_of_packing_counts_a_step_of_few_rows():
    """Five rows, two per step, make three steps; nine examples, two per step, make five."""
    args: Any = SFTConfig(max_length=8, per_device_train_batch_size=2, use_cpu=True, report_to="none")
    packed = Dataset.from_dict({"input_ids": [[5] * 8] * 5, "seq_lengths": [[4, 4]] * 4 + [[8]]})
    report = packing_report(args, 9, packed, "train")
    assert "an epoch has 3 optimizer steps on 4 examples each. Unpacked it would have 5, on 2 each." in report


def test_a_resumed_run_counts_on_and_refuses_rows_that_are_packed_otherwise(tmp_path):
    """Checkpoints between two logs hold all tokens, too."""
    data = Dataset.from_dict({"input_ids": [list(range(5, 5 + n)) for n in (7, 3, 8, 2, 6, 5, 4, 8, 7, 6)]})

    def trainer_of(max_length=8, *, row_length=None, share_prefixes=False, **options):
        settings = trainer_settings(tmp_path) | {"per_device_train_batch_size": 1, "max_steps": 4, "logging_steps": 2}
        args = SFTConfig(**settings | {"save_strategy": "steps", "save_steps": 3} | options, max_length=max_length)
        model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
        packing = {"row_length": row_length, "share_prefixes": share_prefixes}
        return PackedSFTTrainer(model, args, train_dataset=data, processing_class=word_tokenizer(), **packing)

    def counts(trainer):
        return [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]

    whole, resumed = trainer_of(), trainer_of(save_strategy="no", row_length=8)
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert counts(resumed) == counts(whole)
    assert len(counts(whole)) == 2
    with pytest.raises(ValueError, match=r"max_length must be 8, as in the checkpoint, got 16.*ignore_data_skip=True"):
        trainer_of(16).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="packing must be False, as in the checkpoint, got True"):
        trainer_of(packing=True).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="share_prefixes must be False, as in the checkpoint, got True"):
        trainer_of(share_prefixes=True).train(resume_from_checkpoint=checkpoint)
    product = "per_device_train_batch_size x gradient_accumulation_steps x processes must be 1, .*, got 2"
    with pytest.raises(ValueError, match=f"^{product}; set it back"):
        trainer_of(gradient_accumulation_steps=2).train(resume_from_checkpoint=checkpoint)
    retried = trainer_of(auto_find_batch_size=True)
    with pytest.raises(ValueError, match=f"^{product}; auto_find_batch_size changed it"):
        retried._inner_training_loop(2, retried.args, checkpoint)
    trainer_of(16, ignore_data_skip=True, max_steps=3).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("before", "after", "saved", "steps", "anew"),
    [
        ((1, 2), (1, 2), 6, 8, False),
        ((2, 2), (1, 4), 6, 8, False),
        ((2, 2), (4, 1), 6, 8, False),
        ((1, 1), (1, 1), 2, 2, False),
        ((1, 1), (1, 1), 2, 2, True),
    ],
    ids=["same", "smaller", "larger", "extended", "ignore_data_skip"],
)
def test_a_run_resumes_at_its_place_in_a_stream(tmp_path, monkeypatch, before, after, saved, steps, anew):
    """An epoch has four steps, which Trainer does not count. Batch size and accumulation may change with each other."""
    rows = before[0] * before[1]
    documents = Dataset.from_dict({"input_ids": [list(range(at, at + 8)) for at in range(5, 5 + 4 * rows)]})
    read, losses, starts = [], [], []
    step, start = PackedSFTTrainer.training_step, PackedSFTTrainer._init_training_state
    monkeypatch.setattr(
        PackedSFTTrainer, "_init_training_state", lambda *a, **k: (starts.append(start(*a, **k)), starts[-1])[1]
    )
    monkeypatch.setattr(
        PackedSFTTrainer,
        "training_step",
        lambda *a, **k: (read.extend(a[2]["input_ids"].flatten()[::8].tolist()), step(*a, **k))[1],
    )
    for checkpoint, last, (batch, accumulated) in ((None, steps, before), (f"checkpoint-{saved}", 8, after)):
        torch.manual_seed(0)
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": last}
        options |= {"save_strategy": "steps", "save_steps": saved, "ignore_data_skip": anew}
        trainer = PackedSFTTrainer(
            AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask"),
            SFTConfig(**trainer_settings(tmp_path) | options, max_length=8),
            train_dataset=documents.to_iterable_dataset(),
            processing_class=word_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    first = 0 if anew else saved
    order = [*range(steps * rows), *range(first * rows, (first + 8 - saved) * rows)]
    assert read == [5 + n % (4 * rows) for n in order]
    assert starts == [(0, 0), (first // 4, first % 4 * after[1])]
    assert len(losses[1]) == 8
    assert before != after or losses[0] == losses[1][:steps]


@pytest.mark.parametrize("shards", [1, 4])
def test_shards_of_a_stream_are_read_by_as_many_ranks_and_workers(shards):
    def rows(batch=4, ranks=1, workers=0, split=False):
        trainer: Any = ResumeMixin()
        trainer.args = SimpleNamespace(world_size=ranks, gradient_accumulation_steps=2, dataloader_num_workers=workers)
        trainer._copies, trainer._train_batch_size = 1, batch
        trainer.accelerator = SimpleNamespace(split_batches=split)
        trainer.train_dataset = SimpleNamespace(num_shards=shards)
        return trainer._row_options()

    assert rows() == rows(split=True) == rows(workers=1)
    others = rows(2, ranks=2), rows(ranks=2, split=True), rows(workers=2)
    assert [rows() == other for other in others] == [shards == 1] * 3


def test_batches_that_do_not_fill_a_step_of_a_stream_are_left_out(tmp_path):
    """Trainer would add their gradients to those of the next epoch's first step, and never end without a whole step."""
    documents = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3}).to_iterable_dataset()
    for accumulated, steps in ((2, 4), (4, 0)):
        args = SFTConfig(
            **trainer_settings(tmp_path) | {"per_device_train_batch_size": 1, "learning_rate": 0.0},
            max_length=3, max_steps=4, gradient_accumulation_steps=accumulated,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
        trainer = PackedSFTTrainer(model, args, train_dataset=documents, processing_class=word_tokenizer())
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert len(norms) == steps
        assert norms == pytest.approx(norms[:1] * steps, rel=BOUND)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["jamba", "lfm2", "recurrent_gemma"])
def test_layers_that_mix_documents_raise_in_the_first_step(tmp_path, family, compiled):
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    trainer = PackedSFTTrainer(
        model_zoo.build(family, "flashmask"),
        SFTConfig(**trainer_settings(tmp_path), max_length=32, **options),
        train_dataset=Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]] * 4}),
        processing_class=word_tokenizer(),
    )
    with pytest.raises(ValueError, match=r"has recurrent or convolutional layers.*one document per row"):
        trainer.train()


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5", "zaya"])
@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer", "SFTTrainer that packs"])
def test_layers_that_mix_documents_raise_in_the_first_step_of_any_trainer(tmp_path, family, trainer):
    """Falcon-H1 and Zaya have attention in every layer, beside a state space and behind convolutions."""
    settings, collator = trainer_settings(tmp_path), DataCollatorForPackedLanguageModeling()
    given = {
        "model": model_zoo.build(family, "flashmask"),
        "train_dataset": Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]] * 4}),
        "processing_class": word_tokenizer(),
    }
    if trainer == "Trainer":
        made = Trainer(args=TrainingArguments(**settings), data_collator=collator, **given)
    elif trainer == "SFTTrainer":
        made = SFTTrainer(args=SFTConfig(**settings, max_length=None), data_collator=collator, **given)
    else:
        made = SFTTrainer(args=SFTConfig(**settings, max_length=16, packing=True), **given)
    with pytest.raises(ValueError, match=r"has recurrent or convolutional layers.*one document per row"):
        made.train()


@pytest.mark.parametrize("attention", ["flashmask", "sdpa", "eager"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_layers_that_get_the_mask_train(tmp_path, model, attention, adapter):
    trainer = PackedSFTTrainer(
        model,
        arguments(tmp_path, attention, max_length=64, **{CHECKPOINTING: True}),
        train_dataset=Dataset.from_list([TEXT] * 8),
        peft_config=LoraConfig(task_type="CAUSAL_LM") if adapter else None,
    )
    trainer.train()
    backbone = trainer.model.get_base_model().base_model if adapter else trainer.model.base_model
    assert backbone._flashmask.is_counted == (attention == "flashmask")


@pytest.mark.parametrize("library", ["torch", "numpy", "pandas", "arrow"])
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_messages_in_any_dataset_format_give_the_same_rows(library, streamed, tmp_path, model):
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    tokenizer = word_tokenizer("user", "assistant", chat_template=template)
    turns = [{"role": "user", "content": "w8"}, {"role": "assistant", "content": "w9 w10"}]
    data, rows = Dataset.from_list([{"messages": turns}] * 2), []
    for name in (None, library):
        given = data.to_iterable_dataset().with_format(name) if streamed else data.with_format(name)
        args = arguments(tmp_path, max_steps=1)
        trainer = PackedSFTTrainer(model, args, train_dataset=given, processing_class=tokenizer)
        rows.append(list(trainer.train_dataset))
    assert rows[0] == rows[1]


def test_packed_rows_are_not_packed_again(tmp_path, model):
    documents = {"input_ids": [[3, 4, 5], [6, 7]] * 4, "labels": [[3, 4, -100], [6, 7]] * 4}
    rows = pack_dataset(Dataset.from_dict(documents), 8)
    trainer = PackedSFTTrainer(model, arguments(tmp_path, max_length=8), train_dataset=rows, eval_dataset=rows)
    assert trainer.train_dataset[:] == rows[:]
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("option", [{}, {"completion_only_loss": True}, {"completion_only_loss": False}], ids=str)
@pytest.mark.parametrize("column", ["assistant_masks", "completion_mask"])
def test_labels_of_packed_rows_equal_stock_trl(tmp_path, column, option):
    """Rows of another packer have masks but no labels, and may be longer than max_length."""
    row = {"input_ids": [5, 6, 7, 8, 9, 10], column: [0, 0, 1, 1, 0, 1], "seq_lengths": [4, 2]}
    labels = []
    for kind, length in ((PackedSFTTrainer, 4), (SFTTrainer, None)):
        trainer = kind(
            model=AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask"),
            args=SFTConfig(**trainer_settings(tmp_path), max_length=length, **option),
            train_dataset=Dataset.from_list([row] * 4),
            processing_class=word_tokenizer(),
            **({} if kind is PackedSFTTrainer else {"data_collator": DataCollatorForPackedLanguageModeling()}),
        )
        labels.append(next(iter(trainer.get_train_dataloader()))["labels"][0, :6].tolist())
    assert labels[0] == labels[1]
    every_token = column == "completion_mask" and not option.get("completion_only_loss")
    assert labels[0] == ([-100, 6, 7, 8, -100, 10] if every_token else [-100, -100, 7, 8, -100, 10])


@pytest.mark.parametrize("completion_only", [None, True, False])
def test_rows_that_are_not_prepared_learn_what_the_option_says(tmp_path, model, completion_only):
    row = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}
    args = arguments(
        tmp_path, completion_only_loss=completion_only, remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = PackedSFTTrainer(model, args, train_dataset=Dataset.from_list([row] * 2))
    labels = next(iter(trainer.get_train_dataloader()))["labels"][0, :4].tolist()
    assert labels == ([-100, 6, 7, 8] if completion_only is False else [-100, -100, 7, 8])


def test_rows_of_another_packer_keep_their_documents(tmp_path, model):
    """`position_ids` tell them, a column that TRL's trainer would remove."""
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], "position_ids": [0, 1, 2, 0, 1]}
    args = arguments(tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = PackedSFTTrainer(model, args, train_dataset=Dataset.from_list([row] * 2))
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["startend_row_indices"].flatten().tolist()[:5] == [3, 3, 3, 5, 5]


@pytest.mark.parametrize("columns", [{"text": "w5 w6"}, {"input_ids": [5, 6, 7]}], ids=["text", "input_ids"])
def test_completions_that_nothing_tells_are_refused(tmp_path, model, columns):
    args = arguments(tmp_path, completion_only_loss=True)
    with pytest.raises(ValueError, match=r"completion_only_loss=True needs .* which the train rows lack"):
        PackedSFTTrainer(model, args, train_dataset=Dataset.from_list([columns] * 2))
    labelled = Dataset.from_list([{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}] * 2)
    with pytest.raises(ValueError, match="which the eval rows lack"):
        PackedSFTTrainer(model, args, train_dataset=labelled, eval_dataset=Dataset.from_list([columns] * 2))


def test_code_of_a_model_is_trusted_by_either_option(tmp_path, model, monkeypatch):
    seen = []
    load = loading.AutoConfig.from_pretrained

    def watched(*args, **kwargs):
        seen.append(kwargs["trust_remote_code"])
        return load(*args, **kwargs)

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", watched)
    for option, init, expected in ((False, {"trust_remote_code": True}, True), (True, {}, True), (False, {}, False)):
        args = SFTConfig(**trainer_settings(tmp_path), trust_remote_code=option, model_init_kwargs=init)
        seen.clear()
        loading.config_of(model, args)
        assert seen == [expected]


def test_evaluation_leaves_out_the_examples_that_stock_trl_leaves_out(tmp_path, model, capsys):
    """The completion of the first example is cut away."""
    long, short = {"prompt": "w8 w9 w10 " * 60, "completion": "w11 w12"}, {"prompt": "w8 w9 ", "completion": "w11 w12"}
    dataset = Dataset.from_list([long, short, short, short])
    losses = []
    for kind, attention in ((PackedSFTTrainer, "flashmask"), (SFTTrainer, "eager")):
        args = arguments(tmp_path, attention, max_length=32, truncation_mode="keep_start", per_device_eval_batch_size=1)
        trainer = kind(model=model, args=args, train_dataset=dataset, eval_dataset=dataset)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=BOUND)
    assert "Packed 4 eval examples into" in capsys.readouterr().out


def test_padding_counts_neither_as_tokens_nor_as_keys():
    """Two documents of three and two tokens see 3 + 2 + 1 and 2 + 1 keys."""
    indices = torch.tensor([3, 3, 3, 5, 5, 0, 0, 0], dtype=torch.int32)[None, None, :, None]
    assert sft_trainer._tokens_and_keys(indices).tolist() == [5, 9]


def test_tokens_and_keys_are_counted_over_all_processes():
    """Three tokens, six keys and seven examples' tokens here, and five, nine and eight in another process."""
    trainer: Any = object.__new__(PackedSFTTrainer)
    trainer.accelerator = SimpleNamespace(device="cpu", reduce=lambda sums: sums + torch.tensor([5, 9, 8]))
    trainer._sums, trainer._logged_tokens = torch.tensor([3, 6, 7]), 10
    assert trainer._reduced_sums() == [8, 15, 15]
    assert trainer._count_tokens() == 25
    trainer._sums = 0  # before the first batch of this process
    assert trainer._reduced_sums() == [5, 9, 8]


@pytest.mark.parametrize(
    ("pad", "multiple", "collator"),
    [
        ("<pad>", 32, None),
        ("<eos>", 32, None),
        ("<pad>", None, DataCollatorForPackedLanguageModeling(max_length=16)),
    ],
    ids=["padded", "padded as documents end", "several rows"],
)
def test_each_token_is_counted_once_and_padding_not(pad, multiple, collator, tmp_path, model):
    """The log counts the runs of a trainer together, as in TRL, its state each run."""
    tokenizer = word_tokenizer()
    tokenizer.pad_token = pad
    options = {"eval_strategy": "steps", "eval_steps": 1, "include_num_input_tokens_seen": "non_padding"}
    args = arguments(tmp_path, max_length=16, max_steps=1, pad_to_multiple_of=multiple, **options)
    rows = Dataset.from_list([TEXT] * 8)  # of seven tokens each
    trainer = PackedSFTTrainer(model, args, collator, rows, rows, tokenizer)
    for run in (1, 2):
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
        counts = [entry.get("num_tokens", entry.get("eval_num_tokens")) for entry in entries]
        assert counts == [run * 56, run * 56]
        assert trainer.state.num_input_tokens_seen == 56


@pytest.mark.parametrize("packing", [False, True])
def test_one_process_of_a_tensor_parallel_group_counts_its_tokens(packing, tmp_path, model, monkeypatch):
    """The others have the same rows."""
    monkeypatch.setattr(PackedSFTTrainer, "_counts_rows", False)
    rows = Dataset.from_list([TEXT] * 4)
    trainer = PackedSFTTrainer(model, arguments(tmp_path, max_length=16, packing=packing), train_dataset=rows)
    trainer.train()
    assert next(entry for entry in trainer.state.log_history if "loss" in entry)["tokens_per_second"] == 0


@pytest.mark.filterwarnings("ignore:`return_outputs=True`, and the logits:FutureWarning")  # TRL's, of its own call
@pytest.mark.parametrize("packing", [False, True])
def test_predict_prepares_raw_rows(packing, tmp_path, model):
    raw = Dataset.from_list([{"text": "w5 w6 w7"}, {"text": "w8 w9"}, {"text": "w10 w11 w12 w13"}])
    trainer = PackedSFTTrainer(model, arguments(tmp_path, max_length=16, packing=packing), train_dataset=raw)
    expected = PackedSFTTrainer(model, arguments(tmp_path, "eager", max_length=5), train_dataset=raw).evaluate(raw)
    for rows in (raw, trainer.train_dataset):
        assert trainer.predict(rows).metrics["test_loss"] == pytest.approx(expected["eval_loss"], rel=BOUND)
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected["eval_loss"], rel=BOUND)
