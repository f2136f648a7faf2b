"""Sequences of a batch packed into rows in which what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmask_hf.collators.forest import Leaf
from flashmask_hf.collators.packing import PackedRows, pack_forests
from flashmask_hf.collators.prefixes import share_prefixes, share_prompts


def pack_sequences(
    ids: NDArray[np.int64],
    real: NDArray[np.bool_],
    starts: NDArray[np.bool_] | None = None,
    *,
    prompt_lengths: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
    **options: Any,
) -> tuple[PackedRows, NDArray[np.int64], list[Leaf]]:
    """Pack the sequences of a batch into rows that hold shared tokens once.

    Args:
        ids: int64 [N, L].
        real: bool [N, L], False for padding, which may lie anywhere.
        starts: bool [N, L], the first token of each sequence; None if every row is a sequence.
        prompt_lengths: number of tokens of each sequence's prompt, to share whole prompts only; None shares every
            common prefix.
        kinds: a number for each sequence; sequences of different kinds share nothing.
        **options: as in `pack_forests`.

    Returns:
        The rows; the index in the flattened rows of each token, int64 [N, L]; and the leaf of each sequence.
    """
    ends = np.cumsum(real.sum(1)) if starts is None else np.append(np.flatnonzero(starts[real])[1:], real.sum())
    sequences = np.split(ids[real].astype(np.int64), ends[:-1])
    if prompt_lengths is None:
        forests, leaves = share_prefixes(sequences, kinds)
    else:
        forests, leaves = share_prompts(sequences, prompt_lengths, kinds)
    rows = pack_forests(forests, **options)
    return rows, rows.place(leaves, real), leaves
