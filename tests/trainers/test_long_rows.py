"""Rows are measured before the first step, made to fit, or refused; training is as without it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.support import record_passes, requires
from tools.tiny import CHECKPOINTING, FLOAT32, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig

from flashmask_hf.trainers import LongRows, PackedSFTTrainer, long_rows_callback

pytestmark = [
    *TRAINER_WARNINGS,
    # torch and transformers, of the old names of transformers 5.23
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]

LAYERS, HIDDEN, LENGTH = 2, 32, 48
BY_HAND = {"tile_tokens": 16, "keep_attention": True, "host_gib": 1.0}
FIXED, WORKING = 10_000.0, 100.0  # of the pretended GPU: bytes, and bytes a token
CHECKPOINTS = LAYERS * HIDDEN * 4  # bytes a token
KEPT = CHECKPOINTS + LAYERS * 4 * 4  # attention's output is as wide, and a log-sum-exp for each of four heads


def make_trainer(
    path,
    *,
    dropout=0.0,
    adapter=False,
    config=None,
    documents=60,
    dtype=torch.float32,
    attention="flashmask",
    **changes,
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or llama_config(), attn_implementation=attention, dtype=dtype)
    settings = trainer_settings(path) | {CHECKPOINTING: True, "max_steps": 3, "max_length": LENGTH}
    settings |= {"per_device_train_batch_size": 1, **changes}
    rows = Dataset.from_dict({"text": [" ".join(f"w{3 + (i * j) % 60}" for j in range(9)) for i in range(documents)]})
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return PackedSFTTrainer(
        model,
        SFTConfig(**settings),
        train_dataset=rows,
        processing_class=word_tokenizer(),
        peft_config=lora if adapter else None,
    )


def log_of(trainer):
    """Train, and return the logs without times."""
    trainer.train()
    timed = ("tokens_per_second", "runtime", "samples_per_second", "steps_per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history]


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Pretend a GPU on which a step takes FIXED bytes and WORKING a token; call it with the sizes of GPU and host."""
    lasts = []
    run = LongRows._run
    monkeypatch.setattr(LongRows, "_run", lambda self, tokens: lasts.append(tokens) or run(self, tokens))
    monkeypatch.setattr(LongRows, "_peak_of", lambda self, tokens: self._run(tokens) or FIXED + WORKING * tokens)
    monkeypatch.setattr(long_rows_callback, "obstacle_to_measuring", lambda trainer: None)
    monkeypatch.setattr(long_rows_callback, "_bytes_of_trained", lambda model: 0)
    monkeypatch.setattr(
        long_rows_callback, "offload_checkpoints", partial(long_rows_callback.offload_checkpoints, min_bytes=1)
    )

    def size(gpu, host):
        monkeypatch.setattr(long_rows_callback, "available_gpu_bytes", lambda: gpu)
        monkeypatch.setattr(long_rows_callback, "available_host_bytes", lambda: host)
        return lasts

    return size


@pytest.mark.parametrize("settings", [{"adapter": False}, {"adapter": True}, {"adapter": True, "dropout": 0.2}])
def test_training_is_the_same(tmp_path, settings, pretend_gpu):
    """Measured, and by hand: the same losses, metrics, counts and random numbers."""
    pretend_gpu(gpu=FIXED + WORKING * LENGTH, host=1e9)
    plain = log_of(make_trainer(tmp_path, **settings))
    logs = []
    for options in ({"tile_tokens": 0}, {"tile_tokens": 0, "keep_attention": True, "host_gib": 1}):
        trainer = make_trainer(tmp_path, **settings)
        trainer.add_callback(LongRows(trainer, **options))
        logs.append(log_of(trainer))
    assert logs == [plain, plain]


@pytest.mark.usefixtures("float64")
def test_tiles_change_the_rounding_only(tmp_path):
    plain = log_of(make_trainer(tmp_path, adapter=True, dtype=torch.float64))
    trainer = make_trainer(tmp_path, adapter=True, dtype=torch.float64)
    trainer.add_callback(LongRows(trainer, **BY_HAND))
    tiled = log_of(trainer)
    assert len(tiled) == len(plain) == 4
    for entry, want in zip(tiled, plain, strict=True):
        assert entry == pytest.approx(want, rel=FLOAT32)


NEEDED = FIXED + WORKING * LENGTH


