"""Checks of model calls, in order in `CHECKS`; docs/wrong_setups.md lists their names."""

from __future__ import annotations

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import ignored, mixed, positions, recurrent, trees
from flashmask_hf.hf.rules import applicable, require

_OF_PARTS = [*recurrent.CHECKS, *positions.CHECKS]
_BEFORE = [*ignored.CHECKS, *trees.CHECKS, *mixed.CHECKS, *_OF_PARTS]

CHECKS = [*_BEFORE, *ignored.AFTER]


def run_checks(call: Call, *, after: bool = False) -> None:
    """Run the checks before a model call, or with `after` the checks that follow it.

    A submodel with the same arguments as its outer model gets only the checks of its own parts.

    Raises:
        Exception: the first error of `CHECKS`.
    """
    checks = ignored.AFTER if after else _OF_PARTS if _has_arguments_of_outer(call) else _BEFORE
    for check in applicable(checks, call):
        verdict = check.run(call)
        if verdict is not None and verdict[0] is not True:
            require(check, call, verdict)


def _has_arguments_of_outer(call: Call) -> bool:
    outer = call.outer
    if outer is None or outer.config is not call.config:
        return False
    return all(outer.named.get(name) is value for name, value in call.named.items() if value is not None)
