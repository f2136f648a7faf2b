"""The commands of the pages that run recipes: their flags are those of the recipe."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tools.recipes  # noqa: F401  # makes the recipes importable
from tools.tiny import TRAINER_WARNINGS

pytestmark = [*TRAINER_WARNINGS, pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = ("sft", "vision_sft", "diffusion", "dpo", "reward", "grpo")


def commands(page):
    """Yield the recipe and the flags of each command of a page, without those that end in `...`."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            _, program, flags = line.partition("recipes/check_against_stock.py")
            if not program:
                program = re.search(r"recipes/(\w+)\.py(.*)", line)
                flags = " ".join(program.groups()) if program else ""
            recipe, *rest = shlex.split(flags, comments=True) or [""]
            if recipe in RECIPES and "..." not in rest:
                yield recipe, rest


FOUND = [(page.name, *command) for page in PAGES for command in commands(page)]
ADDED = re.search(r"\n\| for \| add \|\n.*?\n\n", (ROOT / "docs" / "packing.md").read_text(), re.DOTALL)
FOUND += [
    ("packing.md", "sft", ["--config", "recipes/configs/sft.yaml", *shlex.split(flags)])
    for flags in re.findall(r"`(--[^`]+)`", ADDED.group() if ADDED else "")
    if not flags.startswith(("--num_machines", "--machine_rank", "--main_process_ip"))
]


def test_commands_are_found():
    assert {recipe for _, recipe, _ in FOUND} == set(RECIPES)
    assert sum(page == "packing.md" for page, _, _ in FOUND) >= 10


@pytest.mark.parametrize("number", range(len(FOUND)), ids=[f"{page}-{recipe}" for page, recipe, _ in FOUND])
def test_a_recipe_knows_the_flags_of_a_command(number, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, recipe, flags = FOUND[number]
    importlib.import_module(recipe).parse(flags)
