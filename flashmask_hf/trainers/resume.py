"""What a trainer's checkpoints hold besides Trainer's own state: the tokens so far, and how rows were packed."""

from __future__ import annotations

from typing import Any

__all__ = ["ResumeMixin"]

_KEY = "flashmask_hf"
"""Our entry among the states of callbacks in trainer_state.json."""


class ResumeMixin:
    """Part of a TRL trainer whose `num_tokens` goes on after a resume, and that skips the rows it has trained on."""

    args: Any
    state: Any
    _total_train_tokens: Any
    _packed_by: dict[str, Any] | None = None
    """Options that decide which rows the examples are packed into, by name; None where the rows were given."""

    def _count_tokens(self) -> int:
        """Return the number of tokens so far, over all processes, which all call this."""
        return int(self._total_train_tokens)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        parent: Any = super()
        own = {"num_tokens": self._count_tokens(), "packed_by": self._packed_by}
        self.state.stateful_callbacks[_KEY] = {"args": {}, "attributes": own}
        parent._save_checkpoint(model, trial)

    def _load_callback_state(self) -> None:
        """Restore the number of tokens; Trainer calls this right after it has read a checkpoint's state.

        Raises:
            ValueError: rows were packed otherwise than now, so that others would be skipped.
        """
        parent: Any = super()
        own = self.state.stateful_callbacks.pop(_KEY, {}).get("attributes", {})
        self._total_train_tokens = own.get("num_tokens", self._total_train_tokens)
        before = own.get("packed_by") or {}
        for name, value in (self._packed_by or {}).items():
            if before.get(name, value) != value and not self.args.ignore_data_skip:
                raise ValueError(
                    f"{name} must be {before[name]!r}, as in the checkpoint, got {value!r}: other rows would be "
                    "skipped. Set it back, or set ignore_data_skip=True to start the epoch anew."
                )
        parent._load_callback_state()
