"""The collator of shared questions: TRL's batch, the packed rows, and the index between them."""

import logging

import numpy as np
import pytest
import torch
from trl.trainer.dpo_trainer import DataCollatorForPreference

from flashmask_hf import FlashMask, masks
from flashmask_hf.collators import DataCollatorForSharedQuestion
from flashmask_hf.trainers.formats import preference_columns


def examples(shapes, seed=0):
    """Draw an example per (question length, [answer lengths]); with more than two answers it has `answers_ids`."""
    rng = np.random.default_rng(seed)

    def tokens(count):
        return rng.integers(3, 60, count).tolist()

    made = []
    for question, answers in shapes:
        example = {"prompt_ids": tokens(question)}
        if len(answers) == 2:
            example |= {"chosen_ids": tokens(answers[0]), "rejected_ids": tokens(answers[1])}
        else:
            example["answers_ids"] = [tokens(answer) for answer in answers]
        made.append(example)
    return made


PAIR = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
PAIRS = [(4, [3, 5]), (1, [1, 1]), (7, [2, 6]), (3, [8, 1])]


@pytest.mark.parametrize("options", [{}, {"row_length": 20}, {"pad_to_multiple_of": 16}], ids=str)
def test_the_sequences_equal_the_batch_of_trl(options):
    batch = DataCollatorForSharedQuestion(pad_token_id=9, **options)(examples(PAIRS))
    for key, value in DataCollatorForPreference(pad_token_id=9)(examples(PAIRS)).items():
        assert torch.equal(batch[key], value), key
    assert next(iter(batch)) == "input_ids"


@pytest.mark.parametrize("options", [{}, {"row_length": 20}, {"pad_to_multiple_of": 16, "pad_token_id": 9}], ids=str)
@pytest.mark.parametrize("shapes", [PAIRS, [(4, [3, 5, 2]), (2, [1, 1]), (3, [2, 2, 2, 2])]], ids=["pairs", "mixed"])
def test_the_index_maps_every_token_and_the_mask_shows_its_path(shapes, options):
    batch = DataCollatorForSharedQuestion(**options)(examples(shapes))
    real = batch["attention_mask"].bool()
    index = batch["packed_index"]
    assert torch.equal(batch["packed_input_ids"].flatten()[index][real], batch["input_ids"][real])
    positions = torch.arange(real.shape[1]).expand_as(real)
    assert torch.equal(batch["packed_position_ids"].flatten()[index][real], positions[real])
    rows, length = batch["packed_input_ids"].shape
    visible = FlashMask(batch["startend_row_indices"], causal=True).to_dense(length)[:, 0]
    for sequence, at in zip(real, index, strict=True):
        path = at[sequence]
        row, place = path // length, path % length
        assert (row == row[0]).all()
        for depth, token in enumerate(place.tolist()):  # a token sees its path up to itself and nothing else
            assert visible[row[0], token].nonzero().flatten().tolist() == place[: depth + 1].tolist()
    computed = sum(question + sum(answers) for question, answers in shapes)
    assert int((batch["startend_row_indices"] > 0).sum()) == computed
    used = torch.zeros(rows * length, dtype=torch.bool)
    used[index[real]] = True
    assert int(used.sum()) == computed


def test_the_mask_of_one_row_equals_masks_share_question():
    batch = DataCollatorForSharedQuestion()(examples([(4, [3, 5]), (2, [1, 2, 3])]))
    assert torch.equal(batch["startend_row_indices"], masks.share_question([(4, [3, 5]), (2, [1, 2, 3])]).indices)


def test_question_index_names_the_example_of_each_sequence():
    batch = DataCollatorForSharedQuestion()(examples([(4, [3, 5, 2]), (2, [1, 1])]))
    assert batch["question_index"].tolist() == [0, 1, 0, 1, 0]
    assert "question_index" not in DataCollatorForSharedQuestion()(examples(PAIRS))


