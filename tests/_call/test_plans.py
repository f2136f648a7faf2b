"""The plan that a mask keeps: made once, and anew where the mask, its memory, the stream or the mode is another."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.support import HEADS, KV_HEADS, Lane, attention_inputs, run
from torch._subclasses import FakeTensorMode

from flashmask_hf import FlashMask, flashmask_attention, masks, torch_internals
from flashmask_hf._call import operators
from flashmask_hf._call.operators import plan_of


def test_the_mask_keeps_its_plan_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = operators._build_plan
    monkeypatch.setattr(operators, "_build_plan", lambda *args: made.append(1) or build(*args))
    mask = masks.causal_document([40, 60])
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 100, 100, 8)
    first = run(q, k, v, mask, "torch")
    run(q, k, v, mask, "torch")
    assert len(made) == 1
    mask.indices[:, :, :40] = 20  # in place: the first document's rows from 20 on see nothing of it
    second = run(q, k, v, mask, "torch")
    assert len(made) == 2
    with pytest.MonkeyPatch.context() as patch:  # a thread that writes while the plan is made
        patch.setattr(operators, "_build_plan", lambda *args: (build(*args), mask.indices.add_(0))[0])
        mask.indices.add_(0)
        run(q, k, v, mask, "torch")
    run(q, k, v, mask, "torch")
    assert len(made) == 3
    made.pop()
    assert not torch.equal(first["out"], second["out"])
    with torch.inference_mode():
        flashmask_attention(q, k, v, mask)
    run(q, k, v, mask, "torch")
    assert len(made) == 2
    mask = masks.causal_document([40, 60])
    for inferred, count in ((True, 3), (True, 3), (False, 4), (True, 4), (False, 4)):  # a backward wants its own
        with torch.inference_mode(inferred):
            out = flashmask_attention(q, k, v, mask)
        assert out.requires_grad is not inferred
        assert len(made) == count
    flashmask_attention(q[:, :, :90], k[:, :, :90], v[:, :, :90], masks.causal(90))
    assert len(made) == 5
    mask = FlashMask(torch.full((1, 1, 100, 1), 90, dtype=torch.int32), causal=True)
    for rows, count in ((100, 6), (90, 7), (90, 7), (100, 8)):
        flashmask_attention(q[:, :, :rows], k, v, mask)
        assert len(made) == count


REPLACED: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "data": lambda indices, other: setattr(indices, "data", other),
    "swap": lambda indices, other: torch.utils.swap_tensors(indices, other),
    "strides": lambda indices, other: setattr(indices, "data", indices.detach()[:, :, :1].expand(indices.shape)),
    "shape": lambda indices, other: setattr(indices, "data", indices.detach()[:, :, :300]),
}
"""Ways to give a tensor other memory."""


@pytest.mark.parametrize("way", REPLACED)
def test_a_mask_whose_memory_is_replaced_makes_a_new_plan(way: str) -> None:
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, 2, 2, 400, 400, 8)
    mask = FlashMask(masks.causal_document([150, 250]).indices.clone(), causal=True)
    flashmask_attention(q, k, v, mask)
    version = mask.indices._version
    REPLACED[way](mask.indices, masks.causal(400).indices.clone())
    assert mask.indices._version == version
    fresh = FlashMask(mask.indices.clone(), causal=True)
    assert not torch.equal(fresh.indices, masks.causal_document([150, 250]).indices)
    k, v = k[:, :, : mask.kv_len], v[:, :, : mask.kv_len]
    assert torch.equal(flashmask_attention(q, k, v, mask), flashmask_attention(q, k, v, fresh))


def test_memory_that_is_replaced_is_not_used_again() -> None:
    """Else a tensor at the old address would find the old plan."""
    for _ in range(20):  # the allocator does not hand out freed memory every time
        mask = masks.causal_document([150, 250])
        plan_of(mask, 400)
        address = mask.indices.data_ptr()
        mask.indices.data = torch.empty_like(mask.indices)
        others = [torch.empty_like(mask.indices) for _ in range(100)]
        assert address not in {x.data_ptr() for x in others}


@pytest.mark.parametrize("told", [False, True], ids=["another mask", "told"])
def test_what_is_written_past_the_version(told: bool) -> None:
    """Collectives write so. Another mask of the same tensor has no plan, and a no-op in place counts as a change."""
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, 2, 2, 300, 300, 8)
    mask = FlashMask(masks.causal_document([150, 150]).indices.clone(), causal=True, q_len=300)
    flashmask_attention(q, k, v, mask)
    version = mask.indices._version
    mask.indices.numpy()[:] = 300
    assert mask.indices._version == version
    if told:
        mask.indices.add_(0)
    else:
        mask = FlashMask(mask.indices, mask.causal, q_len=mask.q_len)
    assert torch.equal(flashmask_attention(q, k, v, mask), flashmask_attention(q, k, v, masks.causal(300)))


def test_a_call_on_another_stream_makes_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """First ones and repeated ones; what is kept is the last one's. One of another stream may not be written yet."""
    made: list[int] = []
    build = operators._build_plan
    current = 0
    monkeypatch.setattr(operators, "_build_plan", lambda *args: made.append(current) or build(*args))
    monkeypatch.setattr(torch_internals, "current_stream", lambda gpu: current if gpu == 3 else None)
    monkeypatch.setattr(torch_internals, "stream_of", lambda x: (3, current))
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, 2, 2, 100, 100, 8)
    mask = masks.causal_document([40, 60])
    expected = flashmask_attention(q, k, v, masks.causal_document([40, 60]))
    made.clear()
    for current in (1, 1, 2, 2, 1, 0):  # noqa: B007
        assert torch.equal(flashmask_attention(q, k, v, mask), expected)
        plan_of(mask, 100)
    assert made == [1, 2, 1, 0]


