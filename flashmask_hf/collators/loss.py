"""Loss of diffusion language models on packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flashmask_hf.names import IGNORED


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

    Set `model.loss_function = diffusion_loss` to train in transformers' Trainer, which does not count a label at the
    start of a row, unlike `PackedDiffusionTrainer`.

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
