"""Packing a dataset: rows lose nothing, learn what they should, and cannot be mistaken for flat ones."""

import json
import re
from collections import Counter
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, List, Value, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.documents import MASKED, dataset, documents, examples, flat, unpack

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset, packing_efficiency
from flashmask_hf.collators import dataset as packing

FEATURES = Features({"input_ids": List(Value("int32"))})


@settings(max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 50))
def test_pack_dataset_loses_and_splits_nothing(lengths, batch_size):
    source = dataset(lengths)
    packed = pack_dataset(source, 20, batch_size=batch_size)
    assert sorted(unpack(packed)) == sorted(source["input_ids"])
    assert max(map(sum, packed["seq_lengths"])) <= 20
    assert packing_efficiency(packed, 20) == pytest.approx(sum(lengths) / (20 * len(packed)))
    assert pack_dataset(source, 20, batch_size=batch_size)[:] == packed[:]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_split_cuts_long_documents_into_consecutive_pieces(lengths):
    source = dataset(lengths)
    packed = pack_dataset(source, 8, split=True)
    pieces = [tokens[i : i + 8] for tokens in source["input_ids"] for i in range(0, len(tokens), 8)]
    assert sorted(unpack(packed)) == sorted(pieces)
    assert Counter(flat(unpack(packed))) == Counter(flat(source["input_ids"]))
    for row in packed:
        positions = DataCollatorForPackedLanguageModeling()([row])["position_ids"][0].tolist()
        assert positions == [i for length in row["seq_lengths"] for i in range(length)]


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(0, 4)), ("keep_end", slice(-4, None))])
def test_pack_dataset_truncates_only_what_is_too_long(mode, kept, caplog):
    source = dataset([3, 9, 4, 1])
    packed = pack_dataset(source, 4, truncation_mode=mode)
    assert sorted(unpack(packed)) == sorted(tokens[kept] for tokens in source["input_ids"])
    (record,) = caplog.records
    assert record.message == f"cut 1 of 4 documents to max_length 4: truncation_mode='{mode}'"
    pack_dataset(source, 9, truncation_mode=mode)
    assert len(caplog.records) == 1


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
    assert [r.message for r in caplog.records if not r.message.startswith("cut 1 of 2")] == [
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
    assert unpack(pack_dataset(source, 4, batch_size=1)) == [[5, 6]]
    with pytest.raises(ValueError, match="dataset has nothing to learn: its labels are -100 everywhere"):
        pack_dataset(source.select([0]), 4)


def test_the_collator_raises_if_truncation_leaves_no_completion():
    example = {"input_ids": list(range(3, 15)), "completion_mask": LONG_PROMPT}
    end = DataCollatorForPackedLanguageModeling(max_length=4, truncation_mode="keep_end")
    assert end([example])["labels"].tolist() == [[-100, 12, 13, 14]]
    start = DataCollatorForPackedLanguageModeling(max_length=4, truncation_mode="keep_start")
    with pytest.raises(ValueError, match=r"example 1 teaches nothing once cut to max_length 4; .*pack_dataset"):
        start([{"input_ids": [1, 2]}, example])


@pytest.mark.parametrize("column", ["seq_lengths", "position_ids", "startend_row_indices"])
def test_pack_dataset_raises_for_packed_rows(column):
    source = Dataset.from_dict({"input_ids": [[1, 2, 3]], column: [[0, 1, 0]]})
    with pytest.raises(ValueError, match=rf"dataset is packed already, by its column {column}; pack its source"):
        pack_dataset(source, 4)


NUMBERED = {"seq_idx": [0, 0, 1], "attention_mask": [1, 1, 2], "cu_seq_lens_q": [0, 2, 3]}
ALONE = {"seq_idx": [1, 1, 1], "attention_mask": [1, 1, 1], "cu_seq_lens_q": [0, 3]}


@pytest.mark.parametrize("column", list(NUMBERED))
def test_documents_that_another_packer_told_in_other_columns_raise(column):
    row = {"input_ids": [3, 4, 5], column: NUMBERED[column]}
    collate = DataCollatorForPackedLanguageModeling(completion_only_loss=False)
    with pytest.raises(ValueError, match=rf"{column} of example 0 marks several documents, .*; add seq_lengths"):
        collate([row])
    with pytest.raises(
        ValueError, match=rf"packed already, by its column {column}; .* if every example is one document"
    ):
        pack_dataset(Dataset.from_list([row]), 4)
    for told in ({"seq_lengths": [2, 1]}, {"position_ids": [0, 1, 0]}):
        assert collate([row | told])["startend_row_indices"].flatten().tolist() == [2, 2, 3]
    row[column] = ALONE[column]
    assert collate([row])["startend_row_indices"].flatten().tolist() == [3, 3, 3]
    assert pack_dataset(Dataset.from_list([row]), 4)["seq_lengths"][:] == [[3]]


@pytest.mark.parametrize(
    ("column", "value"),
    [("seq_idx", [[0], [1, 1]]), ("cu_seq_lens_q", [[0], [2, 3]]), ("seq_idx", torch.tensor([0, 0, 1]).bfloat16())],
    ids=["ragged numbers", "ragged bounds", "bfloat16"],
)
def test_columns_that_numpy_cannot_read_raise(column, value):
    row = {"input_ids": [3, 4, 5], column: value}
    with pytest.raises(ValueError, match=f"{column} of example 0 marks several documents"):
        DataCollatorForPackedLanguageModeling(completion_only_loss=False)([row])
    if isinstance(value, list):
        with pytest.raises(ValueError, match=f"packed already, by its column {column}"):
            pack_dataset(Dataset.from_list([row]), 4)


@pytest.mark.parametrize("value", [7, [0, 1], ["a", "b", "c"]], ids=["id", "short", "text"])
def test_a_column_named_seq_idx_that_numbers_no_tokens_is_ignored(value):
    row = {"input_ids": [3, 4, 5], "seq_idx": value}
    assert len(DataCollatorForPackedLanguageModeling(completion_only_loss=False)([row])["input_ids"][0]) == 3
    assert pack_dataset(Dataset.from_list([row]), 4)["seq_lengths"][:] == [[3]]


def test_pack_dataset_keeps_the_token_columns_together():
    tokens = documents([3, 2, 4])
    source = dataset(
        [3, 2, 4],
        labels=[[-token for token in t] for t in tokens],
        completion_mask=[[token % 2 == 0 for token in t] for t in tokens],
        text=["a", "b", "c"],
    )
    packed = pack_dataset(source, 6)
    assert set(packed.column_names) == {"input_ids", "labels", "seq_lengths"}
    assert unpack(packed, "labels") == [[-token for token in document] for document in unpack(packed)]


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
    assert rows["labels"][:] == [[labels[:4], labels[4:6], labels[6:], []]]
    batch = DataCollatorForPackedLanguageModeling()(rows.to_list())
    starts = (0, 4, 6)
    assert batch["labels"].tolist() == [[-100 if at in starts else label for at, label in enumerate(labels)]]


def test_a_choice_of_labels_that_comes_too_late_raises():
    late = DataCollatorForPackedLanguageModeling(completion_only_loss=False)
    with pytest.raises(ValueError, match=r"completion_only_loss=False comes too late for example 0, .*to pack_dataset"):
        late(pack_dataset(Dataset.from_dict(MASKED), 9).to_list())
    batch = late(pack_dataset(dataset([3, 2]), 5).to_list())
    assert (batch["labels"] != -100).sum() == 3


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
        ({"input_ids": [[1], None]}, {}, ValueError, "example 1 lacks input_ids"),
        ({"input_ids": [[1], [1, None]]}, {}, TypeError, "input_ids of example 1 must be integers, got missing values"),
        ({"input_ids": [[1], [1, 2]], "labels": [[1], [1]]}, {}, ValueError, "labels of example 1 has 1 entries"),
        ({"input_ids": [[1], [1, 2]], "attention_mask": [[1], [0, 1]]}, {}, ValueError, "example 1 holds padding"),
        ({"input_ids": [[1], [2, 3], [4, -100]]}, {}, ValueError, "input_ids of example 2 has -100, but token ids"),
        ({"input_ids": ["a"]}, {}, TypeError, "input_ids of example 0 must be a flat sequence of integers"),
        ({"text": ["a"]}, {}, ValueError, "no input_ids column; tokenize it first"),
        ({"input_ids": []}, {}, ValueError, "dataset is empty"),
        ({"input_ids": [[1], [2] * 7]}, {"max_position_embeddings": 6}, ValueError, "example 1 is 7 tokens deep"),
        ({"input_ids": [[1]]}, {"truncation_mode": "middle"}, ValueError, "truncation_mode must be one of"),
        ({"input_ids": [[1]]}, {"truncation_mode": "keep_end", "split": True}, ValueError, "exclude each other"),
        ({"input_ids": [[1]]}, {"batch_size": 0}, ValueError, "at least 1"),
        ({"input_ids": [[1]]}, {"num_proc": 0}, ValueError, "num_proc must be at least 1, got 0"),
        ({"input_ids": [[1]]}, {"max_position_embeddings": 0}, ValueError, "embeddings must be at least 1"),
        ({"input_ids": [[1]], "labels": [1]}, {}, TypeError, "labels of example 0 must be a flat sequence of integers"),
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
    with pytest.raises(TypeError, match="max_length must be an int, got True"):
        pack_dataset(source, True)


@pytest.mark.parametrize("view", [slice(None), slice(1, None)], ids=["whole", "sliced"])
def test_pack_dataset_takes_lists_of_fixed_size(view):
    tokens = [[1, 2], [3, 4], [5, 6]]
    source = Dataset.from_dict({"input_ids": tokens}, features=Features({"input_ids": List(Value("int32"), length=2)}))
    assert unpack(pack_dataset(source.select(range(3)[view]), 4)) == tokens[view]


def test_rows_are_made_anew_when_their_version_changes(tmp_path, monkeypatch):
    dataset([3, 2, 4]).save_to_disk(tmp_path)
    files = []
    for version in (1, 1, 2):
        monkeypatch.setattr(packing, "_VERSION", version)
        files.append(pack_dataset(load_from_disk(tmp_path), 4).cache_files[0]["filename"])  # pyright: ignore
    assert files[0] == files[1] != files[2]


def test_the_version_changes_with_the_rows():
    """If this fails, rows changed: raise `_VERSION`, so that nobody trains on old ones from the cache."""
    rows = pack_dataset(Dataset.from_dict(MASKED), 6, truncation_mode="keep_end")
    rows = rows.to_list() + pack_dataset(dataset([5, 9, 3, 2]), 4, split=True).to_list()
    digest = sha256(json.dumps(rows).encode()).hexdigest()
    assert (packing._VERSION, digest[:16]) == (2, "899215de01b270d1")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint32])
