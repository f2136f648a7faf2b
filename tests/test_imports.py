"""Imports run one way: a module imports only from rooms below its own, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "flashmask_hf"

Layers = Sequence[Sequence[str]]
Imports = dict[str, set[str]]

LAYERS: Layers = (
    ("names", "torch_internals"),
    ("_numbers",),
    ("mask",),
    ("masks",),
    ("dropout", "tile_plan"),
    ("_call.arguments",),
    ("kernels.launch",),
    ("kernels.shared",),
    ("kernels.eager", "kernels.portable", "kernels.hopper", "sparse.kernels"),
    ("sparse.reorder",),
    ("_call",),
    ("attention", "parallel", "sparse"),
    ("long_rows", "drafts"),
    ("collators", "hf"),
    ("sharing",),
    ("trainers", "integrations"),
    ("__init__",),
    ("diagnosis",),
    ("recipes",),
)
"""Rooms of the package from the bottom up. A room imports from itself and from lower layers, not from its own layer."""

IN_ROOM = {
    "depth_first": "mask",
    "intervals": "mask",
    "tiles": "mask",
    "plot": "mask",
    "sparse.hf": "hf",
    "__main__": "diagnosis",
    "run": "diagnosis",
}
"""Modules that share the room of another; any other module or folder is a room of its own."""

ALLOWED = {"collators": {"collators", "names", "mask", "masks", "_numbers"}}
"""Rooms that may not import from all lower layers, with those that they may import from."""

IMPORTERS = {
    "transformers": {"hf", "trainers", "integrations", "__init__", "diagnosis", "recipes"},
    "trl": {"collators", "trainers", "recipes"},
    "triton": {room for layer in LAYERS for room in layer if "kernels" in room} | {"diagnosis", "recipes"},
    "matplotlib": {"mask", "recipes"},
}
"""Packages that only some rooms may import: the others run without Triton, and know nothing of models."""


def find_modules(root: Path) -> dict[str, Path]:
    """Return the modules of the package and of the recipes by full name; a folder's own one ends in `.__init__`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for folder in (PACKAGE, "recipes")
        for path in sorted((root / folder).rglob("*.py"))
    }


def runtime_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements of a tree, in functions too, but for those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from runtime_imports(node)


def imported_names(name: str, source: str) -> Iterator[list[str]]:
    """Yield for each imported thing the modules that it may come from, the most specific one first."""
    for node in runtime_imports(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ([alias.name] for alias in node.names)
            continue
        relative = "." * node.level + (node.module or "")
        origin = importlib.util.resolve_name(relative, name.rpartition(".")[0])
        yield from ([f"{origin}.{alias.name}", origin] for alias in node.names)


def read_imports(modules: Mapping[str, Path]) -> tuple[Imports, Imports]:
    """Return for each module which of `modules` it imports, and which other top-level packages."""
    inside: Imports = {name: set() for name in modules}
    outside: Imports = {name: set() for name in modules}
    for name, path in modules.items():
        for origins in imported_names(name, path.read_text(encoding="utf-8")):
            if name.startswith("recipes."):  # programs import their neighbours by bare names
                origins += [f"{name.rpartition('.')[0]}.{origin}" for origin in origins]
            found = (x for origin in origins for x in (origin, f"{origin}.__init__") if x in modules)
            target = next(found, None)
            if target is None:
                outside[name].add(origins[0].partition(".")[0])
            else:
                inside[name].add(target)
    return inside, outside


def room_of(name: str, layers: Layers) -> tuple[int, str]:
    """Return the layer and the room of a module; layer -1 for a module that the table lacks."""
    short = name.removeprefix(f"{PACKAGE}.")
    short = IN_ROOM.get(short, short)
    rooms = ((number, room) for number, layer in enumerate(layers) for room in layer)
    return next((x for x in rooms if f"{short}.".startswith(f"{x[1]}.")), (-1, short))


def find_faults(root: Path, layers: Layers) -> list[str]:
    """Return what breaks the rules in a tree, a sentence for each fault."""
    modules = find_modules(root)
    inside, outside = read_imports(modules)
    faults = []
    for name in modules:
        layer, room = room_of(name, layers)
        if layer < 0:
            faults.append(f"{name} has no place in LAYERS")
        for target in sorted(inside[name]):
            other_layer, other_room = room_of(target, layers)
            if other_room != room and not 0 <= other_layer < layer:
                faults.append(f"{name} imports {target}, which is not below it")
            elif other_room not in ALLOWED.get(room, {other_room}):
                faults.append(f"{name} imports {target}, which is not for {room}")
        for package in sorted(outside[name] & IMPORTERS.keys()):
            if room not in IMPORTERS[package]:
                faults.append(f"{name} imports {package}, which is not for {room}")
    try:
        graphlib.TopologicalSorter(inside).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][:0:-1]  # each imports the next; the first is also named last
        first = circle.index(min(circle))
        faults.append("circle: " + " imports ".join([*circle[first:], *circle[: first + 1]]))
    return faults


