"""The DPO trainer computes each question once; losses, metrics and gradients equal stock TRL's."""

import contextlib
import logging
import math
import types

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset, load_from_disk
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tools import model_zoo
from tools.model_pairs import BOUND
from tools.support import covering
from tools.tiny import (
    CHECKPOINTING,
    EXACT,
    FLOAT32,
    TRAINER_WARNINGS,
    VOCAB,
    assert_same_gradients,
    assert_same_step,
    conversation,
    gradients_of,
    llama_config,
    one_step,
    preference_rows,
    step,
    trainer_settings,
    word_tokenizer,
)
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from flashmask_hf.collators import DataCollatorForSharedQuestion
from flashmask_hf.hf.packed.rows import run_packed
from flashmask_hf.trainers import SharedQuestionDPOConfig, SharedQuestionDPOTrainer, pair_weights, weighing
from flashmask_hf.trainers.even_batches import EvenBatchesMixin
from flashmask_hf.trainers.loading import flashmask_policy

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
EXPERTS = {"experts_implementation": "eager"}  # torch's grouped product takes no float64
CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% if m['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer("user", "assistant", chat_template=CHAT)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(path)
    return str(path)


def config(path, **options):
    return DPOConfig(**(trainer_settings(path) | {"beta": 0.5} | options))


def make(
    trainer_class, model_path, tokenizer, out, *, data=None, lora=False, ref=False, dtype=torch.float64, **options
):
    attention = "flashmask" if trainer_class is SharedQuestionDPOTrainer else "eager"

    def load(path=model_path):
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=dtype, **EXPERTS)

    keywords = {}
    if ref:
        keywords["ref_model"] = load()
    if lora:
        keywords["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "up_proj"])
    for name in ("data_collator", "eval_dataset"):
        if name in options:
            keywords[name] = options.pop(name)
    torch.manual_seed(0)  # initializes the adapter; TRL 1.15 and later seed it themselves
    trainer = trainer_class(
        load(),
        args=config(out, **options),
        train_dataset=Dataset.from_list(preference_rows() if data is None else data),
        processing_class=tokenizer,
        **keywords,
    )
    torch.manual_seed(1)  # so that policy and reference differ
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape).to(parameter.device)
    return trainer


def assert_same(shared, stock, **bound):
    metrics = assert_same_step(shared, stock, "shared_tokens_saved", "mask_sparsity", **bound)
    assert 0 < metrics["shared_tokens_saved"] < 0.5
    return metrics["loss"]


MODES = {
    "full": {},
    "full, given reference": {"ref": True},
    "full, precomputed": {"precompute_ref_log_probs": True},
    "full, checkpointing": {CHECKPOINTING: True},
    "lora": {"lora": True},
    "lora, precomputed": {"lora": True, "precompute_ref_log_probs": True},
    "lora, checkpointing": {"lora": True, CHECKPOINTING: True},
}


@pytest.fixture(scope="module")
def pair(request, model_path, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    options = MODES[request.param]
    return [make(c, model_path, tokenizer, out, **options) for c in (SharedQuestionDPOTrainer, DPOTrainer)]


@pytest.mark.parametrize(("pair", "loss"), covering(1, MODES, LOSSES), indirect=["pair"])
def test_every_loss_equals_stock_trl(pair, loss):
    for trainer in pair:
        trainer.loss_types, trainer.loss_weights = [loss], [1.0]
        trainer.label_smoothing = 0.1 if loss in ("robust", "exo_pair", "sigmoid") else 0.0
    assert assert_same(*pair) != 0


OPTIONS = {
    "ld_alpha": {"ld_alpha": 0.5},
    "ld_alpha, precomputed": {"ld_alpha": 0.5, "precompute_ref_log_probs": True},
    "rpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "weighting": {"use_weighting": True},
    "weighting, lora": {"use_weighting": True, "lora": True},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "max_length": {"max_length": 10},
    "pad_to_multiple_of": {"pad_to_multiple_of": 16},
    "reentrant checkpointing": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_equals_stock_trl(option, model_path, tokenizer, tmp_path):
    shared, stock = (
        make(c, model_path, tokenizer, tmp_path, **OPTIONS[option]) for c in (SharedQuestionDPOTrainer, DPOTrainer)
    )
    assert_same(shared, stock)


def test_the_alpha_divergence_equals_stock_trl(model_path, tokenizer, tmp_path, monkeypatch):
    """In float32, as TRL's has no float64."""
    monkeypatch.undo()
    options = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5, "dtype": torch.float32}
    trainers = (make(c, model_path, tokenizer, tmp_path, **options) for c in (SharedQuestionDPOTrainer, DPOTrainer))
    assert_same(*trainers, bound=BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{}, {"activation_offloading": True}, {CHECKPOINTING: True}], ids=str)
