"""Calls of models for tests of single checks and rewrites."""

from __future__ import annotations

from typing import Any

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import CHECKS, run_checks
from flashmask_hf.hf.rules import Rule, applicable, require


def check_call(model: Any, *args: Any, **kwargs: Any) -> None:
    """Run every check that comes before a call."""
    run_checks(Call(model, args, kwargs))


def check_named(words: str) -> Rule:
    """Return the check whose name has these words."""
    (found,) = [check for check in CHECKS if words in check.name]
    return found


def run_check(words: str, model: Any, *args: Any, **kwargs: Any) -> None:
    """Run one check of a call, if it applies."""
    call, check = Call(model, args, kwargs), check_named(words)
    verdict = check.run(call) if check in applicable(CHECKS, call) else None
    if verdict is not None:
        require(check, call, verdict)
