"""The Hopper forward: what it compiles to, without a GPU, its results on one, and which calls it serves."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from tools.support import FAMILIES, HEADS, INTERPRETED, KV_HEADS, assert_within_budget, offer_tall_tiles, poisoned

if INTERPRETED:
    pytest.skip("cpu lane: the interpreter does not run Gluon", allow_module_level=True)

from tools.cubin import HOPPER, compile_only

from flashmask_hf import FlashMask, flashmask_attention, masks, tile_plan, torch_internals
from flashmask_hf._call import call
from flashmask_hf._call.arguments import Arguments
from flashmask_hf._call.implementations import Request, choose
from flashmask_hf.kernels.eager.reference import reference_attention
from flashmask_hf.kernels.hopper import gluon
from flashmask_hf.sparse.reorder import put_rows_back
from flashmask_hf.tile_plan import build_plan

if gluon.unavailable_reason() is not None:
    pytest.skip(f"cpu lane: {gluon.unavailable_reason()}", allow_module_level=True)

from tools import hopper_kernels

from flashmask_hf.kernels.hopper import backward as hopper_backward
from flashmask_hf.kernels.hopper import forward as hopper_forward
from flashmask_hf.kernels.hopper.head_dims import Widths

# of torch, in a process whose first product is the reference's
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")

FORMS = {
    "causal": masks.causal(512),
    "window": masks.global_sliding_window(512, 16, 100),
    "prefix": masks.prefix_lm_document([(50, 200), (9, 312)]),
    "causal band": FlashMask(torch.full((1, 1, 512, 2), 300, dtype=torch.int32), causal=True),
}


Dims: TypeAlias = "int | tuple[int, int]"
"""head_dim of queries, keys and values, or (head_dim, v_head_dim)."""


def _inputs(batch: int, q_len: int, kv_len: int, dims: Dims, dtype: torch.dtype, device: str):
    both = (dims, dims) if isinstance(dims, int) else dims
    return hopper_kernels.inputs(batch, HEADS, KV_HEADS, q_len, kv_len, both, dtype, device)[:3]


CONFIGS = [
    pytest.param((wide.values + wide.tail, wide.values), config, id=f"{wide.values + wide.tail}-{config.warpgroups}")
    for table in (hopper_forward._FORWARD, hopper_forward._TALL)
    for wide, config in table.items()
]


@pytest.mark.parametrize(
    ("dims", "config", "form"),
    [  # every other configuration is quick with one form, and each form with one or none
        pytest.param(*config.values, form, marks=[pytest.mark.full] * (i % 2 or (i + j) % 4), id=f"{config.id}-{form}")
        for i, config in enumerate(CONFIGS)
        for j, form in enumerate(FORMS)
    ],
)
def test_forward_compiles(
    monkeypatch: pytest.MonkeyPatch, dims: Dims, config: hopper_forward.Config, form: str
) -> None:
    """Products are asynchronous, roles trade registers, and next to nothing spills."""
    monkeypatch.setattr(hopper_forward, "multiprocessors", lambda device: 4)
    dtype = torch.float16 if form == "window" else torch.bfloat16
    softcap = 20.0 if form == "window" and config.warpgroups == 2 else 0.0
    q, k, v = _inputs(1, 512, 512, dims, dtype, "cpu")
    mask = FORMS[form]
    sinks = torch.zeros(HEADS) if form == "prefix" else None
    with compile_only(HOPPER) as kernels:
        tiles = build_plan(mask.indices, mask.causal, 512)
        order = torch.zeros(q.shape[:3], dtype=torch.int32) if form == "causal band" else None
        hopper_kernels.forward(q, k, v, mask, tiles, sinks, 0.1, softcap, config=config, order=order)
    assert [kernel.name for kernel in kernels] == ["_join_rows"] * (config.warpgroups == 3) + ["forward_kernel"]
    kernel = kernels[-1]
    assert f".reqntid {128 * (config.warpgroups + 1)}" in kernel.assembly
    assert kernel.assembly.count("setmaxnreg") >= 2
    assert "wgmma.mma_async" in kernel.assembly
    assert "cp.async.bulk.tensor" in kernel.assembly
    assert kernel.shared <= 227 * 1024
    assert kernel.spills is not None
    assert not kernel.reused_barriers()
    assert kernel.spills <= ((32 if dims == (128, 128) else 64) if softcap else 0)  # a few slots of the set-up


@pytest.mark.full
def test_both_configurations_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of which the mask chooses one, with more tiles than programs."""
    offer_tall_tiles(monkeypatch)
    monkeypatch.setattr(hopper_forward, "multiprocessors", lambda device: 4)
    q, k, v = _inputs(1, 512, 512, 64, torch.bfloat16, "cpu")
    mask = FORMS["causal"]
    with compile_only(HOPPER) as kernels:
        hopper_kernels.forward(q, k, v, mask, build_plan(mask.indices, mask.causal, 512), None, 0.1, 0.0)
    assert [kernel.name for kernel in kernels] == ["_join_rows", "forward_kernel", "forward_kernel"]
    assert [kernel.spills for kernel in kernels[1:]] == [0, 0]


