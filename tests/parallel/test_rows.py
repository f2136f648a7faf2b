"""Which rows the processes hold: each row once, equal numbers, and even work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashmask_hf import FlashMask, masks
from flashmask_hf.parallel import contiguous_rows, deal_rows, split_rows
from flashmask_hf.parallel import rows as rows_module
from flashmask_hf.parallel.exchange import exchange_of
from flashmask_hf.tile_plan import ROWS, build_plan

LENGTH = 131_072


def lognormal(seed: int) -> list[int]:
    """Return lengths of documents with a median of 4,096 tokens that fill a row."""
    lengths, left = [], LENGTH
    for length in np.random.default_rng(seed).lognormal(np.log(4096), 1.0, 10_000).astype(int).clip(16):
        lengths.append(int(min(length, left)))
        left -= lengths[-1]
        if not left:
            return lengths
    raise AssertionError


LONG = {
    "lognormal documents 0": lambda: masks.causal_document(lognormal(0)),
    "lognormal documents 1": lambda: masks.causal_document(lognormal(1)),
    "lognormal documents 2": lambda: masks.causal_document(lognormal(2)),
    "one document": lambda: masks.causal(LENGTH),
    "a long document and short ones": lambda: masks.causal_document([LENGTH // 2] + [1024] * (LENGTH // 2048)),
    "window": lambda: masks.sliding_window(LENGTH, 4096),
    "shared questions": lambda: masks.share_question([(LENGTH // 16, [LENGTH // 32] * 2)] * 8),
}


@pytest.mark.parametrize("name", LONG)
def test_dealt_rows_are_even_in_the_tiles_of_the_plan(name):
    """The busiest of 8 processes walks at most 1.10 times as many tiles as the mean one."""
    mask, size = LONG[name](), 8
    rows = deal_rows(mask, size)
    assert torch.equal(rows.flatten().sort().values, torch.arange(LENGTH))
    assert bool((rows.diff() > 0).all())
    tiles = build_plan(mask.indices, mask.causal, LENGTH).counts.sum((0, 1, 3))
    work = tiles[rows.view(size, -1, ROWS)[..., 0] // ROWS].sum(1).double()
    assert work.max() / work.mean() < 1.10
    contiguous = tiles.view(size, -1).sum(1).double()
    assert name != "one document" or contiguous.max() / contiguous.mean() > 1.4


def test_blocks_of_a_layout_are_whole_tiles():
    """A plan of the dealt rows walks no more tiles than the whole mask's plan has."""
    mask = masks.causal_document([3000, 200, 4000, 992])
    rows = deal_rows(mask, 4)
    plans = [mask.rows(part) for part in rows]
    walked = sum(int(build_plan(x.indices, False, 2048).counts.sum()) for x in plans)
    assert walked == int(build_plan(mask.indices, True, 8192).counts.sum())


def test_rows_of_a_short_row_are_dealt_in_smaller_blocks():
    rows = deal_rows(masks.causal(24), 4)
    assert rows.shape == (4, 6)
    assert rows.view(4, 3, 2).diff().eq(1).all()


@pytest.mark.parametrize("split", [deal_rows, lambda mask, size: contiguous_rows(mask.kv_len, size)])
def test_odd_lengths_are_refused(split):
    with pytest.raises(
        ValueError, match=r"row of 101 tokens does not split into 4 equal shards.*pad_to_multiple_of=512"
    ):
        split(masks.causal(101), 4)


MASK = masks.causal(128)


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (lambda: split_rows(MASK, 0, 8, 4), ValueError, "size must be at least 1, got 0"),
        (lambda: split_rows(MASK, 2.0, 8, 4), TypeError, r"size must be an int, got 2\.0"),
        (lambda: split_rows(MASK, 2, 8, None), TypeError, "kv_heads must be an int, got None"),
        (lambda: split_rows(MASK, 2, 0, 4), ValueError, "heads must be at least 1, got 0"),
        (lambda: split_rows(MASK.indices, 2, 8, 4), TypeError, r"mask must be a FlashMask, got Tensor; .*FlashMask\("),
        (lambda: deal_rows(MASK.indices, 2), TypeError, "mask must be a FlashMask, got Tensor"),
        (lambda: deal_rows(MASK, -2), ValueError, "size must be at least 1, got -2"),
        (lambda: contiguous_rows(128, 0), ValueError, "size must be at least 1, got 0"),
        (lambda: contiguous_rows(-128, 2), ValueError, "length must be at least 0, got -128"),
    ],
)
def test_wrong_arguments_are_named(split, error, message):
    with pytest.raises(error, match=message):
        split()


def test_every_shard_gets_as_many_rows_however_uneven_their_work_is():
    """One shard's single block takes more work than all others together."""
    visible = torch.block_diag(*[torch.ones(128, 128)] * 4).bool()
    visible[:128] = True
    rows = deal_rows(FlashMask.from_dense(visible[None, None]), 2)
    assert rows.shape == (2, 256)
    assert rows.flatten().sort().values.tolist() == list(range(512))


def test_long_rows_are_dealt_in_larger_blocks(monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCKS", 4)
    steps = deal_rows(masks.causal(4096), 2).diff()
    assert int((steps != 1).sum()) == 1  # blocks of 1,024 rows: the first and the last, and the two between


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "exchange"),
    [
        (32, 8, 2, "keys"),  # Llama 8B: fewer processes than 1 + 32 / 8
        (32, 8, 4, "keys"),
        (32, 8, 8, "heads"),
        (32, 32, 2, "heads"),  # no groups: equal at 2
        (32, 4, 8, "keys"),
        (32, 1, 16, "keys"),
        (6, 2, 4, "keys"),  # heads that do not divide
        (6, 6, 4, "keys"),
        (8, 8, 16, "keys"),
        (16, 2, 16, "heads"),  # a key-value head for each of 16 processes
    ],
)
def test_the_exchange_that_sends_less_is_taken(heads, kv_heads, size, exchange):
    assert exchange_of(heads, kv_heads, size) == exchange
    mask = FlashMask(torch.full((1, 1, 4096, 1), 4096, dtype=torch.int32), causal=True)
    rows = split_rows(mask, size, heads, kv_heads)
    assert torch.equal(rows, contiguous_rows(4096, size)) == (exchange == "heads")


def test_an_exchange_that_is_asked_for_is_taken_or_refused():
    assert exchange_of(32, 8, 8, "keys") == "keys"
    assert exchange_of(32, 8, 2, "heads") == "heads"
    for heads, kv_heads, size in ((6, 6, 4), (8, 3, 4)):
        with pytest.raises(ValueError, match=f"needs {size} ranks to divide the {heads} query heads"):
            exchange_of(heads, kv_heads, size, "heads")
