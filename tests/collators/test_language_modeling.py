"""Packing a batch for language modeling: documents, labels and positions of every kind of example."""

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from tools.documents import dataset, documents, examples, flat
from tools.tiny import word_tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TRLCollator

from flashmask_hf import FlashMask
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.collators.bins import best_fit_decreasing

# --- the collator


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([None, 1, 4, 16]))
def test_one_row_sees_each_document_and_nothing_else(lengths, multiple):
    tokens = documents(lengths)
    batch = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=multiple)([{"input_ids": t} for t in tokens])
    real = sum(lengths)
    width = real if multiple is None else -(-real // multiple) * multiple
    assert list(batch) == ["input_ids", "position_ids", "startend_row_indices", "labels"]
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, width)
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    assert batch["startend_row_indices"].shape == (1, 1, width, 1)
    assert batch["input_ids"][0, :real].tolist() == flat(tokens)
    assert batch["position_ids"][0, :real].tolist() == [i for length in lengths for i in range(length)]
    blocks = torch.block_diag(*[torch.ones(n, n) for n in lengths]).tril().bool()
    expected = torch.zeros(width, width, dtype=torch.bool)
    expected[:real, :real] = blocks
    mask = FlashMask(batch["startend_row_indices"], causal=True).validate()
    assert torch.equal(mask.to_dense()[0, 0], expected)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_fixed_rows_hold_every_document_whole(lengths):
    tokens = documents(lengths)
    batch = DataCollatorForPackedLanguageModeling(pad_token_id=2, max_length=12)([{"input_ids": t} for t in tokens])
    assert batch["input_ids"].shape[1] == 12
    assert len(batch["input_ids"]) == len(best_fit_decreasing(lengths, 12))
    found = []
    for row, ends in zip(batch["input_ids"].tolist(), batch["startend_row_indices"][:, 0, :, 0].tolist(), strict=True):
        start = 0
        while start < 12 and ends[start]:
            found.append(row[start : ends[start]])
            start = ends[start]
        assert row[start:] == [2] * (12 - start)
    assert sorted(found) == sorted(tokens)
    padding = batch["startend_row_indices"][:, 0, :, 0] == 0
    assert (batch["labels"][padding] == -100).all()
    assert (batch["position_ids"][padding] == 0).all()
    visible = FlashMask(batch["startend_row_indices"], causal=True).to_dense()[:, 0]
    assert not visible[padding].any()
    assert not visible.transpose(1, 2)[padding].any()


def test_labels_follow_the_completion():
    example = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}
    other = {"input_ids": [9, 10], "completion_mask": [1, 1]}
    collate = DataCollatorForPackedLanguageModeling
    assert collate()([example, other])["labels"].tolist() == [[-100, -100, 7, 8, -100, 10]]
    every = collate(completion_only_loss=False)([example, other])
    assert every["labels"].tolist() == [[-100, 6, 7, 8, -100, 10]]
    assert torch.equal(collate(completion_only_loss=True)([example])["labels"], torch.tensor([[-100, -100, 7, 8]]))


def test_labels_follow_the_assistant_and_both_masks():
    example = {"input_ids": [5, 6, 7, 8], "assistant_masks": [1, 1, 0, 1], "completion_mask": [0, 0, 1, 1]}
    assert DataCollatorForPackedLanguageModeling()([example])["labels"].tolist() == [[-100, -100, -100, 8]]


def test_other_keys_are_ignored():
    example = {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1], "attention_mask": [1, 1, 1]}
    extra = {"dataset": "flan_v2", "id": "flan_v2_0", "messages": [{"role": "user", "content": "w5"}], "tools": None}
    batch, plain = (DataCollatorForPackedLanguageModeling()([one]) for one in ({**extra, **example}, example))
    assert list(batch) == list(plain)
    assert all(torch.equal(batch[name], plain[name]) for name in plain)


# --- packed rows, as `pack_dataset` makes them

