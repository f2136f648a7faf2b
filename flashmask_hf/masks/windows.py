"""Masks by position alone: full, causal, sliding windows and global tokens."""

from __future__ import annotations

from typing import Any

import torch

from flashmask_hf._numbers import as_integer, as_length, check_bool
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, query_count
from flashmask_hf.masks._columns import key_positions, make_mask


def full(kv_len: int, *, q_len: int | None = None, device: Device = None) -> FlashMask:
    """Every query sees every key (section 2.1).

    `full(3)`:

        1 1 1
        1 1 1
        1 1 1

    Args:
        q_len: any number of queries; None is kv_len.

    Returns:
        FlashMask: indices [1, 1, kv_len, 2], not causal.

    Example:
        >>> bool(full(4, q_len=6).to_dense().all())
        True
    """
    kv_len = as_length("kv_len", kv_len)
    q_len = kv_len if q_len is None else as_length("q_len", q_len)
    never = torch.full((1, 1, kv_len), q_len, dtype=torch.int32, device="cpu" if device is None else device)
    return FlashMask(torch.stack([never, torch.zeros_like(never)], -1), causal=False, q_len=q_len)


def causal(kv_len: int, *, q_len: int | None = None, device: Device = None) -> FlashMask:
    """Every query sees the keys up to its own position (section 2.1).

    `causal(3)`:

        1 . .
        1 1 .
        1 1 1

    Args:
        q_len: any number of queries; None is kv_len. The first q_len - kv_len queries see nothing.

    Returns:
        FlashMask: indices [1, 1, kv_len, 1], causal.

    Example:
        >>> causal(4, q_len=2).to_dense().int()[0, 0]
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    indices = full(kv_len, q_len=q_len, device=device).indices[..., :1]
    return FlashMask(indices.contiguous(), causal=True, q_len=kv_len if q_len is None else q_len)


def sliding_window(
    kv_len: int, window: int, *, causal: bool = True, q_len: int | None = None, device: Device = None
) -> FlashMask:
    """Every query sees the `window` nearest keys up to its own position (section 2.1).

    `sliding_window(4, 2)`:

        1 . . .
        1 1 . .
        . 1 1 .
        . . 1 1

    `sliding_window(4, 2, causal=False)`:

        1 1 . .
        1 1 1 .
        . 1 1 1
        . . 1 1

    Args:
        window: at least 1. Query i sees keys i - window + 1 to i, as with `sliding_window` in transformers; with
            causal=False it sees keys with |i - j| < window.

    Returns:
        FlashMask: indices [1, 1, kv_len, 1], causal; or [1, 1, kv_len, 2], not causal.

    Raises:
        ValueError: `window` is less than 1.

    Example:
        >>> sliding_window(4, 2).indices.flatten()
        tensor([2, 3, 4, 4], dtype=torch.int32)
    """
    return global_sliding_window(kv_len, 0, window, causal=causal, q_len=q_len, device=device)


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

    `global_sliding_window(5, 1, 2)`:

        1 1 1 1 1
        1 1 1 . .
        1 1 1 1 .
        1 . 1 1 1
        1 . . 1 1

    `global_sliding_window(5, 1, 2, causal=True)`, the "attention sink" of streaming decoders:

        1 . . . .
        1 1 . . .
        1 1 1 . .
        1 . 1 1 .
        1 . . 1 1

    Args:
        n_global: number of global tokens at the start, 0..kv_len.
        window: as in `sliding_window`, for the other tokens.

    Returns:
        FlashMask: indices [1, 1, kv_len, 4], not causal ([1, 1, kv_len, 2] if no query is global); or
        [1, 1, kv_len, 1], causal.

    Raises:
        ValueError: `n_global` lies outside 0..kv_len, or `window` is less than 1.

    Example:
        >>> global_sliding_window(5, 1, 2, causal=True).indices.flatten()
        tensor([5, 3, 4, 5, 5], dtype=torch.int32)
    """
    kv_len = as_length("kv_len", kv_len)
    n_global = as_integer("n_global", n_global, 0, kv_len)
    window = as_integer("window", window, 1, why="a query sees at least its own position")
    # A larger window hides the same, but plus a position it might overflow int64.
    clamped: Any = torch.sym_min(window, kv_len)
    check_bool("causal", causal)
    q_len = query_count(q_len, kv_len)
    key = key_positions(kv_len)
    lower = torch.where(key < n_global, kv_len, key + clamped)
    if causal:
        return make_mask(lower, causal=True, q_len=q_len, device=device)
    upper = (key - clamped + 1).clamp(min=n_global)  # the rows n_global..upper lie too far above the key
    if n_global <= kv_len - q_len:
        return make_mask(lower, upper, causal=False, q_len=q_len, device=device)
    end, start = torch.full_like(key, kv_len), torch.full_like(key, n_global)
    return make_mask(lower, end, start, upper, causal=False, q_len=q_len, device=device)
