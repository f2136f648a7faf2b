"""Trees and shared questions need positions that are depths."""

import random

import pytest
import torch
from tools.calls import run_check
from tools.model_pairs import NoSynchronization, attend, model_pair, tokens

from flashmask_hf import FlashMask, masks
from flashmask_hf.hf.checks import trees
from flashmask_hf.hf.checks.trees import check_tree_positions

SHARED = masks.share_question([(3, [2, 4])])
DEPTHS = torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5, 6]])


def check_labels(vectors, labels):
    model, _ = model_pair("llama")
    run_check("a branch learned from its sibling", model, startend_row_indices=vectors, labels=labels)


def refuses(mask, position_ids):
    try:
        check_tree_positions(mask, position_ids)
    except RuntimeError as error:
        assert "startend_row_indices are of a tree or a shared question" in str(error)  # noqa: PT017
        return True
    return False


MISSING = "a shared question, but position_ids are missing; pass depths"


@pytest.mark.parametrize("model_name", ["llama", "mistral", "gpt_oss"])
def test_shared_question_without_positions_is_refused(model_name):
    model, _ = model_pair(model_name, num_hidden_layers=1)
    given = dict(input_ids=tokens(1, 9), startend_row_indices=SHARED.indices, use_cache=False)
    model(**given, position_ids=DEPTHS)
    with pytest.raises(RuntimeError, match=MISSING):
        model(**given)


def test_a_layer_without_positions_is_refused():
    given = dict(startend_row_indices=masks.share_question([(2, [2, 2])]).indices)
    attend(**given, position_ids=torch.tensor([[0, 1, 2, 3, 2, 3]]))
    with pytest.raises(RuntimeError, match=r"but position_ids do not branch"):  # though the vectors are the same
        attend(**given, position_ids=torch.arange(6)[None])
    with pytest.raises(RuntimeError, match=r"but position_ids are missing"):
        attend(**given)


def test_positions_of_each_row_are_compared_with_its_own():
    assert not refuses(SHARED, torch.cat([DEPTHS + 9, DEPTHS]))


def test_of_several_axes_the_first_counts():
    assert not refuses(SHARED, torch.stack([DEPTHS, torch.arange(9)[None]]))
    assert refuses(SHARED, torch.stack([torch.arange(9)[None], DEPTHS]))


@pytest.mark.parametrize(
    "positions",
    [torch.arange(9), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]), torch.tensor([0, 1, 2, 3, 4, 2, 3, 4, 5])],
    ids=["end to end", "each answer from 0", "beside the question's end"],
)
def test_positions_that_are_no_depths(positions):
    batch = SHARED.indices.expand(2, 2, 9, 1)
    assert refuses(FlashMask(batch, causal=True), positions[None])
    assert not refuses(FlashMask(batch, causal=True), DEPTHS)
    assert refuses(SHARED, positions[None])
    assert refuses(SHARED, torch.stack([DEPTHS[0], positions]))
    assert refuses(SHARED, torch.stack([positions] * 3)[:, None])
    assert not refuses(SHARED.bidirectional(), positions[None])
    closed = torch.cat([SHARED.indices, torch.full_like(SHARED.indices, 9)], -1)  # LTS, LTE; or LTS, UTE, all hidden
    assert [refuses(FlashMask(closed, causal), positions[None]) for causal in (True, False)] == [True, False]


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(12),
        masks.causal_document([5, 1, 6]),
        masks.sliding_window(12, 3),
        masks.global_sliding_window(12, 2, 3),
        masks.padding([12, 7]),
    ],
    ids=repr,
)
def test_other_masks_may_be_numbered_from_end_to_end(mask):
    assert not refuses(mask, torch.arange(12)[None])
    assert not refuses(mask, None)


def random_forest(rng, length):
    """Return the end of each token's subtree and its depth, drawn by walking a stack."""
    ends, depths, open_tokens = [0] * length, [], []
    for token in range(length):
        if rng.random() < 0.3:
            for _ in range(rng.randint(0, len(open_tokens))):
                ends[open_tokens.pop()] = token
        depths.append(len(open_tokens))
        open_tokens.append(token)
    for token in open_tokens:
        ends[token] = length
    return ends, depths