def test_the_gpu_equals_the_cpu(option, model_path, tokenizer, tmp_path):
    options = option | {"use_cpu": False, "dtype": torch.float32}
    on_gpu = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, **options)
    with on_gpu.maybe_activation_offload_context:
        loss, gradients, _ = one_step(on_gpu)
    expected, expected_gradients, _ = one_step(make(DPOTrainer, model_path, tokenizer, tmp_path, dtype=torch.float32))
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients, expected_gradients, 1e-3)


FORMS = {
    "conversational prompt, texts": lambda row: row | {"prompt": conversation(row)["prompt"]},
    "standard, implicit prompt": lambda row: {k: row["prompt"] + row[k] for k in ("chosen", "rejected")},
    "conversational": conversation,
    "conversational, implicit prompt": lambda row: {
        k: conversation(row)["prompt"] + conversation(row)[k] for k in ("chosen", "rejected")
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_format_equals_stock_trl(form, model_path, tokenizer, tmp_path):
    data = [FORMS[form](row) for row in preference_rows()]
    shared = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=data)
    if form == "conversational prompt, texts":  # TRL does not read this format
        data = [conversation(row) for row in preference_rows()]
    assert_same(shared, make(DPOTrainer, model_path, tokenizer, tmp_path, data=data))


def test_ultrafeedback_rows_equal_stock_trl(model_path, tokenizer, tmp_path):
    """The prompt is a string, the conversations begin with it, and there are columns that no one reads."""
    plain = [conversation(row) for row in preference_rows()]
    data = [
        {
            "prompt": row["prompt"][0]["content"],
            "prompt_id": str(index),
            "chosen": row["prompt"] + row["chosen"],
            "rejected": row["prompt"] + row["rejected"],
            "messages": row["prompt"] + row["chosen"],
            "score_chosen": 8.0,
            "score_rejected": 3.5,
        }
        for index, row in enumerate(plain)
    ]
    shared = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=data)
    assert_same(shared, make(DPOTrainer, model_path, tokenizer, tmp_path, data=plain))


@pytest.mark.parametrize("collator", [{}, {"row_length": 40}, {"row_length": 64, "pad_to_multiple_of": 32}], ids=str)
def test_packing_several_questions_into_one_row_changes_nothing(collator, model_path, tokenizer, tmp_path):
    packed = make(
        SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path,
        data_collator=DataCollatorForSharedQuestion(**collator),
    )  # fmt: skip
    loss, gradients, _ = one_step(packed)
    total, sums = 0.0, dict.fromkeys(gradients, 0.0)
    torch.manual_seed(2)
    batch = next(iter(packed.get_train_dataloader()))
    count = len(batch["input_ids"]) // 2
    for index in range(count):
        example = packed.train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
        chosen = batch["input_ids"][index][batch["attention_mask"][index].bool()].tolist()
        alone = next(e for e in example if e["prompt_ids"] + e["chosen_ids"] == chosen)
        packed.model.zero_grad()
        one = packed.compute_loss(packed.model, DataCollatorForSharedQuestion()([alone]))
        one.backward()
        total += one.detach() / count
        sums = {n: sums[n] + p.grad / count for n, p in packed.model.named_parameters()}
    torch.testing.assert_close(loss, total, rtol=EXACT, atol=EXACT)
    assert_same_gradients(gradients, sums)


