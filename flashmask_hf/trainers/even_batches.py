"""The same number of batches on every rank: collectives would wait forever otherwise."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.utils.data
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import broadcast_object_list, gather_object, recursively_apply, send_to_device
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node


class EvenBatchesMixin:
    """Mixin of a trainer that takes the same number of batches on every rank.

    Each rank reads its own shards of a stream if they divide evenly, otherwise every n-th row. Epochs end with the rank
    with the fewest rows, without batches that do not fill a training step: Trainer would add their gradients to the
    next epoch's. Evaluations read each row once, and report exact means over batches of unequal weight, which
    `prediction_step` must `_record`.
    """

    _ended: Any = None  # the iterator of a stream's epoch that has ended
    _found: list[bool] | None = None  # for each rank, whether it has a batch of the evaluation

    def _idle_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of the same form, for a rank without one; it adds nothing to metrics."""
        return batch

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
        if not is_training and isinstance(sampler, BatchSamplerShard):
            sampler.even_batches = False  # even batches would evaluate the first rows again
        return loader

    def _gather_evaluations(self, parts: int) -> None:
        """Make accelerate's gathers in evaluations keep each row once, or each of its `parts` that ranks compute.

        accelerate gathers as many rows from each rank, and cuts the last batch as if each rank had other rows.
        """
        if self.args.batch_eval_metrics:
            problem = "batch_eval_metrics=True needs one process, since ranks end an evaluation at different batches"
            raise ValueError(f"{problem}; set it to False")
        state, gather = self.accelerator.gradient_state, self.accelerator.gather
        copies = self._copies // parts

        def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
            ranks = [*range(0, self.accelerator.num_processes, copies)]  # ranks that share rows are neighbours
            last = None
            if self._found is not None:
                ranks = [rank for rank in ranks if self._found[rank]]
            elif state.end_of_dataloader and state.remainder > 0:
                last = parts * state.remainder
            if not use_gather_object:
                with contextlib.suppress(TypeError):  # of other types than tensors, as accelerate does
                    return recursively_apply(lambda x: x[:last], _gather_unequal(gather, input_data, ranks))
            objects = gather_object([[*input_data]])
            return [x for rank in ranks for x in objects[rank]][:last]

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

    def _record(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """Record the mean loss of a batch, its weight and, optionally, the weight of TRL's token metrics."""
        read = self._counts_rows and (self._found is None or self._found[self.accelerator.process_index])
        counts = [weight.to(loss.device) * read for weight in weights]
        vars(self).setdefault("_evaluated", []).append(torch.stack([loss.detach().float(), *counts]))

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run Trainer's evaluation loop on as many batches on every rank, with exact means.

        Raises:
            ValueError: FSDP2 has not prepared the model, which it does in training alone.
        """
        if self.accelerator.is_fsdp2 and not self.accelerator._models:
            way = "set eval_on_start=True and train, or evaluate in one process"
            raise ValueError(f"FSDP2 shards a model beside its optimizer, so evaluation must follow training; {way}")
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
        while True:
            batch = next(batches, None)
            found = _counts(self.trainer, int(batch is not None))
            self.trainer._found = found.bool().tolist() if found.any() else None
            if not found.any():
                return
            if not found.all() and last is None:  # a rank without any rows takes the form of another rank's batch
                last = broadcast_object_list([send_to_device(batch, "cpu")], from_process=int(found.argmax()))[0]
            last = self.trainer._idle_batch(last) if batch is None else batch
            yield last


def _gather_unequal(gather: Any, data: Any, ranks: list[int] | None = None) -> Any:
    """Gather nested tensors of unequal lengths from some ranks, or all."""

    def gather_one(x: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return gather(x)[ranks or ...]
        sizes = gather(torch.tensor([len(x)], device=x.device)).tolist()
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = gather(padded).unflatten(0, (len(sizes), max(sizes)))
        return torch.cat([parts[rank, : sizes[rank]] for rank in ranks or range(len(sizes))])

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
