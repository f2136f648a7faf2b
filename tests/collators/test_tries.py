"""Rows of shared prefixes hold every example, learn labels as often as examples do, and cannot be taken for others."""

from __future__ import annotations

import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashmask_hf.collators import DataCollatorForPackedEncoders, DataCollatorForPackedLanguageModeling, pack_dataset
from flashmask_hf.collators.prefixes import cut_tries, share_prefixes
from flashmask_hf.collators.trees import learn_once
from flashmask_hf.collators.tries import _EDGES, _order, order_by_prefixes, pack_shared_rows
from flashmask_hf.names import EXAMPLE_TOKENS, IGNORED, LABEL_WEIGHTS, VECTORS

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
EXAMPLES = st.lists(TOKENS, min_size=1, max_size=8)


def arrays(rows):
    return [np.array(row, dtype=np.int32) for row in rows]


def computed(sequences):
    """Tokens of a row with the trie of sequences."""
    return sum(len(learn_once(forest)[0].tokens) for forest in share_prefixes(sequences)[0])


def fewest(sequences, row_length):
    """The fewest tokens of tries of sorted neighbours, by trying every cut."""
    order = sorted(sequences, key=lambda row: row.tolist())
    best = [0]
    for end in range(1, len(order) + 1):
        tries = [order[start:end] for start in range(end)]
        fits = [len({int(row[0]) for row in trie}) == 1 and computed(trie) <= row_length for trie in tries]
        best.append(min(best[start] + computed(tries[start]) for start in range(end) if fits[start]))
    return best[-1]


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=14), st.integers(7, 12))
@example([[1], [1, 1], [1] * 7, [1] * 7], 7)
@example([[0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 1], [0, 0, 0, 0, 1, 1]], 7)
def test_tries_fit_rows_and_compute_the_fewest_tokens(rows, row_length):
    sequences = arrays(rows)
    groups = cut_tries(sequences, row_length)
    assert sorted(chain(*groups)) == list(range(len(rows)))
    sizes = [computed([sequences[index] for index in group]) for group in groups]
    assert max(sizes) <= row_length
    assert sum(sizes) == fewest(sequences, row_length)


def test_a_short_common_beginning_is_not_shared():
    sequences = [np.array([1, *[n] * 64]) for n in (2, 3)]
    assert cut_tries(sequences, 200) == [[0], [1]]
    assert cut_tries([row[:64] for row in sequences], 200) == [[0, 1]]


def paths(batch, row):
    """The tokens and keys of each token of a row: the tokens before it that see it, by the mask indices."""
    ends = batch[VECTORS][row, 0, :, 0].tolist()
    return [[key for key in range(at + 1) if at < ends[key]] for at in range(len(ends)) if ends[at]]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(TOKENS, st.lists(st.sampled_from((0, 1, -2)), min_size=7, max_size=7)), min_size=1, max_size=8),
    st.integers(7, 20),
)
def test_every_label_is_learned_after_its_own_beginning_as_often_as_by_the_examples(examples, row_length):
    """Each pair of a beginning and its next token has the weight that the examples give it in a loop."""
    sequences, weights = arrays([row for row, _ in examples]), [np.array(own[: len(row)]) for row, own in examples]
    want: dict[tuple[int, ...], float] = {}
    for row, own in zip(sequences, weights, strict=True):
        for end in range(1, len(row)):
            if own[end]:
                beginning = tuple(row[: end + 1].tolist())
                want[beginning] = want.get(beginning, 0) + own[end]
    packed = pack_shared_rows(sequences, weights, row_length)
    assert sorted(chain(*packed["example_lengths"])) == sorted(map(len, sequences))
    rows = [dict(zip(packed, (*row,), strict=True)) for row in zip(*packed.values(), strict=True)]
    rows = [row | {"input_ids": [*row["input_ids"], []], LABEL_WEIGHTS: [*row[LABEL_WEIGHTS], []]} for row in rows]
    batch = DataCollatorForPackedLanguageModeling(max_length=row_length)(rows)
    got: dict[tuple[int, ...], float] = {}
    for row, weights_of_row in enumerate(batch[LABEL_WEIGHTS].tolist()):
        tokens, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
        seen = paths(batch, row)
        for at, keys in enumerate(seen):
            assert batch["position_ids"][row, at] == len(keys) - 1
            if weights_of_row[at]:
                assert labels[at] == tokens[at]
                beginning = (
                    *(tokens[key] for key in seen[at - 1]),
                    tokens[at],
                )  # what the token before it in the row sees
                got[beginning] = got.get(beginning, 0) + weights_of_row[at]
            else:
                assert labels[at] == IGNORED
    assert got == want
    assert batch[LABEL_WEIGHTS].abs().sum() == sum(np.abs(own[1:]).sum() for own in weights)
    assert batch[EXAMPLE_TOKENS].sum() == sum(map(len, sequences))


