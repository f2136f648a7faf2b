"""Packed rows told by positions alone raise in models that do not read them."""

import types

import pytest
import torch
import transformers
from packaging.version import Version
from tools import model_zoo
from tools.calls import run_check
from tools.families import TABLE, UNTESTED, each_family
from tools.model_pairs import assert_near, model_pair, positions, tokens
from tools.support import covering
from tools.tiny import llama_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GraniteMoeHybridConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MusicgenConfig,
)

from flashmask_hf import masks
from flashmask_hf.collators import DataCollatorForPackedEncoders
from flashmask_hf.hf.call import Call, current
from flashmask_hf.hf.checks import run_checks
from flashmask_hf.hf.checks.ignored import marks_documents
from flashmask_hf.hf.patches import run_call

PACKED = positions([4, 5])
IDS = tokens(1, 9).clamp(max=35)


def granite(kind="attention"):
    config = GraniteMoeHybridConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=[kind] * 2, num_local_experts=2, num_experts_per_tok=1,
        shared_intermediate_size=32, mamba_n_heads=4, mamba_d_head=16, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()


@pytest.mark.parametrize("build", [granite, lambda: model_zoo.build("hunyuan_vl_text", "flashmask")])
def test_positions_that_a_model_keeps_from_its_masks_are_read(build):
    model = build()
    want = torch.cat([model(input_ids=part)[0] for part in IDS.split([4, 5], 1)], 1)
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones(1, 9).long()}):
        assert_near(model(input_ids=IDS, position_ids=PACKED, **options)[0], want)
    assert_near(model(IDS, None, PACKED)[0], want)
    model(input_ids=IDS, position_ids=torch.arange(9)[None])
    left = (torch.arange(9) > 2).long()[None]
    model(input_ids=IDS, position_ids=(left.cumsum(-1) - 1).clamp(min=0), attention_mask=left)


@pytest.mark.parametrize("family", ["cpmant", "xlnet"])
def test_positions_that_nothing_reads_are_refused(family):
    model = model_zoo.build(family, "flashmask")
    call = Call(model, (), dict(input_ids=IDS, position_ids=PACKED))
    with pytest.raises(RuntimeError, match=r"reads no document boundaries .*'flashmask', .*; pass one document"):
        run_checks(call, after=True)
    assert current.call is None


def both_ways():
    config = llama_config()
    config.is_causal = False
    return AutoModel.from_config(config, attn_implementation="flashmask").eval()


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert", "llama"])
def test_positions_alone_keep_documents_apart_in_bidirectional_models(family):
    model = both_ways() if family == "llama" else model_zoo.build(family, "flashmask")
    want = torch.cat([model(input_ids=part)[0] for part in IDS.split([4, 5], 1)], 1)
    for mask in (None, torch.ones(1, 9).long()):
        assert_near(model(input_ids=IDS, position_ids=PACKED, attention_mask=mask)[0], want)
    row = dict(position_ids=PACKED, startend_row_indices=masks.document([4, 5]).indices)
    assert_near(model(input_ids=IDS, **row)[0], want)


def test_vectors_keep_these_documents_apart():
    model = granite()
    row = dict(position_ids=PACKED, startend_row_indices=masks.causal_document([4, 5]).indices, use_cache=False)
    want = torch.cat([model(input_ids=part).logits for part in IDS.split([4, 5], 1)], 1)
    assert_near(model(input_ids=IDS, **row).logits, want)


def test_bounds_keep_these_documents_apart():
    model, bounds = granite(), torch.tensor([0, 4, 9], dtype=torch.int32)
    want = torch.cat([model(input_ids=part).logits for part in IDS.split([4, 5], 1)], 1)
    assert_near(model(input_ids=IDS, position_ids=PACKED, cu_seq_lens_q=bounds).logits, want)
    assert_near(model(input_ids=IDS, position_ids=PACKED).logits, want)


PACKED_ROW = dict(
    input_ids=IDS, position_ids=PACKED, startend_row_indices=masks.causal_document([4, 5]).indices, use_cache=False
)


FALCON = ["falcon"] if Version(transformers.__version__) < Version("5.24") else []  # its masks get position_ids since


@pytest.mark.parametrize("family", ["gpt_oss", "opt", "qwen2_5_vl_text", "bloom", *FALCON])
def test_documents_are_refused_where_another_attention_does_not_find_them(family):
    model = model_zoo.build(family, "eager")
    message = r"reads no document boundaries with .*'eager', .*; load it with 'flashmask', or pass one document per row"
    with pytest.raises(RuntimeError, match=message):
        model(**PACKED_ROW)
    one = PACKED_ROW | {"position_ids": positions([9]), "startend_row_indices": masks.causal(9).indices}
    torch.testing.assert_close(model(**one)[0], model(IDS, use_cache=False)[0])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2", "deepseek_v4"])
