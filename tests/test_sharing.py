"""Common beginnings computed once: outputs and gradients are the batch's, in every form that trainers pass."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import trl.trainer.kto_trainer  # noqa: F401  whose chunked head `float64` changes, if it is imported
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tools import model_zoo
from tools.model_pairs import SIZES, NoSynchronization, model_pair
from tools.processes import result, run_cases
from tools.support import requires
from tools.tiny import CHECKPOINTING, FLOAT32, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from tools.vision import tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DynamicCache,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

import flashmask_hf
from flashmask_hf.hf.call import Call
from flashmask_hf.hf.models import state_of
from flashmask_hf.hf.rewrites import rewrite
from flashmask_hf.names import PACKED_INDEX
from flashmask_hf.sharing import _pack

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

IGNORED = -100
BOUND = 1e-12
"""Largest error in float64, relative to the largest entry (at least 1)."""


def sequences(prompts: int = 3, answers: tuple[int, ...] = (3, 5, 1, 4), prompt: int = 7) -> list[torch.Tensor]:
    """Draw prompts with answers of some lengths; two answers of a prompt are equal, one starts as another."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(prompts):
        first = torch.randint(2, 48, (prompt,), generator=draw)
        drawn = [torch.randint(2, 48, (count,), generator=draw) for count in answers]
        found += [torch.cat([first, own]) for own in (*drawn, drawn[0], torch.cat([drawn[0], drawn[1]]))]
    return found


