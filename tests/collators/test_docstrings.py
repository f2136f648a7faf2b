"""The examples in docstrings of collators run."""

import doctest
import importlib
import pkgutil

import pytest

from flashmask_hf import collators, depth_first

MODULES = [
    importlib.import_module(found.name) for found in pkgutil.iter_modules(collators.__path__, "flashmask_hf.collators.")
]
PARTS = [test for module in [*MODULES, depth_first] for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_docstring_examples_run(part):
    assert doctest.DocTestRunner().run(part).failed == 0
