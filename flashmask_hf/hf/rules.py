"""Rules of model calls: a rewrite changes the arguments of a call, a check raises on a wrong one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.names import VECTORS
from flashmask_hf.torch_internals import device_assert

Verdict: TypeAlias = tuple[Tensor | bool | None, str]
"""Whether a call keeps a rule, None if there is nothing to check; and the error's text, at most 200 characters.

A bool raises at once; a bool tensor [] is asserted on the device. A text with a size is made only on failure: a
compiler would fix the size.
"""

F = TypeVar("F", bound=Callable[[Call], Any])


class Rule(NamedTuple):
    """A check or a rewrite of model calls.

    Attributes:
        name: the wrong set-up, as docs/wrong_setups.md lists it, or what is rewritten.
        run: returns a check's `Verdict`, or a rewrite's new arguments by name; None if all is well. It reads tensors'
            values only on the device, and only if the call can break the rule.
        given: arguments without which the rule does not apply.
        ours: whether the rule applies under this package's attention only.
        config: attribute without which a config is not looked at.
        where: whether the rule applies to a model with an attention and arguments of these names: what it may read.
        error: the class of error where the verdict is a bool.
        waits: whether the host waits for the device and raises `error`, until a call of the model has passed.
    """

    name: str
    run: Callable[[Call], Any]
    given: tuple[str, ...] = ()
    ours: bool = False
    config: str = ""
    where: Callable[[Call], object] = lambda call: True
    error: type[Exception] = ValueError
    waits: bool = False

    def can_apply(self, call: Call, given: list[str]) -> object:
        """Return whether the rule can apply to a call with arguments of the names `given`."""
        if (self.ours and not call.is_ours) or not all(name in given for name in self.given):
            return False
        return (not self.config or getattr(call.config, self.config, None)) and self.where(call)


def rule(rules: list[Rule], name: str, *given: str, **options: Any) -> Callable[[F], F]:
    """Add the decorated function to a list of rules; arguments as in `Rule`."""

    def add(run: F) -> F:
        rules.append(Rule(name, run, given, **options))
        return run

    return add


_applicable: weakref.WeakKeyDictionary[Any, dict[Any, list[Rule]]] = weakref.WeakKeyDictionary()
"""Rules that can apply to the calls of a model, by its state and the kind of call."""


def applicable(rules: list[Rule], call: Call) -> list[Rule]:
    """Return the rules that can apply to a call, memoized by model, attention, active LoRA and names of arguments."""
    given = [name for name, value in call.named.items() if value is not None]
    if torch.compiler.is_compiling():
        return [x for x in rules if x.can_apply(call, given)]
    attention = text_attention(call) if VECTORS in given else None
    kind = (id(rules), call.implementation, attention, call.has_activated_lora, *given)
    known = _applicable.setdefault(call.state, {})
    if kind not in known:
        known[kind] = [x for x in rules if x.can_apply(call, given)]
    return known[kind]


def text_attention(call: Call) -> str:
    """Return the attention that mask indices are for: the text model's."""
    return call.config.get_text_config()._attn_implementation


def require(check: Rule, call: Call, verdict: Verdict) -> None:
    """Raise if a call breaks the rule of a check by its verdict.

    Raises:
        Exception: the check's error, if the verdict is a bool.
        RuntimeError: the verdict is a tensor; on a GPU, a device-side assertion fails.
    """
    holds, message = verdict
    if holds is None:
        return
    waits = check.waits and not torch.compiler.is_compiling()
    if isinstance(holds, Tensor) and not (waits and not (holds.is_cuda and call.state.has_answered)):
        device_assert(holds, message)
    elif not holds:
        raise check.error(message)
    elif check.waits:
        call.state.has_answered = True
