"""TRL's DPO trainer on packed rows with shared questions."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.dataset import first_row, refuse_transform, unformatted, warn_of_weights
from flashmask_hf.collators.labels import WEIGHT
from flashmask_hf.collators.preference import DataCollatorForSharedQuestion
from flashmask_hf.collators.rope_index import rope_index_of
from flashmask_hf.hf.packed.rows import check_compiled
from flashmask_hf.names import PAIR_WEIGHTS, VECTORS
from flashmask_hf.trainers import data_checks, option_checks
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.context_parallel import context_parallel_size, pad_for_parts, refuse
from flashmask_hf.trainers.even_batches import EvenBatchesMixin
from flashmask_hf.trainers.formats import preference_columns
from flashmask_hf.trainers.images import VisionPreferences, prepare_models
from flashmask_hf.trainers.loading import config_of, flashmask_policy, run_packed_models
from flashmask_hf.trainers.metrics import log_sharing
from flashmask_hf.trainers.pair_weights import PairWeightsMixin, check_pair_weights
from flashmask_hf.trainers.resume import ResumeMixin
from flashmask_hf.trainers.split_answers import SplitAnswersMixin
from flashmask_hf.trainers.weighing import require_fused_head

_SMOOTHED_LOSSES = ("robust", "exo_pair", "aot", "aot_unpaired")
"""Loss types of TRL 1.16 that read `label_smoothing`."""


@dataclass
class SharedQuestionDPOConfig(DPOConfig):
    """Arguments of `SharedQuestionDPOTrainer`: `trl.DPOConfig` with the following.

    Args:
        truncation_mode: "keep_start" or "keep_end", as in TRL, or "error", which raises for examples over `max_length`.
        row_length: number of tokens per row; None packs each batch into one row.
    """

    truncation_mode: str = field(
        default="keep_start",
        metadata={
            "help": "Over `max_length`, cut the answer's end (keep_start), the question's start (keep_end), or raise.",
            "choices": ["keep_start", "keep_end", "error"],
        },
    )
    row_length: int | None = field(default=None, metadata={"help": "Tokens per packed row; None packs a batch in one."})


class SharedQuestionDPOTrainer(ResumeMixin, EvenBatchesMixin, PairWeightsMixin, SplitAnswersMixin, DPOTrainer):
    """`trl.DPOTrainer` that computes each question once for both answers, in policy and reference.

    Results equal TRL's up to rounding. Logs add `shared_tokens_saved`, the fraction of tokens saved, and
    `mask_sparsity`, the fraction of skipped tiles.

    Datasets have one of TRL's preference formats, the format of `HuggingFaceH4/ultrafeedback_binarized`, or the columns
    `prompt_ids`, `chosen_ids` and `rejected_ids`. With a processor, a column `images` or `image` may hold images of
    the prompt, which each model call runs once. With a column `weight`, the loss is sum(w * loss) / sum(w) over an
    optimizer step on all ranks; metrics have no weights. Differences from TRL:

    - A model loaded by name gets the attention "flashmask".
    - `truncation_mode="keep_end"` cuts a question equally for both answers. The log counts the examples cut, but not
      those with images.
    - `pad_to_multiple_of` applies to the packed row.
    - Invalid examples raise before the first step, except in streams, and questions with images that fill
      `max_length`.
    - accelerate's context parallelism (`cp_size`, with FSDP2) splits packed rows over ranks (`flashmask_hf.parallel`).

    Args:
        model: as in `trl.DPOTrainer`, like all arguments not listed.
        ref_model: a model, not a name.
        args: a `SharedQuestionDPOConfig`, or a `trl.DPOConfig`, with defaults for the options that it lacks.
        data_collator: None, or a `DataCollatorForSharedQuestion`, whose lengths replace those in `args`.

    Raises:
        TypeError: `args`, `ref_model` or `data_collator` has another type.
        ValueError: for a model with another attention or that cannot take packed rows; `label_smoothing` that the loss
            ignores, `label_smoothing_factor`, NEFTune, dispatched batches, prompt learning, activated LoRA, FSDP2's
            RAM-efficient loading of a reference model, or `use_liger_kernel` before TRL 1.15; a dataset that is empty,
            or has images without a processor, video, audio, or fewer rows than a batch with `dataloader_drop_last`;
            weights with a loss that is no mean over pairs ("aot", "aot_unpaired", "sft"); images with `row_length`,
            `cp_size` or a PaliGemma; `cp_size` with Liger, `compute_metrics`, an auxiliary loss of experts or rotary
            positions by length; an example without a column, question or answer, or over the model's positions.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.trainers import SharedQuestionDPOConfig, SharedQuestionDPOTrainer

        args = SharedQuestionDPOConfig(max_length=2048)
        dataset = load_dataset("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs")
        SharedQuestionDPOTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=dataset).train()
        ```
    """

    _name = "Shared-question DPO"

    def __init__(
        self,
        model: Any,
        ref_model: PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        args = option_checks.prepared_arguments(args, model, peft_config, DPOConfig, SharedQuestionDPOConfig)
        if isinstance(ref_model, str):
            raise TypeError(f"ref_model must be a model, got the name {ref_model!r}; leave it out, or load it")
        reads_images = not isinstance(processing_class, PreTrainedTokenizerBase)
        images = reads_images and train_dataset is not None and data_checks.has_images(train_dataset)
        images = images and hasattr(config_of(model, args), "vision_config")
        way = "pass a processor as processing_class and a training dataset with images, or remove the column"
        as_text = functools.partial(data_checks.without_media, images=images, way=way)
        datasets = data_checks.each_dataset(as_text, train_dataset, eval_dataset)
        if images:  # TRL prepares text alone
            data_checks.each_dataset(functools.partial(_check_first, args), *datasets)
        if args.label_smoothing and not set(args.loss_type) & set(_SMOOTHED_LOSSES):
            raise ValueError(
                f"label_smoothing={args.label_smoothing} changes nothing with loss_type={args.loss_type}; leave it at "
                f"0, or choose a loss_type that reads it: {', '.join(_SMOOTHED_LOSSES)}"
            )
        data_collator = option_checks.checked_collator(
            data_collator,
            DataCollatorForSharedQuestion,
            max_length=args.max_length,
            truncation_mode=args.truncation_mode,
            row_length=getattr(args, "row_length", None),
            pad_to_multiple_of=args.pad_to_multiple_of,  # TRL has resolved "auto"
        )
        self._parts = context_parallel_size(args)
        if self._parts > 1:
            refuse(images, "an image's tokens would be on several ranks; set cp_size=1")
            refuse(kwargs.get("compute_metrics") is not None, "compute_metrics would get shards of rows; leave it out")
            require_fused_head("cp_size > 1 (parallelism_config)")
        data_collator = pad_for_parts(data_collator, self._parts)
        self._hooked = False
        self._creates_reference = ref_model is None
        kwargs |= {"processing_class": processing_class, "peft_config": peft_config}
        with flashmask_policy(model, args, reference=True):
            super().__init__(model, ref_model, args, data_collator, *datasets, **kwargs)
        if images:
            prepare_models(self)
            reader, rope_index = VisionPreferences(self.processing_class), rope_index_of(self.model)
            self.data_collator = replace(self.data_collator, read_images=reader, rope_index=rope_index)
        add_callbacks(self, model)
        data_checks.check_prepared(self)
        self._hook_models()

    def _hook_models(self) -> None:
        """Make policy and reference run packed rows, and check the datasets, once: TRL's `__init__` may use models."""
        if self._hooked:
            return
        self._hooked = True
        # TRL before 1.15 loads the reference without the policy's attention.
        run_packed_models(self, sets_reference=self._creates_reference)
        self._start_context_parallel(self._parts)
        self._tp_size = 1  # gathers leave copies out, for which TRL would divide
        data_checks.check_examples(self)

    def _prepare_dataset(
        self, dataset: Dataset | IterableDataset, processing_class: Any, args: Any, dataset_name: str
    ) -> Dataset | IterableDataset:
        dataset = data_checks.without_media(unformatted(dataset), dataset_name)
        first = first_row(dataset, f"the {dataset_name} dataset")
        _check_weights(args, first, f"the {dataset_name} dataset")
        if {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(first):
            return self._checked(dataset, dataset_name)
        refuse_transform(dataset, f"the {dataset_name} dataset")
        columns = [name for name in first if name not in ("tools", "chat_template_kwargs", WEIGHT)]
        options = data_checks.map_options(dataset, args, f"Reading {dataset_name} dataset")
        with global_then_local_main_first():
            dataset = dataset.map(preference_columns, with_indices=True, remove_columns=columns, **options)
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        why = f"has a question that fills max_length={args.max_length}"
        data_checks.report_dropped(dataset, prepared, dataset_name, why)
        return self._checked(prepared, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if WEIGHT not in self._signature_columns:
            self._signature_columns.append(WEIGHT)

    def _checked(self, dataset: Any, name: str) -> Any:
        """Return a prepared dataset; check those passed to `evaluate`, after `__init__`."""
        if self._hooked and isinstance(dataset, Dataset):
            data_checks.check_rows(dataset, self.data_collator, self.args, name)
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self._hook_models()  # TRL's __init__ calls this method
        if isinstance(dataset, Dataset):  # its fingerprint names TRL's cache file
            options = (self.data_collator.max_length, self.data_collator.truncation_mode, self.ld_alpha)
            dataset = copy.copy(dataset)
            dataset._fingerprint = Hasher.hash((dataset._fingerprint, options))
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Compute the reference's log-probabilities of one batch."""
        check_compiled(model, inputs[VECTORS].device)
        inputs = {name: x for name, x in inputs.items() if name != PAIR_WEIGHTS}
        return super().compute_ref_log_probs(self._on_shards(model), inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        for part in (model, self.ref_model):
            if part is not None:
                check_compiled(part, inputs[VECTORS].device)
        log_sharing(self, "train" if model.training else "eval", inputs[VECTORS], inputs["attention_mask"])
        if self._cp_size == 1:
            return super()._compute_loss(model, inputs, return_outputs)
        refuse(return_outputs, "predictions would be of shards of rows; predict with cp_size=1")
        if not self.precompute_ref_logps:  # TRL would call the reference on whole rows
            reference = self.model if self.ref_model is None else self.ref_model
            chosen, rejected = self.compute_ref_log_probs(reference, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        with mock.patch.object(self, "precompute_ref_logps", True):
            return super()._compute_loss(self._on_shards(model), inputs, return_outputs)


def _check_weights(args: DPOConfig, first: dict[str, Any], name: str) -> None:
    """Warn of weights in the first row of a dataset that are not read; a ValueError for some that are."""
    warn_of_weights(first, name, read=WEIGHT)
    if first.get(WEIGHT) is not None:
        check_pair_weights(args)


def _check_first(args: DPOConfig, dataset: Any, name: str) -> None:
    """Check weights and format of the first row of a dataset with images."""
    first = first_row(dataset, f"the {name} dataset")
    _check_weights(args, first, f"the {name} dataset")
    preference_columns(first, 0)
