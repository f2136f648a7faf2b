"""The mask families, each against its own definition as a predicate over (query position, key position)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import support
from tools.block_diffusion import mirrored, sees_in_block_diffusion
from tools.draft_chains import chains_in_order, sees_chain

from flashmask_hf import FlashMask, masks
from flashmask_hf.tiles import HIDDEN, PARTIAL, VISIBLE, classify_tiles


@dataclass(frozen=True)
class Family:
    """A mask and the definition of what it shows.

    Attributes:
        name: test id, the constructor's name first.
        build: builds the mask from q_len and device.
        kv_len: number of keys.
        visible: (batch entry, query position, key position) -> whether the query sees the key.
        form: expected (causal, n).
        batch: expected batch size.
    """

    name: str
    build: Callable[..., FlashMask]
    kv_len: int
    visible: Callable[[int, int, int], bool]
    form: tuple[bool, int]
    batch: int = 1

    def dense(self, q_len: int) -> torch.Tensor:
        """Return what the last `q_len` queries should see, bool [B, 1, q_len, kv_len]."""
        positions = range(self.kv_len - q_len, self.kv_len)
        rows = [[[self.visible(b, i, j) for j in range(self.kv_len)] for i in positions] for b in range(self.batch)]
        return torch.tensor(rows).unsqueeze(1)


def owner(lengths: list[int], position: int) -> int | None:
    """Return the index of the document that holds a position, or None for filler."""
    for index, length in enumerate(lengths):
        position -= length
        if position < 0:
            return index
    return None


def same_document(lengths: list[int], i: int, j: int) -> bool:
    return owner(lengths, i) is not None and owner(lengths, i) == owner(lengths, j)


def ancestries(nodes: list, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return for each token of a forest, in depth-first order, the child numbers from the root to its node."""
    tokens = []
    for number, node in enumerate(nodes):
        length, children = node if isinstance(node, tuple) else (node, [])
        tokens += [(*path, number)] * length + ancestries(children, (*path, number))
    return tokens


def sees_own_node_and_ancestors(rows: list[list], b: int, i: int, j: int) -> bool:
    paths = ancestries(rows[b])
    return j <= i < len(paths) and paths[i][: len(paths[j])] == paths[j]


def sees_own_block_or_is_in_the_last(lengths: list[int], i: int, j: int) -> bool:
    """Return whether a query sees a key; the last block and the filler behind it see all real keys before them."""
    if j > i or j >= sum(lengths):
        return False
    return i >= sum(lengths[:-1]) or owner(lengths, i) == owner(lengths, j)


def sees_document_and_own_span(lengths: list[int], spans: list[tuple[int, int]], i: int, j: int) -> bool:
    together = any(start <= i < end and start <= j < end for start, end in spans)
    return same_document(lengths, i, j) and (j <= i or together)


def sees_document_with_prefix(documents: list[tuple[int, int]], i: int, j: int) -> bool:
    lengths = [total for _, total in documents]
    starts = itertools.accumulate(lengths, initial=0)
    prefixes = [(start, start + prefix) for start, (prefix, _) in zip(starts, documents, strict=False)]
    return sees_document_and_own_span(lengths, prefixes, i, j)


def sees_own_block_and_those_before(lengths: list[int], size: int, i: int, j: int) -> bool:
    start = sum(lengths[: owner(lengths, i)])
    return same_document(lengths, i, j) and (j - start) // size <= (i - start) // size


DOCUMENTS = [[5, 3, 8], [1, 7], [4, 9, 1, 2]]
CHAINS = [5, 3], [1, 4, 6], [3, 2, 1]
NOISED = [[4, 2], [5, 1], [7]]
ANSWERS = [[(4, [3, 2]), (1, [1, 1, 2])], [(7, [5])], [(2, [1, 4, 1]), (3, [3])]]
FOREST = [[(2, [(1, [3, (1, [1, 2])]), 2]), 3], [5], [(1, [(1, [(1, [(1, [1])])])]), (4, [1, 1])]]
PREFIXED = [[(2, 6), (0, 3), (5, 5)], [(1, 9)], [(3, 3), (1, 1), (2, 11)]]
SPANS = [[(0, 2), (3, 5), (5, 8), (9, 10)], [], [(4, 9), (10, 13), (14, 16)]]
EVICTED = torch.tensor([[[1, 4, 3, 7, 5, 6, 7], [7, 2, 7, 7, 6, 6, 7]], [[5, 5, 5, 4, 7, 7, 7], [7] * 7]])