def test_imports_run_one_way() -> None:
    assert find_faults(ROOT, LAYERS) == []


def test_the_table_names_no_room_that_is_gone() -> None:
    found = {room_of(name, LAYERS)[1] for name in find_modules(ROOT)}
    named = {room for layer in LAYERS for room in layer}
    assert named == found
    assert named >= set().union(IN_ROOM.values(), ALLOWED, *ALLOWED.values(), *IMPORTERS.values())
    assert all((ROOT / PACKAGE / f"{module.replace('.', '/')}.py").exists() for module in IN_ROOM)


MADE_UP: Layers = (("low", "mask"), ("left", "right"), ("collators",), ("high",), ("recipes",))


@pytest.mark.parametrize(
    ("files", "faults"),
    [
        (
            {
                "left/__init__.py": "from flashmask_hf.left.a import x",
                "left/a.py": "import torch, flashmask_hf.low\ndef f():\n    from flashmask_hf import low",
                "low.py": "if TYPE_CHECKING:\n    from flashmask_hf.high import x",
                "high.py": "from flashmask_hf import left\nfrom flashmask_hf.low import x",
            },
            [],
        ),
        (
            {"low.py": "def f():\n    from flashmask_hf.high import x", "high.py": ""},
            ["flashmask_hf.low imports flashmask_hf.high, which is not below it"],
        ),
        (
            {"left.py": "from flashmask_hf import right", "right/__init__.py": ""},
            ["flashmask_hf.left imports flashmask_hf.right.__init__, which is not below it"],
        ),
        (
            {
                "left/a.py": "import flashmask_hf.left.b",
                "left/b.py": "try:\n    from flashmask_hf.left import c\nexcept ImportError:\n    pass",
                "left/c.py": "def f():\n    from .a import x",
            },
            ["circle: " + " imports ".join(f"flashmask_hf.left.{module}" for module in "abca")],
        ),
        (
            {"left/__init__.py": "import flashmask_hf.left.a", "left/a.py": "from flashmask_hf import left"},
            ["circle: flashmask_hf.left.__init__ imports flashmask_hf.left.a imports flashmask_hf.left.__init__"],
        ),
        (
            {"mask.py": "", "left.py": "", "collators/a.py": "import flashmask_hf.mask\nimport flashmask_hf.left"},
            ["flashmask_hf.collators.a imports flashmask_hf.left, which is not for collators"],
        ),
        (
            {"mask.py": "import transformers\nclass A:\n    def f(self):\n        from triton.language import x"},
            [f"flashmask_hf.mask imports {package}, which is not for mask" for package in ("transformers", "triton")],
        ),
        ({"lonely.py": ""}, ["flashmask_hf.lonely has no place in LAYERS"]),
        (
            {
                "../recipes/a.py": "from b import x\nimport flashmask_hf.low",
                "../recipes/b.py": "import a",
                "low.py": "",
            },
            ["circle: recipes.a imports recipes.b imports recipes.a"],
        ),
    ],
    ids=["sound", "upward", "sideways", "circle", "own package", "not allowed", "outside", "no room", "recipes"],
)
def test_the_checker_finds_the_faults_of_a_made_up_tree(
    files: dict[str, str], faults: list[str], tmp_path: Path
) -> None:
    for name, source in files.items():
        path = (tmp_path / PACKAGE / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert find_faults(tmp_path, MADE_UP) == faults


@pytest.mark.full
def test_prefixes_are_shared_without_datasets() -> None:
    """A plain install beside transformers has neither `datasets` nor TRL, and nor may another program's environment."""
    program = """
import sys

sys.modules |= dict.fromkeys(("datasets", "pyarrow", "trl", "accelerate"))
import flashmask_hf.integrations
from flashmask_hf.collators import pack_shared

flashmask_hf.share_prefixes
try:
    from flashmask_hf.collators import pack_dataset
except ModuleNotFoundError as error:
    assert error.name in ("datasets", "pyarrow")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_the_package_without_transformers_imports_no_compiler() -> None:
    """TorchDynamo takes longer to import than all of the package; a new process has not imported it yet."""
    program = """
import sys

class Missing:
    def find_spec(name, *_):
        if name == "transformers":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing)
import flashmask_hf

slow = [name for name in ("torch._dynamo", "sympy", "triton", "matplotlib", "transformers") if name in sys.modules]
assert not slow, slow
from flashmask_hf.long_rows import offload_checkpoints, tile_tokens
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
