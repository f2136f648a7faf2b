"""The mask families: each against its own definition, written as a predicate over (query position, key position)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmask_hf import FlashMask, masks
from flashmask_hf.mask import HIDDEN, PARTIAL, VISIBLE, classify_tiles


@dataclass(frozen=True)
class Family:
    """One mask and what it should show.

    Attributes:
        name: test id; the constructor's name comes first.
        build: makes the mask; takes q_len and device.
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
        positions = range(self.kv_len - q_len, self.kv_len)
        rows = [[[self.visible(b, i, j) for j in range(self.kv_len)] for i in positions] for b in range(self.batch)]
        return torch.tensor(rows).unsqueeze(1)


def owner(lengths: list[int], position: int) -> int | None:
    """Index of the document that holds a position; None for filler."""
    for index, length in enumerate(lengths):
        position -= length
        if position < 0:
            return index
    return None


def same_document(lengths: list[int], i: int, j: int) -> bool:
    return owner(lengths, i) is not None and owner(lengths, i) == owner(lengths, j)


def ancestries(nodes: list, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """For each token of a forest in depth-first order the path of child numbers from the root to its node."""
    tokens = []
    for number, node in enumerate(nodes):
        length, children = node if isinstance(node, tuple) else (node, [])
        tokens += [(*path, number)] * length + ancestries(children, (*path, number))
    return tokens


def sees_own_node_and_ancestors(rows: list[list], b: int, i: int, j: int) -> bool:
    paths = ancestries(rows[b])
    return j <= i < len(paths) and paths[i][: len(paths[j])] == paths[j]


def sees_question_and_own_answer(rows: list[list], b: int, i: int, j: int) -> bool:
    labels = []
    for document, (question, answers) in enumerate(rows[b]):
        labels += [(document, 0)] * question
        for number, answer in enumerate(answers, start=1):
            labels += [(document, number)] * answer
    if not j <= i < len(labels) or labels[i][0] != labels[j][0]:
        return False
    return labels[j][1] == 0 or labels[i][1] == labels[j][1]


def sees_own_block_or_is_the_test(lengths: list[int], i: int, j: int) -> bool:
    """The last block and the filler behind it see all real keys before them."""
    if j > i or j >= sum(lengths):
        return False
    return i >= sum(lengths[:-1]) or owner(lengths, i) == owner(lengths, j)


def sees_document_with_prefix(documents: list[tuple[int, int]], i: int, j: int) -> bool:
    lengths = [total for _, total in documents]
    if not same_document(lengths, i, j):
        return False
    document = owner(lengths, j)
    start = sum(lengths[:document])
    return j <= i or (i >= start and j < start + documents[document][0])


DOCUMENTS = [[5, 3, 8], [1, 7], [4, 9, 1, 2]]
ANSWERS = [[(4, [3, 2]), (1, [1, 1, 2])], [(7, [5])], [(2, [1, 4, 1]), (3, [3])]]
FOREST = [[(2, [(1, [3, (1, [1, 2])]), 2]), 3], [5], [(1, [(1, [(1, [(1, [1])])])]), (4, [1, 1])]]
PREFIXED = [[(2, 6), (0, 3), (5, 5)], [(1, 9)], [(3, 3), (1, 1), (2, 11)]]
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
        lambda **k: masks.causal_document(DOCUMENTS[0], **k),
        16,
        lambda b, i, j: j <= i and same_document(DOCUMENTS[0], i, j),
        (True, 1),
    ),
    Family(
        "causal_document batch",
        lambda **k: masks.causal_document(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: j <= i and same_document(DOCUMENTS[b], i, j),
        (True, 1),
        batch=3,
    ),
    Family(
        "document",
        lambda **k: masks.document(DOCUMENTS[0], **k),
        16,
        lambda b, i, j: same_document(DOCUMENTS[0], i, j),
        (False, 2),
    ),
    Family(
        "document batch",
        lambda **k: masks.document(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: same_document(DOCUMENTS[b], i, j),
        (False, 2),
        batch=3,
    ),
    Family(
        "share_question",
        lambda **k: masks.share_question(ANSWERS[0], **k),
        14,
        lambda b, i, j: sees_question_and_own_answer(ANSWERS, 0, i, j),
        (True, 1),
    ),
    Family(
        "share_question batch",
        lambda **k: masks.share_question(ANSWERS, kv_len=17, **k),
        17,
        lambda b, i, j: sees_question_and_own_answer(ANSWERS, b, i, j),
        (True, 1),
        batch=3,
    ),
    Family(
        "tree",
        lambda **k: masks.tree(FOREST[0], **k),
        15,
        lambda b, i, j: sees_own_node_and_ancestors(FOREST, 0, i, j),
        (True, 1),
    ),
    Family(
        "tree batch",
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
        lambda **k: masks.causal_blockwise([4, 3, 1, 5], **k),
        13,
        lambda b, i, j: sees_own_block_or_is_the_test([4, 3, 1, 5], i, j),
        (True, 2),
    ),
    Family(
        "causal_blockwise batch",
        lambda **k: masks.causal_blockwise(DOCUMENTS, kv_len=17, **k),
        17,
        lambda b, i, j: sees_own_block_or_is_the_test(DOCUMENTS[b], i, j),
        (True, 2),
        batch=3,
    ),
    Family(
        "prefix_lm_causal",
        lambda **k: masks.prefix_lm_causal(13, 5, **k),
        13,
        lambda b, i, j: j <= i or (i < 5 and j < 5),
        (False, 2),
    ),
    Family(
        "prefix_lm_causal batch",
        lambda **k: masks.prefix_lm_causal(13, [0, 6, 13], **k),
        13,
        lambda b, i, j: j <= i or (i < [0, 6, 13][b] and j < [0, 6, 13][b]),
        (False, 2),
        batch=3,
    ),
    Family(
        "prefix_lm_document",
        lambda **k: masks.prefix_lm_document(PREFIXED[0], **k),
        14,
        lambda b, i, j: sees_document_with_prefix(PREFIXED[0], i, j),
        (False, 2),
    ),
    Family(
        "prefix_lm_document batch",
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
    """Whether a position of a padded row of 13 holds a token."""
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
def test_family_moves_to_the_device_asked_for_and_is_made_on_the_cpu(family):
    assert family.build(device="meta").device.type == "meta"
    with torch.device("meta"):  # the default device of a context does not leak into the building
        mask = family.build()
    assert mask.device.type == "cpu"
    assert torch.equal(mask.indices, family.build().indices)


def test_every_family_is_covered():
    covered = {family.name.split()[0] for family in FAMILIES} | {"qk_sparse", "hash_sparse"}
    assert covered == set(masks.__all__) - {"Node"}
    assert len(covered) == 15


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


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(row_lengths, min_size=1, max_size=3), spare=st.integers(0, 3), data=st.data())
def test_any_documents_any_last_queries(rows, spare, data):
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


nodes = st.recursive(
    st.integers(1, 3), lambda child: st.tuples(st.integers(1, 3), st.lists(child, max_size=3)), max_leaves=8
)


@settings(max_examples=100, deadline=None)
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


def test_families_meet_where_they_should():
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
        (masks.global_sliding_window(9, 0, 3, causal=True), masks.sliding_window(9, 3)),
        (masks.random_eviction(9, evict_from=torch.full((1, 1, 9), 9)), masks.causal(9)),
    ]
    for one, two in same:
        assert torch.equal(one.to_dense(), two.to_dense())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_lengths_may_be_integer_tensors(dtype):
    rows = [[3, 2, 1], [2, 2]]
    padded = torch.tensor([[3, 2, 1], [2, 2, 0]], dtype=dtype)
    for build in (masks.causal_document, masks.document, masks.causal_blockwise):
        assert torch.equal(build(padded).indices, build(rows).indices)
        assert torch.equal(build(padded[0]).indices, build(rows[0]).indices)
    assert torch.equal(masks.padding(padded[0]).indices, masks.padding([3, 2, 1]).indices)
    assert torch.equal(masks.prefix_lm_causal(5, padded[0]).indices, masks.prefix_lm_causal(5, [3, 2, 1]).indices)


@pytest.mark.parametrize(
    "build",
    [masks.document, lambda lengths, **k: masks.prefix_lm_document([(length, length) for length in lengths], **k)],
    ids=["document", "prefix_lm_document"],
)
def test_filler_keeps_the_tiles_above_and_below_its_neighbours_hidden(build):
    tiles = classify_tiles(build([4, 2], kv_len=12), (2, 4))[0, 0]
    assert tiles.tolist() == [[VISIBLE, HIDDEN, HIDDEN]] * 2 + [[HIDDEN, PARTIAL, HIDDEN]] + [[HIDDEN] * 3] * 3


def test_dropped_keys_keep_the_tiles_above_their_neighbours_hidden():
    keep = torch.tensor([[[True] * 6 + [False] * 6]])
    tiles = classify_tiles(masks.qk_sparse(keep, keep), (4, 4))[0, 0]
    assert tiles.tolist() == [[PARTIAL, HIDDEN, HIDDEN], [PARTIAL, PARTIAL, HIDDEN], [HIDDEN] * 3]


def test_random_eviction_draws_every_later_row_equally_often():
    mask = masks.random_eviction(4, generator=torch.Generator().manual_seed(0), batch=30, heads=200)
    assert mask.indices.shape == (30, 200, 4, 1)
    mask.validate()
    for key in range(4):
        drawn = mask.indices[:, :, key, 0].flatten().bincount(minlength=5) / 6000
        expected = torch.tensor([1 / (4 - key) if row > key else 0 for row in range(5)])
        assert torch.allclose(drawn, expected, atol=0.02), key
        assert torch.equal(drawn == 0, expected == 0)


def test_random_eviction_follows_its_generator():
    one, two, other = (
        masks.random_eviction(50, generator=torch.Generator().manual_seed(seed)).indices for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    torch.manual_seed(7)
    default = masks.random_eviction(50).indices
    torch.manual_seed(7)
    assert torch.equal(default, masks.random_eviction(50).indices)


def test_random_eviction_per_head_and_for_the_last_queries():
    mask = masks.random_eviction(7, evict_from=EVICTED.int(), q_len=3)
    expected = [
        [[[j <= i < EVICTED[b, h, j] for j in range(7)] for i in range(4, 7)] for h in range(2)] for b in range(2)
    ]
    assert torch.equal(mask.to_dense(), torch.tensor(expected))


def sorted_by(key: list[int]) -> list[int]:
    return sorted(range(len(key)), key=lambda position: key[position])  # Python's sort is stable


def in_sorted_order(visible: Callable[[int, int], bool], q_key: list[int], k_key: list[int]) -> torch.Tensor:
    """A mask given over (query row, key column) in the original order, with rows and columns sorted stably."""
    return torch.tensor([[visible(i, j) for j in sorted_by(k_key)] for i in sorted_by(q_key)])


sizes = st.tuples(
    st.integers(1, 2), st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), st.integers(1, 9), st.integers(1, 9)
)


withins = st.sampled_from(["nothing", "one mask", "a mask per key head", "a mask per query head"])


def other_mask(size, within: str, generator: torch.Generator) -> tuple[FlashMask | None, torch.Tensor]:
    """A mask that hides each key from a random row on, and those rows for every head."""
    batch, (q_heads, k_heads), q_len, kv_len = size
    if within == "nothing":
        return None, torch.full((batch, q_heads, kv_len), q_len)
    heads = {"one mask": 1, "a mask per key head": k_heads, "a mask per query head": q_heads}[within]
    shape = (1 if heads == 1 else batch, heads, kv_len, 1)
    indices = torch.randint(0, q_len + 1, shape, generator=generator, dtype=torch.int32)
    hidden_from = indices[..., 0].repeat_interleave(q_heads // heads, 1).expand(batch, q_heads, kv_len)
    return FlashMask(indices, causal=True, q_len=q_len), hidden_from


@settings(max_examples=100, deadline=None)
@given(size=sizes, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 2**31), within=withins)
def test_qk_sparse_is_causal_attention_among_the_kept(size, share, seed, within):
    batch, (q_heads, k_heads), q_len, kv_len = size
    generator = torch.Generator().manual_seed(seed)
    q_keep = torch.rand(batch, q_len, q_heads, generator=generator).lt(share).transpose(1, 2)
    k_keep = torch.rand(batch, kv_len, k_heads, generator=generator).lt(share).transpose(1, 2)
    other, hidden_from = other_mask(size, within, generator)
    mask = masks.qk_sparse(q_keep, k_keep, mask=other)
    assert (mask.causal, mask.q_len, mask.indices.shape) == (False, q_len, (batch, q_heads, kv_len, 2))
    mask.validate()
    dense = mask.to_dense()
    for b in range(batch):
        for h in range(q_heads):
            q, k = q_keep[b, h].tolist(), k_keep[b, h * k_heads // q_heads].tolist()
            expected = in_sorted_order(
                lambda i, j, q=q, k=k, b=b, h=h: q[i] and k[j] and i + kv_len - q_len >= j and i < hidden_from[b, h, j],
                [not x for x in q],
                [not x for x in k],
            )
            assert torch.equal(dense[b, h], expected)


@settings(max_examples=100, deadline=None)
@given(
    size=sizes,
    buckets=st.lists(st.sampled_from([-(2**62), -1, 0, 3, 2**62]), min_size=1, max_size=4),
    exclude_self=st.booleans(),
    seed=st.integers(0, 2**31),
    within=withins,
)
def test_hash_sparse_is_causal_attention_within_buckets(size, buckets, exclude_self, seed, within):
    batch, (q_heads, k_heads), q_len, kv_len = size
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(buckets)
    q_bucket = values[torch.randint(len(buckets), (batch, q_len, q_heads), generator=generator)].transpose(1, 2)
    k_bucket = values[torch.randint(len(buckets), (batch, kv_len, k_heads), generator=generator)].transpose(1, 2)
    other, hidden_from = other_mask(size, within, generator)
    mask = masks.hash_sparse(q_bucket, k_bucket, exclude_self=exclude_self, mask=other)
    assert (mask.causal, mask.q_len, mask.indices.shape) == (False, q_len, (batch, q_heads, kv_len, 2))
    mask.validate()
    dense = mask.to_dense()
    for b in range(batch):
        for h in range(q_heads):
            q, k = q_bucket[b, h].tolist(), k_bucket[b, h * k_heads // q_heads].tolist()
            expected = in_sorted_order(
                lambda i, j, q=q, k=k, b=b, h=h: (
                    q[i] == k[j] and i + kv_len - q_len >= j + exclude_self and i < hidden_from[b, h, j]
                ),
                q,
                k,
            )
            assert torch.equal(dense[b, h], expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_hash_sparse_hides_a_key_whose_bucket_has_no_query(dtype):
    q_bucket = torch.tensor([[[5, 1, 5, 1]]], dtype=dtype)
    for alone in (0, 3, 9):  # below, between and above the buckets of the queries
        k_bucket = torch.tensor([[[5, alone, 1, 1]]], dtype=dtype)
        column = sorted_by(k_bucket.flatten().tolist()).index(1)
        dense = masks.hash_sparse(q_bucket, k_bucket).to_dense()[0, 0]
        assert not dense[:, column].any()
        assert dense.sum() == 2 + 1 + 1


def test_sparse_families_follow_their_inputs_device():
    keep, bucket = torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 4, dtype=torch.int32)
    assert masks.qk_sparse(keep, keep, device="meta").device.type == "meta"
    assert masks.hash_sparse(bucket, bucket, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert masks.qk_sparse(keep, keep).device.type == "cpu"
        assert masks.hash_sparse(bucket, bucket).device.type == "cpu"


KEEP, BUCKET = torch.ones(2, 4, 8, dtype=torch.bool), torch.zeros(2, 4, 8, dtype=torch.int64)
LATE = torch.full((1, 2, 5), 5)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: masks.causal(0), ValueError, r"kv_len must be at least 1, got 0"),
        (lambda: masks.causal(4.0), TypeError, r"kv_len must be an int, got 4\.0 \(float\)"),
        (lambda: masks.causal(True), TypeError, r"kv_len must be an int, got True"),
        (lambda: masks.full(4, q_len=0), ValueError, r"q_len must be at least 1, got 0"),
        (lambda: masks.sliding_window(4, 0), ValueError, r"window must be at least 1, got 0"),
        (lambda: masks.sliding_window(4, 2, q_len=5), ValueError, r"q_len must be in 1\.\.4, got 5; .* last q_len"),
        (lambda: masks.causal_document([3], q_len=4), ValueError, r"q_len must be in 1\.\.3, got 4"),
        (lambda: masks.causal_document([]), ValueError, r"documents is empty"),
        (lambda: masks.causal_document([[3], []]), ValueError, r"documents\[1\] is empty"),
        (lambda: masks.causal_document(5), TypeError, r"documents must be a list.* got int"),
        (lambda: masks.causal_document([3, 0]), ValueError, r"documents\[1\] must be at least 1, got 0; leave out"),
        (lambda: masks.causal_document([[3], [2, -1]]), ValueError, r"documents\[1\]\[1\] must be at least 1, got -1"),
        (lambda: masks.causal_document([3, [2]]), TypeError, r"documents\[1\] must be an int, got \[2\]"),
        (lambda: masks.causal_document([[3], 2]), TypeError, r"documents\[1\] must be one too, got 2"),
        (
            lambda: masks.causal_document([3, 2], kv_len=4),
            ValueError,
            r"documents holds 5 tokens, more than kv_len = 4",
        ),
        (lambda: masks.document([[3], [3, 2]], kv_len=4), ValueError, r"documents\[1\] holds 5 tokens"),
        (
            lambda: masks.document(torch.tensor([3.0])),
            TypeError,
            r"documents must be a tensor of integers, got torch.float32",
        ),
        (lambda: masks.document(torch.tensor([[[3]]])), ValueError, r"documents must have shape .* got \[1, 1, 1\]"),
        (lambda: masks.document(torch.tensor([3, 0])), ValueError, r"documents\[1\] must be at least 1, got 0"),
        (lambda: masks.document(torch.tensor([[0, 3]])), ValueError, r"documents\[0\]\[0\] must be at least 1, got 0"),
        (lambda: masks.document(torch.tensor([[3], [0]])), ValueError, r"documents\[1\] is empty"),
        (lambda: masks.share_question([(3, [])]), ValueError, r"documents\[0\] has no answer; .* tree\(\)"),
        (
            lambda: masks.share_question([(3, [1, 0])]),
            ValueError,
            r"documents\[0\]\[1\]\[1\] must be at least 1, got 0",
        ),
        (lambda: masks.share_question([[(0, [1])]]), ValueError, r"documents\[0\]\[0\] must be at least 1, got 0"),
        (lambda: masks.share_question([3]), TypeError, r"documents\[0\] must be a tuple .*, got 3"),
        (lambda: masks.share_question([(3, 1)]), TypeError, r"documents\[0\] must be a tuple"),
        (
            lambda: masks.share_question([(3, [(1, [1])])]),
            TypeError,
            r"documents\[0\]\[1\]\[0\] has children; .* tree\(\)",
        ),
        (
            lambda: masks.tree([(3, [1, (2, [0])])]),
            ValueError,
            r"documents\[0\]\[1\]\[1\]\[1\]\[0\] must be at least 1",
        ),
        (lambda: masks.tree([(3, [1], [2])]), TypeError, r"documents\[0\] must be a length or a tuple"),
        (lambda: masks.tree([1, (3, 4)]), TypeError, r"documents\[1\] must be a length or a tuple"),
        (lambda: masks.tree([(3, [[1, [2]]])]), TypeError, r"documents\[0\]\[1\]\[0\] must be a length or a tuple"),
        (lambda: masks.tree([(3, ["1"])]), TypeError, r"documents\[0\]\[1\]\[0\] must be an int, got '1'"),
        (lambda: masks.global_sliding_window(4, 5, 1), ValueError, r"n_global must be in 0\.\.4, got 5"),
        (lambda: masks.global_sliding_window(4, -1, 1), ValueError, r"n_global must be in 0\.\.4, got -1"),
        (lambda: masks.global_sliding_window(4, 1, 0), ValueError, r"window must be at least 1, got 0"),
        (lambda: masks.causal_blockwise([2, 0]), ValueError, r"block_lengths\[1\] must be at least 1, got 0"),
        (lambda: masks.prefix_lm_causal(4, 5), ValueError, r"prefix must be in 0\.\.4, got 5"),
        (lambda: masks.prefix_lm_causal(4, [1, -1]), ValueError, r"prefix\[1\] must be in 0\.\.4, got -1"),
        (lambda: masks.prefix_lm_causal(4, torch.ones(1)), TypeError, r"prefix must be a tensor of integers"),
        (lambda: masks.prefix_lm_causal(4, []), ValueError, r"prefix is empty"),
        (lambda: masks.prefix_lm_document([(4, 3)]), ValueError, r"documents\[0\]\[0\] must be in 0\.\.3, got 4"),
        (
            lambda: masks.prefix_lm_document([[(0, 1)], [(0, 0)]]),
            ValueError,
            r"documents\[1\]\[0\]\[1\] must be at least 1",
        ),
        (lambda: masks.prefix_lm_document([3]), TypeError, r"documents\[0\] must be a tuple .*, got 3"),
        (lambda: masks.padding([3, 5], kv_len=4), ValueError, r"lengths\[1\] must be in 0\.\.4, got 5; kv_len is 4"),
        (lambda: masks.padding([3, -1]), ValueError, r"lengths\[1\] must be at least 0, got -1"),
        (lambda: masks.padding([0, 0]), ValueError, r"lengths are all 0; give kv_len"),
        (lambda: masks.padding(3), TypeError, r"lengths must be a list or an int tensor \[B\], got int"),
        (lambda: masks.padding(torch.ones(1, 2).long()), ValueError, r"lengths must have shape \[B\], got \[1, 2\]"),
        (lambda: masks.padding([3], side="top"), ValueError, r'side must be "right" or "left", got \'top\''),
        (
            lambda: masks.random_eviction(5, evict_from=LATE.float()),
            TypeError,
            r"evict_from must be a tensor of integers",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE[0]),
            ValueError,
            r"shape \[B, Hm, kv_len = 5\], got \[2, 5\]",
        ),
        (
            lambda: masks.random_eviction(4, evict_from=LATE),
            ValueError,
            r"shape \[B, Hm, kv_len = 4\], got \[1, 2, 5\]",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE + 1),
            ValueError,
            r"evict_from\[0, 0, 0\] is 6.* in 1\.\.5 only",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE - 2),
            ValueError,
            r"evict_from\[0, 0, 3\] is 3.* in 4\.\.5 only",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE, heads=2),
            ValueError,
            r"give either evict_from, or generator",
        ),
        (lambda: masks.random_eviction(5, heads=0), ValueError, r"heads must be at least 1, got 0"),
        (
            lambda: masks.qk_sparse(KEEP.int(), KEEP),
            TypeError,
            r"q_keep must be a tensor of bool values, got torch.int32",
        ),
        (lambda: masks.qk_sparse(KEEP, [True]), TypeError, r"k_keep must be a tensor of bool values, got list"),
        (lambda: masks.qk_sparse(KEEP, KEEP[0]), ValueError, r"k_keep must have shape \[B, H, S\].* got \[4, 8\]"),
        (lambda: masks.qk_sparse(KEEP, KEEP[:1]), ValueError, r"k_keep has batch size 1, q_keep has 2"),
        (lambda: masks.qk_sparse(KEEP, KEEP[:, :3]), ValueError, r"q_keep has 4 heads, no multiple of the 3 of k_keep"),
        (lambda: masks.qk_sparse(KEEP, KEEP.to("meta")), ValueError, r"k_keep is on meta, q_keep on cpu"),
        (
            lambda: masks.hash_sparse(KEEP, BUCKET),
            TypeError,
            r"q_bucket must be a tensor of integer values, got torch.bool",
        ),
        (lambda: masks.hash_sparse(BUCKET, BUCKET[..., :0]), ValueError, r"k_bucket must have shape .* no axis empty"),
        (
            lambda: masks.hash_sparse(BUCKET, BUCKET, mask=masks.sliding_window(8, 2, causal=False)),
            ValueError,
            r"mask must be causal with n = 1 column, got causal=False, n = 2: .* windows of flashmask_hf.masks",
        ),
        (
            lambda: masks.qk_sparse(KEEP, KEEP, mask=masks.causal_document([3, 4])),
            ValueError,
            r"mask has 7 key columns, but there are 8 keys",
        ),
    ],
)
def test_bad_input_is_named_with_the_way_out(build, error, message):
    with pytest.raises(error, match=message):
        build()