PACKED = {"input_ids": [[4, 5, 6], [7, 8], []], "labels": [[4, -100, 6], [7, 8], []], "seq_lengths": [3, 2]}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize("columns", [["input_ids", "labels"], ["input_ids", "labels", "seq_lengths"]], ids=len)
def test_a_row_of_documents_keeps_them(kind, columns):
    example = {name: PACKED[name] if name == "seq_lengths" else [kind(x) for x in PACKED[name]] for name in columns}
    batch = DataCollatorForPackedLanguageModeling()([example, {"input_ids": [9]}])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, -100, 6, -100, 8, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["startend_row_indices"].flatten().tolist() == [3, 3, 3, 5, 5, 6]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"input_ids": [[4, 5, 6], [7, 8]]},
            TypeError,
            "a row of pack_dataset ends with an empty list, unless a tr",
        ),
        ({"input_ids": [[4, 5, 6], [], [7, 8], []]}, ValueError, "document 1 of example 0, a packed row, is empty"),
        ({"input_ids": [[]]}, ValueError, "example 0 is empty"),
        (
            {"labels": [[4, 5], [6, 7, 8], []]},
            ValueError,
            "input_ids and labels of example 0 describe different documents",
        ),
        ({"labels": [[4, 5, 6], [7, 8]]}, TypeError, "labels of example 0 must be a flat sequence"),
        ({"labels": [4, 5, 6, 7]}, ValueError, "labels of example 0 has 4 entries"),
        (
            {"seq_lengths": [2, 3]},
            ValueError,
            "input_ids and seq_lengths of example 0 describe different documents",
        ),
        ({"seq_lengths": [3, 2, 4]}, ValueError, "do not truncate packed rows"),
        ({"position_ids": [0, 1, 2, 3, 4]}, ValueError, "and position_ids of example 0 describe different documents"),
    ],
)
def test_a_damaged_row_raises(change, error, message):
    with pytest.raises(error, match=message):
        DataCollatorForPackedLanguageModeling()([{**PACKED, **change}])


@pytest.mark.parametrize("lengths", [[5, 3], [8, 8], [4, 4]], ids=["mixed", "single", "equal"])
@pytest.mark.parametrize(
    "collate",
    [
        TRLCollator(pad_token_id=0),
        TRLCollator(pad_token_id=0, padding_free=True),
        DataCollatorForLanguageModeling(word_tokenizer(), mlm=False),
        DataCollatorWithPadding(word_tokenizer()),
        DataCollatorWithFlattening(),
        default_data_collator,
    ],
    ids=["trl", "trl padding-free", "language modeling", "padding", "flattening", "default"],
)
def test_every_other_collator_refuses_packed_rows(collate, lengths):
    source = dataset(lengths)
    for columns in ({}, {"labels": source["input_ids"][:]}):
        rows = pack_dataset(Dataset.from_dict({"input_ids": source["input_ids"][:], **columns}), 8).to_list()
        for names in (["input_ids", "labels", "seq_lengths"], ["input_ids", "labels"]):
            with pytest.raises((ValueError, TypeError)):
                collate([{name: row[name] for name in names if name in row} for row in rows])


def test_batches_that_learn_every_token_for_want_of_masks_warn_once(caplog):
    collator = DataCollatorForPackedLanguageModeling()
    for _ in range(2):
        collator(examples([3, 2]))
    assert [r.message[:62] for r in caplog.records] == [
        "The examples of a batch have neither labels nor masks, so ever"
    ]
    caplog.clear()
    rows = pack_dataset(dataset([3, 2]), 5).to_list()
    for sure in (rows, [{"input_ids": [3, 4], "completion_mask": [0, 1]}, *examples([3])]):
        DataCollatorForPackedLanguageModeling()(sure)
    DataCollatorForPackedLanguageModeling(completion_only_loss=False)(examples([3, 2]))
    assert not caplog.records


def test_examples_without_a_label_are_counted_once(caplog):
    idle = {"input_ids": [3, 4, 5], "labels": [3, -100, -100], "seq_lengths": [2, 1]}
    collator = DataCollatorForPackedLanguageModeling()
    for _ in range(2):
        batch = collator([{"input_ids": [3, 4], "labels": [3, 4]}, idle, idle])
        assert (batch["labels"] != -100).sum() == 1
    (record,) = caplog.records
    assert "2 of the 3 examples of a batch have no label to learn, the first is example 1" in record.message
    assert "a step of loss 0" in record.message


# --- columns


def test_columns_that_are_none_count_as_absent():
    """`datasets.concatenate_datasets` fills the columns that a row lacks with None."""
    example = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "seq_lengths": [2, 1]}
    extra = dict.fromkeys(("assistant_masks", "position_ids", "attention_mask"))
    batch, plain = (DataCollatorForPackedLanguageModeling()([one]) for one in ({**extra, **example}, example))
    assert all(torch.equal(batch[name], plain[name]) for name in plain)
    with pytest.raises(ValueError, match="example 0 has no input_ids"):
        DataCollatorForPackedLanguageModeling()([{"input_ids": None}])
    with pytest.raises(ValueError, match=r"example 1 has no labels, but a labels column.*give all of them labels"):
        DataCollatorForPackedLanguageModeling()([example, {**example, "labels": None}])