def _check(
    q, k, v, mask: FlashMask, *, sinks=None, softcap: float | None = None, config: hopper_forward.Config | None = None
) -> None:
    """Output and LSE are within the error budget, and every element is written."""
    mask, q_len = mask.to(q.device), q.shape[2]
    assert hopper_forward.unsupported_reason(q.device, q.dtype, q.shape[3], v.shape[3]) is None
    tiles = build_plan(mask.indices, mask.causal, q_len)
    scale = q.shape[3] ** -0.5
    with poisoned():
        actual = hopper_kernels.forward(q, k, v, mask, tiles, sinks, scale, softcap or 0.0, config=config)
    arguments = Arguments(scale, softcap)
    eager = reference_attention(q, k, v, mask, sinks, arguments)
    wide = [x.double() for x in (q, k, v)]
    wide_sinks = None if sinks is None else sinks.double()
    exact = reference_attention(*wide, mask, wide_sinks, arguments)
    for name, one, other, best in zip(("out", "lse"), actual, eager, exact, strict=True):
        assert_within_budget(one, other, best, name)


LENGTHS = [(1, 1), (63, 63), (113, 113), (1, 77), (200, 333), (1023, 1023)]


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dims", "config"), CONFIGS)
def test_forward_family(dims: Dims, config: hopper_forward.Config, family: str, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    dtype = torch.bfloat16 if kv_len % 2 else torch.float16
    _check(*_inputs(2, q_len, kv_len, dims, dtype, "cuda"), FAMILIES[family](kv_len, q_len), config=config)


HEAD_DIMS = [
    *((32, 32), (40, 40), (48, 64), (64, 24), (72, 72), (80, 80), (96, 96), (112, 128), (120, 8)),
    *((136, 40), (160, 128), (160, 160), (192, 192), (248, 64), (72, 200)),
]


@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [(1, 77), (200, 333), (1023, 1023)], ids=str)
@pytest.mark.parametrize("family", ["full", "causal_document", "prefix_lm_document", "random_eviction"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_forward_head_dims(dims: tuple[int, int], family: str, lengths: tuple[int, int]) -> None:
    """Sizes of queries and values that do not fill the tiles."""
    q_len, kv_len = lengths
    dtype = torch.bfloat16 if kv_len % 2 else torch.float16
    inputs = _inputs(2, q_len, kv_len, dims, dtype, "cuda")
    _check(*inputs, FAMILIES[family](kv_len, q_len), softcap=5.0 if family == "full" else None)


@pytest.mark.hopper
@pytest.mark.parametrize("n", [(True, 1), (True, 2), (False, 2), (False, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(333, 200), (130, 700)], ids=str)
@pytest.mark.parametrize(("dims", "config"), CONFIGS)
def test_forward_random_intervals(
    dims: Dims, config: hopper_forward.Config, lengths: tuple[int, int], n: tuple[bool, int]
) -> None:
    """Each query head has its own intervals: anywhere, overlapping or empty; also with more queries than keys."""
    q_len, kv_len = lengths
    causal, columns = n
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, q_len + 1, (2, HEADS, kv_len, columns), generator=generator, dtype=torch.int32)
    mask = FlashMask(indices, causal, q_len=q_len)
    _check(*_inputs(2, q_len, kv_len, dims, torch.bfloat16, "cuda"), mask, config=config)


@pytest.mark.hopper
@pytest.mark.parametrize("family", ["causal_document", "share_question", "global_sliding_window", "random_eviction"])
@pytest.mark.parametrize(("dims", "config"), CONFIGS)
def test_forward_softcap_and_sinks(dims: Dims, config: hopper_forward.Config, family: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, -3.0], device="cuda")
    inputs = _inputs(2, 333, 333, dims, torch.bfloat16, "cuda")
    softcap = 5.0 if config.warpgroups == 2 else None
    _check(*inputs, FAMILIES[family](333, 333), sinks=sinks, softcap=softcap, config=config)


@pytest.mark.hopper
@pytest.mark.parametrize(("dims", "config"), CONFIGS)
def test_forward_tiles_wider_than_the_kernel_s(
    monkeypatch: pytest.MonkeyPatch, dims: Dims, config: hopper_forward.Config
) -> None:
    monkeypatch.setattr(tile_plan, "MAX_COLUMN_TILES", 2)
    mask = masks.causal_document([170, 230, 300])
    _check(*_inputs(2, 700, 700, dims, torch.bfloat16, "cuda"), mask, config=config)


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "dim", "softcap", "ordered", "warpgroups"),
    [
        (2, 32, 4096, 64, 0.0, False, [2, 3]),
        (4, 32, 4095, 64, 0.0, False, [2]),
        (1, 63, 4096, 64, 0.0, False, [2]),
        (2, 32, 4096, 64, 20.0, False, [2]),  # three would spill its registers
        (2, 32, 4096, 64, 0.0, True, [2]),
        (2, 32, 4096, 128, 0.0, False, [2]),
    ],
)
def test_configs(
    batch: int, heads: int, q_len: int, dim: int, softcap: float, ordered: bool, warpgroups: list[int]
) -> None:
    shape = torch.Size((batch, heads, q_len, dim))
    configs = hopper_forward._configs(shape, Widths(dim), softcap != 0, ordered)
    assert [config.warpgroups for config in configs] == warpgroups