@pytest.mark.parametrize(
    ("gpu", "host", "kept", "host_bytes"),
    [
        (NEEDED + KEPT * LENGTH + CHECKPOINTS * LENGTH, 0, True, 0),
        (NEEDED, 1e9, True, (KEPT + CHECKPOINTS) * LENGTH),
        (NEEDED, (KEPT + CHECKPOINTS) * LENGTH, True, (KEPT + CHECKPOINTS) * LENGTH),
        (NEEDED, (KEPT + CHECKPOINTS) * LENGTH - 1, False, CHECKPOINTS * LENGTH),
        (NEEDED + 500, CHECKPOINTS * LENGTH, False, CHECKPOINTS * LENGTH - 500),
    ],
)
def test_what_fits_is_chosen(tmp_path, gpu, host, kept, host_bytes, pretend_gpu, capsys):
    lengths = pretend_gpu(gpu, host)
    trainer = make_trainer(tmp_path)
    rows = LongRows(trainer)
    trainer.add_callback(rows)
    trainer.train()
    assert (rows.kept, rows.host_bytes) == (kept, pytest.approx(host_bytes, abs=1))
    assert lengths == [LENGTH // 2, LENGTH // 2, LENGTH] * (1 if kept else 2)
    said = capsys.readouterr().out
    assert f"Batches of {LENGTH} tokens" in said
    assert ("attention's results are kept" if kept else "attention is computed again") in said


@pytest.mark.parametrize(
    ("gpu", "host", "longest"),
    [(FIXED - 1, 1e9, 0), (FIXED + WORKING * 40, 1e9, 40), (NEEDED, CHECKPOINTS * 40, 42)],
)
def test_rows_that_do_not_fit_are_refused_before_the_first_step(tmp_path, gpu, host, longest, pretend_gpu):
    pretend_gpu(gpu, host)
    trainer = make_trainer(tmp_path)
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    rows = LongRows(trainer)
    trainer.add_callback(rows)
    with pytest.raises(ValueError, match=f"max_length: a step of {LENGTH} tokens .* fits has {longest} tokens"):
        trainer.train()
    assert rows.longest == longest
    assert trainer.state.global_step == 0
    assert all(x.grad is None for x in trainer.model.parameters())
    for name, x in trainer.model.state_dict().items():
        assert torch.equal(x, before[name])


def test_what_is_set_by_hand_is_not_measured(tmp_path, pretend_gpu):
    lengths = pretend_gpu(NEEDED, 1e9)
    trainer = make_trainer(tmp_path)
    rows = LongRows(trainer, keep_attention=False)
    trainer.add_callback(rows)
    trainer.train()
    assert (rows.kept, rows.host_bytes) == (False, CHECKPOINTS * LENGTH)
    assert len(lengths) == 3


def test_results_of_another_attention_are_not_kept(tmp_path, pretend_gpu, capsys):
    pretend_gpu(NEEDED, 1e9)
    trainer = make_trainer(tmp_path, attention="eager", max_steps=1)
    rows = LongRows(trainer)
    trainer.add_callback(rows)
    trainer.train()
    assert (rows.kept, rows.host_bytes) == (False, CHECKPOINTS * LENGTH)
    assert "attention is computed again" in capsys.readouterr().out


def test_processes_agree_on_the_worst_figures(tmp_path, pretend_gpu, monkeypatch):
    """Two processes, of which the other one has a smaller GPU, a smaller host and needs more memory."""
    pretend_gpu(gpu=NEEDED + KEPT * LENGTH + CHECKPOINTS * LENGTH, host=1e9)
    trainer = make_trainer(tmp_path)
    rows = LongRows(trainer)
    trainer.add_callback(rows)
    other = [FIXED + 7, WORKING + 1, CHECKPOINTS, -NEEDED - 200, -1e6]
    gather = trainer.accelerator.gather
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer.accelerator,
            "gather",
            lambda x: torch.cat([x, x.new_tensor([other])]) if x.dtype == torch.float64 else gather(x),
        )
        trainer.train()
    assert rows.host_bytes == pytest.approx((KEPT + CHECKPOINTS + 1) * LENGTH + 7 - 200, abs=1)
    assert rows.longest == int((NEEDED + 200 - FIXED - 7) / (WORKING + 1))


def test_attention_runs_once_a_layer(tmp_path, monkeypatch):
    passes, counts = record_passes(monkeypatch), []
    for kept in (False, True):
        trainer = make_trainer(tmp_path, max_steps=1)
        trainer.add_callback(LongRows(trainer, **BY_HAND | {"keep_attention": kept}))
        passes.clear()
        trainer.train()
        counts.append(passes.count("forward"))
    assert counts == [2 * LAYERS, LAYERS]


class Interrupt(TrainerCallback):
    """Raises once, after the first step."""

    def __init__(self, error):
        self.errors = [error]

    def on_step_end(self, *args, **kwargs):
        if self.errors:
            raise self.errors.pop()


