"""The Hopper kernels on a CPU: their results, and freedom from races and deadlocks (see `gluon_interpreter`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.support import (
    BLIND_ROWS,
    EACH_FAMILY,
    EACH_HEADS,
    FAMILIES,
    HEADS,
    INTERPRETED,
    KV_HEADS,
    Lane,
    assert_results,
    attention_inputs,
    batch_and_heads,
    check_low_scores,
    check_lse_of_rows_that_see_nothing,
    check_random_call,
    check_upstream_of_blind_rows,
    covering,
    offer_tall_tiles,
    poisoned,
    references,
    row_orders,
    run,
    separate_rows,
)
from torch._subclasses import FakeTensorMode

if not INTERPRETED:
    pytest.skip("interpreter lane: set TRITON_INTERPRET=1", allow_module_level=True)

from flashmask_hf.kernels.hopper import gluon

if gluon.import_failure is not None:
    pytest.skip(f"interpreter lane: {gluon.import_failure}", allow_module_level=True)

from _call.test_call import KINDS, check_repeated
from tools import gluon_interpreter, hopper_kernels, ordered_sums
from tools.gluon_interpreter import interpreted
from tools.sparse_attention import check as check_sparse

from flashmask_hf import FlashMask, masks, tile_plan
from flashmask_hf._call import call, implementations
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf._call.operators import flash_attn_backward, flash_attn_forward, plan_of
from flashmask_hf.kernels.hopper import backward as hopper_backward
from flashmask_hf.kernels.hopper import backward_roles, dq_order
from flashmask_hf.kernels.hopper import forward as hopper_forward
from flashmask_hf.kernels.hopper.head_dims import widths_of
from flashmask_hf.kernels.launch import descriptors
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.kernels.launch.tensor_layout import layout_of
from flashmask_hf.kernels.shared import work_order
from flashmask_hf.sparse import hash_sparse_attention
from flashmask_hf.sparse.reorder import put_rows_back
from flashmask_hf.tile_plan import ROWS
from flashmask_hf.tiles import HIDDEN, classify_tiles

pytestmark = pytest.mark.interpreter

DTYPES = {64: torch.bfloat16, 128: torch.float16}
EACH_DIM = [64, pytest.param(128, marks=pytest.mark.full)]
"""Head dims of tests whose subject is the same code in both."""
PADDED = [(40, 40), (32, 56), (72, 128), (96, 96)]
"""Sizes (head_dim, v_head_dim) of which tiles have columns that are filled with zeros."""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """impl="hopper" serves tensors on the CPU, with three programs at most, and sorts the work items of the last heads.

    The forward leaves its counters 0.
    """
    monkeypatch.setattr(work_order, "_SORTED_ITEMS", 1)
    monkeypatch.setattr(implementations.Hopper, "limit", lambda *given: None)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    counters: list[torch.Tensor] = []
    make = hopper_forward._counter

    def counter(q: torch.Tensor) -> torch.Tensor:
        counters.append(make(q))
        return counters[-1]

    monkeypatch.setattr(hopper_forward, "_counter", counter)
    with interpreted():
        yield
    assert not any(counters)


def _inputs(
    dim: int,
    q_len: int,
    kv_len: int,
    batch: int = 2,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    v_dim: int | None = None,
):
    lane = Lane("hopper", "cpu", DTYPES.get(dim, torch.bfloat16))
    return attention_inputs(lane, batch, heads, kv_heads, q_len, kv_len, dim, v_dim)


def _check(inputs, mask: FlashMask, orders: tuple[bool, ...] = (False, True), given=None, **options) -> None:
    """Output, LSE and gradients, with dQ in any order and in a fixed one; of `given`, which differs where none sees."""
    expected = references(*inputs, mask, **options)
    for ordered in orders:
        with poisoned(), pytest.MonkeyPatch.context() as patch:  # which would ask for an order
            patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda ordered=ordered: ordered)
            actual = run(*(given or inputs), mask, "hopper", **options)
        assert_results(actual, *expected, inputs[0].dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: dict[Any, call.Call] = {}
    monkeypatch.setattr(call, "_calls", calls)
    check_repeated(Lane("hopper", "cpu", torch.bfloat16), kind, calls)


@pytest.mark.parametrize(
    ("family", "dim", "lengths"),
    [*covering(1, EACH_FAMILY, DTYPES, [(200, 333)]), *covering(1, ["document"], DTYPES, [(1, 1)])],
)
def test_family(family: str, dim: int, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    ordered = bool(len(family) % 2)
    mask = FAMILIES[family](kv_len, q_len)
    _check(_inputs(dim, q_len, kv_len, *batch_and_heads(mask)), mask, (ordered,))


@pytest.mark.parametrize(("dims", "softcap"), covering(1, PADDED, [None, 3.0]))
def test_padded_tiles(dims: tuple[int, int], softcap: float | None) -> None:
    """What lies beside a row in memory reaches no result, and results stay in their rows."""
    q, k, v = _inputs(dims[0], 130, 200, v_dim=dims[1])
    mask = FAMILIES["prefix_lm_document" if softcap else "causal_document"](200, 130)
    _check((q, k, v), mask, (dims[0] == 40,), softcap=softcap)


WIDE = [(256, 256), (192, 128), (160, 144), (136, 64)]
"""Sizes (head_dim, v_head_dim) of which one is over 128."""


@pytest.mark.parametrize(
    ("dims", "family", "lengths"),
    [
        *covering(1, WIDE, ["prefix_lm_document", "hash_sparse"], [(200, 333)]),
        *covering(1, WIDE[:1], ["prefix_lm_document"], [(1, 1)]),
        *(
            pytest.param(*x.values, marks=pytest.mark.full, id=x.id)
            for x in covering(2, WIDE, ["prefix_lm_document", "hash_sparse"], [(1, 1)])[1:]
        ),
    ],
)
def test_wide(dims: tuple[int, int], family: str, lengths: tuple[int, int]) -> None:
    """The forward with one stage of queries, tiles of 64 keys or tails of queries and keys; the wide backward."""
    q_len, kv_len = lengths
    mask = FAMILIES[family](kv_len, q_len)
    inputs = attention_inputs(Lane("hopper", "cpu", torch.float16), *batch_and_heads(mask), q_len, kv_len, *dims)
    _check(inputs, mask, (False,))


@pytest.mark.parametrize(
    ("family", "dims", "deterministic"),
    covering(1, BLIND_ROWS, [(64, 64), (128, 128), (192, 128), (256, 256)], [False, True]),
)
def test_any_upstream_gradient_of_rows_that_see_nothing_gives_zeros(
    family: str, dims: tuple[int, int], deterministic: bool
) -> None:
    lane, mask = Lane("hopper", "cpu", torch.float16), BLIND_ROWS[family]()
    check_upstream_of_blind_rows(lane, mask, 1, 2, 1, 200, mask.kv_len, *dims, deterministic=deterministic)


@pytest.mark.parametrize(("dims", "seed"), covering(1, WIDE[:2], range(2)))
def test_wide_softcap_and_sinks(dims: tuple[int, int], seed: int) -> None:
    """More work items than programs, in any order of the roles."""
    sinks = torch.linspace(-1, 3, HEADS).requires_grad_()
    inputs = attention_inputs(Lane("hopper", "cpu", torch.float16), 1, HEADS, KV_HEADS, 400, 400, *dims)
    with interpreted(seed):
        _check(inputs, masks.causal_document([150, 250]), (False,), softcap=3.0, sinks=sinks)


@pytest.mark.parametrize(("heads", "dim", "ordered"), covering(1, EACH_HEADS, DTYPES, [False, True]))
def test_heads(heads: tuple[int, int, int], dim: int, ordered: bool) -> None:
    *heads, mask_heads = heads
    mask = masks.random_eviction(230, generator=torch.Generator().manual_seed(0), heads=mask_heads)
    _check(_inputs(dim, 230, 230, 1, *heads), mask, (ordered,))


@pytest.mark.parametrize(("form", "dim"), covering(1, [(True, 1), (True, 2), (False, 2), (False, 4)], DTYPES))
def test_softcap_and_sinks(form: tuple[bool, int], dim: int) -> None:
    causal, n = form
    indices = torch.randint(0, 201, (2, 1, 260, n), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    sinks = torch.linspace(-1, 3, HEADS).requires_grad_()
    _check(_inputs(dim, 200, 260), FlashMask(indices, causal, q_len=200), (n == 2,), softcap=3.0, sinks=sinks)


@pytest.mark.parametrize("dim", DTYPES)
def test_tiles_wider_than_the_kernel_s(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(tile_plan, "MAX_COLUMN_TILES", 2)
    _check(_inputs(dim, 500, 500, 1, 2, 1), masks.causal_document([170, 130, 200]), (dim == 64,))


@pytest.mark.parametrize("dim", EACH_DIM)
def test_long_ranges_begin_in_different_places(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(backward_roles, "_SPREAD_ROWS", gluon.gl.constexpr(256))
    _check(_inputs(dim, 700, 500, 1), masks.full(500, q_len=700), (False,))


@pytest.mark.parametrize(("dim", "mask_heads"), covering(1, DTYPES, ["one", "q", "q, last rows first"]))
def test_query_heads_walk_bands_of_rows(monkeypatch: pytest.MonkeyPatch, dim: int, mask_heads: str) -> None:
    """Three query heads of a key-value head walk each 256 rows before the next, past rows that none of them sees."""
    monkeypatch.setattr(dq_order, "_BAND_ROWS", 256)
    mask = masks.sliding_window(700, 150, causal=False) if mask_heads == "one" else separate_rows(700, 6)
    if mask_heads == "q, last rows first":
        mask = FlashMask(mask.indices.flip(1), False)
    _check(_inputs(dim, 700, 700, 1, 6, 2), mask, (True,))


@pytest.mark.parametrize("dim", [64, 256])
def test_tiles_of_keys_are_taken_in_their_order(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """One program loads those of the first head in ascending order, and of the last head those of most rows first."""
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 1)
    mask = masks.causal_document([140, 628])
    q, k, v, dout = hopper_kernels.inputs(1, 2, 2, 768, 768, (dim, dim), torch.float16, "cpu")
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 768)
    columns = 64 if dim == 256 else 128
    loaded: list[tuple[int, int]] = []
    tile_of = gluon_interpreter.Descriptor.tile

    def spy(self, coordinates):
        if self.tensor.data_ptr() == k.data_ptr():
            place = int(coordinates[1]), int(coordinates[2]) // columns
            loaded.extend([place] if loaded[-1:] != [place] else [])
        return tile_of(self, coordinates)

    monkeypatch.setattr(gluon_interpreter.Descriptor, "tile", spy)
    lse, delta = torch.zeros(1, 2, 768), torch.zeros(1, 2, 768)
    hopper_kernels.backward(dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0)
    parts = 128 // columns  # of a tile of the plan, whose rows are counted
    walked = [2, 5, 4, 3, 2, 1]
    assert (tiles.segments[0, 0, :, :, 1] - tiles.segments[0, 0, :, :, 0]).sum(-1).tolist() == walked
    ascending = list(range(6 * parts))
    by_rows = sorted(ascending, key=lambda tile: -walked[tile // parts].bit_length())
    assert loaded == [(0, tile) for tile in ascending] + [(1, tile) for tile in by_rows]


@pytest.mark.parametrize(
    ("family", "per_head", "group"), covering(2, ["causal_document", "document"], [False, True], [3, 4])
)
def test_the_simulated_walk_is_the_kernel_s(
    monkeypatch: pytest.MonkeyPatch, family: str, per_head: bool, group: int
) -> None:
    """One program loads (query head, row tile) in the order of `tools.ordered_sums`, with bands of either kind, and
    upwards if a key-value head has four query heads."""
    heads = 2 * group
    monkeypatch.setattr(dq_order, "_BAND_ROWS", 256)
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 1)
    makers = {"causal_document": masks.causal_document, "document": masks.document}
    given = [makers[family](lengths) for lengths in ([400, 368], [468, 300], [100, 668])]
    indices = [given[head % 3].indices for head in range(heads if per_head else 1)]
    mask = FlashMask(torch.cat(indices, 1), given[0].causal)
    q, k, v, dout = hopper_kernels.inputs(1, heads, 2, 768, 768, (64, 64), torch.float16, "cpu")
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 768)
    problem = problem_of(Inputs(q, k, v, None, mask.indices), mask.causal, Arguments(0.1))
    made = dq_order.prepare_dq_order(problem, 128, 128, 1)(mask.indices)
    loaded: list[tuple[int, int]] = []
    tile_of = gluon_interpreter.Descriptor.tile

    def spy(self, coordinates):
        if self.tensor.data_ptr() == q.data_ptr():
            place = int(coordinates[1]), int(coordinates[2]) // ROWS
            loaded.extend([place] if loaded[-1:] != [place] else [])
        return tile_of(self, coordinates)

    monkeypatch.setattr(gluon_interpreter.Descriptor, "tile", spy)
    lse, delta = torch.zeros(1, heads, 768), torch.zeros(1, heads, 768)
    hopper_kernels.backward(dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, deterministic=True)
    interleaved, *bands, upward = made.schedule.tolist()
    assert upward == (group == 4)
    lines = ordered_sums.segments_of(made.segments, group if per_head else 1)
    items = ordered_sums.work_items(made.key_tile_order[upward].tolist(), [0, len(lines) - 1], interleaved)
    expected: list[tuple[int, int]] = []
    for plane, line, tile in items:
        segments = [x[tile] for x in lines[line]] * (1 if per_head else group)
        for head, row in ordered_sums.walk(segments, *(x // ROWS for x in bands), upward, 768 // ROWS):
            if expected[-1:] != [(plane * group + head, row)]:
                expected.append((plane * group + head, row))
    assert loaded == expected


@pytest.mark.parametrize(
    ("dims", "mask_heads"),
    covering(1, [(64, 64), pytest.param((256, 256), marks=pytest.mark.full)], [2, 1]),
)
def test_each_mask_has_its_own_order(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], mask_heads: int) -> None:
    """One program would wait forever for itself in the order of another batch entry or another head."""
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 1)
    blocks = [[256] * 4, [128, 384, 256, 256]]
    indices = [
        torch.cat([masks.causal_blockwise(blocks[(entry + head) % 2]).indices for head in range(mask_heads)], 1)
        for entry in range(2)
    ]
    mask = FlashMask(torch.cat(indices), True)
    inputs = attention_inputs(Lane("hopper", "cpu", torch.float16), 2, 2, 2, 1024, 1024, *dims)
    _check(inputs, mask, (True,))


@pytest.mark.parametrize(("window", "warpgroups"), [(700, 3), (100, 2)])
def test_the_mask_decides_on_tall_tiles(monkeypatch: pytest.MonkeyPatch, window: int, warpgroups: int) -> None:
    """One of two launches does nothing; the results equal those of the other's configuration to the bit."""
    offer_tall_tiles(monkeypatch, 3)
    inputs = _inputs(64, 700, 700, 1, 2, 1)
    mask = masks.sliding_window(700, window)
    _check(inputs, mask, (False,))
    config = (hopper_forward._TALL if warpgroups == 3 else hopper_forward._FORWARD)[widths_of(64, 64)]
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 700)
    with interpreted() as names, poisoned():
        taken, alone = (
            hopper_kernels.forward(*(x.detach() for x in inputs), mask, tiles, None, 0.1, 0.0, config=given)
            for given in (None, config)
        )
    assert names == ["forward_kernel"] * 3
    assert all(torch.equal(x, y) for x, y in zip(taken, alone, strict=True))