@pytest.mark.hopper
@pytest.mark.parametrize(("window", "warpgroups"), [(3000, 3), (900, 2)])
def test_the_mask_decides_on_tall_tiles(monkeypatch: pytest.MonkeyPatch, window: int, warpgroups: int) -> None:
    """The results are those of one configuration, to the bit, and not of the other, which adds up in another order."""
    monkeypatch.setattr(hopper_forward, "_TALL_ROWS", 0)
    q, k, v = _inputs(2, 4200, 4200, 64, torch.bfloat16, "cuda")
    mask = masks.sliding_window(4200, window, device="cuda")
    tiles = build_plan(mask.indices, mask.causal, 4200)
    configs = [None, hopper_forward._TALL[Widths(64)], hopper_forward._FORWARD[Widths(64)]]
    with poisoned():
        taken, tall, usual = (
            hopper_kernels.forward(q, k, v, mask, tiles, None, 0.1, 0.0, config=config) for config in configs
        )
    expected, other = (tall, usual) if warpgroups == 3 else (usual, tall)
    assert torch.equal(taken[0], expected[0])
    assert torch.equal(taken[1], expected[1])
    assert not torch.equal(taken[1], other[1])


@pytest.mark.hopper
@pytest.mark.parametrize(("dims", "config"), CONFIGS)
def test_forward_more_tiles_than_multiprocessors(dims: Dims, config: hopper_forward.Config) -> None:
    """Programs take several tiles of rows, of very different lengths, from the counter."""
    q_len = 4100
    mask = masks.causal_document([100, 3000, 1000])
    _check(*_inputs(3, q_len, q_len, dims, torch.bfloat16, "cuda"), mask, config=config)


@pytest.mark.hopper
@pytest.mark.parametrize("q_len", [70, 1111, 9000])
@pytest.mark.parametrize(
    ("dims", "config"), [*CONFIGS, *(pytest.param(x, None, id=str(x)) for x in ((64, 24), (96, 72), (160, 160)))]
)
def test_forward_rows_put_back(dims: Dims, config: hopper_forward.Config | None, q_len: int) -> None:
    """The output of `put_rows_back`, to the bit."""
    q, k, v = _inputs(3, q_len, 300, dims, torch.bfloat16, "cuda")
    mask = masks.full(300, q_len=q_len, device="cuda")
    tiles = build_plan(mask.indices, mask.causal, q_len)
    order = torch.rand(q.shape[:3], generator=torch.Generator().manual_seed(1)).argsort(-1).to("cuda", torch.int32)
    with poisoned():
        (apart, lse), (together, same) = (
            hopper_kernels.forward(q, k, v, mask, tiles, None, 0.1, 0.0, config, order=given) for given in (None, order)
        )
    assert torch.equal(put_rows_back(apart, order), together)
    assert torch.equal(lse, same)
    assert together.transpose(1, 2).is_contiguous()