def test_a_run_that_was_interrupted_starts_again(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(LongRows(trainer, **BY_HAND))
    trainer.add_callback(Interrupt(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    another = PackedSFTTrainer(
        trainer.model, trainer.args, train_dataset=trainer.train_dataset, processing_class=trainer.processing_class
    )
    another.add_callback(LongRows(another, **BY_HAND))
    with pytest.raises(ValueError, match=r"offloaded already.*train\(\) of the same trainer, or load the model again"):
        another.train()
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_batch_size_that_is_found_counts(tmp_path, capsys):
    trainer = make_trainer(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=2)
    trainer.add_callback(LongRows(trainer, **BY_HAND))
    trainer.add_callback(Interrupt(torch.OutOfMemoryError("CUDA out of memory.")))
    trainer.train()
    said = capsys.readouterr().out
    assert said.index(f"Batches of {2 * LENGTH} tokens") < said.index(f"Batches of {LENGTH} tokens")


def test_a_callback_of_another_trainer_raises_before_the_first_step(tmp_path):
    trainer, another = make_trainer(tmp_path), make_trainer(tmp_path)
    another.add_callback(LongRows(trainer, **BY_HAND))
    with pytest.raises(ValueError, match=r"made for another trainer.*add LongRows\(trainer\)"):
        another.train()
    assert "forward" not in vars(trainer.model.model.layers[0].mlp)
    assert another.state.global_step == 0


def test_another_trainer_is_refused(tmp_path):
    trainer = Trainer(make_trainer(tmp_path).model, TrainingArguments(tmp_path, use_cpu=True))
    with pytest.raises(TypeError, match="trainer must be a PackedSFTTrainer, got Trainer; for others use tile_tok"):
        LongRows(trainer, **BY_HAND)


def test_adapters_in_float32_on_a_model_in_16_bits_run_outside_autocast(tmp_path):
    """`generate` runs without the trainer's autocast, as in an evaluation or after the training."""
    trainer = make_trainer(tmp_path, adapter=True, dtype=torch.bfloat16, bf16=True)
    trainer.add_callback(LongRows(trainer, **BY_HAND))
    trainer.train()
    model = trainer.model.get_base_model()
    ids = torch.tensor([[3, 4, 5]])
    assert model.generate(ids, max_new_tokens=2, min_new_tokens=2).shape == (1, 5)
    adapted = next(module for module in model.modules() if hasattr(module, "cast_input_dtype_enabled"))
    x = torch.ones(2, adapted.in_features, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert adapted._cast_input_dtype(x, torch.float32) is x


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {}, "memory is measured on a GPU, and this trains on none; set keep_attention and host_gib by hand"),
        ({CHECKPOINTING: False}, BY_HAND, f"host_gib need {CHECKPOINTING}=True"),
        ({f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}, BY_HAND, "without use_reentrant"),
        ({"attention": "sdpa"}, BY_HAND, "keep_attention needs attn_implementation='flashmask', .* has 'sdpa'"),
    ],
)
def test_wrong_settings(tmp_path, settings, options, message):
    trainer = make_trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        LongRows(trainer, **options)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"tile_tokens": -5}, ValueError, "tile_tokens must be at least 0, got -5; 0 is no tiles"),
        ({"tile_tokens": 8192.0}, TypeError, r"tile_tokens must be an int, got 8192\.0"),
        ({"tile_tokens": True}, TypeError, "tile_tokens must be an int, got True"),
        ({"host_gib": -1}, ValueError, "host_gib must be finite and at least 0, or None to measure, got -1"),
        ({"host_gib": float("inf")}, ValueError, "host_gib must be finite .* got inf"),
        ({"host_gib": "3"}, TypeError, "host_gib must be a number, or None to measure, got '3'"),
        ({"host_gib": True}, TypeError, "host_gib must be a number, or None to measure, got True"),
        ({"keep_attention": "no"}, TypeError, "keep_attention must be True or False, got 'no'"),
    ],
)
def test_wrong_options(tmp_path, option, error, message):
    with pytest.raises(error, match=message):
        LongRows(make_trainer(tmp_path), **BY_HAND | option)


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"
)  # torch
@pytest.mark.parametrize("adapter", [False, True])
def test_a_measured_budget_holds(tmp_path, adapter, monkeypatch):
    """On a GPU that is pretended to have room for half of the checkpoints, half goes to the host, and the rest fits."""
    requires("gpu")
    length = 65_536
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": length}
    trainer = make_trainer(
        tmp_path,
        adapter=adapter,
        config=llama_config(**wide),
        documents=15_000,
        max_length=length,
        max_steps=2,
        use_cpu=False,
        bf16=True,
    )
    rows, seen = LongRows(trainer, keep_attention=True), []
    measure = rows._memory_of_a_step
    monkeypatch.setattr(rows, "_memory_of_a_step", lambda: seen.append(measure()) or seen[0])

    def size():
        return seen[0].fixed + length * (seen[0].working + seen[0].stored / 2)

    monkeypatch.setattr(long_rows_callback, "available_gpu_bytes", size)
    trainer.add_callback(rows)
    trainer.train()
    assert rows.host_bytes == pytest.approx(length * seen[0].stored / 2, rel=0.01)
    assert torch.cuda.max_memory_allocated() < size()
