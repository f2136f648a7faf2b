"""FlashMask: what its numbers mean, against definitions written out pair by pair."""

from __future__ import annotations

import doctest
import io
from itertools import combinations, groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.support import FAMILIES

import flashmask_hf.mask
from flashmask_hf import FlashMask, MaskNotRepresentable, flashmask_attention, masks
from flashmask_hf.tiles import HIDDEN, PARTIAL, VISIBLE, classify_tiles

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]
form_ids = [f"{'causal' if causal else 'bidirectional'}-n{n}" for causal, n in FORMS]
thorough = settings(max_examples=100)


def hides(bounds: list[int], causal: bool, i: int, j: int, q_len: int, kv_len: int) -> bool:
    """Return whether the table of the FlashMask docstring hides one pair."""
    if causal and i + (kv_len - q_len) < j:
        return True
    if len(bounds) == 1:
        return bounds[0] <= i
    if len(bounds) == 4:
        return bounds[0] <= i < bounds[1] or bounds[2] <= i < bounds[3]
    if causal:
        return bounds[0] <= i < bounds[1]
    return bounds[0] <= i or i < bounds[1]


def dense_by_pairs(mask: FlashMask, q_len: int) -> torch.Tensor:
    """Return the dense mask, bool [B, H, Sq, Skv], decided pair by pair."""
    batch, heads, kv_len, _ = mask.indices.shape
    visible = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b, h, i, j in np.ndindex(*visible.shape):
        visible[b, h, i, j] = not hides(mask.indices[b, h, j].tolist(), mask.causal, i, j, q_len, kv_len)
    return visible


def hidden_runs(column: list[bool]) -> list[tuple[int, int]]:
    """Return the maximal runs of False in one column of a dense mask as (start, end) pairs."""
    runs, row = [], 0
    for visible, group in groupby(column):
        size = len(list(group))
        if not visible:
            runs.append((row, row + size))
        row += size
    return runs


def shortest_form(visible: torch.Tensor) -> tuple[bool, int] | None:
    """Return (causal, n) of the shortest layout that holds a dense mask [B, H, Sq, Skv], or None."""
    q_len, kv_len = visible.shape[-2:]
    columns = [(j, column.tolist()) for head in visible.flatten(0, 1) for j, column in enumerate(head.T)]
    fits = {form: True for form in FORMS}
    for j, column in columns:
        diagonal = min(max(j - (kv_len - q_len), 0), q_len)
        below = hidden_runs(column[diagonal:])
        leaks = any(column[:diagonal])
        fits[True, 2] &= not leaks and len(below) <= 1
        fits[True, 1] &= not leaks and (below == [] or (len(below) == 1 and below[0][1] == q_len - diagonal))
        whole = hidden_runs(column)
        fits[False, 4] &= len(whole) <= 2
        fits[False, 2] &= all(start == 0 or end == q_len for start, end in whole)
    return next((form for form in FORMS if fits[form]), None)


def columns_with_more_runs_than(visible: torch.Tensor, limit: int) -> list[tuple[int, int, int]]:
    """Return the (batch, head, column) triples of a dense mask with more than `limit` runs of hidden rows."""
    batch, heads, _, kv_len = visible.shape
    return [
        (b, h, j)
        for b, h, j in np.ndindex(batch, heads, kv_len)
        if len(hidden_runs(visible[b, h, :, j].tolist())) > limit
    ]


