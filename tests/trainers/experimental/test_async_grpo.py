"""AsyncGRPO on packed tries under "flashmask" equals every rollout alone under eager attention."""

from __future__ import annotations

import functools
import importlib
import os
import queue
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from tools.support import assert_within_budget
from tools.tiny import (
    CHECKPOINTING,
    EXACT,
    TRAINER_WARNINGS,
    VOCAB,
    assert_same_gradients,
    gradients_of,
    llama_config,
    trainer_settings,
    word_tokenizer,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, MistralConfig, Qwen3MoeConfig

from flashmask_hf import FlashMask, trainers
from flashmask_hf.trainers.experimental.tree_packing import run_tree_packing, tree_vectors

TreeRow = pytest.importorskip("trl.experimental.async_grpo.packing", reason="this TRL does not pack tries").TreeRow

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from flashmask_hf.trainers.experimental.async_grpo import SharedPromptAsyncGRPOTrainer  # noqa: E402

pytestmark = TRAINER_WARNINGS

SIZES: dict[str, Any] = llama_config(head_dim=8).to_diff_dict() | dict(pad_token_id=0, eos_token_id=1)
SIZES = {name: value for name, value in SIZES.items() if not name.startswith(("model", "transformers", "rope"))}
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2)
CONFIGS = {
    "llama": lambda: llama_config(),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**SIZES, sliding_window=5, num_local_experts=4, **EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, **EXPERTS),
}
BOUND = {"rtol": EXACT, "atol": EXACT}


def rollouts(seed: int = 0, vocabulary: int = VOCAB, scale: int = 1) -> list[dict[str, Any]]:
    """Draw rollouts of two prompts, with forks inside completions, equal completions and one of another root.

    A smaller vocabulary makes them share more; segments are `scale` times as long.
    """
    draw = np.random.default_rng(seed)

    def words(low: int, high: int) -> list[int]:
        return draw.integers(2, vocabulary, scale * draw.integers(low, high)).tolist()

    samples = []
    for group in range(2):
        prompt = words(3, 9)
        turn = words(2, 5)  # of several rollouts, such as the first turn of a conversation
        completions = [words(1, 8), turn + words(1, 5), turn + words(1, 5), turn, turn]
        for completion in completions:
            mask = [0] * len(prompt) + [int(draw.random() < 0.8) for _ in completion[:-1]] + [1]
            samples.append((group, prompt + completion, mask))
    samples.append((2, words(1, 2) + words(3, 6), None))
    return [
        {
            "input_ids": np.array(ids),
            "completion_mask": np.array(mask or [0] + [1] * (len(ids) - 1)),
            "old_log_probs": draw.normal(-4.0, 0.3, len(ids)),
            "advantage": float(draw.normal()),
            "group_id": group,
            "metrics": {"reward": 1.0},
        }
        for group, ids, mask in samples
    ]


def packed(samples: list[dict[str, Any]]) -> Any:
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    return row


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return TRL's batch of one process."""
    return DataCollatorForRollout(pad_token_id=0).torch_call([[packed(samples)]])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL's trainer start without a GPU, whose name it asks for."""
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.fixture
def float64(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL's trainer add its metrics in float64, too."""
    zeros = functools.partial(torch.zeros, dtype=torch.float64)
    names = vars(torch) | {"float32": torch.float64, "zeros": zeros}
    monkeypatch.setattr(async_grpo_trainer, "torch", types.SimpleNamespace(**names))


class Worker:
    """A rollout worker that has generated everything before it starts."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(RolloutSample(prompt=[], completion=[], model_version=0, **sample))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("no rollouts are left")


NO_TRANSFER = types.SimpleNamespace(
    init_weight_transfer=lambda: None,
    pause=lambda: None,
    send_weights=lambda iterator: None,
    resume=lambda: None,
    destroy=lambda: None,
)


def save(family: str, path: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Save a random model, large enough in its weights that attention is far from uniform."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path / family)
    return str(path / family)


def make(path: str, out: Any, trainer: type = SharedPromptAsyncGRPOTrainer, samples: Any = (), **options: Any) -> Any:
    arguments = trainer_settings(out) | {"max_steps": 2, "num_generations": 4, "token_budget": 0}
    arguments |= options.pop("arguments", {})
    return trainer(
        model=path,
        args=AsyncGRPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "w5"}]}]),
        processing_class=word_tokenizer(),
        rollout_worker=Worker(list(samples)),
        weight_transfer=NO_TRANSFER,
        **options,
    )


def separate_loss(model: Any, samples: list[dict[str, Any]], auxiliary: Any = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of AsyncGRPO from each rollout alone, as its definition says, and their log-probabilities."""
    terms, logps = [], []
    for sample in samples:
        ids = torch.tensor(sample["input_ids"], device=model.device)[None]
        logp = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logp = logp.gather(-1, ids[0, 1:, None])[:, 0]
        trained = torch.tensor(sample["completion_mask"], device=model.device)[1:].bool()
        logps.append(logp[trained])
        old = torch.tensor(sample["old_log_probs"], dtype=torch.float32, device=model.device)[1:][trained]
        ratio = (logps[-1] - old).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.2)
        advantage = torch.tensor(sample["advantage"], dtype=torch.float32).item()  # TRL's batches have float32
        terms.append(-torch.min(ratio * advantage, clipped * advantage))
    return torch.cat(terms).mean() + auxiliary, logps


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probabilities_loss_and_gradients(family: str, tmp_path: Any) -> None:
    path, samples = save(family, tmp_path, torch.float64), rollouts()
    arguments = {"dtype": "auto", "router_aux_loss_coef": None if family == "llama" else 0.0}
    trainer = make(path, tmp_path, arguments=arguments)
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
    for model in (trainer.model, eager):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    trainer.current_gradient_accumulation_steps = 1
    heads: list[Tensor] = []
    trainer.model.register_forward_hook(lambda _, __, output: heads.append(output.log_probs))
    batch = collate(samples)
    loss = trainer.compute_loss(trainer.model, batch)
    want, logps = separate_loss(eager, samples)
    torch.testing.assert_close(heads[0].flatten()[batch["token_index"][0]], torch.cat(logps), **BOUND)
    torch.testing.assert_close(loss, want, **BOUND)
    loss.backward(), want.backward()
    assert_same_gradients(gradients_of(trainer.model), gradients_of(eager))