def test_random_trees():
    rng = random.Random(0)
    for _ in range(300):
        length = rng.randint(1, 14)
        ends, depths = random_forest(rng, length)
        hidden = [rng.random() < 0.1 for _ in range(length)]
        ends = torch.tensor([0 if h else e for e, h in zip(ends, hidden, strict=True)])
        mask = FlashMask(ends.int().view(1, 1, -1, 1), causal=True)
        assert not refuses(mask, torch.tensor(depths)[None])
        closed = torch.cat([mask.indices, torch.full_like(mask.indices, length)], -1)  # LTS, LTE
        for indices in (mask.indices, closed):
            assert not refuses(FlashMask(indices, causal=True), torch.tensor(depths)[None])
            assert refuses(FlashMask(indices, causal=True), torch.arange(length)[None]) == branches(mask, hidden)
        assert not refuses(mask.bidirectional(), torch.arange(length)[None])


def branches(mask, hidden):
    """Return whether a token sees an earlier one, but not the one before it."""
    visible = mask.to_dense()[0, 0]
    return any(
        not (hidden[i] or hidden[i - 1]) and visible[i, :i].any() and not visible[i, i - 1]
        for i in range(1, len(hidden))
    )


def test_questions_that_see_themselves_whole():
    """The question of a prefix language model has its two answers in columns that are not causal."""
    visible = SHARED.to_dense()
    visible[..., :3, :3] = True
    mask = FlashMask.from_dense(visible)
    assert not mask.causal
    assert refuses(mask, torch.arange(9)[None])
    assert not refuses(mask, DEPTHS)
    model, _ = model_pair("llama", num_hidden_layers=1)
    given = dict(input_ids=IDS, startend_row_indices=mask.bidirectional().indices, use_cache=False)
    assert given["startend_row_indices"].shape[-1] == 4
    model(**given, position_ids=DEPTHS, labels=LABELS.masked_fill(DEPTHS < 3, -100))
    with pytest.raises(RuntimeError, match="position_ids are missing"):
        model(**given)
    with pytest.raises(RuntimeError, match="labels name the first token of a branch"):
        model(**given, position_ids=DEPTHS, labels=IDS)


@pytest.mark.parametrize(
    "mask",
    [masks.document([5, 7]), masks.prefix_lm_document([(2, 5), (3, 7)]), masks.prefix_lm_causal(12, 4), masks.full(12),
     masks.causal_blockwise([4, 4, 4]), masks.sliding_window(12, 3).bidirectional()],
    ids=repr,
)  # fmt: skip
def test_masks_of_more_columns_that_are_no_trees(mask):
    assert not refuses(mask, torch.arange(12)[None])
    assert not refuses(mask.bidirectional(), None)


# The model's own loss

IDS = torch.arange(1, 10)[None]
CALL = dict(input_ids=IDS, position_ids=DEPTHS, startend_row_indices=SHARED.indices, use_cache=False)
LABELS = IDS.masked_fill(torch.arange(9) == 5, -100)
"""Labels of all tokens but the first of the second answer."""


def test_labels_of_a_branch_are_refused():
    model, eager = model_pair("llama")
    for shift in ({}, {"shift_labels": None}):
        with pytest.raises(RuntimeError, match=r"labels name the first token of a branch.*set it to -100"):
            model(**CALL, labels=IDS, **shift)
    dense = torch.where(SHARED.to_dense(), 0.0, torch.finfo(torch.float32).min)
    given = dict(input_ids=IDS, position_ids=DEPTHS, attention_mask=dense, use_cache=False)
    got, want = model(**CALL, labels=LABELS).loss, eager(**given, labels=LABELS).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)  # labels that are where they are predicted
    model(**CALL, labels=IDS, shift_labels=shifted)


def test_first_tokens_are_found_once_per_call(monkeypatch):
    """By the check of labels, for it and for both kinds of layers."""
    found, find = [], trees._find_first_tokens
    monkeypatch.setattr(trees, "_find_first_tokens", lambda ends: found.append(1) or find(ends))
    model_pair("gemma2")[0](**CALL | {"startend_row_indices": SHARED.indices.clone()}, labels=LABELS)
    assert len(found) == 1


def test_a_loss_that_does_not_shift_its_labels_takes_those_of_first_tokens():
    """As that of a masked language model."""
    model, _ = model_pair("llama")
    model.loss_type = "ForMaskedLM"
    out = model(**CALL, labels=IDS)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits[0], IDS[0]))


@pytest.mark.parametrize("attention", ["flashmask", "sdpa"])
def test_labels_of_a_document_after_another_are_refused(attention):
    model, _ = model_pair("llama")
    model.set_attn_implementation(attention)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    mask = masks.causal_document([4, 3], kv_len=9)
    columns = [mask.indices, torch.cat([mask.indices, torch.full_like(mask.indices, 9)], -1)]
    for vectors in columns[: 2 if attention == "flashmask" else 1]:
        call = dict(input_ids=IDS, position_ids=places, startend_row_indices=vectors, use_cache=False)
        with pytest.raises(RuntimeError, match=r"first token of .* a packed document.*set it to -100 there"):
            model(**call, labels=IDS)
        model(**call, labels=IDS.masked_fill(torch.arange(9) == 4, -100))  # those of padding are not looked at
        model(**call, labels=IDS, shift_labels=IDS)


