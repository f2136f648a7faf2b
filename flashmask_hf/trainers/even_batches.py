"""The same number of batches on every rank: collectives would wait forever otherwise."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.utils.data
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import broadcast_object_list, recursively_apply, send_to_device
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node


class EvenBatchesMixin:
    """Mixin of a trainer that takes the same number of batches on every rank.

    Each rank reads its own shards of a stream if they divide evenly, otherwise every n-th row. Epochs and evaluations
    end with the rank with the fewest rows, without batches that do not fill a training step: Trainer would add their
    gradients to the next epoch's. With an `_idle_batch`, all rows are evaluated. Evaluations report exact means over
    batches of unequal weight, which `prediction_step` must `_record`.
    """

    _ended: Any = None  # the iterator of a stream's epoch that has ended
    _is_idle: bool | None = None  # None outside of evaluations with idle batches

    def _idle_batch(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Return a batch of the same form that adds nothing to metrics, or None."""

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        if isinstance(dataset, IterableDataset):
            own = self.accelerator.process_index // self._copies, self.accelerator.num_processes // self._copies
            given = dataset._distributed
            if self._copies > 1 and given and (given.rank, given.world_size) != own:
                problem = f"must have split {own[0]} of {own[1]} of a stream, got {given.rank} of {given.world_size}"
                raise ValueError(f"ranks that share rows {problem}; leave split_dataset_by_node out")
            if own[1] > 1:
                dataset = copy.copy(dataset)
                dataset.__class__ = _DealtStream
                if not isinstance(self.accelerator.gather, partial):
                    self.accelerator.gather = partial(_gather_unequal, self.accelerator.gather)
        loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        sampler = getattr(loader, "batch_sampler", None)
        if not is_training and isinstance(sampler, BatchSamplerShard) and self._idle_batch({}) is not None:
            sampler.even_batches = False  # even batches would evaluate the first rows again
        return loader

    def _gather_evaluations(self, parts: int) -> None:
        """Make accelerate's gathers in evaluations keep each row once, or each of its `parts` that ranks compute.

        accelerate gathers as many rows from each rank, and cuts the last batch as if each rank had other rows.
        """
        state, gather = self.accelerator.gradient_state, self.accelerator.gather
        gather_objects, copies = self.accelerator.gather_for_metrics, self._copies // parts

        def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
            if use_gather_object and copies == 1:
                return gather_objects(input_data, use_gather_object)
            if self._is_idle:
                input_data = recursively_apply(lambda x: x[:0] if x.dim() else x, input_data)
            data = _gather_unequal(gather, input_data, copies)
            if self._is_idle is None and state.end_of_dataloader and state.remainder > 0:
                data = recursively_apply(lambda x: x[: parts * state.remainder], data)
            return data

        self.accelerator.gather_for_metrics = gather_for_metrics
        self.gather_function = partial(gather_for_metrics, use_gather_object=self.args.eval_use_gather_object)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, Any]:
        """Return a step's batches, as many on every rank; none after a stream has ended on any."""
        if not isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if epoch_iterator is self._ended:
            return [], None
        batches = list(islice(epoch_iterator, num_batches))
        if _counts(self, len(batches)).min() < num_batches:
            self._ended, batches = epoch_iterator, []
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _read_once(self, count: int) -> torch.Tensor:
        """Return 1 for each row of an evaluation's batch, 0 for rows that accelerate repeats, float32 [count]."""
        places = torch.arange(count, device=self.accelerator.device)
        places += self.accelerator.process_index // self._copies << 32
        return torch.isin(places, self.accelerator.gather_for_metrics(places)).float()

    def _record(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """Record the mean loss of a batch, its weight and, optionally, the weight of TRL's token metrics."""
        counts = [weight.to(loss.device) * self._counts_rows for weight in weights]
        vars(self).setdefault("_evaluated", []).append(torch.stack([loss.detach().float(), *counts]))

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run Trainer's evaluation loop on as many batches on every rank, with exact means."""
        metrics = self._metrics["eval"]
        metrics.clear()  # an earlier predict leaves its metrics, which are never logged
        self._evaluated: list[torch.Tensor] = []
        if self.accelerator.num_processes > 1:
            dataloader = _EvenBatches(dataloader, self)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if f"{metric_key_prefix}_loss" in output.metrics and self._evaluated:
            gathered = self.accelerator.gather(torch.stack(self._evaluated)[None])
            losses, weights, *others = gathered.cpu().double().unbind(2)  # [ranks, batches]
            read = (weights > 0) & (losses.isfinite() | (not self.args.logging_nan_inf_filter))
            if read.any():
                output.metrics[f"{metric_key_prefix}_loss"] = _mean(losses[read], weights[read])
            for name in ("entropy", "mean_token_accuracy"):
                if others and metrics[name] and others[0].sum():
                    metrics[name] = [_mean(torch.tensor(metrics[name]), others[0].sum(0))]
        return output


class _DealtStream(IterableDataset):
    """Stream that accelerate splits by `split_dataset_by_node`, unless it is split already."""

    @property
    def n_shards(self) -> int:
        """Number of shards: enough for any number of ranks."""
        return sys.maxsize

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Any:
        """Return the rows of one of `num_shards` ranks."""
        plain = copy.copy(self)
        plain.__class__ = IterableDataset
        return plain if self._distributed else split_dataset_by_node(plain, index, num_shards)


class _EvenBatches:
    """Loader for evaluation with as many batches on every rank."""

    def __init__(self, loader: Any, trainer: Any):
        self.loader, self.dataset, self.trainer = loader, loader.dataset, trainer

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches, last = iter(self.loader), None
        has_idle = self.trainer._idle_batch({}) is not None
        while True:
            batch = next(batches, None)
            found = _counts(self.trainer, int(batch is not None))
            if not found.all():
                if not found.any() or not has_idle:
                    self.trainer._is_idle = None
                    if batch is not None:
                        self.loader.end()  # otherwise it stays accelerate's active loader
                    return
                if last is None:  # a rank without any rows takes the form of another rank's batch
                    last = broadcast_object_list([send_to_device(batch, "cpu")], from_process=int(found.argmax()))[0]
            self.trainer._is_idle = batch is None if has_idle else None
            last = self.trainer._idle_batch(last) if batch is None else batch
            yield last


def _gather_unequal(gather: Any, data: Any, copies: int = 1) -> Any:
    """Gather nested tensors of unequal lengths, once from each `copies` neighbouring ranks, which share rows."""

    def gather_one(x: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return gather(x)[::copies]
        sizes = gather(torch.tensor([len(x)], device=x.device)).tolist()
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = gather(padded).unflatten(0, (len(sizes), max(sizes)))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)][::copies])

    return recursively_apply(gather_one, data, error_on_other_type=True)


def _mean(values: torch.Tensor, weights: torch.Tensor) -> float:
    return ((values * weights).sum() / weights.sum()).item()


def _counts(trainer: Any, count: int) -> torch.Tensor:
    """Return each rank's count, int64 [ranks], on the CPU; a ValueError if ranks that share rows differ."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return torch.tensor([count])  # without synchronising the host
    counts = accelerator.gather(torch.tensor(count, device=accelerator.device)).cpu()  # [] has no rows to pad
    if counts.unflatten(0, (-1, trainer._copies)).diff().any():
        problem = f"must read as many batches of a stream, got {counts.min()} and {counts.max()}"
        raise ValueError(f"ranks that share rows {problem}; give each the same stream")
    return counts