def test_recurrent_layers_are_guarded_under_another_attention(family):
    model = model_zoo.build(family, "eager")
    for _ in range(2):
        with pytest.raises(ValueError, match="carry tokens from one document into the next"):
            model(**PACKED_ROW)
    model(IDS, position_ids=PACKED, use_cache=False)  # not a batch of this package


DECODERS = [name for name in [*TABLE, *UNTESTED] if model_zoo.kind(name) in ("decoder", "text tower")]


@pytest.mark.parametrize("family", each_family(DECODERS))
def test_no_family_mixes_documents_under_another_attention(family):
    """Packed documents raise, or give what each gives alone. Families whose tiny model does not run are skipped."""
    try:
        model = model_zoo.build(family, "eager")
        want = torch.cat([model(input_ids=part, use_cache=False)[0] for part in IDS.split([4, 5], 1)], 1)
    except Exception as error:
        pytest.skip(f"{family} does not run alone: {model_zoo.first_sentence(error)}")
    try:
        got = model(**PACKED_ROW)[0]
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return
    assert_near(got, want)


def test_documents_are_looked_for_anew_after_a_change_of_attention():
    model = model_zoo.build("gpt_oss", "flashmask")
    want = torch.cat([model(input_ids=part)[0] for part in IDS.split([4, 5], 1)], 1)
    assert_near(model(**PACKED_ROW)[0], want)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="reads no document boundaries"):
        model(**PACKED_ROW)
    llama, _ = model_pair("llama")
    for attention in ("sdpa", "eager"):
        llama.set_attn_implementation(attention)
        for _ in range(2):
            llama(**PACKED_ROW)


@pytest.mark.parametrize("family", ["cpmant", "xlnet"])
def test_vectors_are_refused_where_no_layer_calls_the_attention(family):
    model = model_zoo.build(family, "flashmask")
    row = {name: PACKED_ROW[name] for name in ("input_ids", "startend_row_indices")}
    with pytest.raises(RuntimeError, match=r"reads no document boundaries with .*; pass one document per row"):
        model(**row)
    model(**row | {"startend_row_indices": masks.causal(9).indices})


def test_vectors_of_an_encoder_that_does_not_call_the_attention_are_refused():
    model = model_zoo.build("xlm", "flashmask")
    collator = DataCollatorForPackedEncoders()
    with pytest.raises(RuntimeError, match=r"reads no document boundaries with .*; pass one document per row"):
        model(**collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]))
    model(**collator([{"input_ids": [5, 6, 7]}]))


def test_the_attention_of_the_text_model_counts_for_vectors():
    vision = CLIPVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=16)
    config = LlavaConfig(text_config=llama_config(), vision_config=vision)
    parts = {"text_config": "flashmask", "vision_config": "sdpa"}
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation=parts).eval()
    want = torch.cat([model(input_ids=part).logits for part in IDS.split([4, 5], 1)], 1)
    assert_near(model(**PACKED_ROW).logits, want)


def test_models_with_two_text_models_run_without_vectors():
    """Their config cannot tell which of the two is meant."""
    model = types.SimpleNamespace(config=MusicgenConfig(decoder={"pad_token_id": None, "bos_token_id": None}))
    assert run_call(lambda _: "output", model) == "output"


def compile_child(model):
    model.model = torch.compile(model.model, backend="eager")


@pytest.mark.parametrize(
    ("compile_part", "given"),
    covering(
        1,
        [
            pytest.param(lambda model: model.compile(backend="eager"), id="whole"),
            pytest.param(lambda model: model.base_model.compile(backend="eager"), id="backbone"),
            pytest.param(compile_child, id="replaced backbone"),
        ],
        [{"use_cache": False}, {"attention_mask": torch.ones(1, 12).long()}],
    ),
)
def test_documents_in_a_model_that_is_compiled_in_place(compile_part, given):
    """Compiled code does not record that positions were read; it reads them all the same."""
    torch.manual_seed(0)
    config = llama_config(num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    ids = torch.randint(3, 48, (1, 12))
    packed = positions([7, 5])
    want = model(input_ids=ids, position_ids=packed, **given).logits
    compile_part(model)
    got = model(input_ids=ids, position_ids=packed, **given).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("length", "runs"), [(8, True), (9, False)])
def test_only_the_layers_of_split_rows_know_whether_their_documents_are_read(length, runs):
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask").eval()
    indices = masks.causal_document([4, 5]).indices
    call = Call(
        model, (), dict(input_ids=IDS[:, :length], position_ids=PACKED[:, :length], startend_row_indices=indices)
    )
    if runs:
        run_checks(call, after=True)
    else:
        with pytest.raises(RuntimeError, match="reads no document boundaries"):
            run_checks(call, after=True)


def check_numbered_mask(mask, places):
    run_check("that numbers documents", model_pair("llama")[0], IDS, attention_mask=mask, position_ids=places)


def check_document_numbers(model, call):
    run_check("`seq_idx` that marks documents", model, IDS, **call)