@pytest.mark.parametrize(
    "vectors",
    [
        SHARED.indices.tolist(),
        SHARED.indices.long(),
        SHARED.indices.expand(1, 2, 9, 1),
        SHARED.indices[0],
        SHARED.indices.flatten(),
    ],
    ids=["list", "int64", "heads", "three axes", "one axis"],
)
def test_labels_beside_vectors_of_another_form_are_not_looked_at(vectors):
    with pytest.raises(RuntimeError, match="labels name the first token of a branch"):
        check_labels(SHARED.indices, DEPTHS)
    check_labels(vectors, DEPTHS)


@pytest.mark.parametrize("labels", [None, DEPTHS[0], DEPTHS.tolist(), DEPTHS.repeat(1, 2)])
def test_labels_of_another_form_are_not_looked_at(labels):
    check_labels(SHARED.indices, labels)


def test_tokens_that_are_hidden_from_their_own_row_on_are_padding():
    ends = torch.tensor([2, 2, 2, 2], dtype=torch.int32).view(1, 1, 4, 1)
    check_labels(ends, torch.ones(1, 4))


def test_labels_of_other_masks_are_not_looked_at():
    model, _ = model_pair("llama")
    for mask in (masks.sliding_window(9, 2), masks.padding([7], kv_len=9)):
        model(IDS, startend_row_indices=mask.bidirectional().indices, labels=IDS, use_cache=False)


@pytest.mark.parametrize(
    "mask",
    [masks.document([5, 4]), masks.block_diffusion([3], 1, 2), masks.block_causal([9], 2)],
    ids=["documents", "blocks", "causal"],
)
def test_labels_that_the_token_before_sees_are_refused(mask):
    model, _ = model_pair("llama")
    call = dict(input_ids=IDS, startend_row_indices=mask.bidirectional().indices, labels=IDS)
    with pytest.raises(RuntimeError, match=r"labels name a token that the token before sees.*diffusion_loss"):
        run_check("labels` that the token before sees", model, **call)
    run_check("labels` that the token before sees", model, **call, shift_labels=IDS)
    masked = torch.arange(9) % 3 == 1  # as in shifted masked diffusion
    noised = dict(input_ids=IDS.masked_fill(masked, 63), labels=IDS.masked_fill(~masked, -100))
    run_check("labels` that the token before sees", model, **call | noised)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    run_check("labels` that the token before sees", model, **call)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_trees_with_another_attention_are_refused(implementation):
    model, _ = model_pair("llama")
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=rf"attn_implementation='{implementation}' ignores them.*'flashmask'"):
        model(**CALL, labels=LABELS)
    model(**CALL | dict(startend_row_indices=masks.causal_document([9]).indices), labels=LABELS)


def test_a_compiled_model(no_compiled_code):
    """Its loss, and calls that it refuses."""
    model, _ = model_pair("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**CALL, labels=LABELS).loss, model(**CALL, labels=LABELS).loss)
    with pytest.raises(RuntimeError, match="labels name the first token of a branch"):
        compiled(**CALL, labels=IDS)
    with pytest.raises(RuntimeError, match=MISSING):
        compiled(**{name: x for name, x in CALL.items() if name != "position_ids"})


def test_overlapping_keys_are_no_tree():
    """Key 1 is evicted at row 3, and key 2, which row 1 sees, later."""
    mask = FlashMask(torch.tensor([5, 3, 4, 5, 5], dtype=torch.int32).view(1, 1, 5, 1), causal=True)
    assert not refuses(mask, torch.arange(5)[None])


@pytest.mark.parametrize(
    "changes",
    [{(5, 5): False}, {(6, 0): False}, {(7, 8): True, (8, 8): False}],
    ids=["hidden from itself", "hidden from a row between", "seen by an earlier row alone"],
)
def test_keys_that_are_not_seen_from_their_own_row_on_are_no_tree(changes):
    visible = SHARED.to_dense()
    visible[..., :3, :3] = True
    assert refuses(FlashMask.from_dense(visible), torch.arange(9)[None])
    for (row, key), sees in changes.items():
        visible[..., row, key] = sees
    assert not refuses(FlashMask.from_dense(visible), torch.arange(9)[None])


def test_the_check_does_not_wait_for_the_device():
    with NoSynchronization():
        check_tree_positions(SHARED, DEPTHS)
