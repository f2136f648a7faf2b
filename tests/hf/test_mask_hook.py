"""The mask hook against the dense masks of transformers."""

import itertools

import pytest
import torch
from tools.model_pairs import SIZES, NoSynchronization, positions, tokens
from transformers import AutoModel, BertConfig, MistralConfig
from transformers import masking_utils as hf_masks

from flashmask_hf import FlashMask, MaskNotRepresentable, masks
from flashmask_hf.hf import mask_hook as hook_module
from flashmask_hf.hf.call import Call, current
from flashmask_hf.hf.layer_mask import columns_of, mask_of_rows
from flashmask_hf.hf.mask_hook import mask_hook


def dense_of(hooked, q_length):
    columns = columns_of(hooked)
    return FlashMask(columns.mT.contiguous(), columns.shape[2] == 1).validate(q_length).to_dense(q_length)


PADDINGS = {
    "none": lambda batch, seen: None,
    "left": lambda batch, seen: torch.arange(seen) >= torch.tensor([0, 2, seen - 1])[:batch, None],
    "right": lambda batch, seen: torch.arange(seen) < torch.tensor([seen, seen - 1, 2])[:batch, None],
    "holes": lambda batch, seen: torch.rand(batch, seen) > 0.4,
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["bidirectional", "causal", "window 1", "window 3", "window 40"])
def test_hook_equals_dense_mask(kind, padding):
    if kind.startswith("window"):
        function = hf_masks.sliding_window_causal_mask_function(int(kind.split()[1]))
    else:
        function = getattr(hf_masks, f"{kind}_mask_function")
    forms = set()
    for q_length, past, kv_offset, spare in itertools.product((1, 2, 7, 13), (0, 1, 5), (0, 1, 5), (0, 1, 6)):
        kv_length = past + q_length - kv_offset + spare  # spare: keys of a static cache that are not written yet
        if kv_length < 1 or kv_offset > past:
            continue
        for q_offset in (past, torch.tensor(past)):
            given = dict(
                batch_size=3,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=function,
                attention_mask=PADDINGS[padding](3, past + q_length),
            )
            expected = hf_masks.sdpa_mask(**given, allow_is_causal_skip=False)
            columns = mask_hook(**given, allow_is_causal_skip=True, dtype=torch.float32, config=None, use_vmap=False)
            assert columns.shape[0] in (1, 3)
            assert (columns.shape[1], columns.shape[3]) == (1, kv_length)
            assert torch.equal(dense_of(columns, q_length).expand_as(expected), expected)
            forms.add((columns.shape[2], isinstance(q_offset, torch.Tensor), spare > 0))
    if kind != "bidirectional":
        assert (1, False, False) in forms
        assert (4, True, False) in forms
        assert (4, False, True) in forms


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("lengths", [[[12]], [[5, 1, 6]], [[1] * 12], [[4, 8], [12], [1, 2, 9]]], ids=str)
def test_hook_equals_dense_mask_of_packed_documents(lengths, window):
    config = MistralConfig(**SIZES, sliding_window=window)
    make = hf_masks.create_causal_mask if window is None else hf_masks.create_sliding_window_causal_mask
    rows = torch.cat([positions(row) for row in lengths])
    for position_ids in (rows, rows[:1]):  # one row of positions serves every entry
        results = []
        for attention in ("flashmask", "eager"):
            config._attn_implementation = attention
            results.append(
                make(
                    config=config,
                    inputs_embeds=torch.zeros(len(lengths), 12, 8),
                    attention_mask=None,
                    past_key_values=None,
                    position_ids=position_ids,
                )
            )
        assert results[0].shape[2] == 1
        assert torch.equal(dense_of(results[0], 12).expand_as(results[1]), results[1] == 0)


@pytest.mark.parametrize("kv_offset", [0, 2])
def test_a_mask_longer_than_the_keys_is_read_from_the_front(kv_offset):
    """As wide as a static cache, say, whose last keys a layer does not have."""
    padding = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
    given = dict(batch_size=2, q_length=6, kv_length=6, q_offset=kv_offset, kv_offset=kv_offset)
    columns = mask_hook(**given, attention_mask=padding)
    expected = hf_masks.sdpa_mask(**given, attention_mask=padding[:, : 6 + kv_offset], allow_is_causal_skip=False)
    assert torch.equal(dense_of(columns, 6).expand_as(expected), expected)


