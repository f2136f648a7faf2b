"""The collator of reward models: its batch, the rewards that a model computes from it, and its errors."""

import numpy as np
import pytest
import torch
from tools.rewards import CLOSE, load, save_reward_model, scored, separate_rewards, without

from flashmask_hf.collators import DataCollatorForMultiAnswerReward
from flashmask_hf.hf.packed.rows import run_packed


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("model"))


def test_the_batch_size_is_the_number_of_questions():
    batch = DataCollatorForMultiAnswerReward(row_length=32)(scored((3, 2)))
    assert next(iter(batch)) == "answer_counts"
    assert batch["answer_counts"].tolist() == [3, 2]
    assert batch["input_ids"].shape == batch["packed_index"].shape == (6, 1)
    assert batch["packed_input_ids"].shape[1] == 32


def test_a_margin_belongs_to_the_better_answer():
    two = {"prompt_ids": [9], "answers_ids": [[10], [11]], "margin": 0.75}
    assert DataCollatorForMultiAnswerReward()([two])["margins"].tolist() == [[0.75, 0.0]]
    other = two | {"scores": [1, 4]}
    assert DataCollatorForMultiAnswerReward()([other])["margins"].tolist() == [[0.0, 0.75]]
    three = {"prompt_ids": [9], "answers_ids": [[10], [11], [12]], "scores": [1, 4, 2]}
    margins = DataCollatorForMultiAnswerReward(score_margin=0.5)([three, two])["margins"]
    assert margins.tolist() == [[0.5, 2.0, 1.0], [0.75, 0.0, 0.0]]


