"""Checks of numbers, in arguments and in tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.torch_internals import device_assert

_MAX_LENGTH = 2**31 - 1
"""Most query rows or keys of a mask: the largest int32."""

_DTYPES = {
    "a bool": (torch.bool,),
    "an int32": (torch.int32,),
    "an int64": (torch.int64,),
    "an integer": (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    "a floating-point": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
"""Kinds of tensors, with their article, and the dtypes of each."""


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless the argument `name` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def as_integer(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> int:
    """Return `value` as an int in low..high.

    Args:
        name: the argument, for errors.
        value: anything that `operator.index` takes except a bool; a symbolic integer stays symbolic.
        low: least value allowed.
        high: largest value allowed; None is no limit.
        why: reason for the limits, added to the error.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        # The index of a symbolic integer is a number, for which a compiler would specialize.
        number: Any = value if isinstance(value, (int, torch.SymInt)) else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})") from None
    if number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be {allowed}, got {number}" + (f"; {why}" if why else ""))
    return number


def as_length(name: str, value: Any) -> int:
    """Return a number of query rows or keys as an int in 1..2**31 - 1; a symbolic integer stays symbolic."""
    length = as_integer(name, value, 1)
    if isinstance(length, int) and length > _MAX_LENGTH:  # a symbolic one would get a guard
        raise ValueError(f"{name} must be at most {_MAX_LENGTH}, the largest int32, got {length}")
    return length


def check_tensor(name: str, value: Any, kind: str, *shapes: str) -> Tensor:
    """Return `value` if it is a tensor of a kind (a key of `_DTYPES`) and shape.

    Args:
        name: the argument, for errors.
        value: anything.
        kind: of its dtype.
        shapes: the ones allowed, such as "[B, S]"; no axis may be empty.
    """
    if not isinstance(value, Tensor) or value.dtype not in _DTYPES[kind]:
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = f"{value.dtype}; convert it to {' or '.join(map(str, _DTYPES[kind]))}"
        raise TypeError(f"{name} must be {kind} tensor {' or '.join(shapes)}, got {got}")
    if 0 in value.shape or value.dim() - 1 not in [shape.count(",") for shape in shapes]:
        allowed = " or ".join(shapes)
        raise ValueError(f"{name} must have shape {allowed} with no empty axis, got {list(value.shape)}")
    return value


def check_device(name: str, x: Any, other_name: str, other: Any) -> None:
    """Raise ValueError unless two tensors or masks are on one device."""
    if x.device != other.device:
        where = f"{name} is on {x.device}, but {other_name} is on {other.device}"
        raise ValueError(f"{where}; move it with {name}.to('{other.device}')")


def check_range(indices: Tensor, q_len: int) -> None:
    """Check that a mask's indices lie in 0..q_len, as `check_between`."""
    check_between(
        indices,
        q_len,
        f"the mask's indices must lie in 0..q_len = 0..{q_len}; FlashMask.validate(q_len={q_len}) names the columns",
    )


def check_between(x: Tensor, highest: int, message: str) -> None:
    """Raise ValueError unless integers lie in 0..highest. On a GPU a device-side assertion stops the program."""
    low, high = (bound.long() for bound in x.aminmax())  # `highest` may not fit the dtype of x
    if x.is_cuda:  # without waiting for the device
        device_assert((low >= 0) & (high <= highest), message)
    elif low < 0 or high > highest:
        raise ValueError(message)
