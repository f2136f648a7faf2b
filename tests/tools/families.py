"""Families in the tables of docs/models.md, and the families that make test runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def _table() -> dict[str, list[str]]:
    header = "| kind | no / right / left padding | packed | mask indices | families |"
    found = {}
    for row in re.findall(r"^\| (.*) \|$", PAGE[PAGE.index(header) :].split("\n\n")[0], re.MULTILINE)[1:]:
        kind, padding, *cells, names = row.split(" | ")
        padded = padding.split(" / ")  # one outcome stands for all three
        outcomes = [*(padded if len(padded) == 3 else padded * 3), *cells]
        found |= {name: [kind, *outcomes] for name in names.split(", ")}
    return found


TABLE = _table()
"""Kind and outcomes of each family: without padding, padding on the right and left, packed, with mask indices."""
UNTESTED = re.findall(r"[\w-]+", re.findall(r"^These could not be built tiny, .*?: (.*)\.$", PAGE, re.MULTILINE)[0])
_IMAGE_ROWS = PAGE[PAGE.index("| rows with images | families |") :].split("\n\n")[0]
IMAGE_ROWS = {
    name: cell
    for cell, names in re.findall(r"^\| (.*) \| (.*) \|$", _IMAGE_ROWS, re.MULTILINE)[1:]
    for name in names.split(", ")
}
"""Outcome of rows with images in each family."""
_FIRST = {tuple(cells): name for name, cells in reversed(sorted(TABLE.items()))}
_SOURCES = "".join(path.read_text() for path in (ROOT / "flashmask_hf").rglob("*.py"))
_QUICK = {name for name in TABLE if name in _FIRST.values() or f'"{name}"' in _SOURCES}
"""The first family with each row of outcomes, and the families that the package names."""


def each_family(names: Iterable[str]) -> list[Any]:
    """Return families as test parameters. A family that repeats the outcomes of another one is marked full."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in _QUICK)) for name in names]