def padded(rows: list[torch.Tensor], left: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch as a padding collator makes it, with labels after each sequence's first token."""
    width = max(map(len, rows)) + 1
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, own in enumerate(rows):
        start = width - len(own) if left else 0
        ids[row, start : start + len(own)], mask[row, start : start + len(own)] = own, 1
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), IGNORED)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def both_sides(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch as reinforcement learning makes it: prompts padded on the left, answers on the right."""
    rows = [own[row % 3 :] for row, own in enumerate(rows)]
    width = 5 + max(map(len, rows))
    batch = padded([torch.zeros(width - 1, dtype=torch.int64)] * len(rows))
    for row, own in enumerate(rows):
        place = slice(2 + row % 3, 2 + row % 3 + len(own))
        batch["input_ids"][row, place] = own
        batch["attention_mask"][row] = 0
        batch["attention_mask"][row, place] = 1
    starts = batch["attention_mask"].cumsum(1) == 1
    hidden = (batch["attention_mask"] == 0) | starts
    return batch | dict(labels=batch["input_ids"].masked_fill(hidden, IGNORED))


def flat(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(own)) for own in rows])
    ids = torch.cat(rows)
    labels = ids.masked_fill(positions == 0, IGNORED)
    return {name: x[None] for name, x in dict(input_ids=ids, position_ids=positions, labels=labels).items()}


def numbered(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return two flat rows of padded documents whose 2D mask numbers them."""
    halves = [flat(rows[: len(rows) // 2]), flat(rows[len(rows) // 2 :])]
    width = max(half["input_ids"].shape[1] for half in halves) + 2
    batch = {
        name: torch.cat([torch.nn.functional.pad(x[name], (0, width - x[name].shape[1]), value=fill) for x in halves])
        for name, fill in (("input_ids", 0), ("position_ids", 0), ("labels", IGNORED))
    }
    numbers = (batch["position_ids"] == 0).cumsum(1)
    for row, half in enumerate(halves):
        numbers[row, half["input_ids"].shape[1] :] = 0
    return batch | dict(attention_mask=numbers)


def as_open_rlhf(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch padded on the left whose padding has position 1."""
    batch = padded(rows, left=True)
    real = batch["attention_mask"]
    return batch | dict(position_ids=(real.cumsum(1) - 1).masked_fill(real == 0, 1))


def bounded(rows: list[torch.Tensor]) -> dict[str, Any]:
    bounds = torch.tensor([0, *(len(own) for own in rows)]).cumsum(0).to(torch.int32)
    longest = max(map(len, rows))
    return flat(rows) | dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)


FORMS = {
    "padded on the right": padded,
    "padded on the left": lambda rows: padded(rows, left=True),
    "padded on both sides": both_sides,
    "without a mask": lambda rows: {name: padded(rows)[name] for name in ("input_ids", "labels")},
    "flat": flat,
    "flat, numbered and padded": numbered,
    "flat, with bounds": bounded,
    "padded as OpenRLHF": as_open_rlhf,
    "padded, one row of positions": lambda rows: (
        padded(rows) | dict(position_ids=torch.arange(padded(rows)["input_ids"].shape[1])[None])
    ),
}


def compare(shared: Any, stock: Any, batch: dict[str, Any]) -> None:
    """Compare loss, logits where there is no padding, and gradients."""
    found, expected = shared(**batch), stock(**batch)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
    torch.testing.assert_close(found.loss, expected.loss, rtol=BOUND, atol=BOUND)
    scale = max(1.0, expected.logits.detach().abs().max().item())
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=0, atol=BOUND * scale)
    trained = [(name, x) for name, x in stock.named_parameters() if x.requires_grad]
    others = dict(shared.named_parameters())
    gradients = torch.autograd.grad(expected.loss, [x for _, x in trained], allow_unused=True)
    ours = torch.autograd.grad(found.loss, [others[name] for name, _ in trained], allow_unused=True)
    for (name, _), one, two in zip(trained, ours, gradients, strict=True):
        assert (one is None) == (two is None), name
        if two is not None:
            atol = BOUND * max(1.0, two.abs().max().item())
            torch.testing.assert_close(one, two, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def shared_pair(name: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return a model that shares prefixes, and the same without, which packs and pads as flashmask does."""
    shared = model_pair(name, **changes)[0].double()
    if name == "gpt_oss":
        shared.set_experts_implementation("eager")  # torch's grouped product takes no float64
    stock = copy.deepcopy(shared)
    flashmask_hf.share_prefixes(shared)
    _pack.cache_clear()
    return shared, stock


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch(form):
    shared, stock = shared_pair()
    batch = FORMS[form](sequences())
    compare(shared, stock, batch)
    assert _pack.cache_info().misses == 1
    assert shared(**batch).past_key_values is None
    assert _pack.cache_info()[:2] == (1, 1)  # a second forward of a batch packs nothing


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_on_a_gpu(model, dtype):
    """Gradients are as near to those in float64 as without sharing."""
    requires("gpu")
    shared, stock = shared_pair(model)
    batch = both_sides(sequences(prompts=5, answers=(30, 50, 11, 44), prompt=150))

    def gradients(model, device, dtype):
        model = copy.deepcopy(model).to(device, dtype)
        model(**{name: x.to(device) for name, x in batch.items()}).loss.backward()
        return torch.cat([x.grad.flatten().double().cpu() for x in model.parameters() if x.grad is not None])

    exact = gradients(stock, "cpu", torch.float64)
    ours, others = (gradients(one, "cuda", dtype) for one in (shared, stock))
    assert _pack.cache_info().misses == 1
    assert 0 < (others - exact).norm() < 0.2 * exact.norm()
    assert (ours - exact).norm() < 2 * (others - exact).norm() + 1e-5 * exact.norm()


@pytest.mark.parametrize("model", ["mistral", "gemma2", "gpt_oss"])
def test_windows_softcaps_sinks_and_experts(model):
    shared, stock = shared_pair(model)
    compare(shared, stock, padded(sequences()))
    assert _pack.cache_info().misses == 1


def test_a_loss_of_routers_counts_the_tokens_of_the_batch():
    experts: dict[str, Any] = dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True
    )
    config = Qwen3MoeConfig(**SIZES, **experts)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").double()
    stock.set_experts_implementation("eager")
    shared = copy.deepcopy(stock)
    flashmask_hf.share_prefixes(shared)
    compare(shared, stock, padded(sequences()))


def test_adapters_checkpointing_hidden_states_and_logits_to_keep():
    shared, stock = (
        get_peft_model(model_pair("llama")[0], LoraConfig(init_lora_weights=False, lora_dropout=0.0)).double()
        for _ in "12"
    )
    stock.load_state_dict(shared.state_dict())
    flashmask_hf.share_prefixes(shared)
    shared.get_base_model().gradient_checkpointing_enable()  # type: ignore[operator]
    shared.train()
    _pack.cache_clear()
    batch = padded(sequences())
    compare(shared, stock, batch)
    assert _pack.cache_info().misses == 1
    kept = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    found, expected = (
        model(**kept, logits_to_keep=9, output_hidden_states=True, use_cache=False) for model in (shared, stock)
    )
    real = batch["attention_mask"] == 1
    torch.testing.assert_close(found.logits[real[:, -9:]], expected.logits[real[:, -9:]], rtol=0, atol=BOUND)
    for one, two in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one[real], two[real], rtol=0, atol=4 * BOUND)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")  # torch 2.11
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["layers", "model"])
def test_compiled(whole):
    shared, stock = shared_pair()
    for part in [shared] if whole else shared.model.layers:
        part.compile(backend="eager")
    compare(shared, stock, padded(sequences()))
    assert _pack.cache_info().misses == 1


def test_what_is_not_shared_runs_as_before():
    shared, stock = shared_pair()
    batch = padded(sequences())
    ids, mask, n = batch["input_ids"], batch["attention_mask"], batch["input_ids"].shape[1]
    holes = mask.clone()
    holes[:, 3] = 0
    column = torch.arange(n)
    jumping = (column + 6 * (column > 3)).expand_as(ids)
    cases: dict[str, dict[str, Any]] = {
        "nothing in common": dict(input_ids=torch.randperm(48).view(4, 12)),
        "a cache": dict(input_ids=ids, attention_mask=mask, use_cache=True),
        "a tensor of each token": dict(input_ids=ids, attention_mask=mask, token_type_ids=0 * ids),
        "embeddings": dict(inputs_embeds=stock.get_input_embeddings()(ids), attention_mask=mask),
        "a mask with holes": dict(input_ids=ids, attention_mask=holes),
        "positions that jump": dict(input_ids=ids, position_ids=jumping),
        "no token": dict(input_ids=ids, attention_mask=0 * mask),
        "one column": dict(input_ids=ids[:, :1]),
        "indices": dict(input_ids=ids, startend_row_indices=torch.full((len(ids), 1, n, 1), n, dtype=torch.int32)),
    }
    for name, arguments in cases.items():
        assert torch.equal(shared(**arguments).logits, stock(**arguments).logits), name
    assert _pack.cache_info().misses == 1  # nothing in common
    arguments = [dict(past_key_values=DynamicCache()), dict(return_dict=False), dict(attention_mask=mask.repeat(1, 2))]
    for given in ({}, *arguments):
        assert is_shared(shared, input_ids=ids, **given) == (not given), given
    generated = [m.generate(ids[:, :5], max_new_tokens=4, do_sample=False) for m in (shared, stock)]
    assert torch.equal(*generated)


def test_dropout_warns_and_runs_as_before(caplog):
    model = get_peft_model(model_pair("llama")[0], LoraConfig(lora_dropout=0.1)).double()
    flashmask_hf.share_prefixes(model)
    _pack.cache_clear()
    batch = padded(sequences())
    with caplog.at_level("WARNING", logger="flashmask_hf"):
        model.train()(**batch)
    assert "trains with dropout or noise, so share_prefixes computes no prefix once" in caplog.text
    assert not _pack.cache_info().misses
    model.eval()(**batch)
    assert _pack.cache_info().misses == 1


def rewritten(model: Any, **batch: Any) -> dict[str, Any]:
    """Return the arguments of the backbone for a batch."""
    return rewrite(Call(model.base_model, (), {name: x for name, x in batch.items() if name != "labels"})).named


def is_shared(model: Any, **batch: Any) -> bool:
    return PACKED_INDEX in rewritten(model, **batch)


@pytest.mark.parametrize("name", ["attention_dropout", "layerdrop", "neftune_noise_alpha", "jitter_noise"])
def test_rates_of_dropout_and_noise_are_found_on_modules(name):
    shared, _ = shared_pair()
    batch = padded(sequences())
    setattr(shared.model.embed_tokens, name, 5 if "neftune" in name else 0.1)
    assert not is_shared(shared.train(), **batch)
    assert is_shared(shared.eval(), **batch)
    shared.model.embed_tokens.train()  # alone, as for dropout in evaluation
    assert not is_shared(shared, **batch)
    setattr(shared.model.embed_tokens, name, 0.0)
    assert is_shared(shared.train(), **batch)


def test_rows_are_packed_where_at_least_the_minimum_is_saved():
    """Two rows of ten tokens with five in common, and then one of two tokens of padding less."""
    shared, _ = shared_pair()
    ids = torch.arange(2, 22).view(2, 10)
    ids[1, :5] = ids[0, :5]
    for minimum, shares in ((0.25, True), (0.26, False), (0, True)):
        flashmask_hf.share_prefixes(shared, minimum=minimum)
        assert is_shared(shared, input_ids=ids) == shares
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    flashmask_hf.share_prefixes(shared, minimum=0.35)  # padding counts as saved
    assert is_shared(shared, input_ids=ids, attention_mask=mask)


def test_a_call_waits_for_the_device_once(monkeypatch):
    shared, _ = shared_pair()
    waits, copied = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: waits.append(x.shape) or copied(x))
    for nth, form in enumerate(FORMS):
        batch = FORMS[form](sequences())
        with NoSynchronization():
            named = rewritten(shared, **batch)
        assert len(waits) == nth + 1, form
        kept = {name for name, x in named.items() if x is not None and not name.startswith("packed")}
        assert kept == {"input_ids", "position_ids", "startend_row_indices", "use_cache"}, form


def test_positions_of_several_axes_run_as_before():
    stock = tiny_model("qwen2_5_vl", dtype=torch.float64)
    shared = copy.deepcopy(stock)
    flashmask_hf.share_prefixes(shared)
    _pack.cache_clear()
    batch = padded(sequences())
    compare(shared, stock, batch)  # of text alone, whose axes are equal
    assert _pack.cache_info().misses == 1
    batch = {name: x[: batch["input_ids"].shape[1]] for name, x in batch.items()}
    assert batch["input_ids"].shape[0] == batch["input_ids"].shape[1]
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, *batch["input_ids"].shape)
    compare(shared, stock, batch | dict(position_ids=positions))
    assert _pack.cache_info().misses == 1


