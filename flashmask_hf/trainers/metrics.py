"""Metrics of packed rows in TRL's logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.mask import FlashMask


def log_sharing(trainer: Any, mode: str, indices: Tensor, sequences: Tensor) -> None:
    """Add `shared_tokens_saved`, over all ranks, and `mask_sparsity` to a TRL trainer's metrics.

    `sequences` is the attention mask [N, L] of the unpacked sequences; others are as in `log_sparsity`.
    """
    counts: Any = torch.stack([(indices > 0).sum(), sequences.sum()])
    packed_tokens, sequence_tokens = trainer.accelerator.reduce(counts).tolist()
    trainer._metrics[mode]["shared_tokens_saved"].append(1 - packed_tokens / sequence_tokens)
    log_sparsity(trainer, mode, indices)


def log_sparsity(trainer: Any, mode: str, indices: Tensor, *, skipped: bool = True) -> None:
    """Add `mask_sparsity` to a TRL trainer's metrics, at logging steps and in evaluation: it synchronises the host.

    `indices` are int32 [R, 1, S, 1 or 4], 0 for padding. The metric is 0 unless attention skips hidden tiles.
    """
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.state.logging_steps)) == 0:
        sparsity = FlashMask(indices, causal=indices.shape[-1] == 1).sparsity() if skipped else 0.0
        trainer._metrics[mode]["mask_sparsity"].append(sparsity)
