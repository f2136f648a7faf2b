"""Packing for encoders: a packed row gives the hidden states and losses of its documents alone."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tools.documents import dataset, documents
from tools.tiny import VOCAB, assert_exact, assert_same_gradients, gradients_of
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from flashmask_hf import FlashMask, masks
from flashmask_hf.collators import DataCollatorForPackedEncoders, pack_dataset

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def bert(attention):
    config = BertConfig(**SIZES, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = attention
    return BertForMaskedLM(config).double()


def modern_bert(attention):
    config = ModernBertConfig(**SIZES, **SPECIAL, local_attention=8, global_attn_every_n_layers=3)
    config._attn_implementation = attention
    return ModernBertForMaskedLM(config).double()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 16}, {"max_length": 24}], ids=str)
@pytest.mark.parametrize("model", [bert, modern_bert])
def test_packed_documents_equal_each_alone(model, options):
    lengths = [7, 1, 20, 13]
    rng = np.random.default_rng(0)
    examples = []
    for first, tokens in enumerate(documents(lengths), start=3):
        tokens[0] = first  # by which the document is found again
        tokens[1:] = [max(token, 10) for token in tokens[1:]]
        labels = np.where(rng.random(len(tokens)) < 0.5, tokens, -100)
        labels[0] = tokens[0]  # a first token is learned too
        example = {"input_ids": tokens, "labels": labels}
        if model is bert:
            example["token_type_ids"] = np.arange(len(tokens)) % 2
        examples.append(example)
    torch.manual_seed(0)
    packed_model, alone_model = model("flashmask"), model("eager")
    alone_model.load_state_dict(packed_model.state_dict())
    batch = DataCollatorForPackedEncoders(**options)(examples)
    packed = packed_model(**batch)
    packed.loss.backward()
    if len(batch["input_ids"]) == 1:  # sentence-transformers calls forward
        bounds = torch.tensor([0, *np.cumsum(lengths)])
        flat = {name: x for name, x in batch.items() if name != "startend_row_indices"} | {"cu_seq_lens_q": bounds}
        for call in (packed_model, packed_model.forward):
            assert_exact([call(**flat).loss], [packed.loss])

    rows, logits = batch["input_ids"].flatten().tolist(), packed.logits.flatten(0, 1)
    total, count = torch.zeros(()), 0
    for example in examples:
        inputs = {name: torch.as_tensor(values)[None] for name, values in example.items()}
        alone = alone_model(**inputs)
        own = int((inputs["labels"] != -100).sum())
        total, count = total + alone.loss * own, count + own
        start, tokens = rows.index(example["input_ids"][0]), len(example["input_ids"])
        assert_exact([logits[start : start + tokens]], [alone.logits[0]])
    (total / count).backward()
    assert_exact([packed.loss], [total / count])
    assert_same_gradients(gradients_of(packed_model), gradients_of(alone_model))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([None, 8]))
def test_the_mask_is_that_of_documents(lengths, multiple):
    batch = DataCollatorForPackedEncoders(pad_to_multiple_of=multiple)([{"input_ids": t} for t in documents(lengths)])
    assert "labels" not in batch
    width = batch["input_ids"].shape[1]
    mask = FlashMask(batch["startend_row_indices"], causal=False).validate()
    assert torch.equal(mask.to_dense(width), masks.document(lengths, kv_len=width).to_dense(width))


def test_rows_of_pack_dataset_keep_their_documents():
    rows = pack_dataset(dataset([3, 2, 4]), 5).to_list()
    batch = DataCollatorForPackedEncoders()(rows)
    assert batch["startend_row_indices"][0, 0, :, 1].tolist() == [0, 0, 0, 3, 3, 5, 5, 5, 5]


def test_rows_of_pack_dataset_keep_the_segments_of_pairs():
    pairs = {"input_ids": [[5, 6, 7], [8, 9]], "token_type_ids": [[0, 0, 1], [0, 1]]}
    (row,) = pack_dataset(Dataset.from_dict(pairs), 8)
    assert DataCollatorForPackedEncoders()([row])["token_type_ids"].tolist() == [[0, 0, 1, 0, 1]]
    (cut,) = pack_dataset(Dataset.from_dict(pairs), 2, truncation_mode="keep_end").select([0])
    assert cut["token_type_ids"][0] == [0, 1]


def test_columns_of_a_part_of_the_batch_raise():
    examples = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3]}]
    with pytest.raises(ValueError, match="example 1 has no labels, but example 0 has"):
        DataCollatorForPackedEncoders()(examples)
    with pytest.raises(ValueError, match="labels of example 0 has 1 entries"):
        DataCollatorForPackedEncoders()([{"input_ids": [1, 2], "labels": [1]}])