@pytest.mark.parametrize("family", ["gpt2", "ctrl", "hunyuan_v1_dense"])
def test_absolute_positions_share_only_rows_that_count_from_0(family):
    """HunYuan's norms after RoPE have weights, so scores do not depend on distances alone."""
    stock = model_zoo.build(family, "flashmask").double()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    shared = copy.deepcopy(stock)
    flashmask_hf.share_prefixes(shared)
    _pack.cache_clear()
    compare(shared, stock, padded(sequences()))
    assert _pack.cache_info().misses == 1
    compare(shared, stock, padded(sequences(), left=True))  # positions count the padding
    assert _pack.cache_info().misses == 1


def test_a_loss_that_reads_padding_is_refused():
    shared, _ = shared_pair()
    batch = padded(sequences(), left=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)  # first tokens, too
    with pytest.raises(RuntimeError, match="the loss reads hidden states of padding"):
        shared(**batch).loss.backward()


def test_documents_of_seq_idx_alone_are_refused_as_without_sharing():
    shared, stock = shared_pair()
    batch = flat(sequences())
    given = {name: x for name, x in batch.items() if name != "labels"}
    given["seq_idx"] = torch.arange(given["input_ids"].shape[1])[None] // 4
    for part in (stock, shared, shared.base_model):
        with pytest.raises(RuntimeError, match="seq_idx numbers documents of a row"):
            part(**given)
    compare(shared, stock, batch | {"seq_idx": (batch["position_ids"] == 0).cumsum(1) - 1})
    assert _pack.cache_info().misses == 1