def random_mask(
    seed: int, form: tuple[bool, int], shape: tuple[int, int, int], q_len: int, *, short: bool = False
) -> FlashMask:
    """Build a mask [B, Hm, Skv, n] with arbitrary bounds: intervals overlap, touch, are empty or run backwards.

    `short` orders the bounds of each interval and keeps them close, so that a column tends to have several.
    """
    causal, n = form
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(q_len + 1, (*shape, n), generator=generator, dtype=torch.int32)
    if short and form in ((True, 2), (False, 4)):
        length = torch.randint(q_len // 4 + 2, (*shape, n // 2), generator=generator, dtype=torch.int32)
        indices[..., 1::2] = (indices[..., ::2] + length).clamp(max=q_len)
    return FlashMask(indices, causal, q_len=q_len)


seeds = st.integers(0, 2**32 - 1)


@st.composite
def flash_masks(
    draw: st.DrawFn,
    form: tuple[bool, int] | None = None,
    lengths: tuple[int, int] | None = None,
    short: bool | None = None,
) -> FlashMask:
    """Draw a `random_mask`; None leaves the form, (q_len, kv_len) or `short` to chance."""
    q_len, kv_len = lengths or draw(st.tuples(st.integers(1, 7), st.integers(1, 6)))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), kv_len)
    form = form or draw(st.sampled_from(FORMS))
    return random_mask(draw(seeds), form, shape, q_len, short=draw(st.booleans()) if short is None else short)


@st.composite
def dense_masks(draw: st.DrawFn) -> torch.Tensor:
    """Draw a dense mask, bool [B, H, Sq, Skv]: arbitrary pairs, or the dense form of a FlashMask."""
    if draw(st.booleans()):
        return draw(flash_masks()).to_dense()
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 6), st.integers(1, 5)))
    share = draw(st.sampled_from([0.2, 0.5, 0.8]))
    return torch.rand(shape, generator=torch.Generator().manual_seed(draw(seeds))) < share


def mask_of(*columns: list[int], causal: bool, q_len: int | None = None) -> FlashMask:
    """Build a mask [1, 1, Skv, n] from its n vectors."""
    return FlashMask(torch.tensor(columns, dtype=torch.int32).T[None, None].contiguous(), causal, q_len=q_len)


@pytest.mark.parametrize("form", FORMS, ids=form_ids)
@thorough
@given(data=st.data())
def test_to_dense_follows_the_table(form, data):
    mask = data.draw(flash_masks(form))
    assert torch.equal(mask.to_dense(), dense_by_pairs(mask, mask.row_count()))


@thorough
@given(flash_masks(lengths=(4, 6)))
def test_a_mask_without_q_len_uses_the_callers(mask):
    free = FlashMask(mask.indices, mask.causal)
    assert torch.equal(free.to_dense(4), mask.to_dense())
    assert free.to_dense().shape[-2] == 6


@pytest.mark.parametrize("form", FORMS, ids=form_ids)
@thorough
@given(data=st.data())
def test_from_dense_inverts_to_dense(form, data):
    mask = data.draw(flash_masks(form))
    again = FlashMask.from_dense(mask.to_dense())
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert again.indices.shape[-1] <= mask.indices.shape[-1]
    assert again.row_count() == mask.row_count()
    again.validate()
    same_form = FlashMask.from_dense(mask.to_dense(), causal=mask.causal)
    assert same_form.causal == mask.causal
    assert torch.equal(same_form.to_dense(), mask.to_dense())


@settings(max_examples=300)
@given(dense_masks())
def test_from_dense_finds_the_shortest_form_or_names_the_columns(visible):
    form = shortest_form(visible)
    if form is None:
        with pytest.raises(MaskNotRepresentable) as error:
            FlashMask.from_dense(visible)
        assert error.value.columns == columns_with_more_runs_than(visible, 2)[:16]
        assert str(error.value.columns[0]) in str(error.value)
    else:
        mask = FlashMask.from_dense(visible)
        assert (mask.causal, mask.indices.shape[-1]) == form
        assert torch.equal(mask.to_dense(), visible)


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (["100", "110", "111"], (True, 1)),
        (["100", "110", "011"], (True, 1)),
        (["100", "010", "111"], (True, 2)),
        (["110", "110", "001"], (False, 2)),
        (["111", "010", "111"], (False, 4)),
        (["1000", "1100", "0010", "1011"], (True, 2)),
        (["1000", "0100", "1010", "0101"], (False, 4)),
    ],
)
def test_from_dense_finds_forms_worked_out_by_hand(rows, form):
    mask = FlashMask.from_dense(torch.tensor([[cell == "1" for cell in row] for row in rows]))
    assert (mask.causal, mask.indices.shape[-1]) == form


