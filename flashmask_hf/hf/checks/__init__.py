"""Checks of model calls, in order in `CHECKS`; docs/wrong_setups.md lists their names."""

from __future__ import annotations

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import ignored, mixed, positions, recurrent, trees
from flashmask_hf.hf.rules import applicable, require

__all__ = ["CHECKS", "run_checks"]

CHECKS = [*ignored.CHECKS, *trees.CHECKS, *mixed.CHECKS, *recurrent.CHECKS, *positions.CHECKS]


def run_checks(call: Call, *, after: bool = False) -> None:
    """Run the checks before a model call, or with `after` the checks that follow it.

    A submodel with the same arguments as its outer model gets only the checks of its own parts.

    Raises:
        Exception: the first error of `CHECKS`.
    """
    seen = not after and _has_arguments_of_outer(call)
    for check in applicable(CHECKS, call):
        if check.after is after and (check.parts or not seen):
            verdict = check.run(call)
            if verdict is not None:
                require(check, call, verdict)


def _has_arguments_of_outer(call: Call) -> bool:
    """Return whether the call around this one has the same config and the same arguments, and was checked."""
    outer = call.outer
    if outer is None or outer.config is not call.config:
        return False
    return all(outer.named.get(name) is value for name, value in call.named.items() if value is not None)