def test_wrong_calls():
    shared, eager = (model.double() for model in model_pair("llama"))
    with pytest.raises(ValueError, match=r"minimum must be a share of the batch's tokens, 0 to 1, got 2"):
        flashmask_hf.share_prefixes(shared, minimum=2)
    with pytest.raises(ValueError, match="packed rows need attn_implementation='flashmask'"):
        flashmask_hf.share_prefixes(eager)
    with pytest.raises(ValueError, match="Llama4ForCausalLM is its own backbone, and packed rows need one without a"):
        flashmask_hf.share_prefixes(model_zoo.build("llama4_text", "flashmask"))
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has recurrent or convolutional layers"):
        flashmask_hf.share_prefixes(model_zoo.build("lfm2", "flashmask"))
    flashmask_hf.share_prefixes(shared)
    flashmask_hf.share_prefixes(shared, minimum=1)  # in place of the first
    assert len(shared.base_model._forward_hooks) == 2
    _pack.cache_clear()
    shared(**padded(sequences()))
    assert [change.keywords for change in state_of(shared.base_model).rewrites] == [{"minimum": 1}]
    batch = flat(sequences())
    batch["position_ids"][:, :3] += 4
    with pytest.raises(ValueError, match="position_ids start at 4, inside a document, as on a rank"):
        shared(**batch)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_batches(seed):
    """Sequences of few different tokens, of all lengths and often equal, each as alone."""
    draw = torch.Generator().manual_seed(seed)
    shared, stock = shared_pair()
    flashmask_hf.share_prefixes(shared, minimum=0)
    lengths = torch.randint(1, 9, (12,), generator=draw).tolist()
    rows = [torch.randint(2, 4, (length,), generator=draw) for length in lengths]
    for form in ("padded on the left", "flat, numbered and padded"):
        compare(shared, stock, FORMS[form](rows))
    assert _pack.cache_info().misses >= 1


