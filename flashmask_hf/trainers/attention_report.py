"""Which attention a trainer's model runs: a line when training starts, and a warning for another one."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from flashmask_hf.names import FLASHMASK, NAMES

__all__ = ["ReportAttention"]

logger = get_logger(__name__)


class ReportAttention(TrainerCallback):
    """Prints which attention a trainer's model runs when training starts.

    Args:
        trainer: a trainer of this package.
        model: the model that was given to the trainer, or its name. A model with an attention of another package logs
            a warning, since "flashmask" would skip the tiles between documents. A name does not: its attention is
            "flashmask" unless the arguments name another.
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        self._trainer = trainer
        name = self._attention
        if not isinstance(model, str) and name not in NAMES:
            logger.warning(
                f"The model given to {type(trainer).__name__} runs attention {name!r}, which skips no hidden tiles. "
                f"Load it with attn_implementation={FLASHMASK!r}, or call model.set_attn_implementation({FLASHMASK!r})."
            )

    @property
    def _attention(self) -> str:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return model.config.get_text_config()._attn_implementation

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the line, in the first process alone."""
        self._trainer.accelerator.print(f"{type(self._trainer).__name__}: attn_implementation={self._attention!r}.")
