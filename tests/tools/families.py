"""Rows of the tables of docs/models.md, and the families that make test runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def section(title: str) -> dict[str, list[str]]:
    """Return the rows of a table as lists of cells, by their first cell."""
    rows = re.findall(r"^\| (.*) \|$", PAGE[PAGE.index(f"\n| {title} |") :].split("\n\n")[0], re.MULTILINE)
    return {cells[0]: cells[1:] for cells in (row.split(" | ") for row in rows[1:])}


TABLE = section("family | kind")
UNTESTED = section("family | reason")
_FIRST = {tuple(cells): name for name, cells in reversed(TABLE.items())}
_SOURCES = "".join(path.read_text() for path in (ROOT / "flashmask_hf").rglob("*.py"))
_QUICK = {name for name in TABLE if name in _FIRST.values() or f'"{name}"' in _SOURCES}
"""The first family with each row of outcomes, and the families that the package names."""


def each_family(names: Iterable[str]) -> list[Any]:
    """Return families as test parameters. A family that repeats the outcomes of another one is marked full."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in _QUICK)) for name in names]