@pytest.mark.parametrize(("dim", "ordered"), covering(1, DTYPES, [False, True]))
def test_keys_that_no_row_sees(dim: int, ordered: bool) -> None:
    """Whole tiles, whatever they hold, one after the other, at the beginning and the end of what a program does."""
    mask = masks.full(900, q_len=200)
    mask.indices[:, :, :256] = 0
    mask.indices[:, :, 512:] = 0
    inputs = _inputs(dim, 200, 900, 2, 2, 2)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    for x in given[1:3]:
        x.detach()[:, :, :256] = float("inf")
        x.detach()[:, :, 512:] = float("nan")
    _check(inputs, mask, (ordered,), given)


def test_the_gradient_of_lse_where_rows_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # for gradients to the bit
    check_lse_of_rows_that_see_nothing(Lane("hopper", "cpu", DTYPES[64]), _inputs(64, 200, 200, 1))


@pytest.mark.parametrize("dim", EACH_DIM)
def test_low_scores(dim: int) -> None:
    check_low_scores(Lane("hopper", "cpu", DTYPES[dim]), masks.causal_document([40, 32, 128]), 200, dim)
    check_low_scores(Lane("hopper", "cpu", DTYPES[dim]), masks.padding([130], kv_len=200), 200, dim)


@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_wide_rows_put_back(dims: tuple[int, int]) -> None:
    """Rows of the output are put in the given order, to the bit."""
    q, k, v = (x.detach() for x in _inputs(dims[0], 200, 333, 2, 2, 1, dims[1]))
    mask = FAMILIES["document"](333, 200)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 200)
    order, _ = row_orders(q, k)
    with poisoned():
        (apart, lse), (together, same) = (
            hopper_kernels.forward(q, k, v, mask, tiles, None, 0.1, 0.0, order=given) for given in (None, order)
        )
    assert torch.equal(put_rows_back(apart, order), together)
    assert torch.equal(lse, same)


