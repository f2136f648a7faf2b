"""The operators behave as PyTorch operators: opcheck, one compiled graph, no recompilation when lengths change."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from tools.support import HEADS, INTERPRETED, KV_HEADS, SLOW, Lane, assert_within_budget, attention_inputs, lanes
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashmask_hf import FlashMask, flashmask_attention, masks
from flashmask_hf._call import operators as attention
from flashmask_hf._call.call import Call
from flashmask_hf._call.operators import flash_attn_backward, flash_attn_decode, flash_attn_forward, make_plan, plan_of
from flashmask_hf.sparse import qk_sparse_attention
from flashmask_hf.sparse.operators import (
    flash_attn_sparse_backward,
    flash_attn_sparse_decode,
    flash_attn_sparse_forward,
    sort_sparse,
)
from flashmask_hf.torch_internals import is_intercepted, is_plain

LANES = lanes((torch.float32,), (torch.float32,), (torch.bfloat16,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.15's own
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    "with_sinks", [pytest.param(False, marks=SLOW, id="plain"), pytest.param(True, id="sinks and dropout")]
)
def test_opcheck(lane: Lane, with_sinks: bool) -> None:
    mask = masks.share_question([(40, [20, 15]), (30, [10, 18])], device=lane.device)
    q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, 133, 133, 16)
    sinks = torch.zeros(HEADS, device=lane.device, requires_grad=True) if with_sinks else None
    drops = with_sinks and lane.impl == "torch"
    seed, dropout = (torch.tensor([7]), 0.2) if drops else (None, 0.0)
    torch.library.opcheck(make_plan, (mask.indices, True, 133), test_utils=("test_schema", "test_faketensor"))
    given = (q, k, v, sinks, mask.indices, *plan_of(mask, 133), seed, True, 0.25, None, lane.impl, False, dropout)
    torch.library.opcheck(flash_attn_forward, given)
    q, k, v, sinks, *more = (x.detach() if isinstance(x, torch.Tensor) else x for x in given)
    out, lse = flash_attn_forward(q, k, v, sinks, *more)
    gradients = out, lse if with_sinks else None
    torch.library.opcheck(
        flash_attn_backward,
        (*gradients, out, lse, q, k, v, sinks, *more),
        test_utils=("test_schema", "test_faketensor"),
    )


class _Mode(TorchDispatchMode):
    """A mode that changes nothing, under which attention calls its operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("intercepted", [False, True], ids=["eager", "operator"])
def test_hooks_on_saved_tensors_free_the_inputs(intercepted: bool) -> None:
    """Offloading replaces what is saved by a copy elsewhere: nothing else may keep q, k and v until the backward."""
    mask = masks.causal_document([5, 4])
    leaves = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    inputs = [2 * x for x in leaves]
    mode = _Mode() if intercepted else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x), mode:
        out = flashmask_attention(*inputs, mask, impl="torch")
    alive = [weakref.ref(x) for x in inputs]
    del inputs
    gc.collect()
    assert [x() is None for x in alive] == [True] * 3
    out.sum().backward()
    assert all(x.grad is not None for x in leaves)


def _loss(q, k, v, indices, weight, impl):
    mask = FlashMask(indices, causal=True)
    out = flashmask_attention(q * weight, k, v, mask, impl=impl)
    return (out.float() ** 2).sum()


