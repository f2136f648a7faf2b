"""What the tests of several recipes share."""

from __future__ import annotations

from pathlib import Path

import pytest
import tools.recipes  # noqa: F401  # makes the recipes importable

import data  # isort: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny untrained model of the demos."""
    path = tmp_path_factory.mktemp("model")
    data.build_model(path)
    return path
