"""The shape of a check of a model call, and how its answer becomes an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.torch_internals import device_assert

__all__ = ["Check", "require"]


class Check(NamedTuple):
    """One rule that a model call must keep.

    Attributes:
        name: the wrong set-up, as docs/wrong_setups.md lists it.
        applies: whether the call can break the rule; on the host, without reading a tensor's values.
        holds: whether it keeps the rule. A bool raises `error` at once. A bool tensor [] is asserted on the device,
            without waiting for it. None is a call without anything to check.
        message: the error's text, at most 200 characters with names of usual length; devices take 254.
        error: the class of error where `holds` is a bool.
        parts: whether submodels that get their outer model's arguments are checked, too.
        after: whether the check follows the call, and asks what was read in it.
        waits: whether the host waits for the device and raises `error`, until a call of the model has passed.
    """

    name: str
    applies: Callable[[Call], object]
    holds: Callable[[Call], Tensor | bool | None]
    message: Callable[[Call], str]
    error: type[Exception] = ValueError
    parts: bool = False
    after: bool = False
    waits: bool = False


def require(check: Check, call: Call) -> None:
    """Raise if a call breaks the rule of a check.

    Raises:
        Exception: the check's error, from a bool.
        RuntimeError: from a tensor; on a GPU it is an assertion of the device.
    """
    holds = check.holds(call)
    if holds is None:
        return
    waits = check.waits and not torch.compiler.is_compiling()
    if isinstance(holds, Tensor) and not (waits and not (holds.is_cuda and call.state.has_answered)):
        device_assert(holds, check.message(call))
    elif not holds:
        raise check.error(check.message(call))
    elif check.waits:
        call.state.has_answered = True
