"""Packed rows raise in models of which a part beside the attention takes a row for one document."""

from types import SimpleNamespace

import pytest
import torch
from tools.calls import run_check
from tools.model_pairs import model_pair
from tools.tiny import TRAINER_WARNINGS, llama_config
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForNextSentencePrediction,
    BertForPreTraining,
    EsmConfig,
    MllamaTextConfig,
    MllamaTextModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

from flashmask_hf import masks
from flashmask_hf.collators import DataCollatorForPackedEncoders, DataCollatorForPackedLanguageModeling
from flashmask_hf.hf.packed.rows import run_packed

pytestmark = TRAINER_WARNINGS

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
LLAMA = llama_config(num_labels=1)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
BERT, ALBERT = BertConfig(**SIZES), AlbertConfig(**SIZES)


def packed(collator, examples=EXAMPLES):
    batch = collator(examples)
    batch.pop("labels", None)
    return batch


def padded(side):
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    real = real.flip(1) if side == "left" else real
    return {"input_ids": 5 + real, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize("attention", ["flashmask", "sdpa"])
@pytest.mark.parametrize(
    "head", [AutoModelForSequenceClassification, AutoModelForQuestionAnswering], ids=["class", "span"]
)
def test_heads_that_read_one_answer_from_a_row_refuse_several_documents(head, attention):
    """With labels of the documents, a head with one output would even train: they broadcast."""
    model = head.from_config(LLAMA, attn_implementation=attention)
    batch = packed(DataCollatorForPackedLanguageModeling(completion_only_loss=False))
    message = (
        r"LlamaFor\w+ reads one class, reward or span from a row.*DataCollatorWithPadding.*MultiAnswerRewardTrainer"
    )
    with pytest.raises(RuntimeError, match=message):
        model(**batch, use_cache=False)
    if attention == "flashmask":
        for told in ({"position_ids": batch["position_ids"]}, {"cu_seq_lens_q": torch.tensor([0, 3, 5])}):
            with pytest.raises(RuntimeError, match=message):
                model(batch["input_ids"], **told)
    else:  # another attention without vectors is not looked at
        model(**batch | {"startend_row_indices": None}, use_cache=False)


def test_models_that_take_packed_rows_refuse_several_documents_without_them():
    model = AutoModelForSequenceClassification.from_config(LLAMA, attn_implementation="flashmask")
    run_packed(model)
    with pytest.raises(RuntimeError, match="LlamaForSequenceClassification reads one class"):
        model(**packed(DataCollatorForPackedLanguageModeling(completion_only_loss=False)), use_cache=False)


def test_encoders_with_such_a_head_refuse_several_documents():
    model = AutoModelForSequenceClassification.from_config(BERT, attn_implementation="flashmask")
    with pytest.raises(RuntimeError, match="BertForSequenceClassification reads one class"):
        model(**packed(DataCollatorForPackedEncoders()))


@pytest.mark.parametrize(
    ("head", "label"),
    [
        (BertForNextSentencePrediction, "labels"),
        (BertForPreTraining, "next_sentence_label"),
        (AlbertForPreTraining, "sentence_order_label"),
    ],
)
def test_heads_that_read_one_pair_of_sentences_from_a_row_refuse_several_documents(head, label):
    """Those of pretraining predict masked tokens of packed rows, without a label of the pair."""
    model = head._from_config(ALBERT if head is AlbertForPreTraining else BERT, attn_implementation="flashmask").eval()
    batch = packed(DataCollatorForPackedEncoders())
    with pytest.raises(RuntimeError, match=f"{head.__name__} reads one class"):
        model(**batch, **{label: torch.tensor([1])})
    if head is BertForNextSentencePrediction:
        with pytest.raises(RuntimeError, match=f"{head.__name__} reads one class"):
            model(**batch)
    else:
        model(**batch)


@pytest.mark.parametrize(
    "batch",
    [
        padded("left"),
        padded("right"),
        packed(DataCollatorForPackedLanguageModeling(pad_to_multiple_of=8, completion_only_loss=False), EXAMPLES[:1]),
        {"input_ids": torch.arange(5, 13)[None], "startend_row_indices": masks.sliding_window(8, 3).indices},
    ],
    ids=["left", "right", "one document in a padded row", "another mask"],
)
def test_rows_of_one_document_are_classified(batch):
    model = AutoModelForSequenceClassification.from_config(LLAMA, attn_implementation="flashmask")
    assert model(**batch).logits.shape == (len(batch["input_ids"]), 1)


def test_heads_that_read_every_token_take_several_documents():
    model = AutoModelForTokenClassification.from_config(LLAMA, attn_implementation="flashmask").eval()
    batch = packed(DataCollatorForPackedLanguageModeling(completion_only_loss=False))
    alone = [model(torch.tensor([example["input_ids"]])).logits[0] for example in EXAMPLES]
    torch.testing.assert_close(model(**batch).logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)


def check_scales(positions, mask=None, **fields):
    """Run the checks of Llama 4 on a call with a config of these fields."""
    model = torch.nn.Module()
    model.config = SimpleNamespace(_attn_implementation="flashmask", model_type="llama4_text", **fields)
    run_check("documents of Llama 4", model, input_ids=positions, position_ids=positions, attention_mask=mask)


def test_llama_4_scales_from_floor_scale_tokens_on():
    config = dict(floor_scale=6, attn_temperature_tuning=True)
    two = torch.tensor([[0, 1, 2, 0, 1, 2]])
    check_scales(two[:, :5], **config)
    check_scales(two, torch.tensor([[1, 1, 1, 0, 0, 0]]), **config)
    check_scales(two, floor_scale=6, attn_temperature_tuning=False)
    with pytest.raises(RuntimeError, match="keep rows of several documents under floor_scale tokens"):
        check_scales(two, **config)


def test_masked_tokens_under_token_dropout_take_one_document_a_row():
    """ESM scales the embeddings of a row by the share of masked tokens in it."""
    sizes = SIZES | {"pad_token_id": 0, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True}
    model = AutoModelForMaskedLM.from_config(EsmConfig(**sizes), attn_implementation="flashmask").eval()
    batch = packed(DataCollatorForPackedEncoders())
    alone = [model(torch.tensor([example["input_ids"]])).logits[0] for example in EXAMPLES]
    torch.testing.assert_close(model(**batch).logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
    masked = batch | {"input_ids": torch.where(batch["input_ids"] == 6, 3, batch["input_ids"])}
    for dropped in ((), ("position_ids",), ("startend_row_indices",)):
        with pytest.raises(RuntimeError, match=r"has token_dropout, .* Pass one document per row"):
            model(**{name: value for name, value in masked.items() if name not in dropped})
    model(input_ids=torch.tensor([[5, 3, 7]]), position_ids=torch.arange(3)[None])
    config = EsmConfig(**sizes | {"token_dropout": False})
    AutoModelForMaskedLM.from_config(config, attn_implementation="flashmask").eval()(**masked)


def test_activated_lora_takes_one_document_a_row():
    model, _ = model_pair("llama")

    def check_adapters(call):
        run_check("activated LoRA", model, input_ids=torch.ones(1, 6), **call)

    two, one_sequence = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([0, 6])
    check_adapters({"position_ids": two, "cu_seq_lens_q": one_sequence})
    model.peft_config = {"default": SimpleNamespace(alora_invocation_tokens=[1])}  # after a call without it
    for one in (
        {},
        {"cu_seq_lens_q": torch.tensor([0, 6, 6])},
        {"startend_row_indices": masks.causal(6).indices},
        {"position_ids": torch.arange(6)[None], "cu_seq_lens_q": one_sequence},
    ):
        check_adapters(one)
    for several in (
        {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
        {"startend_row_indices": masks.causal_document([3, 3]).indices},
        {"position_ids": two, "cu_seq_lens_q": one_sequence},
        {"position_ids": two.expand(3, 1, 6)},
    ):
        with pytest.raises(RuntimeError, match="PEFT looks for alora_invocation_tokens once per row"):
            check_adapters(several)


def test_towers_that_pool_images_are_refused():
    """The layer that pools takes dense masks of numbers alone (LFM2-VL's config sets it, and ignores its result)."""
    pixels = {"pixel_values": torch.ones(1, 4, 12), "spatial_shapes": torch.tensor([[1, 2]])}
    pixels["pixel_attention_mask"] = torch.tensor([[1, 1, 0, 0]])
    sizes = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    for pools in (False, True):
        config = Siglip2VisionConfig(**sizes, num_patches=4, patch_size=2, vision_use_head=pools)
        model = Siglip2VisionModel._from_config(config, attn_implementation="flashmask")
        if pools:
            with pytest.raises(NotImplementedError, match=r"pools images in a layer .* set vision_use_head=False, or"):
                model(**pixels)
        else:
            assert model(**pixels).last_hidden_state.isfinite().all()


def test_images_of_cross_attention_are_refused():
    """Such layers take a dense mask of images, or none, and are not causal."""
    config = MllamaTextConfig(**SIZES, pad_token_id=0, cross_attention_layers=[0])
    model = MllamaTextModel._from_config(config, attn_implementation="flashmask")
    text = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert model(**text).last_hidden_state.isfinite().all()
    with pytest.raises(NotImplementedError, match=r"attends to images in layers of their own.*load with 'sdpa'"):
        model(**text, cross_attention_states=torch.zeros(1, 4, 32))
