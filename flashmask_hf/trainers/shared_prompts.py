"""Log-probabilities of completions with each prompt computed once, in TRL's trainers for reinforcement learning.

TRL computes all log-probabilities, those of the policy, of the policy before the update and of the reference, in
`_get_per_token_logps_and_entropies`, which calls the model with a padded batch of one sequence per completion.
`SharedPrompts` overrides it to call the model through a `_PackingModel`, which packs the batch into one row where each
prompt stands once (`hf.packed.rows`). TRL's chunks, temperature, entropies and losses stay as they are.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import ProcessorMixin

from flashmask_hf.collators.packing import pack_forests
from flashmask_hf.collators.prefixes import share_prefixes, share_prompts
from flashmask_hf.hf.packed.rows import check_compiled, run_packed
from flashmask_hf.hf.packed.shared_prefill import shared_prefill
from flashmask_hf.names import FLASHMASK, VECTORS
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.data_checks import first_rows
from flashmask_hf.trainers.formats import refuse_other_keys
from flashmask_hf.trainers.loading import correct_gathers, load_with, refuse_empty_reference, whole_in_each_process
from flashmask_hf.trainers.metrics import log_sharing
from flashmask_hf.trainers.option_checks import checked_config, prepare_arguments, refuse_liger_losses

__all__ = ["SharedPrompts", "SharedPromptsOptions", "group_prompts", "pack_sequences"]

logger = logging.getLogger(__name__)

_SHARES = ("prompts", "tokens")

_NO_TOKENS = (
    "has no tokens, so nothing predicts the first token of its completions; remove empty prompts from the dataset"
)
"""What is wrong with such a prompt, and the way out."""

_PLACES = "places_before_the_shuffle"
"""Key of a generation batch: the places of its rows, int64 [N] on the CPU."""


@dataclass
class SharedPromptsOptions:
    """Options of the trainers that share prompts, besides those of TRL's configuration.

    Args:
        share: "prompts" computes each distinct prompt of a micro-batch once. "tokens" computes every common beginning
            once, inside completions as well: of rollouts that branch, or that repeat the turns of a conversation.
        exact_ratios: compute the log-probabilities before the update once more, from the packed rows of the update, so
            that the first ratio of the two is exactly 1, which costs a forward without gradients. Without it the ratio
            is exactly 1 only where the completions of a prompt are put together again over the whole generation batch.
            Elsewhere sums are rounded in another order, and in bfloat16 ratios may be off by a percent or more.
    """

    share: str = field(
        default="prompts",
        metadata={
            "help": "What a micro-batch computes once: 'prompts' each distinct prompt, 'tokens' every common beginning "
            "of its sequences, inside completions as well.",
            "choices": list(_SHARES),
        },
    )
    exact_ratios: bool = field(
        default=False,
        metadata={
            "help": "Compute the log-probabilities before the update once more, from the packed rows of the update, so "
            "that the first importance ratio is exactly 1 in bfloat16, too. It costs a forward without gradients."
        },
    )


class SharedPrompts:
    """Mixin that computes each prompt once: a base before `trl.GRPOTrainer`, or a class with its methods."""

    _task: str
    """Names the output folder of a trainer without arguments."""
    _configs: tuple[type, type]
    """The configuration of TRL's trainer, and the one with `SharedPromptsOptions`."""

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *others: Any, **kwargs: Any):
        stock, ours = self._configs
        args = checked_config(args, model, self._task, stock, ours)
        share = getattr(args, "share", "prompts")
        if share not in _SHARES:
            raise ValueError(f"share must be one of {', '.join(map(repr, _SHARES))}, got {share!r}")
        _check_options(model, args, kwargs)
        self._share = share
        self._exact_ratios = getattr(args, "exact_ratios", False)
        # The reward models that TRL loads by name get the same options as the policy, so these do not name the
        # policy's attention, which is set afterwards.
        loads = isinstance(model, str) or args.beta != 0.0  # the policy, or a reference model
        with load_with(args, **(whole_in_each_process(args) if loads else {})):
            parent: Any = super()
            parent.__init__(model, reward_funcs, args, *others, **kwargs)
        trainer: Any = self
        _refuse_images(trainer.processing_class)  # of a model with images, TRL loads a processor
        for name, row in first_rows(trainer.train_dataset, trainer.eval_dataset).items():
            # Environments may make the prompts themselves.
            if "prompt" not in row and getattr(trainer, "environment_factories", None) is None:
                raise ValueError(
                    f"the {name} dataset has no column 'prompt'; rename the one that holds the prompts. It has: "
                    f"{', '.join(row)}"
                )
            refuse_other_keys((row.get("prompt"),), f"the {name} dataset")
        _refuse_too_few_prompts(trainer)
        self._hook_models(loaded_by_name=isinstance(model, str))
        add_callbacks(self, model)
        self._rows_per_group = _rows_per_group(trainer)

    def _hook_models(self, loaded_by_name: bool) -> None:
        """Make policy and reference take packed rows; those that TRL has loaded get the attention "flashmask" first."""
        trainer: Any = self
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if loaded_by_name:
            policy.set_attn_implementation(FLASHMASK)
        run_packed(policy)
        correct_gathers(policy)
        if trainer.ref_model is not None:
            if trainer.is_fsdp_enabled:
                refuse_empty_reference(trainer.accelerator.state.fsdp_plugin)
            reference = trainer.accelerator.unwrap_model(trainer.ref_model)
            reference.set_attn_implementation(FLASHMASK)
            run_packed(reference)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        trainer: Any = self
        packing = _PackingModel(model, logits_to_keep, self._share, trainer.args.pad_to_multiple_of)
        parent: Any = super()
        results = parent._get_per_token_logps_and_entropies(
            packing, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        self._packed = packing.packed
        return results

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        parent: Any = super()
        loss = parent._compute_loss(model, inputs)
        log_sharing(self, "train" if model.training else "eval", *self._packed)
        return loss

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        parent: Any = super()
        prompt_ids, *others = parent._tokenize_prompts(prompts)
        for nth, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
            if not len(ids):  # generation would fail, with an error of another name
                raise ValueError(f"prompt {nth} of the batch, {prompt!r}, {_NO_TOKENS}")
        return prompt_ids, *others

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        parent: Any = super()
        with shared_prefill(trainer.model):  # where transformers generates, and not vLLM
            return parent._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if any(example.get("images") or example.get("image") is not None for example in inputs):
            raise ValueError("prompts with images cannot be shared yet; use TRL's trainer, or remove the column")
        parent: Any = super()
        batch = parent._generate_and_score_completions(inputs)
        batch[_PLACES] = torch.arange(len(batch["prompt_ids"]))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self
        before = trainer._buffered_inputs
        parent: Any = super()
        inputs = parent._prepare_inputs(generation_batch)
        if trainer._buffered_inputs is before:
            return inputs
        batches = group_prompts(trainer._buffered_inputs, self._rows_per_group)
        if self._exact_ratios:
            for batch in batches:
                self._update_old_log_probabilities(batch)
        trainer._buffered_inputs = batches
        return batches[trainer._step % trainer.args.steps_per_generation]

    def _update_old_log_probabilities(self, batch: dict[str, Any]) -> None:
        """Compute a micro-batch's log-probabilities before the update as the update will, from the same packed row."""
        if batch.get("old_per_token_logps") is None and batch.get("old_logps") is None:
            return  # TRL takes those of the update
        trainer: Any = self
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        keep = batch["completion_ids"].shape[1]
        with torch.no_grad():
            log_probabilities, *_ = self._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)
        if "old_logps" in batch:  # RLOO's are of whole completions
            batch["old_logps"] = (log_probabilities * batch["completion_mask"]).sum(1)
        else:
            batch["old_per_token_logps"] = log_probabilities


