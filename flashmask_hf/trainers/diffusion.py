"""TRL's supervised fine-tuning trainer for diffusion language models on packed rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from flashmask_hf.collators.diffusion import DataCollatorForBlockDiffusion, DataCollatorForMaskedDiffusion
from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.hf.rewrites import require_flashmask
from flashmask_hf.names import DIFFUSION_LABELS, DIFFUSION_WEIGHTS, VECTORS
from flashmask_hf.trainers.context_parallel import context_parallel_size
from flashmask_hf.trainers.sft import PackedSFTTrainer
from flashmask_hf.trainers.weighing import label_count, require_fused_head, with_changed_outputs


class PackedDiffusionTrainer(PackedSFTTrainer):
    """`PackedSFTTrainer` for diffusion language models: packed documents, noised in blocks or whole.

    The loss is `diffusion_loss` over the labels of all batches and ranks of a step. Logits are computed for noised
    tokens alone, in tiles. Evaluation has the same noise each time. Logs count each token once; `entropy` and
    `mean_token_accuracy` are of noised tokens.

    Args:
        model: a causal language model with attention "flashmask", or a name.
        args: a `trl.SFTConfig`. `max_length` counts tokens of documents, without noisy copies.
        data_collator: a `DataCollatorForBlockDiffusion` or `DataCollatorForMaskedDiffusion`.
        *given: as in `PackedSFTTrainer`.
        **kwargs: as in `PackedSFTTrainer`.

    Raises:
        TypeError: `args` or `data_collator` has the wrong type.
        ValueError: as in `PackedSFTTrainer`, and for a model with attention code of its own (remote code: LLaDA,
            Dream), another attention, no embedding of the mask token, or, with whole documents, causal sliding windows;
            options that change the loss, read logits, pack in TRL, or split rows over ranks; TRL before 1.15.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.collators import DataCollatorForBlockDiffusion
        from flashmask_hf.trainers import PackedDiffusionTrainer
        from trl import SFTConfig

        dataset = load_dataset("trl-lib/Capybara", split="train")
        collator = DataCollatorForBlockDiffusion(mask_token_id=151669, block_size=32)
        PackedDiffusionTrainer("Qwen/Qwen3-0.6B", SFTConfig(max_length=4096), collator, dataset).train()
        ```
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: DataCollatorForMaskedDiffusion | None = None,
        *given: Any,
        **kwargs: Any,
    ):
        require_fused_head("PackedDiffusionTrainer")
        if not isinstance(data_collator, DataCollatorForMaskedDiffusion):
            raise TypeError(
                "data_collator must be a DataCollatorForBlockDiffusion or a DataCollatorForMaskedDiffusion, which "
                f"noises tokens, got {type(data_collator).__name__}"
            )
        if isinstance(args, SFTConfig):
            _refuse_options(args)
            if data_collator.pad_to_multiple_of is None:
                data_collator = replace(data_collator, pad_to_multiple_of=args.pad_to_multiple_of)
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "share_prefixes"):
            if kwargs.get(name):
                raise ValueError(f"{name} is not supported: this trainer computes its loss from noised tokens' logits")
        if not isinstance(model, str):
            _check_model(model, data_collator)
        super().__init__(model, args, data_collator, *given, **kwargs)
        _check_model(self.accelerator.unwrap_model(self.model), data_collator)
        if isinstance(data_collator, DataCollatorForBlockDiffusion):
            self._rows_per_token = data_collator.copies + 1

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        collator = self.data_collator
        if not is_training and collator.seed is None:
            collator = replace(collator, seed=self.args.seed)
        with mock.patch.object(self, "data_collator", collator):
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)

    def _label_counts(self, inputs: dict[str, Any]) -> Any:
        return tuple(label_count({"shift_labels": inputs[name]}) for name in ("labels", DIFFUSION_LABELS))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labels of a step on all ranks, also at the start of a row."""
        counted = [batch | {"shift_labels": batch["labels"]} for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of one batch, and record TRL's metrics of its noised tokens."""
        self._record_batch(model, inputs)
        names = (DIFFUSION_LABELS, DIFFUSION_WEIGHTS, "labels")
        targets, weights, labels = (inputs[name] for name in names)
        inputs = {name: x for name, x in inputs.items() if name not in names} | {"shift_labels": targets}

        def weigh(outputs: Any) -> None:
            scale = weights.to(outputs.log_probs.device)
            if num_items_in_batch is None:  # TRL divides by the number of noised tokens
                noised, count = (label_count({"shift_labels": x}).clamp(min=1) for x in (targets, labels))
                scale = scale * (noised / count)
            outputs.log_probs = outputs.log_probs * scale

        model = with_changed_outputs(model, weigh)
        return SFTTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def _refuse_options(args: Any) -> None:
    """Raise a ValueError for options that another loss reads, that pack in TRL, or that split rows."""
    if args.packing or args.padding_free:
        raise ValueError("packing and padding_free make causal rows of TRL; leave them out, and this trainer packs")
    if args.loss_type != "nll" or args.label_smoothing_factor:
        raise ValueError("loss_type and label_smoothing_factor are of causal losses; leave both at their defaults")
    if context_parallel_size(args) > 1:
        raise ValueError("cp_size > 1 (parallelism_config) splits causal rows alone; set cp_size=1")


def _check_model(model: Any, collator: DataCollatorForMaskedDiffusion) -> None:
    """Raise a ValueError for a model that would ignore a part of its mask, or that has no mask token."""
    inner = unwrap_peft(model)
    layers = (type(x) for x in inner.modules() if not isinstance(x, PreTrainedModel))
    modules = {sys.modules.get(base.__module__) for layer in layers for base in layer.__mro__}
    if not any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules):
        raise ValueError(
            f"{type(inner).__name__} has attention code of its own, as the remote code of LLaDA and Dream, which "
            f"ignores {VECTORS}; use a model of transformers, for example Qwen3 or Llama"
        )
    require_flashmask(inner.base_model)
    text = inner.config.get_text_config()
    if not isinstance(collator, DataCollatorForBlockDiffusion) and _has_causal_window(inner):
        raise ValueError(
            f"sliding_window={text.sliding_window} of {type(inner).__name__} is causal and hides one side of whole "
            "documents; set is_causal=False in its config for both sides, or train in blocks"
        )
    if collator.mask_token_id >= text.vocab_size:
        raise ValueError(
            f"mask_token_id must be less than the model's {text.vocab_size} embeddings, got {collator.mask_token_id}; "
            "choose a token that text does not have, or add one with resize_token_embeddings"
        )


def _has_causal_window(model: Any) -> bool:
    """Return whether a sliding window hides earlier tokens that are far away, but no later ones."""
    text = model.config.get_text_config()
    if not getattr(text, "is_causal", True) or any(getattr(x, "is_causal", None) is False for x in model.modules()):
        return False
    layers = getattr(text, "layer_types", None) or ["sliding_attention"]
    return bool(getattr(text, "sliding_window", None)) and "sliding_attention" in layers