def test_rows_are_int32_whatever_the_source_is(kind):
    source = pa.table({"input_ids": [kind([1, 2, 3]), kind([4])], "completion_mask": [[0, 1, 1], [1]]})
    rows = pack_dataset(Dataset(source), 4)
    assert {rows.data.column(name).type.value_type.value_type for name in ("input_ids", "labels")} == {pa.int32()}
    assert rows[:] == {"input_ids": [[[1, 2, 3], []]], "labels": [[[-100, 2, 3], []]], "seq_lengths": [[3]]}
    with pytest.raises(ValueError, match=r"input_ids of example 0 must fit into int32, got 1\.\.2147483648"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1, 2**31]]}), 4)


def test_rows_may_be_longer_than_an_int32():
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2], [3]]}), 2**31, split=True)
    assert packed["seq_lengths"][:] == [[2, 1]]


def test_a_stream_waits_for_a_thousand_examples_at_most():
    read = []

    def stream():
        for document in documents([3] * 2500):
            read.append(document)
            yield {"input_ids": document}

    rows = iter(pack_dataset(IterableDataset.from_generator(stream, features=FEATURES), 6))
    read.clear()
    next(rows)
    assert len(read) <= 1001


def stream_of(*examples):
    return IterableDataset.from_generator(lambda: iter(examples))


