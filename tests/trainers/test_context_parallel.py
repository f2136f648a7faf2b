"""Trainers on rows split over processes: like one process; what does not fit split rows is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from datasets import Dataset
from tools.context_parallel_cases import CASES, GROUPS, LOGGED
from tools.documents import SAME
from tools.parallel_cases import SIZES as SIZES_OF_MODELS
from tools.processes import each_case, left_out, result, run_cases
from tools.split_answers_cases import ANSWERS, EVALUATIONS, IN_ONE_ROW, OF_FOUR, ONE_ROW, STREAMS, pairs
from tools.support import rounding
from tools.tiny import TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, Lfm2Config, MixtralConfig
from trl import SFTConfig

from flashmask_hf import trainers
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.trainers import PackedSFTTrainer, SharedQuestionDPOConfig, SharedQuestionDPOTrainer
from flashmask_hf.trainers.context_parallel import ContextParallelMixin, pad_for_parts

pytestmark = TRAINER_WARNINGS

SIZES = (1, 2, 4)


FULL = {"compiled", "uninterrupted", "resumed", "weighed", "full-4", *IN_ONE_ROW, *STREAMS}
FULL |= {*ANSWERS} - {"dpo", "reward"}
"""Cases, and a case in groups of 4, that make test leaves out."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, run_folder: Path) -> dict[Any, Any]:
    module = "tools.split_answers_cases"
    return {"folder": run_folder / module, **run_cases(run_folder, module, SIZES, left_out(request, FULL))}


STEP, LEARNING_RATE, CLIPPED = 512, 0.5, 0.3
"""Tokens of a step, whose losses and gradients add up; a step moves the weights by at most 0.5 * 0.3."""


COMPARED = [(4, "full")] + [(2, name) for name in CASES if 1 in GROUPS[name] and name != "prefixes"]


@pytest.mark.parametrize(("size", "name"), each_case(COMPARED, FULL))
def test_training_is_that_of_one_process(found, size, name):
    want, got = result(found, 1, name), result(found, size, name)
    assert (want["sharded"], got["sharded"]) == ("Parameter", "DTensor")
    bound = rounding(STEP)
    for key in {*LOGGED} - {"tokens_per_second"}:
        assert got[key] == pytest.approx(want[key], rel=bound), key
    assert got["num_tokens"][-1] == got["num_input_tokens_seen"][-1]
    steps = {"full": 4, "adapter": 3}.get(name, 2)
    assert len(got["loss"]) == {"adapter": 1}.get(name, steps)
    assert len(got["eval_loss"]) == {"full": 2, "tensor parallel": 1, "weighed": 1}.get(name, 0)
    assert min(want["grad_norm"]) > CLIPPED
    assert max(want["grad_norm"]) > 1.0
    one, several = (torch.load(found["folder"] / f"{name}-{x}.pt") for x in (1, size))
    assert one.keys() == several.keys()
    for key, weight in one.items():
        stored = torch.finfo(weight.dtype).eps * weight.norm()  # of the last step's sum of weight and change
        assert (several[key] - weight).norm() <= steps * (bound * LEARNING_RATE * CLIPPED + stored)


@pytest.mark.parametrize(
    ("size", "name"), each_case([(4, x) for x in (*OF_FOUR, *IN_ONE_ROW)] + [(2, x) for x in ANSWERS], FULL)
)
def test_trainers_of_answers_are_those_of_one_process(found, size, name):
    base = name.removesuffix(ONE_ROW)
    want, got = result(found, 1, base), result(found, size, name)
    assert (want["sharded"], got["sharded"]) == ("Parameter", "DTensor")
    scales = {name: max(map(abs, want.get(name) or [0])) for name in ("loss", "logps/chosen")}
    for key in want.keys() - {"sharded", "seconds", "learning_rate"}:
        scale = scales["logps/chosen" if "rewards/" in key else "loss"]  # of the terms of differences near 0
        assert got[key] == pytest.approx(want[key], rel=rounding(STEP), abs=rounding(STEP) * scale), key
    assert len(got["loss"]) == 2
    assert len(got["grad_norm"]) == 2
    assert len(got["eval_loss"]) == EVALUATIONS.get(base, 0)
    one, several = (torch.load(found["folder"] / f"{x}.pt") for x in (f"{base}-1", f"{name}-{size}"))
    assert one.keys() == several.keys()
    moved = 2 * want["learning_rate"] * min(max(want["grad_norm"]), 1.0)
    for key, weight in one.items():
        stored = 2 * torch.finfo(weight.dtype).eps * weight.norm()
        assert (several[key] - weight).norm() <= rounding(STEP) * moved + stored, key


@pytest.mark.full
@pytest.mark.parametrize("name", STREAMS)
def test_streams_in_two_groups_are_those_of_one_process(found, name):
    want, got = result(found, 1, name), result(found, 4, name)
    compared = {key for key in want if key.startswith("eval_")} - {"eval_mask_sparsity"}  # of one rank's batch
    compared |= want.keys() & {"loss", "grad_norm", "num_tokens", "num_input_tokens_seen", "predicted"}
    scale = max(map(abs, want["loss"]))
    for key in compared:  # metrics of training average two groups' rows, and one process's batches
        assert got[key] == pytest.approx(want[key], rel=rounding(STEP), abs=rounding(STEP) * scale), key
    assert len(got["loss"]) == len(got["eval_loss"]) == (1 if name == "sft stream" else 2)


