"""The gallery: one constructor per mask family (FlashMask, ICLR 2025, section 2.1).

Every function returns a `FlashMask` with `q_len` set. What holds for all of them:

* Rows are queries, columns are keys. In the drawings `1` is visible, `.` hidden, the first line is query 0.
* Lengths, windows and positions count tokens. A list of lengths is one row of tokens; a list of such lists is a batch.
  A mask of one row has B = 1 and serves every entry of a batch.
* Batched rows of different length are filled up at the end, to the longest or to `kv_len`. Filler sees nothing and is
  seen by nothing (`causal_blockwise` says what it can do instead).
* With `q_len` < `kv_len` the queries are the last `q_len` positions, as with a key-value cache: query row i stands at
  position i + kv_len - q_len. The drawing loses its top rows, nothing else changes.
* Masks given by Python numbers are built on the CPU and moved to `device` once; masks given by tensors live on the
  tensor's device unless `device` says otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from flashmask_hf.mask import FlashMask, is_one_of

__all__ = [
    "Node",
    "causal",
    "causal_blockwise",
    "causal_document",
    "document",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "padding",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "random_eviction",
    "share_question",
    "sliding_window",
    "tree",
]

Lengths: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
Device: TypeAlias = torch.device | str | None
Node: TypeAlias = "int | tuple[int, Sequence[Node]]"
"""A node of `tree`: its own length in tokens, or (length, [children])."""


def full(kv_len: int, *, q_len: int | None = None, device: Device = None) -> FlashMask:
    """Every query sees every key (section 2.1).

    `full(4)`:

        1 1 1 1
        1 1 1 1
        1 1 1 1
        1 1 1 1

    Args:
        kv_len: number of keys.
        q_len: number of queries, any; None means kv_len.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [1, 1, kv_len, 2], not causal.

    Raises:
        TypeError: `kv_len` or `q_len` is not an int.
        ValueError: `kv_len` or `q_len` is less than 1.

    Example:
        >>> from flashmask_hf import masks
        >>> bool(masks.full(4, q_len=6).to_dense().all())
        True
    """
    kv_len = _integer("kv_len", kv_len, 1)
    q_len = _query_count(q_len, kv_len, may_exceed=True)
    none = torch.zeros(1, 1, kv_len, dtype=torch.int64, device="cpu")
    return _mask(none + kv_len, none + (kv_len - q_len), causal=False, q_len=q_len, device=device)


def causal(kv_len: int, *, q_len: int | None = None, device: Device = None) -> FlashMask:
    """Every query sees the keys up to its own position (section 2.1).

    `causal(4)`:

        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1

    Args:
        kv_len: number of keys.
        q_len: number of queries; None means kv_len. With more queries than keys the first q_len - kv_len see nothing.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [1, 1, kv_len, 1], causal.

    Raises:
        TypeError: `kv_len` or `q_len` is not an int.
        ValueError: `kv_len` or `q_len` is less than 1.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.causal(4, q_len=2).to_dense().int()[0, 0]
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    kv_len = _integer("kv_len", kv_len, 1)
    q_len = _query_count(q_len, kv_len, may_exceed=True)
    never = torch.full((1, 1, kv_len), kv_len, dtype=torch.int64, device="cpu")
    return _mask(never, causal=True, q_len=q_len, device=device)


