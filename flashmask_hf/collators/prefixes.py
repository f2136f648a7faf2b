"""Trees of sequences with common prefixes, so that each prefix is computed once."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.forest import Forest, Leaf


def share_prompts(
    sequences: Sequence[NDArray[np.int64]], prompt_lengths: Sequence[int], kinds: Sequence[int] | None = None
) -> tuple[list[Forest], list[Leaf]]:
    """Build a tree per distinct prompt, with its completions as children, and return the leaf of each sequence, too.

    Sequences are a prompt and its completion, int64 [n] each; a completion may be empty. Prompts of the same tokens
    differ by `kinds`, as by their images. Trees are sorted by their prompts, then by kind.
    """
    prompts = [sort_key(tokens[:length]) for tokens, length in zip(sequences, prompt_lengths, strict=True)]
    keys = list(zip(prompts, kinds or [0] * len(prompts), map(sort_key, sequences), strict=True))
    forests: list[Forest] = []
    leaves: list[Leaf] = [(0, 0)] * len(sequences)
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    for _, group in itertools.groupby(order, key=lambda row: keys[row][:2]):
        rows = list(group)
        answers = [sequences[row][prompt_lengths[row] :] for row in rows]
        empty = sum(not len(answer) for answer in answers)  # sorted: they come first
        for nth, row in enumerate(rows):
            leaves[row] = (len(forests), max(0, nth + 1 - empty))
        forests.append(Forest.from_trees((sequences[rows[0]][: prompt_lengths[rows[0]]], answers[empty:])))
    return forests, leaves


def share_prefixes(
    sequences: Sequence[NDArray[np.int64]], kinds: Sequence[int] | None = None
) -> tuple[list[Forest], list[Leaf]]:
    """Build the compressed trie of sequences: a tree per distinct first token, a segment per shared run.

    Sequences, int64 [n] each, of different `kinds` share nothing. Returns also the leaf of each sequence, the same for
    equal sequences.
    """
    kinds = kinds or [0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda row: (kinds[row], sort_key(sequences[row])))
    ordered = [sequences[row] for row in order]
    common = [
        common_length(sequences[one], sequences[two]) if kinds[one] == kinds[two] else 0
        for one, two in itertools.pairwise(order)
    ]
    forests: list[Forest] = []
    leaves: list[Leaf] = [(0, 0)] * len(sequences)
    for first, last in _split(range(len(ordered)), common, 0):
        tokens: list[NDArray[np.int64]] = []
        parents: list[int] = []
        todo = [(first, last, 0, -1)]
        while todo:  # a node: sequences first to last share the tokens from `start`, which follow `parent`
            first, last, start, parent = todo.pop()
            end = min(common[first:last], default=len(ordered[first]))
            node = len(tokens)
            tokens.append(ordered[first][start:end])
            parents.append(parent)
            while first <= last and len(ordered[first]) == end:  # sorted: what ends here comes first
                leaves[order[first]] = (len(forests), node)
                first += 1
            todo += [(*child, end, node) for child in _split(range(first, last + 1), common, end)][::-1]
        forests.append(Forest.from_segments(tokens, parents))
    return forests, leaves


def cut_tries(sequences: Sequence[NDArray[Any]], row_length: int) -> list[list[int]]:
    """Group sequences into tries of at most `row_length` tokens, so that the fewest tokens are computed.

    In sorted order, a sequence adds its tokens after the prefix of the one before, and one for a new branch
    (`learn_once`). A cut repeats the prefix. One below 1/64 of a sequence is not shared: documents fill rows better.

    Sequences are integers [n], with n in 1..row_length. Returns the indices of each group's sequences, in sorted order.
    """
    order = sorted(range(len(sequences)), key=lambda row: sort_key(sequences[row]))
    lengths = np.array([len(sequences[row]) for row in order])
    common = np.array([0, *(common_length(sequences[one], sequences[two]) for one, two in itertools.pairwise(order))])
    alone = common * 64 < lengths
    repeated = np.where(alone, 0, common - (common < np.roll(lengths, 1)))  # by a cut before each sequence
    ends = np.cumsum(lengths - repeated).tolist()  # tokens of a trie that is never cut
    least, firsts = [0], list[int]()  # tokens repeated by the best cuts, and the last cut, of the first sequences
    window: deque[tuple[int, int]] = deque()  # repeated tokens and first sequence of tries that may end here
    for last, own in enumerate(repeated.tolist()):
        if alone[last]:
            window.clear()
        while window and window[-1][0] > least[last] + own:
            window.pop()
        window.append((least[last] + own, last))
        while lengths[window[0][1]] + ends[last] - ends[window[0][1]] > row_length:
            window.popleft()
        least.append(window[0][0])
        firsts.append(window[0][1])
    groups: list[list[int]] = []
    while order:
        order, group = order[: firsts[len(order) - 1]], order[firsts[len(order) - 1] :]
        groups.append(group)
    return groups[::-1]


def _split(members: range, common: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Cut a range of sorted sequences, as (first, last), where `common[i]`, of i and i + 1, is at most `length`."""
    cuts = [index for index in members if index == members[-1] or common[index] <= length]
    return list(zip([members.start, *(cut + 1 for cut in cuts[:-1])], cuts, strict=True)) if cuts else []


def common_length(one: NDArray[Any], two: NDArray[Any]) -> int:
    """Return the number of tokens with which both sequences begin."""
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    return int(differ.argmax()) if differ.any() else length


def sort_key(tokens: NDArray[Any]) -> bytes:
    """Return bytes that sort as the token ids do, int32 or int64."""
    return tokens.astype(tokens.dtype.newbyteorder(">")).tobytes()
