"""Lay the package out as a kernel repository of the Hub: python hub/make.py ORG/flashmask FOLDER.

FOLDER gets what kernel-builder reads (`build.toml`, `torch-ext/`, `CARD.md`) and what it makes of a kernel without
compiled code: `build/torch-BACKEND/`, from which `kernels` and transformers load. Try it without an upload:

    LOCAL_KERNELS=ORG/flashmask=FOLDER python train.py  # with attn_implementation="ORG/flashmask"

Needs Python 3.11 or later.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import tomllib

HUB = Path(__file__).parent
PACKAGE = HUB.parent / "flashmask_hf"


def make_kernel(repository: str, folder: Path) -> None:
    """Write a kernel repository.

    Args:
        repository: its name on the Hub, "ORG/NAME".
        folder: where to write; it must not exist.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: `repository` is not of the form "ORG/NAME".
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"repository must be ORG/NAME, got {repository!r}")
    folder.mkdir(parents=True)
    for name in ("build.toml", "CARD.md"):
        text = (HUB / name).read_text(encoding="utf-8").replace("ORG/flashmask", repository)
        (folder / name).write_text(text, encoding="utf-8")
    general = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))["general"]
    sources = folder / "torch-ext" / "flashmask"
    shutil.copytree(HUB / "torch-ext" / "flashmask", sources, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE, sources / "flashmask_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for backend in general["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(sources, variant)
        metadata = {
            "id": f"_{general['name']}_{backend}_{general['version']}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", help="name on the Hub, ORG/NAME")
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    arguments = parser.parse_args()
    make_kernel(arguments.repository, arguments.folder)
