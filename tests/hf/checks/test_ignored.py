"""Vectors and packed rows raise in models that would ignore them, whatever computes the loss."""

import random

import pytest
import torch
from datasets import Dataset
from tools.calls import check_call
from tools.model_pairs import NoSynchronization, model_pair, positions, tokens
from tools.tiny import TRAINER_WARNINGS, llama_config, preference_rows, trainer_settings, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    PreTrainedModel,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from flashmask_hf import FlashMask, masks
from flashmask_hf.collators import (
    DataCollatorForMultiAnswerReward,
    DataCollatorForPackedEncoders,
    DataCollatorForPackedLanguageModeling,
    DataCollatorForSharedQuestion,
    DataCollatorForTrees,
)
from flashmask_hf.hf import patches
from flashmask_hf.hf.checks.ignored import hides_more
from flashmask_hf.hf.documents import next_flagged

pytestmark = TRAINER_WARNINGS

IGNORED = r"startend_row_indices hide tokens, but attn_implementation='{}' ignores them; load .*'flashmask'"
EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [10, 11, 12]}]


def llama(attention):
    model, _ = model_pair("llama", num_hidden_layers=1)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_vectors_are_refused_where_they_are_ignored(attention):
    model = llama(attention)
    tree = DataCollatorForTrees()([{"input_ids": [[5, 6], [7], [8]], "parents": [-1, 0, 0]}])
    del tree["labels"]
    with torch.no_grad(), pytest.raises(RuntimeError, match=IGNORED.format(attention)):
        model(**tree, use_cache=False)
    with pytest.raises(RuntimeError, match=IGNORED.format(attention)):
        model.base_model(tree.pop("input_ids"), **tree, use_cache=False)
    window = masks.sliding_window(9, 3).indices
    with pytest.raises(RuntimeError, match=IGNORED.format(attention)):
        model(tokens(1, 9), startend_row_indices=window)
    model(tokens(1, 9), startend_row_indices=masks.sliding_window(9, 9).indices)
    model(tokens(2, 9), startend_row_indices=masks.padding([9, 4]).indices)


def test_mask_indices_of_another_length_are_refused_where_they_are_ignored():
    """As under accelerate's context parallelism, which splits only the tokens, and PEFT's prompts, which add some."""
    batch = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=16)(EXAMPLES)
    part = {name: batch[name][:, :8] for name in ("input_ids", "position_ids")}
    whole = batch["startend_row_indices"]
    for indices in (whole, whole[:, :, :7], whole[0], whole.tolist()):
        with pytest.raises(ValueError, match=r"for S = 8 tokens, got .*'sdpa' ignores them: pass indices of whole"):
            llama("sdpa")(**part, startend_row_indices=indices, use_cache=False)
    with pytest.raises(TypeError, match="int32"):
        llama("sdpa")(**part, startend_row_indices=whole[:, :, :8].long(), use_cache=False)
    with pytest.raises(ValueError, match=r"whole row of 16 tokens, .*sequence_parallel"):
        llama("flashmask")(**part, startend_row_indices=whole, use_cache=False)


def test_a_mask_of_another_length_hides_nothing():
    vectors = masks.causal_document([3, 3]).indices
    assert hides_more(vectors, torch.zeros(1, 9)).tolist() == [[[True] * 3 + [False] * 3]]
    assert not hides_more(vectors, torch.zeros(1, 6)).any()


def test_a_token_after_those_of_the_vectors_is_not_looked_at():
    """As when a caller leaves the vectors in the keywords of a decoding loop."""
    llama("sdpa")(torch.tensor([[1]]), startend_row_indices=masks.causal_document([3, 3]).indices)


@pytest.mark.parametrize("attention", ["flashmask", "sdpa"])
def test_replicas_of_data_parallel_are_refused(attention):
    """Trainer divides by the labels of all GPUs, and multiplies by their number, of which one has the packed row."""
    model = llama(attention)
    batch = DataCollatorForPackedLanguageModeling()(EXAMPLES)
    replica = model._replicate_for_data_parallel()  # as torch.nn.DataParallel makes one for each GPU
    with pytest.raises(ValueError, match=r"DataParallel splits a batch by rows.*accelerate launch"):
        replica(**batch, use_cache=False)
    model(**batch, use_cache=False)