class _PackingModel:
    """Calls a model with a padded batch packed into one row, and returns what the model returns for the batch.

    Args:
        model: the policy or the reference, wrapped or not; `run_packed` was called on it.
        keep: number of columns at the end of the batch that hold completions.
        share: as in `SharedPromptsOptions`.
        pad_to_multiple_of: pad the packed row to a multiple of this.
    """

    def __init__(self, model: Any, keep: int, share: str, pad_to_multiple_of: int | None):
        self.model = model
        self.keep = keep
        self.share = share
        self.pad_to_multiple_of = pad_to_multiple_of
        self.packed: tuple[Tensor, Tensor]
        """Mask vectors of the last call's packed row, and the mask of its sequences."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        # The loss reads the completions, which begin at the hidden state before them. The auxiliary loss of a mixture
        # of experts counts all tokens.
        width = input_ids.shape[1] if kwargs.get("output_router_logits") else self.keep + 1
        packed = pack_sequences(input_ids, attention_mask, self.keep, width, self.share, self.pad_to_multiple_of)
        packed = {name: x.to(input_ids.device) for name, x in packed.items()}
        self.packed = packed[VECTORS], attention_mask
        check_compiled(self.model, input_ids.device)
        if labels is not None:
            kwargs["labels"] = labels[:, -width:]
        return self.model(
            input_ids=input_ids[:, -width:], attention_mask=attention_mask[:, -width:], **packed, **kwargs
        )


def pack_sequences(
    input_ids: Tensor,
    attention_mask: Tensor,
    keep: int,
    width: int,
    share: str = "prompts",
    pad_to_multiple_of: int | None = None,
) -> dict[str, Tensor]:
    """Pack a padded batch of prompts and completions into one row in which shared tokens stand once.

    Args:
        input_ids: int64 [N, L], prompts padded on the left, completions on the right.
        attention_mask: [N, L], 0 for padding.
        keep: number of columns of the completions.
        width: number of columns at the end of the batch whose hidden states are wanted.
        share: as in `SharedPromptsOptions`.
        pad_to_multiple_of: pad the row to a multiple of this.

    Returns:
        The batch keys of `PackedRows.indexed_batch`, on the CPU; the index is [N, width].

    Raises:
        ValueError: a prompt has no tokens.
    """
    ids, real = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)  # waits for the device
    length = ids.shape[1]
    prompt_lengths = real[:, : length - keep].sum(1).tolist()
    if min(prompt_lengths) < 1:
        raise ValueError(f"prompt {prompt_lengths.index(0)} of the micro-batch {_NO_TOKENS}")
    sequences = [row[here].astype(np.int64) for row, here in zip(ids, real, strict=True)]
    forests, leaves = share_prompts(sequences, prompt_lengths) if share == "prompts" else share_prefixes(sequences)
    rows = pack_forests(forests, pad_to_multiple_of=pad_to_multiple_of)
    index = np.arange(ids.size).reshape(ids.shape) % rows.input_ids.size  # of padding, which nothing reads
    for row, (forest, segment) in enumerate(leaves):
        index[row, real[row]] = rows.starts[forest] + forests[forest].path(segment)
    return rows.indexed_batch(np.ascontiguousarray(index[:, length - width :]))


def group_prompts(batches: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """Undo TRL's shuffle within every `window` micro-batches, which one optimizer step sums.

    Before the shuffle, the completions of a prompt follow one another. If the window is the whole generation batch,
    micro-batches then hold the rows for which TRL computed the log-probabilities before the update in one forward: the
    update's forward packs the same row, so the first ratio of the two is exactly 1.

    Args:
        batches: micro-batches of TRL's, with the places of their rows before the shuffle.
        window: number of micro-batches, which divides that of `batches`.

    Returns:
        The same rows, without their places, in micro-batches of the same size.
    """
    grouped: list[dict[str, Any]] = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        order = torch.cat([batch[_PLACES] for batch in part]).argsort()
        names = [name for name in part[0] if name != _PLACES]
        for rows in order.split(len(part[0][_PLACES])):
            grouped.append({name: _select([batch[name] for batch in part], rows) for name in names})
    return grouped


def _select(parts: list[Any], rows: Tensor) -> Any:
    """Return some rows of a value of several micro-batches; a value that has no rows is the same in all of them."""
    if isinstance(parts[0], Tensor) and parts[0].ndim:
        return torch.cat(parts)[rows.to(parts[0].device)]
    if isinstance(parts[0], list):
        joined = [value for part in parts for value in part]
        return [joined[row] for row in rows.tolist()]
    return parts[0]


def _check_options(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError for options that packed rows cannot have, and turn dispatched batches off, in place."""
    prepare_arguments(model, args, kwargs.get("peft_config"))
    given = (args.model_init_kwargs or {}).get("attn_implementation")
    if isinstance(model, str) and given not in (None, FLASHMASK):
        raise ValueError(
            f"model_init_kwargs asks for attn_implementation={given!r}, but shared prompts need 'flashmask'; leave it "
            "out"
        )
    _refuse_images(kwargs.get("processing_class"))
    if getattr(args, "use_transformers_continuous_batching", False):
        raise ValueError(
            "use_transformers_continuous_batching replaces the model's attention by a paged one, which knows no packed "
            "rows; generate with vLLM, or leave it out"
        )
    refuse_liger_losses(args)


