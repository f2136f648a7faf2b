"""What users may get wrong with a model: every call gives its own clear error or the right result, none another one."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tools.model_pairs import assert_near
from tools.tiny import llama_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FalconConfig,
    GPT2Config,
    Llama4TextConfig,
    MistralConfig,
    T5Config,
)
from transformers.masking_utils import create_causal_mask

import flashmask_hf
from flashmask_hf import FlashMask, MaskNotRepresentable, masks
from flashmask_hf._call.arguments import Arguments
from flashmask_hf._call.implementations import Request, choose

LENGTH = 8
VECTORS = masks.causal_document([3, 5]).indices
FOUR = masks.causal_document([3, 5]).bidirectional().indices
IDS = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
ROW = IDS[:1]
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
RIGHT = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
LEFT = RIGHT.flip(-1)


def model_of(config, attention="flashmask", make=AutoModelForCausalLM):
    torch.manual_seed(0)
    model = make.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator) if parameter.dim() > 1 else None
    return model


def llama(attention="flashmask", **changes):
    return model_of(llama_config(**changes), attention)


def mistral(attention="flashmask"):
    sizes = llama_config().to_dict()
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return model_of(MistralConfig(**{k: sizes[k] for k in fields}, num_key_value_heads=2, sliding_window=3), attention)


def bert(**given):
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    return model_of(config, make=AutoModelForMaskedLM)(IDS, **given)


def with_vectors(vectors, model=llama, **given):
    return model()(IDS, startend_row_indices=vectors, use_cache=False, **given)


def with_dense(dtype):
    visible = masks.causal_document([3, 5]).to_dense()
    dense = visible if dtype == torch.bool else torch.where(visible, 0.0, -1e9).to(dtype)
    return llama()(IDS, attention_mask=dense.expand(2, -1, -1, -1))


def checkered(batch, head, query, key):
    return (query + key) % 2 == 0


def with_mask_function():
    model = llama()
    embeds = model.get_input_embeddings()(IDS)
    return create_causal_mask(
        config=model.config,
        inputs_embeds=embeds,
        attention_mask=None,
        past_key_values=None,
        and_mask_function=checkered,
    )


def after_a_cache():
    model = llama()
    cache = model(IDS[:, :4]).past_key_values
    return model(IDS, past_key_values=cache, startend_row_indices=VECTORS)


def with_virtual_tokens(kind):
    model = get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return model(ROW, position_ids=POSITIONS, startend_row_indices=VECTORS, use_cache=False)


def with_activated_lora(**given):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[9, 7])
    return get_peft_model(llama(), config)(ROW, use_cache=False, **given)


def gpt2(**given):
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=16, attn_pdrop=0)
    return model_of(config)(ROW, use_cache=False, **given)


def llama4(**changes):
    sizes = llama_config().to_dict()
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {k: sizes[k] for k in fields} | dict(num_hidden_layers=4, num_local_experts=2, head_dim=8)
    return model_of(Llama4TextConfig(**sizes, intermediate_size_mlp=32, pad_token_id=0, **changes))


def encoder_decoder(**given):
    encoder = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    decoder = copy.deepcopy(encoder)
    decoder.is_decoder = decoder.add_cross_attention = True
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config._attn_implementation = "flashmask"
    return EncoderDecoderModel(config).eval()(input_ids=IDS, decoder_input_ids=IDS, **given)


def other_architecture(config, make=AutoModelForCausalLM):
    given = {"decoder_input_ids": IDS} if make is AutoModelForSeq2SeqLM else {}
    return make.from_config(config, attn_implementation="flashmask").eval()(IDS, **given)


def attend(dim=8, dtype=torch.float32, mask=None, **given):
    q = torch.randn(1, 2, LENGTH, dim, dtype=dtype)
    return flashmask_hf.flashmask_attention(q, q, q, masks.causal(LENGTH) if mask is None else mask, **given)


def chosen(dim):
    choice = choose(Request(torch.device("cuda"), torch.bfloat16, dim, dim, Arguments(impl="triton")))
    if choice.impl is None:
        raise ValueError(choice.reason)


WRONG = {
    # masks that are not 2D
    "dense additive mask": (
        lambda: with_dense(torch.float32),
        ValueError,
        r"torch.float32 .*FlashMask.from_dense\(mask\)",
    ),
    "dense bool mask": (lambda: with_dense(torch.bool), ValueError, r"torch.bool .*FlashMask.from_dense\(mask\)"),
    "dense 3D mask": (
        lambda: llama()(IDS, attention_mask=torch.ones(2, LENGTH, LENGTH)),
        ValueError,
        r"attention_mask must be 2D .*FlashMask.from_dense",
    ),
    "dense mask of three intervals": (
        lambda: FlashMask.from_dense((torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0),
        MaskNotRepresentable,
        "column",
    ),
    "mask function of three intervals": (
        with_mask_function,
        MaskNotRepresentable,
        "cannot hold the mask of and_masks: .*'sdpa'",
    ),
    "vectors as attention_mask": (
        lambda: llama()(IDS, attention_mask=VECTORS),
        ValueError,
        "attention_mask .*pass it as startend_row_indices",
    ),
    "four-column vectors as attention_mask": (
        lambda: llama()(IDS, attention_mask=FOUR),
        ValueError,
        "attention_mask .*pass it as startend_row_indices",
    ),
    # vectors
    "FlashMask instead of vectors": (lambda: with_vectors(FlashMask(VECTORS, True)), TypeError, "pass mask.indices"),
    "list": (lambda: with_vectors(VECTORS.tolist()), TypeError, r"int32 tensor \[B, 1, S, n\], got list"),
    "int64": (lambda: with_vectors(VECTORS.long()), TypeError, "got torch.int64; pass mask.indices"),
    "float": (lambda: with_vectors(VECTORS.float()), TypeError, "got torch.float32; pass mask.indices"),
    "another device": (lambda: with_vectors(VECTORS.to("meta")), ValueError, "is on meta, .* cpu; move it with"),
    "too large": (lambda: with_vectors(VECTORS + 9), ValueError, "must lie in 0..q_len = 0..8; .*names the columns"),
    "negative": (lambda: with_vectors(VECTORS - 9), ValueError, "must lie in 0..q_len = 0..8; .*names the columns"),
    "three axes": (lambda: with_vectors(VECTORS[0]), ValueError, r"shape \[B, 1, S, n\] with n = 1, 2 or 4, got"),
    "three columns": (lambda: with_vectors(VECTORS.expand(1, 1, 8, 3)), ValueError, "with n = 1, 2 or 4, got"),
    "short": (lambda: with_vectors(VECTORS[:, :, :7]), ValueError, "7 tokens, .* 8 queries .*one column per token"),
    "another batch": (lambda: with_vectors(VECTORS.expand(3, 1, 8, 1)), ValueError, "has batch 3; it must be 1 or"),
    "another number of heads": (lambda: with_vectors(VECTORS.expand(1, 3, 8, 1)), ValueError, "has 3 heads; it must"),
    "two columns, not causal": (
        lambda: with_vectors(masks.document([3, 5]).indices),
        RuntimeError,
        r"mask.bidirectional\(\).indices \(n = 4\)",
    ),
    "one column for an encoder": (lambda: bert(startend_row_indices=VECTORS), ValueError, "pass n = 2 or 4 columns"),
    "beside a cache": (after_a_cache, ValueError, "describe a whole row .*use_cache=False"),
    "in generate": (
        lambda: llama().generate(IDS, startend_row_indices=VECTORS, max_new_tokens=2),
        ValueError,
        "startend_row_indices",
    ),
    "with prompt tuning": (
        lambda: with_virtual_tokens(PromptTuningConfig),
        ValueError,
        r"prompt learning \(virtual tokens\)",
    ),
    "with prefix tuning": (
        lambda: with_virtual_tokens(PrefixTuningConfig),
        ValueError,
        r"prompt learning \(virtual tokens\)",
    ),
    "with activated LoRA": (
        lambda: with_activated_lora(position_ids=POSITIONS, startend_row_indices=VECTORS),
        RuntimeError,
        "alora_invocation_tokens once per row.*batches of whole sequences",
    ),
    "with activated LoRA, without positions": (
        lambda: with_activated_lora(startend_row_indices=VECTORS),
        RuntimeError,
        "alora_invocation_tokens once per row",
    ),
    # documents that nothing reads
    "positions of documents with activated LoRA": (
        lambda: with_activated_lora(position_ids=POSITIONS),
        RuntimeError,
        "alora_invocation_tokens once per row",
    ),
    "cu_seq_lens with activated LoRA": (
        lambda: with_activated_lora(cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32)),
        RuntimeError,
        "alora_invocation_tokens once per row",
    ),
    "2D mask that numbers documents": (
        lambda: llama()(IDS, attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8])),
        RuntimeError,
        "attention_mask .* numbers documents.*position_ids that start again at 0",
    ),
    "cu_seq_lens without positions where they are embedded": (
        lambda: gpt2(cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32)),
        RuntimeError,
        "would number documents from end to end; pass position_ids",
    ),
    "documents of Llama 4 in a row of floor_scale tokens": (
        lambda: llama4(floor_scale=LENGTH)(ROW, position_ids=POSITIONS, use_cache=False),
        RuntimeError,
        "scales queries by their place in the row.*under floor_scale tokens",
    ),
    "for an encoder and a decoder": (
        lambda: encoder_decoder(decoder_startend_row_indices=FOUR),
        NotImplementedError,
        "encoder, the decoder .*attention_mask",
    ),
    "window and positions of several axes": (
        lambda: with_vectors(VECTORS, mistral, position_ids=POSITIONS.expand(3, 2, -1)),
        Exception,
        "position_ids|rotary|size",
    ),
    # what changes the result and is not implemented
    "attention weights": (
        lambda: llama()(IDS, output_attentions=True),
        NotImplementedError,
        "output_attentions.*'eager'",
    ),
    "attention weights by config": (
        lambda: setattr(llama().config, "output_attentions", True),
        ValueError,
        "'eager'",
    ),
    "position_bias": (lambda: llama()(IDS, position_bias=torch.zeros(1)), NotImplementedError, "position_bias=None"),
    "head_mask": (lambda: llama()(IDS, head_mask=torch.ones(2, 4)), NotImplementedError, "pass head_mask=None"),
    "alibi": (lambda: llama()(IDS, alibi=torch.zeros(1)), NotImplementedError, "pass alibi=None"),
    "block table": (lambda: llama()(IDS, block_table=torch.zeros(1)), NotImplementedError, "pass block_table=None"),
    "paged cache": (
        lambda: llama()(IDS, read_index=[torch.zeros(1)]),
        NotImplementedError,
        "use attn_implementation='sdpa'",
    ),
    "several documents in cu_seq_lens of a batch": (
        lambda: llama()(IDS, cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32)),
        NotImplementedError,
        "one row",
    ),
    # models
    "attention of its own": (
        lambda: other_architecture(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)),
        NotImplementedError,
        "BloomForCausalLM has attention code of its own .*'eager'",
    ),
    "relative positions in the scores": (
        lambda: other_architecture(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4), AutoModelForSeq2SeqLM
        ),
        NotImplementedError,
        "position_bias changes the result .*'eager'",
    ),
    "classes by name": (
        lambda: other_architecture(
            FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        ),
        NotImplementedError,
        "Falcon.* has attention classes of its own .*'eager'",
    ),
    "misspelt": (lambda: llama("flash_mask"), ValueError, 'attn_implementation="flash_mask"'),
    # the function
    "head_dim 512": (lambda: chosen(512), ValueError, "head_dim 512 .*256.*; impl='torch' can"),
    "implementation that does not exist": (lambda: attend(impl="cuda"), ValueError, "hopper, triton, torch, reference"),
    "implementation that cannot serve": (lambda: attend(impl="triton"), ValueError, "impl='triton' cannot serve"),
    "dense mask for a FlashMask": (
        lambda: attend(mask=torch.ones(8, 8, dtype=torch.bool)),
        TypeError,
        "FlashMask.from_dense",
    ),
    "mask of another length": (lambda: attend(mask=masks.causal(9)), ValueError, "9 key columns"),
    "scale 0": (lambda: attend(scale=0), ValueError, "scale must be positive"),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT drops them
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_says_what_to_do(name):
    call, error, message = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text


def test_the_list_is_long():
    assert len(WRONG) >= 25


SAME = {
    "2D mask of int64": dict(attention_mask=RIGHT),
    "2D mask of bool": dict(attention_mask=RIGHT.bool()),
    "2D mask of float": dict(attention_mask=RIGHT.float()),
    "2D mask of int32": dict(attention_mask=RIGHT.int()),
    "left padding": dict(attention_mask=LEFT),
    "hole": dict(attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1], [1] * 8])),
    "a row of padding only": dict(attention_mask=torch.tensor([[0] * 8, [1] * 8])),
    "short 2D mask": dict(attention_mask=torch.ones(2, 7, dtype=torch.int64)),
    "long 2D mask": dict(attention_mask=torch.ones(2, 9, dtype=torch.int64)),
    "all ones": dict(attention_mask=torch.ones(2, 8, dtype=torch.int64)),
}


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("name", SAME)
def test_unusual_call_is_as_eager(name, model):
    given = SAME[name]
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    if given["attention_mask"].shape[1] == LENGTH:
        real = given["attention_mask"].bool()
    got, want = (model(attention)(IDS, **given).logits for attention in ("flashmask", "eager"))
    assert_near(got[real], want[real])
    assert got.isfinite().all()


RUNS = {
    "activated LoRA on whole sequences": lambda: with_activated_lora(position_ids=torch.arange(LENGTH)[None]),
    "activated LoRA without positions": with_activated_lora,
    "activated LoRA on one document and padding": lambda: with_activated_lora(
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 0, 0]]),
        startend_row_indices=masks.padding([5], kv_len=LENGTH).indices,
    ),
    "activated LoRA on one document and padding, without positions": lambda: with_activated_lora(
        startend_row_indices=masks.padding([5], kv_len=LENGTH).indices
    ),
    "activated LoRA on one document in a window": lambda: with_activated_lora(
        position_ids=torch.arange(LENGTH)[None], startend_row_indices=masks.sliding_window(LENGTH, 3).indices
    ),
    "cu_seq_lens of one document": lambda: gpt2(cu_seq_lens_q=torch.tensor([0, 8, 8], dtype=torch.int32)),
    "documents of Llama 4 in a shorter row": lambda: llama4()(ROW, position_ids=POSITIONS, use_cache=False),
    "a document of Llama 4 in a long row": lambda: llama4(floor_scale=LENGTH)(ROW, use_cache=False),
    "labels of every path in evaluation": lambda: llama()(
        ROW, position_ids=POSITIONS, startend_row_indices=VECTORS, shift_labels=ROW[None], use_cache=False
    ),
}
"""Calls that are right, beside those of `WRONG`."""


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("name", RUNS)
def test_right_call_runs(name):
    assert RUNS[name]().logits.isfinite().all()


ISOLATED = {
    "positions": dict(position_ids=POSITIONS),
    "positions and a cache": dict(position_ids=POSITIONS, use_cache=True),
    "positions and a mask of ones": dict(position_ids=POSITIONS, attention_mask=torch.ones(1, 8, dtype=torch.int64)),
    "positions and a mask that numbers documents": dict(
        position_ids=POSITIONS, attention_mask=torch.tensor([[1] * 3 + [2] * 5])
    ),
    "cu_seq_lens": dict(position_ids=POSITIONS, cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32)),
    "vectors": dict(position_ids=POSITIONS, startend_row_indices=VECTORS, use_cache=False),
    "vectors and a mask of ones": dict(
        position_ids=POSITIONS, startend_row_indices=VECTORS, use_cache=False,
        attention_mask=torch.ones(1, 8, dtype=torch.int64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("name", ISOLATED)
def test_documents_never_mix(name, model):
    got = model()(ROW, **ISOLATED[name]).logits
    eager = model("eager")
    want = torch.cat([eager(part).logits for part in ROW.split([3, 5], 1)], 1)
    assert_near(got, want)
