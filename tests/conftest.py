"""Settings of every test run: lanes, order of the tests, and a faster interpreter.

A test marked interpreter, gpu or hopper is left out where its lane cannot run, and a line at the end says so. Where
`-m` names the lane, the test is skipped with the reason instead.
"""

import functools
import gc
import os
import random
import re
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

# CUDA reads it when it starts; without it some tests that ask for deterministic algorithms would raise.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from tools.support import INTERPRETED, obstacle, requires

torch.set_num_threads(1)  # tests are small, and several workers share the cores

# Time limits of examples would fail tests on a machine that also does something else.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def _speed_up_interpreter() -> None:
    """Skip work of Triton's interpreter that has no effect, about half the time of some tests.

    The interpreter patches its language for a launch, and again for each call of a function in the kernel, when nothing
    is left to patch. It makes the types of each operation anew. It also checks integers for overflow, for assertions
    that it then leaves out (`tools.support.interpret_assertions`).
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    language, numpy_type = interpreter.tl, interpreter._get_np_dtype
    numpy_types = functools.cache(numpy_type)
    block_types = functools.cache(lambda dtype, *shape: language.block_type(dtype, [*shape]))

    def cached_numpy_type(dtype: Any) -> Any:
        return numpy_type(dtype) if dtype.scalar.is_ptr() else numpy_types(dtype.scalar)

    def cached_block_type(dtype: Any, shape: Any) -> Any:
        return language.block_type(dtype, shape) if dtype.is_ptr() else block_types(dtype, *shape)

    interpreter._get_np_dtype = cached_numpy_type
    interpreter.interpreter_builder.get_block_ty = cached_block_type
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [x for x in function.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core]
        patched = languages and not any(is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


if INTERPRETED:
    _speed_up_interpreter()


LANES = ("hopper", "gpu", "interpreter")
LEFT_OUT = pytest.StashKey[Counter[str]]()
OF_THE_INTERPRETER = re.compile(r"\bmark\.interpreter\b|\blanes\(")
"""What a module with a test of the interpreter lane holds."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a test of the interpreter lane where that lane alone runs."""
    alone = INTERPRETED and config.option.markexpr.split(" and ")[0] == "interpreter"
    if alone and collection_path.suffix == ".py":
        return OF_THE_INTERPRETER.search(collection_path.read_text()) is None or None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that cannot run here, and run those of the full lane first, since they take longest."""
    unnamed = [lane for lane in LANES if not re.search(rf"\b{lane}\b", config.option.markexpr)]
    reasons = {lane: reason for lane in unnamed if (reason := obstacle(lane)) is not None}
    lanes = [next((lane for lane in reasons if item.get_closest_marker(lane)), None) for item in items]
    config.stash[LEFT_OUT] = Counter(f"{lane} lane: {reasons[lane]}" for lane in lanes if lane is not None)
    config.hook.pytest_deselected(items=[item for item, lane in zip(items, lanes, strict=True) if lane is not None])
    items[:] = [item for item, lane in zip(items, lanes, strict=True) if lane is None]
    items.sort(key=lambda item: item.get_closest_marker("full") is None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker left out; every worker leaves out the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reason, count in config.stash.get(LEFT_OUT, Counter()).items():
        terminalreporter.line(f"left out {count} tests of the {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed(str(item.path.name))  # also of what tests of a module share, whichever of them is the first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed(item.nodeid)


def _seed(name: str) -> None:
    """Seed all generators by a name, so that no test draws by what ran before it in its worker."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if vision := sys.modules.get("tools.vision"):
        vision.seed(seed)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Make what models and losses of float64 cast to float32 float64, too, but in tests on a GPU."""
    from tools.tiny import keep_float64

    if request.node.get_closest_marker("gpu") is None:
        keep_float64(monkeypatch)


@pytest.fixture(autouse=True)
def _lane(request: pytest.FixtureRequest) -> None:
    for name in LANES:
        if request.node.get_closest_marker(name):
            requires(name)


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """Hide what lives longer than a module from the garbage collector, which trainers run in full per training."""
    gc.collect()
    gc.freeze()