@pytest.mark.hopper
def test_forward_offset_lags_behind_maximum() -> None:
    """Scores that grow along the keys, by less and by more than the slack of the exponentials' offset."""
    q, k, v = _inputs(1, 300, 1500, 64, torch.float16, "cuda")
    k = (k * torch.linspace(0.1, 12.0, 1500, device="cuda")[:, None]).to(k.dtype)
    _check(q, k, v, masks.full(1500, q_len=300))


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.device("cpu"), torch.bfloat16, 64, 64), "tensors on cpu .*Hopper GPU"),
        ((CUDA, torch.float32, 64, 64), "dtype torch.float32"),
        ((CUDA, torch.bfloat16, 90, 96), "head_dim 90 with values of 96 .*multiples of 8"),
        ((CUDA, torch.bfloat16, 96, 90), "head_dim 96 with values of 90 .*multiples of 8"),
        ((CUDA, torch.bfloat16, 24, 24), "head_dim 24 .*the larger one at least 32"),
        ((CUDA, torch.bfloat16, 264, 256), "head_dim 264 .*up to 256"),
        ((CUDA, torch.bfloat16, 256, 512), "head_dim 256 with values of 512 .*up to 256"),
        ((CUDA, torch.float16, 128, 128), None),
        ((CUDA, torch.bfloat16, 32, 8), None),
        ((CUDA, torch.bfloat16, 72, 128), None),
        ((CUDA, torch.bfloat16, 192, 128), None),
    ],
)
def test_unsupported_tensors_are_named(monkeypatch: pytest.MonkeyPatch, given: tuple, message: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    obstacle = hopper_forward.unsupported_reason(*given)
    assert obstacle is None if message is None else re.search(message, str(obstacle))


def test_a_gpu_of_amd_is_not_taken_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute capability of an MI300 (gfx942) is 9.4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "it needs a Hopper GPU" in str(hopper_forward.unsupported_reason(CUDA, torch.bfloat16, 128, 128))


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_architectures_are_served_by_the_portable_kernels(monkeypatch, capability) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = choose(Request(CUDA, torch.bfloat16, 128, 128))
    assert choice.impl == "triton"
    assert "it needs a Hopper GPU" in choice.reason
    named = choose(Request(CUDA, torch.bfloat16, 128, 128, Arguments(impl="hopper")))
    assert named.impl is None
    assert "impl='triton' can, more slowly" in named.reason


def test_choice_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose(Request(CUDA, torch.bfloat16, 128, 128)).impl == "hopper"
    assert choose(Request(CUDA, torch.bfloat16, 128, 128, Arguments(impl="triton"))).impl == "triton"
    assert choose(Request(CUDA, torch.bfloat16, 256, 256)).impl == "hopper"
    narrow = choose(Request(CUDA, torch.bfloat16, 16, 16))
    assert narrow.impl == "triton"
    assert "impl='hopper' cannot serve head_dim 16" in narrow.reason
    assert "hopper" not in choose(Request(CUDA, torch.bfloat16, 128, 128, Arguments(impl="triton"))).reason
    for dims in ((512, 64), (64, 512)):
        assert "impl='triton' cannot serve head_dim 512" in choose(Request(CUDA, torch.bfloat16, *dims)).reason


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_a_named_implementation_without_triton_is_not_replaced(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch_internals, "HAS_TRITON", False)
    choice = choose(Request(CUDA, torch.bfloat16, 128, 128, Arguments(impl=impl)))
    assert choice.impl is None
    assert f"impl='{impl}' cannot serve this process: Triton is not installed" in choice.reason


def test_a_triton_whose_gluon_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gluon, "unavailable_reason", lambda: "no Gluon")
    choice = choose(Request(CUDA, torch.bfloat16, 128, 128))
    assert choice.impl == "triton"
    assert "impl='hopper' cannot serve this process: no Gluon" in choice.reason