CHANGING = {
    "None, then text": [{"source": None}, {"source": "web"}],
    "int, then float": [{"score": 1}, {"score": 2.5}],
    "another column": [{"tools": [{"name": "f"}]}, {"tool_calls": None, "tools": None}, {}],
    "another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "types of ids": [{"input_ids": np.int32([1, 2])}, {"input_ids": np.uint64([3])}, {"input_ids": torch.tensor([4])}],
    "types of masks": [{"completion_mask": [False, True]}, {"completion_mask": [0, 1]}],
    "a mask of padding in some": [{"attention_mask": [1, 1]}, {}],
}


@pytest.mark.parametrize("name", CHANGING)
def test_the_columns_of_a_stream_may_change(name):
    """Arrow would need one schema for all examples of a batch, also of columns that are not packed."""
    examples = [{"input_ids": [5, 6]} | columns for columns in CHANGING[name]] * 2
    expected = [np.asarray(example["input_ids"]).tolist() for example in examples]
    for batch_size in (1, 1000):
        assert unpack(pack_dataset(stream_of(*examples), 2, batch_size=batch_size)) == expected


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"input_ids": []}, "is empty; remove it"),
        ({"input_ids": [1] * 9}, "has 9 tokens, more than max_length 8"),
        ({"input_ids": [1], "labels": [1]}, "has labels, unlike other examples; give it to all examples, or to none"),
        ({"input_ids": None}, "lacks input_ids, unlike other examples"),
        ({"input_ids": [1], "seq_lengths": [1]}, "packed already"),
    ],
)
def test_an_example_of_a_stream_is_named_by_what_it_holds(example, message):
    """Its index alone would not help where the stream is filtered, shuffled or sharded."""
    stream = stream_of({"id": "a", "input_ids": [1]}, {"id": "b7", "text": "w" * 99} | example)
    named = r"example 1 of the stream \(id='b7', text='w+\.\.\.w+'\)"
    with pytest.raises((TypeError, ValueError), match=named) as error:
        list(pack_dataset(stream, 8))
    assert re.search(message, str(error.value))
    assert len(str(error.value)) <= 200