DRAWN_LINE = re.compile(r"^        ([1.](?: [1.])*)(?:        ([1.](?: [1.])*))?$")
UNNAMED = {
    "qk_sparse": lambda: masks.qk_sparse(
        torch.tensor([[[True, False, True, True]]]), torch.tensor([[[True, True, False, True]]])
    ),
    "hash_sparse": lambda: masks.hash_sparse(torch.tensor([[[1, 0, 1, 0]]]), torch.tensor([[[1, 0, 1, 0]]])),
    "random_eviction": lambda: masks.random_eviction(5, evict_from=torch.tensor([[[4, 2, 5, 4, 5]]])),
}


def drawings(name: str) -> list[tuple[str | None, list[str], list[str]]]:
    """(constructor call, drawn lines, lines drawn to the right of them) of each drawing in a docstring."""
    found, call, left, right = [], None, [], []
    for line in [*(getattr(masks, name).__doc__ or "").splitlines(), ""]:
        drawn = DRAWN_LINE.match(line)
        if drawn:
            left.append(drawn[1].replace(" ", ""))
            right.append((drawn[2] or "").replace(" ", ""))
        elif left:
            found.append((call, left, right))
            call, left, right = None, [], []
        named = re.match(r"^    `(\w+\(.*?\))`", line)
        call = named[1] if named else call
    return found


