"""Packing for supervised fine-tuning: packed rows lose nothing, and a model trains on them as on separate documents."""

import doctest
from collections import Counter
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.tiny import CHECKPOINTING, VOCAB, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import flashmask_hf.collators.language_modeling as language_modeling
from flashmask_hf import FlashMask
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset, packing_efficiency
from flashmask_hf.collators.forest import best_fit_decreasing


def documents(lengths, seed=0):
    """Draw a list of random tokens per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def examples(lengths, seed=0):
    return [{"input_ids": tokens} for tokens in documents(lengths, seed)]


def flat(lists):
    return list(chain.from_iterable(lists))


def test_docstring_examples_run():
    result = doctest.testmod(language_modeling)
    assert result.attempted > 0
    assert result.failed == 0


# --- the collator


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([None, 1, 4, 16]))
def test_one_row_sees_each_document_and_nothing_else(lengths, multiple):
    tokens = documents(lengths)
    batch = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=multiple)([{"input_ids": t} for t in tokens])
    real = sum(lengths)
    width = real if multiple is None else -(-real // multiple) * multiple
    assert list(batch) == ["input_ids", "labels", "position_ids", "startend_row_indices"]
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_no_label_crosses_a_document_edge(lengths):
    batch = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=8)(examples(lengths))
    predicted = batch["labels"][0, 1:] != -100  # by the token before, in the model's shifted loss
    visible = FlashMask(batch["startend_row_indices"], causal=True).to_dense()[0, 0]
    same_document = visible.diagonal(-1)  # the later token sees the earlier one
    assert torch.equal(predicted, same_document)
    assert batch["labels"][0, 0] == -100


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
    batch = DataCollatorForPackedLanguageModeling()(rows.remove_columns("completion_mask").to_list())
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9]]


def test_given_labels_are_used_unchanged():
    example = {"input_ids": [5, 6, 7], "labels": [5, -100, 9], "completion_mask": [0, 0, 0]}
    assert DataCollatorForPackedLanguageModeling()([example])["labels"].tolist() == [[-100, -100, 9]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_columns_may_be_lists_arrays_or_tensors(kind):
    batch = DataCollatorForPackedLanguageModeling()([{"input_ids": kind([4, 5]), "attention_mask": kind([1, 1])}])
    assert batch["input_ids"].tolist() == [[4, 5]]


@pytest.mark.parametrize(
    "structure", [{"seq_lengths": [3, 2]}, {"position_ids": [0, 1, 2, 0, 1]}], ids=["seq_lengths", "position_ids"]
)
def test_a_packed_example_keeps_its_documents(structure):
    batch = DataCollatorForPackedLanguageModeling()([{"input_ids": [4, 5, 6, 7, 8], **structure}, {"input_ids": [9]}])
    assert batch["startend_row_indices"].flatten().tolist() == [3, 3, 3, 5, 5, 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, 8, -100]]


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
        ({"max_length": 0}, "max_length must be a number of tokens, at least 1, or None, got 0"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a number of tokens, at least 1"),
        ({"max_length": 10, "pad_to_multiple_of": 4}, "must be a multiple of pad_to_multiple_of 4"),
        ({"max_length": True}, "max_length must be a number of tokens, at least 1, or None, got True"),
        ({"pad_to_multiple_of": np.bool_(True)}, "pad_to_multiple_of must be a number of tokens"),
        ({"max_position_embeddings": 8.0}, "max_position_embeddings must be a number of tokens.*got 8.0"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForPackedLanguageModeling(**options)


WRAPPING = [2**63 - 1, 2**63 - 1, 7]  # the sum wraps around to 5 in int64


@pytest.mark.parametrize(
    ("options", "example", "error", "message"),
    [
        ({}, {"text": "x"}, ValueError, "example 1 has no input_ids; tokenize"),
        ({}, {"input_ids": []}, ValueError, "example 1 is empty; remove it"),
        ({}, {"input_ids": [1.5]}, TypeError, "input_ids of example 1 must be integers"),
        ({}, {"input_ids": [[1, 2]]}, TypeError, "input_ids of example 1 must be a flat sequence"),
        ({}, {"input_ids": [1, [2]]}, TypeError, "input_ids of example 1 must be a flat sequence"),
        ({}, {"input_ids": [1, 2], "labels": [1]}, ValueError, "labels of example 1 has 1 entries"),
        ({}, {"input_ids": [1, 2], "completion_mask": [1]}, ValueError, "completion_mask of example 1"),
        ({}, {"input_ids": [1, 2], "attention_mask": [1, 0]}, ValueError, "example 1 holds padding"),
        ({}, {"input_ids": [1, 2], "seq_lengths": [1]}, ValueError, "seq_lengths of example 1 must be positive"),
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


def test_max_position_embeddings_limits_documents_not_rows():
    collator = DataCollatorForPackedLanguageModeling(max_position_embeddings=4)
    assert collator(examples([4, 4, 4]))["input_ids"].shape == (1, 12)


# --- a whole dataset


def dataset(lengths, **columns):
    return Dataset.from_dict({"input_ids": documents(lengths), **columns})


def unpack(packed, column="input_ids"):
    """Return the documents of a packed dataset."""
    found = []
    for row in packed:
        edges = np.cumsum([0, *row["seq_lengths"]])
        assert edges[-1] == len(row[column])
        found += [row[column][start:end] for start, end in pairwise(edges)]
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 50))
def test_pack_dataset_loses_and_splits_nothing(lengths, batch_size):
    source = dataset(lengths)
    packed = pack_dataset(source, 20, batch_size=batch_size)
    assert sorted(unpack(packed)) == sorted(source["input_ids"])
    assert max(map(len, packed["input_ids"])) <= 20
    assert packing_efficiency(packed, 20) == pytest.approx(sum(lengths) / (20 * len(packed)))
    assert pack_dataset(source, 20, batch_size=batch_size)[:] == packed[:]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_split_cuts_long_documents_into_consecutive_pieces(lengths):
    source = dataset(lengths)
    packed = pack_dataset(source, 8, split=True)
    pieces = [tokens[i : i + 8] for tokens in source["input_ids"] for i in range(0, len(tokens), 8)]
    assert sorted(unpack(packed)) == sorted(pieces)
    assert Counter(flat(packed["input_ids"])) == Counter(flat(source["input_ids"]))
    for row in packed:
        positions = DataCollatorForPackedLanguageModeling()([row])["position_ids"][0].tolist()
        assert positions == [i for length in row["seq_lengths"] for i in range(length)]


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(0, 4)), ("keep_end", slice(-4, None))])
def test_pack_dataset_truncates_only_what_is_too_long(mode, kept):
    source = dataset([3, 9, 4, 1])
    packed = pack_dataset(source, 4, truncation_mode=mode)
    assert sorted(unpack(packed)) == sorted(tokens[kept] for tokens in source["input_ids"])


def test_an_empty_completion_raises():
    example = {"input_ids": [1, 2], "completion_mask": [0, 0]}
    with pytest.raises(ValueError, match=r"example 1 has an empty completion .*dataset.filter"):
        DataCollatorForPackedLanguageModeling()([{"input_ids": [3]}, example])
    source = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "completion_mask": [[0, 1], [0, 0]]})
    with pytest.raises(ValueError, match=r"example 1 has an empty completion"):
        pack_dataset(source, 4)


LONG_PROMPT = [0] * 9 + [1] * 3


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks", "labels"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"split": True}, [[11, 12, 13, 14], [20, 21]]),
        ({"truncation_mode": "keep_start"}, [[20, 21]]),
        ({"truncation_mode": "keep_end"}, [[11, 12, 13, 14], [20, 21]]),
    ],
    ids=["split", "keep_start", "keep_end"],
)
def test_pieces_without_labels_are_left_out(column, options, kept, caplog):
    input_ids, wanted = [list(range(3, 15)), [20, 21]], [LONG_PROMPT, [0, 1]]
    if column == "labels":
        wanted = [np.where(mask, ids, -100).tolist() for mask, ids in zip(wanted, input_ids, strict=True)]
    rows = pack_dataset(Dataset.from_dict({"input_ids": input_ids, column: wanted}), 4, **options)
    assert unpack(rows) == kept
    batch = DataCollatorForPackedLanguageModeling()(rows.to_list())
    assert (batch["labels"] != -100).sum() == 3 * (len(kept) - 1) + 1
    pieces = 4 if "split" in options else 2
    missing = pieces - len(kept)
    assert [r.message for r in caplog.records] == [
        f"left out {missing} of {pieces} documents, which have nothing to learn"
    ] * bool(missing)


def test_a_label_of_a_first_token_does_not_count(caplog):
    source = Dataset.from_dict({"input_ids": [[3, 4, 5, 6, 7], [8, 9]], "labels": [[-100] * 4 + [7], [8, -100]]})
    assert unpack(pack_dataset(source, 5)) == [[3, 4, 5, 6, 7]]
    assert "left out 1 of 2" in caplog.text


def test_truncation_that_leaves_the_label_of_the_first_token_alone_raises():
    collator = DataCollatorForPackedLanguageModeling(max_length=3, truncation_mode="keep_end")
    with pytest.raises(ValueError, match="example 0 teaches nothing once cut to max_length 3"):
        collator([{"input_ids": [3, 4, 5, 6, 7], "labels": [-100, 4, 5, -100, -100]}])
    source = Dataset.from_dict({"input_ids": [[3, 4, 5, 6], [7, 8]], "labels": [[-100, 4, -100, -100], [7, 8]]})
    assert unpack(pack_dataset(source, 3, truncation_mode="keep_end")) == [[7, 8]]


def test_prompts_with_a_loss_are_kept():
    source = Dataset.from_dict({"input_ids": [list(range(3, 15))], "completion_mask": [LONG_PROMPT]})
    assert len(unpack(pack_dataset(source, 4, split=True, completion_only_loss=False))) == 3


def test_a_batch_without_labels_makes_no_row():
    source = Dataset.from_dict({"input_ids": [[3, 4], [5, 6]], "labels": [[-100, -100], [-100, 6]]})
    assert pack_dataset(source, 4, batch_size=1)["input_ids"][:] == [[5, 6]]
    with pytest.raises(ValueError, match="dataset has nothing to learn: its labels are -100 everywhere"):
        pack_dataset(source.select([0]), 4)


def test_the_collator_raises_if_truncation_leaves_no_completion():
    example = {"input_ids": list(range(3, 15)), "completion_mask": LONG_PROMPT}
    end = DataCollatorForPackedLanguageModeling(max_length=4, truncation_mode="keep_end")
    assert end([example])["labels"].tolist() == [[-100, 12, 13, 14]]
    start = DataCollatorForPackedLanguageModeling(max_length=4, truncation_mode="keep_start")
    with pytest.raises(ValueError, match=r"example 1 teaches nothing once cut to max_length 4: .*pack_dataset"):
        start([{"input_ids": [1, 2]}, example])


@pytest.mark.parametrize("column", ["seq_lengths", "position_ids", "startend_row_indices"])
def test_pack_dataset_raises_for_packed_rows(column):
    source = Dataset.from_dict({"input_ids": [[1, 2, 3]], column: [[0, 1, 0]]})
    with pytest.raises(ValueError, match=rf"dataset has a {column} column, so it is packed already"):
        pack_dataset(source, 4)


def test_seq_lengths_that_contradict_position_ids_raise():
    example = {"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [0, 1, 0]}
    with pytest.raises(ValueError, match="seq_lengths and position_ids of example 0 describe different documents"):
        DataCollatorForPackedLanguageModeling()([example])


@pytest.mark.parametrize("pad_token_id", [None, -100, "0", True, 2**63])
def test_pad_token_id_must_be_a_token(pad_token_id):
    with pytest.raises(ValueError, match="pad_token_id must be a token id, got"):
        DataCollatorForPackedLanguageModeling(pad_token_id=pad_token_id)


def test_pack_dataset_keeps_the_token_columns_together():
    tokens = documents([3, 2, 4])
    source = dataset(
        [3, 2, 4],
        labels=[[-token for token in t] for t in tokens],
        completion_mask=[[token % 2 == 0 for token in t] for t in tokens],
        text=["a", "b", "c"],
    )
    packed = pack_dataset(source, 6)
    assert set(packed.column_names) == {"input_ids", "labels", "completion_mask", "position_ids", "seq_lengths"}
    for row in packed:
        assert row["labels"] == [-token for token in row["input_ids"]]
        assert row["completion_mask"] == [token % 2 == 0 for token in row["input_ids"]]


MASKED = {
    "input_ids": [[5, 6, 7, 8], [9, 10], [11, 12, 13]],
    "completion_mask": [[0, 0, 1, 1], [0, 1], [0, 1, 1]],
    "assistant_masks": [[1, 1, 1, 0], [1, 1], [1, 1, 1]],
}


@pytest.mark.parametrize(
    ("choice", "labels"),
    [
        (None, [-100, -100, 7, -100, -100, 10, -100, 12, 13]),
        (True, [-100, -100, 7, -100, -100, 10, -100, 12, 13]),
        (False, [5, 6, 7, -100, 9, 10, 11, 12, 13]),
    ],
)
def test_pack_dataset_makes_labels_from_the_masks(choice, labels):
    rows = pack_dataset(Dataset.from_dict(MASKED), 9, completion_only_loss=choice)
    assert rows["labels"][:] == [labels]
    batch = DataCollatorForPackedLanguageModeling()(rows.to_list())
    starts = (0, 4, 6)
    assert batch["labels"].tolist() == [[-100 if at in starts else label for at, label in enumerate(labels)]]


def test_the_collator_undoes_labels_made_from_masks():
    rows = pack_dataset(Dataset.from_dict(MASKED), 9).to_list()
    every = DataCollatorForPackedLanguageModeling(completion_only_loss=False)
    assert every(rows)["labels"].tolist() == [[-100, 6, 7, -100, -100, 10, -100, 12, 13]]
    given = pack_dataset(Dataset.from_dict({**MASKED, "labels": [[5, -100, 7, 8], [9, 10], [11, 12, -100]]}), 9)
    assert every(given.to_list())["labels"].tolist() == [[-100, -100, 7, 8, -100, 10, -100, 12, -100]]


def test_pack_dataset_requires_the_mask_of_completion_only_loss():
    with pytest.raises(ValueError, match="example 0 has no completion_mask, which completion_only_loss=True needs"):
        pack_dataset(dataset([3, 2]), 4, completion_only_loss=True)


@pytest.mark.parametrize("view", ["shuffled", "selected", "torch", "streamed"])
def test_pack_dataset_takes_any_view_of_a_dataset(view):
    source = dataset([3, 2, 4, 6, 1, 5])
    views = {
        "shuffled": lambda: source.shuffle(seed=0),
        "selected": lambda: source.select([1, 4, 5]),
        "torch": lambda: source.with_format("torch"),
        "streamed": source.to_iterable_dataset,
    }
    view_of = views[view]()
    expected = sorted(view_of.with_format(None)["input_ids"] if view != "streamed" else source["input_ids"])
    assert sorted(unpack(pack_dataset(view_of, 6))) == expected


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"input_ids": [[1], [2] * 9]}, {}, ValueError, "example 1 has 9 tokens.*split=True"),
        ({"input_ids": [[1], []]}, {}, ValueError, "example 1 is empty; remove it"),
        ({"input_ids": [[1], None]}, {}, ValueError, "input_ids of example 1 is missing"),
        ({"input_ids": [[1], [1, None]]}, {}, ValueError, "input_ids of example 1 .* has missing values"),
        ({"input_ids": [[1], [1, 2]], "labels": [[1], [1]]}, {}, ValueError, "labels of example 1 has 1 entries"),
        ({"input_ids": [[1], [1, 2]], "attention_mask": [[1], [0, 1]]}, {}, ValueError, "example 1 holds padding"),
        ({"input_ids": [[0.5]]}, {}, TypeError, "input_ids must hold lists of integers"),
        ({"input_ids": ["a"]}, {}, TypeError, "input_ids must hold lists of integers"),
        ({"text": ["a"]}, {}, ValueError, "no input_ids column; tokenize it first"),
        ({"input_ids": []}, {}, ValueError, "dataset is empty"),
        ({"input_ids": [[1]], "seq_lengths": [[1]]}, {}, ValueError, "packed already"),
        ({"input_ids": [[1], [2] * 7]}, {"max_position_embeddings": 6}, ValueError, "example 1 is 7 tokens deep"),
        ({"input_ids": [[1]]}, {"truncation_mode": "middle"}, ValueError, "truncation_mode must be one of"),
        ({"input_ids": [[1]]}, {"truncation_mode": "keep_end", "split": True}, ValueError, "exclude each other"),
        ({"input_ids": [[1]]}, {"batch_size": 0}, ValueError, "at least 1"),
        ({"input_ids": [[1]]}, {"batch_size": True}, ValueError, "batch_size must be an int, at least 1, got True"),
        ({"input_ids": [[1]]}, {"num_proc": 0}, ValueError, "num_proc must be a number of processes, at least 1"),
        ({"input_ids": [[1]]}, {"max_position_embeddings": 0}, ValueError, "max_position_embeddings must be a number"),
        ({"input_ids": [[1]], "labels": [1]}, {}, TypeError, "labels must hold lists of integers, got int64$"),
    ],
)
def test_pack_dataset_raises_for_invalid_datasets_and_options(columns, options, error, message):
    with pytest.raises(error, match=message):
        pack_dataset(Dataset.from_dict(columns), 8, **options)


def test_options_may_be_integers_of_any_type():
    collator = DataCollatorForPackedLanguageModeling(pad_token_id=np.int32(9), max_length=np.int64(4))
    assert (collator.pad_token_id, collator.max_length) == (9, 4)
    assert collator(examples([3]))["input_ids"][0, -1] == 9
    source = dataset([3, 2, 4])
    sizes = {"batch_size": np.int32(3), "max_position_embeddings": np.int64(4)}
    assert pack_dataset(source, np.int64(4), **sizes)[:] == pack_dataset(source, 4)[:]  # pyright: ignore
    with pytest.raises(ValueError, match="max_length must be an int, at least 1, got True"):
        pack_dataset(source, True)


@pytest.mark.parametrize("view", [slice(None), slice(1, None)], ids=["whole", "sliced"])
def test_pack_dataset_takes_lists_of_fixed_size(view):
    tokens = [[1, 2], [3, 4], [5, 6]]
    source = Dataset.from_dict({"input_ids": tokens}, features=Features({"input_ids": List(Value("int32"), length=2)}))
    assert unpack(pack_dataset(source.select(range(3)[view]), 4)) == tokens[view]


def test_pack_dataset_names_an_example_of_a_later_batch():
    with pytest.raises(ValueError, match="example 5 has 9 tokens"):
        pack_dataset(dataset([3, 2, 4, 6, 1, 9]), 8, batch_size=2)


def test_pack_dataset_raises_for_a_list():
    with pytest.raises(TypeError, match="got list"):
        pack_dataset([{"input_ids": [1]}], 8)  # pyright: ignore


# --- training on packed rows


def tiny_llama(attn_implementation):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=attn_implementation)


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
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, gradients / count, rtol=1e-4, atol=1e-6)


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
    torch.testing.assert_close(losses, eager, rtol=1e-4, atol=1e-5)
    assert losses[-1] < losses[0]

    rows = Dataset.from_list(list(trainer.train_dataset))
    ours, _ = sft_losses(tmp_path, "flashmask", rows, collator=DataCollatorForPackedLanguageModeling(), max_length=None)
    torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-5)


def test_the_collator_in_the_stock_trainer_equals_padded_batches(tmp_path):
    collator = DataCollatorForPackedLanguageModeling()
    packed, trainer = sft_losses(tmp_path, "flashmask", dataset(LENGTHS), collator=collator, max_length=None)
    padded, _ = sft_losses(tmp_path, "eager", dataset(LENGTHS), max_length=None)
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)
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
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)

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
    assert set(rows.column_names) <= {"input_ids", "labels", "assistant_masks", "position_ids", "seq_lengths"}
