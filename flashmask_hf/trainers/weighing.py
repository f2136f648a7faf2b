"""Weights of labels in the loss of TRL's SFTTrainer.

The loss is sum(w * nll) / sum(abs(w)) over an optimizer step on all ranks: the outputs of TRL's fused head, per token,
are weighed before TRL sums them into loss and metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import compare_versions
from torch import Tensor

from flashmask_hf.names import DIFFUSION_LABELS, IGNORED, LABEL_WEIGHTS, SHIFT_LABEL_WEIGHTS


def label_count(batch: Mapping[str, Any]) -> Tensor:
    """Return the sum of the absolute weights of a batch's labels, float32 []."""
    return _shifted_weights(batch).abs().sum()


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the same form whose labels are ignored."""
    empty = {"labels": IGNORED, DIFFUSION_LABELS: IGNORED, LABEL_WEIGHTS: 0}
    return {**batch, **{name: torch.full_like(batch[name], x) for name, x in empty.items() if name in batch}}


def _shifted_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return the weight of each token's label, the next token, float32 [R, S - 1], or [R, S / N] in a shard."""
    if SHIFT_LABEL_WEIGHTS in batch:
        return batch[SHIFT_LABEL_WEIGHTS]
    if LABEL_WEIGHTS in batch:
        return batch[LABEL_WEIGHTS][..., 1:]
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
    return labels.ne(IGNORED).float()


def require_fused_head(option: str, way: str = "") -> None:
    """Raise a ValueError for an option that needs values per token of a model, which TRL has from 1.15 on."""
    if compare_versions("trl", "<", "1.15"):
        raise ValueError(f"{option} needs the fused head of trl>=1.15; install it{way and ', or ' + way}")


def with_changed_outputs(model: Any, change: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a model whose outputs of TRL's fused head, per token, are changed in place."""

    def call(**inputs: Any) -> Any:
        output = model(**inputs)
        if inputs.get("fused_lm_head"):  # else logits, for metrics
            change(output)
        return output

    return call


def check_weighing(args: Any, compute_loss_func: Any) -> None:
    """Raise a ValueError if the loss of a `trl.SFTConfig` cannot read weights of labels."""
    refused = {
        f"loss_type={args.loss_type!r}": args.loss_type == "dft",
        f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor,
        "compute_loss_func": compute_loss_func is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(f"{name} does not read the weights of labels; leave it out, or remove the weights")
    require_fused_head("the weighing of labels", "remove the weights")


class WeighingMixin:
    """Mixin of an SFT trainer whose batches may have `label_weights`; labels of other batches then have 1."""

    _weighs = False

    def _start_weighing(self) -> None:
        """Read weights from here on; every rank must, before a batch of any has weights."""
        check_weighing(self.args, self.compute_loss_func)
        self._weighs = True

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        if not self._weighs and any(LABEL_WEIGHTS in batch for batch in batch_samples):
            self._start_weighing()
        if not self._weighs or not batch_samples:
            return super()._get_num_items_in_batch(batch_samples, device)
        count = torch.stack([label_count(batch) for batch in batch_samples]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count / self._copies

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss with the weights of the batch's labels."""
        names = LABEL_WEIGHTS, SHIFT_LABEL_WEIGHTS
        if not self._weighs and any(name in inputs for name in names):
            self._start_weighing()
        if self._weighs:
            weigh = functools.partial(_weigh, weights=_shifted_weights(inputs), divisor=num_items_in_batch)
            model = with_changed_outputs(model, weigh)
            inputs = {name: x for name, x in inputs.items() if name not in names}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _weigh(output: Any, weights: Tensor, divisor: Any) -> None:
    """Multiply outputs per token by weights, float32, and the loss by what TRL's divisor is short of 1.

    None divides by the sum of the absolute weights.
    """
    weights = weights.to(output.log_probs.device)
    sizes = weights.abs()
    divisor = torch.as_tensor(sizes.sum() if divisor is None else divisor, device=weights.device)
    output.log_probs = output.log_probs * (weights / divisor.where(divisor > 0, 1.0).clamp(max=1.0))
    for name in ("label_mask", "entropy", "is_top1"):
        setattr(output, name, getattr(output, name) * sizes)
    output.loss = None  # has no weights