def test_a_graph_that_is_captured_makes_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the vectors anew; and what it wrote is not kept, as its memory is the graph's."""
    capturing = False
    monkeypatch.setattr(torch_internals, "is_capturing", lambda x: capturing)
    monkeypatch.setattr(torch_internals, "current_stream", lambda gpu: 0)
    monkeypatch.setattr(torch_internals, "stream_of", lambda x: (3, 0))
    mask = masks.causal_document([40, 60])
    kept = plan_of(mask, 100)
    capturing = True
    assert plan_of(mask, 100) is not kept
    capturing = False
    assert plan_of(mask, 100) is kept


def test_the_stream_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "current_stream", lambda gpu: 0x700 + gpu)
    there: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 3)
    assert torch_internals.stream_of(there) == (3, 0x703)
    assert torch_internals.stream_of(torch.empty(1)) is None


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_wait_for_each_other() -> None:
    """The second stream does not read the plan that the first has yet to write; nor does a graph on a third one."""
    lane = Lane("triton", "cuda", torch.bfloat16)
    q, k, v = (x.detach() for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 1000, 1000, 64))
    indices = masks.causal_document([300, 700], device="cuda").indices
    expected = flashmask_attention(q, k, v, FlashMask(indices, causal=True))
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    for stream in (first, second):  # until launches are known, and memory is there: neither is to wait below
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            kept = [flashmask_attention(q, k, v, FlashMask(indices, causal=True)) for _ in range(4)]
    torch.cuda.synchronize()
    del kept
    mask = FlashMask(indices, causal=True)
    with torch.cuda.stream(first):
        torch.cuda._sleep(10**8)
        found = [flashmask_attention(q, k, v, mask)]
    with torch.cuda.stream(second):
        found += [flashmask_attention(q, k, v, mask) for _ in range(2)]
    second.synchronize()
    assert not first.query()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=third):
        found.append(flashmask_attention(q, k, v, mask))
    graph.replay()
    found.append(flashmask_attention(q, k, v, mask))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_a_mask_keeps_no_plan_of_a_mode_or_transform() -> None:
    q, k, v = (x.detach() for x in attention_inputs(Lane("torch", "cpu", torch.float32), 1, 2, 2, 140, 140, 8))
    expected = flashmask_attention(q, k, v, masks.causal(140))
    for again in range(2):
        mask = masks.causal(140)
        if again:
            flashmask_attention(q, k, v, mask)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            flashmask_attention(*(mode.from_tensor(x) for x in (q, k, v)), mask)
        torch.func.grad(lambda x: x * flashmask_attention(q, k, v, mask).sum())(torch.ones(()))  # noqa: B023
        assert copy.deepcopy(mask).causal
        leaf = q.clone().requires_grad_()
        out = flashmask_attention(leaf, k, v, mask)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert type(out) is type(gradient) is torch.Tensor
        assert torch.equal(out, expected)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_inference_mode_and_training_share_a_mask(made_in_inference_mode: bool) -> None:
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, HEADS, KV_HEADS, 60, 60, 8)
    with torch.inference_mode(made_in_inference_mode):
        mask = FlashMask(masks.causal_document([20, 40]).indices.clone(), causal=True)
    with torch.inference_mode():
        before = flashmask_attention(q, k, v, mask)
        if made_in_inference_mode:  # such a tensor does not tell of changes in place
            mask.indices.copy_(masks.causal_document([40, 20]).indices)
            expected = flashmask_attention(q, k, v, masks.causal_document([40, 20]))
            for _ in range(3):
                assert torch.equal(flashmask_attention(q, k, v, mask), expected)
            mask.indices.copy_(masks.causal_document([20, 40]).indices)
            assert torch.equal(flashmask_attention(q, k, v, mask), before)
            return
    out = flashmask_attention(q, k, v, mask)
    assert torch.equal(out, before)
    torch.autograd.grad(out.sum(), (q, k, v))


