"""Recurrent and convolutional layers keep the documents of packed rows apart, or the model raises."""

import functools

import pytest
import torch
import transformers
from tools import model_zoo
from tools.calls import check_call
from tools.model_pairs import NoSynchronization, assert_near, model_pair, positions, tokens
from tools.recurrent_kernels import hands_on_boundaries, with_stand_ins

from flashmask_hf import masks
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.hf import families, rules
from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks.recurrent import documents_of, is_guarded
from flashmask_hf.hf.rewrites import rewrite
from flashmask_hf.names import VECTORS

LENGTHS = [5, 1, 6]
JOINED = [
    "bailing_hybrid", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm3", "mamba", "mamba2", "minimax",
    "qwen3_5", "recurrent_gemma", "rwkv", "zamba2", "zaya",
]  # fmt: skip


@functools.cache
def cached(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    return model_zoo.build(family, "flashmask")


def packed(lengths=LENGTHS, **options):
    """Return documents, and the row that the collator makes of them."""
    documents = [torch.randint(3, 36, (n,)) for n in lengths]
    row = dict(DataCollatorForPackedLanguageModeling(**options)([{"input_ids": x.tolist()} for x in documents]))
    del row["labels"]
    return documents, row


def numbered(call, model=None):
    """Return the number of each token's document in a call of six tokens."""
    return documents_of(Call(model or cached("lfm2"), (), {"input_ids": torch.ones(1, 6)} | call)).numbers()


def rewritten(model, *args, **kwargs):
    """Return the arguments that a model gets."""
    return rewrite(Call(model, args, kwargs)).named


def descriptions(row):
    """Yield the ways in which a call tells the documents of a row."""
    ids, flags = row["input_ids"], row["position_ids"][0] == 0
    edges = torch.cat([flags.nonzero().flatten(), torch.tensor([len(flags)])]).to(torch.int32)
    yield "vectors", dict(input_ids=ids, startend_row_indices=row["startend_row_indices"])
    yield "cu_seq_lens_q", dict(input_ids=ids, cu_seq_lens_q=edges)
    yield "seq_idx", dict(input_ids=ids, seq_idx=flags.cumsum(0)[None].to(torch.int32) - 1)
    yield "positions", dict(input_ids=ids, position_ids=row["position_ids"])


@pytest.mark.parametrize("lengths", [LENGTHS, [5, 7]], ids=str)
@pytest.mark.parametrize("family", JOINED)
def test_a_row_of_several_documents_raises(family, lengths):
    model = cached(family)
    _, row = packed(lengths)
    for told, call in descriptions(row):
        if told == "positions" and "position_ids" not in model_zoo._parameters(model):
            continue
        with pytest.raises(ValueError, match=r"carry tokens from one document into the next; .*one document per row"):
            model(**call)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "mamba2", "minimax", "qwen3_5", "zaya"])
def test_a_row_of_one_document_runs_as_it_does_alone(family):
    """Padding after the document does not reach it."""
    model = cached(family)
    (document,), row = packed([7], pad_to_multiple_of=10)
    want = model(input_ids=document[None]).logits
    for told, call in descriptions(row):
        if told == "vectors":
            assert_near(model(**call).logits[:, :7], want)
    mask = torch.arange(10)[None] < 7
    for side in (mask, mask.flip(-1)):
        place = (side.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=row["input_ids"], attention_mask=side, position_ids=place)


def test_a_document_hidden_in_part_by_a_2d_mask_raises():
    model = cached("lfm2")
    hidden = torch.tensor([[1, 1, 1, 0, 1, 1]])  # the first token of the second document
    with pytest.raises(ValueError, match="one document per row"):
        model(input_ids=tokens(1, 6), attention_mask=hidden, position_ids=positions([3, 3]))
    with pytest.raises(ValueError, match="one document per row"):
        model.model(tokens(1, 6), None, positions([3, 3]))  # by position in the signature


def test_bounds_of_several_documents_count_before_positions():
    def numbers(*edges, lengths=(6,)):
        call = dict(cu_seq_lens_q=torch.tensor(edges, dtype=torch.int32), position_ids=positions(lengths))
        return numbered(call).tolist()

    assert numbers(0, 2, 5, 6) == [[1, 1, 2, 2, 2, 3]]
    assert numbers(0, 6, lengths=(3, 3)) == [[1, 1, 1, 2, 2, 2]]