def test_from_dense_joins_the_passes_of_many_columns():
    mask = masks.sliding_window(2100, 700, q_len=900)
    again = FlashMask.from_dense(mask.to_dense())
    assert torch.equal(again.indices, mask.indices)
    assert again.causal


def test_from_dense_adds_missing_batch_and_head_axes():
    visible = masks.document([2, 3]).to_dense()
    for given_shape in (visible[0, 0], visible[0], visible):
        assert FlashMask.from_dense(given_shape).indices.shape == (1, 1, 5, 2)
    two = torch.cat([visible[0], masks.full(5).to_dense()[0]])
    assert torch.equal(FlashMask.from_dense(two).to_dense()[:, 0], two), "the first of three axes is the batch"


def test_from_dense_names_columns_visible_above_the_diagonal():
    visible = masks.causal(5).to_dense()
    visible[0, 0, 1, 3] = True
    with pytest.raises(MaskNotRepresentable, match="above the bottom-right diagonal") as error:
        FlashMask.from_dense(visible, causal=True)
    assert error.value.columns == [(0, 0, 3)]
    assert not FlashMask.from_dense(visible).causal


def test_from_dense_rejects_other_types_and_shapes():
    with pytest.raises(TypeError, match=r"visible must be a bool tensor.*torch.float32"):
        FlashMask.from_dense(torch.ones(3, 3))
    with pytest.raises(TypeError, match=r"visible must be a bool tensor.*list"):
        FlashMask.from_dense([[True]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"visible must have shape .* got \[3\]"):
        FlashMask.from_dense(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"visible must have shape .* with no empty axis, got \[0, 3\]"):
        FlashMask.from_dense(torch.ones(0, 3, dtype=torch.bool))


@thorough
@given(flash_masks())
def test_bidirectional_is_the_same_mask_without_the_causal_flag(mask):
    again = mask.bidirectional()
    assert (again.causal, again.indices.shape[-1]) == (False, 4)
    assert torch.equal(again.to_dense(), mask.to_dense())


@thorough
@given(mask=flash_masks())
def test_visible_intervals_cover_the_dense_mask_in_row_order(mask):
    row = torch.arange(mask.row_count())[:, None]
    pieces = mask.visible_intervals()
    seen = [(row >= start[..., None, :]) & (row < end[..., None, :]) for start, end in pieces]
    assert torch.equal(torch.stack(seen).sum(0), mask.to_dense().long())
    for (start, end), (later, last) in combinations(pieces, 2):
        assert ((end <= later) | (start >= end) | (later >= last)).all()


@thorough
@given(flash_masks(lengths=(3, 5)))
def test_bidirectional_keeps_the_given_q_len(mask):
    again = FlashMask(mask.indices, mask.causal).bidirectional(3)
    assert again.q_len == 3
    assert torch.equal(again.to_dense(), mask.to_dense())


@thorough
@given(mask=flash_masks(), data=st.data())
def test_rows_are_those_of_the_dense_mask(mask, data):
    total = mask.row_count()
    kept = data.draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True).map(sorted))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    for rows in (kept, torch.tensor(kept), slice(start, stop), slice(None, None, 2), slice(start - total, None)):
        part = mask.rows(rows)
        assert torch.equal(part.to_dense(), mask.to_dense()[:, :, rows])
        ends_last = isinstance(rows, slice) and rows.step is None and rows.stop in (None, total)
        assert part.causal == (mask.causal and ends_last)