def test_the_trainer_of_transformers(tmp_path):
    """It passes the number of the step's labels, a tensor, to the model."""
    rows = sequences(prompts=1)
    data = Dataset.from_dict({"input_ids": rows, "labels": [[IGNORED, *own[1:]] for own in rows]})
    settings = trainer_settings(tmp_path) | {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
    runs = []
    for model in shared_pair():
        trainer = Trainer(
            model, TrainingArguments(**settings), DataCollatorForSeq2Seq(word_tokenizer(), padding=True), data
        )
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert _pack.cache_info().misses == 2
    assert runs[0] == pytest.approx(runs[1], rel=torch.finfo(torch.float32).eps)  # a float32 sum over steps


TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "orpo": ("trl.experimental.orpo.ORPO", {}),
    "kto": ("trl.KTO", {}),
    "cpo": ("trl.experimental.cpo.CPO", {}),
    "simpo": ("trl.experimental.cpo.CPO", {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "tpo": ("trl.experimental.tpo.TPO", {}),
    "dpo": ("trl.DPO", {}),
    "reward": ("trl.Reward", {}),
    "grpo": ("trl.GRPO", {"max_completion_length": 6, "num_generations": 2}),
    "rloo": ("trl.RLOO", {"max_completion_length": 6, "num_generations": 2}),
    "gmpo": ("trl.experimental.gmpo.GMPO", {"max_completion_length": 6, "num_generations": 2}),
    "sdpo": ("trl.experimental.sdpo.SDPO", {"max_completion_length": 6, "num_generations": 2}),
    "online_dpo": ("trl.experimental.online_dpo.OnlineDPO", {"max_new_tokens": 6}),
}
"""TRL's trainers that pass padded batches, and options."""
SAMPLED = ("grpo", "rloo", "gmpo", "sdpo", "online_dpo")


@pytest.mark.filterwarnings("ignore")  # of experimental trainers
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("orpo", False),
        *(pytest.param(name, False, marks=pytest.mark.full) for name in TRAINERS if name != "orpo"),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("orpo", "kto", "cpo", "simpo", "tpo")),
    ],
)
def test_trainers_of_trl(name, adapter, tmp_path):
    """Metrics of two steps, and the change of the weights, equal stock TRL's."""
    runs = []
    for ours in (True, False):
        trainer = make_trainer(name, adapter, tmp_path / str(ours))
        before = {key: x.detach().clone() for key, x in trainer.model.named_parameters()}
        if ours:
            flashmask_hf.share_prefixes(trainer.model)
            if getattr(trainer, "ref_model", None) is not None:
                flashmask_hf.share_prefixes(trainer.ref_model)
        _pack.cache_clear()
        torch.manual_seed(0)
        trainer.train()
        assert bool(_pack.cache_info().misses) == ours
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        changes = [(x.detach() - before[key]).flatten() for key, x in trainer.model.named_parameters()]
        runs.append((logs, torch.cat(changes)))
    (ours, change), (stock, expected) = runs
    assert len(stock) == 2
    for one, two in zip(ours, stock, strict=True):
        tied = abs(two.get("rewards/margins", 1.0)) < BOUND  # of a first step; rounding decides whether it is accurate
        for key, value in two.items():
            unlike = key.startswith("logits") or key.endswith(("time", "per_second"))  # means over padding, too
            if not unlike and not (tied and key == "rewards/accuracies"):
                bound = torch.finfo(torch.float32).eps if key == "loss" else BOUND  # a float32 sum over steps
                assert one[key] == pytest.approx(value, rel=bound, abs=BOUND, nan_ok=True), key
    assert expected.norm() > 1e-3
    assert (change - expected).norm() < BOUND * expected.norm()


