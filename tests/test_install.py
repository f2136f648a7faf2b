"""Installs of the package from wheel, sdist, editable and clone, each in a new environment beside the Hub's `kernels`.

A new environment sees the packages of this one, so that nothing is downloaded and torch is not installed again. It does
not see this one's flashmask_hf: a plain path in a .pth file does not run the .pth files found there.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flashmask_hf

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
SITE_PACKAGES = sysconfig.get_path("purelib")

PROBE = """
import importlib.metadata, importlib.resources, json
import flashmask_hf, flashmask_hf.collators, flashmask_hf.kernels.portable.forward, kernels
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
print(json.dumps({
    "package": flashmask_hf.__file__,
    "kernels": kernels.__file__,
    "is_hub": hasattr(kernels, "get_kernel"),
    "registered": "flashmask" in AttentionInterface() and "flashmask" in AttentionMaskInterface(),
    "typed": importlib.resources.files(flashmask_hf).joinpath("py.typed").is_file(),
    "version": importlib.metadata.version("flashmask-hf"),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, without this process's settings of Python, git and Triton; return its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_", "TRITON_"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clone these files as they stand, of a checkout or of an unpacked archive, but not what git ignores."""
    folder = tmp_path_factory.mktemp("git")
    origin = folder / "origin"
    run("git", "init", "--quiet", origin, cwd=folder)
    files = ("git", "--git-dir", origin / ".git", "--work-tree", ROOT)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false")
    run(*files, "add", "--all", cwd=ROOT)
    run(*files, *author, "commit", "--quiet", "--no-verify", "--message", "copy", cwd=ROOT)
    run("git", "clone", "--quiet", origin, folder / "checkout", cwd=folder)
    return folder / "checkout"


def build(checkout: Path, folder: Path) -> tuple[Path, Path]:
    """Build an sdist and, from it, a wheel, with the date of a release."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=checkout)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def built(checkout: Path) -> tuple[Path, Path]:
    return build(checkout, checkout / "dist")


def install(folder: Path, *what: str | Path) -> Path:
    """Make an environment, install flashmask-hf in it, and return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site_packages) / "shared.pth").write_text(SITE_PACKAGES + "\n")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    run(python, "-m", "pip", "install", "--quiet", *options, *what, cwd=folder)
    return python


def probe(python: Path, cwd: Path, package: Path) -> None:
    """Assert that the package works in a process started in `cwd`, and is imported from the folder `package`."""
    found = json.loads(run(python, "-c", PROBE, cwd=cwd).splitlines()[-1])
    assert Path(found.pop("package")).parent.resolve() == package.resolve()
    assert Path(found.pop("kernels")).is_relative_to(SITE_PACKAGES)
    assert found == {"is_hub": True, "registered": True, "typed": True, "version": flashmask_hf.__version__}


def installed_package(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages")) / "flashmask_hf"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_distribution_installs_and_works(kind: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    python = install(tmp_path / "environment", wheel if kind == "wheel" else sdist)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    probe(python, elsewhere, installed_package(tmp_path / "environment"))


def test_an_editable_install_works_inside_and_outside_the_checkout(checkout: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "environment", "--editable", checkout)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for cwd in (elsewhere, checkout):
        probe(python, cwd, checkout / "flashmask_hf")


def test_a_clone_works_beside_its_installed_copy(checkout: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "environment", checkout)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    probe(python, elsewhere, installed_package(tmp_path / "environment"))
    # The working directory comes first on the path of `python -c`, so the clone hides the installed copy.
    probe(python, checkout, checkout / "flashmask_hf")


def test_distributions_hold_the_package_and_nothing_else(checkout: Path, built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    package = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "flashmask_hf").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    own = {"flashmask_hf/py.typed", "flashmask_hf/kernels/portable/forward.py", "flashmask_hf/collators/forest.py"}
    assert own <= package

    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (_,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert names == package
    assert fields["Version"] == flashmask_hf.__version__
    assert fields["Requires-Python"] == ">=3.10"
    assert set(fields.get_all("Provides-Extra", [])) == {"dev", "docs", "plot", "train"}

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not any(member.issym() for member in archive.getmembers())
    extra = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert names == package | extra


def test_builds_of_one_commit_are_equal_to_the_byte(checkout: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
    for path in (checkout / "flashmask_hf").rglob("*"):  # as another clone has it
        os.utime(path, (1.6e9, 1.6e9))
    assert [path.read_bytes() for path in build(checkout, tmp_path)] == [path.read_bytes() for path in built]


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {flashmask_hf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


ATTENTION = """
import warnings
import torch
warnings.simplefilter("error")
import flashmask_hf.kernels.eager.tiled, flashmask_hf.long_rows, flashmask_hf.parallel, flashmask_hf.sparse
from flashmask_hf.__main__ import main
q = torch.randn(1, 2, 40, 16, requires_grad=True)
flashmask_hf.flashmask_attention(q, q, q, flashmask_hf.masks.causal_document([[8, 32]])).sum().backward()
assert q.grad.isfinite().all()
assert main(["--no-self-test"]) == 0
"""

PROMISES = {
    "": ATTENTION + "\ntry:\n    flashmask_hf.register()\nexcept ModuleNotFoundError as error:\n    print(error.name)",
    "transformers": "import flashmask_hf\nfrom transformers import AttentionInterface\n"
    "import flashmask_hf.hf.packed.shared_prefill\nprint('flashmask' in AttentionInterface())",
    "train": "import flashmask_hf.collators, flashmask_hf.trainers\n"
    "from flashmask_hf.trainers.step_memory import available_host_bytes\nprint(available_host_bytes() > 0)",
    "plot": "from flashmask_hf import masks\nprint(masks.causal(64).plot())",
}
"""For each extra, code that needs what it brings, and prints; "transformers" is that package beside the attention."""

PRINTED = {"": "transformers", "transformers": "True", "train": "True"}


def needed(requirements: Sequence[str], extra: str, found: dict[str, Distribution]) -> None:
    """Add to `found` the installed distributions that `requirements` ask for with `extra`, and what they ask for."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for part in ("", *requirement.extras):
            if name == "flashmask-hf":  # an extra that holds another one
                needed(requirements, part, found)
            elif f"{name}[{part}]" not in found:
                found[f"{name}[{part}]"] = distribution = importlib.metadata.distribution(name)
                needed(distribution.requires or [], part, found)


@pytest.fixture(scope="module")
def unpacked(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("extra", PROMISES)
def test_an_extra_alone_brings_what_it_promises(extra: str, unpacked: Path, tmp_path: Path) -> None:
    """Run with nothing on the path but the wheel and the distributions that its metadata ask for, as links."""
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    requirements = Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    found: dict[str, Distribution] = {}
    needed([*requirements, *([extra] if extra == "transformers" else [])], extra, found)
    for distribution in found.values():
        for name in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            link = tmp_path / name
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(name))))
    code = f"import sys\nsys.path[:0] = {[str(unpacked), str(tmp_path)]}\n{PROMISES[extra]}"
    printed = run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path)
    assert printed.splitlines()[-1] == PRINTED.get(extra, printed.splitlines()[-1])
    brought = {"torch", "numpy", "transformers", "trl", "psutil", "matplotlib"} & {x.partition("[")[0] for x in found}
    assert (
        brought
        == {
            "": {"torch"},
            "transformers": {"torch", "numpy", "transformers"},
            "train": {"torch", "numpy", "transformers", "trl", "psutil"},
            "plot": {"torch", "numpy", "matplotlib"},
        }[extra]
    )