@pytest.mark.parametrize("shape", [(96, 96), (96, 40)], ids=["square", "fewer rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family(family, shape):
    mask = FAMILIES[family](*shape)
    total = mask.row_count()
    dealt = torch.arange(total).view(-1, 8)[[0, 1, 4]].flatten()
    for rows in (slice(None), slice(5, 29), slice(total - 9, total), dealt, dealt.tolist(), range(3, total, 7)):
        assert torch.equal(mask.rows(rows).validate().to_dense(), mask.to_dense()[:, :, rows])


def test_attention_of_some_rows_is_theirs_in_the_whole():
    mask = FAMILIES["share_question"](96, 96)
    q, k, v = (torch.randn(1, 2, 96, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 2, 96, 16, dtype=torch.float64)
    out = flashmask_attention(q, k, v, mask, impl="torch")
    for rows in (torch.arange(96).view(12, 8)[1::2].flatten(), slice(30, 61)):
        part = flashmask_attention(q[:, :, rows], k, v, mask.rows(rows), impl="torch")
        torch.testing.assert_close(part, out[:, :, rows], rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad(part, (q, k, v), weight[:, :, rows])
        want = torch.autograd.grad(out[:, :, rows], (q, k, v), weight[:, :, rows], retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (slice(3, 3), ValueError, "at least one row"),
        (slice(4, 0, -1), ValueError, r"strictly ascending numbers in 0\.\.4, got \[4, 3, 2, 1\]"),
        ([], ValueError, "at least one row"),
        (torch.zeros(0, dtype=torch.int64), ValueError, "at least one row"),
        (slice(0, 5, -1), ValueError, "at least one row"),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "torch.complex64"),
        ([1, 1], ValueError, r"strictly ascending numbers in 0\.\.4, got \[1, 1\]; sort them"),
        ([2, 1], ValueError, "strictly ascending"),
        (torch.tensor([2, 1], dtype=torch.uint16), ValueError, "strictly ascending"),
        ([-1, 1], ValueError, r"in 0\.\.4"),
        ([1, 5], ValueError, r"in 0\.\.4"),
        (torch.tensor([True, False]), TypeError, r"\[2\] of torch.bool; .*nonzero"),
        ([0.5, 1.0], TypeError, "torch.float32"),
        (torch.zeros(1, 2, dtype=torch.int64), TypeError, r"\[1, 2\] of torch.int64"),
        (None, TypeError, "rows must be a slice or the numbers of rows .* got NoneType"),
        (object(), TypeError, "rows must be a slice or the numbers of rows .* got object"),
        ([[0], [1, 2]], TypeError, "rows must be a slice or the numbers of rows .* got list"),
    ],
)
def test_rows_rejects_what_selects_no_rows(rows, error, message):
    with pytest.raises(error, match=message):
        masks.causal(5).rows(rows)


@pytest.mark.parametrize("two_form", FORMS, ids=form_ids)
@pytest.mark.parametrize("one_form", FORMS, ids=form_ids)
def test_and_is_the_intersection_or_raises_where_it_does_not_fit(one_form, two_form):
    fitted, seeds = 0, range(40)
    for seed in seeds:
        q_len, kv_len = 1 + seed % 13, 1 + seed % 11
        one = random_mask(seed, one_form, (1 + seed % 2, 1, kv_len), q_len, short=seed % 3 > 0)
        two = random_mask(seed + 1000, two_form, (1, 1 + seed // 2 % 2, kv_len), q_len, short=seed % 3 > 0)
        both = one.to_dense() & two.to_dense()
        if shortest_form(both) is None:
            for left, right in ((one, two), (two, one)):
                with pytest.raises(MaskNotRepresentable) as error:
                    left & right
                assert error.value.columns == columns_with_more_runs_than(both, 2)[:16]
            continue
        fitted += 1
        result = one & two
        assert torch.equal(result.to_dense(), both)
        assert torch.equal((two & one).indices, result.indices)
        assert (two & one).causal == result.causal
        assert result.q_len == q_len
        result.validate()
        if one.causal or two.causal:
            assert result.causal == shortest_form(both)[0], "causal wherever it fits"
        assert result.indices.shape[-1] == FlashMask.from_dense(both, causal=result.causal).indices.shape[-1]
    # Intervals that touch the first or the last row unite with their like; only those with two free ends add up.
    always_fit = {one_form, two_form} <= {(True, 1), (False, 2)}
    assert fitted == len(seeds) if always_fit else 0 < fitted < len(seeds)


def test_and_stays_causal_and_short_where_it_can():
    packed = masks.causal_document([6, 4]) & masks.sliding_window(10, 3)
    assert (packed.causal, packed.indices.shape[-1]) == (True, 1)
    mixed = masks.document([6, 4]) & masks.causal(10)
    assert (mixed.causal, mixed.indices.shape[-1]) == (True, 1)
    assert torch.equal(mixed.indices, masks.causal_document([6, 4]).indices)


def test_and_names_the_columns_that_need_too_many_intervals():
    one = mask_of([1] * 8, [2] * 8, [4] * 8, [5] * 8, causal=False)
    two = mask_of([8] * 7 + [6], [8] * 7 + [7], [0] * 8, [0] * 8, causal=False)
    with pytest.raises(MaskNotRepresentable, match="or split the call") as error:
        one & two
    assert error.value.columns == [(0, 0, 7)]
    with pytest.raises(MaskNotRepresentable) as error:
        FlashMask.from_dense((torch.arange(6)[:, None] % 2 == 1).expand(6, 20), causal=False)
    assert error.value.columns == [(0, 0, column) for column in range(16)]


@pytest.mark.parametrize(("batches", "heads"), [((1, 3), (2, 1)), ((3, 1), (1, 2)), ((3, 3), (2, 2))])
def test_and_broadcasts_batch_and_heads(batches, heads):
    generator = torch.Generator().manual_seed(0)
    one, two = (
        masks.random_eviction(9, generator=generator, batch=batch, heads=head)
        for batch, head in zip(batches, heads, strict=True)
    )
    result = one & two
    assert result.indices.shape == (3, 2, 9, 1)
    assert torch.equal(result.to_dense(), one.to_dense() & two.to_dense())


def test_and_takes_q_len_from_the_mask_that_has_one():
    free = mask_of([3, 3, 3, 3], causal=True)
    fixed = masks.causal(4, q_len=3)
    for result in (free & fixed, fixed & free):
        assert result.q_len == 3
        assert torch.equal(result.to_dense(), free.to_dense(3) & fixed.to_dense())


@pytest.mark.parametrize("block", [(0, 4), (4, 0), (-1, 4)])
def test_sparsity_rejects_tiles_without_rows_or_columns(block):
    with pytest.raises(ValueError, match="block must be two sizes of at least 1"):
        masks.causal(4).sparsity(block)


@pytest.mark.parametrize("block", [4, (4,), (4, 4, 4), (4, 2.5), "44"])
def test_sparsity_rejects_tiles_that_are_not_two_sizes(block):
    with pytest.raises(TypeError, match=r"block must be two ints, \(query rows, key columns\), got"):
        masks.causal(4).sparsity(block)


def test_and_rejects_masks_that_do_not_fit_each_other():
    mask = masks.causal(4)
    with pytest.raises(ValueError, match="other has 5 key columns, this mask has 4"):
        mask & masks.causal(5)
    with pytest.raises(ValueError, match="q_len=2, but this mask was built for q_len=4"):
        mask & masks.causal(4, q_len=2)
    with pytest.raises(ValueError, match=r"batch and heads must match or be 1: \[2, 1\] against \[3, 1\]"):
        masks.padding([4, 3]) & masks.padding([4, 3, 2])
    with pytest.raises(ValueError, match="other is on meta"):
        mask & mask.to("meta")
    with pytest.raises(TypeError, match="unsupported operand"):
        mask & mask.to_dense()


@pytest.mark.parametrize("value", [-1, 5])
def test_and_rejects_values_out_of_range(value):
    mask, wrong = masks.causal(4), mask_of([value, 4, 4, 4], causal=True)
    for left, right in ((mask, wrong), (wrong, mask)):
        with pytest.raises(ValueError, match=rf"0\.\.q_len = 0\.\.4, but found .*{value}.* \[\(0, 0, 0\)\]"):
            left & right


def tiles_of(mask: FlashMask, block: tuple[int, int]) -> torch.Tensor:
    return classify_tiles(mask.indices, mask.causal, mask.row_count(), block)


def tile_views(visible: torch.Tensor, block: tuple[int, int]) -> list[list[torch.Tensor]]:
    """Return the tiles [B, H, <= block[0], <= block[1]] of a dense mask, a list for each row of tiles."""
    return [list(band.split(block[1], -1)) for band in visible.split(block[0], -2)]


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (3, 2), (4, 4), (8, 8)], ids=str)
@thorough
@given(mask=flash_masks())
def test_tiles_never_skip_what_is_visible_nor_show_what_is_hidden(block, mask):
    tiles = tiles_of(mask, block)
    views = tile_views(mask.to_dense(), block)
    assert tiles.shape == (*mask.indices.shape[:2], len(views), len(views[0]))
    assert tiles.dtype == torch.int8
    for (row, column), (b, h) in (
        (tile, lead) for tile in np.ndindex(*tiles.shape[2:]) for lead in np.ndindex(*tiles.shape[:2])
    ):
        kind, view = int(tiles[b, h, row, column]), views[row][column][b, h]
        assert kind in (HIDDEN, PARTIAL, VISIBLE)
        if kind == HIDDEN:
            assert not view.any()
        if kind == VISIBLE:
            assert view.all()
            assert view.shape[-1] == block[1], "a tile past the last key column needs its bounds checked"
        if block == (1, 1):
            assert kind == (VISIBLE if view.item() else HIDDEN)


@pytest.mark.parametrize("block", [(2, 3), (3, 2), (4, 4)], ids=str)
@thorough
@given(start=st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_tiles_are_exact_for_one_interval_that_reaches_the_last_row(block, start):
    mask = mask_of(start, [0] * 12, causal=False, q_len=9)
    for row, band in enumerate(tile_views(mask.to_dense(), block)):
        for column, view in enumerate(band):
            exact = VISIBLE if view.all() else PARTIAL if view.any() else HIDDEN
            assert int(tiles_of(mask, block)[0, 0, row, column]) == exact


@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 12), (5, 12), (12, 8)])
def test_tiles_are_exact_for_the_diagonal(q_len, kv_len):
    mask = masks.causal(kv_len, q_len=q_len)
    for row, band in enumerate(tile_views(mask.to_dense(), (3, 4))):
        for column, view in enumerate(band):
            exact = VISIBLE if view.all() else PARTIAL if view.any() else HIDDEN
            assert int(tiles_of(mask, (3, 4))[0, 0, row, column]) == exact


