"""TRL's experimental AsyncGRPO on "flashmask" instead of FlashAttention-3 with gathered keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from trl.experimental.async_grpo import async_grpo_trainer

from flashmask_hf.hf.packed.rows import check_compiled
from flashmask_hf.names import FLASHMASK
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.experimental.tree_packing import run_tree_packing
from flashmask_hf.trainers.loading import correct_gathers
from flashmask_hf.trainers.option_checks import refuse_adapters, refuse_options

__all__ = ["SharedPromptAsyncGRPOTrainer"]

if not hasattr(async_grpo_trainer, "TREE_ATTENTION"):
    raise ImportError("SharedPromptAsyncGRPOTrainer needs AsyncGRPO's tree packing; install trl>=1.16")


class SharedPromptAsyncGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with its packed tries under "flashmask": on any GPU, and for models with sinks.

    TRL needs FlashAttention-3, and gathers shared keys once per rollout. Here no keys are gathered. Arguments, batches,
    loss and metrics are TRL's.

    Raises:
        ValueError: NEFTune, `label_smoothing_factor`, `use_liger_kernel`, prompt learning, activated LoRA,
            `attn_implementation` in `model_init_kwargs`, or context parallelism. In the first step: some layers do not
            receive the mask.
        RuntimeError: in the first step, the batch is not a trie as TRL 1.16 packs it.
    """

    def __init__(self, model: str, reward_funcs: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        if args is not None and "attn_implementation" in (args.model_init_kwargs or {}):
            raise ValueError("model_init_kwargs: attn_implementation is always 'flashmask' here; leave it out")
        if args is not None and args.use_liger_kernel:
            raise ValueError("use_liger_kernel: TRL's AsyncGRPO does not take Liger's kernels; leave it out")
        with _load_with_flashmask():
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        refuse_options(self.args)
        policy = self.accelerator.unwrap_model(self.model)
        refuse_adapters(policy, None)
        correct_gathers(policy)
        run_tree_packing(policy)
        add_callbacks(self, model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss. In a compiled model, check in the first step that every layer receives the mask."""
        check_compiled(model, inputs["input_ids"].device)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _log_step_metrics(self) -> None:
        """Log TRL's metrics of a step; lend gpt-oss's config two numbers that they read."""
        config = self.model.config.get_text_config()
        fixed = {"moe_intermediate_size": getattr(config, "intermediate_size", None), "decoder_sparse_step": 1}
        added = {name: value for name, value in fixed.items() if not hasattr(config, name)}
        vars(config).update(added)  # other threads read the config, which mock.patch.dict would empty for a moment
        try:
            super()._log_step_metrics()
        finally:
            for name in added:
                del vars(config)[name]


@contextlib.contextmanager
def _load_with_flashmask() -> Iterator[None]:
    """Make `AsyncGRPOTrainer.__init__` load its model with "flashmask", and accept a model with sinks.

    TRL hard-codes its attention, and refuses parameters named "*.sinks" right after loading: the first listing leaves
    these out.
    """
    module: Any = async_grpo_trainer
    create = module.create_model_from_path

    def create_with_flashmask(*args: Any, **kwargs: Any) -> Any:
        model = create(*args, **kwargs | {"attn_implementation": FLASHMASK})

        def first_listing() -> Iterator[tuple[str, Any]]:
            del model.named_parameters
            return (item for item in model.named_parameters() if not item[0].endswith(".sinks"))

        model.named_parameters = first_listing
        return model

    with mock.patch.object(module, "create_model_from_path", create_with_flashmask):
        yield