def test_rows_packed_with_and_without_masks_can_be_concatenated():
    masked, plain = {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, {"input_ids": [8, 9]}
    rows = concatenate_datasets([pack_dataset(Dataset.from_list([one]), 4) for one in (masked, plain)])
    assert rows["labels"][:] == [[[-100, -100, 7], []], None]
    batch = DataCollatorForPackedLanguageModeling()(rows.to_list())
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9]]


def test_given_labels_are_used_unchanged():
    example = {"input_ids": [5, 6, 7], "labels": [5, -100, 9], "completion_mask": [0, 0, 0]}
    assert DataCollatorForPackedLanguageModeling()([example])["labels"].tolist() == [[-100, -100, 9]]


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", [4, 5, 6]), ("keep_end", [6, 7, 8])])
def test_truncation_is_the_users_choice(mode, kept):
    collator = DataCollatorForPackedLanguageModeling(max_length=3, truncation_mode=mode)
    batch = collator([{"input_ids": [4, 5, 6, 7, 8], "labels": [4, 5, 6, 7, 8]}])
    assert batch["input_ids"].tolist() == [kept]
    assert batch["labels"].tolist() == [[-100, *kept[1:]]]
    assert batch["startend_row_indices"].flatten().tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation_mode": "middle"}, "truncation_mode must be one of error, keep_start, keep_end"),
        ({"truncation_mode": "keep_start"}, "needs max_length"),
        ({"pad_to_multiple_of": np.bool_(True)}, "pad_to_multiple_of must be an int, got np.True_"),
        ({"max_position_embeddings": 8.0}, "max_position_embeddings must be an int, got 8.0"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DataCollatorForPackedLanguageModeling(**options)


def test_own_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        DataCollatorForPackedLanguageModeling(0, 8, None, None, "keep_start")  # pyright: ignore


WRAPPING = [2**63 - 1, 2**63 - 1, 7]  # the sum wraps around to 5 in int64


@pytest.mark.parametrize(
    ("options", "example", "error", "message"),
    [
        ({}, {"text": "x"}, ValueError, "example 1 has no input_ids; tokenize"),
        ({}, {"input_ids": []}, ValueError, "example 1 is empty; remove it"),
        ({}, {"input_ids": [1, -100]}, ValueError, "input_ids of example 1 has -100, but token ids must not be neg"),
        ({}, {"input_ids": [[1, 2]]}, TypeError, "input_ids of example 1 must be a flat sequence"),
        ({}, {"input_ids": {"a": 1}}, TypeError, "input_ids of example 1 must be a flat sequence"),
        ({}, {"input_ids": [1, 2], "labels": [1]}, ValueError, "labels of example 1 has 1 entries"),
        ({}, {"input_ids": [1, 2], "attention_mask": [1, 0]}, ValueError, "example 1 holds padding"),
        ({}, {"input_ids": [1, 2], "seq_lengths": [2, 0]}, ValueError, "seq_lengths of example 1 must be positive"),
        ({}, {"input_ids": [1] * 5, "seq_lengths": WRAPPING}, ValueError, "seq_lengths of example 1 must be positive"),
        ({}, {"input_ids": [2**63] * 2}, ValueError, "input_ids of example 1 must fit into int64, got 9223372036854"),
        ({}, {"input_ids": [1, 2, 3], "position_ids": [0, 2, 3]}, ValueError, "position_ids of example 1 must count"),
        ({}, {"input_ids": [1, 2], "position_ids": [1, 2]}, ValueError, "position_ids of example 1 must count"),
        ({"completion_only_loss": True}, {"input_ids": [1]}, ValueError, "example 1 has no completion_mask"),
        ({"max_length": 4}, {"input_ids": [1] * 5}, ValueError, "example 1 has 5 tokens.*truncation_mode"),
        (
            {"max_length": 4, "truncation_mode": "keep_start"},
            {"input_ids": [1] * 5, "seq_lengths": [3, 2]},
            ValueError,
            "example 1 is a packed row of 5 tokens",
        ),
        ({"max_position_embeddings": 4}, {"input_ids": [1] * 5}, ValueError, "example 1 is 5 tokens deep"),
    ],
)
def test_an_invalid_example_raises_with_its_index(options, example, error, message):
    good = {"input_ids": [1, 2], "completion_mask": [0, 1]}
    with pytest.raises(error, match=message):
        DataCollatorForPackedLanguageModeling(**options)([good, example])


def test_an_empty_batch_raises():
    with pytest.raises(ValueError, match="examples is empty"):
        DataCollatorForPackedLanguageModeling()([])
