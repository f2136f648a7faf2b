"""Trees with labels: loss and gradients are those of the separate paths, each shared token learned once."""

import doctest

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.tiny import TRAINER_WARNINGS, VOCAB, llama_config, trainer_settings, word_tokenizer
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import flashmask_hf.collators.loss as loss_module
import flashmask_hf.collators.trees as trees
from flashmask_hf.collators import DataCollatorForTrees, tree_loss

pytestmark = TRAINER_WARNINGS


@st.composite
def examples(draw):
    """Draw one to three trees of up to seven segments of up to three tokens, with some labels -100."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        parents, branch = [], [-1]
        for segment in range(draw(st.integers(1, 7))):
            branch = branch[: draw(st.integers(1, len(branch)))]
            parents.append(branch[-1])
            branch.append(segment)
        lengths = draw(st.lists(st.integers(1, 3), min_size=len(parents), max_size=len(parents)))
        token = st.integers(3, VOCAB - 1)
        input_ids = [draw(st.lists(token, min_size=n, max_size=n)) for n in lengths]
        labels = [[draw(st.sampled_from([token, token, -100])) for token in own] for own in input_ids]
        found.append({"input_ids": input_ids, "parents": parents, "labels": labels})
    return found


def paths(example):
    """Return the tokens and labels of each path, a label in the first path that has its token."""
    found, learned = [], set()
    for leaf in range(len(example["parents"])):
        if leaf in example["parents"]:
            continue
        lineage = [leaf]
        while example["parents"][lineage[0]] != -1:
            lineage.insert(0, example["parents"][lineage[0]])
        tokens = [token for segment in lineage for token in example["input_ids"][segment]]
        labels = [-100 if s in learned else label for s in lineage for label in example["labels"][s]]
        learned |= set(lineage)
        found.append((tokens, labels))
    return found


def model(attention):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=attention)


def test_docstring_examples_run():
    for module in (trees, loss_module):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


def separate_loss(given_):
    """Return the model and the mean loss of all labels of the separate paths, or None without a label."""
    alone, total, count = model("eager"), torch.zeros(()), 0
    for tokens, labels in (path for example in given_ for path in paths(example)):
        own = sum(label != -100 for label in labels[1:])
        if own:
            total = total + own * alone(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss
            count += own
    return (alone, total / count) if count else None


@settings(max_examples=25)
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
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


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
    assert trainer.state.log_history[0]["loss"] == pytest.approx(separate[1].item(), rel=1e-5)

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
        ({"attention_mask": [[1], [1, 0], [1], [1, 1], [1]]}, ValueError, "example 0 holds padding .*padding=False"),
    ],
)  # fmt: skip
def test_an_invalid_tree_raises(change, error, message):
    with pytest.raises(error, match=message):
        DataCollatorForTrees()([{**TREE, **change}])
    with pytest.raises(TypeError, match="max_length must be an int, got True"):
        DataCollatorForTrees(max_length=True)
    with pytest.raises(TypeError, match="per_path must be True or False, got 1"):
        DataCollatorForTrees(per_path=1)  # type: ignore[arg-type]


# Every path by itself


def leaf_paths(example):
    """Return tokens, labels and weight of each path from a root to a leaf."""
    leaves = [s for s in range(len(example["parents"])) if s not in example["parents"]]
    found = []
    for nth, leaf in enumerate(leaves):
        lineage = [leaf]
        while example["parents"][lineage[0]] != -1:
            lineage.insert(0, example["parents"][lineage[0]])
        tokens, labels = ([x for s in lineage for x in example[column][s]] for column in ("input_ids", "labels"))
        found.append((tokens, labels, example["weights"][nth] if "weights" in example else 1.0))
    return found


@settings(max_examples=25)
@given(examples(), st.sampled_from([{}, {"pad_to_multiple_of": 8}, {"max_length": 48}]), st.data())
def test_loss_and_gradients_are_those_of_every_path(given_, options, data):
    for example in given_[: data.draw(st.integers(0, len(given_)))]:
        leaves = len(example["parents"]) - len(set(example["parents"]) - {-1})
        example["weights"] = data.draw(st.lists(st.sampled_from([-1.0, 0.5, 2.0]), min_size=leaves, max_size=leaves))
    alone, total, count = model("eager"), torch.zeros(()), 0
    for tokens, labels, weight in (path for example in given_ for path in leaf_paths(example)):
        own = sum(label != -100 for label in labels[1:])
        if own:
            loss = alone(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss
            total, count = total + weight * own * loss, count + own
    batch = DataCollatorForTrees(**options, per_path=True)(given_)
    assert batch["shift_labels"].ne(-100).sum() == count
    assert ("path_weights" in batch) == any("weights" in example for example in given_)
    packed = model("flashmask")
    packed.loss_function = tree_loss
    for items in (None, 7, torch.tensor(7)):
        packed.zero_grad()
        loss = packed(**batch, use_cache=False, num_items_in_batch=items).loss
        if not count:
            assert loss == 0
            continue
        loss.backward()
        alone.zero_grad()
        expected = total / (7 if items is not None else count)
        expected.backward(retain_graph=True)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_trainer_accumulates_all_paths(tmp_path):
    """One step over two batches of trees is that over all of their paths, each a row of its own."""
    chain = {"input_ids": [[5, 6, 7]], "parents": [-1], "labels": [[5, 6, 7]]}
    given_ = [TREE, TREE | {"input_ids": [[12], [13, 14], [15], [16, 17], [18]]}, chain, chain]
    rows = [{"input_ids": t, "labels": labels} for one in given_ for t, labels, _ in leaf_paths(one)]
    logs = []
    for dataset, collator, attention, size in (
        (given_, DataCollatorForTrees(per_path=True), "flashmask", 2),
        (rows, DataCollatorForSeq2Seq(word_tokenizer(), label_pad_token_id=-100), "eager", 4),
    ):
        options = trainer_settings(tmp_path) | {
            "max_steps": 1, "per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "max_grad_norm": 1e9,
        }  # fmt: skip
        trained = model(attention)
        if attention == "flashmask":
            trained.loss_function = tree_loss
        data = Dataset.from_list(dataset)
        args = TrainingArguments(**options, remove_unused_columns=False)
        trainer = Trainer(trained, args, train_dataset=data, eval_dataset=data, data_collator=collator)
        evaluated = trainer.evaluate()["eval_loss"] if attention == "flashmask" else None
        trainer.train()
        logs.append((trainer.state.log_history[-2], evaluated))
    (trees_, evaluated), (paths_, _) = logs
    assert trees_["loss"] == pytest.approx(paths_["loss"], rel=1e-5)
    assert trees_["grad_norm"] == pytest.approx(paths_["grad_norm"], rel=1e-4)
    assert evaluated is not None


def test_paths_need_their_loss():
    batch = DataCollatorForTrees(per_path=True)([TREE])
    with pytest.raises(ValueError, match=r"model.loss_function = flashmask_hf.collators.tree_loss"):
        model("flashmask")(**batch, use_cache=False)
    trained = model("flashmask")
    trained.loss_function = tree_loss
    for other in (batch | {"shift_labels": batch["shift_labels"][:, 0]}, DataCollatorForTrees()([TREE])):
        with pytest.raises(ValueError, match=r"shift_labels must be \[R, W, S\].*per_path=True"):
            trained(**other, use_cache=False)
    other = model("sdpa")
    other.loss_function = tree_loss
    with pytest.raises(RuntimeError, match="attn_implementation='sdpa' ignores them"):
        other(**batch, use_cache=False)


@pytest.mark.parametrize("shape", [(2, 2, 3), (1, 2, 2), (1, 2, 3, 1)], ids=str)
def test_labels_for_other_logits_raise(shape):
    with pytest.raises(ValueError, match=r"shift_labels must be \[R, W, S\] for logits .* = \[1, 3, 4\]"):
        tree_loss(torch.zeros(1, 3, 4), shift_labels=torch.ones(shape, dtype=torch.int64))


def test_the_loss_of_sixteen_bit_logits_is_float32():
    logits = torch.randn(1, 3, 4, dtype=torch.bfloat16)
    labels = torch.tensor([[[1, 2, -100]]])
    assert torch.equal(tree_loss(logits, shift_labels=labels), tree_loss(logits.float(), shift_labels=labels))


def test_the_entry_that_is_not_learned_may_be_another():
    labels = torch.tensor([[[1, 2, -100], [1, -100, 3]]])
    want = tree_loss(torch.arange(12.0).view(1, 3, 4) ** 2, shift_labels=labels)
    labels[labels == -100] = 0
    assert torch.equal(tree_loss(torch.arange(12.0).view(1, 3, 4) ** 2, shift_labels=labels, ignore_index=0), want)


def test_the_batch_may_be_on_another_device_than_the_logits():
    with FakeTensorMode():
        logits = torch.zeros(1, 3, 4, device="cuda:1")
        labels = torch.zeros(1, 2, 3, dtype=torch.int64, device="cuda:0")
        weights, count = torch.zeros(1, 2, 3, device="cuda:0"), torch.ones((), dtype=torch.int64, device="cuda:0")
        loss = tree_loss(logits, shift_labels=labels, path_weights=weights, num_items_in_batch=count)
        assert loss.device == logits.device


def test_paths_in_a_trainer_of_trl_raise(tmp_path):
    """It computes the loss by a head of its own."""
    trained = model("flashmask")
    trained.loss_function = tree_loss
    args = SFTConfig(**trainer_settings(tmp_path), remove_unused_columns=False)
    collator = DataCollatorForTrees(per_path=True)
    data = Dataset.from_list([TREE] * 4)
    trainer = SFTTrainer(trained, args, collator, train_dataset=data, processing_class=word_tokenizer())
    with pytest.raises(ValueError, match="Use the plain Trainer without smoothing and fused losses"):
        trainer.train()


def test_paths_under_the_fused_loss_of_liger_raise():
    """It would take the labels of the first path for those of all."""
    trained = model("flashmask")
    trained.loss_function = tree_loss
    forward = trained.forward

    def lce_forward(*args, **kwargs):
        return forward(*args, **kwargs)

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    trained.forward = lce_forward  # as use_liger_kernel=True does
    batch = DataCollatorForTrees(per_path=True)([TREE])
    with pytest.raises(ValueError, match="Use the plain Trainer without smoothing and fused losses"):
        trained.train()(**batch, use_cache=False)
    assert trained.eval()(**batch, use_cache=False).loss > 0  # Liger has the model's loss there


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0, 2.0], ValueError, "weights of example 0 must be one number for each of its 3 leaves"),
        (2.0, ValueError, "weights of example 0 must be one number for each of its 3 leaves, got 2.0"),
        ([1.0, 2.0, "3"], TypeError, "each of the weights of example 0 must be a number"),
        ([1.0, 2.0, float("nan")], ValueError, "each of the weights of example 0 must be finite .* got nan"),
        (
            [1.0, 2.0, 1e39],
            ValueError,
            r"each of the weights of example 0 must be finite and at most 3.4e38, got 1e\+39",
        ),
        ([-(10**400), 2.0, 1.0], ValueError, "each of the weights of example 0 must be finite .* got inf"),
    ],
)
def test_invalid_weights_raise(weights, error, message):
    with pytest.raises(error, match=message):
        DataCollatorForTrees(per_path=True)([{**TREE, "weights": weights}])
    with pytest.raises(ValueError, match="example 0 has weights, which are for paths: set per_path=True"):
        DataCollatorForTrees()([{**TREE, "weights": [1.0, 2.0, 3.0]}])
