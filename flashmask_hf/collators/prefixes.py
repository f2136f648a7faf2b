"""Trees of sequences with common prefixes, so that each prefix is computed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.forest import Forest, Leaf


def share_prompts(
    sequences: Sequence[NDArray[np.int64]], prompt_lengths: Sequence[int], kinds: Sequence[int] | None = None
) -> tuple[list[Forest], list[Leaf]]:
    """Build a tree per distinct prompt, with its completions as children.

    Args:
        sequences: token ids of a prompt and its completion, int64 [n] each; a completion may be empty.
        prompt_lengths: number of tokens of each sequence's prompt, at least 1.
        kinds: a number for each sequence, by which prompts of the same tokens differ, as by their images.

    Returns:
        The trees, sorted by their tokens, then by kind, and the leaf of each sequence.
    """
    members: dict[tuple[bytes, int], list[int]] = {}
    for row, (tokens, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        members.setdefault((sort_key(tokens[:length]), kinds[row] if kinds else 0), []).append(row)
    forests: list[Forest] = []
    leaves: list[Leaf] = [(0, 0)] * len(sequences)
    for _, rows in sorted(members.items()):
        answers: list[NDArray[np.int64]] = []
        for row in sorted(rows, key=lambda row: sort_key(sequences[row])):
            answer = sequences[row][prompt_lengths[row] :]
            if len(answer):
                answers.append(answer)
            leaves[row] = (len(forests), len(answers) if len(answer) else 0)
        forests.append(Forest.shared_question(sequences[rows[0]][: prompt_lengths[rows[0]]], answers))
    return forests, leaves


def share_prefixes(
    sequences: Sequence[NDArray[np.int64]], kinds: Sequence[int] | None = None
) -> tuple[list[Forest], list[Leaf]]:
    """Build the compressed trie of sequences: a tree per distinct first token, a segment per shared run.

    Args:
        sequences: token ids, int64 [n] each, not empty.
        kinds: a number for each sequence; sequences of different kinds share nothing.

    Returns:
        The trees, and the leaf of each sequence. Equal sequences of a kind have the same leaf.
    """
    kinds = kinds or [0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda row: (kinds[row], sort_key(sequences[row])))
    ordered = [sequences[row] for row in order]
    common = [
        _common_length(sequences[one], sequences[two]) if kinds[one] == kinds[two] else 0
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


def _split(members: range, common: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Cut a range of sorted sequences, as (first, last), where neighbours share at most `length` tokens.

    `common[i]` is the length of the common prefix of sequences i and i + 1.
    """
    cuts = [index for index in members if index == members[-1] or common[index] <= length]
    return list(zip([members.start, *(cut + 1 for cut in cuts[:-1])], cuts, strict=True)) if cuts else []


def _common_length(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    return int(differ.argmax()) if differ.any() else length


def sort_key(tokens: NDArray[np.int64]) -> bytes:
    """Return bytes that sort as the token ids do."""
    return tokens.astype(">i8").tobytes()