def test_the_auxiliary_loss_of_a_mixture_of_experts_equals_stock_trl(tokenizer, tmp_path):
    """Router logits, too, are gathered into one sequence per answer before the auxiliary loss."""
    torch.manual_seed(0)
    settings = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
        output_router_logits=True, router_aux_loss_coef=0.1, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "moe")
    path = str(tmp_path / "moe")
    shared, stock = (make(c, path, tokenizer, tmp_path, ref=True) for c in (SharedQuestionDPOTrainer, DPOTrainer))
    assert_same(shared, stock)
    assert shared._metrics["train"]["aux_loss"][0] > 0


def test_a_model_loaded_by_name_and_a_trained_adapter(model_path, tokenizer, tmp_path):
    shared = SharedQuestionDPOTrainer(
        model_path,
        args=config(tmp_path),
        train_dataset=Dataset.from_list(preference_rows()),
        processing_class=tokenizer,
    )
    assert shared.model.config._attn_implementation == shared.ref_model.config._attn_implementation == "flashmask"

    def adapted(attention):
        torch.manual_seed(5)
        base = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=attention)
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(base, lora)

    trainers = [
        c(
            adapted(a),
            args=config(tmp_path),
            train_dataset=Dataset.from_list(preference_rows()),
            processing_class=tokenizer,
        )
        for c, a in ((SharedQuestionDPOTrainer, "flashmask"), (DPOTrainer, "eager"))
    ]
    for trainer in trainers:
        assert "ref" in trainer.model.peft_config  # TRL's copy of the adapter is the reference
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if ".default." in name:
                    parameter *= 1.5
    assert_same(*trainers)


