"""Trees with labels: loss and gradients are those of the separate paths, each shared token learned once."""

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.documents import lineage, random_parents
from tools.tiny import FLOAT32, TRAINER_WARNINGS, VOCAB, assert_exact, llama_config, trainer_settings
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from flashmask_hf.collators import DataCollatorForTrees

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]


@st.composite
def examples(draw):
    """Draw one to three trees of up to seven segments of up to three tokens, with some labels -100."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        parents = random_parents(lambda *limits: draw(st.integers(*limits)))
        lengths = draw(st.lists(st.integers(1, 3), min_size=len(parents), max_size=len(parents)))
        token = st.integers(3, VOCAB - 1)
        input_ids = [draw(st.lists(token, min_size=n, max_size=n)) for n in lengths]
        labels = [[draw(st.sampled_from([token, token, -100])) for token in own] for own in input_ids]
        found.append({"input_ids": input_ids, "parents": parents, "labels": labels})
    return found


def paths(example):
    """Return the tokens and labels of each path, a label in the first path that has its token."""
    found, learned = [], set()
    for leaf in sorted(set(range(len(example["parents"]))) - set(example["parents"])):
        path = lineage(example["parents"], leaf)
        tokens = [token for segment in path for token in example["input_ids"][segment]]
        labels = [-100 if s in learned else label for s in path for label in example["labels"][s]]
        learned |= set(path)
        found.append((tokens, labels))
    return found


def model(attention):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=attention).double()


def separate_loss(given_):
    """Return the model and the mean loss of all labels of the separate paths, or None without a label."""
    alone, total, count = model("eager"), torch.zeros(()), 0
    for tokens, labels in (path for example in given_ for path in paths(example)):
        own = sum(label != -100 for label in labels[1:])
        if own:
            total = total + own * alone(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss
            count += own
    return (alone, total / count) if count else None


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(examples(), st.sampled_from([{}, {"pad_to_multiple_of": 8}, {"max_length": 48}]))
def test_loss_and_gradients_are_those_of_the_paths(given_, options):
    separate = separate_loss(given_)
    batch = DataCollatorForTrees(**options)(given_)
    if separate is None:
        assert (batch["labels"] == -100).all()
        return
    alone, expected = separate
    expected.backward()
    packed = model("flashmask")
    loss = packed(**batch, use_cache=False).loss
    loss.backward()
    assert_exact([loss], [expected])
    assert_exact(*([p.grad for p in each.parameters()] for each in (packed, alone)))


TREE = {
    "input_ids": [[5], [6, 7], [8], [9, 10], [11]],
    "parents": [-1, 0, 1, 1, 0],
    "labels": [[5], [6, 7], [8], [9, 10], [11]],
}


def test_trees_train_in_the_plain_trainer(tmp_path):
    options = trainer_settings(tmp_path) | {"max_steps": 1}
    dataset = Dataset.from_list([TREE] * 4)
    args = TrainingArguments(**options, remove_unused_columns=False)
    trainer = Trainer(model("flashmask"), args, train_dataset=dataset, data_collator=DataCollatorForTrees())
    trainer.train()
    separate = separate_loss([TREE])
    assert separate is not None
    assert trainer.state.log_history[0]["loss"] == pytest.approx(separate[1].item(), rel=FLOAT32)

    args = TrainingArguments(**options)
    trainer = Trainer(model("flashmask"), args, train_dataset=dataset, data_collator=DataCollatorForTrees())
    with pytest.raises(ValueError, match=r"example 0 has no parents; .* unless remove_unused_columns=False"):
        trainer.train()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": None}, ValueError, "example 0 has no input_ids"),
        ({"input_ids": 5}, TypeError, "input_ids of example 0 must be a list of segments, got 5"),
        ({"input_ids": [[5], [6.5]]}, TypeError, "segment 1 of input_ids of example 0 must be integers"),
        ({"input_ids": [[5], [6, -100], [8], [9, 10], [11]]}, ValueError, "input_ids of example 0 has -100, but token"),
        ({"parents": [None, 0, 1, 1, 0]}, TypeError, "parents of example 0 .*; the parent of a root is -1"),
        ({"parents": [-1, 0, 1, 1]}, ValueError, "input_ids and parents of example 0 are no forest: parents has 4"),
        ({"parents": [-1, 0, 3, 1, 0]}, ValueError, "are no forest: .* depth-first order"),
        ({"labels": [[5], [6], [8], [9, 10], [11]]}, ValueError, "labels of example 0 must have the layout"),
        ({"labels": None, "completion_mask": [[0], [1], [1], [1], [1]]}, ValueError, "completion_mask and no labels"),
        ({"weight": 2.0}, ValueError, "example 0 has weight, which trees do not read; remove the column"),
        ({"weights": [1.0, 2.0, 3.0]}, ValueError, "example 0 has weights, which trees do not read; remove the column"),
        ({"attention_mask": [[1], [1, 0], [1], [1, 1], [1]]}, ValueError, "example 0 holds padding .*padding=False"),
    ],
)  # fmt: skip
def test_an_invalid_tree_raises(change, error, message):
    with pytest.raises(error, match=message):
        DataCollatorForTrees()([{**TREE, **change}])