def test_sparsity_is_the_fraction_of_hidden_tiles():
    assert masks.full(512).sparsity() == 0
    assert masks.causal(512).sparsity() == 6 / 16
    assert masks.causal_document([256, 256]).sparsity() == 10 / 16
    assert masks.causal_document([[256, 256], [512]]).sparsity() == 8 / 16
    assert masks.causal(512, q_len=128).sparsity() == 0
    assert masks.causal(512).sparsity(block=(512, 512)) == 0
    assert masks.causal(4).sparsity(block=(1, 1)) == 6 / 16


@pytest.mark.parametrize(
    ("indices", "causal", "q_len", "error", "message"),
    [
        ([[1]], True, None, TypeError, "indices must be an int32 tensor .* got list"),
        (
            torch.zeros(1, 1, 3, 1),
            True,
            None,
            TypeError,
            "indices must be an int32 tensor .* got torch.float32; convert it",
        ),
        (
            torch.zeros(1, 1, 3, 1).long(),
            True,
            None,
            TypeError,
            r"got torch.int64; convert it to torch.int32",
        ),
        (torch.zeros(1, 3, 1).int(), True, None, ValueError, r"indices must have shape .* got \[1, 3, 1\]"),
        (torch.zeros(1, 1, 3, 4).int(), True, None, ValueError, "causal=True must have n = 1 or 2 .* got 4"),
        (torch.zeros(1, 1, 3, 1).int(), False, None, ValueError, "causal=False must have n = 2 or 4 .* got 1"),
        (torch.zeros(1, 1, 3, 3).int(), False, None, ValueError, "n = 2 or 4 .* got 3"),
        (torch.zeros(1, 1, 0, 2).int(), False, None, ValueError, r"no empty axis, got \[1, 1, 0, 2\]"),
        (
            torch.zeros(1, 1, 3, 2).int(),
            False,
            0,
            ValueError,
            r"q_len must be at least 1, got 0",
        ),
        (torch.zeros(1, 1, 3, 2).int(), False, "4", TypeError, "q_len must be an int, got '4'"),
        (torch.zeros(1, 1, 3, 2).int(), False, True, TypeError, "q_len must be an int, got True"),
        (torch.zeros(1, 1, 3, 2).int(), False, 4.0, TypeError, r"q_len must be an int, got 4\.0"),
    ],
)
def test_the_constructor_rejects_what_is_not_in_the_table(indices, causal, q_len, error, message):
    with pytest.raises(error, match=message):
        FlashMask(indices, causal, q_len=q_len)


