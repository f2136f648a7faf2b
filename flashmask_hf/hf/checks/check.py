"""A check of a model call, and how its verdict becomes an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.torch_internals import device_assert

__all__ = ["Check", "Verdict", "require", "rule"]

Verdict: TypeAlias = tuple[Tensor | bool | None, str] | None
"""Whether a call keeps a rule, None if there is nothing to check; and the error's text, at most 200 characters.

A bool raises at once. A bool tensor [] is asserted on the device, without waiting for it. A text with a size is made
only on failure: a compiler would fix the size.
"""


class Check(NamedTuple):
    """One rule that a model call must keep.

    Attributes:
        name: the wrong set-up, as docs/wrong_setups.md lists it.
        verdict: judges a call. It reads tensors' values only on the device, and only if the call can break the rule.
        error: the class of error where the verdict is a bool.
        parts: whether submodels that get their outer model's arguments are checked, too.
        after: whether the check follows the call, and asks what was read in it.
        waits: whether the host waits for the device and raises `error`, until a call of the model has passed.
    """

    name: str
    verdict: Callable[[Call], Verdict]
    error: type[Exception] = ValueError
    parts: bool = False
    after: bool = False
    waits: bool = False


def rule(
    checks: list[Check], name: str, error: type[Exception] = ValueError, **options: bool
) -> Callable[[Callable[[Call], Verdict]], Check]:
    """Add the decorated verdict to a list of checks; arguments as in `Check`."""

    def add(verdict: Callable[[Call], Verdict]) -> Check:
        checks.append(Check(name, verdict, error, **options))
        return checks[-1]

    return add


def require(check: Check, call: Call, verdict: Verdict) -> None:
    """Raise if a call breaks the rule of a check by its verdict.

    Raises:
        Exception: the check's error, from a bool.
        RuntimeError: from a tensor; on a GPU it is an assertion of the device.
    """
    if verdict is None or verdict[0] is None:
        return
    holds, message = verdict
    waits = check.waits and not torch.compiler.is_compiling()
    if isinstance(holds, Tensor) and not (waits and not (holds.is_cuda and call.state.has_answered)):
        device_assert(holds, message)
    elif not holds:
        raise check.error(message)
    elif check.waits:
        call.state.has_answered = True
