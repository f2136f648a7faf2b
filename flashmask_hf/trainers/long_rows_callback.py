"""Callback that makes long rows fit into memory, by measuring short rows first."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from flashmask_hf._numbers import as_integer, check_bool
from flashmask_hf.long_rows import keep_attention, offload_checkpoints, tile_tokens
from flashmask_hf.long_rows.checkpointing import checkpointing_of, enable_checkpointing
from flashmask_hf.names import NAMES
from flashmask_hf.trainers.callbacks import KeepAttention
from flashmask_hf.trainers.sft import PackedSFTTrainer
from flashmask_hf.trainers.step_memory import StepMemory, available_gpu_bytes, available_host_bytes, gib

MEASURED_TOKENS = (16_384, 32_768)
"""Tokens of a rank's shards of the two measured rows, several tiles each."""

DOCUMENT = 2048
"""Tokens per document of a measured row."""

INVENTED_IDS = 32  # different token ids of a measured row; every vocabulary has 32

OWN_COUNTS = ("_metrics", "_total_train_tokens", "_sums")
"""Counters that a measured step restores."""


class LongRows(TrainerCallback):
    """Makes long rows fit into memory, for `PackedSFTTrainer` with activation checkpointing.

    MLPs and norms run in tiles of tokens (`tile_tokens`). Checkpointed layers keep attention's results
    (`keep_attention`) if these fit on GPU and host together. Checkpoints that do not fit on the GPU go to pinned host
    memory (`offload_checkpoints`). Inputs of adapters stay in 16 bits under autocast. Only the rounding of sums over
    tiles changes.

    Options set to None follow from two steps on invented rows of 16,384 and 32,768 tokens per rank: a step's memory is
    linear in its tokens. The choice is printed.

    Args:
        trainer: a `PackedSFTTrainer` that packs its rows itself.
        tile_tokens: tokens per tile, 0 for no tiles.
        keep_attention: whether to keep the results of "flashmask" and of the sparse attentions; None measures.
        host_gib: GiB of pinned host memory per rank for checkpoints, 0 for none; None measures.

    Attributes:
        kept: whether attention's results are kept; None before training.
        host_bytes: bytes of host memory for checkpoints; None before training.
        longest: tokens of the longest batch that fits; None unless measured.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: for negative or infinite `tile_tokens` or `host_gib`; activation checkpointing that is off or
            reentrant; `keep_attention` with another attention; or None without a GPU, under DeepSpeed, in a compiled
            model, for images, or if TRL packs. Before the first step, for a model without anything to tile, another
            trainer's callback, or rows that do not fit.

    Example:
        ```python
        args = SFTConfig(max_length=262_144, per_device_train_batch_size=1)
        trainer = PackedSFTTrainer("meta-llama/Llama-3.1-8B", args, train_dataset=dataset, peft_config=peft_config)
        trainer.add_callback(LongRows(trainer))
        trainer.train()
        ```
    """

    def __init__(
        self,
        trainer: Any,
        *,
        tile_tokens: int = 8192,
        keep_attention: bool | None = None,
        host_gib: float | None = None,
    ):
        if not isinstance(trainer, PackedSFTTrainer):
            way = "for others use tile_tokens, offload_checkpoints and keep_attention of flashmask_hf.long_rows"
            raise TypeError(f"trainer must be a PackedSFTTrainer, got {type(trainer).__name__}; {way}")
        self._tile_tokens = as_integer("tile_tokens", tile_tokens, 0, why="0 is no tiles")
        if keep_attention is not None:
            check_bool("keep_attention", keep_attention)
        if host_gib is not None and (not isinstance(host_gib, (int, float)) or isinstance(host_gib, bool)):
            raise TypeError(f"host_gib must be a number, or None to measure, got {host_gib!r}")
        if host_gib is not None and not 0 <= host_gib < math.inf:
            raise ValueError(f"host_gib must be finite and at least 0, or None to measure, got {host_gib}")
        self._trainer: Any = trainer
        attention = self._model.config.get_text_config()._attn_implementation
        if attention not in NAMES:
            if keep_attention:
                problem = f"keep_attention needs attn_implementation='flashmask', but the model has {attention!r}"
                raise ValueError(f"{problem}; load it so, or leave keep_attention out")
            keep_attention = False
        self._given = keep_attention, None if host_gib is None else int(host_gib * 2**30)
        self._offload: Any = None
        self.kept: bool | None = None
        self.host_bytes: int | None = None
        self.longest: int | None = None
        obstacle = obstacle_to_measuring(trainer) if None in self._given else None
        if obstacle is not None:
            raise ValueError(f"{obstacle}; set keep_attention and host_gib by hand")
        name, options = checkpointing_of(trainer.args)
        if options is None or options.get("use_reentrant"):
            raise ValueError(f"keep_attention, tile_tokens and host_gib need {name}=True, without use_reentrant")
        trainer.remove_callback(KeepAttention)  # this callback decides instead

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the model in place, and measure the options that are None."""
        if state is not self._trainer.state:
            raise ValueError("LongRows was made for another trainer; add LongRows(trainer)")
        self._close()  # an earlier run may have ended in an error
        model = self._model
        if args.bf16 or args.fp16:
            _leave_inputs_of_adapters(model, self._trainer.accelerator.device.type)
        tiled = tile_tokens(model, self._tile_tokens) if self._tile_tokens else []
        self.kept, self.host_bytes = self._given
        if self.host_bytes != 0:
            self._offload = offload_checkpoints(model)
        reason = self._choose() if None in self._given else ""
        self._checkpoint(bool(self.kept))
        if self._offload is not None:
            self._offload.host_bytes = self.host_bytes
        if not self.host_bytes:
            self._close()
        said = [
            f"{len(tiled)} MLPs and norms run in tiles of {self._tile_tokens:,} tokens" if tiled else "no tiles",
            "attention's results are kept" if self.kept else "attention is computed again in the backward pass",
            f"up to {gib(self.host_bytes)} of checkpoints on the host" if self.host_bytes else "checkpoints on the GPU",
        ]
        self._trainer._last_log = time.perf_counter()  # tokens_per_second excludes measuring
        self._trainer.accelerator.print(f"Batches of {self._tokens:,} tokens: {', '.join(said)}{reason}.")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Free the pinned host memory."""
        self._close()

    def _close(self) -> None:
        """Undo the offloading, if there is one."""
        if self._offload is not None:
            self._offload.close()
            self._offload = None

    @property
    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @property
    def _tokens(self) -> int:
        trainer = self._trainer
        return trainer.row_length * trainer._train_batch_size  # auto_find_batch_size changes it

    def _checkpoint(self, kept: bool) -> None:
        """Turn on checkpointing with or without attention's results."""
        _, options = checkpointing_of(self._trainer.args)
        options = {**(options or {}), "use_reentrant": False}
        if kept:
            options["context_fn"] = keep_attention
        enable_checkpointing(self._model, options)

    def _choose(self) -> str:
        """Measure steps, set the options that are None, and return the reason; a ValueError if the rows do not fit."""
        keep_attention, host_bytes = self._given
        for kept in (True, False) if keep_attention is None else (keep_attention,):
            self._checkpoint(kept)
            own_host = available_host_bytes() if host_bytes is None else host_bytes
            memory, gpu, host = self._agree(self._memory_of_a_step(), available_gpu_bytes(), own_host)
            self.kept, self.longest = kept, memory.longest(gpu, host)
            needed = memory.fixed + self._tokens * (memory.working + memory.stored)
            if self._tokens <= self.longest:
                if host_bytes is None:
                    self.host_bytes = int(max(0, needed - gpu))
                return f"; a step needs about {gib(needed)}, the GPU has {gib(gpu)}, the host {gib(host)}"
        raise ValueError(
            f"max_length: a step of {self._tokens:,} tokens needs {gib(needed)}, the GPU has {gib(gpu)}, the host "
            f"{gib(host)}; the longest batch that fits has {self.longest:,} tokens. Lower it, adapt fewer modules "
            "without dropout, or set keep_attention=False and host_gib"
        )

    def _agree(self, memory: StepMemory, gpu: float, host: float) -> tuple[StepMemory, float, float]:
        """Return the worst figures of all ranks: other choices would hang."""
        figures = [memory.fixed, memory.working, memory.stored, -gpu, -host]
        device = self._trainer.accelerator.device
        every = self._trainer.accelerator.gather(torch.tensor([figures], device=device, dtype=torch.float64))
        worst = every.amax(0).tolist()
        return StepMemory(*worst[:3]), -worst[3], -worst[4]

    def _memory_of_a_step(self) -> StepMemory:
        """Measure the memory of a step, with all checkpoints on the host."""
        offload = self._offload
        if offload is not None:
            offload.host_bytes = None
        longer = min(MEASURED_TOKENS[1] * self._trainer._cp_size, self._tokens)
        tokens = (longer // 2, longer)
        try:
            self._run(tokens[0])  # compiles kernels, and leaves gradients as gradient accumulation does
            peaks = (self._peak_of(tokens[0]), self._peak_of(tokens[1]))
        except torch.OutOfMemoryError as error:
            problem = f"max_length: a row of {longer:,} tokens already exceeds the GPU's memory"
            raise ValueError(f"{problem}; quantize the model, train an adapter, or shard it over GPUs") from error
        finally:
            self._trainer.model_wrapped.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()  # their blocks would fragment long rows' memory
        stored = 0 if offload is None else offload.seen_bytes
        memory = StepMemory.from_two_steps(tokens, peaks, stored)
        states = 0 if self._trainer.optimizer.state else 2 * _bytes_of_trained(self._trainer.model_wrapped)
        return StepMemory(memory.fixed + states, memory.working, memory.stored)

    def _peak_of(self, tokens: int) -> float:
        torch.cuda.reset_peak_memory_stats()
        self._run(tokens)
        return float(torch.cuda.max_memory_allocated())

    def _run(self, tokens: int) -> None:
        """Run forward and backward on an invented row, and keep only gradients."""
        trainer = self._trainer
        document = min(DOCUMENT, trainer.data_collator.max_position_embeddings or DOCUMENT)
        lengths = [min(document, tokens - start) for start in range(0, tokens, document)]
        inputs = trainer.data_collator([{"input_ids": [i % INVENTED_IDS for i in range(n)]} for n in lengths])
        counts = {name: copy.deepcopy(getattr(trainer, name)) for name in OWN_COUNTS}
        with torch.random.fork_rng():
            trainer.model_wrapped.train()
            inputs = trainer._prepare_inputs(inputs)
            parts, inputs = trainer._prepare_context_parallel_inputs(trainer.model_wrapped, inputs)
            with parts():
                with trainer.compute_loss_context_manager():
                    loss = trainer.compute_loss(trainer.model_wrapped, inputs)
                trainer.accelerator.backward(loss)
        for name, count in counts.items():
            setattr(trainer, name, count)


def obstacle_to_measuring(trainer: Any) -> str | None:
    """Return why a trainer's steps cannot be measured before training, or None."""
    args = trainer.args
    obstacles = {
        "rows with images cannot be invented": trainer._packs_images,
        "memory is measured on a GPU, and this trains on none": not torch.cuda.is_available() or args.use_cpu,
        "rows that TRL packs (packing, padding_free) cannot be measured": args.packing or args.padding_free,
        "DeepSpeed runs no step before training": trainer.accelerator.distributed_type == DistributedType.DEEPSPEED,
        "a compiled model would be compiled again for the measured rows": args.torch_compile,
    }
    return next((obstacle for obstacle, holds in obstacles.items() if holds), None)


def _leave_inputs_of_adapters(model: Any, device_type: str) -> None:
    """Make PEFT not cast an adapter's input under autocast, which casts it back."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = _OutsideAutocast(device_type)


@dataclass(frozen=True)
class _OutsideAutocast:
    """Flag that PEFT reads before each cast: true if autocast is off, as in `generate`."""

    device_type: str

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)


def _bytes_of_trained(model: Any) -> int:
    """Return the bytes of a model's trained parameters on this rank."""
    trained = (x for x in model.parameters() if x.requires_grad)
    shards = (x.to_local() if hasattr(x, "to_local") else x for x in trained)
    return sum(x.numel() * x.element_size() for x in shards)
