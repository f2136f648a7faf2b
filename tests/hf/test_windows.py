"""Windows measured by position: against dense masks, and in models against each branch by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import model_pairs
from tools.model_pairs import WINDOW, assert_near, model_pair, positions, tokens
from tools.support import requires
from tools.tiny import assert_exact
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    MistralConfig,
    Qwen2MoeConfig,
)
from transformers.models.gemma3 import Gemma3TextConfig

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.windows import apply_window

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


def counts(*runs):
    """Return the positions [1, S] of a row that counts from start to stop in each run."""
    return torch.cat([torch.arange(a, b) for a, b in runs])[None]


def near(position_ids, window, two_sided):
    """Return whether the positions of two rows lie within the window, [B, 1, S, S]."""
    distance = position_ids[:, None, :, None] - position_ids[:, None, None, :]
    return (distance.abs() if two_sided else distance) < window


def inputs(batch, length):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, length, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    return [x.requires_grad_() for x in (q, k, v)]


def check(mask, window, position_ids, two_sided=False):
    """Assert that output and gradients are those under the dense mask; return whether keys were repeated."""
    batch, length = max(mask.indices.shape[0], position_ids.shape[0]), mask.kv_len
    seen = apply_window(mask, window, position_ids, two_sided=two_sided)
    visible = (mask.to_dense() & near(position_ids, window, two_sided)).expand(batch, -1, -1, -1)
    q, k, v = inputs(batch, length)
    out = flashmask_attention(q, seen.gather(k), seen.gather(v), seen.mask)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    kk, vv = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ kk.mT * 8**-0.5).masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1).nan_to_num() @ vv
    want = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    assert_exact(got, want)
    return seen.keys is not None


TREE = masks.tree([(4, [(6, [3, 2]), 5]), 4])
TREE_POSITIONS = counts((0, 4), (4, 10), (10, 13), (10, 12), (4, 9), (0, 4))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 12, 13, 40])
def test_tree(window):
    assert check(TREE, window, TREE_POSITIONS) == (1 < window < 13)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3, 8])
def test_tree_on_the_gpu(window):
    """Columns and, through autograd of repeated keys, gradients are those on the CPU."""
    requires("gpu")
    seen = apply_window(TREE, window, TREE_POSITIONS, two_sided=False)
    there = apply_window(TREE.to("cuda"), window, TREE_POSITIONS.cuda(), two_sided=False)
    assert torch.equal(there.mask.indices.cpu(), seen.mask.indices)
    assert (there.keys is None) == (seen.keys is None)
    results = []
    for one, device in ((seen, "cpu"), (there, "cuda")):
        q, k, v = (x.detach().float().to(device).requires_grad_() for x in inputs(1, TREE.kv_len))
        out = flashmask_attention(q, one.gather(k), one.gather(v), one.mask)
        results.append([x.cpu() for x in (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [3, 6, 9])
def test_rows_of_a_batch_differ(window):
    mask = masks.share_question([[(6, [8, 8])], [(2, [5, 5, 5, 5])]])
    rows = [counts((0, 6), (6, 14), (6, 14)), counts((0, 2), *[(2, 7)] * 4)]
    assert check(mask, window, torch.cat(rows))


def test_one_mask_for_rows_whose_positions_differ():
    mask = masks.causal(8)
    assert not check(mask, 3, torch.cat([counts((0, 8)), counts((0, 3), (1, 6))]))
    assert check(mask, 3, torch.cat([counts((0, 8)), counts((0, 6), (1, 3))]))


def test_documents_and_padding_need_no_more_columns_than_keys():
    mask = masks.causal_document([9, 7], kv_len=20)
    assert not check(mask, 4, counts((0, 9), (0, 7), (0, 4)))


def test_two_column_masks_to_which_the_window_adds_a_third_bound():
    indices = torch.full((1, 1, 16, 2), 16, dtype=torch.int32)
    indices[:, :, 3] = torch.tensor([5, 7], dtype=torch.int32)
    mask = FlashMask(indices, causal=True)
    assert check(mask, 6, counts((0, 16)))
    alone = apply_window(mask, 6, None, two_sided=False)
    by_row = apply_window(mask, 6, counts((0, 16)), two_sided=False)
    assert torch.equal(alone.mask.indices, by_row.mask.indices)


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_masks_that_are_not_causal(window, two_sided):
    at = counts((0, 10), (0, 6))
    check(masks.document([10, 6]), window, at, two_sided)
    check(masks.prefix_lm_document([(3, 10), (2, 6)]), window, at, two_sided)
    check(masks.full(16), window, at, two_sided)
    check(masks.tree([(4, [6, 6])]).bidirectional(), window, counts((0, 4), (4, 10), (4, 10)), two_sided)


@pytest.mark.parametrize("window", [2**31 - 9, 2**31 - 1, 2**31, 2**40])
def test_windows_wider_than_any_row(window):
    """Some configs give such a window where they mean none."""
    for two_sided in (False, True):
        for mask in (masks.causal(16), masks.document([10, 6]), masks.full(16)):
            got = apply_window(mask, window, None, two_sided=two_sided)
            assert torch.equal(got.mask.to_dense(), mask.to_dense())
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(1, 2, 16, 8)
    results = [attention_forward(module, q, q, q, None, sliding_window=wide)[0] for wide in (window, None)]
    assert torch.equal(*results)


def test_positions_that_leave_gaps():
    """Image tokens may share a position or skip some, so distances in rows are not those in positions."""
    check(masks.causal(12), 4, counts((0, 3), (20, 25), (25, 29)))
    check(masks.causal(12), 4, torch.tensor([[0, 1, 1, 1, 1, 2, 3, 9, 9, 10, 11, 12]]))


@pytest.mark.parametrize("mask", [masks.causal(4), masks.full(4)], ids=["causal", "full"])
def test_a_step_back_that_is_further_than_the_window(mask):
    """The step back from position 2 to 0 is one row, but two positions."""
    check(mask, 2, torch.tensor([[0, 1, 2, 0]]), two_sided=True)


def test_positions_that_leave_gaps_in_rows_shorter_than_the_window():
    for second in (2, 5):
        check(masks.causal(3), 3, torch.tensor([[0, second, second + 1]]))


def test_a_tree_no_longer_than_the_window_is_measured_in_rows():
    """No column is added for it, also where a document in the same row is longer than the window."""
    mask, at = masks.tree([(1, [2, 2]), 9]), counts((0, 1), (1, 3), (1, 3), (0, 9))
    check(mask, 5, at)
    assert apply_window(mask, 5, at, two_sided=False).mask.indices.shape == mask.indices.shape


@pytest.mark.parametrize("window", [13, 2**31])
def test_a_window_as_wide_as_the_positions_leaves_the_mask_as_it_is(window):
    at = (TREE_POSITIONS + 5).to(torch.int32)  # in which 2**31 is negative
    assert apply_window(TREE, window, at, two_sided=False).mask is TREE


def test_every_row_hidden():
    mask = FlashMask(torch.zeros(1, 1, 8, 1, dtype=torch.int32), causal=True)
    check(mask, 2, counts((0, 4), (2, 6)))
    beside_a_tree = FlashMask(torch.cat([torch.zeros_like(TREE.indices), TREE.indices]), causal=True)
    check(beside_a_tree, 5, TREE_POSITIONS)


def test_every_visible_pair_outside_of_the_window():
    """Row 3 alone sees key 0, from position 1; no piece is left."""
    indices = torch.tensor([[[[4, 3], [0, 0], [0, 0], [0, 0]]]], dtype=torch.int32)
    check(FlashMask(indices, causal=False), 1, counts((0, 2), (0, 2)))


@settings(max_examples=200)
@given(st.data())
def test_any_mask_and_positions(data):
    length = data.draw(st.integers(1, 14))
    n = data.draw(st.sampled_from([(1, True), (2, True), (2, False), (4, False)]))
    row = st.integers(0, length)
    indices = torch.tensor(data.draw(st.lists(row, min_size=length * n[0], max_size=length * n[0])), dtype=torch.int32)
    at = torch.tensor([data.draw(st.lists(st.integers(0, 6), min_size=length, max_size=length))])
    mask = FlashMask(indices.view(1, 1, length, n[0]), causal=n[1])
    check(mask, data.draw(st.integers(1, 8)), at, data.draw(st.booleans()))


def test_the_memory_bound_changes_nothing(monkeypatch):
    want = apply_window(TREE, 5, TREE_POSITIONS, two_sided=False)
    monkeypatch.setattr("flashmask_hf.hf.windows._MAX_PAIRS", 1)
    got = apply_window(TREE, 5, TREE_POSITIONS, two_sided=False)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.mask.indices, want.mask.indices)


def test_heads_that_would_be_cut_differently_are_refused():
    mask = FlashMask(TREE.indices.expand(-1, 2, -1, -1), causal=True)
    with pytest.raises(
        NotImplementedError, match=r"cuts the 2 heads of startend_row_indices .*pass vectors with one head"
    ):
        apply_window(mask, 5, TREE_POSITIONS, two_sided=False)
    assert apply_window(mask, 40, TREE_POSITIONS, two_sided=False).mask is mask


def test_compiled():
    """Runs of positions are cut by row; trees deeper than the window raise."""

    def run(indices, position_ids):
        return apply_window(FlashMask(indices, causal=True), 5, position_ids, two_sided=False).mask.indices

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    documents, at = masks.causal_document([9, 7]).indices, counts((0, 9), (0, 7))
    for position_ids in (at, None):
        assert torch.equal(compiled(documents, position_ids), run(documents, position_ids))
    short = counts((0, 2), (2, 4), (2, 4), *[(0, 1)] * 10)
    assert torch.equal(compiled(documents, short), documents)
    with pytest.raises(RuntimeError, match=r"sliding_window=5 cuts trees .*do not compile it"):
        compiled(TREE.indices, TREE_POSITIONS)


@pytest.mark.parametrize(
    ("causal", "columns", "two_sided"), [(True, 1, True), (True, 2, False), (False, 2, True)], ids=str
)
def test_forms_that_cannot_be_compiled_are_refused(causal, columns, two_sided):
    def run(indices):
        return apply_window(FlashMask(indices, causal), 5, None, two_sided=two_sided).mask.indices

    with pytest.raises(Exception, match="is compiled for causal columns with n = 1 only"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(torch.full((1, 1, 16, columns), 16, dtype=torch.int32))


def test_captured(monkeypatch):
    """A CUDA graph cannot wait for the device, so it takes what compiled code takes."""
    monkeypatch.setattr("flashmask_hf.hf.windows.is_capturing", lambda x: True)
    with pytest.raises(RuntimeError, match=r"sliding_window=5 cuts trees .*do not compile it"):
        apply_window(TREE, 5, TREE_POSITIONS, two_sided=False)


# Models


@pytest.mark.parametrize("window", [14, 22])
def test_a_window_that_no_position_exceeds_hides_nothing(window):
    """Tokens lie further apart in the row than the window, but their positions do not."""
    wide, _ = model_pair("mistral", sliding_window=window)
    question, answers = torch.arange(6), torch.arange(6, 14)
    ids = tokens(1, 22)
    packed = wide(
        ids,
        position_ids=torch.cat([question, answers, answers])[None],
        startend_row_indices=masks.share_question([(6, [8, 8])]).indices,
        use_cache=False,
    ).logits
    alone = wide(torch.cat([ids[:, :6], ids[:, 14:]], 1), use_cache=False).logits
    assert_near(packed[:, 14:], alone[:, 6:])


def test_window_with_padding_at_the_end():
    """Padding sees nothing, and its positions may be anything."""
    ours, _ = model_pair("mistral")
    ids = tokens(1, 20)
    mask = masks.causal_document([9, 7], kv_len=20)
    position_ids = torch.cat([positions([9, 7]), torch.zeros(1, 4, dtype=torch.int64)], 1)
    inputs = dict(position_ids=position_ids, startend_row_indices=mask.indices, use_cache=False)
    short = dict(position_ids=positions([9, 7]), use_cache=False)
    assert_near(ours(ids, **inputs).logits[:, :16], ours(ids[:, :16], **short).logits)


def test_window_with_two_column_vectors():
    """Rows 9 to 11 hidden from key 3 touch the rows that the window hides: one interval, and the diagonal."""
    indices = torch.full((1, 1, 16, 2), 16, dtype=torch.int32)
    indices[:, :, 3] = torch.tensor([9, 12], dtype=torch.int32)
    query, module = torch.randn(1, 2, 16, 8), torch.nn.Module()
    given = dict(sliding_window=WINDOW, position_ids=positions([16]))
    got, _ = attention_forward(module, query, query, query, None, startend_row_indices=indices, **given)
    row = torch.arange(16)
    visible = FlashMask(indices, causal=True).to_dense() & (row[:, None] < row + WINDOW)
    scores = (query @ query.transpose(-1, -2) * 8**-0.5).masked_fill(~visible, float("-inf"))
    assert_near(got, (scores.softmax(-1) @ query).transpose(1, 2))


SIZES = model_pairs.SIZES | {"sliding_window": WINDOW}
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
MODELS = {
    "mistral": lambda: MistralConfig(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": lambda: GptOssConfig(**SIZES, **EXPERTS),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, use_sliding_window=True, max_window_layers=0, num_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_branches_of_a_tree_deeper_than_the_window(name, checkpointing):
    """Logits and gradients of the tree are those of its paths from the root, run one by one with eager attention."""
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"}  # torch's grouped product takes no float64
    eager, ours = (
        AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=attention, **options).double()
        for attention in ("eager", "flashmask")
    )
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    ours.load_state_dict(eager.state_dict())
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(1, 48, (1, 26))
    question, first, second = range(9), range(9, 17), range(17, 26)
    position_ids = counts((0, 9), (9, 17), (9, 18))
    vectors = masks.share_question([(9, [8, 9])]).indices
    weight = torch.randn(26, 48)
    logits = ours(ids, position_ids=position_ids, startend_row_indices=vectors, use_cache=False).logits[0]
    (logits * weight).sum().backward()
    for answer in (first, second):
        path = [*question, *answer]
        alone = eager(ids[:, path], use_cache=False).logits[0]
        assert_exact([logits[path]], [alone])
        own = weight[path].clone()
        if answer is second:
            own[: len(question)] = 0  # counted with the first path
        (alone * own).sum().backward()
    assert_exact(*([p.grad for p in model.parameters()] for model in (ours, eager)))


def test_keys_are_not_repeated_for_layers_without_a_window(monkeypatch):
    """Gemma 2 has one layer with a window and one without; only the first one's keys have several columns."""
    columns = []

    def spy(query, key, *args, **kwargs):
        columns.append(key.shape[2])
        return flashmask_attention(query, key, *args, **kwargs)

    monkeypatch.setattr("flashmask_hf.hf.layer_mask.flashmask_attention", spy)
    model = AutoModelForCausalLM.from_config(MODELS["gemma2"](), attn_implementation="flashmask")
    vectors = masks.share_question([(9, [8, 9])]).indices
    at = counts((0, 9), (9, 17), (9, 18))
    model(torch.randint(1, 48, (1, 26)), position_ids=at, startend_row_indices=vectors, use_cache=False)
    # The last five tokens of the question are near enough to the second answer, and seen by the first before it.
    assert columns == [26 + 5, 26]