def test_positions_and_masks_of_a_batch():
    four = positions([3, 3]).expand(4, 6)
    assert numbered(dict(position_ids=four, input_ids=torch.ones(4, 6))).tolist() == [[1, 1, 1, 2, 2, 2]] * 4
    call = dict(position_ids=four[:1], attention_mask=torch.tensor([[1] * 8, [0] * 4 + [1] * 4]))
    assert numbered(call).tolist() == [[1, 1, 1, 2, 2, 2], [0, 0, 1, 2, 2, 2]]
    for mask in (torch.ones(1, 3), torch.ones(1, 1, 6, 6)):
        assert numbered(call | {"attention_mask": mask}).tolist() == [[1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("mask", [masks.share_question([(3, [2, 2])]), masks.document([7]), masks.sliding_window(7, 2)])
def test_masks_that_are_not_of_causal_documents_raise(mask):
    with pytest.raises(ValueError, match="causal documents one after another"):
        cached("lfm2")(input_ids=tokens(1, 7), startend_row_indices=mask.indices)


def test_vectors_of_another_form_are_named():
    for vectors, got in ((masks.document([7]).indices, r"\[1, 1, 7, 2\]"), ([[7] * 7], "list")):
        with pytest.raises(
            ValueError, match=rf"causal documents one after another as .*got {got}; or pass one sequence"
        ):
            cached("lfm2")(input_ids=tokens(1, 7), startend_row_indices=vectors)


def test_generation_is_not_disturbed():
    model = cached("qwen3_5")
    model.generate(tokens(2, 6), max_new_tokens=2, do_sample=False)


def test_attention_that_is_set_later_is_guarded():
    model = model_zoo.build("lfm2", "sdpa")
    call = dict(input_ids=tokens(1, 6), position_ids=positions([3, 3]))
    model(**call)
    model.set_attn_implementation("flashmask")
    with pytest.raises(ValueError, match="one document per row"):
        model(**call)
    model.set_attn_implementation("sdpa")  # another's attention is none of the guard's business
    model(**call)
    model.set_attn_implementation("flashmask")
    assert not is_guarded(model_pair("llama")[0])


@pytest.mark.parametrize(("size", "guarded"), [(1, False), (2, True)])
def test_a_convolution_over_one_token_needs_no_guard(size, guarded):
    model, _ = model_pair("llama")
    model.model.convolution = torch.nn.Conv1d(4, 4, size)
    assert is_guarded(model) == guarded


@pytest.mark.parametrize(
    ("family", "attention"), [("lfm2", "flashmask"), ("qwen3_5_text", "flashmask"), ("lfm2", "flashmask_hash")]
)
def test_attention_that_is_set_by_hand_is_guarded(family, attention):
    model = model_zoo.build(family, "sdpa")
    model.config._attn_implementation = attention
    model.config.flashmask_hash = {"n_buckets": 2} if attention == "flashmask_hash" else None
    with pytest.raises(ValueError, match="one document per row"):
        model(input_ids=tokens(1, 6), position_ids=positions([3, 3]))
    model(input_ids=tokens(1, 6))


def test_another_attention_is_guarded_from_its_first_call_with_vectors_on():
    """It would keep the documents apart by their positions, the convolutions would not."""
    model = model_zoo.build("lfm2", "sdpa")
    call = dict(input_ids=tokens(1, 6), position_ids=positions([3, 3]), use_cache=False)
    model(**call)
    with pytest.raises(ValueError, match="one document per row"):
        model(**call, startend_row_indices=masks.causal_document([3, 3]).indices)


@pytest.mark.parametrize("attention", ["flashmask", pytest.param("sdpa", marks=pytest.mark.full)])
def test_a_first_call_that_is_compiled_is_guarded(attention, no_compiled_code):
    """Though the attention was set by hand: what is known of a model is found in its first call."""
    model = model_zoo.build("lfm2", "sdpa")
    model.config._attn_implementation = attention
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(tokens(1, 6), startend_row_indices=masks.causal_document([6]).indices, use_cache=False)
    packed_row = dict(position_ids=positions([3, 3]), startend_row_indices=masks.causal_document([3, 3]).indices)
    with pytest.raises(RuntimeError, match="one document per row"):
        compiled(tokens(1, 6), **packed_row, use_cache=False)


@pytest.mark.parametrize("attention", ["flashmask_hash", "flashmask_qk"])
def test_models_with_sparse_attention_are_guarded_when_made(attention):
    assert is_guarded(model_zoo.build("lfm2", attention))


@pytest.mark.parametrize(("family", "guarded"), [("nemo_speechlm", True), ("qwen3_5", True), ("qwen2_audio", False)])
def test_the_text_model_counts_and_not_an_audio_encoder(family, guarded):
    assert is_guarded(cached(family)) == guarded


def test_the_first_forward_alone_waits_for_the_device(monkeypatch):
    """Under NoSynchronization a CPU stands for a GPU, where `require` asserts on the device."""
    model = model_zoo.build("lfm2", "flashmask")
    call = dict(input_ids=tokens(1, 6), position_ids=positions([6]))
    model(**call)
    monkeypatch.setattr(rules, "device_assert", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with NoSynchronization():
        check_call(model.model, **call)


@hands_on_boundaries
@pytest.mark.parametrize("family", [name for name, family in families.FAMILIES.items() if family.kernels])
def test_kernels_that_keep_documents_apart_get_the_boundaries(family, monkeypatch):
    """With stand-ins for the packages' kernels, which need a GPU, packed equals alone: logits and every gradient."""
    eager = model_zoo.build(family, "eager")
    documents, row = packed(pad_to_multiple_of=16)
    modes = ("eval", "training")
    alone = model_zoo._Case([{"input_ids": x[None]} for x in documents], torch.ones(1, sum(LENGTHS)).bool(), [{}])
    want = {mode: model_zoo._result(eager, alone, mode) for mode in modes}
    model = with_stand_ins(lambda: model_zoo.build(family, "flashmask"), monkeypatch)
    model.load_state_dict(eager.state_dict())
    real = torch.arange(16)[None] < sum(LENGTHS)
    for told, call in {"vectors": row, "positions": {n: row[n] for n in ("input_ids", "position_ids")}}.items():
        for mode in modes:
            got = model_zoo._result(model, model_zoo._Case([call], real, [{}]), mode)
            assert model_zoo._error(got, want[mode]) <= model_zoo.BOUND, (told, mode)


@hands_on_boundaries
@pytest.mark.usefixtures("no_compiled_code")
@pytest.mark.parametrize(
    ("family", "fullgraph"), [("lfm2", True), pytest.param("qwen3_5_text", False, marks=pytest.mark.full)]
)
def test_boundaries_are_the_same_compiled(family, fullgraph, monkeypatch):
    """The number of documents is a shape, at which a graph breaks; only the delta rule needs it."""
    monkeypatch.setattr(families, "_can_import", lambda _: True)
    model = model_zoo.build(family, "flashmask").base_model

    def keywords(call):
        return rewritten(model, **call)

    compiled = torch.compile(keywords, backend="eager", fullgraph=fullgraph)
    for lengths in ([3, 3], [2, 4, 1], [6, 2]):
        call = dict(input_ids=tokens(1, sum(lengths)), position_ids=positions(lengths))
        got, want = compiled(call), keywords(call)
        assert got.keys() == want.keys() >= {"seq_idx", "startend_row_indices"}
        assert all(torch.equal(torch.as_tensor(got[name]), torch.as_tensor(want[name])) for name in want)
        assert ("cu_seq_lens_q" in got) == (family == "qwen3_5_text")
        assert got.get("use_cache") is (False if family == "qwen3_5_text" else None)
        place = (call["input_ids"], None, call["position_ids"])  # by position in the signature
        assert rewritten(model, *place).keys() == {*want, "attention_mask"}


@hands_on_boundaries
def test_boundaries_are_those_of_every_row_and_vectors_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(families, "_can_import", lambda _: True)
    model = model_zoo.build("lfm2", "flashmask").base_model
    found = rewritten(model, input_ids=tokens(2, 6), position_ids=positions([3, 3]))
    assert found["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    vectors = masks.causal_document([4], kv_len=6).indices  # padding stays hidden
    assert rewritten(model, input_ids=tokens(1, 6), startend_row_indices=vectors)[VECTORS] is vectors


@hands_on_boundaries
def test_what_kernels_cannot_serve_raises(monkeypatch):
    monkeypatch.setattr(families, "_can_import", lambda _: True)
    model = model_zoo.build("qwen3_5_text", "flashmask")
    call = dict(input_ids=tokens(2, 6), position_ids=positions([3, 3]))
    with pytest.raises(ValueError, match="pass one row per batch, or"):
        model(**call)
    model = model_zoo.build("lfm2", "flashmask")
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="pass no cache, or"):
        model(**call, past_key_values=cache)


def test_boundaries_are_handed_on_by_later_versions_of_transformers_only(monkeypatch):
    monkeypatch.setattr(families, "_can_import", lambda _: True)
    monkeypatch.setattr(families.transformers, "__version__", "5.23.0")
    assert families.missing_kernels(model_zoo.config_of("lfm2")) == ()
    monkeypatch.setattr(families.transformers, "__version__", "5.22.1")
    with pytest.raises(ValueError, match="one document per row"):
        model_zoo.build("lfm2", "flashmask")(**packed()[1])


def test_packages_that_fail_to_import_are_missing(monkeypatch, tmp_path):
    (tmp_path / "built_for_another_torch.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert families._can_import("json")
    assert not families._can_import("built_for_another_torch")
    assert not families._can_import("no_such_module")


def test_inputs_that_are_no_tokens_are_left_alone():
    """As those of an audio encoder, whose convolutions run over frames."""
    check_call(cached("lfm2").model, input_features=torch.ones(1, 6, 4), position_ids=positions([3, 3]))


@hands_on_boundaries
def test_missing_kernels_are_named():
    with pytest.raises(ValueError, match="run it on a GPU with causal-conv1d and flash-linear-attention installed, or"):
        cached("qwen3_5")(input_ids=tokens(1, 6), position_ids=positions([3, 3]))
