"""An implementation of attention that stands in for kernels: it counts its passes, and may refuse calls or fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmask_hf._call import call, implementations
from flashmask_hf._call.implementations import REGISTRY, Implementation, Request, Run


class Fake(Implementation):
    """Computes what another implementation computes.

    Args:
        name: value of `impl`.
        real: the implementation that computes.
        refusal: what it cannot serve.
        error: raised by its passes when they run.
        takes: arguments that may differ from their defaults.
    """

    decodes = False

    def __init__(
        self,
        name: str = "fake",
        real: str = "torch",
        refusal: str | None = None,
        error: Exception | None = None,
        takes: tuple[str, ...] = Implementation.takes,
    ):
        self.name, self.refusal, self.error, self.takes = name, refusal, error, takes  # type: ignore[misc]
        self.real = next(one for one in REGISTRY if one.name == real)
        self.prepared: list[str] = []
        self.ran: list[str] = []

    def limit(self, request: Request) -> str | None:
        return self.refusal

    def left_out(self, device: torch.device) -> str | None:
        return None

    def _stand_in(self, name: str, run: Run) -> Run:
        self.prepared.append(name)

        def fails_or_runs(*tensors: Any) -> Any:
            self.ran.append(name)
            if self.error is not None:
                raise self.error
            return run(*tensors)

        return fails_or_runs

    def forward(self, *problem: Any) -> Run:
        return self._stand_in("forward", self.real.forward(*problem))

    def backward(self, *problem: Any) -> Run:
        return self._stand_in("backward", self.real.backward(*problem))


def register(monkeypatch: pytest.MonkeyPatch, *fakes: Implementation) -> None:
    """Put implementations before all others, for calls that nothing has resolved yet."""
    monkeypatch.setattr(implementations, "REGISTRY", [*fakes, *REGISTRY])
    monkeypatch.setattr(call, "_calls", {})
    monkeypatch.setattr(call, "_failed", set())