def test_shared_prefixes_on_split_rows_are_stock(found):
    want, got = result(found, 1, "prefixes"), result(found, 2, "prefixes")
    assert (want["rows"], got["rows"]) == (16, 4)
    for key in SAME:
        assert got[key] == pytest.approx(want[key], rel=rounding(STEP)), key


@pytest.mark.full
def test_a_resumed_run_is_the_uninterrupted_one(found):
    """To the bit: weights, and all that is logged; AdamW would enlarge whatever of its state is not restored."""
    whole, got = result(found, 2, "uninterrupted"), result(found, 2, "resumed")
    assert len(whole["loss"]) == 4
    for key in whole.keys() - {"seconds", "tokens_per_second", "train_loss"}:  # the loss of the steps of the call
        assert got[key] == whole[key], key
    weights, others = (torch.load(found["folder"] / f"{name}-2.pt") for name in ("uninterrupted", "resumed"))
    assert weights.keys() == others.keys()
    for key, weight in weights.items():
        assert torch.equal(others[key], weight), key


def test_rows_are_predicted_once(found):
    want = result(found, 1, "tensor parallel")["predicted"]
    assert result(found, 2, "tensor parallel")["predicted"] == pytest.approx(want, rel=rounding(STEP))


@pytest.mark.parametrize(("size", "name"), each_case([(2, "full"), (4, "full"), (2, "tensor parallel")], FULL))
def test_tokens_are_counted_once(found, size, name):
    """The clock goes on by one second a log, so tokens per second are tokens."""
    assert result(found, size, name)["tokens_per_second"] == result(found, 1, name)["tokens_per_second"]


SPLIT = ParallelismConfig(cp_size=2)

HEADS = SIZES_OF_MODELS | {"num_attention_heads": 8, "num_key_value_heads": 4}


class Unlaunched:
    """Mixin of a trainer of which everything but the launch is as with two processes."""

    def create_accelerator_and_postprocess(self) -> None:
        args: Any = self.args
        config, args.parallelism_config = args.parallelism_config, None
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            args.parallelism_config = config


class SplitTrainer(Unlaunched, PackedSFTTrainer):
    pass


class SplitDPOTrainer(Unlaunched, SharedQuestionDPOTrainer):
    pass


def trainer_of(tmp_path: Any, model: Any = None, args: dict[str, Any] | None = None, **options: Any) -> SplitTrainer:
    if model is None:
        model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
    settings = {"max_length": 64, "parallelism_config": SPLIT, **(args or {})}
    return SplitTrainer(
        model,
        SFTConfig(**trainer_settings(tmp_path) | settings),
        train_dataset=Dataset.from_dict({"text": ["w9 w10 w11 w12 w13"] * 8}),
        processing_class=word_tokenizer(),
        **options,
    )


def moe() -> Any:
    config = MixtralConfig(**HEADS, num_local_experts=2, output_router_logits=True)
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")


def recurrent() -> Any:
    config = Lfm2Config(**HEADS, layer_types=["conv", "full_attention"])
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")


def with_attention(name: str) -> Any:
    return AutoModelForCausalLM.from_config(llama_config(), attn_implementation=name)


LONGROPE = {"rope_type": "longrope"}


