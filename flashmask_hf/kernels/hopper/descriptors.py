"""Tensor descriptors of the Hopper kernels: templates for `launch.Launch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.kernels.hopper.gluon import TensorDescriptor, gl
from flashmask_hf.kernels.launch.descriptors import template
from flashmask_hf.kernels.launch.tensor_layout import Layout

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def tile_template(layout: Layout, *block: int) -> Any:
    """Return a template for tiles of shape `block`, in the shared-memory layout of matrix products."""
    return template(_descriptor, layout, *block)


def row_template(layout: Layout, rows: int, width: int | None = None) -> Any:
    """Return a template for tiles [rows, width] of tensors [B, H, S, D]; the default width is D.

    Elements past S and D load as 0 and are not stored; mbarriers count the bytes of whole tiles.
    """
    return tile_template(layout, 1, 1, rows, width or layout.shape[3])


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    layout: Any = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
    return TensorDescriptor(x, shape, strides, block, layout)