def test_wide_sparse_attention() -> None:
    buckets = torch.randint(0, 3, (1, HEADS, 150), generator=torch.Generator().manual_seed(0))
    lane = Lane("hopper", "cpu", torch.float16)
    check_sparse(hash_sparse_attention, buckets, buckets[:, :KV_HEADS], lane, dim=192, v_dim=128, n_buckets=3)


@pytest.mark.parametrize(
    "dims",
    [
        (64, 64),
        pytest.param((128, 128), marks=pytest.mark.full),
        pytest.param((32, 56), marks=pytest.mark.full),
        (72, 128),
    ],
    ids=str,
)
def test_rows_put_back(dims: tuple[int, int]) -> None:
    """Rows of the output and all gradients are put in the given order, to the bit, however the roles are scheduled."""
    q, k, v = (x.detach() for x in _inputs(dims[0], 200, 333, 2, 2, 1, dims[1]))
    dout = torch.randn(*q.shape[:3], dims[1], generator=torch.Generator().manual_seed(1)).to(q.dtype)
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    mask = FAMILIES["document"](333, 200)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 200)
    order, k_order = row_orders(q, k)
    results = []
    for seed, orders in enumerate((None, (order, k_order), (order, k_order))):
        with interpreted(seed), poisoned():
            out, lse = hopper_kernels.forward(q, k, v, mask, tiles, None, 0.1, 0.0, order=orders and orders[0])
            delta = (out.float() * dout).sum(-1) if orders is None else results[0][-1]
            gradients = hopper_kernels.backward(
                dout, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, deterministic=True, orders=orders
            )
        results.append((out, *gradients[:3], lse, delta))
    for x, y, again, where in zip(*results, (order, order, k_order, k_order, None, None), strict=True):
        assert torch.equal(y, again)
        assert torch.equal(x if where is None else put_rows_back(x, where), y)


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)


