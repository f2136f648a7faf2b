"""Training on packed rows: a model learns from them as from separate documents, in every trainer."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tools.documents import MASKED, dataset, documents, examples, flat, unpack
from tools.tiny import CHECKPOINTING, FLOAT32, VOCAB, assert_exact, llama_config, trainer_settings, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset

pytestmark = pytest.mark.usefixtures("float64")


def tiny_llama(attn_implementation):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=attn_implementation).double()


def loss_of(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 32}, {"max_length": 16}], ids=str)
def test_a_packed_row_has_the_loss_and_gradients_of_its_documents(options):
    batch = examples([7, 1, 12, 4, 16])
    batch[2]["completion_mask"] = [0] * 5 + [1] * 7
    packed = DataCollatorForPackedLanguageModeling(**options)(batch)
    model = tiny_llama("flashmask")
    loss, gradient = loss_of(model, packed)

    separate = tiny_llama("eager")
    total = count = gradients = 0
    for example in batch:
        alone = DataCollatorForPackedLanguageModeling()([example])
        wanted = int((alone["labels"] != -100).sum())
        if wanted:
            one, one_gradient = loss_of(separate, {k: alone[k] for k in ("input_ids", "labels")})
            total, count, gradients = total + wanted * one, count + wanted, gradients + wanted * one_gradient
    assert_exact([loss], [total / count])
    assert_exact([gradient], [gradients / count])


CHAT_TEMPLATE = (  # each turn ends with <eos>; w3 opens a turn of the assistant, w4 any other
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "w3 {% generation %}{{ message['content'] }} <eos>{% endgeneration %} "
    "{% else %}"
    "w4 {{ message['content'] }} <eos> "
    "{% endif %}"
    "{% endfor %}"
)


def tokenizer():
    return word_tokenizer(chat_template=CHAT_TEMPLATE)


def sft_losses(path, attn_implementation, train_dataset, *, collator=None, **options):
    """Train for five steps with TRL's trainer; return the losses and the trainer."""
    args = SFTConfig(
        output_dir=str(path),
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        **{CHECKPOINTING: False},
        seed=3,
        **options,
    )
    trainer = SFTTrainer(
        model=tiny_llama(attn_implementation),
        args=args,
        train_dataset=train_dataset,
        processing_class=tokenizer(),
        data_collator=collator,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    return torch.tensor(losses), trainer


LENGTHS = [30, 3, 22, 9, 14, 17, 5, 26, 11, 8, 19, 2, 28, 7, 13, 21, 40, 35]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_trl_packing_gives_the_losses_of_eager(tmp_path, strategy):
    options = {"packing": True, "packing_strategy": strategy, "max_length": 32}
    losses, trainer = sft_losses(tmp_path, "flashmask", dataset(LENGTHS), **options)
    eager, _ = sft_losses(tmp_path, "eager", dataset(LENGTHS), **options)
    torch.testing.assert_close(losses, eager, rtol=FLOAT32, atol=0)
    assert losses[-1] < losses[0]

    rows = Dataset.from_list(list(trainer.train_dataset))
    ours, _ = sft_losses(tmp_path, "flashmask", rows, collator=DataCollatorForPackedLanguageModeling(), max_length=None)
    torch.testing.assert_close(ours, losses, rtol=FLOAT32, atol=0)


def test_the_collator_in_the_stock_trainer_equals_padded_batches(tmp_path):
    collator = DataCollatorForPackedLanguageModeling()
    packed, trainer = sft_losses(tmp_path, "flashmask", dataset(LENGTHS), collator=collator, max_length=None)
    padded, _ = sft_losses(tmp_path, "eager", dataset(LENGTHS), max_length=None)
    torch.testing.assert_close(packed, padded, rtol=FLOAT32, atol=0)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_rows_keep_documents_and_labels_in_every_trainer(tmp_path, kind, streamed):
    rows = pack_dataset(Dataset.from_dict(MASKED), 9)
    options: Any = {
        "model": tiny_llama("flashmask"),
        "train_dataset": rows.to_iterable_dataset() if streamed else rows,
        "data_collator": DataCollatorForPackedLanguageModeling(),
    }
    settings = trainer_settings(tmp_path) | {"max_steps": 1}
    if kind == "Trainer":
        trainer = Trainer(args=TrainingArguments(**settings), **options)
    else:
        trainer = SFTTrainer(args=SFTConfig(**settings, max_length=None), processing_class=tokenizer(), **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["startend_row_indices"].flatten().tolist() == [4] * 4 + [6] * 2 + [9] * 3
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, -100, 10, -100, 12, 13]]


@pytest.mark.parametrize("strategy", [None, "bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("labelled", [False, True])
def test_trl_refuses_packed_rows_without_the_collator(tmp_path, strategy, labelled):
    tokens = documents([5, 3, 4, 4, 8])
    columns = {"input_ids": tokens, "labels": tokens} if labelled else {"input_ids": tokens}
    options = {"max_length": None} if strategy is None else {"packing": True, "packing_strategy": strategy}
    with pytest.raises(ValueError, match="expected sequence of length"):
        sft_losses(tmp_path, "sdpa", pack_dataset(Dataset.from_dict(columns), 8), **options)


def test_a_trainer_cannot_cut_packed_rows(tmp_path):
    rows = pack_dataset(dataset([5, 3, 4, 4, 8]), 8)
    with pytest.raises(TypeError, match="ends with an empty list, unless a trainer has cut it: set max_length=None"):
        sft_losses(tmp_path, "sdpa", rows, collator=DataCollatorForPackedLanguageModeling(), max_length=2)


def conversations(count):
    """Draw rows like allenai/tulu-v2-sft-mixture's: one to three exchanges, every third row with a system turn."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(count):
        roles = ["system"] * (index % 3 == 0) + ["user", "assistant"] * (1 + index % 3)
        turns = [" ".join(f"w{word}" for word in rng.integers(5, VOCAB, rng.integers(1, 9))) for _ in roles]
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
        rows.append({"dataset": "flan_v2", "id": f"flan_v2_{index}", "messages": messages})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("assistant_only", [False, True], ids=["all turns", "assistant turns"])
def test_conversations_train_in_the_stock_trainer(tmp_path, assistant_only):
    source = conversations(12)
    options = {"max_length": None, "assistant_only_loss": assistant_only}
    packed, trainer = sft_losses(
        tmp_path,
        "flashmask",
        source,
        collator=DataCollatorForPackedLanguageModeling(),
        remove_unused_columns=False,  # so that the collator sees dataset, id and messages
        **options,
    )
    padded, _ = sft_losses(tmp_path, "eager", source, **options)
    torch.testing.assert_close(packed, padded, rtol=FLOAT32, atol=0)

    prepared = Dataset.from_list(list(trainer.train_dataset))
    assert {"dataset", "id", "messages", "input_ids"} < set(prepared.column_names)
    batch = DataCollatorForPackedLanguageModeling()(prepared.select([0, 1]).to_list())
    learnt = batch["labels"][batch["labels"] != -100].tolist()
    if assistant_only:
        turns = flat(source[:2]["messages"])
        said = " ".join(turn["content"] + " <eos>" for turn in turns if turn["role"] == "assistant")
        assert learnt == tokenizer()(said)["input_ids"]
    else:
        assert learnt == flat(tokens[1:] for tokens in prepared[:2]["input_ids"])

    rows = pack_dataset(prepared, 128)
    assert sorted(unpack(rows)) == sorted(prepared["input_ids"])
    assert set(rows.column_names) <= {"input_ids", "labels", "seq_lengths"}
