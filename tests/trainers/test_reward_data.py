"""The reward trainer reads every format of preferences and rankings, and names the row that it cannot use."""

import functools
import logging
import types

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from tools.rewards import BEST, CHAT, OURS, USER, WORST, make, margin_rows, without
from tools.tiny import TRAINER_WARNINGS, assert_same_step, conversation, preference_rows, word_tokenizer
from trl import RewardTrainer

from flashmask_hf.collators import DataCollatorForMultiAnswerReward
from flashmask_hf.trainers import MultiAnswerRewardTrainer
from flashmask_hf.trainers.data_checks import check_rows

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]


# --- formats

CHATTED = ["user w8 assistant w9 <eos>", "user w8 assistant w10 <eos>"]
FORMATS = {
    "strings": ({"prompt": "w8 ", "answers": ["w9", "w10 <eos>"]}, ["w8 w9<eos>", "w8 w10 <eos>"]),
    "whole strings": ({"answers": ["w8 w9 ", "w8 w10 "]}, ["w8 w9 <eos>", "w8 w10 <eos>"]),
    "messages": ({"prompt": [USER], "answers": [[BEST], [WORST]]}, CHATTED),
    "messages and strings": ({"prompt": [USER], "answers": ["w9", "w10"]}, CHATTED),
    "messages that the answers repeat": ({"prompt": [USER], "answers": [[USER, BEST], [USER, WORST]]}, CHATTED),
    "whole conversations": ({"answers": [[USER, BEST], [USER, WORST]]}, CHATTED),
    "ultrafeedback_binarized": (
        {
            "prompt": "w8",
            "prompt_id": "f00",
            "chosen": [USER, BEST],
            "rejected": [USER, WORST],
            "messages": [USER, BEST],
            "score_chosen": 8.0,
            "score_rejected": 6.5,
        },
        CHATTED,
    ),
    "a string and messages": ({"prompt": "w8", "chosen": [BEST], "rejected": [WORST]}, CHATTED),
    "a system prompt": (
        {"prompt": "w8", "answers": [[{"role": "system", "content": "w7"}, USER, end] for end in (BEST, WORST)]},
        [f"system w7 {text}" for text in CHATTED],
    ),
    "tools": (
        {"prompt": [USER], "answers": [[BEST], [WORST]], "tools": "[{}]", "chat_template_kwargs": {"suffix": "w11"}},
        [f"w6 {text} w11" for text in CHATTED],
    ),
}


def answers_of(trainer):
    """Return the whole sequence of each answer as text."""
    return [
        [trainer.processing_class.decode([*row["prompt_ids"], *answer]) for answer in row["answers_ids"]]
        for row in trainer.train_dataset
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_tokenized_as_trl_does(form, model_path, tokenizer, tmp_path):
    row, expected = FORMATS[form]
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row])
    decoded = [[" ".join(text.replace("<eos>", " <eos>").split()) for text in texts] for texts in answers_of(trainer)]
    assert decoded == [[" ".join(text.replace("<eos>", " <eos>").split()) for text in expected]]
    assert [len(answer) for answer in trainer.train_dataset[0]["answers_ids"]] == [
        expected[0].count("w9") + 1 + expected[0].count("w11")
    ] * 2
    assert trainer.train_dataset.column_names == ["prompt_ids", "answers_ids"]


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("form", FORMATS)
def test_rows_in_a_tensor_or_array_format_give_the_same_batch(form, library, model_path, tokenizer, tmp_path):
    row, _ = FORMATS[form]
    data = [row | ({"scores": [2.5, 1.0]} if "answers" in row else {"margin": 0.5})]
    plain, trainer = (
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, Dataset.from_list(data).with_format(name))
        for name in (None, library)
    )
    batch, expected = (next(iter(one.get_train_dataloader())) for one in (trainer, plain))
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(batch[name], values), name


PARTS = "{% for m in messages %}{{ m['role'] }} {% for p in m['content'] %}{{ p['text'] }} {% endfor %}{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t['needed'] | join(' ') }} {% endfor %}"


