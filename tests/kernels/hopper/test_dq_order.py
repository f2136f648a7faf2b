"""The order of the sums of dQ: what it is, and how long tiles of keys wait for each other in it, in a simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tools.ordered_sums import segments_of, span, walk, work_items
from tools.support import covering, poisoned

pytest.importorskip("triton")

from flashmask_hf import FlashMask, masks
from flashmask_hf._call.arguments import Arguments, Inputs
from flashmask_hf.kernels.hopper import dq_order
from flashmask_hf.kernels.hopper.dq_order import DqOrder, prepare_dq_order
from flashmask_hf.kernels.launch.problem import problem_of
from flashmask_hf.tiles import HIDDEN, classify_tiles

DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
PROGRAMS = 132


def _order(
    mask: FlashMask,
    q_len: int,
    device: str,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 4,
    tile: tuple[int, int] = (128, 128),
) -> DqOrder:
    """Return the order of a call with tiles of `tile` rows and keys, on the CPU."""
    mask = mask.to(device)
    q = torch.empty(batch, heads, q_len, 64, dtype=torch.bfloat16, device=device)
    k = torch.empty(batch, kv_heads, mask.kv_len, 64, dtype=torch.bfloat16, device=device)
    problem = problem_of(Inputs(q, k, k, None, mask.indices), mask.causal, Arguments(1.0))
    with poisoned():
        made = prepare_dq_order(problem, *tile, PROGRAMS)(mask.indices)
    return DqOrder(*(x.cpu() for x in made))


def _random_intervals(length: int, n: int, heads: int = 1, causal: bool = False) -> FlashMask:
    """Hide n / 2 random intervals of rows from each 128 keys; with n = 2 and no causal mask, show one instead."""
    generator = torch.Generator().manual_seed(length)
    bounds = torch.randint(0, length + 1, (1, heads, length // 128, n), generator=generator).sort(-1).values
    if n == 2 and not causal:
        bounds = bounds.flip(-1)
    return FlashMask(bounds.repeat_interleave(128, 2).int(), causal)


TILES = [(128, 128), (64, 128), (32, 128), (64, 64)]


@DEVICES
@pytest.mark.parametrize(
    ("lengths", "mask_heads", "tile"),
    [
        *covering(1, [(1, 1)], [1, 8], TILES),
        *covering(1, [(700, 700)], [1, 2, 8], TILES),
        ((150, 17000), 1, (128, 128)),
        ((150, 17000), 2, (32, 128)),
        *(
            pytest.param((150, 17000), heads, tile, marks=pytest.mark.full)
            for heads, tile in itertools.product([1, 2], TILES)
            if (heads, tile) not in ((1, (128, 128)), (2, (32, 128)))
        ),
    ],
    ids=str,
)
def test_each_key_tile_is_ranked_once(
    lengths: tuple[int, int], mask_heads: int, tile: tuple[int, int], device: str
) -> None:
    """Every key tile (266 at most) comes once, ranks count those before it that see rows, and semaphores are 0."""
    q_len, kv_len = lengths
    rows, columns = tile
    mask = masks.random_eviction(kv_len, q_len=q_len, heads=mask_heads, generator=torch.Generator().manual_seed(0))
    made = _order(mask, q_len, device, 3, 8, 2, tile)
    n_columns = -(-kv_len // 128) * (128 // columns)
    group = max(1, mask_heads // 2)
    assert made.key_tile_order.shape == (2, mask_heads // group, n_columns)
    tiles = torch.arange(n_columns, dtype=torch.int32)
    assert torch.equal(made.key_tile_order.sort(-1).values, tiles.expand_as(made.key_tile_order))
    assert not made.semaphores.any()
    assert len(made.semaphores) == 3 * 8 * -(-q_len // 128) * (128 // rows)
    assert 1 <= int(made.schedule[0]) <= 6
    orders = made.key_tile_order[made.schedule[3]]
    classes = classify_tiles(mask.indices, mask.causal, q_len, tile)
    for head in range(mask_heads):
        order = orders[head // group].tolist()
        for row, line in enumerate(classes[0, head].tolist()):
            ranked = [column for column in order if column < len(line) and line[column] != HIDDEN]
            assert made.ranks[0, head, row, ranked].tolist() == list(range(len(ranked)))


@DEVICES
def test_what_comes_first(device: str) -> None:
    """The last keys, under most masks; in blocks, tiles of few rows, for all of them see the last block."""
    backwards = [7, 6, 5, 4, 3, 2, 1, 0]

    def order(mask: FlashMask, heads: int = 4, kv_heads: int = 4) -> list[list[int]]:
        return _order(mask, mask.row_count(), device, 1, heads, kv_heads).key_tile_order[0].tolist()

    for mask in (
        masks.full(1024), masks.causal_document([300, 724]), masks.document([640, 84, 300]),
        masks.sliding_window(1024, 200), masks.global_sliding_window(1024, 128, 128, causal=False),
    ):  # fmt: skip
        assert order(mask) == [backwards]
    mask, other = masks.causal_blockwise([256] * 4), masks.causal_blockwise([128, 384, 256, 256])
    blocks = [[7, 6, 5, 3, 1, 4, 2, 0], [7, 6, 5, 3, 0, 4, 2, 1]]
    assert order(mask) == blocks[:1]
    per_head = FlashMask(torch.cat([x.indices for x in (mask, mask, other, other)], 1), True)
    assert order(per_head, 4, 2) == blocks
    late = FlashMask(torch.tensor([0, 384]).repeat(384, 1)[None, None].int(), False)
    late.indices[:, :, 128:256] = torch.tensor([384, 200])  # keys that only the last rows see come before unseen ones
    assert order(late)[0][0] == 1


@DEVICES
def test_heads_that_alternate(device: str) -> None:
    """As many as put a head's key tiles two row tiles apart if all are level, and half of one if none are."""

    def heads(mask: FlashMask, heads: int = 1000, kv_heads: int = 1000, batch: int = 1) -> int:
        return int(_order(mask, mask.row_count(), device, batch, heads, kv_heads).schedule[0])

    def evened(wanted: float, kv_heads: int = 1000) -> int:
        return -(-kv_heads // -(-kv_heads // int(wanted)))

    assert heads(masks.causal(2048)) == evened(0.5 * PROGRAMS / 8.5)
    assert heads(masks.full(2048)) == evened((0.5 + 1.5 * 15 / 16) * PROGRAMS / 16)  # all are level with the first
    assert heads(masks.document([1024, 1024])) == evened((0.5 + 1.5 * 14 / 16) * PROGRAMS / 8)
    blocks = masks.causal_blockwise([1024, 512, 512])
    assert heads(blocks) == evened((0.5 + 1.5 * 4 / 16) * PROGRAMS * 16 / (8 * 4 + 36 + 4 * 4 + 10 + 10))
    window = masks.global_sliding_window(2048, 128, 128, causal=False)
    walked = (16 + 3 + 14 * 4 - 1) / 16  # the global keys, those beside them, and all others but the last
    assert heads(window) == evened(2 * PROGRAMS / walked)  # they skip rows, so all count as level
    assert heads(window, 256, 128) == evened(2 * PROGRAMS / (walked * 2), 128)
    assert heads(window, 16, 8) == 8
    two = FlashMask(window.indices.repeat(2, 1, 1, 1), False)
    assert heads(two, 128, 128, batch=2) == heads(window, 256, 256)
    assert heads(masks.full(2048), 32, 16) == 6  # of 7: 7, 7 and 2 would leave two heads by themselves
    for keys in (slice(1024), slice(1024, None)):
        unseen = masks.full(2048)
        unseen.indices[:, :, keys] = 0  # keys that no row sees are not counted
        assert heads(unseen) == evened((0.5 + 1.5 * 7 / 8) * PROGRAMS / 16)
    rows = torch.tensor([[128, 0], [256, 128]]).repeat_interleave(128 * 128, 0)[None, None].int()
    two_blocks = FlashMask(rows, False, q_len=256)  # key tiles are level only with those of their own 128
    assert heads(two_blocks) == evened((0.5 + 1.5 * 254 / 256) * PROGRAMS)
    for keys, level in ((128, 0), (256, 0.5)):  # tiles of 64 keys; those from the second last on are not level
        below = torch.stack([torch.full([2048], 2048), torch.arange(2048) // keys * keys], -1)[None, None].int()
        walked = (2048 + keys) / 2 / 64
        made = _order(FlashMask(below, False), 2048, device, 1, 1000, 1000, (64, 64))
        assert int(made.schedule[0]) == evened((0.5 + 1.5 * level) * PROGRAMS / walked)
    nothing = FlashMask(torch.tensor([0, 256]).repeat(256, 1)[None, None].int(), False)
    assert heads(nothing, 4, 4) == 1


@DEVICES
def test_more_sums_than_are_added_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads that alternate follow from all of them: here from 20 heads, the last four of which see less."""
    monkeypatch.setattr(dq_order, "_LANES", 16)
    monkeypatch.setitem(globals(), "PROGRAMS", 16)
    whole, halves = masks.full(256).indices, masks.document([128, 128]).indices
    mask = FlashMask(torch.cat([whole.expand(1, 16, -1, -1), halves.expand(1, 4, -1, -1)], 1), False)
    wanted = (0.5 * 40 + 1.5 * 16) * 16 / (16 * 4 + 4 * 2)
    assert int(_order(mask, 256, device, 1, 20, 20).schedule[0]) == -(-20 // -(-20 // int(wanted)))


@DEVICES
def test_heads_that_alternate_with_masks_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a mask whose key tiles are all level, or, if causal, as their sums say."""
    monkeypatch.setitem(globals(), "PROGRAMS", 50)

    def heads(mask: FlashMask) -> int:
        return int(_order(mask, mask.row_count(), device, 1, 12, 6).schedule[0])

    def evened(wanted: float) -> int:
        return -(-6 // -(-6 // int(wanted)))

    rows = torch.tensor([[2048, 0], [1024, 0]]).repeat(6, 1)  # of two query heads, one sees half of the rows
    per_head = FlashMask(rows[None, :, None].repeat(1, 1, 256, 1).int(), False, q_len=2048)
    assert heads(per_head) == evened(2 * PROGRAMS / (16 + 8))
    causal = FlashMask(masks.causal(1024).indices.repeat(1, 12, 1, 1), True)
    assert heads(causal) == evened(0.5 * PROGRAMS / (2 * 4.5))


@DEVICES
def test_bands(device: str) -> None:
    """The first row tile, then all rows, if few key tiles are level, else 512 rows; all if they skip rows, or are of
    one query head each."""

    def bands(mask: FlashMask, kv_heads: int = 2) -> list[int]:
        return _order(mask, mask.row_count(), device, 1, 4, kv_heads).schedule[1:3].tolist()

    documents = masks.document([1000, 1048])
    assert bands(documents) == [512, 512]
    assert bands(documents, 4) == [2048, 2048]
    assert bands(masks.causal_document([1000, 1048])) == [128, 2048]
    assert bands(masks.causal_document([1000, 1048]), 4) == [2048, 2048]
    below = torch.stack([torch.full([2048], 2048), torch.arange(2048)], -1)[None, None].int()
    assert bands(FlashMask(below, False)) == [128, 2048]  # it is causal, though it does not say so
    below[:, :, 512:1024] = below[:, :, 512:513]
    below[:, :, 1024:1280] = below[:, :, 1024:1025]
    assert bands(FlashMask(below, False)) == [128, 2048]  # 4 of 16 key tiles are level
    below[:, :, 1024:1408] = below[:, :, 1024:1025]
    assert bands(FlashMask(below, False)) == [512, 512]
    assert bands(masks.causal_blockwise([1024, 512, 512])) == [2048, 2048]
    some = FlashMask(torch.tensor([512, 768, 0, 0]).repeat(2048, 1)[None, None].int(), False)
    for seeing, most in ((1, 2048), (2, 512)):  # of 16 key tiles, 15 and 14 skip 2 of 16 row tiles: more than 1/8, less
        some.indices[:, :, : 128 * seeing, :2] = 0
        assert bands(FlashMask(some.indices, False)) == [most, most]
    heads = [[2048, 1024], [1024, 0], [2048, 1024], [1024, 0]]  # each sees one half: they skip no rows
    per_head = FlashMask(torch.tensor(heads)[None, :, None].repeat(1, 1, 2048, 1).int(), False)
    assert bands(per_head) == [512, 512]
    causal = FlashMask(masks.causal(2048).indices.repeat(1, 4, 1, 1), True)
    assert bands(causal) == [128, 2048]


@DEVICES
def test_rows_are_walked_upwards(device: str) -> None:
    """Where at least 4 query heads share a key-value head, and more than a quarter of the key tiles end near others."""

    def upward(mask: FlashMask, heads: int = 4) -> tuple[int, list[int]]:
        made = _order(mask, mask.row_count(), device, 2, heads, 1)
        assert len(made.key_tile_order) == (2 if heads >= 4 else 1)
        return int(made.schedule[3]), made.schedule[1:3].tolist()

    for mask in (
        masks.causal(2048), masks.causal_document([1000, 1048]), masks.causal_blockwise([1024, 512, 512]),
        masks.random_eviction(2048, generator=torch.Generator().manual_seed(0)), masks.document([1000, 1048]),
    ):  # fmt: skip
        assert upward(mask) == (1, [512, 512])
        assert upward(mask, 3)[0] == 0
    assert upward(masks.sliding_window(2048, 256)) == (0, [128, 2048])
    window = masks.global_sliding_window(2048, 128, 128, causal=False)
    assert upward(window) == (0, [2048, 2048])  # key tiles skip rows, and overtake each other in either direction
    above = torch.stack([torch.arange(2048) + 1, torch.zeros(2048)], -1)[None, None].int()
    assert upward(FlashMask(above, False)) == (0, [512, 512])  # key tiles begin at one row and end at others


@DEVICES
def test_what_comes_first_upwards(device: str) -> None:
    """Those that begin last; of those that begin in the same 512 rows the last keys."""
    ends = torch.tensor([1024, 1000, 600, 512, 300, 1024, 1024, 1024]).repeat_interleave(128)
    mask = FlashMask(torch.stack([ends, torch.zeros(1024)], -1)[None, None].int(), False)
    made = _order(mask, 1024, device, 1, 4, 1)
    assert made.key_tile_order[1, 0].tolist() == [4, 3, 7, 6, 5, 2, 1, 0]


WAITS: dict[str, tuple[Callable[[], FlashMask], float]] = {
    "global window": (lambda: masks.global_sliding_window(8192, 512, 512, causal=False), 1.15),
    "small global window": (lambda: masks.global_sliding_window(8192, 128, 512, causal=False), 1.15),
    "causal global window": (lambda: masks.global_sliding_window(8192, 512, 512, causal=True), 1.15),
    "random intervals": (lambda: _random_intervals(8192, 2), 1.15),
    "documents": (lambda: masks.document([2300, 900, 3100, 1892]), 1.15),
    "blocks": (lambda: masks.causal_blockwise([2300, 900, 3100, 1892]), 1.15),
    "causal": (lambda: masks.causal(8192), 1.15),
    "full": (lambda: masks.full(8192), 1.15),
    "causal documents": (lambda: masks.causal_document([2300, 900, 3100, 1892]), 1.15),
    "share question": (lambda: masks.share_question([(600, [500, 700]), (900, [1100, 300]), (1000, [3092])]), 1.15),
    # Key tiles overtake each other whatever the order.
    "hidden intervals, causal": (lambda: _random_intervals(8192, 2, causal=True), 1.3),
    "two hidden intervals": (lambda: _random_intervals(8192, 4), 1.3),
    "intervals per query head": (lambda: _random_intervals(8192, 2, heads=16), 1.4),
}
"""Masks, and what the waits may make of the time."""


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "kv_heads", "tile"),
    [  # of speed, and the orders are those that the tests above expect: one in make test
        pytest.param(case, *shape, marks=[pytest.mark.full] * ((case, shape) != ("causal", (4, (128, 128)))))
        for case in WAITS
        for shape in ((16, (128, 128)), (4, (128, 128)), (4, (64, 64)), (4, (32, 128)))
        if case != "intervals per query head" or shape[1] == (128, 128)  # others take up to a minute
    ],
    ids=str,
)
def test_waits_are_short(case: str, kv_heads: int, tile: tuple[int, int]) -> None:
    """Beside the same programs without waits, which take the key tiles in ascending order."""
    make, most = WAITS[case]
    mask = make()
    heads = 16
    rows, columns = tile
    batch = 2 * heads // kv_heads * columns // 128  # as many key tiles
    made = _order(mask, mask.kv_len, "cpu", batch, heads, kv_heads, tile)
    interleaved, *bands, upward = made.schedule.tolist()
    row_tiles = made.ranks.shape[2]
    group = max(1, mask.indices.shape[1] // kv_heads)
    lines = segments_of(made.segments, group)
    walks = [
        [walk([x[tile] for x in line] * (heads // kv_heads // group), *(x // rows for x in bands), upward, row_tiles)
         for tile in range(mask.kv_len // columns)]
        for line in lines
    ]  # fmt: skip
    planes = [plane % kv_heads % len(lines) for plane in range(batch * kv_heads)]
    taken = work_items(made.key_tile_order[upward].tolist(), planes, interleaved)
    ascending = [list(range(mask.kv_len // columns))] * len(lines)
    default = span(work_items(ascending, planes, 2), walks, PROGRAMS, ordered=False)
    found = span(taken, walks, PROGRAMS, ordered=True)
    assert found <= most * default
