"""Checks of trees in the caller's mask indices, without reading a value back.

A branch's first token follows its parent, not its sibling's last token. Without `position_ids` a model numbers the
row from end to end. Its loss predicts the first token of a branch, or document, from the sibling or document before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.layer_mask import cached_mask
from flashmask_hf.hf.models import state_of
from flashmask_hf.hf.rules import Rule, Verdict, rule
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import IGNORED, PACKED_IDS, VECTORS
from flashmask_hf.torch_internals import device_assert

CHECKS: list[Rule] = []


def check_tree_positions(mask: FlashMask, position_ids: Tensor | None) -> None:
    """Assert that positions are not contiguous from one branch to the next, if a mask is of trees.

    In a mask of trees, of any two keys, all rows that see the later key see the earlier one, or none does. Positions of
    other masks, and of documents, may count through the row.

    Args:
        mask: mask of a whole row, Sq = Skv = S. A bidirectional form whose visible pairs are all causal is no tree.
        position_ids: int [B or 1, S], or [axes, B or 1, S], whose first axis counts; None if there are none.

    Raises:
        RuntimeError: the first position of a branch is not higher than its parent's, or higher than the position before
            it in the row; or there are branches and no positions (a device-side check).
    """
    _, branch, parent = _first_tokens(mask)
    fits, got = ~branch, "position_ids are missing"
    if position_ids is not None:
        got = "position_ids do not branch"
        position = position_ids.reshape(-1, *position_ids.shape[-2:])[0, :, None]
        position, parent, fits = torch.broadcast_tensors(position, parent, fits)
        fits = fits | ((position.gather(-1, parent) < position) & (position <= position.roll(1, -1)))
    device_assert(
        fits.all(),
        f"{VECTORS} are of a tree or a shared question, but {got}; pass depths as the collators do, or, if the mask "
        "only drops keys, mask.bidirectional().indices",
    )


def _subtree_ends(mask: FlashMask) -> Tensor:
    """Return one past the last row that sees each key, int [B, H, S]; S throughout a row of keys that is no tree.

    In a tree the rows that see a key are contiguous and hold its own.
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


def _first_tokens(mask: FlashMask) -> tuple[Tensor, Tensor, Tensor]:
    """Find the tokens of a causal mask that do not continue the token right before, which sees some row.

    A token after a hidden token, its possible parent, does not count. A call's checks and layers share the result.

    Returns:
        document: bool [B, H, S], whether a document starts: the token sees no other.
        branch: bool [B, H, S], whether a branch starts: the token sees earlier tokens, but not the one right before;
            False throughout a mask that is not of trees.
        parent: int64 [B, H, S], the last key that a token sees besides itself, in a mask of trees.
    """
    variant = ("first tokens", mask.causal)
    return cached_mask((mask.indices,), variant, lambda: _find_first_tokens(_subtree_ends(mask)), per_forward=False)


def _find_first_tokens(ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    length = ends.shape[-1]
    token = torch.arange(length, device=ends.device).expand(ends.shape).contiguous()
    ends = ends.to(torch.int64)
    real = ends > token
    ended = torch.searchsorted(torch.where(real, ends, length).sort(-1).values, token, right=True)
    depth = real.cumsum(-1) - ended  # the number of keys that a token sees
    # In a tree, the parent is the last earlier token whose depth is less by one.
    code = torch.where(real, depth, length + 1) * length + token
    ordered = code.sort(-1).values
    place = torch.searchsorted(ordered, code - length) - 1
    parent = ordered.gather(-1, place.clamp(min=0)) % length
    has_parent = real & (depth > 1)
    is_tree = ((ends.gather(-1, parent) >= ends) | ~has_parent).all(-1, keepdim=True)
    after_real = nn.functional.pad(real[..., :-1], (1, 0))
    return real & after_real & ~has_parent, has_parent & is_tree & after_real & (parent < token - 1), parent


def mask_of(call: Call) -> FlashMask | None:
    """Return the mask of the caller's indices, or None if their form does not fit."""
    indices = call.tensor(VECTORS, 4)
    if indices is None or indices.dtype != torch.int32 or indices.shape[3] not in (1, 2, 4):
        return None
    causal = not state_of(call.model.base_model).is_bidirectional and indices.shape[3] < 4
    return FlashMask(indices, causal) if causal or indices.shape[3] > 1 else None


def has_one_document(call: Call) -> Tensor | None:
    """Return whether a call has at most one document per row, bool []; None if it has no document boundaries."""
    mask, documents = mask_of(call), call.documents
    if mask is not None and call.positions is None:
        return ~_first_tokens(mask)[0].any()
    if mask is None or documents is None or mask.kv_len != documents.starts.shape[1]:
        return None if documents is None else documents.is_one_per_row()
    shown = (mask.indices[:, 0] > 0).any(-1)  # padding has positions 0
    return ((documents.starts & shown).sum(-1) <= 1).all()


def _shifted_labels(call: Call) -> tuple[FlashMask, Tensor] | None:
    """Return the mask of one head and the labels [B, S] that the model's loss shifts by one; None if one is missing."""
    model, mask, labels = call.model, mask_of(call), call.tensor("labels", 2)
    if mask is None or labels is None or mask.indices.shape[1] != 1 or model.base_model is model:
        return None
    shifts = call.named.get("shift_labels") is None and model.loss_function is LOSS_MAPPING["ForCausalLM"]
    return (mask, labels) if shifts and call.named.get(PACKED_IDS) is None else None


@rule(CHECKS, "`labels` of a shard of a row", VECTORS, "labels")
def _are_labels_whole(call: Call) -> Verdict | None:
    found = _shifted_labels(call)
    if found is None or found[1].shape[1] >= found[0].kv_len:
        return None
    return False, (
        f"labels cover [B, {found[1].shape[1]}], a shard of the row, and the model's loss would lose one at its edge; "
        "pass shift_labels (flashmask_hf.parallel.RowSplit.shard)"
    )


@rule(CHECKS, "`labels=input_ids`: a branch learned from its sibling", VECTORS, "labels")
def _is_no_first_token_learned(call: Call) -> Verdict | None:
    found = _shifted_labels(call)
    if found is None or found[1].shape[1] != found[0].kv_len:
        return None
    document, branch, _ = _first_tokens(found[0])
    first, learned = (document | branch)[:, 0], found[1] != IGNORED
    return ~(first & learned.to(first.device)).any(), (
        "labels name the first token of a branch or of a packed document, which the model's loss predicts from the "
        "token before in the row; set it to -100 there, as the collators of flashmask_hf do"
    )


@rule(CHECKS, "`labels` that the token before sees, under a causal loss", VECTORS, "labels")
def _is_no_label_seen(call: Call) -> Verdict | None:
    found = _shifted_labels(call)
    if found is None or found[0].causal or found[1].shape[1] != found[0].kv_len:
        return None
    mask, labels = found
    tokens = call.tensor("input_ids", 2)
    if tokens is None or tokens.shape != labels.shape:
        return None
    before = torch.arange(mask.kv_len - 1, device=mask.device)
    pairs = [(start[:, 0, 1:], end[:, 0, 1:]) for start, end in mask.intervals()]
    hidden = torch.stack([(start <= before) & (before < end) for start, end in pairs]).any(0)
    given = (tokens == labels.to(tokens.device)).to(mask.device)[:, 1:]  # shifted masked diffusion hides its labels
    return (given <= hidden).all(), (
        "labels name a token that the token before sees, so the model's loss would teach to copy it; set it to -100, "
        "or, for batches of diffusion, model.loss_function = diffusion_loss (flashmask_hf.collators)"
    )
