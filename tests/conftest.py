"""Lanes: a test marked interpreter, gpu or hopper is skipped, with the reason, where its lane cannot run."""

import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: some tests ask for deterministic algorithms

import pytest
import torch
from support import requires

torch.set_num_threads(1)  # tests are small, and several workers share the cores


@pytest.fixture(autouse=True)
def _lane(request: pytest.FixtureRequest) -> None:
    for name in ("interpreter", "gpu", "hopper"):
        if request.node.get_closest_marker(name):
            requires(name)