def curve(trainer):
    trainer.train()
    keys = ("loss", "rewards/accuracies", "rewards/margins", "grad_norm")
    return [{key: entry[key] for key in keys} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": True, "sync_ref_model": False}, {"sync_ref_model": True, "ref_model_sync_steps": 2}],
    ids=str,
)
def test_training_follows_stock_trl(options, model_path, tokenizer, tmp_path):
    options = {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2} | options
    evaluated = {"eval_dataset": Dataset.from_list(preference_rows(6, seed=3))}
    shared, stock = (
        make(c, model_path, tokenizer, tmp_path, **options, **evaluated) for c in (SharedQuestionDPOTrainer, DPOTrainer)
    )
    ours, theirs = curve(shared), curve(stock)
    assert len(ours) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=FLOAT32, abs=FLOAT32)
    one, other = shared.evaluate(), stock.evaluate()
    assert one["eval_mask_sparsity"] == 0  # short rows are one tile
    assert 0 < one["eval_shared_tokens_saved"] < 1
    for name, value in other.items():
        if "runtime" not in name and "per_second" not in name:
            assert one[name] == pytest.approx(value, rel=FLOAT32, abs=FLOAT32), name
    fresh = Dataset.from_list(preference_rows(5, seed=4))
    expected = pytest.approx(stock.evaluate(fresh)["eval_loss"], rel=FLOAT32)
    for rows in (fresh, fresh.to_iterable_dataset()):  # TRL's mean over a stream's unequal batches is another
        assert shared.evaluate(rows)["eval_loss"] == expected


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [{"max_length": 9}, {"truncation_mode": "keep_end"}, {"ld_alpha": 0.1}], ids=str)
def test_precomputed_log_probabilities_depend_on_the_options(change, model_path, tokenizer, tmp_path):
    """TRL names its cache file after the dataset, and a tokenized dataset does not depend on the options.

    The rejected answer is shorter: `ld_alpha` weighs the tokens that the other answer has beyond it.
    """
    words = torch.randint(8, 64, (4, 3, 7), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": q, "chosen_ids": chosen, "rejected_ids": rejected[:2]} for q, chosen, rejected in words]
    Dataset.from_list(rows).save_to_disk(tmp_path / "tokens")

    def rewards(**options):
        trainer = SharedQuestionDPOTrainer(
            str(model_path),
            args=config(tmp_path, max_steps=1, learning_rate=0.0, **options),
            train_dataset=load_from_disk(tmp_path / "tokens"),
            processing_class=tokenizer,
        )
        trainer.train()
        return trainer.state.log_history[0]["rewards/chosen"]  # float32, as models loaded by name are

    assert rewards(max_length=11, precompute_ref_log_probs=True) == pytest.approx(0, abs=BOUND)
    assert rewards(**({"max_length": 11} | change), precompute_ref_log_probs=True) == pytest.approx(0, abs=BOUND)


def test_a_compiled_policy_that_mixes_documents_raises_when_it_precomputes_the_reference(tokenizer, tmp_path):
    model = model_zoo.build("recurrent_gemma", "flashmask")
    for layer in model.base_model.layers:
        layer.compile(backend="eager")
    with pytest.raises(ValueError, match="the model has recurrent or convolutional layers"):
        SharedQuestionDPOTrainer(
            model,
            args=config(tmp_path, precompute_ref_log_probs=True),
            train_dataset=Dataset.from_list([{"prompt_ids": [8, 9], "chosen_ids": [8], "rejected_ids": [7]}]),
            processing_class=tokenizer,
        )


def test_a_compiled_reference_that_mixes_documents_raises(model_path, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="the model has recurrent or convolutional layers"):
        SharedQuestionDPOTrainer(
            str(model_path),
            model_zoo.build("recurrent_gemma", "flashmask"),
            args=config(tmp_path, max_steps=1, torch_compile=True, torch_compile_backend="eager"),
            train_dataset=Dataset.from_list([{"prompt_ids": [8, 9], "chosen_ids": [8], "rejected_ids": [7]}]),
            processing_class=tokenizer,
        ).train()


@pytest.mark.parametrize("library", ["torch", "numpy", "pandas", "arrow"])
def test_rows_in_any_dataset_format_are_prepared_alike(library, model_path, tokenizer, tmp_path):
    data, prepared = Dataset.from_list([conversation(row) for row in preference_rows()]), []
    for name in (None, library):
        given = data.with_format(name)
        trainer = SharedQuestionDPOTrainer(
            model_path, args=config(tmp_path), train_dataset=given, processing_class=tokenizer
        )
        prepared.append(trainer.train_dataset[:])
    assert prepared[0] == prepared[1]


PAIR_WEIGHTS = [0.02, 0.0, 0.005, 0.0125, 0.03, 0.001]


def weighed_rows(weights=PAIR_WEIGHTS):
    return [row | {"weight": weight} for row, weight in zip(preference_rows(len(weights)), weights, strict=True)]


def expected_of_pairs(stock):
    """Return the loss sum(w * loss) / sum(w) of stock TRL's losses of single pairs, and its gradients."""
    stock.model.eval().zero_grad()
    total = 0
    for row, weight in zip(stock.train_dataset, PAIR_WEIGHTS, strict=True):
        total = total + weight * stock.compute_loss(stock.model, stock._prepare_inputs(stock.data_collator([row])))
    loss = total / sum(PAIR_WEIGHTS)
    loss.backward()
    return loss.item(), gradients_of(stock.model)


WEIGHED = {
    "ipo, adapter, precomputed": {"loss_type": ["ipo"], "lora": True, "precompute_ref_log_probs": True},
    "two losses": {"loss_type": ["apo_zero", "discopop"], "loss_weights": [0.3, 0.7]},
    "WPO": {"use_weighting": True},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(x, id=name, marks=[pytest.mark.full] * (name == "two losses")) for name, x in WEIGHED.items()],
)
def test_a_step_on_weighed_pairs_is_that_of_a_loop_over_pairs(options, model_path, tokenizer, tmp_path):
    """In three batches; metrics have no weights."""
    stock = make(DPOTrainer, model_path, tokenizer, tmp_path, data=weighed_rows(), **options)
    loss, expected = expected_of_pairs(stock)
    settings = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "optim": "sgd", "max_grad_norm": 0}
    settings |= {"learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}
    (log, changes), (unweighed, _) = (
        step(make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=data, **options, **settings))
        for data in (weighed_rows(), preference_rows(len(PAIR_WEIGHTS)))
    )
    assert log["loss"] == pytest.approx(loss, rel=FLOAT32)
    assert log["loss"] != pytest.approx(unweighed["loss"], rel=1e-3)
    for name in ("rewards/margins", "rewards/accuracies", "logps/chosen", "entropy", "num_tokens"):
        assert log[name] == pytest.approx(unweighed[name], rel=FLOAT32)
    assert_same_gradients(changes, expected, FLOAT32)  # weights and their sum are float32


