"""Callback with which the trainers keep attention's results in checkpointed layers where memory allows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from flashmask_hf.long_rows.budget import available_gpu_bytes
from flashmask_hf.long_rows.checkpointing import KeptAttention, checkpointing_of
from flashmask_hf.names import NAMES

__all__ = ["KeepAttention"]

MEASURED_STEPS = 2
"""Steps that recompute attention, in which a GPU's memory is measured. The first makes the optimizer's states."""


class KeepAttention(TrainerCallback):
    """Keeps attention's results in checkpointed layers (`keep_attention`) as far as the memory of the GPU goes.

    Two steps run without it. What then is free beside their peak is the budget. Results of batches that are larger than
    any before are not kept, and their step is measured, too. On a CPU all results are kept.

    It does nothing for another attention, in compiled models and with offloaded activations. Reentrant checkpointing,
    and what the user has chosen to keep (`context_fn`, or TRL's `selective`), stay as they are (`KeptAttention`).

    Args:
        trainer: a trainer of this package.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept: KeptAttention | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the model; on a GPU, nothing is kept before memory is measured."""
        self._close()  # an earlier run may have ended in an error
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if (
            checkpointing_of(args)[1] is None
            or getattr(args, "activation_offloading", False)
            or args.torch_compile
            or model.config.get_text_config()._attn_implementation not in NAMES
        ):
            return
        self._measures = self._trainer.accelerator.device.type == "cuda"
        self._kept = KeptAttention(model, limit=0 if self._measures else None)
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the budget to what is free beside the peak of all steps, after a step with a larger batch than before."""
        kept = self._kept
        if kept is None or not self._measures:
            return
        self._steps += 1
        if self._steps >= MEASURED_STEPS and kept.has_grown:
            kept.set_limit(int(available_gpu_bytes()) - torch.cuda.max_memory_allocated())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the change of the model."""
        self._close()

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
