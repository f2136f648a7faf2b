"""Pack trees of token segments into rows, with the position ids and mask vectors that keep the trees apart.

A packed row is a forest of token segments in depth-first order. In that order a causal mask needs one integer per
token, the row where the subtree of the token's segment ends, and the position of a token is its depth. A plain document
is a tree of one segment. A shared question has its answers as children. A dialogue that branches at several turns is a
deeper tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf.collators._validation import as_integers, as_row_options, check_depth, check_lengths
from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.names import PACKED_IDS, PACKED_INDEX, PACKED_POSITIONS, VECTORS

__all__ = [
    "Forest",
    "PackedRows",
    "first_equals",
    "lay_out",
    "pack_forests",
    "packed_inputs",
]

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Token ids of one segment, [n]."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Token segments in depth-first order that stay in one row: one tree, or several side by side.

    In depth-first order a segment follows its parent, its parent's earlier children and all descendants of those.
    Arguments may be lists or arrays of any integer type; they are stored as int64 arrays.

    Args:
        tokens: token ids of all segments, concatenated, int64 [n].
        lengths: number of tokens of each segment, at least 1, int64 [segments]; they sum to n.
        parents: index of each segment's parent, -1 for a root, int64 [segments].

    Raises:
        TypeError: an argument is not a flat sequence of integers.
        ValueError: there is no segment, a segment is empty, the lengths do not sum to the number of tokens, or the
            segments are not in depth-first order.

    Example:
        >>> from flashmask_hf.collators import Forest
        >>> forest = Forest(tokens=[1, 2, 3, 4, 5, 6], lengths=[2, 1, 2, 1], parents=[-1, 0, 0, -1])
        >>> forest.leaves(), forest.depth()
        ([1, 2, 3], 4)
        >>> forest.tokens[forest.path(2)]
        array([1, 2, 4, 5])
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __post_init__(self):
        for name in ("tokens", "lengths", "parents"):
            object.__setattr__(self, name, as_integers(getattr(self, name), name))
        if not self.lengths.size:
            raise ValueError("lengths is empty: a forest needs at least one segment")
        if len(self.parents) != len(self.lengths):
            raise ValueError(
                f"parents has {len(self.parents)} entries, but lengths has {len(self.lengths)}; they must be one to one"
            )
        if (self.lengths < 1).any():
            empty = int((self.lengths < 1).argmax())
            raise ValueError(f"segment {empty} is empty; leave it out, or give it at least one token")
        check_lengths("lengths", self.lengths, len(self.tokens))
        branch: list[int] = []  # the path from a root to the previous segment
        for segment, parent in enumerate(self.parents.tolist()):
            while branch and branch[-1] != parent:
                branch.pop()
            if not branch and parent != -1:
                raise ValueError(
                    f"parents[{segment}] is {parent}, but segments must come in depth-first order: a parent is the "
                    "segment before, an ancestor of that, or -1 for a root"
                )
            branch.append(segment)

    @classmethod
    def from_trees(cls, *trees: Any) -> Forest:
        """Build a forest from nested token lists, in the notation of `masks.tree`.

        Args:
            trees: the roots. A node is a list of token ids, or a tuple (list of token ids, [children]).

        Raises:
            TypeError: a node is neither a list of integers nor such a tuple.
            ValueError: there is no tree, or a node is empty.

        Example:
            >>> from flashmask_hf.collators import Forest
            >>> forest = Forest.from_trees(([1, 2], [([3], [[4], [5, 6]]), [7]]), [8])
            >>> forest.tokens
            array([1, 2, 3, 4, 5, 6, 7, 8])
            >>> forest.lengths, forest.parents
            (array([2, 1, 1, 2, 1, 1]), array([-1,  0,  1,  1,  0, -1]))
        """
        if not trees:
            raise ValueError("trees is empty: a forest needs at least one tree")
        segments: list[NDArray[np.int64]] = []
        parents: list[int] = []
        stack = [(f"trees[{index}]", tree, -1) for index, tree in enumerate(trees)][::-1]
        while stack:
            name, node, parent = stack.pop()
            has_children = isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], (list, tuple))
            tokens, children = node if has_children else (node, [])
            try:
                if isinstance(tokens, tuple):
                    raise TypeError
                segment = as_integers(tokens, name)
            except TypeError:
                raise TypeError(
                    f"{name} must be a list of token ids, or a tuple (list of token ids, [children])"
                ) from None
            if not segment.size:
                raise ValueError(f"{name} is empty; leave it out, or give it at least one token")
            stack += [(f"{name}[1][{index}]", child, len(segments)) for index, child in enumerate(children)][::-1]
            segments.append(segment)
            parents.append(parent)
        return cls(np.concatenate(segments), np.array([len(segment) for segment in segments]), np.array(parents))

    @classmethod
    def shared_question(cls, question: TokenIds, answers: Sequence[TokenIds]) -> Forest:
        """Build the tree of a question with its answers as children.

        Args:
            question: token ids of the question, [Q]; it becomes segment 0.
            answers: token ids of the answers, [A] each; they become segments 1, 2 and so on.

        Raises:
            TypeError: a question or an answer does not hold integers.
            ValueError: a question or an answer is empty.
        """
        segments = [as_integers(question, "question")]
        segments += [as_integers(answer, f"answers[{index}]") for index, answer in enumerate(answers)]
        lengths = np.array([len(segment) for segment in segments])
        return cls(np.concatenate(segments), lengths, np.array([-1] + [0] * len(answers)))

    def path(self, segment: int) -> NDArray[np.int64]:
        """Return the indices in `tokens` of the path from the root through the end of a segment, int64 [depth].

        Raises:
            IndexError: there is no such segment.
        """
        segment = range(len(self.parents))[segment]
        ends = np.cumsum(self.lengths)
        ranges: list[NDArray[np.int64]] = []
        while segment != -1:
            ranges.append(np.arange(ends[segment] - self.lengths[segment], ends[segment]))
            segment = int(self.parents[segment])
        return np.concatenate(ranges[::-1])

    def leaves(self) -> list[int]:
        """Return the indices of the segments without children, in order."""
        inner = set(self.parents.tolist())
        return [segment for segment in range(len(self.parents)) if segment not in inner]

    def depth(self) -> int:
        """Return the number of tokens on the longest path, which is the number of positions that a model needs."""
        return int(_end_depths(self.lengths, self.parents).max())


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Packed rows of forests, as `pack_forests` returns them: R rows of S tokens.

    Args:
        input_ids: int64 [R, S], with `pad_token_id` after the last forest of a row.
        position_ids: int64 [R, S], depth of each token, 0 for padding.
        subtree_ends: int32 [R, S], the row where the subtree of each token's segment ends, 0 for padding.
        starts: int64 [forests], index in the flattened rows of each forest's first token.
        forests: the forests, in the order they were passed.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    subtree_ends: NDArray[np.int32]
    starts: NDArray[np.int64]
    forests: Sequence[Forest]

    def batch(self) -> dict[str, Tensor]:
        """Return the model's inputs.

        Returns:
            `input_ids` and `position_ids`, int64 [R, S], and `startend_row_indices`, int32 [R, 1, S, 1].
        """
        return {
            "input_ids": torch.from_numpy(self.input_ids),
            "position_ids": torch.from_numpy(self.position_ids),
            VECTORS: torch.from_numpy(self.subtree_ends)[:, None, :, None],
        }

    def paths(self, forest: int) -> list[Tensor]:
        """Return the indices in the flattened rows of the path to each leaf of a forest, int64 [depth] each."""
        packed = self.forests[forest]
        return [torch.from_numpy(self.starts[forest] + packed.path(leaf)) for leaf in packed.leaves()]

    def spread(self, values: Sequence[NDArray[np.int64]], filler: int) -> NDArray[np.int64]:
        """Lay out per-token values other than token ids, for example labels, in the packed rows.

        Args:
            values: one value per token of each forest, int64 [n] per forest.
            filler: the value of padding.

        Returns:
            int64 [R, S]: the value of each token at the token's place.

        Raises:
            ValueError: the values and the tokens are not one to one.
        """
        if len(values) != len(self.forests):
            raise ValueError(f"values has {len(values)} entries for {len(self.forests)} forests; give one for each")
        spread = np.full(self.input_ids.size, filler, dtype=np.int64)
        for index, (start, forest, own) in enumerate(zip(self.starts.tolist(), self.forests, values, strict=True)):
            if len(own) != len(forest.tokens):
                raise ValueError(
                    f"values[{index}] has {len(own)} entries, but forests[{index}] has {len(forest.tokens)} tokens; "
                    "they must be one to one"
                )
            spread[start : start + len(own)] = own
        return spread.reshape(self.input_ids.shape)


def pack_forests(
    forests: Sequence[Forest],
    max_length: int | None = None,
    *,
    pad_token_id: int = 0,
    pad_to_multiple_of: int | None = None,
    max_position_embeddings: int | None = None,
    names: Sequence[str] | None = None,
) -> PackedRows:
    """Pack forests into rows. A forest is never split.

    Args:
        forests: the forests to pack.
        max_length: None packs all forests into one row, in the order given. A number makes rows of exactly that many
            tokens, filled best-fit-decreasing and padded at the end.
        pad_token_id: token id of the padding. Nothing attends to padding, so any id of the vocabulary works.
        pad_to_multiple_of: pad the single row to a multiple of this. `max_length` must already be a multiple of it.
        max_position_embeddings: the model's number of positions; a deeper tree raises. None skips the check.
        names: names of the forests in error messages; None uses "forests[0]", "forests[1]" and so on.

    Returns:
        PackedRows: `batch()` returns the model's inputs, `paths(i)` the tokens on the path to each leaf of a forest.

    Raises:
        ValueError: an option is out of range, `forests` is empty, or a forest is longer than a row or deeper than the
            model's positions. The message names the forest and the way out.

    Example:
        >>> from flashmask_hf.collators import Forest, pack_forests
        >>> rows = pack_forests([Forest.from_trees(([1, 2, 3], [[4, 5], [6]])), Forest.from_trees([7, 8])])
        >>> rows.input_ids
        array([[1, 2, 3, 4, 5, 6, 7, 8]])
        >>> rows.position_ids
        array([[0, 1, 2, 3, 4, 3, 0, 1]])
        >>> rows.subtree_ends
        array([[6, 6, 6, 5, 5, 6, 8, 8]], dtype=int32)
        >>> [path.tolist() for path in rows.paths(0)]
        [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    """
    pad_token_id, max_length, pad_to_multiple_of, max_position_embeddings = as_row_options(
        pad_token_id, max_length, pad_to_multiple_of, max_position_embeddings
    )
    if not forests:
        raise ValueError("forests is empty: there is nothing to pack")
    sizes = [len(forest.tokens) for forest in forests]
    for index, (forest, size) in enumerate(zip(forests, sizes, strict=True)):
        name = f"forests[{index}]" if names is None else names[index]
        if max_length is not None and size > max_length:
            raise ValueError(
                f"{name} has {size} tokens, more than the {max_length} of a row; make rows longer, or shorten or "
                "remove it"
            )
        if max_position_embeddings is not None:
            check_depth(name, forest.depth(), max_position_embeddings)
    if max_length is None:
        members = [list(range(len(forests)))]
        multiple = pad_to_multiple_of or 1
        row_length = -(-sum(sizes) // multiple) * multiple
    else:
        members, row_length = best_fit_decreasing(sizes, max_length), max_length
    shape = (len(members), row_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    subtree_ends = np.empty(shape, dtype=np.int32)
    starts = np.empty(len(forests), dtype=np.int64)
    for row, chosen in enumerate(members):
        token, segment = 0, 0
        parents: list[NDArray[np.int64]] = []
        for index in chosen:
            forest = forests[index]
            input_ids[row, token : token + sizes[index]] = forest.tokens
            parents.append(np.where(forest.parents < 0, -1, forest.parents + segment))
            starts[index] = row * row_length + token
            token += sizes[index]
            segment += len(forest.lengths)
        lengths = np.concatenate([forests[index].lengths for index in chosen])
        position_ids[row], subtree_ends[row] = lay_out(lengths, row_length, np.concatenate(parents))
    return PackedRows(input_ids, position_ids, subtree_ends, starts, forests)


def lay_out(
    lengths: Sequence[int] | NDArray[np.int64],
    row_length: int,
    parents: Sequence[int] | NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Compute position ids and subtree ends of one row: segments one after another, then padding.

    Args:
        lengths: number of tokens of each segment, in depth-first order.
        row_length: number of tokens of the row, at least the sum of `lengths`.
        parents: index of each segment's parent, -1 for a root, in depth-first order; None makes each a root.

    Returns:
        position_ids, int64 [row_length]: depth of each token in its tree, 0 for padding.
        subtree_ends, int32 [row_length]: the row after the last token of the segment's subtree. Padding has 0, which
        hides it from every row. Padding attends to nothing either, since every tree ends before it.

    Raises:
        ValueError: a segment is empty, or the segments do not fit into the row.

    Example:
        >>> position_ids, subtree_ends = lay_out([3, 2], row_length=6)
        >>> position_ids.tolist(), subtree_ends.tolist()
        ([0, 1, 2, 0, 1, 0], [3, 3, 3, 5, 5, 0])
        >>> position_ids, subtree_ends = lay_out([2, 1, 2], row_length=5, parents=[-1, 0, 0])
        >>> position_ids.tolist(), subtree_ends.tolist()
        ([0, 1, 2, 2, 3], [5, 5, 3, 5, 5])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if ((sizes < 1) | (sizes > row_length)).any():
        raise ValueError(f"lengths must lie in 1..row_length = 1..{row_length}, got {sizes.tolist()}")
    ends = np.cumsum(sizes)
    real = int(ends[-1]) if sizes.size else 0
    if real > row_length:
        raise ValueError(f"lengths sum to {real}, which is more than row_length {row_length}")
    parent_of = np.full(len(sizes), -1, dtype=np.int64) if parents is None else np.asarray(parents, dtype=np.int64)
    start_depths = _end_depths(sizes, parent_of) - sizes
    subtree_end = ends.copy()  # of each segment
    for segment in np.flatnonzero(parent_of >= 0)[::-1].tolist():
        subtree_end[parent_of[segment]] = max(subtree_end[parent_of[segment]], subtree_end[segment])
    position_ids = np.zeros(row_length, dtype=np.int64)
    subtree_ends = np.zeros(row_length, dtype=np.int32)
    position_ids[:real] = np.arange(real) - np.repeat(ends - sizes - start_depths, sizes)
    subtree_ends[:real] = np.repeat(subtree_end, sizes)
    return position_ids, subtree_ends


def _end_depths(lengths: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of tokens on the path from the root through the end of each segment, int64 [segments]."""
    depths = lengths.copy()
    for segment in np.flatnonzero(parents >= 0).tolist():
        depths[segment] += depths[parents[segment]]
    return depths


def packed_inputs(rows: PackedRows, index: Tensor) -> dict[str, Tensor]:
    """Return the batch keys of packed rows that accompany a batch of one sequence per answer.

    The backbone runs the packed rows, and its hidden states are gathered back into the sequences.

    Args:
        rows: the packed rows, [R, S].
        index: int64 [N, L], the index in the flattened rows of each token of the N sequences. Entries that nothing
            reads, such as padding, may be any valid index. They should differ: the backward of the gather adds the
            gradients of equal entries one after another, zeros included.

    Returns:
        `packed_input_ids` and `packed_position_ids`, int64 [R, S]; `startend_row_indices`, int32 [R, 1, S, 1]; and
        `packed_index`, int64 [N, L].
    """
    batch = rows.batch()
    return {
        PACKED_IDS: batch["input_ids"],
        PACKED_POSITIONS: batch["position_ids"],
        VECTORS: batch[VECTORS],
        PACKED_INDEX: index,
    }


def first_equals(answers: Sequence[NDArray[np.int64]]) -> list[int]:
    """Return, for each of N answers, the index of the first one with the same tokens.

    Equal answers stand at different places of a packed row, where rounding makes their results differ. Reading the
    results of the first for all of them makes them equal to the bit, as they are with a sequence of its own for each.
    """
    found: dict[bytes, int] = {}
    return [found.setdefault(answer.tobytes(), nth) for nth, answer in enumerate(answers)]
