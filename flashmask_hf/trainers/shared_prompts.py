"""Log-probabilities of completions with each prompt computed once, for TRL's trainers.

`SharedPrompts` passes TRL's `_get_per_token_logps_and_entropies` a function that packs its padded batch into one row.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import ProcessorMixin
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from flashmask_hf.collators.dataset import first_row
from flashmask_hf.collators.images import add_image_tokens, images_of
from flashmask_hf.collators.prefixes import sort_key
from flashmask_hf.collators.rope_index import rope_index_of
from flashmask_hf.collators.shared_rows import pack_sequences
from flashmask_hf.hf.packed.rows import check_compiled
from flashmask_hf.hf.packed.shared_prefill import shared_prefill
from flashmask_hf.names import FLASHMASK, PACKED_INDEX, VECTORS
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.data_checks import named_datasets
from flashmask_hf.trainers.formats import refuse_other_keys
from flashmask_hf.trainers.images import IMAGE_KEYS, SequenceImages, count_padded_rows, prepare_models
from flashmask_hf.trainers.loading import flashmask_policy, run_packed_models
from flashmask_hf.trainers.metrics import log_sharing
from flashmask_hf.trainers.option_checks import prepared_arguments

logger = logging.getLogger(__name__)

_SHARES = ("prompts", "tokens")

_NO_TOKENS = "has no tokens, so nothing predicts its completions' first tokens; remove empty prompts from the dataset"
_PLACES = "places_before_the_shuffle"
"""Key of a generation batch: the places of its rows, int64 [N] on the CPU."""


@dataclass
class SharedPromptsOptions:
    """Options of the trainers that share prompts; see `SharedPromptGRPOConfig`."""

    share: str = field(
        default="prompts",
        metadata={
            "help": "A micro-batch computes once each distinct prompt (prompts), or every common prefix (tokens).",
            "choices": list(_SHARES),
        },
    )
    exact_ratios: bool = field(
        default=False,
        metadata={"help": "Make the first importance ratio exactly 1, with one more forward without gradients."},
    )


class SharedPrompts:
    """Mixin of a TRL trainer like `trl.GRPOTrainer` that computes each prompt once."""

    _configs: tuple[type, type]
    """TRL's config class, and our subclass with `SharedPromptsOptions`."""

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *others: Any, **kwargs: Any):
        stock, ours = self._configs
        args = prepared_arguments(args, model, kwargs.get("peft_config"), stock, ours)
        share = getattr(args, "share", "prompts")
        if share not in _SHARES:
            raise ValueError(f"share must be one of {', '.join(map(repr, _SHARES))}, got {share!r}")
        _check_options(model, args, kwargs)
        self._share = share
        self._exact_ratios = getattr(args, "exact_ratios", False)
        # TRL loads reward models with the same options, so the policy's attention is set afterwards.
        with flashmask_policy(model, args, reference=args.beta != 0.0, attention=None):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        if isinstance(self.processing_class, ProcessorMixin):
            prepare_models(self)
            if self.accelerator.num_processes > 1:
                self.log_multimodal = False  # TRL would wait for ranks without images to gather theirs
        self._rope_index = rope_index_of(self.model)
        for name, dataset in named_datasets(self.train_dataset, self.eval_dataset):
            if dataset is None:
                continue
            row = first_row(dataset, f"the {name} dataset")
            # Environments may make the prompts themselves.
            if "prompt" not in row and getattr(self, "environment_factories", None) is None:
                columns = ", ".join(row)
                raise ValueError(f"the {name} dataset has no column 'prompt'; rename another one. It has: {columns}")
            refuse_other_keys((row.get("prompt"),), f"the {name} dataset")
            _refuse_unread_images([row], self.processing_class)
        _refuse_too_few_prompts(self)
        run_packed_models(self, sets_policy=isinstance(model, str))
        add_callbacks(self, model)
        self._window = _regrouping_window(self)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        count_padded_rows(kwargs, len(input_ids))
        packing = functools.partial(self._run_packed, model, logits_to_keep, SequenceImages.counts_of(kwargs))
        return super()._get_per_token_logps_and_entropies(
            packing, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _run_packed(
        self,
        model: Any,
        keep: int,
        counts: dict[str, Iterator[int]],
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call a model after `run_packed` with a padded batch packed into one row; results have the batch's layout."""
        images = SequenceImages.take(kwargs, counts, len(input_ids))
        # The loss reads completions and the hidden state before them, a mixture's auxiliary loss all tokens.
        width = input_ids.shape[1] if kwargs.get("output_router_logits") else keep + 1
        ids, mask = input_ids.cpu(), attention_mask.cpu()  # waits for the device
        packed, trees = pack_completions(ids, mask, keep, self._share, self.args.pad_to_multiple_of, images)
        if images:
            add_image_tokens(packed, ids, mask.bool(), images.types, images.sizes, trees, self._rope_index)
            kwargs |= images.of([trees.index(tree) for tree in range(max(trees) + 1)])
        packed[PACKED_INDEX] = packed[PACKED_INDEX][:, -width:].contiguous()
        packed = {name: x.to(input_ids.device) for name, x in packed.items()}
        self._packed = packed[VECTORS], attention_mask
        check_compiled(model, input_ids.device)
        if labels is not None:
            kwargs["labels"] = labels[:, -width:]
        return model(input_ids=input_ids[:, -width:], attention_mask=attention_mask[:, -width:], **packed, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        log_sharing(self, "train" if model.training else "eval", *self._packed)
        return loss

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        for nth, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
            if not len(ids):  # generation would fail with an unrelated error
                raise ValueError(f"prompt {nth} of the batch, {prompt!r}, {_NO_TOKENS}")
        # TRL's None for a prompt without images, beside others with images, fails in processors.
        return prompt_ids, images and [own or [] for own in images], fields

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with shared_prefill(self.model):  # for transformers' generate; vLLM ignores it
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        _refuse_unread_images(inputs, self.processing_class)
        batch = super()._generate_and_score_completions(inputs)
        count_padded_rows(batch, len(batch["prompt_ids"]))
        batch[_PLACES] = torch.arange(len(batch["prompt_ids"]))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs
        batches = group_prompts(self._buffered_inputs, self._window)
        if self._exact_ratios:
            for batch in batches:
                self._update_old_log_probabilities(batch)
        self._buffered_inputs = batches
        return batches[self._step % self.args.steps_per_generation]

    def _update_old_log_probabilities(self, batch: dict[str, Any]) -> None:
        """Recompute a micro-batch's old log-probabilities from the packed row of the update."""
        if batch.get("old_per_token_logps") is None and batch.get("old_logps") is None:
            return  # TRL uses the update's log-probabilities
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        keep = batch["completion_ids"].shape[1]
        with torch.no_grad():
            images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
            log_probabilities, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep, **images)
        if "old_logps" in batch:  # RLOO sums over completions
            batch["old_logps"] = (log_probabilities * batch["completion_mask"]).sum(1)
        else:
            batch["old_per_token_logps"] = log_probabilities


def pack_completions(
    input_ids: Tensor,
    attention_mask: Tensor,
    keep: int,
    share: str = "prompts",
    pad_to_multiple_of: int | None = None,
    images: SequenceImages | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """Pack a padded batch of prompts and completions into one row with shared tokens once.

    Args:
        input_ids: int64 [N, L] on the CPU, prompts padded on the left, completions on the right.
        attention_mask: [N, L] on the CPU, 0 for padding. A ValueError if a prompt has no tokens.
        keep: number of columns of the completions.
        share: as in `SharedPromptsOptions`.
        pad_to_multiple_of: divisor of the row's length.
        images: images of the sequences; what is shared then holds the whole prompt.

    Returns:
        The batch keys of `PackedRows.indexed_batch`, on the CPU, and the number of each sequence's tree.
    """
    ids, real = input_ids.numpy(), attention_mask.numpy().astype(bool)
    prompt_lengths = real[:, : ids.shape[1] - keep].sum(1).tolist()
    if min(prompt_lengths) < 1:
        raise ValueError(f"prompt {prompt_lengths.index(0)} of the micro-batch {_NO_TOKENS}")
    kinds = None
    if images:
        prompts = [row[here][:length] for row, here, length in zip(ids, real, prompt_lengths, strict=True)]
        kinds = images.kinds([sort_key(prompt) for prompt in prompts], keep)
    lengths = prompt_lengths if share == "prompts" else None
    rows, index, leaves = pack_sequences(
        ids, real, prompt_lengths=lengths, kinds=kinds, pad_to_multiple_of=pad_to_multiple_of
    )
    return rows.indexed_batch(index), [forest for forest, _ in leaves]


def group_prompts(batches: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """Undo TRL's shuffle within every `window` micro-batches, whose losses one optimizer step sums.

    Within a whole generation batch, the update packs the rows of the old log-probabilities: first ratios are exactly 1.

    The batches have the places of their rows before the shuffle, which the returned ones lack; `window` divides their
    number.
    """
    grouped: list[dict[str, Any]] = []
    for start in range(0, len(batches), window):
        part = [split_pixel_values_by_grid(batch) for batch in batches[start : start + window]]
        order = torch.cat([batch[_PLACES] for batch in part]).argsort()
        names = [name for name in part[0] if name != _PLACES]
        for rows in order.split(len(part[0][_PLACES])):
            chosen = {name: _select([batch[name] for batch in part], rows) for name in names}
            grouped.append(unsplit_pixel_values_by_grid(chosen))
    return grouped


def _select(parts: list[Any], rows: Tensor) -> Any:
    """Return some rows of several micro-batches' values; a value without rows is the same in all."""
    if isinstance(parts[0], Tensor) and parts[0].ndim:
        return torch.cat(parts)[rows.to(parts[0].device)]
    if isinstance(parts[0], list):
        joined = [value for part in parts for value in part]
        return [joined[row] for row in rows.tolist()]
    return parts[0]


def _check_options(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse another attention, padding on the right and continuous batching."""
    given = (args.model_init_kwargs or {}).get("attn_implementation")
    if isinstance(model, str) and given not in (None, FLASHMASK):
        raise ValueError(
            f"model_init_kwargs has attn_implementation={given!r}, but shared prompts need 'flashmask'; leave it out"
        )
    processor = kwargs.get("processing_class")
    if isinstance(processor, ProcessorMixin) and processor.tokenizer.padding_side != "left":
        raise ValueError(
            "processing_class pads on the right, but TRL takes its token types for prompts padded on the left; set "
            "processing_class.tokenizer.padding_side = 'left'"
        )
    if getattr(args, "use_transformers_continuous_batching", False):
        raise ValueError("use_transformers_continuous_batching does not support packed rows; use vLLM, or leave it out")


def _refuse_unread_images(examples: Sequence[Mapping[str, Any]], processing_class: Any) -> None:
    """Raise a ValueError if examples have images, but no processor reads them."""
    if isinstance(processing_class, ProcessorMixin):
        return
    if any(images_of(example) for example in examples):
        raise ValueError("prompts have images, which a tokenizer does not read; pass a processor as processing_class")


def _refuse_too_few_prompts(trainer: Any) -> None:
    """Raise a ValueError if the dataset has fewer prompts than a generation batch, which TRL drops."""
    batch, dataset = trainer.args.generation_batch_size // trainer.num_generations, trainer.train_dataset
    if isinstance(dataset, Dataset) and len(dataset) < batch:
        raise ValueError(
            f"the train dataset has {len(dataset)} prompts, but a generation batch has {batch}, and TRL drops smaller "
            "ones; lower per_device_train_batch_size or steps_per_generation, or add prompts"
        )


def _regrouping_window(trainer: Any) -> int:
    """Return the number of micro-batches within which rows can be regrouped by prompt; warn if groups stay split."""
    args = trainer.args
    steps, rows, generations = args.steps_per_generation, args.per_device_train_batch_size, trainer.num_generations
    if rows % generations:
        logger.warning(
            "A micro-batch has per_device_train_batch_size=%d rows, which is no multiple of num_generations=%d: a "
            "prompt is computed once per micro-batch with one of its completions. Set it to a multiple.",
            rows, generations,
        )  # fmt: skip
    reasons = {
        "loss_type='bnpo' divides by a micro-batch's tokens ('dapo' by all)": getattr(trainer, "loss_type", "")
        == "bnpo",
        "top_entropy_quantile takes the quantile of a micro-batch": getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
        "entropy_coef weighs the mean entropy of a micro-batch": getattr(trainer, "_entropy_bonus_enabled", False),
        "router_aux_loss_coef weighs a loss of a micro-batch": getattr(trainer, "aux_loss_enabled", False),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    window = math.gcd(steps, args.gradient_accumulation_steps) if reason is None else 1
    if window < steps:
        logger.warning(
            "TRL scatters the completions of a prompt over %d micro-batches, and regrouping would change the loss: %s. "
            "So fewer tokens are shared.", steps, reason or f"only {window} of the {steps} micro-batches belong to one "
            f"optimizer step; set gradient_accumulation_steps to a multiple of steps_per_generation={steps}",
        )  # fmt: skip
    return window