@pytest.mark.full
def test_two_processes_equal_one(run_folder):
    found = run_cases(run_folder, "tools.sharing_cases", (1, 2))
    for name in found[1]:
        one, two = (result(found, size, name) for size in (1, 2))
        assert two["losses"] == pytest.approx(one["losses"], rel=FLOAT32), name
        assert two["norms"] == pytest.approx(one["norms"], rel=BOUND), name
        assert two["wrapper"].startswith("DistributedData" if name.endswith("ddp") else "FSDP"), name


def make_trainer(name: str, adapter: bool, folder: Any, **changes: Any) -> Any:
    path, given = TRAINERS[name]
    home, label = path.rsplit(".", 1)
    module = importlib.import_module(home)
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    if not (folder / "model").exists():
        auto.from_config(llama_config(initializer_range=0.2, num_labels=1)).save_pretrained(folder / "model")
    model = auto.from_pretrained(
        folder / "model", attn_implementation="flashmask", dtype=torch.float64
    )  # as KTO's reference
    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(8, 64, (count,), generator=draw).tolist())

    rows = [
        {"prompt": words(12) + " ", "chosen": words(4), "rejected": words(3), "reference": words(2)} for _ in range(12)
    ]
    if name == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
            for row in rows
            for kind in ("chosen", "rejected")
        ]
    elif name != "tpo":
        kept = ("prompt",) if name in SAMPLED else ("prompt", "chosen", "rejected")
        rows = [{key: row[key] for key in kept} for row in rows]
    settings = trainer_settings(folder) | {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
    settings |= {CHECKPOINTING: adapter} | ({} if "num_generations" in given else {"max_length": 64}) | given | changes
    more: dict[str, Any] = {}
    if name in SAMPLED:
        more["reward_funcs"] = lambda completions, **_: [float(len(text) % 7) for text in completions]
    if adapter:
        more["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)
    return getattr(module, f"{label}Trainer")(
        model,
        args=getattr(module, f"{label}Config")(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(),
        **more,
    )
