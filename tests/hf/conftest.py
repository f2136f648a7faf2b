"""Every test of the backend starts with the same random state and with no keyword warned of."""

from collections.abc import Iterator

import pytest
import torch

from flashmask_hf.hf import attention, keywords


@pytest.fixture(autouse=True)
def _isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(keywords, "_warned", set())
    monkeypatch.setattr(attention, "_checked", set())


@pytest.fixture
def no_compiled_code() -> Iterator[None]:
    """Drop what `torch.compile` has compiled, before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
