"""Models that count positions from `padding_idx + 1` give packed documents what each has alone."""

import pytest
import torch
from tools import model_zoo
from tools.model_pairs import BOUND, NoSynchronization, assert_near, positions
from transformers import Aimv2TextConfig, Aimv2TextModel, AutoModelForCausalLM, AutoModelForMaskedLM, BartConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flashmask_hf import masks
from flashmask_hf.collators import (
    DataCollatorForPackedEncoders,
    DataCollatorForPackedLanguageModeling,
    DataCollatorForSharedQuestion,
)
from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import run_checks
from flashmask_hf.hf.packed.rows import run_packed
from flashmask_hf.hf.rewrites import rewrite

FAMILIES = {
    "camembert": {},
    "data2vec-text": {},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 32},
    "roberta": {},
    "roberta-prelayernorm": {},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xmod": {"default_language": "en_XX"},
}


def build(family, attention, padding=1, **changes):
    config = CONFIG_MAPPING[family](
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=padding, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **FAMILIES[family], **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if changes.get("is_decoder") else AutoModelForMaskedLM
    model = auto.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


def counted(model, **call):
    """Return the checked arguments that a model gets."""
    call = rewrite(Call(model, (), call))
    run_checks(call)
    return call.named


def documents():
    return [torch.randint(6, 48, (n,)) for n in (5, 1, 6)]


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_each_alone(family, padding):
    model, apart = build(family, "flashmask", padding), documents()
    batch = DataCollatorForPackedEncoders(pad_to_multiple_of=16)([{"input_ids": x.tolist()} for x in apart])
    want = torch.cat([model(input_ids=x[None]).logits for x in apart], 1)
    assert_near(model(**batch).logits[:, :12], want)
    numbered = batch | {"position_ids": batch["position_ids"] + padding + 1}
    assert_near(model(**numbered).logits[:, :12], want)
    padded = batch | {"position_ids": numbered["position_ids"].masked_fill(torch.arange(16) >= 12, 0)}
    assert_near(model(**padded).logits[:, :12], want)


def test_a_decoder_learns_what_each_document_alone_teaches():
    model, apart = build("roberta", "flashmask", is_decoder=True), documents()
    batch = DataCollatorForPackedLanguageModeling()([{"input_ids": x.tolist(), "labels": x.tolist()} for x in apart])
    parts = [model(input_ids=x[None], labels=x[None]).loss * (len(x) - 1) for x in apart if len(x) > 1]
    torch.testing.assert_close(model(**batch).loss, sum(parts) / 9, rtol=BOUND, atol=BOUND)


def test_answers_equal_each_with_a_question_of_its_own():
    model = build("roberta", "flashmask", is_decoder=True)
    want, answers = build("roberta", "eager", is_decoder=True), ([8, 9], [10])
    run_packed(model)
    batch = DataCollatorForSharedQuestion()([{"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10]}])
    del batch["completion_mask"]
    got = model.base_model(**batch, use_cache=False).last_hidden_state
    for row, answer in zip(got, answers, strict=True):
        alone = want.base_model(torch.tensor([[5, 6, 7, *answer]]), use_cache=False).last_hidden_state[0]
        assert_near(row[: 3 + len(answer)], alone)


def test_attention_that_is_set_later_renumbers():
    model, apart = build("roberta", "sdpa"), documents()
    model.set_attn_implementation("flashmask")
    batch = DataCollatorForPackedEncoders()([{"input_ids": x.tolist()} for x in apart])
    assert_near(model(**batch).logits, torch.cat([model(input_ids=x[None]).logits for x in apart], 1))
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("flashmask")
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.arange(6, 12)[None], position_ids=positions([3, 3]))  # it is left alone


def test_the_table_with_padding_counts_beside_other_parts_of_positions():
    """As in LayoutLMv3, whose coordinates count from 0 and whose layers have a bias of positions."""
    model = build("roberta", "sdpa").base_model
    model.embeddings.x_position_embeddings = torch.nn.Embedding(8, 32)
    model.embeddings.relative_position_bias = torch.nn.Linear(8, 4)
    model.set_attn_implementation("flashmask")
    with pytest.raises(RuntimeError, match="RobertaModel counts from 2"):
        model(input_ids=torch.arange(6, 12)[None], position_ids=positions([3, 3]))


def test_positions_of_padding_are_refused():
    model, ids = build("roberta", "flashmask"), torch.arange(6, 12)[None]
    vectors = masks.document([3, 3]).indices
    with pytest.raises(RuntimeError, match="position_ids of RobertaModel must count from 2 in every document"):
        model(input_ids=ids, position_ids=positions([3, 3]) + 1, startend_row_indices=vectors)
    with pytest.raises(RuntimeError, match=r"start again in one row, but RobertaModel counts from 2.*with them"):
        model(input_ids=ids, position_ids=positions([3, 3]))
    for legal in ([2, 3, 4, 5, 6, 7], [0, 0, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [2, 3, 4, 1, 1, 1], [2, 3, 4, 0, 0, 0]):
        model(input_ids=ids, position_ids=torch.tensor([legal]))
    build("esm", "flashmask")(input_ids=ids, position_ids=torch.arange(2, 8))
    with pytest.raises(TypeError, match="startend_row_indices must be an int32 tensor"):
        model(input_ids=ids, position_ids=positions([3, 3]), startend_row_indices=vectors.long())
    with pytest.raises(ValueError, match="must have shape"):
        model(input_ids=ids, startend_row_indices=vectors[..., [0, 0, 1]])
    with pytest.raises(ValueError, match="describe a whole row of 4 tokens"):
        model(input_ids=ids, position_ids=positions([3, 3]), startend_row_indices=masks.document([4]).indices)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_documents_that_positions_alone_tell_are_refused(is_decoder):
    """RoBERTa does not hand `position_ids` to its masks, nor to its attention."""
    model, ids, numbers = build("roberta", "flashmask", is_decoder=is_decoder), torch.arange(6, 12), positions([3, 3])
    call = dict(input_ids=ids[None], position_ids=numbers + 2)
    with pytest.raises(RuntimeError, match=r"start again in one row, but RobertaModel .*pass startend_row"):
        model(**call)
    with pytest.raises(RuntimeError, match="start again in one row"):
        model(**call, attention_mask=torch.ones(1, 6))
    model(**call, attention_mask=torch.tensor([[1, 1, 1, 0, 1, 1]]))  # of padding, a position means nothing
    model(input_ids=ids[None], position_ids=torch.tensor([[2, 2, 2, 3, 4, 5]]), attention_mask=ids[None] > 7)
    if is_decoder:
        edges = torch.tensor([0, 3, 6], dtype=torch.int32)
        got = model(**call, cu_seq_lens_q=edges).logits
        assert_near(got, torch.cat([model(input_ids=x[None]).logits for x in ids.split(3)], 1))
        cache = model(input_ids=ids[None, :3], use_cache=True).past_key_values
        rest = dict(input_ids=ids[None, 3:], position_ids=torch.tensor([[5, 6, 7]]))
        got = model(**rest, attention_mask=torch.ones(1, 6), past_key_values=cache).logits
        assert_near(got, model(input_ids=ids[None]).logits[:, 3:])


def test_counting_does_not_wait_for_the_device():
    model = build("roberta", "flashmask").base_model
    call = dict(position_ids=positions([3, 3]), startend_row_indices=masks.document([3, 3]).indices)
    with NoSynchronization():
        changed = counted(model, **call)
    assert changed["position_ids"].tolist() == [[2, 3, 4, 2, 3, 4]]
    four = call | dict(startend_row_indices=masks.causal_document([3, 3]).bidirectional().indices)
    decoder = build("roberta", "flashmask", is_decoder=True).base_model
    assert torch.equal(counted(decoder, **four)["position_ids"], changed["position_ids"])


def test_tokens_are_seen_if_any_head_of_their_own_row_sees_them():
    model = build("roberta", "flashmask").base_model
    short, whole = masks.document([3], kv_len=6).indices, masks.document([3, 3]).indices
    two_heads = torch.cat([short, whole], 1)
    changed = counted(model, position_ids=torch.tensor([[2, 3, 4, 0, 1, 2]]), startend_row_indices=two_heads)
    assert changed["position_ids"].tolist() == [[4, 5, 6, 2, 3, 4]]
    numbers = torch.tensor([[2, 3, 4, 0, 0, 0], [2, 3, 4, 2, 3, 4]])
    changed = counted(model, position_ids=numbers, startend_row_indices=torch.cat([short, whole]))
    assert torch.equal(changed["position_ids"], numbers)


@pytest.mark.parametrize("family", ["bert", "bert-generation", "ctrl", "gpt2", "hunyuan_v1_dense", "opt", "roberta"])
def test_documents_without_positions_are_refused(family):
    model = build("roberta", "flashmask") if family == "roberta" else model_zoo.build(family, "flashmask")
    mask = masks.document([3, 3]) if family in ("bert", "roberta") else masks.causal_document([3, 3])
    call = dict(input_ids=torch.arange(6, 12)[None], startend_row_indices=mask.indices)
    with pytest.raises(RuntimeError, match=r"embeds positions, and would number .*; pass position_ids"):
        model(**call)
    model(**call, position_ids=positions([3, 3]))
    one = masks.padding([4], kv_len=6) if mask.causal else masks.document([4], kv_len=6)
    one_call = dict(input_ids=call["input_ids"], startend_row_indices=one.indices)
    model(**one_call)
    model(**one_call, cu_seq_lens_q=torch.tensor([0, 3, 6]))  # vectors win
    if mask.causal:
        for edges in ([0, 3, 6], [0, 1, 6]):
            with pytest.raises(RuntimeError, match="would number documents from end to end"):
                model(input_ids=call["input_ids"], cu_seq_lens_q=torch.tensor(edges))
        model(input_ids=call["input_ids"], cu_seq_lens_q=torch.tensor([0, 6, 6]))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_models_that_count_from_0_take_positions_as_they_are(family):
    model, ids = model_zoo.build(family, "flashmask").eval(), torch.arange(6, 12)[None]
    want = torch.cat([model(input_ids=part, use_cache=False)[0] for part in ids.split(3, 1)], 1)
    assert_near(model(input_ids=ids, position_ids=positions([3, 3]), use_cache=False)[0], want)


def test_parts_of_rows_are_refused_where_positions_would_not_be_counted_on():
    """A process with a part of a row does not see which tokens of it are padding."""
    model = build("roberta", "flashmask", is_decoder=True)
    batch = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=16)([{"input_ids": [7, 8, 9]}])
    part = {key: batch[key][:, :8] for key in ("input_ids", "position_ids")}
    with pytest.raises(NotImplementedError, match=r"counts positions from 2, .*rows that are split over ranks"):
        model(**part, startend_row_indices=batch["startend_row_indices"])


def test_other_models_need_no_positions():
    """Rotary positions count on from one document to the next; layers of encoder-decoders refuse vectors themselves."""
    call = dict(input_ids=torch.arange(6, 12)[None], startend_row_indices=masks.causal_document([3, 3]).indices)
    model_zoo.build("llama", "flashmask")(**call)
    for mask in (masks.causal_document([3, 3]), masks.document([3, 3])):
        with pytest.raises(NotImplementedError, match="models with an encoder and a decoder do not take them"):
            model_zoo.build("bart", "flashmask")(**call | {"startend_row_indices": mask.indices})


def test_a_decoder_that_takes_no_positions_takes_mask_indices_of_one_document():
    sizes = dict(vocab_size=48, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48)
    config = BartConfig(**sizes, max_position_embeddings=16, dropout=0.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()
    ids = torch.arange(6, 12)[None]
    got = model(ids, startend_row_indices=masks.causal(6).bidirectional().indices).logits
    assert_near(got, model(ids).logits)


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_that_takes_no_positions_refuses_documents(masked):
    """AIMv2's text tower numbers a row from end to end, and keeps keywords from its layers."""
    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = Aimv2TextConfig(**sizes, eos_token_id=2, max_position_embeddings=16)
    model = Aimv2TextModel._from_config(config, attn_implementation="flashmask").eval()
    mask = torch.ones(1, 6, dtype=torch.int64) if masked else None
    call = dict(input_ids=torch.arange(6, 12)[None], attention_mask=mask)
    model(**call)
    vectors = masks.causal_document([3, 3]).indices
    for packed in ({"position_ids": positions([3, 3])}, {"startend_row_indices": vectors}):
        with pytest.raises((RuntimeError, ValueError), match=r"takes none \(AIMv2\), one document per row"):
            model(**call, **packed)
    model.set_attn_implementation("sdpa")
    model(**call | {"attention_mask": None}, startend_row_indices=masks.causal(6).indices)