@pytest.mark.parametrize("margin", [1, torch.tensor(1.0), torch.tensor(1), np.array(1.0), np.float32(1)], ids=repr)
def test_a_margin_may_be_any_number(margin):
    batch = DataCollatorForMultiAnswerReward()([{"chosen_ids": [9], "rejected_ids": [10], "margin": margin}])
    assert batch["margins"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("scores", [[True, False], np.array([True, False]), torch.tensor([True, False])], ids=repr)
def test_scores_may_be_true_and_false(scores):
    batch = DataCollatorForMultiAnswerReward()([GOOD | {"scores": scores}])
    assert batch["scores"].tolist() == [[1.0, 0.0]]


# --- errors

GOOD = {"prompt_ids": [1, 2], "answers_ids": [[3], [4]]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_length": 0}, "row_length must be at least 1, got 0; or None"),
        ({"score_margin": True}, "score_margin must be a number, at least 0"),
        ({"score_margin": -1.0}, "score_margin must be a number, at least 0"),
        ({"score_margin": float("nan")}, "score_margin must be a number, at least 0"),
        ({"score_margin": "1"}, r"score_margin must be a number, at least 0 \(no margins\), got '1'"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DataCollatorForMultiAnswerReward(**options)


@pytest.mark.parametrize(
    ("options", "example", "error", "message"),
    [
        (
            {},
            {"prompt_ids": [1], "text": "x"},
            ValueError,
            r"example 1 needs prompt_ids and .*It has: prompt_ids, text",
        ),
        ({}, {"prompt_ids": [1], "answers_ids": None}, ValueError, "example 1 needs prompt_ids and answers_ids"),
        ({}, {"chosen_ids": [], "rejected_ids": [3]}, ValueError, "answer 0 of example 1 is empty"),
        ({}, GOOD | {"answers_ids": [[3], [4, -100]]}, ValueError, "answer 1 of example 1 has -100, but token ids"),
        ({}, GOOD | {"answers_ids": 3}, TypeError, "answers_ids of example 1 must be a list of answers, got 3"),
        (
            {},
            GOOD | {"scores": [1.0]},
            ValueError,
            "scores of example 1 must be one number for each of its 2 answers, got",
        ),
        (
            {},
            GOOD | {"scores": [1.0, float("nan")]},
            ValueError,
            "each of the scores of example 1 must be finite and at most 3.4e38, got nan",
        ),
        ({}, GOOD | {"scores": [1.0, None]}, TypeError, "each of the scores of example 1 must be a number, got None"),
        ({}, GOOD | {"scores": [3, 3]}, ValueError, r"the scores of example 1 are all 3, .*dataset\.filter"),
        ({}, GOOD | {"margin": torch.tensor([1.0])}, TypeError, "margin of example 1 must be a number, got tensor"),
        ({}, GOOD | {"margin": 1.0}, ValueError, "example 0 has no margin, but example 1 has"),
        (
            {},
            {"prompt_ids": [1], "answers_ids": [[3], [4], [5]], "margin": 1.0},
            ValueError,
            "example 1 has a margin and 3 answers, not two; use scores and score_margin",
        ),
        (
            {"score_margin": 2.0},
            GOOD | {"margin": 1.0, "scores": [1, 2]},
            ValueError,
            "example 1 has a margin, and scores that score_margin=2.0 makes another of",
        ),
        ({"score_margin": 2.0}, dict(GOOD), ValueError, "example 1 has neither scores nor a margin, but score_margin"),
        ({"row_length": 5}, GOOD | {"prompt_ids": [1] * 4}, ValueError, "example 1 has 6 tokens, more than the 5"),
        ({"max_position_embeddings": 4}, GOOD | {"prompt_ids": [1] * 4}, ValueError, "example 1 is 5 tokens deep"),
    ],
)
def test_an_invalid_example_raises_with_its_index(options, example, error, message):
    good = GOOD | ({"scores": [1.0, 2.0]} if "score_margin" in options else {})
    with pytest.raises(error, match=message):
        DataCollatorForMultiAnswerReward(**options)([good, example])


def test_an_example_with_whole_sequences_and_a_question_raises():
    with pytest.raises(ValueError, match=r"but not both\. It has: prompt_ids, chosen_ids"):
        DataCollatorForMultiAnswerReward()([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}])


# --- rewards of a model


def rewards_of(model, examples, **options):
    batch = DataCollatorForMultiAnswerReward(**options)(examples)
    inputs = without(batch, "answer_counts", "token_counts", "scores", "margins")
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits.view(batch["scores"].shape)


def test_answers_without_a_common_prefix_have_an_empty_question(model_path):
    model = load(model_path)
    run_packed(model)
    data = [{"chosen_ids": [9, 10, 11], "rejected_ids": [12, 10]}, {"prompt_ids": [], "answers_ids": [[9], [8], [9]]}]
    batch = DataCollatorForMultiAnswerReward()(data)
    assert batch["packed_position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["token_counts"].tolist() == [[5, 5], [3, 3]]
    rewards = rewards_of(model, data)
    whole = {"prompt_ids": [], "answers_ids": [[9, 10, 11], [12, 10]]}
    torch.testing.assert_close(rewards[0, :2], separate_rewards(model, whole), **CLOSE)
    torch.testing.assert_close(rewards[1, 0], rewards[1, 2])  # rows of a matrix product may be rounded differently


def test_an_answer_never_affects_another(model_path):
    """Changing one answer leaves the rewards of all other answers bit-identical, also those of other questions."""
    model = load(model_path)
    run_packed(model)
    data = scored((3, 4))
    before = rewards_of(model, data)
    changed = [dict(example) for example in data]
    changed[0]["answers_ids"] = [list(answer) for answer in data[0]["answers_ids"]]
    changed[0]["answers_ids"][1] = [7] * len(data[0]["answers_ids"][1])
    after = rewards_of(model, changed)
    same = torch.ones_like(before, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(before[same], after[same])
    assert before[0, 1] != after[0, 1]


@pytest.mark.parametrize("pad", [0, 1], ids=["own padding token", "eos as padding"])
def test_the_reward_is_pooled_at_the_last_token_with_any_padding_token(pad, model_path):
    """transformers pools one token earlier if the last token is the padding token, as with pad_token = eos_token."""
    model = load(model_path)
    model.config.pad_token_id = pad
    run_packed(model)
    data = [
        {"prompt_ids": [9, 10], "answers_ids": [[11, 12, 1], [13, 1]]},
        {"prompt_ids": [14], "answers_ids": [[15, 16, 17, 1], [18, 0], [1]]},
    ]
    rewards = rewards_of(model, data, pad_token_id=pad, row_length=16)
    for example, row in zip(data, rewards, strict=True):
        expected = separate_rewards(model, example)
        torch.testing.assert_close(row[: len(expected)], expected, **CLOSE)
