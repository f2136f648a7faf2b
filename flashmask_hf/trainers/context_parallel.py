"""Rows longer than one GPU in TRL's trainers: accelerate's `cp` mesh, with the exchange of `flashmask_hf.parallel`.

accelerate (`ParallelismConfig(cp_size=N)`, with FSDP2) gives each group of N processes the same batches, and shards the
model over all processes. Its own context parallelism is for "sdpa" alone and drops masks, so its hooks are left out.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import Tensor

from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK, IGNORED, VECTORS
from flashmask_hf.parallel.rows import split_rows
from flashmask_hf.parallel.split import make_split, refuse_rope_by_length, run_split
from flashmask_hf.tile_plan import ROWS

__all__ = ["ContextParallelMixin", "check_context_parallel", "context_parallel_size", "pad_for_parts", "refuse_parts"]

_SETTING = "cp_size > 1 (parallelism_config)"


def context_parallel_size(args: Any) -> int:
    """Return over how many processes accelerate's configuration splits a row, by the arguments or the launcher.

    Raises:
        ValueError: DeepSpeed is asked to split it (`sp_size`).
    """
    config: Any = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    if config is None:
        return 1
    if getattr(config, "sp_size", 1) > 1:
        raise ValueError(
            "sp_size > 1: DeepSpeed's sequence parallelism does not take the mask vectors of packed rows; set sp_size "
            "to 1 and cp_size instead, with FSDP2 (recipes/configs/accelerate_fsdp2_cp.yaml)"
        )
    return config.cp_size


def refuse_parts(args: Any) -> None:
    """Raise a ValueError if rows are to be split over processes, for trainers whose losses compare whole answers."""
    if context_parallel_size(args) > 1:
        raise ValueError(
            f"{_SETTING}: this trainer's loss compares answers, whose tokens would lie in several processes; leave "
            "cp_size at 1 and use more processes for more rows, or PackedSFTTrainer, which splits rows"
        )


def check_context_parallel(args: Any, *, trl_packs: bool, computes: dict[str, Any]) -> None:
    """Raise a ValueError for options of supervised fine-tuning that do not fit rows that are split over processes.

    Args:
        args: a `trl.SFTConfig` with context parallelism.
        trl_packs: whether TRL packs and collates the rows.
        computes: functions of a caller that get logits or losses, by the name of the trainer's argument.
    """
    if trl_packs:
        raise ValueError(
            f"{_SETTING}: rows that TRL packs have no mask vectors, without which documents would mix; leave packing "
            "and padding_free out, since PackedSFTTrainer packs by itself"
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"{_SETTING}: with average_tokens_across_devices=False each process would divide by the labels of the "
            "whole row; leave it at True"
        )
    if args.label_smoothing_factor:
        raise ValueError(f"{_SETTING}: label_smoothing_factor is not implemented for split rows; leave it at 0")
    for name, function in computes.items():
        if function is not None:
            raise ValueError(
                f"{_SETTING}: {name} would get a part of a row in each process; leave it out, the loss and TRL's "
                "metrics are those of whole rows"
            )


def pad_for_parts(collator: Any, size: int) -> Any:
    """Return a collator of packed rows that pads rows so that they split into `size` parts.

    Without a multiple of its own, it pads to whole tiles of 128 rows in each part.

    Raises:
        ValueError: its `pad_to_multiple_of` or `max_length` does not split.
    """
    for name in ("pad_to_multiple_of", "max_length"):
        length = getattr(collator, name)
        if length is not None and length % size:
            raise ValueError(f"{_SETTING}: {name}={length} must be a multiple of cp_size={size}, best of {ROWS * size}")
    if collator.max_length is not None or collator.pad_to_multiple_of is not None:
        return collator
    return replace(collator, pad_to_multiple_of=ROWS * size)


class ContextParallelMixin:
    """Part of a TRL trainer that trains and evaluates on rows that are split over the processes of the cp mesh.

    The trainer calls `_start_context_parallel` at the end of its `__init__`. Without context parallelism nothing
    changes.
    """

    accelerator: Any
    model: Any
    gather_function: Any
    _cp_size = 1

    def _start_context_parallel(self, size: int) -> None:
        """Split rows into `size` parts from here on.

        Raises:
            ValueError: the model's attention is not "flashmask", it has recurrent or convolutional layers, its rotary
                positions depend on the longest one, or it learns an auxiliary loss.
        """
        self._cp_size = size
        if self._copies > 1:
            self._gather_shared_rows()
        if size == 1:
            return
        model = self.accelerator.unwrap_model(self.model)
        inner = unwrap_peft(model)
        name = inner.config.get_text_config()._attn_implementation
        if name != FLASHMASK:
            raise ValueError(
                f"{_SETTING}: the model's attention is {name!r}, under which the documents of split rows would mix; "
                "load it with attn_implementation='flashmask'"
            )
        if is_guarded(inner.base_model):
            raise ValueError(
                f"{_SETTING}: {type(inner).__name__} has recurrent or convolutional layers, which would start anew in "
                "each part of a row; leave cp_size at 1, or take a model of attention alone"
            )
        refuse_rope_by_length(inner.config.get_text_config())
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                f"{_SETTING}: the auxiliary loss of a mixture of experts would be that of each part by itself; set "
                "router_aux_loss_coef=0 and output_router_logits=False in the model's config"
            )
        self.accelerator._prepare_cp = lambda *prepared: prepared  # its hooks drop masks, and refuse windows

    @property
    def _copies(self) -> int:
        """Number of processes that have the same rows, by context and tensor parallelism."""
        trainer: Any = self
        return self._cp_size * trainer.get_tp_size()

    def _gather_shared_rows(self) -> None:
        """Let accelerate keep every part of a row, and a whole row once, of what it gathers in evaluations.

        It cuts a last, smaller batch to the number of its examples, as if each process had others. So parts of a row
        would be cut away from a metric, and rows of the other batches count twice in a loss and in predictions.
        """
        state, gather = self.accelerator.gradient_state, self.accelerator.gather_for_metrics
        parts, copies = self._cp_size, self._copies // self._cp_size
        processes = self.accelerator.num_processes

        def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
            loader = state.active_dataloader
            if loader is None or use_gather_object:
                return gather(input_data, use_gather_object)
            examples, loader.remainder = loader.remainder, 0  # which cuts nothing
            try:
                data = gather(input_data)
            finally:
                loader.remainder = examples
            last = parts * examples if state.end_of_dataloader and examples > 0 else None

            def without_copies(x: Tensor) -> Tensor:  # whose processes are next to each other
                return x.unflatten(0, (-1, copies, len(x) // processes))[:, 0].flatten(0, 1)[:last]

            return recursively_apply(without_copies, data)

        self.accelerator.gather_for_metrics = gather_for_metrics
        self.gather_function = gather_for_metrics

    @property
    def _counts_rows(self) -> bool:
        """Whether this process is the first of those that have the same rows, by context or tensor parallelism."""
        trainer: Any = self
        if trainer.get_tp_size() > 1 and self.accelerator.torch_device_mesh.get_local_rank("tp"):
            return False
        return self._cp_size == 1 or self._cp_group.rank() == 0

    @property
    def _cp_group(self) -> Any:
        return self.accelerator.torch_device_mesh["cp"].get_group()

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the context of a training step, and this process's part of the batch (`Trainer.training_step`)."""
        parent: Any = super()
        if self._cp_size == 1:
            return parent._prepare_context_parallel_inputs(model, inputs)
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        if inputs.get(VECTORS) is None:
            raise ValueError(f"{_SETTING}: the batch has no {VECTORS}, without which the documents of a row would mix")
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        mask = FlashMask(inputs[VECTORS], causal=inputs[VECTORS].shape[-1] < 4)
        split = make_split(self._cp_group, split_rows(mask, self._cp_size, heads, kv_heads), inputs["position_ids"])
        return functools.partial(run_split, split), split.shard(inputs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss of whole rows in every process, each of which computes a part; see `Trainer`."""
        parent: Any = super()
        if self._cp_size == 1:
            return parent.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if not prediction_loss_only:
            raise ValueError(
                f"{_SETTING}: predictions would be those of parts of rows; evaluate without compute_metrics, and "
                "predict with cp_size at 1"
            )
        trainer: Any = self
        context, part = self._prepare_context_parallel_inputs(model, inputs)
        count = part["shift_labels"].ne(IGNORED).sum()
        dist.all_reduce(count, group=self._cp_group)
        # The loss is multiplied by the number of processes, because their gradients are averaged in training.
        processes = self.accelerator.num_processes // trainer.get_tp_size()
        with torch.no_grad(), trainer.compute_loss_context_manager(), context():
            loss = trainer.compute_loss(model, part, num_items_in_batch=count.clamp(min=1) * processes)
        dist.all_reduce(loss, group=self._cp_group)
        return loss, None, None
