"""Checks of arguments that constructors of the gallery share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer, as_length, check_tensor

Device: TypeAlias = torch.device | str | None
"""Device to build a mask on, or None."""

Lengths: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
"""As `documents` in `flashmask_hf.masks`."""


def device_of(device: Device, value: Any) -> Device:
    """Return `device`, or if it is None the device of `value`; None if that is no tensor."""
    return value.device if device is None and isinstance(value, Tensor) else device


def from_array(value: Any) -> Any:
    """Return a NumPy array as a tensor, and any other value unchanged."""
    # Compilers know symbolic integers as int, and cannot ask them for an attribute.
    if isinstance(value, (Tensor, list, tuple, int, torch.SymInt)) or not hasattr(value, "__array_interface__"):
        return value
    return torch.tensor(value) if getattr(value, "shape", ()) else value  # a number of NumPy has no axes


def as_list(name: str, value: Any, *shapes: str) -> Any:
    """Return an int tensor or array as a list, and any other value unchanged."""
    value = from_array(value)
    return check_tensor(name, value, "an integer", *shapes).tolist() if isinstance(value, Tensor) else value


def query_count(q_len: int | None, kv_len: int) -> int:
    """Return `q_len`, or `kv_len` if it is None."""
    if q_len is None:
        return kv_len
    why = "the queries are the last q_len of kv_len positions; only full() and causal() take more"
    return as_integer("q_len", q_len, 1, kv_len, why=why)


def batch_rows(
    name: str, value: Any, row_type: type | tuple[type, ...], empty: bool = False
) -> list[tuple[str, Sequence[Any]]]:
    """Split an argument into (name for errors, row) pairs, one per packed row; a bare row is a batch of one.

    Rows may have no entry if `empty`.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list, or a list of lists for a batch, got {type(value).__name__}")
    if not value and not empty:
        raise ValueError(f"{name} is empty; give at least one entry")
    if not value or not isinstance(value[0], row_type):
        return [(name, value)]
    for b, row in enumerate(value):
        if not isinstance(row, row_type):
            raise TypeError(f"{name}[0] is a row of a batch, so {name}[{b}] must be one too, got {row!r}")
        if not row and not empty:
            raise ValueError(f"{name}[{b}] is empty; every row of a batch needs at least one entry")
    return [(f"{name}[{b}]", row) for b, row in enumerate(value)]


def batch_integers(name: str, value: Any, high: int | None = None, axis: str = "B") -> list[int]:
    """Return numbers in 0..high from a list, or an int tensor or array [axis]; by default one per packed row."""
    value = as_list(name, value, f"[{axis}]")
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list, or an int tensor or array [{axis}], got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty; give numbers [{axis}]")
    why = "" if high is None else "the largest is kv_len"
    return [as_integer(f"{name}[{b}]", number, 0, high, why=why) for b, number in enumerate(value)]


def check_one_row(count: int) -> None:
    """Raise a ValueError unless an argument's lengths are of one packed row."""
    if count > 1:
        raise ValueError(f"lengths must be of one packed row, got {count}; give each row of the batch alone")


def key_count(name: str, lengths: list[list[int]], kv_len: int | None) -> int:
    """Return `kv_len`, which packed rows must fit, or the longest's length if it is None."""
    totals = [sum(row) for row in lengths]
    if kv_len is None:
        return as_length(f"the number of tokens in {name}", max(totals))
    kv_len = as_length("kv_len", kv_len)
    for b, total in enumerate(totals):
        if total > kv_len:
            row = name if len(totals) == 1 else f"{name}[{b}]"
            raise ValueError(f"{row} holds {total} tokens, more than kv_len = {kv_len}; raise kv_len or move documents")
    return kv_len


def batch_lengths(name: str, value: Any, kv_len: int | None) -> tuple[list[list[int]], int]:
    """Return the lengths per packed row of an argument like `documents`, and the number of keys."""
    listed = as_list(name, value, "[documents]", "[B, documents]")
    if listed is not value and isinstance(listed[0], list):
        for row in listed:
            while row and row[-1] == 0:
                row.pop()
    lengths = [positive(*row, "leave out what has no token") for row in batch_rows(name, listed, (list, tuple))]
    return lengths, key_count(name, lengths, kv_len)


def positive(name: str, numbers: Sequence[Any], why: str) -> list[int]:
    """Return a row's numbers as ints of at least 1; `why` ends errors."""
    return [as_integer(f"{name}[{k}]", number, 1, why=why) for k, number in enumerate(numbers)]
