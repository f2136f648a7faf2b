"""Losses of rankings: by pairs of answers (Bradley-Terry), and by whole rankings (Plackett-Luce)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def pairwise_loss(rewards: Tensor, beats: Tensor) -> Tensor:
    """Return the mean of -log sigmoid(r_i - r_j) over the pairs of each question in which answer i beats answer j.

    With two answers this is the Bradley-Terry loss of `trl.RewardTrainer`; with more, the loss of InstructGPT
    (https://huggingface.co/papers/2203.02155, section 3.5, equation 1).

    Args:
        rewards: rewards minus margins, [B, N].
        beats: bool [B, N, N], whether answer i is better than answer j; at least one pair per question.

    Returns:
        The loss of each question, [B].
    """
    return pair_mean(-nn.functional.logsigmoid(rewards[:, :, None] - rewards[:, None]), beats)


def plackett_luce_loss(rewards: Tensor, beats: Tensor) -> Tensor:
    """Return the negative log-likelihood of each question's ranking under the Plackett-Luce model.

    The likelihood is the product over answers of softmax(r_i) over the answer and those that it beats. Tied answers do
    not compete. Arguments and result are as in `pairwise_loss`, which it equals with two answers.
    """
    rivals = torch.where(beats, rewards[:, None] - rewards[:, :, None], -torch.inf)
    return torch.cat([torch.zeros_like(rivals[..., :1]), rivals], -1).logsumexp(-1).sum(1)


def pair_mean(values: Tensor, beats: Tensor) -> Tensor:
    """Return the mean of values [B, N, N] over the pairs of each question, [B]."""
    return torch.where(beats, values, 0.0).sum((1, 2)) / beats.sum((1, 2))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"pairwise": pairwise_loss, "listwise": plackett_luce_loss}
