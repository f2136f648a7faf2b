"""The package installed four ways, each in an environment of its own, beside the Hub's `kernels` package.

An environment sees this one's packages, so that nothing is downloaded and torch is not installed again, but not this
one's flashmask_hf: a plain path in a .pth file does not run the .pth files found there.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import flashmask_hf

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SITE_PACKAGES = sysconfig.get_path("purelib")

PROBE = """
import importlib.metadata, importlib.resources, json
import flashmask_hf, flashmask_hf.collators, flashmask_hf.kernels.forward, kernels
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of this checkout as it stands, changes that are not committed included."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    origin = tmp_path / "origin"
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, origin / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.is_file():  # a deleted file is still listed
            copy.write_bytes(source.read_bytes())
    author = ("-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=origin)
    run("git", "add", "--all", cwd=origin)
    run("git", *author, "commit", "--quiet", "--no-verify", "--message", "copy", cwd=origin)
    run("git", "clone", "--quiet", origin, tmp_path / "checkout", cwd=tmp_path)
    return tmp_path / "checkout"


def build(checkout: Path) -> tuple[Path, Path]:
    """An sdist, and the wheel made from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=checkout)
    (sdist,), (wheel,) = checkout.glob("dist/*.tar.gz"), checkout.glob("dist/*.whl")
    return sdist, wheel


def install(folder: Path, *what: str | Path) -> Path:
    """The Python of a new environment with flashmask-hf installed in it."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site_packages) / "shared.pth").write_text(SITE_PACKAGES + "\n")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    run(python, "-m", "pip", "install", "--quiet", *options, *what, cwd=folder)
    return python


def probe(python: Path, cwd: Path, package: Path) -> None:
    """Run from cwd, everything works, and `package` is the folder that flashmask_hf comes from."""
    found = json.loads(run(python, "-c", PROBE, cwd=cwd).splitlines()[-1])
    assert Path(found.pop("package")).parent.resolve() == package.resolve()
    assert Path(found.pop("kernels")).is_relative_to(SITE_PACKAGES)
    assert found == {"is_hub": True, "registered": True, "typed": True, "version": flashmask_hf.__version__}


def installed_package(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages")) / "flashmask_hf"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_distribution(kind: str, checkout: Path, tmp_path: Path) -> None:
    sdist, wheel = build(checkout)
    python = install(tmp_path / "environment", wheel if kind == "wheel" else sdist)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    probe(python, elsewhere, installed_package(tmp_path / "environment"))


def test_editable(checkout: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "environment", "--editable", checkout)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for cwd in (elsewhere, checkout):
        probe(python, cwd, checkout / "flashmask_hf")


def test_clone(checkout: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "environment", checkout)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    probe(python, elsewhere, installed_package(tmp_path / "environment"))
    probe(python, checkout, checkout / "flashmask_hf")  # as python -c and -m: the folder comes first


def test_contents(checkout: Path) -> None:
    sdist, wheel = build(checkout)
    package = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "flashmask_hf").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"flashmask_hf/py.typed", "flashmask_hf/kernels/native.c", "flashmask_hf/collators/forest.py"} <= package

    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (_,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert names == package
    assert fields["Version"] == flashmask_hf.__version__
    assert fields["Requires-Python"] == ">=3.10"
    assert set(fields.get_all("Provides-Extra", [])) == {"dev", "plot"}

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not any(member.issym() for member in archive.getmembers())
    extra = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert names == package | extra
