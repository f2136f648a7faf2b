"""The mask of one layer: what it is made of, and vectors, masks and layers that do not fit."""

import types

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tools.model_pairs import (
    SIZES,
    WINDOW,
    NoSynchronization,
    assert_near,
    attend,
    chunked_pair,
    layer_inputs,
    model_pair,
    positions,
    tokens,
)
from tools.support import covering
from torch._dynamo.exc import Unsupported
from torch.distributed.tensor.experimental import context_parallel
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.masking_utils import (
    bidirectional_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf.hf import layer_mask, merge
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.late import late_mask, refuse_shard_of_heads
from flashmask_hf.hf.mask_hook import mask_hook


@pytest.mark.parametrize(
    ("attention_mask", "got"),
    [
        (torch.ones(2, 1, 6, 6, dtype=torch.bool), "torch.bool"),
        (torch.zeros(2, 1, 6, 6), "torch.float32"),
        (torch.ones(2, 6, dtype=torch.int64), "torch.int64"),
        (torch.ones(2, 6, dtype=torch.int32), r"\[2, 6\]"),
        (torch.ones(2, 1, 6, 6, dtype=torch.int32), "a tensor of integers"),
        (torch.ones(2, 1, 4, 6, dtype=torch.int32), "a tensor of integers"),
        ("causal", "str"),
    ],
    ids=["bool", "float", "2D", "2D int32", "int32", "int32, four queries", "object"],
)
@pytest.mark.parametrize("with_vectors", [False, True])
def test_unknown_attention_mask_is_refused(attention_mask, got, with_vectors):
    vectors = dict(startend_row_indices=masks.causal_document([6]).indices) if with_vectors else {}
    way_out = r"FlashMask.from_dense\(mask\).bidirectional\(\).indices and pass it as startend_row_indices"
    kind = RuntimeError if got == "a tensor of integers" else ValueError  # six rows may be marked ones
    with pytest.raises(kind, match=rf"^attention_mask must be .*{got}.*{way_out}"):
        attend(attention_mask=attention_mask, **vectors)


def test_dense_attention_mask_of_a_model_is_refused():
    model, _ = model_pair("llama")
    with pytest.raises(ValueError, match=r"attention_mask.*FlashMask.from_dense"):
        model(tokens(1, 6), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (3, 1, 1, 6)], ids=["columns", "batch"])
def test_hook_result_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask has batch .*pass a 2D attention_mask"):
        attend(attention_mask=layer_mask.marked_columns(torch.zeros(shape, dtype=torch.int32)))


VECTORS = masks.causal_document([2, 4]).indices
"""Vectors that fit `layer_inputs`."""


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        (VECTORS.tolist(), TypeError, r"int32 tensor \[B, 1, S, n\], got list; pass mask.indices"),
        (VECTORS.long(), TypeError, r"got torch.int64; pass mask.indices"),
        (VECTORS[0], ValueError, r"shape \[B, 1, S, n\] with n = 1, 2 or 4, got \[1, 6, 1\]"),
        (VECTORS.expand(1, 1, 6, 3), ValueError, r"n = 1, 2 or 4, got \[1, 1, 6, 3\]"),
        (VECTORS[:, :, :5], ValueError, r"5 tokens, but this layer has 6 queries and 6 keys; pass one column per tok"),
        (VECTORS.expand(3, 1, 6, 1), ValueError, r"has batch 3; it must be 1 or q's batch 2"),
        (VECTORS.expand(2, 3, 6, 1), ValueError, r"has 3 heads; it must have 1, Hkv = 2 or Hq = 4"),
        (VECTORS.to("meta"), ValueError, r"is on meta, but the layer is on cpu; move it"),
    ],
    ids=["list", "dtype", "rank", "n", "columns", "batch", "heads", "device"],
)
def test_bad_vectors_are_refused(vectors, error, message):
    with pytest.raises(error, match=rf"^(startend_row_indices|mask) .*{message}"):
        attend(startend_row_indices=vectors)