@pytest.mark.parametrize("form", FORMS, ids=form_ids)
@thorough
@given(data=st.data())
def test_validate_accepts_ordered_intervals_in_range(form, data):
    mask = data.draw(flash_masks(form, short=True))
    assert mask.validate() is mask
    indices = mask.indices.clone()
    b, h, j = (data.draw(st.integers(0, size - 1)) for size in indices.shape[:3])
    indices[b, h, j, data.draw(st.integers(0, form[1] - 1))] = data.draw(st.sampled_from([-1, mask.row_count() + 1]))
    with pytest.raises(ValueError, match=rf"0\.\.{mask.row_count()}.*\({b}, {h}, {j}\)"):
        FlashMask(indices, mask.causal, q_len=mask.row_count()).validate()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (mask_of([3, 3, 2], [3, 3, 1], causal=True), r"\[LTS, LTE\) with start > end .* \[\(0, 0, 2\)\]"),
        (mask_of([0] * 3, [3] * 3, [0, 2, 0], [0, 1, 0], causal=False), r"\[UTS, UTE\) .* \[\(0, 0, 1\)\]"),
    ],
    ids=["lower", "upper"],
)
def test_validate_names_intervals_that_run_backwards(mask, message):
    with pytest.raises(ValueError, match=message):
        mask.validate()