def test_documents_that_seq_idx_alone_tells_are_refused():
    """As of transformers' `DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True)`."""
    model, ids, numbers = llama("flashmask"), tokens(1, 6), torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    message = r"seq_idx numbers documents of a row, but the attention of LlamaForCausalLM .*pass position_ids"
    for compiled in (model, torch.compile(model, backend="eager", fullgraph=True)):
        with pytest.raises(RuntimeError, match=message):
            compiled(ids, seq_idx=numbers)
    apart = torch.cat([model(part).logits for part in ids.split(3, 1)], 1)
    edges = torch.tensor([0, 3, 6], dtype=torch.int32)
    vectors = masks.causal_document([3, 3]).indices
    for told in ({"position_ids": positions([3, 3])}, {"cu_seq_lens_q": edges}, {"startend_row_indices": vectors}):
        torch.testing.assert_close(model(ids, seq_idx=numbers, **told).logits, apart, rtol=1e-4, atol=1e-4)
    one = model(ids, seq_idx=torch.ones_like(numbers)).logits
    torch.testing.assert_close(one, model(ids).logits, rtol=0, atol=0)
    model.set_attn_implementation("sdpa")
    model(ids, seq_idx=numbers)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_need_positions_and_no_cache(attention):
    model, apart = llama(attention), [torch.tensor([one["input_ids"]]) for one in EXAMPLES]
    for options in ({}, {"pad_to_multiple_of": 16}, {"max_length": 6}):
        batch = DataCollatorForPackedLanguageModeling(**options)(EXAMPLES)
        found = {name: batch[name] for name in ("input_ids", "position_ids", "startend_row_indices")}
        logits = model(**found, use_cache=False).logits[found["startend_row_indices"][:, 0, :, 0] > 0]
        firsts = found["input_ids"][found["startend_row_indices"][:, 0, :, 0] > 0].tolist()
        for ids in apart:
            start = firsts.index(ids[0, 0].item())
            torch.testing.assert_close(logits[start : start + ids.shape[1]], model(ids).logits[0], rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError, match=IGNORED.format(attention) + r".*whole rows, use_cache=False"):
            model(**found)
        with pytest.raises(RuntimeError, match=IGNORED.format(attention)):
            model(**found, use_cache=False, attention_mask=torch.ones_like(batch["input_ids"]))
        del found["position_ids"]
        with pytest.raises(RuntimeError, match=IGNORED.format(attention)):
            model(**found, use_cache=False)
    one = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=8)(EXAMPLES[:1])
    model(**one, use_cache=True)


def test_encoders_never_find_documents():
    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    model = BertModel._from_config(BertConfig(**sizes), attn_implementation="sdpa").eval()
    with pytest.raises(RuntimeError, match=IGNORED.format("sdpa") + ", pass one document per row"):
        model(**DataCollatorForPackedEncoders()(EXAMPLES))
    padded = DataCollatorForPackedEncoders(pad_to_multiple_of=8)(EXAMPLES[:1])
    with pytest.raises(RuntimeError, match=IGNORED.format("sdpa")):
        model(**padded)
    model(**padded, attention_mask=(torch.arange(8) < 3).long()[None])
    model(tokens(1, 6), startend_row_indices=masks.full(6).indices)


def test_the_check_is_compiled(no_compiled_code):
    model = torch.compile(llama("sdpa"), backend="eager", fullgraph=True)
    given = dict(input_ids=tokens(1, 6), startend_row_indices=masks.causal_document([3, 3]).indices, use_cache=False)
    model(**given, position_ids=positions([3, 3]))
    with pytest.raises(RuntimeError, match=IGNORED.format("sdpa") + ".*position_ids of whole rows"):
        model(**given)


def test_flash_attention_finds_documents_in_a_single_row():
    model = llama("sdpa")
    model.config._attn_implementation = "flash_attention_2"
    row = dict(position_ids=positions([3, 3]), startend_row_indices=masks.causal_document([3, 3]).indices)
    check_call(model, tokens(1, 6), **row, use_cache=False)
    with pytest.raises(RuntimeError, match=IGNORED.format("flash_attention_2")):
        check_call(model, tokens(2, 6), **row, use_cache=False)