@pytest.mark.parametrize(
    ("family", "device"),
    [pytest.param("llama", "cpu", marks=pytest.mark.full)]
    + [pytest.param(x, "cuda", marks=pytest.mark.gpu) for x in ("llama", "mistral")],
)
def test_bfloat16(family: str, device: str, tmp_path: Any) -> None:
    """Errors against float32 are at most twice those of eager attention in bfloat16; on a Hopper its kernels run."""
    changes = {"head_dim": 64, "max_position_embeddings": 1024}
    changes |= {"sliding_window": 40} if family == "mistral" else {}
    path, samples = save(family, tmp_path, torch.bfloat16, **changes), rollouts(scale=16)
    trainer = make(path, tmp_path, arguments={"use_cpu": device == "cpu", "dtype": "bfloat16"})
    trainer.current_gradient_accumulation_steps = 1
    heads: list[Tensor] = []
    trainer.model.register_forward_hook(lambda _, __, output: heads.append(output.log_probs))
    batch = {name: x.to(device) for name, x in collate(samples).items()}
    loss = trainer.compute_loss(trainer.model, batch)
    found = [(heads[0].flatten()[batch["token_index"][0]].float(), trainer.model)]
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype).to(device)
        want, logps = separate_loss(model, samples)
        found.append((torch.cat(logps), model))
    torch.testing.assert_close(loss, want, rtol=0.02, atol=0.01)
    ours, eager, exact = (logps for logps, _ in found)
    assert exact.std() > 1
    assert_within_budget(ours, eager, exact, "log-probabilities", torch.bfloat16)
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(0)).to(device)
    for logps, _ in found:  # the loss has steps, where a ratio is clipped
        (logps * weights).sum().backward()
    for (name, mine), (_, theirs), (_, best) in zip(*(model.named_parameters() for _, model in found), strict=True):
        error, allowed = ((x.grad.float() - best.grad).norm() for x in (mine, theirs))
        assert error <= 2 * allowed + 2**-8 * best.grad.norm(), name


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("family", "compiled"), [("mistral", False), ("llama", True)], ids=["eager", "compiled"])
def test_rows_of_two_processes(family: str, compiled: bool, tmp_path: Any) -> None:
    """TRL pads the rows of all processes to the longest; each process drops the padding of its own."""
    path = save(family, tmp_path, torch.float64)
    samples = [rollouts(0), rollouts(1, vocabulary=5)]
    trainer = make(path, tmp_path, arguments={"dtype": "auto"})
    trainer.current_gradient_accumulation_steps = 1
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
    batch = DataCollatorForRollout(pad_token_id=0, num_processes=2).torch_call([[packed(x) for x in samples]])
    assert not batch["attention_mask"].all()
    if compiled:
        torch.compiler.reset()
        trainer.model.model.compile(backend="eager", dynamic=True)  # dynamo warns of TRL's head
    shares = [{name: x[nth : nth + 1] for name, x in batch.items()} for nth in range(2)]
    losses = [trainer.compute_loss(trainer.model, share) for share in shares]
    torch.testing.assert_close(losses[0] + losses[1], separate_loss(eager, samples[0] + samples[1])[0], **BOUND)
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_training(family: str, adapter: bool, checkpointing: bool, tmp_path: Any) -> None:
    """Two steps from rollouts that are there already, which is all that AsyncGRPO needs a server for."""
    path, samples = save(family, tmp_path), rollouts() * 3
    options = {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])} if adapter else {}
    trainer = make(path, tmp_path, samples=samples, arguments={CHECKPOINTING: checkpointing}, **options)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    assert trainer.state.global_step == 2
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert all(torch.isfinite(p).all() for p in after)
    assert not hasattr(trainer.model.config, "decoder_sparse_step")