def turns(seed=0, trajectories=6, steps=8):
    """Examples of growing histories, shuffled, and a document of its own."""
    generator, rows = np.random.default_rng(seed), [[7] * 40]
    for _ in range(trajectories):
        history = generator.integers(0, 50, 30).tolist()
        for _ in range(steps):
            rows.append(history + generator.integers(0, 50, 9).tolist())
            history += generator.integers(0, 50, 20).tolist()
    generator.shuffle(rows)
    return rows


def tokens_of(packed):
    return sum(map(sum, packed["seq_lengths"]))


def test_a_dataset_is_grouped_by_prefixes_in_the_order_of_its_first_examples():
    rows = turns()
    order = order_by_prefixes(Dataset.from_dict({"input_ids": rows}), None)
    ordered = [tuple(rows[index][:24]) for index in order]
    assert sorted(order) == list(range(len(rows)))
    assert list(dict.fromkeys(ordered)) == list(dict.fromkeys(tuple(row[:24]) for row in rows))
    assert ordered == sorted(ordered, key=list(dict.fromkeys(ordered)).index)


def test_examples_are_ordered_edge_by_edge_in_little_memory():
    draw = np.random.default_rng(0)
    hashes = draw.integers(1, 6, (4000, len(_EDGES))) * (np.arange(len(_EDGES)) < draw.integers(0, 16, (4000, 1)))
    tracemalloc.start()
    order = _order([hashes[:1000], hashes[1000:]])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    firsts = [np.unique(column, return_index=True, return_inverse=True)[1:] for column in hashes.T]
    assert np.array_equal(order, np.lexsort([first[groups] for first, groups in firsts][::-1]))
    assert peak < 120 * len(hashes)


def test_a_shuffled_dataset_shares_as_much_in_small_batches():
    source = Dataset.from_dict({"input_ids": turns()})
    whole, small = (pack_dataset(source, 256, share_prefixes=True, row_length=512, batch_size=n) for n in (1000, 10))
    plain = pack_dataset(source, 256)
    assert 3 * tokens_of(whole) < tokens_of(plain)
    assert tokens_of(small) < 1.2 * tokens_of(whole)
    for packed in (whole, small):
        assert sum(map(sum, packed["example_lengths"])) == tokens_of(plain)
        assert max(map(sum, packed["seq_lengths"])) <= 512


def test_rows_are_deterministic_and_cached(tmp_path):
    Dataset.from_dict({"input_ids": turns()}).save_to_disk(tmp_path)
    packs = [
        pack_dataset(Dataset.load_from_disk(str(tmp_path)), 256, share_prefixes=True, num_proc=n)
        for n in (None, None, 1)
    ]
    assert packs[0][:] == packs[1][:] == packs[2][:]
    assert packs[0]._fingerprint == packs[1]._fingerprint
    assert packs[0].cache_files == packs[1].cache_files != []
    other = pack_dataset(Dataset.load_from_disk(str(tmp_path)), 256, share_prefixes=True, row_length=300)
    assert other._fingerprint != packs[0]._fingerprint


def test_a_stream_shares_what_is_packed_together():
    rows = sorted(turns())
    stream = IterableDataset.from_generator(lambda: ({"input_ids": row} for row in rows))
    packed = list(pack_dataset(stream, 256, share_prefixes=True, batch_size=len(rows)))
    assert packed == list(pack_dataset(Dataset.from_dict({"input_ids": rows}), 256, share_prefixes=True))