@pytest.mark.parametrize("library", ["torch", "numpy", "pandas", "arrow"])
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_messages_of_parts_and_tools_in_any_dataset_format(library, streamed, model_path, tmp_path):
    """A chat template would print arrays and tensors within messages, or fail to read them."""

    def turn(role, *words):
        return {"role": role, "content": [{"type": "text", "text": word} for word in words]}

    tokenizer = word_tokenizer("user", "assistant", chat_template=TOOLS + PARTS)
    row = {
        "prompt": [turn("user", "w9", "w8")],
        "chosen": [turn("assistant", "w11", "w12")],
        "rejected": [turn("assistant", "w11", "w13")],
        "tools": [{"needed": ["w20", "w21"]}],
        "other": "w30",
    }
    data = Dataset.from_list([row, row])
    seen = []
    for name in (None, library):
        given = data.to_iterable_dataset().with_format(name) if streamed else data.with_format(name)
        options = {"max_steps": 1} if streamed else {}
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, given, **options)
        seen.append(next(iter(trainer.train_dataset.with_format(None))))
    assert seen[0] == seen[1]
    assert tokenizer.decode(seen[0]["prompt_ids"]) == "w20 w21 user w9 w8 assistant w11"
    assert [tokenizer.decode(ids) for ids in seen[0]["answers_ids"]] == ["w12", "w13"]


def test_rows_of_concatenated_datasets(model_path, tokenizer, tmp_path):
    """Pairs lack the columns of ranked answers, and vice versa: they are None. `scores` applies only to `answers`."""
    pair = {"chosen": "w8 w9 ", "rejected": "w8 w10 ", "scores": [1.0, 5.0]}
    ranked = {"answers": ["w8 w9 ", "w8 w10 "], "scores": [1.0, 3.0]}
    data = concatenate_datasets([Dataset.from_list([row] * 2) for row in (pair, ranked)])
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)
    assert trainer.train_dataset[0]["answers_ids"] == trainer.train_dataset[2]["answers_ids"]
    assert [row["scores"] for row in trainer.train_dataset] == [None, None, [1.0, 3.0], [1.0, 3.0]]
    ids = {"prompt_ids": [8], "answers_ids": [[9], [10]]}, {"chosen_ids": [8, 9], "rejected_ids": [8, 10]}
    tokenized = concatenate_datasets([Dataset.from_list([row]) for row in ids])
    assert len(make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized).train_dataset) == 2


@pytest.mark.parametrize("order", [1, -1], ids=["pairs first", "ranked answers first"])
def test_score_margin_of_concatenated_pairs_and_ranked_answers(order, model_path, tokenizer, tmp_path, monkeypatch):
    # One row a write, as of datasets with thousands: the first write sets the types of the columns.
    monkeypatch.setattr(Dataset, "map", functools.partialmethod(Dataset.map, writer_batch_size=1))
    pair = {"chosen": "w8 w9 ", "rejected": "w8 w10 ", "score_chosen": 2.0, "score_rejected": 1.0}
    ranked = {"answers": ["w8 w9 ", "w8 w10 "], "scores": [1.0, 3.0]}
    data = concatenate_datasets([Dataset.from_list([row]) for row in (pair, ranked)[::order]])
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, score_margin=0.5)
    assert trainer.train_dataset["margin"] == [0.5, None][::order]
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert batch["margins"].tolist() == [[0.5, 0.0], [0.5, 1.5]][::order]


def test_conversations_need_no_eos_token_and_texts_do(model_path, tmp_path):
    tokenizer = word_tokenizer("user", "assistant", chat_template=CHAT)
    tokenizer.eos_token = None
    data = [conversation({"prompt": "w8", "chosen": "w9", "rejected": "w10"})]
    row = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data).train_dataset[0]
    assert [len(ids) for ids in row["answers_ids"]] == [2, 2]
    with pytest.raises(
        ValueError, match="example 0 of the train dataset is text, which the tokenizer's eos_token ends"
    ):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [{"chosen": "w9 ", "rejected": "w10 "}])


def test_columns_hidden_by_a_format_are_ignored(model_path, tokenizer, tmp_path):
    data = Dataset.from_list([{"prompt": "w8 ", "chosen": "w8 w9 w10 ", "rejected": "w8 w9 w11 "}])
    for hidden, prompt in (("prompt", "w8 w9"), (None, "w8 w8 w9")):
        shown = data.with_format("numpy", columns=[name for name in data.column_names if name != hidden])
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, shown)
        assert tokenizer.decode(trainer.train_dataset[0]["prompt_ids"]) == prompt


