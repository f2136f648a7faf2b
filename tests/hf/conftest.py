"""Every test of the backend starts with no keyword warned of."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashmask_hf.hf import attention, keywords


@pytest.fixture(autouse=True)
def _isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keywords, "_warned", set())
    monkeypatch.setattr(attention, "_checked", set())


@pytest.fixture
def no_compiled_code() -> Iterator[None]:
    """Drop what `torch.compile` has compiled, before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """Start a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