def sliding_window(
    kv_len: int, window: int, *, causal: bool = True, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Every query sees the `window` nearest keys up to its own position (section 2.1).

    `sliding_window(5, 2)`:

        1 . . . .
        1 1 . . .
        . 1 1 . .
        . . 1 1 .
        . . . 1 1

    `sliding_window(5, 2, causal=False)`:

        1 1 . . .
        1 1 1 . .
        . 1 1 1 .
        . . 1 1 1
        . . . 1 1

    Args:
        kv_len: number of keys.
        window: in tokens, the own position counted. Query i sees the keys i - window + 1 to i, as with
            `sliding_window` in transformers; with causal=False those with |i - j| < window.
        causal: whether later keys are hidden.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [1, 1, kv_len, 1], causal; or [1, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: `window` is less than 1, or `q_len` does not lie in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.sliding_window(5, 2).indices.flatten()
        tensor([2, 3, 4, 5, 5], dtype=torch.int32)
    """
    kv_len = _integer("kv_len", kv_len, 1)
    window = _integer("window", window, 1, why="a query sees at least its own position")
    q_len = _query_count(q_len, kv_len)
    key = _positions(kv_len)
    if causal:
        return _mask(key + window, causal=True, q_len=q_len, device=device)
    return _mask(key + window, key - window + 1, causal=False, q_len=q_len, device=device)


def causal_document(
    documents: Lengths, *, kv_len: int | None = None, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Packed documents, each causal within itself (section 2.1).

    `causal_document([3, 2, 1])`:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        . . . 1 . .
        . . . 1 1 .
        . . . . . 1

    Args:
        documents: lengths in tokens; a list for one row, a list of lists for a batch, or an int tensor: [documents], or
            [B, documents], whose rows may end in zeros for no document.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `documents`, or the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: a document of less than one token, a row longer than `kv_len`, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.causal_document([[3, 2, 1], [2, 2]]).indices[..., 0]
        tensor([[[3, 3, 3, 5, 5, 6]],
        <BLANKLINE>
                [[2, 2, 4, 4, 0, 0]]], dtype=torch.int32)
    """
    lengths = _lengths("documents", documents)
    kv_len = _row_length("documents", lengths, kv_len)
    _, end = _spans(lengths, kv_len)
    return _mask(end, causal=True, q_len=_query_count(q_len, kv_len), device=_place(device, documents))


def document(
    documents: Lengths, *, kv_len: int | None = None, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Packed documents, each bidirectional within itself (section 2.1).

    `document([3, 2, 1])`:

        1 1 1 . . .
        1 1 1 . . .
        1 1 1 . . .
        . . . 1 1 .
        . . . 1 1 .
        . . . . . 1

    Args:
        documents: lengths in tokens; a list for one row, a list of lists for a batch, or an int tensor: [documents], or
            [B, documents], whose rows may end in zeros for no document.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `documents`, or the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: a document of less than one token, a row longer than `kv_len`, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.document([3, 2, 1]).indices[0, 0].T
        tensor([[3, 3, 3, 5, 5, 6],
                [0, 0, 0, 3, 3, 5]], dtype=torch.int32)
    """
    lengths = _lengths("documents", documents)
    kv_len = _row_length("documents", lengths, kv_len)
    start, end = _spans(lengths, kv_len)
    return _mask(end, start, causal=False, q_len=_query_count(q_len, kv_len), device=_place(device, documents))


def share_question(
    documents: Sequence[tuple[int, Sequence[int]]] | Sequence[Sequence[tuple[int, Sequence[int]]]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Answers share their question: each sees the question and itself causally, no other answer (section 2.1).

    The mask of packed DPO and reward rows: `tree` with one level of children.

    `share_question([(2, [2, 1]), (1, [1])])`:

        1 . . . . . .
        1 1 . . . . .
        1 1 1 . . . .
        1 1 1 1 . . .
        1 1 . . 1 . .
        . . . . . 1 .
        . . . . . 1 1

    Args:
        documents: (question length, [answer lengths]) in tokens, in the order of the row; a list of tuples for one row,
            a list of such lists for a batch.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Raises:
        TypeError: a document is not such a tuple.
        ValueError: a document without answers, a question or an answer of less than one token, a row longer than
            `kv_len`, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.share_question([(2, [2, 1]), (1, [1])]).indices.flatten()  # where each node's subtree ends
        tensor([5, 5, 4, 4, 5, 7, 7], dtype=torch.int32)
    """
    for path, row in _rows("documents", documents, list):
        for k, entry in enumerate(row):
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], (list, tuple)):
                raise TypeError(f"{path}[{k}] must be a tuple (question length, [answer lengths]), got {entry!r}")
            if not entry[1]:
                raise ValueError(f"{path}[{k}] has no answer; give at least one, or use tree() for a lone document")
            for a, answer in enumerate(entry[1]):
                if isinstance(answer, tuple):
                    raise TypeError(f"{path}[{k}][1][{a}] has children; a deeper tree is built by tree()")
    return tree(documents, kv_len=kv_len, q_len=q_len, device=device)


def global_sliding_window(
    kv_len: int,
    n_global: int,
    window: int,
    *,
    causal: bool = False,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """The first tokens see and are seen by all, the others keep to a window (section 2.1 and figure 1(b)(6)).

    `global_sliding_window(6, 1, 2)`:

        1 1 1 1 1 1
        1 1 1 . . .
        1 1 1 1 . .
        1 . 1 1 1 .
        1 . . 1 1 1
        1 . . . 1 1

    `global_sliding_window(6, 1, 2, causal=True)`, the "attention sink" of streaming decoders:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 . 1 1 . .
        1 . . 1 1 .
        1 . . . 1 1

    Args:
        kv_len: number of keys.
        n_global: number of global tokens, 0..kv_len, at the start.
        window: in tokens, the own position counted, as in `sliding_window`: the others see |i - j| < window.
        causal: whether later keys are hidden, from global tokens too.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [1, 1, kv_len, 4], not causal ([1, 1, kv_len, 2] if no query is global); or
        [1, 1, kv_len, 1], causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: `n_global` does not lie in 0..kv_len, `window` is less than 1, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.global_sliding_window(6, 1, 2, causal=True).indices.flatten()
        tensor([6, 3, 4, 5, 6, 6], dtype=torch.int32)
    """
    kv_len = _integer("kv_len", kv_len, 1)
    n_global = _integer("n_global", n_global, 0, kv_len)
    window = _integer("window", window, 1, why="a query sees at least its own position")
    q_len = _query_count(q_len, kv_len)
    key = _positions(kv_len)
    lower = torch.where(key < n_global, kv_len, key + window)
    if causal:
        return _mask(lower, causal=True, q_len=q_len, device=device)
    upper = (key - window + 1).clamp(min=n_global)  # the rows n_global..upper lie too far above the key
    if n_global <= kv_len - q_len:
        return _mask(lower, upper, causal=False, q_len=q_len, device=device)
    end, start = torch.full_like(key, kv_len), torch.full_like(key, n_global)
    return _mask(lower, end, start, upper, causal=False, q_len=q_len, device=device)


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

    Filler at the end of a row is seen by nothing, but its queries see what the last block sees: hiding those rows too
    would take a second interval. Leave them out of the loss, as ever.

    Args:
        block_lengths: lengths in tokens, the last one being the test example; a list for one row, a list of lists for a
            batch, or an int tensor: [blocks], or [B, blocks], whose rows may end in zeros for no block.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `block_lengths`, or the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: a block of less than one token, a row longer than `kv_len`, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.causal_blockwise([2, 2, 2]).indices[0, 0].T
        tensor([[2, 2, 4, 4, 4, 4],
                [4, 4, 4, 4, 4, 4]], dtype=torch.int32)
    """
    lengths = _lengths("block_lengths", block_lengths)
    kv_len = _row_length("block_lengths", lengths, kv_len)
    _, end = _spans(lengths, kv_len)
    last = [[sum(row[:-1])] * len(row) for row in lengths]
    test_start = _spread(last, lengths, kv_len, filler=kv_len)
    return _mask(
        torch.minimum(end, test_start),
        test_start,
        causal=True,
        q_len=_query_count(q_len, kv_len),
        device=_place(device, block_lengths),
    )


def prefix_lm_causal(
    kv_len: int, prefix: int | Sequence[int] | Tensor, *, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """The prefix sees itself in both directions, the rest is causal (section 2.1).

    `prefix_lm_causal(5, 3)`:

        1 1 1 . .
        1 1 1 . .
        1 1 1 . .
        1 1 1 1 .
        1 1 1 1 1

    Args:
        kv_len: number of keys.
        prefix: length of the prefix in tokens, 0..kv_len; a list or an int tensor [B] for a batch.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `prefix`, or the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: a prefix does not lie in 0..kv_len, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.prefix_lm_causal(5, 3).indices[0, 0].T
        tensor([[5, 5, 5, 5, 5],
                [0, 0, 0, 3, 4]], dtype=torch.int32)
    """
    kv_len = _integer("kv_len", kv_len, 1)
    if isinstance(prefix, (Tensor, list, tuple)):
        prefixes = _vector("prefix", prefix, kv_len)
    else:
        prefixes = [_integer("prefix", prefix, 0, kv_len)]
    key = _positions(kv_len)
    first = torch.where(key < _column(prefixes), 0, key)
    return _mask(
        torch.full_like(first, kv_len),
        first,
        causal=False,
        q_len=_query_count(q_len, kv_len),
        device=_place(device, prefix),
    )


def prefix_lm_document(
    documents: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Packed documents, each a prefix seen in both directions and a causal rest (section 2.1).

    `prefix_lm_document([(2, 4), (1, 2)])`:

        1 1 . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 1 1 . .
        . . . . 1 .
        . . . . 1 1

    Args:
        documents: (prefix length, total length) in tokens, the prefix 0..total; a list of tuples for one row, a list of
            such lists for a batch.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a document is not such a tuple.
        ValueError: a document of less than one token, a prefix longer than its document, a row longer than `kv_len`, or
            `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.prefix_lm_document([(2, 4), (1, 2)]).indices[0, 0].T
        tensor([[4, 4, 4, 4, 6, 6],
                [0, 0, 2, 3, 4, 5]], dtype=torch.int32)
    """
    lengths: list[list[int]] = []
    prefix_ends: list[list[int]] = []
    for path, row in _rows("documents", documents, list):
        lengths.append([])
        prefix_ends.append([])
        begin = 0
        for k, entry in enumerate(row):
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise TypeError(f"{path}[{k}] must be a tuple (prefix length, total length), got {entry!r}")
            total = _integer(f"{path}[{k}][1]", entry[1], 1, why="a document has at least one token")
            prefix = _integer(f"{path}[{k}][0]", entry[0], 0, total, why="the prefix is part of the total length")
            lengths[-1].append(total)
            prefix_ends[-1].append(begin + prefix)
            begin += total
    kv_len = _row_length("documents", lengths, kv_len)
    start, end = _spans(lengths, kv_len)
    prefix_end = _spread(prefix_ends, lengths, kv_len, filler=kv_len)
    key = _positions(kv_len)
    first = torch.where(key < prefix_end, start, key)
    return _mask(end, first, causal=False, q_len=_query_count(q_len, kv_len), device=device)


def qk_sparse(q_keep: Tensor, k_keep: Tensor, *, mask: FlashMask | None = None, device: Device = None) -> FlashMask:
    """Causal attention between the queries and keys that each head keeps (section 2.1; Pagliardini et al. 2023, 3.1).

    The mask is for rows and columns sorted stably, kept ones first: `(~q_keep).byte().argsort(dim=-1, stable=True)`,
    and likewise for keys and values. In that order the rows that a kept key hides are two intervals: the kept queries
    that stood before it, and all the dropped ones. Dropped queries see nothing, dropped keys are seen by nothing.

    Original order, query 1 and key 2 dropped, and what `qk_sparse` returns for it:

        1 . . .        1 . . .
        . . . .        1 1 . .
        1 1 . .        1 1 1 .
        1 1 . 1        . . . .

    Args:
        q_keep: bool [B, H, Sq], True where the head keeps the query.
        k_keep: bool [B, Hkv, Skv], H a multiple of Hkv: query head h reads key head h * Hkv // H. Query row i stands at
            position i + Skv - Sq.
        mask: what else hides, in the original order: causal with n = 1 column, of batch 1 or B and heads 1, Hkv or H,
            as packed documents, trees, padding and windows have it. None is nothing.
        device: where the mask lives; None is the device of `q_keep`.

    Returns:
        FlashMask: indices [B, H, Skv, 2], not causal, q_len = Sq.

    Raises:
        TypeError: an argument is not a bool tensor, or `mask` no FlashMask.
        ValueError: the shapes or devices do not fit each other, or `mask` is of another form.

    Example:
        >>> import torch
        >>> from flashmask_hf import masks
        >>> q_keep = torch.tensor([[[True, False, True, True]]])
        >>> k_keep = torch.tensor([[[True, True, False, True]]])
        >>> masks.qk_sparse(q_keep, k_keep).to_dense().int()[0, 0]
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 0, 0, 0]], dtype=torch.int32)
    """
    check_paired("q_keep", q_keep, "k_keep", k_keep, {torch.bool})
    hidden_from = None if mask is None else hidden_from_of(mask, q_keep, k_keep)
    if mask is not None:
        mask.validate(q_keep.shape[-1])
    # Two buckets, of which the second, the dropped, sees nothing.
    columns, _, _ = sorted_columns((~q_keep).byte(), (~k_keep).byte(), hidden_from, dropped=1)
    return FlashMask(columns.to(device or q_keep.device), causal=False, q_len=q_keep.shape[-1])


def hash_sparse(
    q_bucket: Tensor,
    k_bucket: Tensor,
    *,
    exclude_self: bool = False,
    mask: FlashMask | None = None,
    device: Device = None,
) -> FlashMask:
    """Causal attention between queries and keys of the same bucket (section 2.1; Pagliardini et al. 2023, 3.2).

    The mask is for rows and columns sorted stably by bucket: `q_bucket.argsort(dim=-1, stable=True)`, and likewise for
    keys and values. In that order a bucket is a block of rows [s, e), and a key hides the rows outside it and, inside,
    those that stood before the key: [0, r) and [e, Sq).

    Original order for the buckets 1 0 1 0 of queries and keys, and what `hash_sparse` returns for it:

        1 . . .        1 . . .
        . 1 . .        1 1 . .
        1 . 1 .        . . 1 .
        . 1 . 1        . . 1 1

    Args:
        q_bucket: int [B, H, Sq], any integers.
        k_bucket: int [B, Hkv, Skv], H a multiple of Hkv: query head h reads key head h * Hkv // H. Query row i stands
            at position i + Skv - Sq. A key whose bucket holds no query is seen by nothing.
        exclude_self: whether a key is hidden from the query at its own position too, as in Reformer.
        mask: what else hides, in the original order: causal with n = 1 column, of batch 1 or B and heads 1, Hkv or H,
            as packed documents, trees, padding and windows have it. None is nothing.
        device: where the mask lives; None is the device of `q_bucket`.

    Returns:
        FlashMask: indices [B, H, Skv, 2], not causal, q_len = Sq.

    Raises:
        TypeError: an argument is not an integer tensor, or `mask` no FlashMask.
        ValueError: the shapes or devices do not fit each other, or `mask` is of another form.

    Example:
        >>> import torch
        >>> from flashmask_hf import masks
        >>> bucket = torch.tensor([[[1, 0, 1, 0]]])
        >>> masks.hash_sparse(bucket, bucket).to_dense().int()[0, 0]
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    check_paired("q_bucket", q_bucket, "k_bucket", k_bucket, INTEGERS)
    hidden_from = None if mask is None else hidden_from_of(mask, q_bucket, k_bucket)
    if mask is not None:
        mask.validate(q_bucket.shape[-1])
    columns, _, _ = sorted_columns(q_bucket, k_bucket, hidden_from, exclude_self=exclude_self)
    return FlashMask(columns.to(device or q_bucket.device), causal=False, q_len=q_bucket.shape[-1])


def random_eviction(
    kv_len: int,
    *,
    evict_from: Tensor | None = None,
    generator: torch.Generator | None = None,
    batch: int = 1,
    heads: int = 1,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Causal, with each key dropped from some later row on, as a key-value cache evicts (section 2.1).

    Evicted from the rows 4, 2, 5, 4 and 5, of 5 keys:

        1 . . . .
        1 1 . . .
        1 . 1 . .
        1 . 1 1 .
        . . 1 . 1

    Args:
        kv_len: number of keys.
        evict_from: int tensor [B, Hm, kv_len], Hm being 1 or the heads: the position from which on key j is hidden, in
            j+1..kv_len, kv_len meaning never. Its values are checked, which waits for its device. None draws them.
        generator: draws each position uniformly from j+1..kv_len, on its own device; None is torch's CPU default.
        batch: batch entries to draw for.
        heads: mask heads to draw for.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `evict_from` or `generator`, or the CPU.

    Returns:
        FlashMask: indices [B, Hm, kv_len, 1], causal.

    Raises:
        TypeError: `evict_from` is not an integer tensor, or a length is not an int.
        ValueError: `evict_from` has another shape or a value outside j+1..kv_len, or comes with a generator, batch or
            heads; `q_len` does not lie in 1..kv_len.

    Example:
        >>> import torch
        >>> from flashmask_hf import masks
        >>> evict_from = torch.tensor([[[4, 2, 5, 4, 5]]])
        >>> masks.random_eviction(5, evict_from=evict_from).to_dense().int()[0, 0]
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 0, 1, 0, 0],
                [1, 0, 1, 1, 0],
                [0, 0, 1, 0, 1]], dtype=torch.int32)
        >>> masks.random_eviction(5, generator=torch.Generator().manual_seed(0), heads=2)
        FlashMask(batch=1, heads=2, q_len=5, kv_len=5, n=1, causal=True, device='cpu')
    """
    kv_len = _integer("kv_len", kv_len, 1)
    q_len = _query_count(q_len, kv_len)
    if evict_from is None:
        shape = (_integer("batch", batch, 1), _integer("heads", heads, 1), kv_len)
        place = torch.device("cpu") if generator is None else generator.device
        share = torch.rand(shape, generator=generator, device=place, dtype=torch.float64)
        key = _positions(kv_len, place)
        evict_from = key + 1 + (share * (kv_len - key)).long()
        return _mask(evict_from, causal=True, q_len=q_len, device=device)
    if generator is not None or (batch, heads) != (1, 1):
        raise ValueError("evict_from says it all: give either evict_from, or generator, batch and heads")
    _integer_tensor("evict_from", evict_from)
    if evict_from.dim() != 3 or evict_from.shape[-1] != kv_len or not evict_from.numel():
        raise ValueError(f"evict_from must have shape [B, Hm, kv_len = {kv_len}], got {list(evict_from.shape)}")
    bad = (evict_from <= _positions(kv_len, evict_from.device)) | (evict_from > kv_len)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"evict_from{where} is {int(evict_from[tuple(where)])}, but key {where[2]} can be evicted from a position "
            f"in {where[2] + 1}..{kv_len} only ({kv_len} = never)"
        )
    return _mask(evict_from.long(), causal=True, q_len=q_len, device=device)


def tree(
    documents: Sequence[Node] | Sequence[Sequence[Node]],
    *,
    kv_len: int | None = None,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """A forest in depth-first order: each token sees its own node and its ancestors, causally.

    The general form of `causal_document` (no children) and `share_question` (one level), for rollouts and dialogues.
    One integer per key says it all: the row where its node's subtree ends.

    `tree([(1, [(1, [1, 1]), 1]), 1])`, a root with two children of which the first has two, then a lone token:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 . 1 . .
        1 . . . 1 .
        . . . . . 1

    Args:
        documents: the roots of one row, a list of nodes; or a list of such lists for a batch. A node is its length in
            tokens, or a tuple (length, [children]). Tokens of a node come before those of its children.
        kv_len: number of keys; None means the longest row.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal.

    Raises:
        TypeError: a node is neither an int nor such a tuple.
        ValueError: a node of less than one token, a row longer than `kv_len`, or `q_len` not in 1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.tree([(1, [(1, [1, 1]), 1]), 1]).indices.flatten()
        tensor([5, 4, 3, 4, 5, 6], dtype=torch.int32)
    """
    lengths, ends = [], []
    for path, row in _rows("documents", documents, list):
        nodes, subtree_ends = _subtree_ends(path, row)
        lengths.append(nodes)
        ends.append(subtree_ends)
    kv_len = _row_length("documents", lengths, kv_len)
    end = _spread(ends, lengths, kv_len, filler=0)
    return _mask(end, causal=True, q_len=_query_count(q_len, kv_len), device=device)


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

    `padding([3], kv_len=5)`:

        1 . . . .
        1 1 . . .
        1 1 1 . .
        . . . . .
        . . . . .

    `padding([3], kv_len=5, side="left")`:

        . . . . .
        . . . . .
        . . 1 . .
        . . 1 1 .
        . . 1 1 1

    Args:
        lengths: number of real tokens of each row, 0..kv_len; a list or an int tensor [B].
        kv_len: number of keys; None means the longest row.
        side: where the padding is.
        causal: whether real tokens see one another causally, or all.
        q_len: number of queries; None means kv_len, less means the last q_len positions.
        device: where the mask lives; None is the device of `lengths`, or the CPU.

    Returns:
        FlashMask: indices [B, 1, kv_len, 1], causal; or [B, 1, kv_len, 2], not causal.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length does not lie in 0..kv_len, `side` is neither "right" nor "left", or `q_len` does not lie in
            1..kv_len.

    Example:
        >>> from flashmask_hf import masks
        >>> masks.padding([5, 3]).indices[:, 0, :, 0]
        tensor([[5, 5, 5, 5, 5],
                [3, 3, 3, 0, 0]], dtype=torch.int32)
    """
    if side not in ("right", "left"):
        raise ValueError(f'side must be "right" or "left", got {side!r}')
    if kv_len is not None:
        kv_len = _integer("kv_len", kv_len, 1)
    real = _vector("lengths", lengths, kv_len)
    kv_len = max(real) if kv_len is None else kv_len
    if kv_len == 0:
        raise ValueError("lengths are all 0; give kv_len to build a batch of nothing but padding")
    q_len = _query_count(q_len, kv_len)
    device = _place(device, lengths)
    key, count = _positions(kv_len), _column(real)
    first = torch.zeros_like(count) if side == "right" else kv_len - count
    is_padding = (key < first) | (key >= first + count)
    end = (first + count).expand_as(is_padding).masked_fill(is_padding, 0)
    if causal:
        return _mask(end, causal=True, q_len=q_len, device=device)
    return _mask(end, first.expand_as(end), causal=False, q_len=q_len, device=device)


INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _mask(*columns: Tensor, causal: bool, q_len: int, device: Device) -> FlashMask:
    """The mask of interval bounds given as positions 0..Skv: shifts them to query rows and clamps them to 0..q_len.

    Args:
        columns: integer tensors [B, Hm, Skv] in the order of the FlashMask table.
        causal: as in FlashMask.
        q_len: number of queries, the last of Skv positions.
        device: where the mask lives; None is where the columns are.
    """
    shift = columns[0].shape[-1] - q_len
    indices = (torch.stack(columns, -1) - shift).clamp(0, q_len).to(torch.int32)
    return FlashMask(indices if device is None else indices.to(device), causal, q_len=q_len)


def _place(device: Device, given: Any) -> Device:
    """The device asked for, or the one of the tensor that was given, or None."""
    return given.device if device is None and isinstance(given, Tensor) else device


def _positions(kv_len: int, device: Device = "cpu") -> Tensor:
    """0..kv_len-1, int64 [1, 1, kv_len]."""
    return torch.arange(kv_len, device=device).view(1, 1, kv_len)


def _column(values: list[int]) -> Tensor:
    """One number per batch entry, int64 [B, 1, 1]."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(-1, 1, 1)


def _spread(values: list[list[int]], lengths: list[list[int]], kv_len: int, filler: int) -> Tensor:
    """Repeat each value over the tokens of its document: int64 [B, 1, kv_len], `filler` behind the last document."""
    tokens = torch.full((len(lengths), 1, kv_len), filler, dtype=torch.int64, device="cpu")
    for row, value, length in zip(tokens, values, lengths, strict=True):
        repeats = torch.tensor(length, dtype=torch.int64, device="cpu")
        row[0, : sum(length)] = torch.tensor(value, dtype=torch.int64, device="cpu").repeat_interleave(repeats)
    return tokens


def _spans(lengths: list[list[int]], kv_len: int) -> tuple[Tensor, Tensor]:
    """Start and end of each token's document, int64 [B, 1, kv_len]; for filler kv_len and 0, with no row in between."""
    ends = [list(accumulate(row)) for row in lengths]
    starts = [[0, *row[:-1]] for row in ends]
    return _spread(starts, lengths, kv_len, filler=kv_len), _spread(ends, lengths, kv_len, filler=0)


def _subtree_ends(path: str, roots: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Length of each node and position where its subtree ends, in depth-first order."""
    lengths: list[int] = []
    parents: list[int] = []
    pending = [(f"{path}[{k}]", node, -1) for k, node in enumerate(roots)][::-1]
    while pending:
        where, node, parent = pending.pop()
        children = []
        if isinstance(node, (tuple, list)):
            if isinstance(node, list) or len(node) != 2 or not isinstance(node[1], (list, tuple)):
                raise TypeError(f"{where} must be a length or a tuple (length, [children]), got {node!r}")
            node, children = node
        lengths.append(_integer(where, node, 1, why="every question, answer or document has at least one token"))
        parents.append(parent)
        own = len(lengths) - 1
        pending.extend([(f"{where}[1][{k}]", child, own) for k, child in enumerate(children)][::-1])
    ends = list(accumulate(lengths))
    for node in range(len(ends) - 1, -1, -1):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    return lengths, ends


def _integer(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> int:
    """`value` as an int in low..high, or an error that names it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})") from None
    if number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be {allowed}, got {number}" + (f"; {why}" if why else ""))
    return number


def _integer_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of integers, got {got}")


def _query_count(q_len: int | None, kv_len: int, may_exceed: bool = False) -> int:
    """The number of queries: `q_len`, or as many as keys."""
    if q_len is None:
        return kv_len
    why = f"the queries are the last q_len of kv_len = {kv_len} positions; only full() and causal() take more"
    return _integer("q_len", q_len, 1, None if may_exceed else kv_len, why="" if may_exceed else why)


def _rows(name: str, value: Any, row_type: type | tuple[type, ...]) -> list[tuple[str, Sequence[Any]]]:
    """Split an argument into batch rows, each with its name for errors; a bare row is a batch of one."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list, or a list of lists for a batch, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty; give at least one entry")
    if not isinstance(value[0], row_type):
        return [(name, value)]
    for b, row in enumerate(value):
        if not isinstance(row, row_type):
            raise TypeError(f"{name}[0] is a row of a batch, so {name}[{b}] must be one too, got {row!r}")
        if not row:
            raise ValueError(f"{name}[{b}] is empty; every row of a batch needs at least one entry")
    return [(f"{name}[{b}]", row) for b, row in enumerate(value)]


def _lengths(name: str, value: Any) -> list[list[int]]:
    """Batch rows of lengths from a list, a list of lists or an int tensor of one or two axes."""
    if isinstance(value, Tensor):
        _integer_tensor(name, value)
        if value.dim() not in (1, 2):
            raise ValueError(f"{name} must have shape [documents] or [B, documents], got {list(value.shape)}")
        ragged = value.dim() == 2
        value = value.tolist()
        for row in value if ragged else []:
            while row and row[-1] == 0:
                row.pop()
    why = "leave out what has no token"
    return [
        [_integer(f"{path}[{k}]", length, 1, why=why) for k, length in enumerate(row)]
        for path, row in _rows(name, value, (list, tuple))
    ]


def _vector(name: str, value: Any, high: int | None) -> list[int]:
    """One number in 0..high per batch entry, from a list or an int tensor of one axis."""
    if isinstance(value, Tensor):
        _integer_tensor(name, value)
        if value.dim() != 1:
            raise ValueError(f"{name} must have shape [B], got {list(value.shape)}")
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list or an int tensor [B], got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty; give one number per batch entry")
    why = "" if high is None else f"kv_len is {high}"
    return [_integer(f"{name}[{b}]", number, 0, high, why=why) for b, number in enumerate(value)]


def _row_length(name: str, lengths: list[list[int]], kv_len: int | None) -> int:
    """Number of keys: `kv_len`, into which every row must fit, or the longest row."""
    totals = [sum(row) for row in lengths]
    if kv_len is None:
        return max(totals)
    kv_len = _integer("kv_len", kv_len, 1)
    for b, total in enumerate(totals):
        if total > kv_len:
            row = name if len(totals) == 1 else f"{name}[{b}]"
            raise ValueError(f"{row} holds {total} tokens, more than kv_len = {kv_len}; raise kv_len or move documents")
    return kv_len


def check_paired(q_name: str, q: Tensor, k_name: str, k: Tensor, dtypes: set[torch.dtype]) -> None:
    """Check per-head vectors of queries and keys."""
    wanted = "bool" if torch.bool in dtypes else "integer"
    for name, value in ((q_name, q), (k_name, k)):
        if not isinstance(value, Tensor) or value.dtype not in dtypes:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a tensor of {wanted} values, got {got}")
        if value.dim() != 3 or not value.numel():
            raise ValueError(f"{name} must have shape [B, H, S], no axis empty, got {list(value.shape)}")
    if q.device != k.device:
        raise ValueError(f"{k_name} is on {k.device}, {q_name} on {q.device}; move it with {k_name}.to('{q.device}')")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{k_name} has batch size {k.shape[0]}, {q_name} has {q.shape[0]}; they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} has {q.shape[1]} heads, no multiple of the {k.shape[1]} of {k_name}; each key head serves a "
            "group of query heads"
        )


def hidden_from_of(mask: FlashMask, q: Tensor, k: Tensor) -> Tensor:
    """The first query row from which on `mask` hides each key, int32 [B or 1, Hm, Skv].

    Args:
        mask: causal with n = 1, or it raises.
        q: [B, Hq, Sq], which the mask has to fit; only the shape and the device count.
        k: [B, Hkv, Skv].

    Raises:
        TypeError: `mask` is not a FlashMask.
        ValueError: it is of another form or does not fit.
    """
    if not isinstance(mask, FlashMask):
        raise TypeError(f"mask must be a FlashMask or None, got {type(mask).__name__}")
    batch, heads, q_len = q.shape
    kv_heads, kv_len = k.shape[1:]
    if not mask.causal or mask.indices.shape[-1] != 1:
        raise ValueError(
            f"mask must be causal with n = 1 column, got causal={mask.causal}, n = {mask.indices.shape[-1]}: what "
            "another one hides is no interval any more once rows are sorted; packed documents, trees, padding and "
            "windows of flashmask_hf.masks have such a form"
        )
    if mask.device != q.device:
        raise ValueError(f"mask is on {mask.device}, not on {q.device}; move it with mask.to('{q.device}')")
    if mask.kv_len != kv_len:
        raise ValueError(f"mask has {mask.kv_len} key columns, but there are {kv_len} keys")
    mask.rows(q_len)
    mask_batch, mask_heads = mask.indices.shape[:2]
    if not is_one_of(mask_batch, 1, batch) or not is_one_of(mask_heads, 1, kv_heads, heads):
        raise ValueError(
            f"mask must have batch 1 or {batch} and heads 1, Hkv = {kv_heads} or Hq = {heads}, got "
            f"{list(mask.indices.shape[:2])}"
        )
    return mask.indices[..., 0]


def sorted_columns(
    q_bucket: Tensor,
    k_bucket: Tensor,
    hidden_from: Tensor | None,
    *,
    exclude_self: bool = False,
    dropped: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of `hash_sparse`, and the stable orders of queries and keys that they are for.

    Args:
        q_bucket: int [B, Hq, Sq].
        k_bucket: int [B, Hkv, Skv].
        hidden_from: int32 [B or 1, Hm, Skv], of `hidden_from_of`, or None.
        exclude_self: as in `hash_sparse`.
        dropped: a bucket that sees nothing, or None.

    Returns:
        columns int32 [B, Hq, Skv, 2]; the orders, int64 [B, Hq, Sq] and [B, Hkv, Skv].
    """
    batch, heads, q_len = q_bucket.shape
    kv_heads, kv_len = k_bucket.shape[1:]
    common = torch.promote_types(q_bucket.dtype, k_bucket.dtype)
    q_sorted, q_order = q_bucket.to(common).contiguous().sort(dim=-1, stable=True)
    k_sorted, k_order = k_bucket.to(common).contiguous().sort(dim=-1, stable=True)
    bucket, key = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_sorted, k_order))
    start = torch.searchsorted(q_sorted, bucket)
    end = torch.searchsorted(q_sorted, bucket, right=True)
    # One ascending number per sorted query: where its bucket starts (the bucket number itself might overflow), then
    # where the query stood.
    ascending = torch.searchsorted(q_sorted, q_sorted) * (q_len + 1) + q_order

    def sorted_row(row: Tensor) -> Tensor:
        """The first row of the key's bucket that stood at `row` or later, or the bucket's end."""
        return torch.minimum(torch.searchsorted(ascending, start * (q_len + 1) + row), end)

    first = sorted_row((key - (kv_len - q_len) + int(exclude_self)).clamp(min=0))
    if hidden_from is not None:
        by_head = hidden_from.repeat_interleave(heads // hidden_from.shape[1], 1).expand(batch, heads, kv_len)
        end = sorted_row(by_head.gather(-1, key).clamp(0, q_len))
    if dropped is not None:
        end = torch.where(bucket == dropped, start, end)
        first = first.masked_fill(bucket == dropped, q_len)
    # Without a row that sees the key first >= end, which hides all rows.
    return torch.stack([end, first], -1).to(torch.int32), q_order, k_order