def test_names_of_parameters_are_as_they_were(tmp_path: Any) -> None:
    """TRL tells the names to the server that generates; those of sinks are hidden only from TRL's check."""
    path = save("gpt_oss", tmp_path)
    with pytest.raises(ValueError, match="attention sinks"):
        make(path, tmp_path, AsyncGRPOTrainer)
    model = make(path, tmp_path).model
    assert model.config._attn_implementation == "flashmask"
    names = [name for name, _ in model.named_parameters()]
    assert all(type(name) is str for name in names)
    assert sum(name.endswith(".sinks") for name in names) == 2
    assert async_grpo_trainer.create_model_from_path.__module__ == "trl.trainer.utils"


@pytest.mark.parametrize("seed", range(40))
def test_vectors_of_random_tries(seed: int) -> None:
    """Every row sees what its path in TRL's description says."""
    batch = packed(rollouts(seed, vocabulary=int(np.random.default_rng(seed).integers(3, 12)))).pack()
    layout = (batch["tree_kv_index"], batch["tree_cu_seqlens_q"], batch["tree_cu_seqlens_k"])
    vectors = tree_vectors(batch["position_ids"][None], *layout)
    assert vectors.dtype == torch.int32
    length = len(batch["input_ids"])
    visible = FlashMask(vectors, causal=True).to_dense(length)[0, 0]
    want = torch.zeros(length, length, dtype=torch.bool)
    edges_q, edges_k = layout[1].tolist(), layout[2].tolist()
    for segment in range(len(edges_q) - 1):
        path = layout[0][edges_k[segment] : edges_k[segment + 1]]
        count = edges_q[segment + 1] - edges_q[segment]
        for nth in range(count):
            want[edges_q[segment] + nth, path[: len(path) - count + nth + 1]] = True
    assert torch.equal(visible, want)