def test_pack_dataset_names_an_example_of_a_later_batch():
    with pytest.raises(ValueError, match="example 5 has 9 tokens"):
        pack_dataset(dataset([3, 2, 4, 6, 1, 9]), 8, batch_size=2)


def test_pack_dataset_raises_for_a_list_and_for_a_transform():
    """It would lose the labels that a transform makes, and not find the columns."""
    with pytest.raises(TypeError, match="got list"):
        pack_dataset([{"input_ids": [1]}], 8)  # pyright: ignore
    source = dataset([3, 2]).with_transform(lambda batch: {**batch, "labels": batch["input_ids"]})
    with pytest.raises(ValueError, match=r"dataset has a transform .*apply it with dataset.map\(...\) before"):
        pack_dataset(source, 4)


def test_columns_that_the_format_hides_are_not_read():
    source = Dataset.from_dict({"input_ids": [[3, 4], [5, 6]], "labels": [[-100, 4], [-100, -100]]})
    shown = source.with_format("numpy", columns=["input_ids"])
    assert pack_dataset(shown, 4).column_names == ["input_ids", "seq_lengths"]
    assert unpack(pack_dataset(source.with_format("numpy", columns=["input_ids"], output_all_columns=True), 4)) == [
        [3, 4]
    ]


def test_a_column_that_multiplies_losses_is_named(caplog):
    pack_dataset(dataset([3, 2], weight=[80, 90]), 4)
    problem = "dataset has weight, which multiplies its losses; rename or remove the column if it is no weight of the"
    assert caplog.messages == [f"{problem} loss"]


@pytest.mark.parametrize("split", [False, True])
def test_rows_from_the_cache_are_counted_too(split, tmp_path, caplog):
    """The first run made them in another process, or on another day."""
    labels = [[-100] * 9, [3, 4], [3, 4, 5]]
    Dataset.from_dict({"input_ids": [[3] * 9, [3, 4], [3, 4, 5]], "labels": labels}).save_to_disk(tmp_path)
    options = {"split": True} if split else {"truncation_mode": "keep_start"}
    counts = []
    for _ in range(2):
        pack_dataset(load_from_disk(tmp_path), 4, batch_size=2, **options)
        counts.append([record.message for record in caplog.records])
        caplog.clear()
    missing = f"left out {3 if split else 1} of {5 if split else 3} documents, which have nothing to learn"
    cut = [] if split else ["cut 1 of 3 documents to max_length 4: truncation_mode='keep_start'"]
    assert counts == [[*cut, missing]] * 2


def test_a_stream_warns_of_what_it_cuts(caplog):
    source = Dataset.from_dict({"input_ids": [[3] * 9, [3, 4]], "labels": [[3] * 9, [-100, -100]]})
    list(pack_dataset(source.to_iterable_dataset(), 4, truncation_mode="keep_end"))
    assert [record.message[:10] for record in caplog.records] == ["cut 1 of 2", "left out 1"]


@pytest.mark.parametrize("column", ["weights", "sample_weight", "loss_weights", "token_weights"])
@pytest.mark.parametrize("streamed", [False, True])
def test_weights_that_nothing_reads_are_named(column, streamed, caplog):
    source = dataset([3, 2], **{column: [0.5, 2.0]})
    pack_dataset(source.to_iterable_dataset() if streamed else source, 4)
    (record,) = caplog.records
    assert record.message.startswith(f"dataset has {column}, which nothing reads. Name it weight, give turns labels")
    caplog.clear()
    pack_dataset(dataset([3, 2], weighted=[1, 2], weight_kg=[80, 90], weight=[None, None]), 4)
    assert not caplog.records
    turns = [[{"role": "user", "content": "a", "weight": 0}]] * 2
    pack_dataset(dataset([3, 2], messages=turns), 4)
    assert caplog.records[0].message.startswith("dataset has messages[...]['weight'], which nothing reads")
