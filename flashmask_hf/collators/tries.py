"""Rows with weights of labels, of examples that may share prefixes: then each token is computed once.

The `input_ids` of such a row are segments, then a list of each segment's parent, -1 for a root, then an empty list. So
collators of documents raise: -1 is no token id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.collators.columns import as_integers
from flashmask_hf.collators.documents import is_packed
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.prefixes import cut_tries, share_prefixes
from flashmask_hf.collators.trees import learn_once
from flashmask_hf.names import IGNORED, LABEL_WEIGHTS

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_COLUMNS = ("input_ids", LABEL_WEIGHTS, "seq_lengths", "example_lengths")

_EDGES = [int(16 * 1.5**power) for power in range(28)]
"""Lengths of the prefixes by which a dataset is sorted, up to a million tokens."""


def order_by_prefixes(dataset: Dataset, num_proc: int | None) -> NDArray[np.int64]:
    """Return an order of a dataset in which examples with equal prefixes are neighbours, int64 [examples].

    Examples are grouped by hashes of growing prefixes, in the order of each group's first example.
    """
    options: dict[str, Any] = {"batched": True, "num_proc": num_proc, "desc": "Sorting by prefixes"}
    columns = dataset.select_columns("input_ids").with_format("arrow")
    hashed: Any = columns.map(_hash_prefixes, remove_columns=["input_ids"], **options)
    chunks = hashed.with_format("arrow")[:]["hashes"].chunks  # of a file, which memory need not hold
    return _order([chunk.flatten().to_numpy().reshape(len(chunk), len(_EDGES)) for chunk in chunks])


def _order(chunks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the order of examples by their hashes, int64 [examples, edges] in chunks, in memory for one edge."""
    ranks = np.zeros(sum(map(len, chunks)), dtype=np.int64)
    for level in range(len(_EDGES)):
        column = np.concatenate([chunk[:, level] for chunk in chunks])
        if not column.any():  # all examples are shorter
            break
        _, firsts, groups = np.unique(column, return_index=True, return_inverse=True)
        _, ranks = np.unique(ranks * len(ranks) + firsts[groups], return_inverse=True)
    return np.argsort(ranks, kind="stable")


def _hash_prefixes(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    hashes = np.zeros((len(table), len(_EDGES)), dtype=np.int64)  # 0: the example is shorter
    for own, cell in zip(hashes, table["input_ids"], strict=True):
        values, state, start = getattr(cell, "values", None), blake2b(digest_size=8), 0
        if values is None or not pa.types.is_integer(values.type):
            continue  # packing raises for it, and names the example
        tokens = values.to_numpy(zero_copy_only=False)
        for level, end in enumerate(_EDGES):
            if end > len(tokens):
                break
            state.update(tokens[start:end].tobytes())
            own[level], start = np.frombuffer(state.digest(), np.int64)[0], end
    return pa.table({"hashes": pa.FixedSizeListArray.from_arrays(hashes.ravel(), len(_EDGES))})


def learned_tokens(example: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.bool_]:
    """Return which tokens an example with `input_ids`, and maybe `labels`, learns, [n]; without labels, all of them.

    Raises a ValueError for a label other than its token: examples that share a token share its label.
    """
    labels = example.get("labels", example["input_ids"])
    learned = labels != IGNORED
    other = np.flatnonzero(learned & (labels != example["input_ids"]))
    if other.size:
        problem = f"label {other[0]} of {name} is neither its token nor {IGNORED}"
        raise ValueError(f"{problem}, which weights and share_prefixes need; correct it, or leave these out")
    return learned


def pack_shared_rows(
    sequences: Sequence[NDArray[Any]], weights: Sequence[NDArray[Any]], row_length: int, *, share: bool = True
) -> dict[str, list[list[Any]]]:
    """Pack sequences into rows of tries, or, without `share`, of sequences.

    Sequences whose weights of one token have unlike signs do not share it: a sum would lose their absolute values.

    Sequences are integers, [n] each with n in 1..row_length, and weights what the label at each token counts, [n].
    Returns `input_ids`, `label_weights`, `seq_lengths` and, with `share`, `example_lengths` of each row, as
    `pack_dataset` describes them, without the empty lists.
    """
    trees: list[tuple[Forest, NDArray[np.float32], list[int]]] = []
    groups = cut_tries(sequences, row_length) if share else [[index] for index in range(len(sequences))]
    groups.reverse()
    while groups:
        group = groups.pop()
        (trie,), leaves = share_prefixes([sequences[index] for index in group])
        sums, sizes = np.zeros((2, len(trie.tokens)))
        for index, (_, segment) in zip(group, leaves, strict=True):
            path = trie.path(segment)[1:]
            sums[path] += weights[index][1:]
            sizes[path] += np.abs(weights[index][1:])
        if (np.abs(sums) != sizes).any():
            negative = [index for index in group if weights[index].min() < 0]
            others = [index for index in group if index not in negative]
            groups += [negative, others] if others else [[index] for index in negative]
            continue
        tree, places = learn_once(trie)
        learned = np.where(places < 0, 0, sums[places]).astype(np.float32)
        trees.append((tree, learned, [len(sequences[index]) for index in group]))
    names = _COLUMNS if share else _COLUMNS[:-1]
    packed: dict[str, list[list[Any]]] = {name: [] for name in _COLUMNS}
    for chosen in best_fit_decreasing([len(tree.tokens) for tree, _, _ in trees], row_length):
        own, learned, lengths = zip(*(trees[index] for index in chosen), strict=True)
        row = Forest.join(own)
        edges = np.cumsum(row.lengths)[:-1]
        columns = ([*np.split(row.tokens, edges), row.parents], np.split(np.concatenate(learned), edges))
        for name, values in zip(_COLUMNS, (*columns, row.lengths.tolist(), [*chain(*lengths)]), strict=True):
            packed[name].append(values)
    return {name: packed[name] for name in names}


def shares_prefixes(values: Any) -> bool:
    """Return whether `input_ids` are of a row of `pack_shared_rows`."""
    if not is_packed(values) or len(values) < 3 or not hasattr(values[-2], "__len__"):
        return False
    return len(values[-2]) > 0 and values[-2][0] == -1


def read_shared_row(example: Mapping[str, Any], name: str) -> tuple[Forest, NDArray[np.float32]]:
    """Return the forest of a row that `shares_prefixes`, and the weight of each token's label, float32 [n].

    Raises a ValueError if the row has no `label_weights`, or they do not fit.
    """
    *segments, parents = (as_integers(part, f"input_ids of {name}") for part in example["input_ids"][:-1])
    if example.get(LABEL_WEIGHTS) is None:
        problem = f"{name} has no {LABEL_WEIGHTS}, which a trainer may have removed"
        raise ValueError(
            f"{problem}; use PackedSFTTrainer, or pack without the column weight, loss_mean and share_prefixes"
        )
    weights = [np.asarray(part, dtype=np.float32) for part in example[LABEL_WEIGHTS][:-1]]
    if [len(own) for own in weights] != [len(own) for own in segments]:
        raise ValueError(f"{LABEL_WEIGHTS} of {name} must have the layout of its input_ids; do not cut packed rows")
    return Forest.from_segments(segments, parents.tolist()), np.concatenate(weights)