def as_lines(visible: torch.Tensor) -> list[str]:
    return ["".join("1" if cell else "." for cell in row) for row in visible.tolist()]


@pytest.mark.parametrize("name", [name for name in masks.__all__ if name != "Node"])
def test_docstrings_draw_what_the_function_returns(name):
    assert drawings(name), "a mask's docstring draws it"
    for call, left, right in drawings(name):
        if name in UNNAMED:
            assert as_lines(UNNAMED[name]().to_dense()[0, 0]) == (right if any(right) else left)
        else:
            assert call is not None
            assert call.startswith(f"{name}(")
            assert as_lines(eval(call, vars(masks)).to_dense()[0, 0]) == left


def test_sparse_drawings_show_the_original_order_on_the_left():
    q_keep, k_keep, bucket = [1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0]
    kept = [[bool(q_keep[i] and k_keep[j] and j <= i) for j in range(4)] for i in range(4)]
    hashed = [[bucket[i] == bucket[j] and j <= i for j in range(4)] for i in range(4)]
    assert drawings("qk_sparse")[0][1] == as_lines(torch.tensor(kept))
    assert drawings("hash_sparse")[0][1] == as_lines(torch.tensor(hashed))


@pytest.mark.parametrize("name", [name for name in masks.__all__ if name != "Node"])
def test_docstrings_name_every_argument(name):
    function = getattr(masks, name)
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in text, argument
    assert "\nReturns:\n    FlashMask: " in text
    assert "\nRaises:\n" in text