def test_scores_decide_and_ranked_answers_come_best_first(model_path, tokenizer, tmp_path):
    row = {"prompt": "w8 ", "answers": ["w9 ", "w10 ", "w11 "]}
    for scores, expected in ((None, [2, 1, 0]), ([3.0, 9.5, 1.0], [3, 9.5, 1])):
        trainer = make(
            MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row | ({"scores": scores} if scores else {})]
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["scores"].tolist() == [expected]
        assert "margins" not in batch


def test_score_margin_of_chosen_and_rejected(model_path, tokenizer, tmp_path):
    """Equal scores give a margin of 0, and the chosen answer is still preferred."""
    data = [
        without(row, "margin") | {"score_chosen": 8.0, "score_rejected": score}
        for row, score in zip(margin_rows(4), (8.0, 6.5, 3.0, 1.0), strict=True)
    ]
    ours = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, score_margin=0.25)
    assert ours.train_dataset["margin"] == [0.0, 0.375, 1.25, 1.75]
    stock = [row | {"margin": margin} for row, margin in zip(data, (0.0, 0.375, 1.25, 1.75), strict=True)]
    assert_same_step(ours, make(RewardTrainer, model_path, tokenizer, tmp_path, stock), *OURS)
    own = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, stock)  # without score_margin
    assert own.train_dataset["margin"] == [0.0, 0.375, 1.25, 1.75]
    for column in ("score_chosen", "score_rejected"):
        with pytest.raises(ValueError, match=r"example 0 .* has neither scores nor a margin, but score_margin is 0.25"):
            make(
                MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [without(row, column) for row in data],
                score_margin=0.25,
            )  # fmt: skip


def test_rows_over_max_length_are_dropped_and_logged(model_path, tokenizer, tmp_path, caplog):
    data = [
        {"prompt": "w8 w9 ", "answers": ["w10 ", "w11 ", "w12 " * 5]},
        {"prompt": "w8 w9 ", "answers": ["w10 ", "w11 "]},
    ]
    with caplog.at_level(logging.WARNING, logger="flashmask_hf"):
        trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, max_length=7)
    assert len(trainer.train_dataset) == 1
    assert "Dropped 1 of 2 train examples: each has an answer that brings it over max_length=7" in caplog.text
    caplog.clear()
    kept = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, max_length=8)
    assert len(kept.train_dataset) == 2
    assert not caplog.text
    tokenized = [{"chosen_ids": [8] * 6 + [9], "rejected_ids": [8] * 6 + [10]}]
    for most in (7, None):
        kept = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized, max_length=most)
        assert len(kept.train_dataset) == 1
    with pytest.raises(ValueError, match="every example of the train dataset has an answer that brings it over"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, tokenized, max_length=6)


def test_datasets_are_prepared_in_as_many_processes_as_asked_for(model_path, tokenizer, tmp_path, monkeypatch):
    asked, run = [], Dataset.map

    def run_here(self, *args, num_proc=None, **keywords):
        asked.append((keywords["desc"], num_proc))
        return run(self, *args, **keywords)

    monkeypatch.setattr(Dataset, "map", run_here)  # Dataset.filter calls it, too
    make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, dataset_num_proc=2, max_length=60)
    expected = ["Tokenizing train dataset", "Filtering train >60 tokens", "Checking train dataset"]
    assert asked == [(name, 2) for name in expected]


def test_checking_rows_writes_nothing_into_their_folder(tmp_path):
    Dataset.from_list([{"prompt_ids": [8], "answers_ids": [[9], [10]]}]).save_to_disk(tmp_path)
    before = sorted(tmp_path.iterdir())
    args = types.SimpleNamespace(dataset_num_proc=None)
    check_rows(Dataset.load_from_disk(tmp_path), DataCollatorForMultiAnswerReward(), args, "train")
    assert sorted(tmp_path.iterdir()) == before


# --- rows that raise