@pytest.mark.parametrize("documents", [True, False])
def test_differences_are_those_of_the_dense_masks(documents):
    rng = random.Random(0)
    wrong = 0
    for _ in range(300):
        length = rng.randint(1, 8)
        ends = [rng.choice([0, length, rng.randint(0, length)]) for _ in range(length)]
        mask = FlashMask(torch.tensor(ends, dtype=torch.int32).view(1, 1, -1, 1), causal=True)
        place = torch.tensor([[rng.choice([0, j]) for j in range(length)]])
        other, found = None, torch.ones(length, length, dtype=torch.bool)
        if documents:
            other = next_flagged(place[:, 1:] == 0)
            found = found.tril() & (torch.arange(length)[:, None] < other)
        vectors = mask.indices if documents else mask.bidirectional().indices
        seen = mask.to_dense()[0, 0]
        real = seen.any(0)
        want = (seen != found)[real].any(0)
        got = hides_more(vectors, None, other)[0, 0]
        assert torch.equal(got, want), (ends, place)
        assert torch.equal(hides_more(vectors, real[None], other)[0, 0], want & real)
        wrong += int(want.any())
    assert 50 < wrong < 300


def test_the_check_does_not_wait_for_the_device():
    model = llama("sdpa")
    given = dict(position_ids=positions([3, 3]), startend_row_indices=masks.causal_document([3, 3]).indices)
    with NoSynchronization():
        check_call(model, tokens(1, 6), **given, use_cache=False)


ANSWERS = [{"prompt_ids": [5, 6, 7], "answers_ids": [[8, 9], [10]]}] * 4


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flashmask"])
def test_packed_rows_that_would_not_run_are_refused(attention, tmp_path):
    refused = "packed_input_ids are packed rows, which this Llama.* would not run: take the trainer of the collator"
    settings = trainer_settings(tmp_path)
    model = AutoModelForSequenceClassification.from_config(llama_config(num_labels=1), attn_implementation=attention)
    raw = Dataset.from_list(preference_rows(4))
    trainer = RewardTrainer(
        model, RewardConfig(**settings, remove_unused_columns=False), train_dataset=raw,
        eval_dataset=raw, processing_class=word_tokenizer(), data_collator=DataCollatorForMultiAnswerReward(),
    )  # fmt: skip
    for loop in (trainer.evaluate, trainer.train):
        with pytest.raises(ValueError, match=refused):
            loop()
    with pytest.raises(ValueError, match=refused):
        model(**DataCollatorForMultiAnswerReward()(ANSWERS))
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation=attention)
    with torch.no_grad():
        model.lm_head.weight += torch.randn_like(model.lm_head.weight)  # away from its reference
    losses = []
    for collator in (DataCollatorForSharedQuestion(), None):
        trainer = DPOTrainer(
            model, args=DPOConfig(**settings), train_dataset=raw, eval_dataset=raw,
            processing_class=word_tokenizer(), data_collator=collator,
        )  # fmt: skip
        if attention == "flashmask":
            with pytest.raises(ValueError, match=refused):
                trainer.evaluate()
            return
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0] - 0.6931) > 1e-2


def test_a_model_may_take_any_keyword():
    class Pair(PreTrainedModel):
        def forward(self, model, original):
            return model, original

    assert Pair(llama_config())(model=1, original=2) == (1, 2)


def test_a_class_that_is_called_in_another_way_is_refused():
    with pytest.raises(RuntimeError, match=r"calls models in a way .*__call__ of Model"):
        patches.check_calls(type("Model", (), {"__call__": print}))


@pytest.mark.parametrize("how", ["fewer layers", "compiled forward"])
def test_models_of_users_may_have_other_layers_than_their_config(how):
    """Only trainers count the layers that receive the mask."""
    model, _ = model_pair("llama")
    if how == "fewer layers":
        model.model.layers = model.model.layers[:1]
    else:
        layer = model.model.layers[0]
        layer.forward = torch.compile(layer.forward, backend="eager")
    row = dict(position_ids=positions([4, 5]), startend_row_indices=masks.causal_document([4, 5]).indices)
    with torch.no_grad():
        model(tokens(1, 9), **row)
