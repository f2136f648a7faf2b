"""Loss of token trees in which every path from a root to a leaf is learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.names import IGNORED


def tree_loss(
    logits: Tensor,
    labels: Any = None,
    vocab_size: int | None = None,
    *,
    shift_labels: Tensor | None = None,
    path_weights: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    **_: Any,
) -> Tensor:
    """Return the cross entropy of all paths of packed trees, as if each path were a row of its own.

    Set `model.loss_function = tree_loss` to train on the batches of `DataCollatorForTrees(per_path=True)`.

    Args:
        logits: [R, S, V].
        labels: ignored.
        vocab_size: ignored.
        shift_labels: int64 [R, W, S], required. Entry [r, w, s] is the token after token s on path w through it.
        path_weights: float32 [R, W, S], factors of the losses; None is 1.
        num_items_in_batch: divisor of the sum of the losses; None is the batch's number of labels.
        ignore_index: the entry of tokens without a label.

    Returns:
        Tensor: float32 []; 0 without a label.

    Raises:
        ValueError: `shift_labels` are missing, or not [R, W, S].

    Example:
        >>> shift_labels = torch.tensor([[[1, -100, -100], [2, -100, -100]]])  # token 0 is followed by 1 and by 2
        >>> tree_loss(torch.zeros(1, 3, 4), shift_labels=shift_labels).exp()
        tensor(4.)
    """
    if shift_labels is None or shift_labels.dim() != 3 or shift_labels.shape[::2] != logits.shape[:2]:
        got = None if shift_labels is None else list(shift_labels.shape)
        raise ValueError(
            f"shift_labels must be [R, W, S] for logits [R, S, V] = {list(logits.shape)}, got {got}; use the batches "
            "of DataCollatorForTrees(per_path=True)"
        )
    targets = shift_labels.to(logits.device).transpose(1, 2)  # [R, S, W]
    learned = targets != ignore_index
    scores = logits.float()
    losses = scores.logsumexp(-1, keepdim=True) - scores.gather(-1, targets.where(learned, 0))
    if path_weights is not None:
        losses = losses * path_weights.to(logits.device).transpose(1, 2)
    count: Any = learned.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(logits.device)
    return torch.where(learned, losses, 0.0).sum() / count
