"""What a trainer's checkpoints hold besides Trainer's own state: tokens so far, packing of rows, place in a stream."""

from __future__ import annotations

from typing import Any

import torch.utils.data

__all__ = ["ResumeMixin"]

_KEY = "flashmask_hf"
"""Our entry among the states of callbacks in trainer_state.json."""


class ResumeMixin:
    """Part of a TRL trainer whose `num_tokens` goes on after a resume, and that skips the rows it has trained on."""

    args: Any
    state: Any
    train_dataset: Any
    _total_train_tokens: Any
    _packed_by: dict[str, Any] | None = None
    """Options that decide which rows the examples are packed into, by name; None where the rows were given."""
    _place: tuple[int, int] | None = None
    """Epoch of a stream, and the number of its batches that the run which resumes has trained on; None otherwise."""

    def _count_tokens(self) -> int:
        """Return the number of tokens so far, over all processes, which all call this."""
        return int(self._total_train_tokens)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        parent: Any = super()
        own: dict[str, Any] = {"num_tokens": self._count_tokens(), "packed_by": self._packed_by}
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            epoch, part = divmod(self.state.epoch, 1)  # the part is of as many batches as all steps have
            own["place"] = int(epoch), round(part * self.state.max_steps * self.args.gradient_accumulation_steps)
        self.state.stateful_callbacks[_KEY] = {"args": {}, "attributes": own}
        parent._save_checkpoint(model, trial)

    def _load_callback_state(self) -> None:
        """Restore the number of tokens; Trainer calls this right after it has read a checkpoint's state.

        Raises:
            ValueError: rows were packed otherwise than now, so that others would be skipped.
        """
        parent: Any = super()
        own = self.state.stateful_callbacks.pop(_KEY, {}).get("attributes", {})
        self._place = own.get("place")
        self._total_train_tokens = own.get("num_tokens", self._total_train_tokens)
        before = own.get("packed_by") or {}
        for name, value in (self._packed_by or {}).items():
            if before.get(name, value) != value and not self.args.ignore_data_skip:
                raise ValueError(
                    f"{name} must be {before[name]!r}, as in the checkpoint, got {value!r}: other rows would be "
                    "skipped. Set it back, or set ignore_data_skip=True to start the epoch anew."
                )
        parent._load_callback_state()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return the epoch to resume in, and its batches to skip, which Trainer knows of data with a length only."""
        parent: Any = super()
        self._place = None
        start = parent._init_training_state(*args, **kwargs)
        return start if self._place is None or self.args.ignore_data_skip else self._place
