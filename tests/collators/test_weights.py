"""Weights of labels stay with their tokens in packed rows, and wrong ones are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tools.documents import dataset

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.names import IGNORED

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=20)
MODES = {"error": {}, "split": {"split": True}} | {x: {"truncation_mode": x} for x in ("keep_start", "keep_end")}


def collated(rows):
    """Return tokens, labels and weights of rows that are collated together, and where documents begin."""
    batch = DataCollatorForPackedLanguageModeling(max_length=32)(list(rows))
    names = ("input_ids", "labels", "label_weights", "position_ids")
    return [batch[name].flatten() for name in names]


@settings(max_examples=25)
@given(LENGTHS, st.sampled_from([*MODES]), st.booleans(), st.booleans(), st.integers(1, 20))
def test_weights_stay_with_their_tokens(lengths, mode, streamed, shared, batch_size):
    """The weight of a token says which token it is; every third is 0, every second negative."""
    tokens = [list(range(start, start + n)) for start, n in zip(np.cumsum([100, *lengths]), lengths, strict=False)]
    weights = [[(t % 3) * (-1) ** t * t / 8 for t in own] for own in tokens]
    data = Dataset.from_dict({"input_ids": tokens, "weight": weights, "other": lengths})
    limit = 20 if mode == "error" else 8
    source = data.to_iterable_dataset() if streamed else data
    options = MODES[mode] | {"batch_size": batch_size, "share_prefixes": shared and mode != "split"}
    assume(any(w for own in weights for w in own[1:limit]))
    found, labels, counted, positions = collated(pack_dataset(source, limit, **options))
    expected = torch.where(positions > 0, (found % 3) * (-1.0) ** found * found / 8, 0)
    assert torch.equal(counted, expected.float())
    assert torch.equal(labels, torch.where(counted == 0, IGNORED, found))
    pieces = [own[i : i + limit] for own in tokens for i in range(0, len(own), limit)]
    kept = {"split": pieces, "keep_end": [own[-limit:] for own in tokens]}.get(mode, [own[:limit] for own in tokens])
    learned = sorted(t for own in kept if any(t % 3 for t in own[1:]) for t in own[1:] if t % 3)
    assert sorted(labels[labels != IGNORED].tolist()) == learned


@settings(max_examples=25)
@given(LENGTHS, st.sampled_from([*MODES]), st.booleans(), st.booleans())
def test_examples_of_any_length_count_the_same(lengths, mode, shared, weighed):
    """Whatever is cut off; the pieces of an example count as one."""
    tokens = [[7] * n for n in lengths]
    masks = [[t % 3 != 1 for t in range(n)] for n in lengths]
    columns = {"input_ids": tokens, "assistant_masks": masks}
    weights = [(-1) ** i * (i + 1) / 4 for i in range(len(lengths))] if weighed else [1] * len(lengths)
    columns |= {"weight": weights} if weighed else {}
    limit = 20 if mode == "error" else 8
    starts = {"split": lambda n: range(0, n, limit), "keep_end": lambda n: [max(0, n - limit)]}.get(mode, lambda n: [0])
    kept = [sum(sum(own[at : at + limit][1:]) for at in starts(len(own))) for own in masks]
    assume(any(kept))
    options = MODES[mode] | {"share_prefixes": shared and mode != "split"}
    packed = pack_dataset(Dataset.from_dict(columns), limit, loss_mean="example", **options)
    *_, counted, _ = collated(packed)
    assert counted.abs().sum() == pytest.approx(sum(abs(w) for w, n in zip(weights, kept, strict=True) if n))
    assert counted.sum() == pytest.approx(sum(w for w, n in zip(weights, kept, strict=True) if n), abs=1e-5)


def test_weights_of_rows_and_of_examples_share_a_batch():
    """Rows without weights have 1."""
    weighed = Dataset.from_dict({"input_ids": [[5, 6], [7, 8, 9]], "weight": [[1, 2.0], [0.5, 0.0, -3.0]]})
    row = pack_dataset(weighed, 5)[0]
    plain = pack_dataset(Dataset.from_dict({"input_ids": [[5, 6]], "completion_mask": [[0, 1]]}), 5)[0]
    flat = {"input_ids": [5, 6, 7], "seq_lengths": [2, 1], "weight": [1, 4, 2]}
    batch = DataCollatorForPackedLanguageModeling()([row, plain, flat, {"input_ids": [3, 4, 5], "weight": -1}])
    assert batch["label_weights"].tolist() == [[0, 2, 0, 0, -3, 0, 1, 0, 4, 0, 0, -1, -1]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, 9, -100, 6, -100, 6, -100, -100, 4, 5]]
    assert batch["label_weights"].dtype == torch.float32
    assert "label_weights" not in DataCollatorForPackedLanguageModeling()([plain, flat | {"weight": None}])


def test_a_column_of_missing_weights_is_as_absent():
    source = dataset([3, 2], weight=[None, None])
    assert source.column_names == ["input_ids", "weight"]
    for rows in (pack_dataset(source, 5), pack_dataset(source.to_iterable_dataset(), 5)):
        assert list(rows) == list(pack_dataset(dataset([3, 2]), 5))


@pytest.mark.parametrize("loss_mean", ["token", "example"])
def test_tokens_of_weight_0_are_not_learned(loss_mean, caplog):
    """Nor counted; examples without another weight are left out."""
    example = {"input_ids": [5, 6, 7, 8], "weight": [2.0, 2.0, 0.0, -2.0]}
    flat = DataCollatorForPackedLanguageModeling(completion_only_loss=False)([example])
    source = Dataset.from_list([example, {"input_ids": [9, 9], "weight": [0.0, 0.0]}])
    rows = pack_dataset(source, 6, loss_mean=loss_mean)
    assert rows["seq_lengths"][:] == [[4]]
    assert caplog.messages[1:] == ["left out 1 of 2 documents, which have nothing to learn"]
    packed = DataCollatorForPackedLanguageModeling()(list(rows))
    for batch, scale in ((flat, 1), (packed, 2 if loss_mean == "example" else 1)):
        assert batch["labels"].tolist() == [[-100, 6, -100, 8]]
        assert (batch["label_weights"] * scale).tolist() == [[0, 2, 0, -2]]


def test_weights_are_cut_with_their_tokens():
    example = {"input_ids": [5, 6, 7, 8], "weight": [1, 2, 3, 4]}
    for mode, kept in (("keep_start", [0, 2, 3]), ("keep_end", [0, 3, 4])):
        batch = DataCollatorForPackedLanguageModeling(max_length=3, truncation_mode=mode)([example])
        assert batch["label_weights"].tolist() == [kept]


WRONG = {
    "text": ("0.5", TypeError, "must be a number, or one number per token, got '0.5'; correct it, or rename"),
    "missing": (None, ValueError, "lacks weight, unlike other examples; give it to all examples, or to none"),
    "boolean": (True, TypeError, "must be a number, or one number per token, got True"),
    "a missing number": ([1.0, None, 2.0], TypeError, "must be a number, or one number per token"),
    "ragged": ([[1.0], [1.0, 2.0], [1.0]], TypeError, "must be a number, or one number per token"),
    "not a number": (
        [1.0, float("nan"), 2.0],
        ValueError,
        "must be finite and at most 1e20, got nan; correct",
    ),
    "infinite": (np.float16("-inf"), ValueError, "must be finite and at most 1e20, got -inf"),
    "huge": (1e21, ValueError, r"must be finite and at most 1e20, got 1e\+21"),
    "short": ([1.0, 2.0], ValueError, "has 2 entries, but its input_ids have 3; give one number per token, or one"),
    "empty": ([], ValueError, "has 0 entries, but its input_ids have 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_name_their_example(name):
    weight, error, problem = WRONG[name]
    weights = [1.0, 1.0, 1.0] if isinstance(weight, list) else 1.0, weight
    rows = [{"input_ids": [5, 6, 7], "weight": own} for own in weights]
    if name != "missing":
        with pytest.raises(error, match=f"^weight of example 1 {problem}"):
            DataCollatorForPackedLanguageModeling()(rows)
    sources = [IterableDataset.from_generator(lambda: iter(rows))]
    if name not in ("text", "boolean", "ragged"):  # which Arrow refuses
        sources.append(Dataset.from_list(rows))
    for source in sources:
        with pytest.raises(error, match=f"example 1 .*{problem}"):
            list(pack_dataset(source, 4))


@pytest.mark.parametrize(("columns", "options"), [({"weight": [1, 2]}, {}), ({}, {"loss_mean": "example"})], ids=str)
def test_token_types_have_no_place_in_rows_with_weights(columns, options):
    source = dataset([3, 2], token_type_ids=[[0, 1, 1], [0, 1]], **columns)
    with pytest.raises(ValueError, match="have no token_type_ids; remove that column, or leave out the column weight"):
        pack_dataset(source, 4, **options)


def test_labels_other_than_the_token_have_no_weights():
    rows = Dataset.from_dict({"input_ids": [[5, 6], [5, 6]], "labels": [[5, 6], [5, 7]], "weight": [1, 1]})
    with pytest.raises(ValueError, match="label 1 of example 1 is neither its token nor -100, which weights and"):
        pack_dataset(rows, 4)


@pytest.mark.parametrize("value", ["sequence", True, None])
def test_a_mean_of_another_name_raises(value):
    with pytest.raises(ValueError, match="loss_mean must be 'token' or 'example', got"):
        pack_dataset(dataset([3]), 4, loss_mean=value)


def test_weights_of_one_leave_rows_as_they_are():
    """Examples are packed alike, and a document of one token stays."""
    lengths = [7, 3, 9, 1, 1, 4]
    plain = pack_dataset(dataset(lengths), 9)
    for options in ({"loss_mean": "example"}, {}):
        source = dataset(lengths) if options else dataset(lengths, weight=[1] * len(lengths))
        weighed = pack_dataset(source, 9, **options)
        kept = [length for row in plain["seq_lengths"] for length in row if options or length > 1]
        assert sorted(length for row in weighed["seq_lengths"] for length in row) == sorted(kept)
        assert set(weighed.column_names) == {"input_ids", "label_weights", "seq_lengths"}