def test_masks_that_number_documents():
    numbered = torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2, 0]])
    for places in (None, positions([9]), positions([4])):
        with pytest.raises(RuntimeError, match="numbers documents, which transformers reads as ones"):
            check_numbered_mask(numbered, places)
    check_numbered_mask(numbered, positions([5, 4]))
    for mask in (numbered > 0, (numbered > 0).long(), numbered.view(1, 9, 1, 1), {"full_attention": numbered}, None):
        check_numbered_mask(mask, None)
        check_numbered_mask(mask, positions([9]))


def test_numbers_of_documents_in_a_model_with_a_long_name():
    """A device takes messages of up to 254 characters, in calls that pass, too."""
    model = type("A" * 100, (torch.nn.Module,), {})()
    model.config = llama_config()
    model.config._attn_implementation = "flashmask"
    check_document_numbers(model, {"seq_idx": torch.zeros(1, 9)})
    with pytest.raises(RuntimeError, match=r"but the attention of A{100} does not read it"):
        check_document_numbers(model, {"seq_idx": torch.arange(9)[None]})


@pytest.mark.parametrize("name", ["startend_row_indices", "position_ids", "cu_seq_lens_q"])
def test_numbers_of_documents_beside_what_attention_reads(name):
    told = torch.tensor([0, 4, 9]) if name == "cu_seq_lens_q" else PACKED
    numbers = (PACKED == 0).cumsum(1) if name == "position_ids" else torch.arange(9)[None]
    check_document_numbers(granite(), {"seq_idx": numbers, name: told})


def test_numbers_of_documents_that_contradict_positions_are_refused():
    """Attention reads the positions, which count through the row, so that its documents would see each other."""
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask").eval()
    numbers, through = (PACKED == 0).cumsum(1), torch.arange(9)[None]
    model(IDS, seq_idx=numbers, position_ids=PACKED)
    with pytest.raises(RuntimeError, match=r"seq_idx numbers documents .*pass position_ids that start again"):
        model(IDS, seq_idx=numbers, position_ids=through)
    padded = torch.where(through < 6, 1, 2)  # another number for padding
    model(IDS, seq_idx=padded, position_ids=through, attention_mask=(through < 6).long())


@pytest.mark.parametrize("bounds", [torch.tensor([[0, 4, 9]]), [0, 4, 9]], ids=["batch", "list"])
def test_bounds_that_attention_would_not_read_are_refused(bounds):
    """As of a collator that stacks a column of bounds."""
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask").eval()
    for beside in ({}, {"position_ids": PACKED}):
        with pytest.raises(
            ValueError, match=r"cu_seq_lens_q must be a tensor \[documents \+ 1\].*or pass position_ids alone"
        ):
            model(IDS, cu_seq_lens_q=bounds, **beside)
    told = model(IDS, cu_seq_lens_q=torch.tensor([0, 4, 9])).logits
    torch.testing.assert_close(model(IDS, position_ids=PACKED).logits, told)


def test_numbers_of_documents_in_recurrent_models_are_left_to_the_guard():
    check_document_numbers(granite("mamba"), {"seq_idx": torch.arange(9)[None]})


VECTORS = PACKED_ROW["startend_row_indices"]


@pytest.mark.parametrize(
    ("call", "attention", "told"),
    [
        ({}, "flashmask", False),
        ({"position_ids": PACKED}, "flashmask", True),
        ({"position_ids": PACKED}, "sdpa", False),
        ({"position_ids": PACKED[None]}, "flashmask", False),
        ({"position_ids": PACKED.tolist()}, "flashmask", False),
        ({"position_ids": PACKED, "attention_mask": torch.ones(1, 9)}, "flashmask", True),
        ({"position_ids": PACKED, "attention_mask": torch.ones(1, 1, 9, 9)}, "flashmask", False),
        ({"position_ids": PACKED, "attention_mask": {"full_attention": None}}, "flashmask", False),
        ({"input_ids": IDS, "startend_row_indices": VECTORS}, "sdpa", True),
        ({"input_ids": IDS, "startend_row_indices": VECTORS}, "flash_attention_2", False),
        ({"input_ids": IDS, "startend_row_indices": VECTORS, "packed_input_ids": IDS}, "flashmask", False),
        ({"input_ids": IDS, "startend_row_indices": VECTORS.expand(1, 1, 9, 2)}, "flashmask", True),
        ({"input_ids": IDS, "startend_row_indices": VECTORS.expand(1, 1, 9, 2)}, "sdpa", False),
        ({"input_ids": IDS, "startend_row_indices": VECTORS[0]}, "sdpa", False),
        ({"input_ids": IDS, "startend_row_indices": VECTORS.tolist()}, "flashmask", True),
        ({"input_ids": IDS[:, :4], "startend_row_indices": VECTORS}, "flashmask", True),
        ({"startend_row_indices": VECTORS}, "flashmask", False),
    ],
)
def test_calls_that_tell_documents(call, attention, told):
    model = model_pair("llama")[0]
    model.config._attn_implementation = attention
    assert marks_documents(Call(model, (), call)) is told