@pytest.mark.parametrize("q_len", [1, 4])
def test_vectors_of_fewer_queries_than_keys_are_refused(q_len):
    with pytest.raises(ValueError, match=rf"6 tokens, but this layer has {q_len} queries and 6 keys"):
        attend(q_len=q_len, startend_row_indices=VECTORS)


def test_a_prefix_seen_both_ways_in_the_window_of_a_causal_layer():
    """The window of a causal layer has one side: it does not hide the prefix from rows before it."""
    prefix, query_key = masks.prefix_lm_causal(6, 4), layer_inputs()
    row = torch.arange(6)
    visible = prefix.to_dense() & (row[:, None] - row < 2)
    assert visible[0, 0, 0, 3]
    query, key = query_key
    want = flashmask_attention(query, key, key, FlashMask.from_dense(visible))
    vectors = prefix.bidirectional().indices
    got, _ = attend(startend_row_indices=vectors, sliding_window=2, position_ids=positions([6]))
    assert_near(got, want.transpose(1, 2))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_vectors_per_head_and_batch(batch, heads):
    want, _ = attend(startend_row_indices=VECTORS)
    got, _ = attend(startend_row_indices=VECTORS.expand(batch, heads, 6, 1).contiguous())
    assert_near(got, want)


def test_causal_vectors_on_a_noncausal_layer_are_refused():
    module = torch.nn.Module()
    module.is_causal = False
    for given in (dict(module=module), dict(is_causal=False)):
        with pytest.raises(ValueError, match=r"startend_row_indices with n = 1 .*is_causal=False.*pass n = 2 or 4"):
            attend(startend_row_indices=VECTORS, **given)
    attend(module, startend_row_indices=VECTORS, is_causal=True)  # the keyword wins over the layer


def test_two_columns_have_the_causality_of_the_layer():
    indices = torch.tensor([[2, 4]] * 6, dtype=torch.int32).view(1, 1, 6, 2)
    for causal in (True, False):
        got, _ = attend(startend_row_indices=indices, is_causal=causal)
        four = FlashMask(indices, causal=causal).bidirectional().indices
        assert_near(got, attend(startend_row_indices=four, is_causal=not causal)[0])


@pytest.mark.parametrize("mask", [masks.prefix_lm_causal(6, 3), masks.document([2, 4]), masks.full(6)], ids=repr)
def test_two_columns_of_a_noncausal_mask_on_a_causal_layer_are_refused(mask):
    assert mask.indices.shape[-1] == 2
    with pytest.raises(RuntimeError, match=r"n = 2 on a causal layer are LTS, LTE.*mask.bidirectional\(\).indices"):
        attend(startend_row_indices=mask.indices, is_causal=True)


def test_vectors_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"indices must lie in 0..q_len = 0..6"):
        attend(startend_row_indices=VECTORS + 100)


@pytest.mark.parametrize("bad", [-1, 7, 100])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_vectors_out_of_range_are_refused_in_a_window(n, bad):
    """The window would cut them off: every layer of some models has one."""
    indices = {
        1: VECTORS,
        2: torch.cat([VECTORS, VECTORS], -1),
        4: FlashMask(VECTORS, causal=True).bidirectional().indices,
    }
    indices = indices[n].clone()
    indices[0, 0, 2, -1] = bad
    place = positions([6])
    for padding in (None, mask_hook(batch_size=2, q_length=6, kv_length=6)):
        with pytest.raises(RuntimeError, match=r"startend_row_indices must lie in 0..S, the row's length.*validate"):
            attend(startend_row_indices=indices, sliding_window=2, position_ids=place, attention_mask=padding)


def test_vectors_of_a_longer_row_are_refused():
    model, _ = model_pair("mistral")
    vectors = masks.causal_document([2, 8]).indices[:, :, :6]
    with pytest.raises(RuntimeError, match=r"startend_row_indices must lie in 0..S, the row's length"):
        model(tokens(1, 6), position_ids=positions([2, 4]), startend_row_indices=vectors, use_cache=False)


