"""Chains of draft tokens as P-EAGLE writes them: rows, and which see each other."""

from __future__ import annotations

from itertools import accumulate

Row = tuple[int, int, int, int]
"""Document, token or anchor, depth and chain of a row; depth 0 and chain -1 of a token."""


def chains_in_order(lengths: list[int], anchors: list[int], depths: list[int]) -> list[Row]:
    """Return the rows of packed documents in mirrored order."""
    rows: list[Row] = []
    for document, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        tokens = range(end - length, end)
        for chain, (anchor, depth) in enumerate(zip(anchors, depths, strict=True)):
            if anchor in tokens:
                rows += [(document, anchor, step, chain) for step in range(1, depth + 1)]
        rows += [(document, token, 0, -1) for token in reversed(tokens)]
    return rows


def sees_chain(query: Row, key: Row) -> bool:
    """Return whether a row sees another: tokens up to its anchor, and its own chain up to itself."""
    if key[2] == 0:
        return query[0] == key[0] and query[1] >= key[1]
    return query[3] == key[3] and query[2] >= key[2]
