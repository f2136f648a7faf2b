"""Search in the modules of a model."""

from __future__ import annotations

import itertools

from torch import nn


def common_module(model: nn.Module, names: list[str]) -> nn.Module:
    """Return the innermost module with a forward that is or contains all named modules, or the model."""
    paths = [name.split(".") for name in names]
    shared = [x[0] for x in itertools.takewhile(lambda x: len(set(x)) == 1, zip(*paths, strict=False))]
    while shared and isinstance(model.get_submodule(".".join(shared)), (nn.ModuleList, nn.ModuleDict)):
        shared.pop()
    return model.get_submodule(".".join(shared))