def parts(seed: int = 0) -> dict[str, Any]:
    batch = packed(rollouts(seed)).pack()
    most = batch["tree_max_seqlens"].tolist()
    return {
        "input_ids": batch["input_ids"][None],
        "position_ids": batch["position_ids"][None],
        **{name: batch[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
        "tree_max_seqlen_q": most[0],
        "tree_max_seqlen_k": most[1],
    }


def prepared(attention: str = "flashmask") -> Any:
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
    run_tree_packing(model)
    run_tree_packing(model)
    model.set_attn_implementation(attention)
    return model


def layout(depths: list[int], edges: list[int], paths: list[list[int]]) -> dict[str, Any]:
    """Return TRL's keywords for segments that start at `edges` and see the rows of `paths`."""
    return {
        "input_ids": torch.arange(2, 2 + len(depths))[None],
        "position_ids": torch.tensor([depths]),
        "tree_kv_index": torch.tensor([key for path in paths for key in path]),
        "tree_cu_seqlens_q": torch.tensor(edges, dtype=torch.int32),
        "tree_cu_seqlens_k": torch.tensor([0, *np.cumsum([len(path) for path in paths])], dtype=torch.int32),
        "tree_max_seqlen_q": 2,
        "tree_max_seqlen_k": 4,
    }


UNFIT = {
    # A root of two tokens with two children, of which the first has two: its children come after its sibling.
    "breadth first": layout(
        [0, 1, 2, 2, 3, 3], [0, 2, 3, 4, 5, 6], [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    ),
    "a child before its parent": layout([0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5], [[0], [2, 1], [2], [3], [2, 4]]),
    "a segment backwards": layout([0, 2, 1], [0, 3], [[0, 2, 1]]),
    "an empty segment": layout([0, 1, 2], [0, 3, 3], [[0, 1, 2], [0]]),
}


def test_one_rollout_is_causal() -> None:
    edges = torch.tensor([0, 3], dtype=torch.int32)
    vectors = tree_vectors(torch.arange(3)[None], torch.arange(3), edges, edges)
    assert vectors.flatten().tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(tree_kv_index=None), ValueError, "install that version of TRL"),
        (dict(tree_block_size=64), ValueError, "tree_block_size"),
        (dict(position_ids=None), ValueError, "position_ids"),
        (dict(position_ids=lambda x: x.expand(2, -1)), ValueError, "position_ids"),
        (dict(position_ids=lambda x: x[None]), ValueError, "position_ids"),
        (dict(tree_cu_seqlens_k=lambda x: x[:-1]), ValueError, r"\[S \+ 1\]"),
        (dict(tree_cu_seqlens_q=lambda x: x[:1], tree_cu_seqlens_k=lambda x: x[:1]), ValueError, r"\[S \+ 1\]"),
        (dict(tree_kv_index=lambda x: x[None]), ValueError, r"\[K\]"),
        (dict(position_ids=lambda x: torch.arange(x.numel())[None]), RuntimeError, "depth-first"),
        (dict(tree_kv_index=lambda x: x + 1), RuntimeError, "depth-first"),
        (dict(tree_kv_index=lambda x: x[:-1]), RuntimeError, "depth-first"),
        (dict(tree_kv_index=lambda x: torch.where(x == 1, 2, x)), RuntimeError, "depth-first"),
        (dict(tree_kv_index=lambda x: torch.where(x == 0, -1, x)), RuntimeError, "depth-first"),
        (dict(tree_kv_index=lambda x: torch.where(x == x.max(), x + 1, x)), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_q=lambda x: x.flip(0)), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_q=lambda x: torch.cat([x[:1] + 1, x[1:]])), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_q=lambda x: torch.cat([x[:-1], x[-1:] - 1])), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_k=lambda x: torch.cat([x[:1] + 1, x[1:]])), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_k=lambda x: torch.cat([x[:-1], x[-1:] - 1])), RuntimeError, "depth-first"),
        (dict(tree_cu_seqlens_k=lambda x: x - 1), RuntimeError, "depth-first"),
        *((unfit, RuntimeError, "depth-first") for unfit in UNFIT.values()),
    ],
)
def test_layouts_that_do_not_fit(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = parts()
    for name, change in changes.items():
        call[name] = change(call[name]) if callable(change) else change
    with pytest.raises(error, match=message):
        prepared()(**call)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("neftune_noise_alpha", 0.5),
        ("label_smoothing_factor", 0.5),
        ("use_liger_kernel", True),
        ("model_init_kwargs", {"attn_implementation": "flashmask"}),
    ],
)
def test_options_that_are_refused(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}.*; leave it"):
        make(save("llama", tmp_path), tmp_path, arguments={option: value})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "peft_config: PromptTuningConfig adds"),
        (LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM"), "peft_config: alora_invocation_tokens"),
    ],
    ids=["virtual tokens", "activated adapter"],
)
def test_adapters_that_are_refused(tmp_path: Path, adapter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(save("llama", tmp_path), tmp_path, peft_config=adapter)


def test_another_attention() -> None:
    with pytest.raises(ValueError, match="attn_implementation='flashmask'"):
        prepared("eager")(**parts())


@pytest.mark.usefixtures("float64")
def test_calls_without_a_trie_and_other_layers() -> None:
    """A call without the keywords is as before; layers that do not receive the mask raise."""
    model = prepared().double()
    ids = torch.arange(2, 9)[None]
    ours = model(ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(ours, model(ids).logits, **BOUND)
    model.set_attn_implementation("flashmask")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match="to 1 of its 2 layers"):
        model(**parts())


def test_version_of_trl_without_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(async_grpo_trainer, "TREE_ATTENTION")
    monkeypatch.delitem(sys.modules, "flashmask_hf.trainers.experimental.async_grpo")
    with pytest.raises(ImportError, match=r"trl>=1\.16"):
        importlib.import_module("flashmask_hf.trainers.experimental.async_grpo")


def test_trainers_do_not_import_it() -> None:
    """TRL's experimental module warns, and takes long to import."""
    assert "async_grpo" not in Path(str(trainers.__file__)).read_text(encoding="utf-8")


def test_metrics_borrow_numbers_of_the_config_and_keep_what_other_threads_set(monkeypatch):
    config = CONFIGS["gpt_oss"]()
    trainer = object.__new__(SharedPromptAsyncGRPOTrainer)
    trainer.model = types.SimpleNamespace(config=config)

    def log(_: Any) -> None:
        assert (config.moe_intermediate_size, config.decoder_sparse_step) == (config.intermediate_size, 1)
        config.from_another_thread = True

    monkeypatch.setattr(AsyncGRPOTrainer, "_log_step_metrics", log)
    trainer._log_step_metrics()
    assert config.from_another_thread
    assert not hasattr(config, "moe_intermediate_size")
