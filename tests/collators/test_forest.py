"""Packed rows of trees: who sees whom, no tree is lost or split, and a model computes each path as alone."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.documents import lineage, random_parents
from tools.tiny import VOCAB, assert_exact, llama_config
from transformers import AutoModelForCausalLM

from flashmask_hf import FlashMask
from flashmask_hf.collators import Forest, pack_forests
from flashmask_hf.collators.bins import best_fit_decreasing

thorough = settings(max_examples=100)


@st.composite
def forests(draw):
    """Draw up to seven segments of up to four tokens."""
    parents = random_parents(lambda *limits: draw(st.integers(*limits)))
    lengths = draw(st.lists(st.integers(1, 4), min_size=len(parents), max_size=len(parents)))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=sum(lengths), max_size=sum(lengths)))
    return Forest(tokens, lengths, parents)


several = st.lists(forests(), min_size=1, max_size=5)


def segments(forest):
    """Return the tokens of each segment."""
    edges = np.cumsum([0, *forest.lengths])
    return [forest.tokens[start:end].tolist() for start, end in pairwise(edges)]


def nodes(forest, content, parent=-1):
    """Return the forest in the notation of `masks.tree`, with `content(tokens)` at each node."""
    found = []
    for segment, tokens in enumerate(segments(forest)):
        if forest.parents[segment] == parent:
            children = nodes(forest, content, segment)
            found.append((content(tokens), children) if children else content(tokens))
    return found


def expected(rows):
    """Compute from the definition who sees whom, bool [R, S, S], and the depth of each token, [R, S]."""
    count, length = rows.input_ids.shape
    visible = torch.zeros(count, length, length, dtype=torch.bool)
    depth = np.zeros((count, length), dtype=np.int64)
    for start, forest in zip(rows.starts.tolist(), rows.forests, strict=True):
        row, first = divmod(start, length)
        owner = np.repeat(range(len(forest.lengths)), forest.lengths).tolist()
        for i, own in enumerate(owner):
            seen = [j for j in range(i + 1) if owner[j] in lineage(forest.parents, own)]
            visible[row, first + i, [first + j for j in seen]] = True
            depth[row, first + i] = len(seen) - 1
    return visible, depth


def visible_in(rows):
    return FlashMask(rows.batch()["startend_row_indices"], causal=True).validate().to_dense()[:, 0]


# --- one forest


@thorough
@given(forests())
def test_from_trees_reads_the_notation_of_masks_tree(forest):
    again = Forest.from_trees(*nodes(forest, list))
    for name in ("tokens", "lengths", "parents"):
        assert getattr(again, name).tolist() == getattr(forest, name).tolist()
        assert getattr(again, name).dtype == np.int64


@thorough
@given(forests())
def test_a_path_goes_from_the_root_through_the_segment(forest):
    own = segments(forest)
    for segment in range(len(own)):
        ancestors = lineage(forest.parents, segment)
        assert forest.tokens[forest.path(segment)].tolist() == [token for one in ancestors for token in own[one]]
    inner = set(forest.parents.tolist())
    assert forest.leaves() == [segment for segment in range(len(own)) if segment not in inner]
    assert forest.depth() == max(len(forest.path(segment)) for segment in range(len(own)))


def test_the_path_of_a_missing_segment_raises():
    with pytest.raises(IndexError):
        Forest.from_trees([1], [2]).path(2)


def test_all_integer_types_become_int64():
    forest = Forest(torch.tensor([1, 2], dtype=torch.int32), [1, 1], np.array([-1, 0], dtype=np.int8))
    assert (forest.tokens.dtype, forest.lengths.dtype, forest.parents.dtype) == (np.int64,) * 3


WRAPPING = [2**63 - 1, 2**63 - 1, 7]  # the sum wraps around to 5 in int64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], [], []), ValueError, "lengths is empty: a forest needs at least one segment"),
        (([1, 2], [1, 1], [-1]), ValueError, "parents has 1 entries, but lengths has 2"),
        (([1, 2], [2, 0], [-1, 0]), ValueError, "segment 1 is empty; leave it out, or give it tokens"),
        (([1, 2], [3, -1], [-1, 0]), ValueError, "segment 1 is empty"),
        (([1, 2], [2, 1], [-1, 0]), ValueError, r"lengths must .* sum to the 2 tokens, got \[2, 1\]"),
        (([1] * 5, WRAPPING, [-1] * 3), ValueError, "lengths must .* sum to the 5 tokens, got"),
        (([1, 2], [1, 1], [0, -1]), ValueError, r"parents\[0\] is 0, but in depth-first order a parent"),
        (([1, 2], [1, 1], [-1, 1]), ValueError, r"parents\[1\] is 1, but"),
        (([1, 2], [1, 1], [-1, -2]), ValueError, r"parents\[1\] is -2, but"),
        (([1, 2, 3, 4], [1] * 4, [-1, 0, 0, 1]), ValueError, r"parents\[3\] is 1, .* the segment before, an ancestor"),
        (([1, 2, 3], [1] * 3, [-1, -1, 0]), ValueError, r"parents\[2\] is 0, .* or -1 for a root"),
        (([0.5], [1], [-1]), TypeError, "tokens must be integers, got float64"),
        (([1], [[1]], [-1]), TypeError, "lengths must be a flat sequence of integers, got 2 axes"),
        (([1, 2], [1, [1]], [-1, 0]), TypeError, "lengths must be a flat sequence of integers, got nested"),
    ],
)
def test_an_invalid_forest_raises(arguments, error, message):
    with pytest.raises(error, match=message):
        Forest(*arguments)


@pytest.mark.parametrize(
    ("trees", "error", "message"),
    [
        ([], ValueError, "trees is empty: a forest needs at least one tree"),
        ([[1], []], ValueError, r"trees\[1\] is empty; leave it out"),
        ([([1], [[2], ([], [[3]])])], ValueError, r"trees\[0\]\[1\]\[1\] is empty"),
        ([([], [])], ValueError, r"trees\[0\] is empty"),
        ([3], TypeError, r"trees\[0\] must be a list of token ids, or \(list of token ids, \[children\]\)"),
        ([(3, 4)], TypeError, r"trees\[0\] must be"),
        ([([1], [2, 3])], TypeError, r"trees\[0\]\[1\]\[0\] must be"),
        ([([1], 2)], TypeError, r"trees\[0\] must be"),
        ([([1], [[2]], [[3]])], TypeError, r"trees\[0\] must be"),
        ([((1, 2), [[3]])], TypeError, r"trees\[0\] must be"),
        ([[1, [2]]], TypeError, r"trees\[0\] must be"),
        ([[1], [0.5]], TypeError, r"trees\[1\] must be"),
        (["text"], TypeError, r"trees\[0\] must be"),
    ],
)
def test_invalid_trees_raise(trees, error, message):
    with pytest.raises(error, match=message):
        Forest.from_trees(*trees)


# --- bins and layout


def first_fit(lengths, capacity):
    rooms = []
    for length in lengths:
        for bin_, room in enumerate(rooms):
            if room >= length:
                rooms[bin_] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(st.lists(st.integers(1, 100), max_size=200), st.integers(100, 300))
def test_best_fit_decreasing_shares_every_item_out_once(lengths, capacity):
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in members) <= capacity for members in bins)
    assert bins == sorted(sorted(members) for members in bins)
    assert bins == best_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_decreasing_uses_no_more_bins_than_first_fit(seed):
    lengths = np.random.default_rng(seed).integers(1, 1500, 2000).tolist()
    assert len(best_fit_decreasing(lengths, 2048)) <= first_fit(lengths, 2048)


@pytest.mark.parametrize("lengths", [[3, 0], [3, 9], [3, 0, 9]])
def test_best_fit_decreasing_refuses_what_fits_nowhere(lengths):
    with pytest.raises(ValueError, match=r"lengths\[1\]"):
        best_fit_decreasing(lengths, 8)


def test_bins_of_equal_room_are_filled_oldest_first():
    assert best_fit_decreasing([8, 8, 8, 2], 10) == [[0, 3], [1], [2]]


def test_items_of_equal_length_are_packed_in_order():
    pairs = [[2 * pair, 2 * pair + 2] for pair in range(0, 500, 2)]
    alone = [[item] for item in range(1, 1000, 2)]
    assert best_fit_decreasing([1, 2] * 500, 2) == sorted(pairs + alone)


# --- rows


@thorough
@given(several, st.sampled_from([{}, {"pad_to_multiple_of": 16}, {"max_length": 28}]))
def test_a_token_sees_its_segment_and_its_ancestors_and_has_its_depth_as_position(trees, options):
    rows = pack_forests(trees, **options)
    visible, depth = expected(rows)
    assert torch.equal(visible_in(rows), visible)
    assert rows.position_ids.tolist() == depth.tolist()


@thorough
@given(several, st.sampled_from([None, 28]))
def test_the_last_token_of_a_path_sees_the_path_and_nothing_else(trees, max_length):
    rows = pack_forests(trees, max_length)
    length = rows.input_ids.shape[1]
    visible = visible_in(rows)
    for index, forest in enumerate(trees):
        paths = rows.paths(index)
        assert len(paths) == len(forest.leaves())
        for leaf, path in zip(forest.leaves(), paths, strict=True):
            row, last = divmod(int(path[-1]), length)
            assert (row * length + visible[row, last].nonzero().flatten()).tolist() == path.tolist()
            assert rows.input_ids.flatten()[path.numpy()].tolist() == forest.tokens[forest.path(leaf)].tolist()
            assert rows.position_ids.flatten()[path.numpy()].tolist() == list(range(len(path)))


@thorough
@given(several, st.integers(28, 60))
def test_every_forest_is_whole_in_one_row(trees, max_length):
    rows = pack_forests(trees, max_length, pad_token_id=VOCAB)
    sizes = [len(forest.tokens) for forest in trees]
    assert rows.input_ids.shape == (len(best_fit_decreasing(sizes, max_length)), max_length)
    seen = np.zeros(rows.input_ids.size, dtype=bool)
    for start, forest in zip(rows.starts.tolist(), trees, strict=True):
        end = start + len(forest.tokens)
        assert start // max_length == (end - 1) // max_length
        assert rows.input_ids.flatten()[start:end].tolist() == forest.tokens.tolist()
        assert not seen[start:end].any()
        seen[start:end] = True
    assert (rows.input_ids.flatten()[~seen] == VOCAB).all()


@thorough
@given(several, st.sampled_from([None, 28]))
def test_packing_is_deterministic_and_leaves_its_input_unchanged(trees, max_length):
    before = [(forest.tokens.copy(), forest.parents.copy()) for forest in trees]
    first, again = (pack_forests(trees, max_length) for _ in range(2))
    for name in ("input_ids", "position_ids", "subtree_ends", "starts"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    first.input_ids[:] = -1
    for (tokens, parents), forest in zip(before, trees, strict=True):
        assert np.array_equal(tokens, forest.tokens)
        assert np.array_equal(parents, forest.parents)


def test_one_row_keeps_the_order():
    rows = pack_forests([Forest.from_trees([9]), Forest.from_trees([7, 8, 6]), Forest.from_trees([5, 4])])
    assert rows.input_ids.tolist() == [[9, 7, 8, 6, 5, 4]]
    assert rows.starts.tolist() == [0, 1, 4]


@pytest.mark.parametrize("options", [{"pad_to_multiple_of": 4}, {"max_length": 8, "pad_to_multiple_of": 4}], ids=str)
def test_padding_follows_the_trees_and_is_hidden(options):
    rows = pack_forests([Forest.from_trees(([1, 2], [[3], [4]])), Forest.from_trees([5])], pad_token_id=9, **options)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 2, 0, 0, 0, 0]]
    assert rows.subtree_ends.tolist() == [[4, 4, 3, 4, 5, 0, 0, 0]]
    visible = visible_in(rows)[0]
    assert not visible[5:].any()
    assert not visible[:, 5:].any()


@thorough
@given(several, st.sampled_from([{}, {"pad_to_multiple_of": 16}, {"max_length": 28}]))
def test_spread_puts_each_value_at_the_place_of_its_token(trees, options):
    rows = pack_forests(trees, pad_token_id=VOCAB, **options)
    spread = rows.spread([-1 - forest.tokens for forest in trees], filler=-1 - VOCAB)
    assert spread.tolist() == (-1 - rows.input_ids).tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2]], r"one entry per token, \[2, 1\] for the forests, got \[2\]"),
        ([[1, 2], [3, 4]], r"one entry per token, \[2, 1\] for the forests, got \[2, 2\]"),
        ([[1], [3]], r"one entry per token, \[2, 1\] for the forests, got \[1, 1\]"),
    ],
)
def test_spread_raises_unless_values_and_tokens_are_one_to_one(values, message):
    rows = pack_forests([Forest.from_trees([1, 2]), Forest.from_trees([3])])
    with pytest.raises(ValueError, match=message):
        rows.spread(values, filler=0)


TREE = Forest.from_trees(([1, 2], [[3], [4, 5]]))


@pytest.mark.parametrize(
    ("trees", "options", "message"),
    [
        ([], {}, "forests is empty: there is nothing to pack"),
        ([TREE], {"max_length": 4}, r"forests\[0\] has 5 tokens, more than the 4 of a row; make rows longer"),
        ([TREE], {"max_position_embeddings": 3}, r"forests\[0\] is 4 tokens deep, but the model has 3 positions"),
        ([Forest.from_trees([1]), TREE], {"max_length": 4}, r"forests\[1\] has 5 tokens"),
        ([TREE], {"pad_token_id": -100}, "pad_token_id must be in .*, got -100; any token id serves"),
        ([TREE], {"pad_token_id": None}, "pad_token_id must be a token id, got None"),
        ([TREE], {"max_length": 0}, "max_length must be at least 1, got 0; or None"),
        ([TREE], {"pad_to_multiple_of": 0}, "pad_to_multiple_of must be at least 1, got 0"),
        ([TREE], {"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, got 0"),
        ([TREE], {"max_length": 10, "pad_to_multiple_of": 4}, "max_length must be a multiple of pad_to_multiple_of"),
    ],
)
def test_packing_raises_for_invalid_forests_and_options(trees, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pack_forests(trees, **options)


def test_max_position_embeddings_limits_paths_not_trees():
    rows = pack_forests([TREE, TREE], max_position_embeddings=4)
    assert rows.input_ids.shape == (1, 10)


# --- a model on packed rows


def tiny_llama(attention):
    torch.manual_seed(0)
    config = llama_config(initializer_range=0.2, max_position_embeddings=2048, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def random_tree(seed):
    """Draw a tree of three levels: two or three children, each with up to three children of its own."""
    rng = np.random.default_rng(seed)

    def segment():
        return rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()

    children = [(segment(), [segment() for _ in range(rng.integers(0, 4))]) for _ in range(rng.integers(1, 3))]
    return Forest.from_trees((segment(), [(segment(), [segment(), segment()]), *children]))


def log_probs(logits, tokens):
    """Return the log-probability of each token but the first: logits [n, V], tokens [n] -> [n - 1]."""
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def packed_results(rows, index):
    """Return the log-probabilities of each leaf path of a forest, and the gradients of their sum, from packed rows."""
    model, batch = tiny_llama("flashmask"), rows.batch()
    logits = model(**batch).logits.flatten(0, 1)
    found = [log_probs(logits[path], batch["input_ids"].flatten()[path]) for path in rows.paths(index)]
    torch.cat(found).sum().backward()
    return [values.detach() for values in found], [parameter.grad for parameter in model.parameters()]


def separate_results(forest):
    """Return the same as `packed_results` from a run of each path alone, with eager attention."""
    model, found = tiny_llama("eager"), []
    for leaf in forest.leaves():
        tokens = torch.from_numpy(forest.tokens[forest.path(leaf)])
        found.append(log_probs(model(input_ids=tokens[None]).logits[0], tokens))
        found[-1].sum().backward()
    return [values.detach() for values in found], [parameter.grad for parameter in model.parameters()]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("company", "options"),
    [
        ((), {}),
        ((), {"pad_to_multiple_of": 128}),
        ((10, 11), {}),
        ((10, 11, 12), {"max_length": 160}),
    ],
    ids=["alone", "padded", "among others", "rows"],
)
def test_every_leaf_path_equals_a_run_of_it_alone(seed, company, options):
    tree = random_tree(seed)
    rows = pack_forests([random_tree(other) for other in company] + [tree], **options)
    log_probabilities, gradients = packed_results(rows, len(company))
    expected_log_probabilities, expected_gradients = separate_results(tree)
    assert len(log_probabilities) == len(tree.leaves()) >= 3
    assert_exact(log_probabilities, expected_log_probabilities)
    assert_exact(gradients, expected_gradients)


@pytest.mark.parametrize("segment", [1, 2, 4])
def test_changing_a_branch_leaves_all_others_bit_identical(segment):
    tree, other = random_tree(0), random_tree(1)
    changed = Forest(tree.tokens.copy(), tree.lengths, tree.parents)
    branch = np.zeros(len(tree.tokens), dtype=bool)
    own = tree.path(segment)[-tree.lengths[segment] :]
    changed.tokens[own] = (tree.tokens[own] + 1) % VOCAB
    for below in range(segment, len(tree.lengths)):
        if segment in lineage(tree.parents, below):
            branch[tree.path(below)[-tree.lengths[below] :]] = True
    rest = torch.from_numpy(np.append(~branch, np.ones(len(other.tokens), dtype=bool)))
    assert rest[: len(branch)].any()

    model = tiny_llama("flashmask").model
    with torch.no_grad():
        before, after = (model(**pack_forests([each, other]).batch()).last_hidden_state[0] for each in (tree, changed))
    assert torch.equal(before[rest], after[rest])
    assert (before[~rest] != after[~rest]).any(-1).all()


def test_the_example_of_trees_in_the_docs(capsys):
    """The example runs unchanged and prints the output in docs/trees.md, in which packed and separate paths agree."""
    page = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
    pattern = r"```python\n((?:(?!```).)*Forest\.from_trees(?:(?!```).)*)```\n\n```\n(.*?)```"
    code, shown = re.search(pattern, page, re.DOTALL).groups()
    exec(compile(code, "docs/trees.md", "exec"), {})
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == [line.split(":")[0] for line in shown.splitlines()]
    for line in printed.splitlines():
        packed, alone = line.split(": ")[1].split(", alone ")
        assert float(packed) == pytest.approx(float(alone), abs=2e-4)
