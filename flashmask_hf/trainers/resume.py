"""State in checkpoints besides Trainer's: number of tokens, options of packing, place in a stream."""

from __future__ import annotations

import math
from typing import Any

import torch.utils.data

_KEY = "flashmask_hf"
"""Our entry among the states of callbacks in trainer_state.json."""
_ROWS = "per_device_train_batch_size x gradient_accumulation_steps x processes"
"""Name of the number of rows per optimizer step."""


class ResumeMixin:
    """Mixin of a TRL trainer whose resumed runs continue `num_tokens`, and skip trained rows."""

    _packed_by: dict[str, Any] | None = None
    """Options that decide how examples are packed into rows, by name; None for rows packed elsewhere."""
    _place: tuple[int, int] | None = None
    """For a stream, the epoch to resume in and its batches to skip."""

    def _count_tokens(self) -> int:
        """Return the number of tokens so far over all ranks. Every rank must call this."""
        return int(self._total_train_tokens)

    def _row_options(self) -> dict[str, Any]:
        """Return what decides which rows the steps so far have read, by name."""
        args, ranks = self.args, self.args.world_size // self._copies
        rows = self._train_batch_size * args.gradient_accumulation_steps
        options = {_ROWS: rows * (1 if self.accelerator.split_batches else ranks), **(self._packed_by or {})}
        workers = max(args.dataloader_num_workers, 1)
        if getattr(self.train_dataset, "num_shards", 1) > 1:  # of a stream, which ranks and workers divide
            options |= {"the number of ranks with other rows": ranks, "dataloader_num_workers": workers}
            if workers > 1:  # which take turns
                options["per_device_train_batch_size"] = self._train_batch_size
        return options

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        own: dict[str, Any] = {"num_tokens": self._count_tokens(), "packed_by": self._row_options()}
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            # Every step adds 1 / max_steps to the epoch.
            epoch = max(math.ceil(self.state.epoch) - 1, 0)
            own["epoch_and_steps"] = epoch, round((self.state.epoch - epoch) * self.state.max_steps)
        self.state.stateful_callbacks[_KEY] = {"args": {}, "attributes": own}
        super()._save_checkpoint(model, trial)

    def _load_callback_state(self) -> None:
        """Restore the number of tokens after Trainer has read a checkpoint; a ValueError if it has read other rows."""
        own = self.state.stateful_callbacks.pop(_KEY, {}).get("attributes", {})
        if "epoch_and_steps" in own:
            epoch, steps = own["epoch_and_steps"]
            self._place = epoch, steps * self.args.gradient_accumulation_steps
        self._total_train_tokens = own.get("num_tokens", self._total_train_tokens)
        before = own.get("packed_by") or {}
        for name, value in self._row_options().items():
            if before.get(name, value) != value and not self.args.ignore_data_skip:
                problem = f"{name} must be {before[name]!r}, as in the checkpoint, got {value!r}"
                way = "set it back, or set ignore_data_skip=True to start the epoch anew"
                if name == _ROWS and self.args.auto_find_batch_size:
                    way = "auto_find_batch_size changed it; leave that out and set them, or ignore_data_skip=True"
                raise ValueError(f"{problem}; {way}")
        super()._load_callback_state()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return the epoch and the batches to skip, which Trainer does not know for streams."""
        self._place = None
        start = super()._init_training_state(*args, **kwargs)
        return start if self._place is None or self.args.ignore_data_skip else self._place