def test_an_evaluation_of_weighed_pairs_divides_by_their_weights(model_path, tokenizer, tmp_path):
    """Of all batches together, the last of which is smaller; weights of 0 give 0."""
    loss, _ = expected_of_pairs(make(DPOTrainer, model_path, tokenizer, tmp_path, data=weighed_rows()))
    data = Dataset.from_list(weighed_rows())
    zeros = Dataset.from_list(weighed_rows([0.0] * 3))
    options = {"per_device_eval_batch_size": 4, "eval_dataset": {"data": data, "zeros": zeros}}
    shared = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, **options)
    found = shared.evaluate()
    assert found["eval_data_loss"] == pytest.approx(loss, rel=FLOAT32)
    assert 0 <= found["eval_zeros_loss"] < 1e-80  # 0 in float32


class Stock:
    """TRL's part of what the mixin extends."""

    def prediction_step(self, model, inputs):
        weights = inputs.get("pair_weights", torch.ones(4))
        return (weights * torch.tensor([3.0, 5.0, 7.0, 9.0])).sum() / weights.sum(), None, None

    def evaluation_loop(self, inputs, metric_key_prefix):
        for self._found in ([True, True], [True, False]):
            loss, _, _ = self.prediction_step(None, inputs)
            inputs = {"attention_mask": torch.ones(8)}
        return types.SimpleNamespace(metrics={f"{metric_key_prefix}_loss": loss.item()})


class Second(EvenBatchesMixin, pair_weights.PairWeightsMixin, Stock):
    """The second of two ranks, which has one batch; the first has two."""

    _copies, _counts_rows, _metrics = 1, True, {"eval": {}}
    args = types.SimpleNamespace(logging_nan_inf_filter=True, loss_type=["sigmoid"])
    accelerator = types.SimpleNamespace(
        device="cpu", num_processes=1, process_index=1, gather=lambda x: x, is_fsdp2=False
    )


def test_a_rank_without_a_batch_adds_nothing_to_the_loss_of_an_evaluation():
    weights = torch.tensor([1.0, 0.0, 2.0, 4.0])
    found = Second().evaluation_loop({"attention_mask": torch.ones(8), "pair_weights": weights})
    assert found.metrics == {"eval_loss": pytest.approx((1 * 3 + 2 * 7 + 4 * 9) / 7, rel=FLOAT32)}


def test_wrong_weights_of_pairs_raise(model_path, tokenizer, tmp_path, monkeypatch):
    for weight, problem in ((-1.0, "must be at least 0, got -1; swap its answers"), (math.nan, "must be finite")):
        data = weighed_rows([1.0, 1.0, weight])
        with pytest.raises(ValueError, match=f"weight of example 2 of the train dataset, as prepared, {problem}"):
            make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=data)
    with pytest.raises(ValueError, match="example 1 of the train dataset, as prepared, has no weight, but example 0"):
        make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=weighed_rows([1.0, None]))
    with pytest.raises(ValueError, match="batch 1 of a step has no weight, but batch 0 of a step has; give it to all"):
        Second()._get_num_items_in_batch([{"pair_weights": torch.ones(2)}, {}], torch.device("cpu"))
    pair = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
    make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=[pair | {"margin": m} for m in (1.0, None)])
    with pytest.raises(ValueError, match="example 1 has no weight, but example 0 has"):
        DataCollatorForSharedQuestion()([pair | {"weight": 1}, pair])
    with pytest.raises(TypeError, match="weight of example 0 must be a number, got '80 kg'; correct it, or rename"):
        DataCollatorForSharedQuestion()([pair | {"weight": "80 kg"}])
    for name in ("aot", "aot_unpaired", "sft"):
        options = {"data": weighed_rows(), "loss_type": ["sigmoid", name]}
        with pytest.raises(ValueError, match=f"loss_type='{name}' is no mean over pairs, .*; remove the column weight"):
            make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, **options)
    monkeypatch.setattr(weighing, "compare_versions", lambda *_: True)
    with pytest.raises(ValueError, match="the column weight needs the fused head of"):
        make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=weighed_rows())


