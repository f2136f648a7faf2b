"""Arrange sequences with common beginnings as trees, so that each beginning is computed once.

`share_prompts` gives every distinct prompt a tree of its own, with the completions as its children. `share_prefixes`
goes further: it builds the compressed trie of the sequences, in which every common beginning, inside completions as
well, is one segment. Both tell for each sequence where its path through the trees ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.forest import Forest

__all__ = ["Leaf", "share_prefixes", "share_prompts"]

Leaf = tuple[int, int]
"""The forest and the segment in it at which a sequence ends: `forests[f].path(s)` are the sequence's tokens."""


def share_prompts(
    sequences: Sequence[NDArray[np.int64]], prompt_lengths: Sequence[int]
) -> tuple[list[Forest], list[Leaf]]:
    """Build a tree for each distinct prompt, with the completions that follow it as children.

    Trees and children are sorted by their tokens, so the same sequences in another order give the same trees.

    Args:
        sequences: token ids of a prompt and its completion, int64 [n] each; a completion may be empty.
        prompt_lengths: number of tokens of each sequence's prompt, at least 1.

    Returns:
        The trees, and the leaf of each sequence.
    """
    members: dict[bytes, list[int]] = {}
    for row, (tokens, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        members.setdefault(_sort_key(tokens[:length]), []).append(row)
    forests: list[Forest] = []
    leaves: list[Leaf] = [(0, 0)] * len(sequences)
    for _, rows in sorted(members.items()):
        answers: list[NDArray[np.int64]] = []
        for row in sorted(rows, key=lambda row: _sort_key(sequences[row])):
            answer = sequences[row][prompt_lengths[row] :]
            if len(answer):
                answers.append(answer)
            leaves[row] = (len(forests), len(answers) if len(answer) else 0)
        forests.append(Forest.shared_question(sequences[rows[0]][: prompt_lengths[rows[0]]], answers))
    return forests, leaves


def share_prefixes(sequences: Sequence[NDArray[np.int64]]) -> tuple[list[Forest], list[Leaf]]:
    """Build the compressed trie of sequences: one tree for each distinct first token, one segment for each shared run.

    Args:
        sequences: token ids, int64 [n] each, not empty.

    Returns:
        The trees, and the leaf of each sequence. Equal sequences have the same leaf.
    """
    order = sorted(range(len(sequences)), key=lambda row: _sort_key(sequences[row]))
    ordered = [sequences[row] for row in order]
    common = [_common_length(one, two) for one, two in itertools.pairwise(ordered)]
    forests: list[Forest] = []
    leaves: list[Leaf] = [(0, 0)] * len(sequences)
    for first, last in _split(range(len(ordered)), common, 0):
        tokens: list[NDArray[np.int64]] = []
        parents: list[int] = []
        todo = [(first, last, 0, -1)]
        while todo:  # a node: sequences first to last agree on their tokens from `start` on, which follow `parent`
            first, last, start, parent = todo.pop()
            end = min(common[first:last], default=len(ordered[first]))
            node = len(tokens)
            tokens.append(ordered[first][start:end])
            parents.append(parent)
            while first <= last and len(ordered[first]) == end:  # sorted: what ends here comes first
                leaves[order[first]] = (len(forests), node)
                first += 1
            todo += [(*child, end, node) for child in _split(range(first, last + 1), common, end)][::-1]
        lengths = np.array([len(segment) for segment in tokens])
        forests.append(Forest(np.concatenate(tokens), lengths, np.array(parents)))
    return forests, leaves


def _split(members: range, common: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Cut a range of sorted sequences, as (first, last), where neighbours have no more than `length` tokens in common.

    `common[i]` is the number of tokens that sequences i and i + 1 have in common.
    """
    cuts = [index for index in members if index == members[-1] or common[index] <= length]
    return list(zip([members.start, *(cut + 1 for cut in cuts[:-1])], cuts, strict=True)) if cuts else []


def _common_length(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    """Return with how many equal tokens two sequences begin."""
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    return int(differ.argmax()) if differ.any() else length


def _sort_key(tokens: NDArray[np.int64]) -> bytes:
    """Return bytes that sort as the token ids do."""
    return tokens.astype(">i8").tobytes()
