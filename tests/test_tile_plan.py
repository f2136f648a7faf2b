"""The plan says what the mask says, whoever makes it, and stays small."""

from __future__ import annotations

import math

import pytest
import torch
from tools.support import EACH_FAMILY, FAMILIES, covering, interpret_assertions, poisoned

import flashmask_hf.tile_plan
from flashmask_hf import FlashMask, masks
from flashmask_hf.tile_plan import MAX_COLUMN_TILES, ROWS, VISIBLE_SEGMENTS, Plan, build_plan, plan_columns
from flashmask_hf.tiles import HIDDEN, PARTIAL, VISIBLE, classify_tiles


def _tiles_by_rows(plan: Plan) -> torch.Tensor:
    """The classification that the lists say."""
    tiles = torch.full(plan.tiles.shape, HIDDEN, dtype=torch.int8)
    width = tiles.shape[-1]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in plan.tiles.shape[:3])).tolist():
        row = plan.tiles[tuple(index)].tolist()
        visible, partial = plan.counts[tuple(index)].tolist()
        assert row[:visible] == sorted(row[:visible])
        backwards = row[width - partial :][::-1]
        assert backwards == sorted(backwards)
        tiles[tuple(index)][row[:visible]] = VISIBLE
        tiles[tuple(index)][backwards] = PARTIAL
    return tiles


def _tiles_by_columns(plan: Plan) -> torch.Tensor:
    """The classification that the segments say."""
    tiles = torch.full(plan.tiles.shape, HIDDEN, dtype=torch.int8)
    batch, heads, n_kv, slots, _ = plan.segments.shape
    for b, h, column, slot in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, n_kv, slots))).tolist():
        start, end = plan.segments[b, h, column, slot].tolist()
        assert 0 <= start <= end <= plan.tiles.shape[2]
        tiles[b, h, start:end, column] = VISIBLE if slot < VISIBLE_SEGMENTS else PARTIAL
    return tiles


def _padded(tiles: torch.Tensor) -> torch.Tensor:
    """`classify_tiles` in the plan's shape, which has two tiles or more each way."""
    rows, columns = tiles.shape[-2:]
    return torch.nn.functional.pad(tiles, (0, max(0, 2 - columns), 0, max(0, 2 - rows)), value=HIDDEN)