def test_vectors_beside_a_cache_are_refused():
    model, _ = model_pair("llama")
    cache = model(tokens(1, 4)).past_key_values
    with pytest.raises(ValueError, match=r"startend_row_indices describe a whole row .*use_cache=False.*generate"):
        model(tokens(1, 6), past_key_values=cache, startend_row_indices=VECTORS)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT drops them
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig], ids=["prompt", "prefix"])
def test_prompt_learning_with_packed_rows_is_refused(kind):
    """Virtual tokens are not part of the row that the vectors describe."""
    model = get_peft_model(model_pair("llama")[0], kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    inputs = dict(input_ids=tokens(1, 6), position_ids=positions([2, 4]), startend_row_indices=VECTORS, use_cache=False)
    with pytest.raises(ValueError, match=r"startend_row_indices describe .*prompt learning \(virtual tokens\)"):
        model(**inputs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_attention_mask_beside_vectors_hides_padding(n, side):
    model, eager = model_pair("llama")
    mask = masks.causal_document([2, 4])
    indices = mask.indices if n == 1 else torch.cat([mask.indices, torch.full_like(mask.indices, 6)], -1)  # LTS, LTE
    indices = mask.bidirectional().indices if n == 4 else indices
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]] if side == "left" else [[1, 1, 1, 1, 1, 0]])
    visible = mask.to_dense() & padding.bool()[:, None, None]
    rows = padding[0].bool()
    ids = tokens(1, 6)
    got = model(ids, attention_mask=padding, startend_row_indices=indices, use_cache=False).logits
    dense = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    want = eager(ids, attention_mask=dense, use_cache=False).logits
    assert_near(got[:, rows], want[:, rows])


@pytest.mark.parametrize("part", ["is_encoder_decoder", "add_cross_attention"])
def test_vectors_of_an_encoder_decoder_are_refused(part):
    module = torch.nn.Module()
    module.config = types.SimpleNamespace(**{part: True})
    with pytest.raises(NotImplementedError, match=r"startend_row_indices would reach the encoder, the decoder"):
        attend(module, startend_row_indices=VECTORS)


def test_indices_that_reach_an_image_tower_are_refused():
    """They would fit a tower that has as many patches as the row has tokens."""
    tower = torch.nn.Module()
    tower.config, tower.is_causal = types.SimpleNamespace(), False
    with pytest.raises(NotImplementedError, match=r"startend_row_indices .* image tower.*'vision_config': 'sdpa'"):
        attend(tower, startend_row_indices=FlashMask(VECTORS, causal=True).bidirectional().indices)


@pytest.mark.parametrize("how", ["by hand", "compiled in place"])
def test_a_backbone_that_gives_positions_to_its_layers_alone_keeps_documents_apart(how):
    """GPT-OSS makes masks without them."""
    ours, eager = model_pair("gpt_oss")
    ids, places = tokens(1, 12), positions([5, 7])
    expected = torch.cat([eager.model(part, use_cache=False)[0] for part in ids.split([5, 7], 1)], 1)
    if how == "by hand":
        found = ours.model.forward(ids, position_ids=places, use_cache=False)[0]
    else:
        ours.model.compile(backend="eager")
        found = ours.model(ids, position_ids=places, use_cache=False)[0]
    assert_near(found, expected)


@pytest.mark.parametrize("heads", [[4, 4], [4, 2]])
def test_indices_per_head_fit_layers_of_other_numbers_of_heads(heads):
    """As in Laguna. Fewer heads than the config's are refused, as under tensor parallelism."""
    layer = types.SimpleNamespace(config=types.SimpleNamespace(num_attention_heads_per_layer=heads), layer_idx=1)
    refuse_shard_of_heads(layer, heads[1])
    with pytest.raises(NotImplementedError, match=rf"computes 1 of {heads[1]} query heads"):
        refuse_shard_of_heads(layer, 1)