@pytest.mark.hopper
def test_tensors_without_a_descriptor_are_copied() -> None:
    q, k, v = (x.requires_grad_() for x in _inputs(1, 200, 200, 64, torch.bfloat16, "cuda"))
    mask = masks.causal_document([90, 110], device="cuda")
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape) for x in (q, k, v)]
    results = []
    for given in ((q, k, v), [y.copy_(x.detach()).requires_grad_() for x, y in zip((q, k, v), shifted, strict=True)]):
        out = flashmask_attention(*given, mask, impl="hopper", deterministic=True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.hopper
@pytest.mark.parametrize(("dim", "rest"), [(128, 0), (64, 3500)])
def test_a_captured_graph_reads_the_mask_anew(monkeypatch: pytest.MonkeyPatch, dim: int, rest: int) -> None:
    """Forward and backward replay from a CUDA graph, on other vectors written into the same tensor.

    Of the long rows the first see many tiles of keys, and get tall tiles, and the others few.
    """
    monkeypatch.setattr(hopper_forward, "_TALL_ROWS", 0)
    q, k, v = (x.requires_grad_() for x in _inputs(1, 640 + rest, 640 + rest, dim, torch.bfloat16, "cuda"))
    first, second = (
        masks.causal_document(lengths, device="cuda").indices
        for lengths in ([300, 340 + rest], [100, 250, 290, *[350] * (rest // 350)])
    )
    indices = first.clone()

    def step() -> list[torch.Tensor]:
        out = flashmask_attention(q, k, v, FlashMask(indices, causal=True), impl="hopper", deterministic=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for vectors in (second, first):
        indices.copy_(vectors)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
            fresh = step()
        torch.cuda.synchronize()
        for one, other in zip(captured, fresh, strict=True):
            assert torch.equal(one, other)


def test_launches_of_a_stream_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph has its own. The counter is made in another thread: this one may allocate in a graph's pool."""
    made: list[int] = []

    def zero(stream: int) -> torch.Tensor:
        made.append(threading.get_ident())
        return torch.full((1,), stream)

    state = {"stream": 7, "capturing": False}
    monkeypatch.setattr(hopper_forward, "_counters", {})
    monkeypatch.setattr(hopper_forward, "current_stream", lambda gpu: state["stream"])
    monkeypatch.setattr(hopper_forward, "_zero", zero)
    monkeypatch.setattr(hopper_forward, "is_capturing", lambda x: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state["stream"])
    q: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 0, device=torch.device("cpu"))
    first = hopper_forward._counter(q)
    assert hopper_forward._counter(q) is first
    state["stream"] = 8
    assert [first.item(), hopper_forward._counter(q).item()] == [7, 8]
    assert threading.get_ident() not in made
    state["capturing"] = True
    with poisoned():
        graphs = [hopper_forward._counter(q) for _ in range(2)]
    assert [counter.item() for counter in graphs] == [0, 0]
    assert graphs[0] is not graphs[1]
    assert (len(made), len(hopper_forward._counters)) == (2, 2)


@pytest.mark.hopper
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")  # inductor's
def test_compiled_to_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor warms graphs up with all allocations in their pool, and wants to know what is left there."""
    monkeypatch.setattr(hopper_forward, "_counters", {})
    q, k, v = _inputs(4, 2048, 2048, 64, torch.bfloat16, "cuda")
    mask = masks.causal_document([700, 1348], device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashmask_attention(q * 2, k, v, mask, impl="hopper") * 2

    expected = attend(q, k, v)
    hopper_forward._counters.clear()
    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(q, k, v), expected)
    assert hopper_forward._counters  # a warm-up called for one
    assert not any(hopper_forward._counters.values())


@pytest.mark.hopper
def test_launches_side_by_side_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams, and a graph on a third, have counters of their own, which are 0 again after each launch."""
    monkeypatch.setattr(hopper_forward, "_counters", {})
    q, k, v = _inputs(16, 1000, 1000, 64, torch.bfloat16, "cuda")
    mask = masks.causal_document([300, 700], device="cuda")
    expected = flashmask_attention(q, k, v, mask, impl="hopper")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[2]):
        captured = flashmask_attention(q, k, v, mask, impl="hopper")
    assert [stream for _, stream in hopper_forward._counters] == [torch.cuda.current_stream().cuda_stream]
    found = [captured]
    for _ in range(20):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(flashmask_attention(q, k, v, mask, impl="hopper"))
        with torch.cuda.stream(streams[2]):
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    assert len(hopper_forward._counters) == 3
    assert not any(hopper_forward._counters.values())


@pytest.mark.hopper
def test_torch_deterministic_algorithms_make_the_backward_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    prepare = hopper_backward.prepare_backward

    def prepare_and_record(problem: Any, dout: Any, output: Any, ordered: bool) -> Any:
        asked.append(problem.arguments.deterministic)
        return prepare(problem, dout, output, ordered)

    monkeypatch.setattr(hopper_backward, "prepare_backward", prepare_and_record)
    monkeypatch.setattr(call, "_calls", {})
    q, k, v = (x.requires_grad_() for x in _inputs(1, 200, 200, 64, torch.bfloat16, "cuda"))
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            flashmask_attention(q, k, v, masks.causal(200, device="cuda")).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]
