"""Settings of every test run: lanes, order of the tests, and a faster interpreter.

A test marked interpreter, gpu or hopper is skipped, with the reason, where its lane cannot run.
"""

import os
from typing import Any

# CUDA reads it when it starts; without it some tests that ask for deterministic algorithms would raise.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import HealthCheck, settings
from tools.support import INTERPRETED, requires

torch.set_num_threads(1)  # tests are small, and several workers share the cores

# Time limits of examples would fail tests on a machine that also does something else.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def _speed_up_interpreter() -> None:
    """Skip work of Triton's interpreter that has no effect, about half the time of some tests.

    The interpreter patches its language for a launch, and again for each call of a function in the kernel, when nothing
    is left to patch. It also checks integers for overflow, for assertions that it then leaves out
    (`tools.support.interpret_assertions`).
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [x for x in function.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core]
        patched = languages and not any(is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


if INTERPRETED:
    _speed_up_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _lane(request: pytest.FixtureRequest) -> None:
    for name in ("interpreter", "gpu", "hopper"):
        if request.node.get_closest_marker(name):
            requires(name)