def test_a_mask_rejects_another_q_len_than_its_own():
    mask = masks.causal(5, q_len=3)
    assert mask.row_count() == mask.row_count(3) == 3
    for use in (mask.row_count, mask.to_dense, mask.bidirectional, mask.validate, mask.intervals):
        with pytest.raises(ValueError, match="q_len=4, but this mask was built for q_len=3; build it with q_len=4"):
            use(4)


@pytest.mark.parametrize(
    ("q_len", "error", "message"),
    [
        (0, ValueError, r"at least 1, got 0"),
        (True, TypeError, "an int, got True"),
        (2.5, TypeError, "an int, got 2.5"),
    ],
)
def test_a_mask_rejects_a_q_len_that_is_no_number_of_rows(q_len, error, message):
    mask = mask_of([4, 4, 4, 4], causal=True)
    for use in (mask.to_dense, mask.validate, lambda q_len: mask.sparsity(q_len=q_len)):
        with pytest.raises(error, match=f"q_len must be {message}"):
            use(q_len)


def test_to_moves_the_mask_and_keeps_its_meaning():
    mask = masks.causal(5, q_len=3)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved.device.type == "meta"
    assert (moved.causal, moved.q_len, moved.kv_len) == (True, 3, 5)


def test_repr_shows_the_shape():
    shown = repr(masks.document([[5, 3], [4]], q_len=3))
    assert shown == "FlashMask(batch=2, heads=1, q_len=3, kv_len=8, n=2, causal=False, device='cpu')"


