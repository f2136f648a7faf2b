"""Masks of documents in a packed row, of in-context examples, and of padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer, check_bool
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import (
    Device,
    Lengths,
    batch_integers,
    batch_lengths,
    batch_rows,
    device_of,
    key_count,
)
from flashmask_hf.masks._columns import document_spans, key_positions, make_mask, per_token


def causal_document(
    documents: Lengths, *, kv_len: int | None = None, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Packed documents, each causal within itself (section 2.1).

    `causal_document([3, 2])`:

        1 . . . .
        1 1 . . .
        1 1 1 . .
        . . . 1 .
        . . . 1 1

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Example:
        >>> causal_document([3, 2], kv_len=6).indices.flatten()
        tensor([3, 3, 3, 5, 5, 0], dtype=torch.int32)
    """
    _, end = document_spans(*batch_lengths("documents", documents, kv_len))
    return make_mask(end, causal=True, q_len=q_len, device=device_of(device, documents))


def document(
    documents: Lengths, *, kv_len: int | None = None, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Packed documents, each bidirectional within itself (section 2.1).

    `document([3, 2])`:

        1 1 1 . .
        1 1 1 . .
        1 1 1 . .
        . . . 1 1
        . . . 1 1

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Example:
        >>> document([3, 2]).indices[0, 0].T
        tensor([[3, 3, 3, 5, 5],
                [0, 0, 0, 3, 3]], dtype=torch.int32)
    """
    start, end = document_spans(*batch_lengths("documents", documents, kv_len))
    return make_mask(end, start, causal=False, q_len=q_len, device=device_of(device, documents))


def blocks(
    lengths: Lengths,
    spans: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Packed causal documents whose spans see themselves whole, as images do in Gemma 3.

    `blocks([4, 2], [(1, 3), (4, 6)])`:

        1 . . . . .
        1 1 1 . . .
        1 1 1 . . .
        1 1 1 1 . .
        . . . . 1 1
        . . . . 1 1

    Args:
        lengths: as `documents`.
        spans: tuples (start, end) of positions in the packed row, end exclusive, in order; a list of lists for a batch.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a span is not such a tuple.
        ValueError: a span is empty, overlaps the one before, or is not within one document; or spans are for other rows
            than `lengths`.

    Example:
        >>> blocks([4, 2], [(1, 3), (4, 6)]).indices[0, 0].T
        tensor([[4, 4, 4, 4, 6, 6],
                [0, 1, 1, 3, 4, 4]], dtype=torch.int32)
    """
    rows, kv_len = batch_lengths("lengths", lengths, kv_len)
    batch = batch_rows("spans", spans, list, empty=True)
    if len(batch) != len(rows):
        raise ValueError(f"spans has {len(batch)} rows, but lengths has {len(rows)}; give a list of spans per row")
    parts = [_parts(path, row, documents) for (path, row), documents in zip(batch, rows, strict=True)]
    first = per_token([first for _, first in parts], [length for length, _ in parts], kv_len, padding=kv_len)
    _, end = document_spans(rows, kv_len)
    first = torch.minimum(first, key_positions(kv_len))
    return make_mask(end, first, causal=False, q_len=q_len, device=device_of(device, lengths))


def causal_blockwise(
    block_lengths: Lengths, *, kv_len: int | None = None, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """In-context learning: each block sees itself, the last block sees all of them, causally (section 2.1).

    `causal_blockwise([2, 2, 2])`:

        1 . . . . .
        1 1 . . . .
        . . 1 . . .
        . . 1 1 . .
        1 1 1 1 1 .
        1 1 1 1 1 1

    Leave padding out of the loss: it sees what the last block sees.

    Args:
        block_lengths: as `documents`; the last block is the test example.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], causal.

    Raises:
        ValueError: a block is empty.

    Example:
        >>> causal_blockwise([2, 2, 2]).indices[0, 0].T
        tensor([[2, 2, 4, 4, 4, 4],
                [4, 4, 4, 4, 4, 4]], dtype=torch.int32)
    """
    lengths, kv_len = batch_lengths("block_lengths", block_lengths, kv_len)
    _, end = document_spans(lengths, kv_len)
    last = [[sum(row[:-1])] * len(row) for row in lengths]
    test_start = per_token(last, lengths, kv_len, padding=kv_len)
    end = torch.minimum(end, test_start)
    return make_mask(end, test_start, causal=True, q_len=q_len, device=device_of(device, block_lengths))


def padding(
    lengths: Sequence[int] | Tensor,
    *,
    kv_len: int | None = None,
    side: Literal["right", "left"] = "right",
    causal: bool = True,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """A padded batch: padding keys are hidden, and padding queries see nothing, on either side.

    `padding([2], kv_len=4)`:

        1 . . .
        1 1 . .
        . . . .
        . . . .

    `padding([2], kv_len=4, side="left")`:

        . . . .
        . . . .
        . . 1 .
        . . 1 1

    Args:
        lengths: real tokens per row, 0..kv_len; a list, or an int tensor or array [B].
        side: where the padding is.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal; or [B, 1, kv_len, 2], not causal.

    Raises:
        ValueError: a length lies outside 0..kv_len, or `side` is neither "right" nor "left".

    Example:
        >>> padding([5, 3]).indices[:, 0, :, 0]
        tensor([[5, 5, 5, 5, 5],
                [3, 3, 3, 0, 0]], dtype=torch.int32)
    """
    if side not in ("right", "left"):
        raise ValueError(f'side must be "right" or "left", got {side!r}')
    check_bool("causal", causal)
    real = batch_integers("lengths", lengths)
    kv_len = key_count("lengths", [[length] for length in real], kv_len)
    key, count = key_positions(kv_len), torch.tensor(real, dtype=torch.int64, device="cpu").view(-1, 1, 1)
    first = torch.zeros_like(count) if side == "right" else kv_len - count
    is_padding = (key < first) | (key >= first + count)
    end = (first + count).expand_as(is_padding).masked_fill(is_padding, 0)
    columns = [end] if causal else [end, first.expand_as(end)]
    return make_mask(*columns, causal=causal, q_len=q_len, device=device_of(device, lengths))


def _parts(path: str, spans: Sequence[Any], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Split a packed row at its spans: the length of each part, and the first row that sees it whole, if any."""
    ends = list(accumulate(lengths))
    parts: list[int] = []
    first: list[int] = []
    position = document = 0
    for k, span in enumerate(spans):
        if not isinstance(span, tuple) or len(span) != 2:
            raise TypeError(f"{path}[{k}] must be a tuple (start, end), got {span!r}")
        why = "spans are in the order of the row and do not overlap"
        start = as_integer(f"{path}[{k}][0]", span[0], position, why=why)
        while document < len(ends) and ends[document] <= start:
            document += 1
        if document == len(ends):
            raise ValueError(f"{path}[{k}] must lie in a document, got {span}; the last document ends at {ends[-1]}")
        why = "a span ends after its start, within its document"
        end = as_integer(f"{path}[{k}][1]", span[1], start + 1, ends[document], why=why)
        parts += [start - position, end - start]
        first += [ends[-1], start]
        position = end
    return [*parts, ends[-1] - position], [*first, ends[-1]]
