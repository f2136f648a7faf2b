"""Trees in a caller's vectors: set-ups that do not fit their branches, found without reading a value back.

A row of a shared question or a tree is in depth-first order, and a branch's first token stands at the depth after its
parent's, not after its sibling's last token. Without `position_ids` a model numbers the row from end to end, and
attention is that of other positions. A model's own loss predicts the first token from the sibling's last one, and that
of a packed document from the last one of the document before. None of these is an error to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import IGNORED, VECTORS
from flashmask_hf.torch_internals import device_assert

__all__ = ["check_labels", "check_tree_positions", "follows_document", "subtree_ends"]


def check_tree_positions(mask: FlashMask, position_ids: Tensor | None) -> None:
    """Raise if a mask is that of trees and positions count on from one branch to the next; nothing is read back.

    A mask is that of trees if any two keys are seen by rows of which those of the later key are among those of the
    earlier one, or that have none in common. Windows and evicted keys overlap in other ways, and documents have no
    branches: the positions of either may count on through the row.

    Args:
        mask: mask of a whole row, Sq = Skv = S. A mask of the form that is not causal is not looked at if all it shows
            is causal: that is how masks are passed that drop keys and look like trees.
        position_ids: int [B or 1, S], or [axes, B or 1, S], of which the first axis counts; None if the layer does not
            get them.

    Raises:
        RuntimeError: the first position of a branch is not higher than its parent's, or is higher than that of the
            token before it in the row; or there are branches and no positions (a device-side check).
    """
    branch, parent = _branches(subtree_ends(mask))
    wrong, got = branch, "this layer gets no position_ids"
    if position_ids is not None:
        position = position_ids.reshape(-1, *position_ids.shape[-2:])[0, :, None]
        shape = torch.broadcast_shapes(position.shape, branch.shape)
        position, parent = position.expand(shape), parent.expand(shape)
        follows = (position.gather(-1, parent) < position) & (position <= position.roll(1, -1))
        wrong, got = branch & ~follows, "position_ids do not branch"
    device_assert(
        ~wrong.any(),
        f"{VECTORS} are of a tree or a shared question, but {got}; pass depths as the collators do, or, if the mask "
        "only drops keys, mask.bidirectional().indices",
    )


def check_labels(vectors: Any, labels: Any) -> None:
    """Raise if a model's loss over packed rows predicts a token from one that the token does not see.

    Args:
        vectors: the call's `startend_row_indices`, read as in `check_tree_positions`; anything but int32 [B, 1, S, n]
            is not looked at.
        labels: int64 [B, S] that the loss shifts by one, -100 where there is nothing to learn; anything else is not
            looked at.

    Raises:
        ValueError: the labels are those of a part of the vectors' row.
        RuntimeError: the first token of a branch, or of a document after another, has a label (a device-side check).
    """
    if not isinstance(vectors, Tensor) or vectors.dtype != torch.int32 or vectors.shape[1:2] != (1,):
        return
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return
    if labels.shape[1] < vectors.shape[2]:
        raise ValueError(
            f"labels are those of a part of a row, [B, {labels.shape[1]}], at whose edge the model's loss would lose "
            "one; shift them before the row is split and pass shift_labels (flashmask_hf.parallel.RowSplit.shard)"
        )
    if labels.shape[1] == vectors.shape[2]:
        ends = subtree_ends(FlashMask(vectors, causal=vectors.shape[3] < 4))
        learned = (labels != IGNORED).to(ends.device)
        device_assert(
            ~(_branches(ends)[0][:, 0] & learned).any(),
            "labels name the first token of a branch, which the model's loss predicts from the last one of its "
            "sibling; set it to -100 there, or take a trainer of flashmask_hf",
        )
        device_assert(
            ~(follows_document(ends[:, 0]) & learned).any(),
            "labels name the first token of a packed document, which the model's loss predicts from the last one of "
            "the document before; set it to -100 there, as the collators of flashmask_hf do",
        )


def follows_document(ends: Tensor) -> Tensor:
    """Return which tokens start a document right after another's last token; bool of the shape of `ends`, [..., S].

    Args:
        ends: int [..., S], one past the last row that sees each key, as `subtree_ends` returns it.
    """
    token = torch.arange(ends.shape[-1], device=ends.device)
    real = ends > token
    last = torch.where(real, ends, 0).cummax(-1).values  # of all keys up to each
    after_real, closed = (nn.functional.pad(x[..., :-1], (1, 0)) for x in (real, last))
    return real & after_real & (closed <= token)


def subtree_ends(mask: FlashMask) -> Tensor:
    """Return one past the last row that sees each key, int [B, H, S]; S throughout a row of keys that is no tree.

    In a tree the rows that see a key are next to each other, from its own on, or, where a question sees itself whole,
    from an earlier one on.
    """
    length = mask.kv_len
    if mask.indices.shape[-1] == 1:
        return mask.indices[..., 0]
    pieces = mask.visible_intervals(length)
    first, last = outer_rows(pieces, length)
    count = torch.stack([(end - start).clamp(min=0) for start, end in pieces]).sum(0)
    key = torch.arange(length, device=mask.device)
    together = (last == 0) | ((count == last - first) & (first <= key) & (key < last))
    nested = together.all(-1, keepdim=True)
    if not mask.causal:
        nested = nested & (first < key).any(-1, keepdim=True)
    return torch.where(nested, last, length)


def _branches(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Find the branches of a causal mask: the tokens that see earlier ones, but not the one before them.

    A token after one that is hidden from all does not count: what is hidden may be its parent.

    Args:
        ends: int [B, H, S], LTS.

    Returns:
        branch: bool [B, H, S], whether a branch starts; False throughout where the mask is not that of trees.
        parent: int64 [B, H, S], the last key that a token sees besides itself, where the mask is that of trees.
    """
    length = ends.shape[-1]
    token = torch.arange(length, device=ends.device).expand(ends.shape).contiguous()
    ends = ends.to(torch.int64)
    real = ends > token
    ended = torch.searchsorted(torch.where(real, ends, length).sort(-1).values, token, right=True)
    depth = real.cumsum(-1) - ended  # the number of keys that a token sees
    # In a tree, the parent is the last earlier token whose depth is less by one. As depths grow by at most one from
    # token to token, there always is such a token.
    code = torch.where(real, depth, length + 1) * length + token
    ordered = code.sort(-1).values
    place = torch.searchsorted(ordered, code - length) - 1
    parent = ordered.gather(-1, place.clamp(min=0)) % length
    has_parent = real & (depth > 1)
    nested = ends.gather(-1, parent) >= ends
    is_tree = (nested | ~has_parent).all(-1, keepdim=True)
    after_real = nn.functional.pad(real[..., :-1], (1, 0))
    return has_parent & is_tree & after_real & (parent < token - 1), parent