def test_the_examples_in_docstrings_run():
    result = doctest.testmod(flashmask_hf.mask)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("visible", "kv_len", "error", "message"),
    [
        (lambda a, b: torch.ones(1, 1, 4, b - a, dtype=torch.int64), 4, TypeError, "bool tensor .* got torch.int64"),
        (lambda a, b: None, 4, TypeError, "bool tensor .* got NoneType"),
        (
            lambda a, b: torch.ones(b - a, dtype=torch.bool),
            4,
            ValueError,
            r"visible\(0, 4\) must have shape \[Sq, 4\] or \[B, Sq, 4\] or \[B, H, Sq, 4\].*got \[4\]",
        ),
        (
            lambda a, b: torch.ones(1, 1, 4, 4, dtype=torch.bool),
            3,
            ValueError,
            r"visible\(0, 3\) must be \[B, H, Sq, 3\]",
        ),
        (lambda a, b: torch.ones(1, 1, 4 + a, b - a, dtype=torch.bool), 9999, ValueError, "of the same B, H and Sq"),
        (lambda a, b: torch.ones(1 + a, 1, 4, b - a, dtype=torch.bool), 9999, ValueError, "of the same B, H and Sq"),
        (lambda a, b: torch.ones(1, 1, 0, b - a, dtype=torch.bool), 4, ValueError, r"no empty axis, got \[1, 1, 0"),
        (lambda a, b: torch.ones(1, 1, 4, b - a, dtype=torch.bool), 0, ValueError, "kv_len must be at least 1, got 0"),
    ],
    ids=["integers", "no tensor", "rank", "width", "q_len changes", "batch changes", "no rows", "no columns"],
)
def test_from_columns_rejects_what_is_no_mask(visible, kv_len, error, message):
    with pytest.raises(error, match=message):
        FlashMask.from_columns(visible, kv_len, causal=False)


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5)])
def test_columns_need_no_axes_of_batch_and_heads(shape):
    visible = torch.ones(shape, dtype=torch.bool).tril()
    mask = FlashMask.from_columns(lambda first, last: visible[..., first:last], 5, causal=False)
    assert torch.equal(mask.to_dense()[:, 0], visible.view(-1, 4, 5))


def test_a_mask_has_no_truth_value() -> None:
    mask, other = masks.causal(4), masks.causal_document([2, 2])
    for use in (lambda: mask and other, lambda: mask or other, lambda: not mask, lambda: bool(mask)):
        with pytest.raises(TypeError, match=r"no truth value; combine masks with mask & other, and ask `mask is None`"):
            use()
    assert torch.equal((mask & other).indices, other.indices)


def test_a_mask_is_loaded_with_weights_only() -> None:
    file, mask = io.BytesIO(), masks.sliding_window(6, 2, q_len=4)
    mask.sparsity()
    torch.save({"mask": mask}, file)
    with torch.serialization.safe_globals([FlashMask]):
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["mask"]
    assert (loaded.causal, loaded.q_len, loaded._plan) == (mask.causal, 4, None)
    assert torch.equal(loaded.indices, mask.indices)


def test_a_mask_is_pinned_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    mask, pinned = masks.causal(4, q_len=2), torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x if x is pinned else pinned)
    batch = pin_memory({"mask": mask})
    assert batch["mask"].indices is pinned
    assert (batch["mask"].causal, batch["mask"].q_len) == (True, 2)
    assert batch["mask"].pin_memory() is batch["mask"]


def test_a_mask_is_exported_as_its_indices() -> None:
    """Neither export nor `default_collate` takes the mask itself."""

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return flashmask_attention(q, q, q, FlashMask(indices, causal=True), impl="torch")

    q, mask = torch.randn(1, 2, 80, 8), masks.causal_document([30, 50])
    exported = torch.export.export(Layer(), (q, mask.indices)).module()
    torch.testing.assert_close(exported(q, mask.indices), flashmask_attention(q, q, q, mask))
    with pytest.raises(ValueError, match=r"Unsupported input type .*FlashMask"):
        torch.export.export(Layer(), (q, mask))
    with pytest.raises(TypeError, match=r"found .*FlashMask"):
        torch.utils.data.default_collate([mask, mask])