def test_rows_are_longer_than_documents_without_sharing():
    source = Dataset.from_dict({"input_ids": [[1] * 4, [2] * 3, [3] * 4]})
    assert pack_dataset(source, 4, row_length=8)["seq_lengths"][:] == [[4, 4], [3]]
    with pytest.raises(ValueError, match=r"example 0 has 4 tokens, more than max_length 3"):
        pack_dataset(source, 3, row_length=8)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"labels": [[-100, 2, 3], [-100, 9, 3]]},
            {},
            r"label 1 of example 1 is neither its token nor -100.*correct it",
        ),
        (
            {"token_type_ids": [[0, 0, 0], [0, 0, 0]]},
            {},
            "have no token_type_ids; remove .* leave out .* share_prefixes",
        ),
        ({}, {"split": True, "truncation_mode": "error"}, "split=True .* leave split or share_prefixes out"),
        ({}, {"row_length": 2}, "row_length must be at least 3.*max_length"),
    ],
)
def test_what_cannot_be_shared_raises(columns, options, message):
    source = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 3]], **columns})
    with pytest.raises(ValueError, match=message):
        pack_dataset(source, 3, share_prefixes=True, **options)


def test_errors_name_examples_by_their_place_in_the_dataset():
    rows = [[1] * 20, [2] * 20, [1] * 30]
    with pytest.raises(ValueError, match="example 2 has 30 tokens"):
        pack_dataset(Dataset.from_dict({"input_ids": rows}), 20, share_prefixes=True)
    for empty in ([], None):
        with pytest.raises(ValueError, match=r"example 1 (is empty|lacks input_ids)"):
            pack_dataset(Dataset.from_dict({"input_ids": [[1], empty, [1]]}), 20, share_prefixes=True)


def test_losses_are_counted_in_examples_and_cut_ends_are_warned_of(caplog):
    source = Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3], [1, 2], [4] * 9, [1, 2, 6]],
            "labels": [[-100, 2, 3], [-100, -100], [4] * 9, [1, 2, 6]],
        }
    )
    pack_dataset(source, 8, share_prefixes=True, truncation_mode="keep_end")
    messages = [record.message for record in caplog.records]
    assert "cuts prefixes off longer examples" in messages[0]
    assert messages[1:] == [
        "cut 1 of 4 documents to max_length 8: truncation_mode='keep_end'",
        "left out 1 of 4 documents, which have nothing to learn",
    ]


def test_other_collators_and_removed_weights_raise():
    row = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2], [1, 3]]}), 8, share_prefixes=True)[0]
    with pytest.raises(ValueError, match="token ids must not be negative"):
        DataCollatorForPackedEncoders()([row])
    with pytest.raises(
        ValueError, match=r"has no label_weights.*use PackedSFTTrainer, or pack without the column weight"
    ):
        DataCollatorForPackedLanguageModeling()([{"input_ids": row["input_ids"]}])
    with pytest.raises(ValueError, match="layout of its input_ids"):
        DataCollatorForPackedLanguageModeling()([row | {LABEL_WEIGHTS: row[LABEL_WEIGHTS][1:]}])
    with pytest.raises(ValueError, match="more than the 3 of a row"):
        DataCollatorForPackedLanguageModeling(max_length=3)([row])


def test_rows_with_and_without_shared_prefixes_in_one_batch():
    shared = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]}), 8, share_prefixes=True)[0]
    plain = pack_dataset(Dataset.from_dict({"input_ids": [[5, 6], [7, 8]], "labels": [[5, 6], [-100, 8]]}), 8)[0]
    batch = DataCollatorForPackedLanguageModeling()([shared, plain])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 2, 4, 5, 6, 7, 8]]
    assert batch[LABEL_WEIGHTS].tolist() == [[0, 2, 1, 0, 1, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 4, -100, 6, -100, 8]]
    assert batch[EXAMPLE_TOKENS].tolist() == [6, 4]
    assert batch[LABEL_WEIGHTS].dtype == torch.float32