def test_a_chunked_layer_refuses_supplied_vectors():
    ours, _ = chunked_pair()
    with pytest.raises(NotImplementedError, match=r"chunked attention need position_ids .* not hand to its layers"):
        ours(tokens(1, 9), startend_row_indices=masks.causal_document([4, 5]).indices, use_cache=False)


def test_layer_without_a_hook():
    """Encoders and standalone layers call with attention_mask=None."""
    for causal, window, visible in (
        (True, None, masks.causal(6, q_len=4)),
        (True, 2, masks.sliding_window(6, 2, q_len=4)),
        (False, None, masks.full(6, q_len=4)),
    ):
        given = dict(q_len=4, is_causal=causal, sliding_window=window)
        query, key = layer_inputs(q_len=4)
        want = flashmask_attention(query, key, key, visible)
        assert torch.equal(attend(**given)[0], want.transpose(1, 2))


@pytest.mark.parametrize("q_len", [6, 4, 1])
@pytest.mark.parametrize("window", [None, 2])
def test_layer_without_a_hook_keeps_documents_apart(window, q_len):
    """Engines of sequence parallelism gather position_ids, but drop masks and do not know of the vectors."""
    for places in (positions([2, 4]), torch.cat([positions([2, 4]), positions([5, 1])])):
        mask = masks.causal_document([[2, 4]] if len(places) == 1 else [[2, 4], [5, 1]]).to_dense()
        if window is not None:
            mask = mask & masks.sliding_window(6, window).to_dense()
        query, key = layer_inputs(q_len=q_len)
        want = flashmask_attention(query, key, key, FlashMask.from_dense(mask[:, :, 6 - q_len :], causal=True))
        got, _ = attend(q_len=q_len, position_ids=places, sliding_window=window)
        assert_near(got, want.transpose(1, 2))
    plain, _ = attend(q_len=q_len, sliding_window=window)
    other = (positions([6]), torch.zeros(1, 6, dtype=torch.int64), positions([2, 3]), torch.zeros(3, 1, 6))
    for places in other:  # one document, no meaning, not those of the keys, of several axes
        assert torch.equal(attend(q_len=q_len, position_ids=places, sliding_window=window)[0], plain)


def test_layer_without_a_hook_reads_positions_anew_in_inference_mode():
    """Tensors made there do not tell that they were changed."""
    with torch.inference_mode():
        places = positions([2, 4])
        attend(position_ids=places)
        places.copy_(positions([5, 1]))
        assert torch.equal(attend(position_ids=places)[0], attend(position_ids=positions([5, 1]))[0])


@pytest.mark.parametrize(
    ("given", "compiled"),
    covering(
        1,
        [pytest.param({}, id="plain"), pytest.param(dict(startend_row_indices=VECTORS), id="vectors")],
        [False, True],
    ),
)
def test_context_parallelism_of_torch_is_refused(one_rank, given, compiled, no_compiled_code):
    """It exchanges the keys of scaled_dot_product_attention, and would leave each rank within its part of the row."""
    model, _ = model_pair("llama", num_hidden_layers=1)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    ids = tokens(1, 6)
    want = run(ids, **given).logits
    message = r"context parallelism .*leave cp_size at 1"
    with (
        context_parallel(one_rank, buffers=[ids.clone()], buffer_seq_dims=[1]),
        pytest.raises((NotImplementedError, Unsupported), match=message),
    ):
        run(ids, **given)
    assert torch.equal(run(ids, **given).logits, want)