def test_a_streamed_dataset_trains(model_path, tokenizer, tmp_path):
    def stream():
        yield from preference_rows()

    shared = SharedQuestionDPOTrainer(
        model_path,
        args=config(tmp_path, max_steps=2),
        train_dataset=IterableDataset.from_generator(stream),
        processing_class=tokenizer,
    )
    shared.train()
    assert len([entry for entry in shared.state.log_history if "loss" in entry]) == 2


def test_an_answer_never_affects_another(model_path):
    """Changing the chosen answer leaves the hidden states of the rejected answer bit-identical, and vice versa."""
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="flashmask")
    run_packed(model)
    collator = DataCollatorForSharedQuestion()

    def hidden(chosen, rejected):
        batch = collator([{"prompt_ids": [5, 6, 7], "chosen_ids": chosen, "rejected_ids": rejected}])
        batch.pop("completion_mask")
        return model.model(**batch, use_cache=False).last_hidden_state

    base = hidden([8, 9, 10], [11, 12, 13])
    assert torch.equal(base[1], hidden([20, 21, 22], [11, 12, 13])[1])
    assert torch.equal(base[0], hidden([8, 9, 10], [30, 31, 32])[0])
    assert not torch.equal(base[0], hidden([8, 19, 10], [11, 12, 13])[0])


@pytest.mark.parametrize("version", [1, 2])
def test_a_reference_model_that_fsdp2_would_leave_empty_raises(version, model_path, tokenizer, tmp_path, monkeypatch):
    trainer = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path)
    plugin = types.SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=True)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
    trainer.is_fsdp_enabled, trainer._hooked = True, False
    refused = pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading leaves a reference model empty")
    with refused if version == 2 else contextlib.nullcontext():
        trainer._hook_models()


