"""Offloaded checkpoints: the same loss and gradients to the bit, within the budget, and host memory that comes back."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tools.tiny import CHECKPOINTING, TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig

from flashmask_hf import flashmask_attention, masks
from flashmask_hf.long_rows import keep_attention, offload_checkpoints, store
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.trainers import PackedSFTTrainer

pytestmark = [
    *TRAINER_WARNINGS,
    # torch and transformers, of the old names of transformers 5.23
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]

LAYERS = 4
TOKENS = 40
INPUT = TOKENS * 32 * 4  # bytes of a layer's input
KEPT = INPUT + TOKENS * 4 * 4  # and of the output and the log-sum-exp of its attention
WAYS = {
    "plain": {"use_reentrant": False},
    "kept": {"use_reentrant": False, "context_fn": keep_attention},
    "reentrant": {"use_reentrant": True},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A layer's input takes 5 blocks, its kept attention 5.6."""
    monkeypatch.setattr(store, "BLOCK_BYTES", 1024)


def model_of(way="plain", device="cpu", adapter=False):
    torch.manual_seed(0)
    config = llama_config(num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").train().to(device)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).to(device)
    return model if way is None else enable_checkpointing(model, WAYS[way])


def loss_of(model, seed=0):
    device = next(model.parameters()).device
    ids = torch.randint(3, 48, (1, TOKENS), generator=torch.Generator().manual_seed(seed)).to(device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model, losses=None):
    """Return the losses, and the gradients of their sum."""
    model.zero_grad()
    losses = [loss_of(model)] if losses is None else losses()
    if losses[0].requires_grad:
        sum(losses).backward()
    return [*(x.detach() for x in losses), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("budget", ["none", "half", "all", "unlimited"])
@pytest.mark.parametrize(("way", "adapter"), [("plain", False), ("plain", True), ("kept", False), ("reentrant", False)])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_within_the_budget(device, way, adapter, budget):
    model = model_of(way, device, adapter)
    want = gradients(model)
    blocks = LAYERS * (5 + 6 * (way == "kept"))
    host_bytes = {"none": 0, "half": blocks // 2 * 1024, "all": blocks * 1024, "unlimited": None}[budget]
    offload = offload_checkpoints(model, host_bytes, min_bytes=1)
    for _ in range(2):
        assert_same(gradients(model), want)
        assert offload.seen_bytes == LAYERS * (INPUT + (way == "kept") * KEPT)
        assert offload.held_bytes == 0
        assert offload.peak_bytes == offload.pool_bytes  # the second step takes no more
    whole = blocks * 1024 if host_bytes is None else host_bytes
    assert whole - 6 * 1024 < offload.peak_bytes <= whole
    offload.close()
    assert offload.pool_bytes == 0
    assert_same(gradients(model), want)
    assert offload.pool_bytes == 0


def several(order):
    """Return gradients of two forwards, and then their backwards in an order."""

    def run(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in (0, 1)]
        for number in order:
            losses[number].backward()
        return [*(x.detach() for x in losses), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    return run


def accumulated(model):
    model.zero_grad()
    losses = []
    for seed in range(3):
        losses.append(loss_of(model, seed))
        losses[-1].backward()
    return [*(x.detach() for x in losses), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def retained(model):
    model.zero_grad()
    loss = loss_of(model)
    for _ in range(2):
        loss.backward(retain_graph=True)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


STEPS = {
    "accumulated": accumulated,
    "sum": lambda model: gradients(model, lambda: [loss_of(model, 0), loss_of(model, 1)]),
    "first in, first out": several([0, 1]),
    "last in, first out": several([1, 0]),
    "retained": retained,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["plain", "kept"])
@pytest.mark.parametrize("device", DEVICES)
def test_several_forwards_and_backwards(device, way, step):
    # what torch's own contexts keep is given once
    want = STEPS[step](model_of("plain" if step == "retained" else way, device))
    model = model_of(way, device)
    offload = offload_checkpoints(model, 25 * 1024, min_bytes=1)
    assert_same(STEPS[step](model), want)
    gc.collect()  # an autograd graph that is kept is in a circle
    assert offload.held_bytes == 0
    assert 20 * 1024 <= offload.pool_bytes <= 25 * 1024


def test_a_graph_that_dies_gives_its_memory_back():
    model = model_of("kept")
    want = gradients(model)
    offload = offload_checkpoints(model, min_bytes=1)
    loss = loss_of(model)
    assert offload.held_bytes == offload.pool_bytes == LAYERS * 11 * 1024
    del loss
    assert offload.held_bytes == 0
    handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    handle.remove()
    gc.collect()  # the exception refers to the graph
    assert offload.held_bytes == 0
    assert store.current_layer.get() is None
    assert_same(gradients(model), want)
    assert offload.pool_bytes == LAYERS * 11 * 1024


def test_evaluation_saves_nothing():
    model = model_of()
    offload = offload_checkpoints(model, min_bytes=1)
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval()).backward()
    assert offload.seen_bytes == offload.pool_bytes == 0


def test_small_checkpoints_stay():
    model = model_of("kept")
    for least, larger in ((INPUT, INPUT + KEPT), (INPUT + 1, KEPT)):
        offload = offload_checkpoints(model, min_bytes=least)
        loss_of(model).backward()
        assert offload.seen_bytes == LAYERS * larger
        offload.close()
    offload = offload_checkpoints(model)
    loss_of(model).backward()
    assert offload.seen_bytes == 0


def test_the_budget_changes_between_steps():
    model = model_of()
    offload = offload_checkpoints(model, min_bytes=1)
    loss = loss_of(model)
    offload.host_bytes = 12 * 1024
    assert offload.host_bytes == 12 * 1024
    assert offload.pool_bytes == 20 * 1024  # in use
    loss.backward()
    loss = loss_of(model)
    assert offload.pool_bytes == 12 * 1024
    assert offload.held_bytes == 10 * 1024
    loss.backward()
    offload.host_bytes = 0
    assert offload.pool_bytes == 0
    for host_bytes, taken in ((14 * 1024, 10 * 1024), (15 * 1024, 15 * 1024)):
        offload.host_bytes = host_bytes
        loss_of(model).backward()
        assert offload.pool_bytes == taken


def test_memory_that_the_system_refuses(monkeypatch):
    model = model_of()
    want = gradients(model)
    offload = offload_checkpoints(model, min_bytes=1)
    block, asked = store.Block, []

    def refuse():
        asked.append(1)
        if len(asked) > 12:
            raise RuntimeError("out of memory")
        return block()

    monkeypatch.setattr(store, "Block", refuse)
    with pytest.warns(UserWarning, match=r"no more than 0.00 GiB .*out of memory.* a smaller host_bytes"):
        assert_same(gradients(model), want)
    assert_same(gradients(model), want)  # warns no more
    assert len(asked) == 13
    assert offload.peak_bytes == 10 * 1024
    monkeypatch.setattr(store, "Block", block)
    offload.host_bytes = None  # asks again
    assert_same(gradients(model), want)
    assert offload.peak_bytes == 20 * 1024


@pytest.mark.parametrize(("blocks", "on_host"), [(9, 6), (6, 4), (3, 2), (0, 0)])
def test_each_read_fetches_exactly_the_next(blocks, on_host):
    """The order is that of the backward: the last layer's input, its attention, the input of the layer before."""
    place = store.Store(blocks * 1024, 1)
    saved = []
    for number in range(3):
        layer = store.Layer(place)
        saved.append([layer.save(torch.full((256,), 2.0 * number)), layer.save(torch.full((300,), 2.0 * number + 1))])
    in_order = [y for pair in saved for y in pair]
    assert [bool(y._blocks) for y in in_order] == [i < on_host for i in range(6)]
    assert [y._tensors is not None for y in in_order] == [i >= on_host or i == 5 for i in range(6)]
    backward = [y for pair in reversed(saved) for y in pair]
    for step, y in enumerate(backward):
        assert y.load()[0].unique().tolist() == [[4, 5, 2, 3, 0, 1][step]]
        fetched = [z for z in backward if z._blocks and z._tensors is not None]
        assert fetched == [z for z in backward[step + 1 : step + 2] if z._blocks]


def test_what_is_not_moved():
    weight, frozen = nn.Parameter(torch.zeros(512)), torch.zeros(512)
    place = store.Store(None, 1)
    place.begin_forward([weight, frozen])
    layer = store.Layer(place)
    for x in (weight, weight[:256], frozen.view(2, 256), torch.arange(512), torch.zeros(4, 8)[:, :4], torch.zeros(0)):
        (got,) = layer.save(x).load()
        assert torch.equal(got, x)
        assert got.data_ptr() == x.data_ptr()
    assert place.seen_bytes == place.pool_bytes == 0


def test_layouts_come_back():
    place = store.Store(None, 1)
    layer = store.Layer(place)
    for x in (torch.randn(3, 50, 7).transpose(0, 2), torch.randn(600)[3:300], torch.randn(5, 1, 99).half()):
        saved = layer.save(x, x.double())
        saved.release()
        got, wide = saved.load()
        assert (got.stride(), got.dtype) == (x.stride(), x.dtype)
        assert torch.equal(got, x)
        assert torch.equal(wide, x.double())


def test_a_tensor_saved_twice_is_copied_once():
    place = store.Store(None, 1)
    layers = [store.Layer(place) for _ in range(2)]
    x = torch.randn(256)
    saved = [layer.save(y) for layer in layers for y in (x, x.view(256), x.view(16, 16), x[:128])]
    assert place.held_bytes == 3 * 1024  # the last is half a block
    assert saved[0] is saved[1] is saved[4]
    assert saved[2].load()[0].shape == (16, 16)
    layers[0].save(torch.zeros(256))  # ends the last copy
    x.add_(1)
    later = layers[1].save(x)
    assert later is not saved[0]
    assert torch.equal(later.load()[0], x)
    del x, later, saved
    assert place.held_bytes == 0


def test_a_new_tensor_at_an_old_address_is_another():
    place = store.Store(None, 1)
    layer = store.Layer(place)
    saved = []
    for number in range(50):
        saved.append(layer.save(torch.full((256,), float(number))))
        saved[-1].release()
    assert [int(y.load()[0][0]) for y in saved] == list(range(50))


class Changed(nn.Module):
    """A layer that changes its input, or attention's result, after it was saved."""

    def __init__(self, kept):
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = lambda f, x: checkpoint(f, x, **WAYS["kept" if kept else "plain"])
        self.kept = kept

    def forward(self, x):
        y = self._gradient_checkpointing_func(self.attend if self.kept else torch.sin, x)
        if not self.kept:
            x.add_(1)
        return y

    def attend(self, x):
        out = flashmask_attention(x, x, x, masks.causal(x.shape[2]))
        return out.mul_(2).sin()


@pytest.mark.parametrize("host_bytes", [0, None])
@pytest.mark.parametrize("kept", [False, True])
def test_a_change_in_place_is_an_error(kept, host_bytes):
    model = Changed(kept).train()
    for offloaded in (False, True):
        if offloaded:
            offload_checkpoints(model, host_bytes, min_bytes=1)
        x = torch.randn(1, 2, 64, 16, requires_grad=True) * 1
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|is being modified inplace"):
            model(x).sum().backward()


def test_a_change_during_a_copy_is_an_error():
    layer = store.Layer(store.Store(None, 1))
    x = torch.randn(256)
    saved = layer.save(x)
    x.add_(1)
    layer.save(torch.randn(256))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.load()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Changed(kept=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            layer.attend = torch.cos
            x = layer(x)
        return x


def test_layers_in_a_list():
    """The list is no module that runs."""
    model = Stack().train()
    offload = offload_checkpoints(model, min_bytes=1)
    model(torch.randn(1, 2, 64, 16, requires_grad=True)).sum().backward()
    assert offload.seen_bytes == 2 * 2 * 64 * 16 * 4


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.language = model_of().model, model_of("kept")

    def forward(self, input_ids, **inputs):
        seen = self.vision(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.language(inputs_embeds=self.language.model.embed_tokens(input_ids) + seen, **inputs)


def test_a_model_in_a_model():
    model = TwoTowers()
    want = gradients(model)
    offload = offload_checkpoints(model, min_bytes=1)
    assert_same(gradients(model), want)
    assert offload.seen_bytes == LAYERS * (2 * INPUT + KEPT)
    for inner in (model, model.vision, model.language):
        with pytest.raises(ValueError, match="offloaded already"):
            offload_checkpoints(inner)


def test_a_copy_has_a_store_and_a_budget_of_its_own():
    model = model_of("plain")
    want = gradients(model)
    offload = offload_checkpoints(model, 0, min_bytes=1)
    gradients(model)  # now layers checkpoint into the store
    copied, other = copy.deepcopy(model), copy.deepcopy(model)
    budget = offload_checkpoints(other, min_bytes=1)
    assert budget.host_bytes is None
    offload.host_bytes = None
    for each in (copied, other):
        assert_same(gradients(each), want)
    assert copied.model.layers[0]._gradient_checkpointing_func.owner.host_bytes == 0
    assert (offload.seen_bytes, offload.peak_bytes) == (LAYERS * INPUT, 0)
    assert budget.seen_bytes == LAYERS * INPUT
    assert budget.peak_bytes > 0
    budget.close()
    assert_same(gradients(other), want)
    assert budget.pool_bytes == 0
    assert_same(gradients(model), want)
    assert offload.peak_bytes > 0


def test_a_copy_does_not_keep_its_original():
    model = model_of("plain")
    offload = offload_checkpoints(model, min_bytes=1)
    gradients(model)  # now layers checkpoint into the store, also in the copy
    copied, original = copy.deepcopy(model), weakref.ref(model.model.layers[0])
    offload.close()
    del model, offload
    gc.collect()
    assert original() is None
    assert copied.model.layers[0]._gradient_checkpointing_func is not None


def test_wrong_arguments():
    model = model_of(None)
    with pytest.raises(ValueError, match="host_bytes must be at least 0, got -1; None is no limit"):
        offload_checkpoints(model, -1)
    with pytest.raises(ValueError, match="min_bytes must be at least 0, got -1"):
        offload_checkpoints(model, min_bytes=-1)
    with pytest.raises(TypeError, match=r"host_bytes must be an int, got 64000000000\.0"):
        offload_checkpoints(model, 64e9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="min_bytes must be an int, got None"):
        offload_checkpoints(model, min_bytes=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no layers that can be checkpointed"):
        offload_checkpoints(nn.Linear(2, 2))
    offload = offload_checkpoints(model, min_bytes=1)
    with pytest.raises(ValueError, match="host_bytes must be at least 0"):
        offload.host_bytes = -1
    with pytest.raises(RuntimeError, match=r"gradient_checkpointing_enable\(\) or set gradient_checkpointing=True"):
        loss_of(model)
    loss_of(enable_checkpointing(model, WAYS["plain"])).backward()  # enabled later
    assert offload.seen_bytes == LAYERS * INPUT


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.full), "kept"])
def test_compiled_code_around_layers_is_refused_and_inside_works(way):
    model = model_of(way)
    want = gradients(model)
    offload = offload_checkpoints(model, min_bytes=1)
    with pytest.raises(RuntimeError, match=r"does not work with torch\.compile around checkpointed layers"):
        loss_of(torch.compile(model, backend="eager"))
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for layer in model.model.layers:
        layer.mlp.compile(backend=counter)
    assert_same(gradients(model), want)
    assert counter.frame_count == 1
    assert offload.seen_bytes == LAYERS * (INPUT + (way == "kept") * KEPT)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"does not work with torch\.compile around checkpointed layers"):
        loss_of(model)
    torch.compiler.reset()


ROWS = {"text": ["w9 w10 w11 w12 w13"] * 40}


def row_trainer(args, model):
    ids = torch.randint(3, 48, (40, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    return Trainer(model, TrainingArguments(**args), train_dataset=rows)


def packed_trainer(args, model):
    rows = Dataset.from_dict(ROWS)
    return PackedSFTTrainer(
        model, SFTConfig(**args, max_length=16), train_dataset=rows, processing_class=word_tokenizer()
    )


@pytest.mark.parametrize(("trainer_of", "way"), [(row_trainer, "plain"), (packed_trainer, "kept")])
def test_trainers(trainer_of, way, tmp_path):
    args = trainer_settings(tmp_path) | {
        CHECKPOINTING: True,
        f"{CHECKPOINTING}_kwargs": WAYS[way],
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
    }
    runs = []
    for offloaded in (False, True):
        model = model_of(None)
        offload = offload_checkpoints(model, 16 * 1024, min_bytes=1) if offloaded else None
        trainer = trainer_of(args, model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append([torch.tensor(losses), *(p.detach().clone() for p in model.parameters())])
        if offload is not None:
            assert offload.seen_bytes > offload.peak_bytes > 8 * 1024
            assert offload.held_bytes == 0
    assert_same(*runs)


SHARDED = """
import gc, sys
import torch
import torch.distributed as dist
from tools.tiny import llama_config
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from flashmask_hf.long_rows import keep_attention, offload_checkpoints, store
from flashmask_hf.long_rows.checkpointing import enable_checkpointing

store.BLOCK_BYTES = 1024
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)


def compare():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    config = llama_config(num_hidden_layers=4)
    ids = torch.randint(3, 48, (1, 40), generator=torch.Generator().manual_seed(rank))
    for way in ({}, {"context_fn": keep_attention}):
        for kind in ("ddp", "fsdp"):
            results = []
            for offloaded in (False, True):
                torch.manual_seed(0)
                inner = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").train()
                enable_checkpointing(inner, {"use_reentrant": False} | way)
                model = inner
                if offloaded:
                    offload = offload_checkpoints(inner, 15 * 1024, min_bytes=1)
                if kind == "ddp":
                    model = DistributedDataParallel(inner)
                else:
                    for layer in inner.model.layers:
                        fully_shard(layer, mesh=mesh)
                    fully_shard(inner, mesh=mesh)
                for _ in range(2):
                    model.zero_grad()
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
                grads = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in inner.parameters()]
                results.append([loss.detach(), *grads])
            assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), (way, kind)
            assert offload.seen_bytes > offload.peak_bytes > 10 * 1024
            assert offload.held_bytes == 0
            print(way, kind, "equal", flush=True)


compare()
gc.collect()  # models that are wrapped refer to the group, whose threads must end before the process does
dist.destroy_process_group()
"""


@pytest.mark.full
def test_two_processes(tmp_path):
    """DDP and FSDP2."""
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here.parent.parent}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SHARDED, str(rank), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("equal") == 4


def test_a_closed_offload_still_serves_an_earlier_forward():
    model = model_of("kept")
    want = gradients(model)
    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
    offload = offload_checkpoints(model, min_bytes=1)

    def losses():
        loss = loss_of(model)
        offload.close()
        assert offload.pool_bytes == LAYERS * 11 * 1024
        return [loss]

    assert_same(gradients(model, losses), want)
    assert offload.pool_bytes == 0
    assert [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers] == functions
    again = offload_checkpoints(model, min_bytes=1)
    assert_same(gradients(model), want)
    assert again.seen_bytes == LAYERS * (INPUT + KEPT)


def long_model(layers, hidden, intermediate):
    """Return a model in bfloat16 on the GPU whose layers are large."""
    torch.manual_seed(0)
    config = llama_config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2**15,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=torch.bfloat16)
    return enable_checkpointing(model.train().to("cuda"), WAYS["plain"])


def long_step(model, tokens):
    ids = torch.randint(3, 48, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    model.zero_grad(set_to_none=False)  # from the second step on, gradients are there from its beginning
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.gpu
def test_memory_of_the_gpu_and_of_the_host(monkeypatch):
    """A checkpoint of 3 * 2**24 bytes takes as much of the host, and a GPU holds two of twelve."""
    monkeypatch.setattr(store, "BLOCK_BYTES", 2**24)
    layers, size = 12, 3 * 2**24
    model = long_model(layers, 1024, 2048)

    def peak():
        torch.cuda.reset_peak_memory_stats()
        long_step(model, 3 * 2**13)
        return torch.cuda.max_memory_allocated()

    def host():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    peak()
    plain = peak()
    gc.collect()  # what other tests pinned
    store._empty_host_cache()
    before = host()
    offload = offload_checkpoints(model)
    offloaded = [peak(), peak()]
    assert offload.pool_bytes == layers * size
    assert 0 <= host() - before - offload.pool_bytes < 1024  # torch pins a few bytes of its own
    assert plain - max(offloaded) >= (layers - 3) * size
    offload.host_bytes = 0
    assert 0 <= host() - before < 1024
    offload.close()


@pytest.mark.gpu
def test_copies_overlap_with_computation(monkeypatch):
    """Less than half of the time of the copies is left in a step."""
    monkeypatch.setattr(store, "BLOCK_BYTES", 2**24)
    layers, tokens, hidden = 8, 2**14, 2048
    plain_model, model = (long_model(layers, hidden, 4 * hidden) for _ in range(2))
    offload = offload_checkpoints(model)
    there = torch.empty(layers * tokens * hidden, dtype=torch.bfloat16, device="cuda")
    here = torch.empty_like(there, device="cpu", pin_memory=True)

    def copy_both_ways():
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)

    runs = [lambda: long_step(plain_model, tokens), lambda: long_step(model, tokens), copy_both_ways]
    times = torch.empty(12, len(runs))
    for turn in range(len(times)):  # in turns, since other processes may use the GPU for a while
        for i, run in enumerate(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times[turn, i] = start.elapsed_time(end)
    assert offload.peak_bytes == layers * tokens * hidden * 2
    offload.close()
    plain, offloaded, copies = times.amin(0).tolist()
    print(f"plain {plain:.1f} ms, offloaded {offloaded:.1f} ms, copies alone {copies:.1f} ms")
    assert offloaded - plain < copies / 2


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_copies_that_come_late_race_with_nothing(seed, monkeypatch):
    """Layers of random sizes on all GPUs in turn, streams held up at random, and freed memory overwritten at once."""
    monkeypatch.setattr(store, "BLOCK_BYTES", 2**14)
    generator = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(1, below, (), generator=generator))

    sizes = [draw(100_000) for _ in range(60)]
    place = store.Store(sum(sizes) * 4 // [1, 2, 4][seed % 3], 1)
    gpus = torch.cuda.device_count()
    scales = [torch.full((1,), 1 + 1 / (n + 1), device=f"cuda:{n % gpus}", requires_grad=True) for n in range(60)]

    def delay(stream):
        if draw(4) == 1:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw(2_000_000))

    def layer_of(scale, size):
        return lambda x: (x * scale).sin().repeat(size // len(x) + 1)[:size]

    def step(offloaded):
        x = torch.linspace(-1, 1, sizes[0], device="cuda").requires_grad_()
        start = x
        for scale, size in zip(scales, sizes, strict=True):
            x = x.to(scale.device)
            if offloaded:
                delay(place.stream(x.device))
                delay(torch.cuda.current_stream(x.device))
                with place.layer():
                    x = checkpoint(layer_of(scale, size), x, use_reentrant=False)
                x.register_hook(lambda _, device=x.device: delay(place.stream(device)))
            else:
                x = checkpoint(layer_of(scale, size), x, use_reentrant=False)
            for n in (size, sizes[0], len(x)):
                torch.full((n,), float("nan"), device=x.device)  # takes memory that is free, and frees it
        x.sum().backward()
        results = [x.detach(), start.grad, *(scale.grad for scale in scales)]
        for scale in scales:
            scale.grad = None
        return results

    want = step(False)
    for number in range(4):
        got = step(True)
        torch.cuda.synchronize()
        assert_same(got, want)
        if number % 2:  # a graph with a copy under way dies
            x = torch.randn(90_000, device="cuda")
            saved = [store.Layer(place).save(x + n) for n in range(3)]
            saved[0].fetch()
            del saved
    assert place.held_bytes == 0
    place.close()
