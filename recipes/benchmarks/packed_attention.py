"""Attention functions that take flashmask's place on the same packed rows, so that one trainer runs all of them.

`attention(name)` puts one of `FUNCTIONS` behind `attn_implementation="flashmask"`:

- `flashmask`: the package's own function.
- `sdpa`, `flex_attention`: SDPA with a dense mask, and FlexAttention with a `BlockMask`, made once per row.
- `flashmask_portable`: `flashmask` with kernels whose sums do not depend on which tiles a list has.
- `flashmask_unskipped`: the same with a plan that lists hidden tiles as partial ones. By the FlashMask paper (section
  4.4), skipping them changes no bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from peers import visible_pairs
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashmask_hf import FlashMask, flashmask_attention
from flashmask_hf import tile_plan as plan_in_torch
from flashmask_hf._call import operators
from flashmask_hf.hf.attention import attention_forward, layer_mask
from flashmask_hf.kernels.eager import tiled
from flashmask_hf.names import FLASHMASK

ROWS = 1024  # query rows of a dense mask that are made at a time

_converted_masks: weakref.WeakKeyDictionary[FlashMask, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What each function made of a mask; a mask lives as long as its row."""


def dense_mask(mask: FlashMask) -> Tensor:
    """Return a mask as bool [B, H, S, S], True where visible, made in parts."""
    length = mask.kv_len
    visible = mask.indices.new_empty(*mask.indices.shape[:2], length, length, dtype=torch.bool)
    for first in range(0, length, ROWS):
        rows = slice(first, min(first + ROWS, length))
        visible[:, :, rows] = mask.rows(rows).to_dense()
    return visible


def block_mask(mask: FlashMask) -> BlockMask:
    """Return FlexAttention's form of a mask with one batch entry and one head."""
    length, device = mask.kv_len, mask.device
    return create_block_mask(
        visible_pairs(mask), None, None, length, length, device=str(device), _compile=device.type == "cuda"
    )


def _with_mask(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Return what a layer calls from a function of (module, query, key, value, mask, scaling)."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        kwargs.pop("dropout", None)
        layer = layer_mask(module, query, key, mask, kwargs)
        return attend(module, query, layer.gather(key), layer.gather(value), layer.mask, scaling), None

    return forward


def _converted(convert: Callable[[FlashMask], Any], function: Callable[..., tuple[Tensor, Any]]) -> Any:
    """Return an attention function of transformers, for which a mask is converted once, as a layer calls it."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, scaling: float) -> Tensor:
        made = _converted_masks.setdefault(mask, {})
        if convert not in made:
            made[convert] = convert(mask)
        return function(module, q, k, v, made[convert], scaling=scaling)[0]

    return _with_mask(attend)


@_with_mask
def _portable(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, scaling: float) -> Tensor:
    impl = "triton" if q.is_cuda else "torch"
    return flashmask_attention(q, k, v, mask, scale=scaling, impl=impl).transpose(1, 2)


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "flashmask": attention_forward,
    "sdpa": _converted(dense_mask, sdpa_attention_forward),
    "flex_attention": _converted(block_mask, flex_attention_forward),
    "flashmask_portable": _portable,
    "flashmask_unskipped": _portable,
}
"""What `attention` takes."""


@contextlib.contextmanager
def attention(name: str) -> Iterator[None]:
    """Put one of `FUNCTIONS` behind `attn_implementation="flashmask"` in the context, which must contain the backward.

    A used batch keeps its plan, so `flashmask_unskipped` needs a batch of its own.
    """
    with contextlib.ExitStack() as stack:
        if name in ("flashmask_portable", "flashmask_unskipped"):
            # The steps of "torch" join several tiles of a list, so sums would depend on what the list holds.
            stack.enter_context(mock.patch.object(tiled, "_KEYS_PER_STEP", plan_in_torch.COLUMNS))
        if name == "flashmask_unskipped":
            stack.enter_context(
                mock.patch.object(operators, "_build_plan", partial(plan_in_torch.build_plan, skip=False))
            )
        AttentionInterface.register(FLASHMASK, FUNCTIONS[name])
        stack.callback(AttentionInterface.register, FLASHMASK, attention_forward)
        yield