def test_a_mask_does_not_change_under_its_plan() -> None:
    mask = masks.causal(8)
    for name, value in (("indices", mask.indices), ("causal", False), ("q_len", 3)):
        with pytest.raises(AttributeError):
            setattr(mask, name, value)


def _saved(mask: FlashMask) -> FlashMask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[FlashMask], FlashMask]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "pickle, protocol 0": lambda mask: pickle.loads(pickle.dumps(mask, protocol=0)),
    "torch.save": _saved,
}


class NamedMask(FlashMask):
    """A subclass, as a user may define it."""

    __slots__ = ("__dict__", "tag")


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_derived_mask_keeps_what_that_added(way: str) -> None:
    mask = NamedMask(masks.causal(10).indices, causal=True)
    mask.tag, mask.name = "tag", "name"
    copied = COPIES[way](mask)
    assert (type(copied), copied.tag, copied.name, copied.causal) == (NamedMask, "tag", "name", True)


class MaskWithState(FlashMask):
    """A subclass whose pickled state is no tuple."""

    def __getstate__(self) -> list[Any]:
        return [self.indices, self.causal]

    def __setstate__(self, state: list[Any]) -> None:
        self.__init__(*state)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_derived_mask_has_the_state_that_it_defines(way: str) -> None:
    copied = COPIES[way](MaskWithState(masks.causal(10).indices, causal=True))
    assert (type(copied), copied.causal, copied._plan) == (MaskWithState, True, None)
    assert torch.equal(copied.indices, masks.causal(10).indices)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_mask_makes_its_own_plan(way: str) -> None:
    """Its indices count changes in place anew: they may come to as many as those of the original had."""
    q, k, v = attention_inputs(Lane("torch", "cpu", torch.float32), 1, 2, 2, 300, 300, 16)
    mask = FlashMask(masks.causal_document([150, 150]).indices, causal=True, q_len=300)
    for _ in range(3):
        mask.indices.add_(0)
    before = flashmask_attention(q, k, v, mask)
    copied = COPIES[way](mask)
    assert copied._plan is None
    assert mask._plan is not None
    assert (copied.causal, copied.q_len) == (True, 300)
    assert torch.equal(copied.indices, mask.indices)
    assert torch.equal(flashmask_attention(q, k, v, copied), before)
    copied.indices.fill_(300)
    while copied.indices._version < mask.indices._version:
        copied.indices.add_(0)
    assert torch.equal(flashmask_attention(q, k, v, copied), flashmask_attention(q, k, v, masks.causal(300)))
