"""The caller's mask indices, joined with the padding, window and positions of one kind of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.checks.trees import check_tree_positions
from flashmask_hf.hf.documents import run_bounds
from flashmask_hf.hf.layer_mask import LayerMask, cached_mask, hidden_keys
from flashmask_hf.hf.windows import apply_window
from flashmask_hf.intervals import hide_keys
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import VECTORS
from flashmask_hf.torch_internals import device_assert


def may_attend_to_encoder(config: Any) -> bool:
    """Return whether layers with this config may attend to an encoder's tokens, whose documents are others."""
    return getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)


def check_form(vectors: Any, causal: bool, config: Any) -> None:
    """Check the dtype and bounds of mask indices, and that this config's model takes them."""
    if may_attend_to_encoder(config):
        raise NotImplementedError(
            f"{VECTORS} would reach the encoder, the decoder and the attention between them alike; models with an "
            "encoder and a decoder do not take them: use attention_mask"
        )
    if not isinstance(vectors, Tensor) or vectors.dtype != torch.int32:
        got = vectors.dtype if isinstance(vectors, Tensor) else type(vectors).__name__
        raise TypeError(f"{VECTORS} must be an int32 tensor [B, 1, S, n], got {got}; pass mask.indices of a FlashMask")
    shape = list(vectors.shape)
    if vectors.dim() != 4 or shape[-1] not in (1, 2, 4):
        raise ValueError(f"{VECTORS} must have shape [B, 1, S, n] with n = 1, 2 or 4, got {shape}")
    if shape[-1] == 1 and not causal:
        raise ValueError(
            f"{VECTORS} with n = 1 describe a causal mask, but this layer is not causal (is_causal=False); pass n = 2 "
            "or 4 columns, for example FlashMask.bidirectional().indices (and none to a model with encoder and decoder)"
        )


def supplied_mask(
    vectors: Tensor,
    hooked: Tensor | None,
    causal: bool,
    window: int | None,
    position_ids: Tensor | None,
    form: Callable[[LayerMask], Any] = lambda mask: mask,
) -> Any:
    """Return the mask of the caller's mask indices `vectors`, in a window of `window` positions.

    The hook's mask indices `hooked` add padding and blocks, which with n = 1 see themselves whole in their document. A
    bidirectional layer's window has two sides. `form` makes what is returned and cached.
    """
    if window is not None and position_ids is not None and position_ids.dim() != 2:
        raise NotImplementedError(
            f"sliding_window={window} with {VECTORS} needs position_ids [B, S], got {list(position_ids.shape)}; "
            "use a model without sliding windows"
        )
    two_sided = not causal
    causal = causal and vectors.shape[-1] < 4

    def build() -> Any:
        if window is not None:  # which would cut what is out of range off; other masks are checked with their plan
            # A compiler would specialize on a length in the message.
            device_assert(
                ((vectors >= 0) & (vectors <= vectors.shape[2])).all(),
                f"{VECTORS} must lie in 0..S, the row's length, as they do in a mask made for this row; "
                "FlashMask.validate(q_len=S) names the columns",
            )
        if causal and vectors.shape[-1] == 2:
            # Columns LTS, UTE of a mask that is not causal have LTS > UTE somewhere.
            device_assert(
                (vectors[..., 0] <= vectors[..., 1]).all(),
                f"{VECTORS} with n = 2 on a causal layer are LTS, LTE, but a column has LTS > LTE; pass a mask that "
                "is not causal as mask.bidirectional().indices (n = 4), an empty interval as start == end",
            )
        mask = FlashMask(vectors.detach() if hooked is None else _hide_padding(vectors, hooked, causal), causal)
        check_tree_positions(mask, position_ids)
        blocks = None
        if hooked is not None and hooked.shape[2] == 4 and not two_sided:
            mask, blocks = _add_blocks(mask, hooked.detach(), torch.compiler.is_compiling() and window is not None)
        if window is None:
            return form(LayerMask(mask))
        return form(apply_window(mask, window, position_ids, two_sided=two_sided, blocks=blocks))

    sources = tuple(x for x in (vectors, hooked, position_ids) if x is not None)
    variant = ("supplied", causal, window, two_sided, form)
    return cached_mask(sources, variant, build, per_forward=hooked is not None)


def shown_earlier(mask: FlashMask) -> Tensor:
    """Return which keys are seen by a row before their own, bool [B or 1, H, S], of a mask with Sq = Skv = S."""
    row = torch.arange(mask.kv_len, device=mask.indices.device, dtype=torch.int32)
    pieces = mask.visible_intervals(mask.kv_len)
    return torch.stack([(start < end) & (start < row) for start, end in pieces]).any(0)


def _add_blocks(mask: FlashMask, hooked: Tensor, keep_causal: bool) -> tuple[FlashMask, Tensor]:
    """Return a mask whose blocks see themselves whole, cut at documents, and how far each block sees its keys.

    Args:
        mask: mask of a whole row, Sq = Skv = S. Only n = 1 is changed.
        hooked: columns LTS, LTE, UTS, UTE, int32 [B or 1, 1, 4, S].
        keep_causal: whether to refuse blocks and leave the mask causal.

    Returns:
        The mask, and int32 [B or 1, 1, S], the end of each key's block, or of the window that cuts it.

    Raises:
        RuntimeError: the mask hides tokens of a block from each other within a document (a device-side check).
    """
    length = mask.kv_len
    row = torch.arange(length, device=hooked.device, dtype=torch.int32)
    last, until, since, first = hooked.unbind(2)
    is_traced = (until >= length) & (since <= 0)  # each key is seen by the rows first..last
    _, block_end = run_bounds(first[..., 1:] == first[..., :-1])
    limit = torch.where(is_traced, torch.minimum(last, block_end), 0).to(torch.int32)
    if not mask.causal:
        return mask, limit
    earlier = shown_earlier(FlashMask(hooked.transpose(2, 3), causal=False))
    start = row
    if mask.indices.shape[-1] == 1 and not keep_causal:
        ends = mask.indices[..., 0]
        subtree = run_bounds(ends[..., 1:] == ends[..., :-1])[0].to(torch.int32)
        start = torch.where(is_traced, torch.maximum(first, subtree), row)
        before = ends.gather(-1, (start.expand_as(ends) - 1).clamp(min=0).long())
        earlier = earlier & (start > first) & (before > start)
        columns = torch.broadcast_tensors(ends, torch.full_like(row, length), torch.zeros_like(row), start)
        mask = FlashMask(torch.stack(columns, -1).contiguous(), causal=False)
    device_assert(
        ~earlier.any(),
        f"causal {VECTORS} hide tokens of a block (an image) that the model shows each other; pass "
        "position_ids that start again at 0 with each document, or n = 4 columns that show the blocks",
    )
    return mask, limit


def _hide_padding(vectors: Tensor, hooked: Tensor, causal: bool) -> Tensor:
    """Return the mask indices with each key hidden that the hook's columns hide from all rows."""
    length = vectors.shape[2]
    return torch.stack(hide_keys(vectors.unbind(-1), hidden_keys(hooked, length), causal, length), -1)
