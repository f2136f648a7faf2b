"""Prefix language models: a bidirectional prefix and a causal rest, alone or in packed documents."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashmask_hf._numbers import as_integer, as_length
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, batch_integers, batch_rows, device_of, from_array, key_count
from flashmask_hf.masks.documents import blocks


def prefix_lm_causal(
    kv_len: int, prefix: int | Sequence[int] | Tensor, *, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """The prefix sees itself in both directions, the rest is causal (section 2.1).

    `prefix_lm_causal(4, 2)`:

        1 1 . .
        1 1 . .
        1 1 1 .
        1 1 1 1

    Args:
        prefix: length of the prefix, 0..kv_len; a list, or an int tensor or array [B], for a batch.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        ValueError: a prefix lies outside 0..kv_len.

    Example:
        >>> prefix_lm_causal(4, 2).indices[0, 0].T
        tensor([[4, 4, 4, 4],
                [0, 0, 2, 3]], dtype=torch.int32)
    """
    kv_len = as_length("kv_len", kv_len)
    prefix = from_array(prefix)
    if isinstance(prefix, (Tensor, list, tuple)):
        prefixes = batch_integers("prefix", prefix, kv_len)
    else:
        prefixes = [as_integer("prefix", prefix, 0, kv_len)]
    return prefix_lm_document(
        [[(length, kv_len)] for length in prefixes], q_len=q_len, device=device_of(device, prefix)
    )


def prefix_lm_document(
    documents: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Packed documents, each a prefix seen in both directions and a causal rest (section 2.1).

    `prefix_lm_document([(2, 3), (1, 2)])`:

        1 1 . . .
        1 1 . . .
        1 1 1 . .
        . . . 1 .
        . . . 1 1

    Args:
        documents: tuples (prefix length, total length).

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a document is not such a tuple.
        ValueError: a prefix is longer than its document.

    Example:
        >>> prefix_lm_document([(2, 3), (1, 2)]).indices[0, 0].T
        tensor([[3, 3, 3, 5, 5],
                [0, 0, 2, 3, 4]], dtype=torch.int32)
    """
    lengths: list[list[int]] = []
    spans: list[list[tuple[int, int]]] = []
    for path, row in batch_rows("documents", documents, list):
        lengths.append([])
        spans.append([])
        start = 0
        for k, entry in enumerate(row):
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise TypeError(f"{path}[{k}] must be a tuple (prefix length, total length), got {entry!r}")
            total = as_integer(f"{path}[{k}][1]", entry[1], 1, why="a document has at least one token")
            prefix = as_integer(f"{path}[{k}][0]", entry[0], 0, total, why="the prefix is part of the total length")
            lengths[-1].append(total)
            spans[-1] += [(start, start + prefix)] if prefix else []
            start += total
    key_count("documents", lengths, kv_len)
    return blocks(lengths, spans, kv_len=kv_len, q_len=q_len, device=device)