def _refuse_images(processing_class: Any) -> None:
    """Raise a ValueError for a processor of text and images."""
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError("images cannot share a prompt yet; pass a tokenizer as processing_class, or use TRL's trainer")


def _refuse_too_few_prompts(trainer: Any) -> None:
    """Raise a ValueError if the dataset has fewer prompts than a generation batch, since TRL drops a smaller one."""
    batch = trainer.args.generation_batch_size // trainer.num_generations
    if isinstance(trainer.train_dataset, Dataset) and len(trainer.train_dataset) < batch:
        raise ValueError(
            f"the train dataset has {len(trainer.train_dataset)} prompts, but a generation batch has {batch}, and a "
            "smaller one is dropped; lower per_device_train_batch_size or steps_per_generation, or add prompts"
        )


def _rows_per_group(trainer: Any) -> int:
    """Return in how many micro-batches rows of one prompt may be put side by side; warn if prompts will be scattered.

    TRL shuffles the rows of a generation batch over its `steps_per_generation` micro-batches. A sum over the
    micro-batches of one optimizer step is the same in any order of rows, unless the loss divides each micro-batch by a
    number of its own.
    """
    args = trainer.args
    steps, rows = args.steps_per_generation, args.per_device_train_batch_size
    generations = trainer.num_generations
    if rows % generations:
        logger.warning(
            "A micro-batch has per_device_train_batch_size=%d rows, which is no multiple of num_generations=%d: a "
            "prompt is computed once for each micro-batch that has one of its completions. Set it to a multiple to "
            "compute each prompt once.", rows, generations,
        )  # fmt: skip
    divided = _divides_by_micro_batch(trainer)
    window = 1 if divided else math.gcd(steps, args.gradient_accumulation_steps)
    if window < steps:
        reason = divided or (
            f"only {window} of the {steps} micro-batches belong to one optimizer step; set gradient_accumulation_steps "
            f"to a multiple of steps_per_generation={steps}"
        )
        logger.warning(
            "TRL scatters the completions of a prompt over %d micro-batches, and they cannot be put together again "
            "without changing the loss: %s. So fewer tokens are shared than could be.", steps, reason,
        )  # fmt: skip
    return window


def _divides_by_micro_batch(trainer: Any) -> str:
    """Return why the loss depends on which rows are in one micro-batch, or "" if it does not."""
    if getattr(trainer, "loss_type", "") == "bnpo":
        return "loss_type='bnpo' divides by the tokens of a micro-batch (take 'dapo', which divides by those of all)"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile takes the quantile of a micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "entropy_coef weighs the mean entropy of a micro-batch"
    if getattr(trainer, "aux_loss_enabled", False):
        return "router_aux_loss_coef weighs a loss of a micro-batch"
    return ""