def test_equal_answers_read_one_place():
    """Rounding makes the results of two places differ, and would decide which of two equal answers is preferred."""
    example = {"prompt_ids": [5], "answers_ids": [[6, 7], [8, 9], [6, 7]]}
    first, other, again = DataCollatorForSharedQuestion()([example])["packed_index"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_indices_of_padding_are_spread_over_the_rows():
    """Gradients of equal indices, all zero for padding, would be added one after another."""
    batch = DataCollatorForSharedQuestion()(examples([(2, [60, 1]), (1, [1, 1])]))
    padding = batch["packed_index"][batch["attention_mask"] == 0]
    assert padding.bincount().max() <= batch["packed_index"].numel() // batch["packed_input_ids"].numel() + 1


def test_reference_log_probabilities_are_passed_on():
    same = {"ref_rejected_logps": np.float16(-2.0)}
    given = [{**e, "ref_chosen_logps": -1.5 * i, **same} for i, e in enumerate(examples(PAIRS))]
    batch = DataCollatorForSharedQuestion()(given)
    assert torch.equal(batch["ref_chosen_logps"], torch.tensor([0.0, -1.5, -3.0, -4.5]))
    assert torch.equal(batch["ref_rejected_logps"], torch.full((4,), -2.0))


def test_columns_that_are_none_count_as_absent():
    batch = DataCollatorForSharedQuestion()([PAIR | {"answers_ids": None, "ref_chosen_logps": None}, PAIR])
    assert batch.keys() == DataCollatorForSharedQuestion()([PAIR, PAIR]).keys()


def test_keep_start_equals_trl_and_warns_once(caplog):
    collator = DataCollatorForSharedQuestion(max_length=9, truncation_mode="keep_start")
    with caplog.at_level(logging.WARNING):
        batch = collator(examples(PAIRS))
        collator(examples(PAIRS))
    expected = DataCollatorForPreference(pad_token_id=0, max_length=9)(examples(PAIRS))
    for key, value in expected.items():
        assert torch.equal(batch[key], value), key
    (record,) = caplog.records
    assert "example 2 of a batch has 13 tokens with its longest answer" in record.message
    assert "cuts answers to max_length 9" in record.message


def test_keep_end_cuts_the_question_by_the_same_amount_for_all_answers():
    (example,) = examples([(7, [2, 6])])
    batch = DataCollatorForSharedQuestion(max_length=9, truncation_mode="keep_end")([example])
    assert batch["packed_input_ids"][0].tolist() == (
        example["prompt_ids"][4:] + example["chosen_ids"] + example["rejected_ids"]
    )
    assert batch["completion_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation_mode": "keep"}, "truncation_mode must be one of error, keep_start, keep_end, got 'keep'"),
        ({"max_length": True}, "max_length must be an int, got True"),
        ({"row_length": 10, "pad_to_multiple_of": 4}, "row_length must be a multiple of pad_to_multiple_of 4, got 10"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DataCollatorForSharedQuestion(**options)


BAD = {
    "text": ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, ValueError, "It has: prompt, chosen, rejected"),
    "two kinds": (
        [{"prompt_ids": [1], "answers_ids": [[2], [3]], "chosen_ids": [2], "rejected_ids": [3]}],
        {},
        ValueError,
        "example 0 needs prompt_ids and .*, or prompt_ids and answers_ids, but not both",
    ),
    "no reference": (
        [PAIR | {"ref_chosen_logps": -1.0}, PAIR],
        {},
        ValueError,
        "example 1 has no ref_chosen_logps, but example 0 has; give it to all, or to none",
    ),
    "reference beyond float32": (
        [PAIR | {"ref_chosen_logps": -(10**400)}],
        {},
        ValueError,
        "ref_chosen_logps of example 0 must be finite and at most 3.4e38",
    ),
    "infinite reference in float16": (
        [PAIR | {"ref_chosen_logps": np.float16("inf")}],
        {},
        ValueError,
        "ref_chosen_logps of example 0 must be finite and at most 3.4e38, got inf",
    ),
    "weight not a number": (
        [PAIR | {"weight": "a"}],
        {},
        TypeError,
        "weight of example 0 .* number, got 'a'; .* rename",
    ),
    "negative weight": (
        [PAIR | {"weight": -1}],
        {},
        ValueError,
        "weight of example 0 must be at least 0, got -1; swap",
    ),
    "one answer": ([{"prompt_ids": [1], "answers_ids": [[2]]}], {}, ValueError, "example 0 has 1 answers, but"),
    "empty question": (examples([(1, [1, 1]), (0, [1, 1])]), {}, ValueError, "example 1 has an empty question"),
    "empty answer": (examples([(1, [1, 1]), (2, [1, 0])]), {}, ValueError, "answer 1 of example 1 is empty"),
    "not integers": (
        [{"prompt_ids": [1.5], "chosen_ids": [1], "rejected_ids": [1]}],
        {},
        TypeError,
        "prompt_ids of example 0 must be integers",
    ),
    "too long": (examples(PAIRS), {"max_length": 10}, ValueError, "example 2 has 13 tokens with its longest answer"),
    "question fills": (
        examples(PAIRS),
        {"max_length": 7, "truncation_mode": "keep_start"},
        ValueError,
        "the question of example 2 has 7 tokens and fills max_length 7",
    ),
    "answer fills": (
        examples(PAIRS),
        {"max_length": 6, "truncation_mode": "keep_end"},
        ValueError,
        "the longest answer of example 2 has 6 tokens and fills max_length 6",
    ),
    "longer than the row": (examples(PAIRS), {"row_length": 12}, ValueError, "example 2 has 15 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_example_raises_with_its_index(case):
    given, options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        DataCollatorForSharedQuestion(**options)(given)


def test_preference_columns_of_a_string_prompt_and_conversations_without_it():
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    columns = preference_columns({"prompt": "Why?", **answers}, 0)
    assert columns == {"prompt": [{"role": "user", "content": "Why?"}], **answers}


def test_preference_columns_of_messages_that_the_answers_repeat():
    user, answers = {"role": "user", "content": "Why?"}, {n: {"role": "assistant", "content": n} for n in ("a", "b")}
    whole = {"prompt": [user], "chosen": [user, answers["a"]], "rejected": [user, answers["b"]]}
    assert preference_columns(whole, 0) == {"prompt": [user], "chosen": [answers["a"]], "rejected": [answers["b"]]}
    one = {"prompt": [user], "chosen": [user, answers["a"]], "rejected": [answers["b"]]}
    assert preference_columns(one, 0) == one
    bare = {"prompt": [user], "chosen": [user, answers["a"]], "rejected": [user]}
    assert preference_columns(bare, 0) == bare  # the rejected answer repeats no prompt: it would be empty


def test_weights_of_raw_examples_with_images_are_read():
    """The reader of images leaves other columns out."""

    def read_images(examples):
        return [{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8], "sizes": []} for _ in examples], {}

    batch = DataCollatorForSharedQuestion(read_images=read_images)([{"weight": 2}, {"weight": 0.5}])
    assert batch["pair_weights"].tolist() == [2.0, 0.5]
