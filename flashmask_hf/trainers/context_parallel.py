"""Rows longer than one GPU in TRL's trainers: accelerate's `cp` mesh, with the exchange of `flashmask_hf.parallel`.

accelerate (`ParallelismConfig(cp_size=N)`, with FSDP2) gives each group of N ranks the same batches. Its own context
parallelism drops masks, so its hooks are left out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor

from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import EXAMPLE_TOKENS, FLASHMASK, PACKED_POSITIONS, VECTORS
from flashmask_hf.parallel.rows import split_rows
from flashmask_hf.parallel.split import RowSplit, make_split, refuse_rope_by_length, run_split
from flashmask_hf.tile_plan import ROWS
from flashmask_hf.trainers.weighing import label_count

_COMPUTES = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
"""Arguments of TRL's SFTTrainer that take logits or losses."""

_SETTING = "cp_size > 1 (parallelism_config)"


def context_parallel_size(args: Any) -> int:
    """Return the number of ranks that share a row.

    Raises:
        ValueError: accelerate's sequence parallelism is configured (`sp_size`), by DeepSpeed or torch.
    """
    config = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    if config is None:
        return 1
    if getattr(config, "sp_size", 1) > 1:
        problem = "sp_size > 1: accelerate's sequence parallelism takes no mask indices"
        raise ValueError(f"{problem}; use cp_size with FSDP2 in SFT, DPO and reward trainers, sp_size=1 in others")
    return config.cp_size


def refuse(found: Any, problem: str) -> None:
    """Raise a ValueError for split rows if a problem is found."""
    if found:
        raise ValueError(f"{_SETTING}: {problem}")


def check_context_parallel(args: Any, functions: Mapping[str, Any], *, trl_packs: bool) -> int:
    """Return the number of ranks that share a row; a ValueError for options of an SFT trainer that do not allow it.

    `functions` are keywords of the trainer, among them functions of logits or losses.
    """
    size = context_parallel_size(args)
    if size > 1:
        refuse(trl_packs, "rows that TRL packs have no mask indices; leave packing and padding_free out")
        averages = args.average_tokens_across_devices
        refuse(not averages, "average_tokens_across_devices=False divides by the labels of a whole row; set it to True")
        refuse(args.label_smoothing_factor, "label_smoothing_factor is not implemented for split rows; leave it at 0")
        for name in _COMPUTES:
            refuse(functions.get(name) is not None, f"{name} would get one shard of each row; leave it out")
    return size


def pad_for_parts(collator: Any, size: int) -> Any:
    """Return a collator that pads packed rows to split into `size` shards, by default of whole tiles.

    Raises:
        ValueError: its `pad_to_multiple_of` or length of rows is not a multiple of `size`.
    """
    names = ("pad_to_multiple_of", collator._row_option)
    for name in names:
        length = getattr(collator, name) or 0
        refuse(length % size, f"{name}={length} must be a multiple of cp_size={size}, best of {ROWS * size}")
    if size == 1 or any(getattr(collator, name) is not None for name in names):
        return collator
    return replace(collator, pad_to_multiple_of=ROWS * size)


class ContextParallelMixin:
    """Mixin of a TRL trainer on rows split over the ranks of the cp mesh.

    The trainer calls `_start_context_parallel` at the end of its `__init__`.
    """

    _cp_size = 1
    _rows_per_token = 1  # of a packed row
    _shards_inputs = True
    """Whether a training step, its loss and its metrics get this rank's shards; otherwise they get whole batches."""

    def _start_context_parallel(self, size: int) -> None:
        """Split rows into `size` shards from here on; a ValueError for models that do not allow it."""
        self._cp_size = size
        if self.accelerator.num_processes > 1:
            self._gather_evaluations(parts=size if self._shards_inputs else 1)
        if size == 1:
            return
        model = self.accelerator.unwrap_model(self.model)
        inner = unwrap_peft(model)
        config = inner.config.get_text_config()
        name = config._attn_implementation
        refuse(name != FLASHMASK, f"the model's attention is {name!r}; load it with attn_implementation='flashmask'")
        problem = "has recurrent or convolutional layers, which would start anew in each shard; set cp_size=1"
        refuse(is_guarded(inner.base_model), f"{type(inner).__name__} {problem}")
        refuse_rope_by_length(config)
        refuse(
            getattr(self, "aux_loss_enabled", False),
            "the auxiliary loss of a mixture of experts would be computed per shard; set router_aux_loss_coef=0 in the "
            "trainer's arguments",
        )
        self.accelerator._prepare_cp = lambda *prepared: prepared  # its hooks drop masks, and refuse windows

    @property
    def _copies(self) -> int:
        """Number of ranks that have the same rows, by context and tensor parallelism."""
        return self._cp_size * self.get_tp_size()

    @property
    def _counts_rows(self) -> bool:
        """Whether this rank is the first with its rows."""
        if self.get_tp_size() > 1 and self.accelerator.torch_device_mesh.get_local_rank("tp"):
            return False
        return self._cp_size == 1 or self._cp_group.rank() == 0

    @property
    def _cp_group(self) -> Any:
        return self.accelerator.torch_device_mesh["cp"].get_group()

    def _split_of(self, vectors: Tensor, position_ids: Tensor) -> RowSplit:
        """Return the split of a batch's rows over the cp mesh."""
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        mask = FlashMask(vectors, causal=vectors.shape[-1] < 4)
        return make_split(self._cp_group, split_rows(mask, self._cp_size, heads, kv_heads), position_ids)

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the context of a training step, and its inputs (`Trainer.training_step`)."""
        if self._cp_size == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)
        inputs = self._prepare_inputs(inputs)
        refuse(inputs.get(VECTORS) is None, f"the batch has no {VECTORS}, so documents of a row would mix")
        split = self._split_of(inputs[VECTORS], inputs["position_ids" if self._shards_inputs else PACKED_POSITIONS])
        context = functools.partial(run_split, split)
        if not self._shards_inputs:
            return context, inputs
        counts = {EXAMPLE_TOKENS: inputs.pop(EXAMPLE_TOKENS)} if EXAMPLE_TOKENS in inputs else {}
        return context, split.shard(inputs) | counts

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        counted = self._copies * self._rows_per_token
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // counted

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's share of the operations of a batch, which other ranks have, too."""
        return super().floating_point_ops(inputs) // self._copies

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._cp_size > 1 and self._shards_inputs:  # the loss of the steps after the last log
            dist.all_reduce(self._tr_loss, group=self._cp_group)
            self._tr_loss /= self._cp_size
        return super()._finalize_training(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss of whole rows on every rank. See `Trainer`."""
        if self._cp_size == 1 or not self._shards_inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        way = "evaluate without compute_metrics, and predict with cp_size=1"
        refuse(not prediction_loss_only, f"predictions would be of shards of rows; {way}")
        context, part = self._prepare_context_parallel_inputs(model, inputs)
        count = label_count(part)
        dist.all_reduce(count, group=self._cp_group)
        # compute_loss multiplies by the number of ranks, whose gradients training averages.
        processes = self.accelerator.num_processes // self.get_tp_size()
        with torch.no_grad(), self.compute_loss_context_manager(), context():
            loss = self.compute_loss(model, part, num_items_in_batch=count * processes)
        dist.all_reduce(loss, group=self._cp_group)
        return loss, None, None