COPIED = {
    "expanded over the batch": lambda x: x[:1].expand(x.shape),
    "misaligned": _misaligned,
    "odd strides": lambda x: torch.nn.functional.pad(x.transpose(1, 2), (1, 2))[..., 1:-2].transpose(1, 2),
    "dims outside rows": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("layout", COPIED)
def test_gradients_of_what_no_descriptor_fits(layout: str) -> None:
    """They have the bits of those of compact inputs, in the layout that compilers are told."""
    given = [COPIED[layout](x.detach()) for x in _inputs(64, 70, 70)]
    assert not any(descriptors.fits_descriptor(layout_of(x)) for x in given)
    mask = masks.causal_document([30, 40])
    results = []
    for q, k, v in (given, [x.contiguous() for x in given]):
        settings = (mask.indices, *plan_of(mask, 70), None, True, 0.1, None, "hopper", True, 0.0)
        out, lse = flash_attn_forward(q, k, v, None, *settings)
        results.append((out, *flash_attn_backward(out, None, out, lse, q, k, v, None, *settings)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    with FakeTensorMode() as mode:
        out, q, k, v, lse = map(mode.from_tensor, (results[0][0], *given, lse))
        settings = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in settings]
        told = flash_attn_backward(out, None, out, lse, q, k, v, None, *settings)
    assert [x.stride() for x in results[0][1:]] == [x.stride() for x in told]


@pytest.mark.parametrize("given", ["out", "delta"])
def test_row_statistics_of_any_strides(given: str) -> None:
    """The kernels read LSE, its gradient and delta as contiguous tensors."""
    q, k, v = (x.detach() for x in _inputs(64, 70, 70))
    mask = masks.causal_document([30, 40])
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 70)
    lse, delta, dlse = torch.randn(3, *q.shape[:3], generator=torch.Generator().manual_seed(0)).unbind()
    results = []
    for strided in (False, True):
        rows = [x.mT.contiguous().mT if strided else x for x in (lse, delta, dlse)]
        assert rows[0].is_contiguous() is not strided
        sums = rows[1] if given == "delta" else (q, rows[2])
        results.append(hopper_kernels.backward(q, q, k, v, rows[0], sums, mask, tiles, 0.1, 0.0, deterministic=True))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_masks_and_sinks_of_any_strides() -> None:
    """The kernels read the mask's indices and the sinks as contiguous tensors."""
    q, k, v = (x.detach() for x in _inputs(64, 70, 70))
    mask = masks.causal_document([30, 40])
    strided = FlashMask(torch.stack([mask.indices, torch.zeros_like(mask.indices)], -1)[..., 0], True, q_len=70)
    sinks = torch.linspace(-1, 3, HEADS)
    strided_sinks = sinks.repeat_interleave(2)[::2]
    assert not strided.indices.is_contiguous()
    assert not strided_sinks.is_contiguous()
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 70)
    results = []
    for one, other in ((mask, sinks), (strided, strided_sinks)):
        out, lse = hopper_kernels.forward(q, k, v, one, tiles, other, 0.1, 0.0)
        delta = torch.zeros_like(lse)
        results.append(
            (out, lse, *hopper_kernels.backward(out, q, k, v, lse, delta, one, tiles, 0.1, 0.0, deterministic=True))
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in (3, 4))])
def test_random_calls(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The roles run in an order that the seed draws, too."""
    offer_tall_tiles(monkeypatch, seed % 3)
    with interpreted(seed):
        check_random_call(seed, "cpu", ["hopper"], [torch.bfloat16, torch.float16], longest=300)


@pytest.mark.parametrize("dim", EACH_DIM)
def test_a_fixed_order(dim: int) -> None:
    """Sums in dQ are the same to the bit, whichever program comes first: five tiles of keys add to each row."""
    q, k, v = (x.detach().half() for x in _inputs(dim, 70, 640, 1, 2, 2))
    mask = masks.full(640, q_len=70)
    tiles = tile_plan.build_plan(mask.indices, mask.causal, 70)
    lse, delta = torch.zeros(1, 2, 70), torch.zeros(1, 2, 70)
    results = []
    for seed in range(6):
        with interpreted(seed):
            results.append(
                hopper_kernels.backward(q, q, k, v, lse, delta, mask, tiles, 0.1, 0.0, deterministic=True)[0]
            )
    assert all(torch.equal(results[0], other) for other in results[1:])


WALKED = {
    "causal documents": lambda: masks.causal_document([100, 268, 400]),
    "shared questions": lambda: masks.share_question([(100, [70, 130]), (90, [150, 228])]),
    "window": lambda: masks.sliding_window(768, 100, causal=False),
    "global window": lambda: masks.global_sliding_window(768, 70, 60, causal=False),
}


@pytest.mark.parametrize(
    ("mask", "dims", "deterministic"), covering(1, WALKED, [(128, 128), (256, 256)], [False, True])
)
def test_hidden_tiles_are_not_walked(
    monkeypatch: pytest.MonkeyPatch, mask: str, dims: tuple[int, int], deterministic: bool
) -> None:
    """The kernel loads its tiles of rows, which are smaller than the plan's, for keys that they see.

    Without an order it walks what is hidden in the middle of a range, as under a global window.
    """
    given = WALKED[mask]()
    q, k, v, dout = hopper_kernels.inputs(1, 1, 1, 768, 768, dims, torch.float16, "cpu")
    loaded = 0
    tile_of = gluon_interpreter.Descriptor.tile

    def spy(self, coordinates):
        nonlocal loaded
        loaded += self.tensor.data_ptr() == q.data_ptr()
        return tile_of(self, coordinates)

    monkeypatch.setattr(gluon_interpreter.Descriptor, "tile", spy)
    tiles = tile_plan.build_plan(given.indices, given.causal, 768)
    lse, delta = torch.zeros(1, 1, 768), torch.zeros(1, 1, 768)
    hopper_kernels.backward(dout, q, k, v, lse, delta, given, tiles, 0.1, 0.0, deterministic)
    block_n = 128 if dims == (128, 128) else 64
    seen = int((classify_tiles(given.indices, given.causal, 768, (64, block_n)) != HIDDEN).sum())
    in_the_middle = 3 if mask == "global window" and not deterministic else 0
    assert seen <= loaded <= seen + in_the_middle
