"""Random inputs, malformed ones too: an error that names what is wrong, or the row that plain Python computes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tools.documents import flat, random_parents

from flashmask_hf.collators import (
    DataCollatorForMultiAnswerReward,
    DataCollatorForPackedEncoders,
    DataCollatorForPackedLanguageModeling,
    DataCollatorForSharedQuestion,
    DataCollatorForTrees,
    Forest,
    pack_forests,
)
from flashmask_hf.collators.dataset import _pack_table

EXTREMES = [0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, 1.5, float("nan"), None, "1", True, [1], [], {}]


@pytest.fixture(params=[2_000, pytest.param(10_000, marks=pytest.mark.full)])
def inputs(request: pytest.FixtureRequest) -> int:
    """Number of inputs that a test draws."""
    return request.param


def integers(draw: random.Random, count: int, low: int = 0, high: int = 9) -> list[int]:
    return [draw.randint(low, high) for _ in range(count)]


def spoil(draw: random.Random, value: Any) -> Any:
    """Change a value somewhere, or make another of it."""
    if isinstance(value, list) and value and draw.random() < 0.7:
        value = list(value)
        at = draw.randrange(len(value))
        change = draw.randrange(4)
        if change == 0:
            value[at] = spoil(draw, value[at])
        elif change == 1:
            value[at] = draw.choice(EXTREMES)
        elif change == 2:
            del value[at]
        else:
            value.insert(at, draw.choice(EXTREMES))
        return value
    return draw.choice(EXTREMES)


def disguise(draw: random.Random, value: Any) -> Any:
    """Return the same column as an array or a tensor, sometimes."""
    if (
        draw.random() < 0.2
        and isinstance(value, list)
        and value
        and all(type(x) is int and abs(x) < 2**63 for x in value)
    ):
        return draw.choice([np.array, torch.tensor])(value)
    return value


def attempt(function, *arguments, names: tuple[str, ...], **options):
    """Return the result, or None after an error that names an argument; any other error fails the test."""
    try:
        return function(*arguments, **options)
    except (ValueError, TypeError) as error:
        message = str(error)
    assert any(name in message for name in names), message
    return None


def documents_of(draw: random.Random) -> list[list[int]]:
    return [integers(draw, draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]


def language_example(draw: random.Random) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """Draw a good example, its documents, and its labels."""
    documents = documents_of(draw)
    kind = draw.choice(["plain", "seq_lengths", "position_ids", "packed"])
    documents = documents[:1] if kind == "plain" else documents
    tokens = flat(documents)
    example: dict[str, Any] = {"input_ids": tokens}
    labels = list(tokens)
    selection = draw.choice([None, "labels", "completion_mask", "assistant_masks"])
    if selection == "labels":
        labels = [draw.choice([token, -100]) for token in tokens]
        example["labels"] = labels
    elif selection is not None:
        mask = [1, *integers(draw, len(tokens) - 1, 0, 1)]
        labels = [token if bit else -100 for token, bit in zip(tokens, mask, strict=True)]
        example[selection] = mask
    if kind == "seq_lengths":
        example["seq_lengths"] = list(map(len, documents))
    elif kind == "position_ids":
        example["position_ids"] = [at for document in documents for at in range(len(document))]
    elif kind == "packed":
        example["input_ids"] = [*documents, []]
        if "labels" in example:
            ends = np.cumsum([0, *map(len, documents)]).tolist()
            example["labels"] = [*(labels[a:b] for a, b in pairwise(ends)), []]
    return {name: disguise(draw, value) for name, value in example.items()}, documents, labels


NAMED = ("example ", "examples", "max_length", "pad_to_multiple_of", "pad_token_id", "truncation_mode", "row_length")


def test_language_modeling_collator(inputs):
    draw = random.Random(0)
    right = 0
    for _ in range(inputs):
        drawn = [language_example(draw) for _ in range(draw.randint(1, 3))]
        examples = [example for example, _, _ in drawn]
        good = draw.random() < 0.5
        if not good:
            at = draw.randrange(len(examples))
            column = draw.choice([*examples[at], "labels", "seq_lengths", "position_ids", "attention_mask"])
            value = examples[at].get(column, integers(draw, 3))
            value = value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
            examples[at] = {**examples[at], column: spoil(draw, value)}
        batch = attempt(DataCollatorForPackedLanguageModeling(), examples, names=NAMED)
        assert not good or batch is not None
        if batch is None:
            continue
        assert_rows_make_sense(batch)
        if good:
            right += 1
            documents = [document for _, own, _ in drawn for document in own]
            labels = flat(own for _, _, own in drawn)
            ends = np.cumsum(list(map(len, documents))).tolist()
            starts = [0, *ends[:-1]]
            expected = [-100 if at in starts else label for at, label in enumerate(labels)]
            assert batch["input_ids"].tolist() == [flat(documents)]
            assert batch["labels"].tolist() == [expected]
            assert batch["position_ids"].tolist() == [[at for document in documents for at in range(len(document))]]
            rows = [end for end, document in zip(ends, documents, strict=True) for _ in document]
            assert batch["startend_row_indices"].flatten().tolist() == rows
            if all("labels" in one for one in examples):
                both = DataCollatorForPackedEncoders()(examples)
                assert both["labels"].tolist() == [labels]
                assert both["startend_row_indices"][0, 0, :, 0].tolist() == rows
    assert right > inputs // 3


def assert_rows_make_sense(batch: dict[str, torch.Tensor], prefix: str = "") -> None:
    """Assert what holds for the rows of any batch: positions start at 0 and grow by 1 or fall, ends are behind."""
    positions, ends = batch[f"{prefix}position_ids"], batch["startend_row_indices"][:, 0, :, 0]
    at = torch.arange(positions.shape[1])
    assert ((ends > at) | (ends == 0)).all()
    assert (ends <= positions.shape[1]).all()
    assert (positions[:, 0] == 0).all()
    assert (positions[:, 1:] <= positions[:, :-1] + 1).all()
    assert (positions >= 0).all()


def test_options(inputs):
    draw = random.Random(1)
    kinds = [DataCollatorForPackedLanguageModeling, DataCollatorForSharedQuestion, DataCollatorForMultiAnswerReward]
    for _ in range(inputs):
        kind = draw.choice([*kinds, DataCollatorForPackedEncoders, DataCollatorForTrees])
        fields = [name for name in kind.__dataclass_fields__ if not name.startswith("_")]
        value = draw.choice([*EXTREMES, np.int64(8), np.uint8(3), np.float32(2), np.True_, torch.tensor(4), b"x"])
        name = draw.choice(fields)
        if name in ("completion_only_loss", "read_images", "rope_index"):
            continue
        collator = attempt(kind, names=(name, *NAMED), **{name: value})
        if collator is not None and name not in ("score_margin", "truncation_mode"):
            found = getattr(collator, name)
            assert found is None or (type(found) is int and found >= (name != "pad_token_id"))


def answers_example(draw: random.Random) -> dict[str, Any]:
    question, answers = integers(draw, draw.randint(1, 4)), documents_of(draw)
    answers = answers if len(answers) > 1 else answers * 2
    return {"prompt_ids": question, "answers_ids": answers}


@pytest.mark.parametrize("kind", [DataCollatorForSharedQuestion, DataCollatorForMultiAnswerReward])
def test_answer_collators(kind, inputs):
    draw = random.Random(2)
    for _ in range(inputs):
        examples = [answers_example(draw) for _ in range(draw.randint(1, 3))]
        good = draw.random() < 0.5
        if not good:
            at = draw.randrange(len(examples))
            column = draw.choice(["prompt_ids", "answers_ids", "chosen_ids", "scores", "margin", "ref_chosen_logps"])
            examples[at] = {**examples[at], column: spoil(draw, examples[at].get(column, [1, 2]))}
        batch = attempt(kind(), examples, names=NAMED)
        assert not good or batch is not None
        if batch is None:
            continue
        assert_rows_make_sense(batch, "packed_")
        packed = batch["packed_input_ids"].flatten()
        if not good:
            continue
        if kind is DataCollatorForMultiAnswerReward:
            most = max(len(one["answers_ids"]) for one in examples)
            last = [[a[-1] for a in one["answers_ids"]] for one in examples]
            expected = [row + [row[-1]] * (most - len(row)) for row in last]
            assert packed[batch["packed_index"]].view(len(examples), most).tolist() == expected
        else:
            real = batch["attention_mask"].bool()
            assert torch.equal(packed[batch["packed_index"]][real], batch["input_ids"][real])
            found = [ids[keep].tolist() for ids, keep in zip(batch["input_ids"], real, strict=True)]
            assert sorted(found) == sorted(one["prompt_ids"] + a for one in examples for a in one["answers_ids"])


def test_forests(inputs):
    draw = random.Random(3)
    for _ in range(inputs):
        parents = random_parents(draw.randint)
        segments = [integers(draw, draw.randint(1, 4)) for _ in parents]
        arguments: list[Any] = [flat(segments), list(map(len, segments)), parents]
        good = draw.random() < 0.5
        if not good:
            at = draw.randrange(3)
            arguments[at] = spoil(draw, arguments[at])
        names = ("tokens", "lengths", "parents", "segment")
        forest = attempt(Forest, *(disguise(draw, one) for one in arguments), names=names)
        assert not good or forest is not None
        if forest is None:
            continue
        assert_rows_make_sense(pack_forests([forest, forest]).batch())


def test_pack_dataset(inputs):
    draw = random.Random(4)
    options = {"completion_only_loss": None, "max_position_embeddings": None, "version": 1, "order": None}
    options |= {"loss_mean": "token", "row_length": 8, "share_prefixes": False}
    for _ in range(inputs):
        documents = [integers(draw, draw.randint(1, 12)) for _ in range(draw.randint(1, 6))]
        split, mode = draw.choice([(True, "error"), (False, "keep_start"), (False, "keep_end"), (False, "error")])
        columns: dict[str, Any] = {"input_ids": documents}
        if draw.random() < 0.3:
            columns["labels"] = [[draw.choice([token, -100]) for token in one] for one in documents]
        good = draw.random() < 0.5
        if not good:
            name = draw.choice(["input_ids", "labels", "completion_mask", "attention_mask"])
            columns[name] = spoil(draw, columns.get(name, documents))
        try:
            table = pa.table(columns)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue  # not a dataset
        names = ("example ", "column ", "input_ids", "labels")
        given = [name for name in columns if name != "attention_mask"]
        limits = {"max_length": 8, "mode": "split" if split else mode, "given": given}
        packed = attempt(_pack_table, table, range(len(table)), names=names, **limits, **options)
        assert not good or packed is not None or any(len(one) > 8 for one in documents)
        if packed is None or not good:
            continue
        cut = {"error": slice(0, 8), "keep_start": slice(0, 8), "keep_end": slice(-8, None)}[mode]
        spans = [[slice(at, at + 8) for at in range(0, len(one), 8)] if split else [cut] for one in documents]
        labels = columns.get("labels", documents)
        pairs = [(d[s], o[s]) for d, o, own in zip(documents, labels, spans, strict=True) for s in own]
        if "labels" in columns:
            pairs = [pair for pair in pairs if any(label != -100 for label in pair[1][1:])]
        found = packed.to_pydict()
        assert all(row[-1] == [] and sum(map(len, row)) <= 8 for row in found["input_ids"])
        assert found["seq_lengths"] == [[len(one) for one in row[:-1]] for row in found["input_ids"]]
        every = [document for row in found["input_ids"] for document in row[:-1]]
        own = [document for row in found.get("labels", found["input_ids"]) for document in row[:-1]]
        assert sorted(zip(every, own, strict=True)) == sorted(pairs)
