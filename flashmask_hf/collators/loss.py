"""Losses of packed rows: of token trees in which every path is learned, and of diffusion language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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


def diffusion_loss(
    logits: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    *,
    diffusion_labels: Tensor | None = None,
    diffusion_weights: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **_: Any,
) -> Tensor:
    """Return the weighted cross entropy of noised tokens per label, noised or not (BD3LM, MDLM, LLaDA).

    Set `model.loss_function = diffusion_loss` to train on batches of diffusion in transformers' Trainer, which does not
    count a label at the start of a row, unlike `PackedDiffusionTrainer`.

    Args:
        logits: [R, S, V].
        labels: int64 [R, S], which are counted.
        vocab_size: ignored.
        diffusion_labels: int64 [R, S], the noised token that each row predicts, or -100.
        diffusion_weights: float32 [R, S], factors of the losses.
        num_items_in_batch: divisor of the sum of the losses; None is the number of `labels`.

    Returns:
        Tensor: [], in float32 or in float64 as the logits; 0 without a noised token.

    Raises:
        ValueError: `labels`, `diffusion_labels` or `diffusion_weights` are missing, or not [R, S].

    Example:
        >>> labels, noised = torch.tensor([[1, 2, 3]]), torch.tensor([[1, -100, -100]])
        >>> weights = torch.tensor([[3.0, 0.0, 0.0]])
        >>> diffusion_loss(torch.zeros(1, 3, 4), labels, diffusion_labels=noised, diffusion_weights=weights).exp()
        tensor(4.)
    """
    if labels is None or diffusion_labels is None or diffusion_weights is None:
        raise ValueError("labels, diffusion_labels and diffusion_weights must be given; use a collator of diffusion")
    for name, given in {"diffusion_labels": diffusion_labels, "diffusion_weights": diffusion_weights}.items():
        if given.shape != logits.shape[:2]:
            raise ValueError(f"{name} must be [R, S] for logits {list(logits.shape)}, got {list(given.shape)}")
    targets, weights = (x.to(logits.device) for x in (diffusion_labels, diffusion_weights))
    noised = targets != IGNORED
    scores = logits[noised].to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(scores, targets[noised], reduction="none")
    count: Any = labels.ne(IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return (losses * weights[noised]).sum() / torch.as_tensor(count).clamp(min=1).to(logits.device)
