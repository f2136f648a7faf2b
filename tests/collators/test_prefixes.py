"""Trees of common beginnings hold every sequence, and every shared token once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmask_hf.collators.prefixes import share_prefixes, share_prompts

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
"""Few token ids, so that random sequences begin alike."""


def arrays(rows):
    return [np.array(row, dtype=np.int64) for row in rows]


def assert_paths(forests, leaves, sequences):
    """Assert that the leaf of each sequence ends a path of its tokens."""
    for sequence, (forest, segment) in zip(sequences, leaves, strict=True):
        np.testing.assert_array_equal(forests[forest].tokens[forests[forest].path(segment)], sequence)


@given(st.lists(TOKENS, min_size=1, max_size=9))
def test_trie(rows):
    """As many tokens as distinct beginnings; siblings begin with different tokens; no chain that could be one."""
    sequences = arrays(rows)
    forests, leaves = share_prefixes(sequences)
    assert_paths(forests, leaves, sequences)
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert sum(len(forest.tokens) for forest in forests) == len(beginnings)
    ends = set(leaves)
    for nth, forest in enumerate(forests):
        starts = np.cumsum(forest.lengths) - forest.lengths
        children = [np.flatnonzero(forest.parents == segment) for segment in range(len(forest.lengths))]
        for segment, own in enumerate(children):
            assert len({int(forest.tokens[starts[child]]) for child in own}) == len(own)
            assert len(own) != 1 or (nth, segment) in ends
    assert len({int(forest.tokens[0]) for forest in forests}) == len(forests)


@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 2), max_size=4)), min_size=1, max_size=9), st.randoms())
def test_prompts(rows, random):
    """A tree for each distinct prompt; another order of the sequences gives the same trees."""
    sequences = arrays([prompt + completion for prompt, completion in rows])
    forests, leaves = share_prompts(sequences, [len(prompt) for prompt, _ in rows])
    assert_paths(forests, leaves, sequences)
    prompts = {tuple(prompt) for prompt, _ in rows}
    assert len(forests) == len(prompts)
    completions = sum(len(completion) for _, completion in rows)
    assert sum(len(forest.tokens) for forest in forests) == sum(map(len, prompts)) + completions
    random.shuffle(rows)
    shuffled, _ = share_prompts(
        arrays([prompt + completion for prompt, completion in rows]), [len(prompt) for prompt, _ in rows]
    )
    for one, two in zip(forests, shuffled, strict=True):
        assert (one.tokens.tolist(), one.lengths.tolist(), one.parents.tolist()) == (
            two.tokens.tolist(), two.lengths.tolist(), two.parents.tolist(),
        )  # fmt: skip


@pytest.mark.parametrize("share", [share_prefixes, lambda rows: share_prompts(rows, [1] * len(rows))])
def test_large_token_ids(share):
    """Ids are sorted as numbers."""
    sequences = arrays([[256, 1], [255, 2], [1, 65536], [65536, 1]])
    forests, leaves = share(sequences)
    assert_paths(forests, leaves, sequences)
    assert [int(forest.tokens[0]) for forest in forests] == [1, 255, 256, 65536]
