"""Stand-ins for the kernels of recurrent and convolutional layers, which need a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from flashmask_hf.hf import families
from flashmask_hf.hf.models import state_of

hands_on_boundaries = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers hands the documents' boundaries to kernels since 5.23; before, packed rows raise",
)

_KERNELS = {
    "causal_conv1d_fn": ({0}, "seq_idx"),
    "mamba2_chunk_scan": ({0, 1, 3, 4}, "seq_idx"),
    "torch_chunk_gated_delta_rule": ({0, 1, 2, "g", "beta"}, "cu_seqlens"),
}
"""For each kernel, its arguments with an axis of tokens and the keyword of its document boundaries."""


def with_stand_ins(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model that `build` makes, whose kernels run plain torch on each document by itself."""
    monkeypatch.setattr(families, "_can_import", lambda _: True)
    model = build()
    guarded = next(
        x for x in model.modules() if isinstance(x, transformers.PreTrainedModel) and state_of(x).is_recurrent
    )
    code = sys.modules[type(guarded).__module__]
    for name, (split, keyword) in _KERNELS.items():
        if hasattr(code, name):
            monkeypatch.setattr(code, name, _by_document(getattr(code, name).__wrapped__, split, keyword))
    monkeypatch.setattr(code, "mamba2_split_conv1d_scan_combined", _fused, raising=False)
    return model


def _by_document(function: Any, split: set[Any], keyword: str) -> Any:
    """Return a kernel that runs a function of plain torch on each document by itself, as the packages' kernels do."""

    def run(*args: Any, **kwargs: Any) -> Any:
        axis = 1 if "chunk" in function.__name__ else 2
        bounds = kwargs[keyword]  # a family that does not hand it on fails here
        if keyword == "seq_idx":
            assert bounds.dtype == torch.int32
            bounds = torch.cat([bounds.new_zeros(1), bounds[0].unique_consecutive(return_counts=True)[1].cumsum(0)])
        parts = []
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = [x.narrow(axis, start, stop - start) if i in split else x for i, x in enumerate(args)]
            named = {n: x.narrow(axis, start, stop - start) if n in split else x for n, x in kwargs.items()}
            parts.append(function(*own, **{n: x for n, x in named.items() if n not in ("seq_idx", "cu_seqlens")}))
        if isinstance(parts[0], tuple):
            return torch.cat([x for x, _ in parts], axis), parts[-1][1]
        return torch.cat(parts, axis)

    return run


def _fused(*_: Any, seq_idx: Any, **__: Any) -> None:
    """Stand in for the fused kernel of training, which the layers do without if it returns None."""
