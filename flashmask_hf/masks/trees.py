"""Masks of token trees in depth-first order: shared questions and forests of any depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from flashmask_hf._numbers import as_integer
from flashmask_hf.depth_first import flatten, subtree_ends
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, batch_rows, key_count
from flashmask_hf.masks._columns import make_mask, per_token

Node: TypeAlias = "int | tuple[int, Sequence[Node]]"
"""A node of `tree`: its own length, or (length, [children])."""


def share_question(
    documents: Sequence[tuple[int, Sequence[int]]] | Sequence[Sequence[tuple[int, Sequence[int]]]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Answers share their question: each sees the question and itself causally, no other answer (section 2.1).

    `share_question([(1, [2, 1]), (1, [1])])`:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 . . 1 . .
        . . . . 1 .
        . . . . 1 1

    Args:
        documents: tuples (question length, [answer lengths]) in row order.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Raises:
        TypeError: a document is not such a tuple.
        ValueError: a document has no answer.

    Example:
        >>> share_question([(1, [2, 1]), (1, [1])]).indices.flatten()  # where each node's subtree ends
        tensor([4, 3, 3, 4, 6, 6], dtype=torch.int32)
    """
    for path, row in batch_rows("documents", documents, list):
        for k, entry in enumerate(row):
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], (list, tuple)):
                raise TypeError(f"{path}[{k}] must be a tuple (question length, [answer lengths]), got {entry!r}")
            if not entry[1]:
                raise ValueError(f"{path}[{k}] has no answer; give at least one, or use tree() for a lone document")
            for a, answer in enumerate(entry[1]):
                if isinstance(answer, tuple):
                    raise TypeError(f"{path}[{k}][1][{a}] has children; a deeper tree is built by tree()")
    return tree(documents, kv_len=kv_len, q_len=q_len, device=device)


def tree(
    documents: Sequence[Node] | Sequence[Sequence[Node]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """A forest in depth-first order: each token sees its own node and its ancestors, causally.

    The general form of `causal_document` and `share_question`. It needs one integer per key: the query row where the
    subtree of the key's node ends.

    `tree([(1, [(1, [1, 1]), 1]), 1])`, a root with two children, the first with two of its own, then a lone token:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 . 1 . .
        1 . . . 1 .
        . . . . . 1

    Args:
        documents: the roots. A node is its length, or a tuple (length, [children]), whose own tokens come first.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Raises:
        TypeError: a node is neither an int nor such a tuple.

    Example:
        >>> tree([(1, [(1, [1, 1]), 1]), 1]).indices.flatten()
        tensor([5, 4, 3, 4, 5, 6], dtype=torch.int32)
    """
    lengths, ends = [], []
    for path, row in batch_rows("documents", documents, list):
        nodes, parents = flatten(path, row, _split)
        lengths.append(nodes)
        ends.append(subtree_ends(nodes, parents))
    kv_len = key_count("documents", lengths, kv_len)
    end = per_token(ends, lengths, kv_len, padding=0)
    return make_mask(end, causal=True, q_len=q_len, device=device)


def _split(name: str, node: Any) -> tuple[int, Sequence[Any]]:
    length, children = node, []
    if isinstance(node, (tuple, list)):
        if isinstance(node, list) or len(node) != 2 or not isinstance(node[1], (list, tuple)):
            raise TypeError(f"{name} must be a length or a tuple (length, [children]), got {node!r}")
        length, children = node
    return as_integer(name, length, 1, why="every question, answer or document has at least one token"), children
