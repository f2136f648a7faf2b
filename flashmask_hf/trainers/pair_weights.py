"""Weights of pairs in the loss of TRL's DPOTrainer.

With `use_weighting` (WPO), TRL multiplies each pair's loss by exp(mean(log_probs - log_sum_sq_probs)) of both answers:
the model's output `log_sum_sq_probs` takes the weights in.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashmask_hf.collators.columns import all_have
from flashmask_hf.collators.labels import WEIGHT
from flashmask_hf.names import PAIR_WEIGHTS
from flashmask_hf.trainers.weighing import require_fused_head, with_changed_outputs

_UNWEIGHED = ("aot", "aot_unpaired", "sft")
"""Loss types that are no mean of losses of pairs."""


def check_pair_weights(args: Any) -> None:
    """Raise a ValueError if the loss of a `trl.DPOConfig` cannot have weights of pairs."""
    found = [name for name in args.loss_type if name in _UNWEIGHED]
    if found:
        raise ValueError(f"loss_type={found[0]!r} is no mean over pairs, which weights need; remove the column weight")
    require_fused_head("the column weight", "remove the column")


class PairWeightsMixin:
    """Mixin of a DPO trainer whose batches may have `pair_weights`, float32 [pairs], at least 0."""

    _mean_weight: Tensor | None = None  # of a step's batches on all ranks, the mean of the sums of weights

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        names = [f"batch {index} of a step" for index in range(len(batch_samples))]
        if names and all_have(WEIGHT, [PAIR_WEIGHTS in batch for batch in batch_samples], names):
            sums = torch.stack([batch[PAIR_WEIGHTS].sum() for batch in batch_samples])
            self._mean_weight = self.accelerator.gather(sums.mean().to(device)).mean()
        return super()._get_num_items_in_batch(batch_samples, device)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if PAIR_WEIGHTS not in inputs:
            return super()._compute_loss(model, inputs, return_outputs)
        check_pair_weights(self.args)
        inputs = dict(inputs)
        weights = inputs.pop(PAIR_WEIGHTS)
        mean = self._mean_weight if model.training and self._mean_weight is not None else weights.sum()
        weights = weights * len(weights) / mean.where(mean > 0, 1.0)
        weigh = functools.partial(_weigh, weights=weights, has_weights=self.use_weighting)
        with mock.patch.object(self, "use_weighting", True):
            return super()._compute_loss(with_changed_outputs(model, weigh), inputs, return_outputs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's `prediction_step`, and record the mean loss of the batch's pairs and their weight."""
        accelerator = self.accelerator
        gather = accelerator.gather if accelerator.num_processes == 1 else accelerator.gather_for_metrics
        with mock.patch.object(accelerator, "gather", gather):  # TRL gathers rewards of ranks without a batch, too
            step = super().prediction_step(model, inputs, *args, **kwargs)
        weights = inputs.get(PAIR_WEIGHTS, torch.ones(len(inputs["attention_mask"]) // 2))
        self._record(step[0], weights.sum())
        return step


def _weigh(output: Any, weights: Tensor, has_weights: bool) -> None:
    """Make WPO's weights the weights of pairs, or the product of both if the loss `has_weights` of its own."""
    stock = output.log_sum_sq_probs if has_weights else output.log_probs.detach()
    halves = weights.to(stock.device).log().clamp(min=-200.0) / 2  # of 0: exp(-200) is 0 in float32
    output.log_sum_sq_probs = stock - torch.cat([halves, halves])[:, None]
