"""Pictures of runs: the curve of the loss or the reward, and the mask of one packed row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from flashmask_hf import FlashMask
from flashmask_hf.names import VECTORS


def write(folder: object, what: str, draw: Callable[[Path], None]) -> None:
    path = Path(str(folder), "picture.png")
    try:
        draw(path)
        print(f"Picture of {what}: {path}")
    except ImportError:
        print("No picture: matplotlib is missing: pip install matplotlib")


def draw(trainer: Any, path: Path) -> None:
    row = trainer.data_collator([next(iter(trainer.train_dataset))])
    documents = int((row["position_ids"] == 0).sum())
    _draw(trainer, "loss", "Training loss", row[VECTORS], f"Mask of a row of {documents} documents", path)


def draw_group(trainer: Any, vectors: Tensor, path: Path) -> None:
    """Draw the reward of a trainer on shared prompts and the mask of the first group, from int32 [R, 1, S, 1]."""
    end = int(vectors[0, 0, 0, 0])  # of the first tree, which is a prompt and its completions
    group = vectors[:1, :, :end].cpu()
    _draw(trainer, "reward", "Mean reward", group, "Mask of a prompt and its completions", path)


def latest_row(model: Any) -> list[Tensor]:
    """Return a list that will contain the mask indices of a model's latest forward."""
    latest: list[Tensor] = []

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get(VECTORS) is not None:
            latest[:] = [kwargs[VECTORS]]

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return latest


def _draw(trainer: Any, metric: str, title: str, vectors: Tensor, mask_title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), dpi=150, layout="constrained")
    curve, mask = figure.subplots(1, 2)
    logged = [entry for entry in trainer.state.log_history if metric in entry]
    curve.plot([entry["step"] for entry in logged], [entry[metric] for entry in logged], color="#3f6b8f")
    curve.set(xlabel="step", ylabel=metric, title=title)
    FlashMask(vectors, causal=True).plot(ax=mask, title=mask_title)
    mask.legend(loc="upper right", fontsize=8)
    figure.savefig(path)
