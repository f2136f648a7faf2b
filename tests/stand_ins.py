"""What stands in for tensors on a GPU, and for the descriptors that kernels get of them."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmask_hf.kernels.descriptors import described, layout_of, template


class _OnGpu(torch.Tensor):
    is_cuda = True


def on_gpu(*tensors: torch.Tensor) -> list[Any]:
    """Tensors on the CPU that say otherwise."""
    return [x.as_subclass(_OnGpu) for x in tensors]


def describe(x: torch.Tensor, *block: int) -> Any:
    """The descriptor of `x` for tiles of shape `block`, as launches make it."""
    return described(template(TensorDescriptor, layout_of(x), *block), x)