def test_hook_compiled_with_a_tensor_offset():
    compiled = torch.compile(mask_hook, fullgraph=True, backend="eager")
    for past in (2, 5):
        given = dict(
            batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(past), attention_mask=torch.ones(2, 6).bool()
        )
        assert torch.equal(compiled(**given), mask_hook(**given))


def image_blocks(length):
    """Return block ids of two images in a row of text, and of one in another row; -1 is text."""
    ids = torch.full((2, length), -1)
    ids[0, 1:4], ids[0, 5:7], ids[1, 2:9] = 0, 1, 0
    return ids


def custom(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx <= q_idx) & ((kv_idx + q_idx) // 5 * 5 <= kv_idx + q_idx)


def diagonal_blocks(batch_idx, head_idx, q_idx, kv_idx):
    return (q_idx // 3 == kv_idx // 3) | (kv_idx == 0)


def structures(length):
    causal, both = hf_masks.causal_mask_function, hf_masks.bidirectional_mask_function
    window, overlay = hf_masks.sliding_window_causal_mask_function, hf_masks.sliding_window_overlay
    chunked = hf_masks.chunked_overlay
    images = hf_masks.blockwise_overlay(image_blocks(length))
    chunks = torch.tensor([0, 2])
    keys = torch.arange(length) % 4 != 1
    return {
        "two-sided window": hf_masks.sliding_window_bidirectional_mask_function(2),
        "chunks": hf_masks.chunked_causal_mask_function(4, chunks),
        "two-sided chunks": hf_masks.and_masks(both, chunked(3, chunks)),
        "images": hf_masks.or_masks(causal, images),
        "images in a window": hf_masks.or_masks(window(3), images),
        "images within chunks": hf_masks.and_masks(hf_masks.or_masks(causal, images), chunked(5, chunks)),
        "two windows": hf_masks.and_masks(window(5), overlay(3)),
        "a mask of keys": hf_masks.and_masks(causal, hf_masks.padding_mask_function(keys.expand(2, -1))),
        "custom": custom,
        "custom and a window": hf_masks.and_masks(overlay(4), custom),
        "blocks and a sink": diagonal_blocks,
    }  # fmt: skip


TRACED = {
    "two-sided window",
    "chunks",
    "two-sided chunks",
    "images",
    "images in a window",
    "images within chunks",
    "two windows",
}
"""Structures that are traced, without evaluating every pair."""


@pytest.mark.parametrize("use_vmap", [False, True], ids=["indexed", "vmap"])
@pytest.mark.parametrize("name", structures(12))
def test_hook_equals_dense_mask_of_every_structure(name, use_vmap, monkeypatch):
    evaluated = []
    evaluate = hook_module._evaluate
    monkeypatch.setattr(hook_module, "_evaluate", lambda *args: evaluated.append(1) or evaluate(*args))
    for q_length, past, kv_offset, spare in [(12, 0, 0, 0), (5, 3, 0, 0), (5, 3, 2, 1), (1, 8, 0, 0), (7, 0, 0, 5)]:
        for q_offset in (past, torch.tensor(past)):
            given = dict(
                batch_size=2,
                q_length=q_length,
                kv_length=past + q_length - kv_offset + spare,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=structures(16)[name],
                attention_mask=torch.arange(past + q_length) >= torch.tensor([[0], [2]]),
                use_vmap=use_vmap,
            )
            columns = mask_hook(**given, config=None)
            expected = hf_masks.sdpa_mask(**given, allow_is_causal_skip=False)
            assert torch.equal(dense_of(columns, q_length).expand_as(expected), expected), (q_length, past)
    assert bool(evaluated) == (name not in TRACED)


def test_a_long_custom_mask_is_evaluated_in_slices(monkeypatch):
    monkeypatch.setattr("flashmask_hf.mask._COLUMNS_PER_PASS", 30)
    given = dict(batch_size=1, q_length=70, kv_length=70, mask_function=custom)
    assert torch.equal(dense_of(mask_hook(**given), 70), hf_masks.sdpa_mask(**given, allow_is_causal_skip=False))


def test_a_mask_of_three_intervals_is_refused():
    def combed(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx // 2) % 2 == 0

    message = r"cannot hold the mask of .*combed: a column has 3 separate hidden.*attn_implementation='sdpa'"
    with pytest.raises(MaskNotRepresentable, match=message):
        mask_hook(batch_size=1, q_length=12, kv_length=12, mask_function=combed)


def test_errors_name_the_function_of_transformers_and_the_implementation():
    combed = hf_masks.and_masks(lambda batch_idx, head_idx, q_idx, kv_idx: (q_idx // 2) % 2 == 0)
    config = MistralConfig(**SIZES)
    config._attn_implementation = "flashmask_qk"
    with pytest.raises(MaskNotRepresentable, match=r"'flashmask_qk' cannot hold the mask of and_masks: "):
        mask_hook(batch_size=1, q_length=12, kv_length=12, mask_function=combed, config=config)


def test_a_custom_mask_is_refused_while_compiling():
    compiled = torch.compile(mask_hook, fullgraph=True, backend="eager")
    message = r"does not know the mask function .*hook\.custom while compiling; use attn_implementation='sdpa'"
    with pytest.raises(Exception, match=message):
        compiled(batch_size=1, q_length=6, kv_length=6, mask_function=custom)


def test_a_mask_function_of_a_caller_gets_one_pair_at_a_time():
    """So `all` is that of a pair."""

    def both(batch_idx, head_idx, q_idx, kv_idx):
        return torch.stack([kv_idx <= q_idx, kv_idx > 1]).all()

    given = dict(batch_size=1, q_length=6, kv_length=6, mask_function=both, use_vmap=True)
    expected = hf_masks.sdpa_mask(**given, allow_is_causal_skip=False)
    assert torch.equal(dense_of(mask_hook(**given), 6), expected)


def test_documents_may_have_padding_among_them():
    numbers = torch.tensor([[-1, 2, 2, -2, 2, 3, -3]], dtype=hook_module.NUMBERS)
    columns = mask_hook(batch_size=1, q_length=7, kv_length=7, attention_mask=numbers)
    document, real = numbers.abs(), numbers > 0
    expected = (document.mT == document) & real & torch.ones(7, 7).tril().bool()
    assert torch.equal(dense_of(columns, 7), expected[None, None])


def test_blocks_in_two_pieces_are_refused():
    ids = torch.tensor([[0, 0, -1, 0, 1, 1]])
    function = hf_masks.or_masks(hf_masks.causal_mask_function, hf_masks.blockwise_overlay(ids))
    with pytest.raises(RuntimeError, match=r"tokens of one block .* are not next to each other"):
        mask_hook(batch_size=1, q_length=6, kv_length=6, mask_function=function)


@pytest.mark.parametrize(
    "given", [{"q_length": 4}, {"q_length": 4, "q_offset": 2}, {"q_length": 6, "use_vmap": True}], ids=str
)
def test_custom_documents_beside_a_cache_or_in_pieces(given):
    ids = torch.tensor([[0, 0, 1, 1, 0, 0]])
    function = hf_masks.and_masks(hf_masks.causal_mask_function, hf_masks.packed_sequence_mask_function(ids))
    given = given | dict(batch_size=1, kv_length=6, mask_function=function)
    columns = mask_hook(**given)
    assert torch.equal(dense_of(columns, given["q_length"]), hf_masks.sdpa_mask(**given, allow_is_causal_skip=False))


def test_the_hook_does_not_wait_for_the_device():
    numbers = torch.tensor([[1, 1, 1, 2, 2, 2]], dtype=hook_module.NUMBERS)
    window = hf_masks.sliding_window_causal_mask_function(2)
    cached = dict(batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(4), attention_mask=torch.ones(2, 5) > 0)
    with pytest.raises(AssertionError), NoSynchronization():
        bool(numbers.any())
    with NoSynchronization():
        mask_hook(batch_size=1, q_length=6, kv_length=6, mask_function=window, attention_mask=numbers)
        mask_hook(**cached)
        mask_hook(batch_size=2, q_length=9, kv_length=9, q_offset=torch.tensor(0))
        for name in TRACED:
            mask_hook(batch_size=2, q_length=12, kv_length=12, mask_function=structures(12)[name])


def test_vectors_are_joined_with_a_window_of_two_sides():
    """The layers need not know the window."""
    mask = masks.document([4, 8])
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModel.from_config(config, attn_implementation="flashmask")
    current.call = Call(model, (), dict(input_ids=tokens(1, 12), startend_row_indices=mask.indices))
    try:
        window = hf_masks.sliding_window_bidirectional_mask_function(2)
        rows = mask_hook(batch_size=1, q_length=12, kv_length=12, mask_function=window, config=model.config)
    finally:
        current.call = None
    row = torch.arange(12)
    near = (row[:, None] - row).abs() <= 2
    assert torch.equal(mask_of_rows(rows, 12).mask.to_dense(12), mask.to_dense() & near)