def with_rope(parameters: dict[str, Any]) -> Any:
    """Return a model whose config says that its rotary positions are others; it is not run."""
    model = with_attention("flashmask")
    model.config.rope_parameters = parameters
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"packing": True}}, "rows that TRL packs have no mask indices"),
        ({"args": {"padding_free": True}}, "rows that TRL packs have no mask indices"),
        ({"args": {"average_tokens_across_devices": False}}, "average_tokens_across_devices=False"),
        ({"args": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor is not implemented"),
        ({"args": {"pad_to_multiple_of": 7}}, "pad_to_multiple_of=7 must be a multiple of cp_size=2, best of 256"),
        ({"compute_metrics": len}, "compute_metrics would get one shard of each row"),
        ({"compute_loss_func": len}, "compute_loss_func would get one shard of each row"),
        ({"model": lambda: with_attention("sdpa")}, "the model's attention is 'sdpa'"),
        ({"model": lambda: with_attention("flashmask_hash")}, "the model's attention is 'flashmask_hash'"),
        ({"model": recurrent}, "Lfm2ForCausalLM has recurrent or convolutional layers"),
        ({"model": lambda: with_rope(LONGROPE)}, "rope_type='longrope' depends .*cp_size=1"),
        ({"model": lambda: with_rope({"rope_type": "dynamic"})}, "rope_type='dynamic' depends"),
        (
            {"model": lambda: with_rope({"sliding_attention": {"rope_type": "default"}, "full_attention": LONGROPE})},
            "rope_type='longrope' depends",
        ),
        ({"model": moe}, "the auxiliary loss of a mixture of experts .* router_aux_loss_coef=0 in the trainer's arg"),
        (
            {"args": {"parallelism_config": ParallelismConfig(sp_size=2)}},
            "sp_size > 1: accelerate's .* use cp_size",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_split_rows_is_refused(tmp_path, options, message):
    options = {key: value() if key == "model" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options)


def test_rows_are_padded_to_whole_tiles_of_each_part(tmp_path):
    assert trainer_of(tmp_path).data_collator.pad_to_multiple_of == 256
    assert trainer_of(tmp_path, args={"pad_to_multiple_of": 64}).data_collator.pad_to_multiple_of == 64
    rows = DataCollatorForPackedLanguageModeling(max_length=64)
    assert pad_for_parts(rows, 2) is rows
    with pytest.raises(ValueError, match="max_length=63 must be a multiple of cp_size=2"):
        pad_for_parts(DataCollatorForPackedLanguageModeling(max_length=63), 2)


def test_the_hooks_of_accelerate_are_left_out(tmp_path):
    accelerator: Any = trainer_of(tmp_path).accelerator
    model = with_attention("flashmask")
    assert accelerator._prepare_cp(model) == (model,)
    assert not any(part._forward_pre_hooks for part in model.modules() if "Attention" in type(part).__name__)


def test_predictions_of_parts_and_batches_without_vectors_are_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="predictions would be of shards of rows"):
        trainer.prediction_step(trainer.model, {}, prediction_loss_only=False)
    with pytest.raises(ValueError, match="the batch has no startend_row_indices"):
        trainer._prepare_context_parallel_inputs(trainer.model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)})


def test_the_launcher_configures_it_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match="rows that TRL packs have no mask indices"):
        trainer_of(tmp_path, args={"parallelism_config": None, "packing": True})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("CP_SIZE", "cp_size > 1 .*: each rank generates its own completions, .*set cp_size=1"),
        ("SP_SIZE", "sp_size > 1: accelerate's sequence parallelism takes no mask indices"),
    ],
)
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_that_generate_refuse_it(tmp_path, monkeypatch, name, setting, message):
    settings = {key: value for key, value in trainer_settings(tmp_path).items() if "batch_size" not in key}
    trainer, config = (getattr(trainers, f"SharedPrompt{name}{part}") for part in ("Trainer", "Config"))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{setting}", "2")
    data = Dataset.from_dict({"prompt": ["w5"]})
    with pytest.raises(ValueError, match=message):
        trainer(with_attention("flashmask"), len, config(**settings), train_dataset=data)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({"use_liger_kernel": True}, {}, "use_liger_kernel is not tested on split rows"),
        ({}, {"compute_metrics": len}, "compute_metrics would get shards of rows"),
        ({"pad_to_multiple_of": 7}, {}, "pad_to_multiple_of=7 must be a multiple of cp_size=2"),
        ({"row_length": 65}, {}, "row_length=65 must be a multiple of cp_size=2"),
        ({}, {"model": lambda: with_rope(LONGROPE)}, "rope_type='longrope' depends"),
        ({}, {"model": moe}, "the auxiliary loss of a mixture of experts"),
    ],
)
@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True`:FutureWarning")
def test_what_does_not_fit_split_answers_is_refused(tmp_path, args, options, message):
    with pytest.raises(ValueError, match=message):
        split_dpo(tmp_path, args, **options)


def split_dpo(tmp_path: Any, args: dict[str, Any], model: Any = lambda: with_attention("flashmask"), **options: Any):
    settings = {"parallelism_config": SPLIT, **trainer_settings(tmp_path), **args}
    return SplitDPOTrainer(
        model(),
        model(),
        SharedQuestionDPOConfig(**settings),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
        **options,
    )


def test_answers_rows_are_padded_and_predictions_refused(tmp_path):
    trainer = split_dpo(tmp_path, {})
    assert trainer.data_collator.pad_to_multiple_of == 256
    assert split_dpo(tmp_path, {"row_length": 64}).data_collator.pad_to_multiple_of is None
    batch = trainer.data_collator(pairs().to_list()[:2])
    with pytest.raises(ValueError, match="predictions would be of shards of rows; predict with cp_size=1"):
        trainer.compute_loss(trainer.model, batch, return_outputs=True)


def test_copies_of_pairs_under_tensor_parallelism_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(SplitDPOTrainer, "get_tp_size", lambda self: 2)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    trainer = split_dpo(tmp_path, {"parallelism_config": None})
    assert "gather_for_metrics" in vars(trainer.accelerator)  # in place of accelerate's, which cuts copies as if rows


def test_without_context_parallelism_nothing_changes(tmp_path):
    trainer = trainer_of(tmp_path, args={"parallelism_config": None})
    assert trainer._cp_size == 1
    assert trainer._counts_rows
    assert trainer.data_collator.pad_to_multiple_of is None
    assert "_prepare_cp" not in vars(trainer.accelerator)
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    assert trainer._prepare_context_parallel_inputs(trainer.model, inputs)[1] is inputs
    assert ContextParallelMixin in type(trainer).__mro__