FAMILIES = [
    Family("full", lambda **k: masks.full(13, **k), 13, lambda b, i, j: True, (False, 2)),
    Family("causal", lambda **k: masks.causal(13, **k), 13, lambda b, i, j: j <= i, (True, 1)),
    Family(
        "sliding_window", lambda **k: masks.sliding_window(13, 4, **k), 13, lambda b, i, j: i - 4 < j <= i, (True, 1)
    ),
    Family("sliding_window of 1", lambda **k: masks.sliding_window(13, 1, **k), 13, lambda b, i, j: i == j, (True, 1)),
    Family(
        "sliding_window both ways",
        lambda **k: masks.sliding_window(13, 4, causal=False, **k),
        13,
        lambda b, i, j: abs(i - j) < 4,
        (False, 2),
    ),
    Family(
        "causal_document",
        lambda **k: masks.causal_document(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: j <= i and same_document(DOCUMENTS[b], i, j),
        (True, 1),
        batch=3,
    ),
    Family(
        "document",
        lambda **k: masks.document(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: same_document(DOCUMENTS[b], i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "blocks",
        lambda **k: masks.blocks(DOCUMENTS, SPANS, kv_len=17, **k),
        17,
        lambda b, i, j: sees_document_and_own_span(DOCUMENTS[b], SPANS[b], i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "block_causal",
        lambda **k: masks.block_causal(DOCUMENTS, 2, kv_len=17, **k),
        17,
        lambda b, i, j: sees_own_block_and_those_before(DOCUMENTS[b], 2, i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "block_diffusion",
        lambda **k: masks.block_diffusion(NOISED, 3, 2, kv_len=22, **k),
        22,
        lambda b, i, j: sees_in_block_diffusion(mirrored(NOISED[b], 3, 2), i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "draft_chains",
        lambda **k: masks.draft_chains(*CHAINS, **k),
        14,
        lambda b, i, j: sees_chain(chains_in_order(*CHAINS)[i], chains_in_order(*CHAINS)[j]),
        (False, 2),
    ),
    Family(
        "share_question",
        lambda **k: masks.share_question(ANSWERS, kv_len=17, **k),
        17,
        lambda b, i, j: sees_own_node_and_ancestors(ANSWERS, b, i, j),
        (True, 1),
        batch=3,
    ),
    Family(
        "tree",
        lambda **k: masks.tree(FOREST, kv_len=17, **k),
        17,
        lambda b, i, j: sees_own_node_and_ancestors(FOREST, b, i, j),
        (True, 1),
        batch=3,
    ),
    Family(
        "global_sliding_window",
        lambda **k: masks.global_sliding_window(13, 3, 4, **k),
        13,
        lambda b, i, j: abs(i - j) < 4 or i < 3 or j < 3,
        (False, 4),
    ),
    Family(
        "global_sliding_window without globals",
        lambda **k: masks.global_sliding_window(13, 0, 2, **k),
        13,
        lambda b, i, j: abs(i - j) < 2,
        (False, 2),
    ),
    Family(
        "global_sliding_window all global",
        lambda **k: masks.global_sliding_window(13, 13, 2, **k),
        13,
        lambda b, i, j: True,
        (False, 4),
    ),
    Family(
        "global_sliding_window causal",
        lambda **k: masks.global_sliding_window(13, 3, 4, causal=True, **k),
        13,
        lambda b, i, j: j <= i and (i - j < 4 or j < 3),
        (True, 1),
    ),
    Family(
        "causal_blockwise",
        lambda **k: masks.causal_blockwise(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: sees_own_block_or_is_in_the_last(DOCUMENTS[b], i, j),
        (True, 2),
        batch=3,
    ),
    Family(
        "prefix_lm_causal",
        lambda **k: masks.prefix_lm_causal(13, [0, 6, 13], **k),
        13,
        lambda b, i, j: j <= i or (i < [0, 6, 13][b] and j < [0, 6, 13][b]),
        (False, 2),
        batch=3,
    ),
    Family(
        "prefix_lm_document",
        lambda **k: masks.prefix_lm_document(PREFIXED, kv_len=17, **k),
        17,
        lambda b, i, j: sees_document_with_prefix(PREFIXED[b], i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "random_eviction",
        lambda **k: masks.random_eviction(7, evict_from=EVICTED[:, :1], **k),
        7,
        lambda b, i, j: j <= i < EVICTED[b, 0, j],
        (True, 1),
        batch=2,
    ),
    *(
        Family(
            f"padding {side} {'causal' if causal else 'both ways'}",
            lambda side=side, causal=causal, **k: masks.padding([9, 4, 0, 13], side=side, causal=causal, **k),
            13,
            lambda b, i, j, side=side, causal=causal: (
                (j <= i or not causal) and all(is_real([9, 4, 0, 13][b], p, side) for p in (i, j))
            ),
            (causal, 1 if causal else 2),
            batch=4,
        )
        for side in ("right", "left")
        for causal in (True, False)
    ),
]
by_name = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


def is_real(length: int, position: int, side: str) -> bool:
    """Return whether a position of a padded row of 13 holds a token."""
    return position < length if side == "right" else position >= 13 - length


@by_name
@pytest.mark.parametrize("missing", [0, 1, 4, 6])
def test_family_shows_what_its_definition_says(family, missing):
    q_len = family.kv_len - missing
    mask = family.build(q_len=q_len)
    assert torch.equal(mask.to_dense(), family.dense(q_len))
    assert mask.q_len == q_len
    assert mask.indices.shape[:3] == (family.batch, 1, family.kv_len)
    mask.validate()


@by_name
def test_family_is_in_its_shortest_form(family):
    mask = family.build()
    assert mask.q_len == family.kv_len
    assert (mask.causal, mask.indices.shape[-1]) == family.form
    shortest = FlashMask.from_dense(family.dense(family.kv_len))
    degenerate = family.name == "global_sliding_window all global"
    assert (mask.causal, mask.indices.shape[-1]) == (shortest.causal, shortest.indices.shape[-1]) or degenerate


@by_name
def test_family_is_built_on_the_cpu_and_moved_to_the_device_asked_for(family):
    assert family.build(device="meta").device.type == "meta"
    with torch.device("meta"):  # which constructors do not build on
        mask = family.build()
    assert mask.device.type == "cpu"
    assert torch.equal(mask.indices, family.build().indices)


def test_every_family_is_covered():
    covered = {family.name.split()[0] for family in FAMILIES} | {"qk_sparse", "hash_sparse"}  # see test_sorted.py
    other_ways = {"from_cu_seqlens", "from_position_ids"}  # to write causal_document and document: test_packed.py
    others = {"Node", "block_diffusion_order", "draft_chains_order"}
    others |= {"draft_blocks"}  # has its own numbers of queries: test_drafts.py
    assert covered == support.FAMILIES.keys() == set(masks.__all__) - others - other_ways


@pytest.mark.parametrize("q_len", [1, 8, 9, 14])
def test_full_and_causal_take_more_queries_than_keys(q_len):
    assert masks.full(8, q_len=q_len).to_dense().all()
    visible = torch.tensor([[[[j <= i + 8 - q_len for j in range(8)] for i in range(q_len)]]])
    assert torch.equal(masks.causal(8, q_len=q_len).to_dense(), visible)


@pytest.mark.parametrize("n_global", [0, 1, 5])
@pytest.mark.parametrize("q_len", [1, 3, 8, 9, 12, 13])
def test_global_sliding_window_needs_four_columns_only_where_a_query_is_global(q_len, n_global):
    mask = masks.global_sliding_window(13, n_global, 3, q_len=q_len)
    positions = range(13 - q_len, 13)
    visible = [[abs(i - j) < 3 or i < n_global or j < n_global for j in range(13)] for i in positions]
    assert torch.equal(mask.to_dense()[0, 0], torch.tensor(visible))
    assert mask.indices.shape[-1] == (4 if positions[0] < n_global else 2)


row_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(max_examples=30)
@given(rows=st.lists(row_lengths, min_size=1, max_size=3), spare=st.integers(0, 3), data=st.data())
def test_any_documents_with_any_number_of_last_queries(rows, spare, data):
    kv_len = max(map(sum, rows)) + spare
    q_len = data.draw(st.integers(1, kv_len))
    for build, is_causal in ((masks.causal_document, True), (masks.document, False)):
        family = Family(
            "",
            build,
            kv_len,
            lambda b, i, j, is_causal=is_causal: (j <= i or not is_causal) and same_document(rows[b], i, j),
            (True, 1),
            len(rows),
        )
        assert torch.equal(build(rows, kv_len=kv_len, q_len=q_len).to_dense(), family.dense(q_len))


@settings(max_examples=60)
@given(lengths=row_lengths, spare=st.integers(0, 3), data=st.data())
def test_any_spans_with_any_number_of_last_queries(lengths, spare, data):
    spans, start = [], 0
    for length in lengths:
        cuts = sorted(data.draw(st.sets(st.integers(start, start + length), max_size=4)))
        spans += [pair for pair in itertools.pairwise(cuts) if data.draw(st.booleans())]
        start += length
    kv_len = start + spare
    q_len = data.draw(st.integers(1, kv_len))
    family = Family(
        "", masks.blocks, kv_len, lambda b, i, j: sees_document_and_own_span(lengths, spans, i, j), (False, 2)
    )
    assert torch.equal(masks.blocks(lengths, spans, kv_len=kv_len, q_len=q_len).to_dense(), family.dense(q_len))


nodes = st.recursive(
    st.integers(1, 3), lambda child: st.tuples(st.integers(1, 3), st.lists(child, max_size=3)), max_leaves=8
)


@settings(max_examples=100)
@given(rows=st.lists(st.lists(nodes, min_size=1, max_size=3), min_size=1, max_size=2))
def test_any_tree(rows):
    kv_len = max(len(ancestries(row)) for row in rows)
    family = Family(
        "", masks.tree, kv_len, lambda b, i, j: sees_own_node_and_ancestors(rows, b, i, j), (True, 1), len(rows)
    )
    assert torch.equal(masks.tree(rows).to_dense(), family.dense(kv_len))


def test_a_deep_tree_needs_no_recursion():
    node: masks.Node = 1
    for _ in range(5000):
        node = (1, [node])
    assert torch.equal(masks.tree([node]).indices, masks.causal(5001).indices)


def test_families_agree_where_one_is_a_case_of_another():
    same = [
        (masks.tree([5, 3]), masks.causal_document([5, 3])),
        (masks.tree(ANSWERS), masks.share_question(ANSWERS)),
        (masks.share_question([(4, (3, 2))]), masks.tree([(4, [3, 2])])),
        (masks.causal_document([9]), masks.causal(9)),
        (masks.padding([9]), masks.causal(9)),
        (masks.sliding_window(9, 9), masks.causal(9)),
        (masks.sliding_window(9, 9, causal=False), masks.full(9)),
        (masks.prefix_lm_causal(9, 9), masks.full(9)),
        (masks.prefix_lm_document([(0, 5), (0, 4)]), masks.causal_document([5, 4])),
        (masks.prefix_lm_document([(5, 5), (4, 4)]), masks.document([5, 4])),
        (masks.causal_blockwise([9]), masks.causal(9)),
        (masks.blocks([5, 4], []), masks.causal_document([5, 4])),
        (masks.blocks([5, 4], [(0, 5), (5, 9)]), masks.document([5, 4])),
        (masks.block_causal([5, 4], 1), masks.causal_document([5, 4])),
        (masks.block_causal([5, 3], 2), masks.blocks([5, 3], [(0, 2), (2, 4), (4, 5), (5, 7), (7, 8)])),
        (masks.global_sliding_window(9, 0, 3, causal=True), masks.sliding_window(9, 3)),
        (masks.random_eviction(9, evict_from=torch.full((1, 1, 9), 9)), masks.causal(9)),
    ]
    for one, two in same:
        assert torch.equal(one.to_dense(), two.to_dense())


def blocks_of_first_tokens(lengths) -> FlashMask:
    batched = isinstance(lengths[0], list) or getattr(lengths, "ndim", 1) == 2
    return masks.blocks(lengths, [[(0, 2)] for _ in lengths] if batched else [(0, 2)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_lengths_may_be_integer_tensors(dtype):
    rows = [[3, 2, 1], [2, 2]]
    padded = torch.tensor([[3, 2, 1], [2, 2, 0]], dtype=dtype)
    of_two = [partial(build, block_size=2) for build in (masks.block_causal, masks.block_diffusion)]
    for build in (masks.causal_document, masks.document, masks.causal_blockwise, blocks_of_first_tokens, *of_two):
        assert torch.equal(build(padded).indices, build(rows).indices)
        assert torch.equal(build(padded[0]).indices, build(rows[0]).indices)
    assert torch.equal(masks.padding(padded[0]).indices, masks.padding([3, 2, 1]).indices)
    assert torch.equal(masks.prefix_lm_causal(5, padded[0]).indices, masks.prefix_lm_causal(5, [3, 2, 1]).indices)


OF_LENGTHS = {
    "causal_document": masks.causal_document,
    "document": masks.document,
    "causal_blockwise": masks.causal_blockwise,
    "blocks": lambda lengths: masks.blocks(lengths, []),
    "block_causal": lambda lengths: masks.block_causal(lengths, 2),
    "block_diffusion": lambda lengths: masks.block_diffusion(lengths, 2),
    "padding": masks.padding,
    "from_cu_seqlens": masks.from_cu_seqlens,
    "prefix_lm_causal": lambda lengths: masks.prefix_lm_causal(5, lengths),
}


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_masks_of_lengths_live_where_the_lengths_do(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tolist", lambda lengths: [0, 3] if name == "from_cu_seqlens" else [3])
    assert OF_LENGTHS[name](torch.empty(1, dtype=torch.int64, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    "build",
    [
        masks.document,
        lambda lengths, **k: masks.prefix_lm_document([(length, length) for length in lengths], **k),
    ],
    ids=["document", "prefix_lm_document"],
)
def test_filler_leaves_the_tiles_of_its_neighbours_hidden(build):
    mask = build([4, 2], kv_len=12)
    tiles = classify_tiles(mask.indices, mask.causal, 12, (2, 4))[0, 0]
    assert tiles.tolist() == [[VISIBLE, HIDDEN, HIDDEN]] * 2 + [[HIDDEN, PARTIAL, HIDDEN]] + [[HIDDEN] * 3] * 3