def test_attention_of_another_package_in_place_of_torch_is_no_context_parallelism(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    attend()


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_whose_masks_accelerate_drops_are_refused(compiled, no_compiled_code):
    model, _ = model_pair("llama", num_hidden_layers=1)
    model(tokens(1, 6))  # whose keywords are the same
    _attach_context_parallel_hooks(model)
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises((NotImplementedError, Unsupported), match="context parallelism of torch and accelerate"):
        model(tokens(1, 6))


def test_window_on_a_noncausal_layer_is_refused():
    with pytest.raises(NotImplementedError, match=r"sliding_window=2 .*not causal.*use attn_implementation='sdpa'"):
        attend(is_causal=False, sliding_window=2)


def test_window_with_positions_of_several_axes_is_refused():
    with pytest.raises(NotImplementedError, match=r"needs position_ids \[B, S\], got \[3, 1, 6\]; use"):
        attend(sliding_window=2, startend_row_indices=VECTORS, position_ids=torch.zeros(3, 1, 6))
    attend(startend_row_indices=VECTORS, position_ids=torch.zeros(3, 1, 6))  # needs none


def test_cu_seq_lens_that_cannot_be_honoured_are_refused():
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    for columns in (None, mask_hook(batch_size=2, q_length=6, kv_length=6)):
        with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q .*one row without a cache.*flatten the batch"):
            attend(cu_seq_lens_q=edges, attention_mask=columns)
    with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q .*one row without a cache.*flatten the batch"):
        model_pair("llama")[0](tokens(2, 6), cu_seq_lens_q=edges, use_cache=False)
    part = mask_hook(batch_size=1, q_length=4, q_offset=2, kv_length=6)
    whole = mask_hook(batch_size=1, q_length=6, kv_length=6, mask_function=bidirectional_mask_function)
    for columns, q_len, decoder in ((part, 4, False), (whole, 6, True), (None, 6, True)):
        query, module = torch.randn(1, 2, q_len, 8), torch.nn.Module()
        module.is_causal = False
        module.config = types.SimpleNamespace(add_cross_attention=decoder)
        with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q .*one row without a cache.*flatten the batch"):
            late_mask(module, query, torch.randn(1, 2, 6, 8), columns, dict(cu_seq_lens_q=edges))
    pieces = torch.tensor([2, 4, 0, 1], dtype=torch.int32).view(1, 1, 4, 1).expand(1, 1, 4, 6)
    with pytest.raises(RuntimeError, match="several intervals of queries"):
        attend(cu_seq_lens_q=edges, attention_mask=layer_mask.marked_columns(pieces), batch=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seq_lens_are_documents(dtype):
    query, edges = torch.randn(1, 2, 8, 8), torch.tensor([0, 3, 6], dtype=dtype)
    columns = mask_hook(batch_size=1, q_length=8, kv_length=8)
    mask = late_mask(torch.nn.Module(), query, query, columns, dict(cu_seq_lens_q=edges)).mask
    assert torch.equal(mask.indices, masks.causal_document([3, 3, 2]).indices)
    window = sliding_window_bidirectional_mask_function(2)
    for function, local in ((bidirectional_mask_function, None), (window, masks.sliding_window(8, 3, causal=False))):
        columns = mask_hook(batch_size=1, q_length=8, kv_length=8, mask_function=function)
        mask = late_mask(torch.nn.Module(), query, query, columns, dict(cu_seq_lens_q=edges, is_causal=False)).mask
        documents = masks.document([3, 3, 2]).to_dense(8)
        assert torch.equal(mask.to_dense(8), documents if local is None else documents & local.to_dense(8))


def test_a_hidden_token_at_position_0_starts_no_document():
    padding = torch.tensor([[1, 1, 0, 1, 1, 1]] * 2).bool()
    columns = mask_hook(batch_size=2, q_length=6, kv_length=6, attention_mask=padding)
    places = torch.tensor([[0, 1, 0, 2, 3, 4]])
    assert torch.equal(attend(attention_mask=columns, position_ids=places)[0], attend(attention_mask=columns)[0])


def test_cu_seq_lens_of_one_document_change_nothing():
    columns = mask_hook(batch_size=2, q_length=6, kv_length=6)
    edges = torch.tensor([0, 6], dtype=torch.int32)
    for given in ({}, dict(attention_mask=columns)):
        assert torch.equal(attend(cu_seq_lens_q=edges, **given)[0], attend(**given)[0])


def test_a_window_of_one_side_and_one_of_two_are_masks_of_their_own():
    vectors = masks.full(6).bidirectional().indices
    seen = [merge.supplied_mask(vectors, None, causal, 2, None).mask.to_dense() for causal in (True, False)]
    assert torch.equal(seen[1], masks.sliding_window(6, 2, causal=False).to_dense())
    assert (seen[0] & ~seen[1]).any()


def test_keys_that_later_rows_see_are_no_padding():
    columns = torch.tensor([[0, 0, 3], [4, 2, 4], [0, 0, 0], [0, 0, 0]], dtype=torch.int32)[None, None]
    assert layer_mask.hidden_keys(columns, 4).tolist() == [[[True, False, False]]]


def test_four_columns_are_laid_out_for_the_decoding_kernel_once():
    """It would copy them in every layer."""
    columns = mask_hook(batch_size=1, q_length=1, q_offset=torch.tensor(3), kv_length=6)
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 6, 8)
    mask = late_mask(torch.nn.Module(), query, key, columns, {}).mask
    assert mask.indices.shape == (1, 1, 6, 4)
    assert mask.indices.is_contiguous()


def test_masks_of_layers_do_not_wait_for_the_device():
    vectors, edges = masks.causal_document([3, 3]).indices, torch.tensor([0, 3, 6], dtype=torch.int32)
    query, module = torch.randn(1, 2, 6, 8), torch.nn.Module()
    with NoSynchronization():
        hooked = mask_hook(batch_size=1, q_length=6, kv_length=6)
        late_mask(module, query, query, hooked, dict(cu_seq_lens_q=edges))
        columns = layer_mask.columns_of(hooked)
        merge.supplied_mask(vectors, columns, True, None, None)
        merge.supplied_mask(vectors, columns, True, 2, None)
        late_mask(module, query, query, None, dict(sliding_window=3))


IMAGE = 40
SIZES_OF_IMAGES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(scope="module")
def documents_with_an_image():
    """Return a Gemma 3 of both kinds of layers, the arguments of a row of two documents, and the logits of each alone.

    The tokens of the image, which only the first document has, see each other.
    """
    torch.manual_seed(0)
    layers = dict(SIZES, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    config = Gemma3Config(
        text_config=layers, vision_config=dict(SIZES_OF_IMAGES, image_size=8, patch_size=4), image_token_index=IMAGE
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="flashmask").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    ids = torch.tensor([[5, 6, *[IMAGE] * 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
    row = dict(input_ids=ids, token_type_ids=(ids == IMAGE).long(), use_cache=False)
    alone = []
    for start, end in ((0, 9), (9, 16)):
        part = {name: x[:, start:end] if isinstance(x, torch.Tensor) else x for name, x in row.items()}
        model.set_attn_implementation("eager")
        alone.append(model(**part).logits.detach())
    model.set_attn_implementation("flashmask")
    return model, row | dict(position_ids=positions([9, 7])), torch.cat(alone, 1)


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones(1, 16, dtype=torch.int64)}], ids=["none", "ones"])
def test_a_document_after_one_with_an_image_is_as_alone(given, documents_with_an_image):
    """transformers looks images up at positions, at which the second document has none of its own."""
    model, row, alone = documents_with_an_image
    assert_near(model(**row, **given).logits, alone)


def test_vectors_of_documents_leave_an_image_whole(documents_with_an_image):
    model, row, alone = documents_with_an_image
    mask = masks.causal_document([9, 7])
    assert_near(model(**row, startend_row_indices=mask.indices).logits, alone)
    visible = mask.to_dense(16)
    visible[..., 2:6, 2:6] = True
    assert_near(model(**row, startend_row_indices=FlashMask.from_dense(visible).bidirectional().indices).logits, alone)
    text = row | dict(token_type_ids=torch.zeros_like(row["input_ids"]))
    assert_near(model(**text, startend_row_indices=mask.indices).logits, model(**text).logits)


def test_a_flashmask_of_other_queries_than_keys_is_the_mask_of_a_layer():
    """As in a drafter's layer, whose keys are a target's tokens and its own."""
    mask = masks.draft_blocks([4, 3], [1, 3, 6], 2)
    query, key = layer_inputs(6, 13)
    got, _ = attend(q_len=6, kv_len=13, attention_mask=mask, is_causal=False, position_ids=torch.arange(13)[None])
    assert_near(got, flashmask_attention(query, key, key, mask).transpose(1, 2))
    for name, value in (("sliding_window", 8), ("startend_row_indices", VECTORS)):
        with pytest.raises(
            NotImplementedError, match=rf"^{name} on a layer whose attention_mask is a FlashMask .*None"
        ):
            attend(q_len=6, kv_len=13, attention_mask=mask, is_causal=False, **{name: value})


@pytest.mark.parametrize(
    ("window", "compiled"),
    [(1, False), (8, False), (128, False), (None, False), pytest.param(8, True, marks=pytest.mark.full)],
)
def test_columns_of_a_caller_are_refused_as_they_lack_the_window_of_the_layer(window, compiled, no_compiled_code):
    """Drafters' masks show few rows per key, but far ones. Columns of the hook have the window of their layers."""
    run = torch.compile(attention_forward, backend="aot_eager", fullgraph=True) if compiled else attention_forward
    for mask in (masks.draft_blocks([40], [30, 36], 4), masks.draft_chains([40], [20, 30], [3, 3])):
        query, key = layer_inputs(mask.q_len, mask.kv_len)
        columns = mask.bidirectional().indices.transpose(2, 3)
        with pytest.raises(RuntimeError, match=r"attention_mask must be None, a FlashMask .* a tensor of integers"):
            run(torch.nn.Module(), query, key, key, columns, is_causal=False, sliding_window=window)


@pytest.mark.parametrize("form", ["columns", "rows"])
def test_a_row_cut_from_the_mask_of_a_call_is_refused(form):
    """As by a model that takes the last query's row of a dense mask."""
    mask = masks.blocks([6], [(1, 5)]).bidirectional()
    marked = layer_mask.marked_columns(mask.indices.transpose(2, 3))
    if form == "rows":
        marked = layer_mask.marked_rows(layer_mask.LayerMask(mask))
    for row in range(marked.shape[2]):
        with pytest.raises(RuntimeError, match=r"attention_mask must be None, a FlashMask .* a tensor of integers"):
            attend(attention_mask=marked[:, :, row : row + 1])


@pytest.mark.parametrize("window", [1, 8, 128])
@pytest.mark.parametrize("q_len", [30, 12])
def test_columns_of_the_hook_have_the_window_of_their_layer(window, q_len):
    query, key = layer_inputs(q_len, 30)
    one_side, both = sliding_window_causal_mask_function(window), sliding_window_bidirectional_mask_function(window - 1)
    for function, offset in ((one_side, 30 - q_len), (one_side, torch.tensor(30 - q_len)), (both, 30 - q_len)):
        given = dict(is_causal=function is one_side, sliding_window=window)
        hooked = mask_hook(batch_size=2, q_length=q_len, kv_length=30, q_offset=offset, mask_function=function)
        mask = masks.sliding_window(30, window, causal=function is one_side, q_len=q_len)
        got, _ = attend(q_len=q_len, kv_len=30, attention_mask=hooked, **given)
        assert_near(got, flashmask_attention(query, key, key, mask).transpose(1, 2))


def test_blocks_of_a_windowed_layer_called_alone_may_pass_its_window():
    """As an image's tokens in Gemma 3, whose compiled layers know no model call."""
    hooked = layer_mask.marked_columns(masks.blocks([6], [(1, 5)]).bidirectional().indices.transpose(2, 3))
    want, _ = attend(attention_mask=hooked)
    assert_near(attend(attention_mask=hooked, sliding_window=1)[0], want)
