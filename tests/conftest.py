"""Lanes: a test marked interpreter, gpu or hopper is skipped, with the reason, where its lane cannot run."""

import os
import sys
from typing import Any

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: some tests ask for deterministic algorithms

import pytest
import torch
from support import INTERPRETED, requires

from flashmask_hf import repeated

torch.set_num_threads(1)  # tests are small, and several workers share the cores


def _quicken_interpreter() -> None:
    """Leave out what Triton's interpreter does in vain, about half of some tests' time.

    It patches its language for a launch, and again for each call of a function in there, when nothing is left to patch.
    It works out whether integers overflow for an assertion, and leaves that out (see `support.interpret_assertions`).
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
    _quicken_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: a worker that begins one last is alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does: with no call to repeat, and no launch prepared."""
    monkeypatch.setattr(repeated, "_known", {})
    for name in ("forward", "backward", "hopper_forward", "hopper_backward"):
        module = sys.modules.get(f"flashmask_hf.kernels.{name}")
        if module is not None:
            module.prepared.cache_clear()


@pytest.fixture(autouse=True)
def _lane(request: pytest.FixtureRequest) -> None:
    for name in ("interpreter", "gpu", "hopper"):
        if request.node.get_closest_marker(name):
            requires(name)