PAIR = {"prompt": "w8 ", "chosen": "w9", "rejected": "w10"}
LIST = {"prompt": "w8 ", "answers": ["w9", "w10"]}


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (
            {"prompt": "w8", "completion": "w9"},
            ValueError,
            "has no answers, and no chosen .*It has: prompt, completion",
        ),
        (
            {"prompt_ids": [8], "scores": [1, 2]},
            ValueError,
            "has no answers, and no chosen .*It has: prompt_ids, scores",
        ),
        (PAIR | {"chosen": " "}, ValueError, "answer 0 of example 0 of the train dataset is empty"),
        (PAIR | {"rejected": "<eos>"}, ValueError, "answer 1 of example 0 of the train dataset is empty"),
        ({"prompt": [USER], "answers": [[BEST], []]}, ValueError, "answer 1 of example 0 .* is empty"),
        ({"prompt": [USER], "answers": [[BEST], [BEST | {"content": ""}]]}, ValueError, "answer 1 of .* is empty"),
        (LIST | {"answers": ["w9"]}, ValueError, "example 0 of the train dataset has 1 answers"),
        (
            {"prompt_ids": [8], "answers_ids": []},
            ValueError,
            "example 0 of the train dataset, as prepared, has 0 answers",
        ),
        (LIST | {"answers": "w9"}, TypeError, "answers of example 0 .* must all be strings, or all lists"),
        (LIST | {"prompt": 8}, TypeError, "prompt of example 0 .* must be a string or a list of messages, got 8"),
        (LIST | {"scores": [1.0, 1.0]}, ValueError, "scores of example 0 of the train dataset are all 1"),
        (
            LIST | {"scores": [1.0]},
            ValueError,
            "scores of example 0 of the train dataset must be one number for each of its 2 answers",
        ),
        (
            {"prompt": "w9", "chosen": [USER, BEST], "rejected": [USER, WORST]},
            ValueError,
            "answers of example 0 .* begin neither with its prompt, a string, nor the assistant",
        ),
        (
            {"prompt_ids": [8] * 64, "answers_ids": [[9], [10]]},
            ValueError,
            "example 0 of the train dataset, as prepared, is 65 tokens deep, but the model has 64 positions",
        ),
        ({"prompt_ids": [8] * 40, "answers_ids": [[9], []]}, ValueError, "answer 1 of example 0 .* is empty"),
    ],
)
def test_an_invalid_row_raises_before_the_first_step(row, error, message, model_path, tokenizer, tmp_path):
    with pytest.raises(error, match=message):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row])


def test_messages_name_the_row_and_the_dataset(model_path, tokenizer, tmp_path):
    good = preference_rows(3)
    with pytest.raises(ValueError, match="answer 0 of example 3 of the held_out dataset is empty"):
        make(
            MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path,
            eval_dataset={"held_out": Dataset.from_list([*good, PAIR | {"chosen": ""}])},
        )  # fmt: skip
    deep = {"prompt": "w8 " * 70, "chosen": "w9", "rejected": "w10"}
    with pytest.raises(ValueError, match="example 3 of the eval dataset, as prepared, is 72 tokens deep"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, eval_dataset=Dataset.from_list([*good, deep]))


def test_margins_in_only_some_rows_raise_before_the_first_step(model_path, tokenizer, tmp_path):
    data = margin_rows()
    data[3]["margin"] = None
    with pytest.raises(
        ValueError, match="example 3 of the train dataset, as prepared, has no margin, but example 0 of"
    ):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)
    trainer = make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [row | {"margin": None} for row in data])
    assert "margins" not in next(iter(trainer.get_train_dataloader()))
    ignored = [{"chosen_ids": [5, 6], "rejected_ids": [5, 7], "weight": weight} for weight in (1.0, None)]
    make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, ignored)


def test_a_chat_template_that_renders_nothing_raises(model_path, tmp_path):
    tokenizer = word_tokenizer(chat_template="{% if messages | length > 2 %}w9{% endif %}")
    with pytest.raises(ValueError, match="answer 0 of example 0 of the train dataset has no tokens"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, [{"answers": [[USER, BEST], [USER, WORST]]}])


def test_a_transform_raises(model_path, tokenizer, tmp_path):
    data = Dataset.from_list(margin_rows()).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match=r"train dataset has a transform .*apply it with dataset.map"):
        make(MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data)