def test_invalid_arguments_and_data_raise_before_the_first_step(model_path, tokenizer, tmp_path, caplog):
    def trainer(data=None, model=model_path, stream=False, **options):
        keywords = {k: options.pop(k) for k in ("peft_config", "data_collator") if k in options}
        return SharedQuestionDPOTrainer(
            model,
            args=config(tmp_path, **options),
            train_dataset=Dataset.from_list(preference_rows() if data is None else data),
            processing_class=tokenizer,
            **keywords,
        )

    eager = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    with pytest.raises(ValueError, match="need attn_implementation='flashmask', but the model has 'eager'"):
        trainer(model=eager)
    with pytest.raises(TypeError, match="data_collator must be a DataCollatorForSharedQuestion"):
        trainer(data_collator=DataCollatorForPreference(0))
    with pytest.raises(ValueError, match="PrefixTuningConfig adds virtual tokens"):
        trainer(peft_config=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    good = preference_rows(3)
    with pytest.raises(ValueError, match="example 2 has no rejected"):
        trainer([*good[:2], {"prompt": "w5", "chosen": "w6", "rejected": None}])
    with pytest.raises(ValueError, match=r"example 0 has no chosen and no rejected.*It has: prompt, completion"):
        trainer([{"prompt": "w5", "completion": "w6"}])
    with pytest.raises(ValueError, match="example 1 has an empty answer, chosen"):
        trainer([good[0], {"prompt": "w5", "chosen": "  ", "rejected": "w6"}])
    with pytest.raises(ValueError, match="example 0 has the same conversation twice"):
        trainer([{"chosen": "w5 w6", "rejected": "w5 w6"}])
    long = {"prompt": "w5 " * 40, "chosen": "w6 " * 40, "rejected": "w7"}
    with pytest.raises(ValueError, match=r"example 3 of the train dataset, as prepared, is \d+ tokens deep"):
        trainer([*good, long])
    with pytest.raises(ValueError, match=r"example 3 of the train dataset, .* more than the 70 of a row"):
        trainer([*good, long], data_collator=DataCollatorForSharedQuestion(row_length=70, max_position_embeddings=99))
    with pytest.raises(ValueError, match="every example of the train dataset has a question that fills max_length=8"):
        trainer([long, long], max_length=8)
    with pytest.raises(ValueError, match=r"has images, .*but this trainer packs text"):
        trainer([{**good[0], "images": ["a"]}])
    with caplog.at_level(logging.WARNING, logger="flashmask_hf.trainers"):
        trainer([*good, long], max_length=60)
        trainer([*good, long], max_length=20)
    assert "1 of 4 train examples have more than max_length=60 tokens" in caplog.text
    assert "Dropped 1 of 4 train examples: each has a question that fills max_length=20" in caplog.text


def other_models():
    """Yield models whose answers would see each other or whose positions are not depths, with the error."""
    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    attention = common | {"num_key_value_heads": 2, "max_position_embeddings": 64}
    mixing = "has recurrent or convolutional layers.*one sequence per row"
    recurrent = {name: common[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    yield "mamba", transformers.MambaConfig(**recurrent, state_size=4), mixing
    hybrid = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    yield "lfm2", transformers.Lfm2Config(**attention, **hybrid), mixing
    bert = transformers.BertConfig(**common)
    yield "bert", bert, "not a causal decoder"


@pytest.mark.parametrize(("name", "settings", "message"), list(other_models()), ids=lambda value: str(value)[:12])
def test_models_that_cannot_take_packed_rows_raise(name, settings, message):
    if name == "bert":
        model = transformers.AutoModelForMaskedLM.from_config(settings, attn_implementation="flashmask")
    else:
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="flashmask")
    batch = DataCollatorForSharedQuestion()([{"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10]}])
    batch.pop("completion_mask")

    def forward():
        run_packed(model)
        model.base_model(**batch, use_cache=False)

    with pytest.raises(ValueError, match=message):
        forward()


@pytest.mark.parametrize("window", [4, 20])
def test_a_sliding_window_is_measured_by_position(window, tokenizer, tmp_path):
    """The rejected answer is further from its question in the row than by position, which matters in a short window."""
    torch.manual_seed(0)
    settings = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=window, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "mistral")
    path = str(tmp_path / "mistral")
    assert_same(*(make(c, path, tokenizer, tmp_path, ref=True) for c in (SharedQuestionDPOTrainer, DPOTrainer)))


def test_keep_end_cuts_questions_and_raises_for_answers_that_fill_max_length(model_path, tokenizer, tmp_path):
    with pytest.warns(FutureWarning, match="keep_end"):
        trainer = make(
            SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, max_length=12, truncation_mode="keep_end"
        )
    assert one_step(trainer)[0] > 0
    long = {"prompt": "w5 ", "chosen": "w6 " * 12, "rejected": "w7"}
    with (
        pytest.warns(FutureWarning, match="keep_end"),
        pytest.raises(ValueError, match=r"longest answer of example 8 of the train dataset, .* fills max_length 12"),
    ):
        make(
            SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=[*preference_rows(), long], max_length=12,
            truncation_mode="keep_end",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "question", "answer", "message"),
    [
        ("keep_start", 11, 4, None),
        (
            "keep_start",
            12,
            4,
            "the question of example 0 of the train dataset, .* fills max_length 12",
        ),
        ("keep_end", 4, 11, None),
        ("keep_end", 4, 12, "the longest answer of example 0 of the train dataset, .* fills max_length 12"),
    ],
    ids=["question leaves a token", "question fills", "answer leaves a token", "answer fills"],
)
@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
def test_truncation_leaves_a_token_of_question_and_answer(
    mode, question, answer, message, model_path, tokenizer, tmp_path
):
    rows = [{"prompt_ids": [5] * question, "chosen_ids": [6] * answer, "rejected_ids": [7]}]
    options = {"data": rows, "max_length": 12, "truncation_mode": mode, "per_device_train_batch_size": 1}
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        trainer = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, **options)
        assert next(iter(trainer.get_train_dataloader()))["completion_mask"].sum(1).min() == 1


def test_row_length_is_compared_with_the_shortened_answers(model_path, tokenizer, tmp_path):
    rows = [{"prompt_ids": [5, 6], "chosen_ids": [7] * 30, "rejected_ids": [8] * 30}]
    args = SharedQuestionDPOConfig(**trainer_settings(tmp_path), max_length=6, row_length=16)
    trainer = SharedQuestionDPOTrainer(
        model_path, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["packed_input_ids"].shape == (1, 16)
    assert batch["attention_mask"].sum(1).tolist() == [6, 6]


def test_no_process_of_several_spreads_a_model_over_all_gpus(tmp_path, monkeypatch):
    args = config(tmp_path)
    monkeypatch.setattr(DPOConfig, "world_size", 2)
    with flashmask_policy("a model", args):
        assert args.model_init_kwargs == {"attn_implementation": "flashmask", "device_map": None}
    assert args.model_init_kwargs is None


def test_the_caller_keeps_its_options_of_loading_models(model_path, tokenizer, tmp_path):
    """Other models may be loaded with the same arguments; only the trainer's own get the attention."""
    given = {"dtype": "float32", "attn_implementation": None}
    args = config(tmp_path, model_init_kwargs=given)
    trainer = SharedQuestionDPOTrainer(
        model_path,
        args=args,
        train_dataset=Dataset.from_list(preference_rows()),
        processing_class=tokenizer,
    )
    assert trainer.args is args
    assert args.model_init_kwargs is given == {"dtype": "float32", "attn_implementation": None}
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == "flashmask"


def test_identical_answers_have_identical_log_probabilities(model_path, tokenizer, tmp_path):
    """Stock TRL counts them as not preferred; rounding, which depends on the place in a packed row, must not decide."""
    rows = [row | {"rejected": row["chosen"]} if index % 4 else row for index, row in enumerate(preference_rows(8, 5))]
    shared, stock = (
        make(c, model_path, tokenizer, tmp_path, data=rows, per_device_train_batch_size=8)
        for c in (SharedQuestionDPOTrainer, DPOTrainer)
    )
    assert_same(shared, stock)
    expected = one_step(stock)[2]["rewards/accuracies"]
    assert expected > 0

    for slope in (1e-5, -1e-5):  # stands for a processor whose rounding favours later places, or earlier ones

        def rounded(module, args, output, slope=slope):
            return output + slope * torch.arange(output.numel()).view_as(output)

        hook = shared.model.model.layers[-1].register_forward_hook(rounded)
        assert one_step(shared)[2]["rewards/accuracies"] == expected
        hook.remove()


def test_options_that_packed_rows_cannot_have_raise(model_path, tokenizer, tmp_path):
    refused = {
        "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
        "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    }
    for name, options in refused.items():
        with pytest.raises(ValueError, match=name):
            make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, **options)
    with pytest.raises(ValueError, match="alora_invocation_tokens"):
        SharedQuestionDPOTrainer(
            model_path,
            args=config(tmp_path),
            train_dataset=Dataset.from_list(preference_rows()),
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]),
        )


def test_tokenized_rows_with_row_length_and_with_an_unchanged_collator(model_path, tokenizer, tmp_path):
    prepared = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path)
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    data = list(prepared.train_dataset.select_columns(columns))
    collator = DataCollatorForSharedQuestion(row_length=40)
    again = make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=data, data_collator=collator)
    assert collator.max_position_embeddings is None
    assert again.data_collator.max_position_embeddings == 64
    loss = one_step(prepared)[0]
    torch.testing.assert_close(one_step(again)[0], loss, rtol=EXACT, atol=EXACT)

    args = SharedQuestionDPOConfig(str(tmp_path), row_length=48, use_cpu=True, bf16=False, report_to="none")
    rowed = SharedQuestionDPOTrainer(
        model_path, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )
    assert next(iter(rowed.get_train_dataloader()))["packed_input_ids"].shape[1] == 48
    with pytest.raises(
        ValueError,
        match="example 1 of the train dataset, as prepared, needs prompt_ids and chosen_ids and rejected_ids",
    ):
        make(SharedQuestionDPOTrainer, model_path, tokenizer, tmp_path, data=[data[0], data[1] | {"chosen_ids": None}])
    with pytest.raises(ValueError, match=r"example 0 of the eval dataset, .* deep, .* 64 positions"):
        prepared.evaluate(Dataset.from_list([data[0] | {"prompt_ids": [5] * 70}]))