def _random_mask(causal: bool, n: int, q_len: int, kv_len: int, seed: int) -> FlashMask:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, q_len + 1, (2, 2, kv_len, n), generator=generator, dtype=torch.int32)
    return FlashMask(indices[:, :, torch.arange(kv_len) // 200 * 200], causal, q_len=q_len)


def _builders() -> list:
    return [
        pytest.param(("torch", "cpu"), id="torch"),
        pytest.param(("triton", "cpu"), id="interpreter", marks=pytest.mark.interpreter),
        pytest.param(("triton", "cuda"), id="gpu", marks=pytest.mark.gpu),
    ]


def _build(builder: str, device: str, mask: FlashMask, q_len: int) -> Plan:
    if builder == "triton":
        from flashmask_hf.kernels.shared.plan_kernels import build_plan as build
    else:
        build = build_plan
    with poisoned():
        return Plan(*(x.cpu() for x in build(mask.indices.to(device), mask.causal, q_len)))


FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


@pytest.mark.parametrize(
    ("builder", "form", "lengths"),
    [
        *covering(3, _builders(), FORMS, [(1, 1), (129, 129)]),
        *covering(1, _builders(), FORMS, [(700, 1025), (1025, 700)]),
    ],
)
def test_lists_and_segments_say_what_the_tiles_are(builder, form, lengths) -> None:
    for seed in range(2):
        mask = _random_mask(*form, *lengths, seed)
        tiles = _padded(classify_tiles(mask.indices, mask.causal, lengths[0], (ROWS, plan_columns(lengths[1]))))
        plan = _build(*builder, mask, lengths[0])
        assert torch.equal(_tiles_by_rows(plan), tiles)
        assert torch.equal(_tiles_by_columns(plan), tiles)
        if builder[0] != "torch":
            continue
        everything = build_plan(mask.indices, mask.causal, lengths[0], skip=False)
        whole = tiles.clone()
        rows, columns = -(-lengths[0] // ROWS), -(-lengths[1] // plan_columns(lengths[1]))
        whole[..., :rows, :columns][tiles[..., :rows, :columns] == HIDDEN] = PARTIAL
        assert torch.equal(_tiles_by_rows(everything), whole)
        assert torch.equal(_tiles_by_columns(everything), whole)


@pytest.mark.parametrize("family", EACH_FAMILY)
@pytest.mark.parametrize("builder", _builders())
def test_families(builder: tuple[str, str], family: str) -> None:
    mask = FAMILIES[family](600, 513)
    tiles = classify_tiles(mask.indices, mask.causal, 513, (ROWS, plan_columns(600)))
    plan = _build(*builder, mask, 513)
    assert torch.equal(_tiles_by_rows(plan), tiles)
    assert torch.equal(_tiles_by_columns(plan), tiles)


@pytest.mark.parametrize("builder", [p for p in _builders() if p.id != "torch"])
def test_segments_that_end_with_the_rows(builder: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their closing edges lie past the last row tile, in a round of lanes of its own; a window's edges lie in two."""
    from flashmask_hf.kernels.shared import plan_kernels as kernels

    monkeypatch.setattr(kernels, "_LANES", 4)
    for length, mask in ((512, masks.causal(512)), (1536, masks.sliding_window(1536, 600))):
        plan = _build(*builder, mask, length)
        assert torch.equal(_tiles_by_columns(plan), classify_tiles(mask.indices, True, length, (ROWS, 128)))


@pytest.mark.parametrize("builder", _builders())
def test_wide_tiles(builder: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that makes tiles wide is patched, so that short rows have them."""
    monkeypatch.setattr(flashmask_hf.tile_plan, "MAX_COLUMN_TILES", 4)
    for mask in (masks.sliding_window(1025, 300), masks.causal_document([400, 625]), masks.document([1000, 25])):
        assert plan_columns(1025) == 384
        tiles = classify_tiles(mask.indices, mask.causal, 1025, (ROWS, 384))
        plan = _build(*builder, mask, 1025)
        assert torch.equal(_tiles_by_rows(plan), tiles)
        assert torch.equal(_tiles_by_columns(plan), tiles)


@pytest.mark.parametrize("builder", [p for p in _builders() if p.id != "interpreter"])
def test_wide_tiles_of_of_very_long_rows(builder: tuple[str, str]) -> None:
    """Past MAX_COLUMN_TILES tiles a row's tiles get wider, and the lists still say what the mask says."""
    kv_len = 128 * MAX_COLUMN_TILES * 2 + 77
    mask = masks.sliding_window(kv_len, 4000, q_len=130)
    assert plan_columns(kv_len) == 384
    plan = _build(*builder, mask, 130)
    assert torch.equal(_tiles_by_rows(plan), classify_tiles(mask.indices, mask.causal, 130, (ROWS, 384)))


@pytest.mark.parametrize("kv_len", [1, 1000, 8192, 131072, 524288, 1048576])
def test_memory_is_at_most_64_bytes_per_token(kv_len: int) -> None:
    indices = torch.empty(1, 1, kv_len, 1, dtype=torch.int32, device="meta")
    from flashmask_hf._call.operators import make_plan

    plan = make_plan(indices, True, kv_len)
    size = sum(x.numel() * x.element_size() for x in plan)
    assert size <= 64 * max(kv_len, 256)
    assert int(plan[0].shape[-1]) <= torch.iinfo(torch.int16).max


@pytest.mark.gpu
def test_a_million_tokens_on_the_gpu() -> None:
    from flashmask_hf.kernels.shared.plan_kernels import build_plan as build

    kv_len = 1048576
    mask = masks.causal_document([4096] * (kv_len // 4096), device="cuda")
    build(mask.indices, True, kv_len)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = build(mask.indices, True, kv_len)
    assert torch.cuda.max_memory_allocated() - before <= 64 * kv_len
    assert int(plan.counts[..., 0].sum()) == 256 * 32 * 31 // 2 or plan_columns(kv_len) > 128


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("builder", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_indices_out_of_range(builder: str, form: tuple[bool, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One bound of one column is enough, and none too many: 0 and q_len are in range."""
    causal, n = form
    if builder == "triton":
        from flashmask_hf.kernels.shared.plan_kernels import build_plan as build

        interpret_assertions(monkeypatch)
    else:
        from flashmask_hf._call.operators import make_plan as build
    for bound in range(n):
        for value in (-1, 0, 150, 151):
            indices = torch.full((1, 1, 300, n), 70, dtype=torch.int32)
            indices[:, :, 277, bound] = value
            if 0 <= value <= 150:
                build(indices, causal, 150)
                continue
            with pytest.raises(Exception, match=r"the mask's indices must lie in 0\.\.q_len.*validate"):
                build(indices, causal, 150)


DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    ("form", "lengths", "device"),
    [
        *covering(3, FORMS, [(1, 1), (128, 128), (129, 300)], DEVICES),
        *covering(1, FORMS, [(700, 1025), (1100, 500)], DEVICES),
    ],
)
def test_joined_rows(
    monkeypatch: pytest.MonkeyPatch, form: tuple[bool, int], lengths: tuple[int, int], device: str
) -> None:
    """A tile of 192 rows walks what either of the two lists has that it meets, and masks what not both see whole."""
    from flashmask_hf.kernels.shared import plan_kernels as kernels

    monkeypatch.setattr(kernels, "_LANES", 4)  # several rounds for a list
    q_len, kv_len = lengths
    mask = _random_mask(*form, q_len, kv_len, seed=0)
    plan = build_plan(mask.indices, mask.causal, q_len)
    by_rows = _tiles_by_rows(plan)[:, :, : -(-q_len // ROWS)]
    tiles, counts, rows = kernels.join_rows(Plan(*(x.to(device) for x in plan)), q_len, 0)
    assert rows.tolist() == [192]
    joined = _tiles_by_rows(Plan(tiles.cpu(), counts.cpu(), plan.segments))
    assert joined.shape[2] == -(-q_len // 192)
    for row in range(joined.shape[2]):
        upper = by_rows[:, :, row * 192 // ROWS]
        lower = by_rows[:, :, min(row * 192 // ROWS + 1, by_rows.shape[2] - 1)]
        either = torch.where((upper != HIDDEN) | (lower != HIDDEN), PARTIAL, HIDDEN)
        expected = torch.where((upper == VISIBLE) & (lower == VISIBLE), VISIBLE, either)
        assert torch.equal(joined[:, :, row], expected.to(joined.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "q_len", "document", "mean"),
    [(2, 1024, 1024, 4.5), (1, 256 * 128, 8 * 128, 4.5), (64, 1024, 1024, 4.5), (48, 3 * 128, 3 * 128, 2.0)],
    ids=str,
)
def test_rows_to_join(device: str, count: int, q_len: int, document: int, mean: float) -> None:
    """Lists are joined where they are long on average, however regular they are."""
    from flashmask_hf.kernels.shared.plan_kernels import join_rows

    ends = (torch.arange(q_len, dtype=torch.int32) // document + 1) * document
    plan = build_plan(ends.view(1, 1, -1, 1).repeat(count, 1, 1, 1), True, q_len)
    assert plan.counts.sum(-1).double().mean() == mean
    plan = Plan(*(x.to(device) for x in plan))
    rows = [join_rows(plan, q_len, least)[2].item() for least in (0, math.floor(mean - 0.4), math.ceil(mean + 0.4))]
    assert rows == [192, 192, 128]
