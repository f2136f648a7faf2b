"""A picture of a run of supervised fine-tuning: its loss curve, and the mask of one packed row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmask_hf import FlashMask

__all__ = ["draw"]


def draw(trainer: Any, path: Path) -> None:
    """Write the picture of a trainer that has trained on packed rows.

    Args:
        trainer: a `PackedSFTTrainer` that packs its rows itself.
        path: file to write, of any suffix that matplotlib knows.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), dpi=150, layout="constrained")
    curve, mask = figure.subplots(1, 2)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    curve.plot([entry["step"] for entry in logged], [entry["loss"] for entry in logged], color="#3f6b8f")
    curve.set(xlabel="step", ylabel="loss", title="Training loss")
    row = trainer.data_collator([next(iter(trainer.train_dataset))])
    documents = int((row["position_ids"] == 0).sum())
    FlashMask(row["startend_row_indices"], causal=True).plot(ax=mask, title=f"Mask of a row of {documents} documents")
    mask.legend(loc="upper right", fontsize=8)
    figure.savefig(path)
