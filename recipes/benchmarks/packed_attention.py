"""Attention functions that take flashmask's place on the same packed rows, so that one trainer runs all of them.

`attention(name)` puts one of `FUNCTIONS` behind `attn_implementation="flashmask"`:

- `flashmask`: the package's own function.
- `sdpa`, `flex_attention`: SDPA with a dense mask, and FlexAttention with a `BlockMask`, made once per row.
- `flashmask_portable`: `flashmask` with kernels whose sums do not depend on the list of tiles.
- `flashmask_unskipped`: the same with hidden tiles in the list, which by the FlashMask paper (section 4.4) changes no
  bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from peers import visible_pairs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashmask_hf import FlashMask, flashmask_attention
from flashmask_hf import tile_plan as plan_in_torch
from flashmask_hf._call import operators
from flashmask_hf.hf import layer_mask
from flashmask_hf.kernels.eager import tiled

ROWS = 1024  # query rows of a dense mask that are made at a time


def dense_mask(mask: FlashMask) -> Tensor:
    """Return a mask as bool [B, H, S, S], made in parts."""
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


def _converted(convert: Callable[[FlashMask], Any], forward: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return an attention function of transformers with the signature of `flashmask_attention`."""
    made: weakref.WeakKeyDictionary[FlashMask, Any] = weakref.WeakKeyDictionary()  # a mask lives as long as its row

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, *, scale: float | None, **_: Any) -> Tensor:
        if mask not in made:
            made[mask] = convert(mask)
        layer: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=True)
        return forward(layer, q, k, v, made[mask], scaling=scale)[0].transpose(1, 2)

    return attend


def _portable(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask, **options: Any) -> Tensor:
    return flashmask_attention(q, k, v, mask, impl="triton" if q.is_cuda else "torch", **options)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "flashmask": flashmask_attention,
    "sdpa": _converted(dense_mask, sdpa_attention_forward),
    "flex_attention": _converted(block_mask, flex_attention_forward),
    "flashmask_portable": _portable,
    "flashmask_unskipped": _portable,
}


@contextlib.contextmanager
def attention(name: str) -> Iterator[None]:
    """Put one of `FUNCTIONS` behind `attn_implementation="flashmask"` in the context, which must contain the backward.

    A used batch keeps its plan, so `flashmask_unskipped` needs a batch of its own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(layer_mask, "flashmask_attention", FUNCTIONS[name]))
        if FUNCTIONS[name] is _portable:
            # The steps of "torch" join several tiles of a list, so sums would depend on what the list holds.
            stack.enter_context(mock.patch.object(tiled, "_KEYS_PER_STEP", plan_in_torch.COLUMNS))
        if name == "flashmask_unskipped":
            build = partial(plan_in_torch.build_plan, skip=False)
            stack.enter_context(mock.patch.object(operators, "_build_plan", build))
        yield
