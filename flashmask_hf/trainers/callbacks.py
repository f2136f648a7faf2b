"""Callbacks of all trainers: they report attention, and keep its results as memory allows."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from flashmask_hf.long_rows.checkpointing import KeptAttention, checkpointing_of
from flashmask_hf.names import FLASHMASK, NAMES
from flashmask_hf.trainers.step_memory import available_gpu_bytes

logger = get_logger(__name__)

MEASURED_STEPS = 2
"""Measured steps, which recompute attention. The first makes the optimizer's states."""


def add_callbacks(trainer: Any, model: Any) -> None:
    """Print which attention a trainer runs, and keep its results in checkpointed layers (`KeepAttention`).

    `model` is the model or its name, as given to the trainer. A model object whose attention skips no hidden tiles logs
    a warning.
    """
    trainer.add_callback(KeepAttention(trainer))
    name = _attention_of(trainer)
    trainer.accelerator.print(f"{type(trainer).__name__}: attn_implementation={name!r}.")
    if not isinstance(model, str) and name not in NAMES:
        logger.warning(
            f"The model given to {type(trainer).__name__} runs attention {name!r}, which skips no hidden tiles. "
            f"Load it with attn_implementation={FLASHMASK!r}, or call model.set_attn_implementation({FLASHMASK!r})."
        )


def _attention_of(trainer: Any) -> str:
    return trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()._attn_implementation


class KeepAttention(TrainerCallback):
    """Keeps attention's results in checkpointed layers (`keep_attention`) as far as GPU memory goes.

    The budget is the memory free at the peak of the first two steps, which keep nothing, as a batch larger than any
    before. On a CPU all results are kept. Nothing is done for another attention, in compiled models, with offloaded
    activations, reentrant checkpointing or the user's own choice (`context_fn`, or TRL's `selective`).
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept: KeptAttention | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the model; on a GPU, nothing is kept before memory is measured."""
        self.on_train_end(args, state, control)  # an earlier run may have ended in an error
        if (
            checkpointing_of(args)[1] is None
            or getattr(args, "activation_offloading", False)
            or args.torch_compile
            or _attention_of(self._trainer) not in NAMES
        ):
            return
        self._measures = self._trainer.accelerator.device.type == "cuda"
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self._kept = KeptAttention(model, limit=0 if self._measures else None)
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the budget to what is free at the peak of all steps, after a larger batch than before."""
        if self._kept is None or not self._measures:
            return
        self._steps += 1
        if self._steps >= MEASURED_STEPS and self._kept.has_grown:
            self._kept.set_limit(int(available_gpu_bytes()) - torch.cuda.max_memory_allocated())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the change of the model."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
