"""Families in the tables of docs/models.md, and the families that make test runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tools.model_zoo import INPUTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of each row of the table with this header."""
    table = PAGE[PAGE.index(f"\n| {header} |") :].split("\n\n")[0]
    return [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)[1:]]


TABLE = {name: cells for *cells, names in rows(f"kind | {' | '.join(INPUTS)} | families") for name in names.split(", ")}
"""Kind and outcomes of each family."""
UNTESTED = dict(rows("family | reason"))
_FIRST = {tuple(cells): name for name, cells in reversed(sorted(TABLE.items()))}
_SOURCES = "".join(path.read_text() for path in (ROOT / "flashmask_hf").rglob("*.py"))
_QUICK = {name for name in TABLE if name in _FIRST.values() or f'"{name}"' in _SOURCES}
"""The first family with each row of outcomes, and the families that the package names."""


def each_family(names: Iterable[str]) -> list[Any]:
    """Return families as test parameters. A family that repeats the outcomes of another one is marked full."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in _QUICK)) for name in names]