@pytest.mark.parametrize("lane", LANES)
def test_compiles_to_one_graph_without_recompiling(lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph forward and backward, inductor on the GPU; later lengths cost no more graphs than the second."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # graphs of earlier runs bring guards of their own
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("inductor" if lane.device == "cuda" else "aot_eager")
    compiled = torch.compile(_loss, fullgraph=True, backend=graphs)
    frames = []
    lengths = (30, 50, 64, 17) if INTERPRETED else (129, 190, 257, 64, 300, 301, 77, 512, 400, 230)
    for length in lengths:
        q, k, v = attention_inputs(lane, 1, HEADS, KV_HEADS, length, length, 32)
        indices = masks.causal_document([length // 3, length - length // 3], device=lane.device).indices
        weight = torch.full((1,), 0.5, device=lane.device, dtype=lane.dtype, requires_grad=True)
        leaves = (q, k, v, weight)
        actual = torch.autograd.grad(compiled(q, k, v, indices, weight, lane.impl), leaves)
        expected = torch.autograd.grad(_loss(q, k, v, indices, weight, lane.impl), leaves)
        for one, other in zip(actual, expected, strict=True):
            scale = other.float().abs().max()
            assert (one.float() - other.float()).abs().max() <= 4 * torch.finfo(lane.dtype).eps * scale
        frames.append(graphs.frame_count)
    assert frames[1:] == [frames[1]] * (len(frames) - 1), f"graphs compiled after each length: {frames}"
    assert frames[-1] <= 2


@pytest.mark.parametrize("mask_heads", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize("batch", [1, 2])
def test_symbolic_lengths_fit_a_mask_s_own(batch: int, mask_heads: int) -> None:
    """All sizes of q are symbolic, those of the mask are numbers, or come from q."""
    lane = Lane("torch", "cpu", torch.float32)
    q, k, v = (x.detach() for x in attention_inputs(lane, batch, HEADS, KV_HEADS, 100, 100, 16))
    vectors = masks.causal_document([[40, 60], [50, 50]][:batch]).indices.expand(-1, mask_heads, -1, -1).contiguous()
    mask = FlashMask(vectors, causal=True, q_len=100)

    def attend(q, k, v, made_inside):
        return flashmask_attention(q, k, v, masks.causal(q.shape[2]) if made_inside else mask)

    for made_inside in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(q, k, v, made_inside), attend(q, k, v, made_inside))


@pytest.mark.parametrize("lane", lanes((torch.float32,), (), (torch.bfloat16,)))
def test_compiled_layers_share_one_plan(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """While compiling nothing is cached; the compiler keeps one of the equal plan calls."""
    torch._dynamo.reset()
    made = []
    build = attention._build_plan
    monkeypatch.setattr(attention, "_build_plan", lambda *args: made.append(1) or build(*args))

    def layers(q, k, v, indices):
        for _ in range(3):
            q = flashmask_attention(q, k, v, FlashMask(indices, causal=True), impl=lane.impl)
        return q.float().sum()

    q, k, v = attention_inputs(lane, 1, HEADS, HEADS, 133, 133, 16)
    compiled = torch.compile(layers, fullgraph=True, backend="inductor" if lane.device == "cuda" else "aot_eager")
    compiled(q, k, v, masks.causal(133, device=lane.device).indices).backward()
    assert len(made) == 1


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_opcheck_of_decode(lane: Lane, with_sinks: bool) -> None:
    mask = masks.sliding_window(133, 50, q_len=2, device=lane.device)
    q, k, v = (x.detach() for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 2, 133, 16))
    sinks = torch.zeros(HEADS, device=lane.device) if with_sinks else None
    torch.library.opcheck(
        flash_attn_decode, (q, k, v, sinks, mask.indices, mask.causal, 0.25, None, lane.impl, False, 0.0)
    )


@pytest.mark.parametrize("grad_mode", [False, True], ids=["no_grad", "nothing requires grad"])
@pytest.mark.parametrize("lane", LANES)
def test_compiled_decode_steps_are_one_graph_without_a_plan(
    lane: Lane, grad_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static cache that fills up: one graph for every step."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_build_plan", lambda *_: pytest.fail("a plan was made"))
    length = 40 if INTERPRETED else 300
    _, k, v = (x.detach() for x in attention_inputs(lane, 2, HEADS, KV_HEADS, 1, length, 32))
    cache = [torch.zeros_like(k), torch.zeros_like(v)]

    def step(q, k_new, v_new, position):
        for whole, new in zip(cache, (k_new, v_new), strict=True):
            whole.index_copy_(2, position, new)
        hidden = torch.arange(length, device=q.device, dtype=torch.int32) > position
        columns = [torch.ones_like(hidden), hidden]
        mask = FlashMask(torch.stack(columns, -1).to(torch.int32)[None, None], causal=False)
        return flashmask_attention(q * 1.0, *cache, mask, impl=lane.impl)

    graphs = torch._dynamo.testing.CompileCounterWithBackend("inductor" if lane.device == "cuda" else "aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    with torch.set_grad_enabled(grad_mode):
        for position in range(5):
            q, _, _ = (x.detach() for x in attention_inputs(lane, 2, HEADS, KV_HEADS, 1, 1, 32, seed=position))
            now = slice(position, position + 1)
            actual = compiled(q, k[:, :, now], v[:, :, now], torch.tensor([position], device=lane.device))
            seen = slice(0, position + 1)
            full = masks.full(position + 1, q_len=1, device=lane.device)
            inputs = (q, k[:, :, seen], v[:, :, seen])
            expected = flashmask_attention(*inputs, full, impl="reference")
            exact = flashmask_attention(*(x.double() for x in inputs), full, impl="reference")
            assert_within_budget(actual, expected, exact, f"step {position}")
    assert graphs.frame_count == 1


def _small(grad: bool = True) -> tuple[torch.Tensor, ...]:
    lane = Lane("torch", "cpu", torch.float32)
    return tuple(x.detach().requires_grad_(grad) for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 20, 20, 16))


def test_there_are_no_second_derivatives() -> None:
    q, k, v = _small()
    out = flashmask_attention(q, k, v, masks.causal(20))
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


def test_only_what_asks_for_a_gradient_has_one() -> None:
    q, k, v = _small(grad=False)
    mask = masks.causal(20)
    out, lse = flashmask_attention(q, k, v, mask, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    sinks = torch.zeros(HEADS, requires_grad=True)
    flashmask_attention(q, k, v, mask, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    assert q.grad is None
    q.requires_grad_()
    with torch.no_grad():
        assert not flashmask_attention(q, k, v, mask).requires_grad
    with torch.inference_mode():
        assert flashmask_attention(q, k, v, mask).is_inference()


def test_calls_without_gradients_record_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of an autograd function takes the host longer than a launch."""
    monkeypatch.setattr(attention, "_record", lambda *_: pytest.fail("it was recorded"))
    monkeypatch.setattr(Call, "decode", lambda *_: pytest.fail("there are too many rows to be decoded"))
    lane = Lane("torch", "cpu", torch.float32)
    q, k, v = (x.detach() for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 100, 100, 16))
    assert not flashmask_attention(q, k, v, masks.causal(100)).requires_grad


def test_a_gradient_of_lse_that_is_not_there_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in its place would be read by another form of the kernels."""
    deltas: list[object] = []
    backward = Call.backward

    def spy(call: Call, *args: object) -> object:
        deltas.append(args[3])
        return backward(call, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Call, "backward", spy)
    q, k, v = _small(grad=True)
    out, lse = flashmask_attention(q, k, v, masks.causal(20), return_lse=True)
    out.sum().backward(retain_graph=True)
    lse.sum().backward()
    (_, missing), (_, given) = deltas  # type: ignore[misc]
    assert missing is None
    assert given is not None


@pytest.mark.parametrize("through", ["call", "operator"])
def test_the_gradient_of_lse_alone(through: str) -> None:
    q, k, v = _small()
    mask = masks.causal(20)
    with torch.profiler.profile() if through == "operator" else contextlib.nullcontext():
        _, lse = flashmask_attention(q, k, v, mask, return_lse=True)
    *found, of_values = torch.autograd.grad(lse, (q, k, v), lse.detach())
    _, exact = flashmask_attention(q, k, v, mask, return_lse=True, impl="reference")
    for one, other in zip(found, torch.autograd.grad(exact, (q, k), lse.detach()), strict=True):
        torch.testing.assert_close(one, other)
    assert not of_values.any()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls once for each
def test_batched_gradients_of_lse_alone() -> None:
    """The kernels could not read them, although the zeros that stand in for the output's gradient are plain."""
    q, k, v = _small()
    _, lse = flashmask_attention(q, k, v, masks.causal(20), return_lse=True)
    several = torch.stack([torch.ones_like(lse), torch.zeros_like(lse)])
    found = torch.autograd.grad(lse, (q, k), several, retain_graph=True, is_grads_batched=True)
    for batched, one in zip(found, torch.autograd.grad(lse, (q, k), several[0]), strict=True):
        assert torch.equal(batched[0], one)
        assert not batched[1].any()


def test_operators_do_not_cast_under_autocast() -> None:
    """Their caller has cast: tensors of two dtypes are refused, as the kernels would read one as the other."""
    q, k, v = _small(grad=False)
    mask = masks.causal(20)
    columns, q_order, k_order = sort_sparse(
        *(torch.zeros(1, h, 20).int() for h in (HEADS, KV_HEADS)), None, 1, False, -1
    )
    dense, orders = (mask.indices, *plan_of(mask, 20)), (q_order, None, k_order, None)
    ordered = (columns, *plan_of(FlashMask(columns, causal=False), 20), *orders)
    out, lse = flash_attn_forward(q, k, v, None, *dense, None, True, 0.25, None, "torch", False, 0.0)
    narrow = (q, k.bfloat16(), v.bfloat16(), None)
    calls: list[Callable[[], Any]] = [
        lambda: flash_attn_forward(*narrow, *dense, None, True, 0.25, None, "torch", False, 0.0),
        lambda: flash_attn_backward(out, None, out, lse, *narrow, *dense, None, True, 0.25, None, "torch", False, 0.0),
        lambda: flash_attn_decode(*narrow, mask.indices, True, 0.25, None, "torch", False, 0.0),
        lambda: flash_attn_sparse_forward(*narrow, *ordered, 0.25, None, "torch", False, 0.0),
        lambda: flash_attn_sparse_backward(out, out, lse, *narrow, *ordered, 0.25, None, "torch", False, 0.0),
        lambda: flash_attn_sparse_decode(*narrow, columns, *orders, 0.25, None, "torch", False, 0.0),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        for call in calls:
            with pytest.raises(TypeError, match="one dtype"):
                call()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("through", ["call", "operator", "sparse"])
def test_attention_whose_results_get_no_gradient_passes_none_on(through: str) -> None:
    """As any operation of torch, so that an optimizer skips the parameters before it, which zeros would decay."""
    q, k, v = _small(grad=True)
    if through == "sparse":
        out = qk_sparse_attention(q, k, v, *(torch.ones(x.shape[:3], dtype=torch.bool) for x in (q, k)))
    else:
        with torch.profiler.profile() if through == "operator" else contextlib.nullcontext():
            out = flashmask_attention(q, k, v, masks.causal(20))
    _NoGradient.apply(out).sum().backward()
    assert (q.grad, k.grad, v.grad) == (None, None, None)


def test_tensors_whose_memory_does_not_hold_their_values_are_not_plain() -> None:
    batched: list[torch.Tensor] = []
    torch.func.vmap(lambda x: batched.append(x) or x)(torch.ones(3))
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda x: batched.append(x))
    torch.autograd.grad(leaf * 2, leaf, torch.eye(2), is_grads_batched=True)
    assert len(batched) == 2
    x = torch.ones(2, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    wholes = [torch._efficientzerotensor((2, 8)), torch.ones(2, 8, device="meta"), torch.ones(2, 8)]
    others = [x, *batched, *wholes, *(whole[1:] for whole in wholes)]
    wholes[2].untyped_storage().resize_(0)
    assert not any(map(is_plain, others))
    assert all(map(is_plain, (torch.ones(2), torch.ones(2, 8)[1:], torch.nn.Parameter(torch.ones(2)))))


def test_transforms_of_functorch() -> None:
    """Its gradients raise; a tensor that got out of them is one like others."""
    q, k, v = _small(grad=False)
    mask = masks.causal(20)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.grad_and_value):
        with pytest.raises(NotImplementedError, match=r"torch\.func's"):
            transform(lambda x: flashmask_attention(x, k, v, mask).sum())(q)
    weight = torch.func.grad(lambda w: w * flashmask_attention(q, k, v, mask).sum())(torch.ones(()))
    assert torch.equal(weight, flashmask_attention(q, k, v, mask).sum())
    eager = torch.func.grad(lambda x: flashmask_attention(x, k, v, mask, impl="reference").sum())(q)
    assert eager.abs().max() > 0
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(q)
    assert not is_intercepted(q)
    assert is_intercepted(kept[0])
    for x in (q, kept[0]):
        assert torch.equal(flashmask_attention(x, k, v, mask), flashmask_attention(q, k, v, mask))
        out = flashmask_attention(x, k.requires_grad_(), v, mask)
        assert torch.autograd.grad(out.sum(), k)[0].abs().max() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
@pytest.mark.parametrize("again", [False, True], ids=["first", "repeated"])
def test_forward_mode_raises(again: bool) -> None:
    """It would be 0; eager code has it."""
    q, k, v = _small(grad=False)
    mask = masks.causal(20)
    if again:
        flashmask_attention(q, k, v, mask)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: flashmask_attention(x, k, v, mask), (q,), (q,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, v)
        with pytest.raises(NotImplementedError, match="impl='reference'"):
            flashmask_attention(q, k, dual, mask)
        assert not flashmask_attention(q, k, v, mask).requires_grad
    _, tangent = torch.func.jvp(lambda x: flashmask_attention(q, k, x, mask, impl="reference"), (v,), (v,))
    torch.testing.assert_close(tangent, flashmask_attention(q, k, v, mask))  # it is linear in the values


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls once for each
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
@pytest.mark.parametrize("rows", [3, 16, 40])
@pytest.mark.parametrize("lane", LANES)
def test_gradients_of_few_rows_under_vmap(lane: Lane, rows: int) -> None:
    """Under vmap a batched tensor does not tell whether the tensor inside requires a gradient."""
    leaves = [
        torch.stack([x.detach(), x.detach() * 0.5]).requires_grad_()
        for x in attention_inputs(lane, 1, HEADS, KV_HEADS, rows, rows, 16)
    ]
    mask = masks.causal_document([1, rows - 1], device=lane.device)

    def attend(q, k, v):
        return flashmask_attention(q, k, v, mask, impl=lane.impl)

    def loss(out):  # with other terms of q, k and v, that their gradients are there in any case
        return out.float().square().sum() + sum(x.float().sum() for x in leaves)

    found = torch.autograd.grad(loss(torch.vmap(attend)(*leaves)), leaves)
    one_by_one = torch.stack([attend(*(x[i] for x in leaves)) for i in range(2)])
    for got, want in zip(found, torch.autograd.grad(loss(one_by_one), leaves), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match=r"torch.func's \(grad"):
        torch.func.grad(lambda q: torch.vmap(attend)(q, *leaves[1:]).sum())(leaves[0].detach())
    with pytest.raises(NotImplementedError, match=r"torch.func.jvp"):
        torch.func.jvp(lambda q: torch.vmap(attend)(q, *leaves[1:]), (leaves[0].detach(),), (leaves[0].detach(),))


@pytest.mark.parametrize("lane", LANES)
def test_decoding_that_was_traced_without_gradients_does_not_drop_them(lane: Lane) -> None:
    q, k, v = (x.detach() for x in attention_inputs(lane, 1, HEADS, KV_HEADS, 4, 4, 16))
    mask = masks.causal(4, device=lane.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        traced = torch.jit.trace(lambda *x: flashmask_attention(*x, mask, impl=lane.impl), (q, k, v), check_trace=False)
    out = traced(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="traced or exported without gradients"):
        out.float().sum().backward()


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    pass


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return flashmask_attention(q, k, v, masks.causal(20), sinks=sinks)


def _leaves() -> tuple[torch.Tensor, ...]:
    return (*_small(), torch.linspace(-1.0, 1.0, HEADS, requires_grad=True))


def _step(wrap: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> list[torch.Tensor]:
    """The result and the gradients of one call, of equal tensors each time."""
    leaves = [wrap(x) for x in _leaves()]
    out = _attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def _negated(x: torch.Tensor) -> torch.Tensor:
    """Equal to x, with the opposite in memory."""
    lazy = torch.complex(torch.zeros_like(x), -x.detach()).conj().imag
    assert lazy.is_neg()
    return lazy.requires_grad_()


def _batched() -> list[torch.Tensor]:
    leaves = _leaves()
    out = _attend(*leaves)
    several = torch.stack([out.detach(), torch.zeros_like(out)])
    gradients = torch.autograd.grad(out, leaves, several, is_grads_batched=True)
    return [out.detach(), *(x[0] for x in gradients)]


def _mapped() -> list[torch.Tensor]:
    return [torch.func.vmap(_attend)(*(x.detach().expand(2, *x.shape) for x in _leaves()))[1]]


def _traced() -> list[torch.Tensor]:
    inputs = _leaves()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return [torch.jit.trace(_attend, inputs, check_trace=False)(*inputs)]


def _profiled() -> list[torch.Tensor]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = _step()
    names = {event.key for event in profile.key_averages()}
    assert {"flashmask_hf::flash_attn_forward", "flashmask_hf::flash_attn_backward"} <= names
    return results


def _under(mode: Any) -> list[torch.Tensor]:
    with mode:
        return _step()


LISTENERS = {
    "dispatch mode": lambda: _under(_DispatchMode()),
    "function mode": lambda: _under(_FunctionMode()),
    "tensor's class": lambda: _step(lambda x: x.as_subclass(_Subclass)),
    "negated": lambda: _step(_negated),
    "batched gradients": _batched,
    "vmap": _mapped,
    "profiler": _profiled,
    "trace": _traced,
}
PASSED = {"plain": _step, "parameters": lambda: _step(torch.nn.Parameter)}


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # vmap, since torch 2.15 also for one call
@pytest.mark.parametrize("again", [False, True], ids=["first", "repeated"])
@pytest.mark.parametrize("listener", [*PASSED, *LISTENERS])
def test_the_dispatcher_is_passed_where_nothing_listens(
    listener: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are the same to the bit."""
    expected = _step()
    if again:
        (PASSED | LISTENERS)[listener]()
    seen: list[str] = []

    def note(name: str, operator: Any) -> Callable[..., Any]:
        return lambda *x: seen.append(name) or operator(*x)

    for name in ("forward", "backward"):
        operator = getattr(attention, f"flash_attn_{name}")
        monkeypatch.setattr(attention, f"flash_attn_{name}", note(name, operator))
    actual = (PASSED | LISTENERS)[listener]()
    # Gradients are batched in the backward only, and two listeners look at the forward alone.
    part = {"batched gradients": ["backward"], "vmap": ["forward"], "trace": ["forward"]}
    assert seen == ([] if listener in PASSED else part.get(listener, ["forward", "backward"]))
    for one, other in zip(actual, expected, strict=False):
        assert torch.equal(torch.Tensor(one), other)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_sees_the_operator(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that saves its results keeps it from running again in the backward."""
    q, k, v = _small()
    mask = masks.causal(20)
    expected = torch.autograd.grad(flashmask_attention(q * 2, k, v, mask).square().sum(), (q, k, v))
    ran, forward = [], Call.forward
    monkeypatch.setattr(Call, "forward", lambda *args: ran.append("forward") or forward(*args))

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if kept and "flash_attn" in str(operator) else CheckpointPolicy.MUST_RECOMPUTE

    out = checkpoint(
        lambda q: flashmask_attention(q * 2, k, v, mask).square(),
        q,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    actual = torch.autograd.grad(out.sum(), (q, k, v))
    assert ran.count("forward") == (1 if kept else 2)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
